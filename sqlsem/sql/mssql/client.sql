-- sqlsem, the statements that the Python client sends to SQL Server.

-- name: version
SELECT COALESCE(OBJECT_ID(N'{schema}.setting'), OBJECT_ID(N'{schema}.settings'))

-- name: installed
SELECT name, value FROM {schema}.setting WHERE name IN (N'schema_version', N'features')

-- name: settings
EXEC {schema}.settings

-- name: last_error
SELECT @@ERROR

-- name: session
-- (The client fills in the number, as SET takes no parameter.)
SET NOCOUNT ON; SET XACT_ABORT ON; SET ANSI_NULLS ON; SET QUOTED_IDENTIFIER ON; SET LOCK_TIMEOUT :lock_timeout;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED

-- name: warm_main
EXEC {schema}.warm_up 0

-- name: warm_wait
EXEC {schema}.warm_up 1

-- name: register_member
EXEC {schema}.register_member ?, ?, ?, ?, ?, @answer = 1

-- name: reattach_member
EXEC {schema}.reattach_member ?, 1

-- name: heartbeat
EXEC {schema}.heartbeat ?

-- name: deregister_member
EXEC {schema}.deregister_member ?

-- name: register
EXEC {schema}.register ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, 1

-- name: register_all
EXEC {schema}.register_all ?, ?, ?, ?, ?, ?, ?

-- feature: priorities
-- name: acquire_by_priority
EXEC {schema}.acquire_by_priority ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, @answer = 1
-- end of feature: priorities

-- name: wait
EXEC {schema}.wait ?, ?, ?, 1

-- name: poll_waiters
EXEC {schema}.poll_waiters ?, ?

-- name: release
EXEC {schema}.release ?, ?, ?, ?, 1

-- feature: conversions
-- name: upgrade
EXEC {schema}.upgrade ?, ?, ?, ?, 1

-- name: begin_upgrade
EXEC {schema}.begin_upgrade ?, ?, ?, ?, ?, 1

-- name: downgrade
EXEC {schema}.downgrade ?, ?, ?, 1
-- end of feature: conversions

-- name: cancel
EXEC {schema}.cancel ?, ?, ?, 1

-- feature: rates
-- name: take_rate
EXEC {schema}.take_rate ?, ?, ?, ?, ?, ?, @answer = 1

-- name: reset_rate
EXEC {schema}.reset_rate ?, 1

-- name: set_rate
EXEC {schema}.set_rate ?, ?, ?, 1

-- name: adjust_rate
EXEC {schema}.adjust_rate ?, ?, ?

-- name: rates
EXEC {schema}.rates ?
-- end of feature: rates

-- feature: handovers
-- name: hand_over
EXEC {schema}.hand_over_rows ?, ?, ?, ?, ?, @answer = 1

-- name: adopt
EXEC {schema}.adopt_rows ?, ?, ?, ?, ?, @answer = 1
-- end of feature: handovers

-- feature: once
-- name: once_due
EXEC {schema}.once_due ?, ?, ?, ?, ?, 1

-- name: mark_once
EXEC {schema}.mark_once ?, ?, ?, 1

-- name: once_last
EXEC {schema}.once_last ?

-- name: once_forget
EXEC {schema}.once_forget ?, 1
-- end of feature: once

-- name: find_deadlock
EXEC {schema}.find_deadlock ?, @answer = 1

-- name: pin
EXEC {schema}.pin ?, ?, ?, 1

-- name: database_identity
-- The identity of the database on this running server. (tempdb is created again when a server starts: so a copy on
-- another server has another identity.)
SELECT CONCAT(@@SERVERNAME, N' ', DB_ID(), N' ', DB_NAME(), N' ',
              (SELECT CONVERT(nvarchar(40), create_date, 126) FROM sys.databases WHERE name = N'tempdb'))

-- feature: handovers
-- name: release_on_commit
EXEC {schema}.release_on_commit ?

-- name: is_committed
EXEC {schema}.is_committed ?, 1

-- name: delete_commit_marker
EXEC {schema}.delete_commit_marker ?
-- end of feature: handovers

-- feature: guards
-- name: session_notes
SELECT @@SPID, COALESCE(CAST(SESSION_CONTEXT(N'sqlsem.{schema}.grants') AS nvarchar(4000)), N'')

-- name: session_entry
EXEC {schema}.session_entry ?, ?, ?

-- name: note_session
EXEC sys.sp_set_session_context N'sqlsem.{schema}.grants', ?

