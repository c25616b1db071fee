"""A base of threads that check the database at regular intervals, for as long as this process needs it."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

from sqlsem.util.threads import ShouldContinue, SupervisedThread, log
from sqlsem.values.errors import SqlsemError

if TYPE_CHECKING:
    from sqlsem.client.connection.membership import Membership
    from sqlsem.client.connection.wait_pool import WaitConnectionPool
    from sqlsem.engines.base import Session

__all__ = ["Monitor"]

#: Seconds for which the thread waits for an answer.
ANSWER_SECONDS = 15.0
#: Seconds that the thread gets to end when a coordinator is closed.
CLOSE_SECONDS = 0.5


class Monitor(abc.ABC):
    """A thread that checks the database on a connection of its own: the main connection has to be free for heartbeats.

    The state lock guards the objects that a monitor watches. Call `begin` and `is_needed` with the lock held.
    """

    #: The thread's name, and what it checks for (``deadlocks``).
    name: ClassVar[str]
    purpose: ClassVar[str]

    def __init__(self, member: Membership, wait_pool: WaitConnectionPool) -> None:
        self.member = member
        self.wait_pool = wait_pool
        self.state_lock = member.state_lock
        self.thread = SupervisedThread(self.name, self.run, member.closing)
        self._session: Session | None = None

    @abc.abstractmethod
    def interval(self) -> float:
        """Return the seconds between two checks."""

    @abc.abstractmethod
    def is_needed(self) -> bool:
        """Return True while there is something to check."""

    @abc.abstractmethod
    def check(self, session: Session) -> None:
        """Check the database once."""

    def begin(self) -> None:
        """Start the thread, if it does not run."""
        if not self.member.closing.is_set():
            try:
                self.thread.begin()
            except RuntimeError as exc:  # no more threads, or this process is ending
                log.warning("Cannot start the thread that checks for %s, retrying: %s", self.purpose, exc)

    def run(self, should_continue: ShouldContinue) -> None:
        """Check at each interval until the monitor is no longer needed. Runs in the thread."""
        while True:
            self.member.closing.wait(self.interval())
            with self.state_lock:
                if not should_continue() or not self.is_needed():
                    # Under the lock, so that the next `begin` sees that it must start a thread.
                    session, self._session = self._session, None
                    self.thread.stop_supervising()
                    break
            try:
                if self._session is None:
                    self._session = self.wait_pool.take_idle()
                if self._session is None:
                    self._session = self.member.engine.connect("wait")
                with self.wait_pool.expecting_answer(self._session, ANSWER_SECONDS):
                    self.check(self._session)
            except Exception as exc:
                if not self.member.closing.is_set():
                    is_ours = isinstance(exc, SqlsemError)
                    log.warning("Cannot check for %s, retrying: %s", self.purpose, exc, exc_info=not is_ours)
                session, self._session = self._session, None
                if session is not None:
                    session.close()
        if session is not None:
            self.wait_pool.put_idle(session)

    def close(self) -> None:
        """Wait for the thread, which ends by itself."""
        self.thread.join(CLOSE_SECONDS)

    def sessions(self) -> list[Session]:
        """Return the open connection, if there is one. (For a forked child.)"""
        return [] if self._session is None else [self._session]
