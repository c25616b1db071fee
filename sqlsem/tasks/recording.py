"""Ends of tasks that could not be recorded at once. The heartbeat records them when the database is back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

from sqlsem.tasks.claim_buffer import TaskEnd
from sqlsem.tasks.claiming import Claiming
from sqlsem.util.printable import first_line
from sqlsem.values.locks import monotonic

__all__ = ["Unrecorded", "log_outcome"]

log = logging.getLogger("sqlsem")


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
