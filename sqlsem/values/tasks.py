"""The values of work queues. Immutable; no I/O."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlsem.util.record import AsDict, record

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
    "task_locks",
]

#: The bounds of each number of a task. They are the same in Python, in the CLI and in SQL. Times are in milliseconds.
TASK_BOUNDS = {
    "after_ms": (0, 315_360_000_000),
    "backoff_ms": (0, 300_000),
    "time_limit_ms": (1, 2**31 - 1),
    "max_attempts": (1, 2**31 - 1),
    "priority": (-(2**31), 2**31 - 1),
    "order": (-(2**31), 2**31 - 1),
}
#: The greatest nesting of JSON that every client can read.
MAX_NESTED = 100


@record
class TaskLock:
    """A lock that a task needs to run."""

    resource: str
    access: str = "write"  # as in a `Request`
    limit: int | None = 1  # None: the operator's limit
    weight: int = 1
    position: int | None = None  # the position of its row in the queue of the resource, if it has one

    def as_option(self) -> dict[str, Any]:
        """Return the lock as databases read it in the options of a task."""
        return {"resource": self.resource, "access": self.access, "limit": self.limit, "weight": self.weight}


def task_locks(rows: str | None, *, numbered: bool = False) -> tuple[TaskLock, ...]:
    """Return the locks of a task from a database's JSON list of resource, position, access, limit and weight.
    ``numbered``: the rows begin with a number, and are to be sorted by it.
    """
    values = json.loads(rows or "[]")
    if numbered:
        values = [rest for _, *rest in sorted(values)]
    return tuple(
        TaskLock(resource, access, limit, weight, position) for resource, position, access, limit, weight in values
    )


class NewTask(NamedTuple):  # (A frozen dataclass takes ten times as long to create; there may be 100,000.)
    """A task to put into a queue. Durations are in seconds. ``body`` is text: SQL, a command, or JSON."""

    kind: str  # 'sql', 'shell', 'call', 'json'
    body: str
    order: int = 0
    after: float = 0.0
    max_attempts: int = 1
    backoff: float = 1.0
    on_failure: str = "stop"  # or 'continue'
    note: str | None = None
    time_limit: float | None = None
    unique: str | None = None  # a key: the task is put only if no open task has this key
    replace: str | None = None  # a key: the task replaces the open task with this key
    key: str | None = None  # for fair queueing: each key gets its share of the workers
    priority: int = 0  # among the tasks of its key; higher ones first
    locks: tuple[TaskLock, ...] = ()  # the locks that it needs to run

    def as_options(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, as databases read and schedules store them."""
        options: dict[str, Any] = {}
        if self.order:
            options["order"] = self.order
        if self.after:
            options["after_ms"] = round(self.after * 1000)
        if self.max_attempts != 1:
            options["max_attempts"] = self.max_attempts
        if self.backoff != 1.0:
            options["backoff_ms"] = round(self.backoff * 1000)
        if self.on_failure != "stop":
            options["on_failure"] = self.on_failure
        if self.time_limit is not None:
            options["time_limit_ms"] = max(1, round(self.time_limit * 1000))
        if self.priority:
            options["priority"] = self.priority
        if self.locks:
            options["locks"] = [lock.as_option() for lock in self.locks]
        options.update(
            (name, text) for name in ("note", "unique", "replace", "key") if (text := getattr(self, name)) is not None
        )
        return options

    def alike(self, kind: str, body: str) -> NewTask:
        """Return another task with the same options."""
        return NewTask(kind, body, *self[2:])

    @classmethod
    def as_documents(cls, tasks: Sequence[NewTask]) -> list[dict[str, Any]]:
        """Return the tasks as databases read them, for JSON. (Most tasks that are put together have equal options.)"""
        documents: list[dict[str, Any]] = []
        previous: NewTask | None = None
        options: dict[str, Any] = {}
        for task in tasks:
            if previous is None or task[2:] != previous[2:]:
                previous, options = task, task.as_options()
            documents.append({"kind": task.kind, "body": task.body, **options})
        return documents

    @classmethod
    def of_options(cls, kind: str, body: str, stored: dict[str, Any]) -> NewTask:
        """Return the task with these stored options."""
        names = ("order", "max_attempts", "on_failure", "note", "unique", "replace", "key", "priority")
        options = {name: stored[name] for name in names if name in stored}
        for name in ("after", "backoff", "time_limit"):
            if stored.get(f"{name}_ms") is not None:
                options[name] = stored[f"{name}_ms"] / 1000
        options["locks"] = tuple(TaskLock(**lock) for lock in stored.get("locks", ()))
        return cls(kind, body, **options)


