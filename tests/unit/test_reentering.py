"""A reentrant lock with an interrupt at each line: each acquisition ends exactly once."""

import contextlib
import sqlite3

import pytest
from support import until
from support.striking import every_line

import sqlsem


@pytest.fixture
def place(tmp_path):
    return tmp_path / "locks.db"


@pytest.fixture
def coordinator(place):
    with sqlsem.connect(place, grace=1.5) as coordinator:
        with coordinator.mutex("warm"):  # tests/unit/test_coming_in.py tests the start
            pass
        yield coordinator


def rows(place):
    """Return the resources of the rows in the queue."""
    with contextlib.closing(sqlite3.connect(place)) as connection:
        return [name for (name,) in connection.execute("SELECT resource_id FROM ProcessControl")]


def none_left(place):
    until(lambda: rows(place) == [], "what was left to the next ping is gone")


def test_interrupted_acquire_holds_nothing(coordinator, place):
    locks = []

    def prepare(number):
        locks.append(coordinator.mutex(f"a{number}"))
        return locks[-1].acquire

    for _ in every_line(prepare):
        with pytest.raises(sqlsem.NotHeld):
            locks[-1].release()
    locks[-1].release()
    none_left(place)


def test_interrupted_reentry_keeps_the_first_hold(coordinator, place):
    lock = coordinator.mutex("a", reentrant=True)
    lock.acquire()
    grant = lock.grant
    for line in every_line(lambda _: lock.acquire):
        assert grant.state.depth == 1, line
    assert grant.state.depth == 2
    lock.release()
    lock.release()
    assert rows(place) == []


@pytest.mark.parametrize("ending", ["its lock's block", "its own block", "a call"])
def test_interrupted_release_ends_a_single_hold(coordinator, place, ending):
    lock = coordinator.mutex("a", reentrant=True)
    lock.acquire()
    grant = lock.grant

    def prepare(_):
        if grant.state.depth < 2:
            assert lock.acquire()
        if ending == "a call":
            return lock.release
        return lambda: (lock if ending == "its lock's block" else grant).__exit__(None, None, None)

    for line in every_line(prepare):
        # A call that is interrupted before it did anything left no trace: its caller has to repeat it.
        assert grant.state.depth == 1 or (ending == "a call" and grant.state.depth == 2), line
        assert rows(place) == ["a"], line
    assert grant.state.depth == 1
    lock.release()
    assert rows(place) == []


def test_interrupted_last_release_frees_the_lock(coordinator, place):
    def prepare(number):
        lock = coordinator.mutex(f"a{number}", reentrant=True)
        assert lock.acquire()
        assert lock.acquire()
        lock.release()
        return lambda: lock.__exit__(None, None, None)

    for _ in every_line(prepare):
        pass
    none_left(place)


def test_interrupted_inner_release_keeps_the_outer_hold(coordinator, place):
    locks = []

    def prepare(number):
        locks.append(coordinator.mutex(f"a{number}", reentrant=True))
        assert locks[-1].acquire()
        assert locks[-1].acquire()
        return locks[-1].release

    for line in every_line(prepare):
        lock = locks[-1]
        if lock.grant.state.depth == 2:  # the call has done nothing yet
            lock.release()
        assert lock.grant.state.depth == 1, line
        lock.release()
        with pytest.raises(sqlsem.NotHeld):
            lock.release()
    locks[-1].release()
    none_left(place)


def test_interrupted_semaphore_release_loses_nothing(coordinator, place):
    locks = []

    def prepare(number):
        locks.append(coordinator.limit(f"a{number}", 1))
        assert locks[-1].acquire()
        return locks[-1].release

    for _ in every_line(prepare):
        with contextlib.suppress(sqlsem.NotHeld):  # interrupted before the call did anything
            locks[-1].release()
    none_left(place)


def test_grant_is_released_as_often_as_acquired(coordinator, place):
    lock, other = coordinator.mutex("a", reentrant=True), coordinator.mutex("a", reentrant=True)
    with lock as grant:
        assert lock.acquire()
        assert other.acquire()
        assert grant.state.depth == 3
        grant.release()
        grant.release()
        grant.check()
    assert rows(place) == []
    with pytest.raises(sqlsem.NotHeld):
        other.release()
    with pytest.raises(sqlsem.NotHeld):
        grant.release()


def test_grant_being_released_is_not_reentered(coordinator):
    """Another thread releases the grant the moment that its owner asks for it again."""
    lock = coordinator.mutex("a", reentrant=True)
    lock.acquire()
    grant = lock.grant
    assert grant.state.end_acquisition(grant.state.first_token)
    assert not lock.acquire(blocking=False)
    grant.release()
    with lock as once_more:
        assert once_more is not grant
