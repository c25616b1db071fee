"""The kinds of bodies, and the text forms in the database of bodies, results and errors. Results and errors are limited
in length, and safe to print anywhere.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlsem.util.printable import clean, clean_json
from sqlsem.util.record import record
from sqlsem.values.errors import ConfigurationError, TaskFailed
from sqlsem.values.tasks import MAX_NESTED

#: How much of an error, or of a command's output, the database keeps.
MAX_KEPT_CHARACTERS = 8000


@record
class Sql:
    """A task that is SQL text. It runs on the worker's database, in one transaction unless the text begins its own."""

    text: str


@record
class Json:
    """A task for programs that claim tasks themselves: any JSON value, also a plain text. (Lists, objects, numbers,
    truth values and None may be put without this class.)
    """

    value: Any


@record
class Shell:
    """A task that is a command of the worker's host; it fails if its exit status is not 0.

    A text is run by the shell of that host. A list of the program and its arguments is run without a shell: no
    quoting is needed, and no argument is interpreted, on any system.

    >>> Shell(["./report.sh", "--all", "a & b"]).command
    ('./report.sh', '--all', 'a & b')
    """

    command: str | Sequence[str]

    def __post_init__(self) -> None:
        if not isinstance(self.command, str):
            if not isinstance(self.command, Iterable):
                raise ConfigurationError(
                    f"A command is text or a list of a program and its arguments, not {type(self.command).__name__}"
                )
            object.__setattr__(self, "command", tuple(self.command))


@dataclass(frozen=True, init=False)
class Call:
    """A task that calls a function. The database keeps its name, so it must be importable; arguments must be JSON.

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
    if import_by_name(f"{module}:{name}") is not function:
        raise ConfigurationError(
            f"{module}:{name} is another function than the one that was given; name it by a string"
        )
    return f"{module}:{name}"


def arguments(text: str) -> list[str] | None:
    """Return the program and its arguments if a command was put as a list; None if it is a text for the shell.

    A list is kept as a JSON list of texts, which is no valid command of any shell.
    """
    if text.startswith("["):
        try:
            command = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if isinstance(command, list) and command and all(isinstance(part, str) for part in command):
            return command
    return None


def import_by_name(name: str) -> Any:
    """Import and return the object that ``package.module:function`` names."""
    module, _, path = name.partition(":")
    try:
        target = sys.modules.get(module)
        if target is None or getattr(getattr(target, "__spec__", None), "_initializing", False):
            target = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as exc:
        raise ConfigurationError(f"There is no function {name} here: {exc}") from exc
    return target


def _nested(text: str) -> int:
    """Return how deep a JSON text is nested, or an upper bound up to `MAX_NESTED`."""
    if (brackets := text.count("[") + text.count("{")) <= MAX_NESTED:
        return brackets
    depth = deepest = 0
    for bracket in re.findall(r"[][{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


_as_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def encode(body: Any) -> tuple[str, str]:
    """Return a body's kind and its text form. Raises `ConfigurationError` if it has none."""
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
        if isinstance(body, str):
            raise ConfigurationError(
                f"A plain text is no task: {body[:100]!r}; put sqlsem.Sql(…) for SQL, sqlsem.Shell(…) for a command, "
                f"sqlsem.Call(…) for a function, or sqlsem.tasks.Json(…) for code that claims for itself"
            )
        if callable(body) and not isinstance(body, Call):
            body = Call(body)
        kind, body = "json", body.value if isinstance(body, Json) else body
        if isinstance(body, Call):
            kind, body = "call", {"function": body.function, "args": body.args, "kwargs": body.kwargs}
        try:
            text = _as_json(body)
        except (TypeError, ValueError, RecursionError) as exc:
            raise ConfigurationError(f"This cannot be kept as JSON: {exc}; put JSON values only") from exc
        if _nested(text) > MAX_NESTED:
            raise ConfigurationError(
                f"The body of a task is nested deeper than {MAX_NESTED}, which not all clients read"
            )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError("The text of a task holds half a surrogate pair and is not valid text") from None
    if "\0" in text:
        raise ConfigurationError("The text of a task contains a NUL character, which databases cannot keep")
    return kind, text


def keepable(text: str) -> str:
    """Return a text without characters that a database cannot store, or that are unsafe to print (psql prints them)."""
    return clean(text.replace("\r\n", "\n"), keep="\n\t")


def as_json(value: Any) -> str:
    """Return a result as JSON; if it has no JSON form, its ``repr``."""
    try:
        return clean_json(value, indent=None, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return keepable(repr(value)[:MAX_KEPT_CHARACTERS])


def format_error(error: BaseException | str) -> str:
    """Return an error as text: its message, then the traceback."""
    if isinstance(error, str):
        text = error
    elif isinstance(error, TaskFailed):
        text = str(error)
    elif not isinstance(error, BaseException):
        raise ConfigurationError(f"An error is an exception or text, not {type(error).__name__}")
    else:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = "".join(traceback.format_tb(error.__traceback__))
        text = f"{summary}\n{trace[-MAX_KEPT_CHARACTERS + len(summary[:MAX_KEPT_CHARACTERS]) :]}".rstrip()
    return keepable(text)[:MAX_KEPT_CHARACTERS]
