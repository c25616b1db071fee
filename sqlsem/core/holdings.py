"""What this process holds: its grants, by who has them and of what."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from sqlsem.core import shutdown
from sqlsem.core.callers import Caller, ours
from sqlsem.core.effects import Effects
from sqlsem.core.event_bus import EventBus, TraceContext
from sqlsem.core.membership import Membership
from sqlsem.core.permits import Permit
from sqlsem.core.threads import call_out, voice
from sqlsem.core.waiter_queues import Waiter
from sqlsem.errors import Deadlock, LockLost, NotHeld, Unavailable
from sqlsem.events import Behind, Granted, Lost, Released, meets
from sqlsem.model import READ, WRITE, Request, Ticket, monotonic

__all__ = ["BaseGrant", "Exit", "Hold", "Holding", "Holdings", "LostCallback", "abandon"]

log = voice

#: So many of our own grants on one resource are looked at to know whether they keep others of ours out.
MOST_AHEAD = 64

#: Called with the grant, from another thread, when the lock is lost.
LostCallback = Callable[[Any], object]


class Departing(Protocol):
    """What may give a grant back by itself."""

    def settle(self) -> bool:
        """Whether it has; if not, it does not any more."""

    def again(self, token: Permit) -> bool:
        """The grant is had once more, by this hold, unless it has left; it stays until that has ended."""

    def also(self, word: str) -> None:
        """Do so by this word, too."""


class Exit(Permit):
    """A release through the grant itself: it ends one of the grant's holds, whichever."""

    __slots__ = ()


