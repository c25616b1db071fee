-- sqlsem, the statements of `sqlsem doctor` for MariaDB and MySQL.

-- name: server
SELECT VERSION(), @@global.read_only, @@innodb_flush_log_at_trx_commit, @@sync_binlog, @@log_bin, @@binlog_format,
       @@global.wait_timeout, @@max_connections

-- name: keepalive
-- When the server probes a silent connection, in seconds, and how often. (MySQL has none of these, and 0 is the system's.)
SHOW GLOBAL VARIABLES WHERE variable_name IN ('tcp_keepalive_time', 'tcp_keepalive_interval', 'tcp_keepalive_probes')

-- name: clock
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6

-- name: connections
SHOW GLOBAL STATUS LIKE 'Threads_connected'

-- name: replica
-- The servers from which this one replicates.
SELECT COUNT(*) FROM information_schema.processlist WHERE command IN ('Slave_IO', 'Slave_SQL')

-- name: tls
SHOW SESSION STATUS LIKE 'Ssl_cipher'

-- name: nodes
SHOW GLOBAL STATUS LIKE 'wsrep_incoming_addresses'

-- name: permission
SHOW GRANTS

-- name: beacon_take
SELECT CONNECTION_ID(), GET_LOCK(?, 0)

-- name: beacon_look
SELECT CONNECTION_ID(), IS_USED_LOCK(?)
