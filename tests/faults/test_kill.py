"""Processes that die without a message: no waiter waits longer than their grace, and no operator has to clean up."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support import until

GRACE = 1.5
#: The longest time from the end of the grace to the next grant: a check, on a busy machine.
CHECK = 20.0


def test_a_killed_holder_makes_way(agents, database, name, queued):
    holder, waiter = agents(2, grace=GRACE)
    requested = time.monotonic()
    (entry,) = queued(holder, waiter)
    killed = holder.kill()
    got = entry.get()["got"]
    assert got < killed + GRACE + CHECK
    if database.engine != "sqlite":
        # A free beacon does not tell a dead process from a lost connection: the grace counts from the last heartbeat,
        # which is at most an eighth of the grace older than the grant.
        assert got >= requested + GRACE * 7 / 8
    waiter.release()
    assert database.queue(name) == []


def test_grace_counts_from_the_owner_not_the_waiter(agents, database, name, queued):
    patient, hasty = agents(1, grace=2)[0], agents(1, grace=0)[0]
    requested = time.monotonic()
    (entry,) = queued(patient, hasty)
    killed = patient.kill()
    got = entry.get()["got"]
    if database.engine != "sqlite":
        assert got >= requested + 2 * 7 / 8
    assert got < killed + 2 + CHECK
    hasty.release()


def test_without_grace_a_killed_holder_is_gone_at_once(agents, database, name, queued):
    holder, waiter = agents(2, grace=0)
    (entry,) = queued(holder, waiter)
    killed = holder.kill()
    assert entry.get()["got"] < killed + CHECK
    waiter.release()
    assert database.queue(name) == []


def test_killed_waiter_does_not_block_later_waiters(agents, database, name, queued):
    holder, *waiters = agents(4, grace=GRACE)
    entries = queued(holder, *waiters)
    waiters[1].kill()
    left_at = holder.release()["leaving"]
    assert entries[0].get()["got"] >= left_at
    left_at = waiters[0].release()["leaving"]
    got = entries[2].get()["got"]
    assert left_at <= got < left_at + GRACE + CHECK
    waiters[2].release()
    assert database.queue(name) == []


def test_a_killed_holder_and_killed_waiters(agents, database, name, queued):
    holder, *waiters = agents(6, grace=GRACE)
    entries = queued(holder, *waiters)
    killed = time.monotonic()
    for agent in (holder, waiters[0], waiters[1], waiters[3]):
        agent.kill()
    third = entries[2].get()
    assert third["got"] < killed + 4 * GRACE + CHECK
    assert not entries[4].ready
    left_at = waiters[2].release()["leaving"]
    fifth = entries[4].get()
    assert fifth["got"] >= left_at
    assert fifth["position"] > third["position"]
    waiters[4].release()
    assert database.queue(name) == []


def test_killed_holders_give_their_places_back(agents, database, name, waiting):
    first, second, *others = agents(4, grace=GRACE)
    first.hold("limit", name, 2)
    second.hold("limit", name, 2)
    entries = [agent.ask("limit", name, 2) for agent in others]
    waiting(name, 4)
    first.kill()
    until(lambda: any(entry.ready for entry in entries), "one gets in")
    second.check()
    time.sleep(0.2)
    assert sum(entry.ready for entry in entries) == 1
    second.kill()
    for entry in entries:
        entry.get()
    for agent in others:
        agent.release()
    assert database.queue(name) == []


def test_a_killed_reader_and_a_killed_writer(agents, database, name, waiting):
    reader, writer, last = agents(3, grace=GRACE)
    reader.hold("read", name)
    reply = writer.ask("write", name)
    waiting(name, 2)
    entry = last.ask("read", name)
    waiting(name, 3)
    assert not reply.ready
    # The waiting writer blocks the reader until it dies.
    writer.kill()
    entry.get()
    reader.check()
    reader.release()
    last.release()
    assert database.queue(name) == []


def test_newcomer_finds_dead_members(agents, database, name, waiting):
    holder, later = agents(2, grace=0.5)
    holder.hold("mutex", name)
    holder.kill()
    waiting(name, 1)  # no client was there to notice
    later.hold("mutex", name)
    later.release()
    assert database.queue(name) == []


def test_a_try_gets_past_the_dead(agents, database, name, connect):
    (holder,) = agents(1, grace=0)
    holder.hold("mutex", name)
    holder.kill()
    lock = connect().mutex(name)
    until(lambda: lock.acquire(blocking=False), "a lock of the dead can be had without waiting for it")
    lock.release()


def test_an_operator_clears_up_after_the_dead(agents, database, name, waiting, connect):
    holder, waiter = agents(2, grace=0.5)
    holder.hold("mutex", name)
    waiter.kill()
    coordinator = connect()
    holder.kill()
    waiting(name, 1)

    def cleared():
        coordinator.admin.reap()
        return database.queue(name) == []

    until(cleared, "reap removes the rows of the dead")


@pytest.mark.engines("sqlite")
def test_the_beacon_files_of_the_dead_are_cleared_away(agents, database, name, connect):
    holders = agents(3, grace=1)
    for number, holder in enumerate(holders):
        holder.hold("mutex", name(number))
    for holder in holders:
        holder.kill()
    coordinator = connect()
    coordinator.admin.reap()
    folder = coordinator.engine.beacons.folder
    assert list(folder.iterdir()) == []


@pytest.mark.engines("sqlite", "postgresql")
def test_a_child_started_while_holding_does_not_keep_the_beacon(agents, database, name, waiting, spawn):
    """A child of the holder outlives it, with all inherited descriptors."""
    (waiter,) = agents(1, grace=0)
    holder = spawn(hold_and_start_a_sleeper, name=str(name))
    sleeper = holder.expect("held")["sleeper"]
    try:
        entry = waiter.ask("mutex", name)
        waiting(name, 2)
        holder.kill()
        entry.get()
        os.kill(sleeper, 0)
    finally:
        os.kill(sleeper, signal.SIGKILL)
    waiter.release()


def hold_and_start_a_sleeper(channel, url, options, name):
    import sqlsem

    sqlsem.connect(url, **options, grace=0).mutex(name).acquire()
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
    )
    channel.tell("held", sleeper=sleeper.pid)
    channel.ask()
