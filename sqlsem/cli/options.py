"""Conversions of values on the command line, and options of several commands."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import click
from click.shell_completion import CompletionItem

import sqlsem
from sqlsem.values import locks
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.rates import RateRequest, Window, windows_of

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic in earlier versions

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
#: The least interval of polling the database, in seconds.
MIN_INTERVAL_SECONDS = 0.1


def refusing(convert: Callable[P, T]) -> Callable[P, T]:
    """Make a conversion raise `click.BadParameter` in place of `ConfigurationError`."""

    @functools.wraps(convert)
    def converted(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return convert(*args, **kwargs)
        except ConfigurationError as exc:
            raise click.BadParameter(str(exc)) from exc

    return converted


@refusing
def duration(value: str) -> float:
    """Convert seconds, or numbers with units: ``90``, ``1.5s``, ``5m``, ``2h``, ``1d``, ``1h30m``."""
    return locks.check_duration("A duration", value)


@refusing
def age(value: str) -> float:
    """Convert an age (``24h``; it may be months), or a time by this host's clock, to seconds before now: ``02:00`` (the
    last one), ``2026-01-31``, ``2026-01-31 02:00``, also with a zone (``2026-01-31T02:00+01:00``).
    """
    if re.match(r"\d{1,2}:\d|\d{4}-\d", value) is None:
        return locks.check_duration("An age", value, maximum=locks.MAX_INT)
    now = datetime.now().astimezone()
    try:
        if ":" in value[:3]:
            moment = datetime.combine(now.date(), time.fromisoformat(value.zfill(5))).astimezone()
            if moment > now:
                moment = datetime.combine(now.date() - timedelta(days=1), moment.time()).astimezone()
        else:
            moment = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", value)).astimezone()
    except (ValueError, OverflowError, OSError) as exc:
        raise click.BadParameter(
            f"{value!r} is no time; write an age (24h), a time of day (02:00), or a date (2026-01-31, 2026-01-31T02:00)"
        ) from exc
    if moment > now:
        raise click.BadParameter(f"{value!r} is in the future")
    return locks.check_duration("An age", (now - moment).total_seconds(), maximum=locks.MAX_INT)


def often(value: str) -> float:
    """Convert an interval of polling."""
    seconds = duration(value)
    if seconds < MIN_INTERVAL_SECONDS:
        raise click.BadParameter(f"{value!r} is too often for the database; at least {MIN_INTERVAL_SECONDS}")
    return seconds


class Named(ParamType):
    """A parameter type by a conversion. Its values begin with the name of a ``kind`` of object: shells complete it."""

    def __init__(self, convert: Callable[[str], Any], kind: str) -> None:
        self.name = kind
        self._convert = convert

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a value."""
        return self._convert(value) if isinstance(value, str) else value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with the incomplete word; of a command that lists, also its subcommands."""
        from sqlsem.cli import completion  # only shells need it

        names = completion.names(ctx, self.name, incomplete)
        if isinstance(ctx.command, click.Group) and isinstance(param, click.Argument):
            subcommands = ctx.command.list_commands(ctx)
            names += [CompletionItem(name) for name in subcommands if name.startswith(incomplete)]
        return names


def name_of(what: str, kind: str = "") -> Callable[[str], Any]:
    """Return a parameter type for names. ``what`` begins the error message; shells complete names of a ``kind``."""
    check = refusing(functools.partial(locks.check_name, what))
    return Named(check, kind) if kind else check


resource_name = name_of("The resource name", "resource")


def names_of(what: str) -> Callable[[str], list[str]]:
    """Return a parameter type for several names, with commas between them."""
    check = name_of(what)
    return lambda value: [check(name.strip()) for name in value.split(",")]


def whole_number(minimum: int, what: str) -> Callable[[str], int]:
    """Return a parameter type for whole numbers that a database can store. (IntRange would print its range in help.)"""

    def check(value: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,10}", value) or not minimum <= int(value) <= locks.MAX_INT:
            raise click.BadParameter(f"{value!r} is not {what}")
        return int(value)

    return check


def limited(value: str) -> tuple[str, int | None, int]:
    """Convert ``NAME``, ``NAME=LIMIT``, ``NAME=LIMIT:WEIGHT``, ``NAME=:WEIGHT``; without LIMIT the server's applies."""
    match = re.fullmatch(r"([^=]+)|(.+)=(?=.)(\d+)?(?::(\d+))?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not NAME, NAME=LIMIT, NAME=LIMIT:WEIGHT or NAME=:WEIGHT")
    return match[1] or match[2], int(match[3]) if match[3] else None, int(match[4] or 1)


@refusing
def rate_window(value: str) -> Window:
    """Convert ``LIMIT/WINDOW``."""
    match = re.fullmatch(r"(\d{1,10})/([^/,:=]+)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not N/TIME, such as 100/1m")
    (window,) = windows_of(int(match[1]), match[2])
    return window


