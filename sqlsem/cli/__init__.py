"""The command line: ``sqlsem``. Each command explains itself with ``--help``."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import click

import sqlsem
from sqlsem.cli.connecting import Connecting
from sqlsem.cli.group import Commands, Loaded
from sqlsem.cli.options import Named, duration
from sqlsem.util.printable import CleanFormatter

__all__ = ["main"]

log = logging.getLogger("sqlsem")

#: The commands by the headings of the help, each with its module and variable. The first heading has the commands that
#: most users need; the other commands come by subject.
COMMANDS = {
    "Core": {
        **{"init": "schema:init", "doctor": "doctor:doctor", "run": "run:run", "ls": "locks:ls", "why": "why:why"},
        **{"history": "locks:history", "set": "locks:set_", "pause": "locks:pause", "resume": "locks:resume"},
        "revoke": "locks:revoke",
    },
    "Locks": {
        "rates": "listings:rates",
        "once": "listings:once",
        "leader": "listings:leader",
        "guard": "listings:guard",
    },
    "Work queue": {
        **{"put": "put:put", "work": "work:work", "queues": "tasks:queues", "tasks": "tasks:tasks_"},
        **{"schedules": "tasks:schedules", "batch": "batches:batch"},
    },
    "Operate": {
        **{"top": "watch:top", "dashboard": "watch:dashboard", "metrics": "metrics:metrics", "reap": "locks:reap"},
    },
    "Reports": {"timeline": "nights:timeline", "audit": "nights:audit", "replay": "nights:replay"},
    "Database": {
        **{"config": "config:config_", "sql": "schema:sql_", "certify": "certify:certify", "demo": "watch:demo"},
        **{"completion": "completion:completion", "man": "completion:man"},
    },
}


@contextlib.contextmanager
def _logging(verbose: int) -> Iterator[None]:
    """A context in which the library logs to stderr; without -v it logs nothing, as the command prints errors."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr) if verbose else logging.NullHandler()
    handler.setFormatter(
        CleanFormatter("sqlsem: %(message)s" if verbose < 2 else "%(asctime)s %(threadName)s %(message)s")
    )
    level, propagate = log.level, log.propagate
    log.setLevel({0: logging.CRITICAL, 1: logging.INFO}.get(verbose, logging.DEBUG))
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
        log.setLevel(level)  # (An assignment would leave what the logger has cached.)


@click.group(
    cls=Commands,
    commands=Loaded({name: place for group in COMMANDS.values() for name, place in group.items()}),
    headings={heading: tuple(group) for heading, group in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
    epilog="""\b
Examples:
  export SQLSEM_URL=postgresql://etl@db/dwh     (or a sqlsem.toml)
  sqlsem doctor                                 is everything in order?
  sqlsem run --limit etl=3 -- python load.py    at most three at a time
  sqlsem ls                                     who holds, who waits

\b
Exit codes: 0 done, 1 not in order (doctor, certify, audit, revoke), 64 wrong
  usage, 69 database out of reach, 70 a fault of sqlsem's, 74 done, but the
  output could not be written, 75 not in time, 76 lock lost, 78
  configuration or schema. `sqlsem run` has more.
""",
)
@click.option(
    "--url",
    metavar="URL",
    help="The database: sqlite:///file.db, postgresql://…, mysql://…, mssql://… or an ODBC string. All users of this "
    "host can read an argument (ps), so give a password in $SQLSEM_URL, which is the default. Without either: a "
    "profile, or a sqlsem.toml of the project or of yours; else an SQLite file of this user and host.",
)
@click.option(
    "--profile",
    type=Named(str, "profile"),
    metavar="NAME",
    help="The database by its name in a sqlsem.toml of yours or of the project. Left out: $SQLSEM_PROFILE.",
)
@click.option("--schema", help="The schema of the tables (SQLite: their prefix).  [default: sqlsem]")
@click.option("--table", help="The name of the queue's table.  [default: ProcessControl]")
@click.option(
    "--grace",
    type=duration,
    help="Seconds after which a process that cannot be found counts as dead.  [default: 5]",
)
@click.option("--lease", type=duration, help="Use a lease of so many seconds, as behind a pooler.")
@click.option("--retry", type=duration, help="Seconds to retry during an outage of the database.  [default: 10]")
@click.option("-q", "--quiet", is_flag=True, help="Do not print which database is used, or where tasks come from.")
@click.option(
    "-v", "--verbose", count=True, show_default=False, help="Log what happens; twice: everything, with tracebacks."
)
@click.version_option(sqlsem.__version__, prog_name="sqlsem")
@click.pass_context
def main(
    ctx: click.Context,
    /,
    url: str | None,
    profile: str | None,
    verbose: int,
    quiet: bool,
    **given: Any,
) -> None:
    """Locks in the SQL database you already have: mutex, N-way limit, reader/writer, ordered stages.

    All requests are rows of one table, in their order, which everyone can read.
    """
    main.traces = verbose > 1
    ctx.with_resource(_logging(verbose))
    options = {name: value for name, value in given.items() if value is not None}
    ctx.obj = Connecting(url, profile, options, verbose, quiet)
