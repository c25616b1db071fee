"""The tables that `sqlsem top` and `sqlsem dashboard` show, as text: rows, columns, words, sorting, filtering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlsem.insight.chains import leaders
from sqlsem.insight.consequences import INSIDE, Kind
from sqlsem.insight.overview import MemberEntry, Overview, Percentiles
from sqlsem.insight.rates import goes_in, rate_words, used_words
from sqlsem.insight.reasons import Reason
from sqlsem.insight.words import clock, seconds_in_words, who_is
from sqlsem.model import BatchEntry, Entry, QueueCounts, Resource
from sqlsem.model_rates import RateEntry
from sqlsem.names import access_in_words
from sqlsem.printable import clean

__all__ = ["ORDER", "VIEWS", "Column", "Listing", "Row", "View", "listing", "offered", "summary"]

#: The order of a view that has not been sorted by anything: of the queues, that in which they stand.
ORDER = "order"


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its head, and what it does where there is little room.

    Attributes:
        key: What it is called where one sorts by it.
        head: What stands above it.
        right: Its cells stand at the right.
        elastic: It gives way first.
        extra: It is left out of what is narrow.
        falling: Sorted by, the largest comes first.
    """

    key: str
    head: str
    right: bool = False
    elastic: bool = False
    extra: bool = False
    falling: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row; clean, so that it can be printed anywhere.

    Attributes:
        key: Names it from one look to the next.
        cells: A text for each column. A heading has one, which goes across.
        state: What gives it its colour, and stands in one of its cells.
        details: All that is known, in sentences.
        heading: Whether it is the line of a resource above its queue.
        resource: What it is about; what can be done with it follows from these.
        position: A request's.
        task_id: The failed task's that holds its queue up.
        actions: What can be done with it.
    """

    key: str
    cells: tuple[str, ...]
    state: str = ""
    details: tuple[str, ...] = ()
    heading: bool = False
    resource: str | None = None
    position: int | None = None
    task_id: int | None = None
    actions: tuple[Kind, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """A view as it is shown: ``shown`` of ``total`` rows (headings are not counted), sorted by ``sort``."""

    view: View
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    sort: str
    shown: int
    total: int


@dataclass(frozen=True, slots=True)
class _WaiterQueue:
    """A row that is not sorted yet: with what it is sorted by, and with what it is found by beside its cells."""

    row: Row
    by: dict[str, Any]
    words: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """One of the tables: what it is called, its columns, what it says when there is nothing in it."""

    key: str
    title: str
    columns: tuple[Column, ...]
    lines: Callable[[Overview, Mapping[int, Reason]], Iterable[_WaiterQueue]]
    nothing: str
    headings: bool = False  # in their own order, rows stand below lines of their resources
    filled: Callable[[Overview], bool] | None = None  # where it tells that nothing is in it, it is not offered

    @property
    def sorts(self) -> tuple[str, ...]:
        """What it can be sorted by."""
        return (ORDER, *(column.key for column in self.columns))


def listing(
    overview: Overview, why: Mapping[int, Reason], view: str = "queues", sort: str = ORDER, wanted: str = ""
) -> Listing:
    """A view of what was found.

    Args:
        overview: What was found.
        why: Why those wait who wait: `reasons` of the same overview. (That takes a second where thousands wait.)
        view: One of `VIEWS`; another word is taken for the first one.
        sort: One of the view's ``sorts``; another word is taken for `ORDER`.
        wanted: Only rows in which each of these words stands somewhere, in letters of any case.
    """
    one = VIEWS.get(view, VIEWS["queues"])
    sort = sort if sort in one.sorts else ORDER
    lines = list(one.lines(overview, why))
    words = wanted.casefold().split()
    total = len(lines)
    if words:
        lines = [line for line in lines if all(word in _text(line) for word in words)]
    column = next((column for column in one.columns if column.key == sort), None)
    if column is not None:
        lines.sort(key=lambda line: _sortable(line.by.get(column.key), column.falling), reverse=column.falling)
    rows = tuple(line.row for line in lines)
    columns = one.columns
    if one.headings and sort == ORDER:
        rows = tuple(_with_headings(overview, rows, words))
        at = next(number for number, column in enumerate(columns) if column.key == "resource")
        columns = columns[:at] + columns[at + 1 :]
        rows = tuple(row if row.heading else _without(row, at) for row in rows)
    return Listing(one, columns, rows, sort, len(lines), total)


def offered(overview: Overview | None, here: str) -> list[View]:
    """The views to choose from, of which ``here`` is shown."""
    return [
        view
        for view in VIEWS.values()
        if view.filled is None or view.key == here or (overview is not None and view.filled(overview))
    ]


def _without(row: Row, at: int) -> Row:
    cells = row.cells[:at] + row.cells[at + 1 :]
    return Row(row.key, cells, row.state, row.details, False, row.resource, row.position, row.task_id, row.actions)


def _text(line: _WaiterQueue) -> str:
    return " ".join((*line.row.cells, line.words)).casefold()


def _sortable(value: Any, falling: bool) -> tuple[bool, Any]:
    """What is not known comes last."""
    return ((value is None) != falling, 0 if value is None else value.casefold() if isinstance(value, str) else value)


def _by_column(columns: Iterable[Column], cells: Iterable[Any], **values: Any) -> dict[str, Any]:
    """What a row is sorted by: its cells, but for those that are numbers."""
    return {**dict(zip((column.key for column in columns), cells, strict=True)), **values}


def summary(overview: Overview) -> str:
    """All of it in a line."""
    states = [entry.state for entry in overview.entries]
    holding = sum(state in INSIDE for state in states)
    parts = [
        _several(len({entry.resource for entry in overview.entries}), "resource"),
        f"{holding} in",
        f"{states.count('waits')} waiting",
    ]
    counted = {
        "dead": states.count("dead"),
        "paused": sum(resource.paused for resource in overview.resources),
        "missing": sum(member.is_missed for member in overview.members),
        "tasks pending": sum(queue.pending for queue in overview.queues),
        "running": sum(queue.running for queue in overview.queues),
        "failed": sum(queue.failed for queue in overview.queues),
    }
    parts += [f"{number} {what}" for what, number in counted.items() if number]
    return ", ".join(parts)


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# -- queues ---------------------------------------------------------------------------------------------------------


def _access(entry: Entry) -> str:
    return access_in_words(entry.access, entry.limit, entry.weight)


def _owner(entry: Entry) -> str:
    thread = "" if entry.owner in (None, "", "MainThread") else entry.owner
    return f"{entry.program or ''} {thread or ''}".strip()


def _missing(missing_for: float | None, grace: float | None) -> str:
    if missing_for is None:
        return ""
    left = "" if grace is None else f", {seconds_in_words(max(0.0, grace - missing_for))} left"
    return f"not found for {seconds_in_words(missing_for)}{left}"


def _why(entry: Entry, told: str) -> str:
    """Of one that waits, why; of each, what is wrong with it."""
    told = "told to stop" if entry.state == "revoked" else told
    return "; ".join(filter(None, (told, _missing(entry.missing_for, entry.grace))))


def _queues(overview: Overview, why: Mapping[int, Reason]) -> Iterator[_WaiterQueue]:
    paused = {resource.resource: resource.paused for resource in overview.resources}
    rates = _by_resource(overview.rates)
    before: Counter[str] = Counter()
    for entry in overview.entries:
        windows = rates.get(entry.resource, ())
        yield _request(
            entry, why.get(entry.position), paused.get(entry.resource, False), windows, before[entry.resource]
        )
        before[entry.resource] += 1


def _by_resource(rates: Iterable[RateEntry]) -> dict[str, list[RateEntry]]:
    found: dict[str, list[RateEntry]] = {}
    for rate in rates:
        found.setdefault(rate.resource, []).append(rate)
    return found


def _request(
    entry: Entry, reason: Reason | None, paused: bool, windows: Sequence[RateEntry], before: int
) -> _WaiterQueue:
    """``windows``: of a rate, in whose line it has so many before it; nobody holds it, so the first one waits, too."""
    who = who_is(entry.host, entry.pid, entry.requesting_id)
    enters = None if reason is None or reason.enters is None else reason.enters.likely
    short, words = ("", "") if reason is None else (reason.short, reason.words)
    if windows and not paused:
        enters = goes_in(before, windows)
        short, words = short or used_words(windows), rate_words(before, windows)
    cells = (
        *(entry.resource, str(entry.position), entry.state, seconds_in_words(entry.seconds), _access(entry), who),
        *(_why(entry, short), "" if enters is None else clock(enters)),
        *(_owner(entry), entry.note or ""),
    )
    told = _why(entry, words)
    details = [
        f"{entry.position} {entry.state} {entry.resource} for {cells[3]}: {_access(entry)}, {who}"
        + "".join(f", {one}" for one in (_owner(entry),) if one),
        *([f"Why: {told}"] if told else []),
        *([f"Note: {entry.note}"] if entry.note else []),
    ]
    by = _by_column(QUEUES, cells, position=entry.position, seconds=entry.seconds, enters=enters)
    row = Row(
        *(f"p{entry.position}", _clean(cells), entry.state, _clean(details)),
        resource=entry.resource,
        position=entry.position,
        actions=("revoke", "revoke_now", *_of_resource(paused)),
    )
    return _WaiterQueue(row, by, f"{entry.requesting_id} {told}")


def _of_resource(paused: bool) -> tuple[Kind, ...]:
    return ("resume" if paused else "pause", "cap")


def _with_headings(overview: Overview, rows: Sequence[Row], words: Sequence[str]) -> Iterator[Row]:
    """The rows, each resource's below a line that says what is set for it; those without rows, where something is."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(str(row.resource), []).append(row)
    counts: dict[str, dict[str, int]] = {}
    for entry in overview.entries:
        states = counts.setdefault(entry.resource, {})
        states[entry.state] = states.get(entry.state, 0) + 1
    known = {one.resource: one for one in overview.resources}
    rates = _by_resource(overview.rates)
    for name in sorted({*grouped, *known}):
        one = known.get(name) or Resource(name, None, False, None, 0, 0)
        told = _heading(one, counts.get(name, {}), rates.get(name, ()))
        is_set = one.paused or one.cap is not None or one.stale_after is not None
        if name in grouped or (is_set and all(word in told.casefold() for word in words)):
            state = "paused" if one.paused else ""
            actions = _of_resource(one.paused)
            yield Row(f"r{name}", (told,), state, (told,), heading=True, resource=name, actions=actions)
            yield from grouped.get(name, ())


