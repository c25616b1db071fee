"""Apply the rule (`Request.fits`) along a resource's queue in one pass: the rows ahead are summed up on the way."""

from __future__ import annotations

import math
from typing import Any

from sqlsem.values.locks import WRITE

__all__ = ["QueueTotals", "number"]


class QueueTotals:
    """Running totals of the rows passed so far: the weight of each label, and the lowest limits. (`Request.fits`
    applies the same rule to one row and a list of the rows ahead.)

    A label is an access type that rows share, such as ``read`` or ``stage:2``; writers have none.
    """

    def __init__(self, cap: int | None, paused: bool) -> None:
        self._cap = math.inf if cap is None else cap
        self._paused = paused
        self._load = 0  # of all rows
        self._loads: dict[Any, int] = {}  # of each shared label
        self._heaviest = 0  # the largest weight of a label
        # The lowest limit that writers declare; the lowest that rows of a shared label declare, with that label; and
        # the lowest of all other labels.
        self._writers = self._lowest = self._second = math.inf
        self._lowest_label: Any = None

    def fits(self, access: Any, limit: int | None, weight: int) -> bool:
        """Return True if a request at this point of the queue may be granted."""
        limit, weight = number(limit), number(weight) or 0
        shared = access != WRITE
        load = self._load - (self._loads.get(access, 0) if shared else 0)
        others = self._second if shared and access == self._lowest_label else self._lowest
        maximum = min(self._cap, self._writers, others, math.inf if limit is None else limit)
        return not self._paused and load + weight <= maximum

    @property
    def closed(self) -> bool:
        """True if no request at this point can be granted: each weighs at least 1, and shares with at most one
        label.
        """
        minimum = self._load - self._heaviest + 1
        return self._paused or minimum > min(self._cap, self._writers, self._second)

    def add(self, access: Any, limit: int | None, weight: int) -> None:
        """Move past one row."""
        limit, weight = number(limit), number(weight) or 0
        self._load += weight
        declared = math.inf if limit is None else limit
        if access == WRITE:
            self._writers = min(self._writers, declared)
            return
        self._loads[access] = self._loads.get(access, 0) + weight
        self._heaviest = max(self._heaviest, self._loads[access])
        if access == self._lowest_label:
            self._lowest = min(self._lowest, declared)
        elif declared < self._lowest:
            self._second, self._lowest, self._lowest_label = self._lowest, declared, access
        else:
            self._second = min(self._second, declared)


def number(value: Any) -> int | None:
    """Return the number; None for a value that was written by hand and is no number."""
    return value if isinstance(value, int) else None
