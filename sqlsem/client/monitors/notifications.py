"""Changes of work queues, which wake the waiting workers of this process.

For the tasks that other processes put, one thread listens for all workers.

A notification is only a hint, and may be lost: workers poll, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlsem.util.permits import Permit, PermitPool
from sqlsem.util.threads import ShouldContinue, SupervisedThread, log
from sqlsem.values.errors import SqlsemError

if TYPE_CHECKING:
    from sqlsem.engines.base import Engine, Session

__all__ = ["ChangeCounter", "NotificationListener"]

#: Seconds for which one call listens.
LISTEN_SECONDS = 5.0
#: Seconds that closing a coordinator waits for the thread.
CLOSE_SECONDS = 2.0


class ChangeCounter:
    """Counts the changes that this process makes to its work queues, and wakes the threads that wait for a change."""

    def __init__(self, closing: threading.Event) -> None:
        self._closing = closing
        self._changed = threading.Condition()
        self._version = 0

    def version(self) -> int:
        """Return the number of changes. Call this before you read the queue, and pass the number to `wait_changed`."""
        return self._version

    def notify(self) -> None:
        """Count a change, and wake all waiting threads."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def wait_changed(self, version: int, timeout: float) -> None:
        """Wait until the number of changes is no longer ``version``, for ``timeout`` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version or self._closing.is_set(), timeout)


class NotificationListener:
    """Notifies the change counter when another process may have put tasks.

    ``heard``: True while the thread listens.
    """

    def __init__(self, engine: Engine, changes: ChangeCounter, closing: threading.Event) -> None:
        self.heard = False
        self._engine = engine
        self._changes = changes
        self._closing = closing
        self._waiting = PermitPool()  # one permit for each waiting worker
        self._thread = SupervisedThread("sqlsem-notifications", self._listen, closing)
        self._session: Session | None = None
        self._is_silent = False  # True: this database sends no notifications

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Count the caller as a waiting worker during the block, and start the thread if needed."""
        permit = Permit()
        try:
            self._waiting.acquire(permit)
            if not self._is_silent and not self._closing.is_set():
                try:
                    self._thread.begin()
                except RuntimeError as exc:  # no more threads, or this process is ending: polling suffices
                    log.warning("Cannot start the thread that listens for tasks of other processes, retrying: %s", exc)
            yield
        finally:
            self._waiting.release(permit)

    def sessions(self) -> list[Session]:
        """Return the session of the thread, if it has one."""
        return [] if self._session is None else [self._session]

    def close(self) -> None:
        """Interrupt the thread, which ends because ``closing`` is set, and wait for it."""
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
                        self._is_silent = True
                        return
                    self.heard = True
                    self._changes.notify()
                    while not self._closing.is_set():
                        if session.wait_notification(LISTEN_SECONDS) and self._waiting:
                            self._changes.notify()
                finally:
                    self.heard, self._session = False, None
                    session.close()
            except SqlsemError as exc:
                if not self._closing.is_set():
                    log.info("Cannot listen for tasks of other processes, retrying: %s", exc)
            except Exception:
                log.exception("Listening for tasks failed")
            self._closing.wait(self._engine.options.timing.notification_retry)
