-- sqlsem, rates, for SQL Server: so much in so long. May be run again at any time, after public.sql.
--
-- Who waits for a rate waits in the queue of a mutex, resource N'rate:' and its name. Who is at its head takes what it needs as
-- soon as that is there, and leaves. What was taken is written down by hundredths of each window (slots): a slot counts until
-- all of it is out of the window, so in no stretch of time of that length the limit is passed; at the worst a hundredth of
-- the window is waited for too long. Whatever is taken counts for every window that anybody has declared for the rate.
-- With a burst there is a bucket besides, which leaks evenly (GCRA): https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm
-- Times are of the server's clock. Where that has gone back, what stands in its future counts as used now.
--
-- @windows: [{"limit": 100, "ms": 60000}, …]. Needs compatibility level 130 or later.

SET QUOTED_IDENTIFIER ON;
SET ANSI_NULLS ON;
GO

-- Microseconds since 1970.
BEGIN TRANSACTION;
DROP FUNCTION IF EXISTS {schema}.clock_us;
GO
CREATE FUNCTION {schema}.clock_us() RETURNS bigint AS
BEGIN
    DECLARE @now datetime2(6) = SYSUTCDATETIME();
    DECLARE @today datetime2(6) = CAST(@now AS date);
    RETURN (CAST(DATEDIFF(day, '19700101', @now) AS bigint) * 86400 + DATEDIFF(second, @today, @now)) * 1000000
           + DATEPART(microsecond, @now);
END;
GO
COMMIT TRANSACTION;
GO

