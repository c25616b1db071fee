"""Who of this process waits in lines of priority: who tells whom when looking may pay. No I/O.

Whose turn it is the database decides, at each look (`sqlsem.engines.priorities`). So a look at the wrong time costs
a call and nothing else. One who waits right behind another one of this process is told when that has left; the others
look from time to time, and are told of what this process gives back.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from sqlsem.core.waiter_queues import Waiter

__all__ = ["PriorityWaiters"]


class PriorityWaiters:
    """Those of this process who wait in lines of priority, by resource and place."""

    def __init__(self, state_lock: threading.Lock) -> None:
        self._state_lock = state_lock
        self._lines: dict[str, dict[int, Waiter]] = {}
        self._behind: dict[Waiter, int] = {}  # another one of ours, which is there still

    def enter(self, waiter: Waiter) -> None:
        """Somebody begins to wait."""
        with self._state_lock:
            self._lines.setdefault(waiter.request.resource, {})[waiter.position] = waiter

    def leave(self, waiter: Waiter) -> None:
        """It waits no more; those right behind it are told. May be repeated."""
        with self._state_lock:
            line = self._lines.get(waiter.request.resource, {})
            line.pop(waiter.position, None)
            self._behind.pop(waiter, None)
            woken = [one for one in line.values() if self._behind.get(one) == waiter.position]
            for one in woken:
                del self._behind[one]
            if not line:
                self._lines.pop(waiter.request.resource, None)
        _wake(woken)

    def stands_behind(self, waiter: Waiter, position: int | None) -> bool:
        """Whether who waits right before it is one of ours, who will tell it. That one looks again where it stood
        behind this one: an operator has changed the ageing, and so the order.
        """
        with self._state_lock:
            self._behind.pop(waiter, None)
            before = None if position is None else self._lines.get(waiter.request.resource, {}).get(position)
            if before is None or position is None:
                return False
            self._behind[waiter] = position
            turned_round = self._stands_behind(before, waiter)
            if turned_round:
                del self._behind[before]
        if turned_round:
            before.event.set()
        return True

    def _stands_behind(self, one: Waiter | None, other: Waiter) -> bool:
        """With the lock: directly or not. (Nobody stands behind himself: who closes such a ring breaks it.)"""
        line = self._lines.get(other.request.resource, {})
        while one is not None and one is not other:
            one = line.get(self._behind.get(one, 0))
        return one is other

    def nudge(self, resource: str) -> None:
        """Something left this resource."""
        if resource not in self._lines:
            return
        with self._state_lock:
            woken = [one for one in self._lines.get(resource, {}).values() if one not in self._behind]
        _wake(woken)

    def wake(self, positions: Collection[int] | None) -> None:
        """Something happened to these places (None: to all)."""
        _wake(waiter for waiter in self.waiters() if positions is None or waiter.position in positions)

    def waiters(self) -> list[Waiter]:
        """All of them."""
        with self._state_lock:
            return [one for line in self._lines.values() for one in line.values()]


def _wake(waiters: Iterable[Waiter]) -> None:
    for waiter in waiters:
        waiter.event.set()
