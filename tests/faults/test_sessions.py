"""Sessions that the database's administrator ends, and beacons that other programs release."""

import contextlib
import shutil
import time

import pytest
from support import AMPLE, remains, until
from support.databases import name_of_database


def terminate(database, condition, *parameters):
    """End sessions of PostgreSQL, and return their number."""
    rows = database.rows(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND {condition}",
        *parameters,
    )
    return len(rows)


def end_session(database, number):
    """End one session."""
    if database.engine == "mysql":
        database.server.end_session(number)
    else:
        assert terminate(database, "pid = ?", number) == 1


def end_waiting_sessions(database):
    """End the sessions that wait on the server, and return their number."""
    if database.engine == "mysql":
        sessions = database.server.waiting(name_of_database(database))
        for session in sessions:
            database.server.end_session(session.id)
        return len(sessions)
    return terminate(database, "application_name = 'sqlsem wait' AND state = 'active'")


def end_all_sessions(database):
    """End every session of sqlsem."""
    if database.engine == "mysql":
        database.server.end_sessions(database=name_of_database(database))
    else:
        terminate(database, "pid <> pg_backend_pid() AND application_name LIKE 'sqlsem%%' AND ?", True)


def main_session(database, agent):
    """Return the number of the session that holds an agent's beacon."""
    if database.engine == "mysql":
        with contextlib.closing(database.session()) as session:
            prefix = session.lock_prefix
        rows = database.rows(
            "SELECT IS_USED_LOCK(CONCAT(?, beacon)) FROM sqlsem_member WHERE pid = ?", prefix, agent.child.pid
        )
    else:
        rows = database.rows(f"SELECT backend_pid FROM {database.beside('member')} WHERE pid = ?", agent.child.pid)
    return rows[0][0] if rows else None


@pytest.mark.engines("postgresql", "mysql")
def test_holder_with_ended_session_reconnects(agents, database, name, queued):
    holder, waiter = agents(2, **AMPLE)
    (entry,) = queued(holder, waiter)
    position = database.queue(name)[0][0]
    for _ in range(3):
        session = main_session(database, holder)
        end_session(database, session)
        holder.check()
        assert main_session(database, holder) != session
    assert not holder.lost()
    assert not holder.told("lost")
    assert database.queue(name)[0][0] == position
    assert not entry.ready
    left_at = holder.release()["leaving"]
    assert entry.get()["got"] >= left_at
    waiter.release()
    assert database.queue(name) == []


@pytest.mark.engines("postgresql", "mysql")
def test_a_waiting_session_that_is_ended_waits_on(agents, database, name, queued):
    holder, waiter, last = agents(3, **AMPLE)
    entry, later = queued(holder, waiter, last)
    before = database.queue(name)
    for _ in range(3):
        until(
            lambda: end_waiting_sessions(database) == 2,
            "both wait in sessions of their own",
        )
    remains(lambda: not (entry.ready or later.ready), 0.5, "they wait on")
    assert database.queue(name) == before
    left_at = holder.release()["leaving"]
    answer = entry.get()
    assert answer["got"] >= left_at
    assert answer["position"] == before[1][0]
    assert not later.ready
    left_at = waiter.release()["leaving"]
    assert later.get()["got"] >= left_at
    last.release()
    assert database.queue(name) == []


@pytest.mark.engines("postgresql", "mysql")
def test_waiter_with_ended_session_keeps_its_position(agents, database, name, queued):
    holder, waiter = agents(2, grace=20)
    (entry,) = queued(holder, waiter)
    before = database.queue(name)
    session = main_session(database, waiter)
    end_session(database, session)
    until(lambda: main_session(database, waiter) != session, "it is back")
    assert database.queue(name) == before
    holder.release()
    assert entry.get()["position"] == before[1][0]
    waiter.check()
    waiter.release()


@pytest.mark.engines("postgresql", "mysql")
def test_without_grace_the_session_is_the_lock(agents, database, name):
    """The documented meaning of ``grace=0``."""
    (holder,) = agents(1, grace=0, retry=10)
    holder.hold("mutex", name)
    end_session(database, main_session(database, holder))
    assert holder.event("lost")["lost"]


