"""Draws docs/night.svg, the timeline in last-night.md: a made-up night, lived by the rule itself.

Run as ``python docs/night.py``; needs sqlsem[timeline]. The picture is always the same.
"""

from __future__ import annotations

import os
import random
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

os.environ["TZ"] = "UTC"  # its times are of nowhere in particular
if hasattr(time, "tzset"):
    time.tzset()

from sqlsem.insight.timeline import timeline
from sqlsem.ops.terminal.timeline import picture
from sqlsem.values.locks import Entry, Past, Request

FILE = Path(__file__).with_name("night.svg")
BEGIN = datetime(2030, 1, 1, 22, tzinfo=timezone.utc)
MINUTES = 8 * 60


def asked(seed: int = 7) -> list[tuple[int, Request, int]]:
    """Return the requests: minute of arrival, request, and minutes of holding."""
    rng = random.Random(seed)
    found = []
    for number in range(34):
        weight = 2 if number % 9 == 4 else 1
        request = Request("etl", limit=3, weight=weight, note=f"load {number}")
        found.append((rng.randrange(10, 260), request, rng.randrange(8, 45)))
    for _ in range(26):
        found.append((rng.randrange(0, 430), Request("dim_customer", "read", note="report"), rng.randrange(5, 25)))
    found += [(minute, Request("dim_customer", note="nightly load"), 25) for minute in (70, 230, 330)]
    return sorted(found, key=lambda one: one[0])


def lived() -> list[Past | Entry]:
    """Return the holds and waits that follow from the requests, minute by minute."""
    asks = asked()
    granted: dict[int, int] = {}
    ended: dict[int, int] = {}
    for minute in range(MINUTES + 1):
        for number, (_, _, held) in enumerate(asks):
            if number in granted and granted[number] + held == minute:
                ended[number] = minute
        for number, (when, request, _) in enumerate(asks):
            ahead = [
                other
                for before, (_, other, _) in enumerate(asks[:number])
                if before not in ended and other.resource == request.resource
            ]
            if when <= minute and number not in granted and number not in ended:
                if request.fits(ahead, None):
                    granted[number] = minute
                elif minute - when >= 100:  # its timeout
                    ended[number] = minute
    return [_row(number, asks[number], granted.get(number), ended.get(number)) for number in range(len(asks))]


def _row(number: int, ask: tuple[int, Request, int], entered: int | None, left: int | None) -> Past | Entry:
    when, request, _ = ask

    def at(minute: int) -> datetime:
        return BEGIN + timedelta(minutes=minute)

    inside = None if entered is None else at(entered)
    who = {"owner": None, "host": "etl1", "pid": 4000 + number, "program": "python", "note": request.note}
    if left is None:
        return Entry(
            request.resource,
            number,
            "waits" if inside is None else "holds",
            request.access,
            request.limit,
            request.weight,
            requesting_id=str(number),
            member_id=number,
            requested_at=at(when),
            granted_at=inside,
            seconds=60.0 * (MINUTES - (when if entered is None else entered)),
            missing_for=None,
            **who,
        )
    return Past(
        request.resource,
        number,
        request.access,
        request.weight,
        requesting_id=str(number),
        requested_at=at(when),
        granted_at=inside,
        ended_at=at(left),
        waited=60.0 * ((left if entered is None else entered) - when),
        held=None if entered is None else 60.0 * (left - entered),
        outcome="timeout" if entered is None else "reaped" if number == 20 else "released",
        limit=request.limit,
        **who,
    )


def main() -> None:
    """Draw it."""
    rows = lived()
    past = sorted((row for row in rows if isinstance(row, Past)), key=lambda row: row.ended_at, reverse=True)
    entries = [row for row in rows if isinstance(row, Entry)]
    drawn = timeline(past, entries, BEGIN, BEGIN + timedelta(minutes=MINUTES))
    FILE.write_bytes(picture(drawn, ".svg"))
    print(f"{FILE}: {drawn.requests} requests")


if __name__ == "__main__":
    main()
