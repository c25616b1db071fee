"""Acquisitions as both APIs run them, interrupted at every operation, against a small model.

The model is a table in memory: registering adds rows, cancelling and releasing remove them; waiting moves a clock.
After any interrupt the grant has all its rows; or nothing is held, and the next heartbeat removes the rows that are
left.
"""

import asyncio
import contextlib
import itertools
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import until
from support.troubles import Troubled

import sqlsem
from sqlsem.aio.driver import Driver
from sqlsem.api.coordinator import Coordinator
from sqlsem.client import effects
from sqlsem.client.callers import this_thread
from sqlsem.client.grants import Grant
from sqlsem.client.held.registry import release_later
from sqlsem.client.operations.acquire import Acquisition
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.engines.protocol import LockSession
from sqlsem.util.timing import DEFAULT
from sqlsem.values.locks import Request, Ticket


class Table(Troubled):
    """The rows that the main session and the waiting sessions would find in the database."""

    def __init__(self, answers=(), troubles=(), register=()):
        super().__init__(troubles)
        self.rows = {}  # position → uid
        self.registered = {}  # uid → tickets
        self.numbers = itertools.count(1)
        self.answers = iter(answers)  # to waits and looks
        self.register_answers = iter(register)  # whether all is free, or Busy; afterwards, the answers decide
        self.outcomes = []  # of what was cancelled
        self.tried = None  # True if the registration was a try

    # -- a session

    drop_wakeup_locks = LockSession.drop_wakeup_locks
    restore_wakeup_locks = LockSession.restore_wakeup_locks

    def register(self, member_id, requesting_id, owner, uid, requests, only_if_free):
        self.tried = only_if_free
        found = self.registered.get(uid)
        if found is not None and all(ticket.position in self.rows for ticket in found):
            return found  # the answer to the first call was lost
        free = next(self.register_answers, None)
        if free is None:
            free = next(self.answers, True) is True
        if free is Busy:
            self.clock += 1
            raise Busy("locked")
        if only_if_free and not free:
            return None
        tickets = []
        for request in requests:
            position = next(self.numbers)
            self.rows[position] = uid
            tickets.append(Ticket(request.resource, position, requesting_id, free))
        self.registered[uid] = tickets
        return tickets

    def wait(self, ticket, timeout, nudge=None):
        answer = next(self.answers, True)
        if ticket.position not in self.rows:
            return None
        if answer is None:
            del self.rows[ticket.position]
        return answer

    def poll(self, member_id, tickets):
        answers = {ticket.position: self.wait(ticket, 0.0) for ticket in tickets}
        return {position: answer for position, answer in answers.items() if answer in (True, None)}

    def entries(self, resource):
        return []

    def cancel(self, member_id, uid, outcome):
        self.outcomes.append(outcome)
        positions = [position for position, owner in self.rows.items() if owner == uid]
        for position in positions:
            del self.rows[position]
        return len(positions)

    def release(self, ticket, outcome):
        return self.rows.pop(ticket.position, None) is not None

    # -- operations

    def effect(self, operation):
        if isinstance(operation, effects.Call):
            answer = operation.call(self, 1)
            return False if answer == "no room" else answer
        if isinstance(operation, effects.WaitFor):
            assert 0 < operation.timeout <= DEFAULT.slice
            answer = self.wait(operation.ticket, operation.timeout)
            if answer == "no room":
                return effects.NO_CONNECTION
            self.clock += operation.timeout
            return answer
        if isinstance(operation, effects.Sleep):
            assert 0 < operation.timeout <= DEFAULT.slice
            self.clock += operation.timeout
        return False

    def calls(self, routine):
        return [effect for effect in self.done if isinstance(effect, effects.Call) and effect.what == routine]


@contextlib.contextmanager
def coordinator_of(table):
    """A runtime that runs effects on the table, and takes the time from the table's clock."""
    coordinator = Coordinator("sqlite:////dev/null/all.db", retry=0.5)
    coordinator.client.execute_effect = table.perform
    coordinator.client.clock = table.now
    yield coordinator
    coordinator.client.member.tickets.clear()
    coordinator.close()


