-- A stored procedure that guards a load and always gives back: 0 done, below 0 not done (the code of sqlsem.acquire).
-- It is called outside a transaction and makes its own. assert_holding keeps the lock ours until that one ends, so that
-- nothing is committed by who has lost the lock meanwhile (an operator may have taken it away).
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
