-- sqlsem, conversions for SQL Server: a reader becomes the writer, or a writer a reader, without a release. May be run
-- again at any time. Described in docs/howto/readers-writer.md.
--
-- A reader that upgrades has the access type 'upgrade' until all other holders have left. No request fits beside it, so
-- each later request waits. But waiting readers behind it may already be eligible, and may have seen that: once
-- eligible they must stay so. So begin_upgrade first sets the access type 'upgrade:new', grants these readers, and then
-- sets 'upgrade'; the upgrading reader waits for them as well.

-- Begin the upgrade of a reader. A reader that is alone becomes the writer at once. With @try nothing is changed if it
-- is not alone. May be repeated. Return:
--   0  the reader is the writer
--   1  begun: call upgrade
--  -1  not begun, or not completely: there are or may be other holders (@try); or only a pause or a cap blocks readers
--      behind it; or another upgrading reader is dead or being revoked. Call again in a moment
--  -2  the row is gone: released, reaped or revoked
--  -3  another reader is upgrading: each would wait for the other. Nothing was changed
CREATE OR ALTER PROCEDURE {schema}.begin_upgrade
    @resource nvarchar(255), @position bigint, @requesting_id nvarchar(255), @try bit, @patience int = 1000, @answer bit = 0
AS {begin_try_own}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    {outside:begin_upgrade}
    DECLARE @result int, @code int, @exists int, @access nvarchar(64), @limit int, @member bigint, @other bigint, @before bigint,
            @alive int, @let_in int = 0, @now datetime2(6), @is_alive int, @gate nvarchar(255) = LEFT(CONCAT(N'gate.sqlsem.{schema}.', @resource), 255);
    DECLARE @free TABLE (queue_position bigint NOT NULL PRIMARY KEY, held int NOT NULL);
    SELECT @exists = 1, @access = t.access_type, @limit = t.concurrency_limit, @member = t.member_id
    FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK)
    WHERE t.resource_id = @resource AND t.queue_position = @position AND t.requesting_id = @requesting_id
      AND t.granted_at IS NOT NULL AND t.revoked_at IS NULL
      AND EXISTS (SELECT 1 FROM {schema}.member AS m WHERE m.member_id = t.member_id AND m.login = ORIGINAL_LOGIN());
    IF @exists IS NULL
        SET @result = -2;
    ELSE IF @access NOT IN (N'read', N'upgrade:new', N'upgrade', N'write') OR COALESCE(@limit, 0) <> 1
        THROW 50000, N'sqlsem: this row is no reader of limit 1 and cannot be upgraded', 1;
    ELSE IF @access IN (N'write', N'upgrade')
        SET @result = CASE @access WHEN N'write' THEN 0 ELSE 1 END;
    BEGIN TRY
        IF @result IS NULL AND @access = N'read'
        BEGIN
            -- Test other upgrading readers first: a dead one must not block this upgrade.
            SELECT @other = MIN(queue_position) FROM {schema}.entry
            WHERE resource_id = @resource AND queue_position <> @position AND access_type IN (N'upgrade:new', N'upgrade');
            IF @other IS NOT NULL
                EXEC {schema}.check_if_dead @resource, @other, @member;
            IF @try = 1 AND EXISTS (SELECT 1 FROM {schema}.entry
                                    WHERE resource_id = @resource AND queue_position <> @position
                                      AND (queue_position < @position OR granted_at IS NOT NULL))
                EXEC {schema}.reap_dead_members @resource, @member;
            BEGIN TRANSACTION;
            -- Until the commit no request registers, and no other reader begins to upgrade.
            EXEC @code = sys.sp_getapplock @Resource = @gate, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
                @LockTimeout = @patience, @DbPrincipal = @principal;
            IF @code < 0
                THROW 50002, N'sqlsem: busy: another session keeps the gate of this resource in an open transaction', 1;
            SET @other = NULL;
            SELECT @other = t.queue_position,
                   @alive = CASE WHEN t.revoked_at IS NULL AND m.member_id IS NOT NULL AND m.missing_since IS NULL THEN 1 ELSE 0 END
            FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK) LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
            WHERE t.resource_id = @resource AND t.queue_position <> @position AND t.access_type IN (N'upgrade:new', N'upgrade');
            IF @other IS NOT NULL
                SET @result = CASE WHEN @alive = 1 THEN -3 ELSE -1 END;
            ELSE IF @try = 1 AND EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                                         WHERE resource_id = @resource AND queue_position <> @position
                                           AND (queue_position < @position OR granted_at IS NOT NULL))
                SET @result = -1;
            ELSE IF EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                            WHERE resource_id = @resource AND queue_position <> @position
                              AND (queue_position < @position OR granted_at IS NOT NULL OR access_type = N'read'))
            BEGIN
                -- (A waiting reader behind this one may be about to be granted.)
                UPDATE {schema}.entry SET access_type = N'upgrade:new'
                WHERE resource_id = @resource AND queue_position = @position AND access_type = N'read' AND revoked_at IS NULL;
                IF @@ROWCOUNT = 0
                    SET @result = -2;
                SET @access = N'upgrade:new';
            END
            ELSE
                EXEC @result = {schema}.convert_row @resource, @position, N'read', N'write', N'upgraded';
            COMMIT TRANSACTION;
        END;

        IF @result IS NULL AND @access = N'upgrade:new'
        BEGIN
            -- From here on no request behind finds itself eligible. But a reader that did so before may still be
            -- granted: such a reader fits now, or would fit but for an operator's pause or cap, which it may not have
            -- seen. Remove waiting rows whose waiter lease is over; grant the others. (A blocked task must hold
            -- nothing, so its rows are not granted: a claim applies the rule again after it has written the rows, and
            -- then sees this access type.)
            SET @now = SYSUTCDATETIME();
            SET @other = @position;
            WHILE @other IS NOT NULL
            BEGIN
                SET @before = @other;
                SELECT @other = MIN(queue_position) FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                WHERE resource_id = @resource AND queue_position > @before AND granted_at IS NULL AND waiter_lease_until < @now;
                IF @other IS NOT NULL
                    EXEC @code = {schema}.remove @resource, @other, N'cancelled', 1;  -- only if its waiter lease is still over
                IF @other IS NOT NULL AND @code = -2  -- an open transaction has pinned the row
                    SET @result = -1;
            END;
            INSERT INTO @free (queue_position, held)
            SELECT r.queue_position, CASE WHEN o.paused_at IS NOT NULL OR r.ahead_weight + r.weight > o.cap THEN 1 ELSE 0 END
            FROM (SELECT queue_position, access_type, granted_at, revoked_at, waiter_lease_until, concurrency_limit, weight, member_id,
                         COALESCE(SUM(CASE WHEN access_type <> N'read' AND queue_position <> @position THEN CAST(weight AS bigint)
                                           ELSE 0 END)
                                  OVER (ORDER BY queue_position ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS ahead_weight,
                         COALESCE(MIN(CASE WHEN access_type <> N'read' AND queue_position <> @position
                                                AND concurrency_limit IS NOT NULL THEN concurrency_limit ELSE 2147483647 END)
                                  OVER (ORDER BY queue_position ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
                                  2147483647) AS declared
                  FROM {schema}.entry WITH (READCOMMITTEDLOCK) WHERE resource_id = @resource) AS r
            CROSS JOIN {schema}.effective_settings(@resource) AS o
            WHERE r.queue_position > @position AND r.access_type = N'read' AND r.granted_at IS NULL AND r.revoked_at IS NULL
              AND r.ahead_weight + r.weight <= COALESCE(r.concurrency_limit, 2147483647)
              AND r.ahead_weight + r.weight <= r.declared
              -- feature: queue
              AND NOT EXISTS (SELECT 1 FROM {schema}.queue_proxy AS p WITH (READCOMMITTEDLOCK) WHERE p.member_id = r.member_id)
              -- end of feature: queue
              AND (r.waiter_lease_until IS NULL OR r.waiter_lease_until >= @now);
            IF @try = 1 AND (@result IS NOT NULL OR EXISTS (SELECT 1 FROM @free))
            BEGIN
                UPDATE {schema}.entry SET access_type = N'read'
                WHERE resource_id = @resource AND queue_position = @position AND access_type = N'upgrade:new';
                SET @let_in = 1;
            END;
            IF EXISTS (SELECT 1 FROM @free WHERE held = 1 OR @try = 1)
                SET @result = -1;
            -- Grant them one by one: a transaction that locks several rows could meet another session that locks the
            -- same rows in the opposite order.
            SET @other = 0;
            WHILE @result IS NULL
            BEGIN
                SET @before = @other;
                SELECT @other = MIN(queue_position) FROM @free WHERE queue_position > @before;
                IF @other IS NULL
                    BREAK;
                UPDATE {schema}.entry SET granted_at = SYSUTCDATETIME()
                WHERE resource_id = @resource AND queue_position = @other AND granted_at IS NULL;
                SET @let_in = 1;
            END;
            IF @result IS NULL
            BEGIN
                UPDATE {schema}.entry SET access_type = N'upgrade'
                WHERE resource_id = @resource AND queue_position = @position AND access_type = N'upgrade:new' AND revoked_at IS NULL;
                SET @result = CASE WHEN @@ROWCOUNT > 0 THEN 1 ELSE -1 END;
            END;
        END;
        IF @result = 1 AND NOT EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                                       WHERE resource_id = @resource AND queue_position <> @position
                                         AND (queue_position < @position OR granted_at IS NOT NULL))
        BEGIN
            EXEC @code = {schema}.convert_row @resource, @position, N'upgrade', N'write', N'upgraded';
            IF @code = 0
                SET @result = 0;
        END;
        IF @result = 1 AND @try = 1  -- a reader was granted meanwhile
        BEGIN
            UPDATE {schema}.entry SET access_type = N'read'
            WHERE resource_id = @resource AND queue_position = @position AND access_type = N'upgrade';
            SET @result = -1;
            SET @let_in = 1;
        END;
        IF @let_in = 1  -- readers may sleep on this row's wakeup lock since its access type changed
            EXEC {schema}.rotate_wakeup_lock @position;
    {end_try_rollback}
    IF @result = 0
    BEGIN
        -- (A member is removed together with its rows: see wait.)
        EXEC @is_alive = {schema}.touch_member @member;
        IF @is_alive = 0
            SET @result = -2;
    END;
    {answer:@result,code}
{end_try_own}

-- Wait up to @timeout_ms until a reader that has begun to upgrade is alone, and so the writer. Wherever there is a lock
-- to wait for, sleep in the engine's queue of that lock, and poll otherwise. Return:
--   0  the reader is the writer   -1  not yet (may come early: sleep a little, then call again); or no longer upgrading
--   1  call again at once
--  -2  the row is gone: released, reaped or revoked
CREATE OR ALTER PROCEDURE {schema}.upgrade
    @resource nvarchar(255), @position bigint, @requesting_id nvarchar(255), @timeout_ms int, @answer bit = 0 AS {begin_try_own}
    {outside:upgrade}
    DECLARE @deadline datetime2(6) = DATEADD(millisecond, @timeout_ms, SYSUTCDATETIME());
    DECLARE @result int, @code int, @exists int, @access nvarchar(64), @member bigint, @other bigint, @left int,
            @pause float = 2, @name nvarchar(255);
    BEGIN TRY
        WHILE @result IS NULL
        BEGIN
            SET @exists = NULL;
            SELECT @exists = 1, @access = t.access_type, @member = t.member_id
            FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK)
            WHERE t.resource_id = @resource AND t.queue_position = @position AND t.requesting_id = @requesting_id
              AND t.granted_at IS NOT NULL AND t.revoked_at IS NULL
              AND EXISTS (SELECT 1 FROM {schema}.member AS m WHERE m.member_id = t.member_id AND m.login = ORIGINAL_LOGIN());
            IF @exists IS NULL OR @access <> N'upgrade'
            BEGIN
                SET @result = CASE WHEN @exists IS NULL THEN -2 WHEN @access = N'write' THEN 0 ELSE -1 END;
                BREAK;
            END;
            -- Wait for each row with granted_at, and for each row ahead, which can be granted without regard to this
            -- one. No other row can be granted.
            SELECT @other = MIN(queue_position) FROM {schema}.entry WITH (READCOMMITTEDLOCK)
            WHERE resource_id = @resource AND queue_position <> @position
              AND (queue_position < @position OR granted_at IS NOT NULL);
            IF @other IS NULL
            BEGIN
                EXEC @code = {schema}.convert_row @resource, @position, N'upgrade', N'write', N'upgraded';
                SET @result = CASE WHEN @code = 0 THEN 0 ELSE 1 END;
                BREAK;
            END;
            SET @left = DATEDIFF(millisecond, SYSUTCDATETIME(), @deadline);
            IF @left <= 0
            BEGIN
                -- At the end of each call test the other owners, too, as wait does.
                EXEC @code = {schema}.reap_dead_members @resource, @member;
                SET @result = CASE WHEN @code = 1 THEN 1 ELSE -1 END;
                BREAK;
            END;
            SET @name = CONCAT(N'entry.sqlsem.{schema}.', @other);
            EXEC @code = {schema}.wait_until_lock_free @name, 0;
            IF @code >= 0
            BEGIN
                -- No session holds the lock: the row was released this instant, or its owner has no session, or has
                -- died.
                EXEC @code = {schema}.check_if_dead @resource, @other, @member;
                IF @code > 0
                    CONTINUE;
                EXEC @code = {schema}.backoff_sleep @position, @left, @pause OUTPUT;
                IF @code < 0
                    SET @result = -1;
                CONTINUE;
            END;
            -- Sleep for 2 s at most: another owner may have died, or this row may have been revoked.
            SET @left = CASE WHEN @left < 2000 THEN @left ELSE 2000 END;
            EXEC @code = {schema}.wait_until_lock_free @name, @left;
            IF @code IN (-2, -3)  -- the engine ended the wait; the client has to sleep
                SET @result = -1;
        END;
    END TRY
    BEGIN CATCH
        {rollback}
        IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222)  -- return "not yet", as wait does
            THROW;
        SET @result = -1;
    END CATCH;
    IF @result = 0
    BEGIN
        EXEC @code = {schema}.touch_member @member;
        IF @code = 0
            SET @result = -2;
    END;
    {answer:@result,code}
{end_try_own}

