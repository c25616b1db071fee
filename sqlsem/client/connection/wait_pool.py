"""A small pool of connections on which the waiters of this process block: heads of queues, and upgrading readers.

Waits whose answer is overdue are interrupted, and so are all waits when the coordinator is closed. After an interrupt
in the program no connection stays counted as used (`sqlsem.util.permits`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlsem.util.permits import Permit, PermitPool
from sqlsem.util.threads import log
from sqlsem.values.locks import monotonic

if TYPE_CHECKING:
    from sqlsem.client.connection.membership import Membership
    from sqlsem.engines.base import EngineConnection, Session

__all__ = ["MAX_BLOCKED_CONNECTIONS", "MAX_IDLE_CONNECTIONS", "WaitConnectionPool"]

#: Connections on which waiters may block at the same time. The remaining waiters are polled together.
MAX_BLOCKED_CONNECTIONS = 8
#: The greatest number of idle connections. With the main connection that makes three.
MAX_IDLE_CONNECTIONS = 2
#: An answer to a wait counts as overdue at this many seconds after the wait's timeout, at the earliest.
OVERDUE_SECONDS = 3.0


class PooledConnection(Permit):
    """A connection to wait on, for a ``with`` block. (It is no generator, which would take longer to end: until then
    the granted lock has no owner.)
    """

    __slots__ = ("_pool", "session", "timeout")

    def __init__(self, pool: WaitConnectionPool, timeout: float) -> None:
        self._pool = pool
        self.timeout = timeout
        self.session: Session | None = None

    def __enter__(self) -> Session | None:
        try:
            return self._pool.acquire(self)
        except BaseException:
            self._pool.release(self, False)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.release(self, kind is None)


class WaitConnectionPool:
    """The connections on which waiters block, and idle connections for the next waits."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._engine = member.engine
        self._state_lock = member.state_lock
        self._idle: list[Session] = []
        #: Waiting connections, and when each answer is due. (Weak: an interrupt may leave one here.)
        self._due: weakref.WeakKeyDictionary[EngineConnection, float] = weakref.WeakKeyDictionary()
        self._permits = PermitPool(MAX_BLOCKED_CONNECTIONS)

    def connection(self, timeout: float) -> PooledConnection:
        """Return a context manager that gives a connection to wait on, or None if all of them are in use."""
        return PooledConnection(self, timeout)

    def acquire(self, connection: PooledConnection) -> Session | None:
        """Give the caller a session until `release`; None if all connections are in use."""
        if not self._permits.acquire(connection):
            return None
        connection.session = self.take_idle()
        if connection.session is None:
            connection.session = self._engine.connect("wait")
        self._expect_answer(connection.session, connection.timeout)
        return connection.session

    def release(self, connection: PooledConnection, usable: bool) -> None:
        """End a wait. A ``usable`` session is kept for the next one."""
        session = connection.session
        # (Under one lock: until the wait has ended, the grant has no owner.)
        with self._state_lock:
            self._permits.release(connection)
            if session is not None:
                self._due.pop(session, None)
                usable = usable and self._keep(session)
        if session is not None and not usable:
            session.close()

    def take_idle(self) -> Session | None:
        """Return an idle session, if there is one. Return it with `put_idle`."""
        with self._state_lock:
            return self._idle.pop() if self._idle else None

    def put_idle(self, session: Session) -> None:
        """Keep a working session for the next wait, or close it if there are enough."""
        with self._state_lock:
            kept = self._keep(session)
        if not kept:
            session.close()

    def _keep(self, session: Session) -> bool:
        kept = not self._member.closing.is_set() and len(self._idle) < MAX_IDLE_CONNECTIONS
        if kept:
            self._idle.append(session)
        return kept

    @contextlib.contextmanager
    def expecting_answer(self, session: EngineConnection, timeout: float) -> Iterator[None]:
        """Interrupt the session if its answer is overdue in this block, and when the coordinator is closed."""
        try:
            self._expect_answer(session, timeout)
            yield
        finally:
            with self._state_lock:
                self._due.pop(session, None)

    def _expect_answer(self, session: EngineConnection, timeout: float) -> None:
        with self._state_lock:
            self._due[session] = monotonic() + timeout + max(OVERDUE_SECONDS, self._member.main.answer_seconds)
        self._member.main.require_open()

    def interrupt_overdue(self) -> None:
        """Interrupt the waits whose answer is overdue: the network may have failed without an error."""
        now = monotonic()
        with self._state_lock:
            overdue = [session for session, due in self._due.items() if due < now]
        for session in overdue:
            log.warning("%s does not answer a wait; dropping the connection", self._engine.label)
            session.interrupt()

    # -- closing ------------------------------------------------------------------------------------------------

    def interrupt_all(self) -> None:
        """Interrupt all waits."""
        with self._state_lock:
            waiting = list(self._due)
        for session in waiting:
            session.interrupt()

    def close_idle(self) -> None:
        """Close the idle connections."""
        with self._state_lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def sessions(self) -> list[EngineConnection]:
        """Return all open connections. (Takes no lock: for a forked child.)"""
        return [*self._idle, *self._due]
