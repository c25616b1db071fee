-- sqlsem, the overview for SQL Server: the whole state, for displays. May be run again at any time. It only reads, and
-- delays no session that acquires or releases a lock.

-- Return the settings of resources, and the logins that made them, which `resources` does not show.
CREATE OR ALTER PROCEDURE {schema}.resource_settings AS {begin_try}
    SELECT o.resource_id, o.cap, o.paused_at, o.stale_after_ms / CAST(1000 AS float) AS stale_after, o.paused_by, o.cap_by
    FROM {schema}.all_settings() AS o;
{end_try}

-- Return the whole state except the rows of entries, in several results; their first column names the kind of row.
-- batches: batches that are open, that have failed and have no successor, or whose callback has not finished; without
-- bodies. holds: the holds that ended normally, of the last 200 requests of each of the 200 resources with the most
-- waiters. rates: the rows of the procedure rates, of the 200 rates with the most waiters, then with the latest use.
CREATE OR ALTER PROCEDURE {schema}.overview AS {begin_try}
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @now datetime2(6) = SYSUTCDATETIME(), @start datetime2(6) = (SELECT grace_from FROM {schema}.origin());
    DECLARE @member TABLE (member_id bigint NOT NULL PRIMARY KEY, missing int NULL);
    DECLARE @count TABLE (member_id bigint NOT NULL PRIMARY KEY, holding bigint NULL, waiting bigint NULL);
    -- feature: queue
    DECLARE @queue TABLE (queue_name nvarchar(255) NULL, pending bigint NULL, running bigint NULL, finished bigint NULL,
                          failed bigint NULL, cancelled bigint NULL, lost bigint NULL, oldest float NULL, rate float NULL,
                          blocked_by bigint NULL);
    -- end of feature: queue
    DECLARE @wanted TABLE (resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY);
    SELECT N'clock' AS what, @now AS taken_at;
    SELECT N'setting' AS what, o.resource_id, o.cap, o.paused_at, o.stale_after_ms / CAST(1000 AS float) AS stale_after,
           o.paused_by, o.cap_by
    FROM {schema}.all_settings() AS o;
    {missing_members};
    INSERT INTO @count (member_id, holding, waiting)
    SELECT t.member_id, SUM(CASE WHEN t.granted_at IS NOT NULL THEN 1 ELSE 0 END), SUM(CASE WHEN t.granted_at IS NULL THEN 1 ELSE 0 END)
    FROM {schema}.entry AS t WITH (NOLOCK) WHERE t.member_id IS NOT NULL GROUP BY t.member_id;
    SELECT N'member' AS what, m.member_id, m.host, COALESCE(m.pid, m.session_id) AS pid, m.program, m.login, m.joined_at,
           CASE WHEN m.lease_ms IS NULL THEN N'beacon' ELSE N'lease' END AS kind,
           CASE WHEN b.missing = 1
                THEN DATEDIFF_BIG(microsecond, COALESCE(m.lease_until, m.missing_since, m.heartbeat_at), @now)
                     / CAST(1000000 AS float) END AS missing_for,
           COALESCE(m.lease_ms, m.grace_ms) / CAST(1000 AS float) AS grace,
           CASE WHEN l.grace_left < 0 THEN 0 ELSE l.grace_left END AS grace_left,
           COALESCE(c.holding, 0) AS holding, COALESCE(c.waiting, 0) AS waiting
    FROM {schema}.member AS m WITH (NOLOCK) JOIN @member AS b ON b.member_id = m.member_id
    LEFT JOIN @count AS c ON c.member_id = m.member_id
    CROSS APPLY (SELECT CASE WHEN m.lease_until IS NOT NULL
                             THEN DATEDIFF_BIG(microsecond, @now, m.lease_until) / CAST(1000000 AS float)
                             WHEN b.missing = 1
                             THEN DATEDIFF_BIG(microsecond, @now, DATEADD(millisecond, m.grace_ms,
                                      CASE WHEN @start > m.heartbeat_at THEN @start ELSE m.heartbeat_at END)) / CAST(1000000 AS float)
                             END AS grace_left) AS l
    ORDER BY m.member_id;
    -- feature: queue
    INSERT INTO @queue (queue_name, pending, running, finished, failed, cancelled, lost, oldest, rate, blocked_by)
    EXEC {schema}.queue_counts;
    SELECT N'queue' AS what, q.queue_name, q.pending, q.running, q.finished, q.failed, q.cancelled, q.lost, q.oldest, q.rate,
           q.blocked_by
    FROM @queue AS q ORDER BY q.queue_name;
    -- end of feature: queue
    -- feature: batches
    SELECT N'batch' AS what, r.batch_id, r.batch_name, r.status, r.window_ms / CAST(1000 AS float) AS window_seconds, r.opened_at,
           r.ended_at,
           DATEDIFF_BIG(microsecond, r.opened_at, COALESCE(r.ended_at, @now)) / CAST(1000000 AS float) AS seconds,
           r.callback_status, r.callback_kind, CAST(NULL AS nvarchar(1)) AS callback_body, r.callback_attempt, r.callback_owner, r.callback_started,
           r.callback_ended,
           DATEDIFF_BIG(microsecond, r.callback_started, COALESCE(r.callback_ended, @now)) / CAST(1000000 AS float) AS callback_seconds,
           r.callback_error, p.part, p.status AS part_status, p.is_last, p.attempt, p.member_id, p.owner, p.host, p.pid,
           p.started_at, p.ended_at AS part_ended,
           DATEDIFF_BIG(microsecond, p.started_at, COALESCE(p.ended_at, @now)) / CAST(1000000 AS float) AS part_seconds, p.error,
           CASE WHEN p.status = N'running' AND (b.missing IS NULL OR b.missing = 1)
                THEN DATEDIFF_BIG(microsecond, COALESCE(m.lease_until, m.missing_since, m.heartbeat_at, p.started_at), @now)
                     / CAST(1000000 AS float) END AS missing_for,
           r.opened_by, p.login, r.callback_kept_by, r.callback_login
    FROM {schema}.batch AS r WITH (NOLOCK) JOIN {schema}.batch_part AS p WITH (NOLOCK) ON p.batch_id = r.batch_id
    LEFT JOIN @member AS b ON b.member_id = p.member_id
    LEFT JOIN {schema}.member AS m WITH (NOLOCK) ON m.member_id = p.member_id
    WHERE r.status = N'open' OR r.callback_status IN (N'pending', N'running')
       OR ((r.status = N'failed' OR r.callback_status = N'failed')
           AND NOT EXISTS (SELECT 1 FROM {schema}.batch AS n WITH (NOLOCK)
                           WHERE n.batch_name = r.batch_name AND n.batch_id > r.batch_id))
    ORDER BY r.batch_id DESC, p.part;
    -- end of feature: batches
    INSERT INTO @wanted (resource_id)
    SELECT TOP (200) t.resource_id FROM {schema}.entry AS t WITH (NOLOCK) GROUP BY t.resource_id
    ORDER BY SUM(CASE WHEN t.granted_at IS NULL THEN 1 ELSE 0 END) DESC, t.resource_id;
    SELECT N'hold' AS what, w.resource_id,
           DATEDIFF_BIG(microsecond, h.granted_at, h.ended_at) / CAST(1000000 AS float) AS held,
           DATEDIFF_BIG(microsecond, h.requested_at, h.granted_at) / CAST(1000000 AS float) AS waited, h.note, h.program
    FROM @wanted AS w
    CROSS APPLY (SELECT TOP (200) p.queue_position, p.requested_at, p.granted_at, p.ended_at, p.outcome, p.note, p.program
                 FROM {schema}.history AS p WITH (NOLOCK) WHERE p.resource_id = w.resource_id ORDER BY p.ended_at DESC) AS h
    WHERE h.outcome = N'released' AND h.granted_at IS NOT NULL
    ORDER BY w.resource_id, h.ended_at DESC, h.queue_position DESC;
{end_try}
-- feature: rates
-- (A TRY block of its own, as some engines let none change the isolation level after it has read.)
BEGIN TRY
    SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
    DECLARE @now_ms bigint = {schema}.clock_us() / 1000;
    SELECT N'rate' AS what, r.resource_id, r.window_ms, r.rate_limit, r.used, r.idle, r.taken, r.returned, r.waits, r.free_in, r.cap
    FROM (SELECT TOP (200) w.resource_id FROM {schema}.rate_window AS w
          LEFT JOIN (SELECT t.resource_id, COUNT(*) AS waiting FROM {schema}.entry AS t
                     WHERE t.resource_id LIKE N'rate:%' GROUP BY t.resource_id) AS q ON q.resource_id = w.resource_id
          WHERE w.resource_id LIKE N'rate:%'
          GROUP BY w.resource_id ORDER BY MAX(COALESCE(q.waiting, 0)) DESC, MAX(w.seen_ms) DESC, w.resource_id) AS n
    CROSS APPLY {schema}.windows_of(n.resource_id, @now_ms) AS r
    ORDER BY r.resource_id, r.window_ms;
{end_try}
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;  -- (Some engines keep the level when a procedure returns.)
-- end of feature: rates


