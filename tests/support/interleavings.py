"""Run all interleavings of a few sessions' steps: real sessions, one step at a time, every order once.

A *scenario* makes *actors*. Each actor has a session of its own, and makes one call on it after the other. A call is
cut into steps, between which other actors can run:

    PostgreSQL   the call, in a transaction; its commit
    SQLite       each statement outside a transaction, and each transaction (no other session can write in the middle of
    one, and its reads are of its beginning)
    SQL Server   the call: its procedures are transactions of their own

`explore` runs the scenario again and again, with new names each time, until every order of these steps was run. A step
that waits for another session's lock (``pg_blocking_pids``) stays under way until that lock is free, while the others
go on, as PostgreSQL's isolationtester does it. After every step the scenario checks the committed rows of the table.

The search over all orders is stateless: depth first, by the choices made so far (Godefroid 1997, VeriSoft).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from support.databases import Database
from support.patience import PATIENCE

#: A call of an actor: its name, and a function of its session. `Actor.answers` keeps the results.
Call = tuple[str, Callable[[Any], Any]]


#: Called by a player where other actors may run.
Pause = Callable[..., None]


@dataclass(eq=False)
class Actor:
    """A session, and the calls that it makes one after the other."""

    name: str
    session: Any
    calls: list[Call]
    answers: dict[str, Any] = field(default_factory=dict)
    #: Called when a call is committed.
    done: Callable[[str, Any], None] | None = None


class Stopped(Exception):
    """Ends an actor's thread when the schedule ends early, because a step failed."""


class Player:
    """The thread of one actor. It runs one step on request, and then waits."""

    def __init__(self, actor: Actor, cutter: Cutter) -> None:
        self.actor = actor
        self.finished = False
        self.under_way = False
        #: The statement that the next step runs; empty if it runs a whole call.
        self.next = ""
        self._go: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._at_rest = threading.Event()
        self.failure: BaseException | None = None
        self._cutter = cutter
        self._thread = threading.Thread(target=self._play, name=f"actor {actor.name}", daemon=True)
        self._thread.start()
        self._at_rest.wait(PATIENCE)

    def step(self) -> None:
        """Begin the next step."""
        self._at_rest.clear()
        self.under_way = True
        self._go.put(True)

    def rests(self, seconds: float) -> bool:
        """Return True if the step, or the actor, ends within that time."""
        rests = self._at_rest.wait(seconds)
        if rests:
            self.under_way = False
        return rests

    def stop(self) -> None:
        self._go.put(False)
        self._thread.join(PATIENCE)

    def pause(self, statement: str = "") -> None:
        """Let other actors run; called in the actor's thread. ``statement``: the one of the next step."""
        self.next = statement
        self._at_rest.set()
        if not self._go.get():
            raise Stopped

    def _play(self) -> None:
        try:
            for name, call in self.actor.calls:
                with self._cutter.cut(self.actor.session, self.pause) as run:
                    answer = run(call)
                self.actor.answers[name] = answer
                if self.actor.done is not None:
                    self.actor.done(name, answer)
        except Stopped:
            pass
        except BaseException as exc:
            self.failure = exc
        finally:
            self.finished = True
            self._at_rest.set()


class Cutter:
    """Cuts the calls of an engine into steps; this one runs each call in one step."""

    @contextlib.contextmanager
    def cut(self, session: Any, pause: Pause) -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
        """Return a context in which to run one call."""
        pause()
        yield lambda call: call(session)

    def is_blocked(self, session: Any) -> bool:
        """Return True if the present step waits for another session."""
        return False

    def changes(self, session: Any) -> int | None:
        """Return how many rows the session has changed so far; None if that is not known."""
        return None


class PostgresCutter(Cutter):
    """Puts a transaction around each call; its commit is a step."""

    def __init__(self, database: Database) -> None:
        self._connection = database.raw()

    @contextlib.contextmanager
    def cut(self, session: Any, pause: Pause) -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
        pause()
        # Some calls do extra work at random, so every schedule uses the same random numbers.
        session.connection.execute("BEGIN; SELECT setseed(0.5)")
        try:
            yield lambda call: call(session)
            pause()
        except BaseException:
            if not session.connection.closed:
                session.connection.execute("ROLLBACK")
            raise
        session.connection.execute("COMMIT")

    def is_blocked(self, session: Any) -> bool:
        pid = session.connection.info.backend_pid
        return bool(self._connection.execute("SELECT pg_blocking_pids(%s) <> '{}'", (pid,)).fetchone()[0])


class SqliteCutter(Cutter):
    """Pauses before each statement outside a transaction."""

    @contextlib.contextmanager
    def cut(self, session: Any, pause: Pause) -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
        execute = session._execute

        def cut(statement: str, *rest: Any) -> Any:
            if not session.connection.in_transaction:
                pause(statement)
            return execute(statement, *rest)

        session._execute = cut
        try:
            yield lambda call: call(session)
        finally:
            session._execute = execute

    def changes(self, session: Any) -> int | None:
        if session.connection is None:  # the step has closed the session
            return None
        changes: int = session.connection.total_changes
        return changes


def cutter(database: Database) -> Cutter:
    """Return the cutter for this engine."""
    if database.engine == "postgresql":
        return PostgresCutter(database)
    return SqliteCutter() if database.engine == "sqlite" else Cutter()


