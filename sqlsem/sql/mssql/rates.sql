-- sqlsem, rates, for SQL Server: limits of use in a window of time. May be run again at any time, after public.sql.
--
-- Requests that wait for a rate wait in the queue of a mutex, resource N'rate:' and the rate's name. The first one
-- takes its tokens as soon as there is room for them, and leaves. Use is recorded in slots, a hundredth of each window.
-- A slot counts until all of it is out of the window: so no period as long as the window exceeds the limit, and a wait
-- is at most a hundredth of the window too long. Each take counts for every window that any client has declared for the
-- rate. If requests declare different limits, all of them are in force: a limit (or burst) binds every request from the
-- take that declares it until that take is out of the window. The lowest limit of a window decides. An operator's limit
-- (cap) is always in force.
-- A rate with a burst also has a bucket, which leaks evenly (GCRA):
-- https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm
-- Times are of the server's clock. If the clock has gone back, use that is now in the future counts as used now.
--
-- @windows: [{"limit": 100, "ms": 60000}, ...]. Needs compatibility level 130 or later.

-- Return the server's time, in microseconds since 1970.
CREATE OR ALTER FUNCTION {schema}.clock_us() RETURNS bigint AS
BEGIN
    DECLARE @now datetime2(6) = SYSUTCDATETIME();
    DECLARE @today datetime2(6) = CAST(@now AS date);
    RETURN (CAST(DATEDIFF(day, '19700101', @now) AS bigint) * 86400 + DATEDIFF(second, @today, @now)) * 1000000
           + DATEPART(microsecond, @now);
END;

