-- sqlsem, hand-overs of locks, for PostgreSQL: a holder hands its lock over, and the client with the token adopts it,
-- with the same position and fence and without a gap. May be run again at any time. Described in docs/howto/transactions.md.
--
-- From hand_over to adopt the rows belong to a member in transit, which lives by a lease. If no client adopts them in
-- time, they are reaped like all rows whose lease is over. So a row has one owner at each moment: the giver until
-- hand_over commits, then the member in transit, for which no client can act, and the adopter from the commit of adopt
-- on. Each time the row gets another requesting_id and uid: so a late release or a repeated call of an earlier owner
-- finds no row.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Return a new token, of 244 random bits.
CREATE OR REPLACE FUNCTION {schema}.new_token() RETURNS text
{sql} SELECT 'sqlsem-' || replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', '') $$;

-- Return the hash of a token, as table handover stores it.
CREATE OR REPLACE FUNCTION {schema}.token_hash(p_token text) RETURNS varchar
{sql_immutable} SELECT encode(sha256(convert_to(p_token, 'UTF8')), 'hex') $$;


-- Hand over rows of a member, all or none. A client that presents the token of p_hash within p_ttl_ms, as login p_to
-- (NULL: the giver's login), can adopt them. Return 0 if done, -1 if one of the rows is not held. May be repeated.
CREATE OR REPLACE FUNCTION {schema}.hand_over_rows(
    p_member bigint, p_positions bigint[], p_hash varchar, p_ttl_ms integer, p_to varchar) RETURNS integer
{plpgsql_generic_definer}
DECLARE
    v_member  {schema}.member;
    v_row     record;
    v_transit bigint;
    v_count   integer := 0;
    v_first   record;
    v_freed   boolean;
BEGIN
    PERFORM {schema}.require_outside_transaction('hand_over');
    {lock_timeout:60s}
    PERFORM {schema}.check_grace_or_lease('lease', p_ttl_ms);
    IF (p_hash ~ '^[0-9a-f]{64}$') IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: the hash of a token is 64 hexadecimal digits' USING ERRCODE = '22023';
    ELSIF p_to IS NOT NULL AND NOT EXISTS (SELECT FROM pg_roles WHERE rolname = p_to) THEN
        RAISE EXCEPTION 'sqlsem: nothing can be handed over to %, as there is no such login', quote_literal({schema}.escape_control_chars(p_to))
            USING ERRCODE = '42501', HINT = 'Name a role of this server, or leave it out for the login of the giver.';
    ELSIF EXISTS (SELECT FROM {schema}.handover WHERE token_hash = p_hash AND given_by = session_user) THEN
        RETURN 0;
    END IF;
    DELETE FROM {schema}.handover WHERE token_hash = ANY (ARRAY(
        SELECT token_hash FROM {schema}.handover AS h
        WHERE given_at < statement_timestamp() - interval '1 day'  -- (clock_timestamp() is no condition of an index)
          AND (SELECT m.member_id FROM {schema}.member AS m WHERE m.member_id = h.member_id) IS NULL  -- (no join, which may read all)
        ORDER BY given_at LIMIT 100 FOR UPDATE SKIP LOCKED));
    -- Record a heartbeat. The UPDATE also locks the giver: until the commit no session can reap it.
    UPDATE {schema}.member
    SET heartbeat_at = clock_timestamp(), lease_until = clock_timestamp() + lease_ms * interval '1 millisecond'
    WHERE member_id = p_member AND login = session_user
    RETURNING * INTO v_member;
    IF NOT FOUND THEN
        RETURN -1;
    END IF;
    FOR v_row IN
        SELECT * FROM {schema}.{table}
        WHERE member_id = p_member
          AND queue_position = ANY (ARRAY(SELECT queue_position FROM {schema}.member_rows(p_member) AS r
                                          WHERE r.queue_position = ANY (p_positions)))
        ORDER BY queue_position FOR UPDATE
    LOOP
        EXIT WHEN v_row.granted_at IS NULL OR v_row.revoked_at IS NOT NULL OR v_row.access_type = 'upgrade';
        v_count := v_count + 1;
        IF v_count = 1 THEN
            v_first := v_row;
        END IF;
    END LOOP;
    IF v_count = 0 OR v_count <> cardinality(p_positions) THEN
        RETURN -1;
    END IF;
    -- Register the member in transit, with the giver's process, for displays, and without a login: its rows cannot be
    -- renewed or released without the token.
    INSERT INTO {schema}.member (beacon, backend_pid, host, pid, program, login, grace_ms, lease_ms, lease_until)
    VALUES (NULL, NULL, v_member.host, coalesce(v_member.pid, v_member.backend_pid), v_member.program,
            '', 0, p_ttl_ms, clock_timestamp() + p_ttl_ms * interval '1 millisecond')
    RETURNING member_id INTO v_transit;
    INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note,
                                  requested_at, granted_at, outcome, concurrency_limit, host, pid, program, login)
    SELECT resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note,
           requested_at, granted_at, 'handed_over', concurrency_limit,
           v_member.host, coalesce(v_member.pid, v_member.backend_pid), v_member.program, v_member.login
    FROM {schema}.{table} WHERE member_id = p_member AND queue_position = ANY (p_positions);
    UPDATE {schema}.{table} AS t
    SET member_id = v_transit, requesting_id = format('in transit %s', v_transit),
        owner = left('handed over by ' || coalesce(owner, requesting_id), 255), waiter_lease_until = NULL,
        request_uid = format('in transit %s.%s', v_transit, queue_position), granted_at = clock_timestamp()
    WHERE member_id = p_member AND queue_position = ANY (p_positions);
    INSERT INTO {schema}.handover (token_hash, member_id, row_count, resource_id, queue_position, given_by, given_to, ttl_ms)
    VALUES (p_hash, v_transit, v_count, v_first.resource_id, v_first.queue_position, session_user,
            coalesce(p_to, session_user), p_ttl_ms);
    -- Release the wakeup locks: the waiters wake, find rows with a lease, and poll from then on.
    FOR v_row IN SELECT p AS queue_position FROM unnest(p_positions) AS p LOOP
        v_freed := {schema}.release_session_lock_after_commit({schema}.lock_class(2), {schema}.lock_key(v_row.queue_position));
    END LOOP;
    RETURN 0;
