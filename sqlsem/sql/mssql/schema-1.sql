-- sqlsem, schema version 1, for SQL Server 2016 and later, and Azure SQL.
-- FROZEN once released: later changes go into schema-2.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).
-- All times are UTC.

IF SCHEMA_ID(N'{schema}') IS NULL EXEC (N'CREATE SCHEMA {schema}');
GO

-- schema_version, oldest_client (the oldest client that still works), history_days
CREATE TABLE {schema}.setting (
    name  nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY,
    value nvarchar(255) NOT NULL
);
INSERT INTO {schema}.setting (name, value)
VALUES (N'schema_version', N'1'), (N'oldest_client', N'1'), (N'history_days', N'30');

-- One row for each process or session that takes part and can be told alive from dead.
CREATE SEQUENCE {schema}.beacon AS int START WITH 1 MINVALUE 1 CYCLE;
CREATE TABLE {schema}.member (
    member_id     int IDENTITY NOT NULL PRIMARY KEY,
    beacon        int NULL,           -- the application lock that its session holds; NULL for a lease
    session_id    int NULL,           -- the session that held it when this was written; for people
    host          nvarchar(255) NULL,
    pid           int NULL,
    program       nvarchar(255) NULL,
    login         nvarchar(128) NOT NULL DEFAULT ORIGINAL_LOGIN(), -- nobody else may act for this member
    grace_ms      int NOT NULL CHECK (grace_ms >= 0),
    lease_ms      int NULL CHECK (lease_ms > 0),
    joined_at     datetime2(6) NOT NULL DEFAULT SYSUTCDATETIME(),
    lease_until   datetime2(6) NULL,  -- dead when past; NULL where a beacon tells
    missing_since datetime2(6) NULL   -- when somebody first found the beacon gone; cleared when the member returns
);

-- What an operator decided about a resource. No row means: nothing special.
CREATE TABLE {schema}.resource (
    resource_id    nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY,
    cap            int NULL CHECK (cap >= 1),            -- an upper bound on whatever limit is declared
    paused_at      datetime2(6) NULL,                    -- nobody new is let in while set
    stale_after_ms bigint NULL CHECK (stale_after_ms > 0) -- age at which rows without a member are removed
);

-- The queue. A row is a request, waiting or granted; who may proceed follows from the rows ahead alone.
-- {table} is a view of it, so that its trigger numbers the rows of bare participants and costs the routines nothing.
-- Columns that such a row may leave out are nullable, and checked, as a view's NOT NULL columns cannot be left out.
CREATE TABLE {schema}.entry (
    queue_position    bigint IDENTITY NOT NULL PRIMARY KEY NONCLUSTERED,
    resource_id       nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL CHECK (resource_id IS NOT NULL),
    requesting_id     nvarchar(255) NOT NULL,
    access_type       nvarchar(64) COLLATE Latin1_General_100_BIN2 NULL CHECK (access_type IS NOT NULL),
    concurrency_limit int NULL,
    weight            int NULL CHECK (weight IS NOT NULL),
    member_id         int NULL,
    owner             nvarchar(255) NULL,
    request_uid       nvarchar(64) COLLATE Latin1_General_100_BIN2 NULL UNIQUE, -- bare rows are given one
    requested_at      datetime2(6) NULL CHECK (requested_at IS NOT NULL),
    granted_at        datetime2(6) NULL,
    revoked_at        datetime2(6) NULL,
    note              nvarchar(1000) NULL,
    attended_until    datetime2(6) NULL -- where nobody would miss a waiting row: it goes when this is past
);
CREATE UNIQUE CLUSTERED INDEX entry_resource ON {schema}.entry (resource_id, queue_position);
CREATE INDEX entry_member ON {schema}.entry (member_id) INCLUDE (request_uid, revoked_at); -- all that a ping reads
GO
CREATE VIEW {schema}.{table} AS
SELECT NULLIF(queue_position, CAST(0 AS bigint)) AS queue_position, -- so that it may be left out
       resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner, request_uid,
       requested_at, granted_at, revoked_at, note, attended_until
FROM {schema}.entry;
GO

CREATE TABLE {schema}.history (
    resource_id    nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    queue_position bigint NOT NULL,
    requesting_id  nvarchar(255) NOT NULL,
    access_type    nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    weight         int NOT NULL,
    member_id      int NULL,
    owner          nvarchar(255) NULL,
    note           nvarchar(1000) NULL,
    requested_at   datetime2(6) NOT NULL,
    granted_at     datetime2(6) NULL,
    ended_at       datetime2(6) NOT NULL DEFAULT SYSUTCDATETIME(),
    outcome        nvarchar(16) NOT NULL
);
CREATE CLUSTERED INDEX history_ended_at ON {schema}.history (ended_at);
GO
