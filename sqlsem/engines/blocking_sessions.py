"""Describes the sessions whose locks block an installation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlsem.printable import clean

__all__ = ["name_sessions"]


def name_sessions(rows: Iterable[Sequence[Any]]) -> str:
    """Return a description of the sessions in the rows of statement ``blockers``: number, login, program, host, state,
    and since when.
    """
    descriptions = [
        f"session {number} of login {login} ({', '.join(filter(None, (program, host))) or 'no name'}), "
        f"{state or 'at work'} since {since or 'a time that this login may not see,'} UTC"
        for number, login, program, host, state, since in rows
    ]
    return clean("; ".join(descriptions)) or "a session that has ended since, or too much traffic"
