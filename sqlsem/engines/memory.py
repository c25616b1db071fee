"""Locks in the memory of this process, for unit tests: without a file or a server. They end with the process.

This is also the smallest engine: read it before you write another one. It has locks, priorities, rates, a search for
deadlocks, and runs once per period. Its session has the methods of these capabilities.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone

from sqlsem.engines.base import Creator, Disconnected, Engine, Options
from sqlsem.engines.optional import Session
from sqlsem.engines.priorities import (
    PriorityAnswer,
    is_priority_entry,
    priorities_not_set,
    priority_entry,
    priority_missing,
    priority_queue,
)
from sqlsem.engines.rate_windows import RateState
from sqlsem.insight.patterns import Patterns, counted_on, no_limit_set, with_settings
from sqlsem.values import deadlocks
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Entry, Heartbeat, OnceEntry, Request, Resource, Ticket, monotonic
from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest, RateStatus


class Store:
    """The database of this engine. Callers of its methods hold ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # The rows of each resource by position, in this order. (An OrderedDict finds its first row at once, even after
        # ten thousand rows before it were removed.)
        self.queues: dict[str, OrderedDict[int, Entry]] = {}
        self.uids: dict[tuple[int, str], list[Ticket]] = {}  # tickets by member and uid
        self.calls: dict[int, tuple[int, str]] = {}  # member and uid by position
        self.members: dict[int, tuple[str, int, str]] = {}  # host, process and program
        self.waiting: set[threading.Event] = set()
        self._last = 0  # the last number of a row or member
        self.rates: defaultdict[str, RateState] = defaultdict(RateState)
        self.caps: dict[str, int] = {}  # by resource or pattern
        self.paused: dict[str, datetime] = {}  # the time of the pause, by resource
        self.ageing: dict[str, float] = {}  # by resource with priorities
        self.once: dict[str, OnceEntry] = {}

    def next_number(self) -> int:
        """Return the next number for a row or a member."""
        self._last += 1
        return self._last

    def now(self) -> datetime:
        """Return the current time."""
        return datetime.now(timezone.utc)

    def may_enter(self, request: Request, position: float = math.inf) -> bool:
        """Return True if a request at ``position`` (default: the end of the queue) can be granted."""
        queue = self.queues.get(request.resource)
        ahead = itertools.takewhile(lambda row: row.position < position, queue.values() if queue else ())
        return request.resource not in self.paused and request.fits(ahead, self.cap(request.resource))

    def cap(self, resource: str) -> int | None:
        """Return the cap of a resource: its own, or that of a pattern."""
        if not self.caps or resource in self.caps:
            return self.caps.get(resource)
        return Patterns((name, cap, None) for name, cap in self.caps.items()).cap_of(resource)

    def set_cap(self, resource: str, cap: int | None) -> None:
        """Set the cap of a resource or pattern; None removes it."""
        before = dict(self.caps)
        self.caps.pop(resource, None)
        if cap is not None:
            self.caps[resource] = cap
        unlimited = [row.resource for row in self.rows() if row.limit is None and self.cap(row.resource) is None]
        if unlimited:
            self.caps = before
            raise ConfigurationError(counted_on(len(unlimited), unlimited[0]))
        self.wake()

    def pause(self, resource: str, paused: bool) -> None:
        """Pause or resume the grants of a resource."""
        if paused:
            self.paused.setdefault(resource, self.now())
        else:
            self.paused.pop(resource, None)
            self.wake()

    def row(self, ticket: Ticket) -> Entry | None:
        """Return the row of a ticket, if it exists."""
        queue = self.queues.get(ticket.resource)
        row = queue.get(ticket.position) if queue else None
        return row if row is not None and row.requesting_id == ticket.requesting_id else None

    def rows(self) -> list[Entry]:
        """Return all rows by resource and position."""
        return [row for _, queue in sorted(self.queues.items()) for row in queue.values()]

    def add(self, row: Entry, uid: str) -> Ticket:
        """Add a row to its queue; return its ticket."""
        assert row.member_id is not None
        ticket = Ticket(row.resource, row.position, row.requesting_id, row.granted_at is not None)
        self.queues.setdefault(row.resource, OrderedDict())[row.position] = row
        self.uids.setdefault((row.member_id, uid), []).append(ticket)
        self.calls[row.position] = (row.member_id, uid)
        return ticket

    def grant(self, row: Entry) -> bool:
        """Grant a row if it can be granted; return True if it is granted."""
        request = Request(row.resource, row.access, row.limit, row.weight)
        if row.granted_at is None and self.may_enter(request, row.position):
            row = dataclasses.replace(row, state="holds", granted_at=self.now())
            self.queues[row.resource][row.position] = row
        return row.granted_at is not None

    def remove(self, row: Entry) -> None:
        """Remove a row, and wake the waiters."""
        queue, call = self.queues[row.resource], self.calls.pop(row.position)
        del queue[row.position]
        if not queue:
            del self.queues[row.resource]
        left = [ticket for ticket in self.uids[call] if ticket.position != row.position]
        if left:
            self.uids[call] = left
        else:
            del self.uids[call]
        self.wake()

    def wake(self) -> None:
        """Wake all waiters, so that they poll."""
        for event in list(self.waiting):
            event.set()


