"""Locks that are released when the caller's transaction commits; after a rollback they stay."""

import asyncio
import contextlib
import os
import threading

import pytest
from support import PATIENCE, Attempt, Database, random_name, until, with_database

import sqlsem
from sqlsem.values.errors import ConfigurationError, LockLost, NotHeld

pytestmark = pytest.mark.faces("sync", "aio")


def gone(database, name):
    until(lambda: database.queue(name) == [])


def left(database):
    """Return the commit markers of transactions that no client has removed yet."""
    return database.rows(f"SELECT marker FROM {database.beside('commit_marker')}")


def test_commit_releases_the_lock(connect, database, name, transaction):
    cursor, before = transaction(), left(database)
    with connect().mutex(name) as grant:
        grant.release_on_commit(cursor)
        assert len(database.queue(name)) == 1
        cursor.connection.commit()
        gone(database, name)
        assert not grant.lost
        with pytest.raises(NotHeld):
            grant.check()
    grant.release()  # the lock is released already
    until(lambda: set(left(database)) <= set(before))


def test_rollback_keeps_the_lock(connect, database, name, transaction):
    cursor, other = transaction(), connect()
    with connect().mutex(name) as grant:
        grant.release_on_commit(cursor)
        cursor.connection.rollback()
        assert not other.mutex(name).acquire(timeout=0.5)
        grant.check()
        # The second attempt commits.
        grant.release_on_commit(cursor)
        cursor.connection.commit()
        assert other.mutex(name).acquire(timeout=PATIENCE)
    other.close()


def test_lock_is_held_until_the_commit(connect, database, name, transaction):
    """The waiter is granted soon after the commit."""
    cursor, other = transaction(), connect()
    with connect().mutex(name) as grant:
        waiter = Attempt(other.mutex(name))
        grant.release_on_commit(cursor)
        assert waiter.waits(0.5)
        cursor.connection.commit()
        waiter.leave()
    gone(database, name)


def test_a_rollback_to_a_savepoint_keeps_it(connect, database, name, transaction):
    if database.engine == "mssql":
        save, back = "SAVE TRANSACTION here", "ROLLBACK TRANSACTION here"
    else:
        save, back = "SAVEPOINT here", "ROLLBACK TO SAVEPOINT here"
    cursor = transaction()
    with connect().mutex(name) as grant:
        if database.engine == "sqlite":
            cursor.execute("BEGIN IMMEDIATE")
        cursor.execute(save)
        grant.release_on_commit(cursor)
        cursor.execute(back)
        cursor.connection.commit()
        assert not connect().mutex(name).acquire(timeout=0.5)
        grant.check()
    gone(database, name)


def test_a_rollback_to_a_savepoint_undoes_no_earlier_call(connect, database, name, transaction):
    if database.engine == "mssql":
        save, back = "SAVE TRANSACTION here", "ROLLBACK TRANSACTION here"
    else:
        save, back = "SAVEPOINT here", "ROLLBACK TO SAVEPOINT here"
    cursor = transaction()
    with connect().mutex(name) as grant:
        grant.release_on_commit(cursor)
        cursor.execute(save)
        grant.release_on_commit(cursor)
        cursor.execute(back)
        cursor.connection.commit()
        gone(database, name)
        assert not grant.lost


def test_commit_releases_all_locks_of_a_group(connect, database, name, transaction):
    coordinator, cursor = connect(), transaction()
    with sqlsem.all_of(coordinator.mutex(name("a")), coordinator.limit(name("b"), 2)) as grant:
        grant.release_on_commit(cursor)
        cursor.connection.commit()
        gone(database, name)


def test_a_lock_that_is_lost_is_refused(connect, database, name, transaction):
    cursor, coordinator = transaction(), connect()
    with pytest.raises(LockLost), coordinator.mutex(name) as grant:
        connect().admin.revoke(grant.position, force=True)
        with pytest.raises(LockLost):
            grant.release_on_commit(cursor)


def test_a_lock_that_is_held_twice_is_refused(connect, name, transaction):
    lock = connect().mutex(name, reentrant=True)
    with lock, lock as grant:
        with pytest.raises(ConfigurationError, match="2 times"):
            grant.release_on_commit(transaction())


def test_reentrant_hold_outlives_the_commit(connect, database, name, transaction):
    """After the commit the lock stays until the inner block ends, then is released before the outer block's end."""
    coordinator, cursor = connect(), transaction()
    lock = coordinator.mutex(name, reentrant=True)
    with lock as grant:
        grant.release_on_commit(cursor)
        with lock:
            cursor.connection.commit()
            assert not connect().mutex(name).acquire(timeout=0.5)
            grant.check()
        gone(database, name)
        with lock as anew:  # a new acquisition, not the released one
            assert anew.position > grant.position
            anew.check()
        gone(database, name)


