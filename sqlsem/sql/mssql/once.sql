-- sqlsem, runs once per period, for SQL Server. May be run again at any time, after public.sql.
--
-- A run holds the mutex 'once:<name>'. It belongs to the period in which it was granted (granted_at), by the server's
-- clock. A period is done when a run that was granted in it, or later, is done. So only times are stored: no run is
-- repeated if the clock goes back, and callers may ask with another length of period. Periods are multiples of a length
-- since 1970 in UTC, moved by an offset.

-- Return 1 if no run is done for a period: that in which the row at @position was granted, or without @position the
-- present one. 0: a run is done; -1: there is no such row. Times and periods are compared as whole milliseconds since
-- 1970.
CREATE OR ALTER PROCEDURE {schema}.once_due
    @name nvarchar(250), @position bigint, @requesting_id nvarchar(255), @per_ms bigint, @offset_ms bigint, @answer bit = 0
AS {begin_try}
    DECLARE @at datetime2(6), @from bigint, @due int = 1;
    IF @position IS NULL
        SET @at = SYSUTCDATETIME();
    ELSE
        SELECT @at = granted_at FROM {schema}.entry WITH (READCOMMITTEDLOCK)
        WHERE resource_id = CONCAT(N'once:', @name) AND queue_position = @position AND requesting_id = @requesting_id;
    IF @at IS NULL
        SET @due = -1;
    ELSE
    BEGIN
        SET @from = (DATEDIFF_BIG(millisecond, '19700101', @at) - @offset_ms) / @per_ms * @per_ms + @offset_ms;
        SELECT @due = 0 FROM {schema}.once_run WITH (READCOMMITTEDLOCK)
        WHERE once_name = @name AND DATEDIFF_BIG(millisecond, '19700101', granted_at) >= @from;
    END;
    IF @answer = 1
        SELECT @due AS due;
    RETURN @due;
{end_try}

-- Record a run as done, for the period in which its row was granted. Return 0, or -1 if the row is not held. May be
-- repeated.
CREATE OR ALTER PROCEDURE {schema}.mark_once
    @name nvarchar(250), @position bigint, @requesting_id nvarchar(255), @answer bit = 0 AS {begin}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: mark_once must not be called inside an open transaction; commit or roll back first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @holding int, @code int = -1, @resource nvarchar(255) = CONCAT(N'once:', @name), @at datetime2(6);
    BEGIN TRY
        BEGIN TRANSACTION;
        -- Pin the row: no other run begins before this one is recorded.
        EXEC @holding = {schema}.pin @resource, @position, @requesting_id;
        IF @holding = 1
        BEGIN
            SELECT @at = granted_at FROM {schema}.entry WITH (READCOMMITTEDLOCK)
            WHERE resource_id = @resource AND queue_position = @position;
            UPDATE {schema}.once_run
            SET granted_at = CASE WHEN granted_at > @at THEN granted_at ELSE @at END, done_at = SYSUTCDATETIME(),
                queue_position = @position, requesting_id = @requesting_id, login = ORIGINAL_LOGIN()
            WHERE once_name = @name;
            IF @@ROWCOUNT = 0
                INSERT INTO {schema}.once_run (once_name, granted_at, done_at, queue_position, requesting_id, login)
                VALUES (@name, @at, SYSUTCDATETIME(), @position, @requesting_id, ORIGINAL_LOGIN());
            SET @code = 0;
        END;
        COMMIT TRANSACTION;
    {end_try_rollback}
    IF @answer = 1
        SELECT @code AS code;
    RETURN @code;
END;

-- Return the last run of a name, or of each name, with its times and its login; and the server's time.
CREATE OR ALTER PROCEDURE {schema}.once_runs @name nvarchar(400) AS {begin_try}
    SELECT once_name, granted_at, done_at, queue_position, requesting_id, login, SYSUTCDATETIME() AS taken_at
    FROM {schema}.once_run WITH (READCOMMITTEDLOCK)
    WHERE @name IS NULL OR once_name = @name ORDER BY once_name;
{end_try}

