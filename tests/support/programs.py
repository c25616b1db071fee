"""A model of what programs see of the locks: which calls are granted, wait or are refused, and the queue afterwards.

It has the rule, the order, the reentrance, conversions, hand-overs and priorities, without a database, threads or time.
`tests/model/test_programs.py` runs random programs on each engine, and compares each outcome with this model.

The outcome of a call is its result (True or False of ``acquire``, None of other calls), ``WAITS``, or the class and
code of an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

WAITS = "waits"
LOST = ("LockLost", "lock-lost")
NOT_HELD = ("NotHeld", "not-held")
TIMEOUT = ("Timeout", "timeout")
DEADLOCK = ("Deadlock", "deadlock")
WRONG = ("ConfigurationError", "configuration")
NO_FEATURE = ("ConfigurationError", "feature")
HANDED_OVER = ("NotHeld", "handover")
PRIORITY = ("ConfigurationError", "priority")


@dataclass(frozen=True)
class Request:
    """A request as a program makes it."""

    resource: str
    access: str = "write"
    limit: int | None = 1
    weight: int = 1
    priority: int | None = None

    @property
    def slack(self) -> float:
        return math.inf if self.limit is None else self.limit - self.weight


@dataclass(eq=False)
class Row:
    """A row of the queue. ``note``: its name, which the row in the database has as its note."""

    request: Request
    note: str
    access: str
    granted: bool = False

    @property
    def shared(self) -> bool:
        return self.access not in ("write", "upgrade")


@dataclass(eq=False)
class Hold:
    """A grant. ``tokens``: its acquisitions, the latest last. ``unowned``: any thread may release it by its lock."""

    actor: int
    rows: list[Row]
    unowned: bool = False
    tokens: list[Acquisition] = field(default_factory=list)
    state: str = "held"  # or 'lost', 'released', 'handed over'

    @property
    def refusal(self) -> Any:
        """The outcome of calls that need the lock, or None if it is held."""
        return {"lost": LOST, "released": NOT_HELD, "handed over": HANDED_OVER}.get(self.state)


@dataclass(eq=False)
class Acquisition:
    """One acquisition of a grant by a lock object, or by an adoption (``lock`` is None then)."""

    hold: Hold
    block: bool = False
    lock: Any = None
    grant: Any = None


@dataclass(eq=False)
class Pending:
    """A call that waits: an acquisition of ``rows``, one by priority (``rank``), or the upgrade of ``hold``."""

    actor: int
    note: str
    rows: list[Row] = field(default_factory=list)
    hold: Hold | None = None
    rank: tuple[int, int] | None = None
    unowned: bool = False
    call: Any = None  # this and the next one are for the test
    acquisition: Any = None


class Model:
    """The expected state. ``complete``: False for the engine in memory, without conversions, hand-overs and revokes."""

    def __init__(self, *, complete: bool, prioritized: str) -> None:
        self.complete, self.prioritized = complete, prioritized
        self.rows: list[Row] = []
        self.pending: list[Pending] = []
        self.holds: list[Hold] = []  # those with rows
        self.caps: dict[str, int] = {}
        self.paused: set[str] = set()
        self._entries = 0

    # -- the rule

    def cap(self, resource: str) -> int | None:
        patterns = [name for name in self.caps if name.endswith("*") and resource.startswith(name[:-1])]
        return self.caps.get(resource, self.caps[max(patterns, key=len)] if patterns else None)

    def ahead(self, row: Row | None, resource: str) -> list[Row]:
        """Return the rows ahead of a row, or of a new one."""
        rows = [other for other in self.rows if other.request.resource == resource]
        return rows if row is None else rows[: rows.index(row)]

    def fits(self, request: Request, row: Row | None = None, *, declared_only: bool = False) -> bool:
        """True if the request may proceed. ``declared_only``: whatever an operator has set."""
        conflicting = [
            other
            for other in self.ahead(row, request.resource)
            if request.access == "write" or other.access != request.access
        ]
        limits = [each for each in (request.limit, *(other.request.limit for other in conflicting)) if each is not None]
        if not declared_only:
            if request.resource in self.paused:
                return False
            cap = self.cap(request.resource)
            limits += [] if cap is None else [cap]
        load = request.weight + sum(other.request.weight for other in conflicting)
        return not limits or load <= min(limits)

    def of(self, actor: int) -> list[Hold]:
        """Return the grants that an actor holds."""
        return [hold for hold in self.holds if hold.actor == actor and hold.state == "held"]

    def keeps(self, actor: int) -> list[Hold]:
        """Return the grants of an actor that are not released, also lost ones: these may have other rows."""
        return [hold for hold in self.holds if hold.actor == actor and hold.state != "handed over"]

    def _held(self, actor: int, resource: str) -> Iterator[tuple[Hold, Request]]:
        """Yield the actor's grants of a resource, the latest first, with what they hold now."""
        for hold in reversed(self.of(actor)):
            for row in hold.rows:
                if row.request.resource == resource:
                    yield hold, Request(resource, row.access, row.request.limit, row.request.weight)

    # -- acquire

    def join(self, actor: int, requests: Sequence[Request], reentrant: bool) -> Hold | None:
        """Return the grant that a reentrant acquisition shares."""
        if not reentrant or len(requests) != 1:
            return None
        (request,) = requests
        for hold, held in self._held(actor, request.resource):
            stronger = (
                held.access in ("write", request.access)
                and held.weight >= request.weight
                and held.slack <= request.slack
            )
            if stronger and not hold.unowned:
                return hold
        return None

    def refusal(self, actor: int, requests: Sequence[Request], waits: bool) -> Any:
        """Return the outcome of an acquisition that is refused before it is in the queue; None if it is not."""
        for request in requests:
            for _, held in self._held(actor, request.resource):
                shared = request.access != "write" and request.access == held.access
                limits = [limit for limit in (request.limit, held.limit) if limit is not None]
                if not shared and limits and request.weight + held.weight > min(limits):
                    return DEADLOCK if waits else False
        if requests[0].priority is not None and waits and self.of(actor):
            return PRIORITY
        for request in requests:
            if (request.priority is None) != (request.resource != self.prioritized):
                return PRIORITY
            if request.limit is None and self.cap(request.resource) is None:
                return WRONG
        return None

    def outcome(self, actor: int, requests: Sequence[Request], reentrant: bool, waits: bool) -> Any:
        """Return the outcome of an acquisition, which changes nothing yet."""
        if self.join(actor, requests, reentrant) is not None:
            return True
        refusal = self.refusal(actor, requests, waits)
        if refusal is not None:
            return refusal
        queue = [waiter for waiter in self._ranked() if waiter.rows[0].request.resource == requests[0].resource]
        rank = (-(requests[0].priority or 0), self._entries)
        overtaken = requests[0].priority is not None and any(waiter.rank < rank for waiter in queue if waiter.rank)
        if not overtaken and all(self.fits(request) for request in requests):
            return True
        return WAITS if waits else False

    def acquire(self, actor: int, requests: Sequence[Request], note: str, reentrant: bool, unowned: bool) -> Hold:
        """Grant an acquisition whose outcome is True."""
        hold = self.join(actor, requests, reentrant)
        if hold is None:
            rows = [Row(request, note, request.access, True) for request in requests]
            self.rows += rows
            hold = Hold(actor, rows, unowned)
            self.holds.append(hold)
        return hold

    def wait(self, actor: int, requests: Sequence[Request], note: str, unowned: bool) -> Pending:
        """Let an acquisition wait."""
        rows = [Row(request, note, request.access, self.fits(request)) for request in requests]
        rank = None
        if requests[0].priority is None:
            self.rows += rows
        else:
            rank = (-requests[0].priority, self._entries)
            self._entries += 1
        self.pending.append(Pending(actor, note, rows, None, rank, unowned))
        return self.pending[-1]

    def _ranked(self) -> list[Pending]:
        """Return the requests that wait by priority, in their order."""
        return sorted((waiter for waiter in self.pending if waiter.rank is not None), key=lambda waiter: waiter.rank)

    # -- the other calls on grants

    def end(self, token: Acquisition, *, any_token: bool = False) -> Any:
        """End an acquisition, as its lock's ``release`` or the end of its block does. ``any_token``: as
        ``grant.release()`` does it in the thread of the holder: the latest acquisition, whichever this one is.
        """
        hold = token.hold
        if not any_token and token not in hold.tokens:  # ended by its grant before
            return (LOST if hold.state == "lost" else None) if token.block else NOT_HELD
        if hold.state in ("released", "handed over"):
            return None if token.block and not any_token else hold.refusal
        lost = hold.state == "lost"
        if hold.tokens:
            hold.tokens.remove(hold.tokens[-1] if any_token else token)
        if hold.tokens:
            return None
        self.remove(hold)
        hold.state = "lost" if lost else "released"
        return LOST if lost else None

    def remove(self, hold: Hold) -> None:
        """Remove the rows of a grant."""
        self.rows = [row for row in self.rows if row not in hold.rows]
        if hold in self.holds:
            self.holds.remove(hold)

    def unfit_to_convert(self, hold: Hold, access: str) -> Any:
        if hold.refusal is not None:
            return hold.refusal
        if not self.complete:
            return NO_FEATURE
        (row, *more) = hold.rows
        return WRONG if more or row.access != access or row.request.limit != 1 else None

    def upgrade(self, hold: Hold, waits: bool) -> Any:
        """Return the outcome of an upgrade, and upgrade if that is None."""
        refusal = self.unfit_to_convert(hold, "read")
        if refusal is not None:
            return refusal
        row = hold.rows[0]
        if any(other.access == "upgrade" for other in self.ahead(None, row.request.resource)):
            return DEADLOCK
        if self.free_readers(row) or self.others_inside(row):
            return WAITS if waits else TIMEOUT
        row.access = "write"
        return None

    def free_readers(self, row: Row) -> list[Row]:
        """Return the waiting readers behind a row that only an operator's pause or limit keeps waiting."""
        rows = self.ahead(None, row.request.resource)
        return [
            other
            for other in rows[rows.index(row) + 1 :]
            if other.access == "read" and not other.granted and self.fits(other.request, other, declared_only=True)
        ]

    def others_inside(self, row: Row) -> list[Row]:
        """Return the other rows that keep a reader from becoming the writer."""
        ahead = self.ahead(row, row.request.resource)
        return [
            other
            for other in self.ahead(None, row.request.resource)
            if other is not row and (other.granted or other in ahead)
        ]

    def downgrade(self, hold: Hold) -> Any:
        refusal = self.unfit_to_convert(hold, "write")
        if refusal is None and len(hold.tokens) > 1:
            refusal = WRONG
        if refusal is None:
            hold.rows[0].access = "read"
        return refusal

    def hand_over(self, hold: Hold) -> Any:
        if not self.complete:
            return NO_FEATURE
        if hold.refusal is not None:
            return hold.refusal
        if len(hold.tokens) > 1:
            return WRONG
        hold.state = "handed over"
        return None

    # -- operators

    def set_limit(self, resource: str, limit: int | None) -> Any:
        before = dict(self.caps)
        self.caps.pop(resource, None)
        if limit is not None:
            self.caps[resource] = limit
        if any(row.request.limit is None and self.cap(row.request.resource) is None for row in self.rows):
            self.caps = before
            return WRONG
        return None

    def unsettled(self, resource: str) -> bool:
        """True if a row may be granted or not in the database: a part of a group that waits for another part."""
        return any(
            not row.granted and self.fits(row.request, row)
            for waiter in self.pending
            if len(waiter.rows) > 1
            for row in waiter.rows
            if row.request.resource == resource
        )

    # -- what follows by itself

    def settle(self) -> list[tuple[Pending, Hold]]:
        """Grant all that can be granted; return the calls that end, with their grants."""
        ended: list[tuple[Pending, Hold]] = []
        while True:
            change = next(filter(None, map(self._grant, [*self._ranked(), *self.pending])), None)
            if change is None:
                return ended
            self.pending.remove(change[0])
            ended.append(change)

    def _grant(self, waiter: Pending) -> tuple[Pending, Hold] | None:
        if waiter.hold is not None:
            (row,) = waiter.hold.rows
            if self.others_inside(row):
                return None
            row.access = "write"
            return waiter, waiter.hold
        resource = waiter.rows[0].request.resource
        if waiter.rank is not None:
            head = next(first for first in self._ranked() if first.rows[0].request.resource == resource)
            if head is not waiter or not self.fits(waiter.rows[0].request):
                return None
            self.rows += waiter.rows
        elif not all(row.granted or self.fits(row.request, row) for row in waiter.rows):
            return None
        for row in waiter.rows:
            row.granted = True
        hold = Hold(waiter.actor, waiter.rows, waiter.unowned)
        self.holds.append(hold)
        return waiter, hold
