"""A connection to SQL Server: statements by their names, error translation, cancellation and close."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sqlsem.engines.answers import refusal_code
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.engines.mssql import errors
from sqlsem.engines.mssql.odbc import declared_size, is_microsofts, with_nulls
from sqlsem.engines.mssql.sockets import Handle
from sqlsem.engines.routines import RoutineSession
from sqlsem.util import sockets
from sqlsem.util.runtime import had_within
from sqlsem.values.errors import ConfigurationError, Deadlock, SchemaError, Unavailable

if TYPE_CHECKING:
    from sqlsem.engines.mssql.engine import SqlServerEngine

#: The longest wait of one call in seconds: each wait occupies a worker thread of the server.
LONGEST_WAIT_SECONDS = 15.0

#: Seconds that a cancelled statement may take to end before its connection is shut down.
CANCEL_SECONDS = 2.0

#: Seconds beyond a statement's own time after which it is interrupted if the server does not answer.
MARGIN_SECONDS = 30

#: Connections of a parent process, kept alive: freeing the objects would close the parent's connections.
abandoned: list[Any] = []


class SqlServerConnection(RoutineSession):
    """One connection in autocommit mode: each routine begins its own transaction."""

    engine: SqlServerEngine

    def __init__(self, engine: SqlServerEngine, connection: Any, handle: Handle | None) -> None:
        self.engine = engine
        self.options = engine.options
        self.gate_patience = (int(self.options.gate_timeout * 1000),)
        self.queries = engine.queries()
        self.connection = connection
        self._handle = handle
        self.lost = False
        self._abandoned = False
        #: One cursor for each statement, which keeps it prepared.
        self._cursors: dict[str, Any] = {}
        self._sized = is_microsofts(connection)
        self.running: Any = None
        self.latest: Any = None  # the cursor of the latest statement
        self.stopped: Any = None  # the cursor that was cancelled
        self.cancelling = threading.Lock()  # held during a driver's cancel: the cursor must not be freed meanwhile
        with contextlib.suppress(Exception):  # not every driver has it
            longest = LONGEST_WAIT_SECONDS + max(self.options.gate_timeout, self.options.grace)
            connection.timeout = int(longest) + MARGIN_SECONDS

    def prepare(self, purpose: str) -> None:
        # The SQL of tasks waits for locks, and runs, as long as its author allows.
        patience = -1 if purpose == "work" else int(self.options.gate_timeout * 1000)
        if purpose == "work":
            with contextlib.suppress(Exception):  # as above
                self.connection.timeout = 0
        text = self.queries["session"].replace(":lock_timeout", str(patience))
        self.ask("session", text, ())
        if purpose in ("main", "wait"):
            with contextlib.suppress(SchemaError, ConfigurationError):  # check_schema or the first call raises it
                self.rows(f"warm_{purpose}")

    def ask(self, name: str, text: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Run one batch; return all rows of its results."""
        if None in parameters:
            text = with_nulls(text, tuple(value is None for value in parameters))
            parameters = [value for value in parameters if value is not None]
        with self._translated():
            key = text if len(parameters) < 20 else name
            cursor = self._cursors.get(key)
            if cursor is None:
                cursor = self._cursors[key] = self.connection.cursor()
            self.running = self.latest = cursor
            try:
                if parameters:
                    if self._sized:
                        cursor.setinputsizes([declared_size(value) for value in parameters])
                    cursor.execute(text, tuple(parameters))
                else:
                    cursor.execute(text)
                rows: list[tuple[Any, ...]] = []
                while True:
                    if cursor.description is not None:
                        rows += [tuple(row) for row in cursor.fetchall()]
                    if not cursor.nextset():
                        break
                return rows
            except Exception:  # the driver reported an error: the connection is usable, or known to be lost
                self._cursors.pop(key, None)
                raise
            except BaseException:  # an exception of a signal handler: the answer is still pending
                self.lost = True
                raise
            finally:
                self.running = None

    def rows(self, name: str, *parameters: Any) -> list[list[Any]]:
        return [_aware(row) for row in self.ask(name, self.queries[name], [_plain(value) for value in parameters])]

    def row(self, name: str, *parameters: Any) -> list[Any]:
        rows = self.rows(name, *parameters)
        if not rows:
            raise Unavailable(f"{self.engine.label}: {name} gave no answer")
        return rows[0]

    call = row

    def operate(self, name: str, *parameters: Any) -> Any:
        return self.value(name, *parameters)  # (The routine knows the caller's process.)

    def configure(self, name: str, *parameters: Any) -> None:
        self.rows(name, *parameters)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        if self.lost:
            raise Disconnected(f"Lost the connection to {self.engine.label}")
        try:
            yield
        except (ConfigurationError, Unavailable, SchemaError, Deadlock):
            raise
        except Exception as exc:
            known = type(exc).__module__.startswith(("pyodbc", "mssql_python")) or self.engine.creator is not None
            if not known and not self.lost:
                raise
            raise self.meaning(*self.server_details(exc)) from exc

    def meaning(self, state: str, number: int, text: str) -> Exception:
        """Return sqlsem's error for an error of the driver."""
        where, schema = self.engine.label, self.options.schema
        text = self.engine.clean(text)
        low = text.lower()
        if number in errors.VAGUE:
            number = next((known for known, start in errors.OUR_WORDS if re.match(start, text)), number)
        # Numbers decide before texts: the texts repeat names, which may contain any words.
        if number in errors.OURS:
            if number == 50002:
                return Busy(f"{where}: another session keeps a lock in an open transaction: {text}")
            if number == 50005:
                self.lost = True  # the owner of this session registers as a new member
                return Disconnected(f"{where}: {text}")
            if number == 50003 and self.engine.first_change_of_sessions():
                self.lost = True  # the driver reconnected by itself: a new session reattaches the member
                return Disconnected(f"{where}: {text}")
            # (50000 is also the number of any RAISERROR with a text, as in a task's SQL. Without a SQLSTATE only the
            # number is known.)
            is_ours = number == 50000 and (text.startswith("sqlsem: ") or not state)
            if is_ours or number in errors.CONFIGURATION_NUMBERS:
                return ConfigurationError(f"{where}: {text}", code=refusal_code(number, text))
            return Unavailable(f"{where}: {text}")

        def sounds(*words: str) -> bool:
            return number in errors.VAGUE and any(word in low for word in words)

        if self.lost or state in errors.LOST_STATES or number in errors.LOST_NUMBERS or sounds(*errors.LOST_WORDS):
            self.lost = True
            return Disconnected(f"Lost the connection to {where}: {text}")
        if number in (1205, 1204) or state == "40001" or sounds("deadlock"):
            # A deadlock on rows of the tables, not between sqlsem's locks (see find_deadlock): it ends at once.
            return Busy(f"{where} undid this statement to let others go on: {text}")
        if number in errors.BUSY_NUMBERS or sounds("lock timeout", "lock request time out"):
            return Busy(
                f"{where}: another session keeps a lock in an open transaction, or the server is overloaded: {text}"
            )
        if number in errors.ROLE_NUMBERS or sounds("user is not a member"):
            login = self.engine.login or "…"
            return ConfigurationError(
                f"{where}: {text}; the login has rights to the routines, but is not in role {schema}_locks, which the "
                f"locks belong to; an administrator adds its user: ALTER ROLE {schema}_locks ADD MEMBER [{login}] (or "
                f"the role that it is in)",
                code="rights",
            )
        if number in errors.MISSING_NUMBERS or sounds("does not exist", "could not find stored", "invalid object name"):
            return SchemaError(f"{where}: {text}; create or upgrade the sqlsem tables with: sqlsem init")
        if number in errors.DENIED_NUMBERS or sounds("permission denied", "permission was denied"):
            return ConfigurationError(
                f"{where}: {text}; an administrator can add this user to {schema}_user (or {schema}_operator, for what "
                f"operators do): ALTER ROLE {schema}_user ADD MEMBER … (see: sqlsem sql mssql permissions)",
                code="rights",
            )
        if number in errors.OWNER_NUMBERS:
            return ConfigurationError(
                f"{where}: {text}; this takes a login that may create schemas, tables, procedures and roles in this "
                f"database (db_owner); a DBA can run what this prints: sqlsem sql mssql",
                code="rights",
            )
        if number in errors.READ_ONLY_NUMBERS or sounds("read-only"):
            self.lost = True  # the primary may answer at the same address in a moment
            return Disconnected(
                f"{where} is read-only (a secondary replica?): {text}; connect to the primary, or: "
                "ALTER DATABASE … SET READ_WRITE",
                code="read-only",
            )
        return Unavailable(f"{where}: {text}")

    def server_details(self, exc: Exception) -> tuple[str, int, str]:
        """Return the error as `details` does; if the driver omits the server's number, ask the server for it.

        Behind a warning pyodbc omits it: pyodbc reports only the first of several messages, and SQL Server sends
        warnings as they occur. mssql-python reports no numbers.
        """
        state, number, text = errors.details(exc)
        warned = state.startswith("01") and state not in errors.LOST_STATES
        silent = not number and type(exc).__module__.startswith("mssql_python") and not errors.sounds_lost(text.lower())
        if self.lost or not (warned or silent):
            return state, number, text
        errors.drain(self.latest)
        try:
            cursor = self.running = self.connection.cursor()
            cursor.execute(self.queries["last_error"])
            last = int(cursor.fetchone()[0])
            cursor.close()
        except Exception as more:
            return errors.details(more) if warned else (state, number, text)
        finally:
            self.running = None
        if warned and last:
            return "", last, f"error {last}, of which the driver tells only the warning that came before it: {text}"
        return state, last or number, text

    @property
    def usable(self) -> bool:
        return not self.lost

    def discard(self) -> None:
        self.lost = self._abandoned = True
        abandoned.append((self.connection, self._cursors))
        handle, self._handle = self._handle, None
        if handle is not None and handle.there():
            sockets.discard(handle.number)

    def interrupt(self) -> None:
        self.lost = True
        running, handle = self.running, self._handle
        if handle is not None:
            handle.shut()
        elif running is not None:
            with contextlib.suppress(Exception):
                running.cancel()

    def close(self) -> None:
        self.lost = True
        if self._abandoned:
            return
        handle, self._handle = self._handle, None
        self._cursors.clear()
        if handle is not None:
            handle.shut()  # a pool of the driver manager would keep the connection and its locks
        with had_within(self.cancelling, CANCEL_SECONDS) as had:
            if not had:
                abandoned.append((self.connection, self.latest))  # for ever; the socket is shut down all the same
                return
            with contextlib.suppress(Exception):
                self.connection.close()


def _aware(row: tuple[Any, ...]) -> list[Any]:
    """Return a row whose datetimes have the time zone UTC."""
    return [value.replace(tzinfo=timezone.utc) if isinstance(value, datetime) else value for value in row]


def _plain(value: Any) -> Any:
    """Return a parameter as every driver takes it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list):
        return json.dumps(value)
    if isinstance(value, datetime):  # as text, to the microsecond: some drivers round parameters of their own type
        return value.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds")
    return value
