"""Chooses the cases of a run. The default run takes minutes on two cores, so it has a part of the full product.

`durations.txt` lists the slow functions: the seconds of a case, and of those the seconds of a processor, as
``./test.sh --all --record`` measured them.

    --default   what `./test.sh` runs: see `_of_function`
    --rest      what the default run leaves out
    --all       both; also when tests are chosen by file, name (``file::test``, ``-k``) or marker (``-m``)
    --quick     while one edits: of each fast function one case, in this process's databases only
    --shard 1/2 of these cases the first half, chosen by a hash of each case's id

All choices are the same in each run and on each machine.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

DURATIONS = Path(__file__).with_name("durations.txt")
KINDS = {
    "default": "the cases that ./test.sh runs",
    "rest": "the cases that the default run leaves out",
    "all": "all cases",
    "quick": "of each fast function one case, in SQLite and memory",
}
#: Where `--quick` looks.
QUICK = ("tests/unit", "tests/conformance")
#: Seconds of a case. From NOTICED on, its function is listed in durations.txt, and is in no quick run. From SLOW on, it
#: has one case in the default run; from NIGHTLY on, none.
NOTICED, SLOW, NIGHTLY = 0.2, 0.5, 5.0
#: The same by seconds of a processor, of which two cores have few to share: one case, none.
BUSY, BUSIEST = 0.2, 0.4
#: An engine that runs the statements of another engine has one in SIBLING_SAMPLE of the fast functions of SIBLING_TESTS
#: in the default run, and the tests that are only about it.
SIBLINGS, SIBLING_SAMPLE, SIBLING_TESTS = ("mysql",), 12, "tests/conformance"
#: A function with more variants than SMALL has one in SAMPLE of them in the default run.
SMALL, SAMPLE = 4, 6


@dataclass(frozen=True)
class Case:
    """A case of a test function.

    Attributes:
        id: The node's id.
        function: That id without parameters.
        engine, face: The parameters of these names, if it has them.
        variant: All other parameters, as pytest writes them.
        sample: The number of `sampled`, if the function has that marker.
        kept: True for a function with the marker `kept`: the default run has all cases, but for an engine's sibling's.
    """

    id: str
    function: str
    engine: str | None = None
    face: str | None = None
    variant: str = ""
    sample: int | None = None
    kept: bool = False

    @classmethod
    def of(cls, item: pytest.Item) -> Case:
        function = item.nodeid.split("[", 1)[0]
        parameters = getattr(item, "callspec", None)
        engine = parameters.params.get("engine_name") if parameters else None
        face = parameters.params.get("face") if parameters else None
        words = [word for word in (parameters.id if parameters else "").split("-") if word not in (engine, face)]
        marker = item.get_closest_marker("sampled")
        return cls(
            item.nodeid,
            function,
            engine,
            face,
            "-".join(words),
            marker.args[0] if marker else None,
            item.get_closest_marker("kept") is not None,
        )


class Cost(NamedTuple):
    """The seconds of a case, and of those the seconds of a processor."""

    seconds: float = 0.0
    busy: float = 0.0

    @property
    def is_slow(self) -> bool:
        return self.seconds >= SLOW or self.busy >= BUSY

    @property
    def is_nightly(self) -> bool:
        return self.seconds >= NIGHTLY or self.busy >= BUSIEST


def read_durations(path: Path = DURATIONS) -> dict[str, Cost]:
    """Return the cost of a case, by function, for the slow functions."""
    lines = (line.split(" ", 2) for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {function: Cost(float(seconds), float(busy)) for seconds, busy, function in lines}


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


def chosen(kind: str, cases: Sequence[Case], costs: Mapping[str, Cost]) -> set[str]:
    """Return the ids of the cases that a run of this kind has."""
    if kind == "all":
        return {case.id for case in cases}
    functions = defaultdict(list)
    for case in cases:
        functions[case.function].append(case)
    if kind == "quick":
        return {
            several[0].id
            for function, several in functions.items()
            if function not in costs and function.startswith(QUICK)
        }
    default = {
        case.id
        for function, several in functions.items()
        for case in _of_function(several, costs.get(function, Cost()))
    }
    return default if kind == "default" else {case.id for case in cases} - default


def shard(text: str) -> tuple[int, int]:
    """Return the number of a part of the cases, and the number of parts: (1, 2) for ``1/2``."""
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(f"{text}: the parts are 1/{parts} to {parts}/{parts}")
    return number, parts


def in_shard(id: str, part: tuple[int, int]) -> bool:
    """Return True if a case belongs to this part of the cases."""
    number, parts = part
    return _number(id) % parts == number - 1


def _of_function(cases: Sequence[Case], cost: Cost) -> Iterable[Case]:
    """Return the cases of one function in the default run.

    A slow function has one case. Of the others, SQLite has both faces, or another engine if SQLite is none of its
    engines; each other engine has the first variant and a sample, with the first face, and of the second one a sample.
    MariaDB, which runs the statements of SQLite, has the first variant of a sample of the fast functions, and of its
    own functions the first variant and a sample.
    """
    first = cases[0]
    without_siblings = [case for case in cases if case.engine not in SIBLINGS] or cases
    if first.kept:
        return without_siblings
    if cost.is_nightly:
        return []
    if cost.is_slow and first.sample is None:
        return [without_siblings[_number(first.function) % len(without_siblings)]]
    home = "sqlite" if any(case.engine == "sqlite" for case in cases) else first.engine
    is_small = home not in SIBLINGS and first.sample is None and len({case.variant for case in cases}) <= SMALL
    sample = first.sample or SAMPLE

    def is_taken(case: Case) -> bool:
        is_typical = case.variant == first.variant or _number(case.function + case.variant) % sample == 0
        if case.engine == home:
            return is_typical or is_small
        if case.engine in SIBLINGS:
            is_first = case.variant == first.variant and case.face == first.face
            is_sampled = case.function.startswith(SIBLING_TESTS) and _number(case.function) % SIBLING_SAMPLE == 0
            return is_first and is_sampled
        if case.engine == "memory" or case.face != first.face:
            return is_typical and _number(case.id) % SAMPLE == 0
        return is_typical

    return filter(is_taken, cases)


class Recorder:
    """Writes `durations.txt` after a run: of each slow function the medians of its cases."""

    def __init__(self, path: Path = DURATIONS) -> None:
        self.path = path
        self._costs: defaultdict[str, dict[str, Cost]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cases = self._costs[report.nodeid.split("[", 1)[0]]
        seconds, busy = cases.get(report.nodeid, Cost())
        cases[report.nodeid] = Cost(seconds + report.duration, dict(report.user_properties).get("busy", busy))

    def pytest_sessionfinish(self) -> None:
        write_durations({name: list(cases.values()) for name, cases in self._costs.items()}, self.path)


def processor_seconds() -> float:
    """Return the seconds of a processor that this process and its ended children have used."""
    return sum(os.times()[:4])


def write_durations(costs: Mapping[str, Sequence[Cost]], path: Path = DURATIONS) -> None:
    """Write the slow ones of these functions, and keep the entries of functions that did not run."""
    known = read_durations(path) if path.exists() else {}
    for name, cases in costs.items():
        known[name] = Cost(*(sorted(values)[len(values) // 2] for values in zip(*cases, strict=True)))
    lines = [
        f"{cost.seconds:.1f} {cost.busy:.1f} {name}\n"
        for name, cost in sorted(known.items())
        if cost.seconds >= NOTICED
    ]
    head = "# Seconds of a case of each slow function, and of a processor (./test.sh --all --record; selection.py).\n"
    path.write_text(head + "".join(lines), encoding="utf-8")
