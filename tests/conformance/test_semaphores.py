"""A limit is a semaphore, and readers and stages share with themselves.

An owner may acquire more while there is room. The deadlock search finds an owner that waits for itself. Another thread
may release.
"""

import gc
import threading

import pytest
from support import PATIENCE

import sqlsem

pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.locks, pytest.mark.quiet]


def test_semaphore_acquired_repeatedly_in_a_thread(connect, database, name):
    lock = connect().limit(name, 3)
    for held in (1, 2, 3):
        assert lock.acquire(timeout=PATIENCE) is True
        assert len(database.queue(name)) == held
    assert lock.acquire(blocking=False) is False
    assert lock.acquire(timeout=0.05) is False
    lock.release()
    assert lock.acquire(blocking=False) is True
    with pytest.raises(sqlsem.Deadlock, match="waits for itself"):
        lock.acquire()  # the owner holds all three itself, which the search finds
    assert len(database.queue(name)) == 3
    for _ in range(3):
        lock.release()
    with pytest.raises(sqlsem.NotHeld):
        lock.release()


def test_blocks_inside_each_other(connect, name):
    coordinator = connect()
    with coordinator.limit(name, 3) as lock, coordinator.limit(name, 3, weight=2) as other:
        assert lock.position < other.position
        assert not coordinator.limit(name, 3).acquire(blocking=False)
    with coordinator.limit(name, 3, weight=3, timeout=PATIENCE):
        pass


def test_several_beside_others(connect, name, attempt):
    """Another owner holds the third slot: waiting for it is no deadlock, as that owner will leave."""
    coordinator = connect()
    lock = coordinator.limit(name, 3)
    other = attempt(coordinator.limit(name, 3))
    other.granted()
    with lock, lock:
        waiting = attempt(coordinator.limit(name, 3))
        assert waiting.waits(1.0)
        other.leave()
        waiting.granted()


@pytest.mark.parametrize("kind", ["read", "stage"])
def test_shared_lock_is_acquired_twice(connect, name, kind):
    coordinator = connect()
    lock = coordinator.read(name) if kind == "read" else coordinator.stage(name, 100)
    with lock, lock, sqlsem.all_of(lock, coordinator.mutex(name("b"))):
        pass
    assert coordinator.mutex(name).acquire(blocking=False)


def test_a_reader_again_behind_a_writer_that_waits(connect, name, attempt):
    """The writer waits for the reader, and the reader's second request for the writer: that request gets Deadlock."""
    coordinator = connect()
    with coordinator.read(name):
        writer = attempt(connect().write(name))
        with pytest.raises(sqlsem.Deadlock, match="Deadlock: "):
            coordinator.read(name).acquire()
        assert coordinator.read(name).acquire(blocking=False) is False
        assert writer.waits(0.01)
    writer.granted()


def test_all_in_all_threads_is_found(connect, name, threads):
    """Two threads each hold two of four slots and want a third: one of them gets Deadlock."""
    coordinator = connect()
    both_have = threading.Barrier(2)
    outcomes = []

    def work():
        lock = coordinator.limit(name, 4)
        with lock, lock:
            both_have.wait(PATIENCE)
            try:
                with lock:
                    outcomes.append("had")
            except sqlsem.Deadlock:
                outcomes.append("told")

    threads.start(work)
    threads.start(work)
    threads.join()
    assert sorted(outcomes) == ["had", "told"]


# -- locked


def test_locked_reports_a_full_lock(connect, name, attempt):
    first, other = connect(), connect()
    for lock in (first.mutex(name), first.mutex(name, reentrant=True), first.limit(name, 1), first.write(name)):
        assert lock.locked() is False
        with lock:
            assert lock.locked() is True
            assert other.mutex(name).locked() is True
            assert other.read(name).locked() is True
            assert other.limit(name, 5).locked() is (lock is not None)
        assert lock.locked() is False
    with first.read(name):
        assert other.read(name).locked() is False
        assert other.write(name).locked() is True
        writer = attempt(other.write(name))
        assert first.read(name).locked() is True, "a writer waits ahead"
    writer.leave()
    with first.limit(name, 3), first.limit(name, 3):
        assert other.limit(name, 3).locked() is False
        assert other.limit(name, 3, weight=2).locked() is True
        assert other.limit(name, 2).locked() is True
    several = sqlsem.all_of(first.mutex(name), first.mutex(name("b")))
    assert several.locked() is False
    with other.mutex(name("b")):
        assert several.locked() is True


