-- sqlsem, the rounds, for PostgreSQL. May be run again at any time, after tasks.sql.
--
-- Whatever is decided about the rounds of a name is decided under one advisory lock (class + 4, hash of the name),
-- taken in a statement of its own before anything is read: so of several parts that end at the same instant one is the
-- last.
-- A part, and the continuation, belongs to the member that runs it; when the member is gone, recover_rounds says so.

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

-- What makes the decisions of one name come one after the other, until the transaction ends.
CREATE OR REPLACE FUNCTION {schema}.lock_round(p_name varchar) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM {schema}.guard('a round');
    END IF;
    PERFORM {schema}.lock_alone({schema}.lock_class(4), hashtext(p_name), 'round ' || quote_literal({schema}.plain(p_name)));
END
$$;

-- Keeps what the last part shall start. Of a login that may not put tasks only that there is something (and what others have
-- kept stays): what is kept may be run with the rights of the one who resumes it.
CREATE OR REPLACE FUNCTION {schema}.keep_then(p_round bigint, p_kind varchar, p_body text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_may boolean := {schema}.has_role('putter');
BEGIN
    IF p_kind IS NOT NULL AND p_kind <> 'session' THEN
        UPDATE {schema}.round
        SET then_kind = CASE WHEN v_may THEN p_kind ELSE coalesce(then_kind, 'local') END,
            then_body = CASE WHEN v_may THEN p_body ELSE then_body END
        WHERE round_id = p_round;
    END IF;
END
$$;

-- Tests the members that run parts or continuations of a name's rounds (NULL: of all), except p_mine. Parts of the dead
-- have failed, their continuations are to be done again. The rounds in which parts failed so.
CREATE OR REPLACE FUNCTION {schema}.recover_rounds(p_name varchar, p_mine bigint) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_member bigint;
    v_round  record;
BEGIN
    -- In one order for everybody, and before any name is locked: so two of these cannot wait for each other.
    FOR v_member IN
        SELECT p.member_id FROM {schema}.round_part AS p JOIN {schema}.round AS r ON r.round_id = p.round_id
        WHERE p.status = 'running' AND (p_name IS NULL OR r.round_name = p_name)
        UNION
        SELECT r.then_member FROM {schema}.round AS r
        WHERE r.then_status = 'running' AND (p_name IS NULL OR r.round_name = p_name)
        ORDER BY 1
    LOOP
        PERFORM {schema}.test_member(v_member, p_mine);
    END LOOP;
    FOR v_round IN
        SELECT r.round_id, r.round_name
        FROM {schema}.round_part AS p JOIN {schema}.round AS r ON r.round_id = p.round_id
        WHERE p.status = 'running' AND (p_name IS NULL OR r.round_name = p_name)
          AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p.member_id)
        UNION
        SELECT r.round_id, r.round_name FROM {schema}.round AS r
        WHERE r.then_status = 'running' AND (p_name IS NULL OR r.round_name = p_name)
          AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = r.then_member)
        ORDER BY 2, 1
    LOOP
        IF p_name IS NOT NULL THEN
            PERFORM {schema}.lock_round(p_name);
        ELSIF NOT pg_try_advisory_xact_lock({schema}.lock_class(4), hashtext(v_round.round_name)) THEN
            CONTINUE;  -- somebody is at it
        END IF;
        UPDATE {schema}.round AS r SET then_status = 'pending', then_uid = NULL
        WHERE r.round_id = v_round.round_id AND r.then_status = 'running'
          AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = r.then_member);
        UPDATE {schema}.round_part AS p SET status = 'failed', ended_at = clock_timestamp(), error = 'its process died'
        WHERE p.round_id = v_round.round_id AND p.status = 'running'
          AND NOT EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p.member_id);
        IF FOUND THEN
            UPDATE {schema}.round AS r SET status = 'failed', ended_at = clock_timestamp()
            WHERE r.round_id = v_round.round_id AND r.status = 'open'
              AND NOT EXISTS (SELECT FROM {schema}.round_part AS p
                              WHERE p.round_id = r.round_id AND p.status IN ('expected', 'running'));
            RETURN NEXT v_round.round_id;
        END IF;
    END LOOP;
END
$$;

