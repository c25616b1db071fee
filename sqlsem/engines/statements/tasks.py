"""Work queues: tasks are put, claimed, ended and listed; and schedules."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlsem.engines.schedules import check_due, check_task_options, check_times, read_options
from sqlsem.engines.statements.admission import LAST
from sqlsem.engines.statements.fair_queueing import FairQueueingStatements, key_hash
from sqlsem.engines.statements.session import StatementEngine
from sqlsem.engines.statements.values import as_time, shown
from sqlsem.insight.patterns import no_limit_set
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.tasks import (
    Attempt,
    Claimed,
    End,
    NewTask,
    QueueCounts,
    QueueState,
    Schedule,
    TaskEntry,
    TaskLock,
    task_locks,
)

#: The kinds of tasks that may be claimed in groups, and the length of their bodies from which a group is large enough.
GROUPED, GROUP_SIZE = ("call", "sql"), 1_000_000
#: Seconds between two checks whether another connection has written.
HEAR_SECONDS = 0.02
#: If the next time of a schedule is further ahead than this, an operator's action is recorded.
LONG_SECONDS = 366 * 86400


class TaskStatements(FairQueueingStatements):
    """Tasks: put, claimed, ended and listed."""

    def __init__(self, engine: StatementEngine) -> None:
        super().__init__(engine)
        self._heard: object = None

    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        with self.forks_blocked, self.transaction():
            return self.put_in_transaction(queue, uid, tasks)

    def require_limits(self, locks: Iterable[TaskLock]) -> None:
        """Raise `ConfigurationError` if a lock of a task names no limit, and no operator has set one."""
        for lock in locks:
            if lock.limit is None and self.row("cap", {"resource": lock.resource})["cap"] is None:
                raise ConfigurationError(no_limit_set(lock.resource), resource=lock.resource)

    def put_in_transaction(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        """Put tasks as `put_tasks` does, in a transaction that is already open (for schedules)."""
        login = self.login()
        self.require_limits(dict.fromkeys(lock for task in tasks for lock in task.locks))
        turns = self.uses_fair_queueing(queue) or any(task.key for task in tasks)
        keys = [task.key if task.key or not (turns or task.priority) else "" for task in tasks]
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
                "uid": uid,
                "after": task.after,
                "login": login,
                "time_limit": None if task.time_limit is None else max(1, round(task.time_limit * 1000)),
                "unique": task.unique or task.replace,
                "key": key,
                "turn": None if key is None else key_hash(key),
                "priority": task.priority,
                "locks": len(task.locks) or None,
            }
            for uid, task, key in zip(uids, tasks, keys, strict=True)
        ]
        before = {"uids": json.dumps(uids)}
        if tasks[0].unique or tasks[0].replace:
            number = self._put_with_key(values[0], before, tasks[0].replace is not None)
            self._put_locks(uids, tasks)
            return [number]
        self.run_many("put_task", values)
        self._put_locks(uids, tasks)
        return [row["task_id"] for row in self.rows("put_before", before)]

    def _put_locks(self, uids: Sequence[str], tasks: Sequence[NewTask]) -> None:
        rows = [
            {**lock.as_option(), "uid": uid, "number": number}
            for uid, task in zip(uids, tasks, strict=True)
            for number, lock in enumerate(task.locks, 1)
        ]
        if rows:
            self.run_many("put_lock", rows)

    def _put_with_key(self, values: dict[str, Any], before: dict[str, Any], replace: bool) -> int:
        for row in self.rows("put_before", before):
            return int(row["task_id"])
        previous = self.row("task_of_key", {"queue": values["queue"], "key": values["unique"]})
        if previous is not None and not replace:
            return int(previous["task_id"])
        if previous is not None:  # before the new task is put, because only one task may have the key
            self.run("give_up_key" if previous["status"] == "running" else "supersede", (previous["task_id"],))
        self.run("put_task", values)
        task_id = int(self.row("put_before", before)["task_id"])
        if previous is not None and previous["status"] != "running":
            self.run("superseded_by", {"task": previous["task_id"], "error": f"replaced by task {task_id}"})
        return task_id

    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        values = {"queue": queue, "member": member_id, "owner": owner, "uid": uid}
        # (Reads take no lock, so a poll of an empty queue delays no other session.)
        if not again and not self._has_pending(queue):
            self.require_member(member_id)
            return None
        with self.forks_blocked, self.transaction():
            return self._claim(values, again)

    def _has_pending(self, queue: str) -> bool:
        # Read one snapshot. Otherwise this could miss a free task while other workers claim during the scan.
        with self.forks_blocked, self.reading():
            return self.next_pending(queue) is not None

    def _claim(self, values: dict[str, Any], again: bool) -> Claimed | None:
        key = {name: values[name] for name in ("queue", "member", "uid")}
        self.renew_lease(values["member"], known=True)
        claimed = self.row("claimed_before", key) if again else None
        if claimed is None:
            task_id = self.next_pending(values["queue"], start=True)
            if task_id is None:
                return None
            claim = {name: values[name] for name in ("member", "owner", "uid")}
            if self.run("claim_task", {**claim, "task": task_id}).rowcount != 1:
                self.require_member(values["member"])
            return self._claimed(task_id)
        return self._claimed(claimed["task_id"])

    def _claimed(self, task_id: int) -> Claimed:
        return Claimed(*self.row("claimed", (task_id,)))

    def end_task(self, member_id: int, end: End) -> str | None:
        with self.forks_blocked, self.transaction():
            return self._end(member_id, end)

    def _end(self, member_id: int, end: End) -> str | None:
        key = {"task": end.task_id, "attempt": end.attempt, "member": member_id, "outcome": end.outcome}
        result = {"error": end.error, "result": end.result}
        if self.run("keep_attempt", {**key, **result}).rowcount != 1:
            ended = self.row("ended_before", key)
            return ended["status"] if ended else None
        self.run("end_task", {"task": end.task_id, "outcome": end.outcome, **result})
        status: str = self.row("task_status", (end.task_id,))["status"]
        return status

    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        values = {"queue": queue, "member": member_id, "owner": owner, "uid": uid}
        with self.forks_blocked, self.transaction():
            return self._end(member_id, end), self._claim(values, again)

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, maximum: int
    ) -> tuple[list[str | None], list[Claimed]]:
        with self.forks_blocked, self.transaction():
            statuses = [self._end(member_id, end) for end in ends]
            return statuses, self._claim_group(member_id, queue, owner, uid, again, maximum) if maximum else []

    def _claim_group(
        self, member_id: int, queue: str, owner: str, uid: str, again: bool, maximum: int
    ) -> list[Claimed]:
        key = {"queue": queue, "member": member_id, "uid": uid}
        self.renew_lease(member_id)
        if again and (found := self.rows("claimed_before", key)):
            return [self._claimed(row["task_id"]) for row in found]
        if self.uses_fair_queueing(queue):  # (Fair queueing chooses one task at a time.)
            claim = self._claim({**key, "owner": owner}, False)
            return [] if claim is None else [claim]
        group: list[Claimed] = []
        size = 0
        for task, kind, losses, _ in self.rows("next_group", {"queue": queue, "maximum": maximum}):
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
        with self.forks_blocked, self.transaction():
            found = self.rows("claimed_before", {"queue": queue, "member": member_id, "uid": uid})
            for task_id, attempt in found:
                self._end(member_id, End(task_id, attempt, "returned"))
        return len(found)

    def recover_tasks(self, queue: str | None, mine: int | None) -> int:
        members = [member for (member,) in self.rows("task_members", {"queue": queue}) if member != mine]
        for member_id in members:
            self.check_member(member_id)
        if all(self.row("member", (member_id,)) for member_id in members):
            return 0
        with self.forks_blocked, self.transaction():
            self.run("keep_lost", {"queue": queue})
            return self.run("recover_tasks", {"queue": queue}).rowcount

    def next_ready(self, queue: str) -> float | None:
        seconds: float | None = self.row("next_ready", {"queue": queue})["seconds"]
        return seconds

    def listen(self) -> bool:
        self._heard = self.version()
        return True

    def wait_notification(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while (version := self.version()) == self._heard:
            if not self.usable or time.monotonic() >= deadline:
                return False
            time.sleep(HEAR_SECONDS)
        self._heard = version
        return True

    def queue_state(self, queue: str) -> QueueState:
        pending, running, next_pending, failed, error = self.row("queue_state", {"queue": queue})
        return QueueState(bool(pending), bool(running), bool(next_pending), failed, error)

    def queue_counts(self, queue: str | None) -> list[QueueCounts]:
        lost = Counter(row["queue"] for row in self.rows("running_members", {"queue": queue}) if self.missing(row)[0])
        return [shown(QueueCounts, row, lost=lost[row["queue"]]) for row in self.rows("queue_counts", {"queue": queue})]

    def list_tasks(self, queue: str | None, status: str | None, maximum: int, skip: int = 0) -> list[TaskEntry]:
        # (Only after the read is it known which members are dead.)
        read = LAST if status in ("running", "lost") else skip + maximum
        criteria = {"queue": queue, "status": "running" if status == "lost" else status, "maximum": read}
        entries = []
        for row in self.rows("page_tasks", criteria):
            entry = shown(TaskEntry, row, locks=task_locks(row["locks"], numbered=True))
            if self.missing(row)[0]:
                entry = dataclasses.replace(entry, status="lost")
            if status is None or entry.status == status:
                entries.append(entry)
        return entries[skip : skip + maximum]

    def task_attempts(self, task_id: int) -> list[Attempt]:
        attempts = []
        for row in self.rows("task_attempts", {"task": task_id}):
            attempt = shown(Attempt, row, session_id=None)
            attempts.append(dataclasses.replace(attempt, outcome="lost") if self.missing(row)[0] else attempt)
        return attempts

    def set_task(self, task_id: int, what: str) -> int:
        found = self.row("task_status", (task_id,))
        recovered = False
        if found is not None and found["status"] == "running":
            _, queue, member_id = found
            self.check_member(member_id)
            recovered = self.row("member", (member_id,)) is None and self.recover_tasks(queue, None) > 0
        with self.forks_blocked, self.transaction():
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
            if what == "retry" and self.row("rival", (task_id,)) is not None:
                return -3
            self.run(f"{what}_task", {"task": task_id} if what == "retry" else {"task": task_id, "login": self.login()})
            self.note_operation(what, queue=found["queue_name"], task=task_id, old=status)
        return 0

    def cancel_task(self, task_id: int) -> int:
        while (code := self.set_task(task_id, "cancel")) == 1:
            with self.forks_blocked, self.transaction():
                found, ask = self.row("task_status", (task_id,)), {"task": task_id, "login": self.login()}
                if found is not None and self.run("ask_to_cancel", ask).rowcount == 1:
                    self.note_operation("cancel", queue=found["queue_name"], task=task_id, old="running")
                    break
        return code

    def task_controls(self, member_id: int, task_ids: Sequence[int]) -> list[tuple[int, float | None, str | None]]:
        controls = self.rows("task_controls", {"member": member_id, "tasks": json.dumps(list(task_ids))})
        return [(row["task_id"], row["time_limit"], row["cancel_asked_by"]) for row in controls]

    def prune_tasks(self, maximum: int) -> int:
        with self.forks_blocked, self.transaction():
            self.run("prune_task_log", {"maximum": maximum})
            self.run("prune_task_locks", {"maximum": maximum})
            self.run("prune_queue_waits")
            return self.run("prune_tasks", {"maximum": maximum}).rowcount


class ScheduleStatements(TaskStatements):
    """Schedules, and the tasks that they put."""

    def maintain_queue(self, queue: str, mine: int) -> tuple[int, bool]:
        return self.recover_tasks(queue, mine), self.row("due_schedule", (queue,)) is not None

    def clock(self) -> datetime:
        now = as_time(self.row("clock")["now"])
        assert now is not None
        return now

    def save_schedule(
        self, name: str, queue: str, cron: str, zone: str, kind: str, body: str, options: dict[str, Any], due: datetime
    ) -> None:
        check_times(cron, zone, due)
        check_task_options(options)
        values = {"name": name, "queue": queue, "cron": cron, "zone": zone, "kind": kind, "body": body}
        with self.forks_blocked, self.transaction():
            self.require_limits(NewTask.of_options(kind, body, options).locks)
            stored = {"options": json.dumps(options), "due": due.timestamp(), "login": self.login()}
            self.run("save_schedule", {**values, **stored})

    def fire_schedule(
        self, name: str, due: datetime, last: datetime, following: datetime, put: bool
    ) -> tuple[bool, int | None]:
        check_due(following)
        times = {"due": due.timestamp(), "last": max(last, due).timestamp(), "next": following.timestamp()}
        with self.forks_blocked, self.transaction():
            if self.run("fire_schedule", {**times, "name": name, "put": put}).rowcount != 1:
                return False, None
            (row,) = self.rows("list_schedules", {"name": name, "queue": None})
            if not put or times["next"] > row["taken_at"] + LONG_SECONDS:
                change = {"queue": row["queue"], "old": f"schedule {name}", "new": f"next {following}"}
                self.note_operation("postpone" if put else "skip", **change)
            if not put:
                return True, None
            task = NewTask.of_options(row["kind"], row["body"], json.loads(row["options"]))
            (task_id,) = self.put_in_transaction(row["queue"], f"schedule.{name}.{due.timestamp()}", [task])
        return True, task_id

    def set_schedule(self, name: str, what: str, due: datetime | None) -> bool:
        values: dict[str, Any] = {"name": name}
        if what == "pause":
            values["login"] = self.login()
        elif what == "resume":
            check_due(due)
            assert due is not None
            values["due"] = due.timestamp()
        with self.forks_blocked, self.transaction():
            return bool(self.run(f"{what}_schedule", values).rowcount)

    def list_schedules(self, name: str | None, queue: str | None) -> list[Schedule]:
        rows = self.rows("list_schedules", {"name": name, "queue": queue})
        return [shown(Schedule, row, options=read_options(row["options"])) for row in rows]
