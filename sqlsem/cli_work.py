"""The command line of the work queue and of rounds: ``sqlsem put``, ``work``, ``tasks`` and ``rounds``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

import sqlsem
from sqlsem import bodies, config, model, output, rounds, tasks
from sqlsem.cli import (
    Connecting,
    _fit,
    _json_option,
    _table,
    at_most,
    connecting,
    duration,
    main,
    name_of,
    pass_url_option,
    seconds_in_words,
    who_is,
)
from sqlsem.coordinator import Coordinator
from sqlsem.errors import ConfigurationError, NotHeld, RoundFailed, SqlsemError, TaskFailed
from sqlsem.model import Attempt, RoundEntry, TaskEntry
from sqlsem.printable import CleanFormatter, clean

__all__: list[str] = []

log = logging.getLogger("sqlsem")

#: Seconds between two pictures of a worker, and the least between two looks at what is pending.
REFRESH, LOOK = 0.25, 1.0
#: Pending tasks that a worker shows.
SHOWN = 5
#: Seconds in which a worker that is told twice to stop has given back what it can.
AT_MOST = 15.0
#: What is shown of an error in a list, characters.
LONGEST_ERROR = 500
#: Rounds that ``rounds resume`` looks through when it is not told which.
MANY = 1000
STATES = ("pending", "running", "lost", "finished", "failed", "cancelled")
STYLES = {"running": "green", "lost": "red", "failed": "red", "cancelled": "dim", "finished": "dim"}


# -- values on the command line ---------------------------------------------------------------------------------------


_queue_name = name_of("The queue's name")
_round_name = name_of("The round's name")


def _whole_number(least: int, what: str) -> Callable[[str], int]:
    """A whole number that a database can keep. (IntRange would tell the whole range in the help.)"""

    def check(value: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,10}", value) or not least <= int(value) <= model.MAX_INT:
            raise click.BadParameter(f"{value!r} is not {what}")
        return int(value)

    return check


def _backoff(value: str) -> float:
    """A duration of at most what the databases allow."""
    seconds = duration(value)
    if seconds > 300:
        raise click.BadParameter(f"{value!r} is longer than 300 seconds")
    return seconds


def _argument(value: str) -> tuple[str | None, Any]:
    """``JSON`` or ``NAME=JSON``; no JSON begins as the second does."""
    match = re.fullmatch(r"([^\W\d]\w*)=(.*)", value, re.DOTALL)
    name, text = (match[1], match[2]) if match else (None, value)
    try:
        return name, json.loads(text)
    except ValueError as exc:
        raise click.BadParameter(f"{text!r} is not JSON ({exc}); a text needs its quotes: '\"{text}\"'") from exc


def _kinds(value: str) -> Sequence[str]:
    """``KIND,KIND``."""
    kinds = value.split(",")
    if not set(kinds) <= {"sql", "shell", "call"}:
        raise click.BadParameter(f"{value!r} is not a list of sql, shell, call")
    return kinds


def _modules(value: str) -> Sequence[str]:
    """``MODULE,MODULE``."""
    modules = value.split(",")
    if not all(part.isidentifier() for module in modules for part in module.split(".")):
        raise click.BadParameter(f"{value!r} is not a list of names of Python modules")
    return modules


def _given(text: str) -> str:
    """The value of an option; ``-`` stands for what comes from standard input."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"Standard input is not UTF-8: {exc}") from exc


def _fail(exc: SqlsemError) -> int:
    output.print_error(exc)
    return 1


class _WithCommand(click.Command):
    """A command whose arguments after ``--`` are a command with its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take away what is not ours to understand."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["sqlsem.command"] = args[at + 1 :] if at < len(args) else None
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """What stands behind ``Usage:``."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND [ARGS]...]"]


