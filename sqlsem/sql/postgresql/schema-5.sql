-- sqlsem, schema version 5, for PostgreSQL: who operated, and what the work queue needs for limits in time, schedules and tasks
-- that are there once. Programs of versions 3 and 4 go on with these tables.
-- FROZEN once released: later changes go into schema-6.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

-- The tables that get other columns, at once or not at all: as in schema-3.sql. (Nothing is rewritten.)
DO $$
DECLARE
    v_before text := current_setting('lock_timeout');
    v_until  timestamptz := clock_timestamp() + interval '20 seconds';
BEGIN
    LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '250ms', true);
            LOCK TABLE {schema}.resource IN ACCESS EXCLUSIVE MODE;
            PERFORM set_config('lock_timeout', '50ms', true);
            LOCK TABLE {schema}.task IN ACCESS EXCLUSIVE MODE;
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

-- What operators did: one row each, written in the transaction that did it.
CREATE TABLE {schema}.operation (
    operation_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    done_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    login          name NOT NULL DEFAULT session_user,
    host           varchar(255),          -- where it was done, as far as the server knows; as are pid and program
    pid            integer,
    program        varchar(255),
    action         varchar(16) NOT NULL,  -- pause, resume, cap, stale_after, revoke, reap; retry, cancel, …
    resource_id    varchar(255) COLLATE "C",  -- what it was done to: a resource, and a row of its queue;
    queue_position bigint,
    queue_name     varchar(255) COLLATE "C",  -- or a work queue, and a task of it
    task_id        bigint,
    old_value      varchar(1000),
    new_value      varchar(1000)
);
CREATE INDEX ON {schema}.operation (done_at);
COMMENT ON TABLE {schema}.operation IS 'sqlsem: what operators did (pause, cap, revoke, retry, …), kept as long as the history';

ALTER TABLE {schema}.resource
    ADD COLUMN paused_by name,  -- the operator's login, while paused_at is set
    ADD COLUMN cap_by    name;  -- and of who set the cap, while there is one

-- Of the work queue -------------------------------------------------------------------------------------------------

ALTER TABLE {schema}.task
    ADD COLUMN time_limit_ms   bigint CHECK (time_limit_ms > 0),  -- an attempt that runs for longer is ended, and has failed
    ADD COLUMN cancel_asked_at timestamptz,   -- its worker ends it, and then it is cancelled
    ADD COLUMN cancel_asked_by name,
    ADD COLUMN unique_key      varchar(255) COLLATE "C";  -- of the open tasks of a queue one has it
CREATE UNIQUE INDEX task_unique ON {schema}.task (queue_name, unique_key) WHERE is_open AND unique_key IS NOT NULL;

-- They have other parameters now, and tasks.sql makes new ones. Not dropped yet: see schema-3.sql.
DO $$
DECLARE
    v_routine record;
BEGIN
    FOR v_routine IN
        SELECT p.oid::regprocedure::text AS signature, p.proname AS name FROM pg_proc AS p
        WHERE p.pronamespace = '{schema}'::regnamespace AND p.proname IN ('put', 'status_after')
    LOOP
        EXECUTE format('ALTER ROUTINE %s RENAME TO %I', v_routine.signature, v_routine.name || '_before');
    END LOOP;
END
$$;

-- Tasks that are put again and again, at the times of a cron expression: by any process that watches, and by one of them.
CREATE TABLE {schema}.schedule (
    schedule_name varchar(255) COLLATE "C" PRIMARY KEY,
    queue_name    varchar(255) COLLATE "C" NOT NULL,
    cron          varchar(255) NOT NULL,
    time_zone     varchar(64) NOT NULL DEFAULT 'UTC',  -- a name of the IANA database
    kind          varchar(8) NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body          text NOT NULL,
    options       jsonb NOT NULL DEFAULT '{}',  -- of each task: order, note, max_attempts, …
    last_due      timestamptz,                  -- the latest time for which a task was put
    put_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    put_by        name NOT NULL DEFAULT session_user,
    paused_at     timestamptz,
    paused_by     name
);
COMMENT ON TABLE {schema}.schedule IS 'sqlsem: tasks that are put at the times of a cron expression';
