-- sqlsem, the statements that the Python client sends to PostgreSQL.
--
-- Every name in them says where it is to be found, also of functions and operators: anyone who may create some in a schema of
-- the caller's search_path must not be able to stand in for them. (Behind a pooler search_path cannot be set: it would be
-- other people's, too.)

-- name: version
SELECT CASE WHEN pg_catalog.to_regclass('{schema}.setting'::text) IS NULL THEN NULL ELSE 1 END

-- name: installed
SELECT value FROM {schema}.setting WHERE name OPERATOR(pg_catalog.=) 'schema_version'::text

-- name: settings
SELECT name, value FROM {schema}.settings()

-- name: backend
SELECT pg_catalog.pg_backend_pid()

-- name: session
SELECT pg_catalog.set_config('lock_timeout', %(lock_timeout)s, false),  -- (Since versions 14 and 17.)
       CASE WHEN pg_catalog.current_setting('idle_session_timeout', true) IS NOT NULL
            THEN pg_catalog.set_config('idle_session_timeout', '0', false) END,
       CASE WHEN pg_catalog.current_setting('transaction_timeout', true) IS NOT NULL
            THEN pg_catalog.set_config('transaction_timeout', '0', false) END,
       pg_catalog.set_config('idle_in_transaction_session_timeout', '0', false),
       pg_catalog.set_config('statement_timeout', '0', false),
       pg_catalog.set_config('tcp_keepalives_idle', %(keepalive)s, false),
       pg_catalog.set_config('tcp_keepalives_interval', '2', false), pg_catalog.set_config('tcp_keepalives_count', '3', false),
       pg_catalog.set_config('default_transaction_isolation', 'read committed', false),
       CASE WHEN %(own)s::boolean THEN pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false) END

-- name: enrol
SELECT {schema}.enrol(%s, %s, %s, %s, %s)

-- name: resume_member
SELECT {schema}.resume_member(%s)

-- name: ping
SELECT known, positions, revoked FROM {schema}.ping(%s)

-- name: resign
SELECT {schema}.resign(%s)

-- name: register
-- (A function among the columns is called without a detour over a table of its results.)
SELECT (r).queue_position, (r).granted
FROM (SELECT {schema}.register(
          %s::bigint, %s::varchar, %s::varchar, %s::varchar, %s::boolean,
          %s::varchar, %s::varchar, %s::integer, %s::integer, %s::varchar) AS r OFFSET 0) AS once

-- name: register_all
SELECT resource_id, queue_position, granted FROM {schema}.register_all(%s, %s, %s, %s, %s, %s)

-- name: wait
-- What is written while waiting is for people and may be lost in a crash of the server, as may a release, which is repeated.
SELECT pg_catalog.set_config('synchronous_commit', 'off', true), {schema}.wait(%s::varchar, %s::bigint, %s::integer)

-- name: look_all
SELECT pg_catalog.set_config('synchronous_commit', 'off', true), granted, gone
FROM {schema}.look_all(%s, %s::varchar[], %s::bigint[])

-- name: release
SELECT pg_catalog.set_config('synchronous_commit', 'off', true),
       {schema}.release(%s::varchar, %s::bigint, %s::varchar, %s::varchar)

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

-- name: deadlock_rows
SELECT queue_position, resource_id, member_id, owner, access_type, concurrency_limit, weight, granted, cap
FROM {schema}.deadlock_rows(%s)

-- name: living
SELECT member_id, host, pid, session_id FROM {schema}.living(%s, %s)

-- name: pin
SELECT {schema}.pin(%s, %s, %s)

-- name: entries
SELECT * FROM {schema}.entries(%s)

-- name: past
SELECT * FROM {schema}.past(%s, %s, %s::float, %s::float, %s, %s)

-- name: resources
SELECT * FROM {schema}.resources()

-- name: overview
SELECT * FROM {schema}.overview()

-- name: operations
SELECT * FROM {schema}.operations(%s, %s, %s, %s, %s, %s)

-- name: resource_settings
SELECT * FROM {schema}.resource_settings()

-- name: set_resource
-- (What an operator does is written down with where it was done.)
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.set_resource(%s, %s, %s)

