"""The end of the interpreter, when Python stops daemon threads wherever they are; and that of a child of
`multiprocessing`, which ends by `os._exit`, so that `atexit` calls nobody.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

__all__ = ["at_end", "begin", "has_begun", "stay_asleep", "watch_child"]

#: When a child of `multiprocessing` ends: after all finalizers of programs, and after its own children.
CHILD_PRIORITY = -1000

_ending = False
_calls: list[Callable[[], object]] = []
_watched: int | None = None  # the process that `watch_child` has registered something for


def at_end(call: Callable[[], object]) -> Callable[[], object]:
    """Have something called when this process ends, and each forked child that takes part (`watch_child`)."""
    _calls.append(call)
    return atexit.register(call)


def watch_child() -> None:
    """This process takes part from now on: where it is a child of `multiprocessing`, see to its end. Repeatable.

    Done late, as a child forgets what was registered before it began to run.
    """
    global _watched
    if _watched == os.getpid():
        return
    _watched = os.getpid()
    util, client = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is not None and client is not None and client.parent_process() is not None:
        util.Finalize(None, _end_child, exitpriority=CHILD_PRIORITY)


def _end_child() -> None:
    """As at the end of an interpreter: threads that are no daemons finish their work first."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for call in _calls:
        call()


def begin() -> None:
    """It ends."""
    global _ending
    _ending = True


def has_begun() -> bool:
    """True as soon as `begin` was called."""
    return _ending


def stay_asleep() -> None:
    """At the end, no daemon thread shall come back to tell of it: where one is stopped while it writes to standard
    error, Python aborts the whole process.
    """
    if _ending and threading.current_thread().daemon:
        threading.Event().wait()
