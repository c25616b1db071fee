"""What the event loops of a process have in one database: threads for what cannot be awaited, and a driver each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from sqlsem.core import shutdown
from sqlsem.core.membership import Membership
from sqlsem.core.permits import PermitPool
from sqlsem.core.threads import Pool
from sqlsem.engines.base import AsyncSession, EngineConnection

__all__ = ["EventLoops", "LoopDriver"]

T = TypeVar("T")


class LoopDriver(Protocol):
    """What carries out operations for one event loop (`sqlsem.aio.driver`)."""

    #: Its sessions that nobody uses.
    idle: list[AsyncSession]

    def soon(self, call: Callable[[], object]) -> None:
        """Have the loop call something, from any thread."""

    def running(self) -> int | None:
        """The number of the task that this thread runs just now; None outside of its loop."""

    def end(self) -> None:
        """Nothing of it can be awaited any more: give back, withdraw, close."""


class EventLoops:
    """The drivers, by event loop, and what they share."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self.drivers: dict[Any, LoopDriver] = {}
        self.permits = PermitPool(member.engine.async_sessions)  # to wait in the database
        self.pools: dict[str, Pool] = {}

    def submit(self, pool: str, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread do what asyncio cannot await: one for the 'calls' on the main session, a few for
        'waits', and for 'others'.
        """
        threads = self.pools.get(pool)
        if threads is None:
            with self._member.state_lock:
                self._member.main.require_open()
                if pool not in self.pools:
                    most = 1 if pool == "calls" else max(1, self._member.engine.async_sessions)
                    self.pools[pool] = Pool(f"sqlsem-aio-{pool}", most)
                threads = self.pools[pool]
        try:
            return threads.submit(call, *arguments)
        except RuntimeError:
            shutdown.stay_asleep()
            self._member.main.require_open()  # closed this instant
            raise

    def tidy(self) -> None:
        """Give back what was held, and withdraw what was asked, in event loops that are closed."""
        for loop in [loop for loop in list(self.drivers) if loop.is_closed()]:
            driver = self.drivers.pop(loop, None)
            if driver is not None:
                driver.end()

    def running(self) -> int | None:
        """The number of the task that this thread runs just now, if any."""
        numbers = (driver.running() for driver in list(self.drivers.values()))
        return next((number for number in numbers if number is not None), None)

    def close(self) -> None:
        """End the threads, and have each loop end what it has."""
        with self._member.state_lock:
            pools = list(self.pools.values())
            self.pools.clear()
        for pool in pools:
            pool.close()
        for driver in list(self.drivers.values()):
            driver.soon(driver.end)

    def sessions(self) -> list[EngineConnection]:
        """All that are open and idle: for a forked child."""
        return [session for driver in self.drivers.values() for session in driver.idle]
