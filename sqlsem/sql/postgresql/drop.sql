-- sqlsem, for PostgreSQL: removes everything but the roles, which other databases of the server may use; the triggers of
-- guarded tables, too.
DROP SCHEMA IF EXISTS {schema} CASCADE;
