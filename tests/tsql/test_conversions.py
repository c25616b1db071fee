"""T-SQL sessions that read beside a Python process with a reader that upgrades."""

import threading

import pytest
from support import PATIENCE, until

import sqlsem

pytestmark = pytest.mark.engines("mssql")


@pytest.fixture
def member(new_session):
    """``member()`` returns a session that has registered as a program does, and makes a program's calls."""
    sessions = []

    def member():
        connection = new_session()
        ((connection.member,),) = connection.rows("EXEC {s}.register_member N'host', 1, N'program', 60000, @answer = 1")
        sessions.append(connection)
        return connection

    yield member
    for opened in sessions:
        opened.rows("EXEC {s}.deregister_member ?", opened.member)


def register(session, resource, access, attended_ms=None):
    text = "EXEC {s}.register ?, N'who', N'owner', NULL, 0, ?, ?, @answer = 1, @attended_ms = ?"
    ((position, granted),) = session.rows(text, session.member, resource, access, attended_ms)
    return position, bool(granted)


def begin_upgrade(session, resource, position, only_if_free=False):
    ((code,),) = session.rows(
        "EXEC {s}.begin_upgrade ?, ?, N'who', ?, @answer = 1", resource, position, int(only_if_free)
    )
    return code


def access(database, position):
    return database.rows("SELECT access_type FROM {table} WHERE queue_position = ?", position)[0][0]


def test_an_upgrade_waits_for_a_session(session, connect, database, name):
    reader, late = session(), session()
    answer = reader.acquire(name, access="read")
    assert answer.code == 0
    with connect().read(name) as grant:
        done = threading.Event()
        thread = threading.Thread(target=lambda: (grant.upgrade(timeout=PATIENCE), done.set()))
        thread.start()
        until(lambda: access(database, grant.position) == "upgrade")
        # No new holder: neither by acquire, nor by a try.
        assert late.acquire(name, access="read", timeout_ms=0).code == -1
        assert not done.is_set()
        reader.release(name, answer.position)
        assert done.wait(PATIENCE)
        thread.join()
        assert access(database, grant.position) == "write"
        assert late.acquire(name, access="read", timeout_ms=300).code == -1
        grant.downgrade()
        entered = late.acquire(name, access="read", timeout_ms=10000)
        assert entered.code in (0, 1)
        late.release(name, entered.position)


def test_an_upgrade_that_gives_up_lets_sessions_in(session, connect, database, name):
    reader = session()
    answer = reader.acquire(name, access="read")
    with connect().read(name) as grant:
        with pytest.raises(sqlsem.Timeout):
            grant.upgrade(timeout=0.5)
        assert access(database, grant.position) == "read"
        with connect().read(name, timeout=10):
            pass
    reader.release(name, answer.position)


def test_upgrade_waits_for_a_granted_session(session, connect, database, name):
    """A writer releases while a session sleeps behind it and becomes grantable: the upgrade waits for the session."""
    late, connection = session(), database.raw()
    with connect().read(name) as grant:
        writer = database.insert_bare(connection.cursor(), name, "bare", access_type="write", concurrency_limit=1)
        waiting = late.waiting(name, access="read", timeout_ms=60000)
        connection.execute(database.sql("DELETE FROM {table} WHERE queue_position = ?"), (writer,))
        with pytest.raises(sqlsem.Timeout):
            grant.upgrade(timeout=1)
        entered = waiting.result(PATIENCE)
        assert entered.code in (0, 1)
        late.release(name, entered.position)
        grant.upgrade(timeout=PATIENCE)
    connection.close()


def test_unattended_row_is_removed_before_upgrade(member, database, name):
    """Its session was stopped after the grant, and would hold the lock later on."""
    first, other = member(), member()
    position, _ = register(first, name, "read")
    writer, _ = register(other, name, "write")
    late, granted = register(other, name, "read", attended_ms=0)
    assert not granted
    ((code,),) = other.rows("EXEC {s}.release ?, ?, N'who', @answer = 1", name, writer)
    assert code == 0
    first.rows("SET ROWCOUNT 1")
    assert begin_upgrade(first, name, position) == 0
    first.rows("SET ROWCOUNT 0")
    assert [row[0] for row in database.queue(name)] == [position]
    outcome = f"SELECT outcome FROM {database.beside('history')} WHERE queue_position = ?"
    assert database.rows(outcome, late) == [("cancelled",)]


def test_grants_are_independent_of_set_options(member, database, name):
    first, other = member(), member()
    position, _ = register(first, name, "read")
    writer, _ = register(other, name, "write")
    late = [register(other, name, "read")[0] for _ in range(3)]
    other.rows("EXEC {s}.release ?, ?, N'who', @answer = 1", name, writer)
    first.rows("SET ROWCOUNT 1")
    assert begin_upgrade(first, name, position) == 1
    first.rows("SET ROWCOUNT 0")
    granted = f"SELECT queue_position FROM {database.beside('entry')} WHERE resource_id = ? AND granted_at IS NOT NULL"
    assert sorted(row[0] for row in database.rows(granted, name)) == [position, *late]


def test_a_try_leaves_no_upgrade_behind(member, database, name):
    """Not even after an interrupted earlier call."""
    first, other = member(), member()
    own_position, _ = register(first, name, "read")
    other_position, _ = register(other, name, "read")
    assert begin_upgrade(first, name, own_position) == 1
    assert access(database, own_position) == "upgrade"
    assert begin_upgrade(first, name, own_position, only_if_free=True) == -1
    assert access(database, own_position) == "read"
    assert begin_upgrade(first, name, own_position) == 1
    other.rows("EXEC {s}.release ?, ?, N'who', @answer = 1", name, other_position)
    assert begin_upgrade(first, name, own_position, only_if_free=True) == 0
    assert access(database, own_position) == "write"


def test_upgrade_label_cannot_be_requested(session, refused, name):
    with refused(50000, "upgrade"):
        session().acquire(name, access="upgrade")


def test_conversion_in_a_transaction_is_refused(session, refused, name):
    connection = session()
    connection.rows("BEGIN TRANSACTION")
    for routine in ("begin_upgrade", "upgrade", "downgrade"):
        with refused(50001, "open transaction"):
            connection.rows(f"EXEC {{s}}.{routine} N'x', 1, N'x'{', 0' if routine != 'downgrade' else ''}")
        connection.rows("IF @@TRANCOUNT = 0 BEGIN TRANSACTION")
    connection.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
