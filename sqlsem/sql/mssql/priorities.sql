-- sqlsem, priorities for SQL Server. May be run again at any time, also while locks are held. PostgreSQL's
-- priorities.sql explains priority entries, and why no request starves.

-- Return the resources with priorities, and the seconds of waiting that one step of priority is worth.
CREATE OR ALTER PROCEDURE {schema}.priorities AS {begin_try}
    SELECT resource_id, ageing_ms / CAST(1000 AS float) AS ageing FROM {schema}.resource WHERE ageing_ms IS NOT NULL;
{end_try}

-- Return the time by which an entry is sorted in a priority queue: the time of its request, less the ageing for each
-- step of priority.
CREATE OR ALTER FUNCTION {schema}.priority_rank(@at datetime2(6), @priority int, @ageing int) RETURNS datetime2(6) AS
BEGIN
    DECLARE @ms bigint = CAST(@priority AS bigint) * @ageing;
    RETURN DATEADD(millisecond, -CAST(@ms % 1000 AS int), DATEADD(second, -CAST(@ms / 1000 AS int), @at));
END;

-- Return the entry right before one in a priority queue, if there is any, and the number of entries ahead. A request
-- without an entry (@place NULL) comes after all of its own rank.
CREATE OR ALTER FUNCTION {schema}.preceding_request(@line nvarchar(255), @place bigint, @at datetime2(6), @priority int, @ageing int)
RETURNS TABLE AS RETURN (
    SELECT TOP (1) r.queue_position AS before, COUNT(*) OVER () AS ahead
    FROM (SELECT t.queue_position, {schema}.priority_rank(t.requested_at, t.weight - 1, @ageing) AS priority_rank
          FROM {schema}.entry AS t WITH (READCOMMITTEDLOCK, ROWLOCK)
          WHERE t.resource_id = @line AND t.access_type = N'read' AND t.concurrency_limit = 100 AND t.member_id IS NOT NULL
            AND t.revoked_at IS NULL AND t.queue_position <> COALESCE(@place, -1)) AS r
    WHERE r.priority_rank < {schema}.priority_rank(@at, @priority, @ageing)
       OR (r.priority_rank = {schema}.priority_rank(@at, @priority, @ageing)
           AND r.queue_position < COALESCE(@place, 9223372036854775807))
    ORDER BY r.priority_rank DESC, r.queue_position DESC
);