def _heading(one: Resource, states: dict[str, int], windows: Sequence[RateEntry]) -> str:
    parts = [f"{sum(states.get(state, 0) for state in INSIDE)} in, {states.get('waits', 0)} waiting"]
    if windows:
        parts = [f"{_in_line(states)} in line", used_words(windows)]
    if states.get("dead"):
        parts[0] += f", {states['dead']} dead"
    if one.paused:
        parts.append(f"PAUSED{_by(one.paused_by)}")
    if one.cap is not None:
        parts.append(f"capped at {one.cap}{one.whose_cap}")
    if one.stale_after is not None:
        parts.append(f"stale after {seconds_in_words(one.stale_after)}")
    return clean(f"{one.resource}  {'  '.join(parts)}")


def _in_line(states: Mapping[str, int]) -> int:
    """How many wait for a rate: the first of its line waits, too, though it has the turn."""
    return sum(number for state, number in states.items() if state != "dead")


def _by(login: str | None) -> str:
    return "" if login is None else f" by {login}"


def _leaders(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_WaiterQueue]:
    paused = {one.resource: one.paused for one in overview.resources}
    for leader in leaders(overview):
        entry = leader.entry
        who = who_is(entry.host, entry.pid, entry.requesting_id)
        cells = (
            *(str(entry.position), entry.resource, str(leader.waiters), seconds_in_words(leader.waiting_seconds)),
            *(seconds_in_words(entry.seconds), who, _missing(entry.missing_for, entry.grace)),
            *(_owner(entry), entry.note or ""),
        )
        by = _by_column(
            *(LEADERS, cells),
            waiters=leader.waiters,
            waiting=leader.waiting_seconds,
            seconds=entry.seconds,
            position=entry.position,
        )
        details = (
            f"{_several(leader.waiters, 'request')} waiting for {who}, together for {cells[3]}; "
            f"it {'holds' if entry.state in INSIDE else 'waits for'} {entry.resource}, at {entry.position}",
            *([f"Note: {entry.note}"] if entry.note else []),
        )
        row = Row(
            *(f"p{entry.position}", _clean(cells), entry.state, _clean(details)),
            resource=entry.resource,
            position=entry.position,
            actions=("revoke", "revoke_now", *_of_resource(paused.get(entry.resource, False))),
        )
        yield _WaiterQueue(row, by, entry.requesting_id)


