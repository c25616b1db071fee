"""The sessions of SQL Server: the calls that are no mere calls of routines."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlsem import sql
from sqlsem.engines import borrowed
from sqlsem.engines.answers import name_sessions
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.engines.installed import setting_number
from sqlsem.engines.mssql.connection import CANCEL_SECONDS, LONGEST_WAIT_SECONDS, SqlServerConnection
from sqlsem.engines.mssql.doctor import SqlServerDoctor
from sqlsem.engines.mssql.odbc import with_nulls
from sqlsem.engines.protocol import Check, Plan
from sqlsem.util import late, runtime
from sqlsem.values.batches import BatchEntry
from sqlsem.values.deadlocks import Found
from sqlsem.values.errors import ConfigurationError, SqlsemError, TaskFailed, Unavailable
from sqlsem.values.locks import Heartbeat, Ticket
from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest
from sqlsem.values.tasks import Claimed, End, NewTask, QueueCounts, TaskEntry, TaskLock

if TYPE_CHECKING:
    from sqlsem.engines.mssql.engine import SqlServerEngine
    from sqlsem.insight.overview import Overview

#: The first and the longest pause between two polls, as in `poll_pause`, where the database has no lock to wait for (a
#: lease, a paused resource).
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.04, 0.8
#: The first and the longest pause of a wait that finds no slot on the server (setting ``max_server_waiters``).
FIRST_ELSEWHERE_SECONDS, LONGEST_ELSEWHERE_SECONDS = 0.25, 1.0
#: The number of tasks put in one round trip: each has 16 parameters, and a statement at most 2,100.
TASKS_A_TRIP = 100
#: Seconds after which an installation is not retried.
INSTALL_SECONDS = 60.0
#: Seconds between two attempts: first and at most. In between the installation blocks no other session.
FIRST_INSTALL_PAUSE_SECONDS, LONGEST_INSTALL_PAUSE_SECONDS = 0.25, 5.0
_GO = re.compile(r"^[ \t]*GO[ \t]*\r?$", re.MULTILINE | re.IGNORECASE)


class SqlServerSession(SqlServerConnection):
    """One connection with all capabilities."""

    # -- locks, rates and displays --------------------------------------------------------------------------------

    def heartbeat(self, member_id: int) -> Heartbeat:
        rows = self.rows("heartbeat", member_id)
        if not rows or not rows[0][0]:
            return Heartbeat(False)
        return Heartbeat(
            True,
            frozenset(int(row[1]) for row in rows if row[1] is not None),
            frozenset(int(row[1]) for row in rows if row[1] is not None and row[2]),
        )

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("wait", (ticket.resource, ticket.position), timeout, wakeup)

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        rows = self.rows("poll_waiters", member_id, [ticket.position for ticket in tickets]) if tickets else []
        return {int(position): True if granted else None for position, granted in rows}

    def _wait(self, name: str, key: tuple[Any, ...], timeout: float, wakeup: threading.Event) -> bool | None:
        deadline = time.monotonic() + min(timeout, LONGEST_WAIT_SECONDS)
        pause, elsewhere = FIRST_PAUSE_SECONDS, FIRST_ELSEWHERE_SECONDS
        while True:
            left = max(0.0, deadline - time.monotonic())
            code = self.value(name, *key, int(left * 1000))
            if code == 0:
                return True
            if code == -2:
                return None
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if code == 2:  # the server has no free waiting slot: wait in the client
                if wakeup.wait(min(left, random.uniform(0.8, 1.2) * elsewhere)):
                    wakeup.clear()
                elsewhere = min(elsewhere * 1.5, LONGEST_ELSEWHERE_SECONDS)
            elif code in (-1, -3):  # no lock to wait for, or not with this session
                if wakeup.wait(min(pause, left)):
                    wakeup.clear()
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def find_deadlock(self, member_id: int) -> Found | None:
        return Found.of_rows(self.rows("find_deadlock", member_id))

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("upgrade", (ticket.resource, ticket.position, ticket.requesting_id), timeout, wakeup)

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        windows = json.dumps([{"limit": window.limit, "ms": window.ms} for window in request.windows])
        row = (None, None) if ticket is None else (ticket.position, ticket.requesting_id)
        code, wait_ms, taken_ms = self.row("take_rate", request.resource, request.cost, windows, request.burst, *row)
        return RateAnswer.of_row(int(code), wait_ms, () if taken_ms is None else (taken_ms,))

    def overview(self) -> Overview:
        with late.importing:
            from sqlsem.insight.overview import MemberEntry, Overview
        entries = self.entries(None)
        found: dict[str, list[list[Any]]] = {}
        for what, *row in self.rows("overview"):
            found.setdefault(what, []).append(row)
        return Overview.of_rows(
            found["clock"][0][0],
            entries,
            found.get("setting", ()),
            [MemberEntry(*row) for row in found.get("member", ())],
            [QueueCounts(*row) for row in found.get("queue", ())],
            BatchEntry.of_rows(found.get("batch", ())),
            found.get("hold", ()),
            [RateEntry.of_row(*row) for row in found.get("rate", ())],
        )

    def age(self, seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1000)

    def part_list(self, parts: Sequence[str]) -> str:
        return "\n".join(parts)  # names contain no control characters

    # -- tasks, and the SQL of tasks --------------------------------------------------------------------------------

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
                values += [member_id, *end.stored]
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

    # -- the scripts of the tables, and guarded tables --------------------------------------------------------------

    def change_guard(self, name: str, table: str, *parameters: str) -> int:
        try:
            return int(self.value(name, table, *parameters))
        except (Busy, Disconnected):
            raise
        except Unavailable as exc:  # the server's answer for this table or this login: a retry cannot change it
            raise ConfigurationError(str(exc)) from exc

    def install(self, plan: Plan) -> None:
        until = runtime.monotonic() + INSTALL_SECONDS
        pause = FIRST_INSTALL_PAUSE_SECONDS
        never = runtime.event()
        while True:
            try:
                return self._install(plan)
            except Busy as exc:
                blockers = self._blockers()
                if runtime.monotonic() + pause >= until:
                    raise Unavailable(
                        f"{self.engine.label}: others kept the sqlsem tables for {INSTALL_SECONDS:g} s; nothing was "
                        f"changed: {blockers}; try again when that has ended, or end it (KILL)"
                    ) from exc
            never.wait(pause)
            pause = min(2 * pause, LONGEST_INSTALL_PAUSE_SECONDS)

    def _install(self, plan: Plan) -> None:
        """Install in one transaction. Raises `Busy`, without any change, if a lock was not granted in time."""
        self.rows("begin")
        try:
            self._take_install_lock()
            there: dict[str, str] = {}
            if self.value("version") is not None:
                there = {str(name): str(value) for name, value in self.rows("installed")}
            if there and setting_number(there, "schema_version") < sql.LATEST:
                self.rows("lock_tables")
            self.rows("script_patience")
            for version, text in plan(there):
                for batch in _GO.split(text):
                    if batch.strip():
                        self.ask("install", batch, ())
                if version is not None:
                    self.rows("set_version", str(version))
            self.rows("commit")
        except BaseException:
            with contextlib.suppress(Exception):
                self.rows("rollback")
            raise

    def _take_install_lock(self) -> None:
        """Lock other installers out until the transaction ends."""
        try:
            self.rows("install_lock")
        except Busy as exc:
            raise Unavailable(str(exc)) from exc  # a retry would only wait again

    def _blockers(self) -> str:
        """Name the sessions that have locks on the tables, as far as this login may see them."""
        try:
            rows = self.rows("blockers")
        except SqlsemError:
            return "who that is, is only told with the right VIEW SERVER STATE (on Azure SQL: VIEW DATABASE STATE)"
        return name_sessions(rows)

    def diagnose(self) -> list[Check]:
        return SqlServerDoctor(self).examine()


def _lock(resource: str, position: int | None, access: str, limit: int | None, weight: int) -> TaskLock:
    return TaskLock(resource, access, limit, weight, position)


class BorrowedSqlServerSession(SqlServerSession):
    """A session that runs its statements by the caller's cursor."""

    def __init__(self, engine: SqlServerEngine, cursor: Any) -> None:
        self.queries = engine.queries()
        self._cursor = cursor
        # (In manual commit mode, the transaction begins with the first statement that reads a table.)
        if self.ask("in_transaction", self.queries["in_transaction"], ())[0][0] < 1:
            raise ConfigurationError(
                "put() was given a cursor outside of a transaction; begin one (no autocommit)", code="transaction"
            )

    def ask(self, name: str, text: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        if name in ("begin", "commit", "rollback"):
            return []  # it is the caller's transaction
        if None in parameters:
            text = with_nulls(text, tuple(value is None for value in parameters))
            parameters = [value for value in parameters if value is not None]
        cursor = self._cursor
        borrowed.execute(cursor, text, tuple(parameters))
        rows: list[tuple[Any, ...]] = []
        while True:
            if cursor.description is not None:
                rows += [tuple(borrowed.values(row)) for row in cursor.fetchall()]
            if not cursor.nextset():
                return rows
