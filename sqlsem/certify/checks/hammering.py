"""Many at once, and a witness inside: checks 8, 9, 10 and 12."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import Any

from sqlsem.certify.bench import PATIENCE, Bench
from sqlsem.certify.children import Child
from sqlsem.certify.registry import check
from sqlsem.certify.results import Failed, Notes
from sqlsem.certify.sessions import Session, later
from sqlsem.certify.worker import LIMITS

__all__ = ["overlap"]

#: How often each session registers, for check 8.
REGISTRATIONS = 20


@check(8, "positions are in the order of commits")
def order_of_commits(bench: Bench, notes: Notes) -> None:
    """Have many register at once, and read the queue meanwhile: a lower position never appears after a higher one."""
    resource = bench.name()
    over = threading.Event()
    number = max(2, bench.wishes.max_sessions // 2) if bench.has_routines else 4
    looking = later(_look_at_positions, bench.session(), resource, over)
    try:
        calls = [later(_register, bench, resource, f"s{turn}") for turn in range(number)]
        for call in calls:
            call.result(PATIENCE)
    finally:
        over.set()
    looks, seen = looking.result(PATIENCE)
    notes.require(seen == number * REGISTRATIONS, f"{seen} of {number * REGISTRATIONS} registrations were seen")
    notes.note(f"{seen} registrations of {number} sessions, {looks} looks", registrations=seen, looks=looks)


def _register(bench: Bench, resource: str, who: str) -> None:
    if not bench.has_routines:
        coordinator = bench.coordinator(grace=PATIENCE)
        locks = [coordinator.limit(resource, 1_000_000, reentrant=False) for _ in range(REGISTRATIONS)]
        for lock in locks:
            lock.acquire(timeout=PATIENCE)
        return
    session = bench.session()
    for _ in range(REGISTRATIONS):
        session.acquire(resource, limit=1_000_000, timeout_ms=int(PATIENCE * 1000))


def _look_at_positions(session: Session, resource: str, over: threading.Event) -> tuple[int, int]:
    highest, seen, looks = 0, set[int](), 0
    while True:
        last = over.is_set()
        new = {int(row[0]) for row in session.rows("positions", resource)} - seen
        looks += 1
        late = [position for position in new if position < highest]
        if late:
            raise Failed(f"position {min(late)} was committed after position {highest} was seen")
        seen |= new
        highest = max([highest, *new])
        if last:
            return looks, len(seen)


def overlap(holds: Iterable[dict[str, Any]]) -> str | None:
    """In words, two holds that may not have been at the same time, by the clock of this host."""
    inside: list[dict[str, Any]] = []
    for hold in sorted(holds, key=lambda one: float(one["since"])):
        inside = [one for one in inside if one["until"] > hold["since"]]
        if hold["kind"] == "limit":
            bad = len(inside) >= LIMITS["limit"]
        else:
            bad = any(hold["kind"] != "read" or one["kind"] != "read" for one in inside)
        if bad:
            return f"{hold['kind']} of {hold['who']} was inside together with {', '.join(one['who'] for one in inside)}"
        inside.append(hold)
    return None


def hammer(bench: Bench, notes: Notes, kinds: list[str], seconds: float, counts: bool = False) -> int:
    """Have processes and sessions take turns, and judge what they saw; the number of turns."""
    resource = bench.name()
    faces = ["library"] * 3 + ["session"] * (2 if bench.has_routines else 0)
    children = [
        bench.child("hammer", resource=resource, kinds=kinds, seconds=seconds, face=face, counts=counts)
        for face in faces
    ]
    holds: list[dict[str, Any]] = []
    for child in children:
        holds += turns_of(child)
    judge(holds, notes)
    for child in children:
        child.close()
    return len(holds)


def turns_of(child: Child, seconds: float = PATIENCE) -> list[dict[str, Any]]:
    """All turns of a process of a hammer, which must end well."""
    who = child.expect("ready")["who"]
    found: list[dict[str, Any]] = []
    while True:
        event = child.next(seconds)
        if event is None:
            raise Failed("a process of the hammer ended before it was done")
        if event["event"] == "end":
            return found
        if event["event"] == "failed":
            raise Failed(event["words"])
        found.append({**event, "who": who})


def judge(holds: list[dict[str, Any]], notes: Notes) -> None:
    """Raise `Failed` when two were inside that may not be, by the table or by the clock; or when a lock was lost."""
    bad = next((hold["bad"] for hold in holds if hold["bad"]), None)
    notes.require(bad is None, f"seen in the database: {bad}")
    words = overlap(holds)
    notes.require(words is None, f"seen by this host's clock: {words}")
    lost = sum(bool(hold["lost"]) for hold in holds)
    notes.require(not lost, f"{lost} locks were lost while nothing had happened to their holders")
    notes.require(holds, "nobody was granted anything")


@check(9, "a new holder sees what the one before has committed")
def sees_what_was_committed(bench: Bench, notes: Notes) -> None:
    """Count under a mutex by plain reads and writes: a stale read loses a number."""
    session = bench.session()
    before = int(session.value("read_counter"))
    turns = hammer(bench, notes, ["mutex"], bench.wishes.seconds, counts=True)
    counted = int(session.value("read_counter")) - before
    notes.require(counted == turns, f"{turns} turns counted to {counted}")
    notes.note(f"{turns} turns, none lost", turns=turns)


@check(10, "no two are inside that may not be")
def nobody_is_inside_wrongly(bench: Bench, notes: Notes) -> None:
    """Mutex, limit of 3, readers and writers; judged in the database and by the clock."""
    for what, kinds in (("mutex", ["mutex"]), ("limit 3", ["limit"]), ("read/write", ["read", "read", "write"])):
        turns = hammer(bench, notes, kinds, bench.wishes.seconds)
        notes.note(f"{what}: {turns} turns", **{what.replace(" ", "_").replace("/", "_"): turns})
    if bench.wishes.long is not None:
        _soak(bench, notes, bench.wishes.long)


def _soak(bench: Bench, notes: Notes, seconds: float) -> None:
    with contextlib.suppress(KeyError):
        notes.note(f"soak of {seconds:g} s", soak_seconds=seconds)
    _ = time
