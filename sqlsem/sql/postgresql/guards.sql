-- sqlsem, guarded tables, for PostgreSQL: a trigger refuses each write of a transaction that has not asserted a grant
-- of the table's resource. May be run again at any time, after routines.sql. Its limits: docs/howto/transactions.md.
--
-- One setting names the rows that a transaction has pinned (note_pin); another names the grant that a connection uses
-- for a while (Grant.session). Any login may write these settings, so the trigger does not trust them: it pins the
-- named rows itself, by the same rules as `pin`. So a forged note gains no more than a call of `pin`.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Return the note for a connection that uses a grant for a while: the position and its owner, which changes at a
-- hand-over. NULL: there is no such grant.
CREATE OR REPLACE FUNCTION {schema}.session_entry(p_resource varchar, p_position bigint, p_requesting_id varchar) RETURNS text
{sql_stable_indexed_definer}
    SELECT format('%s:%s', queue_position, member_id) FROM {schema}.{table}
    WHERE resource_id = p_resource AND queue_position = p_position AND requesting_id = p_requesting_id
      AND member_id IS NOT NULL AND granted_at IS NOT NULL
$$;

-- Raise if the transaction has not pinned a grant of the resource. The trigger of guarded tables, once for each
-- statement; its argument is the resource.
CREATE OR REPLACE FUNCTION {schema}.check_guard() RETURNS trigger {plpgsql_generic_definer}
DECLARE
    v_pinned    text := coalesce(current_setting('sqlsem.{schema}_pinned', true), '');
    v_session   text := coalesce(current_setting('sqlsem.{schema}_session', true), '');
    v_positions bigint[] := '{}';
    v_asserted  bigint[];
    v_row       record;
BEGIN
    IF v_pinned ~ E'^\\d+( \\d{1,18}:[0-9a-f]{32})+$' AND split_part(v_pinned, ' ', 1) = pg_current_xact_id()::text THEN
        v_positions := ARRAY(SELECT split_part(p, ':', 1)::bigint FROM unnest((string_to_array(v_pinned, ' '))[2:]) AS u (p));
    ELSE
        v_pinned := '';  -- the note is another transaction's, or a login has written it
    END IF;
    v_asserted := v_positions;
    IF v_session ~ E'^\\d{1,18}:\\d{1,18}( \\d{1,18}:\\d{1,18})*$' THEN
        v_positions := v_positions || ARRAY(SELECT split_part(p, ':', 1)::bigint FROM unnest(string_to_array(v_session, ' ')) AS u (p));
    END IF;
    -- Prefer a writer's grant, in case a reader's is named, too. (A row that is there, and is pinned now, was not lost
    -- since.)
    SELECT t.queue_position, t.access_type INTO v_row
    FROM {schema}.{table} AS t LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE t.resource_id = TG_ARGV[0] AND t.queue_position = ANY (v_positions) AND t.granted_at IS NOT NULL
      AND (t.queue_position = ANY (v_asserted)
           OR strpos(format(' %s ', v_session), format(' %s:%s ', t.queue_position, t.member_id)) > 0)
      AND CASE WHEN m.member_id IS NULL
               THEN strpos(v_pinned, format(' %s:%s', t.queue_position, {schema}.pin_seal(t.queue_position, t.member_id))) > 0
               WHEN m.login = session_user THEN true
               ELSE {schema}.may_pin(m.login) END
    ORDER BY t.access_type = 'write' DESC LIMIT 1
    FOR SHARE OF t;
    IF v_row.access_type = 'write' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'sqlsem: % on %.% needs the lock % in its transaction, %', TG_OP, quote_ident(TG_TABLE_SCHEMA),
        quote_ident(TG_TABLE_NAME), quote_literal(TG_ARGV[0]),
        CASE WHEN FOUND THEN format('and position %s has access %s, not write', v_row.queue_position, v_row.access_type)
             WHEN v_positions = '{}' THEN 'which has asserted none'
             ELSE 'and what it has asserted is no grant of it that is (still) held' END
        USING ERRCODE = '55000', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
              HINT = CASE WHEN FOUND THEN 'Take the lock for writing.'
                          WHEN v_positions = '{}' THEN
                              'Assert it after BEGIN: grant.assert_held(cursor), grant.session(connection) or CALL {schema}.assert_holding(…).'
                          ELSE 'ROLLBACK: another requester may hold it now. Then take the lock again.' END;
END
$$;


-- Adding and removing guards: with the caller's rights --------------------------------------------------------------

-- Return a table and all tables that inherit from it, also partitions of partitions. (A statement fires only the
-- statement triggers of the table that it names.)
CREATE OR REPLACE FUNCTION {schema}.table_and_partitions(p_table regclass) RETURNS SETOF regclass {sql_stable}
    WITH RECURSIVE member AS (
        SELECT p_table::oid AS relation UNION SELECT i.inhrelid FROM member AS m JOIN pg_inherits AS i ON i.inhparent = m.relation)
    SELECT relation::regclass FROM member ORDER BY relation = p_table DESC, relation
$$;

-- Return the guards, one for each table.
CREATE OR REPLACE FUNCTION {schema}.guards()
RETURNS TABLE (relation regclass, resource_id text, trigger_name name, fires boolean) {sql_stable}
    SELECT t.tgrelid::regclass, convert_from(substring(t.tgargs FROM 1 FOR length(t.tgargs) - 1), getdatabaseencoding()),
           t.tgname, t.tgenabled IN ('O', 'A')
    FROM pg_trigger AS t WHERE t.tgfoid = '{schema}.check_guard()'::regprocedure
$$;

