"""Helpers for sessions that use the cursor of a caller, in the caller's transaction."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlsem.values.errors import ConfigurationError


def execute(cursor: Any, text: str, parameters: Any) -> None:
    """Run a statement. Raises `ConfigurationError` for a cursor whose methods must be awaited."""
    answer = cursor.execute(text, parameters) if parameters else cursor.execute(text)
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise ConfigurationError(
            f"{type(cursor).__name__} is awaited, and put() does not await; give it a cursor of a blocking connection",
            code="transaction",
        )


def values(row: Any) -> Sequence[Any]:
    """Return the values of a row of any cursor: a sequence, a mapping, or the row's only value."""
    if isinstance(row, Mapping):
        return list(row.values())
    if isinstance(row, str | bytes):
        return (row,)
    # (A row of pyodbc has only `__getitem__` to show that it is a sequence.)
    return tuple(row) if isinstance(row, Iterable) or hasattr(type(row), "__getitem__") else (row,)
