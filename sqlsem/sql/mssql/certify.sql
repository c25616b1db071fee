-- sqlsem, the statements of `sqlsem certify` for SQL Server, in a schema that it creates and drops.

-- name: facts
SELECT f.name, f.value
FROM sys.databases AS d
CROSS APPLY (VALUES
    (N'server', CAST(@@VERSION AS nvarchar(300))),
    (N'version', CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(300))),
    (N'level', CAST(SERVERPROPERTY('ProductLevel') AS nvarchar(300))),
    (N'edition', CAST(SERVERPROPERTY('Edition') AS nvarchar(300))),
    (N'engine_edition', CAST(SERVERPROPERTY('EngineEdition') AS nvarchar(300))),
    (N'compatibility_level', CAST(d.compatibility_level AS nvarchar(300))),
    (N'collation', CAST(DATABASEPROPERTYEX(DB_NAME(), 'Collation') AS nvarchar(300))),
    (N'server_collation', CAST(SERVERPROPERTY('Collation') AS nvarchar(300))),
    (N'rcsi', CASE d.is_read_committed_snapshot_on WHEN 1 THEN N'on' ELSE N'off' END),
    (N'snapshot_isolation', LOWER(CAST(d.snapshot_isolation_state_desc AS nvarchar(300)))),
    (N'delayed_durability', LOWER(CAST(COALESCE(d.delayed_durability_desc, 'DISABLED') AS nvarchar(300)))),
    (N'availability_groups', CAST(SERVERPROPERTY('IsHadrEnabled') AS nvarchar(300)))) AS f (name, value)
WHERE d.name = DB_NAME()

-- name: hidden
-- Names that the report must not contain, and the placeholders for them.
SELECT CAST(@@SERVERNAME AS nvarchar(300)), N'<server>'
UNION ALL SELECT CAST(SERVERPROPERTY('MachineName') AS nvarchar(300)), N'<server>'
UNION ALL SELECT CAST(ORIGINAL_LOGIN() AS nvarchar(300)), N'<login>'
UNION ALL SELECT CAST(DB_NAME() AS nvarchar(300)), N'<database>'

-- name: session_number
SELECT CAST(@@SPID AS int)

-- name: kill
DECLARE @kill nvarchar(40) = CONCAT(N'KILL ', CAST(? AS int));
EXEC (@kill)

-- name: create_inside
-- The present holders, recorded independently of sqlsem.
CREATE TABLE {schema}.certify_inside (
    resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    who         nvarchar(60) COLLATE Latin1_General_100_BIN2 NOT NULL,
    access_type nvarchar(10) COLLATE Latin1_General_100_BIN2 NOT NULL,
    CONSTRAINT certify_inside_pk PRIMARY KEY (resource_id, who)
)

-- name: create_dead
-- The holders that were killed: their rows in certify_inside no longer count.
CREATE TABLE {schema}.certify_dead (
    who nvarchar(60) COLLATE Latin1_General_100_BIN2 NOT NULL CONSTRAINT certify_dead_pk PRIMARY KEY
)

-- name: create_counter
CREATE TABLE {schema}.certify_counter (number int NOT NULL)

-- name: begin_counter
INSERT INTO {schema}.certify_counter (number) VALUES (0)

-- name: enter
INSERT INTO {schema}.certify_inside (resource_id, who, access_type) VALUES (?, ?, ?)

-- name: others
SELECT i.who, i.access_type FROM {schema}.certify_inside AS i
WHERE i.resource_id = ? AND i.who <> ? AND NOT EXISTS (SELECT 1 FROM {schema}.certify_dead AS d WHERE d.who = i.who)

-- name: leave
DELETE FROM {schema}.certify_inside WHERE resource_id = ? AND who = ?

-- name: delete_member_rows
INSERT INTO {schema}.certify_dead (who) VALUES (?)

-- name: read_counter
-- Without a hint, like a program that does not know sqlsem.
SELECT number FROM {schema}.certify_counter

-- name: write_counter
UPDATE {schema}.certify_counter SET number = ?

-- name: positions
SELECT queue_position FROM {schema}.entry WHERE resource_id = ?

-- name: acquire
-- (Changes no setting: check 17 compares the settings of the session before and after.)
DECLARE @code int, @position bigint, @fence bigint;
EXEC @code = {schema}.acquire @resource = ?, @limit = ?, @access = ?, @timeout_ms = ?, @position = @position OUTPUT,
    @fence = @fence OUTPUT;
