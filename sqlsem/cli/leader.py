"""``sqlsem leader``: shows the leaders, and makes one step down."""

from __future__ import annotations

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing
from sqlsem.cli.options import json_option, name_of, one_name
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.lists import describe_leader, render_leaders
from sqlsem.util.printable import clean

__all__ = ["leader"]

_leader_name = name_of("The leader's name", "leader")


@click.group("leader", cls=Listing, invoke_without_command=True, short_help="Show the leaders; step-down.")
@one_name("name", _leader_name, "leader", "The name, should it be that of a command.")
@json_option
@connecting
def leader(options: Connecting, name: str | None, as_json: bool) -> None:
    """Show the present leader of each name, or of one: its process, since when it leads, and how many candidates wait.

    A leader is the holder of a mutex, so the list has the holders of all mutexes. INFO is the text that the leader has
    published (sqlsem run --leader NAME --note TEXT).

    \b
    Examples:
      sqlsem leader ls
      sqlsem leader ls scheduler --json | jq -r '.[].info'
      sqlsem leader step-down scheduler
    """
    with options.coordinator(must_exist=True) as coordinator:
        leaders = coordinator.admin.leaders(name)
    plain = [entry.as_dict() for entry in leaders]
    output.show_or_json(as_json, plain, lambda width: render_leaders(leaders, width, name))


@leader.command("step-down", short_help="Ask the present leader to end its term.")
@click.argument("name", type=_leader_name)
@connecting
def leader_step_down(options: Connecting, name: str) -> None:
    """Ask the present leader to end its term, so that the next candidate leads. For operators.

    The leader's row is revoked, as by `sqlsem revoke`: a live leader is notified, and has its grace to stop. Then it
    is a candidate again, behind those that wait, if its program takes part again (sqlsem run --leader does).

    \b
    Example:
      sqlsem leader step-down scheduler

    \b
    Exit codes: 0 the leader is notified, or gone; 1 there is no leader.
    """
    with options.coordinator(must_exist=True) as coordinator:
        leaders = coordinator.admin.leaders(name)
        # (The leader that is named is the one whose term ends, even if another leads by now.)
        gone = coordinator.admin.revoke(leaders[0].fence) if leaders else coordinator.admin.step_down(name)
    who = describe_leader(leaders[0]) if leaders else "The leader"
    if gone:
        output.echo(clean(f"{who} leads {name} no more."))
    else:
        output.echo(clean(f"{who} was notified, and has its grace to stop. Then the next candidate may lead {name}."))
