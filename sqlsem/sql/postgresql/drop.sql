-- sqlsem, for PostgreSQL: removes everything but the roles, which other databases of the server may use.
DROP SCHEMA IF EXISTS {schema} CASCADE;
