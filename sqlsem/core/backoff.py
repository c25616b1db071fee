"""How long to pause between two looks at what others change, where nothing tells us that they did."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from sqlsem.model import monotonic

__all__ = ["backoff_delays"]

#: The first pause, and the longest.
FIRST_SECONDS, LONGEST_SECONDS = 0.003, 0.5
#: Each is so much longer than the one before it.
GROWTH = 1.5
#: So that those who began to look together do not go on together.
JITTER = 0.8, 1.2


def backoff_delays(
    timeout: float | None = None, *, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS
) -> Iterator[float]:
    """Seconds for one pause after the other, longer and longer, until ``timeout`` seconds are over (None: for ever).

    >>> list(backoff_delays(timeout=0))
    []
    """
    deadline = math.inf if timeout is None else monotonic() + timeout
    pause = first
    while (left := deadline - monotonic()) > 0:
        yield min(left, pause * random.uniform(*JITTER))
        pause = min(pause * GROWTH, longest)
