-- sqlsem, routines for PostgreSQL. May be run again at any time, also while locks are held.
--
-- Application (advisory) locks used, each in a class of its own made from the schema's name:
--   class + 0, hash of the resource   gate     held for the length of one registration
--   class + 1, beacon                 beacon   held by a member's session for as long as it lives
--   class + 2, queue_position         entry    the wakeup lock: held by the session of a row's owner until the row is
--                                     deleted
--   class + 3, queue_position         waiting  held by a session while it waits for that row's grant
--   class + 4, hash of the batch      batch    held for the length of one decision about batches (batches.sql)
--   class + 5, 1                      news     shared by sessions that listen for tasks (tasks.sql)
--   class + 6, hash of the queue      put      shared by each put of tasks, for its length (tasks.sql)
--   class + 7, member                 number   shared by the member's registrations, each for its length (advance_low_water_marks)
-- Any login can compute these numbers, and take such a lock. So each wait for one is bounded, and kept_locks names the
-- sessions that keep one. Where speed does not matter the lock is one on a table instead, which strangers cannot take:
--   installer      SHARE ROW EXCLUSIVE: one installer at a time (client.sql, is_upgraded)
--   setting        row schema_version: locked while numbers are set forward after a promotion (check_origin)
--   limit_pattern  ROW SHARE: a request uses the server's limit; EXCLUSIVE: a limit is raised or removed
--                  (check_registration, set_resource)
--   queue_key      ROW SHARE: a claim reads a queue without limits; EXCLUSIVE: limits of queues are set
--                  (block_first_limit)
-- A commit is visible before its transaction's locks are released: several routines rely on that.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Return the first key of a lock, for a class of the list above.
CREATE OR REPLACE FUNCTION {schema}.lock_class(p_kind integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT (pg_catalog.hashtext('sqlsem.{schema}'::pg_catalog.text) OPERATOR(pg_catalog.&) 2147483640) OPERATOR(pg_catalog.+) p_kind $$;

-- Return the second key of a lock, for a number: its lowest 31 bits.
CREATE OR REPLACE FUNCTION {schema}.lock_key(p_number bigint) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT (p_number OPERATOR(pg_catalog.&) 2147483647)::pg_catalog.int4 $$;

-- Return true if no session holds a lock now. (Simple enough, like the functions above, for the planner to inline it;
-- so it must not set its search_path.)
CREATE OR REPLACE FUNCTION {schema}.is_free(p_class integer, p_key integer) RETURNS boolean
LANGUAGE sql VOLATILE
AS $$
    SELECT CASE WHEN pg_catalog.pg_try_advisory_lock_shared(p_class, p_key)
                THEN pg_catalog.pg_advisory_unlock_shared(p_class, p_key) ELSE false END
$$;

-- Wait until no session holds a lock; return false if that takes longer than the timeout.
CREATE OR REPLACE FUNCTION {schema}.wait_until_lock_free(p_class integer, p_key integer, p_timeout_ms integer) RETURNS boolean
{plpgsql}
DECLARE
    v_done boolean;
BEGIN
    -- (Assignments, as PL/pgSQL evaluates an expression without a query.)
    v_done := set_config('lock_timeout', p_timeout_ms::text, true) IS NULL;
    v_done := pg_advisory_lock_shared(p_class, p_key) IS NULL;
    RETURN pg_advisory_unlock_shared(p_class, p_key);
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;

-- Escape the control characters of a text, for messages.
CREATE OR REPLACE FUNCTION {schema}.escape_control_chars(p_text text) RETURNS text {sql_immutable}
    SELECT CASE WHEN p_text !~ E'[\\u0001-\\u001F\\u007F-\\u009F\\u200E\\u200F\\u202A-\\u202E\\u2066-\\u2069]' THEN p_text
                ELSE (SELECT string_agg(CASE WHEN c ~ E'[\\u0001-\\u001F\\u007F-\\u009F\\u200E\\u200F\\u202A-\\u202E\\u2066-\\u2069]'
                                             THEN E'\\u' || lpad(to_hex(ascii(c)), 4, '0') ELSE c END, '' ORDER BY n)
                      FROM regexp_split_to_table(p_text, '') WITH ORDINALITY AS u (c, n)) END
$$;

-- Take a lock exclusively, until the transaction ends. Any login can keep such a lock. So this wait ends after a minute
-- if the session has no lock_timeout, and with an error that names the sessions that have the lock.
CREATE OR REPLACE FUNCTION {schema}.take_exclusive_lock(p_class integer, p_key integer, p_what text) RETURNS void
{plpgsql}
DECLARE
    v_before text := current_setting('lock_timeout');
BEGIN
    IF pg_try_advisory_xact_lock(p_class, p_key) THEN
        RETURN;
    END IF;
    BEGIN
        IF v_before = '0' THEN
            PERFORM set_config('lock_timeout', '60s', true);
        END IF;
        PERFORM pg_advisory_xact_lock(p_class, p_key);
        PERFORM set_config('lock_timeout', v_before, true);
    EXCEPTION WHEN lock_not_available THEN
        RAISE EXCEPTION 'sqlsem: % is kept in an open transaction: %', p_what, {schema}.describe_advisory_lock(p_class, p_key)
            USING ERRCODE = '55P03', HINT = 'Try again when that has ended; pg_terminate_backend(pid) ends it.';
    END;
END
$$;

-- Describe the sessions that have a lock.
CREATE OR REPLACE FUNCTION {schema}.describe_advisory_lock(p_class integer, p_key integer) RETURNS text {sql}
    SELECT coalesce(string_agg(DISTINCT format('session %s (login %s)', l.pid, {schema}.escape_control_chars(a.usename)), ', '), 'a session that has just ended')
    FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted AND l.pid <> pg_backend_pid()
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid::bigint = p_class AND l.objid::bigint = p_key::bigint & 4294967295
$$;

-- Release this session's lock when its transaction has ended, just after its commit is visible: the waiters must not
-- wake before. (It is taken once more for the transaction; 'try' fails only if another session holds it.)
CREATE OR REPLACE FUNCTION {schema}.release_session_lock_after_commit(p_class integer, p_key integer) RETURNS boolean
LANGUAGE sql VOLATILE
AS $$
    SELECT CASE WHEN pg_catalog.pg_try_advisory_xact_lock(p_class, p_key) THEN pg_catalog.pg_advisory_unlock(p_class, p_key)
                ELSE false END
$$;

-- Return true if an installer holds its lock, which only the schema's owner and superusers can take.
CREATE OR REPLACE FUNCTION {schema}.is_installing() RETURNS boolean {sql_definer}
    SELECT EXISTS (SELECT FROM pg_locks
                   WHERE locktype = 'relation' AND relation = '{schema}.installer'::regclass AND granted
                     AND mode IN ('ShareRowExclusiveLock', 'AccessExclusiveLock')
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
$$;

-- Return true if an upgrade of the tables is under way: waiting sessions then pause. (The installer has written its
-- number into the sequence, outside of its transaction, and a session reads a sequence without a query. A failed
-- installer leaves its number there, so the lock is tested, too.)
CREATE OR REPLACE FUNCTION {schema}.is_upgraded() RETURNS boolean
LANGUAGE sql VOLATILE
AS $$
    SELECT CASE WHEN pg_catalog.pg_sequence_last_value('{schema}.installer_backend_pid_seq'::pg_catalog.regclass) IS NULL THEN false
                ELSE {schema}.is_installing() END
$$;


-- Refuse a schema in which logins other than its owner, the installer, can replace an object of sqlsem: every caller of
-- the object would run that login's code. (Superusers are trusted anyway.)
DO $$
DECLARE
    v_owner name;
    v_other text;
BEGIN
    SELECT o.rolname INTO v_owner FROM pg_namespace AS n JOIN pg_roles AS o ON o.oid = n.nspowner
    WHERE n.oid = '{schema}'::regnamespace AND n.nspowner <> current_user::regrole AND NOT o.rolsuper;
    IF FOUND THEN
        RAISE EXCEPTION 'sqlsem: schema {schema} belongs to %, who could replace what % installs there', v_owner, current_user
            USING ERRCODE = '42501', HINT = format('Install as %s, or first: ALTER SCHEMA {schema} OWNER TO %I.', v_owner, current_user);
    END IF;
    SELECT format('%s belongs to %s', f.what, o.rolname) INTO v_other
    FROM (SELECT oid::regprocedure::text AS what, proowner AS owner FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace
          UNION ALL
          SELECT oid::regclass::text, relowner FROM pg_class WHERE relnamespace = '{schema}'::regnamespace AND relkind IN ('r', 'v', 'S', 'm', 'f')
          UNION ALL
          SELECT format('operator %s', oid::regoperator), oprowner FROM pg_operator WHERE oprnamespace = '{schema}'::regnamespace) AS f
    JOIN pg_roles AS o ON o.oid = f.owner
    JOIN pg_namespace AS n ON n.oid = '{schema}'::regnamespace
    WHERE f.owner NOT IN (n.nspowner, current_user::regrole) AND NOT o.rolsuper
    ORDER BY 1 LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'sqlsem: %, and not to the owner of schema {schema}', v_other
            USING ERRCODE = '42501', HINT = 'Look at it, then drop it, or give it to the owner of the schema (ALTER … OWNER TO).';
    END IF;
    SELECT coalesce(o.rolname, 'PUBLIC') INTO v_other
    FROM pg_namespace AS n CROSS JOIN LATERAL aclexplode(n.nspacl) AS a LEFT JOIN pg_roles AS o ON o.oid = a.grantee
    WHERE n.oid = '{schema}'::regnamespace AND a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner
      AND NOT coalesce(o.rolsuper, false)
    ORDER BY 1 LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'sqlsem: % may create objects in schema {schema}, and so could replace those that users of sqlsem run', v_other
            USING ERRCODE = '42501', HINT = format('REVOKE CREATE ON SCHEMA {schema} FROM %s.', v_other);
    END IF;
END
$$;


-- Refuse to run in a transaction in which the guarantees would not hold.
CREATE OR REPLACE FUNCTION {schema}.require_outside_transaction(p_what text) RETURNS void {plpgsql}
BEGIN
    -- A transaction that has written cannot be a statement of its own. (A transaction that has only read cannot be
    -- detected here. Inside one a registration stays safe, as the gate is kept until the commit, but it blocks all
    -- others.)
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RAISE EXCEPTION 'sqlsem: % must not be called inside an open transaction; commit first and use autocommit', p_what
            USING ERRCODE = '25001';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'sqlsem: % needs READ COMMITTED, not %', p_what, current_setting('transaction_isolation')
            USING ERRCODE = '25001', HINT = 'SET default_transaction_isolation TO ''read committed'' on this connection.';
    END IF;
END
$$;


-- Return where numbers and heartbeats come from. place: the cluster; its timeline, which every promotion and every
-- recovery to a point in time changes (the control file shows it too late); the table, which a restore from a dump
-- creates anew. started: when the server was started.
CREATE OR REPLACE FUNCTION {schema}.origin(OUT place text, OUT started text) {plpgsql}
BEGIN
    started := extract(epoch FROM pg_postmaster_start_time())::text;
    place := format('%s %s', left(pg_walfile_name(pg_current_wal_insert_lsn()), 8), '{schema}.{table}'::regclass::oid);
    BEGIN
        SELECT format('%s %s', system_identifier, place) INTO place FROM pg_control_system();
    EXCEPTION WHEN insufficient_privilege THEN
        RETURN;  -- a hosted service hides the cluster's identifier: the rest must suffice
    END;
END
$$;

-- Return the identity of this database on this running server. A copy of the database has another one, and so has the
-- database after a failover.
CREATE OR REPLACE FUNCTION {schema}.database_identity() RETURNS text {sql_definer}
    SELECT concat_ws(' ', o.place, o.started, d.oid)
    FROM {schema}.origin() AS o CROSS JOIN pg_database AS d WHERE d.datname = current_database()
$$;

-- Return true if the origin is the one that settings `origin` and `started` record.
CREATE OR REPLACE FUNCTION {schema}.same_origin() RETURNS boolean {sql}
    SELECT count(*) = 2 FROM {schema}.setting AS s CROSS JOIN {schema}.origin() AS o
    WHERE s.name = 'origin' AND s.value = o.place OR s.name = 'started' AND s.value = o.started
$$;

-- Set numbers forward, and restart all leases and graces, if the origin has changed; return true if it had.
-- A restored database, and a standby that was promoted before it had received everything, would hand out numbers for a
-- second time: fences would repeat, and a removed member would find another member under its number. So from then on
-- numbers begin at the next multiple of 10^10, at least 10^9 further (10^6 and 10^5 for numbers of type integer).
-- After each of these events, and after a restart of the server, all beacons are missing. The last heartbeats may be
-- missing, too, as they are not made durable at once, and the clock may be another one. So the grace and the lease of
-- each member begin anew, and so does the time that a holder has after a revocation.
-- Called before a session that is new to sqlsem gets a number, and before any member is removed. While the origin is
-- unchanged, a call costs next to nothing.
CREATE OR REPLACE FUNCTION {schema}.check_origin() RETURNS boolean {plpgsql}
DECLARE
    v_origin record;
    v_known  text;
    v_number record;
BEGIN
    IF {schema}.same_origin() THEN
        RETURN false;
    END IF;
    PERFORM FROM {schema}.setting WHERE name = 'schema_version' FOR UPDATE;  -- one session at a time does the following
    IF {schema}.same_origin() THEN  -- another session was faster
        RETURN false;
    END IF;
    SELECT * INTO v_origin FROM {schema}.origin();
    SELECT value INTO v_known FROM {schema}.setting WHERE name = 'origin';
    IF v_known IS NULL THEN
        -- The tables are new, perhaps in place of dropped ones: a process that was a member there must not find another
        -- member under its number.
        PERFORM setval(pg_get_serial_sequence('{schema}.member', 'member_id'),
                       coalesce((SELECT max(member_id) FROM {schema}.member), 0) + (random() * 1000000000)::bigint + 1);
    ELSIF v_known <> v_origin.place THEN
        FOR v_number IN
            SELECT s.sequence, greatest(s.given, q.last_value) AS last, q.data_type = 'bigint'::regtype AS large
            FROM (SELECT pg_get_serial_sequence('{schema}.{table}', 'queue_position') AS sequence,
                         (SELECT max(queue_position) FROM (SELECT queue_position FROM {schema}.{table}
                                                           UNION ALL SELECT queue_position FROM {schema}.history) AS p) AS given
                  UNION ALL SELECT pg_get_serial_sequence('{schema}.member', 'member_id'), (SELECT max(member_id) FROM {schema}.member)
                  -- feature: queue
                  UNION ALL SELECT pg_get_serial_sequence('{schema}.task', 'task_id'), (SELECT max(task_id) FROM {schema}.task)
                  -- end of feature: queue
                  -- feature: batches
                  UNION ALL SELECT pg_get_serial_sequence('{schema}.batch', 'batch_id'), (SELECT max(batch_id) FROM {schema}.batch)
                  -- end of feature: batches
                 ) AS s
            JOIN pg_sequences AS q ON s.sequence = format('%I.%I', q.schemaname, q.sequencename)
        LOOP
            PERFORM setval(v_number.sequence, CASE
                WHEN v_number.large THEN ((coalesce(v_number.last, 0) + 1000000000) / 10000000000 + 1) * 10000000000
                ELSE ((coalesce(v_number.last, 0) + 100000) / 1000000 + 1) * 1000000 END);
        END LOOP;
    END IF;
    DELETE FROM {schema}.low_water;  -- the marks may not be true of the restored rows
    UPDATE {schema}.member
    SET heartbeat_at = clock_timestamp(), lease_until = clock_timestamp() + lease_ms * interval '1 millisecond', missing_since = NULL;
    UPDATE {schema}.{table} SET revoked_at = clock_timestamp()
    WHERE queue_position IN (SELECT queue_position FROM {schema}.{table} WHERE revoked_at IS NOT NULL FOR UPDATE SKIP LOCKED);
    INSERT INTO {schema}.setting (name, value) VALUES ('origin', v_origin.place), ('started', v_origin.started)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value;
    RETURN true;
END
$$;


-- Low-water marks ------------------------------------------------------------------------------------------------
--
-- An old snapshot (a long report, a dump, a prepared transaction, a standby's feedback) keeps deleted rows, and their
-- entries in the indexes: a search for the first row of a resource would have to pass all rows that left since. But
-- positions only grow, registrations on a resource follow each other (the gate), and rows ahead only leave. So if at
-- some time no row below a position lives except a few survivors, that stays true for ever. A mark records it. Each
-- read begins at the newest mark: its index entry comes first. The rows of a member have such marks as well, under a
-- key that no resource can have.
--
-- A mark of a resource is written under the gate: by a registration, by a waiter that is granted, or by a waiter that
-- is about to wait. It is never above the position of that row. A mark of a member is written only by its
-- registrations; a session that gives rows to the member (adopt) waits for these. If numbers ever go back (rows are
-- restored, or the sequence is set), the first registration below a resource's mark deletes all marks above its own
-- number, and begins again.
-- Registrations do not read the marks of members: these only serve to list a member's rows. If such a mark wrongly
-- hides a row, the member believes that the row is gone, and nothing is granted by mistake.

-- Return the key of a member's marks. (No resource has a name with a tab.)
CREATE OR REPLACE FUNCTION {schema}.member_key(p_member bigint) RETURNS varchar
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT (E'\tmember '::pg_catalog.text OPERATOR(pg_catalog.||) p_member::pg_catalog.text)::varchar $$;

-- The rows of a resource before a position, the last one first. (These functions are simple enough for the planner to
-- inline them, so they cannot set their search_path. A query that stops early reads no further.)
CREATE OR REPLACE FUNCTION {schema}.rows_before_newest_first(p_resource varchar, p_before bigint) RETURNS SETOF {schema}.{table}
LANGUAGE sql STABLE
AS $$
    (SELECT * FROM {schema}.{table}
     WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text AND queue_position OPERATOR(pg_catalog.<) p_before
       AND queue_position OPERATOR(pg_catalog.>=) coalesce((
           SELECT mark FROM {schema}.low_water WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text
           ORDER BY mark DESC LIMIT 1), 0::bigint)
     ORDER BY queue_position DESC)
    UNION ALL
    (SELECT * FROM {schema}.{table}
     WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text AND queue_position OPERATOR(pg_catalog.<) p_before
       AND queue_position OPERATOR(pg_catalog.=) ANY ((
           SELECT survivors FROM {schema}.low_water WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text
           ORDER BY mark DESC LIMIT 1)::bigint[])
     ORDER BY queue_position DESC)
$$;

-- The rows of a resource before a position, the first one first.
CREATE OR REPLACE FUNCTION {schema}.rows_before_oldest_first(p_resource varchar, p_before bigint) RETURNS SETOF {schema}.{table}
LANGUAGE sql STABLE
AS $$
    (SELECT * FROM {schema}.{table}
     WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text AND queue_position OPERATOR(pg_catalog.<) p_before
       AND queue_position OPERATOR(pg_catalog.=) ANY ((
           SELECT survivors FROM {schema}.low_water WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text
           ORDER BY mark DESC LIMIT 1)::bigint[])
     ORDER BY queue_position)
    UNION ALL
    (SELECT * FROM {schema}.{table}
     WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text AND queue_position OPERATOR(pg_catalog.<) p_before
       AND queue_position OPERATOR(pg_catalog.>=) coalesce((
           SELECT mark FROM {schema}.low_water WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text
           ORDER BY mark DESC LIMIT 1), 0::bigint)
     ORDER BY queue_position)
$$;

-- The rows of a member, the first one first.
CREATE OR REPLACE FUNCTION {schema}.member_rows(p_member bigint) RETURNS SETOF {schema}.{table}
LANGUAGE sql STABLE
AS $$
    (SELECT * FROM {schema}.{table}
     WHERE member_id OPERATOR(pg_catalog.=) p_member
       AND queue_position OPERATOR(pg_catalog.=) ANY ((
           SELECT survivors FROM {schema}.low_water
           WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) {schema}.member_key(p_member)::pg_catalog.text
           ORDER BY mark DESC LIMIT 1)::bigint[])
     ORDER BY queue_position)
    UNION ALL
    (SELECT * FROM {schema}.{table}
     WHERE member_id OPERATOR(pg_catalog.=) p_member
       AND queue_position OPERATOR(pg_catalog.>=) coalesce((
           SELECT mark FROM {schema}.low_water
           WHERE resource_id::pg_catalog.text OPERATOR(pg_catalog.=) {schema}.member_key(p_member)::pg_catalog.text
           ORDER BY mark DESC LIMIT 1), 0::bigint)
     ORDER BY queue_position)
$$;

-- Return true if a mark should be written now: once in 40 calls. That costs little, and leaves few dead rows to read.
CREATE OR REPLACE FUNCTION {schema}.is_time_for_row_mark() RETURNS boolean
LANGUAGE sql VOLATILE
AS $$ SELECT pg_catalog.random() OPERATOR(pg_catalog.<) 0.025::double precision $$;

-- Write a mark in place of the last one. p_live: the first 201 living rows below p_position, or all if they are fewer.
-- (Waits for no session: if another one is removing the last mark, that is left to it, or to prune.)
CREATE OR REPLACE FUNCTION {schema}.advance_low_water_mark(p_key varchar, p_position bigint, p_live bigint[]) RETURNS void
{plpgsql}
DECLARE
    v_mark   bigint := CASE WHEN cardinality(p_live) > 200 THEN p_live[201] ELSE p_position END;
    v_before bigint := (SELECT mark FROM {schema}.low_water WHERE resource_id = p_key ORDER BY mark DESC LIMIT 1);
BEGIN
    IF v_before >= v_mark THEN
        RETURN;
    END IF;
    INSERT INTO {schema}.low_water (resource_id, mark, survivors) VALUES (p_key, v_mark, p_live[1:200]) ON CONFLICT DO NOTHING;
    DELETE FROM {schema}.low_water
    WHERE resource_id = p_key AND mark = (SELECT mark FROM {schema}.low_water WHERE resource_id = p_key AND mark = v_before
                                          FOR UPDATE SKIP LOCKED);
END
$$;

-- Write the marks of a resource and of a member up to a row: one that is older than the caller's hold of the gate, or
-- that the caller has inserted under the gate. p_member NULL: only the mark of the resource. While another session of
-- the member registers, perhaps with a lower number that is not visible yet, no mark of the member is written. (A
-- registration that begins after this test gets a higher number.)
CREATE OR REPLACE FUNCTION {schema}.advance_low_water_marks(p_resource varchar, p_position bigint, p_member bigint) RETURNS void
{plpgsql}
DECLARE
    v_alone boolean;  -- no other session registers for the member
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN;
    END IF;
    PERFORM {schema}.advance_low_water_mark(p_resource, p_position,
                                ARRAY(SELECT queue_position FROM {schema}.rows_before_oldest_first(p_resource, p_position) LIMIT 201));
    v_alone := CASE WHEN pg_try_advisory_lock({schema}.lock_class(7), {schema}.lock_key(p_member))
                    THEN pg_advisory_unlock({schema}.lock_class(7), {schema}.lock_key(p_member)) END;
    IF v_alone THEN
        DELETE FROM {schema}.low_water  -- the numbers went back, and no resource's mark has shown that yet
        WHERE resource_id = {schema}.member_key(p_member) AND mark > p_position;
        PERFORM {schema}.advance_low_water_mark({schema}.member_key(p_member), p_position,
                                    ARRAY(SELECT queue_position FROM {schema}.member_rows(p_member)
                                          WHERE queue_position < p_position LIMIT 201));
    END IF;
END
$$;


-- Return the longest pattern that a name matches. (Of the prefixes of one text, the longest sorts last.)
CREATE OR REPLACE FUNCTION {schema}.pattern_of(p_resource varchar) RETURNS {schema}.limit_pattern {sql_stable}
    SELECT l FROM {schema}.limit_pattern AS l WHERE l.prefix <= p_resource AND starts_with(p_resource, l.prefix)
    ORDER BY l.prefix DESC LIMIT 1
$$;

CREATE OR REPLACE FUNCTION {schema}.pattern_cap(p_resource varchar) RETURNS integer
{sql_stable} SELECT ({schema}.pattern_of(p_resource)).cap $$;

-- Return the settings of a resource, always as one row: its own limit, or else that of the longest pattern, and since
-- when it is paused. While there is any pattern, table resource has a row '*': without that row the patterns are not
-- read. (Simple enough for the planner to inline it, like the functions above. OFFSET 0 keeps the planner from
-- evaluating it at each use.)
CREATE OR REPLACE FUNCTION {schema}.effective_settings(p_resource varchar) RETURNS TABLE (cap integer, paused_at timestamptz)
LANGUAGE sql STABLE
AS $$
    SELECT CASE WHEN o.cap IS NULL AND o.patterns THEN {schema}.pattern_cap(p_resource) ELSE o.cap END, o.paused_at
    FROM (SELECT pg_catalog.max(r.cap) FILTER (WHERE r.resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text) AS cap,
                 pg_catalog.max(r.paused_at) FILTER (WHERE r.resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text) AS paused_at,
                 pg_catalog.bool_or(r.resource_id::pg_catalog.text OPERATOR(pg_catalog.=) '*'::pg_catalog.text) AS patterns
          FROM {schema}.resource AS r
          WHERE r.resource_id::pg_catalog.text OPERATOR(pg_catalog.=) ANY (ARRAY[p_resource::pg_catalog.text, '*'::pg_catalog.text])) AS o
    OFFSET 0
$$;

-- The rule. A row may be granted (eligible) if there is room for it beside all conflicting rows ahead of its position.
-- If not, `blocker` is the row to wait for, and `until` says what must happen:
--   'leave'    the blocker must leave
--   'grant'    the blocker waits itself: nothing changes for this row before it is granted
--   'any'      this row is next: one of several holders must leave, whichever; the blocker is the oldest of them
--   'paused'   an operator must resume the resource, or raise a limit that is below this row's weight
-- Each row weighs at least 1, so with a limit of N the last N conflicting rows decide, whatever is ahead of them.
-- `mine`: the row of the resource with this uid.
CREATE OR REPLACE FUNCTION {schema}.eligibility(
    p_resource varchar, p_position bigint, p_access varchar, p_limit integer, p_weight integer, p_uid varchar)
RETURNS TABLE (eligible boolean, blocker bigint, until text, mine bigint)
LANGUAGE sql STABLE  -- and simple enough for the planner to inline it; so it cannot set its search_path
AS $$
    SELECT a.over IS NULL AND o.paused_at IS NULL AND (p_weight OPERATOR(pg_catalog.>) least(p_limit, o.cap)) IS NOT TRUE,
           CASE WHEN a.alone OPERATOR(pg_catalog.=) a.over OR a.waiter IS NULL THEN a.over ELSE a.waiter END,
           CASE WHEN a.over IS NULL THEN 'paused' WHEN a.alone OPERATOR(pg_catalog.=) a.over THEN 'leave'
                WHEN a.waiter IS NOT NULL THEN 'grant' ELSE 'any' END,
           (SELECT queue_position FROM {schema}.{table}
            WHERE request_uid::pg_catalog.text OPERATOR(pg_catalog.=) p_uid::pg_catalog.text AND resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text)
    FROM (SELECT 1) AS one
    CROSS JOIN LATERAL {schema}.effective_settings(p_resource) AS o
    CROSS JOIN LATERAL (
        SELECT pg_catalog.max(queue_position) FILTER (
                   WHERE load OPERATOR(pg_catalog.+) p_weight OPERATOR(pg_catalog.>) least(p_limit, o.cap, lowest)) AS over,
               pg_catalog.max(queue_position) FILTER (
                   WHERE weight OPERATOR(pg_catalog.+) p_weight OPERATOR(pg_catalog.>) least(p_limit, o.cap, concurrency_limit)) AS alone,
               pg_catalog.max(queue_position) FILTER (WHERE granted_at IS NULL) AS waiter
        FROM (SELECT queue_position, weight, concurrency_limit, granted_at,
                     pg_catalog.sum(weight) OVER down AS load, pg_catalog.min(concurrency_limit) OVER down AS lowest
              FROM (SELECT * FROM {schema}.rows_before_newest_first(p_resource, p_position)
                    WHERE p_access::pg_catalog.text OPERATOR(pg_catalog.=) 'write'::pg_catalog.text
                       OR access_type::pg_catalog.text OPERATOR(pg_catalog.<>) p_access::pg_catalog.text
                    LIMIT least(p_limit, o.cap)) AS r
              WINDOW down AS (ORDER BY queue_position DESC ROWS UNBOUNDED PRECEDING)) AS s
    ) AS a
$$;


-- Return true if this session holds this beacon. Any login may take an advisory lock, so the holder must be this
-- session.
CREATE OR REPLACE FUNCTION {schema}.holds_beacon(p_pid integer, p_beacon integer) RETURNS boolean {sql}
    SELECT EXISTS (SELECT FROM pg_locks
                   WHERE locktype = 'advisory' AND objsubid = 2 AND mode = 'ExclusiveLock' AND granted AND pid = p_pid
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                     AND classid::bigint = {schema}.lock_class(1) AND objid::bigint = p_beacon)
$$;


-- Return the state of these members, or of all, at one instant, and write nothing. missing: the beacon is missing, or
-- the lease is over. dead: besides, the last heartbeat is older than the grace. since: when the member was first missed,
-- as far as known. On a standby no beacon can be seen, and only leases count. grace: in seconds; NULL with a lease.
CREATE OR REPLACE FUNCTION {schema}.member_liveness(p_members bigint[] DEFAULT NULL)
RETURNS TABLE (member_id bigint, missing boolean, dead boolean, since timestamptz, host varchar, pid integer, program varchar,
               grace float) {sql_indexed}
    WITH held AS MATERIALIZED (
        SELECT objid::bigint AS beacon, pid FROM pg_locks
        WHERE locktype = 'advisory' AND objsubid = 2 AND mode = 'ExclusiveLock' AND granted
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND classid::bigint = {schema}.lock_class(1)),
    server AS MATERIALIZED (
        SELECT pg_is_in_recovery() AS standby,
               CASE WHEN pg_is_in_recovery() THEN NULL WHEN NOT {schema}.same_origin() THEN clock_timestamp() END AS since)
    SELECT m.member_id, gone,
           CASE WHEN m.lease_until IS NOT NULL THEN m.lease_until < clock_timestamp()
                ELSE gone AND greatest(m.heartbeat_at, s.since) + m.grace_ms * interval '1 millisecond' <= clock_timestamp() END,
           CASE WHEN m.lease_until IS NOT NULL THEN m.lease_until
                WHEN m.missing_since IS NOT NULL THEN m.missing_since
                WHEN m.grace_ms > 0 THEN m.heartbeat_at END,  -- without a grace there are no heartbeats
           m.host, coalesce(m.pid, m.backend_pid), m.program, CASE WHEN m.lease_ms IS NULL THEN m.grace_ms / 1000.0::float END
    FROM (SELECT m.* FROM {schema}.member AS m WHERE p_members IS NULL
          UNION ALL
          SELECT m.* FROM {schema}.member AS m WHERE m.member_id = ANY (p_members)) AS m
    CROSS JOIN server AS s
    -- (A subquery, as it is hashed in any case: a join might compare each member with each beacon.)
    CROSS JOIN LATERAL (SELECT CASE WHEN m.lease_until IS NOT NULL THEN m.lease_until < clock_timestamp()
                                    ELSE ((m.beacon::bigint, m.backend_pid) IN (SELECT h.beacon, h.pid FROM held AS h)) IS NOT TRUE
                                         AND NOT s.standby END AS gone) AS g
$$;


-- Delete rows of a member, and write their history. Wakeup locks are released by the end of their sessions, or by
-- release().
CREATE OR REPLACE FUNCTION {schema}.delete_member_rows(p_member {schema}.member, p_outcome text) RETURNS bigint {sql}
    -- A row that an open transaction has pinned (pin) stays until the transaction ends; a later call deletes it.
    WITH free AS (SELECT resource_id, queue_position FROM {schema}.{table}
                  WHERE member_id = p_member.member_id
                    AND queue_position = ANY (ARRAY(SELECT queue_position FROM {schema}.member_rows(p_member.member_id)))
                  FOR UPDATE SKIP LOCKED),
         gone AS (DELETE FROM {schema}.{table} AS t USING free
                  WHERE t.resource_id = free.resource_id AND t.queue_position = free.queue_position RETURNING t.*),
         kept AS (INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id,
                                                owner, note, requested_at, granted_at, outcome, concurrency_limit,
                                                host, pid, program, login, ended_by, heartbeat_at)
                  SELECT resource_id, queue_position, requesting_id, access_type, weight, member_id,
                         owner, note, requested_at, granted_at, p_outcome, concurrency_limit,
                         p_member.host, coalesce(p_member.pid, p_member.backend_pid), p_member.program, p_member.login,
                         CASE WHEN p_outcome = 'reaped' THEN session_user END,
                         CASE WHEN p_outcome = 'reaped' AND (p_member.grace_ms > 0 OR p_member.lease_ms IS NOT NULL)
                              THEN greatest(p_member.heartbeat_at, granted_at) END
                  FROM gone)
    SELECT count(*) FROM gone
$$;


-- Test if a member is alive, and act on the result. Remove the member with its rows if its lease is over, or if its
-- beacon is missing and its last heartbeat is older than its grace. Else note the time when the beacon is first missed,
-- for displays. The first session that tests decides. Return true if something was written.
CREATE OR REPLACE FUNCTION {schema}.check_liveness(p_member bigint, p_mine bigint) RETURNS boolean {plpgsql}
DECLARE
    v_member {schema}.member;
    v_fresh  boolean;
BEGIN
    SELECT * INTO v_member FROM {schema}.member WHERE member_id = p_member;
    IF NOT FOUND OR p_member = p_mine THEN
        RETURN false;
    ELSIF {schema}.check_origin() THEN
        RETURN true;
    END IF;
    IF v_member.lease_until IS NULL THEN
        v_fresh := v_member.heartbeat_at + v_member.grace_ms * interval '1 millisecond' > clock_timestamp();
        -- A session can always share its own lock, so it must not test its own beacon like this. (The session's number
        -- alone proves nothing: it may have been a dead session's, or this one's before a pool reset it.)
        IF (v_member.backend_pid = pg_backend_pid() OR NOT {schema}.is_free({schema}.lock_class(1), v_member.beacon))
           AND (v_fresh AND v_member.backend_pid <> pg_backend_pid()
                OR {schema}.holds_beacon(v_member.backend_pid, v_member.beacon)) THEN
            RETURN false;  -- while the last heartbeat is recent, the lock's holder does not matter
        END IF;
        IF v_fresh THEN
            UPDATE {schema}.member SET missing_since = clock_timestamp()
            WHERE member_id = v_member.member_id AND beacon = v_member.beacon AND missing_since IS NULL
              AND v_member.missing_since IS NULL;
            RETURN FOUND;
        END IF;
    END IF;
    -- This one statement decides. It does not find a member that returns and so changes its beacon or its lease. It
    -- skips a member that is writing its heartbeat, without waiting: that member may be waiting for this session.
    DELETE FROM {schema}.member
    WHERE member_id = (SELECT member_id FROM {schema}.member
                       WHERE member_id = v_member.member_id AND beacon IS NOT DISTINCT FROM v_member.beacon
                         AND CASE WHEN lease_until IS NULL
                                  THEN heartbeat_at + grace_ms * interval '1 millisecond' <= clock_timestamp()
                                  ELSE lease_until < clock_timestamp() END
                       FOR UPDATE SKIP LOCKED)
    RETURNING * INTO v_member;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM {schema}.delete_member_rows(v_member, 'reaped');
    RETURN true;
END
$$;


-- Test if the owner of a blocking row is alive, and act on the result (check_liveness). Remove a stale row. Remove also
-- a row whose waiter lease is over, even if its member is alive or is p_mine. (Such a row waits, or was granted by a
-- reader ahead that upgraded, and its client has not noticed.)
-- Return true if something was written: the caller should then end its transaction, so that other sessions see it.
CREATE OR REPLACE FUNCTION {schema}.check_if_dead(p_resource varchar, p_position bigint, p_mine bigint) RETURNS boolean
{plpgsql}
DECLARE
    v_row    record;
    v_member {schema}.member;
    v_stale  bigint;
BEGIN
    -- Lock nothing before the decision: the caller may sleep long afterwards, in the same transaction.
    SELECT member_id, requested_at, revoked_at, waiter_lease_until < clock_timestamp() AS unattended
    INTO v_row FROM {schema}.{table}
    WHERE resource_id = p_resource AND queue_position = p_position;
    IF v_row.unattended THEN
        RETURN {schema}.remove(p_resource, p_position, 'cancelled');
    ELSIF NOT FOUND OR v_row.member_id = p_mine THEN
        RETURN false;
    END IF;

    IF v_row.member_id IS NULL THEN
        SELECT stale_after_ms INTO v_stale FROM {schema}.resource WHERE resource_id = p_resource;
        IF v_stale IS NULL OR v_row.requested_at + v_stale * interval '1 millisecond' > clock_timestamp() THEN
            RETURN false;
        END IF;
        RETURN {schema}.remove(p_resource, p_position, 'reaped');
    END IF;

    SELECT * INTO v_member FROM {schema}.member WHERE member_id = v_row.member_id;
    IF NOT FOUND THEN
        v_member.member_id := v_row.member_id;
        -- (The row may have gone to another member before its own was removed: member_id is compared once more.)
        RETURN {schema}.delete_member_rows(v_member, 'reaped') > 0
               OR EXISTS (SELECT FROM {schema}.{table} WHERE resource_id = p_resource AND queue_position = p_position
                          AND member_id = v_row.member_id) AND {schema}.remove(p_resource, p_position, 'reaped');
    END IF;
    IF v_row.revoked_at IS NOT NULL AND v_row.revoked_at + v_member.grace_ms * interval '1 millisecond' <= clock_timestamp() THEN
        IF {schema}.check_origin() THEN
            RETURN true;
        END IF;
        RETURN {schema}.remove(p_resource, p_position, 'revoked');
    END IF;
    RETURN {schema}.check_liveness(v_row.member_id, p_mine);
END
$$;


-- Remove one row of any owner, and write its history. Return false if the row is gone, or pinned by an open
-- transaction, or, if p_outcome is 'cancelled', if its waiter lease was renewed.
CREATE OR REPLACE FUNCTION {schema}.remove(p_resource varchar, p_position bigint, p_outcome text) RETURNS boolean
{plpgsql}
BEGIN
    WITH free AS (SELECT queue_position FROM {schema}.{table}
                  WHERE resource_id = p_resource AND queue_position = p_position
                    AND (p_outcome <> 'cancelled' OR waiter_lease_until < clock_timestamp())
                  FOR UPDATE SKIP LOCKED),
         gone AS (DELETE FROM {schema}.{table} AS t USING free
                  WHERE t.resource_id = p_resource AND t.queue_position = free.queue_position RETURNING t.*)
    INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id,
                                  owner, note, requested_at, granted_at, outcome, concurrency_limit,
                                  host, pid, program, login, ended_by)
    SELECT g.resource_id, g.queue_position, g.requesting_id, g.access_type, g.weight, g.member_id,
           g.owner, g.note, g.requested_at, g.granted_at, p_outcome, g.concurrency_limit,
           m.host, coalesce(m.pid, m.backend_pid), m.program, m.login,
           CASE WHEN p_outcome = 'revoked' THEN coalesce(g.revoked_by, session_user)
                WHEN p_outcome <> 'cancelled' AND session_user IS DISTINCT FROM m.login THEN session_user END
    FROM gone AS g LEFT JOIN {schema}.member AS m ON m.member_id = g.member_id;
    RETURN FOUND;
