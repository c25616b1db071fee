-- sqlsem, schema version 1, for databases without routines: the tables. The engine's own script has the indexes and
-- triggers, and the words that differ. FROZEN once released: later changes go into schema-2.sql.
-- Times are seconds since 1970, by the clock of the host or of the server. (SQLite takes these types for TEXT, INTEGER and
-- REAL, by parts of their names.)
-- where {name} is VARCHAR(255)
-- where {word} is VARCHAR(32)
-- where {now} is DOUBLE NOT NULL DEFAULT ({clock})

{create_table} {schema}_setting (
    name  {word} NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) {by_key};

-- Members -----------------------------------------------------------------------------------------------------------

-- One row for each process that takes part. Its beacon is a lock on a file (SQLite), or by name (GET_LOCK).
{create_table} {schema}_member (
    member_id     {serial},
    beacon        {word},
    host          {name},
    pid           BIGINT,
    program       {name},
    login         {name},
    grace_ms      BIGINT NOT NULL CHECK (grace_ms >= 0),
    lease_ms      BIGINT CHECK (lease_ms > 0),
    joined_at     {now},
    -- The last heartbeat that was written here. The time of the beacon's file may show a later one.
    heartbeat_at  {now},
    lease_until   DOUBLE,
    missing_since DOUBLE
) {options};

-- Resources and their queues ----------------------------------------------------------------------------------------

-- The settings of operators for a resource. No row: no setting.
{create_table} {schema}_resource (
    resource_id    {name} NOT NULL PRIMARY KEY,
    cap            BIGINT CHECK (cap >= 1),            -- an upper bound on declared limits
    cap_by         {name},                             -- the login of the operator that set the cap
    paused_at      DOUBLE,                             -- no request is granted while set
    paused_by      {name},                             -- the operator's login, while paused_at is set
    stale_after_ms BIGINT CHECK (stale_after_ms > 0),  -- age at which rows without a member are removed
    ageing_ms      BIGINT                              -- the waiting time that one step of priority is worth; NULL: no priorities
) {by_key};

-- The limit of every resource whose name begins with the prefix and that has no limit of its own; the longest prefix
-- counts. ('tenant:' is shown, and set, as 'tenant:*'; '' is '*'.)
{create_table} {schema}_limit_pattern (
    prefix {name} NOT NULL PRIMARY KEY,
    cap    BIGINT NOT NULL CHECK (cap >= 1),
    cap_by {name},  -- the operator's login
    set_at {now}
) {by_key};

-- The queue. A row is a request, waiting or granted; the rows ahead of it alone decide whether it may be granted.
{create_table} {table} (
    queue_position    {position},
    resource_id       {name} NOT NULL DEFAULT 'default'
        CHECK (resource_id <> '' AND resource_id = trim(resource_id) AND {length}(resource_id) <= 255),
    requesting_id     {name} NOT NULL,
    access_type       {word} NOT NULL DEFAULT 'write',
    concurrency_limit BIGINT CHECK (concurrency_limit >= 1),
    weight            BIGINT NOT NULL DEFAULT 1 CHECK (weight >= 1),
    member_id         BIGINT,
    owner             {name},
    request_uid       {name},
    requested_at      {now},
    granted_at        DOUBLE,
    revoked_at        DOUBLE,
    revoked_by        {name},  -- the operator's login, while revoked_at is set
    note              TEXT,
    CHECK (concurrency_limit IS NULL OR weight <= concurrency_limit)
) {options};

-- The last reader of each resource that began to upgrade. It still upgrades while its row has the access type 'upgrade'.
{create_table} {schema}_upgrade (
    resource_id    {name} NOT NULL PRIMARY KEY,
    queue_position BIGINT NOT NULL
) {by_key};

{create_table} {schema}_history (
    history_id        {row_number},
    resource_id       {name} NOT NULL,
    queue_position    BIGINT NOT NULL,
    requesting_id     {name} NOT NULL,
    access_type       {word} NOT NULL,
    concurrency_limit BIGINT,
    weight            BIGINT NOT NULL,
    member_id         BIGINT,
    owner             {name},
    host              {name},  -- of the owner's member, as are pid, program and login
    pid               BIGINT,
    program           {name},
    login             {name},
    note              TEXT,
    requested_at      DOUBLE NOT NULL,
    granted_at        DOUBLE,
    ended_at          {now},
    outcome           {word} NOT NULL,
    ended_by          {name},  -- the login that ended it, if not the owner's
    heartbeat_at      DOUBLE   -- the last heartbeat of an owner that died
) {options};

