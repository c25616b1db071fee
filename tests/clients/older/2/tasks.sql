-- sqlsem, the work queue, for PostgreSQL. May be run again at any time, after public.sql.
--
-- A claim belongs to a member, like a row of the lock queue: nobody takes a task from a worker that lives, however long
-- it takes; when the member is gone its tasks are pending again (recover_tasks). No transaction is open while a task runs.
--
-- Orders are barriers: what may be claimed are the pending tasks of the lowest order that is open. Until it has ended a
-- task is open in every state that any snapshot can see, so no snapshot shows a barrier gone before it is; and once it is
-- gone it stays gone, but for tasks put or retried after that.

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

-- Raises unless this login may act for the member.
CREATE OR REPLACE FUNCTION {schema}.require_member(p_member integer) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.member WHERE member_id = p_member AND login = session_user) THEN
        RAISE EXCEPTION 'sqlsem: member % is not there: it was given up while it was out of reach', p_member
            USING ERRCODE = 'P0002', HINT = 'Enrol again.';
    END IF;
END
$$;

-- Puts tasks: all of them or none. A second call with the same p_uid (the first reply was lost) finds those of the first.
-- p_tasks: [{"kind": …, "body": …, "order": …, "after_ms": …, "max_attempts": …, "backoff_ms": …, "on_failure": …, "note": …}, …]
-- Whoever has workers run code (all kinds but json) must be an operator: it runs with the workers' rights.
CREATE OR REPLACE FUNCTION {schema}.put_tasks(p_queue varchar, p_uid varchar, p_tasks jsonb) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    PERFORM {schema}.check_name('queue', p_queue);
    IF EXISTS (SELECT FROM jsonb_array_elements(p_tasks) WHERE value ->> 'kind' IS DISTINCT FROM 'json')
       AND NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{schema}_operator' AND pg_has_role(session_user, oid, 'MEMBER'))
       AND NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = '{schema}' AND pg_has_role(session_user, nspowner, 'MEMBER')) THEN
        RAISE EXCEPTION 'sqlsem: % may put JSON tasks only: SQL, commands and functions run with the rights of the workers', session_user
            USING ERRCODE = '42501', HINT = 'An administrator can GRANT {schema}_operator.';
    END IF;
    INSERT INTO {schema}.task (queue_name, task_order, kind, body, note, on_failure, max_attempts, backoff_ms, put_uid,
                               put_at, ready_at)
    SELECT p_queue, coalesce(r."order", 0), r.kind, r.body, r.note, coalesce(r.on_failure, 'stop'), coalesce(r.max_attempts, 1),
           coalesce(r.backoff_ms, 1000), p_uid || '.' || r.ordinal, v_now, v_now + coalesce(r.after_ms, 0) * interval '1 millisecond'
    FROM ROWS FROM (jsonb_to_recordset(p_tasks)
        AS (kind varchar, body text, note varchar, "order" integer, after_ms bigint, max_attempts integer,
            backoff_ms integer, on_failure varchar)) WITH ORDINALITY
        AS r (kind, body, note, "order", after_ms, max_attempts, backoff_ms, on_failure, ordinal)
    ORDER BY r.ordinal
    ON CONFLICT (put_uid) DO NOTHING;
    RETURN QUERY
        SELECT t.task_id FROM {schema}.task AS t
        WHERE t.put_uid = ANY (ARRAY(SELECT p_uid || '.' || n FROM generate_series(1, jsonb_array_length(p_tasks)) AS n))
        ORDER BY t.task_id;
END
$$;

-- Claims the first task that may run now; task_id is NULL where there is none. With p_again (the first reply may have
-- been lost) the claim of the same p_uid is found again.
CREATE OR REPLACE FUNCTION {schema}.claim_task(
    p_member integer, p_queue varchar, p_owner varchar, p_uid varchar, p_again boolean,
    OUT task_id bigint, OUT task_order integer, OUT kind varchar, OUT body text, OUT note varchar, OUT attempt integer,
    OUT failures integer, OUT max_attempts integer)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_order integer;
    v_task  bigint;
