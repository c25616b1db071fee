-- sqlsem, the statements of `sqlsem certify` for SQLite, in a separate file. (Most are in sqlsem/sql/statements.)
-- where {name} is TEXT
-- where {options} is WITHOUT ROWID
-- where {mark} is ?

-- name: facts
SELECT 'server', 'SQLite ' || sqlite_version() UNION ALL SELECT 'version', sqlite_version()

-- name: hidden
-- Names that the report must not contain, and the placeholders for them: none.
SELECT NULL, NULL WHERE 0

-- name: raw_take
BEGIN IMMEDIATE

-- name: raw_give
COMMIT
