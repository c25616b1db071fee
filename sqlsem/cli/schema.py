"""The commands that make the tables and print the scripts: ``sqlsem init``, ``sqlsem sql``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import click

from sqlsem import engines, sql
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.engines.base import Engine, Session
from sqlsem.engines.roles import Tables
from sqlsem.errors import ConfigurationError, Unavailable
from sqlsem.terminal import output

__all__ = ["init", "sql_"]

#: Between two tries to connect.
PAUSE_SECONDS = 0.25
log = logging.getLogger("sqlsem")


@click.command()
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
    engine.require(Tables, "sqlsem init")
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
            time.sleep(PAUSE_SECONDS)


@click.command("sql", short_help="Print the scripts of an engine.")
@click.argument("engine", required=False, metavar="[ENGINE]")
@click.argument("script", required=False, metavar="[SCRIPT]")
@connecting
def sql_(options: Connecting, engine: str | None, script: str | None) -> None:
    """Print the scripts of an engine, with --schema and --table filled in.

    ENGINE is sqlite, postgresql or mssql; left out, the one of the URL. SCRIPT is schema, routines, priorities,
    deadlocks, public (what sessions call), rates, tasks, parked, batches, conversions, handovers, overview, guards,
    once, permissions, drop or client (what the Python client sends); left out, all but the last two in the order in
    which to run them. SQLite has no routines, and so fewer scripts. Connects to nothing.

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
    if name not in engines.ENGINES:
        raise click.UsageError(f"There is no engine of that name; there are {', '.join(engines.ENGINES)}.")
    if script is not None and script not in sql.SCRIPTS:
        raise click.UsageError(f"There is no script {script!r}; there are {', '.join(sql.SCRIPTS)}.")
    for part in ("schema", *sql.rerunnable(name)) if script is None else (script,):
        text = sql.script(name, part, schema=options.schema, table=options.table)
        output.echo(*text.rstrip().split("\n"), "")
