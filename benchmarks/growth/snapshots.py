"""Measure the cost of work while a session keeps an old snapshot open. Nothing here prints.

Every subject repeats one step in a database of its own. The snapshot (or the prepared transaction, or the reader of a
file) is opened after the first few steps, and closed at the end. The cost is the median of the steps that follow a
checkpoint. A subject that gets too slow is stopped when its time is over, so its curve ends earlier. Beside each timed
step, another one is done in a database without any snapshot, so that disturbances of the machine affect both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import sqlsem
from benchmarks import mysql_queues, queues, servers
from benchmarks.subjects import install

#: Timed steps after a checkpoint; steps before the snapshot is opened.
WINDOW, WARM = 200, 100
NAME = "snapshot"
Step = Callable[[], object]
#: Prepares so many steps, in a fresh database.
Work = Callable[[str, int], contextlib.AbstractContextManager[Step]]
#: Keeps an old snapshot open in a database.
Snapshot = Callable[[str], contextlib.AbstractContextManager[None]]


@dataclass
class Point:
    """Medians in microseconds, after so many steps under the snapshot: there, and without one."""

    done: int
    cost: float
    without: float


@dataclass
class Curve:
    """The growth of the cost."""

    points: list[Point] = field(default_factory=list)
    after: float = 0.0  # once the snapshot is gone, relative to the cost without one
    ended: bool = True  # not stopped earlier

    @property
    def growth(self) -> float:
        """Return the ratio of the last to the first, divided by that of the control, which removes the machine's
        drift.
        """
        first, last = self.points[0], self.points[-1]
        return (last.cost / last.without) / (first.cost / first.without)


def checkpoints(maximum: int) -> list[int]:
    """Return 0, and some numbers up to ``most``."""
    steps = [digit * 10**power for power in range(3, 7) for digit in (1, 2, 5)]
    return [0, *(step for step in steps if step < maximum), maximum]


# -- what keeps old rows alive ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def repeatable_read(url: str) -> Iterator[None]:
    """Keep a transaction open that has read something, as a dump or a loading job does."""
    import psycopg

    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM pg_class")
        yield
        connection.rollback()


@contextlib.contextmanager
def prepared(url: str) -> Iterator[None]:
    """Keep a prepared transaction that is never ended."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT pg_current_xact_id()")
        connection.execute("PREPARE TRANSACTION 'bench'")
        yield
        connection.execute("ROLLBACK PREPARED 'bench'")


@contextlib.contextmanager
def standby(url: str) -> Iterator[None]:
    """Keep a reader on a standby, which reports it to the server (hot_standby_feedback)."""
    import psycopg

    with servers.standby(url) as replica:
        database = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        with psycopg.connect(replica, dbname=database) as connection, psycopg.connect(url, autocommit=True) as primary:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("SELECT count(*) FROM pg_class")
            until = time.monotonic() + 60
            while (
                primary.execute("SELECT 1 FROM pg_stat_replication WHERE backend_xmin IS NOT NULL").fetchone() is None
            ):
                if time.monotonic() > until:
                    raise SystemExit("the standby did not tell the server of its reader")
                time.sleep(0.1)
            yield
            connection.rollback()


@contextlib.contextmanager
def reader(url: str) -> Iterator[None]:
    """Keep a reader of the file: later writes stay in the write-ahead log."""
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield
        connection.execute("ROLLBACK")


@contextlib.contextmanager
def consistent_snapshot(url: str) -> Iterator[None]:
    """Keep a transaction of MariaDB open that has read something, as a dump does: the server purges nothing newer."""
    import pymysql

    with contextlib.closing(pymysql.connect(**mysql_queues.connection_parameters(url))) as connection:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            cursor.execute("SELECT count(*) FROM ProcessControl")
        yield
        connection.rollback()


SNAPSHOTS: dict[str, dict[str, Snapshot]] = {
    "postgresql": {"repeatable read": repeatable_read, "prepared": prepared, "standby": standby},
    "sqlite": {"reader": reader},
    "mysql": {"repeatable read": consistent_snapshot},
}


# -- the steps --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pairs(url: str, number: int) -> Iterator[Step]:
    """Acquire and release a mutex."""
    install(url)
    with sqlsem.connect(url) as coordinator:
        lock = coordinator.mutex(NAME)

        def step() -> None:
            lock.acquire()
            lock.release()

        yield step


@contextlib.contextmanager
def tasks(url: str, number: int) -> Iterator[Step]:
    """Claim one task and finish it."""
    install(url)
    with sqlsem.connect(url) as coordinator:
        queue = sqlsem.queue(NAME, coordinator=coordinator)
        queue.put_many(range(number))
        claimed = queue.claim(wait=0)

        def step() -> None:
            with next(claimed):
                pass

        yield step


