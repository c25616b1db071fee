"""An upgrade, interrupted at every effect: its grant is a read lock afterwards, unless the call returned True."""

import contextlib
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.troubles import Troubled

import sqlsem
from sqlsem.api.coordinator import Coordinator
from sqlsem.client import effects
from sqlsem.client.callers import this_thread
from sqlsem.client.held.registry import BaseGrant, GrantState
from sqlsem.client.operations.convert import Upgrade
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.util.timing import DEFAULT
from sqlsem.values.locks import READ, WRITE, Request, Ticket, Upgrading

TICKET = Ticket("prices", 7, "me", True)


class World(Troubled):
    """One reader."""

    spared = ("downgrade",)  # its error is raised later

    def __init__(self, begins=(), waits=(), troubles=()):
        super().__init__(troubles)
        self.access = "read"
        self.begins, self.waits = iter(begins), iter(waits)

    # -- a session

    def begin_upgrade(self, ticket, only_if_free):
        assert ticket is TICKET
        stands = {"upgrade": Upgrading.BEGUN, "write": Upgrading.DONE}.get(self.access)
        begun = stands or next(self.begins, Upgrading.DONE)
        if begun is Busy:
            self.clock += 1
            raise Busy("locked")
        if begun is Upgrading.BEGUN and only_if_free:
            return Upgrading.NOT_YET
        self.access = {"it is the writer": "write", "it waits until it is the only holder": "upgrade"}.get(
            begun.value, self.access
        )
        return begun

    def upgrade(self, ticket, timeout, nudge):
        assert ticket is TICKET
        if self.access != "upgrade":  # the answer to an earlier one was lost
            return self.access and self.access == "write"
        self.clock += timeout
        alone = next(self.waits, True)
        self.access = {True: "write", False: "upgrade", None: None}[alone]
        return alone

    def downgrade(self, ticket):
        assert ticket is TICKET
        self.access = self.access and "read"
        return self.access is not None

    # -- operations

    def effect(self, operation):
        if isinstance(operation, effects.Call):
            return operation.call(self, 1)
        assert 0 < operation.timeout <= DEFAULT.slice
        if isinstance(operation, effects.WaitFor):
            assert operation.upgrade
            return self.upgrade(operation.ticket, operation.timeout, None)
        self.clock += operation.timeout
        return False


def upgrade(world, timeout=None):
    """Return True if the grant writes, False after a timeout. Database and grant must agree."""
    coordinator = Coordinator("sqlite:////dev/null/all.db", retry=0.5)
    client = coordinator.client
    client.clock = world.now
    client.member.tickets[TICKET.position] = TICKET
    state = GrantState(client.registry, [Request("prices", READ)], [TICKET], this_thread(), None, 0.0)
    client.registry.add(BaseGrant(client, state, 0.0))
    try:
        effects.run_operation(Upgrade(client, state, timeout, threading.Event()), world.perform)
    except sqlsem.Timeout:
        return False
    else:
        return True
    finally:
        assert world.access in (None, state.requests[0].access)
        assert not state.converting
        coordinator.close()


def test_lone_upgrade_is_done_at_once():
    world = World()
    assert upgrade(world) is True
    assert [operation.what for operation in world.done] == ["upgrade"]


def test_upgrade_is_done_after_a_wait():
    world = World([Upgrading.NOT_YET, Upgrading.BEGUN], [False, False, True])
    assert upgrade(world, 60) is True
    kinds = [type(operation) for operation in world.done]
    assert kinds == [effects.Call, effects.Sleep, *[effects.Call, effects.WaitFor] * 3]


def test_timed_out_upgrade_is_rolled_back():
    world = World([Upgrading.BEGUN], [False] * 90)
    assert upgrade(world, 10) is False
    assert world.access == "read"
    assert world.clock == 10


@pytest.mark.parametrize("begun", [Upgrading.NOT_YET, Busy])
def test_expired_upgrade_remains_a_reader(begun):
    world = World([begun] * 999)
    assert upgrade(world, 2) is False
    assert world.access == "read"


def test_upgrade_try_asks_once():
    world = World([Upgrading.BEGUN])
    assert upgrade(world, 0) is False
    assert [operation.what for operation in world.done] == ["upgrade"]
    assert upgrade(World(), 0) is True


@pytest.mark.parametrize(("begins", "waits"), [([Upgrading.GONE], []), ([Upgrading.BEGUN], [False, None])])
@pytest.mark.parametrize("timeout", [None, 0.0, 60.0])
def test_upgrade_of_a_removed_row_raises_lock_lost(begins, waits, timeout):
    if waits and timeout == 0:
        timeout = 5.0
    with pytest.raises(sqlsem.LockLost, match="7"):
        upgrade(World(begins, waits), timeout)


def test_upgrade_beside_another_upgrade():
    world = World(troubles={0: (False, sqlsem.Deadlock("already"))})
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
def test_upgrade_survives_any_event_in_between(begins, waits, timeout, number, after, error):
    world = World(begins, waits, {number: (after, error)})
    done = False
    with contextlib.suppress(type(error)):
        done = upgrade(world, timeout)
    assert world.access == (WRITE if done else READ)
