"""Guarded tables and zombies: writers that lost their lock without knowing it, and go on."""

import psycopg
import pytest
from bouncer import Bouncer, program
from support import until

import sqlsem

pytestmark = pytest.mark.engines("postgresql")


def zombie(channel, url, options, table, name, how):
    """Take the lock, write, report that, and write again on command, without checking the lock."""
    with sqlsem.connect(url, **options, lease=1.0) as coordinator, psycopg.connect(url) as connection:
        lock = coordinator.mutex(name)
        lock.acquire()
        grant = lock.grant
        session = grant.session(connection)
        if how == "session":
            session.__enter__()  # for good
        else:
            grant.assert_held(connection.cursor())
        connection.execute(f"INSERT INTO {table} VALUES (1)")
        connection.commit()
        channel.tell("wrote", position=grant.position)
        channel.ask()
        try:
            connection.execute(f"INSERT INTO {table} VALUES (2)")
            connection.commit()
        except psycopg.Error as exc:
            channel.tell("refused", words=str(exc), state=exc.sqlstate)
        else:
            channel.tell("written")
        try:
            lock.release()
        except sqlsem.LockLost:
            channel.tell("lost")


@pytest.mark.parametrize("how", ["session", "assert"])
def test_a_writer_that_was_stopped_and_lost_its_lock(spawn, database, connect, guarded, name, how):
    child = spawn(zombie, table=guarded, name=name, how=how)
    position = child.expect("wrote")["position"]
    child.pause()
    lock = connect().mutex(name)
    assert lock.acquire(timeout=60)  # its lease is over
    assert lock.grant.position > position
    with psycopg.connect(database.url) as connection, lock.grant.session(connection):
        connection.execute(f"INSERT INTO {guarded} VALUES (10)")
        connection.commit()
        child.send()
        child.resume()
        refused = child.expect("refused")
        assert refused["state"] == "55000"
        assert name in refused["words"]
        child.expect("lost")
        connection.execute(f"INSERT INTO {guarded} VALUES (11)")
        connection.commit()
    lock.release()
    assert sorted(row[0] for row in database.rows(f"SELECT a FROM {guarded}")) == [1, 10, 11]


def open_ended(channel, url, options, table, name):
    """Write, and die with the transaction open."""
    coordinator = sqlsem.connect(url, **options, grace=0.5)
    connection = psycopg.connect(url)
    lock = coordinator.mutex(name)
    lock.acquire()
    lock.grant.assert_held(connection.cursor())
    connection.execute(f"INSERT INTO {table} VALUES (1)")
    channel.tell("wrote")
    channel.ask()


def test_a_writer_that_is_killed_leaves_nothing(spawn, database, connect, guarded, name):
    child = spawn(open_ended, table=guarded, name=name)
    child.expect("wrote")
    child.kill()
    lock = connect().mutex(name)
    assert lock.acquire(timeout=60)
    until(lambda: database.rows(f"SELECT count(*) FROM {guarded}") == [(0,)])
    with psycopg.connect(database.url) as connection, lock.grant.session(connection):
        connection.execute(f"INSERT INTO {guarded} VALUES (2)")
    lock.release()


@pytest.mark.skipif(program() is None, reason="PgBouncer is not installed (on Debian: apt-get install pgbouncer)")
def test_a_pooler_in_transaction_mode(postgres_server, database, connect, guarded, refusal, name):
    """Clients share sessions there, and so a session's assertions. An assertion for one transaction works."""
    pooler = Bouncer(postgres_server, "transaction")
    try:
        _write_through(pooler.before(database).url, connect, guarded, refusal, name)
    finally:
        pooler.close()


def _write_through(url, connect, guarded, refusal, name):
    with connect().mutex(name) as grant, psycopg.connect(url) as pooled:
        pooled.prepare_threshold = None
        with pytest.raises(sqlsem.ConfigurationError, match="a pooler is in between"), grant.session(pooled):
            raise AssertionError("entered")
        pooled.rollback()
        with pooled.transaction():
            grant.assert_held(pooled.cursor())
            pooled.execute(f"INSERT INTO {guarded} VALUES (1)")
        with refusal("which has asserted no"), pooled.transaction():
            pooled.execute(f"INSERT INTO {guarded} VALUES (1)")
