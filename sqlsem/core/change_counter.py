"""What wakes those in this process who wait for work."""

from __future__ import annotations

import threading

__all__ = ["ChangeCounter"]


class ChangeCounter:
    """Counts the changes that this process has made to its queues, for those who wait for one."""

    def __init__(self, closing: threading.Event) -> None:
        self._closing = closing
        self._changed = threading.Condition()
        self._version = 0

    def version(self) -> int:
        """Grows with each change. Read it before you look, and pass it to `wait_changed`."""
        return self._version

    def notify(self) -> None:
        """Something has changed."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def wait_changed(self, version: int, timeout: float) -> None:
        """Wait, for so many seconds at most, until there is another version than this."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version or self._closing.is_set(), timeout)
