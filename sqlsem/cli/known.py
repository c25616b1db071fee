"""Checks of names on the command line: a name that is not in use may be misspelt."""

from __future__ import annotations

import sqlsem
from sqlsem import config
from sqlsem.values.errors import ConfigurationError

__all__ = ["require_resource", "unknown_queue"]

#: The number of requests and tasks that are searched for similar names.
MAX_ROWS = 1000


def require_resource(coordinator: sqlsem.Coordinator, resource: str) -> None:
    """Refuse a name without current or recent use: it may be misspelt, and the right one would stay as it is."""
    known = {row.resource for row in coordinator.admin.resources()}
    if resource in known or coordinator.admin.history(resource, maximum=1):
        return
    known |= {hold.resource for hold in coordinator.admin.history(maximum=MAX_ROWS)}
    raise ConfigurationError(
        f"Nobody uses {resource!r}, nor has lately{config.nearest(resource, known)}; if the "
        f"name is new, add --allow-new"
    )


def unknown_queue(coordinator: sqlsem.Coordinator, queue: str) -> str | None:
    """Return a warning about a queue that has never had a task; None if it has."""
    state = coordinator.queue(queue).state()
    if not state.done or state.failed is not None or coordinator.admin.tasks(queue, maximum=1):
        return None
    known = sorted({task.queue for task in coordinator.admin.tasks(maximum=MAX_ROWS)})
    listed = f"; there are {', '.join(known[:5])}{', …' if len(known) > 5 else ''}" if known else ""
    return f"Nothing is known of a queue {queue!r}{config.nearest(queue, known)}{listed}"
