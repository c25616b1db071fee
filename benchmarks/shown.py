"""Print the measurements as tables: ``NAME(engine, url, options)`` prints one, and returns its figures."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from benchmarks import faces, measure, queues, subjects
from benchmarks.printed import ENGINES, ahead, console, judged, table

#: The largest ratio of our time to the peer's.
PAIR = {"postgresql": 1.25, "mssql": 1.5, "sqlite": 1.2, "mysql": 1.4}
HANDOFF = {"postgresql": 1.5, "mssql": 1.8, "sqlite": 1.5, "mysql": 1.5}
HANDOFF_P99 = {"postgresql": 2.0, "mssql": 3.0, "sqlite": 1.0, "mysql": 2.0}
#: The p99 of a limit relative to the mutex's, and the per cent of grants that are seen late.
LIMIT_P99, LATE = 1.0, 1.0
STATEMENTS, CONNECTIONS, CLAIM = 1.0, 3, 1.5
#: Tasks a second of eight threads relative to one thread, at least; seconds to put 100,000; ms until a task starts.
THREADS, PUT, TAKEN_UP = 0.9, 3.0, 50.0
#: Hand-offs of asyncio relative to threads, between processes and in one.
AIO, AIO_INSIDE = 1.5, 1.3


#: Contenders of the hand-off, and the seconds that do not count (T-SQL is compiled in each session).
PROCESSES = {"postgresql": 8, "mssql": 4, "sqlite": 8, "mysql": 8}
WARM = {"postgresql": 0.0, "mssql": 8.0, "sqlite": 0.0, "mysql": 0.0}


def uncontended(engine: str, url: str, options: dict[str, Any]) -> Any:
    pairs = measure.uncontended(engine, url, options["rounds"])
    _, peer = list(pairs)[:2]
    shown = table(f"{ENGINES[engine]}: uncontended, µs (medians)", "", "acquire", "release", "both", f"of {peer}")
    for name, pair in pairs.items():
        ratio = pair.both / pairs[peer].both
        against = judged(ratio, PAIR[engine]) if name == "sqlsem" else f"{ratio:.2f}"
        shown.add_row(name, f"{pair.acquire:.0f}", f"{pair.release:.0f}", f"{pair.both:.0f}", against)
    console.print(shown)
    return {name: asdict(pair) for name, pair in pairs.items()}


def handoff(engine: str, url: str, options: dict[str, Any]) -> Any:
    number, hold = options["processes"] or PROCESSES[engine], options["hold"]
    warm = WARM[engine] if options["warm"] is None else options["warm"]
    timing = (hold / 1000, options["seconds"], warm, options["turns"])
    with console.status("") as status:
        by_subject = measure.handoff(engine, url, number, *timing, status.update)
    _, peer = list(by_subject)[:2]
    shown = table(
        f"{ENGINES[engine]}: hand-off between {number} processes, {hold:g} ms hold (release called → acquire returned)",
        *("", "p50 µs, all", "to itself %", "p50 µs, to another", f"of {peer}'s", "p99 µs", f"of {peer}'s"),
        *("barged %", "longest wait ms", "overlaps", "grants/s"),
    )
    for name, figures in by_subject.items():
        # Only hand-offs to another process are judged: a grant to the releasing process, while others wait, is none.
        ratios = (
            figures.to_another / by_subject[peer].to_another,
            figures.to_another_p99 / by_subject[peer].to_another_p99,
        )
        p50, p99 = (
            judged(ratio, target[engine]) if name == "sqlsem" else f"{ratio:.2f}"
            for ratio, target in zip(ratios, (HANDOFF, HANDOFF_P99), strict=True)
        )
        shown.add_row(
            *(name, f"{figures.p50:.0f}", f"{figures.to_itself:.1f}", f"{figures.to_another:.0f}", p50),
            *(
                f"{figures.to_another_p99:.0f}",
                p99,
                f"{figures.barged:.1f}",
                f"{figures.longest_wait:.0f}",
                str(figures.overlaps),
                f"{figures.rate:.0f}",
            ),
        )
    console.print(shown)
    names = ("p50", "p99", "to_itself", "to_another", "to_another_p99", "barged", "longest_wait", "overlaps", "rate")
    return {
        name: {column: getattr(figures, column) for column in names} | {"grants": len(figures.visits)}
        for name, figures in by_subject.items()
    }


def limit(engine: str, url: str, options: dict[str, Any]) -> Any:
    """Compare a limit of 3 with a limit of 1."""
    number, hold = options["crew"], options["hold"]
    with console.status("limit"):
        by_limit = measure.admission(url, (3, 1), number, hold / 1000, options["seconds"], options["turns"])
    shown = table(
        f"{ENGINES[engine]}: {number} processes want a place, {hold:g} ms hold (release called → acquire returned)",
        *("", "p50 µs", "p99 µs", "p99 of the mutex's", "seen > 2 ms after a later position's, %", "grants"),
    )
    for places, figures in by_limit.items():
        p99 = "" if places == 1 else judged(figures.p99 / by_limit[1].p99, LIMIT_P99)
        late = judged(figures.late_share, LATE)
        name = "mutex" if places == 1 else f"limit of {places}"
        shown.add_row(name, f"{figures.p50:.0f}", f"{figures.p99:.0f}", p99, late, str(figures.grants))
    console.print(shown)
    names = ("p50", "p99", "late_share", "grants")
    return {places: {column: getattr(figures, column) for column in names} for places, figures in by_limit.items()}


def aio(engine: str, url: str, options: dict[str, Any]) -> Any:
    number, hold = options["processes"] or PROCESSES[engine], options["hold"]
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
        for by_face, target in zip(forms.values(), (AIO, AIO_INSIDE), strict=True):
            cells += [f"{by_face[face].p50:.0f}", judged(by_face[face].p50 / by_face["threads"].p50, target)]
        shown.add_row(face, *cells)
    console.print(shown)
    return {
        "uncontended": {face: asdict(pair) for face, pair in pairs.items()},
        "handoff": {form: {face: figures.p50 for face, figures in by_face.items()} for form, by_face in forms.items()},
    }


def waiters(engine: str, url: str, options: dict[str, Any]) -> Any:
    with console.status(f"{options['waiters']} processes wait for {options['wait']:g} s"):
        crowd = measure.waiters(engine, url, options["waiters"], options["wait"])
    shown = table(
        f"{ENGINES[engine]}: {crowd.number} waiting processes, for {crowd.seconds:.0f} s",
        *("calls/s and waiter", "statements/s and waiter", "server's CPU %", "CPU ms/s of one waiter"),
    )
    # Without a server, a call is a wait that reads the file itself.
    shown.add_row(
        judged(crowd.calls, STATEMENTS),
        "-" if crowd.statements is None else judged(crowd.statements, STATEMENTS),
        "-" if crowd.server_cpu is None else f"{100 * crowd.server_cpu:.1f}",
        f"{crowd.client_cpu:.2f}",
    )
    console.print(shown)
    return asdict(crowd)


def connections(engine: str, url: str, options: dict[str, Any]) -> Any:
    with console.status("connections"):
        holding, maximum = measure.connections(url, options["locks"], options["threads"])
    shown = table(
        f"{ENGINES[engine]}: connections of one process",
        *("", f"{options['locks']} locks held", f"and {options['threads']} threads waiting for others"),
    )
    shown.add_row("sqlsem", judged(holding, CONNECTIONS, "d"), str(maximum))
    console.print(shown)
    return {"holding": holding, "waiting": maximum}


def throughput(engine: str, url: str, options: dict[str, Any]) -> Any:
    numbers = [1, 2, 4, 8, 16, 32]
    names = list(subjects.SUBJECTS[engine])
    rates_of: dict[str, list[float]] = {name: [] for name in names}
    with console.status("") as status:
        for number in numbers:
            for name in names:
                status.update(f"{name}, {number} processes")
                contention = measure.Contention()
                contention.add(measure.contend(engine, name, url, number, 0.0, options["seconds"]))
                rates_of[name].append(contention.rate)
    shown = table(f"{ENGINES[engine]}: grants a second, no hold, by processes", "", *map(str, numbers))
    for name, rates in rates_of.items():
        shown.add_row(name, *(f"{rate:.0f}" for rate in rates))
    console.print(shown)
    return {name: dict(zip(numbers, rates, strict=True)) for name, rates in rates_of.items()}


def tasks(engine: str, url: str, options: dict[str, Any]) -> Any:
    """Print the tasks per second of sqlsem and of its peers."""
    number, workers = options["tasks"], options["workers"]
    forms = {"1 worker": (1, 1), f"{workers} processes": (workers, 1), f"{workers} in 1 process": (1, workers)}
    subjects_of = queues.subjects(engine)
    turns: dict[str, dict[str, list[float]]] = {name: {} for name in subjects_of}
    with console.status("") as status:
        for turn in range(options["turns"]):
            for form, (processes, at_once) in forms.items():
                for name, subject in subjects_of.items():
                    if (processes > 1 and not subject.processes) or (at_once > 1 and not subject.at_once):
                        continue
                    status.update(f"{name}, {form}, turn {turn + 1} of {options['turns']}")
                    task_rate = queues.rate(engine, name, url, number, processes, at_once)
                    turns[name].setdefault(form, []).append(task_rate)
    rates = {name: {form: statistics.median(each) for form, each in by_form.items()} for name, by_form in turns.items()}
    shown = table(
        f"{ENGINES[engine]}: {number:,} empty Python tasks, done a second (medians of {options['turns']})",
        "",
        *(column for form in forms for column in (form, "sqlsem's, times", "with the same batches")),
    )
    for name, rate in rates.items():
        cells = []
        for form in forms:
            cells.append(f"{rate[form]:.0f}" if form in rate else "-")
            for own in ("sqlsem", queues.ours(name)):
                peer = form in rate and subjects_of[name].package != "sqlsem"
                cells.append(ahead(rates[own][form] / rate[form]) if peer else "")
        shown.add_row(f"{name} ({queues.version(subjects_of[name])})", *cells)
    console.print(shown)
    alone, together = (rates["sqlsem"][form] for form in ("1 worker", f"{workers} in 1 process"))
    console.print(f"{workers} threads of one process, of one: {judged(together / alone, THREADS, minimum=True)}")
    return {"rates": turns}


def puts(engine: str, url: str, options: dict[str, Any]) -> Any:
    """Print the seconds to put many tasks at once."""
    number = options["put"]
    seconds_of: dict[str, float] = {}
    for name, subject in queues.subjects(engine).items():
        if subject.package not in {queues.subjects(engine)[name].package for name in seconds_of}:
            with console.status(f"{name} puts {number:,} tasks"):
                seconds_of[name] = queues.put_seconds(engine, name, url, number)
    shown = table(f"{ENGINES[engine]}: {number:,} tasks put at once, s", "", "seconds", "sqlsem's, times")
    for name, seconds in seconds_of.items():
        maximum = PUT * number / 100_000
        own = name == "sqlsem"
        shown.add_row(
            *(name, judged(seconds, maximum) if own else f"{seconds:.2f}"),
            "" if own else ahead(seconds / seconds_of["sqlsem"]),
        )
    console.print(shown)
    return seconds_of


def idle(engine: str, url: str, options: dict[str, Any]) -> Any:
    """Print the cost of idle workers, and the wait of a task that another process puts."""
    results = {}
    shown = table(
        f"{ENGINES[engine]}: idle workers, and what another process puts",
        *("processes, threads of each", "idle: statements/s and process", "put → begun: p50 ms", "p99 ms"),
    )
    for processes, threads in ((1, 1), (1, options["workers"]), (options["workers"], 1)):
        with console.status(f"{processes} processes with {threads} threads have nothing to do"):
            figures = queues.idle(engine, url, processes, threads, options["idle"], options["puts"])
        results[f"{processes} x {threads}"] = asdict(figures)
        shown.add_row(
            *(f"{processes}, {threads}", judged(figures.statements, STATEMENTS)),
            *(f"{figures.p50:.1f}", judged(figures.p99, TAKEN_UP, ".1f")),
        )
    console.print(shown)
    return results


def claim(engine: str, url: str, options: dict[str, Any]) -> Any:
    """Print the cost of a claim in a large table."""
    with console.status("the cost of a claim"):
        cost = queues.claim_cost(engine, url, options["pending"], options["finished"], options["claims"])
    shown = table(
        f"{ENGINES[engine]}: one claim and its end, µs (medians)",
        *("", "1,000 pending", f"{options['pending']:,} pending, {options['finished']:,} finished", "ratio"),
    )
    shown.add_row("sqlsem", f"{cost.few:.0f}", f"{cost.many:.0f}", judged(cost.many / cost.few, CLAIM))
    console.print(shown)
    return asdict(cost)
