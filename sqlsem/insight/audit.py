"""Whether a history could be: no limit passed, nobody overtaken. One pass over the rows, the newest end first.

A request that is let in must fit (`Request.fits`) with every row ahead of it that is there at that instant, whether
that row is inside or still waits. That is the rule itself, and all that is promised about limits and order follows from
it: whoever is inside together fits together, as the last of them in the queue fitted with the others; and nobody goes
past a row that it conflicts with. A reader that becomes the writer, by a row that is there already, must be alone.
Operators' caps and pauses count from a moment after they were set, as far as it is written down when that was.

The pass goes back in time. A row comes in at its end and goes out when it was asked for, so no more is kept in memory
than was there at one time, however long the history.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlsem.insight.patterns import is_pattern
from sqlsem.insight.rule import Asked, Kind, Queue
from sqlsem.model import READ, UPGRADE, WRITE, Entry, Operation, Past, Resource

__all__ = ["Audit", "Finding", "Ruling", "audit", "rulings"]

#: Of those in the way of one request at most so many are shown.
MOST_ROWS = 20
#: What has ended since the entries were read is among so many of the newest rows.
JUST_ENDED = 5000
#: Who is being let in as an operator sets something may not have heard of it.
HEARD_OF = timedelta(seconds=5)
#: What happens to a row, in the order in which it is looked at where both have one time.
GRANTED, ASKED = 0, 1
CONVERTED = ("upgraded", "downgraded", "handed_over")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be.

    ``kind`` is 'limit' (more inside than a limit allows; a writer, or a stage, not alone), 'order' (let in past
    somebody who waited ahead of it and conflicts with it), 'alone' (a reader became the writer beside others), 'number'
    (a position that was given twice, or not in the order of asking), 'cap', 'pause' (let in against an operator's cap
    or pause) or 'clock' (an end before its beginning).
    """

    kind: str
    resource: str
    position: int
    at: datetime
    words: str
    rows: tuple[Past | Entry, ...]  # first the offender, then those that were in its way

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return {
            "kind": self.kind,
            "resource": self.resource,
            "position": self.position,
            "at": self.at.isoformat(),
            "words": self.words,
            "rows": [row.as_dict() for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Audit:
    """What came of it. ``first_end`` and ``last_end`` are those of the finished rows: of what ended before the first
    one nothing is known, so of what was let in before it only a part could be checked (``partly``).
    """

    finished: int
    present: int
    resources: int
    grants: int
    partly: int
    first_end: datetime | None
    last_end: datetime | None
    found: int
    findings: tuple[Finding, ...]  # the newest; ``found`` says how many there are

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.found

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return {
            "ok": self.ok,
            "finished": self.finished,
            "present": self.present,
            "resources": self.resources,
            "grants": self.grants,
            "partly": self.partly,
            "first_end": None if self.first_end is None else self.first_end.isoformat(),
            "last_end": None if self.last_end is None else self.last_end.isoformat(),
            "found": self.found,
            "findings": [finding.as_dict() for finding in self.findings],
        }


@dataclass(frozen=True, slots=True)
class Ruling:
    """An operator's cap, or a pause, for as long as it is known to have been in force (None: it still is)."""

    resource: str
    since: datetime
    until: datetime | None
    cap: int | None  # None: a pause
    #: Of a pattern's: names, and patterns, that may have had something else set for them.
    but_for: frozenset[str] = frozenset()

    def holds_for(self, resource: str) -> bool:
        """Whether a pattern's is about that resource, for certain."""
        return resource.startswith(self.resource[:-1]) and not any(
            resource.startswith(other[:-1]) if is_pattern(other) else resource == other for other in self.but_for
        )


def rulings(operations: Iterable[Operation], resources: Iterable[Resource]) -> list[Ruling]:
    """What operators had set, and when, from what they did.

    Only what is certain: from an operation to the next one that says the same of what was before, or until now if that
    is what is set now.
    """
    now = {one.resource: one for one in resources}
    own = {one.resource for one in now.values() if one.cap is not None and one.pattern is None}
    done: dict[tuple[str, bool], list[Operation]] = {}
    for operation in sorted(operations, key=lambda operation: operation.operation_id):
        if operation.resource is not None and operation.action in ("cap", "pause", "resume"):
            done.setdefault((operation.resource, operation.action == "cap"), []).append(operation)
    own |= {resource for resource, caps in done if caps}
    found = []
    for (resource, caps), some in done.items():
        for one, after in itertools.zip_longest(some, some[1:]):
            until = None if after is None else after.done_at
            if caps and one.new is not None:
                there = now.get(resource)
                is_set = there is not None and there.cap is not None and there.pattern is None
                is_still = (str(there.cap) if there is not None and is_set else None) if after is None else after.old
                if is_still == one.new:
                    found.append(Ruling(resource, one.done_at, until, int(one.new), frozenset(own - {resource})))
            elif one.action == "pause":
                is_so = now[resource].paused if after is None and resource in now else after is not None
                if is_so and (after is None or after.action == "resume"):
                    found.append(Ruling(resource, one.done_at, until, None))
    return found


def audit(
    past: Iterable[Past], entries: Iterable[Entry] = (), ruled: Iterable[Ruling] = (), *, most: int = 100
) -> Audit:
    """Check a history, and what is there now.

    Args:
        past: Finished requests, the newest end first, as they are read: they are not kept.
        entries: What holds and waits now, read *before* the first of ``past``: those tell what has ended since.
        ruled: What operators had set: see `rulings`.
        most: So many findings are kept at the most; all are counted.
    """
    pass_ = _Pass(most, ruled)
    past = iter(past)
    newest = list(itertools.islice(past, JUST_ENDED))
    ended = {(one.resource, one.position) for one in newest if one.outcome not in CONVERTED}
    for entry in entries:
        if (entry.resource, entry.position) not in ended:
            pass_.read_entry(entry)
    for one in itertools.chain(newest, past):
        pass_.read_past(one)
    return pass_.end()


@dataclass(slots=True, eq=False)
class _Row:
    """A row of the queue while it was one thing. Times in seconds since 1970."""

    source: Past | Entry
    place: int
    kind: Kind
    asked: float
    granted: float | None
    ended: float | None  # None: it is there
    ruling: Ruling | None = None  # against which it was let in, if it was let in then
    gone: bool = False  # something else stands in its place by now: what is still to come of it counts no more

    @property
    def is_bare(self) -> bool:
        """Whether nobody is known whose it is."""
        return self.source.host is None and (isinstance(self.source, Past) or self.source.member_id is None)

    def is_there_after(self, time: float) -> bool:
        """Whether its end is later."""
        return self.ended is None or self.ended > time

    def request(self) -> Asked:
        """What it asks for."""
        return Asked(self.source.resource, *self.kind)


@dataclass(slots=True)
class _WaiterQueue:
    """What is there of a resource, at the time that the pass has come to."""

    queue: Queue[int]
    rows: dict[int, _Row] = field(default_factory=dict)
    inside: dict[int, _Row] = field(default_factory=dict)
    #: Who asked last, of those whose asking has been seen: all before it must have lower numbers.
    next_asked: _Row | None = None

    def put(self, row: _Row) -> None:
        self.rows[row.place] = row
        self.queue.add(row.kind, row.place)
        if row.granted is not None:
            self.inside[row.place] = row

    def take(self, row: _Row) -> None:
        row.gone = True
        del self.rows[row.place]
        self.inside.pop(row.place, None)
        self.queue.remove(row.kind, row.place)


def _access(row: Entry | Past) -> str:
    """As what it was let in. (Since when a reader upgrades, nobody writes down; it may also end while it does.)"""
    return READ if row.access.startswith(UPGRADE) else row.access


class _Pass:
    def __init__(self, most: int, ruled: Iterable[Ruling]) -> None:
        self._most = most
        self._ruled: dict[str, list[Ruling]] = {}
        self._patterns: list[Ruling] = []
        for ruling in ruled:
            if ruling.cap is not None and is_pattern(ruling.resource):
                self._patterns.append(ruling)
            else:
                self._ruled.setdefault(ruling.resource, []).append(ruling)
        self._lines: dict[str, _WaiterQueue] = {}
        self._events: list[tuple[float, int, int, int, _Row]] = []  # backwards in time
        self._numbers = itertools.count()
        self._findings: list[Finding] = []
        self._finished = self._present = self._found = self._grants = 0
        self._first: Past | None = None
        self._last: Past | None = None

    def read_entry(self, entry: Entry) -> None:
        """A row that is there."""
        self._present += 1
        granted = None if entry.granted_at is None else entry.granted_at.timestamp()
        kind = (_access(entry), entry.limit, entry.weight)
        row = _Row(entry, entry.position, kind, entry.requested_at.timestamp(), granted, None)
        self._line(entry.resource).put(row)
        self._expect(row)

    def read_past(self, past: Past) -> None:
        """A row that has ended, no later than those that were read before."""
        ended = past.ended_at.timestamp()
        if self._first is not None and past.ended_at > self._first.ended_at:
            raise ValueError("The history must come with the newest end first")
        self._finished += 1
        self._first = past
        self._last = self._last or past
        self._go_back_to(ended)
        converted = past.outcome in CONVERTED
        # (Not every engine writes down the limit of what goes on; nothing else can be converted than a limit of 1.)
        kind = (_access(past), 1 if converted and past.outcome != "handed_over" else past.limit, past.weight)
        granted = None if past.granted_at is None else past.granted_at.timestamp()
        row = _Row(past, past.position, kind, past.requested_at.timestamp(), granted, ended)
        if self._has_times_wrong(row):
            return
        line = self._line(past.resource)
        later = line.rows.get(past.position)
        if later is not None and later.ended is not None and not converted:
            self._tell("number", row, "its position was given twice", [later])
            return
        if later is not None:  # what it went on as; or it was there, and has just ended
            if later.granted is not None and later.place not in line.inside:
                self._grants -= 1  # it was not let in then: it became something else
            line.take(later)
        if past.outcome == "upgraded":
            self._check_alone(line, row)
        line.put(row)
        self._expect(row)

    def end(self) -> Audit:
        """What came of it."""
        fully = self._grants
        self._go_back_to(None)
        return Audit(
            finished=self._finished,
            present=self._present,
            resources=len(self._lines),
            grants=self._grants,
            partly=0 if self._first is None else self._grants - fully,
            first_end=None if self._first is None else self._first.ended_at,
            last_end=None if self._last is None else self._last.ended_at,
            found=self._found,
            findings=tuple(self._findings),
        )

    # -- going back -----------------------------------------------------------------------------------------------

    def _line(self, resource: str) -> _WaiterQueue:
        line = self._lines.get(resource)
        if line is None:
            line = self._lines[resource] = _WaiterQueue(Queue(resource))
        return line

    def _expect(self, row: _Row) -> None:
        if row.granted is not None:
            heapq.heappush(self._events, (-row.granted, GRANTED, -row.place, next(self._numbers), row))
        heapq.heappush(self._events, (-row.asked, ASKED, -row.place, next(self._numbers), row))

    def _go_back_to(self, time: float | None) -> None:
        """Look at what happened since, and at what was granted then: what ends then is not beside it any more."""
        events = self._events
        while events and (time is None or (events[0][0], events[0][1]) < (-time, ASKED)):
            _, what, *_, row = heapq.heappop(events)
            if row.gone:
                continue
            line = self._lines[row.source.resource]
            if what == GRANTED:
                del line.inside[row.place]
                self._grants += 1
                self._check_granted(line, row)
                if time is not None:  # (what became of it at the very beginning may not be known)
                    row.ruling = self._ruling(line, row)
            else:
                line.take(row)
                if row.ruling is not None:
                    capped = row.ruling.cap is not None
                    words = f"a cap of {row.ruling.cap} was in force" if capped else "its resource was paused"
                    self._tell("cap" if capped else "pause", row, f"it was let in while {words}")
                self._check_number(line, row)

    # -- what must be ---------------------------------------------------------------------------------------------

    def _has_times_wrong(self, row: _Row) -> bool:
        begun = row.asked if row.granted is None else row.granted
        if row.ended is None or row.asked <= begun <= row.ended:
            return False
        self._tell(
            "clock", row, "it ends before it begins, so the server's clock was set back: nothing is proven there"
        )
        return True

    def _check_granted(self, line: _WaiterQueue, row: _Row) -> None:
        if line.queue.fits(row.kind, row.place):
            return
        # What ended at this very instant was over.
        time = row.asked if row.granted is None else row.granted
        ahead = [entry for entry in line.rows.values() if entry.place < row.place and entry.is_there_after(time)]
        asked = row.request()
        if asked.fits([one.request() for one in ahead], None):
            return
        inside = [one for one in ahead if one.granted is not None and one.granted <= time]
        if asked.fits([one.request() for one in inside], None):
            waiting = [one for one in ahead if one not in inside and not (asked.shared and one.kind[0] == asked.access)]
            self._tell("order", row, "it was let in past who waited ahead of it", waiting)
        else:
            others = [one for one in inside if not (asked.shared and one.kind[0] == asked.access)]
            self._tell("limit", row, "it was let in beside more than the limit allows", others)

    def _ruling(self, line: _WaiterQueue, row: _Row) -> Ruling | None:
        """What an operator had set against its entering. If it turns out to have been there as something else before,
        that does not count: who is inside stays inside, and may be converted.
        """
        granted = row.source.granted_at
        resource = row.source.resource
        ruled: list[Ruling] = [
            *self._ruled.get(resource, ()),
            *(pattern for pattern in self._patterns if pattern.holds_for(resource)),
        ]
        for ruling in ruled:
            if granted is None or granted <= ruling.since + HEARD_OF:
                continue
            if ruling.until is not None and granted >= ruling.until:
                continue
            if ruling.cap is None:
                return ruling
            if not line.queue.fits(row.kind, row.place, ruling.cap):
                ahead = [
                    entry.request()
                    for entry in line.rows.values()
                    if entry.place < row.place and entry.is_there_after(granted.timestamp())
                ]
                if not row.request().fits(ahead, ruling.cap):
                    return ruling
        return None

    def _check_alone(self, line: _WaiterQueue, row: _Row) -> None:
        time = row.asked if row.ended is None else row.ended
        others = [one for one in line.inside.values() if one.is_there_after(time)]
        if not line.queue.fits((WRITE, 1, 1), row.place):  # it waits for all that stand ahead, inside or not
            ahead = (
                entry for entry in line.rows.values() if entry.place < row.place and entry.place not in line.inside
            )
            others += [one for one in ahead if one.is_there_after(time)]
        if others:
            self._tell("alone", row, "it became the writer while others were there", others)

    def _check_number(self, line: _WaiterQueue, row: _Row) -> None:
        if row.is_bare:  # (its time may be of before it stood in line)
            return
        after, line.next_asked = line.next_asked, row
        if after is not None and after.place < row.place and after.asked > row.asked:
            self._tell("number", row, "who asked later has a lower position, or the clock was set back", [after])

    def _tell(self, kind: str, row: _Row, words: str, others: Iterable[_Row] = ()) -> None:
        self._found += 1
        if len(self._findings) >= self._most:
            return
        source = row.source
        at = (
            source.ended_at
            if kind == "alone" and isinstance(source, Past)
            else source.granted_at or source.requested_at
        )
        found = sorted(others, key=lambda one: one.place)
        if found:
            words += ": " + _positions(found)
        rows = (source, *(one.source for one in found[:MOST_ROWS]))
        self._findings.append(Finding(kind, source.resource, source.position, at, words, rows))


def _positions(rows: list[_Row]) -> str:
    shown = ", ".join(str(row.place) for row in rows[:MOST_ROWS])
    return shown if len(rows) <= MOST_ROWS else f"{shown} and {len(rows) - MOST_ROWS} more"
