-- sqlsem, for PostgreSQL: removes everything, also the triggers of guarded tables, except the roles, which other
-- databases of the server may use.
DROP SCHEMA IF EXISTS {schema} CASCADE;
