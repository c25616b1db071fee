"""The command line: ``sqlsem``. Each command explains itself with ``--help``."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from queue import SimpleQueue
from typing import Any, TypeVar

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import sqlsem
from sqlsem import config, engines, model, output, sql
from sqlsem.engines.base import Check, Engine, Options, Session
from sqlsem.errors import (
    ConfigurationError,
    Deadlock,
    LockLost,
    NotHeld,
    RoundFailed,
    SchemaError,
    SqlsemError,
    TaskFailed,
    Timeout,
    Unavailable,
)
from sqlsem.model import Entry, Past, Resource
from sqlsem.printable import CleanFormatter, clean

__all__ = ["main"]

#: What we exit with, after sysexits.h; a status of 1 says no more than that something was not in order.
EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_SOFTWARE, EXIT_TEMPFAIL, EXIT_LOST, EXIT_CONFIG = 64, 69, 70, 75, 76, 78
EXIT_CODES: tuple[tuple[type[SqlsemError], int], ...] = (
    (ConfigurationError, EXIT_CONFIG),
    (SchemaError, EXIT_CONFIG),
    (Unavailable, EXIT_UNAVAILABLE),
    (Timeout, EXIT_TEMPFAIL),
    (Deadlock, EXIT_TEMPFAIL),
    (LockLost, EXIT_LOST),
    (NotHeld, 1),
    (RoundFailed, 1),
    (TaskFailed, 1),
)
#: A column is never made narrower than this to fit a terminal.
NARROWEST = 6
#: How requests end.
OUTCOMES = ("released", "timeout", "cancelled", "reaped", "revoked", "lost", "upgraded", "downgraded")
log = logging.getLogger("sqlsem")
F = TypeVar("F", bound=Callable[..., Any])


# -- values on the command line ---------------------------------------------------------------------------------------


def duration(value: str) -> float:
    """Seconds, or numbers with units: ``90``, ``1.5s``, ``5m``, ``2h``, ``1d``, ``1h30m``."""
    try:
        return model.check_duration("A duration", value)
    except ConfigurationError as exc:
        raise click.BadParameter(str(exc)) from exc


def _often(value: str) -> float:
    """A duration between two looks."""
    seconds = duration(value)
    if seconds < 0.1:
        raise click.BadParameter(f"{value!r} is too often for the database; at least 0.1")
    return seconds


def name_of(what: str) -> Callable[[str], str]:
    """A type of parameter: the name of something. ``what`` begins the message that refuses it."""

    def check(value: str) -> str:
        try:
            return model.check_name(what, value)
        except ConfigurationError as exc:
            raise click.BadParameter(str(exc)) from exc

    return check


resource_name = name_of("The resource name")


def at_most(default: int) -> Callable[[F], F]:
    """The option for how many lines to list."""
    return click.option(
        "-n",
        "--most",
        type=click.IntRange(1, 100_000),
        default=default,
        show_default=True,
        metavar="N",
        help="So many at the most.",
    )


def limited(value: str) -> tuple[str, int, int]:
    """``NAME=LIMIT``, ``NAME=LIMIT:WEIGHT``."""
    match = re.fullmatch(r"(.+)=(\d+)(?::(\d+))?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not NAME=LIMIT or NAME=LIMIT:WEIGHT")
    return match[1], int(match[2]), int(match[3] or 1)


def staged(value: str) -> tuple[str, int]:
    """``NAME=ORDER``."""
    match = re.fullmatch(r"(.+)=(-?\d+)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not NAME=ORDER")
    return match[1], int(match[2])


# -- the group --------------------------------------------------------------------------------------------------------


#: What is not said on the command line or in a file.
DEFAULTS = {"schema": "sqlsem", "table": "ProcessControl", "grace": 5.0, "lease": None, "retry": 10.0}


@dataclass
class Connecting:
    """The options before the command; and what the environment and the files add to them."""

    url: str | None
    profile: str | None
    given: dict[str, Any]  # of `DEFAULTS`, what was said on the command line
    verbose: int

    @functools.cached_property
    def settings(self) -> config.Settings:
        """Which database it is."""
        named = "--url" if self.url else "--profile"
        found = config.resolve(self.url or None, profile=self.profile, named=named)
        for warning in found.warnings:
            output.say(f"warning: {warning}")
        return found

    def _option(self, name: str) -> Any:
        return self.given.get(name, self.settings.options.get(name, DEFAULTS[name]))

    @property
    def options(self) -> dict[str, Any]:
        """Those of `sqlsem.connect`."""
        return {name: self._option(name) for name in DEFAULTS}

    @property
    def schema(self) -> str:
        """The schema of the tables."""
        return str(self._option("schema"))

    @property
    def table(self) -> str:
        """The name of the queue's table."""
        return str(self._option("table"))

    @property
    def life(self) -> float:
        """The grace or, if there is one, the lease."""
        lease = self._option("lease")
        return float(self._option("grace") if lease is None else lease)

    @property
    def retry(self) -> float:
        """For how long to try when the database is away."""
        return float(self._option("retry"))

    @property
    def chosen_url(self) -> str:
        """Never to be printed."""
        return self.settings.url

    def engine(self) -> Engine:
        """The engine alone, for what a coordinator would be too much."""
        grace, lease = self._option("grace"), self._option("lease")
        options = Options(grace=grace, lease=lease, schema=self.schema, table=self.table)
        url = engines.plain(self.chosen_url)
        return engines.of_url(url)(url, options)

    @contextlib.contextmanager
    def coordinator(self, *, told: bool = False, looks: bool = False) -> Iterator[sqlsem.Coordinator]:
        """A coordinator, closed in the end. Connects when it is used.

        Args:
            told: It is known already where that is.
            looks: It does not create an SQLite file that is not there (unless nobody has named one).
        """
        with sqlsem.connect(self.chosen_url, **self.options) as coordinator:
            if looks and not self.settings.embedded:
                coordinator.engine.creates = False
            if self.settings.embedded and not told:
                # Whoever forgot to name a database must not think that others are in the same one.
                output.say(f"this is {coordinator.engine.where}, {sqlsem.EMBEDDED}")
            else:
                log.info("%s, from %s", coordinator.engine.where, self.settings.source)
            yield coordinator


