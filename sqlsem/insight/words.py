"""Write durations and processes in a few words."""

from __future__ import annotations

import math

__all__ = ["clock", "process_name", "seconds_in_words", "span_in_words"]


def seconds_in_words(seconds: float) -> str:
    """Return a duration in at most six characters: ``0.4s``, ``12s``, ``3m05s``, ``2h14m``, ``3d04h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def clock(seconds: float) -> str:
    """Return a duration as a clock shows it: ``02:51``, ``1:02:51``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60:02}:{rest % 60:02}"


def span_in_words(low: float, high: float) -> str:
    """Return a range of durations in one unit, as ``11-14 min`` (with a dash); ``about 5 min`` if both are the same."""
    units = ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600), (math.inf, "d", 86400))
    unit, size = next((unit, size) for maximum, unit, size in units if high < maximum)
    first, last = (_number(value / size) for value in (low, high))
    return f"about {first} {unit}" if first == last else f"{first}–{last} {unit}"  # noqa: RUF001 - a range


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0")


def process_name(host: str | None, pid: int | None, otherwise: str = "") -> str:
    """Return the host and process, as far as they are known."""
    return otherwise if host is None else host if pid is None else f"{host}:{pid}"
