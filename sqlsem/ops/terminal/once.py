"""Renders the output of ``sqlsem once``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from sqlsem.ops.terminal.tables import Column, local_time, seconds_in_words, table
from sqlsem.values.locks import OnceEntry

__all__ = ["render_runs"]


def render_runs(runs: Sequence[OnceEntry], width: int, only: str | None = None) -> RenderableType:
    """Return the last runs, at most ``width`` columns wide."""
    if not runs:
        return Text("No run is recorded." if only is None else f"No run of {only!r} is recorded.")
    columns: tuple[Column[OnceEntry], ...] = (
        Column("NAME", lambda run: run.name, elastic=True),
        Column("BEGAN", lambda run: local_time(run.granted_at)),
        Column("TOOK", lambda run: seconds_in_words((run.done_at - run.granted_at).total_seconds()), right=True),
        Column("AGO", lambda run: seconds_in_words((run.taken_at - run.done_at).total_seconds()), right=True),
        Column("LOGIN", lambda run: run.login or "", elastic=True),
        Column("FENCE", lambda run: str(run.fence), right=True),
    )
    return table(columns, runs, width)
