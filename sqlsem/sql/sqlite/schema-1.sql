-- sqlsem, schema version 1, for SQLite 3.35 and later. One host only: never on a network file system.
-- FROZEN once released: later changes go into schema-2.sql.
-- Times are seconds since 1970, by the host's clock. SQLite has no logins: the names of the host's users stand in the
-- columns for logins.

CREATE TABLE {schema}_setting (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO {schema}_setting (name, value)
VALUES ('schema_version', '1'), ('oldest_client', '1'), ('history_days', '30'), ('history_rows', '1000000');

-- Members -----------------------------------------------------------------------------------------------------------

-- One row for each process that takes part. Its beacon is a lock on a file beside the database.
CREATE TABLE {schema}_member (
    member_id     INTEGER PRIMARY KEY AUTOINCREMENT,
    beacon        TEXT,
    host          TEXT,
    pid           INTEGER,
    program       TEXT,
    login         TEXT,
    grace_ms      INTEGER NOT NULL CHECK (grace_ms >= 0),
    lease_ms      INTEGER CHECK (lease_ms > 0),
    joined_at     REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    -- The last heartbeat that was written here. The time of the beacon's file may show a later one.
    heartbeat_at  REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    lease_until   REAL,
    missing_since REAL
);

-- Resources and their queues ----------------------------------------------------------------------------------------

-- The settings of operators for a resource. No row: no setting.
CREATE TABLE {schema}_resource (
    resource_id    TEXT PRIMARY KEY,
    cap            INTEGER CHECK (cap >= 1),            -- an upper bound on declared limits
    cap_by         TEXT,                                -- the login of the operator that set the cap
    paused_at      REAL,                                -- no request is granted while set
    paused_by      TEXT,                                -- the operator's login, while paused_at is set
    stale_after_ms INTEGER CHECK (stale_after_ms > 0),  -- age at which rows without a member are removed
    ageing_ms      INTEGER                              -- the waiting time that one step of priority is worth; NULL: no priorities
) WITHOUT ROWID;

-- The limit of every resource whose name begins with the prefix and that has no limit of its own; the longest prefix
-- counts. ('tenant:' is shown, and set, as 'tenant:*'; '' is '*'.)
CREATE TABLE {schema}_limit_pattern (
    prefix TEXT PRIMARY KEY,
    cap    INTEGER NOT NULL CHECK (cap >= 1),
    cap_by TEXT,  -- the operator's login
    set_at REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0)
) WITHOUT ROWID;

-- The queue. A row is a request, waiting or granted; the rows ahead of it alone decide whether it may be granted.
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
    request_uid       TEXT,
    requested_at      REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    granted_at        REAL,
    revoked_at        REAL,
    revoked_by        TEXT,  -- the operator's login, while revoked_at is set
    note              TEXT
);
CREATE INDEX {table}_queue ON {table} (resource_id, queue_position);
CREATE UNIQUE INDEX {table}_member ON {table} (member_id, request_uid);  -- also finds all rows of a member
-- Bare participants insert rows themselves, without a request_uid. The trigger refuses a row that would be ahead of
-- others, or that names a member.
CREATE TRIGGER {table}_bare AFTER INSERT ON {table} WHEN NEW.request_uid IS NULL
BEGIN
    SELECT RAISE(ABORT, 'sqlsem: the table gives the number: leave out queue_position, member_id and granted_at')
    WHERE NEW.member_id IS NOT NULL OR NEW.granted_at IS NOT NULL OR NEW.revoked_at IS NOT NULL
       OR EXISTS (SELECT 1 FROM {table} WHERE queue_position > NEW.queue_position);
    SELECT RAISE(ABORT, 'sqlsem: names that begin with rate:, once:, priority: or tasks: are used by sqlsem itself, and those that end with * are patterns; choose another name')
    WHERE NEW.resource_id GLOB 'rate:*' OR NEW.resource_id GLOB 'once:*' OR NEW.resource_id GLOB 'priority:*'
       OR NEW.resource_id GLOB 'tasks:*' OR substr(NEW.resource_id, -1) = '*';
END;

