"""``sqlsem run``: the options of the command, and its messages. `supervisor` runs the command under the lock."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import click

import sqlsem
from sqlsem import config
from sqlsem.cli import supervisor
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import EXIT_LOST, EXIT_TEMPFAIL
from sqlsem.cli.options import (
    Named,
    duration,
    limited,
    name_of,
    pass_url_option,
    periodic,
    rated,
    resource_name,
    staged,
)
from sqlsem.cli.progress import wait_shown
from sqlsem.client.effects import run_generator
from sqlsem.client.held.registry import LostCallback
from sqlsem.client.once import Period
from sqlsem.client.operations.terms import own_mutex
from sqlsem.client.operations.timeout_details import blockers_in_words, read_blockers
from sqlsem.client.options import LockOptions
from sqlsem.ops.terminal import output
from sqlsem.util.printable import clean
from sqlsem.values.errors import ConfigurationError, LockLost, SqlsemError
from sqlsem.values.locks import Duration
from sqlsem.values.rates import RateRequest

log = logging.getLogger("sqlsem")
#: The time between SIGTERM and SIGKILL for a leader's command that steps down. It still holds the lock.
STEP_DOWN_SECONDS = 10.0


@click.command(
    short_help="Run a command while holding a lock.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option("--mutex", multiple=True, type=resource_name, metavar="NAME", help="One at a time.")
@click.option(
    "--limit",
    multiple=True,
    type=Named(limited, "resource"),
    metavar="NAME[=N[:WEIGHT]]",
    help="At most N at a time; WEIGHT counts for so many of them (1 if left out): etl=3, etl=10:4. Without N the limit "
    "is the one that `sqlsem set` has set: etl, etl=:4.",
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
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=rated,
    metavar="NAME=N/TIME[:COST]",
    help="At most N in any TIME, by all processes together: api=100/1m, api=10/1s,1000/1h:7 (two windows; this takes "
    "7). Taken after the locks are granted.",
)
@click.option(
    "--once-per",
    type=periodic,
    metavar="[NAME=]DURATION",
    help="Run once in each period, on any number of hosts. If the command fails, another process may run it. If it is "
    "done already, the exit code is 0. Periods are multiples of DURATION since 1970 in UTC. NAME identifies the job; "
    "left out, the name of the one lock: report=1d, 6h.",
)
@click.option(
    "--offset",
    type=duration,
    default="0",
    show_default=False,
    help="Moves the beginning of the periods: 6h, with 1d, is at 6:00 UTC.",
)
@click.option(
    "--adopt",
    is_flag=True,
    help="Take over the lock that was handed over (grant.hand_over()) under the token in $SQLSEM_TOKEN, which the "
    "command does not see.",
)
@click.option(
    "--join",
    is_flag=True,
    help="Run under the lock of the parent sqlsem run. When the parent's command ends, this one is ended, too; only "
    "then the lock is released. Does not connect to the database.",
)
@click.option(
    "--leader",
    type=name_of("The leader's name", "leader"),
    metavar="NAME",
    help="Elect a leader among all processes of this NAME. The command runs in each term of this process; it is ended "
    "when the term ends. SIGTERM ends the command and the term, and another process leads. Others see --note.",
)
@click.option("--timeout", type=duration, help="Give up when the lock is not granted within this time; 0: do not wait.")
@click.option(
    "--priority",
    type=click.IntRange(0, 99),
    help="Higher first, on a resource with priorities (sqlsem set NAME --priorities). Only for one lock.",
)
@click.option("--note", help="A text that lists of the queue show. Left out: the program's name.")
@click.option(
    "-E",
    "--conflict-exit-code",
    type=click.IntRange(0, 255),
    default=EXIT_TEMPFAIL,
    help="Exit code when the lock was not granted in time.",
)
@click.option(
    "--lost-exit-code",
    type=click.IntRange(0, 255),
    default=EXIT_LOST,
    help="Exit code when the lock was lost.",
)
@click.option(
    "--kill-after",
    type=duration,
    help="The time between SIGTERM and SIGKILL when the lock is lost. A lock is declared lost a fifth of the grace, at "
    "most 1 second, before another process is granted it: stay well below that. Left out: half of it, 0.5 s with the "
    "usual grace.",
)
@pass_url_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@connecting
def run(options: Connecting, /, command: Sequence[str], **given: Any) -> int:
    """Run a command while holding a lock: flock(1) for the whole company.

    Several locks are acquired together, so two such commands never wait for each other. The command finds
    $SQLSEM_RESOURCE, $SQLSEM_POSITION and $SQLSEM_FENCE in its environment (for several locks, the first one's).
    Signals sent to sqlsem are passed on to the command.

    When the lock is lost (the database was out of reach for too long, or an operator revoked it), the command is
    ended with everything it started: without a terminal, all of its session; on Linux its descendants and daemons,
    too. The same happens if sqlsem itself is killed. The lock is released when the command ends; processes that it
    leaves in the background go on without the lock.

    \b
    Examples:
      sqlsem run --limit etl=3 -- python load.py
      sqlsem run --mutex nightly --read dim_customer --timeout 10m -- ./load.sh
      sqlsem run --mutex cache --timeout 0 -E 0 -- ./refresh.sh   (or be content)
      sqlsem run --mutex etl --priority 9 -- ./urgent.sh
      sqlsem run --rate api=100/1m -- ./ask.sh      (at its turn; holds nothing)
      sqlsem run --once-per report=1d -- ./report.sh    (on every host, by cron)
      sqlsem run --adopt -- ./job.sh    (with the token in $SQLSEM_TOKEN)
      sqlsem run --join -- ./part.sh &  (in a script that sqlsem run runs)
      sqlsem run --leader scheduler -- ./scheduler      (on every host)

    \b
    Exit codes: that of the command, 128 + N when signal N ended it; else
      64  wrong usage
      69  the database is out of reach
      75  the lock was not granted in time (-E chooses another)
      76  the lock was lost, so the command was ended (--lost-exit-code)
      78  configuration or schema
      126 the command cannot be executed
      127 there is no such command
    """
    run_options = _RunOptions(**{name: given.pop(name) for name in [field.name for field in fields(_RunOptions)]})
    lock_options = _LockOptions(**given)
    lock_options.require_one(run_options)
    require_program(command[0])
    kill_after = options.kill_after if run_options.kill_after is None else run_options.kill_after
    events: supervisor.Events = SimpleQueue()
    if run_options.join:
        return _run_joined(supervisor.Job(command, os.environ, kill_after), events, run_options.lost_exit_code)
    token = os.environ.pop("SQLSEM_TOKEN", None)
    with options.coordinator() as coordinator, supervisor.signals_to(events):
        if not (options.settings.embedded or options.verbose or options.quiet) and sys.stderr.isatty():
            names = [run_options.leader] if run_options.leader else lock_options.resources
            output.say(f"locking {', '.join(map(repr, names))} in {coordinator.engine.label}")
        environment = config.environment(options.chosen_url, hand_on=run_options.pass_url)
        note = clean(os.path.basename(command[0]))[:200] if run_options.note is None else run_options.note
        with wait_shown(coordinator, is_verbose=bool(options.verbose), is_quiet=options.quiet) as end_wait:
            job = supervisor.Job(command, environment, kill_after, end_wait, partial(_log_start, command[0]))
            if run_options.leader is not None:
                kill_after_sigterm = STEP_DOWN_SECONDS if run_options.kill_after is None else run_options.kill_after
                job = replace(job, step_down=supervisor.StepDown(kill_after_sigterm))
                return _lead(run_options.leader, note, job, coordinator, events)
            return _hold(job, coordinator, events, lock_options, run_options, note, token)


def _log_start(program: str, grant: sqlsem.Grant, pid: int) -> None:
    positions = ", ".join(f"{name!r} at {position}" for name, position in grant.positions.items())
    log.info("Started %s as process %d under %s", program, pid, positions)


@contextlib.contextmanager
def starting(program: str) -> Iterator[None]:
    """A context in which a command is started. Ends sqlsem with the exit code for a command that cannot be started, or
    for a signal that arrived before the command was started.
    """
    try:
        yield
    except supervisor.Stopped as exc:
        raise click.exceptions.Exit(128 + exc.number) from exc
    except OSError as exc:
        if isinstance(exc, SqlsemError):
            raise
        output.print_error(f"{program}: {exc.strerror}")
        exists = not isinstance(exc, FileNotFoundError)
        raise click.exceptions.Exit(supervisor.CANNOT_RUN if exists else supervisor.NOT_FOUND) from exc


def require_program(program: str) -> None:
    """End sqlsem with 127 or 126 if the program cannot be started. (Checked before the wait, which may be long.)"""
    if shutil.which(program) is None:
        exists = os.path.dirname(program) and os.path.exists(program)
        output.print_error(f"{program}: {'cannot be executed' if exists else 'no such command'}")
        raise click.exceptions.Exit(supervisor.CANNOT_RUN if exists else supervisor.NOT_FOUND)


def _run_joined(job: supervisor.Job, events: supervisor.Events, lost_exit_code: int) -> int:
    with supervisor.signals_to(events), starting(job.command[0]):
        status, over = supervisor.run_joined(job, events)
    if over:
        output.print_error("the lock that was joined has ended, and so the command was ended")
        return lost_exit_code
    return status


def _lead(name: str, note: str, job: supervisor.Job, coordinator: sqlsem.Coordinator, events: supervisor.Events) -> int:
    """Run the command in each term of this leader; return the exit code."""
    coordinator.leader(name, note).current()  # fails at once if the database is out of reach at the start

    def acquire(on_lost: LostCallback, timeout: float | None) -> sqlsem.Grant | None:
        return acquired(coordinator.mutex(name, note=note, on_lost=on_lost), timeout)

    with starting(job.command[0]):
        return supervisor.lead(acquire, job, coordinator=coordinator, events=events)


def _hold(
    job: supervisor.Job,
    coordinator: sqlsem.Coordinator,
    events: supervisor.Events,
    lock_options: _LockOptions,
    run_options: _RunOptions,
    note: str,
    token: str | None,
) -> int:
    """Run the command under the lock, or if only rates are taken, after that; return the exit code."""
    timeout, once = run_options.timeout, None

    def acquire(on_lost: LostCallback, timeout: float | None) -> sqlsem.Grant | None:
        if not run_options.adopt:
            return acquired(lock_options.lock(coordinator, note, on_lost), timeout)
        if not token:
            raise click.UsageError("--adopt takes the token from $SQLSEM_TOKEN, which is not set.")
        return coordinator.adopt(token, on_lost=on_lost)

    if lock_options.once_per is not None:
        once = OncePerPeriod(coordinator, lock_options.period, acquire)
        job = replace(job, finished=once.finish)
    with starting(job.command[0]):
        if lock_options.is_held or run_options.adopt:
            ended, lost = supervisor.run(once or acquire, job, coordinator=coordinator, events=events, timeout=timeout)
        else:
            take = partial(take_rates, coordinator, lock_options.rates, note, timeout)
            ended, lost = supervisor.run_after(take, job, events), None
    if lost is not None:
        output.print_error(lost)
        return run_options.lost_exit_code
    if ended is not None:
        return ended
    if once is not None and once.done:
        log.info("%r is done for this period", lock_options.period.name)
        return 0
    blockers = _describe_blockers(coordinator, lock_options)
    words = f"not granted within {timeout:g} s in {coordinator.engine.label}: {blockers}"
    # With -E 0 this is no error, and cron must not mail it.
    (output.say if run_options.conflict_exit_code else log.info)(words)
    return run_options.conflict_exit_code


@dataclass(frozen=True)
class _RunOptions:
    """The other options: how to wait for the lock, and how to run the command."""

    timeout: float | None
    note: str | None
    conflict_exit_code: int
    lost_exit_code: int
    kill_after: float | None
    pass_url: bool
    adopt: bool
    join: bool
    leader: str | None


@dataclass(frozen=True)
class _LockOptions:
    """The options that name the locks, periods and rates."""

    mutex: Sequence[str]
    limit: Sequence[tuple[str, int | None, int]]  # name, limit (None: the server's), weight
    read: Sequence[str]
    write: Sequence[str]
    stage: Sequence[tuple[str, int]]  # name, order
    priority: int | None
    rates: Sequence[RateRequest]
    once_per: tuple[str | None, float] | None  # name (None: the lock's), seconds
    offset: float

    def require_one(self, run_options: _RunOptions) -> None:
        """Raise unless the options name locks in exactly one way."""
        named = bool(self.names or self.once_per or self.rates)
        exclusive = (run_options.adopt, run_options.join, run_options.leader is not None)
        if self.priority is not None and (any(exclusive) or self.once_per or self.rates or len(self.names) != 1):
            raise click.UsageError("--priority goes with one lock: --mutex, --limit, --read, --write or --stage.")
        if named + sum(exclusive) > 1:
            raise click.UsageError("--adopt, --join and --leader cannot be combined with other locks.")
        if run_options.leader is not None and run_options.timeout is not None:
            raise click.UsageError("--leader waits for as long as it takes, without --timeout.")
        if not (named or any(exclusive)):
            raise click.UsageError(
                "Say which lock: --mutex NAME, --limit NAME[=N], --read, --write, --stage NAME=ORDER or "
                "--rate NAME=N/TIME."
            )
        if self.once_per is not None:
            _ = self.period  # raises if it is invalid
        elif self.offset:
            raise click.UsageError("--offset moves the periods of --once-per, which is missing.")

    @property
    def period(self) -> Period:
        """The period of --once-per."""
        assert self.once_per is not None
        name, seconds = self.once_per
        if name is None:
            if len(self.names) != 1:
                raise click.UsageError("Say what runs once per period: --once-per NAME=DURATION, as in report=1d.")
            name = self.names[0]
        try:
            return Period(name, seconds, self.offset)
        except ConfigurationError as exc:
            raise click.UsageError(str(exc)) from exc

    @property
    def names(self) -> list[str]:
        """The names of the locks."""
        limits, stages = (name for name, *_ in self.limit), (name for name, _ in self.stage)
        return [*self.mutex, *limits, *self.read, *self.write, *stages]

    @property
    def resources(self) -> list[str]:
        """All resources: of locks, periods and rates."""
        periods = [] if self.once_per is None else [self.period.resource]
        return [*self.names, *periods, *(rate.resource for rate in self.rates)]

    @property
    def is_held(self) -> bool:
        """True if anything is held while the command runs (rates are not)."""
        return bool(self.names or self.once_per)

    def lock(self, coordinator: sqlsem.Coordinator, note: str, on_lost: LostCallback | None = None) -> sqlsem.Lock:
        """Return one lock that combines all of them."""
        try:
            given: LockOptions = {"note": note, "priority": self.priority}
            locks: list[sqlsem.Lock | sqlsem.Rate] = [coordinator.mutex(name, **given) for name in self.mutex]
            locks += [coordinator.limit(name, number, weight=weight, **given) for name, number, weight in self.limit]
            locks += [coordinator.read(name, **given) for name in self.read]
            locks += [coordinator.write(name, **given) for name in self.write]
            locks += [coordinator.stage(name, order, **given) for name, order in self.stage]
            if self.once_per is not None:
                locks.append(sqlsem.Lock(own_mutex(self.period.resource, {"note": note}, coordinator.client)))
            locks += [rate_of(coordinator, rate, note) for rate in self.rates]
            return sqlsem.all_of(*locks, on_lost=on_lost)
        except ConfigurationError as exc:
            raise click.UsageError(str(exc)) from exc


def _describe_blockers(coordinator: sqlsem.Coordinator, lock_options: _LockOptions) -> str:
    """Return a text about the rows that block the locks that were not granted."""
    requests = lock_options.lock(coordinator, "").terms.requests if lock_options.is_held else lock_options.rates
    try:
        blockers = coordinator.client.with_connection(lambda session: read_blockers(session, requests))
    except SqlsemError as exc:
        log.info("cannot see the queue: %s", exc)
        return "see who holds it with: sqlsem ls"
    return blockers_in_words(blockers) or "see who holds it with: sqlsem ls"


def acquired(lock: sqlsem.Lock, timeout: float | None) -> sqlsem.Grant | None:
    """Acquire a lock, and return its grant; None if it is not granted in time."""
    return lock.grant if lock.acquire(timeout=timeout) else None


class OncePerPeriod:
    """Acquires a lock by ``acquire``, unless the job is done for this period.

    Attributes:
        done: True if the job is done for this period.
    """

    done = False

    def __init__(self, coordinator: sqlsem.Coordinator, period: Period, acquire: supervisor.Acquire) -> None:
        self._client = coordinator.client
        self._period = period
        self._acquire = acquire

    def __call__(self, on_lost: LostCallback, timeout: float | None) -> sqlsem.Grant | None:
        grant = self._acquire(on_lost, timeout) if self._due(None) else None
        if grant is None or self._due(grant):
            return grant
        grant.release()
        return None

    def _due(self, grant: sqlsem.Grant | None) -> bool:
        self.done = not run_generator(self._period.due(self._client, grant), self._client.execute_effect)
        return not self.done

    def finish(self, grant: sqlsem.Grant, status: int) -> None:
        """Mark the job as done if the command's status is 0. The lock is still held."""
        if status != 0:
            log.info("%r may run again in this period, as the command failed: %d", self._period.name, status)
            return
        try:
            run_generator(self._period.mark(self._client, grant), self._client.execute_effect)
        except LockLost as exc:
            log.info("%r is not done: %s", self._period.name, exc)  # (the release reports the loss)


def rate_of(coordinator: sqlsem.Coordinator, request: RateRequest, note: str) -> sqlsem.Rate:
    """Return the rate that the command line names."""
    windows: dict[Duration, int] = {window.ms / 1000: window.limit for window in request.windows}
    return coordinator.rate(request.name, windows or None, cost=request.cost, note=note)


def take_rates(coordinator: sqlsem.Coordinator, rates: Sequence[RateRequest], note: str, timeout: float | None) -> bool:
    """Take from rates, one after another. Return False if that takes longer than ``timeout``; nothing is used then."""
    taken: list[sqlsem.RateGrant] = []
    began = time.monotonic()
    for request in rates:
        remaining = max(0.001, timeout - (time.monotonic() - began)) if timeout else timeout
        grant = rate_of(coordinator, request, note).take(timeout=remaining)
        if grant is None:
            for earlier in taken:
                earlier.adjust(0)
            return False
        taken.append(grant)
    return True
