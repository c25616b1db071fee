-- sqlsem, the overview for PostgreSQL: the whole state at one instant, for displays. May be run again at any time. It
-- only reads: no acquisition or release depends on it.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Return a time in microseconds since 1970, which is exact in JSON.
CREATE OR REPLACE FUNCTION {schema}.microseconds(p_moment timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE
AS $$ SELECT pg_catalog.round(pg_catalog.date_part('epoch', p_moment) OPERATOR(pg_catalog.*) 1000000)::bigint $$;

-- Return the settings of resources, and the logins that made them, which resources() does not show. Patterns of limits
-- appear as 'tenant:*'; their effect on a resource is not computed here.
CREATE OR REPLACE FUNCTION {schema}.resource_settings()
RETURNS TABLE (resource_id varchar, cap integer, paused_at timestamptz, stale_after float, paused_by name, cap_by name)
{sql_stable_indexed_definer}
    SELECT coalesce(o.resource_id, l.prefix || '*'), coalesce(l.cap, o.cap), o.paused_at, o.stale_after_ms / 1000.0::float, o.paused_by,
           coalesce(l.cap_by, o.cap_by)
    FROM {schema}.resource AS o FULL JOIN {schema}.limit_pattern AS l ON l.prefix || '*' = o.resource_id
    WHERE coalesce(l.cap, o.cap, o.stale_after_ms) IS NOT NULL OR o.paused_at IS NOT NULL
$$;

-- Return the locks of other sessions that sqlsem waits for: advisory locks of its classes, and the locks on tables that
-- routines.sql lists. Column is_stranger: the login may not use the schema. seconds: since the session's transaction
-- began, or the session, if it has none; NULL if the schema's owner may not see that.
CREATE OR REPLACE FUNCTION {schema}.held_locks(p_resource varchar)
RETURNS TABLE (kind text, key bigint, is_alone boolean, resource_id varchar, pid integer, transaction text, login text, program text,
               seconds float, is_stranger boolean) {sql}
    WITH held AS MATERIALIZED (
        SELECT CASE l.classid::bigint - {schema}.lock_class(0)
                   WHEN 0 THEN 'gate' WHEN 1 THEN 'beacon' WHEN 2 THEN 'entry' WHEN 3 THEN 'waiting' WHEN 4 THEN 'batch'
                   WHEN 5 THEN 'news' WHEN 6 THEN 'put' WHEN 7 THEN 'number' END AS kind,
               l.objid::bigint AS key, l.mode = 'ExclusiveLock' AS is_alone, l.pid, l.virtualtransaction
        FROM pg_locks AS l
        WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted AND l.pid <> pg_backend_pid()
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION ALL
        SELECT t.kind, l.relation::bigint, true, l.pid, l.virtualtransaction
        FROM pg_locks AS l
        JOIN (VALUES ('install', '{schema}.installer'::regclass, 'ShareRowExclusiveLock'),
                     ('limits', '{schema}.limit_pattern', 'ExclusiveLock'),
                     -- feature: queue
                     ('turns', '{schema}.queue_key', 'ExclusiveLock'),
                     -- end of feature: queue
                     ('pin', '{schema}.{table}', 'RowShareLock')) AS t (kind, relation, mode)
            ON t.relation = l.relation AND t.mode = l.mode
        WHERE l.locktype = 'relation' AND l.granted AND l.pid <> pg_backend_pid()
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()))
    SELECT h.kind, h.key, h.is_alone,
           CASE h.kind WHEN 'gate' THEN (
               SELECT min(n.name) FROM (SELECT p_resource AS name
                                        UNION ALL SELECT t.resource_id FROM {schema}.{table} AS t
                                        UNION ALL SELECT o.resource_id FROM {schema}.resource AS o) AS n
               WHERE hashtext(n.name)::bigint & 4294967295 = h.key)
           WHEN 'entry' THEN (
               SELECT min(t.resource_id) FROM {schema}.{table} AS t WHERE {schema}.lock_key(t.queue_position) = h.key) END,
           h.pid, h.virtualtransaction, a.usename::text, a.application_name,
           date_part('epoch', clock_timestamp() - coalesce(a.xact_start, a.backend_start)),
           coalesce(NOT has_schema_privilege(a.usesysid, '{schema}', 'USAGE'), false)
    FROM held AS h JOIN pg_stat_activity AS a ON a.pid = h.pid
    WHERE h.kind IS NOT NULL
