"""Workers: they carry out the tasks of a queue, in threads of this process.

One thread leads: it claims a task, runs it, and claims the next in the call that ends it. When tasks turn out to be
short it claims and ends them in groups, as many as take some 10 ms, and runs them alone: threads that share Python's
lock, and a connection, would only hold each other up. When a task takes longer, the next thread takes the lead, and
goes on with what is left of the group; who leads records what others have done. Where most tasks are long the lead is
handed on as soon as one begins. Nothing is kept from other workers for much longer than those 10 ms: what has not begun
after 50 ms, as all threads are busy, is given back by one more thread, which also ends what is done.

On PostgreSQL another thread claims the next group while one is run, and ends the group before it in the same call: for
as long as claims find as many as they ask for. Both together take those 10 ms. What is claimed alone begins when all
before it is recorded, and what has locks is never claimed ahead.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial

from sqlsem.bodies import END_SECONDS, Allowed, Stop, format_error, guarded, run
from sqlsem.core.claims import owner_name
from sqlsem.core.places import Places, Token
from sqlsem.core.threads import GoesOn, Kept, call_out, spawn, tend
from sqlsem.errors import ConfigurationError, SqlsemError, TaskFailed, Unavailable
from sqlsem.model import Duration, check_call, check_count, check_duration, monotonic
from sqlsem.tasks.ahead import Ahead
from sqlsem.tasks.groups import GROUP_LATE_SECONDS, MOST_IN_GROUP, Group, Pace, TaskEnd
from sqlsem.tasks.queues import Queue
from sqlsem.tasks.recording import Unrecorded, log_outcome
from sqlsem.tasks.task import Task

__all__ = ["Worker"]

log = logging.getLogger("sqlsem")

MOST_THREADS = 1000
#: Between two looks at groups that may be late.
GROUP_LOOK_SECONDS = 0.01
#: Between two looks after the queue while all threads are busy.
TEND_SECONDS = 2.0
#: For how long a thread that leads keeps the lead when its task does not end; and the longest time between two looks at
#: it, where it has begun another one each time.
LEAD_SECONDS, LOOK_SECONDS = 0.005, 0.02
#: Between two attempts to reach a database that is away, each of which takes its time.
AWAY_SECONDS = 0.5
#: For what runs to end when it is aborted, and after which it is told again.
ABORT_SECONDS, ABORT_AGAIN_SECONDS = 2.5 * END_SECONDS, 0.25
#: How long a worker that leaves waits for ends to be recorded that could not be.
LAST_SECONDS = 1.0
#: Between two looks, for anyone who waits for the threads: signal handlers run on every system.
JOIN_SECONDS = 0.2


class Worker:
    """Carries out the tasks of one queue in so many threads, until it is stopped or has been idle for long enough.

    Args:
        queue: The queue.
        threads: How many tasks run at a time.
        idle_exit: Leave when nothing could be claimed for so long while nothing ran (None: never).
        on_task: Called with (task, outcome, error) when a task starts (outcome None), and when its attempt has ended
            ('finished', 'failed', 'cancelled', 'lost' or 'returned'); from a thread of the worker. What it raises is
            logged.
        group: Whether short tasks are claimed and ended in groups. What a worker that dies has done of a group is done
            again, up to some 10 ms of work; without groups it is one task.
        allowed: What it carries out; other tasks fail. Left out, everything.
        outlast: Once it has reached the database, go on trying when that is away, for however long. (With
            ``idle_exit``, for so long.) Otherwise it ends with `Unavailable` after the coordinator's ``retry``.

    Attributes:
        finished: How many tasks have finished, as the database has recorded it.
        failed: How many tasks have failed for good, likewise.
        retried: How many attempts have failed that are followed by another one.
        running: The tasks that run now.

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
        if not isinstance(queue, Queue):
            raise ConfigurationError(f"A worker works on a sqlsem.queue(…), not on {type(queue).__name__}")
        if on_task is not None:
            check_call("on_task", on_task)
        self.queue = queue
        self._claiming = queue.claiming
        self.threads = check_count("The number of a worker's threads", threads, 1, MOST_THREADS)
        self.idle_exit = None if idle_exit is None else check_duration("idle_exit", idle_exit)
        self.finished = 0
        self.failed = 0
        self.retried = 0
        self.running: set[Task] = set()
        self._on_task = on_task
        self._allowed = allowed
        self._outlast = outlast
        self._reached = False  # the database, ever
        self._away: float | None = None  # since when it has been out of reach
        self._most = MOST_IN_GROUP if group else 1
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who wait for what follows
        self._busy = Places()  # threads that have not left, or record what was done
        self._group = Group()
        self._pace = Pace(self._most)
        self._ahead = Ahead(f"{queue.name[:200]}-ahead", self._claim_ahead)
        self._ahead_of = ""  # the leader's name, when it was asked last
        self._more = False  # the last claim has found as many as it asked for, and nobody claims ahead
        self._unrecorded = Unrecorded(self._claiming, self._changed)
        self._stops: dict[int, Stop] = {}  # by task: of commands and SQL
        self._calls: dict[int, Stop] = {}  # and of functions
        self._leader: int | None = None  # the thread that claims
        #: When it began its task. Not to be relieved: it is claiming (inf), or at rest (None).
        self._began: float | None = None
        self._line = threading.Condition(self._lock)  # for the next to lead
        self._turnstile = threading.Lock()  # who has it is the next
        self._stopping = threading.Event()
        self._aborted = False
        self._over = threading.Event()
        self._active = monotonic()
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Work. Returns when stopped, or idle for long enough; raises what ended it otherwise (`Unavailable`)."""
        with guarded:  # one guard for all commands, which is started with the first of them
            self._run()

    def _run(self) -> None:
        self._active = monotonic()
        self._pace = Pace(self._most, ahead=self._claiming.process.engine.claims_ahead)
        name = self.queue.name[:200]
        crew = [Kept(f"{name}-{number}", partial(self._work, set())) for number in range(1, self.threads + 1)]
        relief = Kept(f"{name}-relief", self._relieve, self._over)
        try:
            for thread in (*crew, relief):
                thread.begin()
            for thread in crew:
                while thread.needed:
                    thread.join(JOIN_SECONDS)
                    tend()
                    if self._stopping.is_set():
                        self._claiming.process.bell.notify()  # which a signal handler must not do
        except BaseException:
            # Anyone who interrupts us may end the process next: what runs must not go on beside its next attempt.
            self.abort()
            raise
        finally:
            self._stopping.set()
            self._over.set()
            with self._changed:
                self._changed.notify_all()
            self._ahead.close(ABORT_SECONDS)
            relief.join(ABORT_SECONDS)  # it may be recording what was done
            self._leave_behind()
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
            stops = list(self._stops.items())
        # The thread that runs a command or SQL gives it back when it has ended (or finishes it, if that came first):
        # given back earlier, it would run on beside its next attempt. All are told at once, as each may take a while.
        for task_id, stop in stops:
            try:
                spawn(partial(self._insist, task_id, stop), "sqlsem-end")
            except RuntimeError as exc:  # no more threads: one after the other
                log.error("Task %d is ended before the next one is: %s", task_id, exc)
                self._insist(task_id, stop)
        self._lighten()
        self._claiming.process.bell.notify()  # for those who wait for tasks
        with self._changed:
            # All threads leave, but those in Python code.
            self._changed.wait_for(
                lambda: len(self._busy) <= sum(task.kind == "call" for task in self.running), ABORT_SECONDS
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

    def _insist(self, task_id: int, stop: Stop, *, call: bool = False) -> None:
        """Thread: end what runs. Once may be too early, as for SQL that is about to be sent. (A function is given time
        to clean up, as it would be interrupted in that as well.)
        """
        until, again = monotonic() + ABORT_SECONDS, END_SECONDS if call else ABORT_AGAIN_SECONDS
        while call or monotonic() < until:
            stop()
            with self._changed:
                if self._changed.wait_for(lambda: task_id not in self._stops and task_id not in self._calls, again):
                    return

    # -- the crew -----------------------------------------------------------------------------------------------

    def _work(self, begun: set[bool], _: GoesOn) -> None:
        try:
            if begun:  # the thread has ended at a task, of which nobody knows how far it came
                raise RuntimeError(f"A thread of a worker of {self.queue.name!r} has ended unexpectedly")
            begun.add(True)
            with self._at_work():
                try:
                    while (task := self._next()) is not None:
                        began = monotonic()
                        end = self._perform(task)
                        self._pace.took(monotonic() - began)
                        self._group.done(end)
                finally:
                    self._hand_on()
        except BaseException as exc:
            self._errors.append(exc)
            self._stopping.set()

    def _next(self) -> Task | None:
        """The next task for the thread that asks, which leads then; None when it shall leave."""
        me = threading.get_ident()
        with self._lock:
            if leads := self._leader == me:
                self._began = math.inf
        if not leads:
            if self._group.keeps():
                self._claiming.process.bell.notify()  # who leads may be at rest
            self._take_lead(me)
        while True:
            task = None if self._stopping.is_set() else self._group.begin()
            if task is not None:
                break
            if not self._go_on():
                return None
        if self._more and not self._ahead.flies and self._may_go_ahead():
            self._more, self._ahead_of = False, owner_name()
            self._ahead.start()
        with self._lock:
            self._began = monotonic()
            if self._pace.is_slow():
                self._leader = None
                self._line.notify()
        return task

    def _take_lead(self, me: int) -> None:
        """Wait until nobody leads, or who does has been busy with one task for too long."""
        with self._turnstile, self._line:
            seen, pause = None, LEAD_SECONDS / 2
            while self._leader is not None:
                began = self._began
                left = math.inf if began is None else began + LEAD_SECONDS - monotonic()
                if left <= 0:
                    break
                # Each look disturbs who runs short tasks: fewer of them while there was another one each time.
                pause = min(2 * pause, LOOK_SECONDS) if began != seen else min(left, LEAD_SECONDS)
                seen = began
                self._line.wait(None if began is None else pause)
            self._leader, self._began = me, math.inf

    def _hand_on(self) -> None:
        with self._line:
            if self._leader == threading.get_ident():
                self._leader = None
                self._line.notify()

    def _go_on(self) -> bool:
        """Leading: record what was done, and claim what comes next, if need be with a rest; False when it is over."""
        try:
            if self._ahead.wait(lambda: self._group.is_ready() and not self._stopping.is_set()):
                return True
            if self._stopping.is_set():
                self._end(self._group.take(), 0)
                return False
            if self._group.is_barred():
                self._end(self._group.take(ahead=False), 0)
            elif not self._group.keeps() or not self._follow(self._pace.most()):
                self._rest()
        except Unavailable as exc:  # what was done ends as soon as that can be
            self._require_patience(exc)
        return True

    def _follow(self, most: int, *, ahead_of: str | None = None) -> bool:
        """End what was done, and claim up to so many in the same call; whether there were any. ``ahead_of``: while that
        leader runs others.
        """
        ends = self._group.take(ahead=False)
        following: list[Task] = []
        try:
            following = self._end(ends, most, ahead_of=ahead_of)
        finally:
            with self._changed:
                if ends or following:
                    self._active = monotonic()
                self._more = 1 < most == len(following)
                if following:
                    self._group.add(following, ahead=ahead_of is not None)
                    self._changed.notify_all()
        return bool(following)

    def _may_go_ahead(self) -> bool:
        """Whether to claim the next group while one is run. (What waits for its locks is looked for in between.)"""
        return (
            self._group.has_room()
            and self._pace.goes_ahead()
            and not self._stopping.is_set()
            and not self._claiming.is_parked_due()
        )

    def _claim_ahead(self) -> bool:
        """The thread for that: claim the next group, and end what is done; whether to go on with the one after it."""
        with self._at_work():
            if self._stopping.is_set():
                return False
            self._follow(self._pace.most(), ahead_of=self._ahead_of)
            if self._aborted:
                self._end(self._group.take(), 0)  # those who lead may be in code that does not end
                return False
            self._ahead.tell()
            with self._lock:
                began = self._began
            # Not behind a task that takes long.
            at_rest = began is None or monotonic() - began > LEAD_SECONDS
            goes_on = self._more and not at_rest and self._may_go_ahead()
            if goes_on:
                self._more = False
            return goes_on

    def _rest(self) -> None:
        """Wait for a task. What other threads have done meanwhile is recorded at once."""
        active = self._active

        def look() -> bool | None:
            found = self._follow(1)
            self._is_back()
            # (Where something has happened, for how long to wait is another question now.)
            return found if found or self._active != active else None

        with self._line:
            self._began = None
        try:
            found = self._claiming.look_until(look, self._idle_left(), stop=self._stopping.is_set)
        finally:
            with self._line:
                self._began = math.inf
                self._line.notify()
        if not found and self._is_idle():
            if self._claiming.recover(now=True):
                self._active = monotonic()  # somebody has died and left something to be done
            else:
                self._stopping.set()

    def _idle_left(self) -> float | None:
        """For how long to wait for a task; None: for ever."""
        if self.idle_exit is None or self.running or self._group.keeps():
            return None
        return max(0.0, self._active + self.idle_exit - monotonic())

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
        place = Token()
        try:
            self._busy.take(place)
            yield
        finally:
            self._busy.give_back(place)
            with self._changed:
                self._changed.notify_all()

    def _is_idle(self) -> bool:
        """Whether it has been idle for long enough to leave."""
        return self._idle_left() == 0

    def _perform(self, task: Task) -> TaskEnd:
        """Run a task, unless it is too late for that."""
        with self._lock:
            if self._aborted or task.why_lost is not None:
                return TaskEnd(task, task.make_end("returned"), begun=False)
            self.running.add(task)
        task.began = monotonic()
        self._tell(task, None, None)
        error = result = None

        def started(stop: Stop) -> None:
            with self._lock:
                aborted = self._aborted
                if not aborted:
                    (self._calls if task.kind == "call" else self._stops)[task.id] = stop
            if aborted:
                raise TaskFailed("The worker was told to give everything back before this began")
            # (It must not refer to the task, which is freed when it has ended, without the garbage collector.)
            task.ended_by(partial(self._insist, task.id, stop, call=task.kind == "call"))

        try:
            result = run(task.kind, task.text, self._claiming.process, started=started, allowed=self._allowed)
        except BaseException as exc:
            # A task that calls sys.exit() has failed, too, and must not end the worker.
            error = format_error(exc)
        with self._changed:
            if (self._stops.pop(task.id, None) or self._calls.pop(task.id, None)) is not None:
                self._changed.notify_all()
            aborted = self._aborted
        if error is None:
            error = task.why_unlocked  # whatever it did since may have run beside another holder
        if error is not None and aborted:
            return TaskEnd(task, task.make_end("returned"))  # by abort, which may be why it failed
        if error is not None and task.why_stopped is not None:
            if task.cancelled:
                return TaskEnd(task, task.make_end("cancelled", error=error))
            why = task.why_stopped[0].upper() + task.why_stopped[1:]
            error = f"{why}, and was ended\n{error}"
        return TaskEnd(task, task.make_end("finished" if error is None else "failed", result, error))

    def _end(self, ends: list[TaskEnd], most: int, *, ahead_of: str | None = None) -> list[Task]:
        """Record how these have ended, tell of it, and claim up to ``most`` in the same call."""
        # (Also of those that are thought lost: the database may know them as ours, and then nobody else runs them.)
        ours = [end for end in ends if end.task.is_open]
        following: list[Task] = []
        # (The others were given back by abort.)
        known: list[tuple[TaskEnd, str | None]] = [(end, None) for end in ends if not end.task.is_open]
        for one in ours:
            one.task.ending()
        try:
            if ours or most:
                statuses, following = self._claiming.end_and_claim([one.end for one in ours], most, ahead_of=ahead_of)
                known += zip(ours, statuses, strict=True)
                for one, status in zip(ours, statuses, strict=True):
                    one.task.ended_with(status, settles=False)
                self._claiming.process.claims.settle(one.task for one in ours)
        except BaseException:
            self._unrecorded.add(ours)
            with self._changed:
                self.running.difference_update(one.task for one in ours)
            raise
        finally:
            self._conclude(known)
        return following

    def _conclude(self, ends: list[tuple[TaskEnd, str | None]]) -> None:
        """Tell what has become of tasks: their status as it is recorded, None of those that were taken away."""
        if not ends:
            return
        known = [(one, status, one.told(status)) for one, status in ends]
        with self._changed:
            self._active = monotonic()
            for one, status, outcome in known:
                self.running.discard(one.task)
                self.finished += outcome == "finished"
                self.failed += outcome == "failed" and status == "failed"
                self.retried += outcome == "failed" and status == "pending"
            self._changed.notify_all()
        self._claiming.process.bell.notify()
        for one, status, outcome in known:
            log_outcome(self.queue.name, one, status, outcome)
            if one.begun:
                self._tell(one.task, outcome, one.end.error)

    def _tell(self, task: Task, outcome: str | None, error: str | None) -> None:
        if self._on_task is not None:
            call_out(f"on_task of a worker of {self.queue.name!r}", self._on_task, task, outcome, error)

    # -- the relief ---------------------------------------------------------------------------------------------

    def _relieve(self, _: GoesOn) -> None:
        """Thread: tasks that take long must not keep those that were claimed with them."""
        while True:
            with self._changed:
                found = self._changed.wait_for(
                    lambda: self._over.is_set() or self._group.keeps() or self._unrecorded.answered(), TEND_SECONDS
                )
            self._conclude(self._unrecorded.take())
            if not found and not self._stopping.is_set():
                self._tend()
            if self._over.wait(GROUP_LOOK_SECONDS):
                return
            if self._group.is_late(GROUP_LATE_SECONDS):
                self._lighten()
            elif not self._ahead.flies and self._group.is_unrecorded(GROUP_LATE_SECONDS):  # else that does it next
                self._lighten(ahead=False)

    def _tend(self) -> None:
        """While all threads are busy: others may have died, and schedules be due. (Else it was done a moment ago.)"""
        try:
            self._claiming.recover()
        except SqlsemError as exc:
            log.info("Looking after %r has to be tried again: %s", self.queue.name, exc)
        except Exception:
            log.exception("Looking after %r failed", self.queue.name)

    def _leave_behind(self) -> None:
        """Have what was done while something went wrong recorded, and wait a moment for that, so that it is told."""
        self._unrecorded.add([one for one in self._group.take() if one.task.is_open])
        deadline = monotonic() + LAST_SECONDS
        while self._unrecorded.left() and (seconds := deadline - monotonic()) > 0:
            with self._changed:
                self._changed.wait_for(self._unrecorded.answered, seconds)
            self._conclude(self._unrecorded.take())
        for one in self._unrecorded.left():
            words = "Task %d has %s, which is not recorded yet; the task is run again unless this process can do that"
            log.warning(words, one.task.id, one.end.outcome)
            if one.begun:
                self._tell(one.task, "lost", one.end.error)

    def _lighten(self, *, ahead: bool = True) -> None:
        """End what is done, and give back what has not begun (unless ``ahead`` is false)."""
        try:
            with self._at_work():
                self._end(self._group.take(ahead=ahead), 0)
        except Exception as exc:
            later = "Tasks of %r end when the database can be reached again: %s"
            log.warning(later, self.queue.name, exc, exc_info=not isinstance(exc, SqlsemError))
