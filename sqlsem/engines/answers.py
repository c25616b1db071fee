"""What engines make of what a database has answered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from sqlsem.errors import ConfigurationError, Deadlock, NotHeld, SqlsemError
from sqlsem.model import UPGRADE, Entry, Request, Ticket

__all__ = [
    "OTHER_LOGIN",
    "RIGHTS",
    "TOO_LATE",
    "UNKNOWN",
    "USED",
    "adopted",
    "already_upgrading",
    "granted_rights",
    "hash_of",
    "not_adopted",
]

#: What `AdminSession.rights` may find, in the order in which the databases are asked.
RIGHTS = ("operate", "retry")


def already_upgrading(entries: Iterable[Entry], ticket: Ticket) -> Deadlock:
    """Why a reader cannot become the writer while another one of these waits for that."""
    other = "another reader"
    for entry in entries:
        if entry.access.startswith(UPGRADE) and entry.position != ticket.position:
            other = f"{entry.host}:{entry.pid} ({entry.owner}) at {entry.position}"
    return Deadlock(
        f"{other} is upgrading on {ticket.resource!r} already: it waits until the reader at {ticket.position} "
        f"leaves, which would wait for it; release this one, then ask to write",
        resource=ticket.resource,
    )


def granted_rights(answers: Iterable[object]) -> frozenset[str]:
    """The rights of `RIGHTS` for which the database said yes."""
    return frozenset(name for name, granted in zip(RIGHTS, answers, strict=True) if granted)


#: Why a token is not adopted, as the databases tell it.
UNKNOWN, USED, TOO_LATE, OTHER_LOGIN = -1, -2, -3, -4


def not_adopted(
    code: int, where: str, who: str | None, seconds: float | None, resource: str | None, position: int | None
) -> SqlsemError:
    """Why a token is not adopted: which lock it was for, and since when; ``who`` used it, or whose login it is for."""
    lock = f"the lock on {resource!r} (position {position})"
    ago = f"{seconds or 0.0:.1f} s ago"
    if code == UNKNOWN:
        return NotHeld(
            f"This token is not known in {where}: it is none, of another database, or was over more than a day ago; "
            f"have the lock handed over again"
        )
    if code == USED:
        return NotHeld(
            f"This token was used {ago}: {who} adopted {lock}. A token can be used once; have the lock handed over "
            f"again",
            resource=resource,
        )
    if code == OTHER_LOGIN:
        return ConfigurationError(
            f"T{lock[1:]} was handed over to login {who}, which this is not; connect as that login, or have it "
            f"handed over with to= this one",
            resource=resource,
        )
    return NotHeld(
        f"Too late to adopt {lock}, which was handed over {ago}: nobody did in time, or an operator took it away; "
        f"acquire it, or have it handed over again, for longer (ttl=)",
        resource=resource,
    )


def adopted(rows: Sequence[Sequence[Any]], requesting_id: str, where: str) -> list[tuple[Request, Ticket]]:
    """What has been adopted, from a server's rows: code, words, seconds, resource, position, access, limit, weight,
    note. Raises what `not_adopted` makes of a code.
    """
    found = []
    for code, words, seconds, resource, position, access, limit, weight, note in rows:
        if code != 0:
            raise not_adopted(code, where, words, seconds, resource, position)
        found.append(
            (Request(resource, access, limit, weight, note), Ticket(resource, int(position), requesting_id, True))
        )
    return found


def hash_of(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
