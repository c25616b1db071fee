-- sqlsem, rates, for PostgreSQL: limits of use in a window of time. May be run again at any time, after public.sql.
--
-- Requests that wait for a rate wait in the queue of a mutex, resource 'rate:' and the rate's name. The first one takes
-- its tokens as soon as there is room for them, and leaves. Use is recorded in slots, a hundredth of each window. A
-- slot counts until all of it is out of the window: so no period as long as the window exceeds the limit, and a wait is
-- at most a hundredth of the window too long. Each take counts for every window that any client has declared for the
-- rate. If requests declare different limits, all of them are in force: a limit (or burst) binds every request from the
-- take that declares it until that take is out of the window. The lowest limit of a window decides. An operator's limit
-- (cap) is always in force.
-- A rate with a burst also has a bucket, which leaks evenly (GCRA):
-- https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm
-- Times are of the server's clock. If the clock goes back, recorded use is moved back with it.
--
-- A request that would wait for a short time only (p_ahead, at most 500 ms) does not enter the queue. It gets a
-- reservation for the moment at which there is room: its use is recorded at that moment, and the client sleeps until
-- then. No later request gets an earlier moment (promised_ms), so requests keep their order.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Return the server's time, in milliseconds since 1970.
CREATE OR REPLACE FUNCTION {schema}.clock_ms() RETURNS bigint
{sql} SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint $$;

-- Return the length of a slot of a window. (Simple enough for the planner to inline it.)
CREATE OR REPLACE FUNCTION {schema}.slot_ms(p_window_ms bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT (p_window_ms OPERATOR(pg_catalog.+) 99::bigint) OPERATOR(pg_catalog./) 100::bigint $$;

-- Raise for a name that is no rate's. (Starts of tasks are counted in the same tables, under other names: no client may
-- use or return them.)
CREATE OR REPLACE FUNCTION {schema}.check_rate_name(p_resource text) RETURNS void {plpgsql_immutable}
BEGIN
    PERFORM {schema}.check_name('rate', p_resource);
    IF p_resource NOT LIKE 'rate:_%' THEN
        RAISE EXCEPTION 'sqlsem: % is no rate; the resource of a rate is ''rate:'' and its name', quote_literal(p_resource)
            USING ERRCODE = '22023';
    END IF;
END
$$;

-- Raise for invalid arguments of a take.
CREATE OR REPLACE FUNCTION {schema}.check_rate(
    p_resource text, p_cost bigint, p_limits bigint[], p_windows bigint[], p_burst bigint) RETURNS void
{plpgsql_immutable}
DECLARE
    v_what text;
BEGIN
    PERFORM {schema}.check_rate_name(p_resource);
    v_what := CASE
        WHEN p_limits IS NULL OR cardinality(p_limits) IS DISTINCT FROM cardinality(p_windows)
            OR cardinality(p_limits) > 10 OR array_ndims(p_limits) <> 1 OR array_ndims(p_windows) <> 1
            THEN 'needs up to 10 limits, and a window for each (or none, where an operator has set them)'
        WHEN (SELECT count(DISTINCT w) <> count(*) FROM unnest(p_windows) AS w) THEN 'names a window twice, or NULL'
        WHEN (SELECT bool_or((w BETWEEN 1 AND 2147483647) IS NOT TRUE) FROM unnest(p_windows) AS w)
            THEN 'has a window that is not from 1 to 2147483647 ms'
        WHEN (SELECT bool_or((l BETWEEN 1 AND 2147483647) IS NOT TRUE) FROM unnest(p_limits) AS l)
            THEN 'has a limit that is not from 1 to 2147483647'
        WHEN (p_cost BETWEEN 1 AND 2147483647) IS NOT TRUE
            THEN format('is asked for %s; the cost must be 1 or more, up to 2147483647', coalesce(p_cost::text, 'NULL'))
        WHEN (SELECT p_cost > min(l) FROM unnest(p_limits) AS l)
            THEN format('is asked for %s, which can never fit into its limit of %s', p_cost, (SELECT min(l) FROM unnest(p_limits) AS l))
        WHEN p_burst IS NOT NULL AND cardinality(p_limits) <> 1 THEN 'has a burst and several windows; a burst goes with one window'
        WHEN p_burst < 1 OR p_burst > p_limits[1] THEN format('has a burst that is not from 1 to its limit, but %s', p_burst)
        WHEN p_cost > p_burst THEN format('is asked for %s, which can never fit into its burst of %s', p_cost, p_burst)
    END;
    IF v_what IS NOT NULL THEN
        RAISE EXCEPTION 'sqlsem: % %', quote_literal(p_resource), v_what USING ERRCODE = '22023';
    END IF;
END
$$;

-- Insert the declared windows that are missing. If the clock went back, move the recorded use back, too. A new window
-- begins with the recent use of another window, recorded no earlier than it happened.
CREATE OR REPLACE FUNCTION {schema}.begin_rate(p_resource varchar, p_limits bigint[], p_windows bigint[], p_now bigint) RETURNS void
{plpgsql}
DECLARE
    v_new      record;
    v_other    bigint;
    v_promised bigint;
