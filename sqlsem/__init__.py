"""Coordination in the SQL database you already have: locks in one FIFO table, a work queue, and rounds.

>>> import sqlsem
>>> with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     ...
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from sqlsem.chosen import configure, default, default_url
from sqlsem.coordinator import Coordinator, connect
from sqlsem.core.grants import Grant
from sqlsem.core.signals import Subscription, everywhere
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
    TaskInterrupted,
    Timeout,
    Unavailable,
)
from sqlsem.locks import Lock, all_of, limit, mutex, read, stage, write
from sqlsem.model import Duration
from sqlsem.printable import CleanFilter
from sqlsem.rounds import Round, round
from sqlsem.tasks import Call, Queue, Shell, Sql, Task, Worker, queue

if TYPE_CHECKING:
    from sqlsem import aio
    from sqlsem import metrics as metrics
    from sqlsem import otel as otel

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
    "Subscription",
    "Task",
    "TaskFailed",
    "TaskInterrupted",
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
    "on",
    "queue",
    "read",
    "round",
    "stage",
    "write",
]
__version__ = "0.1.0"
on = everywhere.on
logging.getLogger("sqlsem").addFilter(CleanFilter())


def __getattr__(name: str) -> Any:
    # Imported when they are used: programs without asyncio, or metrics, need not load them, nor have what they need.
    if name in ("aio", "metrics", "otel"):
        return importlib.import_module(f"sqlsem.{name}")
    raise AttributeError(f"module 'sqlsem' has no attribute {name!r}")
