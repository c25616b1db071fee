"""Runs the dashboard with uvicorn, until a signal ends it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import uvicorn

from sqlsem.ops.dashboard.app import Dashboard
from sqlsem.ops.dashboard.connection import MAX_HEADER_BYTES, Connection
from sqlsem.util.printable import CleanFilter
from sqlsem.values.errors import ConfigurationError

__all__ = ["Server", "listen", "serve"]

CLEAN = CleanFilter()


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
