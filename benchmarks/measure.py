"""Take the measurements. Nothing here prints.

Times of different processes are compared by `time.monotonic_ns`, one clock for the whole machine.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlsem
from benchmarks import mysql_queues, servers, subjects
from sqlsem.engines.optional import Session
from sqlsem.engines.protocol import EngineConnection

#: Requested so much earlier (ns) and granted later: overtaken, and not merely a tie.
OVERTAKEN = 2_000_000
#: Forked from a clean server process where there is one: 100 waiters then start in a second.
processes: Any = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
if os.name == "posix":
    processes.set_forkserver_preload(["benchmarks.measure"])


# -- one process, no contention ---------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Medians in microseconds."""

    acquire: float
    release: float

    @property
    def both(self) -> float:
        return self.acquire + self.release


#: Seconds for which the uncontended pairs do not count: SQLite checks a new folder more closely.
WARM_SECONDS = 1.6


def uncontended(engine: str, url: str, rounds: int) -> dict[str, Pair]:
    """Acquire and release without contention. The subjects take turns, pair by pair: a processor that changes its pace,
    or another program, then disturbs all alike.
    """
    subjects_made = {name: make(url) for name, make in subjects.UNCONTENDED[engine].items()}
    times: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in subjects_made}
    began, warm, counted = time.perf_counter(), 0, 0
    while counted < rounds:
        warm += 1
        if warm > 20 and time.perf_counter() - began > WARM_SECONDS:
            counted += 1
        for name, subject in subjects_made.items():
            before = time.perf_counter_ns()
            subject.acquire()
            between = time.perf_counter_ns()
            subject.release()
            after = time.perf_counter_ns()
            if counted:
                times[name][0].append(between - before)
                times[name][1].append(after - between)
    for subject in subjects_made.values():
        subject.close()
    return {name: Pair(*(statistics.median(part) / 1000 for part in both)) for name, both in times.items()}


# -- many processes, one lock ---------------------------------------------------------------------------------------


@dataclass
class Visit:
    """One hold; nanoseconds."""

    process: int
    asked: int
    granted: int
    leaving: int  # when release was called
    left: int
    position: int = 0


@dataclass
class HandOffs:
    """Return the time from one holder's release to the next holder's grant."""

    handoffs: list[float] = field(default_factory=list)  # µs

    @property
    def p50(self) -> float:
        return statistics.median(self.handoffs)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.handoffs, n=100)[-1]


@dataclass
class Contention(HandOffs):
    """The figures of many processes that all contend for the same mutex."""

    visits: list[Visit] = field(default_factory=list)
    seconds: float = 0.0
    to_others: list[float] = field(default_factory=list)  # the hand-offs to another process
    overtaking: int = 0
    overlaps: int = 0

    def add(self, visits: list[Visit]) -> None:
        """Compute the figures from the visits of one run."""
        visits.sort(key=lambda visit: visit.granted)
        self.visits += visits
        self.seconds += (visits[-1].left - visits[0].granted) / 1e9
        for visit, following in itertools.pairwise(visits):
            self.handoffs.append((following.granted - visit.leaving) / 1000)
            if following.process != visit.process:
                self.to_others.append(self.handoffs[-1])
            self.overlaps += following.granted < visit.leaving
        earliest = visits[-1].asked  # of those granted later
        for visit in reversed(visits):
            self.overtaking += earliest < visit.asked - OVERTAKEN
            earliest = min(earliest, visit.asked)

    @property
    def to_another(self) -> float:
        return statistics.median(self.to_others) if self.to_others else float("nan")

    @property
    def to_another_p99(self) -> float:
        return statistics.quantiles(self.to_others, n=100)[-1] if len(self.to_others) > 1 else float("nan")

    @property
    def to_itself(self) -> float:
        """The per cent of grants to the process that has just released."""
        return 100 * (1 - len(self.to_others) / len(self.handoffs))

    @property
    def barged(self) -> float:
        return 100 * self.overtaking / len(self.visits)

    @property
    def longest_wait(self) -> float:
        """Milliseconds."""
        return max(visit.granted - visit.asked for visit in self.visits) / 1e6

    @property
    def rate(self) -> float:
        """Grants a second."""
        return len(self.visits) / self.seconds


def _contend(
    engine: str, name: str, url: str, hold: float, seconds: float, warm: float, ready: Any, results: Any
) -> None:
    subject = subjects.SUBJECTS[engine][name](url)
    for _ in range(5):  # also opens the sessions that wait
        subject.acquire()
        time.sleep(0.01)
        subject.release()
    ready.wait()
    visits = []
    begin = time.monotonic_ns() + int(warm * 1e9)
    end = begin + int(seconds * 1e9)
    while time.monotonic_ns() < end:
        requested = time.monotonic_ns()
        subject.acquire()
        granted = time.monotonic_ns()
        if hold:
            time.sleep(hold)
        leaving = time.monotonic_ns()
        subject.release()
        if requested >= begin:
            visits.append(Visit(os.getpid(), requested, granted, leaving, time.monotonic_ns()))
    subject.close()
    results.put(visits)


