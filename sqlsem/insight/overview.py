"""All that is there at one instant, as one look at the database has it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from sqlsem.insight.patterns import with_settings
from sqlsem.model import BatchEntry, Entry, QueueCounts, Resource
from sqlsem.model_rates import RateEntry
from sqlsem.model_tasks import plain

__all__ = ["Hold", "HoldTimes", "MemberEntry", "Overview", "Percentiles", "percentile"]


@dataclass(frozen=True, slots=True)
class MemberEntry:
    """A process or session that takes part. Durations are seconds by the database's clock."""

    member_id: int
    host: str | None
    pid: int | None
    program: str | None
    login: str | None
    joined_at: datetime
    kind: str  # 'beacon' or 'lease': how it is told alive from dead
    missing_for: float | None  # since its beacon was missed, or its last sign of life; None: it lives
    grace: float | None  # for which it is believed to live while it is missing; of a lease, its length
    grace_left: float | None  # until it is dead: of one that is missing, and of every lease
    holding: int
    waiting: int

    @property
    def is_missed(self) -> bool:
        """Return True while the member cannot be found and has rows, or is within its grace. A process that was killed
        and held nothing is of no concern to anybody.
        """
        dead = self.grace_left is not None and self.grace_left <= 0
        return self.missing_for is not None and (not dead or self.holding + self.waiting > 0)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class Hold:
    """A lock that was had and given back, of the recent history."""

    held: float
    waited: float
    note: str | None
    program: str | None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of so many durations, in seconds."""

    p10: float
    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Of at least one value."""
        ordered = sorted(values)
        p10, p50, p90, p99 = (percentile(ordered, share) for share in (0.1, 0.5, 0.9, 0.99))
        return cls(p10, p50, p90, p99, len(ordered))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that this share of them does not pass: values in order, with a straight line between two of them.

    >>> percentile([1.0, 2.0, 3.0], 0.5)
    2.0
    """
    place = share * (len(ordered) - 1)
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class HoldTimes:
    """How long a resource has been held and waited for of late: its newest holds that were released."""

    holds: tuple[Hold, ...]  # at least one, the newest first

    @cached_property
    def held(self) -> Percentiles:
        """For how long it was held."""
        return Percentiles.of(hold.held for hold in self.holds)

    @cached_property
    def waited(self) -> Percentiles:
        """For how long it was waited for, by those who got it."""
        return Percentiles.of(hold.waited for hold in self.holds)

    def as_dict(self) -> dict[str, Any]:
        """The percentiles as JSON-ready values."""
        return {"held": plain(self.held), "waited": plain(self.waited)}


@dataclass(frozen=True, slots=True)
class Overview:
    """All queues, members, work queues, open batches and rates at one instant (`sqlsem.Coordinator.overview`).

    ``holds`` has those resources for which somebody holds or waits, the most wanted ones if they are many; ``rates``
    the windows of rates: of those for which most wait, or that were used last, if they are many.
    """

    taken_at: datetime  # by the database's clock
    resources: list[Resource]
    entries: list[Entry]  # in order by resource and position
    members: list[MemberEntry]
    queues: list[QueueCounts]
    batches: list[BatchEntry]  # open, or failed and not begun anew, or with a callback that has not finished
    holds: dict[str, HoldTimes]
    rates: list[RateEntry] = field(default_factory=list)  # in order by name and length

    @classmethod
    def of_rows(
        cls,
        taken_at: datetime,
        entries: list[Entry],
        settings: Iterable[Sequence[Any]],
        members: list[MemberEntry],
        queues: list[QueueCounts],
        batches: list[BatchEntry],
        holds: Iterable[Sequence[Any]],
        rates: list[RateEntry],
    ) -> Overview:
        """From what an engine has read; settings and holds as rows.

        Args:
            taken_at: The database's clock.
            entries: The queue.
            settings: Resource, cap, paused_at, stale_after, paused_by, cap_by.
            members: All of them.
            queues: The work queues.
            batches: Those that have not ended well.
            holds: Resource, held, waited, note, program; the newest of each resource first.
            rates: Windows.
        """
        samples: dict[str, list[Hold]] = {}
        for resource, *hold in holds:
            samples.setdefault(resource, []).append(Hold(*hold))
        return cls(
            taken_at,
            _resources(entries, settings),
            entries,
            members,
            queues,
            batches,
            {resource: HoldTimes(tuple(found)) for resource, found in samples.items()},
            rates,
        )

    def only(self, resource: str) -> Overview:
        """What of it concerns one resource; members, work queues and batches stay."""
        return dataclasses.replace(
            self,
            resources=[one for one in self.resources if one.resource == resource],
            entries=[entry for entry in self.entries if entry.resource == resource],
            holds={name: times for name, times in self.holds.items() if name == resource},
            rates=[rate for rate in self.rates if rate.resource == resource],
        )

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return {
            "taken_at": self.taken_at.isoformat(),
            **{
                name: [one.as_dict() for one in getattr(self, name)]
                for name in ("resources", "entries", "members", "queues", "batches", "rates")
            },
            "holds": {resource: times.as_dict() for resource, times in self.holds.items()},
        }


def _resources(entries: Iterable[Entry], settings: Iterable[Sequence[Any]]) -> list[Resource]:
    """All that have rows or settings. (A dead waiter counts as one who waits.)"""
    holding: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for entry in entries:
        waits = entry.state == "waits" or (entry.state == "dead" and entry.granted_at is None)
        (waiting if waits else holding)[entry.resource] += 1
    found = {row[0]: row for row in settings}
    names = sorted({*holding, *waiting, *found}, key=str)
    return with_settings((Resource(name, None, False, None, holding[name], waiting[name]) for name in names), found, {})