END
$$;


-- Raise for a grace or lease that is longer than an operator allows (settings max_grace and max_lease, in seconds). It
-- is not shortened silently: the caller counts on the time that it asked for.
CREATE OR REPLACE FUNCTION {schema}.check_grace_or_lease(p_what text, p_ms integer) RETURNS void {plpgsql_stable}
DECLARE
    v_maximum text := (SELECT value FROM {schema}.setting WHERE name = 'max_' || p_what);
BEGIN
    IF p_ms > v_maximum::double precision * 1000 THEN
        RAISE EXCEPTION 'sqlsem: a % of % s is longer than the % s that are allowed here', p_what, p_ms / 1000.0::float, v_maximum
            USING ERRCODE = '22023', HINT = format('Ask for less; the limit is setting max_%s.', p_what);
    ELSIF p_ms < 0 OR p_what = 'lease' AND p_ms = 0 OR p_what = 'grace' AND p_ms IS NULL THEN
        RAISE EXCEPTION 'sqlsem: a % of % ms makes no sense', p_what, coalesce(p_ms::text, 'NULL') USING ERRCODE = '22023';
    END IF;
END
$$;


-- Raise if this login has as many members as an operator allows (setting max_members).
CREATE OR REPLACE FUNCTION {schema}.check_members() RETURNS void {plpgsql_stable}
DECLARE
    v_maximum bigint := (SELECT value::bigint FROM {schema}.setting WHERE name = 'max_members');
