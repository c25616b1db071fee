"""``sqlsem rounds``."""

from __future__ import annotations

import re
import sys

import click

from sqlsem import rounds
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing
from sqlsem.cli.here import folders_to_import_from, require_own_database, same_database
from sqlsem.cli.options import json_option, most_option, name_of, pass_url_option, shared_option
from sqlsem.errors import ConfigurationError, RoundFailed
from sqlsem.printable import clean
from sqlsem.terminal import output
from sqlsem.terminal.rounds import render_rounds

__all__ = ["rounds_"]

#: Rounds that ``rounds resume`` looks through when it is not told which.
MOST_RESUMED = 1000
_round_name = name_of("The round's name")


@click.group("rounds", cls=Listing, invoke_without_command=True, short_help="Show rounds and their parts; resume.")
@click.argument("name", required=False, type=_round_name)
@click.option("--name", "also", type=_round_name, metavar="NAME", help="The name, should it be that of a command.")
@most_option(20)
@json_option
@connecting
def rounds_(options: Connecting, name: str | None, also: str | None, most: int, as_json: bool) -> None:
    """Show rounds, the newest first: their parts, how long each took, and what became of the continuation.

    A part is expected, running, succeeded or failed; the one that was last is marked. A round is open, succeeded,
    failed (a part has), expired (not done within its window) or abandoned.

    \b
    Examples:
      sqlsem rounds
      sqlsem rounds nightly --most 1 --json
      sqlsem rounds resume nightly
    """
    if name is not None and also is not None:
        raise click.UsageError("Name the round once.")
    name = name or also
    with options.coordinator(looks=True) as coordinator:
        found = rounds.list_rounds(coordinator, name, most)
    if as_json:
        output.print_json([one.as_dict() for one in found])
        return
    console = output.console()
    output.show(console, render_rounds(found, console.width, name))


@rounds_.command("resume", short_help="Run what a round's dead process left undone.")
@click.argument("which", required=False, metavar="[NAME|ID]")
@click.option("--name", type=_round_name, metavar="NAME", help="The name, should it be a number.")
@shared_option
@pass_url_option
@connecting
def rounds_resume(options: Connecting, which: str | None, name: str | None, shared: bool, pass_url: bool) -> int:
    """Run the continuation of a round whose process died before its end; of the round with that number also one that
    has failed. Left out which: of all rounds.

    It runs here: SQL on the database, commands and Python functions on this host, where functions are imported from the
    current folder too, if they are nowhere else. One that only its own program knows (a lambda, a session's code) is
    resumed by that.

    \b
    Examples:
      sqlsem rounds resume
      sqlsem rounds resume nightly
      sqlsem rounds resume 42

    \b
    Exit codes: 0 done, or nothing was left to do; 1 it failed; 78 there is
      no such round, its continuation is not kept, or others can write the
      SQLite file.
    """
    if which is not None and name is not None:
        raise click.UsageError("Say which round once.")
    with options.coordinator() as coordinator, same_database(options, pass_url):
        require_own_database(coordinator, shared)
        coordinator.resources()  # the driver is there before anything can be imported from here
        sys.path.extend(one for one in folders_to_import_from() if one not in sys.path)
        wanted: list[int | str]
        if which is not None:
            wanted = [int(which) if re.fullmatch(r"[0-9]{1,18}", which) else _round_name(which)]
        elif name is not None:
            wanted = [name]
        else:
            found = rounds.list_rounds(coordinator, None, MOST_RESUMED)
            wanted = list(dict.fromkeys(one.name for one in found if one.then_status in ("pending", "running")))
        count, code = 0, 0
        for one in wanted:
            try:
                while rounds.resume(coordinator, one):
                    count += 1
                    output.echo(f"Done: the continuation of round {clean(repr(one))}.")
                    if isinstance(one, int):
                        break
            except RoundFailed as exc:
                output.print_error(exc)
                code = 1
            except ConfigurationError as exc:
                if which is not None or name is not None:
                    raise
                output.print_error(exc)  # the others shall not suffer for it
                code = 1
        if not count and not code:
            output.echo("Nothing was left to do.")
    return code
