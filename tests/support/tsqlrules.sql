-- What `tsqlrules` must find. Each part is alone in a database, and `expect` has words of what is said about it. The part under
-- "nothing" is what must pass.

-- expect: without ROWLOCK
-- (As it stood: a plan that locks pages makes this wait, or pass nothing.)
ALTER PROCEDURE {schema}.fault @queue nvarchar(255) AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    IF EXISTS (SELECT 1 FROM {schema}.task_lock WITH (READPAST, READCOMMITTEDLOCK) WHERE queue_name = @queue AND pending = 1)
        RETURN 1;
END;
GO
-- expect: without ROWLOCK and READCOMMITTEDLOCK
DELETE FROM {schema}.task WITH (ROWLOCK, READPAST) WHERE task_id = 1;
GO
-- expect: locks of pages
CREATE TABLE {schema}.task (task_id bigint NOT NULL CONSTRAINT task_pk PRIMARY KEY WITH (ALLOW_PAGE_LOCKS = OFF), queue_name nvarchar(255));
CREATE INDEX task_queue ON {schema}.task (queue_name);
GO
SELECT task_id FROM {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK);
GO
-- expect: NOLOCK may not stand beside UPDLOCK
SELECT queue_position FROM {schema}.entry WITH (NOLOCK, UPDLOCK) WHERE resource_id = N'a';
GO
-- expect: NOLOCK may not stand beside XLOCK
SELECT queue_position FROM {schema}.entry WITH (READUNCOMMITTED, XLOCK) WHERE resource_id = N'a';
GO
-- expect: NOLOCK, READCOMMITTEDLOCK
SELECT queue_position FROM {schema}.entry WITH (NOLOCK, READCOMMITTEDLOCK) WHERE resource_id = N'a';
GO
-- expect: ROWLOCK, TABLOCK
DELETE FROM {schema}.history WITH (TABLOCK, ROWLOCK) WHERE ended_at < SYSUTCDATETIME();
GO
-- expect: READPAST may not stand beside SERIALIZABLE
SELECT TOP (1) task_id FROM {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK, HOLDLOCK);
GO
-- expect: (650)
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET TRANSACTION ISOLATION LEVEL SERIALIZABLE;
    SELECT task_id FROM {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK);
END;
GO
-- expect: (1065)
UPDATE e SET note = N'a' FROM {schema}.entry AS e WITH (NOLOCK) WHERE e.queue_position = 1;
GO
-- expect: READPAST on the table that INSERT writes
INSERT INTO {schema}.setting WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) (name, value) VALUES (N'a', N'b');
GO
-- expect: this read decides
ALTER PROCEDURE {schema}.fault @resource nvarchar(255), @position bigint AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    IF EXISTS (SELECT 1 FROM {schema}.entry WITH (NOLOCK) WHERE resource_id = @resource AND queue_position < @position)
        RETURN -1;
    UPDATE {schema}.entry SET granted_at = SYSUTCDATETIME() WHERE resource_id = @resource AND queue_position = @position;
END;
GO
-- expect: this read decides
-- (By way of a variable, in a routine that only calls one that writes.)
ALTER PROCEDURE {schema}.fault_writes AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DELETE FROM {schema}.entry WHERE queue_position = 1;
END;
GO
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @granted datetime2(6);
    SELECT @granted = granted_at FROM {schema}.entry WITH (READUNCOMMITTED) WHERE queue_position = 1;
    IF @granted IS NULL
        EXEC {schema}.fault_writes;
END;
GO
-- expect: this read decides
-- (A function that reads without locks, and a level that does.)
CREATE FUNCTION {schema}.fault_seen() RETURNS TABLE AS RETURN (SELECT queue_position FROM {schema}.entry WITH (NOLOCK));
GO
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DELETE FROM {schema}.entry WHERE queue_position IN (SELECT s.queue_position FROM {schema}.fault_seen() AS s);
END;
GO
-- expect: reads member without locks
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
    DELETE FROM {schema}.entry WHERE member_id NOT IN (SELECT m.member_id FROM {schema}.member AS m);
END;
GO
-- expect: MERGE
MERGE {schema}.setting AS s USING (SELECT N'a' AS name) AS n ON n.name = s.name WHEN NOT MATCHED THEN INSERT (name) VALUES (n.name);
GO
-- expect: GENERATE_SERIES is newer
SELECT g.value FROM GENERATE_SERIES(1, 10) AS g;
GO
-- expect: LTRIM with so many arguments
SELECT LTRIM(N'..a', N'.');
GO
-- expect: collation Latin1_General_100_BIN2_UTF8 is newer
SELECT name FROM {schema}.setting ORDER BY name COLLATE Latin1_General_100_BIN2_UTF8;
GO
-- expect: error 50099 is not in docs/reference/errors.md
THROW 50099, N'sqlsem: this number is nobody''s', 1;
GO
-- expect: begins with 'sqlsem: '
THROW 50000, N'bad request', 1;
GO
-- expect: is a format
THROW 50000, N'sqlsem: more than 50 % of it', 1;
GO
-- expect: outside CATCH (10704)
IF @@TRANCOUNT > 0
    THROW;
