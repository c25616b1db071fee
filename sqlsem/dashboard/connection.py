"""Connections to the dashboard: how many there may be, and how long a client may take. Any client can open many."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["MOST_CONNECTIONS", "MOST_HEADER_BYTES", "Connection"]

#: Connections at the same time; far below the number of files that a process may usually open (1024).
MOST_CONNECTIONS = 400
#: Seconds for a client to send a request whole, or to read what it was sent.
PATIENCE_SECONDS = 10.0
#: Between two looks at a connection, seconds.
LOOK_SECONDS = 1.0
#: The longest request line with its headers, bytes.
MOST_HEADER_BYTES = 16_384


class Connection(H11Protocol):
    """Limits what uvicorn does not: the number of connections, and the time for a request and for reading an answer.

    When there are too many, the one that has owed us a request for the longest makes room for the new one.
    """

    _looking: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _answered: Any = None
    #: Since when the client has owed us a request, or the rest of one.
    _owes_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, if there is room."""
        super().connection_made(transport)
        self._owes_since = self.loop.time()
        if len(self.connections) > MOST_CONNECTIONS:
            others = [
                connection for connection in self.connections if isinstance(connection, Connection) and connection.owes
            ]
            min(others, key=lambda one: one._owes_since, default=self).transport.abort()
        self._look()

    @property
    def owes(self) -> bool:
        """True if it is the client's turn."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _look(self) -> None:
        now = self.loop.time()
        if self.cycle is not self._answered or not self.owes:
            self._answered, self._owes_since = self.cycle, now
        elif now - self._owes_since > PATIENCE_SECONDS:
            self.transport.abort()
            return
        self._looking = self.loop.call_later(LOOK_SECONDS, self._look)

    def pause_writing(self) -> None:
        """Wait for the client to read, but not for ever."""
        super().pause_writing()
        self._stuck = self.loop.call_later(PATIENCE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        self._forget(self._stuck)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the timers with the connection."""
        self._forget(self._looking)
        self._forget(self._stuck)
        super().connection_lost(exc)

    @staticmethod
    def _forget(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
