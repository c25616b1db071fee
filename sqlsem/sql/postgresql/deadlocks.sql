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

-- A row of the search. n: its number, in the order of resource and position; who: the number of its owner, from 1;
-- room: the limit for this row, its own or the operator's.
DO $$
BEGIN
    IF to_regtype('{schema}.deadlock_row') IS NULL THEN
        CREATE TYPE {schema}.deadlock_row AS (
            n integer, who integer, member_id bigint, owner varchar, resource_id varchar, queue_position bigint,
            access_type varchar, concurrency_limit integer, room integer, weight integer, granted boolean, waits boolean);
    END IF;
END
$$;

-- Return true if a member can be in a deadlock at all: one of its owners waits, and has another row for which some
-- request waits. That is rare, so most searches end here.
CREATE OR REPLACE FUNCTION {schema}.may_be_in_deadlock(p_member bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
    SELECT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member AND m.login = session_user)
       AND EXISTS (
           SELECT FROM {schema}.member_rows(p_member) AS mine
           JOIN (SELECT t.owner FROM {schema}.member_rows(p_member) AS t
                 WHERE t.owner IS NOT NULL AND t.revoked_at IS NULL GROUP BY t.owner
                 HAVING bool_or(t.access_type = 'upgrade') OR count(*) > 1 AND bool_or(t.granted_at IS NULL)) AS o
             ON o.owner = mine.owner
           WHERE mine.revoked_at IS NULL
             AND EXISTS (SELECT FROM {schema}.{table} AS w
                         WHERE w.resource_id = mine.resource_id AND w.member_id IS NOT NULL AND w.revoked_at IS NULL
                           AND (w.queue_position > mine.queue_position AND w.granted_at IS NULL
                                OR w.queue_position <> mine.queue_position AND w.access_type = 'upgrade')))
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
    v_rows     {schema}.deadlock_row[];
    v_row      {schema}.deadlock_row;
    v_idle     boolean[];  -- of each row: not blocked (step 1); no stuck row waits behind it (step 2)
    v_left     integer[];  -- of each owner: the number of its rows that are not idle; above 0: stuck
    v_none     boolean[];
    v_changed  boolean;
    v_resource varchar;
    v_label    varchar[];  -- along one queue: access types so far, with weight and lowest limit of each
    v_load     bigint[];
    v_low      integer[];
    v_at       integer;
    v_source   integer[];  -- the owner that waits
    v_target   integer[];  -- the owner that it waits for
    v_who      integer;
    v_cycle    integer[];  -- owners
    v_back     integer[];
    v_seen     integer[] := '{}';
    v_victim   {schema}.deadlock_row;
    v_reached  integer[] := '{}';  -- owners reached; and from which owner, by which rows
    v_from     integer[] := '{}';
    v_waiter   integer[] := '{}';
    v_blocker  integer[] := '{}';
    v_found    integer[];  -- the owners of the last level
    v_front    {schema}.deadlock_row[];  -- their rows
    v_rest     {schema}.deadlock_row[];  -- the rows of owners that are not reached yet
