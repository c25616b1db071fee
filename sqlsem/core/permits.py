"""Counting who is there, so that nobody is counted for longer, wherever an interrupt strikes.

A number that is raised before a ``try`` and lowered in its ``finally`` is wrong for ever when a signal handler raises
in between. So each one who is counted has a token of its own, which is known here for as long as it lives, and may be
given back any number of times.
"""

from __future__ import annotations

import math
import threading
import weakref

__all__ = ["Permit", "PermitPool"]


class Permit:
    """What somebody holds who is counted. Made before the ``try`` whose ``finally`` gives it back."""

    __slots__ = ("__weakref__",)


class PermitPool:
    """So many, or any number: who has a token here has one of them."""

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._taken: weakref.WeakSet[Permit] = weakref.WeakSet()

    def __len__(self) -> int:
        """How many are taken."""
        return len(self._taken)

    def take(self, token: Permit) -> bool:
        """Whether there was one; it is free again after `give_back`, or when nobody has the token any more."""
        with self._lock:
            room = len(self._taken) < self.most
            if room:
                self._taken.add(token)
            return room

    def give_back(self, token: Permit) -> None:
        """It is free again. May be repeated, and be called by who never had one."""
        self._taken.discard(token)
