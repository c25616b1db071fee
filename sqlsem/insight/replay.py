"""Run a history again with other settings: the rule (`Request.fits`) is applied to its requests, forward in time.

The nested locks of one thread or task form a *program*, which starts at its recorded time. In a program, these times
are as recorded: how long each lock is held, the time from the grant of an outer lock to the request of an inner one,
and the time from the release of the inner lock to that of the outer one. Locks that were acquired together are
requested together.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from sqlsem.insight.rule import Kind, Queue, granted_access
from sqlsem.util.record import AsDict, record
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import READ, UPGRADE, WRITE, Entry, Past

__all__ = ["ORDERS", "Comparison", "Night", "Replay", "ReplaySettings", "replay"]

#: Requests of one transaction are at most this many seconds apart.
TOGETHER_SECONDS = 0.02
CONVERTED = ("upgraded", "downgraded")
#: Which waiter is granted first.
ORDERS = ("asked", "shortest", "longest", "lightest", "heaviest")
#: The kinds of events, in the order in which those of the same time handle.
LEAVES, ASKS, GIVES_UP = 0, 1, 2
#: The kind of a reader that waits for its upgrade: it conflicts with every other kind.
UPGRADING: Kind = (UPGRADE, 1, 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MOMENT = timedelta(milliseconds=1)
WRITING: Kind = (WRITE, 1, 1)
READING: Kind = (READ, 1, 1)


@record
class ReplaySettings:
    """The changed settings: limits and weights by resource, and the order in which waiters are granted, one of
    `ORDERS`.

    Limits and weights apply to limits and mutexes; readers and stages keep theirs. A real queue cannot know how long a
    request will hold: 'shortest' and 'longest' show the value of that knowledge.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    order: str = "asked"
    #: The server's limits now. They count for recorded requests that declared no limit.
    caps: Mapping[str, int] = field(default_factory=dict)


@record
class Night(AsDict):
    """The totals of a history, of one resource or of all. Durations in seconds."""

    requests: int
    granted: int
    not_granted: int
    end: datetime | None  # the time of the last release
    wait_p50: float
    wait_p99: float
    wait_total: float
    #: The share of the lowest limit that was in use from the first request to the end; None for readers and stages.
    use: float | None


@record
class Comparison(AsDict):
    """The totals of the history as it was, and as it would have been."""

    was: Night
    would: Night


@record
class Replay(AsDict):
    """The result of a replay."""

    everything: Comparison
    resources: dict[str, Comparison]
    unfinished: int  # requests that held or waited when the history was read; they count as ended then
    guessed: int  # requests that gave up, but would be granted: they hold for the median time of their resource
    stuck: int  # requests that would wait for each other for ever; sqlsem would raise `Deadlock` in the youngest
    refused: int  # upgrades that would fail because of another upgrade


def replay(past: Iterable[Past], entries: Iterable[Entry] = (), settings: ReplaySettings | None = None) -> Replay:
    """Run a history again.

    Args:
        past: Finished requests, in any order.
        entries: The rows that hold and wait now.
        settings: The changed settings. Without any, the result is nearly the history itself. (The replay ignores the
            time that a wakeup takes, caps, pauses, and waiters without a position.)

    Raises `ConfigurationError` if a request weighs more than a new limit.
    """
    settings = settings or ReplaySettings()
    present = list(entries)
    times = ((entry.granted_at or entry.requested_at) + timedelta(seconds=entry.seconds) for entry in present)
    now = max(times, default=_EPOCH)

    def ended_at(row: Past | Entry) -> datetime:
        """Return the end of a row: present ones end when they were read, holders a moment after the waiters."""
        return row.ended_at if isinstance(row, Past) else now if row.granted_at is None else now + _MOMENT

    rows: dict[tuple[str, int], list[Past | Entry]] = defaultdict(list)
    for row in itertools.chain[Past | Entry](past, present):
        rows[row.resource, row.position].append(row)
    requests = []
    for parts in rows.values():
        parts.sort(key=ended_at)
        requests.append(_Request.of(parts, ended_at(parts[-1]), settings))
    requests.sort(key=lambda request: (request.requested, request.position))
    simulation = _Simulation(requests, settings)
    simulation.run()
    by_resource: dict[str, list[_Request]] = defaultdict(list)
    for request in requests:
        by_resource[request.resource].append(request)
    return Replay(
        everything=_compare(requests, per_limit=False),
        resources={name: _compare(by_resource[name], per_limit=True) for name in sorted(by_resource)},
        unfinished=len(present),
        guessed=simulation.guessed,
        stuck=sum(request.would_end is None for request in requests),
        refused=simulation.refused,
    )


