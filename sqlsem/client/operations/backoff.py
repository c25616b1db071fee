"""Growing, jittered delays between the polls of a waiter that gets no notification from the database."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from sqlsem.values.locks import monotonic

__all__ = ["backoff_delays"]

#: The first delay, and the longest.
FIRST_SECONDS, LONGEST_SECONDS = 0.003, 0.5
#: The factor by which each delay exceeds the previous one.
GROWTH = 1.5
#: Spreads the polls of clients that began at the same time.
JITTER = 0.8, 1.2


def backoff_delays(
    timeout: float | None = None, *, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS
) -> Iterator[float]:
    """Yield growing delays in seconds, until ``timeout`` seconds are over (None: for ever).

    >>> list(backoff_delays(timeout=0))
    []
    """
    deadline = math.inf if timeout is None else monotonic() + timeout
    delay = first
    while (remaining := deadline - monotonic()) > 0:
        yield min(remaining, delay * random.uniform(*JITTER))
        delay = min(delay * GROWTH, longest)
