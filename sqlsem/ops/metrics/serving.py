"""Answer scrapes over HTTP: few at a time, and only under this server's own names."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry

from sqlsem.ops.hosts import Hosts
from sqlsem.ops.terminal import output

__all__ = ["Server"]

log = logging.getLogger("sqlsem")

#: Connections at the same time, each of which has a thread.
MAX_CONNECTIONS = 16
#: How long the next piece of a request, or of its answer, may take.
PATIENCE_SECONDS = 10.0


class _Handler(WSGIRequestHandler):
    """Answers one request."""

    server: Server
    timeout = PATIENCE_SECONDS

    def parse_request(self) -> bool:
        """Parse the request, and mark its connection as being answered. Return False if that has been closed."""
        return super().parse_request() and self.server.begin_answer(self.connection)

    def get_stderr(self) -> io.StringIO:
        """Return a buffer that is never read, for errors of writing the answer: any client can cause them."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: any client can send many requests."""


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """An HTTP server for one registry, in threads.

    It listens at ``place``, a host and a port (0: any free one), and answers clients that call it by one of ``hosts``.
    When there are too many connections, it closes the oldest one that has not sent its request.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, place: tuple[str, int], registry: CollectorRegistry, hosts: Hosts) -> None:
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        self._hosts = hosts
        self._metrics: Any = prometheus_client.make_wsgi_app(registry)
        self._guard = threading.Lock()
        # in the order of arrival; True while its request is answered
        self._connections: dict[socket.socket, bool] = {}
        super().__init__(place, _Handler)
        self.set_app(self._answer)

    def server_bind(self) -> None:
        """Bind, without asking the network for this host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        named = environ.get("HTTP_HOST")  # several headers are joined by commas
        if not self._hosts.accept([] if named is None else [named]):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"This exporter is not known by that name; start it with --name if it should be.\n"]
        try:
            chunks: Iterable[bytes] = self._metrics(environ, start_response)
        except Exception as exc:
            output.print_trace()
            output.print_error(f"{type(exc).__name__}: {exc} (this is a fault of sqlsem's; please report it)")
            start_response("500 Internal Server Error", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"This is a fault of sqlsem's; its standard error has more.\n"]
        return chunks

    # -- its connections ------------------------------------------------------------------------------------------

    def begin_answer(self, connection: socket.socket) -> bool:
        """Mark the connection as being answered, as its request has arrived. Return False if it has been closed
        already.
        """
        with self._guard:
            is_open = connection in self._connections
            if is_open:
                self._connections[connection] = True
            return is_open

    def process_request(self, request: Any, client_address: Any) -> None:
        """Have a thread answer, if there is room."""
        with self._guard:
            self._connections[request] = False
            if len(self._connections) > MAX_CONNECTIONS:
                oldest = next(connection for connection, answered in self._connections.items() if not answered)
                del self._connections[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread, if it has one, closes it
            if request not in self._connections:
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless a client caused it."""
        log.debug("A scrape from %s has failed", client_address, exc_info=True)
