"""Sessions and processes that end, are reset, or are cancelled: checks 4 to 7, and 24."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from sqlsem.ops.certify.bench import PATIENCE, Bench
from sqlsem.ops.certify.checks.calling import SESSIONS_ONLY
from sqlsem.ops.certify.registry import check
from sqlsem.ops.certify.results import Failed, Notes, NotPossible
from sqlsem.ops.certify.sessions import Session, later, server_words

__all__: list[str] = []

#: The grace of the waiters of these checks, in seconds.
GRACE = 2.0
#: A busy host may add so many seconds to each grace, also to a grace of 0.
MARGIN = 15.0
#: The difference of two computed times of a server's start, in seconds, above which they are two starts.
START_SECONDS = 2.0
#: The timeout of a call that only tests whether a lock is free, in milliseconds.
TEST_MS = 100


@check(4, "a lock is free after its holder has ended")
def free_after_the_end(bench: Bench, notes: Notes) -> None:
    """Kill a process that holds a lock; close, kill and cut sessions that hold one; and wait for these locks."""
    _killed_process(bench, notes)
    if not bench.has_routines:
        return
    _ended_session(bench, notes, "closed", lambda session, number: session.close())
    try:
        _ended_session(bench, notes, "killed", lambda session, number: bench.kill(number))
    except NotPossible as exc:
        notes.skip(str(exc))
    _ended_session(bench, notes, "cut", lambda session, number: session.cut())


def _killed_process(bench: Bench, notes: Notes) -> None:
    resource = bench.name()
    child = bench.child("hold", resource=resource)
    child.expect("holds")
    lock = bench.coordinator(grace=GRACE).mutex(resource)
    notes.require(not lock.acquire(blocking=False), "a mutex was granted while a living process held it")
    at = child.kill()
    notes.require(lock.acquire(timeout=PATIENCE), f"a killed process kept its lock for {PATIENCE:g} s")
    took = time.monotonic() - at
    lock.release()
    grace = float(bench.options.get("grace", 5.0))
    words = f"a killed process kept its lock for {took:.1f} s, with a grace of {grace:g} s"
    notes.require(took <= grace + MARGIN, words)
    notes.note(f"process killed: {took:.1f} s (grace {grace:g} s)", killed_process_seconds=round(took, 2))


def _ended_session(bench: Bench, notes: Notes, how: str, end: Callable[[Session, int], object]) -> None:
    resource = bench.name()
    holder, waiter = bench.session(), bench.session()
    number = holder.number
    notes.require(holder.acquire(resource).code == 0, "a lock that nobody else wants was not granted at once")
    notes.require(waiter.acquire(resource, timeout_ms=0).code == -1, "a mutex was granted while a session held it")
    waiting = later(waiter.acquire, resource, 1, "write", int(PATIENCE * 1000))
    at = time.monotonic()
    end(holder, number)
    code = waiting.result(PATIENCE + MARGIN).code
    took = time.monotonic() - at
    waiter.release(resource)
    notes.require(code in (0, 1), f"after a session was {how}, the next request was answered with {code}")
    notes.require(took < MARGIN, f"a session that was {how} kept its lock for {took:.1f} s")
    notes.note(f"session {how}: {took:.2f} s", **{f"{how}_session_seconds": round(took, 3)})


@check(5, "a session that a pool has reset holds nothing", "acquire", elsewhere=SESSIONS_ONLY)
def reset_sessions(bench: Bench, notes: Notes) -> None:
    """Reset a session as poolers do, or have the driver's own pool lend it again. It must have lost its lock."""
    session = bench.session()
    if session.has("reset"):
        resource, other = bench.name(), bench.session()
        position = session.acquire(resource).position
        session.rows("reset")
        bench.until(
            lambda: other.acquire(resource, timeout_ms=TEST_MS).code >= 0, "the lock of a session that was reset"
        )
        code = int(session.value("renew", resource, position))
        notes.require(code == -1, f"for the lock of a session that was reset, renew returned {code}, not -1")
        other.release(resource)
        notes.note("free at once, and renew returns -1")
        return
    child = bench.child("pooled", resource=bench.name())
    codes = child.expect("pooled")
    if not codes["same"]:
        raise NotPossible("the driver manager does not pool here (unixODBC: Pooling = Yes in odbcinst.ini)")
    notes.require(
        codes["between"] == -1, f"between Close and reuse, a request was answered with {codes['between']}, not -1"
    )
    notes.require(codes["after"] in (0, 1), f"after the reset, a request was answered with {codes['after']}")
    notes.require(codes["renewed"] == -1, f"for the lock of a reset session, renew returned {codes['renewed']}, not -1")
    notes.note("held between Close and reuse, free after it, and renew returns -1")


