"""Measure grants of one rate by many threads of one process: below its limit, and at it, there also by several
processes.

The peers are pyrate-limiter's buckets in PostgreSQL and in Redis. The latter is the usual script: a sorted set of the
grants of the window.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import sqlsem
from benchmarks import servers
from benchmarks.printed import console, table

__all__ = ["rates"]

#: A limit that is never reached, and one that all reach, in a second.
FREE, FULL = 1_000_000, 1_000


def rates(engine: str, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Measure grants a second; at the limit also the most grants in any second, by the database's clock."""
    threads, seconds = int(options["threads"]), float(options["seconds"])
    results: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        for limit in (FREE, FULL):
            coordinator = stack.enter_context(sqlsem.connect(url))
            rate = coordinator.rate(f"bench {limit} {time.time_ns()}", limit, per="1s")
            times: list[int] = []

            def take(rate: sqlsem.Rate = rate, times: list[int] = times) -> None:
                grant = rate.take()
                assert grant is not None
                times.append(grant.taken_ms)

            results[f"sqlsem, {limit:,}/s"] = {
                "grants": _run(take, threads, seconds),
                "maximum": _max_use(times, 1000),
            }
            if engine == "postgresql":
                peers = {"PostgreSQL": _in_postgres(url, limit, stack), "Redis": _in_redis(limit, stack)}
                for store, peer in peers.items():
                    if peer is not None:
                        results[f"pyrate-limiter in {store}, {limit:,}/s"] = {"grants": _run(peer, threads, seconds)}
    processes = int(options["processes"] or 8)
    several = _of_several(url, processes, threads, seconds)
    results[f"sqlsem, {FULL:,}/s, {processes} processes"] = {
        "grants": len(several) / seconds,
        "maximum": _max_use(several, 1000),
    }
    shown = table(f"One rate, {threads} threads of a process", "", "grants a second", "most in any second")
    for measure, figures in results.items():
        shown.add_row(
            measure, f"{figures['grants']:,.0f}", f"{figures['maximum']:,.0f}" if "maximum" in figures else ""
        )
    console.print(shown)
    return results


def _of_several(url: str, processes: int, threads: int, seconds: float) -> list[int]:
    """Return the times of the grants of several processes at the limit within that time."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(processes), context.Queue()
    name = f"bench of several {time.time_ns()}"
    takers = [
        context.Process(target=_taker, args=(url, name, threads, seconds, ready, results)) for _ in range(processes)
    ]
    for taker in takers:
        taker.start()
    times = [at for _ in takers for at in results.get()]
    for taker in takers:
        taker.join()
    return times


def _taker(url: str, name: str, threads: int, seconds: float, ready: Any, results: Any) -> None:
    with sqlsem.connect(url) as coordinator:
        rate, times = coordinator.rate(name, FULL, per="1s"), []

        def take() -> None:
            grant = rate.take()
            assert grant is not None
            times.append(grant.taken_ms)

        take()
        ready.wait()
        _run(take, threads, seconds)
        last = max(times)
        results.put([at for at in times if at > last - seconds * 1000])


def _run(take: Callable[[], object], threads: int, seconds: float) -> float:
    counts, until = [0] * threads, time.monotonic() + seconds

    def work(number: int) -> None:
        while time.monotonic() < until:
            take()
            counts[number] += 1

    take()  # connects, and warms up
    began = time.monotonic()
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.monotonic() - began)


def _max_use(taken: list[int], length: int) -> int:
    """Return the greatest use in any stretch of this many ms."""
    taken.sort()
    return max(bisect_right(taken, first + length - 1) - number for number, first in enumerate(taken))


def _in_postgres(url: str, limit: int, stack: contextlib.ExitStack) -> Callable[[], object] | None:
    try:
        import psycopg_pool
        import pyrate_limiter
    except ImportError:
        return None
    pool = stack.enter_context(psycopg_pool.ConnectionPool(url, min_size=1, max_size=8))
    return _taking(pyrate_limiter.PostgresBucket(pool, f"bench_{limit}_{time.time_ns()}", [_rate(limit)]), stack)


def _in_redis(limit: int, stack: contextlib.ExitStack) -> Callable[[], object] | None:
    try:
        import pyrate_limiter
        import redis
    except ImportError:
        return None
    place = stack.enter_context(servers.redis())
    if place is None:
        return None
    client = stack.enter_context(redis.Redis(unix_socket_path=place))
    return _taking(pyrate_limiter.RedisBucket.init([_rate(limit)], client, f"bench {limit}"), stack)


def _rate(limit: int) -> Any:
    import pyrate_limiter

    return pyrate_limiter.Rate(limit, pyrate_limiter.Duration.SECOND)


def _taking(bucket: Any, stack: contextlib.ExitStack) -> Callable[[], object]:
    import pyrate_limiter

    limiter = pyrate_limiter.Limiter(bucket)
    stack.callback(limiter.close)
    return lambda: limiter.try_acquire("bench")
