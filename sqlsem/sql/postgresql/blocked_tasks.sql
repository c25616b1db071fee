-- sqlsem, tasks with locks, for PostgreSQL. May be run again at any time, after tasks.sql. Described in docs/howto/task-locks.md.
--
-- A task with locks is blocked: it is pending, and ready at the end of time (end_of_time), so that no other claim takes
-- it. No process waits for its locks: rows of the task stand in the queues of its locks (task_lock), inserted in one
-- transaction. The rows belong to the proxy member of the task's queue, which lives by a lease. A claim finds the
-- task whose rows can all be granted, and starts it: claim_blocked.
--
-- Invariant: a blocked task holds nothing. The transaction that claims it grants its rows, and makes them the worker's;
-- the one that ends the attempt deletes them. So no held lock is ever without an owner, whatever dies, and a blocked
-- task can block others only by its position in a queue. It keeps a position only while it can use it:
--   * Only claims renew the lease. If no worker was free to start a task for a minute, a waiter behind such a row
--     removes the proxy member with its rows, like any dead member. At the next claim the tasks enqueue their locks
--     again.
--   * A task whose locks are free but that may not start (a lower order was opened, a limit is reached) leaves the lock
--     queues, and enqueues again when it may.
--   * A task enqueues its locks only when its time has come, its order is the lowest open one, and its limits and rates
--     have room. So a waiter behind a blocked task waits only for locks and for a free worker.
-- If an operator revokes one of its rows, the task leaves the other queues, too, and enqueues its locks again. A
-- trigger (on_task_blocked) does the same for each statement that ends an attempt or removes a blocked task.
--
-- locks_pending: how many of its rows are still blocked; NULL: the task is in no lock queue. A row that is no longer
-- blocked can be blocked again only by a pause or a new limit, so a claim tests all rows again.
-- Order of locks: the queue's row of queue_proxy, which only one claim at a time has locked; members; gates, without
-- waiting; tasks, skipping locked ones; rows of the lock queues.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Return ready_at of a task with locks: a time that no other claim reaches.
CREATE OR REPLACE FUNCTION {schema}.end_of_time() RETURNS timestamptz
LANGUAGE sql IMMUTABLE
AS $$ SELECT '9999-01-01 00:00:00+00'::pg_catalog.timestamptz $$;

-- Keep operators from removing the limit of a resource, until the transaction ends. Return false if one is doing so
-- now.
CREATE OR REPLACE FUNCTION {schema}.block_limit_removal() RETURNS boolean {plpgsql}
BEGIN
    LOCK TABLE {schema}.limit_pattern IN ROW SHARE MODE NOWAIT;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;

-- Raise for invalid locks of a task. p_locks: [{"resource": …, "access": …, "limit": …, "weight": …}, …], each resource
-- once.
CREATE OR REPLACE FUNCTION {schema}.check_locks(p_locks jsonb) RETURNS void {plpgsql}
DECLARE
    v_lock record;
