"""The work queue on SQL Server, as far as its calls are no mere calls of routines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlsem.engines.mssql.connection import CANCEL_SECONDS, SqlServerConnection
from sqlsem.util import runtime
from sqlsem.values.errors import TaskFailed, Unavailable
from sqlsem.values.tasks import Claimed, End, NewTask, TaskEntry, TaskLock

#: The number of tasks put in one round trip: each has 16 parameters, and a statement at most 2,100.
TASKS_A_TRIP = 100


class SqlServerTasks(SqlServerConnection):
    """Tasks, and the SQL of tasks."""

    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        asked = [
            (
                *(queue, f"{uid}.{number}", task.kind, task.body, task.order, round(task.after * 1000)),
                *(task.max_attempts, round(task.backoff * 1000), task.on_failure, task.note, task.unique, task.replace),
                *(None if task.time_limit is None else max(1, round(task.time_limit * 1000)), task.key, task.priority),
                json.dumps([lock.as_option() for lock in task.locks]) if task.locks else None,
            )
            for number, task in enumerate(tasks, 1)
        ]
        if len(asked) == 1:
            return [int(self.rows("put_task", *asked[0])[0][0])]
        # Not as JSON in one parameter: other servers that speak T-SQL misread quotation marks in strings.
        found: list[int] = []
        self.rows("begin")
        try:
            for start in range(0, len(asked), TASKS_A_TRIP):
                some = asked[start : start + TASKS_A_TRIP]
                text = "\n".join([self.queries["put_task"]] * len(some))
                rows = self.ask("put_tasks", text, [value for row in some for value in row])
                found += [int(row[0]) for row in rows]
            self.rows("commit")
        except BaseException:
            with contextlib.suppress(Unavailable):  # lost, and the transaction with it
                self.rows("rollback")
            raise
        return found

    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        rows = self.rows("claim_task", member_id, queue, owner, uid, again)
        return Claimed(*rows[0]) if rows else None

    def claim_blocked(
        self, member_id: int, queue: str, owner: str, uid: str, again: bool, requesting_id: str, row_owner: str
    ) -> Claimed | None:
        rows = self.rows("claim_blocked", member_id, queue, owner, uid, again, requesting_id, row_owner)
        return Claimed(*(*rows[0][:8], tuple(_lock(*row[8:]) for row in rows))) if rows else None

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, maximum: int
    ) -> tuple[list[str | None], list[Claimed]]:
        # One batch with a statement for each: as JSON in one parameter, other servers that speak T-SQL would misread
        # results and errors with quotation marks.
        statuses: list[str | None] = []
        for start in range(0, len(ends), TASKS_A_TRIP):
            some = ends[start : start + TASKS_A_TRIP]
            text = [self.queries["end_task"]] * len(some)
            values: list[Any] = []
            for end in some:
                values += [member_id, end.task_id, end.attempt, end.outcome, end.result, end.error]
            last = start + len(some) == len(ends)
            if last and maximum:
                text.append(self.queries["claim_tasks"])
                values += [member_id, queue, owner, uid, int(again), maximum]
            rows = self.ask("next_tasks", "\n".join(text), values)
            statuses += [row[0] for row in rows[: len(some)]]
            if last:
                return statuses, [Claimed(*row) for row in rows[len(some) :]]
        claimed = self.rows("claim_tasks", member_id, queue, owner, uid, again, maximum) if maximum else []
        return [], [Claimed(*row) for row in claimed]

    def list_tasks(self, queue: str | None, status: str | None, maximum: int, skip: int = 0) -> list[TaskEntry]:
        rows = self.rows("show_tasks", queue, status, maximum, skip)
        asking = [row[0] for row in rows if row[-1] is not None]
        locks: dict[int, list[TaskLock]] = {}
        for task_id, *lock in self.rows("show_task_locks", asking) if asking else ():
            locks.setdefault(task_id, []).append(_lock(*lock))
        return [TaskEntry(*(*row[:-1], tuple(locks.get(row[0], ())))) for row in rows]

    def set_schedule(self, name: str, what: str, due: datetime | None) -> bool:
        return bool(self.value("set_schedule", name, what, due) == 0)

    def execute(self, text: str) -> str | None:
        count = -1
        self.rows("execute")
        try:
            cursor = self.running = self.latest = self.connection.cursor()
            with contextlib.suppress(Exception):  # not every driver has it
                cursor.noscan = True  # no ODBC escapes in braces
            try:
                cursor.execute(text)  # as a batch: in a scope of its own the SQL could not end the transaction
                while True:
                    if cursor.rowcount >= 0:
                        count = max(count, 0) + cursor.rowcount
                    if not cursor.nextset():
                        break
            finally:
                self.running = None
        except Exception as exc:
            state, number, words = self.server_details(exc)
            # A driver's error for a cancelled statement depends on its progress; the connection is usable.
            stopped = state == "HY008" or (self.stopped is self.latest and not self.lost)
            if not stopped:
                meaning = self.meaning(state, number, words)
                if self.lost:
                    raise meaning from exc
            with contextlib.suppress(Unavailable):  # lost, and the transaction with it
                self.rows("rollback")
            if stopped:
                raise TaskFailed("The SQL was cancelled") from exc
            # The error is the task's own, so sqlsem's advice for its own statements is left out.
            raise TaskFailed(f"The SQL failed: {self.engine.clean(words)}") from exc
        if self.stopped is cursor:  # the driver may report no error, though the server stopped in the middle
            self.rows("rollback")
            raise TaskFailed("The SQL was cancelled")
        if self.value("executed") > 1:
            raise TaskFailed("The SQL left a transaction open, which was rolled back; commit at its end")
        return None if count < 0 else f"{count} row{'' if count == 1 else 's'}"

    def cancel_running(self) -> None:
        running = self.running
        if running is None:
            return

        def insist() -> None:
            if self.running is running:
                self.interrupt()

        # Cancel on the server first, as it may notice the closed socket late; the server may ignore the cancel.
        runtime.current().timer(CANCEL_SECONDS, insist).start()
        with self.cancelling, contextlib.suppress(Exception):
            if self.running is running:
                self.stopped = running
                running.cancel()


def _lock(resource: str, position: int | None, access: str, limit: int | None, weight: int) -> TaskLock:
    return TaskLock(resource, access, limit, weight, position)
