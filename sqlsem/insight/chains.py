"""Follow the chain of waiters across resources, up to the row that waits for none. Pure functions over an overview."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from sqlsem.insight.overview import Overview
from sqlsem.insight.totals import QueueTotals, number
from sqlsem.util.record import AsDict, record
from sqlsem.values.locks import UPGRADE, WRITE, Entry, Resource

__all__ = ["Chain", "QueueWalk", "RootBlocker", "WaitGraph", "is_upgrading", "is_waiting", "root_blockers"]

#: A node of the wait-for graph: a member and one of its threads, tasks or sessions.
Node = tuple[Any, ...]


def is_waiting(entry: Entry) -> bool:
    """Return True if its owner waits for the lock."""
    return entry.state == "waits"


def is_upgrading(entry: Entry) -> bool:
    """Return True if it is a reader that waits for its upgrade: until it is the only holder."""
    return entry.access.startswith(UPGRADE) and entry.state == "holds"


def node_of(entry: Entry) -> Node:
    """Return the node that the row belongs to. If the owner is unknown, each row is a node of its own."""
    if entry.member_id is None or entry.owner is None:
        return (entry.position,)
    return entry.member_id, entry.owner


@record
class Blocked:
    """A waiting request, and the rows that block it."""

    entry: Entry
    setting: Resource
    behind: tuple[Entry, ...]  # the first rows ahead that together leave it no room
    waiters: int  # waiters among the rows ahead that it conflicts with
    fits: bool  # True if the rows ahead do not block it
    fits_uncapped: bool  # True if they would not block it without the operator's cap
    own: tuple[Entry, ...]  # rows of its own node that would block it even without any other rows


class QueueWalk:
    """The queue of one resource, walked from its head on: each step knows the rows ahead."""

    def __init__(self, setting: Resource) -> None:
        self.setting = setting
        self._capped, self._uncapped = QueueTotals(setting.cap, False), QueueTotals(None, False)
        self._rows: list[Entry] = []
        self._by_node: dict[Node, list[Entry]] = {}
        #: For each kind of request that does not fit, the rows that block it. Further rows do not change them.
        self._blocking: dict[tuple[str, int | None, int], tuple[Entry, ...]] = {}
        self._waiting: dict[str, int] = {}
        self._waiters = 0

    def behind(self, entry: Entry) -> Blocked:
        """Return the rows that block a request at this point of the queue."""
        kind = entry.access, entry.limit, entry.weight
        fits, uncapped = self._capped.fits(*kind), self._uncapped.fits(*kind)
        cap = self._cap_for(entry)
        blocking: tuple[Entry, ...] = ()
        if not (uncapped if cap is None else fits):
            if kind not in self._blocking:
                self._blocking[kind] = _first(self._rows, *kind, cap)
            blocking = self._blocking[kind]
        own = _first(self._by_node.get(node_of(entry), ()), *kind, cap)
        waiters = self._waiters - (0 if entry.access == WRITE else self._waiting.get(entry.access, 0))
        return Blocked(entry, self.setting, blocking, waiters, fits, uncapped, own)

    def _cap_for(self, entry: Entry) -> int | None:
        """Return the operator's cap, unless the request alone exceeds it."""
        cap = self.setting.cap
        return None if cap is None or (number(entry.weight) or 0) > cap else cap

    def add(self, entry: Entry) -> None:
        """Move past one row."""
        self._capped.add(entry.access, entry.limit, entry.weight)
        self._uncapped.add(entry.access, entry.limit, entry.weight)
        self._rows.append(entry)
        self._by_node.setdefault(node_of(entry), []).append(entry)
        if is_waiting(entry):
            self._waiters += 1
            self._waiting[entry.access] = self._waiting.get(entry.access, 0) + 1


def _first(rows: Iterable[Entry], access: str, limit: int | None, weight: int, cap: int | None) -> tuple[Entry, ...]:
    """Return the first rows ahead that together block a request; none if it fits with all of them (`Request.fits`)."""
    limits = [bound for bound in (number(limit), cap) if bound is not None]
    lowest_limit, load, blocking = min(limits, default=None), number(weight) or 0, []
    if lowest_limit is not None and load > lowest_limit:
        return ()  # it would not fit even alone
    for row in rows:
        if access != WRITE and row.access == access:
            continue
        load += number(row.weight) or 0
        blocking.append(row)
        if (declared := number(row.limit)) is not None:
            lowest_limit = declared if lowest_limit is None else min(lowest_limit, declared)
        if lowest_limit is not None and load > lowest_limit:
            return tuple(blocking)
    return ()


@record
class Chain:
    """A chain of waits. Each link is a waiting request and the row that it waits for."""

    links: tuple[tuple[Entry, Entry], ...]
    head: Entry | None  # the last row, if it waits for no other
    deadlock: bool = False  # the chain comes back to itself


