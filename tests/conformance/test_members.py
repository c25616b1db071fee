"""The session that acts for a member, the rows of an expired member, and rows without a client."""

import contextlib
import threading
import time

import pytest
from support import Attempt, slack, until

import sqlsem
from sqlsem.engines.base import Busy
from sqlsem.tasks import Json
from sqlsem.values.errors import ConfigurationError, Unavailable
from sqlsem.values.locks import Request, Ticket


def look(session, ticket):
    return session.wait(ticket, 0, threading.Event())


@pytest.mark.locks
def test_deferred_calls_run_once_in_order(connect, name):
    """A deferred call that fails does not block the others; one that cannot run yet is retried before them."""
    coordinator = connect()
    with coordinator.mutex(name):
        pass
    member = coordinator.client.member
    done = []

    def fails(session, number):
        done.append("fails")
        raise ZeroDivisionError

    def is_late(session, number):
        done.append("is late")
        if done.count("is late") == 1:
            raise Busy("not yet")

    for call in (fails, is_late, lambda session, number: done.append(number)):
        member.defer(call)
    until(lambda: not member.deferred_calls, "the end of it")
    assert done == ["fails", "is late", "is late", member.member_id]


# -- removed members


def give_up(database, coordinator):
    number = coordinator.client.member.member_id
    database.rows(f"DELETE FROM {database.beside('member')} WHERE member_id = ?", number)
    return number


def members(database):
    return [row[0] for row in database.rows(f"SELECT member_id FROM {database.beside('member')}")]


def with_priority(coordinator, name):
    coordinator.admin.set_priorities(name("ranked"), "5s")
    with coordinator.limit(name("ranked"), 1, priority=3):
        pass


def handed_over(coordinator, name):
    lock = coordinator.mutex(name("travels"))
    lock.acquire()
    with coordinator.adopt(lock.grant.hand_over()):
        pass


def rated(coordinator, name):
    for _ in range(2):
        with coordinator.rate(name("rated"), 1, per="0.2s"):
            pass


def worked(coordinator, name):
    queue = coordinator.queue(name("work"))
    queue.put(Json("plain"))
    queue.put(Json("blocked"), locks=[coordinator.mutex(name("blocked"))])
    tasks = queue.claim(wait=30)
    for _ in range(2):
        with next(tasks):
            pass
    tasks.close()


def converted(coordinator, name):
    with coordinator.read(name("read")) as grant:
        grant.upgrade()


def grouped(coordinator, name):
    with coordinator.all_of(coordinator.mutex(name("one")), coordinator.limit(name("two"), 2)):
        pass


@pytest.mark.engines("sqlite", "postgresql")
@pytest.mark.parametrize("asks", [with_priority, handed_over, rated, worked, converted, grouped])
def test_queued_registration_is_not_yet_pending(connect, name, monkeypatch, asks):
    """A registration counts as pending from its sending on, not while it queues for the main connection.

    A pending registration keeps heartbeats from removing orphan rows, and in a busy process a thread always queues.
    """
    coordinator = connect()
    member = coordinator.client.member
    calls = []

    def noting(method):
        def noted(call_name, call, *arguments, **options):
            calls.append((call_name, dict(member._pending_registrations)))
            return method(call_name, call, *arguments, **options)

        return noted

    monkeypatch.setattr(member.main, "call", noting(member.main.call))
    asks(coordinator, name)
    assert len(calls) > 1
    assert [call_name for call_name, limbo in calls if limbo] == []


def test_expired_member_acquires_as_a_new_member(connect, database, name):
    coordinator = connect(lease=30)
    with coordinator.mutex(name):
        pass
    before = give_up(database, coordinator)
    with coordinator.mutex(name) as grant:
        (entry,) = coordinator.admin.entries(name)
        assert entry.member_id != before
        assert entry.member_id in members(database)
        grant.check()


