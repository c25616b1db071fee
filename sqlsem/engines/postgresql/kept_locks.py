"""Locks that a session keeps."""

from __future__ import annotations

from sqlsem.engines.kept_locks import KeptLockSession
from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.insight.kept import KeptLock


class PostgresKeptLocks(PostgresConnection, KeptLockSession):
    """Advisory locks, and locks on tables that stand for one."""

    def kept_locks(self, resource: str | None) -> list[KeptLock]:
        return [KeptLock(*row) for row in self.rows("kept_locks", (resource,))]
