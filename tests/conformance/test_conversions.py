"""Readers that become the writer, and writers that become readers: sessions first, then grants of both APIs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time

import pytest
from support import PATIENCE, Attempt, pinned, promptly, slack, until

import sqlsem
from sqlsem.client import effects
from sqlsem.engines.base import Disconnected
from sqlsem.values.locks import Request, Ticket, Upgrading

READ, WRITE = "read", "write"
both = pytest.mark.faces("sync", "aio")
#: Seconds in which a notified waiter goes on; a waiter without a notification polls only after some seconds of sleep.
WOKEN = 1.5


class Later:
    """A call that waits in the database, in its own thread."""

    def __init__(self, call):
        self.result, self.error, self.ended = None, None, None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call):
        try:
            self.result = call()
        except BaseException as exc:
            self.error = exc
        self.ended = time.monotonic()

    def get(self, timeout=PATIENCE):
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "it still waits"
        if self.error is not None:
            raise self.error
        return self.result

    @property
    def waits(self):
        return self._thread.is_alive()


class Member:
    """A member with a main session and wait sessions, like those of a coordinator."""

    _numbers = itertools.count(1)

    def __init__(self, database, resource, **options):
        self.database, self.resource = database, resource
        self.engine = database.make_engine(**options)
        self.main = self.engine.connect("main")
        self.number = self.main.register_member("host", 1, "test")
        self.sessions = []
        self.gone = False

    def _waiting(self):
        self.sessions.append(self.engine.connect("wait"))
        return self.sessions[-1]

    def ask(self, access, limit=1, weight=1, only_if_free=False, resource=None):
        number = next(self._numbers)
        request = Request(resource or self.resource, access, limit, weight)
        tickets = self.main.register(
            self.number, f"id-{number}", f"thread-{number}", f"{self.resource}.{number}", [request], only_if_free
        )
        return tickets[0] if tickets else None

    def read(self):
        ticket = self.ask(READ)
        assert ticket.granted
        return ticket

    def enters(self, ticket, timeout=0.0):
        return self.main.wait(ticket, timeout, threading.Event())

    def wait(self, ticket, timeout=PATIENCE):
        session = self._waiting()
        return Later(lambda: self._slices(lambda seconds: session.wait(ticket, seconds, threading.Event()), timeout))

    @staticmethod
    def _slices(call, timeout):
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            answer = call(max(0.0, min(remaining, 4.0)))
            if answer is not False or remaining <= 0:
                return answer

    def begin(self, ticket, only_if_free=False):
        """Begin an upgrade: True if it is granted, False if it must wait, None if the row is gone."""
        done = self.main.begin_upgrade(ticket, only_if_free)
        return {Upgrading.DONE: True, Upgrading.GONE: None}.get(done, False)

    def upgrade(self, ticket, timeout=PATIENCE):
        """Begin an upgrade on the main session and wait on another one, as a coordinator does."""
        begun = self.main.begin_upgrade(ticket, False)
        session = self._waiting()

        def wait():
            if begun is Upgrading.NOT_YET:
                until(lambda: session.begin_upgrade(ticket, False) is not Upgrading.NOT_YET)
            return self._slices(lambda seconds: session.upgrade(ticket, seconds, threading.Event()), timeout)

        return Later(wait)

    def downgrade(self, ticket):
        return self.main.downgrade(ticket)

    def release(self, ticket):
        return self.main.release(ticket, "released")

    def entry(self, ticket):
        return next((row for row in self.main.entries(ticket.resource) if row.position == ticket.position), None)

    def state(self, ticket):
        entry = self.entry(ticket)
        return entry and (entry.access, entry.state)

    def outcomes(self, ticket):
        """Return (access, outcome) of each history entry of a row, oldest first."""
        rows = self.main.history(ticket.resource, 100)
        return [(row.access, row.outcome) for row in reversed(rows) if row.position == ticket.position]

    def die(self):
        """End all sessions without deregistering the member."""
        self.gone = True
        for session in [self.main, *self.sessions]:
            session.close()

    def end(self):
        if not self.gone:
            self.main.deregister_member(self.number)
            self.die()


@pytest.fixture
def member(database, name):
    members = []

    def member(**options):
        members.append(Member(database, name, **options))
        return members[-1]

    yield member
    for participant in members:
        participant.end()
    operator = database.session()
    until(lambda: operator.reap() >= 0 and database.queue(name) == [], "the queue empty")
    operator.close()


@pytest.fixture
def readers(member):
    """Return two members that read, each with its ticket."""
    first, other = member(), member()
    return first, first.read(), other, other.read()


# -- upgrade


def test_a_lone_reader_becomes_the_writer_at_once(member):
    first, other = member(), member()
    ticket = first.read()
    assert first.begin(ticket) is True
    assert first.state(ticket) == (WRITE, "holds")
    late = other.ask(READ)
    assert not late.granted
    assert other.enters(late) is False
    assert first.release(ticket)
    assert other.enters(late) is True
    assert first.outcomes(ticket) == [(READ, "upgraded"), (WRITE, "released")]


@pytest.mark.parametrize("first", [True, False], ids=["the reader ahead", "the reader behind"])
def test_an_upgrade_waits_for_every_other_reader(member, first):
    upgrader, other = member(), member()

    def woken_after():
        tickets = (
            {True: upgrader.read(), False: other.read()} if first else {False: other.read(), True: upgrader.read()}
        )
        waiting = upgrader.upgrade(tickets[True])
        assert upgrader.state(tickets[True]) == ("upgrade", "holds")
        time.sleep(0.2)
        assert waiting.waits
        left_at = time.monotonic()
        assert other.release(tickets[False])
        assert waiting.get() is True
        assert upgrader.state(tickets[True]) == (WRITE, "holds")
        upgrader.release(tickets[True])
        return waiting.ended - left_at

    promptly(woken_after, WOKEN, "it was not woken")


def test_an_upgrade_waits_for_its_own_members_other_readers(member):
    upgrader = member()
    ticket, sibling = upgrader.read(), upgrader.read()
    waiting = upgrader.upgrade(ticket)
    time.sleep(0.2)
    assert waiting.waits
    upgrader.release(sibling)
    assert waiting.get() is True


def test_upgrade_keeps_new_readers_out(readers):
    first, own_ticket, other, other_ticket = readers
    waiting = first.upgrade(own_ticket)
    late, later = other.ask(READ), other.ask(WRITE)
    assert not late.granted
    assert other.ask(READ, only_if_free=True) is None
    assert other.enters(late) is False
    other.release(other_ticket)
    assert waiting.get() is True
    assert other.enters(late) is False
    first.release(own_ticket)
    assert other.enters(later) is False
    assert other.enters(late) is True
    other.release(late)
    assert other.enters(later) is True


def test_a_waiting_writer_stays_behind(member):
    first, other, third = member(), member(), member()
    own_ticket, other_ticket = first.read(), other.read()
    writer = third.ask(WRITE)
    waiting = first.upgrade(own_ticket)
    other.release(other_ticket)
    assert waiting.get() is True
    assert third.enters(writer) is False
    assert first.downgrade(own_ticket)
    assert third.enters(writer) is False, "a reader is ahead of it"
    first.release(own_ticket)
    assert third.enters(writer) is True


def test_the_second_upgrader_gets_deadlock_at_once(readers):
    first, own_ticket, other, other_ticket = readers
    waiting = first.upgrade(own_ticket)
    began = time.monotonic()
    with pytest.raises(sqlsem.Deadlock) as caught:
        other.begin(other_ticket)
    with pytest.raises(sqlsem.Deadlock):
        other.begin(other_ticket, only_if_free=True)
    assert time.monotonic() - began < slack(5)
    assert str(own_ticket.position) in str(caught.value)
    assert str(other_ticket.position) in str(caught.value)
    assert caught.value.resource == own_ticket.resource
    assert other.state(other_ticket) == (READ, "holds")
    assert waiting.waits
    other.release(other_ticket)
    assert waiting.get() is True


def test_an_upgrade_that_gives_up_is_a_reader_again(readers):
    first, own_ticket, other, other_ticket = readers

    def woken_after():
        assert first.upgrade(own_ticket, timeout=0.3).get() is False
        assert first.state(own_ticket) == ("upgrade", "holds")
        late = other.ask(READ)
        waiting = other.wait(late)
        time.sleep(0.3)
        assert waiting.waits
        back = time.monotonic()
        assert first.downgrade(own_ticket)
        assert waiting.get() is True
        assert first.state(own_ticket) == (READ, "holds")
        assert first.outcomes(own_ticket) == []
        other.release(late)
        return waiting.ended - back

    promptly(woken_after, WOKEN, "it was not woken")
    # Another reader may upgrade now.
    again = other.upgrade(other_ticket)
    first.release(own_ticket)
    assert again.get() is True


def test_a_try_changes_nothing(readers):
    first, own_ticket, other, other_ticket = readers
    assert first.begin(own_ticket, only_if_free=True) is False
    assert first.state(own_ticket) == (READ, "holds")
    late = other.ask(READ)
    assert late.granted
    other.release(late)
    other.release(other_ticket)
    assert first.begin(own_ticket, only_if_free=True) is True
    assert first.state(own_ticket) == (WRITE, "holds")


def test_upgrade_try_fails_while_a_reader_may_enter(member):
    first, other, third = member(), member(), member()
    own_ticket = first.read()
    writer, late = third.ask(WRITE), other.ask(READ)
    third.release(writer)
    assert first.begin(own_ticket, only_if_free=True) is False
    assert first.state(own_ticket) == (READ, "holds")
    assert other.enters(late) is True


def test_upgrade_try_succeeds_beside_a_dead_reader(member):
    first, other = member(grace=0), member(grace=0)
    other.read()
    own_ticket = first.read()
    assert first.begin(own_ticket, only_if_free=True) is False
    other.die()
    until(lambda: first.begin(own_ticket, only_if_free=True), "the dead one out of the way")


def test_every_call_may_be_repeated(readers):
    first, own_ticket, other, other_ticket = readers
    for _ in range(3):
        assert first.begin(own_ticket) is False
    other.release(other_ticket)
    for _ in range(3):
        assert first.main.upgrade(own_ticket, PATIENCE, threading.Event()) is True
    for _ in range(3):
        assert first.begin(own_ticket) is True
    for _ in range(3):
        assert first.downgrade(own_ticket) is True
    assert first.state(own_ticket) == (READ, "holds")
    assert first.release(own_ticket)
    assert first.begin(own_ticket) is None
    assert first.downgrade(own_ticket) is False
    assert first.outcomes(own_ticket) == [(READ, "upgraded"), (WRITE, "downgraded"), (READ, "released")]


def test_upgrade_waits_for_reader_that_may_enter(member, database):
    """A waiting reader with no writer ahead may already know that it is granted: the upgrader waits for it."""
    first, other, third = member(), member(), member()
    own_ticket = first.read()
    writer = third.ask(WRITE)
    late, later = other.ask(READ), other.ask(READ)
    assert not late.granted
    assert third.release(writer)
    assert first.begin(own_ticket) is False, "they may be inside"
    assert other.state(late) == (READ, "holds")
    assert other.enters(late) is True
    assert other.enters(later) is True
    waiting = first.upgrade(own_ticket)
    other.release(late)
    time.sleep(0.2)
    assert waiting.waits
    other.release(later)
    assert waiting.get() is True


def test_sleeping_reader_is_woken_by_its_grant(member):
    first, other, third = member(), member(), member()

    def woken_after():
        own_ticket = first.read()
        writer = third.ask(WRITE)
        late = other.ask(READ)
        waiting = other.wait(late)
        third.release(writer)
        upgrading = first.upgrade(own_ticket)
        left_at = time.monotonic()
        assert waiting.get() is True
        other.release(late)
        assert upgrading.get() is True
        first.release(own_ticket)
        return waiting.ended - left_at

    for _ in range(10):
        promptly(woken_after, WOKEN, "it slept on")


@pytest.mark.engines("postgresql")
def test_granted_row_without_client_expires(member, database):
    """A row whose acquire was broken off has no client to renew its lease, so it expires."""
    first, other, third = member(), member(), member()
    own_ticket = first.read()
    writer = third.ask(WRITE)
    late, expired = other.ask(READ), other.ask(READ)
    until_then = "clock_timestamp() + interval '5 seconds'"
    for ticket, expiry in ((late, until_then), (expired, "clock_timestamp() - interval '1 second'")):
        database.rows(f"UPDATE {{table}} SET waiter_lease_until = {expiry} WHERE queue_position = ?", ticket.position)
    third.release(writer)
    waiting = first.upgrade(own_ticket)
    assert other.state(late) == (READ, "holds")
    assert waiting.waits
    assert waiting.get() is True
    for ticket in (late, expired):  # neither row was granted beside the writer
        assert other.entry(ticket) is None
        assert other.outcomes(ticket) == [(READ, "cancelled")]


def test_readers_behind_a_waiting_writer_are_not_let_in(member):
    first, other, third = member(), member(), member()
    own_ticket, other_ticket = first.read(), other.read()
    writer = third.ask(WRITE)
    late = third.ask(READ)
    waiting = first.upgrade(own_ticket)
    assert third.state(late) == (READ, "waits")
    other.release(other_ticket)
    assert waiting.get() is True
    assert third.state(late) == (READ, "waits")
    first.release(own_ticket)
    third.release(writer)
    assert third.enters(late) is True


def test_a_bare_reader_counts(member, database, name):
    upgrader = member()
    own_ticket = upgrader.read()
    connection = database.raw()
    cursor = connection.cursor()
    bare = database.insert_bare(cursor, name, "bare", access_type=READ, concurrency_limit=1)
    waiting = upgrader.upgrade(own_ticket)
    time.sleep(0.3)
    assert waiting.waits
    assert upgrader.state(Ticket(name, bare, "bare", False)) == (READ, "holds")
    late = database.insert_bare(cursor, name, "late", access_type=READ, concurrency_limit=1)
    assert upgrader.state(Ticket(name, late, "late", False)) == (READ, "waits")
    cursor.execute(database.sql("DELETE FROM {table} WHERE queue_position = ?"), (bare,))
    assert waiting.get() is True
    assert upgrader.state(Ticket(name, late, "late", False)) == (READ, "waits")
    upgrader.release(own_ticket)
    assert upgrader.state(Ticket(name, late, "late", False)) == (READ, "holds")
    cursor.execute(database.sql("DELETE FROM {table} WHERE queue_position = ?"), (late,))
    connection.close()


def test_upgrade_with_readers_held_back_by_a_pause(member, database):
    """A pause keeps the readers out, and no writer may overtake them: the upgrade does not begin."""
    first, other, third = member(), member(), member()
    own_ticket = first.read()
    writer = third.ask(WRITE)
    late = other.ask(READ)
    first.main.set_resource(own_ticket.resource, "paused", 1)
    third.release(writer)
    waiting = first.upgrade(own_ticket)
    time.sleep(0.3)
    assert waiting.waits
    assert first.state(own_ticket) in ((READ, "holds"), ("upgrade:new", "holds"))
    assert other.state(late) == (READ, "waits")
    first.main.set_resource(own_ticket.resource, "paused", 0)
    until(lambda: other.state(late) == (READ, "holds"))
    other.release(late)
    assert waiting.get() is True


def test_an_upgrade_goes_on_while_paused(readers):
    first, own_ticket, other, other_ticket = readers
    first.main.set_resource(own_ticket.resource, "paused", 1)
    waiting = first.upgrade(own_ticket)
    other.release(other_ticket)
    assert waiting.get() is True
    first.main.set_resource(own_ticket.resource, "paused", 0)


def test_a_reader_ahead_that_a_pause_held_up_is_waited_for(member):
    """A waiting reader ahead never checks rows behind it: the upgrade is granted only when that reader leaves."""
    first, other, third = member(), member(), member()
    writer = third.ask(WRITE)
    early, own_ticket = other.ask(READ), first.ask(READ)
    third.release(writer)
    assert first.enters(own_ticket) is True
    first.main.set_resource(own_ticket.resource, "paused", 1)
    waiting = first.upgrade(own_ticket)
    time.sleep(0.2)
    assert waiting.waits
    first.main.set_resource(own_ticket.resource, "paused", 0)
    assert other.enters(early) is True
    assert waiting.waits
    other.release(early)
    assert waiting.get() is True


# -- downgrade


def test_readers_behind_enter_when_the_writer_becomes_a_reader(member):
    downgrader, other, third = member(), member(), member()

    def woken_after():
        own_ticket = downgrader.ask(WRITE)
        assert own_ticket.granted
        first, second, writer, last = other.ask(READ), third.ask(READ), third.ask(WRITE), other.ask(READ)
        waiting = [other.wait(first), third.wait(second)]
        behind = [third.wait(writer, timeout=2), other.wait(last, timeout=2)]
        time.sleep(0.3)
        assert all(call.waits for call in waiting)
        began = time.monotonic()
        assert downgrader.downgrade(own_ticket)
        assert [call.get() for call in waiting] == [True, True]
        assert [call.get() for call in behind] == [False, False]
        assert downgrader.state(own_ticket) == (READ, "holds")
        assert downgrader.outcomes(own_ticket) == [(WRITE, "downgraded")]
        for session, ticket in (
            (downgrader, own_ticket),
            (other, first),
            (third, second),
            (third, writer),
            (other, last),
        ):
            session.release(ticket)
        return max(call.ended for call in waiting) - began

    promptly(woken_after, WOKEN, "they were not woken")


def test_release_after_downgrade_wakes_the_waiter(member):
    """A downgraded row has its wakeup lock again, so its release wakes the next waiter."""
    first, other = member(), member()

    def woken_after():
        own_ticket = first.ask(WRITE)
        writer = other.ask(WRITE)
        waiting = other.wait(writer)
        time.sleep(0.2)
        assert first.downgrade(own_ticket)
        time.sleep(0.3)
        assert waiting.waits
        left_at = time.monotonic()
        first.release(own_ticket)
        assert waiting.get() is True
        other.release(writer)
        return waiting.ended - left_at

    promptly(woken_after, WOKEN, "it was not woken")


def test_writer_downgrades_and_upgrades_again(member):
    first, other = member(), member()
    own_ticket = first.ask(WRITE)
    for _ in range(3):
        assert first.downgrade(own_ticket)
        other_ticket = other.read()
        waiting = first.upgrade(own_ticket)
        other.release(other_ticket)
        assert waiting.get() is True
        assert other.ask(READ, only_if_free=True) is None


def test_a_wait_that_outlives_its_upgrade_changes_nothing(readers):
    """The server may continue a wait call after its client broke it off."""
    first, own_ticket, other, other_ticket = readers
    waiting = first.upgrade(own_ticket, timeout=2)
    first.downgrade(own_ticket)
    assert first.main.upgrade(own_ticket, 0.1, threading.Event()) is False
    other.release(other_ticket)
    assert waiting.get() is False
    assert first.state(own_ticket) == (READ, "holds")


def test_fences_of_writers_never_fall(member):
    """The upgraded grant keeps its position: earlier writers have smaller ones, later writers larger ones."""
    reader, other, third = member(), member(), member()
    first, second = reader.read(), other.read()
    writer = third.ask(WRITE)
    waiting = other.upgrade(second)
    reader.release(first)
    assert waiting.get() is True
    fences = [second.position]
    other.downgrade(second)
    late = reader.ask(READ)
    assert not late.granted, "a writer waits ahead of it"
    assert other.begin(second, only_if_free=True) is True, "a reader behind a writer is not granted"
    fences.append(second.position)
    other.release(second)
    assert third.enters(writer) is True
    fences.append(writer.position)
    third.release(writer)
    assert reader.enters(late) is True
    assert reader.begin(late) is True
    fences.append(late.position)
    assert fences == sorted(fences)


# -- grants that cannot be converted


@pytest.mark.parametrize(("access", "limit"), [(READ, 3), (READ, None), ("stage:1", None), (WRITE, 3), (WRITE, None)])
def test_only_readers_and_writers_are_converted(member, database, name, access, limit):
    with contextlib.closing(database.coordinator()) as operator:
        operator.admin.set_limit(name, 3)  # for requests without a limit
    holder = member()
    own_ticket = holder.ask(access, limit)
    assert own_ticket.granted
    with pytest.raises(sqlsem.SqlsemError, match="cannot be"):
        holder.begin(own_ticket)
    with pytest.raises(sqlsem.SqlsemError, match="cannot be"):
        holder.downgrade(own_ticket)
    assert holder.state(own_ticket) == (access, "holds")


def test_a_row_that_waits_is_not_converted(member):
    first, other = member(), member()
    first.ask(WRITE)
    late = other.ask(READ)
    assert other.begin(late) is None
    assert other.downgrade(late) is False
    assert other.state(late) == (READ, "waits")


def test_convert_refuses_a_row_of_another_owner(member):
    first, other = member(), member()
    own_ticket = first.read()
    stolen = Ticket(own_ticket.resource, own_ticket.position, "somebody else", True)
    assert other.begin(stolen) is None
    assert other.downgrade(stolen) is False
    assert first.state(own_ticket) == (READ, "holds")


def test_upgrade_label_cannot_be_requested(member, database, name):
    with pytest.raises(sqlsem.ConfigurationError, match="upgrade"):
        Request(name, "upgrade")
    if database.engine == "sqlite":
        return  # no sqlsem code runs there when a bare participant inserts a row
    connection = database.raw()
    with pytest.raises(Exception, match="upgrade"):
        database.insert_bare(connection.cursor(), name, "bare", access_type="upgrade")
    connection.close()


# -- the dead, the revoked, the returned


def test_an_upgrade_outlives_the_dead(member):
    first, other, third = member(grace=0.3), member(grace=0.3), member(grace=0.3)
    other_ticket, own_ticket, alive = other.read(), first.read(), third.read()
    waiting = first.upgrade(own_ticket)
    other.die()
    until(lambda: first.entry(other_ticket) is None, "the dead one reaped, though the living one still reads")
    assert waiting.waits
    third.release(alive)
    assert waiting.get() is True


def test_dead_upgrader_is_reaped(member):
    first, other = member(grace=0.3), member(grace=0.3)
    own_ticket, other_ticket = first.read(), other.read()
    first.begin(own_ticket)
    late = other.ask(READ)
    waiting = other.wait(late)
    first.die()
    assert waiting.get() is True
    other.release(late)
    assert other.begin(other_ticket) is True


def test_a_dead_upgrader_is_no_deadlock(member):
    first, other = member(grace=1.0), member(grace=1.0)
    own_ticket, other_ticket = first.read(), other.read()
    first.begin(own_ticket)
    first.die()
    # The server may take a moment to end its session.
    waiting = until(lambda: _unless_deadlock(lambda: other.upgrade(other_ticket)), "no alarm for the dead")
    assert waiting.get() is True


def _unless_deadlock(call):
    try:
        return call()
    except sqlsem.Deadlock:
        return None


def test_an_upgrader_is_revoked(member):
    first, other = member(grace=0.4), member(grace=0.4)
    own_ticket, other_ticket = first.read(), other.read()
    waiting = first.upgrade(own_ticket)
    assert other.main.revoke(own_ticket.position, False) == 1
    assert waiting.get() is None
    assert first.main.heartbeat(first.number).revoked == {own_ticket.position}
    assert first.begin(own_ticket) is None
    assert first.downgrade(own_ticket) is False
    # The revoked row will leave: an upgrade behind it is no deadlock.
    follows = other.upgrade(other_ticket)
    assert follows.get() is True
    assert first.entry(own_ticket) is None


def test_an_upgrader_is_revoked_by_force(member):
    first, other = member(), member()
    own_ticket = first.read()
    other.read()
    waiting = first.upgrade(own_ticket)
    assert other.main.revoke(own_ticket.position, True) == 0
    assert waiting.get() is None


def test_an_upgrade_outlives_its_session(member, database):
    first, other = member(grace=60), member(grace=60)
    own_ticket, other_ticket = first.read(), other.read()
    first.begin(own_ticket)
    first.main.close()
    first.main = first.engine.connect("main")
    assert first.main.reattach_member(first.number)
    assert first.main.heartbeat(first.number).positions == {own_ticket.position}
    waiting = first.upgrade(own_ticket)
    other.release(other_ticket)
    assert waiting.get() is True
    first.main.close()
    first.main = first.engine.connect("main")
    assert first.main.reattach_member(first.number)
    late = other.ask(READ)
    follows = other.wait(late)
    assert first.downgrade(own_ticket)
    assert follows.get() is True


def test_members_with_a_lease(member):
    first, other = member(lease=60), member(lease=60)
    own_ticket, other_ticket = first.read(), other.read()
    waiting = first.upgrade(own_ticket)
    other.release(other_ticket)
    assert waiting.get() is True
    late = other.ask(READ)
    follows = other.wait(late)
    assert first.downgrade(own_ticket)
    assert follows.get() is True


def test_a_pin_holds_a_writer_back(member, database):
    """An upgrade waits for the open transaction that has pinned the row."""
    writer = member(gate_timeout=0.2)
    own_ticket = writer.ask(WRITE)
    connection = database.raw(autocommit=False)
    cursor = connection.cursor()
    assert pinned(writer.engine, cursor, own_ticket)
    with pytest.raises(sqlsem.Unavailable):
        writer.downgrade(own_ticket)
    connection.rollback()
    connection.close()
    assert writer.downgrade(own_ticket)


class Room:
    """The clients that believe to hold the lock; refuses a writer beside any other."""

    def __init__(self):
        self._lock = threading.Lock()
        self._readers, self._writer = set(), None
        self.written = self.deadlocks = self.gave_up = 0

    def reads(self, ticket):
        with self._lock:
            assert self._writer is None, f"{ticket} reads beside the writer {self._writer}"
            self._readers.add(ticket.position)

    def writes(self, ticket):
        """Hold the lock as writer for a moment."""
        with self._lock:
            assert self._writer is None
            assert self._readers <= {ticket.position}, f"{ticket} writes beside {self._readers}"
            self._writer = ticket.position
        time.sleep(0.002)
        with self._lock:
            assert self._readers <= {ticket.position}, f"{self._readers} came in beside {ticket}"
            self._writer = None
            self.written += 1

    def leaves(self, ticket):
        with self._lock:
            self._readers.discard(ticket.position)


def read_and_write(room, client, turns):
    for turn in range(turns):
        ticket = client.ask(READ)
        if not ticket.granted:
            assert (
                client._slices(lambda seconds, t=ticket: client.main.wait(t, seconds, threading.Event()), PATIENCE)
                is True
            )
        room.reads(ticket)
        try:
            if turn % 2:
                try:
                    done = client.begin(ticket)
                    patience = PATIENCE if turn % 4 == 1 else 0.01
                    if not done:
                        done = client._slices(
                            lambda seconds, t=ticket: client.main.upgrade(t, seconds, threading.Event()), patience
                        )
                    if done:
                        room.writes(ticket)
                    if not done or turn % 8 == 1:
                        assert client.downgrade(ticket)
                        time.sleep(0.001)
                except sqlsem.Deadlock:
                    room.deadlocks += 1
        finally:
            room.leaves(ticket)
            client.release(ticket)


def write_or_give_up(room, client, turns):
    """The waiters behind are granted whenever this upgrader leaves."""
    for turn in range(turns):
        ticket = client.ask(WRITE)
        inside = ticket.granted or client.main.wait(ticket, turn % 5 / 500, threading.Event())
        if inside:
            room.writes(ticket)
        room.gave_up += not inside
        client.release(ticket)


def test_as_an_exclusion_under_load(member, database):
    """Readers upgrade or give up, writers wait or give up: no other client ever holds beside a writer."""
    room, errors = Room(), []
    turns = 12 if database.engine == "mssql" else 40

    def run(work, client):
        try:
            work(room, client, turns)
        except BaseException as exc:
            errors.append(exc)

    works = [read_and_write] * 4 + [write_or_give_up] * 2
    workers = [threading.Thread(target=run, args=(work, member())) for work in works]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(3 * PATIENCE)
    assert errors == []
    assert room.written > 0


# -- as a grant, in threads and in tasks


@pytest.fixture
def connect(connect, database):
    """Connect with a long grace on engines that compile a routine at a session's first call."""
    usual = {"grace": 30.0} if database.engine == "mssql" else {}
    return lambda **options: connect(**{**usual, **options})