class MemoryRates(Session):
    """The part of a session for rates. Their clock never goes back."""

    def __init__(self, store: Store, options: Options) -> None:
        self._store = store
        self.options = options
        self._interrupted = False

    @contextlib.contextmanager
    def _open(self) -> Iterator[Store]:
        with self._store.lock:
            if self._interrupted:
                raise Disconnected("The session was closed")
            yield self._store

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        with self._open() as store:
            row = None if ticket is None else store.row(ticket)
            if ticket is not None and row is None:
                return RateAnswer(RateStatus.GONE)
            first = next(iter(store.queues.get(request.resource, ())), None)
            if first != (None if row is None else row.position) or store.paused.get(request.resource):
                return RateAnswer(RateStatus.OTHERS_FIRST)
            now_us = int(monotonic() * 1_000_000)
            wait_ms = store.rates[request.resource].take(request, now_us, waited=row is not None)
            if wait_ms:
                return RateAnswer(RateStatus.TOO_EARLY, seconds=wait_ms / 1000)
            if row is not None:
                store.remove(row)
            return RateAnswer(RateStatus.TAKEN, times=(now_us // 1000,))

    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        with self._open() as store:
            store.rates[resource].use(more, int(monotonic() * 1_000_000), taken_ms)

    def reset_rate(self, resource: str) -> bool:
        with self._open() as store:
            known = resource in store.rates
            if known:
                store.rates[resource].reset()
            return known

    def set_rate(self, resource: str, window_ms: int, limit: int | None) -> bool:
        with self._open() as store:
            before = store.rates[resource].set_cap(window_ms, limit, int(monotonic() * 1000))
            return before is not None or limit is not None

    def rates(self, resource: str | None) -> list[RateEntry]:
        with self._open() as store:
            now_ms = int(monotonic() * 1000)
            return [
                entry
                for name, state in sorted(store.rates.items())
                if resource in (None, name)
                for entry in state.entries(name, now_ms)
            ]


class MemorySession(MemoryRates):
    """One session on the store of an engine."""

    @property
    def usable(self) -> bool:
        return not self._interrupted

    def close(self) -> None:
        self._interrupted = True
        self._store.wake()

    interrupt = close

    def register_member(self, host: str, pid: int, program: str) -> int:
        with self._open() as store:
            number = store.next_number()
            store.members[number] = (host, pid, program)
            return number

    def reattach_member(self, member_id: int) -> bool:
        with self._open() as store:
            return member_id in store.members

    def heartbeat(self, member_id: int) -> Heartbeat:
        with self._open() as store:
            positions = frozenset(position for position, (member, _) in store.calls.items() if member == member_id)
            return Heartbeat(member_id in store.members, positions)

    def deregister_member(self, member_id: int) -> None:
        with self._open() as store:
            for row in [row for row in store.rows() if row.member_id == member_id]:
                store.remove(row)
            store.members.pop(member_id, None)

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        with self._open() as store:
            if member_id not in store.members:
                raise Disconnected("This member is not known here")
            rows = [row for ticket in store.uids.get((member_id, uid), ()) if (row := store.row(ticket)) is not None]
            if rows:
                return [Ticket(row.resource, row.position, requesting_id, row.granted_at is not None) for row in rows]
            for request in requests:
                if request.limit is None and store.cap(request.resource) is None:
                    raise ConfigurationError(no_limit_set(request.resource), resource=request.resource)
                if request.resource in store.ageing:
                    raise priority_missing(request.resource)
            free = [store.may_enter(request) for request in requests]
            if only_if_free and not all(free):
                return None
            fields = (member_id, requesting_id, owner, uid)
            return [
                self._add(store, request, granted, *fields) for request, granted in zip(requests, free, strict=True)
            ]

    def _add(
        self, store: Store, request: Request, granted: bool, member_id: int, requesting_id: str, owner: str, uid: str
    ) -> Ticket:
        host, pid, program = store.members[member_id]
        now = store.now()
        row = Entry(
            resource=request.resource,
            position=store.next_number(),
            state="holds" if granted else "waits",
            access=request.access,
            limit=request.limit,
            weight=request.weight,
            requesting_id=requesting_id,
            member_id=member_id,
            owner=owner,
            host=host,
            pid=pid,
            program=program,
            note=request.note,
            requested_at=now,
            granted_at=now if granted else None,
            seconds=0.0,
            missing_for=None,
            grace=self.options.grace,
        )
        return store.add(row, uid)

    def acquire_by_priority(
        self,
        member_id: int,
        requesting_id: str,
        owner: str,
        uid: str,
        request: Request,
        only_if_free: bool,
        place: Ticket | None,
    ) -> PriorityAnswer:
        with self._open() as store:
            if member_id not in store.members:
                raise Disconnected("This member is not known here")
            ageing = store.ageing.get(request.resource)
            if ageing is None:
                raise priorities_not_set(request.resource)
            if request.limit is None and store.cap(request.resource) is None:
                raise ConfigurationError(no_limit_set(request.resource), resource=request.resource)
            mine = {ticket.resource: ticket for ticket in store.uids.get((member_id, uid), ())}
            if request.resource in mine:
                return PriorityAnswer(mine[request.resource], True)
            entries = [
                row for row in store.queues.get(priority_queue(request.resource), {}).values() if is_priority_entry(row)
            ]
            own = next((row for row in entries if store.calls[row.position] == (member_id, uid)), None)
            if own is None and place is not None:
                return PriorityAnswer(None, False)
            requested_at = store.now() if own is None else own.requested_at
            assert request.priority is not None
            rank = requested_at.timestamp() - request.priority * ageing, math.inf if own is None else own.position
            ahead = sorted(
                (at, row.position)
                for row in entries
                if row is not own
                and ((at := row.requested_at.timestamp() - (row.weight - 1) * ageing), row.position) < rank
            )
            fields = (member_id, requesting_id, owner, uid)
            if not ahead and store.may_enter(request):
                ticket = self._add(store, request, True, *fields)
                if own is not None:
                    store.remove(own)
                return PriorityAnswer(ticket, True)
            if only_if_free:
                return PriorityAnswer(None, False)
            if own is None:
                entry = self._add(store, priority_entry(request), True, *fields)
            else:
                entry = Ticket(own.resource, own.position, requesting_id, True)
            return PriorityAnswer(entry, False, ahead[-1][1] if ahead else None, len(ahead))

    def priorities(self) -> dict[str, float]:
        with self._open() as store:
            return dict(store.ageing)

    def release(self, ticket: Ticket, outcome: str) -> bool:
        with self._open() as store:
            row = store.row(ticket)
            if row is not None:
                store.remove(row)
            return row is not None

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        with self._open() as store:
            tickets = list(store.uids.get((member_id, uid), ()))
            for ticket in tickets:
                row = store.row(ticket)
                if row is not None:
                    store.remove(row)
            return len(tickets)

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        deadline = monotonic() + timeout
        self._store.waiting.add(wakeup)
        try:
            while True:
                wakeup.clear()  # before the check, so that no later change is missed
                with self._open() as store:
                    row = store.row(ticket)
                    if row is None:
                        return None
                    if store.grant(row):
                        return True
                if not wakeup.wait(max(0.0, deadline - monotonic())) and monotonic() >= deadline:
                    return False
        finally:
            self._store.waiting.discard(wakeup)

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        answers: dict[int, bool | None] = {}
        with self._open() as store:
            for ticket in tickets:
                row = store.row(ticket)
                if row is None or row.member_id != member_id:
                    answers[ticket.position] = None
                elif store.grant(row):
                    answers[ticket.position] = True
        return answers

    def find_deadlock(self, member_id: int) -> deadlocks.Found | None:
        with self._open() as store:
            rows = [deadlocks.Row.of(row) for row in store.rows()]
            caps = {row.resource: cap for row in rows if (cap := store.cap(row.resource)) is not None}
            for cycle in deadlocks.find(rows, caps):
                if cycle.victim.member == member_id:
                    return deadlocks.steps_of(cycle, {member: (*of[:2], None) for member, of in store.members.items()})
        return None

    def entries(self, resource: str | None) -> list[Entry]:
        with self._open() as store:
            now = store.now()
            return [
                dataclasses.replace(row, seconds=(now - (row.granted_at or row.requested_at)).total_seconds())
                for row in store.rows()
                if resource in (None, row.resource)
            ]

    def resources(self) -> list[Resource]:
        with self._open() as store:
            states = [(row.resource, row.state) for row in store.rows()]
            settings = {
                name: (name, store.caps.get(name), store.paused.get(name), None, None, None)
                for name in {*store.caps, *store.paused, *store.ageing}
            }
            resources = (
                Resource(name, None, False, None, states.count((name, "holds")), states.count((name, "waits")))
                for name in sorted({name for name, _ in states} | set(settings))
            )
            return with_settings(resources, settings, store.ageing)

    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        with self._open() as store:
            if what == "cap":
                store.set_cap(resource, value)
            elif what == "paused":
                store.pause(resource, bool(value))
            elif what == "ageing" and value is not None:
                store.ageing[resource] = value / 1000
            elif what == "ageing":
                store.ageing.pop(resource, None)
            else:
                raise ConfigurationError(
                    f"{what} cannot be set in memory, where every row has an owner in this process"
                )

    def once_due(self, name: str, ticket: Ticket | None, per_ms: int, offset_ms: int) -> bool | None:
        with self._open() as store:
            at: datetime | None = store.now()
            if ticket is not None:
                row = store.row(ticket)
                at = None if row is None else row.granted_at
            if at is None:
                return None
            period_begin = (_epoch_ms(at) - offset_ms) // per_ms * per_ms + offset_ms
            return name not in store.once or _epoch_ms(store.once[name].granted_at) < period_begin

    def mark_once(self, name: str, ticket: Ticket) -> bool:
        with self._open() as store:
            row, before = store.row(ticket), store.once.get(name)
            if row is None or row.granted_at is None:
                return False
            at = row.granted_at if before is None else max(before.granted_at, row.granted_at)
            now = store.now()
            store.once[name] = OnceEntry(name, at, now, ticket.position, ticket.requesting_id, None, now)
            return True

    def once_runs(self, name: str | None) -> list[OnceEntry]:
        with self._open() as store:
            runs = [store.once[key] for key in sorted(store.once) if name in (None, key)]
            return [dataclasses.replace(run, taken_at=self._store.now()) for run in runs]

    def once_forget(self, name: str) -> bool:
        with self._open() as store:
            return store.once.pop(name, None) is not None


def _epoch_ms(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(milliseconds=1)


class MemoryEngine(Engine):
    """``memory://name``: one store for all clients of this process that use the name."""

    name = "memory"
    session_class = MemorySession
    beacon_may_fail = False
    setup_timeout = None

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        super().__init__(url, options, creator)
        if creator is not None:
            raise ConfigurationError("memory:// takes no creator=; it is this process's own memory")
        with _opening:
            self._store = _stores.setdefault((url.partition("://")[2], options.schema, options.table), Store())

    @property
    def label(self) -> str:
        return "the memory of this process"

    def open_session(self, purpose: str) -> MemorySession:
        return MemorySession(self._store, self.options)


_opening = threading.Lock()
_stores: weakref.WeakValueDictionary[tuple[str, str, str], Store] = weakref.WeakValueDictionary()


def _empty_in_child() -> None:
    """Empty the stores in a forked child: the parent's locks do not count in the child's memory."""
    global _opening
    _opening = threading.Lock()
    for store in list(_stores.values()):
        store.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_empty_in_child)

engine = MemoryEngine
