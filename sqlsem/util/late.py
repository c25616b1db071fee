"""Imports at the first use, which no fork can interrupt.

``import sqlsem`` loads what locks need. Work queues, batches, asyncio, drivers and displays are imported when they are
first used, often in a thread. Python has a lock for each module that is being imported, and a forked child inherits
these locks: if another thread of the parent held one, the child could never import that module. So a fork waits until
running late imports have ended::

    with late.importing:
        from sqlsem import tasks

Other code that holds locks of the process, such as OpenSSL's, may keep forks out by the same lock, for a short time.
"""

from __future__ import annotations

import os
import threading

__all__ = ["importing"]

#: Held during a late import, so that no fork begins. (A child replaces it, so do not import the name.)
importing = threading.RLock()
_held: dict[int, bool] = {}  # the thread that has acquired the lock for its fork


# The fork happens even if a hook raises. A pending signal handler runs on entry to the next hook and may raise there.
# So each hook is registered twice, and the second call does the work; hooks are idempotent.


def _before() -> None:
    mine = threading.get_ident()
    if mine not in _held:
        # (Acquired and recorded in one call: Python runs no signal handler in between.)
        _held.update(zip((mine,), map(importing.acquire, (True,)), strict=True))


def _after_in_parent() -> None:
    mine = threading.get_ident()
    if mine in _held:
        del _held[mine]  # no call, and so no signal handler, in between
        importing.release()


def _after_in_child() -> None:
    global importing
    importing = threading.RLock()
    _held.clear()


if hasattr(os, "register_at_fork"):
    for _ in range(2):
        os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