-- Request a resource with priorities, or poll for the entry @place that an earlier call has returned. The result:
--   @granted = 1    @position is the granted row; the entry is removed
--   @granted = 0    @position is the entry; @before and @ahead: see preceding_request
--   no @position    with @try: the resource is not free; else: the entry is gone
-- With the @uid of a call whose reply was lost, return the result of that call. @attended_ms: the waiter lease of the
-- entry.
CREATE OR ALTER PROCEDURE {schema}.acquire_by_priority
    @member bigint, @requesting_id nvarchar(255), @owner nvarchar(255), @uid nvarchar(64), @try bit,
    @resource nvarchar(400), @access nvarchar(100), @limit int, @weight int, @note nvarchar(1000), @priority int, @place bigint,
    @patience int = 1000, @position bigint = NULL OUTPUT, @granted bit = NULL OUTPUT, @before bigint = NULL OUTPUT,
    @ahead int = NULL OUTPUT, @answer bit = 0, @attended_ms int = NULL AS {begin_try_own}
    DECLARE @principal nvarchar(128) = {schema}.lock_principal();
    {outside:acquire_by_priority}
    DECLARE @line nvarchar(255) = LEFT(N'priority:' + @resource, 255), @gate nvarchar(255), @other nvarchar(255), @swap nvarchar(255),
            @uid_place nvarchar(70) = CONCAT(@uid, N'.1'), @class int = @priority + 1, @ageing int, @own bigint, @at datetime2(6),
            @eligible int, @code int, @looked int = 0, @name nvarchar(255), @freed nvarchar(255), @message nvarchar(1000), @dummy bit;
    SET @position = NULL;
    SET @granted = 0;
    SET @before = NULL;
    SET @ahead = 0;
    IF @priority IS NULL OR @priority NOT BETWEEN 0 AND 99 OR DATALENGTH(@resource) > 492
        THROW 50000, N'sqlsem: bad request: a priority is from 0 to 99, of a name with up to 246 characters', 1;
    SELECT @ageing = ageing_ms FROM {schema}.resource WHERE resource_id = @resource;
    IF @ageing IS NULL
    BEGIN
        SET @message = CONCAT(N'sqlsem: no priorities are set for ''', @resource, N''', and the request names one; an operator sets them with: ',
            N'sqlsem set ', @resource, N' --priorities --allow-new; or ask without a priority');
        EXEC {schema}.raise_error 50009, @message;
    END;
    SET @gate = LEFT(N'gate.sqlsem.{schema}.' + @resource, 255);
    SET @other = LEFT(N'gate.sqlsem.{schema}.' + @line, 255);
    IF @other < @gate COLLATE Latin1_General_100_BIN2  -- as in register_all
    BEGIN
        SET @swap = @gate;
        SET @gate = @other;
        SET @other = @swap;
    END;
    -- Most polls end in this block, without the gate. (Owners are not tested under the gate.)
    IF @place IS NOT NULL
        SELECT @own = queue_position, @at = requested_at FROM {schema}.entry
        WHERE resource_id = @line AND queue_position = @place AND member_id = @member AND revoked_at IS NULL;
    IF @own IS NOT NULL
    BEGIN
        SELECT @before = before, @ahead = ahead FROM {schema}.preceding_request(@line, @own, @at, @priority, @ageing);
        IF @before IS NOT NULL
        BEGIN
            SET @position = @own;
            EXEC @code = {schema}.check_if_dead @line, @before, @member;
            IF @code > 0
                SET @before = NULL;
        END
        ELSE
        BEGIN
            SELECT @eligible = eligible FROM {schema}.eligibility(@resource, 9223372036854775807, @access, @limit, @weight, NULL);
            IF @eligible = 0
            BEGIN
                SET @position = @own;
                EXEC {schema}.reap_dead_members @resource, @member;
            END;
        END;
    END;
    BEGIN TRY
        WHILE @position IS NULL
        BEGIN
            SET @own = NULL;
            SET @at = NULL;
            SET @before = NULL;
            SET @ahead = 0;
            BEGIN TRANSACTION;
            EXEC @code = sys.sp_getapplock @gate, N'Exclusive', N'Transaction', @patience, @principal;
            IF @code >= 0
                EXEC @code = sys.sp_getapplock @other, N'Exclusive', N'Transaction', @patience, @principal;
            IF @code < 0
                THROW 50002, N'sqlsem: busy: another session keeps the gate of this resource in an open transaction', 1;
            SELECT @position = queue_position, @granted = CASE WHEN revoked_at IS NULL THEN 1 ELSE 0 END FROM {schema}.entry
            WHERE request_uid = @uid AND resource_id = @resource AND member_id = @member;
            IF @position IS NOT NULL AND @granted = 0  -- the row was revoked since, and its owner has its grace
            BEGIN
                SET @position = NULL;
                COMMIT TRANSACTION;
                BREAK;
            END;
            IF @position IS NULL
            BEGIN
                SELECT @own = queue_position, @at = requested_at FROM {schema}.entry
                WHERE request_uid = @uid_place AND resource_id = @line AND member_id = @member AND revoked_at IS NULL;
                IF @own IS NULL AND @place IS NOT NULL
                BEGIN
                    COMMIT TRANSACTION;
                    BREAK;
                END;
                SET @at = COALESCE(@at, SYSUTCDATETIME());
                SELECT @before = before, @ahead = ahead FROM {schema}.preceding_request(@line, @own, @at, @priority, @ageing);
                IF @before IS NULL
                    EXEC {schema}.register @member, @requesting_id, @owner, @uid, 1, @resource, @access, @limit, @weight, @note, 0,
                        @position OUTPUT, @granted OUTPUT, @attended_ms = @attended_ms, @ranked = 1;
                IF @position IS NOT NULL AND @own IS NOT NULL
                BEGIN
                    EXEC @code = {schema}.remove @line, @own, N'released';
                    IF @code = -2
                        THROW 50002, N'sqlsem: busy: an open transaction has pinned this row (assert_holding); end that first', 1;
                    SET @freed = CONCAT(N'entry.sqlsem.{schema}.', @own);
                END
                ELSE IF @position IS NULL AND @own IS NOT NULL
                    SET @position = @own;
                ELSE IF @position IS NULL AND @try = 0
                BEGIN
                    EXEC {schema}.register @member, @requesting_id, @owner, @uid_place, 0, @line, N'read', 100, @class, @note, 0,
                        @position OUTPUT, @dummy OUTPUT, @attended_ms = @attended_ms, @ranked = 1;
                    IF @attended_ms IS NOT NULL  -- the waiter lease is only tested of waiting rows
                        UPDATE {schema}.entry SET granted_at = NULL WHERE resource_id = @line AND queue_position = @position;
                END;
            END;
            COMMIT TRANSACTION;
            IF @position IS NOT NULL OR @looked = 1
                BREAK;
            -- The try failed: test the owners ahead, and try once more.
            SET @looked = 1;
            IF @before IS NOT NULL
                EXEC @code = {schema}.check_if_dead @line, @before, @member;
            ELSE
                EXEC @code = {schema}.reap_dead_members @resource, @member;
            IF @code = 0
                BREAK;
        END;
    END TRY
    BEGIN CATCH
        {rollback}
        IF @position IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM {schema}.entry WHERE queue_position = @position)
        BEGIN
            SET @name = CONCAT(N'entry.sqlsem.{schema}.', @position);
            EXEC {schema}.release_session_lock @name;
        END;
        {throw_if_busy}
        THROW;
    END CATCH;
    IF @freed IS NOT NULL
        EXEC {schema}.release_session_lock @freed;
    IF @answer = 1
        SELECT @position AS queue_position, @granted AS granted, @before AS before, @ahead AS ahead;
{end_try_own}