-- One row for each call of an operator, written in the transaction of that call.
{create_table} {schema}_operation (
    operation_id   {serial},
    done_at        {now},
    login          {name},
    host           {name},
    pid            BIGINT,
    program        {name},
    action         {word} NOT NULL,  -- pause, resume, cap, stale_after, revoke, reap; retry, cancel, …
    resource_id    {name},           -- the object of the call: a resource, or a row of its queue,
    queue_position BIGINT,
    queue_name     {name},           -- or a work queue, or a task of it
    task_id        BIGINT,
    old_value      TEXT,
    new_value      TEXT
) {options};

-- Rates and periods -------------------------------------------------------------------------------------------------

-- One row for each window that a client has declared for a rate. Times count from 1970.
{create_table} {schema}_rate_window (
    resource_id {name} NOT NULL,                 -- 'rate:' and the rate's name
    window_ms   BIGINT NOT NULL CHECK (window_ms >= 1),
    rate_limit  BIGINT CHECK (rate_limit >= 1),  -- in one window; the limit in effect at the last use; NULL: none
    burst       BIGINT,                          -- the burst in effect at the last use
    cap         BIGINT CHECK (cap >= 1),         -- an operator's upper bound for rate_limit, and its default
    cap_by      {name},
    seen_ms     BIGINT NOT NULL,                 -- the time of the last use
    full_us     BIGINT,                          -- with a burst: when the whole burst is available again
    -- Counters since the window was first declared.
    taken       BIGINT NOT NULL DEFAULT 0,
    returned    BIGINT NOT NULL DEFAULT 0,  -- of that, as the cost was less in the end
    waits       BIGINT NOT NULL DEFAULT 0,  -- requests that were not granted at once
    PRIMARY KEY (resource_id, window_ms)
) {by_key};

-- The use of a rate in a hundredth part of a window. It counts until all of that part is out of the window. So do the
-- lowest limit and burst that requests have declared for this window in that time.
{create_table} {schema}_rate_slot (
    resource_id {name} NOT NULL,
    window_ms   BIGINT NOT NULL,
    slot        BIGINT NOT NULL,  -- the number of the hundredth part since 1970
    used        BIGINT NOT NULL CHECK (used >= 0),
    rate_limit  BIGINT,           -- NULL: no limit was declared for this window
    burst       BIGINT,
    PRIMARY KEY (resource_id, window_ms, slot)
) {by_key};

