"""The wait of a CALL of acquire on PostgreSQL: it sleeps, and renews its lease."""

import time

import pytest
from psycopg import errors
from support import PATIENCE, slack, until

pytestmark = pytest.mark.engines("postgresql")


def positions(database, name):
    return [row[0] for row in database.queue(name)]


def test_waiting_session_sleeps_for_many_slices(database, session, name):
    """Longer than its slices of three seconds."""
    holder, waiter, witness = session(), session(), session()
    holder.acquire(name)
    started = time.monotonic()
    waiter.start(name, timeout_ms=7_000)
    until(lambda: len(positions(database, name)) == 2)
    began = time.monotonic()
    slices, late = set(), []
    while time.monotonic() - began < 6:
        row = witness.connection.execute(
            "SELECT a.xact_start, t.waiter_lease_until < clock_timestamp()"
            " FROM pg_stat_activity a, sqlsem.ProcessControl t"
            " WHERE a.pid = %s AND t.resource_id = %s AND t.granted_at IS NULL",
            (waiter.pid, name),
        ).fetchone()
        slices.add(row[0])
        late.append(row[1])
        time.sleep(0.05)
    # Each slice is a transaction. A polling wait would make one for each check of this test.
    assert len(slices) <= 6
    assert len(late) > 20
    # (Briefly, after the server stood still.)
    assert sum(late) <= len(late) // 10, "the waiter's lease had expired: another client could have removed its row"
    assert waiter.future.result(PATIENCE) == (-1, None, None)
    assert 7 <= time.monotonic() - started < slack(20)


def test_wait_for_another_session_is_no_deadlock(database, session, name):
    """It holds a part of the limit itself, and waits for another session's part."""
    first, other = session(), session()
    first.acquire(name, concurrency_limit=3)
    other.acquire(name, concurrency_limit=3, weight=2)
    first.start(name, concurrency_limit=3, weight=2)
    until(lambda: len(positions(database, name)) == 3)
    other.release(name)
    first.granted()
    assert first.acquire(name("shared"), access="read")[0] == 0
    assert first.acquire(name("shared"), access="read")[0] == 0


def test_a_broken_off_wait_keeps_no_lock_of_the_engines(database, session, name):
    """An interrupt may strike just after wait() has got the lock that it waited for."""
    holder, waiter, witness = session(), session(), session()
    _, position, _ = holder.acquire(name)
    # The lock that such an interrupt would leave, here on the row of a third session: it would block the next wait.
    waiter.connection.execute("SELECT pg_advisory_lock_shared(sqlsem.lock_class(3), 4711)")
    shared = (
        "SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND mode = 'ShareLock'",
        (waiter.pid,),
    )
    assert witness.connection.execute(*shared).fetchone() == (1,)
    waiter.connection.execute("SET statement_timeout = 2000")
    with pytest.raises(errors.QueryCanceled, match="has left the queue"):
        waiter.acquire(name)
    assert witness.connection.execute(*shared).fetchone() == (0,)
    assert positions(database, name) == [position]
    # The beacon, and the session's other locks, are unchanged.
    waiter.connection.execute("SET statement_timeout = 0")
    assert holder.release(name) == 0
    assert waiter.acquire(name)[0] == 0
