-- sqlsem, the statements that the Python client sends only to SQLite. The others are in sqlsem/sql/statements.

-- name: version
SELECT name FROM sqlite_master WHERE type = 'table' AND name = '{schema}_setting'

-- name: foreign_table
-- A table of the queue's name, asked for where none of our own tables are.
SELECT 1 FROM sqlite_master WHERE name = '{table}'

-- name: is_empty
SELECT NOT EXISTS (SELECT 1 FROM sqlite_master) AS is_empty

-- name: insert_first
-- Grant a request on a resource without rows and settings, in one statement, which is a transaction.
INSERT INTO {table} (resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner, request_uid,
                     granted_at, note)
SELECT :resource, :requesting_id, :access, :limit, :weight, :member, :owner, :uid, {clock}, :note
WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE resource_id = :resource)
  AND NOT EXISTS (SELECT 1 FROM {schema}_resource WHERE resource_id = :resource)
  AND NOT {patterned} AND :limit IS NOT NULL
  AND EXISTS (SELECT 1 FROM {schema}_member WHERE member_id = :member)

-- name: leaving
-- SQLite has no routines, but an INSTEAD OF INSERT trigger serves as one: the inserted values are its arguments. (A
-- TEMP view and its triggers are in no file, so each connection creates its own.)
CREATE TEMP VIEW IF NOT EXISTS {schema}_leaving AS
SELECT NULL AS resource, NULL AS position, NULL AS requesting_id, NULL AS outcome

-- name: leaving_alone
-- Release a row of a resource without other rows: keep_one and delete_one in one statement, which is a transaction.
CREATE TEMP TRIGGER IF NOT EXISTS {schema}_leaving_alone INSTEAD OF INSERT ON {schema}_leaving
WHEN NOT EXISTS (SELECT 1 FROM {table} WHERE resource_id = NEW.resource AND queue_position <> NEW.position)
BEGIN
    {keep_rows}
           NEW.outcome, CASE NEW.outcome WHEN 'revoked' THEN t.revoked_by END, NULL
    FROM {table} AS t LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
    WHERE t.resource_id = NEW.resource AND t.queue_position = NEW.position AND t.requesting_id = NEW.requesting_id;
    DELETE FROM {table}
    WHERE resource_id = NEW.resource AND queue_position = NEW.position AND requesting_id = NEW.requesting_id;
END

-- name: leave_alone
INSERT INTO {schema}_leaving VALUES (:resource, :position, :requesting_id, :outcome)

-- name: database_identity
SELECT file AS place FROM pragma_database_list WHERE name = 'main'

-- name: data_version
PRAGMA data_version

-- name: beacons
SELECT beacon FROM {schema}_member
