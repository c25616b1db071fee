-- sqlsem, deadlocks, for PostgreSQL. May be run again at any time, after routines.sql.
--
-- An owner is a thread, asyncio task or session of a member, which can wait for only one thing at a time. (Columns and
-- variables call it `who`.) An owner that waits cannot release anything. The search reads the rows of one instant:
--   1. Suspect each owner that waits. Clear each owner whose requests could be granted if only suspected owners kept
--   their
--      rows. Repeat until nothing changes: the owners that are left are stuck.
--   2. Each blocked row of a stuck owner points to the rows of stuck owners that block it. Owners that reach each other
--      and no other owner are a cycle.
--   3. The waiting row with the highest position in a cycle is the youngest request. Its owner is the victim.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Return true if a member can be in a deadlock at all: one of its owners waits, and has another row for which some
-- request waits. That is rare, so most searches end here.
CREATE OR REPLACE FUNCTION {schema}.may_be_in_deadlock(p_member bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
    SELECT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member AND m.login = session_user)
       AND EXISTS (
           -- (No join, which might compare each row with each. Each resource once, as many rows may be on the same.)
           SELECT FROM (
               SELECT mine.resource_id, min(mine.queue_position) AS first, max(mine.queue_position) AS last
               FROM (SELECT t.resource_id, t.queue_position, count(*) OVER one AS number, bool_or(t.granted_at IS NULL) OVER one AS waits,
                            bool_or(t.access_type = 'upgrade') OVER one AS upgrades
                     FROM {schema}.member_rows(p_member) AS t
                     WHERE t.owner IS NOT NULL AND t.revoked_at IS NULL
                     WINDOW one AS (PARTITION BY t.owner)) AS mine
               WHERE mine.upgrades OR mine.number > 1 AND mine.waits
               GROUP BY mine.resource_id) AS r
           WHERE (SELECT true FROM {schema}.{table} AS w
                  WHERE w.resource_id = r.resource_id AND w.member_id IS NOT NULL AND w.revoked_at IS NULL
                    AND (w.queue_position > r.first AND w.granted_at IS NULL
                         OR (w.queue_position <> r.first OR w.queue_position <> r.last) AND w.access_type = 'upgrade')
                  LIMIT 1))
$$;

-- Return the rows that a deadlock of this member could consist of, in one statement, and so of one instant: the rows of
-- owners that have two rows and wait (`busy`), and of owners that wait ahead of such a row. There is no cycle without
-- them. Rows of bare participants, which may leave at any time, and rows that are being removed do not count. (A client
-- may search these rows for a deadlock itself.)
CREATE OR REPLACE FUNCTION {schema}.deadlock_rows(p_member bigint)
RETURNS TABLE (queue_position bigint, resource_id varchar, member_id bigint, owner varchar, access_type varchar,
               concurrency_limit integer, weight integer, granted boolean, cap integer, waits boolean)
{sql_stable_indexed_definer}
    WITH q AS (
        SELECT t.*, t.granted_at IS NOT NULL AS granted, t.granted_at IS NULL OR t.access_type = 'upgrade' AS waits,
               t.owner IS NOT NULL AND bool_or(t.granted_at IS NULL OR t.access_type = 'upgrade') OVER one
               AND (count(*) OVER one > 1 OR t.access_type = 'upgrade') AS busy
        FROM {schema}.{table} AS t
        WHERE t.member_id IS NOT NULL AND t.revoked_at IS NULL
          AND (t.granted_at IS NOT NULL OR t.waiter_lease_until IS NULL OR t.waiter_lease_until >= clock_timestamp())
        WINDOW one AS (PARTITION BY t.member_id, t.owner)
    ), b AS (
        SELECT q.*, max(q.queue_position) FILTER (WHERE q.busy AND q.waits) OVER (PARTITION BY q.resource_id) AS last_busy FROM q
    )
    SELECT b.queue_position, b.resource_id, b.member_id, b.owner, b.access_type, b.concurrency_limit, b.weight, b.granted,
           o.cap, b.waits
    FROM b CROSS JOIN LATERAL {schema}.effective_settings(b.resource_id) AS o
    WHERE {schema}.may_be_in_deadlock(p_member) AND (b.busy OR b.waits AND b.queue_position < b.last_busy)
$$;

