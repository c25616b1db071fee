"""Measure the cost of reads: of the queue, of tasks, of the history, and of the deadlock search. Nothing here prints.

The rows are put into the tables as the routines write them. Each read is timed a few times; the median counts.
"""

from __future__ import annotations

import contextlib
import io
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import sqlsem
from benchmarks import mysql_queues, queues
from benchmarks.subjects import install
from sqlsem import cli
from sqlsem.engines.base import Session

NAME = "looked at"
TIMES = 5

#: {n} rows of one resource: the first holds, the others wait. {m}: the member.
_QUEUE = """
INSERT INTO {queue}
    ({position}resource_id, requesting_id, access_type, concurrency_limit, member_id, owner, request_uid, granted_at)
SELECT {next}'looked at', 'bench:' || i, 'write', 1, {m}, 'owner ' || i, 'bench.' || i, CASE WHEN i = 1 THEN {now} END
FROM {numbers}
"""
#: {n} finished requests of a hundred resources, one a second until now; each tenth timed out.
_HISTORY = """
INSERT INTO {history} (resource_id, queue_position, requesting_id, access_type, weight, owner, requested_at, granted_at,
                       ended_at, outcome, concurrency_limit, host, pid, program)
SELECT 'resource ' || i % 100, i, 'bench:' || i, 'write', 1, 'owner', {ago}, {ago}, {ago},
       CASE WHEN i % 10 = 0 THEN 'timeout' ELSE 'released' END, 1, 'host', 1, 'program'
FROM {numbers}
"""
#: {n} owners, each of which holds one resource and waits for that of the next one: a chain without a cycle.
_CHAIN = """
INSERT INTO {queue}
    ({position}resource_id, requesting_id, access_type, concurrency_limit, member_id, owner, request_uid, granted_at)
SELECT {next}'chain ' || i, 'bench:' || i, 'write', 1, {m}, 'owner ' || i, 'held.' || i, {now} FROM {numbers};
INSERT INTO {queue}
    ({position}resource_id, requesting_id, access_type, concurrency_limit, member_id, owner, request_uid)
SELECT {next}'chain ' || (i + 1), 'bench:' || i, 'write', 1, {m}, 'owner ' || i, 'wanted.' || i FROM {numbers}
"""
#: {n} owners, each of which holds a resource of its own and waits for the same one.
_STAR = """
INSERT INTO {queue}
    ({position}resource_id, requesting_id, access_type, concurrency_limit, member_id, owner, request_uid, granted_at)
SELECT {next}'star ' || i, 'bench:' || i, 'write', 1, {m}, 'owner ' || i, 'held.' || i, {now} FROM {numbers};
INSERT INTO {queue}
    ({position}resource_id, requesting_id, access_type, concurrency_limit, member_id, owner, request_uid)
SELECT {next}'star', 'bench:' || i, 'write', 1, {m}, 'owner ' || i, 'wanted.' || i FROM {numbers}
"""
_WORDS = {
    "postgresql": {
        "queue": "sqlsem.ProcessControl",
        "history": "sqlsem.history",
        "now": "now()",
        "ago": "now() - (({n} - i) * interval '1 second')",
        "numbers": "generate_series(1, {n}) AS i",
    },
    "sqlite": {
        "queue": "ProcessControl",
        "history": "sqlsem_history",
        "now": "unixepoch('subsec')",
        "ago": "(julianday('now') - 2440587.5) * 86400.0 - ({n} - i)",
        "numbers": "(WITH RECURSIVE r (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r WHERE i < {n}) SELECT i FROM r)",
    },
    "mysql": {
        "queue": "ProcessControl",
        "position": "queue_position, ",  # (a plain INSERT of a member gets none)
        "next": "(SELECT coalesce(max(queue_position), 0) FROM ProcessControl) + i, ",
        "history": "sqlsem_history",
        "now": "UNIX_TIMESTAMP(NOW(6))",
        "ago": "UNIX_TIMESTAMP(NOW(6)) - ({n} - i)",
        "numbers": "(SELECT seq AS i FROM seq_1_to_{n}) AS numbers",
    },
}


