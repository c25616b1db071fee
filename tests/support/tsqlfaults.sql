-- Faults: statements that SQL Server refuses, or that do not do as meant. Each batch has one fault, and its mark is a part
-- of the message of tests/tsqltyped.py. A batch that is marked as right comes near to a fault, and must have no message.
-- The first batches were in sqlsem's own scripts once.

-- fault: collation conflict in CONCAT
CREATE TRIGGER {schema}.fault_bare_row ON {schema}.{table} INSTEAD OF INSERT AS
IF EXISTS (SELECT 1 FROM inserted
           WHERE CONCAT(resource_id, access_type, requesting_id) COLLATE Latin1_General_100_BIN2
                 LIKE CONCAT(N'%[', NCHAR(1), N'-', NCHAR(31), NCHAR(127), N'-', NCHAR(159), N']%'))
    THROW 50000, N'sqlsem: bad row', 1;
GO
-- right
CREATE TRIGGER {schema}.right_bare_row ON {schema}.{table} INSTEAD OF INSERT AS
IF EXISTS (SELECT 1 FROM inserted
           WHERE CONCAT(resource_id, access_type, requesting_id COLLATE Latin1_General_100_BIN2)
                 LIKE CONCAT(N'%[', NCHAR(1), N'-', NCHAR(31), NCHAR(127), N'-', NCHAR(159), N']%'))
    THROW 50000, N'sqlsem: bad row', 1;
GO
-- fault: collation conflict in CONCAT
DECLARE @row TABLE (owner nvarchar(255) NULL, resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
                    position bigint NOT NULL, member_id bigint NOT NULL, granted int NOT NULL);
