-- sqlsem, for MariaDB 10.6 and later and MySQL 8.0.19 and later (InnoDB). (The tables come before this.)
-- (DDL commits by itself here. So that an interrupted script can be run again, each statement does nothing if its object
-- exists. sqlsem init ignores the error of an ALTER TABLE that was done. The settings, by which clients know the tables,
-- come last.)
-- where {create_table} is CREATE TABLE IF NOT EXISTS
-- where {serial} is BIGINT NOT NULL PRIMARY KEY AUTO_INCREMENT
-- where {position} is BIGINT NOT NULL DEFAULT 0 PRIMARY KEY
-- where {row_number} is BIGINT NOT NULL PRIMARY KEY AUTO_INCREMENT
-- where {by_key} is {options}
-- where {options} is ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */

-- One row. A transaction that writes changes it first, and so excludes all others until it ends: the gate. Positions
-- come from here: AUTO_INCREMENT repeats numbers on some servers, and differs on the nodes of a cluster.
{create_table} {schema}_gate (
    gate_id       TINYINT NOT NULL PRIMARY KEY CHECK (gate_id = 1),
    writes        BIGINT NOT NULL DEFAULT 0,
    last_position BIGINT NOT NULL DEFAULT 0
) {options};
INSERT INTO {schema}_gate (gate_id) VALUES (1) ON DUPLICATE KEY UPDATE gate_id = 1;

ALTER TABLE {table} ADD INDEX {table}_queue (resource_id, queue_position), ADD UNIQUE INDEX {table}_member (member_id, request_uid);
ALTER TABLE {schema}_history
    ADD INDEX history_resource (resource_id, outcome, ended_at), ADD INDEX history_outcome (outcome, ended_at);
ALTER TABLE {schema}_operation ADD INDEX operation_done (done_at);
ALTER TABLE {schema}_handover ADD INDEX handover_given (given_at);
-- (There are no partial indexes: open_key is NULL where unique_key does not count.)
ALTER TABLE {schema}_task
    ADD COLUMN open_key {name} AS (CASE WHEN is_open = 1 THEN unique_key END) VIRTUAL,
    ADD INDEX task_open (queue_name, is_open, task_order, task_id),
    ADD INDEX task_by_priority (is_open, queue_name, task_order, task_priority DESC, task_id),
    ADD INDEX task_running (status, queue_name, is_open),
    ADD INDEX task_blocked (queue_name, is_open, status, lock_count, task_order, locks_pending, task_priority DESC, task_id),
    ADD INDEX task_fair (queue_name, is_open, status, lock_count, task_order, task_hash, task_priority DESC, task_id),
    ADD INDEX task_plain (queue_name, is_open, status, task_key, lock_count, task_order, task_id),
    ADD INDEX task_later (queue_name, status, lock_count, task_order, ready_at),
    ADD INDEX task_ended (is_open, ended_at),
    ADD UNIQUE INDEX task_put (put_uid),
    ADD UNIQUE INDEX task_unique (queue_name, open_key);
ALTER TABLE {schema}_queue_key ADD INDEX queue_key_heavy (queue_name, weight);
ALTER TABLE {schema}_task_lock ADD INDEX task_lock_waits (waits, queue_name, resource_id);
ALTER TABLE {schema}_batch
    ADD INDEX batch_name (batch_name, batch_id), ADD INDEX batch_callback (callback_status, batch_name, batch_id);
ALTER TABLE {schema}_batch_part ADD INDEX batch_part_running (status, batch_id);

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
        {keep_rows}
               CASE WHEN t.revoked_at IS NOT NULL THEN 'revoked' WHEN OLD.status = 'running' THEN 'released' ELSE 'cancelled' END,
               t.revoked_by, NULL
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
            SET NEW.enqueue_locks_at = CASE WHEN NEW.ready_at < {end_of_time} THEN NEW.ready_at ELSE {clock} END;
            SET NEW.ready_at = {end_of_time};
        END IF;
    END IF;
END//

DROP TRIGGER IF EXISTS {schema}_task_goes//
CREATE TRIGGER {schema}_task_goes BEFORE DELETE ON {schema}_task FOR EACH ROW
BEGIN
    IF OLD.lock_count IS NOT NULL AND OLD.status = 'pending' THEN
        {keep_rows}
               CASE WHEN t.revoked_at IS NULL THEN 'cancelled' ELSE 'revoked' END, t.revoked_by, NULL
        FROM {schema}_task_lock AS l
        JOIN {table} AS t ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
        LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
        WHERE l.task_id = OLD.task_id
          AND t.member_id = (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name);
        DELETE t FROM {table} AS t JOIN {schema}_task_lock AS l ON t.queue_position = l.queue_position
        WHERE l.task_id = OLD.task_id
          AND t.member_id = (SELECT member_id FROM {schema}_queue_proxy WHERE queue_name = OLD.queue_name);
        DELETE FROM {schema}_task_lock WHERE task_id = OLD.task_id;
    END IF;
END//

DELIMITER ;

INSERT INTO {schema}_setting (name, value)
VALUES ('schema_version', '1'), ('oldest_client', '1'), ('history_days', '30'), ('history_rows', '1000000')
ON DUPLICATE KEY UPDATE value = VALUES(value);
