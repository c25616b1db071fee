-- sqlsem, deadlocks, for PostgreSQL. May be run again at any time, after routines.sql.
--
-- Who is one line of execution: a member and its owner (a thread, a task, a session). Who waits cannot give anything
-- back. Found from the rows of one instant:
--   1. Everybody who waits is suspected. Whoever would be let in if only the suspected ones stayed is suspected no
--      more. Repeated until nothing changes: those left are stuck.
--   2. Each stuck row points to the stuck rows in its way. Some who reach each other and nobody else are a knot.
--   3. The highest position that waits in a knot is the youngest request, whose owner has to give up.

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

-- The deadlock whose youngest request is this member's, if there is one: the shortest cycle through it, a row each who,
-- the youngest request's first. `ahead` is where a who is in the way of the one before, `behind` what it waits for.
-- Nothing while somebody in it may be dead: then it will be removed.
CREATE OR REPLACE FUNCTION {schema}.find_deadlock(p_member integer)
RETURNS TABLE (step integer, member_id integer, host varchar, pid integer, session_id integer, owner varchar,
               ahead_resource varchar, ahead_position bigint, ahead_granted boolean,
               resource_id varchar, queue_position bigint, upgrade boolean, behind_position bigint, whos integer)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    -- The rows, by resource and position; who numbers the whos from 1.
    a_who     integer[];
    a_member  integer[];
    a_owner   varchar[];
    a_res     varchar[];
    a_pos     bigint[];
    a_access  varchar[];
    a_limit   integer[];
    a_cap     integer[];
    a_weight  integer[];
    a_granted boolean[];
    a_waits   boolean[];
    v_n       integer;
    a_out     boolean[];   -- a row that waits: not blocked by the stuck alone; any row: nobody stuck waits behind it
    a_count   integer[];   -- of each who: rows that are not out yet
    a_stuck   boolean[];   -- of each who
    v_changed boolean;
    v_out     boolean;
    -- Along one queue: weights and lowest limit of the stuck, in all and of each label.
    v_res     varchar;
    v_load    bigint;
    v_low     integer;
    a_label   varchar[];
    a_load    bigint[];
    a_low     integer[];
    v_at      integer;
    v_any     boolean;
    v_write   boolean;
    v_label   varchar;
    v_many    boolean;
    v_upgrades boolean;
    -- Who waits (source) for whom (target), and what can be reached.
    n_edge    integer;
    e_source  integer[];
    e_target  integer[];
    e_next    integer[];
    e_before  integer[];
    a_next    integer[];
    a_before  integer[];
    v_edge    integer;
    v_who     integer;
    a_done    boolean[];
    a_down    boolean[];
    a_reached integer[];
    n_down    integer;
    a_back    integer[];
    n_back    integer;
    v_victim  bigint;
    v_start   integer;   -- its row
    v_other   integer;
    -- The way back, by rows.
    a_first   integer[];
    a_from    integer[];
    r_waiter  integer[];
    r_blocker integer[];
    a_front   integer[];
    a_found   integer[];
    v_row     integer;
    p_waiter  integer[];
    p_blocker integer[];
