-- sqlsem, the statements that the Python client sends to SQL Server.

-- name: version
SELECT COALESCE(OBJECT_ID(N'{schema}.setting'), OBJECT_ID(N'{schema}.settings'))

-- name: installed
SELECT value FROM {schema}.setting WHERE name = N'schema_version'

-- name: settings
EXEC {schema}.settings

-- name: last_error
SELECT @@ERROR

-- name: session
-- The number is put in by the client.
SET NOCOUNT ON; SET XACT_ABORT ON; SET ANSI_NULLS ON; SET QUOTED_IDENTIFIER ON; SET LOCK_TIMEOUT :lock_timeout;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED

-- name: warm_main
EXEC {schema}.warm_up 0

-- name: warm_wait
EXEC {schema}.warm_up 1

-- name: enrol
EXEC {schema}.enrol ?, ?, ?, ?, ?, @answer = 1

-- name: resume_member
EXEC {schema}.resume_member ?, 1

-- name: ping
EXEC {schema}.ping ?

-- name: resign
EXEC {schema}.resign ?

-- name: register
EXEC {schema}.register ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, @answer = 1

-- name: register_all
EXEC {schema}.register_all ?, ?, ?, ?, ?, ?, ?

-- name: wait
EXEC {schema}.wait ?, ?, ?, 1

-- name: look_all
EXEC {schema}.look_all ?, ?

-- name: release
EXEC {schema}.release ?, ?, ?, ?, 1

-- name: upgrade
EXEC {schema}.upgrade ?, ?, ?, ?, 1

-- name: begin_upgrade
EXEC {schema}.begin_upgrade ?, ?, ?, ?, ?, 1

-- name: downgrade
EXEC {schema}.downgrade ?, ?, ?, 1

-- name: cancel
EXEC {schema}.cancel ?, ?, ?, 1

-- name: find_deadlock
EXEC {schema}.find_deadlock ?, @answer = 1

-- name: pin
EXEC {schema}.pin ?, ?, ?, 1

-- name: entries
EXEC {schema}.entries ?

-- name: past
EXEC {schema}.past ?, ?, ?, ?, ?, ?

-- name: resources
EXEC {schema}.resources

-- name: overview
EXEC {schema}.overview

-- name: operations
EXEC {schema}.operations ?, ?, ?, ?, ?, ?

-- name: resource_settings
EXEC {schema}.resource_settings

-- name: set_resource
EXEC {schema}.set_resource ?, ?, ?

-- name: rights
SELECT CAST(COALESCE(HAS_PERMS_BY_NAME(N'{schema}.[revoke]', N'OBJECT', N'EXECUTE'), 0) AS int),
       CAST(COALESCE(HAS_PERMS_BY_NAME(N'{schema}.set_task', N'OBJECT', N'EXECUTE'), 0) AS int)

-- name: revoke
EXEC {schema}.[revoke] ?, ?, 1

-- name: reap
EXEC {schema}.reap 1

-- name: prune
EXEC {schema}.prune ?, 1

-- name: prune_operations
EXEC {schema}.prune_operations ?, 1

-- name: wait_for_locks
SET LOCK_TIMEOUT -1

-- name: install_lock
EXEC sp_getapplock @Resource = N'sqlsem.install.{schema}', @LockMode = N'Exclusive', @LockOwner = N'Transaction', @LockTimeout = -1, @DbPrincipal = N'public'

-- name: set_version
UPDATE {schema}.setting SET value = ? WHERE name = N'schema_version'

-- name: put_task
EXEC {schema}.put_task ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, @answer = 1, @unique_key = ?, @replace_key = ?, @time_limit_ms = ?

-- name: begin
BEGIN TRANSACTION

-- name: commit
COMMIT TRANSACTION

-- name: rollback
IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION

-- name: claim_task
EXEC {schema}.claim_task ?, ?, ?, ?, ?

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

-- name: page_tasks
EXEC {schema}.page_tasks ?, ?, ?, ?

-- name: queue_counts
EXEC {schema}.queue_counts ?

-- name: task_attempts
EXEC {schema}.task_attempts ?

-- name: set_task
EXEC {schema}.set_task ?, ?, 1

-- name: cancel_task
EXEC {schema}.cancel_task ?, 1

-- name: asked_of_tasks
EXEC {schema}.asked_of_tasks ?, ?

-- name: prune_tasks
EXEC {schema}.prune_tasks ?, 1

-- name: execute
SET NOCOUNT OFF; BEGIN TRANSACTION

-- name: executed
-- The text may have ended the transaction; one that it began itself it must have ended. It may have switched off what
-- comes after it, too, which is its own affair.
SET NOEXEC OFF; SET PARSEONLY OFF; SET FMTONLY OFF;
DECLARE @open int = @@TRANCOUNT; IF @open = 1 COMMIT TRANSACTION; IF @open > 1 ROLLBACK TRANSACTION; SELECT @open

-- name: recover_rounds
EXEC {schema}.recover_rounds ?, ?, 1

-- name: start_part
EXEC {schema}.start_part ?, ?, ?, ?, ?, ?, ?, ?, ?, @answer = 1

-- name: end_part
EXEC {schema}.end_part ?, ?, ?, ?, ?, ?, ?, ?, ?, @answer = 1

-- name: claim_then
EXEC {schema}.claim_then ?, ?, ?, ?, ?, ?, @answer = 1

-- name: return_then
EXEC {schema}.return_then ?, ?, 1

-- name: end_then
EXEC {schema}.end_then ?, ?, ?, ?, 1

-- name: list_rounds
EXEC {schema}.list_rounds ?, ?, ?
