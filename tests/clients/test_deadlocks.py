"""Sessions of PostgreSQL that wait for each other: the youngest gets -3, and a notice with the reason."""

import os
import threading
import time

import pytest
from support import remains, until
from support.callers import Caller

import sqlsem

pytestmark = pytest.mark.engines("postgresql")


class Waiter(Caller):
    """A session whose `start` returns when its request is in the queue."""

    def __init__(self, database, looking=None, **options):
        super().__init__(database.url, **options)
        self.database = looking or database

    def start(self, resource, **named):
        before = len(self.database.queue(resource))
        super().start(resource, **named)
        until(lambda: self.done.is_set() or len(self.database.queue(resource)) > before, "the request in the queue")
        return self


@pytest.fixture
def caller(database, name):
    callers = []

    def caller(**options):
        callers.append(Waiter(database, **options))
        return callers[-1]

    yield caller
    for opened in callers:
        opened.connection.close()
    until(lambda: database.rows("SELECT sqlsem.reap()") and not database.queue(name), "an empty queue")


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_youngest_of_a_ring(caller, database, name, size):
    callers = [caller() for _ in range(size)]
    for number, session in enumerate(callers):
        assert session.acquire(name(number))[0] == 0
    held = [database.queue(name(number))[0][0] for number in range(size)]
    for number, session in enumerate(callers):
        session.start(name((number + 1) % size))
    closed = time.monotonic()
    assert callers[-1].result() == (-3, None, None)
    assert callers[-1].entered - closed < 20  # under a second on a machine that has time
    # Its request is gone, it keeps its other lock, and all others still wait.
    assert len(database.queue(name)) == 2 * size - 1
    assert all(session.waits(0) for session in callers[:-1])
    (text,) = callers[-1].notices
    for number, session in enumerate(callers):
        assert f"session {session.pid} (postgres) holds '{name(number)}' at {held[number]}, waits for '" in text
        assert f"behind {held[(number + 1) % size]}" in text
    assert text.startswith("sqlsem: Deadlock: ")
    assert text.endswith(f"the request for '{name(0)}' has left the queue: release what is held, and try again")
    assert callers[-1].release(name(size - 1)) == 0
    for number in reversed(range(size - 1)):
        assert callers[number].result()[0] == 1
        assert callers[number].release(name(number)) == 0
        assert callers[number].release(name(number + 1)) == 0
        assert callers[number].notices == []


def test_the_youngest_though_the_server_would_take_another(caller, name):
    """The server's own search finds sessions only, and its victim is the first session that searches."""
    first, second = caller(), caller(options="-c deadlock_timeout=60s")
    assert first.acquire(name("a"))[0] == second.acquire(name("b"))[0] == 0
    first.start(name("b"))
    second.start(name("a"))
    assert second.result()[0] == -3
    assert first.waits(0)
    assert second.release(name("b")) == 0
    assert first.result()[0] == 1


def test_servers_own_deadlock_search_is_handled(caller, database, name):
    """With a short deadlock_timeout the server finds sessions that wait for each other before sqlsem does."""
    first, second = caller(options="-c deadlock_timeout=100ms"), caller(options="-c deadlock_timeout=100ms")
    assert first.acquire(name("a"))[0] == second.acquire(name("b"))[0] == 0
    first.start(name("b"))
    second.start(name("a"))
    until(lambda: first.done.is_set() or second.done.is_set(), "the deadlock found")
    victim, other = (first, second) if first.done.is_set() else (second, first)
    assert victim.result() == (-3, None, None)
    (text,) = victim.notices
    assert "eadlock" in text or "blocked by process" in text
    victim.release(name("a" if victim is first else "b"))
    assert other.result()[0] == 1


def test_readers_and_limits(caller, database, name):
    readers, pool = name("read"), name("pool")
    first, second, three = caller(), caller(), caller()
    assert first.acquire(readers, access="read")[0] == 0
    assert second.acquire(pool, concurrency_limit=2)[0] == three.acquire(pool, concurrency_limit=2)[0] == 0
    second.start(readers, access="write")
    first.start(pool, concurrency_limit=2)
    remains(lambda: first.waits(0) and second.waits(0), 2.5, "the third will go some day, so this is none")
    three.start(readers, access="write")
    assert three.result()[0] == -3
    assert three.release(pool) == 0
    assert first.result()[0] == 1
    assert first.release(pool) == first.release(readers) == 0
    assert second.result()[0] == 1


