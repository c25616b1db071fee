"""Ends of tasks that could not be recorded when they came: what becomes of them is known when the database is back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

from sqlsem.model import monotonic
from sqlsem.printable import first_line
from sqlsem.tasks.claiming import Claiming
from sqlsem.tasks.groups import TaskEnd

__all__ = ["Unrecorded", "log_outcome"]

log = logging.getLogger("sqlsem")


class Unrecorded:
    """Ends that the heartbeat records as soon as it can. Their worker waits for the answers, on its own condition."""

    def __init__(self, claiming: Claiming, changed: threading.Condition) -> None:
        self._claiming = claiming
        self._changed = changed
        self._left: list[TaskEnd] = []
        self._answers: list[tuple[TaskEnd, str | None]] = []

    def add(self, ends: Sequence[TaskEnd]) -> None:
        """Have these recorded. They are no longer the worker's to end."""
        if ends:
            with self._changed:
                self._left += ends
                self._changed.notify_all()
            self._claiming.end_later([end.end for end in ends], partial(self._answer, ends))
            self._claiming.process.claims.settle(end.task for end in ends)

    def _answer(self, ends: Sequence[TaskEnd], statuses: Sequence[str | None]) -> None:
        """Called by the heartbeat, perhaps twice; a thread of the worker tells of it."""
        with self._changed:
            self._answers += zip(ends, statuses, strict=True)
            self._changed.notify_all()

    def answered(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._answers)

    def take(self) -> list[tuple[TaskEnd, str | None]]:
        """Return what has been recorded since, with the status of each task; None: the attempt was taken away."""
        known: dict[int, tuple[TaskEnd, str | None]] = {}
        with self._changed:
            if self._answers:
                known = {id(one.task): (one, status) for one, status in self._answers if one in self._left}
                self._left = [one for one in self._left if id(one.task) not in known]
                self._answers = []
        for one, status in known.values():
            one.task.ended_with(status, settles=False)
        return list(known.values())

    def left(self) -> list[TaskEnd]:
        """Return those of which nothing is known."""
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
        log.warning("The claim of task %d was lost: %s; it will be run by somebody else", task.id, why)
