"""SQL Server, as `sqlsem.engines` finds it."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

from sqlsem.engines.mssql import sockets
from sqlsem.engines.mssql.database import SqlServerDatabase
from sqlsem.engines.mssql.locks import SqlServerLocks
from sqlsem.engines.mssql.odbc import choose_driver, join, load_driver
from sqlsem.engines.mssql.rounds import SqlServerRounds
from sqlsem.engines.mssql.tables import SqlServerTables
from sqlsem.engines.mssql.tasks import SqlServerTasks
from sqlsem.errors import ConfigurationError, Unavailable

#: What comes after a login may take so many seconds, before the connection is shut.
CONNECT_SECONDS = 5.0

_connecting = threading.Lock()


def _unlock_in_child() -> None:
    """Another thread may have been connecting when the process forked; in the child it does not exist."""
    global _connecting
    _connecting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


class SqlServerSession(SqlServerLocks, SqlServerTasks, SqlServerRounds, SqlServerTables):
    """One connection, in all roles."""


class SqlServerEngine(SqlServerDatabase):
    """A SQL Server database (2016 or later), or one of Azure SQL, and sessions on it."""

    session_class = SqlServerSession

    def reach(self, purpose: str) -> SqlServerSession:
        if self.creator is not None:
            session = SqlServerSession(self, self._created(), None)
            self._let_in = True
            return session
        # The socket is told by being new; so one at a time. A server that does not answer must not hold up others.
        alone = _connecting.acquire(timeout=2 * self.options.connect_timeout)
        before = sockets.open_sockets() if alone else None
        # The driver bounds the login, but not what it asks after that.
        limit, port = self.options.connect_timeout + CONNECT_SECONDS, self.port

        def shut() -> None:
            found = sockets.new_socket(before, port) if port is not None else None
            if found is not None:
                found.shut()

        overdue = threading.Timer(limit, shut)
        overdue.daemon = True
        overdue.start()
        try:
            connection = self._connect(purpose)
            handle = sockets.new_socket(before)
        finally:
            overdue.cancel()
            if alone:
                _connecting.release()
        self._let_in = True
        return SqlServerSession(self, connection, handle)

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
                "SQL Server needs a driver, which is not installed; get it with: pip install 'sqlsem[mssql]'"
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
        # Outside the handler: the driver's text could repeat parts of the string, so it is not chained.
        raise failure
