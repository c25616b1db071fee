"""Seed bugs into the simulated database and the core: the search finds each of them, and how soon."""

import pytest
from support import engine_bugs
from support.searches import FOUND, found, noted_in

from sqlsem.client.connection.membership import Membership
from sqlsem.client.held.registry import GrantRegistry
from sqlsem.client.operations.acquire import Acquisition
from sqlsem.engines.statements.session import Probe
from sqlsem.testing.server import ServerSession, SessionBeacons
from sqlsem.testing.simulate import converting, mixed, travelling
from sqlsem.values.locks import Heartbeat, monotonic

#: A bug, how it is seeded, and the options of its search. (A seed other than 0 spares time:
#: docs/contributing/evidence.md says how long the search takes from 0.)
BUGS = {
    "no_gate": (engine_bugs.no_gate, {}),
    "barging": (engine_bugs.barging, {}),
    "weights_dropped": (engine_bugs.weights_dropped, {}),
    "not_alone": (engine_bugs.not_alone, {"program": converting}),
    "token_good_twice": (engine_bugs.token_good_twice, {"program": travelling}),
}


bug = noted_in(BUGS)


@bug(lease=2.0, seed=510)
def no_watch(patch):
    """Let the watchdog ignore the clock."""
    patch.setattr(Membership, "_run_watchdog", lambda self, goes_on: None)
    patch.setattr(Membership, "is_uncertain", lambda self: False)


@bug(lease=2.0, seed=510)
def proven_at_its_end(patch):
    """Count a heartbeat from the arrival of the answer."""
    real = Membership.record_heartbeat
    patch.setattr(Membership, "record_heartbeat", lambda self, since: real(self, monotonic()))


@bug(seed=440)
def no_grace(patch):
    """Treat a member as dead as soon as its connection breaks."""
    patch.setattr(SessionBeacons, "probe", lambda self, name: Probe(name in self._server.beacons))


@bug()
def nothing_withdrawn(patch):
    """Leave the row of a call whose answer was lost: no cancel, and no heartbeat removes it."""
    patch.setattr(ServerSession, "cancel", lambda self, member_id, uid, outcome: 0)
    real = ServerSession.heartbeat

    def compare(self, session, member_id):
        def ping(number):
            pulse = real(session, number)
            return Heartbeat(pulse.known, pulse.positions & frozenset(self.tickets), pulse.revoked)

        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(session, "heartbeat", ping)
            compared(self, session, member_id)

    compared = Membership._compare
    patch.setattr(Membership, "_compare", compare)


@bug()
def losses_untold(patch):
    """Do not report a loss."""
    patch.setattr(GrantRegistry, "mark_lost", lambda self, positions, why: [])


@bug()
def revocation_unheard(patch):
    """Do not report revocations in the answer to a heartbeat."""
    real = ServerSession.heartbeat

    def ping(self, member_id):
        pulse = real(self, member_id)
        return Heartbeat(pulse.known, pulse.positions)

    patch.setattr(ServerSession, "heartbeat", ping)


@bug(lease=2.0, seed=510)
def late_grants_believed(patch):
    """Trust a grant however long its answer took."""
    patch.setattr(Acquisition, "_raise_lost", lambda self, state: None)


@pytest.mark.parametrize("name", BUGS)
def test_search_finds_a_seeded_bug(name):
    put_in, options = BUGS[name]
    assert found(put_in, 20_000, **{"program": mixed, **options}).kind in FOUND