-- The last reader of each resource that began to upgrade. It still upgrades while its row has the access type 'upgrade'.
CREATE TABLE {schema}_upgrade (
    resource_id    TEXT PRIMARY KEY,
    queue_position INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE {schema}_history (
    resource_id       TEXT NOT NULL,
    queue_position    INTEGER NOT NULL,
    requesting_id     TEXT NOT NULL,
    access_type       TEXT NOT NULL,
    concurrency_limit INTEGER,
    weight            INTEGER NOT NULL,
    member_id         INTEGER,
    owner             TEXT,
    host              TEXT,  -- of the owner's member, as are pid, program and login
    pid               INTEGER,
    program           TEXT,
    login             TEXT,
    note              TEXT,
    requested_at      REAL NOT NULL,
    granted_at        REAL,
    ended_at          REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    outcome           TEXT NOT NULL,
    ended_by          TEXT,  -- the login that ended it, if not the owner's
    heartbeat_at      REAL   -- the last heartbeat of an owner that died
);
-- For pages of the history, newest first. (A page of all outcomes reads each of the few outcomes by itself.)
CREATE INDEX {schema}_history_resource ON {schema}_history (resource_id, outcome, ended_at);
CREATE INDEX {schema}_history_outcome ON {schema}_history (outcome, ended_at);

-- One row for each call of an operator, written in the transaction of that call.
CREATE TABLE {schema}_operation (
    operation_id   INTEGER PRIMARY KEY AUTOINCREMENT,
    done_at        REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    login          TEXT,
    host           TEXT,
    pid            INTEGER,
    program        TEXT,
    action         TEXT NOT NULL,  -- pause, resume, cap, stale_after, revoke, reap; retry, cancel, …
    resource_id    TEXT,           -- the object of the call: a resource, or a row of its queue;
    queue_position INTEGER,
    queue_name     TEXT,           -- or a work queue, or a task of it
    task_id        INTEGER,
    old_value      TEXT,
    new_value      TEXT
);
CREATE INDEX {schema}_operation_done ON {schema}_operation (done_at);

-- Rates and periods -------------------------------------------------------------------------------------------------

-- One row for each window that a client has declared for a rate. Times count from 1970, by the host's clock.
CREATE TABLE {schema}_rate_window (
    resource_id TEXT NOT NULL,  -- 'rate:' and the rate's name
    window_ms   INTEGER NOT NULL CHECK (window_ms >= 1),
    rate_limit  INTEGER CHECK (rate_limit >= 1),           -- in one window; the limit in effect at the last use; NULL: none
    burst       INTEGER,                                   -- the burst in effect at the last use
    cap         INTEGER CHECK (cap >= 1),                  -- an operator's upper bound for rate_limit, and its default
    cap_by      TEXT,
    seen_ms     INTEGER NOT NULL,                          -- the time of the last use
    full_us     INTEGER,                                   -- with a burst: when the whole burst is available again
    -- Counters since the window was first declared.
    taken       INTEGER NOT NULL DEFAULT 0,
    returned    INTEGER NOT NULL DEFAULT 0,                -- of that, as the cost was less in the end
    waits       INTEGER NOT NULL DEFAULT 0,                -- requests that were not granted at once
    PRIMARY KEY (resource_id, window_ms)
) WITHOUT ROWID;

-- The use of a rate in a hundredth part of a window. It counts until all of that part is out of the window. So do the
-- lowest limit and burst that requests have declared for this window in that time.
CREATE TABLE {schema}_rate_slot (
    resource_id TEXT NOT NULL,
    window_ms   INTEGER NOT NULL,
    slot        INTEGER NOT NULL,  -- the number of the hundredth part since 1970
    used        INTEGER NOT NULL CHECK (used >= 0),
    rate_limit  INTEGER,           -- NULL: no limit was declared for this window
    burst       INTEGER,
    PRIMARY KEY (resource_id, window_ms, slot)
) WITHOUT ROWID;

-- The last run of each name that runs once per period (see PostgreSQL's once.sql).
CREATE TABLE {schema}_once_run (
    once_name      TEXT PRIMARY KEY,
    granted_at     REAL NOT NULL,     -- the grant of that run: it decides the period, and never goes back
    done_at        REAL NOT NULL,
    queue_position INTEGER NOT NULL,  -- of that run: its fence
    requesting_id  TEXT NOT NULL,
    login          TEXT
) WITHOUT ROWID;

-- Locks that end with a transaction, and locks that are handed over -------------------------------------------------

-- A transaction that releases a lock inserts a row here. Other sessions see the row once the transaction has committed.
-- Only the owner of the lock knows the marker.
CREATE TABLE {schema}_commit_marker (
    marker    TEXT PRIMARY KEY,
    marked_at REAL NOT NULL
) WITHOUT ROWID;

-- One row for each hand-over. Until adopt, the handed-over rows of the queue belong to a member that exists only for
-- this hand-over (member_id), with a lease of ttl_ms. The token itself is not stored. Old rows are kept for a day, so
-- that a failed adopt can give the reason.
CREATE TABLE {schema}_handover (
    token_hash     TEXT PRIMARY KEY,  -- SHA-256, in hexadecimal digits
    member_id      INTEGER NOT NULL,
    row_count      INTEGER NOT NULL,  -- how many rows were handed over
    resource_id    TEXT NOT NULL,     -- the first of them, for messages
    queue_position INTEGER NOT NULL,
    given_by       TEXT NOT NULL,     -- the giver's login
    given_to       TEXT NOT NULL,     -- the login that may adopt it, beside the giver
    given_at       REAL NOT NULL,
    ttl_ms         INTEGER NOT NULL CHECK (ttl_ms > 0),
    adopted_at     REAL,
    adopted_by     INTEGER,           -- the member that adopted it
    adopted_uid    TEXT,              -- made by the client: a repeated call finds what it did
    adopter        TEXT               -- host:pid and program, for messages
);
CREATE INDEX {schema}_handover_given ON {schema}_handover (given_at);

-- The work queue ----------------------------------------------------------------------------------------------------

-- One row for each task, in any state. A task is open while it is pending, running, or failed and blocking later
-- orders.
CREATE TABLE {schema}_task (
    task_id         INTEGER PRIMARY KEY AUTOINCREMENT,
    queue_name      TEXT NOT NULL,
    task_order      INTEGER NOT NULL DEFAULT 0,  -- a task waits for every open task of a lower order
    -- Workers are divided between the keys of a queue. '': no key, in a queue that has keys, limits or priorities;
    -- NULL: no key, in any other queue.
    task_key        TEXT,
    task_priority   INTEGER NOT NULL DEFAULT 0,  -- among the tasks of its key; higher ones first
    task_hash       TEXT,                        -- eight digits of the key's hash, then the key: no client can choose its order
    unique_key      TEXT,                        -- at most one open task of a queue has it
    kind            TEXT NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body            TEXT NOT NULL,
    note            TEXT,
    status          TEXT NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'running', 'finished', 'failed', 'cancelled')),
    is_open         INTEGER NOT NULL DEFAULT 1,
    on_failure      TEXT NOT NULL DEFAULT 'stop' CHECK (on_failure IN ('stop', 'continue')),
    max_attempts    INTEGER NOT NULL DEFAULT 1 CHECK (max_attempts >= 1),
    backoff_ms      INTEGER NOT NULL DEFAULT 1000 CHECK (backoff_ms >= 0),
    time_limit_ms   INTEGER CHECK (time_limit_ms > 0),  -- an attempt that runs for longer is ended, and has failed
    attempt         INTEGER NOT NULL DEFAULT 0,  -- the number of claims; a worker that ends an attempt must name it
    failures        INTEGER NOT NULL DEFAULT 0,
    losses          INTEGER NOT NULL DEFAULT 0,  -- attempts whose worker died
    put_uid         TEXT,                        -- made by the client: a repeated put finds its rows
    put_at          REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    put_by          TEXT,
    ready_at        REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    member_id       INTEGER,                     -- the member that runs it now
    owner           TEXT,
    host            TEXT,                        -- of the member that runs it, or ran it last, as are pid and login
    pid             INTEGER,
    login           TEXT,
    claim_uid       TEXT,                        -- made by the client: a repeated claim finds its row
    claimed_at      REAL,
    cancel_asked_at REAL,                        -- set: the worker ends the task, which is then cancelled
    cancel_asked_by TEXT,
    ended_at        REAL,
    error           TEXT,
    result          TEXT,
    -- For a task with locks ready_at is the end of time (253370764800, the year 9999), so that claims of tasks without
    -- locks skip it.
    lock_count      INTEGER,                     -- how many; NULL: none
    locks_pending   INTEGER,                     -- how many are not granted yet; NULL: none is enqueued
    enqueue_locks_at REAL,                       -- when its locks may be enqueued
    CHECK ((task_key IS NULL) = (task_hash IS NULL))
);
-- Claims read only these indexes of open tasks. Their keys do not change from put to end.
CREATE INDEX {schema}_task_open ON {schema}_task (queue_name, task_order, task_id) WHERE is_open = 1;
CREATE INDEX {schema}_task_by_priority ON {schema}_task (queue_name, task_order, task_priority DESC, task_id) WHERE is_open = 1 AND task_priority <> 0;
CREATE INDEX {schema}_task_running ON {schema}_task (queue_name) WHERE status = 'running';
CREATE INDEX {schema}_task_blocked ON {schema}_task (queue_name, task_order, locks_pending, task_priority DESC, task_id)
    WHERE is_open = 1 AND status = 'pending' AND lock_count IS NOT NULL;
