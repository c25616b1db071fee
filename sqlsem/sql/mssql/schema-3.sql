-- sqlsem, schema version 3, for SQL Server: member numbers that never run out, signs of life, and who it was.
-- FROZEN once released: later changes go into schema-4.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).
-- Locks may be held meanwhile. All times are UTC.

-- Some engines that only speak T-SQL do not change a column under a view. (On SQL Server the view keeps its grants.)
IF @@VERSION NOT LIKE N'Microsoft SQL %'
    DROP VIEW {schema}.{table};
DROP INDEX entry_member ON {schema}.entry;
DROP INDEX task_open ON {schema}.task;
GO
-- The primary key has a name that the server made up.
DECLARE @statement nvarchar(400);
SELECT @statement = CONCAT(N'ALTER TABLE {schema}.member DROP CONSTRAINT ', QUOTENAME(name))
FROM sys.key_constraints WHERE parent_object_id = OBJECT_ID(N'{schema}.member') AND type = 'PK';
EXEC (@statement);
GO
IF @@VERSION LIKE N'Microsoft SQL %'
    EXEC (N'ALTER TABLE {schema}.member ALTER COLUMN member_id bigint NOT NULL');
ELSE  -- it stays NOT NULL by itself
    EXEC (N'ALTER TABLE {schema}.member ALTER COLUMN member_id bigint');
-- (They stay nullable: what does not say NOT NULL here is.)
ALTER TABLE {schema}.entry ALTER COLUMN member_id bigint;
ALTER TABLE {schema}.[round] ALTER COLUMN then_member bigint;
ALTER TABLE {schema}.round_part ALTER COLUMN member_id bigint;
GO
-- What may be large is not written anew, as everybody waits meanwhile. Of a task only who runs it now counts; of what has
-- ended host, pid and login tell who it was.
ALTER TABLE {schema}.history DROP COLUMN member_id;
ALTER TABLE {schema}.history ADD member_id bigint NULL;
ALTER TABLE {schema}.task_log DROP COLUMN member_id;
ALTER TABLE {schema}.task_log ADD member_id bigint NULL;
GO
DECLARE @running TABLE (task_id bigint NOT NULL PRIMARY KEY, member_id bigint NULL);
INSERT INTO @running (task_id, member_id) SELECT task_id, member_id FROM {schema}.task WHERE status = N'running';
ALTER TABLE {schema}.task DROP COLUMN member_id;
ALTER TABLE {schema}.task ADD member_id bigint NULL;  -- who runs it now
UPDATE {schema}.task SET member_id = (SELECT r.member_id FROM @running AS r WHERE r.task_id = task.task_id)
WHERE task_id IN (SELECT r.task_id FROM @running AS r);
GO
ALTER TABLE {schema}.member ADD CONSTRAINT member_pk PRIMARY KEY (member_id);
CREATE INDEX entry_member ON {schema}.entry (member_id) INCLUDE (request_uid, revoked_at); -- all that a ping reads
CREATE INDEX task_open ON {schema}.task (queue_name, is_open, task_order, task_id)
    INCLUDE (status, ready_at, member_id, claim_uid, attempt);
GO
IF OBJECT_ID(N'{schema}.{table}') IS NOT NULL
    EXEC (N'EXEC sp_refreshview N''{schema}.{table}''');
ELSE
    EXEC (N'CREATE VIEW {schema}.{table} AS
SELECT NULLIF(queue_position, CAST(0 AS bigint)) AS queue_position, -- so that it may be left out
       resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner, request_uid,
       requested_at, granted_at, revoked_at, note, attended_until
FROM {schema}.entry');
GO

-- When the member last gave a sign of life. Dead: no beacon, and the last sign is older than the grace.
ALTER TABLE {schema}.member ADD seen_at datetime2(6) NOT NULL CONSTRAINT member_seen_at DEFAULT SYSUTCDATETIME();

ALTER TABLE {schema}.entry ADD revoked_by nvarchar(128) NULL;

ALTER TABLE {schema}.history ADD concurrency_limit int NULL;
ALTER TABLE {schema}.history ADD host nvarchar(255) NULL;  -- of the owner's member, as are pid, program and login
ALTER TABLE {schema}.history ADD pid int NULL;
ALTER TABLE {schema}.history ADD program nvarchar(255) NULL;
ALTER TABLE {schema}.history ADD login nvarchar(128) NULL;
ALTER TABLE {schema}.history ADD ended_by nvarchar(128) NULL;  -- the login that ended it, where its owner did not
ALTER TABLE {schema}.history ADD seen_at datetime2(6) NULL;  -- the last sign of life of an owner that died

ALTER TABLE {schema}.task ADD put_by nvarchar(128) NULL CONSTRAINT task_put_by DEFAULT ORIGINAL_LOGIN();
ALTER TABLE {schema}.task ADD host nvarchar(255) NULL;  -- of who runs it, or ran it last, as are pid and login
ALTER TABLE {schema}.task ADD pid int NULL;
ALTER TABLE {schema}.task ADD login nvarchar(128) NULL;
ALTER TABLE {schema}.task_log ADD login nvarchar(128) NULL;
ALTER TABLE {schema}.[round] ADD opened_by nvarchar(128) NULL CONSTRAINT round_opened_by DEFAULT ORIGINAL_LOGIN();
ALTER TABLE {schema}.round_part ADD login nvarchar(128) NULL;
GO

-- The principal that the application locks belong to: public, until permissions.sql finds a moment at which nobody has
-- one. Then it is a role, and anyone who is not in it cannot take sqlsem's locks away from those who are.
CREATE FUNCTION {schema}.lock_principal() RETURNS nvarchar(128) AS
BEGIN
    RETURN N'public';
END;
GO

-- permissions.sql gives those who have the roles of version 2 what these could do.
INSERT INTO {schema}.setting (name, value)
SELECT N'roles_to_move', N'2' WHERE OBJECT_ID(N'{schema}.register') IS NOT NULL;
UPDATE {schema}.setting SET value = N'3' WHERE name = N'oldest_client';
GO
