"""Runs the dashboard with uvicorn, until a signal ends it. Limits the number of connections and the time that a client
may take: any client can open many.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sqlsem.ops.dashboard.app import Dashboard
from sqlsem.util.printable import CleanFilter
from sqlsem.values.errors import ConfigurationError

__all__ = ["Server", "listen", "serve"]

#: The number of connections; far below the usual limit of open files of a process (1024).
MAX_CONNECTIONS = 400
#: How long a client may take to send a whole request, or to read a response, in seconds.
TIMEOUT_SECONDS = 10.0
#: The pause between two checks of a connection, in seconds.
CHECK_SECONDS = 1.0
#: The longest request line with its headers, in bytes.
MAX_HEADER_BYTES = 16_384
CLEAN = CleanFilter()


class Connection(H11Protocol):
    """Adds limits that uvicorn lacks: the number of connections, and the time for a request and to read a response.

    If there are too many connections, the one whose client has been idle for the longest is closed.
    """

    _check_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _answered: Any = None
    #: When we began to wait for a request of the client, or for the rest of one.
    _waiting_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; close the one that has waited for the longest if there are too many."""
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            idle = [
                connection
                for connection in self.connections
                if isinstance(connection, Connection) and connection.waits_for_client
            ]
            min(idle, key=lambda connection: connection._waiting_since, default=self).transport.abort()
        self._check()

    @property
    def waits_for_client(self) -> bool:
        """True if the client has to send a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _check(self) -> None:
        now = self.loop.time()
        if self.cycle is not self._answered or not self.waits_for_client:
            self._answered, self._waiting_since = self.cycle, now
        elif now - self._waiting_since > TIMEOUT_SECONDS:
            self.transport.abort()
            return
        self._check_timer = self.loop.call_later(CHECK_SECONDS, self._check)

    def pause_writing(self) -> None:
        """Wait for the client to read, up to `TIMEOUT_SECONDS`."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(TIMEOUT_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue: the client has read."""
        self._cancel(self._write_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of the connection."""
        self._cancel(self._check_timer)
        self._cancel(self._write_timer)
        super().connection_lost(exc)

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


class Server(uvicorn.Server):
    """A uvicorn server that ends its streams at shutdown: uvicorn waits for them, and they would never end.

    ``ready`` is called when it accepts requests; ``tls``: the file of the certificate, and of its key if separate.
    """

    def __init__(
        self, dashboard: Dashboard, ready: Callable[[], None], tls: tuple[str, str | None] | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                dashboard.app,
                http=Connection,
                ws="none",
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=5,
                ssl_certfile=tls[0] if tls else None,
                ssl_keyfile=tls[1] if tls else None,
            )
        )
        for name in ("uvicorn.error", "uvicorn.asgi"):
            logger = logging.getLogger(name)
            logger.addFilter(CLEAN)
            logger.setLevel(logging.ERROR)  # a warning is about one request, and any client can send many
        self._dashboard = dashboard
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call ``ready``."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then shut down."""
        self._dashboard.feed.stop()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: any free port. Raises `ConfigurationError` if that is not possible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        raise ConfigurationError(
            f"Cannot listen at {host}, port {port}: {exc.strerror or exc}; choose another with --port (0: any)",
            code="port",
        ) from exc


def serve(
    dashboard: Dashboard, listener: socket.socket, ready: Callable[[], None], tls: tuple[str, str | None] | None = None
) -> None:
    """Serve until a signal ends it (Ctrl-C, SIGTERM); see `Server`."""
    Server(dashboard, ready, tls).run(sockets=[listener])
