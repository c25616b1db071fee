"""All interleavings of a few sessions' steps: real sessions, one step at a time, every order once.

A *scenario* makes *actors*: each has a session of its own, and makes one call on it after the other. A call is cut into
steps, between which others can come:

    PostgreSQL   the call, in a transaction; its commit
    SQLite       each statement outside a transaction, and each transaction (nobody can write in the middle of one, and
                 what is read there is what was read at its beginning)
    SQL Server   the call: its procedures are transactions of their own

`explore` runs the scenario again and again, with names of its own each time, until every order of these steps was run.
A step that has to wait for another session's lock (``pg_blocking_pids``) is under way until that lock is free, and the
others go on; as PostgreSQL's isolationtester does it. After every step the scenario looks at the table, as anybody may
see it then.

That all orders are run is a search without states: depth first, by the choices made so far (Godefroid 1997, VeriSoft).
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from support.databases import Database
from support.patience import PATIENCE

#: A call of an actor's: its name, and what it does with its session; what that gives is kept in `Actor.answers`.
Call = tuple[str, Callable[[Any], Any]]


#: Of a player: here others may come between.
Pause = Callable[..., None]


@dataclass(eq=False)
class Actor:
    """Somebody with a session, and the calls that it makes one after the other."""

    name: str
    session: Any
    calls: list[Call]
    answers: dict[str, Any] = field(default_factory=dict)
    #: Told when a call is committed.
    done: Callable[[str, Any], None] | None = None


class Stopped(Exception):
    """The schedule is over before this actor was: something has failed."""


class Player:
    """One actor's thread. It runs one step when told to, and then waits."""

    def __init__(self, actor: Actor, cutter: Cutter) -> None:
        self.actor = actor
        self.finished = False
        self.under_way = False
        #: Whether the step to come only reads.
        self.reads = False
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
        """Whether it has come to the end of its step, or of all of them, in that time."""
        rests = self._at_rest.wait(seconds)
        if rests:
            self.under_way = False
        return rests

    def stop(self) -> None:
        self._go.put(False)
        self._thread.join(PATIENCE)

    def pause(self, reads: bool = False) -> None:
        """On its own thread: here others may come between. ``reads``: the step to come changes nothing."""
        self.reads = reads
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
    """How an engine's calls are cut into steps: here each is one."""

    @contextlib.contextmanager
    def cut(self, session: Any, pause: Pause) -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
        """Run one call by what this gives."""
        pause()
        yield lambda call: call(session)

    def is_blocked(self, session: Any) -> bool:
        """Whether a step that is under way waits for another session."""
        return False


class PostgresCutter(Cutter):
    """A transaction around each call; its commit is a step."""

    def __init__(self, database: Database) -> None:
        self._look = database.raw()

    @contextlib.contextmanager
    def cut(self, session: Any, pause: Pause) -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
        pause()
        # (Now and then, by lot, a call does more. In each schedule the lots are the same.)
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
        return bool(self._look.execute("SELECT pg_blocking_pids(%s) <> '{}'", (pid,)).fetchone()[0])


#: How statements of SQLite's begin that only read, after the comments.
READS = re.compile(r"(?:\s|--[^\n]*\n)*(?:SELECT|WITH|PRAGMA data_version)", re.IGNORECASE)


class SqliteCutter(Cutter):
    """A pause before each statement that is in no transaction."""

    @contextlib.contextmanager
    def cut(self, session: Any, pause: Pause) -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
        execute = session._execute

        def cut(statement: str, *rest: Any) -> Any:
            if not session.connection.in_transaction:
                pause(READS.match(statement) is not None)
            return execute(statement, *rest)

        session._execute = cut
        try:
            yield lambda call: call(session)
        finally:
            session._execute = execute


def cutter(database: Database) -> Cutter:
    """The one for this engine."""
    if database.engine == "postgresql":
        return PostgresCutter(database)
    return SqliteCutter() if database.engine == "sqlite" else Cutter()


@dataclass
class Choice:
    """One moment of a schedule: who was ready, and who was chosen."""

    reads: dict[int, bool]  # of those that were ready, who would only read
    asleep: set[int]  # whose step comes to the same as in a schedule that was run before
    chosen: int = -1
    tried: set[int] = field(default_factory=set)

    def take_next(self) -> bool:
        """Choose another one; false where there is none."""
        if self.chosen >= 0:
            self.tried.add(self.chosen)
        left = [read for read in self.reads if read not in self.asleep | self.tried]
        self.chosen = left[0] if left else -1
        return bool(left)

    def asleep_after(self) -> set[int]:
        """Of those who could have gone first here: whose step can come later as well, as neither step writes."""
        return {one for one in self.asleep | self.tried if self.reads[one] and self.reads[self.chosen]}


