-- sqlsem, what `sqlsem doctor` asks PostgreSQL. Nothing here needs the sqlsem tables, or changes anything.

-- name: server
SELECT current_setting('server_version_num')::integer, 'PostgreSQL ' || current_setting('server_version'),
       pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean

-- name: permission
-- Who we are; whether the schema is there and may be used; whether the routines are there and may be called.
SELECT current_user, n.oid IS NOT NULL, has_schema_privilege(n.oid, 'USAGE'),
       count(p.oid) > 0,
       coalesce(bool_and(has_function_privilege(p.oid, 'EXECUTE')) FILTER (WHERE p.proname = 'register'), false),
       coalesce(bool_and(has_function_privilege(p.oid, 'EXECUTE')) FILTER (WHERE p.proname = 'revoke'), false)
FROM (SELECT lower('{schema}') AS name) AS wanted
LEFT JOIN pg_namespace AS n ON n.nspname = wanted.name
LEFT JOIN pg_proc AS p ON p.pronamespace = n.oid AND p.proname IN ('register', 'revoke')
GROUP BY n.oid

-- name: settings
-- What holds for connections that, unlike ours, do not set it themselves; and our own keepalive.
SELECT reset_val, current_setting('synchronous_commit'), current_setting('tcp_keepalives_idle'),
       current_setting('tcp_keepalives_interval'), current_setting('tcp_keepalives_count'),
       (SELECT setting FROM pg_settings WHERE name = 'tcp_user_timeout')
FROM pg_settings WHERE name = 'default_transaction_isolation'

-- name: clock
SELECT extract(epoch FROM clock_timestamp())::double precision

-- name: beacon_take
SELECT pg_backend_pid(), pg_try_advisory_lock(%(key)s)

-- name: beacon_look
-- Asked on a second connection: is it another backend, does the first one still hold its lock, and are we kept out?
SELECT pg_backend_pid(),
       EXISTS (SELECT FROM pg_locks
               WHERE locktype = 'advisory' AND granted AND pid = %(pid)s AND objsubid = 1
                 AND classid = (%(key)s::bigint >> 32)::oid AND objid = (%(key)s::bigint & 4294967295)::oid),
       NOT pg_try_advisory_xact_lock(%(key)s)

-- name: beacon_give
SELECT pg_backend_pid(), pg_advisory_unlock(%(key)s)
