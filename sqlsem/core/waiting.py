"""Who of this process waits, and the sessions to wait in.

Of our own waiters on one resource only the first waits in the database: nobody behind it can be granted before it, and
so connections are not spent on waiting in line behind ourselves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from sqlsem.core.membership import Membership
from sqlsem.engines.base import Session, Wire
from sqlsem.model import WRITE, Ticket, monotonic

__all__ = ["MOST_IDLE_SESSIONS", "MOST_WAITING_SESSIONS", "Waiter", "WaitingRoom"]

log = logging.getLogger("sqlsem")

#: Connections that may wait in the database at the same time; more waiters than these look from time to time.
MOST_WAITING_SESSIONS = 8
#: Connections kept for the next wait. With the main session that makes three.
MOST_IDLE_SESSIONS = 2
#: Seconds by which the answer to a wait may be late, at the least.
OVERDUE_SECONDS = 3.0


class Waiter:
    """One of our own requests that waits. Setting ``event`` says that looking now may pay."""

    __slots__ = ("access", "event", "position")

    def __init__(self, position: int, event: threading.Event, access: str) -> None:
        self.position = position
        self.event = event
        self.access = access

    def keeps_out(self, later: Waiter) -> bool:
        """Whether a later one of the same resource cannot be granted before this one could be: all rows conflict with
        both, so what is in the way of this one is in the way of that one, and this one is too.
        """
        return self.access == WRITE and later.access == WRITE

    def __lt__(self, other: Waiter) -> bool:
        return self.position < other.position


class WaitingRoom:
    """The local queues, one a resource, and a small pool of sessions."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._engine = member.engine
        self._state_lock = member.state_lock
        self._queues: dict[str, list[Waiter]] = {}
        self._idle: list[Session] = []
        self._due: dict[Wire, float] = {}  # sessions that wait, and until when the answer is due
        self._places = MOST_WAITING_SESSIONS

    # -- local queues -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many resources are waited for."""
        return len(self._queues)

    def waiters(self) -> list[Waiter]:
        """All who wait."""
        with self._state_lock:
            return [waiter for queue in self._queues.values() for waiter in queue]

    def enter(self, ticket: Ticket, waiter: Waiter) -> None:
        """Somebody begins to wait."""
        with self._state_lock:
            insort(self._queues.setdefault(ticket.resource, []), waiter)

    def first(self, ticket: Ticket) -> Waiter:
        """Who of ours waits first where this one, which has entered, does."""
        return self._queues[ticket.resource][0]

    def leave(self, waiters: Sequence[tuple[Ticket, Waiter]]) -> None:
        """They wait no more, and the next of ours come forward. May be repeated."""
        nexts = []
        with self._state_lock:
            for ticket, waiter in waiters:
                queue = self._queues.get(ticket.resource)
                if queue is None:
                    continue
                place = bisect_left(queue, waiter)
                if place < len(queue) and queue[place] is waiter:
                    del queue[place]
                if queue:
                    nexts.append(queue[0])
                else:
                    del self._queues[ticket.resource]
        for waiter in nexts:
            waiter.event.set()

    def nudge(self, resource: str) -> None:
        """Tell our own first waiter on a resource that something left."""
        queue = self._queues.get(resource)
        if queue:
            with contextlib.suppress(IndexError):  # it may have left this instant
                queue[0].event.set()

    # -- sessions -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self, timeout: float) -> Iterator[Session | None]:
        """A session to wait in, or None when too many of ours wait already."""
        with self._state_lock:
            room = self._places > 0
            session = self._idle.pop() if room and self._idle else None
            self._places -= room
        if not room:
            yield None
            return
        sound = False
        try:
            if session is None:
                session = self._engine.connect("wait")
            with self.awaiting(session, timeout):
                yield session
            sound = True
        finally:
            with self._state_lock:
                self._places += 1
            if session is not None:
                if sound:
                    self.keep(session)
                else:
                    session.close()

    def idle_session(self) -> Session | None:
        """One that nobody uses, if there is one; `keep` takes it back."""
        with self._state_lock:
            return self._idle.pop() if self._idle else None

    def keep(self, session: Session) -> None:
        """Keep a session that is in order for the next wait, or close it."""
        with self._state_lock:
            keep = not self._member.closing.is_set() and len(self._idle) < MOST_IDLE_SESSIONS
            if keep:
                self._idle.append(session)
        if not keep:
            session.close()

    @contextlib.contextmanager
    def awaiting(self, session: Wire, timeout: float) -> Iterator[None]:
        """While a session waits it is interrupted when its answer is overdue, and when its coordinator is closed."""
        with self._state_lock:
            self._due[session] = monotonic() + timeout + max(OVERDUE_SECONDS, self._member.trust)
        try:
            self._member.main.require_open()
            yield
        finally:
            with self._state_lock:
                self._due.pop(session, None)

    def interrupt_overdue(self) -> None:
        """End waits whose answer is overdue: the line may be dead without a word."""
        now = monotonic()
        with self._state_lock:
            overdue = [session for session, due in self._due.items() if due < now]
        for session in overdue:
            log.warning("%s does not answer a wait; dropping the connection", self._engine.where)
            session.interrupt()

    # -- the end ------------------------------------------------------------------------------------------------

    def dismiss(self) -> None:
        """End all waits."""
        with self._state_lock:
            waiting = list(self._due)
        for waiter in self.waiters():
            waiter.event.set()
        for session in waiting:
            session.interrupt()

    def close(self) -> None:
        """Close what nobody uses."""
        with self._state_lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def sessions(self) -> list[Wire]:
        """All that are open. (Without the lock: for a forked child.)"""
        return [*self._idle, *self._due]
