-- sqlsem, schema version 5, for SQL Server: who operated, and what the work queue needs for limits in time, schedules and tasks
-- that are there once. Programs of versions 3 and 4 go on with these tables.
-- FROZEN once released: later changes go into schema-6.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).
-- All times are UTC.

-- What operators did: one row each, written in the transaction that did it.
CREATE TABLE {schema}.operation (
    operation_id   bigint IDENTITY NOT NULL CONSTRAINT operation_pk PRIMARY KEY,
    done_at        datetime2(6) NOT NULL CONSTRAINT operation_done_at DEFAULT SYSUTCDATETIME(),
    login          nvarchar(128) NOT NULL CONSTRAINT operation_login DEFAULT ORIGINAL_LOGIN(),
    host           nvarchar(255) NULL,          -- where it was done, as the client says; as are pid and program
    pid            int NULL,
    program        nvarchar(255) NULL,
    action         nvarchar(16) NOT NULL,       -- pause, resume, cap, stale_after, revoke, reap; retry, cancel, …
    resource_id    nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL,  -- what it was done to: a resource, and a row of its queue;
    queue_position bigint NULL,
    queue_name     nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL,  -- or a work queue, and a task of it
    task_id        bigint NULL,
    old_value      nvarchar(1000) NULL,
    new_value      nvarchar(1000) NULL
);
CREATE INDEX operation_done ON {schema}.operation (done_at);

ALTER TABLE {schema}.resource ADD paused_by nvarchar(128) NULL;  -- the operator's login, while paused_at is set
ALTER TABLE {schema}.resource ADD cap_by nvarchar(128) NULL;     -- and of who set the cap, while there is one
GO

-- Of the work queue -------------------------------------------------------------------------------------------------

-- An attempt that runs for longer than its limit is ended, and has failed.
ALTER TABLE {schema}.task ADD time_limit_ms bigint NULL CONSTRAINT task_time_limit CHECK (time_limit_ms > 0);
ALTER TABLE {schema}.task ADD cancel_asked_at datetime2(6) NULL;    -- its worker ends it, and then it is cancelled
ALTER TABLE {schema}.task ADD cancel_asked_by nvarchar(128) NULL;
-- Of the open tasks of a queue one has it. The routines see to that: an index that is unique for some rows is a filtered one,
-- which wants QUOTED_IDENTIFIER ON of everyone who touches the table.
ALTER TABLE {schema}.task ADD unique_key nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL;
GO
CREATE INDEX task_unique ON {schema}.task (unique_key, queue_name);

-- Tasks that are put again and again, at the times of a cron expression: by any process that watches, and by one of them.
CREATE TABLE {schema}.schedule (
    schedule_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT schedule_pk PRIMARY KEY,
    queue_name    nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    cron          nvarchar(255) NOT NULL,
    time_zone     nvarchar(64) NOT NULL CONSTRAINT schedule_time_zone DEFAULT N'UTC',  -- a name of the IANA database
    kind          nvarchar(8) NOT NULL CONSTRAINT schedule_kind CHECK (kind IN (N'sql', N'shell', N'call', N'json')),
    body          nvarchar(max) NOT NULL,
    options       nvarchar(max) NOT NULL CONSTRAINT schedule_options DEFAULT N'{}',  -- JSON; of each task: order, note, …
    next_due      datetime2(6) NULL,  -- the next one; NULL: never, as nobody understands the expression
    last_due      datetime2(6) NULL,  -- the latest time for which a task was put
    put_at        datetime2(6) NOT NULL CONSTRAINT schedule_put_at DEFAULT SYSUTCDATETIME(),
    put_by        nvarchar(128) NOT NULL CONSTRAINT schedule_put_by DEFAULT ORIGINAL_LOGIN(),
    paused_at     datetime2(6) NULL,
    paused_by     nvarchar(128) NULL
);
GO