BEGIN
    IF jsonb_typeof(p_locks) <> 'array' OR jsonb_array_length(p_locks) NOT BETWEEN 1 AND 100
       OR jsonb_path_exists(p_locks, '$[*] ? (@.type() != "object")') THEN
        RAISE EXCEPTION 'sqlsem: the locks of a task are a JSON list of 1 to 100 objects, such as [{"resource": "customers", "access": "write", "limit": 1}]'
            USING ERRCODE = '22023';
    END IF;
    FOR v_lock IN SELECT * FROM jsonb_to_recordset(p_locks) AS r (resource text, access text, "limit" numeric, weight numeric) LOOP
        PERFORM {schema}.check_name('resource', v_lock.resource);
        PERFORM {schema}.check_not_reserved(v_lock.resource);
        IF coalesce(v_lock.access, 'write') NOT IN ('write', 'read')
           AND v_lock.access !~ '^stage:(0|-?[1-9][0-9]{0,18})$' THEN
            RAISE EXCEPTION 'sqlsem: access is %; it must be write, read or stage:<whole number>', quote_literal(v_lock.access)
                USING ERRCODE = '22023';
        ELSIF v_lock."limit" NOT BETWEEN 1 AND 2147483647 OR v_lock."limit" <> trunc(v_lock."limit")
              OR NOT coalesce(v_lock.weight, 1) BETWEEN 1 AND coalesce(v_lock."limit", 2147483647)
              OR v_lock.weight <> trunc(v_lock.weight)
              OR coalesce(v_lock.access, 'write') <> 'write' AND v_lock."limit" IS DISTINCT FROM 1 THEN
            RAISE EXCEPTION 'sqlsem: on % limit % with weight % cannot be: 1 <= weight <= limit, both whole, and limit 1 with another access than write',
                quote_literal(v_lock.resource), v_lock."limit", v_lock.weight USING ERRCODE = '22023';
        ELSIF v_lock."limit" IS NULL AND (SELECT o.cap FROM {schema}.effective_settings(v_lock.resource::varchar) AS o) IS NULL THEN
            PERFORM {schema}.check_registration(v_lock.resource::varchar, 'write', 'a task', NULL, 'a task', NULL, 1);
        END IF;
    END LOOP;
    IF (SELECT count(*) <> count(DISTINCT r ->> 'resource') FROM jsonb_array_elements(p_locks) AS r) THEN
        RAISE EXCEPTION 'sqlsem: the locks of a task name a resource twice; ask for it once, with a weight' USING ERRCODE = '22023';
    END IF;
END
$$;

-- Raise if a login that may not take locks puts tasks with locks. (A schedule is checked when it is saved.)
CREATE OR REPLACE FUNCTION {schema}.check_may_lock(p_tasks jsonb) RETURNS void {plpgsql}
BEGIN
    IF jsonb_path_exists(p_tasks, '$[*].locks ? (@ != null)') AND NOT {schema}.has_role('user', 'operator') THEN
        RAISE EXCEPTION 'sqlsem: % may not take locks, and so puts no tasks that do', session_user
            USING ERRCODE = '42501', HINT = format('GRANT {schema}_user TO %I.', session_user);
    END IF;
END
$$;

-- Store the locks of tasks that were just put.
CREATE OR REPLACE FUNCTION {schema}.store_task_locks(p_queue varchar, p_uid varchar, p_tasks jsonb) RETURNS void {sql}
    INSERT INTO {schema}.task_lock (task_id, number, queue_name, resource_id, access_type, concurrency_limit, weight)
    SELECT t.task_id, l.number, p_queue, l.lock ->> 'resource', coalesce(l.lock ->> 'access', 'write'),
           (l.lock ->> 'limit')::integer, coalesce((l.lock ->> 'weight')::integer, 1)
    FROM jsonb_array_elements(p_tasks) WITH ORDINALITY AS a (task, ordinal)
    CROSS JOIN LATERAL jsonb_array_elements(CASE jsonb_typeof(a.task -> 'locks') WHEN 'array' THEN a.task -> 'locks' ELSE '[]' END)
        WITH ORDINALITY AS l (lock, number)
    JOIN {schema}.task AS t ON t.put_uid = p_uid || '.' || a.ordinal
$$;