connecting = click.make_pass_decorator(Connecting)


class Commands(click.Group):
    """Lists commands as they were written, and turns errors into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of this file, which is that of use."""
        return list(self.commands)

    def main(self, *args: Any, **options: Any) -> Any:
        """As `click.Group.main`, but for the exit codes."""
        run_main: Callable[..., Any] = super().main
        if not options.pop("standalone_mode", True):
            return run_main(*args, standalone_mode=False, **options)
        try:
            code = run_main(*args, standalone_mode=False, **options)
        except click.ClickException as exc:
            output.print_usage(exc)
            code = EXIT_USAGE if isinstance(exc, click.UsageError) else exc.exit_code
        except (click.Abort, KeyboardInterrupt):
            code = 130
        except SqlsemError as exc:
            if _verbosity > 1:
                output.print_trace()
            output.print_error(exc)
            code = next(number for kind, number in EXIT_CODES if isinstance(exc, kind))
        except Exception as exc:
            # Python would print the traceback itself, with whatever is in the message.
            output.print_trace()
            output.print_error(f"{type(exc).__name__}: {exc} (this is a fault of sqlsem's; please report it)")
            code = EXIT_SOFTWARE
        sys.exit(code if isinstance(code, int) else 0)


_verbosity = 0


@contextlib.contextmanager
def _logging(verbose: int) -> Iterator[None]:
    """The library's log on stderr while a command runs; without -v nothing, as errors are printed anyhow."""
    global _verbosity
    _verbosity = verbose
    handler: logging.Handler = logging.StreamHandler(sys.stderr) if verbose else logging.NullHandler()
    handler.setFormatter(
        CleanFormatter("sqlsem: %(message)s" if verbose < 2 else "%(asctime)s %(threadName)s %(message)s")
    )
    before = log.level, log.propagate
    log.setLevel({0: logging.CRITICAL, 1: logging.INFO}.get(verbose, logging.DEBUG))
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  export SQLSEM_URL=postgresql://etl@db/dwh     (or a sqlsem.toml)
  sqlsem doctor                                 is everything in order?
  sqlsem run --limit etl=3 -- python load.py    at most three at a time
  sqlsem ls                                     who holds, who waits

\b
Exit codes: 0 done, 1 not in order (doctor, release), 64 wrong usage,
  69 database out of reach, 70 a fault of sqlsem's, 75 not had in time,
  76 lock lost, 78 configuration or schema. `sqlsem run` has more.
""",
)
@click.option(
    "--url",
    metavar="URL",
    help="The database: sqlite:///file.db, postgresql://…, mssql://… or an ODBC string. Better than here, where "
    "everybody on this host can read it (ps), is a password in the environment: $SQLSEM_URL, which is the default. "
    "Without either a profile, a sqlsem.toml of the project or of yours; else an SQLite file of this user and host.",
)
@click.option(
    "--profile",
    metavar="NAME",
    help="The database by its name in a sqlsem.toml of yours or of the project. Left out: $SQLSEM_PROFILE.",
)
@click.option("--schema", help="The schema of the tables (SQLite: their prefix).  [default: sqlsem]")
@click.option("--table", help="The name of the queue's table.  [default: ProcessControl]")
@click.option(
    "--grace",
    type=duration,
    help="Seconds for which a process that cannot be found is still believed to live.  [default: 5]",
)
@click.option("--lease", type=duration, help="Prove life by a lease of so many seconds (behind a pooler).")
@click.option("--retry", type=duration, help="Seconds to try for when the database is away.  [default: 10]")
@click.option("-v", "--verbose", count=True, help="Say what happens; twice: everything, with tracebacks.")
@click.version_option(sqlsem.__version__, prog_name="sqlsem")
@click.pass_context
def main(
    ctx: click.Context,
    /,
    url: str | None,
    profile: str | None,
    verbose: int,
    **given: Any,
) -> None:
    """Locks in the SQL database you already have: mutex, N-way limit, reader/writer, ordered stages.

    All of them are rows of one table that everybody can look at, in the order of asking.
    """
    atexit.register(_let_terminal_go)
    ctx.with_resource(_logging(verbose))
    ctx.obj = Connecting(url, profile, {name: one for name, one in given.items() if one is not None}, verbose)


def _let_terminal_go() -> None:
    """A terminal that is gone takes no last words: that must not make the exit code of what went well another one."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as exc:
            if exc.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="JSON for programs.")(function)


