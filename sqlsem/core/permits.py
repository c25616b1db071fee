"""A pool of permits, as of a semaphore. Its count stays right, even if an interrupt strikes at any line.

A counter that is raised before a ``try`` and lowered in its ``finally`` stays wrong if a signal handler raises in
between. Here each user has a permit object. The pool knows it weakly, so a permit that is dropped is free again, and a
permit may be released any number of times.
"""

from __future__ import annotations

import math
import threading
import weakref

__all__ = ["Permit", "PermitPool"]


class Permit:
    """A user's claim to be counted. Make it before the ``try`` whose ``finally`` releases it."""

    __slots__ = ("__weakref__",)


class PermitPool:
    """A pool of ``size`` permits, or of any number."""

    def __init__(self, size: float = math.inf) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._acquired: weakref.WeakSet[Permit] = weakref.WeakSet()

    def __len__(self) -> int:
        """Return how many permits are acquired."""
        return len(self._acquired)

    def acquire(self, permit: Permit) -> bool:
        """Return True if a permit was free. It is free again after `release`, or when the object is dropped."""
        with self._lock:
            is_free = len(self._acquired) < self.size
            if is_free:
                self._acquired.add(permit)
            return is_free

    def release(self, permit: Permit) -> None:
        """Free a permit. Idempotent; a permit that was never acquired is ignored."""
        self._acquired.discard(permit)
