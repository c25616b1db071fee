"""The expectations of CPython's own tests of Lock, RLock, Semaphore, BoundedSemaphore and their asyncio counterparts.

Here are those that `mutex` and `limit` meet, and tests of the differences, of which the docstring of `Lock` and
docs/howto/asyncio.md list the important ones.
"""

import asyncio
import gc
import threading
import time
import weakref

import pytest
from support import PATIENCE, Attempt, until

import sqlsem

pytestmark = pytest.mark.locks
both = pytest.mark.faces("sync", "aio")
KINDS = {
    "Lock": lambda coordinator, name: coordinator.mutex(name),
    "RLock": lambda coordinator, name: coordinator.mutex(name, reentrant=True),
    "Semaphore": lambda coordinator, name: coordinator.limit(name, 1),
}


@pytest.fixture(params=KINDS)
def make(request, connect, name):
    """``make()`` returns a lock of the kind, for the same resource each time."""
    coordinator = connect()
    return lambda: KINDS[request.param](coordinator, name)


@pytest.fixture
def bunch(threads):
    """``bunch(function, 5)`` runs the function in 5 threads at once and waits for all."""

    def run(function, number):
        for _ in range(number):
            threads.start(function)
        threads.join()

    return run


# -- every kind


@both
def test_acquire_and_release(make):
    lock = make()
    assert lock.acquire() is True
    lock.release()
    assert lock.acquire(False) is True
    lock.release()
    assert lock.acquire(blocking=True) is True
    lock.release()


@both
def test_try_of_a_lock_held_by_another_thread(make, bunch):
    lock = make()
    lock.acquire()
    results = []
    bunch(lambda: results.append(lock.acquire(False)), 1)
    assert results == [False]
    lock.release()


@both
def test_contended_lock_excludes_threads(make, bunch):
    lock = make()
    lock.acquire()
    entered = []

    def work():
        lock.acquire()
        entered.append(1)
        lock.release()

    others = [threading.Thread(target=work) for _ in range(4)]
    for other in others:
        other.start()
    time.sleep(0.1)
    assert entered == []
    lock.release()
    for other in others:
        other.join(PATIENCE)
    assert len(entered) == 4


@both
def test_block_releases_after_an_error(make, bunch):
    lock = make()

    def work(error=None):
        with lock:
            if error is not None:
                raise error

    work()
    with pytest.raises(TypeError):
        work(TypeError())
    bunch(work, 2)  # it is free again


@both
def test_threads_that_end_leave_nothing(make, bunch):
    lock = make()

    def work():
        lock.acquire()
        lock.release()

    bunch(work, 10)
    assert lock.acquire(False)
    lock.release()


@both
def test_timeouts(make, bunch):
    lock = make()
    with pytest.raises(ValueError):
        lock.acquire(False, 1)
    with pytest.raises(ValueError):
        lock.acquire(timeout=-100)
    assert lock.acquire(timeout=60) is True
    results = []

    def work():
        began = time.monotonic()
        results.append((lock.acquire(timeout=0.3), time.monotonic() - began))

    bunch(work, 1)
    assert results[0][0] is False
    assert results[0][1] >= 0.3
    lock.release()


@both
def test_a_lock_can_be_referred_to_weakly(make):
    lock = make()
    reference = weakref.ref(lock)
    del lock
    gc.collect()
    assert reference() is None


@both
def test_release_of_a_free_lock_is_refused(make):
    lock = make()
    with pytest.raises(RuntimeError):
        lock.release()
    lock.acquire()
    lock.release()
    with pytest.raises(RuntimeError):  # a Semaphore would count up, a BoundedSemaphore raise ValueError
        lock.release()


@both
@pytest.mark.parametrize("make", ["Lock", "RLock"], indirect=True)
def test_released_by_another_thread_only_through_the_grant(make, bunch):
    """Any thread may release a Lock, and none an RLock. For a Semaphore see test_semaphores.py."""
    lock = make()
    lock.acquire()
    grant = lock.grant
    errors = []

    def work():
        try:
            lock.release()
        except RuntimeError as exc:
            errors.append(exc)

    bunch(work, 1)
    assert len(errors) == 1
    bunch(grant.release, 1)
    other = make()
    assert other.acquire(False) is True
    other.release()


# -- Lock and RLock