END
$$;


-- Let a member adopt the rows that were handed over under a token. Return one row for each lock with code 0; or one row
-- with the reason:
--   -1  no such token                       -2  it was used; with the adopter and the time
--   -3  too late: the lease is over, or an operator has revoked a row      -4  it is for another login
-- May be repeated with the same p_uid.
CREATE OR REPLACE FUNCTION {schema}.adopt_rows(
    p_member bigint, p_requesting_id varchar, p_owner varchar, p_uid varchar, p_token text)
RETURNS TABLE (code integer, words text, seconds float, resource_id varchar, queue_position bigint, access_type varchar,
               concurrency_limit integer, weight integer, note varchar) {plpgsql_generic_definer}
#variable_conflict use_column
DECLARE
    v_given  {schema}.handover;
    v_member {schema}.member;
    v_count  integer;
    v_row    record;
BEGIN
    PERFORM {schema}.require_outside_transaction('adopt');
    {lock_timeout:60s}
    IF concat(p_requesting_id, p_owner, p_uid) ~ '[[:cntrl:]]' OR p_requesting_id IS NULL OR p_uid IS NULL THEN
        RAISE EXCEPTION 'sqlsem: bad request: requesting_id and uid must be printable text' USING ERRCODE = '22023';
    END IF;
    -- Take the member's lock exclusively: no registration of this member may write a low-water mark above the adopted
    -- rows meanwhile.
    PERFORM pg_advisory_xact_lock({schema}.lock_class(7), {schema}.lock_key(p_member));
    SELECT h.* INTO v_given FROM {schema}.handover AS h WHERE h.token_hash = {schema}.token_hash(p_token) FOR UPDATE;
    IF NOT FOUND THEN
        code := -1;
        RETURN NEXT;
        RETURN;
    END IF;
    resource_id := v_given.resource_id;
    queue_position := v_given.queue_position;
    seconds := extract(epoch FROM clock_timestamp() - coalesce(v_given.adopted_at, v_given.given_at));
    IF session_user NOT IN (v_given.given_to, v_given.given_by)
       AND NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_given.given_to AND pg_has_role(session_user, oid, 'MEMBER')) THEN
        code := -4;
        words := v_given.given_to;
        RETURN NEXT;
        RETURN;
    ELSIF v_given.adopted_at IS NOT NULL AND (v_given.adopted_by <> p_member OR v_given.adopted_uid <> p_uid) THEN
        code := -2;
        words := v_given.adopter;
        RETURN NEXT;
        RETURN;
    END IF;
    UPDATE {schema}.member
    SET heartbeat_at = clock_timestamp(), lease_until = clock_timestamp() + lease_ms * interval '1 millisecond'
    WHERE member_id = p_member AND login = session_user
    RETURNING * INTO v_member;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'sqlsem: member % is not known: it was removed, or belongs to another login', p_member
            USING ERRCODE = 'P0002', HINT = 'Register again (register_member).';
    END IF;
    IF v_given.adopted_at IS NULL THEN
        PERFORM {schema}.check_origin();
        -- Lock the member in transit: a session that finds its lease expired has to delete it, so only one of the two
        -- sessions succeeds.
        PERFORM FROM {schema}.member AS m WHERE m.member_id = v_given.member_id AND m.lease_until >= clock_timestamp() FOR UPDATE;
        IF FOUND THEN
            SELECT count(*) INTO v_count
            FROM (SELECT FROM {schema}.{table} AS t
                  WHERE t.member_id = v_given.member_id AND t.revoked_at IS NULL
                    AND t.queue_position = ANY (ARRAY(SELECT r.queue_position FROM {schema}.member_rows(v_given.member_id) AS r))
                  FOR UPDATE) AS kept;
        END IF;
        IF v_count IS DISTINCT FROM v_given.row_count THEN  -- too late, or an operator revoked some of them
            code := -3;
            RETURN NEXT;
            RETURN;
        END IF;
        DELETE FROM {schema}.member AS m WHERE m.member_id = v_given.member_id;
        -- (The adopted rows may be below the member's low-water mark.)
        DELETE FROM {schema}.low_water AS l WHERE l.resource_id = {schema}.member_key(p_member);
        UPDATE {schema}.{table} AS t
        SET member_id = p_member, requesting_id = p_requesting_id, owner = p_owner,
            request_uid = CASE v_given.row_count WHEN 1 THEN p_uid ELSE concat(p_uid, '.', n.number) END
        FROM (SELECT r.queue_position AS place, row_number() OVER (ORDER BY r.queue_position) AS number
              FROM {schema}.member_rows(v_given.member_id) AS r) AS n
        WHERE t.member_id = v_given.member_id AND t.queue_position = n.place;
        UPDATE {schema}.handover
        SET adopted_at = clock_timestamp(), adopted_by = p_member, adopted_uid = p_uid,
            adopter = format('%s:%s %s', v_member.host, coalesce(v_member.pid, v_member.backend_pid), v_member.program)
        WHERE token_hash = v_given.token_hash;
    END IF;
    code := 0;
    FOR v_row IN SELECT * FROM {schema}.member_rows(p_member) AS r
                 WHERE r.request_uid = p_uid OR r.request_uid LIKE replace(p_uid, '_', E'\\_') || '.%' ORDER BY r.queue_position LOOP
        IF v_member.lease_ms IS NULL THEN
            -- (A waiter may share the lock for an instant, to test if it is free: so try several times. Without the
            -- lock, waiters poll.)
            FOR v_try IN 1..20 LOOP
                EXIT WHEN pg_try_advisory_lock({schema}.lock_class(2), {schema}.lock_key(v_row.queue_position));
                PERFORM pg_sleep(0.001);
            END LOOP;
        END IF;
        resource_id := v_row.resource_id;
        queue_position := v_row.queue_position;
        access_type := v_row.access_type;
        concurrency_limit := v_row.concurrency_limit;
        weight := v_row.weight;
        note := v_row.note;
        RETURN NEXT;
    END LOOP;
END
$$;


-- For sessions -----------------------------------------------------------------------------------------------------

-- Return the rows that a session's requester holds on a resource, with their member. own: the member was registered for
-- this row alone.
CREATE OR REPLACE FUNCTION {schema}.session_rows(
    p_resource text, p_position bigint, p_requesting_id text, OUT member bigint, OUT queue_position bigint, OUT own boolean)
RETURNS SETOF record {sql_indexed_definer}
    SELECT t.member_id, t.queue_position, m.pid IS NULL AND m.lease_ms IS NOT NULL
    FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807) AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE t.requesting_id = p_requesting_id AND m.login = session_user AND t.granted_at IS NOT NULL
      AND (p_position IS NULL OR t.queue_position = p_position)
