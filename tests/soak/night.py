"""Let a crowd work in one place for some time, under faults; then check its records."""

from __future__ import annotations

import collections
import dataclasses
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support import TESTS, Child, require_no_crash, until
from support.journals import records

import sqlsem
from proof import tlc, traces
from soak import checks, jobs
from soak.paces import USUAL, Pace
from soak.places import Place, make_tables
from sqlsem.cli.nights import Night as Past
from sqlsem.insight.audit import audit

#: The grace of members: long enough that a busy machine notifies them in time.
GRACE, RETRY = 4.0, 20.0
#: Seconds until a process has begun, on a busy machine.
START = 600.0
#: Threads of each process.
THREADS = 6
#: Follow the beginning of these histories through proof/Queues.tla: so many events, for at most so many seconds.
FOLLOWED, MAX_EVENTS, TLC_SECONDS = ("mutex-0", "limit-0", "table-0", "table-1", "shared"), 400, 300.0
PATHS = ":".join(map(str, (TESTS.parent, TESTS, TESTS / "faults")))


@dataclass
class Result:
    """The results of one night.

    Attributes:
        place: Its name.
        engine: Its engine.
        seed: The seed of all random choices.
        seconds: For how long the crowd worked.
        entered: How often each kind of critical section was entered, and what was taken.
        faults: The faults, and how often each was made.
        trouble: Errors that faults may cause, by their class.
        followed: The number of events of its history that were followed through the specification.
        waits: Of each grant, the seconds from request to grant.
        early: Those of requests in the first tenth of the night.
        late: In the last tenth.
        size: Bytes of the database at the end; 0: not known.
        findings: The violations.
    """

    place: str
    engine: str
    seed: int
    seconds: float = 0.0
    entered: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    trouble: collections.Counter[str] = field(default_factory=collections.Counter)
    followed: int = 0
    waits: list[float] = field(default_factory=list)
    early: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    size: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def grants(self) -> int:
        return sum(self.entered.values())


