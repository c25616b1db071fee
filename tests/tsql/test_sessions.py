"""A holder lives as long as its session; a waiter's row goes when no client renews its lease any more."""

import time

import pytest
from support import until

pytestmark = pytest.mark.engines("mssql")


def members(database, spid):
    return database.rows(f"SELECT member_id FROM {database.beside('member')} WHERE session_id = ?", spid)


def test_session_names_itself(session, connect, name):
    connection = session()
    connection.acquire(name, note="by hand")
    (entry,) = connect().admin.entries(name)
    ((host, program, login),) = connection.rows("SELECT HOST_NAME(), APP_NAME(), ORIGINAL_LOGIN()")
    assert (entry.host, entry.program or "", entry.owner, entry.note) == (host, program, login, "by hand")
    (row,) = connection.rows("EXEC {s}.status ?", name)
    assert (row[0], row[1], row[2], row[6]) == (name, entry.position, "holds", entry.requesting_id)
    connection.release(name)
    assert connection.rows("EXEC {s}.status ?", name) == []


@pytest.mark.parametrize("look", ["reap", "try", "wait"])
def test_a_client_that_stops_waiting_leaves_no_row(session, new_session, database, name, look):
    import pyodbc

    holder, impatient, connection = session(), new_session(), session()
    impatient.acquire(name("warm"))
    impatient.release(name("warm"))
    assert holder.acquire(name).code == 0
    impatient.connection.timeout = 1
    with pytest.raises(pyodbc.Error):
        impatient.acquire(name, timeout_ms=60000)
    assert len(database.queue(name)) == 2
    holder.release(name)
    began = time.monotonic()
    if look == "reap":
        until(lambda: holder.call("reap") >= 0 and not database.queue(name), "the row going", 20)
    elif look == "try":
        until(lambda: connection.acquire(name, routine="try").code == 0, "the row going", 20)
        connection.release(name)
    else:
        assert connection.acquire(name, timeout_ms=60000).code == 1
        connection.release(name)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("words", [{}, {"limit": 2}, {"access": "read"}])
def test_row_of_a_cancelled_call_is_removed(session, database, name, words):
    """A command timeout leaves the session, its beacon, and the lock of a row without a waiting client."""
    holder, connection, broken_off = session(), session(), session()
    assert holder.acquire(name, **{**words, "access": "write"}, weight=words.get("limit", 1)).code == 0
    broken_off.acquire(name("x"))
    ((member,),) = broken_off.rows(f"SELECT member_id FROM {database.beside('entry')} WHERE resource_id = ?", name("x"))
    broken_off.rows("EXEC {s}.register ?, N'me', NULL, ?, 0, ?, @attended_ms = 1500", member, f"uid {name}", name)
    waiting = connection.waiting(name, timeout_ms=60000, **words)
    assert len(database.queue(name)) == 4  # with the one on x
    holder.release(name)
    began = time.monotonic()
    assert waiting.result(30).code == 1
    assert time.monotonic() - began < 15
    assert len(database.queue(name)) == 2
    connection.release(name)
    broken_off.release(name("x"))


def test_attended_waiter_keeps_its_position(session, database, name):
    holder, connection = session(), session()
    holder.acquire(name)
    waiting = connection.waiting(name, timeout_ms=60000)
    place = database.queue(name)[-1][0]
    deadline = time.monotonic() + 11  # more than one slice and the five seconds after it
    while time.monotonic() < deadline:
        holder.call("reap")
        assert [row[0] for row in database.queue(name)][-1] == place
        time.sleep(0.5)
    holder.release(name)
    assert waiting.result(30) == (1, place, place)
    connection.release(name)


def test_dropped_waiter_registers_anew(session, database, connect, name):
    """After a pause of the whole server process, the row is gone, and acquire takes a new number."""
    holder, connection = session(), session()
    holder.acquire(name)
    waiting = connection.waiting(name, timeout_ms=60000)
    place = database.queue(name)[-1][0]
    database.rows(
        f"DELETE FROM {database.beside('entry')} OUTPUT deleted.resource_id, deleted.queue_position, "
        f"deleted.requesting_id, deleted.access_type, deleted.weight, deleted.requested_at, 'cancelled' "
        f"INTO {database.beside('history')} (resource_id, queue_position, requesting_id, access_type, weight, "
        f"requested_at, outcome) WHERE queue_position = ?",
        place,
    )
    until(lambda: len(database.queue(name)) == 2, "the new row")
    holder.release(name)
    answer = waiting.result(30)
    assert answer.code == 1
    assert answer.position > place
    connection.release(name)


def test_a_member_that_was_removed_is_made_again(session, database, connect, name):
    connection = session()
    connection.acquire(name)
    before = connect().admin.entries(name)[0].member_id
    connection.release(name)
    database.rows(f"DELETE FROM {database.beside('member')} WHERE member_id = ?", before)
    assert connection.acquire(name).code == 0
    assert connect().admin.entries(name)[0].member_id != before
    connection.release(name)


def test_members_of_sessions_that_are_gone_do_not_pile_up(session, database, name):
    """The server reuses session numbers: a new session with an old one's number removes the old one's rows."""
    connection = session()
    database.rows(f"DELETE FROM {database.beside('member')} WHERE session_id = ?", connection.pid)
    database.rows(
        f"INSERT INTO {database.beside('member')} (beacon, session_id, grace_ms) VALUES (2000000000, ?, 0)",
        connection.pid,
    )
    ((old,),) = members(database, connection.pid)
    database.rows(
        "INSERT INTO {entry} (resource_id, requesting_id, access_type, weight, member_id, request_uid, requested_at, "
        "granted_at) VALUES (?, 'old', 'write', 1, ?, ?, SYSUTCDATETIME(), SYSUTCDATETIME())".replace(
            "{entry}", database.beside("entry")
        ),
        name,
        old,
        name,
    )
    assert connection.acquire(name, timeout_ms=0).code == 0
    ((now,),) = members(database, connection.pid)
    assert now != old
    connection.release(name)