BEGIN
    IF EXISTS (SELECT FROM {schema}.rate_window WHERE resource_id = p_resource AND seen_ms > p_now) THEN
        -- (Use of reservations is moved, too.)
        WITH ahead AS (
            DELETE FROM {schema}.rate_slot AS s USING {schema}.rate_window AS w
            WHERE s.resource_id = p_resource AND w.resource_id = s.resource_id AND w.window_ms = s.window_ms
              AND s.slot > p_now / {schema}.slot_ms(s.window_ms)
            RETURNING s.window_ms, s.used, s.login, s.rate_limit, s.burst,
                      greatest(p_now, least((s.slot + 1) * {schema}.slot_ms(s.window_ms) - 1, greatest(w.seen_ms, w.promised_ms))
                                      - greatest(0, w.seen_ms - p_now)) / {schema}.slot_ms(s.window_ms) AS slot)
        INSERT INTO {schema}.rate_slot AS s (resource_id, window_ms, slot, login, used, rate_limit, burst)
        SELECT p_resource, a.window_ms, a.slot, a.login, sum(a.used), min(a.rate_limit), min(a.burst)
        FROM ahead AS a GROUP BY a.window_ms, a.slot, a.login
        ON CONFLICT (resource_id, window_ms, slot, login) DO UPDATE
        SET used = s.used + excluded.used, rate_limit = least(s.rate_limit, excluded.rate_limit), burst = least(s.burst, excluded.burst);
        UPDATE {schema}.rate_window
        SET full_us = full_us - (seen_ms - p_now) * 1000, promised_ms = promised_ms - (seen_ms - p_now), seen_ms = p_now
        WHERE resource_id = p_resource AND seen_ms > p_now;
    END IF;
    FOR v_new IN
        SELECT n.window_ms, n.rate_limit FROM unnest(p_windows, p_limits) AS n (window_ms, rate_limit)
        WHERE NOT EXISTS (SELECT FROM {schema}.rate_window AS w
                          WHERE w.resource_id = p_resource AND w.window_ms = n.window_ms AND w.rate_limit IS NOT NULL)
    LOOP
        -- At most 40 windows, as each take writes to all of them. Delete those first that are no longer in force.
        IF (SELECT count(*) >= 40 FROM {schema}.rate_window AS w WHERE w.resource_id = p_resource) THEN
            DELETE FROM {schema}.rate_window AS w
            WHERE w.resource_id = p_resource AND NOT w.window_ms = ANY (p_windows)
              AND NOT EXISTS (SELECT FROM {schema}.windows_in_force(p_resource, '{}', '{}', NULL, p_now * 1000) AS f
                              WHERE f.window_ms = w.window_ms);
            DELETE FROM {schema}.rate_slot AS s
            WHERE s.resource_id = p_resource
              AND NOT EXISTS (SELECT FROM {schema}.rate_window AS w WHERE w.resource_id = p_resource AND w.window_ms = s.window_ms);
            IF (SELECT count(*) >= 40 FROM {schema}.rate_window AS w WHERE w.resource_id = p_resource) THEN
                RAISE EXCEPTION 'sqlsem: programs have declared 40 windows for % within these windows, and no further one fits',
                    quote_literal(p_resource) USING ERRCODE = '22023', HINT = 'sqlsem rates shows them, sqlsem rates reset NAME forgets them.';
            END IF;
        END IF;
        -- Copy from the shortest of the longer windows, or else from the longest.
        SELECT w.window_ms, w.promised_ms INTO v_other, v_promised FROM {schema}.rate_window AS w WHERE w.resource_id = p_resource
        ORDER BY w.window_ms < v_new.window_ms, abs(w.window_ms - v_new.window_ms) LIMIT 1;
        IF FOUND THEN
            INSERT INTO {schema}.rate_slot AS s (resource_id, window_ms, slot, login, used)
            SELECT p_resource, v_new.window_ms, o.slot, o.login, sum(o.used)
            FROM (SELECT least(greatest(p_now, v_promised), (slot + 1) * {schema}.slot_ms(window_ms) - 1)
                         / {schema}.slot_ms(v_new.window_ms) AS slot, login, used
                  FROM {schema}.rate_slot
                  WHERE resource_id = p_resource AND window_ms = v_other
                    AND slot >= (p_now - v_new.window_ms) / {schema}.slot_ms(window_ms)) AS o
            GROUP BY o.slot, o.login
            ON CONFLICT (resource_id, window_ms, slot, login) DO UPDATE SET used = greatest(s.used, excluded.used);
        END IF;
        INSERT INTO {schema}.rate_window (resource_id, window_ms, rate_limit, seen_ms, promised_ms)
        VALUES (p_resource, v_new.window_ms, v_new.rate_limit, p_now, v_promised)
        ON CONFLICT (resource_id, window_ms) DO UPDATE SET rate_limit = excluded.rate_limit;
    END LOOP;
END
$$;

-- Return the login to which use belongs: the session's. Starts of tasks belong to no login, as any worker of the queue
-- may return them.
CREATE OR REPLACE FUNCTION {schema}.rate_login(p_resource varchar) RETURNS name
{sql_stable} SELECT CASE WHEN p_resource LIKE 'rate:%' THEN session_user ELSE '' END::name $$;

-- Return the windows of a rate that are in force for a request at a moment: the declared ones; windows that earlier
-- takes have declared, while those takes are in the window; and windows with an operator's limit. fixed: the limit
-- without the limits of earlier takes, which lapse.
CREATE OR REPLACE FUNCTION {schema}.windows_in_force(
    p_resource varchar, p_limits bigint[], p_windows bigint[], p_burst bigint, p_at_us bigint)
RETURNS TABLE (window_ms bigint, fixed bigint, rate_limit bigint, burst bigint, used bigint) {sql}
    SELECT w.window_ms, least(d.rate_limit, w.cap), least(d.rate_limit, w.cap, t.rate_limit),
           least(CASE WHEN d.window_ms IS NOT NULL THEN p_burst END, t.burst), t.used
    FROM {schema}.rate_window AS w
    LEFT JOIN unnest(p_windows, p_limits) AS d (window_ms, rate_limit) ON d.window_ms = w.window_ms
    CROSS JOIN LATERAL (SELECT coalesce(sum(s.used), 0)::bigint AS used, min(s.rate_limit) AS rate_limit, min(s.burst) AS burst
                        FROM {schema}.rate_slot AS s
                        WHERE s.resource_id = p_resource AND s.window_ms = w.window_ms
                          AND s.slot >= (p_at_us / 1000 - w.window_ms) / {schema}.slot_ms(w.window_ms)) AS t
    WHERE w.resource_id = p_resource AND (d.window_ms IS NOT NULL OR w.cap IS NOT NULL OR t.rate_limit IS NOT NULL)
