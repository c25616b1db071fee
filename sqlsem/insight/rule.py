"""The rule over a whole queue, kept while rows come and go: rows of one kind count as one."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from typing import Generic, TypeVar

from sqlsem.model import Request

__all__ = ["Asked", "Kind", "Queue"]

#: A place in a queue: a position, or whatever orders as positions do.
P = TypeVar("P", int, "tuple[float, int]")
#: What the rule looks at: access type, limit, weight.
Kind = tuple[str, "int | None", int]


class Asked(Request):
    """A request as it was written down, or several of one kind together: nothing about it is checked any more."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """It was checked when it was made; of several together the weight may be above the limit."""


#: The same few are made again and again.
_asked = functools.lru_cache(maxsize=10_000)(Asked)


class Queue(Generic[P]):
    """The rows of one resource. `Request.fits` is asked with one row for all rows ahead that are of one kind, so a look
    takes as long as there are kinds (few), and not rows.
    """

    def __init__(self, resource: str) -> None:
        self._resource = resource
        self._places: dict[Kind, list[P]] = {}  # of each kind, in order; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def add(self, kind: Kind, place: P) -> None:
        """A row is there from now on."""
        places = self._places.get(kind)
        if places is None:
            self._places[kind] = [place]
        else:
            bisect.insort(places, place)

    def remove(self, kind: Kind, place: P) -> None:
        """A row that was added is there no more."""
        places = self._places[kind]
        del places[bisect.bisect_left(places, place)]
        if not places:
            del self._places[kind]

    def fits(self, kind: Kind, place: P, cap: int | None = None) -> bool:
        """Whether a request may proceed, standing there."""
        return _asked(self._resource, *kind).fits(self._ahead(place), cap)

    def _ahead(self, place: P) -> Iterator[Request]:
        for (access, limit, weight), places in self._places.items():
            number = bisect.bisect_left(places, place)
            if number:
                yield _asked(self._resource, access, limit, weight * number)
