"""``sqlsem doctor``: checks the installation, and says how to correct what is wrong."""

from __future__ import annotations

import time
from collections import Counter

import click
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sqlsem import config, sql, tasks
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.options import json_option
from sqlsem.engines.base import Engine, Session
from sqlsem.engines.protocol import Capability, Check
from sqlsem.ops.terminal import output
from sqlsem.sql.features import FEATURES, listed
from sqlsem.util.printable import clean
from sqlsem.values.errors import ConfigurationError, SqlsemError

#: More members of one login than this are reported: usually a program leaks them.
MANY_MEMBERS = 500
AGAIN = "Run again with -vv to see all of it."


@click.command(short_help="Check that everything is in order.")
@json_option
@connecting
def doctor(options: Connecting, as_json: bool) -> int:
    """Check the installation, and print how to correct what is wrong.

    Checks the driver, connection, tables and features, permissions, clock, isolation, whether a session's lock stays
    with its session (behind a pooler it may not), the time zones of schedules, and acquires and releases a mutex.
    Leaves one line in the history (and creates the embedded SQLite file, if that is missing).

    \b
    Examples:
      sqlsem doctor
      sqlsem --url postgresql://etl@db/dwh doctor --json

    \b
    Exit codes: 0 all in order, 1 something is not.
    """
    label, checks = diagnose(options)
    ok = all(check.ok for check in checks)
    if as_json:
        fields = [{"name": c.name, "ok": c.ok, "detail": c.detail, "mend": c.mend} for c in checks]
        output.print_json({"ok": ok, "where": label, "checks": fields})
        return 0 if ok else 1
    console = output.console()
    if label:
        output.show(console, Text(label, style="bold"))
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
    """Run the checks, most of them only if the earlier ones passed. Return the database's name, and the results."""
    try:
        engine = options.engine()
    except ConfigurationError as exc:
        return None, [_failed("url", exc, "Correct $SQLSEM_URL, --url or the sqlsem.toml; see: sqlsem --help")]
    note = f"It is a file {config.EMBEDDED}." if options.settings.embedded else ""
    checks = [Check("url", True, f"{engine.name}, from {options.settings.source}", note)]
    try:
        began = time.perf_counter()
        session = engine.connect("look")
    except SqlsemError as exc:
        mend = "Is the server up and to be reached from here, and are the address, name and password right?"
        return engine.label, [*checks, _failed("connect", exc, mend)]
    try:
        checks.append(Check("connect", True, f"in {(time.perf_counter() - began) * 1000:.1f} ms"))
        if engine.has(Capability.TABLES):
            checks += [_schema(session), *_features(engine), *_engine(session)]
        in_order = all(check.ok for check in checks if check.name == "schema")
        if engine.has(Capability.SCHEDULES) and in_order and session.has_feature("queue"):
            checks += _schedules(session)
    finally:
        session.close()
    if all(check.ok for check in checks if check.name == "schema"):
        try:
            if engine.has(Capability.TABLES) and engine.installed.has("operate"):
                checks.append(_members(options))
            checks.append(_round_trip(options))
        except SqlsemError as exc:
            checks.append(_failed("round trip", exc, AGAIN))
    return engine.label, checks


def _failed(name: str, exc: Exception, mend: str) -> Check:
    """Return a failed check. An error of sqlsem ends with its remedy; for any other error, ``mend`` is the remedy."""
    detail, separator, advice = str(exc).rpartition("; ")
    if separator and isinstance(exc, SqlsemError):
        return Check(name, False, detail, f"{advice[:1].upper()}{advice[1:]}")
    return Check(name, False, " ".join(str(exc).split()) or type(exc).__name__, mend)


def _schema(session: Session) -> Check:
    try:
        settings = session.check_schema()
    except SqlsemError as exc:
        return _failed("schema", exc, "Run: sqlsem init")
    detail = f"version {settings['schema_version']}, for clients from {settings['oldest_client']} on"
    return Check("schema", True, f"{detail}; this one is {sql.LATEST}")


def _features(engine: Engine) -> list[Check]:
    """Return a check about the installed features, if the engine has features."""
    features = engine.installed.features
    if features is None or not sql.has_features(engine.name):
        return []
    rest = listed(set(FEATURES) - features)
    detail = f"{listed(features)}; not installed: {rest} (sqlsem init --add …)" if rest else f"all: {listed(features)}"
    return [Check("features", True, detail)]


def _engine(session: Session) -> list[Check]:
    try:
        return session.diagnose()
    except (SqlsemError, NotImplementedError) as exc:
        return [_failed("engine", exc, AGAIN)]


def _members(options: Connecting) -> Check:
    """Return a check about the login with the most members: too many members make overviews slow."""
    with options.coordinator(must_exist=True, announced=True) as coordinator:
        number = Counter(member.login or "" for member in coordinator.admin.overview().members)
    login, count = number.most_common(1)[0] if number else ("", 0)
    detail = f"{number.total()} members"
    if count > MANY_MEMBERS:
        detail += f", {count} of them of login {clean(login)}"
        return Check(
            "members", True, detail, f"If these are no processes of yours: sqlsem revoke --login {clean(login)}"
        )
    return Check("members", True, detail)


def _schedules(session: Session) -> list[Check]:
    """Return a check whether this host can compute the next times of the schedules that this login sees."""
    try:
        schedules = session.list_schedules(None, None)
        now = session.clock()
    except SqlsemError as exc:
        return [Check("schedules", True, f"not looked at: {exc}")]
    failures = []
    for schedule in schedules:
        try:
            tasks.next_due(schedule.cron, schedule.time_zone, now)
        except ConfigurationError as exc:
            failures.append(f"{schedule.name!r}: {exc}")
    if failures:
        mend = "Workers on this host leave them to others. Bring its time zones up to date: pip install -U tzdata"
        return [Check("schedules", True, f"this host does not know when they are due: {'; '.join(failures)}", mend)]
    return (
        [Check("schedules", True, f"{len(schedules)}, of which this host knows when they are due")] if schedules else []
    )


def _round_trip(options: Connecting) -> Check:
    """Acquire and release a mutex, and return a check with the duration."""
    with options.coordinator(announced=True, bare=True) as coordinator:
        lock = coordinator.mutex("sqlsem-doctor", note="sqlsem doctor")
        coordinator.client.member.heartbeat()
        began = time.perf_counter()
        if not lock.acquire(timeout=5):
            return Check("round trip", False, "no mutex within 5 s", "See who is there: sqlsem ls sqlsem-doctor")
        lock.release()
    return Check("round trip", True, f"a mutex acquired and released in {(time.perf_counter() - began) * 1000:.1f} ms")
