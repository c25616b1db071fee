"""Measure work queues: how fast sqlsem and its peers do many empty tasks, and what a claim costs in a large table.

Every subject has a database of its own for every measurement, and its tasks are put before the clock starts. Workers
are processes with one task at a time, or one process with many at a time. They begin together. The clock stops when the
last task is done by the subject's own tables, not when the workers have noticed that nothing is left. Each task records
in memory that it was run, so that none may be lost and none run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import itertools
import logging
import multiprocessing
import random
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlsem
from benchmarks import measure, mysql_queues
from benchmarks.subjects import install
from sqlsem.tasks import Worker, claim_buffer
from sqlsem.tasks import worker as worker_module

QUEUE = "bench"
#: The tasks that this process has run.
ran: list[int] = []


def note(number: int) -> None:
    """Count a task."""
    ran.append(number)


@dataclass(frozen=True)
class Subject:
    """A work queue under test."""

    package: str
    #: Creates the tables, unless the queue does so itself.
    prepare: Callable[[str], None]
    #: Puts so many tasks in the fastest way.
    put: Callable[[str, int], None]
    #: Given (url, tasks at a time, gate): passes the gate when all is ready, then works until nothing is left.
    work: Callable[[str, int, Callable[[], None]], None]
    #: The number of tasks done, once each, by its tables; and when the last was done (None if the tables do not have
    #: it).
    done: Callable[[str], tuple[int, float | None]]
    processes: bool = True  # several may share the work
    at_once: bool = True  # the number of parallel tasks of a process can be set


def rows(url: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    if url.startswith("mysql"):
        return mysql_queues.rows(url, statement, *parameters)
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def database(url: str, name: str) -> Iterator[str]:
    """Return the URL of a fresh database: on that server, or in the folder of that file."""
    if url.startswith("sqlite"):
        with tempfile.TemporaryDirectory(dir=Path(url.removeprefix("sqlite:///")).parent) as folder:
            yield f"sqlite:///{folder}/{name}.db"
        return
    rows(url, f"CREATE DATABASE {name}")
    try:
        yield urlsplit(url)._replace(path=f"/{name}").geturl()
    finally:
        rows(url, f"DROP DATABASE {name}" + (" WITH (FORCE)" if url.startswith("postgresql") else ""))


# -- sqlsem -----------------------------------------------------------------------------------------------------------


def _put(url: str, number: int) -> None:
    with closing(sqlsem.connect(url)) as coordinator:
        bodies = [sqlsem.Call(f"{__name__}:note", index) for index in range(number)]
        sqlsem.queue(QUEUE, coordinator=coordinator).put_many(bodies)


def _work(maximum: int = claim_buffer.MAX_GROUP_SIZE) -> Callable[[str, int, Callable[[], None]], None]:
    """Work in groups of as many tasks as are short enough, up to ``most``."""

    def work(url: str, at_once: int, gate: Callable[[], None]) -> None:
        worker_module.MAX_GROUP_SIZE = maximum  # type: ignore[attr-defined]  # in a process that does nothing else
        with closing(sqlsem.connect(url)) as coordinator:
            queue = sqlsem.queue(QUEUE, coordinator=coordinator)
            queue.state()  # connects
            worker = Worker(queue, threads=at_once, idle_exit=0)
            gate()
            worker.run()

    return work


def _done(url: str) -> tuple[int, float | None]:
    if url.startswith("sqlite"):
        statement = "SELECT count(*), max(ended_at) FROM {} WHERE status = 'finished'"
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            number, ended = connection.execute(statement.format("sqlsem_task")).fetchone()
    elif url.startswith("mysql"):
        ((number, ended),) = rows(url, "SELECT count(*), max(ended_at) FROM sqlsem_task WHERE status = 'finished'")
    else:
        statement = "SELECT count(*), extract(epoch FROM max(ended_at)) FROM {} WHERE status = 'finished'"
        ((number, ended),) = rows(url, statement.format("sqlsem.task"))
    return number, float(ended)


# -- peers on PostgreSQL ----------------------------------------------------------------------------------------------


def _procrastinate(url: str) -> Any:
    import procrastinate

    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(queue=QUEUE, name="note")
    async def _note(number: int) -> None:
        note(number)

    return app


def _procrastinate_prepare(url: str) -> None:
    async def prepare() -> None:
        app = _procrastinate(url)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    asyncio.run(prepare())


def _procrastinate_put(url: str, number: int) -> None:
    async def put() -> None:
        app = _procrastinate(url)
        async with app.open_async():
            for start in range(0, number, 1000):
                numbers = range(start, min(start + 1000, number))
                await app.tasks["note"].batch_defer_async(*({"number": number} for number in numbers))

    asyncio.run(put())


def _procrastinate_work(url: str, at_once: int, gate: Callable[[], None]) -> None:
    async def work() -> None:
        app = _procrastinate(url)
        async with app.open_async():
            await app.check_connection_async()
            gate()
            await app.run_worker_async(queues=[QUEUE], concurrency=at_once, wait=False, install_signal_handlers=False)

    asyncio.run(work())


def _procrastinate_done(url: str) -> tuple[int, float | None]:
    ((number,),) = rows(url, "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded' AND attempts = 1")
    ((ended,),) = rows(url, "SELECT extract(epoch FROM max(at)) FROM procrastinate_events WHERE type = 'succeeded'")
    return number, float(ended)


async def _pgqueuer(url: str) -> tuple[Any, Any]:
    import asyncpg  # type: ignore[import-untyped]
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver

    logging.getLogger("pgqueuer").setLevel(logging.ERROR)
    connection = await asyncpg.connect(url)
    manager = PgQueuer(AsyncpgDriver(connection))

    @manager.entrypoint("note")
    async def _note(job: Any) -> None:
        note(int(job.payload))

    return connection, manager


def _pgqueuer_prepare(url: str) -> None:
    async def prepare() -> None:
        from pgqueuer.queries import Queries

        connection, manager = await _pgqueuer(url)
        queries = Queries(manager.connection)
        await queries.install()
        await queries.optimize_autovacuum()  # `pgq autovac`
        await connection.close()

    asyncio.run(prepare())


def _pgqueuer_put(url: str, number: int) -> None:
    async def put() -> None:
        from pgqueuer.queries import Queries

        connection, manager = await _pgqueuer(url)
        queries = Queries(manager.connection)
        for start in range(0, number, 1000):
            numbers = range(start, min(start + 1000, number))
            await queries.enqueue(
                ["note"] * len(numbers), [str(number).encode() for number in numbers], [0] * len(numbers)
            )
        await connection.close()

    asyncio.run(put())


def _pgqueuer_work(batch_size: int) -> Callable[[str, int, Callable[[], None]], None]:
    def start(url: str, _: int, gate: Callable[[], None]) -> None:
        async def work() -> None:
            from pgqueuer.types import QueueExecutionMode

            connection, manager = await _pgqueuer(url)
            gate()
            await manager.run(batch_size=batch_size, mode=QueueExecutionMode.drain)
            await connection.close()

        asyncio.run(work())

    return start


def _pgqueuer_done(url: str) -> tuple[int, float | None]:
    ((number, ended),) = rows(
        url,
        "SELECT count(DISTINCT job_id), extract(epoch FROM max(created)) FROM pgqueuer_log WHERE status = 'successful'",
    )
    return number, float(ended)


# -- peers on SQLite --------------------------------------------------------------------------------------------------


def _beside(url: str, suffix: str) -> str:
    return url.removeprefix("sqlite:///") + suffix


def _litequeue(url: str) -> Any:
    from litequeue import LiteQueue  # type: ignore[import-untyped]

    return LiteQueue(_beside(url, ".litequeue"), queue_name=QUEUE, timeout=60.0)


def _litequeue_put(url: str, number: int) -> None:
    queue = _litequeue(url)
    with queue.transaction():
        for index in range(number):
            queue.put(str(index))
    queue.close()


def _litequeue_work(url: str, at_once: int, gate: Callable[[], None]) -> None:
    queues = iter([_litequeue(url) for _ in range(at_once)])  # a connection each

    def work() -> None:
        queue = next(queues)
        while (message := queue.pop()) is not None:
            note(int(message.data))
            queue.done(message.message_id)

    gate()
    mysql_queues.in_threads(at_once, work)


def _litequeue_done(url: str) -> tuple[int, float | None]:
    with closing(sqlite3.connect(_beside(url, ".litequeue"))) as connection:
        statement = f"SELECT count(*), max(done_time) / 1e9 FROM [{QUEUE}] WHERE status = 2"
        number, ended = connection.execute(statement).fetchone()
    return number, ended


def _persist_queue(url: str) -> Any:
    from persistqueue import SQLiteAckQueue

    return SQLiteAckQueue(_beside(url, ".persist-queue"), multithreading=True)


def _persist_queue_put(url: str, number: int) -> None:
    queue = _persist_queue(url)
    for index in range(number):
        queue.put(index)
    queue.close()


def _persist_queue_work(url: str, at_once: int, gate: Callable[[], None]) -> None:
    from persistqueue import Empty

    queue = _persist_queue(url)

    def work() -> None:
        last: dict[str, Any] = {}
        while True:
            try:
                # From the last one on: otherwise each search would pass all done tasks.
                item = queue.get(block=False, raw=True, **last)
            except Empty:
                return
            note(item["data"])
            queue.ack(id=item["pqid"])
            last = {"id": item["pqid"], "next_in_order": True}

    gate()
    mysql_queues.in_threads(at_once, work)
    queue.close()


def _persist_queue_done(url: str) -> tuple[int, float | None]:
    queue = _persist_queue(url)
    number = queue.acked_count()
    queue.close()
    return number, None


def _nothing(url: str) -> None:
    pass


_OURS = Subject("sqlsem", install, _put, _work(), _done)
#: The batch sizes that are compared.
BATCHES = (1, 10, 100)
_FIXED = {
    f"sqlsem, batches of {maximum}": Subject("sqlsem", install, _put, _work(maximum), _done) for maximum in BATCHES
}
#: Engine → subjects; the first is ours.
SUBJECTS: dict[str, dict[str, Subject]] = {
    "postgresql": {
        "sqlsem": _OURS,
        **_FIXED,
        "Procrastinate": Subject(
            *("procrastinate", _procrastinate_prepare, _procrastinate_put, _procrastinate_work, _procrastinate_done)
        ),
        **{
            f"PgQueuer, batches of {size}": Subject(
                *("pgqueuer", _pgqueuer_prepare, _pgqueuer_put, _pgqueuer_work(size), _pgqueuer_done),
                at_once=False,  # runs whatever it has claimed at once
            )
            for size in BATCHES
        },
    },
    "sqlite": {
        "sqlsem": _OURS,
        "sqlsem, batches of 1": _FIXED["sqlsem, batches of 1"],
        "litequeue": Subject("litequeue", _nothing, _litequeue_put, _litequeue_work, _litequeue_done),
        "persist-queue": Subject(
            *("persistqueue", _nothing, _persist_queue_put, _persist_queue_work, _persist_queue_done),
            processes=False,  # its claims are atomic among the threads of one process only
        ),
    },
    "mysql": {
        "sqlsem": _OURS,
        **_FIXED,
        "SKIP LOCKED": Subject(
            *("pymysql", mysql_queues.raw_prepare, mysql_queues.raw_put, mysql_queues.raw_work, mysql_queues.raw_done)
        ),
        "huey": Subject(
            *("huey", mysql_queues.huey_prepare, mysql_queues.huey_put),
            *(mysql_queues.huey_work, mysql_queues.huey_done),
        ),
        "firm-queue, batches of 10": Subject(
            *("firm", mysql_queues.firm_prepare, mysql_queues.firm_put),
            *(mysql_queues.firm_work, mysql_queues.firm_done),
        ),
        "django-tasks-db": Subject(
            *("django_tasks_db", mysql_queues.django_prepare, mysql_queues.django_put),
            *(mysql_queues.django_work, mysql_queues.django_done),
            at_once=False,  # a worker is a process
        ),
    },
}


def ours(name: str) -> str:
    """Return the sqlsem subject to compare with: with the same batch size, if there is one."""
    _, batches, size = name.partition(", batches of ")
    if batches:
        return f"sqlsem, batches of {size}"
    return "sqlsem" if name == "persist-queue" else "sqlsem, batches of 1"


def subjects(engine: str) -> dict[str, Subject]:
    """Return the installed subjects."""
    available = {
        name: subject
        for name, subject in SUBJECTS[engine].items()
        if importlib.util.find_spec(subject.package) is not None
    }
    if importlib.util.find_spec("asyncpg") is None:
        available = {name: subject for name, subject in available.items() if subject.package != "pgqueuer"}
    return available


#: Package → the name by which it is installed, where that differs.
DISTRIBUTIONS = {"persistqueue": "persist-queue", "firm": "firm-queue", "django_tasks_db": "django-tasks-db"}


def version(subject: Subject) -> str:
    if subject.package == "sqlsem":
        return sqlsem.__version__
    return importlib.metadata.version(DISTRIBUTIONS.get(subject.package, subject.package))


# -- tasks a second ---------------------------------------------------------------------------------------------------


def _child(engine: str, name: str, url: str, at_once: int, gate: Any, results: Any) -> None:
    began: list[float] = []

    def pass_gate() -> None:
        gate.wait(120)
        began.append(time.time())

    try:
        SUBJECTS[engine][name].work(url, at_once, pass_gate)
    except BaseException:
        gate.abort()
        results.put(None)
        raise
    results.put((began[0], time.time(), ran))


def rate(engine: str, name: str, url: str, number: int, workers: int, at_once: int) -> float:
    """Return the tasks a second of ``workers`` processes with ``at_once`` tasks at a time each."""
    subject = SUBJECTS[engine][name]
    with database(url, "bench_tasks") as place:
        subject.prepare(place)
        subject.put(place, number)
        if engine == "postgresql":  # autovacuum would do it some time; so that no subject pays for another's writes
            for statement in ("ANALYZE", "CHECKPOINT"):
                rows(place, statement)
        context = multiprocessing.get_context("spawn")
        gate, results = context.Barrier(workers), context.Queue()
        arguments = (engine, name, place, at_once, gate, results)
        children = [context.Process(target=_child, args=arguments) for _ in range(workers)]
        for child in children:
            child.start()
        outcomes = [results.get(timeout=1800) for _ in children]
        for child in children:
            child.join()
        if None in outcomes:
            raise RuntimeError(f"A worker of {name} failed; see above")
        done, ended = subject.done(place)
    if sorted(itertools.chain.from_iterable(numbers for _, _, numbers in outcomes)) != list(range(number)):
        raise RuntimeError(f"{name} did not run every task exactly once")
    if done != number:
        raise RuntimeError(f"{name} says that {done} of {number} tasks are done")
    if ended is None:
        ended = max(end for _, end, _ in outcomes)
    return number / float(ended - min(begin for begin, _, _ in outcomes))


# -- putting, and idle workers ----------------------------------------------------------------------------------------


def put_seconds(engine: str, name: str, url: str, number: int) -> float:
    """Return the seconds to put so many tasks, including connecting."""
    subject = SUBJECTS[engine][name]
    with database(url, "bench_put") as place:
        subject.prepare(place)
        began = time.perf_counter()
        subject.put(place, number)
        return time.perf_counter() - began


def note_delay(put: int) -> None:
    """Record the delay of a task that was put at this time. Each task calls this."""
    ran.append(time.monotonic_ns() - put)


def _idle_child(url: str, threads: int, ready: Any, counted: Any, stop: Any, results: Any) -> None:
    with closing(sqlsem.connect(url)) as coordinator, measure.counting_calls(coordinator.engine.session_class) as count:
        queue = sqlsem.queue(QUEUE, coordinator=coordinator)
        queue.state()
        worker = Worker(queue, threads=threads)
        thread = threading.Thread(target=worker.run)
        thread.start()
        ready.wait()
        counted.wait()
        before = count[0]
        counted.wait()
        results.put(count[0] - before)
        stop.wait()
        worker.stop()
        thread.join()
        results.put(ran)


@dataclass(frozen=True)
class Idle:
    """The cost of idle workers, and how long a task of another process waits for one of them."""

    statements: float  # a second and process
    p50: float  # ms, from the call of put to the begin of the task
    p99: float


def idle(engine: str, url: str, processes: int, threads: int, seconds: float, number: int) -> Idle:
    """Run workers in so many processes without tasks; then ``number`` tasks, one now and then."""
    context = measure.processes
    with database(url, "bench_idle") as place:
        install(place)
        ready, counted = context.Barrier(processes + 1), context.Barrier(processes + 1)
        stop, results = context.Event(), context.Queue()
        arguments = (place, threads, ready, counted, stop, results)
        children = [context.Process(target=_idle_child, args=arguments, daemon=True) for _ in range(processes)]
        for child in children:
            child.start()
        ready.wait(60)
        time.sleep(3)  # until they are idle
        before = measure.transactions(engine, place)
        counted.wait(60)
        time.sleep(seconds)
        counted.wait(60)
        after = measure.transactions(engine, place)
        calls = sum(results.get(timeout=60) for _ in children)
        with sqlsem.connect(place) as coordinator:
            queue = sqlsem.queue(QUEUE, coordinator=coordinator)
            for _ in range(number):
                time.sleep(random.uniform(0.02, 0.3))
                queue.put(sqlsem.Call(f"{__name__}:note_delay", time.monotonic_ns()))
            queue.wait(timeout=60)
        stop.set()
        delays = [delay / 1e6 for _ in children for delay in results.get(timeout=60)]
        for child in children:
            child.join()
    p99 = statistics.quantiles(delays, n=100)[-1]
    statements = (calls if before is None else after - before) / seconds / processes
    return Idle(statements, statistics.median(delays), p99)


# -- the cost of a claim ----------------------------------------------------------------------------------------------

#: As put_many and workers leave them: ended tasks first, because they were put before.
_COPIES = {
    "sqlite": """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {number})
