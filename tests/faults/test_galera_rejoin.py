"""A node that has lost its data rejoins a Galera cluster, by a full state transfer, while locks, rates and tasks go on.

During the transfer the donor executes no write, and the joiner takes no connection. So only the third node serves, and
the clients of all nodes must find it.
"""

import json
import subprocess
import sys
import threading

import pytest
from support import PATIENCE, Attempt, random_name, remains, until
from support.galera import LIMIT, url_of

import sqlsem

pytestmark = [pytest.mark.engines("mysql"), pytest.mark.soak, pytest.mark.leaves_rows]

#: Long beside the seconds in which the others agree that a node is gone.
LEASE = 24.0
RETRY = 120.0
WINDOW = 3600.0


@pytest.fixture
def database(galera_cluster, engine_name):
    """A database of the cluster, with a URL of all nodes."""
    return galera_cluster.new_database(LEASE)


@pytest.fixture
def on(database):
    """``on(node, …)`` returns a coordinator that knows these nodes, and connects to them in this order."""
    coordinators = []

    def on(*nodes, lease=LEASE, retry=RETRY):
        url = url_of(nodes, database.url.rpartition("/")[2])
        coordinators.append(sqlsem.connect(url, lease=lease, retry=retry))
        return coordinators[-1]

    yield on
    for coordinator in coordinators:
        coordinator.close()


@pytest.fixture
def donor(galera_cluster):
    return galera_cluster.nodes[0]


@pytest.fixture
def server(galera_cluster):
    """The node that serves all the time."""
    return galera_cluster.nodes[1]


@pytest.fixture
def joiner(galera_cluster):
    return galera_cluster.nodes[2]


class Readings:
    """Reads a queue on one node again and again: how many entries it has, or the error."""

    def __init__(self, coordinator, name):
        self.lengths, self.errors = [], []
        self._coordinator, self._name = coordinator, name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        while not self._over.is_set():
            try:
                self.lengths.append(len(self._coordinator.admin.entries(self._name)))
            except sqlsem.Unavailable as exc:
                self.errors.append(str(exc))

    def end(self):
        self._over.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()


def write_much(server, rows=1500, times=3):
    """Write what takes the joiner long to apply: without a primary key it searches the table for each row."""
    name = random_name()
    server.rows(f"CREATE DATABASE {name}")
    server.rows(f"CREATE TABLE {name}.t (a integer, b char(200)) ENGINE = InnoDB")
    server.rows(f"INSERT INTO {name}.t SELECT seq, seq FROM seq_1_to_{rows}")
    for _ in range(times):
        server.rows(f"UPDATE {name}.t SET a = a + 1")


