"""Leaders of every kind (threads, asyncio, ``run --leader``) over an outage in the middle of a term: callbacks come
once for each term, a term begins after the last one has ended, and the kernel's flock shows no two leaders at a time.
"""

import asyncio
import itertools
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from proxy import Proxy
from soak.checks import Happened, kernel_lock_refusals, leaders
from soak.kernel_locks import KernelLocks
from support import PATIENCE, until
from support.journals import Journal, records

import sqlsem

pytestmark = pytest.mark.engines("postgresql")

#: The leaders' options: the margin in which they must learn of a loss is a second.
SETTINGS = {"grace": 5.0, "retry": 2.0}


class RecordedCallbacks:
    """Callbacks that record their calls, and hold the kernel's lock in between."""

    def __init__(self, folder, name):
        self.name, self.book = name, Journal(f"{folder}/book")
        self._kernel_locks, self._inside = KernelLocks(folder, self.book), None

    def started(self, term):
        self._inside = self._kernel_locks.enter(self.name)
        self._inside.__enter__()
        self.book.note(what="started", resource=self.name, fence=term.fence, at=time.monotonic())

    def stopped(self, term):
        self._inside.__exit__(None, None, None)
        at = time.monotonic()
        self.book.note(what="stopped", resource=self.name, fence=term.fence, at=at, lost=term.lost)


def threads(channel, url, options, name, folder):
    coordinator, log = sqlsem.connect(url, **options, **SETTINGS), RecordedCallbacks(folder, name)
    leader = coordinator.leader(name, on_started=log.started, on_stopped=log.stopped)
    channel.tell("ready")
    leader.run(lambda term: term.ending.wait() and term.check())


def aio(channel, url, options, name, folder):
    log = RecordedCallbacks(folder, name)

    async def forever(term):
        await asyncio.Event().wait()

    async def main():
        coordinator = sqlsem.connect(url, **options, **SETTINGS)
        leader = coordinator.aio.leader(name, on_started=log.started, on_stopped=log.stopped)
        channel.tell("ready")
        await leader.run(forever)

    asyncio.run(main())


def command(channel, url, options, name, folder):
    """Become ``sqlsem run --leader`` with the command `follow`."""
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import test_leaders_outages as it; it.follow({name!r}, {folder!r})"
    )
    channel.tell("ready")
    words = ["-m", "sqlsem", "--url", url, "--grace", str(SETTINGS["grace"]), "run", "--leader", name]
    os.execv(sys.executable, [sys.executable, *words, "--", sys.executable, "-c", code])


def follow(name, folder):
    """The command: it leads as long as it lives."""
    log = RecordedCallbacks(folder, name)
    term = SimpleNamespace(fence=int(os.environ["SQLSEM_FENCE"]), lost=False)

    def end(number, frame):
        log.stopped(term)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    log.started(term)
    while True:
        signal.pause()


class Bench:
    """Two candidates, the first one through a network that can break, and their records."""

    def __init__(self, spawn, face, server, database, folder, name):
        self.server, self.database, self.folder, self.name = server, database, folder, name
        self.proxy = Proxy(server.address)
        url = database.url.replace(f":{database.server.port}/", f":{self.proxy.port}/") + "?sslmode=disable"
        self.happened = Happened()
        self.is_command = face is command
        self.first = self._start(spawn, face, url)
        self.until_started(1)
        self.second = self._start(spawn, face, database.url)
        self.waiting(2)

    def _start(self, spawn, face, url):
        child = spawn(face, url=url, options=self.database.options, name=self.name, folder=str(self.folder))
        child.expect("ready")
        return child

    def words(self, kinds):
        return [entry for entry in records(self.folder / "book") if entry["what"] in kinds]

    def until_started(self, number):
        return until(
            lambda: (entries := self.words(["started"]))[number - 1 :] and entries[number - 1], f"term {number}"
        )

    def until_stopped(self, fence):
        until(lambda: any(word["fence"] == fence for word in self.words(["stopped"])), f"the term {fence} has ended")

    def waiting(self, number):
        until(lambda: len(self.database.queue(self.name)) == number, f"{number} take part")

    def stop(self, child, leading):
        """Send SIGSTOP, and return a function that wakes the process. ``leading``: the process that reports its lead,
        which is a command's own.
        """
        since = time.monotonic()
        child.pause()

        def wake():
            at = time.monotonic()
            self.happened.sleeps += [(child.pid, since, at), (leading, since, at)]
            child.resume()

        return wake

    def check(self):
        """Check the history when all have ended."""
        for child in (self.first, self.second):
            if child.process.poll() is None:
                self.happened.killed[child.pid] = child.kill()
        last = self.words(["started"])[-1]
        self.happened.killed.setdefault(last["pid"], time.monotonic())
        words = self.words(["started", "stopped", "refused"])
        if self.is_command:  # a command does not know how its terms were lost
            words = [
                {**word, "lost": self.happened.slept({word["pid"]}, word["at"])} for word in words if "lost" in word
            ] + [word for word in words if "lost" not in word]
        assert leaders(words, self.happened) == []
        assert kernel_lock_refusals(words, self.happened) == []
        # By the database's clock, too.
        terms = self.database.rows(
            f"SELECT granted_at, ended_at FROM {self.database.beside('history')} "
            "WHERE resource_id = ? AND granted_at IS NOT NULL ORDER BY granted_at",
            self.name,
        )
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(terms)), terms

    def close(self):
        self.proxy.close()


