"""SQLite, as `sqlsem.engines` finds it."""

from __future__ import annotations

from sqlsem.engines.sqlite.conversions import SqliteConversions
from sqlsem.engines.sqlite.database import SqliteDatabase
from sqlsem.engines.sqlite.tasks import SqliteTasks
from sqlsem.engines.sqlite.upkeep import SqliteUpkeep


class SqliteSession(SqliteConversions, SqliteTasks, SqliteUpkeep):
    """One connection, in all roles."""


class SqliteEngine(SqliteDatabase):
    """An SQLite file, and sessions on it."""

    session_class = SqliteSession

    def reach(self, purpose: str) -> SqliteSession:
        return SqliteSession(self)
