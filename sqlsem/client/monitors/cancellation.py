"""Stops running tasks of this process, on cancel requests and at time limits that it reads from the database.

Only the worker that runs a task ends it; another client that cancels the task records a cancel request. So each process
reads the cancel requests for all of its tasks by one statement a second, while a task has run for half a second or
longer. Shorter tasks cost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlsem.client.held.claims import Claim, Claims
from sqlsem.util import runtime
from sqlsem.util.threads import ShouldContinue, SupervisedThread, log, spawn
from sqlsem.values.errors import SqlsemError
from sqlsem.values.locks import monotonic

if TYPE_CHECKING:
    from sqlsem.client.connection.membership import Membership

__all__ = ["Cancellable", "CancellationMonitor"]

#: Seconds that closing a coordinator waits for the thread.
CLOSE_SECONDS = 2.0


class Cancellable(Claim):
    """A claim that can be stopped while it runs.

    Attributes:
        number: Its number in the database.
        began: When it began to run (`monotonic`).
        time_limit: Seconds that it may run; None without a limit, or before the limit was read.
        why_stopped: Why it must stop; None if it need not.
        cancelled: True if a cancel request stopped it.
    """

    number: int
    began: float
    time_limit: float | None = None
    why_stopped: str | None = None
    cancelled = False
    _stop_event: threading.Event | None = None
    _ender: Callable[[], None] | None = None

    @property
    def deadline(self) -> float | None:
        """The time (`monotonic`) at which it reaches its time limit; None without one."""
        return None if self.time_limit is None else self.began + self.time_limit

    @property
    def stop_event(self) -> threading.Event:
        """An event that is set when the claim must stop, as it was cancelled or has reached its time limit."""
        event = self._stop_event
        if event is None:  # made on first use, as most tasks are short
            event = self.__dict__.setdefault("_stop_event", threading.Event())  # the same event for all threads
            if self.why_stopped is not None:  # read after the event is stored; `stop` uses the reverse order
                event.set()
        return event

    def enforce_time_limit(self) -> None:
        """Stop the claim at its time limit. If its ender could not be started before, start it. (For the package.)"""
        if self.why_stopped is not None:
            self._start_ender()
        elif self.deadline is not None and monotonic() >= self.deadline:
            self.stop(f"it ran for longer than its time limit of {self.time_limit:g} s")

    def stop(self, why: str, *, cancelled: bool = False) -> None:
        """Stop the claim, unless it was stopped before or has ended. (For the package.)"""
        if self.why_stopped is None and self.is_open:
            self.cancelled = cancelled
            self.why_stopped = why
            if self._stop_event is not None:
                self._stop_event.set()
            log.info("%s is to stop: %s", self.title, why)
            self._start_ender()

    def ended_by(self, ender: Callable[[], None]) -> None:
        """Set the function that ends a stopped claim in a thread, and start it if due. (For the package.)"""
        self._ender = ender
        if self.why_stopped is not None:
            self._start_ender()

    def _start_ender(self) -> None:
        ender = self._ender
        if ender is not None:
            try:
                spawn(ender, "sqlsem-end")
            except RuntimeError as exc:  # no more threads: `enforce_time_limit` tries again
                log.error("%s: cannot start the thread that ends it, retrying: %s", self.title, exc)
                return
            self._ender = None


class CancellationMonitor:
    """A thread, started with the first task, that stops claims on cancel requests and at time limits."""

    def __init__(self, member: Membership, claims: Claims) -> None:
        self._member = member
        self._claims = claims
        self._needed = runtime.event()
        self._thread = SupervisedThread("sqlsem-cancellation", self._work, member.closing)

    def watch(self) -> None:
        """Start or wake the thread, as a claim was added."""
        if self._needed.is_set():
            return
        if not self._member.closing.is_set():
            try:
                self._thread.begin()
            except RuntimeError as exc:  # no more threads, or this process is ending
                log.error("Cannot start the thread that reads cancel requests of running tasks, retrying: %s", exc)
            self._needed.set()

    def close(self) -> None:
        """Wake the thread, which ends as ``closing`` is set, and wait for it."""
        self._needed.set()
        self._thread.join(CLOSE_SECONDS)

    def _work(self, should_continue: ShouldContinue) -> None:
        # Between two reads no variable here may refer to a claim: it would keep a dropped claim from being finalized.
        closing = self._member.closing
        last_read = monotonic()
        while should_continue():
            self._needed.wait()
            due = self._due(last_read)
            if due is None:
                self._needed.clear()
                due = self._due(last_read)  # `clear` undid the wakeup of a claim that came just before it
                if due is None:
                    continue
            next_read, wake_at = due
            closing.wait(max(0.0, wake_at - monotonic()))
            try:
                if monotonic() >= next_read:
                    last_read = monotonic()
                    began_by = last_read - self._member.timing.uncancelled_run
                    self._read_requests([task for task in self._running() if task.is_open and task.began <= began_by])
                self._enforce_time_limits()
            except SqlsemError as exc:
                log.debug("Cannot read cancel requests and time limits of running tasks: %s", exc)
            except Exception:
                log.exception("Stopping running tasks on requests and at time limits failed")

    def _enforce_time_limits(self) -> None:
        for task in self._running():
            task.enforce_time_limit()

    def _due(self, last_read: float) -> tuple[float, float] | None:
        """Return the time of the next read, and the time to wake up: then, or at a time limit. None without tasks."""
        tasks = self._running()
        if not tasks:
            return None
        timing = self._member.timing
        first_due = min(task.began for task in tasks) + timing.uncancelled_run
        next_read = max(last_read + timing.cancellation_check, first_due)
        deadlines = [task.deadline for task in tasks if task.deadline is not None and task.why_stopped is None]
        return next_read, min([next_read, *deadlines])

    def _running(self) -> list[Cancellable]:
        return [claim for claim in self._claims.all() if isinstance(claim, Cancellable)]

    def _read_requests(self, tasks: list[Cancellable]) -> None:
        by_number = {task.number: task for task in tasks}
        if not by_number or self._member.closing.is_set():
            return
        controls = self._member.main.call(
            "read cancel requests", lambda session, me: session.task_controls(me, list(by_number)), 0.0
        )
        for number, limit, cancelled_by in controls:
            if cancelled_by is not None:
                by_number[number].stop(f"cancelled by {cancelled_by}", cancelled=True)
            elif limit is not None:
                by_number[number].time_limit = limit