@check(6, "a killed session never goes on as if it held", "renew", elsewhere=SESSIONS_ONLY)
def killed_while_idle(bench: Bench, notes: Notes) -> None:
    """Kill an idle session whose driver may reconnect, and let it renew its lock."""
    words = {"ConnectRetryCount": "1"} if hasattr(bench.engine, "odbc_string") else {}
    holder, waiter, resource = bench.session(**words), bench.session(), bench.name()
    position = holder.acquire(resource).position
    bench.kill(holder.number)
    bench.until(lambda: waiter.acquire(resource, timeout_ms=TEST_MS).code >= 0, "the lock of a killed session")
    try:
        code = int(holder.value("renew", resource, position))
    except Exception as exc:
        notes.note(f"it gets an error ({server_words(exc, bench.engine)[:120]})")
    else:
        notes.require(code == -1, f"a killed session was reconnected, and renew returned {code} for its lock")
        notes.note("it was reconnected silently, and renew returns -1")
    waiter.release(resource)


@check(7, "a call that is cancelled leaves nothing", "acquire", elsewhere=SESSIONS_ONLY)
def cancelled(bench: Bench, notes: Notes) -> None:
    """Cancel a call that waits. No row and no lock may remain, and the session must be usable."""
    holder, waiter, observer, resource = bench.session(), bench.session(), bench.session(), bench.name()
    holder.acquire(resource)
    waiting = later(waiter.acquire, resource, 1, "write", int(PATIENCE * 1000))
    bench.until_queued(observer, resource)
    time.sleep(0.2)  # until it waits, which no statement shows
    waiter.cancel()
    try:
        code = waiting.result(PATIENCE).code
    except Exception as exc:
        notes.note(f"it gets an error ({server_words(exc, bench.engine)[:120]})")
    else:
        raise Failed(f"a call that was cancelled was answered with {code}")

    def gone() -> bool:
        observer.acquire(resource, timeout_ms=TEST_MS)  # waiters remove requests whose client is gone
        return len(observer.rows("positions", resource)) == 1

    took = bench.until(gone, "the end of a cancelled row", MARGIN)
    holder.release(resource)
    code = waiter.acquire(resource).code
    notes.require(code == 0, f"the next call of the session whose call was cancelled returned {code}")
    waiter.release(resource)
    notes.note(f"its row was gone after {took:.1f} s, and the session can be used", row_seconds=round(took, 2))


@check(24, "locks outlive a restart and a failover", "started", elsewhere="an SQLite file has no server to restart")
def restart(bench: Bench, notes: Notes) -> None:
    """Hold a lock while the operator restarts the server or fails it over."""
    patience = bench.wishes.restart
    if patience is None:
        raise NotPossible(
            "an operator must restart the server or fail it over meanwhile: run it alone, with --only 24 --restart 10m"
        )
    session = bench.session()
    before, offset = session.value("started"), float(session.value("clock")) - time.time()
    coordinator = bench.coordinator(grace=patience, retry=patience)
    lock = coordinator.mutex(bench.name())
    notes.require(lock.acquire(timeout=PATIENCE), "a lock that nobody else wants was not granted")
    grant = lock.grant
    bench.say(f"Restart the server now, or fail it over; this waits for {patience:g} s.")

    def restarted() -> bool:
        try:
            with contextlib.closing(Session(bench.engine)) as other:
                return _is_other_start(before, other.value("started"))
        except Exception:  # it is down, or starting
            return False

    took = bench.until(restarted, "another start of the server", patience)
    coordinator.client.member.heartbeat()
    notes.require(not grant.lost, "the lock was lost by the restart")
    other = bench.coordinator(grace=patience)
    notes.require(not other.mutex(bench.name()).locked(), "a free lock is reported as held after the restart")
    fence = grant.fence
    lock.release()
    notes.require(lock.acquire(timeout=PATIENCE), "the lock was not granted again after the restart")
    notes.require(lock.grant.fence > fence, f"a fence after the restart, {lock.grant.fence}, is not above {fence}")
    lock.release()
    new_offset = float(bench.session().value("clock")) - time.time()
    words = f"the lock was kept, fences grow; the server's clock has moved by {new_offset - offset:+.2f} s"
    notes.note(f"after {took:.0f} s the server had started again; {words}", clock_seconds=round(new_offset - offset, 3))


def _is_other_start(before: object, now: object) -> bool:
    """Return True if the server was started in between. A computed time of its start differs a little."""
    if isinstance(before, float) and isinstance(now, float):
        return abs(now - before) > START_SECONDS
    return now != before
