"""How short tasks are claimed and ended together: in groups that take some 10 ms."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sqlsem.model import End, monotonic
from sqlsem.tasks.task import Task

__all__ = ["GROUP_LATE_SECONDS", "MOST_IN_GROUP", "Group", "Pace", "TaskEnd"]

#: What a group of tasks shall take, and how many they are at the most.
GROUP_SECONDS, MOST_IN_GROUP = 0.01, 100
#: After so long a group is late: it keeps what runs, and no more.
GROUP_LATE_SECONDS = 0.05
#: A task that takes so long is worth a thread of its own; of shorter ones several threads do no more than one. Of these
#: the next group may be claimed while one is run.
LONG_SECONDS = 0.001


class TaskEnd(NamedTuple):
    """A task, and how it ended."""

    task: Task
    end: End
    begun: bool = True

    def told(self, status: str | None) -> str:
        """Return how the attempt ended, where this is the task's status now; None: it was taken away."""
        if status is None:
            return "lost"
        return "cancelled" if status == "cancelled" else self.end.outcome


class Group:
    """What a worker has claimed: tasks that have not begun, and those that are done but not recorded as such. Of those
    that have not begun some may be the next group, which was claimed while this one is run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead: deque[Task] = deque()
        self._next: deque[Task] = deque()
        self._done: list[TaskEnd] = []
        self._since = self._done_since = 0.0  # when it was the turn of those ahead; when the first of those was done

    def add(self, tasks: Sequence[Task], *, ahead: bool = False) -> None:
        """These were claimed; ``ahead``: while others were run."""
        with self._lock:
            if ahead and (self._ahead or len(tasks) == 1):
                self._next.extend(tasks)
            else:
                self._since = monotonic()
                self._ahead.extend(tasks)

    def begin(self) -> Task | None:
        """The next task, for the thread that asks. None also where one that may have been claimed alone comes next, and
        what was done before is not recorded yet: if it kills its worker, that shall not be done again.
        """
        with self._lock:
            if not self._ahead and self._next and not self._is_barred():
                self._ahead, self._next = self._next, self._ahead
                self._since = monotonic()
            return self._ahead.popleft() if self._ahead else None

    def is_barred(self) -> bool:
        """Whether what comes next may begin when what was done is recorded, and not before."""
        with self._lock:
            return self._is_barred()

    def _is_barred(self) -> bool:
        return not self._ahead and len(self._next) == 1 and bool(self._done)

    def has_room(self) -> bool:
        """Whether the next group may be claimed."""
        return not self._next

    def is_ready(self) -> bool:
        """Whether there is one to `begin`."""
        with self._lock:
            return bool(self._ahead or self._next) and not self._is_barred()

    def done(self, end: TaskEnd) -> None:
        """A task that was begun has ended so."""
        with self._lock:
            if not self._done:
                self._done_since = monotonic()
            self._done.append(end)

    def keeps(self) -> bool:
        """Whether there is anything to `take`."""
        return bool(self._ahead or self._next or self._done)

    def is_late(self, seconds: float) -> bool:
        """Whether anything that has not begun has been kept for so long."""
        since = monotonic() - seconds
        with self._lock:
            if self._ahead:
                return self._since < since
            return bool(self._next) and self._next[0].began < since  # which is the time of its claim

    def is_unrecorded(self, seconds: float) -> bool:
        """Whether anything has been done for so long."""
        with self._lock:
            return bool(self._done) and self._done_since < monotonic() - seconds

    def take(self, *, ahead: bool = True) -> list[TaskEnd]:
        """Everything but what runs, for the thread that asks: it records what was done, and returns what was not."""
        left: list[Task] = []
        with self._lock:
            done, self._done = self._done, []
            if ahead:
                left = [*self._ahead, *self._next]
                self._ahead.clear()
                self._next.clear()
        return done + [TaskEnd(task, task.make_end("returned"), begun=False) for task in left]


class Pace:
    """How many tasks a worker may claim at a time: as many as take `GROUP_SECONDS`, as far as the last ones tell.

    ``ahead``: half of that where the next group is claimed while one is run.
    """

    def __init__(self, most: int, *, ahead: bool = False) -> None:
        self._limit = most
        self._ahead = ahead and most > 1
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

    def goes_ahead(self) -> bool:
        """Whether the next group may be claimed while one is run: where such a call takes a good part of the time."""
        return self._ahead and (self._mean is None or self._mean < LONG_SECONDS)

    def most(self) -> int:
        """Never more than twice as many as the last time."""
        seconds = GROUP_SECONDS / 2 if self.goes_ahead() else GROUP_SECONDS
        fitting = self._limit if not self._mean else int(seconds / self._mean)
        self._last = max(1, min(fitting, self._limit, 2 * self._last))
        return self._last
