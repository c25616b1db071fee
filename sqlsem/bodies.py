"""What a task is made of: SQL, a command, a call or a JSON value; how it is kept as text, and how it is carried out."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import IO, TYPE_CHECKING, Any

from sqlsem.errors import ConfigurationError, SqlsemError, TaskFailed
from sqlsem.printable import clean, clean_json

if TYPE_CHECKING:
    from sqlsem.core.process import Process

__all__ = [
    "PATIENCE",
    "Allowed",
    "Call",
    "Shell",
    "Sql",
    "Stop",
    "arguments",
    "as_json",
    "encode",
    "find",
    "run",
    "told",
]

#: What is kept of an error or of a command's output, characters.
MOST_KEPT = 8000
#: Seconds that a command gets to end after it was told to.
PATIENCE = 5.0
#: Seconds for what is left of a command's output when it has ended.
LAST_WORDS = 1.0


@dataclass(frozen=True, slots=True)
class Sql:
    """A task that is SQL text, run on the worker's database in one transaction (or those that the text begins)."""

    text: str


@dataclass(frozen=True, slots=True)
class Shell:
    """A task that is a command of the worker's host; it fails when its exit status is not 0.

    A text is for the shell of that host. A list, of the program and its arguments, is run without any shell: nothing
    in it is quoted, or taken for more than it is, on any system.

    >>> Shell(["./report.sh", "--all", "a & b"]).command
    ('./report.sh', '--all', 'a & b')
    """

    command: str | Sequence[str]

    def __post_init__(self) -> None:
        if not isinstance(self.command, str):
            object.__setattr__(self, "command", tuple(self.command))


@dataclass(frozen=True, init=False)
class Call:
    """A task that calls a function: its name and the arguments are kept, so it must be importable, and they JSON.

    >>> Call("shutil:rmtree", "/tmp/old", ignore_errors=True).function
    'shutil:rmtree'
    """

    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __init__(self, function: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "function", function if isinstance(function, str) else _name_of(function))
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)
        if not all(part.isidentifier() for part in self.function.replace(":", ".", 1).split(".")) or (
            ":" not in self.function
        ):
            raise ConfigurationError(f"A function is named as package.module:function, not {self.function!r}")


