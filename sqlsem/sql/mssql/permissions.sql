-- sqlsem, roles for SQL Server. May be run again. Add a user to one of them: ALTER ROLE {schema}_user ADD MEMBER etl;
--   {schema}_user      acquires and releases locks, starts and ends parts of batches
-- feature: queue
--   {schema}_putter    puts tasks of every kind, which run with the rights of the workers; cancels and retries its own
--   {schema}_worker    claims, runs and ends tasks
-- end of feature: queue
-- feature: operate
--   {schema}_operator  caps, pauses, revokes, reaps, acquires locks, cancels and retries tasks, sees all; puts no tasks
-- end of feature: operate
--   {schema}_reader    sees the queue, the history, the tasks, the settings
-- Only operators and readers have a right to any table. Application locks belong to role {schema}_locks, of which the
-- roles above are members. Bare participants need INSERT, SELECT and DELETE on {schema}.{table}, and membership of
-- {schema}_locks. (Users with other rights to sqlsem's objects become members of it when this script is run. The owner
-- of the database may do anything.)
-- (COLLATE: the catalog has another collation than the names of this database, on Azure SQL even a third one.)
-- Roles belong to the database. If the installing login may not create roles, the tables are created nevertheless, and
-- an administrator runs this script.

DECLARE @do TABLE (number int IDENTITY NOT NULL PRIMARY KEY, statement nvarchar(600) NOT NULL);
DECLARE @right TABLE (what nvarchar(10) NOT NULL, object_name sysname NOT NULL, role_name sysname NOT NULL);
DECLARE @role TABLE (name sysname NOT NULL, letter nchar(1) NOT NULL);
DECLARE @statement nvarchar(600), @number int = 0, @maximum int;
DECLARE @may int = CASE WHEN HAS_PERMS_BY_NAME(QUOTENAME(DB_NAME()), N'DATABASE', N'CREATE ROLE') = 1
    OR IS_MEMBER(N'db_owner') = 1 OR IS_SRVROLEMEMBER(N'sysadmin') = 1 THEN 1 ELSE 0 END;
INSERT INTO @role (name, letter)
VALUES
       -- feature: operate
       (N'{schema}_operator', N'o'),
       -- end of feature: operate
       -- feature: queue
       (N'{schema}_putter', N'p'), (N'{schema}_worker', N'w'),
       -- end of feature: queue
       (N'{schema}_user', N'u'), (N'{schema}_reader', N'r');
IF @may = 1
BEGIN
    INSERT INTO @do (statement)
    SELECT CONCAT(N'CREATE ROLE ', r.name) FROM @role AS r WHERE DATABASE_PRINCIPAL_ID(r.name) IS NULL;
    IF DATABASE_PRINCIPAL_ID(N'{schema}_locks') IS NULL
        INSERT INTO @do (statement) VALUES (N'CREATE ROLE {schema}_locks');
    INSERT INTO @do (statement)
    SELECT CONCAT(N'ALTER ROLE {schema}_locks ADD MEMBER ', r.name) FROM @role AS r
    WHERE NOT EXISTS (SELECT 1 FROM sys.database_role_members AS m
                      WHERE m.role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_locks')
                        AND m.member_principal_id = DATABASE_PRINCIPAL_ID(r.name));
    -- Users with rights but without a role become members, to keep their access to the locks.
    INSERT INTO @do (statement)
    SELECT DISTINCT CONCAT(N'ALTER ROLE {schema}_locks ADD MEMBER ', QUOTENAME(p.name))
    FROM sys.database_permissions AS g JOIN sys.database_principals AS p ON p.principal_id = g.grantee_principal_id
    WHERE g.state IN ('G', 'W') AND p.name NOT IN (N'public', N'dbo', N'guest') 
      AND p.name COLLATE DATABASE_DEFAULT NOT IN (SELECT r.name FROM @role AS r)
      AND p.name <> N'{schema}_locks'
      AND ((g.class = 1 AND OBJECT_SCHEMA_NAME(g.major_id) = N'{schema}' AND g.permission_name IN (N'EXECUTE', N'INSERT'))
           OR (g.class = 3 AND g.major_id = SCHEMA_ID(N'{schema}') AND g.permission_name IN (N'EXECUTE', N'INSERT', N'CONTROL'))
           OR (g.class = 0 AND g.permission_name IN (N'EXECUTE', N'INSERT', N'CONTROL')));
END;

