-- sqlsem, abbreviations in the scripts for SQL Server: {begin} in a script stands for the lines under its name here.
-- (`sqlsem sql` prints these lines. Behind each routine it also prints GO, and before the first one the settings under
-- which routines are created.)
--
-- begin, begin_try: the body of a procedure that callers may run. Their session may have set another ROWCOUNT.
-- begin_inner: the body of a procedure that only these procedures run.
-- begin_try_own: as begin_try, of a procedure that may run in a transaction of the caller's.
-- throw_if_busy: in a CATCH block, reports the errors that mean busy as 50002.
-- end_try: does so, and raises all other errors unchanged.
-- end_try_rollback: rolls back an open transaction before that. end_try_rollback_own: but not the caller's, in which
-- the procedure has refused to run (50001). end_try_own: of begin_try_own; but not a transaction that was open when the
-- procedure was called.
-- end_try_done: of a block after the effect of the procedure is committed, without a transaction. If the block is busy, its
-- work is left out: 50002 would say that nothing was done.
-- outside: refuses to run in a transaction of the caller's. {x}: the procedure.
-- rollback: rolls back an open transaction, if there is one.
-- answer: returns the code {x}, and also a row with it as {y} for clients that ask for one.
-- missing_members: fills @member with members; missing: the beacon is missing, or the lease is over.
-- waits_for: in deadlocks.sql, row w waits for row b.

-- name: begin
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
-- name: begin_inner
BEGIN
    SET NOCOUNT ON;
-- name: begin_try
BEGIN TRY
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
-- name: begin_try_own
BEGIN TRY
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @outside int = @@TRANCOUNT;
-- name: outside
SET XACT_ABORT ON;
IF @@TRANCOUNT > 0
    THROW 50001, N'sqlsem: {x} must not be called inside an open transaction; commit first and use autocommit', 1;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
-- name: rollback
IF @@TRANCOUNT > 0
    ROLLBACK TRANSACTION;
-- name: throw_if_busy
IF ERROR_NUMBER() IN (601, 1204, 1205, 1222)
    THROW 50002, N'sqlsem: busy: other sessions have locked what this call needs; try again', 1;
-- name: end_try
END TRY
BEGIN CATCH
    {throw_if_busy}
    THROW;
END CATCH;
-- name: end_try_rollback
END TRY
BEGIN CATCH
    {rollback}
    {throw_if_busy}
    THROW;
END CATCH;
-- name: end_try_rollback_own
END TRY
BEGIN CATCH
    IF @@TRANCOUNT > 0 AND ERROR_NUMBER() <> 50001  -- (50001: the transaction is the caller's)
        ROLLBACK TRANSACTION;
    {throw_if_busy}
    THROW;
END CATCH;
-- name: end_try_own
END TRY
BEGIN CATCH
    IF @@TRANCOUNT > 0 AND @outside = 0
        ROLLBACK TRANSACTION;
    {throw_if_busy}
    THROW;
END CATCH;
-- name: end_try_done
END TRY
BEGIN CATCH
    IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222)
        THROW;
END CATCH;
-- name: answer
IF @answer = 1
    SELECT {x} AS {y};
RETURN {x};
-- name: missing_members
INSERT INTO @member (member_id, missing)
SELECT m.member_id,
       CASE WHEN m.lease_until IS NOT NULL THEN CASE WHEN m.lease_until < @now THEN 1 ELSE 0 END
            WHEN m.beacon IS NULL THEN 0
            WHEN APPLOCK_MODE(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Session') <> N'NoLock' THEN 0
            ELSE APPLOCK_TEST(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Shared', N'Session') END
FROM {schema}.member AS m WITH (NOLOCK)
-- name: waits_for
b.place = w.place
AND ((w.access_type = N'upgrade' AND b.granted = 1 AND b.n <> w.n)
     OR (w.access_type <> N'upgrade' AND b.n < w.n AND (w.access_type = N'write' OR b.access_type <> w.access_type)))
