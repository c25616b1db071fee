"""Schedules of the work queue on PostgreSQL."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from typing import Any

from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.engines.schedules import read_options
from sqlsem.values.locks import Schedule


class PostgresSchedules(PostgresConnection):
    """Schedules, and the tasks that they put."""

    def maintain_queue(self, queue: str, mine: int) -> tuple[int, bool]:
        recovered, due = self.row("maintain_queue", queue, mine)
        return int(recovered), bool(due)

    def clock(self) -> datetime:
        (now,) = self.row("clock")
        assert isinstance(now, datetime)
        return now

    def save_schedule(
        self, name: str, queue: str, cron: str, zone: str, kind: str, body: str, options: dict[str, Any], due: datetime
    ) -> None:
        self.rows("save_schedule", (name, queue, cron, zone, kind, body, json.dumps(options), due))

    def fire_schedule(
        self, name: str, due: datetime, last: datetime, following: datetime, put: bool
    ) -> tuple[bool, int | None]:
        done, task_id = self.row("fire_schedule", name, due, last, following, put)
        return bool(done), task_id

    def set_schedule(self, name: str, what: str, due: datetime | None) -> bool:
        (done,) = self.row("set_schedule", name, what, due)
        return bool(done)

    def list_schedules(self, name: str | None, queue: str | None) -> list[Schedule]:
        schedules = [Schedule(*row) for row in self.rows("list_schedules", (name, queue))]
        return [dataclasses.replace(schedule, options=read_options(str(schedule.options))) for schedule in schedules]
