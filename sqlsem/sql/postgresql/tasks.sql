-- sqlsem, the work queue, for PostgreSQL. May be run again at any time, after public.sql.
--
-- A claim belongs to a member, like a row of the lock queue. No worker takes a task from a live worker, however long
-- the task takes. When the member is gone its tasks are pending again (recover_tasks). No transaction is open while a
-- task runs.
--
-- Orders are barriers: claims take only pending tasks of the lowest order that has an open task. A task is open from
-- its put to its end, in each state in between, so no snapshot shows an order as ended too early. An order that has
-- ended opens again only with a task that is put or retried later.
--
-- Low-water marks (task_low_water). While an old snapshot is open, ended tasks stay in the index of the open tasks, in
-- front of the open ones, and a claim would read all of them. So claims write a mark now and then. The newest mark of a
-- queue, the first in its index, says that no task is open in an order below task_order, and in that order no task
-- below `mark` except the survivors. That stays true while tasks only end:
--   * A task that runs, that failed and blocks later orders, that was returned, or that waits for its next attempt
--     stays open. When a mark passes it, it is a survivor. Claims read the survivors first, by their keys, and then
--     from the mark on.
--   * Numbers grow. A put takes the put lock of its queue, shared and until its transaction ends, before it draws any.
--     A session that writes a mark takes that lock exclusively (without waiting for it), then reads, and puts the mark
--     at a number that it sees. So tasks put later are beyond the mark, and tasks put before are seen, however long
--     their transaction took.
--   * A put of a lower order, or an operator's retry of an ended task, opens a task below the mark. It invalidates the
--     mark in its own transaction, with the put lock, by writing an empty mark (number below 0), which says nothing. A
--     later claim writes a better one.
-- A crash that undoes a mark leaves an older one, which is true as well; a crash that undoes an invalidation also
-- undoes the put or retry. An operator that opens tasks by hand deletes the rows of task_low_water. Each statement that
-- uses the mark also reads it, so that both are of one moment. Lookups of tasks by their keys write other conditions as
-- coalesce(…): otherwise the planner may prefer a small partial index, and read all of it.
--
-- Fair queueing (uses_fair_queueing, pick_fair_task). In a queue with limits, or with tasks that have keys, the keys
-- take turns. A claim looks at the tasks that orders allow, and at the keys that are below their limits. The next key
-- is the one with the fewest running tasks in proportion to its weight. Of several such keys a lottery draws one, by
-- their weights (Waldspurger and Weihl 1994). So no key waits behind the long backlog of another one, however few the
-- workers. Within a key the higher priority comes first, then the lower number.
--   * Limits: only claims start tasks. If limits are set, a claim first locks the queue's row of queue_setting, and
--     counts in a later statement: so one session claims at a time, and each sees the claims before. Claims of queues
--     without limits share a lock on table queue_key (block_first_limit). A call that sets a limit waits for these
--     claims, and new claims wait for the call.
--   * task_key is NULL for tasks put while their queue had no fair queueing, and '' for tasks without a key that were
--     put later. Both together are like one key without a limit. Tasks with NULL are found in index task_plain, as any
--     number of tasks with a key may be in front of them.
--   * A claim does not read all keys. Keys without a running task come before all others. The claim reads some of them,
--     from a random place of task_fair on: there keys are sorted by task_hash, so neighbours have nothing in common.
--     The lottery is among these keys, and the keys with the greatest weights. (Each read key also counts for the keys
--     around it that are not read.) While none of them can start a task, the claim goes on to the next ones, once
--     around; then it tries the keys with running tasks.
--   * While an old snapshot is open, ended tasks stay in task_fair, and a claim reads past them between two keys. No
--     mark helps there.
--   * If no limit is set, several sessions claim at a time. A claim that finds the first task of a key locked tries the
--     other keys, and then later tasks of that key: no worker stays without a task while any is free.
--
-- Rates of queues (task_may_start). A limited number of tasks may be started in a window, of the queue or of each key.
-- Starts are counted like the use of a rate (rates.sql), under a name that no client can use for a rate. The claim
-- counts them in its transaction, in which it has locked the queue's row of queue_setting. So each attempt counts as
-- one start, if and only if it was made, and no period as long as the window has more starts. A key whose rate a claim
-- finds used up is noted in queue_wait until there is room again: so claims skip it with one read of an index, and an
-- idle worker knows when to poll again. A note only saves reads. Notes from the future (the clock went back) do not
-- count, and a note may be deleted at any time.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Take the put lock of a queue until the transaction ends: before it draws task numbers, or opens ended tasks again.
CREATE OR REPLACE FUNCTION {schema}.take_put_lock(p_queue varchar) RETURNS void {plpgsql}
BEGIN
    IF NOT pg_try_advisory_xact_lock_shared({schema}.lock_class(6), hashtext(p_queue)) THEN
        IF current_setting('lock_timeout') = '0' THEN  -- any login can take that lock, and keep it
            PERFORM set_config('lock_timeout', '60s', true);
            PERFORM pg_advisory_xact_lock_shared({schema}.lock_class(6), hashtext(p_queue));
            PERFORM set_config('lock_timeout', '0', true);
        ELSE
            PERFORM pg_advisory_xact_lock_shared({schema}.lock_class(6), hashtext(p_queue));
        END IF;
    END IF;
    PERFORM set_config('{schema}.put_lock', p_queue, true);  -- for number_bare_task
END
$$;

-- Invalidate the mark if this transaction opens a task of this order below it. The caller has the put lock.
CREATE OR REPLACE FUNCTION {schema}.invalidate_task_mark(p_queue varchar, p_order integer, p_task bigint) RETURNS void
{plpgsql}
DECLARE
    v_newest {schema}.task_low_water;
BEGIN
    SELECT * INTO v_newest FROM {schema}.task_low_water WHERE queue_name = p_queue ORDER BY serial DESC LIMIT 1;
    IF v_newest.task_order > p_order
       OR v_newest.task_order = p_order AND p_task < v_newest.mark AND p_task <> ALL (v_newest.survivors)
       OR current_setting('transaction_isolation') <> 'read committed' THEN  -- a snapshot that is older than the lock may miss a mark
        -- Write an empty mark, and delete nothing, as other puts must not wait for this one. The session that writes
        -- the next mark deletes the older ones; the negative number tells it from which serial on.
        INSERT INTO {schema}.task_low_water (queue_name, task_order, mark, survivors)
        VALUES (p_queue, -2147483648, -coalesce(CASE WHEN v_newest.mark < 0 THEN -v_newest.mark ELSE v_newest.serial END, 1), '{}');
    END IF;
END
$$;

-- Take the put lock for a task that is inserted without these routines (by hand, or from a dump), and invalidate the
-- mark. The task had its number before this trigger ran.
CREATE OR REPLACE FUNCTION {schema}.number_bare_task() RETURNS trigger {plpgsql_indexed_definer}
BEGIN
    PERFORM {schema}.take_put_lock(NEW.queue_name);
    PERFORM {schema}.invalidate_task_mark(NEW.queue_name, NEW.task_order, NEW.task_id);
    RETURN NEW;
END
$$;
DO $$
BEGIN
    -- Create the trigger only once: that locks the table, and so waits for the puts that run without it.
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'number_bare_task' AND tgrelid = '{schema}.task'::regclass) THEN
        CREATE TRIGGER number_bare_task BEFORE INSERT ON {schema}.task FOR EACH ROW
            WHEN (NEW.queue_name IS DISTINCT FROM current_setting('{schema}.put_lock', true))
            EXECUTE FUNCTION {schema}.number_bare_task();
    END IF;
END
$$;

-- Return true if a claim of p_task should write a mark: always after an empty mark (below 0); else now and then, if the
-- task is far beyond the mark, or there is no mark (NULL).
CREATE OR REPLACE FUNCTION {schema}.is_time_for_task_mark(p_mark bigint, p_task bigint, p_maximum integer) RETURNS boolean
LANGUAGE sql VOLATILE
AS $$
    SELECT p_mark OPERATOR(pg_catalog.<) 0
           OR pg_catalog.random() OPERATOR(pg_catalog.*) 16::double precision OPERATOR(pg_catalog.<) p_maximum::double precision
              AND (p_mark IS NULL OR (p_task OPERATOR(pg_catalog.-) p_mark) OPERATOR(pg_catalog.>=) 32)
$$;

-- Write a mark at p_task, an open task of p_order, the lowest open order: all tasks below it have ended, except the
-- survivors. Do nothing if another session has the put lock.
CREATE OR REPLACE FUNCTION {schema}.create_task_mark(p_queue varchar, p_order integer, p_task bigint) RETURNS void
{plpgsql_indexed}
DECLARE
    v_newest {schema}.task_low_water;
    v_first  record;
    v_open   bigint[];
    v_mark   bigint;
    v_count  integer;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed'
       OR NOT pg_try_advisory_xact_lock({schema}.lock_class(6), hashtext(p_queue)) THEN
        RETURN;
    END IF;
    SELECT * INTO v_newest FROM {schema}.task_low_water WHERE queue_name = p_queue ORDER BY serial DESC LIMIT 1;
    v_newest.task_order := coalesce(v_newest.task_order, -2147483648);
    v_newest.mark := coalesce(v_newest.mark, -1);
    -- (The claim has read before it had the lock: test if p_order is still the lowest open order.)
    v_open := ARRAY(SELECT t.task_id FROM {schema}.task AS t
                    WHERE t.task_id = ANY (v_newest.survivors) AND coalesce(t.is_open, false) ORDER BY 1);
    SELECT t.task_order, t.task_id INTO v_first FROM {schema}.task AS t
    WHERE t.is_open AND t.queue_name <= p_queue
      AND (t.queue_name, t.task_order, t.task_id) >= (p_queue, v_newest.task_order, v_newest.mark)
    ORDER BY t.queue_name, t.task_order, t.task_id LIMIT 1;
    IF p_order <> v_newest.task_order AND v_open <> '{}' OR v_first.task_order IS DISTINCT FROM p_order THEN
        RETURN;
    END IF;
    v_open := v_open || ARRAY(
        SELECT t.task_id FROM {schema}.task AS t
        WHERE t.is_open AND (t.queue_name, t.task_order, t.task_id) >= (p_queue, p_order, v_first.task_id)
          AND (t.queue_name, t.task_order, t.task_id) < (p_queue, p_order, p_task)
        ORDER BY t.queue_name, t.task_order, t.task_id LIMIT 201 - cardinality(v_open));
    -- Choose the cheapest mark with at most 200 survivors: to look up a survivor costs as much as to read past two or
    -- three ended tasks.
    SELECT c.mark, c.below INTO v_mark, v_count
    FROM (SELECT o.id, o.number - 1 FROM unnest(v_open) WITH ORDINALITY AS o (id, number)
          UNION ALL SELECT p_task, cardinality(v_open) WHERE cardinality(v_open) <= 200) AS c (mark, below)
    WHERE c.mark > v_newest.mark OR p_order > v_newest.task_order
    ORDER BY 5 * c.below + 2 * (p_task - c.mark) LIMIT 1;
    IF v_mark IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM {schema}.task_low_water
    WHERE queue_name = p_queue
      AND serial BETWEEN CASE WHEN v_newest.mark < 0 THEN -v_newest.mark ELSE v_newest.serial END AND v_newest.serial;
    INSERT INTO {schema}.task_low_water (queue_name, task_order, mark, survivors)
    VALUES (p_queue, p_order, v_mark, v_open[:v_count]);
END
$$;

-- Return and lock the first task that may run now; task_id is NULL if there is none. alone: the task is never part of a
-- group. The tasks after it are in survivors, or have numbers from `beyond` on. (p_maximum -1: return only these two,
-- and the order.)
CREATE OR REPLACE FUNCTION {schema}.first_task(
    p_queue varchar, p_maximum integer,
    OUT task_order integer, OUT task_id bigint, OUT alone boolean, OUT survivors bigint[], OUT beyond bigint)
{plpgsql_indexed}
DECLARE
    v_state record;
BEGIN
    -- Find the lowest open order. (A task of a lower order that is put after this moment is too late to count.)
    -- (The rows are compared with >=, not =: otherwise the planner would read the index from the queue's first entry
    -- on, or use another index.)
    SELECT w.task_order, w.mark, CASE WHEN s.kept THEN w.survivors END AS survivors,
           n.task_order AS next_order, n.task_id AS next_task
    INTO v_state
    FROM (SELECT 1) AS one
    LEFT JOIN LATERAL (SELECT * FROM {schema}.task_low_water AS l WHERE l.queue_name = p_queue ORDER BY l.serial DESC LIMIT 1) AS w
           ON true
    LEFT JOIN LATERAL (SELECT EXISTS (SELECT FROM {schema}.task AS t
                                      WHERE t.task_id = ANY (w.survivors) AND coalesce(t.is_open, false)) AS kept) AS s
           ON w.survivors <> '{}'
    LEFT JOIN LATERAL (SELECT t.task_order, t.task_id FROM {schema}.task AS t
                       WHERE t.is_open AND t.queue_name <= p_queue
                         AND (t.queue_name, t.task_order, t.task_id)
                             >= (p_queue, coalesce(w.task_order, -2147483648), coalesce(w.mark, 0))
                       ORDER BY t.queue_name, t.task_order, t.task_id LIMIT 1) AS n ON true;
    task_order := CASE WHEN v_state.survivors IS NULL THEN v_state.next_order ELSE v_state.task_order END;
    survivors := v_state.survivors;
    beyond := CASE WHEN v_state.next_order = first_task.task_order THEN v_state.next_task END;
    IF p_maximum < 0 THEN
        RETURN;
    END IF;
    IF survivors IS NOT NULL THEN
        SELECT t.task_id, t.losses > 0 OR t.kind NOT IN ('call', 'sql') INTO task_id, alone FROM {schema}.task AS t
        WHERE t.task_id = ANY (survivors) AND coalesce(t.is_open, false) AND t.status = 'pending'
          AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
        ORDER BY t.task_id LIMIT 1
        FOR UPDATE OF t SKIP LOCKED;
    END IF;
    IF task_id IS NULL AND beyond IS NOT NULL THEN
        SELECT t.task_id, t.losses > 0 OR t.kind NOT IN ('call', 'sql') INTO task_id, alone FROM {schema}.task AS t
        WHERE t.is_open AND t.status = 'pending' AND t.task_key IS NULL AND t.lock_count IS NULL
          AND t.ready_at <= greatest(clock_timestamp(), t.put_at)  -- (put_at: the clock may have gone back since)
          AND t.queue_name = p_queue AND t.task_order = first_task.task_order AND t.task_id >= beyond
        ORDER BY t.queue_name, t.task_order, t.task_key, t.task_id LIMIT 1
        FOR UPDATE OF t SKIP LOCKED;
        IF {schema}.is_time_for_task_mark(v_state.mark, task_id, p_maximum) THEN
            PERFORM {schema}.create_task_mark(p_queue, task_order, task_id);
        END IF;
    END IF;
END
$$;

-- Keep other sessions from setting the first limit of a queue, until the transaction ends. Return false if a session is
-- doing so now.
CREATE OR REPLACE FUNCTION {schema}.block_first_limit() RETURNS boolean {plpgsql}
BEGIN
    LOCK TABLE {schema}.queue_key IN ROW SHARE MODE NOWAIT;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;

-- Wait, as long as lock_timeout allows, for the transactions that have called block_first_limit. While this session
-- waits for the table, claims of queues without limits return nothing: so it waits for 50 ms at a time.
CREATE OR REPLACE FUNCTION {schema}.wait_for_claims() RETURNS void {plpgsql}
DECLARE
    v_before text := current_setting('lock_timeout');
    v_until  timestamptz := clock_timestamp() + v_before::interval;
BEGIN
    LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '50ms', true);
            LOCK TABLE {schema}.queue_key IN EXCLUSIVE MODE;
            PERFORM set_config('lock_timeout', v_before, true);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            IF clock_timestamp() >= v_until THEN
                RAISE EXCEPTION 'sqlsem: limits of queues cannot be set while an open transaction has claimed a task, for % by now: %',
                    v_before, {schema}.describe_table_locks('{schema}.queue_key') USING ERRCODE = '55P03',
                    HINT = 'Try again when that has ended; pg_terminate_backend(pid) ends it.';
            END IF;
        END;
        PERFORM pg_sleep(0.05 + random() / 20);
    END LOOP;
