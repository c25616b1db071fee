"""What a process holds: holds and exits, words, and what of it stands in the way of its own requests."""

import os
import pickle
from unittest import mock

import pytest

import sqlsem
import sqlsem.testing
from sqlsem.core.callers import this_thread
from sqlsem.core.holdings import MOST_AHEAD, Exit, Hold
from sqlsem.core.places import Token
from sqlsem.model import READ, WRITE, Request, Ticket


@pytest.fixture
def locks():
    with sqlsem.testing.memory() as coordinator:
        yield coordinator


@pytest.fixture
def holdings(locks):
    return locks.process.holdings


# -- a holding


def test_who_has_just_acquired_it_has_nothing_else_of_it(locks):
    with locks.mutex("a") as grant:
        holding = grant.holding
        assert (holding.depth, holding.conversions, holding.departure, holding.why_lost) == (1, 0, None, None)
        assert (holding.released, holding.handed_over, holding.is_loose, holding.converting) == (False,) * 4
        assert holding.has(holding.first)
        assert grant.rates == {}


def test_nobody_ends_what_has_ended(locks):
    """However many exits there are; and what has ended is not entered again."""
    with locks.mutex("a") as grant:
        holding = grant.holding
        leaves = Exit()
        assert holding.end(leaves)
        for one in (leaves, Exit(), holding.first):
            assert holding.end(one)
            assert holding.depth <= 0
        assert not holding.enter(Token())
        assert holding.depth <= 0
        holding._exits.clear()
        holding._holds.add(holding.first)


def test_each_hold_and_each_exit_counts_once(locks):
    with locks.mutex("a") as grant:
        holding, again, leaves = grant.holding, Token(), Exit()
        for _ in range(2):
            assert holding.enter(again)
            assert holding.depth == 2
        for _ in range(2):
            assert not holding.end(leaves)
            assert holding.depth == 1
        assert holding.has(again)
        assert holding.end(again)
        assert not holding.has(again)
        holding._exits.clear()


def test_why_it_cannot_be_used(locks):
    with locks.mutex("a") as grant:
        holding = grant.holding
        holding.require()

        def refused(error, words):
            with pytest.raises(error, match=words) as caught:
                holding.require()
            assert caught.value.resource == "a"

        with mock.patch.object(os, "getpid", return_value=holding.pid + 1):
            refused(sqlsem.NotHeld, f"acquired by process {holding.pid}, before it forked")
        for change, error, words, shown in [
            ({"why_lost": "somebody took it"}, sqlsem.LockLost, "is lost: somebody took it", "lost"),
            ({"handed_over": True}, sqlsem.NotHeld, "was handed over", "held"),
            ({"released": True}, sqlsem.NotHeld, "has been released", "released"),
            ({"handed_over": True, "released": True}, sqlsem.NotHeld, "was handed over", "handed over"),
        ]:
            before = {name: getattr(holding, name) for name in change}
            for name, value in change.items():
                setattr(holding, name, value)
            refused(error, words)
            assert repr(grant) == repr(holding) == f"<Grant 'a' at {grant.position}, {shown}>"
            for name, value in before.items():
                setattr(holding, name, value)
        holding.require()
        assert repr(grant) == f"<Grant 'a' at {grant.position}, held>"


def test_a_grant_is_not_pickled(locks):
    with locks.mutex("a") as grant, pytest.raises(sqlsem.NotHeld, match="cannot be pickled") as caught:
        pickle.dumps(grant)
    assert caught.value.resource == "a"


# -- all of them


def test_whether_there_are_any(locks, holdings):
    assert not holdings
    with locks.mutex("a"):
        assert holdings
    assert not holdings


def test_once_more_is_asked_of_what_may_have_left(locks, holdings):
    """By the hold that is to be ended later."""
    with locks.mutex("a") as grant:
        hold = Hold(grant)
        departure = mock.Mock()
        departure.again.return_value = False
        grant.holding.departure = departure
        assert not holdings.enter(hold)
        departure.again.assert_called_once_with(hold.token)
        assert grant.holding.depth == 1
        grant.holding.departure = None
        assert holdings.enter(hold)
        assert grant.holding.depth == 2
        grant.release()


