-- sqlsem, schema version 1, for SQL Server 2016 SP1 and later, and Azure SQL.
-- FROZEN once released: later changes go into schema-2.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).
-- All times are UTC. Every constraint has a name, by which a later version can drop it.

-- Raise if another user owns the schema, and so could replace routines: every caller would run the replacement.
-- (A member of db_owner can do so anywhere. Servers that only speak T-SQL have other owners.)
DECLARE @owner int = (SELECT principal_id FROM sys.schemas WHERE schema_id = SCHEMA_ID(N'{schema}')), @message nvarchar(1000);
IF @@VERSION LIKE N'Microsoft SQL %'
   AND @owner NOT IN (DATABASE_PRINCIPAL_ID(), DATABASE_PRINCIPAL_ID(N'dbo'), DATABASE_PRINCIPAL_ID(N'db_owner'))
   AND COALESCE(IS_ROLEMEMBER(N'db_owner', USER_NAME(@owner)), 0) = 0
BEGIN
    SET @message = REPLACE(CONCAT(N'sqlsem: schema {schema} belongs to ', QUOTENAME(USER_NAME(@owner)),
        N', who could replace what is installed there; install as that user, or first: ALTER AUTHORIZATION ON SCHEMA::{schema} TO dbo'), N'%', N'%%');
    THROW 50001, @message, 1;
END;
GO

IF SCHEMA_ID(N'{schema}') IS NULL EXEC (N'CREATE SCHEMA {schema}');
GO

-- The settings of this database. oldest_client: the oldest client that still works. history_days, history_rows: how
-- much history is kept. max_grace, max_lease: the longest that a member may ask for, in seconds. max_members: of one
-- login. max_server_waiters: the number of sessions that may wait in a procedure. features: the installed features.
CREATE TABLE {schema}.setting (
    name  nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT setting_pk PRIMARY KEY,
    value nvarchar(255) NOT NULL
);
INSERT INTO {schema}.setting (name, value)
VALUES (N'schema_version', N'1'), (N'oldest_client', N'1'), (N'history_days', N'30'), (N'history_rows', N'1000000'),
       (N'max_grace', N'86400'), (N'max_lease', N'604800'), (N'max_members', N'5000'), (N'features', N'all'),
       (N'max_server_waiters', N'100');

-- Members -----------------------------------------------------------------------------------------------------------

-- One row for each process or session that takes part. It is dead if its beacon is missing and heartbeat_at is older
-- than its grace, or if its lease is over. The numbers are bigint: short sessions would use up 2^31 in months.
CREATE SEQUENCE {schema}.beacon AS int START WITH 1 MINVALUE 1 CYCLE;
-- (ALLOW_PAGE_LOCKS = OFF: the routines read these tables with READPAST, which skips locked rows, but waits for locked
-- pages. STATISTICS_NORECOMPUTE = ON: rows come and go fast, and every statement uses a key. New statistics would
-- change no plan, but make the server compile all plans again.)
CREATE TABLE {schema}.member (
    member_id     bigint IDENTITY NOT NULL CONSTRAINT member_pk PRIMARY KEY
        WITH (ALLOW_PAGE_LOCKS = OFF, STATISTICS_NORECOMPUTE = ON),
    beacon        int NULL,  -- the application lock that its session holds; NULL for a lease
    session_id    int NULL,  -- the session that held the beacon when the row was written
    host          nvarchar(255) NULL,
    pid           int NULL,
    program       nvarchar(255) NULL,
    -- No other login may call for this member.
    login         nvarchar(128) NOT NULL CONSTRAINT member_login_default DEFAULT ORIGINAL_LOGIN(),
    grace_ms      int NOT NULL CONSTRAINT member_grace_ms_check CHECK (grace_ms >= 0),
    lease_ms      int NULL CONSTRAINT member_lease_ms_check CHECK (lease_ms > 0),
    joined_at     datetime2(6) NOT NULL CONSTRAINT member_joined_at_default DEFAULT SYSUTCDATETIME(),
    -- Time of the last heartbeat.
    heartbeat_at  datetime2(6) NOT NULL CONSTRAINT member_seen_at_default DEFAULT SYSUTCDATETIME(),
    lease_until   datetime2(6) NULL,  -- dead when past; NULL for a member with a beacon
    missing_since datetime2(6) NULL   -- when the beacon was first found missing; cleared when the member returns
);
CREATE INDEX member_session ON {schema}.member (session_id)  -- a session finds its member
    WITH (ALLOW_PAGE_LOCKS = OFF, STATISTICS_NORECOMPUTE = ON);
