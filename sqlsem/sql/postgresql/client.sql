-- sqlsem, the statements that the Python client sends to PostgreSQL.
--
-- Each name in them is qualified, also of functions and operators: a login that may create objects in a schema of the
-- caller's search_path must not be able to replace them. (Behind a pooler search_path cannot be set: other programs
-- share the session.)

-- name: version
SELECT CASE WHEN pg_catalog.to_regclass('{schema}.setting'::pg_catalog.text) IS NULL THEN NULL ELSE 1 END

-- name: installed
SELECT name, value FROM {schema}.setting WHERE name OPERATOR(pg_catalog.=) ANY (ARRAY['schema_version', 'features'])

-- name: settings
SELECT name, value FROM {schema}.settings()

-- name: backend
SELECT pg_catalog.pg_backend_pid()

-- name: session
SELECT pg_catalog.set_config('lock_timeout', %(lock_timeout)s, false),  -- (The others exist from versions 14 and 17 on.)
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

-- name: register_member
SELECT {schema}.register_member(%s, %s, %s, %s, %s)

-- name: reattach_member
SELECT {schema}.reattach_member(%s)

-- name: heartbeat
SELECT known, positions, revoked FROM {schema}.heartbeat(%s)

-- name: deregister_member
SELECT {schema}.deregister_member(%s)

-- name: register
-- (A function among the columns is faster than in FROM, which stores its rows first.)
SELECT (r).queue_position, (r).granted
FROM (SELECT {schema}.register(
          %s::bigint, %s::varchar, %s::varchar, %s::varchar, %s::boolean,
          %s::varchar, %s::varchar, %s::integer, %s::integer, %s::varchar) AS r OFFSET 0) AS once

-- name: register_all
SELECT resource_id, queue_position, granted FROM {schema}.register_all(%s, %s, %s, %s, %s, %s)

-- feature: priorities
-- name: acquire_by_priority
SELECT queue_position, granted, before, ahead
FROM {schema}.acquire_by_priority(%s::bigint, %s::varchar, %s::varchar, %s::varchar, %s::boolean, %s::varchar, %s::varchar, %s::integer,
                        %s::integer, %s::varchar, %s::integer, %s::bigint)
-- end of feature: priorities

-- name: wait
-- synchronous_commit off: the writes of a wait are for displays, and a crash of the server may undo them. It may undo a
-- release, too: the client repeats it.
-- (In one column, as the client reads all columns.)
SELECT CASE WHEN pg_catalog.set_config('synchronous_commit', 'off', true) IS NOT NULL
            THEN {schema}.wait(%s::varchar, %s::bigint, %s::integer) END

-- name: poll_waiters
SELECT pg_catalog.set_config('synchronous_commit', 'off', true), granted, gone
FROM {schema}.poll_waiters(%s, %s::varchar[], %s::bigint[])

-- name: release
SELECT CASE WHEN pg_catalog.set_config('synchronous_commit', 'off', true) IS NOT NULL
            THEN {schema}.release(%s::varchar, %s::bigint, %s::varchar, %s::varchar) END

-- feature: conversions
-- name: upgrade
SELECT {schema}.upgrade(%s::varchar, %s::bigint, %s::varchar, %s::integer)

-- name: begin_upgrade
SELECT {schema}.begin_upgrade(%s::varchar, %s::bigint, %s::varchar, %s::boolean)

-- name: downgrade
SELECT {schema}.downgrade(%s::varchar, %s::bigint, %s::varchar)

-- name: retake_wakeup_lock
SELECT {schema}.retake_wakeup_lock(%s::varchar, %s::bigint, %s::varchar)
-- end of feature: conversions

-- name: missing_wakeup_locks
SELECT position FROM {schema}.missing_wakeup_locks(%s::bigint) AS position

-- name: drop_wakeup_locks
SELECT {schema}.drop_wakeup_locks(%s::bigint, %s::varchar, %s::bigint[])

-- name: restore_wakeup_locks
SELECT {schema}.restore_wakeup_locks(%s::bigint, %s::bigint[])

-- name: cancel
SELECT {schema}.cancel(%s, %s, %s)

-- feature: rates
-- name: take_rate
SELECT code, wait_ms, times
FROM {schema}.take_rate(%s, %s, %s::bigint[], %s::bigint[], %s, %s, %s, %s::bigint[], %s::bigint[])

