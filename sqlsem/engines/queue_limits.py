"""Limits and weights of the work queue, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.model import QueueLimit, QueueWait

__all__ = ["QueueLimitSession"]


class QueueLimitSession(abc.ABC):
    """The limits of running tasks and of starts of a queue and its keys, and the weights of the keys."""

    offers: ClassVar[str] = "limits of work queues"

    @abc.abstractmethod
    def queue_limits(self, queue: str | None) -> list[QueueLimit]:
        """Return the settings of one queue or all: first of the queue, then of its keys."""

    @abc.abstractmethod
    def queue_waits(self, queue: str | None) -> list[QueueWait]:
        """Return the queues and keys whose rate was used up at a claim, of one queue or all."""

    @abc.abstractmethod
    def set_queue(self, queue: str, key: str | None, what: str, value: int | None, per_ms: int | None = None) -> None:
        """Set ``limit``, ``key_limit``, ``rate`` or ``key_rate`` of a queue, ``limit``, ``rate`` or ``weight`` of one
        of its keys; None removes it. ``per_ms``: the window of a rate.
        """
