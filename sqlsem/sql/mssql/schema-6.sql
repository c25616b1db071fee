-- sqlsem, schema version 6, for SQL Server: limits that the server owns, rates, locks that travel, guarded tables, tasks with
-- locks and keys. Programs of versions 3 to 5 go on with these tables.
-- FROZEN once released: later changes go into schema-7.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).
-- All times are UTC.

-- Limits that the server owns ---------------------------------------------------------------------------------------

-- The limit of every resource whose name begins so and that has none of its own; of several the longest counts. ('tenant:' is
-- shown, and set, as 'tenant:*'; '' is '*'.)
CREATE TABLE {schema}.limit_pattern (
    prefix nvarchar(254) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT limit_pattern_pk PRIMARY KEY,
    cap    int NOT NULL CONSTRAINT limit_pattern_cap CHECK (cap >= 1),
    cap_by nvarchar(128) NOT NULL CONSTRAINT limit_pattern_cap_by DEFAULT ORIGINAL_LOGIN(),  -- an operator's login
    set_at datetime2(6) NOT NULL CONSTRAINT limit_pattern_set_at DEFAULT SYSUTCDATETIME()
);

-- Priorities --------------------------------------------------------------------------------------------------------

-- What one step of priority is worth, in milliseconds of waiting; NULL: requests of the resource have no priorities.
ALTER TABLE {schema}.resource ADD ageing_ms int NULL;

-- Rates and periods -------------------------------------------------------------------------------------------------

-- What is known of a rate, for each window that anybody has declared for it. Times are of the server's clock, since 1970.
CREATE TABLE {schema}.rate_window (
    resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,  -- N'rate:' and the rate's name
    window_ms   bigint NOT NULL CONSTRAINT rate_window_ms CHECK (window_ms >= 1),
    rate_limit  bigint NOT NULL CONSTRAINT rate_window_limit CHECK (rate_limit >= 1),  -- in so long, as it was declared last
    seen_ms     bigint NOT NULL,  -- when it was last taken from
    full_us     bigint NULL,      -- with a burst: when all of that may be had again
    -- Since the window is known; only ever more.
    taken       bigint NOT NULL CONSTRAINT rate_window_taken DEFAULT 0,
    returned    bigint NOT NULL CONSTRAINT rate_window_returned DEFAULT 0,  -- of that, as it was less in the end
    waits       bigint NOT NULL CONSTRAINT rate_window_waits DEFAULT 0,     -- how often it was not there at once
    CONSTRAINT rate_window_pk PRIMARY KEY (resource_id, window_ms)
);

-- What was used of a rate, in a hundredth part of a window. It counts until all of that part is out of the window.
CREATE TABLE {schema}.rate_slot (
    resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    window_ms   bigint NOT NULL,
    slot        bigint NOT NULL,  -- since 1970
    used        bigint NOT NULL CONSTRAINT rate_slot_used CHECK (used >= 0),
    CONSTRAINT rate_slot_pk PRIMARY KEY (resource_id, window_ms, slot)
);

-- What runs once per period: when it was done last. One row a name (once.sql).
CREATE TABLE {schema}.once_run (
    once_name      nvarchar(250) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT once_run_pk PRIMARY KEY,
    granted_at     datetime2(6) NOT NULL,  -- when the turn of that run came, which tells the period; it never goes back
    done_at        datetime2(6) NOT NULL,
    queue_position bigint NOT NULL,        -- of that run: its fence
    requesting_id  nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    login          nvarchar(128) NOT NULL
);

-- Locks that go with a transaction ------------------------------------------------------------------------------------

-- What transactions leave in which a lock was to go: there when they have been committed. Nobody else knows the words.
CREATE TABLE {schema}.departure (
    word    varchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT departure_pk PRIMARY KEY,
    left_at datetime2(6) NOT NULL CONSTRAINT departure_left_at DEFAULT SYSUTCDATETIME()
);

