"""The threads of this package, which begin here and nowhere else; and how they call what a program gave us.

A thread may end at any moment: by code of the program's that runs in it (a callback, a handler of the log, a
finalizer), by an exception that another thread sets, for want of memory. So none is started that nobody looks after:

`SupervisedThread`
    a thread that is needed for as long as its job says. Where it ends in any other way, that is logged at ERROR, and
    the job begins again: in the same thread, or in a new one, by `tend`.
`Pool`
    some of them, for what is submitted.
`spawn`
    a thread for one thing. What goes wrong in it is logged at ERROR.

`call_out` calls what a program gave us, in a thread of ours. Whatever it raises is logged, and goes no further.

By *vital* threads losses become known. They call nothing of a program's at all, as that might block: what they have to
log, other threads write (`Voice`).
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging
import math
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

from sqlsem import runtime
from sqlsem.core import shutdown

__all__ = [
    "Pool",
    "ShouldContinue",
    "SupervisedThread",
    "Voice",
    "call_out",
    "foreign_place",
    "hush",
    "is_vital",
    "spawn",
    "spawn_in_handler",
    "tend",
    "voice",
    "when_all",
]

T = TypeVar("T")

#: Whether a job is to go on: asked by the job, again and again.
ShouldContinue = Callable[[], bool]
#: Seconds before a job that was broken off begins again in the same thread: at first, and at the longest.
AGAIN_SECONDS, LONGEST_SECONDS = 0.02, 1.0
#: Beside the standard library and this package, the code in which our threads wait. All other code is a program's.
DRIVERS = frozenset(
    {"gevent", "greenlet", "mssql_python", "psycopg", "psycopg_binary", "psycopg_c", "pyodbc", "tenacity"}
)
#: So many lines of the log may wait to be written; what comes then is dropped.
MOST_UNSAID = 1000
#: So many times a job is put into another thread that is stuck, and does nothing in between.
MOST_REPLACED = 3
#: Seconds after which a thread of a pool ends that has nothing to do.
IDLE_SECONDS = 30.0

_mine = threading.local()
_guard = threading.Lock()  # of the next
_all: weakref.WeakSet[SupervisedThread] = weakref.WeakSet()


class Voice:
    """The log. A handler of it is a program's code: it may block, and raise anything. So what a vital thread says is
    written by another thread. (In virtual time it is written at once: no thread of one run may serve another.)
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.isEnabledFor = logger.isEnabledFor  # (The same: it is asked several times at every lock.)
        self._pool: Pool | None = None

    def log(self, level: int, words: str, *arguments: object, extra: Mapping[str, object] | None = None) -> None:
        """As of a logger."""
        self._say(level, words, arguments, extra=extra)

    def debug(self, words: str, *arguments: object) -> None:
        """As of a logger."""
        self._say(logging.DEBUG, words, arguments)

    def info(self, words: str, *arguments: object) -> None:
        """As of a logger."""
        self._say(logging.INFO, words, arguments)

    def warning(self, words: str, *arguments: object, exc_info: bool = False) -> None:
        """As of a logger."""
        self._say(logging.WARNING, words, arguments, exc_info)

    def error(self, words: str, *arguments: object, exc_info: bool = False) -> None:
        """As of a logger."""
        self._say(logging.ERROR, words, arguments, exc_info)

    def exception(self, words: str, *arguments: object) -> None:
        """As of a logger."""
        self._say(logging.ERROR, words, arguments, True)

    def _say(
        self,
        level: int,
        words: str,
        arguments: tuple[object, ...],
        exc_info: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        logger = self._logger
        if not logger.isEnabledFor(level):
            return
        if not is_vital() or runtime.current() is not runtime.THREADS:
            logger.log(level, words, *arguments, exc_info=exc_info, extra=extra, stacklevel=3)
            return
        file, line, function, stack = logger.findCaller(False, 3)
        failure = sys.exc_info() if exc_info else None
        record = logger.makeRecord(logger.name, level, file, line, words, arguments, failure, function, extra, stack)
        if self._pool is None:
            self._pool = Pool("sqlsem-log", 1, patient=True)
        if self._pool.behind < MOST_UNSAID:
            self._pool.submit(call_quietly, logger.handle, record)

    def forget(self) -> None:
        """In a forked child: what is not written yet is its parent's."""
        self._pool = None

    def hush(self, seconds: float) -> None:
        """Wait, for so long at the most, until all is written."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(seconds)


#: What all modules use whose code runs in vital threads.
voice = Voice(logging.getLogger("sqlsem"))


def hush(seconds: float) -> None:
    """Wait, for so long at the most, until what vital threads had to say is written."""
    voice.hush(seconds)


def call_quietly(call: Callable[..., object], *arguments: object) -> None:
    """Call a handler of the log, of whose failure nothing can be told."""
    with contextlib.suppress(BaseException):
        call(*arguments)


def _report(words: str, *arguments: object, exc_info: bool = True) -> None:
    """Log at ERROR, whatever becomes of that."""
    shutdown.stay_asleep()
    call_quietly(functools.partial(voice.error, words, *arguments, exc_info=exc_info))


def call_out(what: str, callback: Callable[..., object], *arguments: object) -> None:
    """Call what a program gave us. Whatever it raises is logged at ERROR: also what `sys.exit()` raises, an interrupt,
    a cancellation.
    """
    try:
        callback(*arguments)
    except runtime.current().ends:
        raise
    except BaseException:
        _report("%s failed", what)


def spawn(job: Callable[[], object], name: str) -> runtime.Thread:
    """Start a thread that does one thing. Raises `RuntimeError` where no thread can be started."""
    thread = runtime.current().thread(functools.partial(call_out, f"The thread {name}", job), name)
    thread.start()
    return thread


def spawn_in_handler(job: Callable[[], object], name: str) -> None:
    """As `spawn`, in a handler of bus: it may have interrupted a thread that is starting another one, whose lock
    `threading` would wait for.
    """
    _thread.start_new_thread(call_out, (f"The thread {name}", job))


def when_all(done: Sequence[Future[None]], call: Callable[[], object]) -> None:
    """Call something when all of these are done."""

    def look(_: Future[None]) -> None:
        if all(one.done() for one in done):
            call()

    for one in done:
        one.add_done_callback(look)


def is_vital() -> bool:
    """True in a thread by which losses become known: it must wait for no code of a program's."""
    return bool(runtime.namespace(_mine).get("vital"))


def tend() -> None:
    """Begin all jobs again whose threads have ended though they are needed."""
    here = runtime.current()
    with _guard:
        known = list(_all)
    for kept in known:
        if kept.runtime is here:
            kept.tend()


class SupervisedThread:
    """A thread that is needed until its job returns, or lets go of it.

    Args:
        name: The thread's name.
        job: What it does. It is given a function that says whether to go on; False: the job is another thread's now,
            or nobody's.
        closing: Set when nothing is needed any more.
        vital: Losses become known by it.
        behind: Where in a program's code a thread stands that this one waits for; None where there is none.

    Attributes:
        due: By when the job has to say something again (`monotonic`); infinity where nothing is known of that.
        replaced: How often it was put into another thread, as it was stuck. The job says when it has done something.
    """

    def __init__(
        self,
        name: str,
        job: Callable[[ShouldContinue], object],
        closing: threading.Event | None = None,
        *,
        vital: bool = False,
        behind: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.name = name
        self.runtime = runtime.current()
        self.due = math.inf
        self.replaced = 0
        self._job = job
        self._closing = closing or self.runtime.event()
        self._vital = vital
        self._behind = behind
        self._starting = threading.Lock()
        self._thread: runtime.Thread | None = None
        self._turn: object | None = None  # of the thread that does it
        self._suspected = -math.inf  # when it was due, as it was last found to be late
        with _guard:
            _all.add(self)

    @property
    def needed(self) -> bool:
        """Whether the job has not returned."""
        return self._turn is not None

    @property
    def runs(self) -> bool:
        """Whether a thread does it."""
        thread = self._thread
        return self._turn is not None and thread is not None and thread.is_alive()

    @property
    def thread(self) -> runtime.Thread | None:
        """The thread that does it, or was to do it last."""
        return self._thread

    def begin(self) -> None:
        """Have a thread do it, unless one does. Raises `RuntimeError` where none can be started; then it is tried again
        by `tend`.
        """
        if not self.runs:
            with self._starting:
                if not self.runs:
                    self._start()

    def let_go(self) -> None:
        """By the job, as it ends: the thread is not needed any more, and the next `begin` starts another one."""
        self._turn = None

    def replace(self) -> None:
        """Have another thread do it. Raises `RuntimeError` where none can be started."""
        with self._starting:
            self._start()

    def _start(self) -> None:
        turn = object()
        thread = self.runtime.thread(functools.partial(self._run, turn), self.name)
        self._turn, self._thread, self.due = turn, thread, math.inf
        thread.start()

    def _run(self, turn: object) -> None:
        """Thread: the job, again and again until it returns."""
        runtime.namespace(_mine)["vital"] = self._vital
        pause = AGAIN_SECONDS
        while self._turn is turn:
            try:
                self._job(lambda: self._turn is turn and not self._closing.is_set())
                if self._turn is turn:
                    self._turn = None
                return
            except self.runtime.ends:
                raise
            except BaseException:
                if self._closing.is_set():
                    return
                _report("The thread %s was broken off; it begins again", self.name)
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_SECONDS)

    def tend(self) -> None:
        """Begin it again where its thread has ended though it is needed."""
        if self._turn is None or self.runs or self._closing.is_set():
            return
        failure = None
        with self._starting:
            if self._turn is None or self.runs:
                return
            try:
                self._start()
            except RuntimeError as exc:
                failure = exc
        if failure is None:
            _report("The thread %s had ended unexpectedly; another one goes on", self.name, exc_info=False)
        else:
            _report("The thread %s cannot be started, and is tried again: %s", self.name, failure, exc_info=False)

    def stuck_in(self) -> str | None:
        """Where its thread stands in a program's code, at two looks after it was due; None where it does not. (What is
        only slow stands in ours, or in a driver's.)
        """
        due, suspected = self.due, self._suspected
        if runtime.monotonic() < due:
            return None
        place = _place_of(self._thread) or self._behind()
        self._suspected = -math.inf if place is None else due
        return place if suspected == due else None

    @property
    def is_suspect(self) -> bool:
        """Whether it was found in a program's code at one look."""
        return self._suspected == self.due

    def mend(self) -> bool:
        """Begin it again where its thread has ended, or is stuck. Whether it was stuck."""
        self.tend()
        place = self.stuck_in()
        if place is not None and self.replaced < MOST_REPLACED:
            self.replaced += 1
            with contextlib.suppress(RuntimeError):  # `tend` tries again, and says so
                self.replace()
            _report("The thread %s is stuck at %s; another one goes on", self.name, place, exc_info=False)
        return place is not None

    def join(self, seconds: float) -> None:
        """Wait for its thread, for so long at the most; not for the thread that calls."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(seconds)


def _place_of(thread: runtime.Thread | None) -> str | None:
    frame = sys._current_frames().get(getattr(thread, "ident", None) or 0)
    return None if frame is None else foreign_place(frame)


def foreign_place(frame: FrameType) -> str | None:
    """Where in a program's code a thread of ours stands; None where it stands in ours, or in what that calls."""
    step: FrameType | None = frame
    while step is not None:
        package = str(step.f_globals.get("__name__", "")).partition(".")[0]
        if package == "sqlsem":
            return None
        if package == "logging" or not (package in DRIVERS or package in sys.stdlib_module_names):
            return f"{step.f_code.co_filename}:{step.f_lineno} ({step.f_code.co_name})"
        step = step.f_back
    return None


class _Worker:
    """One thread of a pool, and what it does."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool = pool
        self.job: Future[Any] | None = None
        self.kept = SupervisedThread(f"{pool.name}-{number}", self._work, pool.closing)

    def _work(self, _: ShouldContinue) -> None:
        self.fail()
        while (call := self.pool.next_for(self)) is not None:
            try:
                call()
            finally:
                del call  # nothing of it shall live on while this thread waits
                self.fail()

    def fail(self) -> None:
        """What it was at when its thread ended will not be done."""
        job, self.job = self.job, None
        if job is not None and not job.done():
            job.set_exception(RuntimeError(f"The thread {self.kept.name} ended while it did this"))


class Pool:
    """Threads, made when they are needed, that do what is submitted, in that order.

    Unlike those of `concurrent.futures` they also work after the main thread has ended, and one that ends is replaced.

    Args:
        name: Of the threads.
        most: How many there may be.
        patient: Where no thread can be started, keep what was submitted until one can.
    """

    def __init__(self, name: str, most: int, *, patient: bool = False) -> None:
        self.name = name
        self.closing = runtime.event()
        self._most = most
        self._patient = patient
        self._lock = threading.Lock()
        self._jobs = runtime.current().queue()  # each a future and a call, or None: a thread is to end
        self._workers: list[_Worker] = []

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread do it. Raises `RuntimeError` where none can be started (unless ``patient``), and after
        `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self.closing.is_set():
                raise RuntimeError(f"The threads {self.name} were ended")
            self._jobs.put((future, functools.partial(call, *arguments)))
            free = [one for one in self._workers if one.job is None]  # those that are about to begin, too
            if len(free) < self._jobs.qsize() and len(self._workers) < self._most:
                free = [_Worker(self, len(self._workers) + 1)]
                self._workers.append(free[0])
        for worker in free[:1]:
            try:
                worker.kept.begin()
            except RuntimeError as exc:
                self._nobody_for(future, exc)
        return future

    def _nobody_for(self, future: Future[Any], exc: RuntimeError) -> None:
        """No thread could be started: another one does it, or `tend` tries again, or it is not done."""
        if any(worker.kept.runs for worker in list(self._workers)):
            return
        if not self._patient and future.cancel():
            raise exc
        _report("No thread can be started for %s, which is tried again: %s", self.name, exc, exc_info=False)

    def next_for(self, worker: _Worker) -> Callable[[], None] | None:
        """What a thread is to do next; None when it is to end."""
        try:
            job = self._jobs.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            job = None
        if job is None:
            with self._lock:
                if self._jobs.qsize() and not self.closing.is_set():  # `submit` may have counted on it
                    return _nothing
                if worker in self._workers:
                    self._workers.remove(worker)
                worker.kept.let_go()
                return None
        worker.job, call = job
        return functools.partial(_carry_out, worker.job, call)

    @property
    def behind(self) -> int:
        """How many jobs nobody has begun."""
        return self._jobs.qsize()

    def close(self, seconds: float = 0.0) -> None:
        """Take nothing more, and wait for so long at the most until what was submitted is done; the threads end then.
        (Does not wait where one of them calls.)
        """
        with self._lock:
            self.closing.set()
            workers = list(self._workers)
        for _ in workers:
            self._jobs.put(None)
        if any(worker.kept.thread is threading.current_thread() for worker in workers):
            return
        deadline = runtime.monotonic() + seconds
        for worker in workers:
            worker.kept.join(max(0.0, deadline - runtime.monotonic()))


def _nothing() -> None:
    """No job: look again."""


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    if (future.done() and not future.cancelled()) or not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except runtime.current().ends:
        raise
    except BaseException as exc:
        future.set_exception(exc)
        del future, call  # an exception that its own frame refers to would live on, with all it holds
    else:
        future.set_result(result)


def _begin_anew() -> None:
    """In a forked child: the threads are its parent's."""
    global _all, _guard, _mine
    voice.forget()
    _all, _guard, _mine = weakref.WeakSet(), threading.Lock(), threading.local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
