"""Who asks, in this process: a thread or a task."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

__all__ = ["Caller", "new_number", "this_thread"]

_numbers = itertools.count(1)
_threads = threading.local()


@dataclass(frozen=True, slots=True)
class Caller:
    """A thread or a task."""

    kind: str  # "thread" or "task"
    number: int  # never given to another one in this process
    name: str

    @property
    def owner(self) -> str:
        """Its name in the table."""
        return f"{self.name[:200]}#{self.number}"


def new_number() -> int:
    """A number for a thread or a task that no other ever gets; the system's are used again."""
    return next(_numbers)


def this_thread() -> Caller:
    """The thread that calls."""
    number: int | None = getattr(_threads, "number", None)
    if number is None:
        number = _threads.number = new_number()
    return Caller("thread", number, threading.current_thread().name)
