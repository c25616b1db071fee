"""What runs once per period, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from sqlsem.model import Ticket

__all__ = ["OnceEntry", "PeriodicSession"]


@dataclass(frozen=True, slots=True)
class OnceEntry:
    """When it was done last, by the database's clock.

    Attributes:
        name: What.
        granted_at: When the turn of that run came, which tells the period that it was done for.
        done_at: When it ended.
        fence: Of that run.
        requesting_id: Who ran it.
        login: As which login; None where that is not known.
        taken_at: When this was asked.
    """

    name: str
    granted_at: datetime
    done_at: datetime
    fence: int
    requesting_id: str
    login: str | None
    taken_at: datetime


class PeriodicSession(abc.ABC):
    """A period is done when a run has been done whose turn came in it, or later: a clock that steps back runs nothing
    twice. Periods are multiples of ``per_ms`` since 1970 in UTC, moved by ``offset_ms``.
    """

    offers: ClassVar[str] = "runs once per period"

    @abc.abstractmethod
    def once_due(self, name: str, ticket: Ticket | None, per_ms: int, offset_ms: int) -> bool | None:
        """Whether it may run in the period of a moment: that at which this row was granted; without one, now. None:
        there is no such row (any more).
        """

    @abc.abstractmethod
    def mark_once(self, name: str, ticket: Ticket) -> bool:
        """It is done, for the period in which the turn of this row came; False where that is not held (any more). May
        be repeated.
        """

    @abc.abstractmethod
    def once_last(self, name: str) -> OnceEntry | None:
        """When it was done last; None: never, or it was forgotten."""

    @abc.abstractmethod
    def once_forget(self, name: str) -> bool:
        """Forget that; whether there was anything to forget."""
