"""Starts all threads of this package, and calls the program's callbacks in them.

A thread may end at any moment: the program's code in it (a callback, a log handler, a finalizer) may raise, another
thread may raise an exception in it, or memory may run out. So each thread is supervised:

`SupervisedThread`
    a thread that is needed until its job returns. If the thread ends in any other way, the error is logged at ERROR,
    and the job begins again: in the same thread, or in a new one, by `restart_ended`.
`Pool`
    several supervised threads, which run submitted calls.
`spawn`
    a thread for one call. An exception in the call is logged at ERROR.

`call_and_log` calls a callback of the program in a thread of this package. It logs any exception, and does not raise
it.

*Vital* threads detect the loss of locks. They call no code of the program at all, as that code might block: other
threads write their log records (`SafeLogger`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem.util import runtime, shutdown
from sqlsem.util.stacks import program_location

__all__ = [
    "Pool",
    "SafeLogger",
    "ShouldContinue",
    "SupervisedThread",
    "call_and_log",
    "call_uninterrupted",
    "is_vital",
    "log",
    "restart_ended",
    "spawn",
    "spawn_in_handler",
    "when_all",
]

T = TypeVar("T")

if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:
    _LoggerAdapter = logging.LoggerAdapter

#: Returns True while a job should go on; the job calls it again and again.
ShouldContinue = Callable[[], bool]
#: Seconds before a job that raised begins again in the same thread: after the first error, and at most.
AGAIN_SECONDS, LONGEST_SECONDS = 0.02, 1.0
#: At most this many log records wait to be written; further records are dropped.
MAX_UNSAID = 1000
#: A stuck job is moved to another thread at most this often, unless it makes progress in between.
MAX_REPLACED = 3
#: Seconds after which an idle thread of a pool ends.
IDLE_SECONDS = 30.0
#: How long an uninterrupted call may go on after an interrupt.
INTERRUPTED_SECONDS = 2.0

_thread_state = threading.local()
_all_lock = threading.Lock()  # guards `_all`
_all: weakref.WeakSet[SupervisedThread] = weakref.WeakSet()


class SafeLogger(_LoggerAdapter):
    """A logger that vital threads may use. A log handler is the program's code: it may block, and raise anything. So
    another thread writes the records of vital threads. (In a simulation, with virtual time, each thread writes its
    records itself, because no thread may serve two simulations.)
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        #: No method around it: each lock calls it several times.
        self.isEnabledFor = logger.isEnabledFor  # type: ignore[method-assign]
        self._pool: Pool | None = None

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """Log at this level, as a logger does. All other methods call this one."""
        logger = self.logger
        if not logger.isEnabledFor(level):
            return
        if not is_vital() or runtime.current() is not runtime.THREADS:
            logger.log(level, msg, *args, stacklevel=2, **options)
            return
        file, line, function, stack = logger.findCaller(False, 2)
        failure = sys.exc_info() if options.get("exc_info") else None
        extra = options.get("extra")
        record = logger.makeRecord(logger.name, level, file, line, msg, args, failure, function, extra, stack)
        if self._pool is None:
            self._pool = Pool("sqlsem-log", 1, patient=True)
        if self._pool.backlog < MAX_UNSAID:
            self._pool.submit(call_quietly, logger.handle, record)

    def discard(self) -> None:
        """Discard the records that are not written yet. (In a forked child: its parent writes them.)"""
        self._pool = None

    def flush(self, seconds: float) -> None:
        """Wait until the records of vital threads are written, at most this long."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(seconds)


#: The logger of all modules with code that runs in vital threads.
log = SafeLogger(logging.getLogger("sqlsem"))


def call_quietly(call: Callable[..., object], *arguments: object) -> None:
    """Call a log handler, and ignore any exception: there is no other place to report it."""
    with contextlib.suppress(BaseException):
        call(*arguments)


def _report(template: str, *arguments: object, exc_info: bool = True) -> None:
    """Log at ERROR, and ignore any failure to do so."""
    shutdown.block_daemon_thread()
    call_quietly(functools.partial(log.error, template, *arguments, exc_info=exc_info))


def call_and_log(what: str, callback: Callable[..., object], *arguments: object) -> None:
    """Call a callback of the program. Log any exception at ERROR, also `SystemExit`, an interrupt or a cancellation."""
    try:
        callback(*arguments)
    except runtime.current().ends:
        raise
    except BaseException:
        _report("%s failed", what)


def spawn(job: Callable[[], object], name: str) -> runtime.Thread:
    """Start a thread for one call. Raises `RuntimeError` if no thread can be started."""
    thread = runtime.current().thread(functools.partial(call_and_log, f"The thread {name}", job), name)
    thread.start()
    return thread


def call_uninterrupted(job: Callable[[], object], name: str) -> None:
    """Make a call in a thread of its own, where no signal handler interrupts it, and wait for it. If a handler raises
    an exception meanwhile, wait `INTERRUPTED_SECONDS` more at most, and then raise it; a second one is raised at once.
    """
    ended = runtime.event()

    def call() -> None:
        try:
            call_and_log(f"The thread {name}", job)
        finally:
            ended.set()

    thread = runtime.current().thread(call, name, daemon=False)
    try:
        try:
            thread.start()
        except RuntimeError:  # no more threads
            call()
        ended.wait()
    except BaseException:
        ended.wait(INTERRUPTED_SECONDS)
        raise


def spawn_in_handler(job: Callable[[], object], name: str) -> None:
    """Start a thread for one call, in a signal handler; at the end of the interpreter do nothing. The signal may have
    interrupted this thread while it started another thread: then `threading` would wait for a lock that this thread
    holds.
    """
    shutdown.start_unless_ending(call_and_log, f"The thread {name}", job)


def when_all(done: Sequence[Future[None]], call: Callable[[], object]) -> None:
    """Call ``call`` when all of these futures are done."""

    def check(_: Future[None]) -> None:
        if all(future.done() for future in done):
            call()

    for future in done:
        future.add_done_callback(check)


def is_vital() -> bool:
    """Return True in a vital thread, which must not wait for the program's code."""
    return bool(runtime.namespace(_thread_state).get("vital"))