DECLARE @text nvarchar(4000);
SELECT @text = CONCAT(
           COALESCE(m.host, N'?'),
           COALESCE(N' (' + w.owner + N')', N''),
           CONCAT(CASE WHEN w.granted = 1 THEN N' holds ''' ELSE N' queues for ''' END, w.resource_id, N''' at ', w.position, N', '),
           CONCAT(N'waits for ''', w.resource_id, N''' at ', w.position))
FROM @row AS w JOIN {schema}.member AS m ON m.member_id = w.member_id;
GO
-- fault: collation conflict in CONCAT: Latin1_General_CI_AS_KS_WS
DECLARE @role TABLE (name sysname NOT NULL, letter nchar(1) NOT NULL);
SELECT CONCAT(N'REVOKE ', g.permission_name, N' ON {schema}.', QUOTENAME(OBJECT_NAME(g.major_id)), N' FROM ', r.name)
FROM sys.database_permissions AS g JOIN @role AS r ON DATABASE_PRINCIPAL_ID(r.name) = g.grantee_principal_id;
GO
-- fault: collation conflict in a comparison
DECLARE @right TABLE (what nvarchar(10) NOT NULL);
SELECT 1 AS one FROM sys.database_permissions AS g WHERE EXISTS (SELECT 1 FROM @right AS w WHERE w.what = g.permission_name);
GO
-- fault: collation conflict in IN: CATALOG_DEFAULT and DATABASE_DEFAULT (in Azure SQL, a contained database)
DECLARE @role TABLE (name sysname NOT NULL);
SELECT p.principal_id FROM sys.database_principals AS p WHERE p.name NOT IN (SELECT r.name FROM @role AS r);
GO
-- right
DECLARE @role TABLE (name sysname NOT NULL);
SELECT p.principal_id FROM sys.database_principals AS p
WHERE p.name COLLATE DATABASE_DEFAULT NOT IN (SELECT r.name FROM @role AS r) AND p.name NOT IN (N'public', N'dbo');
GO
-- fault: clustered index of fault_key has up to 1020 bytes, more than 900 (1946)
CREATE TABLE {schema}.fault_key (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_key   nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    CONSTRAINT fault_key_pk PRIMARY KEY (queue_name, task_key)
);
GO
-- right
CREATE TABLE {schema}.right_key (
    queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    task_key   nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    CONSTRAINT right_key_pk PRIMARY KEY NONCLUSTERED (queue_name, task_key)
);
GO
-- fault: DATEDIFF(millisecond) overflows (535)
DECLARE @seconds float;
SELECT @seconds = DATEDIFF(millisecond, COALESCE(adopted_at, given_at), SYSUTCDATETIME()) / CAST(1000 AS float)
FROM {schema}.handover;
GO
-- right
DECLARE @timeout_ms int = 1000, @left int, @deadline datetime2(6), @age bigint;
SET @deadline = DATEADD(millisecond, @timeout_ms, SYSUTCDATETIME());
SET @left = DATEDIFF(millisecond, SYSUTCDATETIME(), @deadline);
SELECT @age = DATEDIFF_BIG(millisecond, given_at, SYSUTCDATETIME()) FROM {schema}.handover;
GO

-- Collations, wherever they meet

-- fault: collation conflict in a comparison
SELECT e.queue_position FROM {schema}.entry AS e JOIN {schema}.member AS m ON m.host = e.resource_id;
GO
-- fault: collation conflict in LIKE
SELECT queue_position FROM {schema}.entry WHERE requesting_id LIKE resource_id;
GO
-- fault: collation conflict in BETWEEN
SELECT queue_position FROM {schema}.entry WHERE resource_id BETWEEN requesting_id AND N'z';
GO
-- fault: collation conflict in CASE
SELECT CASE WHEN granted_at IS NULL THEN resource_id ELSE owner END AS who FROM {schema}.entry;
GO
-- fault: collation conflict in CASE
SELECT CASE resource_id WHEN owner THEN 1 ELSE 0 END AS same FROM {schema}.entry;
GO
-- fault: collation conflict in COALESCE
SELECT COALESCE(owner, resource_id) AS who FROM {schema}.entry;
GO
-- fault: collation conflict in ISNULL
SELECT ISNULL(resource_id, owner) AS who FROM {schema}.entry;
GO
-- fault: collation conflict in +
SELECT resource_id + N' of ' + owner AS what FROM {schema}.entry;
GO
-- fault: collation conflict in UNION, column who
SELECT resource_id AS who FROM {schema}.entry UNION SELECT host FROM {schema}.member;
GO
-- right
SELECT resource_id AS who, N'a' AS kind FROM {schema}.entry
UNION ALL SELECT host COLLATE Latin1_General_100_BIN2, N'b' FROM {schema}.member ORDER BY kind;
GO
-- fault: collation conflict in REPLACE
SELECT REPLACE(note, resource_id, N'') AS note FROM {schema}.entry;
GO
-- fault: collation conflict in CHARINDEX
SELECT CHARINDEX(resource_id, note) AS at_ FROM {schema}.entry;
GO
-- fault: collation conflict in STUFF
SELECT STUFF(resource_id, 1, 1, LEFT(owner, 1)) AS text FROM {schema}.entry;
GO
-- fault: collation conflict in NULLIF
SELECT NULLIF(LTRIM(owner), SUBSTRING(resource_id, 1, 10)) AS text FROM {schema}.entry;
GO
-- fault: Latin1_General_100_BIN2 and Latin1_General_100_CS_AS
SELECT queue_position FROM {schema}.entry
WHERE resource_id COLLATE Latin1_General_100_BIN2 = owner COLLATE Latin1_General_100_CS_AS;
GO
-- fault: Latin1_General_BIN2
SELECT j.[value] FROM {schema}.entry AS e CROSS APPLY OPENJSON(N'{}') AS j WHERE j.[key] = e.resource_id;
GO
-- fault: DATABASE_DEFAULT and Latin1_General_100_BIN2
SELECT e.queue_position FROM {schema}.entry AS e JOIN OPENJSON(N'[]') WITH (name nvarchar(255) '$.name') AS j ON j.name = e.resource_id;
GO
-- right
DECLARE @json nvarchar(max) = N'[]';
SELECT e.queue_position
FROM {schema}.entry AS e JOIN OPENJSON(@json) WITH (name nvarchar(255) COLLATE Latin1_General_100_BIN2 '$.name') AS j
    ON j.name = e.resource_id
WHERE e.requesting_id = @json COLLATE Latin1_General_100_BIN2 AND CAST(e.member_id AS nvarchar(20)) = e.resource_id
ORDER BY e.resource_id;
GO
-- fault: collation conflict in a comparison
SELECT a.resource_id FROM {schema}.all_settings() AS a WHERE a.cap_by = a.resource_id;
GO
-- fault: collation conflict in a comparison: the server's and DATABASE_DEFAULT
SELECT m.member_id FROM {schema}.member AS m JOIN sys.dm_exec_sessions AS s ON s.host_name = m.host;
GO

-- Conversions that nobody has asked for

-- fault: other characters than those of the code page become ?
CREATE PROCEDURE {schema}.fault_word @word nvarchar(64) AS INSERT INTO {schema}.commit_marker (marker) VALUES (@word);
GO
-- fault: is of the database's code page
SELECT 'Größe' AS word;
GO
-- fault: its indexes are of no use
CREATE PROCEDURE {schema}.fault_seek @word nvarchar(64) AS SELECT login FROM {schema}.commit_marker WHERE marker = @word;
GO
-- fault: it fails when the text is no number (245)
SELECT queue_position FROM {schema}.entry WHERE note = 5;
GO
-- fault: it fails when the text is no number (245)
DECLARE @count int = 3, @message nvarchar(100);
SET @message = N'there are ' + @count;
GO
-- fault: it fails when the text is no number (245)
SELECT CASE WHEN granted_at IS NULL THEN N'waits' ELSE 0 END AS state FROM {schema}.entry;
GO
-- right
DECLARE @count int = 3, @message nvarchar(100);
SET @message = CONCAT(N'there are ', @count);
SELECT @count = CAST(value AS int) FROM {schema}.setting WHERE name = N'history_days';
GO
-- fault: it depends on the session's language
CREATE PROCEDURE {schema}.fault_since @since nvarchar(40) AS SELECT queue_position FROM {schema}.entry WHERE requested_at > @since;
GO
-- fault: datetime2 to datetime: it is rounded
DECLARE @now datetime = SYSUTCDATETIME();
GO
-- fault: is refused (206)
SELECT requested_at + 1 AS tomorrow FROM {schema}.entry;
GO
-- fault: sql_variant is never converted
DECLARE @session nvarchar(4000) = SESSION_CONTEXT(N'sqlsem');
GO

-- Numbers

-- fault: bigint to int: it may overflow (8115)
DECLARE @position int;
SELECT @position = queue_position FROM {schema}.entry;
GO
-- fault: bigint to int: it may overflow (8115)
CREATE PROCEDURE {schema}.fault_return AS
BEGIN
    DECLARE @position bigint = (SELECT MAX(queue_position) FROM {schema}.entry);
    RETURN @position;
END;
GO
-- fault: the number of DATEADD is int
SELECT DATEADD(millisecond, stale_after_ms, SYSUTCDATETIME()) AS stale FROM {schema}.resource;
GO
-- fault: * of int may leave int (8115)
SELECT lease_ms * 1000 AS us FROM {schema}.member;
GO
-- fault: + of int may leave int (8115)
CREATE PROCEDURE {schema}.fault_page @skip int, @maximum int AS SELECT TOP (@skip + @maximum) queue_position FROM {schema}.entry;
GO
-- fault: SUM of int is int
SELECT SUM(weight) AS weight FROM {schema}.entry;
GO
-- fault: MAX of bit is refused (8117)
SELECT MAX(is_open) AS any_open FROM {schema}.task;
GO
-- fault: @ms: float to int
CREATE PROCEDURE {schema}.fault_lease @seconds float AS
BEGIN
    DECLARE @ms int = FLOOR(@seconds * 1000);
END;
GO
-- right
CREATE PROCEDURE {schema}.right_lease @seconds float AS
BEGIN
    IF @seconds < 0.1 OR @seconds > 2147483
        THROW 50000, N'sqlsem: too long', 1;
    DECLARE @ms int = FLOOR(@seconds * 1000), @sum bigint, @us bigint;
    SELECT @sum = SUM(CAST(weight AS bigint)), @us = MAX(CASE WHEN granted_at IS NULL THEN 1 ELSE 0 END) FROM {schema}.entry;
END;
GO

-- Texts that are longer than where they go

-- fault: characters are cut to nvarchar(255)
CREATE PROCEDURE {schema}.fault_note @note nvarchar(400) AS UPDATE {schema}.entry SET owner = @note WHERE queue_position = 1;
GO
-- fault: characters are cut to nvarchar(5)
DECLARE @status nvarchar(5) = N'finished';
GO
-- fault: parameter @what of check_name
CREATE PROCEDURE {schema}.fault_call @what nvarchar(100) AS EXEC {schema}.check_name @what, N'x';
GO
-- fault: ISNULL has the type of what it asks
DECLARE @short nvarchar(5);
SELECT ISNULL(@short, N'nothing at all') AS text;
GO
-- fault: + makes nvarchar(4000) of 5000 characters
DECLARE @one nvarchar(4000) = REPLICATE(N'x', 4000), @other nvarchar(1000) = REPLICATE(N'y', 1000), @all nvarchar(max);
SET @all = @one + @other;
GO
-- fault: @list grows in a loop
DECLARE @list nvarchar(100) = N'', @at int = 0;
WHILE @at < 50
BEGIN
    SET @at = @at + 1;
    SET @list = CONCAT(@list, N',', @at);
END;
GO
-- fault: the key of a nonclustered index of history has up to 3020 bytes, more than 1700
CREATE INDEX fault_index ON {schema}.history (resource_id, requesting_id, note);
GO
-- right
CREATE PROCEDURE {schema}.right_note @note nvarchar(400) AS
BEGIN
    IF DATALENGTH(@note) > 510
        THROW 50000, N'sqlsem: the note is too long', 1;
    UPDATE {schema}.entry SET owner = @note WHERE queue_position = 1;
END;
GO

-- Names where case counts

-- fault: is declared as @Position
CREATE PROCEDURE {schema}.fault_case @Position bigint AS SELECT note FROM {schema}.entry WHERE queue_position = @position;
GO
-- fault: another name where case counts
DECLARE @code int;
EXEC @code = sys.sp_getapplock @resource = N'x', @LockMode = N'Exclusive';
