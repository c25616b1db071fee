-- sqlsem, the features of this database, for SQL Server: `sqlsem init` upgrades these features, and adds others. May be
-- run again.

UPDATE {schema}.setting SET value = N'{features}' WHERE name = N'features' AND value <> N'{features}';
GO
