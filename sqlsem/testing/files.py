"""SQLite in a simulation: the real engine on a real file, one connection a session, in virtual time.

The steps of a session are: a statement outside of transactions, the beginning of a transaction that writes, its COMMIT,
and the answer after that. Interleavings between two statements of a transaction do not matter, because no other
connection sees or changes anything then. A session that finds the file locked (SQLITE_BUSY) lets other sessions run,
like a waiter for a lock. SQL gets the virtual time, as the simulation replaces the function ``julianday('now')``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from sqlsem.engines.base import Busy, Disconnected, Engine, Options
from sqlsem.engines.sqlite.connection import is_busy
from sqlsem.engines.sqlite.engine import SqliteEngine
from sqlsem.engines.sqlite.notifier import UnixSocketNotifier
from sqlsem.engines.sqlite.session import SqliteSession
from sqlsem.testing.calling import Calling
from sqlsem.testing.fibers import Fibers
from sqlsem.testing.real import OURS, Trouble
from sqlsem.testing.virtual_sqlite import VirtualClock, VirtualSqlite, VirtualWakeup
from sqlsem.values.locks import Ticket

__all__ = ["FileServer", "files"]

#: How long a statement takes, in virtual seconds: no two statements have the same time.
STATEMENT_SECONDS = 0.0001
#: Seconds after which a session that found the file locked tries again.
BUSY_SECONDS = 0.02
#: Seconds after which a waiter polls although nothing was written: the grace of a member may be over.
LOOK_SECONDS = 0.25
#: A folder in memory, if the system has one.
IN_MEMORY = "/dev/shm"  # noqa: S108


class FileSession(Calling, SqliteSession):
    """A session of an actor: other actors may run before each of its statements, and before it has the answer."""

    _server: FileServer

    def __init__(self, engine: FileEngine) -> None:
        super().__init__(engine)
        self._server, self._fibers, self.owner = engine.server, engine.server.fibers, engine.owner
        self.cut = False
        self._doing = ""  # the last statement that its transaction has written
        self.sleeper = VirtualNotifier(self._server, engine.path, "")
        self._server.sessions.append(self)

    def _execute(self, statement: str, parameters: Any, fetch: bool) -> Any:
        inside = self.connection is not None and self.connection.in_transaction
        if statement.startswith("PRAGMA") or (inside and statement != "COMMIT"):
            if inside and not fetch:
                self._doing = _described(statement, parameters)
            return super()._execute(statement, parameters, fetch)
        self.step(f"COMMIT of: {self._doing}" if inside else _described(statement, parameters))
        self._doing = ""
        before = self._server.written
        result = super()._execute(statement, parameters, fetch)
        self._fibers.now += STATEMENT_SECONDS
        if self.connection is not None and not self.connection.in_transaction and self._server.has_been_written():
            self._server.wake()
        if before != self._server.written:
            self.step("the answer")
        return result

    def require_connection(self) -> None:
        if (self.cut or self.interrupted) and not self._fibers.ended:
            raise Disconnected(f"The connection to {self.engine.label} is broken")

    def _try_again(self, failure: Exception, statement: str, parameters: Any, fetch: bool) -> Any:
        if not is_busy(failure):
            return super()._try_again(failure, statement, parameters, fetch)
        deadline = self._fibers.now + self.options.gate_timeout
        while True:
            self._server.wait_for(BUSY_SECONDS)
            try:
                return self._execute(statement, parameters, fetch)
            except sqlite3.Error as exc:
                if not is_busy(exc):
                    raise self.translate(exc) from exc
                if self._fibers.now > deadline:
                    raise Busy(f"{self.engine.label} has been locked for {self.options.gate_timeout:g} s") from exc

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return super().upgrade(
            ticket, timeout, cast("threading.Event", VirtualWakeup(self._server, wakeup, LOOK_SECONDS))
        )

    def register_member(self, host: str, pid: int, program: str) -> int:
        return super().register_member(self.owner, pid, program)

    # -- its end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the process: the system releases its file locks, and the file of its beacon stays behind."""
        self.lose()
        if self in self._server.sessions:
            self._server.sessions.remove(self)
        beacon, self.beacon = self.beacon, None
        if beacon is not None:
            beacon.discard()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def drop(self) -> None:
        """Do nothing: a living process does not lose its beacon with a connection."""

    def lose(self) -> None:
        self.cut = self.interrupted = True
        self.wake_caller()

    def close(self) -> None:
        super().close()
        if self in self._server.sessions:
            self._server.sessions.remove(self)

    def interrupt(self) -> None:
        super().interrupt()
        self.wake_caller()


