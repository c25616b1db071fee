"""What ``sqlsem rates`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from sqlsem.model_rates import RateEntry
from sqlsem.terminal.tables import fit, seconds_in_words, table

__all__ = ["render_rates"]


def render_rates(
    found: Sequence[RateEntry], waiting: Mapping[str, int], width: int, only: str | None = None
) -> RenderableType:
    """Windows of rates, at most ``width`` columns wide. ``waiting``: how many, by resource."""
    if not found:
        return Text("There are no rates." if only is None else f"Nothing was ever used of a rate {only!r}.")
    heads = ("RATE", "WINDOW", "LIMIT", "USED", "LEFT", "ROOM IN", "WAITING", "LAST")
    rows = [
        (
            *(one.name, seconds_in_words(one.window), f"{one.limit:,}", f"{one.used:,}"),
            *(f"{max(0, one.limit - one.used):,}", seconds_in_words(one.free_in) if one.free_in else ""),
            *(str(waiting[one.resource]), seconds_in_words(one.idle)),
        )
        for one in found
    ]
    return table(heads, rows, fit(heads, rows, width, elastic=(0,)), right=range(1, 8))
