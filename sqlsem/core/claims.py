"""Tasks, parts and continuations that this process has claimed."""

from __future__ import annotations

import threading
import weakref
from typing import ClassVar, Protocol

__all__ = ["Claim", "Claims"]


class Claim(Protocol):
    """What this process has to end."""

    #: Whether it is lost with the membership. (Others learn at their end what became of them.)
    can_be_lost: ClassVar[bool]

    def lose(self, why: str) -> None:
        """It is ours no more."""


class Claims:
    """All that this process has. Weakly: what nobody knows any more must give itself back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Claim] = weakref.WeakSet()

    def add(self, claim: Claim) -> None:
        """It has to be looked after."""
        with self._lock:
            self._known.add(claim)

    def discard(self, claim: Claim) -> None:
        """It has ended."""
        with self._lock:
            self._known.discard(claim)

    def take(self) -> list[Claim]:
        """All that can be lost, and are forgotten."""
        with self._lock:
            claims = [claim for claim in self._known if claim.can_be_lost]
            for claim in claims:
                self._known.discard(claim)
        return claims

    def __bool__(self) -> bool:
        return len(self._known) > 0
