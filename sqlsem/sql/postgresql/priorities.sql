-- sqlsem, priorities for PostgreSQL. May be run again at any time, also while locks are held.
--
-- An operator sets priorities for a resource (resource.ageing_ms). Requests then wait in the resource's priority queue
-- as priority entries: rows of the resource 'priority:' || resource, which do not block each other (access type 'read',
-- limit 100, weight 1 + priority). A priority entry grants nothing. Only the first entry of the queue may try for the
-- resource itself, as register does with p_try. If that succeeds, it gets a granted row on the resource, with a number
-- higher than all before it, and the entry is released in the same transaction. So
--   * on the resource itself the usual rule decides (eligibility). All rows there are granted, except rows from before
--     the resource had priorities;
--   * entries are chosen and inserted under the gate of the resource: so no request passes an earlier one of higher
--     rank, and only a row of the resource itself is a grant;
--   * a crash leaves an entry or a row of a dead member, and both are reaped like any row.
-- The queue is in the order of requested_at less ageing_ms for each step of priority, which is fixed when a request
-- enters. So only requests that come less than (difference in priority) * ageing_ms later can overtake a request: no
-- request starves.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Return the name of a resource's priority queue.
CREATE OR REPLACE FUNCTION {schema}.priority_queue_of(p_resource varchar) RETURNS varchar
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT ('priority:'::pg_catalog.text OPERATOR(pg_catalog.||) p_resource::pg_catalog.text)::varchar $$;

-- Return the resources with priorities, and the seconds of waiting that one step of priority is worth.
CREATE OR REPLACE FUNCTION {schema}.priorities() RETURNS TABLE (resource_id varchar, ageing float)
{sql_stable_indexed_definer} SELECT o.resource_id, o.ageing_ms / 1000.0::float FROM {schema}.resource AS o WHERE o.ageing_ms IS NOT NULL $$;

-- Return the entry right before one in a priority queue (`before`; NULL: it is the first), and how many entries are
-- before it (`ahead`). A request without an entry (p_place NULL) comes after all of its own rank.
CREATE OR REPLACE FUNCTION {schema}.preceding_request(
    p_line varchar, p_place bigint, p_at timestamptz, p_priority integer, p_ageing integer, OUT before bigint, OUT ahead bigint)
{sql}
    SELECT (array_agg(r.queue_position ORDER BY r.priority_rank DESC, r.queue_position DESC))[1], count(*)
    FROM (SELECT t.queue_position, t.requested_at - (t.weight - 1)::bigint * p_ageing * interval '1 millisecond' AS priority_rank
          FROM {schema}.rows_before_oldest_first(p_line, 9223372036854775807) AS t
          WHERE t.access_type = 'read' AND t.concurrency_limit = 100 AND t.member_id IS NOT NULL AND t.revoked_at IS NULL
            AND t.queue_position IS DISTINCT FROM p_place) AS r
    WHERE (r.priority_rank, r.queue_position)
          < (p_at - p_priority::bigint * p_ageing * interval '1 millisecond', coalesce(p_place, 9223372036854775807))
$$;

-- Request a resource with priorities, or poll for the entry p_place that an earlier call has returned. The result:
--   granted            queue_position is the granted row; the entry is released
--   not granted        queue_position is the entry; before and ahead: see preceding_request
--   no queue_position  with p_try: the resource is not free; else: the entry is gone, or the granted row was revoked
-- With the p_uid of a call whose reply was lost, return the result of that call.
CREATE OR REPLACE FUNCTION {schema}.acquire_by_priority(
    p_member bigint, p_requesting_id varchar, p_owner varchar, p_uid varchar, p_try boolean,
    p_resource varchar, p_access varchar, p_limit integer, p_weight integer, p_note varchar, p_priority integer, p_place bigint,
    OUT queue_position bigint, OUT granted boolean, OUT before bigint, OUT ahead bigint) {plpgsql_generic_definer}
DECLARE
    v_line   varchar := {schema}.priority_queue_of(p_resource);
    v_ageing integer := {schema}.ageing_of(p_resource);
    v_place  record;
    v_row    record;
    v_freed  integer;
