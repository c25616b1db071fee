"""The expectations of CPython's own tests of Lock, RLock, Semaphore, BoundedSemaphore and their asyncio counterparts.

Here are those that `test_primitives` and `test_aio` do not have, and tests of the differences, of which the docstring
of `Lock` and docs/howto/asyncio.md list the important ones.
"""

import asyncio
import gc
import time
import weakref

import pytest
from support import PATIENCE, Attempt

import sqlsem

pytestmark = pytest.mark.locks
both = pytest.mark.faces("sync", "aio")


@both
def test_a_lock_can_be_referred_to_weakly(connect, name):
    lock = connect().mutex(name)
    reference = weakref.ref(lock)
    del lock
    gc.collect()
    assert reference() is None


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
