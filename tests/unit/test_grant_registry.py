"""The grants of a process: acquisition and release tokens, and rows of the process that block its own requests."""

import os
import pickle
import threading
from unittest import mock

import pytest
from support import until

import sqlsem
import sqlsem.testing
from sqlsem.client.callers import Caller, new_number, this_thread
from sqlsem.client.held.registry import MAX_AHEAD, GrantState, HeldGrant, ReleaseToken
from sqlsem.client.waiters.queues import Waiter
from sqlsem.util.permits import Permit
from sqlsem.values.locks import READ, WRITE, Request, Ticket


@pytest.fixture
def locks():
    with sqlsem.testing.memory() as coordinator:
        yield coordinator


@pytest.fixture
def registry(locks):
    return locks.client.registry


# -- a holding


def test_new_owner_has_no_earlier_hold(locks):
    with locks.mutex("a") as grant:
        state = grant.state
        assert (state.depth, state.conversions, state.commit_release, state.why_lost) == (1, 0, None, None)
        assert (state.released, state.handed_over, state.is_unowned, state.converting) == (False,) * 4
        assert state.first_token in state.acquisitions
        assert grant.rates == {}


def test_loss_before_the_grant_event_reaches_the_owner_only(locks, registry):
    lost = []
    state = GrantState(registry, [Request("a")], [ticket("a", 1)], this_thread(), lost.append, 0.0)
    assert state.on_lost == lost.append
    with mock.patch.object(registry, "_publish") as publish:
        registry.publish_released(state)
        publish.assert_not_called()
        state.is_published = True
        for _ in range(2):
            registry.publish_released(state)
        publish.assert_called_once()


def test_ended_hold_is_not_ended_twice(locks):
    """With any number of release tokens; and an ended grant is not reentered."""
    with locks.mutex("a") as grant:
        state = grant.state
        leaves = ReleaseToken()
        for token in (leaves, leaves, ReleaseToken()):
            assert state.end_acquisition(token)
            assert state.depth == 0
        assert state.end_acquisition(state.first_token)
        assert not state.reenter(Permit())
        assert state.depth <= 0
        state._releases.clear()
        state.acquisitions[state.first_token] = None


def test_each_hold_and_each_exit_counts_once(locks):
    with locks.mutex("a") as grant:
        state, again, leaves = grant.state, Permit(), ReleaseToken()
        for _ in range(2):
            assert state.reenter(again)
            assert state.depth == 2
        for _ in range(2):
            assert not state.end_acquisition(leaves)
            assert state.depth == 1
        assert again in state.acquisitions
        assert state.end_acquisition(again)
        assert again not in state.acquisitions
        state._releases.clear()


def test_unusable_grant_names_the_reason(locks):
    with locks.mutex("a") as grant:
        state = grant.state
        state.require_held()

        def refused(error, words):
            with pytest.raises(error, match=words) as caught:
                state.require_held()
            assert caught.value.resource == "a"

        with mock.patch.object(os, "getpid", return_value=state.pid + 1):
            refused(sqlsem.NotHeld, f"acquired by process {state.pid}, before it forked")
        for change, error, words, shown in [
            ({"why_lost": "somebody took it"}, sqlsem.LockLost, "is lost: somebody took it", "lost"),
            ({"handed_over": True}, sqlsem.NotHeld, "was handed over", "held"),
            ({"released": True}, sqlsem.NotHeld, "has been released", "released"),
            ({"handed_over": True, "released": True}, sqlsem.NotHeld, "was handed over", "handed over"),
        ]:
            before = {name: getattr(state, name) for name in change}
            for name, value in change.items():
                setattr(state, name, value)
            refused(error, words)
            assert repr(grant) == repr(state) == f"<Grant 'a' at {grant.position}, {shown}>"
            for name, value in before.items():
                setattr(state, name, value)
        state.require_held()
        assert repr(grant) == f"<Grant 'a' at {grant.position}, held>"