def contend(
    engine: str, name: str, url: str, number: int, hold: float, seconds: float, warm: float = 0.0
) -> list[Visit]:
    """Contend: ``number`` processes take the mutex, hold it for ``hold`` seconds and ask again at once, for
    ``seconds``.

    The first ``warm`` seconds do not count: some servers compile the first calls of a session.
    """
    return together(number, seconds + warm, _contend, engine, name, url, hold, seconds, warm)


def together(number: int, seconds: float, target: Callable[..., None], *arguments: Any) -> list[Visit]:
    """Return the visits of ``number`` processes that run ``target(*arguments, ready, results)`` for about
    ``seconds``.
    """
    ready, results = processes.Barrier(number), processes.Queue()
    everything = (*arguments, ready, results)
    workers = [processes.Process(target=target, args=everything, daemon=True) for _ in range(number)]
    for worker in workers:
        worker.start()
    visits = [visit for _ in workers for visit in results.get(timeout=120 + 20 * seconds)]
    for worker in workers:
        worker.join()
    return visits


def handoff(
    engine: str,
    url: str,
    number: int,
    hold: float,
    seconds: float,
    warm: float,
    turns: int,
    report: Callable[[str], None],
) -> dict[str, Contention]:
    """Measure contention for each subject, in turns (ABAB…), so that disturbances of the machine affect all alike."""
    by_subject = {name: Contention() for name in subjects.SUBJECTS[engine]}
    for turn in range(turns):
        for name, contention in by_subject.items():
            report(f"{name}, turn {turn + 1} of {turns}")
            contention.add(contend(engine, name, url, number, hold, seconds, warm))
    return by_subject


# -- a limit --------------------------------------------------------------------------------------------------------


@dataclass
class Admission(HandOffs):
    """The figures of many processes that all contend for a limit."""

    late: int = 0  # grants seen by their owners more than `OVERTAKEN` after that of a later position
    grants: int = 0

    def add(self, visits: list[Visit], limit: int) -> None:
        """Compute the figures from the visits of one run."""
        self.grants += len(visits)
        granted = sorted(visits, key=lambda visit: visit.granted)
        leaving = sorted(visit.leaving for visit in visits)
        for visit, left_at in zip(granted[limit:], leaving, strict=False):
            # This many visits had to end before the grant. A later request has waited for none of them.
            if visit.asked < left_at:
                self.handoffs.append((visit.granted - left_at) / 1000)
        earliest = granted[-1].granted  # of later positions
        for visit in sorted(visits, key=lambda visit: -visit.position):
            self.late += visit.granted > earliest + OVERTAKEN
            earliest = min(earliest, visit.granted)

    @property
    def late_share(self) -> float:
        """Per cent."""
        return 100 * self.late / self.grants


def _enter_and_leave(url: str, limit: int, hold: float, seconds: float, ready: Any, results: Any) -> None:
    with sqlsem.connect(url) as coordinator:
        lock = coordinator.limit(subjects.NAME, limit)
        for _ in range(5):
            with lock:
                time.sleep(0.01)
        ready.wait()
        visits = []
        end = time.monotonic_ns() + int(seconds * 1e9)
        while time.monotonic_ns() < end:
            requested = time.monotonic_ns()
            lock.acquire()
            granted = time.monotonic_ns()
            position = lock.grant.position
            time.sleep(hold)
            leaving = time.monotonic_ns()
            lock.release()
            visits.append(Visit(os.getpid(), requested, granted, leaving, time.monotonic_ns(), position))
    results.put(visits)


def admission(
    url: str, limits: Sequence[int], number: int, hold: float, seconds: float, turns: int
) -> dict[int, Admission]:
    """Contend for a limit with ``number`` processes, in turns of the limits."""
    by_limit = {limit: Admission() for limit in limits}
    for _ in range(turns):
        for limit, figures in by_limit.items():
            figures.add(together(number, seconds, _enter_and_leave, url, limit, hold, seconds), limit)
    return by_limit


# -- waiting --------------------------------------------------------------------------------------------------------


@dataclass
class Waiting:
    """The cost of ``number`` waiting processes, a second."""

    number: int
    seconds: float
    calls: float  # of the client on its sessions, for each waiter
    statements: float | None  # as the server counts them (PostgreSQL: transactions), for each waiter
    server_cpu: float | None  # seconds of CPU a second, all backends
    client_cpu: float  # the same for one waiter, milliseconds


#: The calls of a session.
CALLS = [
    name
    for name, _ in inspect.getmembers(Session, inspect.isfunction)
    if not (name.startswith("_") or hasattr(EngineConnection, name))
]


