"""A request reads only a part of the rows ahead of it, and the answer is that of the rule over all rows.

The part begins at any position here, not only at those that the engine remembers or finds: the statement must prove by
itself that the other rows do not matter.
"""

import contextlib
import itertools
import random
import threading
from types import SimpleNamespace

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from support.state_machines import DatabaseMachine, run_in_database

from sqlsem.engines.statements.admission import LAST
from sqlsem.values.errors import Deadlock
from sqlsem.values.locks import Request, Ticket, Upgrading

pytestmark = pytest.mark.engines("sqlite", "mysql")

NEVER = threading.Event()
SHARERS = [("read", 1, 1), ("stage:1", 1, 1), ("stage:2", 1, 1)]
WRITERS = [("write", 1, 1), ("write", 2, 1), ("write", 3, 2)]
#: Few kinds at a time: rows of all kinds block each other.
SCENES = [
    [("read", 1, 1)],
    [("read", 1, 1), ("read", 1, 1), ("write", 1, 1)],
    [("read", 3, 1), ("read", 2, 1), ("write", 3, 1), ("write", 2, 1)],
    [("read", 1, 1), ("read", 3, 2), ("read", None, 1), ("write", 3, 2)],
    [("stage:1", 1, 1), ("stage:2", 1, 1)],
    [*SHARERS, *WRITERS],
]
KINDS = sorted({*SHARERS, *WRITERS, *(kind for scene in SCENES for kind in scene)}, key=str)
picks = st.integers(0, 1000)


class Machine(DatabaseMachine):
    """One resource, and members whose rows come, are granted, converted, handed over, revoked and released."""

    @initialize(scene=st.sampled_from(SCENES), readers=st.sampled_from([0, 0, 3, 12]))
    def begin(self, scene, readers):
        self.resource = f"{self.name}-{next(self.examples)}"
        self.uids = itertools.count()
        self.member, self.session = self.join()
        self.others, self.other = self.join()
        self.session.set_resource(self.resource, "cap", 3)
        self.left = []  # positions of rows that have left
        self.scene = scene
        for _ in range(readers):
            self.register(0, 1, True)

    def teardown(self):
        if not hasattr(self, "session"):
            return
        for member, session in ((self.member, self.session), (self.others, self.other)):
            session.deregister_member(member)
            session.close()
        with contextlib.closing(self.database.session()) as session:
            for position, *_ in self.database.queue(self.resource):
                session.revoke(position, True)
            session.set_resource(self.resource, "paused", 0)
            session.set_resource(self.resource, "cap", None)

    def rows(self):
        return self.database.rows(
            "SELECT queue_position, access_type, concurrency_limit, weight, granted_at, requesting_id, member_id "
            "FROM {table} WHERE resource_id = ? ORDER BY queue_position",
            self.resource,
        )

    def pick(self, number, *, granted=False, converts=False):
        """Return the ticket of one of the rows, and its member, if there are any."""
        rows = [row for row in self.rows() if row[6] in (self.member, self.others) and (row[4] or not granted)]
        if converts:
            rows = [row for row in rows if row[1] in ("read", "write", "upgrade") and row[2] == 1]
        if not rows:
            return None, None
        row = rows[number % len(rows)]
        return Ticket(self.resource, row[0], row[5], row[4] is not None), row[6]

    def session_of(self, member):
        return self.session if member == self.member else self.other

    # -- rows come, change and leave

    @rule(number=picks, times=st.integers(1, 4), mine=st.booleans())
    def register(self, number, times, mine):
        session, member = (self.session, self.member) if mine else (self.other, self.others)
        request = Request(self.resource, *self.scene[number % len(self.scene)])
        for _ in range(times):
            session.register(member, "same", "owner", f"u{next(self.uids)}x", [request], False)

    @rule(number=picks)
    def release(self, number):
        ticket, member = self.pick(number)
        if ticket is not None:
            self.left.append(ticket.position)
            self.session_of(member).release(ticket, "released")

    @rule(number=picks)
    def wait(self, number):
        ticket, member = self.pick(number)
        if ticket is not None:
            self.session_of(member).wait(ticket, 0, NEVER)

    @rule(number=picks, only_if_free=st.booleans(), seed=picks)
    def begin_upgrade(self, number, only_if_free, seed):
        ticket, member = self.pick(number, granted=True, converts=True)
        if ticket is not None:
            with contextlib.suppress(Deadlock):
                self.session_of(member).begin_upgrade(ticket, only_if_free)
            self.answers_are_those_of_the_rule(random.Random(seed))

    @rule()
    def upgrade(self):
        for position, access, _, _, _, requesting_id, member in self.rows():
            if access == "upgrade":
                self.session_of(member).upgrade(Ticket(self.resource, position, requesting_id, True), 0, NEVER)

    @rule(number=picks)
    def downgrade(self, number):
        ticket, member = self.pick(number, granted=True, converts=True)
        if ticket is not None:
            self.session_of(member).downgrade(ticket)

    @rule(number=picks)
    def hand_over(self, number):
        ticket, member = self.pick(number, granted=True)
        if ticket is not None:
            self.session_of(member).hand_over(member, [ticket], f"token {next(self.uids)}", 600, None)

    @rule(number=picks, force=st.booleans())
    def revoke(self, number, force):
        ticket, _ = self.pick(number)
        if ticket is not None:
            self.session.revoke(ticket.position, force)

    @rule(paused=st.integers(0, 1))
    def pause(self, paused):
        self.session.set_resource(self.resource, "paused", paused)

    @rule(cap=st.integers(1, 3))
    def cap(self, cap):
        self.session.set_resource(self.resource, "cap", cap)

    @rule()
    def member_leaves(self):
        self.other.deregister_member(self.others)
        self.other.close()
        self.others, self.other = self.join()

    # -- the answers

    @rule(seed=picks)
    def ask(self, seed):
        self.answers_are_those_of_the_rule(random.Random(seed))

    def answers_are_those_of_the_rule(self, choices):
        rows, session = self.rows(), self.session
        (setting,) = [known for known in session.resources() if known.resource == self.resource] or [None]
        paused, cap = setting is not None and setting.paused, setting and setting.cap
        anywhere = [0, LAST - 1, *self.left[-5:], *(row[0] for row in rows)]
        real = type(session)._granted_before
        try:
            session._granted_before = lambda request, position: choices.choice(
                [real(session, request, position), choices.choice(anywhere) * request.shared]
            )
            for access, limit, weight in KINDS:
                request = Request(self.resource, access, limit, weight)
                free = {}
                for position in [*(row[0] for row in rows), LAST]:
                    ahead = [SimpleNamespace(access=r[1], limit=r[2], weight=r[3]) for r in rows if r[0] < position]
                    granted = any(row[0] == position and row[4] is not None for row in rows)
                    free[position] = not paused and request.fits(ahead, cap)
                    session._blockers = {(self.resource, access): choices.choice(anywhere)}
                    answer = session.admission(request, position)
                    if not answer.granted:
                        assert answer.allowed is free[position], (access, limit, position, rows)
                    assert not answer.granted or granted
                waiting = [row[0] for row in rows if row[1:4] == (access, limit, weight) and row[4] is None]
                if request.shared and limit == 1 and waiting:
                    positions = sorted(choices.sample(waiting, choices.randint(1, len(waiting))))
                    assert session.ready_sharers(request, positions) == [p for p in positions if free[p]]
        finally:
            del session._granted_before

    @invariant()
    def granted_sharers_prove_the_rows_ahead(self):
        """Ahead of a granted row with a shared access and a limit of 1, no row conflicts except an upgrading reader."""
        rows = self.rows()
        for position, access, limit, _, granted_at, *_ in rows:
            if granted_at is not None and access not in ("write", "upgrade") and limit == 1:
                assert {row[1] for row in rows if row[0] < position} <= {access, "upgrade"}, rows


