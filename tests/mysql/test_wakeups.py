"""Waiters sleep on the server, on the lock by name of the row ahead, and wake up when it is freed."""

import contextlib
import statistics
import threading
import time

import pytest
from support import PATIENCE, Attempt, until

import sqlsem
from sqlsem.engines.mysql import MysqlSession

pytestmark = pytest.mark.engines("mysql")

#: Seconds of silence, and the statements that a waiter, the holder and their heartbeats may send meanwhile. (A waiter
#: that polls sends hundreds.)
QUIET, STATEMENTS = 3.0, 60


@pytest.fixture
def counted(monkeypatch):
    """The statements of this process, by thread."""
    counts, execute = {}, MysqlSession.execute_text

    def counting(session, text, parameters=()):
        thread = threading.current_thread()
        counts[thread] = counts.get(thread, 0) + 1
        return execute(session, text, parameters)

    monkeypatch.setattr(MysqlSession, "execute_text", counting)
    return counts


def test_a_waiter_sleeps_on_the_server(connect, name, counted, database):
    holder, other = connect(), connect()
    with holder.mutex(name):
        waiter = Attempt(other.mutex(name))
        until(lambda: database.waiting_for("name"), "the waiter sleeps")
        before = sum(counted.values())
        assert waiter.waits(QUIET)
        sent = sum(counted.values()) - before
    waiter.granted()
    waiter.leave()
    assert sent < STATEMENTS


def test_a_waiter_wakes_up_soon_after_a_release(connect, name, database):
    """Much sooner than it would look by itself, which is once a second."""
    holder, other, delays = connect(), connect(), []
    for _ in range(7):
        with holder.mutex(name):
            waiter = Attempt(other.mutex(name))
            until(lambda: database.waiting_for("name"), "the waiter sleeps")
            time.sleep(0.1)
            left = time.monotonic()
        waiter.granted()
        delays.append(waiter.entered - left)
        waiter.leave()
    assert statistics.median(delays) < 0.4, delays


def test_a_waiter_behind_a_timeout_is_granted_in_its_turn(connect, name, database):
    first, second, third = connect(), connect(), connect()
    with third.mutex(name):
        pass  # opens its connection, so that it comes before the timeout
    with first.mutex(name):
        giving_up = threading.Thread(target=lambda: second.mutex(name).acquire(timeout=3))
        giving_up.start()
        until(lambda: len(database.queue(name)) == 2, "the second waits")
        last = Attempt(third.mutex(name))
        until(lambda: len(database.queue(name)) == 3, "the third waits")
        giving_up.join(PATIENCE)
        assert last.waits(0.5), "the first still holds the lock"
        left = time.monotonic()
    assert last.granted().position > 0
    assert last.entered >= left
    last.leave()


def locks_in_use(database, positions):
    """Return which of these positions have a lock by name."""
    with contextlib.closing(database.session()) as session:
        prefix = session.lock_prefix
        return [
            position
            for position in positions
            if database.rows("SELECT IS_USED_LOCK(?)", f"{prefix}{position}")[0][0] is not None
        ]


@pytest.mark.timing(0.1)
def test_locks_of_removed_rows_are_freed(connect, database, name):
    """Also if another session or a trigger removed the rows: a long life does not gather locks on the server."""
    coordinator = connect()
    with coordinator.mutex(name("stays")) as stays:
        lock = coordinator.mutex(name)
        lock.acquire()
        gone = lock.grant.position
        assert locks_in_use(database, [gone, stays.position]) == [gone, stays.position]
        database.rows("DELETE FROM {table} WHERE queue_position = ?", gone)
        until(lambda: locks_in_use(database, [gone, stays.position]) == [stays.position], "the lock is freed")
        with pytest.raises(sqlsem.LockLost):
            lock.release()
    assert locks_in_use(database, [stays.position]) == []


def test_locks_of_finished_tasks_are_freed(connect, database, name):
    coordinator = connect()
    queue = coordinator.queue(name)
    queue.put_many([{"n": number} for number in range(3)], locks=[sqlsem.mutex(name)])
    positions = []
    for _ in range(3):
        with queue.try_claim() as task:
            positions.append(task.grant.position)
    until(lambda: locks_in_use(database, positions) == [], "no lock is left")
