-- sqlsem, the batches, for SQL Server. May be run again at any time, after tasks.sql.
--
-- One application lock (N'batch.sqlsem.{schema}.' and the name, Transaction) serializes all decisions about the batches
-- of a name. A procedure takes it in a statement of its own before it reads anything. So if several parts end at the
-- same instant, exactly one of them is the last. A part, and the callback, belongs to the member that runs it. When the
-- member is gone, recover_batches marks the part as failed and the callback as pending.
--
-- Locks: as in tasks.sql, a statement reads an index without the rows, or reads and writes rows by their number.
-- Errors as in routines.sql, and 50007: the part cannot be started now.

-- Serialize the decisions about one name until the transaction ends.
CREATE OR ALTER PROCEDURE {schema}.lock_batch @name nvarchar(400), @patience int = 1000 AS {begin_inner}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @code int, @lock nvarchar(255) = LEFT(CONCAT(N'batch.sqlsem.{schema}.', @name), 255);
    EXEC @code = sys.sp_getapplock @Resource = @lock, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
        @LockTimeout = @patience, @DbPrincipal = @principal;
    IF @code < 0
        THROW 50002, N'sqlsem: busy: another session keeps the batches of this name locked in an open transaction', 1;
END;

-- Store the callback that the last part starts. For a login that may not put tasks, store only that there is a
-- callback, and leave the stored text of other logins: a stored callback may run with the rights of the login that
-- resumes the batch.
CREATE OR ALTER PROCEDURE {schema}.store_callback @batch bigint, @kind nvarchar(8), @body nvarchar(max) AS {begin_inner}
    IF @kind IS NULL OR @kind = N'session'
        RETURN 0;
    IF @kind NOT IN (N'sql', N'shell', N'call', N'local')
        THROW 50000, N'sqlsem: a callback of this kind is unknown; it is sql, shell, call, local or session', 1;
    IF COALESCE(IS_MEMBER(N'{schema}_putter'), 0) = 0
       AND COALESCE(IS_MEMBER(N'db_owner'), 0) = 0 AND COALESCE(IS_SRVROLEMEMBER(N'sysadmin'), 0) = 0
        UPDATE {schema}.batch
        SET callback_kept_by = CASE WHEN callback_kind IS NULL THEN ORIGINAL_LOGIN() ELSE callback_kept_by END,
            callback_kind = COALESCE(callback_kind, N'local')
        WHERE batch_id = @batch;
    ELSE
        UPDATE {schema}.batch SET callback_kind = @kind, callback_body = @body, callback_kept_by = ORIGINAL_LOGIN() WHERE batch_id = @batch;
END;

-- Return 1 if this login may run and end the callback of a batch. Putters, operators and the login that stored the
-- callback may. Only a program or a session has the callbacks of kind local and session: the caller must be one that
-- does (@own). Such a callback may also be run by the logins that run parts of the batch.
CREATE OR ALTER PROCEDURE {schema}.may_run_callback @batch bigint, @own bit AS {begin_inner}
    DECLARE @kind nvarchar(8), @kept_by nvarchar(128), @opened_by nvarchar(128);
    SELECT @kind = COALESCE(callback_kind, N'session'), @kept_by = callback_kept_by, @opened_by = opened_by
    FROM {schema}.batch WHERE batch_id = @batch;
    IF @kind IS NULL OR (@own = 0 AND @kind IN (N'local', N'session'))
        RETURN 0;
    IF IS_MEMBER(N'{schema}_putter') = 1 OR IS_MEMBER(N'{schema}_operator') = 1 OR IS_MEMBER(N'db_owner') = 1
       OR IS_SRVROLEMEMBER(N'sysadmin') = 1 OR @kept_by = ORIGINAL_LOGIN()
        RETURN 1;
    IF @kind IN (N'local', N'session')
       AND (@opened_by = ORIGINAL_LOGIN()
            OR EXISTS (SELECT 1 FROM {schema}.batch_part WHERE batch_id = @batch AND login = ORIGINAL_LOGIN()))
        RETURN 1;
    RETURN 0;
END;

-- Return the names of a batch's parts in some states, for messages: a, b (why).
CREATE OR ALTER PROCEDURE {schema}.parts_in @batch bigint, @states nvarchar(100), @part_list nvarchar(1000) OUTPUT
AS {begin_inner}
    DECLARE @part nvarchar(255) = N'', @error nvarchar(200), @count int = 1;
    SET @part_list = N'';
    WHILE @count = 1
    BEGIN
        SET @count = 0;
        SELECT TOP (1) @count = 1, @part = part, @error = LEFT(error, 200) FROM {schema}.batch_part
        WHERE batch_id = @batch AND part > @part COLLATE Latin1_General_100_BIN2
          AND @states LIKE CONCAT(N'%', status, N'%')
        ORDER BY part;
        IF @count = 1
            SET @part_list = LEFT(CONCAT(@part_list, CASE WHEN @part_list <> N'' THEN N', ' END, @part, N' (' + @error + N')'), 1000);
    END;
END;

