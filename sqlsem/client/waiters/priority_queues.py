"""The waiters of this process in priority queues, and which of them notifies which. No I/O.

At each poll the database decides if the waiter is granted (`sqlsem.engines.priorities`), so a poll at the wrong time
only costs a call. A waiter right behind another waiter of this process is notified when that waiter leaves. The others
poll from time to time, and are notified when this process releases something.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from sqlsem.client.waiters.queues import Waiter, wake_all

__all__ = ["PriorityWaiters"]


class PriorityWaiters:
    """The waiters of this process in priority queues, by resource and position."""

    def __init__(self, state_lock: threading.Lock) -> None:
        self._state_lock = state_lock
        self.queues: dict[str, dict[int, Waiter]] = {}
        self._behind: dict[Waiter, int] = {}  # the position of the waiter right ahead, if it is one of this process

    def add(self, waiter: Waiter) -> None:
        """Put a waiter into the queue of its resource."""
        with self._state_lock:
            self.queues.setdefault(waiter.request.resource, {})[waiter.position] = waiter

    def remove(self, waiter: Waiter) -> None:
        """Take a waiter out, and wake the waiters right behind it. Idempotent."""
        with self._state_lock:
            queue = self.queues.get(waiter.request.resource, {})
            queue.pop(waiter.position, None)
            self._behind.pop(waiter, None)
            woken = [other for other in queue.values() if self._behind.get(other) == waiter.position]
            for other in woken:
                del self._behind[other]
            if not queue:
                self.queues.pop(waiter.request.resource, None)
        wake_all(woken)

    def is_behind_local(self, waiter: Waiter, position: int | None) -> bool:
        """Return True if the waiter right ahead, at ``position``, is ours and will notify this one.

        If the two were in the opposite order before (an operator may change the ageing), the other one is woken to
        poll.
        """
        with self._state_lock:
            self._behind.pop(waiter, None)
            ahead = None if position is None else self.queues.get(waiter.request.resource, {}).get(position)
            if ahead is None or position is None:
                return False
            self._behind[waiter] = position
            is_reversed = self._is_behind(ahead, waiter)
            if is_reversed:
                del self._behind[ahead]
        if is_reversed:
            ahead.event.set()
        return True

    def _is_behind(self, waiter: Waiter | None, other: Waiter) -> bool:
        """Return True if the waiter is directly or indirectly behind the other. Called with the lock held. (There are
        no cycles: the call that would close one breaks it.)
        """
        queue = self.queues.get(other.request.resource, {})
        while waiter is not None and waiter is not other:
            waiter = queue.get(self._behind.get(waiter, 0))
        return waiter is other

    def notify(self, resource: str) -> None:
        """Wake the waiters of a resource that lost a row, but not those that another waiter notifies."""
        if resource not in self.queues:
            return
        with self._state_lock:
            queue = self.queues.get(resource, {})
            woken = [waiter for waiter in queue.values() if waiter not in self._behind]
        wake_all(woken)

    def wake(self, positions: Collection[int] | None) -> None:
        """Wake the waiters at these positions (None: all)."""
        wake_all(waiter for waiter in self.waiters() if positions is None or waiter.position in positions)

    def waiters(self) -> list[Waiter]:
        """Return all waiters."""
        with self._state_lock:
            return [waiter for queue in self.queues.values() for waiter in queue.values()]
