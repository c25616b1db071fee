"""Lay out the tables of `sqlsem top` and `sqlsem dashboard` as text: rows, columns, sorting, filtering. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlsem.insight.chains import root_blockers
from sqlsem.insight.columns import BATCHES, BLOCKERS, MEMBERS, QUEUES, RATES, TASKS, TIMES, Column
from sqlsem.insight.consequences import INSIDE, Kind
from sqlsem.insight.overview import MemberEntry, Overview
from sqlsem.insight.rates import rate_words, seconds_until_granted, used_words
from sqlsem.insight.reasons import Reason
from sqlsem.insight.words import (
    access_of,
    by_login,
    clock,
    counted,
    process_name,
    program_of,
    requester,
    seconds_in_words,
)
from sqlsem.util.printable import clean
from sqlsem.util.record import record
from sqlsem.values.batches import BatchEntry
from sqlsem.values.locks import Entry, Resource
from sqlsem.values.rates import RateEntry
from sqlsem.values.tasks import QueueCounts

__all__ = ["ORDER", "VIEWS", "Column", "Listing", "Row", "View", "listing", "offered_views", "summary"]

#: The order of a view that is not sorted by a column. For requests it is the order of their queues.
ORDER = "order"


@record
class Row:
    """A row. Its texts have no control characters, so they can be printed anywhere.

    Attributes:
        key: Identifies the row from one refresh to the next.
        cells: A text for each column. A heading has one, across all columns.
        state: Chooses the colour; also the text of one of the cells.
        details: Everything that is known about the row, in sentences.
        heading: True for a heading: the line of a resource above its queue.
        resource: The resource of the row, which its actions apply to.
        position: The position of the request.
        task_id: The failed task that blocks its queue.
        actions: The actions that an operator can take on it.
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


@record
class Listing:
    """A view with its rows: ``shown`` of ``total`` (without headings), sorted by ``sort``."""

    view: View
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    sort: str
    shown: int
    total: int


@record
class _SortableRow:
    """A row with its sort keys, by column, and with words that a filter finds beside those of its cells."""

    row: Row
    sort_keys: dict[str, Any]
    words: str = ""


@record
class View:
    """One of the tables: its title, its columns, and the text for an empty table."""

    key: str
    title: str
    columns: tuple[Column, ...]
    make_rows: Callable[[Overview, Mapping[int, Reason]], Iterable[_SortableRow]]
    empty_text: str
    headings: bool = False  # True: if sorted by ORDER, each resource's rows are below a heading
    filled: Callable[[Overview], bool] | None = None  # returns False if the view is empty, and not to be offered

    @property
    def sorts(self) -> tuple[str, ...]:
        """The names that it can be sorted by."""
        return (ORDER, *(column.key for column in self.columns))


def listing(
    overview: Overview, why: Mapping[int, Reason], view: str = "queues", sort: str = ORDER, filter_text: str = ""
) -> Listing:
    """Lay out one view of an overview.

    Args:
        overview: The overview to show.
        why: The `reasons` of the same overview. (The caller computes them once: a second if thousands wait.)
        view: One of `VIEWS`; any other word means the first view.
        sort: One of the view's ``sorts``; any other word means `ORDER`.
        filter_text: Show only rows that contain each of these words, in letters of any case.
    """
    shown_view = VIEWS.get(view, VIEWS["queues"])
    sort = sort if sort in shown_view.sorts else ORDER
    sortable = list(shown_view.make_rows(overview, why))
    words = filter_text.casefold().split()
    total = len(sortable)
    if words:
        sortable = [line for line in sortable if all(word in _text(line) for word in words)]
    column = next((column for column in shown_view.columns if column.key == sort), None)
    if column is not None:
        sortable.sort(
            key=lambda line: _sortable(line.sort_keys.get(column.key), column.falling), reverse=column.falling
        )
    rows = tuple(line.row for line in sortable)
    columns = shown_view.columns
    if shown_view.headings and sort == ORDER:
        rows = tuple(_with_headings(overview, rows, words))
        columns = columns[1:]  # without the resource
        rows = tuple(row if row.heading else replace(row, cells=row.cells[1:]) for row in rows)
    return Listing(shown_view, columns, rows, sort, len(sortable), total)


def offered_views(overview: Overview | None, here: str) -> list[View]:
    """Return the views that the user can choose; ``here`` is the view on the screen."""
    return [
        view
        for view in VIEWS.values()
        if view.filled is None or view.key == here or (overview is not None and view.filled(overview))
    ]


def _text(line: _SortableRow) -> str:
    return " ".join((*line.row.cells, line.words)).casefold()


