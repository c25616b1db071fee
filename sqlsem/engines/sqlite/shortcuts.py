"""Statements of SQLite that need no transaction: to acquire and release a free lock, and to notice changes."""

from __future__ import annotations

import sqlite3
from typing import Any

from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.connection import SqliteConnection

#: The statements that prepare a connection for routines (see client.sql).
ROUTINES = ("leaving", "leaving_alone")


class SqliteShortcuts(SqliteConnection):
    """The short ways of a connection."""

    has_routines: sqlite3.Connection | None = None  # the connection that was prepared for routines

    def register_alone(self, values: dict[str, Any]) -> int | None:
        with fork.forks_blocked:
            self.roll_back()
            inserted = self.run_text(self.queries["insert_first"], values)
            return inserted.lastrowid if inserted.rowcount == 1 else None

    def leave_alone(self, values: dict[str, Any]) -> bool:
        with fork.forks_blocked:  # a fork would close the connection, which counts the changed rows
            self.roll_back()
            connection = self.connection or self.open_connection()
            if self.has_routines is not connection:
                self._create_routines(connection)
            before = connection.total_changes
            self.run_text(self.queries["leave_alone"], values)
            left = connection.total_changes > before
            if left:
                self.wrote()
            return left

    def version(self) -> tuple[int, int]:
        return self.row("data_version")["data_version"], id(self.connection)

    def _create_routines(self, connection: sqlite3.Connection) -> None:
        """Prepare an open connection for the routines of client.sql."""
        self.rows_of_text("PRAGMA temp_store = MEMORY")
        for routine in ROUTINES:
            self.run(routine)
        self.has_routines = connection
