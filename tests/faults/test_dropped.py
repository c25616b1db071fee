"""A coordinator without references that was not closed leaves no thread and no connection behind."""

import asyncio
import gc
import os
import threading
import warnings

import psutil
import pytest
from support import PATIENCE, started_since, until

import sqlsem

pytestmark = pytest.mark.locks


def use(coordinator, name):
    with coordinator.mutex(name):
        pass


def use_tasks(coordinator, name):
    coordinator.queue(name).put({})
    coordinator.queue(name).try_claim().finish()


def use_aio(coordinator, name):
    async def go():
        async with coordinator.mutex(name):
            pass
        assert await coordinator.aio.leader(name).current() is None

    asyncio.run(go())


def wait_in_vain(coordinator, name):
    with coordinator.mutex(name):
        done = []
        waiting = threading.Thread(target=lambda: done.append(coordinator.mutex(name).acquire(timeout=0.1)))
        waiting.start()
        waiting.join()
        assert done == [False]


def collected(before, number):
    """Nothing is left of it."""

    def nothing_left():
        gc.collect()
        return not started_since(before) and (number is None or descriptors() <= number)

    until(nothing_left, "its threads and descriptors are gone")


def descriptors():
    return psutil.Process().num_fds() if os.name == "posix" else 0


@pytest.mark.parametrize("use", [use, use_aio, wait_in_vain])
def test_dropped_coordinator_is_released(database, name, use):
    use(warm := database.coordinator(), name("before"))  # objects that are made once in a process
    warm.close()
    del warm
    gc.collect()
    before, number = threading.enumerate(), descriptors()
    with pytest.warns(ResourceWarning, match="unclosed coordinator"):  # noqa: PT031
        use(database.coordinator(), name)
        collected(before, number)


@pytest.mark.engines("sqlite", "postgresql")
def test_dropped_coordinator_of_a_worker_is_released(database, name):
    before = threading.enumerate()
    with pytest.warns(ResourceWarning, match="unclosed coordinator"):  # noqa: PT031
        use_tasks(database.coordinator(), name)
        collected(before, None)


def test_unused_coordinator_is_dropped_without_a_word(database):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        database.coordinator()
        gc.collect()


@pytest.mark.parametrize("keep", ["the lock", "the grant", "nothing"])
def test_held_lock_outlives_its_coordinator(database, name, keep):
    """The program has dropped the coordinator, and even the lock: it may rely on its grant."""
    before = threading.enumerate()
    lock = database.coordinator().mutex(name)
    assert lock.acquire()
    grant = lock.grant
    position = grant.position
    reference = {"the lock": lock, "the grant": grant, "nothing": None}[keep]
    del lock, grant
    for _ in range(3):
        gc.collect()
    with database.coordinator() as other:
        assert not other.mutex(name).acquire(timeout=0.5)
        client = next(
            candidate
            for candidate in sqlsem.client.client.open_clients()
            if position in candidate.member.tickets and not candidate.closed
        )
        if reference is None:
            client.close()
        else:
            client.registry.grants()[0].release()
        del client
        assert other.mutex(name).acquire(timeout=PATIENCE)
    del reference
    collected(before, None)


def test_waiter_keeps_its_coordinator(database, name):
    with database.coordinator() as holder:
        lock = holder.mutex(name)
        assert lock.acquire()
        grants = []

        def wait():
            with database.coordinator().mutex(name) as grant:
                grants.append(grant)

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: len(holder.admin.entries(name)) == 2, "it waits")
        for _ in range(3):
            gc.collect()
        lock.release()
        waiting.join(PATIENCE)
        assert grants