@dataclass(slots=True, eq=False)
class _Request:
    """One request: as recorded, and (``kind``, ``would_…``) as in the replay. Times in seconds since 1970."""

    resource: str
    position: int
    requester: str
    kind: Kind
    was_kind: Kind
    requested: float
    granted: float | None
    ended: float
    #: The times of its upgrades and downgrades, each with the kind that it had from then on.
    conversions: list[tuple[float, Kind]]
    rank: float = 0.0  # by the order of the settings; the lowest is granted first
    queue_key: tuple[float, int] = (0.0, 0)  # the rank, and a number in the order of requests: its place in the queue
    would_request: float = 0.0
    would_be_granted: float | None = None
    would_end: float | None = None

    @classmethod
    def of(cls, parts: Sequence[Past | Entry], ended: datetime, settings: ReplaySettings) -> _Request:
        first = parts[0]
        conversions = [
            (part.ended_at.timestamp(), WRITING if part.outcome == "upgraded" else READING)
            for part in parts
            if isinstance(part, Past) and part.outcome in CONVERTED
        ]
        declared = first.limit
        if declared is None and first.resource in settings.caps:
            declared = max(settings.caps[first.resource], first.weight)
        was: Kind = (granted_access(first), 1 if conversions else declared, first.weight)
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
        requested = first.requested_at.timestamp()
        request = cls(
            resource=first.resource,
            position=first.position,
            requester=first.requesting_id,
            kind=kind,
            was_kind=was,
            requested=requested,
            granted=granted,
            ended=max(ended.timestamp(), requested if granted is None else granted),
            conversions=conversions,
        )
        request.rank = {
            "asked": 0.0,
            "shortest": request.held,
            "longest": -request.held,
            "lightest": float(kind[2]),
            "heaviest": -float(kind[2]),
        }[settings.order]
        return request

    @property
    def held(self) -> float:
        """The seconds for which it was held; 0 if the request gave up."""
        return 0.0 if self.granted is None else self.ended - self.granted


@dataclass(slots=True)
class _Step:
    """A step of a program: one action on these requests."""

    after: float  # seconds since the end of the step before
    action: str  # 'ask', 'convert' or 'leave'
    requests: list[_Request]
    kind: Kind | None = None
    gave_up_after: float | None = None  # seconds; for requests that gave up in the history


@dataclass(slots=True, eq=False)
class _Program:
    """The requests of one thread or task, from its first request until it has released everything."""

    start: float
    steps: list[_Step]
    at: int = 0  # the index of the next step
    missing: int = 0  # the number of requests of the present step that are not granted


def _programs(requests: Sequence[_Request]) -> list[_Program]:
    """Return the programs of a history, from its requests in order."""
    by_requester: dict[str, list[_Request]] = defaultdict(list)
    for request in requests:
        by_requester[request.requester].append(request)
    programs = []
    for own in by_requester.values():
        together: list[list[_Request]] = []
        for request in own:
            last = together[-1] if together else None
            if (
                last is not None
                and request.requested - last[0].requested <= TOGETHER_SECONDS
                and all(inner.resource != request.resource and inner.ended > request.requested for inner in last)
            ):
                last.append(request)
            else:
                together.append([request])
        nested: list[list[list[_Request]]] = []
        for group in together:
            begun = group[0].requested
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
    programs.sort(key=lambda program: (program.start, program.steps[0].requests[0].position))
    return programs


