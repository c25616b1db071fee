-- sqlsem, schema version 4, for PostgreSQL: what keeps the cost flat, however much has been done and whoever keeps an old
-- snapshot. Programs of version 3 go on with these tables.
-- FROZEN once released: later changes go into schema-5.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

-- The tables that get other indexes, at once or not at all: as in schema-3.sql. (Not the members': they can give signs of life
-- meanwhile. A million rows of history take about a second.)
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
            LOCK TABLE {schema}.history, {schema}.task IN ACCESS EXCLUSIVE MODE;
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

-- Low-water marks. Below `mark` no row of the resource lives, but for `survivors`. Positions only grow and rows only leave,
-- so what was true once stays true. Whoever looks takes the newest, which is the first in its index: older ones, and what
-- is dead in the queue below the mark, are never met, though an old snapshot may keep them for days.
CREATE TABLE {schema}.low_water (
    resource_id varchar(255) COLLATE "C" NOT NULL,
    mark        bigint NOT NULL,
    survivors   bigint[] NOT NULL,  -- at most 200
    made_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (resource_id, mark)
);
COMMENT ON TABLE {schema}.low_water IS 'sqlsem: positions below which nothing lives but the survivors; only spares time';

-- The same for the work queue: nothing is open in orders below task_order; of that order, below `mark` only the survivors may
-- be. The newest, by serial, counts; without any, nothing is known.
CREATE TABLE {schema}.task_low_water (
    queue_name varchar(255) COLLATE "C" NOT NULL,
    serial     bigint GENERATED ALWAYS AS IDENTITY,
    task_order integer NOT NULL,
    mark       bigint NOT NULL,
    survivors  bigint[] NOT NULL,
    made_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (queue_name, serial)
);
COMMENT ON TABLE {schema}.task_low_water IS 'sqlsem: the same for the tasks of each queue; only spares time';

-- The rows of a member, and the tasks that run: from a position on.
DO $$
DECLARE
    v_index text;
BEGIN
    FOR v_index IN
        SELECT i.indexrelid::regclass::text FROM pg_index AS i
        WHERE i.indrelid = '{schema}.{table}'::regclass
          AND i.indkey::text = (SELECT attnum::text FROM pg_attribute WHERE attrelid = i.indrelid AND attname = 'member_id')
    LOOP
        EXECUTE 'DROP INDEX ' || v_index;
    END LOOP;
END
$$;
CREATE INDEX ON {schema}.{table} (member_id, queue_position);
DROP INDEX {schema}.task_running;
CREATE INDEX task_running ON {schema}.task (queue_name, task_order, task_id) WHERE status = 'running';

-- A page of a resource's history, and of what did not end as usual (which costs the usual end nothing).
CREATE INDEX ON {schema}.history (resource_id, ended_at);
CREATE INDEX history_outcome ON {schema}.history (outcome, ended_at) WHERE outcome <> 'released';
CREATE INDEX history_resource_outcome ON {schema}.history (resource_id, outcome, ended_at) WHERE outcome <> 'released';

-- How much history is kept at the most, besides for how long: see prune.
INSERT INTO {schema}.setting (name, value) VALUES ('history_rows', '1000000') ON CONFLICT DO NOTHING;
