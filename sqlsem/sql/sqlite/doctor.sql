-- sqlsem, the statements of `sqlsem doctor` for SQLite.

-- name: journal_mode
PRAGMA journal_mode
