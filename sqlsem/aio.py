"""The face for asyncio: the same locks, awaited. Tasks take the place of threads.

>>> async with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     await load()

What has to be done is known to `sqlsem.protocol` and `sqlsem.acquisition`; here it is only awaited. Waiting is done on
connections of the driver's own asyncio kind where it has one (psycopg), else in a few threads; calls on the main
session, which all threads and loops of the process share, take one thread. Nothing here blocks the loop.

Invariants
    A task that is cancelled leaves with the step that removes its rows, and waits for that: a call that is under way in
    the thread is not left to itself, and the next one stands behind it.
    ``_Driver`` is touched by its own loop only, but for `_Driver.end` of a loop that is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import tenacity

from sqlsem import locks, protocol
from sqlsem.acquisition import Acquisition, Me
from sqlsem.coordinator import MOST_IDLE_SESSIONS, Coordinator, number_for
from sqlsem.engines.base import AsyncSession, Busy, Disconnected
from sqlsem.errors import ConfigurationError, NotHeld
from sqlsem.grants import BaseGrant
from sqlsem.membership import unavailable
from sqlsem.model import Duration, Request, Ticket, monotonic
from sqlsem.options import GroupOptions, LockOptions, LostCallback, ModuleLockOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Face", "Grant", "Lock", "all_of", "limit", "mutex", "read", "stage", "write"]

log = logging.getLogger("sqlsem")
F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S")
T = TypeVar("T")

#: Seconds for which a cancelled task waits for the call that it was in. (What comes later is done by the next ping.)
SETTLE = 1.0
#: Calls that begin in one round of the loop at the most.
A_ROUND = 50


async def drive(steps: Generator[S, Any, T], perform: Callable[[S], Awaitable[Any]]) -> T:
    """As `protocol.drive`, awaiting: errors and cancellations of any kind reach the generator."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            operation = steps.throw(failure) if failure is not None else steps.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            outcome = failure = None  # an exception that its own frame refers to would live on, with all it holds
        try:
            outcome = await perform(operation)
        except GeneratorExit:
            steps.close()
            raise  # this coroutine was dropped: its loop is gone, and there is nothing to await with
        except BaseException as exc:
            failure = exc


class Grant(BaseGrant):
    """What a task has while inside; see `sqlsem.Grant`. What asks the database is awaited, in the loop of the task."""

    def __init__(
        self,
        driver: _Driver,
        requests: Sequence[Request],
        tickets: Sequence[Ticket],
        me: Me,
        waited: float,
        on_lost: LostCallback | None,
        cancel_on_lost: bool,
    ) -> None:
        super().__init__(driver.coordinator, requests, tickets, me, waited, on_lost)
        self._driver = driver
        self._cancel_on_lost = cancel_on_lost
        self._task: asyncio.Task[Any] | None = None  # whom to cancel
        self._cancelled_before = 0
        self._cancelled = False
        self._event: asyncio.Event | None = None
        driver.grants.add(self)

    @property
    def lost(self) -> bool:
        """Whether the lock is lost. Answered from memory. After this process was paused for long it may be, as long as
        the database has not been heard again; then this is True too. (`check` asks.)
        """
        if self._why_lost is None and not self._released and self._coordinator._member.doubtful():
            self._coordinator._member.urge()
            return True
        return self._why_lost is not None

    @property
    def lost_event(self) -> asyncio.Event:
        """An event that is set when the lock is lost, to be awaited in the loop of the task."""
        if self._event is None:
            self._event = asyncio.Event()
            if self._why_lost is not None:
                self._event.set()
        return self._event

    async def check(self) -> None:
        """Ask the database, now, whether the lock is still held; raises `LockLost` or `NotHeld` when not."""
        self._driver.require_here(self)
        await drive(self._checking(), self._driver.perform)

    async def assert_held(self, cursor: Any) -> None:
        """As `sqlsem.Grant.assert_held`. The cursor may be one whose methods are awaited (of psycopg's
        ``AsyncConnection``, of aiosqlite …) or a plain one, which blocks the loop for as long as its database does.
        """
        self._driver.require_here(self)

        async def awaited(answer: Any) -> Any:
            return await answer if inspect.isawaitable(answer) else answer

        await drive(self._asserting(cursor), awaited)

    async def upgrade(self, timeout: Duration | None = None) -> None:
        """As `sqlsem.Grant.upgrade`. A task that is cancelled meanwhile is a reader as before."""
        self._driver.require_here(self)
        await drive(self._upgrading(timeout), self._driver.perform)

    async def downgrade(self) -> None:
        """As `sqlsem.Grant.downgrade`."""
        self._driver.require_here(self)
        await drive(self._downgrading(), self._driver.perform)

    def _new_event(self) -> threading.Event:
        return _Signal(self._driver)

    async def release(self) -> None:
        """Give the lock back, from any task. Raises `NotHeld` when done before, `LockLost` when it was lost."""
        self._driver.require_here(self)
        self._disarm(None)
        await drive(self._coordinator._give_back(self), self._driver.perform)

    def _lose(self, why: str) -> None:
        super()._lose(why)
        # Read after the reason was set; `lost_event` and `_arm` do it the other way round.
        if self._event is not None:
            self._driver.soon(self._event.set)
        if self._task is not None:
            self._driver.soon(self._cancel)

    def _arm(self) -> None:
        """The task has what it wanted: from here on, a loss cancels it."""
        if self._cancel_on_lost:
            task = asyncio.current_task()
            assert task is not None
            self._cancelled_before = _cancelling(task)
            self._task = task
            if self._why_lost is not None:
                self._driver.soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and not self._cancelled and not self._released:
            self._cancelled = True
            self._task.cancel(f"the lock on {self.resource!r} is lost")

    def _disarm(self, exc: BaseException | None) -> bool:
        """On the way out: no more cancelling. Whether ``exc`` is the cancellation that we asked for, and no other's.
        (What was asked for has struck by now, as the task runs on.)
        """
        task = self._task
        if task is None or self._depth > 1:
            return False
        self._task = None
        if not self._cancelled:
            return False
        if sys.version_info >= (3, 11) and task.uncancel() > self._cancelled_before:
            return False  # somebody else wants it to end as well
        return isinstance(exc, asyncio.CancelledError)


