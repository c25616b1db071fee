"""Turn names into labels: few, however many resources there are, and none that could harm a page or a terminal."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from sqlsem.util.printable import clean

__all__ = ["MAX_LABELS", "OTHER", "Few", "Patterns", "label"]

#: The shared label of all names without a label of their own.
OTHER = "other"
#: At most this many names have a label of their own.
MAX_LABELS = 100
#: The longest label, in characters.
MAX_CHARACTERS = 120

_VARIABLE = re.compile(r"(?=[0-9a-fA-F-]*[0-9])[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*|\d+")


def label(text: object) -> str:
    """Return another program's text as a label: printable, and not long. None becomes an empty label."""
    words = clean("" if text is None else str(text))
    return words if len(words) <= MAX_CHARACTERS else f"{words[: MAX_CHARACTERS - 1]}…"


class Patterns:
    """Maps a resource's name to the pattern that stands for it and similar names.

    Args:
        given: Patterns as of file names (``load:*``); the first that matches counts. In a name that matches none,
            numbers and long hexadecimal words become ``*``.

    >>> Patterns(["dim_*"])("dim_customer"), Patterns()("load:2026-11-22"), Patterns()("nightly")
    ('dim_*', 'load:*-*-*', 'nightly')
    """

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._given = [(label(pattern), re.compile(fnmatch.translate(pattern))) for pattern in given]

    def __call__(self, resource: str) -> str:
        """Return the pattern of a name."""
        for name, pattern in self._given:
            if pattern.match(resource):
                return name
        return label(_VARIABLE.sub("*", resource))


class Few:
    """Limits the number of different labels, or sets of labels: the first that come keep their own."""

    def __init__(self, maximum: int = MAX_LABELS) -> None:
        self._maximum = maximum
        self._known: dict[tuple[str, ...], None] = {}

    def of(self, *labels: str) -> tuple[str, ...]:
        """Return the labels if they have a place among the known ones; else ``other`` for each."""
        if labels in self._known:
            return labels
        if len(self._known) < self._maximum:
            self._known[labels] = None
            return labels
        return (OTHER,) * len(labels)

    def all_of(self, importance: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Return the labels of all current names, given the importance of each. A name keeps its label; a new name gets
        the label of a name that is gone, the most important first.
        """
        order = sorted(
            (labels for labels in importance if labels not in self._known),
            key=lambda labels: (-importance[labels], labels),
        )
        gone = [labels for labels in self._known if labels not in importance]
        for labels in order:
            if len(self._known) >= self._maximum:
                if not gone:
                    break
                del self._known[gone.pop(0)]
            self._known[labels] = None
        return {labels: labels if labels in self._known else (OTHER,) * len(labels) for labels in importance}
