-- sqlsem, deadlocks, for PostgreSQL. May be run again at any time, after routines.sql.
--
-- An owner is a thread, asyncio task or session of a member, which can wait for only one thing at a time. (Columns and
-- variables call it `who`.) An owner that waits cannot release anything. The search reads the rows of one instant:
--   1. Suspect each owner that waits. Clear each owner whose requests could be granted if only suspected owners kept
--      their rows. Repeat until nothing changes: the owners that are left are stuck.
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
    -- Of each row, by resource and position. A set of rows is known by its first one: an owner, a resource's queue, and a
    -- label, which is an access type in a queue. room: the limit for this row, its own or the operator's. blocked: it
    -- cannot be granted, as far as known.
    v_who      integer[];
    v_sibling  integer[];    -- the next row of the owner
    v_queue    integer[];
    v_last     integer[];    -- the last row of the queue
    v_label    integer[];
    v_later    integer[];    -- the next row of the label, and the one before
    v_earlier  integer[];
    v_end      integer[];    -- the last row of the label
    v_other    integer[];    -- of the first row of a label: the next label of the queue
    v_member   bigint[];
    v_owner    varchar[];
    v_resource varchar[];
    v_position bigint[];
    v_limit    integer[];
    v_room     integer[];
    v_weight   integer[];
    v_granted  boolean[];
    v_blocked  boolean[];
    v_write    boolean[];
    v_upgrade  boolean[];
    v_left     integer[];    -- of each owner: its blocked rows; above 0: it is stuck
    v_queues   integer[];    -- the queues to check, and if a queue is among them
    v_listed   boolean[];
    v_load     bigint[];     -- of each label: weight and lowest limit of the rows so far that belong to stuck owners
    v_low      integer[];
    -- Of each owner that is reached from the candidate: in how many steps, from which row, and by which of its own rows.
    v_level    integer[];
    v_waiter   integer[];
    v_blocker  integer[];
    v_front    integer[];    -- the blocked rows of the owners of a step, and their positions
    v_at       bigint[];
    v_found    integer[];
    v_owners   integer[];
    v_down     integer[];    -- all owners that are reached
    v_up       boolean[];    -- of each owner: it waits for the candidate's owner
    v_pointer  integer[];    -- of each label: the next row that is not found yet
    v_candidate integer;
    v_victim   integer;
    v_rows     integer;
    v_top      integer;
    v_depth    integer;
    v_count    integer;
    v_sum      bigint;
    v_lowest   integer;
    q          integer;      -- a queue, row, other row, label, owner
    i          integer;
    n          integer;
    k          integer;
    w          integer;
