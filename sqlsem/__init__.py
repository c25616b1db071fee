"""Coordination in the SQL database you already have: locks in one FIFO table, a work queue, and batches.

>>> import sqlsem
>>> with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     ...
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from sqlsem.admin import Admin
from sqlsem.batches import Batch, batch
from sqlsem.chosen import configure, default, default_url
from sqlsem.coordinator import Coordinator, connect
from sqlsem.core.event_bus import Subscription, global_bus
from sqlsem.core.grants import Grant
from sqlsem.engines import Database
from sqlsem.errors import (
    BatchFailed,
    ConfigurationError,
    Deadlock,
    LockLost,
    LockOrderWarning,
    NotHeld,
    SchemaError,
    SqlsemError,
    TaskFailed,
    TaskInterrupted,
    Timeout,
    Unavailable,
)
from sqlsem.leading import Leader, Term, leader
from sqlsem.locks import Lock, adopt, all_of, limit, mutex, read, stage, write
from sqlsem.model import Duration
from sqlsem.periodic import Once, Run, once
from sqlsem.printable import CleanFilter
from sqlsem.rates import Rate, RateGrant, rate
from sqlsem.tasks import Call, Queue, Shell, Sql, Task, Worker, queue

if TYPE_CHECKING:
    from sqlsem import aio
    from sqlsem import metrics as metrics
    from sqlsem import otel as otel

__all__ = [
    "Admin",
    "Batch",
    "BatchFailed",
    "Call",
    "ConfigurationError",
    "Coordinator",
    "Database",
    "Deadlock",
    "Duration",
    "Grant",
    "Leader",
    "Lock",
    "LockLost",
    "LockOrderWarning",
    "NotHeld",
    "Once",
    "Queue",
    "Rate",
    "RateGrant",
    "Run",
    "SchemaError",
    "Shell",
    "Sql",
    "SqlsemError",
    "Subscription",
    "Task",
    "TaskFailed",
    "TaskInterrupted",
    "Term",
    "Timeout",
    "Unavailable",
    "Worker",
    "adopt",
    "aio",
    "all_of",
    "batch",
    "configure",
    "connect",
    "default",
    "default_url",
    "leader",
    "limit",
    "mutex",
    "on",
    "once",
    "queue",
    "rate",
    "read",
    "stage",
    "write",
]
__version__ = "0.1.0"
on = global_bus.on
logging.getLogger("sqlsem").addFilter(CleanFilter())


def __getattr__(name: str) -> Any:
    # Imported when they are used: programs without asyncio, or metrics, need not load them, nor have what they need.
    if name in ("aio", "metrics", "otel"):
        return importlib.import_module(f"sqlsem.{name}")
    raise AttributeError(f"module 'sqlsem' has no attribute {name!r}")
