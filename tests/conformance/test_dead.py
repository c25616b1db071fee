"""Every view shows that an owner is dead, also without a waiter, and a view changes no row."""

import contextlib
import os
import signal
import time

import pytest
from support import PATIENCE, remains, session, until

import sqlsem

GRACE = 1.0


def entry_of(coordinator, name):
    entries = coordinator.admin.entries(name)
    return entries[0] if entries else None


def hold(spawn, name, grace=GRACE, **lock):
    """A process that holds a lock."""
    child = spawn(session, grace=grace)
    child.expect("ready")
    child.call("granted", do="acquire", lock={"kind": "mutex", "name": str(name), **lock})
    return child


def test_living_holder_is_shown_as_holder(spawn, connect, database, name):
    coordinator = connect()
    child = hold(spawn, name)

    def shown_living():
        entry = entry_of(coordinator, name)
        return (entry.state, entry.missing_for, entry.grace) == ("holds", None, GRACE)

    remains(shown_living, 2.5, "it is shown as it is")
    child.call("released", do="release")


def test_ls_shows_dead_members_without_waiters(spawn, connect, database, name):
    coordinator = connect()
    child = hold(spawn, name)
    child.kill()
    entry = until(lambda: (row := entry_of(coordinator, name)).state == "dead" and row, "it is shown as dead")
    assert entry.missing_for is not None
    assert entry.pid == child.pid
    later = until(lambda: (row := entry_of(coordinator, name)).missing_for > entry.missing_for + 0.2 and row)
    assert later.state == "dead"
    assert len(database.queue(name)) == 1, "a read removes nothing"
    lock = coordinator.mutex(name)
    assert lock.acquire(blocking=False), "a try succeeds at once, though no waiter has reaped"
    lock.release()


def test_try_succeeds_after_the_grace_of_a_dead_holder(spawn, connect, name):
    child = hold(spawn, name)
    child.kill()
    lock = connect().mutex(name)
    time.sleep(GRACE * 1.5)  # the test is about a time without any poll
    assert lock.acquire(timeout=0)
    lock.release()


def test_history_names_dead_member_and_last_heartbeat(spawn, connect, database, name):
    coordinator = connect()
    asked_at = time.monotonic()
    child = hold(spawn, name, grace=4.0, note="load")  # (longer than a machine under load stands still)
    lived = child.kill() - asked_at
    time.sleep(lived + 6)  # the time without a poll must not count
    lock = coordinator.mutex(name)
    assert until(lambda: lock.acquire(blocking=False))
    lock.release()
    own_row, dead_row = coordinator.admin.history(name)
    assert (dead_row.outcome, dead_row.pid, dead_row.limit, dead_row.note) == ("reaped", child.pid, 1, "load")
    assert dead_row.host is not None
    assert dead_row.program is not None
    assert dead_row.login is not None
    assert dead_row.ended_by is not None
    assert 0 <= dead_row.held <= lived + 1, "until its last sign of life"
    assert (own_row.outcome, own_row.pid, own_row.ended_by) == ("released", os.getpid(), None)
    assert own_row.login is not None
    assert dead_row.as_dict()["ended_by"] == dead_row.ended_by


def test_history_names_the_revoking_operator(connect, database, name):
    coordinator, operator = connect(grace=0.5), connect()
    lock = coordinator.mutex(name)
    lock.acquire()
    operator.admin.revoke(lock.grant.position, force=True)
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    other = coordinator.limit(name("b"), 2)
    other.acquire()
    operator.admin.revoke(other.grant.position)
    until(lambda: other.grant.lost, "it is told")
    until(lambda: database.queue(name) == [], "the lock is released")
    for which in (name, name("b")):
        (past,) = coordinator.admin.history(which)
        assert past.outcome == "revoked"
        assert past.ended_by is not None
        assert past.login is not None
    with contextlib.suppress(sqlsem.LockLost):
        other.release()


def test_history_by_time_and_outcome(connect, database, name):
    coordinator = connect()
    with coordinator.mutex(name):
        assert not connect().mutex(name).acquire(timeout=0.05)
    with contextlib.closing(database.session()) as looking:

        def outcomes(**which):
            return [past.outcome for past in looking.history(name, 10, **which)]

        assert outcomes() == ["released", "timeout"]
        assert outcomes(outcome="timeout") == ["timeout"]
        assert outcomes(outcome="reaped") == []
        assert outcomes(since=3600) == ["released", "timeout"]
        assert outcomes(until=3600) == []
        time.sleep(0.5)
        assert outcomes(until=0.25) == ["released", "timeout"]
        assert outcomes(since=0.25) == []


