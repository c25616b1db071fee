"""Which requests can never be granted, as they wait for each other: from the rows of the table alone. No I/O.

A *party* is one line of execution: a member and its ``owner`` (a thread, a task, a session). While it waits it cannot
give anything back; so of the rows at one instant:

1. Everybody who waits is suspected. Those who would be let in if only the suspected ones stayed are suspected no more,
   as all others may finish and leave. Repeated until nothing changes: those left are *stuck*.
2. Each stuck row points to the stuck rows that are in its way. A *knot* is a set of parties that reach each other and
   nobody else: all that they need is held among themselves. (Those who only stand behind a knot are no part of it.)
3. The highest position that waits in a knot is the youngest request: its owner is told.

Engines with stored routines do the same in SQL (``deadlocks.sql``); this is what they are tested against, and what the
SQLite engine runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlsem.model import WRITE

__all__ = ["UPGRADE", "Found", "Knot", "Row", "Step", "find", "message", "steps_of"]

#: The label of a row whose owner is inside and waits for everybody else inside to leave.
UPGRADE = "upgrade"


@dataclass(frozen=True, slots=True)
class Row:
    """What matters of a row that is neither revoked nor abandoned."""

    position: int
    resource: str
    member: int | None
    owner: str | None
    access: str
    limit: int | None
    weight: int
    granted: bool

    @property
    def party(self) -> Party | None:
        """The line of execution that it is of. Of a bare participant nothing is known; where a member does not tell the
        owner, each row is taken for somebody's of its own, as there may be many.
        """
        if self.member is None:
            return None
        return self.member, "" if self.owner is None else self.owner, self.position if self.owner is None else 0

    @property
    def waits(self) -> bool:
        """Whether its owner waits for something."""
        return not self.granted or self.access == UPGRADE


Party = tuple[int, str, int]
#: A row that waits, and one that is in its way.
Edge = tuple[Row, Row]


@dataclass(frozen=True, slots=True)
class Knot:
    """Some who wait for each other, and for nobody else."""

    parties: frozenset[Party]
    edges: tuple[Edge, ...]

    @property
    def victim(self) -> Row:
        """The youngest request in it."""
        return max((waiter for waiter, _ in self.edges), key=lambda row: row.position)

    def cycle(self, start_row: Row | None = None) -> list[Edge]:
        """The shortest way from the victim's row (or another one) back to its owner (the first such, by positions)."""
        victim = start_row or self.victim
        start = victim.party
        edges = sorted(self.edges, key=lambda edge: (edge[0].position, edge[1].position))
        came: dict[Party, Edge] = {}
        frontier = {start}
        while start not in came:
            found: dict[Party, Edge] = {}
            for edge in edges:
                source, target = edge[0].party, edge[1].party
                assert target is not None
                if source in frontier and target not in came and (came or edge[0] == victim):
                    found.setdefault(target, edge)
            assert found, "in a knot, everybody reaches everybody"
            came.update(found)
            frontier = set(found)
        path = [came[start]]
        while path[0][0] != victim:
            source = path[0][0].party
            assert source is not None
            path.insert(0, came[source])
        return path


def find(rows: Iterable[Row], caps: Mapping[str, int] | None = None) -> list[Knot]:
    """All knots among these rows; ``caps`` are the limits that operators have set."""
    caps = caps or {}
    queues: dict[str, list[Row]] = defaultdict(list)
    requests: dict[Party, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.position):
        queues[row.resource].append(row)
        if row.waits and row.party is not None:
            requests[row.party].append(row)

    def in_the_way(row: Row) -> list[Row]:
        """The stuck rows that keep this one out; empty when it would be let in once all others have left."""
        queue = queues[row.resource]
        if row.access == UPGRADE:
            return [one for one in queue if one.granted and one is not row and one.party in requests]
        ahead = [
            one
            for one in queue
            if one.position < row.position
            and (row.access == WRITE or one.access != row.access)
            and one.party in requests
        ]
        limits = [one.limit for one in (row, *ahead) if one.limit is not None]
        cap = caps.get(row.resource)
        if cap is not None and cap >= row.weight:  # a lower one keeps it out for as long as the operator likes
            limits.append(cap)
        blocked = ahead and limits and sum(one.weight for one in ahead) + row.weight > min(limits)
        return ahead if blocked else []

    before = -1
    while len(requests) != before:
        before = len(requests)
        # In the order of the queues, so that one pass is enough for those who wait in line.
        for party in list(requests):
            if not any(in_the_way(row) for row in requests[party]):
                del requests[party]

    # A row that points to a blocked row of access write need not point past it, to those that one points to itself: so
    # the graph is small, however long the queue.
    graph: dict[Party, set[Party]] = {party: set() for party in requests}
    for queue in queues.values():
        passed: list[Row] = []
        for row in queue:
            if row.party not in requests:
                continue
            found = in_the_way(row) if row.waits else []
            near = found if row.access == UPGRADE else [one for one in passed if one in found] if found else []
            graph[row.party].update(one.party for one in near if one.party is not None)
            if found and row.access == WRITE:
                passed = []
            passed.append(row)
    return [
        Knot(
            frozenset(part),
            tuple((row, one) for party in part for row in requests[party] for one in in_the_way(row)),
        )
        for part in _components(graph)
        if all(target in part for party in part for target in graph[party])
    ]


