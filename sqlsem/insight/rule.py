"""Apply the rule to a whole queue while rows come and go: rows of one kind count as one."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from typing import Generic, TypeVar

from sqlsem.model import Request

__all__ = ["Kind", "Queue", "QueuedRequest"]

#: A position in a queue, or any value that is ordered like positions.
P = TypeVar("P", int, "tuple[float, int]")
#: The fields that the rule compares: access type, limit, weight.
Kind = tuple[str, "int | None", int]


class QueuedRequest(Request):
    """A recorded request, or several of one kind together: not validated again."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Skip validation: the weight of several together may be above the limit."""


#: The same few are made again and again.
_queued_request = functools.lru_cache(maxsize=10_000)(QueuedRequest)


class Queue(Generic[P]):
    """The rows of one resource. `Request.fits` gets one row for all rows ahead of one kind, so a check takes as long as
    there are kinds (few), not rows.
    """

    def __init__(self, resource: str) -> None:
        self._resource = resource
        self._places: dict[Kind, list[P]] = {}  # by kind, in order; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def add(self, kind: Kind, place: P) -> None:
        """Add a row."""
        places = self._places.get(kind)
        if places is None:
            self._places[kind] = [place]
        else:
            bisect.insort(places, place)

    def remove(self, kind: Kind, place: P) -> None:
        """Remove a row."""
        places = self._places[kind]
        del places[bisect.bisect_left(places, place)]
        if not places:
            del self._places[kind]

    def fits(self, kind: Kind, place: P, cap: int | None = None) -> bool:
        """Return True if a request at this place may be granted."""
        return _queued_request(self._resource, *kind).fits(self._ahead(place), cap)

    def _ahead(self, place: P) -> Iterator[Request]:
        for (access, limit, weight), places in self._places.items():
            number = bisect.bisect_left(places, place)
            if number:
                yield _queued_request(self._resource, access, limit, weight * number)
