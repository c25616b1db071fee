-- sqlsem, schema version 1, for SQLite 3.35 and later. One host only: never on a network file system.
-- FROZEN once released: later changes go into schema-2.sql.
-- Times are seconds since 1970 by the host's clock, which is the server's clock here.

CREATE TABLE {schema}_setting (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO {schema}_setting (name, value)
VALUES ('schema_version', '1'), ('oldest_client', '1'), ('history_days', '30');

-- One row for each process that takes part. Its beacon is a lock on a file beside the database.
CREATE TABLE {schema}_member (
    member_id     INTEGER PRIMARY KEY AUTOINCREMENT,
    beacon        TEXT,
    host          TEXT,
    pid           INTEGER,
    program       TEXT,
    grace_ms      INTEGER NOT NULL CHECK (grace_ms >= 0),
    lease_ms      INTEGER CHECK (lease_ms > 0),
    joined_at     REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    lease_until   REAL,
    missing_since REAL
);

-- What an operator decided about a resource. No row means: nothing special.
CREATE TABLE {schema}_resource (
    resource_id    TEXT PRIMARY KEY,
    cap            INTEGER CHECK (cap >= 1),
    paused_at      REAL,
    stale_after_ms INTEGER CHECK (stale_after_ms > 0)
) WITHOUT ROWID;

-- The queue. A row is a request, waiting or granted; who may proceed follows from the rows ahead alone.
CREATE TABLE {table} (
    queue_position    INTEGER PRIMARY KEY AUTOINCREMENT,
    resource_id       TEXT NOT NULL DEFAULT 'default'
        CHECK (resource_id <> '' AND resource_id = trim(resource_id) AND length(resource_id) <= 255),
    requesting_id     TEXT NOT NULL,
    access_type       TEXT NOT NULL DEFAULT 'write',
    concurrency_limit INTEGER CHECK (concurrency_limit >= 1),
    weight            INTEGER NOT NULL DEFAULT 1 CHECK (weight >= 1 AND (concurrency_limit IS NULL OR weight <= concurrency_limit)),
    member_id         INTEGER,
    owner             TEXT,
    request_uid       TEXT UNIQUE,
    requested_at      REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    granted_at        REAL,
    revoked_at        REAL,
    note              TEXT
);
CREATE INDEX {table}_queue ON {table} (resource_id, queue_position);
-- Bare participants insert rows themselves (those of the client carry a request_uid): none may cut in, or name an owner.
CREATE TRIGGER {table}_bare AFTER INSERT ON {table} WHEN NEW.request_uid IS NULL
BEGIN
    SELECT RAISE(ABORT, 'sqlsem: the table gives the number: leave out queue_position, member_id and granted_at')
    WHERE NEW.member_id IS NOT NULL OR NEW.granted_at IS NOT NULL OR NEW.revoked_at IS NOT NULL
       OR EXISTS (SELECT 1 FROM {table} WHERE queue_position > NEW.queue_position);
END;

CREATE TABLE {schema}_history (
    resource_id    TEXT NOT NULL,
    queue_position INTEGER NOT NULL,
    requesting_id  TEXT NOT NULL,
    access_type    TEXT NOT NULL,
    weight         INTEGER NOT NULL,
    member_id      INTEGER,
    owner          TEXT,
    note           TEXT,
    requested_at   REAL NOT NULL,
    granted_at     REAL,
    ended_at       REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    outcome        TEXT NOT NULL
);