GO

-- Return the principal that owns the application locks: public, until permissions.sql finds a moment at which no
-- session has such a lock. Then it is a role, and a login outside of the role cannot block sqlsem's locks.
CREATE FUNCTION {schema}.lock_principal() RETURNS nvarchar(128) AS
BEGIN
    RETURN N'public';
END;
GO

-- Resources and their queues ----------------------------------------------------------------------------------------

-- The settings of operators for a resource. No row: no setting.
CREATE TABLE {schema}.resource (
    resource_id    nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT resource_pk PRIMARY KEY,
    cap            int NULL CONSTRAINT resource_cap_check CHECK (cap >= 1),  -- an upper bound on declared limits
    cap_by         nvarchar(128) NULL,                                       -- the login of the operator that set the cap
    paused_at      datetime2(6) NULL,                                        -- no request is granted while set
    paused_by      nvarchar(128) NULL,                                       -- the operator's login, while paused_at is set
    -- Age at which rows without a member are removed.
    stale_after_ms bigint NULL CONSTRAINT resource_stale_after_ms_check CHECK (stale_after_ms > 0),
    ageing_ms      int NULL  -- the waiting time that one step of priority is worth; NULL: no priorities
);

-- The limit of every resource whose name begins with the prefix and that has no limit of its own; the longest prefix
-- counts. ('tenant:' is shown, and set, as 'tenant:*'; '' is '*'.)
CREATE TABLE {schema}.limit_pattern (
    prefix nvarchar(254) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT limit_pattern_pk PRIMARY KEY,
    cap    int NOT NULL CONSTRAINT limit_pattern_cap_check CHECK (cap >= 1),
    cap_by nvarchar(128) NOT NULL CONSTRAINT limit_pattern_cap_by_default DEFAULT ORIGINAL_LOGIN(),  -- the operator's login
    set_at datetime2(6) NOT NULL CONSTRAINT limit_pattern_set_at_default DEFAULT SYSUTCDATETIME()
);

-- The queue. A row is a request, waiting or granted; the rows ahead of it alone decide whether it may be granted.
-- Bare participants insert into {table}, a view of this table: its trigger numbers their rows, and costs the routines
-- nothing. An INSERT into a view must name its NOT NULL columns. So the columns that a bare participant may leave out
-- are nullable, and a CHECK takes the place of NOT NULL.
CREATE TABLE {schema}.entry (
    queue_position    bigint IDENTITY NOT NULL CONSTRAINT entry_pk PRIMARY KEY NONCLUSTERED
        WITH (ALLOW_PAGE_LOCKS = OFF, STATISTICS_NORECOMPUTE = ON),
    resource_id       nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL
        CONSTRAINT entry_resource_id_check CHECK (resource_id IS NOT NULL),
    requesting_id     nvarchar(255) NOT NULL,
    access_type       nvarchar(64) COLLATE Latin1_General_100_BIN2 NULL
        CONSTRAINT entry_access_type_check CHECK (access_type IS NOT NULL),
    concurrency_limit int NULL,
    weight            int NULL CONSTRAINT entry_weight_check CHECK (weight IS NOT NULL),
    member_id         bigint NULL,
    owner             nvarchar(255) NULL,
    -- Made by the client; by the trigger for a bare row. If one call makes several requests: the call's uid (at most 64
    -- characters), a dot and a number.
    request_uid       nvarchar(80) COLLATE Latin1_General_100_BIN2 NULL
        CONSTRAINT entry_request_uid_unique UNIQUE WITH (ALLOW_PAGE_LOCKS = OFF, STATISTICS_NORECOMPUTE = ON),
    requested_at      datetime2(6) NULL CONSTRAINT entry_requested_at_check CHECK (requested_at IS NOT NULL),
    granted_at        datetime2(6) NULL,
    revoked_at        datetime2(6) NULL,
    revoked_by        nvarchar(128) NULL,  -- the operator's login, while revoked_at is set
    waiter_lease_until datetime2(6) NULL,  -- when past, the waiting row is removed: its client no longer polls
    note              nvarchar(1000) NULL,
    -- The position of the last row ahead of this one at its registration, or a mark (low_water) if no row was ahead. No
    -- row is or can come between the two. So if that row is alone inside, its release grants this one. NULL: not known.
    -- (The constraint finds numbers that went back: the number was set, or rows were inserted by hand.)
    behind            bigint NULL,
    CONSTRAINT entry_behind_check CHECK (behind < queue_position)
);
CREATE UNIQUE CLUSTERED INDEX entry_resource ON {schema}.entry (resource_id, queue_position)
    WITH (ALLOW_PAGE_LOCKS = OFF, STATISTICS_NORECOMPUTE = ON);
