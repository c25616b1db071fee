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
#: Guards what follows: which sessions run the SQL of tasks, and which threads wait for their end with a fork, or fork.
calm = threading.Condition()
executing: weakref.WeakSet[Forked] = weakref.WeakSet()
_forks: set[int] = set()
_held: dict[int, bool] = {}  # the thread that has taken held_off for its fork


def begin_executing(session: Forked) -> None:
    """The SQL of a task is about to run in this thread; waits for the forks that are under way."""
    with calm:
        while _forks:
            calm.wait(1.0)  # (time_limited: an interrupted fork may not tell)
        session.executing_in = threading.get_ident()
        executing.add(session)


def end_executing(session: Forked) -> None:
    """It has ended."""
    with calm:
        executing.discard(session)
        calm.notify_all()


# A fork takes place whatever a hook raises. A signal that came meanwhile strikes at the entry of the next hook, where
# that can do nothing: so each is registered twice, and what it does may be repeated.


def _before() -> None:
    mine = threading.get_ident()
    if mine not in _held:
        _hold_off(mine)
    for session in list(sessions):
        session.let_go()


def _hold_off(mine: int) -> None:
    """No statement is under way, and none begins."""
    with calm:
        _forks.add(mine)
        # (Bounded, as a session that was dropped does not tell. Of this thread: a signal handler forks in the middle.)
        told = False
        while any(session.executing_in != mine for session in list(executing)):
            if not calm.wait(1.0) and not told:
                told = True
                log.warning("A fork waits until the SQL that a task runs on SQLite has ended")
    # (Taken and noted by the interpreter, between which it looks for no signal; as in `runtime.had_within`.)
    _held.update(zip((mine,), map(held_off.acquire, (True,)), strict=True))


def _after_in_parent() -> None:
    mine = threading.get_ident()
    # (What a signal handler raises while we wait ends the wait, but not the fork.)
    if mine in _held:
        del _held[mine]  # no call in between
        held_off.release()
    _forks.discard(mine)
    with calm:
        calm.notify_all()


def _after_in_child() -> None:
    global held_off, calm, executing
    held_off, calm = threading.RLock(), threading.Condition()
    executing = weakref.WeakSet()
    _forks.clear()
    _held.clear()
    sessions.clear()


if hasattr(os, "register_at_fork"):
    for _ in range(2):
        os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