class _Listing(click.Group):
    """A command that lists, unless its first argument is the name of one of its own commands."""

    # As of a command, which a group is not.
    allow_extra_args = False
    allow_interspersed_args = True

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of this file, which is that of use."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Our own options, or none of ours."""
        if args and args[0] in self.commands:
            ctx.meta["sqlsem.subcommand"] = list(args)
            return args
        return click.Command.parse_args(self, ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """List, or do what the other command does."""
        wanted = ctx.meta.get("sqlsem.subcommand")
        if wanted is None:
            return click.Command.invoke(self, ctx)
        command = self.commands[wanted[0]]
        # Beside us, not below: our own arguments are none of its usage.
        with command.make_context(f"{ctx.info_name} {wanted[0]}", wanted[1:], parent=ctx.parent) as within:
            return command.invoke(within)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """What stands behind ``Usage:``."""
        return click.Command.collect_usage_pieces(self, ctx)


# -- put --------------------------------------------------------------------------------------------------------------


@main.command(cls=_WithCommand, short_help="Put a task into a work queue.")
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
    type=_whole_number(-model.MAX_INT, "a whole number that fits"),
    default="0",
    show_default=True,
    metavar="N",
    help="Lower ones first; waits until every task of a lower order has ended.",
)
@click.option("--after", type=duration, default="0", help="Do not start it before so much time has passed.")
@click.option(
    "--max-attempts",
    type=_whole_number(1, "a whole number from 1 on"),
    default="1",
    show_default=True,
    metavar="N",
    help="How often it is tried before it has failed.",
)
@click.option(
    "--backoff",
    type=_backoff,
    metavar="DURATION",
    default="1",
    show_default=True,
    help="Time before the second attempt, about; twice that before the third, and so on up to 300 s.",
)
@click.option(
    "--on-failure",
    type=click.Choice(["stop", "continue"]),
    default="stop",
    show_default=True,
    help="Whether its failure holds up later orders.",
)
@click.option("--note", help="Words for whoever looks at the queue.")
@_json_option
@connecting
def put(
    options: Connecting,
    queue: str,
    sql_text: str | None,
    shell: str | None,
    call: str | None,
    arguments: Sequence[tuple[str | None, Any]],
    json_body: str | None,
    order: int,
    after: float,
    max_attempts: int,
    backoff: float,
    on_failure: str,
    note: str | None,
    as_json: bool,
) -> None:
    """Put a task into a work queue, and print its number. `sqlsem work` carries it out.

    What it is, is said by one of --sql, --shell, --call, --json-body, or by a command after `--`, which is run without
    a shell. In place of a text, `-` reads it from standard input. On a database server this needs the role
    sqlsem_putter, as what is put runs with the rights of the workers.

    \b
    Examples:
      sqlsem put nightly --sql "CALL load_customers()" --order 100
      sqlsem put nightly --order 200 --max-attempts 3 -- ./report.sh --all
      sqlsem put nightly --call etl:load --arg '"customers"' --arg full=true
      sqlsem put mails --json-body - < mail.json
    """
    command = click.get_current_context().meta["sqlsem.command"]
    if sum(one is not None for one in (sql_text, shell, call, json_body, command)) != 1:
        raise click.UsageError(
            "Say what to do, by one of --sql TEXT, --shell COMMAND, --call MODULE:FUNCTION, --json-body JSON or "
            "-- COMMAND ARGS."
        )
    if arguments and call is None:
        raise click.UsageError("--arg goes with --call.")
    try:
        body: Any
        if sql_text is not None:
            body = tasks.Sql(_given(sql_text))
        elif shell is not None:
            body = tasks.Shell(_given(shell))
        elif command is not None:
            body = tasks.Shell(command)
        elif call is not None:
            names = [name for name, _ in arguments if name is not None]
            if len(set(names)) < len(names):
                raise click.UsageError("An argument of the function is given twice.")
            body = tasks.Call(
                call,
                *(value for name, value in arguments if name is None),
                **{name: value for name, value in arguments if name is not None},
            )
        else:
            assert json_body is not None
            body = _json_value(_given(json_body))
        tasks.encode(body)
        if note is not None:
            model.check_name("The note", note, model.MAX_NOTE)
    except ConfigurationError as exc:
        raise click.UsageError(str(exc)) from exc
    with options.coordinator() as coordinator:
        number = coordinator.queue(queue).put(
            body,
            order=order,
            after=after,
            max_attempts=max_attempts,
            backoff=backoff,
            on_failure=on_failure,
            note=note,
        )
    if as_json:
        output.print_json({"queue": queue, "task_id": number})
    else:
        output.echo(str(number))


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"--json-body is not JSON: {exc}") from exc


# -- work -------------------------------------------------------------------------------------------------------------