-- The last run of each name that runs once per period (see PostgreSQL's once.sql).
{create_table} {schema}_once_run (
    once_name      {name} NOT NULL PRIMARY KEY,
    granted_at     DOUBLE NOT NULL,  -- the grant of that run: it decides the period, and never goes back
    done_at        DOUBLE NOT NULL,
    queue_position BIGINT NOT NULL,  -- of that run: its fence
    requesting_id  {name} NOT NULL,
    login          {name}
) {by_key};

-- Locks that end with a transaction, and locks that are handed over -------------------------------------------------

-- A transaction that releases a lock inserts a row here. Other sessions see the row once the transaction has committed.
-- Only the owner of the lock knows the marker.
{create_table} {schema}_commit_marker (
    marker    {name} NOT NULL PRIMARY KEY,
    marked_at DOUBLE NOT NULL
) {by_key};

-- One row for each hand-over. Until adopt, the handed-over rows of the queue belong to a member that exists only for
-- this hand-over (member_id), with a lease of ttl_ms. The token itself is not stored. Old rows are kept for a day, so
-- that a failed adopt can give the reason.
{create_table} {schema}_handover (
    token_hash     {name} NOT NULL PRIMARY KEY,  -- SHA-256, in hexadecimal digits
    member_id      BIGINT NOT NULL,
    row_count      BIGINT NOT NULL,              -- how many rows were handed over
    resource_id    {name} NOT NULL,              -- the first of them, for messages
    queue_position BIGINT NOT NULL,
    given_by       {name} NOT NULL,              -- the giver's login
    given_to       {name} NOT NULL,              -- the login that may adopt it, beside the giver
    given_at       DOUBLE NOT NULL,
    ttl_ms         BIGINT NOT NULL CHECK (ttl_ms > 0),
    adopted_at     DOUBLE,
    adopted_by     BIGINT,                       -- the member that adopted it
    adopted_uid    {name},                       -- made by the client: a repeated call finds what it did
    adopter        TEXT                          -- host:pid and program, for messages
) {options};

-- The work queue ----------------------------------------------------------------------------------------------------

-- One row for each task, in any state. A task is open while it is pending, running, or failed and blocking later
-- orders.
{create_table} {schema}_task (
    task_id         {serial},
    queue_name      {name} NOT NULL,
    task_order      BIGINT NOT NULL DEFAULT 0,  -- a task waits for every open task of a lower order
    -- Workers are divided between the keys of a queue. '': no key, in a queue that has keys, limits or priorities;
    -- NULL: no key, in any other queue.
    task_key        {name},
    task_priority   BIGINT NOT NULL DEFAULT 0,         -- among the tasks of its key; higher ones first
    task_hash       VARCHAR(264),                      -- eight digits of the key's hash, then the key: no client can choose its order
    unique_key      {name},                            -- at most one open task of a queue has it
    kind            {word} NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body            LONGTEXT NOT NULL,
    note            TEXT,
    status          {word} NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'running', 'finished', 'failed', 'cancelled')),
    is_open         TINYINT NOT NULL DEFAULT 1,
    on_failure      {word} NOT NULL DEFAULT 'stop' CHECK (on_failure IN ('stop', 'continue')),
    max_attempts    BIGINT NOT NULL DEFAULT 1 CHECK (max_attempts >= 1),
    backoff_ms      BIGINT NOT NULL DEFAULT 1000 CHECK (backoff_ms >= 0),
    time_limit_ms   BIGINT CHECK (time_limit_ms > 0),  -- an attempt that runs for longer is ended, and has failed
    attempt         BIGINT NOT NULL DEFAULT 0,         -- the number of claims; a worker that ends an attempt must name it
    failures        BIGINT NOT NULL DEFAULT 0,
    losses          BIGINT NOT NULL DEFAULT 0,         -- attempts whose worker died
    put_uid         {name},                            -- made by the client: a repeated put finds its rows
    put_at          {now},
    put_by          {name},
    ready_at        {now},
    member_id       BIGINT,                            -- the member that runs it now
    owner           {name},
    host            {name},                            -- of the member that runs it, or ran it last, as are pid and login
    pid             BIGINT,
    login           {name},
    claim_uid       {name},                            -- made by the client: a repeated claim finds its row
    claimed_at      DOUBLE,
    cancel_asked_at DOUBLE,                            -- set: the worker ends the task, which is then cancelled
    cancel_asked_by {name},
    ended_at        DOUBLE,
    error           LONGTEXT,
    result          LONGTEXT,
    -- For a task with locks ready_at is the end of time (253370764800, the year 9999), so that claims of tasks without
    -- locks skip it.
    lock_count      BIGINT,   -- how many; NULL: none
    locks_pending   BIGINT,   -- how many are not granted yet; NULL: none is enqueued
    enqueue_locks_at DOUBLE,  -- when its locks may be enqueued
    CHECK ((task_key IS NULL) = (task_hash IS NULL))
) {options};

-- One row for each ended attempt.
{create_table} {schema}_task_log (
    task_id    BIGINT NOT NULL,
    attempt    BIGINT NOT NULL,
    outcome    {word} NOT NULL,  -- finished, failed, lost (the worker died), returned (given back)
    member_id  BIGINT,
    owner      {name},
    host       {name},
    pid        BIGINT,
    login      {name},
    started_at DOUBLE,
    ended_at   {now},
    error      LONGTEXT,
    result     LONGTEXT,
    PRIMARY KEY (task_id, attempt)
) {options};

-- The limits and rates of a queue. There is a row if anything is set for the queue or one of its keys.
{create_table} {schema}_queue_setting (
    queue_name {name} NOT NULL PRIMARY KEY,
    task_limit BIGINT CHECK (task_limit >= 0),  -- running tasks: of the queue,
    key_limit  BIGINT CHECK (key_limit >= 0),   -- and of each key
    -- How many tasks may start within task_ms (of the queue), and within key_ms (of each key).
    task_rate  BIGINT CHECK (task_rate >= 1),
    task_ms    BIGINT CHECK (task_ms >= 1),
    key_rate   BIGINT CHECK (key_rate >= 1),
    key_ms     BIGINT CHECK (key_ms >= 1),
    set_at     {now},
    set_by     {name},
    CHECK ((task_rate IS NULL) = (task_ms IS NULL) AND (key_rate IS NULL) = (key_ms IS NULL))
) {by_key};

{create_table} {schema}_queue_key (
    queue_name {name} NOT NULL,
    task_key   {name} NOT NULL,
    task_limit BIGINT CHECK (task_limit >= 0),  -- of this key, instead of key_limit
    weight     BIGINT CHECK (weight >= 1),      -- its share of the workers; NULL: 1
    task_rate  BIGINT CHECK (task_rate >= 1),   -- of this key, instead of key_rate
    task_ms    BIGINT CHECK (task_ms >= 1),
    set_at     {now},
    set_by     {name},
    PRIMARY KEY (queue_name, task_key),
    CHECK ((task_rate IS NULL) = (task_ms IS NULL))
) {by_key};

