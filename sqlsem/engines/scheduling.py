"""Schedules of the work queue, as a role of a session; see `sqlsem.engines.roles`."""

from __future__ import annotations

import abc
from datetime import datetime
from typing import Any, ClassVar

from sqlsem.model import Schedule

__all__ = ["ScheduleSession"]


class ScheduleSession(abc.ABC):
    """Tasks that are put at the times of a cron expression. What these mean is the client's to know."""

    offers: ClassVar[str] = "schedules"

    @abc.abstractmethod
    def tend_queue(self, queue: str, mine: int) -> tuple[int, bool]:
        """As `TaskSession.recover_tasks`; and whether a schedule of the queue is due."""

    @abc.abstractmethod
    def clock(self) -> datetime:
        """The database's."""

    @abc.abstractmethod
    def save_schedule(
        self, name: str, queue: str, cron: str, zone: str, kind: str, body: str, options: dict[str, Any], due: datetime
    ) -> None:
        """Keep a schedule, in the place of one of the same name; ``due`` is its first time."""

    @abc.abstractmethod
    def fire_schedule(
        self, name: str, due: datetime, last: datetime, following: datetime | None, put: bool
    ) -> tuple[bool, int | None]:
        """Put the task of a time that is ``due``, and write down the ``following`` one, in one transaction; whether
        nobody was faster, and the task's number. May be repeated. ``last``: the latest time that this one stands for.
        Without ``put`` the time is left out.
        """

    @abc.abstractmethod
    def set_schedule(self, name: str, what: str, due: datetime | None) -> bool:
        """'pause', 'resume' (from ``due`` on) or 'remove'; False where there is none that this login may change."""

    @abc.abstractmethod
    def list_schedules(self, name: str | None, queue: str | None) -> list[Schedule]:
        """By name."""
