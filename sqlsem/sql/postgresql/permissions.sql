-- sqlsem, roles for PostgreSQL. May be run again, and revokes the rights that these roles should not have. Grant some
-- of them to a login: GRANT {schema}_user TO etl;
--   {schema}_user      acquires and releases locks, runs parts of batches
-- feature: queue
--   {schema}_putter    puts tasks of every kind, which run with the rights of the workers; cancels and retries its own
--   {schema}_worker    runs tasks
-- end of feature: queue
-- feature: operate
--   {schema}_operator  has the users' rights; caps, pauses, revokes, reaps; cancels and retries tasks; reads the tables
-- end of feature: operate
--   {schema}_reader    reads the queues, the history, the settings, the tables
-- No role may change any table: the routines do that. Roles belong to the whole server: a login with a role has it in
-- each database in which sqlsem is installed under this schema's name. If the installing login may not create roles, an
-- administrator runs this script.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

DO $$
DECLARE
    v_role text;
BEGIN
    FOREACH v_role IN ARRAY ARRAY[
        -- feature: operate
        '{schema}_operator',
        -- end of feature: operate
        -- feature: queue
        '{schema}_putter', '{schema}_worker',
        -- end of feature: queue
        '{schema}_user', '{schema}_reader']
    LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = v_role) THEN
            IF NOT (SELECT rolcreaterole OR rolsuper FROM pg_roles WHERE rolname = current_user) THEN
                RAISE NOTICE 'sqlsem: role % does not exist and % may not create it', v_role, current_user;
                CONTINUE;
            END IF;
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;  -- the installer of another database has created the role meanwhile
            END;
        END IF;
    END LOOP;
END
$$;

REVOKE ALL ON ALL ROUTINES IN SCHEMA {schema} FROM PUBLIC;

