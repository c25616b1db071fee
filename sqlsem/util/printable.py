"""Escape control characters in all text that is printed or logged.

Names, notes, bodies, errors and hosts are written by other people. An escape sequence in them could control the
reader's terminal, a line break could forge a log line, and a bidirectional override could hide the real text.
Therefore all output goes through `clean` or `clean_json`: the command line prints with `sqlsem.ops.terminal.output`,
and the logger ``sqlsem`` has a `CleanFilter`, so its records are clean in every handler.
"""

from __future__ import annotations

import json
import logging
import traceback
import unicodedata
from typing import Any

__all__ = ["CleanFilter", "CleanFormatter", "clean", "clean_json", "clean_trace", "first_line"]


def clean(text: str, keep: str = "") -> str:
    r"""Escape all characters that are not printable, as in Python's literals, except those in ``keep``.

    They are: control characters (C0, C1, DEL), line and paragraph separators, marks and overrides of direction and
    other characters without a shape, lone surrogates, private and unassigned characters. Blanks of all sorts stay.
    Idempotent.

    >>> clean("a\x1b[2Jb\r\nc\u202ed")
    'a\\x1b[2Jb\\r\\nc\\u202ed'
    """
    if text.isprintable():  # the usual case, quickly
        return text
    return "".join(
        character
        if character.isprintable() or character in keep or unicodedata.category(character) == "Zs"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def first_line(text: object) -> str:
    """Return the first line of an error, without the lines that repeat a statement. None gives ""."""
    return str(text or "").strip().partition("\n")[0].rstrip()


def clean_json(value: Any, *, indent: int | None = 2, allow_nan: bool = True, ascii_only: bool = False) -> str:
    r"""Return a value as JSON of printable characters only, and of the line breaks between its parts.

    >>> clean_json(["\x9b\u202e\x7f é"], indent=None)
    '["\\u009b\\u202e\\u007f é"]'
    """
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent, allow_nan=allow_nan)
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1] for character in text
    )


def clean_trace(text: str) -> str:
    """Clean a traceback, and indent its lines, so that none of them looks like a log record."""
    return "\n".join(f"    {clean(line.rstrip())}" for line in text.split("\n")).rstrip()


class _Clean:
    """The text of another object, cleaned."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return clean(str(self._value))

    def __repr__(self) -> str:
        return clean(repr(self._value))


def _clean_argument(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    return value if value is None or isinstance(value, bool | int | float) else _Clean(value)


class CleanFilter(logging.Filter):
    """Lets every record through, cleaned: one record is one line in every handler, but for its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Clean the record. The template of its message stays, as error collectors group records by it."""
        if isinstance(record.msg, str):
            record.msg = clean(record.msg)
        else:
            record.msg = clean(str(record.msg))
        if isinstance(record.args, dict):
            record.args = {name: _clean_argument(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(_clean_argument(value) for value in record.args)
        record.threadName = clean(record.threadName or "")
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            record.exc_text = clean_trace("".join(traceback.format_exception(*record.exc_info)))
        return True


class CleanFormatter(logging.Formatter):
    """A formatter for the command line's own handlers, which may get records of other loggers, too."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the message as one line."""
        return clean(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return the traceback in lines that do not look like records."""
        return clean_trace(super().formatException(ei))
