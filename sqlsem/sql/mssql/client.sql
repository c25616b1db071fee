-- sqlsem, the statements that the Python client sends to SQL Server.

-- calls: settings, register_member, reattach_member, heartbeat, deregister_member, register_all, wait, poll_waiters
-- calls: release, cancel, find_deadlock, pin, entries, past, resources, operations, prune, prune_operations

-- name: version
SELECT COALESCE(OBJECT_ID(N'{schema}.setting'), OBJECT_ID(N'{schema}.settings'))

-- name: installed
SELECT name, value FROM {schema}.setting WHERE name IN (N'schema_version', N'features')

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

-- name: register
EXEC {schema}.register ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, 1

-- name: database_identity
-- The identity of the database on this running server. (tempdb is created again when a server starts: so a copy on
-- another server has another identity.)
SELECT CONCAT(@@SERVERNAME, N' ', DB_ID(), N' ', DB_NAME(), N' ',
              (SELECT CONVERT(nvarchar(40), create_date, 126) FROM sys.databases WHERE name = N'tempdb'))

-- name: rights
SELECT CAST(COALESCE(HAS_PERMS_BY_NAME(N'{schema}.[revoke]', N'OBJECT', N'EXECUTE'), 0) AS int),
       CAST(COALESCE(HAS_PERMS_BY_NAME(N'{schema}.set_task', N'OBJECT', N'EXECUTE'), 0) AS int)

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

-- name: in_transaction
-- For a borrowed cursor. (In manual commit mode the transaction begins with the first statement that reads a table.)
DECLARE @n int; IF @@TRANCOUNT = 0 AND @@OPTIONS & 2 = 2 SELECT @n = schema_id FROM sys.schemas WHERE schema_id < 0; SELECT @@TRANCOUNT

-- name: begin
BEGIN TRANSACTION

-- name: commit
COMMIT TRANSACTION

-- name: rollback
IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION

-- name: clock
SELECT SYSUTCDATETIME()

-- name: execute
SET NOCOUNT OFF; BEGIN TRANSACTION

-- name: executed
-- The task's text may have ended the transaction, or left another one open. It may also have set NOEXEC, PARSEONLY or
-- FMTONLY, which switch off later statements.
SET NOEXEC OFF; SET PARSEONLY OFF; SET FMTONLY OFF;
DECLARE @open int = @@TRANCOUNT; IF @open = 1 COMMIT TRANSACTION; IF @open > 1 ROLLBACK TRANSACTION; SELECT @open

-- feature: priorities
-- calls: acquire_by_priority, priorities
-- end of feature: priorities

-- feature: conversions
-- calls: upgrade, begin_upgrade, downgrade
-- end of feature: conversions

-- feature: rates
-- calls: take_rate, reset_rate, set_rate, adjust_rate, rates
-- end of feature: rates

-- feature: handovers
-- calls: hand_over_rows, adopt_rows, release_on_commit, is_committed, delete_commit_marker
-- end of feature: handovers

-- feature: once
-- calls: once_due, mark_once, once_runs, once_forget
-- end of feature: once

-- feature: guards
-- calls: session_entry, guard_table, unguard_table, guarded_tables

-- name: session_notes
SELECT @@SPID, COALESCE(CAST(SESSION_CONTEXT(N'sqlsem.{schema}.grants') AS nvarchar(4000)), N'')

-- name: note_session
EXEC sys.sp_set_session_context N'sqlsem.{schema}.grants', ?
-- end of feature: guards

-- feature: operate
-- calls: overview, resource_settings, set_resource, revoke, revoke_members, reap
-- end of feature: operate

-- feature: queue
-- calls: claim_task, claim_blocked, end_task, next_task, claim_tasks, return_claim, recover_tasks, queue_state
-- calls: show_tasks, show_task_locks, queue_limits, queue_waits, set_queue, queue_counts, task_attempts, set_task
-- calls: cancel_task, task_controls, prune_tasks, maintain_queue, save_schedule, fire_schedule, set_schedule
-- calls: list_schedules

-- name: put_task
EXEC {schema}.put_task ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, @answer = 1, @unique_key = ?, @replace_key = ?, @time_limit_ms = ?,
    @task_key = ?, @priority = ?, @locks = ?
-- end of feature: queue

-- feature: batches
-- calls: recover_batches, start_part, end_part, claim_callback, return_callback, end_callback, abandon_batch
-- calls: list_batches
-- end of feature: batches
