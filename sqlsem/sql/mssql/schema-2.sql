-- sqlsem, schema version 2, for SQL Server: the work queue and the rounds.
-- FROZEN once released: later changes go into schema-3.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).
-- All times are UTC.

-- One row a task, in whatever state. Open ones (to be done, being done, or failed and holding up what comes later) are
-- few; all that claims look at is in one index of those, whose keys do not change from the put to the end.
CREATE TABLE {schema}.task (
    task_id      bigint IDENTITY NOT NULL PRIMARY KEY,
    queue_name   nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_order   int NOT NULL DEFAULT 0,  -- a task waits for every open task of a lower order
    kind         nvarchar(8) NOT NULL CHECK (kind IN (N'sql', N'shell', N'call', N'json')),
    body         nvarchar(max) NOT NULL,
    note         nvarchar(1000) NULL,
    status       nvarchar(16) NOT NULL DEFAULT N'pending'
        CHECK (status IN (N'pending', N'running', N'finished', N'failed', N'cancelled')),
    is_open      bit NOT NULL DEFAULT 1,
    on_failure   nvarchar(8) NOT NULL DEFAULT N'stop' CHECK (on_failure IN (N'stop', N'continue')),
    max_attempts int NOT NULL DEFAULT 1 CHECK (max_attempts >= 1),
    backoff_ms   int NOT NULL DEFAULT 1000 CHECK (backoff_ms >= 0),
    attempt      int NOT NULL DEFAULT 0,  -- how often it was claimed: whoever ends an attempt must name it
    failures     int NOT NULL DEFAULT 0,
    losses       int NOT NULL DEFAULT 0,  -- attempts whose worker died
    put_uid      nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL
        DEFAULT CONVERT(nvarchar(64), NEWID()),  -- made by the client: a repeated put finds its rows
    put_at       datetime2(6) NOT NULL DEFAULT SYSUTCDATETIME(),
    ready_at     datetime2(6) NOT NULL DEFAULT SYSUTCDATETIME(),
    member_id    int NULL,                -- who runs it now
    owner        nvarchar(255) NULL,
    claim_uid    nvarchar(64) COLLATE Latin1_General_100_BIN2 NULL,  -- by the client: a repeated claim finds its row
    claimed_at   datetime2(6) NULL,
    ended_at     datetime2(6) NULL,
    error        nvarchar(max) NULL,
    result       nvarchar(max) NULL
);
-- Not filtered: a filtered index wants QUOTED_IDENTIFIER ON of everyone who touches the table. They include what is
-- asked of them, so that no reader goes on to the row with a lock on an index, while a writer comes the other way.
CREATE INDEX task_open ON {schema}.task (queue_name, is_open, task_order, task_id)
    INCLUDE (status, ready_at, member_id, claim_uid, attempt);
CREATE INDEX task_ended ON {schema}.task (is_open, ended_at) INCLUDE (queue_name, status);
CREATE UNIQUE INDEX task_put ON {schema}.task (put_uid);

-- One row an attempt that ended.
CREATE TABLE {schema}.task_log (
    task_id    bigint NOT NULL,
    attempt    int NOT NULL,
    outcome    nvarchar(16) NOT NULL,  -- finished, failed, lost (the worker died), returned (given back)
    member_id  int NULL,
    owner      nvarchar(255) NULL,
    host       nvarchar(255) NULL,
    pid        int NULL,
    session_id int NULL,               -- the database session of the worker's member
    started_at datetime2(6) NULL,
    ended_at   datetime2(6) NOT NULL DEFAULT SYSUTCDATETIME(),
    error      nvarchar(max) NULL,
    result     nvarchar(max) NULL,
    PRIMARY KEY (task_id, attempt)
);

-- One row a round: a set of parts that run side by side, and what the last one to succeed starts.
CREATE TABLE {schema}.[round] (
    round_id     bigint IDENTITY NOT NULL PRIMARY KEY,
    round_name   nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    window_ms    bigint NOT NULL CHECK (window_ms > 0),
    status       nvarchar(16) NOT NULL DEFAULT N'open'
        CHECK (status IN (N'open', N'failed', N'succeeded', N'expired', N'abandoned')),
    opened_at    datetime2(6) NOT NULL DEFAULT SYSUTCDATETIME(),
    ended_at     datetime2(6) NULL,
    then_status  nvarchar(16) NOT NULL DEFAULT N'none'
        CHECK (then_status IN (N'none', N'pending', N'running', N'finished', N'failed')),
    then_kind    nvarchar(8) NULL,
    then_body    nvarchar(max) NULL,
    then_attempt int NOT NULL DEFAULT 0,  -- whoever ends an attempt must name it
    then_uid     nvarchar(64) NULL,           -- made by the client: a repeated claim finds its row
    then_member  int NULL,
    then_owner   nvarchar(255) NULL,
    then_started datetime2(6) NULL,
    then_ended   datetime2(6) NULL,
    then_error   nvarchar(max) NULL
);
CREATE INDEX round_round_name ON {schema}.[round] (round_name, round_id);
CREATE INDEX round_then ON {schema}.[round] (then_status, round_name, round_id);

CREATE TABLE {schema}.round_part (
    round_id   bigint NOT NULL REFERENCES {schema}.[round] ON DELETE CASCADE,
    part       nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    status     nvarchar(16) NOT NULL DEFAULT N'expected'
        CHECK (status IN (N'expected', N'running', N'succeeded', N'failed')),
    attempt    int NOT NULL DEFAULT 0,    -- how often it was started in this round
    start_uid  nvarchar(64) NULL,         -- made by the client for each start: whoever ends it must name it
    is_last    bit NOT NULL DEFAULT 0,    -- its success was the round's
    member_id  int NULL,
    owner      nvarchar(255) NULL,
    host       nvarchar(255) NULL,
    pid        int NULL,
    started_at datetime2(6) NULL,
    ended_at   datetime2(6) NULL,
    error      nvarchar(max) NULL,
    PRIMARY KEY (round_id, part)
);
CREATE INDEX round_part_status ON {schema}.round_part (status, round_id);
GO
