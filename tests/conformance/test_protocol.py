"""Below the coordinator: the engine's session, bare participants, leases, other members."""

import contextlib
import sqlite3
import threading
import time

import pymysql
import pytest
from support import Attempt, until

import sqlsem
from sqlsem.values.locks import Request, Ticket

GRACE = 0.5


def now(session, ticket):
    return session.wait(ticket, 0, threading.Event())


# -- repeated after a lost reply


def test_registering_again_finds_the_row(database, member, name):
    session, number = member()
    first = session.register(number, "me", "thread", f"{name}.1", [Request(name)], False)
    again = session.register(number, "me", "thread", f"{name}.1", [Request(name)], False)
    assert first == again
    assert len(database.queue(name)) == 1
    other = session.register(number, "me", "thread", f"{name}.2", [Request(name)], False)
    assert session.register(number, "me", "thread", f"{name}.2", [Request(name)], False) == other
    assert other[0].position > first[0].position
    assert not other[0].granted
    session.deregister_member(number)
    assert database.queue(name) == []


def test_registering_several_again_finds_the_rows(database, member, name):
    session, number = member()
    requests = [Request(name("b")), Request(name("a"), limit=3, weight=2)]
    first = session.register(number, "me", "thread", f"{name}.1", requests, False)
    again = session.register(number, "me", "thread", f"{name}.1", requests, False)
    assert sorted(first, key=lambda t: t.position) == sorted(again, key=lambda t: t.position)
    assert {ticket.resource for ticket in first} == {name("a"), name("b")}
    assert len(database.queue(name)) == 2
    session.deregister_member(number)


@pytest.mark.parametrize("several", [False, True])
def test_trying_again_finds_the_row(database, member, name, several):
    session, number = member()
    requests = [Request(name("a")), Request(name("b"))][: 1 + several]
    first = session.register(number, "me", "thread", f"{name}.1", requests, True)
    assert len(first) == len(requests)
    again = session.register(number, "me", "thread", f"{name}.1", requests, True)
    assert again is not None, "the answer was lost, the row is there: it must be found"
    assert {ticket.position for ticket in again} == {ticket.position for ticket in first}
    assert all(ticket.granted for ticket in again)
    session.deregister_member(number)


def test_releasing_again_is_harmless(database, member, name):
    session, number = member()
    (first,) = session.register(number, "me", "thread", f"{name}.1", [Request(name)], False)
    (second,) = session.register(number, "me", "thread", f"{name}.2", [Request(name)], False)
    assert session.release(first, "released") is True
    assert session.release(first, "released") is False
    assert session.release(first, "released") is False
    assert [row[0] for row in database.queue(name)] == [second.position]
    assert now(session, second) is True
    session.deregister_member(number)


def test_cancel_removes_the_rows_of_an_acquire(database, member, name):
    session, number = member()
    uid = f"{name}.1"
    session.register(number, "me", "thread", uid, [Request(name("a")), Request(name("b"))], False)
    session.register(number, "me", "thread", f"{uid}1", [Request(name("c"))], False)  # a uid with the same prefix
    assert session.cancel(number, uid, "cancelled") == 2
    assert session.cancel(number, uid, "cancelled") == 0
    assert [row[1] for row in database.queue(name)] == [name("c")]
    session.deregister_member(number)


def test_a_uid_with_marks_of_patterns(database, member, name):
    session, number = member()
    session.register(number, "me", "thread", f"{name}%_", [Request(name("a")), Request(name("b"))], False)
    session.register(number, "me", "thread", f"{name}xx", [Request(name("c")), Request(name("d"))], False)
    assert session.cancel(number, f"{name}%_", "cancelled") == 2
    assert len(database.queue(name)) == 2
    session.deregister_member(number)


# -- two members with the same id


def test_two_with_the_same_id_do_not_harm_each_other(database, member, name):
    (first_session, first), (other, second) = member(), member()
    (a,) = first_session.register(first, "same", "thread", f"{name}.1", [Request(name)], False)
    (b,) = other.register(second, "same", "thread", f"{name}.2", [Request(name)], False)
    assert first_session.release(a, "released")
    assert not first_session.release(a, "released")
    assert [row[0] for row in database.queue(name)] == [b.position]
    for session in (first_session, other):
        assert not session.release(Ticket(name, b.position, "another", False), "released")
    assert now(other, b) is True
    first_session.deregister_member(first)
    assert [row[0] for row in database.queue(name)] == [b.position]
    other.deregister_member(second)


