"""The attributes and methods of a grant: position, fence, waited, lost, check, assert_held."""

import contextlib
import sqlite3
import sys
import threading
import time

import pytest
from support import Attempt, pinned, until

import sqlsem

pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.locks]
GRACE = 0.6


def test_grant_attributes(connect, database, name):
    coordinator = connect()
    with coordinator.mutex(name, note="for the night") as grant:
        assert grant.resource == name
        assert grant.position == grant.fence == grant.positions[name] == database.queue(name)[0][0]
        assert 0 <= grant.waited < 60
        assert grant.lost is False
        assert not grant.lost_event.is_set()
        grant.check()
        assert "held" in repr(grant)
        assert coordinator.admin.entries(name)[0].note == "for the night"
    assert "released" in repr(grant)
    assert grant.lost is False
    for call in (grant.check, grant.release):
        with pytest.raises(sqlsem.NotHeld):
            call()


def test_waited_counts_the_wait(connect, name):
    first, other = connect(), connect()
    with first.mutex(name):
        waiting = Attempt(other.mutex(name))
        until(lambda: len(first.admin.entries(name)) == 2, "it stands in the queue")
        assert waiting.waits(0.5)
    assert waiting.granted().waited >= 0.45
    waiting.leave()


def test_the_fence_grows_with_every_grant(connect, name):
    coordinators = [connect(), connect()]
    fences = []
    for number in range(10):
        with coordinators[number % 2].mutex(name) as grant:
            fences.append(grant.fence)
    assert fences == sorted(set(fences))


def test_a_grant_may_be_released_by_hand(connect, database, name):
    lock = connect().mutex(name)
    lock.acquire()
    lock.grant.release()
    assert database.queue(name) == []


# -- lost grants


def remove(database, position):
    database.rows("DELETE FROM {table} WHERE queue_position = ?", position)


def test_check_finds_a_row_that_is_gone(connect, database, name):
    lock = connect().mutex(name)
    lock.acquire()
    grant = lock.grant
    remove(database, grant.position)
    with pytest.raises(sqlsem.LockLost):
        grant.check()
    assert grant.lost
    assert grant.lost_event.is_set()
    assert "lost" in repr(grant)
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    with pytest.raises(sqlsem.NotHeld):
        lock.release()


def test_end_of_a_block_reports_a_removed_row(connect, database, name):
    with pytest.raises(sqlsem.LockLost) as caught, connect().mutex(name) as grant:
        remove(database, grant.position)
    assert caught.value.resource == name
    assert name in str(caught.value)


def test_an_error_inside_comes_before_the_loss(connect, database, name):
    with pytest.raises(ZeroDivisionError), connect().mutex(name) as grant:
        remove(database, grant.position)
        _ = 1 / 0


def test_on_lost_is_called_once_with_the_grant(connect, database, name):
    calls = []
    called = threading.Event()

    def on_lost(grant):
        calls.append((grant, grant.lost_event.is_set(), grant.lost))
        called.set()

    coordinator = connect(grace=GRACE)
    lock = coordinator.mutex(name, on_lost=on_lost)
    lock.acquire()
    grant = lock.grant
    remove(database, grant.position)
    assert called.wait(60), "the pings did not notice"
    assert grant.lost_event.is_set()
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    assert calls == [(grant, True, True)]


def test_failing_on_lost_callback_is_contained(connect, database, name):
    coordinator = connect(grace=GRACE)

    def on_lost(grant):
        raise ZeroDivisionError

    locks = [coordinator.mutex(name(number), on_lost=on_lost) for number in range(2)]
    for lock in locks:
        lock.acquire()
        remove(database, lock.grant.position)
    for lock in locks:
        assert lock.grant.lost_event.wait(60)
        with pytest.raises(sqlsem.LockLost):
            lock.release()
    with coordinator.mutex(name):
        pass


