"""Locks, for asyncio tasks, each of which has its own grants."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlsem.aio.driver import Driver, Signal, run_generator, this_caller, this_task
from sqlsem.aio.grants import Grant, release_grant
from sqlsem.aio.rates import RateGrant
from sqlsem.client.effects import RevertibleOperation
from sqlsem.client.held.lock_grants import HeldGrants, UnownedGrants
from sqlsem.client.held.registry import HeldGrant, ReleaseToken, release_later
from sqlsem.client.operations.acquire import locked
from sqlsem.client.operations.acquire_by_priority import acquisition_class
from sqlsem.client.operations.acquire_rate import RateAcquisition, RateGroupAcquisition, split
from sqlsem.client.operations.terms import AnyRequest, Terms
from sqlsem.util import late
from sqlsem.util.permits import Permit
from sqlsem.values.errors import NotHeld
from sqlsem.values.locks import Duration
from sqlsem.values.rates import RateRequest

F = TypeVar("F", bound=Callable[..., Any])


class Lock:
    """A lock that tasks acquire and release. Made by `mutex`, `limit`, `read`, `write`, `stage` and `all_of` of
    `sqlsem.aio`. Each task has its own grant.

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
        self._acquisition_class = acquisition_class(terms)
        self._mine: weakref.WeakKeyDictionary[asyncio.Task[Any], HeldGrants[Grant]] = weakref.WeakKeyDictionary()
        self._unowned: UnownedGrants[Grant] = UnownedGrants()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, (self.terms,)

    async def acquire(self, blocking: bool = True, timeout: Duration | None = -1) -> bool:
        """Acquire the lock; arguments, result and errors are those of `sqlsem.Lock.acquire`. If the task is cancelled
        meanwhile, its request is withdrawn.
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
        """Release the latest acquisition of this task with this lock, as `sqlsem.Lock.release`. With a `limit`, a task
        that holds none releases one of another task of its event loop.
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

    async def _acquire(self, requests: Sequence[Any], timeout: float | None) -> Grant | None:
        terms, stack = self.terms, self._stack()
        driver = Driver.of(terms.client)
        await driver.enter()

        make_grant = functools.partial(Grant, driver=driver, cancel_on_lost=terms.cancel_on_lost)
        client, caller = driver.client, this_caller()

        def make_signal() -> Signal:
            return Signal(driver)

        def make_rate_acquisition(rate: RateRequest, remaining: float | None) -> RateAcquisition[RateGrant]:
            return RateAcquisition(client, rate, remaining, caller, RateGrant.made_by(driver), make_signal)

        locks, rates = split(requests) if terms.has_rates else (requests, ())
        acquisition = self._acquisition_class(client, terms, locks, timeout, caller, make_grant, stack, make_signal)
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
        with late.importing:
            from sqlsem.client import decorated  # wrapt takes longer to load than sqlsem

        remedy = ", and cannot await its lock; decorate it with one of sqlsem.mutex and its siblings"
        return decorated.hold_awaiting(function, self.terms, self._enter, self.__aexit__, remedy)

    def __repr__(self) -> str:
        return f"<aio.Lock {self.terms}>"
