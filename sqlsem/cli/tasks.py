"""The commands for work queues: ``sqlsem queues``, ``sqlsem tasks`` and ``sqlsem schedules``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import click

import sqlsem
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing
from sqlsem.cli.known import unknown_queue
from sqlsem.cli.options import (
    Named,
    duration,
    json_option,
    most_option,
    name_of,
    one_name,
    rate_window,
    setting,
    whole_number,
)
from sqlsem.insight.reasons import TaskReason, task_reasons
from sqlsem.insight.task_estimates import MAX_ENDED, MAX_OPEN
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.tables import process_name, seconds_in_words
from sqlsem.ops.terminal.tasks import (
    STATES,
    counted,
    describe_limits,
    render_counts,
    render_schedules,
    render_task,
    render_tasks,
)
from sqlsem.util.printable import clean
from sqlsem.values.errors import ConfigurationError, NotHeld
from sqlsem.values.rates import Window
from sqlsem.values.tasks import Attempt, TaskEntry

#: How many failed tasks are read, to find the ones that block pending tasks.
MAX_FAILED = 1000
#: How many running tasks are read, to apply limits.
MAX_RUNNING = 10_000
_queue_name = name_of("The queue's name", "queue")
_number_from_0 = whole_number(0, "a whole number from 0 on")


@click.group(
    "tasks",
    cls=Listing,
    invoke_without_command=True,
    short_help="Show the tasks of work queues; show, log, retry, cancel, wait.",
)
@one_name("queue", _queue_name, "queue", "The queue, should it be named like a command.")
@click.option("--status", type=click.Choice(STATES), help="Only tasks in this state.")
@most_option(100)
@click.option(
    "--page",
    type=click.IntRange(1, 100_000),
    default=1,
    metavar="N",
    help="Show this page; --max is the length of a page.",
)
@json_option
@connecting
def tasks_(options: Connecting, queue: str | None, status: str | None, maximum: int, page: int, as_json: bool) -> None:
    """Show the tasks of one queue or all: open ones by queue, order, priority and number, then those that have ended,
    the newest first.

    PRIORITY is shown if any task has one: among tasks of the same order, higher priorities come first. FOR is how long
    the task ran, or has been running. WHEN is when it was put, started or ended. TRIES counts its attempts, and how
    many it may have. WHY says what a pending task waits for: its time, or tasks of a lower order; and about when it
    will start, in minutes and seconds (~02:51; more with: sqlsem why TASK). WHO is the host and process that runs it.
    A lost task is one whose worker is dead; it will run again.

    \b
    Examples:
      sqlsem tasks nightly
      sqlsem tasks --status failed
      sqlsem tasks nightly --page 2
      sqlsem tasks nightly --json | jq '.[] | select(.seconds > 60)'
      sqlsem tasks log 17
    """
    with options.coordinator(must_exist=True) as coordinator:
        entries = coordinator.admin.tasks(queue, status, maximum=maximum + 1, skip=(page - 1) * maximum)
        why = _why(coordinator, entries, whole=status is None and page == 1, ended=len(entries) <= maximum)
    cut = ""
    if len(entries) > maximum:
        cut = f"There are more than these {maximum}; see them with --max, the next ones with --page {page + 1}."
    if as_json:
        reason_dicts = {number: reason.as_dict() for number, reason in why.items()}
        output.print_json([{**task.as_dict(), "why": reason_dicts.get(task.task_id)} for task in entries[:maximum]])
        if cut:
            output.say(cut)
        return
    console = output.console()
    output.show(console, render_tasks(entries[:maximum], console.width, queue, why))
    counts = counted(entries[:maximum], at_least=bool(cut) or page > 1)
    if counts:
        output.echo("", *counts)
    if cut:
        output.echo(cut)


def _why(
    coordinator: sqlsem.Coordinator, entries: Sequence[TaskEntry], *, whole: bool, ended: bool
) -> dict[int, TaskReason]:
    """Return why the pending tasks among ``entries`` do not run, and when they will. ``whole``: no earlier task
    is missing among them; ``ended``: no ended task is.
    """
    known = {entry.task_id: entry for entry in entries}
    reads: list[tuple[str | None, int]] = []
    if not whole:
        reads += [(None, MAX_OPEN), ("failed", MAX_FAILED), ("running", MAX_RUNNING)]
    reads += [] if whole and ended else [("finished", MAX_ENDED)]
    queues = dict.fromkeys(entry.queue for entry in entries if entry.status == "pending")
    for queue in queues:
        for status, maximum in reads:
            known.update((task.task_id, task) for task in coordinator.admin.tasks(queue, status, maximum=maximum))
    limits = [limit for queue in queues for limit in coordinator.admin.queue_limits(queue)]
    waits = [wait for queue in queues for wait in coordinator.admin.queue_waits(queue)]
    return task_reasons(known.values(), datetime.now(timezone.utc), limits, waits=waits)


@click.group(cls=Listing, invoke_without_command=True, short_help="Show the schedules of tasks; pause, resume, remove.")
@json_option
@connecting
def schedules(options: Connecting, as_json: bool) -> None:
    """Show the schedules: the task, its times and its queue. `sqlsem put --every` makes a schedule.

    NEXT and LAST are local times: the next due time, and the last due time for which a task was put.

    \b
    Examples:
      sqlsem schedules
      sqlsem schedules pause nightly-1a2b3c4d
    """
    with options.coordinator(must_exist=True) as coordinator:
        rows = coordinator.admin.schedules()
    output.show_or_json(as_json, [row.as_dict() for row in rows], lambda width: render_schedules(rows, width))


#: The commands that change a schedule: two parts of the help, the call, and the words when it is done.
CHANGES: dict[str, tuple[str, str, Callable[[sqlsem.Admin, str], object], str]] = {
    "pause": ("Put no tasks of a schedule until it is resumed.", "", sqlsem.Admin.pause_schedule, "is paused"),
    "resume": (
        "Resume a paused schedule.",
        " The due times since the pause are left out.",
        sqlsem.Admin.resume_schedule,
        "goes on",
    ),
    "remove": (
        "Remove a schedule.",
        " Its tasks that were put already stay.",
        sqlsem.Admin.remove_schedule,
        "was removed",
    ),
}


def _add_command(action: str) -> None:
    first, rest, change, done = CHANGES[action]
    help_text = f"""{first}{rest}

    \b
    Example:
      sqlsem schedules {action} nightly-1a2b3c4d

    \b
    Exit codes: 0 done, 1 there is no such schedule.
    """

    @schedules.command(action, short_help=first, help=help_text)
    @click.argument("name", type=Named(str, "schedule"))
    @connecting
    def command(options: Connecting, name: str) -> None:
        with options.coordinator(must_exist=True) as coordinator:
            change(coordinator.admin, name)
        output.echo(clean(f"Schedule {name} {done}."))


for _action in CHANGES:
    _add_command(_action)


@tasks_.command("show", short_help="Show one task: its body, its options, its state.")
@click.argument("task_id", metavar="ID", type=click.IntRange(1))
@json_option
@connecting
def tasks_show(options: Connecting, task_id: int, as_json: bool) -> int:
    """Show one task: its body, its options, its state, and its last error or result.

    \b
    Examples:
      sqlsem tasks show 17
      sqlsem tasks show 17 --json | jq -r .body

    \b
    Exit codes: 0 shown, 1 there is no such task, or this login may not
      see it.
    """
    with options.coordinator(must_exist=True) as coordinator:
        entry = coordinator.admin.task(task_id)
        why = {} if entry is None else _why(coordinator, [entry], whole=False, ended=False)
    if entry is None:
        output.echo(f"There is no task {task_id}; see: sqlsem tasks")
        return 1
    reason = why.get(task_id)
    plain = {**entry.as_dict(), "why": None if reason is None else reason.as_dict()}
    output.show_or_json(as_json, plain, lambda width: render_task(entry, reason))
    return 0


@tasks_.command("log", short_help="Show every attempt at a task.")
@click.argument("task_id", metavar="ID", type=click.IntRange(1))
@json_option
@connecting
def tasks_log(options: Connecting, task_id: int, as_json: bool) -> None:
    """Show every attempt at a task: its worker, start, duration and outcome, with its error or output.

    An attempt is running, finished, failed, lost (its worker died) or returned (to the queue, unfinished).

    \b
    Examples:
      sqlsem tasks log 17
      sqlsem tasks log 17 --json | jq '.[-1].error'
    """
    with options.coordinator(must_exist=True) as coordinator:
        attempts = coordinator.admin.attempts(task_id)
    if as_json:
        output.print_json([attempt.as_dict() for attempt in attempts])
    elif attempts:
        for attempt in attempts:
            _show_attempt(attempt)
    else:
        output.say(f"Task {task_id} has no attempt yet, or there is no such task; see: sqlsem tasks")


def _show_attempt(attempt: Attempt) -> None:
    words = [f"Attempt {attempt.attempt}:", attempt.outcome]
    if attempt.seconds is not None:
        words.append(f"{'for' if attempt.outcome == 'running' else 'after'} {seconds_in_words(attempt.seconds)},")
    if attempt.started_at is not None:
        words.append(f"started {attempt.started_at.astimezone():%Y-%m-%d %H:%M:%S}")
    if attempt.host is not None:
        words.append(f"by {process_name(attempt.host, attempt.pid)}")
    if attempt.owner:
        words.append(f"({attempt.owner}{'' if attempt.session_id is None else f', session {attempt.session_id}'})")
    output.echo(clean(" ".join(words)))
    for text in (attempt.error, attempt.result):
        for line in (text or "").splitlines():
            output.echo(f"    {clean(line.expandtabs())}".rstrip())


@tasks_.command("retry", short_help="Make failed or cancelled tasks pending again.")
@click.argument("task_ids", metavar="ID...", nargs=-1, required=True, type=click.IntRange(1))
@connecting
def tasks_retry(options: Connecting, task_ids: Sequence[int]) -> int:
    """Make failed or cancelled tasks pending again; their attempts are counted from 0.

    \b
    Examples:
      sqlsem tasks retry 17
      sqlsem tasks retry $(sqlsem tasks --status failed --json | jq '.[].task_id')

    \b
    Exit codes: 0 done, 1 not all of them could be.
    """

    def retry(coordinator: sqlsem.Coordinator, number: int) -> str:
        coordinator.admin.retry_task(number)
        return "is pending again"

    return _each(options, task_ids, retry)


@tasks_.command("cancel", short_help="Cancel tasks, also running ones.")
@click.argument("task_ids", metavar="ID...", nargs=-1, required=True, type=click.IntRange(1))
@connecting
def tasks_cancel(options: Connecting, task_ids: Sequence[int]) -> int:
    """Cancel tasks: they will not run, and hold up no other tasks.

    Pending and failed tasks are cancelled at once. The worker of a running task is notified: within a second or two it
    ends the SQL or command, or interrupts the function; then the task is cancelled.

    \b
    Example:
      sqlsem tasks cancel 17 18

    \b
    Exit codes: 0 cancelled, or the worker notified; 1 some could not be.
    """

    def cancel(coordinator: sqlsem.Coordinator, number: int) -> str:
        return "was cancelled" if coordinator.admin.cancel_task(number) else "runs; its worker was notified to end it"

    return _each(options, task_ids, cancel)


def _each(options: Connecting, task_ids: Sequence[int], change: Callable[[sqlsem.Coordinator, int], str]) -> int:
    code = 0
    with options.coordinator(must_exist=True) as coordinator:
        for number in task_ids:
            try:
                done = change(coordinator, number)
            except NotHeld as exc:
                output.print_error(exc)
                code = 1
            else:
                output.echo(f"Task {number} {done}.")
    return code


@tasks_.command("wait", short_help="Wait until a queue's work is done.")
@click.argument("queue", type=_queue_name)
@click.option("--timeout", type=duration, help="Give up after this time.")
@click.option("--allow-new", is_flag=True, help="Accept a queue that has never had a task.")
@connecting
def tasks_wait(options: Connecting, queue: str, timeout: float | None, allow_new: bool) -> None:
    """Wait until all tasks of a queue have ended, or a failed task holds up the others.

    \b
    Examples:
      sqlsem tasks wait nightly --timeout 6h && ./publish.sh

    \b
    Exit codes: 0 all is done, 1 a task has failed (unless it was put with
      --on-failure continue), 75 time is up, 78 nothing has ever been put
      into a queue of that name (--allow-new accepts it).
    """
    with options.coordinator(must_exist=True) as coordinator:
        if not allow_new:
            words = unknown_queue(coordinator, queue)
            if words is not None:
                raise ConfigurationError(f"{words}; if the queue is new, add --allow-new")
        with options.progress(lambda: _work_left(coordinator, queue), reads=True):
            coordinator.queue(queue).wait(timeout)


def _work_left(coordinator: sqlsem.Coordinator, queue: str) -> str:
    """Return the open tasks of a queue, as text."""
    rows = coordinator.admin.queues(queue)
    if not rows:
        return f"queue {queue!r}: no tasks"
    counts = rows[0]
    lost = f", {counts.lost} of them without a worker" if counts.lost else ""
    failed = f"; {counts.failed} failed" if counts.failed else ""
    return f"queue {queue!r}: {counts.running} running{lost}, {counts.pending} pending{failed}"


@click.group(
    cls=Listing,
    invoke_without_command=True,
    short_help="Show the work queues: counts, limits and rates; set these.",
)
@one_name("queue", _queue_name, "queue", "The queue, should it be named like a command.")
@json_option
@connecting
def queues(options: Connecting, queue: str | None, as_json: bool) -> None:
    """Show the work queues, or one: how many tasks are in each state, and the task that holds it up.

    FINISHED, FAILED and CANCELLED count the tasks that the database keeps (setting history_days). RUNNING includes
    tasks whose worker is dead; LOST counts only these. OLDEST is how long the oldest task that could start has waited.
    A MINUTE is how many tasks ended per minute in the last five. LIMIT is how many may run at a time, of the queue and
    of each key; and how many may start in a time window, as in 100/1m.

    \b
    Examples:
      sqlsem queues
      sqlsem queues nightly --json | jq '.[0].pending'
      sqlsem queues set mails --limit 10 --per-key 2
      sqlsem queues set mails --rate-per-key 100/1m
    """
    with options.coordinator(must_exist=True) as coordinator:
        rows, limits = coordinator.admin.queues(queue), coordinator.admin.queue_limits(queue)
    limits_by_queue = {row.queue: [limit.as_dict() for limit in limits if limit.queue == row.queue] for row in rows}
    plain = [{**row.as_dict(), "limits": limits_by_queue[row.queue]} for row in rows]
    output.show_or_json(as_json, plain, lambda width: render_counts(rows, width, queue, limits))


@queues.command(
    "set", short_help="Set how many tasks of a queue, or of a key, run at a time, or start in so long; weights of keys."
)
@click.argument("queue", type=_queue_name)
@click.option("--key", type=name_of("The key"), metavar="KEY", help="Only for this key.")
@setting(
    "limit",
    "No limit (for a key: that of --per-key).",
    "Set a limit, or none.",
    type=_number_from_0,
    metavar="N",
    help="At most N run at a time. 0: none.",
)
@setting(
    "per_key",
    "No limit of each key.",
    "Set a limit, or none.",
    type=_number_from_0,
    metavar="N",
    help="At most N of each key run at a time.",
)
@setting(
    "rate",
    "No rate (for a key: that of --rate-per-key).",
    "Set a rate, or none.",
    type=rate_window,
    metavar="N/TIME",
    help="At most N start in any TIME.",
)
@setting(
    "rate_per_key",
    "No rate of each key.",
    "Set a rate, or none.",
    type=rate_window,
    metavar="N/TIME",
    help="At most N of each key start in any TIME.",
)
@click.option(
    "--weight",
    type=whole_number(1, "a whole number from 1 on"),
    metavar="N",
    help="With --key: N times the share of workers that other keys have (default 1).",
)
@connecting
def queues_set(
    options: Connecting, queue: str, key: str | None, changes: Mapping[str, Any], weight: int | None
) -> None:
    """Set how many tasks of a queue may run at a time, on all workers together, and how many may start in a time
    window: of all keys, of each key, or of one key; and the weight by which workers choose between keys. A change
    counts at once for new claims; running tasks go on. Tasks get their key when they are put (sqlsem put --key). For
    operators.

    \b
    Examples:
      sqlsem queues set mails --limit 10 --per-key 2
      sqlsem queues set mails --key tenant-7 --limit 5 --weight 3
      sqlsem queues set mails --rate 1000/1m --rate-per-key 100/1m
      sqlsem queues set mails --no-per-key
    """
    if weight is None and not changes:
        raise click.UsageError(
            "Say what to set: --limit, --per-key, --rate or --rate-per-key, each with or without --no-…, or --weight."
        )
    if key is None and weight is not None:
        raise click.UsageError("--weight goes with --key.")
    if key is not None and "per_key" in changes:
        raise click.UsageError("--per-key is of all keys of a queue; of one key it is --limit.")
    if key is not None and "rate_per_key" in changes:
        raise click.UsageError("--rate-per-key is of all keys of a queue; of one key it is --rate.")
    with options.coordinator(must_exist=True) as coordinator:
        target = coordinator.queue(queue)
        if "limit" in changes:
            target.set_limit(changes["limit"], key=key)
        if "per_key" in changes:
            target.set_key_limit(changes["per_key"])
        if "rate" in changes:
            target.set_rate(*_limit_and_window(changes["rate"]), key=key)
        if "rate_per_key" in changes:
            target.set_key_rate(*_limit_and_window(changes["rate_per_key"]))
        if key is not None and weight is not None:
            target.set_weight(key, None if weight == 1 else weight)
        lines = list(describe_limits(target.limits()))
    output.echo(*map(clean, lines or [f"Nothing is set of {queue!r} any more."]))


def _limit_and_window(rate: Window | None) -> tuple[int | None, float | None]:
    return (None, None) if rate is None else (rate.limit, rate.ms / 1000)
