"""Run programs on a real SQLite file, in virtual time: the search finds nothing, except for seeded bugs."""

import pytest
from support.searches import FOUND, found

from sqlsem.client.connection.membership import Membership
from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.locks import LAST, Admission, SqliteLocks
from sqlsem.engines.sqlite.members import SqliteMembers
from sqlsem.testing import simulate as simulation
from sqlsem.testing.files import FileServer
from sqlsem.testing.simulate import converting, mixed, rated, simulate, travelling
from sqlsem.values.locks import Ticket

KINDS = {
    "beacons": {},
    "leases": {"lease": 6.0},
    "conversions": {"program": converting},
    "hand-overs": {"program": travelling},
    "rates": {"program": rated},
    "threads": {"program": travelling, "threads": 2, "processes": 2},
}
BUGS = {}


def bug(**options):
    def note(put_in):
        BUGS[put_in.__name__] = (put_in, options)
        return put_in

    return note


@pytest.mark.parametrize("kind", KINDS)
def test_search_finds_nothing(kind):
    options = {"program": mixed, **KINDS[kind]}
    assert simulate(**options, database="sqlite", schedules=30, seconds=6, seed=1000).schedules > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_long_search_finds_nothing(kind):
    options = {"program": mixed, **KINDS[kind]}
    print(simulate(**options, database="sqlite", schedules=10**9, seconds=240, seed=10**6))


@pytest.mark.parametrize("fault", FileServer.faults)
def test_search_makes_each_fault(fault):
    simulate(mixed, database="sqlite", faults=(fault,), most_faults=8, schedules=15, seconds=4, seed=5000)


def test_schedule_repeats_alone_and_after_others():
    def traces(seeds):
        lines_of = {}
        with simulation.files() as make:
            settings = simulation.Settings(travelling, faults=FileServer.faults, most_faults=3)
            for seed in seeds:
                trace = []
                simulation._run(settings, make, seed, None, trace)
                lines_of[seed] = [line for line in trace if " log " not in line]  # (those have numbers of processes)
        return lines_of

    assert traces([7])[7] == traces(range(8))[7]


def test_audit_counts_a_reader_revoked_during_its_upgrade():
    """A reader that was revoked during its upgrade was recorded with an access that shares with no other. (Found by a
    simulation.)
    """
    simulate(converting, database="sqlite", replay="seed=247: 3 run C; 11 revoke 1; 12 run A")


# -- seeded bugs -----------------------------------------------------------------------------------------------------


@bug()
def no_gate(patch):
    """Read the queue before the transaction of the registration."""
    real = SqliteLocks.register

    def register(self, member_id, requesting_id, owner, uid, requests, only_if_free):
        turns = {request.resource: self.admission(request, LAST).allowed for request in requests}
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(
                self, "admission", lambda request, position: Admission(turns[request.resource], False, None)
            )
            return real(self, member_id, requesting_id, owner, uid, requests, only_if_free)

    patch.setattr(SqliteLocks, "register", register)
    run = SqliteMembers.run

    def slow(self, name, parameters=()):
        if name == "insert_first":  # as if there were other rows
            return type("Nothing", (), {"rowcount": 0, "lastrowid": None})
        return run(self, name, parameters)

    patch.setattr(SqliteMembers, "run", slow)
    rows = SqliteMembers.row
    patch.setattr(
        SqliteMembers,
        "row",
        lambda self, name, parameters=(): (
            {**dict(rows(self, name, parameters)), "queued": True}
            if name == "anybody"
            else rows(self, name, parameters)
        ),
    )


@bug(seed=240)
def barging(patch):
    """Overtake waiters while there is no holder."""
    real = SqliteLocks.admission

    def admission(self, request, position):
        turn = real(self, request, position)
        if turn.allowed or position != LAST:
            return turn
        inside = self.rows_of_text(
            "SELECT 1 FROM ProcessControl WHERE resource_id = ? AND granted_at IS NOT NULL", (request.resource,)
        )
        return turn if inside else Admission(True, False, None)

    patch.setattr(SqliteLocks, "admission", admission)


@bug(program=converting)
def not_alone(patch):
    """Let a reader become the writer beside others."""
    real = SqliteMembers.rows
    patch.setattr(
        SqliteMembers,
        "rows",
        lambda self, name, parameters=(): [] if name == "others_inside" else real(self, name, parameters),
    )


@bug()
def dead_without_a_look(patch):
    """Treat the members ahead of the request as dead."""

    def check_owner(self, resource, position, member_id):
        with fork.forks_blocked, self.writing():
            return self.remove(resource, position, None, "reaped")

    patch.setattr(SqliteMembers, "check_owner", check_owner)


@bug(lease=2.0, seed=145)
def no_watch(patch):
    """Let the watchdog ignore the clock."""
    patch.setattr(Membership, "_run_watchdog", lambda self, goes_on: None)
    patch.setattr(Membership, "is_uncertain", lambda self: False)
    patch.setattr(Membership, "record_heartbeat", lambda self, since: None)


@bug(program=travelling)
def token_good_twice(patch):
    """Let every holder of the token adopt it."""
    from sqlsem.engines.sqlite.handovers import SqliteHandovers

    real = SqliteHandovers.adopt
    adopted = {}

    def adopt(self, member_id, requesting_id, owner, uid, token):
        if (self._server, token) not in adopted:
            adopted[self._server, token] = real(self, member_id, requesting_id, owner, uid, token)
        return [
            (request, Ticket(ticket.resource, ticket.position, requesting_id, True))
            for request, ticket in adopted[self._server, token]
        ]

    patch.setattr(SqliteHandovers, "adopt", adopt)


@pytest.mark.parametrize("name", BUGS)
def test_search_finds_a_seeded_bug(name):
    put_in, options = BUGS[name]
    assert found(put_in, **{"program": mixed, "database": "sqlite", **options}).kind in FOUND
