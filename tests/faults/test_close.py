"""`Coordinator.close` under threads that wait and hold."""

import threading
import time

import pytest
from support import Attempt, slack, started_since, until

import sqlsem


def test_close_ends_waiters_and_holders(connect, database, name):
    name = str(name)
    before = threading.enumerate()
    coordinator = connect(grace=60)
    lost_grants = []
    holder = Attempt(coordinator.mutex(f"{name}-a", on_lost=lambda grant: lost_grants.append(grant)))
    holder.granted()
    waiters = [Attempt(coordinator.mutex(f"{name}-a")) for _ in range(4)]
    waiters += [Attempt(coordinator.write(f"{name}-b")) for _ in range(3)]  # one of them holds
    until(lambda: len(database.queue(name)) == 8, "all requests are in the queue")
    until(lambda: any(waiter.inside for waiter in waiters[4:]), "one is inside")
    began = time.monotonic()
    coordinator.close()
    assert time.monotonic() - began < slack(20)
    assert database.queue(name) == []
    until(lambda: not started_since(before, "sqlsem"), "no thread is left")
    for waiter in waiters:
        if not waiter.inside:
            assert isinstance(waiter.failed(20), sqlsem.SqlsemError)
            assert "closed" in str(waiter.failed())
    assert holder.grant.lost
    assert lost_grants == [holder.grant]
    with pytest.raises(sqlsem.LockLost, match="closed"):
        holder.leave()
    for waiter in waiters:
        if waiter.inside:
            with pytest.raises(sqlsem.LockLost, match="closed"):
                waiter.leave()
    with pytest.raises(sqlsem.ConfigurationError, match="closed"):
        coordinator.mutex(name).acquire()
    coordinator.close()  # again is harmless


def test_close_ends_waits_for_another_process(agents, connect, database, name, waiting):
    (holder,) = agents(1)
    holder.hold("mutex", name)
    coordinator = connect(grace=60)
    waiters = [Attempt(coordinator.mutex(str(name)), timeout=None) for _ in range(3)]
    waiting(name, 4)
    time.sleep(0.1)  # usually enough for the first of them to wait in the database; the test is valid without it
    coordinator.close()
    for waiter in waiters:
        assert "closed" in str(waiter.failed(20))
    waiting(name, 1)
    holder.check()
    holder.release()


def test_close_while_threads_come_and_go(connect, database, name):
    """At any moment of acquiring and releasing."""
    name = str(name)
    before = threading.enumerate()
    for round_number in range(12):
        coordinator = connect(grace=60)
        errors = []

        def work(coordinator=coordinator, errors=errors):
            try:
                while True:
                    with coordinator.limit(name, 2):
                        pass
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.01 * round_number)
        coordinator.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert all(isinstance(error, sqlsem.SqlsemError) for error in errors), errors
        assert len(errors) == 4
        assert database.queue(name) == []
    until(lambda: not started_since(before, "sqlsem"), "no thread is left")


def test_two_threads_close_at_once(connect, database, name):
    coordinator = connect(grace=60)
    coordinator.mutex(str(name)).acquire()
    closers = [threading.Thread(target=coordinator.close, daemon=True) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(30)
        assert not closer.is_alive()
    assert database.queue(name) == []


@pytest.mark.engines("postgresql")
def test_close_while_the_database_never_answers(proxied, proxy, name):
    before = threading.enumerate()
    coordinator = proxied.coordinator(grace=60, retry=5)
    holder = Attempt(coordinator.mutex(str(name)))
    holder.granted()
    waiter = Attempt(coordinator.mutex(str(name)))
    assert waiter.waits()
    proxy.hole()
    closer = threading.Thread(target=coordinator.close, daemon=True)
    closer.start()
    closer.join(40)
    closed = not closer.is_alive()
    proxy.cut()  # if it hangs, release it
    assert closed
    assert waiter.failed(30)
    with pytest.raises(sqlsem.LockLost, match="closed"):
        holder.leave()
    until(lambda: not started_since(before, "sqlsem"), "no thread is left")


@pytest.mark.engines("postgresql")
def test_a_row_that_is_being_written_is_taken_along(connect, database, name, threads):
    """As by a wait that is granted in this instant: the close does not miss its row."""
    coordinator = connect()
    coordinator.mutex(name).acquire()
    writer = database.raw(autocommit=False)
    try:
        writer.execute(database.sql("SELECT FROM {table} WHERE resource_id = %s FOR UPDATE"), (str(name),))
        closing = threading.Event()
        threads.start(lambda: (coordinator.close(), closing.set()))
        asleep = (
            "SELECT 1 FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event = 'PgSleep' AND strpos(query, 'deregister_member') > 0"
        )
        until(lambda: closing.is_set() or database.rows(asleep), "the session to leave")
    finally:
        writer.close()
    threads.join()
    assert database.queue(name) == []