-- Estimates of grants ------------------------------------------------------------------------------------------

-- Return the kind of a hold: its note without numbers, or else its program.
CREATE OR ALTER FUNCTION {schema}.kind_of(@note nvarchar(1000), @program nvarchar(255)) RETURNS nvarchar(1100) AS
BEGIN
    DECLARE @text nvarchar(1000) = @note, @digit int = 0;
    IF COALESCE(DATALENGTH(@note), 0) = 0
        RETURN CONCAT(N'program ', @program);
    WHILE @digit < 10
    BEGIN
        SET @text = REPLACE(@text, CAST(@digit AS nvarchar(1)), N'#');
        SET @digit = @digit + 1;
    END;
    WHILE CHARINDEX(N'##', @text) > 0
        SET @text = REPLACE(@text, N'##', N'#');
    RETURN CONCAT(N'note ', @text);
END;

-- Return seconds as hours, minutes and seconds: 0:12:30.
CREATE OR ALTER FUNCTION {schema}.format_seconds(@seconds float) RETURNS nvarchar(40) AS
BEGIN
    DECLARE @whole bigint = CAST(ROUND(@seconds, 0) AS bigint);
    RETURN CONCAT(@whole / 3600, N':', RIGHT(CONCAT(N'0', @whole / 60 % 60), 2), N':', RIGHT(CONCAT(N'0', @whole % 60), 2));
