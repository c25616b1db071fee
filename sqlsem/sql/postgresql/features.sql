-- sqlsem, the features of this database, for PostgreSQL: `sqlsem init` upgrades these features, and adds others. May be run again.

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

UPDATE {schema}.setting SET value = '{features}' WHERE name = 'features' AND value <> '{features}';
