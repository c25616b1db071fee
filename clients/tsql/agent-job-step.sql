-- A step of a SQL Server Agent job, of type Transact-SQL: one load of the warehouse at a time, from any job.
-- Agent replaces the tokens $(…) before it sends the text. The lock belongs to the step's session: if the step is
-- stopped or its server dies, the next waiter is granted within seconds. Waits an hour at most, then the step fails.
SET XACT_ABORT ON;
DECLARE @job uniqueidentifier = CONVERT(uniqueidentifier, $(ESCAPE_NONE(JOBID)));
DECLARE @id nvarchar(255) = CONCAT(N'agent ', @job, N' step $(ESCAPE_SQUOTE(STEPID)) started ',
                                   N'$(ESCAPE_SQUOTE(STRTDT)) $(ESCAPE_SQUOTE(STRTTM))');
DECLARE @code int, @position bigint, @message nvarchar(400);

EXEC @code = sqlsem.acquire @resource = N'warehouse', @timeout_ms = 3600000, @requesting_id = @id,
    @note = N'nightly load', @position = @position OUTPUT;
IF @code < 0
BEGIN
    SET @message = CONCAT(N'The warehouse was not free within an hour (code ', @code,
                          N'); EXEC sqlsem.status N''warehouse'' tells who has it');
    THROW 50010, @message, 1;
END;

BEGIN TRY
    EXEC dbo.load_warehouse;  -- the work
END TRY
BEGIN CATCH
    IF @@TRANCOUNT > 0
        ROLLBACK TRANSACTION;
    EXEC sqlsem.release @resource = N'warehouse', @requesting_id = @id;
    THROW;  -- Agent must see that the step has failed
END CATCH;
EXEC sqlsem.release @resource = N'warehouse', @position = @position, @requesting_id = @id;