END
$$;

-- Return true if claims of a queue use fair queueing. With p_claim, for a claim: return NULL while another session sets
-- the queue's first limit, as nothing can be claimed then; and raise outside READ COMMITTED, where no statement would
-- see a limit that is newer than the transaction's snapshot.
CREATE OR REPLACE FUNCTION {schema}.uses_fair_queueing(p_queue varchar, p_claim boolean) RETURNS boolean
{plpgsql_indexed}
BEGIN
    IF p_claim THEN
        PERFORM {schema}.require_read_committed('a claim');
    END IF;
    IF EXISTS (SELECT FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue)
       OR EXISTS (SELECT FROM {schema}.task AS t
                  WHERE t.status = 'pending' AND t.lock_count IS NULL AND t.task_hash IS NOT NULL
                    AND t.queue_name = p_queue) THEN
        RETURN true;
    ELSIF NOT p_claim THEN
        RETURN false;
    ELSIF NOT {schema}.block_first_limit() THEN
        RETURN NULL;
    END IF;
    RETURN EXISTS (SELECT FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue);
END
$$;

-- Raise in a transaction whose snapshot hides later commits of other sessions.
CREATE OR REPLACE FUNCTION {schema}.require_read_committed(p_what text) RETURNS void {plpgsql}
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'sqlsem: % needs READ COMMITTED, not %', p_what, current_setting('transaction_isolation')
            USING ERRCODE = '25001', HINT = 'SET default_transaction_isolation TO ''read committed'' on this connection.';
    END IF;
END
$$;

-- Return the name under which the starts of a queue (p_key '') or of one of its keys are counted. (No queue or key has
-- a control character in its name, so chr(31) separates the two.)
CREATE OR REPLACE FUNCTION {schema}.start_rate_name(p_queue varchar, p_key varchar) RETURNS varchar
{sql_immutable} SELECT concat('tasks:', encode(sha256(convert_to(concat(p_queue, chr(31), p_key), 'UTF8')), 'hex')) $$;

-- Return true if the rates of a queue and of this key allow one more task to start. p_all, p_of_key: tasks of the
-- queue, and of the key, that start before it. The caller has locked the queue's row of queue_setting. p_start: the
-- task starts, so count it.
CREATE OR REPLACE FUNCTION {schema}.task_may_start(p_queue varchar, p_key varchar, p_all bigint, p_of_key bigint, p_start boolean)
RETURNS boolean {plpgsql_indexed}
DECLARE
    v_rate  record;
    v_rate_name varchar;
    v_wait  bigint;
    v_now   bigint;
BEGIN
    FOR v_take IN 0..p_start::integer LOOP  -- 0: read both rates; 1: count the start in both
        FOR v_rate IN
            SELECT '' AS task_key, s.task_rate AS most, s.task_ms AS ms, p_all AS ahead
            FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue AND s.task_rate IS NOT NULL
            UNION ALL
            SELECT p_key, coalesce(k.task_rate, s.key_rate), CASE WHEN k.task_rate IS NULL THEN s.key_ms ELSE k.task_ms END, p_of_key
            FROM {schema}.queue_setting AS s
            LEFT JOIN {schema}.queue_key AS k ON k.queue_name = p_queue AND k.task_key = p_key
            WHERE s.queue_name = p_queue AND p_key <> '' AND coalesce(k.task_rate, s.key_rate) IS NOT NULL
        LOOP
            v_now := {schema}.clock_ms();
            IF v_rate.ahead >= v_rate.most OR EXISTS (
                SELECT FROM {schema}.queue_wait AS w
                WHERE w.queue_name = p_queue AND w.task_key = v_rate.task_key AND v_now >= w.since_ms AND v_now < w.free_ms) THEN
                RETURN false;
            END IF;
            v_rate_name := {schema}.start_rate_name(p_queue, v_rate.task_key);
            -- (Locked: prune must not delete the window before the start is recorded there.)
            PERFORM FROM {schema}.rate_window AS w WHERE w.resource_id = v_rate_name FOR KEY SHARE;
            v_wait := (SELECT t.wait_ms FROM {schema}.take_tokens(
                v_rate_name, ARRAY[1 + v_rate.ahead], ARRAY[v_rate.most]::bigint[],
                ARRAY[v_rate.ms]::bigint[], NULL, v_take = 0) AS t);
            IF v_wait > 0 THEN
                IF v_rate.ahead = 0 THEN
                    v_now := {schema}.clock_ms();
                    INSERT INTO {schema}.queue_wait AS w (queue_name, task_key, since_ms, free_ms)
                    VALUES (p_queue, v_rate.task_key, v_now, v_now + v_wait)
                    ON CONFLICT (queue_name, task_key) DO UPDATE SET since_ms = excluded.since_ms, free_ms = excluded.free_ms;
                END IF;
                RETURN false;
            END IF;
        END LOOP;
    END LOOP;
    RETURN true;
END
$$;

-- Return the sort key of a task key: eight digits of a hash, so that no client can choose the order, then the key
-- itself.
CREATE OR REPLACE FUNCTION {schema}.key_hash(p_key varchar) RETURNS varchar {sql_immutable}
    SELECT lpad((('x' || left(encode(sha256(convert_to(p_key, 'UTF8')), 'hex'), 8))::bit(32)::bigint % 100000000)::text, 8, '0') || p_key
$$;

-- Return the task_hash of the next keys after p_beyond that have pending tasks; at most p_maximum.
CREATE OR REPLACE FUNCTION {schema}.next_key_hashes(p_queue varchar, p_order integer, p_beyond varchar, p_maximum integer) RETURNS varchar[]
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    RETURN ARRAY(
        WITH RECURSIVE turns (task_hash) AS (
            (SELECT t.task_hash FROM {schema}.task AS t
             WHERE t.status = 'pending' AND t.lock_count IS NULL AND t.task_hash > p_beyond
               AND t.queue_name = p_queue AND t.task_order = p_order
             ORDER BY t.queue_name, t.task_order, t.task_hash LIMIT 1)
            UNION ALL
            SELECT (SELECT t.task_hash FROM {schema}.task AS t
                    WHERE t.status = 'pending' AND t.lock_count IS NULL AND t.task_hash > k.task_hash
                      AND t.queue_name = p_queue AND t.task_order = p_order
                    ORDER BY t.queue_name, t.task_order, t.task_hash LIMIT 1)
            FROM turns AS k WHERE k.task_hash IS NOT NULL)
        SELECT k.task_hash FROM turns AS k WHERE k.task_hash IS NOT NULL LIMIT p_maximum);
END
$$;

-- Return the first task of a key that may run now. p_key '': of the tasks without a key, from number p_from on. p_lock:
-- lock it, and skip tasks that other sessions have locked.
CREATE OR REPLACE FUNCTION {schema}.first_task_of_key(p_queue varchar, p_order integer, p_key varchar, p_from bigint, p_lock boolean)
RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_turn  constant varchar := {schema}.key_hash(p_key);
    v_task  record;
    v_plain bigint;
BEGIN
    IF p_lock THEN
        SELECT t.task_id, t.task_priority INTO v_task FROM {schema}.task AS t
        WHERE t.status = 'pending' AND t.lock_count IS NULL AND t.task_hash = v_turn
          AND t.queue_name = p_queue AND t.task_order = p_order AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
        ORDER BY t.queue_name, t.task_order, t.task_hash, t.task_priority DESC, t.task_id LIMIT 1
        FOR UPDATE OF t SKIP LOCKED;
    ELSE
        SELECT t.task_id, t.task_priority INTO v_task FROM {schema}.task AS t
        WHERE t.status = 'pending' AND t.lock_count IS NULL AND t.task_hash = v_turn
          AND t.queue_name = p_queue AND t.task_order = p_order AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
        ORDER BY t.queue_name, t.task_order, t.task_hash, t.task_priority DESC, t.task_id LIMIT 1;
    END IF;
    IF p_key <> '' OR p_lock AND v_task.task_id IS NOT NULL THEN
        RETURN v_task.task_id;
    END IF;
    -- Tasks that were put without a key before the queue had fair queueing. (They have no priority.)
    IF p_lock THEN
        SELECT t.task_id INTO v_plain FROM {schema}.task AS t
        WHERE t.is_open AND t.status = 'pending' AND t.lock_count IS NULL AND t.task_key IS NULL
          AND t.queue_name = p_queue AND t.task_order = p_order AND t.task_id >= p_from
          AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
        ORDER BY t.queue_name, t.task_order, t.task_key, t.task_id LIMIT 1
        FOR UPDATE OF t SKIP LOCKED;
    ELSE
        SELECT t.task_id INTO v_plain FROM {schema}.task AS t
        WHERE t.is_open AND t.status = 'pending' AND t.lock_count IS NULL AND t.task_key IS NULL
          AND t.queue_name = p_queue AND t.task_order = p_order AND t.task_id >= p_from
          AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
        ORDER BY t.queue_name, t.task_order, t.task_key, t.task_id LIMIT 1;
    END IF;
    RETURN CASE WHEN v_task.task_priority > 0 OR v_plain IS NULL OR v_task.task_priority = 0 AND v_task.task_id < v_plain
                THEN v_task.task_id ELSE v_plain END;
END
$$;

-- Pick the next task by fair queueing, lock it, and count its start; task_id is NULL if there is none.
CREATE OR REPLACE FUNCTION {schema}.pick_fair_task(p_queue varchar, p_maximum integer, OUT task_id bigint)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET enable_hashjoin = off SET enable_mergejoin = off
    SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_before  text := current_setting('lock_timeout');
    v_setting {schema}.queue_setting;
    v_look    record;
    v_from    bigint;
    v_running jsonb;                -- the number of running tasks of each key
    v_all     bigint;               -- and of all keys
    v_now     bigint;
    v_start   constant integer := floor(random() * 100000000);
    v_place   integer := v_start;   -- the hash reached; one lap ends where it began
    v_beyond  varchar := lpad(v_start::text, 8, '0');
    v_lap     integer := 0;         -- 0: from v_start to the end; 1: from the beginning to v_start; 2: keys with running tasks; 3: done
    v_hashes  varchar[];
    v_draw    varchar[];            -- the keys of this draw
    v_first   boolean := true;      -- this is the first draw
    v_candidate record;
    v_id      bigint;
    v_key     varchar;
    v_keys    varchar[] := '{}';    -- keys whose first task is locked by another session
BEGIN
    FOR v_look IN SELECT n AS time FROM generate_series(1, 2) AS n LOOP
        SELECT * INTO v_setting FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue FOR UPDATE SKIP LOCKED;
        IF v_setting.queue_name IS NULL AND EXISTS (SELECT FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue) THEN
            BEGIN
                PERFORM set_config('lock_timeout', '1s', true);
                SELECT * INTO v_setting FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue FOR UPDATE;
                PERFORM set_config('lock_timeout', v_before, true);
            EXCEPTION WHEN lock_not_available THEN
                RETURN;  -- a claim in another open transaction
            END;
        END IF;
        EXIT WHEN v_setting.queue_name IS NOT NULL;
        -- The queue has no settings, or they were removed while this claim waited. From here on no session sets a limit
        -- before this claim is visible. A limit that was set before is seen by the second read.
        IF v_look.time = 1 AND NOT {schema}.block_first_limit() THEN
            RETURN;
        END IF;
    END LOOP;
    SELECT f.* INTO v_look FROM {schema}.first_task(p_queue, -1) AS f;
    IF v_look.task_order IS NULL THEN
        RETURN;
    END IF;
    SELECT coalesce(jsonb_object_agg(g.task_key, g.many), '{}'), coalesce(sum(g.many), 0) INTO v_running, v_all
    FROM (SELECT coalesce(t.task_key, '') AS task_key, count(*) AS many
          FROM {schema}.running_tasks(p_queue) AS r JOIN {schema}.task AS t ON t.task_id = r.task_id GROUP BY 1) AS g;
    IF v_setting.task_limit <= v_all THEN
        RETURN;
    ELSIF v_setting.task_rate IS NOT NULL AND NOT {schema}.task_may_start(p_queue, '', 0, 0, false) THEN
        RETURN;
    END IF;
    v_now := {schema}.clock_ms();
    IF v_look.beyond IS NOT NULL AND {schema}.is_time_for_task_mark(NULL, v_look.beyond, p_maximum) THEN
        PERFORM {schema}.create_task_mark(p_queue, v_look.task_order, (
            SELECT t.task_id FROM {schema}.task AS t
            WHERE t.is_open AND t.status = 'pending' AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
              AND (t.queue_name, t.task_order, t.task_id) >= (p_queue, v_look.task_order, v_look.beyond)
              AND (t.queue_name, t.task_order) <= (p_queue, v_look.task_order)
            ORDER BY t.queue_name, t.task_order, t.task_id LIMIT 1));
    END IF;
    v_from := coalesce(v_look.survivors[1], v_look.beyond);  -- every open task is a survivor or from `beyond` on; survivors are sorted
    -- Draw from the keys without a running task, some at a time; then from the other keys.
    WHILE v_lap < 3 AND task_id IS NULL LOOP
        v_draw := '{}';
        IF v_lap = 2 THEN
            v_draw := ARRAY(SELECT jsonb_object_keys(v_running));
            v_lap := 3;
        ELSIF v_first AND NOT v_running ? '' THEN
            v_draw := '{""}';
        END IF;
        WHILE v_lap < 2 AND cardinality(v_draw) < 32 LOOP
            v_hashes := {schema}.next_key_hashes(p_queue, v_look.task_order, v_beyond, 64);
            v_draw := v_draw || ARRAY(SELECT substr(f, 9) FROM unnest(v_hashes) AS f
                                      WHERE (v_lap = 0 OR left(f, 8)::integer < v_start)
                                        AND substr(f, 9) <> '' AND NOT v_running ? substr(f, 9));
            v_beyond := v_hashes[cardinality(v_hashes)];
            IF cardinality(v_hashes) < 64 OR v_lap = 1 AND left(v_beyond, 8)::integer >= v_start THEN
                v_lap := v_lap + 1;
                v_beyond := '';
            END IF;
            v_place := CASE WHEN v_beyond = '' THEN 0 ELSE left(v_beyond, 8)::integer END;
        END LOOP;
        FOR v_candidate IN
            SELECT h.task_key, coalesce(s.task_rate, v_setting.key_rate, v_setting.task_rate) IS NOT NULL AS rated
            FROM (SELECT DISTINCT ON (d.task_key) d.task_key, d.part
                  FROM (-- part: the read part of the keys. Each read key counts for 1 / part keys.
                        SELECT f.task_key, CASE WHEN v_lap > 1 OR f.task_key = '' THEN 1
                                                ELSE greatest(v_place - v_start + CASE v_lap WHEN 1 THEN 100000000 ELSE 0 END, 1)
                                                     / 100000000.0::float END AS part
                        FROM unnest(v_draw) AS f (task_key)
                        UNION ALL
                        (SELECT y.task_key, 1 FROM {schema}.queue_key AS y
                         WHERE y.queue_name = p_queue AND y.weight > 1 AND v_first AND v_lap < 2 AND NOT v_running ? y.task_key
                         ORDER BY y.queue_name, y.weight DESC LIMIT 64)) AS d
                  ORDER BY d.task_key, d.part DESC) AS h
            -- (LIMIT 1 makes the planner look each key up: otherwise it may read all keys of the queue for each draw.)
            LEFT JOIN LATERAL (SELECT x.task_rate, x.task_limit, x.weight FROM {schema}.queue_key AS x
                               WHERE x.queue_name = p_queue AND x.task_key = h.task_key LIMIT 1) AS s ON true
            LEFT JOIN LATERAL (SELECT x.since_ms, x.free_ms FROM {schema}.queue_wait AS x
                               WHERE x.queue_name = p_queue AND x.task_key = h.task_key AND h.task_key <> ''
                                 AND coalesce(s.task_rate, v_setting.key_rate) IS NOT NULL LIMIT 1) AS w ON true
            CROSS JOIN LATERAL (SELECT coalesce((v_running->>h.task_key)::bigint, 0) AS many, coalesce(s.weight, 1)::float AS weight) AS r
            WHERE (h.task_key = '' OR NOT coalesce(r.many >= coalesce(s.task_limit, v_setting.key_limit), false))
              AND (v_now >= w.since_ms AND v_now < w.free_ms) IS NOT TRUE
            ORDER BY r.many / r.weight, -ln(1 - random()) * h.part / r.weight
        LOOP
            v_id := {schema}.first_task_of_key(p_queue, v_look.task_order, v_candidate.task_key, v_from, false);
            CONTINUE WHEN v_id IS NULL;
            SELECT t.task_id INTO task_id FROM {schema}.task AS t
            WHERE t.task_id = v_id AND coalesce(t.is_open, false) AND t.status = 'pending'
              AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
            FOR UPDATE OF t SKIP LOCKED;
            IF NOT FOUND THEN
                v_keys := v_keys || v_candidate.task_key;
                CONTINUE;
            END IF;
            EXIT WHEN NOT v_candidate.rated OR {schema}.task_may_start(p_queue, v_candidate.task_key, 0, 0, true);
            task_id := NULL;
        END LOOP;
        v_first := false;
    END LOOP;
    IF task_id IS NOT NULL THEN
        RETURN;
    END IF;
    -- Other sessions are claiming or removing the first tasks of some keys: take later tasks of these keys. (The queue
    -- has no limits: with limits, the other session would have locked the queue's row.)
    FOREACH v_key IN ARRAY v_keys LOOP
        task_id := {schema}.first_task_of_key(p_queue, v_look.task_order, v_key, v_from, true);
        IF task_id IS NOT NULL AND NOT {schema}.task_may_start(p_queue, v_key, 0, 0, true) THEN
            task_id := NULL;
        END IF;
        EXIT WHEN task_id IS NOT NULL;
    END LOOP;
END
$$;

-- Return the running tasks of a queue (NULL: of all queues).
CREATE OR REPLACE FUNCTION {schema}.running_tasks(p_queue varchar)
RETURNS TABLE (task_id bigint, attempt integer, member_id bigint, claim_uid varchar) {plpgsql_indexed}
BEGIN
    IF p_queue IS NULL THEN
        RETURN QUERY SELECT t.task_id, t.attempt, t.member_id, t.claim_uid FROM {schema}.task AS t WHERE t.status = 'running';
        RETURN;
    END IF;
    -- (Running tasks are open, so the mark is true of them, too.)
    RETURN QUERY
        WITH mark AS MATERIALIZED (
            SELECT l.task_order, l.mark, l.survivors FROM {schema}.task_low_water AS l WHERE l.queue_name = p_queue
            ORDER BY l.serial DESC LIMIT 1)
        SELECT t.task_id, t.attempt, t.member_id, t.claim_uid
        FROM mark AS w CROSS JOIN {schema}.task AS t
        WHERE t.task_id = ANY (w.survivors) AND coalesce(t.status, '') = 'running'
        UNION ALL
        SELECT t.task_id, t.attempt, t.member_id, t.claim_uid
        FROM {schema}.task AS t
        WHERE t.status = 'running' AND t.queue_name <= p_queue
          AND (t.queue_name, t.task_order, t.task_id)
              >= (p_queue, coalesce((SELECT w.task_order FROM mark AS w), -2147483648), coalesce((SELECT w.mark FROM mark AS w), 0));
END
$$;

-- Have this session notified (NOTIFY) when tasks are put, or become claimable because others ended. A notification is
-- only a hint. Each listener shares a lock while its session lives, so nothing is sent without listeners.
CREATE OR REPLACE FUNCTION {schema}.listen_for_tasks() RETURNS void {plpgsql_indexed_definer}
BEGIN
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '60s', true);
    END IF;
    PERFORM pg_advisory_lock_shared({schema}.lock_class(5), 1);
    EXECUTE format('LISTEN %I', 'sqlsem_tasks_' || md5('{schema}'));