$$;

-- Record use of a rate at p_at_us (now, or a reservation), in all its windows. p_waits: how many of its requests had to
-- wait. Negative use returns tokens: of this login's use at p_then, and no more than that. p_limits, p_windows,
-- p_burst: the declared limits of the request.
CREATE OR REPLACE FUNCTION {schema}.use_rate(
    p_resource varchar, p_used bigint, p_now_us bigint, p_then bigint, p_at_us bigint, p_waits integer,
    p_limits bigint[] DEFAULT '{}', p_windows bigint[] DEFAULT '{}', p_burst bigint DEFAULT NULL) RETURNS void {plpgsql}
DECLARE
    v_now   constant bigint := p_now_us / 1000;
    v_at    constant bigint := p_at_us / 1000;
    v_login constant name := {schema}.rate_login(p_resource);
    v_row   record;
BEGIN
    FOR v_row IN
        SELECT w.window_ms, w.rate_limit,
               CASE WHEN p_used < 0 THEN -least(-p_used, coalesce(s.used, 0))
                    ELSE p_used END AS used
        FROM {schema}.rate_window AS w
        LEFT JOIN {schema}.rate_slot AS s ON p_used < 0 AND s.resource_id = p_resource AND s.window_ms = w.window_ms
            AND s.slot = p_then / {schema}.slot_ms(w.window_ms) AND s.login = v_login
        WHERE w.resource_id = p_resource
    LOOP
        UPDATE {schema}.rate_window AS w
        SET seen_ms = greatest(w.seen_ms, v_now),
            taken = w.taken + greatest(0, v_row.used), returned = w.returned + greatest(0, -v_row.used), waits = w.waits + p_waits,
            promised_ms = CASE WHEN v_at > v_now THEN greatest(w.promised_ms, v_at) ELSE w.promised_ms END,
            full_us = CASE WHEN w.full_us IS NULL THEN NULL
                           -- (A debt is paid after ten windows at the latest.)
                           WHEN p_used > 0
                           THEN least(greatest(w.full_us, p_at_us) + ceil(v_row.used::numeric * w.window_ms * 1000 / w.rate_limit),
                                      p_at_us + 10 * w.window_ms * 1000)::bigint
                           -- (Tokens that have leaked since cannot be returned.)
                           ELSE greatest(least(w.full_us, p_now_us), w.full_us - greatest(0, floor(-v_row.used::numeric * w.window_ms * 1000 / w.rate_limit)
                                                        - greatest(0, p_now_us - least(p_then, v_now) * 1000)))::bigint END
        WHERE w.resource_id = p_resource AND w.window_ms = v_row.window_ms;
        IF v_row.used > 0 THEN
            INSERT INTO {schema}.rate_slot AS s (resource_id, window_ms, slot, login, used, rate_limit, burst)
            VALUES (p_resource, v_row.window_ms, v_at / {schema}.slot_ms(v_row.window_ms), v_login, v_row.used,
                    CASE WHEN v_login <> '' THEN p_limits[array_position(p_windows, v_row.window_ms)] END,
                    CASE WHEN v_row.window_ms = ANY (p_windows) THEN p_burst END)
            ON CONFLICT (resource_id, window_ms, slot, login) DO UPDATE
            SET used = s.used + excluded.used, rate_limit = least(s.rate_limit, excluded.rate_limit),
                burst = least(s.burst, excluded.burst);
        ELSIF v_row.used < 0 THEN
            UPDATE {schema}.rate_slot SET used = used + v_row.used
            WHERE resource_id = p_resource AND window_ms = v_row.window_ms
              AND slot = p_then / {schema}.slot_ms(v_row.window_ms) AND login = v_login;
        END IF;
    END LOOP;
    -- Delete slots that have left the window.
    DELETE FROM {schema}.rate_slot WHERE resource_id = p_resource AND slot < (v_now - window_ms) / {schema}.slot_ms(window_ms);
END
$$;

-- Return, for each window in force, after how many ms p_cost may be taken: when enough use is out of the window, limits
-- of earlier takes that are too low have lapsed, and the bucket of a burst has room. wait_ms NULL: never.
CREATE OR REPLACE FUNCTION {schema}.window_waits(
    p_resource varchar, p_cost bigint, p_limits bigint[], p_windows bigint[], p_burst bigint, p_now_us bigint)
