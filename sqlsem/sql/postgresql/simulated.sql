-- sqlsem, a PostgreSQL database for simulations (sqlsem.testing.postgres). Never run any of this in a database that is
-- in use.
--
-- In that database, functions of the same names replace the system's clock, its sleep, and the advisory locks that
-- wait. They are installed before the tables and routines of sqlsem, which are unchanged, and run in the simulation's
-- time. Locks are still the server's. A session that has to wait for a lock reports that beforehand, and stops when it
-- has the lock. A session that sleeps reports for how long, and stops. The simulation receives the reports (INFO). It
-- resumes a session by cancelling the statement that has stopped: the functions here catch the cancel. A cancel during
-- a wait for a lock means that lock_timeout is over.

-- name: prepare
CREATE SCHEMA simulated;
-- The time in microseconds since 1970. Each call is one later, so that no two events have the same time.
CREATE SEQUENCE simulated.clock MINVALUE 0;
ALTER FUNCTION pg_catalog.clock_timestamp() RENAME TO clock_timestamp_of_the_host;
CREATE FUNCTION pg_catalog.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
AS $$ SELECT '1970-01-01 00:00:00+00'::timestamptz + nextval('simulated.clock'::regclass) * interval '1 microsecond' $$;

ALTER FUNCTION pg_catalog.pg_sleep(double precision) RENAME TO pg_sleep_of_the_host;
CREATE FUNCTION pg_catalog.pg_sleep(p_seconds double precision) RETURNS void LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    RAISE INFO 'simulated: stops %', greatest(p_seconds, 0);
    PERFORM pg_catalog.pg_sleep_of_the_host(3600);
EXCEPTION WHEN query_canceled THEN
    NULL;
END
$$;

DO $all$
DECLARE
    v_name text;
BEGIN
    FOREACH v_name IN ARRAY ARRAY['advisory_xact_lock', 'advisory_xact_lock_shared', 'advisory_lock_shared'] LOOP
        EXECUTE format('ALTER FUNCTION pg_catalog.pg_%1$s(integer, integer) RENAME TO real_%1$s', v_name);
        EXECUTE format($one$
CREATE FUNCTION pg_catalog.pg_%1$s(p_class integer, p_key integer) RETURNS void LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_limit text := current_setting('lock_timeout');
BEGIN
    IF pg_catalog.pg_try_%1$s(p_class, p_key) THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM set_config('lock_timeout', '0', true);
        RAISE INFO 'simulated: waits %%', v_limit;
        PERFORM pg_catalog.real_%1$s(p_class, p_key);
        PERFORM set_config('lock_timeout', v_limit, true);
    EXCEPTION WHEN query_canceled THEN
        RAISE EXCEPTION 'canceling statement due to lock timeout' USING ERRCODE = '55P03';
    END;
    PERFORM pg_catalog.pg_sleep(0);
END
$$
$one$, v_name);
    END LOOP;
END
$all$;

-- name: begin
-- Empty the tables for the next schedule. (Mostly by DELETE, as TRUNCATE creates new files, which takes long.)
DO $$
DECLARE
    v_table record;
    v_anew  boolean := random() < 0.03;
BEGIN
    PERFORM set_config('session_replication_role', 'replica', true);  -- without triggers, so in any order
    FOR v_table IN
        SELECT c.oid::regclass::text AS name, pg_get_serial_sequence(c.oid::regclass::text, a.attname) AS sequence
        FROM pg_class AS c LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attidentity <> ''
        WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r' AND c.relname <> 'setting'
    LOOP
        EXECUTE CASE WHEN v_anew THEN 'TRUNCATE ' || v_table.name || ' CASCADE' ELSE 'DELETE FROM ' || v_table.name END;
        PERFORM setval(v_table.sequence::regclass, 1, false) WHERE v_table.sequence IS NOT NULL;
    END LOOP;
END
$$

-- name: set_clock
SELECT setval('simulated.clock', greatest(%s, CASE WHEN %s THEN last_value ELSE 0 END)) FROM simulated.clock

-- name: lots
SELECT setseed(%s)

-- name: cancel_blocked
SELECT pg_cancel_backend(%s)

-- name: blocked
SELECT p FROM unnest(%s::integer[]) AS p WHERE pg_blocking_pids(p) <> '{}'

-- name: terminate
SELECT pg_terminate_backend(%s)

-- name: lives
SELECT count(*) FROM pg_stat_get_activity(%s)

-- name: rows
SELECT q.resource_id, q.queue_position, m.host, q.requesting_id, q.granted_at IS NOT NULL, q.revoked_at IS NOT NULL
FROM {schema}.{table} AS q LEFT JOIN {schema}.member AS m ON m.member_id = q.member_id ORDER BY q.resource_id, q.queue_position
