"""Runs calls at the end of the interpreter, and keeps daemon threads from harming it.

At that time Python stops daemon threads at any line. A child of `multiprocessing` ends by `os._exit`, so that no
`atexit` callback runs: there the calls are finalizers of `multiprocessing.util`. The end of a ``with Pool()`` block
sends SIGTERM to its workers, which would kill them: there it is an exception first, so that the calls are made.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["at_end", "begin", "block_daemon_thread", "has_begun", "watch_child"]

#: The priority of our finalizer in a child of `multiprocessing`: it runs after those of programs, and after the child's
#: own children have ended.
CHILD_PRIORITY = -1000

_ending = False
_calls: list[Callable[[], object]] = []
_watched: int | None = None  # the process for which `watch_child` has run
_terminated = False  # this process got SIGTERM, and ends by it when the calls were made


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
    global _watched
    if _watched == os.getpid():
        return
    _watched = os.getpid()
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, _end_child, exitpriority=CHILD_PRIORITY)
        import signal  # loaded by `multiprocessing`

        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _Termination(util.is_exiting, signal.signal, signal.SIG_DFL))


class _Termination:
    """The handler of SIGTERM in a child of `multiprocessing`. It imports nothing."""

    def __init__(self, is_exiting: Callable[[], bool], set_handler: Callable[[int, Any], object], default: Any) -> None:
        self._pid = os.getpid()
        self._is_exiting = is_exiting
        self._set_handler = set_handler
        self._default = default

    def __call__(self, number: int, frame: object) -> None:
        global _terminated
        self._set_handler(number, self._default)
        if os.getpid() != self._pid:  # a process that the child has forked
            os.kill(os.getpid(), number)
            return
        _terminated = True
        if not self._is_exiting():  # (An exception would leave out the calls that are about to be made.)
            raise SystemExit(128 + number)


def _end_child() -> None:
    """Make the calls after all threads that are not daemons have ended, as at the end of an interpreter. After SIGTERM
    no thread is waited for.
    """
    for thread in [] if _terminated else threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for call in _calls:
        call()
    if _terminated:
        os.kill(os.getpid(), 15)  # as `multiprocessing` expects it: the exit code is -15


def begin() -> None:
    """Record that the interpreter is ending."""
    global _ending
    _ending = True


def has_begun() -> bool:
    """Return True once `begin` was called."""
    return _ending


def block_daemon_thread() -> None:
    """At the end of the interpreter, block the calling thread for ever if it is a daemon. If Python stops a daemon
    thread while it writes to standard error, the whole process aborts.
    """
    if _ending and threading.current_thread().daemon:
        threading.Event().wait()
