-- sqlsem, for SQL Server: removes everything, the roles too unless they have members. One batch.
DROP TRIGGER IF EXISTS {schema}.number_bare_row;
DROP VIEW IF EXISTS {schema}.{table};
DROP TABLE IF EXISTS {schema}.operation;
DROP TABLE IF EXISTS {schema}.schedule;
DROP TABLE IF EXISTS {schema}.round_part;
DROP TABLE IF EXISTS {schema}.[round];
DROP TABLE IF EXISTS {schema}.task_log;
DROP TABLE IF EXISTS {schema}.task;
DROP TABLE IF EXISTS {schema}.entry;
DROP TABLE IF EXISTS {schema}.history;
DROP TABLE IF EXISTS {schema}.resource;
DROP TABLE IF EXISTS {schema}.member;
DROP TABLE IF EXISTS {schema}.setting;
DECLARE @drop nvarchar(400);
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
    -- It has the others for members.
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
