-- sqlsem, for SQL Server: removes everything, also the roles that have no members. One batch.
-- Triggers of guarded tables come first: without the procedure that they call, every write would fail.
DECLARE @drop nvarchar(600);
WHILE EXISTS (SELECT 1 FROM sys.triggers AS t JOIN sys.sql_modules AS m ON m.object_id = t.object_id
              WHERE CHARINDEX(N'{schema}.check_guard @@PROCID, N''', m.definition) > 0)
BEGIN
    SELECT TOP (1) @drop = CONCAT(N'DROP TRIGGER ', QUOTENAME(OBJECT_SCHEMA_NAME(t.parent_id)), N'.', QUOTENAME(t.name))
    FROM sys.triggers AS t JOIN sys.sql_modules AS m ON m.object_id = t.object_id
    WHERE CHARINDEX(N'{schema}.check_guard @@PROCID, N''', m.definition) > 0;
    EXEC (@drop);
END;
DROP TRIGGER IF EXISTS {schema}.number_bare_row;
DROP VIEW IF EXISTS {schema}.{table};
DROP TABLE IF EXISTS {schema}.rate_slot, {schema}.rate_window, {schema}.handover, {schema}.once_run,
    {schema}.commit_marker, {schema}.operation, {schema}.schedule, {schema}.batch_part, {schema}.batch,
    {schema}.queue_wait, {schema}.queue_key, {schema}.queue_setting, {schema}.queue_proxy, {schema}.task_lock,
    {schema}.task_log, {schema}.task, {schema}.entry, {schema}.low_water, {schema}.history, {schema}.resource,
    {schema}.limit_pattern, {schema}.member, {schema}.setting;
WHILE EXISTS (SELECT 1 FROM sys.objects WHERE schema_id = SCHEMA_ID(N'{schema}') AND type IN ('P', 'FN', 'IF'))
BEGIN
    SELECT TOP (1) @drop = CONCAT(N'DROP ', CASE WHEN type = 'P' THEN N'PROCEDURE' ELSE N'FUNCTION' END, N' {schema}.', QUOTENAME(name))
    FROM sys.objects WHERE schema_id = SCHEMA_ID(N'{schema}') AND type IN ('P', 'FN', 'IF');
    EXEC (@drop);
END;
DROP SEQUENCE IF EXISTS {schema}.beacon;
DROP SCHEMA IF EXISTS {schema};
IF DATABASE_PRINCIPAL_ID(N'{schema}_locks') IS NOT NULL
BEGIN
    -- The other roles are members of {schema}_locks.
    IF IS_ROLEMEMBER(N'{schema}_locks', N'{schema}_user') = 1 ALTER ROLE {schema}_locks DROP MEMBER {schema}_user;
    IF IS_ROLEMEMBER(N'{schema}_locks', N'{schema}_putter') = 1 ALTER ROLE {schema}_locks DROP MEMBER {schema}_putter;
    IF IS_ROLEMEMBER(N'{schema}_locks', N'{schema}_worker') = 1 ALTER ROLE {schema}_locks DROP MEMBER {schema}_worker;
    IF IS_ROLEMEMBER(N'{schema}_locks', N'{schema}_operator') = 1 ALTER ROLE {schema}_locks DROP MEMBER {schema}_operator;
    IF IS_ROLEMEMBER(N'{schema}_locks', N'{schema}_reader') = 1 ALTER ROLE {schema}_locks DROP MEMBER {schema}_reader;
END;
IF NOT EXISTS (SELECT 1 FROM sys.database_role_members WHERE role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_locks'))
    DROP ROLE IF EXISTS {schema}_locks;
IF NOT EXISTS (SELECT 1 FROM sys.database_role_members WHERE role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_user'))
    DROP ROLE IF EXISTS {schema}_user;
IF NOT EXISTS (SELECT 1 FROM sys.database_role_members WHERE role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_putter'))
    DROP ROLE IF EXISTS {schema}_putter;
IF NOT EXISTS (SELECT 1 FROM sys.database_role_members WHERE role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_worker'))
    DROP ROLE IF EXISTS {schema}_worker;
IF NOT EXISTS (SELECT 1 FROM sys.database_role_members WHERE role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_operator'))
    DROP ROLE IF EXISTS {schema}_operator;
IF NOT EXISTS (SELECT 1 FROM sys.database_role_members WHERE role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_reader'))
    DROP ROLE IF EXISTS {schema}_reader;