def test_grant_cannot_be_pickled(locks):
    with locks.mutex("a") as grant, pytest.raises(sqlsem.NotHeld, match="cannot be pickled") as caught:
        pickle.dumps(grant)
    assert caught.value.resource == "a"


# -- all of them


def test_registry_is_true_while_a_grant_is_held(locks, registry):
    assert not registry
    with locks.mutex("a"):
        assert registry
    assert not registry


def test_reentry_checks_a_grant_that_may_have_ended(locks, registry):
    """By the acquisition that ends later."""
    with locks.mutex("a") as grant:
        hold = HeldGrant(grant)
        departure = mock.Mock()
        departure.reenter.return_value = False
        grant.state.commit_release = departure
        assert not registry.reenter(hold)
        departure.reenter.assert_called_once_with(hold.token)
        assert grant.state.depth == 1
        grant.state.commit_release = None
        assert registry.reenter(hold)
        assert grant.state.depth == 2
        grant.release()


def test_grant_ended_by_commit_is_not_released_again(locks, registry):
    """A second acquisition of it ends with its block, whatever happens to the others."""
    with locks.mutex("a", reentrant=True) as grant:
        grant.state.commit_release = departure = mock.Mock()
        departure.reenter.side_effect = grant.state.reenter
        departure.stop.return_value = ended = threading.Event()
        ended.set()
        again = locks.mutex("a", reentrant=True)
        assert again.acquire()
        again.release()
        departure.stop.assert_not_called()
        assert grant.state.depth == 1
        grant.release()
        departure.stop.assert_called_once_with()
        assert grant.state.depth == 1
        assert [entry.position for entry in locks.admin.entries("a")] == [grant.position]
        departure.stop.return_value = None
    assert locks.admin.entries("a") == []


def refusing(registry, *requests, reentrant=False, timeout=None):
    return registry.check_conflicts(requests, this_thread(), reentrant, timeout)


def test_self_wait_is_described(locks, registry):
    with locks.mutex("a"):
        assert not refusing(registry, Request("b"))
        assert refusing(registry, Request("a"), timeout=0)
        for reentrant, words in [
            (False, r"release it first, take what is needed in one go .*, or pass reentrant=True$"),
            (True, r"release it first, .*reentrant=True \(reentrant=True cannot enlarge a lock that is held\)$"),
        ]:
            with pytest.raises(sqlsem.Deadlock, match=words) as caught:
                refusing(registry, Request("b"), Request("a"), reentrant=reentrant)
            assert caught.value.resource == "a"
            assert "would wait for itself" in str(caught.value)


def test_reader_is_advised_to_upgrade(locks, registry):
    with locks.read("a"):
        assert not refusing(registry, Request("a", READ, None))
        with pytest.raises(sqlsem.Deadlock, match=r"grant\.upgrade\(\)"):
            refusing(registry, Request("a", WRITE, 1))
    with locks.mutex("a"), pytest.raises(sqlsem.Deadlock, match="release it first") as caught:
        refusing(registry, Request("a", READ, None))
    assert "upgrade" not in str(caught.value)


def test_every_acquisition_of_a_grant_is_checked(locks, registry):
    """Its last acquisition may allow the request, and an earlier one exclude it."""
    with locks.limit("a", 3), mock.patch.object(Request, "excludes", lambda held, request: held.note == "first"):
        first, last = Request("a", limit=3, note="first"), Request("a", limit=3, note="last")
        held = [(mock.Mock(positions={"a": 1}), last), (mock.Mock(positions={"a": 2}), first)]
        with mock.patch.object(registry, "_held_of", return_value=held):
            assert refusing(registry, Request("a", limit=3), timeout=0)


def ticket(resource, position):
    return Ticket(resource, position, "me", False)


def test_own_rows_ahead_of_a_request(locks, registry):
    with locks.limit("a", 9, weight=2) as first, locks.limit("b", 9), locks.limit("a", 9, weight=3) as second:

        def weights(position):
            return [request.weight for request in registry.requests_ahead(ticket("a", position))]

        assert weights(second.position + 1) == [2, 3]
        assert weights(second.position) == [2]
        assert weights(first.position) == []
        assert registry.requests_ahead(ticket("c", 99)) == []
    with locks.all_of(locks.limit("a", 9), locks.limit("b", 9)) as both:
        assert [request.resource for request in registry.requests_ahead(ticket("a", both.positions["a"] + 9))] == ["a"]


