"""The SQL Server engine, as `sqlsem.engines` loads it."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

from sqlsem.engines.base import Session
from sqlsem.engines.mssql import sockets
from sqlsem.engines.mssql.database import SqlServerDatabase
from sqlsem.engines.mssql.odbc import join, load_driver
from sqlsem.engines.mssql.session import BorrowedSqlServerSession, SqlServerSession
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
        module = None if self.wants_mssql_python else load_driver("pyodbc")
        module = module or load_driver("mssql_python")
        if module is None:
            raise ConfigurationError(
                "SQL Server needs a driver, which is not installed; get it with: pip install 'sqlsem[mssql]'",
                code="driver",
            )
        timeout = max(1, math.ceil(self.options.connect_timeout))
        failure: Exception | None = None
        try:
            if module.__name__ == "mssql_python":
                words = self.completed(self.words_without("driver", "tds_version"), purpose)
                words = {key: value for key, value in words.items() if key.lower() not in ("app", "connectretrycount")}
                return module.connect(join(words), autocommit=True, timeout=0)
            return module.connect(join(self.odbc_words(purpose)), autocommit=True, timeout=timeout)
        except ConfigurationError:
            raise
        except Exception as exc:
            failure = self.refused(exc)
        # Outside the handler, so that the driver's error is not chained: its text may repeat parts of the string.
        raise failure
