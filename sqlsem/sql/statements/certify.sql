-- sqlsem, the statements of `sqlsem certify` for databases without routines, on tables that it creates and drops.
-- In certify.sql of each engine: name, a type; options, of a table; mark, of a parameter.

-- name: create_inside
-- The present holders, recorded independently of sqlsem.
CREATE TABLE {schema}_certify_inside (
    resource_id {name} NOT NULL,
    who         {name} NOT NULL,
    access_type {name} NOT NULL,
    PRIMARY KEY (resource_id, who)
) {options}

-- name: create_dead
-- The holders that were killed: their rows in certify_inside no longer count.
CREATE TABLE {schema}_certify_dead (who {name} NOT NULL PRIMARY KEY) {options}

-- name: create_counter
CREATE TABLE {schema}_certify_counter (counter_id INTEGER NOT NULL PRIMARY KEY, number BIGINT NOT NULL) {options}

-- name: begin_counter
INSERT INTO {schema}_certify_counter (counter_id, number) VALUES (1, 0)

-- name: enter
INSERT INTO {schema}_certify_inside (resource_id, who, access_type) VALUES ({mark}, {mark}, {mark})

-- name: others
SELECT i.who, i.access_type FROM {schema}_certify_inside AS i
WHERE i.resource_id = {mark} AND i.who <> {mark} AND NOT EXISTS (SELECT 1 FROM {schema}_certify_dead AS d WHERE d.who = i.who)

-- name: leave
DELETE FROM {schema}_certify_inside WHERE resource_id = {mark} AND who = {mark}

-- name: delete_member_rows
INSERT INTO {schema}_certify_dead (who) VALUES ({mark})

-- name: read_counter
SELECT number FROM {schema}_certify_counter

-- name: write_counter
UPDATE {schema}_certify_counter SET number = {mark}

-- name: positions
SELECT queue_position FROM {table} WHERE resource_id = {mark}

-- name: age_handovers
UPDATE {schema}_handover SET given_at = given_at - 2592000.0, adopted_at = adopted_at - 2592000.0