$$;

-- Return the held locks that block others for longer than a call takes: each lock of a stranger, and each lock that the
-- same transaction still holds a moment later. (Only a call that finds locks waits for that moment.) Of p_resource, or
-- of all resources.
CREATE OR REPLACE FUNCTION {schema}.kept_locks(p_resource varchar DEFAULT NULL)
RETURNS TABLE (kind text, resource_id varchar, pid integer, login text, program text, seconds float, is_stranger boolean)
{plpgsql_indexed_definer}
#variable_conflict use_column
DECLARE
    v_first text[] := ARRAY(SELECT concat_ws(' ', h.kind, h.key, h.pid, h.transaction) FROM {schema}.held_locks(p_resource) AS h
                            WHERE h.kind IN ('gate', 'batch', 'install', 'limits', 'turns', 'pin')
                               OR h.kind IN ('put', 'number') AND h.is_alone);
BEGIN
    IF v_first <> '{}' THEN
        PERFORM pg_sleep(0.3);
    END IF;
    RETURN QUERY
        SELECT h.kind, h.resource_id, h.pid, h.login, h.program, min(h.seconds), bool_or(h.is_stranger)
        FROM {schema}.held_locks(p_resource) AS h
        WHERE (h.is_stranger OR concat_ws(' ', h.kind, h.key, h.pid, h.transaction) = ANY (v_first))
          AND (p_resource IS NULL OR h.resource_id = p_resource OR h.kind <> 'gate' AND h.resource_id IS NULL)
        GROUP BY h.kind, h.resource_id, h.pid, h.login, h.program
        ORDER BY bool_or(h.is_stranger) DESC, h.pid, h.kind, h.resource_id;
END
$$;

-- Return the holds of a resource that ended normally, of its last 200 requests, newest first. (No more than these are
-- read from the index.)
CREATE OR REPLACE FUNCTION {schema}.recent_holds(p_resource varchar)
RETURNS TABLE (held float, waited float, note varchar, program varchar)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT round(extract(epoch FROM greatest(h.ended_at - h.granted_at, interval '0'))::numeric, 3)::float,
           round(extract(epoch FROM greatest(h.granted_at - h.requested_at, interval '0'))::numeric, 3)::float, h.note, h.program
    FROM (SELECT p.* FROM {schema}.history AS p
          -- (Not =: the planner would then walk the index of ended_at, if it took this resource for the usual one.)
          WHERE p.resource_id BETWEEN p_resource AND p_resource
          ORDER BY p.resource_id DESC, p.ended_at DESC LIMIT 200) AS h
    WHERE h.outcome = 'released' AND h.granted_at IS NOT NULL
    ORDER BY h.ended_at DESC, h.queue_position DESC;
END
$$;

