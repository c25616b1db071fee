"""Compare the API for asyncio with that for threads, on one coordinator. Nothing here prints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import threading
import time
from typing import Any

import sqlsem
from benchmarks import subjects
from benchmarks.measure import Contention, Pair, Visit, together

FACES = ("threads", "asyncio")


def uncontended(url: str, rounds: int) -> dict[str, Pair]:
    """Acquire and release without contention, by turns."""
    times: dict[str, tuple[list[int], list[int]]] = {face: ([], []) for face in FACES}

    def note(face: str, number: int, before: int, between: int, after: int) -> None:
        if number >= 20:
            times[face][0].append(between - before)
            times[face][1].append(after - between)

    with sqlsem.connect(url) as coordinator, contextlib.closing(asyncio.new_event_loop()) as loop:
        lock, awaited = coordinator.mutex(subjects.NAME), coordinator.aio.mutex(subjects.NAME)

        async def pair(number: int) -> None:
            before = time.perf_counter_ns()
            await awaited.acquire()
            between = time.perf_counter_ns()
            await awaited.release()
            note("asyncio", number, before, between, time.perf_counter_ns())

        for number in range(rounds + 20):
            before = time.perf_counter_ns()
            lock.acquire()
            between = time.perf_counter_ns()
            lock.release()
            note("threads", number, before, between, time.perf_counter_ns())
            loop.run_until_complete(pair(number))
        loop.run_until_complete(loop.shutdown_asyncgens())
    return {face: Pair(*(statistics.median(part) / 1000 for part in both)) for face, both in times.items()}


def _contend(face: str, url: str, at_once: int, hold: float, seconds: float, ready: Any, results: Any) -> None:
    """Contend for the mutex with ``at_once`` threads or tasks of this process."""
    visits: list[Visit] = []

    def note(number: int, requested: int, granted: int, leaving: int) -> None:
        visits.append(Visit(os.getpid() * 1000 + number, requested, granted, leaving, time.monotonic_ns()))

    def thread(lock: sqlsem.Lock, number: int, start: threading.Barrier) -> None:
        start.wait()
        end = time.monotonic_ns() + int(seconds * 1e9)
        while time.monotonic_ns() < end:
            requested = time.monotonic_ns()
            lock.acquire()
            granted = time.monotonic_ns()
            time.sleep(hold)
            leaving = time.monotonic_ns()
            lock.release()
            note(number, requested, granted, leaving)

    async def task(lock: Any, number: int) -> None:
        end = time.monotonic_ns() + int(seconds * 1e9)
        while time.monotonic_ns() < end:
            requested = time.monotonic_ns()
            await lock.acquire()
            granted = time.monotonic_ns()
            await asyncio.sleep(hold)
            leaving = time.monotonic_ns()
            await lock.release()
            note(number, requested, granted, leaving)

    with sqlsem.connect(url) as coordinator:
        if face == "threads":
            lock = coordinator.mutex(subjects.NAME)
            for _ in range(5):  # also opens the sessions that wait
                with lock:
                    time.sleep(0.01)
            start = threading.Barrier(at_once + 1)
            workers = [threading.Thread(target=thread, args=(lock, number, start)) for number in range(at_once)]
            for worker in workers:
                worker.start()
            ready.wait()
            start.wait()
            for worker in workers:
                worker.join()
        else:

            async def main() -> None:
                lock = coordinator.aio.mutex(subjects.NAME)
                for _ in range(5):
                    async with lock:
                        await asyncio.sleep(0.01)
                ready.wait()
                await asyncio.gather(*(task(lock, number) for number in range(at_once)))

            asyncio.run(main())
    results.put(visits)


def handoff(url: str, number: int, at_once: int, hold: float, seconds: float, turns: int) -> dict[str, Contention]:
    """Contend with ``number`` processes of ``at_once`` each, the APIs in turns."""
    by_face = {face: Contention() for face in FACES}
    for _ in range(turns):
        for face, contention in by_face.items():
            contention.add(together(number, seconds, _contend, face, url, at_once, hold, seconds))
    return by_face