BEGIN
    IF p_again THEN
        PERFORM {schema}.require_member(p_member);
        SELECT t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts
        INTO task_id, task_order, kind, body, note, attempt, failures, max_attempts
        FROM {schema}.task AS t
        WHERE t.queue_name = p_queue AND t.status = 'running' AND t.member_id = p_member AND t.claim_uid = p_uid;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    -- The barrier. What is below it has ended; what comes below it after this moment comes late.
    SELECT o.task_order INTO v_order FROM {schema}.task AS o WHERE o.queue_name = p_queue AND o.is_open
    ORDER BY o.task_order LIMIT 1;
    -- Between rows, not equal to: or the planner might walk the primary key, past all that has ended, to the first task_id.
    SELECT t.task_id INTO v_task FROM {schema}.task AS t
    WHERE t.is_open AND t.status = 'pending'
      AND t.ready_at <= greatest(clock_timestamp(), t.put_at)  -- should the clock have stepped back since
      AND (t.queue_name, t.task_order) >= (p_queue, v_order) AND (t.queue_name, t.task_order) <= (p_queue, v_order)
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member AND m.login = session_user)
    ORDER BY t.queue_name, t.task_order, t.task_id LIMIT 1
    FOR UPDATE OF t SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM {schema}.require_member(p_member);
        RETURN;
    END IF;
    UPDATE {schema}.task AS t
    SET status = 'running', attempt = t.attempt + 1, member_id = p_member, owner = p_owner, claim_uid = p_uid,
        claimed_at = clock_timestamp()
    WHERE t.task_id = v_task
    RETURNING t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts
    INTO task_id, task_order, kind, body, note, attempt, failures, max_attempts;
END
$$;

-- What a task is after an attempt that ended so; and when one that has failed is tried again. (Plain SQL, which the planner
-- puts in their place.)
CREATE OR REPLACE FUNCTION {schema}.status_after(p_outcome varchar, p_failures integer, p_max_attempts integer)
RETURNS varchar
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE WHEN p_outcome = 'finished' THEN 'finished'
                WHEN p_outcome = 'returned' OR p_failures + 1 < p_max_attempts THEN 'pending' ELSE 'failed' END
$$;

CREATE OR REPLACE FUNCTION {schema}.retry_at(p_failures integer, p_backoff_ms integer) RETURNS timestamptz
LANGUAGE sql VOLATILE
AS $$
    -- Twice as long each time, up to five minutes; by half at random, lest all come back at once.
    SELECT clock_timestamp() + least(300000, p_backoff_ms * 2 ^ least(p_failures, 20)) * (0.5 + random() / 2)
                               * interval '1 millisecond'
$$;

-- Ends an attempt: 'finished', 'failed' (it is tried again after a growing pause, as often as max_attempts says), or
-- 'returned' (pending at once; does not count). The task's new status; NULL when it was this member's no more. May be
-- repeated.
CREATE OR REPLACE FUNCTION {schema}.end_task(
    p_member integer, p_task bigint, p_attempt integer, p_outcome varchar, p_result text, p_error text) RETURNS varchar
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_member {schema}.member;
    v_before record;
    v_status varchar;
