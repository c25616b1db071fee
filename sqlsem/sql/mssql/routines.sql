-- sqlsem, routines for SQL Server. May be run again at any time, also while locks are held.
--
-- Application locks used (sp_getapplock; their principal is a role of sqlsem, see permissions.sql, or public if there
-- are no roles). The first two characters of a name tell its kind, as the server identifies a lock by these and a hash
-- of 32 bits:
--   gate.sqlsem.{schema}.<resource>           Transaction  held for the length of one registration
--   beacon.sqlsem.{schema}.<number>           Session      held by a member's session for as long as it lives
--   entry.sqlsem.{schema}.<queue_position>    Session      held by the session of a row's owner while the row exists
--   waiting.sqlsem.{schema}.<queue_position>  Session      held by a session while it waits for that row's grant
--   slot.sqlsem.{schema}.<number>             Transaction  held by a session while it sleeps here (max_server_waiters)
--   pin.sqlsem.{schema}.<queue_position>      Transaction  shared: an open transaction has pinned the row
--                                             (assert_holding)
--   batch.sqlsem.{schema}.<name>              Transaction  held for the length of one decision about batches
--                                             (batches.sql)
--   limits, set_resource.sqlsem.{schema}      Transaction  held while a limit or a resource is set
--   origin.sqlsem.{schema}                    Transaction  held while a session prepares the tables for another server
-- The removal of a row is committed first, then its wakeup lock is freed: a waiter that wakes up sees the row gone.
--
-- Procedures return a code and OUTPUT parameters; with @answer = 1 also a row, which costs clients less.
-- Errors: 50000 bad arguments, 50001 called where it cannot work, 50002 busy: try again, 50003 the session changed,
-- 50004 not held, 50005 this member is not known, 50006 not allowed for this login, 50008 no limit is set,
-- or requests depend on it.
-- No aggregate may meet NULL: that raises a warning, and drivers report the warning in place of a later error.
-- Every procedure that callers call sets ROWCOUNT 0: their session may have set another value, with which a statement
-- would stop after some rows.
-- The procedures of each request (register, wait, release) call sp_getapplock with positional arguments (resource,
-- mode, owner, timeout, principal), and use the fewest statements (tests/unit/test_tsql_steps.py counts them).
-- System procedures are called with their schema, as some engines look elsewhere first.

-- Below that level OPENJSON (register_all) does not compile; below that build CREATE OR ALTER. Engines that only speak
-- T-SQL have levels and builds of their own.
IF @@VERSION LIKE N'Microsoft SQL %'
BEGIN
    IF (SELECT compatibility_level FROM sys.databases WHERE name = DB_NAME()) < 130
        THROW 50001, N'sqlsem: the compatibility level of this database is below 130; ALTER DATABASE CURRENT SET COMPATIBILITY_LEVEL = 130', 1;
    IF CAST(SERVERPROPERTY('ProductMajorVersion') AS int) = 13 AND CAST(SERVERPROPERTY('ProductBuild') AS int) < 4001
        THROW 50001, N'sqlsem: this is SQL Server 2016 without a service pack; install Service Pack 1 or later', 1;
END;
GO

-- Replace control characters by question marks: displayed text must not move the cursor of a terminal.
CREATE OR ALTER PROCEDURE {schema}.escape_control_chars @text nvarchar(2048) OUTPUT AS {begin_inner}
    DECLARE @at int = LEN(@text), @code int;
    IF @text COLLATE Latin1_General_100_BIN2 NOT LIKE
       CONCAT(N'%[', NCHAR(1), N'-', NCHAR(31), NCHAR(127), N'-', NCHAR(159), N']%')
        RETURN 0;
    WHILE @at > 0
    BEGIN
        SET @code = UNICODE(SUBSTRING(@text, @at, 1));
        IF @code < 32 OR @code BETWEEN 127 AND 159
            SET @text = STUFF(@text, @at, 1, N'?');
        SET @at = @at - 1;
    END;
END;

-- Raise an error of sqlsem, without control characters. On SQL Server THROW takes a per cent sign for the beginning of a
-- format.
CREATE OR ALTER PROCEDURE {schema}.raise_error @number int, @message nvarchar(2048) AS {begin_inner}
    EXEC {schema}.escape_control_chars @message OUTPUT;
    IF @@VERSION LIKE N'Microsoft SQL %'
        SET @message = LEFT(REPLACE(@message, N'%', N'%%'), 2048);
    THROW @number, @message, 1;
END;