-- Delete the rows of a task that belong to this member. (Rows that the member has handed over and adopted again no
-- longer belong to the task.)
-- A row that an open transaction has pinned stays with its owner, which releases it later. The proxy member has no
-- process that would do so: if p_member is the proxy, wait for pinned rows.
-- p_claim: the beginning of the uids of the rows that a claim has granted; NULL: the task is in the lock queues.
CREATE OR REPLACE FUNCTION {schema}.end_task_rows(p_task bigint, p_member bigint, p_claim text, p_outcome text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_row   record;
    v_freed boolean;
BEGIN
    IF p_claim IS NULL THEN
        PERFORM FROM {schema}.task_lock AS l
        JOIN {schema}.{table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
        WHERE l.task_id = p_task AND t.member_id = p_member
        ORDER BY t.queue_position FOR UPDATE OF t;
    END IF;
    FOR v_row IN
        WITH free AS (
            SELECT t.resource_id, t.queue_position FROM {schema}.task_lock AS l
            JOIN {schema}.{table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
            WHERE l.task_id = p_task AND t.member_id = p_member AND (p_claim IS NULL OR starts_with(t.request_uid, p_claim))
            FOR UPDATE OF t SKIP LOCKED),
        gone AS (
            DELETE FROM {schema}.{table} AS t USING free
            WHERE t.resource_id = free.resource_id AND t.queue_position = free.queue_position RETURNING t.*),
        kept AS (
            INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note,
                                          requested_at, granted_at, outcome, concurrency_limit, host, pid, program, login, ended_by)
            SELECT g.resource_id, g.queue_position, g.requesting_id, g.access_type, g.weight, g.member_id, g.owner, g.note,
                   g.requested_at, g.granted_at, CASE WHEN g.revoked_at IS NULL THEN p_outcome ELSE 'revoked' END, g.concurrency_limit,
                   m.host, coalesce(m.pid, m.backend_pid), m.program, m.login, g.revoked_by
            FROM gone AS g LEFT JOIN {schema}.member AS m ON m.member_id = g.member_id)
        SELECT g.queue_position, m.backend_pid = pg_backend_pid() AND m.lease_ms IS NULL AS is_ours
        FROM gone AS g LEFT JOIN {schema}.member AS m ON m.member_id = g.member_id
    LOOP
        IF v_row.is_ours THEN
            v_freed := {schema}.release_session_lock_after_commit({schema}.lock_class(2), {schema}.lock_key(v_row.queue_position));
        END IF;
    END LOOP;
END
$$;

-- Remove a blocked task from all lock queues. (The caller sets locks_pending.)
CREATE OR REPLACE FUNCTION {schema}.leave_lock_queues(p_task bigint, p_queue varchar) RETURNS void {plpgsql}
BEGIN
    PERFORM {schema}.end_task_rows(p_task, (SELECT p.member_id FROM {schema}.queue_proxy AS p WHERE p.queue_name = p_queue), NULL, 'cancelled');
    UPDATE {schema}.task_lock SET queue_position = NULL, waits = false WHERE task_id = p_task AND queue_position IS NOT NULL;
END
$$;

-- Delete the rows of a task with locks when an attempt ends, by whatever statement, or when the blocked task is
-- cancelled or becomes pending anew. A pending task becomes a blocked one.
CREATE OR REPLACE FUNCTION {schema}.on_task_blocked() RETURNS trigger {plpgsql_indexed_definer}
BEGIN
    IF OLD.status = 'running' THEN
        PERFORM {schema}.end_task_rows(OLD.task_id, OLD.member_id, concat(coalesce(OLD.claim_uid, 'blocked ' || OLD.task_id), '.'), 'released');
        UPDATE {schema}.task_lock SET queue_position = NULL, waits = false WHERE task_id = OLD.task_id;
    ELSIF OLD.status = 'pending' AND NEW.status <> 'running' THEN
        PERFORM {schema}.leave_lock_queues(OLD.task_id, OLD.queue_name);
        NEW.locks_pending := NULL;
    END IF;
    IF NEW.status = 'pending' THEN
        NEW.enqueue_locks_at := CASE WHEN NEW.ready_at < {schema}.end_of_time() THEN NEW.ready_at ELSE clock_timestamp() END;
        NEW.ready_at := {schema}.end_of_time();
        NEW.locks_pending := NULL;
    END IF;
    RETURN NEW;
END
$$;
DO $$
BEGIN
    -- Create the trigger only once: that locks the table.
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'on_task_blocked' AND tgrelid = '{schema}.task'::regclass) THEN
        CREATE TRIGGER on_task_blocked BEFORE UPDATE OF status ON {schema}.task FOR EACH ROW
            WHEN (OLD.lock_count IS NOT NULL AND OLD.status IS DISTINCT FROM NEW.status)
            EXECUTE FUNCTION {schema}.on_task_blocked();
    END IF;
END
$$;

-- Delete the rows of a blocked task that is deleted by hand.
CREATE OR REPLACE FUNCTION {schema}.on_task_removed() RETURNS trigger {plpgsql_indexed_definer}
BEGIN
    PERFORM {schema}.leave_lock_queues(OLD.task_id, OLD.queue_name);
    RETURN OLD;
END
$$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'on_task_removed' AND tgrelid = '{schema}.task'::regclass) THEN
        CREATE TRIGGER on_task_removed BEFORE DELETE ON {schema}.task FOR EACH ROW
            WHEN (OLD.lock_count IS NOT NULL AND OLD.status = 'pending')
            EXECUTE FUNCTION {schema}.on_task_removed();
    END IF;
