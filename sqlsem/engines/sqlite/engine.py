"""SQLite, as `sqlsem.engines` finds it."""

from __future__ import annotations

from sqlsem.engines.sqlite.conversions import SqliteConversions
from sqlsem.engines.sqlite.database import SqliteDatabase
from sqlsem.engines.sqlite.overview import SqliteOverview
from sqlsem.engines.sqlite.schedules import SqliteSchedules


class SqliteSession(SqliteConversions, SqliteOverview, SqliteSchedules):
    """One connection, in all roles."""


class SqliteEngine(SqliteDatabase):
    """An SQLite file, and sessions on it."""

    session_class = SqliteSession

    def reach(self, purpose: str) -> SqliteSession:
        return SqliteSession(self)