#: The queue that people write themselves.
_RAW = """
CREATE TABLE raw_queue
    (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text, state text NOT NULL DEFAULT 'new');
CREATE INDEX ON raw_queue (id) WHERE state = 'new';
INSERT INTO raw_queue (body) SELECT 'body' FROM generate_series(1, {number});
ANALYZE raw_queue
"""
_RAW_CLAIM = """
UPDATE raw_queue SET state = 'runs' WHERE id = (
    SELECT id FROM raw_queue WHERE state = 'new' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id
"""
_RAW_END = "UPDATE raw_queue SET state = 'done' WHERE id = %s"


@contextlib.contextmanager
def raw_tasks(url: str, number: int) -> Iterator[Step]:
    """``FOR UPDATE SKIP LOCKED`` with an index of the pending tasks."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        for statement in _RAW.format(number=number).split(";"):
            connection.execute(statement)
        connection.prepare_threshold = 1

        def step() -> None:
            row = connection.execute(_RAW_CLAIM).fetchone()
            connection.execute(_RAW_END, row)

        yield step


def _fill(name: str, url: str, number: int) -> None:
    subject = queues.SUBJECTS["postgresql"][name]
    subject.prepare(url)
    subject.put(url, number)


@contextlib.contextmanager
def procrastinate_tasks(url: str, number: int) -> Iterator[Step]:
    import procrastinate
    from procrastinate.jobs import Status

    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    _fill("Procrastinate", url, number)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
        loop.run_until_complete(app.open_async())
        manager = app.job_manager
        worker = loop.run_until_complete(manager.register_worker())

        async def step() -> None:
            job = await manager.fetch_job(queues=None, worker_id=worker)
            assert job is not None
            await manager.finish_job(job, status=Status.SUCCEEDED, delete_job=False)

        yield lambda: loop.run_until_complete(step())
        loop.run_until_complete(app.close_async())


@contextlib.contextmanager
def pgqueuer_tasks(url: str, number: int) -> Iterator[Step]:
    import asyncpg  # type: ignore[import-untyped]
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.ports.repository import EntrypointExecutionParameter
    from pgqueuer.queries import Queries

    _fill("PgQueuer, batches of 1", url, number)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        connection = loop.run_until_complete(asyncpg.connect(url))
        queries = Queries(AsyncpgDriver(connection))
        manager: Any = uuid.uuid4()
        entrypoints: Any = {"note": EntrypointExecutionParameter(0)}

        async def step() -> None:
            jobs = await queries.dequeue(1, entrypoints, manager, None, timedelta(seconds=30))
            await queries.log_jobs([(job, "successful", None) for job in jobs])
            assert jobs

        yield lambda: loop.run_until_complete(step())
        loop.run_until_complete(connection.close())


WORK: dict[str, dict[str, Work]] = {
    "postgresql": {
        "sqlsem": tasks,
        "SKIP LOCKED": raw_tasks,
        "Procrastinate": procrastinate_tasks,
        "PgQueuer": pgqueuer_tasks,
    },
    "sqlite": {"sqlsem": tasks},
    "mysql": {"sqlsem": tasks},
}
PACKAGES = {"Procrastinate": "procrastinate", "PgQueuer": "pgqueuer"}


def subjects(engine: str) -> dict[str, Work]:
    """Return the subjects whose tasks can be compared: the installed ones."""
    packages = {subject.package for subject in queues.subjects(engine).values()}
    return {name: work for name, work in WORK[engine].items() if name not in PACKAGES or PACKAGES[name] in packages}


def curve(
    url: str,
    work: Work,
    snapshot: Snapshot,
    maximum: int,
    seconds: float,
) -> Curve:
    """Measure the cost of a step, up to ``most`` of them under the snapshot, for so many seconds at most."""
    result, marks = Curve(), checkpoints(maximum)
    spare = WARM + (len(marks) + 1) * WINDOW
    with contextlib.ExitStack() as stack:
        # A standby reports snapshots of all databases of its server.
        beside = stack.enter_context(servers.postgres()) if snapshot is standby else url
        place, other = (
            stack.enter_context(queues.database(server_url, f"bench_{name}"))
            for server_url, name in ((url, "snapshot"), (beside, "without"))
        )
        steps = stack.enter_context(work(place, maximum + spare)), stack.enter_context(work(other, spare))
        for _ in range(WARM):
            for step in steps:
                step()
        with snapshot(place):
            _follow(result, steps, marks, seconds)
        cost, without = _medians(steps)
        result.after = cost / without
    return result


def _follow(result: Curve, steps: tuple[Step, Step], marks: Sequence[int], seconds: float) -> None:
    done, until = 0, time.monotonic() + seconds
    for mark in marks:
        while done < mark and time.monotonic() < until:
            steps[0]()
            done += 1
        result.points.append(Point(done, *_medians(steps)))
        done += WINDOW
        if time.monotonic() > until:
            result.ended = mark == marks[-1]
            return


def _medians(steps: tuple[Step, Step]) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WINDOW):
        for step, taken in zip(steps, times, strict=True):
            before = time.perf_counter()
            step()
            taken.append(time.perf_counter() - before)
    return 1e6 * statistics.median(times[0]), 1e6 * statistics.median(times[1])
