"""Schedules of work queues."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from sqlsem.engines.schedules import check_due, check_task_options, check_times, read_options
from sqlsem.engines.statements.tasks import TaskStatements
from sqlsem.engines.statements.values import as_time, shown
from sqlsem.values.tasks import NewTask, Schedule

#: If the next time of a schedule is further ahead than this, an operator's action is recorded.
LONG_SECONDS = 366 * 86400


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
