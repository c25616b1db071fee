"""Describe locks inside the database that a session keeps for longer than a call of sqlsem needs them."""

from __future__ import annotations

import dataclasses
from typing import Any

from sqlsem.insight.words import seconds_in_words

__all__ = ["KeptLock"]

#: For each kind: the name of such a lock, and the calls that wait for it.
KINDS = {
    "gate": ("the gate of {name}", "new requests for it wait"),
    "beacon": ("a beacon's lock", "no member gets that beacon, and no request waits for it"),
    "entry": ("a wakeup lock{of_name}", "a waiter that it was to wake polls again after 4 s at most"),
    "waiting": ("a waiting request's lock", "a waiter that it was to wake polls again after 4 s at most"),
    "batch": ("a batch's lock", "its parts cannot start or end"),
    "news": ("the lock of workers that listen for tasks", "workers poll for tasks from time to time"),
    "put": ("a work queue's put lock", "tasks cannot be put into it"),
    "number": ("a member's lock", "its requests wait"),
    "install": ("the installer's lock", "waits return without a grant until it ends"),
    "limits": ("the lock for lifted limits", "requests that leave their limit to the server wait"),
    "turns": ("the lock for limits of queues", "workers are given no task of a queue without limits"),
    "pin": ("rows that it has asserted", "the owners of these rows cannot release them, nor an operator revoke them"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class KeptLock:
    """A lock inside the database that the session ``pid`` keeps.

    ``is_stranger``: the session's login has none of sqlsem's roles. ``seconds``: the age of its transaction, or of the
    session if there is no transaction; None if this login may not see it.
    """

    kind: str
    resource: str | None
    pid: int
    login: str | None
    program: str | None
    seconds: float | None
    is_stranger: bool

    @property
    def holds_up(self) -> bool:
        """True if it blocks more than the owners of the rows that it locks."""
        return self.kind != "pin"

    @property
    def keeps_out(self) -> bool:
        """True if a new request has to wait for it before the request has a row in the queue."""
        return self.kind in ("gate", "number", "limits", "install")

    @property
    def remedy(self) -> str:
        """The statement that ends the session."""
        return f"SELECT pg_catalog.pg_terminate_backend({self.pid})"

    @property
    def words(self) -> str:
        """Say which session keeps which lock, and what that blocks."""
        lock, effect = KINDS.get(self.kind, (f"a lock ({self.kind})", "others wait"))
        name = "a resource" if self.resource is None else repr(self.resource)
        lock = lock.format(name=name, of_name="" if self.resource is None else f" of {name}")
        about = f", {self.program}" if self.program else ""
        role = ", which has no role of sqlsem's," if self.is_stranger else ""
        since = "" if self.seconds is None else f" (of a transaction or session {seconds_in_words(self.seconds)} old)"
        return f"session {self.pid} of login {self.login}{about}{role} keeps {lock}{since}: {effect}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {**dataclasses.asdict(self), "words": self.words, "remedy": self.remedy}