BEGIN
    WITH r AS (
        SELECT row_number() OVER (ORDER BY b.resource_id, b.queue_position)::integer,
               dense_rank() OVER (ORDER BY b.member_id, b.owner, CASE WHEN b.owner IS NULL THEN b.queue_position END)::integer,
               b.member_id, b.owner, b.resource_id, b.queue_position, b.access_type, b.concurrency_limit,
               least(b.concurrency_limit, CASE WHEN b.cap >= b.weight THEN b.cap END), b.weight, b.granted, b.waits
        FROM {schema}.deadlock_rows(p_member) AS b
        ORDER BY 1
    )
    SELECT array_agg(r::{schema}.deadlock_row) INTO v_rows FROM r;
    IF v_rows IS NULL THEN  -- (most calls end here)
        RETURN;
    END IF;
    v_none := array_fill(false, ARRAY[cardinality(v_rows)]);

    -- 1. Go along the queues until that clears no further owner. An owner is cleared when all of its rows can be
    -- granted.
    v_idle := v_none;
    SELECT array_agg(w.waiting ORDER BY w.who) INTO v_left
    FROM (SELECT r.who, count(*) FILTER (WHERE r.waits) AS waiting FROM unnest(v_rows) AS r GROUP BY r.who) AS w;
    LOOP
        v_changed := false;
        v_resource := NULL;
        FOREACH v_row IN ARRAY coalesce(v_rows, '{}') LOOP
            IF v_resource IS DISTINCT FROM v_row.resource_id THEN
                v_resource := v_row.resource_id;
                v_label := '{}';
                v_load := '{}';
                v_low := '{}';
            END IF;
            CONTINUE WHEN v_left[v_row.who] = 0;
            IF v_row.waits AND NOT v_idle[v_row.n] THEN
                IF v_row.access_type = 'upgrade' THEN  -- waits for all other holders, at any position
                    v_idle[v_row.n] := NOT EXISTS (
                        SELECT FROM unnest(v_rows) AS o
                        WHERE o.resource_id = v_resource AND o.n <> v_row.n AND o.granted AND v_left[o.who] > 0);
                ELSE
                    v_idle[v_row.n] := (
                        SELECT coalesce(sum(u.load) IS NULL OR sum(u.load) + v_row.weight <= least(min(u.low), v_row.room), true)
                        FROM unnest(v_label, v_load, v_low) AS u (label, load, low)
                        WHERE v_row.access_type = 'write' OR u.label <> v_row.access_type);
                END IF;
                IF v_idle[v_row.n] THEN
                    v_changed := true;
                    v_left[v_row.who] := v_left[v_row.who] - 1;
                    CONTINUE WHEN v_left[v_row.who] = 0;
                END IF;
            END IF;
            v_at := coalesce(array_position(v_label, v_row.access_type), cardinality(v_label) + 1);
            v_label[v_at] := v_row.access_type;
            v_load[v_at] := coalesce(v_load[v_at], 0) + v_row.weight;
            v_low[v_at] := least(v_low[v_at], v_row.concurrency_limit);
        END LOOP;
        EXIT WHEN NOT v_changed;
    END LOOP;
    -- From here on there are only rows of stuck owners, and `waits` means that the row is blocked.
    SELECT array_agg(ROW(r.n, r.who, r.member_id, r.owner, r.resource_id, r.queue_position, r.access_type, r.concurrency_limit,
                         r.room, r.weight, r.granted, r.waits AND NOT v_idle[r.n])::{schema}.deadlock_row ORDER BY r.n)
    INTO v_rows FROM unnest(v_rows) AS r WHERE v_left[r.who] > 0;

    -- Go back along the queues, and leave out owners for which no request waits: usually the many behind a cycle.
    v_idle := v_none;
    SELECT array_agg(coalesce(w.number, 0) ORDER BY u.who) INTO v_left
    FROM generate_series(1, cardinality(v_left)) AS u (who)
    LEFT JOIN (SELECT r.who, count(*) AS number FROM unnest(v_rows) AS r GROUP BY r.who) AS w ON w.who = u.who;
    LOOP
        v_changed := false;
        v_resource := NULL;
        FOR v_row IN SELECT * FROM unnest(v_rows) AS r ORDER BY r.n DESC LOOP
            IF v_resource IS DISTINCT FROM v_row.resource_id THEN
                v_resource := v_row.resource_id;
                v_label := '{}';  -- access types of the blocked rows behind
            END IF;
            CONTINUE WHEN v_left[v_row.who] = 0;
            IF NOT v_idle[v_row.n] AND v_label <@ ARRAY[v_row.access_type] AND 'write' <> ALL (v_label)
               AND NOT (v_row.granted AND EXISTS (
                   SELECT FROM unnest(v_rows) AS o
                   WHERE o.resource_id = v_resource AND o.n <> v_row.n AND o.access_type = 'upgrade' AND o.waits
                     AND v_left[o.who] > 0)) THEN
                v_changed := true;
                v_idle[v_row.n] := true;
                v_left[v_row.who] := v_left[v_row.who] - 1;
                CONTINUE WHEN v_left[v_row.who] = 0;
            END IF;
            IF v_row.waits AND v_row.access_type <> 'upgrade' AND v_row.access_type <> ALL (v_label) THEN
                v_label := v_label || v_row.access_type;
            END IF;
        END LOOP;
        EXIT WHEN NOT v_changed;
    END LOOP;
    SELECT array_agg(r ORDER BY r.n) INTO v_rows FROM unnest(v_rows) AS r WHERE v_left[r.who] > 0;

    -- 2. The edges: which owner waits for which. A blocked row of access write points to all rows ahead of it, so rows
    --    behind it need not point past it. So there are few edges, however long the queue is.
    SELECT array_agg(w.who), array_agg(b.who) INTO v_source, v_target
    FROM (SELECT *, min(r.n) OVER queue AS first, max(r.n) OVER queue AS last,
                 max(r.n) FILTER (WHERE r.waits AND r.access_type = 'write')
                     OVER (queue ORDER BY r.n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS nearest
          FROM unnest(v_rows) AS r WINDOW queue AS (PARTITION BY r.resource_id)) AS w
    CROSS JOIN LATERAL generate_series(CASE WHEN w.access_type = 'upgrade' THEN w.first ELSE coalesce(w.nearest, w.first) END,
                                       CASE WHEN w.access_type = 'upgrade' THEN w.last ELSE w.n - 1 END) AS k (n)
    JOIN unnest(v_rows) AS b ON b.n = k.n
    WHERE w.waits AND CASE WHEN w.access_type = 'upgrade' THEN b.granted AND b.n <> w.n
                           ELSE w.access_type = 'write' OR b.access_type <> w.access_type END;
    -- Find a cycle of this member's owners: every owner that such an owner reaches also reaches it.
    FOR v_who IN SELECT DISTINCT r.who FROM unnest(v_rows) AS r WHERE r.waits AND r.member_id = p_member LOOP
        CONTINUE WHEN v_who = ANY (v_seen);
        WITH RECURSIVE down (who) AS (
            SELECT v_who UNION SELECT v_target[e.n] FROM down AS d CROSS JOIN LATERAL unnest(array_positions(v_source, d.who)) AS e (n)
        ), back (who) AS (
            SELECT v_who UNION SELECT v_source[e.n] FROM back AS b CROSS JOIN LATERAL unnest(array_positions(v_target, b.who)) AS e (n)
            WHERE v_source[e.n] IN (SELECT d.who FROM down AS d)
        )
        SELECT (SELECT array_agg(d.who) FROM down AS d), (SELECT array_agg(b.who) FROM back AS b) INTO v_cycle, v_back;
        v_seen := v_seen || v_back;
        CONTINUE WHEN cardinality(v_back) < cardinality(v_cycle);
        SELECT * INTO v_victim FROM unnest(v_rows) AS r
        WHERE r.waits AND r.who = ANY (v_cycle) ORDER BY r.queue_position DESC LIMIT 1;
        EXIT WHEN v_victim.member_id = p_member;
    END LOOP;
    IF v_victim.member_id IS DISTINCT FROM p_member THEN
        RETURN;
    END IF;
    SELECT array_agg(r ORDER BY r.n) INTO v_rows FROM unnest(v_rows) AS r WHERE r.who = ANY (v_cycle);
    v_rest := v_rows;

    IF NOT EXISTS (SELECT FROM {schema}.live_members((SELECT array_agg(DISTINCT r.member_id) FROM unnest(v_rows) AS r), p_member)) THEN
        RETURN;
    END IF;

    -- 3. Find the shortest way from the victim's row back to its owner: breadth first, each level by position.
    v_front := ARRAY[v_victim];
    WHILE v_victim.who <> ALL (v_reached) LOOP
        SELECT array_agg(f.who), v_from || array_agg(f.source), v_waiter || array_agg(f.waiter), v_blocker || array_agg(f.blocker)
        INTO v_found, v_from, v_waiter, v_blocker
        FROM (SELECT DISTINCT ON (b.who) b.who, w.who AS source, w.n AS waiter, b.n AS blocker
              FROM unnest(v_front) AS w JOIN unnest(v_rest) AS b ON b.resource_id = w.resource_id
              WHERE CASE WHEN w.access_type = 'upgrade' THEN b.granted AND b.n <> w.n
                         ELSE b.n < w.n AND (w.access_type = 'write' OR b.access_type <> w.access_type) END
              ORDER BY b.who, w.queue_position, b.queue_position) AS f;
        v_reached := v_reached || v_found;
        SELECT array_agg(r) FILTER (WHERE r.waits AND r.who = ANY (v_found)), array_agg(r) FILTER (WHERE r.who <> ALL (v_found))
        INTO v_front, v_rest FROM unnest(v_rest) AS r;
    END LOOP;
    RETURN QUERY
    WITH RECURSIVE way (back, at) AS (
        SELECT 0, array_position(v_reached, v_victim.who)
        UNION ALL
        SELECT back + 1, array_position(v_reached, v_from[at]) FROM way WHERE v_waiter[at] <> v_victim.n
    ), cycle AS (
        SELECT row_number() OVER one AS step, v_waiter[at] AS waiter, v_blocker[at] AS behind,
               coalesce(lag(v_blocker[at]) OVER one, v_blocker[array_position(v_reached, v_victim.who)]) AS ahead
        FROM way WINDOW one AS (ORDER BY back DESC)
    )
    SELECT c.step::integer, m.member_id, m.host, m.pid, CASE WHEN m.pid IS NULL THEN m.backend_pid END, w.owner,
           a.resource_id, a.queue_position, a.granted, w.resource_id, w.queue_position, w.access_type = 'upgrade',
           b.queue_position, cardinality(v_cycle)
    FROM cycle AS c JOIN unnest(v_rows) AS w ON w.n = c.waiter JOIN unnest(v_rows) AS a ON a.n = c.ahead
    JOIN unnest(v_rows) AS b ON b.n = c.behind JOIN {schema}.member AS m ON m.member_id = w.member_id
    ORDER BY c.step;
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