def _insert(engine: str, url: str, text: str, number: int, member: int | None = None) -> None:
    words = {"position": "", "next": "", **{name: word.format(n=number) for name, word in _WORDS[engine].items()}}
    statements = text.format(m=member, **words).split(";")
    if engine == "sqlite":
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60)) as connection, connection:
            for statement in statements:
                connection.execute(statement)
    elif engine == "mysql":
        import pymysql

        session = {"init_command": "SET sql_mode = 'PIPES_AS_CONCAT'", "autocommit": True}
        with contextlib.closing(pymysql.connect(**session, **mysql_queues.connection_parameters(url))) as connection:
            for statement in statements:
                connection.cursor().execute(statement)
    else:
        # Autovacuum would do the last one.
        for statement in (*statements, "VACUUM ANALYZE"):
            queues.rows(url, statement)


def _median(look: Callable[[], Any]) -> float:
    """Milliseconds."""
    times = []
    for _ in range(TIMES):
        before = time.perf_counter()
        look()
        times.append(time.perf_counter() - before)
        if sum(times) > 10:  # slow enough to be seen at once
            break
    return 1000 * statistics.median(times)


def _command(url: str, *words: str) -> Callable[[], None]:
    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            cli.main(["--url", url, *words], standalone_mode=False)
        assert shown.getvalue()

    return run


@contextlib.contextmanager
def _prepared(url: str) -> Iterator[tuple[str, sqlsem.Coordinator, Session, int]]:
    """Make a fresh database with a living member."""
    with queues.database(url, "bench_look") as place, sqlsem.connect(place) as coordinator:
        install(place)
        session = coordinator.engine.connect("main")
        try:
            yield place, coordinator, session, session.register_member("bench", 1, "bench")
        finally:
            session.close()


def entries(engine: str, url: str, number: int) -> dict[str, float]:
    """Return the milliseconds of reads of ``number`` rows of one resource."""
    with _prepared(url) as (place, coordinator, _, member):
        _insert(engine, place, _QUEUE, number, member)
        milliseconds = {
            "entries": _median(lambda: coordinator.admin.entries(NAME)),
            "entries of all": _median(coordinator.admin.entries),
            "ls": _median(_command(place, "ls")),
        }
        if engine == "postgresql":
            milliseconds["status"] = _median(lambda: queues.rows(place, "SELECT * FROM sqlsem.status()"))
        return milliseconds


def tasks(engine: str, url: str, number: int) -> dict[str, float]:
    """Return the milliseconds of reads of ``number`` pending tasks."""
    with _prepared(url) as (place, coordinator, _, _):
        queue = sqlsem.queue(NAME, coordinator=coordinator)
        queue.put_many(range(number))
        if engine == "postgresql":
            queues.rows(place, "VACUUM ANALYZE")
        return {
            "tasks": _median(lambda: coordinator.admin.tasks(NAME)),
            "all tasks": _median(lambda: coordinator.admin.tasks(NAME, maximum=number)),
            "state": _median(queue.state),
            "command": _median(_command(place, "tasks", NAME)),
        }


def history(engine: str, url: str, number: int) -> dict[str, float]:
    """Return the milliseconds of a page of 100 of ``number`` finished requests."""
    with _prepared(url) as (place, coordinator, _, _):
        _insert(engine, place, _HISTORY, number)
        return {
            "page": _median(lambda: coordinator.admin.history(maximum=100)),
            "of a resource": _median(lambda: coordinator.admin.history("resource 7", maximum=100)),
            "of none": _median(lambda: coordinator.admin.history("resource", maximum=100)),
            "by outcome": _median(lambda: coordinator.admin.history(maximum=100, outcome="timeout")),
            "of none so ended": _median(lambda: coordinator.admin.history(maximum=100, outcome="reaped")),
            "of a time": _median(
                lambda: coordinator.admin.history(maximum=100, since=number * 0.6, until=number * 0.5)
            ),
        }


def deadlocks(engine: str, url: str, number: int) -> dict[str, float]:
    """Return the milliseconds of the search for deadlocks with ``number`` waiting owners."""
    milliseconds = {}
    for name, text in (("chain", _CHAIN), ("star", _STAR)):
        with _prepared(url) as (place, _, session, member):
            _insert(engine, place, text, number, member)
            milliseconds[name] = _median(lambda session=session, member=member: session.find_deadlock(member))  # type: ignore[misc]
    return milliseconds
