"""Forks in processes with SQLite sessions: a fork waits for running statements, and closes all connections.

SQLite keeps tables of its file locks for the whole process. A child that inherits them would rely on locks that it does
not have, or wait for ever (sqlite.org/howtocorrupt.html, "Carrying an open database connection across a fork"). So
during a fork no statement runs, and no connection is open. The beacons have file locks of their own, so the member
keeps its rows. The SQL of a task cannot be interrupted: a fork waits for its end.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol

log = logging.getLogger("sqlsem")


class ForkAware(Protocol):
    """The part of a session that a fork uses."""

    executing_in: int  #: the thread that runs the SQL of a task

    def disconnect(self) -> None:
        """Close the connection; the next statement opens it again."""


#: Held during a statement or a transaction, so that no fork begins. (A child replaces it, so do not import the name.)
forks_blocked = threading.RLock()
sessions: weakref.WeakSet[ForkAware] = weakref.WeakSet()
#: Guards ``executing`` (the sessions that run the SQL of a task) and ``_forks`` (the threads that fork or wait to).
idle = threading.Condition()
executing: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_forks: set[int] = set()
_held: dict[int, bool] = {}  # the thread that has acquired forks_blocked for its fork


def begin_executing(session: ForkAware) -> None:
    """Record that this thread is about to run the SQL of a task; waits for running forks."""
    with idle:
        while _forks:
            idle.wait(1.0)  # (bounded: an interrupted fork may not notify)
        session.executing_in = threading.get_ident()
        executing.add(session)


def end_executing(session: ForkAware) -> None:
    """Record that the SQL of a task has ended."""
    with idle:
        executing.discard(session)
        idle.notify_all()


# The fork happens even if a hook raises. A pending signal handler runs on entry to the next hook and may raise there.
# So each hook is registered twice, and the second call does the work; hooks are idempotent.


def _before() -> None:
    mine = threading.get_ident()
    if mine not in _held:
        _block_statements(mine)
    for session in list(sessions):
        session.disconnect()


def _block_statements(mine: int) -> None:
    """Wait for running statements, and block new ones."""
    with idle:
        _forks.add(mine)
        # (The wait is bounded, as a dropped session does not notify. This thread's own statement does not count: a
        # signal handler may fork during it.)
        warned = False
        while any(session.executing_in != mine for session in list(executing)):
            if not idle.wait(1.0) and not warned:
                warned = True
                log.warning("A fork waits until the SQL that a task runs on SQLite has ended")
    # (Acquired and recorded in one call: Python runs no signal handler in between; as in `runtime.had_within`.)
    _held.update(zip((mine,), map(forks_blocked.acquire, (True,)), strict=True))


def _after_in_parent() -> None:
    mine = threading.get_ident()
    # (An exception of a signal handler ends the wait, but not the fork.)
    if mine in _held:
        del _held[mine]  # no call, and so no signal handler, in between
        forks_blocked.release()
    _forks.discard(mine)
    with idle:
        idle.notify_all()


def _after_in_child() -> None:
    global forks_blocked, idle, executing
    forks_blocked, idle = threading.RLock(), threading.Condition()
    executing = weakref.WeakSet()
    _forks.clear()
    _held.clear()
    sessions.clear()


if hasattr(os, "register_at_fork"):
    for _ in range(2):
        os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