class Night:
    """A night; `run` it once."""

    def __init__(self, place: Place, seconds: float, seed: int, pace: Pace = USUAL) -> None:
        self.place, self.seconds, self.pace = place, seconds, pace
        self.rng = random.Random(seed)
        self.result = Result(place.name, place.engine, seed)
        self.happened = checks.Happened()
        self.name = "soak"
        self.folder = place.folder
        for each in ("kernel_locks", "post"):
            (self.folder / each).mkdir()
        self.everybody: list[Child] = []
        self.children: list[Child] = []
        self.stopped: dict[int, tuple[Child, float, float]] = {}  # pid → since when, until when
        self._seeds = iter(range(seed, seed + 10**6))
        self._kinds: list[str] = []

    # -- the crowd

    def _fresh(self) -> Child:
        """Start one more process. Kinds go round, so that all are in every crowd."""
        number = next(self._seeds)
        every = jobs.chosen(self.place.engine, self.pace)
        while len(self._kinds) < THREADS:
            self._kinds += self.rng.sample(every, len(every))
        kinds, self._kinds = self._kinds[:THREADS], self._kinds[THREADS:]
        settings = {"grace": GRACE, "retry": RETRY}
        if self.place.leases and self.rng.random() < 0.25:
            settings = {"lease": GRACE, "retry": RETRY}
        arguments = {
            "engine": self.place.engine,
            "url": self.place.database.url,
            "options": self.place.database.options,
            "settings": settings,
            "name": self.name,
            "folder": str(self.folder),
            "seed": number,
            "kinds": kinds,
            "pace": dataclasses.asdict(self.pace),
        }
        child = Child(jobs.take_part, arguments, {"PYTHONPATH": PATHS, **self.place.environment})
        self.everybody.append(child)
        return child

    def _kill(self, child: Child) -> None:
        at = child.kill()
        self.happened.killed[child.pid] = at
        if child.pid in self.stopped:
            self.happened.sleeps.append((child.pid, self.stopped.pop(child.pid)[1], at))

    def _stop(self, child: Child) -> None:
        since = time.monotonic()
        child.pause()
        self.stopped[child.pid] = (child, since, since + self.rng.uniform(0, 2.5 * GRACE))

    def _wake(self, *, everybody: bool = False) -> None:
        for pid, (child, since, until_) in list(self.stopped.items()):
            if everybody or time.monotonic() > until_:
                del self.stopped[pid]
                self.happened.sleeps.append((pid, since, time.monotonic()))
                child.resume()

    # -- the night

    def run(self) -> Result:
        try:
            self._run()
        finally:
            self._wake(everybody=True)
            for child in self.everybody:
                child.close()
        require_no_crash(self.everybody)
        return self.result

    def _run(self) -> None:
        make_tables(self.place.direct)
        with self.place.direct.coordinator(grace=30) as operator:
            if self.place.engine in ("postgresql", "mssql"):
                owner = "public" if self.place.engine == "postgresql" else "dbo"
                operator.admin.guard_table(f"{owner}.soak_guarded", f"{self.name}-guarded")
            operator.admin.set_priorities(f"{self.name}-ranked", "5s")
        self.children = [self._fresh() for _ in range(self.place.workers)]
        for child in self.children:
            child.expect("ready", START)
        began = time.monotonic()
        self._happen(began + self.seconds)
        self._span = (began, time.monotonic())
        self.result.seconds = self._span[1] - began
        self._wake(everybody=True)
        self.place.heal()
        with self.place.direct.coordinator(grace=30, retry=60) as coordinator:
            self._everybody_gets_in(coordinator)
            for child in self.children:
                self._kill(child)
            self._nothing_is_left(coordinator)
            self._look_back(coordinator)
        self._read()

    def _happen(self, deadline: float) -> None:
        """Make one fault after the other, until then."""
        faults = self.place.faults()
        own: dict[str, Callable[[Child], None]] = {"kill -9": self._kill, "SIGSTOP": self._stop}
        while time.monotonic() < deadline:
            time.sleep(self.rng.uniform(*self.pace.pause))
            self._wake()
            event = self.rng.choice([*own, *own, *faults] if faults else [*own])
            if event in faults:
                faults[event](self.happened, self.rng)
            else:
                child = self.rng.choice(self.children)
                if event == "SIGSTOP" and (child.pid in self.stopped or len(self.stopped) >= 2):
                    continue
                own[event](child)
                if event == "kill -9":
                    self.children[self.children.index(child)] = self._fresh()
            self.result.faults[event] += 1

    def _everybody_gets_in(self, coordinator: sqlsem.Coordinator) -> None:
        """Check that a new process gets through every queue once faults have stopped."""
        names = [
            f"{self.name}-{kind}-{n}" for kind in ("mutex", "travel", "departure") for n in range(self.pace.resources)
        ]
        names += [f"{self.name}-{kind}" for kind in ("leader", "shared", "guarded")]
        names += [f"{self.name}-pinned-{n}" for n in range(jobs.PLACES)]
        locks = {resource: coordinator.mutex(resource) for resource in names}
        for number in range(self.pace.resources):
            table, limit = f"{self.name}-table-{number}", f"{self.name}-limit-{number}"
            locks |= {table: coordinator.write(table), limit: coordinator.limit(limit, jobs.PLACES)}
        ranked = f"{self.name}-ranked"
        locks[ranked] = coordinator.limit(ranked, jobs.PLACES, priority=9)
        for name, lock in locks.items():
            try:
                if lock.acquire(timeout=60):
                    lock.release()
                    continue
                words = f"not had in 60 s, when all was well again: {lock}, {coordinator.admin.entries(name)}"
            except sqlsem.SqlsemError as exc:
                words = f"{lock}: {type(exc).__name__}: {exc}, when all was well again"
            self.result.findings.append(words)

    def _nothing_is_left(self, coordinator: sqlsem.Coordinator) -> None:
        """Remove the rows of the dead processes. (Rows of bare participants are for an operator to remove.)"""
        database = self.place.direct
        database.rows("DELETE FROM {table} WHERE requesting_id LIKE ?", "bare-%")
        queue = coordinator.queue(f"{self.name}-blocked")
        for task in queue.tasks("pending", maximum=100_000):
            coordinator.admin.cancel_task(task.task_id)
        try:
            until(
                lambda: coordinator.admin.reap() is not None and database.queue(self.name) == [], "no rows are left", 90
            )
        except AssertionError as exc:
            self.result.findings.append(f"{exc}: {coordinator.admin.entries()}")

    def _look_back(self, coordinator: sqlsem.Coordinator) -> None:
        """Return the history of the database."""
        database = self.place.direct
        for resource in (f"{self.name}-mutex-0", f"{self.name}-shared") if self.place.steady else ():
            past = Past(coordinator, resource, 7200)
            report = audit(past.past(), past.entries)
            if not report.ok:
                self.result.findings.append(f"by its history {resource} was not in order: {report.findings}")
        if self.place.steady and self.place.engine in ("postgresql", "sqlite") and not tlc.lacks():
            self._follow(coordinator)
        rows = database.rows("SELECT number, resource, fence, pid FROM soak_write")
        rows += database.rows("SELECT number, resource, fence, pid FROM soak_guarded")
        self.result.entered["fenced write"] = len(rows)
        self.result.findings += checks.writes(rows, self.happened)
        self.result.size = self.place.size()
        self._done = {row[0] for row in database.rows("SELECT position FROM soak_done")}
        history = database.beside("history")
        text = f"SELECT queue_position FROM {history} WHERE outcome = 'released' AND resource_id LIKE ?"
        self._released = {row[0] for row in database.rows(text, f"{self.name}-departure-%")}

    def _follow(self, coordinator: sqlsem.Coordinator) -> None:
        """Check that the history is a behaviour of the specification."""
        pasts = [Past(coordinator, f"{self.name}-{item}", 7200).past() for item in FOLLOWED]
        unit = 1e-3 if self.place.engine == "sqlite" else 1e-6
        trace = traces.beginning(traces.events((item for past in pasts for item in past), unit=unit), MAX_EVENTS)
        if not trace:
            return
        try:
            verdict = traces.check(trace, seconds=TLC_SECONDS)
        except subprocess.TimeoutExpired:
            self.result.trouble["TLC had no time"] += 1
            return
        self.result.followed = verdict.events
        if not verdict.accepted:
            words = verdict.violated or "nothing of it can come next"
            self.result.findings.append(f"no behaviour of proof/Queues.tla: {words}, at one of {verdict.refused}")

    def _read(self) -> None:
        """Return the records of the book."""
        words = records(self.folder / "book")
        result = self.result
        for check in checks.CHECKS:
            result.findings += check(words, self.happened)
        result.findings += checks.departures(words, self.happened, self._done, self._released)
        if self.place.steady:
            result.findings += checks.rates(words, self.happened, jobs.RATE, jobs.WINDOW)
        began, ended = self._span
        tenth = (ended - began) / 10
        for word in words:
            kind = {"stay": None, "hop": "travel", "started": "leader", "attempt": "work", "take": "rate"}
            if word["what"] in kind:
                result.entered[kind[word["what"]] or _kind(word["resource"])] += 1
            if word["what"] == "trouble":
                result.trouble[word["error"]] += 1
            if "asked" in word:
                waited = word["entered"] - word["asked"]
                result.waits.append(waited)
                if word["asked"] < began + tenth:
                    result.early.append(waited)
                elif ended - tenth <= word["asked"] < ended:
                    result.late.append(waited)
        for child in self.everybody:
            while (event := child.next()) is not None:
                if event["event"] == "failed":
                    result.findings.append(f"a job failed: {event['error']}\n{child.errors()}")
                elif event["event"] == "trouble":
                    result.trouble[event["error"].partition(":")[0]] += 1


def _kind(resource: str) -> str:
    """Return the kind of a resource: mutex for soak-mutex-3."""
    return "once" if resource.startswith("once:") else resource.split("-")[1]


def run(kind: type[Place], folder: Path, seconds: float, seed: int, pace: Pace = USUAL) -> Result:
    """Run one night in a place of this kind, in a fresh folder, which stays if something was found."""
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    place = kind(folder)
    try:
        result = Night(place, seconds, seed, pace).run()
    finally:
        place.close()
    if not result.findings:
        shutil.rmtree(folder, ignore_errors=True)
    return result
