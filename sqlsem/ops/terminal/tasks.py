"""Renders tasks, work queues and schedules for ``sqlsem tasks``, ``queues``, ``schedules`` and ``work``."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sqlsem import bodies
from sqlsem.insight.reasons import TaskReason
from sqlsem.ops.terminal.tables import Column, local_time, process_name, seconds_in_words, table
from sqlsem.util.printable import clean, first_line
from sqlsem.values.names import access_in_words
from sqlsem.values.rates import Window
from sqlsem.values.tasks import QueueCounts, QueueLimit, Schedule, TaskEntry

__all__ = [
    "STATES",
    "counted",
    "describe_limits",
    "ready_in",
    "render_counts",
    "render_schedules",
    "render_task",
    "render_tasks",
    "shortened",
]

#: The greatest number of characters of an error in a list.
MAX_ERROR_LENGTH = 500
STATES = ("pending", "running", "lost", "finished", "failed", "cancelled")


def shortened(kind: str, body: str, note: str | None) -> str:
    """Return a task on one line: its note, or its body, shortened."""
    if note is not None:
        return note
    text = " ".join(body[:1000].split())
    if kind == "call":
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # another client may have written it
            call = json.loads(body)
            arguments = [json.dumps(value, ensure_ascii=False) for value in call["args"]]
            arguments += [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call["kwargs"].items()]
            text = f"{call['function']}({', '.join(arguments)})"
    elif kind == "shell":
        command = bodies.arguments(body)
        text = f"$ {text if command is None else shlex.join(command)}"
    return text if len(text) <= 200 else f"{text[:199]}…"


def ready_in(entry: TaskEntry) -> str:
    """Return the time until a pending task may start, as text; by this host's clock."""
    seconds = (entry.ready_at - datetime.now(timezone.utc)).total_seconds()
    return f"in {seconds_in_words(seconds)}" if seconds > 0 else ""


def render_task(task: TaskEntry, reason: TaskReason | None) -> RenderableType:
    """Return one task as text: its options, its state, its last error or result, and its body."""
    locks = [f"{access_in_words(lock.access, lock.limit, lock.weight)} of {lock.resource}" for lock in task.locks]
    ends = f": {task.failures} failed, {task.losses} lost" if task.failures or task.losses else ""
    fields: dict[str, str] = {
        "task": f"{task.task_id} of queue {task.queue}",
        "state": task.status + ("" if reason is None else f": {reason.short}"),
        "note": task.note or "",
        "attempts": f"{task.attempt} of {task.max_attempts}{ends}",
        "order": str(task.order) if task.order else "",
        "priority": str(task.priority) if task.priority else "",
        "key": task.key or "",
        "unique": task.unique or "",
        "locks": ", ".join(locks),
        "on failure": task.on_failure,
        "time limit": "" if task.time_limit is None else seconds_in_words(task.time_limit),
        "put": f"{_moment(task.put_at)}{f' by {task.put_by}' if task.put_by else ''}",
        "not before": _moment(task.ready_at) if task.ready_at > task.put_at else "",
        "started": f"{_moment(task.claimed_at)}{_by(task)}" if task.claimed_at is not None else "",
        "ended": _moment(task.ended_at),
        "took": "" if task.seconds is None else seconds_in_words(task.seconds),
        "cancel": _moment(task.cancel_asked_at) + (f" by {task.cancel_asked_by}" if task.cancel_asked_by else ""),
        "error": task.error or "",
        "result": task.result or "",
        task.kind: task.body,
    }
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, text in fields.items():
        if text:
            grid.add_row(name, Text("\n".join(map(clean, text.expandtabs().splitlines())), overflow="fold"))
    return grid


def _moment(at: datetime | None) -> str:
    return "" if at is None else f"{at.astimezone():%Y-%m-%d %H:%M:%S}"


def _by(task: TaskEntry) -> str:
    who = "" if task.host is None else f" by {process_name(task.host, task.pid)}"
    return f"{who} ({task.owner})" if who and task.owner else who


