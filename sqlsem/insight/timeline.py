"""What happened when, by resource, ready to be drawn: who waited and held, and how much of the limit was in use.

The history is read once, the newest end first, and nothing of it is kept but what is drawn: of the requests the
longest, and of the use, which counts all of them, the most in each of so many stretches of time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from sqlsem.model import READ, UPGRADE, WRITE, Entry, Past

__all__ = ["Bar", "Panel", "Timeline", "timeline"]

#: The stretches of time in which the use is told.
STRETCHES = 1000
#: Of a resource at most so many different limits are drawn.
MOST_LIMITS = 4
CONVERTED = ("upgraded", "downgraded", "handed_over")


@dataclass(frozen=True, slots=True)
class Bar:
    """One request, or what one was until it was converted."""

    source: Past | Entry
    asked: datetime  # when it begins: of what goes on after a conversion, then
    granted: datetime | None
    ended: datetime
    lane: int = 0

    @property
    def seconds(self) -> float:
        """How long it is."""
        return (self.ended - self.asked).total_seconds()


@dataclass(frozen=True, slots=True)
class Panel:
    """One resource."""

    resource: str
    bars: tuple[Bar, ...]  # in the order of asking; no two of one lane overlap
    lanes: int
    limits: tuple[int, ...]  # that were declared, the lowest first
    use: tuple[tuple[datetime, int], ...]  # the weight inside from then on, the most in each stretch
    requests: int  # that there were, drawn or not

    @property
    def most_use(self) -> int:
        """The most that was inside at one time."""
        return max((weight for _, weight in self.use), default=0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A night, of which everything is between ``begin`` and ``end``."""

    begin: datetime
    end: datetime
    panels: tuple[Panel, ...]
    requests: int
    drawn: int
    longest_left_out: float | None  # in seconds, of the requests that are not drawn
    resources_left_out: int

    def left_out(self) -> str:
        """What is not drawn, in words; empty when all is."""
        words = []
        if self.longest_left_out is not None:
            words.append(
                f"{self.drawn:,} of {self.requests:,} requests are drawn, the longest; the others took "
                f"{self.longest_left_out:.3g} s or less each, and count in the use"
            )
        if self.resources_left_out:
            words.append(f"of the resources the least used are left out: {self.resources_left_out:,}")
        return "; ".join(words)


def timeline(
    past: Iterable[Past],
    entries: Iterable[Entry],
    begin: datetime,
    end: datetime,
    *,
    most: int = 10_000,
    most_panels: int = 40,
) -> Timeline:
    """What is to be drawn.

    Args:
        past: Finished requests, the newest end first, as they are read: they are not kept.
        entries: What holds and waits at ``end``.
        begin: What was before is cut off.
        end: The time at which ``entries`` was read.
        most: So many requests are drawn at the most, the longest.
        most_panels: So many resources at the most, those that were held and waited for longest.
    """
    lines: dict[str, _WaiterQueue] = {}
    kept: list[tuple[float, int, Bar]] = []
    numbers = itertools.count()
    #: What goes on after a conversion is read before what it was: it begins then, and not when it was asked for.
    goes_on: dict[tuple[str, int], datetime] = {}
    longest_left_out: float | None = None
    requests = 0
    one: Past | Entry
    for one in itertools.chain[Past | Entry](entries, past):
        ended = one.ended_at if isinstance(one, Past) else end
        if one.requested_at > end:
            continue
        if isinstance(one, Past) and one.outcome in CONVERTED:
            goes_on[one.resource, one.position] = ended
        else:
            requests += 1
        line = lines.setdefault(one.resource, _WaiterQueue(begin, end))
        line.read(one, min(ended, end))
        bar = Bar(one, max(begin, one.requested_at), one.granted_at, max(begin, min(ended, end)))
        item = (bar.seconds, next(numbers), bar)
        if len(kept) < most:
            heapq.heappush(kept, item)
            continue
        seconds = heapq.heappushpop(kept, item)[0]
        longest_left_out = max(seconds, longest_left_out or 0.0)
    bars: dict[str, list[Bar]] = {}
    for _, _, bar in kept:
        one = bar.source
        begun = goes_on.get((one.resource, one.position))
        if begun is not None and bar.ended > begun and not (isinstance(one, Past) and one.ended_at == begun):
            bar = replace(bar, asked=max(bar.asked, min(begun, bar.ended)))  # noqa: PLW2901 - the same bar, cut
        bars.setdefault(one.resource, []).append(bar)
    names = sorted(lines, key=lambda name: (-lines[name].seconds, name))[:most_panels]
    panels = tuple(lines[name].panel(name, bars.get(name, [])) for name in sorted(names))
    return Timeline(
        begin=begin,
        end=end,
        panels=panels,
        requests=requests,
        drawn=len({(bar.source.resource, bar.source.position) for panel in panels for bar in panel.bars}),
        longest_left_out=longest_left_out,
        resources_left_out=len(lines) - len(panels),
    )