def access(database, grant):
    """Return the access of a grant according to the table."""
    (row,) = database.rows("SELECT access_type FROM {table} WHERE queue_position = ?", grant.position)
    return row[0]


class Upgrade:
    """A thread in which a grant upgrades."""

    def __init__(self, grant, timeout=PATIENCE):
        self._later = Later(lambda: grant.upgrade(timeout))
        self.get, self.grant = self._later.get, grant

    @property
    def waits(self):
        return self._later.waits

    def begun(self, database):
        until(lambda: access(database, self.grant) == "upgrade", "the upgrade begun")
        return self


@both
@pytest.mark.quiet
def test_a_grant_goes_up_and_down(connect, database, name):
    first, other = connect(), connect()
    with first.read(name) as grant:
        fence = grant.fence
        grant.upgrade()
        assert access(database, grant) == WRITE
        assert not other.read(name).acquire(blocking=False)
        grant.check()
        grant.downgrade()
        assert access(database, grant) == READ
        with other.read(name):
            grant.check()
        grant.upgrade(timeout=0)
        assert grant.fence == fence
    assert not grant.lost
    outcomes = [
        (past.access, past.outcome) for past in reversed(first.admin.history(name)) if past.position == grant.position
    ]
    assert outcomes == [(READ, "upgraded"), (WRITE, "downgraded"), (READ, "upgraded"), (WRITE, "released")]