BEGIN
    IF p_outcome NOT IN ('finished', 'failed', 'returned') THEN
        RAISE EXCEPTION 'sqlsem: a task ends as finished, failed or returned, not %', p_outcome USING ERRCODE = '22023';
    END IF;
    SELECT * INTO v_member FROM {schema}.member WHERE member_id = p_member AND login = session_user;
    UPDATE {schema}.task AS t
    SET status = {schema}.status_after(p_outcome, failures, max_attempts),
        is_open = p_outcome = 'returned' OR p_outcome = 'failed' AND (failures + 1 < max_attempts OR on_failure = 'stop'),
        failures = failures + (p_outcome = 'failed')::integer,
        ready_at = CASE WHEN p_outcome = 'failed' AND failures + 1 < max_attempts
                        THEN {schema}.retry_at(failures, backoff_ms) ELSE ready_at END,
        ended_at = CASE WHEN {schema}.status_after(p_outcome, failures, max_attempts) <> 'pending'
                        THEN clock_timestamp() END,
        error = p_error, result = p_result, member_id = NULL, claim_uid = NULL
    WHERE task_id = p_task AND attempt = p_attempt AND member_id = v_member.member_id AND status = 'running'
    RETURNING t.owner, t.claimed_at, t.status INTO v_before;
    IF NOT FOUND THEN
        -- Ended before, by us?
        SELECT t.status INTO v_status FROM {schema}.task_log AS l JOIN {schema}.task AS t ON t.task_id = l.task_id
        WHERE l.task_id = p_task AND l.attempt = p_attempt AND l.member_id = p_member AND l.outcome = p_outcome;
        RETURN v_status;
    END IF;
    INSERT INTO {schema}.task_log (task_id, attempt, outcome, member_id, owner, host, pid, session_id, started_at, error, result)
    VALUES (p_task, p_attempt, p_outcome, p_member, v_before.owner, v_member.host, v_member.pid, v_member.backend_pid,
            v_before.claimed_at, p_error, p_result);
    RETURN v_before.status;
END
$$;

-- end_task and claim_task in one: what a worker does between two tasks.
CREATE OR REPLACE FUNCTION {schema}.next_task(
    p_member integer, p_task bigint, p_attempt integer, p_outcome varchar, p_result text, p_error text,
    p_queue varchar, p_owner varchar, p_uid varchar, p_again boolean,
    OUT ended varchar, OUT task_id bigint, OUT task_order integer, OUT kind varchar, OUT body text, OUT note varchar,
    OUT attempt integer, OUT failures integer, OUT max_attempts integer)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    ended := {schema}.end_task(p_member, p_task, p_attempt, p_outcome, p_result, p_error);
    SELECT c.task_id, c.task_order, c.kind, c.body, c.note, c.attempt, c.failures, c.max_attempts
    INTO task_id, task_order, kind, body, note, attempt, failures, max_attempts
    FROM {schema}.claim_task(p_member, p_queue, p_owner, p_uid, p_again) AS c;
END
$$;