@pytest.fixture(params=[threads, aio, command])
def bench(request, spawn, own_postgres_server, restarted, tmp_path, name):
    new_bench = Bench(spawn, request.param, own_postgres_server, restarted, tmp_path, str(name))
    yield new_bench
    new_bench.close()


def test_long_restart_ends_the_term(bench):
    fence = bench.until_started(1)["fence"]
    bench.server.stop("immediate")
    bench.until_stopped(fence)
    bench.server.start()
    again = bench.until_started(2)
    assert again["fence"] > fence
    bench.waiting(2)  # both take part again
    bench.check()


@pytest.mark.soak
def test_short_restart_keeps_the_leader(bench):
    fence = bench.until_started(1)["fence"]
    bench.server.restart("immediate")
    bench.waiting(2)
    with bench.database.coordinator(grace=60) as coordinator:
        assert coordinator.leader(bench.name).current().fence == fence
    assert bench.words(["stopped"]) == []
    bench.check()


def test_disconnected_leader_steps_down(bench):
    fence = bench.until_started(1)["fence"]
    bench.proxy.cut()
    bench.until_stopped(fence)
    assert bench.until_started(2)["fence"] > fence
    bench.proxy.forward()
    bench.waiting(2)
    bench.second.kill()
    bench.until_started(3)
    for word in bench.words(["started"])[1:2]:
        bench.happened.killed[word["pid"]] = word["at"]  # not earlier than that
    bench.check()


@pytest.mark.soak
def test_unanswered_leader_steps_down(bench):
    fence = bench.until_started(1)["fence"]
    bench.proxy.hole()
    bench.until_stopped(fence)
    bench.proxy.server_notices()
    assert bench.until_started(2)["fence"] > fence
    bench.check()


@pytest.mark.soak
def test_the_leader_sleeps_and_its_sessions_live(bench):
    """However long: no other candidate leads, and no callback is called."""
    began = bench.until_started(1)
    wake = bench.stop(bench.first, began["pid"])
    time.sleep(SETTINGS["grace"] * 1.5)
    assert len(bench.words(["started", "stopped"])) == 1
    wake()
    with bench.database.coordinator(grace=60) as coordinator:
        assert coordinator.leader(bench.name).current().fence == began["fence"]
    assert len(bench.words(["started", "stopped"])) == 1
    bench.check()


def test_the_leader_sleeps_and_its_sessions_end(bench):
    """It cannot learn of the loss in its sleep. When it wakes, its callback is called once, and it takes part again."""
    began = bench.until_started(1)
    wake = bench.stop(bench.first, began["pid"])
    bench.proxy.cut_once()
    assert bench.until_started(2)["fence"] > began["fence"]
    wake()
    bench.until_stopped(began["fence"])
    bench.waiting(2)
    assert len(bench.words(["started"])) == 2
    bench.check()


@pytest.mark.soak
def test_sigterm_steps_the_leader_down(bench):
    fence = bench.until_started(1)["fence"]
    bench.first.process.send_signal(signal.SIGTERM)
    bench.until_stopped(fence)
    assert bench.until_started(2)["fence"] > fence
    assert bench.first.process.wait(PATIENCE) == 128 + signal.SIGTERM
    bench.waiting(1)
    bench.check()
