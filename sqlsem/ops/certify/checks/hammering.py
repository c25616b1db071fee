"""Many concurrent calls, and what their holders observe: checks 8 to 12."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from typing import Any

from sqlsem.api.coordinator import Coordinator
from sqlsem.engines.base import Busy
from sqlsem.ops.certify.bench import PATIENCE, Bench
from sqlsem.ops.certify.children import Child
from sqlsem.ops.certify.registry import check
from sqlsem.ops.certify.results import Failed, Notes, NotPossible
from sqlsem.ops.certify.sessions import Session, later, server_words
from sqlsem.ops.certify.worker import LIMITS
from sqlsem.values.errors import Deadlock, LockLost, NotHeld, SqlsemError

__all__ = ["deadlocks", "overlap"]

#: The number of requests of each session in check 8.
REGISTRATIONS = 20
#: The pause between two kills of the soak test, in seconds.
KILL_SECONDS = 2.0


@check(8, "positions are in the order of commits")
def order_of_commits(bench: Bench, notes: Notes) -> None:
    """Register many requests concurrently, and read the queue meanwhile. No position may appear after a higher one."""
    resource = bench.name()
    over = threading.Event()
    number = max(2, bench.wishes.max_sessions // 2) if bench.has_routines else 4
    reading = later(_read_positions, bench.session(), resource, over)
    try:
        calls = [later(_register, bench, resource, f"s{turn}") for turn in range(number)]
        for call in calls:
            call.result(PATIENCE)
    finally:
        over.set()
    reads, positions_read = reading.result(PATIENCE)
    notes.require(
        positions_read == number * REGISTRATIONS,
        f"{positions_read} of {number * REGISTRATIONS} registrations were read",
    )
    notes.note(
        f"{positions_read} registrations of {number} sessions, {reads} reads", registrations=positions_read, reads=reads
    )


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


def _read_positions(session: Session, resource: str, over: threading.Event) -> tuple[int, int]:
    highest, known, reads = 0, set[int](), 0
    while True:
        last = over.is_set()
        new = {int(row[0]) for row in session.rows("positions", resource)} - known
        reads += 1
        late = [position for position in new if position < highest]
        if late:
            raise Failed(f"position {min(late)} was committed after position {highest} had been read")
        known |= new
        highest = max([highest, *new])
        if last:
            return reads, len(known)


def overlap(holds: Iterable[dict[str, Any]]) -> str | None:
    """Return a text about the first holds that conflict and overlap by this host's clock; None if there are none."""
    inside: list[dict[str, Any]] = []
    for hold in sorted(holds, key=lambda hold: float(hold["since"])):
        inside = [earlier for earlier in inside if earlier["until"] > hold["since"]]
        if hold["kind"] == "limit":
            conflicts = len(inside) >= LIMITS["limit"]
        else:
            conflicts = any(hold["kind"] != "read" or earlier["kind"] != "read" for earlier in inside)
        if conflicts:
            names = ", ".join(earlier["who"] for earlier in inside)
            return f"{hold['kind']} of {hold['who']} was held together with {names}"
        inside.append(hold)
    return None


def hammer(bench: Bench, notes: Notes, kinds: list[str], seconds: float, counts: bool = False) -> int:
    """Have processes and sessions acquire these kinds of locks in turn, and check their holds. Return their number."""
    resource = bench.name()
    faces = ["library"] * 3 + ["session"] * (2 if bench.has_routines else 0)
    children = [
        bench.child("hammer", resource=resource, kinds=kinds, seconds=seconds, face=face, counts=counts)
        for face in faces
    ]
    holds: list[dict[str, Any]] = []
    for child in children:
        holds += turns_of(child)
    require_turns(holds, notes)
    for child in children:
        child.close()
    return len(holds)


def turns_of(child: Child, who: str | None = None) -> list[dict[str, Any]]:
    """Return all holds of a process that runs `hammer`. Raises `Failed` if the process fails."""
    who = who or child.expect("ready")["who"]
    turns: list[dict[str, Any]] = []
    while True:
        event = child.next(PATIENCE)
        if event is None:
            raise Failed("a process of the hammer ended before it was done")
        if event["event"] == "end":
            return turns
        if event["event"] == "failed":
            raise Failed(event["words"])
        turns.append({**event, "who": who})