@pytest.mark.parametrize("same", [True, False], ids=["one process", "two"])
@both
@pytest.mark.quiet
def test_a_grant_waits_for_the_others(connect, database, name, same):
    coordinator = connect()
    other = coordinator if same else connect()
    reader = Attempt(other.read(name))
    reader.granted()
    with coordinator.read(name) as grant:
        waiting = Upgrade(grant).begun(database)
        late = Attempt(other.read(name))
        assert late.waits(0.2)
        assert waiting.waits
        reader.leave()
        waiting.get()
        assert late.waits()
        grant.downgrade()
        late.granted(10)
        late.leave()


@both
def test_upgrade_times_out(connect, database, name):
    first, other = connect(), connect()
    with other.read(name), first.read(name) as grant:
        for timeout in (0, 0.3):
            with pytest.raises(sqlsem.Timeout, match="did not become the writer") as caught:
                grant.upgrade(timeout=timeout)
            assert caught.value.resource == name
            assert access(database, grant) == READ
            grant.check()
            late = Attempt(other.read(name))
            late.granted(10)
            late.leave()


@both
def test_two_upgrades_at_once(connect, database, name):
    first, other = connect(), connect()
    lock = other.read(name)
    lock.acquire()
    grant = lock.grant
    with first.read(name) as other_grant:
        waiting = Upgrade(other_grant).begun(database)
        with pytest.raises(sqlsem.Deadlock) as caught:
            grant.upgrade()
        assert caught.value.resource == name
        assert f"at {other_grant.position} is upgrading" in str(caught.value)
        assert access(database, grant) == READ
        grant.check()
        assert waiting.waits
        grant.release()
        waiting.get()
        assert access(database, other_grant) == WRITE
        with pytest.raises(sqlsem.NotHeld):
            grant.upgrade()


