"""What is kept of results, outputs and errors: as long as a database should keep, and safe to show anywhere."""

from __future__ import annotations

import traceback
from typing import Any

from sqlsem.errors import ConfigurationError, TaskFailed
from sqlsem.printable import clean, clean_json

__all__ = ["MOST_KEPT_CHARACTERS", "as_json", "format_error", "keepable"]

#: What is kept of an error or of a command's output.
MOST_KEPT_CHARACTERS = 8000


def keepable(text: str) -> str:
    """What any database can keep, and any program that reads it there may show (psql does)."""
    return clean(text.replace("\r\n", "\n"), keep="\n\t")


def as_json(value: Any) -> str:
    """A result as it is kept, whatever it is."""
    try:
        return clean_json(value, indent=None, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return keepable(repr(value)[:MOST_KEPT_CHARACTERS])


def format_error(error: BaseException | str) -> str:
    """An error as the log keeps it: what it says first, then where it happened."""
    if isinstance(error, str):
        words = error
    elif isinstance(error, TaskFailed):
        words = str(error)
    elif not isinstance(error, BaseException):
        raise ConfigurationError(f"An error is an exception or text, not {type(error).__name__}")
    else:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = "".join(traceback.format_tb(error.__traceback__))
        words = f"{summary}\n{trace[-MOST_KEPT_CHARACTERS + len(summary[:MOST_KEPT_CHARACTERS]) :]}".rstrip()
    return keepable(words)[:MOST_KEPT_CHARACTERS]
