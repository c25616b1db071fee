"""Help for your own unit tests: locks that need no database, and that nobody else sees."""

from __future__ import annotations

import secrets
from typing import Any

from sqlsem.coordinator import Coordinator, connect

__all__ = ["memory"]


def memory(name: str | None = None, **options: Any) -> Coordinator:
    """A coordinator whose locks are in the memory of this process, and gone with the last one that names them.

    It has mutex, limit, read, write, stage and all_of, for threads and asyncio, finds deadlocks, and lets limits and
    pauses be set (`Coordinator.set_limit`, `Coordinator.pause`). Work queues, batches, upgrades and what else operators
    do it has not; asking for them raises `sqlsem.ConfigurationError`.

    Args:
        name: Coordinators of the same name share their locks, as two programs would share those in a database. Left
            out: this one is alone.
        options: As for `sqlsem.connect`.

    Example:
        >>> import sqlsem.testing
        >>> with sqlsem.testing.memory() as locks, locks.mutex("nightly"):
        ...     locks.mutex("nightly").locked()
        True
    """
    return connect(f"memory://{secrets.token_hex(8) if name is None else name}", **options)
