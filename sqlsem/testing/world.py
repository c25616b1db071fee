"""One run of programs in virtual time: the processes, their database, the faults, and the checks.

Usually the running fiber goes on until it waits. A *choice* is a step at which something else happens: another fiber
runs, a fault happens, or the faults end. The seed and the choices decide a run, so that it can be repeated, and
shortened by leaving choices out. The choices end in the *calm phase*, in which no more faults happen and every living
process must be granted its locks.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlsem.api.coordinator import coordinator_of
from sqlsem.client import defaults
from sqlsem.client.client import DatabaseClient
from sqlsem.engines.base import Options
from sqlsem.testing.faults import Faults
from sqlsem.testing.fibers import Fiber, Fibers
from sqlsem.testing.real import RealServer, Row, Trouble
from sqlsem.testing.server import in_memory
from sqlsem.values.errors import LockLost, Unavailable
from sqlsem.values.locks import Request
from sqlsem.values.names import RATE_PREFIX

__all__ = [
    "Actor",
    "Choice",
    "MakeServer",
    "Program",
    "Settings",
    "Violation",
    "World",
    "log_to_trace",
    "together",
]

log = logging.getLogger("sqlsem")

#: A choice: its step, and what happens there: ``(17, "crash B")``.
Choice = tuple[int, str]
#: In the calm phase each living process must be granted its locks within so many seconds,
SERVED_SECONDS = 300.0
#: and within so many steps.
SERVED_STEPS = 20_000
#: A sleeper wakes this much too late, as on real machines, and never too early because a float was rounded.
LATE_SECONDS = 1e-6
#: A fiber that does not wait is interrupted after so many steps, and another one runs.
MAX_STEPS = 50
#: The pause before a program that lost a lock begins again.
AGAIN_SECONDS = 0.1
#: How long the rows of an ended process may stay: a deferred call or the next heartbeat removes them.
LEFT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated check. See `sqlsem.testing.simulate.SimulationFailed.kind`."""

    kind: str
    words: str


