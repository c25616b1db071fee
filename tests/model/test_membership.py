"""No member trusts its grants while the server may grant others: members of all kinds, over a model of the server.

The real `Membership`, without its threads, talks to a server of a few numbers: the time of the member's last heartbeat,
and whether the member's session lives. Calls take time, and fail before or after their effect; connections break at
once or linger. The invariant: while a member trusts a grant, the server grants no conflicting request.
"""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.state_machines import run_machine

from sqlsem.client.connection.main import FRESH
from sqlsem.client.connection.membership import Membership
from sqlsem.engines.base import Busy, Disconnected, Options
from sqlsem.util import runtime
from sqlsem.values.locks import Heartbeat, Ticket

LIFE = 8.0


class Server:
    """One member's part of a database. A heartbeat is identified by its time."""

    def __init__(self, leased, life):
        self.leased, self.life = leased, life
        self.now = 0.0
        self.number = 0  # of the present member
        self.sign = 0.0
        self.session = None  # the session that holds the beacon
        self.sessions = set()  # the living sessions
        self.row = False
        self.revoked = None  # the time of an operator's revocation

    def taken(self):
        """True if the grace after a revocation is over: then the next poll of any client removes the row."""
        return self.revoked is not None and self.now >= self.revoked + self.life

    def dead(self):
        if self.number == 0:
            return True
        over = self.now >= self.sign + self.life
        return over and (self.leased or self.session not in self.sessions)

    def look(self):
        """Poll as another client, and remove the rows of a dead member."""
        if self.number and self.dead():
            self.number = 0
        if not self.number or self.taken():
            self.row, self.revoked = False, None


class Session:
    """A connection to it, with planned troubles: the durations of calls, and their failures."""

    usable = True

    def recover(self):
        """Do nothing: no transaction can be left open here."""

    def require_in_place(self):
        """Do nothing: the server has not moved."""

    def __init__(self, machine):
        self.machine, self.server = machine, machine.server
        self.server.sessions.add(self)

    def _call(self, effect):
        before, after, trouble = self.machine.next_call()
        self.machine.pass_time(before)
        if trouble == "before" or self not in self.server.sessions:
            self._break()
        if trouble == "busy":
            raise Busy("the gate is stuck")
        answer = effect()
        self.machine.pass_time(after)
        if trouble == "after":
            self._break()
        return answer

    def _break(self):
        self.usable = False
        raise Disconnected("the line is cut")

    def _given_up(self, number):
        if number != self.server.number:
            self.usable = False
            raise Disconnected("given up")

    def check_schema(self):
        return {}

    def register_member(self, host, pid, program):
        def effect():
            self.server.number = next(self.machine.numbers)
            self.server.sign, self.server.session = self.server.now, self
            self.server.row, self.server.revoked = False, None
            return self.server.number

        return self._call(effect)

    def reattach_member(self, number):
        def effect():
            if number != self.server.number:
                return False
            self.server.sign, self.server.session = self.server.now, self
            return True

        return self._call(effect)

    def heartbeat(self, number):
        def effect():
            if number != self.server.number:
                return Heartbeat(False)
            self.server.sign = self.server.now
            positions = frozenset([1] if self.server.row else [])
            return Heartbeat(True, positions, positions if self.server.revoked is not None else frozenset())

        return self._call(effect)

    def release(self, ticket, outcome):
        def effect():
            self.server.row, self.server.revoked = False, None

        return self._call(effect)

    def register(self, number, resource="r"):
        def effect():
            self._given_up(number)
            if self.server.now - self.server.sign > self.server.life * FRESH:
                self.server.sign = self.server.now
            if resource == "r":
                self.server.row, self.server.revoked = True, None

        return self._call(effect)

    def look(self, number):
        return self._call(lambda: None)

    def entries(self, resource):
        return []

    def close(self):
        if not self.machine.linger:
            self.server.sessions.discard(self)


