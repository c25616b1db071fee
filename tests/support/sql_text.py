"""Reads SQL as text: parentheses, and lists."""

from __future__ import annotations

import re

__all__ = ["arguments", "parts"]


def arguments(text: str, start: int) -> str:
    """Return the text between the parenthesis at ``start`` and its end."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return " ".join(text[start + 1 : at].split())
    raise AssertionError("a parenthesis without an end")


def parts(text: str, separator: str = ",") -> list[str]:
    """Split a text at a separator outside of parentheses."""
    depth, found = 0, [""]
    for piece in re.split(rf"([()]|{separator})", text):
        depth += (piece == "(") - (piece == ")")
        if depth == 0 and re.fullmatch(separator, piece):
            found.append("")
        else:
            found[-1] += piece
    return [" ".join(piece.split()) for piece in found if piece.strip()]
