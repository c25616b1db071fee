-- sqlsem, for SQL Server: removes everything, the roles too unless they have members. One batch.
DROP VIEW IF EXISTS {schema}.{table};
DROP TABLE IF EXISTS {schema}.entry;
DROP TABLE IF EXISTS {schema}.history;
DROP TABLE IF EXISTS {schema}.resource;
DROP TABLE IF EXISTS {schema}.member;
DROP TABLE IF EXISTS {schema}.setting;
DROP PROCEDURE IF EXISTS {schema}.enrol;
DROP PROCEDURE IF EXISTS {schema}.resume_member;
DROP PROCEDURE IF EXISTS {schema}.ping;
DROP PROCEDURE IF EXISTS {schema}.resign;
DROP PROCEDURE IF EXISTS {schema}.register;
DROP PROCEDURE IF EXISTS {schema}.register_all;
DROP PROCEDURE IF EXISTS {schema}.wait;
DROP PROCEDURE IF EXISTS {schema}.release;
DROP PROCEDURE IF EXISTS {schema}.cancel;
DROP PROCEDURE IF EXISTS {schema}.pin;
DROP PROCEDURE IF EXISTS {schema}.warm_up;
DROP PROCEDURE IF EXISTS {schema}.entries;
DROP PROCEDURE IF EXISTS {schema}.past;
DROP PROCEDURE IF EXISTS {schema}.resources;
DROP PROCEDURE IF EXISTS {schema}.settings;
DROP PROCEDURE IF EXISTS {schema}.set_resource;
DROP PROCEDURE IF EXISTS {schema}.[revoke];
DROP PROCEDURE IF EXISTS {schema}.reap;
DROP PROCEDURE IF EXISTS {schema}.prune;
DROP PROCEDURE IF EXISTS {schema}.place;
DROP PROCEDURE IF EXISTS {schema}.suspect_all;
DROP PROCEDURE IF EXISTS {schema}.suspect;
DROP PROCEDURE IF EXISTS {schema}.bury;
DROP PROCEDURE IF EXISTS {schema}.let_go;
DROP PROCEDURE IF EXISTS {schema}.remove;
DROP FUNCTION IF EXISTS {schema}.ahead;
DROP SEQUENCE IF EXISTS {schema}.beacon;
DROP SCHEMA IF EXISTS {schema};
IF NOT EXISTS (SELECT 1 FROM sys.database_role_members WHERE role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_user'))
    DROP ROLE IF EXISTS {schema}_user;
IF NOT EXISTS (SELECT 1 FROM sys.database_role_members WHERE role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_operator'))
    DROP ROLE IF EXISTS {schema}_operator;
IF NOT EXISTS (SELECT 1 FROM sys.database_role_members WHERE role_principal_id = DATABASE_PRINCIPAL_ID(N'{schema}_reader'))
    DROP ROLE IF EXISTS {schema}_reader;
