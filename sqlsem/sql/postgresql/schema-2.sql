-- sqlsem, schema version 2, for PostgreSQL: the work queue and the rounds.
-- FROZEN once released: later changes go into schema-3.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

-- One row a task, in whatever state. Open ones are to be done, being done, or failed and holding up what comes later. All
-- that claims look at is in one index of those, whose keys do not change from the put to the end.
CREATE TABLE {schema}.task (
    task_id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_name   varchar(255) COLLATE "C" NOT NULL,
    task_order   integer NOT NULL DEFAULT 0,  -- a task waits for every open task of a lower order
    kind         varchar(8) NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body         text NOT NULL,
    note         varchar(1000),
    status       varchar(16) NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'running', 'finished', 'failed', 'cancelled')),
    is_open      boolean NOT NULL DEFAULT true,
    on_failure   varchar(8) NOT NULL DEFAULT 'stop' CHECK (on_failure IN ('stop', 'continue')),
    max_attempts integer NOT NULL DEFAULT 1 CHECK (max_attempts >= 1),
    backoff_ms   integer NOT NULL DEFAULT 1000 CHECK (backoff_ms >= 0),
    attempt      integer NOT NULL DEFAULT 0,  -- how often it was claimed: whoever ends an attempt must name it
    failures     integer NOT NULL DEFAULT 0,
    losses       integer NOT NULL DEFAULT 0,  -- attempts whose worker died
    put_uid      varchar(64),                 -- made by the client: a repeated put finds its rows
    put_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ready_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    member_id    integer,                     -- who runs it now
    owner        varchar(255),
    claim_uid    varchar(64),                 -- made by the client: a repeated claim finds its row
    claimed_at   timestamptz,
    ended_at     timestamptz,
    error        text,
    result       text
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX task_open ON {schema}.task (queue_name, task_order, task_id) WHERE is_open;
CREATE INDEX task_running ON {schema}.task (queue_name) WHERE status = 'running';
CREATE INDEX task_ended ON {schema}.task (ended_at) WHERE NOT is_open;
CREATE UNIQUE INDEX task_put ON {schema}.task (put_uid);
COMMENT ON TABLE {schema}.task IS 'sqlsem: the work queue, one row a task';

-- One row an attempt that ended.
CREATE TABLE {schema}.task_log (
    task_id    bigint NOT NULL,
    attempt    integer NOT NULL,
    outcome    varchar(16) NOT NULL,  -- finished, failed, lost (the worker died), returned (given back)
    member_id  integer,
    owner      varchar(255),
    host       varchar(255),
    pid        integer,
    session_id integer,               -- the database session of the worker's member
    started_at timestamptz,
    ended_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    error      text,
    result     text,
    PRIMARY KEY (task_id, attempt)
);
COMMENT ON TABLE {schema}.task_log IS 'sqlsem: who ran which task when, and how it ended; one row an attempt';

-- One row a round: a set of parts that run side by side, and what the last one to succeed starts.
CREATE TABLE {schema}.round (
    round_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    round_name   varchar(255) COLLATE "C" NOT NULL,
    window_ms    bigint NOT NULL CHECK (window_ms > 0),
    status       varchar(16) NOT NULL DEFAULT 'open'
        CHECK (status IN ('open', 'failed', 'succeeded', 'expired', 'abandoned')),
    opened_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz,
    then_status  varchar(16) NOT NULL DEFAULT 'none'
        CHECK (then_status IN ('none', 'pending', 'running', 'finished', 'failed')),
    then_kind    varchar(8),
    then_body    text,
    then_attempt integer NOT NULL DEFAULT 0,  -- whoever ends an attempt must name it
    then_uid     varchar(64),                 -- made by the client: a repeated claim finds its row
    then_member  integer,
    then_owner   varchar(255),
    then_started timestamptz,
    then_ended   timestamptz,
    then_error   text
);
CREATE INDEX ON {schema}.round (round_name, round_id);
CREATE INDEX round_then ON {schema}.round (round_name, round_id) WHERE then_status IN ('pending', 'running');
COMMENT ON TABLE {schema}.round IS 'sqlsem: rounds of parts that run side by side, and their continuations';

CREATE TABLE {schema}.round_part (
    round_id   bigint NOT NULL REFERENCES {schema}.round ON DELETE CASCADE,
    part       varchar(255) COLLATE "C" NOT NULL,
    status     varchar(16) NOT NULL DEFAULT 'expected'
        CHECK (status IN ('expected', 'running', 'succeeded', 'failed')),
    attempt    integer NOT NULL DEFAULT 0,    -- how often it was started in this round
    start_uid  varchar(64),                   -- made by the client for each start: whoever ends it must name it
    is_last    boolean NOT NULL DEFAULT false,  -- its success was the round's
    member_id  integer,
    owner      varchar(255),
    host       varchar(255),
    pid        integer,
    started_at timestamptz,
    ended_at   timestamptz,
    error      text,
    PRIMARY KEY (round_id, part)
);
CREATE INDEX round_part_running ON {schema}.round_part (round_id) WHERE status = 'running';
COMMENT ON TABLE {schema}.round_part IS 'sqlsem: the parts of each round';
