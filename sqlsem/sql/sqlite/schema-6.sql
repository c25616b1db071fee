-- sqlsem, schema version 6, for SQLite: limits that the server owns, rates, locks that travel, tasks with locks and keys.
-- Programs of versions 3 to 5 go on with these tables.
-- FROZEN once released: later changes go into schema-7.sql.

-- Limits that the server owns ---------------------------------------------------------------------------------------

-- The limit of every resource whose name begins so and that has none of its own; of several the longest counts. ('tenant:' is
-- shown, and set, as 'tenant:*'; '' is '*'.)
CREATE TABLE {schema}_limit_pattern (
    prefix TEXT PRIMARY KEY,
    cap    INTEGER NOT NULL CHECK (cap >= 1),
    cap_by TEXT,  -- an operator's login
    set_at REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0)
) WITHOUT ROWID;

-- Priorities --------------------------------------------------------------------------------------------------------

-- What one step of priority is worth, in milliseconds of waiting; NULL: requests of the resource have no priorities.
ALTER TABLE {schema}_resource ADD COLUMN ageing_ms INTEGER;

-- Rates and periods -------------------------------------------------------------------------------------------------

-- What is known of a rate, for each window that anybody has declared for it. Times are of the host's clock, since 1970.
CREATE TABLE {schema}_rate_window (
    resource_id TEXT NOT NULL,  -- 'rate:' and the rate's name
    window_ms   INTEGER NOT NULL CHECK (window_ms >= 1),
    rate_limit  INTEGER NOT NULL CHECK (rate_limit >= 1),  -- in so long, as it was declared last
    seen_ms     INTEGER NOT NULL,                          -- when it was last taken from
    full_us     INTEGER,                                   -- with a burst: when all of that may be had again
    -- Since the window is known; only ever more.
    taken       INTEGER NOT NULL DEFAULT 0,
    returned    INTEGER NOT NULL DEFAULT 0,                -- of that, as it was less in the end
    waits       INTEGER NOT NULL DEFAULT 0,                -- how often it was not there at once
    PRIMARY KEY (resource_id, window_ms)
) WITHOUT ROWID;

-- What was used of a rate, in a hundredth part of a window. It counts until all of that part is out of the window.
CREATE TABLE {schema}_rate_slot (
    resource_id TEXT NOT NULL,
    window_ms   INTEGER NOT NULL,
    slot        INTEGER NOT NULL,  -- since 1970
    used        INTEGER NOT NULL CHECK (used >= 0),
    PRIMARY KEY (resource_id, window_ms, slot)
) WITHOUT ROWID;

