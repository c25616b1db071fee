"""``sqlsem once``: shows what runs once per period, and lets it run again."""

from __future__ import annotations

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing
from sqlsem.cli.options import Named, json_option, one_name, refusing
from sqlsem.client.once import once_name
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.lists import render_runs
from sqlsem.util.printable import clean

__all__ = ["once"]

_once_name = Named(refusing(once_name), "job")


@click.group("once", cls=Listing, invoke_without_command=True, short_help="Show what runs once per period; forget.")
@one_name("name", _once_name, "job", "The name, should it be that of a command.")
@json_option
@connecting
def once(options: Connecting, name: str | None, as_json: bool) -> None:
    """Show the last successful run of each job that runs once per period (sqlsem run --once-per), or of one.

    BEGAN decides for which period a run counts. TOOK is how long it took, AGO the time since its end, and LOGIN the
    login that ran it. A job that runs now holds the mutex once:NAME, which `sqlsem ls` shows.

    \b
    Examples:
      sqlsem once ls
      sqlsem once ls report --json
      sqlsem once forget report
    """
    with options.coordinator(must_exist=True) as coordinator:
        runs = coordinator.admin.once_runs(name)
    output.show_or_json(as_json, [run.as_dict() for run in runs], lambda width: render_runs(runs, width, name))


@once.command("forget", short_help="Let a job run again in this period.")
@click.argument("name", type=_once_name)
@connecting
def once_forget(options: Connecting, name: str) -> int:
    """Delete the record of a job's last run, so that it may run again in this period.

    For the login of that run, and for operators.

    \b
    Example:
      sqlsem once forget report

    \b
    Exit codes: 0 done, 1 there is no run of that name.
    """
    with options.coordinator(must_exist=True) as coordinator:
        known = coordinator.admin.forget_once(name)
    words = "may run again in this period." if known else "has no recorded run; see: sqlsem once ls"
    output.echo(f"Job {clean(name)} {words}")
    return 0 if known else 1