def _name_of(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or "<" in name or module == "__main__":
        raise ConfigurationError(
            f"{function!r} cannot be found by a worker, which imports it by name; use a function (no lambda, none "
            f"defined inside another) of a module that workers can import"
        )
    if find(f"{module}:{name}") is not function:
        raise ConfigurationError(
            f"{module}:{name} is another function than the one that was given; name it by a string"
        )
    return f"{module}:{name}"


def arguments(text: str) -> list[str] | None:
    """The program and its arguments, when a command is kept as these; None when it is a text for the shell.

    As these it is a JSON list of texts, which no shell takes for a command that there could be.
    """
    if text.startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if isinstance(found, list) and found and all(isinstance(part, str) for part in found):
            return found
    return None


def find(name: str) -> Any:
    """The object that ``package.module:function`` names."""
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise ConfigurationError(f"There is no function {name} here: {exc}") from exc
    return found


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
        """As `find`, within the modules allowed: not what these have imported from others."""
        module = name.partition(":")[0]
        if not self._has(module):
            self._refuse(name)
        for path in self.paths:
            # Not before the first call, lest anything else be found there; nor before what is installed.
            if path not in sys.path:
                sys.path.append(path)
        found = find(name)
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


def encode(body: Any) -> tuple[str, str]:
    """The kind of a body, and its text as it is kept. Raises `ConfigurationError` for what cannot be kept."""
    if isinstance(body, Sql | Shell):
        text: Any
        kind, text = ("sql", body.text) if isinstance(body, Sql) else ("shell", body.command)
        if isinstance(text, tuple):
            if not text or not all(isinstance(part, str) and "\0" not in part for part in text) or not text[0].strip():
                raise ConfigurationError(f"A command is a program and its arguments, all of them texts, not {text!r}")
            text = json.dumps(text, ensure_ascii=False)
        if not isinstance(text, str) or not text.strip():
            raise ConfigurationError(f"The text of a task is empty: {body!r}")
    else:
        if callable(body) and not isinstance(body, Call):
            body = Call(body)
        kind = "json"
        if isinstance(body, Call):
            kind, body = "call", {"function": body.function, "args": body.args, "kwargs": body.kwargs}
        try:
            text = json.dumps(body, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as exc:
            raise ConfigurationError(f"This cannot be kept as JSON: {exc}; put what it is made of") from exc
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError("The text of a task holds half a surrogate pair and is not valid text") from None
    if "\0" in text:
        raise ConfigurationError("The text of a task contains a NUL character, which databases cannot keep")
    return kind, text


#: How to end what a task does.
Stop = Callable[[], None]


def run(
    kind: str,
    body: str,
    process: Process,
    *,
    started: Callable[[Stop], None] = lambda _: None,
    allowed: Allowed | None = None,
) -> str | None:
    """Carry out a task of any kind but JSON; what came of it, as text. Raises whatever goes wrong.

    ``started`` is given a function that ends a command or SQL from another thread; what it raises ends that, too.
    """
    allowed = allowed or Allowed()
    allowed.require(kind)
    if kind == "sql":
        try:
            return process.execute(body, lambda session: started(session.cancel_running))
        except TaskFailed:
            raise
        except SqlsemError as exc:
            raise TaskFailed(_sql_error(exc)) from exc
    if kind == "shell":
        return _run_command(arguments(body) or body, started)
    if kind == "call":
        try:
            wanted = json.loads(body)
            name, given, named = wanted["function"], wanted["args"], wanted["kwargs"]
        except (ValueError, RecursionError, LookupError, TypeError) as exc:
            raise TaskFailed(f"This is no call as sqlsem keeps it: {type(exc).__name__}: {exc}") from exc
        result = allowed.find(name)(*given, **named)
        if inspect.iscoroutine(result):
            result.close()
            raise ConfigurationError(f"{wanted['function']} is a coroutine function; a worker calls plain functions")
        return None if result is None else as_json(result)
    raise ConfigurationError(f"A worker cannot carry out a task of kind {kind}; claim it with sqlsem.queue(…).claim()")


def as_json(value: Any) -> str:
    """A result as it is kept, whatever it is."""
    try:
        return clean_json(value, indent=None, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return _clean(repr(value)[:MOST_KEPT])


def _clean(text: str) -> str:
    """What any database can keep, and any program that reads it there may show (psql does)."""
    return clean(text.replace("\r\n", "\n"), keep="\n\t")


def told(error: BaseException | str) -> str:
    """An error as the log keeps it: what it says first, then where it happened."""
    if isinstance(error, str):
        words = error
    elif isinstance(error, TaskFailed):
        words = str(error)
    else:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = "".join(traceback.format_tb(error.__traceback__))
        words = f"{summary}\n{trace[-MOST_KEPT + len(summary[:MOST_KEPT]) :]}".rstrip()
    return _clean(words)[:MOST_KEPT]


# -- SQL --------------------------------------------------------------------------------------------------------------


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


# -- commands ---------------------------------------------------------------------------------------------------------


def _run_command(command: str | list[str], started: Callable[[Stop], None]) -> str:
    if os.name == "nt" and not isinstance(command, str):
        _require_program(command[0])
    # A session of its own: a Ctrl-C is for the worker, which lets the task end.
    try:
        process = subprocess.Popen(  # noqa: S603 - what the task wants, with a shell or without
            command,
            shell=isinstance(command, str),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=os.name == "posix",
        )
    except OSError as exc:
        what = command if isinstance(command, str) else command[0]
        raise TaskFailed(f"{what[:200]!r} cannot be started: {exc.strerror or exc}") from exc
    ending = threading.Lock()

    def stop() -> None:
        with ending:
            _end(process)

    try:
        started(stop)
        assert process.stdout is not None
        output = _Output(process.stdout)
        status = process.wait()
        with ending:  # what it has started may take longer
            pass
    except BaseException:
        _end(process)
        raise
    words = output.end()
    if status != 0:
        said = words.strip()
        # The cause comes last, and its first line is what people see.
        last = said.rpartition("\n")[2].strip() or "it said nothing"
        raise TaskFailed(f"The command ended with status {status}: {last}" + (f"\n{said}" if "\n" in said else ""))
    return words


def _require_program(name: str) -> None:
    """On Windows, batch files are handed to cmd.exe, which takes arguments for more than they are: ``a & calc``."""
    found = shutil.which(name) or name
    if found.lower().endswith((".bat", ".cmd")):
        raise TaskFailed(
            f"{name!r} is a batch file, whose arguments cmd.exe would read as commands; put it with --shell, quoted "
            f"for cmd.exe"
        )


class _Output:
    """The end of what a command says.

    Read by a thread, as the command may leave behind a service that has the pipe open: the task ends with the command,
    and the service may still write, to nobody.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._kept = b""
        self._reader = threading.Thread(target=self._read, name="sqlsem-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._pipe:
            while chunk := self._pipe.read1(65536):  # type: ignore[attr-defined]
                self._kept = (self._kept + chunk)[-4 * MOST_KEPT :]

    def end(self) -> str:
        """What was said by now, when the command has ended."""
        self._reader.join(LAST_WORDS)
        return _clean(self._kept.decode(errors="replace"))[-MOST_KEPT:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command, and what it has started."""
    if process.returncode is not None:
        return  # what it left behind shall stay, and its number may be another's by now
    if os.name == "posix":
        _signal(process, signal.SIGTERM)
        # The shell may be gone before what it runs; of that nothing tells us.
        deadline, pause = monotonic() + PATIENCE, 0.001
        while _signal(process, 0) and monotonic() < deadline:
            process.poll()
            sleep(pause)
            pause = min(2 * pause, 0.05)
        _signal(process, signal.SIGKILL)
    else:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether there was anybody of its group to get the signal."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
