"""What engines make of what a database has answered."""

from __future__ import annotations

from collections.abc import Iterable

from sqlsem.errors import Deadlock
from sqlsem.model import UPGRADE, Entry, Ticket

__all__ = ["RIGHTS", "already_upgrading", "granted_rights"]

#: What `Administration.rights` may find, in the order in which the databases are asked.
RIGHTS = ("operate", "retry")


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


def granted_rights(answers: Iterable[object]) -> frozenset[str]:
    """The rights of `RIGHTS` for which the database said yes."""
    return frozenset(name for name, granted in zip(RIGHTS, answers, strict=True) if granted)
