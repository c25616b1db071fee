-- sqlsem, schema version 3, for PostgreSQL: who did what, signs of life, numbers of members that do not run out, and roles
-- for the work queue.
-- FROZEN once released: later changes go into schema-4.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

-- All tables at once, or none: anyone who holds one of them and waits for another would wait for us, and we for them. So
-- nobody is left waiting behind us for longer than a moment, and it is tried again. What is at work now begins with the queue
-- (a release) or with the members (a waiting session, which is hardly ever away from them), and is met at either in turn. (The
-- older routines keep their locks while they wait for a turn. `sqlsem init` has them stand aside: client.sql, stand_aside.)
DO $$
DECLARE
    v_before text := current_setting('lock_timeout');
    v_until  timestamptz := clock_timestamp() + interval '20 seconds';
    v_try    integer := 0;
BEGIN
    LOOP
        v_try := v_try + 1;
        BEGIN
            PERFORM set_config('lock_timeout', '250ms', true);
            IF v_try % 2 = 1 THEN
                LOCK TABLE {schema}.member IN ACCESS EXCLUSIVE MODE;
            ELSE
                LOCK TABLE {schema}.{table} IN ACCESS EXCLUSIVE MODE;
            END IF;
            PERFORM set_config('lock_timeout', '50ms', true);
            LOCK TABLE {schema}.{table}, {schema}.member, {schema}.resource, {schema}.history, {schema}.setting, {schema}.task,
                       {schema}.task_log, {schema}.round, {schema}.round_part IN ACCESS EXCLUSIVE MODE;
            EXIT;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            IF clock_timestamp() >= v_until THEN
                RAISE EXCEPTION 'sqlsem: the tables could not be had for the upgrade within 20 s; nothing was changed'
                    USING ERRCODE = '55P03',
                          HINT = 'Somebody keeps them in an open transaction (a dump, VACUUM FULL?), or they are used too much; try again later.';
            END IF;
            PERFORM pg_sleep(0.05 + random() / 10);
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', v_before, true);
END
$$;

-- The numbers of members: 2^31 would be used up in months where sessions come and go quickly.
ALTER TABLE {schema}.member ALTER COLUMN member_id TYPE bigint;
ALTER TABLE {schema}.{table} ALTER COLUMN member_id TYPE bigint;
ALTER TABLE {schema}.round ALTER COLUMN then_member TYPE bigint;
ALTER TABLE {schema}.round_part ALTER COLUMN member_id TYPE bigint;
-- What may be large is not rewritten, as everybody waits meanwhile. Of a task only who runs it now counts; of what has
-- ended host, pid and login tell who it was.
ALTER TABLE {schema}.task RENAME COLUMN member_id TO member_before;
ALTER TABLE {schema}.task ADD COLUMN member_id bigint;  -- who runs it now
UPDATE {schema}.task SET member_id = member_before WHERE status = 'running';
ALTER TABLE {schema}.task DROP COLUMN member_before;
ALTER TABLE {schema}.task_log DROP COLUMN member_id;
ALTER TABLE {schema}.task_log ADD COLUMN member_id bigint;
ALTER TABLE {schema}.history DROP COLUMN member_id;
ALTER TABLE {schema}.history ADD COLUMN member_id bigint;

-- When the member last proved that it lives: with its beacon missing it is dead as soon as this is older than its grace.
ALTER TABLE {schema}.member ADD COLUMN seen_at timestamptz NOT NULL DEFAULT clock_timestamp();

ALTER TABLE {schema}.{table} ADD COLUMN revoked_by name;  -- the operator's login, while revoked_at is set
ALTER TABLE {schema}.history
    ADD COLUMN concurrency_limit integer,
    ADD COLUMN host     varchar(255),  -- of the owner's member, as are pid, program and login
    ADD COLUMN pid      integer,
    ADD COLUMN program  varchar(255),
    ADD COLUMN login    name,
    ADD COLUMN ended_by name,          -- the login that ended it, where that was not the owner
    ADD COLUMN seen_at  timestamptz;   -- the last sign of life of an owner that died
ALTER TABLE {schema}.task
    ADD COLUMN put_by name,
    ADD COLUMN host   varchar(255),    -- of who runs it, or ran it last, as are pid and login
    ADD COLUMN pid    integer,
    ADD COLUMN login  name;
