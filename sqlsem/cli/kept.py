"""Lines about sessions that keep a lock inside the database for too long, for several commands."""

from __future__ import annotations

import logging

import sqlsem
from sqlsem.values.errors import SqlsemError

__all__ = ["kept_lines"]

log = logging.getLogger(__name__)


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
