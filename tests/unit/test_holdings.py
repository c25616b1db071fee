"""What a process holds: holds and exits, words, and what of it stands in the way of its own requests."""

import os
import pickle
from unittest import mock

import pytest
from support import until

import sqlsem
import sqlsem.testing
from sqlsem.core.callers import Caller, new_number, this_thread
from sqlsem.core.holdings import MOST_AHEAD, Exit, Hold, Holding
from sqlsem.core.permits import Permit
from sqlsem.core.waiter_queues import Waiter
from sqlsem.model import READ, WRITE, Request, Ticket


@pytest.fixture
def locks():
    with sqlsem.testing.memory() as coordinator:
        yield coordinator


@pytest.fixture
def holdings(locks):
    return locks.client.holdings


# -- a holding


def test_new_owner_has_no_earlier_hold(locks):
    with locks.mutex("a") as grant:
        holding = grant.holding
        assert (holding.depth, holding.conversions, holding.departure, holding.why_lost) == (1, 0, None, None)
        assert (holding.released, holding.handed_over, holding.is_loose, holding.converting) == (False,) * 4
        assert holding.has(holding.first)
        assert grant.rates == {}


def test_loss_before_the_grant_event_reaches_the_owner_only(locks, holdings):
    lost = []
    holding = Holding(holdings, [Request("a")], [ticket("a", 1)], this_thread(), lost.append, 0.0)
    assert holding.on_lost == lost.append
    with mock.patch.object(holdings, "_tell") as tell:
        holdings.tell_released(holding)
        tell.assert_not_called()
        holding.told = True
        for _ in range(2):
            holdings.tell_released(holding)
        tell.assert_called_once()


def test_ended_hold_is_not_ended_twice(locks):
    """However many exits there are; and what has ended is not entered again."""
    with locks.mutex("a") as grant:
        holding = grant.holding
        leaves = Exit()
        for one in (leaves, leaves, Exit()):
            assert holding.end(one)
            assert holding.depth == 0
        assert holding.end(holding.first)
        assert not holding.enter(Permit())
        assert holding.depth <= 0
        holding._exits.clear()
        holding._holds[holding.first] = None


def test_each_hold_and_each_exit_counts_once(locks):
    with locks.mutex("a") as grant:
        holding, again, leaves = grant.holding, Permit(), Exit()
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


def test_reentry_checks_a_grant_that_may_have_ended(locks, holdings):
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


def test_grant_ended_by_commit_is_not_released_again(locks, holdings):
    """But what was had once more ends, whatever becomes of the rest."""
    with locks.mutex("a", reentrant=True) as grant:
        grant.holding.departure = departure = mock.Mock()
        departure.again.side_effect = grant.holding.enter
        departure.settle.return_value = True
        again = locks.mutex("a", reentrant=True)
        assert again.acquire()
        again.release()
        departure.settle.assert_not_called()
        assert grant.holding.depth == 1
        grant.release()
        departure.settle.assert_called_once_with()
        assert grant.holding.depth == 1
        assert [entry.position for entry in locks.admin.entries("a")] == [grant.position]
        departure.settle.return_value = False
    assert locks.admin.entries("a") == []


def refusing(holdings, *asked, reentrant=False, timeout=None):
    return holdings.refuse(asked, this_thread(), reentrant, timeout)


def test_self_wait_is_described(locks, holdings):
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


def test_own_rows_ahead_of_a_request(locks, holdings):
    with locks.limit("a", 9, weight=2) as first, locks.limit("b", 9), locks.limit("a", 9, weight=3) as second:

        def weights(position):
            return [one.weight for one in holdings.ahead_of(ticket("a", position))]

        assert weights(second.position + 1) == [2, 3]
        assert weights(second.position) == [2]
        assert weights(first.position) == []
        assert holdings.ahead_of(ticket("c", 99)) == []
    with locks.all_of(locks.limit("a", 9), locks.limit("b", 9)) as both:
        assert [one.resource for one in holdings.ahead_of(ticket("a", both.positions["a"] + 9))] == ["a"]


def test_own_rows_blocking_an_own_request(locks, holdings):
    with locks.all_of(locks.mutex("a"), locks.mutex("b")) as grant:
        behind = holdings.behind(Request("b"), grant.positions["b"] + 1)
        assert (behind.position, behind.state) == (grant.positions["b"], "holds")
        assert behind.owner == this_thread().owner
        assert 0 <= behind.seconds < 60
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


# -- giving back


def test_released_grants_leave_no_state(locks, holdings):
    """Of whoever had it: a process lives for years."""

    def held():
        return sorted(request.resource for request in holdings.requests_of(this_thread().number))

    third = locks.limit("c", 3)
    with locks.mutex("a"), locks.all_of(locks.mutex("b"), locks.limit("c", 3)):
        for _ in range(2):
            assert third.acquire()
        assert held() == ["a", "b", "c", "c", "c"]
        third.release()
        assert held() == ["a", "b", "c", "c"]
        assert len(holdings.ahead_of(ticket("c", 99))) == 2
        holdings.disown(third.grant)
        assert held() == ["a", "b", "c"]
    assert not holdings
    assert holdings._by_caller == {}
    assert holdings._by_resource == {}


