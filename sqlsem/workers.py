"""Workers: they carry out the tasks of a queue, in threads of this process.

A thread claims one task, runs it, and claims the next in the call that ends it. When tasks turn out to be short it
claims and ends them in groups, as many as take some 10 ms. None is kept from other workers for much longer than that:
when one of a group takes long after all, another thread ends what is done and gives back what has not begun.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlsem.bodies import PATIENCE, Allowed, Stop, run, told
from sqlsem.errors import ConfigurationError, SqlsemError, TaskFailed, Unavailable
from sqlsem.model import Duration, End, check_duration, monotonic

if TYPE_CHECKING:
    from sqlsem.tasks import Queue, Task

__all__ = ["Worker"]

log = logging.getLogger("sqlsem")

#: Seconds that a group of tasks shall take, and how many they are at the most.
SPAN, MOST = 0.01, 100
#: Seconds after which a group is late: it keeps what runs, and no more. And between two looks at that.
LATE, TICK = 0.05, 0.01
#: Seconds that an idle thread looks for a task before the next one does.
LOOK = 0.5
#: Seconds between two attempts to reach a database that is away, each of which takes its time.
AWAY = 0.5
#: Seconds for what runs to end when it is aborted, and after which it is told again.
ABORTING, AGAIN = 2.5 * PATIENCE, 0.25


class Worker:
    """Carries out the tasks of one queue in so many threads, until it is stopped or has been idle for long enough.

    Args:
        queue: The queue.
        threads: How many tasks run at a time.
        idle_exit: Leave when nothing could be claimed for so long while nothing ran (None: never).
        on_task: Called with (task, outcome, error) when a task starts (outcome None), and when its attempt has ended
            ('finished', 'failed', 'lost' or 'returned'); from a thread of the worker. What it raises is logged.
        group: Whether short tasks are claimed and ended in groups. What a worker that dies has done of a group is done
            again, up to some 10 ms of work; without groups it is one task.
        allowed: What it carries out; other tasks fail. Left out, everything.
        outlast: Once it has reached the database, go on trying when that is away, for however long. (With
            ``idle_exit``, for so long.) Otherwise it ends with `Unavailable` after the coordinator's ``retry``.

    What tasks do is logged (logger ``sqlsem``); errors are kept with the task.

    >>> sqlsem.tasks.Worker(sqlsem.queue("nightly"), threads=4, idle_exit=30).run()  # doctest: +SKIP
    """

    def __init__(
        self,
        queue: Queue,
        threads: int = 1,
        *,
        idle_exit: Duration | None = None,
        on_task: Callable[[Task, str | None, str | None], None] | None = None,
        group: bool = True,
        allowed: Allowed | None = None,
        outlast: bool = False,
    ) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1000:
            raise ConfigurationError(f"A worker has from 1 to 1000 threads, not {threads!r}")
        self.queue = queue
        self.threads = threads
        self.idle_exit = None if idle_exit is None else check_duration("idle_exit", idle_exit)
        self.finished = 0
        self.failed = 0
        self.running: set[Task] = set()
        self._on_task = on_task
        self._allowed = allowed
        self._outlast = outlast
        self._reached = False  # the database, ever
        self._away: float | None = None  # since when it has been out of reach
        self._most = MOST if group else 1
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who wait for what follows
        self._busy = 0  # threads that have not left, or record what was done
        self._groups: set[_Group] = set()  # each thread's, if it has one
        self._stops: dict[int, Stop] = {}  # by task
        self._turnstile = threading.Lock()  # one idle thread looks for all
        self._stopping = threading.Event()
        self._aborted = False
        self._over = threading.Event()
        self._active = monotonic()
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Work. Returns when stopped, or idle for long enough; raises what ended it otherwise (`Unavailable`)."""
        self._active = monotonic()
        name = self.queue.name[:200]
        crew = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(1, self.threads + 1)
        ]
        relief = threading.Thread(target=self._relieve, name=f"{name}-relief", daemon=True)
        try:
            for thread in (*crew, relief):
                thread.start()
            for thread in crew:
                while thread.is_alive():
                    thread.join(0.2)  # bounded, so that signal handlers run on every system
        except BaseException:
            # Whoever interrupts us may end the process next: what runs must not go on beside its next attempt.
            self.abort()
            raise
        finally:
            self._stopping.set()
            self._over.set()
            with self._changed:
                self._changed.notify_all()
            if relief.is_alive():  # it may be recording what was done
                relief.join(ABORTING)
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """Claim nothing more; `run` returns when what runs has ended. May be called from a signal handler."""
        self._stopping.set()

    def abort(self) -> None:
        """End commands and SQL, and give everything back. Python code cannot be ended: end the process next."""
        self._stopping.set()
        with self._lock:
            self._aborted = True
            stops, groups = list(self._stops.items()), list(self._groups)
        # A command or SQL is given back by its own thread when it has ended, lest it run on beside its next attempt; or
        # finished, if that was quicker. All at once, as each may take its time.
        for task_id, stop in stops:
            threading.Thread(target=self._insist, args=(task_id, stop), name="sqlsem-end", daemon=True).start()
        for group in groups:
            self._lighten(group)
        self.queue.process.bell.notify()  # for those who wait for tasks
        with self._changed:
            # All threads leave, but those in Python code.
            self._changed.wait_for(lambda: self._busy <= sum(task.kind == "call" for task in self.running), ABORTING)
            running = list(self.running)
        for task in running:
            if task.kind != "call":
                log.warning("%r does not end; it is given back when this process has ended", task)
                continue
            try:
                task.give_back()
            except SqlsemError as exc:
                log.warning("%r could not be given back: %s", task, exc)

    def _insist(self, task_id: int, stop: Stop) -> None:
        """Thread: end what runs. Once may be too early, as for SQL that is about to be sent."""
        until = monotonic() + ABORTING
        while monotonic() < until:
            stop()
            with self._changed:
                if self._changed.wait_for(lambda: task_id not in self._stops, AGAIN):
                    return

    # -- the crew -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pace = _Pace(self._most)
        group: _Group | None = None
        try:
            with self._at_work():
                while True:
                    group = group or self._wait()
                    if group is None:
                        return
                    while not self._stopping.is_set() and (task := group.begin()) is not None:
                        began = monotonic()
                        group.done(self._perform(task))
                        pace.took(monotonic() - began)
                    try:
                        group = self._follow(group, pace)
                    except Unavailable as exc:  # what was done ends as soon as that can be
                        self._require_patience(exc)
                        group = None
        except BaseException as exc:
            self._errors.append(exc)
            self._stopping.set()

    def _require_patience(self, exc: Unavailable) -> None:
        """The database is away. Wait a moment, or raise when that was long enough."""
        now = monotonic()
        with self._lock:
            first = self._away is None
            self._away = since = now if self._away is None else self._away
        if not self._outlast or not self._reached or (self.idle_exit is not None and now - since >= self.idle_exit):
            raise exc
        if first:
            log.warning("%s; going on as soon as the database is back", exc)
        self._stopping.wait(AWAY)

    def _is_back(self) -> None:
        with self._lock:
            self._reached = True
            since, self._away = self._away, None
            if since is not None:
                self._active = monotonic()
        if since is not None:
            log.warning("The database is back, after %.1f s", monotonic() - since)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _wait(self) -> _Group | None:
        while not self._stopping.is_set():
            with self._turnstile:
                if self._stopping.is_set():
                    break
                try:
                    task = self.queue._wait_for_one(LOOK, self._stopping)
                    if task is None and self._is_idle() and self.queue._recover(now=True):
                        self._active = monotonic()  # somebody has died and left something to be done
                        continue
                except Unavailable as exc:
                    self._require_patience(exc)
                    continue
                self._is_back()
                with self._lock:
                    if task is not None:
                        group = _Group([task])
                        self._groups.add(group)
                        return group
                    if self._groups:
                        self._active = monotonic()
                    elif self._is_idle():
                        self._stopping.set()
        return None

    def _is_idle(self) -> bool:
        """Whether it has been idle for long enough to leave."""
        return self.idle_exit is not None and not self._groups and monotonic() - self._active >= self.idle_exit

    def _perform(self, task: Task) -> _Attempt:
        """Run a task, unless it is too late for that."""
        with self._lock:
            if self._aborted or task.lost:
                return _Attempt(task, End(task.id, task.attempt, "returned"), begun=False)
            self.running.add(task)
        task.began = monotonic()
        self._tell(task, None, None)
        error = result = None

        def started(stop: Stop) -> None:
            with self._lock:
                if not self._aborted:
                    self._stops[task.id] = stop
                    return
            raise TaskFailed("The worker was told to give everything back before this began")

        try:
            result = run(task.kind, task.text, self.queue.process, started=started, allowed=self._allowed)
        except BaseException as exc:
            # A task that calls sys.exit() has failed, too, and must not end the worker.
            error = told(exc)
        with self._changed:
            if self._stops.pop(task.id, None) is not None:
                self._changed.notify_all()
            aborted = self._aborted
        if error is not None and aborted:
            return _Attempt(task, End(task.id, task.attempt, "returned"))  # by abort, which may be why it failed
        return _Attempt(task, End(task.id, task.attempt, "finished" if error is None else "failed", result, error))

    def _follow(self, group: _Group, pace: _Pace) -> _Group | None:
        """End what a thread had, and claim what it does next in the same call; None when there is none at once."""
        following: list[Task] = []
        try:
            following = self._end(group.take(), 0 if self._stopping.is_set() else pace.most())
        finally:
            with self._changed:
                self._groups.discard(group)
                self._active = monotonic()
                if following:
                    group = _Group(following)
                    self._groups.add(group)
                    self._changed.notify_all()
        return group if following else None

    def _end(self, attempts: list[_Attempt], most: int) -> list[Task]:
        """Record how these have ended, tell of it, and claim up to ``most`` in the same call."""
        for one in attempts:
            one.task._drop_lost()
        ours = [one for one in attempts if not one.task._ended]
        lost = [one for one in attempts if one.task._ended]  # or given back by abort
        following: list[Task] = []
        try:
            if ours or most:
                statuses, following = self.queue._next([one.end for one in ours], most)
                for one, status in zip(ours, statuses, strict=True):
                    one.task._ended_as(status)
        except BaseException:
            for one in ours:
                one.task._settle()
            raise
        finally:
            known = [(one, "lost" if one.task.lost else one.end.outcome) for one in ours]
            self._conclude(known + [(one, "lost") for one in lost])
        return following

    def _conclude(self, attempts: list[tuple[_Attempt, str]]) -> None:
        """Tell what has become of attempts."""
        with self._changed:
            for one, outcome in attempts:
                self.running.discard(one.task)
                self.finished += outcome == "finished"
                self.failed += outcome == "failed"
            self._changed.notify_all()
        if attempts:
            self.queue.process.bell.notify()
        for one, outcome in attempts:
            task, error = one.task, one.end.error
            if outcome == "failed" and error is not None:
                lasted, why = monotonic() - task.began, error.partition("\n")[0]
                log.warning("Task %d of %r failed after %.1f s: %s", task.id, self.queue.name, lasted, why)
            elif outcome == "lost":
                why = task._why_lost or "it was given back"
                log.warning("The claim of task %d was lost: %s; it will be run by somebody else", task.id, why)
            if one.begun:
                self._tell(task, outcome, error)

    def _tell(self, task: Task, outcome: str | None, error: str | None) -> None:
        if self._on_task is not None:
            try:
                self._on_task(task, outcome, error)
            except Exception:
                log.exception("on_task of a worker of %r failed", self.queue.name)

    # -- the relief ---------------------------------------------------------------------------------------------

    def _relieve(self) -> None:
        """Thread: a task that takes long must not keep those that were claimed with it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over.is_set() or any(group.keeps() for group in self._groups))
            if self._over.wait(TICK):
                return
            with self._lock:
                late = [group for group in self._groups if group.keeps() and monotonic() - group.since > LATE]
            for group in late:
                self._lighten(group)

    def _lighten(self, group: _Group) -> None:
        """End what of a group is done, and give back what has not begun."""
        try:
            with self._at_work():
                self._end(group.take(), 0)
        except Exception as exc:
            later = "Tasks of %r end when the database can be reached again: %s"
            log.warning(later, self.queue.name, exc, exc_info=not isinstance(exc, SqlsemError))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A task, and how it ended."""

    task: Task
    end: End
    begun: bool = True


