"""The parts that an engine provides for the statements: transactions, the gate, beacons and a sleeper."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from sqlsem.engines.base import Engine
from sqlsem.engines.optional import TableSession
from sqlsem.values.errors import ConfigurationError


class Result(Protocol):
    """The result of a statement that returns no rows: a cursor of the driver."""

    @property
    def rowcount(self) -> int:
        """The number of changed rows."""

    @property
    def lastrowid(self) -> int | None:
        """The number that the inserted row got."""


class Probe:
    """A test of a beacon, until the end of the ``with`` block."""

    def __init__(self, held: bool | None, seen: float | None = None) -> None:
        #: True: its member lives. False: its member is dead. None: there is no beacon of that name.
        self.held = held
        #: The last sign of life, in seconds since 1970, if it is known.
        self.seen = seen

    def remove(self) -> None:
        """Remove what a dead member has left, if there is anything."""

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End the test."""


class Beacons(Protocol):
    """Locks that members hold while they live, and that other members can test."""

    def probe(self, name: object) -> Probe:
        """Test a beacon. ``name`` is from the table, so any participant may have written it."""


class Sleeper:
    """Lets a waiter of this session sleep, until a session that grants its row notifies it. Waiters also poll: a
    notification may be missing, and it grants nothing. (This base class has no notifications.)
    """

    #: True if a notification ended the last successful wait.
    trusted = False

    @property
    def waits_for_rows(self) -> bool:
        """True if a waiter can sleep until a certain row is removed."""
        return False

    def listen(self, position: int) -> None:
        """Receive notifications for this position, until the next call or `stop`."""

    def stop(self) -> None:
        """Receive no more notifications."""

    def wait(self, seconds: float, wakeup: threading.Event) -> bool:
        """Sleep until ``seconds`` are over, ``wakeup`` is set or a notification arrives; return True for a
        notification.
        """
        wakeup.wait(seconds)
        return False

    def wait_for_row(self, position: int, seconds: float) -> bool:
        """Sleep until the row at this position is removed, up to ``seconds``; return False if that is not possible.
        Only for a sleeper that ``waits_for_rows``.
        """
        return False

    def recheck_seconds(self) -> float:
        """Return for how many seconds to poll after a notification."""
        return 0.0

    def notify(self, positions: Iterable[int]) -> None:
        """Notify the waiters at these positions. Does not raise or wait."""


class StatementEngine(Engine):
    """An engine of sessions that run statements."""

    has_schemas = False

    @property
    def writable(self) -> bool:
        """True if this login may change the tables, as far as the client knows."""
        return True


class StatementSession(TableSession):
    """One connection that runs the statements of client.sql by their names."""

    engine: StatementEngine
    sleeper: Sleeper
    member_id: int | None = None  # the member of the main session
    #: True if each heartbeat is written. Then the grace of a member without its beacon begins at the last one, and else
    #: when the beacon is first missed.
    writes_heartbeats = False
    #: Seconds by which the clocks of the database's nodes may differ. A lease counts for so much longer than its member
    #: relies on it.
    clock_margin = 0.0
    given_up = False  # True after the member was found removed: no further call can succeed

    def __init__(self, engine: StatementEngine) -> None:
        self.engine = engine
        self.options = engine.options
        self.queries: Mapping[str, str] = engine.queries()

    # -- statements -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def run(self, name: str, parameters: Any = ()) -> Result:
        """Run a statement that returns no rows."""

    @abc.abstractmethod
    def run_many(self, name: str, parameters: Sequence[Any]) -> None:
        """Run a statement once with each of these parameters, in an open transaction."""

    @abc.abstractmethod
    def rows(self, name: str, parameters: Any = ()) -> list[Any]:
        """Return the rows of a statement. A row gives its columns by name and by number."""

    def row(self, name: str, parameters: Any = ()) -> Any:
        """Return the first row of a statement, or None."""
        rows = self.rows(name, parameters)
        return rows[0] if rows else None

    # -- transactions ---------------------------------------------------------------------------------------------

    # Each transaction is entered as ``with self.forks_blocked, self.transaction():``. (The lock has an item of its own:
    # Python runs signal handlers at the beginning of an ``__exit__`` that is written in Python, and an exception of
    # one would keep the lock.)

    @property
    def forks_blocked(self) -> contextlib.AbstractContextManager[Any]:
        """A lock during which no fork begins, if a fork must not copy an open transaction."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Return a writing transaction, which is also the gate: it excludes all others, and sees their commits."""

    @abc.abstractmethod
    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Return a reading transaction, which sees one instant."""

    @abc.abstractmethod
    def roll_back(self) -> None:
        """Roll back an open transaction, if there is one."""

    def require_own_table(self) -> None:
        """Raise `ConfigurationError` if the table of the queue belongs to another schema or program: two schemas that
        share it would remove each other's rows.
        """
        if self.row("foreign_table") is not None:
            raise ConfigurationError(
                f"{self.engine.label}: there is a table {self.options.table} already, which does not belong to schema "
                f"{self.options.schema}; choose another name with --table",
                code="tables",
            )

    def settings(self) -> dict[str, str] | None:
        return None if self.row("version") is None else dict(self.rows("settings"))

    def recover(self) -> None:
        with self.forks_blocked:
            self.roll_back()

    @abc.abstractmethod
    def version(self) -> object:
        """Return a value that changes whenever another connection has written."""

    def insert(self, values: dict[str, Any]) -> int:
        """Insert the row of a request, in a writing transaction; return its position."""
        position = self.run("insert", values).lastrowid
        assert position is not None
        return position

    # -- members --------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def beacons(self) -> Beacons:
        """The beacons of all members."""

    @abc.abstractmethod
    def login(self) -> str:
        """Return the name of the user of this session."""

    @abc.abstractmethod
    def create_beacon(self) -> str | None:
        """Hold a new beacon in this session, in place of an earlier one, and return its name; return None if a lease
        replaces it.
        """

    @abc.abstractmethod
    def remove_beacon(self) -> None:
        """Remove the beacon of this session, if it has one."""

    def keep_beacon(self, member_id: int) -> bool:
        """Before a heartbeat: replace a beacon that others can no longer test. Return False if the member was removed
        meanwhile.
        """
        return True

    def touch_beacon(self) -> None:
        """Record a sign of life for displays, unless the last one is recent."""

    def follow_member(self) -> bool:
        """Note that the rows of this process's member are in the open database, in the transaction that has written
        them. Return False if its earlier rows are in another one.
        """
        return True

    # -- short ways, and work after commits -----------------------------------------------------------------------

    def register_alone(self, values: dict[str, Any]) -> int | None:
        """Grant a request on a resource without rows and settings, in one statement that is also under the gate. Return
        its position; None if that is not possible.
        """
        return None

    def leave_alone(self, values: dict[str, Any]) -> bool:
        """Release a row of a resource without other rows, in one statement that is also under the gate. Return False if
        that is not possible.
        """
        return False

    def write_back(self, at_once: bool = False) -> None:
        """Do the work that commits have put off, if there is much of it, or ``at_once``. No waiter depends on this
        session now.
        """

    def sweep_beacons(self) -> None:
        """Remove the beacons of processes that died before they registered, or after their member was removed."""


class BorrowedStatements(StatementSession):
    """Statements by a caller's cursor, in the caller's transaction: a base class before that of the session."""

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run_many(self, name: str, parameters: Sequence[Any]) -> None:
        for values in parameters:
            self.run(name, values)