# -- members, work queues, batches, times ----------------------------------------------------------------------------


def _members(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_WaiterQueue]:
    for one in overview.members:
        state = _member_state(one)
        cells = (
            *(str(one.member_id), who_is(one.host, one.pid), state, one.kind, _seconds(one.missing_for)),
            *(_seconds(one.grace_left), str(one.holding), str(one.waiting), one.program or "", one.login or ""),
        )
        times = {"missing": one.missing_for, "left": one.grace_left}
        by = _by_column(MEMBERS, cells, member=one.member_id, holding=one.holding, waiting=one.waiting, **times)
        joined = seconds_in_words(max(0.0, (overview.taken_at - one.joined_at).total_seconds()))
        grace = "" if one.grace is None else f", grace {seconds_in_words(one.grace)}"
        details = [
            f"Member {one.member_id}, {who_is(one.host, one.pid)}, for {joined}: has a {one.kind}{grace}; "
            f"holds {one.holding}, waits for {one.waiting}",
            *([_missing(one.missing_for, one.grace)] if one.missing_for is not None else []),
        ]
        yield _WaiterQueue(Row(f"m{one.member_id}", _clean(cells), state, _clean(details)), by)


def _member_state(one: MemberEntry) -> str:
    if one.missing_for is None:
        return "lives"
    return "dead" if one.grace_left is not None and one.grace_left <= 0 else "missing"