END
$$;

-- Notify listeners that a task of p_order has ended: only if no task of that order is open any more, or the queue has
-- limits, as only then another task may run. p_order NULL: notify them of any other change.
CREATE OR REPLACE FUNCTION {schema}.notify_tasks(p_queue varchar, p_order integer) RETURNS void {plpgsql_indexed}
BEGIN
    IF pg_try_advisory_lock({schema}.lock_class(5), 1) THEN
        PERFORM pg_advisory_unlock({schema}.lock_class(5), 1);  -- no session shares it
    ELSIF p_order IS NULL OR EXISTS (SELECT FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue) OR p_order < (
        SELECT t.task_order FROM {schema}.task AS t
        WHERE t.is_open AND t.queue_name <= p_queue
          AND (t.queue_name, t.task_order, t.task_id)
              >= (p_queue, p_order, coalesce((SELECT CASE WHEN w.task_order = p_order THEN w.mark END
                                              FROM (SELECT * FROM {schema}.task_low_water AS l WHERE l.queue_name = p_queue
                                                    ORDER BY l.serial DESC LIMIT 1) AS w), 0))
        ORDER BY t.queue_name, t.task_order, t.task_id LIMIT 1) THEN
        PERFORM pg_notify('sqlsem_tasks_' || md5('{schema}'), md5(p_queue));
    END IF;
END
$$;

-- Raise for a body that is no JSON, or is nested deeper than 100, which JSON readers of other languages refuse.
CREATE OR REPLACE FUNCTION {schema}.check_json(p_body text) RETURNS void {plpgsql_immutable}
DECLARE
    v_bare text;
    v_deep integer := 0;
BEGIN
    BEGIN
        PERFORM p_body::json;
    EXCEPTION WHEN invalid_text_representation OR invalid_parameter_value OR statement_too_complex OR program_limit_exceeded
                   OR untranslatable_character THEN
        RAISE EXCEPTION 'sqlsem: the body of a task of kind json is no JSON: %', {schema}.escape_control_chars(left(p_body, 100)) USING ERRCODE = '22023';
    END;
    IF length(p_body) - length(translate(p_body, '[{', '')) <= 100 THEN
        RETURN;
    END IF;
    -- Remove strings, and all but the brackets; then remove the innermost pairs, level by level.
    v_bare := regexp_replace(regexp_replace(p_body, E'"([^"\\\\]|\\\\.)*"', '', 'g'), '[^][{}]', '', 'g');
    WHILE v_bare <> '' LOOP
        v_deep := v_deep + 1;
        IF v_deep > 100 THEN
            RAISE EXCEPTION 'sqlsem: the body of a task is nested deeper than 100' USING ERRCODE = '22023';
        END IF;
        v_bare := regexp_replace(v_bare, E'\\[\\]|\\{\\}', '', 'g');
    END LOOP;
END
$$;

-- Return in `there` the task in whose place no other with this key is put: an open one, or the task of an earlier call
-- with the same p_uid. With p_replace an open task is replaced: it is cancelled, and returned in `gone`; but if it
-- runs, it only loses its key.
CREATE OR REPLACE FUNCTION {schema}.resolve_unique_key(
    p_queue varchar, p_uid varchar, p_key varchar, p_replace boolean, p_by name, OUT there bigint, OUT gone bigint[])
{plpgsql_indexed}
DECLARE
    v_task record;
BEGIN
    there := (SELECT t.task_id FROM {schema}.task AS t WHERE t.put_uid = p_uid || '.1' AND t.put_by = p_by);
    IF there IS NOT NULL THEN
        RETURN;
    END IF;
    SELECT t.task_id, t.put_by INTO v_task FROM {schema}.task AS t
    WHERE t.queue_name = p_queue AND t.unique_key = p_key AND t.is_open;
    IF NOT FOUND THEN
        RETURN;
    ELSIF NOT p_replace THEN
        there := v_task.task_id;
    ELSIF v_task.put_by IS DISTINCT FROM p_by AND NOT {schema}.has_role('operator') THEN
        RAISE EXCEPTION 'sqlsem: task % with the key % was put by %, and is not replaced by another login''s', v_task.task_id,
            {schema}.escape_control_chars(p_key), {schema}.escape_control_chars(v_task.put_by::text) USING ERRCODE = '42501';
    ELSE
        UPDATE {schema}.task AS t
        SET unique_key = CASE WHEN t.status = 'running' THEN NULL ELSE t.unique_key END,
            status = CASE WHEN t.status = 'running' THEN t.status ELSE 'cancelled' END,
            is_open = t.status = 'running',
            ended_at = CASE WHEN t.status = 'running' THEN NULL ELSE clock_timestamp() END
        WHERE t.task_id = v_task.task_id AND coalesce(t.is_open, false)
        RETURNING CASE WHEN t.status = 'cancelled' THEN ARRAY[t.task_id] END INTO gone;
    END IF;
END
$$;

-- Raise for invalid tasks. p_tasks: see put_tasks_by.
CREATE OR REPLACE FUNCTION {schema}.check_tasks(p_tasks jsonb) RETURNS void {plpgsql}
DECLARE
    v_any  record;
    v_task record;
BEGIN
    IF jsonb_typeof(p_tasks) <> 'array' OR jsonb_path_exists(p_tasks, '$[*] ? (@.type() != "object" || !exists (@.kind) || @.kind == null)') THEN
        RAISE EXCEPTION 'sqlsem: tasks are put as a list of objects, each with a kind and a body' USING ERRCODE = '22023';
    END IF;
    -- One pass over all tasks finds the first invalid one, and shows which further checks are needed.
    SELECT min(r.ordinal) FILTER (
               WHERE r.body IS NULL OR NOT coalesce(r.after_ms, 0) BETWEEN 0 AND 315360000000
                  OR NOT coalesce(r.backoff_ms, 0) BETWEEN 0 AND 300000 OR NOT coalesce(r.max_attempts, 1) BETWEEN 1 AND 2147483647
                  OR NOT coalesce(r.task_order, 0) BETWEEN -2147483648 AND 2147483647
                  OR NOT coalesce(r.time_limit_ms, 1) BETWEEN 1 AND 2147483647
                  OR NOT coalesce(r.priority, 0) BETWEEN -2147483648 AND 2147483647) AS wrong,
           bool_or(r.kind = 'json') AS json, bool_or(r.key IS NOT NULL) AS keyed, bool_or(jsonb_typeof(r.locks) <> 'null') AS locked,
           bool_or(r.is_unique IS NOT NULL OR r.replaces IS NOT NULL) AS single
    INTO v_any
    FROM ROWS FROM (jsonb_to_recordset(p_tasks)
        AS (kind text, body text, after_ms numeric, max_attempts numeric, backoff_ms numeric, "order" numeric, time_limit_ms numeric,
            priority numeric, key text, locks jsonb, "unique" text, "replace" text)) WITH ORDINALITY
        AS r (kind, body, after_ms, max_attempts, backoff_ms, task_order, time_limit_ms, priority, key, locks, is_unique, replaces,
              ordinal);
    IF v_any.wrong IS NOT NULL THEN
        SELECT format(c.message, c.value) AS message INTO v_task
        FROM jsonb_to_record(p_tasks->(v_any.wrong::integer - 1))
            AS r (body text, after_ms numeric, max_attempts numeric, backoff_ms numeric, "order" numeric, time_limit_ms numeric,
                  priority numeric)
        CROSS JOIN LATERAL (VALUES
            (r.after_ms, 0, 315360000000, 'a task can wait from now to ten years from now, not %s ms'),
            (r.backoff_ms, 0, 300000, 'the pause before the next attempt at a task is from 0 to 300000 ms, not %s'),
            (r.time_limit_ms, 1, 2147483647, 'the time limit of a task must be from 1 to 2147483647 ms, not %s'),
            (r.max_attempts, 1, 2147483647, 'max_attempts of a task must be from 1 to 2147483647, not %s'),
            (r.priority, -2147483648, 2147483647, 'the priority of a task must be from -2147483648 to 2147483647, not %s'),
            (r."order", -2147483648, 2147483647, 'the order of a task must be from -2147483648 to 2147483647, not %s'))
            AS c (value, low, high, message)
        WHERE r.body IS NOT NULL AND c.value NOT BETWEEN c.low AND c.high LIMIT 1;
        RAISE EXCEPTION 'sqlsem: %', coalesce(v_task.message, 'the body of a task is NULL; give it a text') USING ERRCODE = '22023';
    END IF;
    IF v_any.json THEN
        PERFORM {schema}.check_json(r.body) FROM jsonb_to_recordset(p_tasks) AS r (kind text, body text) WHERE r.kind = 'json';
    END IF;
    IF v_any.keyed THEN
        PERFORM {schema}.check_name('key', r.key) FROM jsonb_to_recordset(p_tasks) AS r (key varchar) WHERE r.key IS NOT NULL;
    END IF;
    IF v_any.locked THEN
        PERFORM {schema}.check_locks(r.locks) FROM jsonb_to_recordset(p_tasks) AS r (locks jsonb) WHERE jsonb_typeof(r.locks) <> 'null';
    END IF;
    IF v_any.single THEN
        PERFORM {schema}.check_name('key', coalesce(r."unique", r."replace"))
        FROM jsonb_to_recordset(p_tasks) AS r ("unique" varchar, "replace" varchar)
        WHERE coalesce(r."unique", r."replace") IS NOT NULL LIMIT 1;
        IF jsonb_array_length(p_tasks) > 1 OR (p_tasks->0->>'unique') || (p_tasks->0->>'replace') IS NOT NULL THEN
            RAISE EXCEPTION 'sqlsem: a task that is unique, or replaces another one, is put alone, and has one key: unique or replace' USING ERRCODE = '22023';
        END IF;
    END IF;
END
$$;

-- Put tasks: all of them or none. Raise a unique violation if an earlier call with the same p_uid has put them.
-- p_tasks: [{"kind": …, "body": …, "order": …, "after_ms": …, "max_attempts": …, "backoff_ms": …, "on_failure": …,
-- "note": …, "time_limit_ms": …, "unique": …, "replace": …, "key": …, "priority": …, "locks": […]}, …]. A task that is
-- unique, or replaces another one, is put alone: see resolve_unique_key.
-- p_by: the login that puts them.
CREATE OR REPLACE FUNCTION {schema}.put_tasks_by(p_queue varchar, p_uid varchar, p_tasks jsonb, p_by name) RETURNS SETOF bigint
{plpgsql}
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_task_ids bigint[];
    v_order integer;
    v_key   varchar;
    v_existing bigint;
    v_gone  bigint[] := '{}';
    v_tries integer := 0;
    v_turns boolean;
