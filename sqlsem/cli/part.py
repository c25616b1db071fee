"""``sqlsem batch run``: runs a command as a part of a batch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import click

import sqlsem
from sqlsem import batches, config, tasks
from sqlsem.cli import supervisor
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import EXIT_LOST, WithCommand
from sqlsem.cli.here import running_callbacks
from sqlsem.cli.options import duration, name_of, names_of, pass_url_option, shared_option
from sqlsem.cli.run import require_program, starting
from sqlsem.ops.terminal import output
from sqlsem.util.threads import spawn
from sqlsem.values.batches import BatchEntry
from sqlsem.values.errors import BatchFailed, ConfigurationError, SqlsemError

#: How often the time of the last heartbeat is read, in seconds.
POLL_SECONDS = 0.25


@click.command("run", cls=WithCommand, short_help="Run a command as a part of a batch.")
@click.argument("name", type=name_of("The batch's name", "batch"))
@click.option("--part", required=True, type=name_of("The part's name"), metavar="PART", help="The part to run.")
@click.option(
    "--parts",
    type=names_of("The part's name"),
    metavar="PART,…",
    help="The names of all parts. Left out: those of the newest batch of this name.",
)
@click.option(
    "--window",
    type=duration,
    help="How long the batch may take from the start of its first part: 6h. Left out: as of the newest batch.",
)
@click.option("--callback-sql", metavar="TEXT", help="SQL to run when all parts have succeeded.")
@click.option("--callback-shell", metavar="COMMAND", help="A command for the shell, to run then.")
@click.option("--callback-call", metavar="MODULE:FUNCTION", help="A Python function without arguments, to call then.")
@click.option("--kill-after", type=duration, help="The time between SIGTERM and SIGKILL when the part is lost.")
@shared_option
@pass_url_option
@connecting
def batch_run(
    options: Connecting,
    /,
    name: str,
    part: str,
    parts: Sequence[str] | None,
    window: float | None,
    kill_after: float | None,
    shared: bool,
    pass_url: bool,
    **callbacks: str | None,
) -> int:
    """Run a command as a part of a batch. The part has succeeded if the command ends with 0. The last part to succeed
    runs the batch's callback here, once.

    The database keeps the parts and the window, so only the first call needs to name them. With a callback, every call
    that may begin a new batch must name all three: a callback is never taken over from an earlier batch. A part that
    failed may run again; it joins the same batch.

    The command is ended if the database is out of reach for so long that another process may start the part. Signals
    sent to sqlsem are passed on to the command.

    \b
    Examples:
      sqlsem batch run nightly --part a --parts a,b --window 6h -- ./a.sh
      sqlsem batch run nightly --part b -- ./b.sh
      sqlsem batch run load --part x --parts x,y --window 2h \\
        --callback-shell ./publish.sh -- ./x.sh

    \b
    Exit codes: that of the command, 128 + N when signal N ended it; else
      1   the command has succeeded, but that does not count (the window is
          over, or an operator has abandoned the batch); or the callback
          has failed
      64  wrong usage
      69  the database is out of reach
      76  the part was lost, so the command was ended
      78  the part runs already, the open batch has other parts, or there
          is no batch whose parts could be used
      126 the command cannot be executed
      127 there is no such command
    """
    command = click.get_current_context().meta["sqlsem.command"]
    if not command:
        raise click.UsageError("Say what to run: -- COMMAND ARGS.")
    callback = _named_callback(callbacks)
    require_program(command[0])
    kill_after = options.kill_after if kill_after is None else kill_after
    failures: list[BatchFailed] = []
    with running_callbacks(options, shared, pass_url) as coordinator:
        newest = next(iter(batches.list_batches(coordinator, name, 1)), None)
        declared = _declared(name, part, newest, parts, window, callback)
        batch = coordinator.batch(name, on_success=callback, on_failed=failures.append, **declared)
        environment = config.environment(options.chosen_url, hand_on=pass_url)
        run = _PartRun(coordinator, batch.part(part), supervisor.Job(command, environment, kill_after))
        if parts is None and newest is not None and newest.callback_kind is not None and callback is None:
            run.only_in = newest.batch_id
        try:
            return run.run()
        except BatchFailed as exc:
            failures = [failure for failure in failures if failure is not exc]
            raise
        finally:
            for failure in failures:
                output.say(str(failure))


def _named_callback(callbacks: Mapping[str, str | None]) -> Any:
    """Return the callback that the options name, or None."""
    kinds = {"callback_sql": tasks.Sql, "callback_shell": tasks.Shell, "callback_call": tasks.Call}
    named = [kinds[option](text) for option, text in callbacks.items() if text is not None]
    if len(named) > 1:
        raise click.UsageError("A batch has one callback: --callback-sql, --callback-shell or --callback-call.")
    return named[0] if named else None


def _declared(
    name: str, part: str, newest: BatchEntry | None, parts: Sequence[str] | None, window: float | None, callback: Any
) -> dict[str, Any]:
    """Return the parts and the window to declare: those of the options, else those of the newest batch."""
    if newest is None and (parts is None or window is None):
        raise ConfigurationError(
            f"There is no batch {name!r} yet, so name all its parts and its window: --parts a,b,c --window 6h",
            resource=name,
        )
    if newest is None:
        return {"parts": parts, "window": window}
    was_last = any(entry.part == part and entry.is_last for entry in newest.parts)
    continues = newest.status == "succeeded" and was_last and newest.callback_status in ("pending", "running", "failed")
    joins = continues or (newest.status in ("open", "failed") and not newest.overdue)
    if not joins and parts is None and callback is None and newest.callback_kind is not None:
        status = "expired" if newest.overdue else newest.status
        raise ConfigurationError(
            f"Batch {newest.batch_id} of {name!r} has ended ({status}), and its callback is not taken "
            f"over; to begin a new batch, name its parts, its window and its callback",
            resource=name,
        )
    return {
        "parts": [entry.part for entry in newest.parts] if parts is None else parts,
        "window": newest.window if window is None else window,
    }


class _PartRun:
    """One run of a command as a part.

    Attributes:
        only_in: If it is not None, the part must run in this batch: a new one would lack the callback.
    """

    only_in: int | None = None

    def __init__(self, coordinator: sqlsem.Coordinator, part: batches.Part, job: supervisor.Job) -> None:
        self._member = coordinator.client.member
        self._part = part
        self._job = job
        self._events: supervisor.Events = SimpleQueue()
        self._lost = False

    def run(self) -> int:
        """Run the command, and end the part; return the exit code."""
        ended = threading.Event()
        with starting(self._job.command[0]):
            try:
                with supervisor.signals_to(self._events):
                    spawn(lambda: self._watch(ended), "sqlsem-part")
                    status = supervisor.run_after(self._start, self._job, self._events)
            except OSError as exc:
                if self._part.is_open:
                    self._part.fail(exc)
                raise
            finally:
                ended.set()
        assert status is not None
        # The callback runs without our signal handlers: SIGTERM ends this process, and another may run the callback.
        if self._lost:
            return self._give_up()
        if status == 0:
            self._part.finish()
        else:
            self._part.fail(f"The command ended with status {status}")
        return status

    def _start(self) -> bool:
        self._part.start()
        if self.only_in is not None and self._part.batch_id != self.only_in:
            self._part.fail("its batch ended while it was started, and the new batch has no callback")
            raise ConfigurationError(
                f"{self._part.title} has begun a new batch, without a callback; abandon it, then name the parts, the "
                f"window and the callback: sqlsem batch abandon {self._part.batch_id}",
            )
        return True

    def _watch(self, ended: threading.Event) -> None:
        """End the command when another process may soon start the part. A thread runs this until ``ended`` is set."""
        while not ended.wait(POLL_SECONDS):
            if self._part.is_open and self._member.seconds_until_loss() == 0.0:
                self._member.verify()  # this process may only have been paused
                if self._member.seconds_until_loss() == 0.0:
                    self._lost = True
                    self._events.put(("lost", 0))
                    return

    def _give_up(self) -> int:
        text = "this process was out of the database's reach for longer than its grace, and has ended the command"
        try:
            self._part.fail(text)
        except SqlsemError as exc:
            output.print_error(exc)
        output.print_error(f"{self._part.title} was lost: {text}")
        return EXIT_LOST
