"""The grants of this process, by thread or task and by resource.

A grant leaves the registry exactly once: when it is released, transferred (handed over) or marked as lost. An interrupt
between any two instructions leaves the registry correct: acquisitions and releases are tokens in a set, and adding or
removing a token twice is harmless. The registry relies on the membership for the rows in the database.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from sqlsem.client.callers import Caller, ours
from sqlsem.util.permits import Permit
from sqlsem.util.threads import call_and_log
from sqlsem.values.errors import Deadlock, LockLost, NotHeld
from sqlsem.values.events import Behind, Granted, Lost, Released, meets
from sqlsem.values.locks import READ, WRITE, Request, Ticket, monotonic

if TYPE_CHECKING:
    from sqlsem.client.connection.membership import Membership
    from sqlsem.client.event_bus import EventBus, TraceContext
    from sqlsem.client.waiters.queues import Waiter

__all__ = ["BaseGrant", "GrantRegistry", "GrantState", "HeldGrant", "LostCallback", "ReleaseToken", "release_later"]

#: At most this many grants of this process are examined to find the grants that block another of its requests.
MAX_AHEAD = 64

#: Called with the grant, from another thread, when the lock is lost.
LostCallback = Callable[[Any], object]


class CommitRelease(Protocol):
    """A release of a grant by the commit of the caller's transaction; see `ReleaseOnCommit`."""

    @property
    def is_under_way(self) -> bool: ...
    def stop(self) -> threading.Event | None: ...
    def reenter(self, token: Permit) -> bool: ...
    def add_marker(self, marker: str) -> None: ...


class ReleaseToken(Permit):
    """The token of a release by `Grant.release`. It ends one of the grant's acquisitions, no matter which."""

    __slots__ = ()


