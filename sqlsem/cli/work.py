"""``sqlsem work``: runs a worker, shows its state on a terminal, and stops it on signals."""

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
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

import sqlsem
from sqlsem import bodies, tasks
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.here import folders_to_import_from, require_own_database, same_database
from sqlsem.cli.known import unknown_queue
from sqlsem.cli.options import duration, name_of, pass_url_option, shared_option
from sqlsem.cli.signals import handled
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.tables import Column, seconds_in_words, table
from sqlsem.ops.terminal.tasks import ready_in, shortened
from sqlsem.util.printable import CleanFormatter, clean
from sqlsem.util.threads import SupervisedThread, spawn
from sqlsem.values import locks
from sqlsem.values.errors import SqlsemError
from sqlsem.values.tasks import TaskEntry

if TYPE_CHECKING:
    from rich.live import Live

log = logging.getLogger("sqlsem")

#: The pause between two drawings, and the least pause between two polls of the queue.
DRAW_SECONDS, POLL_SECONDS = 0.25, 1.0
#: The share of time that polling the queue may take.
POLL_SHARE = 1 / 20
#: The signals that stop the worker.
STOPPING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
#: How many pending tasks are shown.
SHOWN = 5
#: How long a worker may take to return its tasks after a second signal.
ABORT_SECONDS = 15.0


def _kinds(value: str) -> Sequence[str]:
    """Parse ``KIND,KIND``."""
    kinds = value.split(",")
    if not set(kinds) <= {"sql", "shell", "call"}:
        raise click.BadParameter(f"{value!r} is not a list of sql, shell, call")
    return kinds


def _modules(value: str) -> Sequence[str]:
    """Parse ``MODULE,MODULE``."""
    modules = value.split(",")
    if not all(part.isidentifier() for module in modules for part in module.split(".")):
        raise click.BadParameter(f"{value!r} is not a list of names of Python modules")
    return modules


