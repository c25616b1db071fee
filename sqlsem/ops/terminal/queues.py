"""Renders the output of ``sqlsem ls`` and ``sqlsem history``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sqlsem.insight.reasons import Reason
from sqlsem.insight.words import clock
from sqlsem.ops.terminal.tables import fit, local_time, process_name, seconds_in_words, table
from sqlsem.util.printable import clean
from sqlsem.values.locks import Entry, Operation, Past, Resource
from sqlsem.values.names import access_in_words

__all__ = ["as_dict", "by_resource", "render_history", "render_operations", "render_queues"]

#: On narrower terminals WHY replaces PROGRAM.
NARROW = 100


def by_resource(
    entries: Iterable[Entry], resources: Iterable[Resource], only: str | None
) -> list[tuple[Resource, list[Entry]]]:
    """Group entries by resource, with its settings. A resource with settings is included without entries, too."""
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.resource, []).append(entry)
    settings = {resource.resource: resource for resource in resources if only is None or resource.resource == only}
    names = sorted({*grouped, *(name for name, setting in settings.items() if _is_set(setting))})
    groups = []
    for name in names:
        own = grouped.get(name, [])
        holding = sum(entry.state in ("holds", "revoked") for entry in own)
        waiting = sum(entry.state == "waits" for entry in own)
        resource = settings.get(name) or Resource(name, None, False, None, 0, 0)
        groups.append((replace(resource, holding=holding, waiting=waiting), own))
    return groups


def _is_set(resource: Resource) -> bool:
    return resource.paused or resource.cap is not None or resource.stale_after is not None


def as_dict(resource: Resource, entries: Iterable[Entry], reasons: Mapping[int, Reason]) -> dict[str, Any]:
    """Return a queue as a dictionary for JSON."""
    reason_dicts = {position: reason.as_dict() for position, reason in reasons.items()}
    return {
        **resource.as_dict(),
        "entries": [{**entry.as_dict(), "why": reason_dicts.get(entry.position)} for entry in entries],
    }


def _owner(owner: str | None) -> str:
    """Return the thread's name, except for the main thread."""
    return "" if owner in (None, "", "MainThread") else f" {owner}"


def _why(reason: Reason | None) -> str:
    """Return a reason as short text, with the estimated time until the grant."""
    if reason is None:
        return ""
    return reason.short if reason.enters is None else f"{reason.short}, ~{clock(reason.enters.likely)}"


def _cells(entry: Entry) -> tuple[str, ...]:
    process = process_name(entry.host, entry.pid, entry.requesting_id)
    note = entry.note or ""
    if entry.missing_for is not None:
        note = f"[not found for {seconds_in_words(entry.missing_for)}] {note}".rstrip()
    return (
        str(entry.position),
        entry.state,
        seconds_in_words(entry.seconds),
        access_in_words(entry.access, entry.limit, entry.weight),
        process,
        f"{entry.program or ''}{_owner(entry.owner)}".strip(),
        note,
    )


def _without_program(row: tuple[str, ...]) -> tuple[str, ...]:
    return row[:5] + row[6:]