def require_turns(holds: list[dict[str, Any]], notes: Notes) -> None:
    """Raise `Failed` as `require_no_conflict` does, or if there are no holds."""
    require_no_conflict(holds, notes)
    notes.require(holds, "no request was granted")


def require_no_conflict(holds: list[dict[str, Any]], notes: Notes) -> None:
    """Raise `Failed` if conflicting holds overlap, by the table or by this host's clock, or if a lock was lost."""
    bad = next((hold["bad"] for hold in holds if hold["bad"]), None)
    notes.require(bad is None, f"by the table of holders: {bad}")
    words = overlap(holds)
    notes.require(words is None, f"by this host's clock: {words}")
    lost = sum(bool(hold["lost"]) for hold in holds)
    notes.require(not lost, f"{lost} locks of living holders were lost")


@check(9, "a new holder sees the commits of the former holder")
def sees_what_was_committed(bench: Bench, notes: Notes) -> None:
    """Count under a mutex by plain reads and writes. A stale read would lose an increment."""
    session = bench.session()
    before = int(session.value("read_counter"))
    turns = hammer(bench, notes, ["mutex"], bench.wishes.seconds, counts=True)
    counted = int(session.value("read_counter")) - before
    notes.require(counted == turns, f"{turns} turns counted to {counted}")
    notes.note(f"{turns} turns, none lost", turns=turns)


@check(10, "conflicting holders never overlap")
def holds_do_not_overlap(bench: Bench, notes: Notes) -> None:
    """Hammer a mutex, a limit of 3, and readers and writers; check the holds in the database and by the clock."""
    for what, kinds in (("mutex", ["mutex"]), ("limit 3", ["limit"]), ("read/write", ["read", "read", "write"])):
        turns = hammer(bench, notes, kinds, bench.wishes.seconds)
        notes.note(f"{what}: {turns} turns", **{what.replace(" ", "_").replace("/", "_"): turns})
    if bench.wishes.long is not None:
        _soak(bench, notes, bench.wishes.long)


def _soak(bench: Bench, notes: Notes, seconds: float) -> None:
    """Hammer with several processes, and kill one after another; sessions, too, if this login may."""
    resource = bench.name()
    observer = bench.session()
    holds: list[dict[str, Any]] = []
    kills, sessions = 0, 0
    may_kill = bench.has_routines

    def start() -> Child:
        kinds = random.choice([["mutex"], ["read", "read", "write"]])
        face = random.choice(["library", "session"]) if bench.has_routines else "library"
        arguments = {"resource": resource, "kinds": kinds, "face": face, "hold_seconds": 0.002}
        return bench.child("hammer", seconds=seconds + PATIENCE, **arguments)

    running = {child: str(child.expect("ready")["who"]) for child in [start() for _ in range(4)]}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(KILL_SECONDS, max(0.0, deadline - time.monotonic())))
        victim = random.choice(list(running))
        who = running.pop(victim)
        _stop(victim, observer, who)
        number = int(who.rpartition(".")[2])
        if may_kill and number:
            try:
                bench.kill(number)
                sessions += 1
            except NotPossible as exc:
                notes.skip(str(exc))
                may_kill = False
        victim.kill()
        kills += 1
        holds += [{**event, "who": who} for event in victim.heard() if event["event"] == "held"]
        require_no_conflict(holds, notes)
        child = start()
        running[child] = str(child.expect("ready")["who"])
    for child, who in running.items():
        child.send(do="end")
        holds += turns_of(child, who)
    require_turns(holds, notes)
    words = f"soak of {seconds:g} s: {len(holds)} turns, {kills} processes and {sessions} of their sessions killed"
    notes.note(words, soak_seconds=seconds, soak_turns=len(holds), soak_kills=kills, soak_session_kills=sessions)


def _stop(victim: Child, observer: Session, who: str) -> None:
    """Stop a process, then delete its records of holds: a running process could still be in its critical section."""
    deadline = time.monotonic() + PATIENCE
    while True:
        victim.stop()
        try:
            observer.rows("delete_member_rows", who)
            return
        except Busy:  # the stopped process is in a write, which blocks all other writes to an SQLite file
            victim.go_on()
            if time.monotonic() > deadline:
                raise


