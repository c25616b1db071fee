"""Frozen values that every other module speaks in. No I/O here."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlsem.checks import (
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
from sqlsem.errors import ConfigurationError
from sqlsem.model_tasks import (
    MAX_NESTED,
    TASK_BOUNDS,
    Attempt,
    Claimed,
    End,
    NewTask,
    QueueCounts,
    QueueLimit,
    QueueState,
    QueueWait,
    Schedule,
    TaskEntry,
    TaskLock,
    plain,
    task_locks,
)
from sqlsem.names import access_in_words
from sqlsem.runtime import monotonic

__all__ = [
    "MAX_ID",
    "MAX_INT",
    "MAX_LABEL",
    "MAX_NAME",
    "MAX_NESTED",
    "MAX_NOTE",
    "MAX_SECONDS",
    "READ",
    "TASK_BOUNDS",
    "UPGRADE",
    "WRITE",
    "Attempt",
    "BatchEntry",
    "Callback",
    "Claimed",
    "Duration",
    "End",
    "Entry",
    "GuardedTable",
    "Heartbeat",
    "NewTask",
    "Operation",
    "PartEnd",
    "PartEntry",
    "PartStart",
    "Past",
    "QueueCounts",
    "QueueLimit",
    "QueueState",
    "QueueWait",
    "Request",
    "Resource",
    "Schedule",
    "TaskEntry",
    "TaskLock",
    "Ticket",
    "Upgrading",
    "check_call",
    "check_count",
    "check_duration",
    "check_id",
    "check_name",
    "check_some",
    "monotonic",
    "task_locks",
]

#: Excludes everything, and is excluded by everything.
WRITE = "write"
#: The label that readers share.
READ = "read"
#: What a reader is while it waits to be the writer. Nothing shares with it, and nobody can ask for it.
UPGRADE = "upgrade"


class Upgrading(enum.Enum):
    """What has come of a reader's wish to become the writer."""

    DONE = "it writes"
    BEGUN = "it waits until it is alone"
    NOT_YET = "nothing was changed"
    GONE = "its row is not there any more"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of one resource: who may be inside beside me.

    ``access`` is ``"write"`` (excludes all) or a label that shares with itself: ``"read"``, ``"stage:200"``.
    ``limit`` is the weight that may be inside in all, my own included; None says nothing about it: what the server has
    set for the resource counts (`fits`: ``cap``), and where that is nothing, nobody can register so.

    >>> Request("etl", limit=3, weight=2).weight
    2
    """

    resource: str
    access: str = WRITE
    limit: int | None = 1
    weight: int = 1
    note: str | None = None
    #: From 0 to 99, higher ones first, where an operator has set priorities.
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
            check_name(
                "The name of a resource with priorities", self.resource, MAX_NAME - 9
            )  # (that of its line is longer)
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
        """Whether others with the same label may be inside at the same time."""
        return self.access != WRITE

    @property
    def exclusive(self) -> bool:
        """Whether nobody else at all can be inside at the same time."""
        return not self.shared and self.limit is not None and self.weight >= self.limit

    def fits(self, ahead: Iterable[Entry | Request], cap: int | None) -> bool:
        """The rule: whether this may proceed, with these rows of its resource ahead of it."""
        room, load = self.limit, self.weight
        if cap is not None:
            room = cap if room is None else min(room, cap)
        for one in ahead:
            if self.shared and one.access == self.access:
                continue
            load += one.weight
            if one.limit is not None:
                room = one.limit if room is None else min(room, one.limit)
            if room is not None and load > room:
                return False  # (for more rows only add to the load, and none raises the limit)
        return room is None or load <= room

    def keeps_out(self, later: Request) -> bool:
        """Whether a later request of the same resource cannot be let in as long as this one waits and could not be.

        The rows ahead of this one are ahead of the later one, too, and an operator's cap or pause is the same for both.
        So let the later one fit (`fits`), and see whether this one does:

        - The later one writes: all those ahead conflict with it, this one included. So the load on it is at least the
          load on this one and this one's weight together, and its limits include all that bind this one.
        - Both have one label: those that conflict with this one conflict with the later one as well, so the load and
          the limits of others bind this one no more than that one. Its own weight is no greater, and it leaves at least
          as much to others of its own limit. So it fits.
        - They conflict, and together they are too much for the limits that they declare: then the later one has to wait
          until this one has left, whoever else is there.

        In all other cases somebody may stand there who stops this one alone. This holds at each instant, whatever
        others are converted to. And where a reader that upgrades lets in those behind it who fit (which is written
        down, and lasts), this one is let in as well: it fits at that instant, or it stands before the upgrader, and
        fits for good.
        """
        if not later.shared:
            return True
        if later.access == self.access:
            return later.weight >= self.weight and later.slack <= self.slack
        return self.excludes(later)

    @property
    def slack(self) -> float:
        """The weight of others that its own limit lets be inside beside it."""
        return math.inf if self.limit is None else self.limit - self.weight

    def excludes(self, other: Request) -> bool:
        """Whether the other one can never be inside beside this, both being of one resource."""
        if self.shared and self.access == other.access:
            return False
        limits = [one for one in (self.limit, other.limit) if one is not None]
        return bool(limits) and self.weight + other.weight > min(limits)

    def describe(self) -> str:
        """A few words for messages: ``limit 3 on 'etl'``."""
        return f"{access_in_words(self.access, self.limit)} on {self.resource!r}"


class Ticket(NamedTuple):  # (Made at every lock, and faster than a frozen dataclass.)
    """A number taken: one row in the table, waiting or granted."""

    resource: str
    position: int
    requesting_id: str
    granted: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a member's ping found: is the member still known, and which rows are its own."""

    known: bool
    positions: frozenset[int] = frozenset()
    revoked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table as people see it (``sqlsem ls``). Durations are seconds by the database's clock."""

    resource: str
    position: int
    state: str  # 'holds', 'waits', 'revoked', or 'dead': anyone who looks next that may removes it
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
    seconds: float  # held for, when it holds; waited for, when it waits
    missing_for: float | None  # since somebody noticed that the beacon is missing, or since the last sign of life
    grace: float | None = None

    @property
    def in_transit(self) -> bool:
        """Whether it was handed over, and nobody has adopted it yet."""
        return self.requesting_id.startswith("in transit ") and (self.owner or "").startswith("handed over by ")

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class Past:
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
    held: float | None  # of one that was found dead: until its last sign of life
    outcome: str  # 'released', 'cancelled', 'timeout', 'reaped', 'revoked', 'lost'; 'upgraded', 'downgraded': goes on
    limit: int | None = None
    host: str | None = None
    pid: int | None = None
    program: str | None = None
    login: str | None = None
    ended_by: str | None = None  # the login that ended it, when it was not the owner itself

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class GuardedTable:
    """A table into which only a transaction can write that has asserted a grant of ``resource``."""

    schema: str
    table: str
    resource: str
    problem: str | None = None  # why some can write past the guard

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operator did (``sqlsem history --operations``)."""

    operation_id: int
    done_at: datetime
    login: str | None
    host: str | None
    pid: int | None
    program: str | None
    #: 'pause', 'resume', 'cap', 'stale_after', 'ageing', 'revoke', 'revoke_members', 'reap', 'forget'; of a rate
    #: 'reset' or 'rate_limit'; of a batch 'abandon'; of a task 'retry' or 'cancel'
    action: str
    resource: str | None  # what it was done to: a resource, and a row of its queue;
    position: int | None
    queue: str | None  # or a work queue, and a task of it
    task_id: int | None
    old: str | None
    new: str | None

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class Resource:
    """What an operator has set for a resource (``sqlsem set``, ``pause``), with what goes on there."""

    resource: str
    cap: int | None
    paused: bool
    stale_after: float | None
    holding: int
    waiting: int
    paused_at: datetime | None = None
    paused_by: str | None = None  # a login, as is the next
    cap_by: str | None = None
    pattern: str | None = None  # ``tenant:*``, where the cap is that one's, and not the resource's own
    ageing: float | None = None  # with priorities: the seconds of waiting that a step of priority is worth

    @property
    def whose_cap(self) -> str:
        """Words to put after the cap, such as ``" by anna, for tenant:*"``."""
        by = f" by {self.cap_by}" if self.cap_by else ""
        return by if self.pattern is None else f"{by}, for {self.pattern}"

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class Callback:
    """What the last part of a batch starts, claimed: who has it runs it, and says how it ended."""

    batch_id: int
    name: str
    attempt: int
    kind: str  # 'sql', 'shell', 'call'; 'local': only the process knows it that declared it; 'session': some session's
    body: str | None


@dataclass(frozen=True, slots=True)
class PartStart:
    """What came of starting a part of a batch: 'started', or why not: 'running', 'in_callback' or 'differs'."""

    code: str
    batch_id: int
    attempt: int | None
    previous: int | None  # the batch that expired by this


@dataclass(frozen=True, slots=True)
class PartEnd:
    """What came of ending a part: 'succeeded', 'failed', 'late' or 'lost'."""

    code: str
    batch_id: int | None
    is_last: bool
    batch_status: str | None
    callback: Callback | None  # ours to run


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One part of a batch as people see it."""

    part: str
    status: str  # 'expected', 'running', 'succeeded' or 'failed'
    is_last: bool
    attempt: int
    member_id: int | None
    owner: str | None
    host: str | None
    pid: int | None
    started_at: datetime | None
    ended_at: datetime | None
    seconds: float | None  # how long it took, or has been running
    error: str | None
    missing_for: float | None  # how long its process has been missing
    login: str | None = None


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One batch as people see it (``sqlsem batches``). Durations are seconds by the database's clock."""

    batch_id: int
    name: str
    status: str  # 'open', 'failed', 'succeeded', 'expired' or 'abandoned'
    window: float
    opened_at: datetime
    ended_at: datetime | None
    seconds: float  # from its opening to its end, or until now
    callback_status: str  # 'none', 'pending', 'running', 'finished' or 'failed'
    callback_kind: str | None
    callback_body: str | None
    callback_attempt: int
    callback_owner: str | None
    callback_started: datetime | None
    callback_ended: datetime | None
    callback_seconds: float | None
    callback_error: str | None
    parts: tuple[PartEntry, ...] = ()
    opened_by: str | None = None  # logins: that opened it, that kept its callback, and that ran that last
    callback_kept_by: str | None = None
    callback_login: str | None = None

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[Any]]) -> list[BatchEntry]:
        """From rows of a batch and a part each, those of one batch together; at the end the logins of both."""
        found: dict[int, BatchEntry] = {}
        for row in rows:
            one = found.setdefault(
                row[0],
                dataclasses.replace(
                    cls(*row[:16]), opened_by=row[29], callback_kept_by=row[31], callback_login=row[32]
                ),
            )
            part = PartEntry(row[16], row[17], bool(row[18]), *[*row[19:29], row[30]])
            found[row[0]] = dataclasses.replace(one, parts=(*one.parts, part))
        return list(found.values())

    @property
    def overdue(self) -> bool:
        """Whether it is open, though its window is over."""
        return self.status == "open" and self.seconds > self.window

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return {**plain(self), "overdue": self.overdue, "parts": [plain(part) for part in self.parts]}
