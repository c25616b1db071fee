"""One connection to the file: statements by their names, retried while the file is locked, and error translation."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from sqlsem.engines.base import Busy, Disconnected
from sqlsem.engines.failures import Replaced
from sqlsem.engines.sqlite import files, fork, wal
from sqlsem.engines.sqlite.beacons import Beacon
from sqlsem.engines.sqlite.notifier import UnixSocketNotifier
from sqlsem.engines.statements.session import StatementSession
from sqlsem.engines.statements.values import as_text
from sqlsem.values.errors import ConfigurationError, SchemaError, SqlsemError, Unavailable

if TYPE_CHECKING:
    from sqlsem.engines.sqlite.engine import SqliteEngine

FIRST_READ = "PRAGMA schema_version"
WRITE_BACK = "PRAGMA wal_checkpoint(PASSIVE)"
#: The number of SQLite's steps (some hundredths of a second) between two checks for signals.
STEPS = 1_000_000
#: The errors of a statement. (The second one: SQLite's message quotes a name that is not valid UTF-8.)
FAILURES = (sqlite3.Error, UnicodeDecodeError)


class SqliteConnection(StatementSession):
    """One connection. Statements that find the file locked are retried for `Options.gate_timeout`."""

    #: True if this session works for the member of another session, so both must have the same files open.
    is_second = False

    engine: SqliteEngine
    sleeper: UnixSocketNotifier

    def __init__(self, engine: SqliteEngine) -> None:
        super().__init__(engine)
        self._displaced: str | None = None  # why its open files are no longer those of the database
        self.connection: sqlite3.Connection | None = None
        self.files: files.OpenFiles | None = None  # the files of the connection, also while it is closed
        self.log_is_protected = False  # True if other programs cannot remove the log under this connection
        self.beacon: Beacon | None = None
        self._written = 0  # the transactions since the log was last written back
        self._changed = 0  # the number of changed rows at that time
        self._writer_back: sqlite3.Connection | None = (
            None  # the connection for checkpoints, if these must exclude writers
        )
        self.interrupted = False
        self._raised_by_signals: list[BaseException] = []  # exceptions of signal handlers during a statement
        self.sleeper = UnixSocketNotifier(engine.path, f"{engine.options.schema}.{engine.options.table}")
        self.executing_in = 0  # the number of the thread that runs the SQL of a task
        fork.sessions.add(self)

    def open_connection(self) -> sqlite3.Connection:
        """Return the connection; open it at the first use, and again after a fork."""
        with fork.forks_blocked:
            return self.connection or _open_again(self)

    def _set_up(self) -> None:
        """Open the connection, and store the identity of the files that it has opened."""
        before = files.identify(self.engine.path)
        self.connection = self.engine.open()
        self.connection.set_progress_handler(watch_signals(self._raised_by_signals).__next__, STEPS)
        with files.no_journal(self.engine.path, before):
            self.rows_of_text(FIRST_READ)
        if self.engine.creates:
            # A quarter of the default: SQLite writes whole pages, and rows are short. (This counts for new files only.)
            self.run_text("PRAGMA page_size = 1024")
            # Readers and one writer work at the same time. (This needs shared memory, so all must be on one host.)
            self.rows_of_text("PRAGMA journal_mode = WAL")
        # The file system's cache survives a crash of this process. A crash of the host ends every holder anyway.
        self.rows_of_text("PRAGMA synchronous = NORMAL")
        if not wal.MUST_BE_ALONE:
            self.rows_of_text(f"PRAGMA wal_autocheckpoint = {wal.MAX_PAGES}")
        self.rows_of_text(f"PRAGMA journal_size_limit = {wal.MAX_BYTES}")
        self._changed = 0
        mode = self.rows_of_text("PRAGMA journal_mode")[0][0]
        self.rows_of_text(FIRST_READ)  # opens the log
        known, read_only = self.files, not self.engine.writable
        self.files = files.OpenFiles(self.engine.path, before, wal=mode == "wal", read_only=read_only)
        if self.is_second:
            known = known or self.engine.files
        if known is not None and known.database != self.files.database:
            raise Replaced(f"{self.engine.label} is another file than before")
        self.log_is_protected = files.protect_log(self.files, self)
        self.engine.follow_link()

    # A fork in another thread closes the connections, and the last process that closes the database deletes the log. So
    # no fork may begin between the test for an open connection and the comparison of its files.

    def require_in_place(self, *, file_by_file: bool = False) -> None:
        """Raise `Replaced` unless the open files are those of the database; see `OpenFiles`."""
        try:  # (not inside of the block: an interrupt at a `try` there would keep the lock)
            with fork.forks_blocked:
                if self._displaced is not None:
                    raise Replaced(self._displaced)
                if self.files is not None and self.connection is not None:
                    if file_by_file:
                        self.files.compare()
                    else:
                        self.files.require_in_place()
                    if self.is_second and self.engine.files is not None:
                        self.files.require_same(self.engine.files)
        except Replaced as exc:
            displace(self.engine, exc)
            raise

    # -- statements ---------------------------------------------------------------------------------------------

    def _execute(self, statement: str, parameters: Any, fetch: bool) -> Any:
        with fork.forks_blocked:
            cursor = (self.connection or self.open_connection()).execute(statement, parameters)
            return cursor.fetchall() if fetch else cursor

    def _try_again(self, failure: Exception, statement: str, parameters: Any, fetch: bool) -> Any:
        """Retry a failed statement while the file is locked, or raise the translated error."""
        if self._raised_by_signals:
            raise self._raised_by_signals.pop() from None
        if "Could not decode" in str(failure) and fetch and self.connection is not None:
            # Another program wrote invalid text. One such row must not hide the others.
            self.connection.text_factory = as_text
            return self.rows_of_text(statement, parameters)
        if not is_busy(failure):
            raise self.translate(failure) from failure
        # (SQLite's own handler waits for at least a millisecond, and has no jitter. A write takes some 0.1 ms, so the
        # first pauses here are shorter than that.)
        deadline = time.monotonic() + self.options.gate_timeout
        pause = 0.00004
        while True:
            time.sleep(random.uniform(0.5, 1) * pause)
            pause = min(pause * 1.3, 0.01)
            try:
                return self._execute(statement, parameters, fetch)
            except FAILURES as exc:
                if not is_busy(exc):
                    raise self.translate(exc) from exc
                if time.monotonic() > deadline:
                    raise Busy(
                        f"{self.engine.label} has been locked by another program for {self.options.gate_timeout:g} s; "
                        f"find the one with a long transaction"
                    ) from exc

    def run_text(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        """Run a statement that returns no rows."""
        cursor: sqlite3.Cursor
        try:
            cursor = self._execute(statement, parameters, False)
        except FAILURES as exc:
            cursor = self._try_again(exc, statement, parameters, False)
        return cursor

    def rows_of_text(self, statement: str, parameters: Any = ()) -> list[Any]:
        """Run a statement and return its rows."""
        rows: list[Any]
        try:
            rows = self._execute(statement, parameters, True)
        except FAILURES as exc:
            rows = self._try_again(exc, statement, parameters, True)
        return rows

    def run(self, name: str, parameters: Any = ()) -> sqlite3.Cursor:
        return self.run_text(self.queries[name], parameters)

    def run_many(self, name: str, parameters: Sequence[Any]) -> None:
        try:
            with fork.forks_blocked:
                self.open_connection().executemany(self.queries[name], parameters)
        except FAILURES as exc:
            raise self.translate(exc) from exc

    def rows(self, name: str, parameters: Any = ()) -> list[Any]:
        return self.rows_of_text(self.queries[name], parameters)

    def row(self, name: str, parameters: Any = ()) -> Any:
        rows = self.rows_of_text(self.queries[name], parameters)
        return rows[0] if rows else None

    @property
    def forks_blocked(self) -> contextlib.AbstractContextManager[Any]:
        return fork.forks_blocked

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        return Writing(self)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return Reading(self)

    def wrote(self) -> None:
        """Count a written transaction."""
        self._written += 1
        connection = self.connection
        if wal.MUST_BE_ALONE and connection and connection.total_changes - self._changed > wal.MAX_ROWS:
            self.write_back(at_once=True)

    def write_back(self, at_once: bool = False) -> None:
        """Write the log back into the file, if some transactions were written since the last time. This waits for the
        disk. It excludes writers only in SQLite versions that would lose their commits.
        """
        if self._written < (1 if at_once else wal.EVERY):
            return
        with contextlib.suppress(sqlite3.Error, SqlsemError), fork.forks_blocked:
            connection = self.connection
            if connection is None or connection.in_transaction:
                return
            self._changed = connection.total_changes
            self.require_in_place(file_by_file=True)  # (Afterwards a truncated file would no longer be empty.)
            if wal.MUST_BE_ALONE:
                self._write_back_alone(connection)
            else:
                self._written = 0
                connection.execute(WRITE_BACK).fetchall()

    def _write_back_alone(self, connection: sqlite3.Connection) -> None:
        if self._writer_back is None:
            before = files.identify(self.engine.path)
            self._writer_back = self.engine.open()
            with files.no_journal(self.engine.path, before):
                self._writer_back.execute(FIRST_READ).fetchall()
            self.require_in_place()
        connection.execute("BEGIN IMMEDIATE")  # (if another session is writing, the next call tries again)
        try:
            self._written = 0
            self._writer_back.execute(WRITE_BACK).fetchall()
        finally:
            self.roll_back()

    def roll_back(self) -> None:
        # (An interrupt may have left a transaction open, and the next statement must not become part of it.)
        if self.connection is not None and self.connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the first error counts
                self.connection.execute("ROLLBACK")

    def translate(self, exc: Exception) -> Exception:
        text, where = str(exc), self.engine.label
        try:
            self.require_in_place(file_by_file=True)
        except Replaced as replaced:
            return replaced
        if self.interrupted or (isinstance(exc, sqlite3.ProgrammingError) and "closed" in text):
            return Disconnected(f"The connection to {where} was closed")
        if "no such table" in text or "no such column" in text:
            return SchemaError(f"{where}: {text}; create or upgrade the sqlsem tables with: sqlsem init")
        if "not a database" in text:
            return ConfigurationError(f"{where} is not an SQLite database; name another file", code="sqlite-file")
        if "readonly" in text:
            return Unavailable(f"{where} is read-only; make the file and its folder writable", code="read-only")
        if "full" in text:
            return Unavailable(f"{where}: the disk is full; free some room ({text})", code="full")
        if ("disk I/O" in text or "malformed" in text) and self.engine.beacons.held():
            # The database was replaced while other processes have the old log open; they will notice.
            return Disconnected(f"{where}: {text}")
        if "unable to open" in text:
            return Unavailable(f"Cannot open {where}: {text}; check the path and its permissions", code="sqlite-file")
        return Unavailable(f"{where}: {text}")

    @property
    def usable(self) -> bool:
        return not (self.given_up or self.interrupted)

    def interrupt(self) -> None:
        self.interrupted = True
        connection = self.connection  # another thread may close and clear it meanwhile
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.interrupt()
        self.sleeper.interrupt()

    def discard(self) -> None:
        self.sleeper.close()

    def close(self) -> None:
        self.interrupted = True
        self.remove_beacon()
        self.disconnect()
        self.sleeper.close()

    def touch_beacon(self) -> None:
        beacon = self.beacon
        if beacon is not None and time.monotonic() - beacon.touched_at >= self.options.grace / 8:
            beacon.touch()

    def remove_beacon(self) -> None:
        # Only release it if its files were replaced.
        if self.beacon is not None:
            beacon, self.beacon = self.beacon, None
            if self._displaced is None:
                beacon.remove()
            else:  # the new files may have a copy of the member, which no session can deregister
                beacon.release()

    def disconnect(self) -> None:
        """Close the connection for now."""
        with fork.forks_blocked:
            files.unprotect_log(self)
            if self.files is not None and self.engine.files is self.files:
                self.engine.files = self.files.without_log()
            connections = self.connection, self._writer_back
            self.connection = self._writer_back = None
            for connection in connections:
                if connection is not None:
                    with contextlib.suppress(sqlite3.Error):
                        connection.close()
            files.close_unused()


def _open_again(session: SqliteConnection) -> sqlite3.Connection:
    if session.interrupted:
        raise Disconnected(f"The connection to {session.engine.label} was closed")
    if session._displaced is not None:
        raise Replaced(session._displaced)
    try:
        session._set_up()
    except BaseException:  # a partly prepared connection must not be used
        session.disconnect()
        raise
    return cast("sqlite3.Connection", session.connection)


def displace(engine: SqliteEngine, exc: Replaced) -> None:
    """Close all connections of this process to replaced files. (While one is open, SQLite gives each new connection
    the same ``-shm``.)
    """
    with fork.forks_blocked:
        for session in list(fork.sessions):
            if isinstance(session, SqliteConnection) and session.engine.path == engine.path:
                try:
                    if session.files is not None and session.connection is not None:
                        session.files.compare()
                except Replaced:
                    session._displaced = str(exc)  # every further use raises it
                    session.given_up = True
                    session.disconnect()


class Reading:
    """A reading transaction, rolled back at its end."""

    # (Not a generator with contextlib: an interrupt can separate the generator from its 'with'. Its end would then run
    # when the generator is deleted, in the middle of another transaction.)

    __slots__ = ("_session",)
    begin = "BEGIN"

    def __init__(self, session: SqliteConnection) -> None:
        self._session = session

    def __enter__(self) -> None:
        try:
            self._session.roll_back()
            self._session.run_text(self.begin)
        except BaseException:
            self._session.roll_back()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._session.roll_back()


class Writing(Reading):
    """A writing transaction, committed unless an error was raised."""

    __slots__ = ()
    begin = "BEGIN IMMEDIATE"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._session.run_text("COMMIT")
                self._session.wrote()
        finally:
            self._session.roll_back()


def watch_signals(raised: list[BaseException]) -> Iterator[int]:
    """End a statement when a signal handler raises: yields 0 to continue, 1 to end.

    (A generator: Python runs signal handlers when a function begins, before it could catch their exceptions; and
    SQLite's caller drops an exception of a callback.)
    """
    while True:
        end = 0
        while True:
            try:
                yield end
                end = 0
            except GeneratorExit:
                return
            except BaseException as exc:
                raised.append(exc)
                end = 1


def is_busy(exc: Exception) -> bool:
    """Return True if another connection has the file locked."""
    text = str(exc)
    return "database is locked" in text or "database table is locked" in text or "database schema is locked" in text