END
$$;

-- Return the proxy member of a queue: renew the lease of p_member, or register a new one if p_member is gone. The
-- caller has locked the queue's row of queue_proxy.
CREATE OR REPLACE FUNCTION {schema}.proxy_member(p_queue varchar, p_member bigint) RETURNS bigint {plpgsql_indexed}
DECLARE
    v_lease constant integer := 60000;  -- ms
BEGIN
    UPDATE {schema}.member SET heartbeat_at = clock_timestamp(), lease_until = clock_timestamp() + v_lease * interval '1 millisecond'
    WHERE member_id = p_member AND lease_until < clock_timestamp() + v_lease * interval '0.875 millisecond';
    IF FOUND OR EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member) THEN
        RETURN p_member;
    END IF;
    PERFORM {schema}.check_origin();
    -- The proxy has no login: only these routines can renew its lease or release its rows.
    INSERT INTO {schema}.member (program, login, grace_ms, lease_ms, lease_until)
    VALUES ('blocked tasks', '', 0, v_lease, clock_timestamp() + v_lease * interval '1 millisecond')
    RETURNING member_id INTO p_member;
    UPDATE {schema}.queue_proxy AS p SET member_id = p_member WHERE p.queue_name = p_queue;
    -- The rows in the lock queues were removed with the earlier proxy.
    UPDATE {schema}.task_lock AS l SET queue_position = NULL, waits = false
    FROM {schema}.task AS t
    WHERE t.queue_name = p_queue AND t.is_open AND t.status = 'pending' AND t.lock_count IS NOT NULL AND t.locks_pending IS NOT NULL
      AND l.task_id = t.task_id;
    UPDATE {schema}.task AS t SET locks_pending = NULL
    WHERE t.queue_name = p_queue AND t.is_open AND t.status = 'pending' AND t.lock_count IS NOT NULL AND t.locks_pending IS NOT NULL;
    RETURN p_member;
END
$$;

-- Return true if the limits and rates of a queue, and of this key, have room for one more task. p_asked: count also the
-- tasks that are in the lock queues.
CREATE OR REPLACE FUNCTION {schema}.has_room(p_queue varchar, p_key varchar, p_asked boolean) RETURNS boolean
{plpgsql_indexed}
DECLARE
    v_setting {schema}.queue_setting;
    v_maximum    integer;
    v_all     bigint;
    v_key     bigint;
    v_asks    bigint;
    v_key_asks bigint;