CREATE INDEX {schema}_task_fair ON {schema}_task (queue_name, task_order, task_hash, task_priority DESC, task_id)
    WHERE is_open = 1 AND status = 'pending' AND task_hash IS NOT NULL AND lock_count IS NULL;
CREATE INDEX {schema}_task_plain ON {schema}_task (queue_name, task_order, task_id)
    WHERE is_open = 1 AND status = 'pending' AND task_key IS NULL AND lock_count IS NULL;
-- Only tasks that were put for later, or wait for their next attempt: other tasks cost nothing here.
CREATE INDEX {schema}_task_later ON {schema}_task (queue_name, task_order, ready_at)
    WHERE status = 'pending' AND lock_count IS NULL AND ready_at > put_at;
CREATE INDEX {schema}_task_ended ON {schema}_task (ended_at) WHERE is_open = 0;
CREATE UNIQUE INDEX {schema}_task_put ON {schema}_task (put_uid);
CREATE UNIQUE INDEX {schema}_task_unique ON {schema}_task (queue_name, unique_key) WHERE is_open = 1 AND unique_key IS NOT NULL;

-- One row for each ended attempt.
CREATE TABLE {schema}_task_log (
    task_id    INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,
    outcome    TEXT NOT NULL,  -- finished, failed, lost (the worker died), returned (given back)
    member_id  INTEGER,
    owner      TEXT,
    host       TEXT,
    pid        INTEGER,
    login      TEXT,
    started_at REAL,
    ended_at   REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    error      TEXT,
    result     TEXT,
    PRIMARY KEY (task_id, attempt)
);