-- Return host, process and session of these members; but no rows if one of them may be dead, as its removal will end
-- the deadlock.
CREATE OR REPLACE FUNCTION {schema}.live_members(p_members bigint[], p_mine bigint)
RETURNS TABLE (member_id bigint, host varchar, pid integer, session_id integer) {plpgsql_indexed_definer}
#variable_conflict use_column
DECLARE
    v_member bigint;
BEGIN
    FOREACH v_member IN ARRAY coalesce(p_members, '{}') LOOP
        PERFORM {schema}.check_liveness(v_member, p_mine);
        IF NOT EXISTS (SELECT FROM {schema}.member AS m
                       WHERE m.member_id = v_member AND m.missing_since IS NULL
                         AND (m.lease_until IS NULL OR m.lease_until >= clock_timestamp())) THEN
            RETURN;
        END IF;
    END LOOP;
    RETURN QUERY SELECT m.member_id, m.host, m.pid, CASE WHEN m.pid IS NULL THEN m.backend_pid END
                 FROM {schema}.member AS m WHERE m.member_id = ANY (p_members);
END
$$;

-- Return the deadlock whose youngest request is this member's, if there is one: the shortest cycle through that
-- request, one row for each owner, beginning with the owner of the request. `ahead`: the row by which the owner blocks
-- the owner before it; `behind`: the row for which it waits. No rows if a member of the cycle may be dead: its removal
-- will end the deadlock.
CREATE OR REPLACE FUNCTION {schema}.find_deadlock(p_member bigint)
RETURNS TABLE (step integer, member_id bigint, host varchar, pid integer, session_id integer, owner varchar,
               ahead_resource varchar, ahead_position bigint, ahead_granted boolean,
               resource_id varchar, queue_position bigint, upgrade boolean, behind_position bigint, whos integer)
{plpgsql_indexed_definer}
#variable_conflict use_column
DECLARE
    -- Of each row, by resource and position. label and bound: the numbers of its access type and of its limit among those
    -- of its resource. room: the limit for this row, its own or the operator's. blocked: it cannot be granted.
    v_who      integer[];
    v_member   bigint[];
    v_owner    varchar[];
    v_resource varchar[];
    v_position bigint[];
    v_queue    integer[];
    v_label    integer[];
    v_bound    integer[];
    v_group    integer[];
    v_room     integer[];
    v_weight   integer[];
    v_granted  boolean[];
    v_blocked  boolean[];
    v_write    boolean[];
    v_upgrade  boolean[];
    -- The rows by owner, label and group, with the part of each of these.
    v_by_owner integer[];
    v_by_label integer[];
    v_by_group integer[];
    v_o_first  integer[];
    v_o_last   integer[];
    v_l_next   integer[];
    v_l_last   integer[];
    v_g_next   integer[];
    v_g_last   integer[];
    v_left     integer[];    -- of each owner: its blocked rows; above 0: it is stuck
    v_limit    integer[];    -- of each row, then of each bound
    v_limits   integer[];
    -- Of each queue: its rows, labels, bounds and groups; its upgrade; the granted rows of stuck owners; if it is listed.
    v_q_first  integer[];
    v_q_last   integer[];
    v_q_label  integer[];
    v_q_labels integer[];
    v_q_bound  integer[];
    v_q_bounds integer[];
    v_q_group  integer[];
    v_q_groups integer[];
    v_upgrading integer[];
    v_inside   integer[];
    v_is_listed boolean[];
    -- Of each group: the load of the rows ahead of its next row, their number, and how many have which bound. (v_counted:
    -- the first row that is not in these numbers.)
    v_counted  integer[];
    v_load     bigint[];
    v_number   integer[];
    v_cell     integer[];
    v_cells    integer[];
    -- The graph: a vertex for each owner, then one for each row. Of a vertex: its first edge. Of an edge: its target, and
    -- the next edge of the vertex.
    v_first    integer[];
    v_target   integer[];
    v_next     integer[];
    v_edges    integer := 0;
    v_newest   integer[];    -- of each label: its last row so far, and in which stretch without a blocked write
    v_stretch  integer[];
    v_current  integer[];    -- the labels of this stretch
    -- The search for components. Of each vertex: its number, the lowest number that it reaches, and its component.
    v_num      integer[];
    v_low      integer[];
    v_part     integer[];
    v_stack    integer[];
    v_path     integer[];
    v_victim   integer := 0;
    -- The way back. Of each owner: at which level it is reached, from which row, by which of its own rows.
    v_level    integer[];
    v_waiter   integer[];
    v_blocker  integer[];
    v_front    integer[];
    v_found    integer[];
    v_owners   integer[];
    v_members  bigint[];
    v_behind   integer[];
    v_queues   integer[];    -- the queues to check
    v_rows     integer;
    v_top      integer := 0;
    v_depth    integer;
    v_numbers  integer := 0;
    v_count    integer;
    v_low_limit integer;
    v_is_sink  boolean;
    v_id       bigint;
    v_at       bigint[];     -- the positions of v_front
    q          integer;      -- a queue, group, row, other row, number, owner or vertex
    g          integer;
    i          integer;
    k          integer;
    n          integer;
    w          integer;
