"""The costs of locks: checks 14, 15 and 20 to 23."""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from sqlsem.ops.certify.bench import PATIENCE, Bench
from sqlsem.ops.certify.registry import check
from sqlsem.ops.certify.results import Notes, NotPossible
from sqlsem.ops.certify.sessions import Session, later, server_words

__all__: list[str] = []

#: The number of other locks at the second measurement of a test's cost.
MANY_LOCKS = 10_000
#: The maximum duration of one test then, in microseconds.
MAX_TEST_US = 2000.0
#: The maximum duration of a heartbeat and of a release while sessions wait, in milliseconds.
MAX_CALL_MS = 3000.0
#: The maximum ratio of the durations of the last pairs and of the first.
MAX_GROWTH = 5.0
#: The maximum number of recompilations for 1,000 pairs.
MAX_RECOMPILES = 50.0
#: The maximum durations of a pair and of a hand-off on any server, in milliseconds.
MAX_PAIR_MS, MAX_HAND_OFF_MS = 1000.0, 2000.0
#: The number of turns that are measured one by one.
TURNS = 20


def milliseconds(call: Callable[[], object], turns: int = TURNS) -> list[float]:
    """Return the durations of this number of calls."""
    durations = []
    for _ in range(turns):
        began = time.perf_counter()
        call()
        durations.append((time.perf_counter() - began) * 1000)
    return durations


def median(values: Sequence[float]) -> float:
    """Return the median, rounded to three digits."""
    return float(f"{statistics.median(values):.3g}")


@check(14, "tests of locks stay cheap", "test_cost", elsewhere="only SQL Server has APPLOCK_TEST")
def cost_of_tests(bench: Bench, notes: Notes) -> None:
    """Measure APPLOCK_TEST and APPLOCK_MODE while the server has few locks, and while it has 10,000."""
    session = bench.session()
    few = float(session.value("test_cost"))
    holder = bench.session()
    holder.rows("many_locks", MANY_LOCKS)
    many = float(session.value("test_cost"))
    holder.close()
    notes.note(f"{few:.1f} µs, beside {MANY_LOCKS} locks {many:.1f} µs", few_us=round(few, 2), many_us=round(many, 2))
    notes.require(many < MAX_TEST_US, f"one test takes {many:.0f} µs beside {MANY_LOCKS} locks")


@check(15, "names of locks show their kind", "lock_names", elsewhere="only SQL Server hashes their names")
def names_of_locks(bench: Bench, notes: Notes) -> None:
    """Read the locks of a session that holds and has asserted one. Each kind of name must begin differently."""
    session, observer = bench.session(), bench.admin_session()
    resource = bench.name()
    position = session.acquire(resource).position
    number = session.number
    with session.transaction():
        session.rows("assert_holding", resource, position)
        try:
            shown = [str(row[0]) for row in observer.rows("lock_names", number)]
        except Exception as exc:
            raise NotPossible(f"the server does not show its locks ({server_words(exc, bench.engine)})") from exc
    session.release(resource)
    if not shown:
        raise NotPossible("the server shows no application locks")
    notes.require(len(set(shown)) == len(shown), f"two locks have the same name: {shown}")
    starts = [match[1] for name in shown if (match := re.search(r"\[(..)", name))]
    notes.note(f"{len(shown)} locks, beginning with {sorted(starts)}", shown=shown)
    notes.require(len(shown) >= 2, f"a holder that has asserted its lock has {len(shown)} locks")
    notes.require(len(set(starts)) == len(starts), f"locks of several kinds begin alike: {shown}")