def _sortable(value: Any, falling: bool) -> tuple[bool, Any]:
    """Return a sort key; unknown values come last."""
    return ((value is None) != falling, 0 if value is None else value.casefold() if isinstance(value, str) else value)


def _by_column(columns: Iterable[Column], cells: Iterable[Any], **values: Any) -> dict[str, Any]:
    """Return the sort keys of a row by column: its cells, or ``values`` in their place (numbers, not their texts)."""
    return {**dict(zip((column.key for column in columns), cells, strict=True)), **values}


def summary(overview: Overview) -> str:
    """Return the totals of an overview in one line."""
    states = [entry.state for entry in overview.entries]
    holding = sum(state in INSIDE for state in states)
    parts = [
        counted(len({entry.resource for entry in overview.entries}), "resource"),
        f"{holding} holding",
        f"{states.count('waits')} waiting",
    ]
    counts = {
        "dead": states.count("dead"),
        "paused": sum(resource.paused for resource in overview.resources),
        "missing": sum(member.is_missed for member in overview.members),
        "tasks pending": sum(queue.pending for queue in overview.queues),
        "running": sum(queue.running for queue in overview.queues),
        "failed": sum(queue.failed for queue in overview.queues),
    }
    parts += [f"{number} {label}" for label, number in counts.items() if number]
    return ", ".join(parts)


# -- queues ---------------------------------------------------------------------------------------------------------


def _missing(missing_for: float | None, grace: float | None) -> str:
    if missing_for is None:
        return ""
    left = "" if grace is None else f", removed in {seconds_in_words(max(0.0, grace - missing_for))}"
    return f"process missing for {seconds_in_words(missing_for)}{left}"


#: The problem of a row in this state.
WRONG = {"revoked": "asked to stop", "dead": "process gone; the next waiter removes it"}


def _why(entry: Entry, reason: str) -> str:
    """Return why a waiter waits, and what is wrong with the row."""
    reason = WRONG.get(entry.state, reason)
    return "; ".join(filter(None, (reason, _missing(entry.missing_for, entry.grace))))


def _queues(overview: Overview, why: Mapping[int, Reason]) -> Iterator[_SortableRow]:
    paused = _paused(overview)
    rates = _by_resource(overview.rates)
    before: Counter[str] = Counter()
    for entry in overview.entries:
        windows = rates.get(entry.resource, ())
        yield _request(entry, why.get(entry.position), entry.resource in paused, windows, before[entry.resource])
        before[entry.resource] += 1


def _paused(overview: Overview) -> set[str]:
    return {resource.resource for resource in overview.resources if resource.paused}


def _by_resource(rates: Iterable[RateEntry]) -> dict[str, list[RateEntry]]:
    by_resource: dict[str, list[RateEntry]] = {}
    for rate in rates:
        by_resource.setdefault(rate.resource, []).append(rate)
    return by_resource


def _request(
    entry: Entry, reason: Reason | None, paused: bool, windows: Sequence[RateEntry], before: int
) -> _SortableRow:
    """Lay out one request. For a request of a rate: ``windows`` of that rate, and the number of requests ``before`` it.
    (A rate has no holders, so its first request waits, too.)
    """
    process = requester(entry)
    enters = None if reason is None or reason.enters is None else reason.enters.likely
    short, words = ("", "") if reason is None else (reason.short, reason.words)
    if windows and not paused:
        enters = seconds_until_granted(before, windows)
        short, words = short or used_words(windows), rate_words(before, windows)
    cells = (
        *(entry.resource, str(entry.position), entry.state, seconds_in_words(entry.seconds), access_of(entry), process),
        *(_why(entry, short), "" if enters is None else clock(enters)),
        *(program_of(entry), entry.note or ""),
    )
    why = _why(entry, words)
    details = [
        f"{entry.position} {entry.state} {entry.resource} for {cells[3]}: {access_of(entry)}, {process}"
        + (f", {cells[8]}" if cells[8] else ""),
        *([f"Why: {why}"] if why else []),
    ]
    by = _by_column(QUEUES, cells, position=entry.position, seconds=entry.seconds, enters=enters)
    return _SortableRow(_row(entry, cells, details, paused), by, f"{entry.requesting_id} {why}")


def _row(entry: Entry, cells: Iterable[str], details: Iterable[str], paused: bool) -> Row:
    note = (f"Note: {entry.note}",) if entry.note else ()
    return Row(
        *(f"p{entry.position}", _clean(cells), entry.state, _clean((*details, *note))),
        resource=entry.resource,
        position=entry.position,
        actions=("revoke", "revoke_now", *_of_resource(paused)),
    )


def _of_resource(paused: bool) -> tuple[Kind, ...]:
    return ("resume" if paused else "pause", "cap")


