"""Acquire locks: register all requests in one transaction, then wait until each of them is granted.

An acquisition that fails, is interrupted or is cancelled leaves no row behind: `rollback` removes the rows at once, or
the next heartbeat does. It relies on the unique id (``uid``) that the database stores with each row of a request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from sqlsem import deadlocks, runtime
from sqlsem.core import lockorder, nesting
from sqlsem.core.callers import Caller
from sqlsem.core.client import DatabaseClient
from sqlsem.core.effects import NO_CONNECTION, Call, Effects, Sleep, VerifyGrants
from sqlsem.core.event_bus import TraceContext
from sqlsem.core.grant_registry import BaseGrant, GrantState, HeldGrant, release_later
from sqlsem.core.operations import SUSPECT_SLICE_SECONDS, WaitingOperation
from sqlsem.core.terms import Terms
from sqlsem.core.threads import voice
from sqlsem.core.waiter_queues import Waiter, WaiterState
from sqlsem.engines.base import Busy, Session
from sqlsem.engines.priorities import is_priority_entry, priority_queue
from sqlsem.errors import Deadlock, LockLost, SqlsemError
from sqlsem.events import Behind, Deadlocked, Lost, TimedOut, Waiting
from sqlsem.model import MAX_NAME, Entry, Request, Resource, Ticket, monotonic

__all__ = ["Acquisition", "locked"]

log = voice
G = TypeVar("G", bound=BaseGrant)

#: The sleep of a waiter behind another one of this process. It is notified of its turn, and of the loss of its row.
KEPT_OUT_SECONDS = 30.0


class Acquisition(WaitingOperation, Generic[G]):
    """The acquisition of one lock, which may be of several resources; an `Operation`.

    Args:
        client: The database.
        terms: The lock's options.
        requests: The resources to acquire.
        timeout: Seconds to wait (None: for ever; 0: only try).
        caller: The thread or task that acquires.
        make_grant: Makes the grant of the API in use, from its state and the seconds waited.
        keep: The caller's list of acquisitions; a successful one is appended before an interrupt can lose it.
        new_event: Makes the event that wakes a waiter.
    """

    def __init__(
        self,
        client: DatabaseClient,
        terms: Terms,
        requests: Sequence[Request],
        timeout: float | None,
        caller: Caller,
        make_grant: Callable[[GrantState, float], G],
        keep: list[HeldGrant[G]],
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
        self._hold: HeldGrant[G] | None = None
        self.new_event = new_event
        self.tickets: list[Ticket] = []
        self.sent = False  # True: the database may have rows of this acquisition
        self.rolled_back = False  # True: a call still running in another thread must leave no row behind
        self.waiters: dict[int, Waiter] = {}
        self.trace: TraceContext | None = None
        self._suspected: bool | None = None  # True: it may be part of a deadlock; None: not known yet

    def run(self) -> Effects[G | None]:
        """Return the grant, or None when the time is up.

        Raises `LockLost` if a row was removed from the queue while it waited, and `Deadlock`.
        """
        registry = self.client.registry
        for held in registry.find_reentrant(self.requests, self.caller) if self._terms.reentrant else ():
            self._hold = again = HeldGrant(cast("G", held))
            if registry.reenter(again):
                self._keep.append(again)
                return again.grant
            self._hold = None
        bus = self.client.event_bus
        if bus.tracer is not None:
            self.trace = bus.start_trace(self.requests, self.caller)
        try:
            possible = not registry.check_conflicts(self.requests, self.caller, self._terms.reentrant, self.timeout)
            if possible and lockorder.current is not None:
                self._watch_order(lockorder.current)
            if possible and self.client.parent_locks.held != ():
                possible = not (yield from self._is_refused_by_parent_locks())
            if not possible or not (yield from self._register_all()):
                self._publish(TimedOut, timeout=self.timeout)
                return None
            # (Made before the wait: from grant to return, every instruction delays the holder.)
            state = GrantState(registry, self.requests, self.tickets, self.caller, self._terms.on_lost, 0.0, self.trace)
            if not (yield from self._wait_for_all()):
                self._publish(TimedOut, timeout=self.timeout)
                return None
        except Deadlock as exc:
            self._publish(Deadlocked, why=str(exc))
            raise
        state.since = now = monotonic()
        grant = self._make_grant(state, now - self.began)
        self._hold = hold = HeldGrant(grant, state.first_token)
        registry.add(grant)
        yield from self._require_rows(state)
        self._keep.append(hold)
        state.is_published = True
        if bus.subscribers["granted"] or log.isEnabledFor(logging.INFO if self.waiters else logging.DEBUG):
            registry.publish_granted(state, grant.waited, self.waiters)
        return grant

    def rollback(self, outcome: str = "cancelled") -> Effects[None]:
        """Remove the rows of this acquisition, or let the next heartbeat remove them. Idempotent."""
        uid, tickets = self.uid, self.tickets

        def cancel(session: Session, member_id: int) -> None:
            session.restore_wakeup_locks(member_id, tickets)
            session.cancel(member_id, uid, outcome)

        self._discard_grant()
        try:
            if self.sent:
                yield Call("cancel", cancel, min(1.0, self.retry_timeout))
                self.sent = False
        except SqlsemError as exc:
            if not self.client.closed:
                log.warning("Could not cancel a request at once; the next heartbeat does: %s", exc)
        finally:
            self.forget_rows()
        for ticket in self.tickets:
            self.client.notify_waiters(ticket.resource)

    def rollback_local(self) -> None:
        """Discard the local state; the next heartbeat removes the rows."""
        self._discard_grant()
        self.forget_rows()

    def _discard_grant(self) -> None:
        self.rolled_back = True
        hold, registry = self._hold, self.client.registry
        if hold is None:
            return
        if not self.tickets:  # a reentrant acquisition
            release_later(hold.grant, hold.token)
        elif hold.grant.state.end_acquisition(hold.token):
            registry.discard(hold.grant)
            if self.client.event_bus.has_subscribers("released", logging.DEBUG):
                registry.publish_released(hold.grant.state)
        if hold in self._keep:
            self._keep.remove(hold)

    def forget_rows(self) -> None:
        self.member.discard(self.tickets)
        if self.sent:
            self.member.request_cleanup()

    def close(self) -> None:
        """Leave the local queues, so that the next waiter of this process becomes the first. Idempotent."""
        self.member.end_registration(self.uid)
        if self.trace is not None:
            self.client.event_bus.end_trace(self.trace)
        if not self.waiters:  # never waited
            return
        if self._suspected is not False:  # (None if an interrupt came before the answer)
            self.client.deadlock_monitor.remove(self.tickets)
        self.client.waiter_queues.remove(self.waiters.values())

    def choose_as_victim(self, deadlock: deadlocks.Found) -> None:
        """Have this request raise `Deadlock`. Called by another thread."""
        super().choose_as_victim(deadlock)
        for waiter in list(self.waiters.values()):
            waiter.event.set()

    # -- local checks, before the first call --------------------------------------------------------------------

    def _watch_order(self, orders: lockorder.LockOrder) -> None:
        if self.timeout != 0:
            held = [
                (request.resource, request.exclusive)
                for request in self.client.registry.requests_of(self.caller.number)
            ]
            orders.entering(self.client.engine.label, held, [request.resource for request in self.requests])

    def _is_refused_by_parent_locks(self) -> Effects[bool]:
        """Return True if a parent `sqlsem run` holds a conflicting lock until this process ends."""
        above = yield from self.client.parent_locks.find()
        if above:
            self.owner += f" under {above[-1].position}"
            return (yield from nesting.refuse(above, self.requests, self.timeout))
        return False

    # -- registering --------------------------------------------------------------------------------------------

    def _register_all(self) -> Effects[bool]:
        """Register all requests in one transaction. Return False if the time is up, or if only tried and not free."""
        while True:
            try:
                return (yield from self._register())
            except Busy:
                # Another transaction holds the gate open. That counts as waiting, and the driver has logged it.
                if self.remaining() <= 0:
                    yield from self.rollback("timeout")
                    return False

    def requesting_id(self) -> str:
        """Return the requester's name for the row, with the mark of a trace if it fits."""
        requesting_id = self.client.requesting_id(self.caller)
        if self.trace is not None and len(requesting_id) + len(self.trace.suffix) <= MAX_NAME:
            requesting_id += self.trace.suffix
        return requesting_id

    def _register(self) -> Effects[bool]:
        member, requesting_id = self.member, self.requesting_id()

        def register(session: Session, member_id: int) -> bool:
            # Another thread may roll back meanwhile. Each side sets its own flag first, and then reads the other's:
            #     here      sent = True          read rolled_back   register   read rolled_back
            #     rollback  rolled_back = True   read sent          cancel
            # So either nothing is registered, or one side removes the rows, or the next heartbeat does.
            self.sent = True
            if self.rolled_back:
                return False
            # (Not earlier: while other calls wait for the main connection, a heartbeat must find orphan rows.)
            member.begin_registration(self.uid)
            tickets = session.register(member_id, requesting_id, self.owner, self.uid, self.requests, self.timeout == 0)
            self.tickets = tickets or []
            member.add(self.tickets)
            for ticket in self.tickets:
                self.client.waiter_queues.drop_wakeup_locks(ticket.resource, session, member_id)
            if self.rolled_back:
                self.forget_rows()
            return tickets is not None

        try:
            registered: bool = yield Call("acquire", register, self.retry_timeout, counts_as_heartbeat=True)
        finally:
            member.end_registration(self.uid)
        if registered and len(self.tickets) < len(self.requests):
            # The answer to the first attempt was lost, and a row disappeared before the second one.
            numbered = {ticket.resource for ticket in self.tickets}
            missing = next(request.resource for request in self.requests if request.resource not in numbered)
            raise LockLost(
                f"The request for {missing!r} was taken out of the queue before its number was known here (by an "
                f"operator, or because the database was out of reach for too long); ask again",
                resource=missing,
            )
        return registered

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait_for_all(self) -> Effects[bool]:
        """Return True if all requests were granted in time. A granted one stays granted."""
        for ticket in self.tickets:
            granted: bool | None = ticket.granted
            while not granted:
                if self.remaining() <= 0:
                    yield from self.rollback("timeout")
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

    def _wait_for(self, ticket: Ticket) -> Effects[bool | None]:
        """Wait for at most one slice: True (granted), False (not yet), None (the row is gone)."""
        self.client.require_open()
        queues, waiter = self.client.waiter_queues, self.waiters.get(ticket.position)
        if waiter is None:
            (request,) = (request for request in self.requests if request.resource == ticket.resource)
            waiter = self.waiters[ticket.position] = Waiter(ticket, request, self.new_event())
            queues.add(waiter)
            self.client.contention_monitor.request_arrived(ticket.resource, ticket.position)
            if self.client.event_bus.has_subscribers("waiting", logging.INFO):
                yield from self._tell_waiting(waiter)
        if not self.member.has_ticket(ticket):
            return None  # lost while we waited
        if self._suspected is None:
            self._suspected = self.client.deadlock_monitor.add(self, self.tickets, self.caller.number)
        place = queues.state(waiter)
        if place is WaiterState.ANSWERED:
            self.checked(waiter.answer)
        elif self.deadlock is not None:
            queues.set_answer(waiter, (yield from self.poll_or_give_up(waiter)))
        elif place is WaiterState.BLOCKED_LOCALLY:
            yield Sleep(waiter, self.remaining(KEPT_OUT_SECONDS))
        elif place is WaiterState.HEAD and queues.should_wait_locally(
            waiter, self.client.registry.requests_ahead(ticket)
        ):
            yield Sleep(waiter, self.remaining())
        elif (
            place is not WaiterState.HEAD
            or queues.is_poll_leader(waiter)
            or not (yield from self._wait_in_session(waiter))
        ):
            yield from self._poll(waiter, place)
        return waiter.answer

    def _wait_in_session(self, waiter: Waiter) -> Effects[bool]:
        """Wait on a connection of the pool. Return False if none was free."""
        queues = self.client.waiter_queues
        queues.mark_blocking(waiter)
        timeout = self.remaining()
        answer = yield from self.wait(waiter, min(timeout, SUSPECT_SLICE_SECONDS) if self._suspected else timeout)
        if answer is NO_CONNECTION:
            return False
        if answer is not False:
            queues.set_answer(waiter, answer)
        return True

    def _poll(self, waiter: Waiter, place: WaiterState) -> Effects[None]:
        """Sleep until the next poll is due, then poll for all due waiters unless another thread has done so."""
        queues, last = self.client.waiter_queues, False
        if place is not WaiterState.SHARED_WAKEUP:
            pause = queues.poll_delay(waiter)
            left = self.remaining(pause)
            last = left < pause
            if left > 0:
                yield Sleep(waiter, left)
        chosen = queues.begin_poll(waiter, last)
        if chosen:
            try:
                yield Call("wait", queues.poll_call(chosen), self.retry_timeout)
            finally:
                queues.end_poll()

    def _require_rows(self, state: GrantState) -> Effects[None]:
        """Check that the rows still exist: the main connection may have been lost during the wait."""
        if self.member.is_uncertain():
            yield VerifyGrants()
        for ticket in self.tickets:
            if not self.member.has_ticket(ticket):
                missing = [other.position for other in self.tickets if not self.member.has_ticket(other)]
                self.client.mark_lost_and_log(missing, "its row was removed before it could be used")
                state.require_held()

    # -- events -------------------------------------------------------------------------------------------------

    def _publish(self, event: type[TimedOut | Deadlocked], **more: Any) -> None:
        """Publish that the requests were not granted."""
        bus, tickets = self.client.event_bus, {ticket.resource: ticket.position for ticket in self.tickets}
        if bus.has_subscribers(event.name, event.level):
            waited = self.waited()
            for request in self.requests:
                position = tickets.get(request.resource)
                about = bus.common_fields(request, position, self.caller)
                if event is TimedOut and position in self.waiters:
                    more["behind"] = self.waiters[position].behind
                bus.publish(event(**about, waited=waited, **more), self.trace)

    def tell_place_lost(self, ticket: Ticket) -> None:
        (request,) = (request for request in self.requests if request.resource == ticket.resource)
        about = self.client.event_bus.common_fields(request, ticket.position, self.caller)
        lost = Lost(**about, held=None, why="its row was taken out of the queue while it waited")
        self.client.event_bus.publish(lost, self.trace)

    def _tell_waiting(self, waiter: Waiter) -> Effects[None]:
        """Publish the `waiting` event with its blocker. Ask the database only if no waiter or holder of this process is
        ahead.
        """
        client, ticket = self.client, waiter.ticket
        behind = client.waiter_queues.blocker_of(waiter) or client.registry.blocker_of(waiter.request, ticket.position)
        if behind is None:
            try:
                entries = yield Call("look", lambda session, _: session.entries(ticket.resource), 0.0)
                behind = Behind.of(entries, waiter.request, ticket.position)
            except SqlsemError as exc:
                log.debug("Cannot see who is ahead: %s", exc)
        waiter.behind = behind
        about = client.event_bus.common_fields(waiter.request, ticket.position, self.caller)
        client.event_bus.publish(Waiting(**about, behind=behind), self.trace)


def locked(client: DatabaseClient, requests: Sequence[Request]) -> Effects[bool]:
    """Return True if another caller could not acquire these resources now."""
    client.require_open()

    def look(session: Session, _: int) -> tuple[list[list[Entry]], dict[str, Resource]]:
        entries = [session.entries(request.resource) for request in requests]
        for request, ahead in zip(requests, entries, strict=True):
            if request.priority is not None:
                ahead.extend(filter(is_priority_entry, session.entries(priority_queue(request.resource))))
        return entries, {resource.resource: resource for resource in session.resources()}

    entries, settings = yield Call("look", look)
    for request, ahead in zip(requests, entries, strict=True):
        setting = settings.get(request.resource)
        if setting is not None and setting.paused:
            return True
        # (The next acquisition removes a row whose owner is dead.)
        alive = [entry for entry in ahead if entry.state != "dead"]
        if not request.fits(alive, None if setting is None else setting.cap):
            return True
    return False
