"""Runs operations for one event loop on one database, without ever blocking the loop.

Waits for locks use asyncio connections if the database's Python driver has them (psycopg), else a few threads. All
threads and event loops of the process share the main connection: one thread makes the loops' calls on it.

Invariants
    A cancelled task rolls its operation back, which removes its rows, and waits for that. It waits for a call that is
    already running in the thread, too: the rollback's calls come after it.
    Only its own event loop uses a `Driver`, except for `Driver.end` of a closed loop.
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

from sqlsem.client.callers import Caller, new_number
from sqlsem.client.client import DatabaseClient
from sqlsem.client.connection.wait_pool import MAX_IDLE_CONNECTIONS
from sqlsem.client.effects import NO_CONNECTION, Call, Effect, RevertibleOperation, Sleep, WaitFor, WaitForEvent
from sqlsem.client.held.registry import BaseGrant
from sqlsem.engines.base import AsyncSession, Busy, Disconnected
from sqlsem.util import shutdown
from sqlsem.util.permits import Permit
from sqlsem.util.threads import log
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import monotonic

S = TypeVar("S")
T = TypeVar("T")

#: How long a cancelled task waits for a call that is running. (The next heartbeat undoes the effects of a longer one.)
CANCEL_WAIT_SECONDS = 1.0
#: The greatest number of calls that begin in one iteration of the loop.
CALLS_PER_ITERATION = 50

_numbers: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()


def this_task() -> asyncio.Task[Any]:
    """Return the calling task. Raises `ConfigurationError` outside of tasks."""
    task = asyncio.current_task()
    if task is None:
        raise ConfigurationError(
            "A lock of sqlsem.aio is used by a task; run this in one (asyncio.run, create_task)", code="asyncio"
        )
    return task


def this_caller() -> Caller:
    """Return the calling task as a `Caller`."""
    task = this_task()
    number = _numbers.get(task)
    if number is None:
        number = _numbers[task] = new_number()
    return Caller("task", number, task.get_name(), weakref.ref(task))


async def run_generator(effects: Generator[S, Any, T], execute: Callable[[S], Awaitable[Any]]) -> T:
    """Run a generator of effects to its end, and await each effect; errors and cancellations reach the generator."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            effect = effects.throw(failure) if failure is not None else effects.send(outcome)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException:
            shutdown.block_daemon_thread()
            raise
        finally:
            outcome = failure = None  # an exception that its own frame refers to would live on, with all it holds
        try:
            outcome = await execute(effect)
        except GeneratorExit:
            effects.close()
            raise  # this coroutine was dropped: without a loop nothing can be awaited
        except BaseException as exc:
            failure = exc


class Signal(threading.Event):
    """An event that any thread may set, and that one task of a loop awaits with `sleep`."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver
        self._sleeper: asyncio.Future[bool] | None = None

    def set(self) -> None:
        super().set()
        if self._sleeper is not None:  # read after the flag is set; `sleep` reads the flag after it has set `_sleeper`
            self._driver.soon(self._wake)

    def _wake(self, woken: bool = True) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(woken)

    async def sleep(self, seconds: float) -> bool:
        """Sleep until the event is set, and clear it (result True), or for ``seconds`` (result False)."""
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


class _Throttle:
    """Limits how many calls begin in one iteration of the loop: a thousand tasks that begin or are cancelled together
    must not delay other tasks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._remaining = CALLS_PER_ITERATION
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait until the caller's call may begin; calls begin in the order of asking."""
        if self._remaining == CALLS_PER_ITERATION:
            self._loop.call_soon(self._next_iteration)
        if self._remaining > 0:
            self._remaining -= 1
        else:
            future = self._loop.create_future()
            self._waiting.append(future)
            await future

    def _next_iteration(self) -> None:
        self._remaining = CALLS_PER_ITERATION
        if self._waiting:
            self._loop.call_soon(self._next_iteration)
        while self._waiting and self._remaining > 0:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                self._remaining -= 1


