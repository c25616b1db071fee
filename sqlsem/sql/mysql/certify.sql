-- sqlsem, the statements of `sqlsem certify` for MariaDB and MySQL, in a database or with a prefix of its own.

-- name: facts
SELECT 'server', CASE WHEN VERSION() LIKE '%MariaDB%' THEN VERSION() ELSE 'MySQL ' || VERSION() END
UNION ALL SELECT 'version', VERSION()

-- name: hidden
-- Names that the report must not contain, and the placeholders for them: none.
SELECT NULL, NULL FROM DUAL WHERE 0

-- name: create_inside
-- The present holders, recorded independently of sqlsem.
CREATE TABLE {schema}_certify_inside (
    resource_id VARCHAR(255) NOT NULL,
    who         VARCHAR(255) NOT NULL,
    access_type VARCHAR(255) NOT NULL,
    PRIMARY KEY (resource_id, who)
)

-- name: create_dead
-- The holders that were killed: their rows in certify_inside no longer count.
CREATE TABLE {schema}_certify_dead (who VARCHAR(255) NOT NULL PRIMARY KEY)

-- name: create_counter
CREATE TABLE {schema}_certify_counter (number BIGINT NOT NULL)

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
START TRANSACTION;
UPDATE {schema}_gate SET writes = writes + 1

-- name: raw_give
COMMIT
