"""The commands that look back at a whole night: ``sqlsem timeline``, ``replay`` and ``audit``."""

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
from sqlsem.cli.options import age, json_option, resource_name
from sqlsem.errors import ConfigurationError
from sqlsem.insight.audit import Ruling, rulings
from sqlsem.insight.audit import audit as check
from sqlsem.insight.patterns import is_pattern
from sqlsem.insight.replay import ORDERS, ReplaySettings
from sqlsem.insight.replay import replay as run_again
from sqlsem.insight.timeline import timeline as lay_out
from sqlsem.model import MAX_INT, Entry, Operation, Past, monotonic
from sqlsem.terminal import output
from sqlsem.terminal.nights import render_audit, render_replay
from sqlsem.terminal.timeline import FORMATS, library, picture

__all__ = ["audit", "replay", "timeline"]

F = TypeVar("F", bound=Callable[..., Any])
#: So many rows are read at a time.
PAGE_ROWS = 5000
#: A page is asked for from a little above the last row that is known, seconds: how far our clocks may be apart by then.
OVERLAP_SECONDS, LONGEST_OVERLAP_SECONDS = 2.0, 3600.0
#: Years beyond those that a calendar has.
LONGEST_NIGHT_SECONDS = 50 * 365 * 86400
#: Of more operations the newest are known.
MOST_OPERATIONS = 100_000
#: So many findings are shown.
MOST_FINDINGS = 20
#: More requests than this are not run again, unless it is asked for.
MOST_REQUESTS = 100_000
#: More than these are not drawn.
MOST_DRAWN, MOST_PANELS = 10_000, 40


def since_option(default: str) -> Callable[[F], F]:
    """The option for how far to look back."""
    return click.option(
        "--since",
        type=age,
        default=default,
        show_default=True,
        metavar="AGE",
        help="Look at what ended no longer ago than this: 24h, 30d; and at what is there.",
    )


class Night:
    """What is there now, and the history before it, page by page: the newest end first. Nothing is kept."""

    def __init__(self, coordinator: sqlsem.Coordinator, resource: str | None, since: float) -> None:
        overview = coordinator.admin.overview()
        self._begun = monotonic()
        self._coordinator = coordinator
        self._resource = resource
        self._since = since
        self._resources = overview.resources
        self.taken_at: datetime = overview.taken_at
        self.entries: list[Entry] = [entry for entry in overview.entries if resource in (None, entry.resource)]

    def rulings(self) -> list[Ruling]:
        """What operators had set, and when, as far as it is known."""
        done = self._coordinator.admin.operations(most=MOST_OPERATIONS, since=self._since)
        return rulings((one for one in done if self._concerns(one)), self._resources)

    def _concerns(self, one: Operation) -> bool:
        return self._resource is None or one.resource == self._resource or is_pattern(one.resource or "")

    @property
    def caps(self) -> dict[str, int]:
        """The limits that the server has now."""
        return {resource.resource: resource.cap for resource in self._resources if resource.cap is not None}

    def past(self) -> Iterator[Past]:
        """All finished requests. What ends while it is read may be left out."""
        most, overlap = PAGE_ROWS, OVERLAP_SECONDS
        last: datetime | None = None
        # Of those that ended with the last one.
        seen: set[tuple[str, int, datetime | None]] = set()
        while True:
            until = None
            if last is not None:
                age = (self.taken_at - last).total_seconds() + monotonic() - self._begun
                until = max(0.0, age - overlap)
            page = self._coordinator.admin.history(self._resource, most=most, since=self._since, until=until)
            if last is not None and overlap < LONGEST_OVERLAP_SECONDS and not any(_key(one) in seen for one in page):
                if len(page) == most and page[-1].ended_at > last:
                    most *= 2
                else:  # the server's clock was set; or they are pruned, as it will turn out
                    overlap *= 4
                continue
            fresh = [
                one
                for one in page
                if last is None or one.ended_at < last or (one.ended_at == last and _key(one) not in seen)
            ]
            yield from fresh
            if len(page) < most:
                return
            if not fresh:
                most *= 2
                continue
            overlap = OVERLAP_SECONDS
            if fresh[-1].ended_at != last:
                last, seen = fresh[-1].ended_at, set()
            seen |= {_key(one) for one in fresh if one.ended_at == last}


def _key(one: Past) -> tuple[str, int, datetime | None]:
    """Tells one row of the history from all others: a request that was converted has several."""
    return one.resource, one.position, one.granted_at


@click.command(short_help="Prove from the history that no limit was passed.")
@click.argument("resource", required=False, type=resource_name)
@since_option("30d")
@json_option
@connecting
def audit(options: Connecting, resource: str | None, since: float, as_json: bool) -> None:
    """Prove from the history, and from what is there, that no limit was ever passed and no order broken; or show where.

    Each request must have fitted, when it was let in, with all that were ahead of it then, inside or waiting. What has
    been pruned from the history cannot be checked; the first end that is known is told.

    \b
    Examples:
      sqlsem audit --since 30d
      sqlsem audit etl --since 24h --json

    \b
    Exit codes: 0 all is in order; 1 something is not, and is shown.
    """
    with options.coordinator(looks=True) as coordinator:
        night = Night(coordinator, resource, since)
        result = check(night.past(), night.entries, night.rulings(), most=MOST_FINDINGS)
    if as_json:
        output.print_json({"taken_at": night.taken_at.isoformat(), **result.as_dict()})
    else:
        console = output.console()
        output.show(console, render_audit(result, console.width))
    if not result.ok:
        raise SystemExit(1)


