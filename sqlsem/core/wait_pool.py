"""The sessions in which those of this process wait who are the first of their line (`sqlsem.core.waiter_queues`)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from sqlsem.core.membership import Membership
from sqlsem.core.permits import Permit, PermitPool
from sqlsem.core.threads import voice
from sqlsem.engines.base import EngineConnection, Session
from sqlsem.model import monotonic

__all__ = ["MOST_IDLE_SESSIONS", "MOST_WAITING_SESSIONS", "WaitConnectionPool"]

log = voice

#: Connections that may wait in the database at the same time; of more, those that are left are looked at together.
MOST_WAITING_SESSIONS = 8
#: Connections kept for the next wait. With the main session that makes three.
MOST_IDLE_SESSIONS = 2
#: Seconds by which the answer to a wait may be late, at the least.
OVERDUE_SECONDS = 3.0


class PooledConnection(Permit):
    """Where one of ours waits, for as long as a ``with`` block lasts. (No generator, which takes longer to end: what it
    waited for is nobody's meanwhile.)
    """

    __slots__ = ("_room", "session", "timeout")

    def __init__(self, room: WaitConnectionPool, timeout: float) -> None:
        self._room = room
        self.timeout = timeout
        self.session: Session | None = None

    def __enter__(self) -> Session | None:
        try:
            return self._room.sit(self)
        except BaseException:
            self._room.rise(self, False)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._room.rise(self, kind is None)


class WaitConnectionPool:
    """A small pool of sessions."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._engine = member.engine
        self._state_lock = member.state_lock
        self._idle: list[Session] = []
        #: Sessions that wait, and until when the answer is due. (What an interrupt leaves of one is not kept here.)
        self._due: weakref.WeakKeyDictionary[EngineConnection, float] = weakref.WeakKeyDictionary()
        self._places = PermitPool(MOST_WAITING_SESSIONS)

    def session(self, timeout: float) -> PooledConnection:
        """For a ``with`` block: a session to wait in, or None when too many of ours wait already."""
        return PooledConnection(self, timeout)

    def sit(self, seat: PooledConnection) -> Session | None:
        """The session that is its own until `rise`."""
        if not self._places.take(seat):
            return None
        seat.session = self.idle_session()
        if seat.session is None:
            seat.session = self._engine.connect("wait")
        self._await(seat.session, seat.timeout)
        return seat.session

    def rise(self, seat: PooledConnection, sound: bool) -> None:
        """It has waited; ``sound``: its session serves the next one."""
        session = seat.session
        # (All in one, as the grant that ends a wait is not its owner's before.)
        with self._state_lock:
            self._places.give_back(seat)
            if session is not None:
                self._due.pop(session, None)
                sound = sound and self._keep(session)
        if session is not None and not sound:
            session.close()

    def idle_session(self) -> Session | None:
        """One that nobody uses, if there is one; `keep` takes it back."""
        with self._state_lock:
            return self._idle.pop() if self._idle else None

    def keep(self, session: Session) -> None:
        """Keep a session that is in order for the next wait, or close it."""
        with self._state_lock:
            kept = self._keep(session)
        if not kept:
            session.close()

    def _keep(self, session: Session) -> bool:
        kept = not self._member.closing.is_set() and len(self._idle) < MOST_IDLE_SESSIONS
        if kept:
            self._idle.append(session)
        return kept

    @contextlib.contextmanager
    def awaiting(self, session: EngineConnection, timeout: float) -> Iterator[None]:
        """While a session waits it is interrupted when its answer is overdue, and when its coordinator is closed."""
        try:
            self._await(session, timeout)
            yield
        finally:
            with self._state_lock:
                self._due.pop(session, None)

    def _await(self, session: EngineConnection, timeout: float) -> None:
        with self._state_lock:
            self._due[session] = monotonic() + timeout + max(OVERDUE_SECONDS, self._member.trust)
        self._member.main.require_open()

    def interrupt_overdue(self) -> None:
        """End waits whose answer is overdue: the line may be dead without a word."""
        now = monotonic()
        with self._state_lock:
            overdue = [session for session, due in self._due.items() if due < now]
        for session in overdue:
            log.warning("%s does not answer a wait; dropping the connection", self._engine.label)
            session.interrupt()

    # -- the end ------------------------------------------------------------------------------------------------

    def dismiss(self) -> None:
        """End all waits."""
        with self._state_lock:
            waiting = list(self._due)
        for session in waiting:
            session.interrupt()

    def close(self) -> None:
        """Close what nobody uses."""
        with self._state_lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def sessions(self) -> list[EngineConnection]:
        """All that are open. (Without the lock: for a forked child.)"""
        return [*self._idle, *self._due]
