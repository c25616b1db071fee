-- sqlsem, the batches, for PostgreSQL. May be run again at any time, after tasks.sql.
--
-- One advisory lock (class + 4, hash of the name) serializes all decisions about the batches of a name. A routine takes
-- the lock in a statement of its own before it reads anything. So if several parts end at the same instant, exactly one
-- of them is the last.
-- A part, and the callback, belongs to the member that runs it. When the member is gone, recover_batches marks the part
-- as failed and the callback as pending.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Serialize the decisions about one name until the transaction ends.
CREATE OR REPLACE FUNCTION {schema}.lock_batch(p_name varchar) RETURNS void {plpgsql}
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM {schema}.require_outside_transaction('a batch');
    END IF;
    PERFORM {schema}.take_exclusive_lock({schema}.lock_class(4), hashtext(p_name), 'batch ' || quote_literal({schema}.escape_control_chars(p_name)));
END
$$;

-- Store the callback that the last part starts. For a login that may not put tasks, store only that there is a
-- callback, and leave the stored text of other logins: a stored callback may run with the rights of the login that
-- resumes the batch.
CREATE OR REPLACE FUNCTION {schema}.store_callback(p_batch bigint, p_kind varchar, p_body text) RETURNS void {plpgsql}
DECLARE
    v_may boolean := {schema}.has_role('putter');
BEGIN
    IF p_kind NOT IN ('sql', 'shell', 'call', 'local', 'session') THEN
        RAISE EXCEPTION 'sqlsem: a callback of kind % is unknown; it is sql, shell, call, local or session', quote_literal(p_kind)
            USING ERRCODE = '22023';
    ELSIF p_kind <> 'session' THEN
        UPDATE {schema}.batch
        SET callback_kept_by = CASE WHEN v_may OR callback_kind IS NULL THEN session_user ELSE callback_kept_by END,
            callback_kind = CASE WHEN v_may THEN p_kind ELSE coalesce(callback_kind, 'local') END,
            callback_body = CASE WHEN v_may THEN p_body ELSE callback_body END
        WHERE batch_id = p_batch;
    END IF;
END
$$;

-- Return true if this login may run and end the callback of a batch. Putters, operators and the login that stored the
-- callback may. Only a program or a session has the callbacks of kind local and session: the caller must be one that
-- does (p_own). Such a callback may also be run by the logins that run parts of the batch.
CREATE OR REPLACE FUNCTION {schema}.may_run_callback(p_batch bigint, p_own boolean) RETURNS boolean {sql_stable}
    SELECT EXISTS (
        SELECT FROM {schema}.batch AS r
        WHERE r.batch_id = p_batch AND (p_own OR r.callback_kind NOT IN ('local', 'session'))
          AND ({schema}.has_role('putter', 'operator') OR r.callback_kept_by = session_user
               OR coalesce(r.callback_kind, 'session') IN ('local', 'session')
                  AND (r.opened_by = session_user
                       OR EXISTS (SELECT FROM {schema}.batch_part AS p WHERE p.batch_id = p_batch AND p.login = session_user))))
$$;

-- Test the members that run parts or callbacks of the batches of a name (NULL: of all names), except p_mine. Parts of a
-- dead member fail, and its callbacks become pending again. Return the batches in which parts have failed.
CREATE OR REPLACE FUNCTION {schema}.recover_batches(p_name varchar, p_mine bigint) RETURNS SETOF bigint
{plpgsql_indexed_definer}
DECLARE
    v_member bigint;
    v_batch  record;
BEGIN
    -- Test the members in one order, and before this call locks a name: so two calls never wait for each other.
    FOR v_member IN
        SELECT p.member_id FROM {schema}.batch_part AS p JOIN {schema}.batch AS r ON r.batch_id = p.batch_id
        WHERE p.status = 'running' AND (p_name IS NULL OR r.batch_name = p_name)
        UNION
        SELECT r.callback_member FROM {schema}.batch AS r
        WHERE r.callback_status = 'running' AND (p_name IS NULL OR r.batch_name = p_name)
        ORDER BY 1
    LOOP
        PERFORM {schema}.check_liveness(v_member, p_mine);
    END LOOP;
    FOR v_batch IN
        SELECT r.batch_id, r.batch_name
        FROM {schema}.batch_part AS p JOIN {schema}.batch AS r ON r.batch_id = p.batch_id
        WHERE p.status = 'running' AND (p_name IS NULL OR r.batch_name = p_name)
          AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p.member_id)
        UNION
        SELECT r.batch_id, r.batch_name FROM {schema}.batch AS r
        WHERE r.callback_status = 'running' AND (p_name IS NULL OR r.batch_name = p_name)
          AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = r.callback_member)
        ORDER BY 2, 1
    LOOP
        IF p_name IS NOT NULL THEN
            PERFORM {schema}.lock_batch(p_name);
        ELSIF NOT pg_try_advisory_xact_lock({schema}.lock_class(4), hashtext(v_batch.batch_name)) THEN
            CONTINUE;  -- another session has locked this name
        END IF;
        UPDATE {schema}.batch AS r SET callback_status = 'pending', callback_uid = NULL
        WHERE r.batch_id = v_batch.batch_id AND r.callback_status = 'running'
          AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = r.callback_member);
        UPDATE {schema}.batch_part AS p SET status = 'failed', ended_at = clock_timestamp(), error = 'its process died'
        WHERE p.batch_id = v_batch.batch_id AND p.status = 'running'
          AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p.member_id);
        IF FOUND THEN
            UPDATE {schema}.batch AS r SET status = 'failed', ended_at = clock_timestamp()
            WHERE r.batch_id = v_batch.batch_id AND r.status = 'open'
              AND NOT EXISTS (SELECT FROM {schema}.batch_part AS p
                              WHERE p.batch_id = r.batch_id AND p.status IN ('expected', 'running'));
            RETURN NEXT v_batch.batch_id;
        END IF;
    END LOOP;