BEGIN
    SELECT * INTO v_setting FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue;
    IF NOT FOUND THEN
        RETURN true;
    END IF;
    v_maximum := CASE WHEN p_key <> '' THEN coalesce((SELECT k.task_limit FROM {schema}.queue_key AS k
                                                   WHERE k.queue_name = p_queue AND k.task_key = p_key), v_setting.key_limit) END;
    SELECT count(*), count(*) FILTER (WHERE t.task_key = p_key), count(*) FILTER (WHERE t.asks),
           count(*) FILTER (WHERE t.asks AND t.task_key = p_key)
    INTO v_all, v_key, v_asks, v_key_asks
    FROM (SELECT t.task_key, false AS asks FROM {schema}.running_tasks(p_queue) AS r JOIN {schema}.task AS t ON t.task_id = r.task_id
          UNION ALL
          SELECT t.task_key, true FROM {schema}.task AS t
          WHERE p_asked AND t.queue_name = p_queue AND t.is_open AND t.status = 'pending' AND t.lock_count IS NOT NULL
            AND t.locks_pending IS NOT NULL) AS t;
    RETURN coalesce(v_all < v_setting.task_limit, true) AND coalesce(v_key < v_maximum, true)
           AND {schema}.task_may_start(p_queue, coalesce(p_key, ''), v_asks, v_key_asks, false);
END
$$;

-- Enqueue the locks of blocked tasks that lack nothing else, of up to 100 tasks. Return the number of these tasks.
CREATE OR REPLACE FUNCTION {schema}.enqueue_locks(p_queue varchar, p_proxy bigint, p_order integer) RETURNS integer
{plpgsql_indexed}
DECLARE
    v_task     record;
    v_lock     record;
    v_position bigint;
    v_count    integer := 0;
    v_full     text[] := '{}';  -- keys without room
BEGIN
    FOR v_task IN
        SELECT t.task_id, t.task_key, t.note, t.attempt, t.lock_count FROM {schema}.task AS t
        WHERE t.queue_name = p_queue AND t.is_open AND t.status = 'pending' AND t.lock_count IS NOT NULL
          AND t.task_order = p_order AND t.locks_pending IS NULL AND t.enqueue_locks_at <= greatest(clock_timestamp(), t.put_at)
        ORDER BY t.task_priority DESC, t.task_id
        FOR UPDATE OF t SKIP LOCKED
    LOOP
        CONTINUE WHEN v_task.task_key = ANY (v_full);
        IF NOT {schema}.has_room(p_queue, v_task.task_key, true) THEN
            EXIT WHEN NOT {schema}.has_room(p_queue, '', true);
            v_full := v_full || v_task.task_key::text;
            CONTINUE;
        END IF;
        -- Try the gates without waiting, as other sessions may wait for locks of this transaction. If a lock names no
        -- limit, the resource's own limit must not be removed now.
        CONTINUE WHEN NOT (
            SELECT bool_and(pg_try_advisory_xact_lock({schema}.lock_class(0), g.key)
                            AND (g.named OR {schema}.block_limit_removal()))
            FROM (SELECT DISTINCT hashtext(l.resource_id) AS key, l.concurrency_limit IS NOT NULL AS named
                  FROM {schema}.task_lock AS l WHERE l.task_id = v_task.task_id ORDER BY 1) AS g);
        CONTINUE WHEN EXISTS (SELECT FROM {schema}.task_lock AS l CROSS JOIN LATERAL {schema}.effective_settings(l.resource_id) AS o
                              WHERE l.task_id = v_task.task_id AND l.concurrency_limit IS NULL AND o.cap IS NULL);
        FOR v_lock IN SELECT * FROM {schema}.task_lock AS l WHERE l.task_id = v_task.task_id ORDER BY l.number LOOP
            INSERT INTO {schema}.{table} (resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner,
                                          request_uid, note)
            VALUES (v_lock.resource_id, format('task %s', v_task.task_id), v_lock.access_type, v_lock.concurrency_limit,
                    v_lock.weight, p_proxy, left(format('task %s of %s', v_task.task_id, p_queue), 255),
                    format('blocked %s.%s.%s', v_task.task_id, v_lock.number, pg_current_xact_id()), v_task.note)
            RETURNING queue_position INTO v_position;
            DELETE FROM {schema}.low_water WHERE resource_id = v_lock.resource_id AND mark > v_position;  -- the numbers went back
            UPDATE {schema}.task_lock SET queue_position = v_position, waits = true
            WHERE task_id = v_task.task_id AND number = v_lock.number;
        END LOOP;
        UPDATE {schema}.task SET locks_pending = v_task.lock_count WHERE task_id = v_task.task_id;
        v_count := v_count + 1;
        EXIT WHEN v_count >= 100;
    END LOOP;
    RETURN v_count;
