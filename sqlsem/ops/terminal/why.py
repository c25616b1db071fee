"""Renders the output of ``sqlsem why``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sqlsem.insight.chains import Chain
from sqlsem.insight.reasons import Reason, TaskReason
from sqlsem.insight.words import requester, seconds_in_words
from sqlsem.ops.terminal.tasks import shortened
from sqlsem.values.locks import Entry
from sqlsem.values.tasks import TaskEntry

__all__ = ["entry_as_dict", "explain_entry", "explain_task", "task_as_dict"]


def explain_entry(entry: Entry, reason: Reason | None, chain: Chain, behind: Iterable[Entry] = ()) -> Iterator[str]:
    """Yield lines about a request: why it waits, and the chain up to the root blocker. ``behind``: its waiters."""
    head = f"{entry.position}  {requester(entry)}"
    since = seconds_in_words(entry.seconds)
    if reason is None:
        if entry.in_transit:
            yield f"{head} handed {entry.resource!r} over {since} ago, and nobody has adopted it yet"
        else:
            yield f"{head} has held {entry.resource!r} for {since}" + (" and is dead" if entry.state == "dead" else "")
        waiting = list(behind)
        if waiting:
            seconds = sum(waiter.seconds for waiter in waiting)
            count = f"{len(waiting)} wait{'s' if len(waiting) == 1 else ''} for it, directly or behind others"
            yield f"  {count}; together for {seconds_in_words(seconds)}"
    else:
        what = "is inside and waits to write" if reason.code == "upgrading" else "has waited"
        yield f"{head} {what} for {entry.resource!r} for {since}:"
        yield f"  {reason.words}"
        if reason.enters is not None:
            yield f"  {reason.enters.words}"
    for step, (waiter, its) in enumerate(chain.links, 1):
        if len(chain.links) > 1:
            state = "waits itself" if its.state == "waits" else f"has held it for {seconds_in_words(its.seconds)}"
            blocker = f"{its.position} {requester(its)} {state}"
            yield f"  {'  ' * step}{waiter.position} {requester(waiter)} waits for {waiter.resource!r}: {blocker}"
    if chain.deadlock:
        yield "  They wait for each other: a deadlock, of which one request is told to give up"


def explain_task(task: TaskEntry, reason: TaskReason | None) -> Iterator[str]:
    """Yield lines about a task."""
    what = shortened(task.kind, task.body, task.note)
    whose = "" if task.key is None else f"key {task.key!r}, "
    state = "blocked" if task.blocked else task.status
    yield f"task {task.task_id} of {task.queue!r} (order {task.order}, {whose}{what}) is {state}"
    if reason is not None:
        yield f"  {reason.words}"
    elif task.error:
        yield f"  {task.error}"


def entry_as_dict(entry: Entry, reason: Reason | None, chain: Chain) -> dict[str, Any]:
    """Return a request with its reason and chain as a dictionary for JSON."""
    return {
        "entry": entry.as_dict(),
        "why": None if reason is None else reason.as_dict(),
        "chain": [{"position": blocked.position, "behind": its.position} for blocked, its in chain.links],
        "deadlock": chain.deadlock,
    }


def task_as_dict(task: TaskEntry, reason: TaskReason | None) -> dict[str, Any]:
    """Return a task with its reason as a dictionary for JSON."""
    return {"task": task.as_dict(), "why": None if reason is None else reason.as_dict()}
