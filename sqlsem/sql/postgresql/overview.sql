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
