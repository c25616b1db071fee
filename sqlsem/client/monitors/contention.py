"""Sets a grant's `contended` event when a request waits behind the grant.

A request of this process sets the event at once; for those of other processes a thread reads the queues every second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlsem.client.monitors.monitor import Monitor
from sqlsem.engines.priorities import is_priority_entry, priority_queue
from sqlsem.util.record import record
from sqlsem.values.locks import UPGRADE, Entry, Request

if TYPE_CHECKING:
    from sqlsem.client.connection.membership import Membership
    from sqlsem.client.connection.wait_pool import WaitConnectionPool
    from sqlsem.client.held.registry import GrantState
    from sqlsem.engines.base import Session

__all__ = ["ContentionMonitor"]

#: Up to this many resources are read one by one; more are read in one statement.
MAX_RESOURCES = 4


@record
class _Watched:
    """A grant with a contention event. Any thread may call ``set``, which sets the event."""

    state: GrantState
    is_set: Callable[[], bool]
    set: Callable[[], object]

    @property
    def is_held(self) -> bool:
        return not self.state.released and self.state.why_lost is None

    def is_ahead_of(self, resource: str, position: int, upgrades: bool) -> bool:
        """Return True if the row at ``position`` waits for one of this grant. (An upgrade waits for all others.)"""
        return any(
            ticket.resource == resource and (ticket.position < position or (upgrades and ticket.position != position))
            for ticket in self.state.tickets
        )

    def yields_to(self, resource: str, priority: int) -> bool:
        """Return True if a request of this priority has at least the priority of this grant."""
        return any(
            request.resource == resource and request.priority is not None and request.priority <= priority
            for request in self.state.requests
        )


class ContentionMonitor(Monitor):
    """The held grants with a contention event, and a thread that reads the queues while some event is not set."""

    name = "sqlsem-contention"
    purpose = "requests behind this process"

    def __init__(self, member: Membership, wait_pool: WaitConnectionPool) -> None:
        super().__init__(member, wait_pool)
        self._watched: list[_Watched] = []

    def interval(self) -> float:
        return self.member.timing.contention_check

    def add(self, state: GrantState, is_set: Callable[[], bool], set_: Callable[[], object]) -> None:
        """Watch a grant from now on."""
        with self.state_lock:
            self._watched.append(_Watched(state, is_set, set_))
            self.begin()

    def request_arrived(self, resource: str, position: int, upgrades: bool = False) -> None:
        """Set the events of the grants for which a request of this process begins to wait."""
        if self._watched:
            for grant in list(self._watched):
                if grant.is_held and grant.is_ahead_of(resource, position, upgrades):
                    grant.set()

    def priority_request_arrived(self, request: Request) -> None:
        """Set the events of the grants for which a request of this process begins to wait by priority."""
        for grant in list(self._watched):
            if grant.is_held and request.priority is not None and grant.yields_to(request.resource, request.priority):
                grant.set()

    def is_needed(self) -> bool:
        """Return True while a watched grant is held."""
        self._watched = [grant for grant in self._watched if grant.is_held]
        return bool(self._watched)

    def check(self, session: Session) -> None:
        """Set the events of the grants for which requests of other processes wait."""
        watched = [grant for grant in list(self._watched) if grant.is_held and not grant.is_set()]
        resources = {ticket.resource for grant in watched for ticket in grant.state.tickets}
        if not resources:
            return
        entries: list[Entry] = []
        for resource in [None] if len(resources) > MAX_RESOURCES else resources:
            entries += session.entries(resource)
        prioritized = {
            request.resource for grant in watched for request in grant.state.requests if request.priority is not None
        }
        for resource in prioritized:
            for entry in filter(is_priority_entry, session.entries(priority_queue(resource))):
                for grant in watched:
                    if grant.yields_to(resource, entry.weight - 1):  # (The weight is the priority plus 1.)
                        grant.set()
        waiting = [
            entry for entry in entries if entry.state == "waits" or (entry.state == "holds" and entry.access == UPGRADE)
        ]
        for grant in watched:
            if any(grant.is_ahead_of(entry.resource, entry.position, entry.access == UPGRADE) for entry in waiting):
                grant.set()
