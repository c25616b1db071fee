-- sqlsem, the statements of `sqlsem certify` for PostgreSQL, in a schema that it creates and drops. (Names are
-- qualified, as in client.sql.)

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
-- Words that the report must not contain, and the placeholders for them.
SELECT pg_catalog.host(pg_catalog.inet_server_addr()), '<server>'
UNION ALL SELECT session_user::pg_catalog.text, '<login>'
UNION ALL SELECT pg_catalog.current_database()::pg_catalog.text, '<database>'

-- name: session_number
SELECT pg_catalog.pg_backend_pid()

-- name: kill
SELECT pg_catalog.pg_terminate_backend(%s)

-- name: create_inside
-- The present holders, recorded independently of sqlsem.
CREATE TABLE {schema}.certify_inside (
    resource_id pg_catalog.text NOT NULL,
    who         pg_catalog.text NOT NULL,
    access_type pg_catalog.text NOT NULL,
    PRIMARY KEY (resource_id, who)
)

-- name: create_dead
-- The holders that were killed: their rows in certify_inside no longer count.
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

-- name: delete_member_rows
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
-- The guarded table needs another schema: the tables of sqlsem's schema cannot be guarded.
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

-- name: insert_guarded
INSERT INTO {schema}_own.guarded (number) VALUES (1)

-- name: update_guarded
UPDATE {schema}_own.guarded SET number = 2

-- name: delete_guarded
DELETE FROM {schema}_own.guarded

-- name: truncate_guarded
TRUNCATE {schema}_own.guarded

-- name: merge_guarded
-- (As a string, as servers before version 15 do not know MERGE.)
DO 'BEGIN EXECUTE ''MERGE INTO {schema}_own.guarded AS t USING (SELECT 5 AS number) AS s
    ON t.number OPERATOR(pg_catalog.=) s.number WHEN MATCHED THEN UPDATE SET number = 6
    WHEN NOT MATCHED THEN INSERT (number) VALUES (s.number)''; END'

-- name: bulk_guarded
-- A file of this host, which the server may not see.
COPY {schema}_own.guarded (number) FROM 'certify_file'

-- name: age_handovers
UPDATE {schema}.handover SET given_at = given_at OPERATOR(pg_catalog.-) '30 days'::pg_catalog.interval,
    adopted_at = adopted_at OPERATOR(pg_catalog.-) '30 days'::pg_catalog.interval

-- name: renew
SELECT {schema}.renew(%s, %s)

-- name: reset
-- The statement that a pooler runs before another program gets the session.
DISCARD ALL

-- name: hand_over
CALL {schema}.hand_over(%s)

-- name: adopt
CALL {schema}.adopt(%s)

-- name: status
SELECT resource_id FROM {schema}.status()

-- name: set_limit
SELECT {schema}.set_limit(%s, 2)

-- name: create_user
CREATE ROLE certify_user

-- name: drop_user
DROP ROLE IF EXISTS certify_user

-- name: add_member
GRANT certify_role TO certify_user

-- name: create_group
CREATE ROLE certify_user

-- name: drop_group
DROP ROLE IF EXISTS certify_user

-- name: as_user
SET ROLE certify_user

-- name: as_before
RESET ROLE

-- name: denied
-- The server's error for a login without the right.
SELECT '42501'

-- name: callers_settings
-- Settings that a calling session may have.
SELECT s.setting FROM (VALUES
    ('SET search_path = pg_temp'::pg_catalog.text),
    ('SET standard_conforming_strings = off'),
    ('SET DateStyle = "German, DMY"'),
    ('SET TimeZone = "Asia/Kathmandu"'),
    ('SET IntervalStyle = "iso_8601"'),
    ('SET bytea_output = "escape"'),
    ('SET extra_float_digits = -15'),
    ('SET lock_timeout = 1'),
    ('SET synchronous_commit = off'),
    ('SET client_min_messages = error'),
    ('SET plan_cache_mode = force_generic_plan'),
    ('SET enable_indexscan = off'),
    ('SET row_security = off'),
    ('SET xmloption = document'),
    ('SET quote_all_identifiers = on')) AS s (setting)