@check(20, "heartbeats and releases stay quick beside sessions that wait")
def beside_waiters(bench: Bench, notes: Notes) -> None:
    """Measure heartbeats and pairs while many sessions wait."""
    resource = bench.name()
    coordinator = bench.coordinator(grace=10)
    held, other = coordinator.mutex(resource), coordinator.mutex(bench.name())
    notes.require(held.acquire(timeout=PATIENCE), "a lock that nobody else wants was not granted")
    number = max(2, bench.wishes.max_sessions - 4) if bench.has_routines else 4
    observer = bench.session()
    if bench.has_routines:
        calls: list[Callable[[], object]] = [
            functools.partial(bench.session().acquire, resource, timeout_ms=int(PATIENCE * 1000)) for _ in range(number)
        ]
    else:
        locks = [bench.coordinator(grace=10).mutex(resource) for _ in range(number)]
        calls = [functools.partial(lock.acquire, timeout=PATIENCE) for lock in locks]
    waiting = [later(call) for call in calls]
    bench.until(lambda: len(observer.rows("positions", resource)) > number, "the requests of all waiters in the queue")
    heartbeats = milliseconds(coordinator.client.member.heartbeat)

    def pair() -> None:
        other.acquire(timeout=PATIENCE)
        other.release()

    pairs = milliseconds(pair)
    coordinator.admin.revoke_members(member=coordinator.client.member.member_id, force=True)
    bench.close_opened()
    for call in waiting:
        with contextlib.suppress(Exception):  # their connections are closed
            call.result(PATIENCE)
    words = f"{number} wait; heartbeat {median(heartbeats)} ms (at most {max(heartbeats):.1f}), pair {median(pairs)} ms"
    notes.note(f"{words} (at most {max(pairs):.1f})", waiting=number, ping_ms=median(heartbeats), pair_ms=median(pairs))
    notes.note("", most_ping_ms=round(max(heartbeats), 2), most_pair_ms=round(max(pairs), 2))
    notes.require(
        max(*heartbeats, *pairs) < MAX_CALL_MS,
        f"a call took {max(*heartbeats, *pairs):.0f} ms beside {number} that wait",
    )
    with contextlib.suppress(Exception):  # few logins have the right to this
        maximum = int(bench.admin_session().value("workers"))
        notes.note(f"the server has {maximum} workers or connections", workers=maximum)


def pair_milliseconds(bench: Bench, seconds: float) -> list[float]:
    """Return the durations of pairs of an acquire and a release of one resource, one after another."""
    lock = bench.coordinator(grace=10).mutex(bench.name())
    durations: list[float] = []
    deadline = time.monotonic() + seconds

    def pair() -> None:
        lock.acquire(timeout=PATIENCE)
        lock.release()

    milliseconds(pair, 3)  # compiles, and connects
    while time.monotonic() < deadline or len(durations) < TURNS:
        durations += milliseconds(pair, 1)
    return durations


@check(21, "pairs of acquire and release do not get slower")
def growth(bench: Bench, notes: Notes) -> None:
    """Acquire and release one resource for a time; then again while there is an old snapshot."""
    seconds = bench.wishes.long or bench.wishes.seconds
    _growth(bench, notes, seconds, "pairs")
    session = bench.session()
    if session.has("old_snapshot"):
        try:
            session.rows("old_snapshot")
            session.rows("read_counter")
        except Exception as exc:
            notes.skip(f"beside an old snapshot ({server_words(exc, bench.engine)})")
        else:
            _growth(bench, notes, seconds, "beside an old snapshot")
        with contextlib.suppress(Exception):  # the server may have ended it
            session.rows("rollback")
    if session.has("dead_rows"):
        with contextlib.suppress(Exception):  # few logins have the right to this
            dead = int(bench.session().value("dead_rows"))
            notes.note(f"{dead} deleted rows are still kept", dead_rows=dead)