BEGIN
    PERFORM {schema}.check_name('queue', p_queue);
    PERFORM {schema}.check_tasks(p_tasks);
    IF char_length(p_uid) > 64 THEN
        RAISE EXCEPTION 'sqlsem: the uid of a put has at most 64 characters' USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.take_put_lock(p_queue);
    v_turns := {schema}.uses_fair_queueing(p_queue, false) OR jsonb_path_exists(p_tasks, '$[*].key ? (@ != null)');
    v_key := coalesce(p_tasks->0->>'unique', p_tasks->0->>'replace');  -- (a task with such a key is put alone)
    LOOP
        IF v_key IS NOT NULL THEN
            SELECT m.there, v_gone || m.gone INTO v_existing, v_gone
            FROM {schema}.resolve_unique_key(p_queue, p_uid, v_key, p_tasks->0->>'replace' IS NOT NULL, p_by) AS m;
            IF v_existing IS NOT NULL THEN
                RETURN NEXT v_existing;
                RETURN;
            END IF;
        END IF;
        WITH made AS (
            INSERT INTO {schema}.task (queue_name, task_order, kind, body, note, on_failure, max_attempts, backoff_ms, put_uid,
                                       put_at, ready_at, put_by, time_limit_ms, unique_key, task_key, task_hash, task_priority,
                                       lock_count, enqueue_locks_at)
            SELECT p_queue, coalesce(r."order", 0), r.kind, r.body, r.note, coalesce(r.on_failure, 'stop'), coalesce(r.max_attempts, 1),
                   coalesce(r.backoff_ms, 1000), p_uid || '.' || r.ordinal, v_now,
                   CASE WHEN c.locks IS NULL THEN v_now + coalesce(r.after_ms, 0) * interval '1 millisecond'
                        ELSE {schema}.end_of_time() END, p_by, r.time_limit_ms, v_key,
                   k.key, CASE WHEN k.key IS NOT NULL THEN {schema}.key_hash(k.key) END, coalesce(r.priority, 0), c.locks,
                   CASE WHEN c.locks IS NOT NULL THEN v_now + coalesce(r.after_ms, 0) * interval '1 millisecond' END
            FROM ROWS FROM (jsonb_to_recordset(p_tasks)
                AS (kind varchar, body text, note varchar, "order" integer, after_ms bigint, max_attempts integer,
                    backoff_ms integer, on_failure varchar, time_limit_ms bigint, key varchar, priority integer, locks jsonb)) WITH ORDINALITY
                AS r (kind, body, note, "order", after_ms, max_attempts, backoff_ms, on_failure, time_limit_ms, key, priority, locks,
                      ordinal)
            CROSS JOIN LATERAL (SELECT CASE jsonb_typeof(r.locks) WHEN 'array' THEN jsonb_array_length(r.locks) END) AS c (locks)
            CROSS JOIN LATERAL (SELECT coalesce(r.key, CASE WHEN v_turns OR r.priority <> 0 THEN '' END)) AS k (key)
            ORDER BY r.ordinal
            -- (With the index named: a check of all unique indexes would make this half as slow again.)
            ON CONFLICT (queue_name, unique_key) WHERE is_open AND unique_key IS NOT NULL DO NOTHING
            RETURNING task_id, task_order)
        SELECT array_agg(m.task_id ORDER BY m.task_id), min(m.task_order) INTO v_task_ids, v_order FROM made AS m;
        EXIT WHEN v_key IS NULL OR v_task_ids IS NOT NULL;
        -- Another session has put a task with this key, and has committed by now: read again.
        v_tries := v_tries + 1;
        IF v_tries >= 100 THEN
            RAISE EXCEPTION 'sqlsem: busy: others put tasks with the key % all the time; try again', {schema}.escape_control_chars(v_key)
                USING ERRCODE = '55P03';
        END IF;
    END LOOP;
    IF v_gone <> '{}' THEN
        UPDATE {schema}.task SET error = 'replaced by task ' || v_task_ids[1] WHERE task_id = ANY (v_gone);
    END IF;
    IF v_task_ids IS NOT NULL THEN
        IF jsonb_path_exists(p_tasks, '$[*].locks ? (@ != null)') THEN
            PERFORM {schema}.store_task_locks(p_queue, p_uid, p_tasks);
        END IF;
        PERFORM {schema}.notify_tasks(p_queue, NULL);
        PERFORM {schema}.invalidate_task_mark(p_queue, v_order, 9223372036854775807);
    END IF;
    RETURN QUERY SELECT m FROM unnest(v_task_ids) AS m;
END
$$;

-- Put tasks in the caller's own transaction. A second call with the same p_uid raises a unique violation. (put_tasks
-- returns the tasks of the first call, but needs a subtransaction for that, and a transaction with many of these makes
-- all others slower.)
CREATE OR REPLACE FUNCTION {schema}.put_tasks_once(p_queue varchar, p_uid varchar, p_tasks jsonb) RETURNS SETOF bigint
{plpgsql_indexed_definer}
BEGIN
    PERFORM {schema}.check_may_lock(p_tasks);
    RETURN QUERY SELECT p FROM {schema}.put_tasks_by(p_queue, p_uid, p_tasks, session_user::name) AS p;
END
$$;

-- Put tasks. A second call with the same p_uid (the first reply was lost) finds the tasks of the first.
CREATE OR REPLACE FUNCTION {schema}.put_tasks(p_queue varchar, p_uid varchar, p_tasks jsonb) RETURNS SETOF bigint
{plpgsql_indexed_definer}
BEGIN
    PERFORM {schema}.check_may_lock(p_tasks);
    RETURN QUERY SELECT p FROM {schema}.put_tasks_by(p_queue, p_uid, p_tasks, session_user::name) AS p;
EXCEPTION WHEN unique_violation THEN
    RETURN QUERY
        SELECT t.task_id FROM {schema}.task AS t
        WHERE t.put_uid = ANY (ARRAY(SELECT p_uid || '.' || n FROM generate_series(1, jsonb_array_length(p_tasks)) AS n))
          AND t.put_by = session_user
        ORDER BY t.task_id;
END
$$;

-- Claim the first task that may run now; task_id is NULL if there is none. With p_again (the first reply may have been
-- lost) return the task that an earlier call with the same p_uid has claimed.
CREATE OR REPLACE FUNCTION {schema}.claim_task(
    p_member bigint, p_queue varchar, p_owner varchar, p_uid varchar, p_again boolean,
    OUT task_id bigint, OUT task_order integer, OUT kind varchar, OUT body text, OUT note varchar, OUT attempt integer,
    OUT failures integer, OUT max_attempts integer) {plpgsql_indexed_definer}
DECLARE
    v_turns boolean;
    v_task  bigint;
BEGIN
    PERFORM {schema}.require_member(p_member);
    IF p_again THEN
        SELECT t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts
        INTO task_id, task_order, kind, body, note, attempt, failures, max_attempts
        FROM {schema}.task AS t
        WHERE t.task_id = (SELECT r.task_id FROM {schema}.running_tasks(p_queue) AS r
                           WHERE r.member_id = p_member AND r.claim_uid = p_uid);
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    v_turns := {schema}.uses_fair_queueing(p_queue, true);
    IF v_turns THEN
        v_task := {schema}.pick_fair_task(p_queue, 1);
    ELSIF NOT v_turns THEN
        v_task := (SELECT f.task_id FROM {schema}.first_task(p_queue, 1) AS f);
    END IF;
    IF v_task IS NULL THEN
        RETURN;
    END IF;
    UPDATE {schema}.task AS t
    SET status = 'running', attempt = t.attempt + 1, member_id = p_member, owner = p_owner, claim_uid = p_uid,
        claimed_at = clock_timestamp(), host = m.host, pid = coalesce(m.pid, m.backend_pid), login = m.login
    FROM {schema}.member AS m
    WHERE t.task_id = v_task AND m.member_id = p_member
    RETURNING t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts
    INTO task_id, task_order, kind, body, note, attempt, failures, max_attempts;
END
$$;

-- Return the status of a task after an attempt with this outcome. p_asked: a cancellation was requested, so it does not
-- run again. (Plain SQL, which the planner inlines, here and below.)
CREATE OR REPLACE FUNCTION {schema}.status_after(p_outcome varchar, p_failures integer, p_max_attempts integer, p_asked boolean)
RETURNS varchar
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE WHEN p_outcome::pg_catalog.text OPERATOR(pg_catalog.=) 'finished'::pg_catalog.text THEN 'finished'
                WHEN p_asked OR p_outcome::pg_catalog.text OPERATOR(pg_catalog.=) 'cancelled'::pg_catalog.text THEN 'cancelled'
                WHEN p_outcome::pg_catalog.text OPERATOR(pg_catalog.=) 'returned'::pg_catalog.text
                     OR (p_failures OPERATOR(pg_catalog.+) 1) OPERATOR(pg_catalog.<) p_max_attempts THEN 'pending' ELSE 'failed' END
$$;

-- Return true if a task with this status is open: it is pending, or it has failed and blocks later orders.
CREATE OR REPLACE FUNCTION {schema}.open_after(p_status varchar, p_on_failure varchar) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT p_status::pg_catalog.text OPERATOR(pg_catalog.=) 'pending'::pg_catalog.text
           OR p_status::pg_catalog.text OPERATOR(pg_catalog.=) 'failed'::pg_catalog.text AND p_on_failure::pg_catalog.text OPERATOR(pg_catalog.=) 'stop'::pg_catalog.text
$$;

-- Return the error text of an attempt: first the login that requested its cancellation, if any, then p_error.
CREATE OR REPLACE FUNCTION {schema}.error_after(p_outcome varchar, p_error text, p_asked_by name) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE WHEN p_asked_by IS NULL OR p_outcome::pg_catalog.text OPERATOR(pg_catalog.=) 'finished'::pg_catalog.text THEN p_error
                ELSE 'cancelled by '::pg_catalog.text OPERATOR(pg_catalog.||) p_asked_by::pg_catalog.text
                     OPERATOR(pg_catalog.||) coalesce(E'\n'::pg_catalog.text OPERATOR(pg_catalog.||) p_error, ''::pg_catalog.text) END
$$;

-- Return the time of the next attempt after a failure. The pause doubles with each failure, up to five minutes; half of
-- it is random, so that tasks do not all run again at once.
CREATE OR REPLACE FUNCTION {schema}.retry_at(p_failures integer, p_backoff_ms integer) RETURNS timestamptz {sql}
    SELECT clock_timestamp() + least(300000, p_backoff_ms * 2 ^ least(p_failures, 20)) * (0.5 + random() / 2)
                               * interval '1 millisecond'
$$;

-- End an attempt: 'finished', 'failed' (the task is tried again after a growing pause, up to max_attempts times),
-- 'returned' (pending at once; does not count), or 'cancelled'. A task whose cancellation was requested is cancelled,
-- unless it has finished. Return the task's new status; NULL if it was no longer this member's. May be repeated.
CREATE OR REPLACE FUNCTION {schema}.end_task(
    p_member bigint, p_task bigint, p_attempt integer, p_outcome varchar, p_result text, p_error text) RETURNS varchar
{plpgsql_indexed_definer}
DECLARE
    v_member {schema}.member;
    v_before record;
    v_status varchar;
BEGIN
    IF p_outcome NOT IN ('finished', 'failed', 'returned', 'cancelled') THEN
        RAISE EXCEPTION 'sqlsem: a task ends as finished, failed, returned or cancelled, not %', p_outcome USING ERRCODE = '22023';
    END IF;
    SELECT * INTO v_member FROM {schema}.member WHERE member_id = p_member AND login = session_user;
    UPDATE {schema}.task AS t
    SET status = {schema}.status_after(p_outcome, failures, max_attempts, cancel_asked_at IS NOT NULL),
        is_open = {schema}.open_after(
            {schema}.status_after(p_outcome, failures, max_attempts, cancel_asked_at IS NOT NULL), on_failure),
        failures = failures + (p_outcome = 'failed')::integer,
        ready_at = CASE WHEN p_outcome = 'failed' AND failures + 1 < max_attempts
                        THEN {schema}.retry_at(failures, backoff_ms) ELSE ready_at END,
        ended_at = CASE WHEN {schema}.status_after(p_outcome, failures, max_attempts, cancel_asked_at IS NOT NULL) <> 'pending'
                        THEN clock_timestamp() END,
        error = {schema}.error_after(p_outcome, p_error, cancel_asked_by), result = p_result, member_id = NULL, claim_uid = NULL
    WHERE task_id = p_task AND attempt = p_attempt AND member_id = v_member.member_id AND coalesce(t.status, '') = 'running'
    RETURNING t.owner, t.claimed_at, t.status, t.queue_name, t.task_order, t.error INTO v_before;
    IF NOT FOUND THEN
        -- Perhaps an earlier call of this member has ended the attempt.
        SELECT t.status INTO v_status FROM {schema}.task_log AS l JOIN {schema}.task AS t ON t.task_id = l.task_id
        WHERE l.task_id = p_task AND l.attempt = p_attempt AND l.member_id = p_member AND l.outcome = p_outcome;
        RETURN v_status;
    END IF;
    INSERT INTO {schema}.task_log
        (task_id, attempt, outcome, member_id, owner, host, pid, session_id, started_at, error, result, login)
    VALUES (p_task, p_attempt, p_outcome, p_member, v_before.owner, v_member.host, coalesce(v_member.pid, v_member.backend_pid),
            v_member.backend_pid, v_before.claimed_at, v_before.error, p_result, v_member.login);
    PERFORM {schema}.notify_tasks(v_before.queue_name, CASE WHEN v_before.status <> 'pending' THEN v_before.task_order END);
    RETURN v_before.status;
END
$$;

-- End one task and claim the next in one call, between two tasks of a worker.
CREATE OR REPLACE FUNCTION {schema}.next_task(
    p_member bigint, p_task bigint, p_attempt integer, p_outcome varchar, p_result text, p_error text,
    p_queue varchar, p_owner varchar, p_uid varchar, p_again boolean,
    OUT ended varchar, OUT task_id bigint, OUT task_order integer, OUT kind varchar, OUT body text, OUT note varchar,
    OUT attempt integer, OUT failures integer, OUT max_attempts integer) {plpgsql_indexed_definer}
BEGIN
    ended := {schema}.end_task(p_member, p_task, p_attempt, p_outcome, p_result, p_error);
    SELECT c.task_id, c.task_order, c.kind, c.body, c.note, c.attempt, c.failures, c.max_attempts
    INTO task_id, task_order, kind, body, note, attempt, failures, max_attempts
    FROM {schema}.claim_task(p_member, p_queue, p_owner, p_uid, p_again) AS c;
END
$$;