def restart_ended() -> None:
    """Start new threads for all supervised jobs that are still needed and whose thread has ended."""
    current = runtime.current()
    with _all_lock:
        threads = list(_all)
    for thread in threads:
        if thread.runtime is current:
            thread.restart_ended()


class SupervisedThread:
    """A thread that is needed until its job returns, or calls `stop_supervising`.

    Args:
        name: The thread's name.
        job: The function that the thread runs. Its argument is a `ShouldContinue`, which returns False when the job
            has moved to another thread, or is not needed any more.
        closing: Set when the job is not needed any more.
        vital: True for a thread that detects the loss of locks.
        blocked_at: Returns the line of the program at which a thread stands that this one waits for; None if there is
            none.

    Attributes:
        due: The time (`monotonic`) by which the job must set `due` anew; infinity if it may take any time.
        replaced: How often the job was moved to another thread because it was stuck. The job resets it on progress.
    """

    def __init__(
        self,
        name: str,
        job: Callable[[ShouldContinue], object],
        closing: threading.Event | None = None,
        *,
        vital: bool = False,
        blocked_at: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.name = name
        self.runtime = runtime.current()
        self.due = math.inf
        self.replaced = 0
        self._job = job
        self._closing = closing or self.runtime.event()
        self._vital = vital
        self._blocked_at = blocked_at
        self._starting = threading.Lock()
        self.thread: runtime.Thread | None = None  # that runs the job, or ran it last
        self._run_id: object | None = None  # identifies the current thread's run of the job; None: not needed
        self._suspected = -math.inf  # the value of `due` at which the thread was last found to be late
        with _all_lock:
            _all.add(self)

    @property
    def needed(self) -> bool:
        """True from the start of the job until it returns."""
        return self._run_id is not None

    @property
    def runs(self) -> bool:
        """True while a living thread runs the job."""
        thread = self.thread
        return self._run_id is not None and thread is not None and thread.is_alive()

    def begin(self) -> None:
        """Start a thread for the job, unless one runs.

        Raises `RuntimeError` if no thread can be started; `restart_ended` tries again then.
        """
        if not self.runs:
            with self._starting:
                if not self.runs:
                    self._start()

    def stop_supervising(self) -> None:
        """Declare the thread unneeded, called by the job as it ends. The next `begin` starts another thread."""
        self._run_id = None

    def replace(self) -> None:
        """Move the job to a new thread. Raises `RuntimeError` if none can be started."""
        with self._starting:
            self._start()

    def _start(self) -> None:
        run_id = object()
        thread = self.runtime.thread(functools.partial(self._run, run_id), self.name)
        self._run_id, self.thread, self.due = run_id, thread, math.inf
        thread.start()

    def _run(self, run_id: object) -> None:
        """Run the job in this thread, again and again until it returns."""
        runtime.namespace(_thread_state)["vital"] = self._vital
        pause = AGAIN_SECONDS
        while self._run_id is run_id:
            try:
                self._job(lambda: self._run_id is run_id and not self._closing.is_set())
                if self._run_id is run_id:
                    self._run_id = None
                return
            except self.runtime.ends:
                raise
            except BaseException:
                if self._closing.is_set():
                    return
                _report("The thread %s failed; it begins again", self.name)
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_SECONDS)

    def restart_ended(self) -> None:
        """Start a new thread if the job is needed and its thread has ended."""
        if self._run_id is None or self.runs or self._closing.is_set():
            return
        failure = None
        with self._starting:
            if self._run_id is None or self.runs:
                return
            try:
                self._start()
            except RuntimeError as exc:
                failure = exc
        if failure is None:
            _report("The thread %s ended unexpectedly; another thread continues its job", self.name, exc_info=False)
        else:
            _report("Cannot start the thread %s, retrying: %s", self.name, failure, exc_info=False)

    def stuck_at(self) -> str | None:
        """Return the line of the program at which the thread is stuck; None if it is not stuck. It counts as stuck if
        two calls after `due` find it in the program's code. (A thread that is only slow is in code of this package, or
        of a driver.)
        """
        due, suspected = self.due, self._suspected
        if runtime.monotonic() < due:
            return None
        location = _location_of(self.thread) or self._blocked_at()
        self._suspected = -math.inf if location is None else due
        return location if suspected == due else None

    @property
    def is_suspect(self) -> bool:
        """True if one call of `stuck_at` since `due` found the thread in the program's code."""
        return self._suspected == self.due

    def repair(self) -> bool:
        """Start a new thread if the job's thread has ended or is stuck. Return True if it was stuck."""
        self.restart_ended()
        location = self.stuck_at()
        if location is not None and self.replaced < MAX_REPLACED:
            self.replaced += 1
            with contextlib.suppress(RuntimeError):  # `restart_ended` tries again, and logs it
                self.replace()
            _report(
                "The thread %s is stuck at %s; another thread continues its job", self.name, location, exc_info=False
            )
        return location is not None

    def join(self, seconds: float) -> None:
        """Wait for the job's thread, at most this long; return at once in that thread itself."""
        thread = self.thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(seconds)


