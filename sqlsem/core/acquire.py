"""How a lock is had: a number is taken for each request, all at once, and waited for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from sqlsem import deadlocks, runtime
from sqlsem.core import lockorder, nesting
from sqlsem.core.callers import Caller
from sqlsem.core.client import DatabaseClient
from sqlsem.core.event_bus import TraceContext
from sqlsem.core.holdings import BaseGrant, Hold, Holding, abandon
from sqlsem.core.steps import NO_ROOM, Call, Operations, Sleep, Verify
from sqlsem.core.terms import Terms
from sqlsem.core.threads import voice
from sqlsem.core.verbs import SUSPECT_SLICE_SECONDS, WaitingVerb
from sqlsem.core.waiter_queues import Waiter, WaiterState
from sqlsem.engines.base import Busy, Session
from sqlsem.engines.priorities import is_place, line_of
from sqlsem.errors import Deadlock, LockLost, SqlsemError
from sqlsem.events import Behind, Deadlocked, Lost, TimedOut, Waiting
from sqlsem.model import MAX_NAME, Entry, Request, Resource, Ticket, monotonic

__all__ = ["Acquisition", "locked"]

log = voice
G = TypeVar("G", bound=BaseGrant)

#: The sleep of those behind others of ours. They are told when it is their turn, and when their row is gone.
KEPT_OUT_SECONDS = 30.0


class Acquisition(WaitingVerb, Generic[G]):
    """One acquisition; a `Verb`.

    Args:
        process: Where.
        terms: How.
        requests: What.
        timeout: For how long, in seconds (None: for ever; 0: only if nobody is in the way).
        caller: Who asks.
        make_grant: Makes the face's grant of what is held, after so many seconds.
        keep: The hold is appended to it before anything can interrupt.
        new_event: Makes what wakes a waiter.
    """

    def __init__(
        self,
        client: DatabaseClient,
        terms: Terms,
        requests: Sequence[Request],
        timeout: float | None,
        caller: Caller,
        make_grant: Callable[[Holding, float], G],
        keep: list[Hold[G]],
        new_event: Callable[[], threading.Event] = runtime.event,
    ) -> None:
        client.require_open()
        super().__init__(client, caller, timeout)
        self._terms = terms
        self.requests = tuple(requests)
        self.owner = caller.owner
        self.uid = client.new_uid()
        self._make_grant = make_grant
        self._keep = keep
        self._hold: Hold[G] | None = None
        self.new_event = new_event
        self.tickets: list[Ticket] = []
        self.sent = False  # may have rows in the database
        self.withdrawn = False  # a call that is still under way in another thread must leave none behind
        self.waiters: dict[int, Waiter] = {}
        self.trace: TraceContext | None = None
        self._suspected: bool | None = None  # whether others may wait for its owner, while it waits

    def run(self) -> Operations[G | None]:
        """Have all requests, or None when the time is up.

        Raises `LockLost` when a row was taken out of the queue while it waited, and `Deadlock`.
        """
        holdings = self.client.holdings
        for held in holdings.enough(self.requests, self.caller) if self._terms.reentrant else ():
            self._hold = again = Hold(cast("G", held))
            if holdings.enter(again):
                self._keep.append(again)
                return again.grant
            self._hold = None
        signals = self.client.event_bus
        if signals.tracer is not None:
            self.trace = signals.follow(self.requests, self.caller)
        try:
            had = not holdings.refuse(self.requests, self.caller, self._terms.reentrant, self.timeout)
            if had and lockorder.current is not None:
                self._watch_order(lockorder.current)
            if had and self.client.parent_locks.held != ():
                had = not (yield from self._is_refused_by_those_above())
            if not had or not (yield from self._take_numbers()):
                self._tell(TimedOut, timeout=self.timeout)
                return None
            # (Made before it waits, as the lock is nobody's for as long as anything takes afterwards.)
            holding = Holding(holdings, self.requests, self.tickets, self.caller, self._terms.on_lost, 0.0, self.trace)
            if not (yield from self._wait_for_all()):
                self._tell(TimedOut, timeout=self.timeout)
                return None
        except Deadlock as exc:
            self._tell(Deadlocked, why=str(exc))
            raise
        holding.since = now = monotonic()
        grant = self._make_grant(holding, now - self.began)
        self._hold = hold = Hold(grant, holding.first)
        holdings.add(grant)
        yield from self._require_rows(holding)
        self._keep.append(hold)
        holding.told = True
        if signals.taps["granted"] or log.isEnabledFor(logging.INFO if self.waiters else logging.DEBUG):
            holdings.tell_granted(holding, grant.waited, self.waiters)
        return grant

    def withdraw(self, outcome: str = "cancelled") -> Operations[None]:
        """Remove what this acquisition left; where that cannot be done now, the next good ping does it. Repeatable."""
        uid, tickets = self.uid, self.tickets

        def cancel(session: Session, member_id: int) -> None:
            session.restore_wakeup_locks(member_id, tickets)
            session.cancel(member_id, uid, outcome)

        self._disown()
        try:
            if self.sent:
                yield Call("cancel", cancel, min(1.0, self.budget))
                self.sent = False
        except SqlsemError as exc:
            if not self.client.closed:
                log.warning("Could not withdraw a request at once: %s", exc)
        finally:
            self.forget_rows()
        for ticket in self.tickets:
            self.client.notify_waiters(ticket.resource)

    def drop(self) -> None:
        """As `withdraw`, where nothing can be carried out any more: the next good ping does it all."""
        self._disown()
        self.forget_rows()

    def _disown(self) -> None:
        self.withdrawn = True
        hold, holdings = self._hold, self.client.holdings
        if hold is None:
            return
        if not self.tickets:  # had once more
            abandon(hold.grant, hold.token)
        elif hold.grant.holding.end(hold.token):
            holdings.forget(hold.grant)
            if self.client.event_bus.wants("released", logging.DEBUG):
                holdings.tell_released(hold.grant.holding)
        if hold in self._keep:
            self._keep.remove(hold)

    def forget_rows(self) -> None:
        self.member.forget(self.tickets)
        if self.sent:
            self.member.disown()

    def done(self) -> None:
        """Leave the local queues, and let the next of ours come forward. Repeatable."""
        self.member.settled(self.uid)
        if self.trace is not None:
            self.client.event_bus.asked(self.trace)
        if not self.waiters:  # never waited
            return
        if self._suspected is not False:  # (not known yet where an interrupt came in between)
            self.client.deadlock_monitor.remove(self.tickets)
        self.client.waiter_queues.leave(self.waiters.values())

    def tell(self, found: deadlocks.Found) -> None:
        """This request has to be given up; from another thread."""
        super().tell(found)
        for waiter in list(self.waiters.values()):
            waiter.event.set()

    # -- before anything is asked -------------------------------------------------------------------------------

    def _watch_order(self, orders: lockorder.LockOrder) -> None:
        if self.timeout != 0:
            held = [(one.resource, one.exclusive) for one in self.client.holdings.requests_of(self.caller.number)]
            orders.entering(self.client.engine.where, held, [request.resource for request in self.requests])

    def _is_refused_by_those_above(self) -> Operations[bool]:
        """Whether those under whom this process runs hold what it wants, until it ends."""
        above = yield from self.client.parent_locks.find()
        if above:
            self.owner += f" under {above[-1].position}"
            return (yield from nesting.refuse(above, self.requests, self.timeout))
        return False

    # -- taking numbers -----------------------------------------------------------------------------------------

    def _take_numbers(self) -> Operations[bool]:
        """Take a number for every request in one go. Whether there are: not where one that is only wanted if it is free
        was not, and not when the time is up.
        """
        while True:
            try:
                return (yield from self._register())
            except Busy:
                # Somebody keeps the gate in an open transaction. That is waiting too, and has been logged.
                if self.seconds_left() <= 0:
                    yield from self.withdraw("timeout")
                    return False

    def requesting_id(self) -> str:
        """Who asks, with the mark of a trace."""
        requesting_id = self.client.requesting_id(self.caller)
        if self.trace is not None and len(requesting_id) + len(self.trace.mark) <= MAX_NAME:
            requesting_id += self.trace.mark
        return requesting_id

    def _register(self) -> Operations[bool]:
        member, requesting_id = self.member, self.requesting_id()

        def register(session: Session, member_id: int) -> bool:
            # Another thread may withdraw meanwhile. Each sets its own flag first and reads the other's then:
            #     here      sent = True        read withdrawn   register   read withdrawn
            #     withdraw  withdrawn = True   read sent        cancel
            # So either nothing is registered, or one of the two removes the rows, or the next ping does.
            self.sent = True
            if self.withdrawn:
                return False
            # (Not before: while others of ours queue for the main session, a ping must find the strangers.)
            member.registering(self.uid)
            tickets = session.register(member_id, requesting_id, self.owner, self.uid, self.requests, self.timeout == 0)
            self.tickets = tickets or []
            member.add(self.tickets)
            for ticket in self.tickets:
                self.client.waiter_queues.spare(ticket.resource, session, member_id)
            if self.withdrawn:
                self.forget_rows()
            return tickets is not None

        try:
            there: bool = yield Call("acquire", register, self.budget, sign=True)
        finally:
            member.settled(self.uid)
        if there and len(self.tickets) < len(self.requests):
            # Found by a second attempt, as the answer to the first was lost.
            numbered = {ticket.resource for ticket in self.tickets}
            gone = next(request.resource for request in self.requests if request.resource not in numbered)
            raise LockLost(
                f"The request for {gone!r} was taken out of the queue before its number was known here (by an "
                f"operator, or because the database was out of reach for too long); ask again",
                resource=gone,
            )
        return there

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait_for_all(self) -> Operations[bool]:
        """Whether all were granted in time. A grant, once due, stays due, so one is waited for after the other."""
        for ticket in self.tickets:
            granted: bool | None = ticket.granted
            while not granted:
                if self.seconds_left() <= 0:
                    yield from self.withdraw("timeout")
                    return False
                granted = yield from self._wait_for(ticket)
                if granted is None:
                    self.tell_place_lost(ticket)
                    raise LockLost(
                        f"The request for {ticket.resource!r} at position {ticket.position} was taken out of the queue "
                        f"while it waited (by an operator, or because the database was out of reach for too long); "
                        f"ask again",
                        resource=ticket.resource,
                    )
        return True

    def _wait_for(self, ticket: Ticket) -> Operations[bool | None]:
        """Wait for a slice: True when it is granted, False when not yet, None when the row is gone."""
        self.client.require_open()
        lines, waiter = self.client.waiter_queues, self.waiters.get(ticket.position)
        if waiter is None:
            (request,) = (one for one in self.requests if one.resource == ticket.resource)
            waiter = self.waiters[ticket.position] = Waiter(ticket, request, self.new_event())
            lines.enter(waiter)
            self.client.contention_monitor.came(ticket.resource, ticket.position)
            if self.client.event_bus.wants("waiting", logging.INFO):
                yield from self._tell_waiting(waiter)
        if not self.member.knows(ticket):
            return None  # lost while we waited
        if self._suspected is None:
            self._suspected = self.client.deadlock_monitor.add(self, self.tickets, self.caller.number)
        place = lines.place(waiter)
        if place is WaiterState.ANSWERED:
            self.checked(waiter.answer)
        elif self.deadlock is not None:
            lines.settle(waiter, (yield from self.look_or_give_up(waiter)))
        elif place is WaiterState.KEPT_OUT:
            yield Sleep(waiter, self.seconds_left(KEPT_OUT_SECONDS))
        elif place is WaiterState.FIRST and lines.stay(waiter, self.client.holdings.ahead_of(ticket)):
            yield Sleep(waiter, self.seconds_left())
        elif place is not WaiterState.FIRST or lines.leads(waiter) or not (yield from self._wait_in_session(waiter)):
            yield from self._stand(waiter, place)
        return waiter.answer

    def _wait_in_session(self, waiter: Waiter) -> Operations[bool]:
        """Whether there was one to wait in."""
        lines = self.client.waiter_queues
        lines.sit(waiter)
        timeout = self.seconds_left()
        answer = yield from self.wait(waiter, min(timeout, SUSPECT_SLICE_SECONDS) if self._suspected else timeout)
        if answer is NO_ROOM:
            return False
        if answer is not False:
            lines.settle(waiter, answer)
        return True

    def _stand(self, waiter: Waiter, place: WaiterState) -> Operations[None]:
        """Sleep until somebody has to look, and look for all who are due, unless another one did."""
        lines, last = self.client.waiter_queues, False
        if place is not WaiterState.LET_IN_TOO:
            pause = lines.stand(waiter)
            left = self.seconds_left(pause)
            last = left < pause
            if left > 0:
                yield Sleep(waiter, left)
        chosen = lines.begin_look(waiter, last)
        if chosen:
            try:
                yield Call("wait", lines.looking(chosen), self.budget)
            finally:
                lines.end_look()

    def _require_rows(self, holding: Holding) -> Operations[None]:
        """While we waited, the main session may have been lost, and our rows with it."""
        if self.member.unheard():
            yield Verify()
        for ticket in self.tickets:
            if not self.member.knows(ticket):
                missing = [one.position for one in self.tickets if not self.member.knows(one)]
                self.client.mark_lost_and_log(missing, "its row was removed before it could be used")
                holding.require()

    # -- telling ------------------------------------------------------------------------------------------------

    def _tell(self, event: type[TimedOut | Deadlocked], **more: Any) -> None:
        """What has become of it: not had."""
        signals, tickets = self.client.event_bus, {ticket.resource: ticket.position for ticket in self.tickets}
        if signals.wants(event.name, event.level):
            waited = self.waited()
            for request in self.requests:
                position = tickets.get(request.resource)
                about = signals.about(request, position, self.caller)
                if event is TimedOut and position in self.waiters:
                    more["behind"] = self.waiters[position].behind
                signals.tell(event(**about, waited=waited, **more), self.trace)

    def tell_place_lost(self, ticket: Ticket) -> None:
        (request,) = (one for one in self.requests if one.resource == ticket.resource)
        about = self.client.event_bus.about(request, ticket.position, self.caller)
        lost = Lost(**about, held=None, why="its row was taken out of the queue while it waited")
        self.client.event_bus.tell(lost, self.trace)

    def _tell_waiting(self, waiter: Waiter) -> Operations[None]:
        """That it waits, and behind whom. Only for one that nobody of ours stands before is the database asked that."""
        client, ticket = self.client, waiter.ticket
        behind = client.waiter_queues.behind(waiter) or client.holdings.behind(waiter.request, ticket.position)
        if behind is None:
            try:
                entries = yield Call("look", lambda session, _: session.entries(ticket.resource), 0.0)
                behind = Behind.of(entries, waiter.request, ticket.position)
            except SqlsemError as exc:
                log.debug("Cannot see who is ahead: %s", exc)
        waiter.behind = behind
        about = client.event_bus.about(waiter.request, ticket.position, self.caller)
        client.event_bus.tell(Waiting(**about, behind=behind), self.trace)


def locked(client: DatabaseClient, requests: Sequence[Request]) -> Operations[bool]:
    """Whether somebody else would now ask for these in vain."""
    client.require_open()

    def look(session: Session, _: int) -> tuple[list[list[Entry]], dict[str, Resource]]:
        entries = [session.entries(request.resource) for request in requests]
        for request, ahead in zip(requests, entries, strict=True):
            if request.priority is not None:
                ahead.extend(filter(is_place, session.entries(line_of(request.resource))))
        return entries, {resource.resource: resource for resource in session.resources()}

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
