"""SQLite's sessions: the beacons of members, the tables, and the SQL of tasks."""

from __future__ import annotations

import contextlib
import random
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sqlsem.engines import borrowed
from sqlsem.engines.base import Disconnected
from sqlsem.engines.protocol import Check, Plan
from sqlsem.engines.sqlite import files, fork
from sqlsem.engines.sqlite.beacons import Beacons
from sqlsem.engines.sqlite.connection import FIRST_READ, is_busy
from sqlsem.engines.sqlite.doctor import SqliteDoctor
from sqlsem.engines.sqlite.shortcuts import SqliteShortcuts
from sqlsem.engines.sqlite.users import user_name
from sqlsem.engines.statements.all import AllStatements
from sqlsem.engines.statements.session import BorrowedStatements
from sqlsem.values.errors import Unavailable

if TYPE_CHECKING:
    from sqlsem.engines.sqlite.engine import SqliteEngine

#: A free beacon that no member names is orphaned after this many seconds.
ORPHANED_SECONDS = 60.0
#: Seconds for which the SQL of a task waits for the file's write lock.
SQL_PATIENCE_SECONDS = 60.0
#: SQL that begins so manages transactions itself, or cannot run in one.
WITHOUT_TRANSACTION = ("BEGIN", "PRAGMA", "VACUUM", "ATTACH", "DETACH")


class SqliteSession(SqliteShortcuts, AllStatements):
    """One connection with all capabilities."""

    def __init__(self, engine: SqliteEngine) -> None:
        super().__init__(engine)
        self._working: sqlite3.Connection | None = None
        self._cancelled = threading.Event()

    # -- the beacon of this session's member, and the file that has its rows --------------------------------------

    @property
    def beacons(self) -> Beacons:
        return self.engine.beacons

    def login(self) -> str:
        return user_name()

    def create_beacon(self) -> str | None:
        if self.options.lease is not None:
            return None
        with fork.forks_blocked:  # so that no fork comes in between
            before, self.beacon = self.beacon, self.engine.beacons.create()
        if before is not None:
            before.remove()
        return self.beacon.name

    def keep_beacon(self, member_id: int) -> bool:
        self.require_in_place(file_by_file=True)
        # If the beacon's file was removed, create a new one: other processes cannot test a missing beacon.
        if self.beacon is None:
            return True
        self.beacon.touch()
        return self.beacon.in_place or self.reattach_member(member_id)

    def follow_member(self) -> bool:
        known, self.engine.files = self.engine.files, self.files
        return known is None or self.files is None or known.database == self.files.database

    def sweep_beacons(self) -> None:
        known = {row["beacon"] for row in self.rows("beacons")}
        for name in self.engine.beacons.names():
            if name not in known:
                with self.engine.beacons.probe(name) as probe:
                    age = 0.0 if probe.seen is None else abs(time.time() - probe.seen)
                    if probe.held is False and age > ORPHANED_SECONDS:
                        probe.remove()

    # -- the tables -----------------------------------------------------------------------------------------------

    def prepare(self, purpose: str) -> None:
        """Create the tables if they are missing, so that nothing has to be installed by hand."""
        if self.engine.creates and self.settings() is None:
            self.install(self.engine.plan)

    def install(self, plan: Plan) -> None:
        with fork.forks_blocked, self.transaction():
            # Read under the lock: another process may have just installed the tables.
            current = self.settings()
            if current is None and self.row("is_empty")["is_empty"]:
                self._require_no_members()
            if current is None:
                self.require_own_table()
            for version, text in plan(current or {}):
                for statement in _statements(text):
                    self.run_text(statement)
                if version is not None:
                    self.run("set_version", (str(version),))

    def _require_no_members(self) -> None:
        """Raise `Disconnected` while live processes have the previous file at this path open. They hold its locks until
        their next heartbeat, which notices that the file was replaced.
        """
        held = self.engine.beacons.held()
        if held:
            number = f"{len(held)} process{'es' if len(held) > 1 else ''}"
            raise Disconnected(
                f"{self.engine.label} is empty, but {number} still use the file that was here before; it was deleted, "
                f"moved or truncated under them. They notice at their next ping; end those that do not, as paused ones "
                f"(fuser -v {self.engine.beacons.folder}/*)",
                code="sqlite-file",
            )

    def diagnose(self) -> list[Check]:
        return SqliteDoctor(self).examine()

    # -- the SQL of tasks -----------------------------------------------------------------------------------------

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


def _statements(text: str) -> Iterator[str]:
    """Yield the statements of a script."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


class BorrowedSqliteSession(BorrowedStatements, SqliteSession):
    """A session that runs its statements by the caller's cursor."""

    def __init__(self, engine: SqliteEngine, cursor: Any) -> None:
        self.queries = engine.queries()
        self._cursor = cursor

    def run_text(self, statement: str, parameters: Any = ()) -> Any:
        borrowed.execute(self._cursor, statement, parameters)
        return self._cursor

    def rows_of_text(self, statement: str, parameters: Any = ()) -> list[Any]:
        borrowed.execute(self._cursor, statement, parameters)
        names = [column[0] for column in self._cursor.description or ()]
        return [dict(zip(names, borrowed.values(row), strict=True)) for row in self._cursor.fetchall()]