BEGIN
    IF (SELECT count(*) >= v_maximum FROM (SELECT FROM {schema}.member AS m WHERE m.login = session_user LIMIT v_maximum) AS m) THEN
        RAISE EXCEPTION 'sqlsem: login % has % members, and no more are allowed (setting max_members)', session_user, v_maximum
            USING ERRCODE = '54000', HINT = format('An operator removes them: sqlsem revoke --login %s.', session_user);
    END IF;
END
$$;

-- Take a free beacon. If a stranger holds locks with the next numbers, to block sqlsem, these numbers are skipped.
CREATE OR REPLACE FUNCTION {schema}.take_beacon() RETURNS integer {plpgsql}
DECLARE
    v_beacon integer;
BEGIN
    FOR v_try IN 1..100000 LOOP
        v_beacon := nextval('{schema}.beacon');
        IF pg_try_advisory_lock({schema}.lock_class(1), v_beacon) THEN
            RETURN v_beacon;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'sqlsem: another session holds the locks of the next 100000 beacons' USING ERRCODE = '55P03',
        HINT = 'SELECT pid, count(*) FROM pg_locks WHERE locktype = ''advisory'' GROUP BY 1; shows whose session it is.';
END
$$;


-- Register a new member, with its beacon (or its lease). Called once for each process, on the connection that it keeps.
CREATE OR REPLACE FUNCTION {schema}.register_member(
    p_host varchar, p_pid integer, p_program varchar, p_grace_ms integer, p_lease_ms integer, OUT member_id bigint)
{plpgsql_indexed_definer}
DECLARE
    v_beacon integer;
BEGIN
    PERFORM {schema}.require_outside_transaction('register_member');
    PERFORM {schema}.check_grace_or_lease('grace', p_grace_ms);
    PERFORM {schema}.check_grace_or_lease('lease', p_lease_ms);
    PERFORM {schema}.check_members();
    PERFORM set_config('synchronous_commit', 'off', true);  -- writes that must last are made durable themselves (and below)
    PERFORM {schema}.check_origin();
    IF p_lease_ms IS NULL THEN
        v_beacon := {schema}.take_beacon();
    END IF;
    INSERT INTO {schema}.member (beacon, backend_pid, host, pid, program, grace_ms, lease_ms, lease_until)
    VALUES (v_beacon, pg_backend_pid(), left({schema}.escape_control_chars(p_host), 255), p_pid, left({schema}.escape_control_chars(p_program), 255), p_grace_ms, p_lease_ms,
            clock_timestamp() + p_lease_ms * interval '1 millisecond')
    RETURNING {schema}.member.member_id INTO member_id;
END
$$;


-- Reattach a member to a new session: take a new beacon, and the wakeup locks of its rows. (The server may not have
-- ended the old session yet: that session's locks protect the member meanwhile.) Return false if the member was
-- removed.
-- Here and below, a session may act only for members of its login: other members do not exist for it.
CREATE OR REPLACE FUNCTION {schema}.reattach_member(p_member bigint) RETURNS boolean {plpgsql_generic_definer}
DECLARE
    v_beacon integer;
    v_lease  integer;
BEGIN
    PERFORM {schema}.require_outside_transaction('reattach_member');
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM {schema}.check_origin();
    SELECT lease_ms INTO v_lease FROM {schema}.member WHERE member_id = p_member AND login = session_user;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF v_lease IS NULL THEN
        v_beacon := {schema}.take_beacon();
    END IF;
    UPDATE {schema}.member
    SET beacon = v_beacon, backend_pid = pg_backend_pid(), missing_since = NULL, heartbeat_at = clock_timestamp(),
        lease_until = clock_timestamp() + lease_ms * interval '1 millisecond'
    WHERE member_id = p_member;
    IF NOT FOUND THEN  -- the member was removed while it returned
        RETURN false;
    END IF;
    IF v_lease IS NULL THEN
        -- 'try': until the server ends the old session, the old session's lock serves as well.
        PERFORM pg_try_advisory_lock({schema}.lock_class(2), {schema}.lock_key(r.queue_position))
        FROM (SELECT resource_id, array_agg(queue_position ORDER BY queue_position) AS positions
              FROM {schema}.member_rows(p_member) GROUP BY resource_id) AS a
        CROSS JOIN LATERAL (SELECT unnest(a.positions) AS queue_position
                            EXCEPT SELECT {schema}.rows_ahead_of_own_row(p_member, a.resource_id, a.positions[257:])) AS r;
    END IF;
    RETURN true;
END
$$;


-- Return the waiting rows of a member that need no wakeup lock: right behind each is a row of the same member, and both
-- make the same request for `write`. Whatever the first row blocks, the second blocks as well, and for longer. So no
-- session needs to wait for the end of the first. (A session that does so polls. Simple enough for the planner to
-- inline it, like the functions above.)
CREATE OR REPLACE FUNCTION {schema}.rows_ahead_of_own_row(p_member bigint, p_resource varchar, p_positions bigint[]) RETURNS SETOF bigint
LANGUAGE sql STABLE
AS $$
    SELECT t.queue_position
    FROM {schema}.{table} AS t
    CROSS JOIN LATERAL (
        SELECT n.member_id, n.access_type, n.weight, n.concurrency_limit FROM {schema}.{table} AS n
        WHERE n.resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text
          AND n.queue_position OPERATOR(pg_catalog.>) t.queue_position
        ORDER BY n.queue_position LIMIT 1) AS n
    WHERE t.resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text AND t.queue_position OPERATOR(pg_catalog.=) ANY (p_positions)
      AND t.member_id OPERATOR(pg_catalog.=) p_member AND t.granted_at IS NULL AND t.access_type::pg_catalog.text OPERATOR(pg_catalog.=) 'write'::pg_catalog.text
      AND n.member_id OPERATOR(pg_catalog.=) p_member AND n.access_type::pg_catalog.text OPERATOR(pg_catalog.=) 'write'::pg_catalog.text
      AND n.weight OPERATOR(pg_catalog.=) t.weight AND (n.concurrency_limit OPERATOR(pg_catalog.=) t.concurrency_limit
                                                        OR n.concurrency_limit IS NULL AND t.concurrency_limit IS NULL)
$$;

-- Return those of a member's rows for which this session, the member's own, has no wakeup lock. p_positions NULL: look
-- at all rows of the member.
CREATE OR REPLACE FUNCTION {schema}.missing_wakeup_locks(p_member bigint, p_positions bigint[] DEFAULT NULL) RETURNS SETOF bigint
{sql_indexed_definer}
    SELECT r.queue_position FROM {schema}.member AS m JOIN {schema}.{table} AS r ON r.member_id = m.member_id
    WHERE m.member_id = p_member AND m.login = session_user AND m.backend_pid = pg_backend_pid() AND m.lease_ms IS NULL
      AND r.queue_position = ANY (coalesce(p_positions, ARRAY(SELECT queue_position FROM {schema}.member_rows(p_member))))
      AND {schema}.lock_key(r.queue_position) NOT IN (
          SELECT objid::bigint FROM pg_locks
          WHERE locktype = 'advisory' AND objsubid = 2 AND mode = 'ExclusiveLock' AND granted AND pid = pg_backend_pid()
            AND classid::bigint = {schema}.lock_class(2))
$$;

-- Drop the wakeup locks of the rows that need none (rows_ahead_of_own_row). The server has one table for the locks of
-- all its sessions, and a session pays for each of its locks at the end of every transaction. May be repeated.
CREATE OR REPLACE FUNCTION {schema}.drop_wakeup_locks(p_member bigint, p_resource varchar, p_positions bigint[]) RETURNS void
{plpgsql_generic_definer}
BEGIN
    PERFORM pg_advisory_unlock({schema}.lock_class(2), {schema}.lock_key(p.position))
    FROM (SELECT {schema}.rows_ahead_of_own_row(m.member_id, p_resource, p_positions) AS position FROM {schema}.member AS m
          WHERE m.member_id = p_member AND m.login = session_user AND m.backend_pid = pg_backend_pid() AND m.lease_ms IS NULL
          EXCEPT SELECT {schema}.missing_wakeup_locks(p_member, p_positions)) AS p;
END
$$;

-- Take again the wakeup locks of rows that are soon the first to be granted, or are about to leave. May be repeated.
CREATE OR REPLACE FUNCTION {schema}.restore_wakeup_locks(p_member bigint, p_positions bigint[]) RETURNS void
{plpgsql_generic_definer}
BEGIN
    PERFORM pg_try_advisory_lock({schema}.lock_class(2), {schema}.lock_key(p.position))
    FROM {schema}.missing_wakeup_locks(p_member, p_positions) AS p (position);
END
$$;


-- Record a heartbeat: renew the lease, clear missing_since, and return the rows of the member. `known` is false if the
-- member was removed. Raise if the session changed under the member (a pooler in transaction mode).
CREATE OR REPLACE FUNCTION {schema}.heartbeat(
    p_member bigint, OUT known boolean, OUT positions bigint[], OUT revoked bigint[]) {plpgsql_generic_definer}
DECLARE
    v_member {schema}.member;
BEGIN
    -- A heartbeat is not made durable at once, and waits for no standby: after a restart or a promotion the grace and
    -- lease of every member begin anew (check_origin).
    PERFORM set_config('synchronous_commit', 'off', true);
    -- The usual case in one statement.
    UPDATE {schema}.member SET heartbeat_at = clock_timestamp()
    WHERE member_id = p_member AND login = session_user AND lease_ms IS NULL AND grace_ms > 0
      AND backend_pid = pg_backend_pid() AND missing_since IS NULL;
    known := FOUND;
    IF NOT known THEN
        SELECT * INTO v_member FROM {schema}.member WHERE member_id = p_member AND login = session_user;
        known := FOUND;
        IF NOT known THEN
            RETURN;
        END IF;
        IF v_member.lease_ms IS NULL THEN
            IF v_member.backend_pid <> pg_backend_pid() THEN
                RAISE EXCEPTION 'sqlsem: this connection changed sessions under its member (a pooler in transaction mode?)'
                    USING ERRCODE = '25001', HINT = 'Connect with lease=…, or past the pooler.';
            END IF;
            IF v_member.missing_since IS NOT NULL AND NOT {schema}.holds_beacon(pg_backend_pid(), v_member.beacon) THEN
                RAISE EXCEPTION 'sqlsem: this session gave its beacon up (DISCARD ALL, or a pooler that resets sessions?)'
                    USING ERRCODE = '25001', HINT = 'Connect with lease=…, or past the pooler.';
            END IF;
            IF v_member.grace_ms > 0 OR v_member.missing_since IS NOT NULL THEN
                UPDATE {schema}.member SET missing_since = NULL, heartbeat_at = clock_timestamp() WHERE member_id = p_member;
                known := FOUND;
            END IF;
        ELSE
            UPDATE {schema}.member
            SET lease_until = clock_timestamp() + lease_ms * interval '1 millisecond', heartbeat_at = clock_timestamp()
            WHERE member_id = p_member;
            known := FOUND;
        END IF;
    END IF;
    SELECT array_agg(queue_position), array_agg(queue_position) FILTER (WHERE revoked_at IS NOT NULL)
    INTO positions, revoked
    FROM {schema}.member_rows(p_member);
END
$$;


-- Remove a member for good, with the rows that it still has.
CREATE OR REPLACE FUNCTION {schema}.deregister_member(p_member bigint) RETURNS void {plpgsql_generic_definer}
DECLARE
    v_member {schema}.member;
BEGIN
    DELETE FROM {schema}.member WHERE member_id = p_member AND login = session_user RETURNING * INTO v_member;
    IF NOT FOUND THEN
        RETURN;  -- removed before; the next session that finds rows of it deletes them
    END IF;
    PERFORM {schema}.delete_member_rows(v_member, 'released');
    -- Some rows may be left, which a wait of this member was writing at that instant. So try again.
    FOR v_look IN 1..20 LOOP
        EXIT WHEN NOT EXISTS (SELECT FROM {schema}.member_rows(p_member));
        PERFORM pg_sleep(0.005);
        PERFORM {schema}.delete_member_rows(v_member, 'released');
    END LOOP;
    PERFORM {schema}.release_session_lock_after_commit({schema}.lock_class(1), v_member.beacon);  -- (NULL: it has none)
END
$$;


-- Register a request, and draw its number. One transaction: gate, rule, insert, wakeup lock. A request that is not
-- blocked is granted at once. With p_try a blocked request is not inserted.
-- A second call with the same p_uid (its first reply was lost) finds the row of the first.
CREATE OR REPLACE FUNCTION {schema}.register(
    p_member bigint, p_requesting_id varchar, p_owner varchar, p_uid varchar, p_try boolean,
    p_resource varchar, p_access varchar, p_limit integer, p_weight integer, p_note varchar,
    OUT queue_position bigint, OUT granted boolean) {plpgsql_generic_definer}
DECLARE
    v_ticket record;
    v_gated  boolean;
BEGIN
    -- (The same tests as in require_outside_transaction: the usual case saves a call.)
    IF pg_current_xact_id_if_assigned() IS NOT NULL OR current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM {schema}.require_outside_transaction('register');
    END IF;
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '60s', true);  -- any login can take the gate's lock, and keep it
    END IF;
    -- Take both locks. (In one expression, which PL/pgSQL evaluates without a query. '=' evaluates both sides; AND
    -- might evaluate only one.)
    v_gated := (pg_advisory_xact_lock_shared({schema}.lock_class(7), {schema}.lock_key(p_member)) IS NULL)
               = (pg_advisory_xact_lock({schema}.lock_class(0), hashtext(p_resource)) IS NULL);
    v_ticket := {schema}.insert_request(p_member, p_requesting_id, p_owner, p_uid, p_try, p_resource, p_access, p_limit, p_weight, p_note, false);
    queue_position := v_ticket.queue_position;
    granted := v_ticket.granted;
