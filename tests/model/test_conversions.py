"""Readers, writers, upgrades and downgrades, checked against a model of them."""

import itertools
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from support import until
from support.state_machines import DatabaseMachine, run_in_database

from sqlsem.values.errors import Deadlock
from sqlsem.values.locks import Request, Ticket, Upgrading

NEVER = threading.Event()
SLOTS = 3


@dataclass
class Row:
    position: int
    access: str
    slot: int | None  # the member that owns it; None: a bare participant
    ticket: Ticket
    granted: bool = False
    told: bool = False  # True once its owner knows of the grant
    was_free: bool = False  # True once the rule has allowed it to proceed


@dataclass
class Model:
    """The expected queue."""

    rows: list[Row] = field(default_factory=list)
    paused: bool = False

    def fits(self, row: Row) -> bool:
        """True if no row ahead conflicts."""
        return not any(
            other.position < row.position and (row.access == "write" or other.access != row.access)
            for other in self.rows
        )

    def others_inside(self, row: Row) -> list[Row]:
        return [entry for entry in self.rows if entry is not row and (entry.position < row.position or entry.granted)]

    def upgrade(self, row: Row, only_if_free: bool) -> bool | None:
        if not row.granted:
            return None
        if row.access == "write":
            return True
        if row.access == "read":
            if any(entry.access == "upgrade" for entry in self.rows if entry is not row):
                raise Deadlock
            free = [
                entry
                for entry in self.rows
                if entry.position > row.position and entry.access == "read" and not entry.granted and self.fits(entry)
            ]
            if free or self.others_inside(row):
                if not only_if_free and not (free and self.paused):
                    for waiter in free:
                        waiter.granted = True
                    row.access = "upgrade"
                return False
        elif self.others_inside(row):
            return False
        row.access = "write"
        return True


