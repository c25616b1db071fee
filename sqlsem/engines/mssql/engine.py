"""A SQL Server database: its connection string, its connections, and the errors of a failed connection."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Generator
from typing import Any

from sqlsem.engines.base import Creator, Disconnected, Engine, Options, Session
from sqlsem.engines.mssql import errors, sockets
from sqlsem.engines.mssql.odbc import choose_driver, join, load_driver, words_of_odbc, words_of_url
from sqlsem.engines.mssql.session import BorrowedSqlServerSession, SqlServerSession
from sqlsem.util import runtime
from sqlsem.util.credentials import hide_values
from sqlsem.util.runtime import had_within
from sqlsem.values.errors import ConfigurationError, Unavailable
from sqlsem.values.locks import Ticket

#: Seconds for the driver's statements after the login, before the connection is shut down.
CONNECT_SECONDS = 5.0
#: The names of this host in a connection string.
HERE = frozenset({"localhost", "127.0.0.1", "::1", ".", "(local)"})
#: Seconds: session changes closer together than this come from a pool, not from a driver that reconnects.
SESSION_CHANGE_SECONDS = 60.0

_connecting = threading.Lock()


def _unlock_in_child() -> None:
    """Replace the lock in a forked child: the thread that held it does not exist there."""
    global _connecting
    _connecting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


class SqlServerEngine(Engine):
    """A SQL Server database (2016 SP1 or later), or one of Azure SQL."""

    name = "mssql"
    session_class = SqlServerSession
    async_sessions = 8  # each wait blocks one, in a thread
    setup_timeout = 15.0  # the first calls of procedures compile them
    # A guard is a trigger, and SQL Server refuses OUTPUT without INTO on a table that has one.
    guard_hint = (
        "INSERT, UPDATE and DELETE with OUTPUT and without INTO are refused on this table from now on (error 334). "
        "EF Core: HasTrigger, UseSqlOutputClause(false); SQLAlchemy: implicit_returning=False."
    )

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        super().__init__(url, options, creator)
        self.words: dict[str, str] = {}
        self._let_in = False  # True after a successful login of this process
        if url and "://" in url:
            self.words = words_of_url(url)
        elif url:
            self.words = words_of_odbc(url)
        self._driver_module: Any = None
        self._session_changed: float | None = None

    @property
    def label(self) -> str:
        if self.creator is not None:
            return "the SQL Server database of creator="
        server = self.word("server", "address", "addr", "servername") or self.word("dsn") or "localhost"
        port = self.word("port")
        database = self.word("database") or "(default)"
        return f"SQL Server database {database} on {server}{f':{port}' if port else ''}"

    @property
    def login(self) -> str | None:
        """The login that the connection string names."""
        return self.word("uid", "user id", "user")

    def first_change_of_sessions(self) -> bool:
        """Record that a connection changed its session; return True if the last time is long ago."""
        before, self._session_changed = self._session_changed, time.monotonic()
        return before is None or self._session_changed - before > SESSION_CHANGE_SECONDS

    @property
    def port(self) -> int | None:
        """Return the server's port, if the connection string names it."""
        server = self.word("server", "address", "addr", "servername")
        if server is None or "\\" in server:
            return None
        port = self.word("port") or server.partition(",")[2].strip() or "1433"
        return int(port) if port.isdigit() else None

    def word(self, *names: str) -> str | None:
        """Return the value of the first of these names in the connection string."""
        for key, value in self.words.items():
            if key.lower() in names:
                return value
        return None

    @property
    def odbc_string(self) -> str:
        """Return the connection string for an ODBC driver, with the password."""
        return join(self.odbc_words("main"))

    @property
    def wants_mssql_python(self) -> bool:
        """True if the connection string names mssql-python as the driver, which is not one of ODBC."""
        return (self.word("driver") or "").replace("_", "-").lower() == "mssql-python"

    def odbc_words(self, purpose: str) -> dict[str, str]:
        """Return the parameters for an ODBC driver."""
        words = self.words_without("driver") if self.wants_mssql_python else self.words
        if not {"driver", "dsn", "filedsn"} & {key.lower() for key in words}:
            words = {"Driver": choose_driver(), **words}
        return self.completed(words, purpose)

    def words_without(self, *names: str) -> dict[str, str]:
        """Return the keywords of the connection string except these."""
        return {key: value for key, value in self.words.items() if key.lower() not in names}

    def completed(self, words: dict[str, str], purpose: str) -> dict[str, str]:
        """Return the parameters for the driver."""
        lower = {key.lower(): key for key in words}
        driver = words.get(lower.get("driver", ""), "").lower()
        port = lower.get("port")
        found = dict(words)
        if "freetds" in driver or "tdsodbc" in driver:
            if "tds_version" not in lower:
                found["TDS_Version"] = "7.4"
        else:
            if port is not None and "server" in lower:  # Microsoft's drivers have no keyword Port
                found[lower["server"]] = f"{found[lower['server']]},{found.pop(port)}"
            if "connectretrycount" not in lower:  # (overrides that of a DSN)
                # The driver would reconnect silently, without the beacon.
                found["ConnectRetryCount"] = "0"
        if "app" not in lower:
            found["APP"] = f"sqlsem {purpose}"
        return found

    def refused(self, exc: Exception) -> Exception:
        """Return the error for a failed connection attempt, without secrets."""
        state, number, text = errors.details(exc)
        text, low = self.clean(text), text.lower()
        numbers = {number, *errors.numbers_of(exc)}  # Windows reports several numbers, and always that the login failed
        if "ssl provider" in low and any(words in low for words in errors.TLS_WORDS):
            return ConfigurationError(
                f"No encrypted connection to {self.label}: {text}; give this computer the certificate of who signed "
                f"the server's, or, on a network that you trust, write TrustServerCertificate=yes",
                code="tls",
            )
        if "encryption not supported on" in low:
            return ConfigurationError(
                f"{self.label} offers no encryption, and the driver wants it: {text}; give the server a certificate, "
                f"or, on a network that you trust, write Encrypt=no",
                code="tls",
            )
        vague = numbers <= errors.VAGUE
        if numbers & errors.LOST_NUMBERS or (vague and any(words in low for words in errors.STARTING_WORDS)):
            return Disconnected(f"Cannot reach {self.label}: {text}", code="full")
        if numbers & errors.BARRED_NUMBERS:
            return ConfigurationError(f"{self.label} does not let this computer in: {text}", code="unreachable")
        if numbers & errors.LOGIN_NUMBERS or state == "28000" or (vague and "login failed" in low):
            if self._let_in and not numbers & (errors.LOGIN_NUMBERS - {18456}):
                # The same login succeeded before: the server is starting, or has just become the primary.
                return Disconnected(f"{self.label} refuses a login that it took before: {text}")
            return ConfigurationError(
                f"{self.label} refuses this login: {text}; check user and password in the URL", code="url"
            )
        if state in ("IM002", "01000"):
            return ConfigurationError(
                f"The ODBC driver cannot be loaded: {text}; install Microsoft's ODBC Driver 18 for SQL Server, or "
                f"FreeTDS, or: pip install mssql-python (and driver=mssql-python in the URL)",
                code="driver",
            )
        return Disconnected(f"Cannot reach {self.label}: {text}", code="full")

    def is_permission_error(self, exc: BaseException) -> bool:
        cause = exc.__cause__
        numbers = errors.numbers_of(cause) if isinstance(cause, Exception) else []
        return bool({*numbers} & (errors.DENIED_NUMBERS | errors.OWNER_NUMBERS))

    def database_message(self, exc: BaseException) -> str:
        cause = exc.__cause__
        return self.clean(errors.details(cause)[2]) if isinstance(cause, Exception) else ""

    def clean(self, text: str) -> str:
        """Return a driver's text without secrets."""
        return hide_values(text, self.words)

    @property
    def here(self) -> bool:
        """True if the URL names a server on this host."""
        server = self.word("server", "address", "addr", "servername") or ""
        return re.split(r"[,\\]", server.removeprefix("tcp:"))[0].lower() in HERE

    def checks_certificate(self, driver: str) -> bool | None:
        """True if the driver verifies the server's certificate; None if that is set elsewhere."""
        trusted = (self.word("trustservercertificate") or "").lower()
        encrypt = (self.word("encrypt") or "").lower()
        if self.creator is not None or self.word("dsn", "filedsn") or not re.search(r"msodbcsql|mssql_python", driver):
            return None
        newest = re.search(r"msodbcsql\D*1[0-7]\D", driver) is None  # version 17 and older do not by default
        return trusted not in ("yes", "true") and (
            encrypt in ("yes", "true", "mandatory", "strict") or (not encrypt and newest)
        )

    def pin_steps(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, bool]:
        yield cursor.execute(self.queries()["pin"], (ticket.resource, ticket.position, ticket.requesting_id))
        while cursor.description is None:
            if not (yield cursor.nextset()):
                return False
        row = yield cursor.fetchone()
        while (yield cursor.nextset()):
            pass
        return bool(row and row[0])

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