CREATE INDEX entry_member ON {schema}.entry (member_id) INCLUDE (request_uid, revoked_at)  -- all columns that a heartbeat reads
    WITH (ALLOW_PAGE_LOCKS = OFF, STATISTICS_NORECOMPUTE = ON);
GO
-- Checks of a resource begin behind this mark: there is no row at the mark or below. Positions only grow and rows only
-- leave, so that stays true. The server keeps deleted rows (ghosts) for a while, and a search from the first position
-- would pass all of them. A missing or locked mark only costs time.
CREATE TABLE {schema}.low_water (
    resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT low_water_pk PRIMARY KEY
        WITH (ALLOW_PAGE_LOCKS = OFF, STATISTICS_NORECOMPUTE = ON),
    mark        bigint NOT NULL,
    raised_at   datetime2(6) NOT NULL CONSTRAINT low_water_raised_at_default DEFAULT SYSUTCDATETIME()
);
GO
CREATE VIEW {schema}.{table} AS
SELECT NULLIF(queue_position, CAST(0 AS bigint)) AS queue_position,  -- nullable, so that an INSERT may leave it out
       resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner, request_uid,
       requested_at, granted_at, revoked_at, note, waiter_lease_until
FROM {schema}.entry;
GO

CREATE TABLE {schema}.history (
    resource_id       nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    queue_position    bigint NOT NULL,
    requesting_id     nvarchar(255) NOT NULL,
    access_type       nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    concurrency_limit int NULL,
    weight            int NOT NULL,
    member_id         bigint NULL,
    owner             nvarchar(255) NULL,
    host              nvarchar(255) NULL,  -- of the owner's member, as are pid, program and login
    pid               int NULL,
    program           nvarchar(255) NULL,
    login             nvarchar(128) NULL,
    note              nvarchar(1000) NULL,
    requested_at      datetime2(6) NOT NULL,
    granted_at        datetime2(6) NULL,
    ended_at          datetime2(6) NOT NULL CONSTRAINT history_ended_at_default DEFAULT SYSUTCDATETIME(),
    outcome           nvarchar(16) NOT NULL,
    ended_by          nvarchar(128) NULL,  -- the login that ended it, if not the owner's
    heartbeat_at      datetime2(6) NULL    -- the last heartbeat of an owner that died
);
CREATE CLUSTERED INDEX history_ended_at ON {schema}.history (ended_at);
CREATE INDEX history_resource ON {schema}.history (resource_id, ended_at);  -- a page of a resource's history

-- One row for each call of an operator, written in the transaction of that call.
CREATE TABLE {schema}.operation (
    operation_id   bigint IDENTITY NOT NULL CONSTRAINT operation_pk PRIMARY KEY,
    done_at        datetime2(6) NOT NULL CONSTRAINT operation_done_at_default DEFAULT SYSUTCDATETIME(),
    login          nvarchar(128) NOT NULL CONSTRAINT operation_login_default DEFAULT ORIGINAL_LOGIN(),
    host           nvarchar(255) NULL,  -- where the call came from, as the client says; so are pid and program
    pid            int NULL,
    program        nvarchar(255) NULL,
    action         nvarchar(16) NOT NULL,  -- pause, resume, cap, stale_after, revoke, reap; retry, cancel, ...
    resource_id    nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL,  -- the object of the call: a resource, or a row of its queue;
    queue_position bigint NULL,
    queue_name     nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL,  -- or a work queue, or a task of it
    task_id        bigint NULL,
    old_value      nvarchar(1000) NULL,
    new_value      nvarchar(1000) NULL
);
CREATE INDEX operation_done ON {schema}.operation (done_at);

GO

-- feature: rates
-- Rates -------------------------------------------------------------------------------------------------------------

