"""The databases of simulations: SQLite's engine in memory and on files, and PostgreSQL.

The actors' sessions are the shipped ones, divided into steps. So this searches the interleavings that the real SQL
allows. The database reports nothing: after each step the simulation reads the tables in a session of its own, to see
the changes.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, ClassVar, Protocol

from sqlsem.engines.base import Engine, Options, Session
from sqlsem.insight.audit import Finding, audit
from sqlsem.testing.fibers import Fibers
from sqlsem.values.errors import ConfigurationError, Unavailable

__all__ = ["OURS", "Connected", "Group", "RealServer", "Row", "Trouble"]

#: Audit at most this many rows of the history at the end.
MAX_PAST = 100_000
#: The outcomes of rows that were removed against their owner's will.
EVICTED = ("reaped", "revoked", "lost")
#: The pause after which an operator's call that found the file locked is tried again.
AGAIN_SECONDS = 1.0
#: The owner of the session with which the simulation reads the tables.
OURS = "us"


class Trouble(Exception):
    """Raised if a fault cannot happen now."""


class Connected(Protocol):
    """A session of an actor, as faults see it."""

    owner: str
    cut: bool

    def end(self) -> None:
        """End the session in the database, as its process is gone."""

    def drop(self) -> None:
        """End the session in the database, as its connection is broken."""

    def lose(self) -> None:
        """Break the connection; the database does not notice yet."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the queue."""

    resource: str
    position: int
    host: str | None  # the name of the actor
    requesting_id: str
    granted: bool
    revoked: bool


class Group:
    """The group of fibers beside the processes, of an operator or of the server: it always runs."""

    dead = False
    runs = True
    paused_until = -math.inf

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class RealServer(abc.ABC):
    """The interface of a database for `World` and `Faults`."""

    #: The faults that can happen there.
    faults: ClassVar[tuple[str, ...]]
    #: The time at which the simulation begins, by the clock of the database.
    beginning = datetime(2000, 1, 1, tzinfo=timezone.utc)
    #: The session with which the simulation reads the tables.
    own: Session

    def __init__(self, fibers: Fibers) -> None:
        self.fibers = fibers
        self.skew = 0.0
        self.seed = 0  # of the run
        self.stalled_until = -math.inf  # the server does nothing until then
        self.sessions: list[Connected] = []
        self.removed: Callable[[Any, str], object] = lambda row, why: None
        self.ever_granted: set[int] = set()
        self.released: set[int] = set()  # positions that their owners have released
        self._known_rows: dict[int, Row] = {}
        self._stepped = False  # True if the clock was set: then times cannot be compared
        self._group = Group("operator")
        self._operator_calls: deque[Callable[[Session], object]] = deque()  # calls that are still to be made

    @property
    def clock(self) -> float:
        """Return the seconds since 1970, by the clock of the database."""
        return self.beginning.timestamp() + self.fibers.now + self.skew

    @abc.abstractmethod
    def engine(self, options: Options, owner: str) -> Engine:
        """Return the engine of one process."""

    @abc.abstractmethod
    def transaction(self, engine: Engine) -> contextlib.AbstractContextManager[Any]:
        """See `sqlsem.testing.world.Actor.transaction`."""

    @abc.abstractmethod
    def has_changed(self) -> bool:
        """Return True if anything may have been written since the last call."""

    @abc.abstractmethod
    def rows(self) -> list[Row]:
        """Return the queues."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the simulation."""

    # -- reading -----------------------------------------------------------------------------------------------------

    def notice(self) -> None:
        """After each step, report the rows that were removed against their owner's will."""
        if not self.has_changed():
            return
        now = {row.position: row for row in self.rows()}
        gone = [row for position, row in self._known_rows.items() if position not in now]
        self._known_rows = now
        self.ever_granted.update(position for position, row in now.items() if row.granted)
        for row in gone:
            outcome = self.outcome(row)
            if outcome is None or outcome in EVICTED:
                self.removed(row, outcome or "removed without a trace")
            else:
                self.released.add(row.position)

    def outcome(self, row: Row) -> str | None:
        """Return the outcome of a row that is gone; None if the history lacks it."""
        ended = (hold for hold in self.own.history(row.resource, 100) if hold.position == row.position)
        return next((hold.outcome for hold in ended), None)

    def rows_on(self, resource: str) -> list[Row]:
        return [row for row in self.rows() if row.resource == resource]

    def resources(self) -> list[str]:
        """Return the resources with rows."""
        return sorted({row.resource for row in self.rows()})

    def findings(self) -> Iterable[Finding]:
        """Return the findings of the audit of the history."""
        self.notice()
        return () if self._stepped else audit(self.own.history(None, MAX_PAST)).findings

    def reap(self) -> None:
        """At the end, after all processes, remove dead members."""
        for session in [session for session in self.sessions if session.owner != OURS]:
            session.end()
        self.own.reap()

    # -- operators and faults ----------------------------------------------------------------------------------------

    def operate(self, call: Callable[[Session], object]) -> None:
        """Let an operator make a call, beside all processes, and after the operator's earlier calls."""
        self._operator_calls.append(call)
        if len(self._operator_calls) == 1:
            self.fibers.spawn("operator", self._group, self._operate)

    def _operate(self) -> None:
        while self._operator_calls:
            session = None
            try:
                session = self.engine(Options(), self._group.name).connect("look")
                self._operator_calls[0](session)
            except ConfigurationError:
                pass  # the database refuses it now, like lifting a cap that a request relies on
            except Unavailable:  # the file was locked for too long
                self.fibers.sleep(AGAIN_SECONDS)
                continue
            finally:
                if session is not None:
                    session.close()
            self._operator_calls.popleft()

    def pause(self, resource: str, paused: bool) -> None:
        self.operate(lambda session: session.set_resource(resource, "paused", int(paused)))

    def set_cap(self, resource: str, cap: int | None) -> None:
        self.operate(lambda session: session.set_resource(resource, "cap", cap))

    def revoke(self, position: int) -> None:
        self.operate(lambda session: session.revoke(position, False))

    def reap_all(self) -> None:
        self.operate(lambda session: session.reap())

    def set_clock(self, seconds: float) -> None:
        """Set the clock forward or back."""
        if seconds > 0 and self.counts_time():
            raise Trouble("it would count as time that has passed")
        self.skew += seconds
        self._stepped = True

    def counts_time(self) -> bool:
        """Return True if some decision depends on the time that has passed."""
        return True

    def stall(self, seconds: float) -> None:
        """Stop the server for so many seconds."""
        self.stalled_until = self.fibers.now + seconds

    def moves(self) -> bool:
        """Return True if a fiber can go on without an event of the simulation. (Called when no event is left.)"""
        return False

    def restart(self, seconds: float) -> None:
        raise Trouble("a server that others use is not restarted")

    def fail_over(self, lost_changes: int, seconds: float) -> None:
        raise Trouble("it has no standby")