def lock_of(face, requests):
    return face.all_of(*(face.mutex(f"r{number}") for number in range(requests)))


def had(table, requests=1, timeout=None):
    """The result of a thread: the grant, or None."""
    with coordinator_of(table) as coordinator:
        lock = lock_of(coordinator, requests)
        return lock.grant if lock.acquire(timeout=timeout) else None


def test_free_lock_is_granted_at_once():
    table = Table([True])
    grant = had(table)
    assert list(table.rows) == [grant.position]
    assert [operation.what for operation in table.done] == ["acquire"]
    assert table.tried is False


def test_waiter_is_granted_by_a_later_poll():
    table = Table([False, False, True], register=[False])
    grant = had(table)
    assert list(table.rows) == [grant.position]
    assert [type(operation) for operation in table.done] == [effects.Call, *[effects.WaitFor] * 3]
    assert {operation.timeout for operation in table.done[1:]} == {DEFAULT.slice}


def test_timed_out_acquire_leaves_no_row():
    table = Table([False] * 10)
    assert had(table, timeout=7) is None
    assert table.rows == {}
    assert table.clock == 7
    assert table.outcomes == ["timeout"]


def test_timeout_counts_for_the_whole_group():
    table = Table([True, *[False] * 20], register=[False])
    assert had(table, requests=2, timeout=4) is None
    assert table.rows == {}
    assert table.clock == 4


def test_try_waits_for_nothing():
    table = Table([False])
    assert had(table, timeout=0) is None
    assert table.rows == {}
    assert table.tried is True
    table = Table([True])
    assert had(table, timeout=0)
    assert len(table.rows) == 1


def test_revoked_row_cancels_the_whole_request():
    table = Table([False, None], register=[False])
    with pytest.raises(sqlsem.LockLost) as caught:
        had(table, requests=2)
    assert caught.value.resource == "r0"
    assert table.rows == {}, "the rows of the others go as well"


def test_acquire_waits_for_a_busy_gate():
    assert had(Table(register=[Busy, Busy, True]))
    table = Table(register=[Busy] * 10)
    assert had(table, timeout=2.5) is None
    assert table.clock == 3


def test_cancelled_call_that_runs_late_registers_nothing():
    """As in another thread, after the requesting thread was interrupted."""
    table = Table([True], troubles={0: (False, KeyboardInterrupt())})
    with pytest.raises(KeyboardInterrupt):
        had(table)
    assert table.done[0].what == "acquire"
    assert table.done[0].call(table, 1) is False
    assert table.rows == {}


def test_abandoned_grant_is_left_to_the_heartbeat():
    table = Table([True])
    with coordinator_of(table) as coordinator:
        lock, client = coordinator.mutex("r0", reentrant=True), coordinator.client
        assert lock.acquire()
        assert lock.acquire()
        grant = lock.grant
        inner, outer = lock._stacks.get().pop(), lock._stacks.get().pop()
        for _ in range(2):  # once more changes nothing
            release_later(grant, inner.token)
            assert grant.state.depth == 1
            assert client.registry.grants() == [grant]
            assert grant.position in client.member.tickets
        release_later(grant, outer.token)
        assert not client.registry.grants()
        assert grant.position not in client.member.tickets


@contextlib.contextmanager
def asked_of(table):
    """Yield a coordinator whose calls go to the table, and an acquisition of ``r0`` that the test runs by hand."""
    with coordinator_of(table) as coordinator:
        client = coordinator.client
        terms = coordinator.mutex("r0").terms
        yield coordinator, Acquisition(client, terms, [Request("r0")], None, this_thread(), Grant, keep=[])


def test_rolled_back_acquire_holds_nothing():
    """As after an interrupt between its last step and its caller."""
    table = Table([True])
    with asked_of(table) as (coordinator, acquisition):
        client, holds = coordinator.client, acquisition._keep
        grant = effects.run_generator(acquisition.run(), table.perform)
        assert [hold.grant for hold in holds] == client.registry.grants() == [grant]
        with mock.patch.object(client, "notify_waiters") as nudge:
            effects.run_generator(acquisition.rollback(), table.perform)
        assert holds == client.registry.grants() == []
        assert table.rows == {}
        assert grant.position not in client.member.tickets
        nudge.assert_called_once_with("r0")


