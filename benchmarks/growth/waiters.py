"""Measure many waiters on one resource. Nothing here prints.

The waiters are tasks of asyncio, all in one process or a hundred in each of several. They wait behind a holder until
the cost of idle waiters is measured. Then the holder releases, and each waiter passes the mutex on at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sqlsem
from benchmarks import measure, servers
from benchmarks.queues import database, rows
from benchmarks.subjects import install
from sqlsem.values.locks import Request

NAME = "crowd"
#: Hand-offs after which the rate is known, seconds for them, and for all waiters to be in the queue.
HANDOFFS, HANDOFF_SECONDS, QUEUE_SECONDS = 500, 20.0, 90.0
#: Tries and registrations that are timed.
PROBES = 60


@dataclass
class Crowd:
    """The cost of so many waiters."""

    waiters: int
    processes: int
    rate: float  # hand-offs a second
    attempt: float | None = None  # µs, median: a try, which is refused
    registration: float | None = None  # µs, median: joining the queue, at its end
    statements: float | None = None  # a second and process
    server_cpu: float | None = None  # seconds a second
    client_cpu: float | None = None  # the same, all waiting processes


class _Shared:
    """The state that the processes share."""

    def __init__(self) -> None:
        context = measure.processes
        self.granted = context.Value("l", 0, lock=False)  # only the holder of the mutex counts
        self.goal = context.Value("l", 0, lock=False)
        self.first, self.last = context.Value("d", 0, lock=False), context.Value("d", 0, lock=False)
        self.reached = context.Event()
        self.calls = context.Queue()
        self.begin, self.end = context.Event(), context.Event()

    def note_grant(self) -> None:
        self.granted.value += 1
        self.last.value = time.monotonic()
        if self.granted.value == 1:
            self.first.value = self.last.value
        if self.granted.value == self.goal.value:
            self.reached.set()

    def rate(self) -> float:
        """Return the hand-offs a second, from the first grant to the goal, or to the timeout."""
        self.reached.wait(HANDOFF_SECONDS)
        return float((self.granted.value - 1) / max(self.last.value - self.first.value, 1e-6))


def _wait_as_tasks(url: str, number: int, shared: _Shared) -> None:
    """Run one process with so many waiting tasks."""

    async def crowd(coordinator: sqlsem.Coordinator, count: list[int]) -> None:
        lock = coordinator.aio.mutex(NAME)

        async def wait_once() -> None:
            await lock.acquire()
            shared.note_grant()
            await lock.release()

        waiting = asyncio.gather(*(wait_once() for _ in range(number)))
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, shared.begin.wait)
        before, used = count[0], time.process_time()
        await loop.run_in_executor(None, shared.end.wait)
        shared.calls.put((count[0] - before, time.process_time() - used))
        await waiting

    coordinator = sqlsem.connect(url, retry=60)
    with contextlib.ExitStack() as counting:
        count = counting.enter_context(measure.counting_calls(coordinator.engine.session_class))
        if url.startswith("postgresql"):  # tasks wait in sessions of another kind
            from sqlsem.engines.postgresql.aio import AsyncPostgresSession

            counting.enter_context(measure.counting_calls(AsyncPostgresSession, count))
        asyncio.run(crowd(coordinator, count))
    coordinator.close()


def _in_queue(url: str) -> int:
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60)) as connection:
            number: int = connection.execute("SELECT count(*) FROM ProcessControl").fetchone()[0]
            return number
    table = "ProcessControl" if url.startswith("mysql") else "sqlsem.ProcessControl"
    return int(rows(url, f"SELECT count(*) FROM {table}")[0][0])


@contextlib.contextmanager
def _started(target: Callable[..., None], number: int, *arguments: Any) -> Iterator[list[Any]]:
    """Run so many processes, which are killed at the end: leaving a long queue in order would take long."""
    children = [measure.processes.Process(target=target, args=arguments, daemon=True) for _ in range(number)]
    try:
        for child in children:
            child.start()
        yield children
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.join()


def crowd(engine: str, url: str, waiters: int, processes: int, seconds: float) -> Crowd | None:
    """Measure ``waiters`` tasks in so many processes. None if they do not get into the queue in time."""
    shared = _Shared()
    shared.goal.value = min(HANDOFFS, waiters)
    with database(url, "bench_crowd") as place, contextlib.ExitStack() as stack:
        install(place)
        holder, other = (stack.enter_context(contextlib.closing(sqlsem.connect(place))) for _ in range(2))
        lock = holder.mutex(NAME)
        lock.acquire()
        began = time.monotonic()
        arguments = (place, waiters // processes, shared)
        children = stack.enter_context(_started(_wait_as_tasks, processes, *arguments))
        while _in_queue(place) <= waiters:
            if time.monotonic() - began > QUEUE_SECONDS or not all(child.is_alive() for child in children):
                lock.release()
                return None
            time.sleep(0.2)
        time.sleep(min(3.0, seconds))  # until the start is over
        result = Crowd(waiters, processes, 0.0)
        _idle(result, place, shared, seconds)
        _probe(result, other)
        lock.release()
        result.rate = shared.rate()
    return result


def _idle(result: Crowd, url: str, shared: _Shared, seconds: float) -> None:
    """Measure the cost while nothing happens. (The clients count their calls: a server's counters lag behind by a
    second, and count connections as well.)
    """
    used, began = servers.cpu_seconds(url), time.monotonic()
    shared.begin.set()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    used_after = servers.cpu_seconds(url)
    shared.end.set()
    reports = [shared.calls.get(timeout=120) for _ in range(result.processes)]
    calls, cpu = (sum(part) for part in zip(*reports, strict=True))
    result.statements = calls / elapsed / result.processes
    result.server_cpu = None if used is None or used_after is None else (used_after - used) / elapsed
    result.client_cpu = cpu / elapsed


def _probe(result: Crowd, coordinator: sqlsem.Coordinator) -> None:
    """Measure a try, and joining the queue."""
    lock = coordinator.mutex(NAME)
    tries, registrations = [], []
    for _ in range(PROBES):
        before = time.perf_counter()
        lock.acquire(timeout=0)
        tries.append(time.perf_counter() - before)
    session = coordinator.engine.connect("main")
    try:
        member = session.register_member("bench", os.getpid(), "bench")
        for number in range(PROBES):
            before = time.perf_counter()
            tickets = session.register(member, "bench", "bench", f"bench.{number}", [Request(NAME)], False)
            registrations.append(time.perf_counter() - before)
            assert tickets is not None
            session.release(tickets[0], "cancelled")
        session.deregister_member(member)
    finally:
        session.close()
    result.attempt = 1e6 * statistics.median(tries[10:])
    result.registration = 1e6 * statistics.median(registrations[10:])


# -- a peer: a connection for each waiter -----------------------------------------------------------------------------


def _wait_with_connections(url: str, number: int, shared: _Shared, ready: Any) -> None:
    import psycopg

    async def main() -> None:
        connections = [await psycopg.AsyncConnection.connect(url, autocommit=True) for _ in range(number)]

        async def take_and_release(connection: Any) -> None:
            await connection.execute("SELECT pg_advisory_lock(4711)")
            shared.note_grant()
            await connection.execute("SELECT pg_advisory_unlock(4711)")

        ready.release()
        await asyncio.gather(*map(take_and_release, connections))

    asyncio.run(main())


def raw_crowd(url: str, waiters: int, processes: int = 1) -> Crowd:
    """Measure as many connections that wait for ``pg_advisory_lock``, in so many processes."""
    import psycopg

    shared, ready = _Shared(), measure.processes.Semaphore(0)
    shared.goal.value = min(HANDOFFS, waiters)
    with psycopg.connect(url, autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(4711)")
        with _started(_wait_with_connections, processes, url, waiters // processes, shared, ready):
            for _ in range(processes):
                if not ready.acquire(timeout=QUEUE_SECONDS):
                    raise SystemExit("the connections of the raw lock were not made in time")
            time.sleep(1)
            holder.execute("SELECT pg_advisory_unlock(4711)")
            rate = shared.rate()
    return Crowd(waiters, processes, rate)
