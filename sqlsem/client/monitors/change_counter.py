"""A counter of this process's changes to its work queues. Threads of waiting workers sleep until it changes."""

from __future__ import annotations

import threading

__all__ = ["ChangeCounter"]


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
