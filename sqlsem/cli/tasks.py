"""The commands of programs and operators for the work queue: ``sqlsem put``, ``sqlsem tasks``, ``sqlsem schedules``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import click

import sqlsem
from sqlsem import tasks
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing, WithCommand
from sqlsem.cli.known import unknown_queue
from sqlsem.cli.options import a_lock, duration, json_option, most_option, name_of, one_name, whole_number
from sqlsem.insight.reasons import TaskReason, task_reasons
from sqlsem.insight.task_estimates import MAX_ENDED, MAX_OPEN
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.tables import process_name, seconds_in_words
from sqlsem.ops.terminal.tasks import STATES, counted, render_schedules, render_task, render_tasks
from sqlsem.util.printable import clean
from sqlsem.values.errors import ConfigurationError, NotHeld
from sqlsem.values.tasks import TASK_BOUNDS, Attempt, TaskEntry

__all__ = ["put", "schedules", "tasks_"]

#: How many failed tasks are read, to find the ones that block pending tasks.
MAX_FAILED = 1000
#: How many running tasks are read, to apply limits.
MAX_RUNNING = 10_000
#: The longest time before a second attempt.
LONGEST_BACKOFF_SECONDS = TASK_BOUNDS["backoff_ms"][1] // 1000
_queue_name = name_of("The queue's name")


def _backoff(value: str) -> float:
    """Convert a duration, up to the longest backoff."""
    seconds = duration(value)
    if seconds > LONGEST_BACKOFF_SECONDS:
        raise click.BadParameter(f"{value!r} is longer than {LONGEST_BACKOFF_SECONDS} seconds")
    return seconds


def _argument(value: str) -> tuple[str | None, Any]:
    """Convert ``JSON`` or ``NAME=JSON``. (No JSON begins like the second form.)"""
    match = re.fullmatch(r"([^\W\d]\w*)=(.*)", value, re.DOTALL)
    name, text = (match[1], match[2]) if match else (None, value)
    try:
        return name, json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise click.BadParameter(f"{text!r} is not JSON ({exc}); a text needs its quotes: '\"{text}\"'") from exc


def _option_text(text: str) -> str:
    """Return the value of an option; for ``-`` the text of standard input."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"Standard input is not UTF-8: {exc}") from exc


