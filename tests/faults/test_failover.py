"""A primary dies and its standby takes over: holders and waiters find it by a URL with both hosts."""

import random
import time

import pytest
from agent import RemoteError
from churn import Crowd
from support import PATIENCE, drained, remains, until

pytestmark = pytest.mark.engines("postgresql")


def held(pair, agent):
    """Return the member of an agent's process: its number, and the session that holds its beacon."""
    rows = pair.database.rows("SELECT member_id, backend_pid FROM sqlsem.member WHERE pid = ?", agent.child.pid)
    return rows[0] if rows else None


@pytest.mark.parametrize("lease", [None, pytest.param(30, marks=pytest.mark.soak)])
def test_a_failover_shorter_than_the_grace_costs_nothing(start_pair, agents, name, lease, queued):
    pair = start_pair(synchronous=True)
    database = pair.database
    holder, first, second = agents(3, on=database, grace=30, lease=lease, retry=30)
    entries = queued(holder, first, second, on=database)
    before = database.queue(name)
    pair.kill()
    pair.promote()

    assert database.queue(name) == before
    holder.check()
    assert not holder.lost()
    remains(lambda: not any(entry.ready for entry in entries), 0.5, "the waiters wait")
    leaver = holder
    for waiter, entry, row in zip((first, second), entries, before[1:], strict=True):
        left_at = leaver.release()["leaving"]
        granted = entry.get()
        assert granted["got"] >= left_at
        assert granted["position"] == row[0]
        leaver = waiter
    leaver.release()
    assert database.queue(name) == []
    assert not any(agent.told("lost") for agent in (holder, first, second))


def check_rounds(pair, crowd, name, rounds, rng, longest):
    """Primaries die under load, again and again; afterwards the journal is checked."""
    database = pair.database
    with database.coordinator(grace=60, retry=60) as coordinator:
        queue = coordinator.queue(name)
        put = 0
        for number in range(rounds):
            began = time.monotonic()
            put += len(queue.put_many(range(200)))
            put += crowd.until_busy(queue, began, "everybody is at work")
            killed = pair.kill()
            time.sleep(rng.uniform(0, longest))  # the time until the promotion
            promoted = pair.promote()
            put += crowd.until_busy(queue, promoted, "everybody goes on with the new primary")
            print(f"round {number}: down for {promoted - killed:.1f} s")
            if number + 1 < rounds:
                pair.rejoin()
        assert drained(queue, 2 * PATIENCE), queue.state()
        crowd.end()
        assert database.rows("SELECT status, count(*) FROM sqlsem.task GROUP BY status") == [("finished", put)]
    assert database.queue(name) == [], "rows are left"
    crowd.check(name, forgetful=not pair.synchronous)
    print(dict(crowd.counts()), crowd.trouble)


@pytest.fixture
def crowd(spawn, database, name, tmp_path):
    """Members of every kind, in processes of their own."""

    def start(pair, grace, lease, retry=30):
        crowd = Crowd(spawn, tmp_path / "journal", url=pair.database.url, name=str(name))
        crowd.add(["mutex", "limit", "limit", "work"], grace=grace, retry=retry)
        crowd.add(["mutex", "limit", "work"], grace=grace, retry=retry)
        crowd.add(["mutex", "limit", "limit", "work"], lease=lease, retry=retry)
        crowd.ready()
        return crowd

    return start


@pytest.mark.parametrize(
    ("rounds", "grace"),
    [(1, 30), pytest.param(8, 30, marks=pytest.mark.soak), pytest.param(8, 2, marks=pytest.mark.soak)],
)
@pytest.mark.timeout(600)
def test_no_overlap_over_a_synchronous_failover(start_pair, crowd, name, rounds, grace):
    pair = start_pair(synchronous=True)
    # Outages shorter than the grace, or some shorter and some longer.
    longest = 1.0 if rounds == 1 else min(10.0, 2.0 * grace)
    check_rounds(pair, crowd(pair, grace, grace), name, rounds, random.Random(grace), longest)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("grace", [30, 2])
