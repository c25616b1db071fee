"""Renders the output of ``sqlsem rates``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from sqlsem.ops.terminal.tables import fit, seconds_in_words, table
from sqlsem.values.rates import RateEntry

__all__ = ["render_rates"]


def render_rates(
    windows: Sequence[RateEntry], waiting: Mapping[str, int], width: int, only: str | None = None
) -> RenderableType:
    """Return the windows of rates, at most ``width`` columns wide. ``waiting``: the number of waiters by resource."""
    if not windows:
        return Text("There are no rates." if only is None else f"Nothing was ever used of a rate {only!r}.")
    heads = ("RATE", "WINDOW", "LIMIT", "USED", "LEFT", "ROOM IN", "WAITING", "LAST")
    rows = [
        (
            *(rate.name, seconds_in_words(rate.window), f"{rate.limit:,}", f"{rate.used:,}"),
            *(f"{max(0, rate.limit - rate.used):,}", seconds_in_words(rate.free_in) if rate.free_in else ""),
            *(str(waiting[rate.resource]), seconds_in_words(rate.idle)),
        )
        for rate in windows
    ]
    return table(heads, rows, fit(heads, rows, width, elastic=(0,)), right=range(1, 8))