-- Return the whole state except the rows of entries(), as one row of JSON arrays. batches: batches that are open, that
-- have failed and have no successor, or whose callback has not finished; without bodies. holds: recent_holds of the 200
-- resources with the most waiters.
CREATE OR REPLACE FUNCTION {schema}.overview(
    OUT taken_at timestamptz, OUT settings json, OUT members json, OUT queues json, OUT batches json, OUT holds json)
{plpgsql_indexed_definer}
BEGIN
    taken_at := clock_timestamp();
    settings := (SELECT json_agg(json_build_array(s.resource_id, s.cap, {schema}.microseconds(s.paused_at), s.stale_after, s.paused_by, s.cap_by))
                 FROM {schema}.resource_settings() AS s);
    members := (
        SELECT json_agg(json_build_array(
                   m.member_id, m.host, coalesce(m.pid, m.backend_pid), m.program, m.login, {schema}.microseconds(m.joined_at),
                   CASE WHEN m.lease_ms IS NULL THEN 'beacon' ELSE 'lease' END,
                   CASE WHEN l.missing THEN greatest(0, extract(epoch FROM taken_at - coalesce(l.since, m.heartbeat_at))) END,
                   coalesce(m.lease_ms, m.grace_ms) / 1000.0,
                   CASE WHEN l.dead THEN 0
                        WHEN m.lease_ms IS NOT NULL THEN greatest(0, extract(epoch FROM m.lease_until - taken_at))
                        WHEN l.missing THEN greatest(0, m.grace_ms / 1000.0 - extract(epoch FROM taken_at - m.heartbeat_at)) END,
                   coalesce(q.holding, 0), coalesce(q.waiting, 0)) ORDER BY m.member_id)
        FROM {schema}.member AS m JOIN {schema}.member_liveness() AS l ON l.member_id = m.member_id
        LEFT JOIN (SELECT t.member_id, count(t.granted_at) AS holding, count(*) - count(t.granted_at) AS waiting
                   FROM {schema}.{table} AS t GROUP BY t.member_id) AS q ON q.member_id = m.member_id);
    -- feature: queue
    queues := (SELECT json_agg(json_build_array(
                   c.queue_name, c.pending, c.running, c.finished, c.failed, c.cancelled, c.lost, c.oldest, c.rate, c.blocked_by))
               FROM {schema}.queue_counts(NULL) AS c);
    -- end of feature: queue
    -- feature: batches
    batches := (
        SELECT json_agg(json_build_array(
                   r.batch_id, r.batch_name, r.status, r.window_ms / 1000.0, {schema}.microseconds(r.opened_at), {schema}.microseconds(r.ended_at),
                   extract(epoch FROM coalesce(r.ended_at, taken_at) - r.opened_at), r.callback_status, r.callback_kind, NULL,
                   r.callback_attempt, r.callback_owner, {schema}.microseconds(r.callback_started), {schema}.microseconds(r.callback_ended),
                   extract(epoch FROM coalesce(r.callback_ended, taken_at) - r.callback_started), r.callback_error,
                   p.part, p.status, p.is_last, p.attempt, p.member_id, p.owner, p.host, p.pid,
                   {schema}.microseconds(p.started_at), {schema}.microseconds(p.ended_at),
                   extract(epoch FROM coalesce(p.ended_at, taken_at) - p.started_at), p.error,
                   CASE WHEN p.status = 'running' AND l.missing IS NOT FALSE
                        THEN extract(epoch FROM taken_at - coalesce(l.since, p.started_at)) END,
                   r.opened_by, p.login, r.callback_kept_by, r.callback_login) ORDER BY r.batch_id DESC, p.part)
        FROM {schema}.batch AS r JOIN {schema}.batch_part AS p ON p.batch_id = r.batch_id
        LEFT JOIN {schema}.member_liveness() AS l ON l.member_id = p.member_id AND p.status = 'running'
        WHERE r.status = 'open' OR r.callback_status IN ('pending', 'running')
           OR (r.status = 'failed' OR r.callback_status = 'failed')
              AND NOT EXISTS (SELECT FROM {schema}.batch AS n WHERE n.batch_name = r.batch_name AND n.batch_id > r.batch_id));
    -- end of feature: batches
    holds := (
        SELECT json_agg(json_build_array(w.resource_id, h.held, h.waited, h.note, h.program))
        FROM (SELECT t.resource_id FROM {schema}.{table} AS t
              GROUP BY t.resource_id ORDER BY count(*) - count(t.granted_at) DESC, t.resource_id LIMIT 200) AS w
        CROSS JOIN LATERAL {schema}.recent_holds(w.resource_id) AS h);
END
$$;

-- Return the rows of rates() in JSON, of the 200 rates with the most waiters, then with the latest use.
CREATE OR REPLACE FUNCTION {schema}.overview_rates() RETURNS json
{sql_indexed_definer}
    -- feature: rates
    SELECT json_agg(json_build_array(r.resource_id, r.window_ms, r.rate_limit, r.used, r.idle, r.taken, r.returned, r.waits, r.free_in,
                                      r.cap)
                    ORDER BY r.resource_id, r.window_ms)
    FROM (SELECT w.resource_id FROM {schema}.rate_window AS w
          LEFT JOIN (SELECT t.resource_id, count(*) AS waiting FROM {schema}.{table} AS t
                     WHERE t.resource_id LIKE 'rate:%' GROUP BY t.resource_id) AS q ON q.resource_id = w.resource_id
          WHERE w.resource_id LIKE 'rate:%'
          GROUP BY w.resource_id ORDER BY max(coalesce(q.waiting, 0)) DESC, max(w.seen_ms) DESC, w.resource_id LIMIT 200) AS w
    CROSS JOIN LATERAL {schema}.rates(w.resource_id) AS r
    -- end of feature: rates
    -- feature: not rates
    SELECT NULL::json
    -- end of feature: not rates