-- Give a granted row another access type, and record the time under the old one. Return 0, or -2 if the row is gone or
-- revoked, or has another access type than @was.
CREATE OR ALTER PROCEDURE {schema}.convert_row
    @resource nvarchar(255), @position bigint, @was nvarchar(64), @access nvarchar(64), @outcome nvarchar(16)
AS {begin_inner}
    SET XACT_ABORT ON;
    DECLARE @count int, @label nvarchar(64) = REPLACE(@was, N'upgrade', N'read'), @host nvarchar(255), @pid int,
            @program nvarchar(255), @login nvarchar(128);
    SELECT @host = m.host, @pid = m.pid, @program = m.program, @login = m.login
    FROM {schema}.entry AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE t.resource_id = @resource AND t.queue_position = @position;
    BEGIN TRANSACTION;
    UPDATE {schema}.entry SET access_type = @access
    OUTPUT inserted.resource_id, inserted.queue_position, inserted.requesting_id, @label, inserted.weight,
           inserted.member_id, inserted.owner, inserted.note, inserted.requested_at, inserted.granted_at,
           inserted.concurrency_limit, @outcome, @host, @pid, @program, @login
    INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight,
                           member_id, owner, note, requested_at, granted_at,
                           concurrency_limit, outcome, host, pid, program, login)
    WHERE resource_id = @resource AND queue_position = @position AND access_type = @was AND revoked_at IS NULL;
    SET @count = @@ROWCOUNT;
    IF @count > 0
        UPDATE {schema}.entry SET granted_at = SYSUTCDATETIME()
        WHERE resource_id = @resource AND queue_position = @position;
    COMMIT TRANSACTION;
    RETURN CASE WHEN @count > 0 THEN 0 ELSE -2 END;
