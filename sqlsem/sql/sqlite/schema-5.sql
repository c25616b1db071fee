-- sqlsem, schema version 5, for SQLite: who operated, and what the work queue needs for limits in time, schedules and tasks that
-- are there once. Programs of versions 3 and 4 go on with these tables.
-- FROZEN once released: later changes go into schema-6.sql.

-- What operators did: one row each, written in the transaction that did it.
CREATE TABLE {schema}_operation (
    operation_id   INTEGER PRIMARY KEY AUTOINCREMENT,
    done_at        REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    login          TEXT,
    host           TEXT,
    pid            INTEGER,
    program        TEXT,
    action         TEXT NOT NULL,  -- pause, resume, cap, stale_after, revoke, reap; retry, cancel, …
    resource_id    TEXT,           -- what it was done to: a resource, and a row of its queue;
    queue_position INTEGER,
    queue_name     TEXT,           -- or a work queue, and a task of it
    task_id        INTEGER,
    old_value      TEXT,
    new_value      TEXT
);
CREATE INDEX {schema}_operation_done ON {schema}_operation (done_at);

ALTER TABLE {schema}_resource ADD COLUMN paused_by TEXT;  -- the operator's login, while paused_at is set
ALTER TABLE {schema}_resource ADD COLUMN cap_by TEXT;     -- and of who set the cap, while there is one

-- Of the work queue -------------------------------------------------------------------------------------------------

-- An attempt that runs for longer than its limit is ended, and has failed.
ALTER TABLE {schema}_task ADD COLUMN time_limit_ms INTEGER CHECK (time_limit_ms > 0);
ALTER TABLE {schema}_task ADD COLUMN cancel_asked_at REAL;  -- its worker ends it, and then it is cancelled
ALTER TABLE {schema}_task ADD COLUMN cancel_asked_by TEXT;
ALTER TABLE {schema}_task ADD COLUMN unique_key TEXT;       -- of the open tasks of a queue one has it
CREATE UNIQUE INDEX {schema}_task_unique ON {schema}_task (queue_name, unique_key) WHERE is_open AND unique_key IS NOT NULL;

-- Tasks that are put again and again, at the times of a cron expression: by any process that watches, and by one of them.
CREATE TABLE {schema}_schedule (
    schedule_name TEXT PRIMARY KEY,
    queue_name    TEXT NOT NULL,
    cron          TEXT NOT NULL,
    time_zone     TEXT NOT NULL DEFAULT 'UTC',  -- a name of the IANA database
    kind          TEXT NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body          TEXT NOT NULL,
    options       TEXT NOT NULL DEFAULT '{}',   -- JSON; of each task: order, note, max_attempts, …
    next_due      REAL,                         -- the next one; NULL: never, as nobody understands the expression
    last_due      REAL,                         -- the latest time for which a task was put
    put_at        REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    put_by        TEXT,
    paused_at     REAL,
    paused_by     TEXT
) WITHOUT ROWID;
