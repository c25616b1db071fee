"""Run a history again with other settings: the rule, run forward over its requests.

Each request is made again when it was made, and held for as long as it was held. The nested locks of one thread or task
form a *program*: an inner lock is requested as long after the outer one was granted as it was then, and the outer lock
is held as long after the inner one. Locks that were acquired together are requested together. Programs are not shifted
against each other: requests come when they came.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlsem.errors import ConfigurationError
from sqlsem.insight.rule import Kind, Queue
from sqlsem.model import READ, UPGRADE, WRITE, Entry, Past

__all__ = ["ORDERS", "Comparison", "Night", "Replay", "ReplaySettings", "replay"]

#: Positions of one transaction are no further apart than this, seconds.
TOGETHER_SECONDS = 0.02
CONVERTED = ("upgraded", "downgraded")
#: Which waiter is granted first.
ORDERS = ("asked", "shortest", "longest", "lightest", "heaviest")
#: The events of one time, in this order.
LEAVES, ASKS, GIVES_UP = 0, 1, 2
#: The kind of a reader that waits to be the writer: it conflicts with every other kind.
UPGRADING: Kind = (UPGRADE, 1, 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MOMENT = timedelta(milliseconds=1)
WRITING: Kind = (WRITE, 1, 1)
READING: Kind = (READ, 1, 1)


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The changed settings: limits and weights by resource (of limits and mutexes; readers and stages keep theirs), and
    the order, one of `ORDERS`. A real queue cannot know how long a request will hold: 'shortest' and 'longest' show the
    value of that knowledge.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    order: str = "asked"
    #: The server's limits now: requests that named no limit had these.
    caps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Night:
    """The totals of a history, of one resource or of all. Durations in seconds."""

    requests: int
    let_in: int
    gave_up: int
    end: datetime | None  # when the last holder left
    wait_p50: float
    wait_p99: float
    wait_total: float
    #: The share of the lowest limit that was in use from the first request to the end; None for readers and stages.
    use: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the same as JSON-ready values."""
        names = ("requests", "let_in", "gave_up", "wait_p50", "wait_p99", "wait_total", "use")
        return {name: getattr(self, name) for name in names} | {"end": self.end and self.end.isoformat()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The history as it was, and as it would have been."""

    was: Night
    would: Night

    def as_dict(self) -> dict[str, Any]:
        """Return the same as JSON-ready values."""
        return {"was": self.was.as_dict(), "would": self.would.as_dict()}


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    everything: Comparison
    resources: dict[str, Comparison]
    unfinished: int  # held or waiting when the history was read: counted as ended then
    guessed: int  # gave up then, but would be granted: held as long as is usual for their resource
    stuck: int  # would wait for each other for ever: sqlsem would raise `Deadlock` in the youngest
    refused: int  # upgrades that another upgrade would have blocked

    def as_dict(self) -> dict[str, Any]:
        """Return the same as JSON-ready values."""
        return {
            "everything": self.everything.as_dict(),
            "resources": {name: resource.as_dict() for name, resource in self.resources.items()},
            "unfinished": self.unfinished,
            "guessed": self.guessed,
            "stuck": self.stuck,
            "refused": self.refused,
        }


def replay(past: Iterable[Past], entries: Iterable[Entry] = (), settings: ReplaySettings | None = None) -> Replay:
    """Run a history again.

    Args:
        past: Finished requests, in any order.
        entries: The rows that hold and wait now.
        settings: The changed settings. Without any, the result is nearly the history itself: the replay ignores wakeup
            times, caps, pauses, and waiters without a position.

    Raises `ConfigurationError` when a request weighs more than a new limit.
    """
    settings = settings or ReplaySettings()
    unfinished = _as_past(entries)
    rows: dict[tuple[str, int], list[Past]] = defaultdict(list)
    for row in itertools.chain(past, unfinished):
        rows[row.resource, row.position].append(row)
    asks = [_Request.of(sorted(parts, key=lambda part: part.ended_at), settings) for parts in rows.values()]
    asks.sort(key=lambda ask: (ask.asked, ask.position))
    run = _Simulation(asks, settings)
    run.to_the_end()
    by_resource: dict[str, list[_Request]] = defaultdict(list)
    for ask in asks:
        by_resource[ask.resource].append(ask)
    return Replay(
        everything=_compare(asks, per_limit=False),
        resources={name: _compare(by_resource[name], per_limit=True) for name in sorted(by_resource)},
        unfinished=len(unfinished),
        guessed=run.guessed,
        stuck=sum(ask.would_end is None for ask in asks),
        refused=run.refused,
    )


def _as_past(entries: Iterable[Entry]) -> list[Past]:
    """Return the present rows as if they had ended when they were read; waiters a moment before holders."""
    rows = []
    now = _EPOCH
    for entry in entries:
        since = entry.requested_at if entry.granted_at is None else entry.granted_at
        now = max(now, since + timedelta(seconds=entry.seconds))
        rows.append((entry, since))
    return [
        Past(
            resource=entry.resource,
            position=entry.position,
            access=READ if entry.access.startswith(UPGRADE) else entry.access,
            weight=entry.weight,
            requesting_id=entry.requesting_id,
            owner=entry.owner,
            note=entry.note,
            requested_at=entry.requested_at,
            granted_at=entry.granted_at,
            ended_at=now if entry.granted_at is None else now + _MOMENT,
            waited=((now if entry.granted_at is None else since) - entry.requested_at).total_seconds(),
            held=None if entry.granted_at is None else (now - since).total_seconds(),
            outcome="holds" if entry.granted_at is not None else "waits",
            limit=entry.limit,
        )
        for entry, since in rows
    ]


@dataclass(slots=True, eq=False)
class _Request:
    """One request, as it was and as it would be. Times in seconds since 1970."""

    resource: str
    position: int
    requester: str
    kind: Kind
    was_kind: Kind
    asked: float
    granted: float | None
    ended: float
    #: Its upgrades and downgrades, with their times.
    conversions: list[tuple[float, Kind]]
    rank: float = 0.0
    place: tuple[float, int] = (0.0, 0)
    would_ask: float = 0.0
    would_enter: float | None = None
    would_end: float | None = None

    @classmethod
    def of(cls, parts: Sequence[Past], settings: ReplaySettings) -> _Request:
        first, last = parts[0], parts[-1]
        conversions = []
        for part in parts:
            if part.outcome in CONVERTED:
                conversions.append((part.ended_at.timestamp(), WRITING if part.outcome == "upgraded" else READING))
        declared = first.limit
        if declared is None and first.resource in settings.caps:
            declared = max(settings.caps[first.resource], first.weight)
        was: Kind = (first.access, 1 if conversions else declared, first.weight)
        kind = was
        if first.access == WRITE and not conversions:
            limit, weight = settings.limits.get(first.resource, was[1]), settings.weights.get(first.resource, was[2])
            if limit is not None and weight > limit:
                raise ConfigurationError(
                    f"The request at position {first.position} of {first.resource!r} weighs {weight}, which never fits "
                    f"into a limit of {limit}; give a higher limit, or a lower weight",
                    resource=first.resource,
                )
            kind = (WRITE, limit, weight)
        granted = None if first.granted_at is None else first.granted_at.timestamp()
        asked = first.requested_at.timestamp()
        ask = cls(
            resource=first.resource,
            position=first.position,
            requester=first.requesting_id,
            kind=kind,
            was_kind=was,
            asked=asked,
            granted=granted,
            ended=max(last.ended_at.timestamp(), asked if granted is None else granted),
            conversions=conversions,
        )
        ask.rank = {
            "asked": 0.0,
            "shortest": ask.held,
            "longest": -ask.held,
            "lightest": float(kind[2]),
            "heaviest": -float(kind[2]),
        }[settings.order]
        return ask

    @property
    def held(self) -> float:
        """The seconds for which it was held; 0 if the request gave up."""
        return 0.0 if self.granted is None else self.ended - self.granted


#: A step of a program, this long after the step before it.
@dataclass(slots=True)
class _Step:
    after: float
    action: str  # 'ask', 'convert' or 'leave'
    asks: list[_Request]
    kind: Kind | None = None
    gave_up_after: float | None = None  # of requests that gave up


@dataclass(slots=True, eq=False)
class _Program:
    """The requests of one thread or task, from its first request until it has released everything."""

    start: float
    steps: list[_Step]
    at: int = 0
    missing: int = 0  # requests of the present step that are not granted


def _programs(asks: Sequence[_Request]) -> list[_Program]:
    """Return the programs of a history, from its requests in order."""
    of_one: dict[str, list[_Request]] = defaultdict(list)
    for ask in asks:
        of_one[ask.requester].append(ask)
    programs = []
    for own in of_one.values():
        together: list[list[_Request]] = []
        for ask in own:
            last = together[-1] if together else None
            if (
                last is not None
                and ask.asked - last[0].asked <= TOGETHER_SECONDS
                and all(inner.resource != ask.resource and inner.ended > ask.asked for inner in last)
            ):
                last.append(ask)
            else:
                together.append([ask])
        nested: list[list[list[_Request]]] = []
        for group in together:
            begun = group[0].asked
            before = [inner for other in nested[-1] for inner in other] if nested else []
            if (
                before
                and all(inner.granted is not None and inner.granted <= begun for inner in before)
                and any(inner.ended > begun for inner in before)
            ):
                nested[-1].append(group)
            else:
                nested.append([group])
        programs += [_program(groups) for groups in nested]
    programs.sort(key=lambda program: (program.start, program.steps[0].asks[0].position))
    return programs


def _program(groups: Sequence[list[_Request]]) -> _Program:
    """Return a program from its groups of requests and their times."""
    done: list[tuple[float, float, _Step]] = []  # begin, end
    for group in groups:
        begun = group[0].asked
        if any(ask.granted is None for ask in group):
            end = max(ask.ended for ask in group)
            done.append((begun, end, _Step(0.0, "ask", group, gave_up_after=end - begun)))
            continue
        done.append((begun, max(ask.granted or begun for ask in group), _Step(0.0, "ask", group)))
        for ask in group:
            done += [
                (converted_at, converted_at, _Step(0.0, "convert", [ask], kind))
                for converted_at, kind in ask.conversions
            ]
            done.append((ask.ended, ask.ended, _Step(0.0, "leave", [ask])))
    done.sort(key=lambda item: item[:2])
    time = done[0][0]
    for begun, end, step in done:
        step.after = max(0.0, begun - time)
        time = max(time, end)
    return _Program(done[0][0], [step for _, _, step in done])


class _Queue:
    """One resource in the replay."""

    def __init__(self, resource: str) -> None:
        self.queue: Queue[tuple[float, int]] = Queue(resource)
        # heaps; cancelled requests are still in them
        self.waiting: dict[Kind, list[tuple[tuple[float, int], _Request]]] = {}
        self.inside: set[_Request] = set()
        self.upgrading: tuple[_Request, _Program] | None = None


class _Simulation:
    """A replay, driven by events."""

    def __init__(self, asks: Sequence[_Request], settings: ReplaySettings) -> None:
        self.guessed = self.refused = 0
        self._fifo = settings.order == "asked"
        self._numbers = itertools.count(1)
        self._lines: dict[str, _Queue] = {}
        self._of: dict[_Request, _Program] = {}
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        holds: dict[str, list[float]] = defaultdict(list)
        for ask in asks:
            self._lines.setdefault(ask.resource, _Queue(ask.resource))
            if ask.granted is not None:
                holds[ask.resource].append(ask.held)
        self._usual = {name: _share(sorted(durations), 0.5) for name, durations in holds.items()}
        for program in _programs(asks):
            self._next(program, program.start)

    def to_the_end(self) -> None:
        """Run until no event is left."""
        while self._events:
            now, _, _, happen = heapq.heappop(self._events)
            happen(now)

    def _at(self, time: float, order: int, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, order, next(self._numbers), happen))

    def _next(self, program: _Program, now: float) -> None:
        if program.at == len(program.steps):
            return
        step = program.steps[program.at]
        program.at += 1
        happen = {"ask": self._ask, "convert": self._convert, "leave": self._leave}[step.action]
        self._at(now + step.after, ASKS if step.action == "ask" else LEAVES, lambda time: happen(program, step, time))

    # -- steps ----------------------------------------------------------------------------------------------------

    def _ask(self, program: _Program, step: _Step, now: float) -> None:
        program.missing = len(step.asks)
        for ask in step.asks:
            queue = self._lines[ask.resource]
            ask.would_ask, ask.place = now, (ask.rank, next(self._numbers))
            self._of[ask] = program
            queue.queue.add(ask.kind, ask.place)
            heapq.heappush(queue.waiting.setdefault(ask.kind, []), (ask.place, ask))
        if step.gave_up_after is not None:
            self._at(now + step.gave_up_after, GIVES_UP, lambda time: self._give_up(program, step, time))
        for ask in step.asks:
            self._grant_ready(ask.resource, now, ask.kind)  # a new request can make only its own kind grantable

    def _give_up(self, program: _Program, step: _Step, now: float) -> None:
        if not program.missing:  # it was granted
            return
        for ask in step.asks:
            self._remove(ask, now)
            ask.would_enter = None
        for ask in step.asks:
            self._grant_ready(ask.resource, now)
        self._next(program, now)

    def _leave(self, program: _Program, step: _Step, now: float) -> None:
        for ask in step.asks:
            self._remove(ask, now)
            self._grant_ready(ask.resource, now)
        self._next(program, now)

    def _remove(self, ask: _Request, now: float) -> None:
        queue = self._lines[ask.resource]
        queue.queue.remove(ask.kind, ask.place)
        queue.inside.discard(ask)
        ask.would_end = now

    def _convert(self, program: _Program, step: _Step, now: float) -> None:
        (ask,) = step.asks
        assert step.kind is not None
        queue = self._lines[ask.resource]
        if step.kind == READING:
            if ask.kind == WRITING:
                self._become(ask, READING)
            self._grant_ready(ask.resource, now)
        elif queue.upgrading is not None:  # each would wait for the other
            self.refused += 1
        else:
            self._become(ask, UPGRADING)
            queue.upgrading = ask, program
            self._try_upgrade(queue, now)
            return
        self._next(program, now)

    def _become(self, ask: _Request, kind: Kind) -> None:
        queue = self._lines[ask.resource].queue
        queue.remove(ask.kind, ask.place)
        queue.add(kind, ask.place)
        ask.kind = kind

    def _try_upgrade(self, queue: _Queue, now: float) -> None:
        if queue.upgrading is None:
            return
        ask, program = queue.upgrading
        if queue.inside <= {ask} and queue.queue.fits(WRITING, ask.place):
            queue.upgrading = None
            self._become(ask, WRITING)
            self._next(program, now)

    # -- the rule -------------------------------------------------------------------------------------------------

    def _grant_ready(self, resource: str, now: float, only: Kind | None = None) -> None:
        """Grant all requests that fit. A request waits if an earlier one of its kind does not fit."""
        queue = self._lines[resource]
        heads = [(waiting[0][0], kind) for kind, waiting in queue.waiting.items() if only is None or kind == only]
        heapq.heapify(heads)
        while heads:
            _, kind = heapq.heappop(heads)
            waiting = queue.waiting[kind]
            place, ask = waiting[0]
            gone = ask.would_end is not None
            if not gone and not queue.queue.fits(kind, place):
                continue
            heapq.heappop(waiting)
            if waiting:
                heapq.heappush(heads, (waiting[0][0], kind))
            else:
                del queue.waiting[kind]
            if not gone:
                self._grant(queue, ask, now)
        self._try_upgrade(queue, now)

    def _grant(self, queue: _Queue, ask: _Request, now: float) -> None:
        if not self._fifo:  # holders go ahead of all waiters
            queue.queue.remove(ask.kind, ask.place)
            ask.place = (float("-inf"), next(self._numbers))
            queue.queue.add(ask.kind, ask.place)
        ask.would_enter = now
        queue.inside.add(ask)
        program = self._of[ask]
        program.missing -= 1
        if program.missing:
            return
        step = program.steps[program.at - 1]
        if step.gave_up_after is not None:
            self.guessed += 1
            for released in step.asks:
                usual = _Step(self._usual.get(released.resource, 0.0), "leave", [released])
                self._next(_Program(now, [usual]), now)
        self._next(program, now)


def _compare(asks: Sequence[_Request], *, per_limit: bool) -> Comparison:
    was = [(ask.asked, ask.granted, ask.ended, ask.was_kind) for ask in asks]
    would = [
        (ask.would_ask, ask.would_enter, ask.would_end, (ask.was_kind[0], *ask.kind[1:]))
        for ask in asks
        if ask.would_end is not None
    ]
    return Comparison(_night(was, per_limit), _night(would, per_limit))


def _night(stays: Iterable[tuple[float, float | None, float | None, Kind]], per_limit: bool) -> Night:
    stays = list(stays)
    waits = sorted((end or asked) - asked if entered is None else entered - asked for asked, entered, end, _ in stays)
    inside = [(entered, end, kind) for _, entered, end, kind in stays if entered is not None and end is not None]
    end = max((end for _, end, _ in inside), default=None)
    weighed = [(left - entered, kind) for entered, left, kind in inside if kind[0] == WRITE and kind[1] is not None]
    use = None
    if per_limit and weighed and end is not None:
        begun = min(asked for asked, *_ in stays)
        busy = sum(held * weight for held, (_, _, weight) in weighed)
        room = min(limit for _, (_, limit, _) in weighed if limit is not None) * (end - begun)
        use = busy / room if room > 0 else None
    return Night(
        requests=len(stays),
        let_in=len(inside),
        gave_up=len(stays) - len(inside),
        end=None if end is None else datetime.fromtimestamp(end, timezone.utc),
        wait_p50=_share(waits, 0.5),
        wait_p99=_share(waits, 0.99),
        wait_total=sum(waits),
        use=use,
    )


def _share(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of them does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
