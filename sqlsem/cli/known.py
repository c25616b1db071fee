"""Looks at the database for several commands: is a name in use (else it may be misspelt), which locks are kept?"""

from __future__ import annotations

import logging

import sqlsem
from sqlsem import config
from sqlsem.values.errors import ConfigurationError, SqlsemError

log = logging.getLogger(__name__)

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


def kept_lines(coordinator: sqlsem.Coordinator, resource: str | None, *, pins: bool = False) -> list[str]:
    """Return a line for each lock of the database that a session keeps for longer than a call needs. ``pins``: also
    for rows that an open transaction has asserted.
    """
    try:
        kept = coordinator.admin.kept_locks(resource)
    except SqlsemError as exc:  # an earlier installation, or a login without any role
        log.info("cannot see which locks are kept: %s", exc)
        return []
    return [f"{lock.words}; end it with: {lock.remedy}" for lock in kept if lock.holds_up or pins]
