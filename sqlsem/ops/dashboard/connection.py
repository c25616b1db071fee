"""Connections to the dashboard: limits their number and the time that a client may take. Any client can open many."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["MAX_CONNECTIONS", "MAX_HEADER_BYTES", "Connection"]

#: The number of connections; far below the usual limit of open files of a process (1024).
MAX_CONNECTIONS = 400
#: How long a client may take to send a whole request, or to read a response, in seconds.
TIMEOUT_SECONDS = 10.0
#: The pause between two checks of a connection, in seconds.
CHECK_SECONDS = 1.0
#: The longest request line with its headers, in bytes.
MAX_HEADER_BYTES = 16_384


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
