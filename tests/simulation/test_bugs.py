"""Seed bugs into the memory engine and the core: the search finds each of them, and how soon."""

import itertools
import math

import pytest
from support.searches import FOUND, found

from sqlsem.client.connection.membership import Membership
from sqlsem.client.held.registry import GrantRegistry
from sqlsem.client.operations.acquire import Acquisition
from sqlsem.testing.conversions import Conversions
from sqlsem.testing.handovers import Handovers
from sqlsem.testing.server import Server, ServerSession
from sqlsem.testing.simulate import converting, mixed, travelling
from sqlsem.values.locks import Heartbeat, Request, Ticket, monotonic

#: A bug, how it is seeded, and the options of its search. (A seed other than 0 spares time: docs/guarantees.md says how
#: long the search takes from 0.)
BUGS = {}


def bug(**options):
    def note(put_in):
        BUGS[put_in.__name__] = (put_in, options)
        return put_in

    return note


@bug()
def no_gate(patch):
    """Read the queue before the registration, and insert later."""
    real = ServerSession.register

    def register(self, member_id, requesting_id, owner, uid, requests, only_if_free):
        free = {request.resource: self._server.may_enter(request) for request in requests}
        self._fibers.step("has looked")
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(self._server, "may_enter", lambda request, position=math.inf: free.get(request.resource))
            patching.setattr(self._fibers, "step", lambda what: None)
            return real(self, member_id, requesting_id, owner, uid, requests, only_if_free)

    patch.setattr(ServerSession, "register", register)


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

    def dead_in(self, member):
        return math.inf if member.beacon.lives else 0.0

    patch.setattr(Server, "dead_in", dead_in)


@bug()
def barging(patch):
    """Overtake waiters."""
    real = Request.fits

    def fits(self, ahead, cap):
        return real(self, [request for request in ahead if getattr(request, "granted_at", request) is not None], cap)

    patch.setattr(Request, "fits", fits)


@bug()
def weights_dropped(patch):
    """Count each weight as 1."""
    real = Request.fits

    def fits(self, ahead, cap):
        return real(self, itertools.islice((request for request in ahead if request.weight == 1), 1), cap)

    patch.setattr(Request, "fits", fits)


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

    def require(self, state):
        return
        yield

    patch.setattr(Acquisition, "_require_rows", require)


@bug(program=converting)
def not_alone(patch):
    """Let a reader become the writer although others ahead of it still read."""

    def others(self, row):
        return [other for other in real(self, row) if other.position > row.position]

    real = Conversions._other_holders
    patch.setattr(Conversions, "_other_holders", others)


@bug(program=travelling)
def token_good_twice(patch):
    """Let every holder of the token adopt it."""
    real = Handovers._adopt_rows
    adopted = {}

    def take(self, member_id, requesting_id, owner, uid, token):
        if (self._server, token) not in adopted:
            adopted[self._server, token] = real(self, member_id, requesting_id, owner, uid, token)
        return [
            (request, Ticket(ticket.resource, ticket.position, requesting_id, True))
            for request, ticket in adopted[self._server, token]
        ]

    patch.setattr(Handovers, "_adopt_rows", take)


@pytest.mark.parametrize("name", BUGS)
def test_search_finds_a_seeded_bug(name):
    put_in, options = BUGS[name]
    assert found(put_in, 20_000, **{"program": mixed, **options}).kind in FOUND
