"""Renders the output of ``sqlsem audit`` and ``sqlsem replay``."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from sqlsem.insight.audit import Audit, Finding
from sqlsem.insight.replay import Night, Replay
from sqlsem.ops.terminal.tables import fit, process_name, seconds_in_words, table
from sqlsem.util.printable import clean
from sqlsem.values.locks import Entry, Past
from sqlsem.values.names import access_in_words

__all__ = ["render_audit", "render_replay"]


def _moment(moment: datetime | None) -> str:
    """Return local time with the day."""
    return "-" if moment is None else moment.astimezone().strftime("%m-%d %H:%M:%S")


def _exact(moment: datetime | None) -> str:
    """Return local time with microseconds: a finding may be about milliseconds."""
    return "-" if moment is None else moment.astimezone().strftime("%m-%d %H:%M:%S.%f")


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _asked(row: Past | Entry) -> str:
    return access_in_words(row.access, row.limit, row.weight)


def _finding(finding: Finding, width: int) -> Iterable[RenderableType]:
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(f"{_exact(finding.at)}  {clean(finding.resource)}  position {finding.position}", style="bold red")
    yield title
    yield Text(f"  {clean(finding.words)}")
    heads = ("POS", "ASKED FOR", "ASKED", "LET IN", "ENDED", "OUTCOME", "WHO", "NOTE")
    rows = [
        (
            str(row.position),
            _asked(row),
            _exact(row.requested_at),
            _exact(row.granted_at),
            _exact(row.ended_at if isinstance(row, Past) else None),
            row.outcome if isinstance(row, Past) else row.state,
            process_name(row.host, row.pid, row.requesting_id),
            row.note or row.program or "",
        )
        for row in finding.rows
    ]
    yield table(heads, rows, fit(heads, rows, width, elastic=(1, 6, 7), indent=2), right=(0,), indent=2)
    yield Text("")


def render_audit(audit: Audit, width: int) -> RenderableType:
    """Return the output of ``sqlsem audit``, at most ``width`` columns wide."""
    parts: list[RenderableType] = []
    for finding in audit.findings:
        parts += _finding(finding, width)
    if audit.found > len(audit.findings):
        parts.append(Text(f"… and {_number(audit.found - len(audit.findings), 'finding')} more, of an earlier time"))
    parts.append(
        Text(
            f"Looked at {_number(audit.finished, 'finished request')} and {audit.present:,} that hold or wait, of "
            f"{_number(audit.resources, 'resource')}: let in {_number(audit.grants, 'time')}."
        )
    )
    if audit.first_end is not None:
        words = f"The first of them ended {_moment(audit.first_end)}; of what ended before nothing is known"
        if audit.partly:
            words += f", so what was let in before ({audit.partly:,}) could be checked in part only"
        parts.append(Text(f"{words}."))
    if audit.ok:
        parts.append(Text("No limit was passed, and nobody was overtaken.", style="bold green"))
    else:
        parts.append(Text(f"Not in order: {_number(audit.found, 'finding')}.", style="bold red"))
    return Group(*parts)


def _cells(name: str, what: str, night: Night) -> tuple[str, ...]:
    return (
        name,
        what,
        f"{night.let_in:,}",
        f"{night.gave_up:,}",
        _moment(night.end),
        seconds_in_words(night.wait_p50),
        seconds_in_words(night.wait_p99),
        seconds_in_words(night.wait_total),
        "-" if night.use is None else f"{night.use:.0%}",
    )


def render_replay(replay: Replay, width: int, first: datetime | None) -> RenderableType:
    """Return the output of ``sqlsem replay``, at most ``width`` columns wide.

    Args:
        replay: The result.
        width: In characters.
        first: When the first replayed request ended, if earlier ones were left out; else None.
    """
    if not replay.resources:
        return Text("Nobody has asked for anything in that time.")
    heads = ("RESOURCE", "", "LET IN", "GAVE UP", "LAST LEFT", "WAIT P50", "P99", "TOTAL", "USE")
    nights = dict(replay.resources)
    rows = [
        cells
        for name, night in nights.items()
        for cells in (_cells(name, "was", night.was), _cells("", "would be", night.would))
    ]
    if len(nights) > 1:
        rows += [_cells("(all)", "was", replay.everything.was), _cells("", "would be", replay.everything.would)]
    parts: list[RenderableType] = [
        table(heads, rows, fit(heads, rows, width, elastic=(0,)), right=(2, 3, 5, 6, 7, 8)),
    ]
    notes = [
        (replay.unfinished, "still hold or wait: taken to have ended now"),
        (replay.guessed, "had given up and would have got in: taken to hold as long as is usual there"),
        (replay.refused, "upgrades would have been refused, as another reader upgrades"),
        (replay.stuck, "would wait for each other for ever: sqlsem would tell the youngest of them, Deadlock"),
    ]
    parts += [Text(f"{count:,} {words}.") for count, words in notes if count]
    if first is not None:
        parts.append(Text(f"More has ended before {_moment(first)}, and is left out (--max)."))
    return Group(*parts)
