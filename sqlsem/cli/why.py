"""The command that tells why somebody waits: ``sqlsem why``."""

from __future__ import annotations

import re
from typing import Any

import click

import sqlsem
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.kept import kept_lines
from sqlsem.cli.options import json_option, most_option
from sqlsem.errors import ConfigurationError
from sqlsem.insight.chains import WaitGraph
from sqlsem.insight.overview import Overview
from sqlsem.insight.rates import rate_words, seconds_until_granted, used_words
from sqlsem.insight.reasons import reasons, task_reasons
from sqlsem.insight.task_estimates import MAX_ENDED
from sqlsem.model import TaskEntry
from sqlsem.names import RATE_PREFIX
from sqlsem.printable import clean
from sqlsem.terminal import output
from sqlsem.terminal.why import entry_as_dict, task_as_dict, told_of_entry, told_of_task

__all__ = ["why"]

#: Open tasks among which is looked for what holds one up.
MOST_TASKS = 10_000
#: Their states.
OPEN = ("pending", "running", "lost", "failed")


@click.command(short_help="Tell why somebody waits, behind whom, and until when.")
@click.argument("what", metavar="POSITION|RESOURCE|TASK")
@click.option("--task", "is_task", is_flag=True, help="It is the number of a task, or the name of a work queue.")
@most_option(20)
@json_option
@connecting
def why(options: Connecting, what: str, is_task: bool, most: int, as_json: bool) -> int:
    """Tell why a request waits: the rule that holds it back, behind whom and for how long these have held it, who those
    wait for in turn, up to the one at the head, and when it will go in.

    A number is a position (see `sqlsem ls`) or, if there is none such, a task; --task: only a task. A name is a
    resource or, if nobody is there, a work queue; then all of it is told, in the order of the queue.

    The time is a range, from how long such locks were held of late: of ten such ranges about eight hold the truth.
    Where fewer than five holds are known, or the resource is paused, none is told. Of a task it is from how long such
    tasks took, and from who works on the queue now.

    \b
    Examples:
      sqlsem why 4711
      sqlsem why etl
      sqlsem why --task 17
      sqlsem why etl --json | jq '.[].why.enters.likely'

    \b
    Exit codes: 0 told, 1 there is no such request, task or queue, nor a session
    that keeps a lock.
    """
    with options.coordinator(looks=True) as coordinator:
        found = coordinator.admin.overview()
        lines, plain = ([], []) if is_task else _requests(coordinator, found, what, most)
        if not plain:
            lines, plain = _tasks(coordinator, found, what, most)
        if not plain and not is_task and what.startswith(RATE_PREFIX):
            lines, plain = _rate(coordinator, what.removeprefix(RATE_PREFIX))
        kept = _kept(coordinator, found, what)
    for line in kept:
        output.say(line)
    if as_json:
        output.print_json(plain)
    elif plain:
        output.echo(*map(clean, lines))
    elif not kept:
        kinds = "task or work queue" if is_task else "position, resource or task"
        output.echo(f"There is no such {kinds}: {clean(what)}")
    return 0 if plain or kept else 1


def _kept(coordinator: sqlsem.Coordinator, found: Overview, what: str) -> list[str]:
    """Lines about locks inside the database that are kept, and may hold it up."""
    entries = [entry for entry in found.entries if what in (entry.resource, str(entry.position))]
    resource = entries[0].resource if entries else what
    return kept_lines(coordinator, resource, pins=any(entry.state != "waits" for entry in entries))


def _requests(
    coordinator: sqlsem.Coordinator, found: Overview, what: str, most: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """A request by its position, or all of a resource."""
    position = int(what) if re.fullmatch("[0-9]{1,18}", what) else None
    entries = [entry for entry in found.entries if entry.position == position]
    if not entries:
        entries = [entry for entry in found.entries if entry.resource == what]
    waits = WaitGraph(found)
    told = reasons(found, only=position if len(entries) == 1 else None, waits=waits)
    lines: list[str] = []
    plain: list[dict[str, Any]] = []
    resources = {entry.resource for entry in entries[:most] if entry.resource.startswith(RATE_PREFIX)}
    rates = {name: coordinator.admin.rates(name.removeprefix(RATE_PREFIX)) for name in resources}
    for entry in entries[:most]:
        chain, reason = waits.chain(entry.position), told.get(entry.position)
        behind = [other.entry for number, other in waits.blocked.items() if waits.head(number) == entry]
        lines += told_of_entry(entry, reason, chain, behind)
        plain.append(entry_as_dict(entry, reason, chain))
        if rates.get(entry.resource):  # nobody holds it: the first one waits, too
            before = sum(row.resource == entry.resource and row.position < entry.position for row in found.entries)
            lines.append(f"  {rate_words(before, rates[entry.resource])}")
            plain[-1]["rate"] = {
                "windows": [window.as_dict() for window in rates[entry.resource]],
                "goes_in": seconds_until_granted(before, rates[entry.resource]),
            }
    if len(entries) > most:
        lines.append(f"There are {len(entries) - most} more; see them with --max.")
    return lines, plain


def _rate(coordinator: sqlsem.Coordinator, name: str) -> tuple[list[str], list[dict[str, Any]]]:
    """A rate for which nobody waits now."""
    windows = coordinator.admin.rates(name)
    lines = [f"Nobody waits for the rate {name!r}: {used_words(windows)}"] if windows else []
    return lines, [{"rate": {"windows": [window.as_dict() for window in windows]}}] if windows else []


def _tasks(
    coordinator: sqlsem.Coordinator, found: Overview, what: str, most: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """A task by its number, or the open ones of a work queue."""
    number = int(what) if re.fullmatch("[0-9]{1,18}", what) else None
    queues = [one.queue for one in found.queues]
    opened: list[TaskEntry] = []
    for queue in [what] if what in queues else queues if number is not None else []:
        try:
            some = coordinator.admin.tasks(queue, most=MOST_TASKS)
            opened += some
            if len(some) == MOST_TASKS:  # what has ended comes behind them
                opened += coordinator.admin.tasks(queue, "finished", most=MAX_ENDED)
        except ConfigurationError:  # this login may not look at tasks
            return [], []
    asked = [one for one in opened if one.task_id == number] if number is not None else []
    asked = asked or [one for one in opened if one.queue == what and one.status in OPEN]
    names = dict.fromkeys(one.queue for one in asked)
    limits = [limit for queue in names for limit in coordinator.admin.queue_limits(queue)]
    waits = [wait for queue in names for wait in coordinator.admin.queue_waits(queue)]
    requests = reasons(found) if any(one.parked for one in asked) else None
    told = task_reasons({one.task_id: one for one in opened}.values(), found.taken_at, limits, requests, waits)
    lines = [line for one in asked[:most] for line in told_of_task(one, told.get(one.task_id))]
    return lines, [task_as_dict(one, told.get(one.task_id)) for one in asked[:most]]
