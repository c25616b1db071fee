"""Renders the output of ``sqlsem leader``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from sqlsem.client.leader import LeaderEntry
from sqlsem.ops.terminal.tables import Column, local_time, process_name, table

__all__ = ["describe_leader", "render_leaders"]


def describe_leader(leader: LeaderEntry) -> str:
    """Return the process of a leader, with its program."""
    process = process_name(leader.host, leader.pid) if leader.host is not None else "a session"
    return process if leader.program is None else f"{process} ({leader.program})"


def render_leaders(leaders: Sequence[LeaderEntry], width: int, only: str | None = None) -> RenderableType:
    """Return the leaders, at most ``width`` columns wide."""
    if not leaders:
        return Text("There is no leader." if only is None else f"There is no leader of {only!r}.")
    columns: tuple[Column[LeaderEntry], ...] = (
        Column("NAME", lambda leader: leader.name, elastic=True),
        Column("LEADER", describe_leader, elastic=True),
        Column("SINCE", lambda leader: local_time(leader.since)),
        Column("WAITING", lambda leader: str(leader.waiting), right=True),
        Column("FENCE", lambda leader: str(leader.fence), right=True),
        Column("INFO", lambda leader: leader.info or "", elastic=True),
    )
    return table(columns, leaders, width)
