"""The search finds all deadlocks and no others: compared with a simulation that lets each node finish that can."""

import dataclasses
import random

import pytest
import wait_graphs
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support import processor_seconds

from sqlsem.values import deadlocks
from sqlsem.values.deadlocks import Row, find
from sqlsem.values.locks import UPGRADE

EXAMPLES = settings(max_examples=400)


def row(position, resource, owner, access="write", limit=1, weight=1, granted=None):
    granted = access == UPGRADE if granted is None else granted
    return Row(position, resource, None if owner is None else 1, owner, access, limit, weight, granted)


def holds(position, resource, owner, *rest):
    return dataclasses.replace(row(position, resource, owner, *rest), granted=True)


def edges(cycle):
    return {(waiter, row) for waiter in cycle.blocked for row in cycle.rows if row.is_in_the_way_of(waiter)}


#: Two owners, each of which waits for what the other one holds.
RING = [holds(1, "x", "A"), holds(2, "y", "B"), row(3, "y", "A"), row(4, "x", "B")]


def names(cycle):
    return {node[1] for node in cycle.nodes}


@EXAMPLES
@given(wait_graphs.worlds(), st.randoms(use_true_random=False))
def test_search_agrees_with_the_outcome(world, chance):
    cycles = find(world.rows, world.caps)
    lost = wait_graphs.outcome(world.rows, world.caps, chance.choice)
    event(f"{len(cycles)} cycles")
    # No miss: a node that can never finish is in a cycle, or waits for a cycle.
    assert bool(cycles) == bool(lost)
    for cycle in cycles:
        # No false alarm: no node of the cycle can finish, even after all other nodes have left.
        rows = [row for row in world.rows if row.node in cycle.nodes]
        assert wait_graphs.outcome(rows, world.caps, chance.choice) == cycle.nodes
        # The cycle is minimal: each of its nodes waits, directly or not, for each of the others.
        ways = {node: {edge[1].node for edge in edges(cycle) if edge[0].node == node} for node in cycle.nodes}
        for start in ways:
            reached, pending = set(), [start]
            while pending:
                new = ways[pending.pop()] - reached
                reached |= new
                pending += new
            assert reached == cycle.nodes
        assert cycle.victim.waits
        assert cycle.victim.position == max(waiter.position for waiter, _ in edges(cycle))
        check_path(cycle)
    assert len({node for cycle in cycles for node in cycle.nodes}) == sum(len(cycle.nodes) for cycle in cycles)


def check_path(cycle):
    path = cycle.path()
    assert path[0][0] == cycle.victim
    assert {*path} <= edges(cycle)
    for edge, following in zip(path, path[1:] + path[:1], strict=True):
        assert edge[1].node == following[0].node
    assert len({edge[0].node for edge in path}) == len(path)


@EXAMPLES
@given(wait_graphs.worlds(), st.randoms(use_true_random=False))
def test_giving_up_the_victims_frees_everybody(world, chance):
    rows = world.rows
    for _ in range(len(rows)):
        cycles = find(rows, world.caps)
        if not cycles:
            break
        # A victim that cancels an upgrade is a reader again.
        for victim in (cycle.victim for cycle in cycles):
            rows = [dataclasses.replace(row, access="read") if row == victim else row for row in rows]
            rows = [row for row in rows if row.position != victim.position or row.granted]
    assert find(rows, world.caps) == []
    assert wait_graphs.outcome(rows, world.caps, chance.choice) == set()