def test_a_knot_with_an_upgrade_in_it(connect, database, name):
    """A reads x and waits to upgrade it until B leaves; B waits for y, which A holds."""
    first, other = connect(), connect()
    y = first.mutex(name("y"))
    y.acquire()
    with first.read(name("x")) as grant:
        started, ended = threading.Event(), threading.Event()
        caught = []

        def work():
            with other.read(name("x")):
                started.set()
                try:
                    with other.mutex(name("y"), timeout=PATIENCE):
                        pass
                except sqlsem.Deadlock as exc:
                    caught.append(exc)
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert started.wait(PATIENCE)
        until(lambda: len(database.queue(name("y"))) == 2)
        try:
            grant.upgrade(timeout=PATIENCE)
        except sqlsem.Deadlock as exc:
            caught.append(exc)
        (deadlock,) = caught
        assert name("x") in str(deadlock)
        assert name("y") in str(deadlock)
        y.release()
        assert ended.wait(PATIENCE)
        thread.join()


@both
@pytest.mark.parametrize(
    ("kind", "refused"),
    [(kind, "up") for kind in ("mutex", "write", "limit", "stage")]
    + [(kind, "down") for kind in ("read", "limit", "stage")],
)
def test_conversion_of_another_kind_is_refused(connect, name, kind, refused):
    options = {"limit": (3,), "stage": (1,)}.get(kind, ())
    with getattr(connect(), kind)(name, *options) as grant:
        with pytest.raises(sqlsem.ConfigurationError, match=f"cannot be {refused}graded"):
            getattr(grant, f"{refused}grade")()