BEGIN
    WITH b AS (
        SELECT d.*, row_number() OVER (ORDER BY d.resource_id, d.queue_position)::integer AS n,
               CASE WHEN d.owner IS NULL THEN d.queue_position END AS itself
        FROM {schema}.deadlock_rows(p_member) AS d),
    r AS (
        SELECT b.*, min(n) OVER one AS who, lead(n) OVER (one ORDER BY n) AS sibling,
               count(*) FILTER (WHERE waits) OVER one AS stuck,
               min(n) OVER line AS queue, max(n) OVER line AS last,
               min(n) OVER kind AS label, lead(n) OVER (kind ORDER BY n) AS later, lag(n) OVER (kind ORDER BY n) AS earlier,
               max(n) OVER kind AS "end"
        FROM b
        WINDOW one AS (PARTITION BY member_id, owner, itself), line AS (PARTITION BY resource_id),
               kind AS (PARTITION BY resource_id, access_type)),
    s AS (
        SELECT r.*, min(n) FILTER (WHERE n = label) OVER (PARTITION BY resource_id ORDER BY n DESC
                                                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS other
        FROM r)
    SELECT array_agg(who ORDER BY n), array_agg(sibling ORDER BY n), array_agg(queue ORDER BY n), array_agg(last ORDER BY n),
           array_agg(label ORDER BY n), array_agg(later ORDER BY n), array_agg(earlier ORDER BY n), array_agg("end" ORDER BY n),
           array_agg(other ORDER BY n), array_agg(member_id ORDER BY n), array_agg(owner ORDER BY n),
           array_agg(resource_id ORDER BY n), array_agg(queue_position ORDER BY n), array_agg(concurrency_limit ORDER BY n),
           array_agg(least(concurrency_limit, CASE WHEN cap >= weight THEN cap END) ORDER BY n), array_agg(weight ORDER BY n),
           array_agg(granted ORDER BY n), array_agg(waits ORDER BY n), array_agg(access_type = 'write' ORDER BY n),
           array_agg(access_type = 'upgrade' ORDER BY n), array_agg(stuck ORDER BY n), array_agg(queue ORDER BY n) FILTER (WHERE n = queue),
           array_agg(n = queue ORDER BY n), count(*)
    INTO v_who, v_sibling, v_queue, v_last, v_label, v_later, v_earlier, v_end, v_other, v_member, v_owner, v_resource, v_position,
         v_limit, v_room, v_weight, v_granted, v_blocked, v_write, v_upgrade, v_left, v_queues, v_listed, v_rows
    FROM s;
    IF v_rows = 0 THEN  -- (most calls end here)
        RETURN;
    END IF;

    -- 1. Check the queues, until that clears no further owner. An owner is cleared when all of its rows can be granted.
    v_load := array_fill(0::bigint, ARRAY[v_rows]);
    v_low := v_limit;
    v_top := cardinality(v_queues);
    WHILE v_top > 0 LOOP
        q := v_queues[v_top];
        v_top := v_top - 1;
        v_listed[q] := false;
        k := q;
        WHILE k IS NOT NULL LOOP
            v_load[k] := 0;
            v_low[k] := NULL;
            k := v_other[k];
        END LOOP;
        FOR i IN q..v_last[q] LOOP
            w := v_who[i];
            CONTINUE WHEN v_left[w] = 0;
            IF v_blocked[i] THEN
                v_sum := 0;
                v_lowest := v_room[i];
                IF v_upgrade[i] THEN  -- waits for all other holders, at any position
                    v_lowest := 0;
                    FOR n IN q..v_last[q] LOOP
                        v_sum := (n <> i AND v_granted[n] AND v_left[v_who[n]] > 0)::integer;
                        EXIT WHEN v_sum > 0;
                    END LOOP;
                ELSE
                    k := q;
                    WHILE k IS NOT NULL LOOP
                        IF v_write[i] OR k <> v_label[i] THEN
                            v_sum := v_sum + v_load[k];
                            v_lowest := least(v_lowest, v_low[k]);
                        END IF;
                        k := v_other[k];
                    END LOOP;
                END IF;
                IF v_sum = 0 OR (v_sum + v_weight[i] > v_lowest) IS NOT TRUE THEN
                    v_blocked[i] := false;
                    v_left[w] := v_left[w] - 1;
                    IF v_left[w] = 0 THEN  -- its rows leave
                        WHILE w IS NOT NULL LOOP
                            IF NOT v_listed[v_queue[w]] THEN
                                v_listed[v_queue[w]] := true;
                                v_top := v_top + 1;
                                v_queues[v_top] := v_queue[w];
                            END IF;
                            w := v_sibling[w];
                        END LOOP;
                        CONTINUE;
                    END IF;
                END IF;
            END IF;
            v_load[v_label[i]] := v_load[v_label[i]] + v_weight[i];
            v_low[v_label[i]] := least(v_low[v_label[i]], v_limit[i]);
        END LOOP;
    END LOOP;

    -- 2. Begin with each blocked row of this member. If it is not in a cycle, or if the youngest request of its cycle is
    -- another member's, no owner that waits for it is in a cycle of this member's.
    v_waiter := v_left;
    v_blocker := v_left;
    FOR v_first IN 1..v_rows LOOP
        CONTINUE WHEN v_member[v_first] <> p_member OR NOT v_blocked[v_first] OR v_left[v_who[v_first]] = 0;
        v_candidate := NULL;
        v_victim := v_first;
        WHILE v_victim IS DISTINCT FROM v_candidate LOOP
            -- Find the owners for which the candidate waits, step by step: each step by position.
            v_candidate := v_victim;
            v_victim := NULL;
            v_level := array_fill(0, ARRAY[v_rows]);
            v_pointer := v_label;
            v_front := ARRAY[v_candidate];
            v_down := '{}';
            v_depth := 0;
            WHILE v_front <> '{}' LOOP
                v_depth := v_depth + 1;
                v_owners := '{}';
                FOREACH i IN ARRAY v_front LOOP
                    v_found := '{}';
                    q := v_queue[i];
                    IF v_upgrade[i] THEN
                        FOR n IN q..v_last[q] LOOP
                            IF n <> i AND v_granted[n] THEN
                                v_found := v_found || n;
                            END IF;
                        END LOOP;
                    ELSE
                        k := q;
                        WHILE k IS NOT NULL LOOP  -- (The rows that no earlier row has found: their owners are reached.)
                            WHILE v_pointer[k] < i AND (v_write[i] OR k <> v_label[i]) LOOP
                                v_found := v_found || v_pointer[k];
                                v_pointer[k] := v_later[v_pointer[k]];
                            END LOOP;
                            k := v_other[k];
                        END LOOP;
                    END IF;
                    FOREACH n IN ARRAY v_found LOOP
                        w := v_who[n];
                        IF v_level[w] = 0 AND v_left[w] > 0 THEN
                            v_level[w] := v_depth;
                            v_waiter[w] := i;
                            v_blocker[w] := n;
                            v_owners := v_owners || w;
                        ELSIF v_waiter[w] = i AND n < v_blocker[w] THEN
                            v_blocker[w] := n;
                        END IF;
                    END LOOP;
                END LOOP;
                v_down := v_down || v_owners;
                v_front := '{}';
                v_at := '{}';
                FOREACH w IN ARRAY v_owners LOOP
                    WHILE w IS NOT NULL LOOP
                        IF v_blocked[w] THEN
                            v_front := v_front || w;
                            v_at := v_at || v_position[w];
                            v_victim := CASE WHEN v_position[w] < v_position[v_victim] THEN v_victim ELSE w END;
                        END IF;
                        w := v_sibling[w];
                    END LOOP;
                END LOOP;
                IF cardinality(v_front) > 1 THEN
                    v_front := ARRAY(SELECT f.n FROM unnest(v_front, v_at) AS f (n, at) ORDER BY f.at);
                END IF;
            END LOOP;
            -- Find the owners that wait for the candidate's owner, and count those that were reached.
            w := v_who[v_candidate];
            v_up := array_fill(false, ARRAY[v_rows]);
            v_up[w] := true;
            v_count := (v_level[w] > 0)::integer;
            v_owners := ARRAY[w];
            v_pointer := v_end;
            v_top := 0;
            WHILE v_top < cardinality(v_owners) LOOP
                v_top := v_top + 1;
                n := v_owners[v_top];
                WHILE n IS NOT NULL LOOP
                    k := v_queue[n];
                    WHILE k IS NOT NULL LOOP
                        WHILE CASE WHEN v_upgrade[k] THEN v_granted[n] AND v_pointer[k] > 0
                                   ELSE v_pointer[k] > n AND (v_write[k] OR k <> v_label[n]) END LOOP
                            i := v_pointer[k];
                            w := v_who[i];
                            IF v_blocked[i] AND v_left[w] > 0 AND NOT v_up[w] THEN
                                v_up[w] := true;
                                v_count := v_count + (v_level[w] > 0)::integer;
                                v_owners := v_owners || w;
                            END IF;
                            v_pointer[k] := v_earlier[i];
                        END LOOP;
                        k := v_other[k];
                    END LOOP;
                    n := v_sibling[n];
                END LOOP;
            END LOOP;
            IF v_count < cardinality(v_down) OR v_member[v_victim] <> p_member THEN
                v_victim := NULL;
                FOREACH w IN ARRAY v_owners LOOP
                    v_left[w] := 0;
                END LOOP;
                EXIT;
            END IF;
        END LOOP;
        EXIT WHEN v_victim IS NOT NULL;
    END LOOP;
    IF v_victim IS NULL
       OR NOT EXISTS (SELECT FROM {schema}.live_members(ARRAY(SELECT DISTINCT v_member[d] FROM unnest(v_down) AS d), p_member)) THEN
        RETURN;
    END IF;

    -- 3. Go back from the victim's owner to its row, the shortest way.
    v_front := '{}';
    v_found := '{}';
    w := v_who[v_victim];
    LOOP
        v_front := v_waiter[w] || v_front;
        v_found := v_blocker[w] || v_found;
        EXIT WHEN v_waiter[w] = v_victim;
        w := v_who[v_waiter[w]];
    END LOOP;
    whos := cardinality(v_down);
    FOR n IN 1..cardinality(v_front) LOOP
        step := n;
        i := v_front[n];
        k := v_found[CASE n WHEN 1 THEN cardinality(v_found) ELSE n - 1 END];
        SELECT m.member_id, m.host, m.pid, CASE WHEN m.pid IS NULL THEN m.backend_pid END INTO member_id, host, pid, session_id
        FROM {schema}.member AS m WHERE m.member_id = v_member[i];
        owner := v_owner[i];
        ahead_resource := v_resource[k];
        ahead_position := v_position[k];
        ahead_granted := v_granted[k];
        resource_id := v_resource[i];
        queue_position := v_position[i];
        upgrade := v_upgrade[i];
        behind_position := v_position[v_found[n]];
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
