-- sqlsem, runs once per period, for PostgreSQL. May be run again at any time, after public.sql.
--
-- A run holds the mutex 'once:<name>'. It belongs to the period in which it was granted (granted_at), by the server's
-- clock. A period is done when a run that was granted in it, or later, is done. So only times are stored: no run is
-- repeated if the clock goes back, and callers may ask with another length of period. Periods are multiples of a length
-- since 1970 in UTC, moved by an offset.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

-- Return a time in milliseconds since 1970, rounded down: times and periods are compared as whole numbers.
CREATE OR REPLACE FUNCTION {schema}.epoch_ms(p_at timestamptz) RETURNS bigint
{sql_immutable} SELECT floor(extract(epoch FROM p_at) * 1000)::bigint $$;

-- Return true if no run is done for a period: that in which the row at p_position was granted, or without p_position
-- the present one. NULL: there is no such row.
CREATE OR REPLACE FUNCTION {schema}.once_due(
    p_name varchar, p_position bigint, p_requesting_id varchar, p_per_ms bigint, p_offset_ms bigint) RETURNS boolean
{plpgsql_indexed_definer}
DECLARE
    v_at bigint := {schema}.epoch_ms(clock_timestamp());
BEGIN
    IF p_position IS NOT NULL THEN
        SELECT {schema}.epoch_ms(granted_at) INTO v_at FROM {schema}.{table}
        WHERE resource_id = 'once:' || p_name AND queue_position = p_position AND requesting_id = p_requesting_id;
        IF v_at IS NULL THEN
            RETURN NULL;
        END IF;
    END IF;
    RETURN NOT EXISTS (
        SELECT FROM {schema}.once_run
        WHERE once_name = p_name
          AND {schema}.epoch_ms(granted_at) >= (v_at - p_offset_ms) / p_per_ms * p_per_ms + p_offset_ms);
END
$$;

-- Record a run as done, for the period in which its row was granted. Return 0, or -1 if the row is not held. May be
-- repeated.
CREATE OR REPLACE FUNCTION {schema}.mark_once(p_name varchar, p_position bigint, p_requesting_id varchar) RETURNS integer
{plpgsql_indexed_definer}
BEGIN
    -- Pin the row: no other run begins before this one is recorded.
    IF NOT {schema}.pin('once:' || p_name, p_position, p_requesting_id) THEN
        RETURN -1;
    END IF;
    INSERT INTO {schema}.once_run AS o (once_name, granted_at, done_at, queue_position, requesting_id, login)
    SELECT p_name, t.granted_at, clock_timestamp(), t.queue_position, t.requesting_id, session_user
    FROM {schema}.{table} AS t WHERE t.resource_id = 'once:' || p_name AND t.queue_position = p_position
    ON CONFLICT (once_name) DO UPDATE
    SET granted_at = greatest(o.granted_at, excluded.granted_at), done_at = excluded.done_at,
        queue_position = excluded.queue_position, requesting_id = excluded.requesting_id, login = excluded.login;
    RETURN 0;
END
$$;

-- Return the last run of a name, or of each name, with its times and its login; and the server's time.
CREATE OR REPLACE FUNCTION {schema}.once_runs(p_name varchar)
RETURNS TABLE (once_name varchar, granted_at timestamptz, done_at timestamptz, queue_position bigint, requesting_id varchar, login name,
               taken_at timestamptz) {sql_indexed_definer}
    SELECT once_name, granted_at, done_at, queue_position, requesting_id, login, clock_timestamp()
    FROM (SELECT r.* FROM {schema}.once_run AS r WHERE p_name IS NULL
          UNION ALL
          SELECT r.* FROM {schema}.once_run AS r WHERE r.once_name = p_name) AS o
    ORDER BY once_name
$$;

-- Delete the record of the last run, so that the name may run again in this period. Allowed to the login of the last
-- run, and to operators. Return 0, or -1 if there was none.
CREATE OR REPLACE FUNCTION {schema}.once_forget(name text) RETURNS integer {plpgsql_indexed_definer}
DECLARE
    v_run {schema}.once_run;
BEGIN
    PERFORM {schema}.check_name('name', name);
    SELECT * INTO v_run FROM {schema}.once_run AS o WHERE o.once_name = name FOR UPDATE;
    IF NOT FOUND THEN
        RETURN -1;
    ELSIF v_run.login IS DISTINCT FROM session_user AND NOT {schema}.has_role('operator') THEN
        RAISE EXCEPTION 'sqlsem: % was run by login %; only that login and operators forget its run, not %', quote_literal(name),
            v_run.login, session_user USING ERRCODE = '42501';
    END IF;
    DELETE FROM {schema}.once_run AS o WHERE o.once_name = name;
    PERFORM {schema}.note_operation('forget', 'once:' || name, NULL, NULL, NULL, v_run.done_at::text, NULL);
    RETURN 0;
