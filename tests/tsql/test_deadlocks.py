"""T-SQL sessions that wait for each other, or for Python: the youngest gets -3, and a message with the reason."""

import threading
import time

import pytest
from support import remains, until

import sqlsem

pytestmark = pytest.mark.engines("mssql")


def acquire_told(session, resource, *rest):
    """Call acquire, and return its code and its PRINTed messages."""
    marks = ", ".join("?" * (1 + len(rest)))
    cursor = session.connection.cursor()
    cursor.execute(f"DECLARE @c int; EXEC @c = {session.database.schema}.acquire {marks}; SELECT @c", (resource, *rest))
    messages = [text for _, text in cursor.messages or ()]
    while cursor.description is None:
        assert cursor.nextset()
        messages += [text for _, text in cursor.messages or ()]
    (code,) = cursor.fetchone()
    while cursor.nextset():
        messages += [text for _, text in cursor.messages or ()]
    return code, " ".join(messages)


def start(session, database, name, resource, *rest):
    """Start an acquire, and return when its request is in the queue."""
    before = len(database.queue(name))
    future = session.later(acquire_told, session, resource, *rest)
    until(lambda: future.done() or len(database.queue(name)) > before, "the request in the queue")
    return future


@pytest.mark.parametrize("size", [2, 3])
def test_the_youngest_of_a_ring(session, database, name, size):
    sessions = [session() for _ in range(size)]
    held = [caller.acquire(name(number)).position for number, caller in enumerate(sessions)]
    futures = [start(caller, database, name, name((number + 1) % size)) for number, caller in enumerate(sessions)]
    began = time.monotonic()
    code, words = futures[-1].result(60)
    assert time.monotonic() - began < 30
    assert code == -3
    assert len(database.queue(name)) == 2 * size - 1, "its request is removed, and it keeps its lock"
    assert not any(future.done() for future in futures[:-1])
    for number in range(size):
        assert f"holds '{name(number)}' at {held[number]}, waits for '{name((number + 1) % size)}' at " in words
        assert f" behind {held[(number + 1) % size]}" in words
    assert f"the request for '{name(0)}' has left the queue: release what is held, and try again" in words
    assert sessions[-1].release(name(size - 1)) == 0
    for number in reversed(range(size - 1)):
        assert futures[number].result(60)[0] == 1
        assert sessions[number].release(name(number)) == 0
        assert sessions[number].release(name(number + 1)) == 0


def test_deadlock_search_is_independent_of_set_options(session, database, name):
    first, second = session(), session()
    second.rows("SET ROWCOUNT 1")
    for which, holder in (("a", first), ("b", second)):
        assert holder.acquire(name(which)).code == 0
    waiting = start(first, database, name, name("b"))
    code, words = acquire_told(second, name("a"), 1, "write", 1, 30000)
    second.rows("SET ROWCOUNT 0")
    assert code == -3
    assert f"waits for '{name('a')}' at " in words
    assert second.release(name("b")) == 0
    assert waiting.result(60)[0] == 1
    assert first.release(name("b")) == first.release(name("a")) == 0


def test_limit_deadlocks_only_with_all_its_holders(session, database, name):
    connection, two, three = session(), session(), session()
    assert connection.acquire(name("book"), access="read").code == 0
    assert two.acquire(name("pool"), 2).code == three.acquire(name("pool"), 2).code == 0
    second = start(two, database, name, name("book"))
    first = start(connection, database, name, name("pool"), 2)
    remains(lambda: not (first.done() or second.done()), 3, "the third can leave")
    third = start(three, database, name, name("book"))
    assert third.result(60)[0] == -3
    assert three.release(name("pool")) == 0
    assert first.result(60)[0] == 1
    connection.release(name("pool"))
    connection.release(name("book"))
    assert second.result(60)[0] == 1


def test_waiting_for_oneself_is_told(session, name):
    connection = session()
    position = connection.acquire(name).position
    code, words = acquire_told(connection, name)
    assert code == -3
    assert f"holds '{name}' at {position}, waits for '{name}' at" in words
    assert connection.release(name) == 0


def test_not_in_a_transaction(session, refused):
    with refused(50001, "find_deadlock must not be called inside an open transaction"):
        session().rows("BEGIN TRANSACTION; EXEC {s}.find_deadlock 1")


def test_python_is_the_younger(session, connect, database, name):
    coordinator, connection = connect(), session()
    with coordinator.mutex(name("a")) as grant:
        held = connection.acquire(name("b")).position
        waiting = start(connection, database, name, name("a"))
        began = time.monotonic()
        with pytest.raises(sqlsem.Deadlock) as caught:
            coordinator.mutex(name("b")).acquire()
        assert time.monotonic() - began < 30
        assert f"holds '{name('b')}' at {held}, waits for '{name('a')}' at" in str(caught.value)
        assert f"holds '{name('a')}' at {grant.position}, waits for '{name('b')}' at" in str(caught.value)
        assert not waiting.done()
    assert waiting.result(60)[0] == 1
    assert connection.release(name("a")) == connection.release(name("b")) == 0


def test_the_session_is_the_younger(session, connect, database, name):
    coordinator, connection = connect(), session()
    assert connection.acquire(name("b")).code == 0
    ready, outcome = threading.Event(), []

    def python():
        with coordinator.mutex(name("a")):
            ready.set()
            with coordinator.mutex(name("b")):
                outcome.append("had")

    thread = threading.Thread(target=python)
    thread.start()
    assert ready.wait(60)
    until(lambda: len(database.queue(name("b"))) == 2, "Python's request in the queue")
    code, words = acquire_told(connection, name("a"))
    assert code == -3
    assert "python" in words  # the thread's name
    assert connection.release(name("b")) == 0
    thread.join(60)
    assert outcome == ["had"]