pass_url_option = click.option(
    "--pass-url",
    is_flag=True,
    help="Hand the database's URL on in $SQLSEM_URL, though there is a password in it. (Else what is started does not "
    "find it, and is told so when it asks sqlsem for a lock.)",
)


# -- init -------------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@connecting
def init(options: Connecting, dry_run: bool) -> None:
    """Create or upgrade the tables and routines.

    May be run at any time, again too, while locks are held. Says what it will do before it does it, and never goes
    back to an older version. A DBA who would rather run scripts gets them from `sqlsem sql`.

    \b
    Examples:
      sqlsem init --dry-run
      sqlsem --schema locks init

    \b
    Exit codes: 0 done, 69 out of reach, 78 not allowed, or the tables are
      newer than this client.
    """
    engine = options.engine()
    with _rights_to_install(engine):
        version = engine.installed_version()
    output.echo(f"{engine.where}, {engine.place}, table {options.table}")
    # Refuses to downgrade.
    plan = engine.plan(version or 0)
    scripts = [f"schema-{number}.sql" for number, _ in plan if number is not None]
    again_each_time = [f"{name}.sql" for name in sql.rerunnable(engine.name)]
    scripts += again_each_time
    if version is None:
        output.echo("  version: unknown (the routines are missing)")
    elif version == sql.LATEST:
        output.echo(f"  version: {version}, up to date; the tables stay as they are")
    else:
        output.echo(f"  version: {version or 'not there yet'} → {sql.LATEST}")
    again = " again" if version == sql.LATEST else ""
    if version is None:
        scripts = ["schema scripts as needed", *again_each_time]
    output.echo(f"  {'would run' if dry_run else 'running'}{again}: {', '.join(scripts)}")
    if dry_run:
        output.echo("Nothing was changed (--dry-run).")
        return
    session = _open(engine, options.retry)
    try:
        with _rights_to_install(engine):
            session.install(engine.plan)
    finally:
        session.close()
    output.echo("Done.")


@contextlib.contextmanager
def _rights_to_install(engine: Engine) -> Iterator[None]:
    """What the engine advises a login without rights is for users of the tables; this is for who makes them."""
    try:
        yield
    except ConfigurationError as exc:
        if not engine.denied(exc):
            raise
        words = " ".join(str(exc.__cause__).split())
        raise ConfigurationError(
            f"{engine.where}: {words}; init needs a login that may create a schema in this database or, when the "
            f"tables are there, the one that owns them. For a DBA: sqlsem sql {engine.name}"
        ) from exc


def _open(engine: Engine, retry: float) -> Session:
    """Connect, trying for a while where that may help."""
    deadline = time.monotonic() + retry
    while True:
        try:
            return engine.connect("look")
        except Unavailable as exc:
            if time.monotonic() >= deadline:
                raise
            log.info("%s; trying again", exc)
            time.sleep(0.25)


# -- run --------------------------------------------------------------------------------------------------------------