def test_self_deadlock_is_reported(caller, database, name):
    session = caller()
    assert session.acquire(name)[0] == 0
    position = database.queue(name)[0][0]
    assert session.acquire(name)[0] == -3
    (text,) = session.notices
    assert f"holds '{name}' at {position}, waits for '{name}' at" in text
    assert len(database.queue(name)) == 1


def test_a_timeout_comes_first(caller, name):
    first, second = caller(), caller()
    assert first.acquire(name("a"))[0] == second.acquire(name("b"))[0] == 0
    first.start(name("b"), timeout_ms=50)
    second.start(name("a"))
    assert first.result()[0] == -1
    assert first.release(name("a")) == 0
    assert second.result()[0] == 1
    assert second.notices == []


def test_a_lease_is_never_waited_with(caller, database, name):
    """Any session may release a lock that a lease holds."""
    first, second = caller(), caller()
    assert first.acquire(name("a"), lease_seconds=60, requesting_id=name)[0] == 0
    assert second.acquire(name("b"), lease_seconds=60, requesting_id=name)[0] == 0
    first.start(name("b"))
    second.start(name("a"))
    remains(lambda: first.waits(0) and second.waits(0), 2.5, "both wait")
    for resource in (name("a"), name("b")):
        database.rows("SELECT sqlsem.release(?, NULL, ?)", resource, name)
    assert first.result()[0] == second.result()[0] == 1


def test_only_its_own_login_may_ask(caller, login, database, name):
    other = Waiter(login("sqlsem_user"))
    first, second = caller(), caller()
    assert first.acquire(name("a"))[0] == second.acquire(name("b"))[0] == 0
    first.start(name("b"))
    second.start(name("a"))
    member = database.rows(
        "SELECT member_id FROM {table} WHERE resource_id = ? ORDER BY queue_position DESC", name("a")
    )[0][0]
    rows = other.connection.execute("SELECT * FROM sqlsem.find_deadlock(%s)", (member,)).fetchall()
    assert rows == []
    assert second.result()[0] == -3
    other.connection.close()


def test_user_role_may_search_deadlocks(database, login, name):
    """The search for deadlocks needs no more rights than acquire."""
    user = login("sqlsem_user")
    first, second = Waiter(user, database), Waiter(user, database)
    assert first.acquire(name("a"))[0] == second.acquire(name("b"))[0] == 0
    first.start(name("b"))
    second.start(name("a"))
    assert second.result()[0] == -3
    assert second.release(name("b")) == 0
    assert first.result()[0] == 1
    first.connection.close()
    second.connection.close()


# -- among Python's ---------------------------------------------------------------------------------------------------


def test_a_session_and_python_the_session_is_younger(caller, connect, database, name):
    coordinator, session = connect(), caller()
    with coordinator.mutex(name("a")) as grant:
        assert session.acquire(name("b"))[0] == 0
        held = database.queue(name("b"))[0][0]
        granted = threading.Event()

        def want():
            with coordinator.mutex(name("b")):
                granted.set()

        # (Another thread of the same process would be another owner.)
        done = []

        def later():
            until(lambda: len(database.queue(name("b"))) == 2, "Python's request in the queue")
            session.start(name("a"))
            done.append(session.result())
            session.release(name("b"))

        other = threading.Thread(target=later)
        other.start()
        want()
        other.join()
        assert granted.is_set()
        assert done == [(-3, None, None)]
        (text,) = session.notices
        assert f"session {session.pid} (postgres) holds '{name('b')}' at {held}, waits for '{name('a')}' at" in text
        owner = grant.state.caller.owner
        assert f"({owner}) holds '{name('a')}' at {grant.position}, waits for '{name('b')}' at" in text


def test_a_session_and_python_python_is_younger(caller, connect, database, name):
    coordinator, session = connect(), caller()
    with coordinator.mutex(name("a")) as grant:
        assert session.acquire(name("b"))[0] == 0
        session.start(name("a"))
        began = time.monotonic()
        with pytest.raises(sqlsem.Deadlock) as caught:
            coordinator.mutex(name("b")).acquire()
        assert time.monotonic() - began < 20
        assert f"session {session.pid} (postgres) holds '{name('b')}' at" in str(caught.value)
        owner = grant.state.caller.owner
        assert f":{os.getpid()} ({owner}) holds '{name('a')}' at {grant.position}" in str(caught.value)
        assert session.waits(0)
    assert session.result()[0] == 1
    assert session.notices == []
    assert session.release(name("a")) == session.release(name("b")) == 0
