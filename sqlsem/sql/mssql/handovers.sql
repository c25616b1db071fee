-- sqlsem, hand-overs of locks, for SQL Server: a holder hands its lock over, and the client with the token adopts it,
-- with the same position and fence and without a gap. May be run again at any time. Described in docs/howto/transactions.md;
-- PostgreSQL's handovers.sql explains how a row has one owner at each moment.

-- Return the hash of a token, as table handover stores it.
CREATE OR ALTER FUNCTION {schema}.token_hash(@token nvarchar(200)) RETURNS varchar(64) AS
BEGIN
    -- (Digit by digit, as not every engine that speaks T-SQL can convert to hexadecimal digits.)
    DECLARE @hash varbinary(32) = HASHBYTES('SHA2_256', CAST(@token AS varchar(200))), @hex varchar(64) = '', @at int = 1, @byte int;
    WHILE @at <= 32
    BEGIN
        SET @byte = CAST(SUBSTRING(@hash, @at, 1) AS int);
        SET @hex = LEFT(@hex + SUBSTRING('0123456789abcdef', @byte / 16 + 1, 1) + SUBSTRING('0123456789abcdef', @byte % 16 + 1, 1), 64);
        SET @at = @at + 1;
    END;
    RETURN @hex;
END;

-- Hand over rows of a member, all or none. A client that presents the token of @hash within @ttl_ms, as login @to
-- (NULL: the giver's login), can adopt them. @positions: a JSON list. Return 0 if done, -1 if one of the rows is not
-- held. May be repeated.
CREATE OR ALTER PROCEDURE {schema}.hand_over_rows
    @member bigint, @positions nvarchar(max), @hash varchar(64), @ttl_ms int, @to nvarchar(128) = NULL, @answer bit = 0
AS {begin_try_own}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: hand_over must not be called inside an open transaction; commit first and use autocommit', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    IF @@OPTIONS & 2 = 2
        SET IMPLICIT_TRANSACTIONS OFF;
    DECLARE @code int = -1, @done bit = 0, @me nvarchar(128) = ORIGINAL_LOGIN(), @transit bigint, @count int, @wanted int, @lock int,
            @host nvarchar(255), @pid int, @program nvarchar(255), @resource nvarchar(255), @first bigint, @first_resource nvarchar(255), @tries int = 5,
            @position bigint, @name nvarchar(255), @now datetime2(6), @patience int;
    DECLARE @given TABLE (position bigint NOT NULL PRIMARY KEY);
    EXEC {schema}.check_grace_or_lease N'lease', @ttl_ms;
    IF @hash IS NULL OR LEN(@hash) <> 64
        THROW 50000, N'sqlsem: the hash of a token is 64 hexadecimal digits', 1;
    INSERT INTO @given (position) SELECT CAST(value AS bigint) FROM OPENJSON(@positions);
    SELECT @wanted = COUNT(*) FROM @given;
    DELETE FROM {schema}.handover
    WHERE given_at < DATEADD(day, -1, SYSUTCDATETIME())
      AND NOT EXISTS (SELECT 1 FROM {schema}.member AS m WHERE m.member_id = handover.member_id);
    IF EXISTS (SELECT 1 FROM {schema}.handover WHERE token_hash = @hash AND given_by = @me)
    BEGIN
        SET @code = 0;
        SET @tries = 0;
    END;
    WHILE @tries > 0
    BEGIN TRY
        BEGIN TRANSACTION;
        SET @now = SYSUTCDATETIME();
        -- Wait, before this call locks any row, and for a second at most, for transactions that have pinned a row
        -- (assert_holding).
        SELECT @position = MIN(position) FROM @given;
        WHILE @position IS NOT NULL
        BEGIN
            SET @name = CONCAT(N'pin.sqlsem.{schema}.', @position);
            SET @patience = 1000 - CAST(DATEDIFF_BIG(millisecond, @now, SYSUTCDATETIME()) AS int);
            SET @patience = CASE WHEN @patience < 0 THEN 0 ELSE @patience END;
            EXEC @lock = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Transaction',
                @LockTimeout = @patience, @DbPrincipal = @principal;
            IF @lock < 0
                THROW 50002, N'sqlsem: busy: an open transaction has pinned this row (assert_holding); end that first', 1;
            SELECT @position = MIN(position) FROM @given WHERE position > @position;
        END;
        SET @now = SYSUTCDATETIME();
        -- Record a heartbeat. The UPDATE also locks the giver: until the commit no session can reap it.
        UPDATE {schema}.member
        SET heartbeat_at = @now, lease_until = DATEADD(millisecond, lease_ms, @now)
        WHERE member_id = @member AND login = @me;
        SET @count = @@ROWCOUNT;
        SELECT @host = host, @pid = COALESCE(pid, session_id), @program = program FROM {schema}.member WHERE member_id = @member;
        IF @count > 0 AND @wanted > 0
        BEGIN
            -- Register the member in transit, with the giver's process, for displays, and without a login: its rows
            -- cannot be renewed or released without the token.
            INSERT INTO {schema}.member (beacon, session_id, host, pid, program, login, grace_ms, lease_ms, lease_until)
            VALUES (NULL, NULL, @host, @pid, @program, N'', 0, @ttl_ms, DATEADD(millisecond, @ttl_ms, @now));
            SET @transit = SCOPE_IDENTITY();
        END;
        SET @count = 0;
        SELECT @position = MIN(position) FROM @given;
        WHILE @transit IS NOT NULL AND @position IS NOT NULL
        BEGIN
            SET @resource = NULL;
            SELECT @resource = resource_id FROM {schema}.entry WHERE queue_position = @position AND member_id = @member;
            INSERT INTO {schema}.history (resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note,
                                          requested_at, granted_at, outcome, concurrency_limit, host, pid, program, login)
            SELECT resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note,
                   requested_at, granted_at, N'handed_over', concurrency_limit, @host, @pid, @program, @me
            FROM {schema}.entry WHERE resource_id = @resource AND queue_position = @position;
            UPDATE {schema}.entry
            SET member_id = @transit, requesting_id = CONCAT(N'in transit ', @transit),
                owner = LEFT(CONCAT(N'handed over by ', COALESCE(owner, requesting_id)), 255), waiter_lease_until = NULL,
                request_uid = CONCAT(N'in transit ', @transit, N'.', queue_position), granted_at = @now
            WHERE resource_id = @resource AND queue_position = @position AND member_id = @member
              AND granted_at IS NOT NULL AND revoked_at IS NULL AND access_type <> N'upgrade';
            IF @@ROWCOUNT = 0
                BREAK;
            SET @count = @count + 1;
            IF @count = 1
            BEGIN
                SET @first = @position;
                SET @first_resource = @resource;
            END;
            SELECT @position = MIN(position) FROM @given WHERE position > @position;
        END;
        IF @transit IS NULL OR @count <> @wanted
            ROLLBACK TRANSACTION;  -- all or none
        ELSE
        BEGIN
            INSERT INTO {schema}.handover (token_hash, member_id, row_count, resource_id, queue_position, given_by, given_to, ttl_ms)
            VALUES (@hash, @transit, @wanted, @first_resource, @first, @me, COALESCE(@to, @me), @ttl_ms);
            COMMIT TRANSACTION;
            SET @done = 1;
            SET @code = 0;
        END;
        SET @tries = 0;
    END TRY
    BEGIN CATCH
        {rollback}
        -- A deadlock over rows that other sessions locked in another order, or a scan over rows that moved: try again.
        SET @tries = CASE WHEN ERROR_NUMBER() IN (601, 1205) THEN @tries - 1 ELSE 0 END;
        SET @transit = NULL;
        IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222)
            THROW;
        IF @tries = 0
            THROW 50002, N'sqlsem: busy: other sessions have locked what this call needs; try again', 1;
    END CATCH;
    -- Release the wakeup locks: the waiters wake, find rows with a lease, and poll from then on.
    SELECT @position = MIN(position) FROM @given;
    WHILE @done = 1 AND @position IS NOT NULL
    BEGIN
        SET @name = CONCAT(N'entry.sqlsem.{schema}.', @position);
        EXEC {schema}.release_session_lock @name;
        SELECT @position = MIN(position) FROM @given WHERE position > @position;
    END;
    {answer:@code,code}
{end_try_own}