-- name: guard_table
EXEC {schema}.guard_table ?, ?, 1

-- name: unguard_table
EXEC {schema}.unguard_table ?, 1

-- name: guarded_tables
EXEC {schema}.guarded_tables
-- end of feature: guards

-- name: entries
EXEC {schema}.entries ?

-- name: past
EXEC {schema}.past ?, ?, ?, ?, ?, ?

-- name: resources
EXEC {schema}.resources

-- feature: operate
-- name: overview
EXEC {schema}.overview
-- end of feature: operate

-- name: operations
EXEC {schema}.operations ?, ?, ?, ?, ?, ?

-- feature: operate
-- name: resource_settings
EXEC {schema}.resource_settings
-- end of feature: operate

-- feature: priorities
-- name: priorities
EXEC {schema}.priorities
-- end of feature: priorities

-- feature: operate
-- name: set_resource
EXEC {schema}.set_resource ?, ?, ?
-- end of feature: operate

-- name: rights
SELECT CAST(COALESCE(HAS_PERMS_BY_NAME(N'{schema}.[revoke]', N'OBJECT', N'EXECUTE'), 0) AS int),
       CAST(COALESCE(HAS_PERMS_BY_NAME(N'{schema}.set_task', N'OBJECT', N'EXECUTE'), 0) AS int)

-- feature: operate
-- name: revoke
EXEC {schema}.[revoke] ?, ?, 1

-- name: revoke_members
EXEC {schema}.revoke_members ?, ?, ?, 1

-- name: reap
EXEC {schema}.reap 1
-- end of feature: operate

-- name: prune
EXEC {schema}.prune ?, 1

-- name: prune_operations
EXEC {schema}.prune_operations ?, 1

-- name: lock_tables
-- Before the schema scripts of an upgrade, lock all tables of the schema at once, or none. So no script waits for an
-- open transaction while other sessions wait behind the script, and no script deadlocks with one.
SET LOCK_TIMEOUT 250;
DECLARE @table nvarchar(300), @text nvarchar(600), @last int = 0, @before int;
WHILE 1 = 1
BEGIN
    SET @before = @last;
    SELECT TOP (1) @last = object_id, @table = QUOTENAME(name) FROM sys.tables
    WHERE schema_id = SCHEMA_ID(N'{schema}') AND object_id > @before ORDER BY object_id;
    IF @last = @before
        BREAK;
    SET @text = N'DECLARE @n int; SELECT TOP (1) @n = 1 FROM {schema}.' + @table + N' WITH (TABLOCKX, HOLDLOCK)';
    EXEC (@text);
    SET LOCK_TIMEOUT 50;
END

-- name: script_patience
-- All other sessions wait behind a script: so each of its statements waits for less than the shortest usual grace.
SET LOCK_TIMEOUT 3000

-- name: blockers
-- Sessions with a lock on a table of the schema, or on a table that is being created, oldest first.
SELECT TOP (5) s.session_id, s.login_name, s.program_name, s.host_name,
       CASE WHEN r.session_id IS NULL THEN N'idle in a transaction' ELSE N'busy' END,
       CONVERT(nvarchar(19), DATEADD(second, DATEDIFF(second, GETDATE(), GETUTCDATE()), COALESCE(r.start_time, s.last_request_end_time)), 120)
FROM sys.dm_exec_sessions AS s LEFT JOIN sys.dm_exec_requests AS r ON r.session_id = s.session_id
WHERE s.session_id <> @@SPID AND s.session_id IN (
    SELECT l.request_session_id FROM sys.dm_tran_locks AS l
    WHERE l.resource_database_id = DB_ID() AND l.request_status = N'GRANT' AND l.resource_type = N'OBJECT'
      AND l.resource_associated_entity_id IN (SELECT object_id FROM sys.objects WHERE schema_id = SCHEMA_ID(N'{schema}')))
ORDER BY COALESCE(r.start_time, s.last_request_end_time)

-- name: install_lock
-- (Any login can take this lock, as sqlsem has no role before its first installation. But only installers wait for it.)
DECLARE @code int;
EXEC @code = sys.sp_getapplock @Resource = N'install.sqlsem.{schema}', @LockMode = N'Exclusive', @LockOwner = N'Transaction',
    @LockTimeout = 120000, @DbPrincipal = N'public';
IF @code < 0
    THROW 50002, N'sqlsem: busy: another session has had the lock of installers for 120 s (sys.dm_tran_locks has it, as an APPLICATION lock sqlsem.install; KILL ends it); nothing was changed', 1;

