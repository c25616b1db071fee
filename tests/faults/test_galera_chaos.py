"""All faults at once in a Galera cluster: clients on all nodes, while clients and nodes are killed, paused and cut off.

A few clients of one mutex reach four grants a second, as the rows of a killed client block it for a lease. So there are
many resources, and several databases, as the transactions of one gate conflict between nodes.
"""

import collections
import itertools
import logging
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from agent import stop
from soak.checks import Happened, holders_of, stays
from soak.kernel_locks import KernelLocks
from support import until
from support.galera import url_of
from support.journals import Journal, JournalReader

import sqlsem

pytestmark = [pytest.mark.engines("mysql"), pytest.mark.soak, pytest.mark.leaves_rows]

LEASE = 6.0
RETRY = 60.0
#: The crowd works for so many grants, or for so many seconds: then the test fails, after all its checks.
GRANTS = int(os.environ.get("SQLSEM_TEST_GRANTS", "3000"))
SECONDS = float(os.environ.get("SQLSEM_TEST_SECONDS", "1500"))
#: Databases with the tables of sqlsem; resources of each group in each of them; the limit of limits.
DATABASES, RESOURCES, LIMIT = 3, 8, 2
#: Processes; threads of each in each of its two databases.
PROCESSES, THREADS = 6, 4
#: Seconds without a grant, or without any result of one thread, after which the crowd counts as hung.
HUNG = 150.0
#: The kinds of locks: the coordinator's method and its arguments; the group of resources; access and limit.
KINDS = (
    ("mutex", (), "mutex", "write", 1),
    ("limit", (LIMIT,), "limit", "write", LIMIT),
    ("read", (), "table", "read", None),
    ("write", (), "table", "write", None),
)
GROUPS = tuple(dict.fromkeys(group for _, _, group, _, _ in KINDS))
SHARES = (3, 3, 2, 1)
FAULTS = ("kill client", "pause client", "kill node", "isolate node", "pause node")


@pytest.fixture
def databases(galera_cluster, engine_name):
    """Databases of the cluster with the tables of sqlsem, each with a URL of all nodes."""
    return [galera_cluster.new_database(LEASE) for _ in range(DATABASES)]


@pytest.fixture
def database(databases):
    return databases[0]


def churn(channel, url, options, urls, folder, seed):
    """Acquire and release in an endless loop, in the databases of ``urls``. The kernel's locks on files judge."""
    logging.basicConfig(level=logging.ERROR)
    book = Journal(f"{folder}/book")
    kernel_locks = KernelLocks(f"{folder}/kernel_locks", book)

    def work(coordinator, number, thread):
        rng = random.Random(f"{seed} {thread}")
        while True:
            method, arguments, group, access, limit = rng.choices(KINDS, SHARES)[0]
            resource = f"{group}-{rng.randrange(RESOURCES)}"
            timeout = 30.0 if rng.random() < 0.1 else 0.5
            # Some holds are longer than a lease, so that they last while nodes fail.
            seconds = rng.uniform(0, 2 * LEASE) if rng.random() < 0.005 else rng.uniform(0, 0.01)
            lock = getattr(coordinator, method)(resource, *arguments, timeout=timeout)
            result = {"what": "released"}
            try:
                hold(lock, seconds, {"resource": f"{number}-{resource}", "access": access, "limit": limit})
            except sqlsem.Timeout:
                result = {"what": "timeout"}
            except (sqlsem.LockLost, sqlsem.Unavailable) as exc:
                result = {"what": "trouble", "error": type(exc).__name__}
            except BaseException as exc:
                result = {"what": "failed", "error": f"{type(exc).__name__}: {exc}"}
            book.note(**result, thread=thread, at=time.monotonic())

    def hold(lock, seconds, words):
        with lock as grant:
            entered = time.monotonic()
            if grant.lost:
                return
            with kernel_locks.enter(words["resource"], access=words["access"], places=words["limit"] or 1):
                grant.lost_event.wait(seconds)
            left = time.monotonic()
            times = {"entered": entered, "left": left, "lost": grant.lost}
            book.note(what="stay", position=grant.position, **words, **times)

    for number, place in urls.items():
        coordinator = sqlsem.connect(place, **options, retry=RETRY)
        for thread in range(THREADS):
            threading.Thread(target=work, args=(coordinator, number, f"{number}.{thread}"), daemon=True).start()
    channel.tell("ready")
    channel.ask()
    os._exit(0)