#: A function that makes the database of a run.
MakeServer = Callable[[Fibers], RealServer]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run; durations in seconds."""

    program: Program
    processes: int = 3
    threads: int = 1
    faults: tuple[str, ...] = ()
    most_faults: int = 3
    steps: int = 200
    grace: float = 5.0
    lease: float | None = None
    retry: float = 10.0
    always: Callable[[], object] | None = None
    begin: Callable[[], object] | None = None
    #: Opens the place for the databases of the runs: in memory, in files or on a server.
    databases: Callable[[], contextlib.AbstractContextManager[MakeServer]] = in_memory


class Actor:
    """A process that takes part, as its program sees it.

    Attributes:
        name: Its name: ``A``, ``B`` …
        number: 0 for the first one.
        locks: Its coordinator.
        random: Decided by the seed of the run.
        shared: A dict that all processes of a run share, empty at its beginning; for messages, say.
    """

    def __init__(self, world: World, number: int, settings: Settings) -> None:
        self.name = chr(ord("A") + number) if number < 26 else f"P{number}"
        self.number = number
        self.world = world
        self.shared = world.shared
        options = Options(grace=settings.grace, lease=settings.lease)
        self.client = DatabaseClient(world.server.engine(options, self.name), settings.retry)
        self.locks = coordinator_of(self.client)
        self.dead = False
        self.paused_until = -math.inf
        self.fibers: list[Fiber] = []
        self.threads_left = settings.threads  # the number of its threads whose program has not ended

    @functools.cached_property
    def random(self) -> random.Random:
        """Random numbers that the seed of the run decides."""
        return random.Random(self.world.seed * 97 + self.number)

    @property
    def runs(self) -> bool:
        """True if it is neither dead nor stopped."""
        return not self.dead and self.world.fibers.now >= self.paused_until

    def step(self, words: str = "works") -> None:
        """Do something that takes a moment, in which other fibers may run. ``words`` describes it in the trace."""
        self.world.fibers.step(words)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.world.fibers.sleep(seconds)

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """Open a transaction of the program's own, on a connection of its own to the same database. Gives a cursor,
        commits at the end of the block, and rolls back if the block raises. For `sqlsem.Grant.release_on_commit` and
        `sqlsem.Grant.assert_held`.

        Other fibers may run before it begins, before the COMMIT and before the answer to that, and on PostgreSQL
        between its statements. Raises `Unavailable` if its connection breaks, and `ConfigurationError` in memory, where
        there are no transactions.
        """
        return self.world.server.transaction(self.client.engine)

    def __repr__(self) -> str:
        return self.name


#: The function that each process runs.
Program = Callable[[Actor], object]


@dataclass
class World:
    """One run. With ``choices``, these are made; else the seed draws them, and ``made`` records them."""

    settings: Settings
    fibers: Fibers
    server: RealServer
    seed: int
    choices: Sequence[Choice] | None = None
    trace: list[str] | None = None
    made: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server.removed = self._removed
        self.server.seed = self.seed
        self.fibers.traced = self.trace is not None
        self.violation: Violation | None = None
        self.actors: list[Actor] = []
        self.shared: dict[str, Any] = {}
        self._revoked_in_transit: set[int] = set()  # positions
        self.steps = 0
        self.calm = False  # True in the calm phase: no more faults
        self.calm_since = 0.0
        self._calm_step = 0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._last: Fiber | None = None
        self._running_for = 0
        self._random = random.Random(self.seed)
        self.faults = Faults(self)
        self._choices_left = list(self.choices or ())
        self._choices_left.reverse()
        self._next = 0
        self._pace = 0.0
        if self.choices is None:
            self._pace = self._random.choice((0.02, 0.1, 0.3))
            self._faults_left = self._random.randrange(self.settings.most_faults + 1) if self.settings.faults else 0
            self._kinds = [
                fault for fault in self.settings.faults if self._random.random() < 0.5
            ] or self.settings.faults
            self._calm_at = self._random.randrange(10, self.settings.steps)
            self._draw_next()

    # -- a run -------------------------------------------------------------------------------------------------------

    def run(self) -> Violation | None:
        """Run to the end; return the violation, if there is one."""
        random.seed(self.seed)  # for the random pauses between attempts
        settings = self.settings
        if settings.begin is not None:
            settings.begin()
        for number in range(settings.processes):
            actor = Actor(self, number, settings)
            self.actors.append(actor)
            actor.client.event_bus.add("granted", functools.partial(self._granted, actor))
            for thread in range(settings.threads):
                name = actor.name if settings.threads == 1 else f"{actor.name}{thread + 1}"
                self.fibers.spawn(name, actor, functools.partial(self._run_program, actor))
        try:
            while self.violation is None and (fiber := self._choose()) is not None:
                if self.trace is not None:
                    self.trace.append(f"{self.steps:>5} {self.fibers.now - 1000:9.3f} s  {fiber.name:<9} {fiber.where}")
                self.fibers.resume(fiber)
                self.server.notice()
                if fiber.error is not None:
                    self._fail("error", f"{fiber.name} ended with {fiber.error!r}")
                else:
                    self._check_tasks()
                    if settings.always is not None and self.violation is None:
                        self._check_always(settings.always)
            if self.violation is None:
                self._check_end()
        finally:
            for actor in self.actors:
                actor.client.member.closing.set()  # so that no thread closes the client later, in real time
            self.fibers.end()
            self.server.close()
        return self.violation

    def _check_always(self, check: Callable[[], object]) -> None:
        try:
            check()
        except Exception as exc:
            self._fail("error", f"after a step of {self._last.name if self._last else '?'}: {exc!r}")

    def _run_program(self, actor: Actor) -> None:
        defaults.provide_here(actor.locks)
        while True:
            try:
                self.settings.program(actor)
                break
            except (LockLost, Unavailable) as exc:
                if self.trace is not None:
                    self.trace.append(f"{'':>19}{actor.name:<9} gets: {exc}")
                self.fibers.sleep(AGAIN_SECONDS)
        actor.threads_left -= 1
        if actor.threads_left:
            return
        since = self.fibers.now
        while self._rows_of(actor):
            since = max(since, self.calm_since) if self.calm else self.fibers.now
            if self.fibers.now > since + LEFT_SECONDS:
                rows = ", ".join(f"{row.resource!r} at {row.position}" for row in self._rows_of(actor))
                self._fail("left", f"{actor} has ended, and its rows stay: {rows}")
                return
            self.fibers.sleep(1.0)
        actor.locks.close()
        actor.dead = True  # it ended by itself
        for session in [session for session in self.server.sessions if session.owner == actor.name]:
            session.end()

    def _rows_of(self, actor: Actor) -> list[Row]:
        # (A row in transit no longer belongs to the actor: another member removes it when its time is over.)
        return [
            row
            for row in self.server.rows()
            if row.host == actor.name and not row.requesting_id.startswith("in transit")
        ]

    # -- which fiber goes on -----------------------------------------------------------------------------------------

    def _choose(self) -> Fiber | None:
        """Return the fiber that goes on; None if all processes have ended or a check has failed."""
        self.steps += 1
        while True:
            chosen = self._make_choices()
            alive = [actor for actor in self.actors if not actor.dead]
            if not alive or self.violation is not None:
                return None
            now = self.fibers.now
            ready = self._ready()
            if ready:
                break
            # (Paused processes go on at that time; the events that were due meanwhile happen first.)
            times = [max(fiber.deadline, fiber.group.paused_until) for fiber in self.fibers.all if _is_left(fiber)]
            if self._events:
                times.append(self._events[0][0])
            at = min(times, default=math.inf)
            if math.isinf(at) and self.server.moves():
                continue
            if math.isinf(at):
                self._stuck("and nothing will ever happen")
                return None
            self._pass_time(max(at, now) + LATE_SECONDS)
        if self.calm and (
            self.fibers.now > self.calm_since + SERVED_SECONDS or self.steps > self._calm_step + SERVED_STEPS
        ):
            self._stuck(f"{self.fibers.now - self.calm_since:.0f} s after the last thing went wrong")
            return None
        return self._next_fiber(ready, chosen)

    def _ready(self) -> list[Fiber]:
        return [fiber for fiber in self.fibers.all if fiber.ready and not fiber.over and fiber.group.runs]

    def _next_fiber(self, ready: list[Fiber], chosen: str | None) -> Fiber:
        last, fiber = self._last, None
        if chosen is not None:
            fiber = next((candidate for candidate in ready if candidate.name == chosen), None)
        if fiber is None and last in ready and self._running_for < MAX_STEPS:
            fiber = last
        if fiber is None:
            number = -1 if last is None else last.number
            fiber = next((candidate for candidate in ready if candidate.number > number), ready[0])
        self._running_for = self._running_for + 1 if fiber is last else 0
        self._last = fiber
        return fiber

    def _stuck(self, words: str) -> None:
        waiting = "; ".join(f"{fiber.name}: {fiber.where}" for fiber in self.fibers.all if _is_left(fiber))
        self._fail("stuck", f"a living process was not granted its locks, {words} ({waiting})")

    def _pass_time(self, at: float) -> None:
        if not math.isinf(at):
            self.fibers.now = at
        while self._events and self._events[0][0] <= at:
            heapq.heappop(self._events)[2]()
        for fiber in self.fibers.all:
            if fiber.deadline <= at and not fiber.over:
                fiber.ready = True

    def at(self, seconds: float, call: Callable[[], object]) -> None:
        """Schedule a call after so many virtual seconds."""
        heapq.heappush(self._events, (self.fibers.now + seconds, next(self._numbers), call))

    def run_due_events(self) -> None:
        """Run the events that are due."""
        self._pass_time(self.fibers.now)

    # -- choices -----------------------------------------------------------------------------------------------------

    def _draw_next(self) -> None:
        self._next = self.steps + 1 + int(math.log(1.0 - self._random.random()) / math.log(1.0 - self._pace))

    def _make_choices(self) -> str | None:
        """Make the choices of this step; return the name of the chosen fiber, if one was chosen."""
        if self.calm:
            return None
        chosen = None
        if self.choices is not None:
            while self._choices_left and self._choices_left[-1][0] <= self.steps:
                chosen = self._make_choice(self._choices_left.pop()[1]) or chosen
            if not self._choices_left:
                self._calm_down()
        elif self.steps >= self._calm_at:
            self.made.append((self.steps, "calm"))
            self._calm_down()
        elif self.steps >= self._next:
            words = self._draw()
            self._draw_next()
            if words is not None:
                self.made.append((self.steps, words))
                chosen = self._make_choice(words)
        return chosen

    def _draw(self) -> str | None:
        if self._faults_left and self._random.random() < 0.3:
            words = self.faults.draw(self._random, self._random.choice(self._kinds))
            self._faults_left -= words is not None
            return words
        ready = [fiber for fiber in self._ready() if fiber is not self._last]
        return f"run {self._random.choice(ready).name}" if ready else None

    def _make_choice(self, words: str) -> str | None:
        verb, *rest = words.split()
        if verb == "run":
            return rest[0]
        if verb == "calm":
            self._calm_down()
            return None
        try:
            self.faults.make(verb, rest)
            if self.trace is not None:
                self.trace.append(f"{self.steps:>5} {self.fibers.now - 1000:9.3f} s  *** {words}")
        except Trouble as exc:
            if self.trace is not None:
                self.trace.append(f"{self.steps:>5} {self.fibers.now - 1000:9.3f} s  ({words}: {exc})")
        return None

    def _calm_down(self) -> None:
        """End the faults, and resume what was stopped."""
        if self.calm:
            return
        self.calm, self.calm_since, self._calm_step = True, self.fibers.now, self.steps
        self._choices_left.clear()
        self.faults.undo()

    # -- checks ------------------------------------------------------------------------------------------------------

    def _fail(self, kind: str, words: str) -> None:
        if self.violation is None:
            self.violation = Violation(kind, words)

    def _believed(self, actor: Actor) -> Iterator[tuple[Request, int]]:
        """Yield the locks that a process believes it holds: none if it is stopped, or must verify them first."""
        if actor.runs and not actor.client.member.is_uncertain():
            for grant in actor.client.registry.grants():
                state = grant.state
                if state.why_lost is None:
                    for request, ticket in zip(state.requests, state.tickets, strict=True):
                        if ticket.position not in self._revoked_in_transit:
                            yield request, ticket.position

    def _removed(self, row: Row, why: str) -> None:
        if why == "revoked" and row.requesting_id.startswith("in transit"):
            # The process that handed it over may not have the reply yet, but no longer relies on the lock.
            self._revoked_in_transit.add(row.position)
            return
        for actor in self.actors:
            if actor.name == row.host and any(position == row.position for _, position in self._believed(actor)):
                self._fail(
                    "loss", f"{actor} believes that it holds {row.resource!r} at {row.position}, whose row was {why}"
                )

    def _granted(self, actor: Actor, event: Any) -> None:
        if event.position not in self.server.ever_granted:
            self._fail("phantom", f"{actor} has {event.resource!r} at {event.position}, which was never granted")
        elif all(row.position != event.position for row in self.server.rows_on(event.resource)):
            self._fail("phantom", f"{actor} has {event.resource!r} at {event.position}, whose row is gone")
        inside = [
            (other.name, request)
            for other in self.actors
            for request, _ in self._believed(other)
            # (A request for a rate leaves its queue before its process knows that. Nothing is held under it.)
            if request.resource == event.resource and not event.resource.startswith(RATE_PREFIX)
        ]
        if not together([request for _, request in inside]):
            holders = ", ".join(f"{name}: {request.describe()}" for name, request in inside)
            self._fail("overlap", f"more hold it than may: {holders}")

    def _check_tasks(self) -> None:
        """Check that no two workers run the same task."""
        runs: dict[str, Actor] = {}
        for actor in self.actors:
            if actor.client.claims and actor.runs and not actor.client.member.is_uncertain():
                for claim in actor.client.claims.all():
                    if claim.is_open and claim.why_lost is None and runs.setdefault(claim.title, actor) is not actor:
                        self._fail("twice", f"{claim.title} is run by {runs[claim.title]} and by {actor}")

    def _check_end(self) -> None:
        self._pass_time(self.fibers.now + 10 * SERVED_SECONDS)
        self.server.reap()
        for row in self.server.rows():
            self._fail(
                "left", f"all processes have ended, and a row stays: {row.resource!r} at {row.position}, of {row.host}"
            )
        for finding in self.server.findings():
            self._fail(finding.kind, f"{finding.resource!r} at {finding.position}: {finding.words}")


def together(requests: Iterable[Request]) -> bool:
    """Return True if these requests may hold at the same time. (Does not use `Request.fits`, which is under test.)"""
    inside = list(requests)
    for request in inside:
        others = [
            other
            for other in inside
            if other is not request and not (request.shared and other.access == request.access)
        ]
        limits = [each.limit for each in (request, *others) if each.limit is not None]
        if others and limits and request.weight + sum(other.weight for other in others) > min(limits):
            return False
    return True


def _is_left(fiber: Fiber) -> bool:
    return not fiber.over and not fiber.group.dead


class _TraceHandler(logging.Handler):
    """Writes log records into the trace, among its steps."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if self._world.trace is not None:
            self._world.trace.append(f"{'':>19}{'log':<9} {record.getMessage()}")


@contextlib.contextmanager
def log_to_trace(world: World) -> Iterator[None]:
    """Send log records to the trace of the run only, until the block ends."""
    before, propagate, handlers, disabled = log.level, log.propagate, log.handlers, log.disabled
    log.propagate, log.handlers, log.disabled = False, [_TraceHandler(world)], world.trace is None
    try:
        yield
    finally:
        log.propagate, log.handlers, log.disabled = propagate, handlers, disabled
        log.setLevel(before)
