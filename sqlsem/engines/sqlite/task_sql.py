"""Runs and cancels the SQL of tasks, on SQLite."""

from __future__ import annotations

import contextlib
import random
import re
import sqlite3
import threading
import time
from typing import TYPE_CHECKING

from sqlsem.engines.sqlite import files, fork
from sqlsem.engines.sqlite.connection import FIRST_READ, SqliteConnection, is_busy
from sqlsem.values.errors import Unavailable

if TYPE_CHECKING:
    from sqlsem.engines.sqlite.engine import SqliteEngine

#: Seconds for which the SQL of a task waits for the file's write lock.
SQL_PATIENCE_SECONDS = 60.0
#: SQL that begins so manages transactions itself, or cannot run in one.
WITHOUT_TRANSACTION = ("BEGIN", "PRAGMA", "VACUUM", "ATTACH", "DETACH")


class SqliteTaskSql(SqliteConnection):
    """Runs the SQL of a task."""

    def __init__(self, engine: SqliteEngine) -> None:
        super().__init__(engine)
        self._working: sqlite3.Connection | None = None
        self._cancelled = threading.Event()

    def execute(self, text: str) -> str | None:
        fork.begin_executing(self)
        try:
            self._execute_text(text)
        finally:
            fork.end_executing(self)
        return None

    def _execute_text(self, text: str) -> None:
        # The SQL of a task gets a connection of its own, because it may manage transactions itself.
        before = files.identify(self.engine.path)
        self._working = connection = self.engine.open()
        with fork.forks_blocked, contextlib.suppress(sqlite3.Error), files.no_journal(self.engine.path, before):
            connection.execute(FIRST_READ).fetchall()
        statements = 0

        def allow(*_: object) -> int:
            # SQLite calls this before each statement. After a cancellation no further statement begins.
            nonlocal statements
            statements += 1
            return sqlite3.SQLITE_DENY if self._cancelled.is_set() else sqlite3.SQLITE_OK

        first = re.match(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/|;)*(\w*)", text, re.DOTALL)
        without_transaction = first is not None and first[1].upper() in WITHOUT_TRANSACTION
        timeout = f"PRAGMA busy_timeout = {SQL_PATIENCE_SECONDS * 1000:.0f};"
        script = f"{timeout}\n{text}" if without_transaction else f"BEGIN IMMEDIATE;\n{timeout}\n{text}\n;"
        deadline = time.monotonic() + SQL_PATIENCE_SECONDS
        pause = 0.001
        try:
            connection.set_authorizer(allow)
            while True:
                statements = 0
                try:
                    connection.executescript(script)
                    break
                except sqlite3.Error as exc:
                    # (A cancellation ends this wait for the write lock; it could not end SQLite's own.)
                    if without_transaction or statements > 1 or not is_busy(exc) or time.monotonic() > deadline:
                        raise
                self._cancelled.wait(random.uniform(0.5, 1) * pause)
                pause = min(pause * 1.5, 0.05)
            if connection.in_transaction:
                if without_transaction:
                    raise Unavailable(
                        f"{self.engine.label}: the SQL left a transaction open; end it with COMMIT", code="task-failed"
                    )
                connection.execute("COMMIT")
        except sqlite3.Error as exc:
            if self._cancelled.is_set():
                raise Unavailable(
                    f"{self.engine.label}: the SQL was ended before its time ({exc})", code="task-failed"
                ) from exc
            raise self.translate(exc) from exc
        finally:
            self._working = None
            connection.close()

    def cancel_running(self) -> None:
        self._cancelled.set()
        with fork.idle:
            # Interrupt repeatedly: between two statements an interrupt has no effect.
            while self in fork.executing:
                self._interrupt_working()
                if self.executing_in == threading.get_ident():
                    return  # (In a signal handler: the SQL ends after the handler has returned.)
                fork.idle.wait(0.02)

    def interrupt(self) -> None:
        super().interrupt()
        self._interrupt_working()

    def _interrupt_working(self) -> None:
        connection = self._working
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.interrupt()

    def close(self) -> None:
        fork.end_executing(self)  # in case an interrupt prevented it
        super().close()
