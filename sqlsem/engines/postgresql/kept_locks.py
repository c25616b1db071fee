"""Locks that sessions keep in a PostgreSQL database."""

from __future__ import annotations

from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.insight.kept import KeptLock


class PostgresKeptLocks(PostgresConnection):
    """Kept locks: advisory locks, and the table locks that sqlsem takes instead of some."""

    def kept_locks(self, resource: str | None) -> list[KeptLock]:
        return [KeptLock(*row) for row in self.rows("kept_locks", (resource,))]
