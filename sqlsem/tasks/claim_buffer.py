"""The tasks that a worker has claimed, and how many it claims at once: a group that takes some 10 ms. The ends of tasks
that are not recorded; if they cannot be, the heartbeat records them when the database is back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from sqlsem.tasks.claiming import Claiming
from sqlsem.tasks.task import Task
from sqlsem.util.printable import first_line
from sqlsem.values.locks import monotonic
from sqlsem.values.tasks import End

log = logging.getLogger("sqlsem")

#: How long the tasks of a group should take together, and how many tasks a group has at most.
GROUP_SECONDS, MAX_GROUP_SIZE = 0.01, 100
#: A group is late after this time: the worker keeps the tasks that run, and returns the others to the queue.
GROUP_LATE_SECONDS = 0.05
#: Tasks that take longer than this run in several threads. Shorter ones do not gain from threads; for them the next
#: group may be claimed while the current one runs.
LONG_SECONDS = 0.001


class TaskEnd(NamedTuple):
    """A task, and how it ended."""

    task: Task
    end: End
    begun: bool = True

    def outcome_for(self, status: str | None) -> str:
        """Return the attempt's outcome, given the task's status now (None: the attempt was taken from this worker)."""
        if status is None:
            return "lost"
        return "cancelled" if status == "cancelled" else self.end.outcome


class ClaimBuffer:
    """The claimed tasks of a worker that have not begun, and the ends of tasks that are not recorded yet.

    The tasks that have not begun are the rest of the current group, and perhaps the next group, if it was prefetched.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: deque[Task] = deque()
        self._next: deque[Task] = deque()
        self._ends: list[TaskEnd] = []
        self._current_since = self._ends_since = 0.0  # the start of the current group; the end of the first of `_ends`

    def add(self, tasks: Sequence[Task], *, prefetched: bool = False) -> None:
        """Add tasks that were claimed; ``prefetched``: claimed while others ran."""
        with self._lock:
            if prefetched and (self._current or len(tasks) == 1):
                self._next.extend(tasks)
            else:
                self._current_since = monotonic()
                self._current.extend(tasks)

    def next_task(self) -> Task | None:
        """Remove and return the next task, None if there is none.

        None also if the next task must run alone and earlier ends are not recorded yet: if that task kills the worker,
        the earlier tasks would run again.
        """
        with self._lock:
            if not self._current and self._next and not self._must_record_first():
                self._current, self._next = self._next, self._current
                self._current_since = monotonic()
            return self._current.popleft() if self._current else None

    def must_record_first(self) -> bool:
        """Return True if the next task may begin only when the earlier ends are recorded."""
        with self._lock:
            return self._must_record_first()

    def _must_record_first(self) -> bool:
        return not self._current and len(self._next) == 1 and bool(self._ends)

    def has_room(self) -> bool:
        """Return True if the next group may be claimed."""
        return not self._next

    def has_next(self) -> bool:
        """Return True if `next_task` would return a task."""
        with self._lock:
            return bool(self._current or self._next) and not self._must_record_first()

    def add_end(self, end: TaskEnd) -> None:
        """Add the end of a task, to be recorded."""
        with self._lock:
            if not self._ends:
                self._ends_since = monotonic()
            self._ends.append(end)

    def has_any(self) -> bool:
        """Return True if there is anything to `drain`."""
        return bool(self._current or self._next or self._ends)

    def is_late(self) -> bool:
        """Return True if a task has been waiting here for `GROUP_LATE_SECONDS`."""
        since = monotonic() - GROUP_LATE_SECONDS
        with self._lock:
            if self._current:
                return self._current_since < since
            return bool(self._next) and self._next[0].began < since  # (until it runs: the time of its claim)

    def has_unrecorded(self) -> bool:
        """Return True if an end has been waiting here for `GROUP_LATE_SECONDS`."""
        with self._lock:
            return bool(self._ends) and self._ends_since < monotonic() - GROUP_LATE_SECONDS

    def drain(self, *, unstarted: bool = True) -> list[TaskEnd]:
        """Remove and return all ends, for the caller to record; with ``unstarted`` also the tasks that have not begun,
        as returned to the queue.
        """
        returned: list[Task] = []
        with self._lock:
            ends, self._ends = self._ends, []
            if unstarted:
                returned = [*self._current, *self._next]
                self._current.clear()
                self._next.clear()
        return ends + [TaskEnd(task, task.make_end("returned"), begun=False) for task in returned]


