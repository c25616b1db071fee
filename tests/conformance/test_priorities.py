"""Priorities that an operator has enabled: higher ones overtake waiters, never holders, and no waiter starves."""

import contextlib
import functools
import itertools
import threading
import time

import pytest
from support import PATIENCE, Attempt, remains, until

import sqlsem
from sqlsem.engines.base import Busy
from sqlsem.engines.priorities import priority_queue
from sqlsem.values.locks import Request

pytestmark = [pytest.mark.locks]
both = pytest.mark.faces("sync", "aio")


@pytest.fixture
def ranked(connect, name):
    """``ranked(ageing)`` enables priorities for the test's resource; the test's end disables them."""
    operator = connect()

    def ranked(ageing=3600, resource=name):
        operator.admin.set_priorities(resource, ageing)

    ranked()
    yield ranked
    operator.admin.set_priorities(name, None)


@pytest.fixture
def waiter(attempt, name):
    """``waiter(lock)`` starts an attempt, and returns it once its entry is in the priority queue."""
    return functools.partial(attempt, queue=priority_queue(name))


def places(database, resource):
    return database.queue(priority_queue(resource))


@both
@pytest.mark.parametrize("members", ["one process", "many"])
def test_higher_priority_goes_first_and_equals_are_fifo(connect, name, ranked, waiter, members):
    coordinator = connect()
    of = itertools.repeat(coordinator) if members == "one process" else itertools.cycle([connect(), connect()])
    holder = Attempt(coordinator.mutex(name, priority=0))
    holder.granted()
    waiters = [(priority, waiter(next(of).mutex(name, priority=priority))) for priority in (0, 5, 3, 5, 99)]
    holder.leave()
    fences = []
    for number in (4, 1, 3, 2, 0):
        fences.append(waiters[number][1].granted().fence)
        assert all(waiters[other][1].waits(0.01) for other in range(5) if not waiters[other][1].settled)
        waiters[number][1].leave()
    assert fences == sorted(fences)
    assert fences[0] > holder.grant.fence


@both
def test_holder_is_not_overtaken(connect, name, ranked, waiter):
    holder = Attempt(connect().mutex(name, priority=0))
    holder.granted()
    urgent = waiter(connect().mutex(name, priority=99))
    assert urgent.waits(0.3)
    holder.grant.check()
    holder.leave()
    urgent.leave()


@both
def test_low_priority_does_not_starve(connect, name, ranked, waiter):
    """Ageing lets an old waiter precede a newcomer of higher priority."""
    ranked("10ms")
    first, other = connect(), connect()
    holder = Attempt(first.mutex(name, priority=0))
    holder.granted()
    patient = waiter(other.mutex(name, priority=0))
    assert patient.waits(0.2)
    urgent = waiter(first.mutex(name, priority=3))  # a lead of 30 ms
    holder.leave()
    patient.granted()
    assert urgent.waits(0.05)
    patient.leave()
    urgent.leave()


@both
def test_ageing_changes_the_order_of_waiters(connect, name, ranked, waiter):
    """A waiter may overtake another one of its own process, and is notified."""
    ranked("1ms")
    first, other = connect(), connect()
    holder = Attempt(other.mutex(name, priority=0))
    holder.granted()
    low = waiter(first.mutex(name, priority=0))
    assert low.waits(0.3)
    high = waiter(first.mutex(name, priority=5))
    asleep = first.client.priority_waiters._behind
    until(lambda: asleep, "the high one sleeps behind the low one")
    ranked("1h")
    until(lambda: {each.position for each in asleep} != {high_place(first, name)}, "the low one has seen it")
    holder.leave()
    began = time.monotonic()
    high.granted()
    assert time.monotonic() - began < 15, "it has slept on"
    assert low.waits(0.01)
    high.leave()
    low.leave()


def high_place(coordinator, name):
    return max(entry.position for entry in coordinator.admin.entries(priority_queue(name)))


@both
def test_limit_fills_by_priority_without_passing_heavy(connect, name, ranked, waiter):
    coordinator = connect()
    inside = [Attempt(coordinator.limit(name, 3, priority=0)) for _ in range(3)]
    for each in inside:
        each.granted()
    light = waiter(coordinator.limit(name, 3, priority=1))
    heavy = waiter(connect().limit(name, 3, weight=2, priority=2))
    inside[0].leave()
    assert heavy.waits(0.2), "a light one would fit, and must not pass by the heavy one"
    assert light.waits(0.01)
    inside[1].leave()
    heavy.granted()
    assert light.waits()
    heavy.leave()
    light.granted()
    for each in (inside[2], light):
        each.leave()


