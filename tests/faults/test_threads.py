"""Many threads on one coordinator."""

import random
import threading
import time

import psutil
import pytest
from support import Recorder, check_history, started_since, until

from sqlsem import all_of
from sqlsem.client.connection.wait_pool import MAX_BLOCKED_CONNECTIONS, MAX_IDLE_CONNECTIONS

MANY = 50


def some_lock(coordinator, name, number):
    """Mixed primitives, several resources; each resource has primitives of one family."""
    resource = f"{name}-{number % 3}"
    return [
        lambda: coordinator.mutex(f"{resource}-mutex"),
        lambda: coordinator.limit(f"{resource}-limit", 3, weight=1 + number % 2),
        lambda: coordinator.read(f"{resource}-shared"),
        lambda: coordinator.write(f"{resource}-shared"),
        lambda: coordinator.stage(f"{resource}-stage", number % 2),
        lambda: all_of(coordinator.mutex(f"{resource}-mutex"), coordinator.limit(f"{resource}-limit", 3)),
    ][number % 6]()


def test_fifty_threads_share_a_coordinator(connect, database, name, threads):
    coordinator = connect(grace=30)
    recorder = Recorder()

    def work(number):
        for _ in range(4):
            with recorder.stay(some_lock(coordinator, str(name), number)):
                time.sleep(random.uniform(0, 0.004))

    for number in range(MANY):
        threads.start(work, number)
    threads.join()
    assert check_history(recorder.stays) >= MANY * 4
    assert database.queue(name) == []


def test_more_waiters_than_waiting_sessions(agents, connect, database, name, threads, waiting):
    """Every resource is held by another process, so that all must wait in the database."""
    (other,) = agents(1, grace=60)
    resources = [f"{name}-{number}" for number in range(MAX_BLOCKED_CONNECTIONS + 4)]
    for number, resource in enumerate(resources):
        other.hold("mutex", resource, thread=f"t{number}")
    coordinator = connect(grace=30)
    recorder = Recorder()

    def work(number):
        with recorder.stay(coordinator.mutex(resources[number % len(resources)])):
            time.sleep(0.002)

    for number in range(MANY):
        threads.start(work, number)
    waiting(name, MANY + len(resources))
    counts = []
    for _ in range(30 if database.engine == "postgresql" else 0):
        counts.append(database.connections())
        time.sleep(0.02)
    for number in range(len(resources)):
        other.release(thread=f"t{number}")
    threads.join()
    assert check_history(recorder.stays) == MANY
    assert database.queue(name) == []
    if database.engine == "postgresql":
        # The other process has a main session, too.
        assert max(counts) <= 1 + MAX_BLOCKED_CONNECTIONS + 1
        until(lambda: database.connections() <= 1 + MAX_IDLE_CONNECTIONS + 1, "the surplus connections are closed")


def test_many_coordinators_in_a_process(connect, database, name, threads):
    """Each is a member of its own, and they exclude each other as processes do."""
    recorder = Recorder()
    before = threading.enumerate()
    files = psutil.Process().num_fds() if hasattr(psutil.Process(), "num_fds") else 0

    def work(number):
        with database.coordinator(grace=30) as coordinator:
            for _ in range(5):
                with recorder.stay(coordinator.limit(str(name), 2)):
                    time.sleep(0.002)

    for number in range(10):
        threads.start(work, number)
    threads.join()
    assert check_history(recorder.stays) == 50
    assert database.queue(name) == []
    until(lambda: not started_since(before), "no thread is left")
    if files:
        until(lambda: psutil.Process().num_fds() <= files + 3, "no file is left open")


@pytest.mark.engines("sqlite", "postgresql")
def test_timeouts_among_many_threads(connect, database, name, threads):
    """Waiters that time out remove their rows, in the middle of the queue, too."""
    coordinator = connect(grace=30)
    recorder = Recorder()
    gave_up = []

    def work(number):
        lock = coordinator.mutex(str(name))
        if number % 3 == 0:
            if lock.acquire(timeout=random.uniform(0, 0.05)):
                lock.release()
            else:
                gave_up.append(number)
            return
        with recorder.stay(lock):
            time.sleep(0.005)

    for number in range(40):
        threads.start(work, number)
    threads.join()
    check_history(recorder.stays)
    assert database.queue(name) == []
    assert gave_up
