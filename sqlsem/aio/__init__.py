"""The face for asyncio: the same locks, awaited. Tasks take the place of threads.

>>> async with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     await load()

The operations are those of `sqlsem.core`; `sqlsem.aio.driver` awaits their effects.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem.aio.driver import Driver, Signal, elsewhere, run_generator, this_caller, this_task
from sqlsem.aio.grants import Grant, release_grant
from sqlsem.aio.leading import Callback, Leader, Term
from sqlsem.aio.periodic import Once, Run
from sqlsem.aio.rates import Rate, RateGrant
from sqlsem.core import defaults, terms
from sqlsem.core.acquire import locked
from sqlsem.core.client import DatabaseClient
from sqlsem.core.defaults import Coordinated
from sqlsem.core.effects import Operation
from sqlsem.core.grant_registry import GrantState, HeldGrant, LostCallback, ReleaseToken, release_later
from sqlsem.core.handover import Adoption
from sqlsem.core.held_grants import HeldGrants, UnownedGrants
from sqlsem.core.leading import LeaderElection
from sqlsem.core.options import (
    GroupOptions,
    LockOptions,
    ModuleLockOptions,
    ModuleRateOptions,
    RateOptions,
    shows_options,
)
from sqlsem.core.periodic import Period, Periodic
from sqlsem.core.permits import Permit
from sqlsem.core.priority_acquisition import acquisition_class
from sqlsem.core.rate_acquisition import RateAcquisition, RateGroupAcquisition, split
from sqlsem.core.terms import Ask, HasTerms, Name, Terms
from sqlsem.errors import ConfigurationError, NotHeld
from sqlsem.model import Duration
from sqlsem.model_rates import RateRequest, Windows

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "AsyncLocks",
    "Grant",
    "Leader",
    "Lock",
    "Once",
    "Rate",
    "RateGrant",
    "Run",
    "Term",
    "adopt",
    "all_of",
    "leader",
    "limit",
    "mutex",
    "once",
    "rate",
    "read",
    "stage",
    "write",
]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


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
        self._mine: weakref.WeakKeyDictionary[asyncio.Task[Any], HeldGrants[Grant]] = weakref.WeakKeyDictionary()
        self._loose: UnownedGrants[Grant] = UnownedGrants()

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
        driver = Driver.of(self.terms.client)
        return await run_generator(locked(driver.client, split(self.terms.requests)[0]), driver.execute_effect)

    async def release(self, n: int = 1) -> None:
        """Give back what this task acquired last with this lock. Of a `limit`, a task that has nothing of it gives back
        what another one of its loop acquired (by `acquire` of this object, not by ``async with``); ``n``: so many.

        Raises `NotHeld` when there is nothing to give back, `LockLost` when the lock was lost meanwhile.
        """
        for _ in range(self.terms.check_number(n)):
            await self._release()

    async def _release(self) -> None:
        given_back = False
        while not given_back:  # but by another task
            last = self._last()
            if last is not None:
                given_back = await self._end(last.grant, last.token)
            else:
                # (Without any, `grant` says what to do.)
                given_back = await self._end(self._loose.oldest(self._may_release) or self.grant, ReleaseToken())

    async def _end(self, grant: Grant, by: Permit) -> bool:
        """Give it back, unless another task does; whatever strikes, it is on our stack no more."""
        try:
            mine = self._loose.take(grant)
            if mine:
                await release_grant(grant, by)
            return mine
        except BaseException:
            release_later(grant, by)
            raise
        finally:
            stack = self._stack()
            if stack and stack[-1].token is by:
                del stack[-1]

    @staticmethod
    def _may_release(grant: Grant) -> bool:
        """True if the grant belongs to this event loop."""
        return grant.driver.loop is asyncio.get_running_loop()

    @property
    def grant(self) -> Grant:
        """This task's grant. Raises `NotHeld` when it has none."""
        last = self._last()
        if last is None:
            raise NotHeld(
                f"{self!r} is not held by this task; it is released by the task that acquired it, or from any task of "
                f"the same event loop through its grant (await grant.release())"
            )
        return last.grant

    def _last(self) -> HeldGrant[Grant] | None:
        """Return the latest acquisition of this task that is not released."""
        return self._loose.last(self._stack())

    def _stack(self) -> HeldGrants[Grant]:
        task = this_task()
        stack = self._mine.get(task)
        if stack is None:
            stack = self._mine[task] = HeldGrants()
        return stack

    async def _acquire(self, requests: Sequence[Ask], timeout: float | None) -> Grant | None:
        terms, keep = self.terms, self._stack()
        driver = Driver.of(terms.client)
        await driver.enter()

        def grant(state: GrantState, waited: float) -> Grant:
            return Grant(driver, state, waited, terms.cancel_on_lost)

        client, caller, (locks, rates) = driver.client, this_caller(), split(requests)

        def signal() -> Signal:
            return Signal(driver)

        def taking(rate: RateRequest, left: float | None) -> RateAcquisition[RateGrant]:
            return RateAcquisition(client, rate, left, caller, RateGrant.made_by(driver), signal)

        acquisition = acquisition_class(locks)(client, terms, locks, timeout, caller, grant, keep, signal)
        operation: Operation[Grant | None] = (
            RateGroupAcquisition(acquisition, taking, rates, timeout) if rates else acquisition
        )
        had = await driver.run_operation(operation)
        if had is not None:
            had.arm()
        return had

    async def _enter(self, requests: Sequence[Ask]) -> Grant:
        stack = self._stack()
        depth = len(stack)
        grant = await self._acquire(requests, self.terms.timeout)
        if grant is None:
            driver = Driver.of(self.terms.client)
            raise await run_generator(self.terms.too_late(requests, this_caller()), driver.execute_effect)
        stack.enter_block(depth)
        return grant

    async def __aenter__(self) -> Grant:
        return await self._enter(self.terms.requests)

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: Any) -> None:
        last, stack, lost = self._last(), self._stack(), False
        try:
            if stack.leave_block():
                return
            # (Only before 3.11 can it not be told whether somebody else cancels too; then the loss is what comes out.)
            lost = last is not None and last.grant.disarm(exc)
            if last is not None and last.grant.state.ended_early:
                stack.pop()  # by another task, or handed over
            else:
                await self._release()
        except Exception as struck:
            # An error of the body takes precedence, unless the loss caused it.
            if exc is None or lost:
                raise struck from exc

    def __call__(self, function: F) -> F:
        """Decorate a coroutine function or method: each call holds the lock.

        Raises `ConfigurationError` for what cannot be guarded this way.
        """
        from sqlsem.core import decorated  # imported late: wrapt takes longer to load than sqlsem

        if not decorated.is_coroutine(function):
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigurationError(
                f"{name} is no coroutine function, and cannot await its lock; decorate it with one of sqlsem.mutex and "
                f"its siblings"
            )
        return decorated.hold_awaiting(function, self.terms, self._enter, self.__aexit__)

    def __repr__(self) -> str:
        return f"<aio.Lock {self.terms}>"