DO $$
DECLARE
    -- u: users, p: putters, w: workers, o: operators, r: readers. A routine that is not listed here is only called by
    -- other routines.
    v_rights constant jsonb := jsonb_build_array(
        -- feature: operate
        jsonb_build_array('upwor', ARRAY['overview', 'overview_rates', 'kept_locks']),
        jsonb_build_array('uor', ARRAY['why', 'estimate', 'resource_settings']),
        jsonb_build_array('o', ARRAY['revoke_members', 'set_resource', 'set_limit', 'pause', 'resume', 'revoke', 'reap']),
        -- end of feature: operate
        -- feature: priorities
        jsonb_build_array('uo', ARRAY['acquire_by_priority']),
        jsonb_build_array('uor', ARRAY['priorities']),
        -- end of feature: priorities
        -- feature: conversions
        jsonb_build_array('uo', ARRAY['begin_upgrade', 'upgrade', 'downgrade', 'retake_wakeup_lock']),
        -- end of feature: conversions
        -- feature: handovers
        jsonb_build_array('uo', ARRAY[
            'adopt_rows', 'hand_over', 'adopt', 'session_rows', 'delete_empty_member', 'new_token', 'token_hash']),
        jsonb_build_array('uwo', ARRAY['hand_over_rows', 'release_on_commit', 'is_committed', 'delete_commit_marker']),
        -- end of feature: handovers
        -- feature: guards
        -- (guard_table runs with the caller's rights, which must include creating triggers on the table.)
        jsonb_build_array('uo', ARRAY['check_guard', 'guard_table', 'unguard_table', 'session_entry']),
        jsonb_build_array('uor', ARRAY['guarded_tables', 'guards', 'table_and_partitions']),
        -- end of feature: guards
        -- feature: rates
        jsonb_build_array('uo', ARRAY[
            'take_rate', 'adjust_rate', 'check_rate', 'check_rate_name', 'sleep_until_due', 'renew_rate_waiter_lease', 'take', 'adjust']),
        jsonb_build_array('uor', ARRAY['rates']),
        jsonb_build_array('o', ARRAY['reset_rate', 'set_rate']),
        -- end of feature: rates
        -- feature: once
        jsonb_build_array('uo', ARRAY['once_begin', 'once_finish', 'once_due', 'mark_once', 'once_forget', 'check_period']),
        jsonb_build_array('uor', ARRAY['once_runs']),
        -- end of feature: once
        -- feature: queue
        jsonb_build_array('upwo', ARRAY['prune_tasks']),
        jsonb_build_array('p', ARRAY['put_tasks', 'put_tasks_once', 'put', 'save_schedule']),
        jsonb_build_array('po', ARRAY['set_task', 'cancel_task', 'set_schedule']),
        jsonb_build_array('pwo', ARRAY['recover_tasks', 'maintain_queue']),
        jsonb_build_array('pwor', ARRAY[
            'listen_for_tasks', 'next_ready', 'queue_state', 'queue_counts', 'list_tasks', 'show_tasks', 'queue_limits',
            'queue_waits', 'task_attempts', 'list_schedules']),
        jsonb_build_array('w', ARRAY[
            'claim_task', 'claim_blocked', 'end_task', 'next_task', 'next_tasks', 'return_claim', 'work', 'session_claim',
            'task_controls', 'fire_schedule', 'recover_session_tasks', 'session_task_controls', 'seconds_since', 'format_error']),
        jsonb_build_array('o', ARRAY['set_queue']),
        -- end of feature: queue
        -- feature: batches
        jsonb_build_array('uo', ARRAY[
            'recover_batches', 'start_part', 'end_part', 'claim_callback', 'return_callback', 'end_callback',
            'batch_part_start', 'batch_part_finish', 'batch_part_fail', 'batch_resume', 'batch_callback_ended',
            'session_part_start', 'session_part_end', 'session_batch_resume']),
        jsonb_build_array('uor', ARRAY['list_batches']),
        jsonb_build_array('o', ARRAY['abandon_batch']),
        -- end of feature: batches
        jsonb_build_array('upwo', ARRAY[
            'register_member', 'reattach_member', 'heartbeat', 'deregister_member', 'prune', 'prune_operations',
            -- Routines that acquire and similar routines call with the caller's rights. Calling one of them directly
            -- gains a login no more.
            'require_outside_transaction', 'detect_transaction', 'commit_error', 'require_autocommit', 'check_name', 'session_id', 'session_member']),
        jsonb_build_array('upwor', ARRAY['settings', 'database_identity']),
        jsonb_build_array('uo', ARRAY[
            'register', 'register_all', 'wait', 'poll_waiters', 'cancel', 'find_deadlock', 'deadlock_rows', 'live_members',
            'missing_wakeup_locks', 'drop_wakeup_locks', 'restore_wakeup_locks', 'acquire', 'try', 'renew', 'assert_holding', 'check_request',
            'check_not_reserved', 'check_lease', 'renew_waiter_lease', 'waits_for_itself', 'has_other_rows', 'describe_deadlock', 'release_wait_locks',
            'acquire_row', 'is_outermost', 'remaining_ms', 'row_outcome', 'release_rows', 'renew_row', 'new_uid']),
        -- (A worker pins and releases the locks of its tasks, like any rows of its login.)
        jsonb_build_array('uwo', ARRAY['release', 'pin']),
        jsonb_build_array('uwor', ARRAY['entries', 'may_enter']),
        jsonb_build_array('uor', ARRAY['status', 'past', 'resources', 'operations']));
    v_role  record;
    v_object record;
BEGIN
    FOR v_role IN
        SELECT k.letter, r.rolname AS name, r.oid
        FROM (VALUES
              -- feature: operate
              ('o', '{schema}_operator'),
              -- end of feature: operate
              -- feature: queue
              ('p', '{schema}_putter'), ('w', '{schema}_worker'),
              -- end of feature: queue
              ('u', '{schema}_user'), ('r', '{schema}_reader')) AS k (letter, name)
        JOIN pg_roles AS r ON r.rolname = k.name
    LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA {schema} TO %I', v_role.name);
        FOR v_object IN
            SELECT p.oid::regprocedure AS signature, n.may,
                   EXISTS (SELECT FROM aclexplode(p.proacl) AS a WHERE a.grantee = v_role.oid AND a.privilege_type = 'EXECUTE') AS has
            FROM pg_proc AS p
            CROSS JOIN LATERAL (SELECT EXISTS (SELECT FROM jsonb_array_elements(v_rights) AS e
                                               WHERE strpos(e ->> 0, v_role.letter) > 0 AND e -> 1 ? p.proname::text) AS may) AS n
            WHERE p.pronamespace = '{schema}'::regnamespace
        LOOP
            IF v_object.may AND NOT v_object.has THEN
                EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO %I', v_object.signature, v_role.name);
            ELSIF v_object.has AND NOT v_object.may THEN
                EXECUTE format('REVOKE ALL ON ROUTINE %s FROM %I', v_object.signature, v_role.name);
            END IF;
        END LOOP;
        FOR v_object IN
            SELECT c.oid::regclass AS name, n.may,
                   ARRAY(SELECT a.privilege_type FROM aclexplode(c.relacl) AS a WHERE a.grantee = v_role.oid) AS has
            FROM pg_class AS c
            CROSS JOIN LATERAL (SELECT v_role.letter IN ('o', 'r') AND c.relname IN (
                -- feature: handovers
                'handover',
                -- end of feature: handovers
                -- feature: rates
                'rate_window', 'rate_slot',
                -- end of feature: rates
                -- feature: once
                'once_run',
                -- end of feature: once
                -- feature: queue
                'task', 'task_log', 'schedule', 'queue_setting', 'queue_key', 'queue_wait', 'task_lock', 'queue_proxy',
                -- end of feature: queue
                -- feature: batches
                'batch', 'batch_part',
                -- end of feature: batches
                lower('{table}'), 'member', 'resource', 'history', 'setting', 'low_water', 'operation', 'limit_pattern') AS may) AS n
            WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind IN ('r', 'S')
        LOOP
            CONTINUE WHEN v_object.has = CASE WHEN v_object.may THEN ARRAY['SELECT'] ELSE ARRAY[]::text[] END;
            EXECUTE format('REVOKE ALL ON %s FROM %I', v_object.name, v_role.name);
            IF v_object.may THEN
                EXECUTE format('GRANT SELECT ON %s TO %I', v_object.name, v_role.name);
            END IF;
        END LOOP;
    END LOOP;
END
$$;