class Holding:
    """What stands behind a grant: its rows, and what has become of them.

    How often it is had is no number that goes up and down: whoever is interrupted there does not know whether it went.
    Each acquisition has a token, its hold, and each release through the grant has one, its exit. To enter a hold, to
    end it, and to exit is one step each, and changes nothing when it is repeated.
    """

    __slots__ = (
        "_exits",
        "_holds",
        "caller",
        "conversions",
        "converting",
        "departure",
        "first",
        "handed_over",
        "is_loose",
        "on_lost",
        "pid",
        "registry",
        "released",
        "requests",
        "since",
        "tickets",
        "told",
        "trace",
        "when_lost",
        "why_lost",
    )

    def __init__(
        self,
        registry: Holdings,
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
        self.first = Permit()  # the hold of who acquired it
        self._holds: dict[Permit, None] = {self.first: None}  # the latest last
        self._exits: set[Permit] = set()
        self.since = since  # when it was granted (`monotonic`)
        self.trace = trace
        self.told = False  # that it was granted, and not yet that it has ended
        self.released = False
        self.handed_over = False  # to somebody else: then it is released, too
        self.is_loose = False  # anybody may release it, through its lock
        self.converting = False
        self.conversions = 0  # grows with each attempt at one
        self.departure: Departing | None = None  # with a transaction of the caller's
        self.why_lost: str | None = None
        self.when_lost: list[Callable[[], object]] = []  # must not block: called under the lock of all states
        self.on_lost = on_lost

    @property
    def resource(self) -> str:
        """Its resource, or the first one."""
        return self.tickets[0].resource

    @property
    def depth(self) -> int:
        """How often it is had; 0: its last hold has ended, and it is being given back."""
        return len(self._holds) - len(self._exits)

    def has(self, hold: Permit) -> bool:
        """Whether that is a hold of it, which has not ended by itself."""
        return hold in self._holds

    def enter(self, hold: Permit) -> bool:
        """Whether it is had once more, by this hold; not when the last one has ended."""
        with self.registry.state_lock:
            there = self.depth > 0
            if there:
                self._holds[hold] = None
            return there

    def end(self, by: Permit) -> bool:
        """This hold ends, or one of them by this exit. Whether nobody has it any more. Repeatable."""
        with self.registry.state_lock:
            if not isinstance(by, Exit):
                self._holds.pop(by, None)
            elif self.depth > 0:
                self._exits.add(by)
            return self.depth <= 0

    def exit_of(self, caller: Caller) -> Permit:
        """Return the token by which a release through the grant ends a hold: the latest one for the thread or task that
        holds it, so that the blocks around the latest one go on holding; for any other thread or task a new `Exit`.
        """
        with self.registry.state_lock:
            if caller.number == self.caller.number and self._holds and not self._exits:
                return next(reversed(self._holds))
        return Exit()

    @property
    def is_given_back(self) -> bool:
        """True when it was released or handed over, and not lost before: the end of a block has nothing to do."""
        return self.released and self.why_lost is None

    def set_access(self, access: str) -> None:
        """What it is from now on."""
        self.requests = (dataclasses.replace(self.requests[0], access=access),)

    def lose(self, why: str) -> None:
        """It is ours no more."""
        self.why_lost = why
        for call in tuple(self.when_lost):  # read after the reason was set; who adds one does it the other way round
            call_out("What was to be told of a loss", call)  # none shall keep the next one from being told

    def require(self) -> None:
        """Raise `NotHeld` or `LockLost` unless it is held."""
        if self.pid != os.getpid():
            raise NotHeld(
                f"The lock on {self.resource!r} was acquired by process {self.pid}, before it forked; "
                f"acquire one in this process",
                resource=self.resource,
            )
        if self.why_lost is not None:
            raise LockLost(
                f"The lock on {self.resource!r} at position {self.tickets[0].position} is lost: {self.why_lost}; what "
                f"was done since may have run beside another holder",
                resource=self.resource,
            )
        if self.handed_over:
            raise NotHeld(
                f"The lock on {self.resource!r} was handed over; who has the token has it (sqlsem.adopt)",
                resource=self.resource,
            )
        if self.released:
            raise NotHeld(f"The lock on {self.resource!r} has been released", resource=self.resource)

    def __repr__(self) -> str:
        state = "lost" if self.why_lost else "held"
        if self.released:
            state = "handed over" if self.handed_over else "released"
        return f"<Grant {self.resource!r} at {self.tickets[0].position}, {state}>"


class BaseGrant:
    """What the grants of all faces have in common; its attributes are those of `sqlsem.Grant`."""

    def __init__(self, holding: Holding, waited: float) -> None:
        #: For the package; programs have no use for it.
        self.holding = holding
        first = holding.tickets[0]
        self.resource = first.resource
        self.position = self.fence = first.position
        self.waited = waited
        #: What was taken with it of rates, by their names.
        self.rates: Mapping[str, Any] = {}

    @property
    def positions(self) -> dict[str, int]:
        """Each resource's position."""
        return {ticket.resource: ticket.position for ticket in self.holding.tickets}

    def __reduce__(self) -> str:
        raise NotHeld(
            f"{self!r} belongs to this process and cannot be pickled; acquire the lock in the process that needs it",
            resource=self.resource,
        )

    def __repr__(self) -> str:
        return repr(self.holding)


G = TypeVar("G", bound=BaseGrant)


class Hold(Generic[G]):
    """A grant, and the token of one acquisition of it, in the hands of who made that."""

    __slots__ = ("grant", "token")

    def __init__(self, grant: G, token: Permit | None = None) -> None:
        self.grant = grant
        self.token = token or Permit()

    @property
    def ended(self) -> bool:
        """Whether this acquisition was given back."""
        return not self.grant.holding.has(self.token)


def abandon(grant: BaseGrant, by: Permit) -> None:
    """End this hold, or one by this exit, without waiting for the database. Repeatable. (What was acquired before a
    fork is the parent's.)
    """
    holding = grant.holding
    if holding.pid == os.getpid() and holding.end(by) and not holding.released:
        holding.registry.disown(grant)


class Holdings:
    """All grants of this process that are neither released nor lost."""

    def __init__(self, member: Membership, bus: EventBus) -> None:
        self._member = member
        self._event_bus = bus
        self.state_lock = member.state_lock
        self._grants: set[BaseGrant] = set()
        #: Of each thread or task, by resource, what it has, until that is released.
        self._by_caller: dict[int, dict[str, list[BaseGrant]]] = {}
        #: Those of each resource, by position.
        self._by_resource: dict[str, dict[int, BaseGrant]] = {}

    def __bool__(self) -> bool:
        return bool(self._grants)

    def grants(self) -> list[BaseGrant]:
        """Those that are held."""
        with self.state_lock:
            return list(self._grants)

    def requests_of(self, number: int) -> list[Request]:
        """What the thread or task of that number holds."""
        with self.state_lock:
            return [
                request
                for resource, grants in self._by_caller.get(number, {}).items()
                for grant in grants
                if grant.holding.why_lost is None
                for request in grant.holding.requests
                if request.resource == resource
            ]

    def _held_of(self, caller: Caller, resource: str) -> list[tuple[BaseGrant, Request]]:
        """What a thread or task holds of a resource, the latest first."""
        held = self._by_caller.get(caller.number)
        if not held:
            return []
        return [
            (grant, next(request for request in grant.holding.requests if request.resource == resource))
            for grant in reversed(held.get(resource, ()))
            if grant.holding.why_lost is None
        ]

    # -- acquiring ----------------------------------------------------------------------------------------------

    def enough(self, requests: Sequence[Request], caller: Caller) -> list[BaseGrant]:
        """The grants that it holds already, each of which is enough for these requests."""
        if len(requests) != 1:
            return []
        (request,) = requests
        return [
            grant
            for grant, held in self._held_of(caller, request.resource)
            if held.access in ("write", request.access) and held.weight >= request.weight
        ]

    def enter(self, hold: Hold[Any]) -> bool:
        """Whether its grant is had once more, by this hold. Who calls has noted the hold before, and ends it whatever
        strikes from here on.
        """
        holding: Holding = hold.grant.holding
        if holding.departure is not None:
            return holding.departure.again(hold.token)
        return holding.enter(hold.token)

    def refuse(self, requests: Sequence[Request], caller: Caller, reentrant: bool, timeout: float | None) -> bool:
        """Whether what it holds keeps out, by itself and for certain, what it asks for. Raises `Deadlock` rather than
        have it wait for itself. (Of a limit it may have one more, while there is room; the rest is found by the search
        for deadlocks.)
        """
        for request in requests:
            for grant, held in self._held_of(caller, request.resource):
                if not held.excludes(request):
                    continue
                if timeout == 0:
                    return True
                what = "release it first, take what is needed in one go (weight=…, all_of), or pass reentrant=True"
                if held.access == READ and request.access == WRITE:
                    what = "make it the writer (grant.upgrade()), or release it first"
                elif reentrant:
                    what += " (which cannot turn what is held into more)"
                raise Deadlock(
                    f"This {caller.kind} already holds {held.describe()} (position {grant.positions[request.resource]})"
                    f" and would wait for itself; {what}",
                    resource=request.resource,
                )
        return False

    def ahead_of(self, ticket: Ticket) -> list[Request]:
        """What we hold of its resource with rows ahead of this one; of much only a part."""
        with self.state_lock:
            return [
                request
                for position, grant in itertools.islice(self._by_resource.get(ticket.resource, {}).items(), MOST_AHEAD)
                if position < ticket.position
                for request in grant.holding.requests
                if request.resource == ticket.resource
            ]

    def behind(self, request: Request, position: int) -> Behind | None:
        """What we hold ourselves that keeps out a request with this row, or takes room from it."""
        with self.state_lock:
            for at, grant in itertools.islice(self._by_resource.get(request.resource, {}).items(), MOST_AHEAD):
                holding = grant.holding
                for held, ticket in zip(holding.requests, holding.tickets, strict=True):
                    if ticket.position == at and at < position and meets(request, held.access):
                        return ours(held, ticket, "holds", monotonic() - holding.since, holding.caller)
        return None

    def add(self, grant: BaseGrant) -> None:
        """It has been acquired."""
        with self.state_lock:
            held = self._by_caller.setdefault(grant.holding.caller.number, {})
            for ticket in grant.holding.tickets:
                held.setdefault(ticket.resource, []).append(grant)
            self._grants.add(grant)
            for ticket in grant.holding.tickets:
                self._by_resource.setdefault(ticket.resource, {})[ticket.position] = grant

    # -- releasing ----------------------------------------------------------------------------------------------

    def give_back(self, grant: BaseGrant, by: Permit) -> Effects[None]:
        """End this hold of a grant, or one by this exit, and with the last one the grant. Raises `LockLost` when that
        was lost, before or just now. What has left by itself has ended.
        """
        holding = grant.holding
        # (Where it was had once more only that ends.)
        if holding.departure is None or holding.depth > 1 or not holding.departure.settle():
            yield from self.leave(grant, by)

    def leave(self, grant: BaseGrant, by: Permit, parted: Callable[[], None] | None = None) -> Effects[None]:
        """`give_back`, by whoever else gives it back; calls ``parted`` as soon as nobody here has it any more."""
        holding = grant.holding
        if holding.pid != os.getpid() or (holding.released and holding.why_lost is None):
            holding.require()
        try:
            if not holding.end(by):
                return
            self.forget(grant)
            if parted is not None:
                parted()
            if holding.why_lost is None:
                for ticket in holding.tickets:
                    yield from self._return(ticket, holding)
                if holding.why_lost is not None:
                    self.tell_lost(holding)
                elif self._event_bus.subscribers["released"] or log.isEnabledFor(logging.DEBUG):
                    self.tell_released(holding)
            elif len(holding.tickets) > 1:  # one of its rows was lost: the next ping gives the others back
                self._member.forget(holding.tickets)
                self._member.disown()
        except BaseException:
            if holding.end(by):
                self.disown(grant)
            raise
        if holding.why_lost is not None:
            shutdown.stay_asleep()
            holding.require()

    def _return(self, ticket: Ticket, holding: Holding) -> Effects[None]:
        """Give one number back. What cannot be given back in time is lost."""
        why = None
        try:
            there = yield from self._member.give_back(ticket, "released", self._member.seconds_left())
            if not there:
                why = "its row was removed before it was released"
        except Unavailable as exc:
            self._member.forget([ticket])  # the next good ping removes it
            why = f"it could not be given back in time ({exc})"
        if why is not None:
            holding.lose(why)

    def disown(self, grant: BaseGrant) -> None:
        """Giving back was interrupted, or cannot be waited for: the next ping does it."""
        self.forget(grant)
        if self._event_bus.has_subscribers("released", logging.DEBUG):
            self.tell_released(grant.holding)
        self._member.disown()
        self._member.forget(grant.holding.tickets)

    def give_away(self, grant: BaseGrant) -> None:
        """It is somebody else's from now on."""
        grant.holding.handed_over = True
        self.forget(grant)

    def pass_on(self, grant: BaseGrant, caller: Caller) -> None:
        """It is another thread's or task's from now on."""
        with self.state_lock:
            self._drop_of_caller(grant)
            grant.holding.caller = caller
            held = self._by_caller.setdefault(caller.number, {})
            for ticket in grant.holding.tickets:
                held.setdefault(ticket.resource, []).append(grant)

    def forget(self, grant: BaseGrant) -> None:
        """It is released, as far as this process is concerned."""
        with self.state_lock:
            grant.holding.released = True
            self._drop(grant)
            self._drop_of_caller(grant)

    def _drop_of_caller(self, grant: BaseGrant) -> None:
        """With the state lock: its thread or task has it no more."""
        number = grant.holding.caller.number
        held = self._by_caller.get(number, {})
        for ticket in grant.holding.tickets:
            grants = held.get(ticket.resource, [])
            if grant in grants:
                grants.remove(grant)
            if not grants:
                held.pop(ticket.resource, None)
        if not held:
            self._by_caller.pop(number, None)

    # -- telling ------------------------------------------------------------------------------------------------

    def tell_granted(self, holding: Holding, waited: float, waiters: Mapping[int, Waiter]) -> None:
        """It is held from now on; those of its rows that had to wait, by position."""
        for request, ticket in zip(holding.requests, holding.tickets, strict=True):
            waiter = waiters.get(ticket.position)
            about = self._event_bus.common_fields(request, ticket.position, holding.caller)
            behind = None if waiter is None else waiter.behind
            event = Granted(**about, waited=waited, at_once=not waiters, behind=behind)
            self._event_bus.publish(event, holding.trace)

    def tell_released(self, holding: Holding) -> None:
        """It was given back, unless its end was told before."""
        if holding.told and holding.why_lost is None:
            holding.told = False
            self._tell(Released, holding, held=monotonic() - holding.since)

    def close(self, why: str) -> None:
        """All rows were released with the member: nothing is held from now on, and asking for it says ``why``."""
        for grant in self.lose(None, why):
            if grant.holding.told:
                grant.holding.told = False
                self._tell(Released, grant.holding, held=monotonic() - grant.holding.since)

    def tell_lost(self, holding: Holding) -> None:
        """It is lost."""
        holding.told = False
        self._tell(Lost, holding, held=monotonic() - holding.since, why=holding.why_lost)

    def _tell(self, event: type[Released | Lost], holding: Holding, **more: Any) -> None:
        for request, ticket in zip(holding.requests, holding.tickets, strict=True):
            about = self._event_bus.common_fields(request, ticket.position, holding.caller)
            self._event_bus.publish(event(**about, **more), holding.trace)

    # -- losing -------------------------------------------------------------------------------------------------

    def lose(self, positions: Iterable[int] | None, why: str) -> list[BaseGrant]:
        """Flag what stands on these rows (None: everything) as lost; what that is."""
        with self.state_lock:
            wanted = None if positions is None else set(positions)
            lost = [
                grant
                for grant in self._grants
                if wanted is None or any(ticket.position in wanted for ticket in grant.holding.tickets)
            ]
            for grant in lost:
                grant.holding.lose(why)
                self._drop(grant)
        return lost

    def _drop(self, grant: BaseGrant) -> None:
        """With the state lock: it is held no more."""
        self._grants.discard(grant)
        for ticket in grant.holding.tickets:
            grants = self._by_resource.get(ticket.resource, {})
            grants.pop(ticket.position, None)
            if not grants:
                self._by_resource.pop(ticket.resource, None)