END
$$;


-- Record a heartbeat in each transaction that grants, claims or starts something for a member, before it locks a row.
-- It also renews the lease. It is skipped if the last one is younger than an eighth of the grace or lease. So a granted
-- row has a lease that has just begun, and a session that is about to remove the member finds the lease renewed.
-- Return false if the member was removed, or is another login's.
CREATE OR REPLACE FUNCTION {schema}.touch_member(p_member bigint) RETURNS boolean {plpgsql}
DECLARE
    v_leased boolean;
    v_fresh  boolean;
BEGIN
    SELECT lease_ms IS NOT NULL,
           CASE WHEN lease_ms IS NOT NULL THEN lease_until > clock_timestamp() + lease_ms * interval '0.875 millisecond'
                ELSE grace_ms = 0 OR heartbeat_at > clock_timestamp() - grace_ms * interval '0.125 millisecond' END
    INTO v_leased, v_fresh FROM {schema}.member WHERE member_id = p_member AND login = session_user;
    -- (A member with a lease may call through a pooler, and so reach another server than at its last call.)
    IF v_leased AND {schema}.check_origin() OR NOT v_fresh THEN
        UPDATE {schema}.member
        SET heartbeat_at = clock_timestamp(), lease_until = clock_timestamp() + lease_ms * interval '1 millisecond'
        WHERE member_id = p_member;
    END IF;
    RETURN FOUND;
END
$$;

-- Record a heartbeat of a member that is about to claim or start something. Raise if the member was removed, or is
-- another login's.
CREATE OR REPLACE FUNCTION {schema}.require_member(p_member bigint) RETURNS void {plpgsql}
BEGIN
    IF NOT {schema}.touch_member(p_member) THEN
        RAISE EXCEPTION 'sqlsem: member % is not known: it was removed, or belongs to another login', p_member
            USING ERRCODE = 'P0002', HINT = 'Register again (register_member).';
    END IF;
END
$$;

-- Return true if this login is a member of one of these roles of sqlsem, or of the role that owns the schema.
CREATE OR REPLACE FUNCTION {schema}.has_role(VARIADIC p_roles text[]) RETURNS boolean {sql_stable}
    SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = ANY (SELECT '{schema}_' || r FROM unnest(p_roles) AS r)
                   AND pg_has_role(session_user, oid, 'MEMBER'))
        OR EXISTS (SELECT FROM pg_namespace WHERE oid = '{schema}'::regnamespace AND pg_has_role(session_user, nspowner, 'MEMBER'))
$$;


-- Raise for an invalid request. A request may name no limit if an operator has set one for the resource; that limit
-- then cannot be removed before the transaction ends.
CREATE OR REPLACE FUNCTION {schema}.check_registration(
    p_resource varchar, p_access varchar, p_requesting_id varchar, p_owner varchar, p_uid varchar, p_limit integer, p_weight integer)
RETURNS void {plpgsql}
BEGIN
    IF p_uid IS NULL THEN
        RAISE EXCEPTION 'sqlsem: bad request: uid is NULL; give each request a text of its own' USING ERRCODE = '22023';
    ELSIF concat(p_resource, p_access, p_requesting_id, p_owner) ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'sqlsem: bad request: a control character in resource %, access type %, requesting_id % or owner %',
            {schema}.escape_control_chars(p_resource), {schema}.escape_control_chars(p_access), {schema}.escape_control_chars(p_requesting_id), {schema}.escape_control_chars(p_owner)
            USING ERRCODE = '22023', HINT = 'Use printable text.';
    ELSIF p_access = 'upgrade' THEN
        RAISE EXCEPTION 'sqlsem: bad request: the access type ''upgrade'' is that of a reader which becomes a writer; ask for read first'
            USING ERRCODE = '22023';
    ELSIF p_limit IS NULL AND p_resource <> '' AND p_resource = btrim(p_resource) AND p_access IS NOT NULL AND p_weight >= 1 THEN
        LOCK TABLE {schema}.limit_pattern IN ROW SHARE MODE;
        IF (SELECT o.cap FROM {schema}.effective_settings(p_resource) AS o) IS NOT NULL THEN
            RETURN;
        END IF;
        RAISE EXCEPTION 'sqlsem: no limit is set for %, and the request names none; an operator sets one with: sqlsem set % --limit N --allow-new',
            quote_literal(p_resource), CASE WHEN p_resource ~ '^[[:alnum:]_.:/@-]+$' THEN p_resource ELSE quote_literal(p_resource) END
            USING ERRCODE = '22023', HINT = 'Or: SELECT {schema}.set_limit(resource, limit), also for a pattern (''tenant:*''); or name a limit.';
    END IF;
    RAISE EXCEPTION 'sqlsem: bad request: resource %, access type %, limit %, weight %; a name has no blanks around it, and 1 <= weight <= limit',
        coalesce(quote_literal(p_resource), 'NULL'), coalesce(quote_literal(p_access), 'NULL'), p_limit, p_weight USING ERRCODE = '22023';
END
$$;


-- Return the milliseconds of waiting that one step of priority is worth; NULL if the resource has no priorities.
CREATE OR REPLACE FUNCTION {schema}.ageing_of(p_resource varchar) RETURNS integer
LANGUAGE sql STABLE
AS $$
    SELECT o.ageing_ms FROM {schema}.resource AS o WHERE o.resource_id::pg_catalog.text OPERATOR(pg_catalog.=) p_resource::pg_catalog.text
$$;

-- Raise for a request without a priority, on a resource that has priorities.
CREATE OR REPLACE FUNCTION {schema}.require_priority(p_resource varchar) RETURNS void {plpgsql_stable}
BEGIN
    RAISE EXCEPTION 'sqlsem: no priority is named for %, which is granted by priority; name one (priority=0 to 99), or have an operator end that: sqlsem set % --no-priorities',
        quote_literal({schema}.escape_control_chars(p_resource)), {schema}.escape_control_chars(p_resource) USING ERRCODE = '22023',
        HINT = 'Priorities are for requests of one resource alone.';
END
$$;


-- Insert a request. The caller has taken the gate and the lock of the member in an earlier statement, so the statements
-- here see every earlier registration. p_ranked: true if acquire_by_priority calls, the only caller that may register
-- on a resource with priorities.
CREATE OR REPLACE FUNCTION {schema}.insert_request(
    p_member bigint, p_requesting_id varchar, p_owner varchar, p_uid varchar, p_try boolean,
    p_resource varchar, p_access varchar, p_limit integer, p_weight integer, p_note varchar, p_ranked boolean,
    OUT queue_position bigint, OUT granted boolean) {plpgsql}
DECLARE
    v_ahead  record;
    v_leased boolean;
    v_fresh  boolean;
    v_mark   bigint;  -- the resource's low-water mark
BEGIN
    -- (Constraints of the table would cost a tenth of the whole call; so would several expressions in place of one.)
    IF (p_resource <> '' AND p_resource = btrim(p_resource) AND p_weight >= 1 AND p_uid IS NOT NULL AND p_access <> 'upgrade' AND p_limit IS NOT NULL
        AND concat(p_resource, p_access, p_requesting_id, p_owner) !~ '[[:cntrl:]]') IS NOT TRUE OR p_limit < p_weight THEN
        PERFORM {schema}.check_registration(p_resource, p_access, p_requesting_id, p_owner, p_uid, p_limit, p_weight);
    END IF;
    -- The usual case: the queue is empty, and had no survivors below the mark.
    SELECT m.lease_ms IS NOT NULL,
           m.lease_ms IS NULL AND (m.grace_ms = 0 OR m.heartbeat_at > clock_timestamp() - m.grace_ms * interval '0.125 millisecond'),
           l.mark,
           coalesce(l.survivors, '{}') = '{}'
           AND NOT EXISTS (SELECT FROM {schema}.{table} AS q WHERE q.resource_id = p_resource AND q.queue_position >= coalesce(l.mark, 0))
           AND NOT EXISTS (SELECT FROM {schema}.resource AS o WHERE o.resource_id IN (p_resource, '*'))
    INTO v_leased, v_fresh, v_mark, granted
    FROM {schema}.member AS m
    LEFT JOIN LATERAL (SELECT w.mark, w.survivors FROM {schema}.low_water AS w WHERE w.resource_id = p_resource
                       ORDER BY w.mark DESC LIMIT 1) AS l ON true
    WHERE m.member_id = p_member AND m.login = session_user;
    IF NOT FOUND OR NOT v_fresh AND NOT {schema}.touch_member(p_member) THEN
        IF EXISTS (SELECT FROM {schema}.member WHERE member_id = p_member AND login <> session_user) THEN
            RAISE EXCEPTION 'sqlsem: member % belongs to another login than %', p_member, session_user
                USING ERRCODE = '42501', HINT = 'Use the member that this login has registered.';
        END IF;
        -- (Any session may delete a row whose member is gone: no client must believe that it holds such a row.)
        RAISE EXCEPTION 'sqlsem: member % is not known: it was removed, or belongs to another login', p_member
            USING ERRCODE = 'P0002', HINT = 'Register again (register_member).';
    END IF;
    IF NOT granted THEN
        IF NOT p_ranked AND {schema}.ageing_of(p_resource) IS NOT NULL THEN
            PERFORM {schema}.require_priority(p_resource);
        END IF;
        SELECT * INTO v_ahead FROM {schema}.eligibility(p_resource, 9223372036854775807, p_access, p_limit, p_weight, p_uid);
        IF v_ahead.mine IS NOT NULL THEN
            SELECT t.queue_position, t.granted_at IS NOT NULL AND t.revoked_at IS NULL INTO queue_position, granted FROM {schema}.{table} AS t
            WHERE t.resource_id = p_resource AND t.queue_position = v_ahead.mine AND t.member_id = p_member;
            IF FOUND THEN
                -- The first call's session may have ended while its commit waited for a standby: the row is committed
                -- here, but perhaps not there. This call writes the row, so that its own commit waits for the standby.
                UPDATE {schema}.{table} AS t SET note = t.note
                WHERE t.resource_id = p_resource AND t.queue_position = v_ahead.mine;
                RETURN;
            END IF;  -- else the row is another member's, and the insert below fails
        END IF;
        granted := v_ahead.eligible;
        IF p_try AND NOT granted THEN
            -- (reap_dead_members passes rows whose wakeup lock is held, and any login can hold it. So the blocker is
            -- tested by itself, too.)
            IF {schema}.reap_dead_members(p_resource, p_member) OR {schema}.check_if_dead(p_resource, v_ahead.blocker, p_member) THEN
                SELECT eligible INTO granted FROM {schema}.eligibility(p_resource, 9223372036854775807, p_access, p_limit, p_weight, NULL);
            END IF;
            IF NOT granted THEN
                RETURN;
            END IF;
        END IF;
    END IF;
    INSERT INTO {schema}.{table} (resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner,
                                  request_uid, granted_at, note)
    VALUES (p_resource, p_requesting_id, p_access, p_limit, p_weight, p_member, p_owner,
            p_uid, CASE WHEN granted THEN clock_timestamp() END, p_note)
    RETURNING {schema}.{table}.queue_position INTO queue_position;
    IF queue_position < v_mark THEN
        -- Numbers went back (rows were restored, or the sequence was set), and rows below the mark were not read:
        -- delete the marks above this number, and insert the request again, with another number.
        DELETE FROM {schema}.low_water AS l WHERE l.mark > insert_request.queue_position;
        DELETE FROM {schema}.{table} AS t WHERE t.resource_id = p_resource AND t.queue_position = insert_request.queue_position;
        SELECT p.queue_position, p.granted INTO queue_position, granted
        FROM {schema}.insert_request(p_member, p_requesting_id, p_owner, p_uid, p_try, p_resource, p_access, p_limit, p_weight, p_note, p_ranked) AS p;
        RETURN;
    END IF;
    -- The wakeup lock, unless the member lives by a lease and its session may be shared.
    IF NOT v_leased AND NOT pg_try_advisory_lock({schema}.lock_class(2), {schema}.lock_key(queue_position)) THEN
        -- A stranger holds that lock, to block this row: the row gets another number. (If that lock is taken as well,
        -- the waiters behind poll.)
        FOR v_try IN 1..100 LOOP
            UPDATE {schema}.{table} AS t
            SET queue_position = nextval(pg_get_serial_sequence('{schema}.{table}', 'queue_position'))
            WHERE t.resource_id = p_resource AND t.queue_position = insert_request.queue_position
            RETURNING t.queue_position INTO queue_position;
            EXIT WHEN pg_try_advisory_lock({schema}.lock_class(2), {schema}.lock_key(queue_position));
        END LOOP;
    END IF;
    IF {schema}.is_time_for_row_mark() THEN
        PERFORM {schema}.advance_low_water_marks(p_resource, queue_position, p_member);
    END IF;
