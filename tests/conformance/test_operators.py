"""Operators' views and actions."""

import contextlib
import json

import pytest
from support import Attempt, until

import sqlsem

GRACE = 0.6


# -- limits


def test_a_cap_counts_from_now_on(connect, name, attempt):
    coordinator, operator = connect(), connect()
    three = [attempt(coordinator.limit(name, 3)) for _ in range(3)]
    for waiter in three:
        waiter.granted()
    operator.admin.set_limit(name, 1)
    fourth = attempt(coordinator.limit(name, 3))
    three[0].leave()
    three[1].leave()
    assert fourth.waits(), "two inside, the cap is one"
    three[2].leave()
    fourth.granted()
    operator.admin.set_limit(name, None)
    attempt(coordinator.limit(name, 3)).granted()
    assert all(resource.cap is None for resource in operator.admin.resources() if resource.resource == name)


def test_raising_the_cap_lets_waiters_in(connect, name, attempt):
    coordinator, operator = connect(), connect()
    operator.admin.set_limit(name, 1)
    attempt(coordinator.limit(name, 3)).granted()
    late = [attempt(coordinator.limit(name, 3)) for _ in range(2)]
    assert all(waiter.waits(0.1) for waiter in late)
    operator.admin.set_limit(name, 2)
    late[0].granted()
    assert late[1].waits()
    operator.admin.set_limit(name, None)
    late[1].granted()


def test_cap_does_not_raise_declared_limits(connect, name, attempt):
    coordinator = connect()
    coordinator.admin.set_limit(name, 10)
    attempt(coordinator.mutex(name)).granted()
    assert attempt(coordinator.mutex(name)).waits()
    coordinator.admin.set_limit(name, None)


def test_a_cap_below_a_weight_holds_it_back_until_it_is_lifted(connect, name, attempt):
    coordinator = connect()
    coordinator.admin.set_limit(name, 1)
    heavy = attempt(coordinator.limit(name, 3, weight=2))
    assert heavy.waits()
    assert not coordinator.limit(name, 3, weight=2).acquire(blocking=False)
    coordinator.admin.set_limit(name, 2)
    heavy.granted()
    coordinator.admin.set_limit(name, None)


# -- pausing


def test_pause_and_resume(connect, name, attempt):
    coordinator, operator = connect(), connect()
    inside = attempt(coordinator.limit(name, 2))
    inside.granted()
    operator.admin.pause(name)
    operator.admin.pause(name)
    late = [attempt(coordinator.limit(name, 2)) for _ in range(2)]
    assert all(waiter.waits(0.1) for waiter in late)
    assert not inside.grant.lost
    assert not coordinator.limit(name, 2).acquire(blocking=False)
    assert [resource.paused for resource in operator.admin.resources() if resource.resource == name] == [True]
    inside.leave()
    assert late[0].waits()
    operator.admin.resume(name)
    for waiter in late:
        waiter.granted()
    operator.admin.resume(name)


@pytest.mark.parametrize("action", ["pause", "cap"])
def test_pause_holds_back_earlier_waiters(connect, name, attempt, action):
    """A waiter that slept before the pause or cap stays out when the holder leaves and wakes it."""
    holder, coordinator, operator = connect(), connect(), connect()
    inside = attempt(holder.mutex(name))
    inside.granted()
    late = attempt(coordinator.limit(name, 2, weight=2))
    assert late.waits(0.5)
    if action == "pause":
        operator.admin.pause(name)
    else:
        operator.admin.set_limit(name, 1)
    inside.leave()
    assert late.waits(0.5)
    operator.admin.resume(name)
    operator.admin.set_limit(name, None)
    late.granted()


def test_a_pause_does_not_keep_others_from_timing_out(connect, database, name):
    coordinator = connect()
    coordinator.admin.pause(name)
    assert not coordinator.mutex(name).acquire(timeout=0.3)
    assert database.queue(name) == []
    coordinator.admin.resume(name)
    with coordinator.mutex(name):
        pass