-- name: reset_rate
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.reset_rate(%s)

-- name: set_rate
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.set_rate(%s, %s, %s)

-- name: adjust_rate
SELECT {schema}.adjust_rate(%s, %s, %s)

-- name: rates
SELECT resource_id, window_ms, rate_limit, used, idle, taken, returned, waits, free_in, cap FROM {schema}.rates(%s)
-- end of feature: rates

-- feature: handovers
-- name: hand_over
SELECT {schema}.hand_over_rows(%s, %s::bigint[], %s, %s, %s)

-- name: adopt
SELECT code, words, seconds, resource_id, queue_position, access_type, concurrency_limit, weight, note
FROM {schema}.adopt_rows(%s, %s, %s, %s, %s)
-- end of feature: handovers

-- feature: once
-- name: once_due
SELECT {schema}.once_due(%s, %s, %s, %s, %s)

-- name: mark_once
SELECT {schema}.mark_once(%s, %s, %s)

-- name: once_last
SELECT granted_at, done_at, queue_position, requesting_id, login, taken_at FROM {schema}.once_last(%s)

-- name: once_forget
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.once_forget(%s)
-- end of feature: once

-- name: deadlock_rows
SELECT queue_position, resource_id, member_id, owner, access_type, concurrency_limit, weight, granted, cap
FROM {schema}.deadlock_rows(%s)

-- name: live_members
SELECT member_id, host, pid, session_id FROM {schema}.live_members(%s, %s)

-- name: pin
SELECT {schema}.pin(%s, %s, %s)

-- name: database_identity
SELECT {schema}.database_identity()

-- feature: handovers
-- name: release_on_commit
SELECT {schema}.release_on_commit(%s)

-- name: is_committed
SELECT {schema}.is_committed(%s)

-- name: delete_commit_marker
SELECT {schema}.delete_commit_marker(%s)
-- end of feature: handovers

-- feature: guards
-- name: session_notes
SELECT pg_catalog.pg_backend_pid(), coalesce(pg_catalog.current_setting('sqlsem.{schema}_session', true), '')

-- name: session_entry
SELECT coalesce({schema}.session_entry(%s, %s, %s), '')

-- name: note_session
SELECT pg_catalog.set_config('sqlsem.{schema}_session', %s, false)

-- name: guard_table
SELECT {schema}.guard_table(pg_catalog.to_regclass(%s), %s)

-- name: unguard_table
SELECT {schema}.unguard_table(pg_catalog.to_regclass(%s))

-- name: guarded_tables
SELECT * FROM {schema}.guarded_tables()
-- end of feature: guards

-- name: entries
SELECT * FROM {schema}.entries(%s)

-- name: past
SELECT * FROM {schema}.past(%s, %s, %s::float, %s::float, %s, %s)

-- name: resources
SELECT * FROM {schema}.resources()

-- feature: operate
-- name: overview
SELECT o.taken_at, o.settings, o.members, o.queues, o.batches, o.holds, {schema}.overview_rates() FROM {schema}.overview() AS o

-- name: kept_locks
SELECT kind, resource_id, pid, login, program, seconds, is_stranger FROM {schema}.kept_locks(%s)
-- end of feature: operate

-- name: operations
SELECT * FROM {schema}.operations(%s, %s, %s, %s, %s, %s)

-- feature: operate
-- name: resource_settings
SELECT * FROM {schema}.resource_settings()
-- end of feature: operate

-- feature: priorities
-- name: priorities
SELECT resource_id, ageing FROM {schema}.priorities()
-- end of feature: priorities

