"""The face for asyncio: the same locks, awaited. Tasks take the place of threads.

>>> async with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     await load()

What has to be done is known to `sqlsem.core`; here it is only awaited, by `sqlsem.aio.driver`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem.aio.driver import Driver, Signal, drive, this_caller, this_task
from sqlsem.core import terms
from sqlsem.core.acquire import Acquisition, locked
from sqlsem.core.convert import Upgrade, downgrade
from sqlsem.core.grants import asserting, checking
from sqlsem.core.holdings import BaseGrant, Holding, abandon
from sqlsem.core.loose import LooseGrants
from sqlsem.core.options import GroupOptions, LockOptions, ModuleLockOptions
from sqlsem.core.process import Process
from sqlsem.core.steps import Operations
from sqlsem.core.terms import HasTerms, Name, Terms
from sqlsem.errors import ConfigurationError, NotHeld
from sqlsem.model import Duration, Request

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncLocks", "Grant", "Lock", "all_of", "limit", "mutex", "read", "stage", "write"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Grant(BaseGrant):
    """What a task has while inside; see `sqlsem.Grant`. What asks the database is awaited, in the loop of the task."""

    def __init__(self, driver: Driver, holding: Holding, waited: float, cancel_on_lost: bool) -> None:
        super().__init__(holding, waited)
        self._driver = driver
        self._cancel_on_lost = cancel_on_lost
        self._task: asyncio.Task[Any] | None = None  # whom to cancel
        self._cancelled_before = 0
        self._cancelled = False
        self._event: asyncio.Event | None = None
        self._wanted: asyncio.Event | None = None
        driver.grants.add(self)

    @property
    def lost(self) -> bool:
        """Whether the lock is lost. Answered from memory. After this process was paused for long it may be, as long as
        the database has not been heard again; then this is True too. (`check` asks.)
        """
        holding, member = self.holding, self._driver.process.member
        if holding.why_lost is None and not holding.released and member.doubtful():
            member.urge()
            return True
        return holding.why_lost is not None

    @property
    def lost_event(self) -> asyncio.Event:
        """An event that is set when the lock is lost, to be awaited in the loop of the task."""
        if self._event is None:
            self._event = asyncio.Event()
            self.holding.when_lost.append(functools.partial(self._driver.soon, self._event.set))
            if self.holding.why_lost is not None:
                self._event.set()
        return self._event

    @property
    def wanted(self) -> asyncio.Event:
        """As `sqlsem.Grant.wanted`, to be awaited in the loop of the task."""
        if self._wanted is None:
            self._wanted = asyncio.Event()
            soon = functools.partial(self._driver.soon, self._wanted.set)
            self._driver.process.wanted.add(self.holding, self._wanted.is_set, soon)
        return self._wanted

    async def check(self) -> None:
        """Ask the database, now, whether the lock is still held; raises `LockLost` or `NotHeld` when not."""
        self._driver.require_here(self)
        await self._drive(checking(self._driver.process, self.holding))

    async def assert_held(self, cursor: Any) -> None:
        """As `sqlsem.Grant.assert_held`. The cursor may be one whose methods are awaited (of psycopg's
        ``AsyncConnection``, of aiosqlite …) or a plain one, which blocks the loop for as long as its database does.
        """
        self._driver.require_here(self)

        async def awaited(answer: Any) -> Any:
            return await answer if inspect.isawaitable(answer) else answer

        await drive(asserting(self._driver.process, self.holding, cursor), awaited)

    async def upgrade(self, timeout: Duration | None = None) -> None:
        """As `sqlsem.Grant.upgrade`. A task that is cancelled meanwhile is a reader as before."""
        self._driver.require_here(self)
        driver = self._driver
        await driver.carry_out(Upgrade(driver.process, self.holding, timeout, Signal(driver)))

    async def downgrade(self) -> None:
        """As `sqlsem.Grant.downgrade`."""
        self._driver.require_here(self)
        await self._drive(downgrade(self._driver.process, self.holding))

    async def release(self) -> None:
        """Give the lock back, from any task. Raises `NotHeld` when done before, `LockLost` when it was lost."""
        self._driver.require_here(self)
        self._disarm(None)
        await self._drive(self._driver.process.holdings.give_back(self))

    async def _drive(self, steps: Operations[T]) -> T:
        return await drive(steps, self._driver.perform)

    def _arm(self) -> None:
        """The task has what it wanted: from here on, a loss cancels it."""
        if self._cancel_on_lost and self._task is None:
            self._task = asyncio.current_task()
            assert self._task is not None
            self._cancelled_before = _cancelling(self._task)
            self.holding.when_lost.append(self._cancel_soon)
            if self.holding.why_lost is not None:
                self._cancel_soon()

    def _cancel_soon(self) -> None:
        self._driver.soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and not self._cancelled and not self.holding.released:
            self._cancelled = True
            self._task.cancel(f"the lock on {self.resource!r} is lost")

    def _disarm(self, exc: BaseException | None) -> bool:
        """On the way out: no more cancelling. Whether ``exc`` is the cancellation that we asked for, and no other's.
        (What was asked for has struck by now, as the task runs on.)
        """
        task = self._task
        if task is None or self.holding.depth > 1:
            return False
        self._task = None
        self.holding.when_lost.remove(self._cancel_soon)
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

    def __init__(self, terms: Terms) -> None:
        #: For the package; programs have no use for it.
        self.terms = terms
        self._mine: weakref.WeakKeyDictionary[asyncio.Task[Any], list[Grant]] = weakref.WeakKeyDictionary()
        self._loose: LooseGrants[Grant] = LooseGrants()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, (self.terms,)

    async def acquire(self, blocking: bool = True, timeout: Duration | None = -1) -> bool:
        """True when had, False when not; see `sqlsem.Lock.acquire`. A cancelled task leaves no row behind.

        Args:
            blocking: False tries without waiting for others (and then takes no timeout).
            timeout: How long to wait at most; None or -1 for ever. Left out, the lock's own ``timeout`` holds.

        Raises:
            Deadlock: As for `sqlsem.Lock.acquire`.
            Unavailable: The database is out of reach.
        """
        grant = await self._acquire(self.terms.requests, self.terms.seconds(blocking, timeout))
        if grant is not None and self.terms.semaphore:
            self._loose.add(grant)
        return grant is not None

    async def locked(self) -> bool:
        """See `sqlsem.Lock.locked`."""
        driver = Driver.of(self.terms.process)
        return await drive(locked(driver.process, self.terms.requests), driver.perform)

    async def release(self, n: int = 1) -> None:
        """Give back what this task acquired last with this lock. Of a `limit`, a task that has nothing of it gives back
        what another one of its loop acquired (by `acquire` of this object, not by ``async with``); ``n``: so many.

        Raises `NotHeld` when there is nothing to give back, `LockLost` when the lock was lost meanwhile.
        """
        for _ in range(self.terms.check_number(n)):
            await self._release()

    async def _release(self) -> None:
        stack = self._stack()
        while stack and not self._loose.take(stack[-1]):
            stack.pop()
        # (Without any, `grant` says what to do.)
        grant = stack[-1] if stack else self._loose.take_oldest(self._may_release) or self.grant
        try:
            await grant.release()
        except BaseException:
            if not grant.holding.released:
                abandon(grant)
            raise
        finally:
            if stack and stack[-1] is grant:
                del stack[-1]

    @staticmethod
    def _may_release(grant: Grant) -> bool:
        """Of what other tasks acquired: what is of this loop."""
        return grant._driver.loop is asyncio.get_running_loop()

    @property
    def grant(self) -> Grant:
        """This task's grant. Raises `NotHeld` when it has none."""
        stack = self._stack()
        while stack and self._loose.is_taken(stack[-1]):
            stack.pop()
        if not stack:
            raise NotHeld(
                f"{self!r} is not held by this task; it is released by the task that acquired it, or from any task of "
                f"the same event loop through its grant (await grant.release())"
            )
        return stack[-1]

    def _stack(self) -> list[Grant]:
        return self._mine.setdefault(this_task(), [])

    async def _acquire(self, requests: Sequence[Request], timeout: float | None) -> Grant | None:
        terms, keep = self.terms, self._stack()
        driver = Driver.of(terms.process)
        await driver.enter()

        def grant(holding: Holding, waited: float) -> Grant:
            return Grant(driver, holding, waited, terms.cancel_on_lost)

        had = await driver.carry_out(
            Acquisition(driver.process, terms, requests, timeout, this_caller(), grant, keep, lambda: Signal(driver))
        )
        if had is not None:
            had._arm()
        return had

    async def _enter(self, requests: Sequence[Request]) -> Grant:
        grant = await self._acquire(requests, self.terms.timeout)
        if grant is None:
            raise self.terms.too_late(requests)
        return grant

    async def __aenter__(self) -> Grant:
        return await self._enter(self.terms.requests)

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
        from sqlsem.core import decorated  # wrapt takes longer to load than all of ours

        if not decorated.is_coroutine(function):
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigurationError(
                f"{name} is no coroutine function, and cannot await its lock; decorate it with one of sqlsem.mutex and "
                f"its siblings"
            )
        return decorated.hold_awaiting(function, self.terms, self._enter, self.__aexit__)

    def __repr__(self) -> str:
        return f"<aio.Lock {self.terms}>"