def test_it_is_another_threads_from_now_on(locks, holdings):
    grant = locks.all_of(locks.mutex("a"), locks.mutex("b"))
    assert grant.acquire()
    other = Caller("thread", new_number(), "other")
    holdings.pass_on(grant.grant, other)
    assert grant.grant.holding.caller is other
    assert holdings.requests_of(this_thread().number) == []
    assert [request.resource for request in holdings.requests_of(other.number)] == ["a", "b"]
    assert holdings._by_caller[other.number] == {"a": [grant.grant], "b": [grant.grant]}
    grant.release()
    assert holdings._by_caller == {}


def test_child_does_not_release_its_parents_grants(locks):
    with locks.mutex("a") as grant:
        with mock.patch.object(os, "getpid", return_value=os.getpid() + 1), pytest.raises(sqlsem.NotHeld, match="fork"):
            grant.release()
        grant.check()
        assert [entry.position for entry in locks.admin.entries("a")] == [grant.position]


def told_of(locks, kind):
    told = []
    locks.on(kind, told.append)
    return told


def test_row_missing_at_release_was_lost(locks, holdings):
    lock, lost = locks.mutex("a"), told_of(locks, "lost")
    assert lock.acquire()
    grant = lock.grant
    with (
        mock.patch.object(locks.client.member, "give_back", side_effect=lambda *_: answer(False)),
        pytest.raises(sqlsem.LockLost, match="its row was removed before it was released"),
    ):
        lock.release()
    assert grant.lost
    until(lambda: lost, "it is told")
    assert [(event.resource, event.position) for event in lost] == [("a", grant.position)]
    assert "removed before it was released" in lost[0].why
    assert not holdings


def test_failed_release_is_left_to_the_heartbeat(locks, holdings):
    lock, member = locks.mutex("a"), locks.client.member
    assert lock.acquire()
    grant = lock.grant
    with (
        mock.patch.object(member, "give_back", side_effect=sqlsem.Unavailable("the cable")),
        pytest.raises(sqlsem.LockLost, match=r"could not be given back in time \(the cable\)"),
    ):
        lock.release()
    assert not member.knows(grant.holding.tickets[0])
    assert not holdings


def test_it_is_given_back_for_as_long_as_it_is_ours():
    with sqlsem.testing.memory(lease=30) as locks:
        member, budgets = locks.client.member, []
        real = member.give_back

        def give_back(one, outcome, budget):
            budgets.append((outcome, budget))
            return real(one, outcome, budget)

        with mock.patch.object(member, "give_back", give_back), locks.mutex("a"):
            pass
        ((outcome, budget),) = budgets
        assert outcome == "released"
        assert 0 < budget <= member.trust


def test_rest_of_a_partly_lost_group_is_released(locks):
    member = locks.client.member
    with pytest.raises(sqlsem.LockLost), locks.all_of(locks.mutex("a"), locks.mutex("b")) as grant:
        grant.holding.lose("somebody took b")
    assert not any(member.knows(ticket) for ticket in grant.holding.tickets)
    until(lambda: locks.admin.entries("a") == locks.admin.entries("b") == [], "the next ping removes them")


def test_deferred_release_publishes_its_end(locks, holdings):
    released = told_of(locks, "released")
    lock = locks.mutex("a")
    assert lock.acquire()
    holdings.disown(lock.grant)
    until(lambda: released, "it is told")
    assert [event.resource for event in released] == ["a"]
    until(lambda: locks.admin.entries("a") == [], "the next ping removes it")


def answer(result):
    """A verb that is done at once."""
    yield from ()
    return result


# -- telling


def test_grant_event_names_the_rows_waited_for(locks, holdings):
    granted = told_of(locks, "granted")
    with locks.all_of(locks.mutex("a"), locks.mutex("b")) as grant:
        until(lambda: len(granted) == 2, "both are told")
        assert [(event.at_once, event.behind) for event in granted] == [(True, None)] * 2
        waiters = {}
        for ticket, request in zip(grant.holding.tickets, grant.holding.requests, strict=True):
            waiters[ticket.position] = Waiter(ticket, request, mock.Mock())
        somebody = holdings.behind(Request("b"), 99)
        waiters[grant.positions["b"]].behind = somebody
        holdings.tell_granted(grant.holding, 2.5, waiters)
        until(lambda: len(granted) == 4, "both are told again")
        assert {event.resource: (event.at_once, event.behind, event.waited) for event in granted[2:]} == {
            "a": (False, None, 2.5),
            "b": (False, somebody, 2.5),
        }


def test_an_end_is_told_once_with_how_long_it_was_held(locks, holdings):
    told = []
    for kind in ("released", "lost"):
        locks.on(kind, told.append)
    ends = [holdings.tell_released, holdings.tell_lost]
    for end in ends:
        with locks.mutex("a") as grant:
            assert grant.holding.told is True
            end(grant.holding)
            assert grant.holding.told is False
    until(lambda: len(told) == len(ends), "each end is told, and once")
    assert [event.name for event in told] == ["released", "lost"]
    assert all(0 <= event.held < 60 for event in told)


def test_lost_marks_only_lost_grants(locks, holdings):
    with locks.mutex("a") as grant, pytest.raises(sqlsem.LockLost), locks.mutex("b") as other:
        assert holdings.lose([other.position, 999], "somebody took it") == [other]
        assert other.holding.why_lost == "somebody took it"
        assert grant.holding.why_lost is None
        assert holdings.grants() == [grant]
        assert holdings.lose(None, "all of it") == [grant]
        assert holdings.grants() == []
        grant.holding.why_lost = None
        holdings.add(grant)