def test_expired_member_loses_grants_at_next_request(connect, database, name):
    coordinator = connect(lease=30)
    lost = []
    lock = coordinator.mutex(name("held"), on_lost=lost.append)
    lock.acquire()
    give_up(database, coordinator)
    with coordinator.mutex(name("other")):
        assert lost == [lock.grant]
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    assert connect().admin.reap() >= 0  # removes the remaining row


def test_expired_member_recovers_at_a_heartbeat(connect, database, name):
    coordinator = connect(lease=30)
    lock = coordinator.mutex(name)
    lock.acquire()
    before = give_up(database, coordinator)
    with pytest.raises(sqlsem.LockLost):
        lock.grant.check()
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    with coordinator.mutex(name, timeout=60) as grant:
        assert coordinator.admin.entries(name)[-1].member_id not in (before, None)
        grant.check()


@pytest.mark.parametrize("several", [False, True])
def test_a_member_that_is_not_there_gets_no_row(database, member, name, several):
    session, number = member()
    requests = [Request(name("a")), Request(name("b"))] if several else [Request(name)]
    with pytest.raises(Unavailable):
        session.register(number + 1000, "me", "thread", f"{name}.1", requests, False)
    assert database.queue(name) == []
    assert not session.usable


# -- another login


@pytest.fixture
def stranger(database):
    """A connection of another login that may use sqlsem."""
    connection = database.raw()
    role = f"{database.schema}_stranger"
    if not connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).fetchone():
        connection.execute(f"CREATE ROLE {role} LOGIN")
    connection.execute(f"GRANT {database.schema}_user TO {role}")
    connection.execute(f"SET SESSION AUTHORIZATION {role}")
    yield connection
    connection.close()


@pytest.mark.engines("postgresql")
def test_another_login_cannot_act_for_a_member(database, member, stranger, name):
    import psycopg

    session, number = member()
    (ticket,) = session.register(number, "me", "thread", f"{name}.1", [Request(name)], False)

    def call(text, *parameters):
        return stranger.execute(f"SELECT * FROM {database.schema}.{text}", parameters).fetchone()

    assert call("release(%s::varchar, %s, %s::varchar)", name, ticket.position, "me") == (-1,)
    assert call("cancel(%s, %s::varchar, 'cancelled')", number, f"{name}.1") == (0,)
    assert call("heartbeat(%s)", number) == (False, None, None)
    assert call("reattach_member(%s)", number) == (False,)
    call("deregister_member(%s)", number)
    for routine, arguments in (
        ("register", "%s, 'me', 'x', 'x', false, %s::varchar, 'write', 1, 1, NULL"),
        (
            "register_all",
            """%s, 'me', 'x', 'x', false, jsonb_build_array(jsonb_build_object('resource', %s::text,
                            'access', 'write', 'limit', 1, 'weight', 1))""",
        ),
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="another login"):
            call(f"{routine}({arguments})", number, name)
    # The client reports the other login, too, and does not suggest a grant of rights, which would not help.
    session.connection.execute(f"SET SESSION AUTHORIZATION {database.schema}_stranger")
    with pytest.raises(ConfigurationError, match=r"another login .*registered"):
        session.register(number, "me", "thread", f"{name}.2", [Request(name)], False)
    session.connection.execute("RESET SESSION AUTHORIZATION")
    assert session.heartbeat(number).positions == {ticket.position}
    assert len(database.queue(name)) == 1
    assert session.release(ticket, "released")


@pytest.mark.engines("postgresql")
def test_a_bare_row_is_not_released_by_the_routine(database, member, name):
    session, _ = member()
    connection = database.raw()
    position = database.insert_bare(connection.cursor(), name, "bare")
    connection.close()
    assert not session.release(Ticket(name, position, "bare", True), "released")
    assert len(database.queue(name)) == 1
    assert session.revoke(position, False) == 0


# -- rows without a client


