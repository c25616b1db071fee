-- sqlsem, schema version 6, for PostgreSQL: limits that the server owns, rates, locks that travel, guarded tables, tasks with
-- locks and keys. Programs of versions 3 to 5 go on with these tables.
-- FROZEN once released: later changes go into schema-7.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).

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
            LOCK TABLE {schema}.{table} IN ACCESS EXCLUSIVE MODE;
            PERFORM set_config('lock_timeout', '50ms', true);
            LOCK TABLE {schema}.member IN ACCESS EXCLUSIVE MODE;
            LOCK TABLE {schema}.resource IN ACCESS EXCLUSIVE MODE;
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

-- Limits that the server owns ---------------------------------------------------------------------------------------

-- The limit of every resource whose name begins so and that has none of its own; of several the longest counts. ('tenant:' is
-- shown, and set, as 'tenant:*'; '' is '*'.)
CREATE TABLE {schema}.limit_pattern (
    prefix varchar(254) COLLATE "C" PRIMARY KEY,
    cap    integer NOT NULL CHECK (cap >= 1),
    cap_by name NOT NULL DEFAULT session_user,  -- an operator's login
    set_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE {schema}.limit_pattern IS 'sqlsem: limits for all resources whose names begin so';

-- Priorities --------------------------------------------------------------------------------------------------------

-- What one step of priority is worth, in milliseconds of waiting; NULL: requests of the resource have no priorities.
ALTER TABLE {schema}.resource ADD COLUMN ageing_ms integer CHECK (ageing_ms >= 1);

-- Rates and periods -------------------------------------------------------------------------------------------------

-- What is known of a rate, for each window that anybody has declared for it. Times are of the database's clock, since 1970.
CREATE TABLE {schema}.rate_window (
    resource_id varchar(255) COLLATE "C" NOT NULL,  -- 'rate:' and the rate's name
    window_ms   bigint NOT NULL CHECK (window_ms >= 1),
    rate_limit  bigint NOT NULL CHECK (rate_limit >= 1),  -- in so long, as it was declared last
    seen_ms     bigint NOT NULL,                          -- when it was last taken from
    full_us     bigint,                                   -- with a burst: when all of that may be had again
    promised_ms bigint,                                   -- the last moment for which something has been promised
    -- Since the window is known; only ever more. (In the row that is written anyhow, so that counting costs nothing.)
    taken       bigint NOT NULL DEFAULT 0,
    returned    bigint NOT NULL DEFAULT 0,                -- of that, as it was less in the end
    waits       bigint NOT NULL DEFAULT 0,                -- how often it was not there at once
    PRIMARY KEY (resource_id, window_ms)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
COMMENT ON TABLE {schema}.rate_window IS 'sqlsem: rates, and the windows that they have';

-- What was used of a rate, in a hundredth part of a window. It counts until all of that part is out of the window.
CREATE TABLE {schema}.rate_slot (
    resource_id varchar(255) COLLATE "C" NOT NULL,
    window_ms   bigint NOT NULL,
    slot        bigint NOT NULL,  -- since 1970
    used        bigint NOT NULL CHECK (used >= 0),
    PRIMARY KEY (resource_id, window_ms, slot)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
COMMENT ON TABLE {schema}.rate_slot IS 'sqlsem: what was used of each rate';

-- What runs once per period: when it was done last. One row a name (once.sql).
CREATE TABLE {schema}.once_run (
    once_name      varchar(250) COLLATE "C" PRIMARY KEY,
    granted_at     timestamptz NOT NULL,  -- when the turn of that run came, which tells the period; it never goes back
    done_at        timestamptz NOT NULL,
    queue_position bigint NOT NULL,       -- of that run: its fence
    requesting_id  varchar(255) COLLATE "C" NOT NULL,
    login          name NOT NULL
);
COMMENT ON TABLE {schema}.once_run IS 'sqlsem: what runs once per period, and when it was done last';

-- Locks that go with a transaction ------------------------------------------------------------------------------------

-- What transactions leave in which a lock was to go: there when they have been committed. Nobody else knows the words.
CREATE TABLE {schema}.departure (
    word    varchar(64) COLLATE "C" PRIMARY KEY,
    left_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE {schema}.departure IS 'sqlsem: transactions that have given a lock back, until its owner has seen it';

-- Locks that travel -------------------------------------------------------------------------------------------------
-- From hand_over to adopt the rows belong to a member of their own, in transit, which lives by a lease of ttl_ms: member_id. The
-- token itself is nowhere. What is over is kept for a day, to say why a token cannot be adopted.
CREATE TABLE {schema}.handover (
    token_hash     varchar(64) COLLATE "C" PRIMARY KEY,  -- SHA-256, in hexadecimal digits
    member_id      bigint NOT NULL,
    row_count      integer NOT NULL,                     -- how many rows it has
    resource_id    varchar(255) COLLATE "C" NOT NULL,    -- the first of them, for messages
    queue_position bigint NOT NULL,
    given_by       name NOT NULL,                        -- the giver's login
    given_to       name NOT NULL,                        -- who may adopt it, beside the giver
    given_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ttl_ms         integer NOT NULL CHECK (ttl_ms > 0),
    adopted_at     timestamptz,
    adopted_by     bigint,                               -- the member that did
    adopted_uid    varchar(64),                          -- made by the client: a repeated call finds what it did
    adopter        varchar(600)                          -- host:pid and program, for messages
);
CREATE INDEX handover_given ON {schema}.handover (given_at);
COMMENT ON TABLE {schema}.handover IS 'sqlsem: locks handed over, and what became of them; kept for a day';

-- Guarded tables ----------------------------------------------------------------------------------------------------

-- What pin seals its notes with (guards.sql). Nobody but the owner reads it.
CREATE TABLE IF NOT EXISTS {schema}.guard_key (secret text NOT NULL);
INSERT INTO {schema}.guard_key (secret)
SELECT concat(gen_random_uuid(), gen_random_uuid()) WHERE NOT EXISTS (SELECT FROM {schema}.guard_key);

-- Tasks with locks and keys -----------------------------------------------------------------------------------------

ALTER TABLE {schema}.task
    -- Whose task it is: workers share themselves out between the keys of a queue. '': nobody's, in a queue that has keys, limits
    -- or priorities; NULL: put as in any other queue.
    ADD COLUMN task_key      varchar(255) COLLATE "C",
    ADD COLUMN task_priority integer NOT NULL DEFAULT 0,  -- among the tasks of its key; higher ones first
    ADD COLUMN task_turn     varchar(263) COLLATE "C",    -- the key behind eight digits of its hash (turn_of): in no order that anyone chose
    ADD COLUMN signalled_attempt integer,                 -- the attempt that its session was told to end, as it is told once
    -- Of a task with locks (parked.sql): it is ready at the end of time, so that only those claim it who know of locks.
    ADD COLUMN lock_count    integer,                     -- how many; NULL: none
    ADD COLUMN locks_left    integer,                     -- how many wait for their turn; NULL: it stands in no line
    ADD COLUMN asks_at       timestamptz,                 -- when it may stand in the lines
    ADD CONSTRAINT task_turn_of_key CHECK ((task_key IS NULL) = (task_turn IS NULL));
CREATE INDEX task_parked ON {schema}.task (queue_name, task_order, locks_left, task_priority DESC, task_id)
    WHERE is_open AND status = 'pending' AND lock_count IS NOT NULL;
CREATE INDEX task_fair ON {schema}.task (queue_name, task_order, task_turn, task_priority DESC, task_id)
    WHERE status = 'pending' AND task_turn IS NOT NULL AND lock_count IS NULL;  -- (not is_open: or the planner may take task_open for it)
CREATE INDEX task_by_priority ON {schema}.task (queue_name, task_order, task_priority DESC, task_id) WHERE is_open AND task_priority <> 0;
-- (With the column that is NULL: so the planner does not take task_open for it, where it would walk past all that has a key.)
CREATE INDEX task_plain ON {schema}.task (queue_name, task_order, task_key, task_id)
    WHERE is_open AND status = 'pending' AND task_key IS NULL AND lock_count IS NULL;
-- Those alone that were put for later, or wait for their next attempt: the others cost nothing here.
CREATE INDEX task_later ON {schema}.task (queue_name, task_order, ready_at)
    WHERE status = 'pending' AND lock_count IS NULL AND ready_at > put_at;

-- How many tasks of a queue may run at a time. There is a row where anything is set, of the queue or of a key.
CREATE TABLE {schema}.queue_setting (
    queue_name varchar(255) COLLATE "C" PRIMARY KEY,
    task_limit integer CHECK (task_limit >= 0),  -- of all
    key_limit  integer CHECK (key_limit >= 0),   -- of each key
    -- How many may be started in so many milliseconds: of all, and of each key.
    task_rate  integer CHECK (task_rate >= 1),
    task_ms    integer CHECK (task_ms >= 1),
    key_rate   integer CHECK (key_rate >= 1),
    key_ms     integer CHECK (key_ms >= 1),
    set_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    set_by     name NOT NULL DEFAULT session_user,
    CHECK ((task_rate IS NULL) = (task_ms IS NULL) AND (key_rate IS NULL) = (key_ms IS NULL))
);
COMMENT ON TABLE {schema}.queue_setting IS 'sqlsem: how many tasks of a work queue may run at a time, and be started in so long';

CREATE TABLE {schema}.queue_key (
    queue_name varchar(255) COLLATE "C" NOT NULL,
    task_key   varchar(255) COLLATE "C" NOT NULL,
    task_limit integer CHECK (task_limit >= 0),  -- of this key, instead of key_limit
    weight     integer CHECK (weight >= 1),      -- its share of the workers; NULL: 1
    task_rate  integer CHECK (task_rate >= 1),   -- of this key, instead of key_rate
    task_ms    integer CHECK (task_ms >= 1),
    set_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    set_by     name NOT NULL DEFAULT session_user,
    PRIMARY KEY (queue_name, task_key),
    CHECK ((task_rate IS NULL) = (task_ms IS NULL))
);
-- Those that claims look at wherever they begin.
CREATE INDEX queue_key_heavy ON {schema}.queue_key (queue_name, weight DESC) WHERE weight > 1;
COMMENT ON TABLE {schema}.queue_key IS 'sqlsem: limits, rates and weights of single keys of a work queue';

-- Whose rate was found used up by a claim: not looked at again until then. (What was used stands in rate_slot.)
CREATE TABLE {schema}.queue_wait (
    queue_name varchar(255) COLLATE "C" NOT NULL,
    task_key   varchar(255) COLLATE "C" NOT NULL,  -- '': the queue itself
    since_ms   bigint NOT NULL,                    -- by the server's clock, since 1970
    free_ms    bigint NOT NULL,
    PRIMARY KEY (queue_name, task_key)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
COMMENT ON TABLE {schema}.queue_wait IS 'sqlsem: work queues, and keys of them, whose rate is used up until then';

-- What the tasks ask for that are put with locks.
CREATE TABLE {schema}.task_lock (
    task_id           bigint NOT NULL REFERENCES {schema}.task ON DELETE CASCADE,
    number            integer NOT NULL,
    queue_name        varchar(255) COLLATE "C" NOT NULL,
    resource_id       varchar(255) COLLATE "C" NOT NULL,
    access_type       varchar(64) COLLATE "C" NOT NULL,
    concurrency_limit integer,
    weight            integer NOT NULL,
    queue_position    bigint,                          -- of its row in the line; NULL: none
    waits             boolean NOT NULL DEFAULT false,  -- the turn of that row has not come
    PRIMARY KEY (task_id, number)
);
CREATE INDEX task_lock_waits ON {schema}.task_lock (queue_name, resource_id, access_type, weight, concurrency_limit, queue_position)
    WHERE waits;
COMMENT ON TABLE {schema}.task_lock IS 'sqlsem: the locks that tasks are put with, and where these stand in their lines';

-- In whose name the parked tasks of a queue stand in the lines of their locks.
CREATE TABLE {schema}.parking (
    queue_name varchar(255) COLLATE "C" PRIMARY KEY,
    member_id  bigint
);
COMMENT ON TABLE {schema}.parking IS 'sqlsem: the member of each queue to which the rows of its parked tasks belong';

-- They have other parameters now, and are made anew. Not dropped yet: see schema-3.sql.
DO $$
DECLARE
    v_routine record;
BEGIN
    FOR v_routine IN
        SELECT p.oid::regprocedure::text AS signature, p.proname AS name FROM pg_proc AS p
        WHERE p.pronamespace = '{schema}'::regnamespace AND p.proname IN ('put', 'place')
    LOOP
        EXECUTE format('ALTER ROUTINE %s RENAME TO %I', v_routine.signature, v_routine.name || '_before');
    END LOOP;
END
$$;