SELECT @code, @position, @fence

-- name: release
DECLARE @code int;
EXEC @code = {schema}.release @resource = ?;
SELECT @code

-- name: begin
BEGIN TRANSACTION

-- name: rollback
IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION

-- name: commit
COMMIT TRANSACTION

-- name: assert_holding
EXEC {schema}.assert_holding @resource = ?, @position = ?

-- name: create_guarded
-- The guarded table needs another schema: the tables of sqlsem's schema cannot be guarded.
EXEC (N'CREATE SCHEMA {schema}_own');
CREATE TABLE {schema}_own.guarded (number int NOT NULL CONSTRAINT guarded_pk PRIMARY KEY);
CREATE TABLE {schema}_own.switched (number int NOT NULL CONSTRAINT switched_pk PRIMARY KEY);
INSERT INTO {schema}_own.switched (number) VALUES (7)

-- name: guard
EXEC {schema}.guard_table N'{schema}_own.guarded', N'certify-guarded'

-- name: unguard
EXEC {schema}.unguard_table N'{schema}_own.guarded'

-- name: drop_guarded
DROP TABLE IF EXISTS {schema}_own.guarded;
DROP TABLE IF EXISTS {schema}_own.switched;
DROP SCHEMA IF EXISTS {schema}_own

-- name: bare_rows
INSERT INTO {schema}.{table} (resource_id, requesting_id)
VALUES (N'certify-bare', N'a'), (N'certify-bare', N'b'), (N'certify-bare', N'c')

-- name: bare_rows_left
DELETE FROM {schema}.{table} WHERE resource_id = N'certify-bare'

-- name: compile_all
-- Bind each routine again, as CREATE does when its tables exist. Return each routine that the server refuses, with its
-- message.
SET NOCOUNT ON;
DECLARE @wrong TABLE (name nvarchar(300) NOT NULL, words nvarchar(4000) NULL);
DECLARE @id int = 0, @name nvarchar(300), @before int;
WHILE 1 = 1
BEGIN
    SET @before = @id;
    SELECT TOP (1) @id = object_id, @name = CONCAT(N'{schema}.', QUOTENAME(name)) FROM sys.objects
    WHERE schema_id = SCHEMA_ID(N'{schema}') AND type IN ('P', 'TR') AND object_id > @before
    ORDER BY object_id;
    IF @id = @before
        BREAK;
    BEGIN TRY
        EXEC sys.sp_refreshsqlmodule @name;
    END TRY
    BEGIN CATCH
        INSERT INTO @wrong (name, words) VALUES (@name, ERROR_MESSAGE());
    END CATCH;
END;
SELECT name, words FROM @wrong

-- name: applock_mode
SELECT APPLOCK_MODE(N'public', N'{schema}.certify', N'Transaction')

-- name: hinted_number
-- The hints of claims and similar statements, together. The row is skipped while another session has it locked.
SET NOCOUNT ON; SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
DECLARE @number int;
BEGIN TRANSACTION;
SELECT TOP (1) @number = number FROM {schema}.certify_counter WITH (UPDLOCK, READPAST, ROWLOCK, READCOMMITTEDLOCK);
UPDATE {schema}.certify_counter WITH (READPAST, ROWLOCK, READCOMMITTEDLOCK) SET number = number WHERE number < 0;
DELETE FROM {schema}.certify_counter WITH (READPAST, ROWLOCK, READCOMMITTEDLOCK) WHERE number < 0;
ROLLBACK TRANSACTION;
SELECT @number

-- name: is_sql_server
-- 1: SQL Server; 0: another server that speaks T-SQL.
SELECT CASE WHEN @@VERSION LIKE N'Microsoft SQL %' THEN 1 ELSE 0 END

-- name: insert_guarded
INSERT INTO {schema}_own.guarded (number) VALUES (1)

-- name: update_guarded
UPDATE {schema}_own.guarded SET number = 2

-- name: delete_guarded
DELETE FROM {schema}_own.guarded

-- name: output_guarded
-- Every login gets error 334 if the table has a trigger.
INSERT INTO {schema}_own.guarded (number) OUTPUT inserted.number VALUES (3)

