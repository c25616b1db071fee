-- sqlsem, the overview for PostgreSQL: all that is there at one instant, for those who look on; and what operators did. May be
-- run again at any time. It only looks: nothing here is on the way of who takes a lock or gives it back.

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

-- A moment as microseconds since 1970, which is exact in JSON.
CREATE OR REPLACE FUNCTION {schema}.microseconds(p_moment timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE
AS $$ SELECT pg_catalog.round(pg_catalog.date_part('epoch', p_moment) OPERATOR(pg_catalog.*) 1000000)::bigint $$;

-- What is set for resources, by whom; beside what resources() tells.
CREATE OR REPLACE FUNCTION {schema}.resource_settings()
RETURNS TABLE (resource_id varchar, cap integer, paused_at timestamptz, stale_after float, paused_by name, cap_by name)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT o.resource_id, o.cap, o.paused_at, o.stale_after_ms / 1000.0::float, o.paused_by, o.cap_by FROM {schema}.resource AS o
$$;

-- The newest holds of a resource that ended as they should, of its last 200 requests: the newest first. (By its index, of which
-- no more is read.)
CREATE OR REPLACE FUNCTION {schema}.recent_holds(p_resource varchar)
RETURNS TABLE (held float, waited float, note varchar, program varchar)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT round(extract(epoch FROM greatest(h.ended_at - h.granted_at, interval '0'))::numeric, 3)::float,
           round(extract(epoch FROM greatest(h.granted_at - h.requested_at, interval '0'))::numeric, 3)::float, h.note, h.program
    FROM (SELECT p.* FROM {schema}.history AS p WHERE p.resource_id = p_resource ORDER BY p.ended_at DESC LIMIT 200) AS h
    WHERE h.outcome = 'released' AND h.granted_at IS NOT NULL
    ORDER BY h.ended_at DESC;
END
$$;

-- Everything but the rows of entries(): one row, whose columns are arrays in JSON. rounds: those that are open, or failed and not
-- begun anew, or whose continuation has not finished; without bodies. holds: of the 200 resources that are wanted most.
CREATE OR REPLACE FUNCTION {schema}.overview(
    OUT taken_at timestamptz, OUT settings json, OUT members json, OUT queues json, OUT rounds json, OUT holds json)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    taken_at := clock_timestamp();
    settings := (SELECT json_agg(json_build_array(s.resource_id, s.cap, {schema}.microseconds(s.paused_at), s.stale_after, s.paused_by, s.cap_by))
                 FROM {schema}.resource_settings() AS s);
    members := (
        SELECT json_agg(json_build_array(
                   m.member_id, m.host, coalesce(m.pid, m.backend_pid), m.program, m.login, {schema}.microseconds(m.joined_at),
                   CASE WHEN m.lease_ms IS NULL THEN 'beacon' ELSE 'lease' END,
                   CASE WHEN l.missing THEN greatest(0, extract(epoch FROM taken_at - coalesce(l.since, m.seen_at))) END,
                   coalesce(m.lease_ms, m.grace_ms) / 1000.0,
                   CASE WHEN l.dead THEN 0
                        WHEN m.lease_ms IS NOT NULL THEN greatest(0, extract(epoch FROM m.lease_until - taken_at))
                        WHEN l.missing THEN greatest(0, m.grace_ms / 1000.0 - extract(epoch FROM taken_at - m.seen_at)) END,
                   coalesce(q.holding, 0), coalesce(q.waiting, 0)) ORDER BY m.member_id)
        FROM {schema}.member AS m JOIN {schema}.look_at_members() AS l ON l.member_id = m.member_id
        LEFT JOIN (SELECT t.member_id, count(t.granted_at) AS holding, count(*) - count(t.granted_at) AS waiting
                   FROM {schema}.{table} AS t GROUP BY t.member_id) AS q ON q.member_id = m.member_id);
    queues := (SELECT json_agg(json_build_array(
                   c.queue_name, c.pending, c.running, c.finished, c.failed, c.cancelled, c.lost, c.oldest, c.rate, c.blocked_by))
               FROM {schema}.queue_counts(NULL) AS c);
    rounds := (
        SELECT json_agg(json_build_array(
                   r.round_id, r.round_name, r.status, r.window_ms / 1000.0, {schema}.microseconds(r.opened_at), {schema}.microseconds(r.ended_at),
                   extract(epoch FROM coalesce(r.ended_at, taken_at) - r.opened_at), r.then_status, r.then_kind, NULL,
                   r.then_attempt, r.then_owner, {schema}.microseconds(r.then_started), {schema}.microseconds(r.then_ended),
                   extract(epoch FROM coalesce(r.then_ended, taken_at) - r.then_started), r.then_error,
                   p.part, p.status, p.is_last, p.attempt, p.member_id, p.owner, p.host, p.pid,
                   {schema}.microseconds(p.started_at), {schema}.microseconds(p.ended_at),
                   extract(epoch FROM coalesce(p.ended_at, taken_at) - p.started_at), p.error,
                   CASE WHEN p.status = 'running' AND l.missing IS NOT FALSE
                        THEN extract(epoch FROM taken_at - coalesce(l.since, p.started_at)) END,
                   r.opened_by, p.login) ORDER BY r.round_id DESC, p.part)
        FROM {schema}.round AS r JOIN {schema}.round_part AS p ON p.round_id = r.round_id
        LEFT JOIN {schema}.look_at_members() AS l ON l.member_id = p.member_id AND p.status = 'running'
        WHERE r.status = 'open' OR r.then_status IN ('pending', 'running')
           OR (r.status = 'failed' OR r.then_status = 'failed')
              AND NOT EXISTS (SELECT FROM {schema}.round AS n WHERE n.round_name = r.round_name AND n.round_id > r.round_id));
    holds := (
        SELECT json_agg(json_build_array(w.resource_id, h.held, h.waited, h.note, h.program))
        FROM (SELECT t.resource_id FROM {schema}.{table} AS t
              GROUP BY t.resource_id ORDER BY count(*) - count(t.granted_at) DESC, t.resource_id LIMIT 200) AS w
        CROSS JOIN LATERAL {schema}.recent_holds(w.resource_id) AS h);
END
$$;


-- Why a request waits: one row for each row that holds it back, from the head of the queue on (or one without, where nobody does);
-- none where there is no such request. goes_on_at: with which the owner of that row waits itself; ask about that one next. The
-- codes are those of `sqlsem why` (docs/cli.md), and holds, revoked or dead for those that wait no more.
CREATE OR REPLACE FUNCTION {schema}.why(queue_position bigint)
RETURNS TABLE (code text, reason text, behind bigint, state text, host varchar, pid integer, program varchar, note varchar,
               seconds float, goes_on_at bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
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
    SELECT s.* INTO v_set FROM (SELECT 1) AS one LEFT JOIN {schema}.resource_settings() AS s ON s.resource_id = v_row.resource_id;
    -- Where the cap leaves such a request no room at all, the others are looked for without it.
    v_cap := CASE WHEN v_row.weight <= v_set.cap THEN v_set.cap END;
    IF v_row.access_type = 'upgrade' AND v_row.state = 'holds' THEN
        code := 'upgrading';
        reason := 'it becomes the writer when the others have left';
        v_rows := ARRAY(SELECT e.queue_position FROM {schema}.entries(v_row.resource_id) AS e
                        WHERE e.granted_at IS NOT NULL AND e.queue_position <> v_row.queue_position);
    ELSIF v_row.state <> 'waits' THEN
        code := v_row.state;
        reason := CASE v_row.state WHEN 'holds' THEN 'it has been let in' WHEN 'dead' THEN 'its owner is dead: it is removed by the next who looks'
                                   ELSE 'an operator takes it away' END;
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
            WHEN 'paused' THEN concat('the resource is paused', ' by ' || v_set.paused_by, ': nobody is let in until resume')
            WHEN 'turn_now' THEN 'nothing holds it back any more: it goes in as soon as its process looks'
            WHEN 'cap' THEN concat('the operator''s cap of ', v_set.cap, ' by ' || v_set.cap_by,
                                   CASE WHEN v_cap IS NULL THEN ' is below its weight' ELSE ' is reached' END)
            WHEN 'own_earlier' THEN 'it waits for its own earlier row, and so for itself'
            WHEN 'writer_ahead' THEN 'a writer is ahead'
            WHEN 'readers_ahead' THEN 'it waits until those have left who read'
            WHEN 'stage' THEN 'all of another stage that came before it have to leave'
            ELSE CASE WHEN v_room > 1 THEN concat('the limit of ', v_room, ' is full') ELSE 'somebody holds it' END END;
        IF code = 'own_earlier' THEN
            v_rows := ARRAY(SELECT r FROM unnest(v_rows) AS r WHERE r = v_own);
        END IF;
    END IF;
    RETURN QUERY
    SELECT code, reason, e.queue_position, e.state, e.host, e.pid, e.program, e.note, e.seconds,
           (SELECT w.queue_position FROM {schema}.{table} AS w
            WHERE w.granted_at IS NULL AND w.revoked_at IS NULL
              AND (w.queue_position = e.queue_position OR w.member_id = e.member_id AND w.owner = e.owner)
            ORDER BY w.queue_position <> e.queue_position, w.queue_position LIMIT 1)
    FROM (SELECT 1) AS one LEFT JOIN {schema}.entries(v_row.resource_id) AS e ON e.queue_position = ANY (v_rows)
    ORDER BY e.queue_position;
END
$$;


-- What operators did ----------------------------------------------------------------------------------------------

-- Writes down what somebody is just doing. Where it is done is what the client says of itself (sqlsem.client: host, process and
-- program, in lines), or what the server sees of it.
CREATE OR REPLACE FUNCTION {schema}.note_operation(
    p_action text, p_resource varchar, p_position bigint, p_queue varchar, p_task bigint, p_old text, p_new text) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO {schema}.operation (host, pid, program, action, resource_id, queue_position, queue_name, task_id, old_value, new_value)
    SELECT left(coalesce(nullif(split_part(c.told, E'\n', 1), ''), host(inet_client_addr())), 255),
           CASE WHEN split_part(c.told, E'\n', 2) ~ '^[0-9]{1,9}$' THEN split_part(c.told, E'\n', 2)::integer ELSE pg_backend_pid() END,
           left({schema}.plain(coalesce(nullif(split_part(c.told, E'\n', 3), ''), current_setting('application_name'))), 255),
           p_action, p_resource, p_position, p_queue, p_task, left(p_old, 1000), left(p_new, 1000)
    FROM (SELECT coalesce(current_setting('sqlsem.client', true), '') AS told) AS c
$$;

-- Newest first; of one resource or work queue, of one action, by one login. p_since and p_until: ages in seconds.
CREATE OR REPLACE FUNCTION {schema}.operations(
    p_name varchar DEFAULT NULL, p_most integer DEFAULT 100, p_since float DEFAULT NULL, p_until float DEFAULT NULL,
    p_action varchar DEFAULT NULL, p_who varchar DEFAULT NULL)
RETURNS TABLE (operation_id bigint, done_at timestamptz, login name, host varchar, pid integer, program varchar, action varchar,
               resource_id varchar, queue_position bigint, queue_name varchar, task_id bigint, old_value varchar, new_value varchar)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT o.operation_id, o.done_at, o.login, o.host, o.pid, o.program, o.action, o.resource_id, o.queue_position, o.queue_name,
           o.task_id, o.old_value, o.new_value
    FROM {schema}.operation AS o
    WHERE (p_name IS NULL OR p_name IN (o.resource_id, o.queue_name))
      AND (p_since IS NULL OR o.done_at >= statement_timestamp() - p_since * interval '1 second')
      AND (p_until IS NULL OR o.done_at <= statement_timestamp() - p_until * interval '1 second')
      AND (p_action IS NULL OR o.action = p_action)
      AND (p_who IS NULL OR p_who IN (o.login, o.host, o.host || ':' || o.pid, o.program))
    ORDER BY o.operation_id DESC LIMIT p_most
$$;

-- Removes what is past keeping, as prune does with the history: of the oldest p_most rows.
CREATE OR REPLACE FUNCTION {schema}.prune_operations(p_most integer) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH oldest AS MATERIALIZED (
        SELECT o.operation_id, o.done_at FROM {schema}.operation AS o ORDER BY o.operation_id LIMIT p_most FOR UPDATE SKIP LOCKED),
    gone AS (
        DELETE FROM {schema}.operation WHERE operation_id = ANY (ARRAY(
            SELECT o.operation_id FROM oldest AS o
            WHERE o.done_at < clock_timestamp()
                              - (SELECT value FROM {schema}.setting WHERE name = 'history_days')::integer * interval '1 day'
               OR o.operation_id <= (SELECT max(operation_id) FROM {schema}.operation)
                                    - (SELECT value FROM {schema}.setting WHERE name = 'history_rows')::bigint))
        RETURNING 1)
    SELECT count(*) FROM gone
$$;