-- End several attempts, all of different tasks, and claim up to p_maximum (may be 0) in the same call, between groups
-- of short tasks of a worker. May be repeated: see end_task and claim_task.
-- p_ends: [{"task": …, "attempt": …, "outcome": …, "result": …, "error": …}, …]
-- ended: {task: its new status, …}, without tasks that were no longer this member's; claimed: [[task_id, task_order,
-- kind, body, note, attempt, failures, max_attempts], …]. The claimed group ends before a task that must be claimed
-- alone, and at a megabyte of bodies.
CREATE OR REPLACE FUNCTION {schema}.next_tasks(
    p_member bigint, p_ends json, p_queue varchar, p_owner varchar, p_uid varchar, p_again boolean, p_maximum integer,
    OUT ended text, OUT claimed text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET enable_hashjoin = off SET enable_mergejoin = off
    SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_member {schema}.member;
    v_count  integer;
    v_queue  varchar;
    v_order  integer;
    v_turns  boolean;
    v_first  record;
    v_ids    bigint[];
BEGIN
    SELECT * INTO v_member FROM {schema}.member WHERE member_id = p_member AND login = session_user;
    IF json_typeof(p_ends) <> 'array' OR EXISTS (SELECT FROM json_array_elements(p_ends) AS e WHERE json_typeof(e) <> 'object') THEN
        RAISE EXCEPTION 'sqlsem: the ends of tasks are a list of objects' USING ERRCODE = '22023';
    ELSIF json_array_length(p_ends) > 0 THEN
        WITH done AS (
            UPDATE {schema}.task AS t
            SET status = {schema}.status_after(e.outcome, t.failures, t.max_attempts, t.cancel_asked_at IS NOT NULL),
                is_open = {schema}.open_after(
                    {schema}.status_after(e.outcome, t.failures, t.max_attempts, t.cancel_asked_at IS NOT NULL), t.on_failure),
                failures = t.failures + (e.outcome = 'failed')::integer,
                ready_at = CASE WHEN e.outcome = 'failed' AND t.failures + 1 < t.max_attempts
                                THEN {schema}.retry_at(t.failures, t.backoff_ms) ELSE t.ready_at END,
                ended_at = CASE WHEN {schema}.status_after(e.outcome, t.failures, t.max_attempts, t.cancel_asked_at IS NOT NULL)
                                     <> 'pending' THEN clock_timestamp() END,
                error = {schema}.error_after(e.outcome, e.error, t.cancel_asked_by), result = e.result, member_id = NULL, claim_uid = NULL
            FROM json_to_recordset(p_ends) AS e (task bigint, attempt integer, outcome varchar, result text, error text)
            WHERE t.task_id = e.task AND t.attempt = e.attempt AND t.member_id = v_member.member_id
              AND coalesce(t.status, '') = 'running' AND e.outcome IN ('finished', 'failed', 'returned', 'cancelled')
            RETURNING t.task_id, t.attempt, t.status, t.owner, t.claimed_at, e.outcome, t.error, t.result, t.queue_name, t.task_order),
        kept AS (
            INSERT INTO {schema}.task_log
                (task_id, attempt, outcome, member_id, owner, host, pid, session_id, started_at, error, result, login)
            SELECT d.task_id, d.attempt, d.outcome, p_member, d.owner, v_member.host, coalesce(v_member.pid, v_member.backend_pid),
                   v_member.backend_pid, d.claimed_at, d.error, d.result, v_member.login
            FROM done AS d)
        SELECT json_object_agg(d.task_id, d.status), count(*), max(d.queue_name),
               CASE WHEN bool_and(d.status <> 'pending') THEN max(d.task_order) END
        INTO ended, v_count, v_queue, v_order FROM done AS d;
        IF v_count > 0 THEN
            PERFORM {schema}.notify_tasks(v_queue, v_order);
        END IF;
        IF v_count < json_array_length(p_ends) THEN
            -- Perhaps an earlier call of this member has ended some of them.
            SELECT json_object_agg(t.task_id, t.status) INTO ended
            FROM json_to_recordset(p_ends) AS e (task bigint, attempt integer, outcome varchar)
            JOIN {schema}.task_log AS l ON l.task_id = e.task AND l.attempt = e.attempt
            JOIN {schema}.task AS t ON t.task_id = l.task_id
            WHERE l.member_id = p_member AND l.outcome = e.outcome;
        END IF;
    END IF;
    IF p_maximum < 1 THEN
        RETURN;
    END IF;
    PERFORM {schema}.require_member(p_member);
    IF p_again THEN
        SELECT json_agg(json_build_array(t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures,
                                         t.max_attempts) ORDER BY t.task_id)
        INTO claimed
        FROM {schema}.running_tasks(p_queue) AS r JOIN {schema}.task AS t ON t.task_id = r.task_id
        WHERE r.member_id = p_member AND r.claim_uid = p_uid;
        IF claimed IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    v_turns := {schema}.uses_fair_queueing(p_queue, true);
    IF v_turns THEN
        -- (With fair queueing each claim takes one task.)
        SELECT w.task_id, true AS alone INTO v_first FROM {schema}.pick_fair_task(p_queue, p_maximum) AS w (task_id);
    ELSIF NOT v_turns THEN
        SELECT * INTO v_first FROM {schema}.first_task(p_queue, p_maximum);
    ELSE
        RETURN;
    END IF;
    IF v_first.task_id IS NULL THEN
        RETURN;
    END IF;
    v_ids := ARRAY[v_first.task_id];
    IF p_maximum > 1 AND NOT v_first.alone THEN
        -- Find the end of the group without locking tasks: other sessions must be able to claim the tasks that this one
        -- does not claim.
        SELECT array_agg(w.task_id) INTO v_ids
        FROM (SELECT n.task_id,
                     bool_or(n.alone) OVER (ORDER BY n.task_id) AS barred,
                     sum(n.size) OVER (ORDER BY n.task_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
              FROM (SELECT t.task_id, t.losses > 0 OR t.kind NOT IN ('call', 'sql') AS alone, octet_length(t.body) AS size
                    FROM {schema}.task AS t
                    WHERE t.task_id = ANY (v_first.survivors) AND t.task_id >= v_first.task_id
                      AND coalesce(t.is_open, false) AND t.status = 'pending' AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
                    UNION ALL
                    (SELECT t.task_id, t.losses > 0 OR t.kind NOT IN ('call', 'sql'), octet_length(t.body)
                     FROM {schema}.task AS t
                     WHERE t.is_open AND t.status = 'pending' AND t.task_key IS NULL AND t.lock_count IS NULL
                       AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
                       AND t.queue_name = p_queue AND t.task_order = v_first.task_order
                       AND t.task_id >= greatest(v_first.beyond, v_first.task_id) AND v_first.beyond IS NOT NULL
                     ORDER BY t.queue_name, t.task_order, t.task_key, t.task_id LIMIT p_maximum)
                    ORDER BY task_id LIMIT p_maximum) AS n) AS w
        WHERE NOT w.barred AND coalesce(w.before, 0) <= 1000000;
    END IF;
    WITH chosen AS MATERIALIZED (
        SELECT t.task_id FROM {schema}.task AS t
        WHERE t.task_id = ANY (v_ids) AND coalesce(t.is_open, false) AND t.status = 'pending'
          AND t.ready_at <= greatest(clock_timestamp(), t.put_at)
          AND (t.task_id = v_first.task_id OR t.losses = 0)
        ORDER BY t.task_id
        FOR UPDATE OF t SKIP LOCKED),
    taken AS (
        UPDATE {schema}.task AS t
        SET status = 'running', attempt = t.attempt + 1, member_id = p_member, owner = p_owner, claim_uid = p_uid,
            claimed_at = clock_timestamp(), host = v_member.host, pid = coalesce(v_member.pid, v_member.backend_pid),
            login = v_member.login
        FROM chosen AS c WHERE t.task_id = c.task_id
        RETURNING t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts)
    SELECT json_agg(json_build_array(t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures,
                                     t.max_attempts) ORDER BY t.task_id)
    INTO claimed FROM taken AS t;
END
$$;

-- Give back the tasks of a claim whose reply was lost for good; return their number.
CREATE OR REPLACE FUNCTION {schema}.return_claim(p_member bigint, p_queue varchar, p_uid varchar) RETURNS integer
{plpgsql_indexed_definer}
DECLARE
    v_task  record;
    v_count integer := 0;
BEGIN
    FOR v_task IN SELECT r.task_id, r.attempt FROM {schema}.running_tasks(p_queue) AS r
        WHERE r.member_id = p_member AND r.claim_uid = p_uid
    LOOP
        IF {schema}.end_task(p_member, v_task.task_id, v_task.attempt, 'returned', NULL, NULL) IS NOT NULL THEN
            v_count := v_count + 1;
        END IF;
    END LOOP;
    RETURN v_count;
END
$$;

-- Test the members that run tasks of a queue (NULL: of all queues), and make the tasks of dead members pending again;
-- return the number of these tasks. A task fails when its worker died for the fifth time, as the task may be the
-- cause. A task with a requested cancellation is cancelled.
CREATE OR REPLACE FUNCTION {schema}.recover_tasks(p_queue varchar, p_mine bigint) RETURNS integer
{plpgsql_indexed_definer}
DECLARE
    v_member bigint;
    v_tasks  bigint[];
    v_gone   bigint[];
    v_count  integer;
BEGIN
    FOR v_member IN SELECT DISTINCT r.member_id FROM {schema}.running_tasks(p_queue) AS r
        WHERE r.member_id IS DISTINCT FROM p_mine
        ORDER BY 1  -- the same order for all callers: two of these must not wait for each other
    LOOP
        PERFORM {schema}.check_liveness(v_member, p_mine);
    END LOOP;
    -- Note the numbers of tasks and members first. After the statement's snapshot another session may recover a task,
    -- and a third one claim it. FOR UPDATE then reads the row again, but evaluates only conditions on the row itself:
    -- so the next statement compares columns of the task with fixed numbers. (Numbers are never used again.)
    SELECT array_agg(r.task_id), array_agg(DISTINCT r.member_id) INTO v_tasks, v_gone FROM {schema}.running_tasks(p_queue) AS r
    WHERE (SELECT m.member_id FROM {schema}.member AS m WHERE m.member_id = r.member_id) IS NULL;  -- (no join, which may read all)
    WITH orphan AS (
        SELECT t.task_id, t.attempt, t.member_id, t.owner, t.claimed_at, t.host, t.pid, t.login FROM {schema}.task AS t
        WHERE t.task_id = ANY (v_tasks) AND coalesce(t.status, '') = 'running' AND t.member_id = ANY (v_gone)
        FOR UPDATE OF t SKIP LOCKED),
    back AS (
        UPDATE {schema}.task AS t
        SET status = CASE WHEN cancel_asked_at IS NOT NULL THEN 'cancelled' WHEN losses < 4 THEN 'pending' ELSE 'failed' END,
            is_open = cancel_asked_at IS NULL AND (losses < 4 OR on_failure = 'stop'), losses = losses + 1,
            ended_at = CASE WHEN cancel_asked_at IS NULL AND losses < 4 THEN NULL ELSE clock_timestamp() END,
            error = CASE WHEN cancel_asked_at IS NOT NULL THEN {schema}.error_after('lost', 'its worker died', cancel_asked_by)
                         WHEN losses < 4 THEN error ELSE 'its worker died five times' END,
            member_id = NULL, claim_uid = NULL
        FROM orphan AS o WHERE t.task_id = o.task_id)
    INSERT INTO {schema}.task_log (task_id, attempt, outcome, member_id, owner, host, pid, login, started_at, error)
    SELECT o.task_id, o.attempt, 'lost', o.member_id, o.owner, o.host, o.pid, o.login, o.claimed_at, 'its worker died'
    FROM orphan AS o;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0 AND p_queue IS NOT NULL THEN
        PERFORM {schema}.notify_tasks(p_queue, NULL);
    END IF;
    PERFORM {schema}.end_overdue_tasks(p_queue, p_mine);
    PERFORM {schema}.check_lock_holders(p_queue);
    RETURN v_count;
END
$$;

-- Cancel the statement in which a session runs a task (work): the task's SQL ends, and the session records that. The
-- caller has locked the task, so the session cannot have ended the task yet. Cancel each attempt only once: a second
-- cancel might come while the session records the first. Do not cancel a session that has left `work` and runs another
-- statement (visible only with pg_read_all_stats). The schema's owner needs the right to signal the session; without it
-- nothing happens.
CREATE OR REPLACE FUNCTION {schema}.cancel_attempt(p_task bigint) RETURNS void {plpgsql}
DECLARE
    v_pid integer;
BEGIN
    PERFORM pg_stat_clear_snapshot();  -- read what sessions do now, not at the first read of this transaction
    v_pid := (SELECT m.backend_pid FROM {schema}.task AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
              JOIN {schema}.member_liveness(ARRAY(SELECT r.member_id FROM {schema}.task AS r WHERE r.task_id = p_task)) AS l
                  ON l.member_id = m.member_id
              LEFT JOIN pg_stat_activity AS a ON a.pid = m.backend_pid
              WHERE t.task_id = p_task AND coalesce(t.status, '') = 'running' AND t.claim_uid IS NULL
                AND t.signalled_attempt IS DISTINCT FROM t.attempt AND NOT l.missing AND m.lease_until IS NULL
                AND (a.query_start <= t.claimed_at) IS NOT false);
    IF v_pid IS NOT NULL THEN
        UPDATE {schema}.task SET signalled_attempt = attempt WHERE task_id = p_task;
        PERFORM pg_cancel_backend(v_pid);
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    NULL;
END
$$;

-- Cancel tasks that sessions run by `work` for longer than their time limit. (Such a session cannot read the clock
-- while the task's SQL runs.)
CREATE OR REPLACE FUNCTION {schema}.end_overdue_tasks(p_queue varchar, p_mine bigint) RETURNS void
{plpgsql_indexed_definer}
DECLARE
    v_task record;
BEGIN
    FOR v_task IN
        SELECT t.task_id FROM {schema}.task AS t
        WHERE t.task_id = ANY (ARRAY(SELECT r.task_id FROM {schema}.running_tasks(p_queue) AS r WHERE r.claim_uid IS NULL))
          AND coalesce(t.status, '') = 'running' AND t.claim_uid IS NULL AND t.member_id IS DISTINCT FROM p_mine
          AND t.claimed_at < clock_timestamp() - t.time_limit_ms * interval '1 millisecond'
          AND t.signalled_attempt IS DISTINCT FROM t.attempt
        ORDER BY t.task_id FOR UPDATE OF t SKIP LOCKED
    LOOP
        PERFORM {schema}.cancel_attempt(v_task.task_id);
    END LOOP;
END
$$;

-- Return the state of a queue. pending, running: there are such tasks. next_pending: a task of the lowest open order is
-- pending (if not, all pending tasks wait for that order). failed, error: the first failed task that blocks later
-- orders.
CREATE OR REPLACE FUNCTION {schema}.queue_state(
    p_queue varchar, OUT pending boolean, OUT running boolean, OUT next_pending boolean, OUT failed bigint, OUT error text)
{plpgsql_indexed_definer}
BEGIN
    WITH mark AS MATERIALIZED (
        SELECT l.task_order, l.mark, l.survivors FROM {schema}.task_low_water AS l WHERE l.queue_name = p_queue
        ORDER BY l.serial DESC LIMIT 1),
    opened AS NOT MATERIALIZED (
        SELECT t.task_order, t.task_id, t.status, t.error, t.put_by FROM mark AS w CROSS JOIN {schema}.task AS t
        WHERE t.task_id = ANY (w.survivors) AND coalesce(t.is_open, false)
        UNION ALL
        SELECT t.task_order, t.task_id, t.status, t.error, t.put_by FROM {schema}.task AS t
        WHERE t.is_open AND t.queue_name <= p_queue
          AND (t.queue_name, t.task_order, t.task_id)
              >= (p_queue, coalesce((SELECT w.task_order FROM mark AS w), -2147483648), coalesce((SELECT w.mark FROM mark AS w), 0)))
    SELECT EXISTS (SELECT FROM opened AS o WHERE o.status = 'pending'), EXISTS (SELECT FROM {schema}.running_tasks(p_queue)),
           EXISTS (SELECT FROM opened AS o WHERE o.status = 'pending'
                   AND o.task_order = (SELECT p.task_order FROM opened AS p ORDER BY p.task_order LIMIT 1)),
           f.task_id,
           -- (A login that only puts tasks sees only errors of its own tasks.)
           CASE WHEN f.put_by = session_user OR {schema}.has_role('worker', 'operator', 'reader') THEN f.error END
    INTO pending, running, next_pending, failed, error
    FROM (SELECT 1) AS one
    LEFT JOIN LATERAL (SELECT o.task_id, o.error, o.put_by FROM opened AS o WHERE o.status = 'failed'
                       ORDER BY o.task_order, o.task_id LIMIT 1) AS f ON true;
END
$$;

-- Return the seconds until the next poll of a queue may find a task, without a notification; NULL if none is known. The
-- earliest of: the time of the first task of the lowest open order that waits for its time (but a task that has been
-- due for longer waits for something else); 0.25 s, if a task waits for locks; the time when a used-up rate has room
-- again.
CREATE OR REPLACE FUNCTION {schema}.next_ready(p_queue varchar) RETURNS float {plpgsql_indexed_definer}
DECLARE
    v_now   constant bigint := {schema}.clock_ms();
    v_order constant integer := (SELECT f.task_order FROM {schema}.first_task(p_queue, -1) AS f);
    v_all   bigint;  -- the queue's rate is used up until then
    v_key   bigint;  -- the first used-up rate has room then
    v_since float := v_now - 10000;
    v_next  float;
BEGIN
    SELECT min(w.free_ms) FILTER (WHERE w.task_key = ''), min(w.free_ms) INTO v_all, v_key FROM {schema}.queue_wait AS w
    WHERE w.queue_name = p_queue AND v_now >= w.since_ms AND v_now < w.free_ms + 100;
    IF v_key IS NOT NULL THEN
        v_since := v_now - 100;  -- a task that is due for longer waits for its rate
    END IF;
    IF v_all IS NULL THEN
        v_next := least(v_key, (
            SELECT extract(epoch FROM t.ready_at) * 1000 FROM {schema}.task AS t
            WHERE t.status = 'pending' AND t.lock_count IS NULL AND t.ready_at > t.put_at
              AND t.queue_name = p_queue AND t.task_order = v_order AND t.ready_at > to_timestamp(v_since / 1000)
            ORDER BY t.queue_name, t.task_order, t.ready_at LIMIT 1)::float);
    END IF;
    v_next := coalesce(v_all, v_next) - v_now;
    RETURN least(CASE WHEN v_next < 0 THEN 0 ELSE v_next / 1000 END, CASE WHEN EXISTS (
        SELECT FROM {schema}.task AS t WHERE t.queue_name = p_queue AND t.is_open AND t.status = 'pending' AND t.lock_count IS NOT NULL)
        THEN 0.25 END);
END
$$;


-- Views for people ---------------------------------------------------------------------------------------------

-- Return tasks: open ones first, in the order in which they will run (but for fair queueing), then ended ones, newest
-- first. status 'lost': the worker is dead, and the next session that tests it, and may write, makes the task pending
-- again. A login that may only put, and not run or operate, sees its own tasks. (A time outside of the clients'
-- calendars is shown as their first or last day.)
CREATE OR REPLACE FUNCTION {schema}.show_tasks(p_queue varchar, p_status varchar, p_maximum integer, p_skip integer)
RETURNS TABLE (task_id bigint, queue_name varchar, task_order integer, kind varchar, body text, note varchar, status varchar,
               on_failure varchar, attempt integer, failures integer, losses integer, max_attempts integer, put_at timestamptz,
               ready_at timestamptz, claimed_at timestamptz, ended_at timestamptz, seconds float, member_id bigint,
               owner varchar, host varchar, pid integer, error text, result text, put_by name, login name,
               time_limit float, unique_key varchar, cancel_asked_at timestamptz, cancel_asked_by name, task_key varchar,
               task_priority integer, locks text)
{sql_indexed_definer}
    WITH asks AS MATERIALIZED (SELECT {schema}.has_role('worker', 'operator', 'reader') AS sees),
    -- A page of open tasks (tasks with a priority have an index of their own) and a page of ended ones, along their
    -- indexes. (Only a test of the worker shows if a task is lost, so for 'lost' all running tasks are read.)
    page AS (
        (SELECT t.* FROM {schema}.task AS t
         WHERE t.is_open AND t.task_priority = 0 AND (p_queue IS NULL OR t.queue_name = p_queue)
           AND (p_status IS NULL OR t.status = CASE p_status WHEN 'lost' THEN 'running' ELSE p_status END)
           AND ((SELECT a.sees FROM asks AS a) OR t.put_by = session_user)
         ORDER BY t.queue_name, t.task_order, t.task_id
         LIMIT CASE WHEN p_status IN ('running', 'lost') THEN NULL ELSE greatest(p_skip, 0)::bigint + CASE WHEN p_maximum < 0 THEN 0 ELSE p_maximum END END)
        UNION ALL
        (SELECT t.* FROM {schema}.task AS t
         WHERE t.is_open AND t.task_priority <> 0 AND (p_queue IS NULL OR t.queue_name = p_queue)
           AND (p_status IS NULL OR t.status = CASE p_status WHEN 'lost' THEN 'running' ELSE p_status END)
           AND ((SELECT a.sees FROM asks AS a) OR t.put_by = session_user)
         ORDER BY t.queue_name, t.task_order, t.task_priority DESC, t.task_id
         LIMIT CASE WHEN p_status IN ('running', 'lost') THEN NULL ELSE greatest(p_skip, 0)::bigint + CASE WHEN p_maximum < 0 THEN 0 ELSE p_maximum END END)
        UNION ALL
        (SELECT t.* FROM {schema}.task AS t
         WHERE p_status IS DISTINCT FROM 'pending' AND NOT t.is_open AND (p_queue IS NULL OR t.queue_name = p_queue)
           AND (p_status IS NULL OR t.status = p_status)
           AND ((SELECT a.sees FROM asks AS a) OR t.put_by = session_user)
         ORDER BY t.ended_at DESC, t.task_id DESC LIMIT greatest(p_skip, 0)::bigint + CASE WHEN p_maximum < 0 THEN 0 ELSE p_maximum END))
    SELECT t.task_id, t.queue_name, t.task_order, t.kind, t.body, t.note, s.status, t.on_failure, t.attempt, t.failures, t.losses,
           t.max_attempts, t.put_at,
           greatest(least(CASE WHEN t.lock_count IS NULL THEN t.ready_at ELSE t.enqueue_locks_at END, '9999-12-30 UTC'), '0001-01-03 UTC'),
           t.claimed_at, t.ended_at,
           extract(epoch FROM CASE WHEN s.status IN ('finished', 'failed') THEN t.ended_at - t.claimed_at
                                   WHEN t.status = 'running' THEN clock_timestamp() - t.claimed_at END)::float,
           t.member_id, t.owner, t.host, t.pid,
           t.error, t.result, t.put_by, t.login, t.time_limit_ms / 1000.0::float, t.unique_key, t.cancel_asked_at, t.cancel_asked_by,
           nullif(t.task_key, ''), t.task_priority,
           CASE WHEN t.lock_count IS NOT NULL THEN
               (SELECT json_agg(json_build_array(k.resource_id, k.queue_position, k.access_type, k.concurrency_limit, k.weight)
                                ORDER BY k.number)::text
                FROM {schema}.task_lock AS k WHERE k.task_id = t.task_id) END
    FROM page AS t
    LEFT JOIN {schema}.member_liveness(ARRAY(SELECT DISTINCT p.member_id FROM page AS p WHERE p.status = 'running')) AS l
           ON l.member_id = t.member_id
    CROSS JOIN LATERAL (SELECT CASE WHEN t.status = 'running' AND l.dead IS NOT FALSE THEN 'lost' ELSE t.status END::varchar AS status) AS s
    WHERE p_status IS NULL OR s.status = p_status
    ORDER BY NOT t.is_open, CASE WHEN t.is_open THEN t.queue_name END, CASE WHEN t.is_open THEN t.task_order END,
             CASE WHEN t.is_open THEN t.task_priority END DESC, CASE WHEN t.is_open THEN t.task_id END, t.ended_at DESC, t.task_id DESC
    LIMIT CASE WHEN p_maximum < 0 THEN 0 ELSE p_maximum END OFFSET greatest(p_skip, 0)
$$;

-- Return tasks: open ones first, in the order in which they will run (but for fair queueing), then ended ones, newest
-- first. status: as in the table, or lost (its worker is dead, and the task will become pending). A login that may only
-- put sees its own tasks.
--
-- The first page of show_tasks.
CREATE OR REPLACE FUNCTION {schema}.list_tasks(p_queue varchar DEFAULT NULL, p_status varchar DEFAULT NULL, p_maximum integer DEFAULT 100)
RETURNS TABLE (task_id bigint, queue_name varchar, task_order integer, kind varchar, body text, note varchar, status varchar,
               on_failure varchar, attempt integer, failures integer, losses integer, max_attempts integer, put_at timestamptz,
               ready_at timestamptz, claimed_at timestamptz, ended_at timestamptz, seconds float, member_id bigint,
               owner varchar, host varchar, pid integer, error text, result text, put_by name, login name,
               time_limit float, unique_key varchar, cancel_asked_at timestamptz, cancel_asked_by name, task_key varchar,
               task_priority integer, locks text) {sql_definer}
    SELECT t.* FROM {schema}.show_tasks(p_queue, p_status, p_maximum, 0) AS t
$$;

-- Return the counts of each queue: tasks by status (lost: running tasks whose worker is dead); oldest: the seconds that
-- the oldest task that may run has waited; rate: tasks a minute that ended in the last five; blocked_by: the failed
-- task that blocks later orders. A login that may only put sees its own tasks. Reads all tasks that are kept.
CREATE OR REPLACE FUNCTION {schema}.queue_counts(p_queue varchar DEFAULT NULL)
RETURNS TABLE (queue_name varchar, pending bigint, running bigint, finished bigint, failed bigint, cancelled bigint, lost bigint,
               oldest float, rate float, blocked_by bigint) {sql_indexed_definer}
    WITH asks AS MATERIALIZED (SELECT {schema}.has_role('worker', 'operator', 'reader') AS sees, clock_timestamp() AS now),
    -- (Subqueries, as they are hashed in any case: a join might compare each row with each.)
    lost AS MATERIALIZED (SELECT r.task_id FROM {schema}.task AS r
                          WHERE r.status = 'running'
                            AND (r.member_id IN (SELECT l.member_id FROM {schema}.member_liveness() AS l WHERE NOT l.dead)) IS NOT TRUE),
    counted AS (
        SELECT t.queue_name, count(*) FILTER (WHERE t.status = 'pending') AS pending,
               count(*) FILTER (WHERE t.status = 'running') AS running, count(*) FILTER (WHERE t.status = 'finished') AS finished,
               count(*) FILTER (WHERE t.status = 'failed') AS failed, count(*) FILTER (WHERE t.status = 'cancelled') AS cancelled,
               count(*) FILTER (WHERE t.task_id IN (SELECT l.task_id FROM lost AS l)) AS lost,
               extract(epoch FROM max(a.now - greatest(t.put_at, t.ready_at))
                                  FILTER (WHERE t.status = 'pending' AND t.ready_at <= greatest(a.now, t.put_at)))::float AS oldest,
               count(*) FILTER (WHERE t.ended_at > a.now - interval '5 minutes') / 5.0::float AS rate,
               max(t.task_order) FILTER (WHERE t.status = 'pending') AS last_order
        FROM {schema}.task AS t CROSS JOIN asks AS a
        WHERE (p_queue IS NULL OR t.queue_name = p_queue) AND (a.sees OR t.put_by = session_user)
        GROUP BY t.queue_name)
    SELECT c.queue_name, c.pending, c.running, c.finished, c.failed, c.cancelled, c.lost, 
           CASE WHEN c.oldest < 0 THEN 0 ELSE c.oldest END, c.rate, f.task_id
    FROM counted AS c LEFT JOIN LATERAL (
        SELECT b.task_id FROM {schema}.task AS b
        WHERE c.failed > 0 AND b.queue_name = c.queue_name AND b.is_open AND b.status = 'failed' AND b.task_order < c.last_order
        ORDER BY b.task_order, b.task_id LIMIT 1) AS f ON true
    ORDER BY c.queue_name
$$;

-- Return the attempts at a task, with the one that is running.
CREATE OR REPLACE FUNCTION {schema}.task_attempts(p_task bigint)
RETURNS TABLE (task_id bigint, attempt integer, outcome varchar, member_id bigint, owner varchar, host varchar, pid integer,
               session_id integer, started_at timestamptz, ended_at timestamptz, seconds float, error text, result text, login name)
{sql_indexed_definer}
    SELECT a.* FROM (
        SELECT l.task_id, l.attempt, l.outcome, l.member_id, l.owner, l.host, l.pid, l.session_id, l.started_at, l.ended_at,
               extract(epoch FROM l.ended_at - l.started_at)::float, l.error, l.result, l.login
        FROM {schema}.task_log AS l WHERE l.task_id = p_task
        UNION ALL
        SELECT t.task_id, t.attempt, 'running', t.member_id, t.owner, t.host, t.pid, m.backend_pid, t.claimed_at, NULL,
               extract(epoch FROM clock_timestamp() - t.claimed_at)::float, NULL, NULL, t.login
        FROM {schema}.task AS t LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
        WHERE t.task_id = p_task AND t.status = 'running') AS a
    WHERE {schema}.has_role('worker', 'operator', 'reader')
       OR EXISTS (SELECT FROM {schema}.task AS t WHERE t.task_id = p_task AND t.put_by = session_user)
    ORDER BY 2
$$;


-- Operations of operators, and of the login that put a task --------------------------------------------------------

-- Retry or cancel a task. 'retry': a failed or cancelled task becomes pending again, with all its attempts. 'cancel': a
-- pending or failed task is cancelled. A login that may only put may do so with its own tasks. Return:
--   0 done
--   1 nothing done, as it runs
--   -1 no such task
--   -2 its state does not allow that
--   -3 another task with its key is open
--
-- The worker of a running task is tested first: if it is dead, the task becomes pending, and a retry does nothing more.
CREATE OR REPLACE FUNCTION {schema}.set_task(p_task bigint, p_what varchar) RETURNS integer {plpgsql_indexed_definer}
DECLARE
    v_task   record;
    v_status varchar;
BEGIN
    SELECT t.status, t.queue_name, t.task_order, t.put_by INTO v_task FROM {schema}.task AS t WHERE t.task_id = p_task;
    IF NOT FOUND OR v_task.put_by IS DISTINCT FROM session_user AND NOT {schema}.has_role('operator') THEN
        RETURN -1;
    ELSIF v_task.status = 'running' THEN
        PERFORM {schema}.recover_tasks(v_task.queue_name, NULL);  -- before the task is locked: members come first
    END IF;
    IF p_what = 'retry' THEN
        PERFORM {schema}.take_put_lock(v_task.queue_name);
    END IF;
    v_status := (SELECT t.status FROM {schema}.task AS t WHERE t.task_id = p_task FOR UPDATE);
    IF v_status IS NULL THEN
        RETURN -1;
    ELSIF v_status = 'running' THEN
        RETURN 1;
    ELSIF p_what = 'retry' AND (v_status IN ('failed', 'cancelled') OR v_status = 'pending' AND v_task.status = 'running') THEN
        BEGIN
            UPDATE {schema}.task
            SET status = 'pending', is_open = true, failures = 0, losses = 0,
                ready_at = put_at,  -- ready at once, even if the clock has gone back
                ended_at = NULL, cancel_asked_at = NULL, cancel_asked_by = NULL
            WHERE task_id = p_task;
        EXCEPTION WHEN unique_violation THEN
            RETURN -3;
        END;
        PERFORM {schema}.invalidate_task_mark(v_task.queue_name, v_task.task_order, p_task);
    ELSIF p_what = 'cancel' AND v_status IN ('pending', 'failed') THEN
        UPDATE {schema}.task
        SET status = 'cancelled', is_open = false, ended_at = clock_timestamp(), cancel_asked_at = clock_timestamp(),
            cancel_asked_by = session_user
        WHERE task_id = p_task;
    ELSE
        RETURN -2;
    END IF;
    PERFORM {schema}.note_operation(p_what, NULL, NULL, v_task.queue_name, p_task, v_status, NULL);
    PERFORM {schema}.notify_tasks(v_task.queue_name, NULL);
    RETURN 0;
END
$$;

-- Cancel a task. A login that may only put may do so with its own tasks. Return:
--   0 it was pending or had failed, and is cancelled
--   1 it runs, and is cancelled as soon as its worker has learned of that and ended it
--   -1 no such task
--   -2 its state does not allow that
CREATE OR REPLACE FUNCTION {schema}.cancel_task(p_task bigint) RETURNS integer {plpgsql_indexed_definer}
DECLARE
    v_code integer := {schema}.set_task(p_task, 'cancel');  -- and the task is locked from here on
    v_task record;
BEGIN
    IF v_code <> 1 THEN
        RETURN v_code;
    END IF;
    UPDATE {schema}.task AS t
    SET cancel_asked_at = coalesce(t.cancel_asked_at, clock_timestamp()), cancel_asked_by = coalesce(t.cancel_asked_by, session_user)
    WHERE t.task_id = p_task
    RETURNING t.queue_name, t.claim_uid INTO v_task;
    PERFORM {schema}.note_operation('cancel', NULL, NULL, v_task.queue_name, p_task, 'running', NULL);
    IF v_task.claim_uid IS NULL THEN
        -- A session that runs the task by `work` cannot poll for a cancellation, so signal it. (It cannot end the task
        -- before this transaction ends. If this login may not signal it, the task is cancelled when its SQL has ended.)
        PERFORM {schema}.cancel_attempt(p_task);
    END IF;
    RETURN 1;
END
$$;

-- Return (task, time limit in s, login that requested its cancellation) for each running task of a member that has a
-- limit or such a request.
CREATE OR REPLACE FUNCTION {schema}.task_controls(p_member bigint, p_tasks bigint[])
RETURNS TABLE (task_id bigint, time_limit float, cancel_asked_by name) {sql_indexed_definer}
    SELECT t.task_id, t.time_limit_ms / 1000.0::float, t.cancel_asked_by FROM {schema}.task AS t
    WHERE t.task_id = ANY (p_tasks) AND t.member_id = p_member AND coalesce(t.status, '') = 'running'
      AND (t.time_limit_ms IS NOT NULL OR t.cancel_asked_at IS NOT NULL)
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member AND m.login = session_user)
$$;

-- Set a limit, rate or weight of a queue. 'limit': how many tasks may run at a time, of the queue (p_key NULL) or of
-- one key; 'key_limit': of each key. 'rate': how many tasks may start in p_per_ms milliseconds, of the queue or of one
-- key; 'key_rate': of each key. 'weight': the share of a key. p_value NULL: remove the setting. Running tasks run on.
CREATE OR REPLACE FUNCTION {schema}.set_queue(
    p_queue varchar, p_key varchar, p_what text, p_value integer, p_per_ms integer DEFAULT NULL) RETURNS void
{plpgsql_indexed_definer}
DECLARE
    v_minimum constant integer := CASE p_what WHEN 'limit' THEN 0 WHEN 'key_limit' THEN 0 ELSE 1 END;
    v_is_rate constant boolean := coalesce(p_what IN ('rate', 'key_rate'), false);
    v_queue {schema}.queue_setting;
    v_key   {schema}.queue_key;
    v_old   text;
    v_new   text;
BEGIN
    PERFORM {schema}.check_name('queue', p_queue);
    IF p_key IS NOT NULL THEN
        PERFORM {schema}.check_name('key', p_key);
    END IF;
    IF p_what IS NULL OR p_what <> ALL (CASE WHEN p_key IS NULL THEN ARRAY['limit', 'key_limit', 'rate', 'key_rate']
                                             ELSE ARRAY['limit', 'rate', 'weight'] END) THEN
        RAISE EXCEPTION 'sqlsem: of a queue limit, key_limit, rate and key_rate can be set, and of a key limit, rate and weight; not %',
            {schema}.escape_control_chars(p_what) USING ERRCODE = '22023';
    ELSIF p_value < v_minimum THEN
        RAISE EXCEPTION 'sqlsem: a % must be % or more, not %', p_what, v_minimum, p_value USING ERRCODE = '22023';
    ELSIF (p_per_ms IS NOT NULL) <> (v_is_rate AND p_value IS NOT NULL) OR p_per_ms < 1 THEN
        RAISE EXCEPTION 'sqlsem: a rate needs its window, per_ms, from 1 to 2147483647, and nothing else has one; not %',
            coalesce(p_per_ms::text, 'NULL') USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.require_read_committed('setting a limit');
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '60s', true);
    END IF;
    -- Wait for the claims that saw no limit. Even if there is a row, as another session may be removing it now.
    PERFORM {schema}.wait_for_claims();
    INSERT INTO {schema}.queue_setting (queue_name) VALUES (p_queue) ON CONFLICT DO NOTHING;
    SELECT * INTO v_queue FROM {schema}.queue_setting AS s WHERE s.queue_name = p_queue FOR UPDATE;
    v_new := concat(p_value, ' in ' || p_per_ms || ' ms');
    IF p_key IS NULL THEN
        v_old := CASE p_what WHEN 'limit' THEN v_queue.task_limit::text WHEN 'key_limit' THEN v_queue.key_limit::text
                             WHEN 'rate' THEN concat(v_queue.task_rate, ' in ' || v_queue.task_ms || ' ms')
                             ELSE concat(v_queue.key_rate, ' in ' || v_queue.key_ms || ' ms') END;
        UPDATE {schema}.queue_setting AS s
        SET task_limit = CASE p_what WHEN 'limit' THEN p_value ELSE s.task_limit END,
            key_limit = CASE p_what WHEN 'key_limit' THEN p_value ELSE s.key_limit END,
            task_rate = CASE p_what WHEN 'rate' THEN p_value ELSE s.task_rate END,
            task_ms = CASE p_what WHEN 'rate' THEN p_per_ms ELSE s.task_ms END,
            key_rate = CASE p_what WHEN 'key_rate' THEN p_value ELSE s.key_rate END,
            key_ms = CASE p_what WHEN 'key_rate' THEN p_per_ms ELSE s.key_ms END,
            set_at = clock_timestamp(), set_by = session_user
        WHERE s.queue_name = p_queue;
    ELSE
        INSERT INTO {schema}.queue_key (queue_name, task_key) VALUES (p_queue, p_key) ON CONFLICT DO NOTHING;
        SELECT * INTO v_key FROM {schema}.queue_key AS k WHERE k.queue_name = p_queue AND k.task_key = p_key;
        v_old := CASE p_what WHEN 'limit' THEN v_key.task_limit::text WHEN 'weight' THEN v_key.weight::text
                             ELSE concat(v_key.task_rate, ' in ' || v_key.task_ms || ' ms') END;
        UPDATE {schema}.queue_key AS k
        SET task_limit = CASE p_what WHEN 'limit' THEN p_value ELSE k.task_limit END,
            weight = CASE p_what WHEN 'weight' THEN p_value ELSE k.weight END,
            task_rate = CASE p_what WHEN 'rate' THEN p_value ELSE k.task_rate END,
            task_ms = CASE p_what WHEN 'rate' THEN p_per_ms ELSE k.task_ms END,
            set_at = clock_timestamp(), set_by = session_user
        WHERE k.queue_name = p_queue AND k.task_key = p_key;
        DELETE FROM {schema}.queue_key AS k
        WHERE k.queue_name = p_queue AND k.task_key = p_key AND k.task_limit IS NULL AND k.weight IS NULL AND k.task_rate IS NULL;
    END IF;
    DELETE FROM {schema}.queue_setting AS s
    WHERE s.queue_name = p_queue AND s.task_limit IS NULL AND s.key_limit IS NULL AND s.task_rate IS NULL AND s.key_rate IS NULL
      AND NOT EXISTS (SELECT FROM {schema}.queue_key AS k WHERE k.queue_name = p_queue);
    IF v_is_rate THEN
        DELETE FROM {schema}.queue_wait AS w WHERE w.queue_name = p_queue;  -- the new rate may have room
    END IF;
    IF coalesce(v_old, '') <> v_new THEN
        PERFORM {schema}.note_operation(p_what, NULL, NULL, p_queue, NULL, concat(p_key || ': ', v_old), concat(p_key || ': ', v_new));
        PERFORM {schema}.notify_tasks(p_queue, NULL);
    END IF;
END
$$;

-- Return the limits of one queue or all: a row for the queue (task_key NULL), and one for each key with a setting.
-- task_per, key_per: the windows of the rates, in seconds.
CREATE OR REPLACE FUNCTION {schema}.queue_limits(p_queue varchar DEFAULT NULL)
RETURNS TABLE (queue_name varchar, task_key varchar, task_limit integer, key_limit integer, weight integer, set_at timestamptz, set_by name,
               task_rate integer, task_per float, key_rate integer, key_per float) {sql_indexed_definer}
    SELECT * FROM (
        SELECT s.queue_name, NULL::varchar AS task_key, s.task_limit, s.key_limit, NULL::integer AS weight, s.set_at, s.set_by,
               s.task_rate, s.task_ms / 1000.0::float, s.key_rate, s.key_ms / 1000.0::float
        FROM (SELECT * FROM {schema}.queue_setting AS q WHERE p_queue IS NULL
              UNION ALL
              SELECT * FROM {schema}.queue_setting AS q WHERE q.queue_name = p_queue) AS s
        UNION ALL
        SELECT k.queue_name, k.task_key, k.task_limit, NULL, k.weight, k.set_at, k.set_by, k.task_rate, k.task_ms / 1000.0::float,
               NULL, NULL
        FROM (SELECT * FROM {schema}.queue_key AS q WHERE p_queue IS NULL
              UNION ALL
              SELECT * FROM {schema}.queue_key AS q WHERE q.queue_name = p_queue) AS k) AS a
    ORDER BY a.queue_name, a.task_key NULLS FIRST
$$;

-- Return the rates that claims have found used up, of one queue or all, and the seconds until there is room again.
-- task_key NULL: the queue's own rate.
CREATE OR REPLACE FUNCTION {schema}.queue_waits(p_queue varchar DEFAULT NULL)
RETURNS TABLE (queue_name varchar, task_key varchar, seconds float) {sql_indexed_definer}
    SELECT w.queue_name, nullif(w.task_key, ''), (w.free_ms - n.now_ms) / 1000.0::float
    FROM (SELECT {schema}.clock_ms() AS now_ms) AS n
    JOIN (SELECT * FROM {schema}.queue_wait AS q WHERE p_queue IS NULL
          UNION ALL
          SELECT * FROM {schema}.queue_wait AS q WHERE q.queue_name = p_queue) AS w
        ON n.now_ms >= w.since_ms AND n.now_ms < w.free_ms
    ORDER BY w.queue_name, w.task_key
$$;

-- Delete ended tasks older than setting history_days, with their log, at most p_maximum a call.
CREATE OR REPLACE FUNCTION {schema}.prune_tasks(p_maximum integer) RETURNS bigint {sql_indexed_definer}
    WITH gone AS (
        DELETE FROM {schema}.task WHERE task_id = ANY (ARRAY(
            SELECT task_id FROM {schema}.task
            WHERE NOT is_open
              AND ended_at < clock_timestamp() - (SELECT value FROM {schema}.setting WHERE name = 'history_days')::integer * interval '1 day'
            ORDER BY ended_at LIMIT greatest(p_maximum, 0) FOR UPDATE SKIP LOCKED))
        RETURNING task_id),
    log AS (DELETE FROM {schema}.task_log AS l USING gone WHERE l.task_id = gone.task_id),
    -- Marks of queues that are no longer used. (But no empty mark: an older one may be below it.)
    marks AS (DELETE FROM {schema}.task_low_water
              WHERE mark >= 0
                AND made_at < clock_timestamp() - (SELECT value FROM {schema}.setting WHERE name = 'history_days')::integer * interval '1 day'),
    -- Notes about keys that are no longer used.
    waits AS (DELETE FROM {schema}.queue_wait AS w WHERE (w.queue_name, w.task_key) IN (
                  SELECT v.queue_name, v.task_key FROM {schema}.queue_wait AS v WHERE v.free_ms < {schema}.clock_ms() - 86400000
                  LIMIT greatest(p_maximum, 0) FOR UPDATE SKIP LOCKED))
    SELECT count(*) FROM gone
$$;


-- Schedules -----------------------------------------------------------------------------------------------------

-- Tasks that are put at the times of a cron expression. Only clients evaluate these expressions; the database has the
-- next due time (next_due). A client that finds it past calls fire_schedule, which puts the task and stores the time
-- after that in one transaction, and only if no other client has done so before. The stored time must be later than now
-- (or, for a new schedule, a time that all clients' calendars have). So even if a client computes a wrong time, no
-- schedule puts a task at every poll, and none stops by itself.

-- Raise for a next time that not all clients' calendars have.
CREATE OR REPLACE FUNCTION {schema}.check_due(p_next timestamptz) RETURNS void {plpgsql_stable}
BEGIN
    IF p_next BETWEEN '0001-01-03 UTC' AND '9999-12-30 UTC' THEN
        RETURN;
    END IF;
    RAISE EXCEPTION 'sqlsem: the next time of a schedule must be from 0001-01-03 to 9999-12-30, not %', coalesce(p_next::text, 'NULL')
        USING ERRCODE = '22023';
END
$$;

-- Save a schedule, in place of one of the same name. p_options: those of a task (put_tasks_by), and `missed`.
CREATE OR REPLACE FUNCTION {schema}.save_schedule(
    p_name varchar, p_queue varchar, p_cron varchar, p_zone varchar, p_kind varchar, p_body text, p_options jsonb,
    p_next timestamptz) RETURNS void {plpgsql_indexed_definer}
DECLARE
    v_by   name;
    v_task jsonb;
BEGIN
    PERFORM {schema}.check_name('queue', p_queue);
    PERFORM {schema}.check_name('schedule', p_name);
    PERFORM {schema}.check_due(p_next);
    IF p_cron IS NULL OR p_cron !~ E'\\S' OR length(p_cron) > 255 THEN
        RAISE EXCEPTION 'sqlsem: a cron expression has 1 to 255 characters, not %', coalesce(length(p_cron)::text, 'NULL')
            USING ERRCODE = '22023';
    ELSIF p_zone IS NULL OR length(p_zone) > 64 OR NOT EXISTS (SELECT FROM pg_timezone_names AS z WHERE z.name = p_zone) THEN
        RAISE EXCEPTION 'sqlsem: the database knows no time zone %; see pg_timezone_names', coalesce({schema}.escape_control_chars(left(p_zone, 100)), 'NULL')
            USING ERRCODE = '22023';
    END IF;
    IF jsonb_typeof(p_options) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'sqlsem: the options of a schedule are a JSON object, such as {}' USING ERRCODE = '22023';
    END IF;
    v_task := jsonb_build_array(p_options || jsonb_build_object('kind', p_kind, 'body', p_body));
    PERFORM {schema}.check_tasks(v_task);
    PERFORM {schema}.check_may_lock(v_task);
    -- Raise here for values that otherwise only the put of a task would refuse.
    PERFORM FROM jsonb_to_recordset(v_task)
        AS r (note text, on_failure text, "order" numeric, after_ms numeric, max_attempts numeric, backoff_ms numeric,
              time_limit_ms numeric, priority numeric)
    WHERE r.on_failure NOT IN ('stop', 'continue') OR length(r.note) > 1000
       OR EXISTS (SELECT FROM unnest(ARRAY[r."order", r.after_ms, r.max_attempts, r.backoff_ms, r.time_limit_ms, r.priority]) AS n
                  WHERE n <> trunc(n));
    IF FOUND THEN
        RAISE EXCEPTION 'sqlsem: options of a task: numbers are whole, on_failure is stop or continue, and a note has at most 1000 characters'
            USING ERRCODE = '22023';
    END IF;
    INSERT INTO {schema}.schedule AS s (schedule_name, queue_name, cron, time_zone, kind, body, options, next_due, put_by)
    VALUES (p_name, p_queue, p_cron, p_zone, p_kind, p_body, p_options, p_next, session_user)
    ON CONFLICT (schedule_name) DO UPDATE
    SET queue_name = p_queue, cron = p_cron, time_zone = p_zone, kind = p_kind, body = p_body, options = p_options,
        -- (A due time that no client has noticed yet is not lost if the same schedule is saved again.)
        next_due = CASE WHEN s.cron = p_cron AND s.time_zone = p_zone AND s.paused_at IS NULL THEN coalesce(s.next_due, p_next)
                        ELSE p_next END
    WHERE s.put_by = session_user OR {schema}.has_role('operator');
    IF NOT FOUND THEN
        v_by := (SELECT s.put_by FROM {schema}.schedule AS s WHERE s.schedule_name = p_name);
        RAISE EXCEPTION 'sqlsem: schedule % is of login %; choose another name', {schema}.escape_control_chars(p_name), {schema}.escape_control_chars(v_by::text)
            USING ERRCODE = '42501';
    END IF;
END
$$;

-- Call recover_tasks; return true in due if a schedule of the queue is due.
CREATE OR REPLACE FUNCTION {schema}.maintain_queue(p_queue varchar, p_mine bigint, OUT recovered integer, OUT due boolean)
{plpgsql_indexed_definer}
BEGIN
    recovered := {schema}.recover_tasks(p_queue, p_mine);
    due := EXISTS (SELECT FROM {schema}.schedule AS s
                   WHERE s.queue_name = p_queue AND s.paused_at IS NULL AND s.next_due <= clock_timestamp());
END
$$;

-- Put the task of a schedule for the due time p_due. p_next: the time after it. p_last: the latest of the due times, if
-- this one task is put for several. p_put false: skip that time, as the schedule says for missed times. done: false if
-- another client was faster, or p_next has passed. A skipped time is recorded as an operation, and so is a next time
-- more than a year away.
CREATE OR REPLACE FUNCTION {schema}.fire_schedule(
    p_name varchar, p_due timestamptz, p_last timestamptz, p_next timestamptz, p_put boolean, OUT done boolean, OUT task_id bigint)
{plpgsql_indexed_definer}
DECLARE
    v_schedule {schema}.schedule;
BEGIN
    PERFORM {schema}.check_due(p_next);
    UPDATE {schema}.schedule AS s
    SET next_due = p_next, last_due = CASE WHEN p_put THEN least(greatest(p_last, p_due), clock_timestamp()) ELSE s.last_due END
    WHERE s.schedule_name = p_name AND s.next_due = p_due AND s.paused_at IS NULL AND s.next_due <= clock_timestamp()
      AND p_next > clock_timestamp() AND (p_put OR s.options->>'missed' = 'skip')
    RETURNING s.* INTO v_schedule;
    done := FOUND;
    IF done AND (NOT coalesce(p_put, false) OR p_next > clock_timestamp() + interval '366 days') THEN
        PERFORM {schema}.note_operation(CASE WHEN p_put THEN 'postpone' ELSE 'skip' END, NULL, NULL, v_schedule.queue_name, NULL,
                                        'schedule ' || p_name, 'next ' || p_next);
    END IF;
    IF done AND p_put THEN
        task_id := (SELECT p FROM {schema}.put_tasks_by(
            v_schedule.queue_name, replace(gen_random_uuid()::text, '-', ''),
            jsonb_build_array(v_schedule.options || jsonb_build_object('kind', v_schedule.kind, 'body', v_schedule.body)),
            v_schedule.put_by) AS p);
    END IF;
END
$$;

-- Change a schedule: 'pause', 'resume' (from p_next on: times that were due meanwhile are skipped) or 'remove'. Return
-- false if there is none, or it is another login's and this login is no operator.
CREATE OR REPLACE FUNCTION {schema}.set_schedule(p_name varchar, p_what varchar, p_next timestamptz) RETURNS boolean
{plpgsql_indexed_definer}
DECLARE
    v_queue varchar;
BEGIN
    SELECT s.queue_name INTO v_queue FROM {schema}.schedule AS s
    WHERE s.schedule_name = p_name AND (s.put_by = session_user OR {schema}.has_role('operator')) FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF p_what = 'remove' THEN
        DELETE FROM {schema}.schedule WHERE schedule_name = p_name;
    ELSIF p_what = 'pause' THEN
        UPDATE {schema}.schedule SET paused_at = coalesce(paused_at, clock_timestamp()), paused_by = coalesce(paused_by, session_user)
        WHERE schedule_name = p_name;
    ELSIF p_what = 'resume' THEN
        PERFORM {schema}.check_due(p_next);
        UPDATE {schema}.schedule SET next_due = CASE WHEN paused_at IS NULL THEN next_due ELSE p_next END, paused_at = NULL, paused_by = NULL
        WHERE schedule_name = p_name;
    ELSE
        RAISE EXCEPTION 'sqlsem: a schedule can be told to pause, resume or remove, not %', {schema}.escape_control_chars(p_what)
            USING ERRCODE = '22023';
    END IF;
    INSERT INTO {schema}.operation (program, action, queue_name, old_value)
    VALUES (left(current_setting('application_name'), 255), p_what, v_queue, 'schedule ' || p_name);
    RETURN true;
END
$$;

-- Return the schedules, by name. A login that may only put sees its own.
CREATE OR REPLACE FUNCTION {schema}.list_schedules(p_name varchar DEFAULT NULL, p_queue varchar DEFAULT NULL)
RETURNS TABLE (schedule_name varchar, queue_name varchar, cron varchar, time_zone varchar, kind varchar, body text, options text,
               next_due timestamptz, last_due timestamptz, put_at timestamptz, put_by name, paused_at timestamptz, paused_by name,
               taken_at timestamptz) {sql_indexed_definer}
    SELECT s.schedule_name, s.queue_name, s.cron, s.time_zone, s.kind, s.body, s.options::text,
           CASE WHEN s.next_due IS NOT NULL THEN greatest(least(s.next_due, '9999-12-30 UTC'), '0001-01-03 UTC') END,
           CASE WHEN s.last_due IS NOT NULL THEN greatest(least(s.last_due, '9999-12-30 UTC'), '0001-01-03 UTC') END, s.put_at,
           s.put_by, s.paused_at, s.paused_by, clock_timestamp()
    FROM (SELECT * FROM {schema}.schedule AS q WHERE p_name IS NULL
          UNION ALL
          SELECT * FROM {schema}.schedule AS q WHERE q.schedule_name = p_name) AS s
    WHERE (p_queue IS NULL OR s.queue_name = p_queue)
      AND (s.put_by = session_user OR {schema}.has_role('worker', 'operator', 'reader'))
    ORDER BY s.schedule_name
$$;


-- For sessions --------------------------------------------------------------------------------------------------

-- Put one task, a SQL text if kind is not given; return its number. May be part of the caller's transaction.
-- unique_key: while a task with this key is open, put none, and return that task's number. replace_key: replace the
-- open task with this key. key: the task's key; workers are divided between the keys. priority: among the tasks of its
-- key, higher ones first. locks: the locks that it needs to run, such as '[{"resource": "customers", "access": "write",
-- "limit": 1}]'; it starts, on any worker, when all of them can be granted.
CREATE OR REPLACE FUNCTION {schema}.put(
    queue text, body text, kind text DEFAULT 'sql', "order" integer DEFAULT 0, after_seconds double precision DEFAULT 0,
    max_attempts integer DEFAULT 1, note text DEFAULT NULL, on_failure text DEFAULT 'stop',
    backoff_seconds double precision DEFAULT 1, unique_key text DEFAULT NULL, replace_key text DEFAULT NULL,
    time_limit_seconds double precision DEFAULT NULL, key text DEFAULT NULL, priority integer DEFAULT 0,
    locks jsonb DEFAULT NULL) RETURNS bigint {plpgsql}
