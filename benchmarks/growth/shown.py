"""Print the tables of ``python -m benchmarks growth``, and judge each slope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.growth import looking, snapshots, waiters
from benchmarks.printed import ENGINES, console, judged, table

#: Relative to the fewest waiters: hand-offs a second at least, a try and a registration at most.
RATE, ATTEMPT = 0.8, 1.3
#: Statements a second and process; and the share of a core, the server's for all waiters.
STATEMENTS, SERVER_CPU = 1.0, 0.05
#: The largest growth of a step under an old snapshot.
SNAPSHOT = 1.3
#: Milliseconds at most: for 10,000 rows (fewer: in proportion), a page of history, 1,000 waiting owners.
ROWS, PAGE, SEARCH = 500.0, 50.0, 100.0
#: Waiters for a raw lock: each needs a connection.
RAW = 500
PARTS = ("waiters", "snapshots", "looking")
QUICK = {"crowds": (100, 1000), "under": 5000, "rows": (1000, 4000), "past": (10_000, 100_000), "owners": (10, 100)}
FULL = {
    "crowds": (100, 1000, 10_000),
    "under": 100_000,
    "rows": (1000, 10_000),
    "past": (10_000, 100_000, 1_000_000),
    "owners": (10, 100, 1000),
}


def growth(engine: str, url: str, options: dict[str, Any]) -> Any:
    """Print all slopes of one engine."""
    sizes: dict[str, Any] = {**(QUICK if options["quick"] else FULL)}
    sizes.update({name: given for name in sizes if (given := options.get(name))})
    parts: dict[str, Callable[..., Any]] = dict(zip(PARTS, (_waiters, _snapshots, _looking), strict=True))
    return {name: parts[name](engine, url, sizes, options) for name in options["parts"] or parts}


def _waiters(engine: str, url: str, sizes: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    name, seconds = ENGINES[engine], 4.0 if options["quick"] else 8.0
    measured: list[waiters.Crowd] = []
    shown = table(
        f"{name}: waiters on one resource (ratios: of the fewest)",
        *("waiters", "processes", "hand-offs/s", "a try, µs", "a registration, µs"),
        *("idle: statements/s, process", "server's CPU, cores", "clients'"),
    )
    first: waiters.Crowd | None = None
    for several in (False, True):
        for number in sizes["crowds"]:
            processes = number // 100 if several else 1
            if several and processes < 2:
                continue  # it is the same
            with console.status(f"{name}: {number:,} waiters in {processes} processes"):
                crowd = waiters.crowd(engine, url, number, processes, seconds)
            if crowd is None:
                shown.add_row(f"{number:,}", str(processes), f"not in the queue in {waiters.QUEUE_SECONDS:g} s")
                break
            first = first or crowd
            measured.append(crowd)
            shown.add_row(
                *(f"{number:,}", str(crowd.processes), _beside(crowd, first, "rate", RATE, minimum=True)),
                *(_beside(crowd, first, column, ATTEMPT) for column in ("attempt", "registration")),
                *(judged(crowd.statements, STATEMENTS), judged(crowd.server_cpu, SERVER_CPU, ".3f")),
                f"{crowd.client_cpu:.2f}",
            )
    beside: list[tuple[str, waiters.Crowd]] = []
    if measured and measured[-1].processes > 1:
        # Some costs grow with the waiters, others with the processes, each of which has to be woken.
        last = measured[-1]
        with console.status(f"{name}: a waiter in each of {last.processes} processes"):
            crowd = waiters.crowd(engine, url, last.processes, last.processes, seconds)
        if crowd is not None:
            rate = (
                f"{crowd.rate:.0f}, with {last.waiters:,}: {judged(last.rate / crowd.rate, RATE, minimum=True)} times"
            )
            shown.add_row(f"one in each: {crowd.waiters}", str(crowd.processes), rate)
            beside.append(("one in each", crowd))
    raw: list[waiters.Crowd] = []
    if engine == "postgresql":
        # As far as there are connections, in as many processes as ours: the growth of a lock of the server itself.
        crowds = {(min(number, RAW), several) for number in sizes["crowds"] for several in {1, max(1, number // 100)}}
        for number, processes in sorted(crowds, key=lambda crowd: crowd[::-1]):
            with console.status(f"pg_advisory_lock: {number} waiters in {processes} processes"):
                crowd = waiters.raw_crowd(url, number, processes)
            rate = f"{crowd.rate:.0f}" + (f": {crowd.rate / raw[0].rate:.2f}" if raw else "")
            shown.add_row(f"raw: {number:,}", str(processes), rate)
            raw.append(crowd)
    console.print(shown)
    beside += [("pg_advisory_lock", crowd) for crowd in raw]
    return [asdict(crowd) for crowd in measured] + [{**asdict(crowd), "subject": subject} for subject, crowd in beside]


def _beside(crowd: waiters.Crowd, first: waiters.Crowd, column: str, target: float, *, minimum: bool = False) -> str:
    """Return a figure, and its ratio to that of the fewest."""
    value, base = getattr(crowd, column), getattr(first, column)
    return f"{value:.0f}" if crowd is first else f"{value:.0f}: {judged(value / base, target, minimum=minimum)}"


def _snapshots(engine: str, url: str, sizes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    maximum, seconds, name = sizes["under"], options["budget"], ENGINES[engine]
    works: dict[str, dict[str, snapshots.Work]] = {
        "a pair": {"sqlsem": snapshots.pairs},
        "a task": snapshots.subjects(engine),
    }
    kinds = snapshots.SNAPSHOTS[engine]
    shown = table(
        f"{name}: done one after the other while an old snapshot is open (each at most {seconds:g} s)",
        *("", "snapshot", "first, µs", "done", "last, µs", "grown, times", "once it is gone, of without, times"),
    )
    results: dict[str, Any] = {}
    for work_name, subjects in works.items():
        for subject, work in subjects.items():
            for kind, snapshot in kinds.items():
                if subject != "sqlsem" and snapshot is not next(iter(kinds.values())):
                    continue  # it is the same for them
                with console.status(f"{name}: {work_name} of {subject}, {kind}"):
                    curve = snapshots.curve(url, work, snapshot, maximum, seconds)
                results.setdefault(work_name, {}).setdefault(subject, {})[kind] = asdict(curve)
                grown = judged(curve.growth, SNAPSHOT) if subject == "sqlsem" else f"{curve.growth:.2f}"
                shown.add_row(
                    *(f"{work_name}, {subject}", kind, f"{curve.points[0].cost:.0f}", f"{curve.points[-1].done:,}"),
                    *(f"{curve.points[-1].cost:.0f}", grown, f"{curve.after:.2f}"),
                )
    console.print()
    console.print(shown)
    return results


def _looking(engine: str, url: str, sizes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    name = ENGINES[engine]
    looks: dict[str, tuple[Callable[..., dict[str, float]], Any, Callable[[int], float]]] = {
        "rows of one resource": (looking.entries, sizes["rows"], lambda number: ROWS * max(number, 1000) / 10_000),
        "pending tasks": (looking.tasks, sizes["rows"], lambda number: ROWS * max(number, 1000) / 10_000),
        "rows of history": (looking.history, sizes["past"], lambda _: PAGE),
        "waiting owners": (looking.deadlocks, sizes["owners"], lambda _: SEARCH),
    }
    results: dict[str, Any] = {}
    for subject, (look, numbers, target) in looks.items():
        milliseconds_of = results[subject] = {}
        for number in numbers:
            with console.status(f"{name}: {number:,} {subject}"):
                milliseconds_of[number] = look(engine, url, number)
        columns = list(milliseconds_of[numbers[0]])
        shown = table(f"{name}: looking, ms", subject, *columns)
        for number, milliseconds in milliseconds_of.items():
            shown.add_row(f"{number:,}", *(judged(milliseconds[column], target(number), ".1f") for column in columns))
        console.print()
        console.print(shown)
    return results