def test_own_rows_blocking_an_own_request(locks, registry):
    with locks.all_of(locks.mutex("a"), locks.mutex("b")) as grant:
        behind = registry.blocker_of(Request("b"), grant.positions["b"] + 1)
        assert (behind.position, behind.state) == (grant.positions["b"], "holds")
        assert behind.owner == this_thread().owner
        assert 0 <= behind.seconds < 60
        assert registry.blocker_of(Request("b"), grant.positions["b"]) is None
        assert registry.blocker_of(Request("c"), 99) is None
    with locks.read("a") as reader:
        assert registry.blocker_of(Request("a", READ, None), reader.position + 1) is None
        assert registry.blocker_of(Request("a"), reader.position + 1).position == reader.position


def test_registry_checks_a_bounded_number_of_rows(locks, registry):
    """A holder of thousands of rows on one resource does not pay for each of them at each request."""
    held = [locks.limit("a", 10_000) for _ in range(MAX_AHEAD + 5)]
    grants = []
    for lock in held:
        assert lock.acquire()
        grants.append(lock.grant)
    last = grants[-1].position + 1
    assert len(registry.requests_ahead(ticket("a", last))) == MAX_AHEAD
    for grant in grants[:MAX_AHEAD]:
        grant.state.requests = (Request("a", READ, None),)
    assert registry.blocker_of(Request("a", READ, None), last) is None
    for grant in grants:
        grant.release()


# -- giving back


def test_released_grants_leave_no_state(locks, registry):
    """For any owner: a process lives for years."""

    def held():
        return sorted(request.resource for request in registry.requests_of(this_thread().number))

    third = locks.limit("c", 3)
    with locks.mutex("a"), locks.all_of(locks.mutex("b"), locks.limit("c", 3)):
        for _ in range(2):
            assert third.acquire()
        assert held() == ["a", "b", "c", "c", "c"]
        third.release()
        assert held() == ["a", "b", "c", "c"]
        assert len(registry.requests_ahead(ticket("c", 99))) == 2
        registry.release_later(third.grant)
        assert held() == ["a", "b", "c"]
    assert not registry
    assert registry._by_caller == {}
    assert registry._by_resource == {}


def test_reassigned_grant_belongs_to_the_new_caller(locks, registry):
    grant = locks.all_of(locks.mutex("a"), locks.mutex("b"))
    assert grant.acquire()
    other = Caller("thread", new_number(), "other")
    registry.reassign(grant.grant, other)
    assert grant.grant.state.caller is other
    assert registry.requests_of(this_thread().number) == []
    assert [request.resource for request in registry.requests_of(other.number)] == ["a", "b"]
    assert registry._by_caller[other.number] == {"a": [grant.grant], "b": [grant.grant]}
    grant.release()
    assert registry._by_caller == {}


def test_child_does_not_release_its_parents_grants(locks):
    with locks.mutex("a") as grant:
        with mock.patch.object(os, "getpid", return_value=os.getpid() + 1), pytest.raises(sqlsem.NotHeld, match="fork"):
            grant.release()
        grant.check()
        assert [entry.position for entry in locks.admin.entries("a")] == [grant.position]


def told_of(locks, kind):
    events = []
    locks.on(kind, events.append)
    return events


def test_row_missing_at_release_was_lost(locks, registry):
    lock, lost = locks.mutex("a"), told_of(locks, "lost")
    assert lock.acquire()
    grant = lock.grant
    with (
        mock.patch.object(locks.client, "execute_effect", return_value=False),
        pytest.raises(sqlsem.LockLost, match="its row was removed before it was released"),
    ):
        lock.release()
    assert grant.lost
    until(lambda: lost, "the event arrives")
    assert [(event.resource, event.position) for event in lost] == [("a", grant.position)]
    assert "removed before it was released" in lost[0].why
    assert not registry