BEGIN
    IF NOT (after_seconds >= 0 AND after_seconds <= 315360000) THEN  -- nor NaN
        RAISE EXCEPTION 'sqlsem: after_seconds must be from 0 to ten years, not %', after_seconds USING ERRCODE = '22023';
    ELSIF NOT (backoff_seconds >= 0 AND backoff_seconds <= 300) THEN
        RAISE EXCEPTION 'sqlsem: backoff_seconds must be from 0 to 300, not %', backoff_seconds USING ERRCODE = '22023';
    ELSIF NOT (time_limit_seconds > 0 AND time_limit_seconds <= 2147483) THEN
        RAISE EXCEPTION 'sqlsem: time_limit_seconds must be above 0 and at most 2147483, not %', time_limit_seconds
            USING ERRCODE = '22023';
    END IF;
    RETURN (SELECT p FROM {schema}.put_tasks_once(queue, replace(gen_random_uuid()::text, '-', ''), jsonb_build_array(jsonb_build_object(
        'kind', kind, 'body', body, 'order', "order", 'after_ms', (after_seconds * 1000)::bigint,
        'max_attempts', max_attempts, 'note', note, 'on_failure', on_failure,
        'backoff_ms', (backoff_seconds * 1000)::integer, 'unique', unique_key, 'replace', replace_key,
        'time_limit_ms', ceil(time_limit_seconds * 1000)::bigint, 'key', key, 'priority', priority, 'locks', locks))) AS p);