def test_async_failover_keeps_surviving_grants_exclusive(start_pair, crowd, name, grace):
    pair = start_pair(synchronous=False)
    check_rounds(pair, crowd(pair, grace, grace), name, 8, random.Random(grace), min(10.0, 2.0 * grace))


@pytest.mark.parametrize("lease", [None, pytest.param(12, marks=pytest.mark.soak)])
def test_failover_loses_unreplicated_grants_without_reuse(start_pair, agents, name, lease):
    pair = start_pair(synchronous=False)
    database = pair.database
    known, forgetful = agents(2, on=database, grace=12, lease=lease, retry=30)
    known.hold("mutex", name("known"))
    forgetful.hold("mutex", name("other"))
    pair.streaming()
    pair.cut()
    # Only the old primary has the following: grants and members of others (more than the 32 numbers that a server
    # logs in advance), a grant, a release and a whole member.
    for table, column in (("ProcessControl", "queue_position"), ("member", "member_id")):
        sequence = f"pg_get_serial_sequence('sqlsem.{table}', '{column}')"
        database.rows(f"SELECT nextval({sequence}) FROM generate_series(1, ?)", 50)
    fence = forgetful.hold("mutex", name("forgotten"), thread="two")["fence"]
    forgetful.release("one")
    (newcomer,) = agents(1, on=database, grace=12, lease=lease, retry=30)
    later = newcomer.hold("mutex", name("late"))["fence"]
    assert later > fence
    lost_number = held(pair, newcomer)[0]
    pair.kill()
    pair.promote()

    # New requests get other numbers than the forgotten ones.
    (fresh,) = agents(1, on=database, grace=12, lease=lease, retry=30)
    assert fresh.hold("mutex", name("forgotten"))["fence"] > later
    assert held(pair, fresh)[0] > lost_number
    # Both members learn of the loss, and neither takes the other's number for its own.
    assert forgetful.event("lost")["lost"]
    assert newcomer.event("lost")["lost"]
    with pytest.raises(RemoteError, match="LockLost"):
        forgetful.release("two")
    with pytest.raises(RemoteError, match="LockLost"):
        newcomer.release()
    newcomer.hold("mutex", name("late"))
    assert len({held(pair, agent)[0] for agent in (known, forgetful, newcomer, fresh)}) == 4
    for agent in (known, fresh, newcomer):
        agent.check()
        agent.release()
    assert not any(agent.told("lost") for agent in (known, fresh))
    # The client repeats its forgotten release.
    until(lambda: database.queue(name) == [], "no row is left")


def test_a_restored_database_gives_no_number_again(own_postgres_server, restarted, name):
    """From a dump, in the place of what was there."""
    with restarted.coordinator() as coordinator, coordinator.mutex(name):
        pass
    dump = own_postgres_server.dump(restarted.url)
    with restarted.coordinator() as coordinator, coordinator.mutex(name) as grant:
        fence = grant.fence
    own_postgres_server.restore(dump, restarted.url)
    with restarted.coordinator() as coordinator:
        with coordinator.mutex(name) as grant:
            assert grant.fence > fence
            fence = grant.fence
        with coordinator.mutex(name) as grant:
            assert fence < grant.fence < fence + 10**9, "set forward once"
    assert restarted.queue(name) == []


def test_a_restart_is_no_other_history(own_postgres_server, restarted, name):
    fences = []
    for mode in ("fast", "immediate", "fast"):
        with restarted.coordinator() as coordinator, coordinator.mutex(name) as grant:
            fences.append(grant.fence)
        own_postgres_server.restart(mode)
    assert fences == sorted(fences)
    assert fences[-1] < 10**9