def _cancelling(task: asyncio.Task[Any]) -> int:
    if sys.version_info >= (3, 11):
        return task.cancelling()
    return 0


class Lock:
    """A lock that tasks acquire and release; made by `mutex` and its siblings. Each task has its own grant.

    ``async with`` works on the locks of `sqlsem.mutex` too; this one is for the calls.

    >>> lock = sqlsem.aio.mutex("nightly")  # doctest: +SKIP
    >>> if await lock.acquire(timeout=5):  # doctest: +SKIP
    ...     try:
    ...         await load()
    ...     finally:
    ...         await lock.release()
    """

    def __init__(self, lock: locks.Lock) -> None:
        self._lock = lock
        self._mine: weakref.WeakKeyDictionary[asyncio.Task[Any], list[Grant]] = weakref.WeakKeyDictionary()
        self._loose: dict[Grant, Grant] = {}  # as in `sqlsem.Lock`: what any task of the loop may release

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, (self._lock,)

    async def acquire(self, blocking: bool = True, timeout: Duration | None = -1) -> bool:
        """True when had, False when not; see `sqlsem.Lock.acquire`. A cancelled task leaves no row behind.

        Args:
            blocking: False tries without waiting for others (and then takes no timeout).
            timeout: How long to wait at most; None or -1 for ever. Left out, the lock's own ``timeout`` holds.

        Raises:
            Deadlock: As for `sqlsem.Lock.acquire`.
            Unavailable: The database is out of reach.
        """
        grant = await self._acquire(self._lock._fixed(), self._lock._seconds(blocking, timeout))
        if grant is not None and self._lock._semaphore:
            self._loosen(grant)
        return grant is not None

    async def locked(self) -> bool:
        """See `sqlsem.Lock.locked`."""
        driver = _Driver.of(self._lock._coordinator or locks._default())
        return await drive(driver.coordinator._locked(self._lock._fixed()), driver.perform)

    async def release(self, n: int = 1) -> None:
        """Give back what this task acquired last with this lock. Of a `limit`, a task that has nothing of it gives back
        what another one of its loop acquired (by `acquire` of this object, not by ``async with``); ``n``: so many.

        Raises `NotHeld` when there is nothing to give back, `LockLost` when the lock was lost meanwhile.
        """
        for _ in range(self._lock._check_number(n)):
            await self._release()

    async def _release(self) -> None:
        stack = self._stack()
        while stack and self._is_taken(stack[-1]):
            stack.pop()
        # (Without any, `grant` says what to do.)
        grant = stack[-1] if stack else self._anybodys() or self.grant
        try:
            await grant.release()
        except BaseException:
            if not grant._released:
                grant._abandon()
            raise
        finally:
            if stack and stack[-1] is grant:
                del stack[-1]

    def _loosen(self, grant: Grant) -> None:
        for one in list(self._loose):
            if one._released:  # through the grant itself, or at the end of its loop
                self._loose.pop(one, None)
        grant._is_loose = True
        self._loose[grant] = grant

    def _is_taken(self, grant: Grant) -> bool:
        """Whether another task has released what this one had; if not, it cannot from now on."""
        return grant._is_loose and self._loose.pop(grant, None) is None

    def _anybodys(self) -> Grant | None:
        """What was acquired longest ago by another task of this loop, and is now ours to release."""
        loop = asyncio.get_running_loop()
        for grant in list(self._loose):
            if grant._driver.loop is loop and not grant._released and grant._pid == os.getpid():
                return self._loose.pop(grant, None) or self._anybodys()
        return None

    @property
    def grant(self) -> Grant:
        """This task's grant. Raises `NotHeld` when it has none."""
        stack = self._stack()
        while stack and stack[-1]._is_loose and stack[-1] not in self._loose:  # another one has released it
            stack.pop()
        if not stack:
            raise NotHeld(
                f"{self!r} is not held by this task; it is released by the task that acquired it, or from any task of "
                f"the same event loop through its grant (await grant.release())"
            )
        return stack[-1]

    def _stack(self) -> list[Grant]:
        return self._mine.setdefault(_this_task(), [])

    async def _acquire(self, requests: Sequence[Request], timeout: float | None) -> Grant | None:
        lock = self._lock
        driver = _Driver.of(lock._coordinator or locks._default())
        return await driver.acquire(
            requests, timeout, lock._reentrant, lock._on_lost, lock._cancel_on_lost, self._stack()
        )

    async def _enter(self, requests: Sequence[Request]) -> Grant:
        grant = await self._acquire(requests, self._lock._timeout)
        if grant is None:
            raise self._lock._too_late(requests)
        return grant

    async def __aenter__(self) -> Grant:
        return await self._enter(self._lock._fixed())

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: Any) -> None:
        stack = self._stack()
        # (Only before 3.11 can it not be told whether somebody else cancels too; then the loss is what comes out.)
        lost = stack[-1]._disarm(exc) if stack else False
        try:
            await self._release()
        except Exception as struck:
            # What went wrong inside matters more, unless it came of the loss.
            if exc is None or lost:
                raise struck from exc

    def __call__(self, function: F) -> F:
        """Decorate a coroutine function or method: each call holds the lock.

        Raises `ConfigurationError` for what cannot be guarded this way.
        """
        guarded = self._lock(function)
        if not inspect.iscoroutinefunction(guarded):
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigurationError(
                f"{name} is no coroutine function, and cannot await its lock; decorate it with one of sqlsem.mutex and "
                f"its siblings"
            )
        return guarded

    def __repr__(self) -> str:
        return f"<aio.{repr(self._lock)[1:]}"