END
$$;

-- Mark the rows that are no longer blocked (waits, locks_pending); a claim grants them. Of requests of one kind, none
-- behind a blocked one needs a test.
CREATE OR REPLACE FUNCTION {schema}.poll_lock_queues(p_queue varchar) RETURNS void {plpgsql_indexed}
DECLARE
    v_kind record;
    v_row  record;
BEGIN
    FOR v_kind IN
        SELECT DISTINCT l.resource_id, l.access_type, l.weight, l.concurrency_limit FROM {schema}.task_lock AS l
        WHERE l.queue_name = p_queue AND l.waits
    LOOP
        FOR v_row IN
            SELECT l.task_id, l.number, l.queue_position FROM {schema}.task_lock AS l
            WHERE l.queue_name = p_queue AND l.waits AND l.resource_id = v_kind.resource_id AND l.access_type = v_kind.access_type
              AND l.weight = v_kind.weight AND l.concurrency_limit IS NOT DISTINCT FROM v_kind.concurrency_limit
            ORDER BY l.queue_position
        LOOP
            EXIT WHEN NOT (SELECT a.eligible FROM {schema}.eligibility(v_kind.resource_id, v_row.queue_position, v_kind.access_type,
                                                                 v_kind.concurrency_limit, v_kind.weight, NULL) AS a);
            PERFORM FROM {schema}.task AS t WHERE t.task_id = v_row.task_id AND t.status = 'pending' FOR UPDATE OF t SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;  -- another session is claiming or removing the task
            UPDATE {schema}.task_lock SET waits = false WHERE task_id = v_row.task_id AND number = v_row.number;
            UPDATE {schema}.task SET locks_pending = locks_pending - 1 WHERE task_id = v_row.task_id;
        END LOOP;
    END LOOP;
END
$$;