def _program(groups: Sequence[list[_Request]]) -> _Program:
    """Return the program of these groups; the requests of a group were made together."""
    timed_steps: list[tuple[float, float, _Step]] = []  # each with its begin and end
    for group in groups:
        begun = group[0].requested
        if any(request.granted is None for request in group):
            end = max(request.ended for request in group)
            timed_steps.append((begun, end, _Step(0.0, "ask", group, gave_up_after=end - begun)))
            continue
        timed_steps.append((begun, max(request.granted or begun for request in group), _Step(0.0, "ask", group)))
        for request in group:
            timed_steps += [
                (converted_at, converted_at, _Step(0.0, "convert", [request], kind))
                for converted_at, kind in request.conversions
            ]
            timed_steps.append((request.ended, request.ended, _Step(0.0, "leave", [request])))
    timed_steps.sort(key=lambda item: item[:2])
    time = timed_steps[0][0]
    for begun, end, step in timed_steps:
        step.after = max(0.0, begun - time)
        time = max(time, end)
    return _Program(timed_steps[0][0], [step for _, _, step in timed_steps])


class _Queue:
    """One resource in the replay."""

    def __init__(self, resource: str) -> None:
        self.queue: Queue[tuple[float, int]] = Queue(resource)
        # A heap for each kind. Requests that have given up stay in it until they are its first.
        self.waiting: dict[Kind, list[tuple[tuple[float, int], _Request]]] = {}
        self.inside: set[_Request] = set()
        self.upgrading: tuple[_Request, _Program] | None = None


class _Simulation:
    """A replay: it handles one event after the other, in the order of their times."""

    def __init__(self, requests: Sequence[_Request], settings: ReplaySettings) -> None:
        self.guessed = self.refused = 0
        self._fifo = settings.order == "asked"
        self._numbers = itertools.count(1)
        self._queues: dict[str, _Queue] = {}
        self._program_of: dict[_Request, _Program] = {}
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        holds: dict[str, list[float]] = defaultdict(list)
        for request in requests:
            self._queues.setdefault(request.resource, _Queue(request.resource))
            if request.granted is not None:
                holds[request.resource].append(request.held)
        self._median_held = {name: _share(sorted(durations), 0.5) for name, durations in holds.items()}
        for program in _programs(requests):
            self._next(program, program.start)

    def run(self) -> None:
        """Run until no event is left."""
        while self._events:
            now, _, _, handle = heapq.heappop(self._events)
            handle(now)

    def _at(self, time: float, order: int, handle: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, order, next(self._numbers), handle))

    def _next(self, program: _Program, now: float) -> None:
        if program.at == len(program.steps):
            return
        step = program.steps[program.at]
        program.at += 1
        handle = {"ask": self._ask, "convert": self._convert, "leave": self._leave}[step.action]
        self._at(now + step.after, ASKS if step.action == "ask" else LEAVES, lambda time: handle(program, step, time))

    # -- steps ----------------------------------------------------------------------------------------------------

    def _ask(self, program: _Program, step: _Step, now: float) -> None:
        program.missing = len(step.requests)
        for request in step.requests:
            queue = self._queues[request.resource]
            request.would_request, request.queue_key = now, (request.rank, next(self._numbers))
            self._program_of[request] = program
            queue.queue.add(request.kind, request.queue_key)
            heapq.heappush(queue.waiting.setdefault(request.kind, []), (request.queue_key, request))
        if step.gave_up_after is not None:
            self._at(now + step.gave_up_after, GIVES_UP, lambda time: self._give_up(program, step, time))
        for request in step.requests:
            self._grant_ready(request.resource, now, request.kind)  # a new request can make only its own kind grantable

    def _give_up(self, program: _Program, step: _Step, now: float) -> None:
        if not program.missing:  # it was granted
            return
        for request in step.requests:
            self._remove(request, now)
            request.would_be_granted = None
        for request in step.requests:
            self._grant_ready(request.resource, now)
        self._next(program, now)

    def _leave(self, program: _Program, step: _Step, now: float) -> None:
        for request in step.requests:
            self._remove(request, now)
            self._grant_ready(request.resource, now)
        self._next(program, now)

    def _remove(self, request: _Request, now: float) -> None:
        queue = self._queues[request.resource]
        queue.queue.remove(request.kind, request.queue_key)
        queue.inside.discard(request)
        request.would_end = now

    def _convert(self, program: _Program, step: _Step, now: float) -> None:
        (request,) = step.requests
        assert step.kind is not None
        queue = self._queues[request.resource]
        if step.kind == READING:
            if request.kind == WRITING:
                self._become(request, READING)
            self._grant_ready(request.resource, now)
        elif queue.upgrading is not None:  # each would wait for the other
            self.refused += 1
        else:
            self._become(request, UPGRADING)
            queue.upgrading = request, program
            self._try_upgrade(queue, now)
            return
        self._next(program, now)

    def _become(self, request: _Request, kind: Kind) -> None:
        queue = self._queues[request.resource].queue
        queue.remove(request.kind, request.queue_key)
        queue.add(kind, request.queue_key)
        request.kind = kind

    def _try_upgrade(self, queue: _Queue, now: float) -> None:
        if queue.upgrading is None:
            return
        request, program = queue.upgrading
        if queue.inside <= {request} and queue.queue.fits(WRITING, request.queue_key):
            queue.upgrading = None
            self._become(request, WRITING)
            self._next(program, now)

    # -- the rule -------------------------------------------------------------------------------------------------

    def _grant_ready(self, resource: str, now: float, only: Kind | None = None) -> None:
        """Grant all requests that fit. A request waits if an earlier one of its kind does not fit."""
        queue = self._queues[resource]
        heads = [(waiting[0][0], kind) for kind, waiting in queue.waiting.items() if only is None or kind == only]
        heapq.heapify(heads)
        while heads:
            _, kind = heapq.heappop(heads)
            waiting = queue.waiting[kind]
            queue_key, request = waiting[0]
            gone = request.would_end is not None
            if not gone and not queue.queue.fits(kind, queue_key):
                continue
            heapq.heappop(waiting)
            if waiting:
                heapq.heappush(heads, (waiting[0][0], kind))
            else:
                del queue.waiting[kind]
            if not gone:
                self._grant(queue, request, now)
        self._try_upgrade(queue, now)

    def _grant(self, queue: _Queue, request: _Request, now: float) -> None:
        if not self._fifo:  # holders go ahead of all waiters
            queue.queue.remove(request.kind, request.queue_key)
            request.queue_key = (float("-inf"), next(self._numbers))
            queue.queue.add(request.kind, request.queue_key)
        request.would_be_granted = now
        queue.inside.add(request)
        program = self._program_of[request]
        program.missing -= 1
        if program.missing:
            return
        step = program.steps[program.at - 1]
        if step.gave_up_after is not None:
            self.guessed += 1
            for released in step.requests:
                usual = _Step(self._median_held.get(released.resource, 0.0), "leave", [released])
                self._next(_Program(now, [usual]), now)
        self._next(program, now)