def attend(database, ticket, seconds):
    database.rows(
        "UPDATE {table} SET waiter_lease_until = clock_timestamp() + ? * interval '1 second' WHERE queue_position = ?",
        seconds,
        ticket.position,
    )


@pytest.mark.engines("postgresql")
@pytest.mark.parametrize("access", ["write", "limit", "read"])
def test_unattended_waiting_row_is_removed(database, member, connect, name, access):
    session, number = member()  # the member lives on, and keeps the wakeup locks
    holder = connect().mutex(name)
    holder.acquire()
    request = {"write": Request(name), "limit": Request(name, limit=2), "read": Request(name, access="read")}[access]
    (ticket,) = session.register(number, "me", "thread", f"{name}.1", [request], False)
    attend(database, ticket, -1)
    late = Attempt(connect().mutex(name, timeout=60))
    holder.release()
    late.leave()
    assert look(session, ticket) is None
    assert (ticket.position, "cancelled") in [(past.position, past.outcome) for past in connect().admin.history(name)]
    session.deregister_member(number)


@pytest.mark.engines("postgresql")
def test_a_row_goes_although_its_own_member_finds_it(database, member, name):
    session, number = member()
    (first,) = session.register(number, "me", "thread", f"{name}.1", [Request(name)], False)
    (second,) = session.register(number, "me", "thread", f"{name}.2", [Request(name)], False)
    (third,) = session.register(number, "me", "thread", f"{name}.3", [Request(name)], False)
    attend(database, second, -1)
    assert look(session, third) is False
    assert [row[0] for row in database.queue(name)] == [first.position, third.position]
    session.deregister_member(number)


@pytest.mark.engines("postgresql")
def test_attended_or_granted_row_stays(database, member, name):
    session, number = member()
    (first,) = session.register(number, "me", "thread", f"{name}.1", [Request(name)], False)
    (second,) = session.register(number, "me", "thread", f"{name}.2", [Request(name)], False)
    other, _ = member()
    attend(database, second, 3600)
    other.reap()
    assert [row[0] for row in database.queue(name)] == [first.position, second.position]
    attend(database, second, -1)
    other.reap()
    assert [row[0] for row in database.queue(name)] == [first.position]
    session.deregister_member(number)


# -- prepared statements


def prepared(session):
    rows = session.connection.execute("SELECT name FROM pg_prepared_statements").fetchall()
    return sorted(row[0].rstrip("0123456789") for row in rows)


@pytest.mark.engines("postgresql")
@pytest.mark.parametrize(
    ("lease", "expected"), [(None, ["sqlsem_register_", "sqlsem_release_", "sqlsem_wait_"]), (30.0, [])]
)
def test_nothing_is_prepared_where_a_pooler_may_stand(member, name, lease, expected):
    session, number = member(lease=lease)
    for round in range(8):
        (ticket,) = session.register(number, "me", "thread", f"{name}.{round}", [Request(name)], False)
        assert ticket.granted
        assert look(session, ticket) is True
        assert session.release(ticket, "released")
        assert not session.release(ticket, "released")
    assert prepared(session) == expected
    session.deregister_member(number)


@pytest.mark.engines("postgresql")
def test_prepared_statements_that_are_gone_point_at_the_pooler(member, name):
    session, number = member()
    (ticket,) = session.register(number, "me", "thread", f"{name}.1", [Request(name)], False)
    session.release(ticket, "released")
    session.connection.execute("DEALLOCATE ALL")
    with pytest.raises(ConfigurationError, match="pooler"):
        session.release(ticket, "released")
    session.deregister_member(number)


@pytest.mark.engines("postgresql")
@pytest.mark.parametrize("lease", [None, 30.0])
def test_text_that_ends_early_is_refused(database, member, name, lease):
    session, number = member(lease=lease)
    with pytest.raises(Unavailable, match="NUL"):
        session.register(number, "me", "thread\0x", f"{name}.1", [Request(name)], False)
    assert session.usable
    assert database.queue(name) == []
    session.deregister_member(number)


