-- sqlsem, schema version 4, for SQL Server: what keeps the cost flat as the work grows. Programs of version 3 go on with these
-- tables.
-- FROZEN once released: later changes go into schema-5.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).

-- Low-water marks: see PostgreSQL's schema-4.sql. (The survivors as a JSON array.)
CREATE TABLE {schema}.low_water (
    resource_id nvarchar(255) COLLATE Latin1_General_100_BIN2 NOT NULL,
    mark        bigint NOT NULL,
    survivors   nvarchar(4000) NOT NULL,
    made_at     datetime2(6) NOT NULL CONSTRAINT low_water_made_at DEFAULT SYSUTCDATETIME(),
    CONSTRAINT low_water_pk PRIMARY KEY (resource_id, mark)
);
-- A page of a resource's history.
CREATE INDEX history_resource ON {schema}.history (resource_id, ended_at);

-- How much history is kept at the most, besides for how long: see prune.
INSERT INTO {schema}.setting (name, value)
SELECT N'history_rows', N'1000000' WHERE NOT EXISTS (SELECT 1 FROM {schema}.setting WHERE name = N'history_rows');
GO
