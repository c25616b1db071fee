"""Requests that wait by priority: the queue of a resource, and the answer of `OptionalSession.acquire_by_priority`.

Each waiter with a priority has an entry in the *priority queue* of the resource. That queue is a resource of its own
(`priority_queue`). All its entries share it, and an entry is no grant of the resource itself. The head of the queue may
try to acquire the resource, without waiting. The transaction that grants the request also removes the entry. The
granted row is an ordinary row, with a higher number than all earlier rows. So the rule of `Request.fits` protects
holders, no matter in which order the priority queue is served.

The order is by the time of the request, less the resource's ageing for each step of priority. So a later request can
overtake an earlier one only if it comes less than (difference in priority) times ageing after it, and no request
starves.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from sqlsem.util.record import record
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import READ, Entry, Request, Ticket
from sqlsem.values.names import PRIORITY_PREFIX, RESERVED

#: Priorities are from 0 up to this number less 1. It is also the limit of priority entries, whose weight is the
#: priority plus 1.
PRIORITY_LEVELS = 100


def priority_queue(resource: str) -> str:
    """Return the resource in whose queue requests for ``resource`` wait by priority."""
    return PRIORITY_PREFIX + resource


def priority_entry(request: Request) -> Request:
    """Return the request that a waiter registers in the priority queue."""
    assert request.priority is not None
    return Request(priority_queue(request.resource), READ, PRIORITY_LEVELS, request.priority + 1, request.note)


def why_no_priorities(resource: str) -> str | None:
    """Return why priorities cannot be set for this resource, or None if they can.

    >>> why_no_priorities("rate:api")
    "'rate:api' is the queue of a rate, which is always first come, first served; priorities cannot be set there"
    """
    for prefix, (description, _) in RESERVED.items():
        if resource.startswith(prefix):
            return (
                f"{resource!r} is {description}, which is always first come, first served; "
                f"priorities cannot be set there"
            )
    return None


def is_priority_entry(entry: Entry) -> bool:
    """Return True if a row of a priority queue is an entry of a waiter that has not been revoked."""
    shape = entry.access == READ and entry.limit == PRIORITY_LEVELS and entry.member_id is not None
    return shape and entry.state in ("holds", "waits")


def priority_missing(resource: str) -> ConfigurationError:
    """Return the error for a request without a priority on a resource that has priorities."""
    return ConfigurationError(
        f"No priority is named for {resource!r}, which is granted by priority; name one (priority=0 to "
        f"{PRIORITY_LEVELS - 1}), or have an operator end that: sqlsem set {shlex.quote(resource)} --no-priorities",
        resource=resource,
        code="priority",
    )


def priorities_not_set(resource: str) -> ConfigurationError:
    """Return the error for a request with a priority on a resource that has none."""
    return ConfigurationError(
        f"No priorities are set for {resource!r}, and the request names one; an operator sets them with: "
        f"sqlsem set {shlex.quote(resource)} --priorities --allow-new",
        resource=resource,
        code="priority",
    )


@record
class PriorityAnswer:
    """The answer to a request with a priority. ``ticket`` is that of the granted row, or of the entry in the priority
    queue; None if there is neither.
    """

    ticket: Ticket | None
    granted: bool
    #: The position of the waiter right ahead, if any, and the number of waiters ahead.
    before: int | None = None
    ahead: int = 0

    @classmethod
    def of_row(cls, request: Request, requesting_id: str, row: Sequence[Any]) -> PriorityAnswer:
        """Return the answer from a row of the server's routine: the position of the granted row or of the entry, True
        if it is granted, ``before`` and ``ahead``.
        """
        position, granted, before, ahead = row
        if position is None:
            return cls(None, False)
        resource = request.resource if granted else priority_queue(request.resource)
        return cls(Ticket(resource, int(position), requesting_id, bool(granted)), bool(granted), before, ahead or 0)
