"""Waiting in the database for something that others have to do first: what acquiring and upgrading have in common."""

from __future__ import annotations

import logging
import random

from sqlsem import deadlocks
from sqlsem.core.callers import Caller
from sqlsem.core.process import Process
from sqlsem.core.steps import NO_ROOM, Call, Operations, Sleep, WaitFor
from sqlsem.core.waiting import Waiter
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.errors import Deadlock
from sqlsem.model import Ticket, monotonic

__all__ = ["SLICE_SECONDS", "WaitingVerb"]

log = logging.getLogger("sqlsem")

#: The longest single wait in the database. Long enough that waiting costs less than a statement a second and waiter,
#: pings included; short enough that an operator's change of a limit is felt soon, wherever no event tells it.
SLICE_SECONDS = 4.0
#: The longest one of those who may be in a deadlock, as nothing interrupts a wait when one is found.
SUSPECT_SLICE_SECONDS = 0.5
#: Between looks of a waiter that has no session to wait in: at first, and at the most.
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.005, 1.0
#: All who wait without a session together look this often a second at the most.
LOOKS_A_SECOND = 250


class WaitingVerb:
    """What may have to wait; the search for deadlocks may `tell` it to give up."""

    #: Whether it waits to be alone, and not for its turn.
    upgrade = False

    def __init__(self, process: Process, caller: Caller, timeout: float | None) -> None:
        self.process = process
        self.member = process.member
        self.caller = caller
        self.timeout = timeout
        self.budget = process.retry if timeout is None else min(process.retry, max(timeout, 1.0))
        self.began = monotonic()
        self.deadlock: deadlocks.Found | None = None
        self._pause = FIRST_PAUSE_SECONDS

    def seconds_left(self) -> float:
        """For the next wait; 0 or less when the time is up."""
        left = SLICE_SECONDS if self.timeout is None else self.timeout - (monotonic() - self.began)
        return min(left, SLICE_SECONDS)

    def tell(self, found: deadlocks.Found) -> None:
        """This request has to be given up; from another thread."""
        self.deadlock = found

    def wait(self, ticket: Ticket, waiter: Waiter, timeout: float) -> Operations[bool | None]:
        """Wait in the database, or where that cannot be a moment: True when it has come, False when not yet, None when
        the row is gone.
        """
        try:
            answer = yield WaitFor(ticket, timeout, waiter, self.upgrade)
        except (Disconnected, Busy) as exc:
            self.process.require_open()
            what = "to write" if self.upgrade else "for"
            log.warning("Waiting %s %r was interrupted, looking again: %s", what, ticket.resource, exc)
        else:
            if answer is not NO_ROOM:
                return self._checked(answer)
            # Too many of ours wait already: look from time to time.
        yield from self.doze(waiter, timeout)
        return (yield from self.look(ticket, waiter))

    def doze(self, waiter: Waiter, most: float) -> Operations[None]:
        """Sleep a moment, longer each time."""
        pause = max(self._pause, len(self.process.waiting_room) / LOOKS_A_SECOND) * random.uniform(0.8, 1.2)
        yield Sleep(waiter, min(most, pause))
        self._pause = min(self._pause * 1.5, LAST_PAUSE_SECONDS)

    def look(self, ticket: Ticket, waiter: Waiter) -> Operations[bool | None]:
        """Has it come?"""
        upgrade, event = self.upgrade, waiter.event
        what = "upgrade" if upgrade else "wait"
        answer: bool | None = yield Call(
            what, lambda session, _: (session.upgrade if upgrade else session.wait)(ticket, 0.0, event), self.budget
        )
        return self._checked(answer)

    def look_or_give_up(self, ticket: Ticket, waiter: Waiter) -> Operations[bool | None]:
        """It is in a deadlock, unless somebody else has just given up."""
        assert self.deadlock is not None
        answer = yield from self.look(ticket, waiter)
        if answer is False:
            raise Deadlock(deadlocks.message(self.deadlock), resource=ticket.resource)
        return answer

    def _checked(self, answer: bool | None) -> bool | None:
        if answer is None:
            self.process.require_open()  # closing took the row away
        return answer