UPDATE {schema}.task AS t SET host = m.host, pid = coalesce(m.pid, m.backend_pid), login = m.login
FROM {schema}.member AS m WHERE t.status = 'running' AND m.member_id = t.member_id;
ALTER TABLE {schema}.task_log ADD COLUMN login name;
ALTER TABLE {schema}.round ADD COLUMN opened_by name;
ALTER TABLE {schema}.round_part ADD COLUMN login name;
UPDATE {schema}.round_part AS p SET login = m.login
FROM {schema}.member AS m WHERE p.status = 'running' AND m.member_id = p.member_id;

-- Routines that have other parameters or columns now, or are gone: routines.sql and what follows makes new ones. (A call that
-- gives integers finds them as before.) Not dropped yet: some are being run, and wait for this transaction. routines.sql
-- does it when it is run the next time.
DO $$
DECLARE
    v_routine record;
BEGIN
    FOR v_routine IN
        SELECT p.oid::regprocedure::text AS signature, p.proname AS name FROM pg_proc AS p
        WHERE p.pronamespace = '{schema}'::regnamespace AND p.proname NOT LIKE '%\_before'
          AND (p.proname IN ('past', 'entries', 'status', 'list_tasks', 'task_attempts', 'list_rounds', 'session_member',
                             'beacon_holder', 'beacons_held', 'end_session_part')
               OR EXISTS (SELECT FROM unnest(p.proargnames, coalesce(p.proallargtypes, p.proargtypes::oid[])) AS a (name, type)
                          WHERE a.name IN ('p_member', 'p_mine', 'member', 'member_id') AND a.type = 'integer'::regtype))
    LOOP
        EXECUTE format('ALTER ROUTINE %s RENAME TO %I', v_routine.signature, v_routine.name || '_before');
    END LOOP;
    -- What stand_aside has made is of this transaction, too, by that.
    FOR v_routine IN
        SELECT p.oid::regprocedure::text AS signature FROM pg_proc AS p
        WHERE p.pronamespace = '{schema}'::regnamespace AND p.proname IN ('wait_before', 'upgrade_before')
    LOOP
        EXECUTE format('ALTER ROUTINE %s PARALLEL UNSAFE', v_routine.signature);
    END LOOP;
END
$$;

-- Roles: who took locks could run tasks, and who operated could put them. They still may; take back what is not wanted.
-- (Not in a new installation: version 2 was never there.)
DO $$
DECLARE
    v_pair text[];
    v_name text;
BEGIN
    IF (SELECT xmin = pg_current_xact_id()::xid FROM pg_class WHERE oid = '{schema}.setting'::regclass) THEN
        RETURN;
    END IF;
    FOREACH v_pair SLICE 1 IN ARRAY ARRAY[['{schema}_user', '{schema}_worker'], ['{schema}_operator', '{schema}_putter']] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_pair[2]) THEN
            IF NOT (SELECT rolcreaterole OR rolsuper FROM pg_roles WHERE rolname = current_user) THEN
                RAISE NOTICE 'sqlsem: role % does not exist and % may not create it', v_pair[2], current_user;
                CONTINUE;
            END IF;
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', v_pair[2]);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;  -- another database's installer was faster
            END;
        END IF;
        FOR v_name IN
            SELECT m.rolname FROM pg_auth_members AS a
            JOIN pg_roles AS g ON g.oid = a.roleid JOIN pg_roles AS m ON m.oid = a.member
            WHERE g.rolname = v_pair[1]
        LOOP
            BEGIN
                EXECUTE format('GRANT %I TO %I', v_pair[2], v_name);
            EXCEPTION WHEN insufficient_privilege THEN
                RAISE NOTICE 'sqlsem: % may not do this; an administrator: GRANT % TO %', current_user,
                    quote_ident(v_pair[2]), quote_ident(v_name);
            WHEN undefined_object OR internal_error THEN
                -- Logins are the whole server's, and may be dropped meanwhile. ("cache lookup failed" in the middle of it.)
                IF EXISTS (SELECT FROM pg_roles WHERE rolname = v_name) THEN
                    RAISE;
                END IF;
            END;
        END LOOP;
    END LOOP;
END
$$;

UPDATE {schema}.setting SET value = '3' WHERE name = 'oldest_client';
