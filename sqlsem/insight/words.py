"""Write durations, numbers, processes and requests in a few words."""

from __future__ import annotations

import math

from sqlsem.values.locks import Entry, Past
from sqlsem.values.names import access_in_words

__all__ = [
    "access_of",
    "by_login",
    "clock",
    "counted",
    "process_name",
    "program_of",
    "requester",
    "seconds_in_words",
    "span_in_words",
]


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


def requester(row: Entry | Past) -> str:
    """Return the requester as ``etl1:4711``."""
    return process_name(row.host, row.pid, row.requesting_id)


def access_of(row: Entry | Past) -> str:
    """Return the kind of lock that a request is for."""
    return access_in_words(row.access, row.limit, row.weight)


def program_of(entry: Entry) -> str:
    """Return the program of a request, and its thread, except for the main thread."""
    thread = "" if entry.owner in (None, "", "MainThread") else entry.owner
    return f"{entry.program or ''} {thread or ''}".strip()


def by_login(login: str | None) -> str:
    """Return `` by anna``; an empty text if the login is not known."""
    return f" by {login}" if login else ""


def counted(number: int, noun: str, form: str = "") -> str:
    """Return a number of objects, as ``1 row`` or ``2 rows``. ``form``: how the number is written.

    >>> counted(1, "row"), counted(2000, "row", ",")
    ('1 row', '2,000 rows')
    """
    return f"{number:{form}} {noun}{'' if number == 1 else 's'}"
