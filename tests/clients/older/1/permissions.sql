-- sqlsem, roles for PostgreSQL. May be run again. Grant one of them to a login: GRANT {schema}_user TO etl;
--   {schema}_user      takes and gives back locks: the public routines, and no right to any table
--   {schema}_operator  also caps, pauses, revokes and reaps
--   {schema}_reader    looks: the queue, the history, the settings
-- Roles belong to the whole server. Where this login may not create them, an administrator runs this script.

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

DO $$
DECLARE
    v_role text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY['{schema}_user', '{schema}_operator', '{schema}_reader'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
            IF NOT (SELECT rolcreaterole OR rolsuper FROM pg_roles WHERE rolname = current_user) THEN
                RAISE NOTICE 'sqlsem: role % does not exist and % may not create it', v_role, current_user;
                CONTINUE;
            END IF;
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;  -- another database's installer was faster
            END;
        END IF;
    END LOOP;
END
$$;

REVOKE ALL ON ALL ROUTINES IN SCHEMA {schema} FROM PUBLIC;

DO $$
DECLARE
    v_function record;
    v_role     text;
BEGIN
    FOR v_function IN
        SELECT p.oid::regprocedure AS signature, p.proname AS name
        FROM pg_proc AS p WHERE p.pronamespace = '{schema}'::regnamespace
    LOOP
        FOREACH v_role IN ARRAY CASE
            WHEN v_function.name IN ('enrol', 'resume_member', 'ping', 'resign', 'register', 'register_all', 'wait',
                                     'release', 'cancel', 'pin', 'acquire', 'try', 'renew', 'assert_holding')
                -- What acquire and its like need, as they run with the caller's rights. None gives more than they do.
                OR v_function.name IN ('guard', 'look_around', 'refused_commit', 'stand_alone', 'check_name', 'check_request',
                                       'check_lease', 'session_id', 'session_member', 'attend', 'waits_for_itself',
                                       'free_waits', 'time_left', 'ended_how', 'release_rows', 'renew_row')
                THEN ARRAY['{schema}_user', '{schema}_operator']
            WHEN v_function.name IN ('settings', 'entries', 'status', 'past', 'resources')
                THEN ARRAY['{schema}_user', '{schema}_operator', '{schema}_reader']
            WHEN v_function.name = 'prune' THEN ARRAY['{schema}_user', '{schema}_operator']
            WHEN v_function.name IN ('set_resource', 'set_limit', 'pause', 'resume', 'revoke', 'reap') THEN ARRAY['{schema}_operator']
            ELSE ARRAY[]::text[] END
        LOOP
            IF EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
                EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO %I', v_function.signature, v_role);
            END IF;
        END LOOP;
    END LOOP;
    FOREACH v_role IN ARRAY ARRAY['{schema}_user', '{schema}_operator', '{schema}_reader'] LOOP
        IF EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
            EXECUTE format('GRANT USAGE ON SCHEMA {schema} TO %I', v_role);
            IF v_role <> '{schema}_user' THEN
                EXECUTE format('GRANT SELECT ON {schema}.{table}, {schema}.member, {schema}.resource, {schema}.history, {schema}.setting TO %I', v_role);
            END IF;
        END IF;
    END LOOP;
END
$$;