def test_pause_affects_a_single_resource(connect, name):
    coordinator = connect()
    coordinator.admin.pause(name("a"))
    with coordinator.mutex(name("b"), timeout=0):
        pass
    coordinator.admin.resume(name("a"))


# -- revoking


@pytest.mark.timing(0.1)
def test_revoke_a_waiting_row(connect, database, name, attempt):
    coordinator, operator = connect(), connect()
    with coordinator.mutex(name):
        second = attempt(coordinator.mutex(name))
        third = attempt(coordinator.mutex(name))
        position = database.queue(name)[1][0]
        assert operator.admin.revoke(position) is True
        error = second.failed()
        assert isinstance(error, sqlsem.LockLost)
        assert error.resource == name
        assert str(position) in str(error)
        assert third.waits(0.05)
    third.granted()


def test_revoked_holder_is_notified_before_the_next_grant(connect, name, attempt):
    holder, other, operator = connect(grace=GRACE), connect(grace=GRACE), connect()
    lock = holder.mutex(name)
    lock.acquire()
    grant = lock.grant
    knew = []
    late = Attempt(other.mutex(name), entering=lambda: knew.append(grant.lost))
    until(lambda: len(operator.admin.entries(name)) == 2, "the next waits")
    assert operator.admin.revoke(grant.position) is False  # the holder is notified, and has its grace
    late.granted()
    assert knew == [True], "the next waiter was granted before the holder was notified"
    until(grant.lost_event.is_set, "it is told")
    late.leave()
    with pytest.raises(sqlsem.LockLost):
        lock.release()


def test_a_revoked_holder_shows_as_revoked(connect, name):
    holder, operator = connect(grace=3600), connect()
    lock = holder.mutex(name)
    lock.acquire()
    assert operator.admin.revoke(lock.grant.position) is False
    assert [entry.state for entry in operator.admin.entries(name)] == ["revoked"]
    with pytest.raises(sqlsem.LockLost):
        lock.grant.check()  # the check asks the database
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    assert operator.admin.entries(name) == []


def test_forced_revoke_does_not_wait(connect, name):
    holder, operator = connect(grace=3600), connect()
    lock = holder.mutex(name)
    lock.acquire()
    assert operator.admin.revoke(lock.grant.position, force=True) is True
    with operator.mutex(name, timeout=60):
        pass
    with pytest.raises(sqlsem.LockLost):
        lock.grant.check()
    with pytest.raises(sqlsem.LockLost):
        lock.release()


def test_revoke_of_unknown_position(connect):
    with pytest.raises(sqlsem.NotHeld, match="no row"):
        connect().admin.revoke(2**40)


# -- views


def test_entries(connect, name, attempt):
    coordinator = connect()
    with coordinator.limit(name, 3, weight=2, note="nightly"):
        attempt(coordinator.limit(name, 3, weight=2))
        first, second = coordinator.admin.entries(name)
        assert (first.state, first.weight, first.limit, first.note) == ("holds", 2, 3, "nightly")
        assert (second.state, second.note, second.granted_at) == ("waits", None, None)
        assert first.position < second.position
        assert first.resource == second.resource == name
        assert first.access == "write"
        assert first.pid
        assert first.host
        assert first.program
        assert first.owner
        assert first.member_id == second.member_id
        assert first.requested_at.tzinfo is not None
        assert first.granted_at >= first.requested_at
        assert 0 <= first.seconds < 3600
        assert first.missing_for is None
        assert json.loads(json.dumps(first.as_dict()))["resource"] == name
        assert coordinator.admin.entries(name("b")) == []
        assert first.position in [entry.position for entry in coordinator.admin.entries()]


