"""Notifications of tasks from other processes: one thread listens for all waiting workers of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from sqlsem.core.change_counter import ChangeCounter
from sqlsem.core.permits import Permit, PermitPool
from sqlsem.core.threads import ShouldContinue, SupervisedThread, safe_logger
from sqlsem.engines.base import Engine, Session
from sqlsem.errors import SqlsemError

__all__ = ["NotificationListener"]

log = safe_logger

#: Seconds between two attempts to listen, and seconds that one call listens.
AGAIN_SECONDS, HEAR_SECONDS = 1.0, 5.0
#: Seconds that closing a coordinator waits for the thread.
CLOSE_SECONDS = 2.0


class NotificationListener:
    """Notifies the change counter when another process may have put tasks. Notifications are hints: workers poll, too.

    ``heard``: True while the thread listens.
    """

    def __init__(self, engine: Engine, bell: ChangeCounter, closing: threading.Event) -> None:
        self.heard = False
        self._engine = engine
        self._bell = bell
        self._closing = closing
        self._waiting = PermitPool()  # one permit for each waiter
        self._thread = SupervisedThread("sqlsem-notifications", self._listen, closing)
        self._session: Session | None = None
        self._silent = False  # this database sends no notifications

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Count the caller as a waiter during the block, and start the thread if needed."""
        place = Permit()
        try:
            self._waiting.acquire(place)
            if not self._silent and not self._closing.is_set():
                try:
                    self._thread.begin()
                except RuntimeError as exc:  # no more threads, or this process is ending: polling suffices
                    log.warning("Nobody listens for tasks that others put, which is tried again: %s", exc)
            yield
        finally:
            self._waiting.release(place)

    def sessions(self) -> list[Session]:
        """Return the session of the thread, if it has one."""
        return [] if self._session is None else [self._session]

    def close(self) -> None:
        """Interrupt the thread, which ends as ``closing`` is set, and wait for it."""
        session = self._session
        if session is not None:
            session.interrupt()
        self._thread.join(CLOSE_SECONDS)

    def _listen(self, should_continue: ShouldContinue) -> None:
        while should_continue():
            try:
                self._session = session = self._engine.connect("listen")
                try:
                    if not session.listen():
                        self._silent = True
                        return
                    self.heard = True
                    self._bell.notify()
                    while not self._closing.is_set():
                        if session.wait_notification(HEAR_SECONDS) and self._waiting:
                            self._bell.notify()
                finally:
                    self.heard, self._session = False, None
                    session.close()
            except SqlsemError as exc:
                if not self._closing.is_set():
                    log.info("Nothing is heard of tasks that others put, for now: %s", exc)
            except Exception:
                log.exception("Listening for tasks failed")
            self._closing.wait(AGAIN_SECONDS)