END
$$;

-- Make a callback that this member claimed pending again; return true if there was one. May be repeated.
CREATE OR REPLACE FUNCTION {schema}.return_callback(p_member bigint, p_uid varchar) RETURNS boolean {plpgsql_indexed_definer}
BEGIN
    UPDATE {schema}.batch AS r SET callback_status = 'pending', callback_uid = NULL
    WHERE r.callback_status = 'running' AND r.callback_member = p_member AND r.callback_uid = p_uid
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member AND m.login = session_user);
    RETURN FOUND;
END
$$;

-- Raise for invalid names of parts (a JSON array, or a list with commas); return them as JSON.
CREATE OR REPLACE FUNCTION {schema}.check_parts(p_name text, p_part text, p_parts text) RETURNS text {plpgsql_immutable}
DECLARE
    v_parts text[];
    v_part  text;
BEGIN
    PERFORM {schema}.check_name('batch', p_name);
    PERFORM {schema}.check_name('part', p_part);
    BEGIN
        v_parts := CASE WHEN btrim(p_parts) LIKE '[%'
                        THEN ARRAY(SELECT value FROM jsonb_array_elements_text(p_parts::jsonb))
                        ELSE regexp_split_to_array(btrim(p_parts), E'\\s*,\\s*') END;
    EXCEPTION WHEN invalid_text_representation OR untranslatable_character THEN
        RAISE EXCEPTION 'sqlsem: the parts of batch % are no JSON array of names: %', quote_literal(p_name), SQLERRM
            USING ERRCODE = '22023', HINT = 'Name all of them, with commas in between or as a JSON array.';
    END;
    IF coalesce(cardinality(v_parts), 0) = 0 THEN
        RAISE EXCEPTION 'sqlsem: batch % has no parts', quote_literal(p_name)
            USING ERRCODE = '22023', HINT = 'Name all of them, with commas in between or as a JSON array.';
    END IF;
    IF cardinality(v_parts) > 10000 THEN
        RAISE EXCEPTION 'sqlsem: batch % has % parts, at most 10000 are allowed', quote_literal(p_name), cardinality(v_parts)
            USING ERRCODE = '22023';
    END IF;
    FOREACH v_part IN ARRAY v_parts LOOP
        PERFORM {schema}.check_name('part', v_part);
    END LOOP;
    IF cardinality(v_parts) <> (SELECT count(DISTINCT p) FROM unnest(v_parts) AS p) THEN
        RAISE EXCEPTION 'sqlsem: a part of batch % is named twice: %', quote_literal(p_name),
            array_to_string(v_parts, ', ') USING ERRCODE = '22023';
    ELSIF p_part <> ALL (v_parts) THEN
        RAISE EXCEPTION 'sqlsem: batch % has no part %; it has %', quote_literal(p_name), quote_literal(p_part),
            array_to_string(v_parts, ', ') USING ERRCODE = '22023';
    END IF;
    RETURN to_jsonb(v_parts)::text;
END
$$;

-- Start a part, in the newest batch of the name or in a new one. p_parts: JSON, the names of all parts. code:
--   started      the batch is id, the part's attempt is attempt; previous: the batch that this start let expire, if any
--   running      refused: the part runs already, and its process is alive
--   in_callback  refused: the part was the last one; the process that runs the callback is missing, but its grace is
--                not over
--   differs      refused: the batch has other parts
-- A start joins the newest batch of the name. It begins a new batch if there is none, or if the newest one has
-- succeeded, was abandoned, or is older than its window. A start repeats a part that has failed, and also a part that
-- has succeeded: the batch then waits for it.
-- After a batch has succeeded, its last part can join it once more while the callback has not finished, and no living
-- process runs the callback: the process that ran it has failed, and the repeated part continues the batch.
-- May be repeated with the same p_uid.
CREATE OR REPLACE FUNCTION {schema}.start_part(
    p_member bigint, p_name varchar, p_part varchar, p_parts text, p_window_ms bigint, p_owner varchar, p_uid varchar,
    p_callback_kind varchar, p_callback_body text, OUT code varchar, OUT id bigint, OUT attempt integer, OUT previous bigint)
{plpgsql_indexed_definer}
DECLARE
    v_batch {schema}.batch;
    v_part  {schema}.batch_part;
    v_now   timestamptz;
    v_same  boolean;
    v_parts text;
    v_window bigint;
