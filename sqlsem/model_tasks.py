"""Frozen values of the work queue; other modules have them from `sqlsem.model`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Any

__all__ = ["Attempt", "Claimed", "End", "NewTask", "QueueCounts", "QueueState", "Schedule", "TaskEntry", "plain"]


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

    def as_options(self) -> dict[str, Any]:
        """All but what it does, as schedules keep it."""
        kept = {
            **{"order": self.order, "after_ms": round(self.after * 1000), "max_attempts": self.max_attempts},
            **{"backoff_ms": round(self.backoff * 1000), "on_failure": self.on_failure, "note": self.note},
            "time_limit_ms": None if self.time_limit is None else max(1, round(self.time_limit * 1000)),
            **{"unique": self.unique, "replace": self.replace},
        }
        return {name: value for name, value in kept.items() if value is not None}

    @classmethod
    def of_options(cls, kind: str, body: str, kept: dict[str, Any]) -> NewTask:
        """The task whose options are kept so."""
        limit = kept.get("time_limit_ms")
        return cls(
            *(kind, body, kept.get("order", 0), kept.get("after_ms", 0) / 1000, kept.get("max_attempts", 1)),
            *(kept.get("backoff_ms", 1000) / 1000, kept.get("on_failure", "stop"), kept.get("note")),
            *(None if limit is None else limit / 1000, kept.get("unique"), kept.get("replace")),
        )


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
class Schedule:
    """Tasks that are put at the times of a cron expression (``sqlsem schedules``)."""

    name: str
    queue: str
    cron: str
    time_zone: str
    kind: str
    body: str
    options: dict[str, Any]  # of each task, as they are kept
    next_due: datetime | None
    last_due: datetime | None  # the latest time for which a task was put
    put_at: datetime
    put_by: str | None  # a login
    paused_at: datetime | None
    paused_by: str | None
    taken_at: datetime  # when this was so, by the database's clock

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
