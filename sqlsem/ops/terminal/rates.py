"""Renders the output of ``sqlsem rates``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from sqlsem.ops.terminal.tables import Column, seconds_in_words, table
from sqlsem.values.rates import RateEntry

__all__ = ["render_rates"]


def render_rates(
    windows: Sequence[RateEntry], waiting: Mapping[str, int], width: int, only: str | None = None
) -> RenderableType:
    """Return the windows of rates, at most ``width`` columns wide. ``waiting``: the number of waiters by resource."""
    if not windows:
        return Text("There are no rates." if only is None else f"Nothing was ever used of a rate {only!r}.")
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
    return table(columns, windows, width)