@main.command(
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
@click.option("--note", help="Words for whoever looks at the queue. Left out: the program's name.")
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
    mutex: Sequence[str],
    limit: Sequence[tuple[str, int, int]],
    read: Sequence[str],
    write: Sequence[str],
    stage: Sequence[tuple[str, int]],
    timeout: float | None,
    note: str | None,
    conflict_exit_code: int,
    lost_exit_code: int,
    kill_after: float | None,
    pass_url: bool,
    command: Sequence[str],
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
    from sqlsem import run as runner

    if not (mutex or limit or read or write or stage):
        raise click.UsageError("Say which lock: --mutex NAME, --limit NAME=N, --read, --write or --stage NAME=ORDER.")
    code = _cannot_start(command[0])
    if code:
        return code
    note = os.path.basename(command[0])[:200] if note is None else note
    if kill_after is None:
        kill_after = min(1.0, options.life / 5) / 2
    events: SimpleQueue[tuple[str, int]] = SimpleQueue()
    wanted = [*mutex, *(name for name, *_ in limit), *read, *write, *(name for name, _ in stage)]
    with options.coordinator() as coordinator, runner.Signals(events):
        if not options.settings.embedded and not options.verbose and sys.stderr.isatty():
            output.say(f"locking {', '.join(map(repr, wanted))} in {coordinator.engine.where}")

        def make_lock(on_lost: Callable[[sqlsem.Grant], object]) -> sqlsem.Lock:
            try:
                locks = [coordinator.mutex(name, note=note) for name in mutex]
                locks += [coordinator.limit(name, number, weight=weight, note=note) for name, number, weight in limit]
                locks += [coordinator.read(name, note=note) for name in read]
                locks += [coordinator.write(name, note=note) for name in write]
                locks += [coordinator.stage(name, order, note=note) for name, order in stage]
                return sqlsem.all_of(*locks, on_lost=on_lost)
            except ConfigurationError as exc:
                raise click.UsageError(str(exc)) from exc

        def started(grant: sqlsem.Grant, pid: int) -> None:
            had.set()
            places = ", ".join(f"{name} at {position}" for name, position in grant.positions.items())
            log.info("had %s after %.1f s; started %s as process %d", places, grant.waited, command[0], pid)

        had = threading.Event()
        if options.verbose:
            threading.Thread(target=_tell_waiting, args=(coordinator, had), daemon=True).start()
        try:
            status, lost = runner.run(
                make_lock,
                command,
                coordinator=coordinator,
                events=events,
                timeout=timeout,
                kill_after=kill_after,
                started=started,
                environment=config.environment(options.chosen_url, hand_on=pass_url),
            )
        except runner.Stopped as exc:
            return 128 + exc.number
        except FileNotFoundError as exc:
            output.print_error(f"{command[0]}: {exc.strerror}")
            return runner.NOT_FOUND
        except OSError as exc:
            if isinstance(exc, SqlsemError):
                raise
            output.print_error(f"{command[0]}: {exc.strerror}")
            return runner.CANNOT_RUN
        finally:
            had.set()
        if lost is None and status is None:
            words = f"not had within {timeout:g} s in {coordinator.engine.where}: {_in_the_way(coordinator, wanted)}"
            if conflict_exit_code == 0:  # who is content without it needs no mail about it
                log.info("%s", words)
            else:
                output.say(words)
            return conflict_exit_code
    if lost is not None:
        output.print_error(lost)
        return lost_exit_code
    assert status is not None
    return status


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
    return "; ".join(told) or "whoever was ahead has just left"


def _cannot_start(program: str) -> int:
    """Look before the wait, which may be long: 127 or 126 when there is no such program, else 0."""
    import shutil

    from sqlsem import run as runner

    if shutil.which(program) is not None:
        return 0
    exists = os.path.dirname(program) and os.path.exists(program)
    output.print_error(f"{program}: {'cannot be executed' if exists else 'no such command'}")
    return runner.CANNOT_RUN if exists else runner.NOT_FOUND


def _tell_waiting(coordinator: sqlsem.Coordinator, had: threading.Event) -> None:
    """Thread of ``run -v``: log who is ahead, whenever that has changed."""
    host, pid, told, pause = socket.gethostname(), os.getpid(), "", 0.25
    while not had.wait(pause):
        pause = min(pause * 1.5, 5.0)
        try:
            entries = coordinator.entries()
        except SqlsemError as exc:
            log.info("cannot see the queue: %s", exc)
            continue
        waits = []
        for entry in entries:
            if (entry.host, entry.pid, entry.state) == (host, pid, "waits"):
                ahead = [e for e in entries if e.resource == entry.resource and e.position < entry.position]
                waits.append(f"{entry.resource!r} at position {entry.position}, behind {len(ahead)}")
        text = "; ".join(waits)
        if text and text != told and not had.is_set():
            told = text
            log.info("waiting for %s", text)


# -- looking ----------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("resource", required=False, type=resource_name)
@click.option("--watch", type=_often, metavar="SECONDS", help="Look again every so often, until Ctrl-C.")
@_json_option
@connecting
def ls(options: Connecting, resource: str | None, watch: float | None, as_json: bool) -> None:
    """Show who holds and who waits, in the order of the queue.

    FOR is how long it has been held or waited for, WHO the host and process. A note in brackets says that a process
    cannot be found, and for how long. When that is longer than its grace it is dead, and gives way to whoever comes.

    \b
    Examples:
      sqlsem ls
      sqlsem ls etl --watch 1
      sqlsem ls --json | jq '.[].entries[] | select(.state == "waits")'
    """
    with options.coordinator(looks=True) as coordinator:

        def look() -> list[tuple[Resource, list[Entry]]]:
            return _queues(coordinator.entries(resource), coordinator.resources(), resource)

        console = output.console()
        if watch is None:
            if as_json:
                output.print_json([_queue_as_dict(queue, entries) for queue, entries in look()])
            else:
                output.show(console, render_queues(look(), console.width, resource))
        elif console.is_terminal and not as_json:
            _watch(look, console, resource, watch)
        else:
            while True:
                now = datetime.now().astimezone()
                try:
                    found = look()
                except Unavailable as exc:
                    output.print_error(f"{exc}; looking again")
                else:
                    if as_json:
                        queues = [_queue_as_dict(queue, entries) for queue, entries in found]
                        output.print_json({"at": now.isoformat(), "queues": queues})
                    else:
                        output.echo(f"-- {now:%Y-%m-%d %H:%M:%S}")
                        output.show(console, render_queues(found, console.width, resource))
                time.sleep(watch)


def _watch(
    look: Callable[[], list[tuple[Resource, list[Entry]]]], console: Console, only: str | None, every: float
) -> None:
    """Draw the queue again and again; while the database is away, what was seen last."""
    seen: RenderableType = Text("")
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            try:
                seen = shown = render_queues(look(), console.width, only)
            except Unavailable as exc:
                trouble = Text(f"{datetime.now():%H:%M:%S}  {clean(str(exc))}", style="bold red")
                shown = Group(seen, Text(""), trouble)
            live.update(shown, refresh=True)
            time.sleep(every)


@main.command(short_help="Show finished requests, the newest first.")
@click.argument("resource", required=False, type=resource_name)
@click.option("--since", type=duration, metavar="AGE", help="That ended no longer ago than this: 24h.")
@click.option("--until", type=duration, metavar="AGE", help="That ended no shorter ago than this.")
@click.option("--outcome", type=click.Choice(OUTCOMES), metavar="OUTCOME", help="That ended so.")
@at_most(20)
@_json_option
@connecting
def history(
    options: Connecting,
    resource: str | None,
    since: float | None,
    until: float | None,
    outcome: str | None,
    most: int,
    as_json: bool,
) -> None:
    """Show finished requests, the newest first: how long they waited and held, and how they ended.

    OUTCOME is released, timeout or cancelled (gave up waiting), reaped (its process died), revoked (an operator took
    it away) or lost; upgraded and downgraded go on as something else. HELD of one that was reaped is until its last
    sign of life.

    \b
    Examples:
      sqlsem history etl --since 24h
      sqlsem history --outcome reaped -n 1000 --json
    """
    with options.coordinator(looks=True) as coordinator:
        past = coordinator.history(resource, most=most, since=since, until=until, outcome=outcome)
    if as_json:
        output.print_json([one.as_dict() for one in past])
        return
    console = output.console()
    output.show(console, render_history(past, console.width))


def _queues(
    entries: Iterable[Entry], resources: Iterable[Resource], only: str | None
) -> list[tuple[Resource, list[Entry]]]:
    """Entries by resource; with what is set for it, also where nobody is."""
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.resource, []).append(entry)
    settings = {one.resource: one for one in resources if only is None or one.resource == only}
    names = sorted({*grouped, *(name for name, one in settings.items() if _is_set(one))})
    found = []
    for name in names:
        own = grouped.get(name, [])
        holding = sum(entry.state in ("holds", "revoked") for entry in own)
        waiting = sum(entry.state == "waits" for entry in own)
        one = settings.get(name)
        found.append(
            (
                Resource(
                    name,
                    one.cap if one else None,
                    bool(one and one.paused),
                    one.stale_after if one else None,
                    holding,
                    waiting,
                ),
                own,
            )
        )
    return found


