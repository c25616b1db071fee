"""Locks that are released when a transaction of the caller commits, on SQLite."""

from __future__ import annotations

from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.connection import SqliteConnection


class SqliteCommitRelease(SqliteConnection):
    """Commit markers, as rows of a table."""

    def database_identity(self) -> str:
        return str(self.row("database_identity")["place"])

    def is_committed(self, marker: str) -> bool:
        return self.row("is_committed", (marker,)) is not None

    def delete_commit_marker(self, marker: str) -> None:
        with fork.forks_blocked, self.writing():
            self.run("delete_commit_marker", (marker,))
