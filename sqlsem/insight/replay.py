"""What a night would have been: the rule, run forward over the requests of a history under other terms.

Each request is asked again when it was asked, and held for as long as it was held. What a thread or task did while it
held something is one *program*: a lock that it took inside another is asked for as long after the first was had, and
the first is kept for as long after the second. Locks that were taken all together are asked for together. Between
programs nothing is shifted: the night's requests come when they came.
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

__all__ = ["ORDERS", "Compared", "Night", "Replay", "Terms", "replay"]

#: Numbers taken in one transaction lie no further apart than this, seconds.
TOGETHER_SECONDS = 0.02
CONVERTED = ("upgraded", "downgraded")
#: Who goes first of those that wait.
ORDERS = ("asked", "shortest", "longest", "lightest", "heaviest")
#: What happens at one time, in this order.
LEAVES, ASKS, GIVES_UP = 0, 1, 2
#: One that the rule never lets anybody beside: what a reader is while it waits to be the writer.
UPGRADING: Kind = (UPGRADE, 1, 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MOMENT = timedelta(milliseconds=1)
WRITING: Kind = (WRITE, 1, 1)
READING: Kind = (READ, 1, 1)


@dataclass(frozen=True, slots=True)
class Terms:
    """What is otherwise than it was: limits and weights by resource (of those who ask for a limit or a mutex; readers
    and stages keep theirs), and the order, one of `ORDERS`. How long a request will hold nobody knows beforehand, so
    'shortest' and 'longest' say what knowing it would be worth.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    order: str = "asked"
    #: The server's limits, as they are now: those who named none had these.
    caps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Night:
    """What one night was, of one resource or of all. Durations in seconds."""

    requests: int
    let_in: int
    gave_up: int
    end: datetime | None  # the last one left
    wait_p50: float
    wait_p99: float
    wait_total: float
    #: The share of the lowest limit that was in use from the first request to the end; None for readers and stages.
    use: float | None

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        names = ("requests", "let_in", "gave_up", "wait_p50", "wait_p99", "wait_total", "use")
        return {name: getattr(self, name) for name in names} | {"end": self.end and self.end.isoformat()}


