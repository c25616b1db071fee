"""The API for asyncio: the same locks as in `sqlsem`, with calls that are awaited. Each task has its own grants.

>>> async with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     await load()

No call blocks the event loop. The operations are those of `sqlsem.client`; `sqlsem.aio.driver` awaits their effects.

driver    runs operations on an event loop
grants    the grants of tasks
leading   leaders
periodic  jobs that run once per period
rates     rates
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem.aio.driver import Driver, Signal, call_in_thread, run_generator, this_caller, this_task
from sqlsem.aio.grants import Grant, release_grant
from sqlsem.aio.leader import Callback, Leader, Term
from sqlsem.aio.once import Once, Run
from sqlsem.aio.rates import Rate, RateGrant
from sqlsem.client import defaults
from sqlsem.client.client import DatabaseClient
from sqlsem.client.defaults import Coordinated
from sqlsem.client.effects import RevertibleOperation
from sqlsem.client.held.lock_grants import HeldGrants, UnownedGrants
from sqlsem.client.held.registry import GrantState, HeldGrant, LostCallback, ReleaseToken, release_later
from sqlsem.client.leader import LeaderElection
from sqlsem.client.once import Period, Periodic
from sqlsem.client.operations import terms
from sqlsem.client.operations.acquire import locked
from sqlsem.client.operations.acquire_by_priority import acquisition_class
from sqlsem.client.operations.acquire_rate import RateAcquisition, RateGroupAcquisition, split
from sqlsem.client.operations.handover import Adoption
from sqlsem.client.operations.terms import AnyRequest, HasTerms, Name, Terms
from sqlsem.client.options import (
    GroupOptions,
    LockOptions,
    ModuleLockOptions,
    ModuleRateOptions,
    RateOptions,
    shows_options,
)
from sqlsem.util.permits import Permit
from sqlsem.values.errors import ConfigurationError, NotHeld
from sqlsem.values.locks import Duration
from sqlsem.values.rates import RateRequest, Windows

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
    """A lock that tasks acquire and release. Made by `mutex`, `limit`, `read`, `write`, `stage` and `all_of` of this
    module. Each task has its own grant.

    ``async with`` works with `sqlsem.mutex` and its like, too. `acquire`, `release` and `locked` are awaited only here.

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
        self._unowned: UnownedGrants[Grant] = UnownedGrants()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, (self.terms,)

    async def acquire(self, blocking: bool = True, timeout: Duration | None = -1) -> bool:
        """Acquire the lock, as `sqlsem.Lock.acquire`. Return True if it was granted, False if it was not in time. If
        the task is cancelled meanwhile, its request is withdrawn.

        Args:
            blocking: False tries without waiting (and accepts no timeout).
            timeout: How long to wait at most; None or -1 for ever. Left out, the lock's own ``timeout`` applies.

        Raises:
            Deadlock: As for `sqlsem.Lock.acquire`.
            Unavailable: The database is out of reach.
        """
        grant = await self._acquire(self.terms.requests, self.terms.seconds(blocking, timeout))
        if grant is not None and self.terms.semaphore:
            self._unowned.add(grant)
        return grant is not None

    async def locked(self) -> bool:
        """See `sqlsem.Lock.locked`."""
        driver = Driver.of(self.terms.client)
        return await run_generator(locked(driver.client, split(self.terms.requests)[0]), driver.execute_effect)

    async def release(self, n: int = 1) -> None:
        """Release the latest acquisition of this task with this lock. With a `limit`, a task that holds none releases
        one of another task of its event loop (acquired by `acquire` of this object, not by ``async with``). ``n``: the
        number of acquisitions to release, one after the other.

        Raises `NotHeld` if there is nothing to release, `LockLost` if the lock was lost meanwhile.
        """
        for _ in range(self.terms.check_number(n)):
            await self._release()

    async def _release(self) -> None:
        released = False
        while not released:  # another task may have released that grant
            last = self._last()
            if last is not None:
                released = await self._end(last.grant, last.token)
            else:
                # (If there is none, `grant` raises an error that says what to do.)
                released = await self._end(self._unowned.oldest(self._may_release) or self.grant, ReleaseToken())

    async def _end(self, grant: Grant, by: Permit) -> bool:
        """Release a grant, unless another task does. After any interrupt, too, it is not on this task's stack."""
        try:
            owns_release = self._unowned.take(grant)
            if owns_release:
                await release_grant(grant, by)
            return owns_release
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
        """This task's grant. Raises `NotHeld` if it has none."""
        last = self._last()
        if last is None:
            raise NotHeld(
                f"{self!r} is not held by this task; it is released by the task that acquired it, or from any task of "
                f"the same event loop through its grant (await grant.release())"
            )
        return last.grant

    def _last(self) -> HeldGrant[Grant] | None:
        """Return the latest acquisition of this task that is not released."""
        return self._unowned.last(self._stack())

    def _stack(self) -> HeldGrants[Grant]:
        task = this_task()
        stack = self._mine.get(task)
        if stack is None:
            stack = self._mine[task] = HeldGrants()
        return stack

    async def _acquire(self, requests: Sequence[AnyRequest], timeout: float | None) -> Grant | None:
        terms, stack = self.terms, self._stack()
        driver = Driver.of(terms.client)
        await driver.enter()

        def make_grant(state: GrantState, waited: float) -> Grant:
            return Grant(driver, state, waited, terms.cancel_on_lost)

        client, caller, (locks, rates) = driver.client, this_caller(), split(requests)

        def make_signal() -> Signal:
            return Signal(driver)

        def make_rate_acquisition(rate: RateRequest, remaining: float | None) -> RateAcquisition[RateGrant]:
            return RateAcquisition(client, rate, remaining, caller, RateGrant.made_by(driver), make_signal)

        acquisition = acquisition_class(locks)(client, terms, locks, timeout, caller, make_grant, stack, make_signal)
        operation: RevertibleOperation[Grant | None] = (
            RateGroupAcquisition(acquisition, make_rate_acquisition, rates, timeout) if rates else acquisition
        )
        grant = await driver.run_operation(operation)
        if grant is not None:
            grant.arm()
        return grant

    async def _enter(self, requests: Sequence[AnyRequest]) -> Grant:
        stack = self._stack()
        depth = len(stack)
        grant = await self._acquire(requests, self.terms.timeout)
        if grant is None:
            driver = Driver.of(self.terms.client)
            raise await run_generator(self.terms.timeout_error(requests, this_caller()), driver.execute_effect)
        stack.enter_block(depth)
        return grant

    async def __aenter__(self) -> Grant:
        return await self._enter(self.terms.requests)

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: Any) -> None:
        last, stack, lost = self._last(), self._stack(), False
        try:
            if stack.leave_block():
                return
            # (Before Python 3.11 we cannot see if the program has cancelled the task, too: then the loss is reported.)
            lost = last is not None and last.grant.disarm(exc)
            if last is not None and last.grant.state.ended_early:
                stack.pop()  # another task has released it, or it was handed over
            else:
                await self._release()
        except Exception as error:
            # An error of the body takes precedence, unless the loss caused it.
            if exc is None or lost:
                raise error from exc

    def __call__(self, function: F) -> F:
        """Decorate a coroutine function or method: each call holds the lock.

        Raises `ConfigurationError` for any other function, and for classes.
        """
        from sqlsem.client import decorated  # imported late: wrapt takes longer to load than sqlsem

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
    """Adopt a lock, as `sqlsem.adopt`. ``cancel_on_lost=True`` also cancels this task when the lock is lost.

    >>> async with await sqlsem.aio.adopt(token) as grant:  # doctest: +SKIP
    ...     await load(fence=grant.fence)
    """
    client = defaults.client_of(coordinator)
    return await _adopt(client, token, on_lost, cancel_on_lost)