@pytest.mark.engines("postgresql")
def test_values_come_back_as_they_were_given(connect, member, name):
    session, number = member()
    note = "naïve 'quotes' \" \\ % %s $1 {} 日本語 🔒"
    (ticket,) = session.register(number, "me ü", "thread ✓", f"{name}.1", [Request(name, note=note)], False)
    (entry,) = connect().admin.entries(name)
    assert (entry.note, entry.owner, entry.requesting_id, entry.limit) == (note, "thread ✓", "me ü", 1)
    assert session.release(ticket, "released")
    connect().admin.set_limit(name, 3)  # for requests without a limit
    (ticket,) = session.register(number, "me", "thread", f"{name}.2", [Request(name, limit=None)], False)
    (entry,) = connect().admin.entries(name)
    assert (entry.note, entry.limit) == (None, None)
    assert session.release(ticket, "released")
    session.deregister_member(number)


# -- polling without notifications


@pytest.mark.engines("sqlite")
def test_distant_waiter_polls_rarely_and_in_time(database, member, name, threads):
    holder, number = member()
    tickets = [
        holder.register(number, "me", "thread", f"{name}.{place}", [Request(name)], False)[0] for place in range(30)
    ]

    def longest_pause(session, ticket):
        """Return the longest pause between two polls in the last of four slices of a second."""
        sleep = session.sleeper.wait
        for _ in range(4):
            pauses = []

            def noted(seconds, nudge, pauses=pauses):
                pauses.append(seconds)
                return sleep(seconds, nudge)

            session.sleeper.wait = noted
            assert session.wait(ticket, 1.0, threading.Event()) is False
        session.sleeper.wait = sleep
        return max(pauses)

    near, far = database.session(), database.session()
    assert longest_pause(far, tickets[29]) > 3 * longest_pause(near, tickets[1])
    answers = []
    threads.start(lambda: answers.append(far.wait(tickets[29], 60.0, threading.Event())))
    for ticket in tickets[:29]:
        holder.release(ticket, "released")
    left_at = time.monotonic()
    threads.join()
    assert answers == [True]
    assert time.monotonic() - left_at < slack(5)  # half a second on a quiet machine
    holder.deregister_member(number)
    near.close()
    far.close()


def test_a_ping_ends_being_missed(database, name):
    """A heartbeat ends the state missing: a later grace counts from the time when the member goes missing again."""
    with contextlib.closing(database.session(grace=60)) as session:
        number = session.register_member("host", 1, "test")
        members = database.beside("member")
        database.rows(f"UPDATE {members} SET missing_since = {database.now} WHERE member_id = ?", number)
        assert session.heartbeat(number).known
        assert database.rows(f"SELECT missing_since FROM {members} WHERE member_id = ?", number) == [(None,)]
        session.deregister_member(number)


@pytest.mark.engines("postgresql", "mssql")
def test_missing_member_keeps_its_rows_for_the_grace(database, name):
    """A member whose session ended keeps its rows for the grace, and may reattach as the same member."""
    session, other = database.session(grace=600), database.session(grace=5)
    try:
        number = session.register_member("host", 1, "test")
        (ticket,) = session.register(number, "me", "o", f"{name}.1", [Request(name)], False)
        session.close()
        member = other.register_member("host", 2, "test")
        missed = f"SELECT 1 FROM {database.beside('member')} WHERE member_id = ? AND missing_since IS NOT NULL"

        def is_missed():
            assert other.register(member, "other", "o", f"{name}.2", [Request(name)], True) is None
            return bool(database.rows(missed, number))

        until(is_missed, "the server has noticed the end of the session, and a client has polled")
        assert other.reattach_member(number)
        assert other.heartbeat(number).positions == {ticket.position}
        assert other.release(ticket, "released")
        other.deregister_member(number)
        other.deregister_member(member)
    finally:
        other.close()