@both
def test_readers_and_writers(connect, name, ranked, waiter):
    coordinator = connect()
    reader = Attempt(coordinator.read(name, priority=0))
    reader.granted()
    writer = waiter(connect().write(name, priority=5))
    late = waiter(coordinator.read(name, priority=4))
    urgent = waiter(connect().read(name, priority=6))
    urgent.granted()
    assert writer.waits()
    assert late.waits(0.01)
    urgent.leave()
    reader.leave()
    writer.leave()
    late.leave()


@both
def test_try_does_not_overtake_waiters(connect, database, name, ranked, waiter):
    first, other = connect(), connect()
    with other.mutex(name, priority=0):
        assert not first.mutex(name, priority=99).acquire(timeout=0)
        assert places(database, name) == []
        waiting = waiter(first.mutex(name, priority=1))
    waiting.leave()
    lock = first.mutex(name, priority=0)
    assert lock.acquire(timeout=0)
    lock.release()


@both
def test_a_timeout_leaves_nothing(connect, database, name, ranked):
    first, other = connect(), connect()
    with first.mutex(name, priority=0):
        assert not other.mutex(name, priority=5).acquire(timeout=0.1)
        assert places(database, name) == []
    with other.mutex(name, priority=0):
        pass


@both
def test_request_without_priority_is_refused(connect, database, name, ranked):
    coordinator = connect()
    for lock in (
        coordinator.mutex(name),
        coordinator.limit(name, 3),
        sqlsem.all_of(coordinator.mutex(name), coordinator.mutex(name("b"))),
    ):
        for timeout in (0, 1):
            with pytest.raises(sqlsem.ConfigurationError, match=r"granted by priority.*--no-priorities"):
                assert not lock.acquire(timeout=timeout)
                with coordinator.mutex(name, priority=0):  # (a try on a held lock may just fail)
                    lock.acquire(timeout=1)
    assert database.queue(name) == []
    with coordinator.mutex(name, priority=0), pytest.raises(sqlsem.ConfigurationError, match="granted by priority"):
        connect().mutex(name).acquire(timeout=1)


@pytest.mark.engines("postgresql", "mssql")
def test_a_bare_row_is_refused(database, name, ranked):
    connection = database.raw()
    with contextlib.closing(connection), pytest.raises(Exception, match="granted by priority"):
        database.insert_bare(connection.cursor(), str(name), "bare")


@both
def test_a_priority_is_refused_where_there_are_none(connect, name):
    with pytest.raises(sqlsem.ConfigurationError, match=r"o priorities are set for .*--priorities"):
        connect().mutex(name, priority=1).acquire()


@both
def test_holder_may_only_try_by_priority(connect, name, ranked):
    coordinator = connect()
    with coordinator.mutex(name("b")):
        with pytest.raises(sqlsem.ConfigurationError, match="must hold nothing"):
            coordinator.mutex(name, priority=1).acquire()
        lock = coordinator.mutex(name, priority=1)
        assert lock.acquire(timeout=0)
        lock.release()


def test_priority_lock_in_a_group_is_refused(connect, name, ranked):
    coordinator = connect()
    with pytest.raises(sqlsem.ConfigurationError, match="of one resource alone"):
        sqlsem.all_of(coordinator.mutex(name, priority=1), coordinator.mutex(name("b")))


@pytest.mark.parametrize("priority", [-1, 100, 1.5, "1", True])
def test_bad_priorities(connect, name, priority):
    with pytest.raises(sqlsem.ConfigurationError, match="priority"):
        connect().mutex(name, priority=priority)


@pytest.mark.parametrize("ageing", [0, -1, float("nan"), "soon"])
def test_bad_ageing(connect, name, ageing):
    with pytest.raises(sqlsem.ConfigurationError, match="ageing"):
        connect().admin.set_priorities(name, ageing)


def test_names_that_cannot_have_priorities(connect):
    coordinator = connect()
    with pytest.raises(sqlsem.ConfigurationError, match="pattern"):
        coordinator.admin.set_priorities("tenant:*")
    with pytest.raises(sqlsem.ConfigurationError, match="at most 246"):
        coordinator.admin.set_priorities("x" * 247)
    for kind in ("rate", "once", "priority"):
        with pytest.raises(sqlsem.ConfigurationError, match="always first come, first served"):
            coordinator.admin.set_priorities(f"{kind}:api")
        coordinator.admin.set_priorities(f"{kind}:api", None)
    with pytest.raises(sqlsem.ConfigurationError, match="at most 246"):
        coordinator.mutex("x" * 247, priority=1)


