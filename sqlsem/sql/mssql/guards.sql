-- sqlsem, guarded tables, for SQL Server: a trigger refuses every write, unless the same transaction has asserted a
-- grant of the table's resource. May be run again at any time, after public.sql. Its limits:
-- docs/howto/transactions.md.
--
-- The locks of a transaction show which rows it has pinned (pin). A note in the session's context names the grant that
-- a connection uses for a while (Grant.session). Any login may write that note, so the trigger does not trust it: it
-- pins the named row itself, by the same rules as `pin`. (It takes the lock in either case, so that the lock lasts
-- until this transaction ends.)

-- Return the note for a connection that uses a grant for a while: the position and its owner, which changes at a
-- hand-over. No row: there is no such grant.
CREATE OR ALTER PROCEDURE {schema}.session_entry @resource nvarchar(255), @position bigint, @requesting_id nvarchar(255)
AS {begin_try}
    SELECT CONCAT(queue_position, N':', member_id) AS entry FROM {schema}.entry WITH (READCOMMITTEDLOCK)
    WHERE resource_id = @resource AND queue_position = @position AND requesting_id = @requesting_id
      AND member_id IS NOT NULL AND granted_at IS NOT NULL;
{end_try}

-- Raise if the transaction has not pinned a grant of the resource, which ends the transaction. The trigger of a guarded
-- table calls this once for each statement, with the trigger's number.
CREATE OR ALTER PROCEDURE {schema}.check_guard @trigger int, @resource nvarchar(255) AS {begin_try}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @session nvarchar(4000) = CAST(SESSION_CONTEXT(N'sqlsem.{schema}.grants') AS nvarchar(4000)),
            @position bigint, @id nvarchar(255), @access nvarchar(64), @pinned bit, @kept bit = 0, @member bigint, @exists int = 0,
            @code int, @tries int = 0, @table nvarchar(300), @message nvarchar(1000), @name nvarchar(255);
    -- Find candidates; each is tested below. (NOLOCK, as open transactions may have locked other rows. Two tries, as
    -- such a read can miss a row while its page is split.)
    WHILE @position IS NULL AND @tries < 2
    BEGIN
        SET @tries = @tries + 1;
        SELECT TOP (1) @position = c.queue_position, @id = c.requesting_id, @access = c.access_type, @pinned = c.pinned, @member = c.member_id
        FROM (SELECT t.queue_position, t.requesting_id, t.access_type, m.login, t.member_id,
                     CASE WHEN APPLOCK_MODE(@principal, CONCAT(N'pin.sqlsem.{schema}.', t.queue_position), N'Transaction') <> N'NoLock'
                          THEN 1 ELSE 0 END AS pinned
              FROM {schema}.entry AS t WITH (NOLOCK) LEFT JOIN {schema}.member AS m WITH (NOLOCK) ON m.member_id = t.member_id
              WHERE t.resource_id = @resource AND t.granted_at IS NOT NULL AND t.member_id IS NOT NULL
                AND (m.login = ORIGINAL_LOGIN() OR m.login IS NULL)) AS c
        WHERE c.pinned = 1
           OR (c.login IS NOT NULL AND CHARINDEX(CONCAT(N' ', c.queue_position, N':', c.member_id, N' '), CONCAT(N' ', @session, N' ')) > 0)
        ORDER BY CASE WHEN c.access_type = N'write' THEN 0 ELSE 1 END, c.queue_position;
    END;
    IF @position IS NOT NULL
    BEGIN
        SET @name = CONCAT(N'pin.sqlsem.{schema}.', @position);
        EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Shared', @LockOwner = N'Transaction',
            @LockTimeout = 10000, @DbPrincipal = @principal;
        -- (If the member is gone, its row is still there: this transaction has pinned it.)
        IF @code >= 0
            SELECT @exists = 1, @access = t.access_type
            FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK) LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
            WHERE t.resource_id = @resource AND t.queue_position = @position AND t.requesting_id = @id
              AND (@pinned = 1 OR t.member_id = @member) AND t.granted_at IS NOT NULL AND (m.login = ORIGINAL_LOGIN() OR (m.login IS NULL AND @pinned = 1));
    END;
    IF @exists = 1 AND @access = N'write'
        RETURN 0;

    SELECT @table = CONCAT(OBJECT_SCHEMA_NAME(parent_id), N'.', OBJECT_NAME(parent_id)) FROM sys.triggers WHERE object_id = @trigger;
    SET @message = CONCAT(N'sqlsem: writing to ', COALESCE(@table, N'this table'), N' needs the lock ''', @resource,
        N''' in its transaction, ',
        CASE WHEN @exists = 1 THEN CONCAT(N'and position ', @position, N' has access ', @access, N', not write; take it for writing')
             WHEN COALESCE(@session, N'') <> N'' THEN N'and the grant of this connection is no grant of it that is (still) held; take the lock again'
             ELSE N'which has asserted no grant of it that is held: EXEC {schema}.assert_holding (grant.assert_held) after BEGIN TRANSACTION' END);
    EXEC {schema}.raise_error 50004, @message;
{end_try}


-- Guarding of tables, with the caller's rights ---------------------------------------------------------------------

-- Return the guards, one for each table. (guard_table has written the text of each trigger, which ends with the
-- resource.)
CREATE OR ALTER FUNCTION {schema}.guards() RETURNS TABLE AS RETURN (
    SELECT g.trigger_id, g.parent_id, g.trigger_name, OBJECT_SCHEMA_NAME(g.parent_id) AS schema_name,
           OBJECT_NAME(g.parent_id) AS table_name, g.disabled,
           REPLACE(LEFT(g.rest, LEN(g.rest) - LEN(N'''; END')), N'''''', N'''') AS resource_id
    FROM (SELECT t.object_id AS trigger_id, t.parent_id, t.name COLLATE DATABASE_DEFAULT AS trigger_name, CAST(t.is_disabled AS int) AS disabled,
                 STUFF(m.definition, 1, CHARINDEX(N'{schema}.check_guard @@PROCID, N''', m.definition)
                                        + LEN(N'{schema}.check_guard @@PROCID, N''') - 1, N'') AS rest
          FROM sys.triggers AS t JOIN sys.sql_modules AS m ON m.object_id = t.object_id
          WHERE CHARINDEX(N'{schema}.check_guard @@PROCID, N''', m.definition) > 0) AS g
);

