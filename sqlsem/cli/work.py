"""``sqlsem work``: a worker, and its picture on a terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

import sqlsem
from sqlsem import bodies, model, tasks
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.here import folders_to_import_from, require_own_database, same_database
from sqlsem.cli.known import unknown_queue
from sqlsem.cli.options import duration, name_of, pass_url_option, shared_option
from sqlsem.core.threads import SupervisedThread, spawn
from sqlsem.errors import SqlsemError
from sqlsem.model import TaskEntry
from sqlsem.printable import CleanFormatter, clean
from sqlsem.terminal import output
from sqlsem.terminal.tables import fit, seconds_in_words, table
from sqlsem.terminal.tasks import ready_in, shortened

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["work"]

log = logging.getLogger("sqlsem")

#: Between two pictures of a worker, and the least between two looks at what is pending.
PICTURE_SECONDS, LOOK_SECONDS = 0.25, 1.0
#: The part of its time that looking at what is pending may take.
LOOK_SHARE = 1 / 20
#: Pending tasks that a worker shows.
SHOWN = 5
#: In which a worker that is told twice to stop has given back what it can.
ABORT_SECONDS = 15.0


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


@click.command(short_help="Carry out the tasks of a work queue.")
@click.argument("queue", type=name_of("The queue's name"))
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
@click.option("--fail-on-error", is_flag=True, help="Exit with 1 when a task that ran here has failed for good.")
@click.option("--allow-new", is_flag=True, help="Do not warn of a queue that has never had a task.")
@shared_option
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
    fail_on_error: bool,
    allow_new: bool,
    shared: bool,
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
      sqlsem work nightly --idle-exit 30s --fail-on-error

    \b
    Exit codes: 0 it left in order (failed tasks are in the queue, see
      `sqlsem tasks`), 1 with --fail-on-error: a task that ran here has
      failed and is tried no more, 69 the database is out of reach, 78 others
      can write the SQLite file, 130 or 143 stopped by a second signal.
    """
    allowed = bodies.Allowed(kinds, modules, paths or folders_to_import_from())
    console = output.console()
    live = console.is_terminal and not options.verbose
    events: SimpleQueue[int | None] = SimpleQueue()
    with options.coordinator(runs="tasks") as coordinator, same_database(options, pass_url), _signals(events):
        require_own_database(coordinator, shared)
        if not allow_new:
            words = unknown_queue(coordinator, queue)
            if words is not None:
                output.say(f"warning: {words}")
        crew = Crew(coordinator, queue, workers, idle_exit, allowed)
        with _picture(console, live) as picture, _task_log(options.verbose, console if live else None):
            code = _supervise(crew, events, picture)
        output.say(crew.summary())
        if crew.error is not None:
            raise crew.error
    return 1 if fail_on_error and code == 0 and crew.worker.failed else code


@contextlib.contextmanager
def _signals(events: SimpleQueue[int | None]) -> Iterator[None]:
    """Signals that shall stop us become events, while it lasts."""
    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
        number = getattr(signal, name, None)
        # What anyone who started us ignores (nohup), stays ignored. SimpleQueue.put may be called in any handler.
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
    picture = output.picture(console, transient=True)
    picture.start()
    try:
        yield picture
    finally:
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
class Ahead:
    """What is known of the queue."""

    pending: list[TaskEntry] = field(default_factory=list)
    held_up: str = ""
    trouble: str = ""


class Crew:
    """A worker in a thread of its own, and what is known of it."""

    def __init__(
        self,
        coordinator: sqlsem.Coordinator,
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
        self.ahead = Ahead()
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
                pending = (
                    self._coordinator.admin.tasks(self.queue.name, "pending", most=SHOWN + 1) if state.pending else []
                )
                self.ahead = Ahead(pending, held_up)
            except SqlsemError as exc:
                self.ahead = Ahead(trouble=str(exc))
            pause = max(LOOK_SECONDS, (time.monotonic() - began) / LOOK_SHARE)

    def summary(self) -> str:
        """Say how many tasks have ended, and how; and how many attempts had to be followed by another one."""
        words = f"{self.worker.finished} finished, {self.worker.failed} failed"
        return f"{words}, {self.worker.retried} tried again" if self.worker.retried else words


def _supervise(crew: Crew, events: SimpleQueue[int | None], picture: Live | None) -> int:
    """Have the crew work, and mind signals, until it has left: the exit code. Does not return from a second signal."""
    worker = spawn(partial(crew.run, events), "crew")
    if picture is not None:
        looking = SupervisedThread("look", lambda _: crew.look_ahead(), crew.over)
        looking.begin()
    told = False
    while True:
        try:
            event = events.get(timeout=PICTURE_SECONDS)
        except Empty:
            if picture is not None and not output.is_gone():  # the work goes on without its picture
                picture.update(render_worker(crew, picture.console.width, told), refresh=True)
            continue
        if event is None:
            worker.join()
            return 0
        if told or event == getattr(signal, "SIGHUP", None):  # with the terminal goes anyone who could tell us again
            _leave_at_once(crew, events, event, picture)
        told = True
        crew.worker.stop()
        number = len(crew.running())
        what = f"finishing {number} task{'s' if number > 1 else ''}, then leaving" if number else "leaving"
        output.say(f"{what}; the same signal again gives everything back at once")


def _leave_at_once(crew: Crew, events: SimpleQueue[int | None], number: int, picture: Live | None) -> NoReturn:
    """Give back what runs and end the process: Python code that runs cannot be ended in any other way."""
    if picture is not None:
        picture.stop()
    crew.at_once = True
    count = len(crew.running())
    aborting = spawn(crew.worker.abort, "abort")
    deadline = time.monotonic() + ABORT_SECONDS
    while aborting.is_alive() and time.monotonic() < deadline:
        aborting.join(0.02)
        with contextlib.suppress(Empty):
            if events.get_nowait() is not None:
                break  # the third signal
    output.say(f"{crew.summary()}, {count} given back")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(128 + number)


def render_worker(crew: Crew, width: int, leaving: bool = False) -> RenderableType:
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
        (str(e.task_id), "pending", ready_in(e), "", shortened(e.kind, e.body, e.note)) for e in ahead.pending[:SHOWN]
    ]
    if rows:
        heads = ("ID", "STATE", "FOR", "THREAD", "WHAT")
        widths = fit(heads, rows, width, elastic=(3, 4), indent=2)
        parts.append(table(heads, rows, widths, right=(0, 2), state=1, indent=2))
    for words in (ahead.held_up, ahead.trouble):
        if words:
            parts.append(Text(f"  {clean(words)}", style="red", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)
