"""Networks that fail between a process and its database."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from agent import RemoteError
from support import AMPLE, Standstills, remains, slack, until

import sqlsem

pytestmark = pytest.mark.engines("postgresql")


@pytest.fixture
def pair(agents, proxied, queued):
    """Return a holder behind the proxy, and a waiter with a good connection."""

    def start(**settings):
        (holder,) = agents(1, on=proxied, **settings)
        (waiter,) = agents(1, grace=60)
        (entry,) = queued(holder, waiter)
        return holder, waiter, entry

    return start


def test_a_cut_that_heals_within_the_grace_costs_nothing(pair, proxy, database, name):
    holder, waiter, entry = pair(**AMPLE)
    before = database.queue(name)
    for _ in range(5):
        accepted = proxy.accepted
        proxy.cut_once()
        holder.check()
        assert proxy.accepted > accepted
    assert not holder.lost()
    assert not entry.ready
    assert database.queue(name) == before
    left_at = holder.release()["leaving"]
    assert entry.get()["got"] >= left_at
    assert not holder.told("lost")
    waiter.release()
    holder.hold("mutex", name)
    holder.release()
    assert database.queue(name) == []


def test_a_cut_of_a_waiter_costs_nothing(agents, proxied, proxy, database, name, queued):
    holder, last = agents(2, grace=60)
    (waiter,) = agents(1, on=proxied, **AMPLE)
    entry, later = queued(holder, waiter, last)
    before = database.queue(name)
    for _ in range(3):
        accepted = proxy.accepted
        proxy.cut_once()
        until(lambda accepted=accepted: proxy.accepted > accepted, "the waiter connects again")
    assert database.queue(name) == before
    holder.release()
    assert entry.get()["position"] == before[1][0]
    assert not later.ready
    waiter.release()
    later.get()
    last.release()


def test_cut_beyond_grace_is_noticed_before_the_next_grant(pair, proxy, database, name):
    holder, waiter, entry = pair(grace=2, retry=3)
    cut = time.monotonic()
    with Standstills() as still:
        proxy.cut()
        lost = holder.event("lost")
        got = entry.get()["got"]
    assert lost["lost"]
    assert lost["set"]
    assert lost["at"] < got or still.between(cut, lost["at"])
    with pytest.raises(RemoteError, match="LockLost"):
        holder.release()
    proxy.forward()
    again = holder.ask("mutex", name)
    until(lambda: len(database.queue(name)) == 2, "it asks again")
    assert not again.ready
    waiter.release()
    again.get()
    holder.check()
    holder.release()
    assert database.queue(name) == []


def test_cut_off_again_and_again_the_loser_knows_first(pair, proxy, database, name, agents):
    """A holder that loses its connection at any moment between two heartbeats."""
    holder, waiter, entry = pair(grace=1, retry=1)
    for round_number in range(3):
        time.sleep(0.11 * round_number)
        cut = time.monotonic()
        with Standstills() as still:
            proxy.cut()
            got = entry.get()["got"]
            lost = holder.event("lost")
        assert lost["at"] < got or still.between(cut, lost["at"])
        with pytest.raises(RemoteError, match="LockLost"):
            holder.release()
        proxy.forward()
        waiter.release()
        holder.events.clear()
        holder.hold("mutex", name)
        entry = waiter.ask("mutex", name)
        until(lambda: len(database.queue(name)) == 2, "the waiter waits")
    holder.release()
    entry.get()
    waiter.release()


def test_black_hole_ends_trust_of_a_live_connection(pair, proxy, database, name):
    holder, waiter, entry = pair(grace=2, retry=3)
    fell = time.monotonic()
    proxy.hole()
    lost = holder.event("lost")
    assert lost["at"] < fell + 2 + slack(10)
    # The server has not noticed: the beacon is still held, and no other request is granted.
    remains(lambda: not entry.ready, 2, "no request is granted while the server keeps the old session")
    with pytest.raises(RemoteError, match="LockLost"):
        holder.call("release").get(20)
    noticed = time.monotonic()
    proxy.server_notices()
    got = entry.get()["got"]
    assert lost["at"] < noticed < got
    proxy.forward()
    waiter.release()
    holder.hold("mutex", name)
    holder.release()
    assert database.queue(name) == []


def test_back_from_a_black_hole_in_time(pair, proxy, database, name):
    """The old session lingers on the server beside the new one, and does not block it."""
    holder, waiter, entry = pair(grace=3)
    proxy.cut_once()
    holder.check()
    proxy.hole()
    proxy.forward()  # new connections are good again; the existing ones never answer
    lost = holder.event("lost")  # its only connection was silent
    assert lost["lost"]
    assert not entry.ready
    with pytest.raises(RemoteError, match="LockLost"):
        holder.release()
    # Its row stays until the process is back and removes it.
    entry.get()
    waiter.release()
    proxy.server_notices()
    holder.hold("mutex", name)
    holder.release()
    assert database.queue(name) == []


@pytest.mark.engines("postgresql", "mysql")
def test_an_acquire_into_a_black_hole_ends(agents, proxied, proxy, name):
    (idle,) = agents(1, on=proxied, grace=1, retry=2)
    idle.hold("mutex", name)
    idle.release()
    proxy.hole()
    entry = idle.ask("mutex", name)
    with pytest.raises(RemoteError, match="Unavailable") as caught:
        entry.get()
    assert "127.0.0.1" in caught.value.message
    proxy.server_notices()
    proxy.forward()
    idle.hold("mutex", name)
    idle.release()


@pytest.mark.engines("postgresql", "mysql")
def test_the_first_acquire_into_a_black_hole_ends(agents, proxied, proxy, name):
    (fresh,) = agents(1, on=proxied, grace=1, retry=2)
    proxy.hole()
    entry = fresh.ask("mutex", name)
    with pytest.raises(RemoteError, match="Unavailable") as caught:
        entry.get()
    assert caught.value.at - caught.value.began < 2 + slack(15)
    proxy.forward()
    fresh.hold("mutex", name)
    fresh.release()


def test_a_waiter_in_a_black_hole_comes_back(agents, proxied, proxy, database, name, queued):
    (holder,) = agents(1, grace=60)
    (waiter,) = agents(1, on=proxied, grace=2, retry=10)
    (entry,) = queued(holder, waiter)
    proxy.hole()
    proxy.forward()
    holder.release()
    # It is granted in its order, or learns that it lost its row: either way, it recovers without help.
    try:
        entry.get()
        waiter.release()
    except RemoteError as exc:
        if exc.name not in ("LockLost", "Unavailable"):
            raise
    proxy.server_notices()
    until(lambda: database.queue(name) == [], "no row is left")


@pytest.mark.parametrize("purpose", ["main", "wait"])
def test_a_server_that_falls_silent_during_the_setup(agents, proxied, proxy, database, name, waiting, purpose):
    (holder,) = agents(1, grace=60)
    (waiter,) = agents(1, on=proxied, grace=2, retry=20)
    holder.hold("mutex", name)
    proxy.silence_setup_of = f"sqlsem {purpose}"
    entry = waiter.ask("mutex", name)
    until(lambda: proxy.silenced == 1, "the connection was silenced")
    waiting(name, 2)
    holder.release()
    entry.get()
    waiter.release()
    proxy.server_notices()
    until(lambda: database.queue(name) == [], "no row is left")


def test_a_lost_answer_does_not_make_a_second_row(agents, proxied, proxy, database, name):
    (member,) = agents(1, on=proxied, **AMPLE)
    member.hold("mutex", name("first"))
    for number in range(3):
        proxy.lose_answer_to = lambda data, number=number: b"marked" in data
        granted = member.hold("limit", name, 9, note="marked", thread=f"t{number}")
        assert proxy.lost_answers == number + 1
        rows = [row for row in database.queue(name) if row[1] == name]
        assert len(rows) == number + 1
        assert rows[-1][0] == granted["position"]
    assert not member.lost("one")
    for thread in ("t0", "t1", "t2", "one"):
        member.release(thread)
    assert database.queue(name) == []


def test_a_lost_answer_to_a_release_is_no_loss(agents, proxied, proxy, database, name):
    (member,) = agents(1, on=proxied, **AMPLE)
    member.hold("mutex", name("first"))
    member.hold("mutex", name("keep"), thread="two")
    proxy.lose_answer_to = lambda data: name("first").encode() in data
    member.release()
    assert proxy.lost_answers == 1
    assert not member.lost("two")
    member.release("two")
    assert database.queue(name) == []


def test_a_lost_answer_to_all_of(proxied, proxy, database, name):
    with proxied.coordinator(**AMPLE) as coordinator:
        with coordinator.mutex(name("first")):
            proxy.lose_answer_to = lambda data: b"marked" in data
            both = sqlsem.all_of(
                coordinator.mutex(name("a"), note="marked"), coordinator.limit(name("b"), 3, note="marked")
            )
            with both as grant:
                assert proxy.lost_answers == 1
                assert [row[0] for row in database.queue(name)][1:] == sorted(grant.positions.values())
                assert not grant.lost
    assert database.queue(name) == []


def lock(coordinator, name):
    with coordinator.mutex(name):
        pass


def wait(coordinator, name):
    """Behind another thread of the same process."""
    first = coordinator.mutex(name)
    first.acquire()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(lock, coordinator, name)
        until(lambda: second.done() or len(coordinator.admin.entries(name)) == 2, "the second waits")
        first.release()
        second.result()


async def lock_and_wait(coordinator, name):
    """As tasks of an event loop."""

    async def lock():
        async with coordinator.aio.mutex(name):
            pass

    async with coordinator.aio.mutex(name):
        second = asyncio.create_task(lock())
        while not second.done() and len(coordinator.admin.entries(name)) < 2:
            await asyncio.sleep(0.01)
    await second


def upgrade(coordinator, name):
    with coordinator.read(name) as grant:
        grant.upgrade()


def work(coordinator, name):
    queue = coordinator.queue(name)
    queue.put({"a": 1})
    while (task := queue.try_claim()) is not None:
        with task:
            pass


@pytest.mark.parametrize("job", [lock, wait, lock_and_wait, upgrade, work])
def test_the_server_ends_a_session_after_any_of_its_messages(proxied, proxy, database, name, job):
    """Also between the answer to a statement and its COMMIT, which are two messages. The only error is a loss, each
    call ends, and no row is left.
    """

    def do(number):
        proxy.end_after = number
        try:
            with proxied.coordinator(**AMPLE) as coordinator:
                done = job(coordinator, name)
                if done is not None:
                    asyncio.run(done)
        except sqlsem.LockLost:
            lost.append(number)
        return proxy.end_after is None

    lost = []
    number = 1
    while do(number):
        until(lambda: database.queue(name) == [], f"no row is left after {number} messages")
        number += 1
    assert number > 10
    assert len(lost) < number / 2


def test_a_slow_network_is_no_outage(pair, proxy, database, name):
    holder, waiter, entry = pair(grace=20, retry=20)
    proxy.slow(0.1)
    for _ in range(2):
        holder.check()
    time.sleep(1.5)
    assert not holder.lost()
    holder.release()
    entry.get()
    again = holder.ask("mutex", name)
    until(lambda: len(database.queue(name)) == 2, "it waits over the slow line")
    waiter.release()
    again.get()
    holder.release()
    assert database.queue(name) == []


def test_loss_is_reported_in_every_way(proxied, proxy, name):
    calls = []
    with proxied.coordinator(grace=1, retry=1) as coordinator:
        lock = coordinator.mutex(
            name, on_lost=lambda grant: calls.append((grant, grant.lost, grant.lost_event.is_set()))
        )
        with pytest.raises(sqlsem.LockLost, match="has not answered a heartbeat"):
            with lock as grant:
                proxy.cut()
                assert grant.lost_event.wait(30)
                assert grant.lost
                until(lambda: calls, "the callback")
                with pytest.raises(sqlsem.LockLost):
                    grant.check()
        assert calls == [(grant, True, True)]
        proxy.forward()


def test_error_in_the_block_precedes_the_loss(proxied, proxy, name):
    with proxied.coordinator(grace=1, retry=1) as coordinator:
        with pytest.raises(ZeroDivisionError):
            with coordinator.mutex(name) as grant:
                proxy.cut()
                assert grant.lost_event.wait(30)
                _ = 1 / 0
        proxy.forward()


def test_failing_callback_does_not_stop_other_callbacks(proxied, proxy, name):
    calls = []

    def fails(grant):
        calls.append("fails")
        raise RuntimeError("on_lost itself is broken")

    with proxied.coordinator(grace=1, retry=1) as coordinator:
        first = coordinator.mutex(name("a"), on_lost=fails)
        second = coordinator.mutex(name("b"), on_lost=lambda grant: calls.append("works"))
        first.acquire()
        second.acquire()
        proxy.cut()
        until(lambda: sorted(calls) == ["fails", "works"], "both are told")
        for lock in (first, second):
            with pytest.raises(sqlsem.LockLost):
                lock.release()
        proxy.forward()