def test_rolled_back_acquire_publishes_its_end():
    """A listener that shows or counts grants gets both events or neither."""
    with asked_of(Table([True])) as (coordinator, acquisition):
        events = []
        for kind in ("granted", "released"):
            coordinator.on(kind, events.append)
        effects.run_generator(acquisition.run(), coordinator.client.execute_effect)
        for _ in range(2):
            effects.run_generator(acquisition.rollback(), coordinator.client.execute_effect)
        until(lambda: len(events) >= 2, "both events arrive")
        assert [event.name for event in events] == ["granted", "released"]


def test_rolled_back_acquire_is_not_cancelled_twice():
    table = Table([False] * 9, register=[False])
    with asked_of(table) as (coordinator, acquisition):
        running = acquisition.run()
        operation = next(running)
        while not isinstance(operation, effects.WaitFor):
            operation = running.send(coordinator.client.execute_effect(operation))
        for _ in range(2):
            effects.run_generator(acquisition.rollback(), table.perform)
        assert not coordinator.client.member._cleanup_requested, "nothing is left for the ping to remove"
    assert table.outcomes == ["cancelled"]


@pytest.mark.parametrize(("retry", "budget"), [(0.5, 0.5), (30.0, 1.0)])
def test_rollback_waits_briefly_for_the_database(retry, budget):
    """A caller that leaves with an error does not wait for a lost database: a heartbeat does the rest."""
    table = Table([True])
    with asked_of(table) as (_, acquisition):
        effects.run_generator(acquisition.run(), table.perform)
        acquisition.retry_timeout = retry
        effects.run_generator(acquisition.rollback(), table.perform)
    assert [call.retry_timeout for call in table.calls("cancel")] == [budget]


