-- sqlsem, schema version 4, for SQL Server: what keeps the cost flat as the work grows. Programs of version 3 go on with these
-- tables.
-- FROZEN once released: later changes go into schema-5.sql. Run by `sqlsem init`, or by hand (`sqlsem sql`).

-- A page of a resource's history.
CREATE INDEX history_resource ON {schema}.history (resource_id, ended_at);

-- How much history is kept at the most, besides for how long: see prune.
INSERT INTO {schema}.setting (name, value)
SELECT N'history_rows', N'1000000' WHERE NOT EXISTS (SELECT 1 FROM {schema}.setting WHERE name = N'history_rows');
GO
