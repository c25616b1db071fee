"""Processes that are stopped for a while: the living are left alone, however long they sleep."""

import time

import pytest
from support import remains

GRACE = 1.0
LONG = 3 * GRACE


def test_a_stopped_holder_is_not_reaped(agents, database, name, queued):
    holder, waiter = agents(2, grace=GRACE)
    (entry,) = queued(holder, waiter)
    position = database.queue(name)[0][0]
    holder.stop()
    remains(lambda: not entry.ready, LONG, "no request is granted while the holder is stopped")
    holder.resume()
    holder.check()
    assert not holder.lost()
    assert not holder.told("lost")
    assert database.queue(name)[0][0] == position
    left_at = holder.release()["leaving"]
    assert entry.get()["got"] >= left_at
    waiter.release()
    assert database.queue(name) == []


def test_a_stopped_holder_may_leave_without_a_look(agents, database, name, queued):
    holder, waiter = agents(2, grace=GRACE)
    (entry,) = queued(holder, waiter)
    holder.stop()
    time.sleep(3 * GRACE)
    leaving = holder.call("release")  # its first check after it wakes
    holder.resume()
    assert entry.get()["got"] >= leaving.get()["leaving"]
    waiter.release()


def test_a_stopped_waiter_keeps_its_place(agents, database, name, queued):
    holder, waiter, last = agents(3, grace=GRACE)
    entry, later = queued(holder, waiter, last)
    waiter.stop()
    holder.release()
    remains(lambda: not later.ready, LONG, "no request overtakes the stopped waiter")
    assert len(database.queue(name)) == 2
    waiter.resume()
    entry.get()
    left_at = waiter.release()["leaving"]
    assert later.get()["got"] >= left_at
    last.release()
    assert database.queue(name) == []


def test_a_stopped_holder_that_dies_makes_way(agents, database, name, queued):
    holder, waiter = agents(2, grace=GRACE)
    (entry,) = queued(holder, waiter)
    holder.stop()
    remains(lambda: not entry.ready, 2 * GRACE, "no request is granted while the holder is stopped")
    killed = holder.kill()
    assert killed < entry.get()["got"] < killed + GRACE + 20
    waiter.release()


@pytest.mark.engines("sqlite", "postgresql")
def test_a_lease_ends_while_its_holder_sleeps(agents, database, name, queued):
    """A lease runs by the server's clock: only here a pause costs the lock, and the holder knows that first."""
    holder, waiter = agents(1, lease=1.0)[0], agents(1, grace=GRACE)[0]
    (entry,) = queued(holder, waiter)
    holder.stop()
    entry.get()
    holder.resume()
    holder.event("lost")
    assert holder.lost()
    waiter.release()


def test_stopped_holder_learns_of_revoke_at_once(agents, database, name, connect, queued):
    """Others are granted after its grace, and its memory does not show that."""
    holder, waiter = agents(2, grace=GRACE)
    (entry,) = queued(holder, waiter)
    position = database.queue(name)[0][0]
    holder.stop()
    reply = holder.call("lost")  # its first check after it wakes
    connect().admin.revoke(position)
    entry.get()
    holder.resume()
    assert reply.get()["lost"]
    waiter.release()
