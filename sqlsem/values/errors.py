"""The errors and warnings that sqlsem raises.

    SqlsemError
     ├─ Timeout             (also TimeoutError)   the lock was not granted in time
     ├─ LockLost                                  a held lock was lost
     ├─ Deadlock            (also RuntimeError)   waiting could never end
     ├─ NotHeld             (also RuntimeError)   released or checked a lock that is not held
     ├─ TaskFailed          (also RuntimeError)   a task of a work queue has failed
     ├─ BatchFailed         (also RuntimeError)   a part of a batch, or its callback, has failed
     ├─ ConfigurationError  (also ValueError)     a bad name, limit, URL, driver or call
     ├─ SchemaError                               tables missing, too old or too new
     └─ Unavailable         (also ConnectionError) the database cannot be reached or refuses

`TaskInterrupted` (a BaseException) is raised inside a function that a worker runs, when its task must stop.
A `LockOrderWarning` (also UserWarning) is a warning; ``sqlsem.configure(debug=True)`` turns it on.

Every message says what happened, to which resource, and what to do next. Every error has a ``code``, a word that
docs/reference/errors.md explains. All errors can be pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlsem.util.printable import clean

__all__ = [
    "BatchFailed",
    "ConfigurationError",
    "Deadlock",
    "LockLost",
    "LockOrderWarning",
    "NotHeld",
    "SchemaError",
    "SqlsemError",
    "TaskFailed",
    "TaskInterrupted",
    "Timeout",
    "Unavailable",
]


class SqlsemError(Exception):
    """The base of all errors of this library.

    ``resource``: the name of the resource concerned, or None. ``code``: a word for the kind of error, such as
    "timeout" or "rights", which the reference of errors explains; it stays the same when the message changes.
    """

    code: str = "error"

    # The default __reduce__ includes __dict__, where the attributes are: so these errors can be pickled.
    def __init__(self, message: str = "", *, resource: str | None = None, code: str | None = None) -> None:
        # The message may contain text of other users, and may be printed anywhere.
        super().__init__(clean(message, keep="\n\t"))
        self.resource = resource
        if code is not None:
            self.code = code


class Timeout(SqlsemError, TimeoutError):
    """The lock was not granted within the given time. The request has left the queue.

    The message names the holder: host, process, program, and since when. ``holders`` are the rows of all holders that
    blocked the request at that moment, as `Admin.entries` returns them. It is empty if the rows could not be read, if
    the last holder had just released, if only earlier waiters blocked the request, or if the resource was paused. After
    `Queue.wait`, ``holders`` are the running tasks.
    """

    code = "timeout"

    def __init__(self, message: str = "", *, resource: str | None = None, holders: Sequence[Any] = ()) -> None:
        super().__init__(message, resource=resource)
        self.holders: tuple[Any, ...] = tuple(holders)


class LockLost(SqlsemError):
    """A held lock was lost: the database was out of reach for too long, or an operator revoked the lock.

    Code that ran under the lock since then may have run beside another holder.
    """

    code = "lock-lost"


class Deadlock(SqlsemError, RuntimeError):
    """The wait could never end, because the blocker waits for this caller, or is this caller itself."""

    code = "deadlock"


class NotHeld(SqlsemError, RuntimeError):
    """The caller released or asserted a lock that it does not hold."""

    code = "not-held"


class TaskFailed(SqlsemError, RuntimeError):
    """A task of a work queue has failed. ``task_id``: its number; None if it is not known."""

    code = "task-failed"

    def __init__(
        self, message: str = "", *, resource: str | None = None, code: str | None = None, task_id: int | None = None
    ) -> None:
        super().__init__(message, resource=resource, code=code)
        self.task_id = task_id


class BatchFailed(SqlsemError, RuntimeError):
    """A part of a batch has failed, was too late or was lost, or the callback has failed.

    ``resource`` is the batch's name, ``batch_id`` its number, and ``failed`` maps parts to their errors.
    """

    code = "batch-failed"

    def __init__(
        self,
        message: str = "",
        *,
        resource: str | None = None,
        batch_id: int | None = None,
        failed: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, resource=resource)
        self.batch_id = batch_id
        self.failed = failed or {}


class ConfigurationError(SqlsemError, ValueError):
    """A name, limit, URL, driver or call that cannot work. The message says how to correct it."""

    code = "configuration"


class SchemaError(SqlsemError):
    """The tables are missing, older or newer than this client. The message names the command that corrects this."""

    code = "tables"


class Unavailable(SqlsemError, ConnectionError):
    """The database cannot be reached, or refuses the call. The cause is chained."""

    code = "unreachable"


class TaskInterrupted(BaseException):
    """Raised inside a function that a worker runs: its task was cancelled, or has reached its time limit. Let it pass.

    It does not derive from `Exception`, so that ``except Exception`` does not catch it.
    """


class LockOrderWarning(UserWarning):
    """Two places in the code acquire the same locks in opposite orders, so they can wait for each other."""
