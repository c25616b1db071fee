"""Apply the rule (`Request.fits`) to a whole queue while rows come and go: rows of one kind count as one row."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from typing import Generic, TypeVar

from sqlsem.values.locks import READ, UPGRADE, Entry, Past, Request

__all__ = ["CONVERTED", "Kind", "Queue", "QueuedRequest", "granted_access"]

#: A position in a queue, or any value that is ordered like positions.
P = TypeVar("P", int, "tuple[float, int]")
#: The fields that the rule compares: access type, limit, weight.
Kind = tuple[str, "int | None", int]
#: The outcomes of a finished row after which its request continued in another row.
CONVERTED = ("upgraded", "downgraded", "handed_over")


def granted_access(row: Entry | Past) -> str:
    """Return the access with which the row was granted. (The start of an upgrade is not recorded, and a row may end
    during one.)
    """
    return READ if row.access.startswith(UPGRADE) else row.access


class QueuedRequest(Request):
    """A recorded request, or several requests of one kind as one; it is not validated again."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Skip the validation: the weight of several requests together may be above the limit."""


#: Cached, because a queue has few kinds of requests.
_queued_request = functools.lru_cache(maxsize=10_000)(QueuedRequest)


class Queue(Generic[P]):
    """The rows of one resource. A check passes one row for each kind to `Request.fits`, in position of all rows ahead:
    its time grows with the number of kinds, which are few.
    """

    def __init__(self, resource: str) -> None:
        self._resource = resource
        self._positions: dict[Kind, list[P]] = {}  # by kind, in order; no list is empty

    def __len__(self) -> int:
        return sum(map(len, self._positions.values()))

    def add(self, kind: Kind, position: P) -> None:
        """Add a row."""
        positions = self._positions.get(kind)
        if positions is None:
            self._positions[kind] = [position]
        else:
            bisect.insort(positions, position)

    def remove(self, kind: Kind, position: P) -> None:
        """Remove a row."""
        positions = self._positions[kind]
        del positions[bisect.bisect_left(positions, position)]
        if not positions:
            del self._positions[kind]

    def fits(self, kind: Kind, position: P, cap: int | None = None) -> bool:
        """Return True if a request of this kind at this position may be granted."""
        return _queued_request(self._resource, *kind).fits(self._ahead(position), cap)

    def _ahead(self, position: P) -> Iterator[Request]:
        for (access, limit, weight), positions in self._positions.items():
            number = bisect.bisect_left(positions, position)
            if number:
                yield _queued_request(self._resource, access, limit, weight * number)
