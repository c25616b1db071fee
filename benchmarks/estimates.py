"""How often the truth lies in the range that `sqlsem why` tells: histories are replayed, and at many moments of each
what was to be known then is compared with what came.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from benchmarks.printed import console, judged, table
from sqlsem.insight.estimates import estimates as estimate
from sqlsem.insight.overview import Hold, HoldTimes, Overview
from sqlsem.model import Entry, Request

__all__ = ["estimates"]

#: The share of ranges that shall hold the truth.
NOMINAL = 0.8
#: Requests of each history, and of these those before which nobody asks.
REQUESTS, FIRST = 600, 150
BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
Ask = tuple[Request, float]


@dataclass(slots=True)
class Done:
    """A request of a history; seconds from its beginning."""

    position: int
    request: Request
    asked: float
    lasts: float
    granted: float | None = None

    @property
    def ended(self) -> float:
        return float("inf") if self.granted is None else self.granted + self.lasts


def _lognormal(chance: random.Random, median: float, spread: float) -> float:
    return median * chance.lognormvariate(0.0, spread)


def _steady(chance: random.Random, _: int) -> Ask:
    return Request("r"), _lognormal(chance, 60, 0.25)


def _varied(chance: random.Random, _: int) -> Ask:
    return Request("r", limit=3), _lognormal(chance, 60, 1.0)


def _exponential(chance: random.Random, _: int) -> Ask:
    return Request("r", limit=4), chance.expovariate(1 / 60)


def _kinds(chance: random.Random, number: int) -> Ask:
    kind = chance.randrange(8)
    return Request("r", note=f"{'abcdefgh'[kind]} of day {number}"), _lognormal(chance, 8 * 2**kind, 0.2)


def _nameless(chance: random.Random, number: int) -> Ask:
    request, lasts = _kinds(chance, number)
    return replace(request, note=None), lasts


def _readers(chance: random.Random, _: int) -> Ask:
    if chance.random() < 0.3:
        return Request("r"), _lognormal(chance, 90, 0.4)
    return Request("r", "read"), _lognormal(chance, 30, 0.4)


def _weights(chance: random.Random, _: int) -> Ask:
    return Request("r", limit=10, weight=chance.randint(1, 5)), _lognormal(chance, 60, 0.5)


def _drifting(chance: random.Random, number: int) -> Ask:
    return Request("r"), _lognormal(chance, 60 * 2 ** (number / REQUESTS), 0.25)


HISTORIES: dict[str, Callable[[random.Random, int], Ask]] = {
    "mutex, holds alike": _steady,
    "limit 3, holds that vary widely": _varied,
    "limit 4, exponential holds": _exponential,
    "mutex, eight kinds of jobs, with notes": _kinds,
    "the same without notes": _nameless,
    "readers and writers": _readers,
    "limit 10, weights of 1 to 5": _weights,
    "mutex, holds that double meanwhile": _drifting,
}


def history(make: Callable[[random.Random, int], Ask], chance: random.Random) -> list[Done]:
    """Requests come in bursts, as jobs of a night do, and are let in by the rule."""
    asked: list[Done] = []
    moment = 0.0
    while len(asked) < REQUESTS:
        burst = [make(chance, len(asked) + number) for number in range(chance.randint(3, 14))]
        for request, lasts in burst:
            asked.append(Done(len(asked) + 1, request, moment, lasts))
            moment += chance.expovariate(1 / 5)
        room = max(1, (burst[0][0].limit or 1) / burst[0][0].weight)
        moment += sum(lasts for _, lasts in burst) / room * chance.uniform(0.3, 1.2)
    there: list[Done] = []
    coming = iter(asked)
    following = next(coming, None)
    while there or following is not None:
        ends = min((one.ended for one in there), default=float("inf"))
        if following is not None and following.asked <= ends:
            now = following.asked
            there.append(following)
            following = next(coming, None)
        else:
            now = ends
            there = [one for one in there if one.ended > now]
        for place, one in enumerate(there):
            if one.granted is None and one.request.fits([other.request for other in there[:place]], None):
                one.granted = now
    return asked


def seen(done: list[Done], now: float) -> Overview:
    """What was to be seen at a moment."""
    entries = [
        Entry(
            "r", one.position, "waits" if one.granted is None or one.granted > now else "holds", one.request.access,
            one.request.limit, one.request.weight, "x", one.position, "t", "h", 1, "p", one.request.note, BEGIN, None,
            now - (one.asked if one.granted is None or one.granted > now else one.granted), None, 5.0,
        )
        for one in done
        if one.asked <= now < one.ended
    ]  # fmt: skip
    entries = [replace(one, granted_at=BEGIN) if one.state == "holds" else one for one in entries]
    ended = sorted((one for one in done if one.ended <= now), key=lambda one: -one.ended)[:200]
    holds = tuple(Hold(one.lasts, (one.granted or 0.0) - one.asked, one.request.note, "p") for one in ended)
    taken_at = BEGIN + timedelta(seconds=now)
    return Overview(taken_at, [], entries, [], [], [], {"r": HoldTimes(holds)} if holds else {})


def _told(done: list[Done], moments: int, chance: random.Random) -> Iterator[tuple[int, bool, float, float]]:
    """At so many moments, of one who waits: its place, whether the truth lay in the range, its width, the truth."""
    asked = [one for one in done[FIRST:] if one.granted is not None and one.granted - one.asked > 1]
    for one in chance.choices(asked, k=moments):
        assert one.granted is not None
        now = chance.uniform(one.asked, one.granted)
        found = seen(done, now)
        told = estimate(found, (one.position,)).get(one.position)
        if told is not None:
            place = sum(other.state == "waits" and other.position <= one.position for other in found.entries)
            truth = one.granted - now
            yield place, told.low <= truth <= told.high, told.high - told.low, truth


def estimates(engine: str, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """The share of ranges that held the truth, for some kinds of histories. (The same on every engine.)"""
    shown = table(
        f"Estimates of sqlsem why: ranges that held the truth (nominal {NOMINAL:.0%}), by the place in the line",
        *("history", "all", "first", "2nd to 5th", "later", "width / wait"),
    )
    results: dict[str, Any] = {}
    for number, (name, make) in enumerate(HISTORIES.items()):
        chance = random.Random(number)
        found: list[tuple[int, bool, float, float]] = []
        for _ in range(3):
            found += _told(history(make, chance), options["moments"] // 3, chance)
        places = ([one for one in found if low <= one[0] <= high] for low, high in ((1, 1), (2, 5), (6, 10**6)))
        shares = [statistics.mean(held for _, held, _, _ in some) if some else None for some in (found, *places)]
        width = statistics.median(width for _, _, width, _ in found) / statistics.median(truth for *_, truth in found)
        shown.add_row(name, *(judged(share, 0.7, ".0%", least=True) for share in shares), f"{width:.2f}")
        results[name] = {"moments": len(found), "held": shares[0], "by_place": shares[1:], "width": width}
    console.print(shown)
    return results