def test_several_at_once_are_not_converted(connect, name):
    coordinator = connect()
    with sqlsem.all_of(coordinator.read(name("a")), coordinator.read(name("b"))) as grant:
        with pytest.raises(sqlsem.ConfigurationError, match="several resources"):
            grant.upgrade()
        with pytest.raises(sqlsem.ConfigurationError, match="several resources"):
            grant.downgrade()


def test_upgrade_without_a_timeout_waits(connect, name):
    lock = connect().read(name)
    lock.acquire()
    grant = lock.grant
    for timeout in (-1, "soon", float("nan"), True):
        with pytest.raises(sqlsem.ConfigurationError):
            grant.upgrade(timeout=timeout)
    grant.release()
    for call in (grant.upgrade, grant.downgrade):
        with pytest.raises(sqlsem.NotHeld):
            call()


def test_a_reentrant_holder(connect, database, name):
    lock = connect().read(name, reentrant=True)
    with lock as outer:
        with lock as inner:
            inner.upgrade()
            assert outer is inner
            with pytest.raises(sqlsem.ConfigurationError, match="held 2 times"):
                inner.downgrade()
            assert access(database, outer) == WRITE
        outer.downgrade()
        assert access(database, outer) == READ


def test_conversions_of_a_grant_are_serialised(connect, database, name):
    first, other = connect(), connect()
    reader = Attempt(other.read(name))
    reader.granted()
    with first.read(name) as grant:
        waiting = Upgrade(grant).begun(database)
        with pytest.raises(sqlsem.ConfigurationError, match="another thread"):
            grant.upgrade()
        reader.leave()
        waiting.get()


