-- sqlsem, for SQLite: removes everything.
DROP TABLE IF EXISTS {schema}_operation;
DROP TABLE IF EXISTS {schema}_schedule;
DROP TABLE IF EXISTS {schema}_round_part;
DROP TABLE IF EXISTS {schema}_round;
DROP TABLE IF EXISTS {schema}_task_log;
DROP TABLE IF EXISTS {schema}_task;
DROP TABLE IF EXISTS {table};
DROP TABLE IF EXISTS {schema}_history;
DROP TABLE IF EXISTS {schema}_resource;
DROP TABLE IF EXISTS {schema}_member;
DROP TABLE IF EXISTS {schema}_setting;