def test_locked_counts_the_limit_of_a_pattern(connect, name):
    """Also for a resource without rows, which is in no list of resources."""
    coordinator = connect()
    coordinator.admin.set_limit(name("*"), 2)
    try:
        lock = coordinator.limit(name("a"), 4, weight=3)
        assert not lock.acquire(blocking=False)
        assert lock.locked()
        assert not coordinator.limit(name("a"), 4, weight=2).locked()
    finally:
        coordinator.admin.set_limit(name("*"), None)


def test_locked_matches_the_result_of_a_try(connect, database, name):
    coordinator = connect()
    lock = coordinator.limit(name, 3)
    coordinator.admin.set_limit(name, 1)
    with lock:
        assert lock.locked() is True
        assert lock.acquire(blocking=False) is False
    coordinator.admin.set_limit(name, None)
    coordinator.admin.pause(name)
    assert lock.locked() is True
    assert lock.acquire(blocking=False) is False
    coordinator.admin.resume(name)
    assert lock.locked() is False
    before = len(coordinator.admin.history(name))
    assert lock.locked() is False
    assert len(coordinator.admin.history(name)) == before, "asking leaves nothing behind"


# -- released by other threads


def in_another(function):
    outcome = []

    def run():
        try:
            outcome.append(function())
        except Exception as exc:
            outcome.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    assert outcome, "it still runs"
    return outcome[0]


def test_semaphore_is_released_by_another_thread(connect, database, name):
    lock = connect().limit(name, 3)
    for _ in range(3):
        assert in_another(lock.acquire) is True  # acquired by threads that end
    gc.collect()
    assert lock.acquire(blocking=False) is False
    first = database.queue(name)[0][0]
    lock.release()
    assert first not in [row[0] for row in database.queue(name)], "the first acquired grant"
    assert in_another(lock.release) is None
    assert lock.acquire(blocking=False) is True
    own = max(row[0] for row in database.queue(name))
    lock.release()
    assert own not in [row[0] for row in database.queue(name)], "one's own come first"
    lock.release()
    assert isinstance(in_another(lock.release), sqlsem.NotHeld)
    assert database.queue(name) == []


def test_acquirer_sees_release_by_another_thread(connect, name):
    lock = connect().limit(name, 2)
    lock.acquire()
    lock.acquire()
    assert in_another(lock.release) is None
    assert lock.grant.position, "the second one, which is still held"
    lock.release()
    with pytest.raises(sqlsem.NotHeld):
        lock.release()
    lock.acquire()
    assert in_another(lock.release) is None
    with pytest.raises(sqlsem.NotHeld):
        _ = lock.grant


def test_block_hold_is_not_released_by_others(connect, database, name):
    lock = connect().limit(name, 2)
    with lock as grant:
        assert isinstance(in_another(lock.release), sqlsem.NotHeld)
        assert not grant.lost
        lock.acquire()
        assert in_another(lock.release) is None
        assert [row[0] for row in database.queue(name)] == [grant.position]


@pytest.mark.parametrize("kind", ["mutex", "reentrant", "write"])
def test_a_mutex_is_its_owners(connect, name, kind):
    coordinator = connect()
    lock = {
        "mutex": coordinator.mutex(name),
        "reentrant": coordinator.limit(name, 2, reentrant=True),
        "write": coordinator.write(name),
    }[kind]
    lock.acquire()
    assert isinstance(in_another(lock.release), sqlsem.NotHeld)
    assert isinstance(in_another(coordinator.limit(name, 2).release), sqlsem.NotHeld), "of another object"
    lock.release()


def test_concurrent_foreign_releases_end_each_hold_once(connect, name, threads):
    """Each of many concurrent releases ends a different acquisition."""
    lock = connect().limit(name, 4)
    failed = []

    def acquire():
        for _ in range(10):
            assert lock.acquire(timeout=PATIENCE)

    def release():
        done = 0
        while done < 10:
            try:
                lock.release()
                done += 1
            except sqlsem.NotHeld as exc:
                if "has been released" in str(exc):
                    failed.append(exc)

    for _ in range(3):
        threads.start(acquire)
        threads.start(release)
    threads.join()
    assert not failed
    assert not lock.locked()