@pytest.mark.parametrize("closed", [False, True])
def test_failed_rollback_is_logged_and_left_to_heartbeat(closed, caplog):
    table = Table([True], troubles={1: (False, Disconnected("the cable"))})
    with asked_of(table) as (coordinator, acquisition):
        effects.run_generator(acquisition.run(), table.perform)
        with mock.patch.object(type(coordinator.client), "closed", closed):
            effects.run_generator(acquisition.rollback(), table.perform)
        assert coordinator.client.member._cleanup_requested
        coordinator.client.member._cleanup_requested = False
    warnings = ["Could not cancel a request at once; the next heartbeat does: the cable"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == (
        [] if closed else warnings
    )


@pytest.mark.parametrize("waits", [False, True])
def test_grant_is_logged_at_info_after_a_wait(waits, caplog):
    """A lock that was free is only logged at DEBUG."""
    caplog.set_level("INFO", "sqlsem")
    table = Table([False, True] if waits else [True], register=[False] if waits else [])
    assert had(table)
    assert any("granted" in record.getMessage().lower() for record in caplog.records) == waits


results = st.sampled_from([True, False, False, None, "no room"])


@given(
    requests=st.integers(1, 3),
    timeout=st.sampled_from([None, 0, 0.5, 4, 20]),
    answers=st.lists(results, max_size=8),
    register=st.lists(st.sampled_from([True, False, Busy]), max_size=3),
    place=st.integers(0, 12),
    after=st.booleans(),
    error=st.sampled_from([KeyboardInterrupt, SystemExit, GeneratorExit, Disconnected, MemoryError, sqlsem.Deadlock]),
)
def test_acquire_interrupted_once_leaves_no_row(requests, timeout, answers, register, place, after, error):
    """The operation cancels its request at most once, and does nothing after that."""
    table = Table(answers, {place: (after, error("now"))}, register)
    table.spared = ("cancel",)
    grant = None
    with contextlib.suppress(error, sqlsem.LockLost):
        grant = had(table, requests, timeout)
    assert sorted(table.rows) == sorted(grant.positions.values() if grant else ())
    if grant is not None:
        assert len(grant.positions) == requests
    cancels = table.calls("cancel")
    assert len(cancels) <= 1
    assert not cancels or table.done[-1] is cancels[0]


def test_errors_of_effects_reach_the_generator():
    def operation():
        try:
            yield effects.VerifyGrants()
        except ZeroDivisionError:
            return "mended"

    def perform(step):
        raise ZeroDivisionError

    assert effects.run_generator(operation(), perform) == "mended"


# -- both APIs, struck several times ----------------------------------------------------------------------------------


def threads_face(coordinator, table, requests, timeout):
    lock, error = lock_of(coordinator, requests), None
    keep = lock._stacks.get()
    try:
        lock.acquire(timeout=timeout)
    except BaseException as exc:
        error = exc
    yield keep, error
    if keep:
        try:
            keep[0].grant.release()
        except BaseException as exc:
            error = exc
    yield keep, error


def tasks_face(coordinator, table, requests, timeout):
    async def perform(operation):
        await asyncio.sleep(0)
        return table.perform(operation)

    keep = []

    async def acquire():
        driver = Driver.of(coordinator.client)
        driver.execute_effect = perform
        lock = lock_of(coordinator.aio, requests)
        try:
            await lock.acquire(timeout=timeout)
        finally:
            keep.extend(lock._stack())

    async def release():
        await keep[0].grant.release()

    async def outcome(coroutine):
        (result,) = await asyncio.gather(asyncio.ensure_future(coroutine), return_exceptions=True)
        return result if isinstance(result, BaseException) else None

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        error = loop.run_until_complete(outcome(acquire()))
        yield keep, error
        if keep:
            error = loop.run_until_complete(outcome(release()))
        yield keep, error
        loop.run_until_complete(loop.shutdown_asyncgens())


class Struck(BaseException):
    """As KeyboardInterrupt, but asyncio lets it pass."""


ERRORS = [Struck, Disconnected, Busy, MemoryError, sqlsem.Deadlock, asyncio.CancelledError]
places = st.dictionaries(
    st.integers(0, 8), st.tuples(st.booleans(), st.sampled_from(ERRORS).map(lambda error: error("now"))), max_size=3
)


@pytest.mark.parametrize("face", [threads_face, tasks_face])
@settings(max_examples=300)
@given(
    requests=st.integers(1, 3),
    timeout=st.sampled_from([None, 0, 3]),
    answers=st.lists(results, max_size=8),
    troubles=places,
)
def test_acquire_interrupted_at_any_effect_leaves_no_row(face, requests, timeout, answers, troubles):
    table = Table(answers, troubles)
    with coordinator_of(table) as coordinator:
        client, member = coordinator.client, coordinator.client.member
        stages = face(coordinator, table, requests, timeout)

        keep, error = next(stages)
        assert not member._pending_registrations
        assert not client.waiter_queues.waiters()
        known = [position for position in table.rows if position in member.tickets]
        if keep:
            assert error is None
            (grant,) = (hold.grant for hold in keep)
            assert sorted(table.rows) == sorted(grant.positions.values()) == sorted(member.tickets)
            assert client.registry.grants() == [grant]
        else:
            assert not known, "rows that no ping would remove"
            assert not member.tickets
            assert not client.registry.grants()
            assert not client.registry._by_caller
            if not table.calls("cancel"):
                # The call made no request, or its request was cancelled.
                assert not table.rows or error is not None
            elif not any(call in table.struck for call in table.calls("cancel")):
                assert not table.rows, "nothing hindered the removal"

        keep, error = next(stages)
        assert not client.registry.grants()
        assert not client.registry._by_caller
        late = {ticket.position for ticket in member._deferred_releases}
        assert not [row for row in table.rows if row in member.tickets and row not in late], "rows that no ping removes"
        if keep and error is None:
            assert set(table.rows) <= late
        with contextlib.suppress(StopIteration):
            next(stages)