def test_resources(connect, name, attempt):
    coordinator = connect()
    coordinator.admin.set_limit(name, 1)
    coordinator.admin.set_stale_after(name, 90)
    with coordinator.limit(name, 3):
        attempt(coordinator.limit(name, 3))
        (row,) = [resource for resource in coordinator.admin.resources() if resource.resource == name]
        assert (row.cap, row.paused, row.stale_after) == (1, False, 90)
        assert (row.holding, row.waiting) == (1, 1)
    coordinator.admin.set_limit(name, None)
    coordinator.admin.set_stale_after(name, None)


@pytest.mark.timing(0.1)
def test_history_and_outcomes(connect, database, name, attempt):
    coordinator, operator = connect(), connect(grace=GRACE)

    def outcomes():
        return [past.outcome for past in coordinator.admin.history(name)]

    with coordinator.mutex(name, note="first"):
        pass
    past = coordinator.admin.history(name)[0]
    assert (past.outcome, past.note, past.resource, past.weight, past.access) == ("released", "first", name, 1, "write")
    assert past.requested_at <= past.granted_at <= past.ended_at
    assert past.waited >= 0
    assert past.held >= 0
    assert json.loads(json.dumps(past.as_dict()))["outcome"] == "released"
    with coordinator.mutex(name):
        assert not operator.mutex(name).acquire(timeout=0.2)
        assert outcomes() == ["timeout", "released"]
        assert coordinator.admin.history(name)[0].held is None
        second = attempt(operator.mutex(name))
        operator.admin.revoke(database.queue(name)[1][0])
        second.failed()
        assert outcomes()[0] == "revoked"
    assert outcomes() == ["released", "revoked", "timeout", "released"]
    assert len(coordinator.admin.history(name, maximum=2)) == 2
    assert coordinator.admin.history(name("b")) == []


def test_trying_in_vain_leaves_no_history(connect, name):
    first, other = connect(), connect()
    with first.mutex(name):
        other.mutex(name).acquire(blocking=False)
    assert [past.outcome for past in first.admin.history(name)] == ["released"]


# -- bare rows


def test_bare_rows_are_removed_at_their_age(connect, database, name):
    coordinator = connect()
    with contextlib.closing(database.raw()) as connection:
        database.insert_bare(connection.cursor(), name, "a bare one")
        assert not coordinator.mutex(name).acquire(timeout=0.5)
        assert len(database.queue(name)) == 1, "by default such a row stays"
        coordinator.admin.set_stale_after(name, 0.2)
        with coordinator.mutex(name, timeout=60):
            assert [row[2] for row in database.queue(name)] != ["a bare one"]
        assert "reaped" in [past.outcome for past in coordinator.admin.history(name)]
        coordinator.admin.set_stale_after(name, None)


def test_reap_removes_stale_bare_rows(connect, database, name):
    coordinator = connect()
    with contextlib.closing(database.raw()) as connection:
        cursor = connection.cursor()
        for number in range(3):
            database.insert_bare(cursor, name, f"bare {number}")
    coordinator.admin.set_stale_after(name, 0.001)
    until(lambda: coordinator.admin.reap() >= 0 and database.queue(name) == [])
    coordinator.admin.set_stale_after(name, None)


def test_rows_of_members_are_never_stale(connect, name, attempt):
    coordinator = connect()
    coordinator.admin.set_stale_after(name, 0.001)
    with coordinator.mutex(name) as grant:
        late = attempt(connect().mutex(name))
        assert late.waits(0.5)
        coordinator.admin.reap()
        grant.check()
    late.granted()
    coordinator.admin.set_stale_after(name, None)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "3", True, 2**31])
def test_bad_caps_are_refused(connect, name, bad):
    with pytest.raises(sqlsem.ConfigurationError):
        connect().admin.set_limit(name, bad)


@pytest.mark.parametrize("bad", [0, -1, "three", True, float("nan"), float("inf"), 1e12])
def test_bad_ages_are_refused(connect, name, bad):
    with pytest.raises(sqlsem.ConfigurationError):
        connect().admin.set_stale_after(name, bad)
