"""Acquire locks: register all requests in one transaction, then wait until each of them is granted.

An acquisition that fails, is interrupted or is cancelled leaves no row behind: `rollback` removes the rows at once, or
the next heartbeat does. It relies on the unique id (``uid``) that the database stores with each row of a request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sqlsem.client.effects import NO_CONNECTION, Call, Effects, Sleep, VerifyGrants
from sqlsem.client.held.registry import BaseGrant, GrantState, HeldGrant, release_later
from sqlsem.client.monitors import lock_order, parent_locks
from sqlsem.client.operations.waiting import WaitingOperation, row_removed
from sqlsem.client.waiters.queues import Waiter
from sqlsem.client.waiters.state import FINAL, Step, WaiterState
from sqlsem.engines.answers import name_resource
from sqlsem.engines.failures import Busy
from sqlsem.engines.priorities import is_priority_entry, priority_queue
from sqlsem.insight.patterns import Patterns
from sqlsem.util import runtime
from sqlsem.util.threads import log
from sqlsem.values.errors import ConfigurationError, Deadlock, LockLost, SqlsemError
from sqlsem.values.events import Behind, Deadlocked, Lost, TimedOut, Waiting
from sqlsem.values.locks import MAX_NAME, Entry, Request, Resource, Ticket

if TYPE_CHECKING:
    from sqlsem.client.callers import Caller
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.event_bus import TraceContext
    from sqlsem.client.operations.terms import Terms
    from sqlsem.engines.base import Session
    from sqlsem.values import deadlocks

__all__ = ["Acquisition", "locked"]

G = TypeVar("G", bound=BaseGrant)


class Acquisition(WaitingOperation, Generic[G]):
    """The acquisition of one lock, on one resource or several; a `RevertibleOperation`.

    Args:
        client: The database.
        terms: The lock's options.
        requests: The resources to acquire.
        timeout: Seconds to wait (None: for ever; 0: only try).
        caller: The thread or task that acquires.
        make_grant: Makes the grant of the API in use, from the client, its state and the seconds waited.
        keep: The caller's list of acquisitions. A successful acquisition is in it before `run` returns, so that the
            caller can release it after an interrupt.
        new_event: Makes the event that wakes a waiter.
    """

    def __init__(
        self,
        client: DatabaseClient,
        terms: Terms,
        requests: Sequence[Request],
        timeout: float | None,
        caller: Caller,
        make_grant: Callable[[DatabaseClient, GrantState, float], G],
        keep: list[HeldGrant[G]],
        new_event: Callable[[], threading.Event] = runtime.event,
    ) -> None:
        super().__init__(client, caller, timeout)
        self._terms = terms
        self.requests = tuple(requests)
        self.owner = caller.owner
        self.requesting_id = client.requesting_id(caller)
        self.uid = client.new_uid()
        self._make_grant = make_grant
        self._keep = keep
        self._held: HeldGrant[G] | None = None
        self.new_event = new_event
        self.tickets: list[Ticket] = []
        self._ungranted: list[Ticket] = []  # the tickets that were not granted when they were registered
        self.sent = False  # True: a call was sent, so the database may have rows of this acquisition
        self.rolled_back = False  # True: a call still running in another thread must leave no row behind
        self.waiters: dict[int, Waiter] = {}
        self.trace: TraceContext | None = None
        self._suspected: bool | None = None  # True: the deadlock monitor watches it; None: not asked yet

    def run(self) -> Effects[G | None]:
        """Return the grant, or None after the timeout.

        Raises `Deadlock`, and `LockLost` if a row of the request was removed while the request waited.
        """
        registry = self.client.registry
        for held in registry.find_reentrant(self.requests, self.caller) if self._terms.reentrant else ():
            self._held = reentered = HeldGrant(cast("G", held))
            if registry.reenter(reentered):
                self._keep.append(reentered)
                return reentered.grant
            self._held = None
        bus = self.client.event_bus
        if bus.tracer is not None:
            self._start_trace()
        try:
            is_possible = not registry.check_conflicts(self.requests, self.caller, self._terms.reentrant, self.timeout)
            if is_possible and lock_order.current is not None:
                self._watch_order(lock_order.current)
            if is_possible and self.client.parent_locks.held != ():
                is_possible = not (yield from self._is_refused_by_parent_locks())
            if not is_possible or not (yield from self._register_all()):
                self._publish(TimedOut, timeout=self.timeout)
                return None
            # (Made before the wait: once the database has granted the lock, each instruction here delays its holder.)
            state = GrantState(registry, self.requests, self.tickets, self.caller, self._terms.on_lost, 0.0, self.trace)
            if self._ungranted and not (yield from self._wait_for_all()):
                self._publish(TimedOut, timeout=self.timeout)
                return None
        except Deadlock as exc:
            self._publish(Deadlocked, why=str(exc))
            raise
        state.since = now = self.client.clock()
        grant = self._make_grant(self.client, state, now - self.began)
        self._held = held_grant = HeldGrant(grant, state.first_token)
        registry.add(grant)
        if self.member.is_uncertain():
            yield VerifyGrants()
        for ticket in self.tickets:  # the main connection may have been lost during the wait
            if ticket.position not in self.member.tickets:
                self._raise_lost(state)
        self._keep.append(held_grant)
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
        held_grant, registry = self._held, self.client.registry
        if held_grant is None:
            return
        if not self.tickets:  # a reentrant acquisition
            release_later(held_grant.grant, held_grant.token)
        elif held_grant.grant.state.end_acquisition(held_grant.token):
            registry.discard(held_grant.grant)
            if self.client.event_bus.has_subscribers("released", logging.DEBUG):
                registry.publish_released(held_grant.grant.state)
        if held_grant in self._keep:
            self._keep.remove(held_grant)

    def forget_rows(self) -> None:
        """Discard the tickets here; the next heartbeat removes their rows if the database still has them."""
        self.member.end_registration(self.uid)  # (an interrupt may have left it pending)
        self.member.discard(self.tickets)
        if self.sent:
            self.member.request_cleanup()

    def close(self) -> None:
        """Leave the local queues, so that the next waiter of this process becomes the first. Idempotent."""
        if self.trace is not None:
            self.client.event_bus.end_trace(self.trace)
        if not self.waiters:  # it never waited
            return
        if self._suspected is not False:  # (None: an interrupt may have come between the call of `add` and its answer)
            self.client.deadlock_monitor.remove(self.tickets)
        self.client.waiter_queues.remove(self.waiters.values())

    def choose_as_victim(self, deadlock: deadlocks.Found) -> None:
        """Have this request raise `Deadlock`. Called by another thread."""
        super().choose_as_victim(deadlock)
        for waiter in list(self.waiters.values()):
            waiter.event.set()

    # -- before the first call ----------------------------------------------------------------------------------

    def _start_trace(self) -> None:
        """Begin a span for each request, and put its id behind the row's ``requesting_id`` if the column has room."""
        self.trace = trace = self.client.event_bus.start_trace(self.requests, self.caller)
        if trace is not None and len(self.requesting_id) + len(trace.suffix) <= MAX_NAME:
            self.requesting_id += trace.suffix

    def _watch_order(self, orders: lock_order.LockOrder) -> None:
        if self.timeout != 0:
            held = [
                (request.resource, request.exclusive)
                for request in self.client.registry.requests_of(self.caller.number)
            ]
            orders.entering(self.client.engine.label, held, [request.resource for request in self.requests])

    def _is_refused_by_parent_locks(self) -> Effects[bool]:
        """Return True if a parent `sqlsem run` holds a conflicting lock until this process ends."""
        held = yield from self.client.parent_locks.find()
        if held:
            self.owner += f" under {held[-1].position}"
            return (yield from parent_locks.refuse(held, self.requests, self.timeout))
        return False

    # -- registering --------------------------------------------------------------------------------------------

    def _register_all(self) -> Effects[bool]:
        """Register all requests in one transaction. Return False after the timeout, or at once if timeout 0 fails."""
        registered: bool | None = None
        while registered is None:
            try:
                registered = yield Call("acquire", self._insert_rows, self.retry_timeout, counts_as_heartbeat=True)
            except Busy:
                pass  # another session holds the gate in an open transaction: that counts as waiting, and was logged
            finally:
                self.member.end_registration(self.uid)
            if registered is None and self.remaining() <= 0:
                yield from self.rollback("timeout")
                return False
        if registered and len(self.tickets) < len(self.requests):
            # The answer to the first attempt was lost, and a row was removed before the second attempt.
            known = {ticket.resource for ticket in self.tickets}
            missing = next(request.resource for request in self.requests if request.resource not in known)
            raise row_removed(repr(missing), missing, "before its position was known here")
        return bool(registered)

    def _insert_rows(self, session: Session, member_id: int) -> bool:
        """Insert the rows, and grant those that nothing blocks. A call on the main connection. Return False if it is
        too late, or if timeout 0 fails.
        """
        # Another thread may roll back meanwhile. Each side sets its own flag first, and then reads the other's:
        #     here      sent = True          read rolled_back   register   read rolled_back
        #     rollback  rolled_back = True   read sent          cancel
        # So either nothing is registered, or one side removes the rows, or the next heartbeat does.
        self.sent = True
        if self.rolled_back:
            return False
        member = self.member
        # (Not earlier: a pending registration keeps heartbeats from deleting orphaned rows, and this call may have
        # waited long for the main connection.)
        member.begin_registration(self.uid)
        try:
            tickets = session.register(
                member_id, self.requesting_id, self.owner, self.uid, self.requests, self.timeout == 0
            )
        except ConfigurationError as exc:
            name_resource(exc, [request.resource for request in self.requests])
            raise
        self.tickets, self._ungranted = tickets or [], []
        member.add(self.tickets)
        for ticket in self.tickets:
            if not ticket.granted:
                self._ungranted.append(ticket)
                # (Not in a call of its own: in a crowd it would come after the calls of all others.)
                self.client.waiter_queues.drop_wakeup_locks(ticket.resource, session, member_id)
        if self.rolled_back:
            self.forget_rows()
        return tickets is not None

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait_for_all(self) -> Effects[bool]:
        """Return True if all requests are granted before the timeout. It waits for one after the other."""
        for ticket in self._ungranted:
            state = WaiterState.TIMED_OUT if self.remaining() <= 0 else (yield from self._wait_for(ticket))
            if state is WaiterState.TIMED_OUT:
                yield from self.rollback("timeout")
                return False
            if state is WaiterState.GONE:
                raise self.lost_row(ticket)
        return True

    def _request_of(self, ticket: Ticket) -> Request:
        (request,) = (request for request in self.requests if request.resource == ticket.resource)
        return request

    def _wait_for(self, ticket: Ticket) -> Effects[WaiterState]:
        """Wait until the row is granted, is gone, or the time is up. Return that final state."""
        client, queues = self.client, self.client.waiter_queues
        client.require_open()
        waiter = self.waiters[ticket.position] = Waiter(ticket, self._request_of(ticket), self.new_event())
        queues.add(waiter)
        client.contention_monitor.request_arrived(ticket.resource, ticket.position)
        if client.event_bus.has_subscribers("waiting", logging.INFO):
            yield from self._publish_waiting(waiter)
        if self._suspected is None:
            self._suspected = client.deadlock_monitor.add(self.choose_as_victim, self.tickets, self.caller.number)
        has_connection = True
        while True:
            client.require_open()
            facts = self.facts(ticket, has_connection=has_connection, is_suspect=self._suspected)
            held = client.registry.requests_ahead(ticket) if queues.is_first(waiter) else ()
            step = queues.next_step(waiter, facts, client.clock(), client.timing, held)
            if step.state in FINAL:
                return step.state
            has_connection = yield from self._take(step, waiter)

    def _take(self, step: Step, waiter: Waiter) -> Effects[bool]:
        """Carry out the action of a state. Return False if it needed a connection, and none was free."""
        queues = self.client.waiter_queues
        if step.state is WaiterState.ON_CONNECTION:
            return (yield from self._wait_in_session(waiter, step))
        if step.state is WaiterState.VICTIM:
            queues.set_answer(waiter, (yield from self.poll_or_give_up(waiter)))
        elif step.state in (WaiterState.BLOCKED_LOCALLY, WaiterState.LOCAL_WAIT):
            yield Sleep(waiter, step.seconds)
        else:
            yield from self._poll(waiter, step)
        return True

    def _wait_in_session(self, waiter: Waiter, step: Step) -> Effects[bool]:
        """Wait on a connection of the pool. Return False if none was free."""
        answer = yield from self.wait(waiter, step.seconds)
        if answer is NO_CONNECTION:
            return False
        if answer is not False:
            self.client.waiter_queues.set_answer(waiter, answer)
        return True

    def _poll(self, waiter: Waiter, step: Step) -> Effects[None]:
        """Sleep until the next poll is due, then poll for all waiters that are due, unless another thread does so."""
        queues, is_last = self.client.waiter_queues, False
        if step.state is WaiterState.POLLED:
            pause = queues.poll_delay(waiter)
            is_last = step.seconds < pause  # the timeout comes before the next poll
            if pause > 0:
                yield Sleep(waiter, min(pause, step.seconds))
        chosen = queues.begin_poll(waiter, is_last)
        if chosen:
            try:
                yield Call("wait", queues.poll_call(chosen), self.retry_timeout)
            finally:
                queues.end_poll()

    def _raise_lost(self, state: GrantState) -> None:
        """Mark the grant as lost, because rows were removed, and raise `LockLost`."""
        missing = [ticket.position for ticket in self.tickets if not self.member.has_ticket(ticket)]
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
                fields = bus.common_fields(request, position, self.caller)
                if event is TimedOut and position in self.waiters:
                    more["behind"] = self.waiters[position].behind
                bus.publish(event(**fields, waited=waited, **more), self.trace)

    def lost_row(self, ticket: Ticket, queue: str = "") -> LockLost:
        """Publish `lost` for a request whose row was removed while it waited, and return the error to raise. ``queue``:
        the kind of its queue, for the message. Raises `ConfigurationError` if closing has removed the row.
        """
        self.client.require_open()
        fields = self.client.event_bus.common_fields(self._request_of(ticket), ticket.position, self.caller)
        lost = Lost(**fields, held=None, why="its row was taken out of the queue while it waited")
        self.client.event_bus.publish(lost, self.trace)
        return row_removed(f"{ticket.resource!r} at position {ticket.position}{queue}", ticket.resource)

    def _publish_waiting(self, waiter: Waiter) -> Effects[None]:
        """Publish the `waiting` event. Ask the database for the blocker only if none of this process is ahead."""
        client, ticket = self.client, waiter.ticket
        behind = client.waiter_queues.blocker_of(waiter) or client.registry.blocker_of(waiter.request, ticket.position)
        if behind is None:
            entries = yield from self.read_entries(ticket.resource, "request is ahead")
            behind = Behind.of(entries, waiter.request, ticket.position)
        waiter.behind = behind
        fields = client.event_bus.common_fields(waiter.request, ticket.position, self.caller)
        client.event_bus.publish(Waiting(**fields, behind=behind), self.trace)


def locked(client: DatabaseClient, requests: Sequence[Request]) -> Effects[bool]:
    """Return True if another caller could not acquire these resources now."""
    client.require_open()

    def read(session: Session, _: int) -> tuple[list[list[Entry]], dict[str, Resource]]:
        entries = [session.entries(request.resource) for request in requests]
        for request, queue in zip(requests, entries, strict=True):
            if request.priority is not None:
                queue.extend(filter(is_priority_entry, session.entries(priority_queue(request.resource))))
        return entries, {resource.resource: resource for resource in session.resources()}

    entries, settings = yield Call("read", read)
    # (A resource without rows and settings of its own is not among these, and may match a pattern.)
    patterns = Patterns((setting.resource, setting.cap, None) for setting in settings.values())
    for request, queue in zip(requests, entries, strict=True):
        setting = settings.get(request.resource)
        if setting is not None and setting.paused:
            return True
        # (A dead owner's row blocks no acquisition: the first acquisition removes it.)
        alive = [entry for entry in queue if entry.state != "dead"]
        if not request.fits(alive, patterns.cap_of(request.resource) if setting is None else setting.cap):
            return True
    return False
