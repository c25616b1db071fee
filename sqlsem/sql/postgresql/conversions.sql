-- sqlsem, conversions for PostgreSQL: a reader becomes the writer, a writer becomes a reader, without letting go. May be
-- run again at any time. Described in docs/conversions.md.
--
-- A reader that wants to write carries the label 'upgrade' until all others have left. Nothing shares with that label,
-- so the one who comes behind it waits; and those behind who may enter already, or may just have seen that they may, are
-- let in by the statement before: "once true it stays true" holds for them, and the upgrader waits for them as well.

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

-- Gives a granted row another access type from now on, and writes down what it had been until now. False when the row is
-- gone or taken away, or has another access type than p_was.
CREATE OR REPLACE FUNCTION {schema}.convert_row(
    p_resource varchar, p_position bigint, p_was varchar, p_access varchar, p_outcome varchar) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
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


-- Has a reader begin to become the writer; where it is alone it is at once. With p_try nothing is changed otherwise. May be
-- repeated.
--   0  it writes
--   1  begun: go on with upgrade
--  -1  not begun: others are inside (p_try); or readers behind are held up by a pause or a cap alone, or another one that
--      was upgrading is dead or being taken away: look again in a moment
--  -2  the row is gone: released, reaped or taken away
--  -3  another reader is upgrading: each would wait for the other. Nothing was changed
CREATE OR REPLACE FUNCTION {schema}.begin_upgrade(
    p_resource varchar, p_position bigint, p_requesting_id varchar, p_try boolean) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_row   record;
    v_other bigint;
    v_free  bigint[];
    v_held  boolean;
    v_again boolean := false;
BEGIN
    PERFORM {schema}.require_outside_transaction('begin_upgrade');
    -- Nobody registers, and nobody else begins to upgrade, until this is committed.
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
        -- Those who stand between us and a reader behind must not leave before this is committed: that reader would
        -- see its way free while we believe it blocked.
        PERFORM FROM {schema}.{table}
        WHERE resource_id = p_resource AND access_type <> 'read' AND queue_position > p_position
          AND queue_position < (SELECT max(queue_position) FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807)
                                WHERE access_type = 'read' AND granted_at IS NULL)
        ORDER BY queue_position FOR KEY SHARE;
        -- feature: queue
        -- A parked task holds nothing, so it is not let in: it goes on waiting. One that is claimed just now is waited for, and
        -- then inside; from here on no claim finds its way free.
        PERFORM FROM {schema}.{table}
        WHERE resource_id = p_resource AND access_type = 'read' AND granted_at IS NULL AND queue_position > p_position
          AND member_id IN (SELECT p.member_id FROM {schema}.parking AS p)
        ORDER BY queue_position FOR NO KEY UPDATE;
        -- end of feature: queue
        -- The rule, for the readers behind that wait: those who fit (now, or but for the operator's pause or cap, of
        -- which they may have heard later than we did).
        SELECT array_agg(queue_position), bool_or(paused OR load + weight > cap) INTO v_free, v_held
        FROM (SELECT queue_position, access_type, granted_at, revoked_at, weight, member_id,
                     coalesce(sum(weight) FILTER (WHERE access_type <> 'read') OVER ahead, 0) AS load,
                     least(concurrency_limit, min(concurrency_limit) FILTER (WHERE access_type <> 'read') OVER ahead) AS declared
              FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807)
              WINDOW ahead AS (ORDER BY queue_position ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS r
        CROSS JOIN (SELECT cap, paused_at IS NOT NULL AS paused FROM {schema}.effective_settings(p_resource)) AS o
        WHERE queue_position > p_position AND access_type = 'read' AND granted_at IS NULL AND revoked_at IS NULL
          -- feature: queue
          AND NOT EXISTS (SELECT FROM {schema}.parking AS p WHERE p.member_id = r.member_id)
          -- end of feature: queue
          AND coalesce(load + weight <= declared, true);  -- also those that nobody attends to: they go as such
        SELECT queue_position INTO v_other FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807)
        WHERE queue_position <> p_position AND (queue_position < p_position OR granted_at IS NOT NULL) LIMIT 1;
        IF v_other IS NULL AND v_free IS NULL THEN
            RETURN CASE WHEN {schema}.convert_row(p_resource, p_position, 'read', 'write', 'upgraded') THEN 0 ELSE -2 END;
        END IF;
        EXIT WHEN NOT p_try;
        -- The dead must not stand in the way of a try.
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


-- Waits up to p_timeout_ms until a reader that has begun to upgrade is alone and the writer, asleep in the engine's lock
-- queue wherever there is a lock to wait for.
--   0  it writes          -1  not yet; or it does not upgrade any more
--   1  call again at once: something was written that others should see
--  -2  the row is gone: released, reaped or taken away
CREATE OR REPLACE FUNCTION {schema}.upgrade(
    p_resource varchar, p_position bigint, p_requesting_id varchar, p_timeout_ms integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan
AS $$
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
        -- Anyone who is inside has granted_at, or stands ahead and never saw us; nobody else can be let in.
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
            -- Once a call, look at all the others too (as wait does).
            RETURN CASE WHEN {schema}.reap_dead_members(p_resource, v_row.member_id) THEN 1 ELSE -1 END;
        END IF;
        -- Who upgrades the tables must not wait long for this transaction (as in wait).
        v_left := least(v_left, 2000);
        IF v_again AND {schema}.is_upgraded() THEN
            RETURN -1;
        END IF;
        v_again := true;
        v_key := {schema}.lock_key(v_other);
        IF {schema}.is_free({schema}.lock_class(2), v_key) THEN
            -- Nobody holds it: released this instant, or its owner has no session, or its owner died.
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


-- Makes a writer a reader, or has a reader give up its upgrade, and wakes those behind, whom that may let in: 0 done (or
-- it reads already), -1 no such granted row of this requester. May be repeated.
-- Waits (lock_timeout) for an open transaction that has pinned the row. Afterwards the session calls retake_wakeup_lock.
-- Blocks nobody, and yet takes the gate: a begin_upgrade whose caller was cut off while it stood there comes first.
CREATE OR REPLACE FUNCTION {schema}.downgrade(p_resource varchar, p_position bigint, p_requesting_id varchar) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
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


-- Takes the entry lock of a row of this session's member again, behind those who were woken by its end. Without it those
-- who wait look from time to time: nothing is lost but their sleep.
CREATE OR REPLACE FUNCTION {schema}.retake_wakeup_lock(p_resource varchar, p_position bigint, p_requesting_id varchar) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.{table} AS t CROSS JOIN LATERAL {schema}.missing_wakeup_locks(t.member_id, ARRAY[p_position])
               WHERE t.resource_id = p_resource AND t.queue_position = p_position AND t.requesting_id = p_requesting_id) THEN
        IF current_setting('lock_timeout') = '0' THEN
            PERFORM set_config('lock_timeout', '60s', true);
        END IF;
        PERFORM pg_advisory_lock({schema}.lock_class(2), {schema}.lock_key(p_position));
    END IF;
END
$$;
