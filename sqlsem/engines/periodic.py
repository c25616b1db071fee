"""Runs once per period: a capability of sessions (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from sqlsem.model import Ticket

__all__ = ["OnceEntry", "PeriodicSession"]


@dataclass(frozen=True, slots=True)
class OnceEntry:
    """The latest run of a name. Times are by the database's clock.

    Attributes:
        name: The name of the job.
        granted_at: The time at which the run's lock was granted, which determines the period of the run.
        done_at: The time at which the run ended.
        fence: The fence of the run.
        requesting_id: The id of the caller that ran it.
        login: The login of the run, if known.
        taken_at: The time of this answer.
    """

    name: str
    granted_at: datetime
    done_at: datetime
    fence: int
    requesting_id: str
    login: str | None
    taken_at: datetime


class PeriodicSession(abc.ABC):
    """Runs once per period. A period is done if a run was granted in it or later, so no run is repeated when the clock
    is set back. Periods are multiples of ``per_ms`` since 1970 in UTC, shifted by ``offset_ms``.
    """

    offers: ClassVar[str] = "runs once per period"

    @abc.abstractmethod
    def once_due(self, name: str, ticket: Ticket | None, per_ms: int, offset_ms: int) -> bool | None:
        """Return True if no run is done for the period in which the row of ``ticket`` was granted; without a ticket,
        for the current period. Return None if the row was removed.
        """

    @abc.abstractmethod
    def mark_once(self, name: str, ticket: Ticket) -> bool:
        """Record a run for the period in which the row was granted; return False if the row is not granted or was
        removed. Idempotent.
        """

    @abc.abstractmethod
    def once_last(self, name: str) -> OnceEntry | None:
        """Return the latest run; None if there is no record of one."""

    @abc.abstractmethod
    def once_forget(self, name: str) -> bool:
        """Delete the record of the latest run; return False if there was none."""
