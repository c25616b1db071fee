"""The generators as both faces drive them, with troubles and cancellations at every operation, against a small model.

The model is a table in memory: registering adds rows, cancelling and releasing remove them. Whatever strikes, either
the grant is had, with all its rows; or nothing is had, and no row is left but such as the next ping removes as unknown.
"""

import asyncio
import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sqlsem
from sqlsem.aio.driver import Driver
from sqlsem.coordinator import Coordinator
from sqlsem.core import steps as protocol
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.model import Request, Ticket


class Table:
    """What the main session and the waiting ones would find in the database."""

    def __init__(self, answers, troubles):
        self.rows = {}  # position → uid
        self.registered = {}  # uid → tickets
        self.numbers = itertools.count(1)
        self.answers = iter(answers)  # to waits and looks
        self.troubles = dict(troubles)  # number of the operation → (after its effect, error)
        self.done = []

    # -- a session

    def register(self, member_id, requesting_id, owner, uid, requests, only_if_free):
        found = self.registered.get(uid)
        if found is not None and all(ticket.position in self.rows for ticket in found):
            return found  # the answer to the first call was lost
        free = next(self.answers, True) is True
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

    def cancel(self, member_id, uid, outcome):
        gone = [position for position, owner in self.rows.items() if owner == uid]
        for position in gone:
            del self.rows[position]
        return len(gone)

    def release(self, ticket, outcome):
        return self.rows.pop(ticket.position, None) is not None

    # -- operations

    def perform(self, operation):
        after, error = self.troubles.get(len(self.done), (False, None))
        self.done.append(operation)
        if error is not None and not after:
            raise error
        result = self.effect(operation)
        if error is not None:
            raise error
        return result

    def effect(self, operation):
        if isinstance(operation, protocol.Call):
            return operation.call(self, 1)
        if isinstance(operation, protocol.WaitFor):
            answer = self.wait(operation.ticket, operation.timeout)
            return protocol.NO_ROOM if answer == "no room" else answer
        return False


def threads_face(coordinator, table, requests, timeout):
    coordinator.process.perform = table.perform
    lock, error = coordinator.all_of(*(coordinator.mutex(one.resource) for one in requests)), None
    keep = lock._stack()
    try:
        lock.acquire(timeout=timeout)
    except BaseException as exc:
        error = exc
    yield keep, error
    if keep:
        try:
            keep[0].release()
        except BaseException as exc:
            error = exc
    yield keep, error


def tasks_face(coordinator, table, requests, timeout):
    async def perform(operation):
        await asyncio.sleep(0)
        return table.perform(operation)

    keep = []

    async def acquire():
        driver = Driver.of(coordinator.process)
        driver.perform = perform
        lock = coordinator.aio.all_of(*(coordinator.aio.mutex(one.resource) for one in requests))
        try:
            await lock.acquire(timeout=timeout)
        finally:
            keep.extend(lock._stack())

    async def release():
        await keep[0].release()

    async def outcome(coroutine):
        (found,) = await asyncio.gather(asyncio.ensure_future(coroutine), return_exceptions=True)
        return found if isinstance(found, BaseException) else None

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
@settings(deadline=None, max_examples=300)
@given(
    requests=st.integers(1, 3),
    timeout=st.sampled_from([None, 0]),
    answers=st.lists(st.sampled_from([True, False, False, None, "no room"]), max_size=8),
    troubles=places,
)
def test_struck_at_every_operation(face, requests, timeout, answers, troubles):
    table = Table(answers, troubles)
    coordinator = Coordinator("sqlite:////nowhere/at/all.db", retry=0.5)
    process, member = coordinator.process, coordinator.process.member
    steps = face(coordinator, table, [Request(f"r{number}") for number in range(requests)], timeout)

    keep, error = next(steps)
    assert not member._limbo
    assert not process.waiting_room.waiters()
    known = [position for position in table.rows if position in member.tickets]
    if keep:
        assert error is None
        (grant,) = keep
        assert sorted(table.rows) == sorted(grant.positions.values()) == sorted(member.tickets)
        assert process.holdings.grants() == [grant]
    else:
        assert not known, "rows that no ping would remove"
        assert not member.tickets
        assert not process.holdings.grants()
        assert not process.holdings._by_caller
        if not any(isinstance(operation, protocol.Call) and operation.what == "cancel" for operation in table.done):
            # Nothing was asked for, or it came to nothing.
            assert not table.rows or error is not None
        elif len(troubles) <= 1:
            assert not table.rows, "nothing hindered the removal"

    keep, error = next(steps)
    assert not process.holdings.grants()
    assert not process.holdings._by_caller
    late = {ticket.position for ticket in member._late}
    assert not [one for one in table.rows if one in member.tickets and one not in late], "rows that no ping removes"
    if keep and error is None:
        assert set(table.rows) <= late
    with contextlib.suppress(StopIteration):
        next(steps)
    member.tickets.clear()
    coordinator.close()
