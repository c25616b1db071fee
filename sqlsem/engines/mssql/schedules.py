"""Schedules of the work queue on SQL Server."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime, timezone
from typing import Any

from sqlsem.engines.mssql.connection import SqlServerConnection, aware
from sqlsem.engines.schedules import read_options
from sqlsem.values.locks import Schedule


def as_text(moment: datetime | None) -> str | None:
    """Return a time as text, to the microsecond: some drivers round parameters of their own type."""
    if moment is None:
        return None
    return moment.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds")


class SqlServerSchedules(SqlServerConnection):
    """Schedules, and the tasks that they put."""

    def maintain_queue(self, queue: str, mine: int) -> tuple[int, bool]:
        recovered, due = self.rows("maintain_queue", queue, mine)[0]
        return int(recovered), bool(due)

    def clock(self) -> datetime:
        now = self.value("clock")
        assert isinstance(now, datetime)
        return now.replace(tzinfo=timezone.utc)

    def save_schedule(
        self, name: str, queue: str, cron: str, zone: str, kind: str, body: str, options: dict[str, Any], due: datetime
    ) -> None:
        self.rows("save_schedule", name, queue, cron, zone, kind, body, json.dumps(options), as_text(due))

    def fire_schedule(
        self, name: str, due: datetime, last: datetime, following: datetime, put: bool
    ) -> tuple[bool, int | None]:
        times = as_text(due), as_text(last), as_text(following)
        done, task_id = self.rows("fire_schedule", name, *times, int(put))[0]
        return bool(done), task_id

    def set_schedule(self, name: str, what: str, due: datetime | None) -> bool:
        return bool(self.value("set_schedule", name, what, as_text(due)) == 0)

    def list_schedules(self, name: str | None, queue: str | None) -> list[Schedule]:
        found = [Schedule(*aware(row)) for row in self.rows("list_schedules", name, queue)]
        return [dataclasses.replace(schedule, options=read_options(str(schedule.options))) for schedule in found]