-- One row for each window that a client has declared for a rate. Times count from 1970, by the server's clock.
CREATE TABLE {schema}.rate_window (
    resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,  -- N'rate:' and the rate's name
    window_ms   bigint NOT NULL CONSTRAINT rate_window_window_ms_check CHECK (window_ms >= 1),
    -- The limit in one window that was in effect at the last use (NULL: none); and the burst.
    rate_limit  bigint NULL CONSTRAINT rate_window_rate_limit_check CHECK (rate_limit >= 1),
    burst       bigint NULL,
    -- An operator's upper bound for rate_limit, and its default.
    cap         bigint NULL CONSTRAINT rate_window_cap_check CHECK (cap >= 1),
    cap_by      nvarchar(128) NULL,
    seen_ms     bigint NOT NULL,  -- the time of the last use
    full_us     bigint NULL,      -- with a burst: when the whole burst is available again
    -- Counters since the window was first declared.
    taken       bigint NOT NULL CONSTRAINT rate_window_taken_default DEFAULT 0,
    returned    bigint NOT NULL CONSTRAINT rate_window_returned_default DEFAULT 0,  -- of that, as the cost was less in the end
    waits       bigint NOT NULL CONSTRAINT rate_window_waits_default DEFAULT 0,     -- requests that were not granted at once
    CONSTRAINT rate_window_pk PRIMARY KEY (resource_id, window_ms)
);

-- The use of a rate by a login in a hundredth part of a window. It counts until all of that part is out of the window.
-- So do the lowest limit and burst that the login's requests have declared for this window in that time.
CREATE TABLE {schema}.rate_slot (
    resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    window_ms   bigint NOT NULL,
    slot        bigint NOT NULL,  -- the number of the hundredth part since 1970
    login       nvarchar(128) NOT NULL,  -- only this login can adjust the use; N'' for starts of tasks
    used        bigint NOT NULL CONSTRAINT rate_slot_used_check CHECK (used >= 0),
    rate_limit  bigint NULL,      -- NULL: no limit was declared for this window
    burst       bigint NULL,
    CONSTRAINT rate_slot_pk PRIMARY KEY (resource_id, window_ms, slot, login)
);
GO
-- end of feature: rates

-- feature: once
-- Periods -----------------------------------------------------------------------------------------------------------

-- The last run of each name that runs once per period (once.sql).
CREATE TABLE {schema}.once_run (
    once_name      nvarchar(250) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT once_run_pk PRIMARY KEY,
    granted_at     datetime2(6) NOT NULL,  -- the grant of that run: it decides the period, and never goes back
    done_at        datetime2(6) NOT NULL,
    queue_position bigint NOT NULL,  -- of that run: its fence
    requesting_id  nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    login          nvarchar(128) NOT NULL
);
GO
-- end of feature: once

-- feature: handovers
-- Locks that end with a transaction, and locks that are handed over -------------------------------------------------

-- A transaction that releases a lock inserts a row here. Other sessions see the row once the transaction has committed.
-- Only the owner of the lock knows the marker.
CREATE TABLE {schema}.commit_marker (
    marker    varchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT commit_marker_pk PRIMARY KEY,
    login     nvarchar(128) NOT NULL CONSTRAINT commit_marker_login_default DEFAULT ORIGINAL_LOGIN(),
    marked_at datetime2(6) NOT NULL CONSTRAINT commit_marker_marked_at_default DEFAULT SYSUTCDATETIME()
);
CREATE INDEX commit_marker_login ON {schema}.commit_marker (login);

-- One row for each hand-over. Until adopt, the handed-over rows of the queue belong to a member that exists only for
-- this hand-over (member_id), with a lease of ttl_ms. The token itself is not stored. Old rows are kept for a day, so
-- that a failed adopt can give the reason.
CREATE TABLE {schema}.handover (
    -- SHA-256, in hexadecimal digits.
    token_hash     varchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT handover_pk PRIMARY KEY,
    member_id      bigint NOT NULL,
    row_count      int NOT NULL,                                            -- how many rows were handed over
    resource_id    nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,  -- the first of them, for messages
    queue_position bigint NOT NULL,
    given_by       nvarchar(128) NOT NULL,  -- the giver's login
    given_to       nvarchar(128) NOT NULL,  -- the login that may adopt it, beside the giver
    given_at       datetime2(6) NOT NULL CONSTRAINT handover_given_at_default DEFAULT SYSUTCDATETIME(),
    ttl_ms         int NOT NULL CONSTRAINT handover_ttl_ms_check CHECK (ttl_ms > 0),
    adopted_at     datetime2(6) NULL,
    adopted_by     bigint NULL,        -- the member that adopted it
    adopted_uid    nvarchar(64) NULL,  -- made by the client: a repeated call finds what it did
    adopter        nvarchar(600) NULL  -- host:pid and program, for messages
);
CREATE INDEX handover_given ON {schema}.handover (given_at);
GO
-- end of feature: handovers