-- Ends several attempts, all of different tasks, and claims up to p_most (may be 0) in the same call: what a worker does
-- between groups of short tasks. May be repeated: see end_task and claim_task.
-- p_ends: [{"task": …, "attempt": …, "outcome": …, "result": …, "error": …}, …]
-- ended: {task: its new status, …}, without those that were this member's no more; claimed: [[task_id, task_order, kind,
-- body, note, attempt, failures, max_attempts], …]. A group are those that come first, up to one that must be claimed
-- alone, and up to a megabyte.
CREATE OR REPLACE FUNCTION {schema}.next_tasks(
    p_member integer, p_ends json, p_queue varchar, p_owner varchar, p_uid varchar, p_again boolean, p_most integer,
    OUT ended text, OUT claimed text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_member {schema}.member;
    v_count  integer;
    v_order  integer;
    v_first  bigint;
    v_last   bigint;
    v_alone  boolean;
BEGIN
    SELECT * INTO v_member FROM {schema}.member WHERE member_id = p_member AND login = session_user;
    IF json_array_length(p_ends) > 0 THEN
        WITH done AS (
            UPDATE {schema}.task AS t
            SET status = {schema}.status_after(e.outcome, t.failures, t.max_attempts),
                is_open = e.outcome = 'returned'
                          OR e.outcome = 'failed' AND (t.failures + 1 < t.max_attempts OR t.on_failure = 'stop'),
                failures = t.failures + (e.outcome = 'failed')::integer,
                ready_at = CASE WHEN e.outcome = 'failed' AND t.failures + 1 < t.max_attempts
                                THEN {schema}.retry_at(t.failures, t.backoff_ms) ELSE t.ready_at END,
                ended_at = CASE WHEN {schema}.status_after(e.outcome, t.failures, t.max_attempts) <> 'pending'
                                THEN clock_timestamp() END,
                error = e.error, result = e.result, member_id = NULL, claim_uid = NULL
            FROM json_to_recordset(p_ends) AS e (task bigint, attempt integer, outcome varchar, result text, error text)
            WHERE t.task_id = e.task AND t.attempt = e.attempt AND t.member_id = v_member.member_id
              AND t.status = 'running' AND e.outcome IN ('finished', 'failed', 'returned')
            RETURNING t.task_id, t.attempt, t.status, t.owner, t.claimed_at, e.outcome, t.error, t.result),
        kept AS (
            INSERT INTO {schema}.task_log
                (task_id, attempt, outcome, member_id, owner, host, pid, session_id, started_at, error, result)
            SELECT d.task_id, d.attempt, d.outcome, p_member, d.owner, v_member.host, v_member.pid, v_member.backend_pid,
                   d.claimed_at, d.error, d.result
            FROM done AS d)
        SELECT json_object_agg(d.task_id, d.status), count(*) INTO ended, v_count FROM done AS d;
        IF v_count < json_array_length(p_ends) THEN
            -- Ended before, by us?
            SELECT json_object_agg(t.task_id, t.status) INTO ended
            FROM json_to_recordset(p_ends) AS e (task bigint, attempt integer, outcome varchar)
            JOIN {schema}.task_log AS l ON l.task_id = e.task AND l.attempt = e.attempt
            JOIN {schema}.task AS t ON t.task_id = l.task_id
            WHERE l.member_id = p_member AND l.outcome = e.outcome;
        END IF;
    END IF;
    IF p_most < 1 THEN
        RETURN;
    END IF;
    IF v_member.member_id IS NULL THEN
        PERFORM {schema}.require_member(p_member);  -- raises
    END IF;
    IF p_again THEN
        SELECT json_agg(json_build_array(t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures,
                                         t.max_attempts) ORDER BY t.task_id)
        INTO claimed
        FROM {schema}.task AS t
        WHERE t.queue_name = p_queue AND t.status = 'running' AND t.member_id = p_member AND t.claim_uid = p_uid;
        IF claimed IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    -- The first one, as in claim_task.
    SELECT o.task_order INTO v_order FROM {schema}.task AS o WHERE o.queue_name = p_queue AND o.is_open
    ORDER BY o.task_order LIMIT 1;
    SELECT t.task_id, t.losses > 0 OR t.kind NOT IN ('call', 'sql') INTO v_first, v_alone FROM {schema}.task AS t
    WHERE t.is_open AND t.status = 'pending' AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
      AND (t.queue_name, t.task_order) >= (p_queue, v_order) AND (t.queue_name, t.task_order) <= (p_queue, v_order)
    ORDER BY t.queue_name, t.task_order, t.task_id LIMIT 1
    FOR UPDATE OF t SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_last := v_first;
    IF p_most > 1 AND NOT v_alone THEN
        -- How far the group goes. Looked at without locks: what is not taken must look free to everybody meanwhile.
        SELECT max(w.task_id) INTO v_last
        FROM (SELECT n.task_id,
                     bool_or(n.alone) OVER (ORDER BY n.task_id) AS barred,
                     sum(n.size) OVER (ORDER BY n.task_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
              FROM (SELECT t.task_id, t.losses > 0 OR t.kind NOT IN ('call', 'sql') AS alone, octet_length(t.body) AS size
                    FROM {schema}.task AS t
                    WHERE t.is_open AND t.status = 'pending' AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
                      AND (t.queue_name, t.task_order, t.task_id) >= (p_queue, v_order, v_first)
                      AND (t.queue_name, t.task_order) <= (p_queue, v_order)
                    ORDER BY t.queue_name, t.task_order, t.task_id LIMIT p_most) AS n) AS w
        WHERE NOT w.barred AND coalesce(w.before, 0) <= 1000000;
    END IF;
    WITH chosen AS MATERIALIZED (
        SELECT t.task_id FROM {schema}.task AS t
        WHERE t.is_open AND t.status = 'pending' AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
          AND (t.queue_name, t.task_order, t.task_id) >= (p_queue, v_order, v_first)
          AND (t.queue_name, t.task_order, t.task_id) <= (p_queue, v_order, v_last)
          AND (t.task_id = v_first OR t.losses = 0)
        ORDER BY t.queue_name, t.task_order, t.task_id
        FOR UPDATE OF t SKIP LOCKED),
    taken AS (
        UPDATE {schema}.task AS t
        SET status = 'running', attempt = t.attempt + 1, member_id = p_member, owner = p_owner, claim_uid = p_uid,
            claimed_at = clock_timestamp()
        FROM chosen AS c WHERE t.task_id = c.task_id
        RETURNING t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts)
    SELECT json_agg(json_build_array(t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures,
                                     t.max_attempts) ORDER BY t.task_id)
    INTO claimed FROM taken AS t;
END
$$;

-- Gives back what a claim may have left whose reply was lost for good: the number of tasks.
CREATE OR REPLACE FUNCTION {schema}.return_claim(p_member integer, p_queue varchar, p_uid varchar) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_task  record;
    v_count integer := 0;
BEGIN
    FOR v_task IN SELECT task_id, attempt FROM {schema}.task
        WHERE queue_name = p_queue AND status = 'running' AND member_id = p_member AND claim_uid = p_uid
    LOOP
        IF {schema}.end_task(p_member, v_task.task_id, v_task.attempt, 'returned', NULL, NULL) IS NOT NULL THEN
            v_count := v_count + 1;
        END IF;
    END LOOP;
    RETURN v_count;
END
$$;

-- Tests the members that run tasks of a queue (NULL: of all), and makes those of the dead pending again: how many. Whose
-- worker died five times has failed: it may be what kills them.
CREATE OR REPLACE FUNCTION {schema}.recover_tasks(p_queue varchar, p_mine integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_member integer;
    v_gone   integer[];
    v_count  integer;
BEGIN
    FOR v_member IN SELECT DISTINCT member_id FROM {schema}.task
        WHERE (p_queue IS NULL OR queue_name = p_queue) AND status = 'running' AND member_id IS DISTINCT FROM p_mine
        ORDER BY 1  -- in one order for everybody: two of these must not wait for each other
    LOOP
        PERFORM {schema}.test_member(v_member, p_mine);
    END LOOP;
    -- By number, which is never used again: what another recovers, and a third claims, after the snapshot below was taken
    -- is looked at again when its row is locked, and only a condition on the row itself is asked again then.
    v_gone := ARRAY(SELECT DISTINCT t.member_id FROM {schema}.task AS t
                    WHERE (p_queue IS NULL OR t.queue_name = p_queue) AND t.status = 'running'
                      AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = t.member_id));
    WITH orphan AS (
        SELECT t.task_id, t.attempt, t.member_id, t.owner, t.claimed_at FROM {schema}.task AS t
        WHERE (p_queue IS NULL OR t.queue_name = p_queue) AND t.status = 'running'
          AND t.member_id = ANY (v_gone)
        FOR UPDATE OF t SKIP LOCKED),
    back AS (
        UPDATE {schema}.task AS t
        SET status = CASE WHEN losses < 4 THEN 'pending' ELSE 'failed' END,
            is_open = losses < 4 OR on_failure = 'stop', losses = losses + 1,
            ended_at = CASE WHEN losses < 4 THEN NULL ELSE clock_timestamp() END,
            error = CASE WHEN losses < 4 THEN error ELSE 'its worker died five times' END,
            member_id = NULL, claim_uid = NULL
        FROM orphan AS o WHERE t.task_id = o.task_id)
    INSERT INTO {schema}.task_log (task_id, attempt, outcome, member_id, owner, started_at, error)
    SELECT o.task_id, o.attempt, 'lost', o.member_id, o.owner, o.claimed_at, 'its worker died' FROM orphan AS o;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$$;

-- What is left to do: whether anything waits, whether anything runs, whether something of the lowest open order waits
-- (or everything behind it does), and the first failed task that holds up what comes later.
CREATE OR REPLACE FUNCTION {schema}.queue_state(
    p_queue varchar, OUT pending boolean, OUT running boolean, OUT next_pending boolean, OUT failed bigint, OUT error text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    SELECT EXISTS (SELECT FROM {schema}.task AS t WHERE t.queue_name = p_queue AND t.is_open AND t.status = 'pending'),
           EXISTS (SELECT FROM {schema}.task AS t WHERE t.queue_name = p_queue AND t.status = 'running'),
           EXISTS (SELECT FROM {schema}.task AS t WHERE t.queue_name = p_queue AND t.is_open AND t.status = 'pending'
                   AND t.task_order = (SELECT min(o.task_order) FROM {schema}.task AS o WHERE o.queue_name = p_queue AND o.is_open))
    INTO pending, running, next_pending;
    SELECT t.task_id, t.error INTO failed, error FROM {schema}.task AS t
    WHERE t.queue_name = p_queue AND t.is_open AND t.status = 'failed' ORDER BY t.task_order, t.task_id LIMIT 1;
END
$$;


-- What people look at -------------------------------------------------------------------------------------------

-- Newest first where they have ended; those that are open in the order in which they will run.
CREATE OR REPLACE FUNCTION {schema}.list_tasks(p_queue varchar DEFAULT NULL, p_status varchar DEFAULT NULL, p_most integer DEFAULT 100)
RETURNS TABLE (task_id bigint, queue_name varchar, task_order integer, kind varchar, body text, note varchar, status varchar,
               on_failure varchar, attempt integer, failures integer, losses integer, max_attempts integer, put_at timestamptz,
               ready_at timestamptz, claimed_at timestamptz, ended_at timestamptz, seconds float, member_id integer,
               owner varchar, host varchar, pid integer, error text, result text)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.task_id, t.queue_name, t.task_order, t.kind, t.body, t.note, t.status, t.on_failure, t.attempt, t.failures, t.losses,
           t.max_attempts, t.put_at, t.ready_at, t.claimed_at, t.ended_at,
           extract(epoch FROM CASE WHEN t.status IN ('finished', 'failed') THEN t.ended_at - t.claimed_at
                                   WHEN t.status = 'running' THEN clock_timestamp() - t.claimed_at END)::float,
           t.member_id, t.owner, m.host, m.pid, t.error, t.result
    FROM {schema}.task AS t LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE (p_queue IS NULL OR t.queue_name = p_queue) AND (p_status IS NULL OR t.status = p_status)
    ORDER BY NOT t.is_open, CASE WHEN t.is_open THEN t.queue_name END, CASE WHEN t.is_open THEN t.task_order END,
             CASE WHEN t.is_open THEN t.task_id END, t.ended_at DESC, t.task_id DESC
    LIMIT p_most
$$;

CREATE OR REPLACE FUNCTION {schema}.task_attempts(p_task bigint)
RETURNS TABLE (task_id bigint, attempt integer, outcome varchar, member_id integer, owner varchar, host varchar, pid integer,
               session_id integer, started_at timestamptz, ended_at timestamptz, seconds float, error text, result text)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT l.task_id, l.attempt, l.outcome, l.member_id, l.owner, l.host, l.pid, l.session_id, l.started_at, l.ended_at,
           extract(epoch FROM l.ended_at - l.started_at)::float, l.error, l.result
    FROM {schema}.task_log AS l WHERE l.task_id = p_task
    UNION ALL
    SELECT t.task_id, t.attempt, 'running', t.member_id, t.owner, m.host, m.pid, m.backend_pid, t.claimed_at, NULL,
           extract(epoch FROM clock_timestamp() - t.claimed_at)::float, NULL, NULL
    FROM {schema}.task AS t LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE t.task_id = p_task AND t.status = 'running'
    ORDER BY 2
$$;


-- What operators do ---------------------------------------------------------------------------------------------

-- 'retry' (failed or cancelled: pending again, with all its attempts) or 'cancel' (pending or failed).
-- 0 done, 1 it runs: nothing was done, -1 no such task, -2 it is in no such state.
CREATE OR REPLACE FUNCTION {schema}.set_task(p_task bigint, p_what varchar) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_status varchar := (SELECT t.status FROM {schema}.task AS t WHERE t.task_id = p_task FOR UPDATE);
BEGIN
    IF v_status IS NULL THEN
        RETURN -1;
    ELSIF v_status = 'running' THEN
        RETURN 1;
    ELSIF p_what = 'retry' AND v_status IN ('failed', 'cancelled') THEN
        UPDATE {schema}.task
        SET status = 'pending', is_open = true, failures = 0, losses = 0,
            ready_at = put_at,  -- from the first, whatever the clock says
            ended_at = NULL
        WHERE task_id = p_task;
    ELSIF p_what = 'cancel' AND v_status IN ('pending', 'failed') THEN
        UPDATE {schema}.task SET status = 'cancelled', is_open = false, ended_at = clock_timestamp() WHERE task_id = p_task;
    ELSE
        RETURN -2;
    END IF;
    RETURN 0;
END
$$;

-- Removes ended tasks older than setting history_days, with their log, at most p_most a call.
CREATE OR REPLACE FUNCTION {schema}.prune_tasks(p_most integer) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH gone AS (
        DELETE FROM {schema}.task WHERE task_id = ANY (ARRAY(
            SELECT task_id FROM {schema}.task
            WHERE NOT is_open
              AND ended_at < clock_timestamp() - (SELECT value FROM {schema}.setting WHERE name = 'history_days')::integer * interval '1 day'
            ORDER BY ended_at LIMIT p_most FOR UPDATE SKIP LOCKED))
        RETURNING task_id),
    log AS (DELETE FROM {schema}.task_log AS l USING gone WHERE l.task_id = gone.task_id)
    SELECT count(*) FROM gone
$$;


-- For sessions --------------------------------------------------------------------------------------------------

-- Puts one task, a SQL text if kind is not given: its number. May be part of the caller's transaction.
CREATE OR REPLACE FUNCTION {schema}.put(
    queue text, body text, kind text DEFAULT 'sql', "order" integer DEFAULT 0, after_seconds double precision DEFAULT 0,
    max_attempts integer DEFAULT 1, note text DEFAULT NULL, on_failure text DEFAULT 'stop',
    backoff_seconds double precision DEFAULT 1) RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF body IS NULL THEN
        RAISE EXCEPTION 'sqlsem: the body of a task is NULL; give it a text' USING ERRCODE = '22023';
    END IF;
    RETURN (SELECT {schema}.put_tasks(queue, pg_catalog.replace(pg_catalog.gen_random_uuid()::text, '-', ''),
        pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
            'kind', kind, 'body', body, 'order', "order", 'after_ms', (after_seconds * 1000)::bigint,
            'max_attempts', max_attempts, 'note', note, 'on_failure', on_failure,
            'backoff_ms', (backoff_seconds * 1000)::integer))));
END
$$;

-- Claims for this session.
CREATE OR REPLACE FUNCTION {schema}.session_claim(p_queue text, OUT member integer, OUT task_id bigint, OUT kind varchar,
                                                  OUT body text, OUT attempt integer)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM {schema}.check_name('queue', p_queue);
    member := {schema}.session_member(NULL);
    SELECT c.task_id, c.kind, c.body, c.attempt INTO task_id, kind, body, attempt
    FROM {schema}.claim_task(member, p_queue, {schema}.session_id(), NULL, false) AS c;
    IF task_id IS NULL THEN
        PERFORM {schema}.recover_tasks(p_queue, member);
    END IF;
END
$$;

-- What an earlier call of work left behind that was broken off between a claim and its end: the session lives, so nobody
-- else ends it.
CREATE OR REPLACE FUNCTION {schema}.session_leftovers(p_queue text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_member integer;
BEGIN
    PERFORM {schema}.check_name('queue', p_queue);
    v_member := {schema}.session_member(NULL);
    PERFORM {schema}.end_task(v_member, t.task_id, t.attempt, 'failed', NULL, 'it was broken off by its client')
    FROM {schema}.task AS t
    WHERE t.status = 'running' AND t.member_id = v_member AND t.claim_uid IS NULL;
END
$$;

-- Runs the SQL tasks of a queue, one after the other, with the caller's rights, until there was none for idle_seconds:
-- what a scheduled job calls, as many of them as shall work side by side. done and failed count the tasks.
-- A text may be several statements, but none that ends a transaction; each task is a transaction of its own, with its end,
-- so that what it does in this database is done once. Settings that a text makes stay with the session.
CREATE OR REPLACE PROCEDURE {schema}.work(
    queue text, idle_seconds double precision DEFAULT 30, INOUT done integer DEFAULT 0, INOUT failed integer DEFAULT 0)
LANGUAGE plpgsql
AS $$
DECLARE
    v_claim  record;
    v_since  timestamptz := pg_catalog.clock_timestamp();
    v_pause  double precision := 0.005;
    v_error  text;
    v_state  text;
    v_status text;
    v_broken text;  -- why all of it was
BEGIN
    CALL {schema}.stand_alone('work');
    IF idle_seconds IS NULL OR NOT idle_seconds >= 0 THEN
        RAISE EXCEPTION 'sqlsem: idle_seconds must be 0 or more, not %', idle_seconds USING ERRCODE = '22023';
    END IF;
    done := 0;
    failed := 0;
    PERFORM {schema}.session_leftovers(queue);
    COMMIT;
    LOOP
        SELECT * INTO v_claim FROM {schema}.session_claim(queue);
        COMMIT;
        IF v_claim.task_id IS NULL THEN
            EXIT WHEN pg_catalog.clock_timestamp() >= v_since + idle_seconds * interval '1 second';
            PERFORM pg_catalog.pg_sleep(v_pause);
            COMMIT;
            v_pause := least(v_pause * 1.5, 0.5);
            CONTINUE;
        END IF;
        v_error := NULL;
        v_status := NULL;
        IF v_claim.kind <> 'sql' THEN
            v_error := format('a database session runs SQL, not kind %s; use sqlsem work', v_claim.kind);
        ELSE
            BEGIN
                EXECUTE v_claim.body;
                -- What was put off to the commit, and a role that keeps us from recording the end, is the text's fault: it
                -- fails here, where that can be said of the task, and is undone.
                SET CONSTRAINTS ALL IMMEDIATE;
                v_status := {schema}.end_task(v_claim.member, v_claim.task_id, v_claim.attempt, 'finished', NULL, NULL);
            EXCEPTION WHEN query_canceled THEN
                -- A timeout, or somebody's wish: said of the task first, and then to the caller.
                GET STACKED DIAGNOSTICS v_broken = MESSAGE_TEXT;
                v_error := '57014: ' || v_broken;
            WHEN OTHERS THEN
                GET STACKED DIAGNOSTICS v_error = MESSAGE_TEXT, v_state = RETURNED_SQLSTATE;
                v_error := v_state || ': ' || v_error;
            END;
        END IF;
        -- The work and its end are committed together, or not at all: the task may be another's by now.
        IF v_error IS NOT NULL THEN
            v_status := {schema}.end_task(v_claim.member, v_claim.task_id, v_claim.attempt, 'failed', NULL, v_error);
        END IF;
        IF v_status IS NULL THEN
            ROLLBACK;
            v_error := 'it was given up';
            RAISE WARNING 'sqlsem: task % was given up while it ran, and was undone', v_claim.task_id
                USING HINT = 'Did its text free this session''s advisory locks?';
        ELSE
            COMMIT;
        END IF;
        IF v_broken IS NOT NULL THEN
            RAISE EXCEPTION 'sqlsem: task % was broken off: %', v_claim.task_id, v_broken
                USING ERRCODE = '57014', HINT = 'Give work all the time that it needs (statement_timeout = 0).';
        ELSIF v_error IS NULL THEN
            done := done + 1;
        ELSE
            failed := failed + 1;
        END IF;
        v_since := pg_catalog.clock_timestamp();
        v_pause := 0.005;
    END LOOP;
END
$$;
