-- sqlsem, the routines for sessions, for PostgreSQL: psql, jobs, functions of your own. May be run again at any time,
-- after routines.sql. Described in docs/reference/protocol.md; names, parameters and codes change only with a new schema version.
--
-- acquire and try must commit while they run. A routine with SECURITY DEFINER or a SET clause cannot commit, so they
-- are procedures with the caller's rights, in which every name is qualified. They read the tables through functions.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- (All other routines have a SET clause, and so may use unqualified names.)

-- Return the server's message for a COMMIT inside a transaction of the caller, in the language of this session.
CREATE OR REPLACE FUNCTION {schema}.commit_error() RETURNS text {plpgsql}
DECLARE
    v_text text;
BEGIN
    COMMIT;
EXCEPTION WHEN invalid_transaction_termination THEN
    GET STACKED DIAGNOSTICS v_text = MESSAGE_TEXT;
    RETURN v_text;
END
$$;

-- Return true if the caller is inside a transaction that a COMMIT could not end. COMMIT always fails here, and its
-- message tells why: the caller is in a transaction block or a function; or only this block has an exception handler.
-- (The times of the transaction and the statement do not tell: in the extended protocol a transaction begins before its
-- statement.)
CREATE OR REPLACE PROCEDURE {schema}.detect_transaction(INOUT enclosed boolean DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    v_text pg_catalog.text;
BEGIN
    BEGIN
        COMMIT;
    EXCEPTION WHEN invalid_transaction_termination THEN
        GET STACKED DIAGNOSTICS v_text = MESSAGE_TEXT;
    END;
    enclosed := v_text OPERATOR(pg_catalog.=) {schema}.commit_error();
END
$$;

-- Raise if a COMMIT would fail, or would commit changes of the caller; before anything is changed.
CREATE OR REPLACE PROCEDURE {schema}.require_autocommit(what text)
LANGUAGE plpgsql
AS $$
DECLARE
    v_in_transaction boolean;
BEGIN
    CALL {schema}.detect_transaction(v_in_transaction);
    IF v_in_transaction THEN
        RAISE EXCEPTION 'sqlsem: % must not be called inside an open transaction or a function; nothing was done', what
            USING ERRCODE = '25001', HINT = 'COMMIT first, and CALL it in autocommit, or from a procedure or DO block that may commit.';
    ELSIF pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RAISE EXCEPTION 'sqlsem: % commits, and would commit what was written before it; nothing was done', what
            USING ERRCODE = '25001', HINT = 'COMMIT or ROLLBACK before it.';
    END IF;
    PERFORM {schema}.require_outside_transaction(what);
END
$$;


-- Checking the callers' arguments ----------------------------------------------------------------------------------

-- Raise for an invalid name. p_what: the kind of name, for the message.
CREATE OR REPLACE FUNCTION {schema}.check_name(p_what text, p_name text) RETURNS void {plpgsql_immutable}
BEGIN
    IF p_name IS NULL OR p_name = '' THEN
        RAISE EXCEPTION 'sqlsem: % is %; give it 1 to 255 characters', p_what, CASE WHEN p_name IS NULL THEN 'NULL' ELSE 'empty' END
            USING ERRCODE = '22023';
    ELSIF p_name ~ E'^\\s|\\s$' THEN
        RAISE EXCEPTION 'sqlsem: % % begins or ends with white space; strip it', p_what, quote_literal(p_name)
            USING ERRCODE = '22023';
    ELSIF p_name ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'sqlsem: % % contains a control character; use printable text', p_what, quote_literal(p_name)
            USING ERRCODE = '22023';
    ELSIF char_length(p_name) > 255 THEN
        RAISE EXCEPTION 'sqlsem: % has % characters, at most 255 fit', p_what, char_length(p_name) USING ERRCODE = '22023';
    END IF;
END
$$;

-- Raise for a name that sqlsem uses itself, and for a pattern. (RESERVED of the Python client is the same table.)
CREATE OR REPLACE FUNCTION {schema}.check_not_reserved(p_resource text) RETURNS void {plpgsql_immutable}
BEGIN
    IF right(p_resource, 1) = '*' THEN
        RAISE EXCEPTION 'sqlsem: resource % ends with ''*'', and so is a pattern of names, for which limits are set; choose another name',
            quote_literal(p_resource) USING ERRCODE = '22023';
    ELSIF p_resource ~ '^(rate|once|priority|tasks):' THEN
        RAISE EXCEPTION 'sqlsem: resource % begins with ''%:'', which sqlsem uses itself, for %', quote_literal(p_resource),
            split_part(p_resource, ':', 1),
            CASE split_part(p_resource, ':', 1)
                WHEN 'rate' THEN 'the queue of a rate: take from the rate (take), or choose another name'
                WHEN 'once' THEN 'what runs once per period: begin a run (once_begin), or choose another name'
                WHEN 'priority' THEN 'the queue of a resource with priorities: acquire the resource itself, or choose another name'
                ELSE 'the rates of work queues: choose another name' END
            USING ERRCODE = '22023';
    END IF;
END
$$;

-- Return a lease in milliseconds; NULL for NULL. Raise for an invalid one.
CREATE OR REPLACE FUNCTION {schema}.check_lease(p_seconds double precision) RETURNS integer {plpgsql_immutable}
BEGIN
    IF NOT (p_seconds >= 0.1 AND p_seconds <= 2147483) THEN  -- (false for NaN)
        RAISE EXCEPTION 'sqlsem: lease_seconds must be from 0.1 to 2147483, not %', p_seconds USING ERRCODE = '22023';
    END IF;
    RETURN floor(p_seconds * 1000)::integer;
END
$$;

-- Raise for invalid arguments of a request; return the access type as the table stores it.
CREATE OR REPLACE FUNCTION {schema}.check_request(
    p_resource text, p_limit integer, p_access text, p_weight integer, p_timeout_ms integer, p_note text,
    p_requesting_id text) RETURNS text {plpgsql_immutable}
DECLARE
    v_access text := lower(p_access);
BEGIN
    PERFORM {schema}.check_name('resource', p_resource);
    PERFORM {schema}.check_name('requesting_id', p_requesting_id);
    v_access := CASE v_access WHEN 'writer' THEN 'write' WHEN 'reader' THEN 'read' ELSE v_access END;
    IF v_access IS NULL OR v_access NOT IN ('write', 'read') AND v_access !~ '^stage:(0|-?[1-9][0-9]{0,18})$' THEN
        RAISE EXCEPTION 'sqlsem: access is %; it must be write, read or stage:<whole number>', coalesce(quote_literal(p_access), 'NULL')
            USING ERRCODE = '22023';
    ELSIF p_limit < 1 THEN
        RAISE EXCEPTION 'sqlsem: concurrency_limit on % must be 1 or more (or NULL: the one that is set for it), not %',
            quote_literal(p_resource), p_limit USING ERRCODE = '22023';
    ELSIF v_access <> 'write' AND p_limit IS DISTINCT FROM 1 THEN
        RAISE EXCEPTION 'sqlsem: concurrency_limit on % must be 1 with access %, as any number of those may be inside',
            quote_literal(p_resource), v_access USING ERRCODE = '22023', HINT = 'A limit goes with access write.';
    ELSIF p_weight IS NULL OR p_weight < 1 OR p_weight > p_limit THEN
        RAISE EXCEPTION 'sqlsem: weight on % must be from 1 to the limit, %, not %', quote_literal(p_resource), p_limit,
            coalesce(p_weight::text, 'NULL') USING ERRCODE = '22023';
    ELSIF p_timeout_ms IS NULL OR p_timeout_ms < -1 THEN
        RAISE EXCEPTION 'sqlsem: timeout_ms must be 0 or more, or -1 for ever, not %', coalesce(p_timeout_ms::text, 'NULL')
            USING ERRCODE = '22023';
    ELSIF char_length(p_note) > 1000 THEN
        RAISE EXCEPTION 'sqlsem: the note has % characters, at most 1000 fit', char_length(p_note) USING ERRCODE = '22023';
    END IF;
    RETURN v_access;
END
$$;


-- The session and its rows -----------------------------------------------------------------------------------------

-- Return the session's own requesting_id, for a caller that passes none: constant while the session lives, and no other
-- session's.
CREATE OR REPLACE FUNCTION {schema}.session_id() RETURNS text {plpgsql_stable}
DECLARE
    v_since timestamptz := (SELECT backend_start FROM pg_catalog.pg_stat_activity WHERE pid = pg_backend_pid());
BEGIN
    IF v_since IS NULL THEN
        RAISE EXCEPTION 'sqlsem: role % may not see when this session began, which is part of its requesting_id', current_user
            USING ERRCODE = '22023', HINT = 'Pass a requesting_id of your own, or RESET ROLE.';
    END IF;
    RETURN format('pid %s %s', pg_backend_pid(), to_char(v_since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'));
END
$$;

-- Make the server test every two seconds that the client is still there, also while the session waits; from the
-- session's next statement on. (Needs PostgreSQL 14, and works not on every operating system.)
CREATE OR REPLACE FUNCTION {schema}.watch_client() RETURNS void {plpgsql}
BEGIN
    IF current_setting('client_connection_check_interval', true) = '0' THEN
        PERFORM set_config('client_connection_check_interval', '2s', false);
    END IF;
EXCEPTION WHEN invalid_parameter_value THEN
    NULL;  -- the operating system does not support it
END
$$;

-- Return the member of this session: that of an earlier acquire, or a new one. With a lease always a new one.
CREATE OR REPLACE FUNCTION {schema}.session_member(p_lease_ms integer) RETURNS bigint {plpgsql_indexed_definer}
DECLARE
    v_member bigint;
    v_now    timestamptz;
BEGIN
    IF p_lease_ms IS NULL THEN
        SELECT member_id INTO v_member FROM {schema}.member
        WHERE backend_pid = pg_backend_pid() AND pid IS NULL AND lease_ms IS NULL AND login = session_user
          AND {schema}.holds_beacon(backend_pid, beacon);  -- (not after DISCARD ALL)
        IF FOUND THEN
            RETURN v_member;
        END IF;
    END IF;
    PERFORM {schema}.watch_client();
    v_member := {schema}.register_member(coalesce(host(inet_client_addr()), '[local]'), NULL, left(current_setting('application_name'), 255),
                               0, p_lease_ms);
    -- Remove dead members without rows: sessions end without deregistering theirs. (By the indexes of sessions' members,
    -- as there may be many members of processes.)
    v_now := clock_timestamp();
    PERFORM {schema}.check_liveness(d.member_id, v_member)
    FROM (SELECT m.member_id FROM {schema}.member AS m WHERE m.pid IS NULL AND m.lease_until < v_now
          UNION ALL
          SELECT l.member_id
          FROM {schema}.member_liveness(ARRAY(
              SELECT m.member_id FROM {schema}.member AS m
              WHERE m.backend_pid > 0 AND m.pid IS NULL AND m.lease_ms IS NULL AND p_lease_ms IS NULL)) AS l
          WHERE l.dead) AS d
    WHERE NOT EXISTS (SELECT FROM {schema}.member_rows(d.member_id));
    RETURN v_member;
END
$$;

-- Renew the waiter lease of a row, by five seconds, and the member's lease, if it has one. Return false if row or
-- member is gone.
CREATE OR REPLACE FUNCTION {schema}.renew_waiter_lease(p_member bigint, p_resource text, p_position bigint) RETURNS boolean
{plpgsql_indexed_definer}
BEGIN
    -- (This locks the member until the commit. So a session that is about to remove the member finds its lease renewed;
    -- or this session finds the member gone.)
    UPDATE {schema}.member
    SET lease_until = clock_timestamp() + lease_ms * interval '1 millisecond', heartbeat_at = clock_timestamp()
    WHERE member_id = p_member AND login = session_user AND lease_ms IS NOT NULL;
    IF NOT FOUND AND NOT EXISTS (SELECT FROM {schema}.member
                                 WHERE member_id = p_member AND login = session_user AND lease_ms IS NULL) THEN
        RETURN false;
    END IF;
    IF FOUND THEN
        -- A lease survives a crash of the server, so the rows that wait() has written must survive it, too.
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    UPDATE {schema}.{table}
    SET waiter_lease_until = CASE WHEN granted_at IS NULL THEN clock_timestamp() + interval '5 seconds' END
    WHERE resource_id = p_resource AND queue_position = p_position AND member_id = p_member;
    RETURN FOUND;
END
$$;

-- Return true if this row would wait for ever for rows of its own session or member: they leave no room for it even
-- when all other rows are gone.
CREATE OR REPLACE FUNCTION {schema}.waits_for_itself(p_member bigint, p_resource text, p_position bigint) RETURNS boolean
{sql_indexed_definer}
    SELECT coalesce(sum(a.weight) + min(mine.weight) > min(least(coalesce(mine.concurrency_limit, o.cap), a.concurrency_limit)), false)
    FROM {schema}.{table} AS mine
    CROSS JOIN LATERAL (
        SELECT mine.member_id
        UNION  -- (no OR: by the index of sessions)
        SELECT s.member_id FROM {schema}.member AS s
        WHERE s.backend_pid = pg_backend_pid() AND s.pid IS NULL AND s.lease_ms IS NULL AND s.login = session_user
          AND {schema}.holds_beacon(s.backend_pid, s.beacon)) AS m
    CROSS JOIN LATERAL {schema}.member_rows(m.member_id) AS a
    CROSS JOIN LATERAL {schema}.effective_settings(mine.resource_id) AS o
    WHERE mine.resource_id = p_resource AND mine.queue_position = p_position AND mine.member_id = p_member
      AND a.resource_id = mine.resource_id AND a.queue_position < mine.queue_position
      AND (mine.access_type = 'write' OR a.access_type <> mine.access_type)
$$;

-- Return true if this session's member has another row than the one that it waits for: only then may others wait for
-- this session.
CREATE OR REPLACE FUNCTION {schema}.has_other_rows(p_member bigint, p_position bigint) RETURNS boolean {sql_indexed_definer}
    SELECT EXISTS (SELECT FROM {schema}.member_rows(p_member) AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
                   WHERE t.queue_position <> p_position AND m.login = session_user)
$$;

-- Release the shared locks that a cancelled wait() may have left: it was cancelled between taking one and releasing it.
CREATE OR REPLACE FUNCTION {schema}.release_wait_locks() RETURNS void {sql_definer}
    SELECT pg_advisory_unlock_shared(classid::bigint::integer, objid::bigint::integer) FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 2 AND mode = 'ShareLock' AND granted AND pid = pg_backend_pid()
      AND classid::bigint IN ({schema}.lock_class(2), {schema}.lock_class(3))
$$;

-- Return the outcome of a row that was in the queue at p_since; NULL if the history does not have it.
CREATE OR REPLACE FUNCTION {schema}.row_outcome(p_resource text, p_position bigint, p_since timestamptz) RETURNS text
{sql_indexed_definer}
    SELECT outcome FROM {schema}.history WHERE ended_at >= p_since AND resource_id = p_resource AND queue_position = p_position
$$;

-- Release one row of a requester, or all of its rows on a resource (p_position NULL). Return 0, or -1 if there was
-- none.
CREATE OR REPLACE FUNCTION {schema}.release_rows(p_resource text, p_position bigint, p_requesting_id text) RETURNS integer
{plpgsql_indexed_definer}
DECLARE
    v_row  record;
    v_code integer := -1;
BEGIN
    FOR v_row IN
        SELECT queue_position, member_id FROM {schema}.{table}
        WHERE resource_id = p_resource AND queue_position = p_position AND requesting_id = p_requesting_id
        UNION ALL
        SELECT queue_position, member_id FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807)
        WHERE p_position IS NULL AND requesting_id = p_requesting_id
        ORDER BY queue_position
    LOOP
        IF {schema}.release(p_resource, v_row.queue_position, p_requesting_id, 'released') = 0 THEN
            v_code := 0;
            -- (A session's member with a lease was registered for this row alone.)
            DELETE FROM {schema}.member
            WHERE member_id = v_row.member_id AND pid IS NULL AND lease_ms IS NOT NULL AND login = session_user;
        END IF;
    END LOOP;
    RETURN v_code;
END
$$;

-- Renew the lease of a row. Return 0 if the row is still held, -1 if not.
CREATE OR REPLACE FUNCTION {schema}.renew_row(p_resource text, p_position bigint, p_requesting_id text, p_lease_ms integer)
RETURNS integer {plpgsql_indexed_definer}
DECLARE
    v_member {schema}.member;
BEGIN
    SELECT m.* INTO v_member FROM {schema}.{table} AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE t.resource_id = p_resource AND t.queue_position = p_position AND t.requesting_id = p_requesting_id
      AND m.login = session_user;
    IF NOT FOUND THEN
        RETURN -1;
    ELSIF v_member.lease_ms IS NULL THEN
        IF p_lease_ms IS NOT NULL THEN
            RAISE EXCEPTION 'sqlsem: position % on % lives as long as its session and has no lease to renew', p_position,
                quote_literal(p_resource) USING ERRCODE = '22023', HINT = 'Leave lease_seconds out, here or take it with one.';
        ELSIF NOT {schema}.holds_beacon(v_member.backend_pid, v_member.beacon) THEN
            RETURN -1;
        END IF;
    ELSE
        PERFORM {schema}.check_grace_or_lease('lease', p_lease_ms);
        UPDATE {schema}.member
        SET lease_ms = coalesce(p_lease_ms, lease_ms), heartbeat_at = clock_timestamp(),
            lease_until = clock_timestamp() + coalesce(p_lease_ms, lease_ms) * interval '1 millisecond'
        WHERE member_id = v_member.member_id;
        IF NOT FOUND THEN
            RETURN -1;
        END IF;
    END IF;
    -- (The row is read after the renewal: from then on no session reaps it.)
    RETURN CASE WHEN EXISTS (SELECT FROM {schema}.{table} WHERE resource_id = p_resource AND queue_position = p_position
                             AND granted_at IS NOT NULL AND revoked_at IS NULL) THEN 0 ELSE -1 END;
END
$$;


-- Return the rest of a timeout, in ms; NULL: for ever. (A function, as acquire cannot set its search_path.)
CREATE OR REPLACE FUNCTION {schema}.remaining_ms(p_timeout_ms integer, p_started timestamptz) RETURNS integer {sql}
    SELECT CASE WHEN p_timeout_ms >= 0
                THEN least(p_timeout_ms, greatest(0, p_timeout_ms - 1000 * extract(epoch FROM clock_timestamp() - p_started)))::integer END
$$;

-- Return a new uid for a request of a session.
CREATE OR REPLACE FUNCTION {schema}.new_uid() RETURNS varchar
{sql} SELECT 'sql ' || gen_random_uuid() $$;

-- Acquiring and releasing ------------------------------------------------------------------------------------------

-- Acquire a row for `acquire`, after require_autocommit. keeps_open: do not commit the grant: the end of the calling
-- statement commits it, or the caller's next COMMIT. So a cancel before that undoes the grant. It leaves at most a
-- waiting row, which is removed when its waiter lease ends. (PL/pgSQL allows no COMMIT in a block with an exception
-- handler, so no handler cleans up after a cancel between a COMMIT and the next block.)
CREATE OR REPLACE PROCEDURE {schema}.acquire_row(
    resource text, concurrency_limit integer, access text, weight integer,
    timeout_ms integer, note text, requesting_id text,
    lease_seconds double precision, keeps_open boolean,
    INOUT code integer, INOUT queue_position bigint, INOUT fence bigint)
LANGUAGE plpgsql
AS $$
DECLARE
    v_started    pg_catalog.timestamptz := pg_catalog.clock_timestamp();
    v_registered pg_catalog.timestamptz;
    v_id         pg_catalog.text;
    v_access     pg_catalog.text;
    v_lease_ms   integer;
    v_member     bigint;
    v_left       integer;   -- ms; NULL: for ever
    v_granted    boolean;
    v_row_exists boolean;
    v_slice      integer;   -- ms
    v_result     integer;   -- the code of wait(); or -3 deadlock, -4 cancelled
    v_others     boolean;   -- this session has other rows
    v_victim     bigint;
    v_reason     pg_catalog.text;
    v_gate_busy  boolean := false;  -- another session kept the gate
BEGIN
    code := NULL;
    queue_position := NULL;
    fence := NULL;
    v_id := coalesce(requesting_id, {schema}.session_id());
    v_access := {schema}.check_request(resource, concurrency_limit, access, weight, timeout_ms, note, v_id);
    v_lease_ms := {schema}.check_lease(lease_seconds);

    LOOP  -- once; again only if the row was reaped while this session was stopped
        v_member := {schema}.session_member(v_lease_ms);
        COMMIT;
        v_registered := pg_catalog.clock_timestamp();
        v_result := -1;
        v_left := {schema}.remaining_ms(timeout_ms, v_started);
        BEGIN
            -- Bound the wait for the gate: a bare participant that does not commit keeps it.
            PERFORM pg_catalog.set_config('lock_timeout'::pg_catalog.text, greatest(least(v_left, 10000), 100)::pg_catalog.text, true);
            SELECT r.queue_position, r.granted INTO queue_position, v_granted
            FROM {schema}.register(v_member, v_id, session_user::pg_catalog.text, {schema}.new_uid(),
                                   timeout_ms OPERATOR(pg_catalog.=) 0, resource, v_access, concurrency_limit, weight, note) AS r;
            v_row_exists := queue_position IS NULL OR v_granted AND v_lease_ms IS NULL
                          OR {schema}.renew_waiter_lease(v_member, resource, queue_position);
            IF v_row_exists AND NOT v_granted
               AND {schema}.waits_for_itself(v_member, resource, queue_position) THEN
                v_result := -3;
                SELECT coalesce(d.words, 'It would wait for what this session itself holds') INTO v_reason
                FROM {schema}.describe_deadlock(v_member) AS d;
            END IF;
            v_others := v_lease_ms IS NULL AND NOT v_granted AND {schema}.has_other_rows(v_member, queue_position);
        EXCEPTION WHEN lock_not_available THEN
            queue_position := NULL;
            v_row_exists := true;
            v_gate_busy := true;
        END;
        IF queue_position IS NOT NULL AND v_row_exists AND v_granted THEN
            code := 0;
            fence := queue_position;
            IF NOT keeps_open THEN
                COMMIT;  -- do not keep the gate until the caller's transaction commits
            END IF;
            RETURN;  -- the end of the statement commits the row: a cancel before that leaves no row
        END IF;
        COMMIT;
        IF v_gate_busy AND (timeout_ms OPERATOR(pg_catalog.<) 0 OR {schema}.remaining_ms(timeout_ms, v_started) OPERATOR(pg_catalog.>) 0) THEN
            v_gate_busy := false;
            CONTINUE;
        ELSIF queue_position IS NULL THEN
            EXIT;
        ELSIF NOT v_row_exists THEN
            v_result := -2;
        END IF;

        -- From here on the row exists, so nearly all statements are in the block that handles a cancel. (COMMIT must be
        -- outside of it; a row that is left there is removed when its waiter lease ends.)
        WHILE v_row_exists AND v_result OPERATOR(pg_catalog.<>) -3 LOOP
            BEGIN
                v_left := {schema}.remaining_ms(timeout_ms, v_started);
                -- If others wait for this session, search for deadlocks sooner than the server does (deadlock_timeout):
                -- the server sees only sessions, and chooses any of them as the victim.
                v_slice := least(v_left, CASE WHEN v_others THEN 700 ELSE 3000 END, v_lease_ms OPERATOR(pg_catalog./) 3);
                v_result := {schema}.wait(resource, queue_position, v_slice);
                v_row_exists := {schema}.renew_waiter_lease(v_member, resource, queue_position);
                IF v_others AND v_result OPERATOR(pg_catalog.=) -1 THEN
                    SELECT d.victim, d.words INTO v_victim, v_reason FROM {schema}.describe_deadlock(v_member) AS d;
                    IF v_victim OPERATOR(pg_catalog.=) queue_position THEN
                        v_result := -3;
                    END IF;
                END IF;
            EXCEPTION
                WHEN deadlock_detected THEN
                    GET STACKED DIAGNOSTICS v_reason = PG_EXCEPTION_DETAIL;
                    v_result := -3;
                WHEN query_canceled THEN  -- also statement_timeout
                    GET STACKED DIAGNOSTICS v_reason = MESSAGE_TEXT;
                    v_result := -4;
            END;
            EXIT WHEN keeps_open AND v_row_exists AND v_result OPERATOR(pg_catalog.=) 0;  -- as above
            COMMIT;
            IF NOT v_row_exists THEN
                v_result := -2;
            END IF;
            EXIT WHEN v_result OPERATOR(pg_catalog.=) ANY (ARRAY[0, -2, -3, -4]) OR v_result OPERATOR(pg_catalog.=) -1 AND v_left OPERATOR(pg_catalog.=) 0;
        END LOOP;
        IF v_row_exists AND v_result OPERATOR(pg_catalog.=) 0 THEN
            code := 1;
            fence := queue_position;
            RETURN;
        END IF;

        -- Not granted: leave nothing behind.
        IF v_result OPERATOR(pg_catalog.=) ANY (ARRAY[-3, -4]) THEN
            PERFORM {schema}.release_wait_locks();
        END IF;
        PERFORM {schema}.release(resource, queue_position, v_id,
                                 CASE WHEN v_result OPERATOR(pg_catalog.=) -1 THEN 'timeout' ELSE 'cancelled' END);
        COMMIT;
        EXIT WHEN v_result OPERATOR(pg_catalog.<>) -2
            OR coalesce({schema}.row_outcome(resource, queue_position, v_registered), '')
               OPERATOR(pg_catalog.<>) ALL (ARRAY['cancelled', 'reaped']);
    END LOOP;

    queue_position := NULL;
    IF v_lease_ms IS NOT NULL THEN
        PERFORM {schema}.deregister_member(v_member);
        COMMIT;
    END IF;
    IF v_result OPERATOR(pg_catalog.=) -4 THEN
        RAISE EXCEPTION 'sqlsem: acquire on % was cancelled and has left the queue: %', pg_catalog.quote_literal(resource), v_reason
            USING ERRCODE = '57014';
    END IF;
    IF v_result OPERATOR(pg_catalog.=) -3 THEN
        RAISE NOTICE 'sqlsem: %; the request for % has left the queue: release what is held, and try again',
            coalesce(pg_catalog.rtrim(v_reason, '.'::pg_catalog.text), 'Deadlock'), pg_catalog.quote_literal(resource);
    END IF;
    code := v_result;
END
$$;

-- Return true if the client itself called the procedure with this call stack: then the statement's end commits the
-- grant.
CREATE OR REPLACE FUNCTION {schema}.is_outermost(p_stack text) RETURNS boolean
{sql_immutable} SELECT strpos(p_stack, E'\n') = 0 $$;

-- Acquire a lock for this session, or for a lease, and wait up to timeout_ms for it. code:
--   0 granted at once
--   1 granted after waiting
--   -1 not granted in time
--   -2 cancelled: an operator revoked the waiting row
--   -3 victim of a deadlock: a message names the cycle
CREATE OR REPLACE PROCEDURE {schema}.acquire(
    resource text, concurrency_limit integer DEFAULT 1, access text DEFAULT 'write', weight integer DEFAULT 1,
    timeout_ms integer DEFAULT -1, note text DEFAULT NULL, requesting_id text DEFAULT NULL,
    lease_seconds double precision DEFAULT NULL,
    INOUT code integer DEFAULT NULL, INOUT queue_position bigint DEFAULT NULL, INOUT fence bigint DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    v_stack pg_catalog.text;
BEGIN
    PERFORM {schema}.check_not_reserved(resource);
    CALL {schema}.require_autocommit('acquire');
    GET DIAGNOSTICS v_stack = PG_CONTEXT;
    CALL {schema}.acquire_row(resource, concurrency_limit, access, weight, timeout_ms, note, requesting_id, lease_seconds,
                              {schema}.is_outermost(v_stack), code, queue_position, fence);
END
$$;

-- Acquire a lock if that is possible at once (code 0); else leave nothing in the queue (code -1).
CREATE OR REPLACE PROCEDURE {schema}.try(
    resource text, concurrency_limit integer DEFAULT 1, access text DEFAULT 'write', weight integer DEFAULT 1,
    note text DEFAULT NULL, requesting_id text DEFAULT NULL, lease_seconds double precision DEFAULT NULL,
    INOUT code integer DEFAULT NULL, INOUT queue_position bigint DEFAULT NULL, INOUT fence bigint DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    v_stack pg_catalog.text;
BEGIN
    PERFORM {schema}.check_not_reserved(resource);
    CALL {schema}.require_autocommit('try');
    GET DIAGNOSTICS v_stack = PG_CONTEXT;
    CALL {schema}.acquire_row(resource, concurrency_limit, access, weight, 0, note, requesting_id, lease_seconds,
                              {schema}.is_outermost(v_stack), code, queue_position, fence);
END
$$;

-- Release a lock, or remove a waiting row. Without queue_position: all locks that this requester has on the resource.
-- Return 0 done, -1 nothing to release: it was released before, revoked, lost, or belongs to another login. May be
-- repeated. It takes part in the caller's transaction.
--
-- (routines.sql has the member's release, with the outcome as its fourth parameter. Its parameters are varchar, so a
-- call with three literals means this function, and is not ambiguous.)
CREATE OR REPLACE FUNCTION {schema}.release(
    resource text, queue_position bigint DEFAULT NULL, requesting_id text DEFAULT NULL) RETURNS integer {plpgsql}
BEGIN
    PERFORM {schema}.check_name('resource', resource);
    RETURN {schema}.release_rows(resource, queue_position, coalesce(requesting_id, {schema}.session_id()));
END
$$;

-- Extend a lease, by lease_seconds or by as much as before. Return 0 if the lock is still held, -1 if not. For a lock
-- without a lease, only test that, which also keeps the connection from being idle.
CREATE OR REPLACE FUNCTION {schema}.renew(
    resource text, queue_position bigint, requesting_id text DEFAULT NULL, lease_seconds double precision DEFAULT NULL)
RETURNS integer {plpgsql}
BEGIN
    PERFORM {schema}.check_name('resource', resource);
    RETURN {schema}.renew_row(resource, queue_position, coalesce(requesting_id, {schema}.session_id()),
                              {schema}.check_lease(lease_seconds));
END
$$;

-- Raise if the lock is not held; else keep it held until the caller's transaction ends. Call it inside that transaction.
CREATE OR REPLACE PROCEDURE {schema}.assert_holding(resource text, queue_position bigint, requesting_id text DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    v_in_transaction boolean;
    v_stack    pg_catalog.text;
BEGIN
    CALL {schema}.detect_transaction(v_in_transaction);
    GET DIAGNOSTICS v_stack = PG_CONTEXT;
    -- (A procedure or DO block is a transaction until it commits. But if the client itself called this procedure
    -- outside of a transaction, the transaction ends with this call, and guards nothing.)
    IF NOT v_in_transaction AND pg_catalog.strpos(v_stack, E'\n'::pg_catalog.text) OPERATOR(pg_catalog.=) 0 THEN
        RAISE EXCEPTION 'sqlsem: assert_holding needs an open transaction, whose end it guards; there is none'
            USING ERRCODE = '25001', HINT = 'BEGIN first, and write and COMMIT after it.';
    END IF;
    IF NOT {schema}.pin(resource, queue_position, coalesce(requesting_id, {schema}.session_id())) THEN
        RAISE EXCEPTION 'sqlsem: position % on % is not held (any more) by this requester', coalesce(queue_position::pg_catalog.text, 'NULL'),
            coalesce(pg_catalog.quote_literal(resource), 'NULL')
            USING ERRCODE = '55000', HINT = 'ROLLBACK: another requester may hold it now.';
    END IF;
END
$$;

-- Return 1 if a row may be granted, also a bare participant's, 0 if not yet, -1 if it is not there. 1 stays true until
-- the row is released. Changes nothing, and reads committed rows.
CREATE OR REPLACE FUNCTION {schema}.may_enter(resource text, queue_position bigint) RETURNS integer {plpgsql_indexed_definer}
DECLARE
    v_row record;
BEGIN
    PERFORM {schema}.check_name('resource', resource);
    IF current_setting('transaction_isolation') <> 'read committed' THEN  -- an older snapshot may miss earlier requests
        RAISE EXCEPTION 'sqlsem: may_enter needs READ COMMITTED, not %', current_setting('transaction_isolation')
            USING ERRCODE = '25001', HINT = 'SET default_transaction_isolation TO ''read committed'' on this connection.';
    END IF;
    SELECT t.resource_id, t.queue_position, t.access_type, t.concurrency_limit, t.weight INTO v_row FROM {schema}.{table} AS t
    WHERE t.resource_id = may_enter.resource AND t.queue_position = may_enter.queue_position AND t.revoked_at IS NULL;
    IF NOT FOUND THEN
        RETURN -1;
    END IF;
    RETURN (SELECT a.eligible::integer
            FROM {schema}.eligibility(v_row.resource_id, v_row.queue_position, v_row.access_type, v_row.concurrency_limit, v_row.weight, NULL) AS a);
END
$$;

-- Return the rows of the queue, of one resource or of all. state: holds, waits, revoked, or dead (the owner is gone, and
-- the next waiter removes the row). seconds: in this state. missing_for: for how many seconds the owner is
-- missing; after grace seconds it counts as dead.
CREATE OR REPLACE FUNCTION {schema}.status(resource text DEFAULT NULL)
RETURNS TABLE (resource_id varchar, queue_position bigint, state text, access_type varchar, concurrency_limit integer,
               weight integer, requesting_id varchar, member_id bigint, owner varchar, host varchar, pid integer,
               program varchar, note varchar, requested_at timestamptz, granted_at timestamptz,
               seconds float, missing_for float, grace float)
{sql} SELECT * FROM {schema}.entries(resource) $$;


-- feature: operate
-- Operations of operators (and reap, in routines.sql) --------------------------------------------------------------

-- Set the limit of a resource, or of all whose names begin with a prefix ('tenant:*'): an upper bound on declared
-- limits, and the limit of requests that declare none. NULL removes it.
CREATE OR REPLACE FUNCTION {schema}.set_limit(resource text, concurrency_limit integer) RETURNS void {plpgsql}
BEGIN
    PERFORM {schema}.check_name('resource', resource);
    IF concurrency_limit < 1 THEN
        RAISE EXCEPTION 'sqlsem: concurrency_limit of % must be 1 or more, or NULL for none, not %', quote_literal(resource),
            concurrency_limit USING ERRCODE = '22023', HINT = 'To grant no requests at all: SELECT {schema}.pause(…).';
    END IF;
    PERFORM {schema}.set_resource(resource, 'cap', concurrency_limit);
END
$$;

-- Grant no more requests until resume. Holders keep their locks.
CREATE OR REPLACE FUNCTION {schema}.pause(resource text) RETURNS void {plpgsql}
BEGIN
    PERFORM {schema}.check_name('resource', resource);
    PERFORM {schema}.set_resource(resource, 'paused', 1);
END
$$;

-- Grant requests again after a pause.
CREATE OR REPLACE FUNCTION {schema}.resume(resource text) RETURNS void {plpgsql}
BEGIN
    PERFORM {schema}.check_name('resource', resource);
    PERFORM {schema}.set_resource(resource, 'paused', 0);
END
$$;
-- end of feature: operate
