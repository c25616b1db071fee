-- sqlsem, what `sqlsem certify` asks PostgreSQL, in a schema that it makes and drops. (Names are qualified, as in client.sql.)

-- name: facts
SELECT f.name, f.value
FROM pg_catalog.pg_database AS d
CROSS JOIN LATERAL (VALUES
    ('server'::pg_catalog.text, pg_catalog.version()),
    ('version', pg_catalog.current_setting('server_version')),
    ('collation', d.datcollate::pg_catalog.text),
    ('isolation', pg_catalog.current_setting('default_transaction_isolation')),
    ('synchronous_commit', pg_catalog.current_setting('synchronous_commit'))) AS f (name, value)
WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()

-- name: hidden
-- Words that are not sent on, and what stands for them.
SELECT pg_catalog.host(pg_catalog.inet_server_addr()), '<server>'
UNION ALL SELECT session_user::pg_catalog.text, '<login>'
UNION ALL SELECT pg_catalog.current_database()::pg_catalog.text, '<database>'

-- name: session_number
SELECT pg_catalog.pg_backend_pid()

-- name: kill
SELECT pg_catalog.pg_terminate_backend(%s)

-- name: create_inside
-- Who is inside: a witness beside the protocol.
CREATE TABLE {schema}.certify_inside (
    resource_id pg_catalog.text NOT NULL,
    who         pg_catalog.text NOT NULL,
    access_type pg_catalog.text NOT NULL,
    PRIMARY KEY (resource_id, who)
)

-- name: create_dead
-- Whose rows there count no more, as they were killed.
CREATE TABLE {schema}.certify_dead (who pg_catalog.text NOT NULL PRIMARY KEY)

-- name: create_counter
CREATE TABLE {schema}.certify_counter (number integer NOT NULL)

-- name: begin_counter
INSERT INTO {schema}.certify_counter (number) VALUES (0)

-- name: enter
INSERT INTO {schema}.certify_inside (resource_id, who, access_type) VALUES (%s, %s, %s)

-- name: others
SELECT i.who, i.access_type FROM {schema}.certify_inside AS i
WHERE i.resource_id OPERATOR(pg_catalog.=) %s AND i.who OPERATOR(pg_catalog.<>) %s
  AND NOT EXISTS (SELECT FROM {schema}.certify_dead AS d WHERE d.who OPERATOR(pg_catalog.=) i.who)

-- name: leave
DELETE FROM {schema}.certify_inside WHERE resource_id OPERATOR(pg_catalog.=) %s AND who OPERATOR(pg_catalog.=) %s

-- name: bury
INSERT INTO {schema}.certify_dead (who) VALUES (%s)

-- name: read_counter
SELECT number FROM {schema}.certify_counter

-- name: write_counter
UPDATE {schema}.certify_counter SET number = %s

-- name: positions
SELECT queue_position FROM {schema}.{table} WHERE resource_id OPERATOR(pg_catalog.=) %s

-- name: acquire
CALL {schema}.acquire(%s, %s, %s, timeout_ms => %s)

-- name: release
SELECT {schema}.release(%s)

-- name: begin
BEGIN

-- name: rollback
ROLLBACK

-- name: commit
COMMIT

-- name: assert_holding
CALL {schema}.assert_holding(%s, %s)

-- name: create_guarded
-- In a schema of its own: those of sqlsem's own schema cannot be guarded.
CREATE SCHEMA {schema}_own;
CREATE TABLE {schema}_own.guarded (number integer NOT NULL PRIMARY KEY)

-- name: guard
SELECT {schema}.guard_table('{schema}_own.guarded', 'certify-guarded')

-- name: unguard
SELECT {schema}.unguard_table('{schema}_own.guarded')

-- name: drop_guarded
DROP SCHEMA IF EXISTS {schema}_own CASCADE

-- name: bare_rows
INSERT INTO {schema}.{table} (resource_id, requesting_id) VALUES ('certify-bare', 'a'), ('certify-bare', 'b'), ('certify-bare', 'c')

-- name: bare_rows_left
DELETE FROM {schema}.{table} WHERE resource_id OPERATOR(pg_catalog.=) 'certify-bare'

-- name: drop_own
DROP SCHEMA IF EXISTS {schema}_own CASCADE;
DROP TABLE IF EXISTS {schema}.certify_inside, {schema}.certify_dead, {schema}.certify_counter

-- name: drop_roles
DROP ROLE IF EXISTS {schema}_user, {schema}_putter, {schema}_worker, {schema}_operator, {schema}_reader

-- name: remains
SELECT 'schema ' OPERATOR(pg_catalog.||) n.nspname::pg_catalog.text FROM pg_catalog.pg_namespace AS n
WHERE n.nspname OPERATOR(pg_catalog.=) ANY (ARRAY['{schema}', '{schema}_own'])
UNION ALL
SELECT 'role ' OPERATOR(pg_catalog.||) r.rolname::pg_catalog.text FROM pg_catalog.pg_roles AS r
WHERE pg_catalog.starts_with(r.rolname::pg_catalog.text, '{schema}_')