-- Gives back a continuation that this member claimed; true when there was one. May be repeated.
CREATE OR REPLACE FUNCTION {schema}.return_then(p_member bigint, p_uid varchar) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE {schema}.round AS r SET then_status = 'pending', then_uid = NULL
    WHERE r.then_status = 'running' AND r.then_member = p_member AND r.then_uid = p_uid
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member AND m.login = session_user);
    RETURN FOUND;
END
$$;

-- Starts a part, in the round that is open or in a new one. p_parts: JSON, the names of all parts. code:
--   started    id and attempt say which; previous is the round that expired by this, if one did
--   running    refused: the part runs already, and its process lives
--   succeeded  refused: the part has succeeded already, and the round waits for others
--   differs    refused: the open round has other parts
-- May be repeated with the same p_uid.
CREATE OR REPLACE FUNCTION {schema}.start_part(
    p_member bigint, p_name varchar, p_part varchar, p_parts text, p_window_ms bigint, p_owner varchar, p_uid varchar,
    p_then_kind varchar, p_then_body text, OUT code varchar, OUT id bigint, OUT attempt integer, OUT previous bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_round {schema}.round;
    v_part  {schema}.round_part;
    v_now   timestamptz;
    v_same  boolean;
    v_window bigint;
BEGIN
    PERFORM {schema}.lock_round(p_name);
    PERFORM {schema}.require_member(p_member);
    v_now := clock_timestamp();
    SELECT * INTO v_round FROM {schema}.round AS r WHERE r.round_name = p_name ORDER BY r.round_id DESC LIMIT 1;
    id := v_round.round_id;
    -- A round's window is what the login says that has opened it: another one's must not end it early.
    v_window := CASE WHEN v_round.opened_by <> session_user AND v_round.status IN ('open', 'failed') THEN v_round.window_ms ELSE p_window_ms END;
    SELECT * INTO v_part FROM {schema}.round_part AS p WHERE p.round_id = v_round.round_id AND p.part = p_part;
    v_same := ARRAY(SELECT p.part::text FROM {schema}.round_part AS p WHERE p.round_id = v_round.round_id
                    ORDER BY p.part COLLATE "C")
              = ARRAY(SELECT value FROM jsonb_array_elements_text(p_parts::jsonb) ORDER BY value COLLATE "C");
    IF v_part.start_uid = p_uid AND v_part.status = 'running' AND v_part.member_id = p_member THEN
        NULL;  -- the first reply was lost
    ELSE
        IF v_round.round_id IS NULL OR v_round.status NOT IN ('open', 'failed') THEN
            id := NULL;
        ELSIF v_round.opened_at + v_window * interval '1 millisecond' <= v_now THEN
            UPDATE {schema}.round AS r SET status = 'expired', ended_at = v_now WHERE r.round_id = id;
            id := NULL;
        ELSIF v_round.status = 'failed' AND (NOT v_same OR v_part.status = 'succeeded') THEN
            UPDATE {schema}.round AS r SET status = 'abandoned' WHERE r.round_id = id;
            id := NULL;
        ELSIF NOT v_same THEN
            code := 'differs';
            RETURN;
        ELSIF v_part.status = 'succeeded' THEN
            code := 'succeeded';
            RETURN;
        ELSIF v_part.status = 'running'
              AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = v_part.member_id) THEN
            code := 'running';
            RETURN;
        END IF;
        IF id IS NULL THEN
            INSERT INTO {schema}.round (round_name, window_ms, opened_at, opened_by) VALUES (p_name, p_window_ms, v_now, session_user)
            RETURNING * INTO v_round;
            id := v_round.round_id;
            INSERT INTO {schema}.round_part (round_id, part)
            SELECT id, value FROM jsonb_array_elements_text(p_parts::jsonb);
            DELETE FROM {schema}.round AS r
            WHERE r.round_name = p_name AND r.round_id < id AND r.then_status NOT IN ('pending', 'running')
              AND r.ended_at < v_now - interval '1 day' * (SELECT s.value FROM {schema}.setting AS s
                                                           WHERE s.name = 'history_days')::integer;
        ELSE
            UPDATE {schema}.round AS r SET status = 'open', ended_at = NULL, window_ms = v_window
            WHERE r.round_id = id;
        END IF;
        UPDATE {schema}.round_part AS p
        SET status = 'running', attempt = p.attempt + 1, start_uid = p_uid, member_id = p_member, owner = p_owner,
            host = m.host, pid = coalesce(m.pid, m.backend_pid), login = m.login, started_at = v_now, ended_at = NULL, error = NULL
        FROM {schema}.member AS m
        WHERE p.round_id = id AND p.part = p_part AND m.member_id = p_member
        RETURNING p.* INTO v_part;
        PERFORM {schema}.keep_then(id, p_then_kind, p_then_body);
    END IF;
    code := 'started';
    attempt := v_part.attempt;
    IF v_part.attempt = 1 AND v_part.started_at = v_round.opened_at THEN  -- this is what opened the round
        previous := (SELECT r.round_id FROM {schema}.round AS r
                     WHERE r.round_name = p_name AND r.round_id < id AND r.status = 'expired'
                       AND r.ended_at = v_round.opened_at
                     ORDER BY r.round_id DESC LIMIT 1);
    END IF;