def _with_headings(overview: Overview, rows: Sequence[Row], words: Sequence[str]) -> Iterator[Row]:
    """Yield a heading for each resource, and its rows below it. A resource without rows has a heading if it has
    settings.
    """
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(str(row.resource), []).append(row)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for entry in overview.entries:
        counts[entry.resource][entry.state] += 1
    known = {listed.resource: listed for listed in overview.resources}
    rates = _by_resource(overview.rates)
    for name in sorted({*grouped, *known}):
        resource = known.get(name) or Resource(name, None, False, None, 0, 0)
        heading = _heading(resource, counts[name], rates.get(name, ()))
        is_set = resource.paused or resource.cap is not None or resource.stale_after is not None
        if name in grouped or (is_set and all(word in heading.casefold() for word in words)):
            state = "paused" if resource.paused else ""
            actions = _of_resource(resource.paused)
            yield Row(f"r{name}", (heading,), state, (heading,), heading=True, resource=name, actions=actions)
            yield from grouped.get(name, ())


def _heading(resource: Resource, states: Counter[str], windows: Sequence[RateEntry]) -> str:
    parts = [f"{sum(states[state] for state in INSIDE)} holding, {states['waits']} waiting"]
    if windows:  # (the first of a rate's queue holds, and waits all the same)
        parts = [f"{sum(states.values()) - states['dead']} waiting", used_words(windows)]
    if states["dead"]:
        parts[0] += f", {states['dead']} dead"
    if resource.paused:
        parts.append(f"PAUSED{by_login(resource.paused_by)}")
    if resource.cap is not None:
        parts.append(f"limit set to {resource.cap}{resource.whose_cap}")
    if resource.stale_after is not None:
        parts.append(f"stale after {seconds_in_words(resource.stale_after)}")
    return clean(f"{resource.resource}  {'  '.join(parts)}")


def _blockers(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_SortableRow]:
    paused = _paused(overview)
    for blocker in root_blockers(overview):
        entry = blocker.entry
        process = requester(entry)
        cells = (
            *(str(entry.position), entry.resource, str(blocker.waiters), seconds_in_words(blocker.waiting_seconds)),
            *(seconds_in_words(entry.seconds), process, _missing(entry.missing_for, entry.grace)),
            *(program_of(entry), entry.note or ""),
        )
        by = _by_column(
            *(BLOCKERS, cells),
            waiters=blocker.waiters,
            waiting=blocker.waiting_seconds,
            seconds=entry.seconds,
            position=entry.position,
        )
        details = (
            f"{counted(blocker.waiters, 'request')} waiting for {process}, together for {cells[3]}; "
            f"it {'holds' if entry.state in INSIDE else 'waits for'} {entry.resource}, at {entry.position}",
        )
        yield _SortableRow(_row(entry, cells, details, entry.resource in paused), by, entry.requesting_id)


# -- members, work queues, batches, times ----------------------------------------------------------------------------


def _members(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_SortableRow]:
    for member in overview.members:
        state = _member_state(member)
        process = process_name(member.host, member.pid)
        cells = (
            *(str(member.member_id), process, state, member.kind, _seconds(member.missing_for)),
            *(_seconds(member.grace_left), str(member.holding), str(member.waiting)),
            *(member.program or "", member.login or ""),
        )
        numbers = {"member": member.member_id, "holding": member.holding, "waiting": member.waiting}
        by = _by_column(MEMBERS, cells, missing=member.missing_for, left=member.grace_left, **numbers)
        joined = seconds_in_words(max(0.0, (overview.taken_at - member.joined_at).total_seconds()))
        grace = "" if member.grace is None else f", grace {seconds_in_words(member.grace)}"
        details = [
            f"Member {member.member_id}, {process}, for {joined}: has a {member.kind}{grace}; "
            f"holds {member.holding}, waits for {member.waiting}",
            *([_missing(member.missing_for, member.grace)] if member.missing_for is not None else []),
        ]
        yield _SortableRow(Row(f"m{member.member_id}", _clean(cells), state, _clean(details)), by)


def _member_state(member: MemberEntry) -> str:
    if member.missing_for is None:
        return "lives"
    return "dead" if member.grace_left is not None and member.grace_left <= 0 else "missing"


def _seconds(value: float | None) -> str:
    return "" if value is None else seconds_in_words(value)


def _tasks(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_SortableRow]:
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
        yield _SortableRow(row, by)


def _queue_details(queue: QueueCounts) -> Iterator[str]:
    oldest = "" if queue.oldest is None else f"; the oldest has waited for {seconds_in_words(queue.oldest)}"
    counts = f"{queue.pending} pending, {queue.running} running"
    yield f"{queue.queue}: {counts}{oldest}; {queue.rate:.1f} ended a minute lately"
    if queue.blocked_by is not None:
        task = queue.blocked_by
        yield f"Task {task}, which has failed, blocks later orders; see: sqlsem tasks log {task}"