BEGIN
    v_parts := {schema}.check_parts(p_name, p_part, p_parts);
    IF (p_window_ms BETWEEN 1 AND 315360000000) IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: the window of batch % must be 1 to 315360000000 ms (ten years), not %', quote_literal(p_name),
            coalesce(p_window_ms::text, 'NULL') USING ERRCODE = '22023';
    ELSIF p_uid IS NULL THEN
        RAISE EXCEPTION 'sqlsem: the uid of a start is NULL; give each start a text of its own' USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.lock_batch(p_name);
    PERFORM {schema}.require_member(p_member);
    v_now := clock_timestamp();
    SELECT * INTO v_batch FROM {schema}.batch AS r WHERE r.batch_name = p_name ORDER BY r.batch_id DESC LIMIT 1;
    id := v_batch.batch_id;
    -- Only the login that opened a batch can change its window: another login must not end the batch early.
    v_window := CASE WHEN v_batch.opened_by IS DISTINCT FROM session_user THEN v_batch.window_ms ELSE p_window_ms END;
    SELECT * INTO v_part FROM {schema}.batch_part AS p WHERE p.batch_id = v_batch.batch_id AND p.part = p_part;
    v_same := ARRAY(SELECT p.part::text FROM {schema}.batch_part AS p WHERE p.batch_id = v_batch.batch_id
                    ORDER BY p.part COLLATE "C")
              = ARRAY(SELECT value FROM jsonb_array_elements_text(v_parts::jsonb) ORDER BY value COLLATE "C");
    IF v_part.start_uid = p_uid AND v_part.status = 'running' AND v_part.member_id = p_member THEN
        NULL;  -- the first reply was lost
    ELSE
        IF v_batch.batch_id IS NULL OR v_batch.status NOT IN ('open', 'failed', 'succeeded') THEN
            id := NULL;
        ELSIF v_batch.status = 'succeeded' THEN
            IF v_part.is_last IS NOT TRUE OR NOT v_same OR v_batch.callback_status NOT IN ('pending', 'running', 'failed')
               OR v_batch.opened_at + v_window * interval '1 millisecond' <= v_now THEN
                id := NULL;
            ELSIF v_batch.callback_status = 'running'
                  AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = v_batch.callback_member) THEN
                IF EXISTS (SELECT FROM {schema}.member_liveness(ARRAY[v_batch.callback_member]) AS l WHERE l.missing) THEN
                    code := 'in_callback';
                    RETURN;
                END IF;
                id := NULL;
            END IF;
        ELSIF v_batch.opened_at + v_window * interval '1 millisecond' <= v_now THEN
            UPDATE {schema}.batch AS r SET status = 'expired', ended_at = v_now WHERE r.batch_id = id;
            id := NULL;
        ELSIF NOT v_same THEN
            code := 'differs';
            RETURN;
        ELSIF v_part.status = 'running'
              AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = v_part.member_id) THEN
            code := 'running';
            RETURN;
        END IF;
        IF id IS NULL THEN
            INSERT INTO {schema}.batch (batch_name, window_ms, opened_at, opened_by) VALUES (p_name, p_window_ms, v_now, session_user)
            RETURNING * INTO v_batch;
            id := v_batch.batch_id;
            INSERT INTO {schema}.batch_part (batch_id, part)
            SELECT id, value FROM jsonb_array_elements_text(v_parts::jsonb);
            DELETE FROM {schema}.batch AS r
            WHERE r.batch_name = p_name AND r.batch_id < id AND r.callback_status NOT IN ('pending', 'running')
              AND r.ended_at < v_now - interval '1 day' * (SELECT s.value FROM {schema}.setting AS s
                                                           WHERE s.name = 'history_days')::integer;
        ELSE
            UPDATE {schema}.batch AS r
            SET status = 'open', ended_at = NULL, window_ms = v_window, callback_status = 'none', callback_uid = NULL,
                callback_ended = NULL, callback_error = NULL
            WHERE r.batch_id = id;
        END IF;
        UPDATE {schema}.batch_part AS p
        SET status = 'running', attempt = p.attempt + 1, start_uid = p_uid, member_id = p_member, owner = p_owner,
            host = m.host, pid = coalesce(m.pid, m.backend_pid), login = m.login, started_at = v_now, ended_at = NULL, error = NULL,
            is_last = false
        FROM {schema}.member AS m
        WHERE p.batch_id = id AND p.part = p_part AND m.member_id = p_member
        RETURNING p.* INTO v_part;
        PERFORM {schema}.store_callback(id, p_callback_kind, p_callback_body);
    END IF;
    code := 'started';
    attempt := v_part.attempt;
    IF v_part.attempt = 1 AND v_part.started_at = v_batch.opened_at THEN  -- this start opened the batch
        previous := (SELECT r.batch_id FROM {schema}.batch AS r
                     WHERE r.batch_name = p_name AND r.batch_id < id AND r.status = 'expired'
                       AND r.ended_at = v_batch.opened_at
                     ORDER BY r.batch_id DESC LIMIT 1);
    END IF;
END
$$;

