"""What one has while inside, for threads; and what all faces do with it, as generators."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

from sqlsem.core.convert import Upgrade, downgrade
from sqlsem.core.cursors import cursor_of, refuse_autocommit, refused
from sqlsem.core.holdings import BaseGrant, Holding
from sqlsem.core.process import Process
from sqlsem.core.steps import Operations, carry_out, drive
from sqlsem.model import Duration

__all__ = ["Grant", "asserting", "checking"]


def checking(process: Process, holding: Holding) -> Operations[None]:
    """Ask the database whether it is still held; raises `LockLost` or `NotHeld` when not."""
    holding.require()
    yield from process.member.pinging()
    holding.require()


def asserting(process: Process, holding: Holding, given: Any) -> Generator[Any, Any, None]:
    """`Grant.assert_held`, yielding what the cursor's methods return, so that it can be awaited where it has to be."""
    holding.require()
    cursor = cursor_of(given)
    refuse_autocommit(cursor)
    for ticket in holding.tickets:
        try:
            there = yield from process.engine.pinning(cursor, ticket)
        except Exception as exc:
            refusal = refused(exc)
            if refusal is None:
                raise
            raise refusal from exc
        if not there:
            process.lose([ticket.position], "its row is no longer in the table")
            holding.require()


class Grant(BaseGrant):
    """What one has while inside: made by acquiring, ended by releasing. Safe to use from several threads.

    Attributes:
        resource: The resource's name (of the first one, for ``all_of``).
        position: The number in the queue (``queue_position`` in the table).
        positions: Each resource's position.
        fence: A number that grows with every grant of a mutex; store it with what you write, and refuse smaller ones.
        waited: Seconds between asking and being let in.
    """

    _event: threading.Event | None = None
    _wanted: threading.Event | None = None

    def __init__(self, process: Process, holding: Holding, waited: float) -> None:
        super().__init__(holding, waited)
        self._process = process

    @property
    def lost(self) -> bool:
        """Whether the lock is lost. Answered from memory, except right after this process was paused for long:
        then the database is asked, for a second at most.
        """
        if self.holding.why_lost is None and not self.holding.released:
            self._process.member.verify()
        return self.holding.why_lost is not None

    @property
    def lost_event(self) -> threading.Event:
        """An event that is set when the lock is lost, for those who wait."""
        if self._event is None:
            with self._process.state_lock:
                if self._event is None:
                    event = threading.Event()
                    self.holding.when_lost.append(event.set)
                    self._event = event
            if self.holding.why_lost is not None:
                self._event.set()
        return self._event

    @property
    def wanted(self) -> threading.Event:
        """An event that is set when somebody waits behind this grant, for those who can give way.

        Those of this process are told of at once, others within about a second. Looking for them begins with the first
        use of this attribute, and is one statement a second for the whole process. It stays set, also if they give up;
        clear it to be told again.

        >>> with sqlsem.mutex("reports") as grant:  # doctest: +SKIP
        ...     while rows and not grant.wanted.is_set():
        ...         rebuild(rows.pop())
        """
        event = self._wanted
        if event is None:
            event = self.__dict__.setdefault("_wanted", threading.Event())  # one, whoever else comes here
            self._process.wanted.add(self.holding, event.is_set, event.set)
        return event

    def check(self) -> None:
        """Ask the database, now, whether the lock is still held; raises `LockLost` or `NotHeld` when not.

        >>> with sqlsem.mutex("nightly") as grant:  # doctest: +SKIP
        ...     for part in parts:
        ...         grant.check()
        ...         load(part)
        """
        drive(checking(self._process, self.holding), self._process.perform)

    def assert_held(self, cursor: Any) -> None:
        """Check inside the caller's own transaction that the lock is held, and keep it held until that ends.

        ``cursor`` is a DB-API cursor on the *same database* (psycopg, pyodbc, sqlite3 …) with a transaction open, or a
        ``Connection`` or ``Session`` of SQLAlchemy; what is written in that transaction can then never be committed
        beside another holder. Commit before leaving the block.

        Raises `LockLost`, and `ConfigurationError` for a cursor in autocommit mode, where it would protect nothing.
        """
        drive(asserting(self._process, self.holding, cursor), lambda answer: answer)

    def upgrade(self, timeout: Duration | None = None) -> None:
        """Become the writer, without letting go: wait until all other readers have left, while nobody new is let in.

        Args:
            timeout: How long to wait at most (``60``, ``"1m"``); None: for ever; 0: only if nobody else is inside.

        Raises:
            Timeout: Not had in time; it is a reader as before.
            Deadlock: Another reader is upgrading, and each would wait for the other. Release one, then ask to write.
            LockLost: It was lost while it waited.
            ConfigurationError: This is no reader (or one of several resources).

        >>> with sqlsem.read("prices") as grant:  # doctest: +SKIP
        ...     if outdated():
        ...         grant.upgrade(timeout=60)
        ...         reload()
        """
        carry_out(Upgrade(self._process, self.holding, timeout, threading.Event()), self._process.perform)

    def downgrade(self) -> None:
        """Become a reader, without letting go: readers that wait right behind are let in, writers are not.

        Raises `ConfigurationError` when this is no writer (or one of several resources, or held several times), and
        `LockLost`.
        """
        drive(downgrade(self._process, self.holding), self._process.perform)

    def release(self) -> None:
        """Give the lock back, from any thread. Raises `NotHeld` when done before, `LockLost` when it was lost."""
        drive(self._process.holdings.give_back(self), self._process.perform)