-- feature: queue
-- The work queue ----------------------------------------------------------------------------------------------------

-- Return the sort key of a task key: no client can choose its order, and no two keys have the same. It is stored in
-- rows, so it never changes, and is not created again with the procedures, which run meanwhile.
CREATE FUNCTION {schema}.key_hash(@key nvarchar(255)) RETURNS nvarchar(263) AS
BEGIN
    RETURN CONCAT(RIGHT(CONCAT(N'0000000', CAST(SUBSTRING(HASHBYTES('SHA2_256', @key), 1, 3) AS int)), 8), @key);
END;
GO

-- One row for each task, in any state. A task is open while it is pending, running, or failed and blocking later
-- orders.
CREATE TABLE {schema}.task (
    task_id         bigint IDENTITY NOT NULL CONSTRAINT task_pk PRIMARY KEY WITH (ALLOW_PAGE_LOCKS = OFF),
    queue_name      nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_order      int NOT NULL CONSTRAINT task_task_order_default DEFAULT 0,  -- a task waits for every open task of a lower order
    -- Workers are divided between the keys of a queue. '': no key, in a queue that has keys, limits or priorities;
    -- NULL: no key, in any other queue.
    task_key        nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL,
    task_priority   int NOT NULL CONSTRAINT task_task_priority_default DEFAULT 0,  -- among the tasks of its key; higher ones first
    task_hash       nvarchar(263) COLLATE Latin1_General_100_BIN2 NULL,  -- eight digits of the key's hash, then the key (key_hash)
    -- At most one open task of a queue has it. The routines ensure that: an index that is unique for some rows is a
    -- filtered one, which needs QUOTED_IDENTIFIER ON of every client that writes to the table.
    unique_key      nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL,
    kind            nvarchar(8) NOT NULL CONSTRAINT task_kind_check CHECK (kind IN (N'sql', N'shell', N'call', N'json')),
    body            nvarchar(max) NOT NULL,
    note            nvarchar(1000) NULL,
    status          nvarchar(16) NOT NULL CONSTRAINT task_status_default DEFAULT N'pending'
        CONSTRAINT task_status_check CHECK (status IN (N'pending', N'running', N'finished', N'failed', N'cancelled')),
    is_open         bit NOT NULL CONSTRAINT task_is_open_default DEFAULT 1,
    on_failure      nvarchar(8) NOT NULL CONSTRAINT task_on_failure_default DEFAULT N'stop'
        CONSTRAINT task_on_failure_check CHECK (on_failure IN (N'stop', N'continue')),
    max_attempts    int NOT NULL CONSTRAINT task_max_attempts_default DEFAULT 1
        CONSTRAINT task_max_attempts_check CHECK (max_attempts >= 1),
    backoff_ms      int NOT NULL CONSTRAINT task_backoff_ms_default DEFAULT 1000
        CONSTRAINT task_backoff_ms_check CHECK (backoff_ms >= 0),
    -- An attempt that runs for longer is ended, and has failed.
    time_limit_ms   bigint NULL CONSTRAINT task_time_limit_ms_check CHECK (time_limit_ms > 0),
    -- The number of claims. A worker that ends an attempt must name it.
    attempt         int NOT NULL CONSTRAINT task_attempt_default DEFAULT 0,
    failures        int NOT NULL CONSTRAINT task_failures_default DEFAULT 0,
    losses          int NOT NULL CONSTRAINT task_losses_default DEFAULT 0,  -- attempts whose worker died
    -- Made by the client: a repeated put finds its rows.
    put_uid         nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL
        CONSTRAINT task_put_uid_default DEFAULT CONVERT(nvarchar(64), NEWID()),
    put_at          datetime2(6) NOT NULL CONSTRAINT task_put_at_default DEFAULT SYSUTCDATETIME(),
    put_by          nvarchar(128) NULL CONSTRAINT task_put_by_default DEFAULT ORIGINAL_LOGIN(),
    ready_at        datetime2(6) NOT NULL CONSTRAINT task_ready_at_default DEFAULT SYSUTCDATETIME(),
    member_id       bigint NULL,  -- the member that runs it now
    owner           nvarchar(255) NULL,
    host            nvarchar(255) NULL,  -- of the member that runs it, or ran it last, as are pid and login
    pid             int NULL,
    login           nvarchar(128) NULL,
    claim_uid       nvarchar(64) COLLATE Latin1_General_100_BIN2 NULL,  -- made by the client: a repeated claim finds its row
    claimed_at      datetime2(6) NULL,
    cancel_asked_at datetime2(6) NULL,  -- set: the worker ends the task, which is then cancelled
    cancel_asked_by nvarchar(128) NULL,
    ended_at        datetime2(6) NULL,
    error           nvarchar(max) NULL,
    result          nvarchar(max) NULL,
    -- For a task with locks (blocked_tasks.sql) ready_at is the end of time (the year 9999), so that claims of tasks
    -- without locks skip it.
    lock_count      int NULL,           -- how many; NULL: none
    locks_pending   int NULL,           -- how many are not granted yet; NULL: none is enqueued
    enqueue_locks_at datetime2(6) NULL, -- when its locks may be enqueued
    CONSTRAINT task_turn_of_key CHECK (task_key IS NULL AND task_hash IS NULL OR task_key IS NOT NULL AND task_hash IS NOT NULL)
);
-- Open tasks are few. Claims read only one index of them, and its keys do not change from put to end. No index is
-- filtered: a filtered index needs QUOTED_IDENTIFIER ON of every client that writes to the table, and refuses its rows
-- otherwise. The indexes include all columns that are read by them. So no reader has a lock on an index
-- entry and waits for the row, while a writer has a lock on the row and waits for the entry.
CREATE INDEX task_open ON {schema}.task (queue_name, is_open, task_order, task_id)
    INCLUDE (status, ready_at, member_id, claim_uid, attempt, task_priority) WITH (ALLOW_PAGE_LOCKS = OFF);