-- name: shown_settings
-- Expressions, each of which a server may lack.
SELECT pg_catalog.format('pg_catalog.current_setting(%L)', s.name) FROM (VALUES
    ('search_path'::pg_catalog.text), ('standard_conforming_strings'), ('DateStyle'), ('TimeZone'), ('IntervalStyle'), ('bytea_output'),
    ('extra_float_digits'), ('lock_timeout'), ('synchronous_commit'), ('client_min_messages'), ('plan_cache_mode'), ('enable_indexscan'),
    ('row_security'), ('xmloption'), ('transaction_isolation'), ('quote_all_identifiers')) AS s (name)

-- name: raw_take
SELECT pg_catalog.pg_advisory_lock(pg_catalog.hashtext('{schema}'::pg_catalog.text))

-- name: raw_give
SELECT pg_catalog.pg_advisory_unlock(pg_catalog.hashtext('{schema}'::pg_catalog.text))

-- name: log_counters
-- The number of flushes of the log (not known), and its bytes, since the server was started.
SELECT NULL::pg_catalog.int8, pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_insert_lsn(), '0/0')

-- name: dead_rows
SELECT pg_catalog.pg_stat_get_dead_tuples('{schema}.{table}'::pg_catalog.regclass)

-- name: old_snapshot
BEGIN ISOLATION LEVEL REPEATABLE READ

-- name: workers
SELECT pg_catalog.current_setting('max_connections')::pg_catalog.int4

-- name: started
SELECT pg_catalog.pg_postmaster_start_time()::pg_catalog.text

-- name: clock
SELECT pg_catalog.date_part('epoch'::pg_catalog.text, pg_catalog.clock_timestamp())

-- name: collations
-- Ways to create a database, beside the default.
SELECT 'LOCALE ''C'' TEMPLATE template0'
UNION ALL
SELECT 'LOCALE_PROVIDER icu ICU_LOCALE ''tr'' LOCALE ''C'' ENCODING ''UTF8'' TEMPLATE template0'
WHERE EXISTS (SELECT FROM pg_catalog.pg_collation AS c WHERE c.collprovider OPERATOR(pg_catalog.=) 'i')
  AND pg_catalog.current_setting('server_version_num')::pg_catalog.int4 OPERATOR(pg_catalog.>=) 150000

-- name: create_database
CREATE DATABASE certify_database

-- name: drop_database
DROP DATABASE IF EXISTS certify_database WITH (FORCE)

-- name: acquire_as
CALL {schema}.acquire(%s, timeout_ms => 0, requesting_id => 'certify')

-- name: release_as
SELECT {schema}.release(%s, requesting_id => 'certify')

-- name: drop_own
DROP SCHEMA IF EXISTS {schema}_own CASCADE;
DROP TABLE IF EXISTS {schema}.certify_inside, {schema}.certify_dead, {schema}.certify_counter

-- name: drop_roles
DROP ROLE IF EXISTS {schema}_user, {schema}_putter, {schema}_worker, {schema}_operator, {schema}_reader

-- name: remains
-- Each object that remains, and the statement that removes it; NULL: the script of `sqlsem sql postgresql drop`.
SELECT 'schema ' OPERATOR(pg_catalog.||) n.nspname::pg_catalog.text,
       CASE WHEN n.nspname OPERATOR(pg_catalog.=) '{schema}_own' THEN 'DROP SCHEMA {schema}_own CASCADE' END
FROM pg_catalog.pg_namespace AS n
WHERE n.nspname OPERATOR(pg_catalog.=) ANY (ARRAY['{schema}', '{schema}_own'])
UNION ALL
SELECT 'role ' OPERATOR(pg_catalog.||) r.rolname::pg_catalog.text, 'DROP ROLE ' OPERATOR(pg_catalog.||) r.rolname::pg_catalog.text
FROM pg_catalog.pg_roles AS r
WHERE pg_catalog.starts_with(r.rolname::pg_catalog.text, '{schema}_')