def counted(tasks: Sequence[TaskEntry], *, at_least: bool) -> list[str]:
    """Return the number of tasks of each queue in each state, a line for each queue."""
    numbers: dict[str, dict[str, int]] = {}
    for task in tasks:
        states = numbers.setdefault(task.queue, {})
        states[task.status] = states.get(task.status, 0) + 1
    lines = []
    for name, states in numbers.items():
        order = dict.fromkeys(("running", "lost", *STATES, *states))
        counts = [f"{states[state]} {state}" for state in order if state in states]
        lines.append(f"{name}: {'at least ' if at_least else ''}{', '.join(counts)}")
    return lines


def describe_limits(limits: Iterable[QueueLimit]) -> Iterator[str]:
    """Return the limits, rates and weights of work queues, a line for each queue or key."""
    for limit in limits:
        texts = [] if limit.task_limit is None else [f"at most {limit.task_limit} running"]
        texts += [] if limit.key_limit is None else [f"at most {limit.key_limit} of each key"]
        texts += [f"at most {rate} started{whose}" for rate, whose in _rates(limit, " of each key")]
        texts += [] if limit.weight is None else [f"weight {limit.weight}"]
        if texts:
            whose = f"key {limit.task_key!r} of {limit.queue!r}" if limit.task_key is not None else repr(limit.queue)
            yield f"{whose}: {', '.join(texts)} (set by {limit.set_by})"


def _rates(limits: QueueLimit, of_keys: str) -> Iterator[tuple[str, str]]:
    """Yield the rates that are set, as in ``100/1m``: that of the queue with '', that of the keys with ``of_keys``."""
    for limit, per, whose in ((limits.task_rate, limits.task_per, ""), (limits.key_rate, limits.key_per, of_keys)):
        if limit is not None and per is not None:
            yield str(Window(round(per * 1000), limit)), whose


def _limit(limits: QueueLimit | None) -> str:
    """Return the limits and rates of a queue, as in ``10, 2 a key, 100/1m a key``."""
    texts = [] if limits is None or limits.task_limit is None else [str(limits.task_limit)]
    texts += [] if limits is None or limits.key_limit is None else [f"{limits.key_limit} a key"]
    texts += [] if limits is None else [rate + whose for rate, whose in _rates(limits, " a key")]
    return ", ".join(texts)


def render_counts(
    queues: Sequence[QueueCounts], width: int, only: str | None = None, limits: Sequence[QueueLimit] = ()
) -> RenderableType:
    """Return the output of ``sqlsem queues``, at most ``width`` columns wide."""
    if not queues:
        return Text("There are no tasks." if only is None else f"There are no tasks in {only!r}.")
    of_queue = {limit.queue: limit for limit in limits if limit.task_key is None}
    columns: tuple[Column[QueueCounts], ...] = (
        Column("QUEUE", lambda counts: counts.queue, elastic=True),
        Column("PENDING", lambda counts: str(counts.pending), right=True),
        Column("RUNNING", lambda counts: str(counts.running), right=True),
        Column("LOST", lambda counts: str(counts.lost), right=True),
        Column("FINISHED", lambda counts: str(counts.finished), right=True, elastic=True),
        Column("FAILED", lambda counts: str(counts.failed), right=True),
        Column("CANCELLED", lambda counts: str(counts.cancelled), right=True, elastic=True),
        Column("OLDEST", lambda c: "" if c.oldest is None else seconds_in_words(c.oldest), right=True),
        Column("A MINUTE", lambda counts: f"{counts.rate:.1f}", right=True, elastic=True),
        Column("HELD UP BY", lambda c: "" if c.blocked_by is None else f"task {c.blocked_by}", elastic=True),
        Column("LIMIT", lambda counts: _limit(of_queue.get(counts.queue)), elastic=True, shown=bool(limits)),
    )
    parts: list[RenderableType] = [table(columns, queues, width)]
    for counts in queues:
        if counts.blocked_by is not None:
            words = (
                f"{clean(counts.queue)}: pending tasks are held up by task {counts.blocked_by}, which has failed; see "
                f"it with: sqlsem tasks log {counts.blocked_by}, then retry or cancel it"
            )
            parts.append(Text(words, overflow="fold"))
    parts += [
        Text(clean(line), overflow="fold") for line in describe_limits(limit for limit in limits if limit.task_key)
    ]
    return Group(*parts)


