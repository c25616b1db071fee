"""What is said where an upgrade is refused, on every engine."""

from __future__ import annotations

from collections.abc import Iterable

from sqlsem.errors import Deadlock
from sqlsem.model import UPGRADE, Entry, Ticket

__all__ = ["already_upgrading"]


def already_upgrading(entries: Iterable[Entry], ticket: Ticket) -> Deadlock:
    """Why a reader cannot become the writer while another one of these waits for that."""
    other = "another reader"
    for one in entries:
        if one.access.startswith(UPGRADE) and one.position != ticket.position:
            other = f"{one.host}:{one.pid} ({one.owner}) at {one.position}"
    return Deadlock(
        f"{other} is upgrading on {ticket.resource!r} already: it waits until the reader at {ticket.position} "
        f"leaves, which would wait for it; release this one, then ask to write",
        resource=ticket.resource,
    )
