"""``sqlsem rates``: shows rates, and sets or resets them."""

from __future__ import annotations

from collections.abc import Sequence

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing
from sqlsem.cli.options import json_option, name_of, one_name, rate_window
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.lists import render_rates
from sqlsem.util.printable import clean
from sqlsem.values.locks import Duration
from sqlsem.values.rates import Window

__all__ = ["rates"]

_rate_name = name_of("The rate's name", "rate")


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
      sqlsem rates set api 100/1m
      sqlsem rates reset api
    """
    with options.coordinator(must_exist=True) as coordinator:
        windows = coordinator.admin.rates(name)
        waiting = {
            resource: len(coordinator.admin.entries(resource)) for resource in {rate.resource for rate in windows}
        }
    plain = [{**rate.as_dict(), "waiting": waiting[rate.resource]} for rate in windows]
    output.show_or_json(as_json, plain, lambda width: render_rates(windows, waiting, width, name))


@rates.command("set", short_help="Set the limits of a rate, whatever programs declare.")
@click.argument("name", type=_rate_name)
@click.argument("windows", metavar="[LIMIT/TIME]...", nargs=-1, type=rate_window)
@click.option("--clear", is_flag=True, help="Remove the limits of operators that are not named here.")
@connecting
def rates_set(options: Connecting, name: str, windows: Sequence[Window], clear: bool) -> None:
    """Set limits of a rate: at most LIMIT in any stretch of TIME, for all processes together.

    Programs that declare a higher limit get this one, and so do programs that declare none (sqlsem run --rate NAME). A
    limit counts at once, also for earlier use. Limits in other windows stay, unless --clear removes them.

    \b
    Examples:
      sqlsem rates set api 100/1m
      sqlsem rates set api 10/1s 1000/1h
      sqlsem rates set api --clear
    """
    if not windows and not clear:
        raise click.UsageError("Say which limits, as in 100/1m, or --clear.")
    limits: dict[Duration, int] = {window.ms / 1000: window.limit for window in windows}
    with options.coordinator(must_exist=True) as coordinator:
        admin = coordinator.admin
        if limits:
            admin.set_rate(name, limits)
        if clear:
            for rate in admin.rates(name):
                if rate.cap is not None and rate.window not in limits:
                    admin.set_rate(name, None, rate.window)
        capped = sorted((rate for rate in admin.rates(name) if rate.cap is not None), key=lambda rate: rate.window)
    words = ", ".join(f"{window.cap:,} in {window.window:g} s" for window in capped) or "no limit of an operator's"
    output.echo(f"Rate {clean(name)}: {words}.")


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