def in_commit(pair):
    """Return the sessions of the library whose commit waits for the standby."""
    rows = pair.run(
        "SELECT pid FROM pg_stat_activity "
        f"WHERE datname = '{pair.name}' AND wait_event = 'SyncRep' AND application_name LIKE 'sqlsem%'"
    )
    return [row[0] for row in rows]


def test_a_synchronous_standby_that_goes_away(start_pair, agents, name, waiting):
    """Commits hang: holders are unharmed, no request is granted meanwhile, and no row is left afterwards."""
    pair = start_pair(synchronous=True)
    database = pair.database
    holder, waiter, asker = agents(3, on=database, grace=3, retry=3)
    (lessee,) = agents(1, on=database, lease=3, retry=3)
    position = holder.hold("mutex", name)["position"]
    lessee.hold("mutex", name("leased"))
    entry = waiter.ask("mutex", name)
    waiting(name, 3, on=database)
    pair.standby.stop("immediate")
    stopped_at = time.monotonic()

    with pytest.raises(RemoteError, match=r"Unavailable|Timeout"):
        asker.ask("mutex", name("new"), timeout=1).get()
    # Heartbeats do not wait for the standby: they go on for much longer than the grace and the lease.
    until(lambda: time.monotonic() > stopped_at + 6, "some time")
    assert not any(agent.told("lost") for agent in (holder, lessee, waiter))
    holder.check()
    lessee.check()
    # A released lock goes to the next waiter of the queue: the standby had its row.
    left_at = holder.release()["leaving"]
    granted = entry.get()
    assert granted["got"] >= left_at
    assert granted["position"] > position

    pair.standby.start()
    until(lambda: pair.states() == ["sync"] and not in_commit(pair), "the standby is back")
    fence = asker.hold("mutex", name("new"))["fence"]
    # Rows that were committed meanwhile without an owner are gone.
    until(
        lambda: [row[1] for row in database.queue(name)] == [name("leased"), name, name("new")], "no row is left over"
    )
    assert database.queue(name)[-1][0] == fence
    for agent in (lessee, waiter, asker):
        agent.check()
        agent.release()
    assert database.queue(name) == []


def test_a_commit_that_only_the_primary_has_is_no_grant(start_pair, agents, name):
    """A failover forgets a commit whose wait for the standby was cancelled."""
    pair = start_pair(synchronous=True)
    database = pair.database
    (asker,) = agents(1, on=database, grace=60, retry=60)
    pair.standby.stop("immediate")
    entry = asker.ask("mutex", name)
    for end in ("pg_cancel_backend", "pg_terminate_backend"):
        (session,) = until(lambda: in_commit(pair), "the commit waits")
        warnings = pair.primary.log().count("wait for synchronous replication")
        pair.run(f"SELECT {end}({session})")
        until(
            lambda warnings=warnings: pair.primary.log().count("wait for synchronous replication") > warnings,
            "that is over",
        )
        # A retry finds its row, and waits again.
        until(lambda: in_commit(pair) or entry.ready, "it waits again")
        assert not entry.ready
        assert len(database.queue(name)) == 1
    pair.standby.start()
    entry.get()
    assert len(database.queue(name)) == 1
    pair.kill()
    pair.promote()
    asker.check()
    asker.release()
    assert database.queue(name) == []


def test_unreplicated_task_end_is_reported_again(start_pair, name):
    pair = start_pair(synchronous=False)
    database = pair.database
    with database.coordinator(grace=12, retry=30) as coordinator:
        queue = coordinator.queue(name)
        queue.put_many([1, 2, 3])
        first, second, third = (queue.try_claim() for _ in range(3))
        pair.streaming()
        pair.cut()
        first.finish("done")
        second.fail("not done")
        pair.kill()
        pair.promote()
        statuses = "SELECT status FROM sqlsem.task ORDER BY task_id"
        until(lambda: database.rows(statuses) == [("finished",), ("failed",), ("running",)], "they ended again")
        third.finish()
        assert [run.outcome for run in queue.log(first.id)] == ["finished"]
