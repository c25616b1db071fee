"""The commands that analyse the history: ``sqlsem timeline``, ``replay`` and ``audit``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

import sqlsem
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.options import age, json_option, most_option, resource_name
from sqlsem.insight.audit import Ruling, rulings
from sqlsem.insight.audit import audit as check
from sqlsem.insight.patterns import is_pattern
from sqlsem.insight.replay import ORDERS, ReplaySettings
from sqlsem.insight.replay import replay as run_again
from sqlsem.insight.timeline import timeline as lay_out
from sqlsem.insight.words import counted
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.nights import render_audit, render_replay
from sqlsem.ops.terminal.timeline import FORMATS, library, picture
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import MAX_INT, Entry, Operation, Past, monotonic

F = TypeVar("F", bound=Callable[..., Any])
#: How many rows are read at a time.
PAGE_ROWS = 5000
#: Pages overlap by this many seconds, as the difference of the two clocks may change between two pages.
OVERLAP_SECONDS, LONGEST_OVERLAP_SECONDS = 2.0, 3600.0
#: The greatest age of rows to read; more may exceed the calendar.
LONGEST_NIGHT_SECONDS = 50 * 365 * 86400
#: How many operations are read; the newest ones.
MAX_OPERATIONS = 100_000
#: How many findings are shown.
MAX_FINDINGS = 20
#: How many requests are replayed by default.
MAX_REQUESTS = 100_000
#: How many requests and resources are drawn by default.
MAX_DRAWN, MAX_PANELS = 10_000, 40


def since_option(default: str) -> Callable[[F], F]:
    """The option for the age of the oldest rows to read."""
    return click.option(
        "--since",
        type=age,
        default=default,
        metavar="TIME",
        help="Include requests that ended since then (24h, 30d, 02:00, 2026-01-31), and the present ones.",
    )


class Night:
    """The present requests, and the history before them, read page by page, the newest end first."""

    def __init__(self, coordinator: sqlsem.Coordinator, resource: str | None, since: float) -> None:
        overview = coordinator.admin.overview()
        self._begun = monotonic()
        self._coordinator = coordinator
        self._resource = resource
        self._since = since
        self._resources = overview.resources
        self.taken_at: datetime = overview.taken_at
        self.rows_read = 0
        self.entries: list[Entry] = [entry for entry in overview.entries if resource in (None, entry.resource)]

    def rulings(self) -> list[Ruling]:
        """Return the caps and pauses that operators have set, over time, as far as they are known."""
        operations = self._coordinator.admin.operations(maximum=MAX_OPERATIONS, since=self._since)
        return rulings((operation for operation in operations if self._concerns(operation)), self._resources)

    def _concerns(self, operation: Operation) -> bool:
        return self._resource is None or operation.resource == self._resource or is_pattern(operation.resource or "")

    @property
    def caps(self) -> dict[str, int]:
        """The limits that operators have set, as they are now."""
        return {resource.resource: resource.cap for resource in self._resources if resource.cap is not None}

    def progress(self) -> str:
        """Return what has been read so far, as text."""
        return f"read {counted(self.rows_read, 'finished request')}"

    def past(self) -> Iterator[Past]:
        """Iterate over all finished requests. A request that ends meanwhile may be left out."""
        maximum, overlap = PAGE_ROWS, OVERLAP_SECONDS
        last: datetime | None = None
        # The keys of the rows that ended at the same time as the last one.
        seen: set[tuple[str, int, datetime | None]] = set()
        while True:
            until = None
            if last is not None:
                age = (self.taken_at - last).total_seconds() + monotonic() - self._begun
                until = max(0.0, age - overlap)
            page = self._coordinator.admin.history(self._resource, maximum=maximum, since=self._since, until=until)
            if last is not None and overlap < LONGEST_OVERLAP_SECONDS and not any(_key(row) in seen for row in page):
                if len(page) == maximum and page[-1].ended_at > last:
                    maximum *= 2
                else:  # the server's clock was changed, or the rows have been pruned
                    overlap *= 4
                continue
            fresh = [
                row
                for row in page
                if last is None or row.ended_at < last or (row.ended_at == last and _key(row) not in seen)
            ]
            self.rows_read += len(fresh)
            yield from fresh
            if len(page) < maximum:
                return
            if not fresh:
                maximum *= 2
                continue
            overlap = OVERLAP_SECONDS
            if fresh[-1].ended_at != last:
                last, seen = fresh[-1].ended_at, set()
            seen |= {_key(row) for row in fresh if row.ended_at == last}


def _key(row: Past) -> tuple[str, int, datetime | None]:
    """Return a key that is unique in the history: a request that was converted has several rows."""
    return row.resource, row.position, row.granted_at


@click.command(short_help="Check in the history that no limit was exceeded.")
@click.argument("resource", required=False, type=resource_name)
@since_option("30d")
@json_option
@connecting
def audit(options: Connecting, resource: str | None, since: float, as_json: bool) -> None:
    """Check in the history, and in the present requests, that no limit was exceeded and no order broken; or show where.

    When a request was granted, it must have been compatible with all requests ahead of it, holders and waiters. Pruned
    rows cannot be checked; the time of the first known end is printed.

    Findings: limit (more holders than it allows, or a writer or a stage that was not alone), order (granted before a
    conflicting request that waited ahead), alone (a reader became the writer while there were other holders), cap and
    pause (granted against an operator's, 5 s or more after it was set), number (a position that was given twice, or out
    of order), clock (a row that ended before it began: the server's clock was set back).

    \b
    Examples:
      sqlsem audit --since 30d
      sqlsem audit etl --since 24h --json

    \b
    Exit codes: 0 all is in order; 1 there are findings.
    """
    with options.coordinator(must_exist=True) as coordinator:
        night = Night(coordinator, resource, since)
        with options.progress(night.progress):
            result = check(night.past(), night.entries, night.rulings(), maximum=MAX_FINDINGS)
    plain = {"taken_at": night.taken_at.isoformat(), **result.as_dict()}
    output.show_or_json(as_json, plain, lambda width: render_audit(result, width))
    if not result.ok:
        raise SystemExit(1)


def picture_file(value: str) -> Path:
    """Convert the name of a picture's file; its suffix is the format."""
    path = Path(value)
    if path.suffix.lower() not in FORMATS:
        raise click.BadParameter(f"{value!r} must end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    return path


@click.command(short_help="Draw requests over time, and the use of limits.")
@click.argument("resource", required=False, type=resource_name)
@since_option("24h")
@click.option(
    "-o",
    "--output",
    "file",
    type=picture_file,
    required=True,
    metavar="FILE",
    help="The file to write: a self-contained page (.html), or a picture (.svg, .png).",
)
@most_option(MAX_DRAWN, "Draw at most N requests, the longest ones.")
@connecting
def timeline(options: Connecting, resource: str | None, since: float, file: Path, maximum: int) -> None:
    """Draw a timeline of each resource: its waiting and holding requests, and how much of the limit was in use.

    The page can zoom and search; point at a bar to see its request. The file and the output say what is left out. The
    file contains the names and notes of all requests. Needs: pip install 'sqlsem[timeline]'

    \b
    Examples:
      sqlsem timeline --since 24h -o night.html
      sqlsem timeline etl --since 2h -o etl.svg
    """
    library()
    with options.coordinator(must_exist=True) as coordinator:
        night = Night(coordinator, resource, since)
        begin = night.taken_at - timedelta(seconds=min(since, LONGEST_NIGHT_SECONDS))
        with options.progress(night.progress):
            drawn = lay_out(night.past(), night.entries, begin, night.taken_at, maximum=maximum, max_panels=MAX_PANELS)
    content = picture(drawn, file.suffix.lower())
    try:
        file.write_bytes(content)
    except OSError as exc:
        raise ConfigurationError(f"The picture cannot be written to {str(file)!r}: {exc.strerror}") from exc
    words = drawn.left_out() or f"all {drawn.requests:,} requests are drawn"
    output.echo(f"{file}: {words}, of {counted(len(drawn.panels), 'resource')}")


def numbered(value: str) -> tuple[str, int]:
    """Convert ``NAME=NUMBER``."""
    match = re.fullmatch(r"(.+)=([0-9]{1,10})", value)
    if match is None or not 1 <= int(match[2]) <= MAX_INT:
        raise click.BadParameter(f"{value!r} is not NAME=NUMBER, with a number of 1 or more")
    return resource_name(match[1]), int(match[2])


@click.command(short_help="Replay the history with another limit.")
@click.argument("resource", required=False, type=resource_name)
@since_option("24h")
@click.option("--limit", "limits", type=numbered, multiple=True, metavar="NAME=N", help="Replay with this limit.")
@click.option(
    "--weight",
    "weights",
    type=numbered,
    multiple=True,
    metavar="NAME=N",
    help="Replay with this weight.",
)
@click.option("--order", type=click.Choice(ORDERS), default="asked", help="Replay in this order.")
@most_option(MAX_REQUESTS, "Replay at most N finished requests, the newest ones.", largest=10_000_000)
@json_option
@connecting
def replay(
    options: Connecting,
    resource: str | None,
    since: float,
    limits: tuple[tuple[str, int], ...],
    weights: tuple[tuple[str, int], ...],
    order: str,
    maximum: int,
    as_json: bool,
) -> None:
    """Replay the history by the same rule with another limit, weight or order, and print how it would have been.

    Each request is made at its time, and held for as long as it was held. Without changes, the result is nearly the
    real one. --limit and --weight apply to requests for a limit or a mutex, not to readers and stages. USE is the share
    of the limit that was in use.

    \b
    Examples:
      sqlsem replay --since 24h --limit etl=5
      sqlsem replay etl --order shortest --json
    """
    with options.coordinator(must_exist=True) as coordinator:
        night = Night(coordinator, resource, since)
        with options.progress(night.progress):
            past = list(itertools.islice(night.past(), maximum + 1))
    left_out = len(past) > maximum
    del past[maximum:]
    settings = ReplaySettings(dict(limits), dict(weights), order, night.caps)
    known = {row.resource for row in past} | {entry.resource for entry in night.entries}
    for name in (*settings.limits, *settings.weights):
        if name not in known:
            raise ConfigurationError(f"There were no requests for {name!r} in that time; see: sqlsem history")
    with options.progress(lambda: f"replaying {counted(len(past), 'finished request')}"):
        result = run_again(past, night.entries, settings)
    first = past[-1].ended_at if past else None
    beginning = None if first is None else first.isoformat()
    plain = {"taken_at": night.taken_at.isoformat(), "first_end": beginning, "left_out": left_out, **result.as_dict()}
    output.show_or_json(as_json, plain, lambda width: render_replay(result, width, first if left_out else None))
