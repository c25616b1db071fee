"""Estimate when a request will be granted, as a range, from the history of such holds.

The queue is simulated many times. In each simulation, each holder stays for as long as one of the recent holds that
lasted longer than it has held already. Each waiter is granted as soon as the rule allows, and stays for as long as one
of those holds. About eight of ten such ranges should contain the truth (`python -m benchmarks estimates` measures it).
"""

from __future__ import annotations

import bisect
import math
import random
import re
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from sqlsem.insight.overview import HoldTimes, Overview, percentile
from sqlsem.insight.totals import number
from sqlsem.insight.words import clock, span_in_words
from sqlsem.model import WRITE, Entry, Resource
from sqlsem.model_tasks import plain

__all__ = ["MIN_HOLDS", "MIN_OF_KIND", "Durations", "Estimate", "estimates", "run_count", "without_numbers"]

#: With fewer holds there is no estimate.
MIN_HOLDS = 5
#: With this many of one kind (the same note, or program), holds of other kinds are ignored.
MIN_OF_KIND = 8
#: Use the newest holds only, because work changes with time.
MAX_HOLDS = 60
#: Simulations of each queue; fewer where many wait, but at least MIN_RUNS.
RUNS, MIN_RUNS = 200, 40
#: At most this many rows times simulations.
MAX_STEPS = 40_000
#: At most this many rows of all queues, and of one queue (all, if a position of it is asked for).
MAX_ROWS, MAX_OF_QUEUE = 1000, 100


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated time of a grant, or of a task's start, in seconds from the time of the overview. In eight of ten
    cases the time is between ``low`` and ``high``. ``held_low`` and ``held_high``: the range in which eight of ten such
    locks are held, or such tasks run.
    """

    low: float
    likely: float
    high: float
    held_low: float
    held_high: float
    count: int  # holds, or tasks, that it is computed from

    @classmethod
    def of(cls, moments: Sequence[float], usual: Sequence[float], count: int) -> Estimate:
        """Return an estimate from the simulated times and the usual durations, both in order."""
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
        """Return the same as JSON-ready values."""
        return {**plain(self), "words": self.words}


def kind_of(note: str | None, program: str | None) -> tuple[str, str]:
    """Return the kind of a hold: the note without its numbers, or else the program."""
    return ("note", without_numbers(note)) if note else ("program", program or "")


def without_numbers(text: str) -> str:
    """Return the text with its numbers replaced, equal for texts that differ in numbers only."""
    return re.sub(r"[0-9]+", "#", text)


class Durations:
    """The durations of holds: of the next hold, or of a hold that has lasted for some time."""

    def __init__(self, newest: Sequence[float]) -> None:
        held = newest[:MAX_HOLDS]
        self.held = sorted(held)
        mean = statistics.fmean(held)
        #: The relative standard error of their mean: later waiters of one simulation are off together.
        self.standard_error = statistics.pstdev(held) / mean / math.sqrt(len(held)) if mean > 0 else 0.0

    def at(self, share: float, already: float = 0.0) -> float:
        """Return the remaining seconds that this share of such holds does not exceed. The shares are even between any
        two of the holds that lasted longer than ``already``, below the first of them and above the last.
        """
        first = bisect.bisect_right(self.held, already)
        place = share * (len(self.held) - first + 1)
        whole = int(place)
        below = self.held[first + whole - 1] if whole else already
        if first + whole < len(self.held):
            return below + (self.held[first + whole] - below) * (place - whole) - already
        # Longer than all known holds: half of such holds end within half as much again.
        rest = min(place - whole, 0.98)
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
        """Return the durations for this row: of its kind, if enough are known."""
        return self._kinds.get(kind_of(entry.note, entry.program), self._all)


class SimulatedQueue:
    """One simulation of a queue: when each row leaves, from its head on."""

    def __init__(self, deviation: float) -> None:
        self.deviation = deviation  # how far the means are off in this simulation, in standard deviations
        self._leaving: list[tuple[float, str, int, int | None]] = []  # the row that leaves last comes last

    def granted_at(self, access: str, limit: int | None, weight: int, cap: int | None) -> float:
        """Return when the next request is granted: as soon as the rows that remain leave it room."""
        limits = [value for value in (limit, cap) if value is not None]
        room, load = min(limits, default=None), weight
        if room is not None and load > room:
            return math.inf  # until the operator raises the cap
        for leaves, other, its, declared in reversed(self._leaving):
            if access != WRITE and other == access:
                continue
            load += its
            if declared is not None:
                room = declared if room is None else min(room, declared)
            if room is not None and load > room:
                return leaves
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
    left = MAX_ROWS
    for resource, group in groupby(overview.entries, key=lambda entry: entry.resource):
        times, setting = overview.holds.get(resource), settings.get(resource)
        if times is None or len(times.holds) < MIN_HOLDS or (setting is not None and setting.paused):
            continue
        rows = list(islice(group, min(left, MAX_OF_QUEUE if positions is None else MAX_ROWS)))
        waiting = [place for place, row in enumerate(rows, 1) if row.state == "waits" and _is_wanted(row, positions)]
        if waiting:
            chosen.append((rows[: waiting[-1]], setting, times))
            left -= waiting[-1]
    runs = run_count(sum(len(rows) for rows, _, _ in chosen))
    results: dict[int, Estimate] = {}
    for rows, setting, times in chosen:
        estimated = _simulate(rows, Kinds(times), setting.cap if setting else None, runs, len(times.holds))
        results.update(
            {
                position: estimate
                for position, estimate in estimated.items()
                if positions is None or position in positions
            }
        )
    return results


def run_count(rows: int) -> int:
    """Return how often a queue of this many rows is simulated."""
    return max(MIN_RUNS, min(RUNS, MAX_STEPS // max(1, rows)))


def _is_wanted(entry: Entry, positions: Collection[int] | None) -> bool:
    return positions is None or entry.position in positions


def _simulate(rows: list[Entry], kinds: Kinds, cap: int | None, runs: int, count: int) -> dict[int, Estimate]:
    rng = random.Random(len(rows))  # the same each time, so that the display does not jump
    simulations = [SimulatedQueue(rng.gauss(0.0, 1.0)) for _ in range(runs)]
    shares = [(place + 0.5) / runs for place in range(runs)]
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