def _seconds(value: float | None) -> str:
    return "" if value is None else seconds_in_words(value)


def _tasks(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_WaiterQueue]:
    for queue in overview.queues:
        blocked = queue.blocked_by is not None
        state = "failed" if blocked else "lost" if queue.lost else "running" if queue.running else ""
        counts = (queue.pending, queue.running, queue.lost, queue.failed, queue.finished, queue.cancelled)
        held_up = f"task {queue.blocked_by} has failed" if blocked else ""
        cells = (queue.queue, *map(str, counts), _seconds(queue.oldest), f"{queue.rate:.1f}/min", held_up)
        numbers = dict(zip(("pending", "running", "lost", "failed", "finished", "cancelled"), counts, strict=True))
        by = _by_column(TASKS, cells, **numbers, oldest=queue.oldest, rate=queue.rate)
        row = Row(
            *(f"q{queue.queue}", _clean(cells), state, _clean(_queue_details(queue))),
            task_id=queue.blocked_by,
            actions=("retry",) if blocked else (),
        )
        yield _WaiterQueue(row, by)


def _queue_details(one: QueueCounts) -> Iterator[str]:
    oldest = "" if one.oldest is None else f"; the oldest has waited for {seconds_in_words(one.oldest)}"
    yield f"{one.queue}: {one.pending} pending, {one.running} running{oldest}; {one.rate:.1f} ended a minute lately"
    if one.blocked_by is not None:
        yield f"Task {one.blocked_by}, which has failed, holds up later orders; see: sqlsem tasks log {one.blocked_by}"