@dataclass(frozen=True, slots=True)
class Compared:
    """What it was, and what it would have been."""

    was: Night
    would: Night

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return {"was": self.was.as_dict(), "would": self.would.as_dict()}


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it."""

    everything: Compared
    resources: dict[str, Compared]
    unfinished: int  # held or waited for when the history was read: taken to have ended then
    guessed: int  # gave up then, and would have got in: taken to hold as long as is usual on their resource
    stuck: int  # would wait for ever for each other: sqlsem would tell the youngest `Deadlock`
    refused: int  # upgrades that another upgrade would have been in the way of

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return {
            "everything": self.everything.as_dict(),
            "resources": {name: resource.as_dict() for name, resource in self.resources.items()},
            "unfinished": self.unfinished,
            "guessed": self.guessed,
            "stuck": self.stuck,
            "refused": self.refused,
        }


def replay(past: Iterable[Past], entries: Iterable[Entry] = (), terms: Terms | None = None) -> Replay:
    """Run a night again.

    Args:
        past: Finished requests, in any order.
        entries: What holds and waits now.
        terms: What is otherwise; left out, nothing, which gives nearly the night that was: it knows nothing of the time
            that it takes to wake the next one, of caps and pauses, and of who waited without a number.

    Raises `ConfigurationError` when a request weighs more than a new limit.
    """
    terms = terms or Terms()
    unfinished = _as_past(entries)
    rows: dict[tuple[str, int], list[Past]] = defaultdict(list)
    for one in itertools.chain(past, unfinished):
        rows[one.resource, one.position].append(one)
    asks = [_Ask.of(sorted(parts, key=lambda part: part.ended_at), terms) for parts in rows.values()]
    asks.sort(key=lambda ask: (ask.asked, ask.position))
    run = _Run(asks, terms)
    run.to_the_end()
    by_resource: dict[str, list[_Ask]] = defaultdict(list)
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
    """What is there, as if it had ended when we looked; those who wait a moment before those who hold."""
    found = []
    now = _EPOCH
    for entry in entries:
        since = entry.requested_at if entry.granted_at is None else entry.granted_at
        now = max(now, since + timedelta(seconds=entry.seconds))
        found.append((entry, since))
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
        for entry, since in found
    ]


@dataclass(slots=True, eq=False)
class _Ask:
    """One request, as it was and as it would be. Times in seconds since 1970."""

    resource: str
    position: int
    requester: str
    kind: Kind
    was_kind: Kind
    asked: float
    granted: float | None
    ended: float
    #: What it became, and when: upgrades and downgrades.
    turns: list[tuple[float, Kind]]
    rank: float = 0.0
    place: tuple[float, int] = (0.0, 0)
    would_ask: float = 0.0
    would_enter: float | None = None
    would_end: float | None = None

    @classmethod
    def of(cls, parts: Sequence[Past], terms: Terms) -> _Ask:
        first, last = parts[0], parts[-1]
        turns = []
        for part in parts:
            if part.outcome in CONVERTED:
                turns.append((part.ended_at.timestamp(), WRITING if part.outcome == "upgraded" else READING))
        declared = first.limit
        if declared is None and first.resource in terms.caps:
            declared = max(terms.caps[first.resource], first.weight)
        was: Kind = (first.access, 1 if turns else declared, first.weight)
        kind = was
        if first.access == WRITE and not turns:
            limit, weight = terms.limits.get(first.resource, was[1]), terms.weights.get(first.resource, was[2])
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
            turns=turns,
        )
        ask.rank = {
            "asked": 0.0,
            "shortest": ask.held,
            "longest": -ask.held,
            "lightest": float(kind[2]),
            "heaviest": -float(kind[2]),
        }[terms.order]
        return ask

    @property
    def held(self) -> float:
        """For how long, seconds; 0 when it gave up."""
        return 0.0 if self.granted is None else self.ended - self.granted


#: What a program does: so long after what it did before, something with these.
@dataclass(slots=True)
class _Step:
    after: float
    what: str  # 'ask', 'turn' or 'leave'
    asks: list[_Ask]
    kind: Kind | None = None
    patience: float | None = None  # of those who gave up


@dataclass(slots=True, eq=False)
class _Program:
    """What one thread or task does from its first request until it has given everything back."""

    start: float
    steps: list[_Step]
    at: int = 0
    missing: int = 0  # of what it asks for now


def _programs(asks: Sequence[_Ask]) -> list[_Program]:
    """Those of a night, from its requests in order."""
    of_one: dict[str, list[_Ask]] = defaultdict(list)
    for ask in asks:
        of_one[ask.requester].append(ask)
    found = []
    for own in of_one.values():
        together: list[list[_Ask]] = []
        for ask in own:
            last = together[-1] if together else None
            if (
                last is not None
                and ask.asked - last[0].asked <= TOGETHER_SECONDS
                and all(one.resource != ask.resource and one.ended > ask.asked for one in last)
            ):
                last.append(ask)
            else:
                together.append([ask])
        nested: list[list[list[_Ask]]] = []
        for group in together:
            begun = group[0].asked
            before = [one for other in nested[-1] for one in other] if nested else []
            if (
                before
                and all(one.granted is not None and one.granted <= begun for one in before)
                and any(one.ended > begun for one in before)
            ):
                nested[-1].append(group)
            else:
                nested.append([group])
        found += [_program(groups) for groups in nested]
    found.sort(key=lambda program: (program.start, program.steps[0].asks[0].position))
    return found


def _program(groups: Sequence[list[_Ask]]) -> _Program:
    """From what it asked for, and when it had and left that."""
    done: list[tuple[float, float, _Step]] = []  # begun, done
    for group in groups:
        begun = group[0].asked
        if any(ask.granted is None for ask in group):
            end = max(ask.ended for ask in group)
            done.append((begun, end, _Step(0.0, "ask", group, patience=end - begun)))
            continue
        done.append((begun, max(ask.granted or begun for ask in group), _Step(0.0, "ask", group)))
        for ask in group:
            done += [(turn, turn, _Step(0.0, "turn", [ask], kind)) for turn, kind in ask.turns]
            done.append((ask.ended, ask.ended, _Step(0.0, "leave", [ask])))
    done.sort(key=lambda one: one[:2])
    time = done[0][0]
    for begun, end, step in done:
        step.after = max(0.0, begun - time)
        time = max(time, end)
    return _Program(done[0][0], [step for _, _, step in done])


class _WaiterQueue:
    """One resource, as it would be."""

    def __init__(self, resource: str) -> None:
        self.queue: Queue[tuple[float, int]] = Queue(resource)
        self.waiting: dict[Kind, list[tuple[tuple[float, int], _Ask]]] = {}  # heaps; who gave up is still in them
        self.inside: set[_Ask] = set()
        self.upgrading: tuple[_Ask, _Program] | None = None


class _Run:
    """One night, from event to event."""

    def __init__(self, asks: Sequence[_Ask], terms: Terms) -> None:
        self.guessed = self.refused = 0
        self._fifo = terms.order == "asked"
        self._numbers = itertools.count(1)
        self._lines: dict[str, _WaiterQueue] = {}
        self._of: dict[_Ask, _Program] = {}
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        holds: dict[str, list[float]] = defaultdict(list)
        for ask in asks:
            self._lines.setdefault(ask.resource, _WaiterQueue(ask.resource))
            if ask.granted is not None:
                holds[ask.resource].append(ask.held)
        self._usual = {name: _share(sorted(some), 0.5) for name, some in holds.items()}
        for program in _programs(asks):
            self._next(program, program.start)

    def to_the_end(self) -> None:
        """Until nothing happens any more."""
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
        happen = {"ask": self._ask, "turn": self._turn, "leave": self._leave}[step.what]
        self._at(now + step.after, ASKS if step.what == "ask" else LEAVES, lambda time: happen(program, step, time))

    # -- steps ----------------------------------------------------------------------------------------------------

    def _ask(self, program: _Program, step: _Step, now: float) -> None:
        program.missing = len(step.asks)
        for ask in step.asks:
            line = self._lines[ask.resource]
            ask.would_ask, ask.place = now, (ask.rank, next(self._numbers))
            self._of[ask] = program
            line.queue.add(ask.kind, ask.place)
            heapq.heappush(line.waiting.setdefault(ask.kind, []), (ask.place, ask))
        if step.patience is not None:
            self._at(now + step.patience, GIVES_UP, lambda time: self._give_up(program, step, time))
        for ask in step.asks:
            self._settle(ask.resource, now, ask.kind)  # nobody else can go in because somebody came

    def _give_up(self, program: _Program, step: _Step, now: float) -> None:
        if not program.missing:  # it got in
            return
        for ask in step.asks:
            self._remove(ask, now)
            ask.would_enter = None
        for ask in step.asks:
            self._settle(ask.resource, now)
        self._next(program, now)

    def _leave(self, program: _Program, step: _Step, now: float) -> None:
        for ask in step.asks:
            self._remove(ask, now)
            self._settle(ask.resource, now)
        self._next(program, now)

    def _remove(self, ask: _Ask, now: float) -> None:
        line = self._lines[ask.resource]
        line.queue.remove(ask.kind, ask.place)
        line.inside.discard(ask)
        ask.would_end = now

    def _turn(self, program: _Program, step: _Step, now: float) -> None:
        (ask,) = step.asks
        assert step.kind is not None
        line = self._lines[ask.resource]
        if step.kind == READING:
            if ask.kind == WRITING:
                self._become(ask, READING)
            self._settle(ask.resource, now)
        elif line.upgrading is not None:  # each would wait for the other
            self.refused += 1
        else:
            self._become(ask, UPGRADING)
            line.upgrading = ask, program
            self._finish_upgrade(line, now)
            return
        self._next(program, now)

    def _become(self, ask: _Ask, kind: Kind) -> None:
        queue = self._lines[ask.resource].queue
        queue.remove(ask.kind, ask.place)
        queue.add(kind, ask.place)
        ask.kind = kind

    def _finish_upgrade(self, line: _WaiterQueue, now: float) -> None:
        if line.upgrading is None:
            return
        ask, program = line.upgrading
        if line.inside <= {ask} and line.queue.fits(WRITING, ask.place):
            line.upgrading = None
            self._become(ask, WRITING)
            self._next(program, now)

    # -- the rule -------------------------------------------------------------------------------------------------

    def _settle(self, resource: str, now: float, only: Kind | None = None) -> None:
        """Let in whoever may go in. Of one kind nobody can who has another one ahead that cannot."""
        line = self._lines[resource]
        heads = [(waiting[0][0], kind) for kind, waiting in line.waiting.items() if only is None or kind == only]
        heapq.heapify(heads)
        while heads:
            _, kind = heapq.heappop(heads)
            waiting = line.waiting[kind]
            place, ask = waiting[0]
            gone = ask.would_end is not None
            if not gone and not line.queue.fits(kind, place):
                continue
            heapq.heappop(waiting)
            if waiting:
                heapq.heappush(heads, (waiting[0][0], kind))
            else:
                del line.waiting[kind]
            if not gone:
                self._let_in(line, ask, now)
        self._finish_upgrade(line, now)

    def _let_in(self, line: _WaiterQueue, ask: _Ask, now: float) -> None:
        if not self._fifo:  # whoever is inside stands ahead of all who wait
            line.queue.remove(ask.kind, ask.place)
            ask.place = (float("-inf"), next(self._numbers))
            line.queue.add(ask.kind, ask.place)
        ask.would_enter = now
        line.inside.add(ask)
        program = self._of[ask]
        program.missing -= 1
        if program.missing:
            return
        step = program.steps[program.at - 1]
        if step.patience is not None:
            self.guessed += 1
            for one in step.asks:
                usual = _Step(self._usual.get(one.resource, 0.0), "leave", [one])
                self._next(_Program(now, [usual]), now)
        self._next(program, now)


def _compare(asks: Sequence[_Ask], *, per_limit: bool) -> Compared:
    was = [(ask.asked, ask.granted, ask.ended, ask.was_kind) for ask in asks]
    would = [
        (ask.would_ask, ask.would_enter, ask.would_end, (ask.was_kind[0], *ask.kind[1:]))
        for ask in asks
        if ask.would_end is not None
    ]
    return Compared(_night(was, per_limit), _night(would, per_limit))


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
    """The least of these that so many of them do not pass."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