-- End a part: 'succeeded' or 'failed'. code:
--   succeeded  recorded
--   failed     recorded
--   late       the part took longer than the window, or the batch is over (expired, abandoned): the part has failed
--   lost       the part is no longer this member's: the member was found dead meanwhile
-- is_last is true if this part was the last one to succeed. If callback_attempt is not NULL, this member has claimed
-- the callback, and has to run it.
-- May be repeated with the same p_uid. 'failed' after 'succeeded' returns the callback that the first call claimed, if
-- there is one.
-- With p_callback_kind the caller has a callback of kind local or session itself, and so can claim one. If its login
-- may not run the callback (may_run_callback), the callback stays pending until another login resumes it.
CREATE OR REPLACE FUNCTION {schema}.end_part(
    p_member bigint, p_name varchar, p_part varchar, p_uid varchar, p_outcome varchar, p_error text, p_owner varchar,
    p_callback_kind varchar, p_callback_body text, OUT code varchar, OUT id bigint, OUT is_last boolean,
    OUT batch_status varchar, OUT callback_attempt integer, OUT kind varchar, OUT body text) {plpgsql_indexed_definer}
DECLARE
    v_batch {schema}.batch;
    v_part  {schema}.batch_part;
    v_now   timestamptz;
BEGIN
    IF (p_outcome IN ('succeeded', 'failed')) IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: a part ends as succeeded or failed, not %', quote_nullable(p_outcome) USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.lock_batch(p_name);
    v_now := clock_timestamp();
    SELECT p.* INTO v_part FROM {schema}.batch AS r JOIN {schema}.batch_part AS p ON p.batch_id = r.batch_id
    WHERE r.batch_name = p_name AND p.part = p_part AND p.start_uid = p_uid
    ORDER BY r.batch_id DESC LIMIT 1;
    SELECT * INTO v_batch FROM {schema}.batch AS r WHERE r.batch_id = v_part.batch_id;
    id := v_batch.batch_id;
    batch_status := v_batch.status;
    is_last := false;
    IF v_part.member_id IS DISTINCT FROM p_member
       OR NOT {schema}.touch_member(p_member)  -- the call may claim the callback, too
       OR v_part.status = 'failed' AND v_part.error = 'its process died' THEN
        code := 'lost';
        RETURN;
    ELSIF v_part.status = 'running' THEN
        code := CASE WHEN p_outcome = 'succeeded'
                      AND (v_batch.status <> 'open'
                           OR v_batch.opened_at + v_batch.window_ms * interval '1 millisecond' < v_now)
                     THEN 'late' ELSE p_outcome END;
        UPDATE {schema}.batch_part AS p
        SET status = CASE code WHEN 'succeeded' THEN code ELSE 'failed' END, ended_at = v_now,
            error = CASE code WHEN 'late' THEN CASE v_batch.status WHEN 'abandoned' THEN 'ended after the batch was abandoned'
                                                                   ELSE 'ended after the window' END
                              WHEN 'failed' THEN coalesce(p_error, 'it said nothing') END
        WHERE p.batch_id = id AND p.part = p_part;
        PERFORM {schema}.store_callback(id, p_callback_kind, p_callback_body);
        IF v_batch.status = 'open' AND NOT EXISTS (SELECT FROM {schema}.batch_part AS p
                                                   WHERE p.batch_id = id AND p.status IN ('expected', 'running')) THEN
            IF EXISTS (SELECT FROM {schema}.batch_part AS p WHERE p.batch_id = id AND p.status = 'failed') THEN
                UPDATE {schema}.batch AS r SET status = 'failed', ended_at = v_now WHERE r.batch_id = id;
            ELSE
                UPDATE {schema}.batch_part AS p SET is_last = true WHERE p.batch_id = id AND p.part = p_part;
                UPDATE {schema}.batch AS r
                SET status = 'succeeded', ended_at = v_now, callback_kind = coalesce(r.callback_kind, p_callback_kind)
                WHERE r.batch_id = id;
                UPDATE {schema}.batch AS r SET callback_status = 'pending'
                WHERE r.batch_id = id AND r.callback_kind IS NOT NULL AND NOT {schema}.may_run_callback(id, p_callback_kind IS NOT NULL);
                UPDATE {schema}.batch AS r
                SET callback_status = 'running', callback_attempt = r.callback_attempt + 1, callback_uid = p_uid,
                    callback_member = p_member, callback_owner = p_owner, callback_login = session_user, callback_started = v_now
                WHERE r.batch_id = id AND r.callback_status = 'none' AND r.callback_kind IS NOT NULL;
            END IF;
        END IF;
    ELSE
        code := CASE WHEN v_part.error LIKE 'ended after the %' THEN 'late' ELSE v_part.status END;
        IF v_part.status = 'succeeded' AND p_outcome = 'failed' THEN
            PERFORM {schema}.return_callback(p_member, p_uid);
        END IF;
    END IF;
    SELECT r.status, p.is_last INTO batch_status, is_last
    FROM {schema}.batch AS r JOIN {schema}.batch_part AS p ON p.batch_id = r.batch_id
    WHERE r.batch_id = id AND p.part = p_part;
    SELECT r.callback_attempt, r.callback_kind, r.callback_body INTO callback_attempt, kind, body
    FROM {schema}.batch AS r
    WHERE r.batch_id = id AND is_last AND r.callback_status = 'running' AND r.callback_member = p_member AND r.callback_uid = p_uid;
