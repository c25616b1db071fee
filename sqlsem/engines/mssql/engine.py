"""The SQL Server engine and its sessions, as `sqlsem.engines` loads them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

from sqlsem.engines import borrowed
from sqlsem.engines.base import Session
from sqlsem.engines.mssql import sockets
from sqlsem.engines.mssql.database import SqlServerDatabase
from sqlsem.engines.mssql.locks import SqlServerLocks
from sqlsem.engines.mssql.odbc import choose_driver, join, load_driver, with_nulls
from sqlsem.engines.mssql.tables import SqlServerTables
from sqlsem.engines.mssql.tasks import SqlServerTasks
from sqlsem.util import runtime
from sqlsem.util.runtime import had_within
from sqlsem.values.errors import ConfigurationError, Unavailable

#: Seconds for the driver's statements after the login, before the connection is shut down.
CONNECT_SECONDS = 5.0

_connecting = threading.Lock()


def _unlock_in_child() -> None:
    """Replace the lock in a forked child: the thread that held it does not exist there."""
    global _connecting
    _connecting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


class SqlServerSession(SqlServerLocks, SqlServerTasks, SqlServerTables):
    """One connection with all capabilities."""


class BorrowedSqlServerSession(SqlServerSession):
    """A session that runs its statements by the caller's cursor."""

    def __init__(self, engine: SqlServerDatabase, cursor: Any) -> None:
        self.queries = engine.queries()
        self._cursor = cursor
        # (In manual commit mode, the transaction begins with the first statement that reads a table.)
        if self.ask("in_transaction", self.queries["in_transaction"], ())[0][0] < 1:
            raise ConfigurationError(
                "put() was given a cursor outside of a transaction; begin one (no autocommit)", code="transaction"
            )

    def ask(self, name: str, text: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        if name in ("begin", "commit", "rollback"):
            return []  # it is the caller's transaction
        if None in parameters:
            text = with_nulls(text, tuple(value is None for value in parameters))
            parameters = [value for value in parameters if value is not None]
        cursor = self._cursor
        borrowed.execute(cursor, text, tuple(parameters))
        rows: list[tuple[Any, ...]] = []
        while True:
            if cursor.description is not None:
                rows += [tuple(borrowed.values(row)) for row in cursor.fetchall()]
            if not cursor.nextset():
                return rows


class SqlServerEngine(SqlServerDatabase):
    """A SQL Server database (2016 SP1 or later), or one of Azure SQL, and sessions on it."""

    session_class = SqlServerSession
    # A guard is a trigger, and SQL Server refuses OUTPUT without INTO on a table that has one.
    guard_hint = (
        "INSERT, UPDATE and DELETE with OUTPUT and without INTO are refused on this table from now on (error 334). "
        "EF Core: HasTrigger, UseSqlOutputClause(false); SQLAlchemy: implicit_returning=False."
    )

    def open_session(self, purpose: str) -> SqlServerSession:
        if self.creator is not None:
            session = SqlServerSession(self, self._created(), None)
            self._let_in = True
            return session
        # One connection at a time, as its socket is identified as the new one. A server that does not answer must not
        # block connections to others.
        with had_within(_connecting, 2 * self.options.connect_timeout) as alone:
            before = sockets.open_sockets() if alone else None
            # The driver has a timeout for the login, but not for its statements after that.
            limit, port = self.options.connect_timeout + CONNECT_SECONDS, self.port

            def shut() -> None:
                found = sockets.new_socket(before, port) if port is not None else None
                if found is not None:
                    found.shut()

            overdue = runtime.current().timer(limit, shut)
            try:
                overdue.start()
                connection = self._connect(purpose)
                handle = sockets.new_socket(before)
            finally:
                overdue.cancel()
        self._let_in = True
        return SqlServerSession(self, connection, handle)

    def session_on(self, cursor: Any) -> Session:
        return BorrowedSqlServerSession(self, cursor)

    def _created(self) -> Any:
        assert self.creator is not None
        try:
            connection = self.creator()
        except Exception as exc:
            if isinstance(exc, (ConfigurationError, Unavailable)):
                raise
            raise self.refused(exc) from exc
        self._autocommit(connection)
        return connection

    def _autocommit(self, connection: Any) -> None:
        try:
            connection.autocommit = True
        except AttributeError:  # a method or property with a setter of its own
            connection.setautocommit(True)

    def _connect(self, purpose: str) -> Any:
        wanted = (self.word("driver") or "").lower().replace("_", "-")
        if wanted == "mssql-python":
            module = load_driver("mssql_python")
        else:
            module = load_driver("pyodbc")
            if module is None:
                module = load_driver("mssql_python")
        if module is None:
            raise ConfigurationError(
                "SQL Server needs a driver, which is not installed; get it with: pip install 'sqlsem[mssql]'",
                code="driver",
            )
        timeout = max(1, math.ceil(self.options.connect_timeout))
        words = dict(self.words)
        failure: Exception | None = None
        try:
            if module.__name__ == "mssql_python":
                words = {key: value for key, value in words.items() if key.lower() not in ("driver", "tds_version")}
                words = {
                    key: value
                    for key, value in self.completed(words, purpose).items()
                    if key.lower() not in ("app", "connectretrycount")
                }
                return module.connect(join(words), autocommit=True, timeout=0)
            lower = {key.lower() for key in words}
            if not lower & {"driver", "dsn", "filedsn"}:
                words = {"Driver": choose_driver(), **words}
            return module.connect(join(self.completed(words, purpose)), autocommit=True, timeout=timeout)
        except ConfigurationError:
            raise
        except Exception as exc:
            failure = self.refused(exc)
        # Outside the handler, so that the driver's error is not chained: its text may repeat parts of the string.
        raise failure
