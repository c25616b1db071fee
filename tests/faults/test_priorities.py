"""Priorities, with processes that die or stand still: an entry goes with its owner, and for no other reason."""

import itertools
import random
import time

import pytest
from agent import RemoteError
from support import until

import sqlsem
from sqlsem.engines.priorities import priority_queue

GRACE = 1.5
#: As in test_kill.py.
CHECK = 20.0


@pytest.fixture
def ranked(connect, name):
    """The test's resource has priorities."""
    connect().admin.set_priorities(name, 3600)
    yield
    connect().admin.set_priorities(name, None)


@pytest.fixture
def in_line(database, name):
    """``in_line(number)`` waits until the priority queue has so many entries."""

    def wait(number):
        until(lambda: len(database.queue(priority_queue(name))) == number, f"{number} in the line")

    return wait


def test_killed_holder_and_first_waiter_are_replaced(agents, database, name, ranked, in_line):
    holder, low, first, second = agents(4, grace=GRACE)
    held = holder.hold("mutex", name, priority=0)
    entries = []
    for number, (agent, priority) in enumerate([(low, 1), (first, 9), (second, 5)], 1):
        entries.append(agent.ask("mutex", name, priority=priority))
        in_line(number)
    killed = holder.kill()
    first.kill()
    got = entries[2].get()
    assert got["got"] < killed + 2 * GRACE + CHECK
    assert got["fence"] > held["fence"]
    assert not entries[0].ready
    left_at = second.release()["leaving"]
    assert entries[0].get()["got"] >= left_at
    low.release()
    assert database.queue(name) == []
    in_line(0)


def test_a_killed_waiter_does_not_hold_up_a_try(agents, connect, database, name, ranked, in_line):
    holder, waiter = agents(2, grace=2)
    holder.hold("mutex", name, priority=0)
    waiter.ask("mutex", name, priority=9)
    in_line(1)
    waiter.kill()
    holder.release()
    lock = connect().mutex(name, priority=0)
    until(lambda: lock.acquire(timeout=0), "the dead are out of the way")
    lock.release()
    assert database.queue(name) == []
    in_line(0)


def test_suspended_priority_waiter_keeps_its_position(agents, name, ranked, in_line):
    """Its session lives, so it keeps its entry, and blocks the waiters behind it, as the head of any queue does."""
    holder, stopped, other = agents(3, grace=3)
    holder.hold("mutex", name, priority=0)
    first = stopped.ask("mutex", name, priority=9)
    in_line(1)
    second = other.ask("mutex", name, priority=0)
    in_line(2)
    stopped.stop()
    holder.release()
    time.sleep(5)
    assert not second.ready
    stopped.resume()
    try:
        first.get()
    except RemoteError as failed:
        # It was stopped during a call, and closes that session as overdue: then its grace is over.
        if failed.name != "LockLost":
            raise
    else:
        assert not second.ready
        stopped.release()
    second.get()
    other.release()


def wander(channel, url, options, name, seed):
    """Acquire and release in an endless loop, and report the times."""
    coordinator = sqlsem.connect(url, grace=0.5, **options)
    choose = random.Random(seed)
    channel.tell("ready")
    while True:
        priority = choose.randrange(4)
        with coordinator.mutex(name, priority=priority) as grant:
            channel.tell("in", fence=grant.fence)
            time.sleep(choose.random() / 100)
            channel.tell("out", fence=grant.fence)


@pytest.mark.parametrize("seed", range(2))
def test_processes_are_killed_at_any_point(spawn, connect, database, name, ranked, seed):
    """After a kill at any point there are never two holders, fences grow, and grants go on."""
    choose = random.Random(seed)
    number = iter(range(1000))

    def start():
        child = spawn(wander, name=str(name), seed=next(number))
        child.expect("ready")
        return child

    children, dead = [start() for _ in range(4)], []
    coordinator = connect(grace=0.5)

    def enter(priority):
        lock = coordinator.mutex(name, priority=priority)
        assert lock.acquire(timeout=GRACE + CHECK), "no further request is granted"
        lock.release()

    for _ in range(6):
        time.sleep(choose.random() / 5)
        dead.append(children.pop(choose.randrange(len(children))))
        dead[-1].kill()
        children.append(start())
        enter(priority=choose.randrange(4))
    for child in children:
        child.kill()
    events = [words for child in (*dead, *children) for words in iter(child.next, None)]
    entered = sorted((words["at"], words["fence"]) for words in events if words["event"] == "in")
    left_at = {words["fence"]: words["at"] for words in events if words["event"] == "out"}
    assert len(entered) > len(dead)
    for (_, fence), (at, later) in itertools.pairwise(entered):
        assert fence < later, "fences grow in the order of entering"
        assert left_at.get(fence, at) <= at, "two are inside"
    enter(priority=0)
    assert database.queue(name) == []
    assert database.queue(priority_queue(name)) == []
