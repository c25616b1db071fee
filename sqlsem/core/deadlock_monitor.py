"""Detects deadlocks, for as long as a waiter of this process may be part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sqlsem.core import nesting
from sqlsem.core.grant_registry import GrantRegistry
from sqlsem.core.membership import Membership
from sqlsem.core.monitor import Monitor
from sqlsem.core.wait_pool import WaitConnectionPool
from sqlsem.deadlocks import Found
from sqlsem.engines.base import Session
from sqlsem.engines.protocol import DeadlockSession
from sqlsem.model import Ticket, monotonic

__all__ = ["DeadlockCandidate", "DeadlockMonitor"]

#: Seconds that one check takes at most: a victim withdraws its request, and the check searches again.
SETTLE_SECONDS = 0.5


class DeadlockCandidate(Protocol):
    """A waiter of this process behind which other requests may wait."""

    def choose_as_victim(self, deadlock: Found) -> None:
        """Make its request raise `Deadlock`."""


class DeadlockMonitor(Monitor):
    """The waiters that may be in a deadlock, and a thread that checks while there are any."""

    name = "sqlsem-deadlocks"
    every = 0.75
    what = "deadlocks"

    def __init__(
        self, member: Membership, registry: GrantRegistry, wait_pool: WaitConnectionPool, above: nesting.ParentLocks
    ) -> None:
        super().__init__(member, wait_pool)
        self._registry = registry
        self._above = above
        self._suspects: dict[int, DeadlockCandidate] = {}  # by the positions at which each waits

    def add(self, suspect: DeadlockCandidate, tickets: Sequence[Ticket], number: int) -> bool:
        """Add a waiter, the thread or task of that number. Return False if it cannot be part of a deadlock, as it has
        no other requests.
        """
        if len(tickets) < 2 and not self._registry.requests_of(number) and not self._above.held:
            return False
        with self.state_lock:
            self._suspects.update((ticket.position, suspect) for ticket in tickets)
            self.begin()
        return True

    def remove(self, tickets: Sequence[Ticket]) -> None:
        """Remove the waiter at these positions. Idempotent."""
        with self.state_lock:
            for ticket in tickets:
                self._suspects.pop(ticket.position, None)

    def is_needed(self) -> bool:
        """Return True if a waiter may be in a deadlock."""
        return bool(self._suspects)

    def check(self, session: Session) -> None:
        """Search for deadlocks in which our member made the youngest request, and choose that waiter as the victim."""
        member = self.member
        deadline = monotonic() + SETTLE_SECONDS
        told: set[int] = set()
        while self._suspects and member.member_id is not None and monotonic() < deadline:
            found = session.find_deadlock(member.member_id) if member.engine.has(DeadlockSession) else None
            if found is not None and self._forgotten(found):
                member.request_cleanup()
                return
            if found is None and self._above.held:
                found = nesting.find_deadlock(session, member.member_id)
            if found is None:
                return
            with self.state_lock:
                suspect = self._suspects.get(found.victim)
            if suspect is None:  # its wait is just beginning or ending
                return
            # The search finds a further deadlock only when the victim has withdrawn its request.
            if found.victim not in told:
                told.add(found.victim)
                suspect.choose_as_victim(found)
            if member.closing.wait(0.02):
                return

    def _forgotten(self, found: Found) -> bool:
        """Return True if the deadlock contains a row of our member that this process does not know. An interrupted call
        left that row, and the next heartbeat removes it. There is no deadlock then: the thread that waits may have
        given up that row itself.
        """
        member = self.member
        ours = [step for step in found.steps if step.member == member.member_id]
        with self.state_lock:
            return any(position not in member.tickets for step in ours for position in (step.ahead, step.position))
