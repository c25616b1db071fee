"""Runs calls at the end of the interpreter, and keeps daemon threads from harming it.

At that time Python stops daemon threads at any line. A child of `multiprocessing` ends by `os._exit`, so that no
`atexit` callback runs: there the calls are finalizers of `multiprocessing.util`. The end of a ``with Pool()`` block
sends SIGTERM to its workers, which would kill them: there it is an exception first, so that the calls are made.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sqlsem.util import late

if TYPE_CHECKING:
    from sqlsem.util.termination import Termination

__all__ = [
    "at_end",
    "await_started",
    "begin",
    "block_daemon_thread",
    "has_begun",
    "start_unless_ending",
    "starting",
    "watch_child",
]

#: The priority of our finalizer in a child of `multiprocessing`: it runs after those of programs, and after the child's
#: own children have ended.
CHILD_PRIORITY = -1000
#: The longest wait for threads that were started to run; it takes milliseconds, or longer on a busy machine.
STARTED_SECONDS = 10.0

_ending = False
_calls: list[Callable[[], object]] = []
_watched: int | None = None  # the process for which `watch_child` has run
_termination: Termination | None = None  # the handler of SIGTERM of this process, which then ends by that signal
_starting: set[_thread.LockType] = set()  # for each thread that may not run yet: a lock, released when it runs
_awaited = False  # True: `await_started` was called


def at_end(call: Callable[[], object]) -> Callable[[], object]:
    """Register a call for the end of this process, and for that of each forked child that has called `watch_child`."""
    _calls.append(call)
    return atexit.register(call)


def watch_child() -> None:
    """Register the calls of `at_end` for the end of this process, if it is a child of `multiprocessing`. Idempotent.

    If the caller is its main thread, and SIGTERM would kill it, the first SIGTERM raises `SystemExit` there. So blocks
    end, and the calls are made; then the process ends by SIGTERM. A second one kills it at once.

    Call it late: a child discards the finalizers that were registered before it began to run.
    """
    global _termination, _watched
    if _watched == os.getpid():
        return
    _watched = os.getpid()
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, _end_child, exitpriority=CHILD_PRIORITY)
        if threading.current_thread() is threading.main_thread() and sys.platform != "win32":
            with late.importing:
                from sqlsem.util.termination import Termination
            _termination = Termination.begin(util.is_exiting)


def _end_child() -> None:
    """Make the calls after all threads that are not daemons have ended, as at the end of an interpreter. After SIGTERM
    no thread is waited for.
    """
    for thread in [] if _is_terminated() else threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for call in _calls:
        call()
    if _is_terminated():
        os.kill(os.getpid(), 15)  # as `multiprocessing` expects it: the exit code is -15


def _is_terminated() -> bool:
    return _termination is not None and _termination.arrived.is_set()


def begin() -> None:
    """Record that the interpreter is ending."""
    global _ending
    _ending = True


def has_begun() -> bool:
    """Return True once `begin` was called."""
    return _ending


def start_unless_ending(call: Callable[..., object], *arguments: object) -> None:
    """Start a thread without `threading`, unless the interpreter is ending."""
    not_running = _thread.allocate_lock()
    not_running.acquire()
    _starting.add(not_running)  # before the question: so either the end is seen here, or this thread by `await_started`
    started = False
    try:
        if not _ending:
            _thread.start_new_thread(_run, (not_running, call, arguments))
            started = True
    finally:
        if not started:
            _starting.discard(not_running)


def _run(not_running: _thread.LockType, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
    _starting.discard(not_running)
    not_running.release()
    call(*arguments)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """A context in which the caller starts a thread, and waits until it runs (as `threading` does). A daemon that comes
    after `await_started` is blocked for ever.
    """
    not_running = _thread.allocate_lock()
    with not_running:
        try:
            _starting.add(not_running)  # before the question, as above
            if _awaited:
                block_daemon_thread()
            yield
        finally:
            _starting.discard(not_running)


def await_started() -> None:
    """Wait until the threads of `start_unless_ending` and `starting` run. Call it after `begin`. If the interpreter
    ends while a thread is about to run, the thread crashes the process (github.com/python/cpython/issues/124878).
    Python does not wait for a thread that a daemon starts.
    """
    global _awaited
    _awaited = True
    deadline = time.monotonic() + STARTED_SECONDS
    for not_running in tuple(_starting):
        not_running.acquire(timeout=max(0.0, deadline - time.monotonic()))


def block_daemon_thread() -> None:
    """At the end of the interpreter, block the calling thread for ever if it is a daemon. If Python stops a daemon
    thread while it writes to standard error, the whole process aborts.
    """
    if _ending and threading.current_thread().daemon:
        threading.Event().wait()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_starting.clear)  # only the parent has these threads
