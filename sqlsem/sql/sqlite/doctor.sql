-- sqlsem, what `sqlsem doctor` asks SQLite.

-- name: journal_mode
PRAGMA journal_mode