END
$$;


-- Register several requests at once: all gates in one order, then all rows, in one transaction. So two such calls can
-- never wait for each other. p_requests: [{"resource": …, "access": …, "limit": …, "weight": …, "note": …}, …], each
-- resource once.
CREATE OR REPLACE FUNCTION {schema}.register_all(
    p_member bigint, p_requesting_id varchar, p_owner varchar, p_uid varchar, p_try boolean, p_requests jsonb)
RETURNS TABLE (resource_id varchar, queue_position bigint, granted boolean) {plpgsql_generic_definer}
DECLARE
    v_request record;
    v_ticket  record;
    v_free    boolean := true;
BEGIN
    PERFORM {schema}.require_outside_transaction('register_all');
    {lock_timeout:60s}
    PERFORM pg_advisory_xact_lock_shared({schema}.lock_class(7), {schema}.lock_key(p_member));
    -- By key, not by name: names that share a key must not be locked twice in different orders.
    PERFORM pg_advisory_xact_lock({schema}.lock_class(0), g.key)
    FROM (SELECT DISTINCT hashtext(value ->> 'resource') AS key FROM jsonb_array_elements(p_requests) ORDER BY key) AS g;
    IF p_try THEN
        PERFORM {schema}.check_registration(r.resource, r.access, p_requesting_id, p_owner, p_uid, NULL, r.weight)
        FROM jsonb_to_recordset(p_requests) AS r (resource varchar, access varchar, "limit" integer, weight integer)
        WHERE r."limit" IS NULL;
        FOR v_request IN SELECT * FROM jsonb_to_recordset(p_requests)
            AS r (resource varchar, access varchar, "limit" integer, weight integer) LOOP
            SELECT eligible INTO v_free FROM {schema}.eligibility(v_request.resource, 9223372036854775807, v_request.access,
                                                            v_request."limit", v_request.weight, NULL);
            IF NOT v_free AND {schema}.reap_dead_members(v_request.resource, p_member) THEN
                SELECT eligible INTO v_free FROM {schema}.eligibility(v_request.resource, 9223372036854775807, v_request.access,
                                                                v_request."limit", v_request.weight, NULL);
            END IF;
            EXIT WHEN NOT v_free;
        END LOOP;
        IF NOT v_free AND NOT EXISTS (SELECT FROM {schema}.{table} AS t WHERE t.request_uid = p_uid || '.1') THEN
            RETURN;
        END IF;
    END IF;
    FOR v_request IN SELECT * FROM ROWS FROM (jsonb_to_recordset(p_requests)
        AS (resource varchar, access varchar, "limit" integer, weight integer, note varchar)) WITH ORDINALITY AS
        r (resource, access, "limit", weight, note, ordinal) LOOP
        SELECT * INTO v_ticket FROM {schema}.insert_request(
            p_member, p_requesting_id, p_owner, (p_uid || '.' || v_request.ordinal)::varchar, false, v_request.resource,
            v_request.access, v_request."limit", v_request.weight, v_request.note, false);
        resource_id := v_request.resource;
        queue_position := v_ticket.queue_position;
        granted := v_ticket.granted;
        RETURN NEXT;
    END LOOP;
END
$$;


-- Test the owners of the first rows of a resource if their sessions look gone, and remove rows whose waiter lease is
-- over (at most 32 in all). Return true if something was written. As many rows are looked at as the limit admits, and
-- at least 64. A dead owner further behind is tested when its row comes to the front, or before by a waiter for that
-- row.
CREATE OR REPLACE FUNCTION {schema}.reap_dead_members(p_resource varchar, p_mine bigint) RETURNS boolean {plpgsql}
DECLARE
    v_position bigint;
    v_written  boolean := false;
    v_maximum     integer := (SELECT greatest(64, max(coalesce(concurrency_limit, (SELECT cap FROM {schema}.effective_settings(p_resource)))))
                           FROM (SELECT concurrency_limit FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807) LIMIT 64) AS r);
    v_stale    timestamptz := (SELECT clock_timestamp() - stale_after_ms * interval '1 millisecond'
                               FROM {schema}.resource WHERE resource_id = p_resource);
BEGIN
    FOR v_position IN
        SELECT min(queue_position)
        FROM (SELECT *, coalesce(waiter_lease_until < clock_timestamp(), false) AS unattended
              FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807) LIMIT v_maximum) AS r
        WHERE unattended
           OR member_id IS DISTINCT FROM p_mine
              AND (revoked_at IS NOT NULL
                   OR CASE WHEN member_id IS NULL THEN requested_at <= v_stale
                           ELSE {schema}.is_free({schema}.lock_class(2), {schema}.lock_key(queue_position))
                                AND NOT EXISTS (SELECT FROM {schema}.member AS m  -- its lease is not over
                                                WHERE m.member_id = r.member_id AND m.lease_until >= clock_timestamp()) END)
        GROUP BY CASE WHEN unattended OR member_id IS NULL THEN -queue_position ELSE member_id END, revoked_at IS NULL
        ORDER BY 1 LIMIT 32
    LOOP
        v_written := {schema}.check_if_dead(p_resource, v_position, p_mine) OR v_written;
    END LOOP;
    RETURN v_written;
END
$$;


-- Return the milliseconds until the next poll of a waiter that may not be woken by a lock. The pause is as long as the
-- time since something last changed ahead of it (p_since), but 40 at least and 800 at most. One waiter behind it halves
-- the pause, three or more quarter it. So the first polls come soon, and later a waiting session polls at most twice a
-- second on average.
CREATE OR REPLACE FUNCTION {schema}.poll_pause(p_resource varchar, p_position bigint, p_since timestamptz) RETURNS integer
{sql}
    SELECT (least(greatest(1000 * extract(epoch FROM clock_timestamp() - p_since), 40), 800)
            / (1 + (SELECT count(*) FROM (SELECT FROM {schema}.{table}
                                          WHERE resource_id = p_resource AND queue_position > p_position LIMIT 3) AS b)))::integer
$$;


-- Wait up to p_timeout_ms for the grant of a row. Wherever there is a lock to wait for, sleep in PostgreSQL's queue of
-- that lock, and poll otherwise. Return:
--   0  granted          -1  not yet
--   1  call again at once: this transaction has written something that other sessions should see
--  -2  the row is gone: cancelled, reaped or revoked
CREATE OR REPLACE FUNCTION {schema}.wait(p_resource varchar, p_position bigint, p_timeout_ms integer) RETURNS integer
{plpgsql_generic_definer}
DECLARE
    v_deadline timestamptz := clock_timestamp() + p_timeout_ms * interval '1 millisecond';
    v_row      record;
    v_ahead    record;
    v_left     integer;
    v_simple   boolean;             -- the blocker was found without the whole rule
    v_oldest   bigint;              -- the row whose wakeup lock to sleep on
    v_free     boolean;
    v_since    timestamptz;         -- when something last changed ahead, as far as visible
    v_is_unchanged boolean;             -- the blocker is unchanged
    v_tested   timestamptz := clock_timestamp();
    v_pause    float := 2;          -- ms
    v_tried_waiting_lock boolean := false;
    v_has_waited boolean := false;
    v_first    bigint;              -- the first row of the resource
