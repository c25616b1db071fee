"""Locks that a session keeps."""

from __future__ import annotations

from sqlsem.engines.keeping import KeepingSession
from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.insight.kept import KeptLock


class PostgresKeeping(PostgresConnection, KeepingSession):
    """Advisory locks, and locks on tables that stand for one."""

    def kept_locks(self, resource: str | None) -> list[KeptLock]:
        return [KeptLock(*row) for row in self.rows("kept_locks", (resource,))]