def _components(graph: Mapping[Party, Iterable[Party]]) -> Iterator[set[Party]]:
    """Strongly connected components (Tarjan's algorithm, without recursion)."""
    number: dict[Party, int] = {}
    lowest: dict[Party, int] = {}
    stack: list[Party] = []
    on_stack: set[Party] = set()
    for root in graph:
        if root in number:
            continue
        number[root] = lowest[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        path = [(root, iter(graph[root]))]
        while path:
            party, targets = path[-1]
            for target in targets:
                if target not in number:
                    number[target] = lowest[target] = len(number)
                    stack.append(target)
                    on_stack.add(target)
                    path.append((target, iter(graph[target])))
                    break
                if target in on_stack:
                    lowest[party] = min(lowest[party], number[target])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[party])
                if lowest[party] == number[party]:
                    part = set(stack[stack.index(party) :])
                    del stack[-len(part) :]
                    on_stack -= part
                    yield part


@dataclass(frozen=True, slots=True)
class Step:
    """One party of a cycle: where it is in the way of the one before, and what it waits for itself."""

    member: int
    host: str | None
    pid: int | None  # of a process that is a member,
    session: int | None  # or of a database session that is one itself
    owner: str | None
    ahead_resource: str
    ahead: int
    ahead_granted: bool
    resource: str
    position: int
    upgrade: bool  # waits for all others inside to leave, to be a writer
    behind: int

    @classmethod
    def of(cls, ahead: Row, row: Row, behind: Row, who: tuple[str | None, int | None, int | None]) -> Step:
        """Who has the row ``ahead``, and waits with ``row`` for the one ``behind`` which it stands; ``who``: its host,
        pid and session.
        """
        assert row.member is not None
        host, pid, session = who
        return cls(
            member=row.member,
            host=host,
            pid=pid,
            session=None if pid is not None else session,
            owner=row.owner,
            ahead_resource=ahead.resource,
            ahead=ahead.position,
            ahead_granted=ahead.granted,
            resource=row.resource,
            position=row.position,
            upgrade=row.access == UPGRADE,
            behind=behind.position,
        )

    @property
    def place(self) -> str:
        """Which one it is, for people."""
        name = self.host or "?"
        if self.pid is not None:
            name += f":{self.pid}"
        elif self.session is not None:
            name += f" session {self.session}"
        return name if self.owner is None else f"{name} ({self.owner})"

    def __str__(self) -> str:
        waits = f"waits for {self.resource!r} at {self.position} behind {self.behind}"
        if self.upgrade:
            waits = f"waits to be the writer of {self.resource!r} at {self.position} until {self.behind} has left"
        if self.ahead == self.position and not self.upgrade:
            return f"{self.place} {waits}"
        verb = "holds" if self.ahead_granted else "queues for"
        return f"{self.place} {verb} {self.ahead_resource!r} at {self.ahead}, {waits}"


@dataclass(frozen=True, slots=True)
class Found:
    """A deadlock whose youngest request is the asking member's. The first step is its own."""

    steps: tuple[Step, ...]
    parties: int  # in the whole knot

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[Any]]) -> Found | None:
        """From the answer of the routine ``find_deadlock``, which has a row for each party."""
        steps = tuple(Step(*(*row[:7], bool(row[7]), *row[8:10], bool(row[10]), row[11])) for row in rows)
        return cls(steps, rows[0][12]) if rows else None

    @property
    def victim(self) -> int:
        """The position that has to be given up."""
        return self.steps[0].position


def steps_of(knot: Knot, members: Mapping[int, tuple[str | None, int | None, int | None]]) -> Found:
    """The knot's cycle in terms of people; ``members`` gives each one's host, pid and session."""
    steps = []
    cycle: Sequence[Edge] = knot.cycle()
    for number, (row, behind) in enumerate(cycle):
        assert row.member is not None
        steps.append(Step.of(cycle[number - 1][1], row, behind, members[row.member]))
    return Found(tuple(steps), len(knot.parties))


def message(found: Found) -> str:
    """What the victim is told.

    >>> one = Step(1, "etl01", 4321, None, "MainThread#1", "x", 41, True, "y", 44, False, 42)
    >>> two = Step(1, "etl01", 4321, None, "Thread-1#2", "y", 42, True, "x", 43, False, 41)
    >>> print(message(Found((one, two), 2)))  # doctest: +NORMALIZE_WHITESPACE
    Deadlock: etl01:4321 (MainThread#1) holds 'x' at 41, waits for 'y' at 44 behind 42; etl01:4321 (Thread-1#2) holds
    'y' at 42, waits for 'x' at 43 behind 41. The youngest request, 44, has been given up: release what is held and
    try again; take both in the same order everywhere, or at once (all_of)
    """
    if len(found.steps) == 1:
        (step,) = found.steps
        return (
            f"Deadlock: {step}, which is its own: it waits for itself. This request, {found.victim}, has been given "
            f"up: release something first, or take what is needed in one go (weight=…, all_of)"
        )
    more = found.parties - len(found.steps)
    also = f" ({more} more wait{'s' if more == 1 else ''} in this knot)" if more else ""
    return (
        f"Deadlock: {'; '.join(map(str, found.steps))}{also}. The youngest request, {found.victim}, has been given up: "
        f"release what is held and try again; take both in the same order everywhere, or at once (all_of)"
    )