class Crowd:
    """The processes, their records, and the faults."""

    def __init__(self, spawn, databases, cluster, folder, seed):
        self.databases, self.cluster, self.folder = databases, cluster, folder
        self.rng = random.Random(seed)
        self.happened = Happened()
        self.done = dict.fromkeys(FAULTS, 0)
        self.words = []
        self.counts = collections.Counter()
        self.last = {}  # the time of the last result, by process and thread
        self.stopped = {}  # pid → child, since when, until when
        self.down = {}  # node → its fault, until when
        self.recovered_at = 0.0
        self._spawn = spawn
        self._numbers = itertools.count(seed)
        (folder / "kernel_locks").mkdir()
        Journal(folder / "book")
        self.book = JournalReader(folder / "book")
        self.children = [self._fresh(number) for number in range(PROCESSES)]
        for child in self.children:
            child.expect("ready")

    def _fresh(self, number):
        """Start a process, in two of the databases: on one node each, as chance will have it."""
        urls = {}
        for database in (number % DATABASES, (number + 1) % DATABASES):
            nodes = self.rng.sample(self.cluster.nodes, len(self.cluster.nodes))
            urls[str(database)] = url_of(nodes, self.databases[database].url.rpartition("/")[2])
        return self._spawn(churn, urls=urls, folder=str(self.folder), seed=next(self._numbers))

    def read(self):
        """Read the new lines of the book."""
        for event in self.book.read():
            self.counts[event["what"]] += 1
            if event["what"] in ("stay", "refused", "failed"):
                self.words.append(event)
            if "thread" in event:
                self.last[event["pid"], event["thread"]] = event["at"]

    def fail_at_random(self):
        """Make one fault, or none, and end those whose time is over."""
        now = time.monotonic()
        self.end_pauses(now)
        self.end_faults_of_nodes(now)
        fault = self.rng.choice(FAULTS)
        number = self.rng.randrange(PROCESSES)
        child = self.children[number]
        if fault == "kill client" and child.pid not in self.stopped:
            self.happened.killed[child.pid] = child.kill()
            child.close()
            self.children[number] = self._fresh(number)
        elif fault == "pause client" and child.pid not in self.stopped:
            since = time.monotonic()
            stop(child)
            self.stopped[child.pid] = (child, since, since + self.rng.uniform(0, 1.5 * LEASE))
        elif fault.endswith("node") and not self.down and now > self.recovered_at + 5 and self.rng.random() < 0.3:
            node = self.rng.choice(self.cluster.nodes)
            {"kill node": node.kill, "isolate node": node.isolate, "pause node": node.pause}[fault]()
            self.down[node] = (fault, now + self.rng.uniform(2, 2.5 * LEASE))
        else:
            return
        self.done[fault] += 1

    def end_pauses(self, now):
        for pid, (child, since, end) in list(self.stopped.items()):
            if now > end:
                self.happened.sleeps.append((pid, since, time.monotonic()))
                child.resume()
                del self.stopped[pid]

    def end_faults_of_nodes(self, now):
        for node, (fault, end) in list(self.down.items()):
            if now > end:
                recover(node, fault)
                self.recovered_at = time.monotonic()
                del self.down[node]

    def work(self):
        """Make faults until there are enough grants. Return the seconds that this took."""
        began = reported = granted_at = time.monotonic()
        grants = 0
        while self.counts["stay"] < GRANTS and time.monotonic() < began + SECONDS:
            time.sleep(self.rng.uniform(0.1, 1))
            self.fail_at_random()
            self.read()
            now = time.monotonic()
            if self.counts["stay"] > grants:
                grants, granted_at = self.counts["stay"], now
            assert now < granted_at + HUNG, f"no grant for {HUNG} s: {self.report(began)}"
            if now > reported + 60:
                reported = now
                print(self.report(began), flush=True)
        return time.monotonic() - began

    def report(self, began):
        return f"{time.monotonic() - began:.0f} s: {dict(self.counts)} beside {self.done}"

    def hung_threads(self, since):
        """Return the threads of living processes without a result since then."""
        self.read()
        threads = itertools.product(range(PROCESSES), (0, 1), range(THREADS))
        keys = [(self.children[n].pid, f"{(n + which) % DATABASES}.{thread}") for n, which, thread in threads]
        return [key for key in keys if self.last.get(key, 0.0) < since]

    def refusals(self):
        """Return the refused locks of the kernel, in two lists: first the refusals beside a paused client. A client
        that is paused for longer than its lease cannot learn of its loss: fences and assert_held are for that.
        """
        refused = [event for event in self.words if event["what"] == "refused"]
        excused = [
            event
            for event in refused
            if self.happened.slept({event["pid"], *holders_of(event, self.words)}, event["at"])
        ]
        return excused, [event for event in refused if event not in excused]