@pytest.mark.leaves_rows
def test_upgrade_of_a_revoked_grant_fails(connect, database, name):
    lost = []
    first, other = connect(grace=0.6), connect()
    with other.read(name):
        lock = first.read(name, on_lost=lost.append)
        lock.acquire()
        grant = lock.grant
        waiting = Upgrade(grant).begun(database)
        other.admin.revoke(grant.position)
        with pytest.raises(sqlsem.LockLost):
            waiting.get()
        assert grant.lost
        until(lambda: lost == [grant])
        with pytest.raises(sqlsem.LockLost):
            lock.release()
        until(lambda: [row[0] for row in database.queue(name) if row[0] == grant.position] == [])


def test_an_upgrade_of_a_coordinator_that_closes(connect, database, name):
    first, other = connect(), connect()
    with other.read(name) as other_grant:
        lock = first.read(name)
        lock.acquire()
        waiting = Upgrade(lock.grant).begun(database)
        first.close()
        with pytest.raises(sqlsem.SqlsemError):
            waiting.get()
        assert [row[0] for row in database.queue(name)] == [other_grant.position]


def trouble(monkeypatch, coordinator, method, error, times):
    """Make a method of the main session fail ``times`` times before it does anything."""
    kind = type(coordinator.client.member.main.session)
    original, failures = getattr(kind, method), [times]

    def fail(self, *arguments):
        if failures[0] > 0:
            failures[0] -= 1
            raise error("trouble")
        return original(self, *arguments)

    monkeypatch.setattr(kind, method, fail)
    return failures


