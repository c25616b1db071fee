"""Limits and weights of work queues: a capability of sessions (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.model import QueueLimit, QueueWait

__all__ = ["QueueLimitSession"]


class QueueLimitSession(abc.ABC):
    """Settings of queues and their keys: limits of running tasks, rates of starts, and weights of the keys."""

    offers: ClassVar[str] = "limits of work queues"

    @abc.abstractmethod
    def queue_limits(self, queue: str | None) -> list[QueueLimit]:
        """Return the settings of one queue or all: for each, first those of the queue, then those of its keys."""

    @abc.abstractmethod
    def queue_waits(self, queue: str | None) -> list[QueueWait]:
        """Return the queues and keys whose rate a claim found used up, of one queue or all."""

    @abc.abstractmethod
    def set_queue(self, queue: str, key: str | None, what: str, value: int | None, per_ms: int | None = None) -> None:
        """Set a value (``what``): of a queue ``limit``, ``key_limit``, ``rate`` or ``key_rate``; of one of its keys
        ``limit``, ``rate`` or ``weight``. None removes it. ``per_ms``: the window of a rate.
        """
