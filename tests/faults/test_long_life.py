"""Very many pairs and tasks, with default settings and without a VACUUM by hand.

Stored data stays within a stated size, nothing gets slower, and the client's memory does not grow. By hand:
``SQLSEM_SOAK_SECONDS=3600 ./test.sh -m soak -n 0 -s tests/faults/test_long_life.py`` does a million of each.
"""

import os
import sqlite3
import statistics
import time
from collections import deque

import psutil
import pytest
from support import slack

import sqlsem
from sqlsem.tasks import Worker

NUMBER = int(os.environ.get("SQLSEM_SOAK_NUMBER", "1000000"))
SECONDS = float(os.environ.get("SQLSEM_SOAK_SECONDS", "20"))  # for the pairs, and for the tasks, of each case
#: Upper bounds in bytes, with indexes: one row of history, and one ended task with its log.
HISTORY_BYTES, TASK_BYTES = 500, 1700
#: Upper bound in megabytes of the rest: the queue, marks, members; on SQLite the write-ahead log.
REST_MEGABYTES = 40
#: Rows of history that may exist before a heartbeat has pruned them.
UNPRUNED = 30_000
#: Tasks that are put at a time. Pairs, and such times, that are compared at the beginning and at the end.
TASKS, COMPARED_PAIRS, COMPARED_TASKS, SLOWER = 500, 2000, 30, 1.2
CLIENT_MEGABYTES = 8


@pytest.fixture
def own(request, database):
    """A database of this test alone."""
    if database.engine == "sqlite":
        return database
    return request.getfixturevalue("make_database")(request.getfixturevalue("postgres_server"))


class Control:
    """An operation of constant cost, measured in turns with the subject, to cancel out changes of the machine."""

    def __init__(self, own):
        if own.engine == "sqlite":
            path = own.url.removeprefix("sqlite:///") + ".control"
            self._connection = sqlite3.connect(path, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = wal")
            self._connection.execute("PRAGMA synchronous = normal")
        else:
            self._connection = own.raw()
        self._connection.execute("CREATE TABLE control (id integer PRIMARY KEY, number integer)")
        self._connection.execute("INSERT INTO control VALUES (1, 0)")

    def __call__(self):
        self._connection.execute("UPDATE control SET number = number + 1 WHERE id = 1")

    def close(self):
        self._connection.close()


class Course:
    """The first and the last steps of many, each with the control's time beside it."""

    def __init__(self, control, compared):
        self._control = control
        self._compared = compared
        self._first, self._last = [], deque(maxlen=compared)
        self._memory = None
        self.done = 0

    def step(self, work, number):
        began = time.perf_counter()
        work()
        between = time.perf_counter()
        self._control()
        seconds = (between - began, time.perf_counter() - between)
        self.done += number
        if len(self._first) < self._compared:
            self._first.append(seconds)
        else:
            self._last.append(seconds)
            if self._memory is None and len(self._last) == self._compared:
                self._memory = psutil.Process().memory_info().rss

    def check(self, name):
        def median(steps):
            return [statistics.median(part) for part in zip(*steps, strict=True)]

        (first, control), (last, control_last) = median(self._first), median(self._last)
        slower = last / first * control / control_last
        grown = (psutil.Process().memory_info().rss - self._memory) / 1e6
        print(f"{self.done} {name}: {slower:.2f} times the beginning's time, {grown:+.1f} MB in the client")
        assert slower <= slack(SLOWER), (name, first, last, control, control_last)
        assert grown <= CLIENT_MEGABYTES, (name, grown)


def sizes(own):
    """Return (rows and bytes of history, rows and bytes of tasks with their log, bytes of the rest)."""
    count = {table: own.rows(f"SELECT count(*) FROM {own.beside(table)}")[0][0] for table in ("history", "task")}
    if own.engine == "sqlite":
        # One file: the size of a part is not known everywhere.
        path = own.url.removeprefix("sqlite:///")
        used = os.path.getsize(path)
        history_bytes = count["history"] * HISTORY_BYTES + count["task"] * TASK_BYTES
        rest = os.path.getsize(f"{path}-wal") if os.path.exists(f"{path}-wal") else 0
        return count, {"all": used, "maximum": history_bytes + 2**20}, rest
    tables = dict(
        own.rows(
            "SELECT relname, pg_total_relation_size(oid) FROM pg_class "
            f"WHERE relkind = 'r' AND relnamespace = '{own.schema}'::regnamespace"
        )
    )
    used = {"history": tables.pop("history"), "task": tables.pop("task") + tables.pop("task_log")}
    return count, used, sum(tables.values())


def call(number):
    """A task."""


@pytest.mark.soak
@pytest.mark.engines("sqlite", "postgresql")
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("kept", [None, 20_000])
def test_costs_stay_flat_over_a_long_life(own, kept):
    if kept is not None:
        own.rows(f"UPDATE {own.beside('setting')} SET value = ? WHERE name = 'history_rows'", str(kept))
    control = Control(own)
    with own.coordinator() as coordinator:
        lock = coordinator.mutex("long life")
        queue = sqlsem.queue("long life", coordinator=coordinator)

        def pair():
            with lock:
                pass

        def tasks():
            queue.put_many([sqlsem.Call(f"{__name__}:call", number) for number in range(TASKS)])
            ends = iter(range(1, TASKS + 1))

            def told(task, outcome, error):
                if outcome is not None and next(ends) == TASKS:
                    worker.stop()  # and not the time when it noticed that the queue is empty

            worker = Worker(queue, on_task=told)
            worker.run()
            assert worker.finished == TASKS

        for name, work, number, compared in (
            ("pairs", pair, 1, COMPARED_PAIRS),
            ("tasks", tasks, TASKS, COMPARED_TASKS),
        ):
            for _ in range(5):
                work()
            course, until = Course(control, compared), time.monotonic() + SECONDS
            while course.done < NUMBER and (time.monotonic() < until or course.done < 2 * compared * number):
                course.step(work, number)
            course.check(name)
        rows, used, rest = sizes(own)
    control.close()
    print(f"{rows}, {used}, the rest {rest}")
    if kept is not None:
        assert rows["history"] <= kept + UNPRUNED
    if own.engine == "sqlite":
        assert used["all"] <= used["maximum"], (rows, used)
    else:
        maximum = max(rows["history"], (kept or 0) + UNPRUNED)  # the previous content
        assert used["history"] <= maximum * HISTORY_BYTES, (rows, used)
        assert used["task"] <= max(1, rows["task"]) * TASK_BYTES, (rows, used)
    assert rest <= REST_MEGABYTES * 1e6, rest
