"""The work queue."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlsem.engines.roles import TaskSession
from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.connection import is_busy
from sqlsem.engines.sqlite.database import SqliteDatabase
from sqlsem.engines.sqlite.members import SqliteMembers
from sqlsem.engines.sqlite.values import shown, user_name
from sqlsem.errors import Unavailable
from sqlsem.model import Attempt, Claimed, End, NewTask, QueueCounts, QueueState, TaskEntry

#: The kinds of tasks that may be claimed in groups, and characters of bodies after which a group is large enough.
GROUPED, GROUP_SIZE = ("call", "sql"), 1_000_000
#: Seconds for which the SQL of a task waits for the file's write lock.
SQL_PATIENCE_SECONDS = 60.0
#: Between two looks whether anybody has written.
HEAR_SECONDS = 0.02


class SqliteTasks(SqliteMembers, TaskSession):
    """Tasks, and the SQL that they run."""

    def __init__(self, engine: SqliteDatabase) -> None:
        super().__init__(engine)
        self._working: sqlite3.Connection | None = None  # runs the SQL of a task
        self._cancelled = threading.Event()
        self._heard: tuple[int, int] | None = None

    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        login = user_name()
        uids = [f"{uid}.{number}" for number in range(1, len(tasks) + 1)]
        values = [
            {
                "queue": queue,
                "order": task.order,
                "kind": task.kind,
                "body": task.body,
                "note": task.note,
                "on_failure": task.on_failure,
                "max_attempts": task.max_attempts,
                "backoff": round(task.backoff * 1000),
                "uid": one,
                "after": task.after,
                "login": login,
            }
            for one, task in zip(uids, tasks, strict=True)
        ]
        with fork.held_off, self.writing():
            self.run_many("put_task", values)
            return [row["task_id"] for row in self.rows("put_before", {"uids": json.dumps(uids)})]

    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        values = {"queue": queue, "member": member_id, "owner": owner, "uid": uid}
        # Reading takes no lock: a queue with nothing to do costs the others nothing.
        if not again and self.row("next_pending", {"queue": queue}) is None:
            self.require_member(member_id)
            return None
        with fork.held_off, self.writing():
            return self._claim(values, again)

    def _claim(self, values: dict[str, Any], again: bool) -> Claimed | None:
        key = {name: values[name] for name in ("queue", "member", "uid")}
        self.give_sign(values["member"], known=True)
        found = self.row("claimed_before", key) if again else None
        if found is None:
            found = self.row("next_pending", {"queue": values["queue"]})
            if found is None:
                return None
            claim = {name: values[name] for name in ("member", "owner", "uid")}
            if self.run("claim_task", {**claim, "task": found["task_id"]}).rowcount != 1:
                self.require_member(values["member"])
        return self._claimed(found["task_id"])

    def _claimed(self, task_id: int) -> Claimed:
        return Claimed(*self.row("claimed", (task_id,)))

    def end_task(self, member_id: int, end: End) -> str | None:
        with fork.held_off, self.writing():
            return self._end(member_id, end)

    def _end(self, member_id: int, end: End) -> str | None:
        key = {"task": end.task_id, "attempt": end.attempt, "member": member_id, "outcome": end.outcome}
        what = {"error": end.error, "result": end.result}
        if self.run("keep_attempt", {**key, **what}).rowcount != 1:
            found = self.row("ended_before", key)
            return found["status"] if found else None
        self.run("end_task", {"task": end.task_id, "outcome": end.outcome, **what})
        status: str = self.row("task_status", (end.task_id,))["status"]
        return status

    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        values = {"queue": queue, "member": member_id, "owner": owner, "uid": uid}
        with fork.held_off, self.writing():
            return self._end(member_id, end), self._claim(values, again)

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, most: int
    ) -> tuple[list[str | None], list[Claimed]]:
        with fork.held_off, self.writing():
            statuses = [self._end(member_id, end) for end in ends]
            return statuses, self._claim_group(member_id, queue, owner, uid, again, most) if most else []

    def _claim_group(self, member_id: int, queue: str, owner: str, uid: str, again: bool, most: int) -> list[Claimed]:
        key = {"queue": queue, "member": member_id, "uid": uid}
        self.give_sign(member_id)
        if again and (found := self.rows("claimed_before", key)):
            return [self._claimed(row["task_id"]) for row in found]
        group: list[Claimed] = []
        size = 0
        for task, kind, losses in self.rows("next_group", {"queue": queue, "most": most}):
            alone = losses > 0 or kind not in GROUPED
            if group and (alone or size > GROUP_SIZE):
                break
            self.run("claim_task", {"task": task, "member": member_id, "owner": owner, "uid": uid})
            group.append(self._claimed(task))
            size += len(group[-1].body)
            if alone:
                break
        return group

    def return_claim(self, member_id: int, queue: str, uid: str) -> int:
        with fork.held_off, self.writing():
            found = self.rows("claimed_before", {"queue": queue, "member": member_id, "uid": uid})
            for task_id, attempt in found:
                self._end(member_id, End(task_id, attempt, "returned"))
        return len(found)

    def recover_tasks(self, queue: str | None, mine: int | None) -> int:
        members = [one for (one,) in self.rows("task_members", {"queue": queue}) if one != mine]
        for member_id in members:
            self.test_member(member_id)
        if all(self.row("member", (member_id,)) for member_id in members):
            return 0
        with fork.held_off, self.writing():
            self.run("keep_lost", {"queue": queue})
            return self.run("recover_tasks", {"queue": queue}).rowcount

    def next_ready(self, queue: str) -> float | None:
        seconds: float | None = self.row("next_ready", {"queue": queue})["seconds"]
        return seconds

    def listen(self) -> bool:
        self._heard = self._version()
        return True

    def hear(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while (version := self._version()) == self._heard:
            if self.interrupted or time.monotonic() >= deadline:
                return False
            time.sleep(HEAR_SECONDS)
        self._heard = version
        return True

    def _version(self) -> tuple[int, int]:
        # Changes when another connection has written; no look into any table.
        return self.row("data_version")["data_version"], id(self.connection)

    def queue_state(self, queue: str) -> QueueState:
        pending, running, next_pending, failed, error = self.row("queue_state", {"queue": queue})
        return QueueState(bool(pending), bool(running), bool(next_pending), failed, error)

    def queue_counts(self, queue: str | None) -> list[QueueCounts]:
        lost = Counter(row["queue"] for row in self.rows("running_members", {"queue": queue}) if self.missing(row)[0])
        return [shown(QueueCounts, row, lost=lost[row["queue"]]) for row in self.rows("queue_counts", {"queue": queue})]

    def list_tasks(self, queue: str | None, status: str | None, most: int, skip: int = 0) -> list[TaskEntry]:
        wanted = {"queue": queue, "status": "running" if status == "lost" else status, "most": skip + most}
        if status in ("running", "lost"):
            wanted["most"] = -1  # who is dead shows only when looked at
        entries = []
        for row in self.rows("page_tasks", wanted):
            entry = shown(TaskEntry, row)
            if self.missing(row)[0]:
                entry = dataclasses.replace(entry, status="lost")
            if status is None or entry.status == status:
                entries.append(entry)
        return entries[skip : skip + most]

    def task_attempts(self, task_id: int) -> list[Attempt]:
        attempts = []
        for row in self.rows("task_attempts", {"task": task_id}):
            attempt = shown(Attempt, row, session_id=None)
            attempts.append(dataclasses.replace(attempt, outcome="lost") if self.missing(row)[0] else attempt)
        return attempts

    def set_task(self, task_id: int, what: str) -> int:
        runner = self.row("task_runner", (task_id,))
        recovered = False
        if runner is not None:
            queue, member_id = runner
            self.test_member(member_id)
            recovered = self.row("member", (member_id,)) is None and self.recover_tasks(queue, None) > 0
        with fork.held_off, self.writing():
            found = self.row("task_status", (task_id,))
            if found is None:
                return -1
            status = found["status"]
            if recovered and what == "retry" and status == "pending":
                return 0
            if status == "running":
                return 1
            if status not in {"retry": ("failed", "cancelled"), "cancel": ("pending", "failed")}[what]:
                return -2
            self.run(f"{what}_task", (task_id,))
            self.note_operation(what, queue=found["queue_name"], task=task_id, old=status)
        return 0

    def prune_tasks(self, most: int) -> int:
        with fork.held_off, self.writing():
            self.run("prune_task_log", {"most": most})
            return self.run("prune_tasks", {"most": most}).rowcount

    def execute(self, text: str) -> str | None:
        fork.begin_executing(self)
        try:
            self._execute_text(text)
        finally:
            fork.end_executing(self)
        return None

    def _execute_text(self, text: str) -> None:
        # Not through _open: a connection of its own, whose transactions are the text's.
        self._working = connection = self.engine.open()
        asked = 0

        def allow(*_: object) -> int:
            # Asked before each statement: what has not begun when it is cancelled does not begin.
            nonlocal asked
            asked += 1
            return sqlite3.SQLITE_DENY if self._cancelled.is_set() else sqlite3.SQLITE_OK

        # What manages transactions itself, or cannot run in one, is left alone.
        first = re.match(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/|;)*(\w*)", text, re.DOTALL)
        alone = first is not None and first[1].upper() in ("BEGIN", "PRAGMA", "VACUUM", "ATTACH", "DETACH")
        timeout = f"PRAGMA busy_timeout = {SQL_PATIENCE_SECONDS * 1000:.0f};"
        script = f"{timeout}\n{text}" if alone else f"BEGIN IMMEDIATE;\n{timeout}\n{text}\n;"
        deadline = time.monotonic() + SQL_PATIENCE_SECONDS
        pause = 0.001
        try:
            connection.set_authorizer(allow)
            while True:
                asked = 0
                try:
                    connection.executescript(script)
                    break
                except sqlite3.Error as exc:
                    # Waiting for the write lock can be cancelled, as SQLite's own cannot.
                    if alone or asked > 1 or not is_busy(exc) or time.monotonic() > deadline:
                        raise
                self._cancelled.wait(random.uniform(0.5, 1) * pause)
                pause = min(pause * 1.5, 0.05)
            if connection.in_transaction:
                if alone:
                    raise Unavailable(f"{self.engine.where}: the SQL left a transaction open; end it with COMMIT")
                connection.execute("COMMIT")
        except sqlite3.Error as exc:
            if self._cancelled.is_set():
                raise Unavailable(f"{self.engine.where}: the SQL was ended before its time ({exc})") from exc
            raise self.translate(exc) from exc
        finally:
            self._working = None
            connection.close()

    def cancel_running(self) -> None:
        self._cancelled.set()
        with fork.calm:
            # Again and again: an interrupt between two statements interrupts nothing.
            while self in fork.executing:
                self._interrupt_working()
                if self.executing_in == threading.get_ident():
                    return  # in a signal handler: it ends when that has returned
                fork.calm.wait(0.02)

    def interrupt(self) -> None:
        super().interrupt()
        self._interrupt_working()

    def _interrupt_working(self) -> None:
        connection = self._working
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.interrupt()

    def close(self) -> None:
        fork.end_executing(self)  # should an interrupt have parted it from its end
        super().close()
