-- sqlsem, the work queue, for SQL Server. May be run again at any time, after public.sql.
--
-- A claim belongs to a member, like a row of the lock queue: no session takes a task from a live worker, however long
-- the task runs. When the member is removed its tasks are pending again (recover_tasks). No transaction is open while a
-- task runs.
--
-- Orders are barriers: claims take only pending tasks of the lowest order that has an open task. The claim skips locked
-- rows, but its search for that order waits for them: a task still blocks later orders until its end is committed.
--
-- Locks: a statement reads an index of the task table without the rows, or writes rows by their number. So each
-- statement locks a row first, and its index entries next. A session that has locked an index entry (a claim) skips a
-- locked row. An attempt is ended, and the next task claimed, in two transactions: so no session keeps a lock while it
-- searches for the lowest open order.
--
-- Errors as in routines.sql, and 50006: not allowed for this login.
-- is_open is compared with CAST(1 AS bit): compared with 1, some engines convert the column, and do not use the index.
-- A task that may run at once has 1900 as ready_at, and is shown as ready since its put: so it does not wait if the
-- clock goes back.
-- PostgreSQL's tasks.sql explains fair queueing. A claim of a queue with limits first writes the queue's row of
-- queue_setting. A claim of any other queue keeps a shared lock on the place of that row, so that a session that sets
-- the first limit waits for the claim.
-- Application locks, Transaction: N'put.sqlsem.{schema}.' and a uid, held while tasks are put under that uid;
-- N'key.sqlsem.{schema}.', a task's key and its queue, held while a task with this key is put;
-- N'schedules.sqlsem.{schema}', held while a schedule is saved.

-- Putting ----------------------------------------------------------------------------------------------------------

