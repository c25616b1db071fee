"""The text form of results, outputs and errors in the database: limited in length, and safe to print anywhere."""

from __future__ import annotations

import traceback
from typing import Any

from sqlsem.util.printable import clean, clean_json
from sqlsem.values.errors import ConfigurationError, TaskFailed

#: How much of an error, or of a command's output, the database keeps.
MAX_KEPT_CHARACTERS = 8000


def keepable(text: str) -> str:
    """Return a text without characters that a database cannot store, or that are unsafe to print (psql prints them)."""
    return clean(text.replace("\r\n", "\n"), keep="\n\t")


def as_json(value: Any) -> str:
    """Return a result as JSON; if it has no JSON form, its ``repr``."""
    try:
        return clean_json(value, indent=None, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return keepable(repr(value)[:MAX_KEPT_CHARACTERS])


def format_error(error: BaseException | str) -> str:
    """Return an error as text: its message, then the traceback."""
    if isinstance(error, str):
        text = error
    elif isinstance(error, TaskFailed):
        text = str(error)
    elif not isinstance(error, BaseException):
        raise ConfigurationError(f"An error is an exception or text, not {type(error).__name__}")
    else:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = "".join(traceback.format_tb(error.__traceback__))
        text = f"{summary}\n{trace[-MAX_KEPT_CHARACTERS + len(summary[:MAX_KEPT_CHARACTERS]) :]}".rstrip()
    return keepable(text)[:MAX_KEPT_CHARACTERS]
