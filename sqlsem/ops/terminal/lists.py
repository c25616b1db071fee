"""Renders the lists of ``sqlsem leader``, ``sqlsem once`` and ``sqlsem rates``, at most ``width`` columns wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from sqlsem.client.leader import LeaderEntry
from sqlsem.ops.terminal.tables import Column, local_time, process_name, seconds_in_words, table
from sqlsem.values.locks import OnceEntry
from sqlsem.values.rates import RateEntry

__all__ = ["describe_leader", "render_leaders", "render_rates", "render_runs"]


def describe_leader(leader: LeaderEntry) -> str:
    """Return the process of a leader, with its program."""
    process = process_name(leader.host, leader.pid) if leader.host is not None else "a session"
    return process if leader.program is None else f"{process} ({leader.program})"


LEADERS: tuple[Column[LeaderEntry], ...] = (
    Column("NAME", lambda leader: leader.name, elastic=True),
    Column("LEADER", describe_leader, elastic=True),
    Column("SINCE", lambda leader: local_time(leader.since)),
    Column("WAITING", lambda leader: str(leader.waiting), right=True),
    Column("FENCE", lambda leader: str(leader.fence), right=True),
    Column("INFO", lambda leader: leader.info or "", elastic=True),
)
RUNS: tuple[Column[OnceEntry], ...] = (
    Column("NAME", lambda run: run.name, elastic=True),
    Column("BEGAN", lambda run: local_time(run.granted_at)),
    Column("TOOK", lambda run: seconds_in_words((run.done_at - run.granted_at).total_seconds()), right=True),
    Column("AGO", lambda run: seconds_in_words((run.taken_at - run.done_at).total_seconds()), right=True),
    Column("LOGIN", lambda run: run.login or "", elastic=True),
    Column("FENCE", lambda run: str(run.fence), right=True),
)


def render_leaders(leaders: Sequence[LeaderEntry], width: int, only: str | None = None) -> RenderableType:
    """Return the leaders."""
    empty = "There is no leader." if only is None else f"There is no leader of {only!r}."
    return table(LEADERS, leaders, width, empty=empty)


def render_runs(runs: Sequence[OnceEntry], width: int, only: str | None = None) -> RenderableType:
    """Return the last runs."""
    empty = "No run is recorded." if only is None else f"No run of {only!r} is recorded."
    return table(RUNS, runs, width, empty=empty)


def render_rates(
    windows: Sequence[RateEntry], waiting: Mapping[str, int], width: int, only: str | None = None
) -> RenderableType:
    """Return the windows of rates. ``waiting``: the number of waiters by resource."""
    columns: tuple[Column[RateEntry], ...] = (
        Column("RATE", lambda rate: rate.name, elastic=True),
        Column("WINDOW", lambda rate: seconds_in_words(rate.window), right=True),
        Column("LIMIT", lambda rate: f"{rate.limit:,}", right=True),
        Column("USED", lambda rate: f"{rate.used:,}", right=True),
        Column("LEFT", lambda rate: f"{max(0, rate.limit - rate.used):,}", right=True),
        Column("ROOM IN", lambda rate: seconds_in_words(rate.free_in) if rate.free_in else "", right=True),
        Column("WAITING", lambda rate: str(waiting[rate.resource]), right=True),
        Column("LAST", lambda rate: seconds_in_words(rate.idle), right=True),
    )
    empty = "There are no rates." if only is None else f"Nothing was ever used of a rate {only!r}."
    return table(columns, windows, width, empty=empty)
