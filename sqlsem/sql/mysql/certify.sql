-- sqlsem, the statements of `sqlsem certify` for MariaDB and MySQL. (Most are in sqlsem/sql/statements.) A session keeps
-- the server's own settings here, and parameters are those of the driver.
-- where {name} is VARCHAR(200)
-- where {options} is ENGINE = InnoDB
-- where {mark} is %s

-- name: facts
SELECT 'server', CONCAT(CASE WHEN VERSION() LIKE '%MariaDB%' THEN '' ELSE 'MySQL ' END, VERSION());
SHOW VARIABLES WHERE variable_name IN (
    'version', 'collation_database', 'innodb_flush_log_at_trx_commit', 'sync_binlog', 'log_bin', 'binlog_format', 'tx_isolation',
    'transaction_isolation', 'innodb_snapshot_isolation', 'lower_case_table_names', 'sql_mode', 'wsrep_on')

-- name: hidden
-- Words that the report must not contain, and the placeholders for them.
SELECT @@hostname, '<server>' UNION ALL SELECT SUBSTRING_INDEX(USER(), '@', 1), '<login>' UNION ALL SELECT DATABASE(), '<database>'

-- name: session_number
SELECT CONNECTION_ID()

-- name: kill
KILL %s

-- name: raw_take
DO GET_LOCK('{schema}', 10)

-- name: raw_give
DO RELEASE_LOCK('{schema}')

-- name: old_snapshot
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
START TRANSACTION WITH CONSISTENT SNAPSHOT

-- name: rollback
ROLLBACK

-- name: workers
SELECT @@max_connections

-- name: started
-- About when the server was started, in seconds since 1970.
SELECT UNIX_TIMESTAMP(NOW(6)) - CAST(s.variable_value AS DOUBLE)
FROM /*M! information_schema */ /*!80019 performance_schema */ .global_status AS s WHERE s.variable_name = 'Uptime'

-- name: clock
SELECT CAST(UNIX_TIMESTAMP(NOW(6)) AS DOUBLE)

-- name: collations
-- Ways to create a database, beside the default.
SELECT 'CHARACTER SET latin1 COLLATE latin1_swedish_ci' UNION ALL SELECT 'CHARACTER SET utf8mb4 COLLATE utf8mb4_turkish_ci'
UNION ALL SELECT 'CHARACTER SET utf8mb4 COLLATE utf8mb4_bin'

-- name: create_database
CREATE DATABASE certify_database

-- name: drop_database
DROP DATABASE IF EXISTS certify_database

-- name: drop_own
DROP TABLE IF EXISTS {schema}_certify_inside, {schema}_certify_dead, {schema}_certify_counter

-- name: remains
-- Each table that remains, and the statement that removes it.
SELECT CONCAT('table ', table_name), CONCAT('DROP TABLE ', table_name) FROM information_schema.tables
WHERE table_schema = DATABASE() AND LEFT(table_name, CHAR_LENGTH('{schema}_')) = '{schema}_'