def test_failed_release_is_left_to_the_heartbeat(locks, registry):
    lock, member = locks.mutex("a"), locks.client.member
    assert lock.acquire()
    grant = lock.grant
    with (
        mock.patch.object(locks.client, "execute_effect", side_effect=sqlsem.Unavailable("the cable")),
        pytest.raises(sqlsem.LockLost, match=r"could not be released in time \(the cable\)"),
    ):
        lock.release()
    assert not member.has_ticket(grant.state.tickets[0])
    assert not registry


def test_release_is_retried_until_the_lease_ends():
    with sqlsem.testing.memory(lease=30) as locks:
        client, calls = locks.client, []
        execute_effect = client.execute_effect

        def record(effect):
            calls.append((effect.what, effect.retry_timeout))
            return execute_effect(effect)

        with mock.patch.object(client, "execute_effect", record), locks.mutex("a"):
            pass
        (_, (what, retry_timeout)) = calls
        assert what == "release"
        assert 0 < retry_timeout <= client.member.trust


def test_rest_of_a_partly_lost_group_is_released(locks):
    member = locks.client.member
    with pytest.raises(sqlsem.LockLost), locks.all_of(locks.mutex("a"), locks.mutex("b")) as grant:
        grant.state.mark_lost("somebody took b")
    assert not any(member.has_ticket(ticket) for ticket in grant.state.tickets)
    until(lambda: locks.admin.entries("a") == locks.admin.entries("b") == [], "the next ping removes them")


def test_deferred_release_publishes_its_end(locks, registry):
    released = told_of(locks, "released")
    lock = locks.mutex("a")
    assert lock.acquire()
    registry.release_later(lock.grant)
    until(lambda: released, "the event arrives")
    assert [event.resource for event in released] == ["a"]
    until(lambda: locks.admin.entries("a") == [], "the next ping removes it")


# -- telling


def test_grant_event_names_the_rows_waited_for(locks, registry):
    granted = told_of(locks, "granted")
    with locks.all_of(locks.mutex("a"), locks.mutex("b")) as grant:
        until(lambda: len(granted) == 2, "both events arrive")
        assert [(event.at_once, event.behind) for event in granted] == [(True, None)] * 2
        waiters = {}
        for ticket, request in zip(grant.state.tickets, grant.state.requests, strict=True):
            waiters[ticket.position] = Waiter(ticket, request, mock.Mock())
        blocker = registry.blocker_of(Request("b"), 99)
        waiters[grant.positions["b"]].behind = blocker
        registry.publish_granted(grant.state, 2.5, waiters)
        until(lambda: len(granted) == 4, "both events arrive again")
        assert {event.resource: (event.at_once, event.behind, event.waited) for event in granted[2:]} == {
            "a": (False, None, 2.5),
            "b": (False, blocker, 2.5),
        }


def test_end_event_is_published_once_with_its_duration(locks, registry):
    events = []
    for kind in ("released", "lost"):
        locks.on(kind, events.append)
    ends = [registry.publish_released, registry.publish_lost]
    for end in ends:
        with locks.mutex("a") as grant:
            assert grant.state.is_published is True
            end(grant.state)
            assert grant.state.is_published is False
    until(lambda: len(events) == len(ends), "each end is published once")
    assert [event.name for event in events] == ["released", "lost"]
    assert all(0 <= event.held < 60 for event in events)


def test_lost_marks_only_lost_grants(locks, registry):
    with locks.mutex("a") as grant, pytest.raises(sqlsem.LockLost), locks.mutex("b") as other:
        assert registry.mark_lost([other.position, 999], "somebody took it") == [other]
        assert other.state.why_lost == "somebody took it"
        assert grant.state.why_lost is None
        assert registry.grants() == [grant]
        assert registry.mark_lost(None, "all of it") == [grant]
        assert registry.grants() == []
        grant.state.why_lost = None
        registry.add(grant)
