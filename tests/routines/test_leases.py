"""A lock with a lease belongs to no session: any client with its id is its holder until the lease expires."""

import time

import pytest
from support import PATIENCE, remains, slack, until

pytestmark = pytest.mark.engines("postgresql", "mssql")


def leases(database, name):
    return database.rows(
        f"SELECT m.lease_ms, m.beacon FROM {database.beside('member')} AS m JOIN {{table}} AS t "
        f"ON t.member_id = m.member_id WHERE t.resource_id = ?",
        name,
    )


def count(database):
    return database.rows(f"SELECT COUNT(*) FROM {database.beside('member')} WHERE lease_ms IS NOT NULL")[0][0]


def test_lease_outlives_its_session(session, database, name):
    """Behind a pooler, too: each call may be on another connection."""
    before = count(database)
    holder, connection = session(), session()
    got = holder.acquire(name, requesting_id="run 7", lease_seconds=600)
    assert got.code == 0
    assert leases(database, name) == [(600000, None)]
    holder.die()
    assert connection.acquire(name, timeout_ms=500).code == -1
    assert connection.call("renew", name, got.position, "run 7") == 0
    with connection.rolled_back():
        connection.run("assert_holding", name, got.position, "run 7")
    assert connection.call("renew", name, got.position) == -1
    assert connection.release(name, requesting_id="run 7") == 0
    assert count(database) == before
    assert connection.acquire(name, routine="try").code == 0
    connection.release(name)


def test_expired_lease_frees_the_lock(session, connect, database, refused, name):
    before = count(database)
    first, other = session(), session()
    got = first.acquire(name, requesting_id="run 8", lease_seconds=600)
    waiting = other.waiting(name, timeout_ms=600_000)
    began = time.monotonic()
    assert first.call("renew", name, got.position, "run 8", 1.5) == 0
    assert waiting.result(PATIENCE).code == 1
    assert time.monotonic() - began > 1.2
    assert first.call("renew", name, got.position, "run 8") == -1
    assert first.release(name, got.position, "run 8") == -1
    with first.rolled_back(), refused("55000", 50004, "is not held"):
        first.run("assert_holding", name, got.position, "run 8")
    assert other.release(name) == 0
    assert {row.outcome for row in connect().admin.history(name)} == {"reaped", "released"}
    assert count(database) == before


def test_lease_that_is_never_renewed_ends(session, name):
    first, other = session(), session()
    assert first.acquire(name, requesting_id="run 8", lease_seconds=1.5).code == 0
    until(lambda: other.acquire(name, routine="try").code == 0, "the lease ends")
    assert other.release(name) == 0


def test_renew_extends_a_lease(session, database, name):
    first, other = session(), session()
    got = first.acquire(name, requesting_id="run 9", lease_seconds=600)

    def renewed(*seconds):
        assert first.call("renew", name, got.position, "run 9", *seconds) == 0
        assert other.acquire(name, routine="try").code == -1

    renewed()  # the first calls are slow: they compile the procedures
    lease = slack(1)
    deadline = time.monotonic() + 1.5 * lease
    renewed(lease)
    while time.monotonic() < deadline:
        time.sleep(0.3)
        renewed()
    assert first.call("renew", name, got.position, "run 9", lease_seconds=600) == 0
    assert leases(database, name) == [(600000, None)]
    assert first.call("renew", name, got.position, "run 9") == 0
    assert leases(database, name) == [(600000, None)]
    assert first.call("renew", name, got.position, "run 9", 1) == 0
    until(lambda: other.acquire(name, routine="try").code == 0, "the lease running out")
    other.release(name)


def test_waiting_acquire_renews_its_lease(session, connect, name):
    first, other = session(), session()
    first.acquire(name)
    assert other.call("renew", name, 0, "run 10") == -1, "compiled before it has to be quick"
    lease = slack(1)
    waiting = other.waiting(name, requesting_id="run 10", lease_seconds=lease, timeout_ms=600_000)
    remains(lambda: not waiting.done(), 2 * lease, "it waits")
    first.release(name)
    assert waiting.result(PATIENCE).code == 1
    assert other.call("renew", name, waiting.result().position, "run 10") == 0
    assert first.acquire(name, routine="try").code == -1
    assert other.release(name, requesting_id="run 10") == 0


def test_timeout_leaves_no_lease(session, database, name):
    before = count(database)
    first, other = session(), session()
    first.acquire(name)
    for words in ({"routine": "try"}, {"timeout_ms": 0}, {"timeout_ms": 300}):
        assert other.acquire(name, lease_seconds=30, **words) == (-1, None, None)
    assert count(database) == before
    assert len(database.queue(name)) == 1
    first.release(name)


def test_two_leases_of_a_session_are_two_holders(session, database, name):
    connection = session()
    assert connection.acquire(name, lease_seconds=600, requesting_id="A").code == 0
    assert connection.acquire(name, lease_seconds=600, requesting_id="B", timeout_ms=200).code == -1
    assert connection.acquire(name, timeout_ms=200).code == -1
    assert connection.release(name, requesting_id="A") == 0
    assert connection.acquire(name, lease_seconds=600, requesting_id="B").code == 0
    assert connection.release(name, requesting_id="B") == 0


def test_second_lease_of_an_id_times_out(session, name):
    """A package that starts twice with one id: the second run waits for the first, and a release removes both rows."""
    caller, other = session(), session()
    first = caller.acquire(name, lease_seconds=600, requesting_id="twice")
    second = other.acquire(name, lease_seconds=600, requesting_id="twice", timeout_ms=300)
    assert (first.code, second.code) == (0, -1)
    assert caller.call("renew", name, first.position, "twice") == 0
    assert caller.release(name, requesting_id="twice") == 0
