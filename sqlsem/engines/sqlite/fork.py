"""What a fork waits for, and takes from SQLite's sessions.

SQLite keeps tables of its file locks for the whole process; a child that was forked while they were in use would
believe in locks that are not there, and wait for others for ever (sqlite.org/howtocorrupt.html, "Carrying an open
database connection across a fork"). So no statement runs during a fork, and no connection is open. The beacons are
file locks of their own, so nothing is lost by that. The SQL of a task cannot be cut in two: a fork waits for its end.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol

log = logging.getLogger("sqlsem")


class Forked(Protocol):
    """What a fork wants of a session."""

    executing_in: int  #: the thread that runs the SQL of a task

    def let_go(self) -> None:
        """Close the connection for now."""


#: Held while a statement or a transaction is under way. (Replaced in a child: to be looked up here each time.)
held_off = threading.RLock()
sessions: weakref.WeakSet[Forked] = weakref.WeakSet()
#: Guards what follows: which sessions run the SQL of tasks, and how many forks wait for their end, or are under way.
calm = threading.Condition()
executing: weakref.WeakSet[Forked] = weakref.WeakSet()
_forks = 0
_still: int | None = None  # the thread that has taken held_off for its fork


def begin_executing(session: Forked) -> None:
    """The SQL of a task is about to run in this thread; waits for the forks that are under way."""
    with calm:
        while _forks:
            calm.wait()
        session.executing_in = threading.get_ident()
        executing.add(session)


def end_executing(session: Forked) -> None:
    """It has ended."""
    with calm:
        executing.discard(session)
        calm.notify_all()


def _before() -> None:
    global _forks, _still
    mine = threading.get_ident()
    with calm:
        _forks += 1
        # (Bounded, as a session that was dropped does not tell. Of this thread: a signal handler forks in the middle.)
        told = False
        while any(session.executing_in != mine for session in list(executing)):
            if not calm.wait(1.0) and not told:
                told = True
                log.warning("A fork waits until the SQL that a task runs on SQLite has ended")
    held_off.acquire()
    _still = mine
    for session in list(sessions):
        session.let_go()


def _after_in_parent() -> None:
    global _forks, _still
    # (What a signal handler raises while we wait ends the wait, but not the fork.)
    if _still == threading.get_ident():
        _still = None
        held_off.release()
    with calm:
        _forks -= 1
        calm.notify_all()


def _after_in_child() -> None:
    global held_off, calm, executing, _forks, _still
    held_off, calm = threading.RLock(), threading.Condition()
    executing, _forks, _still = weakref.WeakSet(), 0, None
    sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