BEGIN
    -- Pause while the tables are upgraded, before any of them is touched.
    IF {schema}.is_upgraded() THEN
        PERFORM pg_sleep(least(p_timeout_ms, 50) / 1000.0::float);
        RETURN -1;
    END IF;
    SELECT t.access_type, t.concurrency_limit, t.weight, t.member_id, t.requested_at, t.granted_at, t.revoked_at,
           coalesce(m.lease_until, m.heartbeat_at) + coalesce(m.lease_ms * interval '-0.875 millisecond',
                                                         m.grace_ms * interval '0.125 millisecond') AS stale_at,
           m.lease_ms IS NOT NULL AS leased, m.grace_ms = 0 AND m.lease_ms IS NULL AS mute,
           -- plain: every row ahead conflicts with this one, the resource has no settings, and all rows ahead are above
           -- the mark. whole: this row needs the whole limit, so any conflicting row ahead blocks it.
           (t.access_type = 'write' AND t.concurrency_limit >= 1 AND coalesce(l.survivors, '{}') = '{}'
            AND NOT EXISTS (SELECT FROM {schema}.resource AS o WHERE o.resource_id IN (p_resource, '*'))) IS TRUE AS plain,
           t.weight = t.concurrency_limit AS whole,
           coalesce(l.mark, 0) AS lowest INTO v_row
    FROM {schema}.{table} AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
    LEFT JOIN LATERAL (SELECT w.mark, w.survivors FROM {schema}.low_water AS w WHERE w.resource_id = p_resource
                       ORDER BY w.mark DESC LIMIT 1) AS l ON true
    WHERE t.resource_id = p_resource AND t.queue_position = p_position AND m.login = session_user;
    IF NOT FOUND OR v_row.revoked_at IS NOT NULL THEN
        RETURN -2;
    ELSIF v_row.granted_at IS NOT NULL THEN
        RETURN CASE WHEN v_row.mute OR {schema}.touch_member(v_row.member_id) THEN 0 ELSE -2 END;
    END IF;
    LOOP
        -- In two usual cases a statement that is cheaper than the whole rule finds the blocker. Only the whole rule
        -- grants, and reads settings made since.
        v_simple := v_row.plain AND p_timeout_ms > 0;
        IF v_simple AND v_row.whole THEN
            SELECT max(t.queue_position) AS blocker, 'leave' AS until, false AS eligible, NULL::timestamptz AS since INTO v_ahead
            FROM {schema}.{table} AS t
            WHERE t.resource_id = p_resource AND t.queue_position >= v_row.lowest AND t.queue_position < p_position;
            v_simple := v_ahead.blocker IS NOT NULL;
        ELSIF v_simple AND v_row.weight = 1 THEN
            -- This row is blocked if as many rows are ahead as its limit admits, and all weigh 1 and declare no lower
            -- limit.
            SELECT CASE WHEN count(*) = v_row.concurrency_limit AND bool_and(a.weight = 1)
                             AND coalesce(min(a.concurrency_limit) >= v_row.concurrency_limit, true)
                        THEN coalesce(max(a.queue_position) FILTER (WHERE a.granted_at IS NULL), min(a.queue_position)) END AS blocker,
                   CASE WHEN count(a.granted_at) = count(*) THEN 'any' ELSE 'grant' END AS until, false AS eligible,
                   max(a.granted_at) AS since, min(a.queue_position) AS oldest INTO v_ahead
            FROM (SELECT t.queue_position, t.weight, t.concurrency_limit, t.granted_at FROM {schema}.{table} AS t
                  WHERE t.resource_id = p_resource AND t.queue_position >= v_row.lowest AND t.queue_position < p_position
                  ORDER BY t.queue_position DESC LIMIT v_row.concurrency_limit) AS a;
            v_simple := v_ahead.blocker IS NOT NULL;
        ELSE
            v_simple := false;
        END IF;
        IF NOT v_simple THEN
            SELECT a.eligible, a.blocker, a.until INTO v_ahead
            FROM {schema}.eligibility(p_resource, p_position, v_row.access_type, v_row.concurrency_limit, v_row.weight, NULL) AS a;
        END IF;
        IF v_ahead.eligible THEN
            IF NOT v_row.mute AND clock_timestamp() >= v_row.stale_at AND NOT {schema}.touch_member(v_row.member_id) THEN
                RETURN -2;
            END IF;
            UPDATE {schema}.{table} SET granted_at = clock_timestamp()
            WHERE resource_id = p_resource AND queue_position = p_position AND revoked_at IS NULL;
            IF NOT FOUND THEN
                RETURN -2;
            END IF;
            EXIT;
        ELSIF v_row.access_type = 'read' THEN
            IF EXISTS (SELECT FROM {schema}.{table}
                       WHERE resource_id = p_resource AND queue_position = p_position AND granted_at IS NOT NULL) THEN
                -- Granted by a reader ahead that upgrades (conversions.sql).
                RETURN CASE WHEN v_row.mute OR {schema}.touch_member(v_row.member_id) THEN 0 ELSE -2 END;
            END IF;
        END IF;
        v_left := ceil(1000 * extract(epoch FROM v_deadline - clock_timestamp()));
        IF v_left <= 0 THEN
            -- At the end of each call test the owners of the first rows, and the blocker's by itself: any of them may
            -- have died, and any login can hold the blocker's wakeup lock, which hides a dead owner from the first
            -- test. If the blocker waits in a session, it makes these tests itself, and this waiter only now and then.
            RETURN CASE WHEN (random() < 0.2
                              OR NOT EXISTS (SELECT FROM {schema}.{table}
                                             WHERE resource_id = p_resource AND queue_position = v_ahead.blocker AND member_id IS NOT NULL
                                               AND granted_at IS NULL AND revoked_at IS NULL AND waiter_lease_until IS NULL))
                             AND ({schema}.reap_dead_members(p_resource, v_row.member_id)
                                  OR {schema}.check_if_dead(p_resource, v_ahead.blocker, v_row.member_id)) THEN 1 ELSE -1 END;
        END IF;
        -- Sleep for 4 s at most: an upgrade of the tables waits for this transaction, and all others wait for the
        -- upgrade. (But for longer than deadlock_timeout, after which the server looks for deadlocks.) For 2 s, if a
        -- raised limit could admit this row: it has to take effect soon.
        v_left := least(v_left, CASE WHEN v_row.weight = v_row.concurrency_limit THEN 4000 ELSE 2000 END);
        IF {schema}.is_upgraded() THEN
            RETURN -1;
        END IF;
        -- Write marks now: later, at the grant, other rows would wait for this session meanwhile.
        v_has_waited := true;
        IF {schema}.is_time_for_row_mark() THEN
            v_first := (SELECT queue_position FROM {schema}.rows_before_oldest_first(p_resource, p_position) LIMIT 1);
            -- (Two IFs: in one, NULL AND … would take the gate, too, and this session would sleep with it.)
            IF v_row.lowest < v_first THEN
                IF pg_try_advisory_xact_lock({schema}.lock_class(0), hashtext(p_resource)) THEN
                    PERFORM {schema}.advance_low_water_marks(p_resource, v_first, NULL);
                    RETURN 1;
                END IF;
            END IF;
        END IF;
        IF v_ahead.until = 'paused' THEN
            PERFORM pg_sleep(least(v_left, v_pause) / 1000);
            v_pause := least(v_pause * 1.5, 250);
            CONTINUE;
        END IF;

        v_oldest := v_ahead.blocker;
        v_free := {schema}.is_free({schema}.lock_class(2), {schema}.lock_key(v_oldest));
        IF v_ahead.until <> 'leave' OR v_free THEN
            IF v_ahead.until <> 'leave' AND NOT v_tried_waiting_lock THEN
                -- Take the lock on which the waiters behind sleep until this row is granted. It is released at the end
                -- of this transaction, when the commit is visible. 'try': if another session has the lock, they poll.
                v_tried_waiting_lock := pg_try_advisory_xact_lock({schema}.lock_class(3), {schema}.lock_key(p_position)) IS NOT NULL;
            END IF;
            IF v_ahead.until = 'grant' AND NOT {schema}.is_free({schema}.lock_class(3), {schema}.lock_key(v_oldest)) THEN
                PERFORM {schema}.wait_until_lock_free({schema}.lock_class(3), {schema}.lock_key(v_oldest), v_left);
                CONTINUE;
            END IF;
            -- From here on no lock is sure to wake this waiter. If the blocker's wakeup lock is free, the row was
            -- released this instant, or its owner has no session (a lease, a bare participant), or its owner died. Any
            -- other holder may have died, too.
            IF v_free AND {schema}.check_if_dead(p_resource, v_ahead.blocker, v_row.member_id)
               OR clock_timestamp() > v_tested + interval '0.5 seconds' AND {schema}.reap_dead_members(p_resource, v_row.member_id) THEN
                RETURN 1;
            ELSIF clock_timestamp() > v_tested + interval '0.5 seconds' THEN
                v_tested := clock_timestamp();
            END IF;
            -- So poll again after a pause (poll_pause). Sleep meanwhile on the wakeup lock of the oldest conflicting
            -- row, and poll sooner if that row leaves. (If the blocker waits itself, nothing changes before that row
            -- leaves: rows leave in their order.)
            -- If a row has left since the statement above, no lock would wake this waiter: then poll again at once.
            IF v_simple AND NOT v_free THEN
                v_since := greatest(v_row.requested_at, CASE v_ahead.until WHEN 'any' THEN v_ahead.since END);
                v_oldest := v_ahead.oldest;
                v_is_unchanged := true;  -- as it was a moment ago
            ELSE
                SELECT greatest(v_row.requested_at, max(granted_at) FILTER (WHERE v_ahead.until <> 'grant')),
                       CASE v_ahead.until WHEN 'grant' THEN min(queue_position) ELSE v_oldest END,
                       (SELECT NOT n.eligible AND n.blocker = v_ahead.blocker
                        FROM {schema}.eligibility(p_resource, p_position, v_row.access_type, v_row.concurrency_limit, v_row.weight, NULL) AS n)
                INTO v_since, v_oldest, v_is_unchanged
                FROM (SELECT granted_at, queue_position FROM {schema}.rows_before_newest_first(p_resource, p_position)
                      WHERE v_row.access_type = 'write' OR access_type <> v_row.access_type
                      LIMIT least(v_row.concurrency_limit, (SELECT cap FROM {schema}.effective_settings(p_resource)))) AS r;
            END IF;
            CONTINUE WHEN v_is_unchanged IS NOT TRUE;
            v_pause := {schema}.poll_pause(p_resource, p_position, v_since);
            IF NOT v_free AND {schema}.is_free({schema}.lock_class(2), {schema}.lock_key(v_oldest)) THEN
                -- The row has left this instant, or has no wakeup lock, as its member has a lease.
                CONTINUE WHEN NOT EXISTS (SELECT FROM {schema}.{table} WHERE resource_id = p_resource AND queue_position = v_oldest);
                v_free := true;
            END IF;
            IF v_free THEN
                PERFORM pg_sleep(least(v_left, v_pause) / 1000);
                CONTINUE;
            END IF;
            v_left := least(v_left, v_pause);
        END IF;
        CONTINUE WHEN NOT {schema}.wait_until_lock_free({schema}.lock_class(2), {schema}.lock_key(v_oldest), v_left);  -- poll again
        IF NOT v_row.leased AND (v_row.mute OR clock_timestamp() < v_row.stale_at) THEN
            -- The usual end of a wait: test and grant in one statement, without the whole rule. (Not if a heartbeat is
            -- due: it would come first, and lock the member's row, even if the wait then went on.) On a resource
            -- without settings the rule is simple: a row that needs the whole limit has no row ahead; any other has
            -- room beside all rows ahead. No session holds the lock meanwhile, and this takes a third of the time of
            -- the whole rule.
            IF v_row.plain AND v_row.whole THEN
                UPDATE {schema}.{table} SET granted_at = clock_timestamp()
                WHERE resource_id = p_resource AND queue_position = p_position AND revoked_at IS NULL
                  AND NOT EXISTS (SELECT FROM {schema}.{table} AS a
                                  WHERE a.resource_id = p_resource AND a.queue_position >= v_row.lowest AND a.queue_position < p_position)
                  AND NOT EXISTS (SELECT FROM {schema}.resource AS o WHERE o.resource_id IN (p_resource, '*'));
            ELSIF v_row.plain THEN
                UPDATE {schema}.{table} SET granted_at = clock_timestamp()
                WHERE resource_id = p_resource AND queue_position = p_position AND revoked_at IS NULL
                  AND (SELECT coalesce(sum(a.weight), 0) + v_row.weight <= least(v_row.concurrency_limit, min(a.concurrency_limit))
                       FROM (SELECT b.weight, b.concurrency_limit FROM {schema}.{table} AS b
                             WHERE b.resource_id = p_resource AND b.queue_position >= v_row.lowest AND b.queue_position < p_position
                             ORDER BY b.queue_position DESC LIMIT v_row.concurrency_limit) AS a)
                  AND NOT EXISTS (SELECT FROM {schema}.resource AS o WHERE o.resource_id IN (p_resource, '*'));
            ELSE
                UPDATE {schema}.{table} SET granted_at = clock_timestamp()
                WHERE resource_id = p_resource AND queue_position = p_position AND revoked_at IS NULL
                  AND (SELECT eligible FROM {schema}.eligibility(p_resource, p_position, v_row.access_type,
                                                           v_row.concurrency_limit, v_row.weight, NULL));
            END IF;
            EXIT WHEN FOUND;
        END IF;
    END LOOP;
    IF NOT v_has_waited AND {schema}.is_time_for_row_mark() AND pg_try_advisory_xact_lock({schema}.lock_class(0), hashtext(p_resource)) THEN
        PERFORM {schema}.advance_low_water_marks(p_resource, p_position, NULL);
    END IF;
    RETURN 0;
END
$$;


-- Poll many rows of a member at once, as wait(…, 0) polls one. Return the rows that are granted, now or before, and the
-- rows that are gone. p_positions[i] is a row of p_resources[i].
CREATE OR REPLACE FUNCTION {schema}.poll_waiters(
    p_member bigint, p_resources varchar[], p_positions bigint[], OUT granted bigint[], OUT gone bigint[])
{plpgsql_generic_definer}
DECLARE
    v_row      record;
    v_ahead    record;
    v_kind     text;     -- of a request: behind a blocked one, all of its kind are blocked
    v_blocked_kind text;
    v_free     jsonb[];  -- rows that may be granted
    v_blocked  jsonb[];  -- their blockers, one for each kind
    v_written  boolean := false;
BEGIN
    IF {schema}.is_upgraded() THEN
        RETURN;
    ELSIF NOT EXISTS (SELECT FROM {schema}.member WHERE member_id = p_member AND login = session_user) THEN
        gone := p_positions;
        RETURN;
    END IF;
    LOOP
        granted := '{}';
        gone := '{}';
        v_free := '{}';
        v_blocked := '{}';
        v_blocked_kind := NULL;
        FOR v_row IN
            SELECT a.resource_id, a.queue_position, t.access_type, t.concurrency_limit, t.weight, t.granted_at,
                   t.queue_position IS NOT NULL AND t.revoked_at IS NULL AS there
            FROM unnest(p_resources, p_positions) AS a (resource_id, queue_position)
            LEFT JOIN {schema}.{table} AS t
                ON t.resource_id = a.resource_id AND t.queue_position = a.queue_position AND t.member_id = p_member
            ORDER BY a.resource_id, t.access_type, t.concurrency_limit, t.weight, a.queue_position
        LOOP
            v_kind := concat_ws(E'\t', v_row.resource_id, v_row.access_type, v_row.weight, v_row.concurrency_limit);
            IF NOT v_row.there THEN
                gone := gone || v_row.queue_position;
            ELSIF v_row.granted_at IS NOT NULL THEN
                granted := granted || v_row.queue_position;
            ELSIF v_kind IS DISTINCT FROM v_blocked_kind THEN
                SELECT * INTO v_ahead FROM {schema}.eligibility(v_row.resource_id, v_row.queue_position, v_row.access_type,
                                                          v_row.concurrency_limit, v_row.weight, NULL);
                IF v_ahead.eligible THEN
                    v_free := v_free || jsonb_build_object('resource', v_row.resource_id, 'position', v_row.queue_position);
                ELSE
                    v_blocked_kind := v_kind;
                    v_blocked := v_blocked || jsonb_build_object('resource', v_row.resource_id, 'position', v_ahead.blocker);
                END IF;
            END IF;
        END LOOP;
        EXIT WHEN v_written;
        -- Test the owners of the first rows, and the blocker's, as wait does; on 32 resources at most.
        FOR v_row IN
            SELECT b ->> 'resource' AS resource_id, max((b ->> 'position')::bigint) AS blocker FROM unnest(v_blocked) AS b
            GROUP BY 1 ORDER BY random() LIMIT 32
        LOOP
            v_written := {schema}.reap_dead_members(v_row.resource_id, p_member)
                      OR {schema}.check_if_dead(v_row.resource_id, v_row.blocker, p_member) OR v_written;
        END LOOP;
        EXIT WHEN NOT v_written;
    END LOOP;
    IF cardinality(granted) + cardinality(v_free) > 0 AND NOT {schema}.touch_member(p_member) THEN
        granted := '{}';
        gone := p_positions;
        RETURN;
    END IF;
    FOR v_row IN
        SELECT f ->> 'resource' AS resource_id, (f ->> 'position')::bigint AS queue_position FROM unnest(v_free) AS f ORDER BY 2
    LOOP
        UPDATE {schema}.{table} SET granted_at = clock_timestamp()
        WHERE resource_id = v_row.resource_id AND queue_position = v_row.queue_position AND revoked_at IS NULL;
        IF FOUND THEN
            granted := granted || v_row.queue_position;
            IF {schema}.is_time_for_row_mark() AND pg_try_advisory_xact_lock({schema}.lock_class(0), hashtext(v_row.resource_id)) THEN
                PERFORM {schema}.advance_low_water_marks(v_row.resource_id, v_row.queue_position, NULL);
            END IF;
        ELSE
            gone := gone || v_row.queue_position;
        END IF;
    END LOOP;
END
$$;


-- Release a row. Return 0 if done, -1 if this requester has no such row (already released, reaped or revoked, or
-- another login's; a bare participant deletes its row itself).
-- May be repeated. p_outcome is for the history. The client may call this with synchronous_commit = off: if a crash of
-- the server undoes the release, the member repeats it.
CREATE OR REPLACE FUNCTION {schema}.release(
    p_resource varchar, p_position bigint, p_requesting_id varchar, p_outcome varchar DEFAULT 'released') RETURNS integer
{plpgsql_generic_definer}
DECLARE
    v_freed boolean;
BEGIN
    IF (p_outcome IN ('released', 'cancelled', 'timeout', 'lost', 'deadlock', 'revoked')) IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: a request ends as released, cancelled, timeout, lost, deadlock or revoked, not %',
            coalesce({schema}.escape_control_chars(p_outcome), 'NULL') USING ERRCODE = '22023';
    END IF;
    -- (In one statement, as the next waiter waits for its end.)
    WITH gone AS (
        DELETE FROM {schema}.{table} AS t USING {schema}.member AS m
        WHERE t.resource_id = p_resource AND t.queue_position = p_position AND t.requesting_id = p_requesting_id
          AND m.member_id = t.member_id AND m.login = session_user
        RETURNING t.access_type, t.weight, t.member_id, t.owner, t.note, t.requested_at, t.granted_at, t.concurrency_limit,
                  t.revoked_at, t.revoked_by, m.host, coalesce(m.pid, m.backend_pid) AS pid, m.program, m.login)
    INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note, requested_at,
                                  granted_at, outcome, concurrency_limit, host, pid, program, login, ended_by)
    SELECT p_resource, p_position, p_requesting_id, access_type, weight, member_id, owner, note, requested_at, granted_at,
           CASE WHEN p_outcome = 'revoked' AND revoked_at IS NULL THEN 'lost' ELSE p_outcome END,
           concurrency_limit, host, pid, program, login, CASE WHEN p_outcome = 'revoked' THEN revoked_by END
    FROM gone;
    IF NOT FOUND THEN  -- perhaps the row of a removed member
        WITH gone AS (
            DELETE FROM {schema}.{table} AS t
            WHERE t.resource_id = p_resource AND t.queue_position = p_position AND t.requesting_id = p_requesting_id
              AND t.member_id IS NOT NULL AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = t.member_id)
            RETURNING t.*)
        INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note, requested_at,
                                      granted_at, outcome, concurrency_limit, ended_by)
        SELECT resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note, requested_at, granted_at,
               CASE WHEN p_outcome = 'revoked' AND revoked_at IS NULL THEN 'lost' ELSE p_outcome END,
               concurrency_limit, CASE WHEN p_outcome = 'revoked' THEN revoked_by END
        FROM gone;
        IF NOT FOUND THEN
            RETURN -1;
        END IF;
    END IF;
    v_freed := {schema}.release_session_lock_after_commit({schema}.lock_class(2), {schema}.lock_key(p_position));
    RETURN 0;
END
$$;


-- Release the rows that a call of register or register_all may have left: its reply was lost, or it was interrupted.
-- Return how many.
CREATE OR REPLACE FUNCTION {schema}.cancel(p_member bigint, p_uid varchar, p_outcome varchar) RETURNS integer
{plpgsql_generic_definer}
DECLARE
    v_row   record;
    v_count integer := 0;
    v_any_row boolean;
BEGIN
    -- Find them by their uids. Those of register_all end with .1, .2, …, and some of these rows may have left before.
    FOR v_from IN 0..1000000 BY 16 LOOP
        v_any_row := false;
        FOR v_row IN
            SELECT resource_id, queue_position, requesting_id FROM {schema}.{table}
            WHERE member_id = p_member
              AND request_uid = ANY (ARRAY(SELECT concat_ws('.', p_uid, nullif(n, 0))
                                           FROM generate_series(v_from, v_from + 15) AS n))
        LOOP
            v_any_row := true;
            IF {schema}.release(v_row.resource_id, v_row.queue_position, v_row.requesting_id, p_outcome) = 0 THEN
                v_count := v_count + 1;
            END IF;
        END LOOP;
        EXIT WHEN NOT v_any_row;
    END LOOP;
    RETURN v_count;
END
$$;


-- Return true if this login may pin the row of another login: it is a member of that login's role, or an operator.
CREATE OR REPLACE FUNCTION {schema}.may_pin(p_login name) RETURNS boolean {sql_stable}
    SELECT EXISTS (SELECT FROM pg_roles WHERE rolname IN (p_login, '{schema}_operator') AND pg_has_role(session_user, oid, 'MEMBER'))
$$;

-- Return the seal of a position, which only `pin` can make. It proves that this login was allowed to pin the position
-- while the row belonged to that member. Needed when the member is gone, and its login with it.
CREATE OR REPLACE FUNCTION {schema}.pin_seal(p_position bigint, p_member bigint) RETURNS text {plpgsql_stable}
BEGIN
    RETURN (SELECT left(encode(sha256(convert_to(format('%s %s %s %s', k.secret, p_position, p_member, session_user), 'UTF8')), 'hex'), 32)
            FROM {schema}.guard_key AS k);
END
$$;

-- Note in a setting that this transaction has pinned a row, until it (or its savepoint) ends. The setting has the
-- transaction's number, then positions and seals.
CREATE OR REPLACE FUNCTION {schema}.note_pin(p_position bigint, p_member bigint) RETURNS void {plpgsql}
DECLARE
    v_number text := pg_current_xact_id()::text;
    v_note   text := current_setting('sqlsem.{schema}_pinned', true);
    v_entry  text := format('%s:%s', p_position, {schema}.pin_seal(p_position, p_member));
BEGIN
    IF split_part(v_note, ' ', 1) IS DISTINCT FROM v_number THEN
        v_note := v_number;
    ELSIF strpos(v_note, ' ' || v_entry) > 0 THEN
        RETURN;
    END IF;
    PERFORM set_config('sqlsem.{schema}_pinned', v_note || ' ' || v_entry, true);
END
$$;

-- Pin a granted row to the caller's own transaction: the row cannot be released or revoked before the transaction ends,
-- so no other request is granted in its place. Return true if the row is there.
-- Allowed to the row's login, to members of that login's role, and to operators. The row of a removed member can be
-- pinned again by a transaction that had pinned it before; for any other this returns false. Under REPEATABLE READ a
-- row that left meanwhile raises a serialization failure.
CREATE OR REPLACE FUNCTION {schema}.pin(p_resource varchar, p_position bigint, p_requesting_id varchar) RETURNS boolean
{plpgsql_indexed_definer}
DECLARE
    v_login  name;
    v_member bigint;