@dataclass
class Choice:
    """One moment of a schedule: the ready actors, and the chosen one."""

    ready: dict[int, str]  # the ready actors, and the statement that each would run
    asleep: set[int]  # actors whose step would repeat an earlier schedule (sleep set)
    chosen: int = -1
    tried: set[int] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)  # actors whose step, from here, has changed nothing

    def take_next(self) -> bool:
        """Choose another actor; False if there is none."""
        if self.chosen >= 0:
            self.tried.add(self.chosen)
        untried = [actor for actor in self.ready if actor not in self.asleep | self.tried]
        self.chosen = untried[0] if untried else -1
        return bool(untried)

    def asleep_after(self) -> set[int]:
        """Return the actors tried first here whose step can come later as well, because neither step changes a row."""
        return self.asleep | self.tried & self.quiet if self.chosen in self.quiet else set()


def play(
    actors: list[Actor], cutter: Cutter, schedule: list[Choice], check: Callable[[], None], parted: list[str]
) -> bool:
    """Run one schedule, and make the choices that it does not contain. Return False if it repeats earlier ones.

    ``parted``: the schedules that led to a different state than before.
    """
    players = [Player(actor, cutter) for actor in actors]
    names: list[str] = []
    try:
        while not all(player.finished for player in players):
            ready = {
                number: player.next
                for number, player in enumerate(players)
                if not (player.finished or player.under_way)
            }
            assert ready, "all wait for each other"
            if len(names) < len(schedule) and schedule[len(names)].ready != ready:
                # The same steps have led to another state than before, for example because of a timeout. From here on
                # it is another schedule.
                del schedule[len(names) :]
                parted.append(" ".join(names))
            if len(names) == len(schedule):
                choice = Choice(ready, schedule[-1].asleep_after() if schedule else set())
                if not choice.take_next():
                    return False
                schedule.append(choice)
            choice = schedule[len(names)]
            player = players[choice.chosen]
            names.append(player.actor.name)
            before = cutter.changes(player.actor.session)
            player.step()
            _settle(players, cutter)
            for other in players:
                if other.failure is not None:
                    raise other.failure
            if before is not None and cutter.changes(player.actor.session) == before:
                choice.quiet.add(choice.chosen)
            check()
    except BaseException:
        print("in the schedule", " ".join(names))
        raise
    finally:
        for player in players:
            player.stop()
    return True


def _settle(players: list[Player], cutter: Cutter) -> None:
    """Wait until each actor has ended its step, or waits for a lock of another actor."""
    deadline = time.monotonic() + PATIENCE
    while True:
        blocked = 0
        moving = 0
        for player in players:
            if player.under_way and not player.rests(0.002):
                if cutter.is_blocked(player.actor.session):
                    blocked += 1
                else:
                    moving += 1
        if not moving:
            # An actor that `is_blocked` reported may be free since: another actor may have ended its step.
            again = [player for player in players if player.under_way]
            if len(again) == blocked and all(cutter.is_blocked(player.actor.session) for player in again):
                return
            if not again:
                return
        assert time.monotonic() < deadline, "a step neither ends nor waits for another session"


#: At most this many schedules may lead to another state than before (timeouts).
MAX_PARTED = 20
#: The parts of a scenario: the actors, the check after each step, and the check at the end.
Scenario = tuple[list[Actor], Callable[[], None], Callable[[], None]]


def explore(make: Callable[[], Scenario], cutter: Cutter) -> int:
    """Run all schedules of the scenarios that ``make`` makes; return how many were begun. Of schedules that differ only
    in the order of steps that change nothing, one is run to its end (sleep sets: Godefroid 1996).
    """
    schedule: list[Choice] = []
    count = 0
    parted: list[str] = []
    while True:
        actors, check, end = make()
        count += 1
        played = play(actors, cutter, schedule, check, parted)
        # If a scenario kept state from one run to the next, the search would not end.
        assert len(parted) <= MAX_PARTED + count // 10, (
            f"the same steps lead to different states, from {parted[-1]!r} on"
        )
        if played:
            try:
                end()
            except BaseException:
                print("at the end of the schedule", " ".join(actors[choice.chosen].name for choice in schedule))
                raise
        while schedule and not schedule[-1].take_next():
            schedule.pop()
        if not schedule:
            return count


# -- the rule ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A row as another session sees it."""

    position: int
    access: str
    limit: int | None
    weight: int
    granted: bool
    revoked: bool
    member: int | None

    def fits_beside(self, others: list[Seen]) -> bool:
        """Return True if the request may be held together with the conflicting ones of these."""
        conflicting = [other for other in others if self.access == "write" or other.access != self.access]
        limits = [other.limit for other in [*conflicting, self] if other.limit is not None]
        return not conflicting or not limits or sum(other.weight for other in conflicting) + self.weight <= min(limits)


def against_the_rule(rows: list[Seen]) -> str | None:
    """Return the fault in the rows of one resource, or None. The rule is written anew here, not the product's."""
    # A reader that upgrades is a holder, and will not write before the others have left.
    inside = [row for row in rows if row.granted and row.access != "upgrade"]
    upgrading = any(row.access == "upgrade" for row in rows)
    for row in inside:
        if not row.fits_beside([other for other in inside if other is not row]):
            return f"these hold together against the rule: {inside}"
        if not upgrading and not row.fits_beside([entry for entry in rows if entry.position < row.position]):
            return f"{row} has overtaken a row ahead of it: {rows}"
    return None
