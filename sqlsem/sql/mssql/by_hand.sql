-- sqlsem, the statements around all scripts for SQL Server, if a person runs them (`sqlsem sql mssql`).

-- name: begin
-- sqlsem, all scripts for SQL Server, in one transaction. Run them so that an error ends it:
--   sqlcmd -b -I -f 65001 -S SERVER -d DATABASE -i THIS-FILE.sql
-- (In Management Studio: SQLCMD mode, and :on error exit as the first line.)
-- An error undoes all of them.
SET XACT_ABORT ON;
SET LOCK_TIMEOUT 3000;
BEGIN TRANSACTION

-- name: commit
COMMIT TRANSACTION
