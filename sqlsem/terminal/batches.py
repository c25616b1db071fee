"""What ``sqlsem batches`` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from sqlsem.model import BatchEntry
from sqlsem.printable import clean, first_line
from sqlsem.terminal.tables import fit, local_time, process_name, seconds_in_words, table
from sqlsem.terminal.tasks import shortened

__all__ = ["render_batches"]


def render_batches(found: Sequence[BatchEntry], width: int, only: str | None = None) -> RenderableType:
    """What ``sqlsem batches`` shows, at most ``width`` columns wide."""
    if not found:
        return Text("There are no batches." if only is None else f"There are no batches {only!r}.")
    parts: list[RenderableType] = []
    for one in found:
        if parts:
            parts.append(Text(""))
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(f"{one.batch_id}  ")
        title.append(clean(one.name), style="bold")
        title.append(f"  {one.status}", style={"succeeded": "green", "open": ""}.get(one.status, "red"))
        title.append(f"  {seconds_in_words(one.seconds)} of {seconds_in_words(one.window)}")
        if one.overdue:
            title.append("  OVERDUE", style="bold red")
        by = f" by {clean(one.opened_by)}" if one.opened_by else ""
        title.append(f"  opened {local_time(one.opened_at)}{by}", style="dim")
        parts.append(title)
        heads = ("PART", "STATE", "TRIES", "FOR", "STARTED", "WHO", "NOTE")
        rows = []
        for part in one.parts:
            note = first_line(part.error)
            if part.missing_for is not None:
                note = f"[not found for {seconds_in_words(part.missing_for)}] {note}".rstrip()
            if part.is_last:
                note = f"the last {note}".rstrip()
            lasted = "" if part.seconds is None else seconds_in_words(part.seconds)
            cells = (part.part, part.status, str(part.attempt), lasted, local_time(part.started_at))
            rows.append((*cells, process_name(part.host, part.pid), note))
        widths = fit(heads, rows, width, elastic=(0, 5, 6), indent=2)
        parts.append(table(heads, rows, widths, right=(2, 3), state=1, indent=2))
        if one.callback_status != "none":
            parts.append(_callback_in_words(one))
    return Group(*parts)


def _callback_in_words(one: BatchEntry) -> Text:
    what = {"local": "a function", "session": "a session's own code"}.get(one.callback_kind or "") or shortened(
        one.callback_kind or "", one.callback_body or "", None
    )
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"  callback {clean(what)}: ")
    text.append(one.callback_status, style={"failed": "red", "finished": "green"}.get(one.callback_status, "yellow"))
    if one.callback_seconds is not None:
        text.append(
            f" {'for' if one.callback_status == 'running' else 'after'} {seconds_in_words(one.callback_seconds)}"
        )
    if one.callback_error:
        text.append(f": {clean(first_line(one.callback_error))}", style="red")
    return text
