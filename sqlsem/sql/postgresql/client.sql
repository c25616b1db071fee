-- sqlsem, the statements that the Python client sends to PostgreSQL.

-- name: version
SELECT CASE WHEN to_regclass('{schema}.setting') IS NULL THEN NULL ELSE 1 END

-- name: installed
SELECT value FROM {schema}.setting WHERE name = 'schema_version'

-- name: settings
SELECT name, value FROM {schema}.settings()

-- name: session
SELECT set_config('lock_timeout', %(lock_timeout)s, false), set_config('idle_session_timeout', '0', false),
       set_config('idle_in_transaction_session_timeout', '0', false), set_config('statement_timeout', '0', false),
       set_config('tcp_keepalives_idle', %(keepalive)s, false), set_config('tcp_keepalives_interval', '2', false),
       set_config('tcp_keepalives_count', '3', false), set_config('default_transaction_isolation', 'read committed', false)

-- name: enrol
SELECT {schema}.enrol(%(host)s, %(pid)s, %(program)s, %(grace)s, %(lease)s)

-- name: resume_member
SELECT {schema}.resume_member(%(member)s)

-- name: ping
SELECT known, positions, revoked FROM {schema}.ping(%(member)s)

-- name: resign
SELECT {schema}.resign(%(member)s)

-- name: register
SELECT queue_position, granted FROM {schema}.register(
    %s::integer, %s::varchar, %s::varchar, %s::varchar, %s::boolean,
    %s::varchar, %s::varchar, %s::integer, %s::integer, %s::varchar)

-- name: register_all
SELECT resource_id, queue_position, granted FROM {schema}.register_all(%s, %s, %s, %s, %s, %s)

-- name: wait
SELECT {schema}.wait(%s::varchar, %s::bigint, %s::integer)

-- name: release
SELECT {schema}.release(%s::varchar, %s::bigint, %s::varchar, %s::varchar)

-- name: cancel
SELECT {schema}.cancel(%s, %s, %s)

-- name: pin
SELECT {schema}.pin(%s, %s, %s)

-- name: entries
SELECT * FROM {schema}.entries(%s)

-- name: past
SELECT * FROM {schema}.past(%s, %s)

-- name: resources
SELECT * FROM {schema}.resources()

-- name: set_resource
SELECT {schema}.set_resource(%s, %s, %s)

-- name: revoke
SELECT {schema}.revoke(%s, %s)

-- name: reap
SELECT {schema}.reap()

-- name: prune
SELECT {schema}.prune(%s)

-- name: now
SELECT clock_timestamp()

-- name: install_lock
SELECT pg_advisory_xact_lock(hashtext('sqlsem.install.{schema}'))

-- name: set_version
UPDATE {schema}.setting SET value = %s WHERE name = 'schema_version'