@refusing
def rated(value: str) -> RateRequest:
    """Convert ``NAME``, ``NAME=:COST``, ``NAME=LIMIT/WINDOW``, ``NAME=LIMIT/WINDOW,LIMIT/WINDOW``, each of the last two
    also with ``:COST`` at the end. Without LIMIT the operator's windows apply.
    """
    match = re.fullmatch(r"([^=]+)|(.+)=(?=.)(\d+/[^/,:=]+(?:,\d+/[^/,:=]+)*)?(?::(\d+))?", value)
    if match is None:
        raise click.BadParameter(
            f"{value!r} is not NAME, NAME=:COST, NAME=LIMIT/WINDOW or NAME=LIMIT/WINDOW,LIMIT/WINDOW:COST"
        )
    if match[3] is None:
        return RateRequest(match[1] or match[2], (), int(match[4] or 1))
    pairs = [part.split("/") for part in match[3].split(",")]
    windows: dict[locks.Duration, int] = {window: int(limit) for limit, window in pairs}
    return RateRequest(match[2], windows_of(windows, None), int(match[4] or 1))


def staged(value: str) -> tuple[str, int]:
    """Convert ``NAME=ORDER``."""
    match = re.fullmatch(r"(.+)=(-?\d+)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not NAME=ORDER")
    return match[1], int(match[2])


@refusing
def periodic(value: str) -> tuple[str | None, float]:
    """Convert ``DURATION`` or ``NAME=DURATION``."""
    name, equals, per = value.rpartition("=")
    return name if equals else None, locks.check_duration("A period", per, maximum=locks.MAX_INT)


def most_option(
    default: int, help_text: str = "List at most this many.", *, largest: int = 100_000
) -> Callable[[F], F]:
    """Return the option for how many rows to read or list."""
    return click.option(
        "-n",
        "--max",
        "maximum",
        type=click.IntRange(1, largest),
        default=default,
        metavar="N",
        help=help_text,
    )


def one_name(argument: str, convert: Callable[[str], str], kind: str, whose: str) -> Callable[[F], F]:
    """Return the optional argument that names one ``kind`` of object, and an option for names that are subcommands.
    ``whose`` is the help of that option.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def named(*args: Any, also: str | None, **given: Any) -> Any:
            if given[argument] is not None and also is not None:
                raise click.UsageError(f"Name the {kind} once.")
            return command(*args, **{**given, argument: given[argument] or also})

        option = click.option(f"--{argument}", "also", type=convert, metavar=argument.upper(), help=whose)
        return click.argument(argument, required=False, type=convert)(option(cast("F", named)))

    return decorate


def setting(name: str, no_help: str, conflict: str, **attributes: Any) -> Callable[[F], F]:
    """Return the option of a setting, and ``--no-…`` for none. The command gets the chosen settings as ``changes``,
    which are values by name; None for none. ``conflict``: the error if both are given.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def changed(*args: Any, changes: Mapping[str, Any] | None = None, **given: Any) -> Any:
            value, none = given.pop(name), given.pop(f"no_{name}")
            if none and value is not None:
                raise click.UsageError(conflict)
            own = {name: value} if none or value is not None else {}
            return command(*args, changes={**(changes or {}), **own}, **given)

        flag = name.replace("_", "-")
        no_option = click.option(f"--no-{flag}", is_flag=True, help=no_help)
        return click.option(f"--{flag}", **attributes)(no_option(cast("F", changed)))

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="JSON for programs.")
allow_new_option = click.option("--allow-new", is_flag=True, help="Accept a name that has not been used before.")
pass_url_option = click.option(
    "--pass-url",
    is_flag=True,
    help="Pass the database's URL on in $SQLSEM_URL, even if it contains a password. (Otherwise a command that uses "
    "sqlsem gets an error that says so.)",
)
shared_option = click.option(
    "--shared",
    is_flag=True,
    help="Run tasks of an SQLite file that belongs to other users, or that they can write.",
)


def a_lock(text: str) -> sqlsem.Lock:
    """Convert ``KIND:NAME`` to a lock."""
    kind, _, name = text.partition(":")
    try:
        if kind == "limit":
            resource, maximum, weight = limited(name)
            return sqlsem.limit(resource, maximum, weight=weight)
        if kind == "stage":
            return sqlsem.stage(*staged(name))
        plain = {"mutex": sqlsem.mutex, "write": sqlsem.write, "read": sqlsem.read}.get(kind)
        if plain is not None:
            return plain(name)
    except ConfigurationError as exc:
        raise click.BadParameter(str(exc)) from exc
    raise click.BadParameter(
        f"{text!r} is not mutex:NAME, write:NAME, read:NAME, limit:NAME[=LIMIT] or stage:NAME=ORDER"
    )
