-- sqlsem, conversions for PostgreSQL: a reader becomes the writer, a writer becomes a reader, without releasing the
-- lock. May be run again at any time. Described in docs/howto/readers-writer.md.
--
-- A reader that upgrades has the access type 'upgrade' until all other holders have left. No request fits beside it, so
-- each later request waits. But waiting readers behind it may already be eligible, and may have seen that: once
-- eligible they must stay so. So begin_upgrade grants these readers first, and the upgrading reader waits for them as
-- well.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Give a granted row another access type, and record the time under the old one. Return false if the row is gone or
-- revoked, or has another access type than p_was.
CREATE OR REPLACE FUNCTION {schema}.convert_row(
    p_resource varchar, p_position bigint, p_was varchar, p_access varchar, p_outcome varchar) RETURNS boolean {sql}
    WITH mine AS (SELECT * FROM {schema}.{table}
                  WHERE resource_id = p_resource AND queue_position = p_position AND access_type = p_was AND revoked_at IS NULL
                  FOR NO KEY UPDATE),
         kept AS (INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id,
                                                owner, note, requested_at, granted_at, outcome)
                  SELECT resource_id, queue_position, requesting_id, replace(access_type, 'upgrade', 'read'), weight, member_id,
                         owner, note, requested_at, granted_at, p_outcome FROM mine),
         done AS (UPDATE {schema}.{table} AS t SET access_type = p_access, granted_at = clock_timestamp() FROM mine
                  WHERE t.resource_id = mine.resource_id AND t.queue_position = mine.queue_position RETURNING 1)
    SELECT count(*) > 0 FROM done
$$;


-- Begin the upgrade of a reader. A reader that is alone becomes the writer at once. With p_try nothing is changed if it
-- is not alone. May be repeated. Return:
--   0  the reader is the writer
--   1  begun: call upgrade
--  -1  not begun: there are other holders (p_try); or only a pause or a cap blocks readers behind it; or another
--      upgrading reader is dead or being revoked. Call again in a moment
--  -2  the row is gone: released, reaped or revoked
--  -3  another reader is upgrading: each would wait for the other. Nothing was changed
CREATE OR REPLACE FUNCTION {schema}.begin_upgrade(
    p_resource varchar, p_position bigint, p_requesting_id varchar, p_try boolean) RETURNS integer
{plpgsql_generic_definer}
DECLARE
    v_row   record;
    v_other bigint;
    v_free  bigint[];
    v_held  boolean;
    v_again boolean := false;