$$;


-- When a request will be granted ------------------------------------------------------------------------------------

-- Return the kind of a hold: its note without numbers, or else its program.
CREATE OR REPLACE FUNCTION {schema}.kind_of(p_note varchar, p_program varchar) RETURNS text {sql_immutable}
    SELECT CASE WHEN p_note <> '' THEN 'note ' || regexp_replace(p_note, '[0-9]+', '#', 'g') ELSE 'program ' || coalesce(p_program, '') END
$$;

-- Return a pseudo-random number between 0 and 1, always the same for the same two arguments.
CREATE OR REPLACE FUNCTION {schema}.deterministic_fraction(p_one bigint, p_other integer) RETURNS float {sql_immutable}
    SELECT ((hashint8extended(p_one, p_other) & 1073741823) + 0.5) / 1073741824.0::float
$$;

-- Return how many more seconds a lock is held that has been held for p_already seconds (0: it begins now), at quantile
-- p_share. p_held: the durations of similar holds, in order. Only the durations longer than p_already count: each gap
-- between two of them has the same share, and so have the gaps below the first and above the last. If there is no
-- longer duration, the lock is held for ever.
-- (The same as in sqlsem/insight/estimates.py.)
CREATE OR REPLACE FUNCTION {schema}.expected_remaining(p_held float[], p_share float, p_already float) RETURNS float
{plpgsql_immutable}
DECLARE
    v_count integer := cardinality(p_held);
    v_first integer := 0;  -- the number of shorter durations
    v_place float;
    v_whole integer;
    v_below float;
BEGIN
    WHILE v_first < v_count AND p_held[v_first + 1] <= p_already LOOP
        v_first := v_first + 1;
    END LOOP;
    v_place := p_share * (v_count - v_first + 1);
    v_whole := floor(v_place);
    v_below := CASE WHEN v_whole > 0 THEN p_held[v_first + v_whole] ELSE p_already END;
    IF v_first + v_whole < v_count THEN
        RETURN v_below + (p_held[v_first + v_whole + 1] - v_below) * (v_place - v_whole) - p_already;
    END IF;
    RETURN greatest(v_below, 0.001) * power(1 - least(v_place - v_whole, 0.98), -0.6) - p_already;
END
$$;

-- Estimate when a waiting request will be granted, in seconds from now: likely, and low and high, with eight of ten
-- cases in between. held_low, held_high: how long such locks are held, in eight of ten cases; holds: the number of
-- holds from which that is known. No row if the request does not wait, the resource is paused, fewer than five holds
-- are known, or more than 60 requests are ahead of it.
--
-- The estimate simulates the queue 100 times, like `sqlsem why` (which also estimates what this leaves out). A holder
-- stays for as long as one of the recent holds that were longer, and a waiter is granted as soon as the rule allows it.
CREATE OR REPLACE FUNCTION {schema}.estimate(queue_position bigint)
RETURNS TABLE (low float, likely float, high float, held_low float, held_high float, holds integer) {plpgsql_indexed_definer}
#variable_conflict use_column
DECLARE
    v_plays  constant integer := 100;
    v_row    record;
    v_mine   record;
    v_set    record;
    v_kinds  text[];      -- the kinds of the recent holds, newest first; and their durations
    v_holds  float[];
    v_like   float[];     -- the durations of the newest 60 holds like the row, in order
    v_doubt  float;       -- the relative error of their mean
    v_access text[] := '{}';   -- access, weight and declared limit of the rows so far
    v_weight integer[] := '{}';
    v_limit  integer[] := '{}';
    v_leaves float[] := '{}';  -- when they leave: all simulations of the first row, then of the second, …
    v_enters float[];
    v_waits  boolean;
