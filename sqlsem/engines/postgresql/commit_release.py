"""Locks that are released when a transaction of the caller commits, on PostgreSQL."""

from __future__ import annotations

from sqlsem.engines.postgresql.connection import PostgresConnection


class PostgresCommitRelease(PostgresConnection):
    """Commit markers, as rows of a table."""

    def database_identity(self) -> str:
        return str(self.row("database_identity")[0])

    def is_committed(self, marker: str) -> bool:
        return bool(self.row("is_committed", marker)[0])

    def delete_commit_marker(self, marker: str) -> None:
        self.rows("delete_commit_marker", (marker,))