def render_queues(
    queues: Sequence[tuple[Resource, Sequence[Entry]]],
    width: int,
    only: str | None = None,
    reasons: Mapping[int, Reason] | None = None,
) -> RenderableType:
    """Return the output of ``sqlsem ls``, at most ``width`` columns wide. Reasons get a column; on a narrow terminal it
    replaces the program.
    """
    if not queues:
        return Text("No request holds or waits." if only is None else f"Nobody holds or waits for {only!r}.")
    heads: tuple[str, ...] = ("POS", "STATE", "FOR", "ACCESS", "WHO", "PROGRAM", "NOTE")
    rows: dict[str, list[tuple[str, ...]]] = {
        resource.resource: [_cells(entry) for entry in entries] for resource, entries in queues
    }
    if reasons:
        heads = (*heads, "WHY")
        for resource, entries in queues:
            reason_texts = (_why(reasons.get(entry.position)) for entry in entries)
            rows[resource.resource] = [
                (*row, why) for row, why in zip(rows[resource.resource], reason_texts, strict=True)
            ]
        if width < NARROW:
            heads = _without_program(heads)
            rows = {name: [_without_program(row) for row in own] for name, own in rows.items()}
    elastic = range(4, len(heads))
    widths = fit(heads, [row for own in rows.values() for row in own], width, elastic=elastic, indent=2)
    parts: list[RenderableType] = []
    for resource, entries in queues:
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(clean(resource.resource), style="bold")
        title.append(f"  {resource.holding} in, {resource.waiting} waiting")
        dead = sum(entry.state == "dead" for entry in entries)
        if dead:
            title.append(f", {dead} dead", style="bold red")
        if resource.paused:
            by = f" by {resource.paused_by}" if resource.paused_by else ""
            since = f" since {local_time(resource.paused_at)}" if resource.paused_at else ""
            title.append(clean(f"  PAUSED{by}{since}"), style="bold red")
        if resource.cap is not None:
            title.append(clean(f"  capped at {resource.cap}{resource.whose_cap}"), style="magenta")
        if resource.stale_after is not None:
            title.append(f"  stale after {seconds_in_words(resource.stale_after)}", style="dim")
        if parts:
            parts.append(Text(""))
        parts.append(title)
        if rows[resource.resource]:
            parts.append(table(heads, rows[resource.resource], widths, right=(0, 2), state=1, indent=2))
    return Group(*parts)


def _ending(row: Past) -> str:
    """Return a request's outcome, and the login that ended it (of a dead process: the login that found it dead)."""
    if row.outcome == "reaped":
        return "died" if row.ended_by is None else f"died (found by {row.ended_by})"
    return row.outcome if row.ended_by is None else f"{row.outcome} by {row.ended_by}"


def render_history(past: Sequence[Past], width: int) -> RenderableType:
    """Return the output of ``sqlsem history``, at most ``width`` columns wide."""
    if not past:
        return Text("Nothing has finished yet.")
    heads = ("POS", "RESOURCE", "ACCESS", "WAITED", "HELD", "ENDED", "OUTCOME", "WHO", "NOTE")
    rows = [
        (
            str(row.position),
            row.resource,
            access_in_words(row.access, row.limit, row.weight),
            seconds_in_words(row.waited),
            "-" if row.held is None else seconds_in_words(row.held),
            row.ended_at.astimezone().strftime("%m-%d %H:%M:%S"),
            _ending(row),
            process_name(row.host, row.pid, row.requesting_id),
            row.note or row.program or "",
        )
        for row in past
    ]
    return table(heads, rows, fit(heads, rows, width, elastic=(1, 6, 7, 8)), right=(0, 3, 4))


def _done(operation: Operation) -> str:
    """Return an operator's action, with the old value."""
    if operation.action == "revoke_members":
        return f"revoke {operation.old} ({operation.new})"
    if operation.action == "reset":
        return f"reset ({operation.old} used)"
    if operation.action in ("cap", "stale_after", "ageing", "rate_limit"):
        unit = " ms" if operation.action in ("stale_after", "ageing") else ""
        return f"{operation.action} {operation.old or 'none'} → {operation.new or 'none'}{unit}"
    if operation.action == "revoke":
        return f"revoke ({operation.old}{', at once' if operation.new == 'force' else ''})"
    if operation.action == "reap":
        return f"reap ({operation.new} rows)"
    return operation.action if operation.old is None else f"{operation.action} ({operation.old})"


def render_operations(operations: Sequence[Operation], width: int) -> RenderableType:
    """Return the output of ``sqlsem history --operations``, at most ``width`` columns wide."""
    if not operations:
        return Text("No operator has done anything yet.")
    heads = ("WHEN", "LOGIN", "WHAT", "TO", "WHERE", "PROGRAM")
    rows = [
        (
            operation.done_at.astimezone().strftime("%m-%d %H:%M:%S"),
            operation.login or "",
            _done(operation),
            " ".join(
                filter(
                    None, (operation.resource or operation.queue, str(operation.position or operation.task_id or ""))
                )
            ),
            process_name(operation.host, operation.pid),
            operation.program or "",
        )
        for operation in operations
    ]
    return table(heads, rows, fit(heads, rows, width, elastic=(1, 2, 3, 4, 5)), right=())