def _batches(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_WaiterQueue]:
    for one in overview.batches:
        done = sum(part.status == "succeeded" for part in one.parts)
        left = max(0.0, one.window - one.seconds)
        lacking = [f"{part.part} {part.status}" for part in one.parts if part.status != "succeeded"]
        state = "overdue" if one.overdue else one.status
        cells = (
            *(str(one.batch_id), one.name, state, seconds_in_words(one.seconds), seconds_in_words(left)),
            *(f"{done}/{len(one.parts)}", _lacking(one, lacking)),
        )
        by = _by_column(BATCHES, cells, batch=one.batch_id, seconds=one.seconds, left=left, parts=done)
        details = [
            f"Batch {one.batch_id} of {one.name}: {state}, {done} of {_several(len(one.parts), 'part')} succeeded"
        ]
        details += [f"{part.part}: {part.error}" for part in one.parts if part.error][:2]
        yield _WaiterQueue(Row(f"o{one.batch_id}", _clean(cells), state, _clean(details)), by)


def _lacking(one: BatchEntry, lacking: Sequence[str]) -> str:
    if lacking:
        return ", ".join(lacking)
    return "" if one.callback_status == "none" else f"callback: {one.callback_status}"


def _times(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_WaiterQueue]:
    for name, one in sorted(overview.holds.items()):
        values = [value for times in (one.held, one.waited) for value in _percentiles(times)]
        count = one.held.count
        cells = (name, str(count), *map(_seconds, values))
        by = _by_column(TIMES, (name, count, *values))
        details = (
            f"{name}, its newest {_several(count, 'hold')}: half of them lasted up to {_seconds(one.held.p50)}, "
            f"nine of ten up to {_seconds(one.held.p90)}; half waited up to {_seconds(one.waited.p50)}",
        )
        yield _WaiterQueue(Row(f"t{name}", _clean(cells), "", _clean(details), resource=name), by)


def _rates(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_WaiterQueue]:
    paused = {one.resource: one.paused for one in overview.resources}
    in_line = Counter(entry.resource for entry in overview.entries if entry.state != "dead")
    for rate in overview.rates:
        stopped, waiting = paused.get(rate.resource, False), in_line[rate.resource]
        state = "paused" if stopped else "waits" if waiting else ""
        numbers = (rate.limit, rate.used, max(0, rate.limit - rate.used))
        counted = (rate.taken, rate.returned, rate.waits)
        cells = (
            *(rate.name, seconds_in_words(rate.window), *(f"{number:,}" for number in numbers)),
            *(seconds_in_words(rate.free_in) if rate.free_in else "", str(waiting), "paused" if stopped else ""),
            *(seconds_in_words(rate.idle), *(f"{number:,}" for number in counted)),
        )
        values = (rate.name, rate.window, *numbers, rate.free_in or None, waiting, cells[7], rate.idle, *counted)
        details = (
            f"rate {rate.name!r}: {used_words([rate])}; {waiting} in line{', PAUSED' if stopped else ''}; last used "
            f"{seconds_in_words(rate.idle)} ago",
            f"Since this window is known: {rate.taken:,} taken, {rate.returned:,} of that given back, "
            f"{rate.waits:,} times waited for",
        )
        row = Row(
            *(f"w{rate.window:g} {rate.name}", _clean(cells), state, _clean(details)),
            resource=rate.resource,
            actions=("resume" if stopped else "pause",),
        )
        yield _WaiterQueue(row, _by_column(RATES, values), rate.resource)


def _percentiles(times: Percentiles) -> tuple[float, ...]:
    return times.p10, times.p50, times.p90, times.p99


