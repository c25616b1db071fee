"""Behind a real PgBouncer: pools by session, by transaction and by statement."""

import psycopg
import pytest
from bouncer import Bouncer, program
from support import remains, until

import sqlsem

pytestmark = [
    pytest.mark.engines("postgresql"),
    pytest.mark.skipif(program() is None, reason="PgBouncer is not installed (on Debian: apt-get install pgbouncer)"),
]


@pytest.fixture
def bouncer(postgres_server):
    bouncers = []

    def start(mode, **options):
        bouncers.append(Bouncer(postgres_server, mode, **options))
        return bouncers[-1]

    yield start
    for server in bouncers:
        server.close()


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_beacon_is_refused_at_once_and_in_words(bouncer, database, name, mode):
    behind = bouncer(mode).before(database)
    with behind.coordinator(grace=60) as coordinator:
        with pytest.raises(sqlsem.ConfigurationError, match=r"pooler lends sessions out by the transaction.*lease=30"):
            coordinator.mutex(name).acquire()
    assert database.queue(name) == []
    # The calls left no traces in the session, which the pooler gives to other clients next.
    with psycopg.connect(behind.url, autocommit=True, prepare_threshold=None) as connection:
        assert left_behind(connection) == set()


def test_sessions_that_are_lent_for_good_have_beacons(bouncer, database, agents, name, queued):
    behind = bouncer("session").before(database)
    holder, waiter = agents(2, on=behind, grace=2)
    (entry,) = queued(holder, waiter)
    remains(lambda: not entry.ready, 1, "it waits")
    holder.kill()  # the pooler resets the session: the beacon goes
    entry.get()
    waiter.check()
    waiter.release()
    until(lambda: database.queue(name) == [], "no row is left")


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_leases_work_and_leave_nothing_in_sessions_of_others(bouncer, database, agents, name, waiting, queued, mode):
    pooler = bouncer(mode, size=4)
    behind = pooler.before(database)
    holder, waiter, reader = agents(3, on=behind, lease=20)
    # More clients than server connections.
    (entry,) = queued(holder, waiter)
    shared = [reader.ask("limit", name("limit"), 3, thread=f"t{number}") for number in range(3)]
    for number, pending in enumerate(shared):
        pending.get()
        reader.release(f"t{number}")
    left_at = holder.release()["leaving"]
    assert entry.get()["got"] >= left_at
    waiter.check()
    holder_again = holder.ask("mutex", name)
    waiting(name, 2)
    waiter.release()
    holder_again.get()
    holder.release()
    with behind.coordinator(lease=20) as coordinator:
        queue = coordinator.queue(name)
        numbers = queue.put_many(range(20))
        done = []
        for task in queue.claim(wait=0):
            with task:
                done.append(task.id)
        assert done == numbers
    # Every server connection is unchanged, and has no lock of the library.
    for _ in range(8):
        with psycopg.connect(behind.url, autocommit=True, prepare_threshold=None) as connection:
            assert left_behind(connection) == set()
            assert connection.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            ).fetchone() == (0,)
    assert database.queue(name) == []


def left_behind(connection):
    """Return the settings of this session that differ from the pooler's own."""
    rows = connection.execute("SELECT name FROM pg_settings WHERE source = 'session'").fetchall()
    poolers = {"application_name", "client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings"}
    return {row[0] for row in rows} - poolers


@pytest.mark.parametrize(("mode", "kind"), [("session", {"grace": 20}), ("transaction", {"lease": 20})])
def test_a_restart_of_the_pooler_costs_nothing(bouncer, database, agents, name, queued, mode, kind):
    pooler = bouncer(mode)
    holder, waiter = agents(2, on=pooler.before(database), retry=20, **kind)
    (entry,) = queued(holder, waiter)
    before = database.queue(name)
    for _ in range(2):
        pooler.restart()
        holder.check()
    assert database.queue(name) == before
    assert not entry.ready
    left_at = holder.release()["leaving"]
    granted = entry.get()
    assert granted["got"] >= left_at
    assert granted["position"] == before[1][0]
    waiter.release()
    assert not any(agent.told("lost") for agent in (holder, waiter))
    assert database.queue(name) == []
