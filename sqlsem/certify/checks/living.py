"""Sessions and processes that end: check 4."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlsem.certify.bench import PATIENCE, Bench
from sqlsem.certify.registry import check
from sqlsem.certify.results import Notes, NotPossible
from sqlsem.certify.sessions import Session, later

__all__: list[str] = []

#: The grace of the processes that are killed here.
GRACE = 2.0
#: What may be added to it, or to no grace at all, on a host that is busy.
MARGIN = 15.0


@check(4, "a lock is free after its holder has ended")
def free_after_the_end(bench: Bench, notes: Notes) -> None:
    """Close, kill and cut sessions that hold, kill a process that holds; and wait for their locks."""
    _killed_process(bench, notes)
    if not bench.has_routines:
        return
    _ended_session(bench, notes, "closed", lambda session: session.close())
    try:
        _ended_session(bench, notes, "killed", lambda session: bench.kill(session.number))
    except NotPossible as exc:
        notes.skip(str(exc))
    _ended_session(bench, notes, "cut", lambda session: session.cut())


def _killed_process(bench: Bench, notes: Notes) -> None:
    resource = bench.name()
    child = bench.child("hold", resource=resource)
    child.expect("holds")
    lock = bench.coordinator(grace=GRACE).mutex(resource)
    notes.require(not lock.acquire(blocking=False), "a second holder of a mutex was let in beside a living process")
    at = child.kill()
    notes.require(lock.acquire(timeout=PATIENCE), f"a killed process kept its lock for {PATIENCE:g} s")
    took = time.monotonic() - at
    lock.release()
    grace = float(bench.options.get("grace", 5.0))
    notes.require(
        took <= grace + MARGIN, f"a killed process kept its lock for {took:.1f} s, with a grace of {grace:g} s"
    )
    notes.note(f"process killed: {took:.1f} s (grace {grace:g} s)", killed_process_seconds=round(took, 2))


def _ended_session(bench: Bench, notes: Notes, how: str, end: Callable[[Session], object]) -> None:
    resource = bench.name()
    holder, waiter = bench.session(), bench.session()
    notes.require(holder.acquire(resource).code == 0, "a lock that nobody else wants was not granted at once")
    notes.require(waiter.acquire(resource, timeout_ms=0).code == -1, "a second holder of a mutex was let in")
    waiting = later(waiter.acquire, resource)
    at = time.monotonic()
    end(holder)
    code = waiting.result(PATIENCE).code
    took = time.monotonic() - at
    waiter.release(resource)
    notes.require(code in (0, 1), f"after a session was {how}, the next one was told {code}")
    notes.require(took < MARGIN, f"a session that was {how} kept its lock for {took:.1f} s")
    notes.note(f"session {how}: {took:.2f} s", **{f"{how}_session_seconds": round(took, 3)})