@click.command(short_help="Run the tasks of a work queue.")
@click.argument("queue", type=name_of("The queue's name", "queue"))
@click.option(
    "--workers",
    type=click.IntRange(1, 1000),
    default=1,
    metavar="N",
    help="How many tasks run at a time.",
)
@click.option("--idle-exit", type=duration, help="Exit when there was no task for this time.")
@click.option("--kinds", type=_kinds, metavar="KINDS", help="Run only tasks of these kinds: sql,shell,call.")
@click.option(
    "--modules",
    type=_modules,
    metavar="NAMES",
    help="Call only functions of these Python modules and their submodules: etl,reports.daily.",
)
@click.option(
    "--path",
    "paths",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    metavar="FOLDER",
    help="Import functions also from this folder, after all others; may be repeated. Left out: the current folder.",
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
    """Run the tasks of a work queue, in its order.

    Run any number of workers, on any number of hosts. On a terminal the worker shows its tasks; elsewhere (and with -v)
    it writes a line when a task starts, and one when it ends.

    After the first SIGINT (Ctrl-C) or SIGTERM the worker finishes the running tasks, then exits. After the second it
    returns all tasks to the queue at once: commands and SQL are ended, and Python code ends with the process. If a
    worker dies, others run its tasks again. During an outage of the database the worker waits (with --idle-exit: up to
    that time).

    Functions of --call tasks are imported also from the current folder, after all others, unless other users can write
    to it. A task that --kinds or --modules exclude fails. Tasks that use sqlsem find the same database.

    \b
    Examples:
      sqlsem work nightly --workers 4
      sqlsem work nightly --idle-exit 30s     what a scheduled job runs
      sqlsem work nightly --idle-exit 30s --fail-on-error

    \b
    Exit codes: 0 done (failed tasks are in the queue, see `sqlsem tasks`),
      1 with --fail-on-error: a task that ran here has failed for good,
      69 the database is out of reach, 78 others can write the SQLite file,
      130 or 143 stopped by a second signal.
    """
    allowed = bodies.Allowed(kinds, modules, paths or folders_to_import_from())
    console = output.console()
    live = console.is_terminal and not options.verbose
    events: SimpleQueue[int | None] = SimpleQueue()
    with (
        options.coordinator(runs="tasks") as coordinator,
        same_database(options, pass_url),
        handled(STOPPING, events.put),
    ):
        require_own_database(coordinator, shared)
        if not allow_new:
            words = unknown_queue(coordinator, queue)
            if words is not None:
                output.say(f"warning: {words}")
        crew = Crew(coordinator, queue, workers, idle_exit, allowed)
        # The picture is drawn again and again, and cleared at the end.
        drawing = output.picture(console, transient=True) if live else contextlib.nullcontext()
        with drawing as picture, _task_log(options.verbose, console if live else None):
            code = _supervise(crew, events, picture)
        output.say(crew.summary())
        if crew.error is not None:
            raise crew.error
    return 1 if fail_on_error and code == 0 and crew.worker.failed else code


class _LogAbovePicture(logging.Handler):
    """Writes log records above the picture on a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line."""
        try:
            self._console.print(Text(clean(self.format(record))))
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def _task_log(verbose: int, console: Console | None) -> Iterator[None]:
    """Log what a worker does on stderr; above a picture only warnings. (With -v it is logged anyhow.)"""
    if verbose:
        yield
        return
    handler = logging.StreamHandler(sys.stderr) if console is None else _LogAbovePicture(console)
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
class QueueView:
    """The shown state of the queue: its next pending tasks, the failed task that holds it up, an error."""

    pending: list[TaskEntry] = field(default_factory=list)
    held_up: str = ""
    error: str = ""


class Crew:
    """A worker in a thread of its own, its running tasks, and the state of its queue."""

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
        self.view = QueueView()
        self.ended = threading.Event()
        self.aborted = False
        self.began = time.monotonic()
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._running: dict[int, tuple[tasks.Task, str]] = {}

    def run(self, events: SimpleQueue[int | None]) -> None:
        """Run the worker; put None into ``events`` at its end."""
        try:
            self.worker.run()
        except BaseException as exc:
            self.error = exc
        finally:
            self.ended.set()
            events.put(None)

    def _on_task(self, task: tasks.Task, outcome: str | None, _error: str | None) -> None:
        if outcome is None:
            with self._lock:
                self._running[task.id] = task, threading.current_thread().name
            log.info("Task %d started: %s", task.id, shortened(task.kind, task.text, task.note))
            return
        with self._lock:
            self._running.pop(task.id, None)
        if self.aborted and outcome == "lost":
            outcome = "given back"
        if outcome == "failed":
            return  # the worker has logged it with the reason
        log.info("Task %d %s after %.1f s", task.id, outcome, locks.monotonic() - task.began)

    def running(self) -> list[tuple[tasks.Task, str]]:
        """Return the running tasks with their threads' names, the oldest first."""
        with self._lock:
            return sorted(self._running.values(), key=lambda entry: entry[0].began)

    def poll_queue(self) -> None:
        """Update the view of the queue until the end. Uses up to `POLL_SHARE` of the time, for any size of queue."""
        pause = 0.0
        while not self.ended.wait(pause):
            began = time.monotonic()
            try:
                state = self.queue.state()
                held_up = ""
                if state.stuck:
                    held_up = f"Held up by task {state.failed}, which has failed; see: sqlsem tasks log {state.failed}"
                pending = (
                    self._coordinator.admin.tasks(self.queue.name, "pending", maximum=SHOWN + 1)
                    if state.pending
                    else []
                )
                self.view = QueueView(pending, held_up)
            except SqlsemError as exc:
                self.view = QueueView(error=str(exc))
            pause = max(POLL_SECONDS, (time.monotonic() - began) / POLL_SHARE)

    def summary(self) -> str:
        """Return how many tasks have finished and failed, and how many attempts were tried again, as text."""
        text = f"{self.worker.finished} finished, {self.worker.failed} failed"
        return f"{text}, {self.worker.retried} tried again" if self.worker.retried else text


def _supervise(crew: Crew, events: SimpleQueue[int | None], picture: Live | None) -> int:
    """Run the worker and handle signals until it has ended; return the exit code. A second signal ends the process."""
    worker = spawn(partial(crew.run, events), "crew")
    if picture is not None:
        poller = SupervisedThread("queue-poll", lambda _: crew.poll_queue(), crew.ended)
        poller.begin()
    stopping = False
    while True:
        try:
            event = events.get(timeout=DRAW_SECONDS)
        except Empty:
            if picture is not None and not output.is_gone():  # the worker goes on without its picture
                picture.update(render_worker(crew, picture.console.width, stopping), refresh=True)
            continue
        if event is None:
            worker.join()
            return 0
        if stopping or event == getattr(signal, "SIGHUP", None):  # without a terminal there is no second Ctrl-C
            _abort(crew, events, event, picture)
        stopping = True
        crew.worker.stop()
        number = len(crew.running())
        action = f"finishing {number} task{'s' if number > 1 else ''}, then leaving" if number else "leaving"
        output.say(f"{action}; the same signal again returns all tasks to the queue at once")


def _abort(crew: Crew, events: SimpleQueue[int | None], number: int, picture: Live | None) -> NoReturn:
    """Return all tasks to the queue, and end the process, as running Python code cannot be ended otherwise."""
    if picture is not None:
        picture.stop()
    crew.aborted = True
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


#: The tasks of a worker, each as the texts of its cells.
TASKS: tuple[Column[tuple[str, ...]], ...] = (
    Column("ID", itemgetter(0), right=True),
    Column("STATE", itemgetter(1)),
    Column("FOR", itemgetter(2), right=True),
    Column("THREAD", itemgetter(3), elastic=True),
    Column("WHAT", itemgetter(4), elastic=True),
)


def render_worker(crew: Crew, width: int, leaving: bool = False) -> RenderableType:
    """Return the state of a worker for a terminal, at most ``width`` columns wide."""
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(clean(crew.queue.name), style="bold")
    running, view = crew.running(), crew.view
    pending = len(view.pending)
    title.append(f"  {len(running)} of {crew.worker.threads} busy, {crew.summary()}, ")
    title.append(f"{f'more than {SHOWN}' if pending > SHOWN else pending} pending")
    title.append(f"  {seconds_in_words(time.monotonic() - crew.began)}", style="dim")
    if leaving:
        title.append("  LEAVING", style="bold yellow")
    parts: list[RenderableType] = [title]
    now = locks.monotonic()
    rows = [
        (str(t.id), "running", seconds_in_words(now - t.began), thread, shortened(t.kind, t.text, t.note))
        for t, thread in running
    ]
    rows += [
        (str(e.task_id), "pending", ready_in(e), "", shortened(e.kind, e.body, e.note)) for e in view.pending[:SHOWN]
    ]
    if rows:
        parts.append(table(TASKS, rows, width, indent=2))
    for text in (view.held_up, view.error):
        if text:
            parts.append(Text(f"  {clean(text)}", style="red", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)