@pytest.mark.engines("postgresql", "mysql")
def test_every_session_of_everybody_is_ended_again_and_again(agents, database, name, queued):
    holder, *waiters = agents(4, **AMPLE)
    entries = queued(holder, *waiters)
    before = database.queue(name)
    for _ in range(5):
        end_all_sessions(database)
        time.sleep(0.1)
    assert database.queue(name) == before
    agent, left_at = holder, 0.0
    for waiter, entry, row in zip(waiters, entries, before[1:], strict=True):
        left_at = agent.release()["leaving"]
        granted = entry.get()
        assert granted["got"] >= left_at
        assert granted["position"] == row[0]
        agent = waiter
    agent.release()
    assert database.queue(name) == []


@pytest.mark.engines("sqlite")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_beacon_that_is_cleaned_away_is_lit_again(agents, database, connect, name, waiting, what, queued):
    holder, waiter = agents(2, grace=2)
    (entry,) = queued(holder, waiter)
    position = database.queue(name)[0][0]
    folder = connect().engine.beacons.folder

    def beacons():
        return {row[0] for row in database.rows("SELECT beacon FROM sqlsem_member")}

    before = beacons()
    assert {path.name for path in folder.iterdir()} == before
    if what == "folder":
        shutil.rmtree(folder)
    else:
        for path in folder.iterdir():
            path.unlink()
    remains(lambda: not entry.ready, 3, "no request is granted")
    until(lambda: not beacons() & before, "both have new beacons")
    assert all((folder / beacon).exists() for beacon in beacons())
    holder.check()
    assert not holder.lost()
    assert database.queue(name)[0][0] == position
    holder.release()
    entry.get()
    # The new beacon works as the old one did: it goes with its process.
    again = holder.ask("mutex", name)
    waiting(name, 2)
    waiter.kill()
    again.get()
    holder.release()


def test_a_bare_row_of_the_dead_falls_to_stale_after(spawn, agents, connect, database, name, waiting):
    """A participant that only inserts and deletes its row has no beacon: its row stands until it is stale."""
    coordinator = connect()
    bare = spawn(take_a_bare_row, name=str(name))
    bare.expect("inserted")
    bare.kill()
    (waiter,) = agents(1, grace=1)
    entry = waiter.ask("mutex", name)
    waiting(name, 2)
    remains(lambda: not entry.ready, 1.5, "a bare row stays, unless stale_after is set")
    coordinator.admin.set_stale_after(str(name), 3600)
    remains(lambda: not entry.ready, 0.5, "it is not stale yet")
    coordinator.admin.set_stale_after(str(name), 1)
    entry.get()
    waiter.release()
    coordinator.admin.set_stale_after(str(name), None)
    assert database.queue(name) == []


def test_a_bare_row_that_was_not_committed_is_no_row(spawn, agents, database, name):
    bare = spawn(take_a_bare_row, name=str(name), commit=False)
    bare.expect("inserted")
    (waiter,) = agents(1, grace=1, retry=30)
    entry = waiter.ask("mutex", name)
    remains(lambda: not entry.ready, 0.5, "the gate is its own until its transaction ends")
    bare.kill()
    entry.get()
    waiter.release()
    assert database.queue(name) == []


def test_a_bare_participant_gets_past_a_dead_member(agents, connect, database, name):
    """A poll of an operator, or of any waiting member, finds the dead member."""
    (holder,) = agents(1, grace=0)
    holder.hold("mutex", name)
    connection = database.raw()
    cursor = connection.cursor()
    number = database.insert_bare(cursor, str(name), "bare", concurrency_limit=1)
    holder.kill()
    coordinator = connect()

    def alone():
        coordinator.admin.reap()
        return [row[0] for row in database.queue(name)] == [number]

    until(alone, "its row is the only one")
    cursor.execute(database.sql("DELETE FROM {table} WHERE queue_position = ? AND requesting_id = ?"), (number, "bare"))
    connection.close()
    assert database.queue(name) == []


def take_a_bare_row(channel, url, options, name, commit=True):
    import support

    engine = url.partition("://")[0] if "://" in url else "mssql"
    database = support.Database(engine, url, options)
    connection = database.raw(autocommit=False)
    cursor = connection.cursor()
    database.insert_bare(cursor, name, "bare", concurrency_limit=1)
    if commit:
        connection.commit()
    channel.tell("inserted")
    channel.ask()
