"""Make histories with a small, slow model of the rule, and check histories with the same model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

from hypothesis import strategies as st

from sqlsem.values.locks import Entry, Past, Request

START = datetime(2030, 1, 1, tzinfo=timezone.utc)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def seconds(moment: datetime) -> float:
    return (moment - START).total_seconds()


def past(
    resource: str,
    position: int,
    requested: float,
    granted: float | None,
    ended: float,
    access: str = "write",
    limit: int | None = 1,
    weight: int = 1,
    outcome: str = "released",
    **more,
) -> Past:
    return Past(
        resource=resource,
        position=position,
        access=access,
        weight=weight,
        requesting_id=more.pop("requesting_id", f"r{position}"),
        owner=None,
        note=more.pop("note", None),
        requested_at=at(requested),
        granted_at=None if granted is None else at(granted),
        ended_at=at(ended),
        waited=(ended if granted is None else granted) - requested,
        held=None if granted is None else ended - granted,
        outcome=outcome,
        limit=limit,
        **{"host": "h", "pid": position, "login": "l", **more},
    )


def entry(resource: str, position: int, requested: float, granted: float | None, now: float, **more) -> Entry:
    known = {field.name: None for field in dataclasses.fields(Entry)}
    known |= {
        **{"resource": resource, "position": position, "requested_at": at(requested), "access": "write", "limit": 1},
        **{"weight": 1, "requesting_id": f"r{position}", "member_id": 1, "host": "h", "pid": position},
        **{"granted_at": None if granted is None else at(granted), "state": "waits" if granted is None else "holds"},
        "seconds": now - (requested if granted is None else granted),
    }
    return Entry(**(known | more))


@dataclass
class Ask:
    """One request of a made-up night: when, for what, for how long; and its timeout."""

    at: int
    resource: str
    access: str
    limit: int | None
    weight: int
    hold: int
    patience: int | None = None


def request_of(row: Ask | Past) -> Request:
    return Request(row.resource, row.access, row.limit, row.weight)


def lived(asks: Sequence[Ask]) -> list[Past]:
    """Return the history of the requests: the rule is applied to each of them in each second. Newest end first."""
    asks = sorted(asks, key=lambda ask: ask.at)
    requests = [request_of(ask) for ask in asks]
    granted: dict[int, int] = {}
    ended: dict[int, int] = {}
    now = 0
    while len(ended) < len(asks):
        for number, ask in enumerate(asks):
            if number in granted and granted[number] + ask.hold <= now:
                ended.setdefault(number, now)
        # A granted request may end at once, which may grant others.
        again = True
        while again:
            again = False
            for number, ask in enumerate(asks):
                if number in granted or number in ended or ask.at > now:
                    continue
                ahead = [
                    requests[other]
                    for other in range(number)
                    if other not in ended and asks[other].resource == ask.resource
                ]
                if requests[number].fits(ahead, None):
                    granted[number] = now
                    if not ask.hold:
                        ended[number] = now
                        again = True
                elif ask.patience is not None and ask.at + ask.patience <= now:
                    ended[number] = now
                    again = True
        now += 1
    past_rows = [
        past(
            ask.resource,
            number + 1,
            ask.at,
            granted.get(number),
            ended[number],
            ask.access,
            ask.limit,
            ask.weight,
            "released" if number in granted else "timeout",
        )
        for number, ask in enumerate(asks)
    ]
    return newest_first(past_rows)


def newest_first(rows: Iterable[Past]) -> list[Past]:
    """Sort the rows by their end, newest first; rows that ended at the same time keep their order."""
    return sorted(rows, key=lambda row: row.ended_at, reverse=True)


def broken(rows: Sequence[Past]) -> set[int]:
    """Return the positions granted against the rule: they did not fit beside the open rows ahead of them."""
    positions = set()
    for row in rows:
        if row.granted_at is None:
            continue
        ahead = [
            request_of(other)
            for other in rows
            if other.resource == row.resource and other.position < row.position and other.ended_at > row.granted_at
        ]
        if not request_of(row).fits(ahead, None):
            positions.add(row.position)
    return positions


def handed_over(rows: Sequence[Past]) -> float:
    """Return the sum of the hand-over times: the seconds from the moment with room for a request until its grant."""
    total = 0.0
    for row in rows:
        if row.granted_at is None:
            continue
        ahead = [other for other in rows if other.resource == row.resource and other.position < row.position]
        for moment in sorted([row.requested_at, *(other.ended_at for other in ahead)]):
            remaining = [request_of(other) for other in ahead if other.ended_at > moment]
            if moment >= row.requested_at and request_of(row).fits(remaining, None):
                total += max(0.0, (row.granted_at - moment).total_seconds())
                break
    return total


def moved(row: Past, **times: float) -> Past:
    """Return the same history at other times."""
    return replace(row, **{name: at(value) for name, value in times.items()})


#: The requests, and their owners, in nights that hypothesis makes.
KINDS = [("write", 1, 1), ("write", 3, 1), ("write", 3, 2), ("read", 1, 1), ("stage:1", 1, 1), ("stage:2", 1, 1)]
KINDS += [("write", None, 1), ("read", 2, 2)]
asks = st.builds(
    lambda when, resource, kind, hold, patience: Ask(when, resource, *kind, hold, patience),
    st.integers(0, 12),
    st.sampled_from("ab"),
    st.sampled_from(KINDS),
    st.integers(0, 6),
    st.none() | st.integers(0, 9),
)