-- Return and lock the first blocked task whose locks can all be granted, if it may start. Tasks whose locks are free
-- but that may not start leave the lock queues.
CREATE OR REPLACE FUNCTION {schema}.next_blocked_task(p_queue varchar, p_proxy bigint, p_order integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_task   record;
    v_rows   record;
    v_locked integer;
BEGIN
    FOR v_task IN
        SELECT t.task_id, t.task_order, t.task_key, t.lock_count FROM {schema}.task AS t
        WHERE t.queue_name = p_queue AND t.is_open AND t.status = 'pending' AND t.lock_count IS NOT NULL AND t.locks_pending = 0
        ORDER BY t.task_order, t.task_priority DESC, t.task_id
        FOR UPDATE OF t SKIP LOCKED
    LOOP
        -- Lock its rows: until this transaction ends no session removes one, and no reader ahead begins to upgrade
        -- (begin_upgrade). Skip a row that another session is removing or upgrading.
        PERFORM FROM {schema}.task_lock AS l
        JOIN {schema}.{table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
        WHERE l.task_id = v_task.task_id AND t.member_id = p_proxy
        FOR NO KEY UPDATE OF t SKIP LOCKED;
        GET DIAGNOSTICS v_locked = ROW_COUNT;
        SELECT count(*) AS there, count(*) FILTER (WHERE r.revoked_at IS NULL) AS count,
               count(*) FILTER (WHERE r.eligible) AS free INTO v_rows
        FROM (SELECT a.eligible, t.revoked_at FROM {schema}.task_lock AS l
              JOIN {schema}.{table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
              CROSS JOIN LATERAL {schema}.eligibility(l.resource_id, l.queue_position, l.access_type, l.concurrency_limit, l.weight, NULL) AS a
              WHERE l.task_id = v_task.task_id AND t.member_id = p_proxy) AS r;
        CONTINUE WHEN v_locked < v_rows.there;
        IF v_rows.count < v_task.lock_count OR v_task.task_order <> p_order
           OR NOT {schema}.has_room(p_queue, v_task.task_key, false) THEN
            PERFORM {schema}.leave_lock_queues(v_task.task_id, p_queue);
            UPDATE {schema}.task SET locks_pending = NULL WHERE task_id = v_task.task_id;
        ELSIF v_rows.free < v_task.lock_count THEN  -- a resource was paused, or has another limit now
            UPDATE {schema}.task_lock SET waits = true WHERE task_id = v_task.task_id;
            UPDATE {schema}.task SET locks_pending = v_task.lock_count WHERE task_id = v_task.task_id;
        ELSE
            RETURN v_task.task_id;
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;

-- Claim a blocked task whose locks can all be granted; task_id is NULL if there is none, or another claim is under way.
-- Its locks then belong to this member, with p_requesting_id, and with p_row_owner as owner in that process. locks:
-- [[resource, position, access, limit, weight], …]. With p_again (the first reply may have been lost) return the task
-- that an earlier call with the same p_uid has claimed.
CREATE OR REPLACE FUNCTION {schema}.claim_blocked(
    p_member bigint, p_queue varchar, p_owner varchar, p_uid varchar, p_again boolean, p_requesting_id varchar, p_row_owner varchar,
    OUT task_id bigint, OUT task_order integer, OUT kind varchar, OUT body text, OUT note varchar, OUT attempt integer,
    OUT failures integer, OUT max_attempts integer, OUT locks text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_proxy bigint;
    v_order   integer;
    v_task    bigint;
    v_lease   integer;
    v_lock    record;
BEGIN
    IF p_again THEN
        v_task := (SELECT r.task_id FROM {schema}.running_tasks(p_queue) AS r JOIN {schema}.task AS t ON t.task_id = r.task_id
                   WHERE r.member_id = p_member AND r.claim_uid = p_uid AND t.lock_count IS NOT NULL);
    END IF;
    IF v_task IS NULL THEN
        -- (This test comes first, so that it is all that a claim costs in a queue without blocked tasks.)
        IF NOT EXISTS (SELECT FROM {schema}.task AS t WHERE t.queue_name = p_queue AND t.is_open AND t.status = 'pending'
                       AND t.lock_count IS NOT NULL) THEN
            RETURN;
        END IF;
        PERFORM {schema}.require_read_committed('a claim');
        IF concat(p_requesting_id, p_row_owner, p_uid) ~ '[[:cntrl:]]' OR p_requesting_id IS NULL THEN
            RAISE EXCEPTION 'sqlsem: bad request: requesting_id and uid must be printable text' USING ERRCODE = '22023';
        END IF;
        PERFORM {schema}.require_member(p_member);
        INSERT INTO {schema}.queue_proxy (queue_name) VALUES (p_queue) ON CONFLICT DO NOTHING;
        SELECT p.member_id INTO v_proxy FROM {schema}.queue_proxy AS p WHERE p.queue_name = p_queue FOR UPDATE SKIP LOCKED;
        IF NOT FOUND OR NOT {schema}.block_first_limit() THEN
            RETURN;
        END IF;
        -- Lock the limits of the queue, as pick_fair_task does: they cannot change before this transaction ends.
        PERFORM FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue FOR UPDATE SKIP LOCKED;
        IF NOT FOUND AND EXISTS (SELECT FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue) THEN
            RETURN;
        END IF;
        -- Take the member's lock exclusively: no registration of this member may write a low-water mark above these
        -- rows meanwhile.
        IF NOT pg_try_advisory_xact_lock({schema}.lock_class(7), {schema}.lock_key(p_member)) THEN
            RETURN;
        END IF;
        v_proxy := {schema}.proxy_member(p_queue, v_proxy);
        v_order := (SELECT f.task_order FROM {schema}.first_task(p_queue, -1) AS f);
        FOR v_look IN 1..2 LOOP
            PERFORM {schema}.poll_lock_queues(p_queue);
            v_task := {schema}.next_blocked_task(p_queue, v_proxy, v_order);
            EXIT WHEN v_task IS NOT NULL OR v_look = 2 OR {schema}.enqueue_locks(p_queue, v_proxy, v_order) = 0;
        END LOOP;
        IF v_task IS NULL OR NOT {schema}.task_may_start(
            p_queue, (SELECT coalesce(t.task_key, '') FROM {schema}.task AS t WHERE t.task_id = v_task), 0, 0, true) THEN
            RETURN;
        END IF;
        -- (The rows may be below the member's low-water mark.)
        DELETE FROM {schema}.low_water AS l WHERE l.resource_id = {schema}.member_key(p_member);
        UPDATE {schema}.{table} AS t
        SET member_id = p_member, requesting_id = p_requesting_id, owner = p_row_owner,
            request_uid = concat(coalesce(p_uid, 'blocked ' || v_task), '.', l.number, CASE WHEN p_uid IS NULL THEN '.' || pg_current_xact_id() END),
            granted_at = clock_timestamp(), waiter_lease_until = NULL
        FROM {schema}.task_lock AS l
        WHERE l.task_id = v_task AND t.resource_id = l.resource_id AND t.queue_position = l.queue_position;
        UPDATE {schema}.task AS t
        SET status = 'running', attempt = t.attempt + 1, member_id = p_member, owner = p_owner, claim_uid = p_uid,
            claimed_at = clock_timestamp(), host = m.host, pid = coalesce(m.pid, m.backend_pid), login = m.login
        FROM {schema}.member AS m
        WHERE t.task_id = v_task AND m.member_id = p_member;
    END IF;
    SELECT t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts
    INTO task_id, task_order, kind, body, note, attempt, failures, max_attempts
    FROM {schema}.task AS t WHERE t.task_id = v_task;
    v_lease := (SELECT m.lease_ms FROM {schema}.member AS m WHERE m.member_id = p_member);
    FOR v_lock IN SELECT l.queue_position FROM {schema}.task_lock AS l WHERE l.task_id = v_task AND v_lease IS NULL LOOP
        -- (A waiter may share the lock for an instant, to test if it is free: so try several times. Without the lock,
        -- waiters poll.)
        FOR v_try IN 1..20 LOOP
            EXIT WHEN pg_try_advisory_lock({schema}.lock_class(2), {schema}.lock_key(v_lock.queue_position));
            PERFORM pg_sleep(0.001);
        END LOOP;
    END LOOP;
    locks := (SELECT json_agg(json_build_array(l.resource_id, l.queue_position, l.access_type, l.concurrency_limit, l.weight)
                              ORDER BY l.number)
              FROM {schema}.task_lock AS l WHERE l.task_id = v_task);
END
$$;

-- Test the owners of rows that block the tasks of a queue, on 16 resources at most. (Elsewhere waiters make this test,
-- but no process waits for the locks of a blocked task.)
CREATE OR REPLACE FUNCTION {schema}.check_lock_holders(p_queue varchar) RETURNS void {plpgsql}
DECLARE
    v_resource varchar;
    v_written  boolean;
BEGIN
    FOR v_resource IN
        SELECT l.resource_id FROM {schema}.task_lock AS l WHERE l.queue_name = p_queue AND l.waits
        GROUP BY 1 ORDER BY random() LIMIT 16
    LOOP
        v_written := {schema}.reap_dead_members(v_resource, NULL);
    END LOOP;
END
$$;
