"""Waiting in the database for something that others have to do first: what acquiring and upgrading have in common."""

from __future__ import annotations

from typing import Any

from sqlsem import deadlocks
from sqlsem.core.callers import Caller
from sqlsem.core.client import DatabaseClient
from sqlsem.core.steps import NO_ROOM, Call, Operations, WaitFor
from sqlsem.core.threads import voice
from sqlsem.core.waiter_queues import Waiter
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.errors import Deadlock
from sqlsem.model import monotonic

__all__ = ["SLICE_SECONDS", "WaitingVerb"]

log = voice

#: The longest single wait in the database. Long enough that waiting costs less than a statement a second and waiter,
#: pings included; short enough that an operator's change of a limit is felt soon, wherever no event tells it.
SLICE_SECONDS = 4.0
#: The longest one of those who may be in a deadlock, as nothing interrupts a wait when one is found.
SUSPECT_SLICE_SECONDS = 0.5


class WaitingVerb:
    """What may have to wait; the search for deadlocks may `tell` it to give up."""

    #: Whether it waits to be alone, and not for its turn.
    upgrade = False

    def __init__(self, client: DatabaseClient, caller: Caller, timeout: float | None) -> None:
        self.client = client
        self.member = client.member
        self.caller = caller
        self.timeout = timeout
        self.budget = client.retry if timeout is None else min(client.retry, max(timeout, 1.0))
        self.began = monotonic()
        self.deadlock: deadlocks.Found | None = None

    def seconds_left(self, most: float = SLICE_SECONDS) -> float:
        """For the next wait; 0 or less when the time is up."""
        return most if self.timeout is None else min(most, self.timeout - (monotonic() - self.began))

    def waited(self) -> float:
        """Seconds since it was asked for."""
        return monotonic() - self.began

    def tell(self, found: deadlocks.Found) -> None:
        """This request has to be given up; from another thread."""
        self.deadlock = found

    def wait(self, waiter: Waiter, timeout: float) -> Operations[Any]:
        """Wait in the database: True when it has come, False when not yet, None when the row is gone. `NO_ROOM` where
        that cannot be a moment: enough of ours wait there, or the session was lost.
        """
        try:
            answer = yield WaitFor(waiter.ticket, timeout, waiter, self.upgrade)
        except (Disconnected, Busy) as exc:
            self.client.require_open()
            what = "to write" if self.upgrade else "for"
            log.warning("Waiting %s %r was interrupted, looking again: %s", what, waiter.ticket.resource, exc)
            return NO_ROOM
        return self.checked(answer) if answer is None else answer

    def look(self, waiter: Waiter) -> Operations[bool | None]:
        """Has it come?"""
        upgrade, ticket, event = self.upgrade, waiter.ticket, waiter.event
        what = "upgrade" if upgrade else "wait"
        answer: bool | None = yield Call(
            what, lambda session, _: (session.upgrade if upgrade else session.wait)(ticket, 0.0, event), self.budget
        )
        self.checked(answer)
        return answer

    def look_or_give_up(self, waiter: Waiter) -> Operations[bool | None]:
        """It is in a deadlock, unless somebody else has just given up."""
        assert self.deadlock is not None
        answer = yield from self.look(waiter)
        if answer is False:
            raise Deadlock(deadlocks.message(self.deadlock), resource=waiter.ticket.resource)
        return answer

    def checked(self, answer: Any) -> Any:
        """An answer; raises `ConfigurationError` when the row is gone as its coordinator was closed."""
        if answer is None:
            self.client.require_open()  # closing took the row away
        return answer