-- Raise for an invalid kind or body of a task; @kind becomes the value that the table stores. Raise also for code (all
-- kinds but json) from a login that may not put code, as the code runs with the workers' rights. (IS_MEMBER sees the
-- caller's roles, as this procedure runs with the caller's rights on all but the tables.)
CREATE OR ALTER PROCEDURE {schema}.check_work @kind nvarchar(100) OUTPUT, @body nvarchar(max) AS {begin}
    DECLARE @message nvarchar(1000), @word nvarchar(100), @values int = 1;
    -- (N'|' is appended because = ignores blanks at the end.)
    SET @word = CASE CONCAT(LOWER(@kind COLLATE Latin1_General_100_BIN2), N'|')
                    WHEN N'sql|' THEN N'sql' WHEN N'shell|' THEN N'shell' WHEN N'call|' THEN N'call' WHEN N'json|' THEN N'json' END;
    IF @word IN (N'json', N'call')
    BEGIN
        -- ISJSON does not accept single values, so test the body in brackets, and count that it is exactly one value.
        SET @values = 0;
        IF ISJSON(CONCAT(N'[', @body, N']')) = 1
            SELECT @values = COUNT(*) FROM OPENJSON(CONCAT(N'[', @body, N']'));
    END;
    IF @word IS NULL
        SET @message = CONCAT(N'sqlsem: kind is ', COALESCE(N'''' + @kind + N'''', N'NULL'),
            N'; it must be sql, shell, call or json');
    ELSE IF @body IS NULL
        SET @message = N'sqlsem: the body of a task is NULL; give it a text';
    ELSE IF @values <> 1
        SET @message = CONCAT(N'sqlsem: the body of a task of kind ', @word, N' is no JSON: ''', LEFT(@body, 100), N'''');
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;
    IF @word <> N'json' AND COALESCE(IS_MEMBER(N'{schema}_putter'), 0) = 0
       AND COALESCE(IS_MEMBER(N'db_owner'), 0) = 0 AND COALESCE(IS_SRVROLEMEMBER(N'sysadmin'), 0) = 0
    BEGIN
        SET @message = CONCAT(N'sqlsem: ', CURRENT_USER,
            N' may put JSON tasks only: SQL, commands and functions run with the rights of the workers; ',
            N'an administrator can ALTER ROLE {schema}_putter ADD MEMBER ...');
        EXEC {schema}.raise_error 50006, @message;
    END;
    SET @kind = @word;
END;

-- Put a task for a login, after check_work has accepted its kind and body.
CREATE OR ALTER PROCEDURE {schema}.put_task_by
    @put_by nvarchar(128), @queue nvarchar(400), @uid nvarchar(64), @kind nvarchar(8), @body nvarchar(max), @order int,
    @after_ms bigint, @max_attempts int, @backoff_ms bigint, @on_failure nvarchar(100), @note nvarchar(1000),
    @unique_key nvarchar(400), @replace_key nvarchar(400), @time_limit_ms bigint, @task_key nvarchar(400), @priority int,
    @task_id bigint OUTPUT, @locks nvarchar(max) = NULL AS {begin}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @message nvarchar(1000), @name nvarchar(255), @code int, @then nvarchar(100),
            @mine bit = 0, @key nvarchar(400) = COALESCE(@unique_key, @replace_key), @existing bigint,
            @existing_by nvarchar(128), @count int;
    SET @task_id = NULL;
    EXEC {schema}.check_name N'queue', @queue;
    IF @key IS NOT NULL
        EXEC {schema}.check_name N'key', @key;
    IF @task_key IS NOT NULL
        EXEC {schema}.check_name N'key', @task_key;
    SET @then = CASE CONCAT(LOWER(@on_failure COLLATE Latin1_General_100_BIN2), N'|') WHEN N'stop|' THEN N'stop' WHEN N'continue|' THEN N'continue' END;
    IF @order IS NULL
        SET @message = N'sqlsem: order is NULL; give it a whole number';
    ELSE IF @priority IS NULL
        SET @message = N'sqlsem: priority is NULL; give it a whole number';
    ELSE IF COALESCE(@after_ms, -1) < 0 OR @after_ms > 315360000000
        SET @message = CONCAT(N'sqlsem: after_seconds must be from 0 to ten years (315360000), not ',
            COALESCE(CONVERT(nvarchar(40), @after_ms / CAST(1000 AS float)), N'NULL'));
    ELSE IF COALESCE(@max_attempts, 0) < 1
        SET @message = CONCAT(N'sqlsem: max_attempts must be 1 or more, not ',
            COALESCE(CONVERT(nvarchar(20), @max_attempts), N'NULL'));
    ELSE IF COALESCE(@backoff_ms, -1) < 0 OR @backoff_ms > 300000
        SET @message = CONCAT(N'sqlsem: backoff_seconds must be from 0 to 300, not ',
            COALESCE(CONVERT(nvarchar(40), @backoff_ms / CAST(1000 AS float)), N'NULL'));
    ELSE IF @unique_key IS NOT NULL AND @replace_key IS NOT NULL
        SET @message = N'sqlsem: a task has one key: give it unique_key or replace_key';
    ELSE IF @time_limit_ms < 1 OR @time_limit_ms > 2147483647
        SET @message = CONCAT(N'sqlsem: time_limit_seconds must be above 0 and at most 2147483, not ',
            CONVERT(nvarchar(40), @time_limit_ms / CAST(1000 AS float)));
    ELSE IF @then IS NULL
        SET @message = CONCAT(N'sqlsem: on_failure is ', COALESCE(N'''' + @on_failure + N'''', N'NULL'),
            N'; it must be stop or continue');
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;
    IF @locks IS NOT NULL
        EXEC {schema}.check_locks @locks;

    IF @@TRANCOUNT = 0 AND (@uid IS NOT NULL OR @key IS NOT NULL OR @locks IS NOT NULL)
    BEGIN
        SET @mine = 1;
        SET XACT_ABORT ON;  -- an error leaves nothing half done, and no transaction open
        BEGIN TRANSACTION;
    END;
    IF @uid IS NULL
        SET @uid = CONVERT(nvarchar(64), NEWID());
    ELSE
    BEGIN
        -- Wait for an earlier call with this uid: it may still be running, although its reply was lost.
        SET @name = CONCAT(N'put.sqlsem.{schema}.', LEFT(@uid, CHARINDEX(N'.', CONCAT(@uid, N'.')) - 1));
        EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
            @LockTimeout = 10000, @DbPrincipal = @principal;
        IF @code < 0
        BEGIN
            IF @mine = 1
                ROLLBACK TRANSACTION;
            THROW 50002, N'sqlsem: busy: these tasks are being put by another call; try again', 1;
        END;
        SELECT @task_id = task_id FROM {schema}.task WHERE put_uid = @uid;
    END;
    IF @task_id IS NULL AND @key IS NOT NULL
    BEGIN
        -- One session at a time puts a task with this key: so the task of an earlier call is committed, and visible.
        SET @name = LEFT(CONCAT(N'key.sqlsem.{schema}.', @key, N'.', @queue), 255);
        EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
            @LockTimeout = 10000, @DbPrincipal = @principal;
        IF @code < 0
        BEGIN
            IF @mine = 1
                ROLLBACK TRANSACTION;
            THROW 50002, N'sqlsem: busy: a task with this key is being put by another transaction; try again', 1;
        END;
        SELECT TOP (1) @existing = task_id, @existing_by = put_by FROM {schema}.task
        WHERE unique_key = @key AND queue_name = @queue AND is_open = CAST(1 AS bit) ORDER BY task_id DESC;
        IF @unique_key IS NOT NULL
            SET @task_id = @existing;
        ELSE IF @existing IS NOT NULL AND COALESCE(@existing_by, N'') <> @put_by
            AND COALESCE(IS_MEMBER(N'{schema}_operator'), 0) = 0 AND COALESCE(IS_MEMBER(N'db_owner'), 0) = 0
            AND COALESCE(IS_SRVROLEMEMBER(N'sysadmin'), 0) = 0
        BEGIN
            IF @mine = 1
                ROLLBACK TRANSACTION;
            SET @message = CONCAT(N'sqlsem: task ', @existing, N' with this key was put by ', @existing_by,
                N', and is not replaced by another login''s');
            EXEC {schema}.raise_error 50006, @message;
        END;
    END;
    IF @task_id IS NULL
    BEGIN
        IF @task_key IS NULL
           AND (@priority <> 0 OR EXISTS (SELECT 1 FROM {schema}.queue_setting WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                                          WHERE queue_name = @queue)
                OR EXISTS (SELECT 1 FROM {schema}.task WITH (INDEX (task_fair), ROWLOCK, READPAST, READCOMMITTEDLOCK)
                           WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order AND task_hash >= N''))
            SET @task_key = N'';
        INSERT INTO {schema}.task (queue_name, task_order, kind, body, note, on_failure, max_attempts, backoff_ms,
                                   put_uid, time_limit_ms, unique_key, put_by, task_key, task_hash, task_priority, ready_at)
        VALUES (@queue, @order, @kind, @body, @note, @then, @max_attempts, @backoff_ms, @uid, @time_limit_ms, @key, @put_by,
                @task_key,
                CASE WHEN @task_key IS NOT NULL THEN {schema}.key_hash(@task_key) END,
                @priority,
                CASE WHEN @after_ms = 0 THEN CAST(N'19000101' AS datetime2(6))
                     ELSE DATEADD(millisecond, CAST(@after_ms % 1000 AS int),
                                  DATEADD(second, CAST(@after_ms / 1000 AS int), SYSUTCDATETIME())) END);
        SET @task_id = SCOPE_IDENTITY();
        IF @locks IS NOT NULL
            EXEC {schema}.store_task_locks @task_id, @queue, @locks;
        IF @existing IS NOT NULL
        BEGIN
            -- The old task is cancelled; a running one only gives up its key.
            UPDATE {schema}.task WITH (ROWLOCK)
            SET status = N'cancelled', is_open = 0, ended_at = SYSUTCDATETIME(),
                error = CONCAT(N'replaced by task ', @task_id)
            WHERE task_id = @existing AND status IN (N'pending', N'failed') AND is_open = CAST(1 AS bit);
            SET @count = @@ROWCOUNT;
            IF @count = 0
                UPDATE {schema}.task WITH (ROWLOCK) SET unique_key = NULL WHERE task_id = @existing AND status = N'running';
            ELSE IF EXISTS (SELECT 1 FROM {schema}.task_lock WHERE task_id = @existing)
                EXEC {schema}.leave_lock_queues @existing;
        END;
    END;
    IF @mine = 1
        COMMIT TRANSACTION;
END;

-- Put one task; part of the caller's transaction, if any. A second call with the same @uid (the first reply was lost)
-- finds the task of the first. A uid is <common part of several calls>.<number>.
CREATE OR ALTER PROCEDURE {schema}.put_task
    @queue nvarchar(400), @uid nvarchar(64), @kind nvarchar(100), @body nvarchar(max), @order int = 0,
    @after_ms bigint = 0, @max_attempts int = 1, @backoff_ms bigint = 1000, @on_failure nvarchar(100) = N'stop',
    @note nvarchar(1000) = NULL, @task_id bigint = NULL OUTPUT, @answer bit = 0, @unique_key nvarchar(400) = NULL,
    @replace_key nvarchar(400) = NULL, @time_limit_ms bigint = NULL, @task_key nvarchar(400) = NULL, @priority int = 0,
    @locks nvarchar(max) = NULL AS {begin_try_own}
    DECLARE @put_by nvarchar(128) = ORIGINAL_LOGIN();
    SET @task_id = NULL;
    EXEC {schema}.check_work @kind OUTPUT, @body;
    IF @locks IS NOT NULL
        EXEC {schema}.check_may_lock;
    EXEC {schema}.put_task_by @put_by, @queue, @uid, @kind, @body, @order, @after_ms, @max_attempts, @backoff_ms,
        @on_failure, @note, @unique_key, @replace_key, @time_limit_ms, @task_key, @priority, @task_id OUTPUT, @locks;
    IF @answer = 1
        SELECT @task_id AS task_id;
{end_try_own}


-- Claiming and ending ----------------------------------------------------------------------------------------------

-- Return 1 if the rates of a queue and of this key allow one more task to start. @all, @of_key: tasks of the queue, and
-- of the key, that start before it. The caller's transaction has written the queue's row of queue_setting. @start: the
-- task starts, so count it. PostgreSQL's tasks.sql explains these rates.
CREATE OR ALTER PROCEDURE {schema}.task_may_start @queue nvarchar(400), @key nvarchar(255), @all int, @of_key int, @start bit
AS {begin}
    DECLARE @take int = 0, @takes int = @start, @of int, @rate int, @ms int, @whose nvarchar(255), @ahead int, @now bigint,
            @hash varbinary(32), @name nvarchar(255), @cost bigint, @windows nvarchar(1000), @only_look bit, @wait bigint, @taken bigint;
    WHILE @take <= @takes  -- 0: read both rates; 1: count the start in both
    BEGIN
        SET @of = 0;
        WHILE @of < 2
        BEGIN
            SET @of = @of + 1;
            SET @rate = NULL;
            IF @of = 1
                SELECT @whose = N'', @rate = task_rate, @ms = task_ms, @ahead = @all
                FROM {schema}.queue_setting WHERE queue_name = @queue;
            ELSE IF @key <> N''
            BEGIN
                SELECT @whose = @key, @rate = key_rate, @ms = key_ms, @ahead = @of_key
                FROM {schema}.queue_setting WHERE queue_name = @queue;
                SELECT @whose = @key, @rate = task_rate, @ms = task_ms, @ahead = @of_key
                FROM {schema}.queue_key WHERE queue_name = @queue AND task_key = @key AND task_rate IS NOT NULL;
            END;
            IF @rate IS NULL
                CONTINUE;
            SET @now = {schema}.clock_us() / 1000;
            IF @ahead >= @rate
               OR EXISTS (SELECT 1 FROM {schema}.queue_wait
                          WHERE queue_name = @queue AND task_key = @whose AND @now >= since_ms AND @now < free_ms)
                RETURN 0;
            -- The name under which the starts are counted. (No queue or key has a control character in its name, so
            -- NCHAR(31) separates the two.)
            SET @hash = HASHBYTES('SHA2_256', CONCAT(@queue, NCHAR(31), @whose));
            SET @name = CONCAT(N'tasks:', CAST(SUBSTRING(@hash, 1, 8) AS bigint), N'.', CAST(SUBSTRING(@hash, 9, 8) AS bigint), N'.',
                               CAST(SUBSTRING(@hash, 17, 8) AS bigint), N'.', CAST(SUBSTRING(@hash, 25, 8) AS bigint));
            SET @windows = CONCAT(N'[{"limit": ', @rate, N', "ms": ', @ms, N'}]');
            SET @cost = 1 + @ahead;
            SET @only_look = 1 - @take;
            EXEC {schema}.take_tokens @name, @cost, @windows, NULL, @only_look, @wait OUTPUT, @taken OUTPUT;
            IF @wait > 0
            BEGIN
                IF @ahead = 0
                BEGIN
                    UPDATE {schema}.queue_wait SET since_ms = @taken, free_ms = @taken + @wait
                    WHERE queue_name = @queue AND task_key = @whose;
                    IF @@ROWCOUNT = 0
                        INSERT INTO {schema}.queue_wait (queue_name, task_key, since_ms, free_ms)
                        VALUES (LEFT(@queue, 255), @whose, @taken, @taken + @wait);
                END;
                RETURN 0;
            END;
        END;
        SET @take = @take + 1;
    END;
    RETURN 1;
END;

-- Pick the next task of the lowest open order by fair queueing, lock it, and count its start; @task is NULL if there is
-- none. @turns: 0 if the queue does not use fair queueing. Called in the transaction of a claim.
CREATE OR ALTER PROCEDURE {schema}.pick_fair_task @queue nvarchar(400), @order int, @turns bit OUTPUT, @task bigint OUTPUT
AS {begin_inner}
    DECLARE @running TABLE (task_key nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY, many int NOT NULL);
    -- near 1: a key that was read from the random place on; it also counts for the keys around it that are not read.
    DECLARE @draw TABLE (task_key nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL, near int NOT NULL);
    -- rated: 2 if the rate is used up, 3 if there is nothing to start.
    DECLARE @line TABLE (place int IDENTITY NOT NULL PRIMARY KEY,
                         task_key nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL, rated int NOT NULL);
    DECLARE @limited int = 0, @maximum int, @key_maximum int, @total int, @key nvarchar(255), @exists int = 0, @id bigint, @plain bigint,
            @priority int, @place int = 0, @count int = 0, @rate int, @key_rate int, @code int = 1, @now bigint, @rated int,
            @lap int = 0, @first int = 1, @drawn int, @begin nvarchar(8), @turn nvarchar(263), @until nvarchar(8) = N':', @part float, @at nvarchar(263),
            @salt nvarchar(64) = CONVERT(nvarchar(64), NEWID());
    SET @turns = 0;
    SET @task = NULL;
    SELECT @limited = 1 FROM {schema}.queue_setting WITH (NOLOCK) WHERE queue_name = @queue;
    IF @limited = 1
    BEGIN
        UPDATE {schema}.queue_setting WITH (ROWLOCK) SET claims = claims + 1 WHERE queue_name = @queue;
        IF @@ROWCOUNT = 0
            SET @limited = 0;  -- the row was deleted while this session waited for it
    END;
    IF @limited = 0
    BEGIN
        SELECT @limited = 1 FROM {schema}.queue_setting WITH (HOLDLOCK) WHERE queue_name = @queue;
        IF @limited = 1
            UPDATE {schema}.queue_setting WITH (ROWLOCK) SET claims = claims + 1 WHERE queue_name = @queue;
    END;
    SELECT @maximum = task_limit, @key_maximum = key_limit, @rate = task_rate, @key_rate = key_rate
    FROM {schema}.queue_setting WHERE @limited = 1 AND queue_name = @queue;
    SELECT TOP (1) @exists = 1 FROM {schema}.task WITH (INDEX (task_fair), ROWLOCK, READPAST, READCOMMITTEDLOCK)
    WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order AND task_hash >= N'';
    IF @limited = 0 AND @exists = 0
        RETURN 0;
    SET @turns = 1;
    -- (A task counts until its end is committed. This statement waits for that, or reads the old version of the row.)
    INSERT INTO @running (task_key, many)
    SELECT COALESCE(SUBSTRING(task_hash, 9, 255), N''), COUNT(*) FROM {schema}.task WITH (INDEX (task_fair))
    WHERE queue_name = @queue AND status = N'running' GROUP BY COALESCE(SUBSTRING(task_hash, 9, 255), N'');
    SELECT @total = COALESCE(SUM(many), 0) FROM @running;
    IF @total >= @maximum
        RETURN 0;
    IF @rate IS NOT NULL
        EXEC @code = {schema}.task_may_start @queue, N'', 0, 0, 0;
    IF @code = 0
        RETURN 0;
    SET @now = {schema}.clock_us() / 1000;
    -- Draw from the keys without a running task, some at a time, from a random place on; then from the other keys.
    -- PostgreSQL's tasks.sql explains why.
    SET @begin = RIGHT(CONCAT(N'0000000', CAST(FLOOR(RAND() * 16777216) AS int)), 8);
    SET @turn = @begin;
    WHILE @lap < 3 AND @task IS NULL
    BEGIN
        SET @drawn = 0;
        IF @first = 0
            DELETE FROM @draw;
        IF @lap = 2
        BEGIN
            INSERT INTO @draw (task_key, near) SELECT task_key, 0 FROM @running;
            SET @lap = 3;
        END
        ELSE IF @first = 1
            INSERT INTO @draw (task_key, near)
            SELECT N'', 0 WHERE NOT EXISTS (SELECT 1 FROM @running WHERE task_key = N'');
        WHILE @lap < 2 AND @drawn < 32
        BEGIN
            SET @exists = 0;
            SELECT TOP (1) @turn = task_hash, @exists = 1 FROM {schema}.task WITH (INDEX (task_fair), ROWLOCK, READPAST, READCOMMITTEDLOCK)
            WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order AND task_hash > @turn
              AND task_hash < @until
            ORDER BY task_hash;
            SET @key = SUBSTRING(@turn, 9, 255);
            IF @exists = 0
            BEGIN
                SET @lap = @lap + 1;
                SET @turn = N'';
                SET @until = @begin;
            END
            ELSE IF @key <> N'' AND NOT EXISTS (SELECT 1 FROM @running WHERE task_key = @key)
            BEGIN
                INSERT INTO @draw (task_key, near) VALUES (@key, 1);
                SET @drawn = @drawn + 1;
            END;
        END;
        SET @part = 1;
        IF @first = 1 AND @lap < 2
        BEGIN
            SET @part = CASE WHEN @turn <> N'' THEN CAST(LEFT(@turn, 8) AS int) ELSE 0 END;
            SET @part = (@part + 16777216.0 * @lap - CAST(@begin AS int) + 1) / 16777216.0;
            INSERT INTO @draw (task_key, near)
            SELECT TOP (32) k.task_key, 0 FROM {schema}.queue_key AS k
            WHERE k.queue_name = @queue AND k.weight > 1 AND NOT EXISTS (SELECT 1 FROM @running AS r WHERE r.task_key = k.task_key)
            ORDER BY k.weight DESC;
        END;
        SET @first = 0;
        INSERT INTO @line (task_key, rated)
        SELECT h.task_key, CASE WHEN COALESCE(k.task_rate, @key_rate, @rate) IS NULL THEN 0 ELSE 1 END
        FROM (SELECT d.task_key, CASE WHEN MAX(CASE WHEN d.near = 1 THEN 0 ELSE 1 END) = 0 THEN @part ELSE 1 END AS part,
                     CAST(SUBSTRING(HASHBYTES('SHA2_256', CONCAT(@salt, d.task_key)), 1, 3) AS int) / 16777216.0 AS lot
              FROM @draw AS d GROUP BY d.task_key) AS h
        LEFT JOIN @running AS r ON r.task_key = h.task_key
        LEFT JOIN {schema}.queue_key AS k ON k.queue_name = @queue AND k.task_key = h.task_key
        -- (Compared with NULL: no search of the index.)
        LEFT JOIN {schema}.queue_wait AS w WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
            ON w.queue_name = @queue
           AND w.task_key = CASE WHEN COALESCE(k.task_rate, @key_rate) IS NOT NULL AND h.task_key <> N'' THEN h.task_key END
        WHERE (w.task_key IS NULL OR @now < w.since_ms OR @now >= w.free_ms)
          AND (h.task_key = N'' OR COALESCE(r.many, 0) < COALESCE(k.task_limit, @key_maximum, 2147483647))
        ORDER BY COALESCE(r.many, 0) / CAST(COALESCE(k.weight, 1) AS float), -LOG(1 - h.lot) * h.part / COALESCE(k.weight, 1);
        SET @count = @count + @@ROWCOUNT;
        WHILE @task IS NULL AND @place < @count
        BEGIN
            SET @place = @place + 1;
            SELECT @key = task_key, @rated = rated, @id = NULL, @plain = NULL FROM @line WHERE place = @place;
            SET @at = {schema}.key_hash(@key);
            SELECT TOP (1) @id = task_id, @priority = task_priority
            FROM {schema}.task WITH (INDEX (task_fair), ROWLOCK, READPAST, READCOMMITTEDLOCK)
            WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order AND task_hash = @at
              AND ready_at <= SYSUTCDATETIME()
            ORDER BY task_priority DESC, task_id;
            -- Tasks without a key that were put before the queue had keys, limits or priorities. (They have no
            -- priority.)
            IF @key = N''
                SELECT TOP (1) @plain = task_id
                FROM {schema}.task WITH (INDEX (task_fair), ROWLOCK, READPAST, READCOMMITTEDLOCK)
                WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order AND task_hash IS NULL
                  AND ready_at <= SYSUTCDATETIME()
                ORDER BY task_priority DESC, task_id;
            IF @plain IS NOT NULL AND (@id IS NULL OR @priority < 0 OR @priority = 0 AND @plain < @id)
                SET @id = @plain;
            SELECT @task = task_id FROM {schema}.task WITH (UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)
            WHERE task_id = @id AND status = N'pending' AND ready_at <= SYSUTCDATETIME();
            IF @id IS NULL
                UPDATE @line SET rated = 3 WHERE place = @place;
            IF @task IS NULL OR @rated = 0
                CONTINUE;
            EXEC @code = {schema}.task_may_start @queue, @key, 0, 0, 1;
            IF @code = 0
            BEGIN
                SET @task = NULL;
                UPDATE @line SET rated = 2 WHERE place = @place;
            END;
        END;
    END;
    -- Other sessions are claiming the first tasks of some keys: take later tasks of these keys. (The queue has no
    -- limits: with limits, this session alone would have locked the queue's row.)
    SET @place = 0;
    WHILE @task IS NULL AND @place < @count
    BEGIN
        SET @place = @place + 1;
        SELECT @key = task_key, @rated = rated FROM @line WHERE place = @place;
        IF @rated > 1
            CONTINUE;
        SET @at = {schema}.key_hash(@key);
        SELECT TOP (1) @task = task_id
        FROM {schema}.task WITH (INDEX (task_fair), UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)
        WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order AND task_hash = @at
          AND ready_at <= SYSUTCDATETIME()
        ORDER BY task_priority DESC, task_id;
        IF @task IS NULL AND @key = N''
            SELECT TOP (1) @task = task_id
            FROM {schema}.task WITH (INDEX (task_fair), UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)
            WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order AND task_hash IS NULL
              AND ready_at <= SYSUTCDATETIME()
            ORDER BY task_priority DESC, task_id;
        IF @task IS NULL OR @rated = 0
            CONTINUE;
        EXEC @code = {schema}.task_may_start @queue, @key, 0, 0, 1;
        IF @code = 0
            SET @task = NULL;
    END;
END;

-- Claim the first task that may run now; @task is NULL if there is none. With @again (the first reply may have been
-- lost) return the task that an earlier call with the same @uid has claimed.
CREATE OR ALTER PROCEDURE {schema}.take_task
    @member bigint, @queue nvarchar(400), @owner nvarchar(255), @uid nvarchar(64), @again bit, @task bigint OUTPUT
AS {begin}
    SET @task = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: claim_task must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @order int, @count int = 0, @tries int = 0, @host nvarchar(255), @pid int, @turns bit;
    EXEC {schema}.touch_worker @member, @host OUTPUT, @pid OUTPUT;
    IF @again = 1
        SELECT TOP (1) @task = task_id FROM {schema}.task WITH (INDEX (task_open))
        WHERE queue_name = @queue AND is_open = CAST(1 AS bit)
          AND status = N'running' AND member_id = @member AND claim_uid = @uid;
    IF @task IS NOT NULL
        RETURN 0;
    BEGIN TRY
        -- (100 tries: another session may keep a row locked, but not its index entry, and this loop must end.)
        WHILE @count = 0 AND @tries < 100
        BEGIN
            SET @tries = @tries + 1;
            SET @order = NULL;
            SET @task = NULL;
            SELECT TOP (1) @order = task_order FROM {schema}.task WITH (INDEX (task_open))
            WHERE queue_name = @queue AND is_open = CAST(1 AS bit) ORDER BY task_order;
            IF @order IS NULL
                BREAK;
            BEGIN TRANSACTION;
            EXEC {schema}.pick_fair_task @queue, @order, @turns OUTPUT, @task OUTPUT;
            IF @turns = 0
                SELECT TOP (1) @task = task_id
                FROM {schema}.task WITH (INDEX (task_fair), UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)
                WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order
                  AND task_hash IS NULL AND ready_at <= SYSUTCDATETIME()
                ORDER BY task_priority DESC, task_id;
            -- On an engine without these hints two sessions may have found the same task: then one of them searches
            -- again. (The task may even have run meanwhile, and be pending for its next attempt.)
            UPDATE {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
            SET status = N'running', attempt = attempt + 1, member_id = @member, owner = @owner, claim_uid = @uid,
                claimed_at = SYSUTCDATETIME(), host = @host, pid = @pid, login = ORIGINAL_LOGIN()
            WHERE task_id = @task AND status = N'pending' AND ready_at <= SYSUTCDATETIME();
            SET @count = @@ROWCOUNT;
            COMMIT TRANSACTION;
            IF @task IS NULL
                BREAK;
        END;
        IF @count = 0
            SET @task = NULL;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        -- An open transaction puts or ends a task that comes first, so none may run yet; or this session was chosen as
        -- a deadlock's victim.
        IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222)
            THROW;
        SET @task = NULL;
    END CATCH;
END;

-- Do take_task, and return a row with the task, or none.
CREATE OR ALTER PROCEDURE {schema}.claim_task
    @member bigint, @queue nvarchar(400), @owner nvarchar(255), @uid nvarchar(64), @again bit = 0 AS {begin_try_own}
    DECLARE @task bigint;
    EXEC {schema}.take_task @member, @queue, @owner, @uid, @again, @task OUTPUT;
    SELECT t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts
    FROM {schema}.task AS t WHERE t.task_id = @task;
{end_try_own}

-- End an attempt: 'finished', 'failed' (retried after a growing pause, as often as max_attempts says), 'returned'
-- (pending at once; does not count), or 'cancelled'. If its cancellation was requested, the task is cancelled unless it
-- has finished. @status is the task's new status; NULL if the attempt was no longer this member's. May be repeated.
CREATE OR ALTER PROCEDURE {schema}.end_task
    @member bigint, @task bigint, @attempt int, @outcome nvarchar(16), @result nvarchar(max) = NULL,
    @error nvarchar(max) = NULL, @status nvarchar(16) = NULL OUTPUT, @answer bit = 0 AS {begin_try_own}
    SET @status = NULL;
    DECLARE @failures int, @maximum int, @backoff_ms int, @on_failure nvarchar(8), @pause float, @open bit,
            @exists int, @host nvarchar(255), @pid int, @session_id int, @message nvarchar(1000), @by nvarchar(128), @locks int,
            @count int;
    IF @outcome NOT IN (N'finished', N'failed', N'returned', N'cancelled') OR @outcome IS NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: a task ends as finished, failed, returned or cancelled, not ',
            COALESCE(@outcome, N'NULL'));
        EXEC {schema}.raise_error 50000, @message;
    END;
    SET XACT_ABORT ON;
    IF @@TRANCOUNT = 0
        SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    SELECT @exists = 1, @host = host, @pid = pid, @session_id = session_id
    FROM {schema}.member WHERE member_id = @member AND login = ORIGINAL_LOGIN();
    -- (While the task runs, only cancel_asked_by can change. From here on a request to cancel comes too late.)
    SELECT @failures = failures, @maximum = max_attempts, @backoff_ms = backoff_ms, @on_failure = on_failure,
           @by = cancel_asked_by, @locks = lock_count
    FROM {schema}.task WITH (UPDLOCK, ROWLOCK)
    WHERE @exists = 1 AND task_id = @task AND attempt = @attempt AND member_id = @member AND status = N'running';
    IF @failures IS NOT NULL
    BEGIN
        IF @outcome = N'finished'
            SET @status = N'finished';
        ELSE IF @outcome = N'cancelled' OR @by IS NOT NULL
        BEGIN
            SET @status = N'cancelled';
            IF @by IS NOT NULL
                SET @error = CONCAT(N'cancelled by ', @by, NCHAR(10) + @error);
        END;
        ELSE IF @outcome = N'returned' OR @failures + 1 < @maximum
            SET @status = N'pending';
        ELSE
            SET @status = N'failed';
        SET @open = CASE WHEN @status = N'pending' OR (@status = N'failed' AND @on_failure = N'stop') THEN 1 ELSE 0 END;
        IF @outcome = N'failed' AND @status = N'pending'
        BEGIN
            -- The pause doubles with each failure, up to five minutes; half of it is random, so that tasks do not all
            -- run again at once.
            SET @pause = @backoff_ms * POWER(CAST(2 AS float), CASE WHEN @failures > 20 THEN 20 ELSE @failures END);
            SET @pause = CASE WHEN @pause > 300000 THEN 300000 ELSE @pause END * (0.5 + RAND() / 2);
        END;
        IF @locks IS NOT NULL
        BEGIN
            EXEC {schema}.end_task_rows @task, @member, N'released';
            BEGIN TRANSACTION;
        END;
        UPDATE {schema}.task WITH (ROWLOCK)
        SET status = @status, is_open = @open,
            failures = failures + CASE WHEN @outcome = N'failed' THEN 1 ELSE 0 END,
            ready_at = CASE WHEN @pause IS NULL THEN ready_at
                            ELSE DATEADD(millisecond, CAST(@pause AS int), SYSUTCDATETIME()) END,
            ended_at = CASE WHEN @status <> N'pending' THEN SYSUTCDATETIME() END,
            error = @error, result = @result, member_id = NULL, claim_uid = NULL
        OUTPUT inserted.task_id, inserted.attempt, @outcome, @member, inserted.owner, @host, @pid, @session_id,
               inserted.claimed_at, @error, @result, ORIGINAL_LOGIN()
        INTO {schema}.task_log (task_id, attempt, outcome, member_id, owner, host, pid, session_id, started_at, error,
                                result, login)
        WHERE task_id = @task AND attempt = @attempt AND member_id = @member AND status = N'running';
        SET @count = @@ROWCOUNT;
        IF @locks IS NOT NULL
        BEGIN
            IF @count > 0
                EXEC {schema}.block_task @task;
            COMMIT TRANSACTION;
        END;
        IF @count = 0
            SET @status = NULL;
    END;
    IF @status IS NULL
        -- Perhaps an earlier call of this member has ended the attempt.
        SELECT @status = t.status FROM {schema}.task_log AS l JOIN {schema}.task AS t ON t.task_id = l.task_id
        WHERE l.task_id = @task AND l.attempt = @attempt AND l.member_id = @member AND l.outcome = @outcome;
    IF @answer = 1
        SELECT @status AS status;
{end_try_own}

-- End one task and claim the next in one call, between two tasks of a worker. Return one row.
CREATE OR ALTER PROCEDURE {schema}.next_task
    @member bigint, @task bigint, @attempt int, @outcome nvarchar(16), @result nvarchar(max), @error nvarchar(max),
    @queue nvarchar(400), @owner nvarchar(255), @uid nvarchar(64), @again bit = 0 AS {begin_try_own}
    DECLARE @status nvarchar(16), @next bigint;
    EXEC {schema}.end_task @member, @task, @attempt, @outcome, @result, @error, @status OUTPUT;
    EXEC {schema}.take_task @member, @queue, @owner, @uid, @again, @next OUTPUT;
    SELECT @status AS ended, t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts
    FROM (SELECT 1 AS one) AS o LEFT JOIN {schema}.task AS t ON t.task_id = @next;
{end_try_own}

-- Claim a group of up to @maximum tasks, and return a row for each; otherwise like claim_task. A group is the first
-- tasks of kind call or sql, up to a million characters of bodies. It ends before a task of another kind, and before a
-- task that has lost a worker: such tasks are claimed alone.
CREATE OR ALTER PROCEDURE {schema}.claim_tasks
    @member bigint, @queue nvarchar(400), @owner nvarchar(255), @uid nvarchar(64), @again bit = 0, @maximum int = 1
AS {begin_try_own}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: claim_tasks must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @seen TABLE (task_id bigint NOT NULL PRIMARY KEY);
    DECLARE @chosen TABLE (task_id bigint NOT NULL PRIMARY KEY);
    DECLARE @taken TABLE (task_id bigint NOT NULL PRIMARY KEY);
    DECLARE @order int, @first bigint, @last bigint, @alone int, @count int = 0, @tries int = 0,
            @host nvarchar(255), @pid int, @turns bit;
    EXEC {schema}.touch_worker @member, @host OUTPUT, @pid OUTPUT;
    IF @again = 1
    BEGIN
        INSERT INTO @taken (task_id)
        SELECT task_id FROM {schema}.task WITH (INDEX (task_open))
        WHERE queue_name = @queue AND is_open = CAST(1 AS bit)
          AND status = N'running' AND member_id = @member AND claim_uid = @uid;
        SET @count = @@ROWCOUNT;
    END;
    BEGIN TRY
        -- (100 tries, as in take_task.)
        WHILE @count = 0 AND @tries < 100
        BEGIN
            SET @tries = @tries + 1;
            SET @order = NULL;
            SET @first = NULL;
            SELECT TOP (1) @order = task_order FROM {schema}.task WITH (INDEX (task_open))
            WHERE queue_name = @queue AND is_open = CAST(1 AS bit) ORDER BY task_order;
            IF @order IS NULL
                BREAK;
            BEGIN TRANSACTION;
            EXEC {schema}.pick_fair_task @queue, @order, @turns OUTPUT, @first OUTPUT;
            IF @turns = 0
                SELECT TOP (1) @first = task_id
                FROM {schema}.task WITH (INDEX (task_fair), UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)
                WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order
                  AND task_hash IS NULL AND ready_at <= SYSUTCDATETIME()
                ORDER BY task_priority DESC, task_id;
            SET @last = @first;
            SET @alone = 1;  -- (with fair queueing each claim takes one task)
            IF @maximum > 1 AND @turns = 0
                SELECT @alone = CASE WHEN losses > 0 OR kind NOT IN (N'call', N'sql') OR task_priority <> 0 THEN 1 ELSE 0 END
                FROM {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) WHERE task_id = @first;
            DELETE FROM @chosen;
            IF @alone = 1
                INSERT INTO @chosen (task_id) SELECT @first WHERE @first IS NOT NULL;
            ELSE
            BEGIN
                -- Find the end of the group without keeping locks: other sessions must be able to claim the tasks that
                -- this one does not claim.
                DELETE FROM @seen;
                INSERT INTO @seen (task_id)
                SELECT TOP (@maximum) task_id FROM {schema}.task WITH (INDEX (task_fair), ROWLOCK, READPAST, READCOMMITTEDLOCK)
                WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order
                  AND task_hash IS NULL AND task_priority = 0 AND task_id >= @first AND ready_at <= SYSUTCDATETIME()
                ORDER BY task_id;
                SELECT @last = MAX(w.task_id)
                FROM (SELECT n.task_id,
                             SUM(n.alone) OVER (ORDER BY n.task_id ROWS UNBOUNDED PRECEDING) AS barred,
                             SUM(n.size) OVER (ORDER BY n.task_id ROWS UNBOUNDED PRECEDING) - n.size AS before
                      FROM (SELECT t.task_id, DATALENGTH(t.body) / 2 AS size,
                                   CASE WHEN t.losses > 0 OR t.kind NOT IN (N'call', N'sql') THEN 1 ELSE 0 END AS alone
                            FROM @seen AS s
                            JOIN {schema}.task AS t WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) ON t.task_id = s.task_id) AS n) AS w
                WHERE w.barred = 0 AND w.before <= 1000000;
                INSERT INTO @chosen (task_id)
                SELECT task_id FROM {schema}.task WITH (INDEX (task_fair), UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)
                WHERE queue_name = @queue AND status = N'pending' AND lock_count IS NULL AND task_order = @order
                  AND task_hash IS NULL AND task_priority = 0 AND task_id >= @first AND task_id <= COALESCE(@last, @first)
                  AND ready_at <= SYSUTCDATETIME();
            END;
            UPDATE {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
            SET status = N'running', attempt = attempt + 1, member_id = @member, owner = @owner, claim_uid = @uid,
                claimed_at = SYSUTCDATETIME(), host = @host, pid = @pid, login = ORIGINAL_LOGIN()
            OUTPUT inserted.task_id INTO @taken (task_id)
            WHERE task_id IN (SELECT c.task_id FROM @chosen AS c) AND status = N'pending' AND ready_at <= SYSUTCDATETIME()
              AND (task_id = @first OR (losses = 0 AND kind IN (N'call', N'sql')));
            SET @count = @@ROWCOUNT;
            COMMIT TRANSACTION;
            IF @first IS NULL
                BREAK;
        END;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222)
            THROW;
        SET @count = 0;
    END CATCH;
    SELECT t.task_id, t.task_order, t.kind, t.body, t.note, t.attempt, t.failures, t.max_attempts
    FROM @taken AS k JOIN {schema}.task AS t ON t.task_id = k.task_id
    WHERE @count > 0 ORDER BY t.task_id;
{end_try_own}

-- Give back the tasks of a claim whose reply was lost for good; return their number.
CREATE OR ALTER PROCEDURE {schema}.return_claim @member bigint, @queue nvarchar(400), @uid nvarchar(64), @answer bit = 0
AS {begin_try_own}
    DECLARE @task bigint, @attempt int, @status nvarchar(16), @count int = 0;
    WHILE 1 = 1
    BEGIN
        SET @task = NULL;
        SELECT TOP (1) @task = task_id, @attempt = attempt FROM {schema}.task WITH (INDEX (task_open))
        WHERE queue_name = @queue AND is_open = CAST(1 AS bit)
          AND status = N'running' AND member_id = @member AND claim_uid = @uid;
        SET @status = NULL;
        IF @task IS NOT NULL
            EXEC {schema}.end_task @member, @task, @attempt, N'returned', NULL, NULL, @status OUTPUT;
        IF @status IS NULL
            BREAK;
        SET @count = @count + 1;
    END;
    IF @answer = 1
        SELECT @count AS returned;
    RETURN @count;
{end_try_own}

-- Test the members that run tasks of a queue (NULL: of all queues), and make the tasks of dead members pending again;
-- return the number of these tasks. A task fails when its worker died for the fifth time, as the task may be the cause.
CREATE OR ALTER PROCEDURE {schema}.recover_tasks @queue nvarchar(400) = NULL, @mine bigint = NULL, @answer bit = 0
AS {begin_try_own}
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @running TABLE (task_id bigint NOT NULL PRIMARY KEY, attempt int NOT NULL, member_id bigint NOT NULL);
    DECLARE @member bigint = -1, @before bigint, @task bigint = 0, @attempt int, @count int = 0, @found int, @rows int;
    SET @mine = COALESCE(@mine, 0);
    -- (READPAST: an open transaction must not delay this search. A row that it has locked is tested the next time.)
    IF @queue IS NULL
        INSERT INTO @running (task_id, attempt, member_id)
        SELECT task_id, attempt, member_id FROM {schema}.task WITH (INDEX (task_open), ROWLOCK, READPAST, READCOMMITTEDLOCK)
        WHERE is_open = CAST(1 AS bit) AND status = N'running' AND member_id <> @mine;
    ELSE
        INSERT INTO @running (task_id, attempt, member_id)
        SELECT task_id, attempt, member_id FROM {schema}.task WITH (INDEX (task_open), ROWLOCK, READPAST, READCOMMITTEDLOCK)
        WHERE queue_name = @queue AND is_open = CAST(1 AS bit) AND status = N'running' AND member_id <> @mine;
    SET @found = @@ROWCOUNT;
    WHILE @found > 0
    BEGIN
        SET @before = @member;
        SELECT TOP (1) @member = member_id FROM @running WHERE member_id > @before ORDER BY member_id;
        IF @member = @before
            BREAK;
        EXEC {schema}.check_liveness @member, @mine;
        -- (A removed member does not return, and its number is never used again. So this decision stays true.)
        IF EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @member)
            DELETE FROM @running WHERE member_id = @member;
    END;
    WHILE @found > 0
    BEGIN
        SET @found = 0;
        SELECT TOP (1) @found = 1, @task = task_id, @attempt = attempt, @member = member_id FROM @running
        WHERE task_id > @task ORDER BY task_id;
        IF @found = 0
            BREAK;
        -- (The UPDATE compares attempt and member: another session may have recovered the task meanwhile, and a third
        -- one may run it.)
        BEGIN TRANSACTION;
        UPDATE {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
        SET status = CASE WHEN cancel_asked_at IS NOT NULL THEN N'cancelled' WHEN losses < 4 THEN N'pending' ELSE N'failed' END,
            is_open = CASE WHEN cancel_asked_at IS NULL AND (losses < 4 OR on_failure = N'stop') THEN 1 ELSE 0 END,
            losses = losses + 1,
            ended_at = CASE WHEN cancel_asked_at IS NULL AND losses < 4 THEN NULL ELSE SYSUTCDATETIME() END,
            error = CASE WHEN cancel_asked_at IS NOT NULL
                         THEN CONCAT(N'cancelled by ', cancel_asked_by, NCHAR(10), N'its worker died')
                         WHEN losses < 4 THEN error ELSE N'its worker died five times' END,
            member_id = NULL, claim_uid = NULL
        OUTPUT inserted.task_id, inserted.attempt, N'lost', @member, inserted.owner, inserted.claimed_at,
               N'its worker died', inserted.host, inserted.pid, inserted.login
        INTO {schema}.task_log (task_id, attempt, outcome, member_id, owner, started_at, error, host, pid, login)
        WHERE task_id = @task AND attempt = @attempt AND member_id = @member AND status = N'running';
        SET @rows = @@ROWCOUNT;
        IF @rows > 0
            EXEC {schema}.block_task @task;
        COMMIT TRANSACTION;
        SET @count = @count + @rows;
    END;
    IF EXISTS (SELECT 1 FROM {schema}.task_lock WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) WHERE queue_name = @queue AND pending = 1)
        EXEC {schema}.check_lock_holders @queue;
    IF @answer = 1
        SELECT @count AS recovered;
    RETURN @count;
{end_try_own}

-- Return the state of a queue, in one row. pending, running: there are such tasks. next_pending: a task of the lowest
-- open order is pending (if not, all pending tasks wait for that order). failed, error: the first failed task that
-- blocks later orders.
CREATE OR ALTER PROCEDURE {schema}.queue_state @queue nvarchar(400) AS {begin_try}
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @pending bit = 0, @running bit = 0, @next_pending bit = 0, @failed bigint, @order int,
            @any bit = 0, @any_next bit = 0, @all bit;
    EXEC @all = {schema}.sees_all;
    SELECT TOP (1) @order = task_order FROM {schema}.task WITH (INDEX (task_open))
    WHERE queue_name = @queue AND is_open = CAST(1 AS bit) ORDER BY task_order;
    -- Look for both statuses in one statement: a task may change from one to the other between two statements, which
    -- would both miss it.
    SELECT TOP (1) @any_next = 1 FROM {schema}.task WITH (INDEX (task_open))
    WHERE queue_name = @queue AND is_open = CAST(1 AS bit) AND task_order = @order
      AND status IN (N'pending', N'running');
    SELECT TOP (1) @any = 1 FROM {schema}.task WITH (INDEX (task_open))
    WHERE queue_name = @queue AND is_open = CAST(1 AS bit) AND status IN (N'pending', N'running');
    IF @any = 1
    BEGIN
        SELECT TOP (1) @pending = 1 FROM {schema}.task WITH (INDEX (task_open))
        WHERE queue_name = @queue AND is_open = CAST(1 AS bit) AND status = N'pending';
        SELECT TOP (1) @running = 1 FROM {schema}.task WITH (INDEX (task_open))
        WHERE queue_name = @queue AND is_open = CAST(1 AS bit) AND status = N'running';
        SELECT TOP (1) @next_pending = 1 FROM {schema}.task WITH (INDEX (task_open))
        WHERE queue_name = @queue AND is_open = CAST(1 AS bit) AND task_order = @order AND status = N'pending';
        IF @pending = 0 OR (@any_next = 1 AND @next_pending = 0)
            SET @running = 1;
    END;
    SELECT TOP (1) @failed = task_id FROM {schema}.task WITH (INDEX (task_open))
    WHERE queue_name = @queue AND is_open = CAST(1 AS bit) AND status = N'failed' ORDER BY task_order, task_id;
    SELECT @pending AS pending, @running AS running, @next_pending AS next_pending, @failed AS failed,
           -- (A login that only puts tasks sees only errors of its own tasks.)
           (SELECT t.error FROM {schema}.task AS t WHERE t.task_id = @failed AND (@all = 1 OR t.put_by = ORIGINAL_LOGIN())) AS error;
{end_try}


-- Displays ----------------------------------------------------------------------------------------------------

-- Return 1 if the login may see the tasks of other logins.
CREATE OR ALTER PROCEDURE {schema}.sees_all AS {begin_inner}
    RETURN CASE WHEN IS_MEMBER(N'{schema}_worker') = 1 OR IS_MEMBER(N'{schema}_operator') = 1
                     OR IS_MEMBER(N'{schema}_reader') = 1 OR IS_MEMBER(N'db_owner') = 1
                     OR IS_SRVROLEMEMBER(N'sysadmin') = 1 THEN 1 ELSE 0 END;
END;

-- Return tasks: open ones first, in the order in which they will run (but for fair queueing), then ended ones, newest
-- first. status: as in the table, or 'lost' (the worker of a running task is dead, and the next test makes the task
-- pending again). A login that may only put sees its own tasks.
CREATE OR ALTER PROCEDURE {schema}.show_tasks @queue nvarchar(400) = NULL, @status nvarchar(16) = NULL, @maximum int = 100, @skip int = 0
AS {begin_try}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @shown TABLE (place int IDENTITY NOT NULL PRIMARY KEY, task_id bigint NOT NULL);
    DECLARE @page TABLE (
        place int IDENTITY NOT NULL PRIMARY KEY, task_id bigint NULL, queue_name nvarchar(255) NULL, task_order int NULL,
        kind nvarchar(8) NULL, body nvarchar(max) NULL, note nvarchar(1000) NULL, status nvarchar(16) NULL,
        on_failure nvarchar(8) NULL, attempt int NULL, failures int NULL, losses int NULL, max_attempts int NULL,
        put_at datetime2(6) NULL, ready_at datetime2(6) NULL, claimed_at datetime2(6) NULL, ended_at datetime2(6) NULL,
        seconds float NULL, member_id bigint NULL, owner nvarchar(255) NULL, host nvarchar(255) NULL, pid int NULL,
        error nvarchar(max) NULL, result nvarchar(max) NULL, put_by nvarchar(128) NULL, login nvarchar(128) NULL,
        time_limit float NULL, unique_key nvarchar(255) NULL, cancel_asked_at datetime2(6) NULL,
        cancel_asked_by nvarchar(128) NULL, task_key nvarchar(255) NULL, task_priority int NULL, lock_count int NULL);
    DECLARE @left bigint, @now datetime2(6) = SYSUTCDATETIME(), @start datetime2(6) = (SELECT grace_from FROM {schema}.origin()),
            @stored nvarchar(16) = CASE @status WHEN N'lost' THEN N'running' ELSE @status END, @all int;
    EXEC @all = {schema}.sees_all;
    SET @maximum = CASE WHEN @maximum < 0 THEN 0 ELSE COALESCE(@maximum, 2147483647) END;
    SET @skip = CASE WHEN @skip > 0 THEN @skip ELSE 0 END;
    -- Read indexes and rows in different statements: see "Locks" in the head of this file.
    IF @queue IS NULL
        INSERT INTO @shown (task_id)
        SELECT TOP (CAST(@skip AS bigint) + @maximum) task_id FROM {schema}.task WITH (INDEX (task_open))
        WHERE is_open = CAST(1 AS bit) AND (@stored IS NULL OR status = @stored)
        ORDER BY queue_name, task_order, task_priority DESC, task_id;
    ELSE
        INSERT INTO @shown (task_id)
        SELECT TOP (CAST(@skip AS bigint) + @maximum) task_id FROM {schema}.task WITH (INDEX (task_open))
        WHERE queue_name = @queue AND is_open = CAST(1 AS bit) AND (@stored IS NULL OR status = @stored)
        ORDER BY task_order, task_priority DESC, task_id;
    SELECT @left = CAST(@skip AS bigint) + @maximum - COUNT(*) FROM @shown;
    IF @left > 0
        INSERT INTO @shown (task_id)
        SELECT TOP (@left) task_id FROM {schema}.task WITH (INDEX (task_ended))
        WHERE is_open = CAST(0 AS bit) AND (@queue IS NULL OR queue_name = @queue)
          AND (@stored IS NULL OR status = @stored)
        ORDER BY ended_at DESC, task_id DESC;
    INSERT INTO @page (task_id, queue_name, task_order, kind, body, note, status, on_failure, attempt, failures, losses,
                       max_attempts, put_at, ready_at, claimed_at, ended_at, seconds, member_id, owner, host, pid, error,
                       result, put_by, login, time_limit, unique_key, cancel_asked_at, cancel_asked_by, task_key,
                       task_priority, lock_count)
    SELECT t.task_id, t.queue_name, t.task_order, t.kind,
           t.body, t.note, d.status, t.on_failure, t.attempt, t.failures, t.losses, t.max_attempts, t.put_at,
           CASE WHEN t.lock_count IS NOT NULL THEN t.enqueue_locks_at WHEN t.ready_at < t.put_at THEN t.put_at ELSE t.ready_at END AS ready_at, t.claimed_at, t.ended_at,
           DATEDIFF_BIG(microsecond, CASE WHEN t.status IN (N'finished', N'failed', N'running') THEN t.claimed_at END,
                        CASE WHEN t.status = N'running' THEN @now ELSE t.ended_at END) / CAST(1000000 AS float)
               AS seconds,
           t.member_id, t.owner, t.host, t.pid, t.error, t.result, t.put_by, t.login,
           t.time_limit_ms / CAST(1000 AS float) AS time_limit, t.unique_key, t.cancel_asked_at, t.cancel_asked_by,
           NULLIF(t.task_key, N'') AS task_key, t.task_priority, t.lock_count
    FROM @shown AS s JOIN {schema}.task AS t ON t.task_id = s.task_id
    LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
    CROSS APPLY (SELECT CASE WHEN t.status <> N'running' THEN t.status WHEN m.member_id IS NULL THEN N'lost'
                             WHEN m.lease_until IS NOT NULL THEN CASE WHEN m.lease_until < @now THEN N'lost' ELSE t.status END
                             WHEN DATEADD(millisecond, m.grace_ms, CASE WHEN @start > m.heartbeat_at THEN @start
                                                                        ELSE m.heartbeat_at END) > @now
                                  OR (@start IS NULL AND m.grace_ms > 0
                                      AND (m.missing_since IS NULL
                                           OR DATEADD(millisecond, m.grace_ms, m.missing_since) > @now)) THEN t.status
                             WHEN APPLOCK_MODE(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Session')
                                  <> N'NoLock' THEN t.status
                             WHEN APPLOCK_TEST(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Shared',
                                               N'Session') = 1 THEN N'lost'
                             ELSE t.status END AS status) AS d
    WHERE s.place > @skip AND (@status IS NULL OR d.status = @status) AND (@all = 1 OR t.put_by = ORIGINAL_LOGIN())
    ORDER BY s.place;
    SELECT p.task_id, p.queue_name, p.task_order, p.kind, p.body, p.note, p.status, p.on_failure, p.attempt, p.failures,
           p.losses, p.max_attempts, p.put_at, p.ready_at, p.claimed_at, p.ended_at, p.seconds, p.member_id, p.owner,
           p.host, p.pid, p.error, p.result, p.put_by, p.login, p.time_limit, p.unique_key, p.cancel_asked_at,
           p.cancel_asked_by, p.task_key, p.task_priority, p.lock_count
    FROM @page AS p ORDER BY p.place;
{end_try}

-- Return tasks: open ones first, in the order in which they will run (but for fair queueing), then ended ones, newest
-- first. status: as in the table, or lost (its worker is dead, and the task will become pending). A login that may only
-- put sees its own tasks.
--
-- The first page of show_tasks.
CREATE OR ALTER PROCEDURE {schema}.list_tasks @queue nvarchar(400) = NULL, @status nvarchar(16) = NULL, @maximum int = 100
AS {begin_try}
    EXEC {schema}.show_tasks @queue, @status, @maximum, 0;
{end_try}

-- Return the counts of each queue: tasks by status (lost: running tasks whose worker is dead); oldest: the seconds that
-- the oldest task that may run has waited; rate: tasks a minute that ended in the last five; blocked_by: the failed
-- task that blocks later orders. A login that may only put sees its own tasks. Reads all tasks that are kept.
CREATE OR ALTER PROCEDURE {schema}.queue_counts @queue nvarchar(400) = NULL AS {begin_try}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @now datetime2(6) = SYSUTCDATETIME(), @start datetime2(6) = (SELECT grace_from FROM {schema}.origin()), @all int;
    EXEC @all = {schema}.sees_all;
    DECLARE @running TABLE (task_id bigint NOT NULL PRIMARY KEY, member_id bigint NULL,
                            queue_name nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL);
    DECLARE @dead TABLE (member_id bigint NOT NULL PRIMARY KEY);
    INSERT INTO @running (task_id, member_id, queue_name)
    SELECT task_id, member_id, queue_name FROM {schema}.task WITH (INDEX (task_open), ROWLOCK, READPAST, READCOMMITTEDLOCK)
    WHERE is_open = CAST(1 AS bit) AND status = N'running' AND (@queue IS NULL OR queue_name = @queue);
    INSERT INTO @dead (member_id)
    SELECT DISTINCT r.member_id FROM @running AS r
    LEFT JOIN {schema}.member AS m ON m.member_id = r.member_id
    WHERE r.member_id IS NOT NULL
      AND CASE WHEN m.member_id IS NULL THEN 1
               WHEN m.lease_until IS NOT NULL THEN CASE WHEN m.lease_until < @now THEN 1 ELSE 0 END
               WHEN DATEADD(millisecond, m.grace_ms, CASE WHEN @start > m.heartbeat_at THEN @start ELSE m.heartbeat_at END) > @now
                    OR (@start IS NULL AND m.grace_ms > 0
                        AND (m.missing_since IS NULL
                             OR DATEADD(millisecond, m.grace_ms, m.missing_since) > @now)) THEN 0
               WHEN APPLOCK_MODE(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Session') <> N'NoLock' THEN 0
               WHEN APPLOCK_TEST(@principal, CONCAT(N'beacon.sqlsem.{schema}.', m.beacon), N'Shared', N'Session') = 1 THEN 1
               ELSE 0 END = 1;
    SELECT c.queue_name, c.pending, c.running, c.finished, c.failed, c.cancelled,
           (SELECT COUNT(*) FROM @running AS r JOIN @dead AS d ON d.member_id = r.member_id
            JOIN {schema}.task AS l WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) ON l.task_id = r.task_id
            WHERE r.queue_name = c.queue_name AND (@all = 1 OR l.put_by = ORIGINAL_LOGIN())) AS lost,
           CASE WHEN c.waited >= 0 THEN c.waited / CAST(1000000 AS float) END AS oldest,
           c.recent / CAST(5 AS float) AS rate,
           (SELECT TOP (1) b.task_id FROM {schema}.task AS b WITH (INDEX (task_open), ROWLOCK, READPAST, READCOMMITTEDLOCK)
            WHERE b.queue_name = c.queue_name AND b.is_open = CAST(1 AS bit) AND b.status = N'failed'
              AND b.task_order < c.last_order
            ORDER BY b.task_order, b.task_id) AS blocked_by
    FROM (SELECT t.queue_name, SUM(CASE WHEN t.status = N'pending' THEN 1 ELSE 0 END) AS pending,
                 SUM(CASE WHEN t.status = N'running' THEN 1 ELSE 0 END) AS running,
                 SUM(CASE WHEN t.status = N'finished' THEN 1 ELSE 0 END) AS finished,
                 SUM(CASE WHEN t.status = N'failed' THEN 1 ELSE 0 END) AS failed,
                 SUM(CASE WHEN t.status = N'cancelled' THEN 1 ELSE 0 END) AS cancelled,
                 MAX(COALESCE(CASE WHEN t.status = N'pending' AND t.ready_at <= @now
                          THEN DATEDIFF_BIG(microsecond, CASE WHEN t.ready_at < t.put_at THEN t.put_at ELSE t.ready_at END,
                                            @now) END, -1)) AS waited,
                 SUM(CASE WHEN t.ended_at > DATEADD(minute, -5, @now) THEN 1 ELSE 0 END) AS recent,
                 MAX(COALESCE(CASE WHEN t.status = N'pending' THEN t.task_order END, -2147483648)) AS last_order
          FROM {schema}.task AS t WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
          WHERE (@queue IS NULL OR t.queue_name = @queue) AND (@all = 1 OR t.put_by = ORIGINAL_LOGIN())
          GROUP BY t.queue_name) AS c
    ORDER BY c.queue_name;
{end_try}

-- Return every attempt at a task, including a running one.
CREATE OR ALTER PROCEDURE {schema}.task_attempts @task bigint AS {begin_try}
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @all int;
    EXEC @all = {schema}.sees_all;
    IF @all = 0 AND NOT EXISTS (SELECT 1 FROM {schema}.task WHERE task_id = @task AND put_by = ORIGINAL_LOGIN())
        SET @task = NULL;
    SELECT l.task_id, l.attempt, l.outcome, l.member_id, l.owner, l.host, l.pid, l.session_id, l.started_at, l.ended_at,
           DATEDIFF_BIG(microsecond, l.started_at, l.ended_at) / CAST(1000000 AS float) AS seconds, l.error, l.result, l.login
    FROM {schema}.task_log AS l WHERE l.task_id = @task
    UNION ALL
    SELECT t.task_id, t.attempt, N'running', t.member_id, t.owner, t.host, t.pid, m.session_id, t.claimed_at,
           CAST(NULL AS datetime2(6)),
           DATEDIFF_BIG(microsecond, t.claimed_at, SYSUTCDATETIME()) / CAST(1000000 AS float),
           CAST(NULL AS nvarchar(max)), CAST(NULL AS nvarchar(max)), t.login
    FROM {schema}.task AS t LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE t.task_id = @task AND t.status = N'running'
    ORDER BY 2;
{end_try}


-- Operators ------------------------------------------------------------------------------------------------------

-- Retry or cancel a task. 'retry': a failed or cancelled task becomes pending again, with all its attempts. 'cancel': a
-- pending or failed task is cancelled. A login that may only put may do so with its own tasks. Return:
--   0 done
--   1 nothing done, as it runs
--   -1 no such task
--   -2 its state does not allow that
--   -3 another task with its key is open
--
-- The worker of a running task is tested first: if it is dead, the task becomes pending, and a retry does nothing more.
CREATE OR ALTER PROCEDURE {schema}.set_task @task bigint, @what nvarchar(16), @answer bit = 0 AS {begin_try_own}
    DECLARE @code int, @count int = 0, @status nvarchar(16), @old nvarchar(16), @member bigint, @queue nvarchar(255),
            @key nvarchar(255);
    IF @what NOT IN (N'retry', N'cancel') OR @what IS NULL
        THROW 50000, N'sqlsem: a task can be told to retry or cancel', 1;
    SET XACT_ABORT ON;
    -- A login that is no operator may change only its own tasks.
    IF COALESCE(IS_MEMBER(N'{schema}_operator'), 0) = 0 AND COALESCE(IS_MEMBER(N'db_owner'), 0) = 0
       AND COALESCE(IS_SRVROLEMEMBER(N'sysadmin'), 0) = 0
       AND NOT EXISTS (SELECT 1 FROM {schema}.task WHERE task_id = @task AND put_by = ORIGINAL_LOGIN())
        SET @task = NULL;
    IF @@TRANCOUNT = 0
        SELECT @member = member_id, @queue = queue_name FROM {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
        WHERE task_id = @task AND status = N'running';
    IF @member IS NOT NULL
    BEGIN
        EXEC {schema}.check_liveness @member, -1;
        IF NOT EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @member)
            EXEC {schema}.recover_tasks @queue, -1;
        IF @what = N'retry'
            SELECT @count = 1 FROM {schema}.task WHERE task_id = @task AND status = N'pending';
    END;
    IF @count = 0
    BEGIN
        SELECT @queue = queue_name, @key = unique_key, @old = status FROM {schema}.task WHERE task_id = @task;
        BEGIN TRANSACTION;
        IF @what = N'retry'
            UPDATE {schema}.task WITH (ROWLOCK)
            SET status = N'pending', is_open = 1, failures = 0, losses = 0, ready_at = N'19000101', ended_at = NULL,
                cancel_asked_at = NULL, cancel_asked_by = NULL
            WHERE task_id = @task AND status IN (N'failed', N'cancelled')
              AND NOT EXISTS (SELECT 1 FROM {schema}.task AS o
                              WHERE o.unique_key = @key AND o.queue_name = @queue
                                AND o.is_open = CAST(1 AS bit) AND o.task_id <> @task);
        ELSE
            UPDATE {schema}.task WITH (ROWLOCK)
            SET status = N'cancelled', is_open = 0, ended_at = SYSUTCDATETIME(), cancel_asked_at = SYSUTCDATETIME(),
                cancel_asked_by = ORIGINAL_LOGIN()
            WHERE task_id = @task AND status IN (N'pending', N'failed');
        SET @count = @@ROWCOUNT;
        IF @count > 0
            INSERT INTO {schema}.operation (host, pid, program, action, queue_name, task_id, old_value)
            SELECT LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), @what, t.queue_name, t.task_id, @old
            FROM {schema}.task AS t WHERE t.task_id = @task;
        IF @count > 0 AND @what = N'retry'
            EXEC {schema}.block_task @task;
        COMMIT TRANSACTION;
        IF @count > 0 AND @what = N'cancel' AND EXISTS (SELECT 1 FROM {schema}.task_lock WHERE task_id = @task)
            EXEC {schema}.leave_lock_queues @task;
    END;
    SELECT @status = status FROM {schema}.task WHERE task_id = @task;
    SET @code = CASE WHEN @count > 0 THEN 0 WHEN @status IS NULL THEN -1 WHEN @status = N'running' THEN 1
                     WHEN @what = N'retry' AND @status IN (N'failed', N'cancelled') THEN -3 ELSE -2 END;
    IF @answer = 1
        SELECT @code AS code;
    RETURN @code;
{end_try_own}

-- Cancel a task. A login that may only put may do so with its own tasks. Return:
--   0 it was pending or had failed, and is cancelled
--   1 it runs, and is cancelled as soon as its worker has learned of that and ended it
--   -1 no such task
--   -2 its state does not allow that
-- A session that runs the task by `work` cannot poll for a cancellation: the task is cancelled when its SQL has ended,
-- or KILL has ended it.
CREATE OR ALTER PROCEDURE {schema}.cancel_task @task bigint, @answer bit = 0 AS {begin_try_own}
    DECLARE @code int = 1, @count int = 0, @tries int = 0;
    WHILE @code = 1 AND @count = 0 AND @tries < 100
    BEGIN
        SET @tries = @tries + 1;
        EXEC @code = {schema}.set_task @task, N'cancel';
        IF @code = 1
        BEGIN
            UPDATE {schema}.task WITH (ROWLOCK)
            SET cancel_asked_at = COALESCE(cancel_asked_at, SYSUTCDATETIME()),
                cancel_asked_by = COALESCE(cancel_asked_by, ORIGINAL_LOGIN())
            WHERE task_id = @task AND status = N'running';
            SET @count = @@ROWCOUNT;  -- 0: the task has ended meanwhile
        END;
    END;
    IF @count > 0
        INSERT INTO {schema}.operation (host, pid, program, action, queue_name, task_id, old_value)
        SELECT LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), N'cancel', t.queue_name, t.task_id, N'running'
        FROM {schema}.task AS t WHERE t.task_id = @task;
    IF @answer = 1
        SELECT @code AS code;
    RETURN @code;
{end_try_own}

-- Return (task, time limit in s, login that requested its cancellation) for each running task of a member that has a
-- limit or such a request. @tasks: a JSON array of task numbers.
CREATE OR ALTER PROCEDURE {schema}.task_controls @member bigint, @tasks nvarchar(max) AS {begin_try}
    DECLARE @requested TABLE (task_id bigint NOT NULL PRIMARY KEY);
    INSERT INTO @requested (task_id) SELECT DISTINCT CAST(j.value AS bigint) FROM OPENJSON(@tasks) AS j;
    SELECT t.task_id, t.time_limit_ms / CAST(1000 AS float) AS time_limit, t.cancel_asked_by
    FROM @requested AS a JOIN {schema}.task AS t WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) ON t.task_id = a.task_id
    WHERE t.member_id = @member AND t.status = N'running'
      AND (t.time_limit_ms IS NOT NULL OR t.cancel_asked_at IS NOT NULL)
      AND EXISTS (SELECT 1 FROM {schema}.member AS m WHERE m.member_id = @member AND m.login = ORIGINAL_LOGIN());
{end_try}

-- Set a limit, rate or weight of a queue. N'limit': how many tasks may run at a time, of the queue (@key NULL) or of
-- one key; N'key_limit': of each key. N'rate': how many tasks may start in @per_ms milliseconds, of the queue or of one
-- key; N'key_rate': of each key. N'weight': the share of a key. @value NULL: remove the setting. Running tasks run on.
CREATE OR ALTER PROCEDURE {schema}.set_queue @queue nvarchar(400), @key nvarchar(400), @what nvarchar(20), @value int, @per_ms int = NULL
AS {begin_try_own}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @code int, @before nvarchar(100), @after nvarchar(100) = CONCAT(@value, N' in ' + CONVERT(nvarchar(20), @per_ms) + N' ms'),
            @name nvarchar(255) = N'set_resource.sqlsem.{schema}', @message nvarchar(1000),
            @minimum int = CASE WHEN @what IN (N'limit', N'key_limit') THEN 0 ELSE 1 END,
            @is_rate int = CASE WHEN @what IN (N'rate', N'key_rate') THEN 1 ELSE 0 END;
    EXEC {schema}.check_name N'queue', @queue;
    IF @key IS NOT NULL
        EXEC {schema}.check_name N'key', @key;
    IF @what IS NULL OR NOT (@what IN (N'limit', N'rate') OR (@key IS NULL AND @what IN (N'key_limit', N'key_rate'))
                             OR (@key IS NOT NULL AND @what = N'weight'))
        THROW 50000, N'sqlsem: of a queue limit, key_limit, rate and key_rate can be set, and of a key limit, rate and weight', 1;
    IF @value < @minimum
        SET @message = CONCAT(N'sqlsem: a ', @what, N' must be ', @minimum, N' or more, not ', @value);
    ELSE IF @per_ms < 1 OR CASE WHEN @per_ms IS NULL THEN 0 ELSE 1 END <> CASE WHEN @is_rate = 1 AND @value IS NOT NULL THEN 1 ELSE 0 END
        SET @message = CONCAT(N'sqlsem: a rate needs its window, per_ms, from 1 to 2147483647, and nothing else has one; not ',
            COALESCE(CONVERT(nvarchar(20), @per_ms), N'NULL'));
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;
    BEGIN TRANSACTION;
    EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
        @LockTimeout = 10000, @DbPrincipal = @principal;
    IF @code < 0
    BEGIN
        ROLLBACK TRANSACTION;
        THROW 50002, N'sqlsem: busy: another session sets a resource or a queue in an open transaction', 1;
    END;
    -- (The INSERT waits for the claims that saw no limit; later claims wait for this transaction.)
    INSERT INTO {schema}.queue_setting (queue_name)
    SELECT @queue WHERE NOT EXISTS (SELECT 1 FROM {schema}.queue_setting WHERE queue_name = @queue);
    UPDATE {schema}.queue_setting WITH (ROWLOCK) SET claims = claims + 1 WHERE queue_name = @queue;
    IF @key IS NULL
    BEGIN
        SELECT @before = CASE @what WHEN N'limit' THEN CONVERT(nvarchar(20), task_limit)
                                    WHEN N'key_limit' THEN CONVERT(nvarchar(20), key_limit)
                                    WHEN N'rate' THEN CONCAT(task_rate, N' in ' + CONVERT(nvarchar(20), task_ms) + N' ms')
                                    ELSE CONCAT(key_rate, N' in ' + CONVERT(nvarchar(20), key_ms) + N' ms') END
        FROM {schema}.queue_setting WHERE queue_name = @queue;
        UPDATE {schema}.queue_setting
        SET task_limit = CASE @what WHEN N'limit' THEN @value ELSE task_limit END,
            key_limit = CASE @what WHEN N'key_limit' THEN @value ELSE key_limit END,
            task_rate = CASE @what WHEN N'rate' THEN @value ELSE task_rate END,
            task_ms = CASE @what WHEN N'rate' THEN @per_ms ELSE task_ms END,
            key_rate = CASE @what WHEN N'key_rate' THEN @value ELSE key_rate END,
            key_ms = CASE @what WHEN N'key_rate' THEN @per_ms ELSE key_ms END,
            set_at = SYSUTCDATETIME(), set_by = ORIGINAL_LOGIN()
        WHERE queue_name = @queue;
    END;
    ELSE
    BEGIN
        INSERT INTO {schema}.queue_key (queue_name, task_key)
        SELECT @queue, @key
        WHERE NOT EXISTS (SELECT 1 FROM {schema}.queue_key WHERE queue_name = @queue AND task_key = @key);
        SELECT @before = CASE @what WHEN N'limit' THEN CONVERT(nvarchar(20), task_limit)
                                    WHEN N'weight' THEN CONVERT(nvarchar(20), weight)
                                    ELSE CONCAT(task_rate, N' in ' + CONVERT(nvarchar(20), task_ms) + N' ms') END
        FROM {schema}.queue_key WHERE queue_name = @queue AND task_key = @key;
        UPDATE {schema}.queue_key
        SET task_limit = CASE @what WHEN N'limit' THEN @value ELSE task_limit END,
            weight = CASE @what WHEN N'weight' THEN @value ELSE weight END,
            task_rate = CASE @what WHEN N'rate' THEN @value ELSE task_rate END,
            task_ms = CASE @what WHEN N'rate' THEN @per_ms ELSE task_ms END,
            set_at = SYSUTCDATETIME(), set_by = ORIGINAL_LOGIN()
        WHERE queue_name = @queue AND task_key = @key;
        DELETE FROM {schema}.queue_key
        WHERE queue_name = @queue AND task_key = @key AND task_limit IS NULL AND weight IS NULL AND task_rate IS NULL;
    END;
    DELETE FROM {schema}.queue_setting
    WHERE queue_name = @queue AND task_limit IS NULL AND key_limit IS NULL AND task_rate IS NULL AND key_rate IS NULL
      AND NOT EXISTS (SELECT 1 FROM {schema}.queue_key WHERE queue_name = @queue);
    IF @is_rate = 1
        DELETE FROM {schema}.queue_wait WHERE queue_name = @queue;  -- the new rate may have room
    IF COALESCE(@before, N'') <> @after
        INSERT INTO {schema}.operation (host, program, action, queue_name, old_value, new_value)
        VALUES (LEFT(HOST_NAME(), 255), LEFT(APP_NAME(), 255), @what, @queue, CONCAT(@key + N': ', @before),
                CONCAT(@key + N': ', @after));
    COMMIT TRANSACTION;
{end_try_own}

-- Return the settings of one queue or all: a row for the queue (task_key NULL), and one for each key with settings.
-- task_per, key_per: the windows of the rates, in seconds.
CREATE OR ALTER PROCEDURE {schema}.queue_limits @queue nvarchar(400) = NULL AS {begin_try}
    SELECT s.queue_name, CAST(NULL AS nvarchar(255)) AS task_key, s.task_limit, s.key_limit, CAST(NULL AS int) AS weight,
           s.set_at, s.set_by, s.task_rate, s.task_ms / 1000e0 AS task_per, s.key_rate, s.key_ms / 1000e0 AS key_per
    FROM {schema}.queue_setting AS s WITH (NOLOCK) WHERE @queue IS NULL OR s.queue_name = @queue
    UNION ALL
    SELECT k.queue_name, k.task_key, k.task_limit, CAST(NULL AS int), k.weight, k.set_at, k.set_by, k.task_rate, k.task_ms / 1000e0,
           CAST(NULL AS int), CAST(NULL AS float)
    FROM {schema}.queue_key AS k WHERE @queue IS NULL OR k.queue_name = @queue
    ORDER BY 1, 2;
{end_try}

-- Return the rates that claims have found used up, of one queue or all, and the seconds until there is room again.
-- task_key NULL: the queue's own rate.
CREATE OR ALTER PROCEDURE {schema}.queue_waits @queue nvarchar(400) = NULL AS {begin_try}
    DECLARE @now bigint = {schema}.clock_us() / 1000;
    SELECT w.queue_name, CASE WHEN w.task_key <> N'' THEN w.task_key END AS task_key, (w.free_ms - @now) / 1000e0 AS seconds
    FROM {schema}.queue_wait AS w WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
    WHERE (@queue IS NULL OR w.queue_name = @queue) AND @now >= w.since_ms AND @now < w.free_ms
    ORDER BY 1, 2;
{end_try}

-- Delete ended tasks older than setting history_days, with their log, at most @maximum a call; return their number.
CREATE OR ALTER PROCEDURE {schema}.prune_tasks @maximum int, @answer bit = 0 AS {begin_try_own}
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @old TABLE (task_id bigint NOT NULL PRIMARY KEY);
    DECLARE @gone TABLE (task_id bigint NOT NULL PRIMARY KEY);
    DECLARE @days int, @before datetime2(6), @count int;
    SET @maximum = CASE WHEN @maximum > 0 THEN @maximum ELSE 0 END;
    SELECT @days = CAST(value AS int) FROM {schema}.setting WHERE name = N'history_days';
    SET @before = DATEADD(day, -@days, SYSUTCDATETIME());
    INSERT INTO @old (task_id)
    SELECT TOP (@maximum) task_id FROM {schema}.task WITH (INDEX (task_ended))
    WHERE is_open = CAST(0 AS bit) AND ended_at < @before ORDER BY ended_at;
    BEGIN TRANSACTION;
    DELETE FROM {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
    OUTPUT deleted.task_id INTO @gone (task_id)
    -- (The conditions are tested again, as a task may have been retried since.)
    WHERE task_id IN (SELECT o.task_id FROM @old AS o)
      AND is_open = CAST(0 AS bit) AND ended_at < @before;
    SET @count = @@ROWCOUNT;
    DELETE FROM {schema}.task_log WHERE task_id IN (SELECT g.task_id FROM @gone AS g);
    DELETE FROM {schema}.task_lock WHERE task_id IN (SELECT g.task_id FROM @gone AS g);
    COMMIT TRANSACTION;
    -- Notes about keys that are no longer used.
    DELETE TOP (@maximum) FROM {schema}.queue_wait WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
    WHERE free_ms < {schema}.clock_us() / 1000 - 86400000;
    IF @answer = 1
        SELECT @count AS pruned;
    RETURN @count;
{end_try_own}


-- Schedules --------------------------------------------------------------------------------------------------------

-- Tasks that are put at the times of a cron expression: see PostgreSQL's tasks.sql.

-- Raise for invalid options of a schedule's tasks. (Otherwise put_task_by would find them only when a task is put.)
CREATE OR ALTER PROCEDURE {schema}.check_task_options @options nvarchar(max) AS {begin}
    DECLARE @message nvarchar(1000), @key nvarchar(400), @unique nvarchar(400), @replace nvarchar(400), @is_json int = ISJSON(@options);
    IF COALESCE(@is_json, 0) = 0 OR LEFT(LTRIM(@options), 1) <> N'{'
        THROW 50000, N'sqlsem: the options of a schedule are a JSON object, such as {}', 1;
    SELECT @key = o.a_key, @unique = o.a_unique, @replace = o.a_replace,
           @message = CASE
               WHEN NOT COALESCE(TRY_CAST(o.an_after AS float), 0) BETWEEN 0 AND 315360000000
                   THEN CONCAT(N'a task can wait from now to ten years from now, not ', LEFT(o.an_after, 40), N' ms')
               WHEN NOT COALESCE(TRY_CAST(o.a_backoff AS float), 0) BETWEEN 0 AND 300000
                   THEN CONCAT(N'the pause before the next attempt at a task is from 0 to 300000 ms, not ', LEFT(o.a_backoff, 40))
               WHEN NOT COALESCE(TRY_CAST(o.a_limit AS float), 1) BETWEEN 1 AND 2147483647
                   THEN CONCAT(N'the time limit of a task must be from 1 to 2147483647 ms, not ', LEFT(o.a_limit, 40))
               WHEN NOT COALESCE(TRY_CAST(o.attempts AS float), 1) BETWEEN 1 AND 2147483647
                   THEN CONCAT(N'max_attempts of a task must be from 1 to 2147483647, not ', LEFT(o.attempts, 40))
               WHEN NOT COALESCE(TRY_CAST(o.a_priority AS float), 0) BETWEEN -2147483648 AND 2147483647
                   THEN CONCAT(N'the priority of a task must be from -2147483648 to 2147483647, not ', LEFT(o.a_priority, 40))
               WHEN NOT COALESCE(TRY_CAST(o.an_order AS float), 0) BETWEEN -2147483648 AND 2147483647
                   THEN CONCAT(N'the order of a task must be from -2147483648 to 2147483647, not ', LEFT(o.an_order, 40))
               WHEN o.a_unique IS NOT NULL AND o.a_replace IS NOT NULL
                   THEN N'a task that is unique, or replaces another one, is put alone, and has one key: unique or replace'
               WHEN (o.an_after IS NOT NULL AND TRY_CAST(o.an_after AS bigint) IS NULL)
                    OR (o.a_backoff IS NOT NULL AND TRY_CAST(o.a_backoff AS bigint) IS NULL)
                    OR (o.a_limit IS NOT NULL AND TRY_CAST(o.a_limit AS bigint) IS NULL)
                    OR (o.attempts IS NOT NULL AND TRY_CAST(o.attempts AS bigint) IS NULL)
                    OR (o.a_priority IS NOT NULL AND TRY_CAST(o.a_priority AS bigint) IS NULL)
                    OR (o.an_order IS NOT NULL AND TRY_CAST(o.an_order AS bigint) IS NULL)
                    OR CONCAT(o.a_failure, N'|') COLLATE Latin1_General_100_BIN2 NOT IN (N'|', N'stop|', N'continue|')
                    OR LEN(CONCAT(o.a_note, N'|')) > 1001
                   THEN N'options of a task: numbers are whole, on_failure is stop or continue, and a note has at most 1000 characters'
           END
    FROM OPENJSON(@options) WITH (
        an_order nvarchar(max) '$.order', an_after nvarchar(max) '$.after_ms', attempts nvarchar(max) '$.max_attempts',
        a_backoff nvarchar(max) '$.backoff_ms', a_failure nvarchar(max) '$.on_failure', a_note nvarchar(max) '$.note',
        a_limit nvarchar(max) '$.time_limit_ms', a_unique nvarchar(max) '$.unique', a_replace nvarchar(max) '$.replace',
        a_key nvarchar(max) '$.key', a_priority nvarchar(max) '$.priority') AS o;
    IF @key IS NOT NULL
        EXEC {schema}.check_name N'key', @key;
    IF @unique IS NOT NULL
        EXEC {schema}.check_name N'key', @unique;
    IF @replace IS NOT NULL
        EXEC {schema}.check_name N'key', @replace;
    IF @message IS NOT NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: ', @message);
        EXEC {schema}.raise_error 50000, @message;
    END;
END;

-- Raise for a next time that not all clients' calendars have.
CREATE OR ALTER PROCEDURE {schema}.check_due @next datetime2(6) AS {begin}
    IF @next IS NULL OR @next < CAST(N'00010103' AS datetime2(6)) OR @next > CAST(N'99991230' AS datetime2(6))
        THROW 50000, N'sqlsem: the next time of a schedule must be from 0001-01-03 to 9999-12-30', 1;
END;

-- Save a schedule, in place of one of the same name. @options: a JSON object with options of put_task (order, after_ms,
-- max_attempts, backoff_ms, on_failure, note, time_limit_ms, unique, replace, key, priority, locks), and `missed`.
-- @next: its first time. @time_zone: a name of the IANA database; the server does not know these names, so only the
-- form is checked.
CREATE OR ALTER PROCEDURE {schema}.save_schedule
    @schedule nvarchar(400), @queue nvarchar(400), @cron nvarchar(400), @time_zone nvarchar(400), @kind nvarchar(100),
    @body nvarchar(max), @options nvarchar(max), @next datetime2(6) AS {begin_try_own}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @message nvarchar(1000), @code int, @by nvarchar(128), @count int, @locks nvarchar(max);
    EXEC {schema}.check_name N'queue', @queue;
    EXEC {schema}.check_name N'schedule', @schedule;
    EXEC {schema}.check_due @next;
    SET @message = CASE
        WHEN LEN(CONCAT(@cron, N'|')) > 256 OR COALESCE(@cron, N'') NOT LIKE N'%[^ ]%'
            THEN N'sqlsem: a cron expression has 1 to 255 characters'
        WHEN LEN(CONCAT(@time_zone, N'|')) > 65 OR COALESCE(@time_zone, N'') NOT LIKE N'%[A-Za-z]%'
             OR @time_zone COLLATE Latin1_General_100_BIN2 LIKE N'%[^-A-Za-z0-9_+/]%'
            THEN N'sqlsem: that is no time zone; write UTC or Europe/Berlin' END;
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;
    EXEC {schema}.check_work @kind OUTPUT, @body;
    EXEC {schema}.check_task_options @options;
    SET @locks = JSON_QUERY(@options, N'$.locks');
    IF @locks IS NOT NULL
    BEGIN
        EXEC {schema}.check_may_lock;
        EXEC {schema}.check_locks @locks;
    END;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: save_schedule must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    BEGIN TRY
        BEGIN TRANSACTION;
        -- One session at a time saves a schedule: so earlier ones are committed, and visible.
        EXEC @code = sys.sp_getapplock @Resource = N'schedules.sqlsem.{schema}', @LockMode = N'Exclusive',
            @LockOwner = N'Transaction', @LockTimeout = 10000, @DbPrincipal = @principal;
        IF @code < 0
            THROW 50002, N'sqlsem: busy: schedules are being saved by another transaction; try again', 1;
        UPDATE {schema}.schedule
        SET queue_name = @queue, cron = @cron, time_zone = @time_zone, kind = @kind, body = @body, options = @options,
            -- (A due time that no client has noticed yet is not lost if the same schedule is saved again.)
            next_due = CASE WHEN cron = @cron AND time_zone = @time_zone AND paused_at IS NULL THEN COALESCE(next_due, @next)
                            ELSE @next END
        WHERE schedule_name = @schedule
          AND (put_by = ORIGINAL_LOGIN() OR IS_MEMBER(N'{schema}_operator') = 1 OR IS_MEMBER(N'db_owner') = 1
               OR IS_SRVROLEMEMBER(N'sysadmin') = 1);
        SET @count = @@ROWCOUNT;
        IF @count = 0
            SELECT @by = put_by FROM {schema}.schedule WHERE schedule_name = @schedule;
        IF @by IS NOT NULL
        BEGIN
            SET @message = CONCAT(N'sqlsem: schedule ', @schedule, N' is of login ', @by, N'; choose another name');
            EXEC {schema}.raise_error 50006, @message;
        END;
        IF @count = 0
            INSERT INTO {schema}.schedule (schedule_name, queue_name, cron, time_zone, kind, body, options, next_due)
            VALUES (@schedule, @queue, @cron, @time_zone, @kind, @body, @options, @next);
        COMMIT TRANSACTION;
    {end_try_rollback}
{end_try_own}

-- Do recover_tasks. Return one row: its number, and due = 1 if a schedule of the queue is due.
CREATE OR ALTER PROCEDURE {schema}.maintain_queue @queue nvarchar(400), @mine bigint = NULL AS {begin_try_own}
    DECLARE @recovered int, @due bit = 0;
    EXEC @recovered = {schema}.recover_tasks @queue, @mine;
    -- (READPAST: a schedule that another session writes, as in fire_schedule, is tested the next time.)
    SELECT TOP (1) @due = 1 FROM {schema}.schedule WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
    WHERE queue_name = @queue AND paused_at IS NULL AND next_due <= SYSUTCDATETIME();
    SELECT @recovered AS recovered, @due AS due;
{end_try_own}

-- Put the task of a schedule for the due time @due, and store the next time @next, in one transaction. @last: the
-- latest of the due times, if this one task is put for several. @put = 0: skip that time, as the schedule says for
-- missed times. Return one row: done (0 if another session was faster, or @next has passed), and the task's number. A
-- skipped time is recorded as an operation, and so is a next time more than a year away.
CREATE OR ALTER PROCEDURE {schema}.fire_schedule
    @schedule nvarchar(400), @due datetime2(6), @last datetime2(6), @next datetime2(6), @put bit AS {begin}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: fire_schedule must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @done int = 0, @task_id bigint, @put_by nvarchar(128), @queue nvarchar(255), @kind nvarchar(8),
            @body nvarchar(max), @options nvarchar(max), @order int, @after_ms bigint, @max_attempts int,
            @backoff_ms bigint, @on_failure nvarchar(100), @note nvarchar(1000), @time_limit_ms bigint,
            @unique_key nvarchar(400), @replace_key nvarchar(400), @task_key nvarchar(400), @priority int, @locks nvarchar(max),
            @now datetime2(6) = SYSUTCDATETIME();
    EXEC {schema}.check_due @next;
    SET @last = CASE WHEN @last > @now THEN @now WHEN @last >= @due THEN @last ELSE @due END;
    BEGIN TRY
        BEGIN TRANSACTION;
        -- (Other sessions wait for the lock on this row, and then find the next time in it.)
        UPDATE {schema}.schedule WITH (ROWLOCK)
        SET next_due = @next, last_due = CASE WHEN @put = 1 THEN @last ELSE last_due END
        WHERE schedule_name = @schedule AND next_due = @due AND paused_at IS NULL AND next_due <= SYSUTCDATETIME()
          AND @next > SYSUTCDATETIME() AND (@put = 1 OR JSON_VALUE(options, N'$.missed') = N'skip');
        SET @done = @@ROWCOUNT;
        IF @done = 1 AND (COALESCE(@put, 0) = 0 OR @next > DATEADD(day, 366, @now))
            INSERT INTO {schema}.operation (host, pid, program, action, queue_name, old_value, new_value)
            SELECT LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255),
                   CASE WHEN @put = 1 THEN N'postpone' ELSE N'skip' END, queue_name, CONCAT(N'schedule ', @schedule),
                   CONCAT(N'next ', CONVERT(nvarchar(40), @next, 126))
            FROM {schema}.schedule WHERE schedule_name = @schedule;
        IF @done = 1 AND @put = 1
        BEGIN
            SELECT @put_by = put_by, @queue = queue_name, @kind = kind, @body = body, @options = options
            FROM {schema}.schedule WHERE schedule_name = @schedule;
            SET @locks = JSON_QUERY(@options, N'$.locks');
            SELECT @order = COALESCE(o.an_order, 0), @after_ms = COALESCE(o.an_after, 0),
                   @max_attempts = COALESCE(o.attempts, 1), @backoff_ms = COALESCE(o.a_backoff, 1000),
                   @on_failure = COALESCE(o.a_failure, N'stop'), @note = o.a_note, @time_limit_ms = o.a_limit,
                   @unique_key = o.a_unique, @replace_key = o.a_replace, @task_key = o.a_key,
                   @priority = COALESCE(o.a_priority, 0)
            FROM OPENJSON(@options) WITH (
                an_order int '$.order', an_after bigint '$.after_ms', attempts int '$.max_attempts',
                a_backoff bigint '$.backoff_ms', a_failure nvarchar(100) '$.on_failure', a_note nvarchar(1000) '$.note',
                a_limit bigint '$.time_limit_ms', a_unique nvarchar(400) '$.unique', a_replace nvarchar(400) '$.replace',
                a_key nvarchar(400) '$.key', a_priority int '$.priority') AS o;
            EXEC {schema}.put_task_by @put_by, @queue, NULL, @kind, @body, @order, @after_ms, @max_attempts, @backoff_ms,
                @on_failure, @note, @unique_key, @replace_key, @time_limit_ms, @task_key, @priority, @task_id OUTPUT, @locks;
        END;
        COMMIT TRANSACTION;
    {end_try_rollback}
    SELECT @done AS done, @task_id AS task_id;
END;

-- Change a schedule: 'pause', 'resume' (from @next on: times that were due meanwhile are skipped) or 'remove'. Return
-- 0, or -1 if there is none, or it is another login's and this login is no operator.
CREATE OR ALTER PROCEDURE {schema}.set_schedule
    @schedule nvarchar(400), @what nvarchar(16), @next datetime2(6) = NULL, @answer bit = 0 AS {begin_try_own}
    IF @what NOT IN (N'pause', N'resume', N'remove') OR @what IS NULL
        THROW 50000, N'sqlsem: a schedule can be told to pause, resume or remove', 1;
    IF @what = N'resume'
        EXEC {schema}.check_due @next;
    SET XACT_ABORT ON;
    DECLARE @queue nvarchar(255), @code int = -1;
    BEGIN TRANSACTION;
    SELECT @queue = queue_name FROM {schema}.schedule WITH (UPDLOCK, ROWLOCK)
    WHERE schedule_name = @schedule
      AND (put_by = ORIGINAL_LOGIN() OR IS_MEMBER(N'{schema}_operator') = 1 OR IS_MEMBER(N'db_owner') = 1
           OR IS_SRVROLEMEMBER(N'sysadmin') = 1);
    IF @queue IS NOT NULL
    BEGIN
        SET @code = 0;
        IF @what = N'remove'
            DELETE FROM {schema}.schedule WHERE schedule_name = @schedule;
        ELSE IF @what = N'pause'
            UPDATE {schema}.schedule
            SET paused_at = COALESCE(paused_at, SYSUTCDATETIME()), paused_by = COALESCE(paused_by, ORIGINAL_LOGIN())
            WHERE schedule_name = @schedule;
        ELSE
            UPDATE {schema}.schedule
            SET next_due = CASE WHEN paused_at IS NULL THEN next_due ELSE @next END, paused_at = NULL, paused_by = NULL
            WHERE schedule_name = @schedule;
        INSERT INTO {schema}.operation (host, pid, program, action, queue_name, old_value)
        VALUES (LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), @what, @queue,
                CONCAT(N'schedule ', @schedule));
    END;
    COMMIT TRANSACTION;
    IF @answer = 1
        SELECT @code AS code;
    RETURN @code;
{end_try_own}

-- Return the schedules, by name. A login that may only put sees its own.
CREATE OR ALTER PROCEDURE {schema}.list_schedules @schedule nvarchar(400) = NULL, @queue nvarchar(400) = NULL AS {begin_try}
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @all int;
    EXEC @all = {schema}.sees_all;
    SELECT s.schedule_name, s.queue_name, s.cron, s.time_zone, s.kind, s.body, s.options,
           CASE WHEN s.next_due < CAST(N'00010103' AS datetime2(6)) THEN CAST(N'00010103' AS datetime2(6))
                WHEN s.next_due > CAST(N'99991230' AS datetime2(6)) THEN CAST(N'99991230' AS datetime2(6)) ELSE s.next_due END AS next_due,
           CASE WHEN s.last_due < CAST(N'00010103' AS datetime2(6)) THEN CAST(N'00010103' AS datetime2(6))
                WHEN s.last_due > CAST(N'99991230' AS datetime2(6)) THEN CAST(N'99991230' AS datetime2(6)) ELSE s.last_due END AS last_due,
           s.put_at, s.put_by, s.paused_at, s.paused_by, CAST(SYSUTCDATETIME() AS datetime2(6)) AS taken_at
    FROM {schema}.schedule AS s
    WHERE (@schedule IS NULL OR s.schedule_name = @schedule) AND (@queue IS NULL OR s.queue_name = @queue)
      AND (@all = 1 OR s.put_by = ORIGINAL_LOGIN())
    ORDER BY s.schedule_name;
{end_try}


-- For sessions -----------------------------------------------------------------------------------------------------

-- Put one task, a SQL text if @kind is not given; @task_id is its number. May be part of the caller's transaction.
-- @order: the task waits for all open tasks of lower orders. @on_failure: N'stop', so that later orders wait if it has
-- failed, or N'continue'. @backoff_seconds: the pause before the second of @max_attempts; then doubled. (`work` keeps
-- no time limit.) @unique_key: while a task with this key is open, put none, and return that task's number.
-- @replace_key: replace the open task with this key. @key: the task's key; workers are divided between the keys.
-- @priority: among the tasks of its key, higher ones first. @locks: the locks that it needs to run, such as
-- N'[{"resource": "customers", "access": "write", "limit": 1}]'; the task starts, on any worker, when all of them can
-- be granted.
CREATE OR ALTER PROCEDURE {schema}.put
    @queue nvarchar(400), @body nvarchar(max), @kind nvarchar(100) = N'sql', @order int = 0, @after_seconds float = 0,
    @max_attempts int = 1, @note nvarchar(1000) = NULL, @on_failure nvarchar(100) = N'stop', @backoff_seconds float = 1,
    @task_id bigint = NULL OUTPUT, @unique_key nvarchar(400) = NULL, @replace_key nvarchar(400) = NULL,
    @time_limit_seconds float = NULL, @key nvarchar(400) = NULL, @priority int = 0, @locks nvarchar(max) = NULL
AS {begin_try_own}
    -- (A value that is too large for bigint becomes -1, which put_task refuses.)
    DECLARE @after_ms bigint = CASE WHEN ABS(@after_seconds) > 1e12 THEN -1 ELSE FLOOR(@after_seconds * 1000) END,
            @backoff_ms bigint = CASE WHEN ABS(@backoff_seconds) > 1e12 THEN -1 ELSE FLOOR(@backoff_seconds * 1000) END,
            @time_limit_ms bigint = CASE WHEN ABS(@time_limit_seconds) > 1e12 THEN -1
                                         ELSE CEILING(@time_limit_seconds * 1000) END;
    EXEC {schema}.put_task @queue, NULL, @kind, @body, @order, @after_ms, @max_attempts, @backoff_ms, @on_failure,
        @note, @task_id OUTPUT, 0, @unique_key, @replace_key, @time_limit_ms, @key, @priority, @locks;
{end_try_own}

-- Claim a task for this session; @task is NULL if there is none now, or another session blocks the claim.
CREATE OR ALTER PROCEDURE {schema}.session_claim
    @queue nvarchar(400), @owner nvarchar(255), @member bigint OUTPUT, @task bigint OUTPUT AS {begin}
    SET XACT_ABORT ON;
    SET LOCK_TIMEOUT 3000;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    SET @task = NULL;
    BEGIN TRY
        EXEC {schema}.session_member NULL, @member OUTPUT;
        EXEC {schema}.claim_blocked @member, @queue, @owner, NULL, 0, @owner, @owner, @task OUTPUT;
        IF @task IS NULL
            EXEC {schema}.take_task @member, @queue, @owner, NULL, 0, @task OUTPUT;
        IF @task IS NULL
            EXEC {schema}.recover_tasks @queue, @member;
    END TRY
    BEGIN CATCH
        IF @@TRANCOUNT > 0
            ROLLBACK TRANSACTION;
        -- Busy, or a deadlock's victim, or an operator has removed this member: the caller tries again.
        IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222, 50002, 50005)
            THROW;
    END CATCH;
END;

-- End an attempt of this session, and wait as long as other sessions block that. @status: see end_task.
CREATE OR ALTER PROCEDURE {schema}.session_end
    @member bigint, @task bigint, @attempt int, @error nvarchar(max), @status nvarchar(16) = NULL OUTPUT AS {begin}
    SET XACT_ABORT ON;
    SET LOCK_TIMEOUT -1;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @outcome nvarchar(16) = CASE WHEN @error IS NULL THEN N'finished' ELSE N'failed' END, @again bit = 1;
    WHILE @again = 1
    BEGIN
        SET @again = 0;
        BEGIN TRY
            EXEC {schema}.end_task @member, @task, @attempt, @outcome, NULL, @error, @status OUTPUT;
        END TRY
        BEGIN CATCH
            IF @@TRANCOUNT > 0
                ROLLBACK TRANSACTION;
            IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222, 50002)
                THROW;
            SET @again = 1;
        END CATCH;
    END;
END;

-- End the tasks of earlier calls of `work` that the client broke off (a command timeout), of any queue. (No other
-- session ends them, as this session is alive.) A task that was claimed after the session's present request began is
-- left alone: it belongs to an outer call of `work`.
CREATE OR ALTER PROCEDURE {schema}.recover_session_tasks AS {begin}
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @running TABLE (task_id bigint NOT NULL PRIMARY KEY);
    DECLARE @member bigint, @task bigint = 0, @found int, @attempt int, @claimed_at datetime2(6), @age bigint;
    EXEC {schema}.session_member NULL, @member OUTPUT;
    SELECT @age = DATEDIFF_BIG(millisecond, last_request_start_time, GETDATE())
    FROM sys.dm_exec_sessions WHERE session_id = @@SPID;
    -- (READPAST: a locked row belongs to another session. ended_at IS NULL: running tasks have no end yet.)
    INSERT INTO @running (task_id)
    SELECT task_id FROM {schema}.task WITH (INDEX (task_ended), ROWLOCK, READPAST, READCOMMITTEDLOCK)
    WHERE is_open = CAST(1 AS bit) AND ended_at IS NULL AND status = N'running';
    SET @found = @@ROWCOUNT;
    WHILE @found > 0
    BEGIN
        SET @found = 0;
        SELECT TOP (1) @found = 1, @task = task_id FROM @running WHERE task_id > @task ORDER BY task_id;
        SET @claimed_at = NULL;
        IF @found = 1
            SELECT @attempt = attempt, @claimed_at = claimed_at FROM {schema}.task WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
            WHERE task_id = @task AND status = N'running' AND member_id = @member AND claim_uid IS NULL;
        -- (50 ms: the two times are of different clocks, and the clock of requests is coarse.)
        IF DATEDIFF_BIG(millisecond, @claimed_at, SYSUTCDATETIME()) > @age + 50
            EXEC {schema}.session_end @member, @task, @attempt,
                N'it was broken off by its client (a command timeout?); give work all the time it needs';
    END;
END;

-- Run the SQL tasks of a queue, one after the other, with the caller's rights, until there was none for @idle_seconds.
-- Call it from Agent jobs, one for each concurrent worker, without a command timeout. @done counts finished tasks, and
-- @failed attempts that have failed; tasks of other kinds than SQL fail. A task's text is run by EXEC (text), with the session's settings and no transaction around it. If the text
-- leaves a transaction open, that is rolled back, and the task fails.
--
-- The end of EXEC undoes the settings of a text, its change of the database, its impersonation (WITH NO REVERT is
-- refused in EXEC) and its local tables. Application locks, global cursors, SESSION_CONTEXT, sqlsem's own locks and
-- parts of batches belong to the session, and stay until that ends.
CREATE OR ALTER PROCEDURE {schema}.work
    @queue nvarchar(400), @idle_seconds float = 30, @done int = 0 OUTPUT, @failed int = 0 OUTPUT
AS
BEGIN TRY
    SET NOCOUNT ON;  -- (ROWCOUNT stays as it is, for the texts.)
    SET @done = 0;
    SET @failed = 0;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: work must not be called in an open transaction or INSERT ... EXEC; commit first', 1;
    IF @@OPTIONS & 2 = 2
        SET IMPLICIT_TRANSACTIONS OFF;
    SET TEXTSIZE 2147483647;  -- Agent sets 1024
    DECLARE @owner nvarchar(400), @member bigint, @task bigint, @kind nvarchar(8), @body nvarchar(max), @attempt int,
            @error nvarchar(max), @message nvarchar(1000), @status nvarchar(16), @pause int = 5, @read bit,
            @since datetime2(6) = SYSUTCDATETIME();
    EXEC {schema}.check_name N'queue', @queue;
    IF @idle_seconds IS NULL OR @idle_seconds < 0
    BEGIN
        SET @message = CONCAT(N'sqlsem: idle_seconds must be 0 or more, not ',
            COALESCE(CONVERT(nvarchar(40), @idle_seconds), N'NULL'));
        EXEC {schema}.raise_error 50000, @message;
    END;
    EXEC {schema}.session_name @owner OUTPUT;
    EXEC {schema}.recover_session_tasks;
    WHILE 1 = 1
    BEGIN
        EXEC {schema}.session_claim @queue, @owner, @member OUTPUT, @task OUTPUT;
        IF @task IS NULL
        BEGIN
            IF DATEDIFF_BIG(millisecond, @since, SYSUTCDATETIME()) >= @idle_seconds * 1000
                BREAK;
            EXEC {schema}.client_sleep @pause;
            SET @pause = CASE WHEN @pause > 333 THEN 500 ELSE @pause * 3 / 2 END;
            CONTINUE;
        END;
        -- (The task is claimed: if another session has locked its row, as with a request to cancel, read it again.)
        SET @read = 0;
        WHILE @read = 0
        BEGIN TRY
            SELECT @kind = kind, @body = body, @attempt = attempt FROM {schema}.task WHERE task_id = @task;
            SET @read = 1;
        END TRY
        BEGIN CATCH
            IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222)
                THROW;
            EXEC {schema}.client_sleep 40;
        END CATCH;
        SET @error = NULL;
        IF @kind <> N'sql'
            SET @error = CONCAT(N'a database session runs SQL, not kind ', @kind, N'; use sqlsem work');
        ELSE
        BEGIN
            BEGIN TRY
                EXEC (@body);
            END TRY
            BEGIN CATCH
                SET @error = CONCAT(ERROR_NUMBER(), N': ', ERROR_MESSAGE());
                IF ERROR_PROCEDURE() IS NOT NULL
                    SET @error = CONCAT(@error, N' (', ERROR_PROCEDURE(), N', line ', ERROR_LINE(), N')');
                IF ERROR_NUMBER() = 266 AND @@TRANCOUNT > 0
                    SET @error = NULL;  -- (a clearer message follows)
            END CATCH;
        END;
        IF @@TRANCOUNT > 0
        BEGIN
            ROLLBACK TRANSACTION;
            SET @error = COALESCE(@error, N'it left a transaction open, which was rolled back; commit at its end');
        END;
        EXEC {schema}.session_end @member, @task, @attempt, @error, @status OUTPUT;
        IF @status IS NULL
        BEGIN
            SET @message = CONCAT(N'sqlsem: task ', @task, N' was given up while it ran, as if this session had ',
                N'ended; it is run again, though what it did is not undone');
            RAISERROR (N'%s', 10, 1, @message) WITH NOWAIT;
        END;
        IF @error IS NULL AND @status IS NOT NULL
            SET @done = @done + 1;
        ELSE
            SET @failed = @failed + 1;
        SET @since = SYSUTCDATETIME();
        SET @pause = 5;
    END;
{end_try_rollback_own}
