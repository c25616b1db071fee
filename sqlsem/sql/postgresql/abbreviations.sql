-- sqlsem, abbreviations in the scripts for PostgreSQL: {sql} in a script stands for the lines under its name here, the
-- properties of a routine. (`sqlsem sql` prints these lines.)
--
-- All of them pin search_path, so that no other login can replace an object that the routine names. A routine that
-- commits, or that the planner should inline, must not pin it, and has no abbreviation.
-- sql, plpgsql: runs with the rights of its caller. …_definer: with the rights of the schema's owner, for all callers
-- that a role allows to run it. …_stable, …_immutable: writes nothing; the other ones are VOLATILE.
-- …_indexed: reads by indexes, whatever the statistics of the tables say. …_generic: does so, too, and keeps one plan
-- for all values of its parameters. Neither compiles a plan (jit): before version 18 a scan that cannot be avoided counts
-- as so expensive there that compiling, which takes seconds, seems to pay.
-- lock_timeout: not a property, but a statement: bounds the waits for locks in this transaction, unless the session
-- does so. {x}: the time.

-- name: plpgsql
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
-- name: plpgsql_stable
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
-- name: plpgsql_immutable
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
-- name: plpgsql_indexed
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
-- name: plpgsql_indexed_definer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
-- name: plpgsql_generic_definer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
-- name: sql
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
-- name: sql_indexed
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
-- name: sql_indexed_definer
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
-- name: sql_stable
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
-- name: sql_immutable
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
-- name: sql_definer
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
-- name: sql_stable_indexed_definer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
-- name: sql_stable_definer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
-- name: lock_timeout
IF current_setting('lock_timeout') = '0' THEN
    PERFORM set_config('lock_timeout', '{x}', true);
END IF;