BEGIN
    PERFORM {schema}.require_outside_transaction('begin_upgrade');
    -- Until this commits, no request registers and no other reader begins to upgrade.
    PERFORM {schema}.take_exclusive_lock({schema}.lock_class(0), hashtext(p_resource), 'the gate of ' || quote_literal(p_resource));
    SELECT access_type, concurrency_limit, member_id, granted_at, revoked_at INTO v_row
    FROM {schema}.{table} AS t WHERE resource_id = p_resource AND queue_position = p_position AND requesting_id = p_requesting_id
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = t.member_id AND m.login = session_user);
    IF NOT FOUND OR v_row.granted_at IS NULL OR v_row.revoked_at IS NOT NULL OR NOT {schema}.touch_member(v_row.member_id) THEN
        RETURN -2;
    ELSIF v_row.access_type NOT IN ('read', 'upgrade', 'write') OR v_row.concurrency_limit IS DISTINCT FROM 1 THEN
        RAISE EXCEPTION 'sqlsem: position % on % is no reader of limit 1 and cannot be upgraded', p_position, quote_literal(p_resource)
            USING ERRCODE = '22023';
    ELSIF v_row.access_type <> 'read' THEN
        RETURN CASE v_row.access_type WHEN 'write' THEN 0 ELSE 1 END;
    END IF;
    SELECT min(queue_position) INTO v_other FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807)
    WHERE queue_position <> p_position AND access_type = 'upgrade';
    IF v_other IS NOT NULL THEN
        PERFORM {schema}.check_if_dead(p_resource, v_other, v_row.member_id);
        IF EXISTS (SELECT FROM {schema}.{table} AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
                   WHERE t.resource_id = p_resource AND t.queue_position = v_other
                     AND t.revoked_at IS NULL AND m.missing_since IS NULL) THEN
            RETURN -3;
        ELSIF EXISTS (SELECT FROM {schema}.{table} WHERE resource_id = p_resource AND queue_position = v_other) THEN
            RETURN -1;
        END IF;
    END IF;
    LOOP
        -- Lock the rows between this reader and the readers behind it, so that none leaves before this commits:
        -- otherwise a reader would find itself eligible that this transaction takes for blocked.
        PERFORM FROM {schema}.{table}
        WHERE resource_id = p_resource AND access_type <> 'read' AND queue_position > p_position
          AND queue_position < (SELECT max(queue_position) FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807)
                                WHERE access_type = 'read' AND granted_at IS NULL)
        ORDER BY queue_position FOR KEY SHARE;
        -- feature: queue
        -- A blocked task must hold nothing, so its rows are not granted. Lock them: a claim of such a task that is
        -- under way ends first, and its rows are granted then; any later claim finds them blocked.
        PERFORM FROM {schema}.{table}
        WHERE resource_id = p_resource AND access_type = 'read' AND granted_at IS NULL AND queue_position > p_position
          AND member_id IN (SELECT p.member_id FROM {schema}.queue_proxy AS p)
        ORDER BY queue_position FOR NO KEY UPDATE;
        -- end of feature: queue
        -- Apply the rule to the waiting readers behind: find the readers that fit now, and the readers that would fit
        -- but for the operator's pause or cap. (They may have learned of these later than this session.)
        SELECT array_agg(queue_position), bool_or(paused OR load + weight > cap) INTO v_free, v_held
        FROM (SELECT queue_position, access_type, granted_at, revoked_at, weight, member_id,
                     coalesce(sum(weight) FILTER (WHERE access_type <> 'read') OVER ahead, 0) AS load,
                     least(concurrency_limit, min(concurrency_limit) FILTER (WHERE access_type <> 'read') OVER ahead) AS declared
              FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807)
              WINDOW ahead AS (ORDER BY queue_position ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS r
        CROSS JOIN (SELECT cap, paused_at IS NOT NULL AS paused FROM {schema}.effective_settings(p_resource)) AS o
        WHERE queue_position > p_position AND access_type = 'read' AND granted_at IS NULL AND revoked_at IS NULL
          -- feature: queue
          AND NOT EXISTS (SELECT FROM {schema}.queue_proxy AS p WHERE p.member_id = r.member_id)
          -- end of feature: queue
          AND coalesce(load + weight <= declared, true);  -- (also rows of dead members: they are reaped later)
        SELECT queue_position INTO v_other FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807)
        WHERE queue_position <> p_position AND (queue_position < p_position OR granted_at IS NOT NULL) LIMIT 1;
        IF v_other IS NULL AND v_free IS NULL THEN
            RETURN CASE WHEN {schema}.convert_row(p_resource, p_position, 'read', 'write', 'upgraded') THEN 0 ELSE -2 END;
        END IF;
        EXIT WHEN NOT p_try;
        -- Test the owners: a dead one must not make a try fail.
        IF v_again OR NOT {schema}.reap_dead_members(p_resource, v_row.member_id) THEN
            RETURN -1;
        END IF;
        v_again := true;
    END LOOP;
    IF v_held THEN
        RETURN -1;
    END IF;
    UPDATE {schema}.{table} SET granted_at = clock_timestamp()
    WHERE resource_id = p_resource AND queue_position = ANY (v_free) AND granted_at IS NULL;
    UPDATE {schema}.{table} SET access_type = 'upgrade'
    WHERE resource_id = p_resource AND queue_position = p_position AND revoked_at IS NULL;
    RETURN CASE WHEN FOUND THEN 1 ELSE -2 END;
END
$$;


-- Wait up to p_timeout_ms until a reader that has begun to upgrade is alone, and so the writer. Wherever there is a
-- lock to wait for, sleep in PostgreSQL's queue of that lock, and poll otherwise. Return:
--   0  the reader is the writer   -1  not yet; or the row no longer upgrades
--   1  call again at once: this transaction has written something that other sessions should see
--  -2  the row is gone: released, reaped or revoked
CREATE OR REPLACE FUNCTION {schema}.upgrade(
    p_resource varchar, p_position bigint, p_requesting_id varchar, p_timeout_ms integer) RETURNS integer
{plpgsql_generic_definer}
DECLARE
    v_deadline timestamptz := clock_timestamp() + p_timeout_ms * interval '1 millisecond';
    v_row      record;
    v_other    bigint;
    v_key      integer;
    v_left     integer;
    v_pause    float := 2;  -- ms; grows while nothing happens
    v_again    boolean := false;
