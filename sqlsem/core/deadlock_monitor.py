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

#: Seconds that a deadlock's victim gets to give up, before it is looked for further ones.
SETTLE_SECONDS = 0.5


class DeadlockCandidate(Protocol):
    """Somebody of ours who waits while others may wait for it."""

    def choose_as_victim(self, deadlock: Found) -> None:
        """Have its request raise `Deadlock`."""


class DeadlockMonitor(Monitor):
    """The waiters that may be in a deadlock, and a thread that checks while there are any."""

    name = "sqlsem-lookout"
    every = 0.75
    what = "deadlocks"

    def __init__(
        self, member: Membership, registry: GrantRegistry, wait_pool: WaitConnectionPool, above: nesting.ParentLocks
    ) -> None:
        super().__init__(member, wait_pool)
        self._registry = registry
        self._above = above
        self._suspects: dict[int, DeadlockCandidate] = {}  # by the positions that it waits at

    def add(self, suspect: DeadlockCandidate, tickets: Sequence[Ticket], number: int) -> bool:
        """The thread or task of that number begins to wait. False when that can be no part of a deadlock, as it has
        nothing else.
        """
        if len(tickets) < 2 and not self._registry.requests_of(number) and not self._above.held:
            return False
        with self.state_lock:
            self._suspects.update((ticket.position, suspect) for ticket in tickets)
            self.begin()
        return True

    def remove(self, tickets: Sequence[Ticket]) -> None:
        """It waits no more. May be repeated."""
        with self.state_lock:
            for ticket in tickets:
                self._suspects.pop(ticket.position, None)

    def is_needed(self) -> bool:
        """Return True if a waiter may be in a deadlock."""
        return bool(self._suspects)

    def check(self, session: Session) -> None:
        """Ask for deadlocks whose youngest request is ours, and tell who made it."""
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
            if suspect is None:  # it is just beginning or ending
                return
            # There may be another one, which is found when this one has been withdrawn.
            if found.victim not in told:
                told.add(found.victim)
                suspect.choose_as_victim(found)
            if member.closing.wait(0.02):
                return

    def _forgotten(self, found: Found) -> bool:
        """Whether a row of ours in it is one that nobody here knows: a call that was broken off left it, and a ping is
        to remove it. Then there is no deadlock: the same thread may well wait behind what it has given up.
        """
        member = self.member
        ours = [step for step in found.steps if step.member == member.member_id]
        with self.state_lock:
            return any(position not in member.tickets for step in ours for position in (step.ahead, step.position))