-- Let a member adopt the rows that were handed over under a token. Return code 0, or
--   -1  no such token                       -2  it was used; the reason names the member and the time
--   -3  too late: the lease is over, or an operator revoked a row      -4  it is for another login
-- @answer = 1: one row for each lock, or one with the reason. May be repeated with the same @uid.
CREATE OR ALTER PROCEDURE {schema}.adopt_rows
    @member bigint, @requesting_id nvarchar(255), @owner nvarchar(255), @uid nvarchar(64), @token nvarchar(200), @answer bit = 0,
    @resource nvarchar(255) = NULL OUTPUT, @position bigint = NULL OUTPUT, @words nvarchar(600) = NULL OUTPUT,
    @seconds float = NULL OUTPUT AS {begin_try_own}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: adopt must not be called inside an open transaction; commit first and use autocommit', 1;
    SET XACT_ABORT ON;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    IF @@OPTIONS & 2 = 2
        SET IMPLICIT_TRANSACTIONS OFF;
    DECLARE @code int, @me nvarchar(128) = ORIGINAL_LOGIN(), @hash varchar(64) = {schema}.token_hash(@token), @transit bigint,
            @rows int, @given_by nvarchar(128), @given_to nvarchar(128), @given_at datetime2(6), @adopted_at datetime2(6),
            @adopted_by bigint, @adopted_uid nvarchar(64), @lease int, @row_position bigint, @before bigint, @name nvarchar(255),
            @lock int, @tries int = 5, @moved int;
    IF @requesting_id IS NULL OR @uid IS NULL OR CONCAT(@requesting_id, @owner, @uid) COLLATE Latin1_General_100_BIN2
       LIKE CONCAT(N'%[', NCHAR(1), N'-', NCHAR(31), NCHAR(127), N'-', NCHAR(159), N']%')
        THROW 50000, N'sqlsem: bad request: requesting_id and uid must be printable text', 1;
    WHILE @code IS NULL
    BEGIN TRY
        SELECT @transit = member_id, @rows = row_count, @resource = resource_id, @position = queue_position, @given_by = given_by,
               @given_to = given_to, @given_at = given_at, @adopted_at = adopted_at, @adopted_by = adopted_by,
               @adopted_uid = adopted_uid, @words = adopter,
               @seconds = DATEDIFF_BIG(millisecond, COALESCE(adopted_at, given_at), SYSUTCDATETIME()) / CAST(1000 AS float)
        FROM {schema}.handover WITH (READCOMMITTEDLOCK) WHERE token_hash = @hash;
        IF @transit IS NULL
            SET @code = -1;
        ELSE IF @me NOT IN (@given_to, @given_by)
        BEGIN
            SET @code = -4;
            SET @words = @given_to;
        END
        ELSE IF @adopted_at IS NOT NULL
            SET @code = CASE WHEN @adopted_by = @member AND @adopted_uid = @uid THEN 0 ELSE -2 END;
        ELSE
        BEGIN
            BEGIN TRANSACTION;
            -- (Of several members that adopt the token at once, the first one succeeds; the others read it again.)
            UPDATE {schema}.handover
            SET adopted_at = SYSUTCDATETIME(), adopted_by = @member, adopted_uid = @uid,
                adopter = (SELECT CONCAT(m.host, N':', COALESCE(m.pid, m.session_id), N' ', m.program)
                           FROM {schema}.member AS m WHERE m.member_id = @member)
            WHERE token_hash = @hash AND adopted_at IS NULL;
            IF @@ROWCOUNT = 0
                ROLLBACK TRANSACTION;
            ELSE
            BEGIN
                -- Delete the member in transit: a session that finds its lease expired has to delete it, too, so only
                -- one of the two sessions succeeds.
                DELETE FROM {schema}.member WHERE member_id = @transit AND lease_until >= SYSUTCDATETIME();
                SET @lock = @@ROWCOUNT;
                UPDATE {schema}.member
                SET heartbeat_at = SYSUTCDATETIME(), lease_until = DATEADD(millisecond, lease_ms, SYSUTCDATETIME())
                WHERE member_id = @member AND login = @me;
                IF @@ROWCOUNT = 0
                    THROW 50005, N'sqlsem: this member is not known here (any more), or belongs to another login; register again', 1;
                SET @moved = 0;
                SET @row_position = -1;
                WHILE @lock > 0
                BEGIN
                    SET @before = @row_position;
                    SELECT TOP (1) @row_position = queue_position, @resource = resource_id FROM {schema}.entry WITH (INDEX (entry_member))
                    WHERE member_id = @transit AND queue_position > @before ORDER BY queue_position;
                    IF @row_position = @before
                        BREAK;
                    UPDATE {schema}.entry
                    SET member_id = @member, requesting_id = @requesting_id, owner = @owner,
                        request_uid = CASE WHEN @rows = 1 THEN @uid ELSE CONCAT(@uid, N'.', @moved + 1) END
                    WHERE resource_id = @resource AND queue_position = @row_position AND member_id = @transit AND revoked_at IS NULL;
                    SET @moved = @moved + @@ROWCOUNT;
                END;
                IF @moved = @rows
                BEGIN
                    COMMIT TRANSACTION;
                    SET @code = 0;
                END
                ELSE
                BEGIN
                    ROLLBACK TRANSACTION;  -- an operator has revoked one of the rows, so no member gets the others
                    SET @code = -3;
                END;
            END;
        END;
    END TRY
    BEGIN CATCH
        {rollback}
        -- A deadlock over rows that other sessions locked in another order, or a scan over rows that moved: try again.
        SET @tries = CASE WHEN ERROR_NUMBER() IN (601, 1205) THEN @tries - 1 ELSE 0 END;
        IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222)
            THROW;
        IF @tries = 0
            THROW 50002, N'sqlsem: busy: other sessions have locked what this call needs; try again', 1;
    END CATCH;
    SELECT @resource = resource_id FROM {schema}.handover WHERE token_hash = @hash;
    SELECT @lease = lease_ms FROM {schema}.member WHERE member_id = @member;
    SET @row_position = -1;
    WHILE @code = 0 AND @lease IS NULL
    BEGIN
        SET @before = @row_position;
        SELECT TOP (1) @row_position = queue_position FROM {schema}.entry WITH (INDEX (entry_member))
        WHERE member_id = @member AND queue_position > @before
          AND (request_uid = @uid OR LEFT(request_uid, LEN(@uid) + 1) = CONCAT(@uid, N'.'))
        ORDER BY queue_position;
        IF @row_position = @before
            BREAK;
        -- (A short wait: a waiter may share the lock for an instant, to test it. Without the lock, waiters poll.)
        SET @name = CONCAT(N'entry.sqlsem.{schema}.', @row_position);
        EXEC @lock = sys.sp_getapplock @Resource = @name, @LockMode = N'Exclusive', @LockOwner = N'Session',
            @LockTimeout = 50, @DbPrincipal = @principal;
    END;
    IF @answer = 1 AND @code = 0
        SELECT 0 AS code, CAST(NULL AS nvarchar(600)) AS words, @seconds AS seconds, resource_id, queue_position, access_type,
               concurrency_limit, weight, note
        FROM {schema}.entry
        WHERE member_id = @member AND (request_uid = @uid OR LEFT(request_uid, LEN(@uid) + 1) = CONCAT(@uid, N'.'))
        ORDER BY queue_position;
    IF @answer = 1 AND @code <> 0
        SELECT @code AS code, @words AS words, @seconds AS seconds, @resource AS resource_id, @position AS queue_position,
               CAST(NULL AS nvarchar(64)) AS access_type, CAST(NULL AS int) AS concurrency_limit, CAST(NULL AS int) AS weight,
               CAST(NULL AS nvarchar(1000)) AS note;
    RETURN @code;
{end_try_own}