-- name: merge_guarded
-- (As a string, as not every server accepts MERGE.)
EXEC (N'MERGE {schema}_own.guarded AS t USING (SELECT 5 AS number) AS s ON t.number = s.number
    WHEN MATCHED THEN UPDATE SET number = 6 WHEN NOT MATCHED THEN INSERT (number) VALUES (s.number);')

-- name: bulk_guarded
-- A file of this host, which the server may not see. (Without FIRE_TRIGGERS, BULK INSERT runs no trigger.)
BULK INSERT {schema}_own.guarded FROM 'certify_file' WITH (FIRE_TRIGGERS, ROWTERMINATOR = '0x0a')

-- name: bulk_past_guard
BULK INSERT {schema}_own.guarded FROM 'certify_file' WITH (ROWTERMINATOR = '0x0a')

-- name: switch_past_guard
ALTER TABLE {schema}_own.switched SWITCH TO {schema}_own.guarded

-- name: empty_guarded
TRUNCATE TABLE {schema}_own.guarded

-- name: age_handovers
UPDATE {schema}.handover SET given_at = DATEADD(day, -30, given_at), adopted_at = DATEADD(day, -30, adopted_at)

-- name: renew
SET NOCOUNT ON; DECLARE @code int;
EXEC @code = {schema}.renew @resource = ?, @position = ?;
SELECT @code

-- name: hand_over
SET NOCOUNT ON; DECLARE @token nvarchar(200);
EXEC {schema}.hand_over @resource = ?, @token = @token OUTPUT;
SELECT @token

-- name: adopt
EXEC {schema}.adopt @token = ?

-- name: status
EXEC {schema}.status

-- name: set_limit
EXEC {schema}.set_limit @resource = ?, @limit = 2

-- name: create_user
CREATE USER certify_user WITHOUT LOGIN

-- name: drop_user
DROP USER IF EXISTS certify_user

-- name: add_member
ALTER ROLE certify_role ADD MEMBER certify_user

-- name: create_group
CREATE ROLE certify_user

-- name: drop_group
DROP ROLE IF EXISTS certify_user

-- name: groups
-- Windows and Entra groups of this login that are users of this database. None for dbo, which needs no role.
SELECT DISTINCT p.name FROM sys.user_token AS t JOIN sys.database_principals AS p ON p.principal_id = t.principal_id
WHERE p.type IN ('G', 'X') AND t.usage = N'GRANT OR DENY' AND DATABASE_PRINCIPAL_ID() <> 1

-- name: join_group
DECLARE @name nvarchar(128) = ?, @text nvarchar(600);
SET @text = CONCAT(N'ALTER ROLE {schema}_user ADD MEMBER ', QUOTENAME(@name));
EXEC (@text)

-- name: leave_group
DECLARE @name nvarchar(128) = ?, @text nvarchar(600);
SET @text = CONCAT(N'ALTER ROLE {schema}_user DROP MEMBER ', QUOTENAME(@name));
EXEC (@text)

-- name: is_user
SELECT CAST(IS_MEMBER(N'{schema}_user') AS int)

-- name: as_user
EXECUTE AS USER = N'certify_user'

-- name: as_before
REVERT

-- name: denied
-- The server's error for a login without the right.
SELECT N'229'

-- name: callers_settings
-- Settings that a calling session may have.
SELECT setting FROM (VALUES
    (N'SET QUOTED_IDENTIFIER OFF'), (N'SET ANSI_NULLS OFF'), (N'SET ANSI_PADDING OFF'), (N'SET ANSI_WARNINGS OFF'),
    (N'SET ARITHABORT OFF'), (N'SET CONCAT_NULL_YIELDS_NULL OFF'), (N'SET NUMERIC_ROUNDABORT ON'),
    (N'SET IMPLICIT_TRANSACTIONS ON'), (N'SET XACT_ABORT ON'), (N'SET ROWCOUNT 1'), (N'SET TEXTSIZE 10'),
    (N'SET NOCOUNT OFF'), (N'SET DATEFIRST 3'), (N'SET DATEFORMAT dmy'), (N'SET LANGUAGE Turkish'), (N'SET LOCK_TIMEOUT 0'),
    (N'SET DEADLOCK_PRIORITY HIGH'), (N'SET QUOTED_IDENTIFIER OFF; SET ANSI_NULLS OFF; SET ROWCOUNT 1; SET TEXTSIZE 10'),
    (N'SET TRANSACTION ISOLATION LEVEL SERIALIZABLE'),
    (N'SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED')) AS s (setting)

-- name: shown_settings
-- Expressions that a server may lack.
SELECT expression FROM (VALUES
    (N'CAST(@@OPTIONS AS int)'), (N'CAST(@@LOCK_TIMEOUT AS int)'), (N'CAST(@@TEXTSIZE AS int)'), (N'CAST(@@DATEFIRST AS int)'),
    (N'CAST(@@LANGUAGE AS nvarchar(60))'), (N'CAST(@@TRANCOUNT AS int)')) AS s (expression)

-- name: agent_setting
-- The settings of SQL Server Agent for a job step.
SELECT N'SET QUOTED_IDENTIFIER OFF; SET TEXTSIZE 1024; SET DEADLOCK_PRIORITY LOW'

-- name: many_rows
-- More rows than a driver reads ahead.
SELECT TOP (200000) a.name, b.name FROM sys.all_objects AS a CROSS JOIN sys.all_objects AS b

-- name: raw_take
EXEC sys.sp_getapplock @Resource = N'{schema}.raw', @LockMode = N'Exclusive', @LockOwner = N'Session', @LockTimeout = 60000, @DbPrincipal = N'public'

-- name: raw_give
EXEC sys.sp_releaseapplock @Resource = N'{schema}.raw', @LockOwner = N'Session', @DbPrincipal = N'public'

-- name: log_counters
-- Flushes of the log, and flushed bytes, since the server started.
SELECT MAX(CASE WHEN counter_name LIKE N'Log Flushes/sec%' THEN cntr_value END),
       MAX(CASE WHEN counter_name LIKE N'Log Bytes Flushed/sec%' THEN cntr_value END)
FROM sys.dm_os_performance_counters
WHERE RTRIM(instance_name) COLLATE DATABASE_DEFAULT = DB_NAME() AND counter_name LIKE N'Log %Flush%/sec%'

-- name: dead_rows
SELECT SUM(ghost_record_count) FROM sys.dm_db_index_physical_stats(DB_ID(), OBJECT_ID(N'{schema}.entry'), NULL, NULL, N'DETAILED')

-- name: old_snapshot
SET TRANSACTION ISOLATION LEVEL SNAPSHOT; BEGIN TRANSACTION

-- name: workers
SELECT CAST(max_workers_count AS int) FROM sys.dm_os_sys_info

-- name: many_locks
-- Take this many locks in one session.
SET NOCOUNT ON;
DECLARE @number int = ?, @name nvarchar(255);
WHILE @number > 0
BEGIN
    SET @name = CONCAT(N'{schema}.many.', @number);
    EXEC sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Session', @LockTimeout = 0, @DbPrincipal = N'public';
    SET @number = @number - 1;
END;
SELECT 1

-- name: test_cost
-- Microseconds of one APPLOCK_TEST and one APPLOCK_MODE, on average of 1,000.
SET NOCOUNT ON;
DECLARE @since datetime2(6) = SYSUTCDATETIME(), @number int = 1000, @held int = 0;
WHILE @number > 0
BEGIN
    SET @held = @held + APPLOCK_TEST(N'public', N'{schema}.many.1', N'Shared', N'Session')
        + CASE APPLOCK_MODE(N'public', N'{schema}.many.1', N'Session') WHEN N'NoLock' THEN 0 ELSE 1 END;
    SET @number = @number - 1;
END;
SELECT CAST(DATEDIFF_BIG(microsecond, @since, SYSUTCDATETIME()) AS float) / 1000

-- name: lock_names
-- The names of a session's application locks, as the server shows them.
SELECT CAST(resource_description AS nvarchar(256)) FROM sys.dm_tran_locks
WHERE resource_type = N'APPLICATION' AND request_session_id = ? AND resource_database_id = DB_ID()

-- name: recompiles
-- The number of compilations of sqlsem's statements; the number of cached plans, and of those that scan a whole index
-- or need a memory grant.
SELECT SUM(q.plan_generation_num), COUNT(*),
       SUM(CASE WHEN CAST(p.query_plan AS nvarchar(max)) LIKE N'%PhysicalOp="%Index Scan"%' THEN 1 ELSE 0 END),
       SUM(CASE WHEN q.max_grant_kb > 0 THEN 1 ELSE 0 END)
FROM sys.dm_exec_query_stats AS q
CROSS APPLY sys.dm_exec_text_query_plan(q.plan_handle, q.statement_start_offset, q.statement_end_offset) AS p
WHERE p.dbid = DB_ID() AND OBJECT_SCHEMA_NAME(p.objectid) = N'{schema}'

-- name: started
SELECT CONCAT(CAST(@@SERVERNAME AS nvarchar(128)) COLLATE DATABASE_DEFAULT, N' ', CONVERT(nvarchar(30), create_date, 126))
FROM sys.databases WHERE name = N'tempdb'

-- name: clock
SELECT CAST(DATEDIFF_BIG(millisecond, '19700101', SYSUTCDATETIME()) AS float) / 1000

-- name: collations
-- Ways to create a database, beside the default: with collations that this server knows. (On Azure SQL, and in a
-- contained database, the catalog has another collation than the database.)
SELECT CONCAT(w.before, N'COLLATE ', w.name, w.behind) FROM (VALUES
    (N'', N'Latin1_General_100_CS_AS', N''), (N'', N'Latin1_General_100_BIN2', N''), (N'', N'Turkish_CI_AS', N''),
    (N'', N'Latin1_General_100_CI_AS_SC_UTF8', N''), (N'', N'Japanese_XJIS_140_CS_AS_KS_WS', N''),
    (N'', N'Turkish_CI_AS', N' WITH CATALOG_COLLATION = SQL_Latin1_General_CP1_CI_AS'),
    (N'', N'Latin1_General_100_BIN2', N' WITH CATALOG_COLLATION = DATABASE_DEFAULT'),
    (N'CONTAINMENT = PARTIAL ', N'Turkish_CI_AS', N'')) AS w (before, name, behind)
WHERE EXISTS (SELECT 1 FROM sys.fn_helpcollations() AS c WHERE c.name COLLATE DATABASE_DEFAULT = w.name COLLATE DATABASE_DEFAULT)

-- name: create_database
CREATE DATABASE certify_database

-- name: drop_database
DROP DATABASE IF EXISTS certify_database

-- name: snapshot_allowed
ALTER DATABASE certify_database SET ALLOW_SNAPSHOT_ISOLATION ON

-- name: rows_are_versioned
ALTER DATABASE certify_database SET READ_COMMITTED_SNAPSHOT ON WITH ROLLBACK IMMEDIATE

-- name: rows_are_not_versioned
ALTER DATABASE certify_database SET READ_COMMITTED_SNAPSHOT OFF WITH ROLLBACK IMMEDIATE

-- name: oldest_level
ALTER DATABASE certify_database SET COMPATIBILITY_LEVEL = 130

-- name: delayed
ALTER DATABASE certify_database SET DELAYED_DURABILITY = ALLOWED

-- name: not_delayed
ALTER DATABASE certify_database SET DELAYED_DURABILITY = DISABLED

-- name: acquire_as
EXEC {schema}.acquire @resource = ?, @timeout_ms = 0, @requesting_id = N'certify'

-- name: release_as
EXEC {schema}.release @resource = ?, @requesting_id = N'certify'

-- name: drop_own
DROP TABLE IF EXISTS {schema}.certify_inside;
DROP TABLE IF EXISTS {schema}.certify_dead;
DROP TABLE IF EXISTS {schema}.certify_counter;
DROP TABLE IF EXISTS {schema}_own.guarded;
DROP TABLE IF EXISTS {schema}_own.switched;
DROP SCHEMA IF EXISTS {schema}_own

-- name: remains
-- Each object that remains, and the statement that removes it; NULL: the script of `sqlsem sql mssql drop`.
SELECT CONCAT(N'schema ', name COLLATE DATABASE_DEFAULT),
       CASE WHEN name = N'{schema}_own' THEN N'DROP TABLE IF EXISTS {schema}_own.guarded, {schema}_own.switched; DROP SCHEMA {schema}_own' END
FROM sys.schemas WHERE name IN (N'{schema}', N'{schema}_own')
UNION ALL
SELECT CONCAT(N'role ', name COLLATE DATABASE_DEFAULT), CONCAT(N'DROP ROLE ', name COLLATE DATABASE_DEFAULT) FROM sys.database_principals
WHERE type = 'R' AND CHARINDEX(N'{schema}_', name COLLATE DATABASE_DEFAULT) = 1