def test_inner_release_keeps_the_commit_pending(connect, database, name, transaction):
    """Releasing the inner acquisition does not release the lock before the commit."""
    cursor, lock = transaction(), connect().mutex(name, reentrant=True)
    with lock as grant:
        grant.release_on_commit(cursor)
        with lock:
            pass
        cursor.connection.commit()
        gone(database, name)
        with pytest.raises(NotHeld):
            grant.check()


def test_autocommit_is_refused(connect, database, name):
    with connect().mutex(name) as grant, contextlib.closing(database.raw()) as connection:
        with pytest.raises(ConfigurationError, match="transaction"):
            grant.release_on_commit(connection.cursor())
        grant.check()


@pytest.mark.engines("postgresql")
def test_a_transaction_that_is_open_when_the_block_ends(connect, database, name, transaction):
    """The row stays until the commit, and leaves by itself, like an asserted row."""
    cursor = transaction()
    with connect(grace=2).mutex(name) as grant:
        grant.release_on_commit(cursor)
    assert len(database.queue(name)) == 1
    waiter = Attempt(connect().mutex(name))
    assert waiter.waits(0.3)
    cursor.connection.commit()
    waiter.leave()
    gone(database, name)


@pytest.mark.parametrize("method", ["commit", "rollback"])
def test_block_ends_before_the_commit_is_polled(connect, database, name, transaction, method):
    """Block and poller race many times: one of them releases the lock, and no loss is reported."""
    coordinator, cursor = connect(), transaction()
    for _ in range(10):
        with coordinator.mutex(name) as grant:
            grant.release_on_commit(cursor)
            getattr(cursor.connection, method)()
        assert database.queue(name) == []


def test_block_ends_after_the_release_by_its_commit(connect, database, name, transaction, monkeypatch):
    """The lock is free when the block has ended, as with any block."""
    coordinator, cursor = connect(), transaction()
    begun, may_go_on = threading.Event(), threading.Event()
    with coordinator.mutex(name) as grant:
        session_class = type(coordinator.client.member.main.session)
        release = session_class.release

        def late(*arguments):
            begun.set()
            assert may_go_on.wait(PATIENCE)
            return release(*arguments)

        monkeypatch.setattr(session_class, "release", late)
        grant.release_on_commit(cursor)
        cursor.connection.commit()
        assert begun.wait(PATIENCE)
        threading.Timer(0.3, may_go_on.set).start()
    assert may_go_on.is_set()
    assert database.queue(name) == []
    assert not grant.lost


def leave_and_die(channel, url, options, engine, name, commit):
    """A child process that holds, writes, calls release_on_commit and dies, with or without the commit."""
    database = Database(engine, url, options)
    connection = database.raw(autocommit=False)
    lock = database.coordinator(grace=1).mutex(name)
    assert lock.acquire()
    cursor = connection.cursor()
    cursor.execute(f"INSERT INTO {database.beside(f'written_{name}')} VALUES (1)")
    lock.grant.release_on_commit(cursor)
    if commit:
        connection.commit()
    channel.tell("now")
    os._exit(9)


@pytest.mark.faces("sync")
@pytest.mark.parametrize("commit", [True, False])
def test_killed_owner_releases_by_the_outcome(connect, database, name, spawn, commit):
    """A dead owner's transaction is committed or not as a whole, and its lock is free within its grace."""
    table = database.beside(f"written_{name}")
    database.rows(f"CREATE TABLE {table} (id integer)")
    try:
        spawn(leave_and_die, engine=database.engine, name=str(name), commit=commit).expect("now")
        with connect().mutex(name, timeout=PATIENCE):
            assert len(database.rows(f"SELECT id FROM {table}")) == commit
    finally:
        database.rows(f"DROP TABLE {table}")


# -- another database -------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(database, tmp_path):
    """A cursor on another database that has sqlsem."""
    with contextlib.ExitStack() as stack:
        if database.engine == "sqlite":
            other = Database("sqlite", f"sqlite:///{tmp_path / 'other.db'}")
            other.install()
        elif database.engine in ("postgresql", "mysql"):
            other_name, force = random_name(), " WITH (FORCE)" if database.engine == "postgresql" else ""
            database.rows(f"CREATE DATABASE {other_name}")
            stack.callback(database.rows, f"DROP DATABASE {other_name}{force}")
            other = Database(database.engine, with_database(database.url, other_name), database.options)
            other.install()
        else:
            other = database
        connection = other.raw(autocommit=database.engine == "mssql")
        stack.callback(connection.close)
        if database.engine == "mssql":
            connection.execute("USE master")  # the check comes before any call of a sqlsem routine
            connection.autocommit = False
        yield connection.cursor()


