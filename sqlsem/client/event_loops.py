"""The event loops of this process that use one database: a driver for each, and threads for calls that block."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlsem.util import shutdown
from sqlsem.util.permits import PermitPool
from sqlsem.util.threads import Pool

if TYPE_CHECKING:
    from sqlsem.client.connection.membership import Membership
    from sqlsem.engines.base import AsyncSession, EngineConnection

__all__ = ["EventLoops", "LoopDriver"]

T = TypeVar("T")


class LoopDriver(Protocol):
    """Runs operations for one event loop (`sqlsem.aio.driver`)."""

    #: The idle sessions of this loop.
    idle: list[AsyncSession]

    def soon(self, call: Callable[[], object]) -> None:
        """Schedule a call in the loop, from any thread."""

    def running(self) -> int | None:
        """Return the number of the task that this thread runs now; None outside of the loop."""

    def end(self) -> None:
        """Release grants, cancel requests and close sessions without awaiting, because the loop has ended."""


class EventLoops:
    """The drivers by event loop, and the threads and permits that they share."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self.drivers: dict[Any, LoopDriver] = {}
        self.permits = PermitPool(member.engine.async_sessions)  # for waiting in the database
        self.pools: dict[str, Pool] = {}

    def submit(self, pool: str, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a blocking call in a thread of a pool. The pools: 'calls' (one thread, for the main connection), 'waits'
        and 'others' (a few threads each).
        """
        threads = self.pools.get(pool)
        if threads is None:
            with self._member.state_lock:
                self._member.main.require_open()
                if pool not in self.pools:
                    maximum = 1 if pool == "calls" else max(1, self._member.engine.async_sessions)
                    self.pools[pool] = Pool(f"sqlsem-aio-{pool}", maximum)
                threads = self.pools[pool]
        try:
            return threads.submit(call, *arguments)
        except RuntimeError:
            shutdown.block_daemon_thread()
            self._member.main.require_open()  # raises if the coordinator was closed at this moment
            raise

    def discard_closed_loops(self) -> None:
        """End the drivers of closed event loops: release their grants, and cancel their requests."""
        for loop in [loop for loop in list(self.drivers) if loop.is_closed()]:
            driver = self.drivers.pop(loop, None)
            if driver is not None:
                driver.end()

    def running(self) -> int | None:
        """Return the number of the task that this thread runs now; None outside of all loops."""
        numbers = (driver.running() for driver in list(self.drivers.values()))
        return next((number for number in numbers if number is not None), None)

    def close(self) -> None:
        """End the threads, and have each driver end in its loop."""
        with self._member.state_lock:
            pools = list(self.pools.values())
            self.pools.clear()
        for pool in pools:
            pool.close()
        for driver in list(self.drivers.values()):
            driver.soon(driver.end)

    def sessions(self) -> list[EngineConnection]:
        """Return all open, idle sessions: a forked child must discard them."""
        return [session for driver in self.drivers.values() for session in driver.idle]