def test_lost_lock_can_be_acquired_again(connect, database, name):
    lock = connect().mutex(name)
    lock.acquire()
    grant = lock.grant
    remove(database, grant.position)
    with pytest.raises(sqlsem.LockLost):
        grant.check()
    lock.acquire()  # not a deadlock: nothing is held any more
    lock.release()
    with pytest.raises(sqlsem.LockLost):
        lock.release()


# -- assert_held inside the caller's own transaction


def test_assert_held(connect, name, transaction):
    with connect().mutex(name) as grant:
        cursor = transaction()
        grant.assert_held(cursor)
        grant.assert_held(cursor)
        cursor.connection.commit()


def test_assert_held_of_all_of(connect, name, transaction):
    coordinator = connect()
    with sqlsem.all_of(coordinator.mutex(name("a")), coordinator.limit(name("b"), 2)) as grant:
        cursor = transaction()
        grant.assert_held(cursor)
        cursor.connection.commit()


def test_assert_held_when_the_row_is_gone(connect, database, name, transaction):
    lock = connect().mutex(name)
    lock.acquire()
    grant = lock.grant
    remove(database, grant.position)
    cursor = transaction()
    with pytest.raises(sqlsem.LockLost):
        grant.assert_held(cursor)
    assert grant.lost
    cursor.connection.rollback()
    with pytest.raises(sqlsem.LockLost):
        lock.release()


def test_assert_held_after_release(connect, name, transaction):
    with connect().mutex(name) as grant:
        pass
    with pytest.raises(sqlsem.NotHeld):
        grant.assert_held(transaction())


def test_pinned_row_is_revoked_after_commit_only(connect, name, transaction, threads):
    coordinator, operator = connect(), connect(retry=60)
    lock = coordinator.mutex(name)
    lock.acquire()
    grant = lock.grant
    cursor = transaction()
    grant.assert_held(cursor)
    revoked = threading.Event()

    def revoke():
        assert operator.admin.revoke(grant.position, force=True)
        revoked.set()

    threads.start(revoke)
    waiter = Attempt(operator.mutex(name))
    assert not revoked.wait(0.7), "the row went while the transaction that asserted it was open"
    assert waiter.waits(0.1)
    committed = time.monotonic()
    cursor.connection.commit()
    threads.join()
    waiter.granted()
    assert waiter.entered > committed
    waiter.leave()
    with pytest.raises(sqlsem.LockLost):
        lock.release()


@pytest.mark.engines("postgresql", "mssql")
def test_an_asserted_row_outlives_its_owner(connect, database, name, transaction):
    """A member dies while its transaction goes on: no other client is granted before the transaction ends."""
    session = database.session(grace=0.2)
    from sqlsem.values.locks import Request

    member = session.register_member("host", 1, "test")
    (ticket,) = session.register(member, "me", "me", f"{name}-uid", [Request(name)], False)
    cursor = transaction()
    assert pinned(database.make_engine(), cursor, ticket)
    session.close()
    waiter = Attempt(connect().mutex(name))
    assert waiter.waits(1.5), "reaped while its transaction was open"
    committed = time.monotonic()
    cursor.connection.commit()
    waiter.granted()
    assert waiter.entered > committed
    waiter.leave()


@pytest.mark.engines("postgresql")
def test_assert_held_under_repeatable_read(connect, database, name, transaction):
    import psycopg

    lock = connect().mutex(name)
    lock.acquire()
    cursor = transaction()
    cursor.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    cursor.execute("SELECT 1")  # the snapshot
    lock.grant.assert_held(cursor)
    cursor.connection.commit()

    cursor.execute("SELECT 1")
    remove(database, lock.grant.position)
    with pytest.raises((sqlsem.LockLost, psycopg.errors.SerializationFailure)):
        lock.grant.assert_held(cursor)
    cursor.connection.rollback()
    with pytest.raises(sqlsem.LockLost):
        lock.grant.assert_held(cursor)
    cursor.connection.rollback()
    with pytest.raises(sqlsem.LockLost):
        lock.release()


