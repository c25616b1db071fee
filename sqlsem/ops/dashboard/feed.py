"""Sends the board to all open pages after each poll: drawn once for all pages with the same view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool

from sqlsem.ops.poller import Poller, Snapshot
from sqlsem.util.permits import Permit, PermitPool

__all__ = ["Feed"]

#: The number of open pages.
MAX_STREAMS = 200
#: Seconds after which a comment is sent if there is no event: otherwise a closed connection would not be noticed.
KEEPALIVE_SECONDS = 15.0


class Feed:
    """Passes the snapshots of a `Poller` to the streams. Runs in the event loop, except for the drawing."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._next: asyncio.Event = asyncio.Event()
        self._drawn: dict[str, str] = {}
        self._ended = False
        self.streams = PermitPool(MAX_STREAMS)

    @property
    def snapshot(self) -> Snapshot:
        """The last snapshot."""
        return self._poller.snapshot

    def start(self) -> None:
        """Start to poll."""
        loop = asyncio.get_running_loop()

        def deliver(_: Snapshot) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._wake_streams)

        self._poller.start(deliver)

    def stop(self) -> None:
        """Stop polling, and end the streams."""
        self._ended = True
        self._wake_streams()
        self._poller.stop()

    def _wake_streams(self) -> None:
        self._drawn.clear()
        self._next.set()
        self._next = asyncio.Event()

    async def stream(self, permit: Permit, key: str, draw: Callable[[], str]) -> AsyncIterator[str]:
        """Yield server-sent events: the result of ``draw``, now and after each poll.

        Args:
            permit: One of `streams`, released at the end. (If a stream never begins, it is free again when the permit
                is garbage-collected.)
            key: Pages with the same key share one drawing.
            draw: Draws the board.
        """
        try:
            while not self._ended:
                following = self._next
                text = self._drawn.get(key)
                if text is None:
                    text = await run_in_threadpool(draw)
                    if following is self._next:  # no newer snapshot has arrived
                        self._drawn[key] = text
                yield "event: board\n" + "".join(f"data: {line}\n" for line in text.splitlines()) + "\n"
                while not following.is_set():
                    try:
                        await asyncio.wait_for(following.wait(), KEEPALIVE_SECONDS)
                    except asyncio.TimeoutError:
                        yield ": still here\n\n"
        finally:
            self.streams.release(permit)
