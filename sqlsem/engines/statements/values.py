"""Conversions of stored values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

T = TypeVar("T")


def as_text(value: bytes) -> str:
    """Decode bytes that should have been text."""
    return value.decode("utf-8", "replace")


def named(rows: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Return rows as dicts, for many accesses: a row of a driver may search the names of all columns at each access."""
    names = rows[0].keys() if rows else ()
    return (dict(zip(names, row, strict=True)) for row in rows)


def shown(kind: type[T], row: Any, **known: Any) -> T:
    """Return a row as an object of class ``kind`` with one field for each column. Fields in ``known`` are not read from
    the row. SQLite stores any value in any column, so a row that was written by hand may contain invalid values. They
    must not hide the other rows.
    """
    for name, is_time in _fields_of(kind):  # type: ignore[arg-type]
        if name not in known:
            value = row[name]
            if is_time:
                value = as_time(value)
            known[name] = as_text(value) if isinstance(value, bytes) else value
    return kind(**known)


@functools.cache
def _fields_of(kind: type[Any]) -> list[tuple[str, bool]]:
    """Return the names of the fields, and for each True if it is a time."""
    return [(field.name, "datetime" in str(field.type)) for field in dataclasses.fields(kind)]


def as_time(seconds: object) -> datetime | None:
    """Return a stored time; None for a value that is not a time."""
    if not isinstance(seconds, (int, float)):
        return None
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):  # a year that datetime does not have
        return None
