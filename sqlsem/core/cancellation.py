"""Stops running tasks of this process, on cancel requests and at time limits that it reads from the database.

No other client ends a running task. A client that cancels the task records a cancel request, and the task's worker ends
it. So each process reads the requests for all of its tasks by one statement a second, as long as a task runs for longer
than that; short tasks cost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlsem import runtime
from sqlsem.core.claims import Claim, Claims
from sqlsem.core.membership import Membership
from sqlsem.core.threads import ShouldContinue, SupervisedThread, spawn, voice
from sqlsem.errors import SqlsemError
from sqlsem.model import monotonic

__all__ = ["Cancellable", "CancellationMonitor"]

log = voice

#: Seconds between two reads, and the age from which a task is included.
LOOK_SECONDS, LEAST_SECONDS = 1.0, 0.5
#: Seconds that closing a coordinator waits for the thread.
CLOSE_SECONDS = 2.0


class Cancellable(Claim):
    """A claim that can be stopped while it runs.

    Attributes:
        number: Its number in the database.
        began: When it began to run (`monotonic`).
        time_limit: Seconds that it may run; None without a limit, or if the limit is not known yet.
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

    def keep_time(self) -> None:
        """Stop the claim at its time limit; start its ender if that failed before. (For the package.)"""
        if self.why_stopped is not None:
            self._end_by_ender()
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
            self._end_by_ender()

    def ended_by(self, ender: Callable[[], None]) -> None:
        """Set the function that ends a stopped claim, in a thread of its own. Start it now if the claim was stopped
        before. (For the package.)
        """
        self._ender = ender
        if self.why_stopped is not None:
            self._end_by_ender()

    def _end_by_ender(self) -> None:
        ender = self._ender
        if ender is not None:
            try:
                spawn(ender, "sqlsem-end")
            except RuntimeError as exc:  # no more threads: `keep_time` tries again
                log.error("%s cannot be ended now, which is tried again: %s", self.title, exc)
                return
            self._ender = None


class CancellationMonitor:
    """A thread, started with the first task, that stops claims on cancel requests and at time limits."""

    def __init__(self, member: Membership, claims: Claims) -> None:
        self._member = member
        self._claims = claims
        self._wanted = runtime.event()
        self._thread = SupervisedThread("sqlsem-cancellation", self._work, member.closing)

    def watch(self) -> None:
        """Start or wake the thread, as a claim was added."""
        if self._wanted.is_set():
            return
        if not self._member.closing.is_set():
            try:
                self._thread.begin()
            except RuntimeError as exc:  # no more threads, or this process is ending
                log.error("Nobody learns what is asked of running tasks, which is tried again: %s", exc)
            self._wanted.set()

    def close(self) -> None:
        """Wake the thread, which ends as ``closing`` is set, and wait for it."""
        self._wanted.set()
        self._thread.join(CLOSE_SECONDS)

    def _work(self, goes_on: ShouldContinue) -> None:
        # Between two reads no variable here may refer to a claim: a dropped claim is ended only when none does.
        closing = self._member.closing
        looked = monotonic()
        while goes_on():
            self._wanted.wait()
            due = self._due(looked)
            if due is None:
                self._wanted.clear()
                due = self._due(looked)  # a claim that came before `clear` wakes us no more
                if due is None:
                    continue
            look, until = due
            closing.wait(max(0.0, until - monotonic()))
            try:
                if monotonic() >= look:
                    looked = monotonic()
                    self._look(
                        [work for work in self._running() if work.is_open and looked - work.began >= LEAST_SECONDS]
                    )
                self._keep_time()
            except SqlsemError as exc:
                log.debug("What is asked of the running tasks is not known now: %s", exc)
            except Exception:
                log.exception("Looking after the running tasks failed")

    def _keep_time(self) -> None:
        for task in self._running():
            task.keep_time()

    def _due(self, looked: float) -> tuple[float, float] | None:
        """Return the time of the next read, and the time to wake up, for it or a time limit; None without tasks."""
        tasks = self._running()
        if not tasks:
            return None
        look = max(looked + LOOK_SECONDS, min(task.began for task in tasks) + LEAST_SECONDS)
        ends = [task.deadline for task in tasks if task.deadline is not None and task.why_stopped is None]
        return look, min([look, *ends])

    def _running(self) -> list[Cancellable]:
        return [claim for claim in self._claims.all() if isinstance(claim, Cancellable)]

    def _look(self, tasks: list[Cancellable]) -> None:
        known = {task.number: task for task in tasks}
        if not known or self._member.closing.is_set():
            return
        asked = self._member.call("look at what is asked", lambda s, me: s.task_controls(me, list(known)), 0.0)
        for number, limit, by in asked:
            if by is not None:
                known[number].stop(f"cancelled by {by}", cancelled=True)
            elif limit is not None:
                known[number].time_limit = limit
