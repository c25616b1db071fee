"""Locks in the memory of this process, for unit tests: no file, no server, nothing that outlives the process.

It is also the smallest engine there can be, and so what to read before writing another one: it has locks and a search
for deadlocks, announces that by what its session derives from, and has none of the other roles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from sqlsem import deadlocks
from sqlsem.engines.base import Creator, Disconnected, Engine, Options
from sqlsem.engines.roles import DeadlockSearch
from sqlsem.errors import ConfigurationError
from sqlsem.model import Entry, Pulse, Request, Resource, Ticket


class Store:
    """All that such a database is; to be used with its ``lock`` held."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Each resource's rows by position, which is their order. (An OrderedDict finds its first one at once, even
        # after ten thousand before it have left.)
        self.queues: dict[str, OrderedDict[int, Entry]] = {}
        self.uids: dict[tuple[int, str], list[Ticket]] = {}  # what was registered, by whom and in which call
        self.calls: dict[int, tuple[int, str]] = {}  # which call made a row
        self.members: dict[int, tuple[str, int, str]] = {}  # host, process and program
        self.waiting: set[threading.Event] = set()
        self.numbers = itertools.count(1)  # of rows and members

    def may_enter(self, request: Request, position: float = math.inf) -> bool:
        """Whether a request may proceed from there, which is the end if left out."""
        queue = self.queues.get(request.resource)
        ahead = itertools.takewhile(lambda row: row.position < position, queue.values() if queue else ())
        return request.fits(ahead, None)

    def row(self, ticket: Ticket) -> Entry | None:
        """The row of a ticket, if it is there."""
        queue = self.queues.get(ticket.resource)
        row = queue.get(ticket.position) if queue else None
        return row if row is not None and row.requesting_id == ticket.requesting_id else None

    def rows(self) -> list[Entry]:
        """All, by resource and position."""
        return [row for _, queue in sorted(self.queues.items()) for row in queue.values()]

    def add(self, row: Entry, uid: str) -> Ticket:
        """A number was taken."""
        assert row.member_id is not None
        ticket = Ticket(row.resource, row.position, row.requesting_id, row.granted_at is not None)
        self.queues.setdefault(row.resource, OrderedDict())[row.position] = row
        self.uids.setdefault((row.member_id, uid), []).append(ticket)
        self.calls[row.position] = (row.member_id, uid)
        return ticket

    def grant(self, row: Entry) -> bool:
        """Whether a row is granted, which it is as soon as it may enter."""
        request = Request(row.resource, row.access, row.limit, row.weight)
        if row.granted_at is None and self.may_enter(request, row.position):
            row = dataclasses.replace(row, state="holds", granted_at=datetime.now(timezone.utc))
            self.queues[row.resource][row.position] = row
        return row.granted_at is not None

    def remove(self, row: Entry) -> None:
        """End a row, and wake those who may go."""
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
        """Have all who wait look again."""
        for event in list(self.waiting):
            event.set()


class MemorySession(DeadlockSearch):
    """A look at the store of one engine."""

    def __init__(self, store: Store, options: Options) -> None:
        self._store = store
        self._options = options
        self._interrupted = False

    @contextlib.contextmanager
    def _open(self) -> Iterator[Store]:
        with self._store.lock:
            if self._interrupted:
                raise Disconnected("The session was closed")
            yield self._store

    @property
    def usable(self) -> bool:
        return not self._interrupted

    def close(self) -> None:
        self._interrupted = True
        self._store.wake()

    interrupt = close

    def enrol(self, host: str, pid: int, program: str) -> int:
        with self._open() as store:
            number = next(store.numbers)
            store.members[number] = (host, pid, program)
            return number

    def resume(self, member_id: int) -> bool:
        with self._open() as store:
            return member_id in store.members

    def ping(self, member_id: int) -> Pulse:
        with self._open() as store:
            mine = frozenset(position for position, (member, _) in store.calls.items() if member == member_id)
            return Pulse(member_id in store.members, mine)

    def resign(self, member_id: int) -> None:
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
            host, pid, program = store.members[member_id]
            rows = [row for ticket in store.uids.get((member_id, uid), ()) if (row := store.row(ticket)) is not None]
            if rows:
                return [Ticket(row.resource, row.position, requesting_id, row.granted_at is not None) for row in rows]
            free = [store.may_enter(request) for request in requests]
            if only_if_free and not all(free):
                return None
            now = datetime.now(timezone.utc)
            return [
                store.add(
                    Entry(
                        resource=request.resource,
                        position=next(store.numbers),
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
                        grace=self._options.grace,
                    ),
                    uid,
                )
                for request, granted in zip(requests, free, strict=True)
            ]

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

    def wait(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        deadline = time.monotonic() + timeout
        self._store.waiting.add(nudge)
        try:
            while True:
                nudge.clear()  # before looking: what changes afterwards is seen
                with self._open() as store:
                    row = store.row(ticket)
                    if row is None:
                        return None
                    if store.grant(row):
                        return True
                if not nudge.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return False
        finally:
            self._store.waiting.discard(nudge)

    def look(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
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
            rows = [
                deadlocks.Row(
                    *(row.position, row.resource, row.member_id, row.owner, row.access, row.limit, row.weight),
                    granted=row.granted_at is not None,
                )
                for row in store.rows()
            ]
            for knot in deadlocks.find(rows, {}):
                if knot.victim.member == member_id:
                    return deadlocks.steps_of(knot, {one: (*of[:2], None) for one, of in store.members.items()})
        return None

    def entries(self, resource: str | None) -> list[Entry]:
        now = datetime.now(timezone.utc)
        with self._open() as store:
            return [
                dataclasses.replace(row, seconds=(now - (row.granted_at or row.requested_at)).total_seconds())
                for row in store.rows()
                if resource in (None, row.resource)
            ]

    def resources(self) -> list[Resource]:
        with self._open() as store:
            states = [(row.resource, row.state) for row in store.rows()]
            return [
                Resource(name, None, False, None, states.count((name, "holds")), states.count((name, "waits")))
                for name in sorted({name for name, _ in states})
            ]


class MemoryEngine(Engine):
    """``memory://name``: one store for all in this process that name it, for as long as somebody does."""

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
    def where(self) -> str:
        return "the memory of this process"

    def reach(self, purpose: str) -> MemorySession:
        return MemorySession(self._store, self.options)


_opening = threading.Lock()
_stores: weakref.WeakValueDictionary[tuple[str, str, str], Store] = weakref.WeakValueDictionary()


def _empty_in_child() -> None:
    """A child process has a memory of its own, where nobody holds anything."""
    global _opening
    _opening = threading.Lock()
    for store in list(_stores.values()):
        store.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_empty_in_child)

engine = MemoryEngine