-- The limits and rates of a queue. There is a row if anything is set for the queue or one of its keys.
CREATE TABLE {schema}_queue_setting (
    queue_name TEXT PRIMARY KEY,
    task_limit INTEGER CHECK (task_limit >= 0),  -- running tasks: of the queue,
    key_limit  INTEGER CHECK (key_limit >= 0),   -- and of each key
    -- How many tasks may start within task_ms (of the queue), and within key_ms (of each key).
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
-- The keys with a weight. Every claim reads them, whatever key it begins with.
CREATE INDEX {schema}_queue_key_heavy ON {schema}_queue_key (queue_name, weight DESC) WHERE weight > 1;

-- A queue or key whose rate a claim found used up: claims skip it until free_ms. (The use itself is in rate_slot.)
CREATE TABLE {schema}_queue_wait (
    queue_name TEXT NOT NULL,
    task_key   TEXT NOT NULL,     -- '': the queue itself
    since_ms   INTEGER NOT NULL,  -- from 1970, by the host's clock
    free_ms    INTEGER NOT NULL,
    PRIMARY KEY (queue_name, task_key)
) WITHOUT ROWID;

-- The locks of tasks: see the comments of PostgreSQL's blocked_tasks.sql.
CREATE TABLE {schema}_task_lock (
    task_id           INTEGER NOT NULL,
    number            INTEGER NOT NULL,
    queue_name        TEXT NOT NULL,
    resource_id       TEXT NOT NULL,
    access_type       TEXT NOT NULL,
    concurrency_limit INTEGER,
    weight            INTEGER NOT NULL,
    queue_position    INTEGER,                     -- of its row in the lock's queue; NULL: none
    waits             INTEGER NOT NULL DEFAULT 0,  -- that row is not granted yet
    PRIMARY KEY (task_id, number)
) WITHOUT ROWID;
CREATE INDEX {schema}_task_lock_waits
    ON {schema}_task_lock (queue_name, resource_id, access_type, weight, concurrency_limit, queue_position) WHERE waits;

-- The member that owns the lock requests of a queue's blocked tasks.
CREATE TABLE {schema}_queue_proxy (
    queue_name TEXT PRIMARY KEY,
    member_id  INTEGER NOT NULL
) WITHOUT ROWID;

-- Remove the lock requests of a task when an attempt at it ends, by whatever statement, or when a task that waits for
-- locks is cancelled or becomes pending anew. A pending task then waits for its locks again. (A lock that was handed
-- over and adopted no longer belongs to the task, and stays.)
CREATE TRIGGER {schema}_on_task_blocked AFTER UPDATE OF status ON {schema}_task
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
                                        ELSE (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name) END
      AND (OLD.status <> 'running' OR t.request_uid = OLD.claim_uid || '.' || l.number);
    DELETE FROM {table}
    WHERE queue_position IN (SELECT l.queue_position FROM {schema}_task_lock AS l
                             JOIN {table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
                             WHERE l.task_id = OLD.task_id
                               AND (OLD.status <> 'running' OR t.request_uid = OLD.claim_uid || '.' || l.number))
      AND member_id = CASE OLD.status WHEN 'running' THEN OLD.member_id
                                      ELSE (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name) END;
    UPDATE {schema}_task_lock SET queue_position = NULL, waits = 0 WHERE task_id = OLD.task_id;
    UPDATE {schema}_task SET locks_pending = NULL WHERE task_id = OLD.task_id;
    UPDATE {schema}_task
    SET enqueue_locks_at = CASE WHEN ready_at < 253370764800.0 THEN ready_at ELSE (julianday('now') - 2440587.5) * 86400.0 END,
        ready_at = 253370764800.0
    WHERE task_id = OLD.task_id AND status = 'pending';
END;

-- Remove the lock requests of a task that waits for locks and was deleted by hand.
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
      AND t.member_id = (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name);
    DELETE FROM {table}
    WHERE queue_position IN (SELECT queue_position FROM {schema}_task_lock WHERE task_id = OLD.task_id)
      AND member_id = (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name);
    DELETE FROM {schema}_task_lock WHERE task_id = OLD.task_id;
END;

-- Tasks that are put at the times of a cron expression, by one of the processes that watch for due schedules.
CREATE TABLE {schema}_schedule (
    schedule_name TEXT PRIMARY KEY,
    queue_name    TEXT NOT NULL,
    cron          TEXT NOT NULL,
    time_zone     TEXT NOT NULL DEFAULT 'UTC',  -- a name of the IANA database
    kind          TEXT NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body          TEXT NOT NULL,
    options       TEXT NOT NULL DEFAULT '{}',   -- JSON; of each task: order, note, max_attempts, …
    next_due      REAL NOT NULL,                -- the next time
    last_due      REAL,                         -- the latest time for which a task was put
    put_at        REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    put_by        TEXT,
    paused_at     REAL,
    paused_by     TEXT
) WITHOUT ROWID;

-- Batches ------------------------------------------------------------------------------------------------------------

-- One row for each batch: a set of parts that run side by side, and the callback that the last part to succeed starts.
CREATE TABLE {schema}_batch (
    batch_id         INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_name       TEXT NOT NULL,
    window_ms        INTEGER NOT NULL CHECK (window_ms BETWEEN 1 AND 315360000000),
    status           TEXT NOT NULL DEFAULT 'open'
        CHECK (status IN ('open', 'failed', 'succeeded', 'expired', 'abandoned')),
    opened_at        REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    opened_by        TEXT,
    ended_at         REAL,
    callback_status  TEXT NOT NULL DEFAULT 'none'
        CHECK (callback_status IN ('none', 'pending', 'running', 'finished', 'failed')),
    callback_kind    TEXT,
    callback_body    TEXT,
    callback_attempt INTEGER NOT NULL DEFAULT 0,  -- a member that ends an attempt must name it
    callback_uid     TEXT,                        -- made by the client: a repeated claim finds its row
    callback_member  INTEGER,
    callback_owner   TEXT,
    callback_kept_by TEXT,                        -- the login that stored the callback
    callback_login   TEXT,                        -- the login that ran it last
    callback_started REAL,
    callback_ended   REAL,
    callback_error   TEXT
);
CREATE INDEX {schema}_batch_name ON {schema}_batch (batch_name, batch_id);
CREATE INDEX {schema}_batch_callback ON {schema}_batch (batch_name, batch_id) WHERE callback_status IN ('pending', 'running');

CREATE TABLE {schema}_batch_part (
    batch_id   INTEGER NOT NULL REFERENCES {schema}_batch (batch_id) ON DELETE CASCADE,
    part       TEXT NOT NULL,
    status     TEXT NOT NULL DEFAULT 'expected'
        CHECK (status IN ('expected', 'running', 'succeeded', 'failed')),
    attempt    INTEGER NOT NULL DEFAULT 0,    -- the number of starts in this batch
    start_uid  TEXT,                          -- made by the client for each start: a call that ends the part must name it
    is_last    INTEGER NOT NULL DEFAULT 0,    -- its success completed the batch
    member_id  INTEGER,
    owner      TEXT,
    host       TEXT,
    pid        INTEGER,
    login      TEXT,
    started_at REAL,
    ended_at   REAL,
    error      TEXT,
    PRIMARY KEY (batch_id, part)
);
CREATE INDEX {schema}_batch_part_running ON {schema}_batch_part (batch_id) WHERE status = 'running';
