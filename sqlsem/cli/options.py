"""Values on the command line, and the options that several commands have."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import click

from sqlsem import model
from sqlsem.errors import ConfigurationError

__all__ = [
    "age",
    "duration",
    "json_option",
    "limited",
    "most_option",
    "name_of",
    "often",
    "pass_url_option",
    "refusing",
    "resource_name",
    "staged",
    "whole_number",
]

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
#: The least time between two looks at the database, seconds.
LEAST_SECONDS = 0.1


def refusing(convert: Callable[P, T]) -> Callable[P, T]:
    """What a function refuses by a `ConfigurationError` is wrong usage."""

    @functools.wraps(convert)
    def converted(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return convert(*args, **kwargs)
        except ConfigurationError as exc:
            raise click.BadParameter(str(exc)) from exc

    return converted


@refusing
def duration(value: str) -> float:
    """Seconds, or numbers with units: ``90``, ``1.5s``, ``5m``, ``2h``, ``1d``, ``1h30m``."""
    return model.check_duration("A duration", value)


@refusing
def age(value: str) -> float:
    """So long ago: a duration that may be of months."""
    return model.check_duration("An age", value, most=model.MAX_INT)


def often(value: str) -> float:
    """A duration between two looks."""
    seconds = duration(value)
    if seconds < LEAST_SECONDS:
        raise click.BadParameter(f"{value!r} is too often for the database; at least {LEAST_SECONDS}")
    return seconds


def name_of(what: str) -> Callable[[str], str]:
    """A type of parameter: the name of something. ``what`` begins the message that refuses it."""
    return refusing(functools.partial(model.check_name, what))


resource_name = name_of("The resource name")


def whole_number(least: int, what: str) -> Callable[[str], int]:
    """A whole number that a database can keep. (IntRange would tell the whole range in the help.)"""

    def check(value: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,10}", value) or not least <= int(value) <= model.MAX_INT:
            raise click.BadParameter(f"{value!r} is not {what}")
        return int(value)

    return check


def limited(value: str) -> tuple[str, int, int]:
    """``NAME=LIMIT``, ``NAME=LIMIT:WEIGHT``."""
    match = re.fullmatch(r"(.+)=(\d+)(?::(\d+))?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not NAME=LIMIT or NAME=LIMIT:WEIGHT")
    return match[1], int(match[2]), int(match[3] or 1)


def staged(value: str) -> tuple[str, int]:
    """``NAME=ORDER``."""
    match = re.fullmatch(r"(.+)=(-?\d+)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not NAME=ORDER")
    return match[1], int(match[2])


def most_option(default: int) -> Callable[[F], F]:
    """The option for how many lines to list."""
    return click.option(
        "-n",
        "--most",
        type=click.IntRange(1, 100_000),
        default=default,
        show_default=True,
        metavar="N",
        help="So many at the most.",
    )


json_option = click.option("--json", "as_json", is_flag=True, help="JSON for programs.")
pass_url_option = click.option(
    "--pass-url",
    is_flag=True,
    help="Hand the database's URL on in $SQLSEM_URL, though there is a password in it. (Else what is started does not "
    "find it, and is told so when it asks sqlsem for a lock.)",
)