-- feature: operate
-- name: set_resource
-- (The record of an operator's call tells where the call came from.)
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.set_resource(%s, %s, %s)
-- end of feature: operate

-- name: rights
SELECT coalesce(pg_catalog.has_function_privilege(
                    pg_catalog.to_regprocedure('{schema}.revoke(bigint, boolean)'::pg_catalog.text)::pg_catalog.oid, 'EXECUTE'::pg_catalog.text), false),
       coalesce(pg_catalog.has_function_privilege(
                    pg_catalog.to_regprocedure('{schema}.set_task(bigint, varchar)'::pg_catalog.text)::pg_catalog.oid, 'EXECUTE'::pg_catalog.text), false)

-- feature: operate
-- name: revoke
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.revoke(%s, %s)

-- name: revoke_members
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.revoke_members(%s, %s, %s)

-- name: reap
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.reap()
-- end of feature: operate

-- name: prune
SELECT {schema}.prune(%s)

-- name: prune_operations
SELECT {schema}.prune_operations(%s)

-- name: is_installed
-- True if there is a table for installers to lock.
SELECT pg_catalog.to_regclass('{schema}.installer'::pg_catalog.text) IS NOT NULL

-- name: install_lock
LOCK TABLE {schema}.installer IN SHARE ROW EXCLUSIVE MODE

-- name: install_begin
-- From here on waiting sessions pause (is_upgraded).
SELECT pg_catalog.setval('{schema}.installer_backend_pid_seq'::pg_catalog.regclass, pg_catalog.pg_backend_pid()::bigint, true)

-- name: install_end
SELECT pg_catalog.setval('{schema}.installer_backend_pid_seq'::pg_catalog.regclass, 1::bigint, false)
WHERE pg_catalog.pg_sequence_last_value('{schema}.installer_backend_pid_seq'::pg_catalog.regclass)
      OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()::bigint

-- name: installers
SELECT l.pid, a.usename::pg_catalog.text
FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid OPERATOR(pg_catalog.=) l.pid
WHERE l.locktype OPERATOR(pg_catalog.=) 'relation'::pg_catalog.text AND l.granted
  AND l.relation OPERATOR(pg_catalog.=) pg_catalog.to_regclass('{schema}.installer'::pg_catalog.text)::pg_catalog.oid
  AND l.mode OPERATOR(pg_catalog.<>) 'AccessShareLock'::pg_catalog.text AND l.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid()
ORDER BY l.pid

-- name: blockers
-- Sessions with a lock on a table of the schema, oldest first.
SELECT a.pid, a.usename::pg_catalog.text, a.application_name, a.client_addr::pg_catalog.text, a.state,
       pg_catalog.to_char(a.xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'::pg_catalog.text)
FROM pg_catalog.pg_stat_activity AS a
WHERE a.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid() AND a.pid OPERATOR(pg_catalog.=) ANY (ARRAY(
    SELECT l.pid FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) l.relation
    WHERE l.granted AND l.locktype OPERATOR(pg_catalog.=) 'relation'::pg_catalog.text
      AND l.database OPERATOR(pg_catalog.=) (SELECT d.oid FROM pg_catalog.pg_database AS d
                                             WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())
      AND c.relnamespace OPERATOR(pg_catalog.=) pg_catalog.to_regnamespace('{schema}'::pg_catalog.text)::pg_catalog.oid))
ORDER BY a.xact_start LIMIT 5

-- name: lock_tables
-- Before the schema scripts of an upgrade, lock all tables of the schema at once, or none. (A script that locked one
-- after another could deadlock with a transaction that has one of them and waits for another.) Transactions begin with
-- table member or with the queue, so the attempts begin with either table in turn. No transaction waits behind the
-- upgrade for longer than a moment.
DO $$
DECLARE
    v_before pg_catalog.text := pg_catalog.current_setting('lock_timeout');
    v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
    v_until  pg_catalog.timestamptz := pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) interval '20 seconds';
    v_try    integer := 0;
    v_tables pg_catalog.text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    SELECT string_agg(c.oid::regclass::pg_catalog.text, ', ' ORDER BY c.oid) INTO v_tables
    FROM pg_class AS c WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r';
    LOOP
        v_try := v_try + 1;
        BEGIN
            PERFORM set_config('lock_timeout', '250ms', true);
            IF v_try % 2 = 1 THEN
                LOCK TABLE {schema}.member IN ACCESS EXCLUSIVE MODE;
            ELSE
                LOCK TABLE {schema}.{table} IN ACCESS EXCLUSIVE MODE;
            END IF;
            PERFORM set_config('lock_timeout', '50ms', true);
            EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', v_tables);
            EXIT;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            IF clock_timestamp() >= v_until THEN
                RAISE EXCEPTION 'sqlsem: the tables could not be had for the upgrade within 20 s; nothing was changed'
                    USING ERRCODE = '55P03',
                          HINT = 'Somebody keeps them in an open transaction (a dump, VACUUM FULL?), or they are used too much; try again later.';
            END IF;
            PERFORM pg_sleep(0.05 + random() / 10);
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', v_before, true), set_config('search_path', v_path, true);
END
$$

