"""Limits and weights of the work queue, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.model import QueueLimit, QueueWait

__all__ = ["QueueLimitSession"]


class QueueLimitSession(abc.ABC):
    """How many tasks of a queue may run at a time, or be started in so long, and how workers share themselves out
    between its keys.
    """

    offers: ClassVar[str] = "limits of work queues"

    @abc.abstractmethod
    def queue_limits(self, queue: str | None) -> list[QueueLimit]:
        """What is set, of one queue or all: of the queue first, then of its keys."""

    @abc.abstractmethod
    def queue_waits(self, queue: str | None) -> list[QueueWait]:
        """Whose rate claims have found used up, of one queue or all."""

    @abc.abstractmethod
    def set_queue(self, queue: str, key: str | None, what: str, value: int | None, per_ms: int | None = None) -> None:
        """Set ``limit``, ``key_limit``, ``rate`` or ``key_rate`` of a queue, ``limit``, ``rate`` or ``weight`` of one
        of its keys; None: nothing. ``per_ms``: the window of a rate.
        """
