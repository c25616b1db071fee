"""Check recorded histories against the specification: is a history a behaviour of ``Queues.tla``?

    python proof/traces.py --url postgresql://…/db --since 1h

A history has the finished requests of table ``history`` and, if programs recorded them, the times at which they worked.
It becomes module ``Trace``, which ``TraceQueues.tla`` follows event by event. It must be complete, including the rows
that did not end well; rows that are still there, or were there before, are ignored.

Raises `ValueError` for what ``Queues.tla`` does not model: hand-overs, and requests without a limit of their own.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proof import tlc
from sqlsem.values.locks import READ, UPGRADE, Past

__all__ = ["Event", "Verdict", "Visit", "beginning", "check", "events", "module"]

CONVERTED = ("upgraded", "downgraded")
#: Outcomes of rows that their owner did not end itself.
REMOVED = ("reaped", "revoked")


@dataclass(frozen=True)
class Event:
    """One event of the trace: the actor ``who`` acts on a row ``of`` an owner. ``at`` is in units of the clock."""

    at: int
    what: str  # 'registered', 'granted', 'entered', 'left', 'ended', 'removed', 'upgraded', 'downgraded'
    who: str
    of: str
    resource: str
    number: int
    access: str
    limit: int
    weight: int


@dataclass(frozen=True)
class Visit:
    """The time for which a program held its lock, by its own record, in seconds since 1970; ``left`` None: for ever."""

    resource: str
    position: int
    entered: float
    left: float | None


@dataclass(frozen=True)
class Verdict:
    """The verdict; if it is not a behaviour, the first impossible events, or the property violated after them."""

    accepted: bool
    events: int
    refused: tuple[Event, ...] = ()
    violated: str = ""


def events(past: Iterable[Past], visits: Iterable[Visit] = (), *, unit: float = 1e-6) -> list[Event]:
    """Return the events of a history. ``unit``: the resolution of its clock, in seconds (SQLite: a millisecond)."""
    lives: dict[tuple[str, int], list[Past]] = defaultdict(list)
    for row in past:
        lives[row.resource, row.position].append(row)
    inside: dict[tuple[str, int], Visit] = {(row.resource, row.position): row for row in visits}
    events_found: list[Event] = []
    for key, life in lives.items():
        life.sort(key=lambda row: (row.ended_at, row.outcome not in CONVERTED))
        first, last = life[0], life[-1]
        if any(row.outcome == "handed_over" for row in life):
            raise ValueError(f"Position {key[1]} on {key[0]!r} was handed over, which Queues.tla does not know")
        # (Not every engine records the limit of a converted row; it is always 1.)
        limit = 1 if len(life) > 1 else last.limit
        if limit is None:
            raise ValueError(
                f"Position {key[1]} on {key[0]!r} went by the limit of the server, which Queues.tla does not know"
            )
        access = READ if first.access == UPGRADE else first.access
        moments = [(first.requested_at.timestamp(), "registered")]
        if first.granted_at is not None:
            moments.append((first.granted_at.timestamp(), "granted"))
        moments += [(row.ended_at.timestamp(), row.outcome) for row in life[:-1]]
        moments.append((last.ended_at.timestamp(), "removed" if last.outcome in REMOVED else "ended"))
        stamps = [(round(at / unit), kind) for at, kind in moments]
        visit = inside.pop(key, None)
        if visit is not None:
            stamps.append((math.floor(visit.entered / unit), "entered"))
            if visit.left is not None:
                stamps.append((math.floor(visit.left / unit), "left"))
        events_found += [
            Event(at, kind, first.requesting_id, first.requesting_id, *key, access, limit, first.weight)
            for at, kind in stamps
        ]
    if inside:
        raise ValueError(f"A holder was inside of which the history knows nothing: {next(iter(inside))}")
    return sorted(events_found, key=lambda event: event.at)


def beginning(trace: Sequence[Event], maximum: int) -> list[Event]:
    """Return the first events, of whole moments, and at most ``most``: the beginning of a behaviour is one too."""
    events_taken: list[Event] = []
    for moment in _moments(trace):
        if len(events_taken) + len(moment) > maximum:
            break
        events_taken += moment
    return events_taken


def _moments(trace: Sequence[Event]) -> list[list[Event]]:
    return [list(some) for _, some in itertools.groupby(trace, key=lambda event: event.at)]


def _text(value: str) -> str:
    """Return a name as a string of TLA+, which it must not break."""
    return '"' + "".join(c if re.match(r"[\w .:/-]", c, re.ASCII) else f"_{ord(c):x}_" for c in value) + '"'


def module(trace: Sequence[Event]) -> str:
    """Return module ``Trace`` of these events, which are in order.

    Only the order of the numbers counts. After a failover they are too large for TLC, so here they are 1, 2, 3.
    """
    ranks = {number: rank for rank, number in enumerate(sorted({event.number for event in trace}), 1)}

    def record(event: Event) -> str:
        return (
            f"[what |-> {_text(event.what)}, who |-> {_text(event.who)}, of |-> {_text(event.of)}, "
            f"resource |-> {_text(event.resource)}, position |-> {ranks[event.number]}, "
            f"access |-> {_text(event.access)}, limit |-> {event.limit}, weight |-> {event.weight}]"
        )

    moments = ",\n  ".join("{" + ", ".join(map(record, some)) + "}" for some in _moments(trace))
    people = ", ".join(sorted({_text(name) for event in trace for name in (event.who, event.of)}))
    asks = ", ".join(
        f"[resource |-> {_text(resource)}, access |-> {_text(access)}, limit |-> {limit}, weight |-> {weight}]"
        for resource, access, limit, weight in sorted({(e.resource, e.access, e.limit, e.weight) for e in trace})
    )
    later = ", ".join(f"<<{_text(e.resource)}, {ranks[e.number]}>>" for e in trace if e.what == "upgraded")
    return (
        "---- MODULE Trace ----\nEXTENDS Integers\n"
        f"TraceRequester == {{{people}}}\nTraceRequest == {{{asks}}}\nUpgradeLater == {{{later}}}\n"
        f"Moments == <<\n  {moments}\n>>\n====\n"
    )


def check(trace: Sequence[Event], *, seconds: float = 600) -> Verdict:
    """Check whether these events, in order, are a behaviour of ``Queues.tla``. Raises `RuntimeError` if TLC cannot
    run.
    """
    config = (tlc.FOLDER / "TraceQueues.cfg").read_text(encoding="utf-8")
    outcome = tlc.run("TraceQueues", config, files={"Trace.tla": module(trace)}, seconds=seconds)
    if outcome.violated == "NotAccepted":
        return Verdict(accepted=True, events=len(trace))
    reached = [int(number) for number in re.findall(r'<<"moment", (\d+)>>', outcome.output)]
    refused = _moments(trace)[max(reached, default=1) - 1]
    return Verdict(accepted=False, events=len(trace), refused=tuple(refused), violated=outcome.violated)


def main(arguments: list[str]) -> int:
    import sqlsem
    from sqlsem.cli.nights import Night
    from sqlsem.values.locks import check_duration

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="which database; as for sqlsem")
    parser.add_argument("--since", default="1h", help="how far to look back")
    parser.add_argument("--resource", help="of this one only")
    options = parser.parse_args(arguments)
    with sqlsem.connect(options.url) as coordinator:
        night = Night(coordinator, options.resource, check_duration("since", options.since))
        unit = 1e-3 if coordinator.engine.name == "sqlite" else 1e-6
        verdict = check(events(night.past(), unit=unit))
    if verdict.accepted:
        print(f"{verdict.events} events: a behaviour of the specification")
        return 0
    print(f"Not a behaviour of the specification; {verdict.violated or 'it ends'} at one of:")
    for event in verdict.refused:
        print(f"  {event}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
