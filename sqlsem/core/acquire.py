"""One acquisition in this process: its place among our own waiters, and what its steps come to.

Between `sqlsem.core.steps`, which knows what has to happen, and the faces, which carry out operations: no I/O here, so
that both faces share it.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from sqlsem import deadlocks
from sqlsem.core import lockorder, nesting, steps
from sqlsem.core.callers import Caller
from sqlsem.core.holdings import BaseGrant
from sqlsem.core.process import Process
from sqlsem.core.steps import NO_ROOM, Call, Operations, Sleep, Verify, WaitFor
from sqlsem.core.waiting import Waiter
from sqlsem.engines.base import Busy, Disconnected, Session
from sqlsem.errors import Deadlock, SqlsemError
from sqlsem.model import Entry, Request, Resource, Ticket, monotonic

__all__ = ["Acquisition", "locked"]

log = logging.getLogger("sqlsem")
G = TypeVar("G", bound=BaseGrant)

#: Seconds between looks of a waiter that has no session to wait in: at first, and at the most.
SOON = 0.005
SELDOM = 1.0
#: All who wait without a session together look this often a second at the most.
LOOKS = 250
#: The longest single wait in the database of whoever may be in a deadlock, which interrupts nothing when it is found.
SHORT = 0.5


class Acquisition(Generic[G]):
    """Carries out the steps of one acquisition, in terms of operations.

    ``keep``: the grant is appended to it before anything can interrupt. ``event`` makes what wakes a waiter.
    """

    def __init__(
        self,
        process: Process,
        requests: Sequence[Request],
        timeout: float | None,
        caller: Caller,
        make_grant: Callable[[Sequence[Request], Sequence[Ticket], float], G],
        keep: list[G] | None,
        event: Callable[[], threading.Event] = threading.Event,
    ) -> None:
        self.process = process
        self.requests = tuple(requests)
        self.timeout = timeout
        self.caller = caller
        self.owner = caller.owner
        self.requesting_id, self.uid = process.requesting_id(caller), process.new_uid()
        self.budget = process.retry if timeout is None else min(process.retry, max(timeout, 1.0))
        self.tickets: list[Ticket] = []
        self.sent = False  # may have rows in the database
        self.withdrawn = False  # a call that is still under way in another thread must leave none behind
        self.waiters: dict[int, Waiter] = {}
        self.told: set[int] = set()  # positions whose wait has been logged
        self.pause = SOON
        self.suspected: bool | None = None  # whether others may wait for its owner, while it waits
        self.deadlock: deadlocks.Found | None = None
        self._make_grant = make_grant
        self._keep = keep
        self._event = event

    def run(self) -> Operations[G | None]:
        """Have all requests, or None when the time is up. Who drives it calls `withdraw` when it fails, and `done`."""
        began = monotonic()
        if lockorder.current is not None and self.timeout != 0:
            held = [(one.resource, one.exclusive) for one in self.process.holdings.requests_of(self.caller.number)]
            lockorder.current.entering(self.process.engine.where, held, [one.resource for one in self.requests])
        above = yield from self.process.above.find()
        if above:
            if (yield from nesting.refuse(above, self.requests, self.timeout)):
                return None
            self.owner += f" under {above[-1].position}"
        tickets = yield from steps.refine(steps.acquire(self.requests, self.uid, self.timeout), self._perform)
        waited = monotonic() - began
        if tickets is None:
            log.info("Not had within %g s: %s", self.timeout, ", ".join(one.describe() for one in self.requests))
            return None
        for request, ticket in zip(self.requests, tickets, strict=False):
            level = logging.INFO if self.waiters else logging.DEBUG
            log.log(level, "Granted %s at %d, after %.1f s", request.describe(), ticket.position, waited)
        grant = self._make_grant(self.requests, tickets, waited)
        self.process.holdings.add(grant)
        yield from self._require_rows(grant)
        if self._keep is not None:
            self._keep.append(grant)
        return grant

    def withdraw(self, outcome: str = "cancelled") -> Operations[None]:
        """Remove what this acquisition left; where that cannot be done now, the next good ping does it. Repeatable."""
        process, member = self.process, self.process.member
        self._disown()
        try:
            if self.sent:
                yield Call("cancel", lambda session, me: session.cancel(me, self.uid, outcome), min(1.0, self.budget))
                self.sent = False
        except SqlsemError as exc:
            if not process.closed:
                log.warning("Could not withdraw a request at once: %s", exc)
        finally:
            member.forget(self.tickets)
            if self.sent:
                member.disown()
        for ticket in self.tickets:
            process.waiting_room.nudge(ticket.resource)

    def drop(self) -> None:
        """As `withdraw`, where nothing can be carried out any more: the next good ping does it all."""
        self._disown()
        self.process.member.forget(self.tickets)
        if self.sent:
            self.process.member.disown()

    def _disown(self) -> None:
        self.withdrawn = True
        for grant in self.process.holdings.with_tickets(self.caller, self.tickets):
            self.process.holdings.forget(grant)
            if self._keep is not None and grant in self._keep:
                self._keep.remove(grant)

    def done(self) -> None:
        """Leave the local queues, and let the next of ours come forward. Repeatable."""
        self.process.member.settled(self.uid)
        if not self.waiters:  # never waited
            return
        if self.suspected is not False:  # (not known yet where an interrupt came in between)
            self.process.watch.remove(self.tickets)
        self.process.waiting_room.leave(
            [(ticket, self.waiters[ticket.position]) for ticket in self.tickets if ticket.position in self.waiters]
        )

    def tell(self, found: deadlocks.Found) -> None:
        """This request has to be given up; from another thread."""
        self.deadlock = found
        for waiter in list(self.waiters.values()):
            waiter.event.set()

    # -- the steps ----------------------------------------------------------------------------------------------

    def _perform(self, step: steps.Step) -> Operations[Any]:
        if isinstance(step, steps.Now):
            return monotonic()
        if isinstance(step, steps.Register):
            return (yield from self._register(step))
        if isinstance(step, steps.Wait):
            return (yield from self._wait(step.ticket, step.timeout))
        return (yield from self.withdraw(step.outcome))

    def _register(self, step: steps.Register) -> Operations[list[Ticket] | None]:
        member = self.process.member

        def register(session: Session, member_id: int) -> list[Ticket] | None:
            # Who withdraws meanwhile sets one flag and reads the other, and here it is the other way round: so one of
            # us knows of the rows, or the ping finds that nobody does.
            self.sent = True
            if self.withdrawn:
                return None
            tickets = session.register(
                member_id, self.requesting_id, self.owner, self.uid, step.requests, step.only_if_free
            )
            self.tickets = tickets or []
            member.add(self.tickets)
            if self.withdrawn:
                member.forget(self.tickets)
                member.disown()
            return tickets

        try:
            member.registering(self.uid)
            tickets: list[Ticket] | None = yield Call("acquire", register, self.budget, sign=True)
            return tickets
        finally:
            member.settled(self.uid)

    def _wait(self, ticket: Ticket, timeout: float) -> Operations[bool | None]:
        process = self.process
        process.require_open()
        waiter = self.waiters.get(ticket.position)
        room = process.waiting_room
        if waiter is None:
            waiter = self.waiters[ticket.position] = Waiter(ticket.position, self._event())
            room.enter(ticket, waiter)
        if not process.member.knows(ticket):
            return None  # lost while we waited
        if log.isEnabledFor(logging.INFO) and ticket.position not in self.told:
            self.told.add(ticket.position)
            yield from self._tell_waiting(ticket)
        if self.deadlock is not None:
            granted = yield from self._look(ticket, waiter)  # somebody else may just have given up
            if granted is not False:
                return granted
            raise Deadlock(deadlocks.message(self.deadlock), resource=ticket.resource)
        if self.suspected is None:
            self.suspected = process.watch.add(self, self.tickets, self.caller.number)
        if not room.is_first(ticket):
            # (Many who began together shall not all look at the same time.)
            early = random.uniform(0.7, 1.0) if timeout >= steps.SLICE else 1.0
            if (yield Sleep(waiter, timeout * early)):
                return False
            # Behind others of ours there is nothing to gain by looking, but for labels and weights that mix.
            return (yield from self._look(ticket, waiter))
        try:
            granted = yield WaitFor(ticket, min(timeout, SHORT) if self.suspected else timeout, waiter)
        except (Disconnected, Busy) as exc:
            process.require_open()
            log.warning("Waiting for %r was interrupted, looking again: %s", ticket.resource, exc)
        else:
            if granted is not NO_ROOM:
                return self._answer(granted)
            # Too many of ours wait already: look from time to time.
            pause = max(self.pause, len(room) / LOOKS) * random.uniform(0.8, 1.2)
            yield Sleep(waiter, min(timeout, pause))
            self.pause = min(self.pause * 1.5, SELDOM)
            return (yield from self._look(ticket, waiter))
        yield Sleep(waiter, min(timeout, self.pause))
        self.pause = min(self.pause * 2, 0.5)
        if self.pause >= 0.5:
            # Not for ever: the main session's own retries decide when it is an outage.
            return (yield from self._look(ticket, waiter))
        return False

    def _tell_waiting(self, ticket: Ticket) -> Operations[None]:
        """Log that it waits; in detail, which has to be asked for, where that is wanted."""
        behind = ""
        if log.isEnabledFor(logging.DEBUG):
            try:
                entries = yield Call("look", lambda session, _: session.entries(ticket.resource), 0.0)
                ahead = [one for one in entries if one.position < ticket.position]
                if ahead:
                    first = ahead[0]
                    who = first.requesting_id if first.host is None else f"{first.host}:{first.pid}"
                    more = f" and {len(ahead) - 1} more" if len(ahead) > 1 else ""
                    behind = f", behind {who} ({first.program}), which {first.state} for {first.seconds:.1f} s{more}"
            except SqlsemError as exc:
                log.debug("Cannot see who is ahead: %s", exc)
        log.info("Waiting for %r at %d%s", ticket.resource, ticket.position, behind)

    def _look(self, ticket: Ticket, waiter: Waiter) -> Operations[bool | None]:
        look = Call("wait", lambda session, _: session.wait(ticket, 0.0, waiter.event), self.budget)
        return self._answer((yield look))

    def _answer(self, granted: bool | None) -> bool | None:
        if granted is None:
            self.process.require_open()  # closing took the row away
        return granted

    def _require_rows(self, grant: G) -> Operations[None]:
        """While we waited, the main session may have been lost, and our rows with it."""
        process = self.process
        if process.member.doubtful():
            yield Verify()
        missing = [ticket.position for ticket in self.tickets if not process.member.knows(ticket)]
        if missing:
            process.lose(missing, "its row was removed before it could be used")
            grant.holding.require()


def locked(process: Process, requests: Sequence[Request]) -> Operations[bool]:
    """Whether somebody else would now ask for these in vain."""
    process.require_open()

    def look(session: Session, _: int) -> tuple[list[list[Entry]], dict[str, Resource]]:
        entries = [session.entries(request.resource) for request in requests]
        return entries, {one.resource: one for one in session.resources()}

    entries, settings = yield Call("look", look)
    for request, ahead in zip(requests, entries, strict=True):
        setting = settings.get(request.resource)
        if setting is not None and setting.paused:
            return True
        # (Whose owner is known to be dead is removed by the next who tries.)
        there = [entry for entry in ahead if entry.state != "dead"]
        if not request.fits(there, None if setting is None else setting.cap):
            return True
    return False
