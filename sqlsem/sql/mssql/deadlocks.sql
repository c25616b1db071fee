-- sqlsem, deadlocks, for SQL Server. May be run again at any time, after routines.sql.
--
-- An owner is a thread, asyncio task or session of a member, which can wait for only one thing at a time. (Columns and
-- variables call it `who`.) An owner that waits cannot release anything. The search reads the rows of one instant:
--   1. Suspect each owner that waits. Clear each owner whose requests could be granted if only suspected owners kept
--   their
--      rows. Repeat until nothing changes: the owners that are left are stuck.
--   2. Each blocked row of a stuck owner points to the rows of stuck owners that block it. Owners that reach each other
--      and no other owner are a cycle.
--   3. The waiting row with the highest position in a cycle is the youngest request. Its owner is the victim.
-- READPAST: a row that another session has locked is changing, so it is in no deadlock. The search must not wait for
-- it.

-- Find the deadlock whose youngest request is this member's, if there is one: @victim is that request, @words describes
-- the shortest cycle through it. With @answer return one row for each owner of the cycle, beginning with the owner of
-- that request. `ahead`: the row by which the owner blocks the owner before it; `behind`: the row for which it waits.
-- Finds none while a member of the cycle may be dead: its removal will end the deadlock.
CREATE OR ALTER PROCEDURE {schema}.find_deadlock
    @member bigint, @victim bigint = NULL OUTPUT, @words nvarchar(4000) = NULL OUTPUT, @answer bit = 0 AS {begin_try_own}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: find_deadlock must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    SET @victim = NULL;
    SET @words = NULL;
    -- (Most calls end here.)
    IF NOT EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @member AND login = ORIGINAL_LOGIN())
       OR NOT EXISTS (SELECT 1 FROM {schema}.entry WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                      WHERE member_id = @member AND owner IS NOT NULL AND revoked_at IS NULL GROUP BY owner
                      HAVING MAX(CASE WHEN access_type = N'upgrade' THEN 1 ELSE 0 END) = 1
                          OR (COUNT(*) > 1 AND MAX(CASE WHEN granted_at IS NULL THEN 1 ELSE 0 END) = 1))
        RETURN 0;

    -- The rows of the search, by resource and position. idle: the row is not blocked (step 1); no stuck row waits
    -- behind it (step 2).
    DECLARE @row TABLE (n int NOT NULL PRIMARY KEY, who int NOT NULL, member_id bigint NOT NULL, owner nvarchar(255) NULL,
                        resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL, place int NOT NULL,
                        position bigint NOT NULL, access_type nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
                        bound int NULL, cap int NULL, weight int NOT NULL, granted int NOT NULL, waits int NOT NULL,
                        idle int NOT NULL, stuck int NOT NULL);
    DECLARE @edge TABLE (source int NOT NULL, waiter bigint NOT NULL, target int NOT NULL, blocker bigint NOT NULL);
    DECLARE @down TABLE (who int NOT NULL PRIMARY KEY, depth int NOT NULL);
    DECLARE @up TABLE (who int NOT NULL PRIMARY KEY, depth int NOT NULL);
    DECLARE @way TABLE (target int NOT NULL PRIMARY KEY, source int NOT NULL, waiter bigint NOT NULL,
                        blocker bigint NOT NULL, depth int NOT NULL);
    DECLARE @cycle TABLE (step int NOT NULL PRIMARY KEY, waiter bigint NOT NULL, blocker bigint NOT NULL);
    DECLARE @n int, @before bigint, @who int, @place int, @position bigint, @access nvarchar(64), @bound int, @cap int,
            @weight int, @granted int, @sum bigint, @low int, @changed int, @depth int, @count int, @start int,
            @current bigint, @blocker bigint, @waiter bigint, @size int, @step int, @text nvarchar(4000);

    -- Read the rows in one statement: of owners that wait and have two rows, and the rows that wait ahead of them.
    -- Without these there is no cycle. Bare participants, which may leave at any time, and rows that are being removed
    -- do not count. If a member does not name its owners, each of its rows counts as another owner's.
    WITH q AS (
        SELECT queue_position, resource_id, member_id, owner, access_type, concurrency_limit, weight,
               CASE WHEN granted_at IS NULL THEN 0 ELSE 1 END AS granted,
               CASE WHEN granted_at IS NULL OR access_type = N'upgrade' THEN 1 ELSE 0 END AS waits,
               CASE WHEN owner IS NULL THEN queue_position ELSE 0 END AS itself,
               COUNT(*) OVER (PARTITION BY member_id, owner) AS number,
               MAX(CASE WHEN granted_at IS NULL OR access_type = N'upgrade' THEN 1 ELSE 0 END)
                   OVER (PARTITION BY member_id, owner) AS somebody_waits
        FROM {schema}.entry WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
        WHERE member_id IS NOT NULL AND revoked_at IS NULL
          AND (granted_at IS NOT NULL OR waiter_lease_until IS NULL OR waiter_lease_until >= SYSUTCDATETIME())
    ),
    b AS (
        SELECT queue_position, resource_id, member_id, owner, access_type, concurrency_limit, weight, granted, waits,
               itself,
               CASE WHEN owner IS NOT NULL AND somebody_waits = 1 AND (number > 1 OR access_type = N'upgrade')
                    THEN 1 ELSE 0 END AS busy
        FROM q
    ),
    l AS (
        SELECT resource_id, MAX(queue_position) AS last_one FROM b WHERE busy = 1 AND waits = 1 GROUP BY resource_id
    )
    INSERT INTO @row (n, who, member_id, owner, resource_id, place, position, access_type, bound, cap, weight, granted,
                      waits, idle, stuck)
    SELECT ROW_NUMBER() OVER (ORDER BY b.resource_id, b.queue_position),
           DENSE_RANK() OVER (ORDER BY b.member_id, b.owner, b.itself),
           b.member_id, b.owner, b.resource_id, DENSE_RANK() OVER (ORDER BY b.resource_id), b.queue_position,
           b.access_type, b.concurrency_limit, o.cap, b.weight, b.granted, b.waits, 0, 0
    FROM b LEFT JOIN l ON l.resource_id = b.resource_id
    CROSS APPLY {schema}.effective_settings(b.resource_id) AS o
    WHERE b.busy = 1 OR (b.waits = 1 AND b.queue_position < l.last_one);

    -- 1. Go along the queues until that clears no further owner. An owner is cleared when all of its rows can be
    -- granted.
    UPDATE @row SET stuck = 1 WHERE who IN (SELECT who FROM @row WHERE waits = 1);
    SET @changed = 1;
    WHILE @changed = 1
    BEGIN
        SET @changed = 0;
        SET @n = 0;
        WHILE 1 = 1
        BEGIN
            SET @before = @n;
            SELECT TOP (1) @n = n, @who = who, @place = place, @position = position, @access = access_type,
                   @bound = bound, @cap = cap, @weight = weight
            FROM @row WHERE n > @before AND stuck = 1 AND waits = 1 AND idle = 0 ORDER BY n;
            IF @n = @before
                BREAK;
            IF @access = N'upgrade'  -- waits for all other holders, at any position
                SELECT @sum = COUNT(*), @low = 0 FROM @row
                WHERE place = @place AND position <> @position AND granted = 1 AND stuck = 1;
            ELSE
                SELECT @sum = COALESCE(SUM(CAST(weight AS bigint)), 0),
                       @low = NULLIF(MIN(COALESCE(bound, 2147483647)), 2147483647) FROM @row
                WHERE place = @place AND n < @n AND stuck = 1
                  AND (@access COLLATE Latin1_General_100_BIN2 = N'write' OR access_type <> @access);
            -- (NULL: no limit.)
            SET @low = CASE WHEN @bound < COALESCE(@low, 2147483647) THEN @bound ELSE @low END;
            SET @low = CASE WHEN @cap >= @weight AND @cap < COALESCE(@low, 2147483647) THEN @cap ELSE @low END;
            IF @sum = 0 OR @low IS NULL OR @sum + @weight <= @low
            BEGIN
                SET @changed = 1;
                UPDATE @row SET idle = 1 WHERE n = @n;
                IF NOT EXISTS (SELECT 1 FROM @row WHERE who = @who AND waits = 1 AND idle = 0)
                    UPDATE @row SET stuck = 0 WHERE who = @who;
            END;
        END;
    END;
    UPDATE @row SET waits = CASE WHEN waits = 1 AND idle = 0 THEN 1 ELSE 0 END, idle = 0;  -- from here on `waits` means that the row is blocked
    IF NOT EXISTS (SELECT 1 FROM @row WHERE member_id = @member AND stuck = 1)
        RETURN 0;

    -- Go back along the queues, and drop owners for which no stuck row waits: usually the many behind a cycle.
    SET @changed = 1;
    WHILE @changed = 1
    BEGIN
        SET @changed = 0;
        SET @n = 2147483647;
        WHILE 1 = 1
        BEGIN
            SET @before = @n;
            SELECT TOP (1) @n = n, @who = who, @place = place, @position = position, @access = access_type,
                   @granted = granted
            FROM @row WHERE n < @before AND stuck = 1 AND idle = 0 ORDER BY n DESC;
            IF @n = @before
                BREAK;
            IF NOT EXISTS (SELECT 1 FROM @row
                           WHERE place = @place AND n > @n AND stuck = 1 AND waits = 1 AND access_type <> N'upgrade'
                             AND (access_type = N'write' OR access_type <> @access))
               AND (@granted = 0 OR NOT EXISTS (SELECT 1 FROM @row
                                                WHERE place = @place AND position <> @position AND stuck = 1
                                                  AND waits = 1 AND access_type = N'upgrade'))
            BEGIN
                SET @changed = 1;
                UPDATE @row SET idle = 1 WHERE n = @n;
                IF NOT EXISTS (SELECT 1 FROM @row WHERE who = @who AND idle = 0)
                    UPDATE @row SET stuck = 0 WHERE who = @who;
            END;
        END;
    END;

    -- 2. Build the wait-for graph, and find a cycle in it with a row of this member.
    INSERT INTO @edge (source, waiter, target, blocker)
    SELECT w.who, w.position, b.who, b.position
    FROM @row AS w JOIN @row AS b ON b.place = w.place
    WHERE w.waits = 1 AND w.stuck = 1 AND b.stuck = 1
      AND ((w.access_type = N'upgrade' AND b.granted = 1 AND b.position <> w.position)
           OR (w.access_type <> N'upgrade' AND b.position < w.position
               AND (w.access_type = N'write' OR b.access_type <> w.access_type)));
    SET @current = 0;
    WHILE @victim IS NULL
    BEGIN
        SET @before = @current;
        SELECT TOP (1) @current = who FROM @row WHERE who > @before AND member_id = @member AND stuck = 1 AND waits = 1
        ORDER BY who;
        IF @current = @before
            RETURN 0;
        DELETE FROM @down;
        DELETE FROM @up;
        INSERT INTO @down (who, depth) VALUES (CAST(@current AS int), 0);
        INSERT INTO @up (who, depth) VALUES (CAST(@current AS int), 0);
        SET @depth = 0;
        SET @count = 1;
        WHILE @count > 0
        BEGIN
            SET @depth = @depth + 1;
            INSERT INTO @down (who, depth)
            SELECT DISTINCT target, @depth FROM @edge
            WHERE source IN (SELECT who FROM @down WHERE depth = @depth - 1) AND target NOT IN (SELECT who FROM @down);
            SET @count = @@ROWCOUNT;
        END;
        SET @depth = 0;
        SET @count = 1;
        WHILE @count > 0
        BEGIN
            SET @depth = @depth + 1;
            INSERT INTO @up (who, depth)
            SELECT DISTINCT source, @depth FROM @edge
            WHERE target IN (SELECT who FROM @up WHERE depth = @depth - 1) AND source NOT IN (SELECT who FROM @up)
              AND source IN (SELECT who FROM @down);
            SET @count = @@ROWCOUNT;
        END;
        SELECT @size = COUNT(*) FROM @down;
        IF @size = (SELECT COUNT(*) FROM @up)
        BEGIN
            SELECT TOP (1) @victim = waiter, @start = source FROM @edge
            WHERE source IN (SELECT who FROM @down) ORDER BY waiter DESC;
            IF NOT EXISTS (SELECT 1 FROM @row WHERE who = @start AND member_id = @member)
                SET @victim = NULL;
        END;
    END;

    -- Find no cycle with a dead owner: its removal will end the deadlock.
    SET @current = 0;
    WHILE 1 = 1
    BEGIN
        SET @before = @current;
        SELECT TOP (1) @current = member_id FROM @row WHERE who IN (SELECT who FROM @down) AND member_id > @before
        ORDER BY member_id;
        IF @current = @before
            BREAK;
        EXEC {schema}.check_liveness @current, @member;
        IF NOT EXISTS (SELECT 1 FROM {schema}.member
                       WHERE member_id = @current AND missing_since IS NULL
                         AND (lease_until IS NULL OR lease_until >= SYSUTCDATETIME()))
            SET @victim = NULL;
    END;
    -- The engine may have read the rows one after the other. So read them again: if all are there, unchanged, there was
    -- an instant with all of them.
    IF EXISTS (SELECT 1 FROM @row AS r
               WHERE r.who IN (SELECT who FROM @down)
                 AND r.position IN (SELECT waiter FROM @edge UNION SELECT blocker FROM @edge)
                 AND NOT EXISTS (SELECT 1 FROM {schema}.entry AS t WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                                 WHERE t.resource_id = r.resource_id AND t.queue_position = r.position
                                   AND t.revoked_at IS NULL
                                   AND (r.waits = 0 OR t.granted_at IS NULL OR t.access_type = N'upgrade')))
        SET @victim = NULL;
    IF @victim IS NULL
        RETURN 0;

    -- 3. Find the shortest way from the victim's row back to its owner.
    SET @depth = 0;
    WHILE NOT EXISTS (SELECT 1 FROM @way WHERE target = @start)
    BEGIN
        SET @depth = @depth + 1;
        INSERT INTO @way (target, source, waiter, blocker, depth)
        SELECT target, source, waiter, blocker, @depth
        FROM (SELECT target, source, waiter, blocker,
                     ROW_NUMBER() OVER (PARTITION BY target ORDER BY waiter, blocker) AS choice
              FROM @edge
              WHERE ((@depth = 1 AND waiter = @victim)
                     OR (@depth > 1 AND source IN (SELECT target FROM @way WHERE depth = @depth - 1)))
                AND target NOT IN (SELECT target FROM @way)) AS e
        WHERE choice = 1;
    END;
    SET @current = @start;
    SET @waiter = NULL;
    SET @step = @depth;  -- the length of the cycle
    WHILE @step > 0
    BEGIN
        SELECT @waiter = waiter, @blocker = blocker, @current = source FROM @way WHERE target = @current;
        INSERT INTO @cycle (step, waiter, blocker) VALUES (@step, @waiter, @blocker);
        SET @step = @step - 1;
    END;

    SET @words = N'Deadlock: ';
    WHILE @step < @depth
    BEGIN
        SET @step = @step + 1;
        SELECT @text = CONCAT(
                   COALESCE(m.host, N'?'),
                   COALESCE(N':' + CONVERT(nvarchar(20), m.pid),
                            N' session ' + CONVERT(nvarchar(20), m.session_id), N''),
                   COALESCE(N' (' + w.owner + N')', N''),
                   CASE WHEN a.position = w.position AND w.access_type <> N'upgrade' THEN N' '
                        ELSE CONCAT(CASE WHEN a.granted = 1 THEN N' holds ''' ELSE N' queues for ''' END,
                                    a.resource_id COLLATE DATABASE_DEFAULT,
                                    N''' at ', a.position, N', ') END,
                   CASE WHEN w.access_type = N'upgrade'
                        THEN CONCAT(N'waits to be the writer of ''', w.resource_id COLLATE DATABASE_DEFAULT, N''' at ',
                                    w.position, N' until ', c.blocker, N' has left')
                        ELSE CONCAT(N'waits for ''', w.resource_id COLLATE DATABASE_DEFAULT, N''' at ', w.position,
                                     N' behind ', c.blocker) END)
        FROM @cycle AS c JOIN @cycle AS p ON p.step = CASE WHEN c.step = 1 THEN @depth ELSE c.step - 1 END
        JOIN @row AS w ON w.position = c.waiter JOIN @row AS a ON a.position = p.blocker
        JOIN {schema}.member AS m ON m.member_id = w.member_id
        WHERE c.step = @step;
        SET @words = CONCAT(@words, CASE WHEN @step > 1 THEN N'; ' END, @text);
    END;
    IF @size > @depth
        SET @words = CONCAT(@words, N' (', @size - @depth, N' more wait', CASE WHEN @size - @depth = 1 THEN N's' END,
            N' in this cycle)');
    IF @answer = 1
        SELECT m.member_id, m.host, m.pid, CASE WHEN m.pid IS NULL THEN m.session_id END AS session_id, w.owner,
               a.resource_id AS ahead_resource, a.position AS ahead_position, a.granted AS ahead_granted,
               w.resource_id, w.position AS queue_position,
               CASE WHEN w.access_type = N'upgrade' THEN 1 ELSE 0 END AS upgrade, c.blocker AS behind_position,
               @size AS whos
        FROM @cycle AS c JOIN @cycle AS p ON p.step = CASE WHEN c.step = 1 THEN @depth ELSE c.step - 1 END
        JOIN @row AS w ON w.position = c.waiter JOIN @row AS a ON a.position = p.blocker
        JOIN {schema}.member AS m ON m.member_id = w.member_id
        ORDER BY c.step;
{end_try_own}
