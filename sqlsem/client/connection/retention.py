"""Deletes history and finished tasks that are older than the retention time.

The heartbeat thread does this, so that acquiring and releasing do not wait for it. Each process deletes rows at least
as fast as it adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlsem.engines.protocol import Capability
from sqlsem.values.locks import monotonic

if TYPE_CHECKING:
    from sqlsem.client.connection.main import MainConnection
    from sqlsem.engines.base import Engine, Session

__all__ = ["RetentionCleaner"]

#: Rows are deleted every `EVERY_HEARTBEATS` heartbeats, and after `EVERY_REQUESTS` requests and claims of this process.
EVERY_HEARTBEATS, EVERY_REQUESTS = 200, 500
#: The rows deleted in one statement, and the pause between two statements.
ROWS, PAUSE_SECONDS = 500, 0.005


class RetentionCleaner:
    """Deletes expired rows after heartbeats."""

    def __init__(self, engine: Engine, main: MainConnection, max_seconds: float) -> None:
        self._main = main
        self._max_seconds = max_seconds  # for one run
        self._heartbeats = 0
        self._last_activity = 0  # the number of requests and claims at the last run
        self._prunes: list[Callable[[Session, int], int]] = []
        if engine.has(Capability.ADMINISTRATION):
            self._prunes.append(lambda session, _: session.prune(ROWS))
        if engine.has(Capability.TASKS):
            self._prunes.append(lambda session, _: session.prune_tasks(ROWS) if session.has_feature("queue") else 0)

    def after_heartbeat(self, activity: int) -> None:
        """Delete expired rows if they are due. ``activity``: the requests and claims of this process so far."""
        self._heartbeats += 1
        if self._heartbeats % EVERY_HEARTBEATS and activity - self._last_activity < EVERY_REQUESTS:
            return
        self._last_activity = activity
        prunes, deadline = self._prunes, monotonic() + self._max_seconds
        while prunes and monotonic() < deadline and not self._main.closing.wait(PAUSE_SECONDS):
            prunes = [prune for prune in prunes if self._main.call("prune", prune, 0.0) == ROWS]