-- name: set_version
UPDATE {schema}.setting SET value = %s WHERE name OPERATOR(pg_catalog.=) 'schema_version'::pg_catalog.text

-- feature: queue
-- name: put_tasks
SELECT {schema}.put_tasks(%s, %s, %s)

-- name: put_tasks_once
SELECT {schema}.put_tasks_once(%s, %s, %s)

-- name: claim_task
SELECT * FROM {schema}.claim_task(
    %s::bigint, %s::varchar, %s::varchar, %s::varchar, %s::boolean)

-- name: claim_blocked
SELECT * FROM {schema}.claim_blocked(
    %s::bigint, %s::varchar, %s::varchar, %s::varchar, %s::boolean, %s::varchar, %s::varchar)

-- name: end_task
SELECT {schema}.end_task(%s::bigint, %s::bigint, %s::integer, %s::varchar, %s::pg_catalog.text, %s::pg_catalog.text)

-- name: next_task
SELECT * FROM {schema}.next_task(
    %s::bigint, %s::bigint, %s::integer, %s::varchar, %s::pg_catalog.text, %s::pg_catalog.text,
    %s::varchar, %s::varchar, %s::varchar, %s::boolean)

-- name: next_tasks
SELECT * FROM {schema}.next_tasks(
    %s::bigint, %s::pg_catalog.json, %s::varchar, %s::varchar, %s::varchar, %s::boolean, %s::integer)

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

-- name: show_tasks
SELECT * FROM {schema}.show_tasks(%s, %s, %s, %s)

-- name: queue_counts
SELECT * FROM {schema}.queue_counts(%s)

-- name: queue_limits
SELECT queue_name, task_key, task_limit, key_limit, weight, set_at, set_by, task_rate, task_per, key_rate, key_per
FROM {schema}.queue_limits(%s)

-- name: queue_waits
SELECT queue_name, task_key, seconds FROM {schema}.queue_waits(%s)

-- name: set_queue
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.set_queue(%s, %s, %s, %s, %s)

-- name: task_attempts
SELECT * FROM {schema}.task_attempts(%s)

-- name: set_task
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.set_task(%s, %s)

-- name: cancel_task
SELECT {schema}.cancel_task(%s)

-- name: task_controls
SELECT * FROM {schema}.task_controls(%s, %s::bigint[])

-- name: prune_tasks
SELECT {schema}.prune_tasks(%s)
-- end of feature: queue

-- feature: batches
-- name: recover_batches
SELECT {schema}.recover_batches(%s, %s)

-- name: start_part
SELECT code, id, attempt, previous FROM {schema}.start_part(%s, %s, %s, %s, %s, %s, %s, %s, %s)

-- name: end_part
SELECT code, id, is_last, batch_status, callback_attempt, kind, body FROM {schema}.end_part(%s, %s, %s, %s, %s, %s, %s, %s, %s)

-- name: claim_callback
SELECT id, name, callback_attempt, kind, body FROM {schema}.claim_callback(%s, %s, %s, %s, %s, %s)

-- name: return_callback
SELECT {schema}.return_callback(%s, %s)

-- name: end_callback
SELECT {schema}.end_callback(%s, %s, %s, %s)

-- name: abandon_batch
SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.abandon_batch(%s, %s)

-- name: list_batches
SELECT * FROM {schema}.list_batches(%s, %s, %s)
-- end of feature: batches

-- feature: queue
-- name: maintain_queue
SELECT * FROM {schema}.maintain_queue(%s, %s)

-- name: save_schedule
SELECT {schema}.save_schedule(%s, %s, %s, %s, %s, %s, %s, %s)

-- name: fire_schedule
SELECT * FROM {schema}.fire_schedule(%s, %s, %s, %s, %s)

-- name: set_schedule
SELECT {schema}.set_schedule(%s, %s, %s)

-- name: list_schedules
SELECT * FROM {schema}.list_schedules(%s, %s)
-- end of feature: queue

-- name: clock
SELECT pg_catalog.clock_timestamp()
