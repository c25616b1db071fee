-- sqlsem, for SQLite 3.35 and later. One host only: never on a network file system. (The tables come before this.)
-- SQLite has no logins: the names of the host's users stand in the columns for logins.
-- where {create_table} is CREATE TABLE
-- where {serial} is INTEGER PRIMARY KEY AUTOINCREMENT
-- where {position} is INTEGER PRIMARY KEY AUTOINCREMENT
-- where {row_number} is INTEGER PRIMARY KEY
-- where {by_key} is WITHOUT ROWID
-- where {options} is

CREATE INDEX {table}_queue ON {table} (resource_id, queue_position);
CREATE UNIQUE INDEX {table}_member ON {table} (member_id, request_uid);  -- also finds all rows of a member
-- For pages of the history, newest first. (A page of all outcomes reads each of the few outcomes by itself.)
CREATE INDEX {schema}_history_resource ON {schema}_history (resource_id, outcome, ended_at);
CREATE INDEX {schema}_history_outcome ON {schema}_history (outcome, ended_at);
CREATE INDEX {schema}_operation_done ON {schema}_operation (done_at);
CREATE INDEX {schema}_handover_given ON {schema}_handover (given_at);
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
-- The keys with a weight. Every claim reads them, whatever key it begins with.
CREATE INDEX {schema}_queue_key_heavy ON {schema}_queue_key (queue_name, weight DESC) WHERE weight > 1;
CREATE INDEX {schema}_task_lock_waits
    ON {schema}_task_lock (queue_name, resource_id, access_type, weight, concurrency_limit, queue_position) WHERE waits;
CREATE INDEX {schema}_batch_name ON {schema}_batch (batch_name, batch_id);
CREATE INDEX {schema}_batch_callback ON {schema}_batch (batch_name, batch_id) WHERE callback_status IN ('pending', 'running');
CREATE INDEX {schema}_batch_part_running ON {schema}_batch_part (batch_id) WHERE status = 'running';

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

-- Remove the lock requests of a task when an attempt at it ends, by whatever statement, or when a task that waits for
-- locks is cancelled or becomes pending anew. A pending task then waits for its locks again. (A lock that was handed
-- over and adopted no longer belongs to the task, and stays.)
CREATE TRIGGER {schema}_on_task_blocked AFTER UPDATE OF status ON {schema}_task
WHEN OLD.lock_count IS NOT NULL AND OLD.status <> NEW.status AND NOT (OLD.status = 'pending' AND NEW.status = 'running')
BEGIN
    {keep_rows}
           CASE WHEN t.revoked_at IS NOT NULL THEN 'revoked' WHEN OLD.status = 'running' THEN 'released' ELSE 'cancelled' END,
           t.revoked_by, NULL
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
    SET enqueue_locks_at = CASE WHEN ready_at < {end_of_time} THEN ready_at ELSE {clock} END, ready_at = {end_of_time}
    WHERE task_id = OLD.task_id AND status = 'pending';
END;

-- Remove the lock requests of a task that waits for locks and was deleted by hand.
CREATE TRIGGER {schema}_task_goes BEFORE DELETE ON {schema}_task
WHEN OLD.lock_count IS NOT NULL AND OLD.status = 'pending'
BEGIN
    {keep_rows}
           CASE WHEN t.revoked_at IS NULL THEN 'cancelled' ELSE 'revoked' END, t.revoked_by, NULL
    FROM {schema}_task_lock AS l
    JOIN {table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
    LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
    WHERE l.task_id = OLD.task_id
      AND t.member_id = (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name);
    DELETE FROM {table}
    WHERE queue_position IN (SELECT queue_position FROM {schema}_task_lock WHERE task_id = OLD.task_id)
      AND member_id = (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name);
    DELETE FROM {schema}_task_lock WHERE task_id = OLD.task_id;
END;

INSERT INTO {schema}_setting (name, value)
VALUES ('schema_version', '1'), ('oldest_client', '1'), ('history_days', '30'), ('history_rows', '1000000');