@pytest.mark.parametrize("outcome", ["released", "revoked"])
def test_history_is_the_same_with_and_without_waiters(member, name, session, outcome):
    (holder, first), (other, second) = member(), member()

    def leave(number, others):
        request = Request(name, limit=7, weight=2, note="a note")
        (ticket,) = holder.register(first, "me", "thread", f"{name}.{number}", [request], False)
        late = [
            other.register(second, "o", "o", f"{name}.{number}.{at}", [Request(name)], False)[0] for at in range(others)
        ]
        if outcome == "revoked":
            session().revoke(ticket.position, False)
        assert holder.release(ticket, outcome)
        for behind in late:
            other.release(behind, "cancelled")
        (past,) = (hold for hold in session().history(name, 10) if hold.position == ticket.position)
        assert past.ended_at >= past.granted_at >= past.requested_at
        changing = {"position", "requested_at", "granted_at", "ended_at", "waited", "held"}
        return {key: value for key, value in past.as_dict().items() if key not in changing}

    alone = leave(1, 0)
    assert alone["outcome"] == outcome
    assert (alone["owner"], alone["host"], alone["limit"], alone["note"]) == ("thread", "host", 7, "a note")
    assert bool(alone["ended_by"]) == (outcome == "revoked")
    for number, others in enumerate((2, 1, 0), 2):
        assert leave(number, others) == alone
    holder.deregister_member(first)
    other.deregister_member(second)


def test_the_same_uid_of_two_members_is_not_shared(database, member, name):
    """A uid is private to its client: a call with another's uid never gets that client's row."""
    (session, first), (other, second) = member(), member()
    (a,) = session.register(first, "one", "thread", f"{name}.1", [Request(name)], False)
    try:
        tickets = other.register(second, "other", "thread", f"{name}.1", [Request(name)], False)
    except sqlsem.SqlsemError:
        tickets = None
    assert not tickets or tickets[0].position != a.position
    session.deregister_member(first)
    other.deregister_member(second)


# -- members


def test_a_ping_tells_our_rows(member, name, session):
    member_session, number = member()
    (a,) = member_session.register(number, "me", "thread", f"{name}.1", [Request(name)], False)
    (b,) = member_session.register(number, "me", "thread", f"{name}.2", [Request(name)], False)
    pulse = member_session.heartbeat(number)
    assert (pulse.known, pulse.positions, pulse.revoked) == (True, {a.position, b.position}, set())
    assert session().revoke(a.position, False) == 1
    assert member_session.heartbeat(number).revoked == {a.position}
    member_session.deregister_member(number)
    assert member_session.heartbeat(number).known is False


def test_a_member_that_leaves_frees_its_rows(member, name):
    (session, first), (other, second) = member(), member()
    session.register(first, "one", "thread", f"{name}.1", [Request(name)], False)
    (b,) = other.register(second, "other", "thread", f"{name}.2", [Request(name)], False)
    assert now(other, b) is False
    session.deregister_member(first)
    assert now(other, b) is True
    other.deregister_member(second)


def test_a_dead_member_is_removed_by_reap(database, member, name, session):
    member_session, number = member(grace=0.2)
    member_session.register(number, "one", "thread", f"{name}.1", [Request(name), Request(name("b"))], False)
    member_session.close()
    operator = session()
    until(lambda: operator.reap() >= 0 and database.queue(name) == [], "the rows of the dead removed")
    assert {past.outcome for past in operator.history(name, 10)} == {"reaped"}
    until(
        lambda: (
            operator.reap() >= 0
            and database.rows(f"SELECT 1 FROM {database.beside('member')} WHERE member_id = ?", number) == []
        )
    )


def test_a_member_that_returns_within_its_grace_keeps_its_rows(database, member, name, session):
    member_session, number = member(grace=3600)
    (ticket,) = member_session.register(number, "one", "thread", f"{name}.1", [Request(name)], False)
    member_session.close()
    operator = session()
    for _ in range(5):
        operator.reap()
    again = session(grace=3600)
    assert again.reattach_member(number) is True
    assert again.heartbeat(number).positions == {ticket.position}
    operator.reap()
    assert len(database.queue(name)) == 1
    assert again.release(ticket, "released")
    again.deregister_member(number)