def play(
    actors: list[Actor], how: Cutter, schedule: list[Choice], check: Callable[[], None], parted: list[str]
) -> bool:
    """Run one schedule, and make the choices that it does not say. False where it came to nothing new.

    ``parted``: those that led to something else than before.
    """
    players = [Player(actor, how) for actor in actors]
    names: list[str] = []
    try:
        while not all(player.finished for player in players):
            ready = {
                number: player.reads
                for number, player in enumerate(players)
                if not (player.finished or player.under_way)
            }
            assert ready, "all wait for each other"
            if len(names) < len(schedule) and schedule[len(names)].reads != ready:
                # The same steps have led to something else than before, as where a timeout struck: from here on it is
                # another schedule.
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
            player.step()
            _settle(players, how)
            for one in players:
                if one.failure is not None:
                    raise one.failure
            check()
    except BaseException:
        print("in the schedule", " ".join(names))
        raise
    finally:
        for player in players:
            player.stop()
    return True


def _settle(players: list[Player], how: Cutter) -> None:
    """Until each has come to rest, or waits for somebody else's lock."""
    deadline = time.monotonic() + PATIENCE
    while True:
        blocked = 0
        moving = 0
        for player in players:
            if player.under_way and not player.rests(0.002):
                if how.is_blocked(player.actor.session):
                    blocked += 1
                else:
                    moving += 1
        if not moving:
            # (What was blocked when we asked may have been freed by one that came to rest since.)
            again = [player for player in players if player.under_way]
            if len(again) == blocked and all(how.is_blocked(player.actor.session) for player in again):
                return
            if not again:
                return
        assert time.monotonic() < deadline, "a step neither ends nor waits for another session"


#: So many schedules may lead to something else than before, as where a timeout struck.
MOST_PARTED = 20
#: What a scenario gives: the actors, what to check after each step, and at the end.
Scenario = tuple[list[Actor], Callable[[], None], Callable[[], None]]


def explore(make: Callable[[], Scenario], how: Cutter) -> int:
    """Run all schedules of what ``make`` makes; how many there were. Of those that differ only in the order in which
    steps read, one is run (sleep sets: Godefroid 1996).
    """
    schedule: list[Choice] = []
    count = 0
    parted: list[str] = []
    while True:
        actors, check, end = make()
        played = play(actors, how, schedule, check, parted)
        # (With something that is kept from one to the next, the search would have no end.)
        assert len(parted) <= MOST_PARTED + count // 10, f"not the same in each schedule, from {parted[-1]!r} on"
        if played:
            try:
                end()
            except BaseException:
                print("at the end of the schedule", " ".join(actors[choice.chosen].name for choice in schedule))
                raise
            count += 1
        while schedule and not schedule[-1].take_next():
            schedule.pop()
        if not schedule:
            return count


# -- the rule ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A row as anybody may see it."""

    position: int
    access: str
    limit: int | None
    weight: int
    granted: bool
    revoked: bool
    member: int | None

    def fits_beside(self, others: list[Seen]) -> bool:
        """Whether this one may be inside together with those of these that it conflicts with."""
        conflicting = [one for one in others if self.access == "write" or one.access != self.access]
        limits = [one.limit for one in [*conflicting, self] if one.limit is not None]
        return not conflicting or not limits or sum(one.weight for one in conflicting) + self.weight <= min(limits)


def against_the_rule(rows: list[Seen]) -> str | None:
    """What is wrong with the rows of one resource; None where nothing is. (With nothing of the product's own rule.)"""
    # A reader that upgrades is inside, and will not write before the others have left.
    inside = [row for row in rows if row.granted and row.access != "upgrade"]
    upgrading = any(row.access == "upgrade" for row in rows)
    for row in inside:
        if not row.fits_beside([one for one in inside if one is not row]):
            return f"inside beside each other: {inside}"
        if not upgrading and not row.fits_beside([entry for entry in rows if entry.position < row.position]):
            return f"{row} has overtaken somebody of {rows}"
    return None