@record
class RootBlocker(AsDict):
    """A row that blocks others and waits for none."""

    entry: Entry
    waiters: int  # the requests that wait for it, directly or through others
    waiting_seconds: float  # the sum over these waiters


class WaitGraph:
    """All waiting requests with the rows that block them; built in one pass along all queues."""

    def __init__(self, overview: Overview) -> None:
        #: The waiting requests, by position.
        self.blocked: dict[int, Blocked] = {}
        self._waiting_of: dict[Node, list[Entry]] = {}
        self._heads: dict[int, Entry | None] = {}
        settings = {resource.resource: resource for resource in overview.resources}
        for resource, rows in groupby(overview.entries, key=lambda entry: entry.resource):
            walk = QueueWalk(settings.get(resource) or Resource(resource, None, False, None, 0, 0))
            for blocked in self._along(walk, list(rows)):
                self.blocked[blocked.entry.position] = blocked
                self._waiting_of.setdefault(node_of(blocked.entry), []).append(blocked.entry)

    @staticmethod
    def _along(walk: QueueWalk, rows: list[Entry]) -> Iterator[Blocked]:
        upgrading = [row for row in rows if is_upgrading(row)]
        for row in rows:
            if is_waiting(row):
                yield walk.behind(row)
            walk.add(row)
        for upgrader in upgrading:  # at most one
            others = tuple(other for other in rows if other is not upgrader and other.granted_at is not None)
            yield Blocked(upgrader, walk.setting, others, 0, not others, not others, ())

    def next(self, blocked: Blocked) -> tuple[Entry, Entry | None] | None:
        """Return the row that a request waits for, and the request on which that row's owner waits, if it does.

        If one of several rows has to leave, prefer a row whose owner does not wait. If some of them have to leave in
        any case, prefer one of those whose owner waits.
        """
        if not blocked.behind or blocked.setting.paused:
            return None
        needed = [row for row in blocked.behind if _excludes(row, blocked.entry)]
        waits = [(row, self._waits_with(row)) for row in needed or blocked.behind]
        if needed:
            return max(waits, key=lambda pair: (pair[1] is not None, pair[0].seconds))
        return min(waits, key=lambda pair: pair[1] is not None)

    def _waits_with(self, row: Entry) -> Entry | None:
        """Return the request on which the owner of a row waits."""
        if row.position in self.blocked:
            return row
        waiting = self._waiting_of.get(node_of(row))
        return waiting[0] if waiting else None

    def chain(self, position: int) -> Chain:
        """Return the chain from the waiter at a position up to the row at its head."""
        links: list[tuple[Entry, Entry]] = []
        seen: set[int] = set()
        blocked = self.blocked.get(position)
        while blocked is not None:
            if blocked.entry.position in seen:
                return Chain(tuple(links), None, deadlock=True)
            seen.add(blocked.entry.position)
            step = self.next(blocked)
            if step is None:
                break
            row, waits = step
            links.append((blocked.entry, row))
            if waits is None:
                return Chain(tuple(links), row)
            blocked = self.blocked[waits.position]
        return Chain(tuple(links), None)

    def head(self, position: int) -> Entry | None:
        """Return the row at the head of the chain from this position; None for a deadlock, or behind a pause."""
        path: list[int] = []
        head: Entry | None = None
        blocked = self.blocked.get(position)
        while blocked is not None:
            position = blocked.entry.position
            if position in self._heads:
                head = self._heads[position]
                break
            self._heads[position] = None  # until it is known: a walk that comes here again is in a cycle
            path.append(position)
            step = self.next(blocked)
            if step is None:
                break
            if step[1] is None:
                head = step[0]
                break
            blocked = self.blocked[step[1].position]
        self._heads.update(dict.fromkeys(path, head))
        return head


def _excludes(row: Entry, entry: Entry) -> bool:
    """Return True if the request cannot be granted before that row has left."""
    if entry.access.startswith(UPGRADE):
        return True
    limits = [bound for bound in (number(row.limit), number(entry.limit)) if bound is not None]
    return bool(limits) and (number(row.weight) or 0) + (number(entry.weight) or 0) > min(limits)


def root_blockers(overview: Overview) -> list[RootBlocker]:
    """Return the rows that block others and wait for none, the one with the longest total waiting time first."""
    waits = WaitGraph(overview)
    totals: dict[int, tuple[Entry, int, float]] = {}
    for position, blocked in waits.blocked.items():
        head = waits.head(position)
        if head is not None:
            _, count, seconds = totals.get(head.position, (head, 0, 0.0))
            totals[head.position] = (
                head,
                count + 1,
                seconds + (blocked.entry.seconds if is_waiting(blocked.entry) else 0.0),
            )
    return sorted(
        (RootBlocker(*blocked) for blocked in totals.values()),
        key=lambda blocked: (-blocked.waiting_seconds, blocked.entry.position),
    )
