"""The commands that create the tables and print the scripts: ``sqlsem init``, ``sqlsem sql``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import click

from sqlsem import engines, sql
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.options import refusing
from sqlsem.engines.base import Engine
from sqlsem.engines.failures import Busy
from sqlsem.engines.installed import FeatureSelection, needed, setting_number
from sqlsem.engines.protocol import Capability
from sqlsem.ops.terminal import output
from sqlsem.sql.features import EVERYTHING, FEATURES, chosen, from_setting, listed
from sqlsem.values.errors import ConfigurationError, Unavailable

#: The pause between two attempts.
PAUSE_SECONDS = 0.25
T = TypeVar("T")
_NO_CHOICE = "{where}: it has all tables or none, so no features can be chosen (--only, --add)"
log = logging.getLogger("sqlsem")


@refusing
def feature_names(value: str) -> tuple[str, ...]:
    """Convert names of features, separated by commas."""
    names = tuple(name for name in value.replace(" ", "").split(",") if name)
    chosen(names)
    if not names:
        raise click.BadParameter(f"name some of {', '.join(FEATURES)}")
    return names


@click.command()
@click.option("--only", type=feature_names, metavar="FEATURES", help="Install only these features, with commas.")
@click.option(
    "--add",
    type=feature_names,
    metavar="FEATURES",
    help="Add these features; all: every one.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@connecting
def init(options: Connecting, only: tuple[str, ...] | None, add: tuple[str, ...] | None, dry_run: bool) -> None:
    """Create or upgrade the tables and routines.

    May be run at any time, also repeatedly and while locks are held. Prints what it will do before it does it, and
    never downgrades. For a DBA who prefers scripts, `sqlsem sql` prints them.

    A new database gets all features; an existing one is upgraded. --only installs some features: locks (always
    installed), operate, priorities, conversions, handovers, guards, rates, once, queue, batches; each includes the
    features that it needs. --add adds features later. Nothing is ever removed. On SQLite, MariaDB and MySQL there is no
    choice: all tables are made.

    \b
    Examples:
      sqlsem init --dry-run
      sqlsem init --only locks,operate
      sqlsem init --add queue
      sqlsem --schema locks init

    \b
    Exit codes: 0 done, 69 out of reach, 78 not allowed, or the tables are
      newer than this client, or have more features than --only names.
    """
    engine = options.engine()
    engine.require(Capability.TABLES, "sqlsem init")
    if (only or add) and not sql.has_features(engine.name):
        raise ConfigurationError(_NO_CHOICE.format(where=engine.label))
    selection = FeatureSelection(only or (), add or ())
    with _rights_to_install(engine):
        settings = engine.read_settings()
    output.echo(f"{engine.label}, {engine.schema_label}, table {options.options['table']}")
    # `plan` raises an error in place of a downgrade or a removal.
    plan = engine.plan(settings or {}, FeatureSelection() if settings is None else selection)
    version = setting_number(settings, "schema_version") if settings else 0
    features = selection.features(settings or {}) if settings is not None else sql.ALL
    scripts = [f"schema-{number}.sql" for number, _ in plan if number is not None]
    added = frozenset() if not settings else features - from_setting(settings.get("features"))
    if added:
        scripts += [f"schema-{number}.sql ({listed(added)})" for number in range(1, sql.LATEST + 1)]
    again_each_time = [f"{name}.sql" for name in sql.rerunnable(engine.name, features)]
    scripts += again_each_time
    if settings is None:
        output.echo("  version: unknown (the routines are missing)")
    elif version == sql.LATEST and added:
        output.echo(f"  version: {version}, up to date")
    elif version == sql.LATEST:
        output.echo(f"  version: {version}, up to date; the tables stay as they are")
    else:
        output.echo(f"  version: {version or 'not there yet'} → {sql.LATEST}")
    if settings is not None and sql.has_features(engine.name):
        _echo_features(features, added, (*selection.only, *selection.add))
    again = " again" if version == sql.LATEST and not added else ""
    if settings is None:
        scripts = ["schema scripts as needed", *again_each_time]
    output.echo(f"  {'would run' if dry_run else 'running'}{again}: {', '.join(scripts)}")
    if dry_run:
        output.echo("Nothing was changed (--dry-run).")
        return
    retry = options.options["retry"]
    session = _retrying(lambda: engine.connect("look"), retry)
    doing = ["waiting for other installers"]  # each step; the last one is under way

    def scripts_to_run(present: Mapping[str, str]) -> Iterator[tuple[int | None, str]]:
        steps = engine.plan(present, selection)
        for number, step in enumerate(steps, 1):
            doing.append(f"running script {number} of {len(steps)}")
            yield step
        doing.append("committing")

    try:
        with _rights_to_install(engine), options.progress(lambda: doing[-1]):
            # (Another session kept a lock: nothing was changed.)
            _retrying(lambda: session.install(scripts_to_run), retry, Busy)
    finally:
        session.close()
    output.echo("Done.")


def _echo_features(features: Collection[str], added: Collection[str], requested: Collection[str]) -> None:
    """Print the features that a database has or gets, and those that it lacks."""
    reasons = needed(requested, features) if requested else {}
    words = [f"{name} (for {reasons[name]})" if name in reasons else name for name in FEATURES if name in features]
    rest = listed(set(FEATURES) - set(features))
    output.echo(f"  features: {', '.join(words)}" + (f"; not installed: {rest} (init --add)" if rest else ""))
    if added:
        output.echo(f"  adding: {listed(added)}")


@contextlib.contextmanager
def _rights_to_install(engine: Engine) -> Iterator[None]:
    """A context that rewrites errors about missing rights: the engine's advice is for users, not for installers."""
    try:
        yield
    except ConfigurationError as exc:
        if not engine.is_permission_error(exc):
            raise
        raise ConfigurationError(
            f"{engine.label}: {engine.database_message(exc)}; init needs a login that may create a schema in this "
            f"database or, when the tables are there, the one that owns them. For a DBA: sqlsem sql {engine.name}"
        ) from exc


