"""When one goes that waits for a rate."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.insight.words import clock, seconds_in_words
from sqlsem.model_rates import RateEntry

__all__ = ["goes_in", "rate_words"]


def goes_in(before: int, windows: Sequence[RateEntry]) -> float:
    """In about how many seconds one goes that has so many before it in the line: where each of them wants 1, and what
    is used leaves the windows evenly.

    >>> goes_in(4, [RateEntry("api", 60.0, 100, 100, 0.0)])
    3.0
    """
    return max((max(0, one.used + before + 1 - one.limit) / one.limit * one.window for one in windows), default=0.0)


def rate_words(before: int, windows: Sequence[RateEntry]) -> str:
    """The same in words, with how much is used."""
    used = ", ".join(f"{one.used:,} of {one.limit:,} used in {seconds_in_words(one.window)}" for one in windows)
    line = f"{before} before it in the line" if before else "first in the line"
    return f"rate {windows[0].name!r}: {used}; {line}, so it goes in about {clock(goes_in(before, windows))}"