END;

-- Return the numbers of `estimate`; NULL if it returns no row. Simulate the queue 100 times, like `sqlsem why` (which
-- also estimates what this leaves out). A holder stays for as long as one of the recent holds that were longer, and a
-- waiter is granted as soon as the rule allows it. Each row of the queue is simulated in all simulations (@play) at
-- once.
CREATE OR ALTER PROCEDURE {schema}.simulate_queue
    @queue_position bigint, @low float OUTPUT, @likely float OUTPUT, @high float OUTPUT, @held_low float OUTPUT,
    @held_high float OUTPUT, @holds int OUTPUT AS {begin}
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @now datetime2(6) = SYSUTCDATETIME(), @never float = 1E300;
    DECLARE @resource nvarchar(255), @cap int, @paused_at datetime2(6), @rows int, @place int = 0, @kind nvarchar(1100), @access nvarchar(64),
            @limit bigint, @weight bigint, @state nvarchar(10), @held float, @left float, @doubt float, @shorter int;
    DECLARE @member TABLE (member_id bigint NOT NULL PRIMARY KEY, missing int NULL);
    DECLARE @row TABLE (
        place int NOT NULL PRIMARY KEY, access_type nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL, concurrency_limit bigint NOT NULL,
        weight bigint NOT NULL, state nvarchar(10) NOT NULL, held float NULL, remaining_ms float NULL, kind nvarchar(1100) NOT NULL);
    DECLARE @hold TABLE (place int NOT NULL PRIMARY KEY, held float NOT NULL, kind nvarchar(1100) NOT NULL);
    -- Of the current row: the durations of similar holds, in order; and the time of its grant.
    DECLARE @like TABLE (rank int NOT NULL PRIMARY KEY, held float NOT NULL);
    DECLARE @enter TABLE (rank int NOT NULL PRIMARY KEY, play int NOT NULL, enters float NOT NULL);
    -- luck: the error of the means in this simulation, in standard deviations.
    DECLARE @play TABLE (play int NOT NULL PRIMARY KEY, luck float NOT NULL);
    DECLARE @stay TABLE (place int NOT NULL, play int NOT NULL, leaves float NOT NULL, PRIMARY KEY (play, place));
    SELECT @low = NULL, @likely = NULL, @high = NULL, @held_low = NULL, @held_high = NULL, @holds = NULL;
    SELECT @resource = resource_id FROM {schema}.entry WITH (NOLOCK) WHERE queue_position = @queue_position;
    SELECT @cap = s.cap, @paused_at = s.paused_at FROM {schema}.effective_settings(@resource) AS s;
    IF @resource IS NULL OR @paused_at IS NOT NULL
       OR 60 < (SELECT COUNT(*) FROM (SELECT TOP (61) t.queue_position FROM {schema}.entry AS t WITH (NOLOCK)
                                      WHERE t.resource_id = @resource AND t.queue_position < @queue_position) AS a)
        RETURN 0;
    INSERT INTO @hold (place, held, kind)
    SELECT ROW_NUMBER() OVER (ORDER BY h.ended_at DESC, h.queue_position DESC),
           DATEDIFF_BIG(microsecond, h.granted_at, h.ended_at) / CAST(1000000 AS float), {schema}.kind_of(h.note, h.program)
    FROM (SELECT TOP (200) p.queue_position, p.granted_at, p.ended_at, p.outcome, p.note, p.program
          FROM {schema}.history AS p WITH (NOLOCK) WHERE p.resource_id = @resource ORDER BY p.ended_at DESC) AS h
    WHERE h.outcome = N'released' AND h.granted_at IS NOT NULL;
    IF @@ROWCOUNT < 5
        RETURN 0;
    {missing_members}
    WHERE m.member_id IN (SELECT t.member_id FROM {schema}.entry AS t WITH (NOLOCK)
                          WHERE t.resource_id = @resource AND t.queue_position <= @queue_position);
    -- (0 ms remain for a dead owner, and for a row that leaves without a grant.)
    INSERT INTO @row (place, access_type, concurrency_limit, weight, state, held, remaining_ms, kind)
    SELECT ROW_NUMBER() OVER (ORDER BY t.queue_position), t.access_type, COALESCE(t.concurrency_limit, 2147483647),
           COALESCE(t.weight, 1), CASE WHEN t.revoked_at IS NULL AND h.holds = 0 THEN N'waits' ELSE N'holds' END,
           DATEDIFF_BIG(microsecond, COALESCE(t.granted_at, t.requested_at), @now) / CAST(1000000 AS float),
           CASE WHEN t.member_id IS NOT NULL AND (m.member_id IS NULL OR t.granted_at IS NULL) THEN 0
                WHEN b.missing = 1 AND m.lease_until IS NOT NULL THEN 0
                WHEN b.missing = 1
                THEN DATEDIFF_BIG(microsecond, @now, DATEADD(millisecond, m.grace_ms, COALESCE(m.missing_since, m.heartbeat_at)))
                     / CAST(1000000 AS float) END,
           {schema}.kind_of(t.note, m.program)
    FROM {schema}.row_states(@resource) AS h
    JOIN {schema}.entry AS t WITH (NOLOCK) ON t.resource_id = h.resource_id AND t.queue_position = h.queue_position
    LEFT JOIN @member AS b ON b.member_id = t.member_id
    LEFT JOIN {schema}.member AS m WITH (NOLOCK) ON m.member_id = t.member_id
    WHERE t.queue_position <= @queue_position;
    SET @rows = @@ROWCOUNT;
    -- The random numbers are the same in each call, so that displayed estimates do not jump.
    INSERT INTO @play (play, luck)
    SELECT u.play, SQRT(-2 * LOG(u.one)) * COS(2 * PI() * u.other)
    FROM (SELECT n.play,
                 (CAST(SUBSTRING(HASHBYTES('SHA2_256', CONCAT(N'one ', n.play)), 1, 3) AS int) + 0.5) / CAST(16777216 AS float) AS one,
                 (CAST(SUBSTRING(HASHBYTES('SHA2_256', CONCAT(N'other ', n.play)), 1, 3) AS int) + 0.5) / CAST(16777216 AS float) AS other
          FROM (SELECT 10 * a.n + b.n AS play
                FROM (VALUES (0), (1), (2), (3), (4), (5), (6), (7), (8), (9)) AS a (n)
                CROSS JOIN (VALUES (0), (1), (2), (3), (4), (5), (6), (7), (8), (9)) AS b (n)) AS n) AS u;
    WHILE @place < @rows
    BEGIN
        SET @place = @place + 1;
        SELECT @access = access_type, @limit = concurrency_limit, @weight = weight, @state = state, @held = held, @left = remaining_ms, @kind = kind
        FROM @row WHERE place = @place;
        DELETE FROM @like;
        INSERT INTO @like (rank, held)
        SELECT ROW_NUMBER() OVER (ORDER BY n.held, n.place), n.held
        FROM (SELECT TOP (60) h.held, h.place FROM @hold AS h
              WHERE h.kind = @kind OR 8 > (SELECT COUNT(*) FROM @hold AS k WHERE k.kind = @kind)
              ORDER BY h.place) AS n;
        SET @holds = @@ROWCOUNT;
        SET @shorter = 0;
        IF @state = N'waits'
        BEGIN
            SET @held = 0;
            -- In each simulation the row enters when there is room for it beside the rows that stay for longer.
            DELETE FROM @enter;
            INSERT INTO @enter (rank, play, enters)
            SELECT ROW_NUMBER() OVER (ORDER BY e.enters, e.play), e.play, e.enters
            FROM (SELECT p.play, CASE WHEN @weight > @limit OR @weight > @cap THEN @never ELSE MAX(COALESCE(a.leaves, 0)) END AS enters
                  FROM @play AS p
                  LEFT JOIN (SELECT s.play, s.leaves,
                                    SUM(COALESCE(r.weight, 0)) OVER (PARTITION BY s.play ORDER BY s.leaves DESC, s.place DESC ROWS UNBOUNDED PRECEDING) AS load,
                                    MIN(COALESCE(r.concurrency_limit, 2147483647)) OVER (PARTITION BY s.play ORDER BY s.leaves DESC, s.place DESC
                                                                   ROWS UNBOUNDED PRECEDING) AS declared
                             FROM @stay AS s JOIN @row AS r ON r.place = s.place
                             WHERE @access = N'write' OR r.access_type <> @access) AS a
                      ON a.play = p.play AND (@weight + a.load > @limit OR @weight + a.load > @cap OR @weight + a.load > a.declared)
                  GROUP BY p.play) AS e;
        END
        ELSE
            SELECT @shorter = COUNT(*) FROM @like WHERE held <= @held;
        IF @place < @rows
        BEGIN
            SELECT @doubt = CASE WHEN AVG(held) > 0 THEN STDEVP(held) / AVG(held) / SQRT(COUNT(*)) ELSE 0 END FROM @like;
            -- A hold lasts as long as one of the similar holds that were longer. Each gap between two of these gets the
            -- same share of the simulations, and so do the gaps below the first and above the last. A hold that has
            -- lasted longer than all of them lasts for ever. (As in sqlsem/insight/estimates.py.)
            INSERT INTO @stay (place, play, leaves)
            SELECT @place, d.play,
                   CASE WHEN @state = N'waits' THEN d.enters + d.lasts * EXP(@doubt * d.luck)
                        WHEN @left <= 0 THEN 0 WHEN @left < d.lasts THEN @left ELSE d.lasts END
            FROM (SELECT x.play, x.luck, x.enters,
                         CASE WHEN above.held IS NOT NULL THEN x.below + (above.held - x.below) * x.rest
                              ELSE CASE WHEN x.below > 0.001 THEN x.below ELSE 0.001 END
                                   * POWER(1 - CASE WHEN x.rest < 0.98 THEN x.rest ELSE 0.98 END, -0.6) END - @held AS lasts
                  FROM (SELECT w.play, w.luck, w.enters, w.next_rank, w.rest, COALESCE(l.held, @held) AS below
                        FROM (SELECT v.play, v.luck, v.enters, @shorter + FLOOR(v.at) + 1 AS next_rank, v.at - FLOOR(v.at) AS rest,
                                     CASE WHEN v.at >= 1 THEN @shorter + FLOOR(v.at) END AS last_rank
                              FROM (SELECT p.play, p.luck, COALESCE(e.enters, 0) AS enters,
                                           (ROW_NUMBER() OVER (ORDER BY HASHBYTES('SHA2_256', CONCAT(@place, N' ', p.play)), p.play) - 0.5)
                                           / CAST(100 AS float) * (@holds - @shorter + 1) AS at
                                    FROM @play AS p LEFT JOIN @enter AS e ON e.play = p.play) AS v) AS w
                        LEFT JOIN @like AS l ON l.rank = w.last_rank) AS x
                  LEFT JOIN @like AS above ON above.rank = x.next_rank) AS d;
        END;
    END;
    IF @state <> N'waits' OR @never <= (SELECT MAX(enters) FROM @enter)
    BEGIN
        SET @holds = NULL;
        RETURN 0;
    END;
    -- Quantiles, interpolated between the two values with the nearest ranks.
    SELECT @low = SUM(CASE WHEN ABS(rank - 10.9) < 1 THEN enters * (1 - ABS(rank - 10.9)) ELSE 0 END),
           @likely = SUM(CASE WHEN ABS(rank - 50.5) < 1 THEN enters * (1 - ABS(rank - 50.5)) ELSE 0 END),
           @high = SUM(CASE WHEN ABS(rank - 90.1) < 1 THEN enters * (1 - ABS(rank - 90.1)) ELSE 0 END)
    FROM @enter;
    SELECT @held_low = SUM(CASE WHEN ABS(l.low) < 1 THEN l.held * (1 - ABS(l.low)) ELSE 0 END),
           @held_high = SUM(CASE WHEN ABS(l.high) < 1 THEN l.held * (1 - ABS(l.high)) ELSE 0 END)
    FROM (SELECT held, rank - 1 - 0.1 * (@holds - 1) AS low, rank - 1 - 0.9 * (@holds - 1) AS high FROM @like) AS l;
