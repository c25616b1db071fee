"""Acquire a lock by priority, where an operator has set priorities for its resource.

A request waits in the priority queue of its resource with a row of its own, and polls for its turn. Its caller holds no
other lock, so it is part of no deadlock. It relies on `PriorityWaiters` to notify the next waiter of this process.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

from sqlsem.core.acquire import Acquisition, G
from sqlsem.core.effects import Call, Effects, Sleep
from sqlsem.core.threads import safe_logger
from sqlsem.core.waiter_queues import Waiter
from sqlsem.engines.base import Busy, Session
from sqlsem.engines.priorities import PriorityAnswer, PrioritySession
from sqlsem.errors import ConfigurationError, LockLost, SqlsemError
from sqlsem.events import Behind, Waiting
from sqlsem.model import Request, Ticket

__all__ = ["PriorityAcquisition", "acquisition_class"]

log = safe_logger

#: The pause between polls as a share of the time waited, with its bounds in seconds. The pause grows with the number
#: of requests ahead.
SHARE, SHORTEST, LONGEST = 0.05, 0.002, 0.25
#: At most this many requests ahead lengthen the pause.
FAR = 8
#: The position behind all requests.
LAST = 2**63 - 1
#: The sleep of a waiter behind another one of this process, which notifies it when it leaves the queue.
BEHIND_SECONDS = 30.0


class PriorityAcquisition(Acquisition[G]):
    """One acquisition by a request with a priority; a `RevertibleOperation`."""

    _waiter: Waiter | None = None

    def run(self) -> Effects[G | None]:
        """Acquire as `Acquisition.run` does. Raises `ConfigurationError` if the caller holds another lock."""
        self.client.engine.require(PrioritySession, "A priority")
        return (yield from super().run())

    def close(self) -> None:
        """End the acquisition as `Acquisition.close` does."""
        super().close()
        if self._waiter is not None:
            self.client.priority_waiters.remove(self._waiter)

    def _register_all(self) -> Effects[bool]:
        if self.timeout != 0:
            yield from self._require_nothing_held()
        turn = yield from self._ask(None)
        if turn is None or (turn.ticket is None and self.timeout == 0):
            return False
        if turn.ticket is None:
            raise LockLost(
                f"The request for {self.requests[0].resource!r} was taken away before its number was known here (by an "
                f"operator, or because the database was out of reach for too long); ask again",
                resource=self.requests[0].resource,
            )
        if turn.granted:
            return True
        place, request = turn.ticket, self.requests[0]
        ticket = Ticket(request.resource, place.position, place.requesting_id, False)
        self._waiter = self.waiters[place.position] = Waiter(ticket, request, self.new_event())
        self.client.priority_waiters.add(self._waiter)
        self.client.contention_monitor.priority_request_arrived(request)
        yield from self._publish_waiting(self._waiter)
        return (yield from self._wait_in_line(self._waiter, place, turn))

    def _wait_for_all(self) -> Effects[bool]:
        yield from ()
        return True  # the wait has ended already

    def _wait_in_line(self, waiter: Waiter, place: Ticket, turn: PriorityAnswer) -> Effects[bool]:
        """Return True if it was granted in time."""
        while not turn.granted:
            self.client.require_open()
            if self.remaining() <= 0:
                yield from self.rollback("timeout")
                return False
            told = self.client.priority_waiters.is_behind_local(waiter, turn.before)
            yield Sleep(waiter, max(0.0, self.remaining(BEHIND_SECONDS if told else self._pause(turn.ahead))))
            found = (yield from self._ask(place)) if self.member.has_ticket(place) else PriorityAnswer(None, False)
            if found is None:
                return False
            if found.ticket is None:
                self.client.require_open()  # closing took it away
                self.publish_row_lost(waiter.ticket)
                raise LockLost(
                    f"The request for {waiter.ticket.resource!r}, at place {place.position} of its line, was taken "
                    f"out while it waited (by an operator, or because the database was out of reach for too long); "
                    f"ask again",
                    resource=waiter.ticket.resource,
                )
            turn = found
        return True

    def _pause(self, ahead: int) -> float:
        """Return the pause until the next poll."""
        pause = min(max(SHORTEST, self.waited() * SHARE), LONGEST)
        return pause * min(ahead + 1, FAR) * random.uniform(0.8, 1.2)

    def _ask(self, place: Ticket | None) -> Effects[PriorityAnswer | None]:
        """Ask the database if the request is granted; None if another session keeps the gate for too long."""
        member, request = self.member, self.requests[0]
        requesting_id = self.requesting_id()

        def take_turn(session: Session, member_id: int) -> PriorityAnswer:
            self.sent = True  # (see _register)
            if self.rolled_back:
                return PriorityAnswer(None, False)
            member.begin_registration(self.uid)
            turn = session.acquire_by_priority(
                member_id, requesting_id, self.owner, self.uid, request, self.timeout == 0, place
            )
            # The call has the main connection, so no heartbeat comes in between.
            if turn.ticket is not None:
                self.tickets = [turn.ticket]
                member.add(self.tickets)
            if place is not None and (turn.granted or turn.ticket is None):
                member.discard([place])
            if self.rolled_back:
                self.forget_rows()
            return turn

        while True:
            try:
                turn: PriorityAnswer = yield Call("acquire", take_turn, self.retry_timeout)
                return turn
            except Busy:
                if self.remaining() <= 0:
                    yield from self.rollback("timeout")
                    return None
            finally:
                member.end_registration(self.uid)

    def _require_nothing_held(self) -> Effects[None]:
        """Refuse a caller that holds locks: no waiter may wait for one in a priority queue, as deadlocks are not found
        there.
        """
        held = self.client.registry.requests_of(self.caller.number)
        above = yield from self.client.parent_locks.find()
        if held or above:
            what = held[0].describe() if held else f"{above[-1].request.describe()}, by the 'sqlsem run' above it"
            resource = self.requests[0].resource
            raise ConfigurationError(
                f"{resource!r} is granted by priority, and this {self.caller.kind} holds {what}: those who wait by "
                f"priority must hold nothing, as no deadlock is found there; acquire {resource!r} first, or only try "
                f"for it (blocking=False)",
                resource=resource,
            )

    def _publish_waiting(self, waiter: Waiter) -> Effects[None]:
        bus, resource = self.client.event_bus, waiter.ticket.resource
        if not bus.has_subscribers(Waiting.name, logging.INFO):
            return
        try:
            entries = yield Call("look", lambda session, _: session.entries(resource), 0.0)
            waiter.behind = Behind.of(entries, waiter.request, LAST)
        except SqlsemError as exc:
            log.debug("Cannot see who holds it: %s", exc)
        about = bus.common_fields(waiter.request, waiter.position, self.caller)
        bus.publish(Waiting(**about, behind=waiter.behind), self.trace)


def acquisition_class(requests: Sequence[Request]) -> type[Acquisition[Any]]:
    """Return the class that acquires these requests."""
    for request in requests:  # (At every lock: faster than `any`.)
        if request.priority is not None:
            return PriorityAcquisition
    return Acquisition
