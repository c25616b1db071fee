"""The wait of a CALL of acquire on PostgreSQL: it sleeps, renews its lease, and never waits for itself."""

import contextlib
import time

import psycopg
import pytest
from psycopg import errors
from support import slack, until

pytestmark = pytest.mark.engines("postgresql")


@pytest.fixture
def session(database):
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(contextlib.closing(psycopg.connect(database.url, autocommit=True)))


def acquire(connection, resource, **named):
    """(code, queue_position)"""
    words = ", ".join(["%(resource)s", *(f"{name} => %({name})s" for name in named)])
    return connection.execute(f"CALL sqlsem.acquire({words})", {"resource": resource, **named}).fetchone()[:2]


def start(threads, connection, resource, **named):
    """Start acquire in a thread, and return a list that gets the answer."""
    answer = []
    threads.start(lambda: answer.append(acquire(connection, resource, **named)))
    return answer


def positions(database, name):
    return [row[0] for row in database.queue(name)]


def test_waiting_session_sleeps_for_many_slices(database, session, name, threads):
    """Longer than its slices of three seconds."""
    holder, waiter, witness = session(), session(), session()
    acquire(holder, name)
    started = time.monotonic()
    answer = start(threads, waiter, name, timeout_ms=7_000)
    until(lambda: len(positions(database, name)) == 2)
    began = time.monotonic()
    slices, late = set(), []
    while time.monotonic() - began < 6:
        row = witness.execute(
            "SELECT a.xact_start, t.waiter_lease_until < clock_timestamp()"
            " FROM pg_stat_activity a, sqlsem.ProcessControl t"
            " WHERE a.pid = %s AND t.resource_id = %s AND t.granted_at IS NULL",
            (waiter.info.backend_pid, name),
        ).fetchone()
        slices.add(row[0])
        late.append(row[1])
        time.sleep(0.05)
    # Each slice is a transaction. A polling wait would make one for each check of this test.
    assert len(slices) <= 6
    assert len(late) > 20
    # (Briefly, after the server stood still.)
    assert sum(late) <= len(late) // 10, "the waiter's lease had expired: another client could have removed its row"
    threads.join()
    assert 7 <= time.monotonic() - started < slack(20)
    assert answer == [(-1, None)]


@pytest.mark.parametrize(
    ("held", "terms"),
    [
        ([{}], {}),
        ([{"access": "read"}], {"access": "write"}),
        ([{"access": "write"}], {"access": "read"}),
        ([{"access": "stage:1"}], {"access": "stage:2"}),
        ([{"concurrency_limit": 2}, {"concurrency_limit": 2}], {"concurrency_limit": 2}),
        ([{"concurrency_limit": 5, "weight": 3}], {"concurrency_limit": 5, "weight": 3}),
        ([{"concurrency_limit": 1}], {"concurrency_limit": 3}),
    ],
    ids=str,
)
def test_self_wait_of_a_session_is_a_deadlock(database, session, name, held, terms):
    first, other = session(), session()
    for named in held:
        assert acquire(first, name, **named)[0] == 0
    before = positions(database, name)
    assert acquire(first, name, **terms, timeout_ms=60_000) == (-3, None)
    assert first.execute("CALL sqlsem.try(%s)", (name,)).fetchone()[0] == -1
    assert positions(database, name) == before
    assert first.execute("SELECT sqlsem.release(%s)", (name,)).fetchone() == (0,)
    assert acquire(other, name, **terms, timeout_ms=60_000)[0] == 0


def test_wait_for_another_session_is_no_deadlock(database, session, name, threads):
    """It holds a part of the limit itself, and waits for another session's part."""
    first, other = session(), session()
    acquire(first, name, concurrency_limit=3)
    acquire(other, name, concurrency_limit=3, weight=2)
    answer = start(threads, first, name, concurrency_limit=3, weight=2)
    until(lambda: len(positions(database, name)) == 3)
    other.execute("SELECT sqlsem.release(%s)", (name,))
    threads.join()
    assert answer[0][0] == 1
    assert acquire(first, name("shared"), access="read")[0] == 0
    assert acquire(first, name("shared"), access="read")[0] == 0


def test_a_broken_off_wait_keeps_no_lock_of_the_engines(database, session, name):
    """An interrupt may strike just after wait() has got the lock that it waited for."""
    holder, waiter, witness = session(), session(), session()
    _, position = acquire(holder, name)
    # The lock that such an interrupt would leave, here on the row of a third session: it would block the next wait.
    waiter.execute("SELECT pg_advisory_lock_shared(sqlsem.lock_class(3), 4711)")
    shared = (
        "SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND mode = 'ShareLock'",
        (waiter.info.backend_pid,),
    )
    assert witness.execute(*shared).fetchone() == (1,)
    waiter.execute("SET statement_timeout = 500")
    with pytest.raises(errors.QueryCanceled, match="has left the queue"):
        acquire(waiter, name)
    assert witness.execute(*shared).fetchone() == (0,)
    assert positions(database, name) == [position]
    # The beacon, and the session's other locks, are unchanged.
    waiter.execute("SET statement_timeout = 0")
    assert holder.execute("SELECT sqlsem.release(%s)", (name,)).fetchone() == (0,)
    assert acquire(waiter, name)[0] == 0