END
$$;

-- Claim a task for this session. (It runs with the caller's rights, with which it can see when this session began.)
CREATE OR REPLACE FUNCTION {schema}.session_claim(p_queue text, OUT member bigint, OUT task_id bigint, OUT kind varchar,
                                                  OUT body text, OUT attempt integer) {plpgsql}
BEGIN
    PERFORM {schema}.check_name('queue', p_queue);
    member := {schema}.session_member(NULL);
    SELECT c.task_id, c.kind, c.body, c.attempt INTO task_id, kind, body, attempt
    FROM {schema}.claim_blocked(member, p_queue, {schema}.session_id(), NULL, false, {schema}.session_id(), {schema}.session_id()) AS c;
    IF task_id IS NULL THEN
        SELECT c.task_id, c.kind, c.body, c.attempt INTO task_id, kind, body, attempt
        FROM {schema}.claim_task(member, p_queue, {schema}.session_id(), NULL, false) AS c;
    END IF;
    IF task_id IS NULL THEN
        PERFORM {schema}.recover_tasks(p_queue, member);
    END IF;
END
$$;

-- End the tasks of an earlier call of `work` that was interrupted between a claim and the task's end. (No other session
-- ends them, as this session is alive.)
CREATE OR REPLACE FUNCTION {schema}.recover_session_tasks(p_queue text) RETURNS void {plpgsql_indexed_definer}
DECLARE
    v_member bigint;
