"""Renders the output of ``sqlsem audit`` and ``sqlsem replay``."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from sqlsem.insight.audit import Audit, Finding
from sqlsem.insight.replay import Night, Replay
from sqlsem.insight.words import access_of, counted, requester, seconds_in_words
from sqlsem.ops.terminal.tables import Column, moment, table
from sqlsem.util.printable import clean
from sqlsem.values.locks import Entry, Past

__all__ = ["render_audit", "render_replay"]


def _exact(at: datetime | None) -> str:
    """Return local time with microseconds: a finding may be about milliseconds."""
    return moment(at, "%m-%d %H:%M:%S.%f")


ROWS: tuple[Column[Past | Entry], ...] = (
    Column("POS", lambda row: str(row.position), right=True),
    Column("ACCESS", access_of, elastic=True),
    Column("REQUESTED", lambda row: _exact(row.requested_at)),
    Column("GRANTED", lambda row: _exact(row.granted_at)),
    Column("ENDED", lambda row: _exact(row.ended_at if isinstance(row, Past) else None)),
    Column("OUTCOME", lambda row: row.outcome if isinstance(row, Past) else row.state),
    Column("WHO", requester, elastic=True),
    Column("NOTE", lambda row: row.note or row.program or "", elastic=True),
)


def _finding(finding: Finding, width: int) -> Iterable[RenderableType]:
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(f"{_exact(finding.at)}  {clean(finding.resource)}  position {finding.position}", style="bold red")
    yield title
    yield Text(f"  {clean(finding.words)}")
    yield table(ROWS, finding.rows, width, indent=2)
    yield Text("")


def render_audit(audit: Audit, width: int) -> RenderableType:
    """Return the output of ``sqlsem audit``, at most ``width`` columns wide."""
    parts: list[RenderableType] = []
    for finding in audit.findings:
        parts += _finding(finding, width)
    if audit.found > len(audit.findings):
        parts.append(
            Text(f"… and {counted(audit.found - len(audit.findings), 'finding', ',')} more, of an earlier time")
        )
    parts.append(
        Text(
            f"Checked {counted(audit.finished, 'finished request', ',')} and {audit.present:,} that hold or wait, of "
            f"{counted(audit.resources, 'resource', ',')}: granted {counted(audit.grants, 'time', ',')}."
        )
    )
    if audit.first_end is not None:
        words = f"The first of them ended {moment(audit.first_end)}; earlier rows are not known"
        if audit.partly:
            words += f", so {counted(audit.partly, 'earlier grant', ',')} could be checked in part only"
        parts.append(Text(f"{words}."))
    if audit.ok:
        parts.append(Text("No limit was exceeded, and no request was overtaken.", style="bold green"))
    else:
        parts.append(Text(f"Not in order: {counted(audit.found, 'finding', ',')}.", style="bold red"))
    return Group(*parts)


#: The rows of a replay: the resource, "was" or "would be", and how it was then.
NIGHTS: tuple[Column[tuple[str, str, Night]], ...] = (
    Column("RESOURCE", lambda row: row[0], elastic=True),
    Column("", lambda row: row[1]),
    Column("GRANTED", lambda row: f"{row[2].granted:,}", right=True),
    Column("NOT GRANTED", lambda row: f"{row[2].not_granted:,}", right=True),
    Column("LAST END", lambda row: moment(row[2].end)),
    Column("WAIT P50", lambda row: seconds_in_words(row[2].wait_p50), right=True),
    Column("P99", lambda row: seconds_in_words(row[2].wait_p99), right=True),
    Column("TOTAL", lambda row: seconds_in_words(row[2].wait_total), right=True),
    Column("USE", lambda row: "-" if row[2].use is None else f"{row[2].use:.0%}", right=True),
)


def render_replay(replay: Replay, width: int, first: datetime | None) -> RenderableType:
    """Return the output of ``sqlsem replay``, at most ``width`` columns wide. ``first``: when the first request of the
    replay ended, if earlier ones were left out; else None.
    """
    if not replay.resources:
        return Text("There was no request in that time.")
    nights = dict(replay.resources)
    if len(nights) > 1:
        nights["(all)"] = replay.everything
    rows = [row for name, night in nights.items() for row in ((name, "was", night.was), ("", "would be", night.would))]
    parts: list[RenderableType] = [table(NIGHTS, rows, width)]
    notes = [
        (replay.unfinished, "still hold or wait: assumed to end now"),
        (replay.guessed, "were not granted, and would have been: assumed to hold as long as is usual there"),
        (replay.refused, "upgrades would have been refused, as another reader upgrades"),
        (replay.stuck, "would wait for each other for ever: the youngest of them would get Deadlock"),
    ]
    parts += [Text(f"{count:,} {words}.") for count, words in notes if count]
    if first is not None:
        parts.append(Text(f"Requests that ended before {moment(first)} are left out (--max)."))
    return Group(*parts)