def _is_set(resource: Resource) -> bool:
    return resource.paused or resource.cap is not None or resource.stale_after is not None


def _queue_as_dict(resource: Resource, entries: Iterable[Entry]) -> dict[str, Any]:
    return {**resource.as_dict(), "entries": [entry.as_dict() for entry in entries]}


# -- tables -----------------------------------------------------------------------------------------------------------


def seconds_in_words(seconds: float) -> str:
    """At most six characters: ``0.4s``, ``12s``, ``3m05s``, ``2h14m``, ``3d04h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def _access(access: str, limit: int | None, weight: int) -> str:
    if access == model.WRITE:
        words = "no limit" if limit is None else "mutex" if limit == 1 else f"limit {limit}"
    else:
        words = access.replace("stage:", "stage ", 1)
    return words if weight == 1 else f"{words} x{weight}"


def _owner(owner: str | None) -> str:
    """The thread, where it says something."""
    return "" if owner in (None, "", "MainThread") else f" {owner}"


def who_is(host: str | None, pid: int | None, otherwise: str = "") -> str:
    """The host and process, as far as they are known."""
    return otherwise if host is None else host if pid is None else f"{host}:{pid}"


def _cells(entry: Entry) -> tuple[str, ...]:
    who = who_is(entry.host, entry.pid, entry.requesting_id)
    note = entry.note or ""
    if entry.missing_for is not None:
        note = f"[not found for {seconds_in_words(entry.missing_for)}] {note}".rstrip()
    return (
        str(entry.position),
        entry.state,
        seconds_in_words(entry.seconds),
        _access(entry.access, entry.limit, entry.weight),
        who,
        f"{entry.program or ''}{_owner(entry.owner)}".strip(),
        note,
    )


def _fit(natural: list[int], width: int, indent: int, elastic: Sequence[int]) -> list[int]:
    """Widths of columns with a gap of two: the widest of the elastic ones give way until all fit."""
    widths = list(natural)
    while sum(widths) + 2 * (len(widths) - 1) + indent > width:
        widest = max(elastic, key=lambda column: widths[column])
        if widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    return widths


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int], right: Iterable[int]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    for number, (head, width) in enumerate(zip(heads, widths, strict=True)):
        table.add_column(
            head, width=width, no_wrap=True, overflow="ellipsis", justify="right" if number in right else "left"
        )
    for row in rows:
        style = {"waits": "yellow", "revoked": "red", "dead": "red"}.get(row[1], "")
        table.add_row(*(Text(clean(cell)) for cell in row), style=style)
    return table


def render_queues(
    queues: Sequence[tuple[Resource, Sequence[Entry]]], width: int, only: str | None = None
) -> RenderableType:
    """What ``sqlsem ls`` shows, at most ``width`` columns wide."""
    if not queues:
        return Text("Nobody holds or waits." if only is None else f"Nobody holds or waits for {only!r}.")
    heads = ("POS", "STATE", "FOR", "ACCESS", "WHO", "PROGRAM", "NOTE")
    rows = {resource.resource: [_cells(entry) for entry in entries] for resource, entries in queues}
    everything = [heads, *(row for group in rows.values() for row in group)]
    natural = [max(Text(clean(row[column])).cell_len for row in everything) for column in range(len(heads))]
    widths = _fit(natural, width, 2, (4, 5, 6))
    parts: list[RenderableType] = []
    for resource, entries in queues:
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(clean(resource.resource), style="bold")
        title.append(f"  {resource.holding} in, {resource.waiting} waiting")
        dead = sum(entry.state == "dead" for entry in entries)
        if dead:
            title.append(f", {dead} dead", style="bold red")
        if resource.paused:
            title.append("  PAUSED", style="bold red")
        if resource.cap is not None:
            title.append(f"  capped at {resource.cap}", style="magenta")
        if resource.stale_after is not None:
            title.append(f"  stale after {seconds_in_words(resource.stale_after)}", style="dim")
        if parts:
            parts.append(Text(""))
        parts.append(title)
        if rows[resource.resource]:
            table = _table(heads, rows[resource.resource], widths, (0, 2))
            parts.append(Padding(table, (0, 0, 0, 2), expand=False))
    return Group(*parts)


def render_history(past: Sequence[Past], width: int) -> RenderableType:
    """What ``sqlsem history`` shows, at most ``width`` columns wide."""
    if not past:
        return Text("Nothing has finished yet.")
    heads = ("POS", "RESOURCE", "ACCESS", "WAITED", "HELD", "ENDED", "OUTCOME", "WHO", "NOTE")
    rows = [
        (
            str(one.position),
            one.resource,
            _access(one.access, one.limit, one.weight).replace("no limit", "write"),
            seconds_in_words(one.waited),
            "-" if one.held is None else seconds_in_words(one.held),
            one.ended_at.astimezone().strftime("%m-%d %H:%M:%S"),
            one.outcome if one.ended_by is None else f"{one.outcome} by {one.ended_by}",
            who_is(one.host, one.pid, one.requesting_id),
            one.note or one.program or "",
        )
        for one in past
    ]
    natural = [max(Text(clean(row[column])).cell_len for row in [heads, *rows]) for column in range(len(heads))]
    return _table(heads, rows, _fit(natural, width, 0, (1, 6, 7, 8)), (0, 3, 4))


from sqlsem import cli_work  # noqa: E402, F401 - its commands, in their place; it needs what is above

_new_option = click.option("--new", is_flag=True, help="Nobody has used this name yet, and that is well.")


def _know(coordinator: sqlsem.Coordinator, resource: str, new: bool) -> None:
    """Refuse a name that nobody uses, nor has used lately: it may be misspelt, and the right one is still open."""
    if new:
        return
    known = {one.resource for one in coordinator.resources()}
    if resource in known or coordinator.history(resource, most=1):
        return
    known |= {one.resource for one in coordinator.history(most=1000)}
    raise ConfigurationError(
        f"Nobody uses {resource!r}, nor has lately{config.nearest(resource, known)}; if it shall be set for whoever "
        f"comes: --new"
    )


# -- operating --------------------------------------------------------------------------------------------------------


@main.command("set", short_help="Set a resource's cap, or when rows are stale.")
@click.argument("resource", type=resource_name)
@click.option("--limit", type=click.IntRange(1, model.MAX_INT), help="Never more than so many, whatever users declare.")
@click.option("--no-limit", is_flag=True, help="Lift the cap.")
@click.option(
    "--stale-after",
    type=duration,
    help="Remove rows without a living process behind them (made by plain INSERTs) at this age: 90s, 5m, 2h, 1d.",
)
@click.option("--no-stale-after", is_flag=True, help="Never remove them.")
@_new_option
@connecting
def set_(
    options: Connecting,
    resource: str,
    limit: int | None,
    no_limit: bool,
    stale_after: float | None,
    no_stale_after: bool,
    new: bool,
) -> None:
    """Set a resource's cap, or the age at which rows of bare participants are removed.

    A cap can only lower what users declare. Those inside stay inside.

    \b
    Examples:
      sqlsem set etl --limit 2
      sqlsem set etl --no-limit --stale-after 2h
    """
    if (limit is not None and no_limit) or (stale_after is not None and no_stale_after):
        raise click.UsageError("An option and its --no-… cannot both hold.")
    if limit is None and stale_after is None and not no_limit and not no_stale_after:
        raise click.UsageError("Say what to set: --limit N, --no-limit, --stale-after 2h or --no-stale-after.")
    if stale_after == 0:
        raise click.UsageError("--stale-after must be above 0; to never remove anything: --no-stale-after.")
    with options.coordinator(looks=True) as coordinator:
        _know(coordinator, resource, new)
        if limit is not None or no_limit:
            coordinator.set_limit(resource, limit)
        if stale_after is not None or no_stale_after:
            coordinator.set_stale_after(resource, stale_after)
        _tell_settings(coordinator, resource)


@main.command()
@click.argument("resource", type=resource_name)
@_new_option
@connecting
def pause(options: Connecting, resource: str, new: bool) -> None:
    """Let nobody else in, until `sqlsem resume`.

    Those inside stay inside; requests are taken and keep their places.

    \b
    Example:
      sqlsem pause etl
    """
    with options.coordinator(looks=True) as coordinator:
        _know(coordinator, resource, new)
        coordinator.pause(resource)
        _tell_settings(coordinator, resource)


@main.command()
@click.argument("resource", type=resource_name)
@_new_option
@connecting
def resume(options: Connecting, resource: str, new: bool) -> None:
    """Let people in again, after `sqlsem pause`.

    \b
    Example:
      sqlsem resume etl
    """
    with options.coordinator(looks=True) as coordinator:
        _know(coordinator, resource, new)
        coordinator.resume(resource)
        _tell_settings(coordinator, resource)


def _tell_settings(coordinator: sqlsem.Coordinator, resource: str) -> None:
    found = next((one for one in coordinator.resources() if one.resource == resource), None)
    one = found or Resource(resource, None, False, None, 0, 0)
    parts = [
        "paused" if one.paused else "not paused",
        "no cap" if one.cap is None else f"capped at {one.cap}",
        "rows never stale" if one.stale_after is None else f"rows stale after {seconds_in_words(one.stale_after)}",
    ]
    output.echo(f"{clean(resource)}: {', '.join(parts)}; {one.holding} in, {one.waiting} waiting")


@main.command(short_help="Take a row away from its owner.")
@click.argument("position", type=click.IntRange(1))
@click.option("--force", is_flag=True, help="At once: others may be let in before the holder knows.")
@connecting
def release(options: Connecting, position: int, force: bool) -> None:
    """Take a row away from its owner, by its position (see `sqlsem ls`).

    One that waits is gone at once. A living holder is told, and has its grace to stop (`sqlsem run` ends its command);
    with --force it is not waited for.

    \b
    Examples:
      sqlsem release 4711
      sqlsem release 4711 --force

    \b
    Exit codes: 0 it is gone, or its holder has been told; 1 there is no
      such row.
    """
    with options.coordinator(looks=True) as coordinator:
        entry = next((one for one in coordinator.entries() if one.position == position), None)
        if entry is not None and entry.state == "dead":
            # Whoever looks for the dead makes sure of that once more.
            coordinator.reap()
            gone = all(one.position != position for one in coordinator.entries(entry.resource))
            gone = gone or coordinator.revoke(position, force=force)
        else:
            gone = coordinator.revoke(position, force=force)
    what = f"Position {position}"
    if entry is not None:
        who = who_is(entry.host, entry.pid, entry.requesting_id)
        what += f" of {clean(entry.resource)} ({clean(who)})"
    if gone:
        output.echo(f"{what} is gone.")
    else:
        output.echo(
            f"{what}: its living holder has been told, and has its grace to stop (5 s unless it chose another); "
            f"then it is removed. Not to wait: --force"
        )


@main.command()
@connecting
def reap(options: Connecting) -> None:
    """Look for the dead now, and remove what they left.

    Nobody has to do this: whoever waits, does. It tidies up where nobody waits. The living are left alone, and who
    cannot be found has its grace to return: on a database server the first call finds it missing, and one after the
    grace removes it.

    \b
    Example:
      sqlsem reap
    """
    with options.coordinator(looks=True) as coordinator:
        number = coordinator.reap()
        missing = sum(entry.missing_for is not None for entry in coordinator.entries())
    output.echo(f"{number} row{'' if number == 1 else 's'} removed.")
    if missing:
        output.echo(f"The owners of {missing} more cannot be found; they have their grace to return. Then: sqlsem reap")


# -- scripts ----------------------------------------------------------------------------------------------------------


@main.command("sql", short_help="Print the scripts of an engine.")
@click.argument("engine", required=False, metavar="[ENGINE]")
@click.argument("script", required=False, metavar="[SCRIPT]")
@connecting
def sql_(options: Connecting, engine: str | None, script: str | None) -> None:
    """Print the scripts of an engine, with --schema and --table filled in.

    ENGINE is sqlite, postgresql or mssql; left out, the one of the URL. SCRIPT is schema, routines, deadlocks, public
    (what sessions call), tasks, rounds, conversions, permissions, drop or client (what the Python client sends); left
    out, all but the last two in the order in which to run them. SQLite has no routines, and so fewer scripts. Connects
    to nothing.

    \b
    Examples:
      sqlsem sql mssql > for-the-dba.sql
      sqlsem --schema locks sql postgresql permissions
    """
    if engine in sql.SCRIPTS and script is None:
        engine, script = None, engine
    if engine is None:
        name: str | None = engines.name_of_url(engines.plain(options.chosen_url))
    else:
        name = engines.SCHEMES.get(engine.lower())
    if name is None:
        raise click.UsageError(f"There is no engine of that name; there are {', '.join(engines.ENGINES)}.")
    if script is not None and script not in sql.SCRIPTS:
        raise click.UsageError(f"There is no script {script!r}; there are {', '.join(sql.SCRIPTS)}.")
    for part in ("schema", *sql.rerunnable(name)) if script is None else (script,):
        text = sql.script(name, part, schema=options.schema, table=options.table)
        output.echo(*text.rstrip().split("\n"), "")


# -- doctor -----------------------------------------------------------------------------------------------------------


@main.command(short_help="Check that everything is in order.")
@_json_option
@connecting
def doctor(options: Connecting, as_json: bool) -> int:
    """Check everything that has to be in order, and say how to mend what is not.

    Driver, connection, tables, permissions, clock, isolation, whether a session's lock stays with its session (behind
    a pooler it may not), and a mutex taken and given back. Leaves no more than a line in the history (and makes the
    embedded SQLite file, where that is missing).

    \b
    Examples:
      sqlsem doctor
      sqlsem --url postgresql://etl@db/dwh doctor --json

    \b
    Exit codes: 0 all in order, 1 something is not.
    """
    where, checks = diagnose(options)
    ok = all(check.ok for check in checks)
    if as_json:
        fields = [{"name": c.name, "ok": c.ok, "detail": c.detail, "mend": c.mend} for c in checks]
        output.print_json({"ok": ok, "where": where, "checks": fields})
        return 0 if ok else 1
    console = output.console()
    if where:
        output.show(console, Text(where, style="bold"))
    for check in checks:
        state, style = ("FAIL", "bold red") if not check.ok else ("note", "yellow") if check.mend else ("ok", "green")
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=4)
        table.add_column(width=11)
        table.add_column(overflow="fold")
        table.add_row(Text(state, style=style), check.name, Text(clean(check.detail)))
        if check.mend:
            table.add_row("", "", Text(clean(check.mend), style="bold"))
        output.show(console, Padding(table, (0, 0, 0, 2), expand=False))
    bad = sum(not check.ok for check in checks)
    output.echo("Everything is in order." if ok else f"{bad} of {len(checks)} checks failed.")
    return 0 if ok else 1


def diagnose(options: Connecting) -> tuple[str | None, list[Check]]:
    """All checks, as far as they can be made: each rests on those before. The database's name, and what was found."""
    checks: list[Check] = []
    prefix = ""

    def failed(name: str, exc: Exception, mend: str) -> None:
        # Messages of ours may begin with the database's name, and end in what to do.
        detail, separator, advice = str(exc).removeprefix(prefix).rpartition("; ")
        if separator and isinstance(exc, SqlsemError):
            checks.append(Check(name, False, detail, f"{advice[:1].upper()}{advice[1:]}"))
        else:
            checks.append(Check(name, False, " ".join(str(exc).split()) or type(exc).__name__, mend))

    try:
        engine = options.engine()
    except ConfigurationError as exc:
        failed("url", exc, "Correct $SQLSEM_URL, --url or the sqlsem.toml; see: sqlsem --help")
        return None, checks
    told = f"{engine.name}, from {options.settings.source}"
    if options.settings.embedded:
        checks.append(Check("url", True, told, f"It is a file {sqlsem.EMBEDDED}."))
    else:
        checks.append(Check("url", True, told))
    try:
        began = time.perf_counter()
        session = engine.connect("look")
    except SqlsemError as exc:
        mend = "Is the server up and to be reached from here, and are the address, name and password right?"
        failed("connect", exc, mend)
        return engine.where, checks
    try:
        checks.append(Check("connect", True, f"in {(time.perf_counter() - began) * 1000:.1f} ms"))
        sound = True
        try:
            settings = session.check_schema()
            told = f"version {settings['schema_version']}, for clients from {settings['oldest_client']} on"
            checks.append(Check("schema", True, f"{told}; this one is {sql.LATEST}"))
        except SqlsemError as exc:
            sound = False
            failed("schema", exc, "Run: sqlsem init")
        try:
            checks += session.diagnose()
        except (SqlsemError, NotImplementedError) as exc:
            failed("engine", exc, "Run again with -vv to see all of it.")
    finally:
        session.close()
    if sound:
        try:
            checks.append(_round_trip(options))
        except SqlsemError as exc:
            failed("round trip", exc, "Run again with -vv to see all of it.")
    return engine.where, checks