@main.command(short_help="Carry out the tasks of a work queue.")
@click.argument("queue", type=_queue_name)
@click.option(
    "--workers",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="How many tasks run at a time.",
)
@click.option("--idle-exit", type=duration, help="Leave when nothing was to be done for so long.")
@click.option("--kinds", type=_kinds, metavar="KINDS", help="Carry out tasks of these kinds only: sql,shell,call.")
@click.option(
    "--modules",
    type=_modules,
    metavar="NAMES",
    help="Call functions of these Python modules only, and of those below them: etl,reports.daily.",
)
@click.option(
    "--path",
    "paths",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    metavar="FOLDER",
    help="Import functions from here, if they are nowhere else; may be repeated. Left out: the current folder.",
)
@click.option("--new", is_flag=True, help="Nothing has ever been put into this queue: do not warn of it.")
@pass_url_option
@connecting
def work(
    options: Connecting,
    queue: str,
    workers: int,
    idle_exit: float | None,
    kinds: Sequence[str] | None,
    modules: Sequence[str] | None,
    paths: Sequence[str],
    new: bool,
    pass_url: bool,
) -> int:
    """Carry out the tasks of a work queue, in the order in which they stand there.

    Run as many of these as you like, on as many hosts. On a terminal it shows what runs; elsewhere (and with -v) it
    writes a line when a task starts, and one when it ends.

    The first SIGINT (Ctrl-C) or SIGTERM: what runs is finished, then it leaves. The second: everything is given back at
    once; commands and SQL are ended, and so is Python code, with the process. Should it die in any other way, others
    run its tasks again. When the database is away, it goes on as soon as that is back (with --idle-exit: within that).

    Functions of --call tasks are imported from the current folder too, if they are nowhere else and nobody else can
    write to it. A task that --kinds or --modules exclude fails. Tasks that use sqlsem find the same database.

    \b
    Examples:
      sqlsem work nightly --workers 4
      sqlsem work nightly --idle-exit 30s     what a scheduled job runs

    \b
    Exit codes: 0 it left in order (failed tasks are in the queue, see
      `sqlsem tasks`), 69 the database is out of reach, 130 or 143 stopped
      by a second signal.
    """
    allowed = bodies.Allowed(kinds, modules, paths or _here())
    console = output.console()
    live = console.is_terminal and not options.verbose
    events: SimpleQueue[int | None] = SimpleQueue()
    with options.coordinator() as coordinator, _for_tasks(options, pass_url), _signals(events):
        if not new:
            _know_queue(coordinator, queue, warn=True)
        crew = _Crew(coordinator, queue, workers, idle_exit, allowed)
        with _picture(console, live) as picture, _task_log(options.verbose, console if live else None):
            code = _supervise(crew, events, picture)
        output.say(crew.summary())
        if crew.error is not None:
            raise crew.error
    return code


def _here() -> Sequence[str]:
    """The current folder, to import from."""
    if getattr(sys.flags, "safe_path", False):
        return ()
    try:
        here = os.getcwd()
        why = config.writable_by_others(Path(here))
    except FileNotFoundError:  # it was removed under us
        return ()
    if why is not None:
        output.say(f"warning: Nothing is imported from the current folder, as {why}; if it shall be: --path {here}")
        return ()
    return (here,)


@contextlib.contextmanager
def _for_tasks(options: Connecting, pass_url: bool) -> Iterator[None]:
    """While it lasts, Python functions that use sqlsem find our database, and so do commands if they may know it."""
    url = options.chosen_url
    before, configured = os.environ.get("SQLSEM_URL"), sqlsem._configured
    environment = config.environment(
        url, hand_on=pass_url or (options.url is not None and not config.has_password(url))
    )
    if "SQLSEM_URL" in environment:
        os.environ["SQLSEM_URL"] = environment["SQLSEM_URL"]
    sqlsem.configure(url, **options.options)
    try:
        yield
    finally:
        sqlsem.default().close()
        sqlsem._configured = configured
        if before is None:
            os.environ.pop("SQLSEM_URL", None)
        else:
            os.environ["SQLSEM_URL"] = before


def _know_queue(coordinator: Coordinator, queue: str, *, warn: bool) -> None:
    """The name of a queue without any task is perhaps another one's, misspelt: warn of it, or refuse it."""
    if coordinator.tasks(queue, most=1):
        return
    known = sorted({one.queue for one in coordinator.tasks(most=MANY)})
    listed = f"; there are {', '.join(known[:5])}{', …' if len(known) > 5 else ''}" if known else ""
    words = f"Nothing is known of a queue {queue!r}{config.nearest(queue, known)}{listed}"
    if not warn:
        raise ConfigurationError(f"{words}; if that is as it should be: --new")
    output.say(f"warning: {words}")


@contextlib.contextmanager
def _signals(events: SimpleQueue[int | None]) -> Iterator[None]:
    """Signals that shall stop us become events, while it lasts."""
    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
        number = getattr(signal, name, None)
        # What whoever started us ignores (nohup), stays ignored. SimpleQueue.put may be called in any handler.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda caught, _: events.put(caught))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _picture(console: Console, live: bool) -> Iterator[Live | None]:
    """A place on the terminal for what is drawn again and again, cleared in the end."""
    if not live:
        yield None
        return
    picture = Live(console=console, auto_refresh=False, transient=True)
    picture.start()
    try:
        yield picture
    finally:
        with contextlib.suppress(OSError):  # the terminal is gone
            picture.stop()


