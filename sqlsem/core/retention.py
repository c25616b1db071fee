"""What is past keeping is removed by those who add to it, off the way of those who acquire and release."""

from __future__ import annotations

from collections.abc import Callable

from sqlsem.core.main_connection import MainConnection
from sqlsem.engines.base import Engine, Session
from sqlsem.engines.protocol import AdminSession, TaskSession
from sqlsem.model import monotonic

__all__ = ["RetentionCleaner"]

#: It is looked for it every so many pings, and after so many requests and claims of ours.
EVERY_PINGS, EVERY_REQUESTS = 200, 500
#: So many rows at a time, and a moment for others in between.
ROWS, PAUSE_SECONDS = 500, 0.005


class RetentionCleaner:
    """Prunes the history, and tasks that have ended, as fast as this process adds to them or faster."""

    def __init__(self, engine: Engine, main: MainConnection, most_seconds: float) -> None:
        self._main = main
        self._most = most_seconds  # what it may take at a time
        self._pings = 0
        self._done = 0  # what this process had done when it was last looked
        self._prunes: list[Callable[[Session, int], int]] = []
        if engine.has(AdminSession):
            self._prunes.append(lambda session, _: session.prune(ROWS))
        if engine.has(TaskSession):
            self._prunes.append(lambda session, _: session.prune_tasks(ROWS) if session.has_feature("queue") else 0)

    def after_ping(self, done: int) -> None:
        """This process has done so much so far."""
        self._pings += 1
        if self._pings % EVERY_PINGS and done - self._done < EVERY_REQUESTS:
            return
        self._done = done
        prunes, until = self._prunes, monotonic() + self._most
        while prunes and monotonic() < until and not self._main.closing.wait(PAUSE_SECONDS):
            prunes = [prune for prune in prunes if self._main.call("prune", prune, 0.0) == ROWS]
