"""Renders the output of ``sqlsem ls`` and ``sqlsem history``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sqlsem.insight.reasons import Reason
from sqlsem.insight.words import access_of, by_login, clock, program_of, requester
from sqlsem.ops.terminal.tables import Column, local_time, moment, process_name, seconds_in_words, table, tables
from sqlsem.util.printable import clean
from sqlsem.values.locks import Entry, Operation, Past, Resource

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


def _why(reason: Reason | None) -> str:
    """Return a reason as short text, with the estimated time until the grant."""
    if reason is None:
        return ""
    return reason.short if reason.enters is None else f"{reason.short}, ~{clock(reason.enters.likely)}"


def _note(entry: Entry) -> str:
    note = entry.note or ""
    if entry.missing_for is not None:
        note = f"[missing for {seconds_in_words(entry.missing_for)}] {note}".rstrip()
    return note


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
    columns: tuple[Column[Entry], ...] = (
        Column("POS", lambda entry: str(entry.position), right=True),
        Column("STATE", lambda entry: entry.state),
        Column("FOR", lambda entry: seconds_in_words(entry.seconds), right=True),
        Column("ACCESS", access_of),
        Column("WHO", requester, elastic=True),
        Column("PROGRAM", program_of, elastic=True, shown=not reasons or width >= NARROW),
        Column("NOTE", _note, elastic=True),
        Column("WHY", lambda entry: _why((reasons or {}).get(entry.position)), elastic=True, shown=bool(reasons)),
    )
    parts: list[RenderableType] = []
    drawn = tables(columns, [entries for _, entries in queues], width, indent=2)
    for (resource, entries), rows in zip(queues, drawn, strict=True):
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(clean(resource.resource), style="bold")
        title.append(f"  {resource.holding} holding, {resource.waiting} waiting")
        dead = sum(entry.state == "dead" for entry in entries)
        if dead:
            title.append(f", {dead} dead", style="bold red")
        if resource.paused:
            by = by_login(resource.paused_by)
            since = f" since {local_time(resource.paused_at)}" if resource.paused_at else ""
            title.append(clean(f"  PAUSED{by}{since}"), style="bold red")
        if resource.cap is not None:
            title.append(clean(f"  limit set to {resource.cap}{resource.whose_cap}"), style="magenta")
        if resource.stale_after is not None:
            title.append(f"  stale after {seconds_in_words(resource.stale_after)}", style="dim")
        if parts:
            parts.append(Text(""))
        parts.append(title)
        if entries:
            parts.append(rows)
    return Group(*parts)


def _ending(row: Past) -> str:
    """Return a request's outcome, and the login that ended it (of a dead process: the login that found it dead)."""
    if row.outcome == "reaped":
        return "died" if row.ended_by is None else f"died (found by {row.ended_by})"
    return row.outcome if row.ended_by is None else f"{row.outcome} by {row.ended_by}"


def render_history(past: Sequence[Past], width: int) -> RenderableType:
    """Return the output of ``sqlsem history``, at most ``width`` columns wide."""
    return table(PAST, past, width, empty="Nothing has finished yet.")


PAST: tuple[Column[Past], ...] = (
    Column("POS", lambda row: str(row.position), right=True),
    Column("RESOURCE", lambda row: row.resource, elastic=True),
    Column("ACCESS", access_of),
    Column("WAITED", lambda row: seconds_in_words(row.waited), right=True),
    Column("HELD", lambda row: "-" if row.held is None else seconds_in_words(row.held), right=True),
    Column("ENDED", lambda row: moment(row.ended_at)),
    Column("OUTCOME", _ending, elastic=True),
    Column("WHO", requester, elastic=True),
    Column("NOTE", lambda row: row.note or row.program or "", elastic=True),
)


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
    return table(DONE, operations, width, empty="No operator has done anything yet.")


def _object(operation: Operation) -> str:
    """Return the resource or queue that an operator has changed, with the position or the task."""
    name, number = operation.resource or operation.queue, operation.position or operation.task_id
    return " ".join(filter(None, (name, str(number or ""))))


DONE: tuple[Column[Operation], ...] = (
    Column("WHEN", lambda operation: moment(operation.done_at)),
    Column("LOGIN", lambda operation: operation.login or "", elastic=True),
    Column("WHAT", _done, elastic=True),
    Column("TO", _object, elastic=True),
    Column("WHERE", lambda operation: process_name(operation.host, operation.pid), elastic=True),
    Column("PROGRAM", lambda operation: operation.program or "", elastic=True),
)
