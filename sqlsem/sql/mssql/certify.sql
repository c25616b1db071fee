-- sqlsem, what `sqlsem certify` asks SQL Server, in a schema that it makes and drops.

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
-- Words that are not sent on, and what stands for them.
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
-- Who is inside: a witness beside the protocol.
CREATE TABLE {schema}.certify_inside (
    resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    who         nvarchar(60) COLLATE Latin1_General_100_BIN2 NOT NULL,
    access_type nvarchar(10) COLLATE Latin1_General_100_BIN2 NOT NULL,
    CONSTRAINT certify_inside_pk PRIMARY KEY (resource_id, who)
)

-- name: create_dead
-- Whose rows there count no more, as they were killed.
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

-- name: bury
INSERT INTO {schema}.certify_dead (who) VALUES (?)

-- name: read_counter
-- No hint: as a program reads that knows nothing of sqlsem.
SELECT number FROM {schema}.certify_counter

-- name: write_counter
UPDATE {schema}.certify_counter SET number = ?

-- name: positions
SELECT queue_position FROM {schema}.entry WHERE resource_id = ?

-- name: acquire
SET NOCOUNT ON; DECLARE @code int, @position bigint, @fence bigint;
EXEC @code = {schema}.acquire @resource = ?, @limit = ?, @access = ?, @timeout_ms = ?, @position = @position OUTPUT,
    @fence = @fence OUTPUT;
SELECT @code, @position, @fence

-- name: release
SET NOCOUNT ON; DECLARE @code int;
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
-- In a schema of its own: those of sqlsem's own schema cannot be guarded.
EXEC (N'CREATE SCHEMA {schema}_own');
CREATE TABLE {schema}_own.guarded (number int NOT NULL CONSTRAINT guarded_pk PRIMARY KEY)

-- name: guard
EXEC {schema}.guard_table N'{schema}_own.guarded', N'certify-guarded'

-- name: unguard
EXEC {schema}.unguard_table N'{schema}_own.guarded'

-- name: drop_guarded
DROP TABLE IF EXISTS {schema}_own.guarded;
DROP SCHEMA IF EXISTS {schema}_own

-- name: bare_rows
INSERT INTO {schema}.{table} (resource_id, requesting_id)
VALUES (N'certify-bare', N'a'), (N'certify-bare', N'b'), (N'certify-bare', N'c')

-- name: bare_rows_left
DELETE FROM {schema}.{table} WHERE resource_id = N'certify-bare'

-- name: compile_all
-- Binds each routine again, as CREATE does when its tables are there; those that the server refuses, in its words.
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

-- name: drop_own
DROP TABLE IF EXISTS {schema}.certify_inside;
DROP TABLE IF EXISTS {schema}.certify_dead;
DROP TABLE IF EXISTS {schema}.certify_counter;
DROP TABLE IF EXISTS {schema}_own.guarded;
DROP SCHEMA IF EXISTS {schema}_own

-- name: remains
SELECT CONCAT(N'schema ', name COLLATE DATABASE_DEFAULT) FROM sys.schemas WHERE name IN (N'{schema}', N'{schema}_own')
UNION ALL
SELECT CONCAT(N'role ', name COLLATE DATABASE_DEFAULT) FROM sys.database_principals
WHERE type = 'R' AND CHARINDEX(N'{schema}_', name COLLATE DATABASE_DEFAULT) = 1