END
$$;

-- Claim a callback that no member runs: the pending one of the name's oldest batch; or that of batch p_batch, also if
-- it has failed. id is NULL if there is none that this login may run (may_run_callback). p_own: the caller has the
-- callbacks of kind local and session.
-- May be repeated with the same p_uid.
CREATE OR REPLACE FUNCTION {schema}.claim_callback(
    p_member bigint, p_name varchar, p_batch bigint, p_owner varchar, p_uid varchar, p_own boolean,
    OUT id bigint, OUT name varchar, OUT callback_attempt integer, OUT kind varchar, OUT body text) {plpgsql_indexed_definer}
BEGIN
    PERFORM {schema}.lock_batch(
        coalesce(p_name, (SELECT r.batch_name FROM {schema}.batch AS r WHERE r.batch_id = p_batch)));
    PERFORM {schema}.require_member(p_member);
    SELECT r.batch_id, r.batch_name, r.callback_attempt, r.callback_kind, r.callback_body INTO id, name, callback_attempt, kind, body
    FROM {schema}.batch AS r
    WHERE (r.batch_name = p_name OR r.batch_id = p_batch)
      AND r.callback_status = 'running' AND r.callback_member = p_member AND r.callback_uid = p_uid;
    IF FOUND THEN
        RETURN;
    END IF;
    UPDATE {schema}.batch AS r
    SET callback_status = 'running', callback_attempt = r.callback_attempt + 1, callback_uid = p_uid, callback_member = p_member,
        callback_owner = p_owner, callback_login = session_user, callback_started = clock_timestamp(), callback_ended = NULL, callback_error = NULL
    WHERE r.batch_id = (SELECT o.batch_id FROM {schema}.batch AS o
                        WHERE CASE WHEN p_batch IS NULL THEN o.batch_name = p_name AND o.callback_status = 'pending'
                                   ELSE o.batch_id = p_batch AND o.status = 'succeeded' AND o.callback_status IN ('pending', 'failed') END
                          AND {schema}.may_run_callback(o.batch_id, p_own)
                        ORDER BY o.batch_id LIMIT 1)
    RETURNING r.batch_id, r.batch_name, r.callback_attempt, r.callback_kind, r.callback_body
    INTO id, name, callback_attempt, kind, body;
END
$$;

-- End a callback, with an error if it failed. Return false if the callback is no longer this member's. May be repeated.
CREATE OR REPLACE FUNCTION {schema}.end_callback(p_member bigint, p_batch bigint, p_attempt integer, p_error text)
RETURNS boolean {plpgsql_indexed_definer}
BEGIN
    UPDATE {schema}.batch AS r
    SET callback_status = CASE WHEN p_error IS NULL THEN 'finished' ELSE 'failed' END, callback_ended = clock_timestamp(),
        callback_error = p_error
    WHERE r.batch_id = p_batch AND r.callback_status = 'running' AND r.callback_attempt = p_attempt AND r.callback_member = p_member
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member AND m.login = session_user);
    RETURN FOUND OR EXISTS (SELECT FROM {schema}.batch AS r
                            WHERE r.batch_id = p_batch AND r.callback_status IN ('finished', 'failed')
                              AND r.callback_attempt = p_attempt AND r.callback_member = p_member AND r.callback_login = session_user);
END
$$;

-- Abandon the newest batch of a name, or batch p_batch, if it is open or has failed, or its callback is pending or has
-- failed. The next start of a part begins a new batch. Return its number; NULL if there is no batch
-- to abandon.
CREATE OR REPLACE FUNCTION {schema}.abandon_batch(p_name varchar, p_batch bigint DEFAULT NULL) RETURNS bigint
{plpgsql_indexed_definer}
DECLARE
    v_name  varchar := p_name;
    v_batch {schema}.batch;
BEGIN
    IF p_batch IS NULL THEN
        PERFORM {schema}.check_name('batch', p_name);
    ELSE
        v_name := (SELECT r.batch_name FROM {schema}.batch AS r WHERE r.batch_id = p_batch);
        IF v_name IS NULL THEN
            RETURN NULL;
        END IF;
    END IF;
    PERFORM {schema}.lock_batch(v_name);
    SELECT * INTO v_batch FROM {schema}.batch AS r
    WHERE r.batch_name = v_name AND (p_batch IS NULL OR r.batch_id = p_batch) ORDER BY r.batch_id DESC LIMIT 1;
    IF (v_batch.status IN ('open', 'failed')
        OR v_batch.status = 'succeeded' AND v_batch.callback_status IN ('pending', 'failed')) IS NOT TRUE THEN
        RETURN NULL;
    END IF;
    UPDATE {schema}.batch AS r
    SET status = 'abandoned', ended_at = coalesce(r.ended_at, clock_timestamp()),
        callback_status = CASE r.callback_status WHEN 'pending' THEN 'failed' ELSE r.callback_status END,
        callback_ended = CASE r.callback_status WHEN 'pending' THEN clock_timestamp() ELSE r.callback_ended END,
        callback_error = CASE r.callback_status WHEN 'pending' THEN 'the batch was abandoned' ELSE r.callback_error END
    WHERE r.batch_id = v_batch.batch_id;
    PERFORM {schema}.note_operation('abandon', v_name, NULL, NULL, NULL, format('batch %s, %s', v_batch.batch_id, v_batch.status), NULL);
    RETURN v_batch.batch_id;
