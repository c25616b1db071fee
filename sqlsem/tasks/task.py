"""A task that was claimed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

from sqlsem.bodies import as_json, format_error
from sqlsem.core.minder import Stoppable
from sqlsem.core.process import Process
from sqlsem.model import Claimed, End, monotonic

__all__ = ["Task", "remember_ends"]


class Task(Stoppable):
    """A claimed task. Leave its ``with`` block well and it is finished; with an error, and it has failed.

    Attributes:
        id: Its number.
        kind: ``'sql'``, ``'shell'``, ``'call'`` or ``'json'``.
        body: The value that was put (for ``json``), or the text.
        order, note: As put.
        attempt: How often it has been claimed, this time included.
        result: Set it to any JSON value to have it kept in the log.
        stop_event: Set when somebody has cancelled it, or its time is up: leave the block soon.
        why_stopped: Why that is, in words.

    An `Exception` out of the block ends the attempt as failed (tried again as ``max_attempts`` says) and goes on to the
    caller; a ``KeyboardInterrupt`` and its like give the task back at once. Raises `LockLost` on leaving the block when
    the claim was lost meanwhile: the task is or will be run by somebody else.
    """

    can_be_lost: ClassVar[bool] = True

    def __init__(self, process: Process, queue: str, claimed: Claimed, uid: str) -> None:
        self._process = process
        self._queue = queue
        self._uid = uid  # of the call that claimed it
        self.lost_event = threading.Event()  # set when the claim is lost
        self.stop_event = threading.Event()  # set when it was cancelled, or its time is up
        self.id = self.number = claimed.task_id
        self.title = f"Task {self.id}"
        self.kind = claimed.kind
        self.order = claimed.order
        self.note = claimed.note
        self.attempt = claimed.attempt
        self.text = claimed.body
        self.began = monotonic()
        self.result: Any = None
        returned = self.make_end("returned")
        self.opened(process.claims, lambda session, me: session.end_task(me, returned))
        process.minder.mind()

    @property
    def body(self) -> Any:
        """The value that was put, or the text of what a worker runs."""
        return json.loads(self.text) if self.kind == "json" else self.text

    @property
    def ended(self) -> bool:
        """Whether the attempt was ended, or lost."""
        return self.lost or not self.is_open

    def lose(self, why: str) -> None:
        super().lose(why)
        self.lost_event.set()

    def make_end(self, outcome: str, result: str | None = None, error: str | None = None) -> End:
        """An end of this attempt. (For the package.)"""
        return End(self.id, self.attempt, outcome, result, error)

    def finish(self, result: Any = None) -> None:
        """End the attempt well. Raises `LockLost` when the claim was lost, `NotHeld` when it was ended before."""
        self._end_with(self.make_end("finished", None if result is None else as_json(result)))

    def fail(self, error: BaseException | str) -> None:
        """End the attempt as failed; as cancelled, when somebody has cancelled it. Errors as for `finish`."""
        self._end_with(self.make_end("cancelled" if self.cancelled else "failed", error=format_error(error)))

    def give_back(self) -> None:
        """End the attempt as if it had never been: the task is pending at once. Errors as for `finish`."""
        self._end_with(self.make_end("returned"))

    def _end_with(self, end: End) -> None:
        if self.lost:
            self.leave()
        self.require_open()
        process = self._process
        try:
            status = self.end_by(
                "end of a task",
                lambda session, me: session.end_task(me, end),
                budget=process.member.seconds_left(),
            )
        finally:
            process.bell.notify()
        remember_ends(process, [end])
        self.ended_with(status)
        if self.lost:
            self.require_open()

    def ended_with(self, status: str | None) -> None:
        """Its end has got this answer. (For the package.)"""
        if status is None:
            self.lose("this process was given up meanwhile")
        if self.is_open:
            self.settle()

    def _succeed(self) -> None:
        self.finish(self.result)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.fail(error)
        else:
            self.give_back()

    def __repr__(self) -> str:
        return f"<{self.title} of {self._queue!r}, attempt {self.attempt}{', lost' if self.lost else ''}>"


def remember_ends(process: Process, ends: Iterable[End]) -> None:
    """A server that takes over, or is restored, may have forgotten them."""
    process.recent_ends.extend((monotonic(), end) for end in ends)
