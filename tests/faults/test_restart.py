"""The database server restarts under holders and waiters."""

import time

import psycopg
import pymysql
import pytest
from agent import RemoteError
from support import AMPLE, remains, slack, until

import sqlsem

pytestmark = pytest.mark.engines("postgresql", "mysql")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_shorter_than_the_grace_costs_nothing(own_server, restarted, agents, name, waiting, mode):
    holder, first, second = agents(3, on=restarted, **AMPLE)
    position = holder.hold("mutex", name)["position"]
    entries = []
    for number, waiter in enumerate((first, second), 2):
        entries.append(waiter.ask("mutex", name))
        waiting(name, number, on=restarted)
    before = restarted.queue(name)
    own_server.restart(mode)

    assert restarted.queue(name) == before
    holder.check()
    assert not holder.lost()
    assert before[0][0] == position
    remains(lambda: not any(entry.ready for entry in entries), 0.5, "the waiters wait")
    left_at = holder.release()["leaving"]
    answer = entries[0].get()
    assert answer["got"] >= left_at
    assert answer["position"] == before[1][0]
    assert not entries[1].ready
    left_at = first.release()["leaving"]
    two = entries[1].get()
    assert two["got"] >= left_at
    assert two["position"] == before[2][0]
    second.release()
    assert restarted.queue(name) == []
    assert not any(agent.told("lost") for agent in (holder, first, second))
    # All calls work as before.
    holder.hold("mutex", name)
    holder.release()


def test_released_while_the_server_is_away(own_server, restarted, agents, name, queued):
    holder, waiter = agents(2, on=restarted, **AMPLE)
    (entry,) = queued(holder, waiter, on=restarted)
    own_server.stop("immediate")
    leaving = holder.call("release")
    remains(lambda: not leaving.ready, 0.5, "the release is tried again")
    own_server.start()
    left_at = leaving.get()["leaving"]
    assert entry.get()["got"] >= left_at
    waiter.release()
    assert restarted.queue(name) == []


def test_a_crash_that_undoes_a_release_is_mended(own_server, restarted, agents, name):
    """A release is not written to disk at once: a crash may restore the row, and its owner removes it again."""
    (holder,) = agents(1, on=restarted, grace=9, retry=20)
    for _ in range(20):
        holder.hold("mutex", name)
        holder.release()
    own_server.restart("immediate")
    holder.hold("mutex", name("other"))
    until(lambda: restarted.queue(name) == restarted.queue(name("other")), "no row comes back for good")
    holder.release()


def test_outage_beyond_grace_is_noticed_before_next_grant(own_server, restarted, agents, name, queued):
    holder, waiter = agents(1, on=restarted, grace=2, retry=2)[0], agents(1, on=restarted, grace=60, retry=60)[0]
    (entry,) = queued(holder, waiter, on=restarted)
    down = time.monotonic()
    own_server.stop("fast")
    lost = holder.event("lost")
    assert lost["lost"]
    assert lost["set"]
    assert lost["at"] < down + 2 + slack(20)
    assert holder.lost()
    # Keep the holder from reconnecting in time: the waiter must not be granted too early.
    holder.stop()
    own_server.start()
    got = entry.get()["got"]
    assert lost["at"] < got
    holder.resume()
    with pytest.raises(RemoteError, match="LockLost") as caught:
        holder.release()
    assert str(name) in caught.value.message
    remains(lambda: len(restarted.queue(name)) == 1, 0.3, "the release of a lost lock removes no other row")
    waiter.release()
    assert restarted.queue(name) == []


def test_process_that_lost_its_lock_continues(own_server, restarted, agents, name):
    (holder,) = agents(1, on=restarted, grace=1, retry=1)
    holder.hold("mutex", name)
    own_server.stop("fast")
    holder.event("lost")
    own_server.start()
    with pytest.raises(RemoteError, match="LockLost"):
        holder.release()
    again = holder.hold("mutex", name)
    assert again["position"] > 1
    holder.check()
    holder.release()
    assert restarted.queue(name) == []


def test_calls_during_an_outage_name_the_attempt(own_server, restarted, agents, name, queued):
    idle, holder, waiter = agents(3, on=restarted, grace=90, retry=1)
    (entry,) = queued(holder, waiter, on=restarted)
    own_server.stop("immediate")
    host, port = own_server.address
    for reply in (
        idle.ask("mutex", name("b")),
        idle.ask("mutex", name("c"), thread="two"),
        holder.call("check"),
        entry,
    ):
        with pytest.raises(RemoteError, match="Unavailable") as caught:
            reply.get()
        assert f"{host}:{port}" in caught.value.message
        if reply is not entry:
            assert caught.value.at - caught.value.began < 1 + slack(15)
    assert not holder.lost()  # its grace is long
    own_server.start()
    holder.check()
    holder.release()
    # The waiter that timed out cancels its request as soon as it can.
    until(lambda: restarted.queue(name) == [], "no row is left")
    idle.hold("mutex", name)
    idle.release()


def test_a_short_outage_is_waited_out(own_server, restarted, agents, name):
    """Each call has its whole ``retry`` time, whatever a heartbeat in between finds."""
    (agent,) = agents(1, on=restarted, grace=3, retry=30)
    agent.hold("mutex", name("held"))
    own_server.stop("fast")
    entry = agent.ask("mutex", name, thread="two")
    lost = agent.event("lost")
    remains(lambda: not entry.ready, 1, "the acquire is tried again")
    own_server.start()
    entry.get()
    assert lost["at"] < time.monotonic()
    agent.release("two")


def test_an_attempt_says_how_often_and_how_long(own_server, restarted, agents, name):
    (idle,) = agents(1, on=restarted, retry=1)
    own_server.stop("fast")
    with pytest.raises(RemoteError, match=r"attempts? in \d+\.\d s"):
        idle.hold("mutex", name)


@pytest.mark.parametrize("call", ["release_on_commit", "put"])
def test_cursor_of_a_restarted_server_is_the_same_database(own_server, restarted, name, monkeypatch, call):
    """The restart comes between the statements on the cursor and on the library's own session."""
    with restarted.coordinator(grace=60, retry=60) as coordinator, coordinator.mutex(name) as grant:
        cursor = restarted.raw(autocommit=False).cursor()
        client = coordinator.client
        client.engine.known_identity, look, restarts = None, client.with_connection, []

        def look_after_a_restart(*arguments):
            if not restarts:
                restarts.append(own_server.restart("immediate"))
            return look(*arguments)

        monkeypatch.setattr(client, "with_connection", look_after_a_restart)
        with pytest.raises((psycopg.OperationalError, pymysql.OperationalError, sqlsem.Unavailable)):
            if call == "put":
                coordinator.queue(name).put(1, cursor=cursor)
            else:
                grant.release_on_commit(cursor)
        assert restarts
        grant.check()
