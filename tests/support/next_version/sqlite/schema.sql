-- For tests alone: the version after this one, for SQLite.

ALTER TABLE {table} ADD COLUMN colour TEXT;
ALTER TABLE {schema}_member ADD COLUMN colour TEXT;
ALTER TABLE {schema}_task ADD COLUMN colour TEXT NOT NULL DEFAULT 'red';
CREATE TABLE {schema}_added (made_at REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0));
INSERT INTO {schema}_added DEFAULT VALUES;
-- As where a trigger changes, which is in place of a routine here.
DROP TRIGGER {table}_bare;
CREATE TRIGGER {table}_bare AFTER INSERT ON {table} WHEN NEW.request_uid IS NULL
BEGIN
    SELECT RAISE(ABORT, 'sqlsem: the table gives the number: leave out queue_position, member_id, granted_at and colour')
    WHERE NEW.member_id IS NOT NULL OR NEW.granted_at IS NOT NULL OR NEW.revoked_at IS NOT NULL OR NEW.colour IS NOT NULL
       OR EXISTS (SELECT 1 FROM {table} WHERE queue_position > NEW.queue_position);
END;