@EXAMPLES
@given(st.lists(st.lists(st.sampled_from(wait_graphs.RESOURCES), min_size=1, unique=True), max_size=12), st.data())
def test_all_of_requests_never_deadlock(requests, data):
    """Also where some of the locks are already granted."""
    world = wait_graphs.World(data.draw(wait_graphs.caps))
    for node, names in enumerate(requests, 2):
        world.move("ask", node, [data.draw(wait_graphs.asked(name)) for name in names])
        if data.draw(st.booleans()):
            world.move("leave", data.draw(st.integers(2, node)), "")
    assert find(world.rows, world.caps) == []


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["mutex", "readers", "limit", "stages"])
def test_ring_of_any_kind_is_a_deadlock(size, kind):
    """Each node holds one lock and waits for the lock of the next node."""
    held = {"mutex": ("write", 1), "readers": ("read", 1), "limit": ("write", 1), "stages": ("stage:1", 1)}[kind]
    terms = {"mutex": ("write", 1), "readers": ("write", 1), "limit": ("write", 1), "stages": ("stage:2", 1)}[kind]
    rows = [holds(n + 1, f"r{n}", f"w{n}", *held) for n in range(size)]
    if kind == "limit":
        rows = [dataclasses.replace(entry, limit=3, weight=3) for entry in rows]
    waits = [row(100 + n, f"r{(n + 1) % size}", f"w{n}", *terms) for n in range(size)]
    for missing in range(size):
        assert find(rows + waits[:missing] + waits[missing + 1 :]) == []
    (cycle,) = find(rows + waits)
    assert names(cycle) == {f"w{n}" for n in range(size)}
    assert cycle.victim.position == 100 + size - 1
    assert len(cycle.path()) == size


def test_limit_deadlocks_only_with_all_its_holders():
    rows = [holds(1, "x", "A"), holds(2, "pool", "B", "write", 3), holds(3, "pool", "C", "write", 3)]
    free = holds(4, "pool", "D", "write", 3)
    waits = [row(5, "x", "B"), row(6, "x", "C"), row(7, "pool", "A", "write", 3)]
    assert find([*rows, free, *waits]) == []  # D will leave
    (cycle,) = find([*rows, free, *waits, row(8, "x", "D")])
    assert names(cycle) == {"A", "B", "C", "D"}
    assert cycle.victim.position == 8


def test_pure_waiter_can_be_part_of_a_cycle():
    """W holds nothing, but is ahead of B in the queue, and waits for A's lock."""
    rows = [
        holds(1, "x", "A", "write", 2),
        holds(2, "y", "B"),
        row(3, "y", "A"),
        row(4, "x", "W", "write", 2, 2),
    ]
    assert find(rows) == []
    (cycle,) = find([*rows, row(5, "x", "B", "write", 2)])
    assert names(cycle) == {"A", "B", "W"}
    assert [(waiter.position, other.position) for waiter, other in cycle.path()] in (
        [(5, 1), (3, 2)],
        [(5, 4), (4, 1), (3, 2)],
    )


def test_waiter_behind_a_cycle_is_not_in_it():
    (cycle,) = find([*RING, holds(5, "z", "C"), row(6, "x", "C"), row(7, "z", "D")])
    assert names(cycle) == {"A", "B"}
    assert cycle.victim.position == 4


def test_a_limit_that_an_operator_has_set():
    rows = [
        holds(1, "x", "A", "write", 5),
        holds(2, "y", "B"),
        row(3, "y", "A"),
        row(4, "x", "B", "write", 5),
    ]
    assert find(rows) == []
    assert find(rows, {"y": 1}) == []
    (cycle,) = find(rows, {"x": 1})
    assert names(cycle) == {"A", "B"}
    # A cap below the request's own weight: the request waits for the operator alone.
    assert find([*rows[:3], row(4, "x", "B", "write", 5, 2)], {"x": 1}) == []


def test_owners_are_told_apart():
    """Threads of one member wait for each other; a row without an owner belongs to no particular thread."""
    assert len(find(RING)) == 1
    assert find([dataclasses.replace(entry, owner=None) for entry in RING]) == []
    assert find([dataclasses.replace(entry, member=None, owner=None) for entry in RING]) == []
    assert find([dataclasses.replace(entry, member=7) if entry.owner == "B" else entry for entry in RING])
    assert find([holds(1, "x", "A"), row(2, "x", "A")])[0].victim.position == 2  # waits for itself


