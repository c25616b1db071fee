"""The T-SQL procedures, as text without comments."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from sqlsem import sql

SCRIPTS = sql.rerunnable("mssql")


@functools.cache
def text_of(name: str) -> str:
    return re.sub(r"('(?:[^']|'')*')|--[^\n]*", r"\1", sql.script("mssql", name))


def procedures() -> Iterator[tuple[str, str]]:
    for name in SCRIPTS:
        for part in re.split(r"(?m)^CREATE OR ALTER PROCEDURE ", text_of(name))[1:]:
            match = re.match(r"sqlsem\.\[?(\w+)", part)
            assert match is not None
            yield match[1], re.split(r"(?m)^GO$", part)[0]


PROCEDURES = dict(procedures())


class Message(NamedTuple):
    """The beginning of a message, and the number of its error. Several numbers: the code after the text decides."""

    procedure: str
    text: str
    numbers: set[int]


@functools.cache
def messages() -> list[Message]:
    found = []
    for name, procedure in PROCEDURES.items():
        waiting: list[Message] = []  # a later call of raise_error takes their texts
        parts = re.split(r"((?:THROW 5\d{4}, )?N'sqlsem: (?:[^']|'')*')", procedure)
        for literal, code in zip(parts[1::2], parts[2::2], strict=True):
            message = Message(name, literal.partition("N'")[2][:-1].replace("''", "'"), set())
            found.append(message)
            code = re.sub(r"N'(?:[^']|'')*'", "", code)
            raised = re.findall(r"\braise_error (5\d{4})", code)
            if literal.startswith("THROW"):
                message.numbers.add(int(literal[6:11]))
            elif re.match(r"[^;]*;\s+EXEC sqlsem\.raise_error 5", code):
                message.numbers.add(int(raised.pop(0)))
            else:
                waiting.append(message)
            if raised:
                for known in waiting:
                    known.numbers.update(map(int, raised))
                waiting.clear()
    return found


def numbers_of(text: str) -> set[int]:
    """Return the numbers of the errors whose messages begin as ``text`` does; none if too few words are known."""
    known = [message for message in messages() if len(message.text) >= 20 and text.startswith(message.text)]
    longest = max((len(message.text) for message in known), default=0)
    return {number for message in known if len(message.text) == longest for number in message.numbers}


def granted() -> dict[str, str]:
    """Return for each routine the letters of the roles that may run it."""
    text = text_of("permissions").partition("INSERT INTO @right")[2].partition("UNION ALL")[0]
    return dict(re.findall(r"\(N'(\w+)', N'([upwor]+)'\)", text))