def _location_of(thread: runtime.Thread | None) -> str | None:
    frame = sys._current_frames().get(getattr(thread, "ident", None) or 0)
    return None if frame is None else program_location(frame)


class _Worker:
    """One thread of a pool, and its current job."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool = pool
        self.job: Future[Any] | None = None
        self.supervised = SupervisedThread(f"{pool.name}-{number}", self._work, pool.closing)

    def _work(self, _: ShouldContinue) -> None:
        self.fail()
        while (call := self.pool.next_for(self)) is not None:
            try:
                call()
            finally:
                del call  # an idle thread must not keep its objects alive
                self.fail()

    def fail(self) -> None:
        """Fail the job that the thread had not finished when it ended."""
        job, self.job = self.job, None
        if job is not None and not job.done():
            job.set_exception(RuntimeError(f"The thread {self.supervised.name} ended during this call"))


class Pool:
    """Threads, started on demand, that run submitted calls in the order of submission.

    Unlike a `concurrent.futures` pool it also works after the main thread has ended, and replaces a thread that ends.

    Args:
        name: The beginning of the threads' names.
        most: The greatest number of threads.
        patient: If no thread can be started, keep submitted calls until one can.
    """

    def __init__(self, name: str, maximum: int, *, patient: bool = False) -> None:
        self.name = name
        self.closing = runtime.event()
        self._maximum = maximum
        self._patient = patient
        self._lock = threading.Lock()
        self._jobs = runtime.current().queue()  # each is a future and a call; or None, which ends one thread
        self._workers: list[_Worker] = []

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a call in a thread. Raises `RuntimeError` after `close`, or if none can start (unless ``patient``)."""
        future: Future[T] = Future()
        with self._lock:
            if self.closing.is_set():
                raise RuntimeError(f"The pool {self.name} is closed")
            self._jobs.put((future, functools.partial(call, *arguments)))
            # (Including threads that are about to start.)
            free = [worker for worker in self._workers if worker.job is None]
            if len(free) < self._jobs.qsize() and len(self._workers) < self._maximum:
                free = [_Worker(self, len(self._workers) + 1)]
                self._workers.append(free[0])
        for worker in free[:1]:
            try:
                worker.supervised.begin()
            except RuntimeError as exc:
                self._handle_no_thread(future, exc)
        return future

    def _handle_no_thread(self, future: Future[Any], exc: RuntimeError) -> None:
        """Leave the call to another thread, or (if ``patient``) to `restart_ended`; else raise the error."""
        if any(worker.supervised.runs for worker in list(self._workers)):
            return
        if not self._patient and future.cancel():
            raise exc
        _report("Cannot start a thread for %s, retrying: %s", self.name, exc, exc_info=False)

    def next_for(self, worker: _Worker) -> Callable[[], None] | None:
        """Return the next call for a thread; None if the thread must end."""
        try:
            job = self._jobs.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            job = None
        if job is None:
            with self._lock:
                if self._jobs.qsize() and not self.closing.is_set():  # `submit` may have counted this thread as free
                    return _nothing
                if worker in self._workers:
                    self._workers.remove(worker)
                worker.supervised.stop_supervising()
                return None
        worker.job, call = job
        return functools.partial(_run_call, worker.job, call)

    @property
    def backlog(self) -> int:
        """The number of submitted calls that no thread has begun yet."""
        return self._jobs.qsize()

    def close(self, seconds: float = 0.0) -> None:
        """Accept no more calls, and wait at most this long until the submitted calls are done; then the threads end. If
        a thread of the pool calls this, it does not wait.
        """
        with self._lock:
            self.closing.set()
            workers = list(self._workers)
        for _ in workers:
            self._jobs.put(None)
        if any(worker.supervised.thread is threading.current_thread() for worker in workers):
            return
        deadline = runtime.monotonic() + seconds
        for worker in workers:
            worker.supervised.join(max(0.0, deadline - runtime.monotonic()))


def _nothing() -> None:
    """Do nothing: the thread then reads the queue again."""


def _run_call(future: Future[Any], call: Callable[[], Any]) -> None:
    if (future.done() and not future.cancelled()) or not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except runtime.current().ends:
        raise
    except BaseException as exc:
        future.set_exception(exc)
        del future, call  # else the exception and this frame would refer to each other, and never be freed
    else:
        future.set_result(result)


def _reset_after_fork() -> None:
    """Discard the threads in a forked child: they run in its parent only."""
    global _all, _all_lock, _thread_state
    log.discard()
    _all, _all_lock, _thread_state = weakref.WeakSet(), threading.Lock(), threading.local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