class Driver:
    """Runs operations for one event loop on one database."""

    def __init__(self, client: DatabaseClient, loop: asyncio.AbstractEventLoop) -> None:
        self.client = client
        self.loop = loop
        self.grants: weakref.WeakSet[BaseGrant] = weakref.WeakSet()
        self._operations: set[RevertibleOperation[Any]] = set()
        self.idle: list[AsyncSession] = []
        # (A reference of its own: in a forked child, this driver of a parent's loop must not use the child's permits.)
        self._permits = client.event_loops.permits
        self._throttle = _Throttle(loop)
        self._ended = False
        self._end_watcher: AsyncIterator[None] | None = None

    @staticmethod
    def of(client: DatabaseClient) -> Driver:
        """Return the driver of the running loop; make it at the first use."""
        loop = asyncio.get_running_loop()
        driver = client.event_loops.drivers.get(loop)
        if driver is None:
            client.event_loops.discard_closed_loops()
            driver = client.event_loops.drivers[loop] = Driver(client, loop)
        assert isinstance(driver, Driver)
        return driver

    def running(self) -> int | None:
        """Return the number of the task that this thread runs now; None outside of this loop."""
        try:
            task = asyncio.current_task() if asyncio.get_running_loop() is self.loop else None
        except RuntimeError:
            return None
        return None if task is None else _numbers.get(task)

    def require_here(self, grant: BaseGrant) -> None:
        """Raise `ConfigurationError` unless the running loop is this driver's, in which the grant was acquired."""
        if asyncio.get_running_loop() is not self.loop:
            state = ", which is closed, and has released it" if self.loop.is_closed() else ""
            raise ConfigurationError(
                f"The lock on {grant.resource!r} was acquired in another event loop{state}; use each grant in the loop "
                f"that it was acquired in",
                code="asyncio",
            )

    def soon(self, call: Callable[[], object]) -> None:
        """Schedule a call in the loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing there can wait for this call
            self.loop.call_soon_threadsafe(call)

    # -- acquiring ----------------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Wait until an acquisition may begin, and see to it that the end of the loop is noticed."""
        self.client.require_open()
        await self._throttle.enter()
        if self._end_watcher is None:
            # At its shutdown the loop closes its asynchronous generators: the only notice of its end.
            self._end_watcher = self._watch_end()
            await self._end_watcher.__anext__()

    async def run_operation(self, operation: RevertibleOperation[T]) -> T:
        """Run an operation, as `sqlsem.client.effects.run_operation`, and roll it back if it fails or is cancelled."""
        self._operations.add(operation)
        try:
            return await run_generator(operation.run(), self.execute_effect)
        except GeneratorExit:
            operation.rollback_local()  # this coroutine was dropped: nothing can be awaited
            raise
        except BaseException:
            await run_generator(operation.rollback(), self.execute_effect)
            raise
        finally:
            self._operations.discard(operation)
            operation.close()

    # -- effects ------------------------------------------------------------------------------------------------

    async def execute_effect(self, effect: Effect) -> Any:
        """Execute an effect, and return its result."""
        if isinstance(effect, Call):
            return await self._call(effect)
        if isinstance(effect, WaitFor):
            if self.client.engine.supports_async:
                return await self._wait(effect)
            return await self._wait_in_thread(effect)
        if isinstance(effect, Sleep):
            return await effect.waiter.event.sleep(effect.timeout)
        if isinstance(effect, WaitForEvent):
            return await call_in_thread(self.client, effect.event.wait)
        return await self._in_thread(self.client.member.verify)

    async def _call(self, effect: Call) -> Any:
        main = self.client.member.main
        main.require_open()
        await self._throttle.enter()
        try:
            return await self._once(effect)
        except (Disconnected, Busy) as exc:
            log.info("%s has to be tried again: %s", effect.what, exc)
        with main.retries(effect.what, effect.retry_timeout) as retries:
            while True:
                try:
                    return await self._once(effect)
                except (Disconnected, Busy) as exc:
                    pause = retries.pause_or_raise(exc)
                await asyncio.sleep(pause)

    async def _once(self, effect: Call) -> Any:
        once = functools.partial(self.client.member.main.try_once, counts_as_heartbeat=effect.counts_as_heartbeat)
        return await self._in_thread(once, effect.call, monotonic())

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Await a call in the thread for calls. If the task is cancelled, a call that has not begun is dropped. For one
        that is running, the task waits up to `CANCEL_WAIT_SECONDS`, so that the effect of the call is known.
        """
        job = self.client.event_loops.submit("calls", call, *arguments)
        try:
            await self._end_of(job)
        except asyncio.CancelledError:
            if not job.cancel():
                await self._end_of(job, CANCEL_WAIT_SECONDS)
            raise
        return job.result()

    async def _end_of(self, job: Future[Any], timeout: float | None = None) -> None:
        """Wait until a thread's job has ended, or for ``timeout`` seconds. A cancellation does not touch the job."""
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
        permit = Permit()  # the job has it until it ends or is dropped
        if not self._permits.acquire(permit):
            return NO_CONNECTION

        def wait(effect: WaitFor, permit: Permit = permit) -> Any:
            return self.client.execute_effect(effect)

        job = self.client.event_loops.submit("waits", wait, effect)
        try:
            job.add_done_callback(lambda _: self._permits.release(permit))
            await self._end_of(job)
        except BaseException:
            job.cancel()
            effect.waiter.event.set()  # ends the wait in the thread: the rollback will remove the row
            raise
        return job.result()

    async def _wait(self, effect: WaitFor) -> Any:
        client = self.client
        permit, session = Permit(), None
        try:
            if not self._permits.acquire(permit):
                return NO_CONNECTION
            session = self.idle.pop() if self.idle else None
            if session is None:
                session = await client.engine.connect_async("wait")
            with client.wait_pool.expecting_answer(session, effect.timeout):
                wait = session.upgrade if effect.upgrade else session.wait
                return await wait(effect.ticket, effect.timeout)
        finally:
            self._permits.release(permit)
            if session is not None:
                may_keep = len(self.idle) < MAX_IDLE_CONNECTIONS and not self._ended and not client.closed
                if may_keep and session.usable:
                    self.idle.append(session)
                else:
                    session.close()

    # -- the end ------------------------------------------------------------------------------------------------

    async def _watch_end(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.client.event_loops.drivers.pop(self.loop, None)
            self.end()

    def end(self) -> None:
        """Release grants, roll operations back and close sessions. The loop has ended, or the coordinator is closed."""
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
                grant.state.registry.release_later(grant)  # with all of its acquisitions


async def call_in_thread(client: DatabaseClient, call: Callable[[], T]) -> T:
    """Await a blocking call that is no operation, in a thread for such calls."""
    return await asyncio.wrap_future(client.event_loops.submit("others", call))


async def awaited(result: Any) -> Any:
    """Return the result of a callback or of a cursor's method; await it if it is awaitable."""
    return await result if inspect.isawaitable(result) else result
