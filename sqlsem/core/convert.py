"""A grant that becomes another: what the steps of an upgrade and a downgrade come to in this process.

As `sqlsem.core.acquire`: no I/O here, so that all faces share it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from sqlsem import deadlocks
from sqlsem.core import steps
from sqlsem.core.acquire import SELDOM, SHORT, SOON
from sqlsem.core.holdings import Holding
from sqlsem.core.process import Process
from sqlsem.core.steps import NO_ROOM, Call, Operations, Sleep, WaitFor
from sqlsem.core.waiting import Waiter
from sqlsem.engines.base import Busy, Disconnected, Session
from sqlsem.engines.roles import Convertible
from sqlsem.errors import ConfigurationError, Deadlock, LockLost, SqlsemError
from sqlsem.model import READ, WRITE, Request, Upgrading, monotonic

__all__ = ["Conversion"]

log = logging.getLogger("sqlsem")


class Conversion:
    """One upgrade or downgrade of a grant. ``event`` is the face's own, and wakes it."""

    def __init__(self, process: Process, holding: Holding, event: threading.Event) -> None:
        holding.require()
        process.engine.require(Convertible, "This")
        self.holding = holding
        self.process = process
        self.member = process.member
        self.ticket = holding.tickets[0]
        self.waiter = Waiter(self.ticket.position, event)
        self.deadlock: deadlocks.Found | None = None
        self.pause = SOON

    def upgrade(self, timeout: float | None) -> Operations[bool]:
        """Have the reader become the writer; False when the time is up, and it is a reader still."""
        self._require(READ, "upgraded")
        budget = self.process.retry if timeout is None else min(self.process.retry, max(timeout, 1.0))
        self.budget = budget
        with self._alone():
            try:
                self.process.watch.add(self, (self.ticket,), self.holding.caller.number)
                done: bool = yield from steps.refine(steps.upgrade(self.ticket, timeout), self._perform)
            except LockLost:
                self._lose()
                raise
            except GeneratorExit:
                self._put_back_later()  # dropped, by a loop that is closed: nothing more can be awaited
                raise
            finally:
                self.process.watch.remove((self.ticket,))
            self.holding.require()
            return done

    def downgrade(self) -> Operations[None]:
        """Have the writer become a reader. What cannot be done at once is done by the pulse as soon as it can."""
        self._require(WRITE, "downgraded")
        if self.holding.depth > 1:
            raise ConfigurationError(
                f"{self.holding!r} is held {self.holding.depth} times (reentrant=True), and whoever acquired it first "
                f"relies on writing; downgrade it where it is held once",
                resource=self.ticket.resource,
            )
        with self._alone():
            self.holding.set_access(READ)  # from now on, whatever becomes of it
            try:
                there = yield Call("downgrade", self._downgrade)
            except Busy as exc:
                log.warning("%r is downgraded when the transaction that asserted it ends (%s)", self.holding, exc)
                self._put_back_later()
                return
            except BaseException:
                self._put_back_later()
                raise
            if not there:
                self._lose()
            self.process.waiting_room.nudge(self.ticket.resource)

    def tell(self, found: deadlocks.Found) -> None:
        """This upgrade has to be given up; from another thread."""
        self.deadlock = found
        self.waiter.event.set()

    # -- the steps ----------------------------------------------------------------------------------------------

    def _perform(self, step: steps.Conversion) -> Operations[Any]:
        if isinstance(step, steps.Now):
            return monotonic()
        if isinstance(step, steps.Begin):
            return (yield from self._begin(step.only_if_free))
        if isinstance(step, steps.Alone):
            return (yield from self._wait(step.timeout))
        return (yield from self._put_back())

    def _begin(self, only_if_free: bool) -> Operations[Upgrading]:
        def begin(session: Session, _: int) -> Upgrading:
            self.holding.conversions += 1
            return session.begin_upgrade(self.ticket, only_if_free)

        self.process.require_open()
        begun: Upgrading = yield Call("upgrade", begin, self.budget)
        if begun is Upgrading.DONE:
            self.holding.set_access(WRITE)
        elif begun is Upgrading.BEGUN:
            self.process.waiting_room.nudge(self.ticket.resource)  # it may have let in one of ours
        elif begun is Upgrading.NOT_YET and not only_if_free:
            yield from self._doze(SELDOM)
        return begun

    def _wait(self, timeout: float) -> Operations[bool | None]:
        self.process.require_open()
        if not self.member.knows(self.ticket):
            return None  # lost while we waited
        if self.deadlock is not None:
            written = yield from self._look()  # somebody else may just have given up
            if written is not False:
                return written
            raise Deadlock(deadlocks.message(self.deadlock), resource=self.ticket.resource)
        try:
            written = yield WaitFor(self.ticket, min(timeout, SHORT), self.waiter, upgrade=True)
        except (Disconnected, Busy) as exc:
            self.process.require_open()
            log.warning("Waiting to write %r was interrupted, looking again: %s", self.ticket.resource, exc)
            yield from self._doze(min(timeout, 0.5))
            return (yield from self._look())
        if written is NO_ROOM:
            # Too many of ours wait already: look from time to time.
            yield from self._doze(min(timeout, SELDOM))
            return (yield from self._look())
        return self._answer(written)

    def _look(self) -> Operations[bool | None]:
        look = Call("upgrade", lambda session, _: session.upgrade(self.ticket, 0.0, self.waiter.event), self.budget)
        return self._answer((yield look))

    def _answer(self, written: bool | None) -> bool | None:
        if written:
            self.holding.set_access(WRITE)
        elif written is None:
            self.process.require_open()  # closing took the row away
        return written

    def _doze(self, most: float) -> Operations[None]:
        yield Sleep(self.waiter, min(self.pause, most))
        self.pause = min(self.pause * 1.5, SELDOM)

    def _put_back(self) -> Operations[None]:
        self.holding.set_access(READ)
        try:
            yield Call("downgrade", self._downgrade, min(1.0, self.budget))
        except SqlsemError as exc:
            if not self.process.closed:
                log.warning("Could not withdraw the upgrade of %r at once: %s", self.holding, exc)
                self._put_back_later()
        self.process.waiting_room.nudge(self.ticket.resource)

    def _put_back_later(self) -> None:
        self.holding.set_access(READ)
        turn = self.holding.conversions

        def put_back(session: Session, _: int) -> None:
            # Unless it has been released, or upgraded again since (which is done on the main session, as this is).
            if self.holding.conversions == turn and not self.holding.released and self.holding.why_lost is None:
                session.downgrade(self.ticket)

        self.member.later(put_back)

    def _downgrade(self, session: Session, _: int) -> bool:
        self.holding.conversions += 1
        return session.downgrade(self.ticket)

    # -- what may be converted ----------------------------------------------------------------------------------

    def _require(self, access: str, what: str) -> None:
        request: Request = self.holding.requests[0]
        if len(self.holding.requests) > 1:
            raise ConfigurationError(
                f"{self.holding!r} is of several resources, and cannot be {what}; acquire the one to convert by itself",
                resource=self.ticket.resource,
            )
        if request.access != access or request.limit != 1:
            use = "read(…)" if access == READ else "write(…) or mutex(…)"
            raise ConfigurationError(
                f"{self.holding!r} is {request.describe()}, which cannot be {what}; what {use} gives can, once",
                resource=self.ticket.resource,
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One at a time: another thread may have the grant as well."""
        with self.process.state_lock:
            if self.holding.converting:
                raise ConfigurationError(
                    f"{self.holding!r} is being upgraded or downgraded by another thread; wait for that to end",
                    resource=self.ticket.resource,
                )
            self.holding.converting = True
        try:
            yield
        finally:
            self.holding.converting = False

    def _lose(self) -> None:
        self.process.lose([self.ticket.position], "its row was removed or taken away")
        self.holding.require()