-- Return where numbers are allocated (place: the database and when it was created or restored there, on Azure SQL also
-- the server's name), which run of which server measures liveness (started), and whether both are the same as when a
-- session last checked (known). After the failover of an availability group or of a managed instance the new primary
-- may have run for weeks, under the same name or another one. All sessions of a server get the same values, whatever
-- their rights, and whatever name they have connected to.
-- grace_from: no grace begins before this time; NULL if a restart of the server cannot be seen, as on Azure SQL.
CREATE OR ALTER FUNCTION {schema}.origin() RETURNS TABLE AS RETURN (
    SELECT f.place, f.started, k.known,
           CASE WHEN f.tempdb IS NULL THEN NULL WHEN k.known = 0 THEN SYSUTCDATETIME() ELSE CAST('2000-01-01' AS datetime2(6)) END AS grace_from
    FROM (SELECT CONCAT(CASE WHEN CAST(SERVERPROPERTY('EngineEdition') AS int) = 5
                             THEN CAST(SERVERPROPERTY('ServerName') AS nvarchar(128)) END, N' ', DB_ID(), N' ',
                        CONVERT(nvarchar(30), d.create_date, 126)) AS place,
                 CONCAT(CAST(SERVERPROPERTY('ComputerNamePhysicalNetBIOS') AS nvarchar(128)), N' ',
                        CAST(SERVERPROPERTY('ProcessID') AS int), N' ', CONVERT(nvarchar(30), t.create_date, 126)) AS started,
                 t.create_date AS tempdb
          FROM (SELECT 1 AS one) AS o
          LEFT JOIN sys.databases AS d ON d.database_id = DB_ID()
          LEFT JOIN sys.databases AS t ON t.name = N'tempdb') AS f
    CROSS APPLY (SELECT CASE WHEN COUNT(*) = 2 THEN 1 ELSE 0 END AS known FROM {schema}.setting AS s
                 WHERE (s.name = N'origin' AND s.value = f.place) OR (s.name = N'started' AND s.value = f.started)) AS k
);

-- Advance all numbers to the next multiple of 10^10 that is at least 10^9 away; with @new only those of members, by a
-- random step. Runs as its owner, as DBCC CHECKIDENT needs a right on the table. (Engines that only speak T-SQL have no
-- EXECUTE AS.)
DECLARE @as nvarchar(30) = CASE WHEN @@VERSION LIKE N'Microsoft SQL %' THEN N'WITH EXECUTE AS OWNER' ELSE N'' END;
EXEC (N'CREATE OR ALTER PROCEDURE {schema}.set_numbers @new bit ' + @as + N' AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @at int = 1, @table nvarchar(300), @last bigint, @text nvarchar(600);
    WHILE @at <= CASE WHEN @new = 1 THEN 1 ELSE 4 END
    BEGIN
        SET @table = N''{schema}.'' + CASE @at WHEN 1 THEN N''member'' WHEN 2 THEN N''entry'' WHEN 3 THEN N''task'' ELSE N''batch'' END;
        SET @last = CAST(IDENT_CURRENT(@table) AS bigint);
        SET @last = CASE WHEN @new = 1 THEN @last + CAST(RAND() * 1000000000 AS bigint)
                         ELSE ((@last + 1000000000) / 10000000000 + 1) * 10000000000 END;
        SET @text = CONCAT(N''DBCC CHECKIDENT ('', NCHAR(39), @table, NCHAR(39), N'', RESEED, '', @last, N'') WITH NO_INFOMSGS'');
        IF @last IS NOT NULL
            EXEC (@text);
        SET @at = @at + 1;
    END;
END');
GO

-- Keep numbers growing and members alive when the database is on another server, or on a server that was restarted;
-- return 1 if it was. A server that takes over without all changes, and a restored database, would allocate numbers a
-- second time: fences would repeat, and a removed member would find another member under its number. All beacons are
-- missing there, and the clock may be another one. So the grace and the lease of each member begin anew, and so does
-- the time that a holder has after a revocation. Called before a session that has not checked yet gets a number, and
-- before any member is removed. If the owner may not advance numbers, a row in operation says so, and the rest is done.
CREATE OR ALTER PROCEDURE {schema}.check_origin AS {begin_inner}
    SET XACT_ABORT ON;
    IF (SELECT known FROM {schema}.origin()) = 1
        RETURN 0;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @name nvarchar(255) = N'origin.sqlsem.{schema}', @code int,
            @known nvarchar(255), @place nvarchar(255), @started nvarchar(255), @new bit, @now datetime2(6), @done bit = 0,
            @forward bit = 1, @problem nvarchar(1000), @resource nvarchar(255), @position bigint, @before bigint,
            @outside int = @@TRANCOUNT;
    SET LOCK_TIMEOUT 3000;
    WHILE @done = 0
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
            @LockTimeout = 10000, @DbPrincipal = @principal;
        IF @code < 0
            THROW 50002, N'sqlsem: busy: another session prepares this server for the sqlsem tables; try again', 1;
        SELECT @done = known, @place = place, @started = started FROM {schema}.origin();
        IF @done = 0  -- no other session was faster
        BEGIN
            SET @known = NULL;
            SELECT @known = value FROM {schema}.setting WHERE name = N'origin';
            SET @new = CASE WHEN @known IS NULL THEN 1 ELSE 0 END;
            IF @forward = 1 AND (@new = 1 OR @known <> @place)
                EXEC {schema}.set_numbers @new;
            SET @now = SYSUTCDATETIME();
            UPDATE {schema}.member SET heartbeat_at = @now, lease_until = DATEADD(millisecond, lease_ms, @now), missing_since = NULL;
            SET @position = -1;
            WHILE 1 = 1
            BEGIN
                SET @before = @position;
                SELECT TOP (1) @resource = resource_id, @position = queue_position
                FROM {schema}.entry WITH (READPAST, ROWLOCK, READCOMMITTEDLOCK)
                WHERE revoked_at IS NOT NULL AND queue_position > @before ORDER BY queue_position;
                IF @position = @before
                    BREAK;
                UPDATE {schema}.entry SET revoked_at = @now
                WHERE resource_id = @resource AND queue_position = @position AND revoked_at IS NOT NULL;
            END;
            DELETE FROM {schema}.low_water;  -- the marks may not be true of the restored rows
            DELETE FROM {schema}.setting WHERE name IN (N'origin', N'started');
            INSERT INTO {schema}.setting (name, value) VALUES (N'origin', @place), (N'started', @started);
            IF @problem IS NOT NULL
                INSERT INTO {schema}.operation (host, pid, program, action, old_value, new_value)
                VALUES (LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), N'set_numbers', @known, @problem);
            SET @done = 1;
        END;
        COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        {rollback}
        {throw_if_busy}
        IF @forward = 0 OR @code < 0 OR @outside > 0  -- (with @outside the caller's changes are undone as well, so the caller must know)
            THROW;
        SET @done = 0;
        SET @forward = 0;
        SET @problem = LEFT(CONCAT(N'numbers were not set forward: ', ERROR_NUMBER(), N': ', ERROR_MESSAGE()), 1000);
    END CATCH;
    RETURN 1;
END;

-- Return the longest pattern that a name matches, or no row. (N'|' is appended because = ignores blanks at the end.)
CREATE OR ALTER FUNCTION {schema}.pattern_of (@resource nvarchar(400)) RETURNS TABLE AS RETURN (
    SELECT TOP (1) l.prefix, l.cap, l.cap_by FROM {schema}.limit_pattern AS l
    WHERE LEFT(@resource COLLATE Latin1_General_100_BIN2, LEN(l.prefix + N'|') - 1) + N'|' = l.prefix + N'|'
    ORDER BY LEN(l.prefix + N'|') DESC
);

-- Return the settings of a resource, always as one row: its own limit, or else that of the longest pattern, and since
-- when it is paused. While there is any pattern, table resource has a row '*': without that row the patterns are not
-- read. (Reads only committed rows, also for displays: set_resource removes a limit for an instant before it finds that
-- the limit is needed.)
CREATE OR ALTER FUNCTION {schema}.effective_settings (@resource nvarchar(400)) RETURNS TABLE AS RETURN (
    SELECT CASE WHEN o.cap IS NOT NULL OR p.resource_id IS NULL THEN o.cap
                ELSE (SELECT l.cap FROM {schema}.pattern_of(@resource) AS l) END AS cap, o.paused_at
    FROM (SELECT 1 AS one) AS n
    LEFT JOIN {schema}.resource AS o ON o.resource_id = @resource
    LEFT JOIN {schema}.resource AS p ON p.resource_id = N'*'
);

-- Return all settings and the logins that made them, for displays. Patterns of limits appear as 'tenant:*'; their
-- effect on a resource is not computed here.
CREATE OR ALTER FUNCTION {schema}.all_settings() RETURNS TABLE AS RETURN (
    SELECT COALESCE(o.resource_id, l.name) AS resource_id, COALESCE(l.cap, o.cap) AS cap, o.paused_at, o.stale_after_ms, o.paused_by,
           COALESCE(l.cap_by, o.cap_by) AS cap_by
    FROM {schema}.resource AS o WITH (NOLOCK)
    FULL JOIN (SELECT prefix + N'*' AS name, cap, cap_by FROM {schema}.limit_pattern WITH (NOLOCK)) AS l ON l.name = o.resource_id
    WHERE COALESCE(l.cap, o.cap, o.stale_after_ms, o.ageing_ms) IS NOT NULL OR o.paused_at IS NOT NULL
);

-- Return the id of the client's process, as its driver reports it. (Every login can see its own session.)
CREATE OR ALTER FUNCTION {schema}.client_pid() RETURNS int AS
BEGIN
    RETURN (SELECT host_process_id FROM sys.dm_exec_sessions WHERE session_id = @@SPID);
END;

-- Return the position at or below which a resource has no rows. (ISNULL, as COALESCE evaluates its argument twice, and
-- might get two results.)
CREATE OR ALTER FUNCTION {schema}.low_water_mark (@resource nvarchar(255)) RETURNS TABLE AS RETURN (
    SELECT ISNULL((SELECT w.mark FROM {schema}.low_water AS w WITH (READCOMMITTEDLOCK, READPAST, ROWLOCK)
                   WHERE w.resource_id = @resource), 0) AS mark
);

-- The rule. A row may be granted (eligible) if there is room for it beside all conflicting rows ahead of its position.
-- If not, blocker is the row to wait for, and until says what must happen:
--   'leave'    every conflicting row must leave; the blocker is the last one
--   'grant'    the blocker waits itself: nothing can change before it is granted
--   'any'      this row is next: one of several holders must leave, whichever; the blocker is the oldest of them
--   'paused'   an operator must resume the resource
-- The first @limit - @weight + 1 conflicting rows decide: each weighs at least 1, so they leave no room.
-- 9223372036854775807 stands for no limit, and for no position.
CREATE OR ALTER FUNCTION {schema}.eligibility (
    @resource nvarchar(255), @position bigint, @access nvarchar(64), @limit int, @weight int, @uid nvarchar(80))
RETURNS TABLE AS RETURN (
    WITH o AS (
        SELECT cap, paused_at FROM {schema}.effective_settings(@resource)
    ),
    f AS (
        SELECT mark FROM {schema}.low_water_mark(@resource)
    ),
    r AS (
        SELECT TOP (COALESCE(@limit, (SELECT CASE WHEN cap < @weight THEN @weight ELSE cap END FROM o), 2147483647) - @weight + 1) queue_position, weight,
               COALESCE(CAST(concurrency_limit AS bigint), 9223372036854775807) AS concurrency_limit
        FROM f JOIN {schema}.entry WITH (READCOMMITTEDLOCK, ROWLOCK)
            ON resource_id = @resource AND queue_position > f.mark AND queue_position < @position
        WHERE (@access COLLATE Latin1_General_100_BIN2 = N'write' OR access_type <> @access)
        ORDER BY queue_position
    ),
    a AS (
        SELECT COALESCE(SUM(CAST(weight AS bigint)), 0) + @weight AS needed, MIN(queue_position) AS first_one,
               COALESCE(MIN(COALESCE(CAST(concurrency_limit AS bigint), 9223372036854775807)), 9223372036854775807) AS declared
        FROM r
    ),
    b AS (
        SELECT a.first_one, l.last_one, l.granted_at, o.paused_at,
               CASE WHEN a.needed <= a.declared AND a.needed <= COALESCE(@limit, a.needed) AND a.needed <= COALESCE(o.cap, a.needed)
                    THEN 1 ELSE 0 END AS fits,
               CASE WHEN @weight >= a.declared OR @weight >= @limit OR @weight >= o.cap THEN 1 ELSE 0 END AS alone
        FROM a CROSS JOIN o
        LEFT JOIN (SELECT TOP (1) queue_position AS last_one, granted_at
                   FROM f JOIN {schema}.entry WITH (READCOMMITTEDLOCK, ROWLOCK)
                       ON resource_id = @resource AND queue_position > f.mark AND queue_position < @position
                   WHERE (@access COLLATE Latin1_General_100_BIN2 = N'write' OR access_type <> @access)
                   ORDER BY queue_position DESC) AS l ON a.first_one IS NOT NULL
    )
    SELECT CASE WHEN fits = 1 AND paused_at IS NULL THEN 1 ELSE 0 END AS eligible,
           CASE WHEN fits = 1 THEN NULL WHEN alone = 1 OR granted_at IS NULL THEN last_one ELSE first_one END AS blocker,
           CASE WHEN fits = 1 THEN N'paused' WHEN alone = 1 THEN N'leave' WHEN granted_at IS NULL THEN N'grant'
                ELSE N'any' END AS until,
           (SELECT t.queue_position FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK, ROWLOCK)
            WHERE t.request_uid = @uid) AS mine
    FROM b
);

-- Return the rows of one resource or all, with holds = 1 for holders; for displays. Waits for no open transaction. The
-- grants of bare participants are not recorded, so the rule is applied to their rows, all at once. (Its subquery runs
-- only if the lowest limit of all rows ahead is too low: then the limits of conflicting rows decide.)
CREATE OR ALTER FUNCTION {schema}.row_states (@resource nvarchar(400)) RETURNS TABLE AS RETURN (
    WITH q AS (
        SELECT t.resource_id, t.queue_position, t.access_type, t.concurrency_limit, t.weight, t.member_id, t.granted_at,
               t.revoked_at,
               COALESCE(SUM(CAST(t.weight AS bigint))
                        OVER (PARTITION BY t.resource_id ORDER BY t.queue_position
                              ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS all_weight,
               COALESCE(SUM(CAST(t.weight AS bigint))
                        OVER (PARTITION BY t.resource_id, t.access_type ORDER BY t.queue_position
                              ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS label_weight,
               COALESCE(MIN(COALESCE(t.concurrency_limit, 2147483647))
                        OVER (PARTITION BY t.resource_id ORDER BY t.queue_position
                              ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 2147483647) AS declared
        FROM {schema}.entry AS t WITH (NOLOCK)
        WHERE @resource IS NULL OR t.resource_id = @resource
    ),
    r AS (
        SELECT resource_id, queue_position, access_type, concurrency_limit, member_id, granted_at, revoked_at, declared,
               all_weight - CASE WHEN access_type = N'write' THEN 0 ELSE label_weight END AS ahead_weight,
               all_weight - CASE WHEN access_type = N'write' THEN 0 ELSE label_weight END + weight AS needed
        FROM q
    )
    SELECT r.resource_id, r.queue_position,
           CASE WHEN r.granted_at IS NOT NULL OR r.revoked_at IS NOT NULL THEN 1
                WHEN r.member_id IS NOT NULL OR r.needed > r.concurrency_limit OR r.needed > o.cap
                     OR o.paused_at IS NOT NULL THEN 0
                WHEN r.ahead_weight = 0 OR r.needed <= r.declared THEN 1
                WHEN r.access_type = N'write' THEN 0
                WHEN EXISTS (SELECT 1 FROM {schema}.entry AS t WITH (NOLOCK)
                             WHERE t.resource_id = r.resource_id AND t.queue_position < r.queue_position
                               AND t.access_type <> r.access_type AND t.concurrency_limit < r.needed) THEN 0
                ELSE 1 END AS holds
    FROM r CROSS APPLY {schema}.effective_settings(r.resource_id) AS o
);

-- Remove one row of any owner, and write it to the history; @unattended: only if it waits and its waiter lease is over.
-- The other parameters describe the owner's member, if that was removed already. Return 0 removed, -1 no such row, -2
-- pinned by an open transaction.
CREATE OR ALTER PROCEDURE {schema}.remove
    @resource nvarchar(255), @position bigint, @outcome nvarchar(16), @unattended bit = 0,
    @host nvarchar(255) = NULL, @pid int = NULL, @program nvarchar(255) = NULL, @login nvarchar(128) = NULL,
    @heartbeat_at datetime2(6) = NULL AS {begin_inner}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET XACT_ABORT ON;
    DECLARE @code int, @pin nvarchar(255) = CONCAT(N'pin.sqlsem.{schema}.', @position),
            @by nvarchar(128) = CASE WHEN @unattended = 1 OR @outcome IN (N'reaped', N'revoked') THEN ORIGINAL_LOGIN() END;
    IF @login IS NULL
        SELECT @host = m.host, @pid = m.pid, @program = m.program, @login = m.login, @heartbeat_at = m.heartbeat_at,
               @by = CASE WHEN @outcome = N'revoked' THEN COALESCE(t.revoked_by, @by) ELSE @by END
        FROM {schema}.entry AS t LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id
        WHERE t.resource_id = @resource AND t.queue_position = @position;
    IF @outcome <> N'reaped'
        SET @heartbeat_at = NULL;
    BEGIN TRANSACTION;
    EXEC @code = sys.sp_getapplock @Resource = @pin, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
        @LockTimeout = 0, @DbPrincipal = @principal;
    IF @code < 0
        SET @code = -2;
    ELSE
    BEGIN
        DELETE FROM {schema}.entry
        OUTPUT deleted.resource_id, deleted.queue_position, deleted.requesting_id, deleted.access_type, deleted.weight,
               deleted.member_id, deleted.owner, deleted.note, deleted.requested_at, deleted.granted_at,
               deleted.concurrency_limit, @outcome, @host, @pid, @program, @login, @by, @heartbeat_at
        INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight,
                               member_id, owner, note, requested_at, granted_at,
                               concurrency_limit, outcome, host, pid, program, login, ended_by, heartbeat_at)
        WHERE resource_id = @resource AND queue_position = @position
          AND (@unattended = 0 OR (granted_at IS NULL AND waiter_lease_until < SYSUTCDATETIME()));
        SET @code = CASE WHEN @@ROWCOUNT > 0 THEN 0 ELSE -1 END;
    END;
    COMMIT TRANSACTION;
    RETURN @code;
END;

-- Release a lock of this session, if the session has it.
CREATE OR ALTER PROCEDURE {schema}.release_session_lock @name nvarchar(255) AS {begin_inner}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    IF APPLOCK_MODE(@principal, @name, N'Session') <> N'NoLock'
        EXEC sys.sp_releaseapplock @Resource = @name, @LockOwner = N'Session', @DbPrincipal = @principal;
END;

-- Wait until no other session holds a lock: take it shared, and release it at once. (This session must not have the
-- lock itself.) Return the code of sp_getapplock: below 0 the lock is still held.
CREATE OR ALTER PROCEDURE {schema}.wait_until_lock_free @name nvarchar(255), @timeout_ms int AS {begin_inner}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @code int;
    EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Shared', @LockOwner = N'Session',
        @LockTimeout = @timeout_ms, @DbPrincipal = @principal;
    IF @code >= 0
        EXEC sys.sp_releaseapplock @Resource = @name, @LockOwner = N'Session', @DbPrincipal = @principal;
    RETURN @code;
END;

-- Sleep for @pause ms, at most @left, and make the next pause longer. To sleep, the session waits for the wakeup lock
-- of its own row, which another session of the member holds. Return 0, or -1 if that lock is free (a lease): then the
-- client has to sleep.
CREATE OR ALTER PROCEDURE {schema}.backoff_sleep @position bigint, @left int, @pause float OUTPUT AS {begin_inner}
    DECLARE @name nvarchar(255) = CONCAT(N'entry.sqlsem.{schema}.', @position), @code int,
            @wait_ms int = CASE WHEN @left < @pause THEN @left ELSE CAST(@pause AS int) END;
    SET @pause = CASE WHEN @pause * 1.5 > 500 THEN 500 ELSE @pause * 1.5 END;
    EXEC @code = {schema}.wait_until_lock_free @name, @wait_ms;
    RETURN CASE WHEN @code >= 0 THEN -1 ELSE 0 END;
END;

-- Remove all rows of a member; return their number. Wakeup locks are released by the end of their sessions, or by
-- release. A row that an open transaction has pinned stays until that ends; a later call removes it.
CREATE OR ALTER PROCEDURE {schema}.delete_member_rows
    @member bigint, @outcome nvarchar(16), @host nvarchar(255) = NULL, @pid int = NULL, @program nvarchar(255) = NULL,
    @login nvarchar(128) = NULL, @heartbeat_at datetime2(6) = NULL AS {begin_inner}
    SET XACT_ABORT ON;
    DECLARE @resource nvarchar(255), @position bigint = -1, @code int, @count int = 0, @before bigint;
    WHILE 1 = 1
    BEGIN
        SET @before = @position;
        -- The index is named: on a small table the planner may prefer another one, and wait for locked rows of other
        -- members.
        SELECT TOP (1) @resource = resource_id, @position = queue_position FROM {schema}.entry WITH (INDEX (entry_member))
        WHERE member_id = @member AND queue_position > @before ORDER BY queue_position;
        IF @position = @before
            RETURN @count;
        EXEC @code = {schema}.remove @resource, @position, @outcome, 0, @host, @pid, @program, @login, @heartbeat_at;
        IF @code = 0
            SET @count = @count + 1;
    END;
END;

-- Test if a member is alive, and remove a dead one, with its rows. A member is dead if its beacon is missing and its
-- last heartbeat is older than its grace, or if its lease is over. If only the beacon is missing, record since when,
-- for displays. Grace and lease begin anew when the server starts, or another server takes over (check_origin); where a
-- restart cannot be seen, the grace begins when the beacon is first missed. Return 1 if something was written.
CREATE OR ALTER PROCEDURE {schema}.check_liveness @member bigint, @mine bigint AS {begin_inner}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET XACT_ABORT ON;
    DECLARE @code int, @exists int, @beacon int, @grace int, @lease_until datetime2(6), @missing_since datetime2(6),
            @heartbeat_at datetime2(6), @start datetime2(6), @since datetime2(6), @host nvarchar(255), @pid int,
            @program nvarchar(255), @login nvarchar(128), @name nvarchar(255);
    SELECT @exists = 1, @beacon = beacon, @grace = grace_ms, @lease_until = lease_until, @missing_since = missing_since,
           @heartbeat_at = heartbeat_at, @host = host, @pid = pid, @program = program, @login = login
    FROM {schema}.member WHERE member_id = @member;
    IF @exists IS NULL OR @member = @mine OR @lease_until >= SYSUTCDATETIME()
        RETURN 0;
    EXEC @code = {schema}.check_origin;
    IF @code = 1
        RETURN 1;
    IF @lease_until IS NULL
    BEGIN
        -- A session can always share its own lock, so it must not test its own beacon.
        SET @name = CONCAT(N'beacon.sqlsem.{schema}.', @beacon);
        IF APPLOCK_MODE(@principal, @name, N'Session') <> N'NoLock'
            RETURN 0;
        EXEC @code = {schema}.wait_until_lock_free @name, 0;
        IF @code < 0
            RETURN 0;
        SET @start = (SELECT grace_from FROM {schema}.origin());
        SET @since = CASE WHEN @start > @heartbeat_at THEN @start ELSE @heartbeat_at END;
        IF @start IS NULL AND (@missing_since IS NULL OR @missing_since > @since)
            SET @since = COALESCE(@missing_since, SYSUTCDATETIME());
        IF @grace > 0 AND DATEADD(millisecond, @grace, @since) > SYSUTCDATETIME()
        BEGIN
            SET @exists = 0;
            IF @missing_since IS NULL
            BEGIN
                UPDATE {schema}.member SET missing_since = SYSUTCDATETIME()
                WHERE member_id = @member AND beacon = @beacon AND missing_since IS NULL;
                SET @exists = @@ROWCOUNT;
            END;
            RETURN @exists;
        END;
    END;
    BEGIN TRANSACTION;
    -- This one statement decides. It does not find a member that has returned meanwhile, and so changed its beacon, or
    -- that has written a heartbeat.
    DELETE FROM {schema}.member
    WHERE member_id = @member AND (beacon = @beacon OR (beacon IS NULL AND @beacon IS NULL))
      AND ((lease_until IS NULL AND heartbeat_at = @heartbeat_at) OR lease_until < SYSUTCDATETIME());
    SET @exists = @@ROWCOUNT;
    IF @exists > 0
        EXEC {schema}.delete_member_rows @member, N'reaped', @host, @pid, @program, @login, @heartbeat_at;
    COMMIT TRANSACTION;
    RETURN CASE WHEN @exists > 0 THEN 1 ELSE 0 END;
END;

-- Write a heartbeat of the member, and renew its lease, if the last one is older than an eighth of its grace or lease.
-- Called before a member gets a grant, claim or start, so that its heartbeat is recent. Return 1, or 0 if the member
-- was removed, or is another login's.
CREATE OR ALTER PROCEDURE {schema}.touch_member @member bigint AS {begin_inner}
    DECLARE @exists int = 0, @due int = 0;
    SELECT @exists = 1,
           @due = CASE WHEN COALESCE(lease_ms, grace_ms) > 0
                        AND DATEADD(millisecond, COALESCE(lease_ms, grace_ms) / 8, heartbeat_at) < SYSUTCDATETIME()
                       THEN 1 ELSE 0 END
    FROM {schema}.member WHERE member_id = @member AND login = ORIGINAL_LOGIN();
    IF @due = 1
    BEGIN
        UPDATE {schema}.member
        SET heartbeat_at = SYSUTCDATETIME(), lease_until = DATEADD(millisecond, lease_ms, SYSUTCDATETIME())
        WHERE member_id = @member;
        SET @exists = @@ROWCOUNT;
    END;
    RETURN @exists;
END;

-- Write the heartbeat that begins a claim (see touch_member), and return the host and pid of the worker.
CREATE OR ALTER PROCEDURE {schema}.touch_worker @member bigint, @host nvarchar(255) OUTPUT, @pid int OUTPUT
AS {begin_inner}
    DECLARE @exists int, @due int;
    SELECT @exists = 1, @host = host, @pid = COALESCE(pid, session_id),
           @due = CASE WHEN COALESCE(lease_ms, grace_ms) > 0
                        AND DATEADD(millisecond, COALESCE(lease_ms, grace_ms) / 8, heartbeat_at) < SYSUTCDATETIME()
                       THEN 1 ELSE 0 END
    FROM {schema}.member WHERE member_id = @member AND login = ORIGINAL_LOGIN();
    IF @due = 1
        EXEC @exists = {schema}.touch_member @member;
    IF COALESCE(@exists, 0) = 0
        THROW 50005, N'sqlsem: this member is not known here (any more), or belongs to another login; register again', 1;
END;

-- Test if the owner of a blocking row is alive, and act on the result (check_liveness). Remove the row if it is stale,
-- if its waiter lease is over, or if it was revoked and the owner's grace is over. Return 1 if something was written,
-- or the row is gone. Each write is a transaction of its own.
CREATE OR ALTER PROCEDURE {schema}.check_if_dead @resource nvarchar(255), @position bigint, @mine bigint
AS {begin_inner}
    SET XACT_ABORT ON;
    DECLARE @member bigint, @requested_at datetime2(6), @granted_at datetime2(6), @revoked_at datetime2(6),
            @waiter_lease_until datetime2(6), @stale bigint, @code int, @exists int, @grace int;
    SELECT @exists = 1, @member = member_id, @requested_at = requested_at, @granted_at = granted_at,
           @revoked_at = revoked_at, @waiter_lease_until = waiter_lease_until
    FROM {schema}.entry WHERE resource_id = @resource AND queue_position = @position;
    IF @exists IS NULL
        RETURN 1;
    IF @granted_at IS NULL AND @waiter_lease_until < SYSUTCDATETIME()  -- its client no longer polls
    BEGIN
        EXEC @code = {schema}.remove @resource, @position, N'cancelled', 1;  -- if that is still so
        RETURN CASE WHEN @code = 0 THEN 1 ELSE 0 END;
    END;
    IF @member = @mine
        RETURN 0;

    IF @member IS NULL
    BEGIN
        SELECT @stale = stale_after_ms FROM {schema}.resource WHERE resource_id = @resource;
        IF @stale IS NULL OR DATEADD(millisecond, CAST(@stale % 1000 AS int),
                                     DATEADD(second, CAST(@stale / 1000 AS int), @requested_at)) > SYSUTCDATETIME()
            RETURN 0;
        EXEC @code = {schema}.remove @resource, @position, N'reaped';
        RETURN CASE WHEN @code = 0 THEN 1 ELSE 0 END;
    END;

    SET @exists = NULL;
    SELECT @exists = 1, @grace = grace_ms FROM {schema}.member WHERE member_id = @member;
    IF @exists IS NULL
    BEGIN
        EXEC @code = {schema}.delete_member_rows @member, N'reaped';
        RETURN CASE WHEN @code > 0 THEN 1 ELSE 0 END;
    END;
    IF DATEADD(millisecond, @grace, @revoked_at) <= SYSUTCDATETIME()
    BEGIN
        EXEC @code = {schema}.check_origin;
        IF @code = 1
            RETURN 1;
        EXEC @code = {schema}.remove @resource, @position, N'revoked';
        RETURN CASE WHEN @code = 0 THEN 1 ELSE 0 END;
    END;
    EXEC @code = {schema}.check_liveness @member, @mine;
    RETURN @code;
END;

-- Test the owners of the first rows of a resource if their sessions look gone: of the first 32 rows, and of holders
-- among the first 256. (A dead owner further behind is tested when its row comes to the front.) Return 1 if something
-- was written.
CREATE OR ALTER PROCEDURE {schema}.reap_dead_members @resource nvarchar(255), @mine bigint AS {begin_inner}
    SET XACT_ABORT ON;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @position bigint = -1, @before bigint, @code int,
            @written int = 0, @tested int = 0, @looked int = 0, @gone int, @granted_at datetime2(6);
    SELECT @position = mark FROM {schema}.low_water_mark(@resource);
    WHILE @tested < 32 AND @looked < 256
    BEGIN
        SET @before = @position;
        -- One row at a time, so that the planner always uses the index.
        SELECT TOP (1) @position = queue_position, @granted_at = granted_at,
               @gone = CASE WHEN member_id = @mine AND waiter_lease_until IS NULL THEN 0
                            WHEN revoked_at IS NOT NULL OR (granted_at IS NULL AND waiter_lease_until < SYSUTCDATETIME()) THEN 1
                            ELSE APPLOCK_TEST(@principal, CONCAT(N'entry.sqlsem.{schema}.', queue_position), N'Shared',
                                              N'Session') END
        FROM {schema}.entry
        WHERE resource_id = @resource AND queue_position > @before
        ORDER BY queue_position;
        IF @position = @before OR (@looked >= 32 AND @granted_at IS NULL)
            BREAK;
        SET @looked = @looked + 1;
        IF @gone = 1
        BEGIN
            SET @tested = @tested + 1;
            EXEC @code = {schema}.check_if_dead @resource, @position, @mine;
            IF @code > 0
                SET @written = 1;
        END;
    END;
    RETURN @written;
END;

-- Raise for a grace or lease that is longer than an operator allows (settings max_grace and max_lease, in seconds). It
-- is not shortened silently: the client counts on the time that it asked for.
CREATE OR ALTER PROCEDURE {schema}.check_grace_or_lease @what nvarchar(10), @ms int AS {begin_inner}
    DECLARE @maximum float, @message nvarchar(1000);
    SELECT @maximum = TRY_CAST(value AS float) FROM {schema}.setting WHERE name = CONCAT(N'max_', @what);
    IF @ms > @maximum * 1000
        SET @message = CONCAT(N'sqlsem: a ', @what, N' of ', @ms / CAST(1000 AS float), N' s is longer than the ', @maximum,
            N' s that are allowed here (setting max_', @what, N'); ask for less');
    ELSE IF @ms < 0 OR (@what = N'lease' AND @ms = 0) OR (@what = N'grace' AND @ms IS NULL)
        SET @message = CONCAT(N'sqlsem: a ', @what, N' of ', COALESCE(CONVERT(nvarchar(20), @ms), N'NULL'), N' ms makes no sense');
    IF @message IS NOT NULL
        EXEC {schema}.raise_error 50000, @message;
END;

-- Take the next free beacon. (Usually the next number is free.)
CREATE OR ALTER PROCEDURE {schema}.take_beacon @beacon int OUTPUT, @name nvarchar(255) OUTPUT AS {begin_inner}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @code int = -1, @tries int = 0;
    WHILE @code < 0 AND @tries < 1000
    BEGIN
        SET @beacon = NEXT VALUE FOR {schema}.beacon;
        SET @name = CONCAT(N'beacon.sqlsem.{schema}.', @beacon);
        EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Session',
            @LockTimeout = 0, @DbPrincipal = @principal;
        SET @tries = @tries + 1;
    END;
    IF @code < 0
    BEGIN
        SET @name = NULL;
        THROW 50002, N'sqlsem: busy: no beacon could be taken, as another session holds the locks of a thousand', 1;
    END;
END;

-- Raise an error if the login has as many members as an operator allows (setting max_members).
CREATE OR ALTER PROCEDURE {schema}.check_members AS {begin_inner}
    DECLARE @maximum bigint, @count bigint, @message nvarchar(1000);
    SELECT @maximum = CAST(value AS bigint) FROM {schema}.setting WHERE name = N'max_members';
    SELECT @count = COUNT(*)
    FROM (SELECT TOP (COALESCE(@maximum, 0)) 1 AS one FROM {schema}.member WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) WHERE login = ORIGINAL_LOGIN()) AS m;
    IF @count >= @maximum
    BEGIN
        SET @message = CONCAT(N'sqlsem: login ', ORIGINAL_LOGIN(), N' has ', @maximum, N' members, and no more are allowed (setting max_members); ',
            N'an operator removes them: EXEC {schema}.revoke_members');
        EXEC {schema}.raise_error 50000, @message;
    END;
END;

-- Register a member, with its beacon (or its lease). Called once for each process, on its main connection.
CREATE OR ALTER PROCEDURE {schema}.register_member
    @host nvarchar(255), @pid int, @program nvarchar(255), @grace_ms int, @lease_ms int = NULL,
    @member bigint = NULL OUTPUT, @answer bit = 0 AS {begin_try}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    {outside:register_member}
    DECLARE @beacon int, @name nvarchar(255);
    EXEC {schema}.check_grace_or_lease N'grace', @grace_ms;
    EXEC {schema}.check_grace_or_lease N'lease', @lease_ms;
    EXEC {schema}.check_members;
    EXEC {schema}.escape_control_chars @host OUTPUT;
    EXEC {schema}.escape_control_chars @program OUTPUT;
    IF (SELECT known FROM {schema}.origin()) = 0
        EXEC {schema}.check_origin;
    BEGIN TRY
        IF @lease_ms IS NULL
            EXEC {schema}.take_beacon @beacon OUTPUT, @name OUTPUT;
        INSERT INTO {schema}.member (beacon, session_id, host, pid, program, grace_ms, lease_ms, lease_until)
        VALUES (@beacon, @@SPID, @host, @pid, @program, @grace_ms, @lease_ms,
                DATEADD(millisecond, @lease_ms, SYSUTCDATETIME()));
        SET @member = SCOPE_IDENTITY();
        -- The very first member may have met permissions.sql, which changes the principal only while there is no
        -- member.
        IF {schema}.lock_principal() <> @principal
        BEGIN
            DELETE FROM {schema}.member WHERE member_id = @member;
            THROW 50002, N'sqlsem: busy: the roles are just being made; try again', 1;
        END;
    END TRY
    BEGIN CATCH
        IF @name IS NOT NULL
            EXEC {schema}.release_session_lock @name;
        THROW;
    END CATCH;
    IF @answer = 1
        SELECT @member AS member_id;
{end_try_rollback_own}

-- Reattach a member to a new session: take a new beacon, and the wakeup locks of its rows. (The server may not have
-- ended the old session yet: that session's locks protect the member meanwhile.) Return 1, or 0 if the member was
-- removed.
CREATE OR ALTER PROCEDURE {schema}.reattach_member @member bigint, @answer bit = 0 AS {begin_try_own}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    {outside:reattach_member}
    DECLARE @lease int, @exists int, @beacon int, @code int, @name nvarchar(255), @position bigint = -1, @before bigint;
    IF (SELECT known FROM {schema}.origin()) = 0
        EXEC {schema}.check_origin;
    SELECT @exists = 1, @lease = lease_ms FROM {schema}.member WHERE member_id = @member AND login = ORIGINAL_LOGIN();
    IF @exists IS NULL
    BEGIN
        IF @answer = 1
            SELECT 0 AS known;
        RETURN 0;
    END;
    BEGIN TRY
        IF @lease IS NULL
            EXEC {schema}.take_beacon @beacon OUTPUT, @name OUTPUT;
        UPDATE {schema}.member
        SET beacon = @beacon, session_id = @@SPID, missing_since = NULL, heartbeat_at = SYSUTCDATETIME(),
            lease_until = DATEADD(millisecond, lease_ms, SYSUTCDATETIME())
        WHERE member_id = @member;
        SET @exists = @@ROWCOUNT;
    END TRY
    BEGIN CATCH
        IF @name IS NOT NULL
            EXEC {schema}.release_session_lock @name;
        {throw_if_busy}
        THROW;
    END CATCH;
    IF @exists = 0 AND @name IS NOT NULL  -- removed during this call
        EXEC {schema}.release_session_lock @name;
    WHILE @exists > 0 AND @lease IS NULL
    BEGIN
        SET @before = @position;
        SELECT TOP (1) @position = queue_position FROM {schema}.entry WITH (INDEX (entry_member))
        WHERE member_id = @member AND queue_position > @before ORDER BY queue_position;
        IF @position = @before
            BREAK;
        -- Wait for 50 ms only: until the server ends the old session, the old session's lock serves as well.
        SET @name = CONCAT(N'entry.sqlsem.{schema}.', @position);
        EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Session',
            @LockTimeout = 50, @DbPrincipal = @principal;
    END;
    IF @answer = 1
        SELECT CASE WHEN @exists > 0 THEN 1 ELSE 0 END AS known;
    RETURN CASE WHEN @exists > 0 THEN 1 ELSE 0 END;
{end_try_own}

-- Write a heartbeat of the member, which renews its lease and clears missing_since. Return one row for each of its rows
-- in the queue, or one without a queue_position if it has none; known is 0 if the member was removed. Raise if the
-- session changed under the member (a pool that hands connections out by the transaction).
CREATE OR ALTER PROCEDURE {schema}.heartbeat @member bigint AS {begin_try_own}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @exists int, @beacon int, @lease int, @name nvarchar(255);
    SELECT @exists = 1, @beacon = beacon, @lease = lease_ms
    FROM {schema}.member WHERE member_id = @member AND login = ORIGINAL_LOGIN()
    OPTION (KEEPFIXED PLAN);
    IF @exists = 1 AND @lease IS NULL
    BEGIN
        SET @name = CONCAT(N'beacon.sqlsem.{schema}.', @beacon);
        IF APPLOCK_MODE(@principal, @name, N'Session') <> N'Exclusive'
            THROW 50003, N'sqlsem: this connection changed sessions under its member (a connection pool?); connect past the pool, or with a lease', 1;
    END;
    IF @exists = 1
    BEGIN
        BEGIN TRANSACTION;
        UPDATE {schema}.member
        SET heartbeat_at = SYSUTCDATETIME(), lease_until = DATEADD(millisecond, lease_ms, SYSUTCDATETIME()), missing_since = NULL
        WHERE member_id = @member
        OPTION (KEEPFIXED PLAN);
        SET @exists = @@ROWCOUNT;
        -- A crash of the server may undo a heartbeat if the member has a beacon, as its grace then begins anew. It must
        -- not undo the renewal of a lease.
        IF @lease IS NULL AND @@VERSION LIKE N'Microsoft SQL %'
            COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);
        ELSE
            COMMIT TRANSACTION;
    END;
    IF @exists = 1
        SELECT 1 AS known, t.queue_position, CASE WHEN t.revoked_at IS NULL THEN 0 ELSE 1 END AS revoked
        FROM (SELECT 1 AS one) AS o LEFT JOIN {schema}.entry AS t WITH (INDEX (entry_member)) ON t.member_id = @member
        OPTION (KEEPFIXED PLAN);
    ELSE
        SELECT 0 AS known, CAST(NULL AS bigint) AS queue_position, 0 AS revoked;
{end_try_own}

-- Remove the member, and all rows that it still has.
CREATE OR ALTER PROCEDURE {schema}.deregister_member @member bigint AS {begin_try}
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @beacon int, @name nvarchar(255), @host nvarchar(255), @pid int, @program nvarchar(255), @login nvarchar(128);
    SELECT @beacon = beacon, @host = host, @pid = pid, @program = program, @login = login
    FROM {schema}.member WHERE member_id = @member AND login = ORIGINAL_LOGIN();
    IF @@ROWCOUNT = 0
        RETURN;
    BEGIN TRANSACTION;
    DELETE FROM {schema}.member WHERE member_id = @member;
    EXEC {schema}.delete_member_rows @member, N'released', @host, @pid, @program, @login;
    COMMIT TRANSACTION;
    -- Release the beacon after the commit, not before.
    SET @name = CONCAT(N'beacon.sqlsem.{schema}.', @beacon);
    IF @beacon IS NOT NULL
        EXEC {schema}.release_session_lock @name;
{end_try_rollback_own}

-- Raise for an invalid request. The owner's name is only for displays, so its control characters are replaced. A
-- request may name no limit if an operator has set one for the resource; that limit then cannot be removed before the
-- transaction ends.
CREATE OR ALTER PROCEDURE {schema}.check_registration
    @requesting_id nvarchar(255), @owner nvarchar(255) OUTPUT, @resource nvarchar(400), @access nvarchar(100), @limit int,
    @weight int, @known int AS {begin_inner}
    DECLARE @message nvarchar(1000);
    IF @known IS NULL
        THROW 50005, N'sqlsem: this member is not known here (any more), or belongs to another login; register again', 1;
    IF COALESCE(@resource, N'') = N'' OR DATALENGTH(@resource) > 510 OR DATALENGTH(@access) > 128
       OR DATALENGTH(@resource) <> DATALENGTH(LTRIM(RTRIM(@resource))) OR COALESCE(@weight, 0) < 1 OR @limit < @weight
       OR @access IS NULL OR @requesting_id IS NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: bad request: resource ''', @resource, N''', access type ', COALESCE(N'''' + @access + N'''', N'NULL'),
            N', requesting_id ', COALESCE(N'''' + @requesting_id + N'''', N'NULL'), N', limit ', @limit, N', weight ', @weight,
            N'; a name has 1 to 255 characters and no blanks around it, and 1 <= weight <= limit');
        EXEC {schema}.raise_error 50000, @message;
    END;
    IF CONCAT(@resource, @access, @requesting_id) COLLATE Latin1_General_100_BIN2
       LIKE CONCAT(N'%[', NCHAR(1), N'-', NCHAR(31), NCHAR(127), N'-', NCHAR(159), N']%')
        THROW 50000, N'sqlsem: bad request: a name, an id or an access type contains a control character; use printable text', 1;
    IF @access LIKE N'upgrade%'
        THROW 50000, N'sqlsem: bad request: the access type ''upgrade'' is that of a reader which becomes the writer; ask for read first', 1;
    IF @limit IS NULL
    BEGIN
        DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @code int, @limits nvarchar(255) = N'limits.sqlsem.{schema}';
        EXEC @code = sys.sp_getapplock @Resource = @limits, @LockMode = N'Shared', @LockOwner = N'Transaction', @LockTimeout = 10000,
            @DbPrincipal = @principal;
        IF @code < 0
            THROW 50002, N'sqlsem: busy: another session sets a limit in an open transaction', 1;
        IF NOT EXISTS (SELECT 1 FROM {schema}.effective_settings(@resource) WHERE cap IS NOT NULL)
        BEGIN
            SET @message = CONCAT(N'sqlsem: no limit is set for ''', @resource, N''', and the request names none; an operator sets one ',
                N'with: sqlsem set ', @resource, N' --limit N --allow-new, or EXEC {schema}.set_limit, also for a pattern (''tenant:*''); or name a limit');
            EXEC {schema}.raise_error 50008, @message;
        END;
    END;
    EXEC {schema}.escape_control_chars @owner OUTPUT;
END;

-- Raise for a request without a priority, on a resource that has priorities.
CREATE OR ALTER PROCEDURE {schema}.require_priority @resource nvarchar(255) AS {begin_inner}
    DECLARE @message nvarchar(1000) = CONCAT(N'sqlsem: no priority is named for ''', @resource, N''', which is granted by priority; ',
        N'name one (@priority = 0 to 99), or have an operator end that: sqlsem set ', @resource, N' --no-priorities');
    EXEC {schema}.raise_error 50009, @message;
END;

-- Raise the low-water mark of a resource up to its first row, or create the mark. Called now and then under the gate,
-- so that no two sessions create it. (The release of an exclusive holder raises the mark itself, to its own row.)
CREATE OR ALTER PROCEDURE {schema}.advance_low_water_mark @resource nvarchar(255)
AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    DECLARE @mark bigint = 0;
    SELECT TOP (1) @mark = t.queue_position - 1
    FROM {schema}.low_water_mark(@resource) AS f
    JOIN {schema}.entry AS t WITH (READCOMMITTEDLOCK, ROWLOCK) ON t.resource_id = @resource AND t.queue_position > f.mark
    ORDER BY t.queue_position;
    UPDATE {schema}.low_water SET mark = @mark, raised_at = SYSUTCDATETIME() WHERE resource_id = @resource AND mark < @mark;
    IF @@ROWCOUNT = 0
        INSERT INTO {schema}.low_water (resource_id, mark)
        SELECT @resource, @mark
        WHERE NOT EXISTS (SELECT 1 FROM {schema}.low_water WITH (READCOMMITTEDLOCK, ROWLOCK) WHERE resource_id = @resource);
END;

-- Register a request, in one transaction: gate, rule, insert, wakeup lock. A request that is not blocked is granted at
-- once. With @try a blocked request is not inserted, and queue_position is NULL. A second call with the same @uid (its
-- first reply was lost) finds the row of the first. @attended_ms: the waiter lease of the row; without, it has none.
-- Inside a transaction only callers that have the gate may call this: register_all, and acquire_by_priority, which sets
-- @ranked and is the only caller that may register on a resource with priorities.
-- Every statement counts here: on some engines each of them, above all a call, costs as much as an access to a table.
-- So everything but the usual case (a valid request, of a member with a recent heartbeat, for a resource without rows)
-- is behind one IF.
-- @looked: 1 in the recursive call, after the removal of a dead owner.
CREATE OR ALTER PROCEDURE {schema}.register
    @member bigint, @requesting_id nvarchar(255), @owner nvarchar(255), @uid nvarchar(80), @try bit,
    @resource nvarchar(400), @access nvarchar(100) = N'write', @limit int = 1, @weight int = 1,
    @note nvarchar(1000) = NULL, @patience int = 1000, @position bigint = NULL OUTPUT, @granted bit = NULL OUTPUT,
    @answer bit = 0, @attended_ms int = NULL, @ranked bit = 0, @looked bit = 0
AS
BEGIN
    SET NOCOUNT, XACT_ABORT ON;
    SET ROWCOUNT 0;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    -- (A name that is too long for the gate's name is cut off.)
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @inside int = @@TRANCOUNT,
            @gate nvarchar(255) = LEFT(N'gate.sqlsem.{schema}.' + COALESCE(@resource, N''), 255), @entry nvarchar(255), @code int, @known int,
            @lock_owner varchar(20), @due int, @mine bigint, @behind bigint, @marks bit,
            -- 1 if there is an open transaction, and it does not have the gate. (In one CASE, as the second test may
            -- raise an error outside of a transaction.)
            @foreign bit = CASE WHEN @@TRANCOUNT = 0 THEN 0
                                WHEN APPLOCK_MODE({schema}.lock_principal(), LEFT(N'gate.sqlsem.{schema}.' + COALESCE(@resource, N''), 255), N'Transaction')
                                     = N'Exclusive' THEN 0 ELSE 1 END,
            -- 1 if the request is valid at first sight. (Names of one character, or with other characters than ASCII,
            -- are checked further.)
            @plain bit = CASE WHEN @limit IS NULL OR COALESCE(@weight, 0) < 1 OR @limit < @weight OR @access IS NULL OR @requesting_id IS NULL
                                   OR DATALENGTH(@resource) > 510 OR DATALENGTH(@access) > 128 OR @access LIKE N'upgrade%'
                                   OR COALESCE(@resource, N'') COLLATE Latin1_General_100_BIN2 NOT LIKE N'[!-~]%[!-~]'
                                   OR CONCAT(@resource, @access, @requesting_id, @owner) COLLATE Latin1_General_100_BIN2
                                      LIKE N'%[^ -~]%' THEN 0 ELSE 1 END;
    BEGIN TRY
        BEGIN TRANSACTION;
        EXEC @code = sys.sp_getapplock @gate, N'Exclusive', N'Transaction', @patience, @principal;
        -- The wakeup lock belongs to the session. But if the member lives by a lease, other members may use the
        -- session, too: then the lock ends with this transaction, before any other session sees it.
        SELECT @known = 1, @lock_owner = CASE WHEN m.lease_ms IS NULL THEN N'Session' ELSE N'Transaction' END, @position = NULL,
               -- (The test of touch_member, so that the usual case saves a call.)
               @due = CASE WHEN COALESCE(m.lease_ms, m.grace_ms) > 0
                            AND DATEDIFF_BIG(millisecond, m.heartbeat_at, SYSUTCDATETIME()) > COALESCE(m.lease_ms, m.grace_ms) / 8
                           THEN 1 ELSE 0 END,
               @granted = CASE WHEN EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK, ROWLOCK)
                                            WHERE resource_id = @resource AND queue_position > f.mark)
                                 OR EXISTS (SELECT 1 FROM {schema}.resource WHERE resource_id IN (@resource, N'*'))
                               THEN 0 ELSE 1 END,
               @behind = f.mark, @marks = CASE WHEN f.mark = 0 AND RAND() < 0.03 THEN 1 ELSE 0 END
        FROM {schema}.member AS m CROSS JOIN {schema}.low_water_mark(@resource) AS f
        WHERE m.member_id = @member AND m.login = ORIGINAL_LOGIN()
        OPTION (KEEPFIXED PLAN);
        IF @code < 0 OR @foreign = 1 OR @known IS NULL OR @granted = 0 OR @due = 1 OR @plain = 0 OR @marks = 1
        BEGIN
            IF @foreign = 1
                THROW 50001, N'sqlsem: register must not be called inside an open transaction; commit first and use autocommit', 1;
            IF @code < 0
                THROW 50002, N'sqlsem: busy: another session keeps the gate of this resource in an open transaction', 1;
            IF @due = 1
            BEGIN
                UPDATE {schema}.member
                SET heartbeat_at = SYSUTCDATETIME(), lease_until = DATEADD(millisecond, lease_ms, SYSUTCDATETIME())
                WHERE member_id = @member
                OPTION (KEEPFIXED PLAN);
                IF @@ROWCOUNT = 0
                    SET @known = NULL;
            END;
            IF @known IS NULL OR @plain = 0
                EXEC {schema}.check_registration @requesting_id, @owner OUTPUT, @resource, @access, @limit, @weight, @known;
            IF @granted = 0
            BEGIN
                IF @ranked = 0 AND EXISTS (SELECT 1 FROM {schema}.resource WHERE resource_id = @resource AND ageing_ms IS NOT NULL)
                    EXEC {schema}.require_priority @resource;
                -- (@behind: with 'leave' and 'write' the blocker is the last row ahead. Not for several requests in one
                -- call.)
                SELECT @granted = eligible, @mine = mine,
                       @behind = CASE WHEN until = N'leave' AND @access = N'write' AND @inside = 0 THEN blocker END,
                       @marks = CASE WHEN RAND() < 0.03 THEN 1 ELSE 0 END
                FROM {schema}.eligibility(@resource, 9223372036854775807, @access, @limit, @weight, @uid)
                OPTION (KEEPFIXED PLAN);
                IF @mine IS NOT NULL  -- (if it is another owner's row, the insert will fail)
                    SELECT @position = queue_position, @granted = CASE WHEN granted_at IS NULL OR revoked_at IS NOT NULL THEN 0 ELSE 1 END
                    FROM {schema}.entry WHERE resource_id = @resource AND queue_position = @mine AND member_id = @member
                    OPTION (KEEPFIXED PLAN);
            END;
            IF @position IS NOT NULL OR (@granted = 0 AND @try = 1)
            BEGIN
                COMMIT TRANSACTION;
                -- No room: test the owners ahead, and try once more. Not under the gate: two sessions that each remove
                -- a dead member might wait for each other.
                IF @position IS NULL AND @inside = 0 AND @looked = 0
                BEGIN
                    EXEC @code = {schema}.reap_dead_members @resource, @member;
                    IF @code > 0
                    BEGIN
                        EXEC {schema}.register @member, @requesting_id, @owner, @uid, @try, @resource, @access, @limit, @weight, @note,
                            @patience, @position OUTPUT, @granted OUTPUT, @answer, @attended_ms, @ranked, 1;
                        RETURN 0;
                    END;
                END;
                IF @answer = 1
                    SELECT @position AS queue_position, @granted AS granted;
                RETURN 0;
            END;
            IF @marks = 1
                EXEC {schema}.advance_low_water_mark @resource;
        END;
        -- (granted_at is taken after the rule was applied, so that the history shows the grant after the releases
        -- ahead.)
        INSERT INTO {schema}.entry (resource_id, requesting_id, access_type, concurrency_limit, weight, member_id,
                                    owner, request_uid, requested_at, granted_at, note, waiter_lease_until, behind)
        VALUES (@resource, @requesting_id, @access, @limit, @weight, @member,
                @owner, COALESCE(@uid, CONVERT(nvarchar(64), NEWID())), SYSUTCDATETIME(),
                CASE WHEN @granted = 1 THEN SYSUTCDATETIME() END, @note,
                CASE WHEN @attended_ms IS NOT NULL THEN DATEADD(millisecond, @attended_ms, SYSUTCDATETIME()) END, @behind);
        SELECT @position = SCOPE_IDENTITY(), @entry = CONCAT(N'entry.sqlsem.{schema}.', CAST(SCOPE_IDENTITY() AS bigint));
        -- (Another session has this lock only in order to block: then the waiters behind poll.)
        EXEC @code = sys.sp_getapplock @entry, N'Exclusive', @lock_owner, 0, @principal;
        COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        IF @inside > 0
            THROW;
        {rollback}
        IF @entry IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM {schema}.entry WHERE resource_id = @resource AND queue_position = @position)
            EXEC {schema}.release_session_lock @entry;
        {throw_if_busy}
        -- (entry_behind_check: the new number is below the number of a row ahead.)
        IF ERROR_NUMBER() <> 547 OR ERROR_MESSAGE() NOT LIKE N'%entry_behind_check%'
            THROW;
        DELETE FROM {schema}.low_water WHERE resource_id = @resource
        OPTION (KEEPFIXED PLAN);
        THROW 50002, N'sqlsem: busy: the numbers of the queue went back (DBCC CHECKIDENT, or rows that were inserted by hand), so this request would not be behind earlier ones; try again when they have left', 1;
    END CATCH;
    IF @answer = 1
        SELECT @position AS queue_position, @granted AS granted;
END;

-- Register several requests at once: all gates in one order, then all rows, in one transaction. So two such calls can
-- never wait for each other. @requests: [{"resource": ..., "access": ..., "limit": ..., "weight": ..., "note": ...},
-- ...], each resource once. Needs compatibility level 130 or later.
CREATE OR ALTER PROCEDURE {schema}.register_all
    @member bigint, @requesting_id nvarchar(255), @owner nvarchar(255), @uid nvarchar(60), @try bit, @requests nvarchar(max),
    @patience int = 1000 AS {begin}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    {outside:register_all}
    DECLARE @request_rows TABLE (ordinal int NOT NULL PRIMARY KEY, resource_id nvarchar(400), access_type nvarchar(100),
                          gate nvarchar(255) COLLATE Latin1_General_100_BIN2,
                          concurrency_limit int, weight int, note nvarchar(1000), queue_position bigint, granted bit);
    DECLARE @ordinal int = 0, @maximum int, @gate nvarchar(255), @position bigint, @granted bit, @code int, @free int = 1,
            @name nvarchar(255), @request_uid nvarchar(80), @resource nvarchar(400), @access nvarchar(100), @limit int,
            @weight int, @note nvarchar(1000), @taken nvarchar(max) = N'', @tried int = 0, @again int = 1;
    SET @uid = COALESCE(@uid, CONVERT(nvarchar(60), NEWID()));
    INSERT INTO @request_rows (ordinal, resource_id, gate, access_type, concurrency_limit, weight, note)
    SELECT CAST(j.[key] AS int) + 1, r.a_resource, LEFT(CONCAT(N'gate.sqlsem.{schema}.', r.a_resource), 255),
           r.an_access, r.a_limit, r.a_weight, r.a_note
    FROM OPENJSON(@requests) AS j
    CROSS APPLY OPENJSON(j.value) WITH (a_resource nvarchar(400) '$.resource', an_access nvarchar(100) '$.access',
        a_limit int '$.limit', a_weight int '$.weight', a_note nvarchar(1000) '$.note') AS r;
    SELECT @maximum = COUNT(*) FROM @request_rows;
    BEGIN TRY
        EXEC @code = {schema}.touch_member @member;
        IF @code = 0
            THROW 50005, N'sqlsem: this member is not known here (any more), or belongs to another login; register again', 1;
        WHILE @again = 1
        BEGIN
            SET @again = 0;
            SET @ordinal = 0;
            SET @free = 1;
            BEGIN TRANSACTION;
            -- All gates, in one order. (If the names of gates are so long that they are cut off, resources may share a
            -- gate, which does no harm.)
            SELECT @gate = MIN(gate) FROM @request_rows;
            WHILE @gate IS NOT NULL
            BEGIN
                EXEC @code = sys.sp_getapplock @Resource = @gate, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
                    @LockTimeout = @patience, @DbPrincipal = @principal;
                IF @code < 0
                    THROW 50002, N'sqlsem: busy: another session keeps the gate of a resource in an open transaction', 1;
                SELECT @gate = MIN(gate) FROM @request_rows WHERE gate > @gate;
            END;
            SET @request_uid = CONCAT(@uid, N'.1');
            IF @try = 1 AND NOT EXISTS (SELECT 1 FROM {schema}.entry WHERE request_uid = @request_uid)
            BEGIN
                SET @resource = NULL;
                SELECT TOP (1) @resource = a.resource_id, @access = a.access_type, @weight = a.weight
                FROM @request_rows AS a CROSS APPLY {schema}.effective_settings(a.resource_id) AS o
                WHERE a.concurrency_limit IS NULL AND o.cap IS NULL ORDER BY a.ordinal;
                IF @resource IS NOT NULL
                    EXEC {schema}.check_registration @requesting_id, @owner OUTPUT, @resource, @access, NULL, @weight, 1;
                WHILE @ordinal < @maximum AND @free = 1
                BEGIN
                    SET @ordinal = @ordinal + 1;
                    SELECT @resource = resource_id, @access = access_type, @limit = concurrency_limit, @weight = weight
                    FROM @request_rows WHERE ordinal = @ordinal;
                    SELECT @free = eligible
                    FROM {schema}.eligibility(@resource, 9223372036854775807, @access, @limit, @weight, NULL);
                END;
            END;
            IF @free = 0
            BEGIN
                COMMIT TRANSACTION;
                IF @ordinal > @tried  -- once for each request, as in register
                BEGIN
                    SET @tried = @ordinal;
                    EXEC @again = {schema}.reap_dead_members @resource, @member;
                END;
            END;
        END;
        SET @ordinal = 0;
        WHILE @ordinal < @maximum AND @free = 1
        BEGIN
            SET @ordinal = @ordinal + 1;
            SET @request_uid = CONCAT(@uid, N'.', @ordinal);
            SELECT @resource = resource_id, @access = access_type, @limit = concurrency_limit, @weight = weight, @note = note
            FROM @request_rows WHERE ordinal = @ordinal;
            SET @position = NULL;
            EXEC {schema}.register @member, @requesting_id, @owner, @request_uid, 0, @resource, @access, @limit, @weight, @note, 0,
                @position OUTPUT, @granted OUTPUT;
            SET @taken = CONCAT(@taken, @position, N',');
            UPDATE @request_rows SET queue_position = @position, granted = @granted WHERE ordinal = @ordinal;
        END;
        IF @free = 1
            COMMIT TRANSACTION;
    END TRY
    BEGIN CATCH
        {rollback}
        IF @position IS NOT NULL
            SET @taken = CONCAT(@taken, @position, N',');
        WHILE CHARINDEX(N',', @taken) > 0
        BEGIN
            SET @position = CAST(LEFT(@taken, CHARINDEX(N',', @taken) - 1) AS bigint);
            SET @taken = SUBSTRING(@taken, CHARINDEX(N',', @taken) + 1, 2147483647);
            SET @name = CONCAT(N'entry.sqlsem.{schema}.', @position);
            IF NOT EXISTS (SELECT 1 FROM {schema}.entry WHERE queue_position = @position)
                EXEC {schema}.release_session_lock @name;
        END;
        {throw_if_busy}
        THROW;
    END CATCH;
    SELECT resource_id, queue_position, granted FROM @request_rows WHERE queue_position IS NOT NULL ORDER BY ordinal;
END;

-- Return the milliseconds until the next poll of a waiter that may not be woken by a lock. The pause is as long as the
-- time since something last changed ahead of it, but 40 at least and 800 at most. One waiter behind it halves the
-- pause, three or more quarter it. So the first polls come soon, and later a waiting session polls at most twice a
-- second on average.
CREATE OR ALTER PROCEDURE {schema}.poll_pause @resource nvarchar(255), @position bigint, @requested_at datetime2(6)
AS {begin_inner}
    DECLARE @behind int, @still_ms bigint, @since datetime2(6) = @requested_at;
    -- (The last row ahead was granted last.)
    SELECT TOP (1) @since = CASE WHEN granted_at > @requested_at THEN granted_at ELSE @requested_at END
    FROM {schema}.entry WITH (READCOMMITTEDLOCK, READPAST, ROWLOCK)
    WHERE resource_id = @resource AND queue_position < @position ORDER BY queue_position DESC;
    SELECT @behind = COUNT(*)
    FROM (SELECT TOP (3) queue_position FROM {schema}.entry WITH (READCOMMITTEDLOCK, READPAST, ROWLOCK)
          WHERE resource_id = @resource AND queue_position > @position ORDER BY queue_position) AS b;
    SET @still_ms = DATEDIFF_BIG(millisecond, @since, SYSUTCDATETIME());
    RETURN (CASE WHEN @still_ms < 40 THEN 40 WHEN @still_ms > 800 THEN 800 ELSE @still_ms END) / (1 + @behind);
END;

-- Take one of the slots in which sessions may wait on the server, until the caller's transaction ends. Return 0, or -1
-- if none of the tried slots is free. Each waiting session occupies a worker thread of the server, which has some
-- hundreds; without a free one, no session could release a lock. So setting max_server_waiters is the number of slots.
CREATE OR ALTER PROCEDURE {schema}.take_waiter_slot AS {begin_inner}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @code int = -1, @tried int = 0, @name nvarchar(255),
            @slots int = (SELECT TRY_CAST(value AS int) FROM {schema}.setting WHERE name = N'max_server_waiters');
    IF @slots IS NULL
        RETURN 0;
    -- (The server numbers its sessions without gaps, so most sessions find a free slot at their own number.)
    WHILE @code < 0 AND @tried < 8 AND @tried < @slots
    BEGIN
        SET @name = CONCAT(N'slot.sqlsem.{schema}.', (@@SPID + @tried) % @slots);
        IF APPLOCK_TEST(@principal, @name, N'Exclusive', N'Transaction') = 1
            EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
                @LockTimeout = 0, @DbPrincipal = @principal;
        SET @tried = @tried + 1;
    END;
    RETURN CASE WHEN @code >= 0 THEN 0 ELSE -1 END;
END;

-- Wait up to @timeout_ms for the grant of a row. Wherever there is a lock to wait for, sleep in the engine's queue of
-- that lock, and poll otherwise. Return:
--   0  granted          -1  not yet (may come early: sleep a little, then call again)
--   1  call again at once
--   2  the maximum number of sessions waits here (take_waiter_slot): wait in the client for 0.25 to 1 s, and call again
--  -2  the row is gone: cancelled, reaped or revoked
--  -3  the engine found a deadlock of sessions and chose this one
CREATE OR ALTER PROCEDURE {schema}.wait @resource nvarchar(255), @position bigint, @timeout_ms int, @answer bit = 0
AS {begin_try}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    {outside:wait}
    DECLARE @deadline datetime2(6) = DATEADD(millisecond, @timeout_ms, SYSUTCDATETIME());
    DECLARE @result int, @code int, @exists int, @access nvarchar(64), @limit int, @weight int, @member bigint,
            @granted_at datetime2(6), @revoked_at datetime2(6), @eligible int, @blocker bigint, @until nvarchar(10),
            @left int, @pause float, @waiting int = 0, @heartbeat_due_at datetime2(6), @name nvarchar(255),
            @unheld nvarchar(255), @waiting_name nvarchar(255), @requested_at datetime2(6), @slice int, @slot int,
            @tested_at datetime2(6) = SYSUTCDATETIME();
    SELECT @exists = 1, @requested_at = t.requested_at, @access = t.access_type, @limit = t.concurrency_limit, @weight = t.weight, @member = t.member_id,
           @granted_at = t.granted_at, @revoked_at = t.revoked_at,
           @heartbeat_due_at = CASE WHEN COALESCE(m.lease_ms, m.grace_ms) > 0
                           THEN DATEADD(millisecond, COALESCE(m.lease_ms, m.grace_ms) / 8, m.heartbeat_at) END
    FROM {schema}.entry AS t JOIN {schema}.member AS m ON m.member_id = t.member_id AND m.login = ORIGINAL_LOGIN()
    WHERE t.resource_id = @resource AND t.queue_position = @position
    OPTION (KEEPFIXED PLAN);
    IF @exists IS NULL OR @revoked_at IS NOT NULL
        SET @result = -2;
    ELSE IF @granted_at IS NOT NULL
        SET @result = 0;
    BEGIN TRY
        WHILE @result IS NULL
        BEGIN
            -- (Skipped if the lock to wait for was free at once: nothing has changed since the last pass.)
            IF @unheld IS NULL OR @until = N'grant'
                SELECT @eligible = a.eligible, @blocker = a.blocker, @until = a.until,
                       @granted_at = (SELECT CASE WHEN t.revoked_at IS NULL THEN t.granted_at END
                                      FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK, ROWLOCK)
                                      WHERE t.resource_id = @resource AND t.queue_position = @position)
                FROM {schema}.eligibility(@resource, @position, @access, @limit, @weight, NULL) AS a
                OPTION (KEEPFIXED PLAN);
            IF @granted_at IS NOT NULL
            BEGIN
                SET @result = 0;  -- granted by the release of the row ahead, or by a reader ahead that upgrades (conversions.sql)
                BREAK;
            END;
            IF @eligible = 1
            BEGIN
                -- For a reader the rule is applied twice, as it reads row after row. After it has read a reader ahead,
                -- that one may begin to upgrade (conversions.sql), because of a row further behind; and that row may
                -- leave before the rule reads it. So one pass could miss both.
                UPDATE {schema}.entry SET granted_at = SYSUTCDATETIME()
                WHERE resource_id = @resource AND queue_position = @position AND revoked_at IS NULL
                  AND (@access <> N'read'
                       OR (SELECT a.eligible FROM {schema}.eligibility(@resource, @position, @access, @limit, @weight, NULL) AS a) = 1)
                OPTION (KEEPFIXED PLAN);
                IF @@ROWCOUNT > 0
                    SET @result = 0;
                ELSE IF @access <> N'read'
                     OR NOT EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                                    WHERE resource_id = @resource AND queue_position = @position AND revoked_at IS NULL)
                    SET @result = -2;
                CONTINUE;
            END;
            SET @left = DATEDIFF(millisecond, SYSUTCDATETIME(), @deadline);
            IF @left <= 0
            BEGIN
                -- At the end of each call test the owners of the first rows, too: any of them may have died.
                EXEC @code = {schema}.reap_dead_members @resource, @member;
                SET @result = CASE WHEN @code = 1 THEN 1 ELSE -1 END;
                BREAK;
            END;
            SET @name = CONCAT(CASE @until WHEN N'grant' THEN N'waiting.sqlsem.{schema}.' ELSE N'entry.sqlsem.{schema}.' END,
                               @blocker);
            IF @blocker IS NULL OR @name = @unheld
            BEGIN
                -- No lock to wait for. An operator has paused the resource; or the lock was free although the blocker's
                -- row exists: its owner has no session (a lease, a bare participant), or has died, or has just released
                -- it.
                IF @blocker IS NOT NULL
                    EXEC @code = {schema}.check_if_dead @resource, @blocker, @member;
                IF @blocker IS NULL OR @code = 0
                BEGIN
                    EXEC @slice = {schema}.poll_pause @resource, @position, @requested_at;
                    SET @pause = @slice;
                    BEGIN TRANSACTION;
                    EXEC @slot = {schema}.take_waiter_slot;
                    IF @slot = 0
                        EXEC @code = {schema}.backoff_sleep @position, @left, @pause OUTPUT;
                    COMMIT TRANSACTION;
                    IF @slot < 0
                        SET @result = 2;
                    ELSE IF @code < 0
                        SET @result = -1;
                END;
                SET @unheld = NULL;
                CONTINUE;
            END;
            IF @until <> N'leave' AND @waiting = 0
            BEGIN
                -- Take the lock on which the waiters behind sleep until this row is granted.
                SET @waiting_name = CONCAT(N'waiting.sqlsem.{schema}.', @position);
                EXEC @code = sys.sp_getapplock @Resource = @waiting_name, @LockMode = N'Exclusive', @LockOwner = N'Session',
                    @LockTimeout = 0, @DbPrincipal = @principal;
                IF @code >= 0
                    SET @waiting = 1;
            END;
            IF @until = N'any'
            BEGIN
                -- A session can wait for one lock only: for that of the oldest holder. If another holder leaves first,
                -- the next poll finds that out.
                IF DATEDIFF_BIG(millisecond, @tested_at, SYSUTCDATETIME()) > 500
                BEGIN
                    EXEC @code = {schema}.reap_dead_members @resource, @member;
                    SET @tested_at = SYSUTCDATETIME();
                    IF @code = 1
                        CONTINUE;
                END;
                EXEC @slice = {schema}.poll_pause @resource, @position, @requested_at;
                SET @left = CASE WHEN @left < @slice THEN @left ELSE @slice END;
            END;
            -- The session sleeps here. (The lock is taken to the end of a short transaction, which releases it. No call
            -- of wait_until_lock_free: the waiters behind depend on how soon this session goes on.)
            BEGIN TRANSACTION;
            EXEC @slot = {schema}.take_waiter_slot;
            IF @slot < 0
            BEGIN
                COMMIT TRANSACTION;
                SET @result = 2;
                BREAK;
            END;
            EXEC @code = sys.sp_getapplock @name, N'Shared', N'Transaction', @left, @principal;
            -- The usual end of a wait: the release of the blocker has granted the row. Otherwise test and grant in one
            -- statement: if there are no rows ahead, and no settings of an operator, there is room. The next pass of
            -- the loop handles any other case.
            IF @code >= 0 AND @until = N'leave' AND @access <> N'read'
            BEGIN
                SELECT @result = 0 FROM {schema}.entry WITH (READCOMMITTEDLOCK, ROWLOCK)
                WHERE resource_id = @resource AND queue_position = @position AND granted_at IS NOT NULL AND revoked_at IS NULL
                OPTION (KEEPFIXED PLAN);
                IF @result IS NULL
                BEGIN
                    UPDATE {schema}.entry SET granted_at = SYSUTCDATETIME()
                    WHERE resource_id = @resource AND queue_position = @position AND revoked_at IS NULL
                      AND NOT EXISTS (SELECT 1 FROM {schema}.low_water_mark(@resource) AS f
                                      JOIN {schema}.entry AS t WITH (READCOMMITTEDLOCK, ROWLOCK)
                                          ON t.resource_id = @resource AND t.queue_position > f.mark AND t.queue_position < @position)
                      AND NOT EXISTS (SELECT 1 FROM {schema}.resource AS o WHERE o.resource_id IN (@resource, N'*'))
                    OPTION (KEEPFIXED PLAN);
                    IF @@ROWCOUNT > 0
                        SET @result = 0;
                END;
            END;
            -- (A crash of the server may undo granted_at: see docs/explanation/guarantees.md. Readers do not come here.)
            IF @result = 0 AND @@VERSION LIKE N'Microsoft SQL %'
                COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);
            ELSE
                COMMIT TRANSACTION;
            IF @result = 0
                BREAK;
            IF @code >= 0
                SET @unheld = CASE WHEN @code = 0 OR @until = N'grant' THEN @name END;  -- (0: it was free; 1: after a wait)
            ELSE IF @code = -3 AND @until <> N'any'  -- a deadlock of sessions; with 'any' another holder may still leave
                SET @result = -3;
            ELSE IF @code = -2  -- the engine ended the wait; the client has to sleep
                SET @result = -1;
        END;
    END TRY
    BEGIN CATCH
        {rollback}
        IF @waiting = 1
            EXEC {schema}.release_session_lock @waiting_name;
        -- An open transaction has locked a row, or sessions have locked rows in different orders: return "not yet".
        IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222)
            THROW;
        SET @result = -1;
        SET @waiting = 0;
    END CATCH;
    IF @waiting = 1
        EXEC {schema}.release_session_lock @waiting_name;
    IF @result = 0 AND @heartbeat_due_at < SYSUTCDATETIME()
    BEGIN
        -- A member is removed together with its rows. So the grant is valid if the member exists and has a recent
        -- heartbeat.
        EXEC @exists = {schema}.touch_member @member;
        IF @exists = 0
            SET @result = -2;
    END;
    {answer:@result,code}
{end_try_rollback_own}

-- Poll many rows of one member in one call, as wait with @timeout_ms = 0 polls one. @positions: a JSON array of
-- numbers. Return a row for each that is granted (granted 1), and for each that is gone, revoked or another member's
-- (granted 0); rows that still wait are left out. Of rows with the same request, none can be granted before the first.
-- So the rule is applied to the first one, if that is eligible to two more, then to four.
CREATE OR ALTER PROCEDURE {schema}.poll_waiters @member bigint, @positions nvarchar(max) AS {begin_try_own}
    {outside:poll_waiters}
    -- answer: 0 waits, 1 granted, 2 waits and is not checked again, -2 gone
    DECLARE @waiters TABLE (queue_position bigint NOT NULL PRIMARY KEY,
                          resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NULL,
                          access_type nvarchar(64) COLLATE Latin1_General_100_BIN2 NULL, concurrency_limit int NULL,
                          weight int NULL, answer int NULL);
    DECLARE @eligible_rows TABLE (queue_position bigint NOT NULL PRIMARY KEY);
    DECLARE @tested TABLE (resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY);
    DECLARE @width int = 1, @heads_tested int = 0, @found int, @more int, @code int, @granted int = 0, @position bigint, @resource nvarchar(255),
            @access nvarchar(64), @limit int, @weight int;
    -- Look the rows up by their numbers, in one index alone: see revoke.
    INSERT INTO @waiters (queue_position, resource_id)
    SELECT j.queue_position, t.resource_id
    FROM (SELECT DISTINCT CAST(o.value AS bigint) AS queue_position FROM OPENJSON(@positions) AS o) AS j
    LEFT JOIN {schema}.entry AS t WITH (READCOMMITTEDLOCK, ROWLOCK) ON t.queue_position = j.queue_position;
    UPDATE a
    SET access_type = t.access_type, concurrency_limit = t.concurrency_limit, weight = t.weight,
        answer = CASE WHEN m.member_id IS NULL OR t.revoked_at IS NOT NULL THEN -2 WHEN t.granted_at IS NOT NULL THEN 1
                      ELSE 0 END
    FROM @waiters AS a
    LEFT JOIN {schema}.entry AS t WITH (READCOMMITTEDLOCK, ROWLOCK)
        ON t.resource_id = a.resource_id AND t.queue_position = a.queue_position AND t.member_id = @member
    LEFT JOIN {schema}.member AS m ON m.member_id = t.member_id AND m.login = ORIGINAL_LOGIN();
    WHILE 1 = 1
    BEGIN
        INSERT INTO @eligible_rows (queue_position)
        SELECT f.queue_position
        FROM (SELECT queue_position, resource_id, access_type, concurrency_limit, weight,
                     ROW_NUMBER() OVER (PARTITION BY resource_id, access_type, concurrency_limit, weight
                                        ORDER BY queue_position) AS place
              FROM @waiters WHERE answer = 0) AS f
        CROSS APPLY {schema}.eligibility(f.resource_id, f.queue_position, f.access_type, f.concurrency_limit, f.weight, NULL) AS h
        WHERE f.place <= @width AND h.eligible = 1;
        SET @found = @@ROWCOUNT;
        SET @more = @found;
        SET @width = CASE WHEN @width > 1000000 THEN @width ELSE @width * 2 END;
        -- Grant them one by one: a transaction that locks several rows could meet another session that locks the same
        -- rows in the opposite order.
        WHILE @found > 0
        BEGIN
            SELECT TOP (1) @position = t.queue_position, @resource = a.resource_id, @access = a.access_type,
                   @limit = a.concurrency_limit, @weight = a.weight
            FROM @eligible_rows AS t JOIN @waiters AS a ON a.queue_position = t.queue_position ORDER BY t.queue_position;
            UPDATE {schema}.entry SET granted_at = SYSUTCDATETIME()  -- for readers the rule is applied twice: see wait
            WHERE resource_id = @resource AND queue_position = @position AND member_id = @member AND revoked_at IS NULL
              AND (@access <> N'read'
                   OR (SELECT a.eligible FROM {schema}.eligibility(@resource, @position, @access, @limit, @weight, NULL) AS a) = 1);
            SET @code = CASE WHEN @@ROWCOUNT > 0 THEN 1 ELSE -2 END;
            IF @code = 1
                SET @granted = 1;
            ELSE IF EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                            WHERE resource_id = @resource AND queue_position = @position AND member_id = @member
                              AND revoked_at IS NULL)
                SET @code = 2;
            UPDATE @waiters SET answer = @code WHERE queue_position = @position;
            DELETE FROM @eligible_rows WHERE queue_position = @position;
            SET @found = @found - 1;
        END;
        IF @more > 0
            CONTINUE;
        IF @heads_tested = 1
            BREAK;
        -- At the end of each call test the owners of the first rows, too, on up to 32 of the resources, chosen at
        -- random.
        SET @heads_tested = 1;
        SET @width = 1;
        INSERT INTO @tested (resource_id)
        SELECT TOP (32) a.resource_id FROM (SELECT DISTINCT resource_id FROM @waiters WHERE answer = 0) AS a ORDER BY NEWID();
        SET @found = 0;
        WHILE EXISTS (SELECT 1 FROM @tested)
        BEGIN
            SELECT TOP (1) @resource = resource_id FROM @tested ORDER BY resource_id;
            DELETE FROM @tested WHERE resource_id = @resource;
            EXEC @code = {schema}.reap_dead_members @resource, @member;
            IF @code = 1
                SET @found = 1;
        END;
        IF @found = 0
            BREAK;
    END;
    IF @granted = 1
    BEGIN
        EXEC @code = {schema}.touch_member @member;
        IF @code = 0
            THROW 50005, N'sqlsem: this member is not known here (any more), or belongs to another login; register again', 1;
    END;
    SELECT queue_position, CASE WHEN answer = 1 THEN 1 ELSE 0 END AS granted FROM @waiters WHERE answer IN (1, -2);
{end_try_own}

-- Release a lock, or remove a waiting row. Without @position: all locks that this requester has on the resource. Return
-- 0 done, -1 nothing to release: it was released before, revoked, lost, or belongs to another login. May be repeated.
-- With @answer the code is in a row, and not in the return code. If an open transaction has asserted the lock, this
-- waits for its end: for ever, or for SET LOCK_TIMEOUT, and then fails with 50002.
--
-- (Without @requesting_id the requester is this session: see public.sql.)
-- A crash of the server may undo a release. Then a program finds the row at its next heartbeat, and releases it again.
-- (The row of a session is removed, as the session ended with the server.)
CREATE OR ALTER PROCEDURE {schema}.release
    @resource nvarchar(400), @position bigint = NULL, @requesting_id nvarchar(400) = NULL,
    @outcome nvarchar(16) = N'released', @answer bit = 0
AS
BEGIN TRY
    SET ROWCOUNT 0;
    IF @@TRANCOUNT > 0 OR @position IS NULL OR @requesting_id IS NULL OR COALESCE(@outcome, N'') <> N'released' OR @@OPTIONS & 2 = 2
    BEGIN
        IF @@TRANCOUNT > 0 OR @@OPTIONS & 2 = 2 OR COALESCE(@outcome, N'') <> N'released'
        BEGIN
            IF @@TRANCOUNT > 0
                THROW 50001, N'sqlsem: release must not be called inside an open transaction; commit or roll back first', 1;
            SET IMPLICIT_TRANSACTIONS OFF;
            IF @outcome IS NULL OR @outcome NOT IN (N'released', N'cancelled', N'timeout', N'lost', N'revoked')
                THROW 50000, N'sqlsem: bad outcome: it must be released, cancelled, timeout, lost or revoked', 1;
        END;
        IF @position IS NULL OR @requesting_id IS NULL
        BEGIN
            EXEC @position = {schema}.release_rows @resource, @position, @requesting_id, @outcome;
            IF @answer = 1
                SELECT CAST(@position AS int) AS code;
            RETURN CAST(@position AS int);
        END;
    END;
    SET NOCOUNT, XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @principal nvarchar(128) = {schema}.lock_principal(), @name nvarchar(255) = CONCAT(N'entry.sqlsem.{schema}.', @position),
            @pin nvarchar(255) = N'pin.sqlsem.{schema}.', @code int, @lock int, @member bigint, @own bit, @host nvarchar(255), @pid int,
            @program nvarchar(255), @login nvarchar(128), @by nvarchar(128), @next bigint, @mark bigint;
    BEGIN TRY
        -- @pin: stays without a number if this login has no such row. @own: acquire has registered the member for this
        -- row alone, with a lease. @next: the row behind this one, if this one is alone inside, and so has no row
        -- ahead. (The search waits for no session. It may pass a locked row, so the UPDATE below compares `behind`.)
        -- @mark: now and then such a release raises the low-water mark.
        SELECT @member = t.member_id, @pin = CONCAT(N'pin.sqlsem.{schema}.', @position), @host = m.host, @pid = m.pid, @program = m.program, @login = m.login,
               @by = CASE WHEN @outcome = N'revoked' THEN t.revoked_by END,
               @own = CASE WHEN m.pid IS NULL AND m.lease_ms IS NOT NULL THEN 1 ELSE 0 END,
               @next = CASE WHEN t.granted_at IS NOT NULL AND t.access_type = N'write' AND t.weight >= t.concurrency_limit
                            THEN (SELECT TOP (1) n.queue_position FROM {schema}.entry AS n WITH (READCOMMITTEDLOCK, READPAST, ROWLOCK)
                                  WHERE n.resource_id = @resource AND n.queue_position > @position ORDER BY n.queue_position) END,
               @mark = CASE WHEN t.granted_at IS NOT NULL AND t.access_type = N'write' AND t.weight >= t.concurrency_limit
                                 AND RAND() < 0.03 THEN t.queue_position END
        FROM {schema}.entry AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
        WHERE t.resource_id = @resource AND t.queue_position = @position AND t.requesting_id = @requesting_id
          AND m.login = ORIGINAL_LOGIN()
        OPTION (KEEPFIXED PLAN);
        BEGIN TRANSACTION;
        -- (Without an argument the timeout is that of the session: @@LOCK_TIMEOUT, which some engines read slowly.)
        EXEC @lock = sys.sp_getapplock @pin, N'Exclusive', N'Transaction', @DbPrincipal = @principal;
        DELETE FROM {schema}.entry
        OUTPUT deleted.resource_id, deleted.queue_position, deleted.requesting_id, deleted.access_type, deleted.weight,
               deleted.member_id, deleted.owner, deleted.note, deleted.requested_at, deleted.granted_at,
               deleted.concurrency_limit, @outcome, @host, @pid, @program, @login, @by
        INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight,
                               member_id, owner, note, requested_at, granted_at,
                               concurrency_limit, outcome, host, pid, program, login, ended_by)
        WHERE resource_id = @resource AND queue_position = @position AND requesting_id = @requesting_id
          AND member_id = @member AND @lock >= 0
        OPTION (KEEPFIXED PLAN);
        SET @code = @@ROWCOUNT - 1;
        IF @next IS NULL AND @mark IS NULL AND @@VERSION LIKE N'Microsoft SQL %'  -- (others do not know DELAYED_DURABILITY)
            COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);
        ELSE
        BEGIN
            -- Grant the next row in the same transaction: its waiter then only reads that when it wakes. The next row
            -- was registered directly behind this one, so no other row is or can come ahead of it. A row with a waiter
            -- lease is left to its session, as its client may no longer poll. If an operator has set anything for the
            -- resource, the waiter applies the whole rule.
            IF @code = 0 AND @next IS NOT NULL
                UPDATE {schema}.entry SET granted_at = SYSUTCDATETIME()
                WHERE resource_id = @resource AND queue_position = @next AND behind = @position
                  AND granted_at IS NULL AND revoked_at IS NULL AND waiter_lease_until IS NULL
                  AND NOT EXISTS (SELECT 1 FROM {schema}.resource AS o WHERE o.resource_id IN (@resource, N'*'))
                OPTION (KEEPFIXED PLAN);
            -- The mark comes last: while it is locked, sessions read without it.
            IF @code = 0 AND @mark IS NOT NULL
                UPDATE {schema}.low_water SET mark = @mark, raised_at = SYSUTCDATETIME() WHERE resource_id = @resource AND mark < @mark
                OPTION (KEEPFIXED PLAN);
            IF @@VERSION LIKE N'Microsoft SQL %'
                COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);
            ELSE
                COMMIT TRANSACTION;
        END;
    END TRY
    BEGIN CATCH
        {rollback}
        -- Sessions have locked rows in different orders (1205), or rows moved during a scan (601): try again.
        IF ERROR_NUMBER() NOT IN (601, 1205) OR @@NESTLEVEL > 24
            THROW;
        EXEC @code = {schema}.release @resource, @position, @requesting_id, @outcome;
        SET @own = 0;
    END CATCH;
    -- Release the wakeup lock after the commit: the waiters must not wake before they can see that the row is gone.
    IF @code = 0 AND APPLOCK_MODE(@principal, @name, N'Session') <> N'NoLock'
        EXEC sys.sp_releaseapplock @name, N'Session', @principal;
    ELSE IF @lock < 0
        THROW 50002, N'sqlsem: busy: an open transaction has pinned this row (assert_holding); end that first', 1;
    ELSE IF @code = 0 AND @own = 1  -- (with a lease there is no wakeup lock)
    BEGIN
        BEGIN TRY
            DELETE FROM {schema}.member WHERE member_id = @member
            OPTION (KEEPFIXED PLAN);
        {end_try_done}
    END
    ELSE IF @code < 0 AND NOT EXISTS (SELECT 1 FROM {schema}.entry WITH (READCOMMITTEDLOCK)
                                      WHERE resource_id = @resource AND queue_position = @position)
        EXEC {schema}.release_session_lock @name;  -- it was gone already
    IF @answer = 0
        RETURN @code;
    SELECT @code AS code;
{end_try_rollback_own}

-- Release the rows that a call of register or register_all may have left: its reply was lost, or it was interrupted.
-- Return how many.
CREATE OR ALTER PROCEDURE {schema}.cancel @member bigint, @uid nvarchar(64), @outcome nvarchar(16), @answer bit = 0
AS {begin_try_own}
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @resource nvarchar(255), @position bigint = -1, @before bigint, @code int, @count int = 0, @pinned int = 0,
            @name nvarchar(255);
    IF @outcome IS NULL OR @outcome NOT IN (N'released', N'cancelled', N'timeout', N'lost', N'revoked')
        THROW 50000, N'sqlsem: bad outcome: it must be released, cancelled, timeout, lost or revoked', 1;
    WHILE 1 = 1
    BEGIN
        SET @before = @position;
        SELECT TOP (1) @resource = resource_id, @position = queue_position FROM {schema}.entry WITH (INDEX (entry_member))
        WHERE member_id = @member AND queue_position > @before
          AND EXISTS (SELECT 1 FROM {schema}.member WHERE member_id = @member AND login = ORIGINAL_LOGIN())
          AND (request_uid = @uid OR LEFT(request_uid, LEN(@uid) + 1) = CONCAT(@uid, N'.'))
        ORDER BY queue_position;
        IF @position = @before
            BREAK;
        EXEC @code = {schema}.remove @resource, @position, @outcome;
        SET @name = CONCAT(N'entry.sqlsem.{schema}.', @position);
        IF @code = 0
            EXEC {schema}.release_session_lock @name;
        IF @code = 0
            SET @count = @count + 1;
        IF @code = -2
            SET @pinned = 1;
    END;
    IF @pinned = 1
        THROW 50002, N'sqlsem: busy: an open transaction has pinned a row (assert_holding); commit it first', 1;
    {answer:@count,cancelled}
{end_try_own}

-- Pin a granted row of this login to the caller's own transaction: the row cannot be released or revoked before the
-- transaction ends, so no other request is granted in its place. Return 1 if the row exists, else 0.
CREATE OR ALTER PROCEDURE {schema}.pin @resource nvarchar(400), @position bigint, @requesting_id nvarchar(400), @answer bit = 0
AS {begin_try}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @holding int = 0;
    -- In manual commit mode the transaction begins with the first statement that reads a table.
    IF @@TRANCOUNT = 0 AND @@OPTIONS & 2 = 2
        SELECT @holding = 0 FROM {schema}.entry WHERE queue_position < 0;
    IF @@TRANCOUNT = 0
        THROW 50001, N'sqlsem: asserting needs an open transaction, to which it pins the row; BEGIN TRANSACTION first (no autocommit)', 1;
    DECLARE @code int, @name nvarchar(255) = CONCAT(N'pin.sqlsem.{schema}.', @position);
    EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Shared', @LockOwner = N'Transaction',
        @LockTimeout = 10000, @DbPrincipal = @principal;
    IF @code < 0
        THROW 50002, N'sqlsem: busy: this row is being removed', 1;
    -- Every removal of a row takes this lock first. The row itself is not locked, as other sessions must read it, above
    -- all heartbeats.
    SELECT @holding = CASE WHEN m.login = ORIGINAL_LOGIN() THEN 1 ELSE -1 END
    -- (READCOMMITTEDLOCK: the caller may run under a snapshot that is older than the registration.)
    FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK)
    LEFT JOIN {schema}.member AS m WITH (READCOMMITTEDLOCK) ON m.member_id = t.member_id
    WHERE t.resource_id = @resource AND t.queue_position = @position AND t.requesting_id = @requesting_id
      AND t.granted_at IS NOT NULL;
    IF @holding < 1  -- pin no row of another login
        EXEC sys.sp_releaseapplock @Resource = @name, @LockOwner = N'Transaction', @DbPrincipal = @principal;
    IF @holding = -1
        THROW 50006, N'sqlsem: this row is another login''s; only its own can pin it', 1;
    {answer:@holding,holding}
{end_try}


-- Make the engine compile the procedures of a holder (or, with @waits, of a waiter) beforehand, and change nothing.
-- Some engines compile once for each session, and slowly: a holder must not wait for that later.
CREATE OR ALTER PROCEDURE {schema}.warm_up @waits bit = 0 AS {begin_try_own}
    DECLARE @eligible int;
    SELECT @eligible = a.eligible FROM {schema}.eligibility(N'', 0, N'write', 1, 1, NULL) AS a;
    IF @waits = 1
    BEGIN
        EXEC {schema}.wait N'', 0, 0;
        RETURN 0;
    END;
    EXEC {schema}.heartbeat 0;
    EXEC {schema}.release N'', 0, N'';
    EXEC {schema}.cancel 0, N'', N'released';
    EXEC {schema}.poll_waiters 0, N'[]';
    -- feature: conversions
    EXEC {schema}.begin_upgrade N'', 0, N'', 1;
    EXEC {schema}.downgrade N'', 0, N'';
    -- end of feature: conversions
    BEGIN TRY
        EXEC {schema}.register 0, N'', N'', NULL, 1, N'';  -- no such member
    END TRY
    BEGIN CATCH
        RETURN 0;
    END CATCH;
{end_try_own}


-- Displays ---------------------------------------------------------------------------------------------------

-- Displays wait for no open transaction, as operators look for the session that blocks all others. So they also show
-- changes that such a session has not committed.

-- Return the rows of the queue. state: holds, waits, revoked, or dead (the next session that tests the owner in order
-- to act removes the row).
CREATE OR ALTER PROCEDURE {schema}.entries @resource nvarchar(400) = NULL AS {begin_try}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @now datetime2(6) = SYSUTCDATETIME(), @start datetime2(6) = (SELECT grace_from FROM {schema}.origin());
    -- Beacons are tested once for each member, not for each row.
    DECLARE @member TABLE (member_id bigint NOT NULL PRIMARY KEY, missing int NULL);
    {missing_members}
    WHERE m.member_id IN (SELECT t.member_id FROM {schema}.entry AS t WITH (NOLOCK)
                          WHERE @resource IS NULL OR t.resource_id = @resource);
    SELECT t.resource_id, t.queue_position,
           CASE WHEN d.dead = 1 THEN N'dead' WHEN t.revoked_at IS NOT NULL THEN N'revoked'
                WHEN h.holds = 1 THEN N'holds' ELSE N'waits' END AS state,
           t.access_type, t.concurrency_limit, t.weight, t.requesting_id, t.member_id, t.owner, m.host, m.pid, m.program,
           t.note, t.requested_at, t.granted_at,
           DATEDIFF_BIG(microsecond, COALESCE(t.granted_at, t.requested_at), @now) / CAST(1000000 AS float) AS seconds,
           CASE WHEN b.missing = 1
                THEN DATEDIFF_BIG(microsecond, COALESCE(m.lease_until, m.missing_since, m.heartbeat_at), @now)
                     / CAST(1000000 AS float) END AS missing_for,
           m.grace_ms / CAST(1000 AS float) AS grace
    FROM {schema}.row_states(@resource) AS h
    JOIN {schema}.entry AS t WITH (NOLOCK) ON t.resource_id = h.resource_id AND t.queue_position = h.queue_position
    LEFT JOIN @member AS b ON b.member_id = t.member_id
    LEFT JOIN {schema}.member AS m WITH (NOLOCK) ON m.member_id = t.member_id
    CROSS APPLY (SELECT CASE WHEN t.member_id IS NOT NULL AND m.member_id IS NULL THEN 1
                             WHEN b.missing IS NULL OR b.missing = 0 THEN 0
                             WHEN m.lease_until IS NOT NULL OR m.grace_ms = 0 THEN 1
                             WHEN DATEADD(millisecond, m.grace_ms, CASE WHEN @start > m.heartbeat_at THEN @start
                                                                        ELSE m.heartbeat_at END) <= @now
                                  AND (@start IS NOT NULL
                                       OR DATEADD(millisecond, m.grace_ms, m.missing_since) <= @now) THEN 1
                             ELSE 0 END AS dead) AS d
    ORDER BY t.resource_id, t.queue_position;
{end_try}

-- Return the times that were these numbers of milliseconds ago.
CREATE OR ALTER PROCEDURE {schema}.ages_to_times
    @since_ms bigint, @until_ms bigint, @since datetime2(6) OUTPUT, @until datetime2(6) OUTPUT AS {begin_inner}
    DECLARE @now datetime2(6) = SYSUTCDATETIME();
    IF @since_ms < 0 OR @since_ms > 2147483647000 OR @until_ms < 0 OR @until_ms > 2147483647000
        THROW 50000, N'sqlsem: since and until must be from 0 to 2147483647 seconds ago', 1;
    SET @since = DATEADD(millisecond, -CAST(@since_ms % 1000 AS int), DATEADD(second, -CAST(@since_ms / 1000 AS int), @now));
    SET @until = DATEADD(millisecond, -CAST(@until_ms % 1000 AS int), DATEADD(second, -CAST(@until_ms / 1000 AS int), @now));
END;

-- Return ended requests, newest first; of one outcome, and between @since_ms and @until_ms ago, if given. @who: the
-- owner's login, host, host:pid, program or requesting_id, or the login that ended the request. held, of an owner that
-- died, ends with its last heartbeat.
CREATE OR ALTER PROCEDURE {schema}.past
    @resource nvarchar(255) = NULL, @maximum int = 100, @since_ms bigint = NULL, @until_ms bigint = NULL,
    @outcome nvarchar(16) = NULL, @who nvarchar(400) = NULL AS {begin_try}
    DECLARE @since datetime2(6), @until datetime2(6);
    SET @maximum = CASE WHEN @maximum < 0 THEN 0 ELSE COALESCE(@maximum, 2147483647) END;
    EXEC {schema}.ages_to_times @since_ms, @until_ms, @since OUTPUT, @until OUTPUT;
    SELECT TOP (@maximum) h.resource_id, h.queue_position, h.access_type, h.weight, h.requesting_id, h.owner, h.note,
           h.requested_at, h.granted_at, h.ended_at,
           DATEDIFF_BIG(microsecond, h.requested_at, COALESCE(h.granted_at, h.ended_at)) / CAST(1000000 AS float) AS waited,
           DATEDIFF_BIG(microsecond, h.granted_at, CASE WHEN h.heartbeat_at IS NULL THEN h.ended_at
                                                        WHEN h.heartbeat_at > h.granted_at THEN h.heartbeat_at
                                                        ELSE h.granted_at END) / CAST(1000000 AS float) AS held, h.outcome,
           h.concurrency_limit, h.host, h.pid, h.program, h.login, h.ended_by
    FROM {schema}.history AS h
    WHERE (@resource IS NULL OR h.resource_id = @resource) AND (@since IS NULL OR h.ended_at >= @since)
      AND (@until IS NULL OR h.ended_at <= @until) AND (@outcome IS NULL OR h.outcome = @outcome)
      AND (@who IS NULL OR @who IN (h.login, h.host, CONCAT(h.host, N':', h.pid), h.program, h.requesting_id, h.ended_by))
    ORDER BY h.ended_at DESC
    OPTION (RECOMPILE);  -- a plan for these conditions: they have different indexes
{end_try}

-- Return the resources and the patterns of limits, as 'tenant:*'. The cap is the effective one: the resource's own or a
-- pattern's.
CREATE OR ALTER PROCEDURE {schema}.resources AS {begin_try}
    SELECT COALESCE(o.resource_id, q.resource_id) AS resource_id, COALESCE(o.cap, s.cap) AS cap,
           CAST(CASE WHEN o.paused_at IS NULL THEN 0 ELSE 1 END AS bit) AS paused,
           o.stale_after_ms / CAST(1000 AS float) AS stale_after, COALESCE(q.holding, 0) AS holding, COALESCE(q.waiting, 0) AS waiting
    FROM {schema}.all_settings() AS o
    FULL JOIN (
        SELECT e.resource_id, SUM(e.holds) AS holding, SUM(1 - e.holds) AS waiting
        FROM {schema}.row_states(NULL) AS e
        GROUP BY e.resource_id
    ) AS q ON q.resource_id = o.resource_id
    OUTER APPLY {schema}.effective_settings(COALESCE(o.resource_id, q.resource_id)) AS s
    ORDER BY 1;
{end_try}

-- Return the settings of this database.
CREATE OR ALTER PROCEDURE {schema}.settings AS {begin_try}
    SELECT s.name, s.value FROM {schema}.setting AS s;
{end_try}


-- feature: operate
-- Operators ---------------------------------------------------------------------------------------------------

-- Set one setting of a resource. @what: 'cap' (NULL: none; a name that ends with * is a pattern), 'stale_after' in ms
-- (NULL: never), 'paused' (1 or 0), 'ageing' in ms (NULL: no priorities).
CREATE OR ALTER PROCEDURE {schema}.set_resource @resource nvarchar(255), @what nvarchar(20), @value bigint AS {begin_try_own}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    IF @what NOT IN (N'cap', N'stale_after', N'paused', N'ageing')
        THROW 50000, N'sqlsem: only cap, stale_after, paused and ageing can be set', 1;
    IF @what = N'ageing' AND (@value NOT BETWEEN 1 AND 2147483647 OR RIGHT(@resource, 1) = N'*')
        THROW 50000, N'sqlsem: ageing is from 1 ms to 24 days, of one resource and no pattern', 1;
    IF @what = N'ageing' AND @value IS NOT NULL
       AND (@resource COLLATE Latin1_General_100_BIN2 LIKE N'rate:%' OR @resource COLLATE Latin1_General_100_BIN2 LIKE N'once:%'
            OR @resource COLLATE Latin1_General_100_BIN2 LIKE N'priority:%'
            OR @resource COLLATE Latin1_General_100_BIN2 LIKE N'tasks:%')
        THROW 50000, N'sqlsem: the queues of rate:, once:, priority: and tasks: are always first come, first served; priorities cannot be set there', 1;
    IF @what = N'stale_after' AND @value > 2147483647000
        THROW 50000, N'sqlsem: stale_after must be below 68 years', 1;
    EXEC {schema}.check_name N'resource', @resource;
    DECLARE @code int, @old bigint, @name nvarchar(255) = N'set_resource.sqlsem.{schema}', @left int = 0,
            @first nvarchar(255), @message nvarchar(1000), @by nvarchar(128) = ORIGINAL_LOGIN(), @prefix nvarchar(254);
    IF @what = N'cap' AND RIGHT(@resource, 1) = N'*'
        SET @prefix = LEFT(@resource COLLATE Latin1_General_100_BIN2, LEN(@resource) - 1);
    BEGIN TRANSACTION;
    EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
        @LockTimeout = 10000, @DbPrincipal = @principal;
    IF @code < 0
    BEGIN
        ROLLBACK TRANSACTION;
        THROW 50002, N'sqlsem: busy: another session sets a resource in an open transaction', 1;
    END;
    IF @what = N'cap' AND @value IS NULL
    BEGIN
        -- Keep out new requests that name no limit, until this transaction ends. Earlier ones are found below.
        SET @name = N'limits.sqlsem.{schema}';
        EXEC @code = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
            @LockTimeout = 10000, @DbPrincipal = @principal;
        IF @code < 0
        BEGIN
            ROLLBACK TRANSACTION;
            THROW 50002, N'sqlsem: busy: another session registers in an open transaction', 1;
        END;
    END;
    IF @prefix IS NOT NULL
    BEGIN
        SELECT @old = cap FROM {schema}.limit_pattern WHERE prefix + N'|' = @prefix + N'|';
        IF @value IS NULL
            DELETE FROM {schema}.limit_pattern WHERE prefix + N'|' = @prefix + N'|';
        ELSE IF @old IS NULL
            INSERT INTO {schema}.limit_pattern (prefix, cap) VALUES (@prefix, CAST(@value AS int));
        ELSE IF @old <> @value
            UPDATE {schema}.limit_pattern SET cap = CAST(@value AS int), cap_by = @by, set_at = SYSUTCDATETIME() WHERE prefix + N'|' = @prefix + N'|';
        INSERT INTO {schema}.resource (resource_id)
        SELECT N'*' WHERE NOT EXISTS (SELECT 1 FROM {schema}.resource WHERE resource_id = N'*');
    END;
    INSERT INTO {schema}.resource (resource_id)
    SELECT @resource WHERE @prefix IS NULL AND NOT EXISTS (SELECT 1 FROM {schema}.resource WHERE resource_id = @resource);
    SELECT @old = CASE @what WHEN N'cap' THEN cap WHEN N'stale_after' THEN stale_after_ms WHEN N'ageing' THEN ageing_ms
                             ELSE CASE WHEN paused_at IS NULL THEN 0 ELSE 1 END END
    FROM {schema}.resource WHERE resource_id = @resource AND @prefix IS NULL;
    UPDATE {schema}.resource
    SET cap = CASE @what WHEN N'cap' THEN CAST(@value AS int) ELSE cap END,
        cap_by = CASE WHEN @what <> N'cap' OR cap = @value THEN cap_by WHEN @value IS NOT NULL THEN ORIGINAL_LOGIN() END,
        stale_after_ms = CASE @what WHEN N'stale_after' THEN @value ELSE stale_after_ms END,
        ageing_ms = CASE @what WHEN N'ageing' THEN CAST(@value AS int) ELSE ageing_ms END,
        paused_at = CASE WHEN @what <> N'paused' THEN paused_at WHEN @value = 1 THEN COALESCE(paused_at, SYSUTCDATETIME()) END,
        paused_by = CASE WHEN @what <> N'paused' OR (@value = 1 AND paused_at IS NOT NULL) THEN paused_by
                         WHEN @value = 1 THEN ORIGINAL_LOGIN() END
    WHERE resource_id = @resource AND @prefix IS NULL;
    IF COALESCE(@old, -1) <> COALESCE(@value, -1)
        INSERT INTO {schema}.operation (host, pid, program, action, resource_id, old_value, new_value)
        VALUES (LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255),
                CASE WHEN @what <> N'paused' THEN @what WHEN @value = 1 THEN N'pause' ELSE N'resume' END, @resource,
                CASE WHEN @what <> N'paused' THEN CAST(@old AS nvarchar(20)) END,
                CASE WHEN @what <> N'paused' THEN CAST(@value AS nvarchar(20)) END);
    DELETE FROM {schema}.resource  -- ('*' stays while there are patterns: see effective_settings.)
    WHERE resource_id IN (@resource, N'*') AND cap IS NULL AND stale_after_ms IS NULL AND paused_at IS NULL AND ageing_ms IS NULL
      AND (resource_id <> N'*' OR NOT EXISTS (SELECT 1 FROM {schema}.limit_pattern));
    IF @what = N'cap' AND @value IS NULL
        SELECT @left = COUNT(*), @first = MIN(COALESCE(t.resource_id, N''))
        FROM {schema}.entry AS t CROSS APPLY {schema}.effective_settings(t.resource_id) AS o
        WHERE t.concurrency_limit IS NULL AND t.member_id IS NOT NULL AND o.cap IS NULL
          AND (t.resource_id = @resource
               OR LEFT(t.resource_id, LEN(@prefix + N'|') - 1) + N'|' = @prefix COLLATE Latin1_General_100_BIN2 + N'|');
    IF @left > 0
    BEGIN
        ROLLBACK TRANSACTION;
        SET @message = CONCAT(N'sqlsem: ', @left, N' requests (on ''', @first, N''' first) name no limit and count on this one: ',
            N'it can be changed, not lifted, until they have ended; look who they are: EXEC {schema}.status');
        EXEC {schema}.raise_error 50008, @message;
    END;
    COMMIT TRANSACTION;
{end_try_own}

-- Revoke a row. A waiting row is removed at once, and so is a bare participant's. The row of any other holder is
-- removed at once only with @force; else the holder learns of it by its next heartbeat, and has its grace to release.
-- Return 0 removed, 1 marked as revoked, -1 no such row.
CREATE OR ALTER PROCEDURE {schema}.[revoke] @position bigint, @force bit = 0, @answer bit = 0 AS {begin_try_own}
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @exists int, @resource nvarchar(255), @granted_at datetime2(6), @member bigint, @code int = 1, @pin nvarchar(255);
    -- Look the resource up by the number, in one index alone. All other statements search the clustered index: two that
    -- went through the two indexes in opposite orders could wait for each other.
    SELECT @resource = resource_id FROM {schema}.entry WITH (READCOMMITTEDLOCK) WHERE queue_position = @position;
    -- revoked_at first: either a waiter that is granted this instant sees it, or this session sees the grant.
    BEGIN TRANSACTION;
    UPDATE {schema}.entry
    SET revoked_at = COALESCE(revoked_at, SYSUTCDATETIME()), revoked_by = COALESCE(revoked_by, ORIGINAL_LOGIN())
    WHERE resource_id = @resource AND queue_position = @position;
    INSERT INTO {schema}.operation (host, pid, program, action, resource_id, queue_position, old_value, new_value)
    SELECT LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), N'revoke', t.resource_id, t.queue_position,
           CASE WHEN t.granted_at IS NULL THEN N'waits' ELSE N'holds' END, CASE WHEN @force = 1 THEN N'force' END
    FROM {schema}.entry AS t WHERE t.resource_id = @resource AND t.queue_position = @position;
    COMMIT TRANSACTION;
    SELECT @exists = 1, @granted_at = granted_at, @member = member_id
    FROM {schema}.entry WHERE resource_id = @resource AND queue_position = @position;
    IF @exists IS NULL
        SET @code = -1;
    ELSE IF @force = 1 OR @granted_at IS NULL OR @member IS NULL
    BEGIN
        EXEC @code = {schema}.remove @resource, @position, N'revoked';
        IF @code = -2
        BEGIN
            -- (The owner has learned of it by now, and may be releasing the row this instant.)
            SET @pin = CONCAT(N'pin.sqlsem.{schema}.', @position);
            EXEC @code = {schema}.wait_until_lock_free @pin, 2000;
            EXEC @code = {schema}.remove @resource, @position, N'revoked';
        END;
        IF @code = -2
            THROW 50002, N'sqlsem: busy: an open transaction keeps this row (assert_holding); try again when that has ended', 1;
        SET @code = 0;
    END;
    {answer:@code,code}
{end_try_own}

-- Revoke all rows of a member, or of all members of a login, and remove the members. Waiting rows are removed at once.
-- Live holders are notified first, unless @force, as in revoke; then the member stays until it has released its rows.
-- Return the number of removed members.
CREATE OR ALTER PROCEDURE {schema}.revoke_members @member bigint = NULL, @login nvarchar(128) = NULL, @force bit = 0, @answer bit = 0
AS {begin_try_own}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: revoke_members must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    IF (@member IS NULL AND @login IS NULL) OR (@member IS NOT NULL AND @login IS NOT NULL) OR @login = N''
        THROW 50000, N'sqlsem: revoke_members needs either a member or a login', 1;
    DECLARE @current_member bigint = -1, @before bigint, @position bigint, @last bigint, @gone int = 0, @rows int = 0, @code int;
    WHILE 1 = 1
    BEGIN
        SET @before = @current_member;
        SELECT TOP (1) @current_member = member_id FROM {schema}.member
        WHERE member_id > @before AND (member_id = @member OR login = @login) ORDER BY member_id;
        IF @current_member = @before
            BREAK;
        SET @position = -1;
        WHILE 1 = 1
        BEGIN
            SET @last = @position;
            SELECT TOP (1) @position = queue_position FROM {schema}.entry WITH (INDEX (entry_member))
            WHERE member_id = @current_member AND queue_position > @last
            ORDER BY queue_position;
            IF @position = @last
                BREAK;
            EXEC @code = {schema}.[revoke] @position, @force;
            IF @code >= 0
                SET @rows = @rows + 1;
        END;
        DELETE FROM {schema}.member
        WHERE member_id = @current_member AND NOT EXISTS (SELECT 1 FROM {schema}.entry WITH (INDEX (entry_member)) WHERE member_id = @current_member);
        SET @gone = @gone + @@ROWCOUNT;
    END;
    IF @gone > 0 OR @rows > 0
        INSERT INTO {schema}.operation (host, pid, program, action, old_value, new_value)
        VALUES (LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), N'revoke_members',
                COALESCE(N'login ' + @login, CONCAT(N'member ', @member)),
                CONCAT(@gone, N' members, ', @rows, N' rows', CASE WHEN @force = 1 THEN N', force' END));
    {answer:@gone,gone}
{end_try_own}

-- Test every member now; return the number of removed rows.
CREATE OR ALTER PROCEDURE {schema}.reap @answer bit = 0 AS {begin_try}
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: reap must not be called inside an open transaction; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @resource nvarchar(255), @position bigint = -1, @before bigint, @start int, @end int, @code int,
            @member bigint = -1, @member_before bigint;
    SELECT @start = COUNT(*) FROM {schema}.entry;
    WHILE 1 = 1
    BEGIN
        SET @before = @position;
        SELECT TOP (1) @resource = resource_id, @position = queue_position FROM {schema}.entry
        WHERE queue_position > @before ORDER BY queue_position;
        IF @position = @before
            BREAK;
        EXEC {schema}.check_if_dead @resource, @position, -1;
    END;
    -- feature: queue
    EXEC {schema}.recover_tasks NULL, -1;
    -- end of feature: queue
    -- feature: batches
    EXEC {schema}.recover_batches NULL, -1;
    -- end of feature: batches
    -- Dead members without rows were not found above.
    WHILE 1 = 1
    BEGIN
        SET @member_before = @member;
        SELECT TOP (1) @member = m.member_id FROM {schema}.member AS m
        WHERE m.member_id > @member_before
          AND (m.lease_until < SYSUTCDATETIME()
               OR (m.lease_until IS NULL AND DATEADD(millisecond, m.grace_ms, m.heartbeat_at) <= SYSUTCDATETIME()))
        ORDER BY m.member_id;
        IF @member = @member_before
            BREAK;
        EXEC {schema}.check_liveness @member, -1;
    END;
    SELECT @end = COUNT(*) FROM {schema}.entry;
    SET @code = CASE WHEN @start > @end THEN @start - @end ELSE 0 END;
    -- (Not in the same transaction, as the removals were many transactions.)
    IF @code > 0
        INSERT INTO {schema}.operation (host, pid, program, action, new_value)
        VALUES (LEFT(HOST_NAME(), 255), {schema}.client_pid(), LEFT(APP_NAME(), 255), N'reap', CAST(@code AS nvarchar(20)));
    {answer:@code,removed}
{end_try_rollback_own}

-- end of feature: operate


-- Operators' actions ----------------------------------------------------------------------------------------------
-- (Each is recorded by the statement that does it, or in the same transaction, with the host and process that the
-- client reports.)

-- Return the calls of operators, newest first. @name: of one resource or work queue. @since_ms and @until_ms: ages.
-- @who: login, host, host:pid or program.
CREATE OR ALTER PROCEDURE {schema}.operations
    @name nvarchar(255) = NULL, @maximum int = 100, @since_ms bigint = NULL, @until_ms bigint = NULL,
    @action nvarchar(16) = NULL, @who nvarchar(400) = NULL AS {begin_try}
    DECLARE @since datetime2(6), @until datetime2(6);
    SET @maximum = CASE WHEN @maximum < 0 THEN 0 ELSE COALESCE(@maximum, 2147483647) END;
    EXEC {schema}.ages_to_times @since_ms, @until_ms, @since OUTPUT, @until OUTPUT;
    SELECT TOP (@maximum) o.operation_id, o.done_at, o.login, o.host, o.pid, o.program, o.action, o.resource_id, o.queue_position,
           o.queue_name, o.task_id, o.old_value, o.new_value
    FROM {schema}.operation AS o WITH (NOLOCK)
    WHERE (@name IS NULL OR @name IN (o.resource_id, o.queue_name)) AND (@since IS NULL OR o.done_at >= @since)
      AND (@until IS NULL OR o.done_at <= @until) AND (@action IS NULL OR o.action = @action)
      AND (@who IS NULL OR @who IN (o.login, o.host, CONCAT(o.host, N':', o.pid), o.program))
    ORDER BY o.operation_id DESC;
{end_try}

-- Remove operations that are older than history_days, or beyond history_rows, at most @maximum in one call. Returns
-- their number.
CREATE OR ALTER PROCEDURE {schema}.prune_operations @maximum int, @answer bit = 0 AS {begin_try_own}
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @days int, @rows bigint, @first bigint = 0, @before datetime2(6), @count int;
    SET @maximum = CASE WHEN @maximum > 0 THEN @maximum ELSE 0 END;
    SELECT @days = CAST(value AS int) FROM {schema}.setting WHERE name = N'history_days';
    SELECT @rows = CAST(value AS bigint) FROM {schema}.setting WHERE name = N'history_rows';
    -- (As in prune: only a small number is counted.)
    IF @rows BETWEEN 1 AND 10000
        SELECT TOP (1) @first = n.operation_id
        FROM (SELECT TOP (@rows) operation_id FROM {schema}.operation ORDER BY operation_id DESC) AS n ORDER BY n.operation_id;
    ELSE
        SELECT TOP (1) @first = operation_id - @rows + 1 FROM {schema}.operation ORDER BY operation_id DESC;
    SET @before = DATEADD(day, -@days, SYSUTCDATETIME());
    DELETE TOP (@maximum) FROM {schema}.operation WHERE done_at < @before OR operation_id < @first;
    SET @count = @@ROWCOUNT;
    {answer:@count,pruned}
{end_try_own}

-- Remove history that is older than setting history_days or beyond history_rows: among the oldest @maximum rows.
-- Positions jump by up to 10,000 when the server restarts. So if no more rows than that are kept, the rows are counted;
-- a larger number is estimated by their positions, as a count would read them all. Returns the number removed.
CREATE OR ALTER PROCEDURE {schema}.prune @maximum int, @answer bit = 0 AS {begin_try_own}
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @before datetime2(6), @edge datetime2(6), @last bigint, @rows bigint, @kept datetime2(6), @count int;
    SET @maximum = CASE WHEN @maximum > 0 THEN @maximum ELSE 0 END;
    SELECT @before = DATEADD(day, -CAST(value AS int), SYSUTCDATETIME()) FROM {schema}.setting WHERE name = N'history_days';
    SELECT @rows = CAST(value AS bigint) FROM {schema}.setting WHERE name = N'history_rows';
    IF @rows BETWEEN 1 AND 10000
        SELECT TOP (1) @kept = n.ended_at
        FROM (SELECT TOP (@rows) ended_at FROM {schema}.history WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) ORDER BY ended_at DESC) AS n
        ORDER BY n.ended_at;
    ELSE
        SELECT TOP (1) @last = queue_position - @rows
        FROM {schema}.history WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) ORDER BY ended_at DESC;
    SELECT TOP (1) @edge = o.ended_at
    FROM (SELECT TOP (@maximum) ended_at FROM {schema}.history WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) ORDER BY ended_at) AS o
    ORDER BY o.ended_at DESC;
    DELETE TOP (@maximum) FROM {schema}.history WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
    WHERE ended_at <= @edge AND (ended_at < @before OR ended_at < @kept OR queue_position <= @last);
    SET @count = @@ROWCOUNT;
    -- feature: rates
    DELETE TOP (@maximum) FROM {schema}.low_water WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
    WHERE raised_at < DATEADD(day, -1, SYSUTCDATETIME());  -- (most are of resources that are no longer used)
    -- Delete rates that were not used for a day and have no current window; first their slots, which no longer count.
    DECLARE @over bigint = {schema}.clock_us() / 1000 - 86400000;
    IF EXISTS (SELECT 1 FROM {schema}.rate_window WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
               WHERE seen_ms + 2 * window_ms < @over)
    BEGIN
        DELETE TOP (@maximum) FROM {schema}.rate_slot WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
        WHERE (slot + 1) * ((window_ms + 99) / 100) + window_ms < @over;
        DELETE TOP (@maximum) w FROM {schema}.rate_window AS w WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
        WHERE w.cap IS NULL AND w.seen_ms + 2 * w.window_ms < @over
          AND NOT EXISTS (SELECT 1 FROM {schema}.rate_slot AS s WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                          WHERE s.resource_id = w.resource_id AND s.window_ms = w.window_ms);
    END;
    -- end of feature: rates
    {answer:@count,pruned}
{end_try_own}


-- Number the rows that bare participants insert. The trigger, too, draws the numbers under the gate, so that they
-- become visible in order; the participant then has the gate until its transaction ends. (The routines write table
-- entry, and do not come here.)
CREATE OR ALTER TRIGGER {schema}.number_bare_row ON {schema}.{table} INSTEAD OF INSERT AS {begin}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    DECLARE @gate nvarchar(255), @code int;
    -- A snapshot may be older than the gate: two sessions would each see no row ahead.
    IF EXISTS (SELECT 1 FROM sys.dm_exec_sessions WHERE session_id = @@SPID AND transaction_isolation_level = 5)
        THROW 50001, N'sqlsem: no row can be inserted under SNAPSHOT isolation, which does not see all earlier requests; SET TRANSACTION ISOLATION LEVEL READ COMMITTED first', 1;
    IF EXISTS (SELECT 1 FROM inserted WHERE resource_id = N''
               OR DATALENGTH(resource_id) <> DATALENGTH(LTRIM(RTRIM(resource_id)))
               OR weight < 1 OR concurrency_limit < COALESCE(weight, 1))
        THROW 50000, N'sqlsem: bad row: a resource''s name has no blanks around it, and 1 <= weight <= limit', 1;
    IF EXISTS (SELECT 1 FROM inserted
               WHERE CONCAT(resource_id, access_type, requesting_id COLLATE Latin1_General_100_BIN2)
                     LIKE CONCAT(N'%[', NCHAR(1), N'-', NCHAR(31), NCHAR(127), N'-', NCHAR(159), N']%'))
        THROW 50000, N'sqlsem: bad row: a name, an id or an access type contains a control character; use printable text', 1;
    IF EXISTS (SELECT 1 FROM inserted WHERE access_type LIKE N'upgrade%')
        THROW 50000, N'sqlsem: bad row: the access type ''upgrade'' is that of a reader which becomes the writer', 1;
    SELECT TOP (1) @gate = i.resource_id FROM inserted AS i
    WHERE i.resource_id COLLATE Latin1_General_100_BIN2 LIKE N'rate:%' OR i.resource_id COLLATE Latin1_General_100_BIN2 LIKE N'once:%'
       OR i.resource_id COLLATE Latin1_General_100_BIN2 LIKE N'priority:%'
       OR i.resource_id COLLATE Latin1_General_100_BIN2 LIKE N'tasks:%' OR RIGHT(i.resource_id, 1) = N'*';
    IF @gate IS NOT NULL
        EXEC {schema}.check_not_reserved @gate;
    SELECT @gate = MIN(LEFT(CONCAT(N'gate.sqlsem.{schema}.', COALESCE(resource_id, N'default')), 255)
                       COLLATE Latin1_General_100_BIN2) FROM inserted;
    WHILE @gate IS NOT NULL
    BEGIN
        EXEC @code = sys.sp_getapplock @Resource = @gate, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
            @LockTimeout = 60000, @DbPrincipal = @principal;
        IF @code < 0
            THROW 50002, N'sqlsem: busy: another session keeps the gate of a resource in an open transaction', 1;
        SELECT @gate = MIN(g.gate)
        FROM (SELECT LEFT(CONCAT(N'gate.sqlsem.{schema}.', COALESCE(resource_id, N'default')), 255)
                     COLLATE Latin1_General_100_BIN2 AS gate FROM inserted) AS g
        WHERE g.gate > @gate;
    END;
    SET @gate = NULL;
    SELECT TOP (1) @gate = o.resource_id FROM {schema}.resource AS o
    WHERE o.ageing_ms IS NOT NULL AND o.resource_id IN (SELECT COALESCE(i.resource_id, N'default') FROM inserted AS i)
    ORDER BY o.resource_id;
    IF @gate IS NOT NULL
        EXEC {schema}.require_priority @gate;
    INSERT INTO {schema}.entry (resource_id, requesting_id, access_type, concurrency_limit, weight, owner,
                                request_uid, requested_at, note)
    SELECT COALESCE(resource_id, N'default'), requesting_id, COALESCE(access_type, N'write'), concurrency_limit,
           COALESCE(weight, 1), owner, COALESCE(request_uid, CONCAT(N'bare.', CONVERT(nvarchar(36), NEWID()))),
           SYSUTCDATETIME(), note
    FROM inserted;
    IF {schema}.lock_principal() <> @principal  -- as in register_member
        THROW 50002, N'sqlsem: busy: the roles are just being made; try again', 1;
END;