def doctor(node, database):
    """Return what ``sqlsem doctor`` reports on a node."""
    url = url_of([node], database.url.rpartition("/")[2])
    words = [sys.executable, "-m", "sqlsem", "--url", url, "--lease", str(LEASE), "doctor", "--json"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def test_locks_outlast_a_full_state_transfer(galera_cluster, donor, server, joiner, on, name):
    """No holder loses its lock, and no waiter its position, wherever they are connected."""
    lost, order = [], []
    holder = on(donor, server, joiner)
    grant = holder.mutex(name, on_lost=lost.append).acquire()
    assert grant
    waiters = []

    def wait(*nodes):
        number = len(waiters)
        lock = on(*nodes).mutex(name, on_lost=lost.append)
        waiters.append(Attempt(lock, None, entering=lambda: order.append(number)))
        until(lambda: len(holder.admin.entries(name)) == number + 2, "it waits")

    wait(joiner, donor, server)
    wait(donor, joiner, server)
    wait(server)
    joiner.kill()
    galera_cluster.wait_for_size(2)
    with galera_cluster.held_transfer(joiner, donor):
        assert not donor.is_synced
        wait(donor, joiner, server)
        remains(lambda: not lost and not order, LEASE + 4, "the lock is held")
        positions = [entry.position for entry in on(server).admin.entries(name)]
    galera_cluster.wait_until_whole()
    assert joiner.transfer == "SST"
    wait(joiner)
    there = on(joiner)
    entries = there.admin.entries(name)
    assert [entry.state for entry in entries] == ["holds"] + ["waits"] * 5
    assert [entry.position for entry in entries[:5]] == positions
    assert positions == sorted(set(positions))
    assert entries[5].position > positions[-1]
    assert not there.mutex(name).acquire(blocking=False)
    (held,) = holder.client.registry.grants()
    held.check()
    held.release()
    for number, waiter in enumerate(waiters):
        waiter.granted(LIMIT)
        assert order == list(range(number + 1))
        waiter.leave()
    assert lost == []


def test_work_goes_on_beside_a_full_state_transfer(galera_cluster, database, donor, server, joiner, on, name):
    """Each task runs once, in its order; a rate counts what was used before, during and after the transfer."""
    early = on(joiner, server)
    assert early.rate(name, 4, per=WINDOW).take(False)
    tasks = [early.queue(name).put({"number": number}) for number in range(2)]
    joiner.kill()
    galera_cluster.wait_for_size(2)
    with galera_cluster.held_transfer(joiner, donor):
        for coordinator in (on(donor, joiner, server), early):
            assert coordinator.rate(name, 4, per=WINDOW).take(timeout=RETRY)
            tasks.append(coordinator.queue(name).put({"number": len(tasks)}))
        with on(donor, joiner, server).queue(name).try_claim() as task:
            ran = [task.id]
    galera_cluster.wait_until_whole()
    assert joiner.transfer == "SST"
    there = on(joiner)
    assert there.rate(name, 4, per=WINDOW).take(False)
    assert not there.rate(name, 4, per=WINDOW).take(False)
    tasks.append(there.queue(name).put({"number": 4}))
    while task := there.queue(name).try_claim():
        with task:
            ran.append(task.id)
    assert ran == tasks
    report = doctor(joiner, database)
    assert report["ok"], report
    (replication,) = [check for check in report["checks"] if check["name"] == "replication"]
    assert "not reached" not in replication["detail"]


def test_joiner_shows_no_queue_until_it_has_all_rows(galera_cluster, donor, server, joiner, on, name):
    elsewhere = on(server)
    assert elsewhere.mutex(name).acquire()
    joiner.kill()
    galera_cluster.wait_for_size(2)
    readings = Readings(on(joiner, retry=0.1), name)
    patient = Attempt(on(joiner).mutex(name("other")), None)
    with galera_cluster.held_transfer(joiner, donor):
        late = Attempt(elsewhere.mutex(name), None)
        until(lambda: len(elsewhere.admin.entries(name)) == 2, "the other one waits")
        write_much(server)
        until(lambda: readings.errors, "a client of the joiner is refused")
        assert not patient.settled
    galera_cluster.wait_until_whole()
    patient.granted(LIMIT)
    patient.leave()
    until(lambda: readings.lengths, "a client of the joiner reads")
    readings.end()
    assert set(readings.lengths) == {2}
    assert all("Cannot reach" in error or "not take part" in error or "behind" in error for error in readings.errors)
    assert joiner.transfer == "SST"
    (held,) = elsewhere.client.registry.grants()
    held.release()
    late.granted(PATIENCE)
    late.leave()


def test_client_of_the_donor_alone_is_refused_in_time(galera_cluster, donor, server, joiner, on, name):
    holder = on(server)
    assert holder.mutex(name).acquire()
    refused = []

    def attempt(lease):
        coordinator = on(donor, lease=lease, retry=2)
        try:
            coordinator.mutex(name("other")).acquire()
        except sqlsem.Unavailable as exc:
            refused.append(str(exc))

    joiner.kill()
    galera_cluster.wait_for_size(2)
    with galera_cluster.held_transfer(joiner, donor):
        assert holder.mutex(name("later")).acquire()  # a write that the donor does not have
        threads = [threading.Thread(target=attempt, args=(lease,), daemon=True) for lease in (LEASE, 20 * LEASE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a client of the donor waits without end"
    assert len(refused) == 2
    assert all("no answer came" in text or "is behind its cluster" in text for text in refused), refused
    galera_cluster.wait_until_whole()
    with on(donor).mutex(name("other"), timeout=PATIENCE):
        pass