BEGIN
    SELECT t.resource_id, t.weight INTO v_mine FROM {schema}.{table} AS t WHERE t.queue_position = estimate.queue_position;
    SELECT s.cap, s.paused_at INTO v_set FROM {schema}.effective_settings(v_mine.resource_id) AS s;
    IF v_mine IS NULL OR v_set.paused_at IS NOT NULL OR 60 < (
        SELECT count(*) FROM (SELECT FROM {schema}.{table} AS t WHERE t.resource_id = v_mine.resource_id
                              AND t.queue_position < estimate.queue_position LIMIT 61) AS ahead) THEN
        RETURN;
    END IF;
    SELECT array_agg({schema}.kind_of(h.note, h.program) ORDER BY h.place), array_agg(h.held ORDER BY h.place) INTO v_kinds, v_holds
    FROM {schema}.recent_holds(v_mine.resource_id) WITH ORDINALITY AS h (held, waited, note, program, place);
    IF coalesce(cardinality(v_holds), 0) < 5 THEN
        RETURN;
    END IF;
    FOR v_row IN SELECT e.* FROM {schema}.entries(v_mine.resource_id) AS e
                 WHERE e.queue_position <= estimate.queue_position ORDER BY e.queue_position LOOP
        v_like := ARRAY(SELECT h.held FROM (
            SELECT h.held, h.place FROM unnest(v_holds, v_kinds) WITH ORDINALITY AS h (held, kind, place)
            WHERE h.kind = {schema}.kind_of(v_row.note, v_row.program) ORDER BY h.place LIMIT 60) AS h ORDER BY h.held);
        IF cardinality(v_like) < 8 AND 8 > (SELECT count(*) FROM unnest(v_kinds) AS k
                                           WHERE k = {schema}.kind_of(v_row.note, v_row.program)) THEN
            v_like := ARRAY(SELECT h FROM unnest(v_holds[:60]) AS h ORDER BY h);
        END IF;
        SELECT CASE WHEN avg(h) > 0 THEN stddev_pop(h) / avg(h) / sqrt(count(*)) ELSE 0 END INTO v_doubt FROM unnest(v_like) AS h;
        v_waits := v_row.state = 'waits';
        IF v_waits THEN
            -- In each simulation the row enters when there is room for it beside the rows that stay for longer.
            v_enters := ARRAY(
                SELECT coalesce(max(a.leaves) FILTER (
                           WHERE a.load > least(v_row.concurrency_limit, v_set.cap, a.declared)), 0)
                FROM generate_series(1, v_plays) AS p (play) LEFT JOIN LATERAL (
                    SELECT r.leaves, v_row.weight + sum(r.weight) OVER longest AS load, min(r.declared) OVER longest AS declared
                    FROM (SELECT v_leaves[(n.place - 1) * v_plays + p.play] AS leaves, v_weight[n.place] AS weight, v_limit[n.place] AS declared
                          FROM generate_series(1, cardinality(v_weight)) AS n (place)
                          WHERE v_row.access_type = 'write' OR v_access[n.place] <> v_row.access_type) AS r
                    WINDOW longest AS (ORDER BY r.leaves DESC ROWS UNBOUNDED PRECEDING)) AS a ON true
                GROUP BY p.play ORDER BY p.play);
            IF v_row.weight > least(v_row.concurrency_limit, v_set.cap) THEN
                v_enters := array_fill('infinity'::float, ARRAY[v_plays]);  -- until the operator raises the cap
            END IF;
        END IF;
        EXIT WHEN v_row.queue_position = estimate.queue_position;
        v_leaves := v_leaves || ARRAY(
            SELECT CASE WHEN v_waits THEN v_enters[s.play] + {schema}.expected_remaining(v_like, s.share, 0) * exp(v_doubt * s.luck)
                        WHEN v_row.state = 'dead' OR v_row.granted_at IS NULL AND v_row.member_id IS NOT NULL THEN 0
                        ELSE greatest(0, least({schema}.expected_remaining(v_like, s.share, v_row.seconds), v_row.grace - v_row.missing_for)) END
            FROM (
                -- The random numbers are the same in each call, so that displayed estimates do not jump. For each row
                -- the simulations have different quantiles, evenly spread; each simulation has one error of the means.
                SELECT n.play, (row_number() OVER (ORDER BY {schema}.deterministic_fraction(v_row.queue_position, n.play)) - 0.5) / v_plays AS share,
                       sqrt(-2 * ln({schema}.deterministic_fraction(-1, n.play))) * cos(2 * pi() * {schema}.deterministic_fraction(-2, n.play)) AS luck
                FROM generate_series(1, v_plays) AS n (play)) AS s
            ORDER BY s.play);
        v_access := v_access || v_row.access_type::text;
        v_weight := v_weight || v_row.weight;
        v_limit := v_limit || v_row.concurrency_limit;
    END LOOP;
    IF v_waits AND v_row.queue_position = estimate.queue_position AND NOT 'infinity' = ANY (v_enters) THEN
        RETURN QUERY
        SELECT e.among[1], e.among[2], e.among[3], l.among[1], l.among[2], cardinality(v_like)
        FROM (SELECT percentile_cont(ARRAY[0.1, 0.5, 0.9]) WITHIN GROUP (ORDER BY x) AS among FROM unnest(v_enters) AS x) AS e,
             (SELECT percentile_cont(ARRAY[0.1, 0.9]) WITHIN GROUP (ORDER BY x) AS among FROM unnest(v_like) AS x) AS l;
    END IF;
