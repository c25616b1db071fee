"""Who waits for whom, across resources, up to the one at the head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlsem.insight.overview import Overview
from sqlsem.insight.passing import Pass, number
from sqlsem.model import UPGRADE, WRITE, Entry, Resource
from sqlsem.model_tasks import plain

__all__ = ["Chain", "Leader", "Line", "Waits", "is_upgrading", "is_waiting", "leaders"]

#: A line of execution: a member and one of its threads, tasks or sessions.
Party = tuple[Any, ...]


def is_waiting(entry: Entry) -> bool:
    """Whether its owner waits to be let in."""
    return entry.state == "waits"


def is_upgrading(entry: Entry) -> bool:
    """Whether it is a reader that waits until it is alone."""
    return entry.access.startswith(UPGRADE) and entry.state == "holds"


def party_of(entry: Entry) -> Party:
    """The line of execution that it is of. Who does not tell it has each row taken for somebody's of its own."""
    if entry.member_id is None or entry.owner is None:
        return (entry.position,)
    return entry.member_id, entry.owner


@dataclass(frozen=True, slots=True)
class Blocked:
    """A request that waits, and what holds it back."""

    entry: Entry
    setting: Resource
    behind: tuple[Entry, ...]  # the first of those ahead that together leave it no room
    waiters: int  # of those ahead that it does not share with, how many wait themselves
    fits: bool  # the rows ahead leave it room, under the cap
    fits_uncapped: bool  # they would without the cap
    own: tuple[Entry, ...]  # those of its own party that keep it out, whoever else there is


class Line:
    """The queue of one resource, from its head on: what is ahead of each row."""

    def __init__(self, setting: Resource) -> None:
        self.setting = setting
        self._capped, self._uncapped = Pass(setting.cap, False), Pass(None, False)
        self._rows: list[Entry] = []
        self._by_party: dict[Party, list[Entry]] = {}
        #: For each kind of request that does not fit: what is in its way. More rows ahead change nothing about that.
        self._found: dict[tuple[str, int | None, int], tuple[Entry, ...]] = {}
        self._waiting: dict[str, int] = {}
        self._waiters = 0

    def behind(self, entry: Entry) -> Blocked:
        """What holds a request back that would come now."""
        asked = entry.access, entry.limit, entry.weight
        fits, uncapped = self._capped.fits(*asked), self._uncapped.fits(*asked)
        cap = self._cap_for(entry)
        found: tuple[Entry, ...] = ()
        if not (uncapped if cap is None else fits):
            if asked not in self._found:
                self._found[asked] = _first(self._rows, *asked, cap)
            found = self._found[asked]
        own = _first(self._by_party.get(party_of(entry), ()), *asked, cap)
        waiters = self._waiters - (0 if entry.access == WRITE else self._waiting.get(entry.access, 0))
        return Blocked(entry, self.setting, found, waiters, fits, uncapped, own)

    def _cap_for(self, entry: Entry) -> int | None:
        """The operator's cap, where it leaves room for such a request at all."""
        cap = self.setting.cap
        return None if cap is None or (number(entry.weight) or 0) > cap else cap

    def pass_by(self, entry: Entry) -> None:
        """Leave one row behind."""
        self._capped.go_by(entry.access, entry.limit, entry.weight)
        self._uncapped.go_by(entry.access, entry.limit, entry.weight)
        self._rows.append(entry)
        self._by_party.setdefault(party_of(entry), []).append(entry)
        if is_waiting(entry):
            self._waiters += 1
            self._waiting[entry.access] = self._waiting.get(entry.access, 0) + 1


def _first(rows: Iterable[Entry], access: str, limit: int | None, weight: int, cap: int | None) -> tuple[Entry, ...]:
    """Of rows ahead, the first ones with which a request does not fit; none where it fits with all (`Request.fits`)."""
    limits = [one for one in (number(limit), cap) if one is not None]
    room, load, found = min(limits, default=None), number(weight) or 0, []
    if room is not None and load > room:
        return ()  # it would not fit if it were alone
    for row in rows:
        if access != WRITE and row.access == access:
            continue
        load += number(row.weight) or 0
        found.append(row)
        if (declared := number(row.limit)) is not None:
            room = declared if room is None else min(room, declared)
        if room is not None and load > room:
            return tuple(found)
    return ()


@dataclass(frozen=True, slots=True)
class Chain:
    """Who waits for whom: each link is a request that waits, and the row that it waits for."""

    links: tuple[tuple[Entry, Entry], ...]
    head: Entry | None  # the last row, if it waits for nobody
    deadlock: bool = False  # it comes back to itself


