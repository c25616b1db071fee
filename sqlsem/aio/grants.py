"""The grants of asyncio tasks: as `sqlsem.Grant`, with calls that are awaited, and cancellation after a loss."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any, TypeVar

from sqlsem.aio.driver import Driver, Signal, awaited, run_generator, this_caller
from sqlsem.client.client import DatabaseClient
from sqlsem.client.effects import Effects
from sqlsem.client.grants import asserting, checking
from sqlsem.client.held.registry import BaseGrant, GrantState, ReleaseToken, release_later
from sqlsem.client.operations.convert import Upgrade, downgrade
from sqlsem.client.operations.handover import TTL_SECONDS, handing_over
from sqlsem.client.operations.rate_grants import adjusting, rate_of
from sqlsem.client.operations.release_on_commit import releasing_on_commit
from sqlsem.util.permits import Permit
from sqlsem.values.locks import Duration

T = TypeVar("T")


class Grant(BaseGrant):
    """A grant that a task holds; see `sqlsem.Grant`. Calls to the database are awaited, in the loop of the task."""

    client: DatabaseClient

    def __init__(
        self, client: DatabaseClient, state: GrantState, waited: float, driver: Driver, cancel_on_lost: bool
    ) -> None:
        super().__init__(client, state, waited)
        self.driver = driver
        self._cancel_on_lost = cancel_on_lost
        self._task: asyncio.Task[Any] | None = None  # the task to cancel after a loss
        self._cancelled_before = 0
        self._cancelled = False
        self._event: asyncio.Event | None = None
        self._contended: asyncio.Event | None = None
        driver.grants.add(self)

    @property
    def lost(self) -> bool:
        """True if the lock is lost.

        Answered from memory, without a call of the database (which `check` makes). After a long pause of this process
        it is also True until the database has answered, unless only an operator could have removed the row (SQLite).
        """
        state, member = self.state, self.client.member
        if state.why_lost is None and not state.released and member.is_uncertain():
            member.wake_heartbeat()
            return member.trust > 0
        return state.why_lost is not None

    @property
    def lost_event(self) -> asyncio.Event:
        """An event that is set when the lock is lost, to be awaited in the loop of the task."""
        if self._event is None:
            self._event = asyncio.Event()
            self.state.loss_callbacks.append(functools.partial(self.driver.soon, self._event.set))
            if self.state.why_lost is not None:
                self._event.set()
        return self._event

    @property
    def contended(self) -> asyncio.Event:
        """An event that is set when a request waits behind this grant, to be awaited in the loop of the task. See
        `sqlsem.Grant.contended`.
        """
        if self._contended is None:
            self._contended = asyncio.Event()
            soon = functools.partial(self.driver.soon, self._contended.set)
            self.client.contention_monitor.add(self.state, self._contended.is_set, soon)
        return self._contended

    async def check(self) -> None:
        """Ask the database now if the lock is still held; raises `LockLost` or `NotHeld` if not."""
        self.driver.require_here(self)
        await self._run(checking(self.client, self.state))

    async def assert_held(self, cursor: Any) -> None:
        """Check inside the caller's own transaction that the lock is held, as `sqlsem.Grant.assert_held`. The cursor
        may have methods that are awaited (of psycopg's ``AsyncConnection``, of aiosqlite …). The calls of a plain
        cursor block the loop.
        """
        self.driver.require_here(self)
        await run_generator(asserting(self.client, self.state, cursor), awaited)

    async def release_on_commit(self, cursor: Any) -> None:
        """See `sqlsem.Grant.release_on_commit`; with a cursor as for `assert_held`."""
        self.driver.require_here(self)
        await run_generator(releasing_on_commit(self.client, self, cursor), awaited)

    async def upgrade(self, timeout: Duration | None = None) -> None:
        """See `sqlsem.Grant.upgrade`. If the task is cancelled meanwhile, the grant is still a read lock."""
        self.driver.require_here(self)
        driver = self.driver
        await driver.run_operation(Upgrade(self.client, self.state, timeout, Signal(driver)))

    async def downgrade(self) -> None:
        """See `sqlsem.Grant.downgrade`."""
        self.driver.require_here(self)
        await self._run(downgrade(self.client, self.state))

    async def hand_over(self, *, ttl: Duration = TTL_SECONDS, to: str | None = None) -> str:
        """See `sqlsem.Grant.hand_over`."""
        self.driver.require_here(self)
        token = await self._run(handing_over(self.client, self, ttl, to))
        self.disarm(None)
        return token

    async def __aenter__(self) -> Grant:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object
    ) -> None:
        lost, token = self.disarm(exc), ReleaseToken()
        try:
            if not self.state.ended_early:
                await release_grant(self, token)
        except BaseException as error:
            release_later(self, token)
            if exc is None or lost or not isinstance(error, Exception):
                raise error from exc

    async def adjust(self, actual: int, *, rate: str | None = None) -> None:
        """See `sqlsem.Grant.adjust`."""
        self.driver.require_here(self)
        await self._run(adjusting(rate_of(self.rates, rate, self), actual))

    async def release(self) -> None:
        """Release the lock, from any task of its loop; see `sqlsem.Grant.release`."""
        await release_grant(self, self.state.release_token_for(this_caller()))

    async def _run(self, effects: Effects[T]) -> T:
        return await run_generator(effects, self.driver.execute_effect)

    def arm(self) -> None:
        """From now on, cancel the calling task if the lock is lost, if that was requested."""
        if self._cancel_on_lost and self._task is None:
            self._task = asyncio.current_task()
            assert self._task is not None
            if sys.version_info >= (3, 11):  # since then Python counts the requests to cancel a task
                self._cancelled_before = self._task.cancelling()
            self.state.loss_callbacks.append(self._cancel_soon)
            if self.state.why_lost is not None:
                self._cancel_soon()

    def _cancel_soon(self) -> None:
        self.driver.soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and not self._cancelled and not self.state.released:
            self._cancelled = True
            self._task.cancel(f"the lock on {self.resource!r} is lost")

    def disarm(self, exc: BaseException | None) -> bool:
        """Stop cancelling the task after a loss. Return True if ``exc``, which ends its block, is that cancellation,
        and the program has not cancelled the task as well. (A requested cancellation has been raised by now.)
        """
        task = self._task
        if task is None or self.state.depth > 1:
            return False
        self._task = None
        self.state.loss_callbacks.remove(self._cancel_soon)
        if not self._cancelled:
            return False
        if sys.version_info >= (3, 11) and task.uncancel() > self._cancelled_before:
            return False  # the program has cancelled the task, too
        return isinstance(exc, asyncio.CancelledError)


async def release_grant(grant: Grant, by: Permit) -> None:
    """Release the acquisition of this token, or one acquisition for a release token; raises as `Grant.release`."""
    driver = grant.driver
    driver.require_here(grant)
    grant.disarm(None)
    await run_generator(grant.client.release(grant, by), driver.execute_effect)