def _compare(requests: Sequence[_Request], *, per_limit: bool) -> Comparison:
    was = [(request.requested, request.granted, request.ended, request.was_kind) for request in requests]
    would = [
        (request.would_request, request.would_be_granted, request.would_end, (request.was_kind[0], *request.kind[1:]))
        for request in requests
        if request.would_end is not None
    ]
    return Comparison(_night(was, per_limit), _night(would, per_limit))


def _night(spans: Iterable[tuple[float, float | None, float | None, Kind]], per_limit: bool) -> Night:
    spans = list(spans)
    waits = sorted(
        (end or requested) - requested if entered is None else entered - requested
        for requested, entered, end, _ in spans
    )
    inside = [(entered, end, kind) for _, entered, end, kind in spans if entered is not None and end is not None]
    end = max((end for _, end, _ in inside), default=None)
    weighed = [(ended - entered, kind) for entered, ended, kind in inside if kind[0] == WRITE and kind[1] is not None]
    use = None
    if per_limit and weighed and end is not None:
        begun = min(requested for requested, *_ in spans)
        busy = sum(held * weight for held, (_, _, weight) in weighed)
        capacity = min(limit for _, (_, limit, _) in weighed if limit is not None) * (end - begun)
        use = busy / capacity if capacity > 0 else None
    return Night(
        requests=len(spans),
        granted=len(inside),
        not_granted=len(spans) - len(inside),
        end=None if end is None else datetime.fromtimestamp(end, timezone.utc),
        wait_p50=_share(waits, 0.5),
        wait_p99=_share(waits, 0.99),
        wait_total=sum(waits),
        use=use,
    )


def _share(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of these ordered values that this share of them does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
