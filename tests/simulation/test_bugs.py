"""Bugs that were put in: each is found, and how soon."""

import itertools
import math

import pytest
from support.searches import FOUND, found

from sqlsem.core.acquire import Acquisition
from sqlsem.core.holdings import Holdings
from sqlsem.core.membership import Membership
from sqlsem.model import Heartbeat, Request, Ticket, monotonic
from sqlsem.testing.conversions import Conversions
from sqlsem.testing.handovers import Handovers
from sqlsem.testing.server import Server, ServerSession
from sqlsem.testing.simulate import converting, mixed, travelling

#: A bug, how it is put in, and the options with which it is looked for. (Where the search begins by another
#: seed than 0, that is to spare time: docs/guarantees.md says how long it takes from there.)
BUGS = {}


def bug(**options):
    def note(put_in):
        BUGS[put_in.__name__] = (put_in, options)
        return put_in

    return note


@bug()
def no_gate(patch):
    """Who registers looks at the queue, and inserts later."""
    real = ServerSession.register

    def register(self, member_id, requesting_id, owner, uid, requests, only_if_free):
        free = {request.resource: self._server.may_enter(request) for request in requests}
        self._fibers.step("has looked")
        with pytest.MonkeyPatch.context() as here:
            here.setattr(self._server, "may_enter", lambda one, position=math.inf: free.get(one.resource))
            here.setattr(self._fibers, "step", lambda what: None)
            return real(self, member_id, requesting_id, owner, uid, requests, only_if_free)

    patch.setattr(ServerSession, "register", register)


@bug(lease=2.0, seed=510)
def no_watch(patch):
    """Nobody looks at the clock."""
    patch.setattr(Membership, "_watch", lambda self, goes_on: None)
    patch.setattr(Membership, "unheard", lambda self: False)


@bug(lease=2.0, seed=510)
def proven_at_its_end(patch):
    """A sign of life counts from when the answer came."""
    real = Membership.prove
    patch.setattr(Membership, "prove", lambda self, since: real(self, monotonic()))


@bug(seed=440)
def no_grace(patch):
    """Whose connection breaks is dead at once."""

    def dead_in(self, member):
        return math.inf if member.beacon.lives else 0.0

    patch.setattr(Server, "dead_in", dead_in)


@bug()
def barging(patch):
    """Those who wait are passed."""
    real = Request.fits

    def fits(self, ahead, cap):
        return real(self, [one for one in ahead if getattr(one, "granted_at", one) is not None], cap)

    patch.setattr(Request, "fits", fits)


@bug()
def weights_dropped(patch):
    """Each counts as one."""
    real = Request.fits

    def fits(self, ahead, cap):
        return real(self, itertools.islice((one for one in ahead if one.weight == 1), 1), cap)

    patch.setattr(Request, "fits", fits)


@bug()
def nothing_withdrawn(patch):
    """What a call has left whose answer was lost stays there: nobody cancels it, and no ping finds it."""
    patch.setattr(ServerSession, "cancel", lambda self, member_id, uid, outcome: 0)
    real = ServerSession.heartbeat

    def compare(self, session, member_id):
        def ping(number):
            pulse = real(session, number)
            return Heartbeat(pulse.known, pulse.positions & frozenset(self.tickets), pulse.revoked)

        with pytest.MonkeyPatch.context() as here:
            here.setattr(session, "heartbeat", ping)
            compared(self, session, member_id)

    compared = Membership._compare
    patch.setattr(Membership, "_compare", compare)


@bug()
def losses_untold(patch):
    """Who has lost is not told."""
    patch.setattr(Holdings, "lose", lambda self, positions, why: [])


@bug()
def revocation_unheard(patch):
    """A ping does not say what an operator takes away."""
    real = ServerSession.heartbeat

    def ping(self, member_id):
        pulse = real(self, member_id)
        return Heartbeat(pulse.known, pulse.positions)

    patch.setattr(ServerSession, "heartbeat", ping)


@bug(lease=2.0, seed=510)
def late_grants_believed(patch):
    """A grant is believed in, however long its answer took."""

    def require(self, holding):
        return
        yield

    patch.setattr(Acquisition, "_require_rows", require)


@bug(program=converting)
def not_alone(patch):
    """A reader becomes the writer although others ahead of it read on."""

    def others(self, row):
        return [one for one in real(self, row) if one.position > row.position]

    real = Conversions._others_inside
    patch.setattr(Conversions, "_others_inside", others)


@bug(program=travelling)
def token_good_twice(patch):
    """A token is adopted by everybody who has it."""
    real = Handovers._take
    adopted = {}

    def take(self, member_id, requesting_id, owner, uid, token):
        if (self._server, token) not in adopted:
            adopted[self._server, token] = real(self, member_id, requesting_id, owner, uid, token)
        return [
            (request, Ticket(ticket.resource, ticket.position, requesting_id, True))
            for request, ticket in adopted[self._server, token]
        ]

    patch.setattr(Handovers, "_take", take)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name):
    put_in, options = BUGS[name]
    assert found(put_in, 20_000, **{"program": mixed, **options}).kind in FOUND