def _batches(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_SortableRow]:
    for batch in overview.batches:
        done = sum(part.status == "succeeded" for part in batch.parts)
        left = max(0.0, batch.window - batch.seconds)
        lacking = [f"{part.part} {part.status}" for part in batch.parts if part.status != "succeeded"]
        state = "overdue" if batch.overdue else batch.status
        cells = (
            *(str(batch.batch_id), batch.name, state, seconds_in_words(batch.seconds), seconds_in_words(left)),
            *(f"{done}/{len(batch.parts)}", _lacking(batch, lacking)),
        )
        by = _by_column(BATCHES, cells, batch=batch.batch_id, seconds=batch.seconds, left=left, parts=done)
        details = [
            f"Batch {batch.batch_id} of {batch.name}: {state}, {done} of {counted(len(batch.parts), 'part')} succeeded"
        ]
        details += [f"{part.part}: {part.error}" for part in batch.parts if part.error][:2]
        yield _SortableRow(Row(f"o{batch.batch_id}", _clean(cells), state, _clean(details)), by)


def _lacking(batch: BatchEntry, lacking: Sequence[str]) -> str:
    if lacking:
        return ", ".join(lacking)
    return "" if batch.callback_status == "none" else f"callback: {batch.callback_status}"


def _times(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_SortableRow]:
    for name, times in sorted(overview.holds.items()):
        values = [at for of in (times.held, times.waited) for at in (of.p10, of.p50, of.p90, of.p99)]
        count = times.held.count
        cells = (name, str(count), *map(_seconds, values))
        by = _by_column(TIMES, (name, count, *values))
        details = (
            f"{name}, its newest {counted(count, 'hold')}: half of them lasted up to {_seconds(times.held.p50)}, "
            f"nine of ten up to {_seconds(times.held.p90)}; half waited up to {_seconds(times.waited.p50)}",
        )
        yield _SortableRow(Row(f"t{name}", _clean(cells), "", _clean(details), resource=name), by)


def _rates(overview: Overview, _: Mapping[int, Reason]) -> Iterator[_SortableRow]:
    paused = _paused(overview)
    in_line = Counter(entry.resource for entry in overview.entries if entry.state != "dead")
    for rate in overview.rates:
        is_paused, waiting = rate.resource in paused, in_line[rate.resource]
        state = "paused" if is_paused else "waits" if waiting else ""
        numbers = (rate.limit, rate.used, max(0, rate.limit - rate.used))
        totals = (rate.taken, rate.returned, rate.waits)
        cells = (
            *(rate.name, seconds_in_words(rate.window), *(f"{number:,}" for number in numbers)),
            *(seconds_in_words(rate.free_in) if rate.free_in else "", str(waiting), "paused" if is_paused else ""),
            *(seconds_in_words(rate.idle), *(f"{number:,}" for number in totals)),
        )
        values = (rate.name, rate.window, *numbers, rate.free_in or None, waiting, cells[7], rate.idle, *totals)
        details = (
            f"rate {rate.name!r}: {used_words([rate])}; {waiting} waiting{', PAUSED' if is_paused else ''}; last used "
            f"{seconds_in_words(rate.idle)} ago",
            f"Since this window is known: {rate.taken:,} taken, {rate.returned:,} of that given back, "
            f"{rate.waits:,} times waited for",
        )
        row = Row(
            *(f"w{rate.window:g} {rate.name}", _clean(cells), state, _clean(details)),
            resource=rate.resource,
            actions=("resume" if is_paused else "pause",),
        )
        yield _SortableRow(row, _by_column(RATES, values), rate.resource)


def _clean(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(clean, texts))


#: All views, by key, in the order of their numbers.
VIEWS: dict[str, View] = {
    view.key: view
    for view in (
        View("queues", "Queues", QUEUES, _queues, "No request holds or waits.", headings=True),
        View("blockers", "Blockers", BLOCKERS, _blockers, "No request waits for another."),
        View("members", "Members", MEMBERS, _members, "No process takes part."),
        View("tasks", "Tasks", TASKS, _tasks, "There are no work queues."),
        View("batches", "Batches", BATCHES, _batches, "No batch is open, and none has failed."),
        View("times", "Times", TIMES, _times, "Nothing has finished yet."),
        View(
            "rates",
            "Rates",
            RATES,
            _rates,
            "No rate has been used of late.",
            filled=lambda overview: bool(overview.rates),
        ),
    )
}