END
$$;


-- For sessions -----------------------------------------------------------------------------------------------------

-- Raise for an invalid period; return it in ms.
CREATE OR REPLACE FUNCTION {schema}.check_period(
    p_name text, p_per double precision, p_offset double precision, OUT per_ms bigint, OUT offset_ms bigint)
{plpgsql_immutable}
BEGIN
    PERFORM {schema}.check_name('name', p_name);
    IF char_length(p_name) > 250 THEN
        RAISE EXCEPTION 'sqlsem: name has % characters, at most 250 fit', char_length(p_name) USING ERRCODE = '22023';
    ELSIF p_per IS NULL OR NOT (p_per >= 1 AND p_per <= 31622400) THEN  -- (false for NaN)
        RAISE EXCEPTION 'sqlsem: per_seconds of % must be from 1 to 31622400 (366 days), not %', quote_literal(p_name),
            coalesce(p_per::text, 'NULL') USING ERRCODE = '22023';
    ELSIF p_offset IS NULL OR NOT (p_offset >= 0 AND p_offset < p_per) THEN
        RAISE EXCEPTION 'sqlsem: offset_seconds of % must be from 0 to less than per_seconds, %, not %', quote_literal(p_name),
            p_per, coalesce(p_offset::text, 'NULL') USING ERRCODE = '22023';
    END IF;
    per_ms := round(p_per * 1000);
    offset_ms := least(round(p_offset * 1000), per_ms - 1);
END
$$;

-- Begin a run that is due once per period; wait up to timeout_ms for a run that is under way, as it may fail. code:
--   0, 1 this session has to run it, and then to call once_finish; or, if it failed, release('once:…', queue_position)
--   2 the run of this period is done
--   -1, -2, -3 as of acquire
CREATE OR REPLACE PROCEDURE {schema}.once_begin(
    name text, per_seconds double precision, offset_seconds double precision DEFAULT 0, timeout_ms integer DEFAULT -1,
    note text DEFAULT NULL, requesting_id text DEFAULT NULL, lease_seconds double precision DEFAULT NULL,
    INOUT code integer DEFAULT NULL, INOUT queue_position bigint DEFAULT NULL, INOUT fence bigint DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    v_per    bigint;
    v_offset bigint;
    v_id     pg_catalog.text;
    v_due    boolean;
    v_stack  pg_catalog.text;
BEGIN
    code := NULL;
    queue_position := NULL;
    fence := NULL;
    CALL {schema}.require_autocommit('once_begin');
    GET DIAGNOSTICS v_stack = PG_CONTEXT;
    SELECT p.per_ms, p.offset_ms INTO v_per, v_offset FROM {schema}.check_period(name, per_seconds, offset_seconds) AS p;
    v_id := coalesce(requesting_id, {schema}.session_id());
    IF NOT {schema}.once_due(name, NULL, NULL, v_per, v_offset) THEN
        code := 2;
        RETURN;
    END IF;
    -- (The grant is not committed before the following steps, so a cancel leaves no granted row.)
    CALL {schema}.acquire_row(pg_catalog.concat('once:'::pg_catalog.text, name), 1, 'write', 1, timeout_ms, note, v_id, lease_seconds, true,
                              code, queue_position, fence);
    IF code OPERATOR(pg_catalog.<) 0 THEN
        RETURN;
    END IF;
    v_due := {schema}.once_due(name, queue_position, v_id, v_per, v_offset);
    IF v_due IS NOT TRUE THEN
        PERFORM {schema}.release(pg_catalog.concat('once:'::pg_catalog.text, name), queue_position, v_id);
        code := CASE WHEN v_due IS NULL THEN -2 ELSE 2 END;
        queue_position := NULL;
        fence := NULL;
    END IF;
    IF NOT {schema}.is_outermost(v_stack) THEN
        COMMIT;  -- do not keep the gate until the caller's transaction commits
    END IF;
END
$$;

-- Record that the run has succeeded, so that the period is done, and release the lock. Return 0; or -1 if the lock was
-- lost, and nothing is recorded.
CREATE OR REPLACE FUNCTION {schema}.once_finish(name text, queue_position bigint, requesting_id text DEFAULT NULL) RETURNS integer
{plpgsql}
DECLARE
    v_id text := coalesce(requesting_id, {schema}.session_id());
BEGIN
    PERFORM {schema}.check_name('name', name);
    IF {schema}.mark_once(name, queue_position, v_id) <> 0 THEN
        RETURN -1;
    END IF;
    RETURN {schema}.release_rows('once:' || name, queue_position, v_id);
END
$$;