INSERT INTO @right (what, object_name, role_name)
SELECT N'EXECUTE', o.name, r.name
FROM (VALUES
             -- feature: operate
             (N'overview', N'upwor'), (N'revoke_members', N'o'), (N'why', N'uor'), (N'estimate', N'uor'),
             (N'resource_settings', N'uor'), (N'set_resource', N'o'), (N'set_limit', N'o'), (N'pause', N'o'),
             (N'resume', N'o'), (N'revoke', N'o'), (N'reap', N'o'),
             -- end of feature: operate
             -- feature: priorities
             (N'acquire_by_priority', N'uo'), (N'priorities', N'uor'),
             -- end of feature: priorities
             -- feature: conversions
             (N'begin_upgrade', N'uo'), (N'upgrade', N'uo'), (N'downgrade', N'uo'),
             -- end of feature: conversions
             -- feature: handovers
             (N'hand_over_rows', N'uwo'), (N'adopt_rows', N'uo'), (N'hand_over', N'uo'), (N'adopt', N'uo'),
             (N'release_on_commit', N'uwo'), (N'is_committed', N'uwo'), (N'delete_commit_marker', N'uwo'),
             -- end of feature: handovers
             -- feature: guards
             (N'check_guard', N'upwor'), (N'guard_table', N'uo'), (N'unguard_table', N'uo'), (N'session_entry', N'uo'),
             (N'guarded_tables', N'uor'),
             -- end of feature: guards
             -- feature: rates
             (N'reset_rate', N'o'), (N'set_rate', N'o'), (N'take_rate', N'uo'), (N'adjust_rate', N'uo'), (N'take', N'uo'),
             (N'adjust', N'uo'), (N'rates', N'uor'),
             -- end of feature: rates
             -- feature: once
             (N'once_begin', N'uo'), (N'once_finish', N'uo'), (N'once_due', N'uo'), (N'mark_once', N'uo'),
             (N'once_forget', N'uo'), (N'once_runs', N'uor'),
             -- end of feature: once
             -- feature: queue
             (N'prune_tasks', N'upwo'), (N'put', N'p'), (N'put_task', N'p'), (N'save_schedule', N'p'),
             (N'set_schedule', N'po'), (N'maintain_queue', N'pwo'), (N'fire_schedule', N'w'), (N'list_schedules', N'pwor'),
             (N'set_task', N'po'), (N'cancel_task', N'po'), (N'task_controls', N'w'), (N'queue_state', N'pwor'),
             (N'queue_counts', N'pwor'), (N'list_tasks', N'pwor'), (N'show_tasks', N'pwor'), (N'queue_limits', N'pwor'),
             (N'queue_waits', N'pwor'), (N'task_attempts', N'pwor'), (N'claim_task', N'w'), (N'claim_blocked', N'w'),
             (N'show_task_locks', N'pwor'), (N'claim_tasks', N'w'), (N'end_task', N'w'), (N'next_task', N'w'),
             (N'return_claim', N'w'), (N'recover_tasks', N'pwo'), (N'work', N'w'), (N'set_queue', N'o'),
             -- end of feature: queue
             -- feature: batches
             (N'recover_batches', N'uo'), (N'start_part', N'uo'), (N'end_part', N'uo'), (N'claim_callback', N'uo'),
             (N'return_callback', N'uo'), (N'end_callback', N'uo'), (N'batch_part_start', N'uo'), (N'batch_part_finish', N'uo'),
             (N'batch_part_fail', N'uo'), (N'batch_resume', N'uo'), (N'batch_callback_ended', N'uo'),
             (N'list_batches', N'uor'), (N'abandon_batch', N'o'),
             -- end of feature: batches
             -- (A worker needs some of these, as it holds and releases the locks of its tasks.)
             (N'register_member', N'upwo'), (N'reattach_member', N'upwo'), (N'heartbeat', N'upwo'), (N'deregister_member', N'upwo'), (N'warm_up', N'upwo'),
             (N'prune', N'upwo'), (N'prune_operations', N'upwo'), (N'settings', N'upwor'), (N'register', N'uo'),
             (N'register_all', N'uo'), (N'wait', N'uo'), (N'poll_waiters', N'uo'), (N'release', N'uwo'), (N'cancel', N'uo'),
             (N'pin', N'uwo'), (N'find_deadlock', N'uo'), (N'acquire', N'uo'), (N'try', N'uo'), (N'renew', N'uo'),
             (N'assert_holding', N'uo'), (N'entries', N'uwor'), (N'may_enter', N'uwor'), (N'status', N'uor'), (N'past', N'uor'), (N'resources', N'uor'),
             (N'operations', N'uor')
     ) AS o (name, letters)
