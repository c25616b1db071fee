-- sqlsem, the statements of `sqlsem certify` for SQLite, in a separate file.

-- name: facts
SELECT 'server', 'SQLite ' || sqlite_version() UNION ALL SELECT 'version', sqlite_version()

-- name: hidden
-- Names that the report must not contain, and the placeholders for them: none.
SELECT NULL, NULL WHERE 0

-- name: create_inside
-- The present holders, recorded independently of sqlsem.
CREATE TABLE {schema}_certify_inside (
    resource_id TEXT NOT NULL,
    who         TEXT NOT NULL,
    access_type TEXT NOT NULL,
    PRIMARY KEY (resource_id, who)
) WITHOUT ROWID

-- name: create_dead
-- The holders that were killed: their rows in certify_inside no longer count.
CREATE TABLE {schema}_certify_dead (who TEXT NOT NULL PRIMARY KEY) WITHOUT ROWID

-- name: create_counter
CREATE TABLE {schema}_certify_counter (number INTEGER NOT NULL)

-- name: begin_counter
INSERT INTO {schema}_certify_counter (number) VALUES (0)

-- name: enter
INSERT INTO {schema}_certify_inside (resource_id, who, access_type) VALUES (?, ?, ?)

-- name: others
SELECT i.who, i.access_type FROM {schema}_certify_inside AS i
WHERE i.resource_id = ? AND i.who <> ? AND NOT EXISTS (SELECT 1 FROM {schema}_certify_dead AS d WHERE d.who = i.who)

-- name: leave
DELETE FROM {schema}_certify_inside WHERE resource_id = ? AND who = ?

-- name: delete_member_rows
INSERT INTO {schema}_certify_dead (who) VALUES (?)

-- name: read_counter
SELECT number FROM {schema}_certify_counter

-- name: write_counter
UPDATE {schema}_certify_counter SET number = ?

-- name: positions
SELECT queue_position FROM {table} WHERE resource_id = ?

-- name: age_handovers
UPDATE {schema}_handover SET given_at = given_at - 2592000.0, adopted_at = adopted_at - 2592000.0

-- name: raw_take
BEGIN IMMEDIATE

-- name: raw_give
COMMIT