-- For sessions -----------------------------------------------------------------------------------------------------

-- Hand over the lock that this requester holds on a resource, and return a @token. Of several locks, @position says
-- which; without it the call fails (50000). A session that adopts the token within @ttl_seconds, as login @to_login (by
-- default this login), holds the lock from then on. Raise 50004 if nothing is held.
CREATE OR ALTER PROCEDURE {schema}.hand_over
    @resource nvarchar(400), @token nvarchar(200) = NULL OUTPUT, @position bigint = NULL, @ttl_seconds float = 60,
    @to_login nvarchar(128) = NULL, @requesting_id nvarchar(400) = NULL AS {begin_try}
    SET @token = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: hand_over must not be called in an open transaction or INSERT ... EXEC; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @member bigint, @own bit, @found bigint, @count int, @code int = -1, @message nvarchar(1000), @positions nvarchar(40),
            @hash varchar(64), @ttl_ms int, @secret nvarchar(200), @random nvarchar(80);
    EXEC {schema}.check_name N'resource', @resource;
    IF @ttl_seconds IS NULL OR @ttl_seconds < 1 OR @ttl_seconds > 2147483
        THROW 50000, N'sqlsem: ttl_seconds must be from 1 to 2147483', 1;
    IF @requesting_id IS NULL
        EXEC {schema}.session_name @requesting_id OUTPUT;
    SELECT @member = t.member_id, @found = t.queue_position,
           @own = CASE WHEN m.pid IS NULL AND m.lease_ms IS NOT NULL THEN 1 ELSE 0 END
    FROM {schema}.entry AS t JOIN {schema}.member AS m ON m.member_id = t.member_id
    WHERE t.resource_id = @resource AND t.requesting_id = @requesting_id AND m.login = ORIGINAL_LOGIN()
      AND t.granted_at IS NOT NULL AND (@position IS NULL OR t.queue_position = @position);
    SET @count = @@ROWCOUNT;
    IF @count > 1
    BEGIN
        SET @message = CONCAT(N'sqlsem: this requester holds several on ''', @resource, N'''; say which, by its position');
        EXEC {schema}.raise_error 50000, @message;
    END;
    IF @count = 1
    BEGIN
        -- (As a string: an engine that speaks T-SQL on top of PostgreSQL does not know CRYPT_GEN_RANDOM.)
        IF @@VERSION LIKE N'%PostgreSQL%'
            SET @random = REPLACE(CONCAT(NEWID(), NEWID()), N'-', N'');
        ELSE
            EXEC sp_executesql N'SET @random = CONVERT(varchar(64), CRYPT_GEN_RANDOM(24), 2)', N'@random nvarchar(80) OUTPUT',
                @random OUTPUT;
        SET @secret = CONCAT(N'sqlsem-', LOWER(@random));
        SET @hash = {schema}.token_hash(@secret);
        SET @positions = CONCAT(N'[', @found, N']');
        SET @ttl_ms = FLOOR(@ttl_seconds * 1000);
        EXEC @code = {schema}.hand_over_rows @member, @positions, @hash, @ttl_ms, @to_login;
    END;
    IF @code <> 0
    BEGIN
        SET @message = CONCAT(N'sqlsem: nothing is held (any more) on ''', @resource,
            N''' by this requester; only what is held can be handed over');
        EXEC {schema}.raise_error 50004, @message;
    END;
    SET @token = @secret;
    IF @own = 1
    BEGIN
        BEGIN TRY  -- (an error would lose the token; the member goes when its lease is over)
            DELETE FROM {schema}.member WHERE member_id = @member;
        {end_try_done}
    END;
{end_try_rollback_own}

-- Adopt the locks of a token for this session, or with a lease. Raise 50004 if the token is not valid (any more), 50006
-- if it is for another login. `release` ends them. If
-- the token is for several locks, the first one is returned, and all get the same @requesting_id.
CREATE OR ALTER PROCEDURE {schema}.adopt
    @token nvarchar(200), @requesting_id nvarchar(400) = NULL, @lease_seconds float = NULL,
    @resource nvarchar(255) = NULL OUTPUT, @position bigint = NULL OUTPUT, @fence bigint = NULL OUTPUT AS {begin_try}
    SET @resource = NULL;
    SET @position = NULL;
    SET @fence = NULL;
    IF @@TRANCOUNT > 0
        THROW 50001, N'sqlsem: adopt must not be called in an open transaction or INSERT ... EXEC; commit first', 1;
    SET XACT_ABORT ON;
    SET IMPLICIT_TRANSACTIONS OFF;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @code int, @lease_ms int, @member bigint, @owner nvarchar(255) = ORIGINAL_LOGIN(), @uid nvarchar(64),
            @words nvarchar(600), @seconds float, @message nvarchar(2000), @where nvarchar(400);
    IF @requesting_id IS NULL
        EXEC {schema}.session_name @requesting_id OUTPUT;
    EXEC {schema}.check_name N'requesting_id', @requesting_id;
    EXEC {schema}.check_lease @lease_seconds, @lease_ms OUTPUT;
    EXEC {schema}.session_member @lease_ms, @member OUTPUT;
    SET @uid = CONCAT(N'sql ', NEWID());
    EXEC @code = {schema}.adopt_rows @member, @requesting_id, @owner, @uid, @token, 0, @resource OUTPUT, @position OUTPUT,
        @words OUTPUT, @seconds OUTPUT;
    IF @code = 0
    BEGIN
        SET @fence = @position;
        RETURN 0;
    END;
    IF @lease_ms IS NOT NULL
        EXEC {schema}.deregister_member @member;
    SET @where = CONCAT(N'position ', @position, N' on ''', @resource, N'''');
    SET @resource = NULL;
    SET @position = NULL;
    SET @message = CASE @code
        WHEN -1 THEN N'sqlsem: this token is not known here: it is none of this database, or was over more than a day ago; have the lock handed over again'
        WHEN -2 THEN CONCAT(N'sqlsem: this token was used ', @seconds, N' s ago: ', @words, N' adopted ', @where,
                            N'; a token can be used once, have the lock handed over again')
        WHEN -4 THEN CONCAT(N'sqlsem: ', @where, N' was handed over to login ', @words, N', not to ', @owner)
        ELSE CONCAT(N'sqlsem: it is too late to adopt ', @where,
                    N': it was not adopted in time, or an operator revoked it; acquire it, or have it handed over again') END;
    IF @code = -4
        EXEC {schema}.raise_error 50006, @message;
    EXEC {schema}.raise_error 50004, @message;
{end_try_rollback_own}


-- Release on commit ---------------------------------------------------------------------------------------------

-- Store a marker: the commit of this transaction releases a lock, which the transaction has pinned before. Only the
-- process of the lock's owner knows the marker, and deletes it when it sees it.
CREATE OR ALTER PROCEDURE {schema}.release_on_commit @marker varchar(64) AS {begin_try}
    IF @@TRANCOUNT = 0
        THROW 50001, N'sqlsem: release_on_commit needs an open transaction, whose commit shall release the lock; BEGIN TRANSACTION first', 1;
    IF DATALENGTH(@marker) < 1 OR @marker IS NULL
        THROW 50000, N'sqlsem: release_on_commit needs a marker of 1 to 64 characters', 1;
    -- (A login with thousands of markers misuses this procedure.)
    IF (SELECT COUNT(*) FROM (SELECT TOP (10000) 1 AS one FROM {schema}.commit_marker WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
                              WHERE login = ORIGINAL_LOGIN()) AS d) >= 10000
        THROW 50000, N'sqlsem: this login has 10000 releases on commit that are not done, the most; the oldest are deleted after a day', 1;
    INSERT INTO {schema}.commit_marker (marker) VALUES (@marker);
{end_try}

-- Return 1 if the transaction with this marker has committed. Does not wait for it.
CREATE OR ALTER PROCEDURE {schema}.is_committed @marker varchar(64), @answer bit = 0 AS {begin_try}
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DECLARE @exists int = 0;
    SELECT @exists = 1 FROM {schema}.commit_marker WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK) WHERE marker = @marker;
    {answer:@exists,there}
{end_try}

-- Delete a marker whose lock is released, or for which no process waits any more; and some markers of dead processes.
CREATE OR ALTER PROCEDURE {schema}.delete_commit_marker @marker varchar(64) AS {begin_try_own}
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    DELETE FROM {schema}.commit_marker WITH (ROWLOCK, READPAST, READCOMMITTEDLOCK)
    WHERE marker = @marker OR marked_at < DATEADD(day, -1, SYSUTCDATETIME());
{end_try_own}
