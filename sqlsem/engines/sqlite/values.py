"""Values as people write and read them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

T = TypeVar("T")


def user_name(number: int | None = None) -> str:
    """The name of an operating system's user (left out: who runs this process), or else the number."""
    try:
        import pwd
    except ImportError:  # Windows
        import getpass

        return getpass.getuser()
    if number is None:
        number = os.geteuid()
    if number not in _user_names:  # a directory service may take long to answer
        try:
            _user_names[number] = pwd.getpwuid(number).pw_name
        except KeyError:
            _user_names[number] = str(number)
    return _user_names[number]


_user_names: dict[int, str] = {}


def as_text(value: bytes) -> str:
    """Bytes that should have been text."""
    return value.decode("utf-8", "replace")


def named(rows: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Many rows as dicts: SQLite's own look through the names of all columns each time."""
    names = rows[0].keys() if rows else ()
    return (dict(zip(names, row, strict=True)) for row in rows)


def shown(kind: type[T], row: Any, **known: Any) -> T:
    """A row for people, whose columns are called as the fields of ``kind`` are, but for those ``known`` already. SQLite
    keeps anything in any column, so what somebody wrote by hand need not be what it should: that must not hide the
    other rows.
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
    """Their names, and whether they are times."""
    return [(field.name, "datetime" in str(field.type)) for field in dataclasses.fields(kind)]


def as_time(seconds: object) -> datetime | None:
    """A time of the database's; None for what is none."""
    if not isinstance(seconds, (int, float)):
        return None
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):  # beyond the years that can be told
        return None
