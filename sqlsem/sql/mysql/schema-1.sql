-- sqlsem, schema version 1, for MariaDB 10.6 and later and MySQL 8.0.19 and later (InnoDB).
-- FROZEN once released: later changes go into schema-2.sql.
-- Times are seconds since 1970, by the server's clock. The comments of SQLite's schema-1.sql explain the columns.
-- (DDL commits by itself here. So that an interrupted script can be run again, each statement does nothing if its object
-- exists, and the settings, by which clients know the tables, come last.)
-- where {options} is ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */
-- where {name} is VARCHAR(255)
-- where {word} is VARCHAR(32)
-- where {time} is DOUBLE
-- where {now} is DOUBLE NOT NULL DEFAULT (TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)

-- One row. A transaction that writes changes it first, and so excludes all others until it ends: the gate. Positions
-- come from here: AUTO_INCREMENT repeats numbers on some servers, and differs on the nodes of a cluster.
CREATE TABLE IF NOT EXISTS {schema}_gate (
    gate_id       TINYINT NOT NULL PRIMARY KEY CHECK (gate_id = 1),
    writes        BIGINT NOT NULL DEFAULT 0,
    last_position BIGINT NOT NULL DEFAULT 0
) {options};
INSERT INTO {schema}_gate (gate_id) VALUES (1) ON DUPLICATE KEY UPDATE gate_id = 1;

-- Members -----------------------------------------------------------------------------------------------------------

-- The beacon of a member is a lock by name (GET_LOCK) of its main session.
CREATE TABLE IF NOT EXISTS {schema}_member (
    member_id     BIGINT NOT NULL PRIMARY KEY AUTO_INCREMENT,
    beacon        {word},
    host          {name},
    pid           BIGINT,
    program       {name},
    login         {name},
    grace_ms      BIGINT NOT NULL CHECK (grace_ms >= 0),
    lease_ms      BIGINT CHECK (lease_ms > 0),
    joined_at     {now},
    heartbeat_at  {now},
    lease_until   {time},
    missing_since {time}
) {options};

-- Resources and their queues ----------------------------------------------------------------------------------------

CREATE TABLE IF NOT EXISTS {schema}_resource (
    resource_id    {name} NOT NULL PRIMARY KEY,
    cap            BIGINT CHECK (cap >= 1),
    cap_by         {name},
    paused_at      {time},
    paused_by      {name},
    stale_after_ms BIGINT CHECK (stale_after_ms > 0),
    ageing_ms      BIGINT
) {options};

CREATE TABLE IF NOT EXISTS {schema}_limit_pattern (
    prefix {name} NOT NULL PRIMARY KEY,
    cap    BIGINT NOT NULL CHECK (cap >= 1),
    cap_by {name},
    set_at {now}
) {options};