class _Above(logging.Handler):
    """Writes above the picture of a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """One record, one line."""
        try:
            self._console.print(Text(clean(self.format(record))))
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def _task_log(verbose: int, console: Console | None) -> Iterator[None]:
    """What a worker does, in lines on stderr; above a picture only what went wrong. With -v it is logged anyhow."""
    if verbose:
        yield
        return
    handler = logging.StreamHandler(sys.stderr) if console is None else _Above(console)
    handler.setFormatter(CleanFormatter("%(asctime)s %(message)s" if console is None else "%(message)s"))
    before = log.level
    log.setLevel(logging.INFO if console is None else logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@dataclass
class _Ahead:
    """What is known of the queue."""

    pending: list[TaskEntry] = field(default_factory=list)
    held_up: str = ""
    trouble: str = ""


class _Crew:
    """A worker in a thread of its own, and what is known of it."""

    def __init__(
        self,
        coordinator: Coordinator,
        queue: str,
        threads: int,
        idle_exit: float | None,
        allowed: bodies.Allowed | None = None,
    ) -> None:
        self.queue = tasks.Queue(queue, coordinator=coordinator)
        self.worker = tasks.Worker(
            self.queue, threads, idle_exit=idle_exit, on_task=self._on_task, allowed=allowed, outlast=True
        )
        self.error: BaseException | None = None
        self.ahead = _Ahead()
        self.over = threading.Event()
        self.at_once = False
        self.began = time.monotonic()
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._running: dict[int, tuple[tasks.Task, str]] = {}

    def run(self, events: SimpleQueue[int | None]) -> None:
        """Work until the end, which is an event."""
        try:
            self.worker.run()
        except BaseException as exc:
            self.error = exc
        finally:
            self.over.set()
            events.put(None)

    def _on_task(self, task: tasks.Task, outcome: str | None, _error: str | None) -> None:
        if outcome is None:
            with self._lock:
                self._running[task.id] = task, threading.current_thread().name
            log.info("Task %d started: %s", task.id, shortened(task.kind, task.text, task.note))
            return
        with self._lock:
            self._running.pop(task.id, None)
        if self.at_once and outcome == "lost":
            outcome = "given back"
        if outcome == "failed":
            return  # the worker has logged that, with the reason
        log.info("Task %d %s after %.1f s", task.id, outcome, model.monotonic() - task.began)

    def running(self) -> list[tuple[tasks.Task, str]]:
        """What runs, and in which thread: the oldest first."""
        with self._lock:
            return sorted(self._running.values(), key=lambda one: one[0].began)

    def look_ahead(self) -> None:
        """Thread: look now and then at what is pending, so that it costs little whatever the queue's size."""
        pause = 0.0
        while not self.over.wait(pause):
            began = time.monotonic()
            try:
                state = self.queue.state()
                held_up = ""
                if state.stuck:
                    held_up = f"Held up by task {state.failed}, which has failed; see: sqlsem tasks log {state.failed}"
                pending = self._coordinator.tasks(self.queue.name, "pending", most=SHOWN + 1) if state.pending else []
                self.ahead = _Ahead(pending, held_up)
            except SqlsemError as exc:
                self.ahead = _Ahead(trouble=str(exc))
            pause = max(LOOK, 20 * (time.monotonic() - began))

    def summary(self) -> str:
        """How many have ended, and how."""
        return f"{self.worker.finished} finished, {self.worker.failed} failed"


def _supervise(crew: _Crew, events: SimpleQueue[int | None], picture: Live | None) -> int:
    """Have the crew work, and mind signals, until it has left: the exit code. Does not return from a second signal."""
    worker = threading.Thread(target=crew.run, args=(events,), name="crew", daemon=True)
    worker.start()
    if picture is not None:
        threading.Thread(target=crew.look_ahead, name="look", daemon=True).start()
    told, drawn = False, picture
    while True:
        try:
            event = events.get(timeout=REFRESH)
        except Empty:
            if drawn is not None:
                try:
                    drawn.update(render_worker(crew, drawn.console.width, told), refresh=True)
                except OSError as exc:
                    log.info("The terminal is gone (%s); working on", exc)
                    drawn = None
            continue
        if event is None:
            worker.join()
            return 0
        if told or event == getattr(signal, "SIGHUP", None):  # with the terminal goes whoever could tell us again
            _leave_at_once(crew, events, event, picture)
        told = True
        crew.worker.stop()
        number = len(crew.running())
        what = f"finishing {number} task{'s' if number > 1 else ''}, then leaving" if number else "leaving"
        output.say(f"{what}; the same signal again gives everything back at once")


