-- sqlsem, deadlocks, for SQL Server. May be run again at any time, after routines.sql. PostgreSQL's deadlocks.sql explains
-- the steps of the search.
--
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

    -- The rows of the search, by resource and position. bound: its own limit, for the rows behind; room: the limit for the
    -- row itself, its own or the operator's. blocked: it cannot be granted, as far as known.
    DECLARE @row TABLE (n int NOT NULL, who int NOT NULL, member_id bigint NOT NULL, owner nvarchar(255) NULL,
                        resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL, place int NOT NULL,
                        position bigint NOT NULL, access_type nvarchar(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
                        bound int NOT NULL, room int NOT NULL, weight int NOT NULL, granted int NOT NULL,
                        blocked int NOT NULL, PRIMARY KEY (place, n));
    -- The owners for which a row waits, and the owners that wait for its owner; depth: in how many steps.
    DECLARE @down TABLE (who int NOT NULL PRIMARY KEY, depth int NOT NULL);
    DECLARE @up TABLE (who int NOT NULL PRIMARY KEY, depth int NOT NULL);
    DECLARE @cycle TABLE (step int NOT NULL PRIMARY KEY, waiter bigint NOT NULL, blocker bigint NOT NULL);
    DECLARE @first int, @last int, @of bigint, @depth int, @count int, @current bigint, @who int, @next int, @step int,
            @waiter bigint, @blocker bigint, @size int, @text nvarchar(4000);

    -- Read the rows in one statement: of owners that wait and have two rows (busy), and the rows that wait between these.
    -- Without them there is no cycle. Bare participants, which may leave at any time, and rows that are being removed do
    -- not count. If a member does not name its owners, each of its rows counts as another owner's.
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
        SELECT resource_id, MIN(queue_position) AS first_one,
               MAX(CASE WHEN waits = 1 THEN queue_position ELSE 0 END) AS last_one
        FROM b WHERE busy = 1 GROUP BY resource_id
    )
    INSERT INTO @row (n, who, member_id, owner, resource_id, place, position, access_type, bound, room, weight, granted,
                      blocked)
    SELECT ROW_NUMBER() OVER (ORDER BY b.resource_id, b.queue_position),
           DENSE_RANK() OVER (ORDER BY b.member_id, b.owner, b.itself),
           b.member_id, b.owner, b.resource_id, DENSE_RANK() OVER (ORDER BY b.resource_id), b.queue_position,
           b.access_type, COALESCE(b.concurrency_limit, 2147483647),
           CASE WHEN o.cap >= b.weight AND o.cap < COALESCE(b.concurrency_limit, 2147483647) THEN o.cap
                ELSE COALESCE(b.concurrency_limit, 2147483647) END, b.weight, b.granted, b.waits
    FROM b JOIN l ON l.resource_id = b.resource_id
    CROSS APPLY {schema}.effective_settings(b.resource_id) AS o
    WHERE b.busy = 1 OR (b.waits = 1 AND b.queue_position BETWEEN l.first_one AND l.last_one);

    -- 1. Drop owners that do not wait, or whose rows can all be granted, until nothing changes. (A blocked row blocks all
    -- later rows with the same request, so the first one of these is tested.)
    SET @count = 1;
    WHILE @count > 0
    BEGIN
        DELETE FROM @row WHERE who NOT IN (SELECT w.who FROM @row AS w WHERE w.blocked = 1);
        UPDATE @row SET blocked = 0
        WHERE n IN (SELECT w.n
                    FROM @row AS w
                    CROSS APPLY (SELECT COALESCE(SUM(CAST(b.weight AS bigint)), 0) AS load,
                                        COALESCE(MIN(b.bound), 2147483647) AS low
                                 FROM @row AS b WHERE
                                     {waits_for}) AS a
                    WHERE w.n IN (SELECT MIN(f.n) FROM @row AS f WHERE f.blocked = 1
                                  GROUP BY f.place, f.access_type, f.weight, f.bound,
                                           CASE WHEN f.access_type = N'upgrade' THEN f.n ELSE 0 END)
                      AND (a.load = 0 OR (w.access_type <> N'upgrade' AND a.load + w.weight <= a.low
                                          AND a.load + w.weight <= w.room)));
        SET @count = @@ROWCOUNT;
    END;

    -- 2. Begin with the first blocked row of this member. If it is not in a cycle, or if the youngest request of its
    -- cycle is another member's, drop all owners that wait for it: no cycle of this member's is among them.
    WHILE @last IS NULL OR @last <> @first
    BEGIN
        SET @first = COALESCE(@last, (SELECT MIN(n) FROM @row WHERE member_id = @member AND blocked = 1));
        IF @first IS NULL
            RETURN 0;
        DELETE FROM @down;
        DELETE FROM @up;
        INSERT INTO @up (who, depth) SELECT who, 0 FROM @row WHERE n = @first;
        SET @depth = 0;
        SET @count = 1;
        WHILE @count > 0
        BEGIN
            SET @depth = @depth + 1;
            -- (Of the rows that were reached, only the last or the first one of a kind can lead further.)
            INSERT INTO @down (who, depth)
            SELECT DISTINCT b.who, @depth
            FROM (SELECT place, access_type, MAX(n) AS n FROM @row
                  WHERE blocked = 1 AND ((@depth = 1 AND n = @first) OR who IN (SELECT who FROM @down WHERE depth = @depth - 1))
                  GROUP BY place, access_type) AS w
            JOIN @row AS b ON
                {waits_for}
            WHERE b.who NOT IN (SELECT who FROM @down);
            SET @count = @@ROWCOUNT;
            INSERT INTO @up (who, depth)
            SELECT DISTINCT w.who, @depth
            FROM (SELECT place, access_type, granted, MIN(n) AS n FROM @row
                  WHERE who IN (SELECT who FROM @up WHERE depth = @depth - 1)
                  GROUP BY place, access_type, granted) AS b
            JOIN @row AS w ON
                {waits_for}
            WHERE w.blocked = 1 AND w.who NOT IN (SELECT who FROM @up);
            SET @count = @count + @@ROWCOUNT;
        END;
        SET @last = NULL;
        IF NOT EXISTS (SELECT 1 FROM @down WHERE who NOT IN (SELECT who FROM @up))
            SELECT TOP (1) @last = n, @of = member_id FROM @row
            WHERE blocked = 1 AND who IN (SELECT who FROM @down) ORDER BY position DESC;
        IF @last IS NULL OR @of <> @member
        BEGIN
            DELETE FROM @row WHERE who IN (SELECT who FROM @up);
            SET @last = NULL;
        END;
    END;

    -- Find no cycle with a dead owner: its removal will end the deadlock.
    SET @current = (SELECT TOP (1) member_id FROM @row WHERE who IN (SELECT who FROM @down) ORDER BY member_id);
    WHILE @current IS NOT NULL
    BEGIN
        EXEC {schema}.check_liveness @current, @member;
        IF NOT EXISTS (SELECT 1 FROM {schema}.member
                       WHERE member_id = @current AND missing_since IS NULL
                         AND (lease_until IS NULL OR lease_until >= SYSUTCDATETIME()))
            RETURN 0;
        SET @current = (SELECT TOP (1) member_id FROM @row
                        WHERE who IN (SELECT who FROM @down) AND member_id > @current ORDER BY member_id);
    END;
    -- The engine may have read the rows one after the other. So read them again: if all are there, unchanged, there was
    -- an instant with all of them.
    IF EXISTS (SELECT 1 FROM @row AS r
               WHERE r.who IN (SELECT who FROM @down)
                 AND NOT EXISTS (SELECT 1 FROM {schema}.entry AS t WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                                 WHERE t.resource_id = r.resource_id AND t.queue_position = r.position
                                   AND t.revoked_at IS NULL
                                   AND (r.blocked = 0 OR t.granted_at IS NULL OR t.access_type = N'upgrade')))
        RETURN 0;

    -- 3. Go the shortest way from the victim's row back to its owner, from its end.
    SELECT @victim = r.position, @who = r.who, @depth = d.depth
    FROM @row AS r JOIN @down AS d ON d.who = r.who WHERE r.n = @first;
    SET @step = @depth;
    WHILE @step > 0
    BEGIN
        SELECT TOP (1) @waiter = w.position, @blocker = b.position, @next = w.who
        FROM @row AS b JOIN @row AS w ON
            {waits_for}
        WHERE b.who = @who AND w.blocked = 1
          AND ((@step = 1 AND w.n = @first) OR w.who IN (SELECT who FROM @down WHERE depth = @step - 1))
        ORDER BY w.position, b.position;
        INSERT INTO @cycle (step, waiter, blocker) VALUES (@step, @waiter, @blocker);
        SELECT @who = @next, @step = @step - 1;
    END;
    SELECT @size = COUNT(*) FROM @down;

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
