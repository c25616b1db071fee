"""Locks that are released when a transaction of the caller commits, on SQL Server."""

from __future__ import annotations

from sqlsem.engines.mssql.connection import SqlServerConnection


class SqlServerCommitRelease(SqlServerConnection):
    """Commit markers, as rows of a table."""

    def database_identity(self) -> str:
        return str(self.value("database_identity"))

    def is_committed(self, marker: str) -> bool:
        return bool(self.value("is_committed", marker))

    def delete_commit_marker(self, marker: str) -> None:
        self.rows("delete_commit_marker", marker)