BEGIN
    PERFORM {schema}.require_outside_transaction('acquire_by_priority');
    granted := false;
    IF (p_priority BETWEEN 0 AND 99) IS NOT TRUE OR length(p_resource) > 246 THEN
        RAISE EXCEPTION 'sqlsem: bad request: priority % of %; it is from 0 to 99, of a name with up to 246 characters',
            p_priority, quote_literal({schema}.escape_control_chars(p_resource)) USING ERRCODE = '22023';
    ELSIF v_ageing IS NULL THEN
        RAISE EXCEPTION 'sqlsem: no priorities are set for %, and the request names one; an operator sets them with: sqlsem set % --priorities --allow-new',
            quote_literal({schema}.escape_control_chars(p_resource)), {schema}.escape_control_chars(p_resource) USING ERRCODE = '22023',
            HINT = 'Or ask without a priority.';
    END IF;
    {lock_timeout:60s}
    IF p_place IS NOT NULL THEN
        -- Most polls end in this block, without the gate. If a dead member is removed, this poll does nothing else.
        SELECT t.requested_at INTO v_place FROM {schema}.{table} AS t
        WHERE t.resource_id = v_line AND t.queue_position = p_place AND t.member_id = p_member AND t.revoked_at IS NULL;
        IF FOUND THEN
            queue_position := p_place;
            SELECT b.before, b.ahead INTO before, ahead
            FROM {schema}.preceding_request(v_line, p_place, v_place.requested_at, p_priority, v_ageing) AS b;
            IF before IS NOT NULL THEN
                IF {schema}.check_if_dead(v_line, before, p_member) THEN
                    before := NULL;
                END IF;
                RETURN;
            END IF;
            SELECT a.eligible, a.blocker INTO v_row
            FROM {schema}.eligibility(p_resource, 9223372036854775807, p_access, p_limit, p_weight, NULL) AS a;
            IF NOT v_row.eligible THEN
                PERFORM {schema}.reap_dead_members(p_resource, p_member) OR {schema}.check_if_dead(p_resource, v_row.blocker, p_member);
                RETURN;
            END IF;
        END IF;
    END IF;

    PERFORM pg_advisory_xact_lock_shared({schema}.lock_class(7), {schema}.lock_key(p_member));
    PERFORM pg_advisory_xact_lock({schema}.lock_class(0), g.key)
    FROM (SELECT DISTINCT hashtext(name) AS key FROM unnest(ARRAY[p_resource, v_line]) AS name ORDER BY key) AS g;
    -- From here on this session sees all earlier requests.
    queue_position := NULL;
    UPDATE {schema}.{table} AS t SET note = t.note  -- (It writes, so that the commit waits for standbys: see insert_request.)
    WHERE t.request_uid = p_uid AND t.resource_id = p_resource AND t.member_id = p_member
    RETURNING CASE WHEN t.revoked_at IS NULL THEN t.queue_position END INTO queue_position;
    IF FOUND THEN
        granted := queue_position IS NOT NULL;
        RETURN;
    END IF;
    SELECT t.queue_position, t.requested_at INTO v_place FROM {schema}.{table} AS t
    WHERE t.request_uid = p_uid || '.1' AND t.resource_id = v_line AND t.member_id = p_member AND t.revoked_at IS NULL;
    IF NOT FOUND AND p_place IS NOT NULL THEN
        RETURN;
    END IF;
    LOOP
        SELECT b.before, b.ahead INTO before, ahead FROM {schema}.preceding_request(
            v_line, v_place.queue_position, coalesce(v_place.requested_at, clock_timestamp()), p_priority, v_ageing) AS b;
        EXIT WHEN before IS NULL OR NOT p_try OR NOT {schema}.check_if_dead(v_line, before, p_member);  -- a dead owner must not block
    END LOOP;
    IF before IS NULL THEN
        SELECT p.queue_position INTO queue_position
        FROM {schema}.insert_request(p_member, p_requesting_id, p_owner, p_uid, true, p_resource, p_access, p_limit, p_weight, p_note, true) AS p;
        IF queue_position IS NOT NULL THEN
            granted := true;
            IF v_place.queue_position IS NOT NULL THEN
                v_freed := {schema}.release(v_line, v_place.queue_position, p_requesting_id, 'released');
            END IF;
            RETURN;
        END IF;
    END IF;
    IF p_try THEN
        RETURN;
    END IF;
    queue_position := v_place.queue_position;
    IF queue_position IS NULL THEN
        SELECT p.queue_position INTO queue_position
        FROM {schema}.insert_request(p_member, p_requesting_id, p_owner, (p_uid || '.1')::varchar, false, v_line, 'read', 100,
                            p_priority + 1, p_note, true) AS p;
    END IF;
END
$$;