@click.command(cls=WithCommand, short_help="Put a task into a work queue.")
@click.argument("queue", type=_queue_name)
@click.option("--sql", "sql_text", metavar="TEXT", help="SQL, run on the worker's database.")
@click.option("--shell", metavar="COMMAND", help="A command for the shell of the worker's host.")
@click.option("--call", metavar="MODULE:FUNCTION", help="A Python function that workers can import.")
@click.option(
    "--arg",
    "arguments",
    multiple=True,
    type=_argument,
    metavar="JSON",
    help="An argument of the function, or NAME=JSON; may be repeated.",
)
@click.option("--json-body", metavar="JSON", help="Any JSON, for code that claims for itself (Queue.claim).")
@click.option(
    "--order",
    type=whole_number(TASK_BOUNDS["order"][0], "a whole number that fits"),
    default="0",
    show_default=True,
    metavar="N",
    help="Lower orders run first; a task waits until every task of a lower order has ended.",
)
@click.option("--after", type=duration, default="0", help="Do not start it before this time has passed.")
@click.option(
    "--max-attempts",
    type=whole_number(1, "a whole number from 1 on"),
    default="1",
    show_default=True,
    metavar="N",
    help="How many attempts are made before it has failed.",
)
@click.option(
    "--backoff",
    type=_backoff,
    metavar="DURATION",
    default="1",
    show_default=True,
    help="The approximate time before the second attempt; twice that before the third, up to 300 s.",
)
@click.option(
    "--on-failure",
    type=click.Choice(["stop", "continue"]),
    default="stop",
    show_default=True,
    help="What later orders do when it has failed: stop (wait), or continue.",
)
@click.option("--note", help="A text that lists of the queue show.")
@click.option(
    "--time-limit", type=duration, metavar="DURATION", help="An attempt that runs for longer is ended, and fails."
)
@click.option(
    "--unique", metavar="KEY", help="Put nothing while a task with this key is open; print that task's number."
)
@click.option("--replace", metavar="KEY", help="Replace the pending task with this key.")
@click.option("--key", metavar="KEY", help="The task's owner: workers are shared fairly between the keys of a queue.")
@click.option(
    "--priority",
    type=whole_number(TASK_BOUNDS["order"][0], "a whole number that fits"),
    default="0",
    show_default=True,
    metavar="N",
    help="Among the tasks of its key and order: higher ones first.",
)
@click.option(
    "--lock",
    "locks",
    multiple=True,
    type=a_lock,
    metavar="KIND:NAME",
    help="A lock that it holds while it runs: mutex:NAME, write:NAME, read:NAME, limit:NAME[=N] or stage:NAME=ORDER; "
    "may be repeated. The task waits for its locks without a worker.",
)
@click.option("--every", metavar="CRON", help="Put it at these times, by any worker of the queue: '0 2 * * *'.")
@click.option("--name", metavar="NAME", help="The schedule's name; a schedule of the same name is replaced.")
@click.option("--time-zone", metavar="ZONE", default="UTC", show_default=True, help="For --every: Europe/Berlin.")
@click.option(
    "--missed",
    type=click.Choice(tasks.MISSED),
    default="one",
    show_default=True,
    help="With --every: put one task for all times at which the queue had no worker, or none (skip).",
)
@json_option
@connecting
def put(options: Connecting, /, queue: str, as_json: bool, **given: Any) -> None:
    """Put a task into a work queue, and print its number. `sqlsem work` runs it.

    Name the task by one of --sql, --shell, --call, --json-body, or by a command after `--`, which is run without a
    shell. `-` in place of a text reads it from standard input. On a database server this needs the role sqlsem_putter,
    as tasks run with the rights of the workers.

    \b
    Examples:
      sqlsem put nightly --sql "CALL load_customers()" --order 100
      sqlsem put nightly --order 200 --max-attempts 3 -- ./report.sh --all
      sqlsem put nightly --call etl:load --arg '"customers"' --arg full=true
      sqlsem put mails --json-body - < mail.json
      sqlsem put nightly --unique report -- ./report.sh
      sqlsem put mails --key tenant-7 --call mails:send --arg 4711
      sqlsem put nightly --lock write:customers --lock limit:pg=4 -- ./load.sh
      sqlsem put nightly --every "0 2 * * *" --time-zone Asia/Tokyo -- ./load.sh
    """
    try:
        body = _body(**{name: given.pop(name) for name in ("sql_text", "shell", "call", "arguments", "json_body")})
        every, name, when = given.pop("every"), given.pop("name"), {k: given.pop(k) for k in ("time_zone", "missed")}
        tasks.encode(body)
        tasks.check_put(**given)
        if every is not None:
            tasks.check_cron(every, when["time_zone"])
    except ConfigurationError as exc:
        raise click.UsageError(str(exc)) from exc
    if every is not None:
        _schedule(options, queue, every, body, as_json, {"name": name, **when, **given})
        return
    if name is not None or when != {"time_zone": "UTC", "missed": "one"}:
        raise click.UsageError("--name, --time-zone and --missed go with --every.")
    with options.coordinator() as coordinator:
        number = coordinator.queue(queue).put(body, **given)
    if as_json:
        output.print_json({"queue": queue, "task_id": number})
    else:
        output.echo(str(number))


def _schedule(options: Connecting, queue: str, cron: str, body: Any, as_json: bool, given: dict[str, Any]) -> None:
    with options.coordinator() as coordinator:
        schedule = coordinator.queue(queue).schedule(cron, body, **given)
    if as_json:
        output.print_json(schedule.as_dict())
    else:
        output.echo(clean(schedule.name))
        output.say(f"next at {schedule.next_due:%Y-%m-%d %H:%M} UTC, if the queue has a worker: sqlsem work {queue}")


def _body(
    sql_text: str | None,
    shell: str | None,
    call: str | None,
    arguments: Sequence[tuple[str | None, Any]],
    json_body: str | None,
) -> Any:
    """Return the body that the options name."""
    command = click.get_current_context().meta["sqlsem.command"]
    if sum(value is not None for value in (sql_text, shell, call, json_body, command)) != 1:
        raise click.UsageError(
            "Say what to do, by one of --sql TEXT, --shell COMMAND, --call MODULE:FUNCTION, --json-body JSON or "
            "-- COMMAND ARGS."
        )
    if arguments and call is None:
        raise click.UsageError("--arg goes with --call.")
    if sql_text is not None:
        return tasks.Sql(_option_text(sql_text))
    if shell is not None or command is not None:
        return tasks.Shell(command if shell is None else _option_text(shell))
    if call is not None:
        return _call(call, arguments)
    assert json_body is not None
    return tasks.Json(_json_value(_option_text(json_body)))


def _call(function: str, arguments: Sequence[tuple[str | None, Any]]) -> tasks.Call:
    positional = [value for name, value in arguments if name is None]
    by_name = {name: value for name, value in arguments if name is not None}
    if len(positional) + len(by_name) < len(arguments):
        raise click.UsageError("An argument of the function is given twice.")
    return tasks.Call(function, *positional, **by_name)


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"--json-body is not JSON: {exc}") from exc


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
    show_default=True,
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
    @click.argument("name")
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
        coordinator.queue(queue).join(timeout)
