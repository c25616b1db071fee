"""``sqlsem put``: puts a task into a work queue, one for each line of standard input, or a schedule."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from sqlsem import tasks
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import WithCommand
from sqlsem.cli.options import a_lock, duration, json_option, name_of, whole_number
from sqlsem.insight.words import counted
from sqlsem.ops.terminal import output
from sqlsem.tasks.queues import MAX_CHARACTERS, MAX_TASKS
from sqlsem.util.chunks import in_chunks
from sqlsem.util.printable import clean
from sqlsem.values.errors import ConfigurationError, SqlsemError
from sqlsem.values.tasks import TASK_BOUNDS

#: The longest time before a second attempt.
LONGEST_BACKOFF_SECONDS = TASK_BOUNDS["backoff_ms"][1] // 1000
_queue_name = name_of("The queue's name", "queue")


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
    "--lines",
    is_flag=True,
    help="Put a task for each line of standard input: with --sql -, --shell - or --json-body - its text; with --call "
    "the arguments, as a JSON list, a JSON object (by name), or one other value. Empty lines are left out.",
)
@click.option(
    "--order",
    type=whole_number(TASK_BOUNDS["order"][0], "a whole number that fits"),
    default="0",
    metavar="N",
    help="Lower orders run first; a task waits until every task of a lower order has ended.",
)
@click.option(
    "--after", type=duration, default="0", show_default=False, help="Do not start it before this time has passed."
)
@click.option(
    "--max-attempts",
    type=whole_number(1, "a whole number from 1 on"),
    default="1",
    metavar="N",
    help="How many attempts are made before it has failed.",
)
@click.option(
    "--backoff",
    type=_backoff,
    metavar="DURATION",
    default="1",
    help="The approximate time before the second attempt; twice that before the third, up to 300 s.",
)
@click.option(
    "--on-failure",
    type=click.Choice(["stop", "continue"]),
    default="stop",
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
@click.option("--time-zone", metavar="ZONE", default="UTC", help="For --every: Europe/Berlin.")
@click.option(
    "--missed",
    type=click.Choice(tasks.MISSED),
    default="one",
    help="With --every: put one task for all times at which the queue had no worker, or none (skip).",
)
@json_option
@connecting
def put(options: Connecting, /, queue: str, as_json: bool, lines: bool, **given: Any) -> None:
    """Put a task into a work queue, and print its number. `sqlsem work` runs it.

    Name the task by one of --sql, --shell, --call, --json-body, or by a command after `--`, which is run without a
    shell. `-` in place of a text reads it from standard input. On a database server this needs the role sqlsem_putter,
    as tasks run with the rights of the workers.

    With --lines all lines are checked before any task is put. Then blocks of 500 tasks are put, each as a whole or
    not at all, and the number of tasks is printed.

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
      sqlsem put mails --lines --json-body - < mails.jsonl
      seq 10000 | sqlsem put nightly --lines --call etl:load
    """
    texts = {name: text for name in ("sql_text", "shell", "json_body", "call") if (text := given.pop(name)) is not None}
    arguments = given.pop("arguments")
    try:
        bodies = list(_bodies_of_lines(texts, arguments)) if lines else [_body(texts, arguments)]
        every, name, when = given.pop("every"), given.pop("name"), {k: given.pop(k) for k in ("time_zone", "missed")}
        encoded = [tasks.encode(body) for body in bodies]
        tasks.check_put(**given)
        if every is not None:
            tasks.check_cron(every, when["time_zone"])
    except ConfigurationError as exc:
        raise click.UsageError(str(exc)) from exc
    if lines and not (every is given["unique"] is given["replace"] is None):
        raise click.UsageError("--lines puts many tasks; leave out --every, --unique and --replace.")
    if every is not None:
        _schedule(options, queue, every, bodies[0], as_json, {"name": name, **when, **given})
        return
    if name is not None or when != {"time_zone": "UTC", "missed": "one"}:
        raise click.UsageError("--name, --time-zone and --missed go with --every.")
    if lines:
        _put_lines(options, queue, list(zip(bodies, encoded, strict=True)), as_json, given)
        return
    with options.coordinator() as coordinator:
        number = coordinator.queue(queue).put(bodies[0], **given)
    if as_json:
        output.print_json({"queue": queue, "task_id": number})
    else:
        output.echo(str(number))


#: A task, with its kind and its text in the database.
Encoded = tuple[Any, tuple[str, str]]


def _put_lines(
    options: Connecting, queue: str, bodies: Sequence[Encoded], as_json: bool, given: Mapping[str, Any]
) -> None:
    """Put the tasks in blocks, each of them by one statement; print how many were put."""
    numbers: list[int] = []
    with options.coordinator() as coordinator:
        target = coordinator.queue(queue)
        try:
            # (As `put_many` divides them: so it is known how many were put before an error.)
            for block in in_chunks(bodies, _text_length, maximum=MAX_CHARACTERS, count=MAX_TASKS):
                numbers += target.put_many([body for body, _ in block], **given)
        except SqlsemError:
            output.say(
                f"the first {len(numbers):,} of {len(bodies):,} tasks were put, and perhaps the next {MAX_TASKS}, if "
                f"their reply was lost; see: sqlsem tasks {clean(queue)}"
            )
            raise
    if as_json:
        output.print_json({"queue": queue, "task_ids": numbers})
    else:
        output.echo(f"{counted(len(numbers), 'task', ',')} put into {clean(queue)}.")


def _text_length(task: Encoded) -> int:
    _, (_, text) = task
    return len(text)


def _schedule(options: Connecting, queue: str, cron: str, body: Any, as_json: bool, given: dict[str, Any]) -> None:
    with options.coordinator() as coordinator:
        schedule = coordinator.queue(queue).schedule(cron, body, **given)
    if as_json:
        output.print_json(schedule.as_dict())
    else:
        output.echo(clean(schedule.name))
        output.say(f"next at {schedule.next_due:%Y-%m-%d %H:%M} UTC, if the queue has a worker: sqlsem work {queue}")


#: The options that name a task, with their texts, and the arguments of its function, each with its name.
Texts = Mapping[str, str]
Arguments = Sequence[tuple[str | None, Any]]


def _body(texts: Texts, arguments: Arguments) -> Any:
    """Return the body that the options name."""
    command = click.get_current_context().meta["sqlsem.command"]
    if len(texts) + (command is not None) != 1:
        raise click.UsageError(
            "Say what to do, by one of --sql TEXT, --shell COMMAND, --call MODULE:FUNCTION, --json-body JSON or "
            "-- COMMAND ARGS."
        )
    if arguments and "call" not in texts:
        raise click.UsageError("--arg goes with --call.")
    if command is not None:
        return tasks.Shell(command)
    ((option, text),) = texts.items()
    if option == "call":
        return _call(text, arguments)
    return _body_of_text(option, _option_text(text), "--json-body")


def _body_of_text(option: str, text: str, source: str) -> Any:
    if option == "sql_text":
        return tasks.Sql(text)
    return tasks.Shell(text) if option == "shell" else tasks.Json(_json_value(text, source))


def _bodies_of_lines(texts: Texts, arguments: Arguments) -> Iterator[Any]:
    """Yield the task of each line of standard input."""
    command = click.get_current_context().meta["sqlsem.command"]
    if (
        command is not None
        or arguments
        or ["-" if option == "call" else text for option, text in texts.items()] != ["-"]
    ):
        raise click.UsageError("Say what a line is, by one of --sql -, --shell -, --json-body - or --call FUNCTION.")
    (option,) = texts
    for number, line in enumerate(_option_text("-").split("\n"), 1):
        text, source = line.strip(), f"Line {number}"
        if text and option != "call":
            yield _body_of_text(option, text, source)
        elif text:
            value = _json_value(text, source)
            by_name = value if isinstance(value, dict) else {}
            positional = value if isinstance(value, list) else [] if isinstance(value, dict) else [value]
            yield tasks.Call(texts["call"], *positional, **by_name)


def _call(function: str, arguments: Arguments) -> tasks.Call:
    positional = [value for name, value in arguments if name is None]
    by_name = {name: value for name, value in arguments if name is not None}
    if len(positional) + len(by_name) < len(arguments):
        raise click.UsageError("An argument of the function is given twice.")
    return tasks.Call(function, *positional, **by_name)


def _json_value(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"{source} is not JSON: {exc}") from exc