JOIN @role AS r ON CHARINDEX(r.letter, o.letters) > 0
UNION ALL
SELECT N'SELECT', o.name, r.name
FROM (VALUES
             -- feature: handovers
             (N'handover'),
             -- end of feature: handovers
             -- feature: rates
             (N'rate_window'), (N'rate_slot'),
             -- end of feature: rates
             -- feature: once
             (N'once_run'),
             -- end of feature: once
             -- feature: queue
             (N'task'), (N'task_log'), (N'schedule'), (N'task_lock'), (N'queue_proxy'), (N'queue_setting'), (N'queue_key'),
             (N'queue_wait'),
             -- end of feature: queue
             -- feature: batches
             (N'batch'), (N'batch_part'),
             -- end of feature: batches
             (N'{table}'), (N'entry'), (N'member'), (N'resource'), (N'history'), (N'setting'), (N'operation'),
             (N'limit_pattern')
     ) AS o (name)
JOIN @role AS r ON r.letter IN (N'o', N'r');
-- Revoke the rights that the roles should not have.
INSERT INTO @do (statement)
SELECT CONCAT(N'REVOKE ', g.permission_name COLLATE DATABASE_DEFAULT, N' ON {schema}.', QUOTENAME(OBJECT_NAME(g.major_id)),
              N' FROM ', r.name)
FROM sys.database_permissions AS g JOIN @role AS r ON DATABASE_PRINCIPAL_ID(r.name) = g.grantee_principal_id
WHERE g.class = 1 AND g.minor_id = 0 AND OBJECT_SCHEMA_NAME(g.major_id) = N'{schema}'
  AND NOT EXISTS (SELECT 1 FROM @right AS w
                  WHERE w.what = g.permission_name COLLATE DATABASE_DEFAULT AND w.object_name = OBJECT_NAME(g.major_id) AND w.role_name = r.name);
INSERT INTO @do (statement)
SELECT CONCAT(N'GRANT ', w.what, N' ON {schema}.[', w.object_name, N'] TO ', w.role_name)
FROM @right AS w WHERE @may = 1 OR DATABASE_PRINCIPAL_ID(w.role_name) IS NOT NULL;
SELECT @maximum = COUNT(*) FROM @do;
WHILE @number < @maximum
BEGIN
    SET @number = @number + 1;
    SELECT @statement = statement FROM @do WHERE number = @number;
    EXEC (@statement);
END;
GO

-- Let the application locks belong to role {schema}_locks, if no session can have one that belongs to public: there is
-- no member and no row. No member can register before this transaction ends, and a session that is registering tests
-- the principal again (register_member). (Otherwise a later run of this script does it.)
BEGIN TRANSACTION;
DECLARE @rows bigint;
IF DATABASE_PRINCIPAL_ID(N'{schema}_locks') IS NOT NULL AND {schema}.lock_principal() = N'public'
   AND NOT EXISTS (SELECT 1 FROM {schema}.member WITH (NOLOCK)) AND NOT EXISTS (SELECT 1 FROM {schema}.entry WITH (NOLOCK))
   -- (Not if role public has rights to sqlsem's objects: then all users need the locks.)
   AND NOT EXISTS (SELECT 1 FROM sys.database_permissions AS g
                   WHERE g.grantee_principal_id = DATABASE_PRINCIPAL_ID(N'public') AND g.state IN ('G', 'W')
                     AND g.permission_name IN (N'EXECUTE', N'INSERT', N'CONTROL')
                     AND (g.class = 0 OR (g.class = 1 AND OBJECT_SCHEMA_NAME(g.major_id) = N'{schema}')
                          OR (g.class = 3 AND g.major_id = SCHEMA_ID(N'{schema}'))))
BEGIN
    SELECT @rows = COUNT(*) FROM {schema}.member WITH (TABLOCKX, HOLDLOCK);
    SELECT @rows = @rows + COUNT(*) FROM {schema}.entry WITH (TABLOCKX, HOLDLOCK);
    IF @rows = 0
    BEGIN
        EXEC (N'DROP FUNCTION {schema}.lock_principal');
        EXEC (N'CREATE FUNCTION {schema}.lock_principal() RETURNS nvarchar(128) AS BEGIN RETURN N''{schema}_locks''; END');
    END;
END;
COMMIT TRANSACTION;
GO
