-- sqlsem, routines for PostgreSQL. May be run again at any time, also while locks are held.
--
-- Application (advisory) locks used, each in a class of its own made from the schema's name:
--   class + 0, hash of the resource   gate     held for the length of one registration
--   class + 1, beacon                 beacon   held by a member's session for as long as it lives
--   class + 2, queue_position         entry    held by the session of a row's owner while the row stands
--   class + 3, queue_position         waiting  held by a session while it waits for that row's grant
-- A commit is visible before its transaction's locks are released; several routines lean on that.

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

CREATE OR REPLACE FUNCTION {schema}.lock_class(p_kind integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT (hashtext('sqlsem.{schema}') & 2147483640) + p_kind $$;


-- Refuses to run where its guarantees would not hold.
CREATE OR REPLACE FUNCTION {schema}.guard(p_what text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    -- A transaction that has written cannot be a statement of its own. (One that has only read cannot be told from
    -- here; enclosed by it a registration stays safe, as the gate is kept until the commit, but holds everybody up.)
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RAISE EXCEPTION 'sqlsem: % must not be called inside an open transaction; commit first and use autocommit', p_what
            USING ERRCODE = '25001';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'sqlsem: % needs READ COMMITTED, not %', p_what, current_setting('transaction_isolation')
            USING ERRCODE = '25001', HINT = 'SET default_transaction_isolation TO ''read committed'' on this connection.';
    END IF;
END
$$;


-- The rule. Looks at the conflicting rows ahead of a position and says whether it may proceed; where not, which row
-- to wait for and what for:
--   'leave'    every conflicting row must leave, the last of them included: wait for that one
--   'grant'    an earlier request still waits: nothing can change for us before it is granted
--   'any'      next in line: any of several holders may leave first; the blocker is the oldest
--   'paused'   an operator stopped the resource
CREATE OR REPLACE FUNCTION {schema}.ahead(
    p_resource varchar, p_position bigint, p_access varchar, p_limit integer, p_weight integer, p_uid varchar)
RETURNS TABLE (eligible boolean, blocker bigint, until text, mine bigint)
LANGUAGE sql STABLE  -- and so simple that the planner inlines it
AS $$
    SELECT NOT paused AND fits,
           CASE WHEN fits THEN NULL WHEN alone THEN last WHEN waiter IS NOT NULL THEN waiter ELSE first END,
           CASE WHEN fits THEN 'paused' WHEN alone THEN 'leave' WHEN waiter IS NOT NULL THEN 'grant' ELSE 'any' END,
           a.mine
    FROM (
        SELECT coalesce(sum(weight) FILTER (WHERE conflict), 0) AS load,
               least(p_limit, min(concurrency_limit) FILTER (WHERE conflict)) AS declared,
               max(queue_position) FILTER (WHERE conflict) AS last,
               min(queue_position) FILTER (WHERE conflict) AS first,
               max(queue_position) FILTER (WHERE conflict AND granted_at IS NULL) AS waiter,
               max(queue_position) FILTER (WHERE request_uid = p_uid) AS mine
        FROM (SELECT *, p_access = 'write' OR access_type <> p_access AS conflict
              FROM {schema}.{table}
              WHERE resource_id = p_resource AND queue_position < p_position) AS r
    ) AS a
    LEFT JOIN {schema}.resource AS o ON o.resource_id = p_resource
    CROSS JOIN LATERAL (
        SELECT coalesce(a.load + p_weight <= least(a.declared, o.cap), true) AS fits,
               coalesce(least(a.declared, o.cap) <= p_weight, false) AS alone,
               o.paused_at IS NOT NULL AS paused
    ) AS verdict
$$;


-- Removes rows and writes their history. Entry locks are freed by their sessions' end, or by release().
CREATE OR REPLACE FUNCTION {schema}.bury(p_member integer, p_outcome text) RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    -- What an open transaction has pinned (pin) stays until that ends; it is found then.
    WITH free AS (SELECT resource_id, queue_position FROM {schema}.{table} WHERE member_id = p_member FOR UPDATE SKIP LOCKED),
         gone AS (DELETE FROM {schema}.{table} AS t USING free
                  WHERE t.resource_id = free.resource_id AND t.queue_position = free.queue_position RETURNING t.*),
         kept AS (INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id,
                                                owner, note, requested_at, granted_at, outcome)
                  SELECT resource_id, queue_position, requesting_id, access_type, weight, member_id,
                         owner, note, requested_at, granted_at, p_outcome FROM gone)
    SELECT count(*) FROM gone
$$;


-- Tests whether the owner of a row that blocks still lives, and acts on it: notes the time when it is first missed,
-- removes it when it has been missing for its grace (or its lease has run out, or its row is stale). A waiting row that
-- nobody attends to any more goes by itself, though its member may live, or be p_mine.
-- True when it wrote something: the caller should then end its transaction, so that others see it.
CREATE OR REPLACE FUNCTION {schema}.suspect(p_resource varchar, p_position bigint, p_mine integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_row    record;
    v_member {schema}.member;
    v_stale  bigint;
BEGIN
    -- Nothing is locked before it is decided: whoever calls may sleep long afterwards, in the same transaction.
    SELECT member_id, requested_at, revoked_at, granted_at IS NULL AND attended_until < clock_timestamp() AS unattended
    INTO v_row FROM {schema}.{table}
    WHERE resource_id = p_resource AND queue_position = p_position;
    IF v_row.unattended THEN
        RETURN {schema}.remove(p_resource, p_position, 'cancelled');
    ELSIF NOT FOUND OR v_row.member_id = p_mine THEN
        RETURN false;
    END IF;

    IF v_row.member_id IS NULL THEN
        SELECT stale_after_ms INTO v_stale FROM {schema}.resource WHERE resource_id = p_resource;
        IF v_stale IS NULL OR v_row.requested_at + v_stale * interval '1 millisecond' > clock_timestamp() THEN
            RETURN false;
        END IF;
        RETURN {schema}.remove(p_resource, p_position, 'reaped');
    END IF;

    SELECT * INTO v_member FROM {schema}.member WHERE member_id = v_row.member_id;
    IF NOT FOUND THEN
        RETURN {schema}.bury(v_row.member_id, 'reaped') > 0;
    END IF;
    IF v_row.revoked_at IS NOT NULL AND v_row.revoked_at + v_member.grace_ms * interval '1 millisecond' <= clock_timestamp() THEN
        RETURN {schema}.remove(p_resource, p_position, 'revoked');
    END IF;
    IF v_member.lease_until IS NULL THEN
        -- A session can always share its own lock: its own beacon it must not test. (Its number alone proves nothing: it may
        -- have been a dead session's, or this one's before a pool reset it.)
        IF v_member.backend_pid = pg_backend_pid() AND EXISTS (
               SELECT FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND mode = 'ExclusiveLock' AND granted
               AND pid = pg_backend_pid() AND classid::bigint = {schema}.lock_class(1) AND objid::bigint = v_member.beacon)
           OR NOT pg_try_advisory_lock_shared({schema}.lock_class(1), v_member.beacon) THEN
            RETURN false;
        END IF;
        PERFORM pg_advisory_unlock_shared({schema}.lock_class(1), v_member.beacon);
        IF v_member.missing_since IS NULL THEN
            UPDATE {schema}.member SET missing_since = clock_timestamp()
            WHERE member_id = v_member.member_id AND beacon = v_member.beacon AND missing_since IS NULL;
            IF v_member.grace_ms > 0 THEN
                RETURN FOUND;
            END IF;
        END IF;
    END IF;
    -- Decided by this one statement: a member that returns changes its beacon, or its lease, and is not found here.
    DELETE FROM {schema}.member
    WHERE member_id = v_member.member_id AND beacon IS NOT DISTINCT FROM v_member.beacon
      AND CASE WHEN lease_until IS NULL
               THEN missing_since + grace_ms * interval '1 millisecond' <= clock_timestamp()
               ELSE lease_until < clock_timestamp() END;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM {schema}.bury(v_member.member_id, 'reaped');
    RETURN true;
END
$$;


-- Removes one row, whoever owns it, with its history; false when it is gone, or pinned by an open transaction, or, where
-- p_outcome is 'cancelled', when somebody waits for it after all.
CREATE OR REPLACE FUNCTION {schema}.remove(p_resource varchar, p_position bigint, p_outcome text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    WITH free AS (SELECT queue_position FROM {schema}.{table}
                  WHERE resource_id = p_resource AND queue_position = p_position
                    AND (p_outcome <> 'cancelled' OR granted_at IS NULL AND attended_until < clock_timestamp())
                  FOR UPDATE SKIP LOCKED),
         gone AS (DELETE FROM {schema}.{table} AS t USING free
                  WHERE t.resource_id = p_resource AND t.queue_position = free.queue_position RETURNING t.*)
    INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id,
                                  owner, note, requested_at, granted_at, outcome)
    SELECT resource_id, queue_position, requesting_id, access_type, weight, member_id,
           owner, note, requested_at, granted_at, p_outcome FROM gone;
    RETURN FOUND;
END
$$;


-- A new member, with its beacon (or its lease). Called once a process, on the connection that it keeps.
CREATE OR REPLACE FUNCTION {schema}.enrol(
    p_host varchar, p_pid integer, p_program varchar, p_grace_ms integer, p_lease_ms integer, OUT member_id integer)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_beacon integer;
BEGIN
    PERFORM {schema}.guard('enrol');
    IF p_lease_ms IS NULL THEN
        v_beacon := nextval('{schema}.beacon');
        PERFORM pg_advisory_lock({schema}.lock_class(1), v_beacon);
    END IF;
    INSERT INTO {schema}.member (beacon, backend_pid, host, pid, program, grace_ms, lease_ms, lease_until)
    VALUES (v_beacon, pg_backend_pid(), p_host, p_pid, p_program, p_grace_ms, p_lease_ms,
            clock_timestamp() + p_lease_ms * interval '1 millisecond')
    RETURNING {schema}.member.member_id INTO member_id;
END
$$;


-- Who may act for a member is told by its login: to everybody else it is as if it were not there (here and below).
-- The member is back on a new session: takes a new beacon (the old session may still linger on the server, where it
-- protects us until then) and its rows' entry locks. False when it was given up meanwhile.
CREATE OR REPLACE FUNCTION {schema}.resume_member(p_member integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_beacon integer;
    v_lease  integer;
BEGIN
    PERFORM {schema}.guard('resume_member');
    SELECT lease_ms INTO v_lease FROM {schema}.member WHERE member_id = p_member AND login = session_user;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF v_lease IS NULL THEN
        v_beacon := nextval('{schema}.beacon');
        PERFORM pg_advisory_lock({schema}.lock_class(1), v_beacon);
    END IF;
    UPDATE {schema}.member
    SET beacon = v_beacon, backend_pid = pg_backend_pid(), missing_since = NULL,
        lease_until = clock_timestamp() + lease_ms * interval '1 millisecond'
    WHERE member_id = p_member;
    IF NOT FOUND THEN  -- removed while we came back
        RETURN false;
    END IF;
    IF v_lease IS NULL THEN
        -- 'try': where the old session lingers, its lock stands for ours.
        PERFORM pg_try_advisory_lock({schema}.lock_class(2), (queue_position & 2147483647)::integer)
        FROM {schema}.{table} WHERE member_id = p_member;
    END IF;
    RETURN true;
END
$$;


-- The member lives: renews its lease, clears missing_since, tells which rows it has. `known` is false when it was
-- given up. Raises when the session changed under the member (a pooler in transaction mode).
CREATE OR REPLACE FUNCTION {schema}.ping(
    p_member integer, OUT known boolean, OUT positions bigint[], OUT revoked bigint[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_member {schema}.member;
BEGIN
    SELECT * INTO v_member FROM {schema}.member WHERE member_id = p_member AND login = session_user;
    known := FOUND;
    IF NOT known THEN
        RETURN;
    END IF;
    IF v_member.lease_ms IS NULL THEN
        IF v_member.backend_pid <> pg_backend_pid() THEN
            RAISE EXCEPTION 'sqlsem: this connection changed sessions under its member (a pooler in transaction mode?)'
                USING ERRCODE = '25001', HINT = 'Connect with lease=…, or past the pooler.';
        END IF;
        IF v_member.missing_since IS NOT NULL THEN
            IF NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND mode = 'ExclusiveLock' AND granted
                           AND pid = pg_backend_pid() AND classid::bigint = {schema}.lock_class(1)
                           AND objid::bigint = v_member.beacon) THEN
                RAISE EXCEPTION 'sqlsem: this session gave its beacon up (DISCARD ALL, or a pooler that resets sessions?)'
                    USING ERRCODE = '25001', HINT = 'Connect with lease=…, or past the pooler.';
            END IF;
            UPDATE {schema}.member SET missing_since = NULL WHERE member_id = p_member;
            known := FOUND;
        END IF;
    ELSE
        UPDATE {schema}.member SET lease_until = clock_timestamp() + lease_ms * interval '1 millisecond'
        WHERE member_id = p_member;
        known := FOUND;
    END IF;
    SELECT array_agg(queue_position), array_agg(queue_position) FILTER (WHERE revoked_at IS NOT NULL)
    INTO positions, revoked
    FROM {schema}.{table} WHERE member_id = p_member;
END
$$;


-- The member leaves for good; what it still has goes with it.
CREATE OR REPLACE FUNCTION {schema}.resign(p_member integer) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_beacon integer;
BEGIN
    DELETE FROM {schema}.member WHERE member_id = p_member AND login = session_user RETURNING beacon INTO v_beacon;
    IF NOT FOUND THEN
        RETURN;  -- given up before; its rows go when somebody meets them
    END IF;
    PERFORM {schema}.bury(p_member, 'released');
    -- Free the locks when this is committed (see release), not before.
    IF v_beacon IS NOT NULL AND pg_try_advisory_xact_lock({schema}.lock_class(1), v_beacon) THEN
        PERFORM pg_advisory_unlock({schema}.lock_class(1), v_beacon);
    END IF;
END
$$;


-- Takes a number. One transaction: gate, look ahead, insert, entry lock. Where nobody is in the way the request is
-- granted on the spot. With p_try nothing is inserted unless it is.
-- A second call with the same p_uid (its first reply was lost) finds the row of the first.
CREATE OR REPLACE FUNCTION {schema}.register(
    p_member integer, p_requesting_id varchar, p_owner varchar, p_uid varchar, p_try boolean,
    p_resource varchar, p_access varchar, p_limit integer, p_weight integer, p_note varchar,
    OUT queue_position bigint, OUT granted boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_placed record;
BEGIN
    -- Asked here as well, to spare the usual case a call.
    IF pg_current_xact_id_if_assigned() IS NOT NULL OR current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM {schema}.guard('register');
    END IF;
    PERFORM pg_advisory_xact_lock({schema}.lock_class(0), hashtext(p_resource));
    v_placed := {schema}.place(p_member, p_requesting_id, p_owner, p_uid, p_try, p_resource, p_access, p_limit, p_weight, p_note);
    queue_position := v_placed.queue_position;
    granted := v_placed.granted;
END
$$;


-- The part of a registration under the gate, which the caller has taken in a statement before: statements in here see
-- every registration that came before.
CREATE OR REPLACE FUNCTION {schema}.place(
    p_member integer, p_requesting_id varchar, p_owner varchar, p_uid varchar, p_try boolean,
    p_resource varchar, p_access varchar, p_limit integer, p_weight integer, p_note varchar,
    OUT queue_position bigint, OUT granted boolean)
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_ahead record;
    v_lease integer;
BEGIN
    -- Here and not as constraints of the table, which would cost a tenth of the whole call.
    IF p_resource IS NULL OR p_resource = '' OR p_resource <> btrim(p_resource) OR p_weight < 1 OR p_limit < p_weight THEN
        RAISE EXCEPTION 'sqlsem: bad request: resource %, limit %, weight %; a name has no blanks around it, and 1 <= weight <= limit',
            coalesce(quote_literal(p_resource), 'NULL'), p_limit, p_weight USING ERRCODE = '22023';
    END IF;
    -- The usual case: nobody is there.
    SELECT lease_ms,
           NOT EXISTS (SELECT FROM {schema}.{table} WHERE resource_id = p_resource)
           AND NOT EXISTS (SELECT FROM {schema}.resource WHERE resource_id = p_resource)
    INTO v_lease, granted FROM {schema}.member WHERE member_id = p_member AND login = session_user;
    IF NOT FOUND THEN
        IF EXISTS (SELECT FROM {schema}.member WHERE member_id = p_member) THEN
            RAISE EXCEPTION 'sqlsem: member % belongs to another login than %', p_member, session_user
                USING ERRCODE = '42501', HINT = 'Use the member that this login enrolled.';
        END IF;
        -- A row of a member that is not there is anybody's to remove: nobody must believe that it holds.
        RAISE EXCEPTION 'sqlsem: member % is not there: it was given up while it was out of reach', p_member
            USING ERRCODE = 'P0002', HINT = 'Enrol again.';
    END IF;
    IF NOT granted THEN
        SELECT * INTO v_ahead FROM {schema}.ahead(p_resource, 9223372036854775807, p_access, p_limit, p_weight, p_uid);
        IF v_ahead.mine IS NOT NULL THEN
            SELECT t.queue_position, t.granted_at IS NOT NULL INTO queue_position, granted FROM {schema}.{table} AS t
            WHERE t.resource_id = p_resource AND t.queue_position = v_ahead.mine AND t.member_id = p_member;
            IF FOUND THEN
                RETURN;
            END IF;  -- else somebody else's, and the insert will fail
        END IF;
        granted := v_ahead.eligible;
        IF p_try AND NOT granted THEN
            IF {schema}.suspect_all(p_resource, p_member) THEN
                SELECT eligible INTO granted FROM {schema}.ahead(p_resource, 9223372036854775807, p_access, p_limit, p_weight, p_uid);
            END IF;
            IF NOT granted THEN
                RETURN;
            END IF;
        END IF;
    END IF;
    INSERT INTO {schema}.{table} (resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner,
                                  request_uid, granted_at, note)
    VALUES (p_resource, p_requesting_id, p_access, p_limit, p_weight, p_member, p_owner,
            p_uid, CASE WHEN granted THEN clock_timestamp() END, p_note)
    RETURNING {schema}.{table}.queue_position INTO queue_position;
    -- The entry lock, unless the member lives by a lease and its session may be anybody's.
    IF v_lease IS NULL THEN
        PERFORM pg_advisory_lock({schema}.lock_class(2), (queue_position & 2147483647)::integer);
    END IF;
END
$$;


-- Several at once: all gates in one order, then all rows, in one transaction. So two such calls can never wait for
-- each other. p_requests: [{"resource": …, "access": …, "limit": …, "weight": …, "note": …}, …], each resource once.
CREATE OR REPLACE FUNCTION {schema}.register_all(
    p_member integer, p_requesting_id varchar, p_owner varchar, p_uid varchar, p_try boolean, p_requests jsonb)
RETURNS TABLE (resource_id varchar, queue_position bigint, granted boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_request record;
    v_ticket  record;
    v_free    boolean := true;
BEGIN
    PERFORM {schema}.guard('register_all');
    -- By key, not by name: names that share a key must not be taken twice in different orders.
    PERFORM pg_advisory_xact_lock({schema}.lock_class(0), g.key)
    FROM (SELECT DISTINCT hashtext(value ->> 'resource') AS key FROM jsonb_array_elements(p_requests) ORDER BY key) AS g;
    IF p_try THEN
        FOR v_request IN SELECT * FROM jsonb_to_recordset(p_requests)
            AS r (resource varchar, access varchar, "limit" integer, weight integer) LOOP
            SELECT eligible INTO v_free FROM {schema}.ahead(v_request.resource, 9223372036854775807, v_request.access,
                                                            v_request."limit", v_request.weight, NULL);
            IF NOT v_free AND {schema}.suspect_all(v_request.resource, p_member) THEN
                SELECT eligible INTO v_free FROM {schema}.ahead(v_request.resource, 9223372036854775807, v_request.access,
                                                                v_request."limit", v_request.weight, NULL);
            END IF;
            EXIT WHEN NOT v_free;
        END LOOP;
        IF NOT v_free AND NOT EXISTS (SELECT FROM {schema}.{table} AS t WHERE t.request_uid = p_uid || '.1') THEN
            RETURN;
        END IF;
    END IF;
    FOR v_request IN SELECT * FROM ROWS FROM (jsonb_to_recordset(p_requests)
        AS (resource varchar, access varchar, "limit" integer, weight integer, note varchar)) WITH ORDINALITY AS
        r (resource, access, "limit", weight, note, ordinal) LOOP
        SELECT * INTO v_ticket FROM {schema}.place(
            p_member, p_requesting_id, p_owner, (p_uid || '.' || v_request.ordinal)::varchar, false, v_request.resource,
            v_request.access, v_request."limit", v_request.weight, v_request.note);
        resource_id := v_request.resource;
        queue_position := v_ticket.queue_position;
        granted := v_ticket.granted;
        RETURN NEXT;
    END LOOP;
END
$$;


-- Tests the owners of the rows on a resource whose sessions look gone, and the rows that nobody attends to (at most 32
-- in all). True when anything was written.
CREATE OR REPLACE FUNCTION {schema}.suspect_all(p_resource varchar, p_mine integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_position bigint;
    v_written  boolean := false;
BEGIN
    FOR v_position IN
        SELECT min(queue_position)
        FROM (SELECT *, coalesce(granted_at IS NULL AND attended_until < clock_timestamp(), false) AS unattended
              FROM {schema}.{table} WHERE resource_id = p_resource) AS r
        WHERE unattended
           OR member_id IS DISTINCT FROM p_mine
              AND (revoked_at IS NOT NULL
                   OR CASE WHEN pg_try_advisory_lock_shared({schema}.lock_class(2), (queue_position & 2147483647)::integer)
                           THEN pg_advisory_unlock_shared({schema}.lock_class(2), (queue_position & 2147483647)::integer) END)
        GROUP BY CASE WHEN unattended OR member_id IS NULL THEN -queue_position ELSE member_id END, revoked_at IS NULL
        ORDER BY 1 LIMIT 32
    LOOP
        v_written := {schema}.suspect(p_resource, v_position, p_mine) OR v_written;
    END LOOP;
    RETURN v_written;
END
$$;


-- Waits up to p_timeout_ms for a row's turn, asleep in the engine's lock queue wherever there is a lock to wait for.
--   0  granted          -1  not yet
--   1  call again at once: something was written that others should see
--  -2  the row is gone: cancelled, reaped or taken away
CREATE OR REPLACE FUNCTION {schema}.wait(p_resource varchar, p_position bigint, p_timeout_ms integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_deadline timestamptz := clock_timestamp() + p_timeout_ms * interval '1 millisecond';
    v_row      record;
    v_ahead    record;
    v_left     integer;
    v_class    integer;
    v_pause    float := 2;       -- ms; grows while nothing happens
    v_waiting  boolean := false;
    v_install  bigint := hashtext('sqlsem.install.{schema}');
    v_again    boolean := false;
BEGIN
    -- What is written here is for people and may be lost in a crash of the server.
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT access_type, concurrency_limit, weight, member_id, granted_at, revoked_at INTO v_row
    FROM {schema}.{table} AS t WHERE resource_id = p_resource AND queue_position = p_position
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = t.member_id AND m.login = session_user);
    IF NOT FOUND OR v_row.revoked_at IS NOT NULL THEN
        RETURN -2;
    ELSIF v_row.granted_at IS NOT NULL THEN
        RETURN 0;
    END IF;
    LOOP
        SELECT * INTO v_ahead FROM {schema}.ahead(p_resource, p_position, v_row.access_type, v_row.concurrency_limit,
                                                  v_row.weight, NULL);
        IF v_ahead.eligible THEN
            UPDATE {schema}.{table} SET granted_at = clock_timestamp()
            WHERE resource_id = p_resource AND queue_position = p_position AND revoked_at IS NULL;
            RETURN CASE WHEN FOUND THEN 0 ELSE -2 END;
        END IF;
        v_left := ceil(1000 * extract(epoch FROM v_deadline - clock_timestamp()));
        IF v_left <= 0 THEN
            -- Once a call, look at all the others too: whoever stands further ahead may have died unseen.
            RETURN CASE WHEN {schema}.suspect_all(p_resource, v_row.member_id) THEN 1 ELSE -1 END;
        END IF;
        -- Who upgrades the tables must not wait long for this transaction, and everybody else behind that. (But longer
        -- than deadlock_timeout, after which the server looks for deadlocks.)
        v_left := least(v_left, 2000);
        IF v_again THEN
            IF NOT pg_try_advisory_lock_shared(v_install) THEN
                RETURN -1;
            END IF;
            PERFORM pg_advisory_unlock_shared(v_install);
        END IF;
        v_again := true;
        IF v_ahead.until = 'paused' THEN
            PERFORM pg_sleep(least(v_left, v_pause) / 1000);
            v_pause := least(v_pause * 1.5, 250);
            CONTINUE;
        END IF;

        IF v_ahead.until <> 'leave' AND NOT v_waiting THEN
            -- Those behind us wait for our grant. Freed when this transaction ends, just after its commit is visible.
            -- 'try': should anybody else have it, those behind us look now and then.
            PERFORM pg_try_advisory_xact_lock({schema}.lock_class(3), (p_position & 2147483647)::integer);
            v_waiting := true;
        END IF;
        v_class := {schema}.lock_class(CASE v_ahead.until WHEN 'grant' THEN 3 ELSE 2 END);
        IF pg_try_advisory_lock_shared(v_class, (v_ahead.blocker & 2147483647)::integer) THEN
            -- Nobody holds it, yet the row stands: it was released this instant, or its owner has no session
            -- (a lease, a bare participant), or its owner died.
            PERFORM pg_advisory_unlock_shared(v_class, (v_ahead.blocker & 2147483647)::integer);
            IF {schema}.suspect(p_resource, v_ahead.blocker, v_row.member_id) THEN
                RETURN 1;
            END IF;
            PERFORM pg_sleep(least(v_left, v_pause) / 1000);
            v_pause := least(v_pause * 1.5, 100);
            CONTINUE;
        END IF;
        IF v_ahead.until = 'any' THEN
            IF v_pause > 20 AND {schema}.suspect_all(p_resource, v_row.member_id) THEN
                RETURN 1;
            END IF;
            v_left := least(v_left, ceil(v_pause));
            v_pause := CASE WHEN v_pause > 20 THEN 5 ELSE v_pause * 1.2 END;
        END IF;
        BEGIN
            PERFORM set_config('lock_timeout', v_left::text, true);
            PERFORM pg_advisory_lock_shared(v_class, (v_ahead.blocker & 2147483647)::integer);
            PERFORM pg_advisory_unlock_shared(v_class, (v_ahead.blocker & 2147483647)::integer);
        EXCEPTION WHEN lock_not_available THEN
            CONTINUE;  -- look again
        END;
        IF v_ahead.until = 'leave' THEN
            -- The usual end of a wait: look and take in one statement.
            UPDATE {schema}.{table} SET granted_at = clock_timestamp()
            WHERE resource_id = p_resource AND queue_position = p_position AND revoked_at IS NULL
              AND (SELECT eligible FROM {schema}.ahead(p_resource, p_position, v_row.access_type,
                                                       v_row.concurrency_limit, v_row.weight, NULL));
            IF FOUND THEN
                RETURN 0;
            END IF;
        END IF;
    END LOOP;
END
$$;


-- Gives a number back. 0 done, -1 no such row of this requester (already released, reaped or taken away, or another
-- login's; a bare participant deletes its row itself).
-- May be repeated. Not made durable at once: a release that a crash of the server undoes is repeated by the member.
CREATE OR REPLACE FUNCTION {schema}.release(
    p_resource varchar, p_position bigint, p_requesting_id varchar, p_outcome varchar DEFAULT 'released') RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_row {schema}.{table};
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM {schema}.{table} AS t
    WHERE t.resource_id = p_resource AND t.queue_position = p_position AND t.requesting_id = p_requesting_id
      AND coalesce((SELECT m.login = session_user FROM {schema}.member AS m WHERE m.member_id = t.member_id),
                   t.member_id IS NOT NULL)  -- of a member that was given up: the row is dead
    RETURNING t.* INTO v_row;
    IF NOT FOUND THEN
        RETURN -1;
    END IF;
    INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id,
                                  owner, note, requested_at, granted_at, outcome)
    VALUES (v_row.resource_id, v_row.queue_position, v_row.requesting_id, v_row.access_type, v_row.weight, v_row.member_id,
            v_row.owner, v_row.note, v_row.requested_at, v_row.granted_at, p_outcome);
    -- Those who wait for the entry lock must not wake before the row is seen gone: take it once more for this
    -- transaction, which frees it after its commit is visible. 'try' fails only where another session holds it.
    IF pg_try_advisory_xact_lock({schema}.lock_class(2), (p_position & 2147483647)::integer) THEN
        PERFORM pg_advisory_unlock({schema}.lock_class(2), (p_position & 2147483647)::integer);
    END IF;
    RETURN 0;
END
$$;


-- Gives back whatever one acquire may have left (its reply was lost, or it was interrupted).
CREATE OR REPLACE FUNCTION {schema}.cancel(p_member integer, p_uid varchar, p_outcome varchar) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_row   record;
    v_count integer := 0;
BEGIN
    FOR v_row IN SELECT resource_id, queue_position, requesting_id FROM {schema}.{table}
        WHERE member_id = p_member AND (request_uid = p_uid OR starts_with(request_uid, p_uid || '.')) LOOP
        IF {schema}.release(v_row.resource_id, v_row.queue_position, v_row.requesting_id, p_outcome) = 0 THEN
            v_count := v_count + 1;
        END IF;
    END LOOP;
    RETURN v_count;
END
$$;


-- (The name that this had at first is another routine's now.)
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace AND proname = 'assert_holding'
               AND prorettype = 'boolean'::regtype) THEN
        DROP FUNCTION {schema}.assert_holding(varchar, bigint, varchar);
    END IF;
END
$$;
-- Pins a row to the caller's own transaction: nobody can be granted in its stead before that ends.
-- True when it is there. The transaction may be another login's. Under REPEATABLE READ a row that went away meanwhile raises a serialization failure.
CREATE OR REPLACE FUNCTION {schema}.pin(p_resource varchar, p_position bigint, p_requesting_id varchar) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM FROM {schema}.{table}
    WHERE resource_id = p_resource AND queue_position = p_position AND requesting_id = p_requesting_id
      AND granted_at IS NOT NULL
    FOR SHARE;
    RETURN FOUND;
END
$$;


-- What people look at -------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION {schema}.entries(p_resource varchar DEFAULT NULL)
RETURNS TABLE (resource_id varchar, queue_position bigint, state text, access_type varchar, concurrency_limit integer,
               weight integer, requesting_id varchar, member_id integer, owner varchar, host varchar, pid integer,
               program varchar, note varchar, requested_at timestamptz, granted_at timestamptz,
               seconds float, missing_for float)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.resource_id, t.queue_position,
           CASE WHEN t.revoked_at IS NOT NULL THEN 'revoked' WHEN t.granted_at IS NOT NULL THEN 'holds'
                WHEN t.member_id IS NULL AND (SELECT eligible FROM {schema}.ahead(t.resource_id, t.queue_position,
                     t.access_type, t.concurrency_limit, t.weight, NULL)) THEN 'holds' ELSE 'waits' END,
           t.access_type, t.concurrency_limit, t.weight, t.requesting_id, t.member_id, t.owner, m.host, m.pid, m.program,
           t.note, t.requested_at, t.granted_at,
           extract(epoch FROM clock_timestamp() - coalesce(t.granted_at, t.requested_at))::float,
           extract(epoch FROM clock_timestamp() - CASE WHEN m.lease_until < clock_timestamp() THEN m.lease_until
                                                       ELSE m.missing_since END)::float
    FROM {schema}.{table} AS t LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE p_resource IS NULL OR t.resource_id = p_resource
    ORDER BY t.resource_id, t.queue_position
$$;

CREATE OR REPLACE FUNCTION {schema}.past(p_resource varchar, p_most integer)
RETURNS TABLE (resource_id varchar, queue_position bigint, access_type varchar, weight integer, requesting_id varchar,
               owner varchar, note varchar, requested_at timestamptz, granted_at timestamptz, ended_at timestamptz,
               waited float, held float, outcome varchar)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT h.resource_id, h.queue_position, h.access_type, h.weight, h.requesting_id, h.owner, h.note,
           h.requested_at, h.granted_at, h.ended_at,
           extract(epoch FROM coalesce(h.granted_at, h.ended_at) - h.requested_at)::float,
           extract(epoch FROM h.ended_at - h.granted_at)::float, h.outcome
    FROM {schema}.history AS h
    WHERE p_resource IS NULL OR h.resource_id = p_resource
    ORDER BY h.ended_at DESC LIMIT p_most
$$;

CREATE OR REPLACE FUNCTION {schema}.resources()
RETURNS TABLE (resource_id varchar, cap integer, paused boolean, stale_after float, holding bigint, waiting bigint)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(o.resource_id, q.resource_id), o.cap, o.paused_at IS NOT NULL, o.stale_after_ms / 1000.0::float,
           coalesce(q.holding, 0), coalesce(q.waiting, 0)
    FROM {schema}.resource AS o
    FULL JOIN (SELECT e.resource_id, count(*) FILTER (WHERE e.state <> 'waits') AS holding,
                      count(*) FILTER (WHERE e.state = 'waits') AS waiting
               FROM {schema}.entries() AS e GROUP BY e.resource_id) AS q ON q.resource_id = o.resource_id
    ORDER BY 1
$$;


CREATE OR REPLACE FUNCTION {schema}.settings() RETURNS TABLE (name text, value text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT s.name, s.value FROM {schema}.setting AS s $$;


-- What operators do ---------------------------------------------------------------------------------------------

-- p_what: 'cap' (NULL: none), 'stale_after' in ms (NULL: never), 'paused' (1 or 0).
CREATE OR REPLACE FUNCTION {schema}.set_resource(p_resource varchar, p_what text, p_value bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF p_what NOT IN ('cap', 'stale_after', 'paused') THEN
        RAISE EXCEPTION 'sqlsem: % cannot be set; cap, stale_after and paused can', p_what USING ERRCODE = '22023';
    END IF;
    INSERT INTO {schema}.resource (resource_id) VALUES (p_resource) ON CONFLICT DO NOTHING;
    UPDATE {schema}.resource
    SET cap = CASE p_what WHEN 'cap' THEN p_value ELSE cap END,
        stale_after_ms = CASE p_what WHEN 'stale_after' THEN p_value ELSE stale_after_ms END,
        paused_at = CASE WHEN p_what <> 'paused' THEN paused_at WHEN p_value = 1 THEN coalesce(paused_at, clock_timestamp()) END
    WHERE resource_id = p_resource;
    DELETE FROM {schema}.resource
    WHERE resource_id = p_resource AND cap IS NULL AND stale_after_ms IS NULL AND paused_at IS NULL;
END
$$;

-- Takes a row away from its owner. A waiting row goes at once, and a row whose owner is gone or was bare; a live holder
-- is told first (by its next ping, or by grace running out) unless p_force: 0 gone, 1 told, -1 no such row.
CREATE OR REPLACE FUNCTION {schema}.revoke(p_position bigint, p_force boolean) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_row record;
BEGIN
    -- revoked_at first: a waiter that is granted this instant sees it, or we see its grant.
    UPDATE {schema}.{table} SET revoked_at = coalesce(revoked_at, clock_timestamp()) WHERE queue_position = p_position
    RETURNING resource_id, granted_at, member_id INTO v_row;
    IF NOT FOUND THEN
        RETURN -1;
    END IF;
    IF p_force OR v_row.granted_at IS NULL OR v_row.member_id IS NULL THEN
        PERFORM {schema}.remove(v_row.resource_id, p_position, 'revoked');
        RETURN 0;
    END IF;
    RETURN 1;
END
$$;

-- Tests every member now; the number of members and stale rows removed.
CREATE OR REPLACE FUNCTION {schema}.reap() RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_row    record;
    v_before bigint := (SELECT count(*) FROM {schema}.{table});
BEGIN
    FOR v_row IN SELECT resource_id, queue_position FROM {schema}.{table} LOOP
        PERFORM {schema}.suspect(v_row.resource_id, v_row.queue_position, -1);
    END LOOP;
    -- Members that own nothing leave no row to find them by.
    DELETE FROM {schema}.member AS m
    WHERE NOT EXISTS (SELECT FROM {schema}.{table} AS t WHERE t.member_id = m.member_id)
      AND CASE WHEN lease_until IS NULL
               THEN joined_at + grace_ms * interval '1 millisecond' < clock_timestamp()
                    AND NOT EXISTS (SELECT FROM pg_locks AS l WHERE l.locktype = 'advisory' AND l.objsubid = 2
                                    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                                    AND l.classid::bigint = {schema}.lock_class(1) AND l.objid::bigint = m.beacon)
               ELSE lease_until < clock_timestamp() END;
    RETURN v_before - (SELECT count(*) FROM {schema}.{table});
END
$$;

-- Removes history older than setting history_days, at most p_most rows a call.
CREATE OR REPLACE FUNCTION {schema}.prune(p_most integer) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH gone AS (
        DELETE FROM {schema}.history WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM {schema}.history
            WHERE ended_at < clock_timestamp() - (SELECT value FROM {schema}.setting WHERE name = 'history_days')::integer * interval '1 day'
            ORDER BY ended_at LIMIT p_most FOR UPDATE SKIP LOCKED))
        RETURNING 1)
    SELECT count(*) FROM gone
$$;


-- Bare participants insert rows themselves. They get their number under the gate as well, so that numbers appear in
-- order; the gate is then theirs until their transaction ends. Rows of the routines carry a request_uid.
CREATE OR REPLACE FUNCTION {schema}.number_bare_row() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NEW.resource_id = '' OR NEW.resource_id <> btrim(NEW.resource_id) OR NEW.weight < 1 OR NEW.concurrency_limit < NEW.weight THEN
        RAISE EXCEPTION 'sqlsem: bad row: resource %, limit %, weight %; a name has no blanks around it, and 1 <= weight <= limit',
            quote_literal(NEW.resource_id), NEW.concurrency_limit, NEW.weight USING ERRCODE = '22023';
    END IF;
    PERFORM pg_advisory_xact_lock({schema}.lock_class(0), hashtext(NEW.resource_id));
    NEW.queue_position := nextval(pg_get_serial_sequence('{schema}.{table}', 'queue_position'));
    NEW.member_id := NULL;
    NEW.granted_at := NULL;
    NEW.revoked_at := NULL;
    NEW.requested_at := clock_timestamp();
    RETURN NEW;
END
$$;
DO $$
BEGIN
    -- Only once: it locks the table, which would have to wait for those who wait in it.
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'number_bare_row' AND tgrelid = '{schema}.{table}'::regclass) THEN
        CREATE TRIGGER number_bare_row BEFORE INSERT ON {schema}.{table}
            FOR EACH ROW WHEN (NEW.request_uid IS NULL) EXECUTE FUNCTION {schema}.number_bare_row();
    END IF;
END
$$;
