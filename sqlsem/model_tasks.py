"""Frozen values of the work queue; other modules have them from `sqlsem.model`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Any

__all__ = ["Attempt", "Claimed", "End", "NewTask", "QueueCounts", "QueueState", "TaskEntry", "plain"]


def plain(value: Any) -> dict[str, Any]:
    """A value's fields, ready for JSON."""
    return {
        name: item.isoformat() if isinstance(item, datetime) else item
        for name, item in dataclasses.asdict(value).items()
    }


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task to be put; durations in seconds. ``body`` is text: SQL, a command, or JSON."""

    kind: str  # 'sql', 'shell', 'call', 'json'
    body: str
    order: int = 0
    after: float = 0.0
    max_attempts: int = 1
    backoff: float = 1.0
    on_failure: str = "stop"  # or 'continue'
    note: str | None = None
    time_limit: float | None = None
    unique: str | None = None  # a key: it is only put when no other one with this key is open
    replace: str | None = None  # a key: it is put in the place of the one that has it


@dataclass(frozen=True, slots=True)
class Claimed:
    """A task that was claimed, as its worker sees it."""

    task_id: int
    order: int
    kind: str
    body: str
    note: str | None
    attempt: int  # how often it has been claimed
    failures: int
    max_attempts: int


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended: 'finished', 'failed', 'returned' or 'cancelled'."""

    task_id: int
    attempt: int
    outcome: str
    result: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class QueueState:
    """What is left to do in a queue."""

    pending: bool  # something waits
    running: bool
    next_pending: bool  # something of the lowest open order waits
    failed: int | None  # the first failed task that holds up what comes later
    error: str | None

    @property
    def done(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.pending and not self.running

    @property
    def stuck(self) -> bool:
        """What waits is held up by a failed task."""
        return self.failed is not None and self.pending and not self.running and not self.next_pending


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """One work queue as people see it (``sqlsem queues``)."""

    queue: str
    pending: int
    running: int  # the lost among them
    finished: int  # of these four as many as are kept
    failed: int
    cancelled: int
    lost: int  # those that run and whose worker is dead
    oldest: float | None  # seconds for which the oldest pending one could have been started
    rate: float  # attempts that ended in the last five minutes, by the minute
    blocked_by: int | None  # the failed task behind which the others wait

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One task as people see it (``sqlsem tasks``). Durations are seconds by the database's clock."""

    task_id: int
    queue: str
    order: int
    kind: str
    body: str
    note: str | None
    status: str  # 'pending', 'running', 'lost' (its worker is dead), 'finished', 'failed' or 'cancelled'
    on_failure: str
    attempt: int
    failures: int
    losses: int
    max_attempts: int
    put_at: datetime
    ready_at: datetime
    claimed_at: datetime | None
    ended_at: datetime | None
    seconds: float | None  # how long it ran, or has been running
    member_id: int | None
    owner: str | None
    host: str | None
    pid: int | None
    error: str | None
    result: str | None
    put_by: str | None = None  # a login
    login: str | None = None  # of who runs it, or ran it last
    time_limit: float | None = None  # seconds
    unique: str | None = None
    cancel_asked_at: datetime | None = None
    cancel_asked_by: str | None = None  # a login

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a task (``sqlsem tasks log``)."""

    task_id: int
    attempt: int
    outcome: str  # 'running', 'finished', 'failed', 'lost', 'returned' or 'cancelled'
    member_id: int | None
    owner: str | None
    host: str | None
    pid: int | None
    session_id: int | None
    started_at: datetime | None
    ended_at: datetime | None
    seconds: float | None
    error: str | None
    result: str | None
    login: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)