-- Raise for a name that is no rate's. (Starts of tasks are counted in the same tables, under other names: no client may
-- use or return them.)
CREATE OR ALTER PROCEDURE {schema}.check_rate_name @resource nvarchar(400) AS {begin_inner}
    DECLARE @message nvarchar(1000);
    EXEC {schema}.check_name N'rate', @resource;
    IF @resource COLLATE Latin1_General_100_BIN2 NOT LIKE N'rate:_%'
    BEGIN
        SET @message = CONCAT(N'sqlsem: ''', @resource, N''' is no rate; the resource of a rate is ''rate:'' and its name');
        EXEC {schema}.raise_error 50000, @message;
    END;
END;

-- Raise for invalid arguments of a take.
CREATE OR ALTER PROCEDURE {schema}.check_rate @resource nvarchar(400), @cost bigint, @windows nvarchar(1000), @burst bigint
AS {begin_inner}
    DECLARE @message nvarchar(1000), @count int, @lengths int, @bad int, @lowest bigint;
    EXEC {schema}.check_rate_name @resource;
    IF ISJSON(@windows) = 1
        SELECT @count = COUNT(*), @lengths = COUNT(DISTINCT COALESCE(w.ms, 0)), @lowest = MIN(COALESCE(w.most, 0)),
               @bad = SUM(CASE WHEN w.ms BETWEEN 1 AND 2147483647 AND w.most BETWEEN 1 AND 2147483647 THEN 0 ELSE 1 END)
        FROM OPENJSON(@windows) WITH (most bigint '$.limit', ms bigint '$.ms') AS w;
    SET @message = CASE
        WHEN COALESCE(@count, -1) NOT BETWEEN 0 AND 10
            THEN N'needs up to 10 limits, and a window for each (or none, where an operator has set them)'
        WHEN @bad > 0 THEN N'has a limit or a window (ms) that is not from 1 to 2147483647'
        WHEN @lengths < @count THEN N'names a window twice'
        WHEN COALESCE(@cost, 0) NOT BETWEEN 1 AND 2147483647
            THEN CONCAT(N'is asked for ', COALESCE(CONVERT(nvarchar(20), @cost), N'NULL'), N'; the cost must be 1 or more, up to 2147483647')
        WHEN @cost > @lowest THEN CONCAT(N'is asked for ', @cost, N', which can never fit into its limit of ', @lowest)
        WHEN @burst IS NOT NULL AND @count <> 1 THEN N'has a burst and several windows; a burst goes with one window'
        WHEN @burst < 1 OR @burst > @lowest THEN CONCAT(N'has a burst that is not from 1 to its limit, but ', @burst)
        WHEN @cost > @burst THEN CONCAT(N'is asked for ', @cost, N', which can never fit into its burst of ', @burst)
    END;
    IF @message IS NOT NULL
    BEGIN
        SET @message = LEFT(CONCAT(N'sqlsem: ''', @resource, N''' ', @message), 1000);
        EXEC {schema}.raise_error 50000, @message;
    END;
END;

-- If the clock has gone back, let use that is now in the future count as used now.
CREATE OR ALTER PROCEDURE {schema}.drop_future_slots @resource nvarchar(255), @now bigint AS {begin_inner}
    DECLARE @ahead TABLE (window_ms bigint NOT NULL, login nvarchar(128) COLLATE Latin1_General_100_BIN2 NOT NULL, used bigint NOT NULL,
                          rate_limit bigint NULL, burst bigint NULL);
    INSERT INTO @ahead (window_ms, login, used, rate_limit, burst)
    SELECT window_ms, login, SUM(used), NULLIF(MIN(COALESCE(rate_limit, 9223372036854775807)), 9223372036854775807),
           NULLIF(MIN(COALESCE(burst, 9223372036854775807)), 9223372036854775807) FROM {schema}.rate_slot
    WHERE resource_id = @resource AND slot >= @now / ((window_ms + 99) / 100) GROUP BY window_ms, login;
    DELETE FROM {schema}.rate_slot WHERE resource_id = @resource AND slot >= @now / ((window_ms + 99) / 100);
    INSERT INTO {schema}.rate_slot (resource_id, window_ms, slot, login, used, rate_limit, burst)
    SELECT @resource, a.window_ms, @now / ((a.window_ms + 99) / 100), a.login, a.used, a.rate_limit, a.burst FROM @ahead AS a;
    UPDATE {schema}.rate_window SET full_us = full_us - (seen_ms - @now) * 1000, seen_ms = @now
    WHERE resource_id = @resource AND seen_ms > @now;
END;

-- Insert a window that does not exist yet. It begins with the recent use of another window, recorded no earlier than it
-- happened.
CREATE OR ALTER PROCEDURE {schema}.begin_window @resource nvarchar(255), @window_ms bigint, @limit bigint, @now bigint
AS {begin_inner}
    DECLARE @message nvarchar(1000);
    -- At most 40 windows, as each take writes to all of them. Delete those first that are no longer in force.
    IF (SELECT COUNT(*) FROM {schema}.rate_window WHERE resource_id = @resource) >= 40
    BEGIN
        DELETE w FROM {schema}.rate_window AS w
        WHERE w.resource_id = @resource AND w.cap IS NULL
          AND NOT EXISTS (SELECT 1 FROM {schema}.rate_slot AS s
                          WHERE s.resource_id = @resource AND s.window_ms = w.window_ms AND s.rate_limit IS NOT NULL
                            AND s.slot >= (@now - w.window_ms) / ((w.window_ms + 99) / 100));
        DELETE s FROM {schema}.rate_slot AS s
        WHERE s.resource_id = @resource
          AND NOT EXISTS (SELECT 1 FROM {schema}.rate_window AS w WHERE w.resource_id = @resource AND w.window_ms = s.window_ms);
        IF (SELECT COUNT(*) FROM {schema}.rate_window WHERE resource_id = @resource) >= 40
        BEGIN
            SET @message = CONCAT(N'sqlsem: programs have declared 40 windows for ''', @resource, N''' within these windows, and no further ',
                N'one fits; EXEC {schema}.rates shows them, reset_rate forgets them');
            EXEC {schema}.raise_error 50000, @message;
        END;
    END;
    DECLARE @other bigint, @slot_ms bigint = (@window_ms + 99) / 100, @other_slot_ms bigint;
    -- Copy from the shortest of the longer windows, or else from the longest.
    SELECT TOP (1) @other = window_ms FROM {schema}.rate_window WHERE resource_id = @resource
    ORDER BY CASE WHEN window_ms < @window_ms THEN 1 ELSE 0 END, ABS(window_ms - @window_ms);
    SET @other_slot_ms = (@other + 99) / 100;
    -- (Slots of an earlier window of this length no longer count.)
    DELETE FROM {schema}.rate_slot WHERE resource_id = @resource AND window_ms = @window_ms;
    INSERT INTO {schema}.rate_slot (resource_id, window_ms, slot, login, used)
    SELECT @resource, @window_ms, o.slot, o.login, SUM(o.used)
    FROM (SELECT CASE WHEN (slot + 1) * @other_slot_ms - 1 < @now THEN (slot + 1) * @other_slot_ms - 1 ELSE @now END / @slot_ms AS slot,
                 login, used
          FROM {schema}.rate_slot
          WHERE resource_id = @resource AND window_ms = @other AND slot >= (@now - @window_ms) / @other_slot_ms) AS o
    GROUP BY o.slot, o.login;
    INSERT INTO {schema}.rate_window (resource_id, window_ms, rate_limit, seen_ms) VALUES (@resource, @window_ms, @limit, @now);
END;

-- Return the windows of a rate that are in force for a request now: the declared ones (@windows); windows that earlier
-- takes have declared, while those takes are in the window; and windows with an operator's limit. fixed: the limit
-- without the limits of earlier takes, which lapse.
CREATE OR ALTER FUNCTION {schema}.windows_in_force(@resource nvarchar(255), @windows nvarchar(1000), @burst bigint, @now bigint) RETURNS TABLE AS RETURN (
    SELECT f.window_ms, f.fixed, CASE WHEN f.lowest < COALESCE(f.fixed, f.lowest + 1) THEN f.lowest ELSE f.fixed END AS rate_limit,
           CASE WHEN f.lowest_burst < COALESCE(f.own_burst, f.lowest_burst + 1) THEN f.lowest_burst ELSE f.own_burst END AS burst, f.full_us
    FROM (SELECT w.window_ms, CASE WHEN w.cap < COALESCE(d.most, w.cap + 1) THEN w.cap ELSE d.most END AS fixed,
                 CASE WHEN d.ms IS NOT NULL THEN @burst END AS own_burst, t.lowest, t.lowest_burst, w.full_us
          FROM {schema}.rate_window AS w
          LEFT JOIN OPENJSON(@windows) WITH (most bigint '$.limit', ms bigint '$.ms') AS d ON d.ms = w.window_ms
          CROSS APPLY (SELECT NULLIF(MIN(COALESCE(s.rate_limit, 9223372036854775807)), 9223372036854775807) AS lowest,
                              NULLIF(MIN(COALESCE(s.burst, 9223372036854775807)), 9223372036854775807) AS lowest_burst
                       FROM {schema}.rate_slot AS s
                       WHERE s.resource_id = @resource AND s.window_ms = w.window_ms
                         AND s.slot >= (@now - w.window_ms) / ((w.window_ms + 99) / 100)) AS t
          WHERE w.resource_id = @resource) AS f
    WHERE f.fixed IS NOT NULL OR f.lowest IS NOT NULL
);

-- Record use now, in all windows of a rate. @waits: how many of its requests had to wait. Negative use returns tokens:
-- of this login's use at @then, and no more than that. @windows, @burst: the declared limits of the request.
CREATE OR ALTER PROCEDURE {schema}.use_rate
    @resource nvarchar(255), @used bigint, @now_us bigint, @then bigint, @waits int = 0, @windows nvarchar(1000) = N'[]', @burst bigint = NULL
AS {begin_inner}
    DECLARE @now bigint = @now_us / 1000, @leaked bigint,
            -- (Starts of tasks belong to no login, as any worker of the queue may return them.)
            @login nvarchar(128) = CASE WHEN @resource LIKE N'rate:%' THEN ORIGINAL_LOGIN() ELSE N'' END;
    SET @leaked = CASE WHEN @then < @now THEN @now_us - @then * 1000 ELSE 0 END;  -- microseconds since @then, in which the bucket leaks
    -- (advance: NULL for a window without any limit, which has no bucket.)
    DECLARE @use TABLE (window_ms bigint NOT NULL PRIMARY KEY, used bigint NOT NULL, advance decimal(38, 0) NULL, most bigint NULL);
    INSERT INTO @use (window_ms, used, advance, most)
    SELECT u.window_ms, u.used,
           CASE WHEN u.used > 0 THEN CEILING(CAST(u.used AS decimal(19, 0)) * u.window_ms * 1000 / u.rate_limit)
                ELSE FLOOR(CAST(-u.used AS decimal(19, 0)) * u.window_ms * 1000 / u.rate_limit) END, d.most
    FROM (SELECT w.window_ms, w.rate_limit,
                 CASE WHEN @used > 0 THEN @used WHEN COALESCE(s.used, 0) < -@used THEN -COALESCE(s.used, 0) ELSE @used END AS used
          FROM {schema}.rate_window AS w
          LEFT JOIN {schema}.rate_slot AS s ON s.resource_id = @resource AND s.window_ms = w.window_ms
              AND s.slot = @then / ((w.window_ms + 99) / 100) AND s.login = @login
          WHERE w.resource_id = @resource) AS u
    LEFT JOIN OPENJSON(@windows) WITH (most bigint '$.limit', ms bigint '$.ms') AS d ON d.ms = u.window_ms;
    UPDATE w
    SET seen_ms = CASE WHEN w.seen_ms < @now THEN @now ELSE w.seen_ms END,
        taken = w.taken + CASE WHEN u.used > 0 THEN u.used ELSE 0 END,
        returned = w.returned - CASE WHEN u.used < 0 THEN u.used ELSE 0 END,
        waits = w.waits + @waits,
        full_us = CASE WHEN w.full_us IS NULL THEN NULL
                       -- (A debt is paid after ten windows at the latest.)
                       WHEN @used > 0 AND CASE WHEN w.full_us < @now_us THEN @now_us ELSE w.full_us END + u.advance > @now_us + 10000 * w.window_ms
                       THEN @now_us + 10000 * w.window_ms
                       WHEN @used > 0 THEN CASE WHEN w.full_us < @now_us THEN @now_us ELSE w.full_us END + CAST(u.advance AS bigint)
                       -- (Tokens that have leaked since cannot be returned.)
                       WHEN u.advance > @leaked AND w.full_us - u.advance + @leaked > @now_us THEN w.full_us - CAST(u.advance AS bigint) + @leaked
                       WHEN u.advance > @leaked AND w.full_us > @now_us THEN @now_us
                       ELSE w.full_us END
    FROM {schema}.rate_window AS w JOIN @use AS u ON u.window_ms = w.window_ms
    WHERE w.resource_id = @resource;
    IF @used > 0
    BEGIN
        UPDATE s
        SET used = s.used + u.used,
            rate_limit = CASE WHEN @login = N'' OR s.rate_limit < COALESCE(u.most, s.rate_limit + 1) THEN s.rate_limit ELSE u.most END,
            burst = CASE WHEN u.most IS NULL OR s.burst < COALESCE(@burst, s.burst + 1) THEN s.burst ELSE @burst END
        FROM {schema}.rate_slot AS s JOIN @use AS u ON u.window_ms = s.window_ms
        WHERE s.resource_id = @resource AND s.slot = @now / ((s.window_ms + 99) / 100) AND s.login = @login;
        INSERT INTO {schema}.rate_slot (resource_id, window_ms, slot, login, used, rate_limit, burst)
        SELECT @resource, u.window_ms, @now / ((u.window_ms + 99) / 100), @login, u.used, CASE WHEN @login <> N'' THEN u.most END,
               CASE WHEN u.most IS NOT NULL THEN @burst END
        FROM @use AS u
        WHERE NOT EXISTS (SELECT 1 FROM {schema}.rate_slot AS s
                          WHERE s.resource_id = @resource AND s.window_ms = u.window_ms
                            AND s.slot = @now / ((u.window_ms + 99) / 100) AND s.login = @login);
    END
    ELSE
        UPDATE s SET used = s.used + u.used
        FROM {schema}.rate_slot AS s JOIN @use AS u ON u.window_ms = s.window_ms
        WHERE s.resource_id = @resource AND s.slot = @then / ((s.window_ms + 99) / 100) AND s.login = @login;
    DELETE FROM {schema}.rate_slot WHERE resource_id = @resource AND slot < (@now - window_ms) / ((window_ms + 99) / 100);
END;

-- Return the current use of a window, and the ms until there is room for @cost: slots leave the window one after the
-- other, with the limits that were declared with them. @fixed: the limit without these, if there is one.
CREATE OR ALTER FUNCTION {schema}.window_use(@resource nvarchar(255), @window_ms bigint, @fixed bigint, @cost bigint, @now bigint) RETURNS TABLE AS RETURN (
    SELECT COALESCE(SUM(f.used), 0) AS used,
           COALESCE(MAX(CASE WHEN f.staying + @cost > @fixed OR f.staying + @cost > f.lowest
                             THEN (f.slot + 1) * ((@window_ms + 99) / 100) + @window_ms - @now ELSE 0 END), 0) AS wait_ms
    FROM (SELECT s.slot, s.used,
                 -- The use of this slot and of all later ones.
                 SUM(s.used) OVER (ORDER BY s.slot DESC ROWS UNBOUNDED PRECEDING) AS staying,
                 MIN(COALESCE(s.lowest, 9223372036854775807)) OVER (ORDER BY s.slot DESC ROWS UNBOUNDED PRECEDING) AS lowest
          FROM (SELECT slot, SUM(used) AS used, MIN(COALESCE(rate_limit, 9223372036854775807)) AS lowest FROM {schema}.rate_slot
                WHERE resource_id = @resource AND window_ms = @window_ms AND slot >= (@now - @window_ms) / ((@window_ms + 99) / 100)
                GROUP BY slot) AS s) AS f
);

-- Take from a rate. @wait_ms: 0 if the tokens were taken, else the ms to wait. @taken_ms: the time of the take, by the
-- server's clock. The caller's transaction has the gate of the resource (or another lock that every taker takes).
-- @only_look = 1: take nothing. @waits: 1 if the request has waited until now.
CREATE OR ALTER PROCEDURE {schema}.take_tokens
    @resource nvarchar(255), @cost bigint, @windows nvarchar(1000), @burst bigint = NULL, @only_look bit = 0,
    @wait_ms bigint = NULL OUTPUT, @taken_ms bigint = NULL OUTPUT, @waits int = 0 AS {begin_inner}
    DECLARE @us bigint = {schema}.clock_us(), @window_ms bigint, @limit bigint, @seen bigint, @cleared int,
            @message nvarchar(1000), @fixed bigint, @by nvarchar(128);
    DECLARE @force TABLE (window_ms bigint NOT NULL PRIMARY KEY, fixed bigint NULL, rate_limit bigint NOT NULL, burst bigint NULL, full_us bigint NULL);
    SET @taken_ms = @us / 1000;
    -- (Lock all windows of the rate: prune must not delete one before the use is written there.)
    SELECT @seen = MAX(seen_ms), @cleared = MAX(CASE WHEN rate_limit IS NULL THEN 1 ELSE 0 END)
    FROM {schema}.rate_window WITH (UPDLOCK, ROWLOCK) WHERE resource_id = @resource;
    IF @seen > @taken_ms
        EXEC {schema}.drop_future_slots @resource, @taken_ms;
    IF @cleared = 1
        UPDATE w SET rate_limit = d.most
        FROM {schema}.rate_window AS w JOIN OPENJSON(@windows) WITH (most bigint '$.limit', ms bigint '$.ms') AS d ON d.ms = w.window_ms
        WHERE w.resource_id = @resource AND w.rate_limit IS NULL;
    WHILE 1 = 1
    BEGIN
        SET @window_ms = NULL;
        SELECT TOP (1) @window_ms = d.ms, @limit = d.most FROM OPENJSON(@windows) WITH (most bigint '$.limit', ms bigint '$.ms') AS d
        WHERE NOT EXISTS (SELECT 1 FROM {schema}.rate_window AS w WHERE w.resource_id = @resource AND w.window_ms = d.ms)
        ORDER BY d.ms;
        IF @window_ms IS NULL
            BREAK;
        EXEC {schema}.begin_window @resource, @window_ms, @limit, @taken_ms;
    END;
    IF @burst IS NOT NULL
        UPDATE w SET full_us = @us
        FROM {schema}.rate_window AS w JOIN OPENJSON(@windows) WITH (ms bigint '$.ms') AS d ON d.ms = w.window_ms
        WHERE w.resource_id = @resource AND w.full_us IS NULL;
    INSERT INTO @force (window_ms, fixed, rate_limit, burst, full_us)
    SELECT f.window_ms, f.fixed, f.rate_limit, f.burst, f.full_us
    FROM {schema}.windows_in_force(@resource, @windows, @burst, @taken_ms) AS f;
    IF @@ROWCOUNT = 0
    BEGIN
        SET @message = CONCAT(N'sqlsem: no limit is set for ''', @resource, N'''; name a limit and a window, or have an operator set them: ',
            N'EXEC {schema}.set_rate');
        EXEC {schema}.raise_error 50008, @message;
    END;
    SELECT TOP (1) @window_ms = f.window_ms, @fixed = f.fixed FROM @force AS f WHERE f.fixed < @cost ORDER BY f.fixed;
    IF @fixed IS NOT NULL
    BEGIN
        SELECT @by = cap_by FROM {schema}.rate_window WHERE resource_id = @resource AND window_ms = @window_ms;
        SET @message = CONCAT(N'sqlsem: ''', @resource, N''' is asked for ', @cost, N', which can never fit into the limit of ', @fixed, N' in ',
            @window_ms, N' ms that ', @by, N' has set');
        EXEC {schema}.raise_error 50000, @message;
    END;
    SELECT @wait_ms = MAX(COALESCE(CASE WHEN u.wait_ms > b.wait_ms THEN u.wait_ms ELSE b.wait_ms END, 0))
    FROM @force AS f
    CROSS APPLY {schema}.window_use(@resource, f.window_ms, f.fixed, @cost, @taken_ms) AS u
    CROSS APPLY (SELECT COALESCE(CASE
        WHEN f.burst < @cost THEN (
            SELECT (MAX(COALESCE(s.slot, 0)) + 1) * ((f.window_ms + 99) / 100) + f.window_ms - @taken_ms FROM {schema}.rate_slot AS s
            WHERE s.resource_id = @resource AND s.window_ms = f.window_ms AND s.burst < @cost)
        -- The bucket has room for the cost before it is empty again, at full_us.
        WHEN f.full_us - CAST(FLOOR(CAST(f.burst - @cost AS decimal(19, 0)) * f.window_ms * 1000 / f.rate_limit) AS bigint) > @us
        THEN (f.full_us - CAST(FLOOR(CAST(f.burst - @cost AS decimal(19, 0)) * f.window_ms * 1000 / f.rate_limit) AS bigint) - @us + 999) / 1000
        END, 0) AS wait_ms) AS b;
    IF @wait_ms > 0 OR @only_look = 1
        RETURN 0;
    UPDATE w SET rate_limit = f.rate_limit, burst = f.burst
    FROM {schema}.rate_window AS w JOIN @force AS f ON f.window_ms = w.window_ms
    WHERE w.resource_id = @resource AND (COALESCE(w.rate_limit, 0) <> f.rate_limit OR COALESCE(w.burst, 0) <> COALESCE(f.burst, 0));
    EXEC {schema}.use_rate @resource, @cost, @us, NULL, @waits, @windows, @burst;
END;

-- Take from a rate, for the first request in its queue. @code:
--   0 taken (and the caller's row is released)   1 not enough room, for @wait_ms at least
--   -1 others wait before the caller, or an operator has paused the rate   -2 the caller's row is gone
-- @position: the caller's row in the queue of @resource, if it has one; without a row, it takes only if the queue is
-- empty.
CREATE OR ALTER PROCEDURE {schema}.take_rate
    @resource nvarchar(400), @cost bigint, @windows nvarchar(1000), @burst bigint = NULL, @position bigint = NULL,
    @requesting_id nvarchar(400) = NULL, @code int = NULL OUTPUT, @wait_ms bigint = NULL OUTPUT, @taken_ms bigint = NULL OUTPUT,
    @answer bit = 0 AS {begin}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: take_rate must not be called inside an open transaction; commit first and use autocommit', 1;
    SET XACT_ABORT ON;
    IF @@OPTIONS & 2 = 2
        SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @got int, @first bigint,
            @waits int = CASE WHEN @position IS NULL THEN 0 ELSE 1 END,
            @gate nvarchar(255) = LEFT(N'gate.sqlsem.{schema}.' + COALESCE(@resource, N''), 255);
    EXEC {schema}.check_rate @resource, @cost, @windows, @burst;
    SET @wait_ms = NULL;
    SET @taken_ms = NULL;
    BEGIN TRY
        WHILE 1 = 1
        BEGIN
            BEGIN TRANSACTION;
            EXEC @got = sys.sp_getapplock @gate, N'Exclusive', N'Transaction', 1000, @principal;
            IF @got < 0
                THROW 50002, N'sqlsem: busy: another session keeps the gate of this rate in an open transaction', 1;
            IF @position IS NOT NULL
               AND NOT EXISTS (SELECT 1 FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK) JOIN {schema}.member AS m ON m.member_id = t.member_id
                               WHERE t.resource_id = @resource AND t.queue_position = @position AND t.requesting_id = @requesting_id
                                 AND t.revoked_at IS NULL AND m.login = ORIGINAL_LOGIN())
                SET @code = -2;
            ELSE IF EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                            WHERE resource_id = @resource AND queue_position < COALESCE(@position, 9223372036854775807))
                 OR EXISTS (SELECT 1 FROM {schema}.effective_settings(@resource) WHERE paused_at IS NOT NULL)
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
            -- Remove dead owners ahead.
            SET @first = NULL;
            SELECT TOP (1) @first = t.queue_position
            FROM {schema}.low_water_mark(@resource) AS f
            JOIN {schema}.entry AS t ON t.resource_id = @resource AND t.queue_position > f.mark ORDER BY t.queue_position;
            IF @first IS NULL
                BREAK;
            EXEC @got = {schema}.check_if_dead @resource, @first, -1;
            IF @got = 0
                BREAK;
        END;
    {end_try_rollback}
    -- (If this fails, the member's next heartbeat releases the row.)
    IF @code = 0 AND @position IS NOT NULL
        EXEC {schema}.release @resource, @position, @requesting_id;
    IF @answer = 1
        SELECT @code AS code, @wait_ms AS wait_ms, @taken_ms AS taken_ms;
END;

-- Correct the cost of this login's take at @taken_ms by @more. A positive @more counts as used now, and may exceed the
-- limit: then no request is served until enough of it is out of the window, or the bucket of a burst has room, after
-- ten windows at the latest. A negative @more is returned, as far as it still counts, and no more than this login took
-- then.
CREATE OR ALTER PROCEDURE {schema}.adjust_rate @resource nvarchar(400), @taken_ms bigint, @more bigint AS {begin}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: adjust_rate must not be called inside an open transaction; commit first and use autocommit', 1;
    SET XACT_ABORT ON;
    IF @@OPTIONS & 2 = 2
        SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @got int, @us bigint, @now bigint,
            @gate nvarchar(255) = LEFT(N'gate.sqlsem.{schema}.' + COALESCE(@resource, N''), 255);
    EXEC {schema}.check_rate_name @resource;
    IF COALESCE(@taken_ms, -1) < 0 OR @more IS NULL OR @more NOT BETWEEN -2147483647 AND 2147483647
        THROW 50000, N'sqlsem: a rate cannot be adjusted so; give what was taken when, and how much more (or less) it has cost', 1;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC @got = sys.sp_getapplock @gate, N'Exclusive', N'Transaction', 1000, @principal;
        IF @got < 0
            THROW 50002, N'sqlsem: busy: another session keeps the gate of this rate in an open transaction', 1;
        SET @us = {schema}.clock_us();
        SET @now = @us / 1000;
        IF EXISTS (SELECT 1 FROM {schema}.rate_window WHERE resource_id = @resource AND seen_ms > @now)
            EXEC {schema}.drop_future_slots @resource, @now;
        EXEC {schema}.use_rate @resource, @more, @us, @taken_ms;
        COMMIT TRANSACTION;
    {end_try_rollback}
END;

-- Reset a rate: delete all use, debts and declared limits, but not the operator's limits and the counters. Return 0, or
-- -1 if there is no such rate. For operators.
CREATE OR ALTER PROCEDURE {schema}.reset_rate @resource nvarchar(400), @answer bit = 0 AS {begin}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: reset_rate must not be called inside an open transaction; commit first and use autocommit', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @got int, @used bigint, @code int = -1,
            @gate nvarchar(255) = LEFT(N'gate.sqlsem.{schema}.' + COALESCE(@resource, N''), 255);
    EXEC {schema}.check_rate_name @resource;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC @got = sys.sp_getapplock @gate, N'Exclusive', N'Transaction', 10000, @principal;
        IF @got < 0
            THROW 50002, N'sqlsem: busy: another session keeps the gate of this rate in an open transaction', 1;
        SELECT @used = MAX(COALESCE(u.used, 0)) FROM (SELECT SUM(used) AS used FROM {schema}.rate_slot WHERE resource_id = @resource GROUP BY window_ms) AS u;
        DELETE FROM {schema}.rate_slot WHERE resource_id = @resource;
        UPDATE {schema}.rate_window SET full_us = NULL, burst = NULL WHERE resource_id = @resource;
        IF @@ROWCOUNT > 0
        BEGIN
            SET @code = 0;
            INSERT INTO {schema}.operation (host, pid, program, action, resource_id, old_value)
            VALUES (LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), N'reset', @resource, COALESCE(@used, 0));
        END;
        COMMIT TRANSACTION;
    {end_try_rollback}
    {answer:@code,code}
END;

-- Set an operator's limit of a rate in a window of this length: an upper bound on declared limits, and the limit of
-- requests that declare none. NULL: remove it. Return 0, or -1 if there was none to remove. For operators.
CREATE OR ALTER PROCEDURE {schema}.set_rate @resource nvarchar(400), @window_ms bigint, @limit bigint, @answer bit = 0
AS {begin}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: set_rate must not be called inside an open transaction; commit first and use autocommit', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @got int, @before bigint, @code int = -1, @now bigint,
            @lowest bigint, @gate nvarchar(255) = LEFT(N'gate.sqlsem.{schema}.' + COALESCE(@resource, N''), 255);
    EXEC {schema}.check_rate_name @resource;
    IF COALESCE(@window_ms, 0) NOT BETWEEN 1 AND 2147483647 OR @limit NOT BETWEEN 1 AND 2147483647
        THROW 50000, N'sqlsem: set_rate needs a limit and a window (ms) from 1 to 2147483647', 1;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC @got = sys.sp_getapplock @gate, N'Exclusive', N'Transaction', 10000, @principal;
        IF @got < 0
            THROW 50002, N'sqlsem: busy: another session keeps the gate of this rate in an open transaction', 1;
        SELECT @before = cap FROM {schema}.rate_window WHERE resource_id = @resource AND window_ms = @window_ms;
        IF @limit IS NOT NULL AND @before IS NULL
           AND (SELECT COUNT(*) FROM {schema}.rate_window WHERE resource_id = @resource AND cap IS NOT NULL) >= 10
            THROW 50000, N'sqlsem: this rate has limits for 10 windows; lift one of them first', 1;
        SET @now = {schema}.clock_us() / 1000;
        IF @limit IS NOT NULL AND NOT EXISTS (SELECT 1 FROM {schema}.rate_window WHERE resource_id = @resource AND window_ms = @window_ms)
            EXEC {schema}.begin_window @resource, @window_ms, @limit, @now;
        IF @limit IS NOT NULL OR @before IS NOT NULL
            SET @code = 0;
        -- (Without the operator's limit only those limits are in force that programs have declared. Without any limit
        -- the window only keeps the use, and a bucket has no size.)
        IF @limit IS NULL
            SELECT @lowest = NULLIF(MIN(COALESCE(rate_limit, 9223372036854775807)), 9223372036854775807) FROM {schema}.rate_slot
            WHERE resource_id = @resource AND window_ms = @window_ms AND slot >= (@now - @window_ms) / ((@window_ms + 99) / 100);
        ELSE
            SET @lowest = @limit;
        UPDATE {schema}.rate_window
        SET cap = @limit, rate_limit = @lowest, cap_by = CASE WHEN @limit IS NOT NULL THEN ORIGINAL_LOGIN() END,
            full_us = CASE WHEN @lowest IS NOT NULL THEN full_us END
        WHERE @code = 0 AND resource_id = @resource AND window_ms = @window_ms;
        IF COALESCE(@before, 0) <> COALESCE(@limit, 0)
            INSERT INTO {schema}.operation (host, pid, program, action, resource_id, old_value, new_value)
            VALUES (LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), N'rate_limit', @resource,
                    CASE WHEN @before IS NOT NULL THEN CONCAT(@before, N' in ', @window_ms, N' ms') END,
                    CASE WHEN @limit IS NOT NULL THEN CONCAT(@limit, N' in ', @window_ms, N' ms') END);
        COMMIT TRANSACTION;
    {end_try_rollback}
    {answer:@code,code}
END;

-- Return the windows of a rate, as the procedure rates does.
CREATE OR ALTER FUNCTION {schema}.windows_of(@resource nvarchar(255), @now bigint) RETURNS TABLE AS RETURN (
    SELECT f.resource_id, f.window_ms, f.rate_limit, u.used, f.idle, f.taken, f.returned, f.waits,
           CASE WHEN f.full_us - f.room_us - @now * 1000 > u.wait_ms * 1000 THEN (f.full_us - f.room_us - @now * 1000 + 999) / 1000
                ELSE u.wait_ms END / 1000e0 AS free_in, f.cap
    FROM (SELECT l.resource_id, l.window_ms, l.rate_limit, l.taken, l.returned, l.waits, l.cap, l.full_us,
                 CASE WHEN l.seen_ms < @now THEN (@now - l.seen_ms) / 1000e0 ELSE 0e0 END AS idle,
                 CAST(FLOOR(CAST(l.burst - 1 AS decimal(19, 0)) * l.window_ms * 1000 / l.rate_limit) AS bigint) AS room_us
          FROM (SELECT w.resource_id, w.window_ms, w.taken, w.returned, w.waits, w.cap, w.full_us, w.burst, w.seen_ms,
                       CASE WHEN t.lowest < w.rate_limit AND (w.cap IS NULL OR t.lowest < w.cap) THEN t.lowest
                            WHEN w.cap < w.rate_limit THEN w.cap ELSE w.rate_limit END AS rate_limit
                FROM {schema}.rate_window AS w
                CROSS APPLY (SELECT NULLIF(MIN(COALESCE(s.rate_limit, 9223372036854775807)), 9223372036854775807) AS lowest FROM {schema}.rate_slot AS s
                             WHERE s.resource_id = w.resource_id AND s.window_ms = w.window_ms
                               AND s.slot >= (@now - w.window_ms) / ((w.window_ms + 99) / 100)) AS t
                WHERE w.resource_id = @resource AND w.rate_limit IS NOT NULL) AS l) AS f
    CROSS APPLY {schema}.window_use(f.resource_id, f.window_ms, f.rate_limit, 1, @now) AS u
);

-- Return the windows of all rates, or of one: @resource N'rate:api' for rate api. rate_limit: the limit in force; used:
-- the use that counts now; idle: seconds since the last use; taken, returned, waits: counters since the window was
-- declared; free_in: the seconds until there is room for one more; cap: the operator's limit. (Windows without any limit
-- are left out.)
--
-- Waits for no request, and delays none.
CREATE OR ALTER PROCEDURE {schema}.rates @resource nvarchar(400) = NULL AS {begin_try}
    SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
    DECLARE @now bigint = {schema}.clock_us() / 1000;
    SELECT r.resource_id, r.window_ms, r.rate_limit, r.used, r.idle, r.taken, r.returned, r.waits, r.free_in, r.cap
    FROM (SELECT DISTINCT w.resource_id FROM {schema}.rate_window AS w
          WHERE w.resource_id LIKE N'rate:%' AND (@resource IS NULL OR w.resource_id = @resource)) AS n  -- (without the starts of tasks)
    CROSS APPLY {schema}.windows_of(n.resource_id, @now) AS r
    ORDER BY r.resource_id, r.window_ms;
{end_try}
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;  -- (Some engines keep the level when a procedure returns.)


-- For sessions -----------------------------------------------------------------------------------------------------

-- Take from a rate: at most @limit in any @per_ms, by all clients together. Wait up to @timeout_ms, in the order of
-- requests. @more_windows: further windows, such as [{"limit": 1000, "ms": 3600000}]. @limit and @per_ms NULL: the
-- operator's limits. @burst: at most this at once, and the rest evenly over the window. @taken_ms: the moment of the
-- take, for `adjust`; NULL if nothing was taken. Return code:
--   0 taken at once
--   1 taken after waiting
--   -1 not in time
--   -2 an operator revoked its row in the queue
--   -3 victim of a deadlock, as of acquire
CREATE OR ALTER PROCEDURE {schema}.take
    @rate nvarchar(400), @limit bigint, @per_ms bigint, @cost bigint = 1, @timeout_ms int = -1, @burst bigint = NULL,
    @more_windows nvarchar(1000) = NULL, @note nvarchar(1000) = NULL, @requesting_id nvarchar(400) = NULL,
    @taken_ms bigint = NULL OUTPUT AS {begin}
    SET @taken_ms = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: take must not be called in an open transaction or INSERT ... EXEC; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    DECLARE @resource nvarchar(400) = N'rate:' + @rate, @windows nvarchar(1000), @deadline datetime2(6), @left int, @code int,
            @wait_ms bigint, @position bigint, @pause int, @message nvarchar(1000);
    IF @rate IS NULL OR DATALENGTH(@rate) = 0 OR @rate LIKE N' %' OR LEN(@rate) > 250
        THROW 50000, N'sqlsem: a rate has a name of 1 to 250 characters, without blanks around it', 1;
    IF COALESCE(@timeout_ms, -2) < -1
        THROW 50000, N'sqlsem: timeout_ms must be 0 or more, or -1 for ever', 1;
    IF @more_windows IS NOT NULL AND (ISJSON(@more_windows) = 0 OR LEN(@more_windows) > 900 OR LEFT(LTRIM(@more_windows), 1) <> N'[')
        THROW 50000, N'sqlsem: more_windows is no list of windows as [{"limit": 1000, "ms": 3600000}]', 1;
    IF @limit IS NULL AND @per_ms IS NULL
        SET @windows = COALESCE(@more_windows, N'[]');  -- an operator's limits
    ELSE
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
            EXEC {schema}.client_sleep @pause;
        END;
    END TRY
    BEGIN CATCH
        {rollback}
        BEGIN TRY
            EXEC {schema}.release @resource, @position, @requesting_id, N'cancelled';
        END TRY
        BEGIN CATCH
            {rollback}  -- (report the first error; the row ends with the session)
        END CATCH;
        {throw_if_busy}
        THROW;
    END CATCH;
END;

-- Report the actual cost of a take, of @cost at @taken_ms. If it is less, the difference is returned; if it is more,
-- the difference counts as used now.
CREATE OR ALTER PROCEDURE {schema}.adjust @rate nvarchar(400), @taken_ms bigint, @cost bigint, @actual bigint AS {begin}
    DECLARE @resource nvarchar(400) = N'rate:' + @rate, @more bigint = @actual - @cost;
    IF COALESCE(@cost, 0) < 1 OR COALESCE(@actual, -1) < 0 OR @taken_ms IS NULL OR LEN(@rate) > 250
        THROW 50000, N'sqlsem: adjust needs @taken_ms of take, the @cost that was taken, and the actual cost: 0 or more', 1;
    IF @more <> 0
        EXEC {schema}.adjust_rate @resource, @taken_ms, @more;
END;
