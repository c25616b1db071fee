"""The generators of `sqlsem.protocol`, interrupted everywhere: no row may be left behind."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sqlsem
from sqlsem.core import steps as protocol
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.model import Request, Ticket


class World:
    """A database in memory, a clock that moves with each wait, and troubles at chosen steps."""

    def __init__(self, waits=(), troubles=(), register=()):
        self.rows = {}
        self.clock = 0.0
        self.numbers = itertools.count(1)
        self.waits = iter(waits)
        self.register_results = iter(register)
        self.troubles = dict(troubles)  # step number → (before or after its effect, error)
        self.steps = []

    def perform(self, step):
        number = len(self.steps)
        self.steps.append(step)
        after, error = self.troubles.get(number, (False, None))
        if error is not None and not after and not isinstance(step, protocol.Cancel):
            raise error
        result = self.effect(step)
        if error is not None and not isinstance(step, protocol.Cancel):
            raise error
        return result

    def effect(self, step):
        if isinstance(step, protocol.Now):
            return self.clock
        if isinstance(step, protocol.Register):
            granted = next(self.register_results, None)
            if granted is Busy:
                self.clock += 1
                raise Busy("locked")
            if step.only_if_free and granted is not True:
                return None
            found = []
            for request in step.requests:
                position = next(self.numbers)
                self.rows[position] = step.uid
                found.append(Ticket(request.resource, position, "me", bool(granted)))
            return found
        if isinstance(step, protocol.Wait):
            assert 0 < step.timeout <= protocol.SLICE
            assert step.ticket.position in self.rows
            self.clock += step.timeout
            result = next(self.waits, True)
            if result is None:
                del self.rows[step.ticket.position]
            return result
        self.rows = {position: uid for position, uid in self.rows.items() if uid != step.uid}
        return None


def acquire(world, requests=1, timeout=None):
    asked = [Request(f"r{number}") for number in range(requests)]
    return protocol.drive(protocol.acquire(asked, "uid", timeout), world.perform)


def test_granted_at_once():
    world = World(register=[True])
    (ticket,) = acquire(world)
    assert ticket.granted
    assert list(world.rows) == [ticket.position]
    assert [type(step) for step in world.steps] == [protocol.Now, protocol.Register]


def test_granted_after_waiting():
    world = World(waits=[False, False, True])
    (ticket,) = acquire(world)
    assert list(world.rows) == [ticket.position]
    assert world.steps[-1] == protocol.Wait(ticket, protocol.SLICE)


def test_a_timeout_is_kept_and_leaves_nothing():
    world = World(waits=[False] * 10)
    assert acquire(world, timeout=7) is None
    assert world.rows == {}
    assert world.clock == 7
    assert world.steps[-1] == protocol.Cancel("uid", "timeout")


def test_the_timeout_is_for_all_together():
    world = World(waits=[True, False, False, False])
    assert acquire(world, requests=2, timeout=4) is None
    assert world.rows == {}
    assert world.clock == 4


def test_trying():
    world = World()
    assert acquire(world, timeout=0) is None
    assert world.rows == {}
    assert world.steps[-1].only_if_free
    world = World(register=[True])
    assert acquire(world, timeout=0)
    assert len(world.rows) == 1


def test_a_row_taken_away():
    world = World(waits=[False, None])
    with pytest.raises(sqlsem.LockLost) as caught:
        acquire(world, requests=2)
    assert caught.value.resource == "r0"
    assert world.rows == {}, "the rows of the others go as well"


def test_a_busy_gate_is_waited_for():
    world = World(register=[Busy, Busy, True])
    assert acquire(world)
    world = World(register=[Busy] * 10)
    assert acquire(world, timeout=2.5) is None
    assert world.clock == 3


ERRORS = [KeyboardInterrupt, SystemExit, GeneratorExit, Disconnected, MemoryError, sqlsem.Deadlock]
results = st.sampled_from([True, False, False, None])


@given(
    requests=st.integers(1, 3),
    timeout=st.sampled_from([None, 0, 0.5, 4, 20]),
    waits=st.lists(results, max_size=8),
    register=st.lists(st.sampled_from([True, False, Busy]), max_size=3),
    place=st.integers(0, 12),
    after=st.booleans(),
    error=st.sampled_from(ERRORS),
)
def test_interrupted_anywhere_no_row_is_left(requests, timeout, waits, register, place, after, error):
    world = World(waits, {place: (after, error("now"))}, register)
    tickets = None
    with contextlib.suppress(error, sqlsem.LockLost):
        tickets = acquire(world, requests, timeout)
    assert sorted(world.rows) == sorted(ticket.position for ticket in tickets or ())
    if tickets is not None:
        assert len(tickets) == requests


@given(waits=st.lists(results, max_size=8), stop=st.integers(0, 8))
def test_one_cancel_at_most(waits, stop):
    world = World(waits, {stop: (True, KeyboardInterrupt())})
    with contextlib.suppress(KeyboardInterrupt, sqlsem.LockLost):
        acquire(world, 2)
    cancels = [step for step in world.steps if isinstance(step, protocol.Cancel)]
    assert len(cancels) <= 1
    assert not cancels or world.steps[-1] is cancels[0]


def test_drive_passes_on_what_perform_raises():
    def steps():
        try:
            yield protocol.Now()
        except ZeroDivisionError:
            return "mended"

    def perform(step):
        raise ZeroDivisionError

    assert protocol.drive(steps(), perform) == "mended"
