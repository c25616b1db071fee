-- sqlsem, the statements that the Python client sends to PostgreSQL.
--
-- Each name in them is qualified, also of functions and operators: a login that may create objects in a schema of the
-- caller's search_path must not be able to replace them. (Behind a pooler search_path cannot be set: other programs
-- share the session.)

-- calls: settings, register_member, reattach_member, heartbeat, deregister_member, register_all
-- calls: missing_wakeup_locks, drop_wakeup_locks, restore_wakeup_locks, cancel, deadlock_rows, live_members, pin
-- calls: database_identity, entries, past, resources, operations, prune, prune_operations

-- name: version
SELECT CASE WHEN pg_catalog.to_regclass('{schema}.setting'::pg_catalog.text) IS NULL THEN NULL ELSE 1 END

-- name: installed
SELECT name, value FROM {schema}.setting WHERE name OPERATOR(pg_catalog.=) ANY (ARRAY['schema_version', 'features'])

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

-- name: register
-- (A function among the columns is faster than in FROM, which stores its rows first.)
SELECT (r).queue_position, (r).granted
FROM (SELECT {schema}.register(
          %s::bigint, %s::varchar, %s::varchar, %s::varchar, %s::boolean,
          %s::varchar, %s::varchar, %s::integer, %s::integer, %s::varchar) AS r OFFSET 0) AS once

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

-- name: rights
SELECT coalesce(pg_catalog.has_function_privilege(
                    pg_catalog.to_regprocedure('{schema}.revoke(bigint, boolean)'::pg_catalog.text)::pg_catalog.oid, 'EXECUTE'::pg_catalog.text), false),
       coalesce(pg_catalog.has_function_privilege(
                    pg_catalog.to_regprocedure('{schema}.set_task(bigint, varchar)'::pg_catalog.text)::pg_catalog.oid, 'EXECUTE'::pg_catalog.text), false)

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
                          HINT = 'An open transaction keeps them (a dump, VACUUM FULL?), or they are used too much; try again later.';
            END IF;
            PERFORM pg_sleep(0.05 + random() / 10);
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', v_before, true), set_config('search_path', v_path, true);
END
$$

-- name: set_version
UPDATE {schema}.setting SET value = %s WHERE name OPERATOR(pg_catalog.=) 'schema_version'::pg_catalog.text

-- name: clock
SELECT pg_catalog.clock_timestamp()

-- feature: priorities
-- calls: acquire_by_priority, priorities
-- end of feature: priorities

-- feature: conversions
-- calls: upgrade, begin_upgrade, downgrade, retake_wakeup_lock
-- end of feature: conversions

-- feature: rates
-- calls: take_rate, adjust_rate, rates
-- operators' calls: reset_rate, set_rate
-- end of feature: rates

-- feature: handovers
-- calls: hand_over_rows, adopt_rows, release_on_commit, is_committed, delete_commit_marker
-- end of feature: handovers

-- feature: once
-- calls: once_due, mark_once, once_runs
-- operators' calls: once_forget
-- end of feature: once

-- feature: guards
-- calls: guarded_tables

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
-- end of feature: guards

-- feature: operate
-- calls: kept_locks, resource_settings
-- operators' calls: set_resource, revoke, revoke_members, reap

-- name: overview
SELECT o.taken_at, o.settings, o.members, o.queues, o.batches, o.holds, {schema}.overview_rates() FROM {schema}.overview() AS o
-- end of feature: operate

-- feature: queue
-- calls: put_tasks, put_tasks_once, claim_task, claim_blocked, end_task, next_task, next_tasks, return_claim
-- calls: recover_tasks, listen_for_tasks, next_ready, queue_state, show_tasks, queue_counts, queue_limits
-- calls: queue_waits, task_attempts, cancel_task, task_controls, prune_tasks, maintain_queue, save_schedule
-- calls: fire_schedule, set_schedule, list_schedules
-- operators' calls: set_queue, set_task
-- end of feature: queue

-- feature: batches
-- calls: recover_batches, start_part, end_part, claim_callback, return_callback, end_callback, list_batches
-- operators' calls: abandon_batch
-- end of feature: batches