-- Guard a table and its partitions, also those added since: a write needs the asserted lock of p_resource. Return the
-- number of triggers that were created or enabled. The caller needs the right to put triggers on the table.
CREATE OR REPLACE FUNCTION {schema}.guard_table(p_table regclass, p_resource text) RETURNS integer {plpgsql}
DECLARE
    v_what   record;
    v_one    record;
    v_number integer := 0;
BEGIN
    PERFORM {schema}.check_name('resource', p_resource);
    SELECT c.relkind, c.relpersistence, n.nspname, n.nspname IN ('{schema}', 'pg_catalog', 'information_schema') AS ours,
           (SELECT i.inhparent::regclass FROM pg_inherits AS i WHERE i.inhrelid = c.oid ORDER BY i.inhseqno LIMIT 1) AS parent
    INTO v_what FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = p_table;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'sqlsem: there is no such table' USING ERRCODE = '42P01', HINT = 'Name it with its schema, quoted where it must be.';
    ELSIF v_what.relkind NOT IN ('r', 'p') OR v_what.relpersistence = 't' OR v_what.ours THEN
        RAISE EXCEPTION 'sqlsem: % cannot be guarded: only ordinary and partitioned tables can, no views, temporary tables or tables of the system', p_table
            USING ERRCODE = '42809';
    ELSIF v_what.parent IS NOT NULL THEN
        RAISE EXCEPTION 'sqlsem: % belongs to %, through which it can be written; guard that', p_table, v_what.parent
            USING ERRCODE = '42809';
    END IF;
    {lock_timeout:5s}
    FOR v_one IN
        SELECT f.relation, c.relkind, g.resource_id, g.trigger_name, g.fires
        FROM {schema}.table_and_partitions(p_table) AS f (relation) JOIN pg_class AS c ON c.oid = f.relation
        LEFT JOIN {schema}.guards() AS g ON g.relation = f.relation
    LOOP
        IF v_one.resource_id IS NULL THEN
            EXECUTE format('CREATE TRIGGER {schema}_guard BEFORE INSERT OR UPDATE OR DELETE%s ON %s FOR EACH STATEMENT '
                           'EXECUTE FUNCTION {schema}.check_guard(%L)',
                           CASE WHEN v_one.relkind <> 'f' THEN ' OR TRUNCATE' END, v_one.relation, p_resource);
        ELSIF v_one.resource_id <> p_resource THEN
            RAISE EXCEPTION 'sqlsem: % is guarded by % already', v_one.relation, quote_literal({schema}.escape_control_chars(v_one.resource_id))
                USING ERRCODE = '42710', HINT = format('First: SELECT {schema}.unguard_table(%L).', p_table);
        ELSIF NOT v_one.fires THEN
            EXECUTE format('ALTER TABLE %s ENABLE TRIGGER %I', v_one.relation, v_one.trigger_name);
        ELSE
            CONTINUE;
        END IF;
        v_number := v_number + 1;
    END LOOP;
    RETURN v_number;
END
$$;

-- Remove the guards of a table and its partitions; return the number of removed triggers. Only the table's owner may do
-- this.
CREATE OR REPLACE FUNCTION {schema}.unguard_table(p_table regclass) RETURNS integer {plpgsql}
DECLARE
    v_one    record;
    v_number integer := 0;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_class WHERE oid = p_table) THEN
        RAISE EXCEPTION 'sqlsem: there is no such table' USING ERRCODE = '42P01', HINT = 'Name it with its schema, quoted where it must be.';
    END IF;
    SELECT i.inhparent::regclass AS parent INTO v_one
    FROM pg_inherits AS i JOIN {schema}.guards() AS g ON g.relation = i.inhparent WHERE i.inhrelid = p_table LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'sqlsem: % is guarded as a part of %', p_table, v_one.parent
            USING ERRCODE = '42809', HINT = format('SELECT {schema}.unguard_table(%L) takes all of them off.', v_one.parent);
    END IF;
    {lock_timeout:5s}
    FOR v_one IN
        SELECT g.relation, g.trigger_name FROM {schema}.table_and_partitions(p_table) AS f (relation) JOIN {schema}.guards() AS g ON g.relation = f.relation
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', v_one.trigger_name, v_one.relation);
        v_number := v_number + 1;
    END LOOP;
    RETURN v_number;
END
$$;

-- Return the guarded tables, without partitions of guarded tables, and the problems of their guards.
CREATE OR REPLACE FUNCTION {schema}.guarded_tables()
RETURNS TABLE (schema_name name, table_name name, resource_id text, problem text) {sql_stable}
    WITH g AS MATERIALIZED (SELECT * FROM {schema}.guards())
    SELECT n.nspname, c.relname, g.resource_id,
           CASE WHEN NOT g.fires THEN 'its trigger is disabled'
                WHEN p.parent IS NOT NULL THEN format('it can be written through %s, which is not guarded', p.parent)
                WHEN f.open IS NOT NULL THEN format('%s can be written directly: it is not guarded, by the same resource', f.open) END
    FROM g JOIN pg_class AS c ON c.oid = g.relation JOIN pg_namespace AS n ON n.oid = c.relnamespace
    LEFT JOIN LATERAL (SELECT i.inhparent::regclass AS parent, u.relation IS NOT NULL AS known
                       FROM pg_inherits AS i LEFT JOIN g AS u ON u.relation = i.inhparent AND u.resource_id = g.resource_id
                       WHERE i.inhrelid = g.relation ORDER BY u.relation IS NOT NULL LIMIT 1) AS p ON true
    CROSS JOIN LATERAL (SELECT min(f.relation::text) AS open
                        FROM {schema}.table_and_partitions(g.relation) AS f (relation)
                        WHERE NOT EXISTS (SELECT FROM g AS o WHERE o.relation = f.relation AND o.resource_id = g.resource_id AND o.fires)) AS f
    WHERE p.known IS NOT TRUE
    ORDER BY 1, 2
$$;
