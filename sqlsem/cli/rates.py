"""``sqlsem rates``: shows rates, and sets or resets them."""

from __future__ import annotations

import re

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing
from sqlsem.cli.options import duration, json_option, name_of, one_name
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.rates import render_rates
from sqlsem.util.printable import clean

__all__ = ["rates"]

_rate_name = name_of("The rate's name")


@click.group(
    "rates", cls=Listing, invoke_without_command=True, short_help="Show rates: what is used of each window; set, reset."
)
@one_name("name", _rate_name, "rate", "The name, should it be that of a command.")
@json_option
@connecting
def rates(options: Connecting, name: str | None, as_json: bool) -> None:
    """Show rates, or one: each window, its limit, how much of it is used now, and the number of waiters.

    LIMIT is the lowest limit: of the programs that use the rate, and of an operator (`sqlsem rates set`). USED includes
    reservations for soon, and may exceed LIMIT after a cost was adjusted. ROOM IN is the time until 1 more may be used,
    if none may now; waiters come first. LAST is the time since the last use. For the waiters see: sqlsem why rate:NAME.

    \b
    Examples:
      sqlsem rates
      sqlsem rates api --json | jq '.[0].used'
      sqlsem rates set api 100 --per 1m
      sqlsem rates reset api
    """
    with options.coordinator(must_exist=True) as coordinator:
        windows = coordinator.admin.rates(name)
        waiting = {
            resource: len(coordinator.admin.entries(resource)) for resource in {rate.resource for rate in windows}
        }
    plain = [{**rate.as_dict(), "waiting": waiting[rate.resource]} for rate in windows]
    output.show_or_json(as_json, plain, lambda width: render_rates(windows, waiting, width, name))


@rates.command("set", short_help="Set the limit of a rate, whatever programs declare.")
@click.argument("name", type=_rate_name)
@click.argument("limit", metavar="LIMIT|none")
@click.option("--per", required=True, type=duration, metavar="TIME", help="In any stretch of time of this length.")
@connecting
def rates_set(options: Connecting, name: str, limit: str, per: float) -> None:
    """Set the limit of a rate in a window of time, for all processes together.

    Programs that declare a higher limit get this one, and so do programs that declare none (sqlsem run --rate NAME).
    Several windows may be set, one after the other. none lifts the limit of that window. The limit counts at once, also
    for earlier use.

    \b
    Examples:
      sqlsem rates set api 100 --per 1m
      sqlsem rates set api none --per 1m
    """
    if limit != "none" and not re.fullmatch(r"[0-9]{1,10}", limit):
        raise click.BadParameter(f"{limit!r} is no whole number, and not none", param_hint="LIMIT")
    with options.coordinator(must_exist=True) as coordinator:
        coordinator.admin.set_rate(name, None if limit == "none" else int(limit), per)
        capped = sorted(
            (rate for rate in coordinator.admin.rates(name) if rate.cap is not None), key=lambda rate: rate.window
        )
    limits = ", ".join(f"{window.cap:,} in {window.window:g} s" for window in capped) or "no limit of an operator's"
    output.echo(f"Rate {clean(name)}: {limits}.")


@rates.command("reset", short_help="Forget the use and debts of a rate.")
@click.argument("name", type=_rate_name)
@connecting
def rates_reset(options: Connecting, name: str) -> int:
    """Reset a rate: delete its use, its debts, and the limits that programs have declared.

    Waiting requests are granted at once, up to the whole limit, so use in the current window may exceed the limit.
    Limits that an operator has set stay.

    \b
    Example:
      sqlsem rates reset api

    \b
    Exit codes: 0 done, 1 nothing is known of that rate.
    """
    with options.coordinator(must_exist=True) as coordinator:
        known = coordinator.admin.reset_rate(name)
    output.echo(f"Rate {clean(name)} begins anew." if known else f"Nothing is known of a rate {clean(name)}.")
    return 0 if known else 1
