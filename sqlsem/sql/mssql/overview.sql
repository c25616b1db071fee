-- sqlsem, the overview for SQL Server: all that is there at one instant, for those who look on; and what operators did. May be
-- run again at any time. It only looks: nothing here is on the way of who takes a lock or gives it back.

SET QUOTED_IDENTIFIER ON;
SET ANSI_NULLS ON;
GO

-- What is set for resources, by whom; beside what resources tells.
IF OBJECT_ID(N'{schema}.resource_settings') IS NULL EXEC (N'CREATE PROCEDURE {schema}.resource_settings AS RETURN 0');
GO
ALTER PROCEDURE {schema}.resource_settings
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SELECT o.resource_id, o.cap, o.paused_at, o.stale_after_ms / CAST(1000 AS float) AS stale_after, o.paused_by, o.cap_by
    FROM {schema}.resource AS o WITH (NOLOCK);
END;
GO

-- Everything but the rows of entries: several results, whose first columns say what their rows are. rounds: those that are open,
-- or failed and not begun anew, or whose continuation has not finished; without bodies. holds: the newest that ended as they
-- should, among the last 200 requests of each of the 200 resources that are wanted most.
IF OBJECT_ID(N'{schema}.overview') IS NULL EXEC (N'CREATE PROCEDURE {schema}.overview AS RETURN 0');
GO
ALTER PROCEDURE {schema}.overview
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @now datetime2(6) = SYSUTCDATETIME(), @start datetime2(6) = {schema}.server_start();
    DECLARE @member TABLE (member_id bigint NOT NULL PRIMARY KEY, missing int NULL);
    DECLARE @count TABLE (member_id bigint NOT NULL PRIMARY KEY, holding bigint NULL, waiting bigint NULL);
    DECLARE @queue TABLE (queue_name nvarchar(255) NULL, pending bigint NULL, running bigint NULL, finished bigint NULL,
                          failed bigint NULL, cancelled bigint NULL, lost bigint NULL, oldest float NULL, rate float NULL,
                          blocked_by bigint NULL);
    DECLARE @wanted TABLE (resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY);
    SELECT N'clock' AS what, @now AS taken_at;
    SELECT N'setting' AS what, o.resource_id, o.cap, o.paused_at, o.stale_after_ms / CAST(1000 AS float) AS stale_after,
           o.paused_by, o.cap_by
    FROM {schema}.resource AS o WITH (NOLOCK);
    INSERT INTO @member (member_id, missing)
    SELECT m.member_id,
           CASE WHEN m.lease_until IS NOT NULL THEN CASE WHEN m.lease_until < @now THEN 1 ELSE 0 END
                WHEN m.beacon IS NULL THEN 0
                WHEN APPLOCK_MODE(@principal, CONCAT(N'sqlsem.{schema}.beacon.', m.beacon), N'Session') <> N'NoLock' THEN 0
                ELSE APPLOCK_TEST(@principal, CONCAT(N'sqlsem.{schema}.beacon.', m.beacon), N'Shared', N'Session') END
    FROM {schema}.member AS m WITH (NOLOCK);
    INSERT INTO @count (member_id, holding, waiting)
    SELECT t.member_id, SUM(CASE WHEN t.granted_at IS NOT NULL THEN 1 ELSE 0 END), SUM(CASE WHEN t.granted_at IS NULL THEN 1 ELSE 0 END)
    FROM {schema}.entry AS t WITH (NOLOCK) WHERE t.member_id IS NOT NULL GROUP BY t.member_id;
    SELECT N'member' AS what, m.member_id, m.host, COALESCE(m.pid, m.session_id) AS pid, m.program, m.login, m.joined_at,
           CASE WHEN m.lease_ms IS NULL THEN N'beacon' ELSE N'lease' END AS kind,
           CASE WHEN b.missing = 1
                THEN DATEDIFF_BIG(microsecond, CASE WHEN m.lease_until IS NOT NULL THEN m.lease_until
                                                    ELSE COALESCE(m.missing_since, m.seen_at) END, @now)
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
                                      CASE WHEN @start > m.seen_at THEN @start ELSE m.seen_at END)) / CAST(1000000 AS float)
                             END AS grace_left) AS l
    ORDER BY m.member_id;
    INSERT INTO @queue (queue_name, pending, running, finished, failed, cancelled, lost, oldest, rate, blocked_by)
    EXEC {schema}.queue_counts;
    SELECT N'queue' AS what, q.queue_name, q.pending, q.running, q.finished, q.failed, q.cancelled, q.lost, q.oldest, q.rate,
           q.blocked_by
    FROM @queue AS q ORDER BY q.queue_name;
    SELECT N'round' AS what, r.round_id, r.round_name, r.status, r.window_ms / CAST(1000 AS float) AS window_seconds, r.opened_at,
           r.ended_at,
           DATEDIFF_BIG(microsecond, r.opened_at, COALESCE(r.ended_at, @now)) / CAST(1000000 AS float) AS seconds,
           r.then_status, r.then_kind, CAST(NULL AS nvarchar(1)) AS then_body, r.then_attempt, r.then_owner, r.then_started,
           r.then_ended,
           DATEDIFF_BIG(microsecond, r.then_started, COALESCE(r.then_ended, @now)) / CAST(1000000 AS float) AS then_seconds,
           r.then_error, p.part, p.status AS part_status, p.is_last, p.attempt, p.member_id, p.owner, p.host, p.pid,
           p.started_at, p.ended_at AS part_ended,
           DATEDIFF_BIG(microsecond, p.started_at, COALESCE(p.ended_at, @now)) / CAST(1000000 AS float) AS part_seconds, p.error,
           CASE WHEN p.status = N'running' AND (b.missing IS NULL OR b.missing = 1)
                THEN DATEDIFF_BIG(microsecond, CASE WHEN m.lease_until IS NOT NULL THEN m.lease_until
                                                    ELSE COALESCE(m.missing_since, m.seen_at, p.started_at) END, @now)
                     / CAST(1000000 AS float) END AS missing_for,
           r.opened_by, p.login
    FROM {schema}.[round] AS r WITH (NOLOCK) JOIN {schema}.round_part AS p WITH (NOLOCK) ON p.round_id = r.round_id
    LEFT JOIN @member AS b ON b.member_id = p.member_id
    LEFT JOIN {schema}.member AS m WITH (NOLOCK) ON m.member_id = p.member_id
    WHERE r.status = N'open' OR r.then_status IN (N'pending', N'running')
       OR ((r.status = N'failed' OR r.then_status = N'failed')
           AND NOT EXISTS (SELECT 1 FROM {schema}.[round] AS n WITH (NOLOCK)
                           WHERE n.round_name = r.round_name AND n.round_id > r.round_id))
    ORDER BY r.round_id DESC, p.part;
    INSERT INTO @wanted (resource_id)
    SELECT TOP (200) t.resource_id FROM {schema}.entry AS t WITH (NOLOCK) GROUP BY t.resource_id
    ORDER BY SUM(CASE WHEN t.granted_at IS NULL THEN 1 ELSE 0 END) DESC, t.resource_id;
    SELECT N'hold' AS what, w.resource_id,
           DATEDIFF_BIG(microsecond, h.granted_at, h.ended_at) / CAST(1000000 AS float) AS held,
           DATEDIFF_BIG(microsecond, h.requested_at, h.granted_at) / CAST(1000000 AS float) AS waited, h.note, h.program
    FROM @wanted AS w
    CROSS APPLY (SELECT TOP (200) p.requested_at, p.granted_at, p.ended_at, p.outcome, p.note, p.program
                 FROM {schema}.history AS p WITH (NOLOCK) WHERE p.resource_id = w.resource_id ORDER BY p.ended_at DESC) AS h
    WHERE h.outcome = N'released' AND h.granted_at IS NOT NULL
    ORDER BY w.resource_id, h.ended_at DESC;