def render_schedules(schedules: Sequence[Schedule], width: int) -> RenderableType:
    """Return the output of ``sqlsem schedules``, at most ``width`` columns wide."""
    return table(SCHEDULES, schedules, width, empty="There are no schedules.")


def _next(schedule: Schedule) -> str:
    paused = schedule.paused_at is not None
    return f"paused by {schedule.paused_by}" if paused else local_time(schedule.next_due) or "never"


def _scheduled(schedule: Schedule) -> str:
    return shortened(schedule.kind, schedule.body, schedule.options.get("note"))


SCHEDULES: tuple[Column[Schedule], ...] = (
    Column("NAME", lambda schedule: schedule.name, elastic=True),
    Column("QUEUE", lambda schedule: schedule.queue, elastic=True),
    Column("EVERY", lambda schedule: schedule.cron),
    Column("ZONE", lambda schedule: schedule.time_zone, elastic=True),
    Column("NEXT", _next, elastic=True),
    Column("LAST", lambda schedule: local_time(schedule.last_due)),
    Column("WHAT", _scheduled, elastic=True),
)


def _tries(task: TaskEntry) -> str:
    return str(task.attempt) if task.max_attempts == 1 else f"{task.attempt}/{task.max_attempts}"


def _when(task: TaskEntry) -> str:
    return local_time(task.ended_at or (task.claimed_at if task.status in ("running", "lost") else task.put_at))


def render_tasks(
    tasks: Sequence[TaskEntry], width: int, only: str | None = None, why: Mapping[int, TaskReason] | None = None
) -> RenderableType:
    """Return the output of ``sqlsem tasks``, at most ``width`` columns wide. ``why``: why pending tasks do not run."""
    if not tasks:
        return Text("There are no such tasks." if only is None else f"There are no such tasks in {only!r}.")
    reasons = why or {}
    held_up = Counter(
        reasons[task.task_id].behind[0].task_id
        for task in tasks
        if task.task_id in reasons and any(other.status == "failed" for other in reasons[task.task_id].behind)
    )
    columns: tuple[Column[TaskEntry], ...] = (
        Column("ID", lambda task: str(task.task_id), right=True),
        Column("ORDER", lambda task: str(task.order), right=True),
        Column("PRIORITY", lambda task: str(task.priority), right=True, shown=any(task.priority for task in tasks)),
        Column("STATE", lambda task: "blocked" if task.blocked else task.status),
        Column("TRIES", _tries),
        Column("FOR", lambda task: "" if task.seconds is None else seconds_in_words(task.seconds), right=True),
        Column("WHEN", _when),
        Column("QUEUE", lambda task: task.queue, elastic=True, shown=only is None),
        Column("KEY", lambda task: task.key or "", elastic=True, shown=any(task.key is not None for task in tasks)),
        Column("WHY", lambda t: reasons[t.task_id].short if t.task_id in reasons else "", elastic=True),
        Column("WHO", lambda task: process_name(task.host, task.pid), elastic=True),
        Column("WHAT", lambda task: shortened(task.kind, task.body, task.note), elastic=True),
    )
    parts: list[RenderableType] = [table(columns, tasks, width)]
    failures = [task for task in tasks if task.status in ("failed", "pending", "cancelled") and task.error]
    if failures:
        parts.append(Text(""))
    for failure in failures:
        # Folded, not cut: the cause may be at the end.
        line = Text(f"{failure.task_id}: ", overflow="fold")
        parts.append(line.append(clean(first_line(failure.error)[:MAX_ERROR_LENGTH]), style="red"))
    for number, count in held_up.items():
        words = (
            f"{count} pending task{'s wait' if count > 1 else ' waits'} for {number}, which has failed; see it "
            f"with: sqlsem tasks log {number}, then retry or cancel it"
        )
        parts.append(Text(words, overflow="fold"))
    return Group(*parts)
