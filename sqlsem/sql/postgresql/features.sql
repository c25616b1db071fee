-- sqlsem, the features of this database, for PostgreSQL: `sqlsem init` upgrades these features, and adds others. May be
-- run again.

-- Resolve names to the objects of the system, whatever search_path the installing login has.
SET search_path = pg_catalog, pg_temp;

UPDATE {schema}.setting SET value = '{features}' WHERE name = 'features' AND value <> '{features}';