END;

-- Estimate when a waiting request will be granted, in seconds from now: likely, and low and high, with eight of ten
-- cases in between. held_low, held_high: how long such locks are held, in eight of ten cases; holds: the number of
-- holds from which that is known. No row if the request does not wait, the resource is paused, fewer than five holds
-- are known, or more than 60 requests are ahead of it.
CREATE OR ALTER PROCEDURE {schema}.estimate @queue_position bigint AS {begin_try}
    DECLARE @low float, @likely float, @high float, @held_low float, @held_high float, @holds int;
    EXEC {schema}.simulate_queue @queue_position, @low OUTPUT, @likely OUTPUT, @high OUTPUT, @held_low OUTPUT, @held_high OUTPUT, @holds OUTPUT;
    SELECT @low AS low, @likely AS likely, @high AS high, @held_low AS held_low, @held_high AS held_high, @holds AS holds
    WHERE @holds IS NOT NULL;
{end_try}

-- Return why a request waits: one row for each row that blocks it, from the head of the queue on, or one row without a
-- blocker; no row if there is no such request. code: as of `sqlsem why`; or holds, revoked or dead for a request that no
-- longer waits. reason: the same in words, and when the request will be granted, if `estimate` can tell. goes_on_at: the
-- position at which the blocker's owner waits itself, for the next call.
CREATE OR ALTER PROCEDURE {schema}.why @queue_position bigint AS {begin_try}
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @now datetime2(6) = SYSUTCDATETIME(), @start datetime2(6) = (SELECT grace_from FROM {schema}.origin());
    DECLARE @resource nvarchar(255), @access nvarchar(64), @limit bigint, @weight bigint, @member bigint, @owner nvarchar(255),
            @state nvarchar(10), @cap int, @cap_by nvarchar(128), @pattern nvarchar(255), @paused_at datetime2(6), @paused_by nvarchar(128),
            @usable bigint, @room bigint = 2147483647, @edge bigint, @edge_uncapped bigint, @own bigint, @code nvarchar(20),
            @low float, @likely float, @high float, @held_low float, @held_high float, @holds int, @reason nvarchar(1000), @all int = 0, @writers int = 0, @stages int = 0, @readers int = 0;
    DECLARE @entry TABLE (
        queue_position bigint NOT NULL PRIMARY KEY, access_type nvarchar(64) NULL, concurrency_limit bigint NOT NULL,
        weight bigint NOT NULL, member_id bigint NULL, owner nvarchar(255) NULL, granted int NOT NULL, state nvarchar(10) NOT NULL,
        since datetime2(6) NULL, host nvarchar(255) NULL, pid int NULL, program nvarchar(255) NULL, note nvarchar(1000) NULL,
        behind int NOT NULL);
    SELECT @resource = resource_id FROM {schema}.entry WITH (NOLOCK) WHERE queue_position = @queue_position;
    INSERT INTO @entry (queue_position, access_type, concurrency_limit, weight, member_id, owner, granted, state, since, host, pid,
                        program, note, behind)
    SELECT t.queue_position, t.access_type, COALESCE(t.concurrency_limit, 2147483647), COALESCE(t.weight, 1), t.member_id, t.owner,
           CASE WHEN t.granted_at IS NOT NULL THEN 1 ELSE 0 END,
           CASE WHEN t.member_id IS NOT NULL AND m.member_id IS NULL THEN N'dead'
                WHEN t.revoked_at IS NOT NULL THEN N'revoked' WHEN h.holds = 1 THEN N'holds' ELSE N'waits' END,
           COALESCE(t.granted_at, t.requested_at), m.host, m.pid, m.program, t.note, 0
    FROM {schema}.row_states(@resource) AS h
    JOIN {schema}.entry AS t WITH (NOLOCK) ON t.resource_id = h.resource_id AND t.queue_position = h.queue_position
    LEFT JOIN {schema}.member AS m WITH (NOLOCK) ON m.member_id = t.member_id;
    -- Mark rows of dead members, by the rule of `entries`.
    UPDATE @entry SET state = N'dead'
    WHERE state <> N'dead' AND member_id IN (
        SELECT m.member_id FROM {schema}.member AS m WITH (NOLOCK)
        WHERE CASE WHEN m.lease_until IS NOT NULL THEN CASE WHEN m.lease_until < @now THEN 1 ELSE 0 END
                   WHEN m.beacon IS NULL
                        OR DATEADD(millisecond, m.grace_ms, CASE WHEN @start > m.heartbeat_at THEN @start ELSE m.heartbeat_at END) > @now
                        OR (@start IS NULL AND m.grace_ms > 0
                            AND (m.missing_since IS NULL OR DATEADD(millisecond, m.grace_ms, m.missing_since) > @now)) THEN 0
                   WHEN APPLOCK_MODE(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Session') <> N'NoLock' THEN 0
                   ELSE APPLOCK_TEST(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Shared', N'Session') END = 1);
    SELECT @access = access_type, @limit = concurrency_limit, @weight = weight, @member = member_id, @owner = owner, @state = state
    FROM @entry WHERE queue_position = @queue_position;
    IF @state IS NULL
        SET @code = NULL;
    ELSE IF @state = N'holds' AND LEFT(@access, 7) = N'upgrade'
    BEGIN
        SET @code = N'upgrading';
        SET @reason = N'it becomes the writer when the others have left';
        UPDATE @entry SET behind = 1 WHERE granted = 1 AND queue_position <> @queue_position;
    END
    ELSE IF @state <> N'waits'
    BEGIN
        SET @code = @state;
        SET @reason = CASE WHEN @state = N'holds' AND @owner LIKE N'handed over by %' THEN N'it was handed over, and is not adopted yet'
                           WHEN @state = N'holds' THEN N'it is granted'
                           WHEN @state = N'dead' THEN N'its owner is dead: the next waiter that checks removes it'
                           ELSE N'an operator has revoked it' END;
    END
    ELSE
    BEGIN
        SELECT @cap = cap, @cap_by = cap_by, @paused_at = paused_at, @paused_by = paused_by
        FROM {schema}.resource WITH (NOLOCK) WHERE resource_id = @resource;
        IF @cap IS NULL
            SELECT @cap = cap, @cap_by = cap_by, @pattern = prefix + N'*' FROM {schema}.pattern_of(@resource);
        -- (If the cap is below the request's weight, compute the blockers without the cap.)
        SET @usable = CASE WHEN @cap >= @weight THEN @cap ELSE 2147483647 END;
        SELECT TOP (1) @edge = a.queue_position
        FROM (SELECT e.queue_position, SUM(COALESCE(e.weight, 0)) OVER (ORDER BY e.queue_position ROWS UNBOUNDED PRECEDING) AS load,
                     MIN(COALESCE(e.concurrency_limit, 2147483647)) OVER (ORDER BY e.queue_position ROWS UNBOUNDED PRECEDING) AS declared
              FROM @entry AS e
              WHERE e.queue_position < @queue_position AND (@access = N'write' OR e.access_type <> @access)) AS a
        WHERE a.load + @weight > @limit OR a.load + @weight > @usable OR a.load + @weight > a.declared
        ORDER BY a.queue_position;
        SELECT TOP (1) @edge_uncapped = a.queue_position
        FROM (SELECT e.queue_position, SUM(COALESCE(e.weight, 0)) OVER (ORDER BY e.queue_position ROWS UNBOUNDED PRECEDING) AS load,
                     MIN(COALESCE(e.concurrency_limit, 2147483647)) OVER (ORDER BY e.queue_position ROWS UNBOUNDED PRECEDING) AS declared
              FROM @entry AS e
              WHERE e.queue_position < @queue_position AND (@access = N'write' OR e.access_type <> @access)) AS a
        WHERE a.load + @weight > @limit OR a.load + @weight > a.declared
        ORDER BY a.queue_position;
        SELECT TOP (1) @own = a.queue_position
        FROM (SELECT e.queue_position, SUM(COALESCE(e.weight, 0)) OVER (ORDER BY e.queue_position ROWS UNBOUNDED PRECEDING) AS load,
                     MIN(COALESCE(e.concurrency_limit, 2147483647)) OVER (ORDER BY e.queue_position ROWS UNBOUNDED PRECEDING) AS declared
              FROM @entry AS e
              WHERE e.queue_position < @queue_position AND (@access = N'write' OR e.access_type <> @access)
                AND e.member_id = @member AND e.owner = @owner) AS a
        WHERE a.load + @weight > @limit OR a.load + @weight > @usable OR a.load + @weight > a.declared
        ORDER BY a.queue_position;
        UPDATE @entry SET behind = 1 WHERE queue_position <= @edge AND (@access = N'write' OR access_type <> @access);
        SELECT @all = COUNT(*),
               @writers = COALESCE(SUM(CASE WHEN access_type = N'write' OR LEFT(access_type, 7) = N'upgrade' THEN 1 ELSE 0 END), 0),
               @stages = COALESCE(SUM(CASE WHEN LEFT(access_type, 6) = N'stage:' THEN 1 ELSE 0 END), 0),
               @readers = COALESCE(SUM(CASE WHEN access_type = N'read' OR LEFT(access_type, 7) = N'upgrade' THEN 1 ELSE 0 END), 0),
               @room = COALESCE(MIN(COALESCE(concurrency_limit, 2147483647)), 2147483647)
        FROM @entry WHERE behind = 1;
        SET @room = CASE WHEN @limit < @room THEN @limit ELSE @room END;
        SET @room = CASE WHEN @usable < @room THEN @usable ELSE @room END;
        SET @code = CASE WHEN @paused_at IS NOT NULL THEN N'paused'
                         WHEN @edge IS NULL AND (@cap IS NULL OR @cap >= @weight) THEN N'turn_now'
                         WHEN @edge_uncapped IS NULL THEN N'cap' WHEN @own IS NOT NULL THEN N'own_earlier'
                         WHEN @access <> N'write' AND @writers > 0 THEN N'writer_ahead' WHEN @stages = @all THEN N'stage'
                         WHEN @readers = @all THEN N'readers_ahead' ELSE N'limit' END;
        SET @reason = CASE @code
            WHEN N'paused' THEN CONCAT(N'the resource is paused', N' by ' + @paused_by, N': nothing is granted until resume')
            WHEN N'turn_now' THEN N'nothing blocks it any more: it is granted as soon as its process polls'
            WHEN N'cap' THEN CONCAT(N'the operator''s cap of ', @cap, N' for ' + @pattern, N' by ' + @cap_by,
                                    CASE WHEN @cap < @weight THEN N' is below its weight' ELSE N' is reached' END)
            WHEN N'own_earlier' THEN N'it waits for its own earlier row, and so for itself'
            WHEN N'writer_ahead' THEN N'a writer is ahead'
            WHEN N'readers_ahead' THEN N'it waits for the readers to leave'
            WHEN N'stage' THEN N'all of another stage that came before it have to leave'
            ELSE CASE WHEN @room > 1 THEN CONCAT(N'the limit of ', @room, N' is full') ELSE N'another request holds it' END END;
        IF @code = N'own_earlier'
            UPDATE @entry SET behind = 0 WHERE queue_position <> @own;
        EXEC {schema}.simulate_queue @queue_position, @low OUTPUT, @likely OUTPUT, @high OUTPUT, @held_low OUTPUT, @held_high OUTPUT,
                                   @holds OUTPUT;
        IF @holds IS NOT NULL
            SET @reason = CONCAT(@reason, N'; it is granted in about ', {schema}.format_seconds(@likely), N' (between ',
                                 {schema}.format_seconds(@low), N' and ', {schema}.format_seconds(@high), N')');
    END;
    SELECT @code AS code, @reason AS reason, e.queue_position AS behind, e.state, e.host, e.pid, e.program, e.note,
           DATEDIFF_BIG(microsecond, e.since, @now) / CAST(1000000 AS float) AS seconds,
           (SELECT TOP (1) w.queue_position FROM {schema}.entry AS w WITH (NOLOCK)
            WHERE w.granted_at IS NULL AND w.revoked_at IS NULL
              AND (w.queue_position = e.queue_position OR (w.member_id = e.member_id AND w.owner = e.owner))
            ORDER BY CASE WHEN w.queue_position = e.queue_position THEN 0 ELSE 1 END, w.queue_position) AS goes_on_at
    FROM (SELECT 1 AS one) AS o LEFT JOIN @entry AS e ON e.behind = 1
    WHERE @code IS NOT NULL
    ORDER BY e.queue_position;
{end_try}
