"""The thread or task that acquires, waits and holds.

Each caller has a number that this process never uses again, so a grant cannot be mistaken for that of a later thread.
Callers are referred to weakly, so a thread or task can be collected while its grants exist.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from sqlsem.engines.base import program_name
from sqlsem.util import runtime
from sqlsem.values.events import Behind
from sqlsem.values.locks import Request, Ticket

__all__ = ["Caller", "new_number", "ours", "this_thread"]

_numbers = itertools.count(1)
_threads = threading.local()


@dataclass(frozen=True, slots=True)
class Caller:
    """A thread or a task."""

    kind: str  # "thread" or "task"
    number: int  # no other caller in this process gets it
    name: str
    #: The `threading.Thread` or the `asyncio.Task`; weakly, as grants refer to callers, and frames to grants.
    runner: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)

    @property
    def is_running(self) -> bool:
        """True until the thread or the task has ended."""
        runner = None if self.runner is None else self.runner()
        if runner is None:
            return False
        running: bool = runner.is_alive() if self.kind == "thread" else not runner.done()
        return running

    @property
    def owner(self) -> str:
        """The caller's name in the column ``owner``."""
        return f"{self.name[:200]}#{self.number}"


def new_number() -> int:
    """Return a new number for a thread or a task. (The system's numbers are reused; these never are.)"""
    return next(_numbers)


def this_thread() -> Caller:
    """Return the calling thread."""
    state = runtime.namespace(_threads)
    known: Caller | None = state.get("caller")
    thread = threading.current_thread()
    name = thread.name
    if known is None or known.name != name:
        number = new_number() if known is None else known.number
        known = state["caller"] = Caller("thread", number, name, weakref.ref(thread))
    return known


def ours(request: Request, ticket: Ticket, state: str, seconds: float, caller: Caller | None = None) -> Behind:
    """Describe a row of this process as the blocker of another request."""
    owner_fields = (None if caller is None else caller.owner, socket.gethostname(), os.getpid(), program_name())
    return Behind(ticket.position, state, seconds, ticket.requesting_id, *owner_fields, request.note, None)
