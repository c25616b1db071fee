"""The generator of an upgrade, interrupted everywhere: it is a reader afterwards, unless it says that it writes."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sqlsem
from sqlsem.core import steps as protocol
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.model import Ticket, Upgrading

TICKET = Ticket("prices", 7, "me", True)


class World:
    """One reader, a clock that moves with each wait, and troubles at chosen steps."""

    def __init__(self, begins=(), waits=(), troubles=()):
        self.access, self.clock = "read", 0.0
        self.begins, self.waits = iter(begins), iter(waits)
        self.troubles = dict(troubles)  # step number → (before or after its effect, error)
        self.steps = []

    def perform(self, step):
        number = len(self.steps)
        self.steps.append(step)
        after, error = self.troubles.get(number, (False, None))
        if isinstance(step, protocol.PutBack):
            error = None  # it must not fail
        if error is not None and not after:
            raise error
        result = self.effect(step)
        if error is not None:
            raise error
        return result

    def effect(self, step):
        if isinstance(step, protocol.Now):
            return self.clock
        assert step.ticket is TICKET
        if isinstance(step, protocol.PutBack):
            self.access = self.access and "read"
            return None
        if isinstance(step, protocol.Begin):
            stands = {"upgrade": Upgrading.BEGUN, "write": Upgrading.DONE}.get(self.access)
            begun = stands or next(self.begins, Upgrading.DONE)
            if begun is Busy:
                self.clock += 1
                raise Busy("locked")
            if begun is Upgrading.NOT_YET:
                self.clock += 0.1
            if begun is Upgrading.BEGUN and step.only_if_free:
                return Upgrading.NOT_YET
            self.access = {"it writes": "write", "it waits until it is alone": "upgrade"}.get(begun.value, self.access)
            return begun
        assert self.access == "upgrade"
        assert 0 < step.timeout <= protocol.SLICE
        self.clock += step.timeout
        alone = next(self.waits, True)
        self.access = {True: "write", False: "upgrade", None: None}[alone]
        return alone


def upgrade(world, timeout=None):
    return protocol.drive(protocol.upgrade(TICKET, timeout), world.perform)


def test_alone_at_once():
    world = World()
    assert upgrade(world) is True
    assert [type(step) for step in world.steps] == [protocol.Now, protocol.Begin]


def test_after_a_wait():
    world = World([Upgrading.NOT_YET, Upgrading.BEGUN], [False, False, True])
    assert upgrade(world) is True
    assert world.clock == pytest.approx(0.1 + 3 * protocol.SLICE)


def test_the_time_is_up():
    world = World([Upgrading.BEGUN], [False] * 9)
    assert upgrade(world, 10) is False
    assert world.access == "read"
    assert world.clock == 10


@pytest.mark.parametrize("begun", [Upgrading.NOT_YET, Busy])
def test_the_time_is_up_before_it_began(begun):
    world = World([begun] * 99)
    assert upgrade(world, 2) is False
    assert world.access == "read"


def test_a_try_asks_once():
    world = World([Upgrading.BEGUN])
    assert upgrade(world, 0) is False
    assert [type(step) for step in world.steps] == [protocol.Now, protocol.Begin, protocol.Now]
    assert upgrade(World(), 0) is True


@pytest.mark.parametrize(("begins", "waits"), [([Upgrading.GONE], []), ([Upgrading.BEGUN], [False, None])])
@pytest.mark.parametrize("timeout", [None, 0.0, 60.0])
def test_a_row_that_is_gone(begins, waits, timeout):
    if waits and timeout == 0:
        timeout = 5.0
    with pytest.raises(sqlsem.LockLost, match="7"):
        upgrade(World(begins, waits), timeout)


def test_another_one_upgrades():
    world = World(troubles={1: (False, sqlsem.Deadlock("already"))})
    with pytest.raises(sqlsem.Deadlock):
        upgrade(world)
    assert world.access == "read"


@settings(max_examples=1000)
@given(
    begins=st.lists(st.sampled_from([Upgrading.NOT_YET, Upgrading.BEGUN, Upgrading.DONE, Busy]), max_size=4),
    waits=st.lists(st.sampled_from([True, False, False]), max_size=6),
    timeout=st.sampled_from([None, 0, 0.05, 1, 5, 30]),
    number=st.integers(0, 25),
    after=st.booleans(),
    error=st.sampled_from(
        [KeyboardInterrupt(), Disconnected("gone"), Busy("locked"), sqlsem.Deadlock("knot"), GeneratorExit()]
    ),
)
def test_whatever_happens_in_between(begins, waits, timeout, number, after, error):
    world = World(begins, waits, {number: (after, error)})
    done = False
    with contextlib.suppress(type(error)):
        done = upgrade(world, timeout)
    assert world.access == ("write" if done else "read")