@both
def test_requests_before_the_priorities_go_first(connect, database, name, waiter):
    operator = connect()
    holder = Attempt(operator.mutex(name))
    holder.granted()
    plain = Attempt(connect().mutex(name))
    until(lambda: len(database.queue(name)) == 2, "the request of before waits")
    operator.admin.set_priorities(name, 3600)
    try:
        urgent = waiter(connect().mutex(name, priority=99))
        holder.leave()
        plain.granted()
        assert urgent.waits()
        plain.leave()
        urgent.leave()
    finally:
        operator.admin.set_priorities(name, None)


@both
def test_priorities_are_removed_while_waited_for(connect, database, name, ranked, waiter):
    operator, other = connect(), connect()
    with other.mutex(name, priority=0):
        waiting = waiter(operator.mutex(name, priority=1))
        operator.admin.set_priorities(name, None)
        assert isinstance(waiting.failed(), sqlsem.ConfigurationError)
        assert places(database, name) == []
    with operator.mutex(name):
        pass


@both
def test_pause_blocks_all_priorities(connect, name, ranked, waiter):
    operator = connect()
    operator.admin.pause(name)
    try:
        waiting = waiter(connect().mutex(name, priority=9))
        assert waiting.waits()
    finally:
        operator.admin.resume(name)
    waiting.leave()


@both
def test_priorities_respect_the_operators_limit(connect, name, ranked, waiter):
    operator, other = connect(), connect()
    with pytest.raises(sqlsem.ConfigurationError, match=r"[nN]o limit is set"):
        other.limit(name, priority=1).acquire()
    operator.admin.set_limit(name, 1)
    try:
        first = Attempt(other.limit(name, priority=0))
        first.granted()
        second = waiter(operator.limit(name, priority=0))
        assert second.waits()
        operator.admin.set_limit(name, 2)
        second.leave()
        first.leave()
    finally:
        operator.admin.set_limit(name, None)


@pytest.mark.timing(0.1)
@both
def test_contended_is_set_by_equal_or_higher_priority(connect, name, ranked, waiter):
    from conformance.test_contended import contended

    for member in ("other", "same"):
        coordinator = connect()
        other = connect() if member == "other" else coordinator
        with coordinator.mutex(name, priority=5) as grant:
            event = contended(grant)
            low = waiter(other.mutex(name, priority=4))
            remains(lambda event=event: not event.is_set(), 0.5, "a lower one does not ask for it")
            high = waiter(other.mutex(name, priority=5))
            until(event.is_set, "the grant is contended")
        high.leave()
        low.leave()


@both
def test_held_priority_lock_is_locked(connect, name, ranked):
    first, other = connect(), connect()
    lock = first.mutex(name, priority=1)
    assert not lock.locked()
    with other.mutex(name, priority=0):
        assert lock.locked()


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_revoke_of_a_priority_entry_ends_its_waiter(connect, database, name, ranked, waiter):
    operator, other = connect(), connect()
    with other.mutex(name, priority=0):
        waiting = waiter(connect().mutex(name, priority=1))
        (place,) = operator.admin.entries(priority_queue(name))
        assert (place.state, place.weight, place.limit) == ("holds", 2, 100)
        operator.admin.revoke(place.position, force=True)
        assert isinstance(waiting.failed(), sqlsem.LockLost)


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_ageing_is_shown_and_recorded(connect, name, ranked):
    operator = connect()
    ranked("90s")
    (row,) = (resource for resource in operator.admin.resources() if resource.resource == name)
    assert row.ageing == 90
    operator.admin.set_limit(name, 3)
    operator.admin.set_limit(name, None)
    assert [resource.ageing for resource in operator.admin.resources() if resource.resource == name] == [90]
    assert operator.admin.operations(str(name), action="ageing")[0].new == "90000"


@both
@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_priority_holder_upgrades_hands_over_and_asserts(connect, name, ranked, waiter):
    """A holder by priority can convert, hand over and assert, like any holder."""
    first, other = connect(), connect()
    reader = first.read(name, priority=0)
    reader.acquire()
    grant = reader.grant
    waiting = waiter(other.write(name, priority=99))
    grant.upgrade(timeout=PATIENCE)
    grant.check()
    grant.downgrade()
    token = grant.hand_over()
    adopted = sqlsem.Coordinator.adopt(other, token)
    assert waiting.waits()
    adopted.release()
    waiting.leave()


