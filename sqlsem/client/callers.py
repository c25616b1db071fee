"""The thread or task that acquires, waits and holds; and the refusal of blocking calls in an event loop, as they would
block all tasks of that loop.

Each caller has a number that this process never uses again, so a grant cannot be mistaken for that of a later thread.
Callers are referred to weakly, so a thread or task can be collected while its grants exist.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from dataclasses import field
from typing import TYPE_CHECKING, Any

from sqlsem.util import runtime
from sqlsem.util.process import host_name, program_name
from sqlsem.util.record import record
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.events import Behind

if TYPE_CHECKING:
    from types import FrameType

    from sqlsem.values.locks import Request, Ticket

__all__ = ["Caller", "new_number", "ours", "require_no_event_loop", "this_thread"]

_numbers = itertools.count(1)
_threads = threading.local()


@record
class Caller:
    """A thread or a task."""

    kind: str  # "thread" or "task"
    number: int  # no other caller in this process gets it
    name: str
    #: The caller's name in the column ``owner``.
    owner: str = field(init=False, compare=False, repr=False)
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", f"{self.name[:200]}#{self.number}")


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


def require_no_event_loop(what: object, instead: str) -> None:
    """Raise `ConfigurationError` if an event loop runs in this thread, as the call would block it. ``what`` describes
    the call; it is converted to text only for the message.
    """
    asyncio = sys.modules.get("asyncio")  # (no event loop runs if asyncio was never imported)
    if asyncio is not None and asyncio._get_running_loop() is not None and not _in_notebook_cell():
        raise ConfigurationError(
            f"{what} would block the event loop that runs in this thread; {instead}, or a thread (asyncio.to_thread)",
            code="asyncio",
        )


def _in_notebook_cell() -> bool:
    """Return True if a cell of a notebook makes the call, and not a task. IPython runs cells in its event loop. A cell
    may block that loop, and users of notebooks expect it; a task may not.
    """
    if "IPython" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "IPython.core.interactiveshell":
            return True
        if module.startswith("asyncio."):
            return False
        frame = frame.f_back
    return False


def ours(request: Request, ticket: Ticket, state: str, seconds: float, caller: Caller | None = None) -> Behind:
    """Describe a row of this process as the blocker of another request."""
    owner_fields = (None if caller is None else caller.owner, host_name(), os.getpid(), program_name())
    return Behind(ticket.position, state, seconds, ticket.requesting_id, *owner_fields, request.note, None)
