"""Sum up the results of many nights: kept in a file, so that a soak can continue; and printed as a report."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from soak.night import Result

#: So many classes of waiting times for each doubling.
CLASSES = 4


class Record:
    """The results of all nights so far, by engine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.engines: dict[str, dict[str, Any]] = {}
        self.findings: list[str] = []
        self.not_run: dict[str, str] = {}  # place → what it needs
        if path.exists():
            stored = json.loads(path.read_text())
            self.engines, self.findings = stored["engines"], stored["findings"]

    def grants(self, engine: str) -> int:
        return int(self.engines.get(engine, {}).get("grants", 0))

    def nights(self, place: str) -> int:
        """Return the number of nights in this place."""
        return sum(int(of["places"].get(place, 0)) for of in self.engines.values())

    def add(self, result: Result) -> None:
        of = self.engines.setdefault(result.engine, {"grants": 0, "seconds": 0.0, "longest": 0.0, "size": 0})
        of["grants"] += result.grants
        of["seconds"] += result.seconds
        of["followed"] = of.get("followed", 0) + result.followed
        of["longest"] = max([of["longest"], *result.waits])
        of["size"] = max(of["size"], result.size)
        for name, more in (
            ("places", Counter({result.place: 1})),
            ("entered", result.entered),
            ("faults", result.faults),
            ("trouble", result.trouble),
            ("waits", classes(result.waits)),
            ("early", classes(result.early)),
            ("late", classes(result.late)),
        ):
            of[name] = dict(Counter(of.get(name, {})) + more)
        self.findings += [f"{result.place}, seed {result.seed}: {finding}" for finding in result.findings]
        self._keep()

    def _keep(self) -> None:
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps({"engines": self.engines, "findings": self.findings}, indent=1))
        draft.replace(self._path)

    def report(self) -> str:
        """Return the report as text."""
        lines = []
        for engine, of in sorted(self.engines.items()):
            rate = of["grants"] / max(of["seconds"], 1e-9)
            lines += [
                f"{engine}: {of['grants']:,} grants in {of['seconds']:.0f} s ({rate:.0f} a second)",
                f"  places    {_counts(of['places'])}",
                f"  grants    {_counts(of['entered'])}",
                f"  faults    {_counts(of['faults'])}",
                f"  trouble   {_counts(of['trouble'])}",
                f"  followed  {of.get('followed', 0):,} events of its history through the specification",
                f"  waiting   {_times(of['waits'])}  longest {_ms(of['longest'])}",
                f"  … in the first tenth of a night  {_times(of['early'])}",
                f"  … in the last tenth              {_times(of['late'])}",
                f"  largest   {of['size'] / 2**20:.1f} MB at the end of a night",
            ]
        lines += [f"not run: {subject} (needs {needs})" for subject, needs in sorted(self.not_run.items())]
        lines.append(f"violations: {len(self.findings)}")
        lines += [f"  {finding}" for finding in self.findings]
        return "\n".join(lines)


PERCENTILES = (("median", 0.5), ("99 %", 0.99), ("99.9 %", 0.999))


def classes(waits: list[float]) -> Counter[str]:
    """Return the number of values in each class. (Keys are text, as in JSON.)"""
    return Counter(str(class_of(wait)) for wait in waits)


def class_of(seconds: float) -> int:
    return math.ceil(CLASSES * math.log2(max(seconds, 1e-6)))


def percentile(waits: dict[int, int], part: float) -> float:
    """Return the upper end of the value's class, seconds."""
    left = part * sum(waits.values())
    for number in sorted(waits):
        left -= waits[number]
        if left <= 0:
            return float(2.0 ** (number / CLASSES))
    return 0.0


def _times(waits: dict[str, int]) -> str:
    counts = {int(number): count for number, count in waits.items()}
    return "  ".join(f"{name} {_ms(percentile(counts, part))}" for name, part in PERCENTILES)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"
