"""Checks of names, numbers and durations given by the caller: one function for each kind."""

from __future__ import annotations

import codecs
import re
import unicodedata
from datetime import timedelta

from sqlsem.values.errors import ConfigurationError

__all__ = [
    "MAX_ID",
    "MAX_INT",
    "MAX_LABEL",
    "MAX_NAME",
    "MAX_NOTE",
    "MAX_SECONDS",
    "Duration",
    "check_call",
    "check_count",
    "check_duration",
    "check_id",
    "check_name",
    "check_some",
    "utf16_length",
]

#: SQL Server's limit for an application lock's name, and so the longest name on any engine (in UTF-16 units).
MAX_NAME = 255
MAX_LABEL = 64
MAX_NOTE = 1000
MAX_INT = 2**31 - 1
MAX_ID = 2**63 - 1
#: How many characters of a refused value its message quotes.
MAX_QUOTED = 80

# Load the codec now: a child that is forked while another thread imports a module could never load it.
codecs.lookup("utf-16-le")


def utf16_length(text: str) -> int:
    """Return the UTF-16 units of a text, as SQL Server counts. Raises `UnicodeEncodeError` if the text is invalid."""
    return len(text.encode("utf-16-le")) // 2


def check_name(what: str, value: object, longest: int = MAX_NAME) -> str:
    """Return ``value`` if it can serve as a name on every engine, else raise `ConfigurationError`."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} must be a string, not {type(value).__name__}: {short(value)}")
    if not value:
        raise ConfigurationError(f"{what} is empty; give it a name of 1 to {longest} characters")
    if value != value.strip():
        raise ConfigurationError(
            f"{what} {short(value)} begins or ends with white space, which databases compare differently; strip it"
        )
    _check_text(what, value, longest)
    if not value.isprintable() and any(unicodedata.category(character) == "Cc" for character in value):
        raise ConfigurationError(f"{what} {short(value)} contains a control character; use printable text")
    return value


def _check_text(what: str, value: str, longest: int) -> None:
    try:
        length = utf16_length(value)
    except UnicodeEncodeError:
        raise ConfigurationError(f"{what} {short(value)} holds half a surrogate pair and is not valid text") from None
    if length > longest:
        raise ConfigurationError(f"{what} has {length} characters, at most {longest} fit: {value[:40]!r}…")


def check_some(what: str, value: object, longest: int = MAX_NAME) -> None:
    """Check a name that selects rows, or None, which selects all. Any text that a row may hold is allowed: another kind
    of participant may have written a name that `check_name` refuses, and operators must see that row.
    """
    if value is None:
        return
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} must be a string, not {type(value).__name__}: {short(value)}")
    _check_text(what, value, longest)
    if "\0" in value:
        raise ConfigurationError(f"{what} {short(value)} contains a NUL, which no database stores in a name")


def check_id(what: str, value: object) -> int:
    """Return ``value`` if it can be a number that a database has given to a row, else raise `ConfigurationError`."""
    return check_count(what, value, 0, MAX_ID)


def check_call(what: str, value: object) -> None:
    """Raise `ConfigurationError` if the value cannot be called."""
    if not callable(value):
        raise ConfigurationError(f"{what} must be a function, not {type(value).__name__}: {short(value)}")


def short(value: object) -> str:
    """Return ``repr(value)``, or its beginning. (Python refuses the ``repr`` of a very long number.)"""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def check_count(what: str, value: object, minimum: int = 1, maximum: int = MAX_INT) -> int:
    """Return ``value`` if it is a whole number from ``minimum`` to ``maximum``, else raise `ConfigurationError`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{what} must be a whole number, not {type(value).__name__}: {short(value)}")
    if not minimum <= value <= maximum:
        raise ConfigurationError(f"{what} must be from {minimum} to {maximum}, not {short(value)}")
    return value


#: A length of time, as every call takes it: seconds, text such as ``"10s"`` or ``"1h30m"``, or a `timedelta`.
Duration = float | str | timedelta
#: The longest duration that a database can store, in milliseconds, as an integer.
MAX_SECONDS = MAX_INT // 1000
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def check_duration(what: str, value: object, *, zero: bool = True, maximum: float = MAX_SECONDS) -> float:
    """Return ``value`` as seconds, or raise `ConfigurationError`. All calls take durations alike: a number of seconds
    (``5``, ``0.5``), text (``"90"``, ``"1.5s"``, ``"250ms"``, ``"1h30m"``; units ms, s, m, h, d, w) or a `timedelta`.

    >>> check_duration("The window", "1h30m")
    5400.0
    """
    seconds: object = value
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdw])", value)
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
            seconds = float(value)
        elif parts and "".join(number + unit for number, unit in parts) == value:
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        else:
            raise ConfigurationError(
                f"{what} {short(value)} is not a duration; write seconds, or 90s, 5m, 2h, 1d, 1h30m"
            )
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ConfigurationError(
            f"{what} must be a number of seconds, text such as '90s' or '1h30m', or a timedelta, not "
            f"{type(value).__name__}: {short(value)}"
        )
    # 'not <=' also refuses NaN
    if not 0 <= seconds <= maximum or (seconds == 0 and not zero):
        raise ConfigurationError(
            f"{what} must be {'at least 0' if zero else 'above 0'} and at most {maximum:.0f} seconds, "
            f"not {short(value)}"
        )
    return float(seconds)