INSERT INTO sqlsem_task
    (queue_name, task_order, kind, body, status, is_open, attempt, put_uid, owner, claimed_at, ended_at)
SELECT 'bench', 0, 'json', '1', '{status}', {is_open}, 1 - {is_open}, '{status}.' || i, 'bench-1',
       CASE WHEN NOT {is_open} THEN 1.7e9 + i / 1000.0 END, CASE WHEN NOT {is_open} THEN 1.7e9 + i / 1000.0 END
FROM n WHERE i <= {number}
""",
    "postgresql": """
INSERT INTO sqlsem.task
    (queue_name, task_order, kind, body, status, is_open, attempt, put_uid, owner, claimed_at, ended_at)
SELECT 'bench', 0, 'json', '1', '{status}', {is_open} = 1, 1 - {is_open}, '{status}.' || i, 'bench-1',
       CASE WHEN {is_open} = 0 THEN now() - interval '1 day' + i * interval '1 ms' END,
       CASE WHEN {is_open} = 0 THEN now() - interval '1 day' + i * interval '1 ms' END
FROM generate_series(1, {number}) AS i
""",
}
_LOG = """
INSERT INTO {task}_log (task_id, attempt, outcome, member_id, owner, host, pid, started_at)
SELECT task_id, attempt, status, 1, owner, 'host', 1, claimed_at FROM {task} WHERE status = 'finished'
"""


def _populate(engine: str, url: str, pending: int, finished: int) -> None:
    task = "sqlsem_task" if engine == "sqlite" else "sqlsem.task"
    statements = [
        _COPIES[engine].format(number=number, status=status, is_open=is_open)
        for number, status, is_open in ((finished, "finished", 0), (pending, "pending", 1))
        if number
    ]
    statements.append(_LOG.format(task=task))
    if engine == "sqlite":
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60)) as connection, connection:
            for statement in statements:
                connection.execute(statement)
    else:
        # Autovacuum would do the last one.
        for statement in (*statements, f"VACUUM ANALYZE {task}, {task}_log", "CHECKPOINT"):
            rows(url, statement)


@dataclass(frozen=True)
class Cost:
    """Microseconds, medians: of a claim and its end, in a small table and in a large one."""

    few: float
    many: float


def claim_cost(engine: str, url: str, pending: int, finished: int, claims: int) -> Cost:
    """Claim by turns from a queue of 1,000 pending tasks and from one with ``pending`` and ``finished`` ones."""
    times: list[list[float]] = [[], []]
    with contextlib.ExitStack() as stack:
        claimed = []
        for name, sizes in (("few", (1000, 0)), ("many", (pending, finished))):
            place = stack.enter_context(database(url, f"bench_{name}"))
            install(place)
            _populate(engine, place, *sizes)
            coordinator = stack.enter_context(closing(sqlsem.connect(place)))
            claimed.append(sqlsem.queue(QUEUE, coordinator=coordinator).claim(wait=0))
        for number in range(min(claims, 950)):
            for taken, each in zip(times, claimed, strict=True):
                before = time.perf_counter()
                with next(each):
                    pass
                if number >= 20:  # until statements are prepared and pages read
                    taken.append(time.perf_counter() - before)
    return Cost(*(1e6 * statistics.median(taken) for taken in times))
