-- sqlsem, schema version 4, for SQLite: what keeps the cost flat as the work grows. Programs of version 3 go on with these
-- tables.
-- FROZEN once released: later changes go into schema-5.sql.

-- A page of a resource's history; the newest end first.
CREATE INDEX {schema}_history_resource ON {schema}_history (resource_id);

-- How much history is kept at the most, besides for how long.
INSERT OR IGNORE INTO {schema}_setting (name, value) VALUES ('history_rows', '1000000');