-- name: rights
SELECT pg_catalog.has_function_privilege('{schema}.revoke(bigint, boolean)'::text, 'EXECUTE'::text),
       pg_catalog.has_function_privilege('{schema}.set_task(bigint, varchar)'::text, 'EXECUTE'::text)

-- name: revoke
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.revoke(%s, %s)

-- name: reap
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.reap()

-- name: prune
SELECT {schema}.prune(%s)

-- name: prune_operations
SELECT {schema}.prune_operations(%s)

-- name: install_lock
SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('sqlsem.install.{schema}'::text)::bigint)

-- name: stand_aside
-- Before an upgrade from version 1 or 2, whose waits keep locks on the tables while they sleep: they return as long as the
-- install lock is held, so that the tables can be had. In a transaction of its own.
DO $$
DECLARE
    v_name text;
    v_old  regprocedure;
    v_text text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    PERFORM pg_advisory_xact_lock(hashtext('sqlsem.install.{schema}'));
    FOREACH v_name IN ARRAY ARRAY['wait(varchar, bigint, integer)', 'upgrade(varchar, bigint, varchar, integer)'] LOOP
        v_old := to_regprocedure('{schema}.' || v_name);
        CONTINUE WHEN v_old IS NULL OR (SELECT value::integer > 2 FROM {schema}.setting WHERE name = 'schema_version')
            OR to_regprocedure('{schema}.' || replace(v_name, '(', '_before(')) IS NOT NULL;
        v_text := pg_get_functiondef(v_old);
        v_name := split_part(v_name, '(', 1);
        EXECUTE overlay(v_text PLACING v_name || '_before(' FROM strpos(v_text, v_name || '(') FOR length(v_name) + 1);
        EXECUTE left(v_text, strpos(v_text, 'AS $function$') - 1) || 'AS $function$
BEGIN
    IF NOT pg_try_advisory_lock_shared(hashtext(''sqlsem.install.{schema}'')) THEN
        PERFORM pg_sleep(0.05);
        RETURN -1;
    END IF;
    PERFORM pg_advisory_unlock_shared(hashtext(''sqlsem.install.{schema}''));
    RETURN {schema}.' || v_name || '_before(' || CASE v_name WHEN 'wait' THEN '$1, $2, $3' ELSE '$1, $2, $3, $4' END || ');
END
$function$';
    END LOOP;
END
$$

-- name: set_version
UPDATE {schema}.setting SET value = %s WHERE name OPERATOR(pg_catalog.=) 'schema_version'::text

-- name: put_tasks
SELECT {schema}.put_tasks(%s, %s, %s)

-- name: claim_task
SELECT * FROM {schema}.claim_task(
    %s::bigint, %s::varchar, %s::varchar, %s::varchar, %s::boolean)

-- name: end_task
SELECT {schema}.end_task(%s::bigint, %s::bigint, %s::integer, %s::varchar, %s::text, %s::text)

-- name: next_task
SELECT * FROM {schema}.next_task(
    %s::bigint, %s::bigint, %s::integer, %s::varchar, %s::text, %s::text,
    %s::varchar, %s::varchar, %s::varchar, %s::boolean)

-- name: next_tasks
SELECT * FROM {schema}.next_tasks(
    %s::bigint, %s::json, %s::varchar, %s::varchar, %s::varchar, %s::boolean, %s::integer)

-- name: return_claim
SELECT {schema}.return_claim(%s, %s, %s)

-- name: recover_tasks
SELECT {schema}.recover_tasks(%s, %s)

-- name: listen
SELECT {schema}.listen_for_tasks()

-- name: next_ready
SELECT {schema}.next_ready(%s)

-- name: queue_state
SELECT * FROM {schema}.queue_state(%s)

-- name: page_tasks
SELECT * FROM {schema}.page_tasks(%s, %s, %s, %s)

-- name: queue_counts
SELECT * FROM {schema}.queue_counts(%s)

-- name: task_attempts
SELECT * FROM {schema}.task_attempts(%s)

-- name: set_task
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.set_task(%s, %s)

-- name: cancel_task
SELECT {schema}.cancel_task(%s)

-- name: asked_of_tasks
SELECT * FROM {schema}.asked_of_tasks(%s, %s::bigint[])

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
