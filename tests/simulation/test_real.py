"""Run programs on a real SQLite file, in virtual time: the search finds nothing, except for seeded bugs."""

import pytest
from support import engine_bugs
from support.searches import FOUND, found, noted_in, traces

from sqlsem.client.connection.membership import Membership
from sqlsem.testing import simulate as simulation
from sqlsem.testing.files import FileServer
from sqlsem.testing.simulate import converting, mixed, rated, simulate, travelling

KINDS = {
    "beacons": {},
    "leases": {"lease": 6.0},
    "conversions": {"program": converting},
    "hand-overs": {"program": travelling},
    "rates": {"program": rated},
    "threads": {"program": travelling, "threads": 2, "processes": 2},
}
BUGS = {
    "no_gate": (engine_bugs.no_gate, {}),
    "barging": (engine_bugs.barging, {"seed": 300}),
    "not_alone": (engine_bugs.not_alone, {"program": converting}),
    "dead_without_a_look": (engine_bugs.dead_without_a_look, {}),
    "token_good_twice": (engine_bugs.token_good_twice, {"program": travelling}),
}


bug = noted_in(BUGS)


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
    options = simulation.Settings(travelling, faults=FileServer.faults, most_faults=3)
    assert traces(simulation.files(), options, [7])[7] == traces(simulation.files(), options, range(8))[7]


def test_audit_counts_a_reader_revoked_during_its_upgrade():
    """A reader that was revoked during its upgrade was recorded with an access that shares with no other. (Found by a
    simulation.)
    """
    simulate(converting, database="sqlite", replay="seed=247: 3 run C; 11 revoke 1; 12 run A")


# -- seeded bugs -----------------------------------------------------------------------------------------------------


@bug(lease=2.0, seed=145)
def no_watch(patch):
    """Let the watchdog ignore the clock."""
    patch.setattr(Membership, "_run_watchdog", lambda self, goes_on: None)
    patch.setattr(Membership, "is_uncertain", lambda self: False)
    patch.setattr(Membership, "record_heartbeat", lambda self, since: None)


@pytest.mark.parametrize("name", BUGS)
def test_search_finds_a_seeded_bug(name):
    put_in, options = BUGS[name]
    assert found(put_in, **{"program": mixed, "database": "sqlite", **options}).kind in FOUND
