"""Sessions that wait for each other: check 11."""

from __future__ import annotations

import functools
import threading

from sqlsem.api.coordinator import Coordinator
from sqlsem.ops.certify.bench import PATIENCE, Bench
from sqlsem.ops.certify.registry import check
from sqlsem.ops.certify.results import Notes
from sqlsem.ops.certify.sessions import Session, later
from sqlsem.values.errors import Deadlock

__all__: list[str] = []


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
            bench.until(functools.partial(_waits_there, observer, wanted), "a request in the queue")
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


def _waits_there(observer: Session, resource: str) -> bool:
    return len(observer.rows("positions", resource)) == 2