class Claimed(NamedTuple):  # (Like `End` a tuple, which is fast to create: tasks may be short.)
    """A claimed task, as its worker gets it."""

    task_id: int
    order: int
    kind: str
    body: str
    note: str | None
    attempt: int  # the number of claims so far
    failures: int
    max_attempts: int
    locks: tuple[TaskLock, ...] = ()  # the granted locks


class End(NamedTuple):
    """The end of an attempt. ``outcome``: 'finished', 'failed', 'returned' or 'cancelled'."""

    task_id: int
    attempt: int
    outcome: str
    result: str | None = None
    error: str | None = None
    last: bool = True  # True: if this attempt has failed, the task is not retried

    @property
    def stored(self) -> tuple[int, int, str, str | None, str | None]:
        """The values that the database is given: all but ``last``."""
        return self[:5]


@record
class QueueState:
    """A summary of the open tasks of a queue."""

    pending: bool  # True: a task waits
    running: bool
    next_pending: bool  # True: a task of the lowest open order waits
    failed: int | None  # the first failed task that blocks later ones
    error: str | None

    @property
    def done(self) -> bool:
        """True if no task waits or runs."""
        return not self.pending and not self.running

    @property
    def stuck(self) -> bool:
        """True if a failed task blocks all waiting tasks."""
        return self.failed is not None and self.pending and not self.running and not self.next_pending


@record
class QueueCounts(AsDict):
    """One work queue, for displays (``sqlsem queues``)."""

    queue: str
    pending: int
    running: int  # including lost tasks
    finished: int  # this and the next two count the ended tasks that are still stored
    failed: int
    cancelled: int
    lost: int  # running tasks whose worker is dead
    oldest: float | None  # seconds for which the oldest pending task has been ready
    rate: float  # ended attempts a minute, over the last five minutes
    blocked_by: int | None  # the failed task that blocks the others


@record
class QueueLimit(AsDict):
    """The operators' settings of a work queue, or of one of its keys (``sqlsem queues limits``)."""

    queue: str
    task_key: str | None  # None: settings of the queue
    task_limit: int | None  # the maximum number of running tasks of the queue, or of this key
    key_limit: int | None  # the same for each key without a limit of its own
    weight: int | None  # the key's share of the workers; None: 1
    set_at: datetime
    set_by: str | None  # a login
    task_rate: int | None = None  # the maximum number of starts in ``task_per`` seconds, of the queue or of this key
    task_per: float | None = None
    key_rate: int | None = None  # the same for each key without a rate of its own, in ``key_per`` seconds
    key_per: float | None = None


@record
class QueueWait:
    """A work queue, or one of its keys, that waits because a claim found its rate used up."""

    queue: str
    task_key: str | None  # None: the queue
    seconds: float  # until a task may start again


@record
class TaskEntry(AsDict):
    """One task, for displays (``sqlsem tasks``). Durations are in seconds, by the database's clock."""

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
    seconds: float | None  # its duration, or its duration so far
    member_id: int | None
    owner: str | None
    host: str | None
    pid: int | None
    error: str | None
    result: str | None
    put_by: str | None = None  # a login
    login: str | None = None  # the login of the worker that runs the task, or ran it last
    time_limit: float | None = None  # seconds
    unique: str | None = None
    cancel_asked_at: datetime | None = None
    cancel_asked_by: str | None = None  # a login
    key: str | None = None
    priority: int = 0
    locks: tuple[TaskLock, ...] = ()  # the locks that it needs to run

    @property
    def blocked(self) -> bool:
        """True if the task waits for its locks, or will wait for them."""
        return self.status == "pending" and bool(self.locks)


@record
class Schedule(AsDict):
    """A schedule: it puts a task at each time of a cron expression (``sqlsem schedules``)."""

    name: str
    queue: str
    cron: str
    time_zone: str
    kind: str
    body: str
    options: dict[str, Any]  # the options of each task, as they are stored
    next_due: datetime | None
    last_due: datetime | None  # the latest time for which a task was put
    put_at: datetime
    put_by: str | None  # a login
    paused_at: datetime | None
    paused_by: str | None
    taken_at: datetime  # the time of this answer, by the database's clock


@record
class Attempt(AsDict):
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