class GrantState:
    """The state of a grant: its rows, its acquisitions, and whether it was released or lost.

    Acquisitions are not counted: an interrupt inside ``count += 1`` would leave the count unknown. Each acquisition
    adds a token, each release through the grant a `ReleaseToken`. Adding or removing a token is idempotent.
    """

    __slots__ = (
        "_releases",
        "acquisitions",
        "caller",
        "commit_release",
        "conversions",
        "converting",
        "first_token",
        "handed_over",
        "is_published",
        "is_unowned",
        "loss_callbacks",
        "on_lost",
        "pid",
        "registry",
        "released",
        "requests",
        "since",
        "tickets",
        "trace",
        "why_lost",
    )

    def __init__(
        self,
        registry: GrantRegistry,
        requests: Sequence[Request],
        tickets: Sequence[Ticket],
        caller: Caller,
        on_lost: LostCallback | None,
        since: float,
        trace: TraceContext | None = None,
    ) -> None:
        self.registry = registry
        self.requests = tuple(requests)
        self.tickets = tuple(tickets)
        self.caller = caller
        self.pid = os.getpid()
        self.first_token = Permit()  # the token of the first acquisition
        #: The tokens of the acquisitions, the latest last, until each is ended by its own token. (A release token may
        #: end one unnoticed.)
        self.acquisitions: dict[Permit, None] = {self.first_token: None}
        self._releases: set[Permit] = set()
        self.since = since  # when it was granted (`monotonic`)
        self.trace = trace
        self.is_published = False  # True after its event `granted`, until its event `released` or `lost`
        self.released = False
        self.handed_over = False  # True implies released
        self.is_unowned = False  # True: any thread may release it through its lock
        self.converting = False
        self.conversions = 0  # attempts to upgrade or downgrade
        self.commit_release: CommitRelease | None = None
        self.why_lost: str | None = None
        self.loss_callbacks: list[Callable[[], object]] = []  # called under the state lock, so they must not block
        self.on_lost = on_lost

    @property
    def resource(self) -> str:
        """The name of the (first) resource."""
        return self.tickets[0].resource

    @property
    def depth(self) -> int:
        """The number of acquisitions that have not ended; 0: it is being released."""
        return len(self.acquisitions) - len(self._releases)

    def reenter(self, token: Permit) -> bool:
        """Add an acquisition with this token. Return False if the last one has ended."""
        with self.registry.state_lock:
            is_held = self.depth > 0
            if is_held:
                self.acquisitions[token] = None
            return is_held

    def end_acquisition(self, by: Permit) -> bool:
        """End the acquisition with this token; if ``by`` is a `ReleaseToken`, any one of the acquisitions. Return True
        if none is left. Idempotent.
        """
        with self.registry.state_lock:
            if not isinstance(by, ReleaseToken):
                self.acquisitions.pop(by, None)
            elif self.depth > 0:
                self._releases.add(by)
            return len(self.acquisitions) <= len(self._releases)

    def release_token_for(self, caller: Caller) -> Permit:
        """Return the token for `Grant.release`. For the thread or task that holds the grant, that is the token of the
        latest acquisition, so that the outer blocks keep the lock. For any other caller it is a new `ReleaseToken`.
        """
        with self.registry.state_lock:
            if caller.number == self.caller.number and self.acquisitions and not self._releases:
                return next(reversed(self.acquisitions))
        return ReleaseToken()

    @property
    def ended_early(self) -> bool:
        """True if the grant was released or handed over, and not lost: the end of its block then does nothing. (False
        while a commit releases it: the end of the block waits for that.)
        """
        ended = self.released and self.why_lost is None
        return ended and (self.commit_release is None or not self.commit_release.is_under_way)

    def set_access(self, access: str) -> None:
        """Record that a conversion changed the access."""
        self.requests = (dataclasses.replace(self.requests[0], access=access),)

    def mark_lost(self, why: str) -> None:
        """Record that the lock is lost, and call `loss_callbacks`."""
        self.why_lost = why
        # (Read after the reason is set: code that adds a callback first adds it, and then reads the reason.)
        for callback in tuple(self.loss_callbacks):
            call_and_log("A callback for the loss of a lock", callback)  # an error must not stop the next callback

    def require_held(self) -> None:
        """Raise `NotHeld` or `LockLost` unless the grant is held."""
        if self.pid != os.getpid():
            raise NotHeld(
                f"The lock on {self.resource!r} was acquired by process {self.pid}, before it forked; "
                f"acquire one in this process",
                resource=self.resource,
                code="other-process",
            )
        if self.why_lost is not None:
            raise LockLost(
                f"The lock on {self.resource!r} at position {self.tickets[0].position} is lost: {self.why_lost}; what "
                f"was done since may have run beside another holder",
                resource=self.resource,
            )
        if self.handed_over:
            raise NotHeld(
                f"The lock on {self.resource!r} was handed over; the holder of the token can adopt it (sqlsem.adopt)",
                resource=self.resource,
                code="handover",
            )
        if self.released:
            raise NotHeld(f"The lock on {self.resource!r} has been released", resource=self.resource)

    def __repr__(self) -> str:
        state = "lost" if self.why_lost else "held"
        if self.released:
            state = "handed over" if self.handed_over else "released"
        return f"<Grant {self.resource!r} at {self.tickets[0].position}, {state}>"


class BaseGrant:
    """The base of the grants of both APIs; its attributes are those of `sqlsem.Grant`."""

    #: The `DatabaseClient`. (Its class is in a higher layer.)
    client: Any

    def __init__(self, client: Any, state: GrantState, waited: float) -> None:
        #: For the package; programs have no use for these two.
        self.client = client
        self.state = state
        first = state.tickets[0]
        self.resource = first.resource
        self.position = self.fence = first.position
        self.waited = waited
        #: The grants of rates that were taken together with the lock, by name.
        self.rates: Mapping[str, Any] = {}

    @property
    def positions(self) -> dict[str, int]:
        """The position of each resource."""
        return {ticket.resource: ticket.position for ticket in self.state.tickets}

    def __reduce__(self) -> str:
        raise NotHeld(
            f"{self!r} belongs to this process and cannot be pickled; acquire the lock in the process that needs it",
            resource=self.resource,
            code="other-process",
        )

    def __repr__(self) -> str:
        return repr(self.state)


