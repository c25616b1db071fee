"""The values of locks: requests, tickets, rows of the queue, history. Immutable; no I/O."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from sqlsem.util.record import AsDict, record
from sqlsem.util.runtime import monotonic
from sqlsem.values.checks import (
    MAX_ID,
    MAX_INT,
    MAX_LABEL,
    MAX_NAME,
    MAX_NOTE,
    MAX_SECONDS,
    Duration,
    check_call,
    check_count,
    check_duration,
    check_id,
    check_name,
    check_some,
    utf16_length,
)
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.names import access_in_words

__all__ = [
    "MAX_ID",
    "MAX_INT",
    "MAX_LABEL",
    "MAX_NAME",
    "MAX_NOTE",
    "MAX_SECONDS",
    "READ",
    "UPGRADE",
    "WRITE",
    "Duration",
    "Entry",
    "GuardedTable",
    "Heartbeat",
    "OnceEntry",
    "Operation",
    "Past",
    "Request",
    "Resource",
    "Ticket",
    "Upgrading",
    "check_call",
    "check_count",
    "check_duration",
    "check_id",
    "check_name",
    "check_some",
    "monotonic",
]

#: The access type that excludes all others.
WRITE = "write"
#: The access type that readers share.
READ = "read"
#: The access type of a reader that waits to become the writer. It excludes all new requests; none may name it.
UPGRADE = "upgrade"


class Upgrading(enum.Enum):
    """The answer to a reader that asks to upgrade."""

    DONE = "it is the writer"
    BEGUN = "it waits until it is the only holder"
    NOT_YET = "nothing was changed"
    GONE = "its row was removed"


@record
class Request:
    """A request for one resource. Its access and limit say which other holders it tolerates.

    ``access`` is ``"write"`` (excludes all), or a label whose holders share the resource: ``"read"``, ``"stage:200"``.
    ``limit`` is the greatest total weight of the holders, including this one. None: the operator's limit for the
    resource counts (the ``cap`` of `fits`); without such a limit the request is refused.

    >>> Request("etl", limit=3, weight=2).weight
    2
    """

    resource: str
    access: str = WRITE
    limit: int | None = 1
    weight: int = 1
    note: str | None = None
    #: From 0 to 99, higher ones first. Only for resources that an operator has set priorities for.
    priority: int | None = None

    def __post_init__(self) -> None:
        check_name("The resource name", self.resource)
        check_name("The access type", self.access, MAX_LABEL)
        if self.access == UPGRADE:
            raise ConfigurationError(
                "The access type 'upgrade' is that of a reader which becomes the writer; ask for 'read' first"
            )
        if self.limit is not None:
            check_count(f"The limit of {self.resource!r}", self.limit)
        check_count(f"The weight asked of {self.resource!r}", self.weight)
        if self.limit is not None and self.weight > self.limit:
            raise ConfigurationError(
                f"A weight of {self.weight} can never fit into the limit of {self.limit} on {self.resource!r}; "
                f"lower the weight or raise the limit",
                resource=self.resource,
            )
        if self.priority is not None:
            check_count(f"The priority of a request for {self.resource!r}", self.priority, 0, 99)
            # (The name of its priority queue is 9 characters longer.)
            check_name("The name of a resource with priorities", self.resource, MAX_NAME - 9)
        if self.note is not None:
            if not isinstance(self.note, str):
                raise ConfigurationError(f"The note must be a string, not {type(self.note).__name__}")
            if "\x00" in self.note:
                raise ConfigurationError("The note contains a NUL character; remove it")
            try:
                length = utf16_length(self.note)
            except UnicodeEncodeError:
                raise ConfigurationError("The note holds half a surrogate pair and is not valid text") from None
            if length > MAX_NOTE:
                raise ConfigurationError(f"The note has {length} characters, at most {MAX_NOTE} fit")

    @property
    def shared(self) -> bool:
        """True if several requests with this access type may hold the resource at the same time."""
        return self.access != WRITE

    @property
    def exclusive(self) -> bool:
        """True if no other request can be granted at the same time."""
        return not self.shared and self.limit is not None and self.weight >= self.limit

    def fits(self, ahead: Iterable[Entry | Request], cap: int | None) -> bool:
        """Return True if this request can be granted behind these rows of its resource. All engines have this rule."""
        room, load = self.limit, self.weight
        if cap is not None:
            room = cap if room is None else min(room, cap)
        for row in ahead:
            if self.shared and row.access == self.access:
                continue
            load += row.weight
            if row.limit is not None:
                room = row.limit if room is None else min(room, row.limit)
            if room is not None and load > room:
                return False  # (further rows only add to the load, and none raises the limit)
        return room is None or load <= room

    def keeps_out(self, later: Request) -> bool:
        """Return True if a later request for the same resource cannot be granted while this request cannot.

        All rows ahead of this request are also ahead of the later one, and an operator's cap or pause is the same for
        both. Suppose that the later request fits (`fits`); then this one fits, too, in these cases:

        - The later request writes: all rows ahead conflict with it, this one included. So its load is at least the
          load on this request plus this request's weight, and its limits include all limits that bind this request.
        - Both have the same access type: every row that conflicts with this request conflicts with the later one, so
          load and limits of other rows bind this request no more than the later one. This request's own weight is no
          greater, and its own limit leaves other rows at least as much.
        - They conflict, and their weights together exceed the limits that they declare: the later request waits until
          this one has left, whatever other rows there are.

        In all other cases a third row may block this request alone. The result holds at each instant, whatever other
        rows are converted to. It also holds when an upgrading reader grants the waiters behind it that fit (a grant
        that is written and lasts): this request fits at that instant, or is ahead of the upgrading reader and fits.
        """
        if not later.shared:
            return True
        if later.access == self.access:
            return later.weight >= self.weight and later.slack <= self.slack
        return self.excludes(later)

    @property
    def slack(self) -> float:
        """The weight that its own limit leaves to other holders."""
        return math.inf if self.limit is None else self.limit - self.weight

    def excludes(self, other: Request) -> bool:
        """Return True if this and another request for the same resource can never be granted at the same time."""
        if self.shared and self.access == other.access:
            return False
        limits = [limit for limit in (self.limit, other.limit) if limit is not None]
        return bool(limits) and self.weight + other.weight > min(limits)

    def covers(self, other: Request) -> bool:
        """Return True if a holder of this request has all that the other request for the same resource asks for: no
        holder beside this one would have kept the other one waiting.

        >>> Request("etl", limit=3).covers(Request("etl", limit=4)), Request("etl", limit=3).covers(Request("etl"))
        (True, False)
        """
        return self.access in (WRITE, other.access) and self.weight >= other.weight and self.slack <= other.slack

    def describe(self) -> str:
        """Return a description for messages: ``limit 3 on 'etl'``."""
        return f"{access_in_words(self.access, self.limit)} on {self.resource!r}"


class Ticket(NamedTuple):  # (Created at every acquisition; faster than a frozen dataclass.)
    """One row of the queue, waiting or granted."""

    resource: str
    position: int
    requesting_id: str
    granted: bool


@record
class Heartbeat:
    """The answer to a heartbeat: True if the member is still known, with the positions of its rows."""

    known: bool
    positions: frozenset[int] = frozenset()
    revoked: frozenset[int] = frozenset()


@record
class Entry(AsDict):
    """One row of the queue, for displays (``sqlsem ls``). Durations are in seconds, by the database's clock."""

    resource: str
    position: int
    state: str  # 'holds', 'waits', 'revoked'; or 'dead': its owner is dead, and the next check removes the row
    access: str
    limit: int | None
    weight: int
    requesting_id: str
    member_id: int | None
    owner: str | None
    host: str | None
    pid: int | None
    program: str | None
    note: str | None
    requested_at: datetime
    granted_at: datetime | None
    seconds: float  # the time held if granted, else the time waited
    missing_for: float | None  # the seconds since the beacon was found missing, or since the last heartbeat
    grace: float | None = None

    @property
    def in_transit(self) -> bool:
        """True if the lock was handed over, and not adopted yet."""
        return self.requesting_id.startswith("in transit ") and (self.owner or "").startswith("handed over by ")