# -- making locks ---------------------------------------------------------------------------------------------------


def mutex(name: locks.Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.mutex`; ``cancel_on_lost=True`` also cancels the task when the lock is lost: its block then ends with
    `LockLost`.
    """
    return Lock(locks.mutex(name, **options))


def limit(name: locks.Name, limit: int, *, weight: int = 1, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.limit` and `mutex`."""
    return Lock(locks.limit(name, limit, weight=weight, **options))


def read(name: locks.Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.read` and `mutex`."""
    return Lock(locks.read(name, **options))


def write(name: locks.Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.write` and `mutex`."""
    return Lock(locks.write(name, **options))


def stage(name: locks.Name, order: int, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.stage` and `mutex`."""
    return Lock(locks.stage(name, order, **options))


def all_of(*several: Lock | locks.Lock, **options: Unpack[GroupOptions]) -> Lock:
    """See `sqlsem.all_of` and `mutex`."""
    return Lock(locks.all_of(*(one._lock if isinstance(one, Lock) else one for one in several), **options))


class Face:
    """The same on one coordinator (`sqlsem.Coordinator.aio`)."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def mutex(self, name: locks.Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.mutex`."""
        return Lock(self._coordinator.mutex(name, **options))

    def limit(self, name: locks.Name, limit: int, *, weight: int = 1, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.limit`."""
        return Lock(self._coordinator.limit(name, limit, weight=weight, **options))

    def read(self, name: locks.Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.read`."""
        return Lock(self._coordinator.read(name, **options))

    def write(self, name: locks.Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.write`."""
        return Lock(self._coordinator.write(name, **options))

    def stage(self, name: locks.Name, order: int, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.stage`."""
        return Lock(self._coordinator.stage(name, order, **options))

    def all_of(self, *several: Lock | locks.Lock, **options: Unpack[GroupOptions]) -> Lock:
        """See `sqlsem.all_of`. The locks must be this coordinator's."""
        lock = all_of(*several, **options)
        if lock._lock._coordinator is not self._coordinator:
            raise ConfigurationError(f"{lock!r} is not of {self._coordinator!r}; make its locks there: {several!r}")
        return lock

    async def close(self) -> None:
        """`Coordinator.close`, without blocking the loop."""
        await asyncio.get_running_loop().run_in_executor(None, self._coordinator.close)


# -- one event loop -------------------------------------------------------------------------------------------------

_tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise ConfigurationError("A lock of sqlsem.aio is used by a task; run this in one (asyncio.run, create_task)")
    return task


def _me() -> Me:
    task = _this_task()
    number = _tasks.get(task)
    if number is None:
        number = _tasks[task] = number_for()
    return Me("task", number, task.get_name())


class _Signal(threading.Event):
    """An event that any thread may set, and that one task of a loop sleeps on."""

    def __init__(self, driver: _Driver) -> None:
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
        self._room = A_ROUND
        self._line: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Go through, in the order of asking."""
        if self._room == A_ROUND:
            self._loop.call_soon(self._next_round)
        if self._room > 0:
            self._room -= 1
        else:
            turn = self._loop.create_future()
            self._line.append(turn)
            await turn

    def _next_round(self) -> None:
        self._room = A_ROUND
        if self._line:
            self._loop.call_soon(self._next_round)
        while self._line and self._room > 0:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                self._room -= 1


class _Driver:
    """Carries out operations for one event loop on one database."""

    def __init__(self, coordinator: Coordinator, loop: asyncio.AbstractEventLoop) -> None:
        self.coordinator = coordinator
        self.loop = loop
        self.grants: weakref.WeakSet[Grant] = weakref.WeakSet()
        self.acquisitions: set[Acquisition[Grant]] = set()
        self.idle: list[AsyncSession] = []
        # (Kept here, too: after a fork what the child finds of its parent's loop must not touch the child's own.)
        self._places = coordinator._async_places
        self._turnstile = _Turnstile(loop)
        self._ended = False
        self._keeper: AsyncIterator[None] | None = None

    @staticmethod
    def of(coordinator: Coordinator) -> _Driver:
        """The one of the running loop."""
        loop = asyncio.get_running_loop()
        drivers: dict[asyncio.AbstractEventLoop, _Driver] = coordinator._drivers
        driver = drivers.get(loop)
        if driver is None:
            coordinator.tidy()
            driver = drivers[loop] = _Driver(coordinator, loop)
        return driver

    def require_here(self, grant: Grant) -> None:
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

    async def acquire(
        self,
        requests: Sequence[Request],
        timeout: float | None,
        reentrant: bool,
        on_lost: LostCallback | None,
        cancel_on_lost: bool,
        keep: list[Grant],
    ) -> Grant | None:
        """As `Coordinator.acquire`."""
        coordinator = self.coordinator
        coordinator._require_open()
        await self._turnstile.enter()
        me = _me()
        if self._keeper is None:
            # Finalised by the loop when it shuts down: the one moment that it tells anybody about.
            self._keeper = self._keep()
            await self._keeper.__anext__()
        shared: Grant | None = coordinator._share(requests, me, reentrant, keep)
        if shared is not None or coordinator._in_its_own_way(requests, me, reentrant, timeout):
            return shared

        def grant(requests: Sequence[Request], tickets: Sequence[Ticket], waited: float) -> Grant:
            return Grant(self, requests, tickets, me, waited, on_lost, cancel_on_lost)

        acquisition = Acquisition(coordinator, requests, timeout, me, grant, keep, lambda: _Signal(self))
        self.acquisitions.add(acquisition)
        try:
            had = await drive(acquisition.run(), self.perform)
        except GeneratorExit:
            acquisition.drop()  # as the coroutine itself was dropped: nobody awaits any more
            raise
        except BaseException:
            await drive(acquisition.withdraw(), self.perform)
            raise
        finally:
            self.acquisitions.discard(acquisition)
            acquisition.done()
        if had is not None:
            had._arm()
        return had

    # -- operations ---------------------------------------------------------------------------------------------

    async def perform(self, operation: protocol.Operation) -> Any:
        """Carry out an operation, awaiting."""
        if isinstance(operation, protocol.Call):
            return await self._call(operation)
        if isinstance(operation, protocol.WaitFor):
            if self.coordinator.engine.awaits:
                return await self._wait(operation)
            return await self._wait_in_thread(operation)
        if isinstance(operation, protocol.Sleep):
            return await operation.waiter.event.sleep(operation.timeout)
        return await self._in_thread(self.coordinator._member.doubt)

    async def _call(self, operation: protocol.Call) -> Any:
        member = self.coordinator._member
        member.require_open()
        await self._turnstile.enter()
        try:
            return await self._once(operation)
        except (Disconnected, Busy) as exc:
            log.info("%s has to be tried again: %s", operation.what, exc)
        retrying = tenacity.AsyncRetrying(sleep=asyncio.sleep, **member.policy(operation.what, operation.budget))
        try:
            return await retrying(self._once, operation)
        except Disconnected as exc:
            raise unavailable(operation.what, exc, retrying.statistics) from exc

    async def _once(self, operation: protocol.Call) -> Any:
        once = functools.partial(self.coordinator._member.once, sign=operation.sign)
        return await self._in_thread(once, operation.call, monotonic())

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Await a call in the thread of calls. A cancellation takes it out of the line, or, when it is under way, waits
        for it, for a while: what it does is then known.
        """
        job = self.coordinator._submit("calls", call, *arguments)
        try:
            await self._end_of(job)
        except asyncio.CancelledError:
            if not job.cancel():
                await self._end_of(job, SETTLE)
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

    async def _wait_in_thread(self, operation: protocol.WaitFor) -> Any:
        if not self._places.acquire(blocking=False):
            return protocol.NO_ROOM
        try:
            job = self.coordinator._submit("waits", self.coordinator._perform, operation)
        except BaseException:
            self._places.release()
            raise
        job.add_done_callback(lambda _: self._places.release())
        try:
            await self._end_of(job)
        except BaseException:
            job.cancel()
            operation.waiter.event.set()  # the row is gone in an instant, which the wait shall see
            raise
        return job.result()

    async def _wait(self, operation: protocol.WaitFor) -> Any:
        coordinator = self.coordinator
        if not self._places.acquire(blocking=False):
            return protocol.NO_ROOM
        session = self.idle.pop() if self.idle else None
        try:
            if session is None:
                session = await coordinator.engine.connect_async("wait")
            with coordinator._waits(session, operation.timeout):
                wait = session.upgrade if operation.upgrade else session.wait
                return await wait(operation.ticket, operation.timeout)
        finally:
            self._places.release()
            if session is not None:
                room = len(self.idle) < MOST_IDLE_SESSIONS and not self._ended and not coordinator.closed
                if room and session.usable:
                    self.idle.append(session)
                else:
                    session.close()

    # -- the end ------------------------------------------------------------------------------------------------

    async def _keep(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.coordinator._drivers.pop(self.loop, None)
            self.end()

    def end(self) -> None:
        """The loop has ended, or the coordinator was closed: nothing of it can be awaited any more."""
        self._ended = True
        idle, self.idle = self.idle, []
        for session in idle:
            session.close()
        for acquisition in list(self.acquisitions) if self.loop.is_closed() else ():
            acquisition.drop()
            acquisition.done()
        for grant in list(self.grants):
            if not grant._released and grant._why_lost is None:
                log.warning("%r was still held when its event loop ended, and is given back", grant)
                self.coordinator._abandon(grant)