GO
-- expect: RAISERROR
RAISERROR (N'sqlsem: the limit is reached', 16, 1);
GO
-- expect: begins with 'sqlsem: '
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @message nvarchar(1000);
    SET @message = CONCAT(N'there is no such resource: ', N'a');
    EXEC {schema}.raise_error 50000, @message;
END;
GO
-- expect: which has an INSERT … EXEC itself (8164)
ALTER PROCEDURE {schema}.fault_inner AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @row TABLE (resource_id nvarchar(255) NULL);
    INSERT INTO @row (resource_id) EXEC {schema}.settings;
    SELECT resource_id FROM @row;
END;
GO
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @row TABLE (resource_id nvarchar(255) NULL);
    INSERT INTO @row (resource_id) EXEC {schema}.fault_inner;
END;
GO
-- expect: which may ROLLBACK (3915)
ALTER PROCEDURE {schema}.fault_inner AS
BEGIN TRY
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SELECT 1 AS one;
END TRY
BEGIN CATCH
    IF @@TRANCOUNT > 0
        ROLLBACK TRANSACTION;
    THROW;
END CATCH;
GO
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @row TABLE (one int NULL);
    INSERT INTO @row (one) EXEC {schema}.fault_inner;
END;
GO
-- expect: RETURN with @@TRANCOUNT 1, and it began with 0 (266)
ALTER PROCEDURE {schema}.fault @position bigint AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    BEGIN TRANSACTION;
    DELETE FROM {schema}.entry WHERE queue_position = @position;
    IF @@ROWCOUNT = 0
        RETURN -1;
    COMMIT TRANSACTION;
END;
GO
-- expect: a path ends with @@TRANCOUNT 1
-- (BREAK out of the loop goes round the COMMIT.)
ALTER PROCEDURE {schema}.fault @position bigint AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    WHILE @position > 0
    BEGIN
        BEGIN TRANSACTION;
        DELETE FROM {schema}.entry WHERE queue_position = @position;
        IF @@ROWCOUNT = 0
            BREAK;
        COMMIT TRANSACTION;
        SET @position = @position - 1;
    END;
END;
GO
-- expect: a path ends with @@TRANCOUNT 1
-- (CATCH forgets it.)
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    BEGIN TRY
        BEGIN TRANSACTION;
        DELETE FROM {schema}.entry WHERE queue_position = 1;
        COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        IF ERROR_NUMBER() <> 1205
            THROW;
    END CATCH;
END;
GO
-- expect: it stays open
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    BEGIN TRY
        BEGIN TRANSACTION;
        DELETE FROM {schema}.entry WHERE queue_position = 1;
        COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        THROW;
    END CATCH;
END;
GO
-- expect: COMMIT without a transaction (3902)
ALTER PROCEDURE {schema}.fault @all bit AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    IF @all = 1
        BEGIN TRANSACTION;
    DELETE FROM {schema}.entry WHERE queue_position = 1;
    COMMIT TRANSACTION;
END;
GO
-- expect: ROLLBACK without a transaction (3903)
ALTER PROCEDURE {schema}.fault AS
BEGIN TRY
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    DELETE FROM {schema}.entry WHERE queue_position = 1;
END TRY
BEGIN CATCH
    ROLLBACK TRANSACTION;
    THROW;
END CATCH;
GO
-- expect: a path ends with @@TRANCOUNT 0, and began with 1 (266)
-- (It rolls back what its caller has begun, and goes on.)
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    BEGIN TRY
        DELETE FROM {schema}.entry WHERE queue_position = 1;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
    END CATCH;
END;
GO
-- expect: outside TRY and without XACT_ABORT
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    BEGIN TRANSACTION;
    DELETE FROM {schema}.entry WHERE queue_position = 1;
    COMMIT TRANSACTION;
END;
GO
-- expect: AND and OR promise no order
-- (As it stood.)
ALTER PROCEDURE {schema}.fault @gate nvarchar(255) AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @inside int = @@TRANCOUNT;
    IF @inside > 0 AND APPLOCK_MODE(@principal, @gate, N'Transaction') <> N'Exclusive'
        THROW 50001, N'sqlsem: register must not be called inside an open transaction; commit first and use autocommit', 1;
    SET IMPLICIT_TRANSACTIONS OFF;
