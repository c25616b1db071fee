-- sqlsem, roles for SQL Server. May be run again. Add a user to one of them: ALTER ROLE {schema}_user ADD MEMBER etl;
--   {schema}_user      takes and gives back locks, puts JSON tasks, works: the public routines, and no right to any table
--   {schema}_operator  also caps, pauses, revokes and reaps, and puts tasks that are code
--   {schema}_reader    looks: the queue, the history, the settings
-- Bare participants need INSERT, SELECT and DELETE on {schema}.{table} and EXECUTE on nothing.
-- Roles belong to the database. Whoever may not create them gets the tables all the same; an administrator runs this.

DECLARE @grants TABLE (number int IDENTITY NOT NULL PRIMARY KEY, statement nvarchar(400) NOT NULL);
DECLARE @statement nvarchar(400), @number int = 0, @most int;
DECLARE @may int = CASE WHEN HAS_PERMS_BY_NAME(QUOTENAME(DB_NAME()), N'DATABASE', N'CREATE ROLE') = 1
    OR IS_ROLEMEMBER(N'db_owner') = 1 OR IS_SRVROLEMEMBER(N'sysadmin') = 1 THEN 1 ELSE 0 END;
IF DATABASE_PRINCIPAL_ID(N'{schema}_user') IS NULL AND @may = 1 EXEC (N'CREATE ROLE {schema}_user');
IF DATABASE_PRINCIPAL_ID(N'{schema}_operator') IS NULL AND @may = 1 EXEC (N'CREATE ROLE {schema}_operator');
IF DATABASE_PRINCIPAL_ID(N'{schema}_reader') IS NULL AND @may = 1 EXEC (N'CREATE ROLE {schema}_reader');

INSERT INTO @grants (statement)
SELECT N'GRANT ' + g.what + N' ON {schema}.[' + g.object_name + N'] TO ' + g.role_name
FROM (
    SELECT N'EXECUTE' AS what, o.name AS object_name, r.name AS role_name
    FROM (VALUES (N'enrol', 1), (N'resume_member', 1), (N'ping', 1), (N'resign', 1), (N'register', 1),
                 (N'register_all', 1),
                 (N'wait', 1), (N'release', 1), (N'cancel', 1), (N'pin', 1), (N'find_deadlock', 1), (N'warm_up', 1),
                 (N'prune', 1),
                 (N'begin_upgrade', 1), (N'upgrade', 1), (N'downgrade', 1),
                 (N'acquire', 1), (N'try', 1), (N'renew', 1), (N'assert_holding', 1),
                 (N'put_task', 1), (N'claim_task', 1), (N'end_task', 1), (N'next_task', 1), (N'return_claim', 1),
                 (N'recover_tasks', 1), (N'queue_state', 1), (N'prune_tasks', 1), (N'put', 1), (N'work', 1),
                 (N'list_tasks', 3), (N'task_attempts', 3), (N'set_task', 2),
                 (N'recover_rounds', 1), (N'start_part', 1), (N'end_part', 1), (N'claim_then', 1), (N'return_then', 1),
                 (N'end_then', 1), (N'round_part_start', 1), (N'round_part_done', 1), (N'round_part_failed', 1),
                 (N'round_resume', 1), (N'round_continued', 1), (N'list_rounds', 3),
                 (N'settings', 3), (N'entries', 3), (N'status', 3), (N'past', 3), (N'resources', 3),
                 (N'set_resource', 2), (N'set_limit', 2), (N'pause', 2), (N'resume', 2), (N'revoke', 2), (N'reap', 2)
         ) AS o (name, kind)
    CROSS JOIN (VALUES (N'{schema}_user', 1), (N'{schema}_operator', 2), (N'{schema}_reader', 3)) AS r (name, kind)
    WHERE o.kind = 3 OR r.kind = 2 OR (o.kind = 1 AND r.kind = 1)
    UNION ALL
    SELECT N'SELECT', o.name, r.name
    FROM (VALUES (N'{table}'), (N'entry'), (N'member'), (N'resource'), (N'history'), (N'setting'),
                 (N'task'), (N'task_log'), (N'round'), (N'round_part')) AS o (name)
    CROSS JOIN (VALUES (N'{schema}_operator'), (N'{schema}_reader')) AS r (name)
) AS g
WHERE DATABASE_PRINCIPAL_ID(g.role_name) IS NOT NULL;
SELECT @most = COUNT(*) FROM @grants;
WHILE @number < @most
BEGIN
    SET @number = @number + 1;
    SELECT @statement = statement FROM @grants WHERE number = @number;
    EXEC (@statement);
END;
GO
