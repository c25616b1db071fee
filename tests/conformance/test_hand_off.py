"""A waiter that sleeps in the database wakes when an earlier row leaves, and is granted if the whole rule allows it."""

import contextlib
import itertools
import threading

import pytest
from support import PATIENCE, until

from sqlsem.client.client import DatabaseClient
from sqlsem.values.locks import Request

#: Seconds to wait for a grant that must not come. (A slow machine cannot fail the test by this.)
CHANCE = 0.3


class Party:
    """A member with two sessions: one to request and release, one to wait in."""

    numbers = itertools.count()

    def __init__(self, database, stack):
        self.database = database
        self.main, self.waiting = (stack.enter_context(contextlib.closing(database.session())) for _ in range(2))
        self.member = self.main.register_member("host", 1, "test")
        stack.callback(self.main.deregister_member, self.member)

    def ask(self, resource, access="write", limit=1, weight=1):
        uid = f"{self.member}.{next(self.numbers)}"
        (self.ticket,) = self.main.register(
            self.member, f"party {self.member}", "o", uid, [Request(resource, access, limit, weight)], False
        )
        return self

    def leave(self):
        assert self.main.release(self.ticket, "released")

    def sleep(self, seconds):
        """Wait in another thread, and return once that thread sleeps. The returned function gives the result."""
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(self.waiting.wait(self.ticket, seconds, threading.Event())), daemon=True
        )
        if self.database.engine == "postgresql":
            pid = self.waiting.backend()
        thread.start()
        if self.database.engine == "postgresql":
            asleep = "SELECT 1 FROM pg_locks WHERE pid = ? AND locktype = 'advisory' AND NOT granted"
            until(lambda: answers or self.database.rows(asleep, pid), "it sleeps")

        def answer():
            thread.join(PATIENCE)
            return answers[0]

        return answer


@pytest.fixture
def party(database):
    with contextlib.ExitStack() as opened:
        yield lambda: Party(database, opened)


def goes_in_after_both(waiter, first, last):
    """Check that the waiter is not granted when ``first`` leaves, but when ``last`` does."""
    answer = waiter.sleep(CHANCE)
    first.leave()
    assert answer() is False
    answer = waiter.sleep(PATIENCE)
    last.leave()
    assert answer() is True


def test_release_grants_the_next_waiter(party, name):
    holder, waiter = party().ask(name), party().ask(name)
    answer = waiter.sleep(PATIENCE)
    holder.leave()
    assert answer() is True


def test_waiter_survives_a_middle_waiter_giving_up(party, name):
    """The waiter slept on the lock of a row that has left; the holder's row is still there."""
    holder, between, waiter = party().ask(name), party().ask(name), party().ask(name)
    goes_in_after_both(waiter, between, holder)


@pytest.mark.parametrize("access", ["read", "stage:1"])
def test_reader_leaves_while_others_share(party, name, access):
    first, second, waiter = party().ask(name, access), party().ask(name, access), party().ask(name)
    goes_in_after_both(waiter, second, first)


@pytest.mark.kept
@pytest.mark.parametrize(
    ("limits", "weights"),
    [((3, 3, 3), (1, 1, 3)), ((4, 4, 4), (2, 2, 3)), ((2, 2, 9), (1, 1, 2)), ((2, 2, None), (1, 1, 2))],
    ids=["all", "much", "by-what-others-declare", "by-what-only-others-declare"],
)
def test_heavy_waiter_waits_for_enough_room(party, name, limits, weights):
    """The waiter's weight fits beside neither holder, so it waits for both."""
    parties = [party() for _ in limits]
    if None in limits:
        parties[0].main.set_resource(name, "cap", 9)
    first, second, waiter = (
        member.ask(name, limit=limit, weight=weight)
        for member, limit, weight in zip(parties, limits, weights, strict=True)
    )
    goes_in_after_both(waiter, second, first)


@pytest.mark.kept
@pytest.mark.parametrize("number", range(3))
def test_release_in_a_limit_of_three_grants_a_waiter(party, name, number):
    """A waiter is granted whichever of the three holders leaves."""
    holders = [party().ask(name, limit=3) for _ in range(3)]
    answer = party().ask(name, limit=3).sleep(PATIENCE)
    holders[number].leave()
    assert answer() is True


def test_slot_waiter_stays_behind_earlier_waiters(party, name):
    """An earlier waiter blocks a later one even while it does not poll."""
    holders = [party().ask(name, limit=2) for _ in range(2)]
    before, waiter = party().ask(name, limit=2), party().ask(name, limit=2)
    for holder in holders:
        answer = waiter.sleep(CHANCE)
        holder.leave()
        assert answer() is (holder is holders[-1])
    assert before.sleep(0)() is True


@pytest.mark.kept
@pytest.mark.parametrize(
    ("setting", "pattern", "limit"),
    [("paused", "", 2), ("cap", "", 2), ("cap", "*", 2), ("paused", "", 3), ("cap", "", 3)],
)
def test_pause_or_cap_holds_back_a_sleeping_waiter(party, name, setting, pattern, limit):
    """A pause, or a limit below its weight, keeps a sleeping waiter out; so does a limit for a pattern of names."""
    resource = name + pattern
    holder, waiter = party().ask(name, limit=limit, weight=2), party().ask(name, limit=limit, weight=2)
    answer = waiter.sleep(CHANCE)
    holder.main.set_resource(resource, setting, 1)
    try:
        holder.leave()
        assert answer() is False
    finally:
        holder.main.set_resource(resource, setting, 0 if setting == "paused" else None)
    assert waiter.sleep(PATIENCE)() is True


def test_revoke_wakes_a_sleeping_waiter(party, name):
    holder, waiter = party().ask(name), party().ask(name)
    answer = waiter.sleep(PATIENCE)
    assert holder.main.revoke(waiter.ticket.position, False) == 0
    holder.leave()
    assert answer() is None


@pytest.mark.engines("sqlite", "postgresql", "mssql", "memory")
def test_released_row_is_forgotten_before_local_notify(database, connect, name, monkeypatch):
    """Local waiters sleep while a released row is still registered, and no later event would wake them."""
    coordinator = connect()
    released, ahead, handle_release = [], [], DatabaseClient.handle_release

    def returned(client, ticket, session, member_id):
        released.append(ticket.resource)
        ahead.extend(client.registry.requests_ahead(ticket._replace(position=ticket.position + 1)))
        handle_release(client, ticket, session, member_id)

    monkeypatch.setattr(DatabaseClient, "handle_release", returned)
    with coordinator.mutex(name("a")), coordinator.limit(name("b"), 2, weight=2), coordinator.read(name("c")):
        pass
    with coordinator.all_of(coordinator.write(name("a")), coordinator.stage(name("b"), 1)):
        pass
    rate = coordinator.rate(name("d"), 1, per="20s" if database.engine == "mssql" else "1s")  # longer than a take lasts
    for _ in range(2):  # the second use waits in the rate's queue, as the wait is long
        rate.take()
    assert {name("a"), name("b"), name("c"), f"rate:{name('d')}"} == set(released)
    assert ahead == []
