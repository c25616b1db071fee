-- sqlsem, the routines for sessions, for SQL Server: Agent jobs, SSIS, your own stored procedures. May be run again at
-- any time, after routines.sql. Described in docs/reference/protocol.md; names, parameters and codes change only with a new
-- schema version. release is in routines.sql, as programs call it too.
--
-- Errors: 50000 bad arguments, 50001 called where it cannot work, 50002 busy: try again, 50004 not held, 50008 no limit
-- is set, or requests depend on it.
-- A call inside an open transaction is refused before XACT_ABORT is set, so that the error does not end the
-- transaction.

-- Checking of arguments ----------------------------------------------------------------------------------------

CREATE OR ALTER PROCEDURE {schema}.check_name @what nvarchar(40), @name nvarchar(400) AS {begin_inner}
    DECLARE @message nvarchar(1000), @white nvarchar(40);
    -- White space and control characters: databases compare them differently, or do not show them.
    SET @white = CONCAT(N' ', NCHAR(160), NCHAR(5760), NCHAR(8192), NCHAR(8193), NCHAR(8194), NCHAR(8195), NCHAR(8196),
        NCHAR(8197), NCHAR(8198), NCHAR(8199), NCHAR(8200), NCHAR(8201), NCHAR(8202), NCHAR(8232), NCHAR(8233),
        NCHAR(8239), NCHAR(8287), NCHAR(12288));
    IF @name IS NULL OR DATALENGTH(@name) = 0
        SET @message = CONCAT(N'sqlsem: ', @what, N' is ', CASE WHEN @name IS NULL THEN N'NULL' ELSE N'empty' END,
            N'; give it 1 to 255 characters');
    ELSE IF DATALENGTH(@name) > 510 OR LEN(CONCAT(@name, N'|')) > 256
        SET @message = CONCAT(N'sqlsem: ', @what, N' has more than 255 characters: ''', LEFT(@name, 40), N'...''');
    ELSE IF CHARINDEX(LEFT(@name, 1) COLLATE Latin1_General_100_BIN2, @white) > 0
         OR CHARINDEX(RIGHT(@name, 1) COLLATE Latin1_General_100_BIN2, @white) > 0
        SET @message = CONCAT(N'sqlsem: ', @what, N' ''', @name, N''' begins or ends with white space; strip it');
    ELSE IF @name COLLATE Latin1_General_100_BIN2 LIKE CONCAT(N'%[', NCHAR(1), N'-', NCHAR(31), N']%')
         OR @name COLLATE Latin1_General_100_BIN2 LIKE CONCAT(N'%[', NCHAR(127), N'-', NCHAR(159), N']%')
        SET @message = CONCAT(N'sqlsem: ', @what, N' contains a control character; use printable text');
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;
END;

-- Raise for a name that sqlsem uses itself, and for a pattern. (RESERVED of the Python client is the same table.)
CREATE OR ALTER PROCEDURE {schema}.check_not_reserved @resource nvarchar(400) AS {begin_inner}
    DECLARE @message nvarchar(1000), @prefix nvarchar(400), @use nvarchar(200);
    IF RIGHT(@resource, 1) = N'*'
        SET @message = CONCAT(N'sqlsem: resource ''', @resource,
            N''' ends with ''*'', and so is a pattern of names, for which limits are set; choose another name');
    SET @prefix = LEFT(@resource, CHARINDEX(N':', @resource));
    SET @use = CASE @prefix COLLATE Latin1_General_100_BIN2
                   WHEN N'rate:' THEN N'the queue of a rate: take from the rate (take), or choose another name'
                   WHEN N'once:' THEN N'what runs once per period: begin a run (once_begin), or choose another name'
                   WHEN N'priority:' THEN N'the queue of a resource with priorities: acquire the resource itself, or choose another name'
                   WHEN N'tasks:' THEN N'the rates of work queues: choose another name' END;
    IF @use IS NOT NULL
        SET @message = CONCAT(N'sqlsem: resource ''', @resource, N''' begins with ''', @prefix, N''', which sqlsem uses itself, for ', @use);
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;
END;

-- Return a lease in milliseconds; NULL for NULL. Raise for an invalid one.
CREATE OR ALTER PROCEDURE {schema}.check_lease @seconds float, @lease_ms int OUTPUT AS {begin_inner}
    DECLARE @message nvarchar(1000);
    SET @lease_ms = NULL;
    IF @seconds < 0.1 OR @seconds > 2147483
    BEGIN
        SET @message = CONCAT(N'sqlsem: lease_seconds must be from 0.1 to 2147483, not ', @seconds);
        EXEC {schema}.raise_error 50000, @message;
    END;
    SET @lease_ms = FLOOR(@seconds * 1000);
    EXEC {schema}.check_grace_or_lease N'lease', @lease_ms;
END;

-- Raise for invalid arguments of a request; @access becomes the value that the table stores.
CREATE OR ALTER PROCEDURE {schema}.check_request
    @resource nvarchar(400), @limit int, @access nvarchar(100) OUTPUT, @weight int, @timeout_ms int,
    @requesting_id nvarchar(400), @own bit AS {begin_inner}
    DECLARE @message nvarchar(1000), @word nvarchar(101), @order nvarchar(100);
    EXEC {schema}.check_name N'resource', @resource;
    IF @own = 0
        EXEC {schema}.check_not_reserved @resource;
    EXEC {schema}.check_name N'requesting_id', @requesting_id;
    -- (N'|' is appended because = ignores blanks at the end.)
    SET @word = CONCAT(LOWER(@access COLLATE Latin1_General_100_BIN2), N'|');
    SET @order = CASE WHEN LEFT(@word, 6) = N'stage:' THEN TRY_CAST(SUBSTRING(@access, 7, 94) AS bigint) END;
    SET @word = CASE WHEN @word IN (N'write|', N'writer|') THEN N'write'
                     WHEN @word IN (N'read|', N'reader|') THEN N'read'
                     WHEN @order IS NOT NULL AND @word = CONCAT(N'stage:', @order, N'|')
                     THEN CONCAT(N'stage:', @order) END;
    IF @word IS NULL
        SET @message = CONCAT(N'sqlsem: access is ', COALESCE(N'''' + @access + N'''', N'NULL'),
            N'; it must be write, read or stage:<whole number>');
    ELSE IF @limit < 1
        SET @message = CONCAT(N'sqlsem: limit on ''', @resource, N''' must be 1 or more (or NULL: the one that is set for it), not ',
            @limit);
    ELSE IF @word <> N'write' AND COALESCE(@limit, 0) <> 1
        SET @message = CONCAT(N'sqlsem: limit on ''', @resource, N''' must be 1 with access ', @word,
            N', as any number of those may be inside; a limit goes with access write');
    ELSE IF COALESCE(@weight, 0) < 1 OR @weight > @limit
        SET @message = CONCAT(N'sqlsem: weight on ''', @resource, N''' must be from 1 to the limit, ', @limit,
            N', not ', COALESCE(CONVERT(nvarchar(20), @weight), N'NULL'));
    ELSE IF COALESCE(@timeout_ms, -2) < -1
        SET @message = CONCAT(N'sqlsem: timeout_ms must be 0 or more, or -1 for ever, not ',
            COALESCE(CONVERT(nvarchar(20), @timeout_ms), N'NULL'));
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;
    SET @access = @word;
END;


-- The session and its rows -----------------------------------------------------------------------------------------

-- Return the session's own requesting_id, for a caller that passes none: constant while the session lives, and no other
-- session's.
CREATE OR ALTER PROCEDURE {schema}.session_name @name nvarchar(400) OUTPUT AS {begin_inner}
    DECLARE @since datetime;
    SET @name = CONVERT(nvarchar(255), SESSION_CONTEXT(N'sqlsem.{schema}.session'));
    IF @name IS NOT NULL
        RETURN 0;
    -- (Each session may see itself. But some engines do not show it at all times, so the name is kept in
    -- SESSION_CONTEXT.)
    SELECT @since = login_time FROM sys.dm_exec_sessions WHERE session_id = @@SPID;
    SET @name = CONCAT(N'spid ', @@SPID, N' ',
                       STUFF(CONVERT(nvarchar(23), COALESCE(@since, GETDATE()), 121), 11, 1, N'T'));
    EXEC sys.sp_set_session_context @key = N'sqlsem.{schema}.session', @value = @name;
END;

-- Return the member of this session: that of an earlier acquire, or a new one. With a lease always a new one.
CREATE OR ALTER PROCEDURE {schema}.session_member @lease_ms int, @member bigint OUTPUT AS {begin}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET XACT_ABORT ON;
    DECLARE @old bigint = -1, @before bigint, @host nvarchar(255) = NULLIF(HOST_NAME(), N''),
            @program nvarchar(255) = NULLIF(APP_NAME(), N''), @old_host nvarchar(255), @old_program nvarchar(255),
            @old_login nvarchar(128), @heartbeat_at datetime2(6);
    SET @member = NULL;
    IF @lease_ms IS NULL
    BEGIN
        -- (READPAST: wait for no other session. The beacon shows which row is this session's.)
        SELECT TOP (1) @member = member_id FROM {schema}.member WITH (INDEX (member_session), READPAST, ROWLOCK, READCOMMITTEDLOCK)
        WHERE session_id = @@SPID AND pid IS NULL AND lease_ms IS NULL AND login = ORIGINAL_LOGIN()
          -- (Not after a connection pool has reset the session.)
          AND APPLOCK_MODE(@principal, CONCAT(N'beacon.sqlsem.{schema}.', beacon), N'Session') = N'Exclusive';
        IF @member IS NOT NULL
            RETURN 0;
        -- Remove members of ended sessions: an earlier session with this session's number has surely ended.
        WHILE 1 = 1
        BEGIN
            SET @before = @old;
            SELECT TOP (1) @old = member_id, @old_host = host, @old_program = program, @old_login = login, @heartbeat_at = heartbeat_at
            FROM {schema}.member WITH (INDEX (member_session), READPAST, ROWLOCK, READCOMMITTEDLOCK)
            WHERE session_id = @@SPID AND pid IS NULL AND lease_ms IS NULL AND grace_ms = 0 AND member_id > @before
              AND APPLOCK_MODE(@principal, CONCAT(N'beacon.sqlsem.{schema}.', beacon), N'Session') = N'NoLock'
            ORDER BY member_id;
            IF @old = @before
                BREAK;
            BEGIN TRANSACTION;
            DELETE FROM {schema}.member WHERE member_id = @old;
            EXEC {schema}.delete_member_rows @old, N'reaped', @old_host, NULL, @old_program, @old_login, @heartbeat_at;
            COMMIT TRANSACTION;
        END;
    END
    ELSE
        DELETE FROM {schema}.member
        WHERE pid IS NULL AND lease_until < SYSUTCDATETIME()
          AND NOT EXISTS (SELECT 1 FROM {schema}.entry AS t WHERE t.member_id = member.member_id);
    EXEC {schema}.register_member @host, NULL, @program, 0, @lease_ms, @member OUTPUT;
END;

-- Sleep for @ms, at most 999. (Not by WAITFOR on an engine that speaks T-SQL on top of PostgreSQL, which does not have
-- it.) Return 0, or -1 if the maximum number of sessions waits (take_waiter_slot).
CREATE OR ALTER PROCEDURE {schema}.client_sleep @ms int AS {begin_inner}
    SET XACT_ABORT ON;
    DECLARE @time nvarchar(10) = RIGHT(CONCAT(N'00', @ms), 3), @slot int;
    BEGIN TRANSACTION;
    EXEC @slot = {schema}.take_waiter_slot;
    IF @@VERSION LIKE N'%PostgreSQL%'
        EXEC (N'DECLARE @n int; SELECT @n = 1 WHERE pg_sleep(0.' + @time + N') IS NULL');
    ELSE
        EXEC (N'WAITFOR DELAY ''00:00:00.' + @time + N'''');
    COMMIT TRANSACTION;
    RETURN @slot;
END;

-- Release one row of a requester, or all of its rows on a resource (@position NULL). Return 0, or -1 if there was none.
CREATE OR ALTER PROCEDURE {schema}.release_rows
    @resource nvarchar(400), @position bigint, @requesting_id nvarchar(400), @outcome nvarchar(16)
AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    DECLARE @current bigint = @position, @last bigint = @position, @code int, @result int = -1,
            @who nvarchar(400) = COALESCE(@requesting_id, CONVERT(nvarchar(255), SESSION_CONTEXT(N'sqlsem.{schema}.session')));
    IF @who IS NULL
        EXEC {schema}.session_name @who OUTPUT;
    -- Find candidates; release tests each of them. (READPAST: no caller must wait here for rows that other sessions
    -- have locked, such as a bare participant's before its commit, or a row that is being removed.)
    IF @position IS NULL
        SELECT @current = MIN(queue_position), @last = MAX(queue_position)
        FROM {schema}.entry WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) WHERE resource_id = @resource AND requesting_id = @who;
    WHILE @current IS NOT NULL
    BEGIN
        EXEC @code = {schema}.release @resource, @current, @who, @outcome;
        SELECT @result = CASE WHEN @code = 0 THEN 0 ELSE @result END,
               @current = CASE WHEN @current < @last
                           THEN (SELECT TOP (1) queue_position FROM {schema}.entry WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                                 WHERE resource_id = @resource AND requesting_id = @who AND queue_position > @current
                                 ORDER BY queue_position) END;
    END;
    IF @result < 0
        EXEC {schema}.check_name N'resource', @resource;  -- no row: perhaps the name is invalid
    RETURN @result;
END;


-- Acquiring and releasing --------------------------------------------------------------------------------------

-- feature: priorities
-- Do `acquire` for a resource with priorities (priorities.sql). Only sessions that hold other locks search for
-- deadlocks: no other caller can wait for this session.
CREATE OR ALTER PROCEDURE {schema}.session_acquire_by_priority
    @resource nvarchar(400), @limit int, @access nvarchar(100), @weight int, @deadline datetime2(6), @try bit,
    @note nvarchar(1000), @requesting_id nvarchar(255), @priority int, @position bigint OUTPUT AS {begin}
    SET XACT_ABORT ON;
    DECLARE @result int, @number int, @member bigint, @granted bit, @uid nvarchar(60), @place bigint, @before bigint, @ahead int,
            @owner nvarchar(255) = ORIGINAL_LOGIN(), @left int, @slice int, @pause int, @since datetime2(6), @outcome nvarchar(16),
            @line nvarchar(255) = LEFT(N'priority:' + @resource, 255), @message nvarchar(1000), @slot int, @slept int = 0;
    BEGIN TRY
        WHILE @result IS NULL  -- once; again if the priority entry was lost while this session was suspended
        BEGIN
            EXEC {schema}.session_member NULL, @member OUTPUT;
            IF @try = 0 AND EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK, INDEX (entry_member)) WHERE member_id = @member)
            BEGIN
                SET @message = CONCAT(N'sqlsem: no waiting by priority for ''', @resource, N''' while this session holds something else: who ',
                    N'waits so must hold nothing, as no deadlock is found there; acquire this first, or only try for it');
                EXEC {schema}.raise_error 50009, @message;
            END;
            SET @uid = CONCAT(N'sql ', NEWID());
            SET @place = NULL;
            SET @since = SYSUTCDATETIME();
            WHILE 1 = 1
            BEGIN
                SET @left = COALESCE(DATEDIFF(millisecond, SYSUTCDATETIME(), @deadline), 3000);
                SET @slice = CASE WHEN @left > 3000 THEN 3000 WHEN @left < 100 THEN 100 ELSE @left END;
                SET @number = 0;
                BEGIN TRY
                    EXEC {schema}.acquire_by_priority @member, @requesting_id, @owner, @uid, @try, @resource, @access, @limit, @weight, @note,
                        @priority, @place, @slice, @position OUTPUT, @granted OUTPUT, @before OUTPUT, @ahead OUTPUT,
                        @attended_ms = 5000;
                END TRY
                BEGIN CATCH
                    SET @number = ERROR_NUMBER();
                    {rollback}
                    IF @number NOT IN (601, 1204, 1205, 1222, 50002, 50005)
                        THROW;
                END CATCH;
                IF @number = 0 AND @granted = 1
                BEGIN
                    SET @result = CASE WHEN @place IS NULL THEN 0 ELSE 1 END;
                    BREAK;
                END;
                IF @number = 50005  -- an operator has removed the member: try once more with a new one
                    BREAK;
                IF @number = 0 AND @position IS NULL
                BEGIN
                    SET @outcome = NULL;
                    SELECT @outcome = outcome FROM {schema}.history
                    WHERE ended_at >= @since AND resource_id = @line AND queue_position = @place;
                    SET @result = CASE WHEN @place IS NULL THEN -1 WHEN @outcome IN (N'cancelled', N'reaped') THEN NULL ELSE -2 END;
                    BREAK;
                END;
                IF @number = 0
                    SET @place = @position;
                SET @left = COALESCE(DATEDIFF(millisecond, SYSUTCDATETIME(), @deadline), 3000);
                IF @left <= 0
                BEGIN
                    SET @result = -1;
                    BREAK;
                END;
                -- Pause for a twentieth of the time waited so far, and longer if other entries are ahead.
                SET @pause = CASE WHEN DATEDIFF(second, @since, SYSUTCDATETIME()) >= 5 THEN 250
                                  ELSE 5 + CAST(DATEDIFF_BIG(millisecond, @since, SYSUTCDATETIME()) AS int) / 20 END
                             * CASE WHEN @before IS NULL THEN 1 WHEN @ahead > 2 THEN 3 ELSE @ahead + 1 END;
                SET @pause = CASE WHEN @pause > @left THEN @left ELSE @pause END;
                SET @pause = CASE WHEN @pause > 900 THEN 900 ELSE @pause END;
                UPDATE {schema}.entry SET waiter_lease_until = DATEADD(millisecond, @pause + 5000, SYSUTCDATETIME())
                WHERE resource_id = @line AND queue_position = @place;
                EXEC @slot = {schema}.client_sleep @pause;
                IF @slot < 0 AND @slept = 0
                    THROW 50002, N'sqlsem: busy: as many sessions wait on this server as may (setting max_server_waiters); try again later', 1;
                SET @slept = 1;
            END;
            IF @result >= 0
                BREAK;
            SET @outcome = CASE WHEN @result = -1 THEN N'timeout' ELSE N'cancelled' END;
            EXEC {schema}.cancel @member, @uid, @outcome;
        END;
    END TRY
    BEGIN CATCH
        {rollback}
        BEGIN TRY
            IF @member IS NOT NULL AND @uid IS NOT NULL
                EXEC {schema}.cancel @member, @uid, N'cancelled';
        END TRY
        BEGIN CATCH
            -- (Report the first error. The priority entry is removed when its waiter lease ends.)
            {rollback}
        END CATCH;
        {throw_if_busy}
        THROW;
    END CATCH;
    IF @result < 0
        SET @position = NULL;
    RETURN @result;
END;

-- end of feature: priorities

-- Acquire a lock for this session, or for a lease, and wait up to @timeout_ms for it. Return code:
--   0 granted at once
--   1 granted after waiting
--   -1 not granted in time
--   -2 cancelled: an operator revoked the waiting row
--   -3 victim of a deadlock: a message names the cycle
CREATE OR ALTER PROCEDURE {schema}.acquire
    @resource nvarchar(400), @limit int = 1, @access nvarchar(100) = N'write', @weight int = 1, @timeout_ms int = -1,
    @note nvarchar(1000) = NULL, @requesting_id nvarchar(400) = NULL, @lease_seconds float = NULL,
    @position bigint = NULL OUTPUT, @fence bigint = NULL OUTPUT, @priority int = NULL,
    @own bit = 0  -- 1: called by a routine of sqlsem, for a name that check_not_reserved reserves
AS
BEGIN TRY
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0 OR @@OPTIONS & 2 = 2
    BEGIN
        IF @@TRANCOUNT > 0
            THROW 50001, N'sqlsem: acquire must not be called in an open transaction or INSERT ... EXEC; commit first', 1;
        SET IMPLICIT_TRANSACTIONS OFF;
    END;
    SET NOCOUNT, XACT_ABORT ON;
    SET LOCK_TIMEOUT 3000;  -- another session's open transaction must not delay this call beyond its timeout
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(),
            -- NULL: for ever
            @deadline datetime2(6) = CASE WHEN @timeout_ms >= 0 THEN DATEADD(millisecond, @timeout_ms, SYSUTCDATETIME()) END,
            @result int, @code int, @number int = 0, @lease_ms int, @member bigint, @granted bit,
            @uid nvarchar(64) = CONCAT(N'sql ', NEWID()), @owner nvarchar(255) = ORIGINAL_LOGIN(),
            @try bit = CASE WHEN @timeout_ms = 0 THEN 1 ELSE 0 END, @left int,
            @slice int = CASE WHEN @timeout_ms BETWEEN 0 AND 99 THEN 100 WHEN @timeout_ms BETWEEN 100 AND 2999 THEN @timeout_ms ELSE 3000 END,
            @pause int, @attended_ms int, @others bit, @looked datetime2(6), @victim bigint, @words nvarchar(4000),
            @began datetime2(6), @since datetime2(6) = SYSUTCDATETIME(), @outcome nvarchar(16), @slept int = 0;
    -- Use the member of an earlier acquire. (There is none after a connection pool has reset the session.)
    SELECT @position = NULL, @fence = NULL, @member = m.member_id,
           @requesting_id = COALESCE(@requesting_id, CONVERT(nvarchar(255), SESSION_CONTEXT(N'sqlsem.{schema}.session')))
    FROM (SELECT 1 AS one) AS o
    OUTER APPLY (SELECT TOP (1) t.member_id FROM {schema}.member AS t
                 WHERE t.session_id = @@SPID AND t.pid IS NULL AND t.lease_ms IS NULL AND t.login = ORIGINAL_LOGIN()
                   AND APPLOCK_MODE(@principal, CONCAT(N'beacon.sqlsem.{schema}.', t.beacon), N'Session') = N'Exclusive') AS m;
    -- Check the first request of a session, and each request that is not valid at first sight (as in register).
    IF @member IS NULL OR @lease_seconds IS NOT NULL OR @priority IS NOT NULL
       OR DATALENGTH(@resource) > 510 OR DATALENGTH(@requesting_id) > 510 OR COALESCE(DATALENGTH(@access), 0) <> 10
       OR @access COLLATE Latin1_General_100_BIN2 <> N'write' OR @limit IS NULL OR COALESCE(@weight, 0) < 1 OR @weight > @limit
       OR COALESCE(@timeout_ms, -2) < -1 OR COALESCE(@resource, N'') COLLATE Latin1_General_100_BIN2 NOT LIKE N'[!-~]%[!-~]'
       OR COALESCE(@requesting_id, N'') COLLATE Latin1_General_100_BIN2 NOT LIKE N'[!-~]%[!-~]'
       OR CONCAT(@resource, @requesting_id) COLLATE Latin1_General_100_BIN2 LIKE N'%[^ -~]%'
       OR (@own = 0 AND @resource COLLATE Latin1_General_100_BIN2 LIKE N'%[:*]%')
    BEGIN
        IF @requesting_id IS NULL
            EXEC {schema}.session_name @requesting_id OUTPUT;
        EXEC {schema}.check_request @resource, @limit, @access OUTPUT, @weight, @timeout_ms, @requesting_id, @own;
        IF @lease_seconds IS NOT NULL
        BEGIN
            EXEC {schema}.check_lease @lease_seconds, @lease_ms OUTPUT;
            SET @member = NULL;
        END;
        IF @priority IS NOT NULL AND @lease_ms IS NOT NULL
            THROW 50000, N'sqlsem: a request with a priority belongs to its session, and takes no lease_seconds; leave out one of the two', 1;
        -- feature: priorities
        IF @priority IS NOT NULL
        BEGIN
            EXEC @result = {schema}.session_acquire_by_priority @resource, @limit, @access, @weight, @deadline, @try, @note, @requesting_id, @priority,
                @position OUTPUT;
            SET @fence = @position;
            RETURN @result;
        END;
        -- end of feature: priorities
        -- feature: not priorities
        IF @priority IS NOT NULL
            THROW 50001, N'sqlsem: priorities are not installed in this database; add them with: sqlsem init --add priorities', 1;
        -- end of feature: not priorities
    END;

    BEGIN TRY
        WHILE @result IS NULL  -- once; again if the row was lost while this session was suspended
        BEGIN
            IF @member IS NULL OR @uid IS NULL
            BEGIN
                IF @member IS NULL OR @lease_ms IS NULL
                    EXEC {schema}.session_member @lease_ms, @member OUTPUT;
                SET @left = COALESCE(DATEDIFF(millisecond, SYSUTCDATETIME(), @deadline), 3000);
                SET @slice = CASE WHEN @left > 3000 THEN 3000 WHEN @left < 100 THEN 100 ELSE @left END;
                SET @slice = CASE WHEN @lease_ms / 3 < @slice THEN @lease_ms / 3 ELSE @slice END;
                SELECT @uid = CONCAT(N'sql ', NEWID()), @since = SYSUTCDATETIME(), @number = 0;
            END;
            BEGIN TRY
                EXEC {schema}.register @member, @requesting_id, @owner, @uid, @try, @resource, @access, @limit, @weight,
                    @note, @slice, @position OUTPUT, @granted OUTPUT, 0, 5000;
            END TRY
            BEGIN CATCH
                SET @number = ERROR_NUMBER();
                {rollback}
                IF @number NOT IN (601, 1204, 1205, 1222, 50002, 50005)
                    THROW;
            END CATCH;
            IF @granted = 1 AND @number = 0
            BEGIN
                SET @fence = @position;
                RETURN 0;
            END;
            IF @number = 50005  -- the lease is over, or an operator has removed the member: try once more with a new one
                SET @member = NULL;
            IF @number <> 0
            BEGIN
                -- An open transaction keeps the gate, or a row: this counts as waiting.
                SELECT @position = NULL, @uid = NULL;
                IF @deadline <= SYSUTCDATETIME()
                    SET @result = -1;
                ELSE IF @lease_ms IS NOT NULL
                    UPDATE {schema}.member
                    SET heartbeat_at = SYSUTCDATETIME(), lease_until = DATEADD(millisecond, @lease_ms, SYSUTCDATETIME())
                    WHERE member_id = @member;
                CONTINUE;
            END;
            IF @position IS NULL
            BEGIN
                SET @result = -1;
                BREAK;
            END;
            -- Test if the request would wait for rows of this session, which releases none while it waits. (READPAST:
            -- rows that other sessions have locked are being changed, and do not count.)
            IF @lease_ms IS NULL AND @weight + (
                   SELECT COALESCE(SUM(CAST(t.weight AS bigint)), 0) FROM {schema}.entry AS t WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                   WHERE t.resource_id = @resource AND t.queue_position < @position AND t.member_id = @member
                     AND t.granted_at IS NOT NULL AND (@access = N'write' OR t.access_type <> @access)
               ) > (SELECT MIN(COALESCE(t.concurrency_limit, o.cap, 2147483647))
                    FROM {schema}.entry AS t WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                    CROSS JOIN {schema}.effective_settings(@resource) AS o
                    WHERE t.resource_id = @resource AND t.member_id = @member AND t.queue_position <= @position
                      AND (t.queue_position = @position OR @access = N'write' OR t.access_type <> @access))
            BEGIN
                SET @result = -3;
                EXEC {schema}.find_deadlock @member, @victim OUTPUT, @words OUTPUT;
                BREAK;
            END;
            -- (Only an owner with other rows can block others while it waits.)
            SET @others = 0;
            IF @lease_ms IS NULL AND EXISTS (SELECT 1 FROM {schema}.entry AS t WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                                             WHERE t.member_id = @member AND t.queue_position <> @position)
                SET @others = 1;
            SET @looked = SYSUTCDATETIME();

            SET @pause = 40;
            SET @code = -1;
            WHILE @code IN (-1, 1)
            BEGIN
                SET @began = SYSUTCDATETIME();
                SET @left = COALESCE(DATEDIFF(millisecond, @began, @deadline), 3000);
                SET @slice = CASE WHEN @left > 3000 THEN 3000 WHEN @left < 0 THEN 0 ELSE @left END;
                SET @slice = CASE WHEN @lease_ms / 3 < @slice THEN @lease_ms / 3
                                  WHEN @others = 1 AND @slice > 700 THEN 700 ELSE @slice END;
                SET @attended_ms = @slice + 5000;
                BEGIN TRY
                    IF @lease_ms IS NOT NULL
                        UPDATE {schema}.member
                        SET heartbeat_at = SYSUTCDATETIME(), lease_until = DATEADD(millisecond, @lease_ms, SYSUTCDATETIME())
                        WHERE member_id = @member;
                    UPDATE {schema}.entry SET waiter_lease_until = DATEADD(millisecond, @attended_ms, SYSUTCDATETIME())
                    WHERE resource_id = @resource AND queue_position = @position AND granted_at IS NULL;
                    EXEC @code = {schema}.wait @resource, @position, @slice;
                END TRY
                BEGIN CATCH
                    {rollback}
                    -- Another session has locked rows, perhaps in another order. (That is no deadlock of requests: wait
                    -- on.)
                    IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222, 50002)
                        THROW;
                    SET @code = -1;
                END CATCH;
                -- (No slot is free. A program waits in its own process then, but a session cannot: so the request is
                -- refused, unless it has begun to wait.)
                IF @code = 2 AND @slept = 0
                    THROW 50002, N'sqlsem: busy: as many sessions wait on this server as may (setting max_server_waiters); try again later', 1;
                IF @code = 2
                    SELECT @code = -1, @pause = 500;
                SET @slept = 1;
                IF @code = -1
                BEGIN
                    SET @left = COALESCE(DATEDIFF(millisecond, SYSUTCDATETIME(), @deadline), 3000);
                    IF @left <= 0
                        BREAK;
                    -- wait has returned early: there was no lock to wait for (a lease, a pause).
                    IF DATEDIFF_BIG(millisecond, @began, SYSUTCDATETIME()) < @slice
                    BEGIN
                        SET @pause = CASE WHEN @pause > @left THEN @left ELSE @pause END;
                        EXEC {schema}.client_sleep @pause;
                        SET @pause = CASE WHEN @pause > 400 THEN 800 ELSE @pause * 2 END;  -- as in poll_pause
                    END
                    ELSE
                        SET @pause = 40;
                    IF @others = 1 AND DATEDIFF_BIG(millisecond, @looked, SYSUTCDATETIME()) >= 600
                    BEGIN
                        EXEC {schema}.find_deadlock @member, @victim OUTPUT, @words OUTPUT;
                        IF @victim = @position
                            SET @code = -3;
                        SET @looked = SYSUTCDATETIME();
                    END;
                END;
            END;
            IF @code = 0
            BEGIN
                SET @result = 1;
                IF @lease_ms IS NOT NULL
                BEGIN
                    -- (The grant is valid only if the member still exists.)
                    UPDATE {schema}.member
                    SET heartbeat_at = SYSUTCDATETIME(), lease_until = DATEADD(millisecond, @lease_ms, SYSUTCDATETIME())
                    WHERE member_id = @member;
                    IF @@ROWCOUNT = 0
                        SET @result = NULL;
                END;
            END
            ELSE IF @code = -2
            BEGIN
                SET @outcome = NULL;
                SELECT @outcome = outcome FROM {schema}.history
                WHERE ended_at >= @since AND resource_id = @resource AND queue_position = @position;
                SET @result = CASE WHEN @outcome IN (N'cancelled', N'reaped') THEN NULL ELSE -2 END;
            END
            ELSE
                SET @result = @code;
            IF @result = 1
                BREAK;
            SET @outcome = CASE WHEN @result = -1 THEN N'timeout' ELSE N'cancelled' END;
            EXEC {schema}.cancel @member, @uid, @outcome;
            IF @result IS NULL
                SET @uid = NULL;
            IF @result IS NULL AND @lease_ms IS NOT NULL
            BEGIN
                EXEC {schema}.deregister_member @member;
                SET @member = NULL;
            END;
        END;
        IF @result = -3
            EXEC {schema}.cancel @member, @uid, N'cancelled';
    END TRY
    BEGIN CATCH
        SET @number = ERROR_NUMBER();
        {rollback}
        BEGIN TRY
            IF @member IS NOT NULL
                EXEC {schema}.cancel @member, @uid, N'cancelled';
            IF @member IS NOT NULL AND @lease_ms IS NOT NULL
                EXEC {schema}.deregister_member @member;
        END TRY
        BEGIN CATCH
            -- (Report the first error. The row is removed when its waiter lease ends.)
            {rollback}
        END CATCH;
        SET @position = NULL;
        THROW;
    END CATCH;
    IF @result >= 0
        SET @fence = @position;
    ELSE
    BEGIN
        SET @position = NULL;
        IF @lease_ms IS NOT NULL AND @member IS NOT NULL
            EXEC {schema}.deregister_member @member;
    END;
    IF @result = -3
    BEGIN
        SET @words = CONCAT(N'sqlsem: ', COALESCE(@words, N'Deadlock'), N'; the request for ''', @resource,
            N''' has left the queue: release what is held, and try again');
        PRINT @words;
    END;
    RETURN @result;
{end_try_rollback_own}

-- Acquire a lock if that is possible at once (code 0); else leave nothing in the queue (code -1).
CREATE OR ALTER PROCEDURE {schema}.[try]
    @resource nvarchar(400), @limit int = 1, @access nvarchar(100) = N'write', @weight int = 1,
    @note nvarchar(1000) = NULL, @requesting_id nvarchar(400) = NULL, @lease_seconds float = NULL,
    @position bigint = NULL OUTPUT, @fence bigint = NULL OUTPUT, @priority int = NULL AS {begin}
    DECLARE @code int;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: try must not be called in an open transaction or INSERT ... EXEC; commit first', 1;
    EXEC @code = {schema}.acquire @resource, @limit, @access, @weight, 0, @note, @requesting_id, @lease_seconds,
        @position OUTPUT, @fence OUTPUT, @priority;
    RETURN @code;
END;

-- Extend a lease, by @lease_seconds or by as much as before. Return 0 if the lock is still held, -1 if not. For a lock
-- without a lease (and without @lease_seconds), write a heartbeat of the session, and return the same, which also keeps
-- a gateway from closing an idle connection.
CREATE OR ALTER PROCEDURE {schema}.renew
    @resource nvarchar(400), @position bigint, @requesting_id nvarchar(400) = NULL, @lease_seconds float = NULL
AS {begin_try}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: renew must not be called inside an open transaction; commit or roll back first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET LOCK_TIMEOUT 3000;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @member bigint, @beacon int, @lease int, @lease_ms int, @code int, @name nvarchar(255),
            @message nvarchar(1000);
    EXEC {schema}.check_name N'resource', @resource;
    EXEC {schema}.check_lease @lease_seconds, @lease_ms OUTPUT;
    IF @requesting_id IS NULL
        EXEC {schema}.session_name @requesting_id OUTPUT;
    -- (A pin does not lock the row, so this reads a row that the session itself has pinned.)
    SELECT @member = m.member_id, @beacon = m.beacon, @lease = m.lease_ms
    FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK) JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE t.resource_id = @resource AND t.queue_position = @position AND t.requesting_id = @requesting_id
      AND m.login = ORIGINAL_LOGIN();
    IF @member IS NULL
        RETURN -1;
    IF @lease IS NOT NULL
    BEGIN
        UPDATE {schema}.member
        SET heartbeat_at = SYSUTCDATETIME(), lease_ms = COALESCE(@lease_ms, lease_ms),
            lease_until = DATEADD(millisecond, COALESCE(@lease_ms, lease_ms), SYSUTCDATETIME())
        WHERE member_id = @member;
        IF @@ROWCOUNT = 0
            RETURN -1;
    END
    ELSE IF @lease_ms IS NOT NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: position ', @position, N' on ''', @resource,
            N''' lives as long as its session and has no lease to renew; leave lease_seconds out here, ',
            N'or give it to acquire');
        EXEC {schema}.raise_error 50000, @message;
    END
    ELSE
    BEGIN
        SET @name = CONCAT(N'beacon.sqlsem.{schema}.', @beacon);
        IF APPLOCK_MODE(@principal, @name, N'Session') = N'NoLock'
        BEGIN
            EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Shared', @LockOwner = N'Session',
                @LockTimeout = 0, @DbPrincipal = @principal;
            IF @code >= 0
            BEGIN
                EXEC sys.sp_releaseapplock @Resource = @name, @LockOwner = N'Session', @DbPrincipal = @principal;
                RETURN -1;  -- its session is gone
            END;
        END;
        UPDATE {schema}.member SET heartbeat_at = SYSUTCDATETIME(), missing_since = NULL WHERE member_id = @member AND beacon = @beacon;
        IF @@ROWCOUNT = 0
            RETURN -1;
    END;
    -- (The row is read after the renewal: from then on no session reaps it.)
    SET @code = -1;
    SELECT @code = 0 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
    WHERE resource_id = @resource AND queue_position = @position AND granted_at IS NOT NULL AND revoked_at IS NULL;
    RETURN @code;
{end_try_rollback_own}

-- Raise 50004 if the lock is not held; else keep it held until the caller's transaction ends. Call it inside that
-- transaction.
CREATE OR ALTER PROCEDURE {schema}.assert_holding @resource nvarchar(400), @position bigint, @requesting_id nvarchar(400) = NULL
AS {begin_try}
    DECLARE @holding int, @message nvarchar(1000);
    -- (In manual commit mode the transaction begins with the first statement that reads a table.)
    IF @@TRANCOUNT = 0 AND @@OPTIONS & 2 = 2
        SELECT @holding = 0 FROM {schema}.entry WHERE queue_position < 0;
    IF @@TRANCOUNT = 0
        THROW 50001, N'sqlsem: assert_holding needs an open transaction, which it guards; BEGIN TRANSACTION first', 1;
    IF @requesting_id IS NULL
        EXEC {schema}.session_name @requesting_id OUTPUT;
    EXEC @holding = {schema}.pin @resource, @position, @requesting_id;
    IF @holding = 0
    BEGIN
        SET @message = CONCAT(N'sqlsem: position ', COALESCE(CONVERT(nvarchar(20), @position), N'NULL'), N' on ',
            COALESCE(N'''' + @resource + N'''', N'NULL'),
            N' is not held (any more) by this requester; roll back: another requester may hold it now');
        EXEC {schema}.raise_error 50004, @message;
    END;
{end_try}

-- Return 1 if a row may be granted, also a bare participant's, 0 if not yet, -1 if it is not there. 1 stays true until
-- the row is released. Changes nothing, and reads committed rows. It waits a second at most for an open transaction that
-- changes a row ahead, and then returns 0.
CREATE OR ALTER PROCEDURE {schema}.may_enter @resource nvarchar(400), @position bigint, @answer bit = 0 AS {begin}
    SET LOCK_TIMEOUT 1000;
    -- (The caller may be under SNAPSHOT: the rule reads with READCOMMITTEDLOCK.)
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @code int = -1, @access nvarchar(64), @limit int, @weight int;
    EXEC {schema}.check_name N'resource', @resource;
    BEGIN TRY
        SELECT @code = 0, @access = access_type, @limit = concurrency_limit, @weight = weight
        FROM {schema}.entry WITH (READCOMMITTEDLOCK, ROWLOCK)
        WHERE resource_id = @resource AND queue_position = @position AND revoked_at IS NULL;
        IF @code = 0
            SELECT @code = eligible FROM {schema}.eligibility(@resource, @position, @access, @limit, @weight, NULL);
    END TRY
    BEGIN CATCH
        IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222)
            THROW;
        SET @code = 0;
    END CATCH;
    {answer:@code,code}
END;

-- Return the rows of the queue, of one resource or of all. state: holds, waits, revoked, or dead (the owner is gone, and
-- the next waiter removes the row). seconds: in this state. missing_for: for how many seconds the owner is
-- missing; after grace seconds it counts as dead. Also shows uncommitted changes.
CREATE OR ALTER PROCEDURE {schema}.status @resource nvarchar(400) = NULL AS {begin_try}
    EXEC {schema}.entries @resource;
{end_try}


-- feature: operate
-- Operators (and reap, in routines.sql) ------------------------------------------------------------------------

-- Set the limit of a resource, or of all whose names begin with a prefix ('tenant:*'): an upper bound on declared
-- limits, and the limit of requests that declare none. NULL removes it; raise 50008 while requests depend on it.
CREATE OR ALTER PROCEDURE {schema}.set_limit @resource nvarchar(400), @limit int AS {begin_try}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: set_limit must not be called inside an open transaction; commit first', 1;
    DECLARE @message nvarchar(1000);
    EXEC {schema}.check_name N'resource', @resource;
    IF @limit < 1
    BEGIN
        SET @message = CONCAT(N'sqlsem: limit of ''', @resource, N''' must be 1 or more, or NULL for none, not ',
            @limit, N'; to grant no requests at all, pause it');
        EXEC {schema}.raise_error 50000, @message;
    END;
    SET IMPLICIT_TRANSACTIONS OFF;
    EXEC {schema}.set_resource @resource, N'cap', @limit;
{end_try_rollback_own}

-- Grant no more requests until resume. Holders keep their locks.
CREATE OR ALTER PROCEDURE {schema}.pause @resource nvarchar(400) AS {begin_try}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: pause must not be called inside an open transaction; commit first', 1;
    EXEC {schema}.check_name N'resource', @resource;
    SET IMPLICIT_TRANSACTIONS OFF;
    EXEC {schema}.set_resource @resource, N'paused', 1;
{end_try_rollback_own}

-- Grant requests again after a pause.
CREATE OR ALTER PROCEDURE {schema}.resume @resource nvarchar(400) AS {begin_try}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: resume must not be called inside an open transaction; commit first', 1;
    EXEC {schema}.check_name N'resource', @resource;
    SET IMPLICIT_TRANSACTIONS OFF;
    EXEC {schema}.set_resource @resource, N'paused', 0;
{end_try_rollback_own}

-- end of feature: operate
