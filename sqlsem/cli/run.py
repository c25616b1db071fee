"""``sqlsem run``."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import click

import sqlsem
from sqlsem import config
from sqlsem.cli import supervisor
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import EXIT_LOST, EXIT_TEMPFAIL
from sqlsem.cli.options import duration, limited, pass_url_option, resource_name, staged
from sqlsem.errors import ConfigurationError, SqlsemError
from sqlsem.terminal import output
from sqlsem.terminal.tables import seconds_in_words, who_is

__all__ = ["run"]

log = logging.getLogger("sqlsem")


@click.command(
    short_help="Run a command while holding a lock.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option("--mutex", multiple=True, type=resource_name, metavar="NAME", help="One at a time.")
@click.option(
    "--limit",
    multiple=True,
    type=limited,
    metavar="NAME=N[:WEIGHT]",
    help="At most N at a time; WEIGHT counts for so many of them (1 if left out): etl=3, etl=10:4.",
)
@click.option("--read", multiple=True, type=resource_name, metavar="NAME", help="Beside other readers, but no writer.")
@click.option("--write", multiple=True, type=resource_name, metavar="NAME", help="Alone: no reader, no writer.")
@click.option(
    "--stage",
    multiple=True,
    type=staged,
    metavar="NAME=ORDER",
    help="Beside others of the same ORDER, after all earlier requests of another one: load=200.",
)
@click.option("--timeout", type=duration, help="Give up when the lock is not had in this time; 0 does not wait at all.")
@click.option("--note", help="Words for anyone who looks at the queue. Left out: the program's name.")
@click.option(
    "-E",
    "--conflict-exit-code",
    type=click.IntRange(0, 255),
    default=EXIT_TEMPFAIL,
    show_default=True,
    help="Exit code when the lock was not had in time.",
)
@click.option(
    "--lost-exit-code",
    type=click.IntRange(0, 255),
    default=EXIT_LOST,
    show_default=True,
    help="Exit code when the lock was lost.",
)
@click.option(
    "--kill-after",
    type=duration,
    help="When the lock is lost, the command gets SIGTERM, and so much later SIGKILL. A lock is declared lost a fifth "
    "of the grace, at most 1 second, before others are let in: stay well below that. Left out: half of it, 0.5 s with "
    "the usual grace.",
)
@pass_url_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@connecting
def run(
    options: Connecting,
    /,
    timeout: float | None,
    note: str | None,
    conflict_exit_code: int,
    lost_exit_code: int,
    kill_after: float | None,
    pass_url: bool,
    command: Sequence[str],
    **locks: Any,
) -> int:
    """Run a command while holding a lock: flock(1) for the whole company.

    Several locks are had all at once, so that two such commands never wait for each other. The command finds
    $SQLSEM_RESOURCE, $SQLSEM_POSITION and $SQLSEM_FENCE in its environment (of several locks, the first's). Signals
    sent to sqlsem go on to the command.

    When the lock is lost (the database was out of reach for too long, or an operator took it away), the command is
    ended, and everything it started: without a terminal, all of its session; on Linux its descendants and daemons too.
    So it is when sqlsem itself is killed. The lock is given back when the command ends; what that leaves in the
    background goes on without the lock.

    \b
    Examples:
      sqlsem run --limit etl=3 -- python load.py
      sqlsem run --mutex nightly --read dim_customer --timeout 10m -- ./load.sh
      sqlsem run --mutex cache --timeout 0 -E 0 -- ./refresh.sh   (or be content)

    \b
    Exit codes: that of the command, 128 + N when signal N ended it; else
      64  wrong usage
      69  the database is out of reach
      75  the lock was not had in time (-E chooses another)
      76  the lock was lost, so the command was ended (--lost-exit-code)
      78  configuration or schema
      126 the command cannot be executed
      127 there is no such command
    """
    wanted = _Wanted(**locks)
    if not wanted.names:
        raise click.UsageError("Say which lock: --mutex NAME, --limit NAME=N, --read, --write or --stage NAME=ORDER.")
    if status := _cannot_start(command[0]):
        return status
    note = os.path.basename(command[0])[:200] if note is None else note
    if kill_after is None:
        kill_after = min(1.0, options.life / 5) / 2
    events: supervisor.Events = SimpleQueue()
    with options.coordinator() as coordinator, supervisor.Signals(events):
        if not options.settings.embedded and not options.verbose and sys.stderr.isatty():
            output.say(f"locking {', '.join(map(repr, wanted.names))} in {coordinator.engine.where}")
        waiting = _Waiting(coordinator, command[0])
        if options.verbose:
            threading.Thread(target=waiting.tell, daemon=True).start()
        environment = config.environment(options.chosen_url, hand_on=pass_url)
        try:
            ended, lost = supervisor.run(
                functools.partial(wanted.lock, coordinator, note),
                supervisor.Job(command, environment, kill_after, waiting.had),
                coordinator=coordinator,
                events=events,
                timeout=timeout,
            )
        except supervisor.Stopped as exc:
            return 128 + exc.number
        except OSError as exc:
            if isinstance(exc, SqlsemError):
                raise
            output.print_error(f"{command[0]}: {exc.strerror}")
            return supervisor.NOT_FOUND if isinstance(exc, FileNotFoundError) else supervisor.CANNOT_RUN
        finally:
            waiting.over.set()
        if lost is not None:
            output.print_error(lost)
            return lost_exit_code
        if ended is not None:
            return ended
        words = f"not had within {timeout:g} s in {coordinator.engine.where}: {_in_the_way(coordinator, wanted.names)}"
        (output.say if conflict_exit_code else log.info)(words)  # who is content without it needs no mail about it
        return conflict_exit_code


@dataclass(frozen=True)
class _Wanted:
    """The locks that the command line names."""

    mutex: Sequence[str]
    limit: Sequence[tuple[str, int, int]]  # name, limit, weight
    read: Sequence[str]
    write: Sequence[str]
    stage: Sequence[tuple[str, int]]  # name, order

    @property
    def names(self) -> list[str]:
        """The resources."""
        limits, stages = (name for name, *_ in self.limit), (name for name, _ in self.stage)
        return [*self.mutex, *limits, *self.read, *self.write, *stages]

    def lock(
        self, coordinator: sqlsem.Coordinator, note: str, on_lost: Callable[[sqlsem.Grant], object]
    ) -> sqlsem.Lock:
        """All of them as one."""
        try:
            locks = [coordinator.mutex(name, note=note) for name in self.mutex]
            locks += [coordinator.limit(name, number, weight=weight, note=note) for name, number, weight in self.limit]
            locks += [coordinator.read(name, note=note) for name in self.read]
            locks += [coordinator.write(name, note=note) for name in self.write]
            locks += [coordinator.stage(name, order, note=note) for name, order in self.stage]
            return sqlsem.all_of(*locks, on_lost=on_lost)
        except ConfigurationError as exc:
            raise click.UsageError(str(exc)) from exc


def _in_the_way(coordinator: sqlsem.Coordinator, wanted: Sequence[str]) -> str:
    """Who is ahead of a request that was not granted, in words."""
    told = []
    try:
        paused = {one.resource for one in coordinator.resources() if one.paused}
        for name in wanted:
            entries = coordinator.entries(name)
            if name in paused:
                told.append(f"{name!r} is paused")
            elif entries:
                first = entries[0]
                who = who_is(first.host, first.pid, first.requesting_id)
                what = first.program if first.note in (None, first.program) else first.note
                state = "waits" if first.state == "waits" else "is in"
                more = f", and {len(entries) - 1} more" if len(entries) > 1 else ""
                about = f" ({what})" if what else ""
                told.append(f"{name!r}: {who}{about} {state} for {seconds_in_words(first.seconds)}{more}")
    except SqlsemError as exc:
        log.info("cannot see the queue: %s", exc)
    return "; ".join(told) or "anyone who was ahead has just left"


def _cannot_start(program: str) -> int:
    """Look before the wait, which may be long: 127 or 126 when there is no such program, else 0."""
    if shutil.which(program) is not None:
        return 0
    exists = os.path.dirname(program) and os.path.exists(program)
    output.print_error(f"{program}: {'cannot be executed' if exists else 'no such command'}")
    return supervisor.CANNOT_RUN if exists else supervisor.NOT_FOUND


class _Waiting:
    """What the log says of our wait."""

    def __init__(self, coordinator: sqlsem.Coordinator, program: str) -> None:
        self.over = threading.Event()
        self._coordinator = coordinator
        self._program = program

    def had(self, grant: sqlsem.Grant, pid: int) -> None:
        """It has come to its end."""
        self.over.set()
        places = ", ".join(f"{name} at {position}" for name, position in grant.positions.items())
        log.info("had %s after %.1f s; started %s as process %d", places, grant.waited, self._program, pid)

    def tell(self) -> None:
        """Thread of ``run -v``: who is ahead, whenever that has changed."""
        told, pause = "", 0.25
        while not self.over.wait(pause):
            pause = min(pause * 1.5, 5.0)
            try:
                text = self._place()
            except SqlsemError as exc:
                log.info("cannot see the queue: %s", exc)
                continue
            if text and text != told and not self.over.is_set():
                told = text
                log.info("waiting for %s", text)

    def _place(self) -> str:
        """Where we stand, in words."""
        waits = []
        entries = self._coordinator.entries()
        for entry in entries:
            if (entry.host, entry.pid, entry.state) == (socket.gethostname(), os.getpid(), "waits"):
                ahead = [e for e in entries if e.resource == entry.resource and e.position < entry.position]
                waits.append(f"{entry.resource!r} at position {entry.position}, behind {len(ahead)}")
        return "; ".join(waits)