def test_a_member_that_was_given_up_cannot_return(database, member, name, session):
    member_session, number = member(grace=0)
    member_session.register(number, "one", "thread", f"{name}.1", [Request(name)], False)
    member_session.close()
    operator = session()
    until(lambda: operator.reap() >= 0 and database.queue(name) == [])
    again = session()
    assert again.reattach_member(number) is False
    assert again.heartbeat(number).known is False


def test_the_living_are_left_alone(database, member, name, session):
    member_session, number = member(grace=0)
    (ticket,) = member_session.register(number, "one", "thread", f"{name}.1", [Request(name)], False)
    (other, second) = member(grace=0)
    (late,) = other.register(second, "other", "thread", f"{name}.2", [Request(name)], False)
    operator = session()
    for _ in range(30):  # the holder sends no heartbeat, but its open session proves that it lives
        operator.reap()
        assert other.wait(late, 0.02, threading.Event()) is False
    assert member_session.heartbeat(number).positions == {ticket.position}
    member_session.deregister_member(number)
    other.deregister_member(second)


def test_a_member_that_reaps_does_not_reap_itself(database, member, name):
    """A session's own locks do not exclude it, so it must not mistake its own beacon for free."""
    session, number = member(grace=0)
    (ticket,) = session.register(number, "one", "thread", f"{name}.1", [Request(name)], False)
    for _ in range(3):
        session.reap()  # (members that other tests left may end now)
        assert session.heartbeat(number).positions == {ticket.position}
    session.deregister_member(number)


# -- leases


def test_a_lease_is_renewed_while_its_owner_lives(connect, name):
    lease = 8.0  # longer than a machine under load stands still
    holder, other = connect(lease=lease), connect(lease=lease)
    with holder.mutex(name) as grant:
        late = Attempt(other.mutex(name))
        assert late.waits(1.5 * lease)
        grant.check()
    late.leave()


def test_a_lease_runs_out(database, member, connect, name):
    session, number = member(lease=1.0)
    before = time.monotonic()
    session.register(number, "one", "thread", f"{name}.1", [Request(name)], False)
    with connect().mutex(name, timeout=60):
        assert time.monotonic() - before > 0.9
    assert session.heartbeat(number).known is False


def test_a_lease_needs_no_session(database, member, session, name):
    member_session, number = member(lease=3600)
    (ticket,) = member_session.register(number, "one", "thread", f"{name}.1", [Request(name)], False)
    member_session.close()
    other = session(lease=3600)
    other.reap()
    assert other.heartbeat(number).positions == {ticket.position}
    assert other.release(ticket, "released")
    other.deregister_member(number)


def test_a_short_lease_is_refused(database):
    with pytest.raises(sqlsem.ConfigurationError, match="at least 1 second"):
        database.coordinator(lease=0.5)


# -- bare participants: the three statements


@pytest.fixture
def bare(database):
    connection = database.raw()
    yield connection.cursor()
    connection.close()


def ahead(database, cursor, resource, position):
    cursor.execute(
        database.sql("SELECT count(*) FROM {table} WHERE resource_id = ? AND queue_position < ?"), (resource, position)
    )
    return cursor.fetchone()[0]


def give_back(database, cursor, resource, position, requesting_id):
    cursor.execute(
        database.sql("DELETE FROM {table} WHERE resource_id = ? AND queue_position = ? AND requesting_id = ?"),
        (resource, position, requesting_id),
    )
    return cursor.rowcount


def test_a_bare_participant_takes_turns_with_a_member(connect, database, bare, name):
    coordinator = connect()
    with coordinator.mutex(name) as grant:
        position = database.insert_bare(bare, name, "bare")
        assert position > grant.position
        assert ahead(database, bare, name, position) == 1
        late = Attempt(coordinator.limit(name, 5))
        until(lambda: len(database.queue(name)) == 3)
    until(lambda: ahead(database, bare, name, position) == 0)
    give_back(database, bare, name, position, "bare")
    late.leave()


def test_a_member_waits_for_a_bare_row(connect, database, bare, name):
    position = database.insert_bare(bare, name, "bare", concurrency_limit=1)
    coordinator = connect()
    assert not coordinator.mutex(name).acquire(blocking=False)
    late = Attempt(coordinator.mutex(name))
    assert late.waits(0.3)
    assert give_back(database, bare, name, position, "someone else") == 0
    assert late.waits(0.05)
    assert give_back(database, bare, name, position, "bare") == 1
    late.leave()


