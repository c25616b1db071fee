-- sqlsem, for SQLite: removes everything.
DROP TABLE IF EXISTS {table};
DROP TABLE IF EXISTS {schema}_history;
DROP TABLE IF EXISTS {schema}_resource;
DROP TABLE IF EXISTS {schema}_member;
DROP TABLE IF EXISTS {schema}_setting;
