"""Find the requests that can never be granted because they wait for each other, from the table's rows alone. No I/O.

A *node* of the wait-for graph is one line of execution: a member and its ``owner`` (a thread, a task, a session). A
node that waits releases nothing. So, of the rows at one instant:

1. Suspect each node that waits. Clear each node whose requests would all be granted if only suspected nodes stayed:
   all others may finish and leave. Repeat until nothing changes. The remaining nodes are *stuck*.
2. Each stuck row points to the stuck rows that block it. A *cycle* is a set of nodes that reach each other and no
   other node (a strongly connected component without a way out). A node that is only blocked by a cycle is not in it.
3. The highest waiting position of a cycle is its youngest request, the victim. Its owner gets `Deadlock`.

Engines with stored routines do the same in SQL (``deadlocks.sql``). The tests compare them with this module; the SQLite
engine runs it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from sqlsem.util.record import record
from sqlsem.values.locks import UPGRADE, WRITE

__all__ = ["Cycle", "Found", "Row", "Step", "find", "message", "steps_of"]


@record
class Row:
    """The fields of a row that the search needs; revoked and abandoned rows are left out."""

    position: int
    resource: str
    member: int | None
    owner: str | None
    access: str
    limit: int | None
    weight: int
    granted: bool

    @classmethod
    def of(cls, row: Any) -> Row:
        """Return the fields of a row of the queue."""
        fields = (row.position, row.resource, row.member_id, row.owner, row.access, row.limit, row.weight)
        return cls(*fields, row.granted_at is not None)

    @property
    def node(self) -> Node | None:
        """The node of the row. None for a bare participant, which is not known; a row without an owner counts as a node
        of its own, as its member may have many owners.
        """
        if self.member is None:
            return None
        return self.member, "" if self.owner is None else self.owner, self.position if self.owner is None else 0

    @property
    def waits(self) -> bool:
        """True if its owner waits for a lock."""
        return not self.granted or self.access == UPGRADE

    def is_in_the_way_of(self, row: Row) -> bool:
        """True if it may block the waiting ``row``: it conflicts and is ahead, or is granted while ``row`` upgrades."""
        if self.resource != row.resource:
            return False
        if row.access == UPGRADE:
            return self.granted and self is not row and self != row
        return self.position < row.position and (row.access == WRITE or self.access != row.access)


Node = tuple[int, str, int]
#: A row that waits, and a row that is in its way.
Edge = tuple[Row, Row]


@record
class Cycle:
    """Nodes that wait for each other, and for no other node."""

    nodes: frozenset[Node]
    rows: tuple[Row, ...]  # the rows of these nodes, by position
    blocked: tuple[Row, ...]  # the rows among them that wait and are blocked

    @property
    def victim(self) -> Row:
        """The youngest request in the cycle."""
        return max(self.blocked, key=lambda row: row.position)

    def path(self, start_row: Row | None = None) -> list[Edge]:
        """Return the shortest path from the victim's row (or another row) back to its owner; the first by positions."""
        victim = start_row or self.victim
        start = victim.node
        waiting: dict[Node | None, list[Row]] = defaultdict(list)
        for row in self.blocked:
            waiting[row.node].append(row)
        # For each queue, by labels, the rows of nodes that are not reached yet: each row is visited once.
        unreached: dict[str, dict[str, deque[Row]]] = defaultdict(lambda: defaultdict(deque))
        for row in self.rows:
            unreached[row.resource][row.access].append(row)
        edge_to: dict[Node, Edge] = {}
        frontier = [victim]
        while start not in edge_to:
            new_edges: dict[Node, Edge] = {}
            for row in sorted(frontier, key=lambda row: row.position):
                for blocker in sorted(
                    _take_blockers(unreached[row.resource], row), key=lambda blocker: blocker.position
                ):
                    if blocker.node is not None and blocker.node not in edge_to:
                        new_edges.setdefault(blocker.node, (row, blocker))
            assert new_edges, "in a cycle, each node reaches each other node"
            edge_to.update(new_edges)
            frontier = [row for node in new_edges for row in waiting[node]]
        path = [edge_to[start]] if start is not None else []
        while path[0][0] != victim:
            source = path[0][0].node
            assert source is not None
            path.insert(0, edge_to[source])
        return path


def _take_blockers(queue: Mapping[str, deque[Row]], row: Row) -> list[Row]:
    """Remove from a queue the rows that block ``row``, and return them."""
    if row.access == UPGRADE:
        found = [entry for rows in queue.values() for entry in rows if entry.is_in_the_way_of(row)]
        for entry in found:
            queue[entry.access].remove(entry)
        return found
    found = []
    for label, rows in queue.items():
        if row.access == WRITE or label != row.access:
            while rows and rows[0].position < row.position:
                found.append(rows.popleft())
    return found


