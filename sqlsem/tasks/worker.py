"""Workers: they carry out the tasks of a queue, in threads of this process.

A thread claims one task, runs it, and claims the next in the call that ends it. When tasks turn out to be short it
claims and ends them in groups, as many as take some 10 ms. None is kept from other workers for much longer than that:
when one of a group takes long after all, another thread ends what is done and gives back what has not begun.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from sqlsem.bodies import END_SECONDS, Allowed, Stop, format_error, run
from sqlsem.errors import SqlsemError, TaskFailed, Unavailable
from sqlsem.model import Duration, check_count, check_duration, monotonic
from sqlsem.printable import first_line
from sqlsem.tasks.groups import GROUP_LATE_SECONDS, MOST_IN_GROUP, Group, Pace, TaskEnd
from sqlsem.tasks.queues import Queue
from sqlsem.tasks.task import Task

__all__ = ["Worker"]

log = logging.getLogger("sqlsem")

MOST_THREADS = 1000
#: Between two looks at groups that may be late.
GROUP_LOOK_SECONDS = 0.01
#: For how long an idle thread looks for a task before the next one does.
TURN_SECONDS = 0.5
#: Between two attempts to reach a database that is away, each of which takes its time.
AWAY_SECONDS = 0.5
#: For what runs to end when it is aborted, and after which it is told again.
ABORT_SECONDS, ABORT_AGAIN_SECONDS = 2.5 * END_SECONDS, 0.25
#: Between two looks, for anyone who waits for the threads: signal handlers run on every system.
JOIN_SECONDS = 0.2


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
        self.queue = queue
        self._claiming = queue.claiming
        self.threads = check_count("The number of a worker's threads", threads, 1, MOST_THREADS)
        self.idle_exit = None if idle_exit is None else check_duration("idle_exit", idle_exit)
        self.finished = 0
        self.failed = 0
        self.running: set[Task] = set()
        self._on_task = on_task
        self._allowed = allowed
        self._outlast = outlast
        self._reached = False  # the database, ever
        self._away: float | None = None  # since when it has been out of reach
        self._most = MOST_IN_GROUP if group else 1
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who wait for what follows
        self._busy = 0  # threads that have not left, or record what was done
        self._groups: set[Group] = set()  # each thread's, if it has one
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
                    thread.join(JOIN_SECONDS)
        except BaseException:
            # Anyone who interrupts us may end the process next: what runs must not go on beside its next attempt.
            self.abort()
            raise
        finally:
            self._stopping.set()
            self._over.set()
            with self._changed:
                self._changed.notify_all()
            if relief.is_alive():  # it may be recording what was done
                relief.join(ABORT_SECONDS)
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
        # The thread that runs a command or SQL gives it back when it has ended (or finishes it, if that came first):
        # given back earlier, it would run on beside its next attempt. All are told at once, as each may take a while.
        for task_id, stop in stops:
            threading.Thread(target=self._insist, args=(task_id, stop), name="sqlsem-end", daemon=True).start()
        for group in groups:
            self._lighten(group)
        self._claiming.process.bell.notify()  # for those who wait for tasks
        with self._changed:
            # All threads leave, but those in Python code.
            self._changed.wait_for(
                lambda: self._busy <= sum(task.kind == "call" for task in self.running), ABORT_SECONDS
            )
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
        until = monotonic() + ABORT_SECONDS
        while monotonic() < until:
            stop()
            with self._changed:
                if self._changed.wait_for(lambda: task_id not in self._stops, ABORT_AGAIN_SECONDS):
                    return

    # -- the crew -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pace = Pace(self._most)
        group: Group | None = None
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
        self._stopping.wait(AWAY_SECONDS)

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

    def _wait(self) -> Group | None:
        while not self._stopping.is_set():
            with self._turnstile:
                if self._stopping.is_set():
                    break
                try:
                    task = self._claiming.wait_for_task(TURN_SECONDS, self._stopping)
                    if task is None and self._is_idle() and self._claiming.recover(now=True):
                        self._active = monotonic()  # somebody has died and left something to be done
                        continue
                except Unavailable as exc:
                    self._require_patience(exc)
                    continue
                self._is_back()
                with self._lock:
                    if task is not None:
                        group = Group([task])
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

    def _perform(self, task: Task) -> TaskEnd:
        """Run a task, unless it is too late for that."""
        with self._lock:
            if self._aborted or task.lost:
                return TaskEnd(task, task.make_end("returned"), begun=False)
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
            result = run(task.kind, task.text, self._claiming.process, started=started, allowed=self._allowed)
        except BaseException as exc:
            # A task that calls sys.exit() has failed, too, and must not end the worker.
            error = format_error(exc)
        with self._changed:
            if self._stops.pop(task.id, None) is not None:
                self._changed.notify_all()
            aborted = self._aborted
        if error is not None and aborted:
            return TaskEnd(task, task.make_end("returned"))  # by abort, which may be why it failed
        return TaskEnd(task, task.make_end("finished" if error is None else "failed", result, error))

    def _follow(self, group: Group, pace: Pace) -> Group | None:
        """End what a thread had, and claim what it does next in the same call; None when there is none at once."""
        following: list[Task] = []
        try:
            following = self._end(group.take(), 0 if self._stopping.is_set() else pace.most())
        finally:
            with self._changed:
                self._groups.discard(group)
                self._active = monotonic()
                if following:
                    group = Group(following)
                    self._groups.add(group)
                    self._changed.notify_all()
        return group if following else None

    def _end(self, ends: list[TaskEnd], most: int) -> list[Task]:
        """Record how these have ended, tell of it, and claim up to ``most`` in the same call."""
        for one in ends:
            if one.task.lost:
                one.task.leave()
        ours = [one for one in ends if one.task.is_open]
        lost = [one for one in ends if not one.task.is_open]  # or given back by abort
        following: list[Task] = []
        try:
            if ours or most:
                statuses, following = self._claiming.end_and_claim([one.end for one in ours], most)
                for one, status in zip(ours, statuses, strict=True):
                    one.task.ended_with(status)
        except BaseException:
            for one in ours:
                one.task.settle()
            raise
        finally:
            known = [(one, "lost" if one.task.lost else one.end.outcome) for one in ours]
            self._conclude(known + [(one, "lost") for one in lost])
        return following

    def _conclude(self, ends: list[tuple[TaskEnd, str]]) -> None:
        """Tell what has become of tasks."""
        with self._changed:
            for one, outcome in ends:
                self.running.discard(one.task)
                self.finished += outcome == "finished"
                self.failed += outcome == "failed"
            self._changed.notify_all()
        if ends:
            self._claiming.process.bell.notify()
        for one, outcome in ends:
            task, error = one.task, one.end.error
            if outcome == "failed" and error is not None:
                lasted, why = monotonic() - task.began, first_line(error)
                log.warning("Task %d of %r failed after %.1f s: %s", task.id, self.queue.name, lasted, why)
            elif outcome == "lost":
                why = task.why_lost or "it was given back"
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
            if self._over.wait(GROUP_LOOK_SECONDS):
                return
            with self._lock:
                late = [
                    group for group in self._groups if group.keeps() and monotonic() - group.since > GROUP_LATE_SECONDS
                ]
            for group in late:
                self._lighten(group)

    def _lighten(self, group: Group) -> None:
        """End what of a group is done, and give back what has not begun."""
        try:
            with self._at_work():
                self._end(group.take(), 0)
        except Exception as exc:
            later = "Tasks of %r end when the database can be reached again: %s"
            log.warning(later, self.queue.name, exc, exc_info=not isinstance(exc, SqlsemError))
