"""Check a history: no limit was exceeded, and no request overtook another. One pass over the rows, newest end first.

A granted request must fit (`Request.fits`) with every row ahead of it at that instant, held or waiting. That is the
rule itself, and all promises about limits and order follow from it. Concurrent holders fit together, because the last
of them in the queue fitted with the others. No request passes a row that it conflicts with. A reader that becomes the
writer in its own row must be alone. Operators' caps and pauses count from a few seconds after they were set, if the
table of operations has the time.

The pass goes back in time. A row is added at its end and removed at its request time, so memory holds only as many rows
as existed at one time, however long the history is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlsem.insight.patterns import is_pattern
from sqlsem.insight.rule import CONVERTED, Kind, Queue, QueuedRequest, granted_access
from sqlsem.util.record import AsDict, plain, record
from sqlsem.values.locks import WRITE, Entry, Operation, Past, Resource

__all__ = ["Audit", "Finding", "Ruling", "audit", "rulings"]

#: Show at most this many rows that block one request.
MAX_ROWS = 20
#: Rows that ended after the entries were read are among this many of the newest rows.
RECENTLY_ENDED = 5000
#: A request that is granted while an operator changes a setting may not see the setting yet.
SETTING_DELAY = timedelta(seconds=5)
#: The events of a row, in the order in which they are handled at the same time.
GRANTED, ASKED = 0, 1


@record
class Finding(AsDict):
    """A violation of the rule.

    ``kind`` is 'limit' (more weight held than a limit allows; a writer, or a stage, not alone), 'order' (granted past a
    conflicting waiter ahead of it), 'alone' (a reader became the writer beside others), 'number' (a position that was
    given twice, or not in the order of the requests), 'cap', 'pause' (granted against an operator's cap or pause) or
    'clock' (an end before its beginning).
    """

    kind: str
    resource: str
    position: int
    at: datetime
    words: str
    rows: tuple[Past | Entry, ...]  # first the offender, then the rows that blocked it


@record
class Audit(AsDict):
    """The result of an audit. ``first_end`` and ``last_end`` are those of the finished rows. Rows that ended before
    ``first_end`` are unknown, so earlier grants are checked only in part: ``partly`` is their number.
    """

    finished: int
    present: int
    resources: int
    grants: int
    partly: int
    first_end: datetime | None
    last_end: datetime | None
    found: int
    findings: tuple[Finding, ...]  # the newest; ``found`` is the number of all findings

    @property
    def ok(self) -> bool:
        """True if there are no findings."""
        return not self.found

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {"ok": self.ok, **plain(self)}


@record
class Ruling:
    """An operator's cap or pause, from ``since`` to ``until`` (None: it is still in force)."""

    resource: str
    since: datetime
    until: datetime | None
    cap: int | None  # None: a pause
    #: For a pattern: names, and patterns, that may have had a setting of their own.
    but_for: frozenset[str] = frozenset()

    def holds_for(self, resource: str) -> bool:
        """Return True if a pattern's setting certainly applied to that resource."""
        return resource.startswith(self.resource[:-1]) and not any(
            resource.startswith(other[:-1]) if is_pattern(other) else resource == other for other in self.but_for
        )


def rulings(operations: Iterable[Operation], resources: Iterable[Resource]) -> list[Ruling]:
    """Return the caps and pauses that operators had set, and when, from the table of operations.

    Returns only settings that were certainly in force: from one operation to the next, if that one recorded the value
    as it was; or until now, if the setting still has that value.
    """
    now = {resource.resource: resource for resource in resources}
    own_caps = {name: str(row.cap) for name, row in now.items() if row.cap is not None and row.pattern is None}
    by_setting: dict[tuple[str, bool], list[Operation]] = {}
    for operation in sorted(operations, key=lambda operation: operation.operation_id):
        if operation.resource is not None and operation.action in ("cap", "pause", "resume"):
            by_setting.setdefault((operation.resource, operation.action == "cap"), []).append(operation)
    own = {*own_caps, *(resource for resource, caps in by_setting if caps)}
    in_force = []
    for (resource, caps), operations_on in by_setting.items():
        for operation, after in itertools.zip_longest(operations_on, operations_on[1:]):
            until = None if after is None else after.done_at
            if caps and operation.new is not None:
                value_later = own_caps.get(resource) if after is None else after.old
                if value_later == operation.new:
                    in_force.append(
                        Ruling(resource, operation.done_at, until, int(operation.new), frozenset(own - {resource}))
                    )
            elif operation.action == "pause":
                is_certain = now[resource].paused if after is None and resource in now else after is not None
                if is_certain and (after is None or after.action == "resume"):
                    in_force.append(Ruling(resource, operation.done_at, until, None))
    return in_force


def audit(
    past: Iterable[Past], entries: Iterable[Entry] = (), ruled: Iterable[Ruling] = (), *, maximum: int = 100
) -> Audit:
    """Check a history, and the rows that hold and wait now.

    Args:
        past: Finished requests, the newest end first; read once and not kept.
        entries: The rows that hold and wait now, read *before* the first of ``past``: that has the rows which have
            ended in between.
        ruled: The settings of operators: see `rulings`.
        maximum: Keep at most this many findings; all are counted.
    """
    auditor = _Auditor(maximum, ruled)
    past = iter(past)
    newest = list(itertools.islice(past, RECENTLY_ENDED))
    ended = {(row.resource, row.position) for row in newest if row.outcome not in CONVERTED}
    for entry in entries:
        if (entry.resource, entry.position) not in ended:
            auditor.read_entry(entry)
    for row in itertools.chain(newest, past):
        auditor.read_past(row)
    return auditor.end()


@dataclass(slots=True, eq=False)
class _Row:
    """A row of the queue between two conversions. Times in seconds since 1970."""

    source: Past | Entry
    position: int
    kind: Kind
    asked: float
    granted: float | None
    ended: float | None  # None: the row is still there
    ruling: Ruling | None = None  # the cap or pause that forbade its grant
    gone: bool = False  # it has left, or another row has replaced it: ignore its remaining events

    @property
    def is_bare(self) -> bool:
        """True if the owner of the row is unknown."""
        return self.source.host is None and (isinstance(self.source, Past) or self.source.member_id is None)

    def is_there_after(self, time: float) -> bool:
        """Return True if the row ended after this time."""
        return self.ended is None or self.ended > time

    def request(self) -> QueuedRequest:
        """Return the request of this row."""
        return QueuedRequest(self.source.resource, *self.kind)


@dataclass(slots=True)
class _QueueState:
    """The rows of one resource at the time that the pass has reached."""

    queue: Queue[int]
    rows: dict[int, _Row] = field(default_factory=dict)
    inside: dict[int, _Row] = field(default_factory=dict)
    #: The latest request seen so far: all earlier requests must have lower positions.
    next_asked: _Row | None = None

    def put(self, row: _Row) -> None:
        self.rows[row.position] = row
        self.queue.add(row.kind, row.position)
        if row.granted is not None:
            self.inside[row.position] = row

    def ahead(self, row: _Row, time: float) -> list[_Row]:
        """Return the rows ahead of a row that ended after this time."""
        return [entry for entry in self.rows.values() if entry.position < row.position and entry.is_there_after(time)]

    def take(self, row: _Row) -> None:
        row.gone = True
        del self.rows[row.position]
        self.inside.pop(row.position, None)
        self.queue.remove(row.kind, row.position)


class _Auditor:
    def __init__(self, maximum: int, ruled: Iterable[Ruling]) -> None:
        self._max_findings = maximum
        self._ruled: dict[str, list[Ruling]] = {}
        self._patterns: list[Ruling] = []
        for ruling in ruled:
            if ruling.cap is not None and is_pattern(ruling.resource):
                self._patterns.append(ruling)
            else:
                self._ruled.setdefault(ruling.resource, []).append(ruling)
        self._queues: dict[str, _QueueState] = {}
        self._events: list[tuple[float, int, int, int, _Row]] = []  # newest first
        self._numbers = itertools.count()
        self._findings: list[Finding] = []
        self._finished = self._present = self._found = self._grants = 0
        self._first: Past | None = None
        self._last: Past | None = None

    def read_entry(self, entry: Entry) -> None:
        """Add a row that is still there."""
        self._present += 1
        granted = None if entry.granted_at is None else entry.granted_at.timestamp()
        kind = (granted_access(entry), entry.limit, entry.weight)
        row = _Row(entry, entry.position, kind, entry.requested_at.timestamp(), granted, None)
        self._queue(entry.resource).put(row)
        self._schedule(row)

    def read_past(self, past: Past) -> None:
        """Add a finished row; it must not end later than the rows read before it."""
        ended = past.ended_at.timestamp()
        if self._first is not None and past.ended_at > self._first.ended_at:
            raise ValueError("The history must come with the newest end first")
        self._finished += 1
        self._first = past
        self._last = self._last or past
        self._go_back_to(ended)
        converted = past.outcome in CONVERTED
        # (Some engines do not record the limit of a converted row. Only rows with a limit of 1 can be converted.)
        kind = (granted_access(past), 1 if converted and past.outcome != "handed_over" else past.limit, past.weight)
        granted = None if past.granted_at is None else past.granted_at.timestamp()
        row = _Row(past, past.position, kind, past.requested_at.timestamp(), granted, ended)
        if self._has_times_wrong(row):
            return
        queue = self._queue(past.resource)
        later = queue.rows.get(past.position)
        if later is not None and later.ended is not None and not converted:
            self._report("number", row, "its position was given twice", [later])
            return
        if later is not None:  # the row after a conversion, or a row of ``entries`` that has just ended
            if later.granted is not None and later.position not in queue.inside:
                self._grants -= 1  # it was converted then, not granted
            queue.take(later)
        if past.outcome == "upgraded":
            self._check_alone(queue, row)
        queue.put(row)
        self._schedule(row)

    def end(self) -> Audit:
        """Return the result, after handling the events that are left."""
        fully = self._grants
        self._go_back_to(None)
        return Audit(
            finished=self._finished,
            present=self._present,
            resources=len(self._queues),
            grants=self._grants,
            partly=0 if self._first is None else self._grants - fully,
            first_end=None if self._first is None else self._first.ended_at,
            last_end=None if self._last is None else self._last.ended_at,
            found=self._found,
            findings=tuple(self._findings),
        )

    # -- back in time ------------------------------------------------------------------------------------------------

    def _queue(self, resource: str) -> _QueueState:
        return self._queues.setdefault(resource, _QueueState(Queue(resource)))

    def _schedule(self, row: _Row) -> None:
        if row.granted is not None:
            heapq.heappush(self._events, (-row.granted, GRANTED, -row.position, next(self._numbers), row))
        heapq.heappush(self._events, (-row.asked, ASKED, -row.position, next(self._numbers), row))

    def _go_back_to(self, time: float | None) -> None:
        """Handle the events since ``time``, and the grants at ``time``: a row that ends at ``time`` does not conflict
        with them.
        """
        events = self._events
        while events and (time is None or (events[0][0], events[0][1]) < (-time, ASKED)):
            _, event, *_, row = heapq.heappop(events)
            if row.gone:
                continue
            queue = self._queues[row.source.resource]
            if event == GRANTED:
                del queue.inside[row.position]
                self._grants += 1
                self._check_granted(queue, row)
                if time is not None:  # (rows that ended before the history begins are unknown)
                    row.ruling = self._ruling(queue, row)
            else:
                queue.take(row)
                if row.ruling is not None:
                    capped = row.ruling.cap is not None
                    words = f"a cap of {row.ruling.cap} was in force" if capped else "its resource was paused"
                    self._report("cap" if capped else "pause", row, f"it was granted while {words}")
                self._check_number(queue, row)

    # -- checks ------------------------------------------------------------------------------------------------------

    def _has_times_wrong(self, row: _Row) -> bool:
        begun = row.asked if row.granted is None else row.granted
        if row.ended is None or row.asked <= begun <= row.ended:
            return False
        self._report(
            "clock", row, "it ends before it begins, so the server's clock was set back: nothing is proven there"
        )
        return True

    def _check_granted(self, queue: _QueueState, row: _Row) -> None:
        if queue.queue.fits(row.kind, row.position):
            return
        # A row that ended at this very instant does not count.
        time = row.asked if row.granted is None else row.granted
        ahead = queue.ahead(row, time)
        request = row.request()
        if request.fits([entry.request() for entry in ahead], None):
            return
        conflicting = [entry for entry in ahead if not (request.shared and entry.kind[0] == request.access)]
        inside = [entry for entry in conflicting if entry.granted is not None and entry.granted <= time]
        if request.fits([entry.request() for entry in inside], None):
            waiting = [entry for entry in conflicting if entry not in inside]
            self._report("order", row, "it was granted past a waiter ahead of it", waiting)
        else:
            self._report("limit", row, "it was granted beside more than the limit allows", inside)

    def _ruling(self, queue: _QueueState, row: _Row) -> Ruling | None:
        """Return the cap or pause that forbade this grant, or None. The caller ignores it if the row turns out to come
        from a conversion: caps and pauses do not forbid these.
        """
        granted = row.source.granted_at
        resource = row.source.resource
        candidates: list[Ruling] = [
            *self._ruled.get(resource, ()),
            *(pattern for pattern in self._patterns if pattern.holds_for(resource)),
        ]
        for ruling in candidates:
            if granted is None or granted <= ruling.since + SETTING_DELAY:
                continue
            if ruling.until is not None and granted >= ruling.until:
                continue
            if ruling.cap is None:
                return ruling
            if not queue.queue.fits(row.kind, row.position, ruling.cap):
                ahead = [entry.request() for entry in queue.ahead(row, granted.timestamp())]
                if not row.request().fits(ahead, ruling.cap):
                    return ruling
        return None

    def _check_alone(self, queue: _QueueState, row: _Row) -> None:
        time = row.asked if row.ended is None else row.ended
        others = [entry for entry in queue.inside.values() if entry.is_there_after(time)]
        if not queue.queue.fits((WRITE, 1, 1), row.position):  # an upgrade waits for all rows ahead, held or waiting
            others += [entry for entry in queue.ahead(row, time) if entry.position not in queue.inside]
        if others:
            self._report("alone", row, "it became the writer while others were there", others)

    def _check_number(self, queue: _QueueState, row: _Row) -> None:
        if row.is_bare:  # (the time of a bare row may be older than its position)
            return
        after, queue.next_asked = queue.next_asked, row
        if after is not None and after.position < row.position and after.asked > row.asked:
            self._report("number", row, "a later request has a lower position, or the clock was set back", [after])

    def _report(self, kind: str, row: _Row, words: str, others: Iterable[_Row] = ()) -> None:
        self._found += 1
        if len(self._findings) >= self._max_findings:
            return
        source = row.source
        at = (
            source.ended_at
            if kind == "alone" and isinstance(source, Past)
            else source.granted_at or source.requested_at
        )
        shown = sorted(others, key=lambda row: row.position)
        if shown:
            words += ": " + _positions(shown)
        rows = (source, *(row.source for row in shown[:MAX_ROWS]))
        self._findings.append(Finding(kind, source.resource, source.position, at, words, rows))


def _positions(rows: list[_Row]) -> str:
    shown = ", ".join(str(row.position) for row in rows[:MAX_ROWS])
    return shown if len(rows) <= MAX_ROWS else f"{shown} and {len(rows) - MAX_ROWS} more"
