"""Estimate when a request for a rate is granted."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.insight.words import clock, seconds_in_words
from sqlsem.values.rates import RateEntry

__all__ = ["rate_words", "seconds_until_granted", "used_words"]


def seconds_until_granted(before: int, windows: Sequence[RateEntry]) -> float:
    """Return the seconds until a request is granted that has ``before`` others ahead of it in a rate's queue.

    Assumes that each request costs 1, and that the use leaves the windows evenly. Never less than the time until all
    windows have room.

    >>> seconds_until_granted(4, [RateEntry("api", 60.0, 100, 100, 0.0)])
    3.0
    """
    evenly = (max(0, window.used + before + 1 - window.limit) / window.limit * window.window for window in windows)
    return max(0.0, *evenly, *(window.free_in for window in windows))


def rate_words(before: int, windows: Sequence[RateEntry]) -> str:
    """Say when such a request is granted, with the use of each window."""
    line = f"{before} ahead of it in the queue" if before else "first in the queue"
    entry = f"{line}, so it is granted in about {clock(seconds_until_granted(before, windows))}"
    return f"rate {windows[0].name!r}: {used_words(windows)}; {entry}"


def used_words(windows: Sequence[RateEntry]) -> str:
    """Say how much of each window is used, and when all of them have room again.

    >>> used_words([RateEntry("api", 60.0, 100, 100, 0.0, free_in=12.0)])
    '100 of 100 used in 1m00s, room in 12s'
    """
    used = [f"{window.used:,} of {window.limit:,} used in {seconds_in_words(window.window)}" for window in windows]
    free_in = max((window.free_in for window in windows), default=0.0)
    return ", ".join([*used, *([f"room in {seconds_in_words(free_in)}"] if free_in else [])])