-- Test the members that run parts or callbacks of the batches of a name (NULL: of all names), except @mine. Parts of a
-- dead member fail, and its callbacks become pending again. With @answer return a row for each batch in which parts
-- have failed; with @tell send a message for each to the session.
CREATE OR ALTER PROCEDURE {schema}.recover_batches
    @name nvarchar(400) = NULL, @mine bigint = NULL, @answer bit = 0, @tell bit = 0 AS {begin_try_own}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: recover_batches must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @part TABLE (batch_id bigint NOT NULL, part nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL);
    DECLARE @callback TABLE (batch_id bigint NOT NULL);
    DECLARE @gone TABLE (member_id bigint NOT NULL PRIMARY KEY);
    DECLARE @found TABLE (batch_id bigint NOT NULL, batch_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
                          member_id bigint NOT NULL);
    DECLARE @dead TABLE (batch_id bigint NOT NULL PRIMARY KEY);
    DECLARE @member bigint = -1, @before bigint, @batch bigint = 0, @batch_before bigint, @batch_name nvarchar(255),
            @part_list nvarchar(1000), @message nvarchar(2000);
    INSERT INTO @part (batch_id, part)
    SELECT batch_id, part FROM {schema}.batch_part WITH (INDEX (batch_part_status)) WHERE status = N'running';
    INSERT INTO @callback (batch_id)
    SELECT batch_id FROM {schema}.batch WITH (INDEX (batch_callback)) WHERE callback_status = N'running';
    INSERT INTO @found (batch_id, batch_name, member_id)
    SELECT r.batch_id, r.batch_name, p.member_id
    FROM @part AS f JOIN {schema}.batch_part AS p ON p.batch_id = f.batch_id AND p.part = f.part
    JOIN {schema}.batch AS r ON r.batch_id = f.batch_id
    WHERE p.status = N'running' AND (@name IS NULL OR r.batch_name = @name)
    UNION
    SELECT r.batch_id, r.batch_name, r.callback_member FROM @callback AS f JOIN {schema}.batch AS r ON r.batch_id = f.batch_id
    WHERE r.callback_status = N'running' AND (@name IS NULL OR r.batch_name = @name);
    WHILE 1 = 1
    BEGIN
        SET @before = @member;
        SELECT TOP (1) @member = member_id FROM @found WHERE member_id > @before ORDER BY member_id;
        IF @member = @before
            BREAK;
        EXEC {schema}.check_liveness @member, @mine;
        -- (A removed member does not return, and its number is never used again. So this decision stays true.)
        IF NOT EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @member)
            INSERT INTO @gone (member_id) VALUES (@member);
    END;
    WHILE 1 = 1
    BEGIN
        SET @batch_before = @batch;
        SELECT TOP (1) @batch = f.batch_id, @batch_name = f.batch_name FROM @found AS f
        WHERE f.batch_id > @batch_before AND f.member_id IN (SELECT g.member_id FROM @gone AS g)
        ORDER BY f.batch_id;
        IF @batch = @batch_before
            BREAK;
        BEGIN TRY
            BEGIN TRANSACTION;
            EXEC {schema}.lock_batch @batch_name;
            UPDATE {schema}.batch SET callback_status = N'pending', callback_uid = NULL
            WHERE batch_id = @batch AND callback_status = N'running'
              AND callback_member IN (SELECT g.member_id FROM @gone AS g);
            UPDATE {schema}.batch_part SET status = N'failed', ended_at = SYSUTCDATETIME(), error = N'its process died'
            WHERE batch_id = @batch AND status = N'running'
              AND member_id IN (SELECT g.member_id FROM @gone AS g);
            IF @@ROWCOUNT > 0
            BEGIN
                INSERT INTO @dead (batch_id) VALUES (@batch);
                UPDATE {schema}.batch SET status = N'failed', ended_at = SYSUTCDATETIME()
                WHERE batch_id = @batch AND status = N'open'
                  AND NOT EXISTS (SELECT 1 FROM {schema}.batch_part AS p
                                  WHERE p.batch_id = @batch AND p.status IN (N'expected', N'running'));
            END;
            COMMIT TRANSACTION;
        {end_try_rollback}
        -- Report it now: if the next batch is busy and this call fails, no later call would report this one.
        IF @tell = 1 AND EXISTS (SELECT 1 FROM @dead WHERE batch_id = @batch)
        BEGIN
            EXEC {schema}.parts_in @batch, N'failed', @part_list OUTPUT;
            SET @message = CONCAT(N'sqlsem: batch ', @batch, N' of ''', @batch_name, N''' has failed parts: ', @part_list,
                N'; run these parts again');
            RAISERROR (N'%s', 10, 1, @message) WITH NOWAIT;
        END;
    END;
    IF @answer = 1
        SELECT batch_id FROM @dead ORDER BY batch_id;
{end_try_own}

-- Start a part, in the newest batch of the name or in a new one. @parts: the names of all parts, separated by LF.
-- @code:
--   started     @id is the batch, @attempt the part's attempt; @previous: the batch that this start let expire, if any
--   running     refused: the part runs already, and its process is alive
--   in_callback refused: the part was the last one; the process that runs the callback is missing, but its grace is
--               not over
--   differs     refused: the batch has other parts
-- A start joins the newest batch of the name. It begins a new batch if there is none, or if the newest one has
-- succeeded, was abandoned, or is older than its window. A start repeats a part that has failed, and also a part that
-- has succeeded: the batch then waits for it.
-- After a batch has succeeded, its last part can join it once more while the callback has not finished, and no living
-- process runs the callback: the process that ran it has failed, and the repeated part continues the batch.
-- May be repeated with the same @uid.
CREATE OR ALTER PROCEDURE {schema}.start_part
    @member bigint, @name nvarchar(400), @part nvarchar(400), @parts nvarchar(max), @window_ms bigint,
    @owner nvarchar(255), @uid nvarchar(64), @callback_kind nvarchar(8) = NULL, @callback_body nvarchar(max) = NULL,
    @code nvarchar(16) = NULL OUTPUT,
    @id bigint = NULL OUTPUT, @attempt int = NULL OUTPUT, @previous bigint = NULL OUTPUT, @answer bit = 0 AS {begin_try_own}
    SET @code = NULL;
    SET @id = NULL;
    SET @attempt = NULL;
    SET @previous = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: a part must not be started inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @part_names TABLE (part nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY);
    DECLARE @old TABLE (batch_id bigint NOT NULL PRIMARY KEY);
    DECLARE @at int, @rest nvarchar(max) = CONCAT(@parts, NCHAR(10)), @now datetime2(6), @host nvarchar(255), @pid int,
            @status nvarchar(16), @opened datetime2(6), @limit datetime2(6), @same bit = 0, @joins bit = 0, @asked_ms bigint = @window_ms,
            @part_status nvarchar(16), @part_uid nvarchar(64), @part_member bigint, @started datetime2(6), @days int,
            @before bigint, @part_name nvarchar(400), @is_last bit, @callback_status nvarchar(16), @callback_member bigint, @opened_by nvarchar(128),
            @own_ms bigint, @missing bigint, @count int = 0, @message nvarchar(2000);
    EXEC {schema}.check_name N'batch', @name;
    EXEC {schema}.check_name N'part', @part;
    IF @window_ms IS NULL OR @window_ms NOT BETWEEN 1 AND 315360000000
    BEGIN
        SET @message = CONCAT(N'sqlsem: the window of batch ''', @name, N''' must be 1 to 315360000000 ms (ten years), not ',
            COALESCE(CAST(@window_ms AS nvarchar(20)), N'NULL'));
        EXEC {schema}.raise_error 50000, @message;
    END;
    IF @uid IS NULL
        THROW 50000, N'sqlsem: the uid of a start is NULL; give each start a text of its own', 1;
    SET @at = CHARINDEX(NCHAR(10), @rest);
    WHILE @at > 0
    BEGIN
        SET @part_name = LEFT(@rest, CASE WHEN @at > 401 THEN 400 ELSE @at - 1 END);
        EXEC {schema}.check_name N'part', @part_name;
        SET @count = @count + 1;
        IF @count > 10000
        BEGIN
            SET @message = CONCAT(N'sqlsem: batch ''', @name, N''' has more than 10000 parts');
            EXEC {schema}.raise_error 50000, @message;
        END;
        IF EXISTS (SELECT 1 FROM @part_names WHERE part = @part_name)
        BEGIN
            SET @message = CONCAT(N'sqlsem: batch ''', @name, N''' names part ''', @part_name, N''' twice; each part is one job');
            EXEC {schema}.raise_error 50000, @message;
        END;
        INSERT INTO @part_names (part) VALUES (@part_name);
        SET @rest = SUBSTRING(@rest, @at + 1, 2147483647);
        SET @at = CHARINDEX(NCHAR(10), @rest);
    END;
    IF NOT EXISTS (SELECT 1 FROM @part_names WHERE part = @part COLLATE Latin1_General_100_BIN2)
    BEGIN
        SET @message = CONCAT(N'sqlsem: batch ''', @name, N''' has no part ''', @part, N'''; it has ',
            LEFT(REPLACE(@parts, NCHAR(10), N', '), 1000));
        EXEC {schema}.raise_error 50000, @message;
    END;
    -- Test if the process that runs the callback of the newest batch is missing; before this call takes any lock.
    SELECT TOP (1) @before = batch_id FROM {schema}.batch WITH (INDEX (batch_batch_name))
    WHERE batch_name = @name ORDER BY batch_id DESC;
    SELECT @missing = m.member_id FROM {schema}.batch AS r JOIN {schema}.member AS m ON m.member_id = r.callback_member
    WHERE r.batch_id = @before AND r.callback_status = N'running'
      AND CASE WHEN m.lease_until IS NOT NULL THEN CASE WHEN m.lease_until < SYSUTCDATETIME() THEN 1 ELSE 0 END
               WHEN APPLOCK_MODE(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Session') <> N'NoLock' THEN 0
               ELSE APPLOCK_TEST(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Shared', N'Session') END = 1;
    SET @before = NULL;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC {schema}.lock_batch @name;
        EXEC {schema}.touch_worker @member, @host OUTPUT, @pid OUTPUT;
        SET @now = SYSUTCDATETIME();
        SELECT TOP (1) @id = batch_id FROM {schema}.batch WITH (INDEX (batch_batch_name))
        WHERE batch_name = @name ORDER BY batch_id DESC;
        SELECT @status = status, @opened = opened_at, @opened_by = opened_by, @own_ms = window_ms, @callback_status = callback_status,
               @callback_member = callback_member
        FROM {schema}.batch WHERE batch_id = @id;
        SELECT @part_status = status, @part_uid = start_uid, @part_member = member_id, @attempt = attempt,
               @started = started_at, @is_last = is_last
        FROM {schema}.batch_part WHERE batch_id = @id AND part = @part;
        IF NOT EXISTS (SELECT 1 FROM {schema}.batch_part AS p
                       WHERE p.batch_id = @id AND p.part NOT IN (SELECT a.part FROM @part_names AS a))
           AND NOT EXISTS (SELECT 1 FROM @part_names AS a
                           WHERE a.part NOT IN (SELECT p.part FROM {schema}.batch_part AS p WHERE p.batch_id = @id))
            SET @same = 1;
        -- Only the login that opened a batch can change its window: another login must not end the batch early.
        IF @opened_by IS NULL OR @opened_by <> ORIGINAL_LOGIN()
            SET @window_ms = @own_ms;
        SET @limit = DATEADD(millisecond, CAST(@window_ms % 1000 AS int),
                             DATEADD(second, CAST(@window_ms / 1000 AS int), @opened));
        IF @part_uid = @uid AND @part_status = N'running' AND @part_member = @member
            SET @code = N'started';  -- the first reply was lost
        ELSE
        BEGIN
            IF @status = N'succeeded'
            BEGIN
                IF @is_last = 1 AND @same = 1 AND @limit > @now AND @callback_status IN (N'pending', N'running', N'failed')
                BEGIN
                    IF @callback_status <> N'running' OR NOT EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @callback_member)
                        SET @joins = 1;
                    ELSE IF @callback_member = @missing
                        SET @code = N'in_callback';
                END;
            END
            ELSE IF @status IN (N'open', N'failed')
            BEGIN
                IF @limit <= @now
                    UPDATE {schema}.batch SET status = N'expired', ended_at = @now WHERE batch_id = @id;
                ELSE IF @same = 0
                    SET @code = N'differs';
                ELSE IF @part_status = N'running' AND EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @part_member)
                    SET @code = N'running';
                ELSE
                    SET @joins = 1;
            END;
            IF @joins = 0 AND @code IS NULL
                SET @id = NULL;
            IF @code IS NULL
            BEGIN
                IF @id IS NULL
                BEGIN
                    INSERT INTO {schema}.batch (batch_name, window_ms, opened_at) VALUES (@name, @asked_ms, @now);
                    SET @id = SCOPE_IDENTITY();
                    SET @opened = @now;
                    SET @attempt = 0;
                    INSERT INTO {schema}.batch_part (batch_id, part) SELECT @id, part FROM @part_names;
                    SELECT @days = CAST(value AS int) FROM {schema}.setting WHERE name = N'history_days';
                    -- Find them by the index first, and write them by number: this call must not wait for rows of other
                    -- names.
                    INSERT INTO @old (batch_id)
                    SELECT batch_id FROM {schema}.batch WITH (INDEX (batch_batch_name))
                    WHERE batch_name = @name AND batch_id < @id AND callback_status NOT IN (N'pending', N'running')
                      AND ended_at < DATEADD(day, -@days, @now);
                    IF @@ROWCOUNT > 0
                        DELETE FROM {schema}.batch WHERE batch_id IN (SELECT o.batch_id FROM @old AS o);
                END
                ELSE
                BEGIN
                    UPDATE {schema}.batch
                    SET status = N'open', ended_at = NULL, window_ms = @window_ms, callback_status = N'none', callback_uid = NULL,
                        callback_ended = NULL, callback_error = NULL
                    WHERE batch_id = @id;
                    IF @now = @opened  -- (even if the clock ticks in milliseconds, only one part has the batch's time)
                        SET @now = DATEADD(microsecond, 1, @now);
                END;
                SET @attempt = @attempt + 1;
                SET @started = @now;
                UPDATE {schema}.batch_part
                SET status = N'running', attempt = @attempt, start_uid = @uid, member_id = @member, owner = @owner,
                    host = @host, pid = @pid, login = ORIGINAL_LOGIN(), started_at = @now, ended_at = NULL, error = NULL,
                    is_last = 0
                WHERE batch_id = @id AND part = @part;
                EXEC {schema}.store_callback @id, @callback_kind, @callback_body;
                SET @code = N'started';
            END;
        END;
        IF @code <> N'started'
            SET @attempt = NULL;
        ELSE IF @attempt = 1 AND @started = @opened  -- this start opened the batch
        BEGIN
            SELECT TOP (1) @before = batch_id FROM {schema}.batch WITH (INDEX (batch_batch_name))
            WHERE batch_name = @name AND batch_id < @id ORDER BY batch_id DESC;
            SELECT @previous = batch_id FROM {schema}.batch
            WHERE batch_id = @before AND status = N'expired' AND ended_at = @opened;
        END;
        COMMIT TRANSACTION;
    {end_try_rollback}
    IF @answer = 1
        SELECT @code AS code, @id AS id, @attempt AS attempt, @previous AS previous;
{end_try_own}

-- Make a callback that this member claimed pending again; return 1 if there was one. May be repeated.
CREATE OR ALTER PROCEDURE {schema}.return_callback @member bigint, @uid nvarchar(64), @answer bit = 0 AS {begin_try_own}
    DECLARE @count int = 0, @batch bigint;
    DECLARE @callback TABLE (batch_id bigint NOT NULL);
    INSERT INTO @callback (batch_id)
    SELECT batch_id FROM {schema}.batch WITH (INDEX (batch_callback)) WHERE callback_status = N'running';
    SELECT @batch = r.batch_id FROM @callback AS f JOIN {schema}.batch AS r ON r.batch_id = f.batch_id
    WHERE r.callback_member = @member AND r.callback_uid = @uid
      AND EXISTS (SELECT 1 FROM {schema}.member AS m WHERE m.member_id = @member AND m.login = ORIGINAL_LOGIN());
    UPDATE {schema}.batch SET callback_status = N'pending', callback_uid = NULL
    WHERE batch_id = @batch AND callback_status = N'running' AND callback_member = @member AND callback_uid = @uid;
    SET @count = @@ROWCOUNT;
    IF @answer = 1
        SELECT @count AS returned;
    RETURN @count;
{end_try_own}

-- End a part: N'succeeded' or N'failed'. @code:
--   succeeded  recorded         failed  recorded
--   late       the part took longer than the window, or the batch is over (expired, abandoned): the part has failed
--   lost       the part is no longer this member's: the member was found dead meanwhile
-- @is_last is 1 if this part was the last one to succeed. If @callback_attempt is not NULL, this member has claimed the
-- callback, and has to run it. May be repeated with the same @uid. failed after succeeded returns the callback that the
-- first call claimed, if there is one.
-- With @callback_kind the caller has a callback of kind local or session itself, and so can claim one. If its login may
-- not run the callback (may_run_callback), the callback stays pending until another login resumes it.
CREATE OR ALTER PROCEDURE {schema}.end_part
    @member bigint, @name nvarchar(400), @part nvarchar(400), @uid nvarchar(64), @outcome nvarchar(16),
    @error nvarchar(max), @owner nvarchar(255), @callback_kind nvarchar(8) = NULL, @callback_body nvarchar(max) = NULL,
    @code nvarchar(16) = NULL OUTPUT,
    @id bigint = NULL OUTPUT, @is_last bit = NULL OUTPUT, @batch_status nvarchar(16) = NULL OUTPUT, @answer bit = 0,
    @continues bit = NULL OUTPUT AS {begin}
    SET @code = NULL;
    SET @id = NULL;
    SET @is_last = 0;
    SET @batch_status = NULL;
    SET @continues = 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: a part must not be ended inside an open transaction; commit first', 1;
    IF @outcome IS NULL OR @outcome NOT IN (N'succeeded', N'failed')
        THROW 50000, N'sqlsem: a part ends as succeeded or failed', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @now datetime2(6), @limit datetime2(6), @status nvarchar(16), @part_member bigint, @part_error nvarchar(max),
            @known int, @callback_status nvarchar(16), @kind nvarchar(8), @attempt int, @body nvarchar(max), @own bit, @may int;
    DECLARE @batches TABLE (batch_id bigint NOT NULL PRIMARY KEY);
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC {schema}.lock_batch @name;
        SET @now = SYSUTCDATETIME();
        INSERT INTO @batches (batch_id)
        SELECT batch_id FROM {schema}.batch WITH (INDEX (batch_batch_name)) WHERE batch_name = @name;
        SELECT TOP (1) @id = p.batch_id, @status = p.status, @part_member = p.member_id, @part_error = p.error
        FROM @batches AS r JOIN {schema}.batch_part AS p ON p.batch_id = r.batch_id
        WHERE p.part = @part AND p.start_uid = @uid ORDER BY p.batch_id DESC;
        SELECT @batch_status = status,
               @limit = DATEADD(millisecond, CAST(window_ms % 1000 AS int),
                                DATEADD(second, CAST(window_ms / 1000 AS int), opened_at))
        FROM {schema}.batch WHERE batch_id = @id;
        EXEC @known = {schema}.touch_member @member;  -- (the call may claim the callback, too)
        IF @known = 0 OR @id IS NULL OR @part_member <> @member
           OR (@status = N'failed' AND @part_error = N'its process died')
            SET @code = N'lost';
        ELSE IF @status = N'running'
        BEGIN
            SET @code = CASE WHEN @outcome = N'succeeded' AND (@batch_status <> N'open' OR @limit < @now)
                             THEN N'late' ELSE @outcome END;
            UPDATE {schema}.batch_part
            SET status = CASE @code WHEN N'succeeded' THEN @code ELSE N'failed' END, ended_at = @now,
                error = CASE @code WHEN N'late' THEN CASE @batch_status WHEN N'abandoned' THEN N'ended after the batch was abandoned'
                                                                        ELSE N'ended after the window' END
                                   WHEN N'failed' THEN COALESCE(@error, N'it said nothing') END
            WHERE batch_id = @id AND part = @part;
            EXEC {schema}.store_callback @id, @callback_kind, @callback_body;
            IF @batch_status = N'open' AND NOT EXISTS (SELECT 1 FROM {schema}.batch_part
                                                       WHERE batch_id = @id AND status IN (N'expected', N'running'))
            BEGIN
                IF EXISTS (SELECT 1 FROM {schema}.batch_part WHERE batch_id = @id AND status = N'failed')
                    UPDATE {schema}.batch SET status = N'failed', ended_at = @now WHERE batch_id = @id;
                ELSE
                BEGIN
                    UPDATE {schema}.batch_part SET is_last = 1 WHERE batch_id = @id AND part = @part;
                    SELECT @kind = COALESCE(callback_kind, @callback_kind) FROM {schema}.batch WHERE batch_id = @id;
                    SET @own = CASE WHEN @callback_kind IS NULL THEN 0 ELSE 1 END;
                    EXEC @may = {schema}.may_run_callback @id, @own;
                    SET @callback_status = CASE WHEN @kind IS NULL THEN N'none' WHEN @may = 1 THEN N'running' ELSE N'pending' END;
                    UPDATE {schema}.batch
                    SET status = N'succeeded', ended_at = @now, callback_kind = @kind, callback_status = @callback_status
                    WHERE batch_id = @id;
                    IF @callback_status = N'running'
                        UPDATE {schema}.batch
                        SET callback_attempt = callback_attempt + 1, callback_uid = @uid, callback_member = @member,
                            callback_owner = @owner, callback_login = ORIGINAL_LOGIN(), callback_started = @now
                        WHERE batch_id = @id;
                END;
            END;
        END
        ELSE
        BEGIN
            SET @code = CASE WHEN @part_error LIKE N'ended after the %' THEN N'late' ELSE @status END;
            IF @status = N'succeeded' AND @outcome = N'failed'
                UPDATE {schema}.batch SET callback_status = N'pending', callback_uid = NULL
                WHERE batch_id = @id AND callback_status = N'running' AND callback_member = @member AND callback_uid = @uid;
        END;
        IF @code <> N'lost'
        BEGIN
            SELECT @is_last = is_last FROM {schema}.batch_part WHERE batch_id = @id AND part = @part;
            SET @kind = NULL;
            SELECT @batch_status = status,
                   @attempt = CASE WHEN @is_last = 1 AND callback_status = N'running' AND callback_member = @member
                                        AND callback_uid = @uid THEN callback_attempt END,
                   @kind = callback_kind, @body = callback_body
            FROM {schema}.batch WHERE batch_id = @id;
            IF @attempt IS NULL
                SELECT @kind = NULL, @body = NULL;
            ELSE
                SET @continues = 1;
        END;
        COMMIT TRANSACTION;
    {end_try_rollback}
    IF @answer = 1
        SELECT @code AS code, @id AS id, @is_last AS is_last, @batch_status AS batch_status, @attempt AS callback_attempt,
               @kind AS kind, @body AS body;
END;

-- Claim a callback that no member runs: the pending one of the name's oldest batch; or that of batch @batch, also if it
-- has failed. @id is NULL, and there is no row, if there is none that this login may run (may_run_callback). @own: the
-- caller has the callbacks of kind local and session. May be repeated with the same @uid.
CREATE OR ALTER PROCEDURE {schema}.claim_callback
    @member bigint, @name nvarchar(400), @batch bigint, @owner nvarchar(255), @uid nvarchar(64), @own bit,
    @id bigint = NULL OUTPUT, @answer bit = 0 AS {begin_try_own}
    SET @id = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: a batch must not be resumed inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @lock nvarchar(400) = @name, @known int, @may int, @candidate bigint, @before bigint = 0;
    DECLARE @batches TABLE (batch_id bigint NOT NULL PRIMARY KEY);
    IF @batch IS NOT NULL
        SELECT @lock = batch_name FROM {schema}.batch WHERE batch_id = @batch;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC {schema}.lock_batch @lock;
        EXEC @known = {schema}.touch_member @member;
        IF @known = 0
            THROW 50005, N'sqlsem: this member is not known here (any more), or is another login''s; register again', 1;
        IF @batch IS NULL
            INSERT INTO @batches (batch_id)
            SELECT batch_id FROM {schema}.batch WITH (INDEX (batch_callback))
            WHERE callback_status IN (N'pending', N'running') AND batch_name = @name;
        ELSE
            INSERT INTO @batches (batch_id) VALUES (@batch);
        SELECT @id = r.batch_id FROM @batches AS f JOIN {schema}.batch AS r ON r.batch_id = f.batch_id
        WHERE r.callback_status = N'running' AND r.callback_member = @member AND r.callback_uid = @uid;
        IF @id IS NULL
        BEGIN
            WHILE @id IS NULL
            BEGIN
                SET @candidate = NULL;
                SELECT TOP (1) @candidate = r.batch_id FROM @batches AS f JOIN {schema}.batch AS r ON r.batch_id = f.batch_id
                WHERE (r.callback_status = N'pending' OR (@batch IS NOT NULL AND r.status = N'succeeded' AND r.callback_status = N'failed'))
                  AND r.batch_id > @before
                ORDER BY r.batch_id;
                IF @candidate IS NULL
                    BREAK;
                EXEC @may = {schema}.may_run_callback @candidate, @own;
                IF @may = 1
                    SET @id = @candidate;
                SET @before = @candidate;
            END;
            UPDATE {schema}.batch
            SET callback_status = N'running', callback_attempt = callback_attempt + 1, callback_uid = @uid, callback_member = @member,
                callback_owner = @owner, callback_login = ORIGINAL_LOGIN(), callback_started = SYSUTCDATETIME(), callback_ended = NULL,
                callback_error = NULL
            WHERE batch_id = @id;
        END;
        COMMIT TRANSACTION;
    {end_try_rollback}
    IF @answer = 1
        SELECT batch_id, batch_name, callback_attempt, callback_kind, callback_body FROM {schema}.batch WHERE batch_id = @id;
{end_try_own}

-- End a callback, with an error if it failed. Return 1, or 0 if the callback is no longer this member's. May be
-- repeated.
CREATE OR ALTER PROCEDURE {schema}.end_callback @member bigint, @batch bigint, @attempt int, @error nvarchar(max) = NULL, @answer bit = 0
AS {begin_try_own}
    DECLARE @done int = 0;
    UPDATE {schema}.batch
    SET callback_status = CASE WHEN @error IS NULL THEN N'finished' ELSE N'failed' END, callback_ended = SYSUTCDATETIME(),
        callback_error = @error
    WHERE batch_id = @batch AND callback_status = N'running' AND callback_attempt = @attempt AND callback_member = @member
      AND EXISTS (SELECT 1 FROM {schema}.member AS m WHERE m.member_id = @member AND m.login = ORIGINAL_LOGIN());
    SET @done = @@ROWCOUNT;
    IF @done = 0
        SELECT @done = 1 FROM {schema}.batch
        WHERE batch_id = @batch AND callback_status IN (N'finished', N'failed') AND callback_attempt = @attempt
          AND callback_member = @member AND callback_login = ORIGINAL_LOGIN();
    IF @answer = 1
        SELECT @done AS done;
    RETURN @done;
{end_try_own}

-- Abandon the newest batch of a name, or batch @batch, if it is open or has failed, or its callback is pending or has
-- failed. The next start of a part begins a new batch. Return a row with its number; NULL if there is no batch
-- to abandon.
CREATE OR ALTER PROCEDURE {schema}.abandon_batch @name nvarchar(400), @batch bigint = NULL, @abandoned bigint = NULL OUTPUT
AS {begin_try}
    SET @abandoned = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: abandon_batch must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @lock nvarchar(400) = @name, @status nvarchar(16), @now datetime2(6);
    IF @batch IS NULL
        EXEC {schema}.check_name N'batch', @name;
    ELSE
    BEGIN
        SET @lock = NULL;
        SELECT @lock = batch_name FROM {schema}.batch WHERE batch_id = @batch;
    END;
    IF @lock IS NOT NULL
    BEGIN
        BEGIN TRANSACTION;
        EXEC {schema}.lock_batch @lock;
        SET @now = SYSUTCDATETIME();
        IF @batch IS NULL
            SELECT TOP (1) @batch = batch_id FROM {schema}.batch WITH (INDEX (batch_batch_name))
            WHERE batch_name = @lock ORDER BY batch_id DESC;
        SELECT @abandoned = batch_id, @status = status FROM {schema}.batch
        WHERE batch_id = @batch AND (status IN (N'open', N'failed')
                                     OR (status = N'succeeded' AND callback_status IN (N'pending', N'failed')));
        IF @abandoned IS NOT NULL
        BEGIN
            UPDATE {schema}.batch
            SET status = N'abandoned', ended_at = COALESCE(ended_at, @now),
                callback_ended = CASE callback_status WHEN N'pending' THEN @now ELSE callback_ended END,
                callback_error = CASE callback_status WHEN N'pending' THEN N'the batch was abandoned' ELSE callback_error END,
                callback_status = CASE callback_status WHEN N'pending' THEN N'failed' ELSE callback_status END
            WHERE batch_id = @abandoned;
            INSERT INTO {schema}.operation (host, pid, program, action, resource_id, old_value)
            VALUES (LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), N'abandon', @lock,
                    CONCAT(N'batch ', @abandoned, N', ', @status));
        END;
        COMMIT TRANSACTION;
    END;
    SELECT @abandoned AS batch_id;
{end_try_rollback_own}


-- Displays ----------------------------------------------------------------------------------------------------

-- Return the batches, newest first, one row a part. Putters, operators, readers and the login that stored a callback
-- see its text.
CREATE OR ALTER PROCEDURE {schema}.list_batches @name nvarchar(400) = NULL, @batch bigint = NULL, @maximum int = 20
AS {begin_try}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @shown TABLE (batch_id bigint NOT NULL PRIMARY KEY);
    DECLARE @page TABLE (
        batch_id bigint NOT NULL, batch_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL, status nvarchar(16) NULL,
        window_seconds float NULL, opened_at datetime2(6) NULL, ended_at datetime2(6) NULL, seconds float NULL,
        callback_status nvarchar(16) NULL, callback_kind nvarchar(8) NULL, callback_body nvarchar(max) NULL,
        callback_attempt int NULL, callback_owner nvarchar(255) NULL, callback_started datetime2(6) NULL,
        callback_ended datetime2(6) NULL, callback_seconds float NULL, callback_error nvarchar(max) NULL,
        part nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL, part_status nvarchar(16) NULL, is_last bit NULL,
        attempt int NULL, member_id bigint NULL, owner nvarchar(255) NULL, host nvarchar(255) NULL, pid int NULL,
        started_at datetime2(6) NULL, part_ended datetime2(6) NULL, part_seconds float NULL, error nvarchar(max) NULL,
        missing_for float NULL, opened_by nvarchar(128) NULL, login nvarchar(128) NULL,
        callback_kept_by nvarchar(128) NULL, callback_login nvarchar(128) NULL, PRIMARY KEY (batch_id, part));
    DECLARE @now datetime2(6), @all int;
    SET @all = CASE WHEN IS_MEMBER(N'{schema}_putter') = 1 OR IS_MEMBER(N'{schema}_operator') = 1
                         OR IS_MEMBER(N'{schema}_reader') = 1 OR IS_MEMBER(N'db_owner') = 1
                         OR IS_SRVROLEMEMBER(N'sysadmin') = 1 THEN 1 ELSE 0 END;
    SET @maximum = CASE WHEN @maximum < 0 THEN 0 ELSE COALESCE(@maximum, 2147483647) END;
    IF @batch IS NOT NULL
        INSERT INTO @shown (batch_id) SELECT batch_id FROM {schema}.batch WHERE batch_id = @batch;
    ELSE
        INSERT INTO @shown (batch_id)
        SELECT TOP (@maximum) batch_id FROM {schema}.batch WITH (INDEX (batch_batch_name))
        WHERE @name IS NULL OR batch_name = @name ORDER BY batch_id DESC;
    SET @now = SYSUTCDATETIME();
    -- (An error must not follow a part of the rows: a caller that reads no further would take it for all.)
    INSERT INTO @page (batch_id, batch_name, status, window_seconds, opened_at, ended_at, seconds, callback_status, callback_kind,
                       callback_body, callback_attempt, callback_owner, callback_started, callback_ended, callback_seconds,
                       callback_error, part, part_status, is_last, attempt, member_id, owner, host, pid, started_at,
                       part_ended, part_seconds, error, missing_for, opened_by, login, callback_kept_by, callback_login)
    SELECT r.batch_id, r.batch_name, r.status, r.window_ms / CAST(1000 AS float) AS window_seconds, r.opened_at,
           r.ended_at,
           DATEDIFF_BIG(microsecond, r.opened_at, COALESCE(r.ended_at, @now)) / CAST(1000000 AS float) AS seconds,
           r.callback_status, r.callback_kind, CASE WHEN @all = 1 OR r.callback_kept_by = ORIGINAL_LOGIN() THEN r.callback_body END AS callback_body,
           r.callback_attempt, r.callback_owner, r.callback_started, r.callback_ended,
           DATEDIFF_BIG(microsecond, r.callback_started, COALESCE(r.callback_ended, @now)) / CAST(1000000 AS float)
               AS callback_seconds,
           r.callback_error, p.part, p.status AS part_status, p.is_last, p.attempt, p.member_id, p.owner, p.host, p.pid,
           p.started_at, p.ended_at AS part_ended,
           DATEDIFF_BIG(microsecond, p.started_at, COALESCE(p.ended_at, @now)) / CAST(1000000 AS float) AS part_seconds,
           p.error,
           CASE WHEN p.status = N'running' AND b.missing = 1 THEN
               DATEDIFF_BIG(microsecond, CASE WHEN m.lease_until IS NOT NULL THEN m.lease_until
                                              ELSE COALESCE(m.missing_since, m.heartbeat_at, p.started_at) END, @now)
               / CAST(1000000 AS float) END AS missing_for, r.opened_by, p.login, r.callback_kept_by, r.callback_login
    FROM @shown AS s JOIN {schema}.batch AS r ON r.batch_id = s.batch_id
    JOIN {schema}.batch_part AS p ON p.batch_id = s.batch_id
    LEFT JOIN {schema}.member AS m ON m.member_id = p.member_id
    CROSS APPLY (SELECT CASE WHEN m.member_id IS NULL THEN 1
                             WHEN m.lease_until IS NOT NULL THEN CASE WHEN m.lease_until < @now THEN 1 ELSE 0 END
                             WHEN p.status <> N'running' THEN 0
                             WHEN APPLOCK_MODE(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Session')
                                  <> N'NoLock' THEN 0
                             ELSE APPLOCK_TEST(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Shared',
                                               N'Session') END AS missing) AS b;
    SELECT batch_id, batch_name, status, window_seconds, opened_at, ended_at, seconds, callback_status, callback_kind,
           callback_body, callback_attempt, callback_owner, callback_started, callback_ended, callback_seconds,
           callback_error, part, part_status, is_last, attempt, member_id, owner, host, pid, started_at,
           part_ended, part_seconds, error, missing_for, opened_by, login, callback_kept_by, callback_login
    FROM @page ORDER BY batch_id DESC, part;
{end_try}


-- For sessions -----------------------------------------------------------------------------------------------------

-- Start a part for this session; return a row with the number of the batch, and @batch_id. @parts: the names of all
-- parts, with commas in between or as a JSON array. @window_seconds: the time for all parts, from the first start on; a
-- start after it begins a new batch. If the session ends before the part, the part fails. Raise 50007 if the part runs
-- already, or the batch is open with other parts.
CREATE OR ALTER PROCEDURE {schema}.batch_part_start
    @name nvarchar(400), @part nvarchar(400), @parts nvarchar(max), @window_seconds float,
    @batch_id bigint = NULL OUTPUT AS {begin_try}
    SET @batch_id = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: batch_part_start must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @names TABLE (part nvarchar(400) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY);
    DECLARE @given TABLE (ordinal int NOT NULL PRIMARY KEY, part nvarchar(400) COLLATE Latin1_General_100_BIN2 NULL);
    DECLARE @at int, @ordinal int = 0, @maximum int, @rest nvarchar(max), @part_name nvarchar(400),
            @lines nvarchar(max) = N'', @member bigint, @owner nvarchar(400),
            @uid nvarchar(64) = CONVERT(nvarchar(64), NEWID()), @window_ms bigint, @code nvarchar(16), @attempt int,
            @previous bigint, @part_list nvarchar(1000), @message nvarchar(2000);
    EXEC {schema}.check_name N'batch', @name;
    EXEC {schema}.check_name N'part', @part;
    IF NOT (@window_seconds >= 0.001 AND @window_seconds <= 315360000) OR @window_seconds IS NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: window_seconds must be above 0 and at most ten years, not ',
            COALESCE(CONVERT(nvarchar(40), @window_seconds), N'NULL'));
        EXEC {schema}.raise_error 50000, @message;
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
    SELECT @maximum = COUNT(*) FROM @given;
    SET @ordinal = 0;
    WHILE @ordinal < @maximum
    BEGIN
        SET @ordinal = @ordinal + 1;
        SELECT @part_name = part FROM @given WHERE ordinal = @ordinal;
        EXEC {schema}.check_name N'part', @part_name;
        IF EXISTS (SELECT 1 FROM @names WHERE part = @part_name)
        BEGIN
            SET @message = CONCAT(N'sqlsem: batch ''', @name, N''' names part ''', @part_name,
                N''' twice; each part is one job');
            EXEC {schema}.raise_error 50000, @message;
        END;
        INSERT INTO @names (part) VALUES (@part_name);
        SET @lines = CONCAT(@lines, CASE WHEN @lines <> N'' THEN NCHAR(10) END, @part_name);
    END;
    IF @lines = N''
        SET @message = CONCAT(N'sqlsem: batch ''', @name, N''' has no parts; name all of them in @parts');
    ELSE IF NOT EXISTS (SELECT 1 FROM @names WHERE part = @part)
        SET @message = CONCAT(N'sqlsem: batch ''', @name, N''' has no part ''', @part, N'''; it has ',
            LEFT(REPLACE(@lines, NCHAR(10), N', '), 1000));
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;

    EXEC {schema}.session_name @owner OUTPUT;
    EXEC {schema}.session_member NULL, @member OUTPUT;
    EXEC {schema}.recover_batches @name, @member, @tell = 1;
    EXEC {schema}.start_part @member, @name, @part, @lines, @window_ms, @owner, @uid, NULL, NULL, @code OUTPUT,
        @batch_id OUTPUT, @attempt OUTPUT, @previous OUTPUT;
    IF @code = N'running'
        SELECT @message = CONCAT(N'sqlsem: part ''', @part, N''' of batch ''', @name, N''' runs already (', host, N':',
            pid, N' since ', CONVERT(nvarchar(30), started_at, 126), N', login ', login, N'); wait until it has ended')
        FROM {schema}.batch_part WHERE batch_id = @batch_id AND part = @part;
    ELSE IF @code = N'in_callback'
        SELECT @message = CONCAT(N'sqlsem: the callback of batch ', @batch_id, N' of ''', @name, N''' runs already (',
            callback_owner, N' since ', CONVERT(nvarchar(30), callback_started, 126),
            N'); its process is missing, but not yet for its grace: start the part again in a moment')
        FROM {schema}.batch WHERE batch_id = @batch_id;
    ELSE IF @code = N'differs'
    BEGIN
        EXEC {schema}.parts_in @batch_id, N'expected running failed succeeded', @part_list OUTPUT;
        SELECT @message = CONCAT(N'sqlsem: batch ', @batch_id, N' of ''', @name, N''' is open with other parts: ', @part_list,
            N'; login ', opened_by, N' opened it at ', CONVERT(nvarchar(30), opened_at, 126),
            N'; declare the same in all parts, or have an operator abandon it: EXEC {schema}.abandon_batch')
        FROM {schema}.batch WHERE batch_id = @batch_id;
    END;
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50007, @message;
    IF @previous IS NOT NULL
    BEGIN
        BEGIN TRY
            EXEC {schema}.parts_in @previous, N'expected running failed', @part_list OUTPUT;
        {end_try_done}
        SET @message = CONCAT(N'sqlsem: batch ', @previous, N' of ''', @name, N''' has expired; it lacked ',
            COALESCE(@part_list, N'parts that cannot be read now'));
        RAISERROR (N'%s', 10, 1, @message) WITH NOWAIT;
    END;
    SELECT @batch_id AS batch_id;
{end_try_rollback_own}

CREATE OR ALTER PROCEDURE {schema}.session_part_end
    @name nvarchar(400), @part nvarchar(400), @outcome nvarchar(16), @error nvarchar(max), @code nvarchar(16) OUTPUT,
    @id bigint OUTPUT, @is_last bit OUTPUT, @batch_status nvarchar(16) OUTPUT AS {begin}
    DECLARE @member bigint, @owner nvarchar(400), @uid nvarchar(64), @message nvarchar(1000), @continues bit;
    DECLARE @batches TABLE (batch_id bigint NOT NULL PRIMARY KEY);
    EXEC {schema}.check_name N'batch', @name;
    EXEC {schema}.check_name N'part', @part;
    EXEC {schema}.session_name @owner OUTPUT;
    EXEC {schema}.session_member NULL, @member OUTPUT;
    EXEC {schema}.recover_batches @name, @member, @tell = 1;
    INSERT INTO @batches (batch_id)
    SELECT batch_id FROM {schema}.batch WITH (INDEX (batch_batch_name)) WHERE batch_name = @name;
    SELECT TOP (1) @uid = p.start_uid FROM @batches AS r JOIN {schema}.batch_part AS p ON p.batch_id = r.batch_id
    WHERE p.part = @part AND p.member_id = @member AND p.status = N'running' ORDER BY r.batch_id DESC;
    IF @uid IS NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: this session does not run part ''', @part, N''' of batch ''', @name,
            N'''; call batch_part_start before, in the same session');
        EXEC {schema}.raise_error 50004, @message;
    END;
    EXEC {schema}.end_part @member, @name, @part, @uid, @outcome, @error, @owner, N'session', NULL, @code OUTPUT,
        @id OUTPUT, @is_last OUTPUT, @batch_status OUTPUT, 0, @continues OUTPUT;
    IF @is_last = 1 AND @continues = 0
    BEGIN
        SET @is_last = 0;
        BEGIN TRY
            SELECT @message = CONCAT(N'sqlsem: batch ', @id, N' of ''', @name, N''' has succeeded, but its callback is pending: login ',
                callback_kept_by, N' kept it; that login, a putter or an operator runs it: sqlsem batch resume ', @id)
            FROM {schema}.batch WHERE batch_id = @id AND callback_status = N'pending';
        {end_try_done}
        IF @message IS NOT NULL
            RAISERROR (N'%s', 10, 1, @message) WITH NOWAIT;
    END;
END;

-- End this session's part as succeeded. If is_last = 1, it was the last part: the session has to run the callback, and
-- then to call batch_callback_ended. A message is sent if only another login may run the callback. outcome: succeeded;
-- or late: the part does not count, as it took longer than the window, or the batch was abandoned. If all other parts
-- have ended, a message names the parts that have failed. Returns a row, and OUTPUT parameters. Raise 50004 if this
-- session does not run the part.
CREATE OR ALTER PROCEDURE {schema}.batch_part_finish
    @name nvarchar(400), @part nvarchar(400), @is_last bit = NULL OUTPUT, @outcome nvarchar(16) = NULL OUTPUT
AS {begin_try}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: batch_part_finish must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @id bigint, @status nvarchar(16), @part_list nvarchar(1000), @message nvarchar(2000);
    EXEC {schema}.session_part_end @name, @part, N'succeeded', NULL, @outcome OUTPUT, @id OUTPUT,
        @is_last OUTPUT, @status OUTPUT;
    IF @outcome = N'succeeded' AND @status = N'failed'
    BEGIN
        BEGIN TRY
            EXEC {schema}.parts_in @id, N'failed', @part_list OUTPUT;
        {end_try_done}
        SET @message = CONCAT(N'sqlsem: batch ', @id, N' of ''', @name, N''' has failed: ',
            COALESCE(@part_list, N'parts that cannot be read now'), N'; run these parts again');
    END
    ELSE IF @outcome = N'late'
        SET @message = CONCAT(N'sqlsem: part ''', @part, N''' of batch ''', @name,
            N''' has ended after ', CASE @status WHEN N'abandoned' THEN N'the batch was abandoned' ELSE N'the window' END,
            N', and does not count');
    IF @message IS NOT NULL
        RAISERROR (N'%s', 10, 1, @message) WITH NOWAIT;
    SELECT CAST(@is_last AS int) AS is_last, @outcome AS outcome;
{end_try_rollback_own}

-- End this session's part as failed. Returns a row as batch_part_finish does; is_last is always 0.
CREATE OR ALTER PROCEDURE {schema}.batch_part_fail @name nvarchar(400), @part nvarchar(400), @error nvarchar(max) = NULL
AS {begin_try}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: batch_part_fail must not be called inside an open transaction; roll back first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @id bigint, @status nvarchar(16), @is_last bit, @outcome nvarchar(16);
    EXEC {schema}.session_part_end @name, @part, N'failed', @error, @outcome OUTPUT, @id OUTPUT,
        @is_last OUTPUT, @status OUTPUT;
    SELECT CAST(@is_last AS int) AS is_last, @outcome AS outcome;
{end_try_rollback_own}

-- Claim a callback that no session runs. Return a row, and @is_last: 1 if this session has to run one now, and then to
-- call batch_callback_ended; else 0.
CREATE OR ALTER PROCEDURE {schema}.batch_resume @name nvarchar(400), @is_last bit = NULL OUTPUT AS {begin_try}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: batch_resume must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @member bigint, @owner nvarchar(400), @id bigint, @uid nvarchar(64) = CONVERT(nvarchar(64), NEWID());
    EXEC {schema}.check_name N'batch', @name;
    EXEC {schema}.session_name @owner OUTPUT;
    EXEC {schema}.session_member NULL, @member OUTPUT;
    EXEC {schema}.recover_batches @name, @member, @tell = 1;
    EXEC {schema}.claim_callback @member, @name, NULL, @owner, @uid, 1, @id OUTPUT;
    SET @is_last = CASE WHEN @id IS NULL THEN 0 ELSE 1 END;
    SELECT CAST(@is_last AS int) AS is_last;
{end_try_rollback_own}

-- End the callback that this session runs (of several, the one that it claimed last), with an error if it failed.
-- Return a row with the number of the batch.
CREATE OR ALTER PROCEDURE {schema}.batch_callback_ended
    @name nvarchar(400), @error nvarchar(max) = NULL, @batch_id bigint = NULL OUTPUT AS {begin_try}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: batch_callback_ended must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @member bigint, @attempt int, @done int = 0, @message nvarchar(1000);
    DECLARE @callback TABLE (batch_id bigint NOT NULL);
    SET @batch_id = NULL;
    EXEC {schema}.check_name N'batch', @name;
    EXEC {schema}.session_member NULL, @member OUTPUT;
    INSERT INTO @callback (batch_id)
    SELECT batch_id FROM {schema}.batch WITH (INDEX (batch_callback))
    WHERE callback_status = N'running' AND batch_name = @name;
    SELECT TOP (1) @batch_id = r.batch_id, @attempt = r.callback_attempt
    FROM @callback AS f JOIN {schema}.batch AS r ON r.batch_id = f.batch_id
    WHERE r.callback_member = @member ORDER BY r.callback_started DESC, r.batch_id DESC;
    IF @batch_id IS NOT NULL
        EXEC @done = {schema}.end_callback @member, @batch_id, @attempt, @error;
    IF @done = 0
    BEGIN
        SET @message = CONCAT(N'sqlsem: this session has no callback of batch ''', @name,
            N''' to run; batch_part_finish, or batch_resume, says is_last = 1 to the one that has');
        EXEC {schema}.raise_error 50004, @message;
    END;
    SELECT @batch_id AS batch_id;
{end_try_rollback_own}