def _retrying(call: Callable[[], T], retry: float, error: type[Unavailable] = Unavailable) -> T:
    """Return the result of a call; repeat it for ``retry`` seconds while it raises that error."""
    deadline = time.monotonic() + retry
    while True:
        try:
            return call()
        except error as exc:
            if time.monotonic() >= deadline:
                raise
            log.info("%s; trying again", exc)
            time.sleep(PAUSE_SECONDS)


@click.command("sql", short_help="Print the scripts of an engine.")
@click.argument("engine", required=False, metavar="[ENGINE]")
@click.argument("script", required=False, metavar="[SCRIPT]")
@click.option("--only", type=feature_names, metavar="FEATURES", help="Print only these features; separated by commas.")
@click.option(
    "--add",
    type=feature_names,
    metavar="FEATURES",
    help="Print what adds these features to those of --only.",
)
@connecting
def sql_(
    options: Connecting,
    engine: str | None,
    script: str | None,
    only: tuple[str, ...] | None,
    add: tuple[str, ...] | None,
) -> None:
    """Print the scripts of an engine, with --schema and --table filled in.

    ENGINE is sqlite, postgresql, mysql or mssql; left out, the one of the URL. SCRIPT is schema, routines, priorities,
    deadlocks, public (what sessions call), rates, tasks, blocked_tasks, batches, conversions, handovers, overview,
    guards, once, features, permissions, drop or client (what the Python client sends); left out, all but the last two
    in the order in which to run them. SQLite, MariaDB and MySQL have no routines, and so fewer scripts. Connects to
    nothing.

    --only prints just the tables, routines and roles of some features, and of those that they need: locks (always
    included), operate, priorities, conversions, handovers, guards, rates, once, queue, batches. --only locks --add
    queue prints what a database with feature locks lacks for feature queue.

    \b
    Examples:
      sqlsem sql mssql > for-the-dba.sql
      sqlsem sql mssql --only locks,operate
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
    if (only or add) and not sql.has_features(name):
        raise click.UsageError(_NO_CHOICE.format(where=name))
    if add and not only:
        raise click.UsageError("--add needs --only, with the features that the database has.")
    present = chosen(only or (EVERYTHING,))
    features = present | chosen(add or ())
    if script is not None and sql.FEATURE_OF[script] not in features:
        raise click.UsageError(f"Script {script} belongs to feature {sql.FEATURE_OF[script]}, which --only leaves out.")
    around = sql.by_hand(name) if script is None else None
    if around is not None:
        output.echo(*f"{around['begin']};".split("\n"), "GO", "")
    for part in ("schema", *sql.rerunnable(name, features)) if script is None else (script,):
        part_features = features - present if part == "schema" and add else features
        named = {key: options.options[key] for key in ("schema", "table")}
        text = sql.script(name, part, **named, features=part_features)
        output.echo(*text.rstrip().split("\n"), "")
    if around is not None:
        output.echo(f"{around['commit']};", "GO")