def test_concurrent_upgrades_are_a_deadlock():
    # A waits for B, which holds the resource too and waits for A's other lock.
    rows = [
        row(1, "x", "A", UPGRADE),
        holds(2, "x", "B", "read"),
        holds(3, "y", "A"),
    ]
    assert find(rows) == []
    (cycle,) = find([*rows, row(4, "y", "B")])
    assert names(cycle) == {"A", "B"}
    assert cycle.victim.position == 4
    # Two upgrades: each node reads the resource that the other wants to write.
    (cycle,) = find(
        [row(1, "x", "A", UPGRADE), row(2, "y", "B", UPGRADE), holds(3, "y", "A", "read"), holds(4, "x", "B", "read")]
    )
    assert cycle.victim.position == 2
    # A later request waits behind the upgrade; the upgrade waits for holders only.
    assert find([row(1, "x", "A", UPGRADE), row(2, "x", "B", "read"), row(3, "x", "C")]) == []


def test_two_cycles_are_found_at_once():
    other = [
        dataclasses.replace(entry, position=entry.position + 10, resource=f"r{entry.resource}", owner=f"r{entry.owner}")
        for entry in RING
    ]
    assert sorted(cycle.victim.position for cycle in find([*RING, *other])) == [4, 14]


def test_long_queue_is_searched_quickly():
    """Hundreds of waiters in one queue, all blocked in the end by a holder that does not wait."""
    rows = [holds(1, "x", "A"), *(row(n, "x", f"w{n}") for n in range(2, 600))]
    rows += [holds(1000 + n, f"own{n}", f"w{n}") for n in range(2, 600)]
    assert find(rows) == []
    rows += [holds(2000, "y", "Z"), row(2001, "y", "A"), row(2002, "x", "Z")]
    random.Random(7).shuffle(rows)
    (cycle,) = find(rows)
    assert cycle.victim.position == 2002


def test_too_heavy_request_is_not_blocked_by_cap_waiter():
    rows = [holds(1, "x", "A", "write", 9, 2), row(2, "x", "B", "write", 9, 2), row(3, "x", "C", "write", 9, 4)]
    rows += [holds(4, "y", "C"), row(5, "y", "A")]
    assert find(rows, {"x": 3}) == []
    assert find(rows, {"x": 9}) == []
    assert len(find(rows, {"x": 5})) == 1


@pytest.mark.parametrize("number", range(9))
def test_search_time_grows_linearly(number):
    def seconds(size):
        name, expected, rows = list(wait_graphs.crowds(size))[number]

        def search():
            cycles = find(rows)
            path = cycles[0].path() if cycles else []
            assert len(cycles) == expected, name
            assert not cycles or path[0][0] == cycles[0].victim

        return processor_seconds(search, 3 if size > 1000 else 7)

    # Sixteen times as many rows. Rows outside the processor's caches take up to twice as long each; a quadratic search
    # would take 256 times as long.
    short, long = seconds(500), seconds(8000)
    assert long < 100 * short, f"{short * 1000:.0f} ms, {long * 1000:.0f} ms"


def test_deadlock_message_names_each_step():
    ring = [holds(41, "x", "main"), holds(42, "y", "other"), row(43, "y", "main"), row(44, "x", "other")]
    (cycle,) = find(ring)
    steps = deadlocks.steps_of(cycle, {1: ("etl01", 4321, None)})
    assert steps.victim == 44
    assert deadlocks.message(steps) == (
        "Deadlock: etl01:4321 (other) holds 'y' at 42, waits for 'x' at 44 behind 41; "
        "etl01:4321 (main) holds 'x' at 41, waits for 'y' at 43 behind 42. "
        "The youngest request, 44, has been given up: release what is held and try again; "
        "take both in the same order everywhere, or at once (all_of)"
    )
    (cycle,) = find([holds(7, "x", "main", "write", 1), row(9, "x", "main")])
    assert deadlocks.message(deadlocks.steps_of(cycle, {1: ("etl01", 4321, None)})) == (
        "Deadlock: etl01:4321 (main) holds 'x' at 7, waits for 'x' at 9 behind 7, which is its own: it waits for "
        "itself. This request, 9, has been given up: release something first, or take what is needed in one go "
        "(weight=…, all_of)"
    )
    (cycle,) = find([holds(1, "x", "B", "read"), row(2, "x", "A", UPGRADE), holds(3, "y", "A"), row(4, "y", "B")])
    text = deadlocks.message(deadlocks.steps_of(cycle, {1: ("db1", None, 77)}))
    assert "db1 session 77 (A) holds 'y' at 3, waits to be the writer of 'x' at 2 until 1 has left" in text