class _Group:
    """Waiting rows of one queue, of which the first blocked row blocks all the others (see `Request.keeps_out`), and
    the load ahead of that row.
    """

    def __init__(self, access: str) -> None:
        self.access = access
        self.waiting: list[int] = []  # indexes in the queue
        self.next = 0  # the index in `waiting` of the first blocked row
        self.counted = 0  # rows before this index are counted
        self.load = self.number = 0
        self.limits: Counter[int] = Counter()

    def count(self, row: Row, times: int) -> None:
        """Add a row ahead to the load, or remove it (-1)."""
        if self.access == WRITE or row.access != self.access:
            self.load += times * row.weight
            self.number += times
            if row.limit is not None:
                self.limits[row.limit] += times
                if not self.limits[row.limit]:
                    del self.limits[row.limit]

    def fits(self, row: Row, cap: int | None) -> bool:
        limits = [*self.limits, *([] if row.limit is None else [row.limit])]
        if cap is not None and cap >= row.weight:  # a lower cap blocks the row until the operator changes it
            limits.append(cap)
        return not self.number or not limits or self.load + row.weight <= min(limits)


class _Queue:
    """The rows of one resource, by position; only rows of nodes that wait."""

    def __init__(self, cap: int | None) -> None:
        self.cap = cap
        self.rows: list[Row] = []
        self.nodes: list[Node] = []
        self.is_blocked: list[bool] = []
        self.groups: dict[object, _Group] = {}
        self.upgrades: list[int] = []
        self.inside = 0

    def add(self, row: Row, node: Node) -> None:
        if row.access == UPGRADE:
            self.upgrades.append(len(self.rows))
        elif row.waits:
            # (With a cap, rows that are too heavy for it are a group of their own.)
            kind = (row.limit, row.weight) if row.access != WRITE else self.cap is not None and row.weight > self.cap
            self.groups.setdefault((row.access, kind), _Group(row.access)).waiting.append(len(self.rows))
        self.rows.append(row)
        self.nodes.append(node)
        self.is_blocked.append(row.waits)
        self.inside += row.granted

    def leave(self, index: int) -> None:
        """Remove a row, as its node is not stuck: the node can finish and release."""
        self.inside -= self.rows[index].granted
        for group in self.groups.values():
            if index < group.counted:
                group.count(self.rows[index], -1)

    def grantable(self, stuck: Mapping[Node, int]) -> Iterator[int]:
        """Yield the indexes of the rows that can be granted now. The caller may remove rows between two of them."""
        for group in self.groups.values():
            while group.next < len(group.waiting):
                index = group.waiting[group.next]
                for number in range(group.counted, index):
                    if self.nodes[number] in stuck:
                        group.count(self.rows[number], 1)
                group.counted = index
                if self.nodes[index] in stuck:
                    if not group.fits(self.rows[index], self.cap):
                        break
                    self.is_blocked[index] = False
                    yield index
                group.next += 1
        for index in self.upgrades:
            if self.is_blocked[index] and self.nodes[index] in stuck and self.inside == 1:
                self.is_blocked[index] = False
                yield index


def find(rows: Iterable[Row], caps: Mapping[str, int] | None = None) -> list[Cycle]:
    """Return all cycles among these rows; ``caps`` are the limits that operators have set. In about linear time."""
    rows = sorted(rows, key=lambda row: row.position)
    owners = [row.node for row in rows]
    stuck = Counter(node for row, node in zip(rows, owners, strict=True) if row.waits and node is not None)
    queues: dict[str, _Queue] = {}
    indexes: dict[Node, list[tuple[_Queue, int]]] = defaultdict(list)
    for row, node in zip(rows, owners, strict=True):
        if node in stuck:
            assert node is not None
            queue = queues.get(row.resource)
            if queue is None:
                queue = queues[row.resource] = _Queue((caps or {}).get(row.resource))
            indexes[node].append((queue, len(queue.rows)))
            queue.add(row, node)

    # A node that is granted everywhere releases; in the queues that it leaves, other rows may be granted.
    changed = dict.fromkeys(queues.values())
    while changed:
        queue, _ = changed.popitem()
        for index in queue.grantable(stuck):
            node = queue.nodes[index]
            stuck[node] -= 1
            if not stuck[node]:
                del stuck[node]
                for other_queue, other_index in indexes[node]:
                    other_queue.leave(other_index)
                    changed[other_queue] = None

    graph = _graph(queues.values(), stuck)
    cycles = []
    for part in _components(graph):
        if all(target in part for vertex in part for target in graph[vertex]):
            cycle_rows = [
                (queue.rows[index], queue.is_blocked[index])
                for vertex in part
                if vertex in stuck
                for queue, index in indexes[cast("Node", vertex)]
            ]
            cycle_rows.sort(key=lambda pair: pair[0].position)
            cycles.append(
                Cycle(
                    frozenset(cast("Node", vertex) for vertex in part if vertex in stuck),
                    tuple(row for row, _ in cycle_rows),
                    tuple(row for row, is_blocked in cycle_rows if is_blocked),
                )
            )
    return cycles


#: A node; or all rows of one label, from an index of a queue towards its front.
Vertex = Node | tuple[str, str, int]


