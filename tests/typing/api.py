"""The public face as programs use it: checked by mypy (`.ci/run`, tests/unit/test_typing.py), never run.

A line that mypy must refuse says so by a ``type: ignore`` with the error's code, which mypy wants to be needed.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from typing_extensions import assert_type

import sqlsem
from sqlsem import aio

# -- databases

sqlsem.configure("postgresql://etl@db/dwh", grace="30s", lease=timedelta(minutes=1), retry=10, debug=True)
sqlsem.configure(graze=30)  # type: ignore[call-arg]
coordinator = sqlsem.connect(Path("locks.db"), grace=5, schema="locks", table="queue")
assert_type(coordinator, sqlsem.Coordinator)
sqlsem.connect("sqlite:///x.db", timeout=5)  # type: ignore[call-arg]
sqlsem.connect(None)  # type: ignore[arg-type]
length: sqlsem.Duration = "1h30m"

# -- locks


def lost(grant: sqlsem.Grant) -> None:
    print(grant.resource)


assert_type(sqlsem.mutex("a", timeout="10s", note="x", reentrant=True, on_lost=lost), sqlsem.Lock)
assert_type(sqlsem.limit("a", 3, weight=2, timeout=timedelta(hours=1), coordinator=coordinator), sqlsem.Lock)
assert_type(coordinator.limit("a", 3, weight=2, timeout=5), sqlsem.Lock)
assert_type(coordinator.stage("a", 100, cancel_on_lost=True), sqlsem.Lock)
sqlsem.mutex("a", timout=5)  # type: ignore[call-arg]
sqlsem.limit("a", 3, timout=5)  # type: ignore[call-arg]
sqlsem.limit("a")  # type: ignore[call-arg]
sqlsem.read("a", weight=2)  # type: ignore[call-arg]
sqlsem.write("a", timeout=[])  # type: ignore[arg-type]
coordinator.stage("a", "100")  # type: ignore[arg-type]
coordinator.mutex("a", coordinator=coordinator)  # type: ignore[call-arg]
sqlsem.all_of(sqlsem.mutex("a"), coordinator.limit("b", 2), timeout=5)
sqlsem.all_of("a", "b")  # type: ignore[arg-type]
sqlsem.all_of(sqlsem.mutex("a"), note="x")  # type: ignore[call-arg]

lock = sqlsem.mutex("a")
assert_type(lock.acquire(timeout="5s"), bool)
assert_type(lock.acquire(False), bool)
assert_type(lock.locked(), bool)
lock.acquire(timeout=[])  # type: ignore[arg-type]
with lock as grant:
    assert_type(grant, sqlsem.Grant)
    assert_type(grant.fence, int)
    grant.upgrade(timeout=timedelta(seconds=1))


@sqlsem.limit("etl", 3)
def load(table: str, *, full: bool = False) -> int:
    return len(table)


@sqlsem.mutex(lambda table: f"load:{table}")
async def merge(table: str) -> float:
    return 0.5


assert_type(load("a", full=True), int)
load(1)  # type: ignore[arg-type]


# -- events


def tell(event: sqlsem.events.Waiting) -> None:
    assert_type(event.behind, sqlsem.events.Behind | None)


assert_type(sqlsem.on("waiting", tell), sqlsem.Subscription[sqlsem.events.Waiting])
coordinator.on("waiting", tell).undo()
sqlsem.on("granted", tell)  # type: ignore[call-overload]
sqlsem.on("grant")  # type: ignore[call-overload]


loss = sqlsem.events.Lost("a", 1, "write", 1, 1, None, "SQLite", "MainThread#1", 0.5, "it was taken away")


@sqlsem.on("lost")
def alarm(event: sqlsem.events.Lost) -> str:
    return event.why


assert_type(alarm(loss), str)
alarm("etl")  # type: ignore[arg-type]


# -- asyncio


async def main() -> None:
    assert_type(await merge("a"), float)
    async with sqlsem.limit("etl", 3) as grant:
        assert_type(grant, aio.Grant)
        await grant.upgrade(timeout="1m")
    waiting = coordinator.aio.all_of(coordinator.aio.mutex("a"), coordinator.read("b"), timeout="1m")
    assert_type(waiting, aio.Lock)
    assert_type(await waiting.acquire(timeout=timedelta(seconds=5)), bool)
    assert_type(await waiting.locked(), bool)
    sqlsem.aio.limit("a", 3, timout=5)  # type: ignore[call-arg]
    coordinator.aio.read("a", coordinator=coordinator)  # type: ignore[call-arg]


# -- queues, workers and rounds

queue = coordinator.queue("nightly", on_failure="continue")
assert_type(queue, sqlsem.Queue)
assert_type(queue.put({"a": 1}, after="10m", backoff=timedelta(seconds=5), order=100), int)
queue.put(1, afer=5)  # type: ignore[call-arg]
queue.join("6h")
assert_type(queue.wait(timeout=timedelta(hours=6)), bool)
sqlsem.Worker(queue, threads=4, idle_exit="30s").run()
nightly = coordinator.round("nightly", ["a", "b"], window="6h")
assert_type(nightly, sqlsem.Round)
nightly.wait("1h")
coordinator.round("nightly", ["a"], window="6h", on_fail=print)  # type: ignore[call-arg]
coordinator.set_stale_after("etl", "2h")
