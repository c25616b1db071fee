"""Carrying out a body: SQL and calls, and which bodies a worker carries out at all. (Commands have a module.)"""

from __future__ import annotations

import ctypes
import inspect
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlsem.bodies.commands import END_SECONDS, run_command
from sqlsem.bodies.kinds import arguments, import_by_name
from sqlsem.bodies.texts import as_json
from sqlsem.core.process import Process
from sqlsem.errors import ConfigurationError, SqlsemError, TaskFailed, TaskInterrupted

__all__ = ["Allowed", "Started", "Stop", "run"]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a worker carries out.

    Attributes:
        kinds: Of these kinds only (None: of any).
        modules: Calls of functions of these modules and what is below them only (None: of any).
        paths: Folders to import from, after all others.
    """

    kinds: Sequence[str] | None = None
    modules: Sequence[str] | None = None
    paths: Sequence[str] = ()

    def require(self, kind: str) -> None:
        """Refuse a task of another kind."""
        if self.kinds is not None and kind not in self.kinds:
            raise TaskFailed(f"This worker carries out {', '.join(self.kinds)} only, no task of kind {kind} (--kinds)")

    def find(self, name: str) -> Any:
        """As `import_by_name`, within the modules allowed: not what these have imported from others."""
        module = name.partition(":")[0]
        if not self._has(module):
            self._refuse(name)
        for path in self.paths:
            # When first needed, as it changes what others find; and last, so that it hides nothing that is installed.
            if path not in sys.path:
                sys.path.append(path)
        found = import_by_name(name)
        if not self._has(getattr(found, "__module__", None)):
            self._refuse(name)
        return found

    def _has(self, module: object) -> bool:
        if self.modules is None:
            return True
        return isinstance(module, str) and any(module == one or module.startswith(f"{one}.") for one in self.modules)

    def _refuse(self, name: str) -> None:
        assert self.modules is not None
        raise TaskFailed(f"This worker calls functions of {', '.join(self.modules)} only, not {name} (--modules)")


_ANYTHING = Allowed()

#: How to end what a body does, from another thread.
Stop = Callable[[], None]
#: Called when it begins, with how to end it; what it raises ends it, too.
Started = Callable[[Stop], None]


def run(
    kind: str,
    body: str,
    process: Process,
    *,
    started: Started = lambda _: None,
    allowed: Allowed | None = None,
) -> str | None:
    """Carry out a body of any kind but JSON; what came of it, as text. Raises whatever goes wrong."""
    allowed = allowed or _ANYTHING
    allowed.require(kind)
    if kind == "sql":
        return _run_sql(body, process, started)
    if kind == "shell":
        return run_command(arguments(body) or body, started, _patience(process))
    if kind == "call":
        return _run_call(body, allowed, started)
    raise ConfigurationError(f"A worker cannot carry out a task of kind {kind}; claim it with sqlsem.queue(…).claim()")


def _patience(process: Process) -> float:
    """Return how long a command may take to end when this process has died: its next attempt must not begin before. (On
    SQLite that may be at once.)
    """
    options = process.engine.options
    return min(END_SECONDS, (options.lease or options.grace) / 2) if process.engine.beacon_may_fail else 0.0


def _run_sql(text: str, process: Process, started: Started) -> str | None:
    try:
        return process.execute(text, lambda session: started(session.cancel_running))
    except TaskFailed:
        raise
    except SqlsemError as exc:
        raise TaskFailed(_sql_error(exc)) from exc


def _sql_error(error: SqlsemError) -> str:
    """What the database said of a task's SQL, in its own words: our advice is for our own statements."""
    cause: BaseException | None = error
    while isinstance(cause, SqlsemError):
        cause = cause.__cause__
    if cause is None:
        return f"The SQL failed: {error}"
    words = str(cause).strip() or type(cause).__name__
    code = getattr(cause, "sqlstate", None) or getattr(cause, "sqlite_errorname", None)
    lines = [f"The SQL failed: {f'{code}: ' if code else ''}{words}"]
    diagnosis = getattr(cause, "diag", None)
    for name, field_name in (("DETAIL", "message_detail"), ("HINT", "message_hint"), ("CONTEXT", "context")):
        more = getattr(diagnosis, field_name, None)
        if more and more not in words:
            lines.append(f"{name}:  {more}")
    return "\n".join(lines)


class _Absorbed(BaseException):
    """Takes the place of a `TaskInterrupted` that comes too late."""


class _Interruption:
    """Ends a function that this thread runs, from another one: raises `TaskInterrupted` in it, between two steps of
    Python. What is in a call to the system, or of a library in another language, hears of it when that has returned.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._runs = True
        self._struck = False

    def strike(self) -> None:
        """From another thread: as long as the function runs."""
        with self._lock:
            if self._runs:
                self._struck = _raise_in(self._thread, TaskInterrupted)

    def over(self) -> None:
        """The function has ended: from here on nothing strikes, and what was under way does not."""
        try:
            with self._lock:
                self._runs = False
                if not self._struck:
                    return
                # Not taken back (with NULL): CPython would go on looking for it for ever, at every step.
                _raise_in(self._thread, _Absorbed)
            while True:  # it comes at the next step
                pass
        except _Absorbed:
            return


def _raise_in(thread: int, error: type[BaseException]) -> bool:
    """Whether this Python can; where it cannot a function ends by itself."""
    if sys.implementation.name != "cpython":
        return False
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error)))


def _run_call(body: str, allowed: Allowed, started: Started) -> str | None:
    """Call a function: what it returns, as JSON."""
    try:
        wanted = json.loads(body)
        name, given, named = wanted["function"], wanted["args"], wanted["kwargs"]
    except (ValueError, RecursionError, LookupError, TypeError) as exc:
        raise TaskFailed(f"This is no call as sqlsem keeps it: {type(exc).__name__}: {exc}") from exc
    function, interruption = allowed.find(name), _Interruption()
    try:
        try:
            started(interruption.strike)
            result = function(*given, **named)
        finally:
            interruption.over()
    except TaskInterrupted:
        interruption.over()  # that itself may have been struck; it is not, twice in a row
        raise
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigurationError(f"{name} is a coroutine function; a worker calls plain functions")
    return None if result is None else as_json(result)
