-- sqlsem, tasks with locks, for SQL Server. May be run again at any time, after tasks.sql. Described in docs/howto/task-locks.md;
-- PostgreSQL's blocked_tasks.sql explains blocked tasks, and their invariants.
--
-- task_lock.pending is 1 while the task is pending, so that one index finds the blocked tasks of a queue. A statement
-- that makes a task with locks pending again calls block_task in the same transaction.
-- One claim at a time polls the blocked tasks of a queue: it first writes the queue's row of queue_proxy.
-- The rows of an attempt are removed, and their wakeup locks released, right before its end is written.

-- Raise for invalid locks of a task. @locks: a JSON list of {"resource": ..., "access": ..., "limit": ..., "weight":
-- ...}, each resource once.
CREATE OR ALTER PROCEDURE {schema}.check_locks @locks nvarchar(max) AS {begin}
    DECLARE @asked TABLE (number int NOT NULL PRIMARY KEY, a_resource nvarchar(400), an_access nvarchar(100), a_limit bigint, a_weight bigint);
    DECLARE @number int = 0, @maximum int, @resource nvarchar(400), @access nvarchar(100), @limit bigint, @weight bigint,
            @message nvarchar(1000), @is_json int = ISJSON(@locks), @names int;
    IF COALESCE(@is_json, 0) = 0 OR LEFT(LTRIM(@locks), 1) <> N'['
        THROW 50000, N'sqlsem: the locks of a task are a JSON list, such as [{"resource": "customers", "access": "write", "limit": 1}]', 1;
    INSERT INTO @asked (number, a_resource, an_access, a_limit, a_weight)
    SELECT CAST(j.[key] AS int) + 1, r.a_resource, COALESCE(r.an_access, N'write'), r.a_limit, COALESCE(r.a_weight, 1)
    FROM OPENJSON(@locks) AS j
    CROSS APPLY OPENJSON(j.value) WITH (a_resource nvarchar(400) '$.resource', an_access nvarchar(100) '$.access',
        a_limit bigint '$.limit', a_weight bigint '$.weight') AS r;
    SELECT @maximum = COUNT(*) FROM @asked;
    SELECT @names = COUNT(*) FROM (SELECT DISTINCT a_resource COLLATE Latin1_General_100_BIN2 AS name FROM @asked) AS d;
    IF @maximum < 1 OR @maximum > 100
        THROW 50000, N'sqlsem: a task takes 1 to 100 locks, each an object such as {"resource": "customers", "access": "write", "limit": 1}', 1;
    WHILE @number < @maximum
    BEGIN
        SET @number = @number + 1;
        SELECT @resource = a_resource, @access = an_access, @limit = a_limit, @weight = a_weight FROM @asked WHERE number = @number;
        EXEC {schema}.check_name N'resource', @resource;
        EXEC {schema}.check_not_reserved @resource;
        IF @access COLLATE Latin1_General_100_BIN2 NOT IN (N'write', N'read')
           AND (@access COLLATE Latin1_General_100_BIN2 NOT LIKE N'stage:%[0-9]' OR TRY_CAST(SUBSTRING(@access, 7, 100) AS bigint) IS NULL
                OR DATALENGTH(@access) > 64)
            SET @message = CONCAT(N'sqlsem: access is ''', @access, N'''; it must be write, read or stage:<whole number>');
        ELSE IF @limit < 1 OR @limit > 2147483647 OR @weight < 1 OR @weight > COALESCE(@limit, 2147483647)
                OR (@access <> N'write' AND COALESCE(@limit, 0) <> 1)
            SET @message = CONCAT(N'sqlsem: on ''', @resource, N''' limit ', @limit, N' with weight ', @weight,
                N' cannot be: 1 <= weight <= limit, and limit 1 with another access than write');
        ELSE IF @limit IS NULL AND NOT EXISTS (SELECT 1 FROM {schema}.effective_settings(@resource) WHERE cap IS NOT NULL)
        BEGIN
            SET @message = CONCAT(N'sqlsem: no limit is set for ''', @resource, N''', and the task names none; an operator sets one ',
                N'with: sqlsem set ', @resource, N' --limit N --allow-new, or EXEC {schema}.set_limit; or name a limit');
            EXEC {schema}.raise_error 50008, @message;
        END;
        IF @message IS NOT NULL
            EXEC {schema}.raise_error 50000, @message;
    END;
    IF @names < @maximum
        THROW 50000, N'sqlsem: the locks of a task name a resource twice; ask for it once, with a weight', 1;
END;

-- Raise if a login that may not take locks puts a task with locks. (A schedule is checked when it is saved.)
CREATE OR ALTER PROCEDURE {schema}.check_may_lock AS {begin}
    DECLARE @message nvarchar(1000);
    IF COALESCE(IS_MEMBER(N'{schema}_user'), 0) = 0 AND COALESCE(IS_MEMBER(N'{schema}_operator'), 0) = 0
       AND COALESCE(IS_MEMBER(N'db_owner'), 0) = 0 AND COALESCE(IS_SRVROLEMEMBER(N'sysadmin'), 0) = 0
    BEGIN
        SET @message = CONCAT(N'sqlsem: ', CURRENT_USER,
            N' may not take locks, and so puts no tasks that do; an administrator can ALTER ROLE {schema}_user ADD MEMBER ...');
        EXEC {schema}.raise_error 50006, @message;
    END;
END;

-- Store the locks of a task, in the transaction that puts it, after check_locks has accepted them.
CREATE OR ALTER PROCEDURE {schema}.store_task_locks @task bigint, @queue nvarchar(255), @locks nvarchar(max) AS {begin}
    INSERT INTO {schema}.task_lock (task_id, number, queue_name, resource_id, access_type, concurrency_limit, weight, pending)
    SELECT @task, CAST(j.[key] AS int) + 1, @queue, r.a_resource, COALESCE(r.an_access, N'write'), r.a_limit, COALESCE(r.a_weight, 1), 1
    FROM OPENJSON(@locks) AS j
    CROSS APPLY OPENJSON(j.value) WITH (a_resource nvarchar(255) '$.resource', an_access nvarchar(64) '$.access',
        a_limit int '$.limit', a_weight int '$.weight') AS r;
    UPDATE {schema}.task WITH (ROWLOCK)
    SET lock_count = @@ROWCOUNT, enqueue_locks_at = CASE WHEN ready_at < put_at THEN put_at ELSE ready_at END, ready_at = N'99990101'
    WHERE task_id = @task;
END;

-- Mark a task with locks as blocked; called in the transaction that has made it pending.
CREATE OR ALTER PROCEDURE {schema}.block_task @task bigint AS {begin_inner}
    UPDATE {schema}.task WITH (ROWLOCK)
    SET enqueue_locks_at = CASE WHEN ready_at < N'99990101' AND ready_at > SYSUTCDATETIME() THEN ready_at ELSE SYSUTCDATETIME() END,
        ready_at = N'99990101', locks_pending = NULL
    WHERE task_id = @task AND status = N'pending' AND lock_count IS NOT NULL;
    IF @@ROWCOUNT > 0
        UPDATE {schema}.task_lock SET pending = 1, waits = 0, queue_position = NULL WHERE task_id = @task;
END;

-- Remove the rows of a task that belong to this member. (Rows that the member has handed over and adopted again no
-- longer belong to the task. A row that an open transaction has pinned stays with its owner, which releases it later.)
CREATE OR ALTER PROCEDURE {schema}.end_task_rows @task bigint, @member bigint, @outcome nvarchar(16) AS {begin}
    DECLARE @number int = 0, @before int, @resource nvarchar(255), @position bigint, @name nvarchar(255), @code int, @claim nvarchar(64);
    SELECT @claim = claim_uid FROM {schema}.task WHERE task_id = @task AND status = N'running';
    WHILE 1 = 1
    BEGIN
        SET @before = @number;
        SELECT TOP (1) @number = number, @resource = resource_id, @position = queue_position FROM {schema}.task_lock
        WHERE task_id = @task AND number > @before ORDER BY number;
        IF @number = @before
            BREAK;
        IF EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                   WHERE resource_id = @resource AND queue_position = @position AND member_id = @member
                     AND (@claim IS NULL OR request_uid = CONCAT(@claim, N'.', @number)))
        BEGIN
            EXEC @code = {schema}.remove @resource, @position, @outcome;
            SET @name = CONCAT(N'entry.sqlsem.{schema}.', @position);
            IF @code <> -2
                EXEC {schema}.release_session_lock @name;
        END;
    END;
END;

-- Remove the lock requests of a blocked task.
CREATE OR ALTER PROCEDURE {schema}.leave_lock_queues @task bigint AS {begin}
    DECLARE @proxy bigint;
    SELECT @proxy = p.member_id FROM {schema}.queue_proxy AS p
    JOIN {schema}.task_lock AS l ON l.queue_name = p.queue_name WHERE l.task_id = @task AND l.number = 1;
    EXEC {schema}.end_task_rows @task, @proxy, N'cancelled';
    UPDATE {schema}.task_lock
    SET queue_position = NULL, waits = 0,
        pending = (SELECT CASE WHEN t.status = N'pending' THEN 1 ELSE 0 END FROM {schema}.task AS t WHERE t.task_id = @task)
    WHERE task_id = @task;
    UPDATE {schema}.task WITH (ROWLOCK) SET locks_pending = NULL WHERE task_id = @task;
END;

-- Return the proxy member of a queue, which owns the lock requests of its blocked tasks: renew its lease, or register a
-- new one. Called in the transaction of a claim, which has written the queue's row of queue_proxy.
CREATE OR ALTER PROCEDURE {schema}.proxy_member @queue nvarchar(400), @proxy bigint OUTPUT AS {begin}
    DECLARE @lease int = 60000, @count int, @gone bigint;  -- ms
    SELECT @proxy = member_id FROM {schema}.queue_proxy WHERE queue_name = @queue;
    UPDATE {schema}.member
    SET heartbeat_at = SYSUTCDATETIME(), lease_until = DATEADD(millisecond, @lease, SYSUTCDATETIME())
    WHERE member_id = @proxy AND lease_until < DATEADD(millisecond, @lease / 8 * 7, SYSUTCDATETIME());
    SET @count = @@ROWCOUNT;
    -- Also remove lock requests of tasks that were deleted by hand.
    WHILE @count > 0
    BEGIN
        SET @gone = NULL;
        SELECT TOP (1) @gone = l.task_id FROM {schema}.task_lock AS l
        WHERE l.queue_name = @queue AND l.pending = 1
          AND NOT EXISTS (SELECT 1 FROM {schema}.task AS t WHERE t.task_id = l.task_id);
        IF @gone IS NULL
            RETURN 0;
        EXEC {schema}.end_task_rows @gone, @proxy, N'cancelled';
        DELETE FROM {schema}.task_lock WHERE task_id = @gone;
    END;
    IF EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @proxy)
        RETURN 0;
    -- The proxy has no login: only these procedures can renew its lease or release its rows.
    INSERT INTO {schema}.member (beacon, session_id, program, login, grace_ms, lease_ms, lease_until)
    VALUES (NULL, NULL, N'blocked tasks', N'', 0, @lease, DATEADD(millisecond, @lease, SYSUTCDATETIME()));
    SET @proxy = SCOPE_IDENTITY();
    UPDATE {schema}.queue_proxy SET member_id = @proxy WHERE queue_name = @queue;
    -- The rows in the lock queues were removed with the earlier proxy.
    UPDATE {schema}.task WITH (ROWLOCK) SET locks_pending = NULL
    WHERE task_id IN (SELECT l.task_id FROM {schema}.task_lock AS l WHERE l.queue_name = @queue AND l.pending = 1)
      AND locks_pending IS NOT NULL;
    UPDATE {schema}.task_lock SET queue_position = NULL, waits = 0 WHERE queue_name = @queue AND pending = 1;
END;

-- Return 1 if the limits and rates of a queue, and of this key, have room for one more task. @asked: count also the
-- tasks that are in the lock queues.
CREATE OR ALTER PROCEDURE {schema}.has_room @queue nvarchar(400), @key nvarchar(255), @asked bit AS {begin}
    DECLARE @limited int = 0, @maximum int, @key_maximum int, @all int, @of_key int, @ask int = 0, @ask_of_key int = 0, @code int,
            @name nvarchar(255) = COALESCE(@key, N'');
    SELECT @limited = 1, @maximum = task_limit, @key_maximum = key_limit FROM {schema}.queue_setting WHERE queue_name = @queue;
    IF @limited = 0
        RETURN 1;
    SELECT @key_maximum = COALESCE(task_limit, @key_maximum) FROM {schema}.queue_key WHERE queue_name = @queue AND task_key = @key;
    SELECT @all = COUNT(*), @of_key = COALESCE(SUM(CASE WHEN SUBSTRING(task_hash, 9, 255) = @key THEN 1 ELSE 0 END), 0)
    FROM {schema}.task WITH (INDEX (task_fair)) WHERE queue_name = @queue AND status = N'running';
    IF @asked = 1
        SELECT @ask = COUNT(*), @ask_of_key = COALESCE(SUM(CASE WHEN t.task_key = @key THEN 1 ELSE 0 END), 0)
        FROM {schema}.task_lock AS l JOIN {schema}.task AS t ON t.task_id = l.task_id
        WHERE l.queue_name = @queue AND l.pending = 1 AND l.number = 1 AND t.locks_pending IS NOT NULL;
    IF @all + @ask >= @maximum OR (@name <> N'' AND @of_key + @ask_of_key >= @key_maximum)
        RETURN 0;
    EXEC @code = {schema}.task_may_start @queue, @name, @ask, @ask_of_key, 0;
    RETURN @code;
END;

-- Enqueue the locks of blocked tasks that lack nothing else; return the number of these tasks. Called in the
-- transaction of a claim.
CREATE OR ALTER PROCEDURE {schema}.enqueue_locks @queue nvarchar(400), @proxy bigint, @order int AS {begin}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @line TABLE (place int IDENTITY NOT NULL PRIMARY KEY, task_id bigint NOT NULL, task_key nvarchar(255) NULL,
                         note nvarchar(1000) NULL, lock_count int NOT NULL);
    DECLARE @place int = 0, @before int, @count int = 0, @task bigint, @key nvarchar(255), @note nvarchar(1000), @locks int, @number int,
            @gate nvarchar(255), @code int, @resource nvarchar(255), @named int, @position bigint;
    DECLARE @full TABLE (key_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY);  -- keys without room
    INSERT INTO @line (task_id, task_key, note, lock_count)
    SELECT t.task_id, t.task_key, t.note, t.lock_count
    FROM {schema}.task_lock AS l JOIN {schema}.task AS t ON t.task_id = l.task_id
    WHERE l.queue_name = @queue AND l.pending = 1 AND l.number = 1 AND t.status = N'pending' AND t.locks_pending IS NULL
      AND t.task_order = @order AND t.enqueue_locks_at <= SYSUTCDATETIME()
    ORDER BY t.task_priority DESC, t.task_id;
    WHILE @count < 100
    BEGIN
        SET @before = @place;
        SELECT TOP (1) @place = place, @task = task_id, @key = task_key, @note = note, @locks = lock_count FROM @line
        WHERE place > @before AND COALESCE(task_key, N'') COLLATE Latin1_General_100_BIN2 NOT IN (SELECT key_name FROM @full)
        ORDER BY place;
        IF @place = @before
            BREAK;
        EXEC @code = {schema}.has_room @queue, @key, 1;
        IF @code = 0
        BEGIN
            EXEC @code = {schema}.has_room @queue, N'', 1;
            IF @code = 0
                BREAK;
            INSERT INTO @full (key_name) VALUES (COALESCE(@key, N''));
            CONTINUE;
        END;
        IF EXISTS (SELECT 1 FROM {schema}.task_lock AS l CROSS APPLY {schema}.effective_settings(l.resource_id) AS o
                   WHERE l.task_id = @task AND l.concurrency_limit IS NULL AND o.cap IS NULL)
            CONTINUE;  -- until an operator sets a limit
        -- Take the gates in one order, and wait only briefly, as other sessions may wait for locks of this transaction.
        SET @code = 0;
        SET @gate = NULL;
        SELECT @gate = MIN(LEFT(CONCAT(N'gate.sqlsem.{schema}.', resource_id), 255) COLLATE Latin1_General_100_BIN2)
        FROM {schema}.task_lock WHERE task_id = @task;
        WHILE @gate IS NOT NULL AND @code >= 0
        BEGIN
            IF APPLOCK_MODE(@principal, @gate, N'Transaction') <> N'Exclusive'
                EXEC @code = sys.sp_getapplock @Resource = @gate, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
                    @LockTimeout = 250, @DbPrincipal = @principal;
            SELECT @gate = MIN(LEFT(CONCAT(N'gate.sqlsem.{schema}.', resource_id), 255) COLLATE Latin1_General_100_BIN2)
            FROM {schema}.task_lock
            WHERE task_id = @task AND LEFT(CONCAT(N'gate.sqlsem.{schema}.', resource_id), 255) COLLATE Latin1_General_100_BIN2 > @gate;
        END;
        IF @code < 0
            BREAK;
        IF EXISTS (SELECT 1 FROM {schema}.task_lock WHERE task_id = @task AND concurrency_limit IS NULL)
        BEGIN
            -- A lock names no limit: keep the resource's own limit from being removed before the commit.
            EXEC @code = sys.sp_getapplock @Resource = N'limits.sqlsem.{schema}', @LockMode = N'Shared', @LockOwner = N'Transaction',
                @LockTimeout = 250, @DbPrincipal = @principal;
            IF @code < 0
                BREAK;
        END;
        SET @number = 0;
        WHILE @number < @locks
        BEGIN
            SET @number = @number + 1;
            INSERT INTO {schema}.entry (resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner,
                                        request_uid, requested_at, granted_at, note)
            SELECT resource_id, CONCAT(N'task ', @task), access_type, concurrency_limit, weight, @proxy,
                   LEFT(CONCAT(N'task ', @task, N' of ', @queue), 255), CONVERT(nvarchar(64), NEWID()), SYSUTCDATETIME(), NULL, @note
            FROM {schema}.task_lock WHERE task_id = @task AND number = @number;
            SET @position = SCOPE_IDENTITY();
            UPDATE {schema}.task_lock SET queue_position = @position, waits = 1 WHERE task_id = @task AND number = @number;
        END;
        UPDATE {schema}.task WITH (ROWLOCK) SET locks_pending = @locks WHERE task_id = @task;
        SET @count = @count + 1;
    END;
    RETURN @count;
END;

-- Mark the rows that are no longer blocked (waits, locks_pending); a claim grants them. Of requests of one kind, none
-- behind a blocked one needs a test. Called in the transaction of a claim.
CREATE OR ALTER PROCEDURE {schema}.poll_lock_queues @queue nvarchar(400) AS {begin}
    DECLARE @line TABLE (place int IDENTITY NOT NULL PRIMARY KEY, task_id bigint NOT NULL, number int NOT NULL,
                         resource_id nvarchar(255), access_type nvarchar(64), concurrency_limit int, weight int,
                         queue_position bigint, kind nvarchar(400) COLLATE Latin1_General_100_BIN2);
    DECLARE @place int = 0, @before int, @task bigint, @number int, @resource nvarchar(255), @access nvarchar(64), @limit int,
            @weight int, @position bigint, @kind nvarchar(400), @blocked nvarchar(400) = N'', @eligible int;
    INSERT INTO @line (task_id, number, resource_id, access_type, concurrency_limit, weight, queue_position, kind)
    SELECT task_id, number, resource_id, access_type, concurrency_limit, weight, queue_position,
           CONCAT(resource_id, N'|', access_type, N'|', weight, N'|', concurrency_limit)
    FROM {schema}.task_lock WHERE queue_name = @queue AND pending = 1 AND waits = 1
    ORDER BY resource_id, access_type, weight, concurrency_limit, queue_position;
    WHILE 1 = 1
    BEGIN
        SET @before = @place;
        SELECT TOP (1) @place = place, @task = task_id, @number = number, @resource = resource_id, @access = access_type,
               @limit = concurrency_limit, @weight = weight, @position = queue_position, @kind = kind
        FROM @line WHERE place > @before AND kind <> @blocked ORDER BY place;
        IF @place = @before
            BREAK;
        SELECT @eligible = eligible FROM {schema}.eligibility(@resource, @position, @access, @limit, @weight, NULL);
        IF @eligible = 1
        BEGIN
            UPDATE {schema}.task_lock SET waits = 0 WHERE task_id = @task AND number = @number;
            UPDATE {schema}.task WITH (ROWLOCK) SET locks_pending = locks_pending - 1 WHERE task_id = @task;
        END
        ELSE
            SET @blocked = @kind;
    END;
END;

-- Return the first blocked task whose locks can all be granted, if it may start (NULL: none). Tasks whose locks are
-- free but that may not start leave the lock queues. Called in the transaction of a claim.
CREATE OR ALTER PROCEDURE {schema}.next_blocked_task @queue nvarchar(400), @proxy bigint, @order int, @task bigint OUTPUT
AS {begin}
    DECLARE @line TABLE (place int IDENTITY NOT NULL PRIMARY KEY, task_id bigint NOT NULL, task_key nvarchar(255) NULL,
                         lock_count int NOT NULL, task_order int NOT NULL);
    DECLARE @place int = 0, @maximum int, @candidate bigint, @key nvarchar(255), @locks int, @number int, @row_count int, @free int, @of int,
            @room int, @resource nvarchar(255), @access nvarchar(64), @limit int, @weight int, @position bigint, @eligible int;
    SET @task = NULL;
    INSERT INTO @line (task_id, task_key, lock_count, task_order)
    SELECT t.task_id, t.task_key, t.lock_count, t.task_order
    FROM {schema}.task_lock AS l JOIN {schema}.task AS t ON t.task_id = l.task_id
    WHERE l.queue_name = @queue AND l.pending = 1 AND l.number = 1 AND t.status = N'pending' AND t.locks_pending = 0
    ORDER BY t.task_order, t.task_priority DESC, t.task_id;
    SET @maximum = @@ROWCOUNT;
    WHILE @place < @maximum AND @task IS NULL
    BEGIN
        SET @place = @place + 1;
        SELECT @candidate = task_id, @key = task_key, @locks = lock_count, @of = task_order FROM @line WHERE place = @place;
        SET @number = 0;
        SET @row_count = 0;
        SET @free = 0;
        WHILE @number < @locks
        BEGIN
            SET @number = @number + 1;
            SET @position = NULL;
            SELECT @resource = l.resource_id, @access = l.access_type, @limit = l.concurrency_limit, @weight = l.weight,
                   @position = t.queue_position
            FROM {schema}.task_lock AS l
            JOIN {schema}.entry AS t WITH (READCOMMITTEDLOCK) ON t.resource_id = l.resource_id AND t.queue_position = l.queue_position
            WHERE l.task_id = @candidate AND l.number = @number AND t.member_id = @proxy AND t.revoked_at IS NULL;
            IF @position IS NOT NULL
            BEGIN
                SELECT @eligible = eligible FROM {schema}.eligibility(@resource, @position, @access, @limit, @weight, NULL);
                SET @row_count = @row_count + 1;
                SET @free = @free + @eligible;
            END;
        END;
        EXEC @room = {schema}.has_room @queue, @key, 0;
        IF @row_count < @locks OR @of <> @order OR @room = 0
            EXEC {schema}.leave_lock_queues @candidate;
        ELSE IF @free < @locks
        BEGIN
            -- A resource was paused, or has another limit now.
            UPDATE {schema}.task_lock SET waits = 1 WHERE task_id = @candidate;
            UPDATE {schema}.task WITH (ROWLOCK) SET locks_pending = @locks WHERE task_id = @candidate;
        END
        ELSE
            SET @task = @candidate;
    END;
END;

-- Claim a blocked task whose locks can all be granted; @task is NULL if there is none. Its locks then belong to this
-- member, with @requesting_id and owner @row_owner. With @again (the first reply may have been lost) return the task
-- that an earlier call with the same @uid has claimed. @answer = 1: return a row for each lock, with the task in each.
CREATE OR ALTER PROCEDURE {schema}.claim_blocked
    @member bigint, @queue nvarchar(400), @owner nvarchar(255), @uid nvarchar(64), @again bit, @requesting_id nvarchar(255),
    @row_owner nvarchar(255), @task bigint = NULL OUTPUT, @answer bit = 0 AS {begin_try_own}
    SET @task = NULL;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: claim_blocked must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @proxy bigint, @order int, @look int = 0, @asked int = 1, @count int, @limited int = 0, @host nvarchar(255), @pid int,
            @lease int, @number int = 0, @locks int, @name nvarchar(255), @code int, @found bigint, @resource nvarchar(255),
            @position bigint, @access nvarchar(64), @limit int, @weight int, @eligible int, @written int, @key nvarchar(255),
            @row_uid nvarchar(64) = COALESCE(@uid, CONVERT(nvarchar(64), NEWID()));
    IF @again = 1
        SELECT TOP (1) @task = task_id FROM {schema}.task WITH (INDEX (task_open))
        WHERE queue_name = @queue AND is_open = CAST(1 AS bit)
          AND status = N'running' AND member_id = @member AND claim_uid = @uid
          AND EXISTS (SELECT 1 FROM {schema}.task_lock AS l WHERE l.task_id = task.task_id);
    IF @task IS NULL AND EXISTS (SELECT 1 FROM {schema}.task_lock WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) WHERE queue_name = @queue AND pending = 1)
    BEGIN
        IF @requesting_id IS NULL OR CONCAT(@requesting_id, @row_owner, @uid) COLLATE Latin1_General_100_BIN2
           LIKE CONCAT(N'%[', NCHAR(1), N'-', NCHAR(31), NCHAR(127), N'-', NCHAR(159), N']%')
            THROW 50000, N'sqlsem: bad request: requesting_id and uid must be printable text', 1;
        EXEC {schema}.touch_worker @member, @host OUTPUT, @pid OUTPUT;
        BEGIN TRY
            IF NOT EXISTS (SELECT 1 FROM {schema}.queue_proxy WHERE queue_name = @queue)
                INSERT INTO {schema}.queue_proxy (queue_name) VALUES (LEFT(@queue, 255));
            BEGIN TRANSACTION;
            UPDATE {schema}.queue_proxy WITH (ROWLOCK) SET claims = claims + 1 WHERE queue_name = @queue;  -- one claim at a time
            -- Lock the limits of the queue, as pick_fair_task does: they cannot change before this transaction ends.
            SELECT @limited = 1 FROM {schema}.queue_setting WITH (HOLDLOCK) WHERE queue_name = @queue;
            IF @limited = 1
                UPDATE {schema}.queue_setting WITH (ROWLOCK) SET claims = claims + 1 WHERE queue_name = @queue;
            EXEC {schema}.proxy_member @queue, @proxy OUTPUT;
            SELECT TOP (1) @order = task_order FROM {schema}.task WITH (INDEX (task_open))
            WHERE queue_name = @queue AND is_open = CAST(1 AS bit) ORDER BY task_order;
            WHILE @found IS NULL AND @look < 2 AND @asked > 0
            BEGIN
                SET @look = @look + 1;
                EXEC {schema}.poll_lock_queues @queue;
                EXEC {schema}.next_blocked_task @queue, @proxy, @order, @found OUTPUT;
                IF @found IS NULL AND @look = 1
                    EXEC @asked = {schema}.enqueue_locks @queue, @proxy, @order;
            END;
            IF @found IS NOT NULL
            BEGIN
                SELECT @locks = lock_count, @key = COALESCE(task_key, N'') FROM {schema}.task WHERE task_id = @found;
                SET @count = 0;
                WHILE @number < @locks
                BEGIN
                    SET @number = @number + 1;
                    SELECT @resource = resource_id, @position = queue_position, @access = access_type, @limit = concurrency_limit,
                           @weight = weight
                    FROM {schema}.task_lock WHERE task_id = @found AND number = @number;
                    UPDATE {schema}.entry
                    SET member_id = @member, requesting_id = @requesting_id, owner = @row_owner,
                        request_uid = CONCAT(@row_uid, N'.', @number), granted_at = SYSUTCDATETIME(), waiter_lease_until = NULL
                    WHERE resource_id = @resource AND queue_position = @position AND member_id = @proxy AND revoked_at IS NULL;
                    SET @written = @@ROWCOUNT;
                    -- Apply the rule again: either a reader ahead that has begun to upgrade meanwhile sees this grant,
                    -- or the rule sees that reader (begin_upgrade).
                    SELECT @eligible = eligible FROM {schema}.eligibility(@resource, @position, @access, @limit, @weight, NULL);
                    SET @count = @count + @written * @eligible;
                END;
                IF @count = @locks
                BEGIN
                    UPDATE {schema}.task WITH (ROWLOCK)
                    SET status = N'running', attempt = attempt + 1, member_id = @member, owner = @owner, claim_uid = @uid,
                        claimed_at = SYSUTCDATETIME(), host = @host, pid = @pid, login = ORIGINAL_LOGIN()
                    WHERE task_id = @found AND status = N'pending';
                    SET @count = @@ROWCOUNT;
                    UPDATE {schema}.task_lock SET pending = 0 WHERE task_id = @found;
                    EXEC @code = {schema}.task_may_start @queue, @key, 0, 0, 1;
                    IF @code = 0
                        SET @count = 0;
                END
                ELSE
                    SET @count = 0;
            END;
            IF @found IS NOT NULL AND @count = 0
                ROLLBACK TRANSACTION;  -- a row is being revoked, or is blocked again
            ELSE
            BEGIN
                COMMIT TRANSACTION;
                SET @task = @found;
            END;
        END TRY
        BEGIN CATCH
            IF @@TRANCOUNT > 0
                ROLLBACK TRANSACTION;
            -- Another session blocks this claim, or was faster: the next claim tries again.
            IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222, 2601, 2627)
                THROW;
        END CATCH;
    END;
    SELECT @lease = lease_ms FROM {schema}.member WHERE member_id = @member;
    SET @number = 0;
    WHILE @task IS NOT NULL AND @lease IS NULL
    BEGIN
        SET @name = NULL;
        SELECT @name = CONCAT(N'entry.sqlsem.{schema}.', queue_position) FROM {schema}.task_lock
        WHERE task_id = @task AND number = @number + 1;
        IF @name IS NULL
            BREAK;
        SET @number = @number + 1;
        -- (A short wait: a waiter may share the lock for an instant, to test it. Without the lock, waiters poll.)
        IF APPLOCK_MODE(@principal, @name, N'Session') = N'NoLock'
            EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Session',
                @LockTimeout = 50, @DbPrincipal = @principal;
    END;
    IF @answer = 1
        SELECT t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts,
               l.resource_id, l.queue_position, l.access_type, l.concurrency_limit, l.weight
        FROM {schema}.task AS t JOIN {schema}.task_lock AS l ON l.task_id = t.task_id
        WHERE t.task_id = @task ORDER BY l.number;
{end_try_own}

-- Test the owners of rows that block the tasks of a queue, on 8 resources at most. (Elsewhere waiters make this test,
-- but no process waits for the locks of a blocked task.)
CREATE OR ALTER PROCEDURE {schema}.check_lock_holders @queue nvarchar(400) AS {begin}
    DECLARE @some TABLE (place int IDENTITY NOT NULL PRIMARY KEY, resource_id nvarchar(255) NOT NULL);
    DECLARE @place int = 0, @maximum int, @resource nvarchar(255), @code int;
    INSERT INTO @some (resource_id)
    SELECT TOP (8) w.resource_id
    FROM (SELECT DISTINCT resource_id FROM {schema}.task_lock WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
          WHERE queue_name = @queue AND pending = 1 AND waits = 1) AS w
    ORDER BY NEWID();
    SET @maximum = @@ROWCOUNT;
    WHILE @place < @maximum
    BEGIN
        SET @place = @place + 1;
        SELECT @resource = resource_id FROM @some WHERE place = @place;
        EXEC @code = {schema}.reap_dead_members @resource, -1;
    END;
END;

-- Return the locks of these tasks (a JSON array of their numbers), for displays.
CREATE OR ALTER PROCEDURE {schema}.show_task_locks @tasks nvarchar(max) AS {begin_try}
    DECLARE @all int;
    DECLARE @asked TABLE (task_id bigint NOT NULL PRIMARY KEY);
    EXEC @all = {schema}.sees_all;
    INSERT INTO @asked (task_id) SELECT DISTINCT CAST(value AS bigint) FROM OPENJSON(@tasks);
    SELECT l.task_id, l.resource_id, l.queue_position, l.access_type, l.concurrency_limit, l.weight
    FROM @asked AS a JOIN {schema}.task AS t WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) ON t.task_id = a.task_id
    JOIN {schema}.task_lock AS l WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) ON l.task_id = a.task_id
    WHERE @all = 1 OR t.put_by = ORIGINAL_LOGIN()
    ORDER BY l.task_id, l.number;
{end_try}