END
$$;


-- Views for people ---------------------------------------------------------------------------------------------

-- Return the batches, newest first, one row a part. Putters, operators, readers and the login that stored a callback
-- see its text.
CREATE OR REPLACE FUNCTION {schema}.list_batches(
    p_name varchar DEFAULT NULL, p_batch bigint DEFAULT NULL, p_maximum integer DEFAULT 20)
RETURNS TABLE (batch_id bigint, batch_name varchar, status varchar, window_seconds float, opened_at timestamptz,
               ended_at timestamptz, seconds float, callback_status varchar, callback_kind varchar, callback_body text,
               callback_attempt integer, callback_owner varchar, callback_started timestamptz, callback_ended timestamptz,
               callback_seconds float, callback_error text, part varchar, part_status varchar, is_last boolean,
               attempt integer, member_id bigint, owner varchar, host varchar, pid integer,
               part_started timestamptz, part_ended timestamptz, part_seconds float, error text, missing_for float,
               opened_by name, login name, callback_kept_by name, callback_login name) {sql_indexed_definer}
    WITH asks AS MATERIALIZED (SELECT CASE WHEN p_maximum < 0 THEN 0 ELSE p_maximum END AS maximum),
    page AS MATERIALIZED (
        (SELECT o.* FROM {schema}.batch AS o WHERE p_name IS NULL AND p_batch IS NULL
         ORDER BY o.batch_id DESC LIMIT (SELECT a.maximum FROM asks AS a))
        UNION ALL
        (SELECT o.* FROM {schema}.batch AS o WHERE o.batch_name = p_name AND p_batch IS NULL
         ORDER BY o.batch_name DESC, o.batch_id DESC LIMIT (SELECT a.maximum FROM asks AS a))
        UNION ALL
        (SELECT o.* FROM {schema}.batch AS o WHERE o.batch_id = p_batch AND (p_name IS NULL OR o.batch_name = p_name)
         LIMIT (SELECT a.maximum FROM asks AS a)))
    SELECT r.batch_id, r.batch_name, r.status, r.window_ms / 1000.0::float, r.opened_at, r.ended_at,
           extract(epoch FROM coalesce(r.ended_at, clock_timestamp()) - r.opened_at)::float,
           r.callback_status, r.callback_kind, CASE WHEN (SELECT {schema}.has_role('putter', 'operator', 'reader')) OR r.callback_kept_by = session_user THEN r.callback_body END,
           r.callback_attempt, r.callback_owner, r.callback_started, r.callback_ended,
           extract(epoch FROM coalesce(r.callback_ended, clock_timestamp()) - r.callback_started)::float, r.callback_error,
           p.part, p.status, p.is_last, p.attempt, p.member_id, p.owner, p.host, p.pid, p.started_at, p.ended_at,
           extract(epoch FROM coalesce(p.ended_at, clock_timestamp()) - p.started_at)::float, p.error,
           CASE WHEN p.status = 'running' AND l.missing IS NOT FALSE THEN
               extract(epoch FROM clock_timestamp() - coalesce(l.since, p.started_at))::float END,
           r.opened_by, p.login, r.callback_kept_by, r.callback_login
    FROM page AS r JOIN {schema}.batch_part AS p ON p.batch_id = r.batch_id
    LEFT JOIN {schema}.member_liveness(ARRAY(
                  SELECT DISTINCT w.member_id FROM page AS b JOIN {schema}.batch_part AS w ON w.batch_id = b.batch_id
                  WHERE w.status = 'running')) AS l
           ON l.member_id = p.member_id AND p.status = 'running'
    ORDER BY r.batch_id DESC, p.part
$$;


-- For sessions --------------------------------------------------------------------------------------------------

-- Return the parts in some states, for messages: "b, c".
CREATE OR REPLACE FUNCTION {schema}.parts_in(p_batch bigint, p_states varchar[]) RETURNS text {sql_stable}
    SELECT string_agg({schema}.escape_control_chars(p.part || coalesce(' (' || p.error || ')', '')), ', ' ORDER BY p.part)
    FROM {schema}.batch_part AS p WHERE p.batch_id = p_batch AND p.status = ANY (p_states)
$$;

-- Do recover_batches for a session, and warn the session of the parts that have failed.
CREATE OR REPLACE FUNCTION {schema}.session_recover_batches(p_name text, p_member bigint) RETURNS void {plpgsql}
DECLARE
    v_batch bigint;
BEGIN
    FOR v_batch IN SELECT r FROM {schema}.recover_batches(p_name, p_member) AS r LOOP
        RAISE WARNING 'sqlsem: batch % of % has failed parts: %', v_batch, p_name,
            {schema}.parts_in(v_batch, ARRAY['failed']) USING HINT = 'Run these parts again.';
    END LOOP;
