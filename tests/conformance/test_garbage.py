"""Objects are freed as soon as they are unused, without Python's garbage collector.

Objects in a cycle are freed by the collector alone, which walks through all living objects: that took half of the time
of short tasks. Most tests of costs switch the collector off, and so do not see this.
"""

import asyncio
import contextlib
import gc
import itertools

import pytest
from support import Attempt, without_collector

import sqlsem
from sqlsem.tasks import Worker

pytestmark = [pytest.mark.locks, pytest.mark.faces("sync", "aio")]
ROUNDS = 30


def left(call, *, attempts=5, rounds=ROUNDS, each=1):
    """Return how many objects a call leaves for the collector: the least of several attempts, as threads add some.

    ``each``: how many operations one call performs.
    """
    call()
    counts = []
    while len(counts) < attempts and (not counts or counts[-1] >= rounds * each):
        with without_collector():
            for _ in range(rounds):
                call()
            counts.append(gc.collect())
    if min(counts) >= rounds * each:
        print_garbage(call)
    return min(counts) / (rounds * each)


def print_garbage(call):
    """Print the objects that one call leaves: pytest shows them if the test fails."""
    with without_collector():
        call()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
    for thing in gc.garbage:
        print(f"{type(thing).__module__}.{type(thing).__qualname__}: {ascii(thing)[:200]}")
    gc.garbage.clear()


def mutex(coordinator, other, name):
    lock = coordinator.mutex(name)

    def call():
        with lock:
            pass

    return call


def reentrant(coordinator, other, name):
    lock = coordinator.mutex(name, reentrant=True)

    def call():
        with lock, lock:
            pass

    return call


def limit(coordinator, other, name):
    def call():
        with coordinator.limit(name, 3):
            pass

    return call


def upgrade(coordinator, other, name):
    def call():
        with coordinator.read(name) as grant:
            grant.upgrade()
            grant.downgrade()

    return call


def group(coordinator, other, name):
    def call():
        with sqlsem.all_of(coordinator.mutex(f"{name}-1"), coordinator.limit(f"{name}-2", 3)):
            pass

    return call


def lock_with_rate(coordinator, other, name):
    def call():
        with sqlsem.all_of(coordinator.mutex(name), coordinator.rate(f"{name}-rate", 10**6, per=1)):
            pass

    return call


def priority(coordinator, other, name):
    other.admin.set_priorities(name, "1h")

    def call():
        with coordinator.mutex(name, priority=1):
            pass

    return call


def refused(coordinator, other, name):
    other.mutex(name).acquire()

    def call():
        assert not coordinator.mutex(name).acquire(timeout=0)

    return call


def too_late(coordinator, other, name):
    other.mutex(name).acquire()

    def call():
        assert not coordinator.mutex(name).acquire(timeout=0.01)

    return call


def hand_over(coordinator, other, name):
    def call():
        with coordinator.mutex(name) as grant:
            token = grant.hand_over()
        with other.adopt(token):
            pass

    return call


def once(coordinator, other, name):
    numbers = itertools.count()

    def call():
        with coordinator.once(f"{name}-{next(numbers)}", per="1h") as run:
            assert run

    return call


def rate(coordinator, other, name):
    limited = coordinator.rate(name, 10**6, per=1)

    def call():
        assert limited.take() is not None

    return call


LOCKS = [mutex, reentrant, limit, upgrade, group, lock_with_rate, priority, refused, too_late, hand_over, once, rate]


@pytest.mark.parametrize("primitive", LOCKS, ids=lambda value: value.__name__)
def test_acquire_and_release_leave_no_objects(primitive, connect, name):
    assert left(primitive(connect(), connect(), name)) < 1


@pytest.mark.faces("sync")
def test_a_hand_off_leaves_nothing(connect, name):
    first, other = connect().mutex(name), connect().mutex(name)

    def call():
        first.acquire()
        attempt = Attempt(other)
        first.release()
        attempt.leave()

    assert left(call) < 1


@pytest.mark.faces("sync")
def test_tasks_of_a_loop_that_hand_on_leave_nothing(connect, name):
    first, other = connect().aio.mutex(name), connect().aio.mutex(name)

    async def in_turn(lock):
        async with lock:
            await asyncio.sleep(0)

    async def some():
        await asyncio.gather(*(in_turn(lock) for lock in (first, first, other)))

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        assert left(lambda: loop.run_until_complete(some())) < 1


@pytest.mark.faces("sync")
@pytest.mark.parametrize("locks", [False, True], ids=["alone", "with a lock"])
def test_a_claimed_task_leaves_nothing(locks, connect, name):
    coordinator = connect()
    queue = coordinator.queue(name)

    def call():
        queue.put(1, locks=[coordinator.mutex(name)] if locks else [])
        with queue.try_claim():
            pass

    assert left(call) < 1


def add(augend, other):
    return augend + other


@pytest.mark.faces("sync")
@pytest.mark.parametrize("maximum", [1, 100], ids=["one by one", "in groups"])
def test_worker_leaves_no_objects_per_task(maximum, connect, name):
    """A worker leaves some objects once, but fewer than one per task."""
    coordinator = connect()
    queue = coordinator.queue(name)
    tasks = 300

    def run():
        queue.put_many([sqlsem.Call(add, 1, number) for number in range(tasks)])
        Worker(queue, idle_exit=0, group=maximum > 1).run()

    assert left(run, attempts=3, rounds=1, each=tasks) < 1
