"""The parts that simulations on SQLite share, in memory and on files: clock, rows, and waits for changes."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

from sqlsem.testing.fibers import Fibers
from sqlsem.testing.real import RealServer, Row

__all__ = ["VirtualClock", "VirtualSqlite", "VirtualWakeup"]

ROWS = """
SELECT q.resource_id, q.queue_position, m.host, q.requesting_id, q.granted_at IS NOT NULL, q.revoked_at IS NOT NULL
FROM ProcessControl AS q LEFT JOIN sqlsem_member AS m USING (member_id) ORDER BY q.resource_id, q.queue_position
"""
OUTCOME = "SELECT outcome FROM sqlsem_history WHERE resource_id = ? AND queue_position = ? ORDER BY rowid DESC"


class VirtualSqlite(RealServer):
    """An SQLite database. ``reader``: the connection with which the simulation reads the tables."""

    def __init__(self, fibers: Fibers, reader: sqlite3.Connection) -> None:
        super().__init__(fibers)
        self.reader = reader
        self._waiting: dict[int, threading.Event] = {}

    def rows(self) -> list[Row]:
        return [Row(*row[:4], *map(bool, row[4:])) for row in self.reader.execute(ROWS)]

    def outcome(self, row: Row) -> str | None:
        found = self.reader.execute(OUTCOME, (row.resource, row.position)).fetchone()
        return None if found is None else str(found[0])

    def wait_for(self, seconds: float, wakeup: threading.Event | None = None) -> None:
        """Wait until a session writes or ``wakeup`` is set, for ``seconds`` at most."""
        changed = self.fibers.event() if wakeup is None else wakeup
        key = id(changed)
        self._waiting[key] = changed
        try:
            changed.wait(seconds)
        finally:
            self._waiting.pop(key, None)

    def wake(self) -> None:
        """Wake the waiters after a write."""
        for event in list(self._waiting.values()):
            event.set()


class VirtualWakeup:
    """A wakeup event that any write sets, too. A session waits for it for at least ``shortest`` seconds."""

    def __init__(self, server: VirtualSqlite, wakeup: threading.Event, shortest: float) -> None:
        self._server, self._event, self._shortest = server, wakeup, shortest
        self.is_set, self.clear = wakeup.is_set, wakeup.clear

    def wait(self, seconds: float) -> None:
        """Wait until the event is set or a session writes."""
        self._server.wait_for(max(seconds, self._shortest), self._event)


class VirtualClock:
    """The function ``julianday('now')`` of a connection, in virtual time."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.server: VirtualSqlite | None = None
        connection.execute("PRAGMA trusted_schema = ON")  # the tables' defaults use the clock
        connection.create_function("julianday", 1, self._julianday)

    def _julianday(self, when: Any) -> float:
        if when != "now" or self.server is None:
            raise ValueError(f"only the time now is known here, not {when!r}")
        return self.server.clock / 86400.0 + 2440587.5
