-- For tests alone: the version after this one, for MariaDB and MySQL.

ALTER TABLE {table} ADD COLUMN colour varchar(16);
ALTER TABLE {schema}_member ADD COLUMN colour varchar(16);
ALTER TABLE {schema}_task ADD COLUMN colour varchar(16) NOT NULL DEFAULT 'red';
CREATE TABLE IF NOT EXISTS {schema}_added (made_by bigint NOT NULL DEFAULT 1);
INSERT INTO {schema}_added (made_by) VALUES (CONNECTION_ID());
