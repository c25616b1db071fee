-- sqlsem, schema version 3, for SQLite: when a member was last known to live, and who did what.
-- FROZEN once released: later changes go into schema-4.sql.
-- Times are seconds since 1970 by the host's clock. There are no logins: these are the names of the system's users.

ALTER TABLE {schema}_member ADD COLUMN login TEXT;
-- The last sign of life that was written here; the time of the beacon's file may be a later one.
ALTER TABLE {schema}_member ADD COLUMN seen_at REAL NOT NULL DEFAULT 0;
UPDATE {schema}_member SET seen_at = (julianday('now') - 2440587.5) * 86400.0;

ALTER TABLE {table} ADD COLUMN revoked_by TEXT;

ALTER TABLE {schema}_history ADD COLUMN concurrency_limit INTEGER;
ALTER TABLE {schema}_history ADD COLUMN host TEXT;
ALTER TABLE {schema}_history ADD COLUMN pid INTEGER;
ALTER TABLE {schema}_history ADD COLUMN program TEXT;
ALTER TABLE {schema}_history ADD COLUMN login TEXT;     -- the owner's
ALTER TABLE {schema}_history ADD COLUMN ended_by TEXT;  -- whose it was, when the owner did not end it itself
ALTER TABLE {schema}_history ADD COLUMN seen_at REAL;   -- the last sign of life of an owner that was found dead

ALTER TABLE {schema}_task ADD COLUMN put_by TEXT;
ALTER TABLE {schema}_task ADD COLUMN host TEXT;         -- of who runs it, or ran it last
ALTER TABLE {schema}_task ADD COLUMN pid INTEGER;
ALTER TABLE {schema}_task ADD COLUMN login TEXT;
UPDATE {schema}_task
SET host = (SELECT m.host FROM {schema}_member AS m WHERE m.member_id = {schema}_task.member_id),
    pid = (SELECT m.pid FROM {schema}_member AS m WHERE m.member_id = {schema}_task.member_id)
WHERE status = 'running';
ALTER TABLE {schema}_task_log ADD COLUMN login TEXT;

ALTER TABLE {schema}_round ADD COLUMN opened_by TEXT;
ALTER TABLE {schema}_round_part ADD COLUMN login TEXT;

UPDATE {schema}_setting SET value = '3' WHERE name = 'oldest_client';