class Parts:
    """A participant that calls its session directly, so that the test decides when it polls."""

    def __init__(self, database, name):
        self.session = database.session(grace=60)
        self.member = self.session.register_member("host", 1, "test")
        self.name = str(name)
        self.uids = itertools.count()

    def ask(self, priority, place=None, uid=None, *, only_if_free=False):
        uid = f"u{id(self)}.{next(self.uids)}" if uid is None else uid
        request = Request(self.name, priority=priority)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                turn = self.session.acquire_by_priority(
                    self.member, f"id {uid}", "me", uid, request, only_if_free, place
                )
            except Busy:  # on a slow server another session may have the gate for long; clients try again, too
                if time.monotonic() > end:
                    raise
            else:
                return uid, turn

    def close(self):
        self.session.deregister_member(self.member)
        self.session.close()


@pytest.fixture
def parts(database, name, ranked):
    participants = []

    def parts():
        participants.append(Parts(database, name))
        return participants[-1]

    yield parts
    for participant in participants:
        participant.close()


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_a_look_between_a_release_and_the_next_ones(parts):
    """The first poll after a release grants no lower priority while a higher one waits."""
    holder, low, high = parts(), parts(), parts()
    _, held = holder.ask(0)
    assert held.granted
    low_uid, low_turn = low.ask(1)
    high_uid, high_turn = high.ask(2)
    assert not low_turn.granted
    assert not high_turn.granted
    assert high_turn.before is None
    assert holder.session.release(held.ticket, "released")
    assert not low.ask(1, low_turn.ticket, low_uid)[1].granted
    newcomer = parts()
    assert newcomer.ask(2, only_if_free=True)[1].ticket is None
    _, turn = high.ask(2, high_turn.ticket, high_uid)
    assert turn.granted
    assert turn.ticket.position > held.ticket.position
    _, again = high.ask(2, high_turn.ticket, high_uid)  # repeated, as after a lost answer
    assert again.granted
    assert again.ticket.position == turn.ticket.position
    assert not low.ask(1, low_turn.ticket, low_uid)[1].granted


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_ageing_raises_priority_by_waiting_time(parts, database, name):
    """A wait of a little over two steps precedes priorities two steps higher, and not three."""
    holder, low = parts(), parts()
    assert holder.ask(0)[1].granted
    place = low.ask(1)[1].ticket.position
    table = database.beside("entry") if database.engine == "mssql" else database.table
    ago = database.later("requested_at", -7260)
    database.rows(f"UPDATE {table} SET requested_at = {ago} WHERE queue_position = ?", place)
    assert parts().ask(3)[1].before == place
    assert parts().ask(4)[1].before is None


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_a_lost_answer_is_found_again(parts):
    holder, low = parts(), parts()
    uid, held = holder.ask(0)
    assert holder.ask(0, None, uid)[1].ticket.position == held.ticket.position
    low_uid, place = low.ask(1)
    assert low.ask(1, None, low_uid)[1].ticket.position == place.ticket.position
    assert low.session.cancel(low.member, low_uid, "cancelled") == 1
    assert low.ask(1, place.ticket, low_uid)[1].ticket is None
    assert holder.session.cancel(holder.member, uid, "cancelled") == 1


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_concurrent_polls_grant_a_single_mutex(parts, threads, database, name):
    """Concurrent polls outside of the gate may each find the lock free; under the gate one of them is granted."""
    holder = parts()
    _, held = holder.ask(0)
    all_ = [parts() for _ in range(4)]
    places = [(participant, *participant.ask(0)) for participant in all_]
    together = threading.Barrier(len(all_) + 1)
    granted = []

    def look(participant, uid, turn):
        together.wait()
        for _ in range(20):
            if participant.ask(0, turn.ticket, uid)[1].granted:
                granted.append(turn.ticket.position)
                return

    for place in places:
        threads.start(look, *place)
    together.wait()
    holder.session.release(held.ticket, "released")
    threads.join()
    assert len(granted) <= 1
    assert granted in ([], [min(turn.ticket.position for *_, turn in places)])
    assert len(database.queue(name)) == len(granted)


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_concurrent_arrivals_grant_a_single_mutex(parts, threads, database):
    """Concurrent requests find an empty queue and a free lock; under the gate one of them is granted."""
    rounds = 3 if database.engine == "mssql" else 25
    all_ = [parts() for _ in range(4)]
    together = threading.Barrier(len(all_))
    granted = []

    def come(participant):
        for _ in range(rounds):
            together.wait()
            uid, turn = participant.ask(0, only_if_free=True)
            if turn.granted:
                granted.append(uid)
            together.wait()
            if turn.granted:
                participant.session.release(turn.ticket, "released")
            together.wait()

    for participant in all_:
        threads.start(come, participant)
    threads.join()
    assert len(granted) == rounds
