"""The command that explains why a request or task waits: ``sqlsem why``."""

from __future__ import annotations

import re
from typing import Any

import click

import sqlsem
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.known import kept_lines
from sqlsem.cli.options import Named, json_option, most_option
from sqlsem.insight.chains import WaitGraph
from sqlsem.insight.overview import Overview
from sqlsem.insight.rates import rate_words, seconds_until_granted, used_words
from sqlsem.insight.reasons import reasons, task_reasons
from sqlsem.insight.task_estimates import MAX_ENDED
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.why import entry_as_dict, explain_entry, explain_task, task_as_dict
from sqlsem.util.printable import clean
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.names import RATE_PREFIX
from sqlsem.values.tasks import TaskEntry

#: How many open tasks are read, to find the tasks that block another one.
MAX_TASKS = 10_000
#: The states of open tasks.
OPEN = ("pending", "running", "lost", "failed")


@click.command(short_help="Explain why a request or task waits, for whom, and until when.")
@click.argument("what", type=Named(str, "resource"), metavar="POSITION|RESOURCE|TASK")
@click.option("--task", "is_task", is_flag=True, help="It is the number of a task, or the name of a work queue.")
@most_option(20)
@json_option
@connecting
def why(options: Connecting, what: str, is_task: bool, maximum: int, as_json: bool) -> int:
    """Explain why a request waits: the rule that blocks it, its blockers and how long they have held the lock, the
    blockers of these up to the root blocker, and when it will be granted.

    A number is a position (see `sqlsem ls`) or, if there is no such position, a task; --task: only a task. A name is a
    resource or, if it has no requests, a work queue; then all of its requests or tasks are explained, in their order.

    The time is a range, estimated from the last times that such locks were held; about eight of ten ranges are right.
    There is no estimate with fewer than five such times, or if the resource is paused. For a task, the estimate uses
    the durations of such tasks, and the workers that the queue has now.

    \b
    Examples:
      sqlsem why 4711
      sqlsem why etl
      sqlsem why --task 17
      sqlsem why etl --json | jq '.[].why.enters.likely'

    \b
    Exit codes: 0 done, 1 there is no such request, task or queue, nor a session
    that keeps a lock.
    """
    with options.coordinator(must_exist=True) as coordinator:
        overview = coordinator.admin.overview()
        lines, plain = ([], []) if is_task else _requests(coordinator, overview, what, maximum)
        if not plain:
            lines, plain = _tasks(coordinator, overview, what, maximum)
        if not plain and not is_task and what.startswith(RATE_PREFIX):
            lines, plain = _rate(coordinator, what.removeprefix(RATE_PREFIX))
        kept_locks = _kept(coordinator, overview, what)
    for line in kept_locks:
        output.say(line)
    if as_json:
        output.print_json(plain)
    elif plain:
        output.echo(*map(clean, lines))
    elif not kept_locks:
        output.echo(_nothing(what, is_task))
    return 0 if plain or kept_locks else 1


def _number_of(what: str) -> int | None:
    """Return the number of a position or a task, if the argument can be one."""
    return int(what) if re.fullmatch("[0-9]{1,18}", what) else None


def _nothing(what: str, is_task: bool) -> str:
    """Say that there is nothing to explain."""
    if is_task:
        return f"There is no such task, nor a work queue with open tasks: {clean(what)}"
    if _number_of(what) is not None:
        return f"There is no such position or task: {clean(what)}"
    return f"No request holds or waits for {clean(what)!r}, and no work queue of that name has open tasks"


def _kept(coordinator: sqlsem.Coordinator, overview: Overview, what: str) -> list[str]:
    """Return lines about sessions that keep a lock inside the database for longer than a call needs."""
    entries = [entry for entry in overview.entries if what in (entry.resource, str(entry.position))]
    resource = entries[0].resource if entries else what
    return kept_lines(coordinator, resource, pins=any(entry.state != "waits" for entry in entries))


def _requests(
    coordinator: sqlsem.Coordinator, overview: Overview, what: str, maximum: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """Explain a request by its position, or all requests of a resource: as text and as JSON."""
    position = _number_of(what)
    entries = [entry for entry in overview.entries if entry.position == position]
    if not entries:
        entries = [entry for entry in overview.entries if entry.resource == what]
    waits = WaitGraph(overview)
    entry_reasons = reasons(overview, only=position if len(entries) == 1 else None, waits=waits)
    lines: list[str] = []
    plain: list[dict[str, Any]] = []
    resources = {entry.resource for entry in entries[:maximum] if entry.resource.startswith(RATE_PREFIX)}
    rates = {name: coordinator.admin.rates(name.removeprefix(RATE_PREFIX)) for name in resources}
    for entry in entries[:maximum]:
        chain, reason = waits.chain(entry.position), entry_reasons.get(entry.position)
        behind = [other.entry for number, other in waits.blocked.items() if waits.head(number) == entry]
        lines += explain_entry(entry, reason, chain, behind)
        plain.append(entry_as_dict(entry, reason, chain))
        if rates.get(entry.resource):  # a rate has no holder: the first request waits, too
            before = sum(row.resource == entry.resource and row.position < entry.position for row in overview.entries)
            lines.append(f"  {rate_words(before, rates[entry.resource])}")
            plain[-1]["rate"] = {
                "windows": [window.as_dict() for window in rates[entry.resource]],
                "granted_in": seconds_until_granted(before, rates[entry.resource]),
            }
    if len(entries) > maximum:
        lines.append(f"There are {len(entries) - maximum} more; see them with --max.")
    return lines, plain


def _rate(coordinator: sqlsem.Coordinator, name: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Describe a rate that no request waits for."""
    windows = coordinator.admin.rates(name)
    lines = [f"Nobody waits for the rate {name!r}: {used_words(windows)}"] if windows else []
    return lines, [{"rate": {"windows": [window.as_dict() for window in windows]}}] if windows else []


def _tasks(
    coordinator: sqlsem.Coordinator, overview: Overview, what: str, maximum: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """Explain a task by its number, or the open tasks of a work queue: as text and as JSON."""
    number = _number_of(what)
    queues = [task.queue for task in overview.queues]
    known_tasks: list[TaskEntry] = []
    for queue in [what] if what in queues else queues if number is not None else []:
        try:
            page = coordinator.admin.tasks(queue, maximum=MAX_TASKS)
            known_tasks += page
            if len(page) == MAX_TASKS:  # further ended tasks come after these
                known_tasks += coordinator.admin.tasks(queue, "finished", maximum=MAX_ENDED)
        except ConfigurationError:  # this login may not read tasks
            return [], []
    selected = [task for task in known_tasks if task.task_id == number] if number is not None else []
    selected = selected or [task for task in known_tasks if task.queue == what and task.status in OPEN]
    names = dict.fromkeys(task.queue for task in selected)
    limits = [limit for queue in names for limit in coordinator.admin.queue_limits(queue)]
    waits = [wait for queue in names for wait in coordinator.admin.queue_waits(queue)]
    requests = reasons(overview) if any(task.blocked for task in selected) else None
    reasons_by_task = task_reasons(
        {task.task_id: task for task in known_tasks}.values(), overview.taken_at, limits, requests, waits
    )
    lines = [line for task in selected[:maximum] for line in explain_task(task, reasons_by_task.get(task.task_id))]
    return lines, [task_as_dict(task, reasons_by_task.get(task.task_id)) for task in selected[:maximum]]
