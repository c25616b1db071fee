-- sqlsem, the statements of `sqlsem doctor` for PostgreSQL. None of them needs the sqlsem tables, or changes anything.
-- (Names are qualified, as in client.sql.)

-- name: server
SELECT pg_catalog.current_setting('server_version_num')::integer,
       'PostgreSQL '::pg_catalog.text OPERATOR(pg_catalog.||) pg_catalog.current_setting('server_version'),
       pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('default_transaction_read_only')::boolean

-- name: permission
-- The login; whether the schema exists and may be used; whether the routines exist and may be called; the owner of the
-- schema; whether that owner is another login without superuser rights, or other logins may create objects in the
-- schema.
SELECT current_user, n.oid IS NOT NULL, pg_catalog.has_schema_privilege(n.oid, 'USAGE'::pg_catalog.text),
       pg_catalog.count(p.oid) OPERATOR(pg_catalog.>) 0::bigint,
       pg_catalog.array_agg(DISTINCT p.proname::pg_catalog.text) FILTER (WHERE pg_catalog.has_function_privilege(p.oid, 'EXECUTE'::pg_catalog.text))
FROM (SELECT pg_catalog.lower('{schema}'::pg_catalog.text) AS name) AS wanted
LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname OPERATOR(pg_catalog.=) wanted.name::pg_catalog.name
LEFT JOIN pg_catalog.pg_proc AS p ON p.pronamespace OPERATOR(pg_catalog.=) n.oid
     AND p.proname::pg_catalog.text OPERATOR(pg_catalog.=) ANY (ARRAY['register', 'revoke', 'put_tasks', 'claim_task', 'entries', 'kept_locks'])
GROUP BY n.oid

-- name: settings
-- The server's defaults for connections (sqlsem's connections set their own); and the keepalive of this connection.
SELECT s.reset_val, pg_catalog.current_setting('synchronous_commit'), pg_catalog.current_setting('tcp_keepalives_idle'),
       pg_catalog.current_setting('tcp_keepalives_interval'), pg_catalog.current_setting('tcp_keepalives_count'),
       (SELECT t.setting FROM pg_catalog.pg_settings AS t WHERE t.name OPERATOR(pg_catalog.=) 'tcp_user_timeout'::pg_catalog.text)
FROM pg_catalog.pg_settings AS s WHERE s.name OPERATOR(pg_catalog.=) 'default_transaction_isolation'::pg_catalog.text

-- name: locks
-- The number of locks for which the server's table of locks has room at least, and the number of locks in it.
-- (Fast-path locks and locks of serializable transactions are not in that table.)
SELECT pg_catalog.current_setting('max_locks_per_transaction')::bigint
       OPERATOR(pg_catalog.*) (pg_catalog.current_setting('max_connections')::bigint
                               OPERATOR(pg_catalog.+) pg_catalog.current_setting('max_prepared_transactions')::bigint),
       (SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks AS l
        WHERE NOT l.fastpath AND l.mode OPERATOR(pg_catalog.<>) 'SIReadLock'::pg_catalog.text)

-- name: tls
-- This session's own row.
SELECT s.ssl, s.version, s.cipher FROM pg_catalog.pg_stat_ssl AS s
WHERE s.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()

-- name: replication
-- The timeline; the synchronous standbys that are configured; the number of connected standbys, and of synchronous ones
-- (NULL if this login may not see them).
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL
            ELSE pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) END,
       pg_catalog.current_setting('synchronous_standby_names'),
       CASE WHEN pg_catalog.pg_has_role('pg_monitor'::pg_catalog.name, 'MEMBER'::pg_catalog.text) THEN pg_catalog.count(r.pid) END,
       CASE WHEN pg_catalog.pg_has_role('pg_monitor'::pg_catalog.name, 'MEMBER'::pg_catalog.text)
            THEN pg_catalog.count(r.pid) FILTER (WHERE r.sync_state OPERATOR(pg_catalog.=) ANY (ARRAY['sync', 'quorum'])) END
FROM pg_catalog.pg_stat_replication AS r

-- name: clock
SELECT pg_catalog.date_part('epoch'::pg_catalog.text, pg_catalog.clock_timestamp())

-- name: beacon_take
SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_try_advisory_lock(%(key)s::bigint)

-- name: beacon_look
-- Run on a second connection: its backend; if the first connection still holds its lock; and if that lock blocks this
-- connection.
SELECT pg_catalog.pg_backend_pid(),
       EXISTS (SELECT FROM pg_catalog.pg_locks AS l
               WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory'::pg_catalog.text AND l.granted AND l.pid OPERATOR(pg_catalog.=) %(pid)s::integer
                 AND l.objsubid OPERATOR(pg_catalog.=) 1::smallint
                 AND l.classid OPERATOR(pg_catalog.=) (%(key)s::bigint OPERATOR(pg_catalog.>>) 32)::pg_catalog.oid
                 AND l.objid OPERATOR(pg_catalog.=) (%(key)s::bigint OPERATOR(pg_catalog.&) 4294967295::bigint)::pg_catalog.oid),
       NOT pg_catalog.pg_try_advisory_xact_lock(%(key)s::bigint)

-- name: beacon_give
SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_advisory_unlock(%(key)s::bigint)