@both
def test_a_mutex_taken_twice(connect, name):
    """A Lock would wait without end here; an RLock counts."""
    lock = connect().mutex(name)
    with lock, pytest.raises(sqlsem.Deadlock):
        lock.acquire()
    again = connect().mutex(name, reentrant=True)
    for _ in range(3):
        assert again.acquire() is True
    for _ in range(2):
        again.release()
    other = Attempt(connect().mutex(name))
    assert other.waits(0.1), "held until it has been released as often as it was acquired"
    again.release()
    other.leave()
    with pytest.raises(RuntimeError):
        again.release()


@both
def test_an_rlock_through_several_functions(connect, name):
    lock = connect().mutex(name, reentrant=True)

    def inner():
        with lock:
            return 1

    def outer():
        with lock:
            return inner() + inner()

    assert outer() == 2


# -- Semaphore


@both
def test_semaphore_counts_its_holders(connect, name):
    for bad in (-1, 0):  # Semaphore(0) is valid, a limit of 0 is not
        with pytest.raises(ValueError):
            connect().limit(name, bad)


@both
def test_semaphore_admits_its_limit(connect, database, name, threads):
    coordinator = connect()
    lock = coordinator.limit(name, 4)
    inside, maximum, guard = 0, 0, threading.Lock()

    def work():
        nonlocal inside, maximum
        with lock:
            with guard:
                inside += 1
                maximum = max(maximum, inside)
            until(lambda: maximum == 4, "four at once")
            time.sleep(0.02)
            with guard:
                inside -= 1

    for _ in range(8):
        threads.start(work)
    threads.join()
    assert maximum == 4


# -- asyncio's primitives


async def rows(database, name, number):
    deadline = time.monotonic() + PATIENCE
    while len(database.queue(name)) != number:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def queue_up(database, name, lock, order, numbers, held=1):
    """Start a task per number, one after the other: it acquires, notes the number and releases."""

    async def work(number):
        async with lock:
            order.append(number)

    tasks = []
    for number in numbers:
        tasks.append(asyncio.create_task(work(number)))
        await rows(database, name, held + len(tasks))
    return tasks


@pytest.mark.parametrize("limit", [1, 2])
async def test_first_come_first_served(connect, database, name, limit):
    coordinator = connect()
    order = []
    holders = [coordinator.aio.limit(name, limit) for _ in range(limit)]
    for holder in holders:
        assert await asyncio.create_task(keep(holder))
    tasks = await queue_up(database, name, coordinator.limit(name, limit), order, range(4), held=limit)
    assert order == []
    for grant in coordinator.client.registry.grants():
        await grant.release()
    await asyncio.gather(*tasks)
    # (Two tasks inside at the same time may note their numbers in any order.)
    assert order == [0, 1, 2, 3] if limit == 1 else set(order[:2]) == {0, 1} and set(order) == {0, 1, 2, 3}


async def keep(lock):
    return await lock.acquire()


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_cancelled_waiter_blocks_no_other(connect, database, name, which):
    coordinator = connect()
    order = []
    async with coordinator.mutex(name):
        tasks = await queue_up(database, name, coordinator.mutex(name), order, range(3))
        tasks[which].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[which]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [number for number in range(3) if number != which]


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_release_during_cancellation_loses_no_grant(connect, database, name, cancel_first):
    """The next waiter gets the lock, and no grant is lost between release and cancellation."""
    coordinator = connect()
    for _ in range(5):
        order = []
        lock = coordinator.aio.mutex(name)
        await lock.acquire()
        tasks = await queue_up(database, name, coordinator.mutex(name), order, range(2))
        if cancel_first:
            tasks[0].cancel()
        releasing = asyncio.create_task(lock.grant.release())
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(releasing, *tasks, return_exceptions=True)
        assert 1 in order
        assert not coordinator.client.registry.grants()


async def test_a_block_gives_the_grant(connect, name):
    """`async with` gives the grant; with asyncio's own primitives it gives None."""
    async with connect().mutex(name) as grant:
        assert isinstance(grant, sqlsem.aio.Grant)


async def test_a_plain_block_is_refused(connect, name):
    with pytest.raises(sqlsem.ConfigurationError, match="async with"), connect().mutex(name):
        raise AssertionError("must not be entered")
    with pytest.raises((TypeError, AttributeError)), connect().aio.mutex(name):
        raise AssertionError("must not be entered")


def test_lock_object_serves_several_loops(connect, name):
    """An asyncio primitive of CPython belongs to the first loop in which it had to wait."""
    lock = connect().mutex(name)

    async def main():
        async with lock:
            other = asyncio.create_task(keep(lock._aio))
            await asyncio.sleep(0.05)
            assert not other.done()
            other.cancel()

    for _ in range(2):
        asyncio.run(main())
