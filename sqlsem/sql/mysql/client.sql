-- sqlsem, the statements that the Python client sends only to MariaDB and MySQL, or in place of one of
-- sqlsem/sql/statements. Several in one text go to the server together, and the first one that fails ends the text.

-- name: session
-- (Times without a zone, names as they are written, errors instead of changed values, and whole results, whatever the
-- server's defaults are. MariaDB cuts JSON_ARRAYAGG at group_concat_max_len.)
SET SESSION sql_mode = 'ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION',
            time_zone = '+00:00', innodb_lock_wait_timeout = :gate, lock_wait_timeout = :metadata, wait_timeout = :idle,
            autocommit = 1, sql_safe_updates = 0, sql_select_limit = 18446744073709551615, completion_type = 'NO_CHAIN',
            foreign_key_checks = 1, unique_checks = 1, group_concat_max_len = 16777216;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE

-- name: facts
SELECT SUBSTRING_INDEX(USER(), '@', 1), DATABASE(), VERSION(), CONCAT(@@hostname, ':', @@port, ':', @@server_id, ':', @@datadir), {clock},
       @@global.read_only

-- name: status
SHOW GLOBAL STATUS
WHERE variable_name IN ('Uptime', 'wsrep_ready', 'wsrep_connected', 'wsrep_cluster_state_uuid', 'wsrep_local_state_comment')

-- name: origin
-- The server that wrote last, and when it was started. (Without a version, an installation has not ended yet.)
SELECT name, value FROM {schema}_setting WHERE name IN ('origin', 'started', 'schema_version')

-- name: note_origin
INSERT INTO {schema}_setting (name, value) VALUES (:name, :value) {upsert:name} value = {new:value}

-- name: restart_members
UPDATE {schema}_member
SET heartbeat_at = {clock}, missing_since = NULL, lease_until = {clock} + lease_ms / 1000.0

-- name: skip_numbers
-- (A number of a member that is inserted and deleted is not given again. The first row tells the next number.)
UPDATE {schema}_gate SET last_position = ((last_position + 1000000000) DIV 10000000000 + 1) * 10000000000;
INSERT INTO {schema}_member (grace_ms) VALUES (0);
INSERT INTO {schema}_member (member_id, grace_ms) VALUES (LAST_INSERT_ID() + 1000000 + :by, 0);
DELETE FROM {schema}_member WHERE beacon IS NULL AND lease_ms IS NULL AND program IS NULL

-- name: wait_for_cluster
-- (Each statement sees what other nodes have committed before it.)
SET SESSION wsrep_sync_wait = 7

-- name: version
SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = '{schema}_setting'

-- name: foreign_table
-- (The settings are the first table of an installation, which may have been interrupted.)
SELECT 1 FROM information_schema.tables AS t WHERE t.table_schema = DATABASE() AND t.table_name = '{table}'
  AND NOT EXISTS (SELECT 1 FROM information_schema.tables AS s WHERE s.table_schema = DATABASE() AND s.table_name = '{schema}_setting')

-- name: begin
-- The gate: a row that each writing transaction changes first.
START TRANSACTION;
UPDATE {schema}_gate SET writes = writes + 1

-- name: begin_reading
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY

-- name: writes
SELECT writes FROM {schema}_gate

-- name: given_up
-- (FOR UPDATE: a heartbeat, which is not under the gate, must not come between this decision and the removal.)
SELECT 1 FROM {schema}_member
WHERE member_id = :member AND beacon {same} :beacon
  AND CASE WHEN lease_until IS NOT NULL THEN lease_until < {clock}
           ELSE :dead OR missing_since + grace_ms / 1000.0 <= {clock} END
FOR UPDATE

-- name: insert
UPDATE {schema}_gate SET last_position = LAST_INSERT_ID(last_position + 1);
INSERT INTO {table} (queue_position, resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner,
                     request_uid, granted_at, note)
VALUES (LAST_INSERT_ID(), :resource, :requesting_id, :access, :limit, :weight, :member, :owner, :uid,
        CASE WHEN :granted THEN {clock} END, :note)

-- name: insert_first
-- Grant a request on a resource without rows and settings. (See SQLite's client.sql.)
START TRANSACTION;
UPDATE {schema}_gate SET writes = writes + 1, last_position = LAST_INSERT_ID(last_position + 1);
INSERT INTO {table} (queue_position, resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner,
                     request_uid, granted_at, note)
SELECT LAST_INSERT_ID(), :resource, :requesting_id, :access, :limit, :weight, :member, :owner, :uid, {clock}, :note FROM DUAL
WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE resource_id = :resource)
  AND NOT EXISTS (SELECT 1 FROM {schema}_resource WHERE resource_id = :resource)
  AND NOT {patterned} AND :limit IS NOT NULL
  AND EXISTS (SELECT 1 FROM {schema}_member WHERE member_id = :member);
COMMIT;
DO GET_LOCK(CONCAT(:prefix, LAST_INSERT_ID()), 0)

-- name: leave_alone
-- Release a row of a resource without other rows. (ROW_COUNT is that of the statement before.)
START TRANSACTION;
UPDATE {schema}_gate SET writes = writes + 1;
{keep_rows}
       :outcome, CASE :outcome WHEN 'revoked' THEN t.revoked_by END, NULL
FROM {table} AS t LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
WHERE t.resource_id = :resource AND t.queue_position = :position AND t.requesting_id = :requesting_id
  AND NOT EXISTS (SELECT 1 FROM {table} WHERE resource_id = :resource AND queue_position <> :position);
DELETE FROM {table} WHERE queue_position = :position AND ROW_COUNT() = 1;
COMMIT;
DO RELEASE_LOCK(:lock)

-- name: pin
SELECT 1 FROM {table}
WHERE resource_id = ? AND queue_position = ? AND requesting_id = ? AND granted_at IS NOT NULL FOR UPDATE

-- name: disown_task
UPDATE {schema}_task SET put_uid = NULL WHERE put_uid = :uid

-- name: database_identity
SELECT CONCAT(@@hostname, ':', @@port, ':', @@datadir, ':', DATABASE()) AS place

-- name: take_beacon
SELECT GET_LOCK(?, 0)

-- name: give_beacon
DO RELEASE_LOCK(?)

-- name: beacon_owner
SELECT IS_USED_LOCK(?)

-- name: sleep
-- Wait for the owner of the row ahead to release it: the owner keeps this lock as long as the row.
SELECT GET_LOCK(:lock, :seconds);
DO RELEASE_LOCK(:lock)

-- name: lock_installation
SELECT GET_LOCK(CONCAT('sqlsem.init.', LEFT(SHA2(CONCAT(DATABASE(), '.{schema}'), 256), 32)), :seconds)

-- name: kill
KILL ?