# -- making locks ---------------------------------------------------------------------------------------------------


def mutex(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.mutex`; ``cancel_on_lost=True`` also cancels the task when the lock is lost: its block then ends with
    `LockLost`.
    """
    return Lock(terms.mutex(name, options))


def limit(name: Name, limit: int, *, weight: int = 1, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.limit` and `mutex`."""
    return Lock(terms.limit(name, limit, weight, options))


def read(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.read` and `mutex`."""
    return Lock(terms.read(name, options))


def write(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.write` and `mutex`."""
    return Lock(terms.write(name, options))


def stage(name: Name, order: int, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.stage` and `mutex`."""
    return Lock(terms.stage(name, order, options))


def all_of(*several: HasTerms, **options: Unpack[GroupOptions]) -> Lock:
    """See `sqlsem.all_of` and `mutex`."""
    return Lock(terms.all_of(several, options))


class AsyncLocks:
    """The same on one coordinator (`sqlsem.Coordinator.aio`)."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def mutex(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.mutex`."""
        return Lock(terms.mutex(name, options, self._process))

    def limit(self, name: Name, limit: int, *, weight: int = 1, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.limit`."""
        return Lock(terms.limit(name, limit, weight, options, self._process))

    def read(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.read`."""
        return Lock(terms.read(name, options, self._process))

    def write(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.write`."""
        return Lock(terms.write(name, options, self._process))

    def stage(self, name: Name, order: int, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.stage`."""
        return Lock(terms.stage(name, order, options, self._process))

    def all_of(self, *several: HasTerms, **options: Unpack[GroupOptions]) -> Lock:
        """See `sqlsem.all_of`. The locks must be this coordinator's."""
        return Lock(terms.all_of(several, options, self._process))

    async def close(self) -> None:
        """`Coordinator.close`, without blocking the loop."""
        await asyncio.get_running_loop().run_in_executor(None, self._process.close)