def _growth(bench: Bench, notes: Notes, seconds: float, what: str) -> None:
    durations = pair_milliseconds(bench, seconds)
    part = max(5, len(durations) // 6)
    first, last = median(durations[:part]), median(durations[-part:])
    key = what.replace(" ", "_")
    words = f"{len(durations)} {what}: {first} ms each at first, {last} ms at the end"
    notes.note(words, **{f"{key}": len(durations), f"{key}_first_ms": first, f"{key}_last_ms": last})
    # Judge by the fastest ones: growth slows all pairs, and a busy machine only some.
    fastest, at_end = (round(min(some), 2) for some in (durations[:part], durations[-part:]))
    notes.require(
        at_end <= fastest * MAX_GROWTH + 1,
        f"{what}: the fastest took {fastest} ms at first, and {at_end} ms at the end",
    )


@check(22, "statements keep their plans", "recompiles", elsewhere="only SQL Server counts its recompilations")
def recompiles(bench: Bench, notes: Notes) -> None:
    """Count recompilations, scans and memory grants of the plans of pairs."""
    observer = bench.admin_session()
    pair_milliseconds(bench, 0.0)
    try:
        before = observer.rows("recompiles")[0]
    except Exception as exc:
        raise NotPossible(f"the server does not show its plans ({server_words(exc, bench.engine)})") from exc
    if before[0] is None:
        raise NotPossible("the server keeps no figures of these plans (Query Store or trace flags may say why)")
    pairs = len(pair_milliseconds(bench, bench.wishes.seconds))
    after = observer.rows("recompiles")[0]
    number = (int(after[0]) - int(before[0])) * 1000 / pairs
    notes.note(f"{number:.1f} for 1,000 pairs; of {after[1]} plans {after[2]} scan an index, {after[3]} request memory")
    notes.note("", recompiles=round(number, 2), plans=after[1], scans=after[2], grants=after[3])
    notes.require(number <= MAX_RECOMPILES, f"{number:.0f} recompilations for 1,000 pairs")


@check(23, "the cost of a pair and of a hand-off")
def costs(bench: Bench, notes: Notes) -> None:
    """Measure pairs and hand-offs, and the same with the server's own locks: time, flushes and bytes of the log."""
    _costs(bench, notes, "")
    for what, change in (("delayed durability", "delayed"), ("no delayed durability", "not_delayed")):
        if not bench.session().has(change):
            continue
        try:
            with bench.database("", change) as other:
                _costs(other, notes, f"{change}_", f"with {what}: ")
        except NotPossible as exc:
            notes.skip(f"with {what}: {exc}")


def _costs(bench: Bench, notes: Notes, key: str, words: str = "") -> None:
    session = bench.session()
    resource = bench.name()

    def raw() -> None:
        session.rows("raw_take")
        session.rows("raw_give")

    def pair() -> None:
        session.acquire(resource)
        session.release(resource)

    milliseconds(raw, 3)
    raw_ms = median(milliseconds(raw))
    figures = {"raw_pair_ms": raw_ms, "library_pair_ms": median(pair_milliseconds(bench, 0.0))}
    texts = [f"raw {raw_ms} ms", f"library {figures['library_pair_ms']} ms"]
    if bench.has_routines:
        milliseconds(pair, 3)
        before = _log_counters(session)
        figures["session_pair_ms"] = median(milliseconds(pair))
        after = _log_counters(session)
        texts.append(f"session {figures['session_pair_ms']} ms")
        for name, old, new in zip(("log_flushes", "log_bytes"), before, after, strict=True):
            if old is not None and new is not None:
                figures[name] = round((new - old) / TURNS, 2)
                texts.append(f"{figures[name]:g} {name.replace('_', ' ')}")
        figures["raw_hand_off_ms"] = median(_hand_offs(bench, None))
        figures["hand_off_ms"] = median(_hand_offs(bench, bench.name()))
        texts.append(f"hand-off {figures['hand_off_ms']} ms, raw {figures['raw_hand_off_ms']} ms")
    notes.note(f"{words}pair: {', '.join(texts)}", **{f"{key}{name}": value for name, value in figures.items()})
    slowest = max(figures["library_pair_ms"], figures.get("session_pair_ms", 0.0))
    notes.require(slowest < MAX_PAIR_MS, f"a pair takes {slowest} ms")
    hand_off_ms = figures.get("hand_off_ms", 0.0)
    notes.require(hand_off_ms < MAX_HAND_OFF_MS, f"a hand-off takes {hand_off_ms} ms")


def _log_counters(session: Session) -> tuple[int | None, int | None]:
    try:
        flushes, size = session.rows("log_counters")[0]
    except Exception:  # few logins have the right to this
        return None, None
    return None if flushes is None else int(flushes), None if size is None else int(size)


def _hand_offs(bench: Bench, resource: str | None) -> list[float]:
    """Return the times from a release to the return of the next holder's acquire, for sqlsem's locks, or (without a
    resource) for the server's own.
    """
    holder, other, observer = bench.session(), bench.session(), bench.session()

    def take(session: Session) -> float:
        if resource is None:
            session.rows("raw_take")
        else:
            session.acquire(resource)
        return time.perf_counter()

    def give(session: Session) -> None:
        if resource is None:
            session.rows("raw_give")
        else:
            session.release(resource)

    durations = []
    take(holder)
    for _ in range(max(3, TURNS // 4)):
        waiting = later(take, other)
        if resource is None:
            threading.Event().wait(0.2)  # no statement shows that a session waits for a raw lock
        else:
            bench.until_queued(observer, resource)
        began = time.perf_counter()
        give(holder)
        durations.append((waiting.result(PATIENCE) - began) * 1000)
        holder, other = other, holder
    give(holder)
    return durations