-- name: set_version
UPDATE {schema}.setting SET value = ? WHERE name = N'schema_version'

-- feature: queue
-- name: put_task
EXEC {schema}.put_task ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, @answer = 1, @unique_key = ?, @replace_key = ?, @time_limit_ms = ?,
    @task_key = ?, @priority = ?, @locks = ?
-- end of feature: queue

-- name: in_transaction
-- For a borrowed cursor. (In manual commit mode the transaction begins with the first statement that reads a table.)
DECLARE @n int; IF @@TRANCOUNT = 0 AND @@OPTIONS & 2 = 2 SELECT @n = schema_id FROM sys.schemas WHERE schema_id < 0; SELECT @@TRANCOUNT

-- name: begin
BEGIN TRANSACTION

-- name: commit
COMMIT TRANSACTION

-- name: rollback
IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION

-- feature: queue
-- name: claim_task
EXEC {schema}.claim_task ?, ?, ?, ?, ?

-- name: claim_blocked
EXEC {schema}.claim_blocked ?, ?, ?, ?, ?, ?, ?, @answer = 1

-- name: end_task
EXEC {schema}.end_task ?, ?, ?, ?, ?, ?, @answer = 1

-- name: next_task
EXEC {schema}.next_task ?, ?, ?, ?, ?, ?, ?, ?, ?, ?

-- name: claim_tasks
EXEC {schema}.claim_tasks ?, ?, ?, ?, ?, ?

-- name: return_claim
EXEC {schema}.return_claim ?, ?, ?, 1

-- name: recover_tasks
EXEC {schema}.recover_tasks ?, ?, 1

-- name: queue_state
EXEC {schema}.queue_state ?

-- name: show_tasks
EXEC {schema}.show_tasks ?, ?, ?, ?

-- name: show_task_locks
EXEC {schema}.show_task_locks ?

-- name: queue_limits
EXEC {schema}.queue_limits ?

-- name: queue_waits
EXEC {schema}.queue_waits ?

-- name: set_queue
EXEC {schema}.set_queue ?, ?, ?, ?, ?

-- name: queue_counts
EXEC {schema}.queue_counts ?

-- name: task_attempts
EXEC {schema}.task_attempts ?

-- name: set_task
EXEC {schema}.set_task ?, ?, 1

-- name: cancel_task
EXEC {schema}.cancel_task ?, 1

-- name: task_controls
EXEC {schema}.task_controls ?, ?

-- name: prune_tasks
EXEC {schema}.prune_tasks ?, 1
-- end of feature: queue

-- name: clock
SELECT SYSUTCDATETIME()

-- feature: queue
-- name: maintain_queue
EXEC {schema}.maintain_queue ?, ?

-- name: save_schedule
EXEC {schema}.save_schedule ?, ?, ?, ?, ?, ?, ?, ?

-- name: fire_schedule
EXEC {schema}.fire_schedule ?, ?, ?, ?, ?

-- name: set_schedule
EXEC {schema}.set_schedule ?, ?, ?, 1

-- name: list_schedules
EXEC {schema}.list_schedules ?, ?
-- end of feature: queue

-- name: execute
SET NOCOUNT OFF; BEGIN TRANSACTION

-- name: executed
-- The task's text may have ended the transaction, or left another one open. It may also have set NOEXEC, PARSEONLY or
-- FMTONLY, which switch off later statements.
SET NOEXEC OFF; SET PARSEONLY OFF; SET FMTONLY OFF;
DECLARE @open int = @@TRANCOUNT; IF @open = 1 COMMIT TRANSACTION; IF @open > 1 ROLLBACK TRANSACTION; SELECT @open

-- feature: batches
-- name: recover_batches
EXEC {schema}.recover_batches ?, ?, 1

-- name: start_part
EXEC {schema}.start_part ?, ?, ?, ?, ?, ?, ?, ?, ?, @answer = 1

-- name: end_part
EXEC {schema}.end_part ?, ?, ?, ?, ?, ?, ?, ?, ?, @answer = 1

-- name: claim_callback
EXEC {schema}.claim_callback ?, ?, ?, ?, ?, ?, @answer = 1

-- name: return_callback
EXEC {schema}.return_callback ?, ?, 1

-- name: end_callback
EXEC {schema}.end_callback ?, ?, ?, ?, 1

-- name: abandon_batch
EXEC {schema}.abandon_batch ?, ?

-- name: list_batches
EXEC {schema}.list_batches ?, ?, ?
-- end of feature: batches
