"""Helpers for your own unit tests: locks that need no database and are private to the test."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from sqlsem.api.coordinator import Coordinator, connect
from sqlsem.client.options import ConnectOptions, shows_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["memory"]


@shows_options(ConnectOptions)
def memory(name: str | None = None, **options: Unpack[ConnectOptions]) -> Coordinator:
    """Return a coordinator with locks in the memory of this process. They last until the last coordinator of this name
    is closed.

    It has mutex, limit, read, write, stage and all_of, for threads and asyncio. It finds deadlocks, and limits and
    pauses can be set (`Admin.set_limit`, `Admin.pause`). Work queues, batches, upgrades and the other calls
    of operators raise `sqlsem.ConfigurationError`.

    Args:
        name: Coordinators of the same name share their locks, as two programs share those in a database. Left out: this
            coordinator shares its locks with no other.
        options: As for `sqlsem.connect`.

    Example:
        >>> import sqlsem.testing
        >>> with sqlsem.testing.memory() as locks, locks.mutex("nightly"):
        ...     locks.mutex("nightly").locked()
        True
    """
    return connect(f"memory://{secrets.token_hex(8) if name is None else name}", **options)