class Machine(RuleBasedStateMachine):
    leased, life = False, LIFE

    @property
    def holding(self):
        return bool(self.member.held[-1])

    @holding.setter
    def holding(self, holds):
        self.member.held[:] = [["a grant"] if holds else []]

    @initialize()
    def begin(self):
        self.server = Server(self.leased, self.life)
        self.numbers = itertools.count(1)
        self.calls: list[tuple[float, float, str]] = []
        self.linger = False
        self.watched = True
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(runtime.THREADS, "monotonic", lambda: 1000.0 + self.server.now)
        engine = SimpleNamespace(
            options=Options(grace=self.life, lease=self.life if self.leased else None),
            beacon_may_fail=True,
            has_other_servers=False,
            idle_heartbeat=60.0,
            has=lambda role: False,
            setup=None,
            label="the model",
            connect=lambda purpose: Session(self),
        )
        self.member = Membership(engine, self, retry=1.0)
        self.holding = False
        none = SimpleNamespace(begin=lambda: None, runs=True)
        self.member.heartbeat_thread = self.member.watchdog = none  # no threads of its own: see `pass_time`

    # -- the membership's calls of its owner

    def mark_lost(self, positions, why):
        self.holding = False
        return []

    def interrupt_overdue(self):
        pass

    def calls_to_repeat(self):
        return ()

    def wake_waiters(self, positions):
        pass

    def clean_up(self):
        pass

    # -- time

    def next_call(self):
        return self.calls.pop() if self.calls else (0.0, 0.0, "")

    def pass_time(self, seconds):
        """Run the watchdog whenever it is due, as its thread does; other clients poll the server all the time."""
        end = self.server.now + seconds
        while True:
            due = self.member._seconds_until_uncertain()
            if due <= 0 and self.holding:
                self.member._mark_lost_and_interrupt()
                continue
            self.server.now = min(end, self.server.now + max(due, 0.001))
            self.safe()
            if self.server.now >= end:
                return

    def safe(self):
        if self.holding:
            assert not self.server.dead(), "it trusts its grant while others are granted"
            assert not self.server.taken(), "it did not learn of the loss in time, and others are granted"

    @rule(seconds=st.sampled_from([0.1, LIFE / 10, LIFE / 3, LIFE, 3 * LIFE]))
    def time_passes(self, seconds):
        self.pass_time(seconds)

    @rule()
    def somebody_looks(self):
        self.server.look()

    @precondition(lambda self: self.server.row and self.server.revoked is None)
    @rule()
    def an_operator_wants_it_back(self):
        self.server.revoked = self.server.now

    @rule(linger=st.booleans())
    def the_line_breaks(self, linger):
        self.linger = linger
        if not linger:
            self.server.sessions.clear()

    # -- the member's actions

    def call(self, call_name, troubles, **options):
        self.calls = list(troubles)
        try:
            self.member.main.try_once(call_name, **options)
        except (Disconnected, Busy):
            return False
        finally:
            self.calls = []
        return True

    TROUBLES = st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.5, LIFE / 3]),
            st.sampled_from([0.0, 0.0, 0.5, LIFE / 3]),
            st.sampled_from(["", "", "", "before", "after", "busy"]),
        ),
        max_size=3,
    )

    @rule(troubles=TROUBLES)
    def pings(self, troubles):
        self.call(self.member._compare, troubles)

    @rule(troubles=TROUBLES)
    def asks_something_else(self, troubles):
        self.call(lambda session, number: session.look(number), troubles)

    @precondition(lambda self: not self.holding and not self.member.tickets)
    @rule(troubles=TROUBLES, at_once=st.booleans())
    def takes_a_lock(self, troubles, at_once):
        def register(session, number):
            session.register(number)
            self.member.add([Ticket("r", 1, "me", True)])
            return True

        if self.call(register, troubles, counts_as_heartbeat=True) and at_once:
            self.has_it()

    @precondition(lambda self: not self.holding and self.member.tickets)
    @rule()
    def has_it(self):
        """Accept a grant late, as after a wait for a second lock, or a suspended thread."""
        self.holding = True
        # As an acquisition does before it returns the grant.
        if self.member.is_uncertain():
            self.member._mark_lost_and_interrupt()
        self.holding = bool(self.member.tickets)
        self.safe()

    @rule(troubles=TROUBLES)
    def takes_another_lock(self, troubles):
        self.call(lambda session, number: session.register(number, "another"), troubles, counts_as_heartbeat=True)

    @precondition(lambda self: self.holding)
    @rule()
    def gives_it_back(self):
        self.holding = self.server.row = False
        self.server.revoked = None
        self.member.tickets.clear()

    @invariant()
    def nobody_believes_what_is_not_so(self):
        self.safe()

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()


KINDS = {"beacon": {"leased": False}, "lease": {"leased": True}, "short lease": {"leased": True, "life": 1.0}}


def run(kind, **options):
    run_machine(type("Machine", (Machine,), KINDS[kind]), **{"phases": list(Phase), **options})


@pytest.mark.kept
@pytest.mark.parametrize("kind", KINDS)
def test_no_member_trusts_a_grant_past_its_expiry(kind):
    run(kind, max_examples=120, stateful_step_count=30)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_no_member_trusts_an_expired_grant_for_long(kind):
    run(kind, max_examples=20000, stateful_step_count=50)


class EveryCallProves(Membership):
    """A mutant, an earlier version: each successful call counts as a heartbeat."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        attempt = self.main._attempt
        self.main._attempt = lambda call, sign: attempt(call, True)


class NothingIsFresh(Membership):
    """A mutant: every grant counts as a heartbeat."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.main._fresh = 0.0


class EverySignProves(Membership):
    """A mutant: a heartbeat, or a new session, proves that held rows still exist."""

    def has_any(self):
        return False


class OnlyTheBooksCount(Membership):
    """A mutant: assumes that no granted row can be removed before its grant is recorded."""

    def has_any(self):
        return any(self.held)


class ProvenAtItsEnd(Membership):
    """A mutant: a heartbeat counts from the arrival of its answer."""

    def record_heartbeat(self, since):
        super().record_heartbeat(self.clock())


@pytest.mark.parametrize("wrong", [EveryCallProves, NothingIsFresh, EverySignProves, OnlyTheBooksCount, ProvenAtItsEnd])
def test_model_finds_seeded_faults(wrong, monkeypatch):
    monkeypatch.setattr(f"{__name__}.Membership", wrong)
    # With a smaller margin than the real one, which would hide some of the mutants.
    real = wrong.__init__

    def bare(self, *arguments, **options):
        real(self, *arguments, **options)
        self.trust = self._certain = LIFE

    monkeypatch.setattr(wrong, "__init__", bare)
    with pytest.raises(AssertionError, match="others are granted"):
        run(
            "lease",
            max_examples=1000,
            stateful_step_count=30,
            database=None,
            derandomize=True,
            print_blob=False,
            phases=[Phase.generate],  # no reader needs the smallest example
        )