-- Return the id of a table of this database, by its name.
CREATE OR ALTER PROCEDURE {schema}.find_table @table nvarchar(600), @id int OUTPUT AS {begin_inner}
    DECLARE @message nvarchar(1000);
    SET @id = CASE WHEN PARSENAME(@table, 3) IS NULL OR PARSENAME(@table, 3) = DB_NAME() THEN OBJECT_ID(@table) END;
    IF @id IS NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: there is no table ', COALESCE(LEFT(@table, 300), N'NULL'),
            N' in this database, or this login may not see it; name it with its schema, in brackets where it must be: dbo.[order line]');
        EXEC {schema}.raise_error 50000, @message;
    END;
END;

-- Guard a table: a write needs the asserted lock of @resource. Return 1, or 0 if this resource guards the table already.
-- The caller needs ALTER on the table.
CREATE OR ALTER PROCEDURE {schema}.guard_table @table nvarchar(600), @resource nvarchar(400), @answer bit = 0 AS {begin_try}
    DECLARE @id int, @schema nvarchar(128), @name nvarchar(128), @trigger nvarchar(128), @disabled int, @known nvarchar(max),
            @text nvarchar(max), @message nvarchar(1000), @changed int = 0;
    EXEC {schema}.check_name N'resource', @resource;
    EXEC {schema}.find_table @table, @id OUTPUT;
    SELECT @schema = OBJECT_SCHEMA_NAME(@id), @name = OBJECT_NAME(@id);
    IF OBJECTPROPERTY(@id, 'IsUserTable') <> 1 OR @schema = N'{schema}'
    BEGIN
        SET @message = CONCAT(N'sqlsem: ', @table, N' cannot be guarded: only tables can, no views, nor sqlsem''s own');
        EXEC {schema}.raise_error 50000, @message;
    END;
    SELECT @trigger = trigger_name, @disabled = disabled, @known = resource_id FROM {schema}.guards() WHERE parent_id = @id;
    IF @known <> @resource COLLATE Latin1_General_100_BIN2
    BEGIN
        SET @message = CONCAT(N'sqlsem: ', @table, N' is guarded by ''', LEFT(@known, 255), N''' already; first: EXEC {schema}.unguard_table');
        EXEC {schema}.raise_error 50000, @message;
    END;
    -- (CREATE TRIGGER waits for running writers, and all other sessions wait for it: so bound the wait.)
    IF @@LOCK_TIMEOUT = -1
        SET LOCK_TIMEOUT 5000;
    IF @trigger IS NULL
        SET @text = CONCAT(N'CREATE TRIGGER ', QUOTENAME(@schema), N'.', QUOTENAME(CONCAT(N'{schema}_guard_', @id)), N' ON ',
            QUOTENAME(@schema), N'.', QUOTENAME(@name), N' AFTER INSERT, UPDATE, DELETE AS BEGIN SET NOCOUNT ON; EXEC {schema}.check_guard @@PROCID, N''',
            REPLACE(@resource, N'''', N''''''), N'''; END');
    ELSE IF @disabled = 1
        SET @text = CONCAT(N'ALTER TABLE ', QUOTENAME(@schema), N'.', QUOTENAME(@name), N' ENABLE TRIGGER ', QUOTENAME(@trigger));
    IF @text IS NOT NULL
    BEGIN
        EXEC (@text);
        SET @changed = 1;
    END;
    IF @answer = 1
        SELECT @changed AS made;
    ELSE IF @changed = 1
        PRINT N'sqlsem: INSERT, UPDATE and DELETE with OUTPUT and without INTO are refused on this table from now on (error 334). EF Core: HasTrigger, UseSqlOutputClause(false); SQLAlchemy: implicit_returning=False';
    RETURN @changed;
{end_try}

-- Remove the guard of a table. Return 1, or 0 if there was none. The caller needs ALTER on the table.
CREATE OR ALTER PROCEDURE {schema}.unguard_table @table nvarchar(600), @answer bit = 0 AS {begin_try}
    DECLARE @id int, @text nvarchar(max), @changed int = 0;
    EXEC {schema}.find_table @table, @id OUTPUT;
    IF @@LOCK_TIMEOUT = -1
        SET LOCK_TIMEOUT 5000;
    SELECT @text = CONCAT(N'DROP TRIGGER ', QUOTENAME(schema_name), N'.', QUOTENAME(trigger_name)), @changed = 1
    FROM {schema}.guards() WHERE parent_id = @id;
    IF @changed = 1
        EXEC (@text);
    {answer:@changed,made}
{end_try}

-- Return the guarded tables, and the problems of their guards.
CREATE OR ALTER PROCEDURE {schema}.guarded_tables AS {begin_try}
    SELECT schema_name, table_name, resource_id, CASE WHEN disabled = 1 THEN N'its trigger is disabled' END AS problem
    FROM {schema}.guards() ORDER BY schema_name, table_name;
{end_try}
