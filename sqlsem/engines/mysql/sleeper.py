"""Lets a waiter sleep until the row ahead of it is released: the owner of that row keeps a lock by name."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from sqlsem.engines.statements.session import Sleeper

if TYPE_CHECKING:
    from sqlsem.engines.mysql.connection import MysqlConnection

#: The longest sleep, in seconds: an operator may remove a row while its owner keeps the lock.
LONGEST = 1.0
#: A lock that is free within these seconds was not kept.
AT_ONCE = 0.002


class LockSleeper(Sleeper):
    """The waits of one session. They grant nothing: afterwards the waiter reads its row."""

    def __init__(self, session: MysqlConnection) -> None:
        self._session = session
        self._not_kept: int | None = None  # the last row whose lock nobody kept

    @property
    def waits_for_rows(self) -> bool:
        # (With a lease the owner's session may be on another node of a cluster.)
        return self._session.options.lease is None

    def listen(self, position: int) -> None:
        self._not_kept = None

    def wait_for_row(self, position: int, seconds: float) -> bool:
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