-- Locks that travel -------------------------------------------------------------------------------------------------
-- From hand_over to adopt the rows belong to a member of their own, in transit, which lives by a lease of ttl_ms: member_id. The
-- token itself is nowhere. What is over is kept for a day, to say why a token cannot be adopted.
CREATE TABLE {schema}.handover (
    token_hash     varchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY,  -- SHA-256, in hexadecimal digits
    member_id      bigint NOT NULL,
    row_count      int NOT NULL,                -- how many rows it has
    resource_id    nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,  -- the first of them, for messages
    queue_position bigint NOT NULL,
    given_by       nvarchar(128) NOT NULL,      -- the giver's login
    given_to       nvarchar(128) NOT NULL,      -- who may adopt it, beside the giver
    given_at       datetime2(6) NOT NULL DEFAULT SYSUTCDATETIME(),
    ttl_ms         int NOT NULL CHECK (ttl_ms > 0),
    adopted_at     datetime2(6) NULL,
    adopted_by     bigint NULL,                 -- the member that did
    adopted_uid    nvarchar(64) NULL,           -- made by the client: a repeated call finds what it did
    adopter        nvarchar(600) NULL           -- host:pid and program, for messages
);
CREATE INDEX handover_given ON {schema}.handover (given_at);

-- Guarded tables ----------------------------------------------------------------------------------------------------

-- Tasks with locks and keys -----------------------------------------------------------------------------------------

-- Whose task it is: workers share themselves out between the keys of a queue. '': nobody's, in a queue that has keys, limits or
-- priorities; NULL: put as in any other queue.
ALTER TABLE {schema}.task ADD task_key nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL;
ALTER TABLE {schema}.task ADD task_priority int NOT NULL CONSTRAINT task_task_priority DEFAULT 0;  -- of its key's; higher ones first
-- The key behind eight digits of its hash (turn_of).
ALTER TABLE {schema}.task ADD task_turn nvarchar(263) COLLATE Latin1_General_100_BIN2 NULL;
-- Of a task with locks (parked.sql): it is ready at the end of time (the year 9999), so that only those claim it who know of locks.
ALTER TABLE {schema}.task ADD lock_count int NULL;     -- how many; NULL: none
ALTER TABLE {schema}.task ADD locks_left int NULL;     -- how many wait for their turn; NULL: it stands in no line
ALTER TABLE {schema}.task ADD asks_at datetime2(6) NULL;  -- when it may stand in the lines
GO
ALTER TABLE {schema}.task ADD CONSTRAINT task_turn_of_key
    CHECK (task_key IS NULL AND task_turn IS NULL OR task_key IS NOT NULL AND task_turn IS NOT NULL);
GO
-- What a key is sorted by: in no order that anyone chose, and each at its own place. It stands in the rows, so it never changes, and is
-- not made anew with the procedures, which run meanwhile.
CREATE FUNCTION {schema}.turn_of(@key nvarchar(255)) RETURNS nvarchar(263) AS
BEGIN
    RETURN CONCAT(RIGHT(CONCAT(N'0000000', CAST(SUBSTRING(HASHBYTES('SHA2_256', @key), 1, 3) AS int)), 8), @key);
END;
GO
-- (With lock_count in front: claims look among those where it is NULL, and so do not pass the parked ones. No filter: an index with
-- one refuses the rows of every client that has other SET options.)
CREATE INDEX task_open ON {schema}.task (queue_name, is_open, task_order, task_id)
    INCLUDE (status, ready_at, member_id, claim_uid, attempt, task_priority) WITH (DROP_EXISTING = ON);
CREATE INDEX task_fair ON {schema}.task (queue_name, status, lock_count, task_order, task_turn, task_priority DESC, task_id)
    INCLUDE (ready_at);

