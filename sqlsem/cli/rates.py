"""The command that shows rates: ``sqlsem rates``."""

from __future__ import annotations

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.options import json_option, name_of
from sqlsem.terminal import output
from sqlsem.terminal.rates import render_rates

__all__ = ["rates"]


@click.command(short_help="Show rates: what is used of each window, and how many wait.")
@click.argument("name", required=False, type=name_of("The rate's name"))
@json_option
@connecting
def rates(options: Connecting, name: str | None, as_json: bool) -> None:
    """Show rates, or one: each window, how much may be used in it and how much is just now, and how many wait in line.

    LIMIT is what a program declared last. USED may be more than that after a cost was settled, and has in it what is
    promised for soon. ROOM IN says when there is room for 1 more, where there is none now, which who waits in line has
    first. LAST says how long ago anything was used. Who waits, and until when: sqlsem why rate:NAME.

    \b
    Examples:
      sqlsem rates
      sqlsem rates api --json | jq '.[0].used'
    """
    with options.coordinator(looks=True) as coordinator:
        found = coordinator.rates(name)
        waiting = {resource: len(coordinator.entries(resource)) for resource in {one.resource for one in found}}
    if as_json:
        output.print_json([{**one.as_dict(), "waiting": waiting[one.resource]} for one in found])
    else:
        console = output.console()
        output.show(console, render_rates(found, waiting, console.width, name))
