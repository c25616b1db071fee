-- sqlsem, the rounds, for SQL Server. May be run again at any time, after tasks.sql.
--
-- Whatever is decided about the rounds of a name is decided under one application lock, N'sqlsem.{schema}.round.' and
-- the name, Transaction, taken in a statement of its own before anything is read: so of several parts that end at the
-- same instant one is the last. A part, and the continuation, belongs to the member that runs it; when the member is
-- gone, recover_rounds says so.
--
-- Locks: as in tasks.sql an index is read without going on to the row, and rows are read and written by their number.
-- Errors as in routines.sql, and 50007: the part cannot be started now.

SET QUOTED_IDENTIFIER ON;
SET ANSI_NULLS ON;
GO

-- What makes the decisions of one name come one after the other, until the transaction ends.
IF OBJECT_ID(N'{schema}.lock_round') IS NULL EXEC (N'CREATE PROCEDURE {schema}.lock_round AS RETURN 0');
GO
ALTER PROCEDURE {schema}.lock_round @name nvarchar(400), @patience int = 1000
AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @code int, @lock nvarchar(255) = LEFT(CONCAT(N'sqlsem.{schema}.round.', @name), 255);
    EXEC @code = sys.sp_getapplock @Resource = @lock, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
        @LockTimeout = @patience, @DbPrincipal = @principal;
    IF @code < 0
        THROW 50002, N'sqlsem: busy: somebody keeps the rounds of this name locked in an open transaction', 1;
END;
GO

-- Keeps what the last part shall start. Of a user that may not put tasks only that there is something (and what those who
-- may have kept stays): what is kept may be run with the rights of the one who resumes it.
IF OBJECT_ID(N'{schema}.keep_then') IS NULL EXEC (N'CREATE PROCEDURE {schema}.keep_then AS RETURN 0');
GO
ALTER PROCEDURE {schema}.keep_then @round bigint, @kind nvarchar(8), @body nvarchar(max)
AS
BEGIN
    SET NOCOUNT ON;
    IF @kind IS NULL OR @kind = N'session'
        RETURN 0;
    IF COALESCE(IS_ROLEMEMBER(N'{schema}_putter'), 0) = 0
       AND COALESCE(IS_ROLEMEMBER(N'db_owner'), 0) = 0 AND COALESCE(IS_SRVROLEMEMBER(N'sysadmin'), 0) = 0
        UPDATE {schema}.[round] SET then_kind = COALESCE(then_kind, N'local') WHERE round_id = @round;
    ELSE
        UPDATE {schema}.[round] SET then_kind = @kind, then_body = @body WHERE round_id = @round;
END;
GO

-- The parts of a round in some states, for messages: a, b (why).
IF OBJECT_ID(N'{schema}.parts_in') IS NULL EXEC (N'CREATE PROCEDURE {schema}.parts_in AS RETURN 0');
GO
ALTER PROCEDURE {schema}.parts_in @round bigint, @states nvarchar(100), @told nvarchar(1000) OUTPUT
AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @part nvarchar(255) = N'', @error nvarchar(200), @count int = 1;
    SET @told = N'';
    WHILE @count = 1
    BEGIN
        SET @count = 0;
        SELECT TOP (1) @count = 1, @part = part, @error = LEFT(error, 200) FROM {schema}.round_part
        WHERE round_id = @round AND part > @part COLLATE Latin1_General_100_BIN2
          AND @states LIKE CONCAT(N'%', status, N'%')
        ORDER BY part;
        IF @count = 1
            SET @told = LEFT(CONCAT(@told, CASE WHEN @told <> N'' THEN N', ' END, @part, N' (' + @error + N')'), 1000);
    END;
END;
GO