def test_an_upgrade_that_cannot_be_put_back_at_once(connect, database, name, monkeypatch):
    first, other = connect(grace=1.0), connect()
    with other.read(name), first.read(name) as grant:
        failures = trouble(monkeypatch, first, "downgrade", sqlsem.Unavailable, 1)
        with pytest.raises(sqlsem.Timeout):
            grant.upgrade(timeout=0.2)
        assert failures == [0]
        until(lambda: access(database, grant) == READ, "put back by the pulse")


def test_late_rollback_does_not_undo_a_later_upgrade(connect, database, name, monkeypatch):
    first, other = connect(), connect()
    reader = Attempt(other.read(name))
    reader.granted()
    with first.read(name) as grant:
        later = []
        monkeypatch.setattr(first.client.member, "defer", later.append)
        trouble(monkeypatch, first, "downgrade", sqlsem.Unavailable, 1)
        with pytest.raises(sqlsem.Timeout):
            grant.upgrade(timeout=0.2)
        reader.leave()
        grant.upgrade()
        assert access(database, grant) == WRITE
        (late,) = later
        first.client.member.call("late", late, None)
        assert access(database, grant) == WRITE
        grant.downgrade()
        first.client.member.call("late", late, None)


def test_a_downgrade_that_cannot_be_done_at_once(connect, database, name, monkeypatch):
    coordinator = connect(grace=1.0)
    with coordinator.write(name) as grant:
        trouble(monkeypatch, coordinator, "downgrade", sqlsem.Unavailable, 1)
        with pytest.raises(sqlsem.Unavailable):
            grant.downgrade()
        until(lambda: access(database, grant) == READ, "done by the pulse")
        grant.upgrade()
        assert access(database, grant) == WRITE