def _clean(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(clean, texts))


_NAME = Column("resource", "RESOURCE", elastic=True)
_POSITION = Column("position", "POS", right=True)
_WHO = Column("who", "WHO", elastic=True)
_EXTRA = (Column("program", "PROGRAM", elastic=True, extra=True), Column("note", "NOTE", elastic=True, extra=True))


def _number(key: str, head: str, *, extra: bool = False) -> Column:
    return Column(key, head, right=True, extra=extra, falling=True)


QUEUES = (
    *(_NAME, _POSITION, Column("state", "STATE"), _number("seconds", "FOR"), Column("access", "ACCESS", elastic=True)),
    *(_WHO, Column("why", "WHY", elastic=True), Column("enters", "IN ABOUT", right=True), *_EXTRA),
)
LEADERS = (
    *(_POSITION, _NAME, _number("waiters", "WAITERS"), _number("waiting", "WAITING"), _number("seconds", "FOR"), _WHO),
    *(Column("why", "MISSING", elastic=True), *_EXTRA),
)
MEMBERS = (
    *(Column("member", "MEMBER", right=True), _WHO, Column("state", "STATE"), Column("kind", "BY")),
    *(_number("missing", "MISSING"), _number("left", "LEFT"), _number("holding", "HOLDS"), _number("waiting", "WAITS")),
    *(Column("program", "PROGRAM", elastic=True), Column("login", "LOGIN", elastic=True, extra=True)),
)
TASKS = (
    *(Column("queue", "QUEUE", elastic=True), _number("pending", "PENDING"), _number("running", "RUNNING")),
    *(_number("lost", "LOST"), _number("failed", "FAILED"), _number("finished", "DONE")),
    *(_number("cancelled", "CANCELLED", extra=True), _number("oldest", "OLDEST"), _number("rate", "RATE")),
    Column("held", "HELD UP BY", elastic=True),
)
BATCHES = (
    *(Column("batch", "BATCH", right=True), Column("name", "NAME", elastic=True), Column("state", "STATE")),
    *(_number("seconds", "FOR"), Column("left", "LEFT", right=True), Column("parts", "PARTS", right=True)),
    Column("lacking", "LACKS", elastic=True),
)
TIMES = (
    *(_NAME, _number("count", "COUNT")),
    *(_number("held10", "HELD 10%"), _number("held50", "50%"), _number("held90", "90%"), _number("held99", "99%")),
    *(
        _number("waited10", "WAITED 10%"),
        _number("waited50", "50%"),
        _number("waited90", "90%"),
        _number("waited99", "99%"),
    ),
)
RATES = (
    *(Column("rate", "RATE", elastic=True), _number("window", "WINDOW"), _number("limit", "LIMIT")),
    *(_number("used", "USED"), _number("left", "LEFT"), _number("free", "ROOM IN"), _number("waiting", "WAITING")),
    *(Column("state", "STATE"), Column("idle", "LAST", right=True)),
    *(_number("taken", "TAKEN", extra=True), _number("returned", "RETURNED", extra=True)),
    _number("waits", "WAITS", extra=True),
)

#: All of them, by key, in the order of their numbers.
VIEWS: dict[str, View] = {
    view.key: view
    for view in (
        View("queues", "Queues", QUEUES, _queues, "Nobody holds or waits.", headings=True),
        View("leaders", "Leaders", LEADERS, _leaders, "Nobody waits for anybody."),
        View("members", "Members", MEMBERS, _members, "No process takes part."),
        View("tasks", "Tasks", TASKS, _tasks, "There are no work queues."),
        View("batches", "Batches", BATCHES, _batches, "No batch is open, and none has failed."),
        View("times", "Times", TIMES, _times, "Nothing has finished yet."),
        View("rates", "Rates", RATES, _rates, "No rate has been used of late.", filled=lambda found: bool(found.rates)),
    )
}