def _leave_at_once(crew: _Crew, events: SimpleQueue[int | None], number: int, picture: Live | None) -> NoReturn:
    """Give back what runs and end the process: Python code that runs cannot be ended in any other way."""
    if picture is not None:
        with contextlib.suppress(OSError):
            picture.stop()
    crew.at_once = True
    count = len(crew.running())
    aborting = threading.Thread(target=crew.worker.abort, name="abort", daemon=True)
    aborting.start()
    deadline = time.monotonic() + AT_MOST
    while aborting.is_alive() and time.monotonic() < deadline:
        aborting.join(0.02)
        with contextlib.suppress(Empty):
            if events.get_nowait() is not None:
                break  # the third signal
    output.say(f"{crew.summary()}, {count} given back")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(128 + number)


def render_worker(crew: _Crew, width: int, leaving: bool = False) -> RenderableType:
    """What ``sqlsem work`` shows on a terminal, at most ``width`` columns wide."""
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(clean(crew.queue.name), style="bold")
    running, ahead = crew.running(), crew.ahead
    pending = len(ahead.pending)
    title.append(f"  {len(running)} of {crew.worker.threads} busy, {crew.summary()}, ")
    title.append(f"{f'more than {SHOWN}' if pending > SHOWN else pending} pending")
    title.append(f"  {seconds_in_words(time.monotonic() - crew.began)}", style="dim")
    if leaving:
        title.append("  LEAVING", style="bold yellow")
    parts: list[RenderableType] = [title]
    now = model.monotonic()
    rows = [
        (str(t.id), "running", seconds_in_words(now - t.began), thread, shortened(t.kind, t.text, t.note))
        for t, thread in running
    ]
    rows += [
        (str(e.task_id), "pending", _until(e), "", shortened(e.kind, e.body, e.note)) for e in ahead.pending[:SHOWN]
    ]
    if rows:
        parts.append(_grid(("ID", "STATE", "FOR", "THREAD", "WHAT"), rows, width, 2, (3, 4), (0, 2), state=1))
    for words in (ahead.held_up, ahead.trouble):
        if words:
            parts.append(Text(f"  {clean(words)}", style="red", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


# -- tables -----------------------------------------------------------------------------------------------------------


def _grid(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    indent: int,
    elastic: Sequence[int],
    right: Iterable[int],
    *,
    state: int,
) -> RenderableType:
    """A table in which each row has the colour of its state."""
    natural = [max(Text(clean(row[column])).cell_len for row in [heads, *rows]) for column in range(len(heads))]
    table = _table(heads, rows, _fit(natural, width, indent, elastic), right)
    for shown, row in zip(table.rows, rows, strict=True):
        shown.style = STYLES.get(row[state], "")
    return Padding(table, (0, 0, 0, indent), expand=False)


def shortened(kind: str, body: str, note: str | None) -> str:
    """A task in a few words, on one line: its note, or what it does."""
    if note is not None:
        return note
    words = " ".join(body[:1000].split())
    if kind == "call":
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # others may have written it
            wanted = json.loads(body)
            given = [json.dumps(value, ensure_ascii=False) for value in wanted["args"]]
            given += [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in wanted["kwargs"].items()]
            words = f"{wanted['function']}({', '.join(given)})"
    elif kind == "shell":
        command = bodies.arguments(body)
        words = f"$ {words if command is None else shlex.join(command)}"
    return words if len(words) <= 200 else f"{words[:199]}…"


def _first_line(text: str | None) -> str:
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def _when(moment: datetime | None) -> str:
    """Local time; without the day where that is today."""
    if moment is None:
        return ""
    local = moment.astimezone()
    today = local.date() == datetime.now().astimezone().date()
    return local.strftime("%H:%M:%S" if today else "%m-%d %H:%M")


def _until(entry: TaskEntry) -> str:
    """How long until a pending task may start, about: by our clock."""
    left = (entry.ready_at - datetime.now(timezone.utc)).total_seconds()
    return f"in {seconds_in_words(left)}" if left > 0 else ""


# -- tasks ------------------------------------------------------------------------------------------------------------


@main.group(
    "tasks", cls=_Listing, invoke_without_command=True, short_help="Show the tasks of work queues; log, retry, cancel."
)
@click.argument("queue", required=False, type=_queue_name)
@click.option(
    "--queue", "also", type=_queue_name, metavar="QUEUE", help="The queue, should it be named like a command."
)
@click.option("--status", type=click.Choice(STATES), help="Only tasks in this state.")
@at_most(100)
@_json_option
@connecting
def tasks_(
    options: Connecting, queue: str | None, also: str | None, status: str | None, most: int, as_json: bool
) -> None:
    """Show the tasks of one queue or all: open ones in the order in which they will run, then those that have ended,
    the newest first.

    FOR is how long it ran, or has been running; of a pending one, when it may start, or which failed task it is behind.
    The worker of a task that is lost is dead; it will be run again. WHEN is when it was put, started or ended. TRIES
    counts the times it was started, of those it may be. WHO is the host and process that runs it.

    \b
    Examples:
      sqlsem tasks nightly
      sqlsem tasks --status failed
      sqlsem tasks nightly --json | jq '.[] | select(.seconds > 60)'
      sqlsem tasks log 17
    """
    if queue is not None and also is not None:
        raise click.UsageError("Name the queue once.")
    queue = queue or also
    with options.coordinator(looks=True) as coordinator:
        found = coordinator.tasks(queue, status, most=most + 1)
        failed = found
        if status == "pending" and found:
            failed = coordinator.tasks(queue, "failed", most=MANY)  # what they may wait for
    cut = f"There are more than these {most}; see them with --most." if len(found) > most else ""
    if as_json:
        output.print_json([one.as_dict() for one in found[:most]])
        if cut:
            output.say(cut)
        return
    console = output.console()
    output.show(console, render_tasks(found[:most], console.width, queue, failed))
    counts = counted(found[:most], at_least=bool(cut))
    if counts:
        output.echo("", *counts)
    if cut:
        output.echo(cut)


def counted(found: Sequence[TaskEntry], *, at_least: bool) -> list[str]:
    """How many tasks of each queue are in which state, in words."""
    numbers: dict[str, dict[str, int]] = {}
    for one in found:
        states = numbers.setdefault(one.queue, {})
        states[one.status] = states.get(one.status, 0) + 1
    order = ("running", "lost", *STATES)
    lines = []
    for name, states in numbers.items():
        told = [f"{states[state]} {state}" for state in dict.fromkeys((*order, *states)) if state in states]
        lines.append(f"{name}: {'at least ' if at_least else ''}{', '.join(told)}")
    return lines


def _holding_up(failed: Iterable[TaskEntry]) -> dict[str, TaskEntry]:
    """By queue, the first failed task that holds up all later orders."""
    found: dict[str, TaskEntry] = {}
    for one in failed:
        if one.status == "failed" and one.on_failure == "stop":
            before = found.get(one.queue)
            if before is None or (one.order, one.task_id) < (before.order, before.task_id):
                found[one.queue] = one
    return found


def render_tasks(
    found: Sequence[TaskEntry], width: int, only: str | None = None, failed: Iterable[TaskEntry] | None = None
) -> RenderableType:
    """What ``sqlsem tasks`` shows, at most ``width`` columns wide. ``failed``: among these are those that hold up."""
    if not found:
        return Text("There are no such tasks." if only is None else f"There are no such tasks in {only!r}.")
    heads = ["ID", "ORDER", "STATE", "TRIES", "FOR", "WHEN", "WHO", "WHAT"]
    rows = []
    holding_up = _holding_up(found if failed is None else failed)
    held_up: dict[int, int] = {}
    for one in found:
        tries = str(one.attempt) if one.max_attempts == 1 else f"{one.attempt}/{one.max_attempts}"
        lasted = _until(one) if one.status == "pending" else ""
        first = holding_up.get(one.queue)
        if one.status == "pending" and first is not None and one.order > first.order:
            lasted = f"after {first.task_id}"
            held_up[first.task_id] = held_up.get(first.task_id, 0) + 1
        if one.seconds is not None:
            lasted = seconds_in_words(one.seconds)
        when = (
            one.ended_at
            if one.ended_at is not None
            else one.claimed_at
            if one.status in ("running", "lost")
            else one.put_at
        )
        row = [str(one.task_id), str(one.order), one.status, tries, lasted, _when(when), who_is(one.host, one.pid)]
        rows.append([*row, shortened(one.kind, one.body, one.note)])
    elastic = [6, 7]
    if only is None:
        heads.insert(6, "QUEUE")
        for row, one in zip(rows, found, strict=True):
            row.insert(6, one.queue)
        elastic = [6, 7, 8]
    parts: list[RenderableType] = [_grid(heads, rows, width, 0, elastic, (0, 1, 4), state=2)]
    errors = [
        (one.task_id, _first_line(one.error)) for one in found if one.error and one.status in ("failed", "pending")
    ]
    if errors:
        parts.append(Text(""))
    for number, words in errors:
        # Not cut: the cause may stand at the end.
        told = Text(f"{number}: ", overflow="fold")
        parts.append(told.append(clean(words[:LONGEST_ERROR]), style="red"))
    for number, count in held_up.items():
        parts.append(
            Text(
                f"{count} pending task{'s wait' if count > 1 else ' waits'} for {number}, which has failed; see it "
                f"with: sqlsem tasks log {number}, then retry or cancel it",
                overflow="fold",
            )
        )
    return Group(*parts)


@tasks_.command("log", short_help="Show every attempt at a task.")
@click.argument("task_id", metavar="ID", type=click.IntRange(1))
@_json_option
@connecting
def tasks_log(options: Connecting, task_id: int, as_json: bool) -> int:
    """Show every attempt at a task: who, when, how long, how it ended, with its error or what it said.

    An attempt is running, finished, failed, lost (its worker died) or returned (given back unfinished).

    \b
    Examples:
      sqlsem tasks log 17
      sqlsem tasks log 17 --json | jq '.[-1].error'

    \b
    Exit codes: 0 there was something to show, 1 nothing.
    """
    with options.coordinator(looks=True) as coordinator:
        attempts = coordinator.attempts(task_id)
    if as_json:
        output.print_json([one.as_dict() for one in attempts])
    elif attempts:
        for one in attempts:
            _show_attempt(one)
    else:
        output.say(f"Task {task_id} has not been started yet, or there is none of that number; see: sqlsem tasks")
    return 0 if attempts else 1


def _show_attempt(one: Attempt) -> None:
    words = [f"Attempt {one.attempt}:", one.outcome]
    if one.seconds is not None:
        words.append(f"{'for' if one.outcome == 'running' else 'after'} {seconds_in_words(one.seconds)},")
    if one.started_at is not None:
        words.append(f"started {one.started_at.astimezone():%Y-%m-%d %H:%M:%S}")
    if one.host is not None:
        words.append(f"by {who_is(one.host, one.pid)}")
    if one.owner:
        words.append(f"({one.owner}{'' if one.session_id is None else f', session {one.session_id}'})")
    output.echo(clean(" ".join(words)))
    for text in (one.error, one.result):
        for line in (text or "").splitlines():
            output.echo(f"    {clean(line.expandtabs())}".rstrip())


@tasks_.command("retry", short_help="Make failed or cancelled tasks pending again.")
@click.argument("task_ids", metavar="ID...", nargs=-1, required=True, type=click.IntRange(1))
@connecting
def tasks_retry(options: Connecting, task_ids: Sequence[int]) -> int:
    """Make failed or cancelled tasks pending again, with all their attempts.

    \b
    Examples:
      sqlsem tasks retry 17
      sqlsem tasks retry $(sqlsem tasks --status failed --json | jq '.[].task_id')

    \b
    Exit codes: 0 done, 1 not all of them could be.
    """
    return _each(options, task_ids, Coordinator.retry_task, "is pending again")


@tasks_.command("cancel", short_help="Take pending or failed tasks out of their queue.")
@click.argument("task_ids", metavar="ID...", nargs=-1, required=True, type=click.IntRange(1))
@connecting
def tasks_cancel(options: Connecting, task_ids: Sequence[int]) -> int:
    """Take pending or failed tasks out of their queue: nobody runs them, and they hold nothing up any more.

    One that runs cannot be cancelled.

    \b
    Example:
      sqlsem tasks cancel 17 18

    \b
    Exit codes: 0 done, 1 not all of them could be.
    """
    return _each(options, task_ids, Coordinator.cancel_task, "was cancelled")


def _each(options: Connecting, task_ids: Sequence[int], change: Callable[[Coordinator, int], None], done: str) -> int:
    code = 0
    with options.coordinator(looks=True) as coordinator:
        for number in task_ids:
            try:
                change(coordinator, number)
            except NotHeld as exc:
                code = _fail(exc)
            else:
                output.echo(f"Task {number} {done}.")
    return code


@tasks_.command("wait", short_help="Wait until a queue's work is done.")
@click.argument("queue", type=_queue_name)
@click.option("--timeout", type=duration, help="Give up when that takes longer.")
@click.option("--new", is_flag=True, help="The queue may be one into which nothing has been put yet.")
@connecting
def tasks_wait(options: Connecting, queue: str, timeout: float | None, new: bool) -> int:
    """Wait until everything in a queue has ended, or is held up by a task that failed.

    \b
    Examples:
      sqlsem tasks wait nightly --timeout 6h && ./publish.sh

    \b
    Exit codes: 0 all is done, 1 a task has failed (unless it was put with
      --on-failure continue), 75 time is up, 78 nothing has ever been put
      into a queue of that name (--new: that is well).
    """
    with options.coordinator(looks=True) as coordinator:
        if not new:
            _know_queue(coordinator, queue, warn=False)
        try:
            coordinator.queue(queue).join(timeout)
        except TaskFailed as exc:
            return _fail(exc)
    return 0


# -- rounds -----------------------------------------------------------------------------------------------------------


@main.group("rounds", cls=_Listing, invoke_without_command=True, short_help="Show rounds and their parts; resume.")
@click.argument("name", required=False, type=_round_name)
@click.option("--name", "also", type=_round_name, metavar="NAME", help="The name, should it be that of a command.")
@at_most(20)
@_json_option
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


def render_rounds(found: Sequence[RoundEntry], width: int, only: str | None = None) -> RenderableType:
    """What ``sqlsem rounds`` shows, at most ``width`` columns wide."""
    if not found:
        return Text("There are no rounds." if only is None else f"There are no rounds {only!r}.")
    parts: list[RenderableType] = []
    for one in found:
        if parts:
            parts.append(Text(""))
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(f"{one.round_id}  ")
        title.append(clean(one.name), style="bold")
        title.append(f"  {one.status}", style={"succeeded": "green", "open": ""}.get(one.status, "red"))
        title.append(f"  {seconds_in_words(one.seconds)} of {seconds_in_words(one.window)}")
        if one.overdue:
            title.append("  OVERDUE", style="bold red")
        title.append(f"  opened {_when(one.opened_at)}", style="dim")
        parts.append(title)
        heads = ("PART", "STATE", "TRIES", "FOR", "STARTED", "WHO", "NOTE")
        rows = []
        for part in one.parts:
            note = _first_line(part.error)
            if part.missing_for is not None:
                note = f"[not found for {seconds_in_words(part.missing_for)}] {note}".rstrip()
            if part.is_last:
                note = f"the last {note}".rstrip()
            lasted = "" if part.seconds is None else seconds_in_words(part.seconds)
            cells = (part.part, part.status, str(part.attempt), lasted, _when(part.started_at))
            rows.append((*cells, who_is(part.host, part.pid), note))
        parts.append(_grid(heads, rows, width, 2, (0, 5, 6), (2, 3), state=1))
        if one.then_status != "none":
            parts.append(_continuation(one))
    return Group(*parts)


def _continuation(one: RoundEntry) -> Text:
    what = {"local": "a function", "session": "a session's own code"}.get(one.then_kind or "") or shortened(
        one.then_kind or "", one.then_body or "", None
    )
    then = Text(no_wrap=True, overflow="ellipsis")
    then.append(f"  then {clean(what)}: ")
    then.append(one.then_status, style={"failed": "red", "finished": "green"}.get(one.then_status, "yellow"))
    if one.then_seconds is not None:
        then.append(f" {'for' if one.then_status == 'running' else 'after'} {seconds_in_words(one.then_seconds)}")
    if one.then_error:
        then.append(f": {clean(_first_line(one.then_error))}", style="red")
    return then


@rounds_.command("resume", short_help="Run what a round's dead process left undone.")
@click.argument("which", required=False, metavar="[NAME|ID]")
@click.option("--name", type=_round_name, metavar="NAME", help="The name, should it be a number.")
@pass_url_option
@connecting
def rounds_resume(options: Connecting, which: str | None, name: str | None, pass_url: bool) -> int:
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
      no such round, or its continuation is not kept.
    """
    if which is not None and name is not None:
        raise click.UsageError("Say which round once.")
    with options.coordinator() as coordinator, _for_tasks(options, pass_url):
        coordinator.resources()  # the driver is there before anything can be imported from here
        sys.path.extend(one for one in _here() if one not in sys.path)
        wanted: list[int | str]
        if which is not None:
            wanted = [int(which) if re.fullmatch(r"[0-9]{1,18}", which) else _round_name(which)]
        elif name is not None:
            wanted = [name]
        else:
            found = rounds.list_rounds(coordinator, None, MANY)
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
                code = _fail(exc)
            except ConfigurationError as exc:
                if which is not None or name is not None:
                    raise
                code = _fail(exc)  # the others shall not suffer for it
        if not count and not code:
            output.echo("Nothing was left to do.")
    return code
