"""A MariaDB or MySQL database: its URL, its connections, and the errors of a failed connection."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pymysql
from pymysql.constants import CLIENT, ER

from sqlsem import sql
from sqlsem.engines.base import Creator, Disconnected, Options, Session
from sqlsem.engines.failures import Refused
from sqlsem.engines.mysql.connection import for_driver
from sqlsem.engines.mysql.session import BorrowedMysqlSession, MysqlSession
from sqlsem.engines.statements.session import StatementEngine
from sqlsem.util import late, runtime, sockets
from sqlsem.util.printable import first_line
from sqlsem.util.process import program_name
from sqlsem.values.errors import ConfigurationError, SqlsemError

#: Rows count as found even if a statement changes nothing; and several statements may be sent as one text.
FLAGS = CLIENT.FOUND_ROWS | CLIENT.MULTI_STATEMENTS
#: The options of a URL, which are those of `pymysql.connect`: texts, and switches (``true`` or ``false``).
TEXTS = ("unix_socket", "ssl_ca", "ssl_cert", "ssl_key")
SWITCHES = ("ssl_verify_cert", "ssl_verify_identity", "ssl_disabled")
#: The errors of a connection attempt that another attempt cannot mend, and those of a server that is full for now.
WRONG = (ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.BAD_DB_ERROR)
FULL = (ER.CON_COUNT_ERROR, ER.USER_LIMIT_REACHED, ER.TOO_MANY_USER_CONNECTIONS)


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


#: The context of each connection that verifies no certificate, and so needs none of the system's, which take 50 ms to
#: load. Made at the import, which no fork can interrupt (`late`).
_UNVERIFIED = _unverified()


class Connection(pymysql.Connection):  # type: ignore[misc]
    """A connection whose TLS contexts are not made during a fork: a child would inherit OpenSSL's locks."""

    def _create_ssl_ctx(self, options: Mapping[str, Any]) -> ssl.SSLContext:
        if not options:
            return _UNVERIFIED
        with late.importing:
            context: ssl.SSLContext = super()._create_ssl_ctx(options)
        return context