@dataclass(slots=True)
class _WaiterQueue:
    """One resource, while its rows are read back in time."""

    begin: datetime
    end: datetime
    seconds: float = 0.0  # that were held and waited for, all together
    requests: int = 0
    limits: set[int] = field(default_factory=set)
    _most: dict[int, int] = field(default_factory=dict)  # of each stretch in which somebody was inside
    _entered: list[tuple[float, str, int]] = field(
        default_factory=list
    )  # of those inside: they go out there, going back
    _weights: dict[str, list[int]] = field(default_factory=dict)  # of those inside, by label
    _load: int = 0
    _at: float | None = None  # where we are, seconds since the beginning

    def read(self, one: Past | Entry, ended: datetime) -> None:
        """A row, none of which ends later than those before."""
        if not (isinstance(one, Past) and one.outcome in CONVERTED):
            self.requests += 1
        begun = max(one.requested_at, self.begin)
        self.seconds += max(0.0, (ended - begun).total_seconds())
        if one.limit is not None and len(self.limits) < MOST_LIMITS:
            self.limits.add(one.limit)
        if one.granted_at is None:
            return
        left = (ended - self.begin).total_seconds()
        self._go_back_to(left)
        label = READ if one.access.startswith(UPGRADE) else one.access
        self._change(label, one.weight, 1)
        heapq.heappush(self._entered, (-(one.granted_at - self.begin).total_seconds(), label, one.weight))

    def panel(self, resource: str, bars: list[Bar]) -> Panel:
        """What is to be drawn of it."""
        self._go_back_to(0.0)
        stretch = (self.end - self.begin) / STRETCHES
        use = []
        before = 0
        for number in range(STRETCHES):
            weight = self._most.get(number, 0)
            if weight != before:
                use.append((self.begin + number * stretch, weight))
            before = weight
        bars.sort(key=lambda bar: (bar.asked, bar.source.position))
        placed = tuple(_in_lanes(bars))
        lanes = 1 + max((bar.lane for bar in placed), default=0)
        return Panel(resource, placed, lanes, tuple(sorted(self.limits)), tuple(use), self.requests)

    def _go_back_to(self, time: float) -> None:
        while self._entered and -self._entered[0][0] >= time:
            entered, label, weight = heapq.heappop(self._entered)
            self._told(-entered)
            self._change(label, weight, -1)
        self._told(time)

    def _told(self, time: float) -> None:
        """The load was what it is, from then until where we were."""
        until, self._at = self._at, time
        if until is None or not self._load:
            return
        per_second = STRETCHES / max(1e-6, (self.end - self.begin).total_seconds())
        for number in range(max(0, int(time * per_second)), min(STRETCHES - 1, int(until * per_second)) + 1):
            self._most[number] = max(self._most.get(number, 0), self._load)

    def _change(self, label: str, weight: int, by: int) -> None:
        """Those of one label share: the heaviest counts."""
        if label == WRITE:
            self._load += by * weight
            return
        weights = self._weights.setdefault(label, [])
        self._load -= max(weights, default=0)
        if by > 0:
            weights.append(weight)
        else:
            weights.remove(weight)
        self._load += max(weights, default=0)


def _in_lanes(bars: Iterable[Bar]) -> Iterable[Bar]:
    """Each in the first lane that is free."""
    busy: list[tuple[datetime, int]] = []
    free: list[int] = []
    for bar in bars:
        while busy and busy[0][0] <= bar.asked:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (bar.ended, lane))
        yield replace(bar, lane=lane)
