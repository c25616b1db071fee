"""Acquire a lock by priority, where an operator has set priorities for its resource.

A request waits with an entry in the priority queue of its resource, and polls until it is granted. Its caller holds no
other lock, so it is part of no deadlock. The module relies on `PriorityWaiters` to notify the next waiter of this
process.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

from sqlsem.client.effects import Call, Effects, Sleep
from sqlsem.client.operations.acquire import Acquisition, G
from sqlsem.client.operations.waiting import row_removed
from sqlsem.client.waiters.queues import Waiter
from sqlsem.client.waiters.state import WaiterState
from sqlsem.engines.answers import naming_resource
from sqlsem.engines.failures import Busy
from sqlsem.engines.priorities import PriorityAnswer
from sqlsem.engines.protocol import Capability
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.events import Behind, Waiting
from sqlsem.values.locks import Ticket

if TYPE_CHECKING:
    from sqlsem.client.operations.terms import Terms
    from sqlsem.engines.base import Session

__all__ = ["PriorityAcquisition", "acquisition_class"]

#: The pause between polls, as a share of the time waited so far, and its bounds in seconds. The pause is longer, the
#: more requests are ahead.
SHARE, SHORTEST, LONGEST = 0.05, 0.002, 0.25
#: The greatest number of requests ahead that lengthens the pause.
FAR = 8
#: A position behind all requests.
LAST = 2**63 - 1


class PriorityAcquisition(Acquisition[G]):
    """The acquisition of a lock by a request with a priority; a `RevertibleOperation`."""

    _waiter: Waiter | None = None

    def run(self) -> Effects[G | None]:
        """Acquire as `Acquisition.run` does. Raises `ConfigurationError` if the caller holds another lock."""
        self.client.engine.require(Capability.PRIORITIES, "A priority")
        return (yield from super().run())

    def close(self) -> None:
        """End the acquisition as `Acquisition.close` does."""
        super().close()
        if self._waiter is not None:
            self.client.priority_waiters.remove(self._waiter)

    def _register_all(self) -> Effects[bool]:
        if self.timeout != 0:
            yield from self._require_nothing_held()
        answer = yield from self._ask(None)
        if answer is None or (answer.ticket is None and self.timeout == 0):
            return False
        if answer.ticket is None:
            resource = self.requests[0].resource
            raise row_removed(repr(resource), resource, "before its position was known here")
        if answer.granted:
            return True
        entry, request = answer.ticket, self.requests[0]
        ticket = Ticket(request.resource, entry.position, entry.requesting_id, False)
        self._waiter = self.waiters[entry.position] = Waiter(ticket, request, self.new_event())
        self.client.priority_waiters.add(self._waiter)
        self.client.contention_monitor.priority_request_arrived(request)
        yield from self._publish_waiting(self._waiter)
        return (yield from self._wait_in_queue(self._waiter, entry, answer))

    def _wait_in_queue(self, waiter: Waiter, entry: Ticket, answer: PriorityAnswer) -> Effects[bool]:
        """Wait with this entry of the priority queue. Return True if the request is granted before the timeout."""
        while True:
            self.client.require_open()
            # (No wait on a connection: the database has no lock for an entry of a priority queue.)
            facts = self.facts(entry, answer=answer.granted, is_first=False)
            if not answer.granted:
                facts.has_row = facts.has_row and answer.ticket is not None
                facts.is_blocked = self.client.priority_waiters.is_behind_local(waiter, answer.before)
            step = self.next_step(waiter, facts)
            if step.state is WaiterState.GRANTED:
                return True
            if step.state is WaiterState.TIMED_OUT:
                yield from self.rollback("timeout")
                return False
            if step.state is WaiterState.GONE:
                raise self.lost_row(waiter.ticket, " of the priority queue")
            is_polled = step.state is WaiterState.POLLED
            yield Sleep(waiter, min(step.seconds, self._pause(answer.ahead)) if is_polled else step.seconds)
            if self.member.has_ticket(entry):
                polled = yield from self._ask(entry)
                if polled is None:
                    return False
                answer = polled

    def _pause(self, ahead: int) -> float:
        """Return the pause until the next poll."""
        pause = min(max(SHORTEST, self.waited() * SHARE), LONGEST)
        return pause * min(ahead + 1, FAR) * random.uniform(0.8, 1.2)

    def _ask(self, entry: Ticket | None) -> Effects[PriorityAnswer | None]:
        """Ask the database if the request is granted. ``entry``: its entry in the priority queue, once it has one. None
        after the timeout, if another session keeps the gate.
        """
        member, request = self.member, self.requests[0]

        def acquire(session: Session, member_id: int) -> PriorityAnswer:
            self.sent = True  # (see `Acquisition._insert_rows`)
            if self.rolled_back:
                return PriorityAnswer(None, False)
            member.begin_registration(self.uid)
            with naming_resource(request.resource):
                answer = session.acquire_by_priority(
                    member_id, self.requesting_id, self.owner, self.uid, request, self.timeout == 0, entry
                )
            # (No heartbeat comes in between, because this call has the main connection.)
            if answer.ticket is not None:
                self.tickets = [answer.ticket]
                member.add(self.tickets)
            if entry is not None and (answer.granted or answer.ticket is None):
                member.discard([entry])
            if self.rolled_back:
                self.forget_rows()
            return answer

        while True:
            try:
                answer: PriorityAnswer = yield Call("acquire", acquire, self.retry_timeout)
                return answer
            except Busy:
                if self.remaining() <= 0:
                    yield from self.rollback("timeout")
                    return None
            finally:
                member.end_registration(self.uid)

    def _require_nothing_held(self) -> Effects[None]:
        """Raise `ConfigurationError` if the caller holds a lock: deadlocks through a priority queue are not detected,
        so no other request may wait for a waiter there.
        """
        held = self.client.registry.requests_of(self.caller.number)
        parent_locks = yield from self.client.parent_locks.find()
        if held or parent_locks:
            description = (
                held[0].describe() if held else f"{parent_locks[-1].request.describe()}, by the 'sqlsem run' above it"
            )
            resource = self.requests[0].resource
            raise ConfigurationError(
                f"{resource!r} is granted by priority, and this {self.caller.kind} holds {description}: a caller "
                f"that waits by priority must hold nothing, because deadlocks are not detected there; acquire "
                f"{resource!r} first, or only try for it (blocking=False)",
                resource=resource,
                code="priority",
            )

    def _publish_waiting(self, waiter: Waiter) -> Effects[None]:
        bus, resource = self.client.event_bus, waiter.ticket.resource
        if not bus.has_subscribers(Waiting.name, logging.INFO):
            return
        entries = yield from self.read_entries(resource, "request holds the lock")
        waiter.behind = Behind.of(entries, waiter.request, LAST)
        fields = bus.common_fields(waiter.request, waiter.position, self.caller)
        bus.publish(Waiting(**fields, behind=waiter.behind), self.trace)


def acquisition_class(terms: Terms) -> type[Acquisition[Any]]:
    """Return the class that acquires a lock of these terms."""
    return PriorityAcquisition if terms.has_priority else Acquisition
