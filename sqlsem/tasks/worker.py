"""Workers: they run the tasks of a queue, in threads of this process.

One of the threads is the claiming thread: it claims a task, runs it, and claims the next one in the call that records
the end. If tasks are short, it claims and ends them in groups that take some 10 ms, and runs them all itself: threads
that share Python's lock and a connection would only delay each other. If a task takes longer, the next thread becomes
the claiming thread and continues with the rest of the group; it also records the ends of the other threads' tasks. If
most tasks are long, the role passes on whenever a task begins. If a claimed task has not begun after 50 ms, as all
threads are busy, a helper thread returns it to the queue. That thread also records ends that wait for 50 ms.

On PostgreSQL one more thread (`Prefetcher`) claims the next group while one runs, and records the ends of the previous
group in the same call. It does so as long as claims return as many tasks as requested. Both groups together take some
10 ms. A task that is claimed alone begins after all earlier ends are recorded. Tasks with locks are never prefetched.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial

from sqlsem.bodies import END_SECONDS, Allowed, Stop, command_killer, format_error, run
from sqlsem.client.held.claims import owner_name
from sqlsem.tasks.claim_buffer import MAX_GROUP_SIZE, ClaimBuffer, ClaimSizer, TaskEnd, Unrecorded, log_outcome
from sqlsem.tasks.prefetch import Prefetcher
from sqlsem.tasks.queues import Queue
from sqlsem.tasks.task import Task
from sqlsem.util.permits import Permit, PermitPool
from sqlsem.util.threads import ShouldContinue, SupervisedThread, call_and_log, restart_ended, spawn
from sqlsem.values.errors import ConfigurationError, SqlsemError, TaskFailed, Unavailable
from sqlsem.values.locks import Duration, check_call, check_count, check_duration, monotonic

log = logging.getLogger("sqlsem")

MAX_THREADS = 1000
#: The pause between two checks whether a group is late.
GROUP_CHECK_SECONDS = 0.01
#: The claiming thread loses its role when one task has taken this long. The thread that waits for the role checks that;
#: the second number is its longest pause between two checks, while each check sees another task.
CLAIMING_SECONDS, MAX_PAUSE_SECONDS = 0.005, 0.02
#: How long `abort` waits for running tasks to end, and the pause after which it stops them again.
ABORT_SECONDS, ABORT_RETRY_SECONDS = 2.5 * END_SECONDS, 0.25
#: How long a worker waits at its end for the heartbeat to record ends that could not be recorded before.
FINAL_WAIT_SECONDS = 1.0
#: The pause between two checks whether the threads have ended: on every system, signal handlers run in between.
JOIN_SECONDS = 0.2


class Worker:
    """Runs the tasks of one queue in threads, until it is stopped or has been idle for ``idle_exit``.

    Args:
        queue: The queue.
        threads: How many tasks run at a time.
        idle_exit: Leave when nothing has run and nothing could be claimed for this time (None: never).
        on_task: Called with (task, outcome, error) when a task starts (outcome None), and when its attempt has ended
            ('finished', 'failed', 'cancelled', 'lost' or 'returned'); from a thread of the worker. An exception of it
            is logged.
        group: Claim and end short tasks in groups. If the worker dies, the tasks of a group run again, up to some
            10 ms of work; without groups only one task does.
        allowed: The kinds of tasks, and the modules, that the worker runs; other tasks fail. Left out, all.
        outlast: Once the worker has reached the database, it waits out any outage. (With ``idle_exit``, up to that
            time.) Otherwise it ends with `Unavailable` after the coordinator's ``retry``.

    Attributes:
        finished: How many tasks the database has recorded as finished.
        failed: How many tasks the database has recorded as failed for good.
        retried: How many attempts have failed and will be followed by another one.
        running: The tasks that run now.

    Outcomes of tasks are logged (logger ``sqlsem``); the database keeps each error with its task.

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
        if not isinstance(queue, Queue):
            raise ConfigurationError(f"A worker works on a sqlsem.queue(…), not on {type(queue).__name__}")
        if on_task is not None:
            check_call("on_task", on_task)
        self.queue = queue
        self._claiming = queue.claiming
        self.threads = check_count("The number of a worker's threads", threads, 1, MAX_THREADS)
        self.idle_exit = None if idle_exit is None else check_duration("idle_exit", idle_exit)
        self.finished = 0
        self.failed = 0
        self.retried = 0
        self.running: set[Task] = set()
        self._on_task = on_task
        self._allowed = allowed
        self._outlast = outlast
        self._reached = False  # True once a call to the database has succeeded
        self._outage_since: float | None = None  # the start of the outage, if there is one
        self._max_size = MAX_GROUP_SIZE if group else 1
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # notified when an attribute below changes
        self._busy = PermitPool()  # a permit for each thread that runs tasks or records ends
        self._buffer = ClaimBuffer()
        self._sizer = ClaimSizer(self._max_size)
        self._prefetcher = Prefetcher(f"{queue.name[:200]}-prefetch", self._prefetch)
        self._prefetch_owner = ""  # the owner's name in prefetched claims: that of the claiming thread
        self._may_have_more = False  # the last claim returned as many as requested, and none is in flight
        self._unrecorded = Unrecorded(self._claiming, self._changed)
        self._stops: dict[int, Stop] = {}  # by task number: the function that ends its command or SQL
        self._calls: dict[int, Stop] = {}  # by task number: the function that interrupts its Python function
        self._claiming_thread: int | None = None
        #: When the claiming thread began its task; inf while it claims, None while it waits for tasks.
        self._task_began: float | None = None
        self._claiming_free = threading.Condition(self._lock)  # notified when there is no claiming thread
        self._successor_lock = threading.Lock()  # held by the thread that will be the next claiming thread
        self._stopping = threading.Event()
        self._aborted = False
        self._ended = threading.Event()
        self._last_active = monotonic()
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Run tasks until stopped, or idle for ``idle_exit``. Raise the error that ended it, if any (`Unavailable`)."""
        with command_killer:  # one reaper process for all commands; started with the first
            self._run()

    def _run(self) -> None:
        self._last_active = monotonic()
        self._sizer = ClaimSizer(self._max_size, prefetch=self._claiming.client.engine.prefetches)
        name = self.queue.name[:200]
        runners = [SupervisedThread(f"{name}-{i + 1}", partial(self._run_tasks, set())) for i in range(self.threads)]
        helper = SupervisedThread(f"{name}-helper", self._return_unstarted, self._ended)
        try:
            for thread in (*runners, helper):
                thread.begin()
            for thread in runners:
                while thread.needed:
                    thread.join(JOIN_SECONDS)
                    restart_ended()
                    if self._stopping.is_set():
                        self._claiming.client.queue_changes.notify()  # here, as `stop` may run in a signal handler
        except BaseException:
            # The process may end right after an interrupt: no task may go on beside its next attempt.
            self.abort()
            raise
        finally:
            self._stopping.set()
            self._ended.set()
            with self._changed:
                self._changed.notify_all()
            self._prefetcher.close(ABORT_SECONDS)
            helper.join(ABORT_SECONDS)  # it may be recording ends
            self._record_remaining()
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """Claim no more tasks; `run` returns when the running ones have ended. Safe in a signal handler."""
        self._stopping.set()

    def abort(self) -> None:
        """End commands and SQL, and return all tasks to the queue. Python code may go on: end the process next."""
        self._stopping.set()
        with self._lock:
            self._aborted = True
            stops = list(self._stops.items())
        # The thread that runs a command or SQL returns the task after that has ended. Returned earlier, it would run
        # beside its next attempt. All are stopped at the same time, as each may take a while.
        for task_id, stop in stops:
            try:
                spawn(partial(self._stop_until_ended, task_id, stop), "sqlsem-end")
            except RuntimeError as exc:  # no more threads: one task after the other
                log.error("No thread to end task %d with; tasks are ended one after the other: %s", task_id, exc)
                self._stop_until_ended(task_id, stop)
        self._flush()
        self._claiming.client.queue_changes.notify()  # wakes the threads that wait for tasks
        with self._changed:
            # Wait until all threads but those in Python code have ended.
            self._changed.wait_for(
                lambda: len(self._busy) <= sum(task.kind == "call" for task in self.running), ABORT_SECONDS
            )
            running = list(self.running)
        for task in running:
            if task.kind != "call":
                log.warning("%r does not end; it is pending again when this process has ended", task)
                continue
            try:
                task.release()
            except SqlsemError as exc:
                log.warning("%r could not be returned to the queue: %s", task, exc)

    def _stop_until_ended(self, task_id: int, stop: Stop, *, call: bool = False) -> None:
        """Call ``stop`` until the task has ended. One call may be too early, e.g. if the SQL is about to be sent.
        (A function gets longer pauses, so that it can clean up without another interrupt.)
        """
        deadline, pause = monotonic() + ABORT_SECONDS, END_SECONDS if call else ABORT_RETRY_SECONDS
        while call or monotonic() < deadline:
            stop()
            with self._changed:
                if self._changed.wait_for(lambda: task_id not in self._stops and task_id not in self._calls, pause):
                    return

    # -- the threads that run tasks -----------------------------------------------------------------------------

    def _run_tasks(self, begun: set[bool], _: ShouldContinue) -> None:
        try:
            if begun:  # a second thread takes the place of one that ended in the middle of a task, with unknown effect
                raise RuntimeError(f"A thread of a worker of {self.queue.name!r} has ended unexpectedly")
            begun.add(True)
            with self._counted_as_busy():
                try:
                    while (task := self._next_task()) is not None:
                        began = monotonic()
                        end = self._perform(task)
                        self._sizer.record_duration(monotonic() - began)
                        self._buffer.add_end(end)
                finally:
                    self._pass_claiming_on()
        except BaseException as exc:
            self._errors.append(exc)
            self._stopping.set()

    def _next_task(self) -> Task | None:
        """Return the next task; None if the calling thread is to end. The caller becomes the claiming thread first."""
        me = threading.get_ident()
        with self._lock:
            if is_claiming := self._claiming_thread == me:
                self._task_began = math.inf
        if not is_claiming:
            if self._buffer.has_any():
                self._claiming.client.queue_changes.notify()  # the claiming thread may be waiting
            self._become_claiming_thread(me)
        while True:
            task = None if self._stopping.is_set() else self._buffer.next_task()
            if task is not None:
                break
            if not self._record_and_claim():
                return None
        if self._may_have_more and not self._prefetcher.in_flight and self._may_prefetch():
            self._may_have_more, self._prefetch_owner = False, owner_name()
            self._prefetcher.start()
        with self._lock:
            self._task_began = monotonic()
            if self._sizer.runs_long_tasks():
                self._claiming_thread = None
                self._claiming_free.notify()
        return task

    def _become_claiming_thread(self, me: int) -> None:
        """Wait until there is no claiming thread, or it has run one task for `CLAIMING_SECONDS`; then take its role."""
        with self._successor_lock, self._claiming_free:
            last_began, pause = None, CLAIMING_SECONDS / 2
            while self._claiming_thread is not None:
                began = self._task_began
                remaining = math.inf if began is None else began + CLAIMING_SECONDS - monotonic()
                if remaining <= 0:
                    break
                # Each check slows the thread that runs short tasks: check less often while the task differs each time.
                pause = min(2 * pause, MAX_PAUSE_SECONDS) if began != last_began else min(remaining, CLAIMING_SECONDS)
                last_began = began
                self._claiming_free.wait(None if began is None else pause)
            self._claiming_thread, self._task_began = me, math.inf

    def _pass_claiming_on(self) -> None:
        with self._claiming_free:
            if self._claiming_thread == threading.get_ident():
                self._claiming_thread = None
                self._claiming_free.notify()

    def _record_and_claim(self) -> bool:
        """In the claiming thread: record ends and claim tasks, waiting if there are none. Return False to end."""
        try:
            if self._prefetcher.wait(lambda: self._buffer.has_next() and not self._stopping.is_set()):
                return True
            if self._stopping.is_set():
                self._end(self._buffer.drain(), 0)
                return False
            if self._buffer.must_record_first():
                self._end(self._buffer.drain(unstarted=False), 0)
            elif not self._buffer.has_any() or not self._exchange(self._sizer.next_size()):
                self._wait_for_task()
        except Unavailable as exc:  # the heartbeat records the ends as soon as it can
            self._handle_outage(exc)
        return True

    def _exchange(self, limit: int, *, prefetch_owner: str | None = None) -> bool:
        """Record ends and claim up to ``limit`` tasks in one call; return True if it claimed any.

        ``prefetch_owner``: the owner's name of a prefetched claim, i.e. of the claiming thread, which runs tasks.
        """
        ends = self._buffer.drain(unstarted=False)
        tasks: list[Task] = []
        try:
            tasks = self._end(ends, limit, prefetch_owner=prefetch_owner)
        finally:
            with self._changed:
                if ends or tasks:
                    self._last_active = monotonic()
                self._may_have_more = 1 < limit == len(tasks)
                if tasks:
                    self._buffer.add(tasks, prefetched=prefetch_owner is not None)
                    self._changed.notify_all()
        return bool(tasks)

    def _may_prefetch(self) -> bool:
        """Return True if the next group may be claimed while one runs. (Not if a check of blocked tasks is due.)"""
        return (
            self._buffer.has_room()
            and self._sizer.may_prefetch()
            and not self._stopping.is_set()
            and not self._claiming.is_blocked_check_due()
        )

    def _prefetch(self) -> bool:
        """In the prefetcher's thread: claim the next group and record ends. Return True to prefetch once more."""
        with self._counted_as_busy():
            if self._stopping.is_set():
                return False
            self._exchange(self._sizer.next_size(), prefetch_owner=self._prefetch_owner)
            if self._aborted:
                self._end(self._buffer.drain(), 0)  # the claiming thread may be in code that does not end
                return False
            self._prefetcher.notify()
            with self._lock:
                began = self._task_began
            # Do not claim tasks that would wait behind a long one.
            waits_or_slow = began is None or monotonic() - began > CLAIMING_SECONDS
            continues = self._may_have_more and not waits_or_slow and self._may_prefetch()
            if continues:
                self._may_have_more = False
            return continues

    def _wait_for_task(self) -> None:
        """Wait for a task. Ends of other threads' tasks are recorded at once."""
        last_active = self._last_active

        def poll() -> bool | None:
            claimed = self._exchange(1)
            self._end_outage()
            # (If anything has happened since, the caller computes a new timeout.)
            return claimed if claimed or self._last_active != last_active else None

        with self._claiming_free:
            self._task_began = None
        try:
            result = self._claiming.poll_until(poll, self._idle_remaining(), stop=self._stopping.is_set)
        finally:
            with self._claiming_free:
                self._task_began = math.inf
                self._claiming_free.notify()
        if not result and self._idle_remaining() == 0:
            if self._claiming.recover(now=True):
                self._last_active = monotonic()  # a worker has died, and its tasks are pending again
            else:
                self._stopping.set()

    def _idle_remaining(self) -> float | None:
        """Return how long to wait for a task, in seconds; None: for ever."""
        if self.idle_exit is None or self.running or self._buffer.has_any():
            return None
        return max(0.0, self._last_active + self.idle_exit - monotonic())

    def _handle_outage(self, exc: Unavailable) -> None:
        """Pause during an outage of the database. Raise ``exc`` if this worker does not wait any longer."""
        now = monotonic()
        with self._lock:
            is_new = self._outage_since is None
            self._outage_since = since = now if self._outage_since is None else self._outage_since
        if not self._outlast or not self._reached or (self.idle_exit is not None and now - since >= self.idle_exit):
            raise exc
        if is_new:
            log.warning("%s; going on as soon as the database is back", exc)
        self._stopping.wait(self._claiming.client.timing.reconnect)

    def _end_outage(self) -> None:
        with self._lock:
            self._reached = True
            since, self._outage_since = self._outage_since, None
            if since is not None:
                self._last_active = monotonic()
        if since is not None:
            log.warning("The database is back, after %.1f s", monotonic() - since)

    @contextlib.contextmanager
    def _counted_as_busy(self) -> Iterator[None]:
        permit = Permit()
        try:
            self._busy.acquire(permit)
            yield
        finally:
            self._busy.release(permit)
            with self._changed:
                self._changed.notify_all()

    def _perform(self, task: Task) -> TaskEnd:
        """Run a task and return how it ended. It is returned unstarted if its claim was lost or the worker aborted."""
        with self._lock:
            if self._aborted or task.why_lost is not None:
                return TaskEnd(task, task.make_end("returned"), begun=False)
            self.running.add(task)
        task.began = monotonic()
        self._call_on_task(task, None, None)
        error = result = None

        def started(stop: Stop) -> None:
            with self._lock:
                aborted = self._aborted
                if not aborted:
                    (self._calls if task.kind == "call" else self._stops)[task.id] = stop
            if aborted:
                raise TaskFailed("The worker was aborted before this task began", code="task")
            # (The callback must not refer to the task: a cycle would keep it until the next garbage collection.)
            task.ended_by(partial(self._stop_until_ended, task.id, stop, call=task.kind == "call"))

        try:
            result = run(task.kind, task.text, self._claiming.client, started=started, allowed=self._allowed)
        except BaseException as exc:
            # A task that calls sys.exit() has failed; it must not end the worker.
            error = format_error(exc)
        with self._changed:
            if (self._stops.pop(task.id, None) or self._calls.pop(task.id, None)) is not None:
                self._changed.notify_all()
            aborted = self._aborted
        if error is None:
            error = task.why_unlocked  # it may have run beside another holder of its lock
        if error is not None and aborted:
            return TaskEnd(task, task.make_end("returned"))  # `abort` may be the reason of the error
        if error is not None and task.why_stopped is not None:
            if task.cancelled:
                return TaskEnd(task, task.make_end("cancelled", error=error))
            why = task.why_stopped[0].upper() + task.why_stopped[1:]
            error = f"{why}, and was ended\n{error}"
        return TaskEnd(task, task.make_end("finished" if error is None else "failed", result, error))

    def _end(self, ends: list[TaskEnd], limit: int, *, prefetch_owner: str | None = None) -> list[Task]:
        """Record and report these ends; claim and return up to ``limit`` tasks in the same call."""
        # (Includes tasks that this process believes lost: the database may still have them as claimed by us.)
        open_ends = [end for end in ends if end.task.is_open]
        claimed: list[Task] = []
        # (`abort` has returned the tasks whose claim is not open.)
        reports: list[tuple[TaskEnd, str | None]] = [(end, None) for end in ends if not end.task.is_open]
        for end in open_ends:
            end.task.ending()
        try:
            if open_ends or limit:
                statuses, claimed = self._claiming.end_and_claim(
                    [end.end for end in open_ends], limit, prefetch_owner=prefetch_owner
                )
                reports += zip(open_ends, statuses, strict=True)
                for end, status in zip(open_ends, statuses, strict=True):
                    end.task.ended_with(status, marks_ended=False)
                self._claiming.client.claims.mark_ended(end.task for end in open_ends)
        except BaseException:
            self._unrecorded.add(open_ends)
            with self._changed:
                self.running.difference_update(end.task for end in open_ends)
            raise
        finally:
            self._report(reports)
        return claimed

    def _report(self, ends: list[tuple[TaskEnd, str | None]]) -> None:
        """Count, log and announce ends, each with its task's recorded status (None: the claim was lost)."""
        if not ends:
            return
        outcomes = [(end, status, end.outcome_for(status)) for end, status in ends]
        with self._changed:
            self._last_active = monotonic()
            for end, status, outcome in outcomes:
                self.running.discard(end.task)
                self.finished += outcome == "finished"
                self.failed += outcome == "failed" and status == "failed"
                self.retried += outcome == "failed" and status == "pending"
            self._changed.notify_all()
        self._claiming.client.queue_changes.notify()
        for end, status, outcome in outcomes:
            log_outcome(self.queue.name, end, status, outcome)
            if end.begun:
                self._call_on_task(end.task, outcome, end.end.error)

    def _call_on_task(self, task: Task, outcome: str | None, error: str | None) -> None:
        if self._on_task is not None:
            call_and_log(f"on_task of a worker of {self.queue.name!r}", self._on_task, task, outcome, error)

    # -- the helper thread --------------------------------------------------------------------------------------

    def _return_unstarted(self, _: ShouldContinue) -> None:
        """Return claimed tasks to the queue while a long task runs. The helper thread's job."""
        while True:
            with self._changed:
                has_work = self._changed.wait_for(
                    lambda: self._ended.is_set() or self._buffer.has_any() or self._unrecorded.answered(),
                    self._claiming.client.timing.maintenance,
                )
            self._report(self._unrecorded.take())
            if not has_work and not self._stopping.is_set():
                self._maintain_queue()
            if self._ended.wait(GROUP_CHECK_SECONDS):
                return
            if self._buffer.is_late():
                self._flush()
            elif not self._prefetcher.in_flight and self._buffer.has_unrecorded():
                self._flush(unstarted=False)  # (a claim in flight is followed by another, which records them)

    def _maintain_queue(self) -> None:
        """Recover tasks of dead workers and put due schedules. (The claiming thread does so if it is not busy.)"""
        try:
            self._claiming.recover()
        except SqlsemError as exc:
            log.info("Maintenance of queue %r will be tried again: %s", self.queue.name, exc)
        except Exception:
            log.exception("Maintenance of queue %r failed", self.queue.name)

    def _record_remaining(self) -> None:
        """Have the heartbeat record the remaining ends, and wait up to `FINAL_WAIT_SECONDS` to report them."""
        self._unrecorded.add([end for end in self._buffer.drain() if end.task.is_open])
        deadline = monotonic() + FINAL_WAIT_SECONDS
        while self._unrecorded.left() and (seconds := deadline - monotonic()) > 0:
            with self._changed:
                self._changed.wait_for(self._unrecorded.answered, seconds)
            self._report(self._unrecorded.take())
        for end in self._unrecorded.left():
            text = "Task %d has %s, which is not recorded yet; the task will run again unless this process records it"
            log.warning(text, end.task.id, end.end.outcome)
            if end.begun:
                self._call_on_task(end.task, "lost", end.end.error)

    def _flush(self, *, unstarted: bool = True) -> None:
        """Record ends; with ``unstarted`` also return the tasks that have not begun to the queue."""
        try:
            with self._counted_as_busy():
                self._end(self._buffer.drain(unstarted=unstarted), 0)
        except Exception as exc:
            text = "Ends of tasks of %r will be recorded when the database can be reached again: %s"
            log.warning(text, self.queue.name, exc, exc_info=not isinstance(exc, SqlsemError))
