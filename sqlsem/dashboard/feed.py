"""One look for all who have a page open: it is drawn once for those who see the same, and handed to each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool

from sqlsem.core.permits import Permit, PermitPool
from sqlsem.live import Live, Seen

__all__ = ["Feed"]

#: Pages that are open at the same time.
MOST_STREAMS = 200
#: Seconds after which something is sent though there is nothing to say: so it is found out that nobody reads it.
HEARTBEAT = 15.0


class Feed:
    """Hands what a `Live` sees to the streams. All of it happens in the event loop, but for the drawing."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._next: asyncio.Event = asyncio.Event()
        self._drawn: dict[str, str] = {}
        self._ended = False
        self.streams = PermitPool(MOST_STREAMS)

    @property
    def seen(self) -> Seen:
        """What was seen last."""
        return self._live.seen

    def start(self) -> None:
        """Begin to look."""
        loop = asyncio.get_running_loop()

        def tell(seen: Seen) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._tell)

        self._live.start(tell)

    def stop(self) -> None:
        """Look no more, and end the streams."""
        self._ended = True
        self._tell()
        self._live.stop()

    def _tell(self) -> None:
        self._drawn.clear()
        self._next.set()
        self._next = asyncio.Event()

    async def stream(self, place: Permit, what: str, draw: Callable[[], str]) -> AsyncIterator[str]:
        """Yield server-sent events: what ``draw`` gives, now and after each look.

        Args:
            place: One of `streams`, which is given back at the end. (A stream that is never begun has no end: its
                place is free again when nobody has it any more.)
            what: The same for all who see the same.
            draw: Draws that.
        """
        try:
            while not self._ended:
                following = self._next
                text = self._drawn.get(what)
                if text is None:
                    text = await run_in_threadpool(draw)
                    if following is self._next:  # nothing has been seen meanwhile
                        self._drawn[what] = text
                yield "event: board\n" + "".join(f"data: {line}\n" for line in text.splitlines()) + "\n"
                while not following.is_set():
                    try:
                        await asyncio.wait_for(following.wait(), HEARTBEAT)
                    except asyncio.TimeoutError:
                        yield ": still here\n\n"
        finally:
            self.streams.release(place)