-- (With lock_count in front: claims read only tasks where it is NULL, and so do not pass the blocked ones.)
CREATE INDEX task_fair ON {schema}.task (queue_name, status, lock_count, task_order, task_hash, task_priority DESC, task_id)
    INCLUDE (ready_at) WITH (ALLOW_PAGE_LOCKS = OFF);
CREATE INDEX task_ended ON {schema}.task (is_open, ended_at) INCLUDE (queue_name, status) WITH (ALLOW_PAGE_LOCKS = OFF);
CREATE UNIQUE INDEX task_put ON {schema}.task (put_uid) WITH (ALLOW_PAGE_LOCKS = OFF);
CREATE INDEX task_unique ON {schema}.task (unique_key, queue_name) WITH (ALLOW_PAGE_LOCKS = OFF);

-- One row for each ended attempt.
CREATE TABLE {schema}.task_log (
    task_id    bigint NOT NULL,
    attempt    int NOT NULL,
    outcome    nvarchar(16) NOT NULL,  -- finished, failed, lost (the worker died), returned (given back)
    member_id  bigint NULL,
    owner      nvarchar(255) NULL,
    host       nvarchar(255) NULL,
    pid        int NULL,
    login      nvarchar(128) NULL,
    session_id int NULL,  -- the database session of the worker's member
    started_at datetime2(6) NULL,
    ended_at   datetime2(6) NOT NULL CONSTRAINT task_log_ended_at_default DEFAULT SYSUTCDATETIME(),
    error      nvarchar(max) NULL,
    result     nvarchar(max) NULL,
    CONSTRAINT task_log_pk PRIMARY KEY (task_id, attempt)
);