async def adopt(
    token: str,
    *,
    on_lost: LostCallback | None = None,
    cancel_on_lost: bool = False,
    coordinator: Coordinated | None = None,
) -> Grant:
    """As `sqlsem.adopt`. ``cancel_on_lost=True`` also cancels this task when the lock is lost.

    >>> async with await sqlsem.aio.adopt(token) as grant:  # doctest: +SKIP
    ...     await load(fence=grant.fence)
    """
    client = defaults.client_of(coordinator)
    return await _adopt(client, token, on_lost, cancel_on_lost)


async def _adopt(client: DatabaseClient, token: str, on_lost: LostCallback | None, cancel_on_lost: bool) -> Grant:
    driver = Driver.of(client)
    await driver.enter()

    def grant(state: GrantState, waited: float) -> Grant:
        return Grant(driver, state, waited, cancel_on_lost)

    had = await driver.run_operation(Adoption(client, token, on_lost, this_caller(), grant))
    had.arm()
    return had


# -- making locks ---------------------------------------------------------------------------------------------------


@shows_options(ModuleLockOptions)
def mutex(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.mutex`; ``cancel_on_lost=True`` also cancels the task when the lock is lost: its block then ends with
    `LockLost`.
    """
    return Lock(terms.mutex(name, options))


@shows_options(ModuleLockOptions)
def limit(name: Name, limit: int | None = None, *, weight: int = 1, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.limit` and `mutex`."""
    return Lock(terms.limit(name, limit, weight, options))


@shows_options(ModuleLockOptions)
def read(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.read` and `mutex`."""
    return Lock(terms.read(name, options))


@shows_options(ModuleLockOptions)
def write(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.write` and `mutex`."""
    return Lock(terms.write(name, options))


@shows_options(ModuleLockOptions)
def stage(name: Name, order: int, **options: Unpack[ModuleLockOptions]) -> Lock:
    """See `sqlsem.stage` and `mutex`."""
    return Lock(terms.stage(name, order, options))


@shows_options(ModuleRateOptions)
def rate(
    name: Name,
    limit: int | Windows | None = None,
    per: Duration | None = None,
    *,
    cost: int = 1,
    burst: int | None = None,
    **options: Unpack[ModuleRateOptions],
) -> Rate:
    """See `sqlsem.rate`."""
    return Rate(terms.rate(name, limit, per, cost, burst, options))


@shows_options(GroupOptions)
def all_of(*several: HasTerms, **options: Unpack[GroupOptions]) -> Lock:
    """See `sqlsem.all_of` and `mutex`."""
    return Lock(terms.all_of(several, options))


def leader(
    name: str,
    info: str | None = None,
    *,
    on_started: Callback | None = None,
    on_stopped: Callback | None = None,
    timeout: Duration | None = None,
    handle_sigterm: bool = True,
    cancel_on_lost: bool = True,
    coordinator: Coordinated | None = None,
) -> Leader:
    """See `sqlsem.leader`. The callbacks may be coroutine functions, and are called in the loop; after a loss, too, so
    nothing may block that. ``cancel_on_lost``: cancel the task when the term is lost; its block then ends with
    `LockLost`. On SIGTERM, where the program has no handler, the task is cancelled, and its block ends with
    ``SystemExit(143)``.

    >>> async with sqlsem.aio.leader("scheduler") as term:  # doctest: +SKIP
    ...     await schedule(term.fence)
    """
    election = LeaderElection(name, info, timeout, None, coordinator)
    return Leader(election, Lock, on_started, on_stopped, handle_sigterm, cancel_on_lost)


def once(
    name: str,
    per: Duration,
    *,
    offset: Duration = 0,
    note: str | None = None,
    timeout: Duration | None = None,
    on_lost: LostCallback | None = None,
    cancel_on_lost: bool = False,
    coordinator: Coordinated | None = None,
) -> Once:
    """See `sqlsem.once`, and `mutex` for ``cancel_on_lost``.

    >>> async with sqlsem.aio.once("report", per="1d") as run:  # doctest: +SKIP
    ...     if run:
    ...         await send_report()
    """
    period = Period(name, per, offset)
    return Once(Periodic(period, note, timeout, on_lost, None, coordinator, cancel_on_lost), Lock)


class AsyncLocks:
    """The same on one coordinator (`sqlsem.Coordinator.aio`)."""

    def __init__(self, client: DatabaseClient) -> None:
        self._client = client

    @shows_options(LockOptions)
    def mutex(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.mutex`."""
        return Lock(terms.mutex(name, options, self._client))

    @shows_options(LockOptions)
    def limit(self, name: Name, limit: int | None = None, *, weight: int = 1, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.limit`."""
        return Lock(terms.limit(name, limit, weight, options, self._client))

    @shows_options(LockOptions)
    def read(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.read`."""
        return Lock(terms.read(name, options, self._client))

    @shows_options(LockOptions)
    def write(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.write`."""
        return Lock(terms.write(name, options, self._client))

    @shows_options(LockOptions)
    def stage(self, name: Name, order: int, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.stage`."""
        return Lock(terms.stage(name, order, options, self._client))

    @shows_options(RateOptions)
    def rate(
        self,
        name: Name,
        limit: int | Windows | None = None,
        per: Duration | None = None,
        *,
        cost: int = 1,
        burst: int | None = None,
        **options: Unpack[RateOptions],
    ) -> Rate:
        """See `sqlsem.rate`."""
        return Rate(terms.rate(name, limit, per, cost, burst, options, self._client))

    @shows_options(GroupOptions)
    def all_of(self, *several: HasTerms, **options: Unpack[GroupOptions]) -> Lock:
        """See `sqlsem.all_of`. The locks must be this coordinator's."""
        return Lock(terms.all_of(several, options, self._client))

    def leader(
        self,
        name: str,
        info: str | None = None,
        *,
        on_started: Callback | None = None,
        on_stopped: Callback | None = None,
        timeout: Duration | None = None,
        handle_sigterm: bool = True,
        cancel_on_lost: bool = True,
    ) -> Leader:
        """See `sqlsem.aio.leader`."""
        election = LeaderElection(name, info, timeout, self._client)
        return Leader(election, Lock, on_started, on_stopped, handle_sigterm, cancel_on_lost)

    def once(
        self,
        name: str,
        per: Duration,
        *,
        offset: Duration = 0,
        note: str | None = None,
        timeout: Duration | None = None,
        on_lost: LostCallback | None = None,
        cancel_on_lost: bool = False,
    ) -> Once:
        """See `sqlsem.aio.once`."""
        period = Period(name, per, offset)
        return Once(Periodic(period, note, timeout, on_lost, self._client, None, cancel_on_lost), Lock)

    async def close(self) -> None:
        """`Coordinator.close`, without blocking the loop."""
        if not self._client.closed:
            await elsewhere(self._client, partial(self._client.close, this_caller().number))

    async def adopt(self, token: str, *, on_lost: LostCallback | None = None, cancel_on_lost: bool = False) -> Grant:
        """See `sqlsem.aio.adopt`."""
        return await _adopt(self._client, token, on_lost, cancel_on_lost)