G = TypeVar("G", bound=BaseGrant)


class HeldGrant(Generic[G]):
    """A grant with the token of one acquisition; kept by the code that acquired it."""

    __slots__ = ("grant", "token")

    def __init__(self, grant: G, token: Permit | None = None) -> None:
        self.grant = grant
        self.token = token or Permit()

    @property
    def ended(self) -> bool:
        """True if this acquisition was released."""
        return self.token not in self.grant.state.acquisitions


def release_later(grant: BaseGrant, by: Permit) -> None:
    """End an acquisition, and let the heartbeat release the lock with the last one. Does not block; idempotent. (No-op
    in a forked child: the grant is the parent's.)
    """
    state = grant.state
    if state.pid == os.getpid() and state.end_acquisition(by) and not state.released:
        state.registry.release_later(grant)


class GrantRegistry:
    """The grants of this process that are neither released nor lost."""

    def __init__(self, member: Membership, bus: EventBus) -> None:
        self._member = member
        self._event_bus = bus
        self.state_lock = member.state_lock
        self._grants: set[BaseGrant] = set()
        member.held.append(self._grants)
        #: The grants of each thread or task, by its number and by resource, until they are released.
        self._by_caller: dict[int, dict[str, list[BaseGrant]]] = {}
        #: The grants by resource and by position.
        self._by_resource: dict[str, dict[int, BaseGrant]] = {}

    def __bool__(self) -> bool:
        return bool(self._grants)

    def grants(self) -> list[BaseGrant]:
        """Return the grants that are held."""
        with self.state_lock:
            return list(self._grants)

    def requests_of(self, number: int) -> list[Request]:
        """Return the requests whose rows the thread or task with this number has, those of lost grants included."""
        with self.state_lock:
            return [
                request
                for resource, grants in self._by_caller.get(number, {}).items()
                for grant in grants
                if grant.state.why_lost is None or self._has_row(grant, resource)
                for request in grant.state.requests
                if request.resource == resource
            ]

    def _has_row(self, grant: BaseGrant, resource: str) -> bool:
        """Return True if the grant still has its row of a resource. A lost grant of several resources keeps the rows
        that were not removed until its holder releases it: nothing else ends the holder's work.
        """
        return any(ticket.resource == resource and self._member.has_ticket(ticket) for ticket in grant.state.tickets)

    def _held_of(self, caller: Caller, resource: str) -> list[tuple[BaseGrant, Request]]:
        """Return the grants and requests of a thread or task for a resource, the latest first. Lost grants are among
        them while they have a row of the resource.
        """
        held = self._by_caller.get(caller.number)
        if not held:
            return []
        return [
            (grant, next(request for request in grant.state.requests if request.resource == resource))
            for grant in reversed(held.get(resource, ()))
            if grant.state.why_lost is None or self._has_row(grant, resource)
        ]

    # -- acquiring ----------------------------------------------------------------------------------------------

    def find_reentrant(self, requests: Sequence[Request], caller: Caller) -> list[BaseGrant]:
        """Return the caller's grants that already cover the requests. (Not a grant that any thread or task may release:
        the caller could lose it.)
        """
        if len(requests) != 1:
            return []
        (request,) = requests
        return [
            grant
            for grant, held in self._held_of(caller, request.resource)
            if held.covers(request) and not grant.state.is_unowned and grant.state.why_lost is None
        ]

    def reenter(self, held: HeldGrant[Any]) -> bool:
        """Add the acquisition ``held`` to its grant. Return False if the grant's last acquisition has ended. (The
        caller stores ``held`` before this call, and ends it after an interrupt.)
        """
        state: GrantState = held.grant.state
        if state.commit_release is not None:
            return state.commit_release.reenter(held.token)
        return state.reenter(held.token)

    def check_conflicts(
        self, requests: Sequence[Request], caller: Caller, reentrant: bool, timeout: float | None
    ) -> bool:
        """Check if a grant of the caller itself blocks the requests. If so, return True if ``timeout`` is 0, and else
        raise `Deadlock`, or `LockLost` for a lost grant. (A limit may have room for a further grant of the same caller;
        if it has none, the deadlock monitor finds out.)
        """
        if caller.number not in self._by_caller:  # the usual case: the caller holds nothing
            return False
        for request in requests:
            for grant, held in self._held_of(caller, request.resource):
                if not held.excludes(request):
                    continue
                if timeout == 0:
                    return True
                if grant.state.why_lost is not None:
                    if lost := self.lost_rows_of(caller):  # (else it was released just now)
                        raise LockLost(lost, resource=request.resource)
                    continue
                remedy = "release it first, take what is needed in one go (weight=…, all_of), or pass reentrant=True"
                if held.access == READ and request.access == WRITE:
                    remedy = "make it the writer (grant.upgrade()), or release it first"
                elif reentrant:
                    remedy += " (reentrant=True cannot enlarge a lock that is held)"
                raise Deadlock(
                    f"This {caller.kind} already holds {held.describe()} (position {grant.positions[request.resource]})"
                    f" and would wait for itself; {remedy}",
                    resource=request.resource,
                )
        return False

    def lost_rows_of(self, caller: Caller) -> str:
        """Return a description of the lost grants of a thread or task that still have rows, with the remedy; empty if
        there are none.
        """
        with self.state_lock:
            grants = dict.fromkeys(
                grant
                for resource, grants in self._by_caller.get(caller.number, {}).items()
                for grant in grants
                if grant.state.why_lost is not None and self._has_row(grant, resource)
            )
        return "; ".join(
            f"The lock of this {caller.kind} on {', '.join(map(repr, grant.positions))} is lost: "
            f"{grant.state.why_lost}. Its other rows stay until this {caller.kind} releases it, and block further "
            f"requests of its own; leave its block, or release it, and acquire it again"
            for grant in grants
        )

    def requests_ahead(self, ticket: Ticket) -> list[Request]:
        """Return the requests of this process that hold the ticket's resource at positions ahead of it. Only the first
        `MAX_AHEAD` grants are examined.
        """
        with self.state_lock:
            return [
                request
                for position, grant in itertools.islice(self._by_resource.get(ticket.resource, {}).items(), MAX_AHEAD)
                if position < ticket.position
                for request in grant.state.requests
                if request.resource == ticket.resource
            ]

    def blocker_of(self, request: Request, position: int) -> Behind | None:
        """Return a grant of this process that blocks a request at this position, or takes part of its limit."""
        with self.state_lock:
            for row, grant in itertools.islice(self._by_resource.get(request.resource, {}).items(), MAX_AHEAD):
                state = grant.state
                for held, ticket in zip(state.requests, state.tickets, strict=True):
                    if ticket.position == row and row < position and meets(request, held.access):
                        return ours(held, ticket, "holds", monotonic() - state.since, state.caller)
        return None

    def add(self, grant: BaseGrant) -> None:
        """Add a new grant."""
        with self.state_lock:
            held = self._by_caller.setdefault(grant.state.caller.number, {})
            for ticket in grant.state.tickets:
                held.setdefault(ticket.resource, []).append(grant)
            self._grants.add(grant)
            for ticket in grant.state.tickets:
                self._by_resource.setdefault(ticket.resource, {})[ticket.position] = grant

    # -- releasing ----------------------------------------------------------------------------------------------

    def release_later(self, grant: BaseGrant) -> None:
        """Let the next heartbeat release the rows, because a release was interrupted or must not block."""
        self.discard(grant)
        if self._event_bus.has_subscribers("released", logging.DEBUG):
            self.publish_released(grant.state)
        self._member.request_cleanup()
        self._member.discard(grant.state.tickets)

    def transfer(self, grant: BaseGrant) -> None:
        """Remove a grant that was handed over to another process."""
        grant.state.handed_over = True
        self.discard(grant)

    def reassign(self, grant: BaseGrant, caller: Caller) -> None:
        """Make another thread or task of this process the holder."""
        with self.state_lock:
            self._remove_from_caller(grant)
            grant.state.caller = caller
            held = self._by_caller.setdefault(caller.number, {})
            for ticket in grant.state.tickets:
                held.setdefault(ticket.resource, []).append(grant)

    def discard(self, grant: BaseGrant) -> None:
        """Remove a grant from the registry; its rows in the database are left to the caller."""
        with self.state_lock:
            grant.state.released = True
            self._remove(grant)
            self._remove_from_caller(grant)

    def _remove_from_caller(self, grant: BaseGrant) -> None:
        """Remove the grant from the grants of its thread or task. The caller holds the state lock."""
        number = grant.state.caller.number
        held = self._by_caller.get(number, {})
        for ticket in grant.state.tickets:
            grants = held.get(ticket.resource, [])
            if grant in grants:
                grants.remove(grant)
            if not grants:
                held.pop(ticket.resource, None)
        if not held:
            self._by_caller.pop(number, None)

    # -- events -------------------------------------------------------------------------------------------------

    def publish_granted(self, state: GrantState, waited: float, waiters: Mapping[int, Waiter]) -> None:
        """Publish `granted` for each row. ``waiters``: the rows that had to wait, by position."""
        for request, ticket in zip(state.requests, state.tickets, strict=True):
            waiter = waiters.get(ticket.position)
            fields = self._event_bus.common_fields(request, ticket.position, state.caller)
            behind = None if waiter is None else waiter.behind
            event = Granted(**fields, waited=waited, at_once=not waiters, behind=behind)
            self._event_bus.publish(event, state.trace)

    def publish_released(self, state: GrantState) -> None:
        """Publish `released`, unless the end of the grant was published before."""
        if state.is_published and state.why_lost is None:
            state.is_published = False
            self._publish(Released, state, held=monotonic() - state.since)

    def close(self, why: str) -> None:
        """Mark all grants lost, because the member was deregistered, and publish `released` for them. A later use of
        one raises an error with the reason ``why``.
        """
        for grant in self.mark_lost(None, why):
            if grant.state.is_published:
                grant.state.is_published = False
                self._publish(Released, grant.state, held=monotonic() - grant.state.since)

    def publish_lost(self, state: GrantState) -> None:
        """Publish `lost`."""
        state.is_published = False
        self._publish(Lost, state, held=monotonic() - state.since, why=state.why_lost)

    def _publish(self, event: type[Released | Lost], state: GrantState, **more: Any) -> None:
        for request, ticket in zip(state.requests, state.tickets, strict=True):
            fields = self._event_bus.common_fields(request, ticket.position, state.caller)
            self._event_bus.publish(event(**fields, **more), state.trace)

    # -- losses -------------------------------------------------------------------------------------------------

    def mark_lost(self, positions: Iterable[int] | None, why: str) -> list[BaseGrant]:
        """Mark the grants with these rows (None: all grants) as lost, and return them."""
        with self.state_lock:
            missing = None if positions is None else set(positions)
            lost = [
                grant
                for grant in self._grants
                if missing is None or any(ticket.position in missing for ticket in grant.state.tickets)
            ]
            for grant in lost:
                grant.state.mark_lost(why)
                self._remove(grant)
        return lost

    def _remove(self, grant: BaseGrant) -> None:
        """Remove a grant that is no longer held. The caller holds the state lock."""
        self._grants.discard(grant)
        for ticket in grant.state.tickets:
            grants = self._by_resource.get(ticket.resource, {})
            grants.pop(ticket.position, None)
            if not grants:
                self._by_resource.pop(ticket.resource, None)
