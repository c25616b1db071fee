"""Changes between the database's answer and the moment at which the caller has it, or repeats the call."""

import contextlib
import threading

import pytest
from support import PATIENCE, Attempt, until

import sqlsem
from sqlsem.engines.base import Busy
from sqlsem.values.errors import LockLost
from sqlsem.values.locks import Request, monotonic


def test_heartbeat_keeps_rows_of_pending_registrations(connect, name, monkeypatch):
    """The reply to a registration is lost and a heartbeat follows: the second call still finds the row."""
    coordinator = connect(retry=PATIENCE)
    with coordinator.mutex(name("before")):
        pass
    member = coordinator.client.member
    session = member.main.session
    register, positions = session.register, []

    def lose_the_first_reply(*arguments):
        if positions:
            member._compare(session, member.member_id)  # the comparison that a heartbeat makes
        (ticket,) = register(*arguments)
        positions.append(ticket.position)
        if len(positions) == 1:
            raise Busy("the reply is lost")
        return [ticket]

    monkeypatch.setattr(session, "register", lose_the_first_reply)
    with coordinator.mutex(name) as grant:
        assert positions == [grant.position] * 2


def lose_the_first_answer(monkeypatch, session, call, meanwhile):
    """Make ``call`` lose its first answer after ``meanwhile(answer)`` ran; return the list of answers."""
    real, answers = getattr(session, call), []

    def lose(*arguments):
        answers.append(real(*arguments))
        if len(answers) == 1:
            meanwhile(answers[0])
            raise Busy("the answer is lost")
        return answers[-1]

    monkeypatch.setattr(session, call, lose)
    return answers


def test_all_of_fails_if_a_row_is_revoked_before_retry(connect, name, monkeypatch):
    """The repeated call finds only one of the two rows, which must not count as holding both."""
    coordinator, operator = connect(retry=PATIENCE), connect()
    with coordinator.mutex(name("before")):
        pass
    session = coordinator.client.member.main.session
    replies = lose_the_first_answer(
        monkeypatch, session, "register", lambda tickets: operator.admin.revoke(tickets[0].position, force=True)
    )
    locks = [coordinator.mutex(name(letter)) for letter in "ab"]
    # (An engine that inserts row by row gives the second attempt a new number.)
    with contextlib.suppress(LockLost), coordinator.all_of(*locks) as grant:
        rows = {entry.resource: entry.position for letter in "ab" for entry in operator.admin.entries(name(letter))}
        assert grant.positions == rows
        assert len(rows) == 2
    assert len(replies) == 2
    until(lambda: not any(operator.admin.entries(name(letter)) for letter in "ab"))


@pytest.mark.parametrize("several", [False, True])
def test_revoked_row_is_not_granted_by_a_retry(database, name, several):
    """A row is revoked between a lost answer and the repeated call, which must not grant it."""
    requests = [Request(name("a")), Request(name("b"))] if several else [Request(name("a"))]
    with contextlib.closing(database.session(grace=60)) as session, contextlib.closing(database.session()) as operator:
        member = session.register_member("host", 1, "program")

        def register():
            return session.register(member, "somebody", "somebody", name("uid"), requests, False)

        granted = register()
        assert all(ticket.granted for ticket in granted)
        assert register() == granted
        assert operator.revoke(granted[0].position, False) > 0  # the row stays for the holder's grace
        first, *others = register()
        assert first.position == granted[0].position
        assert not first.granted
        assert all(ticket.granted for ticket in others)
        assert session.wait(first, 0, threading.Event()) is None


@pytest.mark.engines("sqlite", "postgresql", "mssql")
@pytest.mark.parametrize("patient", [False, True])
def test_revoked_priority_grant_is_not_found_by_retry(connect, name, patient, monkeypatch):
    """An operator revokes the row of a lost answer: a waiter gets LockLost, and a try fails."""
    operator, coordinator = connect(grace=60), connect(grace=60, retry=PATIENCE)
    operator.admin.set_priorities(name, 60)
    try:
        with coordinator.mutex(name("before")):
            pass

        def take_away(turn):
            assert turn.granted
            with contextlib.closing(coordinator.client.engine.connect("look")) as looks:
                assert looks.revoke(turn.ticket.position, False) > 0

        session = coordinator.client.member.main.session
        answers = lose_the_first_answer(monkeypatch, session, "acquire_by_priority", take_away)
        lock = coordinator.mutex(name, priority=1)
        if patient:
            with pytest.raises(LockLost):
                lock.acquire()
        else:
            assert not lock.acquire(blocking=False)
        assert len(answers) == 2
        assert answers[1].ticket is None
        coordinator.client.member.heartbeat()  # as the heartbeat loop does, three times in a grace
        until(lambda: not operator.admin.entries(name))
    finally:
        operator.admin.set_priorities(name, None)


def test_a_ping_proves_the_instant_at_which_it_began(connect, name, monkeypatch):
    """A late heartbeat answer proves only its start: other clients count from when the database received it."""
    coordinator = connect(lease=60)
    with coordinator.mutex(name):
        pass
    member = coordinator.client.member
    session = member.main.session
    ping, began = session.heartbeat, []

    def answer_late(member_id):
        began.append(monotonic())
        pulse = ping(member_id)
        until(lambda: monotonic() > began[-1])
        return pulse

    monkeypatch.setattr(session, "heartbeat", answer_late)
    member.heartbeat()
    assert began
    assert member._last_heartbeat <= began[-1]


def test_grant_of_a_row_removed_in_between_is_refused(connect, name, monkeypatch):
    """A row is revoked, and a heartbeat reports that, before the caller gets the grant: the grant is refused."""
    holder, coordinator = connect(), connect(retry=PATIENCE)
    with coordinator.mutex(name("before")):
        pass
    member = coordinator.client.member
    session_class = type(member.main.session)
    removed = threading.Event()

    def granted_and_gone(answer, position):
        if answer is True and not removed.is_set():
            assert holder.admin.revoke(position, force=True)
            member.heartbeat()
            removed.set()
        return answer

    wait, look = session_class.wait, session_class.poll

    def waiting(session, ticket, timeout, nudge):
        return granted_and_gone(wait(session, ticket, timeout, nudge), ticket.position)

    def looking(session, member_id, tickets):
        answers = look(session, member_id, tickets)
        return {position: granted_and_gone(answer, position) for position, answer in answers.items()}

    lock = holder.mutex(name)
    lock.acquire()
    monkeypatch.setattr(session_class, "wait", waiting)
    monkeypatch.setattr(session_class, "poll", looking)
    late = Attempt(coordinator.mutex(name))
    until(lambda: len(holder.admin.entries(name)) == 2)
    lock.release()
    with pytest.raises(sqlsem.LockLost):
        late.granted()
    assert removed.is_set()


def test_numbers_begin_anew_where_another_server_has_taken_over(make_database, postgres_server):
    """A promoted standby may lack the last numbers, and must not use any of them again."""
    database = make_database(postgres_server)
    with database.coordinator() as before, before.mutex("r") as grant:
        fence = grant.fence
    database.rows("UPDATE sqlsem.setting SET value = 'another server' WHERE name = 'origin'")
    with database.coordinator() as after, after.mutex("r") as grant:
        assert grant.fence >= fence + 1_000_000_000
