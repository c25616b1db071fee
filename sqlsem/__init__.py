"""Coordination in the SQL database you already have: locks in one FIFO table, a work queue, and batches.

>>> import sqlsem
>>> with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     ...

Most programs need these names:

- `mutex`, `limit`, `read`, `write`, `all_of` make a lock: for ``with``, as a decorator, or with ``acquire`` and
  ``release``, with the options ``timeout`` and ``note``.
- The `Grant` that ``with`` gives has ``fence``, ``lost``, ``check`` and ``assert_held``.
- `Timeout`, `LockLost`, `Deadlock`, `Unavailable` are the errors to expect.
- `configure` names the database, if no variable or file does.

When you need more: `rate`, `once` and `leader`; then `queue` and `batch` with the classes of tasks; `connect` for
several databases, `aio` for asyncio, ``Coordinator.admin`` for operators. `stage`, `adopt` and `on` are for special
cases.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from sqlsem.api.coordinator import Coordinator, connect
from sqlsem.api.default import configure, default, default_url
from sqlsem.api.locks import Lock, adopt
from sqlsem.api.once import Once, Run
from sqlsem.api.rates import Rate, RateGrant
from sqlsem.client.event_bus import Subscription, global_bus
from sqlsem.client.factories import ModuleFactories
from sqlsem.client.grants import Grant
from sqlsem.engines import Database
from sqlsem.util import late
from sqlsem.util.printable import CleanFilter
from sqlsem.values import events as events
from sqlsem.values.errors import (
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
from sqlsem.values.locks import Duration

if TYPE_CHECKING:
    from sqlsem import aio
    from sqlsem.api.admin import Admin
    from sqlsem.api.leader import Leader, Term, leader
    from sqlsem.batches import Batch, batch
    from sqlsem.ops import metrics as metrics
    from sqlsem.ops import otel as otel
    from sqlsem.tasks import Call, Queue, Shell, Sql, Task, Worker, queue

__all__ = [  # noqa: RUF022 - by subject, in the order in which programs need them
    # for most programs: locks, the database, and what may happen
    "mutex",
    "limit",
    "read",
    "write",
    "all_of",
    "Lock",
    "Grant",
    "configure",
    "Timeout",
    "LockLost",
    "Deadlock",
    "Unavailable",
    # several databases, asyncio, operators; the other errors
    "aio",
    "connect",
    "default",
    "default_url",
    "Coordinator",
    "Admin",
    "Database",
    "Duration",
    "SqlsemError",
    "ConfigurationError",
    "SchemaError",
    "NotHeld",
    "LockOrderWarning",
    # rates, runs once per period, leaders
    "rate",
    "Rate",
    "RateGrant",
    "once",
    "Once",
    "Run",
    "leader",
    "Leader",
    "Term",
    # work queues and batches
    "queue",
    "Queue",
    "Task",
    "Worker",
    "Sql",
    "Shell",
    "Call",
    "TaskFailed",
    "TaskInterrupted",
    "batch",
    "Batch",
    "BatchFailed",
    # for special cases
    "stage",
    "adopt",
    "on",
    "Subscription",
]
__version__ = "0.1.0"
on = global_bus.on
_functions = ModuleFactories(Lock, Rate, Once)
mutex = _functions.mutex
limit = _functions.limit
read = _functions.read
write = _functions.write
stage = _functions.stage
all_of = _functions.all_of
rate = _functions.rate
once = _functions.once
logging.getLogger("sqlsem").addFilter(CleanFilter())


#: The names that are imported when they are first used, with their modules: what `Lock` does not need.
LATE = {
    **dict.fromkeys(("Call", "Queue", "Shell", "Sql", "Task", "Worker", "queue"), "sqlsem.tasks"),
    **dict.fromkeys(("Batch", "batch"), "sqlsem.batches"),
    **dict.fromkeys(("Leader", "Term", "leader"), "sqlsem.api.leader"),
    "Admin": "sqlsem.api.admin",
}
#: The modules that are imported when they are first used.
LATE_MODULES = {
    "aio": "sqlsem.aio",
    "batches": "sqlsem.batches",
    "metrics": "sqlsem.ops.metrics",
    "otel": "sqlsem.ops.otel",
    "tasks": "sqlsem.tasks",
}

if not TYPE_CHECKING:  # (Type checkers would take any name for one of these.)

    def __getattr__(name):
        module = LATE_MODULES.get(name) or LATE.get(name)
        if module is None:
            raise AttributeError(f"module 'sqlsem' has no attribute {name!r}")
        with late.importing:
            loaded = importlib.import_module(module)
        found = globals()[name] = loaded if name in LATE_MODULES else getattr(loaded, name)
        return found

    def __dir__():
        return sorted({*globals(), *LATE, *LATE_MODULES})
