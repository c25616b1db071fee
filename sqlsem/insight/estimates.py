"""Estimate when a request will be granted, as a range, from the history of such holds.

The queue is simulated many times. In each simulation, a hold lasts as long as one of the recent holds, chosen at
random; for a present holder only those count that lasted longer than it has held already. Each waiter is granted as
soon as the rule (`Request.fits`) allows. The true time should be in eight of ten such ranges (`python -m benchmarks
estimates` measures that).
"""

from __future__ import annotations

import bisect
import math
import random
import re
import statistics
from collections.abc import Collection, Sequence
from itertools import groupby, islice
from typing import Any

from sqlsem.insight.overview import HoldTimes, Overview, percentile
from sqlsem.insight.totals import number
from sqlsem.insight.words import clock, span_in_words
from sqlsem.util.record import AsDict, plain, record
from sqlsem.values.locks import WRITE, Entry, Resource

__all__ = ["MIN_HOLDS", "MIN_OF_KIND", "Durations", "Estimate", "estimates", "run_count", "without_numbers"]

#: With fewer holds there is no estimate.
MIN_HOLDS = 5
#: If there are this many holds of a kind (the same note, or program), holds of other kinds are ignored.
MIN_OF_KIND = 8
#: Use the newest holds only, because work changes with time.
MAX_HOLDS = 60
#: How often each queue is simulated; less often if many requests wait, but at least MIN_RUNS times.
RUNS, MIN_RUNS = 200, 40
#: The greatest product of rows and simulations.
MAX_STEPS = 40_000
#: The most rows that are simulated: of all queues together, and of one queue if all its waiters are estimated.
MAX_ROWS, MAX_OF_QUEUE = 1000, 100


@record
class Estimate(AsDict):
    """The estimated time of a grant, or of a task's start, in seconds from the time of the overview. In eight of ten
    cases the time is between ``low`` and ``high``. ``held_low`` and ``held_high``: the range in which eight of ten such
    locks are held, or such tasks run.
    """

    low: float
    likely: float
    high: float
    held_low: float
    held_high: float
    count: int  # the number of holds, or of tasks, that it is computed from

    @classmethod
    def of(cls, moments: Sequence[float], usual: Sequence[float], count: int) -> Estimate:
        """Return an estimate from the simulated times and the usual durations, both sorted."""
        low, likely, high = (percentile(moments, share) for share in (0.1, 0.5, 0.9))
        return cls(low, likely, high, percentile(usual, 0.1), percentile(usual, 0.9), min(count, len(usual)))

    @property
    def words(self) -> str:
        """The text ``usually 11-14 min, in about 02:51``."""
        return f"usually {span_in_words(self.held_low, self.held_high)}, in about {clock(self.likely)}"

    @property
    def between(self) -> str:
        """The text ``between 01:10 and 05:20``."""
        return f"between {clock(self.low)} and {clock(self.high)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {**plain(self), "words": self.words}


def kind_of(note: str | None, program: str | None) -> tuple[str, str]:
    """Return the kind of a hold: the note without its numbers, or else the program."""
    return ("note", without_numbers(note)) if note else ("program", program or "")


def without_numbers(text: str) -> str:
    """Return the text with its numbers replaced, equal for texts that differ in numbers only."""
    return re.sub(r"[0-9]+", "#", text)


class Durations:
    """The durations of the newest holds: they predict how long the next hold lasts, or a present one goes on."""

    def __init__(self, newest: Sequence[float]) -> None:
        held = newest[:MAX_HOLDS]
        self.held = sorted(held)
        mean = statistics.fmean(held)
        #: The relative standard error of their mean. In one simulation, all waiters' durations deviate alike by it.
        self.standard_error = statistics.pstdev(held) / mean / math.sqrt(len(held)) if mean > 0 else 0.0

    def at(self, share: float, already: float = 0.0) -> float:
        """Return the remaining seconds that this share of such holds does not exceed, after ``already`` seconds.

        Only the holds that lasted longer than ``already`` count. The gaps between any two neighbours among them, below
        the first and above the last have equal shares.
        """
        first = bisect.bisect_right(self.held, already)
        rank = share * (len(self.held) - first + 1)
        whole = int(rank)
        below = self.held[first + whole - 1] if whole else already
        if first + whole < len(self.held):
            return below + (self.held[first + whole] - below) * (rank - whole) - already
        # Longer than all known holds: half of such holds end within half as much again.
        rest = min(rank - whole, 0.98)
        longest = max(below, 1e-3)
        return longest * float((1 - rest) ** -0.6) - already


