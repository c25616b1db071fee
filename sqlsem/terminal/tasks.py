"""What ``sqlsem tasks`` and ``sqlsem work`` show of a work queue."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone

from rich.console import Group, RenderableType
from rich.text import Text

from sqlsem import bodies
from sqlsem.insight.reasons import TaskReason
from sqlsem.model import QueueCounts, QueueLimit, Schedule, TaskEntry
from sqlsem.model_rates import Window
from sqlsem.printable import clean, first_line
from sqlsem.terminal.tables import fit, local_time, process_name, seconds_in_words, table

__all__ = [
    "STATES",
    "counted",
    "ready_in",
    "render_counts",
    "render_schedules",
    "render_tasks",
    "shortened",
    "told_of_limits",
]

#: What is shown of an error in a list, characters.
LONGEST_ERROR = 500
STATES = ("pending", "running", "lost", "finished", "failed", "cancelled")


def shortened(kind: str, body: str, note: str | None) -> str:
    """A task in a few words, on one line: its note, or what it does."""
    if note is not None:
        return note
    words = " ".join(body[:1000].split())
    if kind == "call":
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # others may have written it
            wanted = json.loads(body)
            given = [json.dumps(value, ensure_ascii=False) for value in wanted["args"]]
            given += [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in wanted["kwargs"].items()]
            words = f"{wanted['function']}({', '.join(given)})"
    elif kind == "shell":
        command = bodies.arguments(body)
        words = f"$ {words if command is None else shlex.join(command)}"
    return words if len(words) <= 200 else f"{words[:199]}…"


def ready_in(entry: TaskEntry) -> str:
    """How long until a pending task may start, about: by our clock."""
    left = (entry.ready_at - datetime.now(timezone.utc)).total_seconds()
    return f"in {seconds_in_words(left)}" if left > 0 else ""


def counted(found: Sequence[TaskEntry], *, at_least: bool) -> list[str]:
    """How many tasks of each queue are in which state, in words."""
    numbers: dict[str, dict[str, int]] = {}
    for one in found:
        states = numbers.setdefault(one.queue, {})
        states[one.status] = states.get(one.status, 0) + 1
    lines = []
    for name, states in numbers.items():
        order = dict.fromkeys(("running", "lost", *STATES, *states))
        told = [f"{states[state]} {state}" for state in order if state in states]
        lines.append(f"{name}: {'at least ' if at_least else ''}{', '.join(told)}")
    return lines


def told_of_limits(limits: Iterable[QueueLimit]) -> Iterator[str]:
    """What is set of work queues, a line for each queue or key."""
    for limit in limits:
        told = [] if limit.task_limit is None else [f"at most {limit.task_limit} running"]
        told += [] if limit.key_limit is None else [f"at most {limit.key_limit} of each key"]
        told += [f"at most {rate} started{whose}" for rate, whose in _rates(limit, " of each key")]
        told += [] if limit.weight is None else [f"weight {limit.weight}"]
        if told:
            whose = f"key {limit.task_key!r} of {limit.queue!r}" if limit.task_key is not None else repr(limit.queue)
            yield f"{whose}: {', '.join(told)} (set by {limit.set_by})"


def _rates(one: QueueLimit, of_keys: str) -> Iterator[tuple[str, str]]:
    """The rates that are set, as in ``100/1m``, each with whose it is: nothing, or ``of_keys``."""
    for limit, per, whose in ((one.task_rate, one.task_per, ""), (one.key_rate, one.key_per, of_keys)):
        if limit is not None and per is not None:
            yield str(Window(round(per * 1000), limit)), whose


def _limit(one: QueueLimit | None) -> str:
    """As in ``10, 2 a key, 100/1m a key``."""
    told = [] if one is None or one.task_limit is None else [str(one.task_limit)]
    told += [] if one is None or one.key_limit is None else [f"{one.key_limit} a key"]
    told += [] if one is None else [rate + whose for rate, whose in _rates(one, " a key")]
    return ", ".join(told)


def render_counts(
    found: Sequence[QueueCounts], width: int, only: str | None = None, limits: Sequence[QueueLimit] = ()
) -> RenderableType:
    """What ``sqlsem queues`` shows, at most ``width`` columns wide."""
    if not found:
        return Text("There are no tasks." if only is None else f"There are no tasks in {only!r}.")
    heads = (
        "QUEUE",
        "PENDING",
        "RUNNING",
        "LOST",
        "FINISHED",
        "FAILED",
        "CANCELLED",
        "OLDEST",
        "A MINUTE",
        "HELD UP BY",
        *(["LIMIT"] if limits else []),
    )
    of_queue = {limit.queue: limit for limit in limits if limit.task_key is None}
    rows = [
        (
            *(one.queue, str(one.pending), str(one.running), str(one.lost), str(one.finished), str(one.failed)),
            *(str(one.cancelled), "" if one.oldest is None else seconds_in_words(one.oldest)),
            *(f"{one.rate:.1f}", "" if one.blocked_by is None else f"task {one.blocked_by}"),
            *([_limit(of_queue.get(one.queue))] if limits else []),
        )
        for one in found
    ]
    widths = fit(heads, rows, width, elastic=(0, 4, 6, 8, 9, *([10] if limits else [])))
    parts: list[RenderableType] = [table(heads, rows, widths, right=range(1, 9))]
    for one in found:
        if one.blocked_by is not None:
            words = (
                f"{clean(one.queue)}: what waits is held up by task {one.blocked_by}, which has failed; see it with: "
                f"sqlsem tasks log {one.blocked_by}, then retry or cancel it"
            )
            parts.append(Text(words, overflow="fold"))
    parts += [
        Text(clean(line), overflow="fold") for line in told_of_limits(limit for limit in limits if limit.task_key)
    ]
    return Group(*parts)


def render_schedules(found: Sequence[Schedule], width: int) -> RenderableType:
    """What ``sqlsem schedules`` shows, at most ``width`` columns wide."""
    if not found:
        return Text("There are no schedules.")
    heads = ("NAME", "QUEUE", "EVERY", "ZONE", "NEXT", "LAST", "WHAT")
    rows = [
        (
            *(one.name, one.queue, one.cron, one.time_zone),
            f"paused by {one.paused_by}" if one.paused_at is not None else local_time(one.next_due) or "never",
            *(local_time(one.last_due), shortened(one.kind, one.body, one.options.get("note"))),
        )
        for one in found
    ]
    return table(heads, rows, fit(heads, rows, width, elastic=(0, 1, 3, 4, 6)), right=())


def _cells(
    one: TaskEntry, why: TaskReason | None, *, with_priority: bool, with_queue: bool, with_key: bool
) -> list[str]:
    tries = str(one.attempt) if one.max_attempts == 1 else f"{one.attempt}/{one.max_attempts}"
    when = one.ended_at or (one.claimed_at if one.status in ("running", "lost") else one.put_at)
    lasted = "" if one.seconds is None else seconds_in_words(one.seconds)
    return [
        *(str(one.task_id), str(one.order), *([str(one.priority)] if with_priority else [])),
        *("blocked" if one.blocked else one.status, tries, lasted, local_time(when)),
        *([one.queue] if with_queue else []),
        *([one.key or ""] if with_key else []),
        *("" if why is None else why.short, process_name(one.host, one.pid), shortened(one.kind, one.body, one.note)),
    ]


def render_tasks(
    found: Sequence[TaskEntry], width: int, only: str | None = None, why: Mapping[int, TaskReason] | None = None
) -> RenderableType:
    """What ``sqlsem tasks`` shows, at most ``width`` columns wide. ``why``: why pending ones do not run, by number."""
    if not found:
        return Text("There are no such tasks." if only is None else f"There are no such tasks in {only!r}.")
    told = why or {}
    keyed = any(one.key is not None for one in found)
    ranked = any(one.priority for one in found)
    rows = [
        _cells(one, told.get(one.task_id), with_priority=ranked, with_queue=only is None, with_key=keyed)
        for one in found
    ]
    held_up = Counter(
        told[one.task_id].behind[0].task_id
        for one in found
        if one.task_id in told and any(other.status == "failed" for other in told[one.task_id].behind)
    )
    also = [*(["QUEUE"] if only is None else []), *(["KEY"] if keyed else [])]
    heads = [
        "ID",
        "ORDER",
        *(["PRIORITY"] if ranked else []),
        "STATE",
        "TRIES",
        "FOR",
        "WHEN",
        *also,
        "WHY",
        "WHO",
        "WHAT",
    ]
    state = heads.index("STATE")
    widths = fit(heads, rows, width, elastic=range(state + 4, len(heads)))
    right = (*range(state), heads.index("FOR"))
    parts: list[RenderableType] = [table(heads, rows, widths, right=right, state=state)]
    failures = [one for one in found if one.status in ("failed", "pending", "cancelled") and one.error]
    if failures:
        parts.append(Text(""))
    for failure in failures:
        # Folded, not cut: the cause may stand at the end.
        line = Text(f"{failure.task_id}: ", overflow="fold")
        parts.append(line.append(clean(first_line(failure.error)[:LONGEST_ERROR]), style="red"))
    for number, count in held_up.items():
        words = (
            f"{count} pending task{'s wait' if count > 1 else ' waits'} for {number}, which has failed; see it "
            f"with: sqlsem tasks log {number}, then retry or cancel it"
        )
        parts.append(Text(words, overflow="fold"))
    return Group(*parts)
