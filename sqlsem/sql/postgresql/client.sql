-- sqlsem, the statements that the Python client sends to PostgreSQL.

-- name: version
SELECT CASE WHEN to_regclass('{schema}.setting') IS NULL THEN NULL ELSE 1 END

-- name: installed
SELECT value FROM {schema}.setting WHERE name = 'schema_version'

-- name: settings
SELECT name, value FROM {schema}.settings()

-- name: backend
SELECT pg_catalog.pg_backend_pid()

-- name: session
SELECT set_config('lock_timeout', %(lock_timeout)s, false), -- (Since versions 14 and 17.)
       CASE WHEN current_setting('idle_session_timeout', true) IS NOT NULL THEN set_config('idle_session_timeout', '0', false) END,
       CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', false) END,
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

-- name: upgrade
SELECT {schema}.upgrade(%s::varchar, %s::bigint, %s::varchar, %s::integer)

-- name: begin_upgrade
SELECT {schema}.begin_upgrade(%s::varchar, %s::bigint, %s::varchar, %s::boolean)

-- name: downgrade
SELECT {schema}.downgrade(%s::varchar, %s::bigint, %s::varchar)

-- name: hold_entry
SELECT {schema}.hold_entry(%s::varchar, %s::bigint, %s::varchar)

-- name: cancel
SELECT {schema}.cancel(%s, %s, %s)

-- name: find_deadlock
SELECT member_id, host, pid, session_id, owner, ahead_resource, ahead_position, ahead_granted,
       resource_id, queue_position, upgrade, behind_position, whos
FROM {schema}.find_deadlock(%s) ORDER BY step

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

-- name: put_tasks
SELECT {schema}.put_tasks(%s, %s, %s)

-- name: claim_task
SELECT * FROM {schema}.claim_task(
    %s::integer, %s::varchar, %s::varchar, %s::varchar, %s::boolean)

-- name: end_task
SELECT {schema}.end_task(%s::integer, %s::bigint, %s::integer, %s::varchar, %s::text, %s::text)

-- name: next_task
SELECT * FROM {schema}.next_task(
    %s::integer, %s::bigint, %s::integer, %s::varchar, %s::text, %s::text,
    %s::varchar, %s::varchar, %s::varchar, %s::boolean)

-- name: next_tasks
SELECT * FROM {schema}.next_tasks(
    %s::integer, %s::json, %s::varchar, %s::varchar, %s::varchar, %s::boolean, %s::integer)

-- name: return_claim
SELECT {schema}.return_claim(%s, %s, %s)

-- name: recover_tasks
SELECT {schema}.recover_tasks(%s, %s)

-- name: queue_state
SELECT * FROM {schema}.queue_state(%s)

-- name: list_tasks
SELECT * FROM {schema}.list_tasks(%s, %s, %s)

-- name: task_attempts
SELECT * FROM {schema}.task_attempts(%s)

-- name: set_task
SELECT {schema}.set_task(%s, %s)

-- name: prune_tasks
SELECT {schema}.prune_tasks(%s)

-- name: recover_rounds
SELECT {schema}.recover_rounds(%s, %s)

-- name: start_part
SELECT code, id, attempt, previous FROM {schema}.start_part(%s, %s, %s, %s, %s, %s, %s, %s, %s)

-- name: end_part
SELECT code, id, is_last, round_status, then_attempt, kind, body FROM {schema}.end_part(%s, %s, %s, %s, %s, %s, %s, %s, %s)

-- name: claim_then
SELECT id, name, then_attempt, kind, body FROM {schema}.claim_then(%s, %s, %s, %s, %s, %s)

-- name: return_then
SELECT {schema}.return_then(%s, %s)

-- name: end_then
SELECT {schema}.end_then(%s, %s, %s, %s)

-- name: list_rounds
SELECT * FROM {schema}.list_rounds(%s, %s, %s)