@record
class Past(AsDict):
    """One finished request (``sqlsem history``)."""

    resource: str
    position: int
    access: str
    weight: int
    requesting_id: str
    owner: str | None
    note: str | None
    requested_at: datetime
    granted_at: datetime | None
    ended_at: datetime
    waited: float
    held: float | None  # for a dead holder: until its last heartbeat
    #: 'released', 'cancelled', 'timeout', 'reaped', 'revoked' or 'lost'. After 'upgraded' and 'downgraded' the grant
    #: goes on, with another access.
    outcome: str
    limit: int | None = None
    host: str | None = None
    pid: int | None = None
    program: str | None = None
    login: str | None = None
    ended_by: str | None = None  # the login that ended the request, if that was not its owner


@record
class GuardedTable(AsDict):
    """A table that only transactions which have asserted a grant of ``resource`` can write."""

    schema: str
    table: str
    resource: str
    problem: str | None = None  # why the guard can be bypassed


@record
class OnceEntry(AsDict):
    """The latest run of a name. Times are by the database's clock.

    Attributes:
        name: The name of the job.
        granted_at: The time at which the run's lock was granted, which determines the period of the run.
        done_at: The time at which the run ended.
        fence: The fence of the run.
        requesting_id: The id of the caller that ran it.
        login: The login of the run, if known.
        taken_at: The time of this answer.
    """

    name: str
    granted_at: datetime
    done_at: datetime
    fence: int
    requesting_id: str
    login: str | None
    taken_at: datetime


@record
class Operation(AsDict):
    """One action of an operator (``sqlsem history --operations``)."""

    operation_id: int
    done_at: datetime
    login: str | None
    host: str | None
    pid: int | None
    program: str | None
    #: 'pause', 'resume', 'cap', 'stale_after', 'ageing', 'revoke', 'revoke_members', 'reap', 'forget'; of a rate
    #: 'reset' or 'rate_limit'; of a batch 'abandon'; of a task 'retry' or 'cancel'
    action: str
    #: The object of the action: a resource, and perhaps the position of a row of its queue …
    resource: str | None
    position: int | None
    #: … or a work queue, and perhaps the number of one of its tasks.
    queue: str | None
    task_id: int | None
    old: str | None
    new: str | None


@record
class Resource(AsDict):
    """The operators' settings of a resource (``sqlsem set``, ``pause``), and the numbers of its holders and waiters."""

    resource: str
    cap: int | None
    paused: bool
    stale_after: float | None
    holding: int
    waiting: int
    paused_at: datetime | None = None
    paused_by: str | None = None  # a login
    cap_by: str | None = None  # a login
    pattern: str | None = None  # the pattern that the cap comes from, such as ``tenant:*``
    ageing: float | None = None  # the seconds of waiting that equal one step of priority; None: no priorities

    @property
    def whose_cap(self) -> str:
        """The text after the cap, such as ``" by anna, for tenant:*"``."""
        by = f" by {self.cap_by}" if self.cap_by else ""
        return by if self.pattern is None else f"{by}, for {self.pattern}"
