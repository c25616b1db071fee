"""The rows of all tables at one instant, as one read of the database returns them."""

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
from sqlsem.util.record import AsDict, plain, record
from sqlsem.values.batches import BatchEntry
from sqlsem.values.locks import Entry, Resource
from sqlsem.values.rates import RateEntry
from sqlsem.values.tasks import QueueCounts

__all__ = ["Hold", "HoldTimes", "MemberEntry", "Overview", "Percentiles", "percentile"]


@record
class MemberEntry(AsDict):
    """A process or session that takes part. Durations are seconds by the database's clock."""

    member_id: int
    host: str | None
    pid: int | None
    program: str | None
    login: str | None
    joined_at: datetime
    kind: str  # 'beacon' or 'lease': how sqlsem checks that it lives
    missing_for: float | None  # since its beacon was found free, or since its last heartbeat; None: it lives
    grace: float | None  # how long a missing member counts as alive; for a lease, its length
    grace_left: float | None  # the time until it counts as dead; only for a missing member and for a lease
    holding: int
    waiting: int

    @property
    def is_missed(self) -> bool:
        """True if the member cannot be found, and has rows or is still within its grace. (A dead process without rows
        does not matter.)
        """
        dead = self.grace_left is not None and self.grace_left <= 0
        return self.missing_for is not None and (not dead or self.holding + self.waiting > 0)


@record
class Hold:
    """A finished hold of the recent history."""

    held: float
    waited: float
    note: str | None
    program: str | None


@record
class Percentiles:
    """Percentiles of ``count`` durations, in seconds."""

    p10: float
    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Return the percentiles of these values, at least one."""
        ordered = sorted(values)
        p10, p50, p90, p99 = (percentile(ordered, share) for share in (0.1, 0.5, 0.9, 0.99))
        return cls(p10, p50, p90, p99, len(ordered))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value that this share of the ordered values does not exceed, interpolated linearly.

    >>> percentile([1.0, 2.0, 3.0], 0.5)
    2.0
    """
    rank = share * (len(ordered) - 1)
    below, above = math.floor(rank), math.ceil(rank)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True)
class HoldTimes(AsDict):
    """The recent times for which a resource was held and waited for: its newest holds that were released."""

    holds: tuple[Hold, ...]  # at least one, the newest first

    @cached_property
    def held(self) -> Percentiles:
        """The times for which the resource was held."""
        return Percentiles.of(hold.held for hold in self.holds)

    @cached_property
    def waited(self) -> Percentiles:
        """The times for which the granted requests waited."""
        return Percentiles.of(hold.waited for hold in self.holds)

    def as_dict(self) -> dict[str, Any]:
        """Return the percentiles as JSON-ready values."""
        return {"held": plain(self.held), "waited": plain(self.waited)}


@record
class Overview(AsDict):
    """All queues, members, work queues, open batches and rates at one instant (`sqlsem.Admin.overview`).

    ``holds`` has the resources that are held or waited for, the most contended ones if they are many. ``rates`` has the
    windows of rates: if they are many, those with the most waiters, or used last.
    """

    taken_at: datetime  # by the database's clock
    resources: list[Resource]
    entries: list[Entry]  # in order by resource and position
    members: list[MemberEntry]
    queues: list[QueueCounts]
    batches: list[BatchEntry]  # open; failed, without a newer one; or with a callback that has not finished
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
        """Build an overview from an engine's rows. ``settings`` has tuples of resource, cap, paused_at, stale_after,
        paused_by, cap_by; ``holds`` of resource, held, waited, note, program, the newest of each resource first.
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
            {resource: HoldTimes(tuple(sample)) for resource, sample in samples.items()},
            rates,
        )

    def only(self, resource: str) -> Overview:
        """Return the overview of one resource; members, work queues and batches stay."""
        return dataclasses.replace(
            self,
            resources=[entry for entry in self.resources if entry.resource == resource],
            entries=[entry for entry in self.entries if entry.resource == resource],
            holds={name: times for name, times in self.holds.items() if name == resource},
            rates=[rate for rate in self.rates if rate.resource == resource],
        )


def _resources(entries: Iterable[Entry], settings: Iterable[Sequence[Any]]) -> list[Resource]:
    """Return all resources that have rows or settings. (A dead waiter counts as a waiter.)"""
    holding: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for entry in entries:
        waits = entry.state == "waits" or (entry.state == "dead" and entry.granted_at is None)
        (waiting if waits else holding)[entry.resource] += 1
    by_name = {row[0]: row for row in settings}
    names = sorted({*holding, *waiting, *by_name}, key=str)
    return with_settings(
        (Resource(name, None, False, None, holding[name], waiting[name]) for name in names), by_name, {}
    )
