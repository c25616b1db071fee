-- A stored procedure that loads under a lock and always releases it: 0 done, below 0 not done (the code of
-- sqlsem.acquire). Call it outside a transaction; it begins its own. assert_holding keeps the lock until that transaction
-- ends, so a session that has lost the lock (an operator may have revoked it) commits nothing.
IF OBJECT_ID(N'dbo.load_sales') IS NULL EXEC (N'CREATE PROCEDURE dbo.load_sales AS RETURN 0');
GO
ALTER PROCEDURE dbo.load_sales @day date, @timeout_ms int = 600000
AS
BEGIN
    SET NOCOUNT ON;
    SET XACT_ABORT ON;
    DECLARE @code int, @position bigint, @resource nvarchar(255) = CONCAT(N'sales ', CONVERT(nvarchar(10), @day, 23));
    EXEC @code = sqlsem.acquire @resource = @resource, @timeout_ms = @timeout_ms, @note = N'dbo.load_sales',
        @position = @position OUTPUT;
    IF @code < 0
        RETURN @code;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC sqlsem.assert_holding @resource = @resource, @position = @position;
        DELETE FROM dbo.sales WHERE sold_on = @day;
        INSERT INTO dbo.sales (sold_on, amount) SELECT sold_on, amount FROM dbo.sales_staging WHERE sold_on = @day;
        COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        EXEC sqlsem.release @resource = @resource, @position = @position;
        THROW;
    END CATCH;
    EXEC sqlsem.release @resource = @resource, @position = @position;
    RETURN 0;
END;
GO
