"""When somebody will go in, as a range: from the history of such holds.

The queue is played forward many times. In each play everybody who is inside stays for as long as one of the holds of
the recent history that were longer than what it has held already; everybody who waits goes in as soon as the rule lets
it, and stays for as long as one of those holds. Of ten such ranges about eight should hold the truth (`python -m
benchmarks estimates` measures it).
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
from sqlsem.insight.passing import number
from sqlsem.insight.words import clock, span_in_words
from sqlsem.model import WRITE, Entry, Resource
from sqlsem.model_tasks import plain

__all__ = ["LEAST_HOLDS", "LEAST_OF_KIND", "Durations", "Estimate", "estimates", "plays_of", "without_numbers"]

#: Of fewer holds nothing is told.
LEAST_HOLDS = 5
#: Of so many of one kind (the same note, or program) others are left out.
LEAST_OF_KIND = 8
#: The newest that are looked at, as what is done changes with time.
MOST_HOLDS = 60
#: How often a queue is played forward; less often where many wait, but so often at least.
PLAYS, LEAST_PLAYS = 200, 40
#: Rows of all queues, times plays.
MOST_STEPS = 40_000
#: Rows of all queues, and of one, that are played; of one, where it is asked for.
MOST_ROWS, MOST_OF_QUEUE = 1000, 100


@dataclass(frozen=True, slots=True)
class Estimate:
    """When a request will be granted, or a task be started, in seconds from when that was looked at: in eight of ten
    cases between ``low`` and ``high``. ``held_low`` and ``held_high``: for how long such locks are held, or such tasks
    run, in eight of ten cases.
    """

    low: float
    likely: float
    high: float
    held_low: float
    held_high: float
    count: int  # holds, or tasks, that this is known from

    @classmethod
    def of(cls, moments: Sequence[float], usual: Sequence[float], count: int) -> Estimate:
        """From when it came to its turn in each play, and how long such ones take; both in order."""
        low, likely, high = (percentile(moments, share) for share in (0.1, 0.5, 0.9))
        return cls(low, likely, high, percentile(usual, 0.1), percentile(usual, 0.9), min(count, len(usual)))

    @property
    def words(self) -> str:
        """As ``usually 11-14 min, in about 02:51``."""
        return f"usually {span_in_words(self.held_low, self.held_high)}, in about {clock(self.likely)}"

    @property
    def between(self) -> str:
        """As ``between 01:10 and 05:20``."""
        return f"between {clock(self.low)} and {clock(self.high)}"

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return {**plain(self), "words": self.words}


def kind_of(note: str | None, program: str | None) -> tuple[str, str]:
    """What holds of one kind have in common: the note but for its numbers, or else the program."""
    return ("note", without_numbers(note)) if note else ("program", program or "")


def without_numbers(text: str) -> str:
    """What texts have in common that differ in numbers only."""
    return re.sub(r"[0-9]+", "#", text)


class Durations:
    """For how long a lock is held: the next one, or one that has been held for some time."""

    def __init__(self, newest: Sequence[float]) -> None:
        held = newest[:MOST_HOLDS]
        self.held = sorted(held)
        mean = statistics.fmean(held)
        #: How far their mean may be off, as a share of it: those who come later are off together.
        self.doubt = statistics.pstdev(held) / mean / math.sqrt(len(held)) if mean > 0 else 0.0

    def at(self, share: float, already: float = 0.0) -> float:
        """How much longer, where this share of those like it is shorter. Between any two of the holds that were longer
        lies the same share, and as much below the first of them, and above the last.
        """
        first = bisect.bisect_right(self.held, already)
        place = share * (len(self.held) - first + 1)
        whole = int(place)
        below = self.held[first + whole - 1] if whole else already
        if first + whole < len(self.held):
            return below + (self.held[first + whole] - below) * (place - whole) - already
        # Longer than all that is known. What has lasted long lasts on: every other one is over in half as much again.
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
        self._kinds = {kind: Durations(held) for kind, held in by_kind.items() if len(held) >= LEAST_OF_KIND}

    def of(self, entry: Entry) -> Durations:
        """Those that are like this one: of its kind, if there are enough."""
        return self._kinds.get(kind_of(entry.note, entry.program), self._all)


class Play:
    """One play of a queue: when each row leaves, from its head on."""

    def __init__(self, luck: float) -> None:
        self.luck = luck  # how far the means are off in this one, in standard deviations
        self._leaving: list[tuple[float, str, int, int | None]] = []  # who leaves last comes last

    def enters(self, access: str, limit: int | None, weight: int, cap: int | None) -> float:
        """When a request that comes next goes in: as soon as those that are still there leave it room."""
        limits = [one for one in (limit, cap) if one is not None]
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

    def stays(self, until: float, access: str, limit: int | None, weight: int) -> None:
        """A row is there until then."""
        bisect.insort(self._leaving, (until, access, weight, limit), key=lambda one: one[0])


def estimates(overview: Overview, wanted: Collection[int] | None = None) -> dict[int, Estimate]:
    """When those who wait will go in, by position; of some positions, or of all. Who waits for a paused resource, or
    for one of whose holds too little is known, is left out.
    """
    settings = {one.resource: one for one in overview.resources}
    chosen: list[tuple[list[Entry], Resource | None, HoldTimes]] = []
    left = MOST_ROWS
    for resource, group in groupby(overview.entries, key=lambda entry: entry.resource):
        times, setting = overview.holds.get(resource), settings.get(resource)
        if times is None or len(times.holds) < LEAST_HOLDS or (setting is not None and setting.paused):
            continue
        rows = list(islice(group, min(left, MOST_OF_QUEUE if wanted is None else MOST_ROWS)))
        asked = [place for place, row in enumerate(rows, 1) if row.state == "waits" and _is_wanted(row, wanted)]
        if asked:
            chosen.append((rows[: asked[-1]], setting, times))
            left -= asked[-1]
    plays = plays_of(sum(len(rows) for rows, _, _ in chosen))
    found: dict[int, Estimate] = {}
    for rows, setting, times in chosen:
        played = _play(rows, Kinds(times), setting.cap if setting else None, plays, len(times.holds))
        found.update({position: one for position, one in played.items() if wanted is None or position in wanted})
    return found


def plays_of(rows: int) -> int:
    """How often so many rows are played forward."""
    return max(LEAST_PLAYS, min(PLAYS, MOST_STEPS // max(1, rows)))


def _is_wanted(entry: Entry, wanted: Collection[int] | None) -> bool:
    return wanted is None or entry.position in wanted


def _play(rows: list[Entry], kinds: Kinds, cap: int | None, number_of: int, count: int) -> dict[int, Estimate]:
    chance = random.Random(len(rows))  # the same each time: what is shown should not jump about
    plays = [Play(chance.gauss(0.0, 1.0)) for _ in range(number_of)]
    shares = [(place + 0.5) / number_of for place in range(number_of)]
    found: dict[int, Estimate] = {}
    for row in rows:
        chance.shuffle(shares)
        durations = kinds.of(row)
        access, limit, weight = row.access, number(row.limit), number(row.weight) or 0
        waits = row.state == "waits"
        entered = []
        for play, share in zip(plays, shares, strict=True):
            if waits:
                enters = play.enters(access, limit, weight, cap)
                entered.append(enters)
                leaves = enters + durations.at(share) * math.exp(play.luck * durations.doubt)
            elif row.state == "dead" or (row.granted_at is None and row.member_id is not None):
                leaves = 0.0
            else:
                leaves = durations.at(share, row.seconds)
                if row.missing_for is not None and row.grace is not None:
                    leaves = min(leaves, max(0.0, row.grace - row.missing_for))
            play.stays(leaves, access, limit, weight)
        if waits:
            entered.sort()
            if math.isinf(entered[-1]):
                continue
            found[row.position] = Estimate.of(entered, durations.held, count)
    return found