class MysqlEngine(StatementEngine):
    """A database on MariaDB 10.6 or later, or MySQL 8.0.19 or later."""

    name = "mysql"
    session_class: ClassVar[type[MysqlSession]] = MysqlSession
    prefetches = True

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        super().__init__(url, options, creator)
        self._parameters: dict[str, Any] = {}
        #: The host and port of each server of the URL.
        self.servers: list[tuple[str, int]] = []
        self._next_server = 0
        if creator is None:
            self._parameters, self.servers = _parameters(url)
        self.has_other_servers = len(self.servers) > 1 and options.lease is not None

    @property
    def label(self) -> str:
        if self.creator is not None:
            return "the MySQL database of creator="
        servers = ", ".join(f"{host}:{port}" for host, port in self.servers)
        return f"MySQL database {self._parameters['database']} on {self._parameters.get('unix_socket') or servers}"

    @property
    def tls_options(self) -> Mapping[str, Any]:
        """The options of the URL for TLS."""
        return {name: value for name, value in self._parameters.items() if name.startswith("ssl_")}

    @property
    def is_local(self) -> bool:
        """True if the server is on this host."""
        hosts = {host for host, _ in self.servers}
        return "unix_socket" in self._parameters or hosts <= {"localhost", "127.0.0.1", "::1"}

    def queries(self) -> Mapping[str, str]:
        return _queries(self.options.schema, self.options.table)

    @property
    def next_server(self) -> str:
        """The server to which the next connection goes; empty if the URL names none."""
        return "{}:{}".format(*self.servers[self._next_server % len(self.servers)]) if self.servers else ""

    def leave_server(self, server: str) -> None:
        """Let the next connection go to the next server of the URL, as ``server`` cannot serve now. If the connections
        of this process have left that one already, nothing changes: else they would skip a server that can serve.
        """
        if server == self.next_server:
            self._next_server += 1

    def open_session(self, purpose: str) -> MysqlSession:
        return MysqlSession(self, self.open_connection())

    def session_on(self, cursor: Any) -> Session:
        return BorrowedMysqlSession(self, cursor)

    def open_connection(self, **other: Any) -> Any:
        """Open a connection. ``other``: parameters in place of those of the URL.

        A server that refuses us is passed over like one that is out of reach: an empty node of a cluster has neither
        the database nor the login. While another server is out of reach, the attempt may be repeated.
        """
        failures: list[tuple[str, SqlsemError]] = []
        for left in range(max(1, len(self.servers)) - 1, -1, -1):
            server = self.next_server
            try:
                return self._open_on_server(**other)
            except (Disconnected, ConfigurationError) as exc:
                if not server or exc.code == "driver":
                    raise
                failures.append((server, exc))
                if left:
                    self.leave_server(server)
        raise _summarize(failures)

    def _open_on_server(self, **other: Any) -> Any:
        if self.creator is not None and not other:
            connection = self.creator()
            if not isinstance(connection, pymysql.Connection) or connection.client_flag & FLAGS != FLAGS:
                raise ConfigurationError(
                    f"{self.label}: it must return a connection of PyMySQL that counts found rows and takes several "
                    f"statements: pymysql.connect(…, client_flag=CLIENT.FOUND_ROWS | CLIENT.MULTI_STATEMENTS)",
                    code="driver",
                )
            return connection
        host, port = self.servers[self._next_server % len(self.servers)] if self.servers else (None, 0)
        parameters = {
            "host": host,
            "port": port,
            "client_flag": FLAGS,
            "charset": "utf8mb4",
            "autocommit": True,
            "program_name": f"sqlsem {program_name()}",
            **self._parameters,
            **other,
        }
        try:
            connection = Connection(**parameters, defer_connect=True)
        except OSError as exc:
            raise ConfigurationError(
                f"{self.label}: its ssl_ca, ssl_cert or ssl_key cannot be used: {exc}; check the URL", code="url"
            ) from exc
        try:
            sock = self._open_socket(parameters["host"], parameters["port"], parameters.get("unix_socket"))
            with shut_down_after(sock, self.options.connect_timeout):
                connection.connect(sock)
        except (pymysql.MySQLError, OSError) as exc:
            raise self.unreachable(exc) from exc
        return connection

    def _open_socket(self, host: str, port: int, path: str | None) -> socket.socket:
        """Open the socket of a connection. It notices within about a grace that the server has vanished."""
        if path is not None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(self.options.connect_timeout)
            sock.connect(path)
        else:
            sock = socket.create_connection((host, port), self.options.connect_timeout)
            alive = self.options.keepalive
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            times = {"TCP_KEEPIDLE": alive, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": alive * 1000}
            for name, value in times.items():
                if hasattr(socket, name):  # not on each system
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.settimeout(None)
        return sock

    def unreachable(self, exc: Exception) -> Exception:
        """Return the error for a failed connection attempt."""
        code = exc.args[0] if exc.args else None
        text = first_line(exc.args[-1] if exc.args else exc)
        if code in WRONG:
            return ConfigurationError(f"{self.label} refuses us: {text}; check the URL", code="url")
        if code in FULL:
            return Refused(f"Cannot reach {self.label}: {text}; raise max_connections, or end sessions", code="full")
        return Disconnected(f"Cannot reach {self.label}: {text}", code="full")


def _summarize(failures: list[tuple[str, SqlsemError]]) -> SqlsemError:
    """Return the error for an attempt that failed on every server of the URL, with all refusals. It is `Disconnected`
    if a later attempt may reach one.
    """
    unreached = [exc for _, exc in failures if isinstance(exc, Disconnected)]
    last = unreached[-1] if unreached else failures[-1][1]
    refused = [(server, exc) for server, exc in failures if exc is not last and not isinstance(exc, Disconnected)]
    refusals = [f"{server}: {exc}" for server, exc in refused]
    return type(last)(". ".join((str(last), *refusals)), code=last.code) if refusals else last


@contextlib.contextmanager
def shut_down_after(sock: socket.socket, seconds: float) -> Iterator[None]:
    """Shut a socket down if the block takes longer: PyMySQL would wait for the first answer without a limit."""
    with sock.dup() as copy:  # (with TLS, the descriptor gets another owner)
        timer = runtime.current().timer(seconds, lambda: sockets.shut_down(copy.fileno()))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _parameters(url: str) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """Return the parameters of `pymysql.connect` for a URL, and the host and port of each of its servers. Raises
    `ConfigurationError`, without the URL's password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        names = [urllib.parse.urlsplit(f"//{server}") for server in hosts.split(",")]
        servers = [(name.hostname or "localhost", name.port or 3306) for name in names]
    except ValueError:
        raise ConfigurationError(
            "This is not a URL of a MySQL database; write mysql://user:password@host:3306/database", code="url"
        ) from None
    database = urllib.parse.unquote(parts.path.removeprefix("/"))
    if not database:
        raise ConfigurationError(
            "The URL names no database; write mysql://user:password@host:3306/database", code="url"
        )
    options: dict[str, str | bool] = {}
    for name, text in urllib.parse.parse_qsl(parts.query, keep_blank_values=True):
        if (name, text) == ("charset", "utf8mb4"):  # which URLs of SQLAlchemy often have, and which is ours in any case
            continue
        if name not in TEXTS + SWITCHES or (name in SWITCHES and text not in ("true", "false")):
            raise ConfigurationError(
                f"?{name}={text} is not known in the URL of a MySQL database; there are {', '.join(TEXTS)}, and "
                f"{', '.join(SWITCHES)} (true or false)",
                code="url",
            )
        options[name] = text if name in TEXTS else text == "true"
    user, _, password = login.partition(":")
    # (As bytes: PyMySQL would take a text for Latin-1.)
    credentials = {"user": urllib.parse.unquote(user) or None, "password": urllib.parse.unquote(password).encode()}
    return {"database": database, **credentials, **options}, servers


@functools.cache
def _queries(schema: str, table: str) -> Mapping[str, str]:
    return {name: for_driver(text) for name, text in sql.queries(MysqlEngine.name, schema, table).items()}