class Machine(DatabaseMachine):
    @initialize()
    def begin(self):
        self.resource = f"{self.name}-{next(self.examples)}"
        self.model = Model()
        self.operator = self.database.session(grace=0)
        self.bare = self.database.raw()
        self.uids = itertools.count(1)
        self.fences = []
        self.members = [self.join() for slot in range(SLOTS)]

    def pick(self, data, *accesses, granted=None, bare=False):
        rows = [
            row
            for row in self.model.rows
            if (row.slot is None) == bare and row.access in accesses and granted in (None, row.granted)
        ]
        return data.draw(st.sampled_from(rows)) if rows else None

    def tell(self, row):
        """Record that the owner knows of the grant."""
        assert row.granted
        if not row.told and row.access == "write":
            self.fences.append(row.position)
        row.told = True

    def note_grants(self):
        """Take over the grants of a release. (On SQLite it grants waiters; on PostgreSQL their next poll does.)"""
        holding = {entry.position for entry in self.operator.entries(self.resource) if entry.state == "holds"}
        for row in self.model.rows:
            if row.slot is not None and row.position in holding and not row.granted:
                assert self.model.fits(row), row
                assert not self.model.paused
                row.granted = True

    # -- members

    @rule(slot=st.integers(0, SLOTS - 1), access=st.sampled_from(["read", "read", "read", "write"]), only=st.booleans())
    def ask(self, slot, access, only):
        member, session = self.members[slot]
        uid = f"{self.resource}.{next(self.uids)}"
        tickets = session.register(member, uid, "model", uid, [Request(self.resource, access)], only)
        row = Row(2**62, access, slot, Ticket("", 0, "", False))
        free = self.model.fits(row) and not self.model.paused
        if only and not free:
            assert tickets is None
            return
        row.ticket, row.position, row.granted = tickets[0], tickets[0].position, free
        assert tickets[0].granted == free
        assert all(entry.position < row.position for entry in self.model.rows)
        self.model.rows.append(row)
        if free:
            self.tell(row)

    @rule(data=st.data())
    def look(self, data):
        row = self.pick(data, "read", "write")
        if row is None:
            return
        row.granted = row.granted or (self.model.fits(row) and not self.model.paused)
        assert self.members[row.slot][1].wait(row.ticket, 0, NEVER) is row.granted
        if row.granted:
            self.tell(row)

    @rule(data=st.data())
    def leave(self, data):
        row = self.pick(data, "read", "write", "upgrade")
        if row is not None:
            assert self.members[row.slot][1].release(row.ticket, "released") is True
            self.model.rows.remove(row)
            self.note_grants()

    @rule(data=st.data(), only=st.sampled_from([False, False, False, True]), repeat=st.booleans())
    def upgrade(self, data, only, repeat):
        row = self.pick(data, "read", "upgrade", "write")
        if row is None or (row.access == "upgrade" and only):
            return
        session = self.members[row.slot][1]
        for _ in range(1 + repeat):
            wrote = row.access == "write"
            try:
                expected = self.model.upgrade(row, only)
            except Deadlock:
                with pytest.raises(Deadlock):
                    session.begin_upgrade(row.ticket, only)
                return
            begun = session.begin_upgrade(row.ticket, only)
            done = {Upgrading.DONE: True, Upgrading.GONE: None}.get(begun, False)
            if begun is Upgrading.BEGUN:
                done = session.upgrade(row.ticket, 0.0, NEVER)
            assert done is expected
            if expected and not wrote:
                assert [entry for entry in self.model.rows if entry.told and entry is not row] == [], (
                    "another row is granted"
                )
                self.fences.append(row.position)
                row.told = True

    @rule(data=st.data(), repeat=st.booleans())
    def downgrade(self, data, repeat):
        """Also what follows when the time for an upgrade is up."""
        row = self.pick(data, "read", "write", "upgrade")
        if row is None:
            return
        for _ in range(1 + repeat):
            assert self.members[row.slot][1].downgrade(row.ticket) is row.granted
        if row.granted:
            row.access = "read"

    @rule(slot=st.integers(0, SLOTS - 1), leaves=st.booleans())
    def a_member_goes(self, slot, leaves):
        member, session = self.members[slot]
        if leaves:
            session.deregister_member(member)
        session.close()
        self.model.rows = [entry for entry in self.model.rows if entry.slot != slot]
        self.members[slot] = self.join()
        # Its session ends a moment after its client.
        positions = {entry.position for entry in self.model.rows}
        until(lambda: self.operator.reap() >= 0 and {row[0] for row in self.database.queue(self.resource)} <= positions)

    # -- operators and bare participants

    @rule(access=st.sampled_from(["read", "write"]))
    def insert_bare(self, access):
        position = self.database.insert_bare(
            self.bare.cursor(), self.resource, f"bare {next(self.uids)}", access_type=access, concurrency_limit=1
        )
        self.model.rows.append(Row(position, access, None, Ticket(self.resource, position, "", False)))

    @rule(data=st.data())
    def delete_bare(self, data):
        row = self.pick(data, "read", "write", bare=True)
        if row is not None:
            text = self.database.sql("DELETE FROM {table} WHERE resource_id = ? AND queue_position = ?")
            self.bare.cursor().execute(text, (self.resource, row.position))
            self.model.rows.remove(row)

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.operator.set_resource(self.resource, "paused", int(paused))
        self.model.paused = paused

    @rule(data=st.data())
    def revoke(self, data):
        row = self.pick(data, "read", "write", "upgrade")
        if row is not None:
            assert self.operator.revoke(row.position, True) == 0
            session = self.members[row.slot][1]
            self.model.rows.remove(row)
            assert session.begin_upgrade(row.ticket, False) is Upgrading.GONE
            assert session.upgrade(row.ticket, 0.0, NEVER) is None
            assert session.downgrade(row.ticket) is False

    @rule()
    def the_living_are_left_alone(self):
        self.operator.reap()  # the queue is still the model's: see below

    # -- invariants

    def holds(self, row):
        """As `entries` has it: bare rows hold when they may."""
        return row.granted or (row.slot is None and self.model.fits(row) and not self.model.paused)

    @invariant()
    def the_queue_is_the_models(self):
        shown = [(entry.position, entry.access, entry.state) for entry in self.operator.entries(self.resource)]
        rows = self.model.rows
        assert shown == [(row.position, row.access, "holds" if self.holds(row) else "waits") for row in rows]

    @invariant()
    def nobody_is_beside_a_writer(self):
        inside = [row for row in self.model.rows if row.told or self.holds(row)]
        assert len(inside) <= 1 or not any(holder.access == "write" for holder in inside)
        assert sum(holder.access == "upgrade" for holder in inside) <= 1

    @invariant()
    def once_true_it_stays_true(self):
        for row in self.model.rows:
            row.was_free = row.was_free or row.granted or self.model.fits(row)
            assert not row.was_free or row.granted or self.model.fits(row), row

    @invariant()
    def fences_never_fall(self):
        assert self.fences == sorted(self.fences)

    def teardown(self):
        if not hasattr(self, "operator"):
            return
        self.operator.set_resource(self.resource, "paused", 0)
        text = self.database.sql("DELETE FROM {table} WHERE resource_id = ? AND queue_position = ?")
        for row in self.model.rows:
            if row.slot is None:
                self.bare.cursor().execute(text, (self.resource, row.position))
        for member, session in self.members:
            session.deregister_member(member)
            session.close()
        assert self.database.queue(self.resource) == []
        self.bare.close()
        self.operator.close()


# SQL Server converts in several transactions, so other sessions see states in between; its tests are in tests/tsql.


@pytest.mark.timeout(600)
@pytest.mark.engines("sqlite", "postgresql", "mysql")
def test_the_engine_follows_the_model(database, name):
    run_in_database(Machine, database, name, max_examples=25, stateful_step_count=40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.engines("sqlite", "postgresql", "mysql")
def test_the_engine_follows_the_model_for_long(database, name):
    run_in_database(Machine, database, name, max_examples=1500, stateful_step_count=60, phases=list(Phase))