@contextlib.contextmanager
def counting_calls(kind: type[Any], count: list[int] | None = None) -> Iterator[list[int]]:
    """Count the calls of all sessions of that class in this process, on top of ``count``."""
    count = [0] if count is None else count

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return method(*args, **kwargs)

        return call

    own = {name: kind.__dict__.get(name) for name in CALLS if getattr(kind, name) is not getattr(Session, name)}
    for name in own:
        setattr(kind, name, counted(getattr(kind, name)))
    try:
        yield count
    finally:
        for name, method in own.items():
            if method is None:
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def _acquire_until_closed(lock: sqlsem.Lock) -> None:
    with contextlib.suppress(sqlsem.SqlsemError):
        lock.acquire()


def _await_turn(url: str, ready: Any, go: Any, seconds: float, results: Any) -> None:
    coordinator = sqlsem.connect(url)
    lock = coordinator.mutex("waiters")
    with counting_calls(coordinator.engine.session_class) as count:
        waiter = threading.Thread(target=_acquire_until_closed, args=(lock,), daemon=True)
        waiter.start()
        ready.wait()
        go.wait()
        before, used = count[0], time.process_time()
        time.sleep(seconds)
        results.put((count[0] - before, time.process_time() - used))
        go.wait()
    coordinator.close()


def waiters(engine: str, url: str, number: int, seconds: float) -> Waiting:
    """Let ``number`` processes wait behind a holder for the time of the measurement."""
    with sqlsem.connect(url) as coordinator:
        holder = coordinator.mutex("waiters")
        holder.acquire()
        ready, go, results = processes.Barrier(number + 1), processes.Barrier(number + 1), processes.Queue()
        arguments = (url, ready, go, seconds, results)
        workers = [processes.Process(target=_await_turn, args=arguments, daemon=True) for _ in range(number)]
        for worker in workers:
            worker.start()
        ready.wait(300)
        deadline = time.monotonic() + 120
        while len(coordinator.admin.entries("waiters")) <= number and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2)  # until the start is over
        go.wait(60)
        used, counted = servers.cpu_seconds(url), transactions(engine, url)
        began = time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        used_after, counted_after = servers.cpu_seconds(url), transactions(engine, url)
        outcomes = [results.get(timeout=60) for _ in workers]
        go.wait(60)
        for worker in workers:
            worker.join()
        holder.release()
    calls, cpu = (sum(part) / number / seconds for part in zip(*outcomes, strict=True))
    return Waiting(
        number,
        elapsed,
        calls,
        None if counted is None else (counted_after - counted) / number / elapsed,
        None if used is None or used_after is None else (used_after - used) / elapsed,
        cpu * 1000,
    )


def transactions(engine: str, url: str) -> Any:
    """Return the transactions so far in this database, which in autocommit are statements (on MariaDB the statements of
    all sessions); None if they are not counted.
    """
    if engine == "mysql":
        ((_, number),) = mysql_queues.rows(url, "SHOW GLOBAL STATUS LIKE 'Questions'")
        return int(number)
    if engine != "postgresql":
        return None
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    assert row is not None
    return row[0]


# -- connections ----------------------------------------------------------------------------------------------------


def connections(url: str, locks: int, waiting: int) -> tuple[int, int]:
    """Return the open connections of one process with ``locks`` mutexes; and the most with ``waiting`` waiting
    threads.
    """
    with sqlsem.connect(url) as coordinator, sqlsem.connect(url) as other:
        opened = _count_connections(coordinator)
        held = [coordinator.mutex(f"held-{number}") for number in range(locks)]
        for lock in held:
            lock.acquire()
        holding = len(opened)
        blocked = [other.mutex(f"blocked-{number}") for number in range(waiting)]
        for lock in blocked:
            lock.acquire()
        threads = [
            threading.Thread(target=coordinator.mutex(f"blocked-{number}").acquire, kwargs={"timeout": 3.0})
            for number in range(waiting)
        ]
        for thread in threads:
            thread.start()
        maximum = 0
        while any(thread.is_alive() for thread in threads):
            maximum = max(maximum, len(opened))
            time.sleep(0.01)
        for lock in (*held, *blocked):
            lock.release()
    return holding, maximum


def _count_connections(coordinator: sqlsem.Coordinator) -> list[Session]:
    connect = coordinator.engine.connect
    opened: list[Session] = []

    def counted(purpose: str) -> Session:
        session = connect(purpose)
        close = session.close

        def closed() -> None:
            with contextlib.suppress(ValueError):
                opened.remove(session)
            close()

        session.close = closed  # type: ignore[method-assign]
        opened.append(session)
        return session

    coordinator.engine.connect = counted  # type: ignore[method-assign]
    return opened
