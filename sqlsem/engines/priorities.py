"""Requests that wait by priority, as a capability of a session (see `sqlsem.engines.protocol`).

The *line* of a resource with priorities is a resource of its own (`line_of`), where each who waits has a place: a row
that shares with all others there, and lets nobody in. Who is first of the line may try for the resource itself, as does
any request that is only wanted if it is free; its place goes in the same transaction. What is granted is a row like any
other, with a number above all before it: who holds what follows from the rule alone, whatever the line's order is.

That order is fixed when a request enters: the time of asking, less the resource's ageing for each step of priority. So
it is overtaken only by those that come less than (difference in priority) times ageing after it: nobody starves.
"""

from __future__ import annotations

import abc
import shlex
from dataclasses import dataclass
from typing import ClassVar

from sqlsem.errors import ConfigurationError
from sqlsem.model import READ, Entry, Request, Ticket
from sqlsem.names import PRIORITY_PREFIX, RESERVED

__all__ = [
    "LINE",
    "PLACES",
    "PrioritySession",
    "Turn",
    "is_place",
    "line_of",
    "never_ranked",
    "no_priorities",
    "place_of",
    "unranked",
]

#: What the name of a line begins with.
LINE = PRIORITY_PREFIX
#: Priorities are below it. It is the limit of places, whose weights are 1 more than the priority.
PLACES = 100


def line_of(resource: str) -> str:
    """The resource where those wait who ask for this one with a priority."""
    return LINE + resource


def place_of(request: Request) -> Request:
    """What a request has in the line."""
    assert request.priority is not None
    return Request(line_of(request.resource), READ, PLACES, request.priority + 1, request.note)


def never_ranked(resource: str) -> str | None:
    """What is wrong with priorities for this resource, if anything is.

    >>> never_ranked("rate:api")
    "'rate:api' is the queue of a rate, which is always first come, first served; priorities cannot be set there"
    """
    for prefix, (what, _) in RESERVED.items():
        if resource.startswith(prefix):
            return f"{resource!r} is {what}, which is always first come, first served; priorities cannot be set there"
    return None


def is_place(entry: Entry) -> bool:
    """Whether a row of a line is a place there that counts."""
    shape = entry.access == READ and entry.limit == PLACES and entry.member_id is not None
    return shape and entry.state in ("holds", "waits")


def unranked(resource: str) -> ConfigurationError:
    """What is wrong with a request without a priority, where there are priorities."""
    return ConfigurationError(
        f"No priority is named for {resource!r}, which is granted by priority; name one (priority=0 to {PLACES - 1}), "
        f"or have an operator end that: sqlsem set {shlex.quote(resource)} --no-priorities",
        resource=resource,
    )


def no_priorities(resource: str) -> ConfigurationError:
    """What is wrong with a request that has a priority, where there are none."""
    return ConfigurationError(
        f"No priorities are set for {resource!r}, and the request names one; an operator sets them with: "
        f"sqlsem set {shlex.quote(resource)} --priorities --allow-new",
        resource=resource,
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of asking: ``ticket`` is what was granted, or the place in the line; None: nothing is there."""

    ticket: Ticket | None
    granted: bool
    #: Who waits right before it, if anybody does, and how many do.
    before: int | None = None
    ahead: int = 0

    @classmethod
    def of(
        cls,
        request: Request,
        requesting_id: str,
        position: int | None,
        granted: bool,
        before: int | None,
        ahead: int | None,
    ) -> Turn:
        """From what a routine has answered: the number of the row, or of the place."""
        if position is None:
            return cls(None, False)
        resource = request.resource if granted else line_of(request.resource)
        return cls(Ticket(resource, int(position), requesting_id, bool(granted)), bool(granted), before, ahead or 0)


class PrioritySession(abc.ABC):
    """Requests with a priority: on the main session."""

    offers: ClassVar[str] = "priorities"

    @abc.abstractmethod
    def acquire_by_priority(
        self,
        member_id: int,
        requesting_id: str,
        owner: str,
        uid: str,
        request: Request,
        only_if_free: bool,
        place: Ticket | None,
    ) -> Turn:
        """Have what a request with a priority asks for if it is its turn, with a sign of life; else, unless
        ``only_if_free``, a place in the line. To be called again with that ``place`` until it is granted.

        All in one transaction, under the gate of the resource, unless it is seen before that its turn has not come. Who
        is first of those ahead is tested, and removed when it is dead. Repeated with the same ``uid`` it finds what was
        done before, and nothing where that was taken away meanwhile; `LockSession.cancel` with it gives back the place
        and what was granted.

        Raises `ConfigurationError` where the resource has no priorities (any more). May raise `Busy`.
        """

    @abc.abstractmethod
    def priorities(self) -> dict[str, float]:
        """The resources with priorities, and the seconds of waiting that a step of priority is worth."""