async def _adopt(client: DatabaseClient, token: str, on_lost: LostCallback | None, cancel_on_lost: bool) -> Grant:
    driver = Driver.of(client)
    await driver.enter()

    def make_grant(state: GrantState, waited: float) -> Grant:
        return Grant(driver, state, waited, cancel_on_lost)

    adopted = await driver.run_operation(Adoption(client, token, on_lost, this_caller(), make_grant))
    adopted.arm()
    return adopted


# -- functions that make locks -------------------------------------------------------------------------------------


@shows_options(ModuleLockOptions)
def mutex(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """Make a mutex, as `sqlsem.mutex`. ``cancel_on_lost=True`` also cancels the task when the lock is lost; its block
    then ends with `LockLost`.
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
    """Make a candidate, as `sqlsem.leader`. The event loop calls the callbacks, which may be coroutine functions. It
    calls ``on_stopped`` after a loss, too: a blocked loop would delay that.

    ``cancel_on_lost``: cancel the task when the term is lost; its block then ends with `LockLost`. On SIGTERM, if the
    program has no handler, the task is cancelled, and its block ends with ``SystemExit(143)``.

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
    """Run a job once per period, as `sqlsem.once`. ``cancel_on_lost``: as for `mutex`.

    >>> async with sqlsem.aio.once("report", per="1d") as run:  # doctest: +SKIP
    ...     if run:
    ...         await send_report()
    """
    period = Period(name, per, offset)
    return Once(Periodic(period, note, timeout, on_lost, None, coordinator, cancel_on_lost), Lock)


class AsyncLocks:
    """The functions of this module for one coordinator (`sqlsem.Coordinator.aio`)."""

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
        """See `sqlsem.all_of`. The locks must belong to this coordinator."""
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
        """Close the coordinator, as `sqlsem.Coordinator.close`, without blocking the event loop."""
        if not self._client.closed:
            await call_in_thread(self._client, partial(self._client.close, this_caller().number))

    async def adopt(self, token: str, *, on_lost: LostCallback | None = None, cancel_on_lost: bool = False) -> Grant:
        """See `sqlsem.aio.adopt`."""
        return await _adopt(self._client, token, on_lost, cancel_on_lost)