-- A queue or key whose rate a claim found used up: claims skip it until free_ms. (The use itself is in rate_slot.)
{create_table} {schema}_queue_wait (
    queue_name {name} NOT NULL,
    task_key   {name} NOT NULL,  -- '': the queue itself
    since_ms   BIGINT NOT NULL,  -- since 1970
    free_ms    BIGINT NOT NULL,
    PRIMARY KEY (queue_name, task_key)
) {by_key};

-- The locks of tasks: see the comments of PostgreSQL's blocked_tasks.sql.
{create_table} {schema}_task_lock (
    task_id           BIGINT NOT NULL,
    number            BIGINT NOT NULL,
    queue_name        {name} NOT NULL,
    resource_id       {name} NOT NULL,
    access_type       {word} NOT NULL,
    concurrency_limit BIGINT,
    weight            BIGINT NOT NULL,
    queue_position    BIGINT,                      -- of its row in the lock's queue; NULL: none
    waits             TINYINT NOT NULL DEFAULT 0,  -- that row is not granted yet
    PRIMARY KEY (task_id, number)
) {by_key};

-- The member that owns the lock requests of a queue's blocked tasks.
{create_table} {schema}_queue_proxy (
    queue_name {name} NOT NULL PRIMARY KEY,
    member_id  BIGINT NOT NULL
) {by_key};

-- Tasks that are put at the times of a cron expression, by one of the processes that watch for due schedules.
{create_table} {schema}_schedule (
    schedule_name {name} NOT NULL PRIMARY KEY,
    queue_name    {name} NOT NULL,
    cron          {name} NOT NULL,
    time_zone     {name} NOT NULL DEFAULT 'UTC',  -- a name of the IANA database
    kind          {word} NOT NULL CHECK (kind IN ('sql', 'shell', 'call', 'json')),
    body          LONGTEXT NOT NULL,
    options       LONGTEXT NOT NULL,           -- JSON; of each task: order, note, max_attempts, …
    next_due      DOUBLE NOT NULL,                -- the next time
    last_due      DOUBLE,                         -- the latest time for which a task was put
    put_at        {now},
    put_by        {name},
    paused_at     DOUBLE,
    paused_by     {name}
) {by_key};

-- Batches ------------------------------------------------------------------------------------------------------------

-- One row for each batch: a set of parts that run side by side, and the callback that the last part to succeed starts.
{create_table} {schema}_batch (
    batch_id         {serial},
    batch_name       {name} NOT NULL,
    window_ms        BIGINT NOT NULL CHECK (window_ms BETWEEN 1 AND 315360000000),
    status           {word} NOT NULL DEFAULT 'open'
        CHECK (status IN ('open', 'failed', 'succeeded', 'expired', 'abandoned')),
    opened_at        {now},
    opened_by        {name},
    ended_at         DOUBLE,
    callback_status  {word} NOT NULL DEFAULT 'none'
        CHECK (callback_status IN ('none', 'pending', 'running', 'finished', 'failed')),
    callback_kind    {word},
    callback_body    LONGTEXT,
    callback_attempt BIGINT NOT NULL DEFAULT 0,  -- a member that ends an attempt must name it
    callback_uid     {name},                     -- made by the client: a repeated claim finds its row
    callback_member  BIGINT,
    callback_owner   {name},
    callback_kept_by {name},                     -- the login that stored the callback
    callback_login   {name},                     -- the login that ran it last
    callback_started DOUBLE,
    callback_ended   DOUBLE,
    callback_error   LONGTEXT
) {options};

{create_table} {schema}_batch_part (
    batch_id   BIGINT NOT NULL,
    part       {name} NOT NULL,
    status     {word} NOT NULL DEFAULT 'expected'
        CHECK (status IN ('expected', 'running', 'succeeded', 'failed')),
    attempt    BIGINT NOT NULL DEFAULT 0,   -- the number of starts in this batch
    start_uid  {name},                      -- made by the client for each start: a call that ends the part must name it
    is_last    TINYINT NOT NULL DEFAULT 0,  -- its success completed the batch
    member_id  BIGINT,
    owner      {name},
    host       {name},
    pid        BIGINT,
    login      {name},
    started_at DOUBLE,
    ended_at   DOUBLE,
    error      LONGTEXT,
    PRIMARY KEY (batch_id, part),
    FOREIGN KEY (batch_id) REFERENCES {schema}_batch (batch_id) ON DELETE CASCADE
) {options};
