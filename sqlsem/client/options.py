"""The options of the public functions, as types: editors complete them, and mypy finds misspelt ones.

`check_options` finds misspelt ones at run time, and `shows_options` lists all options in the signatures of functions.

A duration is a number of seconds (``5``), a text (``"10s"``, ``"1h30m"``) or a `timedelta`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from sqlsem.values.errors import BatchFailed, ConfigurationError

if TYPE_CHECKING:
    from sqlsem.client.defaults import Coordinated
    from sqlsem.client.held.registry import LostCallback
    from sqlsem.values.locks import Duration

__all__ = [
    "Alarm",
    "AnyLock",
    "BatchOptions",
    "ConnectOptions",
    "GroupOptions",
    "LockOptions",
    "ModuleLockOptions",
    "ModuleRateOptions",
    "PutOptions",
    "QueueOptions",
    "RateOptions",
    "UnknownOption",
    "check_options",
    "shows_options",
]

F = TypeVar("F", bound=Callable[..., Any])

#: Called with the failure of a batch, in the process that detects it.
Alarm = Callable[[BatchFailed], object]


class GroupOptions(TypedDict, total=False):
    """The options of `sqlsem.all_of`."""

    #: How long ``with`` waits before `sqlsem.Timeout`; None for ever.
    timeout: Duration | None
    #: A thread or task that holds the lock may acquire it again.
    reentrant: bool
    #: Called with the grant, from another thread, when the lock is lost.
    on_lost: LostCallback | None
    #: With ``async with``: cancel the task when the lock is lost; its block then ends with `sqlsem.LockLost`.
    cancel_on_lost: bool


class LockOptions(GroupOptions, total=False):
    """The options of a coordinator's functions that make one lock."""

    #: A text for readers of the queue (``sqlsem ls``).
    note: str | None
    #: From 0 to 99; higher ones are granted first. For resources that an operator has set priorities for.
    priority: int | None


class ModuleLockOptions(LockOptions, total=False):
    """The options of the module's functions that make one lock."""

    #: The coordinator of the database; by default that of `sqlsem.configure`.
    coordinator: Coordinated | None


class RateOptions(TypedDict, total=False):
    """The options of `sqlsem.Coordinator.rate`; see `sqlsem.rate`."""

    note: str | None
    timeout: Duration | None


class ModuleRateOptions(RateOptions, total=False):
    """The options of `sqlsem.rate`."""

    coordinator: Coordinated | None


class ConnectOptions(TypedDict, total=False):
    """The options of `sqlsem.connect` and `sqlsem.configure`; see there."""

    grace: Duration
    lease: Duration | None
    retry: Duration
    schema: str
    table: str
    creator: Callable[[], Any] | None


class QueueOptions(TypedDict, total=False):
    """The options of `sqlsem.Coordinator.queue`; see `sqlsem.queue`."""

    on_failure: str


class AnyLock(Protocol):
    """A lock of either API, whose requests are used: `sqlsem.write("customers")`."""

    @property
    def terms(self) -> Any:
        """See `sqlsem.client.operations.terms.Terms`."""


class PutOptions(TypedDict, total=False):
    """The options of `sqlsem.Queue.put`; see `sqlsem.Queue.put_many`."""

    order: int
    after: Duration
    max_attempts: int
    backoff: Duration
    on_failure: str | None
    note: str | None
    time_limit: Duration | None
    unique: str | None
    replace: str | None
    key: str | None
    priority: int
    locks: Iterable[AnyLock]


class BatchOptions(TypedDict, total=False):
    """The options of `sqlsem.Coordinator.batch`; see `sqlsem.batch`."""

    on_success: Any
    on_failed: Alarm | None


#: Names of options in other libraries, and the option here.
FOREIGN_NAMES = {
    **dict.fromkeys(("retries", "max_retries", "attempts", "tries", "max_tries"), "max_attempts"),
    **dict.fromkeys(("delay", "countdown", "eta", "schedule_in"), "after"),
    **dict.fromkeys(("retry_delay", "retry_backoff"), "backoff"),
    **dict.fromkeys(("timeout", "max_runtime"), "time_limit"),
    **dict.fromkeys(("description", "comment"), "note"),
    **dict.fromkeys(("tenant", "partition", "group"), "key"),
    **dict.fromkeys(("lock", "mutex"), "locks"),
}


#: The default of each option, to show in signatures.
DEFAULTS: dict[str, Any] = {
    **{"reentrant": False, "cancel_on_lost": False},
    **{"grace": 5.0, "retry": 10.0, "schema": "sqlsem", "table": "ProcessControl"},
    **{"order": 0, "after": 0, "max_attempts": 1, "backoff": 1, "locks": ()},
}
#: Defaults that differ between functions, by the class of the options and the name of the option.
OTHER_DEFAULTS = {("PutOptions", "priority"): 0, ("QueueOptions", "on_failure"): "stop"}


class UnknownOption(ConfigurationError, TypeError):
    """A call passed an option that the function does not have."""


def check_options(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UnknownOption` if ``given`` has a name that is not in ``known``. The message suggests the nearest name.

    >>> check_options("limit()", ["timout"], LockOptions.__optional_keys__)
    Traceback (most recent call last):
    sqlsem.client.options.UnknownOption: limit() has no option 'timout'; did you mean 'timeout'?
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            import difflib  # takes longer to load than all of sqlsem

            translated = [option for option in [FOREIGN_NAMES.get(name)] if option in names]
            near = translated or difflib.get_close_matches(name, names, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
            raise UnknownOption(f"{function} has no option {name!r}; {hint}")


def shows_options(options: type[Any]) -> Callable[[F], F]:
    """Return a decorator that makes a function's signature list the keywords of its ``**options``, with their defaults.

    Editors and ``help`` read that signature. The decorator does not change the function otherwise.

    >>> inspect.signature(sqlsem.mutex).parameters["timeout"].default is None  # doctest: +SKIP
    True
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=OTHER_DEFAULTS.get((options.__name__, name), DEFAULTS.get(name)),
                annotation=getattr(annotation, "__forward_arg__", annotation),
            )
            for name, annotation in options.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
        return function

    return decorate