RETURNS TABLE (window_ms bigint, rate_limit bigint, burst bigint, used bigint, wait_ms bigint) {sql}
    SELECT f.window_ms, f.rate_limit, f.burst, f.used,
           CASE WHEN p_cost > f.fixed THEN NULL
                ELSE greatest(0,
                    CASE WHEN f.used + p_cost > f.rate_limit THEN (
                        -- (Slots leave the window one after the other: find the first that leaves enough room.)
                        SELECT min((l.slot + 1) * {schema}.slot_ms(f.window_ms) + f.window_ms) - p_now_us / 1000
                        FROM (SELECT s.slot, sum(sum(s.used)) OVER (ORDER BY s.slot) AS gone,
                                     min(min(s.rate_limit)) OVER (ORDER BY s.slot ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS lowest
                              FROM {schema}.rate_slot AS s
                              WHERE s.resource_id = p_resource AND s.window_ms = f.window_ms
                                AND s.slot >= (p_now_us / 1000 - f.window_ms) / {schema}.slot_ms(f.window_ms)
                              GROUP BY s.slot) AS l
                        WHERE (f.used - l.gone + p_cost <= least(f.fixed, l.lowest)) IS NOT FALSE) END,
                    CASE WHEN f.burst < p_cost THEN (
                        SELECT (max(s.slot) + 1) * {schema}.slot_ms(f.window_ms) + f.window_ms - p_now_us / 1000
                        FROM {schema}.rate_slot AS s
                        WHERE s.resource_id = p_resource AND s.window_ms = f.window_ms AND s.burst < p_cost)
                    -- (The bucket has room before it is empty again, at full_us.)
                    ELSE ceil((w.full_us - floor((f.burst - p_cost)::numeric * f.window_ms * 1000 / f.rate_limit) - p_now_us)
                              / 1000.0) END)::bigint END
    FROM {schema}.windows_in_force(p_resource, p_limits, p_windows, p_burst, p_now_us) AS f
    JOIN {schema}.rate_window AS w ON w.resource_id = p_resource AND w.window_ms = f.window_ms
$$;

-- Return after how many ms p_cost may be taken from a rate: when every window in force allows it, and no reservation is
-- later. NULL: never. (begin_rate has inserted the windows.)
CREATE OR REPLACE FUNCTION {schema}.rate_wait(
    p_resource varchar, p_cost bigint, p_limits bigint[], p_windows bigint[], p_burst bigint, p_now_us bigint) RETURNS bigint
{sql}
    SELECT CASE WHEN bool_and(n.wait_ms IS NOT NULL)
                THEN greatest(0, max(n.wait_ms), (SELECT max(w.promised_ms) FROM {schema}.rate_window AS w
                                                  WHERE w.resource_id = p_resource) - p_now_us / 1000) END
    FROM {schema}.window_waits(p_resource, p_cost, p_limits, p_windows, p_burst, p_now_us) AS n
$$;

-- Return how much may be taken from a rate at p_at_us.
CREATE OR REPLACE FUNCTION {schema}.rate_room(
    p_resource varchar, p_limits bigint[], p_windows bigint[], p_burst bigint, p_at_us bigint) RETURNS bigint {sql}
    SELECT min(least(f.rate_limit - f.used,
                     f.burst - ceil(greatest(0, w.full_us - p_at_us)::numeric * f.rate_limit / (f.window_ms * 1000))))::bigint
    FROM {schema}.windows_in_force(p_resource, p_limits, p_windows, p_burst, p_at_us) AS f
    JOIN {schema}.rate_window AS w ON w.resource_id = p_resource AND w.window_ms = f.window_ms
$$;

-- Raise an error that says why a cost can never be taken from a rate: no limit is set, or an operator's is lower.
CREATE OR REPLACE FUNCTION {schema}.raise_rate_error(p_resource varchar, p_cost bigint) RETURNS void {plpgsql_stable}
DECLARE
    v_cap record;
BEGIN
    SELECT w.cap, w.window_ms, w.cap_by INTO v_cap FROM {schema}.rate_window AS w WHERE w.resource_id = p_resource AND w.cap < p_cost
    ORDER BY w.cap LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'sqlsem: % is asked for %, which can never fit into the limit of % in % ms that % has set', quote_literal(p_resource),
            p_cost, v_cap.cap, v_cap.window_ms, v_cap.cap_by USING ERRCODE = '22023', HINT = 'Lower the cost, or raise the limit: sqlsem rates set.';
    END IF;
    RAISE EXCEPTION 'sqlsem: no limit is set for %', quote_literal(p_resource) USING ERRCODE = '22023',
        HINT = 'Name a limit and a window, or have an operator set them: sqlsem rates set NAME LIMIT/TIME.';
END
$$;

-- Take from a rate for several requests, in their order: for as many as may take now, or at a moment within p_ahead ms
-- (a reservation). times: the moment of each served request, in ms by the server's clock. wait_ms: how long the first
-- request has to wait, served or not. The caller has the gate of the resource (or another lock that every taker takes),
-- taken in an earlier statement. p_only_look: take nothing. p_waited: the requests have waited until now.
CREATE OR REPLACE FUNCTION {schema}.take_tokens(
    p_resource varchar, p_costs bigint[], p_limits bigint[], p_windows bigint[], p_burst bigint DEFAULT NULL,
    p_only_look boolean DEFAULT false, p_ahead bigint[] DEFAULT '{}', p_waited boolean DEFAULT false,
    OUT wait_ms bigint, OUT times bigint[]) {plpgsql}
DECLARE
    v_us    bigint := floor(extract(epoch FROM clock_timestamp()) * 1000000);
    v_first integer := 1;  -- the first of the requests that are served at one moment
    v_next  integer;
    v_wait  bigint;
    v_total bigint;
    v_room  bigint;
BEGIN
    times := '{}';
    PERFORM {schema}.begin_rate(p_resource, p_limits, p_windows, v_us / 1000);
    IF p_burst IS NOT NULL THEN
        UPDATE {schema}.rate_window SET full_us = v_us WHERE resource_id = p_resource AND window_ms = p_windows[1] AND full_us IS NULL;
    END IF;
    WHILE v_first <= cardinality(p_costs) LOOP
        v_wait := {schema}.rate_wait(p_resource, p_costs[v_first], p_limits, p_windows, p_burst, v_us);
        IF v_wait IS NULL AND v_first = 1 THEN
            PERFORM {schema}.raise_rate_error(p_resource, p_costs[1]);
        END IF;
        wait_ms := coalesce(wait_ms, v_wait);
        EXIT WHEN p_only_look OR v_wait IS NULL OR v_wait > coalesce(p_ahead[v_first], 0);
        IF v_first = 1 THEN
            UPDATE {schema}.rate_window AS w SET rate_limit = f.rate_limit, burst = f.burst
            FROM {schema}.windows_in_force(p_resource, p_limits, p_windows, p_burst, v_us + v_wait * 1000) AS f
            WHERE w.resource_id = p_resource AND w.window_ms = f.window_ms
              AND (w.rate_limit, w.burst) IS DISTINCT FROM (f.rate_limit, f.burst);
        END IF;
        v_total := p_costs[v_first];
        v_next := v_first + 1;
        IF v_next <= cardinality(p_costs) THEN
            v_room := {schema}.rate_room(p_resource, p_limits, p_windows, p_burst, v_us + v_wait * 1000);
            WHILE v_next <= cardinality(p_costs) AND v_total + p_costs[v_next] <= v_room AND v_wait <= coalesce(p_ahead[v_next], 0) LOOP
                v_total := v_total + p_costs[v_next];
                v_next := v_next + 1;
            END LOOP;
        END IF;
        PERFORM {schema}.use_rate(p_resource, v_total, v_us, NULL, v_us + v_wait * 1000,
                                  CASE WHEN p_waited OR v_wait > 0 THEN v_next - v_first ELSE 0 END, p_limits, p_windows, p_burst);
        times := times || array_fill(v_us / 1000 + v_wait, ARRAY[v_next - v_first]);
        v_first := v_next;
    END LOOP;
END
$$;

-- Take from a rate, for the first request in its queue. code:
--   0 taken, for the moment times[1], which comes in wait_ms   1 not enough room, for wait_ms at least
--   -1 others wait before the caller, or an operator has paused the rate   -2 the caller's row is gone
-- p_position: the caller's row in the queue of p_resource, if it has one; without a row, it takes only if the queue is
-- empty.
-- p_more: the costs of further requests of the same process, which share the caller's row. As many as have room are
-- served, in order; times has the moments of the caller and of these. The row is released when all are served.
-- p_ahead: how far ahead each request accepts a reservation, in ms (see the head of this file).
CREATE OR REPLACE FUNCTION {schema}.take_rate(
    p_resource varchar, p_cost bigint, p_limits bigint[], p_windows bigint[], p_burst bigint DEFAULT NULL,
    p_position bigint DEFAULT NULL, p_requesting_id varchar DEFAULT NULL, p_more bigint[] DEFAULT '{}', p_ahead bigint[] DEFAULT '{}',
    OUT code integer, OUT wait_ms bigint, OUT times bigint[]) {plpgsql_generic_definer}
DECLARE
    v_first bigint;
BEGIN
    times := '{}';
    PERFORM {schema}.check_rate(p_resource, p_cost, p_limits, p_windows, p_burst);
    -- (A cost above the limits would never be served.)
    IF EXISTS (SELECT FROM unnest(p_more) AS m
               WHERE (m BETWEEN 1 AND least(2147483647, p_burst, (SELECT min(l) FROM unnest(p_limits) AS l))) IS NOT TRUE) THEN
        RAISE EXCEPTION 'sqlsem: what others want of % must be 1 or more each, and fit into its limits; not %',
            quote_literal(p_resource), p_more USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.require_outside_transaction('take_rate');
    {lock_timeout:60s}
    PERFORM pg_advisory_xact_lock({schema}.lock_class(0), hashtext(p_resource));
    WHILE p_position IS NULL LOOP  -- test the owner of the first row: a dead one must not block
        v_first := (SELECT o.queue_position FROM {schema}.rows_before_oldest_first(p_resource, 9223372036854775807) AS o LIMIT 1);
        EXIT WHEN v_first IS NULL OR NOT {schema}.check_if_dead(p_resource, v_first, -1);
    END LOOP;
    IF p_position IS NOT NULL
       AND NOT EXISTS (SELECT FROM {schema}.{table} AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
                       WHERE t.resource_id = p_resource AND t.queue_position = p_position
                         AND t.requesting_id = p_requesting_id AND t.revoked_at IS NULL AND m.login = session_user) THEN
        code := -2;
    ELSIF v_first IS NOT NULL
          OR p_position IS NOT NULL AND EXISTS (SELECT FROM {schema}.rows_before_oldest_first(p_resource, p_position))
          OR (SELECT o.paused_at IS NOT NULL FROM {schema}.effective_settings(p_resource) AS o) THEN
        code := -1;
    ELSE
        SELECT t.wait_ms, t.times INTO wait_ms, times
        FROM {schema}.take_tokens(p_resource, array_prepend(p_cost, p_more), p_limits, p_windows, p_burst, false,
                                  -- (500 ms at most: a sleeping request has no row, which displays could show and
                                  -- operators could revoke.)
                                  ARRAY(SELECT least(a.ms, 500) FROM unnest(p_ahead) WITH ORDINALITY AS a (ms, nr) ORDER BY a.nr),
                                  p_position IS NOT NULL) AS t;
        code := CASE WHEN times = '{}' THEN 1 ELSE 0 END;
        IF cardinality(times) > cardinality(p_more) AND p_position IS NOT NULL THEN
            PERFORM {schema}.release(p_resource, p_position, p_requesting_id, 'released'::varchar);
        END IF;
    END IF;
END
$$;

-- Correct the cost of this login's take at p_taken_ms by p_more. A positive p_more counts as used now, and may exceed
-- the limit: then no request is served until enough of it is out of the window, or the bucket of a burst has room,
-- after ten windows at the latest. A negative p_more is returned, as far as it still counts, and no more than this
-- login took then.
CREATE OR REPLACE FUNCTION {schema}.adjust_rate(p_resource varchar, p_taken_ms bigint, p_more bigint) RETURNS void
{plpgsql_generic_definer}
DECLARE
    v_us bigint;
BEGIN
    PERFORM {schema}.check_rate_name(p_resource);
    IF (p_taken_ms >= 0 AND p_more BETWEEN -2147483647 AND 2147483647) IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: % cannot be adjusted by % of what was taken at %', quote_literal(p_resource),
            coalesce(p_more::text, 'NULL'), coalesce(p_taken_ms::text, 'NULL') USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.require_outside_transaction('adjust_rate');
    {lock_timeout:60s}
    PERFORM pg_advisory_xact_lock({schema}.lock_class(0), hashtext(p_resource));
    v_us := floor(extract(epoch FROM clock_timestamp()) * 1000000);
    PERFORM {schema}.begin_rate(p_resource, '{}', '{}', v_us / 1000);
    PERFORM {schema}.use_rate(p_resource, p_more, v_us, p_taken_ms, v_us, 0);
END
$$;

-- Reset a rate: delete all use, debts, reservations and declared limits, but not the operator's limits and the
-- counters. Return 0, or -1 if there is no such rate. For operators.
CREATE OR REPLACE FUNCTION {schema}.reset_rate(p_resource varchar) RETURNS integer {plpgsql_indexed_definer}
DECLARE
    v_used bigint;
BEGIN
    PERFORM {schema}.check_rate_name(p_resource);
    {lock_timeout:10s}
    PERFORM pg_advisory_xact_lock({schema}.lock_class(0), hashtext(p_resource));
    WITH gone AS (DELETE FROM {schema}.rate_slot WHERE resource_id = p_resource RETURNING window_ms, used)
    SELECT coalesce(max(u.used), 0) INTO v_used FROM (SELECT sum(g.used) AS used FROM gone AS g GROUP BY g.window_ms) AS u;
    UPDATE {schema}.rate_window SET full_us = NULL, burst = NULL, promised_ms = NULL WHERE resource_id = p_resource;
    IF NOT FOUND THEN
        RETURN -1;
    END IF;
    PERFORM {schema}.note_operation('reset', p_resource, NULL, NULL, NULL, v_used::text, NULL);
    RETURN 0;
END
$$;

-- Set an operator's limit of a rate in a window of this length: an upper bound on declared limits, and the limit of
-- requests that declare none. NULL: remove it. Return 0, or -1 if there was none to remove. For operators.
CREATE OR REPLACE FUNCTION {schema}.set_rate(p_resource varchar, p_window_ms bigint, p_limit bigint) RETURNS integer
{plpgsql_indexed_definer}
DECLARE
    v_before bigint;
BEGIN
    PERFORM {schema}.check_rate_name(p_resource);
    IF (p_window_ms BETWEEN 1 AND 2147483647) IS NOT TRUE OR NOT p_limit BETWEEN 1 AND 2147483647 THEN
        RAISE EXCEPTION 'sqlsem: % needs a limit and a window (ms) from 1 to 2147483647, not % and %', quote_literal(p_resource),
            coalesce(p_limit::text, 'NULL'), coalesce(p_window_ms::text, 'NULL') USING ERRCODE = '22023';
    END IF;
    {lock_timeout:10s}
    PERFORM pg_advisory_xact_lock({schema}.lock_class(0), hashtext(p_resource));
    SELECT w.cap INTO v_before FROM {schema}.rate_window AS w WHERE w.resource_id = p_resource AND w.window_ms = p_window_ms;
    IF v_before IS NULL AND p_limit IS NULL THEN
        RETURN -1;
    ELSIF p_limit IS NOT NULL THEN
        IF NOT EXISTS (SELECT FROM {schema}.rate_window AS w WHERE w.resource_id = p_resource AND w.window_ms = p_window_ms)
           AND (SELECT count(*) >= 10 FROM {schema}.rate_window AS w WHERE w.resource_id = p_resource AND w.cap IS NOT NULL) THEN
            RAISE EXCEPTION 'sqlsem: % has limits for 10 windows; lift one of them first', quote_literal(p_resource) USING ERRCODE = '22023';
        END IF;
        PERFORM {schema}.begin_rate(p_resource, ARRAY[p_limit], ARRAY[p_window_ms], {schema}.clock_ms());
    END IF;
    -- (Without the operator's limit only those limits are in force that programs have declared. Without any limit the
    -- window only keeps the use, and a bucket has no size.)
    UPDATE {schema}.rate_window AS w
    SET cap = p_limit, cap_by = CASE WHEN p_limit IS NOT NULL THEN session_user END, rate_limit = coalesce(p_limit, d.lowest),
        full_us = CASE WHEN coalesce(p_limit, d.lowest) IS NOT NULL THEN w.full_us END
    FROM (SELECT min(s.rate_limit) AS lowest FROM {schema}.rate_slot AS s
          WHERE s.resource_id = p_resource AND s.window_ms = p_window_ms
            AND s.slot >= ({schema}.clock_ms() - p_window_ms) / {schema}.slot_ms(p_window_ms)) AS d
    WHERE w.resource_id = p_resource AND w.window_ms = p_window_ms;
    IF v_before IS DISTINCT FROM p_limit THEN
        PERFORM {schema}.note_operation('rate_limit', p_resource, NULL, NULL, NULL, v_before || ' in ' || p_window_ms || ' ms',
                                        p_limit || ' in ' || p_window_ms || ' ms');
    END IF;
    RETURN 0;
END
$$;

-- Return the windows of all rates, or of one: p_resource 'rate:api' for rate api. rate_limit: the limit in force; used:
-- the use that counts now; idle: seconds since the last use; taken, returned, waits: counters since the window was
-- declared; free_in: the seconds until there is room for one more; cap: the operator's limit. (Windows without any limit
-- are left out.)
--
-- The range of names leaves out the starts of tasks, which are in these tables under other names, and is read by the
-- indexes.
CREATE OR REPLACE FUNCTION {schema}.rates(p_resource varchar DEFAULT NULL)
RETURNS TABLE (resource_id varchar, window_ms bigint, rate_limit bigint, used bigint, idle float, taken bigint, returned bigint,
               waits bigint, free_in float, cap bigint)
{sql_indexed_definer}
    SELECT w.resource_id, w.window_ms, coalesce(f.rate_limit, w.rate_limit), u.used, greatest(0, (n.now_ms - w.seen_ms) / 1000.0)::float,
           w.taken, w.returned, w.waits,
           greatest(f.wait_ms, w.promised_ms - n.now_ms, 0,
                    ceil((w.full_us - floor((coalesce(f.burst, w.burst) - 1)::numeric * w.window_ms * 1000
                                            / coalesce(f.rate_limit, w.rate_limit)) - n.now_ms * 1000) / 1000.0)) / 1000.0::float,
           w.cap
    FROM (SELECT {schema}.clock_ms() AS now_ms) AS n
    CROSS JOIN {schema}.rate_window AS w
    LEFT JOIN LATERAL {schema}.window_waits(w.resource_id, 1, ARRAY[w.rate_limit], ARRAY[w.window_ms], NULL, n.now_ms * 1000) AS f
        ON f.window_ms = w.window_ms
    CROSS JOIN LATERAL (SELECT coalesce(f.used, 0) AS used) AS u
    WHERE w.rate_limit IS NOT NULL AND w.resource_id LIKE 'rate:%' AND w.resource_id BETWEEN coalesce(p_resource, 'rate:') AND coalesce(p_resource, 'rate;')
    ORDER BY w.resource_id, w.window_ms
