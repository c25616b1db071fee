"""The rule for all rows of a resource in one pass: what each has ahead is summed up on the way."""

from __future__ import annotations

import math
from typing import Any

from sqlsem.model import WRITE

__all__ = ["Pass", "number"]


class Pass:
    """A walk along a resource's queue. It knows of the rows behind it only sums: per label the weight, and the lowest
    limits. (`Request.fits` in the model says the same of one row, from a list of those ahead.)
    """

    def __init__(self, cap: int | None, paused: bool) -> None:
        self._cap = math.inf if cap is None else cap
        self._paused = paused
        self._load = 0  # of all rows
        self._loads: dict[Any, int] = {}  # of each shared label
        self._heaviest = 0  # of these
        # The lowest limit that writers declare; that anybody of a shared label does, and which label; and the lowest of
        # all other labels.
        self._writers = self._lowest = self._second = math.inf
        self._lowest_label: Any = None

    def fits(self, access: Any, limit: int | None, weight: int) -> bool:
        """Whether a request that came now may proceed."""
        limit, weight = number(limit), number(weight) or 0
        shared = access != WRITE
        load = self._load - (self._loads.get(access, 0) if shared else 0)
        others = self._second if shared and access == self._lowest_label else self._lowest
        most = min(self._cap, self._writers, others, math.inf if limit is None else limit)
        return not self._paused and load + weight <= most

    @property
    def closed(self) -> bool:
        """Whether nobody that comes now can proceed, whatever it asks for: each request weighs 1 at the least, and
        shares with one label at the most.
        """
        least = self._load - self._heaviest + 1
        return self._paused or least > min(self._cap, self._writers, self._second)

    def go_by(self, access: Any, limit: int | None, weight: int) -> None:
        """Leave one row behind."""
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
    """What somebody wrote by hand into a column of numbers need be none."""
    return value if isinstance(value, int) else None