@check(12, "concurrent calls of all kinds raise no errors of the server's own")
def storm(bench: Bench, notes: Notes) -> None:
    """Acquire, release, hand over, adopt, revoke and reap the same resources concurrently. Only errors of sqlsem may be
    raised.
    """
    over = threading.Event()
    names = [bench.name() for _ in range(2)]
    number = min(8, max(2, bench.wishes.max_sessions // 3))
    calls = [later(_storm_of_library, bench.coordinator(grace=10), names, over) for _ in range(3)]
    if bench.has_routines:
        calls += [later(_storm_of_session, bench.session(), names, over) for _ in range(number)]
    try:
        over.wait(bench.wishes.seconds)
    finally:
        over.set()
    turns = sum(call.result(PATIENCE) for call in calls)
    notes.note(f"{turns} calls of {len(calls)} at once", calls=turns)


def _storm_of_session(session: Session, names: list[str], over: threading.Event) -> int:
    turns = 0
    while not over.is_set():
        turns += 1
        name = random.choice(names)
        try:
            if session.acquire(name, timeout_ms=random.choice([0, 20, 200])).code >= 0:
                if random.random() < 0.3:
                    token = session.value("hand_over", name)
                    session.rows("adopt", token)
                session.release(name)
        except Exception as exc:
            if "sqlsem: " not in str(exc):
                raise Failed(f"a session got {server_words(exc, session.engine)}") from exc
    return turns


def _storm_of_library(coordinator: Coordinator, names: list[str], over: threading.Event) -> int:
    turns = 0
    while not over.is_set():
        turns += 1
        name = random.choice(names)
        try:
            if random.random() < 0.3:
                for entry in coordinator.admin.entries(name)[:1]:
                    coordinator.admin.revoke(entry.position, force=True)
                coordinator.admin.reap()
            lock = coordinator.mutex(name)
            if lock.acquire(timeout=0.2):
                lock.release()
        except (NotHeld, LockLost):
            continue
        except SqlsemError as exc:
            words = server_words(exc, coordinator.engine)
            raise Failed(f"the library raised {type(exc).__name__}: {words}") from exc
    return turns


@check(11, "deadlocks are found, and the youngest request gives up")
def deadlocks(bench: Bench, notes: Notes) -> None:
    """Let two and three processes, and two and three sessions, wait for each other in a cycle."""
    for number in (2, 3):
        words = _of_threads(bench, notes, number)
        notes.note(f"{number} of the library: one raised Deadlock ({words})")
        if bench.has_routines:
            _of_sessions(bench, notes, number)
            notes.note(f"{number} sessions: the youngest request got -3")


def _of_threads(bench: Bench, notes: Notes, number: int) -> str:
    names = [bench.name() for _ in range(number)]
    barrier = threading.Barrier(number)

    def run(coordinator: Coordinator, turn: int) -> str | None:
        with coordinator.mutex(names[turn]):
            barrier.wait(PATIENCE)
            try:
                with coordinator.mutex(names[(turn + 1) % number], timeout=PATIENCE):
                    return None
            except Deadlock as exc:
                return str(exc)

    calls = [later(run, bench.coordinator(grace=PATIENCE), turn) for turn in range(number)]
    ends = [call.result(2 * PATIENCE) for call in calls]
    victims = [end for end in ends if end is not None]
    notes.require(len(victims) == 1, f"of {number} requests that waited for each other, {len(victims)} raised Deadlock")
    missing = [name for name in names if name not in victims[0]]
    notes.require(not missing, f"the message does not name the whole cycle: {victims[0]}")
    return f"{len(victims[0])} characters"


def _of_sessions(bench: Bench, notes: Notes, number: int) -> None:
    names = [bench.name() for _ in range(number)]
    sessions = [bench.session() for _ in range(number)]
    for session, name in zip(sessions, names, strict=True):
        notes.require(session.acquire(name).code == 0, "a lock that nobody else wants was not granted at once")
    observer = bench.session()
    calls = []
    for turn, session in enumerate(sessions):
        wanted = names[(turn + 1) % number]
        calls.append(later(session.acquire, wanted, 1, "write", int(PATIENCE * 1000)))
        if turn < number - 1:
            bench.until_queued(observer, wanted)
    code = calls[-1].result(PATIENCE).code
    notes.require(code == -3, f"the youngest request of a cycle of {number} was answered with {code}, not -3")
    for turn in range(number - 1, -1, -1):
        sessions[turn].release(names[turn])
        if turn:
            code = calls[turn - 1].result(PATIENCE).code
            notes.require(
                code in (0, 1), f"a request of the cycle was answered with {code} after the youngest had ended"
            )
            sessions[turn - 1].release(names[turn])