class Cursor:
    """A cursor of a program, on the program's own connection, in a new transaction."""

    def __init__(self, session: FileSession) -> None:
        self._session = session
        self._cursor = session.run_text("BEGIN IMMEDIATE")

    @property
    def connection(self) -> sqlite3.Connection | None:
        return self._session.connection  # None if it is broken

    def execute(self, statement: str, parameters: Any = ()) -> Cursor:
        self._cursor = self._session.run_text(statement, parameters)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


class CallersSession(FileSession):
    """A program's own connection. If it breaks, the system releases its file locks at once."""

    def lose(self) -> None:
        super().lose()
        self.disconnect()


class VirtualNotifier(UnixSocketNotifier):
    """A notifier in virtual time: a waiter sleeps until a write, a notification, a wakeup, or its timeout."""

    def __init__(self, server: FileServer, database: Path, table: str) -> None:
        super().__init__(database, table)
        self._server = server
        self._position: int | None = None

    def listen(self, position: int) -> None:
        self._position = position
        self._server.notified_positions.discard(position)

    def stop(self) -> None:
        self._position = None

    def wait(self, seconds: float, wakeup: threading.Event) -> bool:
        if not wakeup.is_set():
            self._server.wait_for(max(seconds, LOOK_SECONDS), wakeup)
        if self._position in self._server.notified_positions:
            self._server.notified_positions.discard(self._position)
            return True
        return False

    def notify(self, positions: Iterable[int]) -> None:
        self._server.notified_positions.update(positions)
        self._server.wake()


class FileEngine(SqliteEngine):
    """The engine of one process."""

    def __init__(self, server: FileServer, options: Options, owner: str) -> None:
        super().__init__(f"sqlite:///{server.path}?mode=rw", options)
        self.server, self.owner = server, owner

    def open(self) -> sqlite3.Connection:
        connection = super().open()
        VirtualClock(connection).server = self.server
        connection.execute("PRAGMA synchronous = OFF")  # nothing has to outlive this process
        return connection

    def open_session(self, purpose: str) -> FileSession:
        self.server.fibers.step(f"connect to {purpose}")
        return FileSession(self)


class FileServer(VirtualSqlite):
    """A new SQLite file for each run."""

    name = "sqlite"
    faults = ("crash", "pause", "cut", "slow", "clock", "revoke", "hold", "cap", "reap")

    def __init__(self, fibers: Fibers, path: Path) -> None:
        super().__init__(fibers, sqlite3.connect(path, timeout=0, isolation_level=None))
        self.path = path
        self.notified_positions: set[int] = set()
        self.written = 0  # the number of writes that were noticed
        self._seen: Any = None
        self._noticed = -1
        self.own = FileEngine(self, Options(), OURS).connect("look")

    def engine(self, options: Options, owner: str) -> FileEngine:
        return FileEngine(self, options, owner)

    @contextlib.contextmanager
    def transaction(self, engine: Engine) -> Iterator[Cursor]:
        assert isinstance(engine, FileEngine)
        session = CallersSession(engine)
        try:
            yield Cursor(session)
            session.run_text("COMMIT")
        finally:
            session.close()

    def has_been_written(self) -> bool:
        """Return True if any session has written since the last call."""
        version = self.reader.execute("PRAGMA data_version").fetchone()
        changed, self._seen = version != self._seen, version
        self.written += changed
        return bool(changed)

    def has_changed(self) -> bool:
        self.has_been_written()
        changed, self._noticed = self.written != self._noticed, self.written
        return changed

    def stall(self, seconds: float) -> None:
        raise Trouble("there is no server")

    def close(self) -> None:
        for session in list(self.sessions):
            session.end()
        self.reader.close()
        folder = self.path.with_name(self.path.name + "-members")
        shutil.rmtree(folder, ignore_errors=True)
        for end in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}{end}")


@contextlib.contextmanager
def files() -> Iterator[Any]:
    """Return a function that makes servers on new files, which are deleted at the end."""
    folder = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="sqlsem-simulated-", dir=folder) as folder:
        template = Path(folder, "template.db")
        engine = SqliteEngine(f"sqlite:///{template}", Options())
        session = engine.connect("main")
        try:
            session.install(engine.plan)
        finally:
            session.close()
        path = Path(folder, "run.db")

        def make(fibers: Fibers) -> FileServer:
            shutil.copyfile(template, path)
            return FileServer(fibers, path)

        yield make


def _described(statement: str, parameters: Any) -> str:
    """Return a statement in one line, without its comments, and with its parameters."""
    lines = [line.strip() for line in statement.splitlines() if not line.lstrip().startswith("--")]
    text = " ".join(filter(None, lines))
    known = parameters if isinstance(parameters, dict) else {}
    about = [f"{name} {known[name]!r}" for name in ("resource", "position", "member") if name in known]
    return f"{text[:40]} … {', '.join(about)}" if about else text[:60]