-- How many tasks of a queue may run at a time. There is a row where anything is set, of the queue or of a key.
CREATE TABLE {schema}.queue_setting (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT queue_setting_pk PRIMARY KEY,
    task_limit int NULL CONSTRAINT queue_setting_task_limit CHECK (task_limit >= 0),  -- of all
    key_limit  int NULL CONSTRAINT queue_setting_key_limit CHECK (key_limit >= 0),    -- of each key
    -- How many may be started in so many milliseconds: of all, and of each key.
    task_rate  int NULL CONSTRAINT queue_setting_task_rate CHECK (task_rate >= 1),
    task_ms    int NULL CONSTRAINT queue_setting_task_ms CHECK (task_ms >= 1),
    key_rate   int NULL CONSTRAINT queue_setting_key_rate CHECK (key_rate >= 1),
    key_ms     int NULL CONSTRAINT queue_setting_key_ms CHECK (key_ms >= 1),
    claims     bigint NOT NULL CONSTRAINT queue_setting_claims DEFAULT 0,  -- whoever claims writes it: one after the other
    set_at     datetime2(6) NOT NULL CONSTRAINT queue_setting_set_at DEFAULT SYSUTCDATETIME(),
    set_by     nvarchar(128) NOT NULL CONSTRAINT queue_setting_set_by DEFAULT ORIGINAL_LOGIN()
);

CREATE TABLE {schema}.queue_key (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_key   nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_limit int NULL CONSTRAINT queue_key_task_limit CHECK (task_limit >= 0),  -- of this key, instead of key_limit
    weight     int NULL CONSTRAINT queue_key_weight CHECK (weight >= 1),          -- its share of the workers; NULL: 1
    task_rate  int NULL CONSTRAINT queue_key_task_rate CHECK (task_rate >= 1),    -- of this key, instead of key_rate
    task_ms    int NULL CONSTRAINT queue_key_task_ms CHECK (task_ms >= 1),
    set_at     datetime2(6) NOT NULL CONSTRAINT queue_key_set_at DEFAULT SYSUTCDATETIME(),
    set_by     nvarchar(128) NOT NULL CONSTRAINT queue_key_set_by DEFAULT ORIGINAL_LOGIN(),
    CONSTRAINT queue_key_pk PRIMARY KEY (queue_name, task_key)
);
-- Those that claims look at wherever they begin.
CREATE INDEX queue_key_heavy ON {schema}.queue_key (queue_name, weight DESC, task_key);

-- Whose rate was found used up by a claim: not looked at again until then. (What was used stands in rate_slot.)
CREATE TABLE {schema}.queue_wait (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_key   nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,  -- N'': the queue itself
    since_ms   bigint NOT NULL,                                         -- by the server's clock, since 1970
    free_ms    bigint NOT NULL,
    CONSTRAINT queue_wait_pk PRIMARY KEY (queue_name, task_key)
);

-- What the tasks ask for that are put with locks.
CREATE TABLE {schema}.task_lock (
    task_id           bigint NOT NULL,
    number            int NOT NULL,
    queue_name        nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    resource_id       nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    access_type       nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    concurrency_limit int NULL,
    weight            int NOT NULL,
    queue_position    bigint NULL,                                             -- of its row in the line; NULL: none
    waits             bit NOT NULL CONSTRAINT task_lock_waits DEFAULT 0,       -- the turn of that row has not come
    parked            bit NOT NULL CONSTRAINT task_lock_is_parked DEFAULT 0,   -- the task is pending
    CONSTRAINT task_lock_pk PRIMARY KEY (task_id, number)
);
CREATE INDEX task_lock_parked ON {schema}.task_lock (queue_name, parked, resource_id, access_type, queue_position);

-- In whose name the parked tasks of a queue stand in the lines of their locks.
CREATE TABLE {schema}.parking (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT parking_pk PRIMARY KEY,
    member_id  bigint NULL,
    claims     bigint NOT NULL CONSTRAINT parking_claims DEFAULT 0  -- whoever looks writes it: one after the other
);
GO