@pytest.mark.engines("postgresql")
def test_assert_held_with_a_dictionary_cursor(connect, database, name):
    from psycopg.rows import dict_row

    with contextlib.closing(database.raw(autocommit=False)) as connection:
        with connect().mutex(name) as grant:
            grant.assert_held(connection.cursor(row_factory=dict_row))
            connection.commit()


@pytest.mark.engines("postgresql")
def test_pinned_row_outlives_its_block_until_commit(connect, database, name, transaction):
    """The row of a block that ends before its transaction stays until the commit, then leaves by itself."""
    coordinator = connect(grace=6)
    cursor = transaction()
    with coordinator.mutex(name) as grant:
        grant.assert_held(cursor)
    assert len(database.queue(name)) == 1
    waiter = Attempt(connect().mutex(name))
    assert waiter.waits(0.3)
    cursor.connection.commit()
    waiter.leave()
    until(lambda: database.queue(name) == [])


def test_assert_held_refuses_autocommit(connect, database, name):
    """With autocommit each statement is its own transaction, so an assertion would protect nothing."""
    with connect().mutex(name) as grant, contextlib.closing(database.raw(autocommit=True)) as connection:
        cursor = connection.cursor()
        with pytest.raises(sqlsem.ConfigurationError, match="transaction"):
            grant.assert_held(cursor)
        if database.engine == "postgresql":
            with connection.transaction():  # like Django's atomic()
                grant.assert_held(cursor)
        else:
            kind = " TRANSACTION" if database.engine == "mssql" else ""
            cursor.execute(f"BEGIN{kind}")
            grant.assert_held(cursor)
            cursor.execute(f"COMMIT{kind}")
        with pytest.raises(sqlsem.ConfigurationError, match="begin one"):
            grant.assert_held(cursor)


@pytest.mark.engines("sqlite")
@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has the attribute autocommit from Python 3.12 on")
@pytest.mark.parametrize("autocommit", [True, False])
def test_assert_held_and_autocommit_of_sqlite(connect, database, name, autocommit):
    path = database.url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path, autocommit=autocommit)) as connection:
        lock = connect().mutex(name)
        with lock as grant:
            if autocommit:
                with pytest.raises(sqlsem.ConfigurationError, match="autocommit"):
                    grant.assert_held(connection.cursor())
            else:
                grant.assert_held(connection.cursor())
                connection.commit()


@pytest.mark.engines("sqlite", "postgresql")
def test_assert_held_with_sqlalchemy(connect, database, name):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy import orm

    url = database.url.replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(url)
    try:
        lock = connect().mutex(name)
        with lock as grant:
            with engine.begin() as connection:
                grant.assert_held(connection)
            with engine.connect() as connection:
                grant.assert_held(connection)
                assert connection.in_transaction()
                connection.commit()
            with orm.Session(engine) as session, session.begin():
                grant.assert_held(session)
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                with pytest.raises(sqlsem.ConfigurationError, match="autocommit"):
                    grant.assert_held(connection)
            with engine.begin() as connection:
                remove(database, grant.position)
                with pytest.raises(sqlsem.LockLost):
                    grant.assert_held(connection)
    except sqlsem.LockLost:
        pass
    finally:
        engine.dispose()


@pytest.mark.timing(0.1)
def test_all_of_releases_the_rest_when_a_row_is_lost(connect, name):
    """The owner lives, so no other client would ever remove the remaining rows."""
    owner, operator = connect(), connect()
    first, second = f"{name}-1", f"{name}-2"
    with pytest.raises(sqlsem.LockLost):
        with sqlsem.all_of(owner.mutex(first), owner.limit(second, 2)) as grant:
            operator.admin.revoke(grant.positions[first], force=True)
            until(lambda: grant.lost, "it hears that it was revoked")
    until(lambda: not operator.admin.entries(second), "the other row is released")
    with operator.mutex(second):
        pass
