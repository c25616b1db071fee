"""Real databases in a simulation: their tables stand for `sqlsem.testing.server.Server`, and are looked at after steps.

The actors' sessions are those that ship, with a step before each statement; so what is searched for here are the
interleavings that the real SQL allows. Nothing in the database tells of what happens there: what has changed is read
out of the tables by a session of our own.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, ClassVar, Protocol

from sqlsem.engines.base import Engine, Options, Session
from sqlsem.errors import ConfigurationError, Unavailable
from sqlsem.insight.audit import Finding, audit
from sqlsem.testing.faults import Trouble
from sqlsem.testing.fibers import Fibers

__all__ = ["OURS", "Connected", "RealServer", "Row"]

#: Of the history so many rows are audited at the end.
MOST_PAST = 100_000
#: Outcomes of who did not leave by its own will.
TAKEN_AWAY = ("reaped", "revoked", "lost")
#: After so long an operator tries again who met a locked file.
AGAIN_SECONDS = 1.0
#: Who we are, who look on.
OURS = "us"


class Connected(Protocol):
    """A session of an actor's, as faults see it."""

    owner: str
    cut: bool

    def end(self) -> None:
        """The database notices that nobody is there any more."""

    def drop(self) -> None:
        """The database notices that the connection is broken."""

    def lose(self) -> None:
        """The connection breaks."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the queue."""

    resource: str
    position: int
    host: str | None  # the actor
    requesting_id: str
    granted: bool
    revoked: bool


class _Operator:
    """Does what operators do, beside the processes."""

    name = "operator"
    dead = False
    runs = True
    paused_until = -math.inf

    def __repr__(self) -> str:
        return self.name


class RealServer(abc.ABC):
    """What a simulation needs of a database. As `sqlsem.testing.server.Server`, whose attributes these are."""

    #: What can go wrong there.
    faults: ClassVar[tuple[str, ...]]
    #: By the clock of the database the simulation begins here.
    beginning = datetime(2000, 1, 1, tzinfo=timezone.utc)

    def __init__(self, fibers: Fibers) -> None:
        self.fibers = fibers
        self.skew = 0.0
        self.seed = 0  # of the run
        self.stalled_until = -math.inf  # the server stands still
        self.sessions: list[Connected] = []
        self.removed: Callable[[Any, str], object] = lambda row, why: None
        self.let_in: set[int] = set()
        self.released: set[int] = set()  # given back by their owners
        self._there: dict[int, Row] = {}
        self._stepped = False  # whether the clock was set: then no times can be compared
        self._group = _Operator()
        self._acts: deque[Callable[[Session], object]] = deque()  # what it has still to do

    @property
    def clock(self) -> float:
        """Seconds since 1970, by the clock of the database."""
        return self.beginning.timestamp() + self.fibers.now + self.skew

    @abc.abstractmethod
    def engine(self, options: Options, owner: str) -> Engine:
        """It, as one process sees it."""

    @abc.abstractmethod
    def transaction(self, engine: Engine) -> contextlib.AbstractContextManager[Any]:
        """See `sqlsem.testing.world.Actor.transaction`."""

    @property
    @abc.abstractmethod
    def own(self) -> Session:
        """A session of our own, for looks."""

    @abc.abstractmethod
    def has_changed(self) -> bool:
        """Whether anything may have been written since this was asked last."""

    @abc.abstractmethod
    def rows(self) -> list[Row]:
        """The queues."""

    @abc.abstractmethod
    def close(self) -> None:
        """The simulation is over."""

    # -- looks ----------------------------------------------------------------------------------------------------

    def notice(self) -> None:
        """After each step: tell of what has left against its owner's will."""
        if not self.has_changed():
            return
        now = {row.position: row for row in self.rows()}
        gone = [row for position, row in self._there.items() if position not in now]
        self._there = now
        self.let_in.update(position for position, row in now.items() if row.granted)
        for row in gone:
            ended = [hold for hold in self.own.history(row.resource, 100) if hold.position == row.position]
            why = ended[0].outcome if ended else "removed without a trace"
            if why in TAKEN_AWAY or not ended:
                self.removed(row, why)
            else:
                self.released.add(row.position)

    def rows_on(self, resource: str) -> list[Row]:
        return [row for row in self.rows() if row.resource == resource]

    def resources(self) -> list[str]:
        """Whose queues are not empty."""
        return sorted({row.resource for row in self.rows()})

    def findings(self) -> Iterable[Finding]:
        """What the audit of the history finds."""
        self.notice()
        return () if self._stepped else audit(self.own.history(None, MOST_PAST)).findings

    def reap(self) -> None:
        """At the end: remove whoever is dead, when nobody else is there any more."""
        for session in [one for one in self.sessions if one.owner != OURS]:
            session.end()
        self.own.reap()

    # -- what operators do, and what goes wrong -------------------------------------------------------------------

    def operate(self, call: Callable[[Session], object]) -> None:
        """Have an operator do something, beside all others, and after what he was told before."""
        self._acts.append(call)
        if len(self._acts) == 1:
            self.fibers.spawn("operator", self._group, self._operate)

    def _operate(self) -> None:
        while self._acts:
            session = None
            try:
                session = self.engine(Options(), self._group.name).connect("look")
                self._acts[0](session)
            except ConfigurationError:
                pass  # it cannot be set just now, as a cap that somebody counts on
            except Unavailable:  # somebody kept the file locked for too long
                self.fibers.sleep(AGAIN_SECONDS)
                continue
            finally:
                if session is not None:
                    session.close()
            self._acts.popleft()

    def pause(self, resource: str, paused: bool) -> None:
        self.operate(lambda session: session.set_resource(resource, "paused", int(paused)))

    def set_cap(self, resource: str, cap: int | None) -> None:
        self.operate(lambda session: session.set_resource(resource, "cap", cap))

    def revoke(self, position: int) -> None:
        self.operate(functools.partial(_revoke, position=position))

    def reap_all(self) -> None:
        self.operate(lambda session: session.reap())

    def set_clock(self, seconds: float) -> None:
        """The clock is set."""
        raise Trouble("this database's clock is the host's")

    def stall(self, seconds: float) -> None:
        """The server stands still for so long."""
        raise Trouble("there is no server")

    def moves(self) -> bool:
        """Whether somebody can go on without anything else that could happen. (Asked where nothing will.)"""
        return False

    def restart(self, seconds: float) -> None:
        raise Trouble("a server that others use is not restarted")

    def fail_over(self, forget: int, seconds: float) -> None:
        raise Trouble("it has no standby")


def _revoke(session: Session, position: int) -> None:
    session.revoke(position, False)
