"""Renders the output of ``sqlsem batch``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from sqlsem.ops.terminal.tables import Column, local_time, process_name, seconds_in_words, table
from sqlsem.ops.terminal.tasks import shortened
from sqlsem.util.printable import clean, first_line
from sqlsem.values.batches import BatchEntry, PartEntry

__all__ = ["render_batches"]


def _note(part: PartEntry) -> str:
    note = first_line(part.error)
    if part.missing_for is not None:
        note = f"[missing for {seconds_in_words(part.missing_for)}] {note}".rstrip()
    return f"the last {note}".rstrip() if part.is_last else note


PARTS: tuple[Column[PartEntry], ...] = (
    Column("PART", lambda part: part.part, elastic=True),
    Column("STATE", lambda part: part.status),
    Column("TRIES", lambda part: str(part.attempt), right=True),
    Column("FOR", lambda part: "" if part.seconds is None else seconds_in_words(part.seconds), right=True),
    Column("STARTED", lambda part: local_time(part.started_at)),
    Column("WHO", lambda part: process_name(part.host, part.pid), elastic=True),
    Column("NOTE", _note, elastic=True),
)


def render_batches(batches: Sequence[BatchEntry], width: int, only: str | None = None) -> RenderableType:
    """Return the output of ``sqlsem batch``, at most ``width`` columns wide."""
    if not batches:
        return Text("There are no batches." if only is None else f"There are no batches {only!r}.")
    parts: list[RenderableType] = []
    for batch in batches:
        if parts:
            parts.append(Text(""))
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(f"{batch.batch_id}  ")
        title.append(clean(batch.name), style="bold")
        title.append(f"  {batch.status}", style={"succeeded": "green", "open": ""}.get(batch.status, "red"))
        title.append(f"  {seconds_in_words(batch.seconds)} of {seconds_in_words(batch.window)}")
        if batch.overdue:
            title.append("  OVERDUE", style="bold red")
        by = f" by {clean(batch.opened_by)}" if batch.opened_by else ""
        title.append(f"  opened {local_time(batch.opened_at)}{by}", style="dim")
        parts.append(title)
        parts.append(table(PARTS, batch.parts, width, indent=2))
        if batch.callback_status != "none":
            parts.append(_callback_in_words(batch))
    return Group(*parts)


def _callback_in_words(batch: BatchEntry) -> Text:
    kind = {"local": "a function", "session": "a session's own code"}.get(batch.callback_kind or "") or shortened(
        batch.callback_kind or "", batch.callback_body or "", None
    )
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"  callback {clean(kind)}: ")
    text.append(
        batch.callback_status, style={"failed": "red", "finished": "green"}.get(batch.callback_status, "yellow")
    )
    if batch.callback_seconds is not None:
        text.append(
            f" {'for' if batch.callback_status == 'running' else 'after'} {seconds_in_words(batch.callback_seconds)}"
        )
    if batch.callback_error:
        text.append(f": {clean(first_line(batch.callback_error))}", style="red")
    return text