$$;

-- Delete a member that was registered for one row alone, and has no rows any more.
CREATE OR REPLACE FUNCTION {schema}.delete_empty_member(p_member bigint) RETURNS void {sql_indexed_definer}
    DELETE FROM {schema}.member AS m
    WHERE m.member_id = p_member AND m.pid IS NULL AND m.lease_ms IS NOT NULL AND m.login = session_user
      AND NOT EXISTS (SELECT FROM {schema}.member_rows(p_member))
$$;

-- Hand over the lock that this requester holds on a resource, and return a token. Of several locks, queue_position says
-- which; without it the call fails (22023). A session that adopts the token within ttl_seconds, as login to_login (by
-- default this login), holds the lock from then on. Raise 55000 if nothing is held.
CREATE OR REPLACE PROCEDURE {schema}.hand_over(
    resource text, queue_position bigint DEFAULT NULL, ttl_seconds double precision DEFAULT 60, to_login text DEFAULT NULL,
    requesting_id text DEFAULT NULL, INOUT token text DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    v_row   pg_catalog.record;
    v_count integer := 0;
    v_code  integer := -1;
BEGIN
    token := NULL;
    CALL {schema}.require_autocommit('hand_over');
    PERFORM {schema}.check_name('resource', resource);
    IF (ttl_seconds OPERATOR(pg_catalog.>=) 1 AND ttl_seconds OPERATOR(pg_catalog.<=) 2147483) IS NOT TRUE THEN  -- nor NaN
        RAISE EXCEPTION 'sqlsem: ttl_seconds must be from 1 to 2147483, not %', coalesce(ttl_seconds::pg_catalog.text, 'NULL') USING ERRCODE = '22023';
    END IF;
    FOR v_row IN SELECT * FROM {schema}.session_rows(resource, queue_position, coalesce(requesting_id, {schema}.session_id())) LOOP
        v_count := v_count OPERATOR(pg_catalog.+) 1;
    END LOOP;
    IF v_count OPERATOR(pg_catalog.>) 1 THEN
        RAISE EXCEPTION 'sqlsem: this requester holds several on %; say which, by its queue_position', pg_catalog.quote_literal(resource)
            USING ERRCODE = '22023';
    ELSIF v_count OPERATOR(pg_catalog.=) 1 THEN
        token := {schema}.new_token();
        v_code := {schema}.hand_over_rows(v_row.member, ARRAY[v_row.queue_position], {schema}.token_hash(token),
                                          pg_catalog.floor(ttl_seconds OPERATOR(pg_catalog.*) 1000::double precision)::integer,
                                          to_login::varchar);
        IF v_row.own THEN
            PERFORM {schema}.delete_empty_member(v_row.member);
        END IF;
    END IF;
    IF v_code OPERATOR(pg_catalog.<>) 0 THEN
        RAISE EXCEPTION 'sqlsem: nothing is held (any more) on % by this requester', pg_catalog.quote_literal(resource)
            USING ERRCODE = '55000', HINT = 'Only what is held can be handed over.';
    END IF;
    COMMIT;  -- commit now, even if the caller fails later: another session may adopt the rows
END
$$;

-- Adopt the locks of a token for this session, or with a lease; raise if the token is not valid. `release` ends them. If
-- the token is for several locks, the first one is returned, and all get the same requesting_id.
CREATE OR REPLACE PROCEDURE {schema}.adopt(
    token text, requesting_id text DEFAULT NULL, lease_seconds double precision DEFAULT NULL,
    INOUT resource text DEFAULT NULL, INOUT queue_position bigint DEFAULT NULL, INOUT fence bigint DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    v_lease_ms integer;
    v_member   bigint;
    v_row      pg_catalog.record;
    v_id       pg_catalog.text;
BEGIN
    resource := NULL;
    queue_position := NULL;
    fence := NULL;
    CALL {schema}.require_autocommit('adopt');
    v_id := coalesce(requesting_id, {schema}.session_id());
    PERFORM {schema}.check_name('requesting_id', v_id);
    v_lease_ms := {schema}.check_lease(lease_seconds);
    v_member := {schema}.session_member(v_lease_ms);
    COMMIT;
    FOR v_row IN SELECT * FROM {schema}.adopt_rows(v_member, v_id::varchar, session_user::varchar, {schema}.new_uid(), token) LOOP
        IF v_row.code OPERATOR(pg_catalog.=) 0 THEN
            EXIT WHEN queue_position IS NOT NULL;
            resource := v_row.resource_id;
            queue_position := v_row.queue_position;
            fence := queue_position;
        END IF;
    END LOOP;
    COMMIT;
    IF queue_position IS NOT NULL THEN
        RETURN;
    END IF;
    PERFORM {schema}.delete_empty_member(v_member);
    COMMIT;
    IF v_row.code OPERATOR(pg_catalog.=) -1 THEN
        RAISE EXCEPTION 'sqlsem: this token is not known here' USING ERRCODE = '55000',
            HINT = 'It is no token of this database, or was over more than a day ago; have the lock handed over again.';
    ELSIF v_row.code OPERATOR(pg_catalog.=) -2 THEN
        RAISE EXCEPTION 'sqlsem: this token was used % s ago: % adopted position % on %', pg_catalog.round(v_row.seconds::numeric, 1),
            v_row.words, v_row.queue_position, pg_catalog.quote_literal(v_row.resource_id)
            USING ERRCODE = '55000', HINT = 'A token can be used once; have the lock handed over again.';
    ELSIF v_row.code OPERATOR(pg_catalog.=) -4 THEN
        RAISE EXCEPTION 'sqlsem: position % on % was handed over to login %, not to %', v_row.queue_position,
            pg_catalog.quote_literal(v_row.resource_id), v_row.words, session_user
            USING ERRCODE = '42501', HINT = 'Adopt it as that login, or have it handed over to this one.';
    END IF;
    RAISE EXCEPTION 'sqlsem: it is too late to adopt position % on %: it was not adopted in time, or an operator revoked it',
        v_row.queue_position, pg_catalog.quote_literal(v_row.resource_id)
        USING ERRCODE = '55000', HINT = 'Acquire the lock, or have it handed over again, for longer.';
END
$$;


-- Locks that a commit of the caller releases --------------------------------------------------------------------

-- Store a marker: the commit of this transaction releases a lock, which the transaction has pinned before.
-- Only the process of the lock's owner knows the marker, and deletes it when it sees it. (A login with thousands of
-- markers misuses this function, and gets an error.)
CREATE OR REPLACE FUNCTION {schema}.release_on_commit(p_marker varchar) RETURNS void {plpgsql_indexed_definer}
BEGIN
    IF (char_length(p_marker) BETWEEN 1 AND 64) IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: release_on_commit needs a marker of 1 to 64 characters' USING ERRCODE = '22023';
    ELSIF (SELECT count(*) >= 10000 FROM (SELECT FROM {schema}.commit_marker AS d WHERE d.login = session_user LIMIT 10000) AS d) THEN
        RAISE EXCEPTION 'sqlsem: login % has 10000 releases on commit that are not done, the most; the oldest are deleted after a day', session_user
            USING ERRCODE = '54000';
    END IF;
    INSERT INTO {schema}.commit_marker (marker) VALUES (p_marker) ON CONFLICT DO NOTHING;
END
$$;

-- Return true if the transaction with this marker has committed.
CREATE OR REPLACE FUNCTION {schema}.is_committed(p_marker varchar) RETURNS boolean
{sql_indexed_definer} SELECT EXISTS (SELECT FROM {schema}.commit_marker WHERE marker = p_marker) $$;

-- Delete a marker whose lock is released, or for which no process waits any more; and some markers of dead processes.
CREATE OR REPLACE FUNCTION {schema}.delete_commit_marker(p_marker varchar) RETURNS void
{sql_indexed_definer} DELETE FROM {schema}.commit_marker WHERE marker = p_marker OR marked_at < clock_timestamp() - interval '1 day' $$;