END
$$;

-- Ends a part: 'succeeded' or 'failed'. code:
--   succeeded  it counts        failed  as was asked for
--   late       it took longer than the window, or the round is over: it has failed
--   lost       it was given up meanwhile, and is not this member's any more
-- Where it was the last to succeed is_last says so, and with then_attempt the continuation is this member's to run.
-- May be repeated with the same p_uid; 'failed' after 'succeeded' gives the continuation back, should it be ours.
-- Who says p_then_kind 'session' knows what to run, and gets the continuation whatever its kind.
CREATE OR REPLACE FUNCTION {schema}.end_part(
    p_member bigint, p_name varchar, p_part varchar, p_uid varchar, p_outcome varchar, p_error text, p_owner varchar,
    p_then_kind varchar, p_then_body text, OUT code varchar, OUT id bigint, OUT is_last boolean,
    OUT round_status varchar, OUT then_attempt integer, OUT kind varchar, OUT body text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_round {schema}.round;
    v_part  {schema}.round_part;
    v_now   timestamptz;
BEGIN
    IF (p_outcome IN ('succeeded', 'failed')) IS NOT TRUE THEN
        RAISE EXCEPTION 'sqlsem: a part ends as succeeded or failed, not %', quote_nullable(p_outcome) USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.lock_round(p_name);
    v_now := clock_timestamp();
    SELECT p.* INTO v_part FROM {schema}.round AS r JOIN {schema}.round_part AS p ON p.round_id = r.round_id
    WHERE r.round_name = p_name AND p.part = p_part AND p.start_uid = p_uid
    ORDER BY r.round_id DESC LIMIT 1;
    SELECT * INTO v_round FROM {schema}.round AS r WHERE r.round_id = v_part.round_id;
    id := v_round.round_id;
    round_status := v_round.status;
    is_last := false;
    IF v_part.member_id IS DISTINCT FROM p_member
       OR NOT {schema}.give_sign(p_member)  -- the continuation may come with it
       OR v_part.status = 'failed' AND v_part.error = 'its process died' THEN
        code := 'lost';
        RETURN;
    ELSIF v_part.status = 'running' THEN
        code := CASE WHEN p_outcome = 'succeeded'
                      AND (v_round.status <> 'open'
                           OR v_round.opened_at + v_round.window_ms * interval '1 millisecond' < v_now)
                     THEN 'late' ELSE p_outcome END;
        UPDATE {schema}.round_part AS p
        SET status = CASE code WHEN 'succeeded' THEN code ELSE 'failed' END, ended_at = v_now,
            error = CASE code WHEN 'late' THEN 'ended after the window'
                              WHEN 'failed' THEN coalesce(p_error, 'it said nothing') END
        WHERE p.round_id = id AND p.part = p_part;
        PERFORM {schema}.keep_then(id, p_then_kind, p_then_body);
        IF v_round.status = 'open' AND NOT EXISTS (SELECT FROM {schema}.round_part AS p
                                                   WHERE p.round_id = id AND p.status IN ('expected', 'running')) THEN
            IF EXISTS (SELECT FROM {schema}.round_part AS p WHERE p.round_id = id AND p.status = 'failed') THEN
                UPDATE {schema}.round AS r SET status = 'failed', ended_at = v_now WHERE r.round_id = id;
            ELSE
                UPDATE {schema}.round_part AS p SET is_last = true WHERE p.round_id = id AND p.part = p_part;
                UPDATE {schema}.round AS r
                SET status = 'succeeded', ended_at = v_now, then_kind = coalesce(r.then_kind, p_then_kind)
                WHERE r.round_id = id;
                -- What only the process knows that declared it waits for that.
                UPDATE {schema}.round AS r SET then_status = 'pending'
                WHERE r.round_id = id AND r.then_kind IN ('local', 'session') AND p_then_kind IS NULL;
                UPDATE {schema}.round AS r
                SET then_status = 'running', then_attempt = r.then_attempt + 1, then_uid = p_uid,
                    then_member = p_member, then_owner = p_owner, then_started = v_now
                WHERE r.round_id = id AND r.then_status = 'none' AND r.then_kind IS NOT NULL;
            END IF;
        END IF;
    ELSE
        code := CASE WHEN v_part.error = 'ended after the window' THEN 'late' ELSE v_part.status END;
        IF v_part.status = 'succeeded' AND p_outcome = 'failed' THEN
            PERFORM {schema}.return_then(p_member, p_uid);
        END IF;
    END IF;
    SELECT r.status, p.is_last INTO round_status, is_last
    FROM {schema}.round AS r JOIN {schema}.round_part AS p ON p.round_id = r.round_id
    WHERE r.round_id = id AND p.part = p_part;
    SELECT r.then_attempt, r.then_kind, r.then_body INTO then_attempt, kind, body
    FROM {schema}.round AS r
    WHERE r.round_id = id AND is_last AND r.then_status = 'running' AND r.then_member = p_member AND r.then_uid = p_uid;
END
$$;

-- Claims a continuation that nobody runs: of a name's oldest such round, or of one round, then also one that failed. id
-- is NULL where there is none. p_own: who asks has something of its own to run for those of kind local and session.
-- May be repeated with the same p_uid.
CREATE OR REPLACE FUNCTION {schema}.claim_then(
    p_member bigint, p_name varchar, p_round bigint, p_owner varchar, p_uid varchar, p_own boolean,
    OUT id bigint, OUT name varchar, OUT then_attempt integer, OUT kind varchar, OUT body text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM {schema}.lock_round(
        coalesce(p_name, (SELECT r.round_name FROM {schema}.round AS r WHERE r.round_id = p_round)));
    PERFORM {schema}.require_member(p_member);
    SELECT r.round_id, r.round_name, r.then_attempt, r.then_kind, r.then_body INTO id, name, then_attempt, kind, body
    FROM {schema}.round AS r
    WHERE (r.round_name = p_name OR r.round_id = p_round)
      AND r.then_status = 'running' AND r.then_member = p_member AND r.then_uid = p_uid;
    IF FOUND THEN
        RETURN;
    END IF;
    UPDATE {schema}.round AS r
    SET then_status = 'running', then_attempt = r.then_attempt + 1, then_uid = p_uid, then_member = p_member,
        then_owner = p_owner, then_started = clock_timestamp(), then_ended = NULL, then_error = NULL
    WHERE r.round_id = (SELECT o.round_id FROM {schema}.round AS o
                        WHERE CASE WHEN p_round IS NULL THEN o.round_name = p_name AND o.then_status = 'pending'
                                   ELSE o.round_id = p_round AND o.then_status IN ('pending', 'failed') END
                          AND (p_own OR o.then_kind NOT IN ('local', 'session'))
                        ORDER BY o.round_id LIMIT 1)
    RETURNING r.round_id, r.round_name, r.then_attempt, r.then_kind, r.then_body
    INTO id, name, then_attempt, kind, body;
END
$$;

-- Ends a continuation: it failed where there is an error. False when it was given up meanwhile. May be repeated.
CREATE OR REPLACE FUNCTION {schema}.end_then(p_member bigint, p_round bigint, p_attempt integer, p_error text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE {schema}.round AS r
    SET then_status = CASE WHEN p_error IS NULL THEN 'finished' ELSE 'failed' END, then_ended = clock_timestamp(),
        then_error = p_error
    WHERE r.round_id = p_round AND r.then_status = 'running' AND r.then_attempt = p_attempt AND r.then_member = p_member
      AND EXISTS (SELECT FROM {schema}.member AS m WHERE m.member_id = p_member AND m.login = session_user);
    RETURN FOUND OR EXISTS (SELECT FROM {schema}.round AS r
                            WHERE r.round_id = p_round AND r.then_status IN ('finished', 'failed')
                              AND r.then_attempt = p_attempt AND r.then_member = p_member);
END
$$;


-- What people look at -------------------------------------------------------------------------------------------

-- Rounds, newest first, one row a part. What a continuation runs is shown to those who may run, put or look at tasks.
CREATE OR REPLACE FUNCTION {schema}.list_rounds(
    p_name varchar DEFAULT NULL, p_round bigint DEFAULT NULL, p_most integer DEFAULT 20)
RETURNS TABLE (round_id bigint, round_name varchar, status varchar, window_seconds float, opened_at timestamptz,
               ended_at timestamptz, seconds float, then_status varchar, then_kind varchar, then_body text,
               then_attempt integer, then_owner varchar, then_started timestamptz, then_ended timestamptz,
               then_seconds float, then_error text, part varchar, part_status varchar, is_last boolean,
               attempt integer, member_id bigint, owner varchar, host varchar, pid integer,
               part_started timestamptz, part_ended timestamptz, part_seconds float, error text, missing_for float,
               opened_by name, login name)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.round_id, r.round_name, r.status, r.window_ms / 1000.0::float, r.opened_at, r.ended_at,
           extract(epoch FROM coalesce(r.ended_at, clock_timestamp()) - r.opened_at)::float,
           r.then_status, r.then_kind, CASE WHEN (SELECT {schema}.has_role('putter', 'worker', 'operator', 'reader')) THEN r.then_body END,
           r.then_attempt, r.then_owner, r.then_started, r.then_ended,
           extract(epoch FROM coalesce(r.then_ended, clock_timestamp()) - r.then_started)::float, r.then_error,
           p.part, p.status, p.is_last, p.attempt, p.member_id, p.owner, p.host, p.pid, p.started_at, p.ended_at,
           extract(epoch FROM coalesce(p.ended_at, clock_timestamp()) - p.started_at)::float, p.error,
           CASE WHEN p.status = 'running' AND l.missing IS NOT FALSE THEN
               extract(epoch FROM clock_timestamp() - coalesce(l.since, p.started_at))::float END,
           r.opened_by, p.login
    FROM (SELECT * FROM {schema}.round AS o
          WHERE (p_name IS NULL OR o.round_name = p_name) AND (p_round IS NULL OR o.round_id = p_round)
          ORDER BY o.round_id DESC LIMIT p_most) AS r
    JOIN {schema}.round_part AS p ON p.round_id = r.round_id
    LEFT JOIN {schema}.look_at_members() AS l ON l.member_id = p.member_id AND p.status = 'running'
    ORDER BY r.round_id DESC, p.part
$$;


-- For sessions --------------------------------------------------------------------------------------------------

-- The names of the parts, from JSON or from a list with commas, as JSON.
CREATE OR REPLACE FUNCTION {schema}.check_parts(p_name text, p_part text, p_parts text) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_parts text[];
    v_part  text;
BEGIN
    PERFORM {schema}.check_name('round', p_name);
    PERFORM {schema}.check_name('part', p_part);
    v_parts := CASE WHEN btrim(p_parts) LIKE '[%'
                    THEN ARRAY(SELECT value FROM jsonb_array_elements_text(p_parts::jsonb))
                    ELSE regexp_split_to_array(btrim(p_parts), '\s*,\s*') END;
    IF coalesce(cardinality(v_parts), 0) = 0 THEN
        RAISE EXCEPTION 'sqlsem: round % has no parts', quote_literal(p_name)
            USING ERRCODE = '22023', HINT = 'Name all of them, with commas in between or as a JSON array.';
    END IF;
    FOREACH v_part IN ARRAY v_parts LOOP
        PERFORM {schema}.check_name('part', v_part);
    END LOOP;
    IF cardinality(v_parts) <> (SELECT count(DISTINCT p) FROM unnest(v_parts) AS p) THEN
        RAISE EXCEPTION 'sqlsem: a part of round % is named twice: %', quote_literal(p_name),
            array_to_string(v_parts, ', ') USING ERRCODE = '22023';
    ELSIF p_part <> ALL (v_parts) THEN
        RAISE EXCEPTION 'sqlsem: round % has no part %; it has %', quote_literal(p_name), quote_literal(p_part),
            array_to_string(v_parts, ', ') USING ERRCODE = '22023';
    END IF;
    RETURN to_jsonb(v_parts)::text;
END
$$;

-- Parts in some states, for messages: "b, c".
CREATE OR REPLACE FUNCTION {schema}.parts_in(p_round bigint, p_states varchar[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT string_agg({schema}.plain(p.part || coalesce(' (' || p.error || ')', '')), ', ' ORDER BY p.part)
    FROM {schema}.round_part AS p WHERE p.round_id = p_round AND p.status = ANY (p_states)
$$;

-- recover_rounds for a session, which is told what that has found out.
CREATE OR REPLACE FUNCTION {schema}.recover_told(p_name text, p_member bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_round bigint;
BEGIN
    FOR v_round IN SELECT r FROM {schema}.recover_rounds(p_name, p_member) AS r LOOP
        RAISE WARNING 'sqlsem: round % of % has failed parts: %', v_round, p_name,
            {schema}.parts_in(v_round, ARRAY['failed']) USING HINT = 'Run these parts again.';
    END LOOP;
END
$$;

-- What sessions call runs with the caller's rights, who can see when this session began; what it needs is done by functions
-- of the same name that begin with session_.
CREATE OR REPLACE FUNCTION {schema}.session_part_start(
    name text, part text, parts text, window_seconds double precision, p_owner text) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_parts  text := {schema}.check_parts(name, part, parts);
    v_member bigint;
    v_start  record;
    v_part   record;
BEGIN
    IF window_seconds IS NULL OR NOT (window_seconds >= 0.001 AND window_seconds <= 315360000) THEN
        RAISE EXCEPTION 'sqlsem: window_seconds must be above 0 and at most ten years, not %', window_seconds
            USING ERRCODE = '22023';
    END IF;
    PERFORM {schema}.guard('round_part_start');
    v_member := {schema}.session_member(NULL);
    PERFORM {schema}.recover_told(name, v_member);
    v_start := {schema}.start_part(v_member, name, part, v_parts, (window_seconds * 1000)::bigint,
                                   p_owner, replace(gen_random_uuid()::text, '-', ''), NULL, NULL);
    IF v_start.code = 'running' THEN
        SELECT p.host, p.pid, p.started_at INTO v_part FROM {schema}.round_part AS p
        WHERE p.round_id = v_start.id AND p.part = session_part_start.part;
        RAISE EXCEPTION 'sqlsem: part % of round % runs already, by %:% since %', part, name, v_part.host, v_part.pid,
            v_part.started_at USING ERRCODE = '55000', HINT = 'Wait until it has ended.';
    ELSIF v_start.code = 'succeeded' THEN
        RAISE EXCEPTION 'sqlsem: part % has succeeded already in round % of %, which waits for %', part, v_start.id,
            name, {schema}.parts_in(v_start.id, ARRAY['expected', 'running', 'failed'])
            USING ERRCODE = '55000', HINT = 'The next round begins when these have ended, or the window is over.';
    ELSIF v_start.code = 'differs' THEN
        RAISE EXCEPTION 'sqlsem: round % of % is open with other parts: %', v_start.id, name,
            (SELECT string_agg(p.part, ', ' ORDER BY p.part) FROM {schema}.round_part AS p
             WHERE p.round_id = v_start.id)
            USING ERRCODE = '22023',
                  HINT = 'All parts must declare the same; new ones hold when it has ended, or its window is over.';
    ELSIF v_start.previous IS NOT NULL THEN
        RAISE WARNING 'sqlsem: round % of % has expired; it lacked %', v_start.previous, name,
            {schema}.parts_in(v_start.previous, ARRAY['expected', 'running', 'failed']);
    END IF;
    RETURN v_start.id;
END
$$;

-- Starts a part for this session: the number of the round. The part has failed when the session ends before the part.
-- On its own: in a transaction it would keep all other parts of the round waiting until that ends.
CREATE OR REPLACE FUNCTION {schema}.round_part_start(name text, part text, parts text, window_seconds double precision)
RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN {schema}.session_part_start(name, part, parts, window_seconds, {schema}.session_id());
END
$$;

CREATE OR REPLACE FUNCTION {schema}.session_part_end(p_name text, p_part text, p_outcome text, p_error text, p_owner text)
RETURNS TABLE (code varchar, id bigint, is_last boolean, round_status varchar, failed text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_member bigint := {schema}.session_member(NULL);
    v_uid    varchar;
BEGIN
    PERFORM {schema}.check_name('round', p_name);
    PERFORM {schema}.check_name('part', p_part);
    PERFORM {schema}.recover_told(p_name, v_member);
    v_uid := (SELECT p.start_uid FROM {schema}.round AS r JOIN {schema}.round_part AS p ON p.round_id = r.round_id
              WHERE r.round_name = p_name AND p.part = p_part AND p.member_id = v_member AND p.status = 'running'
              ORDER BY r.round_id DESC LIMIT 1);
    IF v_uid IS NULL THEN
        RAISE EXCEPTION 'sqlsem: this session does not run part % of round %', quote_literal(p_part),
            quote_literal(p_name) USING ERRCODE = '55000', HINT = 'Call round_part_start before, in the same session.';
    END IF;
    RETURN QUERY SELECT e.code, e.id, e.is_last, e.round_status, {schema}.parts_in(e.id, ARRAY['failed'])
                 FROM {schema}.end_part(v_member, p_name, p_part, v_uid, p_outcome, p_error, p_owner, 'session', NULL) AS e;
END
$$;

-- This session's part has succeeded. With is_last = 1 it was the last, and the session has the continuation to run, and
-- then to call round_continued. outcome: 'succeeded'; 'late', it took longer than the window and does not count;
-- 'failed', it was the last to end, but others have failed. May be part of the caller's transaction.
CREATE OR REPLACE FUNCTION {schema}.round_part_done(name text, part text, OUT is_last integer, OUT outcome text)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_end record;
BEGIN
    SELECT * INTO v_end FROM {schema}.session_part_end(name, part, 'succeeded', NULL, {schema}.session_id());
    is_last := v_end.is_last::integer;
    outcome := CASE WHEN v_end.code = 'succeeded' AND v_end.round_status = 'failed' THEN 'failed' ELSE v_end.code END;
    IF outcome = 'failed' THEN
        RAISE WARNING 'sqlsem: round % of % has failed: %', v_end.id, name, v_end.failed
            USING HINT = 'Run these parts again.';
    ELSIF outcome = 'late' THEN
        RAISE WARNING 'sqlsem: part % of round % has ended after the window and does not count', part, name;
    END IF;
END
$$;

-- This session's part has failed. (is_last is always 0.)
CREATE OR REPLACE FUNCTION {schema}.round_part_failed(
    name text, part text, error text DEFAULT NULL, OUT is_last integer, OUT outcome text)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    SELECT e.is_last::integer, e.code INTO is_last, outcome
    FROM {schema}.session_part_end(name, part, 'failed', error, {schema}.session_id()) AS e;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.session_round_resume(name text, p_owner text) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_member bigint;
BEGIN
    PERFORM {schema}.check_name('round', name);
    v_member := {schema}.session_member(NULL);
    PERFORM {schema}.recover_told(name, v_member);
    RETURN (SELECT (c.id IS NOT NULL)::integer
            FROM {schema}.claim_then(v_member, name, NULL, p_owner,
                                     replace(gen_random_uuid()::text, '-', ''), true) AS c);
END
$$;

-- Takes over a continuation that nobody runs: 1 when this session has one to run now, else 0.
CREATE OR REPLACE FUNCTION {schema}.round_resume(name text) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN {schema}.session_round_resume(name, {schema}.session_id());
END
$$;

-- The continuation that this session has to run (of several: that it was given last) has ended: well, or with an error.
-- The number of the round.
CREATE OR REPLACE FUNCTION {schema}.round_continued(name text, error text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_member bigint;
    v_round  record;
BEGIN
    PERFORM {schema}.check_name('round', name);
    v_member := {schema}.session_member(NULL);
    SELECT r.round_id, r.then_attempt INTO v_round FROM {schema}.round AS r
    WHERE r.round_name = name AND r.then_status = 'running' AND r.then_member = v_member
    ORDER BY r.then_started DESC, r.round_id DESC LIMIT 1;
    IF NOT FOUND OR NOT {schema}.end_then(v_member, v_round.round_id, v_round.then_attempt, error) THEN
        RAISE EXCEPTION 'sqlsem: this session has no continuation of round % to run', quote_literal(name)
            USING ERRCODE = '55000', HINT = 'round_part_done says is_last = 1, or round_resume 1, to the one that has.';
    END IF;
    RETURN v_round.round_id;
END
$$;
