"""Carries out operations for one event loop on one database: awaiting what can be awaited, the rest in threads.

Waiting is done on connections of the database driver's own asyncio kind where it has one (psycopg), else in a few
threads; calls on the main session, which all threads and loops of the process share, take one thread. Nothing here
blocks the loop.

Invariants
    A task that is cancelled leaves with the operation that removes its rows, and waits for that: a call that is under
    way in the thread is not left to itself, and the next one stands behind it.
    `Driver` is touched by its own loop only, but for `Driver.end` of a loop that is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

import tenacity

from sqlsem.core.callers import Caller, new_number
from sqlsem.core.client import DatabaseClient
from sqlsem.core.effects import NO_CONNECTION, Call, Effect, Operation, Sleep, WaitFor
from sqlsem.core.grant_registry import BaseGrant
from sqlsem.core.main_connection import unavailable
from sqlsem.core.permits import Permit
from sqlsem.core.threads import voice
from sqlsem.core.wait_pool import MAX_IDLE_CONNECTIONS
from sqlsem.engines.base import AsyncSession, Busy, Disconnected
from sqlsem.errors import ConfigurationError
from sqlsem.model import monotonic

__all__ = ["Driver", "Signal", "awaited", "elsewhere", "run_generator", "this_caller", "this_task"]

log = voice
S = TypeVar("S")
T = TypeVar("T")

#: Seconds for which a cancelled task waits for the call that it was in. (What comes later is done by the next ping.)
SETTLE_SECONDS = 1.0
#: Calls that begin in one round of the loop at the most.
CALLS_A_ROUND = 50

_numbers: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()


def this_task() -> asyncio.Task[Any]:
    """The task that calls. Raises `ConfigurationError` outside of tasks."""
    task = asyncio.current_task()
    if task is None:
        raise ConfigurationError("A lock of sqlsem.aio is used by a task; run this in one (asyncio.run, create_task)")
    return task


def this_caller() -> Caller:
    """The task that calls, as the core knows it."""
    task = this_task()
    number = _numbers.get(task)
    if number is None:
        number = _numbers[task] = new_number()
    return Caller("task", number, task.get_name(), weakref.ref(task))


async def run_generator(effects: Generator[S, Any, T], execute: Callable[[S], Awaitable[Any]]) -> T:
    """As `sqlsem.core.effects.run_generator`, awaiting: errors and cancellations of any kind reach the generator."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            effect = effects.throw(failure) if failure is not None else effects.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            outcome = failure = None  # an exception that its own frame refers to would live on, with all it holds
        try:
            outcome = await execute(effect)
        except GeneratorExit:
            effects.close()
            raise  # this coroutine was dropped: its loop is gone, and there is nothing to await with
        except BaseException as exc:
            failure = exc