def test_a_cursor_on_another_database_is_refused(connect, name, elsewhere):
    coordinator = connect()
    with coordinator.mutex(name) as grant:
        with pytest.raises(ConfigurationError, match="another database"):
            grant.release_on_commit(elsewhere)
        elsewhere.connection.rollback()
        grant.check()


@pytest.mark.engines("sqlite", "postgresql")
def test_assert_on_another_database_is_refused(connect, name, elsewhere):
    coordinator = connect()
    with coordinator.mutex(name) as grant:
        with pytest.raises(ConfigurationError, match="another database"):
            grant.assert_held(elsewhere)
        grant.check()
        assert not grant.lost


@pytest.mark.faces("sync")
def test_put_into_another_database_is_refused(connect, name, elsewhere):
    queue = connect().queue(name)
    with pytest.raises(ConfigurationError, match="another database"):
        queue.put(1, cursor=elsewhere)
    elsewhere.connection.rollback()
    assert queue.tasks() == []


@pytest.mark.faces("sync")
def test_commit_is_looked_up_again_after_a_failover(connect, name, transaction):
    """A cached database identity may be out of date."""
    coordinator = connect()
    coordinator.engine.known_identity = "where the primary was before"
    cursor = transaction()
    with coordinator.mutex(name) as grant:
        grant.release_on_commit(cursor)
        cursor.connection.commit()


# -- connections of other libraries -----------------------------------------------------------------------------------


@pytest.mark.faces("sync")
@pytest.mark.engines("postgresql", "sqlite")
def test_sqlalchemy(connect, database, name):
    sqlalchemy = pytest.importorskip("sqlalchemy")
    orm = pytest.importorskip("sqlalchemy.orm")
    engine = sqlalchemy.create_engine(database.url.replace("postgresql://", "postgresql+psycopg://"))
    coordinator = connect()
    with coordinator.mutex(name) as grant, engine.begin() as connection:
        grant.release_on_commit(connection)
    with coordinator.mutex(name) as grant, orm.Session(engine) as session:
        grant.release_on_commit(session)
        session.rollback()
        grant.check()
        grant.release_on_commit(session)
        session.commit()
        gone(database, name)
    engine.dispose()


@pytest.mark.faces("sync")
@pytest.mark.engines("postgresql")
async def test_cursors_that_are_awaited(database, connect, name):
    import asyncio

    import psycopg

    coordinator = connect()
    lock = coordinator.aio.mutex(name)
    async with lock as grant, await psycopg.AsyncConnection.connect(database.url) as connection:
        async with connection.cursor() as cursor:
            await grant.release_on_commit(cursor)
            await connection.commit()
        await asyncio.to_thread(gone, database, name)


@pytest.mark.engines("sqlite", "postgresql")
@pytest.mark.faces("aio")
@pytest.mark.parametrize(
    ("call", "end"), [("is_committed", "rollback"), ("release", "commit")], ids=["outcome", "release"]
)
def test_event_loop_runs_on_while_a_call_has_no_answer(database, name, monkeypatch, call, end):
    """A thread asks if the transaction was committed, and then releases the lock; the loop does not stand still."""
    polled, answers, beating = threading.Event(), threading.Event(), threading.Event()

    async def beat():
        for _ in range(20):
            await asyncio.sleep(0.01)
        beating.set()
        answers.set()

    async def main(coordinator, cursor):
        session_class = type(coordinator.client.member.main.session)
        method = getattr(session_class, call)

        def silent(*arguments):
            polled.set()
            assert answers.wait(PATIENCE)
            return method(*arguments)

        monkeypatch.setattr(session_class, call, silent)
        async with coordinator.aio.mutex(name) as grant:
            await grant.release_on_commit(cursor)
            if end == "commit":
                cursor.connection.commit()
            await asyncio.to_thread(polled.wait, PATIENCE)
            if end == "rollback":
                cursor.connection.rollback()  # frees the row
            heart = asyncio.create_task(beat())
        assert beating.is_set(), "the loop stood still"
        await heart

    with database.coordinator() as coordinator, contextlib.closing(database.raw(autocommit=False)) as connection:
        with coordinator.mutex(name):
            pass  # opens the connections
        threading.Timer(PATIENCE / 2, answers.set).start()  # bounds the test if the loop is blocked
        asyncio.run(main(coordinator, connection.cursor()))
        gone(database, name)
