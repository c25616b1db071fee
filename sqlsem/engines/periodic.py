"""Runs once per period, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from sqlsem.model import Ticket

__all__ = ["OnceEntry", "PeriodicSession"]


@dataclass(frozen=True, slots=True)
class OnceEntry:
    """The latest run of a name, by the database's clock.

    Attributes:
        name: The name of the job.
        granted_at: The time at which the run's lock was granted, which determines the period of the run.
        done_at: The time at which it ended.
        fence: The fence of the run.
        requesting_id: The requester that ran it.
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
    """Runs once per period. A period is done if a run was granted in it or later, so a clock that steps back repeats no
    run. Periods are multiples of ``per_ms`` since 1970 in UTC, shifted by ``offset_ms``.
    """

    offers: ClassVar[str] = "runs once per period"

    @abc.abstractmethod
    def once_due(self, name: str, ticket: Ticket | None, per_ms: int, offset_ms: int) -> bool | None:
        """Return True if no run is done for the period in which the row of ``ticket`` was granted (without a ticket:
        the current period). Returns None if the row is gone.
        """

    @abc.abstractmethod
    def mark_once(self, name: str, ticket: Ticket) -> bool:
        """Record a run for the period in which the row was granted; return False if the row is not held (any more).
        Idempotent.
        """

    @abc.abstractmethod
    def once_last(self, name: str) -> OnceEntry | None:
        """Return the latest run; None if there is none, or it was forgotten."""

    @abc.abstractmethod
    def once_forget(self, name: str) -> bool:
        """Forget the latest run; return False if there is none."""