-- The queue. A row is a request, waiting or granted; the rows ahead of it alone decide whether it may be granted.
CREATE TABLE IF NOT EXISTS {table} (
    queue_position    BIGINT NOT NULL DEFAULT 0 PRIMARY KEY,
    resource_id       {name} NOT NULL DEFAULT 'default' CHECK (resource_id <> '' AND resource_id = TRIM(resource_id)),
    requesting_id     {name} NOT NULL,
    access_type       {word} NOT NULL DEFAULT 'write',
    concurrency_limit BIGINT CHECK (concurrency_limit >= 1),
    weight            BIGINT NOT NULL DEFAULT 1 CHECK (weight >= 1),
    member_id         BIGINT,
    owner             {name},
    request_uid       {name},
    requested_at      {now},
    granted_at        {time},
    revoked_at        {time},
    revoked_by        {name},
    note              TEXT,
    CHECK (concurrency_limit IS NULL OR weight <= concurrency_limit),
    INDEX {table}_queue (resource_id, queue_position),
    UNIQUE INDEX {table}_member (member_id, request_uid)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_upgrade (
    resource_id    {name} NOT NULL PRIMARY KEY,
    queue_position BIGINT NOT NULL
) {options};

CREATE TABLE IF NOT EXISTS {schema}_history (
    history_id        BIGINT NOT NULL PRIMARY KEY AUTO_INCREMENT,
    resource_id       {name} NOT NULL,
    queue_position    BIGINT NOT NULL,
    requesting_id     {name} NOT NULL,
    access_type       {word} NOT NULL,
    concurrency_limit BIGINT,
    weight            BIGINT NOT NULL,
    member_id         BIGINT,
    owner             {name},
    host              {name},
    pid               BIGINT,
    program           {name},
    login             {name},
    note              TEXT,
    requested_at      {time} NOT NULL,
    granted_at        {time},
    ended_at          {now},
    outcome           {word} NOT NULL,
    ended_by          {name},
    heartbeat_at      {time},
    INDEX history_resource (resource_id, outcome, ended_at),
    INDEX history_outcome (outcome, ended_at)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_operation (
    operation_id   BIGINT NOT NULL PRIMARY KEY AUTO_INCREMENT,
    done_at        {now},
    login          {name},
    host           {name},
    pid            BIGINT,
    program        {name},
    action         {word} NOT NULL,
    resource_id    {name},
    queue_position BIGINT,
    queue_name     {name},
    task_id        BIGINT,
    old_value      TEXT,
    new_value      TEXT,
    INDEX operation_done (done_at)
) {options};

-- Rates and periods -------------------------------------------------------------------------------------------------

CREATE TABLE IF NOT EXISTS {schema}_rate_window (
    resource_id {name} NOT NULL,
    window_ms   BIGINT NOT NULL CHECK (window_ms >= 1),
    rate_limit  BIGINT CHECK (rate_limit >= 1),
    burst       BIGINT,
    cap         BIGINT CHECK (cap >= 1),
    cap_by      {name},
    seen_ms     BIGINT NOT NULL,
    full_us     BIGINT,
    taken       BIGINT NOT NULL DEFAULT 0,
    returned    BIGINT NOT NULL DEFAULT 0,
    waits       BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (resource_id, window_ms)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_rate_slot (
    resource_id {name} NOT NULL,
    window_ms   BIGINT NOT NULL,
    slot        BIGINT NOT NULL,
    used        BIGINT NOT NULL CHECK (used >= 0),
    rate_limit  BIGINT,
    burst       BIGINT,
    PRIMARY KEY (resource_id, window_ms, slot)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_once_run (
    once_name      {name} NOT NULL PRIMARY KEY,
    granted_at     {time} NOT NULL,
    done_at        {time} NOT NULL,
    queue_position BIGINT NOT NULL,
    requesting_id  {name} NOT NULL,
    login          {name}
) {options};

-- Locks that end with a transaction, and locks that are handed over -------------------------------------------------

CREATE TABLE IF NOT EXISTS {schema}_commit_marker (
    marker    {name} NOT NULL PRIMARY KEY,
    marked_at {time} NOT NULL
) {options};

CREATE TABLE IF NOT EXISTS {schema}_handover (
    token_hash     {name} NOT NULL PRIMARY KEY,
    member_id      BIGINT NOT NULL,
    row_count      BIGINT NOT NULL,
    resource_id    {name} NOT NULL,
    queue_position BIGINT NOT NULL,
    given_by       {name} NOT NULL,
    given_to       {name} NOT NULL,
    given_at       {time} NOT NULL,
    ttl_ms         BIGINT NOT NULL CHECK (ttl_ms > 0),
    adopted_at     {time},
    adopted_by     BIGINT,
    adopted_uid    {name},
    adopter        TEXT,
    INDEX handover_given (given_at)
) {options};

-- The work queue ----------------------------------------------------------------------------------------------------

CREATE TABLE IF NOT EXISTS {schema}_task (
    task_id          BIGINT NOT NULL PRIMARY KEY AUTO_INCREMENT,
    queue_name       {name} NOT NULL,
    task_order       BIGINT NOT NULL DEFAULT 0,
    task_key         {name},
    task_priority    BIGINT NOT NULL DEFAULT 0,
    task_hash        VARCHAR(264),
    unique_key       {name},
    kind             {word} NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body             LONGTEXT NOT NULL,
    note             TEXT,
    status           {word} NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'running', 'finished', 'failed', 'cancelled')),
    is_open          TINYINT NOT NULL DEFAULT 1,
    on_failure       {word} NOT NULL DEFAULT 'stop' CHECK (on_failure IN ('stop', 'continue')),
    max_attempts     BIGINT NOT NULL DEFAULT 1 CHECK (max_attempts >= 1),
    backoff_ms       BIGINT NOT NULL DEFAULT 1000 CHECK (backoff_ms >= 0),
    time_limit_ms    BIGINT CHECK (time_limit_ms > 0),
    attempt          BIGINT NOT NULL DEFAULT 0,
    failures         BIGINT NOT NULL DEFAULT 0,
    losses           BIGINT NOT NULL DEFAULT 0,
    put_uid          {name},
    put_at           {now},
    put_by           {name},
    ready_at         {now},
    member_id        BIGINT,
    owner            {name},
    host             {name},
    pid              BIGINT,
    login            {name},
    claim_uid        {name},
    claimed_at       {time},
    cancel_asked_at  {time},
    cancel_asked_by  {name},
    ended_at         {time},
    error            LONGTEXT,
    result           LONGTEXT,
    lock_count       BIGINT,
    locks_pending    BIGINT,
    enqueue_locks_at {time},
    -- (There are no partial indexes: this column is NULL where the key does not count.)
    open_key         {name} AS (CASE WHEN is_open = 1 THEN unique_key END) VIRTUAL,
    CHECK ((task_key IS NULL) = (task_hash IS NULL)),
    INDEX task_open (queue_name, is_open, task_order, task_id),
    INDEX task_by_priority (is_open, queue_name, task_order, task_priority DESC, task_id),
    INDEX task_running (status, queue_name, is_open),
    INDEX task_blocked (queue_name, is_open, status, lock_count, task_order, locks_pending, task_priority DESC, task_id),
    INDEX task_fair (queue_name, is_open, status, lock_count, task_order, task_hash, task_priority DESC, task_id),
    INDEX task_plain (queue_name, is_open, status, task_key, lock_count, task_order, task_id),
    INDEX task_later (queue_name, status, lock_count, task_order, ready_at),
    INDEX task_ended (is_open, ended_at),
    UNIQUE INDEX task_put (put_uid),
    UNIQUE INDEX task_unique (queue_name, open_key)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_task_log (
    task_id    BIGINT NOT NULL,
    attempt    BIGINT NOT NULL,
    outcome    {word} NOT NULL,
    member_id  BIGINT,
    owner      {name},
    host       {name},
    pid        BIGINT,
    login      {name},
    started_at {time},
    ended_at   {now},
    error      LONGTEXT,
    result     LONGTEXT,
    PRIMARY KEY (task_id, attempt)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_queue_setting (
    queue_name {name} NOT NULL PRIMARY KEY,
    task_limit BIGINT CHECK (task_limit >= 0),
    key_limit  BIGINT CHECK (key_limit >= 0),
    task_rate  BIGINT CHECK (task_rate >= 1),
    task_ms    BIGINT CHECK (task_ms >= 1),
    key_rate   BIGINT CHECK (key_rate >= 1),
    key_ms     BIGINT CHECK (key_ms >= 1),
    set_at     {now},
    set_by     {name},
    CHECK ((task_rate IS NULL) = (task_ms IS NULL)),
    CHECK ((key_rate IS NULL) = (key_ms IS NULL))
) {options};

CREATE TABLE IF NOT EXISTS {schema}_queue_key (
    queue_name {name} NOT NULL,
    task_key   {name} NOT NULL,
    task_limit BIGINT CHECK (task_limit >= 0),
    weight     BIGINT CHECK (weight >= 1),
    task_rate  BIGINT CHECK (task_rate >= 1),
    task_ms    BIGINT CHECK (task_ms >= 1),
    set_at     {now},
    set_by     {name},
    PRIMARY KEY (queue_name, task_key),
    CHECK ((task_rate IS NULL) = (task_ms IS NULL)),
    INDEX queue_key_heavy (queue_name, weight)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_queue_wait (
    queue_name {name} NOT NULL,
    task_key   {name} NOT NULL,
    since_ms   BIGINT NOT NULL,
    free_ms    BIGINT NOT NULL,
    PRIMARY KEY (queue_name, task_key)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_task_lock (
    task_id           BIGINT NOT NULL,
    number            BIGINT NOT NULL,
    queue_name        {name} NOT NULL,
    resource_id       {name} NOT NULL,
    access_type       {word} NOT NULL,
    concurrency_limit BIGINT,
    weight            BIGINT NOT NULL,
    queue_position    BIGINT,
    waits             TINYINT NOT NULL DEFAULT 0,
    PRIMARY KEY (task_id, number),
    INDEX task_lock_waits (waits, queue_name, resource_id)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_queue_proxy (
    queue_name {name} NOT NULL PRIMARY KEY,
    member_id  BIGINT NOT NULL
) {options};

CREATE TABLE IF NOT EXISTS {schema}_schedule (
    schedule_name {name} NOT NULL PRIMARY KEY,
    queue_name    {name} NOT NULL,
    cron          {name} NOT NULL,
    time_zone     {name} NOT NULL DEFAULT 'UTC',
    kind          {word} NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body          LONGTEXT NOT NULL,
    options       LONGTEXT NOT NULL,
    next_due      {time} NOT NULL,
    last_due      {time},
    put_at        {now},
    put_by        {name},
    paused_at     {time},
    paused_by     {name}
) {options};

-- Batches ------------------------------------------------------------------------------------------------------------

CREATE TABLE IF NOT EXISTS {schema}_batch (
    batch_id         BIGINT NOT NULL PRIMARY KEY AUTO_INCREMENT,
    batch_name       {name} NOT NULL,
    window_ms        BIGINT NOT NULL CHECK (window_ms BETWEEN 1 AND 315360000000),
    status           {word} NOT NULL DEFAULT 'open'
        CHECK (status IN ('open', 'failed', 'succeeded', 'expired', 'abandoned')),
    opened_at        {now},
    opened_by        {name},
    ended_at         {time},
    callback_status  {word} NOT NULL DEFAULT 'none'
        CHECK (callback_status IN ('none', 'pending', 'running', 'finished', 'failed')),
    callback_kind    {word},
    callback_body    LONGTEXT,
    callback_attempt BIGINT NOT NULL DEFAULT 0,
    callback_uid     {name},
    callback_member  BIGINT,
    callback_owner   {name},
    callback_kept_by {name},
    callback_login   {name},
    callback_started {time},
    callback_ended   {time},
    callback_error   LONGTEXT,
    INDEX batch_name (batch_name, batch_id),
    INDEX batch_callback (callback_status, batch_name, batch_id)
) {options};

CREATE TABLE IF NOT EXISTS {schema}_batch_part (
    batch_id   BIGINT NOT NULL,
    part       {name} NOT NULL,
    status     {word} NOT NULL DEFAULT 'expected' CHECK (status IN ('expected', 'running', 'succeeded', 'failed')),
    attempt    BIGINT NOT NULL DEFAULT 0,
    start_uid  {name},
    is_last    TINYINT NOT NULL DEFAULT 0,
    member_id  BIGINT,
    owner      {name},
    host       {name},
    pid        BIGINT,
    login      {name},
    started_at {time},
    ended_at   {time},
    error      LONGTEXT,
    PRIMARY KEY (batch_id, part),
    INDEX batch_part_running (status, batch_id),
    FOREIGN KEY (batch_id) REFERENCES {schema}_batch (batch_id) ON DELETE CASCADE
) {options};

DELIMITER //

-- Bare participants insert rows themselves, without a request_uid. The trigger gives each its position, under the gate,
-- and refuses rows that name a member or are granted.
DROP TRIGGER IF EXISTS {table}_bare//
CREATE TRIGGER {table}_bare BEFORE INSERT ON {table} FOR EACH ROW
BEGIN
    IF NEW.request_uid IS NULL THEN
        IF NEW.queue_position <> 0 OR NEW.member_id IS NOT NULL OR NEW.granted_at IS NOT NULL OR NEW.revoked_at IS NOT NULL THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'sqlsem: the table gives the number: leave out queue_position, member_id and granted_at';
        END IF;
        IF NEW.resource_id LIKE 'rate:%' OR NEW.resource_id LIKE 'once:%' OR NEW.resource_id LIKE 'priority:%'
           OR NEW.resource_id LIKE 'tasks:%' OR NEW.resource_id LIKE '%*' THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'sqlsem: names that begin with rate:, once:, priority: or tasks: are used by sqlsem itself, those that end with * are patterns';
        END IF;
        IF NEW.access_type = 'upgrade' THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'sqlsem: upgrade is the access type of a reader that becomes the writer; ask for read first';
        END IF;
        UPDATE {schema}_gate SET writes = writes + 1, last_position = last_position + 1;
        SET NEW.queue_position = (SELECT last_position FROM {schema}_gate);
    END IF;
END//

DROP TRIGGER IF EXISTS {table}_left//
CREATE TRIGGER {table}_left AFTER DELETE ON {table} FOR EACH ROW
BEGIN
    IF OLD.request_uid IS NULL THEN
        UPDATE {schema}_gate SET writes = writes + 1;
    END IF;
END//

-- Remove the lock requests of a task when an attempt at it ends: see the triggers of SQLite's schema-1.sql.
DROP TRIGGER IF EXISTS {schema}_on_task_blocked//
CREATE TRIGGER {schema}_on_task_blocked BEFORE UPDATE ON {schema}_task FOR EACH ROW
BEGIN
    IF OLD.lock_count IS NOT NULL AND OLD.status <> NEW.status AND NOT (OLD.status = 'pending' AND NEW.status = 'running') THEN
        INSERT INTO {schema}_history (resource_id, queue_position, requesting_id, access_type, concurrency_limit, weight,
                                      member_id, owner, note, requested_at, granted_at, outcome, host, pid, program, login, ended_by)
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
          AND (OLD.status <> 'running' OR t.request_uid = CONCAT(OLD.claim_uid, '.', l.number));
        DELETE t FROM {table} AS t
        JOIN {schema}_task_lock AS l ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
        WHERE l.task_id = OLD.task_id
          AND t.member_id = CASE OLD.status WHEN 'running' THEN OLD.member_id
                                            ELSE (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name) END
          AND (OLD.status <> 'running' OR t.request_uid = CONCAT(OLD.claim_uid, '.', l.number));
        UPDATE {schema}_task_lock SET queue_position = NULL, waits = 0 WHERE task_id = OLD.task_id;
        SET NEW.locks_pending = NULL;
        IF NEW.status = 'pending' THEN
            SET NEW.enqueue_locks_at = CASE WHEN NEW.ready_at < 253370764800.0 THEN NEW.ready_at ELSE TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 END;
            SET NEW.ready_at = 253370764800.0;
        END IF;
    END IF;
END//

DROP TRIGGER IF EXISTS {schema}_task_goes//
CREATE TRIGGER {schema}_task_goes BEFORE DELETE ON {schema}_task FOR EACH ROW
BEGIN
    IF OLD.lock_count IS NOT NULL AND OLD.status = 'pending' THEN
        INSERT INTO {schema}_history (resource_id, queue_position, requesting_id, access_type, concurrency_limit, weight,
                                      member_id, owner, note, requested_at, granted_at, outcome, ended_by)
        SELECT t.resource_id, t.queue_position, t.requesting_id, t.access_type, t.concurrency_limit, t.weight, t.member_id,
               t.owner, t.note, t.requested_at, t.granted_at,
               CASE WHEN t.revoked_at IS NULL THEN 'cancelled' ELSE 'revoked' END, t.revoked_by
        FROM {schema}_task_lock AS l
        JOIN {table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
        WHERE l.task_id = OLD.task_id
          AND t.member_id = (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name);
        DELETE t FROM {table} AS t JOIN {schema}_task_lock AS l ON t.queue_position = l.queue_position
        WHERE l.task_id = OLD.task_id
          AND t.member_id = (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name);
        DELETE FROM {schema}_task_lock WHERE task_id = OLD.task_id;
    END IF;
END//

DELIMITER ;

CREATE TABLE IF NOT EXISTS {schema}_setting (
    name  {word} NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) {options};
INSERT INTO {schema}_setting (name, value)
VALUES ('schema_version', '1'), ('oldest_client', '1'), ('history_days', '30'), ('history_rows', '1000000')
ON DUPLICATE KEY UPDATE value = VALUES(value);