def picture_file(value: str) -> Path:
    """A file for a picture, whose name tells what it shall be."""
    path = Path(value)
    if path.suffix.lower() not in FORMATS:
        raise click.BadParameter(f"{value!r} must end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    return path


@click.command(short_help="Draw who waited and held, and the use.")
@click.argument("resource", required=False, type=resource_name)
@since_option("24h")
@click.option(
    "-o",
    "--output",
    "file",
    type=picture_file,
    required=True,
    metavar="FILE",
    help="Where to: a page that needs nothing else (.html), or a picture (.svg, .png).",
)
@click.option(
    "-n",
    "--max",
    "most",
    type=click.IntRange(1, 100_000),
    default=MOST_DRAWN,
    show_default=True,
    metavar="N",
    help="Draw so many requests at the most, the longest.",
)
@connecting
def timeline(options: Connecting, resource: str | None, since: float, file: Path, most: int) -> None:
    """Draw a night by resource: who waited and held, and under it how much of the limit was in use.

    In the page one can zoom, point at a bar to read who it was, and search. What is not drawn is said, in the file and
    here. The names and notes of all who used the locks are in it. Needs: pip install 'sqlsem[timeline]'

    \b
    Examples:
      sqlsem timeline --since 24h -o night.html
      sqlsem timeline etl --since 2h -o etl.svg
    """
    library()
    with options.coordinator(looks=True) as coordinator:
        night = Night(coordinator, resource, since)
        begin = night.taken_at - timedelta(seconds=min(since, LONGEST_NIGHT_SECONDS))
        drawn = lay_out(night.past(), night.entries, begin, night.taken_at, most=most, most_panels=MOST_PANELS)
    content = picture(drawn, file.suffix.lower())
    try:
        file.write_bytes(content)
    except OSError as exc:
        raise ConfigurationError(f"The picture cannot be written to {str(file)!r}: {exc.strerror}") from exc
    words = drawn.left_out() or f"all {drawn.requests:,} requests are drawn"
    output.echo(f"{file}: {words}, of {len(drawn.panels)} resource{'' if len(drawn.panels) == 1 else 's'}")


def numbered(value: str) -> tuple[str, int]:
    """``NAME=NUMBER``."""
    match = re.fullmatch(r"(.+)=([0-9]{1,10})", value)
    if match is None or not 1 <= int(match[2]) <= MAX_INT:
        raise click.BadParameter(f"{value!r} is not NAME=NUMBER, with a number of 1 or more")
    return resource_name(match[1]), int(match[2])


@click.command(short_help="Run a night again, under another limit.")
@click.argument("resource", required=False, type=resource_name)
@since_option("24h")
@click.option(
    "--limit", "limits", type=numbered, multiple=True, metavar="NAME=N", help="As if this had been the limit."
)
@click.option("--weight", "weights", type=numbered, multiple=True, metavar="NAME=N", help="As if all weighed so much.")
@click.option("--order", type=click.Choice(ORDERS), default="asked", show_default=True, help="As if these went first.")
@click.option(
    "-n",
    "--max",
    "most",
    type=click.IntRange(1, 10_000_000),
    default=MOST_REQUESTS,
    show_default=True,
    metavar="N",
    help="So many finished requests at the most, the newest.",
)
@json_option
@connecting
def replay(
    options: Connecting,
    resource: str | None,
    since: float,
    limits: tuple[tuple[str, int], ...],
    weights: tuple[tuple[str, int], ...],
    order: str,
    most: int,
    as_json: bool,
) -> None:
    """Run the night again by the same rule, under another limit, weight or order, and say what it would have been.

    Each request is asked again when it was asked, and held for as long as it was held. With nothing changed it comes
    out nearly as it was.

    \b
    Examples:
      sqlsem replay --since 24h --limit etl=5
      sqlsem replay etl --order shortest --json
    """
    with options.coordinator(looks=True) as coordinator:
        night = Night(coordinator, resource, since)
        past = list(itertools.islice(night.past(), most + 1))
    left_out = len(past) > most
    del past[most:]
    settings = ReplaySettings(dict(limits), dict(weights), order, night.caps)
    known = {one.resource for one in past} | {entry.resource for entry in night.entries}
    for name in (*settings.limits, *settings.weights):
        if name not in known:
            raise ConfigurationError(f"Nobody has asked for {name!r} in that time; see: sqlsem history")
    result = run_again(past, night.entries, settings)
    first = past[-1].ended_at if past else None
    if as_json:
        beginning = None if first is None else first.isoformat()
        output.print_json(
            {"taken_at": night.taken_at.isoformat(), "first_end": beginning, "left_out": left_out, **result.as_dict()}
        )
        return
    console = output.console()
    output.show(console, render_replay(result, console.width, first if left_out else None))