END;
GO
-- expect: sp_getapplock for a transaction where there is none (-999)
ALTER PROCEDURE {schema}.fault @gate nvarchar(255) AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @code int;
    EXEC @code = sys.sp_getapplock @gate, N'Exclusive', N'Transaction', 0, @principal;
    BEGIN TRANSACTION;
    DELETE FROM {schema}.entry WHERE queue_position = 1;
    COMMIT TRANSACTION;
END;
GO
-- expect: does not SET ROWCOUNT 0
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT ON;
    DELETE FROM {schema}.entry WHERE queue_position < 10;
END;
GO
-- expect: does not SET NOCOUNT ON
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET ROWCOUNT 0;
    SELECT 1 AS one;
END;
GO
-- expect: does not SET IMPLICIT_TRANSACTIONS OFF
ALTER PROCEDURE {schema}.fault AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: fault must not be called inside an open transaction; commit first', 1;
    DELETE FROM {schema}.entry WHERE queue_position < 10;
END;
GO
-- expect: does not SET XACT_ABORT ON
ALTER PROCEDURE {schema}.fault AS
BEGIN TRY
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    BEGIN TRANSACTION;
    DELETE FROM {schema}.entry WHERE queue_position < 10;
    COMMIT TRANSACTION;
END TRY
BEGIN CATCH
    IF @@TRANCOUNT > 0
        ROLLBACK TRANSACTION;
    THROW;
END CATCH;
GO
-- expect: SET ROWCOUNT of rows
SET ROWCOUNT 500;
GO
-- expect: QUOTED_IDENTIFIER ON
SELECT name AS "word" FROM {schema}.setting;
GO
-- expect: (1934)
CREATE INDEX entry_waiting ON {schema}.entry (resource_id) WHERE granted_at IS NULL;
GO
-- expect: @@ROWCOUNT is read behind a statement that sets it anew
DECLARE @count int;
DELETE FROM {schema}.entry WHERE queue_position = 1;
SET @count = 0;
IF @@ROWCOUNT = 0
    SET @count = 1;
GO
-- expect: @@ROWCOUNT is read behind a statement that sets it anew
-- (The condition has been evaluated since.)
DELETE FROM {schema}.entry WHERE queue_position = 1;
IF 1 = 1
    PRINT @@ROWCOUNT;
GO
-- expect: @@ROWCOUNT is read behind a statement that sets it anew
UPDATE {schema}.entry SET note = NULL WHERE queue_position = 1;
COMMIT TRANSACTION;
SELECT @@ROWCOUNT AS changed;
GO
-- expect: @@IDENTITY may be that of a trigger
SELECT @@IDENTITY AS number;
GO
-- expect: outside CATCH is NULL
SELECT ERROR_NUMBER() AS number;
GO
-- expect: IS_MEMBER
-- (As it stood.)
IF IS_ROLEMEMBER(N'{schema}_operator') = 1
    PRINT N'an operator';
GO
-- expect: the collation of tempdb
SELECT t.name FROM #there AS t;
GO
-- expect: nothing
ALTER PROCEDURE {schema}.passes @resource nvarchar(255), @uid nvarchar(64) AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: passes must not be called inside an open transaction; commit first', 1;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @code int, @mine bit = 0, @count int,
            @foreign bit = CASE WHEN @@TRANCOUNT = 0 THEN 0
                                WHEN APPLOCK_MODE({schema}.lock_principal(), @resource, N'Transaction') = N'Exclusive' THEN 0 ELSE 1 END;
    IF @foreign = 1
        RETURN -1;
    BEGIN TRY
        IF @uid IS NOT NULL
        BEGIN
            SET @mine = 1;
            BEGIN TRANSACTION;
            EXEC @code = sys.sp_getapplock @resource, N'Exclusive', N'Transaction', 0, @principal;
            IF @code < 0
            BEGIN
                ROLLBACK TRANSACTION;
                THROW 50002, N'sqlsem: busy: another session keeps the gate', 1;
            END;
        END;
        IF @uid IS NULL
            DELETE FROM {schema}.entry WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) WHERE resource_id = @resource;
        ELSE
            DELETE FROM {schema}.entry WHERE request_uid = @uid;
        SET @count = @@ROWCOUNT;
        IF @mine = 1
            COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        THROW;
    END CATCH;
    SELECT queue_position FROM {schema}.entry WITH (NOLOCK) WHERE resource_id = @resource;
    RETURN @count;
END;
GO