BEGIN
    WITH r AS (
        SELECT b.*, row_number() OVER (ORDER BY b.resource_id, b.queue_position)::integer AS n,
               dense_rank() OVER (ORDER BY b.member_id, b.owner, CASE WHEN b.owner IS NULL THEN b.queue_position END)::integer AS who,
               dense_rank() OVER (ORDER BY b.resource_id)::integer AS queue,
               dense_rank() OVER (ORDER BY b.resource_id, b.access_type)::integer AS label,
               dense_rank() OVER (ORDER BY b.resource_id, b.concurrency_limit)::integer AS bound,
               -- A blocked row of a group blocks all later ones. Those of access write that are heavier than the operator's
               -- limit are a group of their own: they wait for the operator.
               dense_rank() OVER (ORDER BY b.resource_id, b.access_type, b.access_type <> 'write',
                                           CASE WHEN b.access_type = 'write' THEN (b.weight > b.cap)::integer ELSE b.weight END,
                                           CASE WHEN b.access_type <> 'write' THEN b.concurrency_limit END)::integer AS "group",
               least(b.concurrency_limit, CASE WHEN b.cap >= b.weight THEN b.cap END) AS room
        FROM {schema}.deadlock_rows(p_member) AS b)
    SELECT array_agg(r.who ORDER BY r.n), array_agg(r.member_id ORDER BY r.n), array_agg(r.owner ORDER BY r.n),
           array_agg(r.resource_id ORDER BY r.n), array_agg(r.queue_position ORDER BY r.n), array_agg(r.queue ORDER BY r.n),
           array_agg(r.label ORDER BY r.n), array_agg(r.bound ORDER BY r.n), array_agg(r."group" ORDER BY r.n),
           array_agg(r.room ORDER BY r.n), array_agg(r.weight ORDER BY r.n), array_agg(r.granted ORDER BY r.n),
           array_agg(r.waits ORDER BY r.n), array_agg(r.access_type = 'write' ORDER BY r.n),
           array_agg(r.access_type = 'upgrade' ORDER BY r.n), array_agg(r.concurrency_limit ORDER BY r.n),
           array_agg(r.n ORDER BY r.who, r.n), array_agg(r.n ORDER BY r.label, r.n),
           array_agg(r.n ORDER BY r."group", r.n) FILTER (WHERE r.waits AND r.access_type <> 'upgrade'), count(*)
    INTO v_who, v_member, v_owner, v_resource, v_position, v_queue, v_label, v_bound, v_group, v_room, v_weight, v_granted,
         v_blocked, v_write, v_upgrade, v_limits, v_by_owner, v_by_label, v_by_group, v_rows
    FROM r;
    IF v_rows = 0 THEN  -- (most calls end here)
        RETURN;
    END IF;

    -- Note the parts of owners, labels, groups and queues.
    v_left := array_fill(0, ARRAY[v_rows]);
    v_o_first := v_left;
    v_o_last := v_left;
    v_l_next := v_left;
    v_l_last := v_left;
    v_g_next := v_left;
    v_g_last := v_left;
    v_limit := array_fill(NULL::integer, ARRAY[v_rows]);
    v_q_first := v_left;
    v_q_last := v_left;
    v_q_label := v_left;
    v_q_labels := v_left;
    v_q_bound := v_left;
    v_q_bounds := v_left;
    v_q_group := v_left;
    v_q_groups := v_left;
    v_upgrading := v_left;
    v_inside := v_left;
    v_counted := v_left;
    v_load := array_fill(0::bigint, ARRAY[v_rows]);
    v_number := v_left;
    v_cell := v_left;
    v_queues := v_left;
    v_is_listed := array_fill(false, ARRAY[v_rows]);
    FOR n IN 1..v_rows LOOP
        q := v_queue[n];
        IF v_q_first[q] = 0 THEN
            v_q_first[q] := n;
            v_q_bound[q] := v_bound[n];
            v_top := v_top + 1;
            v_queues[v_top] := q;
            v_is_listed[q] := true;
        END IF;
        v_q_last[q] := n;
        v_q_bound[q] := least(v_q_bound[q], v_bound[n]);
        v_q_bounds[q] := greatest(v_q_bounds[q], v_bound[n]);
        v_limit[v_bound[n]] := v_limits[n];
        v_inside[q] := v_inside[q] + v_granted[n]::integer;
        IF v_upgrade[n] THEN
            v_upgrading[q] := n;
        END IF;
        i := v_by_owner[n];
        w := v_who[i];
        IF v_o_first[w] = 0 THEN
            v_o_first[w] := n;
        END IF;
        v_o_last[w] := n;
        v_left[w] := v_left[w] + v_blocked[i]::integer;
        i := v_by_label[n];
        k := v_label[i];
        IF v_l_next[k] = 0 THEN
            v_l_next[k] := n;
        END IF;
        v_l_last[k] := n;
        IF v_q_label[v_queue[i]] = 0 THEN
            v_q_label[v_queue[i]] := k;
        END IF;
        v_q_labels[v_queue[i]] := k;
    END LOOP;
    v_count := 0;
    FOR n IN 1..coalesce(cardinality(v_by_group), 0) LOOP
        i := v_by_group[n];
        g := v_group[i];
        q := v_queue[i];
        IF v_g_next[g] = 0 THEN
            v_g_next[g] := n;
            v_counted[g] := v_q_first[q];
            v_cell[g] := v_count - v_q_bound[q] + 1;
            v_count := v_count + v_q_bounds[q] - v_q_bound[q] + 1;
        END IF;
        v_g_last[g] := n;
        IF v_q_group[q] = 0 THEN
            v_q_group[q] := g;
        END IF;
        v_q_groups[q] := g;
    END LOOP;
    v_cells := array_fill(0, ARRAY[v_count]);

    -- 1. Check the queues, until that clears no further owner. An owner is cleared when all of its rows can be granted.
    WHILE v_top > 0 LOOP
        q := v_queues[v_top];
        v_top := v_top - 1;
        v_is_listed[q] := false;
        LOOP
            i := NULL;  -- a blocked row that can be granted
            n := v_upgrading[q];  -- (waits for all other holders, at any position)
            IF n > 0 AND v_inside[q] = 1 AND v_blocked[n] AND v_left[v_who[n]] > 0 THEN
                i := n;
            END IF;
            g := v_q_group[q];
            WHILE i IS NULL AND g BETWEEN 1 AND v_q_groups[q] LOOP
                WHILE v_g_next[g] BETWEEN 1 AND v_g_last[g] LOOP
                    k := v_by_group[v_g_next[g]];
                    WHILE v_counted[g] < k LOOP
                        n := v_counted[g];
                        v_counted[g] := n + 1;
                        IF v_left[v_who[n]] > 0 AND (v_write[k] OR v_label[n] <> v_label[k]) THEN
                            v_load[g] := v_load[g] + v_weight[n];
                            v_number[g] := v_number[g] + 1;
                            v_cells[v_cell[g] + v_bound[n]] := v_cells[v_cell[g] + v_bound[n]] + 1;
                        END IF;
                    END LOOP;
                    IF v_left[v_who[k]] > 0 THEN
                        v_low_limit := NULL;
                        FOR n IN v_q_bound[q]..v_q_bounds[q] LOOP
                            IF v_cells[v_cell[g] + n] > 0 THEN
                                v_low_limit := v_limit[n];
                                EXIT;
                            END IF;
                        END LOOP;
                        EXIT WHEN v_number[g] > 0 AND v_load[g] + v_weight[k] > least(v_low_limit, v_room[k]);
                        i := k;
                    END IF;
                    v_g_next[g] := v_g_next[g] + 1;
                    EXIT WHEN i IS NOT NULL;
                END LOOP;
                g := g + 1;
            END LOOP;
            EXIT WHEN i IS NULL;
            v_blocked[i] := false;
            w := v_who[i];
            v_left[w] := v_left[w] - 1;
            CONTINUE WHEN v_left[w] > 0;
            FOR n IN v_o_first[w]..v_o_last[w] LOOP  -- the rows of the owner leave
                i := v_by_owner[n];
                v_inside[v_queue[i]] := v_inside[v_queue[i]] - v_granted[i]::integer;
                FOR g IN greatest(v_q_group[v_queue[i]], 1)..v_q_groups[v_queue[i]] LOOP
                    IF i < v_counted[g] AND v_g_next[g] <= v_g_last[g] THEN
                        k := v_by_group[v_g_next[g]];
                        IF v_write[k] OR v_label[i] <> v_label[k] THEN
                            v_load[g] := v_load[g] - v_weight[i];
                            v_number[g] := v_number[g] - 1;
                            v_cells[v_cell[g] + v_bound[i]] := v_cells[v_cell[g] + v_bound[i]] - 1;
                        END IF;
                    END IF;
                END LOOP;
                IF NOT v_is_listed[v_queue[i]] THEN
                    v_is_listed[v_queue[i]] := true;
                    v_top := v_top + 1;
                    v_queues[v_top] := v_queue[i];
                END IF;
            END LOOP;
        END LOOP;
    END LOOP;

    -- 2. The graph: which owner waits for which. A blocked row points to the last row of each access type ahead that
    -- conflicts with it. From there the earlier ones are reached. No row needs to point past a blocked row of access
    -- write. So there are few edges, however long the queue is.
    v_first := array_fill(0, ARRAY[2 * v_rows]);
    v_target := v_first;
    v_next := v_first;
    v_newest := array_fill(0, ARRAY[v_rows]);
    v_stretch := v_newest;
    v_current := v_newest;
    q := 0;
    k := 0;  -- the stretch
    FOR i IN 1..v_rows LOOP
        IF v_queue[i] <> q THEN
            q := v_queue[i];
            k := k + 1;
            v_count := 0;
        END IF;
        w := v_who[i];
        CONTINUE WHEN v_left[w] = 0;
        IF v_blocked[i] AND v_upgrade[i] THEN
            FOR n IN v_q_first[q]..v_q_last[q] LOOP
                IF n <> i AND v_granted[n] AND v_left[v_who[n]] > 0 THEN
                    v_edges := v_edges + 1;
                    v_target[v_edges] := v_who[n];
                    v_next[v_edges] := v_first[w];
                    v_first[w] := v_edges;
                END IF;
            END LOOP;
        ELSIF v_blocked[i] THEN
            FOR n IN 1..v_count LOOP
                IF v_write[i] OR v_current[n] <> v_label[i] THEN
                    v_edges := v_edges + 1;
                    v_target[v_edges] := v_rows + v_newest[v_current[n]];
                    v_next[v_edges] := v_first[w];
                    v_first[w] := v_edges;
                END IF;
            END LOOP;
            IF v_write[i] THEN
                k := k + 1;
                v_count := 0;
            END IF;
        END IF;
        v_edges := v_edges + 1;
        v_target[v_edges] := w;
        v_next[v_edges] := 0;
        v_first[v_rows + i] := v_edges;
        n := v_label[i];
        IF v_stretch[n] = k THEN
            v_edges := v_edges + 1;
            v_target[v_edges] := v_rows + v_newest[n];
            v_next[v_edges] := v_first[v_rows + i];
            v_first[v_rows + i] := v_edges;
        ELSE
            v_stretch[n] := k;
            v_count := v_count + 1;
            v_current[v_count] := n;
        END IF;
        v_newest[n] := i;
    END LOOP;

    -- Find a cycle of this member's owners: vertices that reach each other and no others (Tarjan's algorithm).
    v_num := array_fill(0, ARRAY[2 * v_rows]);
    v_low := v_num;
    v_part := v_num;
    v_stack := v_num;
    v_path := v_num;
    v_current := v_first;  -- of each vertex: the next edge to follow
    FOR g IN 1..v_rows LOOP
        CONTINUE WHEN v_member[g] <> p_member OR v_left[v_who[g]] = 0 OR v_num[v_who[g]] > 0;
        v_path[1] := v_who[g];
        v_depth := 1;
        WHILE v_depth > 0 LOOP
            w := v_path[v_depth];
            IF v_num[w] = 0 THEN
                v_numbers := v_numbers + 1;
                v_num[w] := v_numbers;
                v_low[w] := v_numbers;
                v_top := v_top + 1;
                v_stack[v_top] := w;
            END IF;
            n := v_current[w];
            IF n > 0 THEN
                v_current[w] := v_next[n];
                k := v_target[n];
                IF v_num[k] = 0 THEN
                    v_depth := v_depth + 1;
                    v_path[v_depth] := k;
                ELSIF v_part[k] = 0 THEN
                    v_low[w] := least(v_low[w], v_num[k]);
                END IF;
                CONTINUE;
            END IF;
            v_depth := v_depth - 1;
            IF v_depth > 0 THEN
                v_low[v_path[v_depth]] := least(v_low[v_path[v_depth]], v_low[w]);
            END IF;
            CONTINUE WHEN v_low[w] < v_num[w];
            v_count := v_top;
            LOOP
                v_part[v_stack[v_top]] := w;
                EXIT WHEN v_stack[v_top] = w;
                v_top := v_top - 1;
            END LOOP;
            -- The component is v_stack[v_top..v_count].
            v_is_sink := true;
            v_victim := 0;
            FOR q IN v_top..v_count LOOP
                k := v_stack[q];
                n := v_first[k];
                WHILE n > 0 AND v_is_sink LOOP
                    v_is_sink := v_part[v_target[n]] = w;
                    n := v_next[n];
                END LOOP;
                EXIT WHEN NOT v_is_sink;
                CONTINUE WHEN k > v_rows;
                FOR n IN v_o_first[k]..v_o_last[k] LOOP
                    i := v_by_owner[n];
                    IF v_blocked[i] AND (v_victim = 0 OR v_position[i] > v_position[v_victim]) THEN
                        v_victim := i;
                    END IF;
                END LOOP;
            END LOOP;
            v_top := v_top - 1;
            EXIT WHEN v_is_sink AND v_victim > 0 AND v_member[v_victim] = p_member;
            v_victim := 0;
        END LOOP;
        EXIT WHEN v_victim > 0;
    END LOOP;
    IF v_victim = 0 THEN
        RETURN;
    END IF;
    v_numbers := 0;  -- the owners in the cycle
    FOR n IN v_top + 1..v_count LOOP
        k := v_stack[n];
        IF k <= v_rows THEN
            v_numbers := v_numbers + 1;
            v_members[v_numbers] := v_member[v_by_owner[v_o_first[k]]];
        END IF;
    END LOOP;
    IF NOT EXISTS (SELECT FROM {schema}.live_members((SELECT array_agg(DISTINCT m) FROM unnest(v_members) AS m), p_member)) THEN
        RETURN;
    END IF;

    -- 3. Find the shortest way from the victim's row back to its owner: breadth first, each level by position.
    v_level := array_fill(0, ARRAY[v_rows]);
    v_waiter := v_level;
    v_blocker := v_level;
    v_front := ARRAY[v_victim];
    v_depth := 0;
    WHILE v_level[v_who[v_victim]] = 0 LOOP
        v_depth := v_depth + 1;
        v_owners := '{}';
        v_top := 0;
        FOREACH i IN ARRAY v_front LOOP
            -- The rows that block this one. (Of each access type those that no earlier row has found: their owners are
            -- reached.)
            v_found := '{}';
            v_count := 0;
            q := v_queue[i];
            IF v_upgrade[i] THEN
                FOR n IN v_q_first[q]..v_q_last[q] LOOP
                    IF n <> i AND v_granted[n] THEN
                        v_count := v_count + 1;
                        v_found[v_count] := n;
                    END IF;
                END LOOP;
            ELSE
                FOR k IN v_q_label[q]..v_q_labels[q] LOOP
                    CONTINUE WHEN NOT v_write[i] AND k = v_label[i];
                    WHILE v_l_next[k] <= v_l_last[k] AND v_by_label[v_l_next[k]] < i LOOP
                        v_count := v_count + 1;
                        v_found[v_count] := v_by_label[v_l_next[k]];
                        v_l_next[k] := v_l_next[k] + 1;
                    END LOOP;
                END LOOP;
            END IF;
            FOREACH n IN ARRAY v_found LOOP
                w := v_who[n];
                IF v_part[w] <> v_part[v_who[v_victim]] THEN
                    NULL;
                ELSIF v_level[w] = 0 THEN
                    v_level[w] := v_depth;
                    v_waiter[w] := i;
                    v_blocker[w] := n;
                    v_top := v_top + 1;
                    v_owners[v_top] := w;
                ELSIF v_waiter[w] = i AND n < v_blocker[w] THEN
                    v_blocker[w] := n;
                END IF;
            END LOOP;
        END LOOP;
        v_front := '{}';
        v_at := '{}';
        v_count := 0;
        FOREACH w IN ARRAY v_owners LOOP
            FOR n IN v_o_first[w]..v_o_last[w] LOOP
                IF v_blocked[v_by_owner[n]] THEN
                    v_count := v_count + 1;
                    v_front[v_count] := v_by_owner[n];
                    v_at[v_count] := v_position[v_by_owner[n]];
                END IF;
            END LOOP;
        END LOOP;
        IF v_count > 1 THEN
            v_front := ARRAY(SELECT f.n FROM unnest(v_front, v_at) AS f (n, at) ORDER BY f.at);
        END IF;
    END LOOP;
    v_found := '{}';
    v_count := 0;
    w := v_who[v_victim];
    LOOP
        v_count := v_count + 1;
        v_found[v_count] := v_waiter[w];
        v_behind[v_count] := v_blocker[w];
        EXIT WHEN v_waiter[w] = v_victim;
        w := v_who[v_waiter[w]];
    END LOOP;
    whos := v_numbers;
    FOR n IN 1..v_count LOOP  -- (No query: it would copy the arrays.)
        step := n;
        i := v_found[v_count - n + 1];
        k := v_behind[CASE WHEN n = 1 THEN 1 ELSE v_count - n + 2 END];
        v_id := v_member[i];
        member_id := v_id;
        SELECT m.host, m.pid, CASE WHEN m.pid IS NULL THEN m.backend_pid END INTO host, pid, session_id
        FROM {schema}.member AS m WHERE m.member_id = v_id;
        owner := v_owner[i];
        ahead_resource := v_resource[k];
        ahead_position := v_position[k];
        ahead_granted := v_granted[k];
        resource_id := v_resource[i];
        queue_position := v_position[i];
        upgrade := v_upgrade[i];
        behind_position := v_position[v_behind[v_count - n + 1]];
        RETURN NEXT;
    END LOOP;