class Kinds:
    """The holds of one resource, by kinds."""

    def __init__(self, times: HoldTimes) -> None:
        by_kind: dict[tuple[str, str], list[float]] = {}
        for hold in times.holds:
            by_kind.setdefault(kind_of(hold.note, hold.program), []).append(hold.held)
        self._all = Durations([hold.held for hold in times.holds])
        self._kinds = {kind: Durations(held) for kind, held in by_kind.items() if len(held) >= MIN_OF_KIND}

    def of(self, entry: Entry) -> Durations:
        """Return the durations for this row: those of its kind if there are enough, else all."""
        return self._kinds.get(kind_of(entry.note, entry.program), self._all)


class SimulatedQueue:
    """One simulation of a queue: when each row leaves, from its head on."""

    def __init__(self, deviation: float) -> None:
        self.deviation = deviation  # how far the means are off in this simulation, in standard deviations
        self._leaving: list[tuple[float, str, int, int | None]] = []  # by the time at which the row leaves

    def granted_at(self, access: str, limit: int | None, weight: int, cap: int | None) -> float:
        """Return when the next request is granted: as soon as the remaining rows do not block it."""
        limits = [value for value in (limit, cap) if value is not None]
        lowest_limit, load = min(limits, default=None), weight
        if lowest_limit is not None and load > lowest_limit:
            return math.inf  # until the operator raises the cap
        for leaves_at, row_access, row_weight, declared in reversed(self._leaving):
            if access != WRITE and row_access == access:
                continue
            load += row_weight
            if declared is not None:
                lowest_limit = declared if lowest_limit is None else min(lowest_limit, declared)
            if lowest_limit is not None and load > lowest_limit:
                return leaves_at
        return 0.0

    def add(self, until: float, access: str, limit: int | None, weight: int) -> None:
        """Add a row that leaves at ``until``."""
        bisect.insort(self._leaving, (until, access, weight, limit), key=lambda row: row[0])


def estimates(overview: Overview, positions: Collection[int] | None = None) -> dict[int, Estimate]:
    """Estimate when waiters will be granted, by position; of all, or of these positions. Leaves out waiters for a
    paused resource, and for one with too few known holds.
    """
    settings = {resource.resource: resource for resource in overview.resources}
    chosen: list[tuple[list[Entry], Resource | None, HoldTimes]] = []
    rows_left = MAX_ROWS
    for resource, group in groupby(overview.entries, key=lambda entry: entry.resource):
        times, setting = overview.holds.get(resource), settings.get(resource)
        if times is None or len(times.holds) < MIN_HOLDS or (setting is not None and setting.paused):
            continue
        rows = list(islice(group, min(rows_left, MAX_OF_QUEUE if positions is None else MAX_ROWS)))
        waiting = [index for index, row in enumerate(rows, 1) if row.state == "waits" and _is_selected(row, positions)]
        if waiting:
            chosen.append((rows[: waiting[-1]], setting, times))
            rows_left -= waiting[-1]
    runs = run_count(sum(len(rows) for rows, _, _ in chosen))
    results: dict[int, Estimate] = {}
    for rows, setting, times in chosen:
        estimated = _simulate(rows, Kinds(times), setting.cap if setting else None, runs, len(times.holds))
        results.update(item for item in estimated.items() if positions is None or item[0] in positions)
    return results


def run_count(rows: int) -> int:
    """Return how often a queue of this many rows is simulated."""
    return max(MIN_RUNS, min(RUNS, MAX_STEPS // max(1, rows)))


def _is_selected(entry: Entry, positions: Collection[int] | None) -> bool:
    return positions is None or entry.position in positions


def _simulate(rows: list[Entry], kinds: Kinds, cap: int | None, runs: int, count: int) -> dict[int, Estimate]:
    rng = random.Random(len(rows))  # the same each time, so that the display does not jump
    simulations = [SimulatedQueue(rng.gauss(0.0, 1.0)) for _ in range(runs)]
    shares = [(index + 0.5) / runs for index in range(runs)]
    results: dict[int, Estimate] = {}
    for row in rows:
        rng.shuffle(shares)
        durations = kinds.of(row)
        access, limit, weight = row.access, number(row.limit), number(row.weight) or 0
        waits = row.state == "waits"
        entered = []
        for simulation, share in zip(simulations, shares, strict=True):
            if waits:
                enters = simulation.granted_at(access, limit, weight, cap)
                entered.append(enters)
                leaves = enters + durations.at(share) * math.exp(simulation.deviation * durations.standard_error)
            elif row.state == "dead" or (row.granted_at is None and row.member_id is not None):
                leaves = 0.0
            else:
                leaves = durations.at(share, row.seconds)
                if row.missing_for is not None and row.grace is not None:
                    leaves = min(leaves, max(0.0, row.grace - row.missing_for))
            simulation.add(leaves, access, limit, weight)
        if waits:
            entered.sort()
            if math.isinf(entered[-1]):
                continue
            results[row.position] = Estimate.of(entered, durations.held, count)
    return results