BEGIN
    PERFORM {schema}.check_name('queue', p_queue);
    v_member := {schema}.session_member(NULL);
    PERFORM {schema}.end_task(v_member, t.task_id, t.attempt, 'failed', NULL, 'it was broken off by its client')
    FROM {schema}.task AS t
    WHERE t.status = 'running' AND t.member_id = v_member AND t.claim_uid IS NULL;
END
$$;

-- Return, for a task that this session's member runs, the login that requested its cancellation, and its time limit (s)
-- if it has run longer.
CREATE OR REPLACE FUNCTION {schema}.session_task_controls(p_member bigint, p_task bigint, OUT cancel_asked_by name, OUT passed_limit float)
{sql_indexed_definer}
    SELECT a.cancel_asked_by,
           CASE WHEN t.claimed_at < clock_timestamp() - a.time_limit * interval '1 second' THEN a.time_limit END
    FROM {schema}.task_controls(p_member, ARRAY[p_task]) AS a JOIN {schema}.task AS t ON t.task_id = a.task_id
$$;

-- Return the seconds since a time. For work, which commits, and so cannot set its search_path.
CREATE OR REPLACE FUNCTION {schema}.seconds_since(p_time timestamptz) RETURNS double precision
{sql} SELECT extract(epoch FROM clock_timestamp() - p_time)::double precision $$;

-- Return the error text of a task, as psql shows an error.
CREATE OR REPLACE FUNCTION {schema}.format_error(p_state text, p_message text, p_detail text, p_hint text, p_context text)
RETURNS text {sql_immutable}
    -- (Without the last line of the context, which is a position in `work`.)
    SELECT p_state || ': ' || p_message || coalesce(E'\nDETAIL: ' || nullif(p_detail, ''), '')
           || coalesce(E'\nHINT: ' || nullif(p_hint, ''), '')
           || coalesce(E'\nCONTEXT: ' || nullif(regexp_replace(p_context, E'\\n?PL/pgSQL function [^\\n]*\\.work\\([^\\n]*$', ''), ''), '')
$$;

-- Run the SQL tasks of a queue, one after the other, with the caller's rights, until there was none for idle_seconds.
-- Call it from scheduled jobs, in as many sessions as should work side by side. done and failed count the tasks.
-- A task's text may be several statements, but none that ends a transaction. The task and the record of its end are one
-- transaction, so that its work in this database is done once. Settings that a text makes stay with the session.
CREATE OR REPLACE PROCEDURE {schema}.work(
    queue text, idle_seconds double precision DEFAULT 30, INOUT done integer DEFAULT 0, INOUT failed integer DEFAULT 0)
LANGUAGE plpgsql
AS $$
DECLARE
    v_claim  pg_catalog.record;
    v_controls pg_catalog.record;
    v_since  pg_catalog.timestamptz := pg_catalog.clock_timestamp();
    v_pause  double precision := 0.005;
    v_error  pg_catalog.text;
    v_state  pg_catalog.text;
    v_detail pg_catalog.text;
    v_hint   pg_catalog.text;
    v_where  pg_catalog.text;
    v_status pg_catalog.text;
    v_cancel_message pg_catalog.text;  -- the message of a cancel or timeout
    v_outcome pg_catalog.text;  -- the outcome of a task that has not finished
BEGIN
    CALL {schema}.require_autocommit('work');
    IF idle_seconds IS NULL OR NOT idle_seconds OPERATOR(pg_catalog.>=) 0::double precision THEN
        RAISE EXCEPTION 'sqlsem: idle_seconds must be 0 or more, not %', idle_seconds USING ERRCODE = '22023';
    END IF;
    done := 0;
    failed := 0;
    PERFORM {schema}.recover_session_tasks(queue);
    COMMIT;
    LOOP
        v_error := NULL;
        v_status := NULL;
        v_cancel_message := NULL;
        v_outcome := 'failed';
        SELECT * INTO v_claim FROM {schema}.session_claim(queue);
        COMMIT;
        IF v_claim.task_id IS NULL THEN
            EXIT WHEN {schema}.seconds_since(v_since) OPERATOR(pg_catalog.>=) idle_seconds;
            PERFORM pg_catalog.pg_sleep(v_pause);
            COMMIT;
            v_pause := least(v_pause OPERATOR(pg_catalog.*) 1.5::double precision, 0.5::double precision);
            CONTINUE;
        END IF;
        -- Run the text once; then try until its outcome is recorded, as a cancel may interrupt that, too.
        LOOP
            BEGIN
                IF v_error IS NOT NULL THEN
                    IF v_cancel_message IS NOT NULL THEN
                        -- A timeout or a cancel. Record it for the task first. Later raise it to the caller, unless it
                        -- was meant for this task alone.
                        SELECT * INTO v_controls FROM {schema}.session_task_controls(v_claim.member, v_claim.task_id);
                        IF v_controls.cancel_asked_by IS NOT NULL THEN
                            v_outcome := 'cancelled';
                        ELSIF v_controls.passed_limit IS NOT NULL THEN
                            v_error := pg_catalog.format(
                                'It ran for longer than its time limit of %s s, and was ended', v_controls.passed_limit);
                        END IF;
                    END IF;
                    v_status := {schema}.end_task(v_claim.member, v_claim.task_id, v_claim.attempt, v_outcome, NULL, v_error);
                ELSIF v_claim.kind::pg_catalog.text OPERATOR(pg_catalog.<>) 'sql'::pg_catalog.text THEN
                    v_error := 'a database session runs SQL, not kind '::pg_catalog.text OPERATOR(pg_catalog.||) v_claim.kind::pg_catalog.text
                               OPERATOR(pg_catalog.||) '; use sqlsem work'::pg_catalog.text;
                    CONTINUE;
                ELSE
                    EXECUTE v_claim.body;
                    -- Let deferred constraints fail here, and a role that the text has set and that may not record the
                    -- end: both are the text's fault, so undo it, and record the failure for the task.
                    SET CONSTRAINTS ALL IMMEDIATE;
                    v_status := {schema}.end_task(v_claim.member, v_claim.task_id, v_claim.attempt, 'finished', NULL, NULL);
                END IF;
                EXIT;
            EXCEPTION WHEN query_canceled THEN
                GET STACKED DIAGNOSTICS v_cancel_message = MESSAGE_TEXT;
                v_error := coalesce(v_error, '57014: '::pg_catalog.text OPERATOR(pg_catalog.||) v_cancel_message);
            WHEN OTHERS THEN
                IF v_error IS NOT NULL THEN
                    RAISE;
                END IF;
                GET STACKED DIAGNOSTICS v_error = MESSAGE_TEXT, v_state = RETURNED_SQLSTATE, v_detail = PG_EXCEPTION_DETAIL,
                    v_hint = PG_EXCEPTION_HINT, v_where = PG_EXCEPTION_CONTEXT;
                v_error := {schema}.format_error(v_state, v_error, v_detail, v_hint, v_where);
            END;
        END LOOP;
        IF v_cancel_message IS NOT NULL THEN
            IF v_controls.cancel_asked_by IS NOT NULL OR v_controls.passed_limit IS NOT NULL THEN
                v_cancel_message := NULL;
            END IF;
        END IF;
        -- The work and its end are committed together, or not at all: the task may belong to another worker by now.
        IF v_status IS NULL THEN
            ROLLBACK;
            v_error := 'it was given up';
            RAISE WARNING 'sqlsem: task % was given up while it ran, and was undone', v_claim.task_id
                USING HINT = 'Did its text free this session''s advisory locks?';
        ELSE
            COMMIT;
        END IF;
        IF v_cancel_message IS NOT NULL THEN
            RAISE EXCEPTION 'sqlsem: task % was broken off: %', v_claim.task_id, v_cancel_message
                USING ERRCODE = '57014', HINT = 'Give work all the time that it needs (statement_timeout = 0).';
        ELSIF v_error IS NULL THEN
            done := done OPERATOR(pg_catalog.+) 1;
        ELSIF v_outcome OPERATOR(pg_catalog.=) 'failed'::pg_catalog.text THEN
            failed := failed OPERATOR(pg_catalog.+) 1;
        END IF;
        v_since := pg_catalog.clock_timestamp();
        v_pause := 0.005;
    END LOOP;
END
$$;
