"""Lets a waiter sleep until the row ahead of it is released: the owner of that row keeps a lock by name."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlsem.engines.mysql.connection import MysqlConnection

#: The longest sleep, in seconds: an operator may remove a row while its owner keeps the lock.
LONGEST = 1.0
#: A lock that is free within these seconds was not kept.
AT_ONCE = 0.002


class LockSleeper:
    """The waits of one session. They grant nothing: afterwards the waiter reads its row."""

    trusted = False

    def __init__(self, session: MysqlConnection) -> None:
        self._session = session
        self._not_kept: int | None = None  # the last row whose lock nobody kept

    @property
    def waits_for_rows(self) -> bool:
        """True but with a lease: in a cluster, the owner's session may be on another node."""
        return self._session.options.lease is None

    def listen(self, position: int) -> None:
        """Begin to wait for a position."""
        self._not_kept = None

    def stop(self) -> None:
        """End the wait. (Nothing is kept between two waits.)"""

    def wait_for_row(self, position: int, seconds: float) -> bool:
        """Sleep until the row at this position is released, up to ``seconds``. Return False if nobody keeps its
        lock.
        """
        limit = min(seconds, LONGEST)
        if not self._session.fractions:
            limit = math.floor(limit)
        if limit <= 0 or position == self._not_kept:
            return False
        began = time.monotonic()
        self._session.run("sleep", {"lock": f"{self._session.lock_prefix}{position}", "seconds": limit})
        if time.monotonic() - began < AT_ONCE:
            self._not_kept = position
        return True

    def wait(self, seconds: float, wakeup: threading.Event) -> bool:
        """Sleep until ``seconds`` are over or ``wakeup`` is set."""
        wakeup.wait(seconds)
        return False

    def recheck_seconds(self) -> float:
        """Return for how many seconds to poll after a notification: there are none."""
        return 0.0

    def notify(self, positions: Iterable[int]) -> None:
        """Notify waiters: they wait for locks, which the end of the transaction frees."""
