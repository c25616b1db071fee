"""Model the wait-for graph in memory for the tests of deadlocks, and run it to its outcome."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from hypothesis import strategies as st

from sqlsem.values.deadlocks import Row
from sqlsem.values.locks import UPGRADE

#: (resource, access, limit, weight)
Asked = tuple[str, str, "int | None", int]
#: ("ask", node, [Asked, …]), ("leave", node, ""), ("upgrade", node, resource)
Move = tuple[str, int, object]

BARE, NAMELESS = 0, 1  # among the numbers of nodes: no member at all; a member without owners


def fits(row: Row, rows: Iterable[Row], caps: dict[str, int]) -> bool:
    """Return True if the row may be granted. A cap below the row's own weight is the operator's to lift."""
    ahead = [
        entry
        for entry in rows
        if entry.resource == row.resource
        and entry.position < row.position
        and (row.access == "write" or entry.access != row.access)
    ]
    limits = [entry.limit for entry in [*ahead, row] if entry.limit is not None]
    if caps.get(row.resource, 0) >= row.weight:
        limits.append(caps[row.resource])
    return not ahead or not limits or row.weight + sum(entry.weight for entry in ahead) <= min(limits)


def alone_inside(row: Row, rows: Iterable[Row]) -> bool:
    return not any(entry.resource == row.resource and entry.granted and entry != row for entry in rows)


def outcome(rows: Sequence[Row], caps: dict[str, int], pick: Callable[[list], object] = lambda some: some[0]) -> set:
    """Return the nodes that can never finish if no new request comes: all others are granted, one by one, and leave."""
    rows = [row for row in rows if row.node is not None]  # a bare participant may leave at any time
    while True:
        moves = []
        for row in rows:
            if row.access == UPGRADE:
                if alone_inside(row, rows):
                    moves.append(dataclasses.replace(row, access="write"))
            elif not row.granted and fits(row, rows, caps):
                moves.append(dataclasses.replace(row, granted=True))
        done = sorted({row.node for row in rows} - {row.node for row in rows if row.waits})
        if not moves and not done:
            return {row.node for row in rows}
        move = pick([*moves, *done])
        if isinstance(move, Row):
            rows = [move if row.position == move.position else row for row in rows]
        else:
            rows = [row for row in rows if row.node != move]


class World:
    """A queue that is driven by moves, as real queues come about: a node that waits asks for nothing more."""

    def __init__(self, caps: dict[str, int]) -> None:
        self.caps = caps
        self.rows: list[Row] = []
        self._numbers = itertools.count(1)

    def owner(self, node: int) -> tuple[int | None, str | None]:
        if node == BARE:
            return None, None
        return (1, None) if node == NAMELESS else (node // 3 + 1, f"thread {node}")

    def of(self, node: int) -> list[Row]:
        return [row for row in self.rows if (row.member, row.owner) == self.owner(node)]

    def move(self, kind: str, node: int, argument: object) -> bool:
        """Make a move; return False if it was impossible. Grants what can be granted, in the order of the queue."""
        own = self.of(node)
        single = node not in (BARE, NAMELESS)
        if kind == "leave":
            if single and any(row.waits for row in own):
                return False
            self.rows = [row for row in self.rows if row not in (own if single else own[:1])]
        elif kind == "ask":
            assert isinstance(argument, list)
            if single and (any(row.waits for row in own) or len(own) > 4):
                return False
            for resource, access, limit, weight in argument:
                member, owner = self.owner(node)
                self.rows.append(
                    Row(next(self._numbers), resource, member, owner, access, limit, weight, granted=False)
                )
        else:
            reads = [row for row in own if row.resource == argument and row.access == "read" and row.granted]
            taken = any(row.resource == argument and row.access == UPGRADE for row in self.rows)
            if not single or not reads or taken or any(row.waits for row in own):
                return False
            self.let_in()
            self.rows = [dataclasses.replace(row, access=UPGRADE) if row is reads[0] else row for row in self.rows]
        self.let_in()
        return True

    def let_in(self) -> None:
        for number, row in enumerate(self.rows):
            full = row.resource in self.caps and row.weight > self.caps[row.resource]
            if not row.granted and row.member is not None and not full and fits(row, self.rows, self.caps):
                self.rows[number] = dataclasses.replace(row, granted=True)
            elif row.access == UPGRADE and alone_inside(row, self.rows):
                self.rows[number] = dataclasses.replace(row, access="write")


RESOURCES = ("a", "b", "c", "d", "e")


def asked(resource: str) -> st.SearchStrategy[Asked]:
    return st.builds(
        lambda kind, limit, weight: (
            (resource, "write", limit, min(weight, limit))
            if kind == "limit"
            else (resource, "write", None, weight)
            if kind == "none"
            else (resource, kind, 1, 1)
        ),
        st.sampled_from(["limit", "limit", "write", "write", "read", "read", "stage:1", "stage:2", "none"]),
        st.integers(1, 4),
        st.integers(1, 3),
    )


@st.composite
def moves(draw: st.DrawFn) -> Move:
    kind = draw(st.sampled_from(["ask"] * 8 + ["leave", "upgrade"]))
    node = draw(st.sampled_from([*range(2, 12)] * 3 + [BARE, NAMELESS]))
    if kind == "leave":
        return kind, node, ""
    if kind == "upgrade":
        return kind, node, draw(st.sampled_from(RESOURCES))
    names = draw(
        st.lists(st.sampled_from(RESOURCES), min_size=1, max_size=1 if draw(st.integers(0, 4)) else 3, unique=True)
    )
    if node in (BARE, NAMELESS):
        names = names[:1]
    requests = [draw(asked(name)) for name in names]
    if node != BARE:  # the routines register no request without a limit where none is set
        requests = [(name, access, limit or weight, weight) for name, access, limit, weight in requests]
    return kind, node, requests


caps = st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 3), max_size=1)


@st.composite
def worlds(draw: st.DrawFn, maximum: int = 40) -> World:
    world = World(draw(caps))
    for move in draw(st.lists(moves(), min_size=2, max_size=maximum)):
        world.move(*move)
    return world


def crowds(size: int) -> Iterator[tuple[str, int, list[Row]]]:
    """Many owners that wait while they hold locks: with and without cycles, sparse and dense."""

    def hold(resource: Callable[[int], str], access: str = "write", limit: int = 1) -> list[Row]:
        return [Row(n + 1, resource(n), 1, f"w{n}", access, limit, 1, granted=True) for n in range(size)]

    def wait(resource: Callable[[int], str], first: int = 0, limit: int = 1) -> list[Row]:
        return [
            Row(size + 1 + n, resource(n), 1, f"w{n}", "write", limit, 1, granted=False) for n in range(first, size)
        ]

    own = hold(lambda n: f"own{n:05}")
    inside = hold(lambda n: "big", "read")
    pool = hold(lambda n: "pool", limit=size)

    yield "line", 0, own + wait(lambda n: f"own{n + 1:05}")[:-1]
    yield "line, the other way", 0, own + wait(lambda n: f"own{n - 1:05}", 1)
    yield "ring", 1, own + wait(lambda n: f"own{(n + 1) % size:05}")
    yield "pairs", size // 2, own + wait(lambda n: f"own{n ^ 1:05}")
    yield "all behind one", 0, own + wait(lambda n: "own00000", 1)
    yield "all behind one that waits", 1, [*own, *wait(lambda n: "own00001")[:1], *wait(lambda n: "own00000", 1)]
    yield "readers who would write", 1, inside + wait(lambda n: "big")
    yield "a pool with somebody who leaves", 0, pool + wait(lambda n: "pool", 1, size)
    yield "a pool", 1, pool + wait(lambda n: "pool", 0, size)
