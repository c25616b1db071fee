"""What one has while inside."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from sqlsem.conversions import Conversion
from sqlsem.cursors import cursor_of, refuse_autocommit, refused
from sqlsem.errors import LockLost, NotHeld, Timeout
from sqlsem.model import Duration, Request, Ticket, check_duration
from sqlsem.options import LostCallback
from sqlsem.protocol import Operations, drive

if TYPE_CHECKING:
    from sqlsem.acquisition import Me
    from sqlsem.coordinator import Coordinator

__all__ = ["BaseGrant", "Grant", "LostCallback"]


class BaseGrant:
    """What the grants of all faces have in common; its attributes are those of `Grant`."""

    def __init__(
        self,
        coordinator: Coordinator,
        requests: Sequence[Request],
        tickets: Sequence[Ticket],
        me: Me,
        waited: float,
        on_lost: LostCallback | None,
    ) -> None:
        self._coordinator = coordinator
        self._requests = tuple(requests)
        self._tickets = tuple(tickets)
        self._owner = me.number
        self._on_lost = on_lost
        self._pid = os.getpid()
        self._depth = 1
        self._released = False
        self._is_loose = False  # anybody may release it, through the lock (`sqlsem.locks`)
        self._why_lost: str | None = None
        self._converting = False
        self._turn = 0  # grows with each attempt to convert it
        self.resource = tickets[0].resource
        self.position = tickets[0].position
        self.positions = {ticket.resource: ticket.position for ticket in tickets}
        self.fence = self.position
        self.waited = waited

    def __reduce__(self) -> str:
        raise NotHeld(
            f"{self!r} belongs to this process and cannot be pickled; acquire the lock in the process that needs it",
            resource=self.resource,
        )

    def _lose(self, why: str) -> None:
        self._why_lost = why

    def _checking(self) -> Operations[None]:
        self._require()
        yield from self._coordinator._member.pinging()
        self._require()

    def _upgrading(self, timeout: Duration | None) -> Operations[None]:
        seconds = None if timeout is None else check_duration("timeout", timeout)
        if not (yield from Conversion(self, self._new_event()).upgrade(seconds)):
            raise Timeout(
                f"The reader of {self.resource!r} at position {self.position} did not become the writer within "
                f"{seconds:g} s, and reads on; see who else is inside with: sqlsem ls",
                resource=self.resource,
            )

    def _downgrading(self) -> Operations[None]:
        yield from Conversion(self, self._new_event()).downgrade()

    def _new_event(self) -> threading.Event:
        """Wakes whoever waits in the face's own way."""
        return threading.Event()

    def _access(self, access: str) -> None:
        """What it is from now on."""
        self._requests = (dataclasses.replace(self._requests[0], access=access),)

    def _asserting(self, given: Any) -> Generator[Any, Any, None]:
        """`assert_held`, yielding what the cursor's methods return, so that it can be awaited where it has to be."""
        self._require()
        cursor = cursor_of(given)
        refuse_autocommit(cursor)
        for ticket in self._tickets:
            try:
                there = yield from self._coordinator.engine.pinning(cursor, ticket)
            except Exception as exc:
                refusal = refused(exc)
                if refusal is None:
                    raise
                raise refusal from exc
            self._pinned(ticket, there)

    def _pinned(self, ticket: Ticket, there: bool) -> None:
        if not there:
            self._coordinator.lose([ticket.position], "its row is no longer in the table")
            self._require()

    def _abandon(self) -> None:
        if self._depth > 1:
            self._depth -= 1
        else:
            self._coordinator._abandon(self)

    def _require(self) -> None:
        if self._pid != os.getpid():
            raise NotHeld(
                f"The lock on {self.resource!r} was acquired by process {self._pid}, before it forked; "
                f"acquire one in this process",
                resource=self.resource,
            )
        if self._why_lost is not None:
            raise LockLost(
                f"The lock on {self.resource!r} at position {self.position} is lost: {self._why_lost}; what was done "
                f"since may have run beside another holder",
                resource=self.resource,
            )
        if self._released:
            raise NotHeld(f"The lock on {self.resource!r} has been released", resource=self.resource)

    def __repr__(self) -> str:
        state = "released" if self._released else "lost" if self._why_lost else "held"
        return f"<Grant {self.resource!r} at {self.position}, {state}>"


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

    @property
    def lost(self) -> bool:
        """Whether the lock is lost. Answered from memory, except right after this process was paused for long:
        then the database is asked, for a second at most.
        """
        if self._why_lost is None and not self._released:
            self._coordinator._member.doubt()
        return self._why_lost is not None

    @property
    def lost_event(self) -> threading.Event:
        """An event that is set when the lock is lost, for those who wait."""
        if self._event is None:
            with self._coordinator._state_lock:
                self._event = self._event or threading.Event()
            if self._why_lost is not None:
                self._event.set()
        return self._event

    def _lose(self, why: str) -> None:
        super()._lose(why)
        if self._event is not None:  # read after the flag was set, as lost_event does it the other way round
            self._event.set()

    def check(self) -> None:
        """Ask the database, now, whether the lock is still held; raises `LockLost` or `NotHeld` when not.

        >>> with sqlsem.mutex("nightly") as grant:  # doctest: +SKIP
        ...     for part in parts:
        ...         grant.check()
        ...         load(part)
        """
        drive(self._checking(), self._coordinator._perform)

    def assert_held(self, cursor: Any) -> None:
        """Check inside the caller's own transaction that the lock is held, and keep it held until that ends.

        ``cursor`` is a DB-API cursor on the *same database* (psycopg, pyodbc, sqlite3 …) with a transaction open, or a
        ``Connection`` or ``Session`` of SQLAlchemy; what is written in that transaction can then never be committed
        beside another holder. Commit before leaving the block.

        Raises `LockLost`, and `ConfigurationError` for a cursor in autocommit mode, where it would protect nothing.
        """
        drive(self._asserting(cursor), lambda answer: answer)

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
        drive(self._upgrading(timeout), self._coordinator._perform)

    def downgrade(self) -> None:
        """Become a reader, without letting go: readers that wait right behind are let in, writers are not.

        Raises `ConfigurationError` when this is no writer (or one of several resources, or held several times), and
        `LockLost`.
        """
        drive(self._downgrading(), self._coordinator._perform)

    def release(self) -> None:
        """Give the lock back, from any thread. Raises `NotHeld` when done before, `LockLost` when it was lost."""
        drive(self._coordinator._give_back(self), self._coordinator._perform)
