"""A job that runs once per period, for asyncio tasks: one caller runs it, and after a failure the next one may."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from sqlsem.aio.driver import Driver, call_in_thread, run_generator, this_caller, this_task
from sqlsem.aio.grants import Grant
from sqlsem.aio.locks import Lock
from sqlsem.client.once import Period, Periodic, release_after_interrupt
from sqlsem.util import late
from sqlsem.values.locks import Duration, OnceEntry

F = TypeVar("F", bound=Callable[..., Any])


class Run:
    """The one run of a period: has the attributes of `sqlsem.Run`, and calls that are awaited."""

    def __init__(self, driver: Driver, period: Period, lock: Lock, grant: Grant) -> None:
        self.name = period.name
        self.grant = grant
        self._driver = driver
        self._period = period
        self._lock = lock

    @property
    def fence(self) -> int:
        """See `sqlsem.Run.fence`."""
        return self.grant.fence

    async def finish(self) -> None:
        """See `sqlsem.Run.finish`."""
        try:
            await self._mark()
        finally:
            await self.grant.release()

    async def fail(self) -> None:
        """See `sqlsem.Run.fail`."""
        await self.grant.release()

    async def _mark(self) -> None:
        self._driver.require_here(self.grant)
        await run_generator(self._period.mark(self._driver.client, self.grant), self._driver.execute_effect)

    async def _leave(self, exc: BaseException | None) -> None:
        if self.grant.state.released:
            return  # by `finish` or `fail`, inside the block
        try:
            if exc is None:
                await self._mark()
        except BaseException as error:
            await self._lock.__aexit__(type(error), error, None)
            raise
        await self._lock.__aexit__(None if exc is None else type(exc), exc, None)

    def __repr__(self) -> str:
        return f"<aio.Run {self.name!r}, {self.grant!r}>"


class Once:
    """A job that runs once per period, as `sqlsem.Once`; made by `sqlsem.aio.once`."""

    def __init__(self, periodic: Periodic) -> None:
        self._periodic = periodic
        self._runs: weakref.WeakKeyDictionary[asyncio.Task[Any], list[Run | None]] = weakref.WeakKeyDictionary()

    async def begin(self, blocking: bool = True, timeout: Duration | None = -1) -> Run | None:
        """See `sqlsem.Once.begin`."""
        return (await self._begin(self._periodic.terms.seconds(blocking, timeout)))[0]

    async def _begin(self, timeout: float | None) -> tuple[Run | None, bool]:
        """Return the run, if this caller runs; and True if another run did not end in time."""
        this_task()
        client, period = self._periodic.client, self._periodic.period
        driver = Driver.of(client)
        await driver.enter()
        if not await run_generator(period.due(client, None), driver.execute_effect):
            return None, False
        lock = Lock(self._periodic.terms)
        try:
            if not await lock.acquire(timeout=timeout):
                return None, True
            grant = lock.grant
            if await run_generator(period.due(client, grant), driver.execute_effect):
                return Run(driver, period, lock, grant), False
            await lock.release()
        except BaseException:
            release_after_interrupt(lock)
            raise
        return None, False

    async def last(self) -> OnceEntry | None:
        """See `sqlsem.Once.last`."""
        return await call_in_thread(self._periodic.terms.client, self._periodic.last)

    async def forget(self) -> bool:
        """See `sqlsem.Once.forget`."""
        return await call_in_thread(self._periodic.terms.client, self._periodic.forget)

    async def __aenter__(self) -> Run | None:
        run, late = await self._begin(self._periodic.terms.timeout)
        if late:
            terms, driver = self._periodic.terms, Driver.of(self._periodic.client)
            raise await run_generator(terms.timeout_error(terms.requests, this_caller()), driver.execute_effect)
        self._runs.setdefault(this_task(), []).append(run)
        return run

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object
    ) -> None:
        run = self._runs[this_task()].pop()
        if run is not None:
            await run._leave(exc)

    def __call__(self, function: F) -> F:
        """Decorate a coroutine function or method: it is called once per period, and other calls return None."""
        with late.importing:
            from sqlsem.client import decorated  # wrapt takes longer to load than sqlsem

        return decorated.run_once_awaiting(function, self)

    def __repr__(self) -> str:
        return f"<aio.Once {self._periodic}>"