-- Tests the members that run parts or continuations of a name's rounds (NULL: of all), except @mine. Parts of the dead
-- have failed, their continuations are to be done again. With @answer the rounds in which parts failed so, a row each;
-- with @tell a message each, for a session.
IF OBJECT_ID(N'{schema}.recover_rounds') IS NULL EXEC (N'CREATE PROCEDURE {schema}.recover_rounds AS RETURN 0');
GO
ALTER PROCEDURE {schema}.recover_rounds
    @name nvarchar(400) = NULL, @mine bigint = NULL, @answer bit = 0, @tell bit = 0
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: recover_rounds must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @part TABLE (round_id bigint NOT NULL, part nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL);
    DECLARE @then TABLE (round_id bigint NOT NULL);
    DECLARE @gone TABLE (member_id bigint NOT NULL PRIMARY KEY);
    DECLARE @found TABLE (round_id bigint NOT NULL, round_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
                          member_id bigint NOT NULL);
    DECLARE @dead TABLE (round_id bigint NOT NULL PRIMARY KEY);
    DECLARE @member bigint = -1, @before bigint, @round bigint = 0, @round_before bigint, @round_name nvarchar(255),
            @told nvarchar(1000), @message nvarchar(2000);
    INSERT INTO @part (round_id, part)
    SELECT round_id, part FROM {schema}.round_part WITH (INDEX (round_part_status)) WHERE status = N'running';
    INSERT INTO @then (round_id)
    SELECT round_id FROM {schema}.[round] WITH (INDEX (round_then)) WHERE then_status = N'running';
    INSERT INTO @found (round_id, round_name, member_id)
    SELECT r.round_id, r.round_name, p.member_id
    FROM @part AS f JOIN {schema}.round_part AS p ON p.round_id = f.round_id AND p.part = f.part
    JOIN {schema}.[round] AS r ON r.round_id = f.round_id
    WHERE p.status = N'running' AND (@name IS NULL OR r.round_name = @name)
    UNION
    SELECT r.round_id, r.round_name, r.then_member FROM @then AS f JOIN {schema}.[round] AS r ON r.round_id = f.round_id
    WHERE r.then_status = N'running' AND (@name IS NULL OR r.round_name = @name);
    WHILE 1 = 1
    BEGIN
        SET @before = @member;
        SELECT TOP (1) @member = member_id FROM @found WHERE member_id > @before ORDER BY member_id;
        IF @member = @before
            BREAK;
        EXEC {schema}.test_member @member, @mine;
        -- Decided by number, once: who is gone does not come back, and the number is never used again.
        IF NOT EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @member)
            INSERT INTO @gone (member_id) VALUES (@member);
    END;
    WHILE 1 = 1
    BEGIN
        SET @round_before = @round;
        SELECT TOP (1) @round = f.round_id, @round_name = f.round_name FROM @found AS f
        WHERE f.round_id > @round_before AND f.member_id IN (SELECT g.member_id FROM @gone AS g)
        ORDER BY f.round_id;
        IF @round = @round_before
            BREAK;
        BEGIN TRY
            BEGIN TRANSACTION;
            EXEC {schema}.lock_round @round_name;
            UPDATE {schema}.[round] SET then_status = N'pending', then_uid = NULL
            WHERE round_id = @round AND then_status = N'running'
              AND then_member IN (SELECT g.member_id FROM @gone AS g);
            UPDATE {schema}.round_part SET status = N'failed', ended_at = SYSUTCDATETIME(), error = N'its process died'
            WHERE round_id = @round AND status = N'running'
              AND member_id IN (SELECT g.member_id FROM @gone AS g);
            IF @@ROWCOUNT > 0
            BEGIN
                INSERT INTO @dead (round_id) VALUES (@round);
                UPDATE {schema}.[round] SET status = N'failed', ended_at = SYSUTCDATETIME()
                WHERE round_id = @round AND status = N'open'
                  AND NOT EXISTS (SELECT 1 FROM {schema}.round_part AS p
                                  WHERE p.round_id = @round AND p.status IN (N'expected', N'running'));
            END;
            COMMIT TRANSACTION;
        END TRY
        BEGIN CATCH
            IF @@TRANCOUNT > 0
                ROLLBACK TRANSACTION;
            THROW;
        END CATCH;
        -- At once: nobody finds it a second time, should the next round be busy.
        IF @tell = 1 AND EXISTS (SELECT 1 FROM @dead WHERE round_id = @round)
        BEGIN
            EXEC {schema}.parts_in @round, N'failed', @told OUTPUT;
            SET @message = CONCAT(N'sqlsem: round ', @round, N' of ''', @round_name, N''' has failed parts: ', @told,
                N'; run these parts again');
            RAISERROR (N'%s', 10, 1, @message) WITH NOWAIT;
        END;
    END;
    IF @answer = 1
        SELECT round_id FROM @dead ORDER BY round_id;
END;
GO

-- Starts a part, in the round that is open or in a new one. @parts: the names of all parts, one a line (LF). @code:
--   started    @id and @attempt say which; @previous is the round that expired by this, if one did
--   running    refused: the part runs already, and its process lives
--   succeeded  refused: the part has succeeded already, and the round waits for others
--   differs    refused: the open round has other parts
-- May be repeated with the same @uid.
IF OBJECT_ID(N'{schema}.start_part') IS NULL EXEC (N'CREATE PROCEDURE {schema}.start_part AS RETURN 0');
GO
ALTER PROCEDURE {schema}.start_part
    @member bigint, @name nvarchar(400), @part nvarchar(400), @parts nvarchar(max), @window_ms bigint,
    @owner nvarchar(255), @uid nvarchar(64), @then_kind nvarchar(8) = NULL, @then_body nvarchar(max) = NULL,
    @code nvarchar(16) = NULL OUTPUT,
    @id bigint = NULL OUTPUT, @attempt int = NULL OUTPUT, @previous bigint = NULL OUTPUT, @answer bit = 0
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET @code = NULL;
    SET @id = NULL;
    SET @attempt = NULL;
    SET @previous = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: a part must not be started inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @asked TABLE (part nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY);
    DECLARE @old TABLE (round_id bigint NOT NULL PRIMARY KEY);
    DECLARE @at int, @rest nvarchar(max) = CONCAT(@parts, NCHAR(10)), @now datetime2(6), @host nvarchar(255), @pid int,
            @status nvarchar(16), @opened datetime2(6), @limit datetime2(6), @same bit = 0,
            @part_status nvarchar(16), @part_uid nvarchar(64), @part_member bigint, @started datetime2(6), @days int,
            @before bigint;
    SET @at = CHARINDEX(NCHAR(10), @rest);
    WHILE @at > 0
    BEGIN
        INSERT INTO @asked (part) VALUES (LEFT(@rest, @at - 1));
        SET @rest = SUBSTRING(@rest, @at + 1, 2147483647);
        SET @at = CHARINDEX(NCHAR(10), @rest);
    END;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC {schema}.lock_round @name;
        EXEC {schema}.worker_sign @member, @host OUTPUT, @pid OUTPUT;
        SET @now = SYSUTCDATETIME();
        SELECT TOP (1) @id = round_id FROM {schema}.[round] WITH (INDEX (round_round_name))
        WHERE round_name = @name ORDER BY round_id DESC;
        SELECT @status = status, @opened = opened_at FROM {schema}.[round] WHERE round_id = @id;
        SELECT @part_status = status, @part_uid = start_uid, @part_member = member_id, @attempt = attempt,
               @started = started_at
        FROM {schema}.round_part WHERE round_id = @id AND part = @part;
        IF NOT EXISTS (SELECT 1 FROM {schema}.round_part AS p
                       WHERE p.round_id = @id AND p.part NOT IN (SELECT a.part FROM @asked AS a))
           AND NOT EXISTS (SELECT 1 FROM @asked AS a
                           WHERE a.part NOT IN (SELECT p.part FROM {schema}.round_part AS p WHERE p.round_id = @id))
            SET @same = 1;
        SET @limit = DATEADD(millisecond, CAST(@window_ms % 1000 AS int),
                             DATEADD(second, CAST(@window_ms / 1000 AS int), @opened));
        IF @part_uid = @uid AND @part_status = N'running' AND @part_member = @member
            SET @code = N'started';  -- the first reply was lost
        ELSE
        BEGIN
            IF @id IS NULL OR @status NOT IN (N'open', N'failed')
                SET @id = NULL;
            ELSE IF @limit <= @now
            BEGIN
                UPDATE {schema}.[round] SET status = N'expired', ended_at = @now WHERE round_id = @id;
                SET @id = NULL;
            END
            ELSE IF @status = N'failed' AND (@same = 0 OR @part_status = N'succeeded')
            BEGIN
                UPDATE {schema}.[round] SET status = N'abandoned' WHERE round_id = @id;
                SET @id = NULL;
            END
            ELSE IF @same = 0
                SET @code = N'differs';
            ELSE IF @part_status = N'succeeded'
                SET @code = N'succeeded';
            ELSE IF @part_status = N'running' AND EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @part_member)
                SET @code = N'running';
            IF @code IS NULL
            BEGIN
                IF @id IS NULL
                BEGIN
                    INSERT INTO {schema}.[round] (round_name, window_ms, opened_at) VALUES (@name, @window_ms, @now);
                    SET @id = SCOPE_IDENTITY();
                    SET @opened = @now;
                    SET @attempt = 0;
                    INSERT INTO {schema}.round_part (round_id, part) SELECT @id, part FROM @asked;
                    SELECT @days = CAST(value AS int) FROM {schema}.setting WHERE name = N'history_days';
                    -- By number: these are locked until the commit, and those of other names must not be waited for.
                    INSERT INTO @old (round_id)
                    SELECT round_id FROM {schema}.[round] WITH (INDEX (round_round_name))
                    WHERE round_name = @name AND round_id < @id AND then_status NOT IN (N'pending', N'running')
                      AND ended_at < DATEADD(day, -@days, @now);
                    IF @@ROWCOUNT > 0
                        DELETE FROM {schema}.[round] WHERE round_id IN (SELECT o.round_id FROM @old AS o);
                END
                ELSE
                BEGIN
                    UPDATE {schema}.[round] SET status = N'open', ended_at = NULL, window_ms = @window_ms
                    WHERE round_id = @id;
                    IF @now = @opened  -- the clock may tick in milliseconds, but only one part begins with its round
                        SET @now = DATEADD(microsecond, 1, @now);
                END;
                SET @attempt = @attempt + 1;
                SET @started = @now;
                UPDATE {schema}.round_part
                SET status = N'running', attempt = @attempt, start_uid = @uid, member_id = @member, owner = @owner,
                    host = @host, pid = @pid, login = ORIGINAL_LOGIN(), started_at = @now, ended_at = NULL, error = NULL
                WHERE round_id = @id AND part = @part;
                EXEC {schema}.keep_then @id, @then_kind, @then_body;
                SET @code = N'started';
            END;
        END;
        IF @code <> N'started'
            SET @attempt = NULL;
        ELSE IF @attempt = 1 AND @started = @opened  -- this is what opened the round
        BEGIN
            SELECT TOP (1) @before = round_id FROM {schema}.[round] WITH (INDEX (round_round_name))
            WHERE round_name = @name AND round_id < @id ORDER BY round_id DESC;
            SELECT @previous = round_id FROM {schema}.[round]
            WHERE round_id = @before AND status = N'expired' AND ended_at = @opened;
        END;
        COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        THROW;
    END CATCH;
    IF @answer = 1
        SELECT @code AS code, @id AS id, @attempt AS attempt, @previous AS previous;
END;
GO

-- Gives back a continuation that this member claimed; returns 1 when there was one. May be repeated.
IF OBJECT_ID(N'{schema}.return_then') IS NULL EXEC (N'CREATE PROCEDURE {schema}.return_then AS RETURN 0');
GO
ALTER PROCEDURE {schema}.return_then @member bigint, @uid nvarchar(64), @answer bit = 0
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @count int = 0, @round bigint;
    DECLARE @then TABLE (round_id bigint NOT NULL);
    INSERT INTO @then (round_id)
    SELECT round_id FROM {schema}.[round] WITH (INDEX (round_then)) WHERE then_status = N'running';
    SELECT @round = r.round_id FROM @then AS f JOIN {schema}.[round] AS r ON r.round_id = f.round_id
    WHERE r.then_member = @member AND r.then_uid = @uid
      AND EXISTS (SELECT 1 FROM {schema}.member AS m WHERE m.member_id = @member AND m.login = ORIGINAL_LOGIN());
    UPDATE {schema}.[round] SET then_status = N'pending', then_uid = NULL
    WHERE round_id = @round AND then_status = N'running' AND then_member = @member AND then_uid = @uid;
    SET @count = @@ROWCOUNT;
    IF @answer = 1
        SELECT @count AS returned;
    RETURN @count;
END;
GO

-- Ends a part: N'succeeded' or N'failed'. @code:
--   succeeded  it counts        failed  as was asked for
--   late       it took longer than the window, or the round is over: it has failed
--   lost       it was given up meanwhile, and is not this member's any more
-- Where it was the last to succeed @is_last says so, and with @then_attempt the continuation is this member's to run.
-- May be repeated with the same @uid; failed after succeeded gives the continuation back, should it be ours.
-- Who says @then_kind N'session' knows what to run, and gets the continuation whatever its kind.
IF OBJECT_ID(N'{schema}.end_part') IS NULL EXEC (N'CREATE PROCEDURE {schema}.end_part AS RETURN 0');
GO
ALTER PROCEDURE {schema}.end_part
    @member bigint, @name nvarchar(400), @part nvarchar(400), @uid nvarchar(64), @outcome nvarchar(16),
    @error nvarchar(max), @owner nvarchar(255), @then_kind nvarchar(8) = NULL, @then_body nvarchar(max) = NULL,
    @code nvarchar(16) = NULL OUTPUT,
    @id bigint = NULL OUTPUT, @is_last bit = NULL OUTPUT, @round_status nvarchar(16) = NULL OUTPUT, @answer bit = 0
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET @code = NULL;
    SET @id = NULL;
    SET @is_last = 0;
    SET @round_status = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: a part must not be ended inside an open transaction; commit first', 1;
    IF @outcome IS NULL OR @outcome NOT IN (N'succeeded', N'failed')
        THROW 50000, N'sqlsem: a part ends as succeeded or failed', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @now datetime2(6), @limit datetime2(6), @status nvarchar(16), @part_member bigint, @part_error nvarchar(max),
            @known int, @then_status nvarchar(16), @kind nvarchar(8), @attempt int, @body nvarchar(max);
    DECLARE @rounds TABLE (round_id bigint NOT NULL PRIMARY KEY);
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC {schema}.lock_round @name;
        SET @now = SYSUTCDATETIME();
        INSERT INTO @rounds (round_id)
        SELECT round_id FROM {schema}.[round] WITH (INDEX (round_round_name)) WHERE round_name = @name;
        SELECT TOP (1) @id = p.round_id, @status = p.status, @part_member = p.member_id, @part_error = p.error
        FROM @rounds AS r JOIN {schema}.round_part AS p ON p.round_id = r.round_id
        WHERE p.part = @part AND p.start_uid = @uid ORDER BY p.round_id DESC;
        SELECT @round_status = status,
               @limit = DATEADD(millisecond, CAST(window_ms % 1000 AS int),
                                DATEADD(second, CAST(window_ms / 1000 AS int), opened_at))
        FROM {schema}.[round] WHERE round_id = @id;
        EXEC @known = {schema}.give_sign @member;  -- the continuation may come with it
        IF @known = 0 OR @id IS NULL OR @part_member <> @member
           OR (@status = N'failed' AND @part_error = N'its process died')
            SET @code = N'lost';
        ELSE IF @status = N'running'
        BEGIN
            SET @code = CASE WHEN @outcome = N'succeeded' AND (@round_status <> N'open' OR @limit < @now)
                             THEN N'late' ELSE @outcome END;
            UPDATE {schema}.round_part
            SET status = CASE @code WHEN N'succeeded' THEN @code ELSE N'failed' END, ended_at = @now,
                error = CASE @code WHEN N'late' THEN N'ended after the window'
                                   WHEN N'failed' THEN COALESCE(@error, N'it said nothing') END
            WHERE round_id = @id AND part = @part;
            EXEC {schema}.keep_then @id, @then_kind, @then_body;
            IF @round_status = N'open' AND NOT EXISTS (SELECT 1 FROM {schema}.round_part
                                                       WHERE round_id = @id AND status IN (N'expected', N'running'))
            BEGIN
                IF EXISTS (SELECT 1 FROM {schema}.round_part WHERE round_id = @id AND status = N'failed')
                    UPDATE {schema}.[round] SET status = N'failed', ended_at = @now WHERE round_id = @id;
                ELSE
                BEGIN
                    UPDATE {schema}.round_part SET is_last = 1 WHERE round_id = @id AND part = @part;
                    SELECT @kind = COALESCE(then_kind, @then_kind) FROM {schema}.[round] WHERE round_id = @id;
                    -- What only the process knows that declared it waits for that.
                    SET @then_status = CASE WHEN @kind IS NULL THEN N'none'
                                            WHEN @kind IN (N'local', N'session') AND @then_kind IS NULL THEN N'pending'
                                            ELSE N'running' END;
                    UPDATE {schema}.[round]
                    SET status = N'succeeded', ended_at = @now, then_kind = @kind, then_status = @then_status
                    WHERE round_id = @id;
                    IF @then_status = N'running'
                        UPDATE {schema}.[round]
                        SET then_attempt = then_attempt + 1, then_uid = @uid, then_member = @member,
                            then_owner = @owner, then_started = @now
                        WHERE round_id = @id;
                END;
            END;
        END
        ELSE
        BEGIN
            SET @code = CASE WHEN @part_error = N'ended after the window' THEN N'late' ELSE @status END;
            IF @status = N'succeeded' AND @outcome = N'failed'
                UPDATE {schema}.[round] SET then_status = N'pending', then_uid = NULL
                WHERE round_id = @id AND then_status = N'running' AND then_member = @member AND then_uid = @uid;
        END;
        IF @code <> N'lost'
        BEGIN
            SELECT @is_last = is_last FROM {schema}.round_part WHERE round_id = @id AND part = @part;
            SET @kind = NULL;
            SELECT @round_status = status,
                   @attempt = CASE WHEN @is_last = 1 AND then_status = N'running' AND then_member = @member
                                        AND then_uid = @uid THEN then_attempt END,
                   @kind = then_kind, @body = then_body
            FROM {schema}.[round] WHERE round_id = @id;
        END;
        COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        THROW;
    END CATCH;
    IF @answer = 1
        SELECT @code AS code, @id AS id, @is_last AS is_last, @round_status AS round_status, @attempt AS then_attempt,
               @kind AS kind, @body AS body;
END;
GO

-- Claims a continuation that nobody runs: of a name's oldest such round, or of one round, then also one that failed. No
-- row, and @id NULL, where there is none. @own: who asks has something of its own to run for those of kind local and
-- session. May be repeated with the same @uid.
IF OBJECT_ID(N'{schema}.claim_then') IS NULL EXEC (N'CREATE PROCEDURE {schema}.claim_then AS RETURN 0');
GO
ALTER PROCEDURE {schema}.claim_then
    @member bigint, @name nvarchar(400), @round bigint, @owner nvarchar(255), @uid nvarchar(64), @own bit,
    @id bigint = NULL OUTPUT, @answer bit = 0
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET @id = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: a round must not be resumed inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @lock nvarchar(400) = @name, @known int;
    DECLARE @rounds TABLE (round_id bigint NOT NULL PRIMARY KEY);
    IF @round IS NOT NULL
        SELECT @lock = round_name FROM {schema}.[round] WHERE round_id = @round;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC {schema}.lock_round @lock;
        EXEC @known = {schema}.give_sign @member;
        IF @known = 0
            THROW 50005, N'sqlsem: this member is not known here (any more), or is another login''s; enrol again', 1;
        IF @round IS NULL
            INSERT INTO @rounds (round_id)
            SELECT round_id FROM {schema}.[round] WITH (INDEX (round_then))
            WHERE then_status IN (N'pending', N'running') AND round_name = @name;
        ELSE
            INSERT INTO @rounds (round_id) VALUES (@round);
        SELECT @id = r.round_id FROM @rounds AS f JOIN {schema}.[round] AS r ON r.round_id = f.round_id
        WHERE r.then_status = N'running' AND r.then_member = @member AND r.then_uid = @uid;
        IF @id IS NULL
        BEGIN
            SELECT TOP (1) @id = r.round_id FROM @rounds AS f JOIN {schema}.[round] AS r ON r.round_id = f.round_id
            WHERE (r.then_status = N'pending' OR (@round IS NOT NULL AND r.then_status = N'failed'))
              AND (@own = 1 OR r.then_kind NOT IN (N'local', N'session'))
            ORDER BY r.round_id;
            UPDATE {schema}.[round]
            SET then_status = N'running', then_attempt = then_attempt + 1, then_uid = @uid, then_member = @member,
                then_owner = @owner, then_started = SYSUTCDATETIME(), then_ended = NULL, then_error = NULL
            WHERE round_id = @id;
        END;
        COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        THROW;
    END CATCH;
    IF @answer = 1
        SELECT round_id, round_name, then_attempt, then_kind, then_body FROM {schema}.[round] WHERE round_id = @id;
END;
GO

-- Ends a continuation: it failed where there is an error. Returns 1, or 0 when it was given up meanwhile. May be
-- repeated.
IF OBJECT_ID(N'{schema}.end_then') IS NULL EXEC (N'CREATE PROCEDURE {schema}.end_then AS RETURN 0');
GO
ALTER PROCEDURE {schema}.end_then @member bigint, @round bigint, @attempt int, @error nvarchar(max) = NULL, @answer bit = 0
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @done int = 0;
    UPDATE {schema}.[round]
    SET then_status = CASE WHEN @error IS NULL THEN N'finished' ELSE N'failed' END, then_ended = SYSUTCDATETIME(),
        then_error = @error
    WHERE round_id = @round AND then_status = N'running' AND then_attempt = @attempt AND then_member = @member
      AND EXISTS (SELECT 1 FROM {schema}.member AS m WHERE m.member_id = @member AND m.login = ORIGINAL_LOGIN());
    SET @done = @@ROWCOUNT;
    IF @done = 0
        SELECT @done = 1 FROM {schema}.[round]
        WHERE round_id = @round AND then_status IN (N'finished', N'failed') AND then_attempt = @attempt
          AND then_member = @member;
    IF @answer = 1
        SELECT @done AS done;
    RETURN @done;
END;
GO


-- What people look at ----------------------------------------------------------------------------------------------

-- Rounds, newest first, one row a part.
IF OBJECT_ID(N'{schema}.list_rounds') IS NULL EXEC (N'CREATE PROCEDURE {schema}.list_rounds AS RETURN 0');
GO
ALTER PROCEDURE {schema}.list_rounds @name nvarchar(400) = NULL, @round bigint = NULL, @most int = 20
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @shown TABLE (round_id bigint NOT NULL PRIMARY KEY);
    DECLARE @now datetime2(6), @all int;
    EXEC @all = {schema}.sees_all;
    IF @round IS NOT NULL
        INSERT INTO @shown (round_id) SELECT round_id FROM {schema}.[round] WHERE round_id = @round;
    ELSE
        INSERT INTO @shown (round_id)
        SELECT TOP (@most) round_id FROM {schema}.[round] WITH (INDEX (round_round_name))
        WHERE @name IS NULL OR round_name = @name ORDER BY round_id DESC;
    SET @now = SYSUTCDATETIME();
    SELECT r.round_id, r.round_name, r.status, r.window_ms / CAST(1000 AS float) AS window_seconds, r.opened_at,
           r.ended_at,
           DATEDIFF_BIG(microsecond, r.opened_at, COALESCE(r.ended_at, @now)) / CAST(1000000 AS float) AS seconds,
           r.then_status, r.then_kind, CASE WHEN @all = 1 OR r.opened_by = ORIGINAL_LOGIN() THEN r.then_body END AS then_body,
           r.then_attempt, r.then_owner, r.then_started, r.then_ended,
           DATEDIFF_BIG(microsecond, r.then_started, COALESCE(r.then_ended, @now)) / CAST(1000000 AS float)
               AS then_seconds,
           r.then_error, p.part, p.status AS part_status, p.is_last, p.attempt, p.member_id, p.owner, p.host, p.pid,
           p.started_at, p.ended_at AS part_ended,
           DATEDIFF_BIG(microsecond, p.started_at, COALESCE(p.ended_at, @now)) / CAST(1000000 AS float) AS part_seconds,
           p.error,
           CASE WHEN p.status = N'running' AND b.missing = 1 THEN
               DATEDIFF_BIG(microsecond, CASE WHEN m.lease_until IS NOT NULL THEN m.lease_until
                                              ELSE COALESCE(m.missing_since, m.seen_at, p.started_at) END, @now)
               / CAST(1000000 AS float) END AS missing_for, r.opened_by, p.login
    FROM @shown AS s JOIN {schema}.[round] AS r ON r.round_id = s.round_id
    JOIN {schema}.round_part AS p ON p.round_id = s.round_id
    LEFT JOIN {schema}.member AS m ON m.member_id = p.member_id
    CROSS APPLY (SELECT CASE WHEN m.member_id IS NULL THEN 1
                             WHEN m.lease_until IS NOT NULL THEN CASE WHEN m.lease_until < @now THEN 1 ELSE 0 END
                             WHEN p.status <> N'running' THEN 0
                             WHEN APPLOCK_MODE(@principal, CONCAT(N'sqlsem.{schema}.beacon.', m.beacon), N'Session')
                                  <> N'NoLock' THEN 0
                             ELSE APPLOCK_TEST(@principal, CONCAT(N'sqlsem.{schema}.beacon.', m.beacon), N'Shared',
                                               N'Session') END AS missing) AS b
    ORDER BY r.round_id DESC, p.part;
END;
GO


-- For sessions -----------------------------------------------------------------------------------------------------

-- Starts a part for this session: a row with the number of the round. @parts names all parts of the round, with commas
-- in between or as a JSON array. The part has failed when the session ends before the part.
IF OBJECT_ID(N'{schema}.round_part_start') IS NULL EXEC (N'CREATE PROCEDURE {schema}.round_part_start AS RETURN 0');
GO
ALTER PROCEDURE {schema}.round_part_start
    @name nvarchar(400), @part nvarchar(400), @parts nvarchar(max), @window_seconds float,
    @round_id bigint = NULL OUTPUT
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET @round_id = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: round_part_start must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @names TABLE (part nvarchar(400) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY);
    DECLARE @given TABLE (ordinal int NOT NULL PRIMARY KEY, part nvarchar(400) COLLATE Latin1_General_100_BIN2 NULL);
    DECLARE @at int, @ordinal int = 0, @most int, @rest nvarchar(max), @one nvarchar(400),
            @lines nvarchar(max) = N'', @member bigint, @owner nvarchar(400),
            @uid nvarchar(64) = CONVERT(nvarchar(64), NEWID()), @window_ms bigint, @code nvarchar(16), @attempt int,
            @previous bigint, @told nvarchar(1000), @message nvarchar(2000);
    EXEC {schema}.check_name N'round', @name;
    EXEC {schema}.check_name N'part', @part;
    IF NOT (@window_seconds >= 0.001 AND @window_seconds <= 315360000) OR @window_seconds IS NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: window_seconds must be above 0 and at most ten years, not ',
            COALESCE(CONVERT(nvarchar(40), @window_seconds), N'NULL'));
        EXEC {schema}.refuse 50000, @message;
    END;
    SET @window_ms = CAST(@window_seconds * 1000 AS bigint);
    SET @rest = LTRIM(RTRIM(COALESCE(@parts, N'')));
    IF LEFT(@rest, 1) = N'['
        INSERT INTO @given (ordinal, part) SELECT CAST([key] AS int) + 1, LEFT(value, 400) FROM OPENJSON(@rest);
    ELSE IF @rest <> N''
    BEGIN
        SET @rest = CONCAT(@rest, N',');
        SET @at = CHARINDEX(N',', @rest);
        WHILE @at > 0
        BEGIN
            SET @ordinal = @ordinal + 1;
            INSERT INTO @given (ordinal, part) VALUES (@ordinal, LEFT(LTRIM(RTRIM(LEFT(@rest, @at - 1))), 400));
            SET @rest = SUBSTRING(@rest, @at + 1, 2147483647);
            SET @at = CHARINDEX(N',', @rest);
        END;
    END;
    SELECT @most = COUNT(*) FROM @given;
    SET @ordinal = 0;
    WHILE @ordinal < @most
    BEGIN
        SET @ordinal = @ordinal + 1;
        SELECT @one = part FROM @given WHERE ordinal = @ordinal;
        EXEC {schema}.check_name N'part', @one;
        IF EXISTS (SELECT 1 FROM @names WHERE part = @one)
        BEGIN
            SET @message = CONCAT(N'sqlsem: round ''', @name, N''' names part ''', @one,
                N''' twice; each part is one job');
            EXEC {schema}.refuse 50000, @message;
        END;
        INSERT INTO @names (part) VALUES (@one);
        SET @lines = CONCAT(@lines, CASE WHEN @lines <> N'' THEN NCHAR(10) END, @one);
    END;
    IF @lines = N''
        SET @message = CONCAT(N'sqlsem: round ''', @name, N''' has no parts; name all of them in @parts');
    ELSE IF NOT EXISTS (SELECT 1 FROM @names WHERE part = @part)
        SET @message = CONCAT(N'sqlsem: round ''', @name, N''' has no part ''', @part, N'''; it has ',
            REPLACE(LEFT(@lines, 1000), NCHAR(10), N', '));
    IF @message IS NOT NULL
        EXEC {schema}.refuse 50000, @message;

    EXEC {schema}.session_name @owner OUTPUT;
    EXEC {schema}.session_member NULL, @member OUTPUT;
    EXEC {schema}.recover_rounds @name, @member, @tell = 1;
    EXEC {schema}.start_part @member, @name, @part, @lines, @window_ms, @owner, @uid, NULL, NULL, @code OUTPUT,
        @round_id OUTPUT, @attempt OUTPUT, @previous OUTPUT;
    IF @code = N'running'
        SELECT @message = CONCAT(N'sqlsem: part ''', @part, N''' of round ''', @name, N''' runs already (', host, N':',
            pid, N' since ', CONVERT(nvarchar(30), started_at, 126), N'); wait until it has ended')
        FROM {schema}.round_part WHERE round_id = @round_id AND part = @part;
    ELSE IF @code = N'succeeded'
    BEGIN
        EXEC {schema}.parts_in @round_id, N'expected running failed', @told OUTPUT;
        SET @message = CONCAT(N'sqlsem: part ''', @part, N''' has succeeded already in round ', @round_id, N' of ''',
            @name, N''', which waits for ', @told,
            N'; the next round begins when these have ended or its window is over');
    END
    ELSE IF @code = N'differs'
    BEGIN
        EXEC {schema}.parts_in @round_id, N'expected running failed succeeded', @told OUTPUT;
        SET @message = CONCAT(N'sqlsem: round ', @round_id, N' of ''', @name, N''' is open with other parts: ', @told,
            N'; declare the same in all of them');
    END;
    IF @message IS NOT NULL
        EXEC {schema}.refuse 50007, @message;
    IF @previous IS NOT NULL
    BEGIN
        EXEC {schema}.parts_in @previous, N'expected running failed', @told OUTPUT;
        SET @message = CONCAT(N'sqlsem: round ', @previous, N' of ''', @name, N''' has expired; it lacked ', @told);
        RAISERROR (N'%s', 10, 1, @message) WITH NOWAIT;
    END;
    SELECT @round_id AS round_id;
END;
GO

IF OBJECT_ID(N'{schema}.session_part_end') IS NULL EXEC (N'CREATE PROCEDURE {schema}.session_part_end AS RETURN 0');
GO
ALTER PROCEDURE {schema}.session_part_end
    @name nvarchar(400), @part nvarchar(400), @outcome nvarchar(16), @error nvarchar(max), @code nvarchar(16) OUTPUT,
    @id bigint OUTPUT, @is_last bit OUTPUT, @round_status nvarchar(16) OUTPUT
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @member bigint, @owner nvarchar(400), @uid nvarchar(64), @message nvarchar(1000);
    DECLARE @rounds TABLE (round_id bigint NOT NULL PRIMARY KEY);
    EXEC {schema}.check_name N'round', @name;
    EXEC {schema}.check_name N'part', @part;
    EXEC {schema}.session_name @owner OUTPUT;
    EXEC {schema}.session_member NULL, @member OUTPUT;
    EXEC {schema}.recover_rounds @name, @member, @tell = 1;
    INSERT INTO @rounds (round_id)
    SELECT round_id FROM {schema}.[round] WITH (INDEX (round_round_name)) WHERE round_name = @name;
    SELECT TOP (1) @uid = p.start_uid FROM @rounds AS r JOIN {schema}.round_part AS p ON p.round_id = r.round_id
    WHERE p.part = @part AND p.member_id = @member AND p.status = N'running' ORDER BY r.round_id DESC;
    IF @uid IS NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: this session does not run part ''', @part, N''' of round ''', @name,
            N'''; call round_part_start before, in the same session');
        EXEC {schema}.refuse 50004, @message;
    END;
    EXEC {schema}.end_part @member, @name, @part, @uid, @outcome, @error, @owner, N'session', NULL, @code OUTPUT,
        @id OUTPUT, @is_last OUTPUT, @round_status OUTPUT;
END;
GO

-- This session's part has succeeded. With is_last = 1 it was the last, and the session has the continuation to run, and
-- then to call round_continued. outcome: succeeded; late, it took longer than the window and does not count; failed, it
-- was the last to end, but others have failed. A row, and OUTPUT parameters.
IF OBJECT_ID(N'{schema}.round_part_done') IS NULL EXEC (N'CREATE PROCEDURE {schema}.round_part_done AS RETURN 0');
GO
ALTER PROCEDURE {schema}.round_part_done
    @name nvarchar(400), @part nvarchar(400), @is_last bit = NULL OUTPUT, @outcome nvarchar(16) = NULL OUTPUT
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: round_part_done must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @id bigint, @status nvarchar(16), @told nvarchar(1000), @message nvarchar(2000);
    EXEC {schema}.session_part_end @name, @part, N'succeeded', NULL, @outcome OUTPUT, @id OUTPUT,
        @is_last OUTPUT, @status OUTPUT;
    IF @outcome = N'succeeded' AND @status = N'failed'
    BEGIN
        SET @outcome = N'failed';
        EXEC {schema}.parts_in @id, N'failed', @told OUTPUT;
        SET @message = CONCAT(N'sqlsem: round ', @id, N' of ''', @name, N''' has failed: ', @told,
            N'; run these parts again');
    END
    ELSE IF @outcome = N'late'
        SET @message = CONCAT(N'sqlsem: part ''', @part, N''' of round ''', @name,
            N''' has ended after the window and does not count');
    IF @message IS NOT NULL
        RAISERROR (N'%s', 10, 1, @message) WITH NOWAIT;
    SELECT CAST(@is_last AS int) AS is_last, @outcome AS outcome;
END;
GO

-- This session's part has failed. (is_last is always 0.)
IF OBJECT_ID(N'{schema}.round_part_failed') IS NULL EXEC (N'CREATE PROCEDURE {schema}.round_part_failed AS RETURN 0');
GO
ALTER PROCEDURE {schema}.round_part_failed @name nvarchar(400), @part nvarchar(400), @error nvarchar(max) = NULL
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: round_part_failed must not be called inside an open transaction; roll back first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @id bigint, @status nvarchar(16), @is_last bit, @outcome nvarchar(16);
    EXEC {schema}.session_part_end @name, @part, N'failed', @error, @outcome OUTPUT, @id OUTPUT,
        @is_last OUTPUT, @status OUTPUT;
    SELECT CAST(@is_last AS int) AS is_last, @outcome AS outcome;
END;
GO

-- Takes over a continuation that nobody runs: is_last is 1 when this session has one to run now, else 0.
IF OBJECT_ID(N'{schema}.round_resume') IS NULL EXEC (N'CREATE PROCEDURE {schema}.round_resume AS RETURN 0');
GO
ALTER PROCEDURE {schema}.round_resume @name nvarchar(400), @is_last bit = NULL OUTPUT
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: round_resume must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @member bigint, @owner nvarchar(400), @id bigint, @uid nvarchar(64) = CONVERT(nvarchar(64), NEWID());
    EXEC {schema}.check_name N'round', @name;
    EXEC {schema}.session_name @owner OUTPUT;
    EXEC {schema}.session_member NULL, @member OUTPUT;
    EXEC {schema}.recover_rounds @name, @member, @tell = 1;
    EXEC {schema}.claim_then @member, @name, NULL, @owner, @uid, 1, @id OUTPUT;
    SET @is_last = CASE WHEN @id IS NULL THEN 0 ELSE 1 END;
    SELECT CAST(@is_last AS int) AS is_last;
END;
GO

-- The continuation that this session has to run (of several: that it was given last) has ended: well, or with an error.
-- A row with the number of the round.
IF OBJECT_ID(N'{schema}.round_continued') IS NULL EXEC (N'CREATE PROCEDURE {schema}.round_continued AS RETURN 0');
GO
ALTER PROCEDURE {schema}.round_continued
    @name nvarchar(400), @error nvarchar(max) = NULL, @round_id bigint = NULL OUTPUT
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: round_continued must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @member bigint, @attempt int, @done int = 0, @message nvarchar(1000);
    DECLARE @then TABLE (round_id bigint NOT NULL);
    SET @round_id = NULL;
    EXEC {schema}.check_name N'round', @name;
    EXEC {schema}.session_member NULL, @member OUTPUT;
    INSERT INTO @then (round_id)
    SELECT round_id FROM {schema}.[round] WITH (INDEX (round_then))
    WHERE then_status = N'running' AND round_name = @name;
    SELECT TOP (1) @round_id = r.round_id, @attempt = r.then_attempt
    FROM @then AS f JOIN {schema}.[round] AS r ON r.round_id = f.round_id
    WHERE r.then_member = @member ORDER BY r.then_started DESC, r.round_id DESC;
    IF @round_id IS NOT NULL
        EXEC @done = {schema}.end_then @member, @round_id, @attempt, @error;
    IF @done = 0
    BEGIN
        SET @message = CONCAT(N'sqlsem: this session has no continuation of round ''', @name,
            N''' to run; round_part_done, or round_resume, says is_last = 1 to the one that has');
        EXEC {schema}.refuse 50004, @message;
    END;
    SELECT @round_id AS round_id;
END;
GO
