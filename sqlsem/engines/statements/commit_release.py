"""Locks that are released when a transaction of the caller commits."""

from __future__ import annotations

from sqlsem.engines.statements.session import StatementSession


class CommitReleaseStatements(StatementSession):
    """Commit markers, as rows of a table."""

    def database_identity(self) -> str:
        return str(self.row("database_identity")["place"])

    def is_committed(self, marker: str) -> bool:
        return self.row("is_committed", (marker,)) is not None

    def delete_commit_marker(self, marker: str) -> None:
        with self.forks_blocked, self.transaction():
            self.run("delete_commit_marker", (marker,))
