"""Locks that are released when a transaction of the caller commits, on SQL Server."""

from __future__ import annotations

from sqlsem.engines.commit_release import CommitReleaseSession
from sqlsem.engines.mssql.connection import SqlServerConnection


class SqlServerCommitRelease(SqlServerConnection, CommitReleaseSession):
    """Commit markers."""

    def database_identity(self) -> str:
        return str(self.value("database_identity"))

    def is_committed(self, word: str) -> bool:
        return bool(self.value("is_committed", word))

    def delete_commit_marker(self, word: str) -> None:
        self.rows("delete_commit_marker", word)
