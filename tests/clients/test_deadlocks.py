"""Sessions of PostgreSQL that wait for each other, where it differs (``routines`` has the rest)."""

import pytest
from support import PATIENCE, remains, until
from support.callers import Caller

pytestmark = pytest.mark.engines("postgresql")


class Waiter(Caller):
    """A session whose `start` returns when its request is in the queue."""

    def __init__(self, database, looking=None, **options):
        super().__init__(database, **options)
        self.database = looking or database

    def start(self, resource, **named):
        self.future = self.waiting(resource, **named)
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


def test_the_youngest_though_the_server_would_take_another(caller, name):
    """The server's own search finds sessions only, and its victim is the first session that searches."""
    first, second = caller(), caller(options="-c deadlock_timeout=60s")
    assert first.acquire(name("a"))[0] == second.acquire(name("b"))[0] == 0
    first.start(name("b"))
    second.start(name("a"))
    assert second.future.result(PATIENCE)[0] == -3
    assert first.waits(0)
    assert second.release(name("b")) == 0
    assert first.future.result(PATIENCE)[0] == 1


def test_servers_own_deadlock_search_is_handled(caller, database, name):
    """With a short deadlock_timeout the server finds sessions that wait for each other before sqlsem does."""
    first, second = caller(options="-c deadlock_timeout=100ms"), caller(options="-c deadlock_timeout=100ms")
    assert first.acquire(name("a"))[0] == second.acquire(name("b"))[0] == 0
    first.start(name("b"))
    second.start(name("a"))
    until(lambda: first.future.done() or second.future.done(), "the deadlock found")
    victim, other = (first, second) if first.future.done() else (second, first)
    assert victim.future.result(PATIENCE) == (-3, None, None)
    (text,) = victim.told
    assert "eadlock" in text or "blocked by process" in text
    victim.release(name("a" if victim is first else "b"))
    assert other.future.result(PATIENCE)[0] == 1


def test_a_timeout_comes_first(caller, name):
    first, second = caller(), caller()
    assert first.acquire(name("a"))[0] == second.acquire(name("b"))[0] == 0
    first.start(name("b"), timeout_ms=50)
    second.start(name("a"))
    assert first.future.result(PATIENCE)[0] == -1
    assert first.release(name("a")) == 0
    assert second.future.result(PATIENCE)[0] == 1
    assert second.told == []


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
    assert first.future.result(PATIENCE)[0] == second.future.result(PATIENCE)[0] == 1


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
    assert second.future.result(PATIENCE)[0] == -3
    other.connection.close()


def test_user_role_may_search_deadlocks(database, login, name):
    """The search for deadlocks needs no more rights than acquire."""
    user = login("sqlsem_user")
    first, second = Waiter(user, database), Waiter(user, database)
    assert first.acquire(name("a"))[0] == second.acquire(name("b"))[0] == 0
    first.start(name("b"))
    second.start(name("a"))
    assert second.future.result(PATIENCE)[0] == -3
    assert second.release(name("b")) == 0
    assert first.future.result(PATIENCE)[0] == 1
    first.connection.close()
    second.connection.close()
