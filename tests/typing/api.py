"""The public API as programs use it: checked by mypy (`.ci/run`, tests/unit/test_typing.py), never run.

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
assert_type(sqlsem.limit("a", weight=2), sqlsem.Lock)
sqlsem.limit("a", "3")  # type: ignore[arg-type]
sqlsem.read("a", weight=2)  # type: ignore[call-arg]
sqlsem.write("a", timeout=[])  # type: ignore[arg-type]
coordinator.stage("a", "100")  # type: ignore[arg-type]
coordinator.mutex("a", coordinator=coordinator)  # type: ignore[call-arg]
sqlsem.all_of(sqlsem.mutex("a"), coordinator.limit("b", 2), timeout=5)
assert_type(sqlsem.rate("a", 100, per="1m", cost=7, burst=10, timeout=5, note="x"), sqlsem.Rate)
assert_type(coordinator.rate("a", {"1s": 10, timedelta(hours=1): 100}), sqlsem.Rate)
assert_type(sqlsem.rate("a", 100, "1m").take(timeout="5s"), sqlsem.RateGrant | None)
sqlsem.rate("a", "100", "1m")  # type: ignore[arg-type]
sqlsem.rate("a", 100, "1m", weight=2)  # type: ignore[call-arg]
coordinator.rate("a", 100, "1m", coordinator=coordinator)  # type: ignore[call-arg]
with sqlsem.rate("a", 100, "1m") as taken:
    assert_type(taken, sqlsem.RateGrant)
    assert_type(taken.cost, int)
    taken.adjust(5)
sqlsem.all_of(sqlsem.mutex("a"), sqlsem.rate("b", 1, 1))
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
    assert_type(grant.hand_over(ttl="5m", to="etl"), str)
    grant.release_on_commit(None)
with sqlsem.adopt("token", on_lost=lost) as adopted:
    assert_type(adopted, sqlsem.Grant)
sqlsem.adopt(7)  # type: ignore[arg-type]


def schedule(term: sqlsem.Term) -> int:
    term.check()
    term.step_down()
    return term.fence


with sqlsem.leader("a", "http://a", on_started=schedule, timeout="5s", coordinator=coordinator) as term:
    assert_type(term, sqlsem.Term)
    assert_type(term.lost, bool)
assert_type(coordinator.leader("a", on_stopped=schedule).run(schedule), int)
leads = sqlsem.leader("a").current()
if leads is not None:
    assert_type(leads.info, str | None)
sqlsem.leader("a", on_lost=lost)  # type: ignore[call-arg]
coordinator.leader("a", coordinator=coordinator)  # type: ignore[call-arg]


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
        assert_type(await grant.hand_over(), str)
    async with await coordinator.aio.adopt("token", cancel_on_lost=True) as adopted:
        assert_type(adopted, aio.Grant)

    async def schedule(term: aio.Term) -> float:
        await term.step_down()
        return 0.5

    async with sqlsem.aio.leader("a", on_started=schedule) as term:
        assert_type(term, aio.Term)
    assert_type(await coordinator.aio.leader("a", cancel_on_lost=False).run(schedule), float)
    waiting = coordinator.aio.all_of(coordinator.aio.mutex("a"), coordinator.read("b"), timeout="1m")
    assert_type(waiting, aio.Lock)
    assert_type(await waiting.acquire(timeout=timedelta(seconds=5)), bool)
    assert_type(await waiting.locked(), bool)
    sqlsem.aio.limit("a", 3, timout=5)  # type: ignore[call-arg]
    coordinator.aio.read("a", coordinator=coordinator)  # type: ignore[call-arg]


# -- queues, workers and batches

queue = coordinator.queue("nightly", on_failure="continue")
with sqlsem.once("report", per="1d", offset=timedelta(hours=6)) as run:
    assert_type(run, sqlsem.Run | None)
assert_type(coordinator.once("report", 3600, timeout="1m").begin(blocking=False), sqlsem.Run | None)
assert_type(coordinator.aio.once("report", "1d", cancel_on_lost=True), aio.Once)
sqlsem.once("report")  # type: ignore[call-arg]
assert_type(queue, sqlsem.Queue)
assert_type(queue.put({"a": 1}, after="10m", backoff=timedelta(seconds=5), order=100), int)
assert_type(queue.put(1, key="tenant-7", priority=-1), int)
assert_type(queue.put(1, locks=[sqlsem.write("customers"), coordinator.limit("pg", 4), sqlsem.aio.mutex("a")]), int)
queue.put(1, locks=["customers"])  # type: ignore[list-item]
queue.put(1, afer=5)  # type: ignore[call-arg]
queue.set_limit(10)
queue.set_limit(None, key="tenant-7")
queue.set_key_limit(2)
queue.set_rate(1000, per="1m")
queue.set_rate(None, key="tenant-7")
queue.set_key_rate(100, timedelta(minutes=1))
queue.set_weight("tenant-7", 3)
assert_type(queue.limits()[0].task_limit, int | None)
queue.wait("6h")
queue.wait(timeout=timedelta(hours=6))
sqlsem.Worker(queue, threads=4, idle_exit="30s").run()
nightly = coordinator.batch("nightly", ["a", "b"], window="6h")
assert_type(nightly, sqlsem.Batch)
nightly.wait("1h")
coordinator.batch("nightly", ["a"], window="6h", on_fail=print)  # type: ignore[call-arg]
coordinator.admin.set_stale_after("etl", "2h")
coordinator.admin.set_priorities("etl", "5m")
coordinator.admin.set_priorities("etl", None)
assert_type(sqlsem.mutex("a", priority=5), sqlsem.Lock)