-- The limits and rates of a queue. There is a row if anything is set for the queue or one of its keys.
CREATE TABLE {schema}.queue_setting (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT queue_setting_pk PRIMARY KEY,
    task_limit int NULL CONSTRAINT queue_setting_task_limit_check CHECK (task_limit >= 0),  -- running tasks: of the queue,
    key_limit  int NULL CONSTRAINT queue_setting_key_limit_check CHECK (key_limit >= 0),    -- and of each key
    -- How many tasks may start within task_ms (of the queue), and within key_ms (of each key).
    task_rate  int NULL CONSTRAINT queue_setting_task_rate_check CHECK (task_rate >= 1),
    task_ms    int NULL CONSTRAINT queue_setting_task_ms_check CHECK (task_ms >= 1),
    key_rate   int NULL CONSTRAINT queue_setting_key_rate_check CHECK (key_rate >= 1),
    key_ms     int NULL CONSTRAINT queue_setting_key_ms_check CHECK (key_ms >= 1),
    claims     bigint NOT NULL CONSTRAINT queue_setting_claims_default DEFAULT 0,  -- every claim writes it, so that one claims at a time
    set_at     datetime2(6) NOT NULL CONSTRAINT queue_setting_set_at_default DEFAULT SYSUTCDATETIME(),
    set_by     nvarchar(128) NOT NULL CONSTRAINT queue_setting_set_by_default DEFAULT ORIGINAL_LOGIN()
);

-- (A clustered key may have 900 bytes, and two names have 1,020; a nonclustered key may have 1,700.)
CREATE TABLE {schema}.queue_key (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_key   nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_limit int NULL CONSTRAINT queue_key_task_limit_check CHECK (task_limit >= 0),  -- of this key, instead of key_limit
    weight     int NULL CONSTRAINT queue_key_weight_check CHECK (weight >= 1),          -- its share of the workers; NULL: 1
    task_rate  int NULL CONSTRAINT queue_key_task_rate_check CHECK (task_rate >= 1),    -- of this key, instead of key_rate
    task_ms    int NULL CONSTRAINT queue_key_task_ms_check CHECK (task_ms >= 1),
    set_at     datetime2(6) NOT NULL CONSTRAINT queue_key_set_at_default DEFAULT SYSUTCDATETIME(),
    set_by     nvarchar(128) NOT NULL CONSTRAINT queue_key_set_by_default DEFAULT ORIGINAL_LOGIN(),
    CONSTRAINT queue_key_pk PRIMARY KEY NONCLUSTERED (queue_name, task_key)
);
-- The keys with the greatest weights. Every claim reads them, whatever key it begins with.
CREATE INDEX queue_key_heavy ON {schema}.queue_key (queue_name, weight DESC, task_key);

-- A queue or key whose rate a claim found used up: claims skip it until free_ms. (The use itself is in rate_slot.)
CREATE TABLE {schema}.queue_wait (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_key   nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,  -- N'': the queue itself
    since_ms   bigint NOT NULL,                                         -- from 1970, by the server's clock
    free_ms    bigint NOT NULL,
    CONSTRAINT queue_wait_pk PRIMARY KEY NONCLUSTERED (queue_name, task_key)
);

-- The locks of tasks (blocked_tasks.sql).
CREATE TABLE {schema}.task_lock (
    task_id           bigint NOT NULL,
    number            int NOT NULL,
    queue_name        nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    resource_id       nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    access_type       nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    concurrency_limit int NULL,
    weight            int NOT NULL,
    queue_position    bigint NULL,                                                 -- of its row in the lock's queue; NULL: none
    waits             bit NOT NULL CONSTRAINT task_lock_waits_default DEFAULT 0,   -- that row is not granted yet
    pending           bit NOT NULL CONSTRAINT task_lock_pending_default DEFAULT 0,  -- the task is pending
    CONSTRAINT task_lock_pk PRIMARY KEY (task_id, number) WITH (ALLOW_PAGE_LOCKS = OFF)
);
CREATE INDEX task_lock_pending ON {schema}.task_lock (queue_name, pending, resource_id, access_type, queue_position)
    WITH (ALLOW_PAGE_LOCKS = OFF);

-- The member that owns the lock requests of a queue's blocked tasks.
CREATE TABLE {schema}.queue_proxy (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT queue_proxy_pk PRIMARY KEY,
    member_id  bigint NULL,
    claims     bigint NOT NULL CONSTRAINT queue_proxy_claims_default DEFAULT 0  -- every claim that polls writes it, so that they take turns
);

