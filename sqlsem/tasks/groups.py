"""How short tasks are claimed and ended together: in groups that take some 10 ms."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from sqlsem.model import End, monotonic
from sqlsem.tasks.task import Task

__all__ = ["GROUP_LATE_SECONDS", "MOST_IN_GROUP", "Group", "Pace", "TaskEnd"]

#: What a group of tasks shall take, and how many they are at the most.
GROUP_SECONDS, MOST_IN_GROUP = 0.01, 100
#: After so long a group is late: it keeps what runs, and no more.
GROUP_LATE_SECONDS = 0.05
#: A task that takes so long is worth a thread of its own; of shorter ones several threads do no more than one.
LONG_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """A task, and how it ended."""

    task: Task
    end: End
    begun: bool = True


class Group:
    """What a worker has claimed: tasks that have not begun, and those that are done but not recorded as such."""

    def __init__(self) -> None:
        self.since = monotonic()  # how long it has kept the oldest of them, about
        self._lock = threading.Lock()
        self._ahead: deque[Task] = deque()
        self._done: list[TaskEnd] = []

    def add(self, tasks: Iterable[Task]) -> None:
        """These were claimed."""
        with self._lock:
            self._ahead.extend(tasks)
            self.since = monotonic()

    def begin(self) -> Task | None:
        """The next task, for the thread that asks."""
        with self._lock:
            return self._ahead.popleft() if self._ahead else None

    def done(self, end: TaskEnd) -> None:
        """A task that was begun has ended so."""
        with self._lock:
            if not self.keeps():
                self.since = monotonic()
            self._done.append(end)

    def keeps(self) -> bool:
        """Whether there is anything to `take`."""
        return bool(self._ahead or self._done)

    def take(self, *, ahead: bool = True) -> list[TaskEnd]:
        """Everything but what runs, for the thread that asks: it records what was done, and returns what was not."""
        with self._lock:
            done, self._done = self._done, []
            left, self._ahead = (self._ahead, deque()) if ahead else (deque(), self._ahead)
        return done + [TaskEnd(task, task.make_end("returned"), begun=False) for task in left]


class Pace:
    """How many tasks a worker may claim at a time: as many as take `GROUP_SECONDS`, as far as the last ones tell."""

    def __init__(self, most: int) -> None:
        self._limit = most
        self._last = 1
        self._mean: float | None = None
        self._long = 0  # of the last eight tasks, a bit each

    def took(self, seconds: float) -> None:
        """A task has taken so long."""
        self._long = (self._long << 1 | (seconds >= LONG_SECONDS)) & 0xFF
        if self._mean is None or seconds > GROUP_LATE_SECONDS:
            self._mean = seconds
        else:
            # One that had to wait for Python's lock says little.
            self._mean += (min(seconds, max(4 * self._mean, GROUP_SECONDS / 10)) - self._mean) / 8

    def is_slow(self) -> bool:
        """Whether most of the last tasks were worth a thread each."""
        return self._long.bit_count() > 4

    def most(self) -> int:
        """Never more than twice as many as the last time."""
        fitting = self._limit if not self._mean else int(GROUP_SECONDS / self._mean)
        self._last = max(1, min(fitting, self._limit, 2 * self._last))
        return self._last