class Signal(threading.Event):
    """An event that any thread may set, and that one task of a loop sleeps on."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver
        self._sleeper: asyncio.Future[bool] | None = None

    def set(self) -> None:
        super().set()
        if self._sleeper is not None:  # looked at after the flag was set; `sleep` does it the other way round
            self._driver.soon(self._wake)

    def _wake(self, woken: bool = True) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(woken)

    async def sleep(self, seconds: float) -> bool:
        loop = self._driver.loop
        self._sleeper = loop.create_future()
        timer = loop.call_later(seconds, self._wake, False)
        try:
            if not self.is_set():
                await self._sleeper
        finally:
            timer.cancel()
            self._sleeper = None
        woken = self.is_set()
        self.clear()
        return woken


class _Turnstile:
    """Lets so many through in one round of the loop: a thousand tasks that begin, or are cancelled, together must not
    keep it from others.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = CALLS_A_ROUND
        self._line: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Go through, in the order of asking."""
        if self._room == CALLS_A_ROUND:
            self._loop.call_soon(self._next_round)
        if self._room > 0:
            self._room -= 1
        else:
            turn = self._loop.create_future()
            self._line.append(turn)
            await turn

    def _next_round(self) -> None:
        self._room = CALLS_A_ROUND
        if self._line:
            self._loop.call_soon(self._next_round)
        while self._line and self._room > 0:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                self._room -= 1


class Driver:
    """Carries out operations for one event loop on one database."""

    def __init__(self, client: DatabaseClient, loop: asyncio.AbstractEventLoop) -> None:
        self.client = client
        self.loop = loop
        self.grants: weakref.WeakSet[BaseGrant] = weakref.WeakSet()
        self._operations: set[Operation[Any]] = set()
        self.idle: list[AsyncSession] = []
        # (Kept here, too: after a fork what the child finds of its parent's loop must not touch the child's own.)
        self._permits = client.event_loops.permits
        self._turnstile = _Turnstile(loop)
        self._ended = False
        self._keeper: AsyncIterator[None] | None = None

    @staticmethod
    def of(client: DatabaseClient) -> Driver:
        """The one of the running loop."""
        loop = asyncio.get_running_loop()
        driver = client.event_loops.drivers.get(loop)
        if driver is None:
            client.event_loops.discard_closed_loops()
            driver = client.event_loops.drivers[loop] = Driver(client, loop)
        assert isinstance(driver, Driver)
        return driver

    def running(self) -> int | None:
        """The number of the task that this thread runs just now; None outside of this loop."""
        try:
            task = asyncio.current_task() if asyncio.get_running_loop() is self.loop else None
        except RuntimeError:
            return None
        return None if task is None else _numbers.get(task)

    def require_here(self, grant: BaseGrant) -> None:
        """Raise `ConfigurationError` outside of the loop that the grant belongs to."""
        if asyncio.get_running_loop() is not self.loop:
            state = ", which is closed: what was held there has been given back" if self.loop.is_closed() else ""
            raise ConfigurationError(
                f"The lock on {grant.resource!r} was acquired in another event loop{state}; use each grant in the loop "
                f"that it was acquired in"
            )

    def soon(self, call: Callable[[], object]) -> None:
        """Have the loop call something, from any thread."""
        with contextlib.suppress(RuntimeError):  # closed: nobody is left who could care
            self.loop.call_soon_threadsafe(call)

    # -- acquiring ----------------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Take a turn for an acquisition, and watch for the end of the loop."""
        self.client.require_open()
        await self._turnstile.enter()
        if self._keeper is None:
            # Finalised by the loop when it shuts down: the one moment that it tells anybody about.
            self._keeper = self._keep()
            await self._keeper.__anext__()

    async def run_operation(self, operation: Operation[T]) -> T:
        """As `sqlsem.core.effects.run_operation`, awaiting."""
        self._operations.add(operation)
        try:
            return await run_generator(operation.run(), self.execute_effect)
        except GeneratorExit:
            operation.rollback_local()  # as the coroutine itself was dropped: nobody awaits any more
            raise
        except BaseException:
            await run_generator(operation.rollback(), self.execute_effect)
            raise
        finally:
            self._operations.discard(operation)
            operation.close()

    # -- effects ------------------------------------------------------------------------------------------------

    async def execute_effect(self, effect: Effect) -> Any:
        """Carry out an effect, awaiting."""
        if isinstance(effect, Call):
            return await self._call(effect)
        if isinstance(effect, WaitFor):
            if self.client.engine.supports_async:
                return await self._wait(effect)
            return await self._wait_in_thread(effect)
        if isinstance(effect, Sleep):
            return await effect.waiter.event.sleep(effect.timeout)
        return await self._in_thread(self.client.member.verify)

    async def _call(self, effect: Call) -> Any:
        main = self.client.member.main
        main.require_open()
        await self._turnstile.enter()
        try:
            return await self._once(effect)
        except (Disconnected, Busy) as exc:
            log.info("%s has to be tried again: %s", effect.what, exc)
        retrying = tenacity.AsyncRetrying(sleep=asyncio.sleep, **main.retry_policy(effect.what, effect.retry_timeout))
        try:
            return await retrying(self._once, effect)
        except Disconnected as exc:
            raise unavailable(effect.what, exc, retrying.statistics) from exc

    async def _once(self, effect: Call) -> Any:
        once = functools.partial(self.client.member.main.try_once, counts_as_heartbeat=effect.counts_as_heartbeat)
        return await self._in_thread(once, effect.call, monotonic())

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Await a call in the thread of calls. A cancellation takes it out of the line, or, when it is under way, waits
        for it, for a while: what it does is then known.
        """
        job = self.client.event_loops.submit("calls", call, *arguments)
        try:
            await self._end_of(job)
        except asyncio.CancelledError:
            if not job.cancel():
                await self._end_of(job, SETTLE_SECONDS)
            raise
        return job.result()

    async def _end_of(self, job: Future[Any], timeout: float | None = None) -> None:
        """Until a thread's job has ended, or for so many seconds. Cancelled, it leaves the job alone."""
        ended = self.loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        job.add_done_callback(lambda _: self.soon(end))
        timer = None if timeout is None else self.loop.call_later(timeout, end)
        try:
            await ended
        finally:
            if timer is not None:
                timer.cancel()

    async def _wait_in_thread(self, effect: WaitFor) -> Any:
        place = Permit()  # which the job keeps, until it ends or is dropped
        if not self._permits.acquire(place):
            return NO_CONNECTION

        def wait(effect: WaitFor, place: Permit = place) -> Any:
            return self.client.execute_effect(effect)

        job = self.client.event_loops.submit("waits", wait, effect)
        try:
            job.add_done_callback(lambda _: self._permits.release(place))
            await self._end_of(job)
        except BaseException:
            job.cancel()
            effect.waiter.event.set()  # the row is gone in an instant, which the wait shall see
            raise
        return job.result()

    async def _wait(self, effect: WaitFor) -> Any:
        client = self.client
        place, session = Permit(), None
        try:
            if not self._permits.acquire(place):
                return NO_CONNECTION
            session = self.idle.pop() if self.idle else None
            if session is None:
                session = await client.engine.connect_async("wait")
            with client.wait_pool.expecting_answer(session, effect.timeout):
                wait = session.upgrade if effect.upgrade else session.wait
                return await wait(effect.ticket, effect.timeout)
        finally:
            self._permits.release(place)
            if session is not None:
                room = len(self.idle) < MAX_IDLE_CONNECTIONS and not self._ended and not client.closed
                if room and session.usable:
                    self.idle.append(session)
                else:
                    session.close()

    # -- the end ------------------------------------------------------------------------------------------------

    async def _keep(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.client.event_loops.drivers.pop(self.loop, None)
            self.end()

    def end(self) -> None:
        """The loop has ended, or the coordinator was closed: nothing of it can be awaited any more."""
        self._ended = True
        idle, self.idle = self.idle, []
        for session in idle:
            session.close()
        for operation in list(self._operations) if self.loop.is_closed() else ():
            operation.rollback_local()
            operation.close()
        for grant in list(self.grants):
            if not grant.state.released and grant.state.why_lost is None:
                log.info("%r was still held when its event loop ended, and is released", grant)
                grant.state.registry.release_later(grant)  # whatever the number of its acquisitions


async def elsewhere(client: DatabaseClient, call: Callable[[], T]) -> T:
    """Await a call that blocks, and is no operation, in a thread of its own."""
    return await asyncio.wrap_future(client.event_loops.submit("others", call))


async def awaited(answer: Any) -> Any:
    """Return the result of a callback or a cursor's method, awaited if it is awaitable."""
    return await answer if inspect.isawaitable(answer) else answer