def _graph(queues: Iterable[_Queue], stuck: Mapping[Node, int]) -> dict[Vertex, list[Vertex]]:
    """Return the wait-for graph of the stuck nodes. A waiting row points to the last row of each label ahead of it,
    from which the earlier ones are reachable; no edge needs to pass a blocked row of access write.
    """
    graph: dict[Vertex, list[Vertex]] = {node: [] for node in stuck}
    for queue in queues:
        last: dict[str, Vertex] = {}
        for index, (row, node) in enumerate(zip(queue.rows, queue.nodes, strict=True)):
            if node not in stuck:
                continue
            if queue.is_blocked[index] and row.access == UPGRADE:
                graph[node] += [
                    other
                    for other, entry in zip(queue.nodes, queue.rows, strict=True)
                    if other in stuck and entry.is_in_the_way_of(row)
                ]
            elif queue.is_blocked[index]:
                graph[node] += [vertex for label, vertex in last.items() if row.access == WRITE or label != row.access]
                if row.access == WRITE:
                    last = {}
            vertex_here = (row.resource, row.access, index)
            graph[vertex_here] = [node, last[row.access]] if row.access in last else [node]
            last[row.access] = vertex_here
    return graph


def _components(graph: Mapping[Vertex, Iterable[Vertex]]) -> Iterator[set[Vertex]]:
    """Yield the strongly connected components (Tarjan's algorithm, without recursion)."""
    number: dict[Vertex, int] = {}
    lowest: dict[Vertex, int] = {}
    stack: list[Vertex] = []
    on_stack: set[Vertex] = set()
    for root in graph:
        if root in number:
            continue
        number[root] = lowest[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        path = [(root, iter(graph[root]))]
        while path:
            vertex, targets = path[-1]
            for target in targets:
                if target not in number:
                    number[target] = lowest[target] = len(number)
                    stack.append(target)
                    on_stack.add(target)
                    path.append((target, iter(graph[target])))
                    break
                if target in on_stack:
                    lowest[vertex] = min(lowest[vertex], number[target])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[vertex])
                if lowest[vertex] == number[vertex]:
                    part = {vertex}
                    while (member := stack.pop()) != vertex:
                        part.add(member)
                    on_stack -= part
                    yield part


@record
class Step:
    """One node of a cycle: the row with which it blocks the node before it, and the row with which it waits."""

    member: int
    host: str | None
    pid: int | None  # if the member is a process
    session: int | None  # if the member is a database session
    owner: str | None
    ahead_resource: str
    ahead: int
    ahead_granted: bool
    resource: str
    position: int
    upgrade: bool  # a reader that waits for all other holders, to become a writer
    behind: int

    @classmethod
    def of(cls, ahead: Row, row: Row, behind: Row, who: tuple[str | None, int | None, int | None]) -> Step:
        """Make the step of the node with ``ahead``, whose ``row`` waits for ``behind``; ``who``: host, pid, session."""
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
        """The name of the node in messages."""
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


@record
class Found:
    """A deadlock in which the asking member made the youngest request. The first step is that member's."""

    steps: tuple[Step, ...]
    nodes: int  # in the whole cycle

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[Any]]) -> Found | None:
        """Return the deadlock from the rows of the routine ``find_deadlock``, one for each node."""
        steps = tuple(Step(*(*row[:7], bool(row[7]), *row[8:10], bool(row[10]), row[11])) for row in rows)
        return cls(steps, rows[0][12]) if rows else None

    @property
    def victim(self) -> int:
        """The position of the request that must be given up."""
        return self.steps[0].position


def steps_of(
    cycle: Cycle, members: Mapping[int, tuple[str | None, int | None, int | None]], start_row: Row | None = None
) -> Found:
    """Return the cycle's path as steps, as `Cycle.path` does; ``members`` gives each member's host, pid and session.
    Rows with negative positions are artificial, and left out.
    """
    steps = []
    path = cycle.path(start_row)
    for number, (row, behind) in enumerate(path):
        if row.position >= 0:
            before = number - 1
            while path[before][1].position < 0:
                before -= 1
            assert row.member is not None
            steps.append(Step.of(path[before][1], row, behind, members[row.member]))
    return Found(tuple(steps), len(cycle.nodes))


def message(found: Found) -> str:
    """Return the message of the victim's `Deadlock`."""
    if len(found.steps) == 1:
        (step,) = found.steps
        return (
            f"Deadlock: {step}, which is its own: it waits for itself. This request, {found.victim}, has been given "
            f"up: release something first, or take what is needed in one go (weight=…, all_of)"
        )
    more = found.nodes - len(found.steps)
    also = f" ({more} more wait{'s' if more == 1 else ''} in this cycle)" if more else ""
    return (
        f"Deadlock: {'; '.join(map(str, found.steps))}{also}. The youngest request, {found.victim}, has been given up: "
        f"release what is held and try again; take both in the same order everywhere, or at once (all_of)"
    )
