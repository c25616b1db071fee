-- sqlsem, schema version 4, for SQLite: what keeps the cost flat as the work grows. Programs of version 3 go on with these
-- tables.
-- FROZEN once released: later changes go into schema-5.sql.

-- The queue as it was, but for its unique index, which now begins with the member: all rows of one are found by it. SQLite
-- cannot take the old index away, so the table is made anew; whoever holds or waits goes on. (The pragma is for views that
-- somebody may have made of the table: they are left alone.)
CREATE TABLE {table}_4 (
    queue_position    INTEGER PRIMARY KEY AUTOINCREMENT,
    resource_id       TEXT NOT NULL DEFAULT 'default'
        CHECK (resource_id <> '' AND resource_id = trim(resource_id) AND length(resource_id) <= 255),
    requesting_id     TEXT NOT NULL,
    access_type       TEXT NOT NULL DEFAULT 'write',
    concurrency_limit INTEGER CHECK (concurrency_limit >= 1),
    weight            INTEGER NOT NULL DEFAULT 1 CHECK (weight >= 1 AND (concurrency_limit IS NULL OR weight <= concurrency_limit)),
    member_id         INTEGER,
    owner             TEXT,
    request_uid       TEXT,
    requested_at      REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    granted_at        REAL,
    revoked_at        REAL,
    note              TEXT,
    revoked_by        TEXT
);
INSERT INTO {table}_4
SELECT queue_position, resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner, request_uid,
       requested_at, granted_at, revoked_at, note, revoked_by
FROM {table};
-- No position is given out twice.
DELETE FROM sqlite_sequence WHERE name = '{table}_4';
INSERT INTO sqlite_sequence (name, seq) SELECT '{table}_4', seq FROM sqlite_sequence WHERE name = '{table}';
DROP TABLE {table};
PRAGMA legacy_alter_table = ON;
ALTER TABLE {table}_4 RENAME TO {table};
PRAGMA legacy_alter_table = OFF;
CREATE INDEX {table}_queue ON {table} (resource_id, queue_position);
CREATE UNIQUE INDEX {table}_member ON {table} (member_id, request_uid);
-- Bare participants insert rows themselves (those of the client carry a request_uid): none may cut in, or name an owner.
CREATE TRIGGER {table}_bare AFTER INSERT ON {table} WHEN NEW.request_uid IS NULL
BEGIN
    SELECT RAISE(ABORT, 'sqlsem: the table gives the number: leave out queue_position, member_id and granted_at')
    WHERE NEW.member_id IS NOT NULL OR NEW.granted_at IS NOT NULL OR NEW.revoked_at IS NOT NULL
       OR EXISTS (SELECT 1 FROM {table} WHERE queue_position > NEW.queue_position);
END;

-- Any page of the history; the newest end first. (Beside what is asked for there are few outcomes: each is looked at.)
CREATE INDEX {schema}_history_resource ON {schema}_history (resource_id, outcome, ended_at);
CREATE INDEX {schema}_history_outcome ON {schema}_history (outcome, ended_at);

-- How much history is kept at the most, besides for how long.
INSERT OR IGNORE INTO {schema}_setting (name, value) VALUES ('history_rows', '1000000');