def recover(node, fault):
    if fault == "kill node":
        node.start()
    elif fault == "isolate node":
        node.reconnect()
        node.wait_until_joined()
    else:
        node.resume()
        node.wait_until_joined()


def all_locks(coordinator):
    """Return a lock for each resource of a database: it waits for all holders but those of a limit."""
    methods = {group: (method, arguments) for method, arguments, group, _, _ in KINDS}  # (a writer, for tables)
    for group, number in itertools.product(GROUPS, range(RESOURCES)):
        method, arguments = methods[group]
        yield getattr(coordinator, method)(f"{group}-{number}", *arguments)


def acquire_once(lock):
    if granted := lock.acquire(timeout=HUNG):
        lock.release()
    return granted


@pytest.mark.timeout(SECONDS + 900)
def test_all_faults_at_once(spawn, databases, galera_cluster, tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}", flush=True)
    crowd = Crowd(spawn, databases, galera_cluster, tmp_path, seed)
    began = time.monotonic()
    seconds = crowd.work()
    crowd.end_pauses(float("inf"))
    crowd.end_faults_of_nodes(float("inf"))
    galera_cluster.wait_until_whole()
    crowd.read()
    grants = crowd.counts["stay"]
    print(crowd.report(began), flush=True)
    healed = time.monotonic()
    until(lambda: not crowd.hung_threads(healed), "each thread gets a result", HUNG)
    for database in databases:
        with sqlsem.connect(database.url, lease=LEASE, retry=RETRY) as coordinator:
            locks = list(all_locks(coordinator))
            with ThreadPoolExecutor(len(locks)) as pool:
                refused = [
                    lock for lock, granted in zip(locks, pool.map(acquire_once, locks), strict=True) if not granted
                ]
            assert refused == [], "not granted, although all faults are over"
    for child in crowd.children:
        crowd.happened.killed[child.pid] = child.kill()
    for database in databases:
        with sqlsem.connect(database.url, lease=LEASE, retry=RETRY) as coordinator:
            until(
                lambda: coordinator.admin.reap() is not None and not coordinator.admin.entries(), "no row is left", HUNG
            )
    crowd.read()
    assert len(crowd.book.torn) <= len(crowd.happened.killed), crowd.book.torn
    excused, overlaps = crowd.refusals()
    history = stays(crowd.words, crowd.happened)
    print(
        f"{grants} grants in {seconds:.0f} s beside {crowd.done}: {len(overlaps)} overlaps, {len(excused)} of paused "
        f"clients, {len(history)} violations of the order",
        flush=True,
    )
    assert [event for event in crowd.words if event["what"] == "failed"] == []
    assert overlaps == []
    assert history == []
    assert grants >= GRANTS, f"{grants} grants in {seconds:.0f} s"