class _Group:
    """Tasks that were claimed together: those that have not begun, and those that are done but not recorded as such."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.since = monotonic()
        self._lock = threading.Lock()
        self._ahead = deque(tasks)
        self._done: list[_Attempt] = []

    def begin(self) -> Task | None:
        """The next task, for the thread that asks."""
        with self._lock:
            return self._ahead.popleft() if self._ahead else None

    def done(self, attempt: _Attempt) -> None:
        """A task that was begun has ended so."""
        with self._lock:
            self._done.append(attempt)

    def keeps(self) -> bool:
        """Whether there is anything to `take`."""
        return bool(self._ahead or self._done)

    def take(self) -> list[_Attempt]:
        """Everything but what runs, for the thread that asks: it records what was done, and returns what was not."""
        with self._lock:
            done, self._done = self._done, []
            ahead, self._ahead = self._ahead, deque()
        return done + [_Attempt(task, End(task.id, task.attempt, "returned"), begun=False) for task in ahead]


class _Pace:
    """How many tasks a thread may claim at a time: as many as take `SPAN` seconds, as far as the last ones tell."""

    def __init__(self, most: int) -> None:
        self._limit = most
        self._last = 1
        self._mean: float | None = None

    def took(self, seconds: float) -> None:
        """A task has taken so long."""
        if self._mean is None or seconds > LATE:
            self._mean = seconds
        else:
            # One that had to wait for Python's lock says little.
            self._mean += (min(seconds, max(4 * self._mean, SPAN / 10)) - self._mean) / 8

    def most(self) -> int:
        """Never more than twice as many as the last time."""
        fitting = self._limit if not self._mean else int(SPAN / self._mean)
        self._last = max(1, min(fitting, self._limit, 2 * self._last))
        return self._last