END
$$;

-- Describe the deadlock of a waiting session: victim is the position to give up, words the reason. NULLs if there is
-- none.
CREATE OR REPLACE FUNCTION {schema}.describe_deadlock(p_member bigint, OUT victim bigint, OUT words text) {sql_definer}
    SELECT min(d.queue_position) FILTER (WHERE d.step = 1),
           'Deadlock: ' || string_agg(
               coalesce(d.host, '?') || coalesce(':' || d.pid, ' session ' || d.session_id, '')
               || coalesce(' (' || d.owner || ')', '')
               || CASE WHEN d.ahead_position = d.queue_position AND NOT d.upgrade THEN ' '
                       ELSE format(' %s %L at %s, ', CASE WHEN d.ahead_granted THEN 'holds' ELSE 'queues for' END,
                                   d.ahead_resource, d.ahead_position) END
               || CASE WHEN d.upgrade
                       THEN format('waits to be the writer of %L at %s until %s has left',
                                   d.resource_id, d.queue_position, d.behind_position)
                       ELSE format('waits for %L at %s behind %s',
                                   d.resource_id, d.queue_position, d.behind_position) END,
               '; ' ORDER BY d.step)
           || CASE WHEN max(d.whos) > count(*)
                   THEN format(' (%s more wait%s in this cycle)', max(d.whos) - count(*),
                               CASE WHEN max(d.whos) - count(*) = 1 THEN 's' END) ELSE '' END
    FROM {schema}.find_deadlock(p_member) AS d
$$;
