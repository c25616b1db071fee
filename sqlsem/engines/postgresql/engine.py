"""A PostgreSQL database: its URL, its connections, and the errors of a failed connection."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

import psycopg
from psycopg import conninfo, errors

from sqlsem.engines.base import Creator, Disconnected, Engine, Options, Session
from sqlsem.engines.failures import Refused
from sqlsem.engines.postgresql.aio import AsyncPostgresSession
from sqlsem.engines.postgresql.connection import LOCKS_FULL, LOCKS_SETTING
from sqlsem.engines.postgresql.session import BorrowedPostgresSession, PostgresSession
from sqlsem.util.credentials import hide_values
from sqlsem.util.printable import first_line
from sqlsem.values.errors import ConfigurationError


class PostgresEngine(Engine):
    """A PostgreSQL database, version 13 or later."""

    name = "postgresql"
    session_class = PostgresSession
    prefetches = True

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        super().__init__(url, options, creator)
        try:
            self._parameters = conninfo.conninfo_to_dict(url) if url else {}
        except psycopg.Error:
            # libpq's message may repeat parts of the URL, so neither the message nor the cause is kept.
            raise ConfigurationError(
                "This is not a URL that PostgreSQL understands; write postgresql://user:password@host:5432/database",
                code="url",
            ) from None

    @property
    def label(self) -> str:
        if self.creator is not None:
            return "the PostgreSQL database of creator="
        hosts = str(self._parameters.get("host") or self._parameters.get("hostaddr") or "localhost").split(",")
        ports = str(self._parameters.get("port") or "").split(",")
        ports = ports * len(hosts) if len(ports) == 1 else ports  # one port for all hosts
        places = ", ".join(f"{host or 'localhost'}:{port or '5432'}" for host, port in zip(hosts, ports, strict=False))
        return f"PostgreSQL database {self._parameters.get('dbname') or '(default)'!s} on {places}"

    def is_permission_error(self, exc: BaseException) -> bool:
        return isinstance(exc.__cause__, errors.InsufficientPrivilege)

    @property
    def tls_mode(self) -> str:
        """The sslmode of the URL or the environment, or libpq's default."""
        return str(self._parameters.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer")

    def unreachable(self, exc: psycopg.Error) -> Exception:
        """Return the error for a failed connection attempt."""
        text = hide_values(str(exc), self._parameters)
        refused = (errors.InvalidPassword, errors.InvalidAuthorizationSpecification, errors.InvalidCatalogName)
        # libpq reports a refusal at connect time without a SQLSTATE.
        words = (
            "password authentication failed",
            "no password supplied",
            "does not exist",
            "permission denied for database",
        )
        if isinstance(exc, refused) or (
            isinstance(exc, psycopg.OperationalError) and any(word in text for word in words)
        ):
            return ConfigurationError(f"{self.label} refuses us: {first_line(text)}; check the URL", code="url")
        if LOCKS_SETTING in text:
            return Refused(f"Cannot reach {self.label}: {first_line(text)}; {LOCKS_FULL}", code="full")
        if "FATAL:" in text:  # the server's message, if it is in English
            return Refused(f"Cannot reach {self.label}: {first_line(text)}", code="full")
        if isinstance(exc, psycopg.OperationalError):
            return Disconnected(f"Cannot reach {self.label}: {first_line(text)}", code="full")
        return exc

    def connect_parameters(self, purpose: str) -> dict[str, Any]:
        """Return the parameters of a connection for libpq."""
        alive = self.options.keepalive
        return {
            "connect_timeout": math.ceil(self.options.connect_timeout),
            "application_name": f"sqlsem {purpose}",
            # Notice within about a grace that the server has vanished.
            "keepalives_idle": alive,
            "keepalives_interval": 1,
            "keepalives_count": 3,
            "tcp_user_timeout": alive * 1000,
            **self._parameters,
            "client_encoding": "utf8",  # also if the database has another one; psycopg returns bytes for SQL_ASCII
            "autocommit": True,
        }

    def owns_session(self, connection: Any, number: int) -> bool:
        # A pooler in transaction mode reports pids of its own.
        return getattr(getattr(connection, "info", None), "backend_pid", None) == number

    def open_session(self, purpose: str) -> PostgresSession:
        try:
            if self.creator is not None:
                connection = self.creator()
                connection.autocommit = True
            else:
                connection = psycopg.connect(**self.connect_parameters(purpose))
        except psycopg.Error as exc:
            raise self.unreachable(exc) from exc
        return PostgresSession(self, connection)

    def session_on(self, cursor: Any) -> Session:
        return BorrowedPostgresSession(self, cursor)

    @property
    def supports_async(self) -> bool:
        # psycopg cannot wait in the default event loop of Windows.
        return self.creator is None and not isinstance(asyncio.get_running_loop(), _loops_without_sockets)

    async def connect_async(self, purpose: str) -> AsyncPostgresSession:
        # (In a task of its own: older versions of psycopg may miss a cancellation.)
        opening = asyncio.get_running_loop().create_task(self._open(purpose))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.cancel()
            opening.add_done_callback(_close_opened)
            raise

    async def _open(self, purpose: str) -> AsyncPostgresSession:
        try:
            connection = await psycopg.AsyncConnection.connect(**self.connect_parameters(purpose))
        except psycopg.Error as exc:
            raise self.unreachable(exc) from exc
        session = AsyncPostgresSession(self, connection)
        overdue = asyncio.get_running_loop().call_later(self.setup_timeout or 0.0, session.interrupt)
        try:
            await session.prepare(purpose)
        except BaseException:
            session.close()
            raise
        finally:
            overdue.cancel()
        return session


def _close_opened(opening: asyncio.Task[AsyncPostgresSession]) -> None:
    """Close a connection that was opened although its caller was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


#: The event loops in which psycopg cannot wait: none, except on Windows.
_loops_without_sockets: tuple[type, ...] = tuple(filter(None, [getattr(asyncio, "ProactorEventLoop", None)]))