END
$$;

-- Return why a request waits: one row for each row that blocks it, from the head of the queue on, or one row without a
-- blocker; no row if there is no such request. code: as of `sqlsem why`; or holds, revoked or dead for a request that no
-- longer waits. reason: the same in words, and when the request will be granted, if `estimate` can tell. goes_on_at: the
-- position at which the blocker's owner waits itself, for the next call.
CREATE OR REPLACE FUNCTION {schema}.why(queue_position bigint)
RETURNS TABLE (code text, reason text, behind bigint, state text, host varchar, pid integer, program varchar, note varchar,
               seconds float, goes_on_at bigint) {plpgsql_indexed_definer}
#variable_conflict use_column
DECLARE
    v_row    record;
    v_set    record;
    v_cap    integer;
    v_room   integer;
    v_edge   bigint;
    v_fits   boolean;
    v_capped boolean;
    v_own    bigint;
    v_labels text[];
    v_rows   bigint[];
BEGIN
    SELECT e.* INTO v_row FROM {schema}.{table} AS t CROSS JOIN LATERAL {schema}.entries(t.resource_id) AS e
    WHERE t.queue_position = why.queue_position AND e.queue_position = why.queue_position;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT s.cap, CASE WHEN o.cap IS NULL THEN p.cap_by ELSE o.cap_by END AS cap_by,
           CASE WHEN o.cap IS NULL THEN p.prefix || '*' END AS pattern, s.paused_at, o.paused_by
    INTO v_set
    FROM {schema}.effective_settings(v_row.resource_id) AS s LEFT JOIN {schema}.resource AS o ON o.resource_id = v_row.resource_id
    CROSS JOIN LATERAL {schema}.pattern_of(v_row.resource_id) AS p;
    -- (If the cap is below the request's weight, compute the blockers without the cap.)
    v_cap := CASE WHEN v_row.weight <= v_set.cap THEN v_set.cap END;
    IF v_row.access_type = 'upgrade' AND v_row.state = 'holds' THEN
        code := 'upgrading';
        reason := 'it becomes the writer when the others have left';
        v_rows := ARRAY(SELECT e.queue_position FROM {schema}.entries(v_row.resource_id) AS e
                        WHERE e.granted_at IS NOT NULL AND e.queue_position <> v_row.queue_position);
    ELSIF v_row.state <> 'waits' THEN
        code := v_row.state;
        reason := CASE WHEN v_row.state = 'holds' AND v_row.owner LIKE 'handed over by %' THEN 'it was handed over, and is not adopted yet'
                       WHEN v_row.state = 'holds' THEN 'it is granted'
                       WHEN v_row.state = 'dead' THEN 'its owner is dead: the next waiter that checks removes it'
                       ELSE 'an operator has revoked it' END;
    ELSE
        WITH ahead AS (
            SELECT e.queue_position, e.access_type, e.concurrency_limit, e.member_id, e.owner,
                   sum(e.weight) OVER upto + v_row.weight AS load, min(e.concurrency_limit) OVER upto AS declared
            FROM {schema}.entries(v_row.resource_id) AS e
            WHERE e.queue_position < v_row.queue_position AND (v_row.access_type = 'write' OR e.access_type <> v_row.access_type)
            WINDOW upto AS (ORDER BY e.queue_position)),
        own AS (
            SELECT a.queue_position, sum(e.weight) OVER upto + v_row.weight AS load, min(e.concurrency_limit) OVER upto AS declared
            FROM ahead AS a JOIN {schema}.{table} AS e ON e.resource_id = v_row.resource_id AND e.queue_position = a.queue_position
            WHERE a.member_id = v_row.member_id AND a.owner = v_row.owner
            WINDOW upto AS (ORDER BY a.queue_position))
        SELECT min(a.queue_position) FILTER (WHERE a.load > least(v_row.concurrency_limit, v_cap, a.declared)),
               coalesce(NOT bool_or(a.load > least(v_row.concurrency_limit, a.declared)), true),
               (SELECT min(o.queue_position) FROM own AS o WHERE o.load > least(v_row.concurrency_limit, v_cap, o.declared))
        INTO v_edge, v_fits, v_own FROM ahead AS a;
        v_capped := v_edge IS NULL AND (v_set.cap IS NULL OR v_cap IS NOT NULL);
        SELECT array_agg(e.queue_position ORDER BY e.queue_position), array_agg(DISTINCT split_part(e.access_type, ':', 1)::text),
               least(v_row.concurrency_limit, v_cap, min(e.concurrency_limit))
        INTO v_rows, v_labels, v_room
        FROM {schema}.entries(v_row.resource_id) AS e
        WHERE e.queue_position <= v_edge AND (v_row.access_type = 'write' OR e.access_type <> v_row.access_type);
        code := CASE WHEN v_set.paused_at IS NOT NULL THEN 'paused' WHEN v_capped THEN 'turn_now' WHEN v_fits THEN 'cap'
                     WHEN v_own IS NOT NULL THEN 'own_earlier'
                     WHEN v_row.access_type <> 'write' AND v_labels && ARRAY['write', 'upgrade'] THEN 'writer_ahead'
                     WHEN v_labels = ARRAY['stage'] THEN 'stage' WHEN v_labels <@ ARRAY['read', 'upgrade'] THEN 'readers_ahead'
                     ELSE 'limit' END;
        reason := CASE code
            WHEN 'paused' THEN concat('the resource is paused', ' by ' || v_set.paused_by, ': nothing is granted until resume')
            WHEN 'turn_now' THEN 'nothing blocks it any more: it is granted as soon as its process polls'
            WHEN 'cap' THEN concat('the operator''s cap of ', v_set.cap, ' for ' || v_set.pattern, ' by ' || v_set.cap_by,
                                   CASE WHEN v_cap IS NULL THEN ' is below its weight' ELSE ' is reached' END)
            WHEN 'own_earlier' THEN 'it waits for its own earlier row, and so for itself'
            WHEN 'writer_ahead' THEN 'a writer is ahead'
            WHEN 'readers_ahead' THEN 'it waits for the readers to leave'
            WHEN 'stage' THEN 'all of another stage that came before it have to leave'
            ELSE CASE WHEN v_room > 1 THEN concat('the limit of ', v_room, ' is full') ELSE 'another request holds it' END END;
        IF code = 'own_earlier' THEN
            v_rows := ARRAY(SELECT r FROM unnest(v_rows) AS r WHERE r = v_own);
        END IF;
    END IF;
    reason := reason || coalesce((
        SELECT format('; it is granted in about %s (between %s and %s)', to_char(i.likely * interval '1 second', 'FMHH24:MI:SS'),
                      to_char(i.low * interval '1 second', 'FMHH24:MI:SS'), to_char(i.high * interval '1 second', 'FMHH24:MI:SS'))
        FROM {schema}.estimate(why.queue_position) AS i WHERE v_row.state = 'waits'), '');
    RETURN QUERY
    SELECT code, reason, e.queue_position, e.state, e.host, e.pid, e.program, e.note, e.seconds,
           coalesce((SELECT w.queue_position FROM {schema}.{table} AS w
                     WHERE w.resource_id = v_row.resource_id AND w.queue_position = e.queue_position
                       AND w.granted_at IS NULL AND w.revoked_at IS NULL),
                    (SELECT w.queue_position FROM {schema}.member_rows(e.member_id) AS w
                     WHERE w.owner = e.owner AND w.granted_at IS NULL AND w.revoked_at IS NULL
                     ORDER BY w.queue_position LIMIT 1))
    FROM (SELECT 1) AS one LEFT JOIN {schema}.entries(v_row.resource_id) AS e ON e.queue_position = ANY (v_rows)
    ORDER BY e.queue_position;
END
$$;
