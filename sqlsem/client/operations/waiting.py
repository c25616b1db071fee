"""The common part of acquisitions and upgrades: waiting in the database until other holders have released.

The answer to a wait is True (granted), False (not yet) or None (the row was removed), as in `LockSession.wait`. The
deadlock monitor may choose a waiting operation as the victim, which then raises `Deadlock` at its next poll.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from sqlsem.client.effects import NO_CONNECTION, Call, Effects, WaitFor
from sqlsem.client.waiters.state import Facts, Step, next_step
from sqlsem.engines.failures import Busy, Conflict, Disconnected
from sqlsem.util.threads import log
from sqlsem.values import deadlocks
from sqlsem.values.errors import Deadlock, LockLost, SqlsemError
from sqlsem.values.locks import Entry, Ticket

if TYPE_CHECKING:
    from sqlsem.client.callers import Caller
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.waiters.queues import Waiter
    from sqlsem.engines.base import Session

__all__ = ["WaitingOperation", "row_removed"]


def row_removed(request: str, resource: str, when: str = "while it waited") -> LockLost:
    """Return the error to raise for a request whose row was removed before the request was granted."""
    return LockLost(
        f"The request for {request} was taken out of the queue {when} (by an operator, or because the database was out "
        f"of reach for too long); ask again",
        resource=resource,
    )


class WaitingOperation:
    """An operation that may wait, and that the deadlock monitor may choose as a victim."""

    #: True if it waits until it is the only reader (an upgrade), False if it waits for a grant.
    upgrade = False

    def __init__(self, client: DatabaseClient, caller: Caller, timeout: float | None) -> None:
        if client.member.closing.is_set():
            client.require_open()
        self.client = client
        self.member = client.member
        self.caller = caller
        self.timeout = timeout
        self.retry_timeout = client.retry if timeout is None else min(client.retry, max(timeout, 1.0))
        self.began = client.clock()
        self.deadlock: deadlocks.Found | None = None

    def facts(self, ticket: Ticket, **more: Any) -> Facts:
        """Return the facts for the next step of a waiter with this row; ``more``: further ones."""
        return Facts(
            has_row=self.member.has_ticket(ticket),
            deadline=math.inf if self.timeout is None else self.began + self.timeout,
            is_victim=self.deadlock is not None,
            **more,
        )

    def next_step(self, waiter: Waiter, facts: Facts) -> Step:
        """Choose the next step of a waiter that is in no `WaiterQueues`, and record the state that it enters."""
        step = next_step(waiter.state, facts, self.client.clock(), self.client.timing)
        waiter.state = step.state
        return step

    def remaining(self) -> float:
        """Return the seconds until the timeout; 0 or less when the time is up."""
        return math.inf if self.timeout is None else self.timeout - self.waited()

    def waited(self) -> float:
        """Return the seconds since the operation began."""
        return self.client.clock() - self.began

    def choose_as_victim(self, deadlock: deadlocks.Found) -> None:
        """Have this request raise `Deadlock` at its next poll. Called by another thread."""
        self.deadlock = deadlock

    def wait(self, waiter: Waiter, timeout: float) -> Effects[Any]:
        """Wait in the database for at most ``timeout`` seconds. Return True (granted), False (not yet) or None (the row
        was removed); `NO_CONNECTION` if no connection of the pool is free, or if the connection failed.
        """
        try:
            answer = yield WaitFor(waiter.ticket, timeout, waiter, self.upgrade)
        except (Disconnected, Busy) as exc:
            self.client.require_open()
            kind = "upgrade of" if self.upgrade else "wait for"
            level = logging.DEBUG if isinstance(exc, Conflict) else logging.WARNING
            log.log(level, "The %s %r was interrupted; polling instead: %s", kind, waiter.ticket.resource, exc)
            return NO_CONNECTION
        return self.check_answer(answer) if answer is None else answer

    def poll_once(self, waiter: Waiter) -> Effects[bool | None]:
        """Ask the database, without waiting, whether the request is granted."""
        upgrade, ticket, event = self.upgrade, waiter.ticket, waiter.event
        name = "upgrade" if upgrade else "wait"

        def poll(session: Session, _: int) -> bool | None:
            answer: bool | None = (session.upgrade if upgrade else session.wait)(ticket, 0.0, event)
            return answer

        answer: bool | None = yield Call(name, poll, self.retry_timeout)
        self.check_answer(answer)
        return answer

    def poll_or_give_up(self, waiter: Waiter) -> Effects[bool | None]:
        """Poll once more; raise `Deadlock` if this victim is still not granted."""
        assert self.deadlock is not None
        answer = yield from self.poll_once(waiter)
        if answer is False:
            lost = self.client.registry.lost_rows_of(self.caller)
            message = ". ".join(filter(None, (deadlocks.message(self.deadlock), lost)))
            raise Deadlock(message, resource=waiter.ticket.resource)
        return answer

    def read_entries(self, resource: str, what: str) -> Effects[list[Entry]]:
        """Return the rows of a queue, to find the blocker; none if they cannot be read. ``what``: for the log."""
        try:
            entries: list[Entry] = yield Call("read", lambda session, _: session.entries(resource), 0.0)
        except SqlsemError as exc:
            log.debug("Cannot read which %s: %s", what, exc)
            return []
        return entries

    def check_answer(self, answer: Any) -> Any:
        """Return ``answer``. Raises `ConfigurationError` if closing the coordinator has removed the row."""
        if answer is None:
            self.client.require_open()
        return answer