BEGIN
    SELECT m.login, t.member_id INTO v_login, v_member
    FROM {schema}.{table} AS t LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE t.resource_id = p_resource AND t.queue_position = p_position AND t.requesting_id = p_requesting_id;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF v_login IS DISTINCT FROM session_user AND NOT {schema}.may_pin(v_login) THEN
        IF v_login IS NOT NULL THEN
            RAISE EXCEPTION 'sqlsem: position % on % is login %''s; % may not keep it', p_position, quote_literal(p_resource), v_login, session_user
                USING ERRCODE = '42501', HINT = format('Use a connection of that login, or GRANT %I TO %I.', v_login, session_user);
        ELSIF (CASE WHEN v_member IS NULL  -- a bare participant's row
                   THEN NOT has_table_privilege(session_user, '{schema}.{table}'::regclass, 'DELETE')
                   ELSE strpos(coalesce(current_setting('sqlsem.{schema}_pinned', true), ''),
                               format(' %s:%s', p_position, {schema}.pin_seal(p_position, v_member))) = 0 END) THEN
            RETURN false;
        END IF;
    END IF;
    PERFORM FROM {schema}.{table}
    WHERE resource_id = p_resource AND queue_position = p_position AND requesting_id = p_requesting_id
      AND granted_at IS NOT NULL
    FOR SHARE;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF v_login IS NOT NULL THEN
        PERFORM {schema}.note_pin(p_position, v_member);  -- (also for guarded tables)
    END IF;
    RETURN true;
END
$$;

-- Describe the sessions that lock a table, or rows of it. (A claim, a pin and a request that uses the server's limit
-- take ROW SHARE.)
CREATE OR REPLACE FUNCTION {schema}.describe_table_locks(p_table regclass) RETURNS text {sql}
    SELECT coalesce(string_agg(DISTINCT format('session %s (login %s)', l.pid, {schema}.escape_control_chars(a.usename)), ', '), 'a session that has just ended')
    FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    WHERE l.locktype = 'relation' AND l.relation = p_table AND l.mode NOT IN ('AccessShareLock', 'RowExclusiveLock') AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND l.pid <> pg_backend_pid()
$$;

-- Describe the sessions whose open transactions lock rows of the queue.
CREATE OR REPLACE FUNCTION {schema}.describe_pins() RETURNS text
{sql} SELECT {schema}.describe_table_locks('{schema}.{table}') $$;


-- Views for people ---------------------------------------------------------------------------------------------

-- Return the rows of the queue. state: 'holds', 'waits', 'revoked', or 'dead' (the next session that tests the owner,
-- and may write, removes the row). missing_for: seconds since the owner was first missed, or, if no session has noticed
-- that yet, since its last heartbeat.
-- No client records the grant of a bare participant. So the rule computes these grants, in one pass along the queue for
-- each access type.
CREATE OR REPLACE FUNCTION {schema}.entries(p_resource varchar DEFAULT NULL)
RETURNS TABLE (resource_id varchar, queue_position bigint, state text, access_type varchar, concurrency_limit integer,
               weight integer, requesting_id varchar, member_id bigint, owner varchar, host varchar, pid integer,
               program varchar, note varchar, requested_at timestamptz, granted_at timestamptz,
               seconds float, missing_for float, grace float) {sql_indexed_definer}
    WITH q AS MATERIALIZED (
        SELECT t.* FROM {schema}.{table} AS t WHERE p_resource IS NULL
        UNION ALL
        SELECT t.* FROM {schema}.{table} AS t WHERE t.resource_id = p_resource),
    bare AS (
        SELECT DISTINCT q.resource_id, q.access_type FROM q WHERE q.member_id IS NULL),
    ahead AS (
        SELECT q.*, b.access_type AS label,
               sum(q.weight) FILTER (WHERE b.access_type = 'write' OR q.access_type <> b.access_type) OVER before AS load,
               min(q.concurrency_limit) FILTER (WHERE b.access_type = 'write' OR q.access_type <> b.access_type) OVER before AS declared
        FROM bare AS b JOIN q ON q.resource_id = b.resource_id
        WINDOW before AS (PARTITION BY b.resource_id, b.access_type ORDER BY q.queue_position
                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)),
    inside AS MATERIALIZED (
        SELECT a.queue_position FROM ahead AS a CROSS JOIN LATERAL {schema}.effective_settings(a.resource_id) AS o
        WHERE a.member_id IS NULL AND a.access_type = a.label AND o.paused_at IS NULL
          AND coalesce(coalesce(a.load, 0) + a.weight <= least(a.concurrency_limit, a.declared, o.cap), true))
    SELECT q.resource_id, q.queue_position,
           CASE WHEN l.dead OR q.member_id IS NOT NULL AND l.member_id IS NULL THEN 'dead'
                WHEN q.revoked_at IS NOT NULL THEN 'revoked' WHEN q.granted_at IS NOT NULL THEN 'holds'
                -- (A subquery, as it is hashed in any case: a join might compare each row with each.)
                WHEN q.queue_position IN (SELECT i.queue_position FROM inside AS i) THEN 'holds' ELSE 'waits' END,
           q.access_type, q.concurrency_limit, q.weight, q.requesting_id, q.member_id, q.owner,
           l.host, l.pid, l.program,
           q.note, q.requested_at, q.granted_at,
           extract(epoch FROM clock_timestamp() - coalesce(q.granted_at, q.requested_at))::float,
           CASE WHEN l.missing THEN
               extract(epoch FROM clock_timestamp() - coalesce(l.since, q.granted_at, q.requested_at))::float END,
           l.grace
    FROM q LEFT JOIN {schema}.member_liveness(ARRAY(SELECT DISTINCT q.member_id FROM q)) AS l ON l.member_id = q.member_id
    ORDER BY q.resource_id, q.queue_position
$$;

-- Return the history, newest first. p_since and p_until: ages in seconds. p_who: the owner's login, host, host:pid,
-- program or requesting_id, or the login that ended the request. held, of an owner that died, ends with its last
-- heartbeat. (A custom plan for each call: the filters have different indexes.)
CREATE OR REPLACE FUNCTION {schema}.past(
    p_resource varchar, p_maximum integer, p_since float DEFAULT NULL, p_until float DEFAULT NULL, p_outcome varchar DEFAULT NULL,
    p_who varchar DEFAULT NULL)
RETURNS TABLE (resource_id varchar, queue_position bigint, access_type varchar, weight integer, requesting_id varchar,
               owner varchar, note varchar, requested_at timestamptz, granted_at timestamptz, ended_at timestamptz,
               waited float, held float, outcome varchar, concurrency_limit integer, host varchar, pid integer,
               program varchar, login name, ended_by name)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_custom_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT h.resource_id, h.queue_position, h.access_type, h.weight, h.requesting_id, h.owner, h.note,
           h.requested_at, h.granted_at, h.ended_at,
           extract(epoch FROM coalesce(h.granted_at, h.ended_at) - h.requested_at)::float,
           CASE WHEN h.granted_at IS NOT NULL
                THEN greatest(0, extract(epoch FROM coalesce(h.heartbeat_at, h.ended_at) - h.granted_at)) END::float, h.outcome,
           h.concurrency_limit, h.host, h.pid, h.program, h.login, h.ended_by
    FROM {schema}.history AS h
    WHERE (p_resource IS NULL OR h.resource_id = p_resource)
      AND (p_since IS NULL OR h.ended_at >= statement_timestamp() - least(greatest(p_since, 0), 3e9) * interval '1 second')
      AND (p_until IS NULL OR h.ended_at <= statement_timestamp() - least(greatest(p_until, 0), 3e9) * interval '1 second')
      AND (p_outcome IS NULL OR h.outcome = p_outcome)
      AND (p_who IS NULL OR p_who IN (h.login, h.host, h.host || ':' || h.pid, h.program, h.requesting_id, h.ended_by))
    ORDER BY h.ended_at DESC LIMIT CASE WHEN p_maximum < 0 THEN 0 ELSE p_maximum END;
END
$$;

-- Return the resources, and the patterns of limits (as 'tenant:*'). cap: the limit in effect, the resource's own or a
-- pattern's.
CREATE OR REPLACE FUNCTION {schema}.resources()
RETURNS TABLE (resource_id varchar, cap integer, paused boolean, stale_after float, holding bigint, waiting bigint)
{sql_indexed_definer}
    SELECT n.resource_id, coalesce(n.cap, s.cap), s.paused_at IS NOT NULL, n.stale_after_ms / 1000.0::float,
           coalesce(n.holding, 0), coalesce(n.waiting, 0)
    FROM ((SELECT r.resource_id, r.stale_after_ms FROM {schema}.resource AS r
           WHERE coalesce(r.cap, r.stale_after_ms, r.ageing_ms) IS NOT NULL OR r.paused_at IS NOT NULL) AS o
          FULL JOIN (SELECT l.prefix || '*' AS resource_id, l.cap FROM {schema}.limit_pattern AS l) AS l USING (resource_id)
          FULL JOIN (SELECT e.resource_id, count(*) FILTER (WHERE e.inside) AS holding, count(*) FILTER (WHERE NOT e.inside) AS waiting
                     FROM (SELECT n.resource_id, n.state IN ('holds', 'revoked') OR n.state = 'dead' AND n.granted_at IS NOT NULL AS inside
                           FROM {schema}.entries() AS n) AS e
                     GROUP BY e.resource_id) AS q USING (resource_id)) AS n
    CROSS JOIN LATERAL {schema}.effective_settings(n.resource_id) AS s
    ORDER BY 1
$$;


-- Return the settings of this database.
CREATE OR REPLACE FUNCTION {schema}.settings() RETURNS TABLE (name text, value text)
{sql_stable_definer} SELECT s.name, s.value FROM {schema}.setting AS s $$;


-- feature: operate
-- Calls of operators ---------------------------------------------------------------------------------------------

-- Delete the row of a resource that has no settings. Row '*' stays while there are patterns (effective_settings).
CREATE OR REPLACE FUNCTION {schema}.delete_empty_settings(p_resource varchar) RETURNS void {sql}
    DELETE FROM {schema}.resource
    WHERE resource_id = p_resource AND cap IS NULL AND stale_after_ms IS NULL AND paused_at IS NULL AND ageing_ms IS NULL
      AND (p_resource <> '*' OR NOT EXISTS (SELECT FROM {schema}.limit_pattern))
$$;

-- Set the limit of all resources whose names begin with a prefix; NULL: remove it.
CREATE OR REPLACE FUNCTION {schema}.set_pattern(p_prefix varchar, p_cap integer) RETURNS void {plpgsql}
DECLARE
    v_before integer;
BEGIN
    LOCK TABLE {schema}.limit_pattern IN SHARE ROW EXCLUSIVE MODE;  -- one operator at a time
    INSERT INTO {schema}.resource (resource_id) VALUES ('*') ON CONFLICT DO NOTHING;
    SELECT l.cap INTO v_before FROM {schema}.limit_pattern AS l WHERE l.prefix = p_prefix;
    IF p_cap IS NULL THEN
        DELETE FROM {schema}.limit_pattern WHERE prefix = p_prefix;
    ELSIF v_before IS DISTINCT FROM p_cap THEN
        INSERT INTO {schema}.limit_pattern (prefix, cap) VALUES (p_prefix, p_cap)
        ON CONFLICT (prefix) DO UPDATE SET cap = p_cap, cap_by = session_user, set_at = clock_timestamp();
    END IF;
    IF v_before IS DISTINCT FROM p_cap THEN
        PERFORM {schema}.note_operation('cap', p_prefix || '*', NULL, NULL, NULL, v_before::text, p_cap::text);
    END IF;
    PERFORM {schema}.delete_empty_settings('*');
END
$$;

-- Raise if a request that names no limit would now have none. Called after a limit was removed.
CREATE OR REPLACE FUNCTION {schema}.check_counted_on(p_prefix varchar, p_resource varchar) RETURNS void {plpgsql}
DECLARE
    v_row record;
BEGIN
    SELECT count(*) AS count, min(t.resource_id) AS resource_id INTO v_row
    FROM (SELECT t.resource_id FROM {schema}.{table} AS t
          WHERE t.resource_id = p_resource AND t.concurrency_limit IS NULL AND t.member_id IS NOT NULL
          UNION ALL
          SELECT t.resource_id FROM {schema}.{table} AS t
          WHERE starts_with(t.resource_id, p_prefix) AND t.concurrency_limit IS NULL AND t.member_id IS NOT NULL) AS t
    CROSS JOIN LATERAL {schema}.effective_settings(t.resource_id) AS o
    WHERE o.cap IS NULL;
    IF v_row.count > 0 THEN
        RAISE EXCEPTION 'sqlsem: % requests (on % first) name no limit and count on this one: it can be changed, not lifted, until they have ended',
            v_row.count, quote_literal(v_row.resource_id) USING ERRCODE = '22023',
            HINT = 'Set another limit, or look who they are: sqlsem ls.';
    END IF;
END
$$;

-- Set one setting of a resource. p_what: 'cap' (NULL: none; a name that ends with * is a pattern), 'stale_after' in ms
-- (NULL: never), 'paused' (1 or 0), 'ageing' in ms (NULL: no priorities).
CREATE OR REPLACE FUNCTION {schema}.set_resource(p_resource varchar, p_what text, p_value bigint) RETURNS void
{plpgsql_indexed_definer}
DECLARE
    v_before {schema}.resource;
    v_after  {schema}.resource;
BEGIN
    PERFORM {schema}.check_name('resource', p_resource);
    IF (p_what IN ('cap', 'stale_after', 'paused', 'ageing')) IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: % cannot be set; cap, stale_after, paused and ageing can', coalesce({schema}.escape_control_chars(p_what), 'NULL') USING ERRCODE = '22023';
    ELSIF (p_value BETWEEN CASE WHEN p_what = 'paused' THEN 0 ELSE 1 END
                       AND CASE p_what WHEN 'paused' THEN 1 WHEN 'stale_after' THEN 315360000000 ELSE 2147483647 END) IS FALSE
          OR p_what = 'paused' AND p_value IS NULL THEN
        RAISE EXCEPTION 'sqlsem: % of % cannot be %', p_what, quote_literal({schema}.escape_control_chars(p_resource)), coalesce(p_value::text, 'NULL')
            USING ERRCODE = '22023';
    ELSIF p_what = 'ageing' AND right(p_resource, 1) = '*' THEN
        RAISE EXCEPTION 'sqlsem: priorities are set for one resource, not for a pattern' USING ERRCODE = '22023';
    ELSIF p_what = 'ageing' AND p_value IS NOT NULL AND p_resource ~ '^(rate|once|priority|tasks):' THEN
        RAISE EXCEPTION 'sqlsem: the queue of % is always first come, first served; priorities cannot be set there',
            quote_literal(p_resource) USING ERRCODE = '22023';
    END IF;
    {lock_timeout:10s}
    IF p_what = 'cap' AND p_value IS NULL THEN
        IF current_setting('transaction_isolation') <> 'read committed' THEN  -- an older snapshot misses requests that use the limit
            RAISE EXCEPTION 'sqlsem: a limit is lifted under READ COMMITTED, not %', current_setting('transaction_isolation')
                USING ERRCODE = '25001', HINT = 'SET default_transaction_isolation TO ''read committed'' on this connection.';
        END IF;
        -- No request registers with a limit of the server meanwhile; earlier requests are seen below.
        LOCK TABLE {schema}.limit_pattern IN EXCLUSIVE MODE;
    END IF;
    IF p_what = 'cap' AND right(p_resource, 1) = '*' THEN
        PERFORM {schema}.set_pattern(left(p_resource, -1)::varchar, p_value::integer);
        IF p_value IS NULL THEN
            PERFORM {schema}.check_counted_on(left(p_resource, -1)::varchar, NULL);
        END IF;
        RETURN;
    ELSIF p_resource = '*' THEN
        LOCK TABLE {schema}.limit_pattern IN SHARE ROW EXCLUSIVE MODE;  -- its row may have to stay
    END IF;
    INSERT INTO {schema}.resource (resource_id) VALUES (p_resource) ON CONFLICT DO NOTHING;
    SELECT o.* INTO v_before FROM {schema}.resource AS o WHERE o.resource_id = p_resource FOR UPDATE;
    UPDATE {schema}.resource
    SET cap = CASE p_what WHEN 'cap' THEN p_value ELSE cap END,
        cap_by = CASE WHEN p_what <> 'cap' OR cap = p_value THEN cap_by WHEN p_value IS NOT NULL THEN session_user END,
        stale_after_ms = CASE p_what WHEN 'stale_after' THEN p_value ELSE stale_after_ms END,
        ageing_ms = CASE p_what WHEN 'ageing' THEN p_value ELSE ageing_ms END,
        paused_at = CASE WHEN p_what <> 'paused' THEN paused_at WHEN p_value = 1 THEN coalesce(paused_at, clock_timestamp()) END,
        paused_by = CASE WHEN p_what <> 'paused' OR p_value = 1 AND paused_at IS NOT NULL THEN paused_by WHEN p_value = 1 THEN session_user END
    WHERE resource_id = p_resource
    RETURNING * INTO v_after;
    IF (v_before.cap, v_before.stale_after_ms, v_before.paused_at, v_before.ageing_ms)
       IS DISTINCT FROM (v_after.cap, v_after.stale_after_ms, v_after.paused_at, v_after.ageing_ms) THEN
        PERFORM {schema}.note_operation(
            CASE WHEN p_what <> 'paused' THEN p_what WHEN p_value = 1 THEN 'pause' ELSE 'resume' END, p_resource, NULL, NULL, NULL,
            CASE p_what WHEN 'cap' THEN v_before.cap WHEN 'stale_after' THEN v_before.stale_after_ms
                        WHEN 'ageing' THEN v_before.ageing_ms END::text,
            CASE WHEN p_what <> 'paused' THEN p_value END::text);
    END IF;
    PERFORM {schema}.delete_empty_settings(p_resource);
    IF p_what = 'cap' AND p_value IS NULL THEN
        PERFORM {schema}.check_counted_on(NULL, p_resource);
    END IF;