END;

-- Release the wakeup lock of a row of this session, and take it again after that has woken the waiters. (Without the
-- lock the waiters poll.)
CREATE OR ALTER PROCEDURE {schema}.rotate_wakeup_lock @position bigint AS {begin_inner}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @name nvarchar(255) = CONCAT(N'entry.sqlsem.{schema}.', @position), @code int;
    IF APPLOCK_MODE(@principal, @name, N'Session') = N'Exclusive'
    BEGIN
        EXEC sys.sp_releaseapplock @Resource = @name, @LockOwner = N'Session', @DbPrincipal = @principal;
        EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Session',
            @LockTimeout = 1000, @DbPrincipal = @principal;
    END;
END;

-- Turn a writer into a reader, or end the upgrade of a reader, and wake the waiters behind that may now be eligible.
-- Return 0 if done, or if the row is a reader's already; -1 if this requester has no such granted row. May be repeated.
-- Waits (SET LOCK_TIMEOUT) for an open transaction that has pinned the row. It takes the gate although it blocks no
-- request: an earlier begin_upgrade of a client that no longer waits for it may still wait for the gate, and has to
-- come first.
CREATE OR ALTER PROCEDURE {schema}.downgrade @resource nvarchar(255), @position bigint, @requesting_id nvarchar(255), @answer bit = 0
AS {begin}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    {outside:downgrade}
    DECLARE @code int = 0, @exists int, @access nvarchar(64), @limit int,
            @gate nvarchar(255) = LEFT(CONCAT(N'gate.sqlsem.{schema}.', @resource), 255),
            @pin nvarchar(255) = CONCAT(N'pin.sqlsem.{schema}.', @position);
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC @code = sys.sp_getapplock @Resource = @gate, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
            @LockTimeout = 60000, @DbPrincipal = @principal;
        IF @code < 0
            THROW 50002, N'sqlsem: busy: another session keeps the gate of this resource in an open transaction', 1;
        SET @code = 0;
        SELECT @exists = 1, @access = t.access_type, @limit = t.concurrency_limit
        FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK)
        WHERE t.resource_id = @resource AND t.queue_position = @position AND t.requesting_id = @requesting_id
          AND t.granted_at IS NOT NULL AND t.revoked_at IS NULL
          AND EXISTS (SELECT 1 FROM {schema}.member AS m WHERE m.member_id = t.member_id AND m.login = ORIGINAL_LOGIN());
        IF @exists IS NULL
            SET @code = -1;
        ELSE IF @access NOT IN (N'read', N'upgrade:new', N'upgrade', N'write') OR COALESCE(@limit, 0) <> 1
            THROW 50000, N'sqlsem: this row is no writer of limit 1 and cannot be downgraded', 1;
        ELSE IF @access = N'write'
        BEGIN
            EXEC @code = sys.sp_getapplock @Resource = @pin, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
                @DbPrincipal = @principal;
            IF @code < 0
                THROW 50002, N'sqlsem: busy: an open transaction has pinned this row (assert_holding); end that first', 1;
            EXEC @code = {schema}.convert_row @resource, @position, N'write', N'read', N'downgraded';
            SET @code = CASE WHEN @code = 0 THEN 0 ELSE -1 END;
        END
        ELSE
            UPDATE {schema}.entry SET access_type = N'read'
            WHERE resource_id = @resource AND queue_position = @position AND access_type <> N'read';
        COMMIT TRANSACTION;
    {end_try_rollback}
    IF @code = 0 AND @access <> N'read'
        EXEC {schema}.rotate_wakeup_lock @position;
    {answer:@code,code}
END;
