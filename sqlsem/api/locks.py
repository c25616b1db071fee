"""Locks, for threads: as context managers, decorators, and with ``acquire``/``release``.

The same objects serve asyncio tasks: ``async with`` and decorated coroutine functions use `sqlsem.aio`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem.api.rates import RateGrant
from sqlsem.client import defaults
from sqlsem.client.callers import require_no_event_loop, this_thread
from sqlsem.client.effects import run_generator, run_operation
from sqlsem.client.grants import Grant
from sqlsem.client.held.lock_grants import HeldGrants, UnownedGrants
from sqlsem.client.held.registry import HeldGrant, LostCallback, ReleaseToken, release_later
from sqlsem.client.operations.acquire import locked
from sqlsem.client.operations.acquire_by_priority import acquisition_class
from sqlsem.client.operations.acquire_rate import RateAcquisition, RateGroupAcquisition, split
from sqlsem.client.operations.handover import Adoption
from sqlsem.util import late, runtime
from sqlsem.util.threads import log
from sqlsem.values.errors import ConfigurationError, NotHeld

if TYPE_CHECKING:
    from sqlsem import aio  # at run time when it is first used: programs without asyncio need not load it
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.defaults import Coordinated
    from sqlsem.client.operations.terms import AnyRequest, Terms
    from sqlsem.util.permits import Permit
    from sqlsem.values.locks import Duration
    from sqlsem.values.rates import RateRequest

F = TypeVar("F", bound=Callable[..., Any])


class Lock:
    """A lock on one or more resources, which many threads can acquire and release, again and again.

    `mutex`, `limit`, `read`, `write`, `stage` and `all_of` make it. Each thread has its own grant, and releases that
    itself. With ``async with``, and around coroutine functions, each asyncio task has its own grant.

    It works as `threading.Lock`, `RLock` (``reentrant=True``) and `Semaphore` (`limit`), with these differences. A
    thread that acquires a mutex which it already holds gets `Deadlock`, and does not hang. Only the thread that
    acquired a mutex releases it; or any thread, by `Grant.release`. Releasing a free lock always raises `NotHeld` (a
    `RuntimeError`), and never increases a count. A lock may be lost.

    A lock of the default coordinator can be pickled. The default coordinator of the other process must be of the same
    database.
    """

    def __init__(self, terms: Terms) -> None:
        #: For the package; programs have no use for it.
        self.terms = terms
        self._acquisition_class = acquisition_class(terms)
        self._stacks: runtime.PerThread[HeldGrants[Grant]] = runtime.PerThread(HeldGrants)
        self._unowned: UnownedGrants[Grant] = UnownedGrants()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.terms,)

    # -- acquire and release ------------------------------------------------------------------------------------

    def acquire(self, blocking: bool = True, timeout: Duration | None = -1) -> bool:
        """Acquire the lock, as `threading.Lock.acquire`. Return True if it was granted, False if it was not in time.

        Args:
            blocking: False: only try, without waiting (and without a timeout).
            timeout: How long to wait at most; None or -1 for ever. Left out, the lock's own ``timeout`` applies.

        Raises:
            Deadlock: This thread holds the lock already (without ``reentrant=True``; a `limit` may be held several
                times while there is room), or it is in a cycle of waiters. Never if the call does not wait.
            LockLost: The request was removed while it waited; or a remaining row of a lost `all_of` of this thread
                blocks the request (release that lock first).
            Unavailable: The database is out of reach.
        """
        seconds, stack = self.terms.seconds(blocking, timeout), self._stacks.get()
        depth, blocks = len(stack), len(stack.blocks)
        try:
            grant = self._acquire(self.terms.requests, seconds, stack)
            if grant is not None and self.terms.semaphore:
                self._unowned.add(grant)
            return grant is not None
        except BaseException:
            self._unwind(stack, depth, blocks)
            raise

    def locked(self) -> bool:
        """Return True if ``acquire(blocking=False)`` of a thread that does not hold the lock would fail now, because
        the limit is reached, the lock is paused, or requests wait for it. This asks the database. As with
        `threading.Lock.locked`, the answer may be outdated when it arrives: use it for display, not for decisions.

        Raises `Unavailable` if the database is out of reach.
        """
        require_no_event_loop(self, "use await sqlsem.aio.mutex(…).locked()")
        client = self.terms.client
        return run_generator(locked(client, split(self.terms.requests)[0]), client.execute_effect)

    def release(self, n: int = 1) -> None:
        """Release the latest acquisition of this thread with this lock. With a `limit`, as with a semaphore, a thread
        without an acquisition releases one of another thread (if `acquire` of this object made it, not ``with``).
        ``n``: the number of acquisitions to release, one after the other.

        Raises `NotHeld` if there is nothing to release, `LockLost` if the lock was lost meanwhile.
        """
        remaining = 1 if type(n) is int and n == 1 else self.terms.check_number(n)
        stack = self._stacks.get()
        while remaining > 0:
            last = self._unowned.last(stack)
            grant = self._unowned.oldest() if last is None else last.grant
            if grant is None:
                raise NotHeld(
                    f"{self!r} is not held by this thread ({threading.current_thread().name}); it is released by the "
                    f"thread that acquired it, or from any thread through its grant (grant.release())"
                )
            if self._end(grant, ReleaseToken() if last is None else last.token, stack):
                remaining -= 1  # (else another thread released the same grant at this moment)

    def _end(self, grant: Grant, by: Permit, stack: list[HeldGrant[Grant]]) -> bool:
        """Release a grant, and return False if another thread does. Even after an interrupt the grant is no longer on
        this thread's stack.
        """
        try:
            is_ours = self._unowned.take(grant)
            if is_ours:
                client = grant.client
                run_generator(client.release(grant, by), client.execute_effect)
            return is_ours
        except BaseException:
            release_later(grant, by)  # a signal handler may have raised before the release
            raise
        finally:
            if stack and stack[-1].token is by:
                del stack[-1]

    def _unwind(self, stack: HeldGrants[Grant], depth: int, blocks: int) -> None:
        """Remove the blocks after the first ``blocks``, and release the acquisitions after the first ``depth``. For an
        interrupt during acquire.
        """
        del stack.blocks[blocks:]
        while len(stack) > depth:
            if stack[-1].ended:
                stack.pop()
            else:
                self._end(stack[-1].grant, stack[-1].token, stack)

    def _release_later(self, last: HeldGrant[Grant] | None) -> None:
        """Release the block's acquisition (None: the latest) later, after an interrupt at the end of the block."""
        last, stack = last or self._last(), self._stacks.get()
        if last is not None:
            if stack and stack[-1] is last:
                stack.pop()
            release_later(last.grant, last.token)
        stack.drop_blocks()

    @property
    def grant(self) -> Grant:
        """This thread's grant. Raises `NotHeld` if it has none."""
        last = self._last()
        if last is None:
            raise NotHeld(f"{self!r} is not held by this thread ({threading.current_thread().name})")
        return last.grant

    def _last(self) -> HeldGrant[Grant] | None:
        """Return the latest acquisition of this thread that is not released."""
        return self._unowned.last(self._stacks.get())

    def _acquire(self, requests: Sequence[Any], timeout: float | None, stack: list[HeldGrant[Grant]]) -> Grant | None:
        """Acquire all requests (`AnyRequest`), or return None after the timeout. The acquisition is on the stack before
        this returns, also if an interrupt comes.
        """
        require_no_event_loop(self, "use 'async with', await sqlsem.aio.mutex(…).acquire()")
        terms, client = self.terms, self.terms.client
        if terms.cancel_on_lost:
            raise ConfigurationError(
                "cancel_on_lost=True is for tasks ('async with'); for a thread use on_lost=", code="asyncio"
            )

        caller = this_thread()
        if not terms.has_rates:
            acquisition = self._acquisition_class(client, terms, requests, timeout, caller, Grant, stack)
            return run_operation(acquisition, client.execute_effect)

        def taking(rate: RateRequest, left: float | None) -> RateAcquisition[RateGrant]:
            return RateAcquisition(client, rate, left, caller, RateGrant.made_by(client))

        locks, rates = split(requests)
        acquisition = self._acquisition_class(client, terms, locks, timeout, caller, Grant, stack)
        return run_operation(RateGroupAcquisition(acquisition, taking, rates, timeout), client.execute_effect)

    def _enter(self, requests: Sequence[AnyRequest], stack: HeldGrants[Grant], depth: int) -> Grant:
        grant = self._acquire(requests, self.terms.timeout, stack)
        if grant is None:
            raise run_generator(self.terms.timeout_error(requests, this_thread()), self.terms.client.execute_effect)
        stack.enter_block(depth)
        return grant

    def __enter__(self) -> Grant:
        stack = self._stacks.get()
        depth, blocks = len(stack), len(stack.blocks)
        try:
            return self._enter(self.terms.requests, stack, depth)
        except BaseException:
            self._unwind(stack, depth, blocks)
            raise

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        last = None
        try:
            stack = self._stacks.get()
            last = self._unowned.last(stack)
            if stack.leave_block():
                return
            if last is not None and last.grant.state.ended_early:
                stack.pop()  # another thread has released it, or it was handed over
            elif last is None or not self._end(last.grant, last.token, stack):
                self.release()
        except BaseException as failure:
            self._release_later(last)
            if last is None and isinstance(failure, NotHeld):
                self._release_foreign_block(sys._getframe(1))
            # An error of the block takes precedence. (A lost lock was logged, and on_lost called, when it was lost.)
            if exc is None or not isinstance(failure, Exception):
                raise

    def _release_foreign_block(self, block: FrameType) -> None:
        """Release the grants of a block that another thread entered, as may happen with a generator."""
        names = {request.resource for request in split(self.terms.requests)[0]}
        grants = [
            local
            for local in block.f_locals.values()
            if isinstance(local, Grant) and not local.state.released and names == set(local.positions)
        ]
        for grant in grants:
            release_later(grant, grant.state.first_token)
        log.warning(
            "The block of %r at %s:%d (%s) was left by thread %s, which did not enter it; %s",
            self,
            block.f_code.co_filename,
            block.f_lineno,
            block.f_code.co_name,
            threading.current_thread().name,
            "its grant is released" if grants else "it stays held: name its grant (as grant), or leave it there",
        )

    # -- with asyncio -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _aio(self) -> aio.Lock:
        with late.importing:
            from sqlsem import aio  # when it is first used: programs without asyncio need not load it
        # (Since Python 3.12 cached_property takes no lock: two threads may both come here, and must get the same
        # object.)
        lock: aio.Lock = self.__dict__.setdefault("_awaited", aio.Lock(self.terms))
        return lock

    async def __aenter__(self) -> aio.Grant:
        return await self._aio.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object
    ) -> None:
        await self._aio.__aexit__(exc_type, exc, traceback)

    # -- decorator ----------------------------------------------------------------------------------------------

    def __call__(self, function: F) -> F:
        """Decorate a function or method: each call holds the lock.

        A coroutine function acquires it as ``async with`` does. Raises `ConfigurationError` for generators,
        asynchronous ones too, and classes: they cannot be decorated.
        """
        with late.importing:
            from sqlsem.client import decorated  # wrapt takes longer to load than sqlsem

        if decorated.is_coroutine(function):
            return self._aio(function)
        return decorated.hold(function, self.terms, functools.partial(_Block, self))

    def __repr__(self) -> str:
        return f"<Lock {self.terms}>"


