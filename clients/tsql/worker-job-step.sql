-- A step of a SQL Server Agent job, of type Transact-SQL: a worker of the queue "nightly". Make as many jobs with this
-- step as shall work side by side, and start them together; each ends when there was nothing to do for half a minute.
-- Tasks are put with, for instance:  EXEC sqlsem.put N'nightly', N'EXEC dbo.load_customer', @order = 100;
-- Should a job be stopped or its server die, its task is run by another within seconds.
DECLARE @done int, @failed int, @message nvarchar(400);
EXEC sqlsem.work @queue = N'nightly', @idle_seconds = 30, @done = @done OUTPUT, @failed = @failed OUTPUT;
IF @failed > 0
BEGIN
    SET @message = CONCAT(@done, N' tasks were done, and ', @failed, N' attempts have failed; ',
                          N'EXEC sqlsem.list_tasks N''nightly'', N''failed'' tells what has failed for good, and why');
    THROW 50010, @message, 1;  -- so that Agent tells its operator
END;