-- Refuses what is no rate's name: so nobody takes from the starts of a work queue's tasks, or gives any of them back (may_start).
IF OBJECT_ID(N'{schema}.check_rate_name') IS NULL EXEC (N'CREATE PROCEDURE {schema}.check_rate_name AS RETURN 0');
GO
ALTER PROCEDURE {schema}.check_rate_name @resource nvarchar(400)
AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @message nvarchar(1000);
    EXEC {schema}.check_name N'rate', @resource;
    IF @resource COLLATE Latin1_General_100_BIN2 NOT LIKE N'rate:_%'
    BEGIN
        SET @message = CONCAT(N'sqlsem: ''', @resource, N''' is no rate; the resource of a rate is ''rate:'' and its name');
        EXEC {schema}.refuse 50000, @message;
    END;
END;
GO

-- Refuses what can be no rate.
IF OBJECT_ID(N'{schema}.check_rate') IS NULL EXEC (N'CREATE PROCEDURE {schema}.check_rate AS RETURN 0');
GO
ALTER PROCEDURE {schema}.check_rate @resource nvarchar(400), @cost bigint, @windows nvarchar(1000), @burst bigint
AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @message nvarchar(1000), @count int, @lengths int, @bad int, @lowest bigint;
    EXEC {schema}.check_rate_name @resource;
    IF ISJSON(@windows) = 1
        SELECT @count = COUNT(*), @lengths = COUNT(DISTINCT COALESCE(w.ms, 0)), @lowest = MIN(COALESCE(w.most, 0)),
               @bad = SUM(CASE WHEN w.ms BETWEEN 1 AND 2147483647 AND w.most BETWEEN 1 AND 2147483647 THEN 0 ELSE 1 END)
        FROM OPENJSON(@windows) WITH (most bigint '$.limit', ms bigint '$.ms') AS w;
    SET @message = CASE
        WHEN COALESCE(@count, 0) NOT BETWEEN 1 AND 10 THEN N'needs from 1 to 10 limits, and a window for each'
        WHEN @bad > 0 THEN N'has a limit or a window (ms) that is not from 1 to 2147483647'
        WHEN @lengths < @count THEN N'names a window twice'
        WHEN COALESCE(@cost, 0) < 1 THEN CONCAT(N'is asked for ', COALESCE(CONVERT(nvarchar(20), @cost), N'NULL'), N'; the cost must be 1 or more')
        WHEN @cost > @lowest THEN CONCAT(N'is asked for ', @cost, N', which can never fit into its limit of ', @lowest)
        WHEN @burst IS NOT NULL AND @count <> 1 THEN N'has a burst and several windows; a burst goes with one window'
        WHEN @burst < 1 OR @burst > @lowest THEN CONCAT(N'has a burst that is not from 1 to its limit, but ', @burst)
        WHEN @cost > @burst THEN CONCAT(N'is asked for ', @cost, N', which can never fit into its burst of ', @burst)
    END;
    IF @message IS NOT NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: ''', @resource, N''' ', @message);
        EXEC {schema}.refuse 50000, @message;
    END;
END;
GO

-- Puts right what a clock that went back has left in the future: it counts as used now.
IF OBJECT_ID(N'{schema}.turn_back_rate') IS NULL EXEC (N'CREATE PROCEDURE {schema}.turn_back_rate AS RETURN 0');
GO
ALTER PROCEDURE {schema}.turn_back_rate @resource nvarchar(255), @now bigint
AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @ahead TABLE (window_ms bigint NOT NULL PRIMARY KEY, used bigint NOT NULL);
    INSERT INTO @ahead (window_ms, used)
    SELECT window_ms, SUM(used) FROM {schema}.rate_slot
    WHERE resource_id = @resource AND slot > @now / ((window_ms + 99) / 100) GROUP BY window_ms;
    DELETE FROM {schema}.rate_slot WHERE resource_id = @resource AND slot > @now / ((window_ms + 99) / 100);
    INSERT INTO {schema}.rate_slot (resource_id, window_ms, slot, used)
    SELECT @resource, a.window_ms, @now / ((a.window_ms + 99) / 100), 0 FROM @ahead AS a
    WHERE NOT EXISTS (SELECT 1 FROM {schema}.rate_slot AS s
                      WHERE s.resource_id = @resource AND s.window_ms = a.window_ms AND s.slot = @now / ((a.window_ms + 99) / 100));
    UPDATE {schema}.rate_slot
    SET used = used + COALESCE((SELECT a.used FROM @ahead AS a WHERE a.window_ms = rate_slot.window_ms), 0)
    WHERE resource_id = @resource AND slot = @now / ((window_ms + 99) / 100);
    UPDATE {schema}.rate_window SET full_us = full_us - (seen_ms - @now) * 1000, seen_ms = @now
    WHERE resource_id = @resource AND seen_ms > @now;
END;
GO

-- Makes a window known that is not yet. It begins with what another one says was used of late: no sooner than it was.
IF OBJECT_ID(N'{schema}.begin_window') IS NULL EXEC (N'CREATE PROCEDURE {schema}.begin_window AS RETURN 0');
GO
ALTER PROCEDURE {schema}.begin_window @resource nvarchar(255), @window_ms bigint, @limit bigint, @now bigint
AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @other bigint, @slot_ms bigint = (@window_ms + 99) / 100, @other_slot_ms bigint;
    -- The shortest of those that are longer, or else the longest.
    SELECT TOP (1) @other = window_ms FROM {schema}.rate_window WHERE resource_id = @resource
    ORDER BY CASE WHEN window_ms < @window_ms THEN 1 ELSE 0 END, ABS(window_ms - @window_ms);
    SET @other_slot_ms = (@other + 99) / 100;
    -- (What stands there already is of a time that is over.)
    DELETE FROM {schema}.rate_slot WHERE resource_id = @resource AND window_ms = @window_ms;
    INSERT INTO {schema}.rate_slot (resource_id, window_ms, slot, used)
    SELECT @resource, @window_ms, o.slot, SUM(o.used)
    FROM (SELECT CASE WHEN (slot + 1) * @other_slot_ms - 1 < @now THEN (slot + 1) * @other_slot_ms - 1 ELSE @now END / @slot_ms AS slot,
                 used
          FROM {schema}.rate_slot
          WHERE resource_id = @resource AND window_ms = @other AND slot >= (@now - @window_ms) / @other_slot_ms) AS o
    GROUP BY o.slot;
    INSERT INTO {schema}.rate_window (resource_id, window_ms, rate_limit, seen_ms) VALUES (@resource, @window_ms, @limit, @now);
END;
GO

-- Writes down that so much was used now (or, negative, given back of what was used then), for all windows of a rate, by @waits that had
-- to wait for it.
IF OBJECT_ID(N'{schema}.use_rate') IS NULL EXEC (N'CREATE PROCEDURE {schema}.use_rate AS RETURN 0');
GO
ALTER PROCEDURE {schema}.use_rate @resource nvarchar(255), @used bigint, @now_us bigint, @then bigint, @waits int = 0
AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @now bigint = @now_us / 1000, @leaked bigint;
    SET @leaked = CASE WHEN @then < @now THEN @now_us - @then * 1000 ELSE 0 END;  -- since then, in microseconds
    UPDATE {schema}.rate_window
    SET seen_ms = CASE WHEN seen_ms < @now THEN @now ELSE seen_ms END,
        taken = taken + CASE WHEN @used > 0 THEN @used ELSE 0 END,
        returned = returned - CASE WHEN @used < 0 THEN @used ELSE 0 END,
        waits = waits + @waits,
        full_us = CASE WHEN @used > 0
                       THEN CASE WHEN CASE WHEN full_us < @now_us THEN @now_us ELSE full_us END
                                      + CEILING(CAST(@used AS decimal(19, 0)) * window_ms * 1000 / rate_limit) < 4611686018427387904
                                 THEN CASE WHEN full_us < @now_us THEN @now_us ELSE full_us END
                                      + CAST(CEILING(CAST(@used AS decimal(19, 0)) * window_ms * 1000 / rate_limit) AS bigint)
                                 -- (A debt may be so large that it is never paid.)
                                 WHEN full_us IS NOT NULL THEN 4611686018427387904 END
                       WHEN FLOOR(CAST(-@used AS decimal(19, 0)) * window_ms * 1000 / rate_limit) >= 4611686018427387904
                       THEN full_us - 4611686018427387904 + @leaked
                       -- (Of what has leaked since nothing is left that could be given back.)
                       WHEN FLOOR(CAST(-@used AS decimal(19, 0)) * window_ms * 1000 / rate_limit) > @leaked
                       THEN full_us - CAST(FLOOR(CAST(-@used AS decimal(19, 0)) * window_ms * 1000 / rate_limit) AS bigint) + @leaked
                       ELSE full_us END
    WHERE resource_id = @resource;
    IF @used > 0
    BEGIN
        UPDATE {schema}.rate_slot SET used = used + @used
        WHERE resource_id = @resource AND slot = @now / ((window_ms + 99) / 100);
        INSERT INTO {schema}.rate_slot (resource_id, window_ms, slot, used)
        SELECT @resource, w.window_ms, @now / ((w.window_ms + 99) / 100), @used FROM {schema}.rate_window AS w
        WHERE w.resource_id = @resource
          AND NOT EXISTS (SELECT 1 FROM {schema}.rate_slot AS s
                          WHERE s.resource_id = @resource AND s.window_ms = w.window_ms AND s.slot = @now / ((w.window_ms + 99) / 100));
    END
    ELSE
        UPDATE {schema}.rate_slot SET used = CASE WHEN used + @used > 0 THEN used + @used ELSE 0 END
        WHERE resource_id = @resource AND slot = @then / ((window_ms + 99) / 100);
    DELETE FROM {schema}.rate_slot WHERE resource_id = @resource AND slot < (@now - window_ms) / ((window_ms + 99) / 100);
END;
GO

-- How much of a window is used, and after how many ms @cost may be had of it: its slots leave it one after the other, until enough has.
BEGIN TRANSACTION;
DROP FUNCTION IF EXISTS {schema}.window_use;
GO
CREATE FUNCTION {schema}.window_use(@resource nvarchar(255), @window_ms bigint, @limit bigint, @cost bigint, @now bigint) RETURNS TABLE AS RETURN (
    SELECT COALESCE(SUM(f.used), 0) AS used,
           COALESCE(MAX(CASE WHEN f.total - f.gone + f.used + @cost > @limit
                             THEN (f.slot + 1) * ((@window_ms + 99) / 100) + @window_ms - @now ELSE 0 END), 0) AS wait_ms
    FROM (SELECT s.slot, s.used, SUM(s.used) OVER () AS total,
                 SUM(s.used) OVER (ORDER BY s.slot ROWS UNBOUNDED PRECEDING) AS gone
          FROM {schema}.rate_slot AS s
          WHERE s.resource_id = @resource AND s.window_ms = @window_ms AND s.slot >= (@now - @window_ms) / ((@window_ms + 99) / 100)) AS f
);
GO
COMMIT TRANSACTION;
GO

-- Takes from a rate, in a transaction that has the gate of its resource (or another lock that all who take from it have):
-- @wait_ms, how many ms to wait (0: it was taken), and @taken_ms, when that was, by the server's clock. Takes nothing where
-- @only_look is 1. @waits: 1 where it was waited for until now.
IF OBJECT_ID(N'{schema}.take_tokens') IS NULL EXEC (N'CREATE PROCEDURE {schema}.take_tokens AS RETURN 0');
GO
ALTER PROCEDURE {schema}.take_tokens
    @resource nvarchar(255), @cost bigint, @windows nvarchar(1000), @burst bigint = NULL, @only_look bit = 0,
    @wait_ms bigint = NULL OUTPUT, @taken_ms bigint = NULL OUTPUT, @waits int = 0
AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @us bigint = {schema}.clock_us(), @window_ms bigint, @limit bigint, @full bigint, @room bigint, @seen bigint;
    DECLARE @declared TABLE (window_ms bigint NOT NULL PRIMARY KEY, rate_limit bigint NOT NULL);
    SET @taken_ms = @us / 1000;
    INSERT INTO @declared (window_ms, rate_limit)
    SELECT w.ms, w.most FROM OPENJSON(@windows) WITH (most bigint '$.limit', ms bigint '$.ms') AS w;
    -- (All its rows are kept from here on, as a row that a condition does not find is not: prune must not take them away before what
    -- was taken is written there.)
    SELECT @seen = MAX(seen_ms) FROM {schema}.rate_window WITH (UPDLOCK, ROWLOCK) WHERE resource_id = @resource;
    IF @seen > @taken_ms
        EXEC {schema}.turn_back_rate @resource, @taken_ms;
    WHILE 1 = 1
    BEGIN
        SET @window_ms = NULL;
        SELECT TOP (1) @window_ms = d.window_ms, @limit = d.rate_limit FROM @declared AS d
        WHERE NOT EXISTS (SELECT 1 FROM {schema}.rate_window AS w WHERE w.resource_id = @resource AND w.window_ms = d.window_ms)
        ORDER BY d.window_ms;
        IF @window_ms IS NULL
            BREAK;
        EXEC {schema}.begin_window @resource, @window_ms, @limit, @taken_ms;
    END;
    SELECT @wait_ms = COALESCE(MAX(u.wait_ms), 0)
    FROM @declared AS d CROSS APPLY {schema}.window_use(@resource, d.window_ms, d.rate_limit, @cost, @taken_ms) AS u;
    IF @burst IS NOT NULL
    BEGIN
        SELECT @window_ms = window_ms, @limit = rate_limit FROM @declared;
        -- How far before the moment at which the bucket is empty again this may be had.
        SET @room = FLOOR(CAST(@burst - @cost AS decimal(19, 0)) * @window_ms * 1000 / @limit);
        SELECT @full = full_us FROM {schema}.rate_window WHERE resource_id = @resource AND window_ms = @window_ms;
        IF @full IS NULL
            UPDATE {schema}.rate_window SET full_us = @us WHERE resource_id = @resource AND window_ms = @window_ms;
        ELSE IF @full - @room - @us > @wait_ms * 1000
            SET @wait_ms = (@full - @room - @us + 999) / 1000;
    END;
    IF @wait_ms > 0 OR @only_look = 1
        RETURN 0;
    UPDATE {schema}.rate_window
    SET rate_limit = (SELECT d.rate_limit FROM @declared AS d WHERE d.window_ms = rate_window.window_ms)
    WHERE resource_id = @resource
      AND EXISTS (SELECT 1 FROM @declared AS d WHERE d.window_ms = rate_window.window_ms AND d.rate_limit <> rate_window.rate_limit);
    EXEC {schema}.use_rate @resource, @cost, @us, NULL, @waits;
END;
GO

-- Takes from a rate, at one's turn. @code:
--   0 taken (and the caller's row is gone from the queue)   1 not enough is there, for @wait_ms at least
--   -1 others wait before the caller, or an operator has paused the rate   -2 the caller's row is gone
-- @position: the caller's row in the queue of @resource, if it has one; without, it takes only where nobody waits.
IF OBJECT_ID(N'{schema}.take_rate') IS NULL EXEC (N'CREATE PROCEDURE {schema}.take_rate AS RETURN 0');
GO
ALTER PROCEDURE {schema}.take_rate
    @resource nvarchar(400), @cost bigint, @windows nvarchar(1000), @burst bigint = NULL, @position bigint = NULL,
    @requesting_id nvarchar(400) = NULL, @code int = NULL OUTPUT, @wait_ms bigint = NULL OUTPUT, @taken_ms bigint = NULL OUTPUT,
    @answer bit = 0
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: take_rate must not be called inside an open transaction; commit first and use autocommit', 1;
    SET XACT_ABORT ON;
    IF @@OPTIONS & 2 = 2
        SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @got int, @first bigint,
            @waits int = CASE WHEN @position IS NULL THEN 0 ELSE 1 END,
            @gate nvarchar(255) = LEFT(N'sqlsem.{schema}.gate.' + COALESCE(@resource, N''), 255);
    EXEC {schema}.check_rate @resource, @cost, @windows, @burst;
    SET @wait_ms = NULL;
    SET @taken_ms = NULL;
    BEGIN TRY
        WHILE 1 = 1
        BEGIN
            BEGIN TRANSACTION;
            EXEC @got = sys.sp_getapplock @gate, N'Exclusive', N'Transaction', 1000, @principal;
            IF @got < 0
                THROW 50002, N'sqlsem: busy: somebody keeps the gate of this rate in an open transaction', 1;
            IF @position IS NOT NULL
               AND NOT EXISTS (SELECT 1 FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK) JOIN {schema}.member AS m ON m.member_id = t.member_id
                               WHERE t.resource_id = @resource AND t.queue_position = @position AND t.requesting_id = @requesting_id
                                 AND t.revoked_at IS NULL AND m.login = ORIGINAL_LOGIN())
                SET @code = -2;
            ELSE IF EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                            WHERE resource_id = @resource AND queue_position < COALESCE(@position, 9223372036854775807))
                 OR EXISTS (SELECT 1 FROM {schema}.set_for(@resource) WHERE paused_at IS NOT NULL)
                SET @code = -1;
            ELSE
            BEGIN
                EXEC {schema}.take_tokens @resource, @cost, @windows, @burst, 0, @wait_ms OUTPUT, @taken_ms OUTPUT, @waits;
                SET @code = CASE WHEN @wait_ms > 0 THEN 1 ELSE 0 END;
                SET @taken_ms = CASE WHEN @code = 0 THEN @taken_ms END;
            END;
            COMMIT TRANSACTION;
            IF @code <> -1 OR @position IS NOT NULL
                BREAK;
            -- The dead are in nobody's way.
            SET @first = NULL;
            SELECT TOP (1) @first = queue_position FROM {schema}.entry WHERE resource_id = @resource ORDER BY queue_position;
            IF @first IS NULL
                BREAK;
            EXEC @got = {schema}.suspect @resource, @first, -1;
            IF @got = 0
                BREAK;
        END;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        THROW;
    END CATCH;
    -- (Should this fail, its member's next ping gives the row back.)
    IF @code = 0 AND @position IS NOT NULL
        EXEC {schema}.release @resource, @position, @requesting_id;
    IF @answer = 1
        SELECT @code AS code, @wait_ms AS wait_ms, @taken_ms AS taken_ms;
END;
GO

-- What was taken at @taken_ms has cost @more than that (or less: negative). More counts as used now, and may go beyond the
-- limit; then nobody takes anything until enough of it is out of the window. Less is given back, where it counts still.
IF OBJECT_ID(N'{schema}.settle_rate') IS NULL EXEC (N'CREATE PROCEDURE {schema}.settle_rate AS RETURN 0');
GO
ALTER PROCEDURE {schema}.settle_rate @resource nvarchar(400), @taken_ms bigint, @more bigint
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: settle_rate must not be called inside an open transaction; commit first and use autocommit', 1;
    SET XACT_ABORT ON;
    IF @@OPTIONS & 2 = 2
        SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @got int, @us bigint, @now bigint,
            @gate nvarchar(255) = LEFT(N'sqlsem.{schema}.gate.' + COALESCE(@resource, N''), 255);
    EXEC {schema}.check_rate_name @resource;
    IF COALESCE(@taken_ms, -1) < 0 OR @more IS NULL OR @more NOT BETWEEN -2147483647 AND 2147483647
        THROW 50000, N'sqlsem: a rate cannot be settled so; give what was taken when, and how much more (or less) it has cost', 1;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC @got = sys.sp_getapplock @gate, N'Exclusive', N'Transaction', 1000, @principal;
        IF @got < 0
            THROW 50002, N'sqlsem: busy: somebody keeps the gate of this rate in an open transaction', 1;
        SET @us = {schema}.clock_us();
        SET @now = @us / 1000;
        IF EXISTS (SELECT 1 FROM {schema}.rate_window WHERE resource_id = @resource AND seen_ms > @now)
            EXEC {schema}.turn_back_rate @resource, @now;
        EXEC {schema}.use_rate @resource, @more, @us, @taken_ms;
        COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        THROW;
    END CATCH;
END;
GO

-- A rate's windows, as rates tells them.
BEGIN TRANSACTION;
DROP FUNCTION IF EXISTS {schema}.windows_of;
GO
CREATE FUNCTION {schema}.windows_of(@resource nvarchar(255), @now bigint) RETURNS TABLE AS RETURN (
    SELECT w.resource_id, w.window_ms, w.rate_limit, u.used,
           CASE WHEN w.seen_ms < @now THEN (@now - w.seen_ms) / 1000e0 ELSE 0e0 END AS idle, w.taken, w.returned, w.waits,
           u.wait_ms / 1000e0 AS free_in
    FROM {schema}.rate_window AS w CROSS APPLY {schema}.window_use(w.resource_id, w.window_ms, w.rate_limit, 1, @now) AS u
    WHERE w.resource_id = @resource
);
GO
COMMIT TRANSACTION;
GO

-- Every rate's windows, or those of one, and how much of each is used just now; what was taken and given back, and how often
-- somebody had to wait, since the window is known; in how many seconds there is room in it for 1 more. (It waits for nobody who
-- takes, and keeps nobody waiting.)
IF OBJECT_ID(N'{schema}.rates') IS NULL EXEC (N'CREATE PROCEDURE {schema}.rates AS RETURN 0');
GO
ALTER PROCEDURE {schema}.rates @resource nvarchar(400) = NULL
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
    DECLARE @now bigint = {schema}.clock_us() / 1000;
    SELECT r.resource_id, r.window_ms, r.rate_limit, r.used, r.idle, r.taken, r.returned, r.waits, r.free_in
    FROM (SELECT DISTINCT w.resource_id FROM {schema}.rate_window AS w
          WHERE w.resource_id LIKE N'rate:%' AND (@resource IS NULL OR w.resource_id = @resource)) AS n  -- (not what starts of tasks are)
    CROSS APPLY {schema}.windows_of(n.resource_id, @now) AS r
    ORDER BY r.resource_id, r.window_ms;
END;
GO


-- For sessions -----------------------------------------------------------------------------------------------------

-- Takes from a rate, waiting up to @timeout_ms for it, in the order of asking: at most @limit in any @per_ms, by everybody
-- together. @more_windows: further ones, as [{"limit": 1000, "ms": 3600000}]. Return code:
--   0 taken at once   1 taken after waiting   -1 time is up   -2 its place in the line was taken away by an operator
-- @taken_ms is what settle wants to know.
IF OBJECT_ID(N'{schema}.take') IS NULL EXEC (N'CREATE PROCEDURE {schema}.take AS RETURN 0');
GO
ALTER PROCEDURE {schema}.take
    @rate nvarchar(400), @limit bigint, @per_ms bigint, @cost bigint = 1, @timeout_ms int = -1, @burst bigint = NULL,
    @more_windows nvarchar(1000) = NULL, @note nvarchar(1000) = NULL, @requesting_id nvarchar(400) = NULL,
    @taken_ms bigint = NULL OUTPUT
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET @taken_ms = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: take must not be called in an open transaction or INSERT … EXEC; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    DECLARE @resource nvarchar(400) = N'rate:' + @rate, @windows nvarchar(1000), @deadline datetime2(6), @left int, @code int,
            @wait_ms bigint, @position bigint, @pause int, @message nvarchar(1000);
    IF @rate IS NULL OR DATALENGTH(@rate) = 0 OR @rate LIKE N' %' OR LEN(@rate) > 250
        THROW 50000, N'sqlsem: a rate has a name of 1 to 250 characters, without blanks around it', 1;
    IF COALESCE(@timeout_ms, -2) < -1
        THROW 50000, N'sqlsem: timeout_ms must be 0 or more, or -1 for ever', 1;
    IF @more_windows IS NOT NULL AND (ISJSON(@more_windows) = 0 OR LEFT(LTRIM(@more_windows), 1) <> N'[')
        THROW 50000, N'sqlsem: more_windows is no list of windows as [{"limit": 1000, "ms": 3600000}]', 1;
    SET @windows = CONCAT(N'[{"limit":', COALESCE(CONVERT(nvarchar(20), @limit), N'null'), N',"ms":',
        COALESCE(CONVERT(nvarchar(20), @per_ms), N'null'), N'}', CASE WHEN @more_windows IS NULL THEN N']'
            ELSE CONCAT(N',', STUFF(LTRIM(@more_windows), 1, 1, N'')) END);
    IF @timeout_ms >= 0
        SET @deadline = DATEADD(millisecond, @timeout_ms, SYSUTCDATETIME());
    IF @requesting_id IS NULL
        EXEC {schema}.session_name @requesting_id OUTPUT;
    EXEC {schema}.take_rate @resource, @cost, @windows, @burst, NULL, NULL, @code OUTPUT, @wait_ms OUTPUT, @taken_ms OUTPUT;
    IF @code = 0
        RETURN 0;
    IF @timeout_ms = 0
        RETURN -1;
    SET @left = COALESCE(DATEDIFF(millisecond, SYSUTCDATETIME(), @deadline), -1);
    IF @deadline IS NOT NULL AND @left < 1
        SET @left = 1;
    EXEC @code = {schema}.acquire @resource, 1, N'write', 1, @left, @note, @requesting_id, NULL, @position OUTPUT, @own = 1;
    IF @code < 0
        RETURN @code;
    BEGIN TRY
        WHILE 1 = 1
        BEGIN
            SET @left = COALESCE(DATEDIFF(millisecond, SYSUTCDATETIME(), @deadline), 999);
            EXEC {schema}.take_rate @resource, @cost, @windows, @burst, @position, @requesting_id, @code OUTPUT, @wait_ms OUTPUT,
                @taken_ms OUTPUT;
            IF @code = 0
                RETURN 1;
            IF @code = -2
                RETURN -2;
            IF @left <= 0
            BEGIN
                EXEC {schema}.release @resource, @position, @requesting_id, N'timeout';
                RETURN -1;
            END;
            SET @pause = CASE WHEN @code = -1 THEN 500 WHEN @wait_ms > 900 THEN 900 ELSE @wait_ms END;
            SET @pause = CASE WHEN @pause > @left THEN @left ELSE @pause END;
            EXEC {schema}.doze @pause;
        END;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        BEGIN TRY
            EXEC {schema}.release @resource, @position, @requesting_id, N'cancelled';
        END TRY
        BEGIN CATCH
            IF @@TRANCOUNT > 0
                ROLLBACK TRANSACTION;  -- the first error says more; the row goes with the session
        END CATCH;
        THROW;
    END CATCH;
END;
GO

-- Says what was used in the end of what take has taken (@cost, at @taken_ms): less is given back, more counts as used now.
IF OBJECT_ID(N'{schema}.settle') IS NULL EXEC (N'CREATE PROCEDURE {schema}.settle AS RETURN 0');
GO
ALTER PROCEDURE {schema}.settle @rate nvarchar(400), @taken_ms bigint, @cost bigint, @actual bigint
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @resource nvarchar(400) = N'rate:' + @rate, @more bigint = @actual - @cost;
    IF COALESCE(@cost, 0) < 1 OR COALESCE(@actual, -1) < 0 OR @taken_ms IS NULL
        THROW 50000, N'sqlsem: settle wants what was taken, when (@taken_ms of take), and what it has cost: 0 or more', 1;
    IF @more <> 0
        EXEC {schema}.settle_rate @resource, @taken_ms, @more;
END;
GO