-- Tasks that are put at the times of a cron expression, by one of the processes that watch for due schedules.
CREATE TABLE {schema}.schedule (
    schedule_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT schedule_pk PRIMARY KEY,
    queue_name    nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    cron          nvarchar(255) NOT NULL,
    time_zone     nvarchar(64) NOT NULL CONSTRAINT schedule_time_zone_default DEFAULT N'UTC',  -- a name of the IANA database
    kind          nvarchar(8) NOT NULL CONSTRAINT schedule_kind_check CHECK (kind IN (N'sql', N'shell', N'call', N'json')),
    body          nvarchar(max) NOT NULL,
    options       nvarchar(max) NOT NULL CONSTRAINT schedule_options_default DEFAULT N'{}',  -- JSON; of each task: order, note, ...
    next_due      datetime2(6) NOT NULL,  -- the next time
    last_due      datetime2(6) NULL,  -- the latest time for which a task was put
    put_at        datetime2(6) NOT NULL CONSTRAINT schedule_put_at_default DEFAULT SYSUTCDATETIME(),
    put_by        nvarchar(128) NOT NULL CONSTRAINT schedule_put_by_default DEFAULT ORIGINAL_LOGIN(),
    paused_at     datetime2(6) NULL,
    paused_by     nvarchar(128) NULL
);
GO
-- end of feature: queue

-- feature: batches
-- Batches ------------------------------------------------------------------------------------------------------------

-- One row for each batch: a set of parts that run side by side, and the callback that the last part to succeed starts.
CREATE TABLE {schema}.batch (
    batch_id         bigint IDENTITY NOT NULL CONSTRAINT batch_pk PRIMARY KEY,
    batch_name       nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    window_ms        bigint NOT NULL CONSTRAINT batch_window_ms_check CHECK (window_ms BETWEEN 1 AND 315360000000),
    status           nvarchar(16) NOT NULL CONSTRAINT batch_status_default DEFAULT N'open'
        CONSTRAINT batch_status_check CHECK (status IN (N'open', N'failed', N'succeeded', N'expired', N'abandoned')),
    opened_at        datetime2(6) NOT NULL CONSTRAINT batch_opened_at_default DEFAULT SYSUTCDATETIME(),
    opened_by        nvarchar(128) NULL CONSTRAINT batch_opened_by_default DEFAULT ORIGINAL_LOGIN(),
    ended_at         datetime2(6) NULL,
    callback_status  nvarchar(16) NOT NULL CONSTRAINT batch_callback_status_default DEFAULT N'none'
        CONSTRAINT batch_callback_status_check CHECK (callback_status IN (N'none', N'pending', N'running', N'finished', N'failed')),
    callback_kind    nvarchar(8) NULL,
    callback_body    nvarchar(max) NULL,
    callback_attempt int NOT NULL CONSTRAINT batch_callback_attempt_default DEFAULT 0,  -- a member that ends an attempt must name it
    callback_uid     nvarchar(64) NULL,  -- made by the client: a repeated claim finds its row
    callback_member  bigint NULL,
    callback_owner   nvarchar(255) NULL,
    callback_kept_by nvarchar(128) NULL,  -- the login that stored the callback
    callback_login   nvarchar(128) NULL,  -- the login that ran it last
    callback_started datetime2(6) NULL,
    callback_ended   datetime2(6) NULL,
    callback_error   nvarchar(max) NULL
);
CREATE INDEX batch_batch_name ON {schema}.batch (batch_name, batch_id);
CREATE INDEX batch_callback ON {schema}.batch (callback_status, batch_name, batch_id);

CREATE TABLE {schema}.batch_part (
    batch_id   bigint NOT NULL CONSTRAINT batch_part_batch_id_fk REFERENCES {schema}.batch ON DELETE CASCADE,
    part       nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    status     nvarchar(16) NOT NULL CONSTRAINT batch_part_status_default DEFAULT N'expected'
        CONSTRAINT batch_part_status_check CHECK (status IN (N'expected', N'running', N'succeeded', N'failed')),
    attempt    int NOT NULL CONSTRAINT batch_part_attempt_default DEFAULT 0,  -- the number of starts in this batch
    start_uid  nvarchar(64) NULL,  -- made by the client for each start: a call that ends the part must name it
    is_last    bit NOT NULL CONSTRAINT batch_part_is_last_default DEFAULT 0,  -- its success completed the batch
    member_id  bigint NULL,
    owner      nvarchar(255) NULL,
    host       nvarchar(255) NULL,
    pid        int NULL,
    login      nvarchar(128) NULL,
    started_at datetime2(6) NULL,
    ended_at   datetime2(6) NULL,
    error      nvarchar(max) NULL,
    CONSTRAINT batch_part_pk PRIMARY KEY (batch_id, part)
);
CREATE INDEX batch_part_status ON {schema}.batch_part (status, batch_id);
GO
-- end of feature: batches
