"""The server, until somebody ends it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import uvicorn

from sqlsem.dashboard.app import Dashboard
from sqlsem.dashboard.connection import MOST_HEADER_BYTES, Connection
from sqlsem.errors import ConfigurationError
from sqlsem.printable import CleanFilter

__all__ = ["Server", "listen", "serve"]

CLEAN = CleanFilter()


class Server(uvicorn.Server):
    """One whose streams end when it does: uvicorn waits for those who read, and they for us.

    ``ready`` is called once it answers; ``tls``: files of the certificate, and of its key if that is not in there.
    """

    def __init__(
        self, dashboard: Dashboard, ready: Callable[[], None], tls: tuple[str, str | None] | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                dashboard.app,
                http=Connection,
                ws="none",
                h11_max_incomplete_event_size=MOST_HEADER_BYTES,
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
        """As uvicorn does it."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, once nobody reads any more."""
        self._dashboard.feed.stop()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A place to listen at; port 0: one that is free. Raises `ConfigurationError` where that cannot be."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        raise ConfigurationError(
            f"Cannot listen at {host}, port {port}: {exc.strerror or exc}; choose another with --port (0: any)"
        ) from exc


def serve(
    dashboard: Dashboard, place: socket.socket, ready: Callable[[], None], tls: tuple[str, str | None] | None = None
) -> None:
    """Serve until a signal ends it (Ctrl-C, SIGTERM); see `Server`."""
    Server(dashboard, ready, tls).run(sockets=[place])