def _round_trip(options: Connecting) -> Check:
    """A mutex taken and given back, once connected."""
    with options.coordinator(told=True) as coordinator:
        lock = coordinator.mutex("sqlsem-doctor", note="sqlsem doctor")
        coordinator.process.member.ping()
        began = time.perf_counter()
        if not lock.acquire(timeout=5):
            return Check("round trip", False, "no mutex within 5 s", "See who is there: sqlsem ls sqlsem-doctor")
        lock.release()
    return Check("round trip", True, f"a mutex taken and given back in {(time.perf_counter() - began) * 1000:.1f} ms")


# -- demo -------------------------------------------------------------------------------------------------------------


@main.command(short_help="Watch several processes share a limit.")
@click.option("--seconds", type=duration, default="10", show_default=True, help="How long it lasts.")
@click.option("--workers", type=click.IntRange(2, 32), default=8, show_default=True, help="Processes that take part.")
@click.option("--limit", type=click.IntRange(1, 32), default=3, show_default=True, help="How many may be in at a time.")
def demo(seconds: float, workers: int, limit: int) -> int:
    """Watch several processes share a limit, on a file of its own that is thrown away afterwards.

    Nothing to install, no queue of yours is touched. Half way through, one of those inside is killed (SIGKILL), to
    show that nobody has to clean up after it. Each worker counts who is inside, by other means than sqlsem's.

    \b
    Examples:
      sqlsem demo
      sqlsem demo --workers 12 --limit 4 --seconds 20

    \b
    Exit codes: 0 the limit was kept, 1 it was not.
    """
    from sqlsem import demo as show

    return show.demo(output.console(), seconds=seconds, workers=workers, limit=limit)
