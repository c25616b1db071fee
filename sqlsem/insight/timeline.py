"""Lay out a history by resource, to be drawn: waits, holds, and how much of the limit was in use.

The history is read once, newest end first. Memory holds only what is drawn: the longest requests, and for each of
STRETCHES intervals the largest use, which counts all requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from sqlsem.insight.rule import CONVERTED, granted_access
from sqlsem.util.record import record
from sqlsem.values.locks import WRITE, Entry, Past

__all__ = ["Bar", "Panel", "Timeline", "timeline"]

#: The number of intervals in which the use is recorded.
STRETCHES = 1000
#: Draw at most this many different limits of a resource.
MAX_LIMITS = 4


@record
class Bar:
    """One request, or its part up to a conversion."""

    source: Past | Entry
    asked: datetime  # when the bar begins: the time of the request, or of the conversion before it
    granted: datetime | None
    ended: datetime
    lane: int = 0

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.ended - self.asked).total_seconds()


@record
class Panel:
    """One resource."""

    resource: str
    bars: tuple[Bar, ...]  # in the order of requests; no two of one lane overlap
    lanes: int
    limits: tuple[int, ...]  # the declared limits, the lowest first
    use: tuple[tuple[datetime, int], ...]  # (time, largest weight held from then on)
    requests: int  # the number of all requests, drawn or not

    @property
    def most_use(self) -> int:
        """The largest weight held at one time."""
        return max((weight for _, weight in self.use), default=0)


@record
class Timeline:
    """A history between ``begin`` and ``end``."""

    begin: datetime
    end: datetime
    panels: tuple[Panel, ...]
    requests: int
    drawn: int
    longest_left_out: float | None  # in seconds, of the requests that are not drawn
    resources_left_out: int

    def left_out(self) -> str:
        """Say what is not drawn; empty if everything is."""
        words = []
        if self.longest_left_out is not None:
            words.append(
                f"{self.drawn:,} of {self.requests:,} requests are drawn, the longest; the others took "
                f"{self.longest_left_out:.3g} s or less each, and count in the use"
            )
        if self.resources_left_out:
            words.append(f"least used resources left out: {self.resources_left_out:,}")
        return "; ".join(words)


def timeline(
    past: Iterable[Past],
    entries: Iterable[Entry],
    begin: datetime,
    end: datetime,
    *,
    maximum: int = 10_000,
    max_panels: int = 40,
) -> Timeline:
    """Lay out a history.

    Args:
        past: Finished requests, the newest end first; read once and not kept.
        entries: The rows that hold and wait at ``end``.
        begin: Everything before it is cut off.
        end: The time at which ``entries`` was read.
        maximum: Draw at most this many requests, the longest.
        max_panels: Draw at most this many resources, those held and waited for longest.
    """
    builders: dict[str, _PanelBuilder] = {}
    longest: list[tuple[float, int, Bar]] = []
    numbers = itertools.count()
    #: By request: the time of its conversion. The part after that is read first, and its bar must begin at that time.
    converted_at: dict[tuple[str, int], datetime] = {}
    longest_left_out: float | None = None
    requests = 0
    row: Past | Entry
    for row in itertools.chain[Past | Entry](entries, past):
        ended = row.ended_at if isinstance(row, Past) else end
        if row.requested_at > end:
            continue
        if isinstance(row, Past) and row.outcome in CONVERTED:
            converted_at[row.resource, row.position] = ended
        else:
            requests += 1
        builder = builders.setdefault(row.resource, _PanelBuilder(begin, end))
        builder.read(row, min(ended, end))
        bar = Bar(row, max(begin, row.requested_at), row.granted_at, max(begin, min(ended, end)))
        item = (bar.seconds, next(numbers), bar)
        if len(longest) < maximum:
            heapq.heappush(longest, item)
            continue
        seconds = heapq.heappushpop(longest, item)[0]
        longest_left_out = max(seconds, longest_left_out or 0.0)
    bars: dict[str, list[Bar]] = {}
    for _, _, bar in longest:
        row = bar.source
        begun = converted_at.get((row.resource, row.position))
        if begun is not None and bar.ended > begun and not (isinstance(row, Past) and row.ended_at == begun):
            bar = replace(bar, asked=max(bar.asked, min(begun, bar.ended)))  # noqa: PLW2901 - the same bar, cut
        bars.setdefault(row.resource, []).append(bar)
    names = sorted(builders, key=lambda name: (-builders[name].seconds, name))[:max_panels]
    panels = tuple(builders[name].panel(name, bars.get(name, [])) for name in sorted(names))
    return Timeline(
        begin=begin,
        end=end,
        panels=panels,
        requests=requests,
        drawn=len({(bar.source.resource, bar.source.position) for panel in panels for bar in panel.bars}),
        longest_left_out=longest_left_out,
        resources_left_out=len(builders) - len(panels),
    )


@dataclass(slots=True)
class _PanelBuilder:
    """The panel of one resource, while its rows are read, from the newest end back in time."""

    begin: datetime
    end: datetime
    seconds: float = 0.0  # the sum of all times held and waited
    requests: int = 0
    limits: set[int] = field(default_factory=set)
    _largest_weights: dict[int, int] = field(default_factory=dict)  # in each interval with holders
    _entered: list[tuple[float, str, int]] = field(default_factory=list)  # holders at the time reached, by grant time
    _weights: dict[str, list[int]] = field(default_factory=dict)  # the weights of holders, by shared access type
    _load: int = 0
    _at: float | None = None  # the time reached, seconds since the beginning

    def read(self, row: Past | Entry, ended: datetime) -> None:
        """Add a row; it must not end later than the rows before it."""
        if not (isinstance(row, Past) and row.outcome in CONVERTED):
            self.requests += 1
        begun = max(row.requested_at, self.begin)
        self.seconds += max(0.0, (ended - begun).total_seconds())
        if row.limit is not None and len(self.limits) < MAX_LIMITS:
            self.limits.add(row.limit)
        if row.granted_at is None:
            return
        left = (ended - self.begin).total_seconds()
        self._go_back_to(left)
        label = granted_access(row)
        self._change_load(label, row.weight, 1)
        heapq.heappush(self._entered, (-(row.granted_at - self.begin).total_seconds(), label, row.weight))

    def panel(self, resource: str, bars: list[Bar]) -> Panel:
        """Return the panel of this resource."""
        self._go_back_to(0.0)
        stretch = (self.end - self.begin) / STRETCHES
        use = []
        before = 0
        for number in range(STRETCHES):
            weight = self._largest_weights.get(number, 0)
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
            self._record_load(-entered)
            self._change_load(label, weight, -1)
        self._record_load(time)

    def _record_load(self, time: float) -> None:
        """Record the present load for the time from ``time`` to the time reached before."""
        until, self._at = self._at, time
        if until is None or not self._load:
            return
        per_second = STRETCHES / max(1e-6, (self.end - self.begin).total_seconds())
        for number in range(max(0, int(time * per_second)), min(STRETCHES - 1, int(until * per_second)) + 1):
            self._largest_weights[number] = max(self._largest_weights.get(number, 0), self._load)

    def _change_load(self, label: str, weight: int, by: int) -> None:
        """Add a holder to the load, or remove it. Holders of one shared access type count as the heaviest of them."""
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
    """Put each bar into the first free lane."""
    busy: list[tuple[datetime, int]] = []
    free: list[int] = []
    for bar in bars:
        while busy and busy[0][0] <= bar.asked:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (bar.ended, lane))
        yield replace(bar, lane=lane)