BEGIN
    SELECT access_type, member_id, granted_at, revoked_at INTO v_row
    FROM {schema}.{table} AS t WHERE resource_id = p_resource AND queue_position = p_position AND requesting_id = p_requesting_id
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = t.member_id AND m.login = session_user);
    IF NOT FOUND OR v_row.granted_at IS NULL OR v_row.revoked_at IS NOT NULL THEN
        RETURN -2;
    ELSIF v_row.access_type <> 'upgrade' THEN
        RETURN CASE v_row.access_type WHEN 'write' THEN 0 ELSE -1 END;
    END IF;
    LOOP
        -- Wait for each row with granted_at, and for each row ahead, which can be granted without regard to this one.
        -- No other row can be granted.
        SELECT queue_position INTO v_other FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807)
        WHERE queue_position <> p_position AND (queue_position < p_position OR granted_at IS NOT NULL) LIMIT 1;
        IF v_other IS NULL THEN
            IF NOT {schema}.touch_member(v_row.member_id) THEN
                RETURN -2;
            END IF;
            RETURN CASE WHEN {schema}.convert_row(p_resource, p_position, 'upgrade', 'write', 'upgraded') THEN 0 ELSE 1 END;
        END IF;
        v_left := ceil(1000 * extract(epoch FROM v_deadline - clock_timestamp()));
        IF v_left <= 0 THEN
            -- At the end of each call test the other owners, too, as wait does.
            RETURN CASE WHEN {schema}.reap_dead_members(p_resource, v_row.member_id) THEN 1 ELSE -1 END;
        END IF;
        -- Sleep for 2 s at most: an upgrade of the tables waits for this transaction (see wait).
        v_left := least(v_left, 2000);
        IF v_again AND {schema}.is_upgraded() THEN
            RETURN -1;
        END IF;
        v_again := true;
        v_key := {schema}.lock_key(v_other);
        IF {schema}.is_free({schema}.lock_class(2), v_key) THEN
            -- No session holds the lock: the row was released this instant, or its owner has no session, or has died.
            IF {schema}.check_if_dead(p_resource, v_other, v_row.member_id) THEN
                RETURN 1;
            END IF;
            PERFORM pg_sleep(least(v_left, v_pause) / 1000);
            v_pause := least(v_pause * 1.5, 100);
            CONTINUE;
        END IF;
        PERFORM {schema}.wait_until_lock_free({schema}.lock_class(2), v_key, v_left);
    END LOOP;
END
$$;


-- Turn a writer into a reader, or end the upgrade of a reader, and wake the waiters behind that may now be eligible.
-- Return 0 if done, or if the row is a reader's already; -1 if this requester has no such granted row. May be repeated.
-- Waits (lock_timeout) for an open transaction that has pinned the row. Afterwards the session calls
-- retake_wakeup_lock.
-- It takes the gate although a downgrade blocks no request: an earlier begin_upgrade of a client that no longer waits
-- for it may still wait for the gate, and has to come first.
CREATE OR REPLACE FUNCTION {schema}.downgrade(p_resource varchar, p_position bigint, p_requesting_id varchar) RETURNS integer
{plpgsql_indexed_definer}
DECLARE
    v_row record;
BEGIN
    PERFORM {schema}.require_outside_transaction('downgrade');
    PERFORM {schema}.take_exclusive_lock({schema}.lock_class(0), hashtext(p_resource), 'the gate of ' || quote_literal(p_resource));
    SELECT access_type, concurrency_limit INTO v_row
    FROM {schema}.{table} AS t WHERE resource_id = p_resource AND queue_position = p_position AND requesting_id = p_requesting_id
      AND granted_at IS NOT NULL AND revoked_at IS NULL
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = t.member_id AND m.login = session_user)
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN -1;
    ELSIF v_row.access_type NOT IN ('read', 'upgrade', 'write') OR v_row.concurrency_limit IS DISTINCT FROM 1 THEN
        RAISE EXCEPTION 'sqlsem: position % on % is no writer of limit 1 and cannot be downgraded', p_position, quote_literal(p_resource)
            USING ERRCODE = '22023';
    ELSIF v_row.access_type = 'read' THEN
        RETURN 0;
    ELSIF v_row.access_type = 'write' THEN
        PERFORM {schema}.convert_row(p_resource, p_position, 'write', 'read', 'downgraded');
    ELSE
        UPDATE {schema}.{table} SET access_type = 'read' WHERE resource_id = p_resource AND queue_position = p_position;
    END IF;
    PERFORM {schema}.release_session_lock_after_commit({schema}.lock_class(2), {schema}.lock_key(p_position));
    RETURN 0;
END
$$;


-- Take the wakeup lock of a row of this session's member again, after its release has woken the waiters. (Without the
-- lock the waiters poll.)
CREATE OR REPLACE FUNCTION {schema}.retake_wakeup_lock(p_resource varchar, p_position bigint, p_requesting_id varchar) RETURNS void
{plpgsql_indexed_definer}
BEGIN
    IF EXISTS (SELECT FROM {schema}.{table} AS t CROSS JOIN LATERAL {schema}.missing_wakeup_locks(t.member_id, ARRAY[p_position])
               WHERE t.resource_id = p_resource AND t.queue_position = p_position AND t.requesting_id = p_requesting_id) THEN
        {lock_timeout:60s}
        PERFORM pg_advisory_lock({schema}.lock_class(2), {schema}.lock_key(p_position));
    END IF;
END
$$;