END
$$;

-- Sessions call functions that run with the caller's rights, as the caller's login can see when this session began.
-- Each calls a function session_…, which runs with the owner's rights and does the work.
CREATE OR REPLACE FUNCTION {schema}.session_part_start(
    name text, part text, parts text, window_seconds double precision, p_owner text) RETURNS bigint {plpgsql_indexed_definer}
DECLARE
    v_parts  text := {schema}.check_parts(name, part, parts);
    v_member bigint;
    v_start  record;
    v_part   record;
BEGIN
    IF window_seconds IS NULL OR NOT (window_seconds >= 0.001 AND window_seconds <= 315360000) THEN
        RAISE EXCEPTION 'sqlsem: window_seconds must be above 0 and at most ten years, not %', coalesce(window_seconds::text, 'NULL')
            USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.require_outside_transaction('batch_part_start');
    v_member := {schema}.session_member(NULL);
    PERFORM {schema}.session_recover_batches(name, v_member);
    v_start := {schema}.start_part(v_member, name, part, v_parts, (window_seconds * 1000)::bigint,
                                   p_owner, replace(gen_random_uuid()::text, '-', ''), NULL, NULL);
    IF v_start.code = 'running' THEN
        SELECT p.host, p.pid, p.started_at, p.login INTO v_part FROM {schema}.batch_part AS p
        WHERE p.batch_id = v_start.id AND p.part = session_part_start.part;
        RAISE EXCEPTION 'sqlsem: part % of batch % runs already, by %:% since % (login %)', part, name, {schema}.escape_control_chars(v_part.host),
            v_part.pid, v_part.started_at, {schema}.escape_control_chars(v_part.login) USING ERRCODE = '55000', HINT = 'Wait until it has ended.';
    ELSIF v_start.code IN ('in_callback', 'differs') THEN
        SELECT r.opened_by, r.opened_at, r.callback_owner, r.callback_started, r.opened_at + r.window_ms * interval '1 millisecond' AS until
        INTO v_part FROM {schema}.batch AS r WHERE r.batch_id = v_start.id;
        IF v_start.code = 'in_callback' THEN
            RAISE EXCEPTION 'sqlsem: the callback of batch % of % runs already, by % since %; its process is missing, but not yet for its grace',
                v_start.id, name, {schema}.escape_control_chars(v_part.callback_owner), v_part.callback_started
                USING ERRCODE = '55000', HINT = 'Start the part again in a moment.';
        END IF;
        RAISE EXCEPTION 'sqlsem: batch % of % is open with other parts: %; login % opened it at %', v_start.id, name,
            (SELECT string_agg({schema}.escape_control_chars(p.part), ', ' ORDER BY p.part) FROM {schema}.batch_part AS p
             WHERE p.batch_id = v_start.id), {schema}.escape_control_chars(v_part.opened_by), v_part.opened_at
            USING ERRCODE = '22023',
                  HINT = format('Declare the same in all parts. Others are possible when it has succeeded, or its window is over (%s), '
                                'or an operator has abandoned it: SELECT {schema}.abandon_batch(name).', v_part.until);
    ELSIF v_start.previous IS NOT NULL THEN
        RAISE WARNING 'sqlsem: batch % of % has expired; it lacked %', v_start.previous, name,
            {schema}.parts_in(v_start.previous, ARRAY['expected', 'running', 'failed']);
    END IF;
    RETURN v_start.id;
END
$$;

-- Start a part for this session; return the number of the batch. parts: the names of all parts, with commas in between
-- or as a JSON array. If the session ends before the part, the part fails. Call it outside a transaction: an open one
-- would keep all other parts of the batch waiting until it ends.
CREATE OR REPLACE FUNCTION {schema}.batch_part_start(name text, part text, parts text, window_seconds double precision)
RETURNS bigint {plpgsql}
BEGIN
    RETURN {schema}.session_part_start(name, part, parts, window_seconds, {schema}.session_id());
END
$$;

-- End this session's part with an outcome, for batch_part_finish and batch_part_fail.
CREATE OR REPLACE FUNCTION {schema}.session_part_end(p_name text, p_part text, p_outcome text, p_error text, p_owner text)
RETURNS TABLE (code varchar, id bigint, is_last boolean, batch_status varchar, failed text, kept_by text)
{plpgsql_indexed_definer}
DECLARE
    v_member bigint := {schema}.session_member(NULL);
    v_uid    varchar;
    v_end    record;
