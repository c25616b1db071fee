"""The end of the interpreter, when Python stops daemon threads wherever they are."""

from __future__ import annotations

import threading

__all__ = ["begin", "has_begun", "stay_asleep"]

_ending = False


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
