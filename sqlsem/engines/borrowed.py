"""Sessions that work by somebody else's cursor, inside that one's transaction."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlsem.errors import ConfigurationError

__all__ = ["columns", "execute", "values"]


def execute(cursor: Any, text: str, parameters: Any) -> None:
    """Run a statement. Raises `ConfigurationError` for a cursor whose methods are to be awaited."""
    answer = cursor.execute(text, parameters) if parameters else cursor.execute(text)
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise ConfigurationError(
            f"{type(cursor).__name__} is awaited, and put() does not await; give it a cursor of a blocking connection"
        )


def columns(cursor: Any) -> list[str]:
    """The names of what the last statement has answered; none where that has no rows."""
    return [column[0] for column in cursor.description or ()]


def values(row: Any) -> Sequence[Any]:
    """The values of a row, whatever the cursor makes of rows: it may be its only value."""
    if isinstance(row, Mapping):
        return list(row.values())
    if isinstance(row, str | bytes):
        return (row,)
    # (pyodbc's are sequences by their items alone.)
    return tuple(row) if isinstance(row, Iterable) or hasattr(type(row), "__getitem__") else (row,)