class ClaimSizer:
    """Decides how many tasks a worker claims at once: as many as take `GROUP_SECONDS`, judging by the last tasks.

    Args:
        limit: The most tasks at once.
        prefetch: The worker can claim the next group while one runs; each then has half as many tasks.
    """

    def __init__(self, limit: int, *, prefetch: bool = False) -> None:
        self._limit = limit
        self._prefetch = prefetch and limit > 1
        self._last_size = 1
        self._mean: float | None = None
        self._long_tasks = 0  # a bit for each of the last eight tasks: 1 if it was long

    def record_duration(self, seconds: float) -> None:
        """Record how long a task took."""
        self._long_tasks = (self._long_tasks << 1 | (seconds >= LONG_SECONDS)) & 0xFF
        if self._mean is None or seconds > GROUP_LATE_SECONDS:
            self._mean = seconds
        else:
            # The task may have waited for Python's lock: one long duration counts for little.
            self._mean += (min(seconds, max(4 * self._mean, GROUP_SECONDS / 10)) - self._mean) / 8

    def runs_long_tasks(self) -> bool:
        """Return True if most of the last tasks were worth a thread each."""
        return self._long_tasks.bit_count() > 4

    def may_prefetch(self) -> bool:
        """Return True if tasks are so short that the next group should be claimed while the current one runs."""
        return self._prefetch and (self._mean is None or self._mean < LONG_SECONDS)

    def next_size(self) -> int:
        """Return how many tasks to claim now: at most twice as many as the last time."""
        seconds = GROUP_SECONDS / 2 if self.may_prefetch() else GROUP_SECONDS
        fitting = self._limit if not self._mean else int(seconds / self._mean)
        self._last_size = max(1, min(fitting, self._limit, 2 * self._last_size))
        return self._last_size


class Unrecorded:
    """The ends of a worker that the heartbeat is to record. Its condition ``changed`` announces the answers."""

    def __init__(self, claiming: Claiming, changed: threading.Condition) -> None:
        self._claiming = claiming
        self._changed = changed
        self._left: list[TaskEnd] = []
        self._answers: list[tuple[TaskEnd, str | None]] = []

    def add(self, ends: Sequence[TaskEnd]) -> None:
        """Have the heartbeat record these ends in place of the worker."""
        if ends:
            with self._changed:
                self._left += ends
                self._changed.notify_all()
            self._claiming.end_later([end.end for end in ends], partial(self._answer, ends))
            self._claiming.client.claims.mark_ended(end.task for end in ends)

    def _answer(self, ends: Sequence[TaskEnd], statuses: Sequence[str | None]) -> None:
        """Keep the answers until the worker takes and reports them. The heartbeat calls this, perhaps twice."""
        with self._changed:
            self._answers += zip(ends, statuses, strict=True)
            self._changed.notify_all()

    def answered(self) -> bool:
        """Return True if there is something to `take`."""
        return bool(self._answers)

    def take(self) -> list[tuple[TaskEnd, str | None]]:
        """Return the newly recorded ends, each with its task's status; None: the claim was lost."""
        recorded: dict[int, tuple[TaskEnd, str | None]] = {}
        with self._changed:
            if self._answers:
                recorded = {id(end.task): (end, status) for end, status in self._answers if end in self._left}
                self._left = [end for end in self._left if id(end.task) not in recorded]
                self._answers = []
        for end, status in recorded.values():
            end.task.ended_with(status, marks_ended=False)
        return list(recorded.values())

    def left(self) -> list[TaskEnd]:
        """Return the ends that are not recorded yet."""
        return list(self._left)


def log_outcome(queue: str, ended: TaskEnd, status: str | None, outcome: str | None) -> None:
    """Log a task that failed, or whose claim was lost."""
    task, error = ended.task, ended.end.error
    if outcome == "failed" and error is not None:
        lasted, why = monotonic() - task.began, first_line(error)
        again = "; it will be tried again" if status == "pending" else ""
        log.warning("Task %d of %r failed after %.1f s: %s%s", task.id, queue, lasted, why, again)
    elif outcome == "lost":
        why = task.why_lost or "it was given back"
        log.warning("The claim of task %d was lost: %s; it will be run again", task.id, why)
