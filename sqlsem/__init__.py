"""Coordination in the SQL database you already have: locks in one FIFO table, a work queue, and rounds.

>>> import sqlsem
>>> with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     ...
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING, Any

import platformdirs

from sqlsem import lockorder
from sqlsem.coordinator import Coordinator, Grant, connect
from sqlsem.engines import Database
from sqlsem.errors import (
    ConfigurationError,
    Deadlock,
    LockLost,
    LockOrderWarning,
    NotHeld,
    RoundFailed,
    SchemaError,
    SqlsemError,
    TaskFailed,
    Timeout,
    Unavailable,
)
from sqlsem.locks import Lock, all_of, limit, mutex, read, stage, write
from sqlsem.model import Duration
from sqlsem.options import ConnectOptions, check_options
from sqlsem.rounds import Round, round
from sqlsem.tasks import Call, Queue, Shell, Sql, Task, Worker, queue

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sqlsem import aio

__all__ = [
    "Call",
    "ConfigurationError",
    "Coordinator",
    "Database",
    "Deadlock",
    "Duration",
    "Grant",
    "Lock",
    "LockLost",
    "LockOrderWarning",
    "NotHeld",
    "Queue",
    "Round",
    "RoundFailed",
    "SchemaError",
    "Shell",
    "Sql",
    "SqlsemError",
    "Task",
    "TaskFailed",
    "Timeout",
    "Unavailable",
    "Worker",
    "aio",
    "all_of",
    "configure",
    "connect",
    "default",
    "default_url",
    "limit",
    "mutex",
    "queue",
    "read",
    "round",
    "stage",
    "write",
]
__version__ = "0.1.0"

_guard = threading.Lock()
_configured: tuple[Database | None, ConnectOptions] = (None, {})
_coordinator: Coordinator | None = None


def __getattr__(name: str) -> Any:
    # Imported when it is used: programs without asyncio need not load it.
    if name == "aio":
        return importlib.import_module("sqlsem.aio")
    raise AttributeError(f"module 'sqlsem' has no attribute {name!r}")


def _unlock_in_child() -> None:
    """Another thread may have held the guard when the process forked; in the child it does not exist."""
    global _guard
    _guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


def default_url() -> str:
    """Where locks live unless told otherwise: ``$SQLSEM_URL``, else an SQLite file in this user's state directory."""
    return os.environ.get("SQLSEM_URL") or f"sqlite:///{platformdirs.user_state_path('sqlsem') / 'sqlsem.db'}"


def configure(url: Database | None = None, *, debug: bool | None = None, **options: Unpack[ConnectOptions]) -> None:
    """Choose the database of the module-level functions, before the first lock is taken.

    Args:
        url: As for `connect`; left out, `default_url`.
        debug: True watches the order in which locks are taken, in all databases, and gives a `LockOrderWarning` when
            two places could come to wait for each other; False ends that. Alone it changes nothing else.
        options: As for `connect`: ``grace``, ``lease``, ``retry``, ``schema``, ``table``, ``creator``.

    Raises `ConfigurationError` when the options cannot be, and closes a default coordinator that is in use
    (its locks are given back).

    >>> sqlsem.configure("postgresql://etl@db/dwh", grace=30)  # doctest: +SKIP
    """
    global _configured, _coordinator
    check_options("configure()", options, ConnectOptions.__optional_keys__ | {"url", "debug"})
    if debug is not None:
        lockorder.configure(debug)
        if url is None and not options:
            return
    fresh = connect(default_url() if url is None else url, **options)  # finds faults at once; connects only when used
    with _guard:
        old, _coordinator = _coordinator, fresh
        _configured = (url, options)
    if old is not None:
        old.close()


def default() -> Coordinator:
    """The coordinator of the module-level functions; made when first needed, and again after it was closed."""
    global _coordinator
    current = _coordinator
    if current is not None and not current.closed:
        return current
    with _guard:
        if _coordinator is None or _coordinator.closed:
            url, options = _configured
            _coordinator = connect(default_url() if url is None else url, **options)
        return _coordinator
