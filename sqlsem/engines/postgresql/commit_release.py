"""Locks that are released when a transaction of the caller commits, on PostgreSQL."""

from __future__ import annotations

from sqlsem.engines.commit_release import CommitReleaseSession
from sqlsem.engines.postgresql.connection import PostgresConnection


class PostgresCommitRelease(PostgresConnection, CommitReleaseSession):
    """Commit markers."""

    def database_identity(self) -> str:
        return str(self.row("database_identity")[0])

    def is_committed(self, word: str) -> bool:
        return bool(self.row("is_committed", word)[0])

    def delete_commit_marker(self, word: str) -> None:
        self.rows("delete_commit_marker", (word,))