BEGIN
    -- Most calls end here.
    IF NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member AND m.login = session_user)
       OR NOT EXISTS (SELECT FROM {schema}.{table} AS t
                      WHERE t.member_id = p_member AND t.owner IS NOT NULL AND t.revoked_at IS NULL GROUP BY t.owner
                      HAVING bool_or(t.access_type = 'upgrade') OR count(*) > 1 AND bool_or(t.granted_at IS NULL)) THEN
        RETURN;
    END IF;

    -- One statement, one instant. Only who has two rows and waits, and whoever waits ahead of such a one: without them
    -- there is no knot. Bare participants, who may go at any time, and rows that are on their way out do not count.
    -- Where a member does not tell its owners, each row is taken for somebody's of its own.
    WITH q AS MATERIALIZED (
        SELECT t.*, t.granted_at IS NOT NULL AS granted, t.granted_at IS NULL OR t.access_type = 'upgrade' AS waits,
               t.owner IS NOT NULL AND bool_or(t.granted_at IS NULL OR t.access_type = 'upgrade') OVER one
               AND (count(*) OVER one > 1 OR t.access_type = 'upgrade') AS busy,
               CASE WHEN t.owner IS NULL THEN t.queue_position END AS itself
        FROM {schema}.{table} AS t
        WHERE t.member_id IS NOT NULL AND t.revoked_at IS NULL
          AND (t.granted_at IS NOT NULL OR t.attended_until IS NULL OR t.attended_until >= clock_timestamp())
        WINDOW one AS (PARTITION BY t.member_id, t.owner)
    ), r AS (
        SELECT q.*, o.cap, dense_rank() OVER (ORDER BY q.member_id, q.owner, q.itself)::integer AS who
        FROM q LEFT JOIN {schema}.resource AS o ON o.resource_id = q.resource_id
        WHERE q.busy OR q.waits AND q.queue_position < (
            SELECT max(b.queue_position) FROM q AS b WHERE b.resource_id = q.resource_id AND b.busy AND b.waits)
    )
    SELECT count(*), array_agg(r.who ORDER BY r.resource_id, r.queue_position),
           array_agg(r.member_id ORDER BY r.resource_id, r.queue_position),
           array_agg(r.owner ORDER BY r.resource_id, r.queue_position),
           array_agg(r.resource_id ORDER BY r.resource_id, r.queue_position),
           array_agg(r.queue_position ORDER BY r.resource_id, r.queue_position),
           array_agg(r.access_type ORDER BY r.resource_id, r.queue_position),
           array_agg(r.concurrency_limit ORDER BY r.resource_id, r.queue_position),
           array_agg(r.cap ORDER BY r.resource_id, r.queue_position),
           array_agg(r.weight ORDER BY r.resource_id, r.queue_position),
           array_agg(r.granted ORDER BY r.resource_id, r.queue_position),
           array_agg(r.waits ORDER BY r.resource_id, r.queue_position)
    INTO v_n, a_who, a_member, a_owner, a_res, a_pos, a_access, a_limit, a_cap, a_weight, a_granted, a_waits
    FROM r;
    IF v_n = 0 THEN
        RETURN;
    END IF;

    -- 1. Down the queues, as long as that frees anybody: somebody is let in when all rows of theirs are.
    a_out := array_fill(false, ARRAY[v_n]);
    SELECT array_agg(w.number ORDER BY w.who) INTO a_count
    FROM (SELECT u.who, (count(*) FILTER (WHERE u.waits))::integer AS number
          FROM unnest(a_who, a_waits) AS u (who, waits) GROUP BY u.who) AS w;
    SELECT array_agg(c > 0 ORDER BY n) INTO a_stuck FROM unnest(a_count) WITH ORDINALITY AS u (c, n);
    LOOP
        v_changed := false;
        v_res := NULL;
        FOR i IN 1..v_n LOOP
            IF v_res IS DISTINCT FROM a_res[i] THEN
                v_res := a_res[i];
                v_load := 0;
                v_low := NULL;
                a_label := '{}';
                a_load := '{}';
                a_low := '{}';
            END IF;
            CONTINUE WHEN NOT a_stuck[a_who[i]];
            IF a_waits[i] AND NOT a_out[i] THEN
                IF a_access[i] = 'upgrade' THEN  -- waits for all others inside, wherever they stand
                    v_out := NOT EXISTS (
                        SELECT FROM unnest(a_res, a_pos, a_granted, a_who) AS u (res, pos, granted, who)
                        WHERE u.res = v_res AND u.pos <> a_pos[i] AND u.granted AND a_stuck[u.who]);
                ELSIF a_access[i] = 'write' THEN
                    v_out := coalesce(v_load = 0 OR v_load + a_weight[i] <= least(
                        v_low, a_limit[i], CASE WHEN a_cap[i] >= a_weight[i] THEN a_cap[i] END), true);
                ELSE
                    SELECT coalesce(coalesce(sum(u.load), 0) = 0 OR sum(u.load) + a_weight[i] <= least(
                        min(u.low), a_limit[i], CASE WHEN a_cap[i] >= a_weight[i] THEN a_cap[i] END), true)
                    INTO v_out FROM unnest(a_label, a_load, a_low) AS u (label, load, low) WHERE u.label <> a_access[i];
                END IF;
                IF v_out THEN
                    v_changed := true;
                    a_out[i] := true;
                    a_count[a_who[i]] := a_count[a_who[i]] - 1;
                    IF a_count[a_who[i]] = 0 THEN
                        a_stuck[a_who[i]] := false;
                        CONTINUE;
                    END IF;
                END IF;
            END IF;
            v_load := v_load + a_weight[i];
            v_low := least(v_low, a_limit[i]);
            v_at := coalesce(array_position(a_label, a_access[i]), cardinality(a_label) + 1);
            a_label[v_at] := a_access[i];
            a_load[v_at] := coalesce(a_load[v_at], 0) + a_weight[i];
            a_low[v_at] := least(a_low[v_at], a_limit[i]);
        END LOOP;
        EXIT WHEN NOT v_changed;
    END LOOP;
    FOR i IN 1..v_n LOOP
        a_waits[i] := a_waits[i] AND NOT a_out[i] AND a_stuck[a_who[i]];  -- from here on: is blocked
    END LOOP;

    v_upgrades := 'upgrade' = ANY (a_access);
    -- Up the queues, to leave aside those for whom nobody waits: of the many behind a knot usually all.
    a_out := array_fill(false, ARRAY[v_n]);
    SELECT array_agg(c.number ORDER BY c.who) INTO a_count
    FROM (SELECT u.who, count(*)::integer AS number FROM unnest(a_who) AS u (who) GROUP BY u.who) AS c;
    LOOP
        v_changed := false;
        v_res := NULL;
        FOR i IN REVERSE v_n..1 LOOP
            IF v_res IS DISTINCT FROM a_res[i] THEN
                v_res := a_res[i];
                v_any := false;    -- somebody blocked stands further down
                v_write := false;  -- with access write
                v_label := NULL;   -- with a label
                v_many := false;   -- with different ones
            END IF;
            CONTINUE WHEN NOT a_stuck[a_who[i]];
            IF NOT a_out[i] AND NOT (v_write OR v_many OR v_any AND a_access[i] IS DISTINCT FROM v_label)
               AND NOT (v_upgrades AND a_granted[i] AND EXISTS (
                   SELECT FROM unnest(a_res, a_pos, a_access, a_waits, a_who) AS u (res, pos, access, waits, who)
                   WHERE u.res = v_res AND u.access = 'upgrade' AND u.waits AND u.pos <> a_pos[i]
                     AND a_stuck[u.who])) THEN
                v_changed := true;
                a_out[i] := true;
                a_count[a_who[i]] := a_count[a_who[i]] - 1;
                IF a_count[a_who[i]] = 0 THEN
                    a_stuck[a_who[i]] := false;
                    CONTINUE;
                END IF;
            END IF;
            IF a_waits[i] AND a_access[i] <> 'upgrade' THEN
                v_any := true;
                IF a_access[i] = 'write' THEN
                    v_write := true;
                ELSE
                    v_many := v_many OR v_label <> a_access[i];
                    v_many := coalesce(v_many, false);
                    v_label := a_access[i];
                END IF;
            END IF;
        END LOOP;
        EXIT WHEN NOT v_changed;
    END LOOP;

    -- 2. Who can be reached from whom. From a blocked row of access write all the stuck rows ahead of it can, so those
    -- behind need not point past it: the edges are few, however long the queue.
    n_edge := 0;
    e_source := '{}';
    e_target := '{}';
    e_next := '{}';
    e_before := '{}';
    a_next := array_fill(0, ARRAY[cardinality(a_stuck)]);    -- of each who: its first edge, then by e_next
    a_before := array_fill(0, ARRAY[cardinality(a_stuck)]);  -- the first edge that leads to it, then by e_before
    FOR i IN 1..v_n LOOP
        CONTINUE WHEN NOT (a_waits[i] AND a_stuck[a_who[i]]);
        v_at := CASE WHEN a_access[i] = 'upgrade' THEN v_n ELSE i - 1 END;
        WHILE v_at > 0 AND (a_access[i] = 'upgrade' OR a_res[v_at] = a_res[i]) LOOP
            IF a_stuck[a_who[v_at]] AND (CASE WHEN a_access[i] = 'upgrade'
                    THEN a_res[v_at] = a_res[i] AND a_granted[v_at] AND v_at <> i
                    ELSE a_access[i] = 'write' OR a_access[v_at] <> a_access[i] END) THEN
                n_edge := n_edge + 1;
                e_source[n_edge] := a_who[i];
                e_target[n_edge] := a_who[v_at];
                e_next[n_edge] := a_next[a_who[i]];
                e_before[n_edge] := a_before[a_who[v_at]];
                a_next[a_who[i]] := n_edge;
                a_before[a_who[v_at]] := n_edge;
                EXIT WHEN a_access[i] <> 'upgrade' AND a_waits[v_at] AND a_access[v_at] = 'write';
            END IF;
            v_at := v_at - 1;
        END LOOP;
    END LOOP;

    -- A knot whose youngest request is ours: all that one of ours reaches reaches it, too.
    a_done := array_fill(false, ARRAY[cardinality(a_stuck)]);
    FOR i IN 1..v_n LOOP
        v_who := a_who[i];
        CONTINUE WHEN NOT (a_waits[i] AND a_stuck[v_who] AND a_member[i] = p_member) OR a_done[v_who];
        a_reached := ARRAY[v_who];
        a_down := array_fill(false, ARRAY[cardinality(a_stuck)]);
        a_down[v_who] := true;
        n_down := 1;
        v_at := 0;
        WHILE v_at < n_down LOOP
            v_at := v_at + 1;
            v_edge := a_next[a_reached[v_at]];
            WHILE v_edge > 0 LOOP
                IF NOT a_down[e_target[v_edge]] THEN
                    n_down := n_down + 1;
                    a_reached[n_down] := e_target[v_edge];
                    a_down[e_target[v_edge]] := true;
                END IF;
                v_edge := e_next[v_edge];
            END LOOP;
        END LOOP;
        a_back := ARRAY[v_who];
        a_done[v_who] := true;
        n_back := 1;
        v_at := 0;
        WHILE v_at < n_back LOOP
            v_at := v_at + 1;
            v_edge := a_before[a_back[v_at]];
            WHILE v_edge > 0 LOOP
                IF a_down[e_source[v_edge]] AND NOT a_done[e_source[v_edge]] THEN
                    n_back := n_back + 1;
                    a_back[n_back] := e_source[v_edge];
                    a_done[e_source[v_edge]] := true;
                END IF;
                v_edge := e_before[v_edge];
            END LOOP;
        END LOOP;
        CONTINUE WHEN n_back < n_down;
        v_victim := 0;
        FOR j IN 1..v_n LOOP
            IF a_waits[j] AND a_down[a_who[j]] AND a_pos[j] > v_victim THEN
                v_victim := a_pos[j];
                v_start := j;
            END IF;
        END LOOP;
        EXIT WHEN a_member[v_start] = p_member;
        v_victim := NULL;
    END LOOP;
    IF v_victim IS NULL THEN
        RETURN;
    END IF;

    -- Whoever died holds nobody up for long.
    FOR v_other IN SELECT DISTINCT a_member[array_position(a_who, u.who)] FROM unnest(a_reached) AS u (who) LOOP
        PERFORM {schema}.test_member(v_other, p_member);
        IF NOT EXISTS (SELECT FROM {schema}.member AS m
                       WHERE m.member_id = v_other AND m.missing_since IS NULL
                         AND (m.lease_until IS NULL OR m.lease_until >= clock_timestamp())) THEN
            RETURN;
        END IF;
    END LOOP;

    -- 3. The shortest way from the victim back to its owner: by levels, and in each by position.
    a_first := array_fill(0, ARRAY[v_n]);  -- of each row: where its queue begins; there: from where on anything is new
    a_from := array_fill(0, ARRAY[v_n]);
    FOR i IN 1..v_n LOOP
        a_first[i] := CASE WHEN i > 1 AND a_res[i - 1] = a_res[i] THEN a_first[i - 1] ELSE i END;
        a_from[i] := a_first[i];
    END LOOP;
    r_waiter := array_fill(NULL::integer, ARRAY[cardinality(a_stuck)]);  -- of each who: how it was reached
    r_blocker := r_waiter;
    a_front := ARRAY[v_start];
    WHILE r_waiter[a_who[v_start]] IS NULL LOOP
        a_found := '{}';
        FOREACH v_row IN ARRAY a_front LOOP
            v_at := a_first[v_row];
            WHILE a_from[v_at] < v_row
                  AND (NOT a_down[a_who[a_from[v_at]]] OR r_waiter[a_who[a_from[v_at]]] IS NOT NULL) LOOP
                a_from[v_at] := a_from[v_at] + 1;
            END LOOP;
            v_other := CASE WHEN a_access[v_row] = 'upgrade' THEN a_first[v_row] ELSE a_from[v_at] END;
            WHILE v_other <= v_n AND a_res[v_other] = a_res[v_row]
                  AND (v_other < v_row OR a_access[v_row] = 'upgrade') LOOP
                IF a_down[a_who[v_other]] AND r_waiter[a_who[v_other]] IS NULL
                   AND (CASE WHEN a_access[v_row] = 'upgrade' THEN a_granted[v_other] AND v_other <> v_row
                        ELSE a_access[v_row] = 'write' OR a_access[v_other] <> a_access[v_row] END) THEN
                    r_waiter[a_who[v_other]] := v_row;
                    r_blocker[a_who[v_other]] := v_other;
                    a_found[cardinality(a_found) + 1] := a_who[v_other];
                END IF;
                v_other := v_other + 1;
            END LOOP;
        END LOOP;
        SELECT array_agg(u.n ORDER BY u.pos) INTO a_front
        FROM unnest(a_who, a_pos, a_waits) WITH ORDINALITY AS u (who, pos, waits, n)
        WHERE u.waits AND u.who = ANY (a_found);
    END LOOP;
    v_at := v_start;
    LOOP
        v_who := a_who[v_at];
        p_waiter := r_waiter[v_who] || p_waiter;
        p_blocker := r_blocker[v_who] || p_blocker;
        v_at := r_waiter[v_who];
        EXIT WHEN v_at = v_start;
    END LOOP;

    RETURN QUERY
    SELECT w.number::integer, m.member_id, m.host, m.pid, CASE WHEN m.pid IS NULL THEN m.backend_pid END,
           a_owner[w.at], a_res[b.at], a_pos[b.at], a_granted[b.at], a_res[w.at], a_pos[w.at],
           a_access[w.at] = 'upgrade', a_pos[w.behind], n_down
    FROM unnest(p_waiter, p_blocker) WITH ORDINALITY AS w (at, behind, number)
    JOIN unnest(p_blocker) WITH ORDINALITY AS b (at, number)
      ON b.number = CASE w.number WHEN 1 THEN cardinality(p_blocker) ELSE w.number - 1 END
    JOIN {schema}.member AS m ON m.member_id = a_member[w.at]
    ORDER BY w.number;
END
$$;

-- The same in words, for a session that waits: the position to give up, and why. NULLs when there is none.
CREATE OR REPLACE FUNCTION {schema}.deadlock_words(p_member integer, OUT victim bigint, OUT words text)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
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
                   THEN format(' (%s more wait%s in this knot)', max(d.whos) - count(*),
                               CASE WHEN max(d.whos) - count(*) = 1 THEN 's' END) ELSE '' END
    FROM {schema}.find_deadlock(p_member) AS d
$$;