END;
GO


-- What operators did ----------------------------------------------------------------------------------------------
-- (Written down by the statement that does it, or in its transaction; where it is done, as the client says.)

-- Newest first; of one resource or work queue, of one action, by one login; between @since_ms and @until_ms ago.
IF OBJECT_ID(N'{schema}.operations') IS NULL EXEC (N'CREATE PROCEDURE {schema}.operations AS RETURN 0');
GO
ALTER PROCEDURE {schema}.operations
    @name nvarchar(255) = NULL, @most int = 100, @since_ms bigint = NULL, @until_ms bigint = NULL,
    @action nvarchar(16) = NULL, @who nvarchar(400) = NULL
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    DECLARE @since datetime2(6), @until datetime2(6), @now datetime2(6) = SYSUTCDATETIME();
    IF @since_ms < 0 OR @since_ms > 2147483647000 OR @until_ms < 0 OR @until_ms > 2147483647000
        THROW 50000, N'sqlsem: since and until must be from 0 to 2147483647 seconds ago', 1;
    SET @since = DATEADD(millisecond, -CAST(@since_ms % 1000 AS int), DATEADD(second, -CAST(@since_ms / 1000 AS int), @now));
    SET @until = DATEADD(millisecond, -CAST(@until_ms % 1000 AS int), DATEADD(second, -CAST(@until_ms / 1000 AS int), @now));
    SELECT TOP (@most) o.operation_id, o.done_at, o.login, o.host, o.pid, o.program, o.action, o.resource_id, o.queue_position,
           o.queue_name, o.task_id, o.old_value, o.new_value
    FROM {schema}.operation AS o WITH (NOLOCK)
    WHERE (@name IS NULL OR @name IN (o.resource_id, o.queue_name)) AND (@since IS NULL OR o.done_at >= @since)
      AND (@until IS NULL OR o.done_at <= @until) AND (@action IS NULL OR o.action = @action)
      AND (@who IS NULL OR @who IN (o.login, o.host, CONCAT(o.host, N':', o.pid), o.program))
    ORDER BY o.operation_id DESC;
END;
GO

-- Removes what is past keeping: older than history_days, or more than history_rows. At most @most rows a call. Returns how many.
IF OBJECT_ID(N'{schema}.prune_operations') IS NULL EXEC (N'CREATE PROCEDURE {schema}.prune_operations AS RETURN 0');
GO
ALTER PROCEDURE {schema}.prune_operations @most int, @answer bit = 0
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @days int, @rows bigint, @newest bigint = 0, @before datetime2(6), @count int;
    SELECT @days = CAST(value AS int) FROM {schema}.setting WHERE name = N'history_days';
    SELECT @rows = CAST(value AS bigint) FROM {schema}.setting WHERE name = N'history_rows';
    SELECT TOP (1) @newest = operation_id FROM {schema}.operation ORDER BY operation_id DESC;
    SET @before = DATEADD(day, -@days, SYSUTCDATETIME());
    DELETE TOP (@most) FROM {schema}.operation WHERE done_at < @before OR operation_id <= @newest - @rows;
    SET @count = @@ROWCOUNT;
    IF @answer = 1
        SELECT @count AS pruned;
    RETURN @count;
END;
GO
