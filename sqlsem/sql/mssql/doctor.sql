-- sqlsem, the statements of `sqlsem doctor` for SQL Server. None of them changes anything.

-- name: server
SELECT CAST(@@VERSION AS nvarchar(300)), CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(60)),
       CAST(SERVERPROPERTY('EngineEdition') AS int), CAST(DATABASEPROPERTYEX(DB_NAME(), 'Updateability') AS nvarchar(60))

-- name: permission
SELECT CAST(CURRENT_USER AS nvarchar(255)), CASE WHEN SCHEMA_ID(N'{schema}') IS NULL THEN 0 ELSE 1 END,
       COALESCE(HAS_PERMS_BY_NAME(N'{schema}.register', 'OBJECT', 'EXECUTE'), 0),
       COALESCE(HAS_PERMS_BY_NAME(N'{schema}.[revoke]', 'OBJECT', 'EXECUTE'), 0)

-- name: settings
SELECT CAST(is_read_committed_snapshot_on AS int), CAST(COALESCE(delayed_durability_desc, 'DISABLED') AS nvarchar(60)),
       CAST(compatibility_level AS int)
FROM sys.databases WHERE name = DB_NAME()

-- name: failover
SELECT CAST(SERVERPROPERTY('IsHadrEnabled') AS int)

-- name: encryption
-- Needs VIEW SERVER STATE (from 2022 on VIEW SERVER SECURITY STATE is enough); without it the doctor cannot check this.
SELECT CAST(encrypt_option AS nvarchar(40)) FROM sys.dm_exec_connections WHERE session_id = @@SPID

-- name: workers
-- Needs VIEW SERVER STATE (from 2022 on VIEW SERVER PERFORMANCE STATE); without it the doctor cannot check this.
SELECT CAST(max_workers_count AS int) FROM sys.dm_os_sys_info

-- name: waiters
-- For operators and readers: setting max_server_waiters; the number of members, and of members with a waiting request.
SELECT (SELECT MAX(TRY_CAST(value AS int)) FROM {schema}.setting WHERE name = N'max_server_waiters'),
       (SELECT COUNT(*) FROM {schema}.member WITH (NOLOCK)),
       (SELECT COUNT(DISTINCT member_id) FROM {schema}.entry WITH (NOLOCK) WHERE granted_at IS NULL)

-- name: clock
SELECT SYSUTCDATETIME()

-- name: beacon_take
SET NOCOUNT ON; DECLARE @name nvarchar(255) = ?, @code int;
EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Session', @LockTimeout = 0, @DbPrincipal = N'public';
SELECT CAST(@@SPID AS int), @code

-- name: beacon_look
SET NOCOUNT ON; DECLARE @name nvarchar(255) = ?, @timeout_ms int = ?, @code int;
EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Shared', @LockOwner = N'Session', @LockTimeout = @timeout_ms,
    @DbPrincipal = N'public';
IF @code >= 0
    EXEC sys.sp_releaseapplock @Resource = @name, @LockOwner = N'Session', @DbPrincipal = N'public';
SELECT CAST(@@SPID AS int), @code

-- name: beacon_give
SET NOCOUNT ON; DECLARE @name nvarchar(255) = ?, @mode nvarchar(32);
SET @mode = APPLOCK_MODE(N'public', @name, N'Session');
IF @mode <> N'NoLock'
    EXEC sys.sp_releaseapplock @Resource = @name, @LockOwner = N'Session', @DbPrincipal = N'public';
SELECT CAST(@@SPID AS int), CASE @mode WHEN N'Exclusive' THEN 1 ELSE 0 END
