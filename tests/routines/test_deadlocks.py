"""Sessions that wait for each other, or for Python: the youngest gets -3, and a message with the reason."""

import time

import pytest
from support import PATIENCE, remains, slack, until

import sqlsem

pytestmark = pytest.mark.engines("postgresql", "mssql")


def reason(session):
    """Return the message of the only deadlock that a session was told of."""
    (text,) = session.told
    return text


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_youngest_of_a_ring(session, database, name, size):
    sessions = [session() for _ in range(size)]
    held = [caller.acquire(name(number)).position for number, caller in enumerate(sessions)]
    calls = [caller.waiting(name((number + 1) % size), timeout_ms=60_000) for number, caller in enumerate(sessions)]
    began = time.monotonic()
    assert calls[-1].result(PATIENCE) == (-3, None, None)
    assert time.monotonic() - began < slack(10)
    assert len(database.queue(name)) == 2 * size - 1, "its request is removed, and it keeps its lock"
    assert not any(call.done() for call in calls[:-1])
    text = reason(sessions[-1])
    for number, caller in enumerate(sessions):
        assert f" holds '{name(number)}' at {held[number]}, waits for '{name((number + 1) % size)}' at " in text
        assert f" behind {held[(number + 1) % size]}" in text
        if not caller.tsql:
            assert f"session {caller.pid} (postgres) holds '{name(number)}'" in text
    assert "sqlsem: Deadlock: " in text
    assert text.endswith(f"; the request for '{name(0)}' has left the queue: release what is held, and try again")
    assert sessions[-1].release(name(size - 1)) == 0
    for number in reversed(range(size - 1)):
        assert calls[number].result(PATIENCE).code == 1
        assert sessions[number].release(name(number)) == 0
        assert sessions[number].release(name(number + 1)) == 0
        assert sessions[number].told == []


def test_limit_deadlocks_only_with_all_its_holders(session, name):
    reader, two, three = session(), session(), session()
    assert reader.acquire(name("book"), access="read").code == 0
    assert two.acquire(name("pool"), 2).code == three.acquire(name("pool"), 2).code == 0
    second = two.waiting(name("book"), timeout_ms=60_000)
    first = reader.waiting(name("pool"), 2, timeout_ms=60_000)
    remains(lambda: not (first.done() or second.done()), 3, "the third can leave")
    third = three.waiting(name("book"), timeout_ms=60_000)
    assert third.result(PATIENCE).code == -3
    assert three.release(name("pool")) == 0
    assert first.result(PATIENCE).code == 1
    assert reader.release(name("pool")) == reader.release(name("book")) == 0
    assert second.result(PATIENCE).code == 1
    assert two.release(name("pool")) == two.release(name("book")) == 0


def test_waiting_for_oneself_is_told(session, database, name):
    connection = session()
    position = connection.acquire(name).position
    assert connection.acquire(name).code == -3
    assert f"holds '{name}' at {position}, waits for '{name}' at" in reason(connection)
    assert len(database.queue(name)) == 1
    assert connection.release(name) == 0


def test_python_is_the_younger(session, connect, name):
    coordinator, connection = connect(), session()
    with coordinator.mutex(name("a")) as grant:
        held = connection.acquire(name("b")).position
        waiting = connection.waiting(name("a"), timeout_ms=60_000)
        began = time.monotonic()
        with pytest.raises(sqlsem.Deadlock) as caught:
            coordinator.mutex(name("b")).acquire()
        assert time.monotonic() - began < slack(10)
        assert f"holds '{name('b')}' at {held}, waits for '{name('a')}' at" in str(caught.value)
        owner = grant.state.caller.owner
        assert f"({owner}) holds '{name('a')}' at {grant.position}, waits for '{name('b')}' at" in str(caught.value)
        assert not waiting.done()
    assert waiting.result(PATIENCE).code == 1
    assert connection.told == []
    assert connection.release(name("a")) == connection.release(name("b")) == 0


def test_the_session_is_the_younger(session, connect, database, name):
    coordinator, connection = connect(), session()
    held = connection.acquire(name("b")).position
    with coordinator.mutex(name("a")) as grant:

        def younger():
            until(lambda: len(database.queue(name("b"))) == 2, "Python's request in the queue")
            answer = connection.acquire(name("a"), timeout_ms=60_000)
            connection.release(name("b"))
            return answer

        refused = connection.later(younger)
        with coordinator.mutex(name("b")):  # (Another thread of the same process would be another owner.)
            assert refused.result(PATIENCE) == (-3, None, None)
        text = reason(connection)
        assert f"holds '{name('b')}' at {held}, waits for '{name('a')}' at" in text
        owner = grant.state.caller.owner
        assert f"({owner}) holds '{name('a')}' at {grant.position}, waits for '{name('b')}' at" in text