def test_a_bare_row_is_seen(connect, database, bare, name):
    first = database.insert_bare(bare, name, "bare 1", concurrency_limit=1)
    second = database.insert_bare(bare, name, "bare 2", concurrency_limit=1)
    entries = connect().admin.entries(name)
    assert [(entry.position, entry.requesting_id, entry.member_id) for entry in entries] == [
        (first, "bare 1", None),
        (second, "bare 2", None),
    ]
    assert [entry.state for entry in entries] == ["holds", "waits"]
    for position, requester in ((first, "bare 1"), (second, "bare 2")):
        give_back(database, bare, name, position, requester)


def test_a_bare_row_cannot_cut_in(database, bare, name):
    """A bare row that chooses its own number is refused (SQLite, MySQL), or gets another number."""
    first = database.insert_bare(bare, name, "first")
    chosen = {"queue_position": first - 1, "granted_at": "2020-01-01 00:00:00"}
    if database.engine in ("sqlite", "mysql"):
        with pytest.raises((sqlite3.IntegrityError, pymysql.MySQLError), match="the table gives the number"):
            database.insert_bare(bare, name, "second", **{**chosen, "granted_at": 1577836800.0})
    else:
        second = database.insert_bare(bare, name, "second", **chosen)
        assert second > first
        assert database.rows("SELECT granted_at FROM {table} WHERE queue_position = ?", second) == [(None,)]
        give_back(database, bare, name, second, "second")
    assert [row[2] for row in database.queue(name)] == ["first"]
    give_back(database, bare, name, first, "first")


def test_a_bare_row_is_revoked_at_once(connect, database, bare, name):
    position = database.insert_bare(bare, name, "bare")
    assert connect().admin.revoke(position) is True
    assert database.queue(name) == []


def test_bare_readers_and_limits(connect, database, bare, name):
    coordinator = connect()
    other = connect()
    reader = database.insert_bare(bare, name, "bare", access_type="read")
    with coordinator.read(name, timeout=60):
        assert not other.write(name).acquire(blocking=False)
    give_back(database, bare, name, reader, "bare")
    position = database.insert_bare(bare, name, "bare", concurrency_limit=3, weight=2)
    with coordinator.limit(name, 3, timeout=60):
        assert not other.limit(name, 3).acquire(blocking=False)
    give_back(database, bare, name, position, "bare")


@pytest.mark.parametrize(
    "columns",
    [{"weight": 0}, {"concurrency_limit": 0}, {"concurrency_limit": 2, "weight": 3}, {"weight": -5}],
    ids=str,
)
def test_bad_bare_rows_are_refused(database, bare, name, columns):
    with pytest.raises(Exception, match=r"(?i)sqlsem|constraint|check"):
        database.insert_bare(bare, name, "bare", **columns)
    assert database.queue(name) == []


@pytest.mark.engines("postgresql", "mssql")
def test_a_bare_participant_cannot_choose_its_number(connect, database, bare, name):
    with connect().mutex(name) as grant:
        text = "INSERT INTO {table} (resource_id, requesting_id, queue_position) VALUES (?, 'bare', 0)"
        bare.execute(database.sql(text), (name,))
        (first, *_), (second, *_) = database.queue(name)
        assert (first, second > first) == (grant.position, True)
        give_back(database, bare, name, second, "bare")


@pytest.mark.engines("sqlite", "postgresql")
def test_several_bare_rows_in_a_single_statement(database, bare, name):
    bare.execute(
        database.sql("INSERT INTO {table} (resource_id, requesting_id) VALUES (?, 'a'), (?, 'b'), (?, 'c')"),
        (name, name, name),
    )
    rows = database.queue(name)
    assert [row[2] for row in rows] == ["a", "b", "c"]
    for position, _, requester in rows:
        give_back(database, bare, name, position, requester)


@pytest.mark.engines("postgresql")
def test_the_routines_refuse_an_open_transaction(database, session, member, name):
    member_session, number = member()
    register = "SELECT sqlsem.register(%s, 'me', 'me', %s, false, %s, 'write', 1, 1, NULL)"
    with contextlib.closing(database.raw(autocommit=False)) as connection:
        cursor = connection.cursor()
        cursor.execute("CREATE TEMPORARY TABLE something (x int)")
        with pytest.raises(Exception, match="must not be called inside an open transaction"):
            cursor.execute(register, (number, str(name), str(name)))
        connection.rollback()
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with pytest.raises(Exception, match="READ COMMITTED"):
            cursor.execute(register, (number, str(name), str(name)))
        connection.rollback()
    assert database.queue(name) == []
    member_session.deregister_member(number)