@dataclass(frozen=True, slots=True)
class Leader:
    """A row that others wait for, and that waits for nobody."""

    entry: Entry
    waiters: int  # directly, or behind others
    waiting_seconds: float  # that these have waited together

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return {**plain(self), "entry": self.entry.as_dict()}


class Waits:
    """Everybody who waits, with what holds each of them back; built in one pass along all queues."""

    def __init__(self, overview: Overview) -> None:
        #: By position.
        self.blocked: dict[int, Blocked] = {}
        self._waiting_of: dict[Party, list[Entry]] = {}
        self._heads: dict[int, Entry | None] = {}
        settings = {one.resource: one for one in overview.resources}
        for resource, rows in groupby(overview.entries, key=lambda entry: entry.resource):
            line = Line(settings.get(resource) or Resource(resource, None, False, None, 0, 0))
            for one in self._along(line, list(rows)):
                self.blocked[one.entry.position] = one
                self._waiting_of.setdefault(party_of(one.entry), []).append(one.entry)

    @staticmethod
    def _along(line: Line, rows: list[Entry]) -> Iterator[Blocked]:
        upgrading = [row for row in rows if is_upgrading(row)]
        for row in rows:
            if is_waiting(row):
                yield line.behind(row)
            line.pass_by(row)
        for one in upgrading:  # there is one at the most
            others = tuple(other for other in rows if other is not one and other.granted_at is not None)
            yield Blocked(one, line.setting, others, 0, not others, not others, ())

    def next(self, one: Blocked) -> tuple[Entry, Entry | None] | None:
        """The row that a request waits for, and the request that the owner of that waits with, if it does.

        Where any one of several has to leave, that is one who waits for nobody; where one of them has to in any case,
        it is that one.
        """
        if not one.behind or one.setting.paused:
            return None
        needed = [row for row in one.behind if _excludes(row, one.entry)]
        waits = [(row, self._waits_with(row)) for row in needed or one.behind]
        if needed:
            return max(waits, key=lambda found: (found[1] is not None, found[0].seconds))
        return min(waits, key=lambda found: found[1] is not None)

    def _waits_with(self, row: Entry) -> Entry | None:
        """The request with which the owner of a row waits."""
        if row.position in self.blocked:
            return row
        found = self._waiting_of.get(party_of(row))
        return found[0] if found else None

    def chain(self, position: int) -> Chain:
        """From who waits at a position up to the one at the head."""
        links: list[tuple[Entry, Entry]] = []
        seen: set[int] = set()
        one = self.blocked.get(position)
        while one is not None:
            if one.entry.position in seen:
                return Chain(tuple(links), None, deadlock=True)
            seen.add(one.entry.position)
            found = self.next(one)
            if found is None:
                break
            row, waits = found
            links.append((one.entry, row))
            if waits is None:
                return Chain(tuple(links), row)
            one = self.blocked[waits.position]
        return Chain(tuple(links), None)

    def head(self, position: int) -> Entry | None:
        """The row at the head of that chain; None where there is none, as in a deadlock or behind a pause."""
        way: list[int] = []
        head: Entry | None = None
        one = self.blocked.get(position)
        while one is not None:
            here = one.entry.position
            if here in self._heads:
                head = self._heads[here]
                break
            self._heads[here] = None  # until it is known: who comes by here again is in a circle
            way.append(here)
            found = self.next(one)
            if found is None:
                break
            if found[1] is None:
                head = found[0]
                break
            one = self.blocked[found[1].position]
        self._heads.update(dict.fromkeys(way, head))
        return head


def _excludes(row: Entry, entry: Entry) -> bool:
    """Whether a request can never be inside beside that row."""
    if entry.access.startswith(UPGRADE):
        return True
    limits = [one for one in (number(row.limit), number(entry.limit)) if one is not None]
    return bool(limits) and (number(row.weight) or 0) + (number(entry.weight) or 0) > min(limits)


def leaders(overview: Overview, waits: Waits | None = None) -> list[Leader]:
    """The rows that others wait for and that wait for nobody; that whose waiters have waited longest comes first."""
    waits = waits or Waits(overview)
    found: dict[int, tuple[Entry, int, float]] = {}
    for position, one in waits.blocked.items():
        head = waits.head(position)
        if head is not None:
            _, number, seconds = found.get(head.position, (head, 0, 0.0))
            found[head.position] = head, number + 1, seconds + (one.entry.seconds if is_waiting(one.entry) else 0.0)
    return sorted((Leader(*one) for one in found.values()), key=lambda one: (-one.waiting_seconds, one.entry.position))