$$;


-- For sessions -----------------------------------------------------------------------------------------------------

-- Renew the waiter lease of the first request in the queue of a rate, by ten seconds.
CREATE OR REPLACE FUNCTION {schema}.renew_rate_waiter_lease(p_resource text, p_position bigint, p_requesting_id text) RETURNS void
{sql_indexed_definer}
    UPDATE {schema}.{table} AS t SET waiter_lease_until = clock_timestamp() + interval '10 seconds'
    FROM {schema}.member AS m
    WHERE t.resource_id = p_resource AND t.queue_position = p_position AND t.requesting_id = p_requesting_id
      AND t.resource_id LIKE 'rate:%' AND m.member_id = t.member_id AND m.login = session_user
$$;

-- Sleep until the moment of a reservation. If the statement is cancelled meanwhile, return the tokens.
CREATE OR REPLACE PROCEDURE {schema}.sleep_until_due(p_resource text, p_cost bigint, p_taken_ms bigint, p_wait_ms bigint)
LANGUAGE plpgsql
AS $$
DECLARE
    v_cancelled pg_catalog.text;
BEGIN
    BEGIN
        PERFORM pg_catalog.pg_sleep(p_wait_ms::double precision OPERATOR(pg_catalog./) 1000::double precision);
    EXCEPTION WHEN query_canceled THEN  -- also statement_timeout
        GET STACKED DIAGNOSTICS v_cancelled = MESSAGE_TEXT;
        PERFORM {schema}.adjust_rate(p_resource::varchar, p_taken_ms, OPERATOR(pg_catalog.-) p_cost);
    END;
    COMMIT;
    IF v_cancelled IS NOT NULL THEN
        RAISE EXCEPTION 'sqlsem: take from % was cancelled, and its reservation was returned: %',
            pg_catalog.quote_literal(pg_catalog.substr(p_resource, 6)), v_cancelled USING ERRCODE = '57014';
    END IF;
