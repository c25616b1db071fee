-- sqlsem, schema version 2, for SQLite: the work queue and the rounds.
-- FROZEN once released: later changes go into schema-3.sql.
-- Times are seconds since 1970 by the host's clock.

-- One row a task, in whatever state. Open ones are to be done, being done, or failed and holding up what comes later. All
-- that claims look at is in one index of those, whose keys do not change from the put to the end.
CREATE TABLE {schema}_task (
    task_id      INTEGER PRIMARY KEY AUTOINCREMENT,
    queue_name   TEXT NOT NULL,
    task_order   INTEGER NOT NULL DEFAULT 0,  -- a task waits for every open task of a lower order
    kind         TEXT NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body         TEXT NOT NULL,
    note         TEXT,
    status       TEXT NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'running', 'finished', 'failed', 'cancelled')),
    is_open      INTEGER NOT NULL DEFAULT 1,
    on_failure   TEXT NOT NULL DEFAULT 'stop' CHECK (on_failure IN ('stop', 'continue')),
    max_attempts INTEGER NOT NULL DEFAULT 1 CHECK (max_attempts >= 1),
    backoff_ms   INTEGER NOT NULL DEFAULT 1000 CHECK (backoff_ms >= 0),
    attempt      INTEGER NOT NULL DEFAULT 0,  -- how often it was claimed: whoever ends an attempt must name it
    failures     INTEGER NOT NULL DEFAULT 0,
    losses       INTEGER NOT NULL DEFAULT 0,  -- attempts whose worker died
    put_uid      TEXT,                 -- made by the client: a repeated put finds its rows
    put_at       REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    ready_at     REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    member_id    INTEGER,                     -- who runs it now
    owner        TEXT,
    claim_uid    TEXT,                 -- made by the client: a repeated claim finds its row
    claimed_at   REAL,
    ended_at     REAL,
    error        TEXT,
    result       TEXT
);
CREATE INDEX {schema}_task_open ON {schema}_task (queue_name, task_order, task_id) WHERE is_open;
CREATE INDEX {schema}_task_running ON {schema}_task (queue_name) WHERE status = 'running';
CREATE INDEX {schema}_task_ended ON {schema}_task (ended_at) WHERE NOT is_open;
CREATE UNIQUE INDEX {schema}_task_put ON {schema}_task (put_uid);

-- One row an attempt that ended.
CREATE TABLE {schema}_task_log (
    task_id    INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,
    outcome    TEXT NOT NULL,  -- finished, failed, lost (the worker died), returned (given back)
    member_id  INTEGER,
    owner      TEXT,
    host       TEXT,
    pid        INTEGER,
    started_at REAL,
    ended_at   REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    error      TEXT,
    result     TEXT,
    PRIMARY KEY (task_id, attempt)
);

-- One row a round: a set of parts that run side by side, and what the last one to succeed starts.
CREATE TABLE {schema}_round (
    round_id     INTEGER PRIMARY KEY AUTOINCREMENT,
    round_name   TEXT NOT NULL,
    window_ms    INTEGER NOT NULL CHECK (window_ms > 0),
    status       TEXT NOT NULL DEFAULT 'open'
        CHECK (status IN ('open', 'failed', 'succeeded', 'expired', 'abandoned')),
    opened_at    REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    ended_at     REAL,
    then_status  TEXT NOT NULL DEFAULT 'none'
        CHECK (then_status IN ('none', 'pending', 'running', 'finished', 'failed')),
    then_kind    TEXT,
    then_body    TEXT,
    then_attempt INTEGER NOT NULL DEFAULT 0,  -- whoever ends an attempt must name it
    then_uid     TEXT,                        -- made by the client: a repeated claim finds its row
    then_member  INTEGER,
    then_owner   TEXT,
    then_started REAL,
    then_ended   REAL,
    then_error   TEXT
);
CREATE INDEX {schema}_round_name ON {schema}_round (round_name, round_id);
CREATE INDEX {schema}_round_then ON {schema}_round (round_name, round_id) WHERE then_status IN ('pending', 'running');

CREATE TABLE {schema}_round_part (
    round_id   INTEGER NOT NULL REFERENCES {schema}_round (round_id) ON DELETE CASCADE,
    part       TEXT NOT NULL,
    status     TEXT NOT NULL DEFAULT 'expected'
        CHECK (status IN ('expected', 'running', 'succeeded', 'failed')),
    attempt    INTEGER NOT NULL DEFAULT 0,    -- how often it was started in this round
    start_uid  TEXT,                          -- made by the client for each start: whoever ends it must name it
    is_last    INTEGER NOT NULL DEFAULT 0,    -- its success was the round's
    member_id  INTEGER,
    owner      TEXT,
    host       TEXT,
    pid        INTEGER,
    started_at REAL,
    ended_at   REAL,
    error      TEXT,
    PRIMARY KEY (round_id, part)
);
CREATE INDEX {schema}_round_part_running ON {schema}_round_part (round_id) WHERE status = 'running';