-- What runs once per period: when it was done last. One row a name (see PostgreSQL's once.sql).
CREATE TABLE {schema}_once_run (
    once_name      TEXT PRIMARY KEY,
    granted_at     REAL NOT NULL,  -- when the turn of that run came, which tells the period; it never goes back
    done_at        REAL NOT NULL,
    queue_position INTEGER NOT NULL,  -- of that run: its fence
    requesting_id  TEXT NOT NULL,
    login          TEXT
) WITHOUT ROWID;

-- Locks that go with a transaction ------------------------------------------------------------------------------------

-- What transactions leave in which a lock was to go: there when they have been committed. Nobody else knows the words.
CREATE TABLE {schema}_departure (
    word    TEXT PRIMARY KEY,
    left_at REAL NOT NULL
) WITHOUT ROWID;

-- Locks that travel -------------------------------------------------------------------------------------------------
-- From hand_over to adopt the rows belong to a member of their own, in transit, which lives by a lease of ttl_ms: member_id. The
-- token itself is nowhere. What is over is kept for a day, to say why a token cannot be adopted.
CREATE TABLE {schema}_handover (
    token_hash     TEXT PRIMARY KEY,  -- SHA-256, in hexadecimal digits
    member_id      INTEGER NOT NULL,
    row_count      INTEGER NOT NULL,  -- how many rows it has
    resource_id    TEXT NOT NULL,     -- the first of them, for messages
    queue_position INTEGER NOT NULL,
    given_by       TEXT NOT NULL,     -- the giver's login
    given_to       TEXT NOT NULL,     -- who may adopt it, beside the giver
    given_at       REAL NOT NULL,
    ttl_ms         INTEGER NOT NULL CHECK (ttl_ms > 0),
    adopted_at     REAL,
    adopted_by     INTEGER,           -- the member that did
    adopted_uid    TEXT,              -- made by the client: a repeated call finds what it did
    adopter        TEXT               -- host:pid and program, for messages
);
CREATE INDEX {schema}_handover_given ON {schema}_handover (given_at);

-- Tasks with locks and keys -----------------------------------------------------------------------------------------

-- Whose task it is: workers share themselves out between the keys of a queue. '': nobody's, in a queue that has keys, limits or
-- priorities; NULL: put as in any other queue.
ALTER TABLE {schema}_task ADD COLUMN task_key TEXT;
ALTER TABLE {schema}_task ADD COLUMN task_priority INTEGER NOT NULL DEFAULT 0;  -- among the tasks of its key; higher ones first
-- The key behind eight digits of its hash: in no order that anyone chose.
ALTER TABLE {schema}_task ADD COLUMN task_turn TEXT CHECK ((task_key IS NULL) = (task_turn IS NULL));
-- Of a task with locks: it is ready at the end of time (253370764800, the year 9999), so that only those claim it who know of locks.
ALTER TABLE {schema}_task ADD COLUMN lock_count INTEGER;  -- how many; NULL: none
ALTER TABLE {schema}_task ADD COLUMN locks_left INTEGER;  -- how many wait for their turn; NULL: it stands in no line
ALTER TABLE {schema}_task ADD COLUMN asks_at REAL;        -- when it may stand in the lines
CREATE INDEX {schema}_task_fair ON {schema}_task (queue_name, task_order, task_turn, task_priority DESC, task_id)
    WHERE is_open AND status = 'pending' AND task_turn IS NOT NULL AND lock_count IS NULL;
CREATE INDEX {schema}_task_by_priority ON {schema}_task (queue_name, task_order, task_priority DESC, task_id) WHERE is_open AND task_priority <> 0;
CREATE INDEX {schema}_task_plain ON {schema}_task (queue_name, task_order, task_id)
    WHERE is_open AND status = 'pending' AND task_key IS NULL AND lock_count IS NULL;
-- Those alone that were put for later, or wait for their next attempt: the others cost nothing here.
CREATE INDEX {schema}_task_later ON {schema}_task (queue_name, task_order, ready_at)
    WHERE status = 'pending' AND lock_count IS NULL AND ready_at > put_at;

-- How many tasks of a queue may run at a time. There is a row where anything is set, of the queue or of a key.
CREATE TABLE {schema}_queue_setting (
    queue_name TEXT PRIMARY KEY,
    task_limit INTEGER CHECK (task_limit >= 0),  -- of all
    key_limit  INTEGER CHECK (key_limit >= 0),   -- of each key
    -- How many may be started in so many milliseconds: of all, and of each key.
    task_rate  INTEGER CHECK (task_rate >= 1),
    task_ms    INTEGER CHECK (task_ms >= 1),
    key_rate   INTEGER CHECK (key_rate >= 1),
    key_ms     INTEGER CHECK (key_ms >= 1),
    set_at     REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    set_by     TEXT,
    CHECK ((task_rate IS NULL) = (task_ms IS NULL) AND (key_rate IS NULL) = (key_ms IS NULL))
) WITHOUT ROWID;

CREATE TABLE {schema}_queue_key (
    queue_name TEXT NOT NULL,
    task_key   TEXT NOT NULL,
    task_limit INTEGER CHECK (task_limit >= 0),  -- of this key, instead of key_limit
    weight     INTEGER CHECK (weight >= 1),      -- its share of the workers; NULL: 1
    task_rate  INTEGER CHECK (task_rate >= 1),   -- of this key, instead of key_rate
    task_ms    INTEGER CHECK (task_ms >= 1),
    set_at     REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    set_by     TEXT,
    PRIMARY KEY (queue_name, task_key),
    CHECK ((task_rate IS NULL) = (task_ms IS NULL))
) WITHOUT ROWID;

-- Those that claims look at wherever they begin.
CREATE INDEX {schema}_queue_key_heavy ON {schema}_queue_key (queue_name, weight DESC) WHERE weight > 1;

-- Whose rate was found used up by a claim: not looked at again until then. (What was used stands in rate_slot.)
CREATE TABLE {schema}_queue_wait (
    queue_name TEXT NOT NULL,
    task_key   TEXT NOT NULL,     -- '': the queue itself
    since_ms   INTEGER NOT NULL,  -- by the host's clock, since 1970
    free_ms    INTEGER NOT NULL,
    PRIMARY KEY (queue_name, task_key)
) WITHOUT ROWID;

-- Tasks with locks: see the comments of PostgreSQL's parked.sql.
CREATE INDEX {schema}_task_parked ON {schema}_task (queue_name, task_order, locks_left, task_priority DESC, task_id)
    WHERE is_open AND status = 'pending' AND lock_count IS NOT NULL;

-- What the tasks ask for that are put with locks.
CREATE TABLE {schema}_task_lock (
    task_id           INTEGER NOT NULL,
    number            INTEGER NOT NULL,
    queue_name        TEXT NOT NULL,
    resource_id       TEXT NOT NULL,
    access_type       TEXT NOT NULL,
    concurrency_limit INTEGER,
    weight            INTEGER NOT NULL,
    queue_position    INTEGER,                     -- of its row in the line; NULL: none
    waits             INTEGER NOT NULL DEFAULT 0,  -- the turn of that row has not come
    PRIMARY KEY (task_id, number)
) WITHOUT ROWID;
CREATE INDEX {schema}_task_lock_waits
    ON {schema}_task_lock (queue_name, resource_id, access_type, weight, concurrency_limit, queue_position) WHERE waits;

-- In whose name the parked tasks of a queue stand in the lines of their locks.
CREATE TABLE {schema}_parking (
    queue_name TEXT PRIMARY KEY,
    member_id  INTEGER NOT NULL
) WITHOUT ROWID;

-- An attempt at a task with locks has ended, by whatever statement, of whatever version of the programs, or a parked one is taken
-- away, or pending again: its rows go, and what is pending is parked.
-- (What it has handed over, and adopted again, is not the task's any more.)
CREATE TRIGGER {schema}_task_parks AFTER UPDATE OF status ON {schema}_task
WHEN OLD.lock_count IS NOT NULL AND OLD.status <> NEW.status AND NOT (OLD.status = 'pending' AND NEW.status = 'running')
BEGIN
    INSERT INTO {schema}_history (resource_id, queue_position, requesting_id, access_type, concurrency_limit, weight, member_id,
                                  owner, note, requested_at, granted_at, outcome, host, pid, program, login, ended_by)
    SELECT t.resource_id, t.queue_position, t.requesting_id, t.access_type, t.concurrency_limit, t.weight, t.member_id,
           t.owner, t.note, t.requested_at, t.granted_at,
           CASE WHEN t.revoked_at IS NOT NULL THEN 'revoked' WHEN OLD.status = 'running' THEN 'released' ELSE 'cancelled' END,
           m.host, m.pid, m.program, m.login, t.revoked_by
    FROM {schema}_task_lock AS l
    JOIN {table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
    LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
    WHERE l.task_id = OLD.task_id
      AND t.member_id = CASE OLD.status WHEN 'running' THEN OLD.member_id
                                        ELSE (SELECT member_id FROM {schema}_parking WHERE queue_name = OLD.queue_name) END
      AND (OLD.status <> 'running' OR t.request_uid = OLD.claim_uid || '.' || l.number);
    DELETE FROM {table}
    WHERE queue_position IN (SELECT l.queue_position FROM {schema}_task_lock AS l
                             JOIN {table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
                             WHERE l.task_id = OLD.task_id
                               AND (OLD.status <> 'running' OR t.request_uid = OLD.claim_uid || '.' || l.number))
      AND member_id = CASE OLD.status WHEN 'running' THEN OLD.member_id
                                      ELSE (SELECT member_id FROM {schema}_parking WHERE queue_name = OLD.queue_name) END;
    UPDATE {schema}_task_lock SET queue_position = NULL, waits = 0 WHERE task_id = OLD.task_id;
    UPDATE {schema}_task SET locks_left = NULL WHERE task_id = OLD.task_id;
    UPDATE {schema}_task
    SET asks_at = CASE WHEN ready_at < 253370764800.0 THEN ready_at ELSE (julianday('now') - 2440587.5) * 86400.0 END,
        ready_at = 253370764800.0
    WHERE task_id = OLD.task_id AND status = 'pending';
END;

-- Somebody deletes a parked task by hand.
CREATE TRIGGER {schema}_task_goes BEFORE DELETE ON {schema}_task
WHEN OLD.lock_count IS NOT NULL AND OLD.status = 'pending'
BEGIN
    INSERT INTO {schema}_history (resource_id, queue_position, requesting_id, access_type, concurrency_limit, weight, member_id,
                                  owner, note, requested_at, granted_at, outcome, ended_by)
    SELECT t.resource_id, t.queue_position, t.requesting_id, t.access_type, t.concurrency_limit, t.weight, t.member_id,
           t.owner, t.note, t.requested_at, t.granted_at,
           CASE WHEN t.revoked_at IS NULL THEN 'cancelled' ELSE 'revoked' END, t.revoked_by
    FROM {schema}_task_lock AS l
    JOIN {table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
    WHERE l.task_id = OLD.task_id
      AND t.member_id = (SELECT member_id FROM {schema}_parking WHERE queue_name = OLD.queue_name);
    DELETE FROM {table}
    WHERE queue_position IN (SELECT queue_position FROM {schema}_task_lock WHERE task_id = OLD.task_id)
      AND member_id = (SELECT member_id FROM {schema}_parking WHERE queue_name = OLD.queue_name);
    DELETE FROM {schema}_task_lock WHERE task_id = OLD.task_id;
END;
