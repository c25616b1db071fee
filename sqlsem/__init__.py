"""Coordination in the SQL database you already have: locks in one FIFO table, a work queue, and rounds.

>>> import sqlsem
>>> with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     ...
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from sqlsem import config
from sqlsem.coordinator import Coordinator, connect
from sqlsem.core import defaults, lockorder
from sqlsem.core.grants import Grant
from sqlsem.core.options import ConnectOptions, check_options
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
from sqlsem.printable import CleanFilter
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
#: What everybody should know of the embedded default.
EMBEDDED = (
    "which only processes of this user on this host share; to share with others set $SQLSEM_URL or write a sqlsem.toml"
)

logging.getLogger("sqlsem").addFilter(CleanFilter())

_guard = threading.Lock()
_configured: tuple[Database | None, str | None, ConnectOptions] = (None, None, {})
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
    """Where locks live unless told otherwise: ``$SQLSEM_URL``, a profile or a configuration file, else an SQLite file.

    It may hold a password. See `sqlsem.config`.
    """
    return config.resolve().url


def configure(
    url: Database | None = None,
    *,
    profile: str | None = None,
    debug: bool | None = None,
    **options: Unpack[ConnectOptions],
) -> None:
    """Choose the database of the module-level functions, before the first lock is taken.

    Args:
        url: As for `connect`; left out, the profile's or `default_url`.
        profile: A profile of the configuration files (``sqlsem.toml``).
        debug: True watches the order in which locks are taken, in all databases, and gives a `LockOrderWarning` when
            two places could come to wait for each other; False ends that. Alone it changes nothing else.
        options: As for `connect`: ``grace``, ``lease``, ``retry``, ``schema``, ``table``, ``creator``.

    Raises `ConfigurationError` when the options cannot be, and closes a default coordinator that is in use
    (its locks are given back).

    >>> sqlsem.configure("postgresql://etl@db/dwh", grace=30)  # doctest: +SKIP
    """
    global _configured, _coordinator
    check_options("configure()", options, ConnectOptions.__optional_keys__ | {"url", "profile", "debug"})
    if debug is not None:
        lockorder.configure(debug)
        if url is None and profile is None and not options:
            return
    fresh = _connect(url, profile, options)  # finds faults at once; connects only when used
    with _guard:
        old, _coordinator = _coordinator, fresh
        _configured = (url, profile, options)
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
            _coordinator = _connect(*_configured)
        return _coordinator


defaults.provide(default)


def _connect(url: Database | None, profile: str | None, options: ConnectOptions) -> Coordinator:
    if url is not None and not isinstance(url, str):
        return connect(url, **options)
    settings = config.resolve(url, profile=profile)
    merged: ConnectOptions = {**settings.options, **options}  # type: ignore[typeddict-item]  # checked by connect
    coordinator = connect(settings.url, **merged)
    log = logging.getLogger("sqlsem")
    for warning in settings.warnings:
        log.warning("%s", warning)
    if settings.embedded:
        log.info("Locks are kept in %s, %s", coordinator.engine.where, EMBEDDED)
    else:
        log.info("Locks are kept in %s, from %s", coordinator.engine.where, settings.source)
    return coordinator
