"""Detects deadlocks, for as long as a waiter of this process may be part of one.

Each process searches for the deadlocks in which its member made the youngest request. That request is the victim: it
raises `Deadlock`. The search relies on the rows in the database, and runs on a connection of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sqlsem.client.monitors import parent_locks
from sqlsem.client.monitors.monitor import Monitor
from sqlsem.engines.protocol import Capability
from sqlsem.values.locks import Ticket, monotonic

if TYPE_CHECKING:
    from sqlsem.client.connection.membership import Membership
    from sqlsem.client.connection.wait_pool import WaitConnectionPool
    from sqlsem.client.held.registry import GrantRegistry
    from sqlsem.engines.base import Session
    from sqlsem.values.deadlocks import Found

__all__ = ["DeadlockMonitor"]


class DeadlockMonitor(Monitor):
    """The operations that may be in a deadlock, and a thread that searches while there are any."""

    name = "sqlsem-deadlocks"
    purpose = "deadlocks"

    def __init__(
        self,
        member: Membership,
        registry: GrantRegistry,
        wait_pool: WaitConnectionPool,
        parent_locks: parent_locks.ParentLocks,
    ) -> None:
        super().__init__(member, wait_pool)
        self._registry = registry
        self._parent_locks = parent_locks
        #: The functions that make an operation raise `Deadlock`, by each position at which the operation waits.
        self._candidates: dict[int, Callable[[Found], None]] = {}

    def add(self, choose_as_victim: Callable[[Found], None], tickets: Sequence[Ticket], number: int) -> bool:
        """Add an operation of the thread or task with this number. Return False if it cannot be part of a deadlock,
        because its caller has no other request.
        """
        if len(tickets) < 2 and not self._registry.requests_of(number) and not self._parent_locks.held:
            return False
        with self.state_lock:
            self._candidates.update((ticket.position, choose_as_victim) for ticket in tickets)
            self.begin()
        return True

    def remove(self, tickets: Sequence[Ticket]) -> None:
        """Remove the operation that waits at these positions. Idempotent."""
        with self.state_lock:
            for ticket in tickets:
                self._candidates.pop(ticket.position, None)

    def interval(self) -> float:
        return self.member.timing.deadlock_check

    def is_needed(self) -> bool:
        """Return True while an operation may be in a deadlock."""
        return bool(self._candidates)

    def check(self, session: Session) -> None:
        """Search for deadlocks in which our member made the youngest request, and choose that request as the victim."""
        member = self.member
        deadline = monotonic() + member.timing.deadlock_recheck
        chosen: set[int] = set()
        while self._candidates and member.member_id is not None and monotonic() < deadline:
            found = session.find_deadlock(member.member_id) if member.engine.has(Capability.DEADLOCKS) else None
            if found is not None and self._has_unknown_row(found):
                member.request_cleanup()
                return
            if found is None and self._parent_locks.held:
                found = parent_locks.find_deadlock(session, member.member_id)
            if found is None:
                return
            with self.state_lock:
                choose_as_victim = self._candidates.get(found.victim)
            if choose_as_victim is None:  # its wait is just beginning or ending
                return
            # The search finds a further deadlock only when the victim has withdrawn its request.
            if found.victim not in chosen:
                chosen.add(found.victim)
                choose_as_victim(found)
            if member.closing.wait(0.02):
                return

    def _has_unknown_row(self, found: Found) -> bool:
        """Return True if the deadlock contains a row of our member that this process does not know. An interrupted call
        left that row, and the next heartbeat removes it. So this is no deadlock: the row may even be an earlier one of
        the thread that waits.
        """
        member = self.member
        ours = [step for step in found.steps if step.member == member.member_id]
        with self.state_lock:
            return any(position not in member.tickets for step in ours for position in (step.ahead, step.position))