BEGIN
    PERFORM {schema}.check_name('batch', p_name);
    PERFORM {schema}.check_name('part', p_part);
    PERFORM {schema}.session_recover_batches(p_name, v_member);
    v_uid := (SELECT p.start_uid FROM {schema}.batch AS r JOIN {schema}.batch_part AS p ON p.batch_id = r.batch_id
              WHERE r.batch_name = p_name AND p.part = p_part AND p.member_id = v_member AND p.status = 'running'
              ORDER BY r.batch_id DESC LIMIT 1);
    IF v_uid IS NULL THEN
        RAISE EXCEPTION 'sqlsem: this session does not run part % of batch %', quote_literal(p_part),
            quote_literal(p_name) USING ERRCODE = '55000', HINT = 'Call batch_part_start before, in the same session.';
    END IF;
    SELECT * INTO v_end FROM {schema}.end_part(v_member, p_name, p_part, v_uid, p_outcome, p_error, p_owner, 'session', NULL);
    RETURN QUERY SELECT v_end.code, v_end.id, v_end.callback_attempt IS NOT NULL, v_end.batch_status,
                        {schema}.parts_in(v_end.id, ARRAY['failed']),
                        (SELECT {schema}.escape_control_chars(r.callback_kept_by) FROM {schema}.batch AS r
                         WHERE r.batch_id = v_end.id AND v_end.is_last AND v_end.callback_attempt IS NULL AND r.callback_status = 'pending');
END
$$;

-- End this session's part as succeeded. If is_last = 1, it was the last part: the session has to run the callback, and
-- then to call batch_callback_ended. A warning is raised if only another login may run the callback. outcome: succeeded;
-- or late: the part does not count, as it took longer than the window, or the batch was abandoned. If all other parts
-- have ended, a warning names the parts that have failed. May be part of the caller's transaction.
CREATE OR REPLACE FUNCTION {schema}.batch_part_finish(name text, part text, OUT is_last integer, OUT outcome text)
{plpgsql}
DECLARE
    v_end record;
BEGIN
    SELECT * INTO v_end FROM {schema}.session_part_end(name, part, 'succeeded', NULL, {schema}.session_id());
    is_last := v_end.is_last::integer;
    outcome := v_end.code;
    IF outcome = 'succeeded' AND v_end.batch_status = 'failed' THEN
        RAISE WARNING 'sqlsem: batch % of % has failed: %', v_end.id, name, v_end.failed
            USING HINT = 'Run these parts again.';
    ELSIF v_end.kept_by IS NOT NULL THEN
        RAISE WARNING 'sqlsem: batch % of % has succeeded, but its callback is pending: login % kept it', v_end.id, name,
            v_end.kept_by
            USING HINT = format('That login, a putter or an operator runs it: sqlsem batch resume %s.', v_end.id);
    ELSIF outcome = 'late' THEN
        RAISE WARNING 'sqlsem: part % of batch % has ended after %, and does not count', part, name,
            CASE v_end.batch_status WHEN 'abandoned' THEN 'the batch was abandoned' ELSE 'the window' END;
    END IF;
END
$$;

-- End this session's part as failed; is_last is always 0.
CREATE OR REPLACE FUNCTION {schema}.batch_part_fail(
    name text, part text, error text DEFAULT NULL, OUT is_last integer, OUT outcome text) {plpgsql}
BEGIN
    SELECT e.is_last::integer, e.code INTO is_last, outcome
    FROM {schema}.session_part_end(name, part, 'failed', error, {schema}.session_id()) AS e;
END
$$;

-- Claim a callback for this session, for batch_resume.
CREATE OR REPLACE FUNCTION {schema}.session_batch_resume(name text, p_owner text) RETURNS integer {plpgsql_indexed_definer}
DECLARE
    v_member bigint;
BEGIN
    PERFORM {schema}.check_name('batch', name);
    v_member := {schema}.session_member(NULL);
    PERFORM {schema}.session_recover_batches(name, v_member);
    RETURN (SELECT (c.id IS NOT NULL)::integer
            FROM {schema}.claim_callback(v_member, name, NULL, p_owner,
                                     replace(gen_random_uuid()::text, '-', ''), true) AS c);
END
$$;

-- Claim a callback that no session runs. Return 1 if this session has to run one now, else 0.
CREATE OR REPLACE FUNCTION {schema}.batch_resume(name text) RETURNS integer {plpgsql}
BEGIN
    RETURN {schema}.session_batch_resume(name, {schema}.session_id());
END
$$;

-- End the callback that this session runs (of several, the one that it claimed last), with an error if it failed.
-- Return the number of the batch.
CREATE OR REPLACE FUNCTION {schema}.batch_callback_ended(name text, error text DEFAULT NULL) RETURNS bigint
{plpgsql_indexed_definer}
DECLARE
    v_member bigint;
    v_batch  record;
BEGIN
    PERFORM {schema}.check_name('batch', name);
    v_member := {schema}.session_member(NULL);
    SELECT r.batch_id, r.callback_attempt INTO v_batch FROM {schema}.batch AS r
    WHERE r.batch_name = name AND r.callback_status = 'running' AND r.callback_member = v_member
    ORDER BY r.callback_started DESC, r.batch_id DESC LIMIT 1;
    IF NOT FOUND OR NOT {schema}.end_callback(v_member, v_batch.batch_id, v_batch.callback_attempt, error) THEN
        RAISE EXCEPTION 'sqlsem: this session has no callback of batch % to run', quote_literal(name)
            USING ERRCODE = '55000', HINT = 'batch_part_finish says is_last = 1, or batch_resume 1, to the one that has.';
    END IF;
    RETURN v_batch.batch_id;
END
$$;
