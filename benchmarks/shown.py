"""The measurements as tables: ``NAME(engine, url, options)`` prints one, and returns its figures."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from benchmarks import faces, measure, queues, subjects
from benchmarks.printed import ENGINES, ahead, console, judged, table

#: The most that we may take of what the peer takes.
TARGETS = {
    "uncontended": {"postgresql": 4.0, "mssql": 1.8, "sqlite": 5.0},
    "handoff": {"postgresql": 3.0, "mssql": 1.8, "sqlite": 2.0},
}
STATEMENTS, CONNECTIONS, CLAIM, AIO = 1.0, 3, 1.5, 1.5


def uncontended(engine: str, url: str, options: dict[str, Any]) -> Any:
    found = measure.uncontended(engine, url, options["rounds"])
    _, peer = list(found)[:2]
    shown = table(f"{ENGINES[engine]}: uncontended, µs (medians)", "", "acquire", "release", "both", f"of {peer}")
    for name, pair in found.items():
        ratio = pair.both / found[peer].both
        against = judged(ratio, TARGETS["uncontended"][engine]) if name == "sqlsem" else f"{ratio:.2f}"
        shown.add_row(name, f"{pair.acquire:.0f}", f"{pair.release:.0f}", f"{pair.both:.0f}", against)
    console.print(shown)
    return {name: asdict(pair) for name, pair in found.items()}


def handoff(engine: str, url: str, options: dict[str, Any]) -> Any:
    number, hold = options["processes"], options["hold"]
    with console.status("") as status:
        found = measure.handoff(engine, url, number, hold / 1000, options["seconds"], options["turns"], status.update)
    _, peer = list(found)[:2]
    shown = table(
        f"{ENGINES[engine]}: hand-off between {number} processes, {hold:g} ms hold (release called → acquire returned)",
        *("", "p50 µs", "p99 µs", f"p50 of {peer}'s", "to itself %", "p50 µs to another process"),
        *(f"that of {peer}'s", "barged %", "longest wait ms", "overlaps"),
    )
    for name, one in found.items():
        # Of all; and of those to another process, as to oneself, with others waiting, is no hand-off.
        ratios = (one.p50 / found[peer].p50, one.to_another / found[peer].to_another)
        of_all, of_real = (
            judged(ratio, TARGETS["handoff"][engine]) if name == "sqlsem" else f"{ratio:.2f}" for ratio in ratios
        )
        shown.add_row(
            *(name, f"{one.p50:.0f}", f"{one.p99:.0f}", of_all, f"{one.to_itself:.1f}", f"{one.to_another:.0f}"),
            *(of_real, f"{one.barged:.1f}", f"{one.longest_wait:.0f}", str(one.overlaps)),
        )
    console.print(shown)
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
    shown = table(
        f"{ENGINES[engine]}: the faces, µs (medians); hand-off with {hold:g} ms hold",
        *("", "acquire + release", "times", *(column for form in forms for column in (f"hand-off, {form}", "times"))),
    )
    for face in faces.FACES:
        cells = [f"{pairs[face].both:.0f}", f"{pairs[face].both / pairs['threads'].both:.2f}"]
        for found in forms.values():
            cells += [f"{found[face].p50:.0f}", judged(found[face].p50 / found["threads"].p50, AIO)]
        shown.add_row(face, *cells)
    console.print(shown)
    return {
        "uncontended": {face: asdict(pair) for face, pair in pairs.items()},
        "handoff": {form: {face: one.p50 for face, one in found.items()} for form, found in forms.items()},
    }


def waiters(engine: str, url: str, options: dict[str, Any]) -> Any:
    with console.status(f"{options['waiters']} processes wait for {options['wait']:g} s"):
        found = measure.waiters(engine, url, options["waiters"], options["wait"])
    shown = table(
        f"{ENGINES[engine]}: {found.number} waiting processes, for {found.seconds:.0f} s",
        *("calls/s and waiter", "statements/s and waiter", "server's CPU %", "CPU ms/s of one waiter"),
    )
    # Without a server, a call is a wait that looks at the file by itself.
    shown.add_row(
        judged(found.calls, STATEMENTS),
        "-" if found.statements is None else judged(found.statements, STATEMENTS),
        "-" if found.server_cpu is None else f"{100 * found.server_cpu:.1f}",
        f"{found.client_cpu:.2f}",
    )
    console.print(shown)
    return asdict(found)


def connections(engine: str, url: str, options: dict[str, Any]) -> Any:
    with console.status("connections"):
        holding, most = measure.connections(url, options["locks"], options["threads"])
    shown = table(
        f"{ENGINES[engine]}: connections of one process",
        *("", f"{options['locks']} locks held", f"and {options['threads']} threads waiting for others"),
    )
    shown.add_row("sqlsem", judged(holding, CONNECTIONS, "d"), str(most))
    console.print(shown)
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
    shown = table(f"{ENGINES[engine]}: grants a second, no hold, by processes", "", *map(str, numbers))
    for name, rates in found.items():
        shown.add_row(name, *(f"{rate:.0f}" for rate in rates))
    console.print(shown)
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
    shown = table(
        f"{ENGINES[engine]}: {number:,} empty Python tasks, done a second (medians of {options['turns']})",
        "",
        *(column for form in forms for column in (form, "sqlsem's, times")),
    )
    for name, one in rates.items():
        cells = []
        for form in forms:
            ratio = rates["sqlsem"][form] / one[form] if form in one else None
            cells += ["-", ""] if ratio is None else [f"{one[form]:.0f}", ahead(ratio) if name != "sqlsem" else ""]
        shown.add_row(f"{name} ({queues.version(there[name])})", *cells)
    console.print(shown)
    with console.status("the cost of a claim"):
        cost = queues.claim_cost(engine, url, options["pending"], options["finished"], options["claims"])
    shown = table(
        f"{ENGINES[engine]}: one claim and its end, µs (medians)",
        *("", "1,000 pending", f"{options['pending']:,} pending, {options['finished']:,} finished", "ratio"),
    )
    shown.add_row("sqlsem", f"{cost.few:.0f}", f"{cost.many:.0f}", judged(cost.many / cost.few, CLAIM))
    console.print()
    console.print(shown)
    return {"rates": turns, "claim": asdict(cost)}