def claims(channel, url, options, names, grace=GRACE):
    coordinator = sqlsem.connect(url, **options, grace=grace)
    tasks = [coordinator.queue(name).try_claim() for name in names]
    channel.tell("claimed", ids=[task.id for task in tasks])
    channel.ask()


def test_the_tasks_of_a_dead_worker_are_lost(spawn, connect, database, name):
    coordinator = connect()
    names = [name(suffix) for suffix in ("cancel", "retry", "left")]
    for queue_name in names:
        coordinator.queue(queue_name).put(1, note=queue_name)
    child = spawn(claims, names=names)
    ids = child.expect("claimed")["ids"]
    for queue_name, number in zip(names, ids, strict=True):
        (task,) = coordinator.admin.tasks(queue_name)
        assert (task.task_id, task.status, task.pid) == (number, "running", child.pid)
        assert task.login is not None
        assert task.put_by is not None
        assert [row.task_id for row in coordinator.admin.tasks(queue_name, "running")] == [number]
        assert coordinator.admin.tasks(queue_name, "lost") == []
    with pytest.raises(sqlsem.NotHeld, match="it runs"):
        coordinator.admin.retry_task(ids[0])
    child.kill()
    until(lambda: [task.status for task in coordinator.admin.tasks(names[2])] == ["lost"], "it is shown as lost")
    assert [task.task_id for task in coordinator.admin.tasks(names[2], "lost")] == [ids[2]]
    assert coordinator.admin.tasks(names[2], "running") == []
    assert coordinator.admin.attempts(ids[2])[-1].outcome in ("running", "lost")
    coordinator.admin.cancel_task(ids[0])
    coordinator.admin.retry_task(ids[1])
    assert [coordinator.admin.tasks(queue_name)[0].status for queue_name in names] == ["cancelled", "pending", "lost"]
    for number in ids[:2]:
        (attempt,) = coordinator.admin.attempts(number)
        assert (attempt.outcome, attempt.pid) == ("lost", child.pid)
        assert attempt.host is not None
        assert attempt.login is not None
    task = until(lambda: coordinator.queue(names[2]).try_claim() or coordinator.queue(names[2]).claiming.recover())
    task.finish()
    assert [attempt.outcome for attempt in coordinator.admin.attempts(ids[2])] == ["lost", "finished"]
    coordinator.admin.cancel_task(ids[1])


def starts_a_part(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    part = coordinator.batch(name, ["a", "b"], window=60).part("a").start()
    channel.tell("started")
    channel.ask()
    part.finish()


def test_the_part_of_a_dead_process_is_missing(spawn, connect, database, name):
    coordinator = connect()
    entry = coordinator.batch(name, ["a", "b"], window=60)
    child = spawn(starts_a_part, name=str(name))
    child.expect("started")
    assert entry.entry().opened_by is not None
    part = entry.entry().parts[0]
    assert (part.part, part.status, part.missing_for) == ("a", "running", None)
    assert part.login is not None
    child.kill()
    until(lambda: entry.entry().parts[0].missing_for is not None, "it is shown as missing")


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_paused_process_is_not_dead(spawn, connect, name):
    coordinator = connect()
    child = hold(spawn, name, grace=0.5)
    child.pause()
    try:
        remains(lambda: entry_of(coordinator, name).state == "holds", 3, "it is believed to live")
        assert not coordinator.mutex(name).acquire(timeout=0)
    finally:
        child.resume()
    child.send(do="release")
    assert child.expect("released", PATIENCE)


def test_expired_lease_is_shown_as_dead(spawn, connect, database, name):
    coordinator = connect()
    child = spawn(holds_by_lease, name=str(name))
    child.expect("held")
    assert entry_of(coordinator, name).state == "holds"
    child.kill()
    until(lambda: entry_of(coordinator, name).state == "dead", "the lease is over")
    assert entry_of(coordinator, name).missing_for is not None
    lock = coordinator.mutex(name)
    assert lock.acquire(timeout=0)
    lock.release()


def holds_by_lease(channel, url, options, name):
    sqlsem.connect(url, **options, lease=8).mutex(name).acquire()
    channel.tell("held")
    channel.ask()