END
$$;

-- Revoke a row of a resource. A waiting row is removed at once, and so is a bare participant's. The row of any other
-- holder is removed at once only with p_force; else the holder learns of it by its next heartbeat, and has its grace to
-- release. Return 0 removed, 1 marked as revoked, -1 no such row.
CREATE OR REPLACE FUNCTION {schema}.revoke_row(p_resource varchar, p_position bigint, p_force boolean) RETURNS integer {plpgsql}
DECLARE
    v_row record;
BEGIN
    {lock_timeout:5s}
    BEGIN
        -- revoked_at first: either a waiter that is granted this instant sees it, or this statement sees the grant.
        UPDATE {schema}.{table} SET revoked_at = coalesce(revoked_at, clock_timestamp()), revoked_by = coalesce(revoked_by, session_user)
        WHERE resource_id = p_resource AND queue_position = p_position
        RETURNING granted_at, member_id INTO v_row;
        IF NOT FOUND THEN
            RETURN -1;
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        RAISE EXCEPTION 'sqlsem: position % is kept (assert_holding) by an open transaction: %', p_position, {schema}.describe_pins()
            USING ERRCODE = '55P03', HINT = 'Try again when that has ended; pg_terminate_backend(pid) ends it.';
    END;
    PERFORM {schema}.note_operation('revoke', p_resource, p_position, NULL, NULL,
                                    CASE WHEN v_row.granted_at IS NULL THEN 'waits' ELSE 'holds' END, CASE WHEN p_force THEN 'force' END);
    IF p_force OR v_row.granted_at IS NULL OR v_row.member_id IS NULL THEN
        PERFORM {schema}.remove(p_resource, p_position, 'revoked');
        RETURN 0;
    END IF;
    RETURN 1;
END
$$;

-- Revoke a row by its position alone, which no index has: this reads the whole queue.
CREATE OR REPLACE FUNCTION {schema}.revoke(p_position bigint, p_force boolean) RETURNS integer {plpgsql_indexed_definer}
BEGIN
    RETURN coalesce((SELECT {schema}.revoke_row(t.resource_id, t.queue_position, p_force) FROM {schema}.{table} AS t
                     WHERE t.queue_position = p_position), -1);
END
$$;

-- Revoke all rows of a member, or of all members of a login, and remove the members: waiting rows at once; a live
-- holder is notified first, unless p_force, as revoke does, and its member stays until it has released its rows. Return
-- the number of members that are gone.
CREATE OR REPLACE FUNCTION {schema}.revoke_members(p_member bigint, p_login text, p_force boolean DEFAULT false) RETURNS integer
{plpgsql_indexed_definer}
DECLARE
    v_member {schema}.member;
    v_gone   integer := 0;
    v_rows   integer := 0;
BEGIN
    IF (p_member IS NULL) = (p_login IS NULL) OR p_login = '' THEN
        RAISE EXCEPTION 'sqlsem: revoke_members needs either a member or a login' USING ERRCODE = '22023';
    END IF;
    FOR v_member IN SELECT * FROM {schema}.member AS m WHERE m.member_id = p_member OR m.login::text = p_login ORDER BY m.member_id LOOP
        SELECT v_rows + count(*) INTO v_rows
        FROM (SELECT {schema}.revoke_row(r.resource_id, r.queue_position, coalesce(p_force, false))
              FROM {schema}.member_rows(v_member.member_id) AS r) AS r;
        CONTINUE WHEN EXISTS (SELECT FROM {schema}.member_rows(v_member.member_id));
        DELETE FROM {schema}.member AS m WHERE m.member_id = v_member.member_id;
        v_gone := v_gone + 1;
    END LOOP;
    IF v_gone + v_rows > 0 THEN
        PERFORM {schema}.note_operation('revoke_members', NULL, NULL, NULL, NULL, coalesce('login ' || p_login, 'member ' || p_member),
                                        concat(v_gone, ' members, ', v_rows, ' rows', CASE WHEN p_force THEN ', force' END));
    END IF;
    RETURN v_gone;
END
$$;

-- Test every member now; return the number of members and stale rows removed.
CREATE OR REPLACE FUNCTION {schema}.reap() RETURNS integer {plpgsql_indexed_definer}
DECLARE
    v_row    record;
    v_before bigint := (SELECT count(*) FROM {schema}.{table});
    v_gone   bigint;
BEGIN
    PERFORM {schema}.check_origin();
    FOR v_row IN
        SELECT t.resource_id, t.queue_position FROM {schema}.{table} AS t
        LEFT JOIN {schema}.member_liveness() AS l ON l.member_id = t.member_id
        WHERE l.missing IS NOT FALSE OR t.revoked_at IS NOT NULL OR t.waiter_lease_until IS NOT NULL
    LOOP
        PERFORM {schema}.check_if_dead(v_row.resource_id, v_row.queue_position, -1);
    END LOOP;
    -- feature: queue
    PERFORM {schema}.recover_tasks(NULL, -1);
    -- end of feature: queue
    -- feature: batches
    PERFORM {schema}.recover_batches(NULL, -1);
    -- end of feature: batches
    -- Dead members without rows or tasks were not found above.
    PERFORM {schema}.check_liveness(l.member_id, -1) FROM {schema}.member_liveness() AS l WHERE l.dead;
    v_gone := v_before - (SELECT count(*) FROM {schema}.{table});
    IF v_gone > 0 THEN
        PERFORM {schema}.note_operation('reap', NULL, NULL, NULL, NULL, NULL, v_gone::text);
    END IF;
    RETURN v_gone;
END
$$;

-- end of feature: operate


-- Operators' actions ----------------------------------------------------------------------------------------------

-- Record a call of an operator. Host, process and program are those that the client names in setting sqlsem.client, one
-- a line, or else those that the server sees.
CREATE OR REPLACE FUNCTION {schema}.note_operation(
    p_action text, p_resource varchar, p_position bigint, p_queue varchar, p_task bigint, p_old text, p_new text) RETURNS void
{sql}
    INSERT INTO {schema}.operation (host, pid, program, action, resource_id, queue_position, queue_name, task_id, old_value, new_value)
    SELECT left(coalesce(nullif(split_part(c.told, E'\n', 1), ''), host(inet_client_addr())), 255),
           CASE WHEN split_part(c.told, E'\n', 2) ~ '^[0-9]{1,9}$' THEN split_part(c.told, E'\n', 2)::integer ELSE pg_backend_pid() END,
           left({schema}.escape_control_chars(coalesce(nullif(split_part(c.told, E'\n', 3), ''), current_setting('application_name'))), 255),
           p_action, p_resource, p_position, p_queue, p_task, left(p_old, 1000), left(p_new, 1000)
    FROM (SELECT coalesce(current_setting('sqlsem.client', true), '') AS told) AS c
$$;

-- Return the calls of operators, newest first. p_name: of one resource or work queue. p_since and p_until: ages in
-- seconds. p_who: login, host, host:pid or program.
CREATE OR REPLACE FUNCTION {schema}.operations(
    p_name varchar DEFAULT NULL, p_maximum integer DEFAULT 100, p_since float DEFAULT NULL, p_until float DEFAULT NULL,
    p_action varchar DEFAULT NULL, p_who varchar DEFAULT NULL)
RETURNS TABLE (operation_id bigint, done_at timestamptz, login name, host varchar, pid integer, program varchar, action varchar,
               resource_id varchar, queue_position bigint, queue_name varchar, task_id bigint, old_value varchar, new_value varchar)
{sql_stable_indexed_definer}
    SELECT o.operation_id, o.done_at, o.login, o.host, o.pid, o.program, o.action, o.resource_id, o.queue_position, o.queue_name,
           o.task_id, o.old_value, o.new_value
    FROM {schema}.operation AS o
    WHERE (p_name IS NULL OR p_name IN (o.resource_id, o.queue_name))
      AND (p_since IS NULL OR o.done_at >= statement_timestamp() - least(greatest(p_since, 0), 3e9) * interval '1 second')
      AND (p_until IS NULL OR o.done_at <= statement_timestamp() - least(greatest(p_until, 0), 3e9) * interval '1 second')
      AND (p_action IS NULL OR o.action = p_action)
      AND (p_who IS NULL OR p_who IN (o.login, o.host, o.host || ':' || o.pid, o.program))
    ORDER BY o.operation_id DESC LIMIT CASE WHEN p_maximum < 0 THEN 0 ELSE p_maximum END
$$;

-- Delete records of calls that are too old, as prune does with the history: of the oldest p_maximum rows.
CREATE OR REPLACE FUNCTION {schema}.prune_operations(p_maximum integer) RETURNS bigint {sql_indexed_definer}
    WITH oldest AS MATERIALIZED (
        SELECT o.operation_id, o.done_at FROM {schema}.operation AS o ORDER BY o.operation_id LIMIT greatest(p_maximum, 0) FOR UPDATE SKIP LOCKED),
    gone AS (
        DELETE FROM {schema}.operation WHERE operation_id = ANY (ARRAY(
            SELECT o.operation_id FROM oldest AS o
            WHERE o.done_at < clock_timestamp()
                              - (SELECT value FROM {schema}.setting WHERE name = 'history_days')::integer * interval '1 day'
               OR o.operation_id <= (SELECT max(operation_id) FROM {schema}.operation)
                                    - (SELECT value FROM {schema}.setting WHERE name = 'history_rows')::bigint))
        RETURNING 1)
    SELECT count(*) FROM gone
$$;

-- Delete history older than setting history_days, and rows beyond history_rows: of the oldest p_maximum rows. Rows are
-- counted by their positions (few requests leave two rows, or none), as counting a million would take long. One call in
-- ten also deletes low-water marks that a newer one replaces, or that are a day old: it has to read all marks.
CREATE OR REPLACE FUNCTION {schema}.prune(p_maximum integer) RETURNS bigint {sql_indexed_definer}
    DELETE FROM {schema}.low_water WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM {schema}.low_water AS l
        WHERE (SELECT random() < 0.1)
          AND (l.made_at < clock_timestamp() - interval '1 day'
               OR l.made_at < clock_timestamp() - interval '1 minute'
                  AND EXISTS (SELECT FROM {schema}.low_water AS o WHERE o.resource_id = l.resource_id AND o.mark > l.mark))
        LIMIT greatest(p_maximum, 0) FOR UPDATE SKIP LOCKED));
    -- feature: rates
    -- (Delete use of rates that stopped counting more than a day ago, and windows that were not used for a day. Windows
    -- are deleted under the gate, so that no session has read a window, and is about to record its use there.
    -- task_may_start locks the window instead.)
    DELETE FROM {schema}.rate_slot WHERE ctid = ANY (ARRAY(
        SELECT s.ctid FROM {schema}.rate_slot AS s
        WHERE (SELECT random() < 0.1)
          AND (s.slot + 1) * ((s.window_ms + 99) / 100) + s.window_ms < (extract(epoch FROM clock_timestamp()) - 86400) * 1000
        LIMIT greatest(p_maximum, 0) FOR UPDATE SKIP LOCKED));
    DELETE FROM {schema}.rate_window WHERE ctid = ANY (ARRAY(
        SELECT w.ctid FROM {schema}.rate_window AS w
        WHERE (SELECT random() < 0.1)
          AND CASE WHEN w.cap IS NULL AND w.seen_ms + 2 * w.window_ms < (extract(epoch FROM clock_timestamp()) - 86400) * 1000
                        AND NOT EXISTS (SELECT FROM {schema}.rate_slot AS s
                                        WHERE s.resource_id = w.resource_id AND s.window_ms = w.window_ms)
                   THEN pg_try_advisory_xact_lock({schema}.lock_class(0), hashtext(w.resource_id)) END
        LIMIT greatest(p_maximum, 0) FOR UPDATE SKIP LOCKED));
    -- end of feature: rates
    WITH oldest AS MATERIALIZED (
        SELECT h.ctid AS place, h.ended_at, h.queue_position FROM {schema}.history AS h ORDER BY h.ended_at LIMIT greatest(p_maximum, 0)),
    gone AS (
        DELETE FROM {schema}.history WHERE ctid = ANY (ARRAY(
            SELECT h.ctid FROM {schema}.history AS h
            WHERE h.ctid = ANY (ARRAY(
                SELECT o.place FROM oldest AS o
                WHERE o.ended_at < clock_timestamp()
                                   - (SELECT value FROM {schema}.setting WHERE name = 'history_days')::integer * interval '1 day'
                   OR o.queue_position <= (SELECT queue_position FROM {schema}.history ORDER BY ended_at DESC LIMIT 1)
                                          - (SELECT value FROM {schema}.setting WHERE name = 'history_rows')::bigint))
            FOR UPDATE SKIP LOCKED))
        RETURNING 1)
    SELECT count(*) FROM gone
$$;


-- Number a row that a bare participant inserts. The trigger, too, draws the number under the gate, so that numbers
-- become visible in order; the participant then has the gate until its transaction ends. (Rows of the routines have a
-- request_uid, and do not come here.)
CREATE OR REPLACE FUNCTION {schema}.number_bare_row() RETURNS trigger {plpgsql_indexed_definer}
BEGIN
    IF NEW.resource_id = '' OR NEW.resource_id <> btrim(NEW.resource_id) OR NEW.weight < 1 OR NEW.concurrency_limit < NEW.weight THEN
        RAISE EXCEPTION 'sqlsem: bad row: resource %, limit %, weight %; a name has no blanks around it, and 1 <= weight <= limit',
            quote_literal(NEW.resource_id), NEW.concurrency_limit, NEW.weight USING ERRCODE = '22023';
    ELSIF concat(NEW.resource_id, NEW.access_type, NEW.requesting_id) ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'sqlsem: bad row: a control character in resource %, access type % or requesting_id %',
            {schema}.escape_control_chars(NEW.resource_id), {schema}.escape_control_chars(NEW.access_type), {schema}.escape_control_chars(NEW.requesting_id) USING ERRCODE = '22023';
    ELSIF NEW.access_type = 'upgrade' THEN
        RAISE EXCEPTION 'sqlsem: bad row: the access type ''upgrade'' is that of a reader which becomes a writer' USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.check_not_reserved(NEW.resource_id);
    PERFORM {schema}.take_exclusive_lock({schema}.lock_class(0), hashtext(NEW.resource_id), 'the gate of ' || quote_literal(NEW.resource_id));
    IF {schema}.ageing_of(NEW.resource_id) IS NOT NULL THEN
        PERFORM {schema}.require_priority(NEW.resource_id);
    END IF;
    NEW.queue_position := nextval(pg_get_serial_sequence('{schema}.{table}', 'queue_position'));
    DELETE FROM {schema}.low_water WHERE resource_id = NEW.resource_id AND mark > NEW.queue_position;
    NEW.member_id := NULL;
    NEW.granted_at := NULL;
    NEW.revoked_at := NULL;
    NEW.revoked_by := NULL;
    NEW.requested_at := clock_timestamp();
    RETURN NEW;
END
$$;
DO $$
BEGIN
    -- Create the trigger only once: that locks the table, and waits for all sessions that wait in it.
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'number_bare_row' AND tgrelid = '{schema}.{table}'::regclass) THEN
        CREATE TRIGGER number_bare_row BEFORE INSERT ON {schema}.{table}
            FOR EACH ROW WHEN (NEW.request_uid IS NULL) EXECUTE FUNCTION {schema}.number_bare_row();
    END IF;
END
$$;
