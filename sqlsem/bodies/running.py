"""Runs bodies: SQL and calls of functions (`commands` runs commands). Checks which bodies a worker may run."""

from __future__ import annotations

import ctypes
import inspect
import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sqlsem.bodies.commands import END_SECONDS, run_command
from sqlsem.bodies.kinds import arguments, as_json, import_by_name
from sqlsem.client.client import DatabaseClient
from sqlsem.util.record import record
from sqlsem.values.errors import ConfigurationError, SqlsemError, TaskFailed, TaskInterrupted


@record
class Allowed:
    """Restricts the bodies that a worker runs.

    Attributes:
        kinds: Only these kinds (None: all).
        modules: Only functions of these modules and their submodules (None: all).
        paths: Folders to import from, after all others.
    """

    kinds: Sequence[str] | None = None
    modules: Sequence[str] | None = None
    paths: Sequence[str] = ()

    def require(self, kind: str) -> None:
        """Raise `TaskFailed` for a kind that is not allowed."""
        if self.kinds is not None and kind not in self.kinds:
            raise TaskFailed(
                f"This worker runs {', '.join(self.kinds)} only, no task of kind {kind} (--kinds)", code="task"
            )

    def find(self, name: str) -> Any:
        """Import a function by name. Raises `TaskFailed` unless an allowed module defines it."""
        module = name.partition(":")[0]
        if not self._has(module):
            self._refuse(name)
        for path in self.paths:
            # Added late, as that affects all imports of this process; and last, so that it hides no installed module.
            if path not in sys.path:
                sys.path.append(path)
        function = import_by_name(name)
        if not self._has(getattr(function, "__module__", None)):
            self._refuse(name)
        return function

    def _has(self, module: object) -> bool:
        if self.modules is None:
            return True
        return isinstance(module, str) and any(
            module == allowed or module.startswith(f"{allowed}.") for allowed in self.modules
        )

    def _refuse(self, name: str) -> None:
        assert self.modules is not None
        raise TaskFailed(
            f"This worker calls functions of {', '.join(self.modules)} only, not {name} (--modules)", code="task"
        )


_ANYTHING = Allowed()

#: Ends a running body; called in another thread.
Stop = Callable[[], None]
#: Called when a body begins, with the function that ends it. If it raises an exception, the body ends, too.
Started = Callable[[Stop], None]


def run(
    kind: str,
    body: str,
    client: DatabaseClient,
    *,
    started: Started = lambda _: None,
    allowed: Allowed | None = None,
) -> str | None:
    """Run a body of any kind but JSON, and return its result as text. Raises the body's errors."""
    allowed = allowed or _ANYTHING
    allowed.require(kind)
    if kind == "sql":
        return _run_sql(body, client, started)
    if kind == "shell":
        return run_command(arguments(body) or body, started, _kill_after(client))
    if kind == "call":
        return _run_call(body, allowed, started)
    raise ConfigurationError(f"A worker cannot run a task of kind {kind}; claim it with sqlsem.queue(…).claim()")


def _kill_after(client: DatabaseClient) -> float:
    """Return how many seconds a command may take to end if this process dies. It must end before the next attempt,
    which on SQLite may begin at once.
    """
    options = client.engine.options
    return min(END_SECONDS, (options.lease or options.grace) / 2) if client.engine.beacon_may_fail else 0.0


def _run_sql(text: str, client: DatabaseClient, started: Started) -> str | None:
    try:
        return client.run_sql(text, lambda session: started(session.cancel_running))
    except TaskFailed:
        raise
    except SqlsemError as exc:
        raise TaskFailed(_sql_error(exc)) from exc


def _sql_error(error: SqlsemError) -> str:
    """Return the driver's error of a task's SQL. (Errors of sqlsem give advice about sqlsem's own statements.)"""
    cause: BaseException | None = error
    while isinstance(cause, SqlsemError):
        cause = cause.__cause__
    if cause is None:
        return f"The SQL failed: {error}"
    message = str(cause).strip() or type(cause).__name__
    code = getattr(cause, "sqlstate", None) or getattr(cause, "sqlite_errorname", None)
    lines = [f"The SQL failed: {f'{code}: ' if code else ''}{message}"]
    diagnosis = getattr(cause, "diag", None)
    for name, field_name in (("DETAIL", "message_detail"), ("HINT", "message_hint"), ("CONTEXT", "context")):
        more = getattr(diagnosis, field_name, None)
        if more and more not in message:
            lines.append(f"{name}:  {more}")
    return "\n".join(lines)


class _Absorbed(BaseException):
    """Replaces a pending `TaskInterrupted` that would be raised too late."""


class _Interruption:
    """Interrupts the function that the creating thread runs: `interrupt` raises `TaskInterrupted` in that thread.

    Python raises it between two bytecode instructions. A system call, or a call into a library in another language,
    has to return first.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._running = True
        self._interrupted = False

    def interrupt(self) -> None:
        """Interrupt the function if it still runs. Called in another thread."""
        with self._lock:
            if self._running:
                self._interrupted = _raise_in(self._thread, TaskInterrupted)

    def finish(self) -> None:
        """End the time in which `interrupt` has an effect, and discard a pending exception."""
        try:
            with self._lock:
                self._running = False
                if not self._interrupted:
                    return
                # Replace the exception. (Clearing it with NULL makes CPython check for it at every step for ever.)
                _raise_in(self._thread, _Absorbed)
            while True:  # _Absorbed is raised here
                pass
        except _Absorbed:
            return


def _raise_in(thread: int, error: type[BaseException]) -> bool:
    """Raise an exception in another thread; return False if this Python cannot."""
    if sys.implementation.name != "cpython":
        return False
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error)))


def _run_call(body: str, allowed: Allowed, started: Started) -> str | None:
    """Call a function, and return its result as JSON."""
    try:
        call = json.loads(body)
        name, args, kwargs = call["function"], call["args"], call["kwargs"]
    except (ValueError, RecursionError, LookupError, TypeError) as exc:
        raise TaskFailed(f"This is no call as sqlsem keeps it: {type(exc).__name__}: {exc}", code="task") from exc
    function, interruption = allowed.find(name), _Interruption()
    try:
        try:
            started(interruption.interrupt)
            result = function(*args, **kwargs)
        finally:
            interruption.finish()
    except TaskInterrupted:
        interruption.finish()  # again, as the first call may have been interrupted itself
        raise
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigurationError(f"{name} is a coroutine function; a worker calls plain functions")
    return None if result is None else as_json(result)