-- Delete the record of the last run, so that the name may run again in this period. Allowed to the login of the last
-- run, and to operators. Return 0, or -1 if there was none.
CREATE OR ALTER PROCEDURE {schema}.once_forget @name nvarchar(400), @answer bit = 0 AS {begin_try}
    SET XACT_ABORT ON;
    DECLARE @code int = -1, @by nvarchar(128), @done_at datetime2(6), @message nvarchar(1000);
    EXEC {schema}.check_name N'name', @name;
    SELECT @by = login, @done_at = done_at FROM {schema}.once_run WHERE once_name = @name;
    IF @by IS NOT NULL AND @by <> ORIGINAL_LOGIN() AND COALESCE(IS_MEMBER(N'{schema}_operator'), 0) = 0
       AND COALESCE(IS_MEMBER(N'db_owner'), 0) = 0 AND COALESCE(IS_SRVROLEMEMBER(N'sysadmin'), 0) = 0
    BEGIN
        SET @message = CONCAT(N'sqlsem: ''', @name, N''' was run by login ', @by, N'; only that login and operators forget its run, not ',
            ORIGINAL_LOGIN());
        EXEC {schema}.raise_error 50000, @message;
    END;
    -- (done_at is compared: a run that was done meanwhile stays.)
    DELETE FROM {schema}.once_run WHERE once_name = @name AND login = @by AND done_at = @done_at;
    IF @@ROWCOUNT > 0
    BEGIN
        SET @code = 0;
        INSERT INTO {schema}.operation (host, pid, program, action, resource_id, old_value)
        VALUES (LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), N'forget', LEFT(N'once:' + @name, 255),
                CONVERT(nvarchar(40), @done_at, 126));
    END;
    IF @answer = 1
        SELECT @code AS code;
    RETURN @code;
{end_try}


-- For sessions -----------------------------------------------------------------------------------------------------

-- Raise for an invalid period; return it in ms.
CREATE OR ALTER PROCEDURE {schema}.check_period
    @name nvarchar(400), @per_seconds float, @offset_seconds float, @per_ms bigint OUTPUT, @offset_ms bigint OUTPUT
AS {begin_inner}
    DECLARE @message nvarchar(1000);
    SET @per_ms = NULL;
    SET @offset_ms = NULL;
    EXEC {schema}.check_name N'name', @name;
    IF LEN(CONCAT(@name, N'|')) > 251
        SET @message = CONCAT(N'sqlsem: name has more than 250 characters: ''', LEFT(@name, 40), N'...''');
    ELSE IF @per_seconds IS NULL OR @per_seconds < 1 OR @per_seconds > 31622400
        SET @message = CONCAT(N'sqlsem: per_seconds of ''', @name, N''' must be from 1 to 31622400 (366 days), not ',
            CASE WHEN @per_seconds IS NULL THEN N'NULL' ELSE CONCAT(N'', @per_seconds) END);
    ELSE IF @offset_seconds IS NULL OR @offset_seconds < 0 OR @offset_seconds >= @per_seconds
        SET @message = CONCAT(N'sqlsem: offset_seconds of ''', @name, N''' must be from 0 to less than per_seconds, ', @per_seconds,
            N', not ', CASE WHEN @offset_seconds IS NULL THEN N'NULL' ELSE CONCAT(N'', @offset_seconds) END);
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;
    SET @per_ms = ROUND(@per_seconds * 1000, 0);
    SET @offset_ms = CAST(ROUND(@offset_seconds * 1000, 0) AS bigint);
    IF @offset_ms >= @per_ms
        SET @offset_ms = @per_ms - 1;
END;

-- Begin a run that is due once per period; wait up to @timeout_ms for a run that is under way, as it may fail. Return
-- code:
--   0, 1 this session has to run it, and then to call once_finish; or, if it failed, release N'once:...', @position
--   2 the run of this period is done
--   -1, -2, -3 as of acquire
CREATE OR ALTER PROCEDURE {schema}.once_begin
    @name nvarchar(400), @per_seconds float, @offset_seconds float = 0, @timeout_ms int = -1, @note nvarchar(1000) = NULL,
    @requesting_id nvarchar(400) = NULL, @lease_seconds float = NULL,
    @position bigint = NULL OUTPUT, @fence bigint = NULL OUTPUT AS {begin_try}
    SET @position = NULL;
    SET @fence = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: once_begin must not be called in an open transaction or INSERT ... EXEC; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @code int, @due int, @per_ms bigint, @offset_ms bigint, @resource nvarchar(400);
    EXEC {schema}.check_period @name, @per_seconds, @offset_seconds, @per_ms OUTPUT, @offset_ms OUTPUT;
    IF @requesting_id IS NULL
        EXEC {schema}.session_name @requesting_id OUTPUT;
    EXEC @due = {schema}.once_due @name, NULL, NULL, @per_ms, @offset_ms;
    IF @due = 0
        RETURN 2;
    SET @resource = CONCAT(N'once:', @name);
    EXEC @code = {schema}.acquire @resource, 1, N'write', 1, @timeout_ms, @note, @requesting_id, @lease_seconds,
        @position OUTPUT, @fence OUTPUT, @own = 1;
    IF @code < 0
        RETURN @code;
    EXEC @due = {schema}.once_due @name, @position, @requesting_id, @per_ms, @offset_ms;
    IF @due = 1
        RETURN @code;
    EXEC {schema}.release @resource, @position, @requesting_id, N'released';
    SET @position = NULL;
    SET @fence = NULL;
    RETURN CASE @due WHEN 0 THEN 2 ELSE -2 END;
{end_try_rollback_own}

-- Record that the run has succeeded, so that the period is done, and release the lock. Return 0; or -1 if the lock was
-- lost, and nothing is recorded.
CREATE OR ALTER PROCEDURE {schema}.once_finish @name nvarchar(400), @position bigint, @requesting_id nvarchar(400) = NULL
AS {begin_try}
    DECLARE @code int, @resource nvarchar(400) = CONCAT(N'once:', @name);
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: once_finish must not be called inside an open transaction; commit or roll back first', 1;
    SET IMPLICIT_TRANSACTIONS OFF;
    EXEC {schema}.check_name N'name', @name;
    IF LEN(CONCAT(@name, N'|')) > 251
        THROW 50000, N'sqlsem: a name has 1 to 250 characters', 1;
    IF @requesting_id IS NULL
        EXEC {schema}.session_name @requesting_id OUTPUT;
    EXEC @code = {schema}.mark_once @name, @position, @requesting_id;
    IF @code <> 0
        RETURN -1;
    EXEC @code = {schema}.release_rows @resource, @position, @requesting_id, N'released';
    RETURN @code;
{end_try_rollback_own}
