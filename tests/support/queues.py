"""Use work queues as a program does."""

from __future__ import annotations

from typing import Any

import sqlsem
from support.children import Channel


def drain(queue: sqlsem.Queue) -> list[Any]:
    """Claim all tasks that can start now, one after the other, and return their bodies in that order."""
    bodies = []
    while (task := queue.try_claim()) is not None:
        with task:
            bodies.append(task.body)
    return bodies


def work_until_killed(channel: Channel, url: str, options: dict[str, Any], name: str, grace: float) -> None:
    """Claim tasks in a process of its own: report each claim, and finish the task at a command."""
    queue = sqlsem.connect(url, **options, grace=grace).queue(name)
    for task in queue.claim(wait=120):
        channel.tell("claimed", id=task.id)
        channel.ask()
        task.finish()
