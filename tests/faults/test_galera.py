"""Locks in a Galera cluster: clients on all nodes, while nodes are killed, paused and cut off."""

import threading
import time

import pytest
from support import Database, until
from support.galera import url_of
from support.patience import PATIENCE

import sqlsem
from sqlsem.engines.mysql.connection import CLUSTER_MARGIN

pytestmark = [pytest.mark.engines("mysql"), pytest.mark.soak, pytest.mark.leaves_rows]

LEASE = 6.0
RETRY = 60.0


@pytest.fixture
def database(galera_cluster, engine_name):
    """A database of the cluster, with a URL of all nodes."""
    return galera_cluster.new_database(LEASE)


def on(database, *nodes, lease=LEASE):
    """Return a coordinator that knows these nodes only."""
    return sqlsem.connect(url_of(nodes, database.url.rpartition("/")[2]), lease=lease, retry=RETRY)


@pytest.fixture
def nodes(galera_cluster):
    return galera_cluster.nodes


def test_lease_is_required(database, nodes):
    coordinator = sqlsem.connect(nodes[0].url(database.url.rpartition("/")[2]))
    with pytest.raises(sqlsem.ConfigurationError, match="lease=30"):
        coordinator.mutex("a").acquire()
    coordinator.close()


def test_nodes_exclude_each_other_and_numbers_grow(database, nodes, name, threads):
    inside, entered = [], []

    def work(coordinator):
        for _ in range(15):
            with coordinator.mutex(name) as grant:
                inside.append(grant.position)
                assert len(inside) == 1
                entered.append(grant.position)
                time.sleep(0.002)
                inside.remove(grant.position)

    coordinators = [on(database, node) for node in nodes]
    for coordinator in coordinators:
        threads.start(work, coordinator)
    threads.join()
    assert len(entered) == 45
    assert entered == sorted(set(entered))
    for coordinator in coordinators:
        coordinator.close()


def test_rows_count_for_longer_than_their_owner_relies_on_them(database, nodes, name):
    """The clocks of nodes may differ by the margin."""
    coordinator = on(database, nodes[0])
    with coordinator.mutex(name):
        beside = Database("mysql", nodes[1].url(database.url.rpartition("/")[2]))
        ((length,),) = beside.rows("SELECT max(lease_until - heartbeat_at) FROM sqlsem_member")
        assert float(length) == pytest.approx(LEASE + CLUSTER_MARGIN, abs=0.01)
    coordinator.close()


def test_holder_goes_on_when_its_node_is_killed(database, nodes, name, galera_cluster):
    # (The others need seconds to agree that it is gone.)
    holder, waiter = on(database, *nodes, lease=30), on(database, nodes[2])
    granted = threading.Event()
    with holder.mutex(name) as grant:
        thread = threading.Thread(target=lambda: (waiter.mutex(name).acquire(), granted.set()), daemon=True)
        thread.start()
        until(lambda: len(waiter.admin.entries(name)) == 2, "the other waits")
        nodes[0].kill()
        assert not granted.wait(12)
        grant.check()
    assert granted.wait(PATIENCE)
    galera_cluster.restore()
    assert [entry.state for entry in on(database, nodes[0]).admin.entries(name)] == ["holds"]


@pytest.mark.parametrize("fault", ["isolate", "pause"])
def test_cut_off_holder_loses_its_lock_in_time(database, nodes, name, fault):
    lost = []
    holder = on(database, nodes[2])
    holder.mutex(name, on_lost=lambda grant: lost.append(time.monotonic())).acquire()
    nodes[2].isolate() if fault == "isolate" else nodes[2].pause()
    with on(database, *nodes[:2]) as other, other.mutex(name, timeout=4 * PATIENCE):
        granted = time.monotonic()
        until(lambda: lost, "the holder knows that its lock is lost")
        assert lost[0] <= granted