def test_granted_reader_behind_an_upgrade_proves_nothing(database, name):
    with contextlib.closing(database.session()) as session:
        member = session.register_member("host", 1, "model")

        def register(uid, only_if_free=False):
            return session.register(member, "same", "owner", uid, [Request(name, "read")], only_if_free)

        (upgrading,), (granted,) = register("u1x"), register("u2x")
        assert session.begin_upgrade(upgrading, False) is Upgrading.BEGUN
        session._granted_before = lambda request, position: granted.position
        assert register("u3x", True) is None
        (waiting,) = register("u4x")
        assert not waiting.granted
        assert session.wait(waiting, 0, NEVER) is False
        # The upgrading reader becomes the writer after the granted row was found, and before the rows are read.
        assert session.release(granted, "released")
        assert session.upgrade(upgrading, 0, NEVER) is True
        session._blockers.clear()
        assert session.wait(waiting, 0, NEVER) is False
        assert session.poll(member, [waiting]) == {}
        assert session.downgrade(upgrading)
        assert session.wait(waiting, 0, NEVER) is True
        session.deregister_member(member)


def test_granted_reader_with_a_greater_limit_proves_nothing(database, name):
    """It may be granted beside a writer, and a reader with a limit of 1 behind it may not."""
    with contextlib.closing(database.session()) as session:
        member = session.register_member("host", 1, "model")
        for index, kind in enumerate([("write", 3, 1), ("read", 3, 1)]):
            (ticket,) = session.register(member, "same", "owner", f"u{index}x", [Request(name, *kind)], False)
            assert ticket.granted
        assert session.register(member, "same", "owner", "u2x", [Request(name, "read")], True) is None
        session._granted_before = lambda request, position: ticket.position
        assert session.register(member, "same", "owner", "u3x", [Request(name, "read")], True) is None
        session.deregister_member(member)


@pytest.mark.timeout(600)
def test_a_part_of_the_rows_decides_as_all_rows(database, name):
    examples = 40 if database.engine == "sqlite" else 8  # (a transaction takes longer on a server)
    run_in_database(Machine, database, name, max_examples=examples, stateful_step_count=25)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_part_of_the_rows_decides_as_all_rows_for_long(database, name):
    run_in_database(Machine, database, name, max_examples=1500, stateful_step_count=50, phases=list(Phase))
