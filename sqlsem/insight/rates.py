"""When one goes that waits for a rate."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.insight.words import clock, seconds_in_words
from sqlsem.model_rates import RateEntry

__all__ = ["goes_in", "rate_words", "used_words"]


def goes_in(before: int, windows: Sequence[RateEntry]) -> float:
    """In about how many seconds one goes that has so many before it in the line: where each of them wants 1, and what
    is used leaves the windows evenly; but not before there is room.

    >>> goes_in(4, [RateEntry("api", 60.0, 100, 100, 0.0)])
    3.0
    """
    evenly = (max(0, window.used + before + 1 - window.limit) / window.limit * window.window for window in windows)
    return max(0.0, *evenly, *(window.free_in for window in windows))


def rate_words(before: int, windows: Sequence[RateEntry]) -> str:
    """The same in words, with how much is used."""
    line = f"{before} before it in the line" if before else "first in the line"
    told = f"{line}, so it goes in about {clock(goes_in(before, windows))}"
    return f"rate {windows[0].name!r}: {used_words(windows)}; {told}"


def used_words(windows: Sequence[RateEntry]) -> str:
    """How much is used of each window, and when there is room again in all of them.

    >>> used_words([RateEntry("api", 60.0, 100, 100, 0.0, free_in=12.0)])
    '100 of 100 used in 1m00s, room in 12s'
    """
    used = [f"{window.used:,} of {window.limit:,} used in {seconds_in_words(window.window)}" for window in windows]
    free_in = max((window.free_in for window in windows), default=0.0)
    return ", ".join([*used, *([f"room in {seconds_in_words(free_in)}"] if free_in else [])])
