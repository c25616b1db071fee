"""A pool of permits, as of a semaphore. Its count stays right even if an interrupt comes at any line.

A counter that is incremented before a ``try`` and decremented in its ``finally`` stays wrong if a signal handler raises
in between. Here each user has a permit object. The pool refers to it weakly, so dropping the object frees the permit. A
permit may be released any number of times.
"""

from __future__ import annotations

import math
import threading
import weakref

__all__ = ["Permit", "PermitPool"]


class Permit:
    """A user of the pool, which counts it. Make the object before the ``try`` whose ``finally`` releases it."""

    __slots__ = ("__weakref__",)


class PermitPool:
    """A pool of ``size`` permits, or of any number."""

    def __init__(self, size: float = math.inf) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._acquired: weakref.WeakSet[Permit] = weakref.WeakSet()

    def __len__(self) -> int:
        """Return the number of acquired permits."""
        return len(self._acquired)

    def acquire(self, permit: Permit) -> bool:
        """Acquire a permit; return False if none is free. `release`, or dropping the object, frees it again."""
        with self._lock:
            is_free = len(self._acquired) < self.size
            if is_free:
                self._acquired.add(permit)
            return is_free

    def release(self, permit: Permit) -> None:
        """Free a permit. Idempotent; a permit that was never acquired is ignored."""
        self._acquired.discard(permit)