def test_an_answer_that_is_lost(connect, database, name, monkeypatch):
    first, other = connect(), connect()
    reader = Attempt(other.read(name))
    reader.granted()
    with first.read(name) as grant:
        kind, lost = type(first.client.member.main.session), []

        def losing(method):
            original = getattr(kind, method)

            def lose(self, *arguments):
                answer = original(self, *arguments)
                if method in lost:
                    return answer
                lost.append(method)
                if database.engine != "sqlite":  # a file has no connection to lose
                    self.close()
                raise Disconnected("the answer was lost")

            monkeypatch.setattr(kind, method, lose)

        losing("begin_upgrade")
        losing("downgrade")
        waiting = Upgrade(grant).begun(database)
        reader.leave()
        waiting.get()
        assert access(database, grant) == WRITE
        grant.downgrade()
        assert lost == ["begin_upgrade", "downgrade"]
        assert access(database, grant) == READ
        grant.check()


def test_an_exception_in_the_middle_leaves_a_reader(connect, database, name, monkeypatch):
    """An exception during the wait, such as KeyboardInterrupt, leaves the grant a reader."""
    first, other = connect(), connect()
    with other.read(name), first.read(name) as grant:
        perform = first.client.execute_effect

        def interrupted(operation):
            if isinstance(operation, effects.WaitFor):
                raise KeyboardInterrupt
            return perform(operation)

        monkeypatch.setattr(first.client, "execute_effect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grant.upgrade()
        monkeypatch.undo()
        assert access(database, grant) == READ
        grant.check()


async def test_a_task_that_is_cancelled_while_it_upgrades_reads_on(connect, database, name):
    first, other = connect(), connect()
    async with other.aio.read(name), first.aio.read(name) as grant:
        waiting = asyncio.create_task(grant.upgrade())
        while access(database, grant) != "upgrade":
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert access(database, grant) == READ
        await grant.check()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(grant.upgrade(), 0.2)
        assert access(database, grant) == READ


async def test_tasks_and_threads_beside_each_other(connect, database, name):
    coordinator = connect()
    reader = Attempt(coordinator.read(name))
    reader.granted()
    async with coordinator.aio.read(name) as grant:
        waiting = asyncio.create_task(grant.upgrade(PATIENCE))
        while access(database, grant) != "upgrade":
            await asyncio.sleep(0.01)
        reader.leave()
        await waiting
        late = Attempt(coordinator.read(name))
        await asyncio.sleep(0.2)
        assert not late.settled
        await grant.downgrade()
        await asyncio.to_thread(late.granted)
        await asyncio.to_thread(late.leave)