class _Block:
    """The block around the call of a decorated function. It works as the lock's own, with the requests of this call."""

    __slots__ = ("_lock", "_requests")

    def __init__(self, lock: Lock, requests: Sequence[AnyRequest]) -> None:
        self._lock = lock
        self._requests = requests

    def __enter__(self) -> Grant:
        lock, stack = self._lock, self._lock._stacks.get()
        depth, blocks = len(stack), len(stack.blocks)
        try:
            return lock._enter(self._requests, stack, depth)
        except BaseException:
            lock._unwind(stack, depth, blocks)
            raise

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        self._lock.__exit__(exc_type, exc, traceback)


def adopt(token: str, *, on_lost: LostCallback | None = None, coordinator: Coordinated | None = None) -> Grant:
    """Adopt the lock that was handed over under this token (`Grant.hand_over`, ``EXEC sqlsem.hand_over``). The lock
    keeps its position and fence; from then on it is held as if this thread had acquired it.

    Args:
        token: The token that ``hand_over`` returned.
        on_lost: Called with the grant, from another thread, when the lock is lost.
        coordinator: The coordinator of the lock's database; by default that of `sqlsem.configure`.

    Raises:
        NotHeld: The token is unknown there, has expired, or was used before (the message says by which client and
            when).
        ConfigurationError: The token is for another login, or is not a token.
        Unavailable: The database is out of reach.

    >>> with sqlsem.adopt(os.environ["TOKEN"]) as grant:  # doctest: +SKIP
    ...     load(fence=grant.fence)
    """
    return adopt_in(defaults.client_of(coordinator), token, on_lost)


def adopt_in(client: DatabaseClient, token: str, on_lost: LostCallback | None) -> Grant:
    """Adopt a lock in one database, for `adopt`."""
    require_no_event_loop("adopt()", "use await sqlsem.aio.adopt(…)")
    return run_operation(Adoption(client, token, on_lost, this_thread(), Grant), client.execute_effect)