def refusing(holdings, *asked, reentrant=False, timeout=None):
    return holdings.refuse(asked, this_thread(), reentrant, timeout)


def test_what_it_would_wait_for_by_itself_is_said(locks, holdings):
    with locks.mutex("a"):
        assert not refusing(holdings, Request("b"))
        assert refusing(holdings, Request("a"), timeout=0)
        for reentrant, words in [
            (False, r"release it first, take what is needed in one go .*, or pass reentrant=True$"),
            (True, r"release it first, .*reentrant=True \(which cannot turn what is held into more\)$"),
        ]:
            with pytest.raises(sqlsem.Deadlock, match=words) as caught:
                refusing(holdings, Request("b"), Request("a"), reentrant=reentrant)
            assert caught.value.resource == "a"
            assert "would wait for itself" in str(caught.value)


def test_a_reader_is_told_to_become_the_writer(locks, holdings):
    with locks.read("a"):
        assert not refusing(holdings, Request("a", READ, None))
        with pytest.raises(sqlsem.Deadlock, match=r"grant\.upgrade\(\)"):
            refusing(holdings, Request("a", WRITE, 1))
    with locks.mutex("a"), pytest.raises(sqlsem.Deadlock, match="release it first") as caught:
        refusing(holdings, Request("a", READ, None))
    assert "upgrade" not in str(caught.value)


def test_all_that_it_holds_is_looked_at(locks, holdings):
    """What it acquired last may let it in beside, and what it acquired before not."""
    with locks.limit("a", 3), mock.patch.object(Request, "excludes", lambda held, asked: held.note == "first"):
        first, last = Request("a", limit=3, note="first"), Request("a", limit=3, note="last")
        held = [(mock.Mock(positions={"a": 1}), last), (mock.Mock(positions={"a": 2}), first)]
        with mock.patch.object(holdings, "_held_of", return_value=held):
            assert refusing(holdings, Request("a", limit=3), timeout=0)


def ticket(resource, position):
    return Ticket(resource, position, "me", False)


def test_what_of_ours_stands_before_a_request(locks, holdings):
    with locks.limit("a", 9, weight=2) as first, locks.limit("b", 9), locks.limit("a", 9, weight=3) as second:

        def weights(position):
            return [one.weight for one in holdings.ahead_of(ticket("a", position))]

        assert weights(second.position + 1) == [2, 3]
        assert weights(second.position) == [2]
        assert weights(first.position) == []
        assert holdings.ahead_of(ticket("c", 99)) == []
    with locks.all_of(locks.limit("a", 9), locks.limit("b", 9)) as both:
        assert [one.resource for one in holdings.ahead_of(ticket("a", both.positions["a"] + 9))] == ["a"]


def test_whom_a_request_of_ours_waits_behind(locks, holdings):
    with locks.all_of(locks.mutex("a"), locks.mutex("b")) as grant:
        behind = holdings.behind(Request("b"), grant.positions["b"] + 1)
        assert (behind.position, behind.state) == (grant.positions["b"], "holds")
        assert holdings.behind(Request("b"), grant.positions["b"]) is None
        assert holdings.behind(Request("c"), 99) is None
    with locks.read("a") as reader:
        assert holdings.behind(Request("a", READ, None), reader.position + 1) is None
        assert holdings.behind(Request("a"), reader.position + 1).position == reader.position


def test_of_much_only_a_part_is_looked_at(locks, holdings):
    """Who holds thousands of one resource does not pay for each of them at each request."""
    held = [locks.limit("a", 10_000) for _ in range(MOST_AHEAD + 5)]
    grants = []
    for lock in held:
        assert lock.acquire()
        grants.append(lock.grant)
    last = grants[-1].position + 1
    assert len(holdings.ahead_of(ticket("a", last))) == MOST_AHEAD
    for grant in grants[:MOST_AHEAD]:
        grant.holding.requests = (Request("a", READ, None),)
    assert holdings.behind(Request("a", READ, None), last) is None
    for grant in grants:
        grant.release()
