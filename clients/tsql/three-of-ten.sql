-- Ten steps of Agent jobs, three at a time: all ten have this text. The steps declare the limit; an operator can lower it
-- for a while with EXEC sqlsem.set_limit N'parts', 2, and end that with NULL.
SET XACT_ABORT ON;
DECLARE @code int;
EXEC @code = sqlsem.acquire @resource = N'parts', @limit = 3, @note = N'step $(ESCAPE_SQUOTE(STEPID))';
IF @code < 0
    THROW 50010, N'An operator has taken this step out of the queue', 1;
BEGIN TRY
    EXEC dbo.load_part @part = $(ESCAPE_NONE(STEPID));  -- the work
END TRY
BEGIN CATCH
    IF @@TRANCOUNT > 0
        ROLLBACK TRANSACTION;
    EXEC sqlsem.release @resource = N'parts';  -- without a position: all that this session holds there
    THROW;
END CATCH;
EXEC sqlsem.release @resource = N'parts';
