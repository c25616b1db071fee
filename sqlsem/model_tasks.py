"""Frozen values of the work queue; other modules have them from `sqlsem.model`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

__all__ = [
    "MAX_NESTED",
    "TASK_BOUNDS",
    "Attempt",
    "Claimed",
    "End",
    "NewTask",
    "QueueCounts",
    "QueueLimit",
    "QueueState",
    "QueueWait",
    "Schedule",
    "TaskEntry",
    "TaskLock",
    "plain",
    "task_locks",
]

#: From and to which number each amount of a task goes, on every engine: in Python, at the command line, in SQL. Times
#: are in milliseconds.
TASK_BOUNDS = {
    "after_ms": (0, 315_360_000_000),
    "backoff_ms": (0, 300_000),
    "time_limit_ms": (1, 2**31 - 1),
    "max_attempts": (1, 2**31 - 1),
    "priority": (-(2**31), 2**31 - 1),
    "order": (-(2**31), 2**31 - 1),
}
#: So deep may JSON be nested, that every client can read it.
MAX_NESTED = 100


def plain(value: Any) -> dict[str, Any]:
    """A value's fields, ready for JSON."""
    return {
        name: item.isoformat() if isinstance(item, datetime) else item
        for name, item in dataclasses.asdict(value).items()
    }


@dataclass(frozen=True, slots=True)
class TaskLock:
    """A lock that a task was put with."""

    resource: str
    access: str = "write"  # as of a request
    limit: int | None = 1  # None: the server's
    weight: int = 1
    position: int | None = None  # of its row in the queue of the resource; None: it has none now

    def as_option(self) -> dict[str, Any]:
        """What is asked, as databases understand it."""
        return {"resource": self.resource, "access": self.access, "limit": self.limit, "weight": self.weight}


def task_locks(rows: str | None) -> tuple[TaskLock, ...]:
    """Those of a task, as databases answer: a JSON list of resource, position, access, limit and weight of each."""
    return tuple(
        TaskLock(resource, access, limit, weight, position)
        for resource, position, access, limit, weight in json.loads(rows or "[]")
    )


class NewTask(NamedTuple):  # (A frozen dataclass takes ten times as long to make, and there may be a hundred thousand.)
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
    key: str | None = None  # whose it is: workers share themselves out between the keys
    priority: int = 0  # among those of its key; higher ones first
    locks: tuple[TaskLock, ...] = ()  # what it needs to run

    def as_options(self) -> dict[str, Any]:
        """What is asked beside what it does, as schedules keep it and databases understand it: what is not as usual."""
        asked: dict[str, Any] = {}
        if self.order:
            asked["order"] = self.order
        if self.after:
            asked["after_ms"] = round(self.after * 1000)
        if self.max_attempts != 1:
            asked["max_attempts"] = self.max_attempts
        if self.backoff != 1.0:
            asked["backoff_ms"] = round(self.backoff * 1000)
        if self.on_failure != "stop":
            asked["on_failure"] = self.on_failure
        if self.time_limit is not None:
            asked["time_limit_ms"] = max(1, round(self.time_limit * 1000))
        if self.priority:
            asked["priority"] = self.priority
        if self.locks:
            asked["locks"] = [lock.as_option() for lock in self.locks]
        asked.update(
            (name, text) for name in ("note", "unique", "replace", "key") if (text := getattr(self, name)) is not None
        )
        return asked

    def alike(self, kind: str, body: str) -> NewTask:
        """Another one, put in the same way."""
        return NewTask(kind, body, *self[2:])

    @classmethod
    def as_asked(cls, tasks: Sequence[NewTask]) -> list[dict[str, Any]]:
        """What is asked of each, as databases understand it. (Those put together have the same options, mostly.)"""
        asked: list[dict[str, Any]] = []
        before: NewTask | None = None
        options: dict[str, Any] = {}
        for task in tasks:
            if before is None or task[2:] != before[2:]:
                before, options = task, task.as_options()
            asked.append({"kind": task.kind, "body": task.body, **options})
        return asked

    @classmethod
    def of_options(cls, kind: str, body: str, kept: dict[str, Any]) -> NewTask:
        """The task whose options are kept so."""
        limit = kept.get("time_limit_ms")
        return cls(
            *(kind, body, kept.get("order", 0), kept.get("after_ms", 0) / 1000, kept.get("max_attempts", 1)),
            *(kept.get("backoff_ms", 1000) / 1000, kept.get("on_failure", "stop"), kept.get("note")),
            *(None if limit is None else limit / 1000, kept.get("unique"), kept.get("replace")),
            *(kept.get("key"), kept.get("priority", 0), tuple(TaskLock(**one) for one in kept.get("locks", ()))),
        )


class Claimed(NamedTuple):  # as `End`: made in no time, for short tasks
    """A task that was claimed, as its worker sees it."""

    task_id: int
    order: int
    kind: str
    body: str
    note: str | None
    attempt: int  # how often it has been claimed
    failures: int
    max_attempts: int
    locks: tuple[TaskLock, ...] = ()  # what it holds


class End(NamedTuple):
    """How an attempt ended: 'finished', 'failed', 'returned' or 'cancelled'."""

    task_id: int
    attempt: int
    outcome: str
    result: str | None = None
    error: str | None = None
    last: bool = True  # whether the task is tried no more when this attempt has failed


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
class QueueLimit:
    """What operators have set of a work queue, or of one of its keys (``sqlsem queues limits``)."""

    queue: str
    task_key: str | None  # None: of the queue
    task_limit: int | None  # so many tasks run at a time: of the queue, or of this key
    key_limit: int | None  # of each key, where it has none of its own
    weight: int | None  # the key's share of the workers; None: 1
    set_at: datetime
    set_by: str | None  # a login
    task_rate: int | None = None  # so many are started in any ``task_per`` seconds: of the queue, or of this key
    task_per: float | None = None
    key_rate: int | None = None  # and of each key, where it has none of its own, in any ``key_per`` seconds
    key_per: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class QueueWait:
    """A work queue, or one of its keys, whose rate a claim has found used up."""

    queue: str
    task_key: str | None  # None: the queue
    seconds: float  # until there is room in it again


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
    key: str | None = None
    priority: int = 0
    locks: tuple[TaskLock, ...] = ()  # what it was put with

    @property
    def parked(self) -> bool:
        """Whether it waits for its locks, or is about to."""
        return self.status == "pending" and bool(self.locks)

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
