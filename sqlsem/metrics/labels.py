"""Names as labels: few of them, however many resources there are, and none that could harm a page or a terminal."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from sqlsem.printable import clean

__all__ = ["MOST_LABELS", "OTHER", "Few", "Patterns", "label"]

#: What all those share that have no label of their own.
OTHER = "other"
#: So many have one.
MOST_LABELS = 100
#: The longest label.
MOST_CHARACTERS = 120

_VARIABLE = re.compile(r"(?=[0-9a-fA-F-]*[0-9])[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*|\d+")


def label(text: object) -> str:
    """Words of others as a label: printable, and not long. None is an empty one."""
    words = clean("" if text is None else str(text))
    return words if len(words) <= MOST_CHARACTERS else f"{words[: MOST_CHARACTERS - 1]}…"


class Patterns:
    """Makes of a resource's name the pattern that stands for it and its like.

    Args:
        given: Patterns as of file names (``load:*``); the first that fits counts. Of a name that none fits, numbers and
            long hexadecimal words become ``*``.

    >>> Patterns(["dim_*"])("dim_customer"), Patterns()("load:2026-11-22"), Patterns()("nightly")
    ('dim_*', 'load:*-*-*', 'nightly')
    """

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._given = [(label(one), re.compile(fnmatch.translate(one))) for one in given]

    def __call__(self, resource: str) -> str:
        """The pattern of one."""
        for name, pattern in self._given:
            if pattern.match(resource):
                return name
        return label(_VARIABLE.sub("*", resource))


class Few:
    """Keeps the number of different labels, or sets of labels, small: the first that come have their own."""

    def __init__(self, most: int = MOST_LABELS) -> None:
        self._most = most
        self._known: dict[tuple[str, ...], None] = {}

    def of(self, *labels: str) -> tuple[str, ...]:
        """These, or as many times ``other``."""
        if labels in self._known:
            return labels
        if len(self._known) < self._most:
            self._known[labels] = None
            return labels
        return (OTHER,) * len(labels)

    def all_of(self, wanted: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], tuple[str, ...]]:
        """For all that are there at one time, with how much each matters. Those that had their own keep it; for the
        others there is room as far as those go that are there no more; those that matter most come first.
        """
        order = sorted((one for one in wanted if one not in self._known), key=lambda one: (-wanted[one], one))
        gone = [one for one in self._known if one not in wanted]
        for one in order:
            if len(self._known) >= self._most:
                if not gone:
                    break
                del self._known[gone.pop(0)]
            self._known[one] = None
        return {one: one if one in self._known else (OTHER,) * len(one) for one in wanted}