END
$$;

-- Take from a rate: at most rate_limit in any per_ms, by all clients together. Wait up to timeout_ms, in the order of
-- requests. more_limits, more_per_ms: further windows. rate_limit and per_ms NULL: the operator's limits. taken_ms: the
-- moment of the take, for `adjust`. Call it in autocommit. code:
--   0 taken at once
--   1 taken after waiting
--   -1 not in time
--   -2 an operator revoked its row in the queue
--   -3 victim of a deadlock, as of acquire
--
-- This procedure commits, like acquire, so every name in it is qualified.
CREATE OR REPLACE PROCEDURE {schema}.take(
    rate text, rate_limit bigint, per_ms bigint, cost bigint DEFAULT 1, timeout_ms integer DEFAULT -1, burst bigint DEFAULT NULL,
    more_limits bigint[] DEFAULT '{}', more_per_ms bigint[] DEFAULT '{}', note text DEFAULT NULL, requesting_id text DEFAULT NULL,
    INOUT code integer DEFAULT NULL, INOUT taken_ms bigint DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    v_started   pg_catalog.timestamptz := pg_catalog.clock_timestamp();
    v_resource  pg_catalog.text := pg_catalog.concat('rate:', rate);
    -- (Both NULL: the limits that an operator has set.)
    v_limits    bigint[] := CASE WHEN rate_limit IS NULL AND per_ms IS NULL THEN more_limits ELSE pg_catalog.array_prepend(rate_limit, more_limits) END;
    v_windows   bigint[] := CASE WHEN rate_limit IS NULL AND per_ms IS NULL THEN more_per_ms ELSE pg_catalog.array_prepend(per_ms, more_per_ms) END;
    v_id        pg_catalog.text;
    v_left      integer;
    v_position  bigint;
    v_fence     bigint;
    v_wait      bigint;
    v_cancelled pg_catalog.text;
BEGIN
    code := NULL;
    taken_ms := NULL;
    CALL {schema}.require_autocommit('take');
    PERFORM {schema}.check_name('rate', rate);
    v_id := coalesce(requesting_id, {schema}.session_id());
    IF (timeout_ms OPERATOR(pg_catalog.>=) -1) IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: timeout_ms must be 0 or more, or -1 for ever, not %', coalesce(timeout_ms::pg_catalog.text, 'NULL')
            USING ERRCODE = '22023';
    END IF;
    SELECT t.code, t.wait_ms, t.times[1] INTO code, v_wait, taken_ms
    FROM {schema}.take_rate(v_resource, cost, v_limits, v_windows, burst,
                            p_ahead => ARRAY[CASE WHEN timeout_ms OPERATOR(pg_catalog.>=) 0 THEN timeout_ms ELSE 500 END]::bigint[]) AS t;
    COMMIT;
    IF code OPERATOR(pg_catalog.=) 0 THEN
        CALL {schema}.sleep_until_due(v_resource, cost, taken_ms, v_wait);
        code := CASE WHEN v_wait OPERATOR(pg_catalog.>) 0 THEN 1 ELSE 0 END;
        RETURN;
    ELSIF timeout_ms OPERATOR(pg_catalog.=) 0 THEN
        code := -1;
        RETURN;
    END IF;
    v_left := CASE WHEN timeout_ms OPERATOR(pg_catalog.>) 0 THEN greatest(1, {schema}.remaining_ms(timeout_ms, v_started)) ELSE -1 END;
    -- (The row always has a waiter lease. COMMIT must be outside of the blocks that handle a cancel, and a row that is
    -- left there is removed when its waiter lease ends.)
    CALL {schema}.acquire_row(v_resource, 1, 'write', 1, v_left, note, v_id, NULL, true, code, v_position, v_fence);
    IF code OPERATOR(pg_catalog.<) 0 THEN
        RETURN;
    END IF;
    PERFORM {schema}.renew_rate_waiter_lease(v_resource, v_position, v_id);
    COMMIT;
    LOOP
        v_left := {schema}.remaining_ms(timeout_ms, v_started);
        BEGIN
            PERFORM pg_catalog.set_config('lock_timeout'::pg_catalog.text, '3s'::pg_catalog.text, true);  -- (the waiter lease is renewed after that)
            SELECT t.code, t.wait_ms, t.times[1] INTO code, v_wait, taken_ms
            FROM {schema}.take_rate(v_resource, cost, v_limits, v_windows, burst, v_position, v_id,
                                    p_ahead => ARRAY[coalesce(v_left, 500)]::bigint[]) AS t;
        EXCEPTION WHEN lock_not_available THEN
            code := -1;
        WHEN query_canceled THEN
            GET STACKED DIAGNOSTICS v_cancelled = MESSAGE_TEXT;
        END;
        COMMIT;
        EXIT WHEN v_cancelled IS NOT NULL OR code OPERATOR(pg_catalog.=) ANY (ARRAY[0, -2]) OR v_left OPERATOR(pg_catalog.=) 0;
        BEGIN
            PERFORM pg_catalog.pg_sleep(
                least(CASE WHEN code OPERATOR(pg_catalog.=) 1 THEN v_wait ELSE 500 END, coalesce(v_left, 4000), 4000)::double precision OPERATOR(pg_catalog./) 1000::double precision);
        EXCEPTION WHEN query_canceled THEN  -- also statement_timeout
            GET STACKED DIAGNOSTICS v_cancelled = MESSAGE_TEXT;
        END;
        IF v_cancelled IS NULL THEN
            PERFORM {schema}.renew_rate_waiter_lease(v_resource, v_position, v_id);
        END IF;
        COMMIT;
        EXIT WHEN v_cancelled IS NOT NULL;
    END LOOP;
    IF v_cancelled IS NOT NULL OR code OPERATOR(pg_catalog.=) ANY (ARRAY[1, -1]) THEN
        PERFORM {schema}.release(v_resource::varchar, v_position, v_id::varchar,
                                 CASE WHEN v_cancelled IS NULL THEN 'timeout' ELSE 'cancelled' END::varchar);
        COMMIT;
        taken_ms := NULL;
    END IF;
    IF v_cancelled IS NOT NULL THEN
        RAISE EXCEPTION 'sqlsem: take from % was cancelled and has left the queue: %', pg_catalog.quote_literal(rate), v_cancelled
            USING ERRCODE = '57014';
    ELSIF code OPERATOR(pg_catalog.=) 0 THEN
        CALL {schema}.sleep_until_due(v_resource, cost, taken_ms, v_wait);
    END IF;
    code := CASE WHEN code OPERATOR(pg_catalog.=) 0 THEN 1 WHEN code OPERATOR(pg_catalog.=) -2 THEN -2 ELSE -1 END;
END
$$;

-- Report the actual cost of a take, of `cost` at taken_ms. If it is less, the difference is returned; if it is more,
-- the difference counts as used now.
CREATE OR REPLACE FUNCTION {schema}.adjust(rate text, taken_ms bigint, cost bigint, actual bigint) RETURNS void
{plpgsql}
BEGIN
    PERFORM {schema}.check_name('rate', rate);
    IF (cost >= 1 AND actual >= 0) IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: adjust needs the cost that was taken, 1 or more, and the actual cost, 0 or more; not % and %',
            coalesce(cost::text, 'NULL'), coalesce(actual::text, 'NULL') USING ERRCODE = '22023';
    ELSIF actual <> cost THEN
        PERFORM {schema}.adjust_rate(concat('rate:', rate)::varchar, taken_ms, actual - cost);
    END IF;
END
$$;
