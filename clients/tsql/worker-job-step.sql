-- A step of a SQL Server Agent job, of type Transact-SQL: a worker of the queue "nightly". Create one job with this step
-- for each concurrent worker, and start them together; each ends when the queue was empty for half a minute.
-- Tasks are put with, for instance:  EXEC sqlsem.put N'nightly', N'EXEC dbo.load_customer', @order = 100;
-- If a job is stopped or its server dies, another worker runs its task within seconds.
DECLARE @done int, @failed int, @message nvarchar(400);
EXEC sqlsem.work @queue = N'nightly', @idle_seconds = 30, @done = @done OUTPUT, @failed = @failed OUTPUT;
IF @failed > 0
BEGIN
    SET @message = CONCAT(@done, N' tasks were done, and ', @failed, N' attempts have failed; ',
                          N'EXEC sqlsem.list_tasks N''nightly'', N''failed'' tells what has failed for good, and why');
    THROW 50010, @message, 1;  -- so that Agent tells its operator
END;
