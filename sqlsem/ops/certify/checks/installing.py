"""Installing, and running everything once: checks 1, 2 and 25."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future

from sqlsem.api.coordinator import Coordinator
from sqlsem.ops.certify.bench import PATIENCE, Bench
from sqlsem.ops.certify.checks.hammering import deadlocks
from sqlsem.ops.certify.registry import check
from sqlsem.ops.certify.results import Failed, Notes, NotPossible
from sqlsem.ops.certify.sessions import later, server_words
from sqlsem.values.errors import NotHeld, Unavailable

__all__: list[str] = []

#: The seconds that an installation may take behind an open transaction, besides three times its duration without one:
#: it begins no attempt after 60 s, and the last attempt may take longer than an undisturbed installation.
INSTALL_SECONDS = 100.0


@check(1, "databases of other collations", "collations", elsewhere="an SQLite file compares as it is told to")
def collations(bench: Bench, notes: Notes) -> None:
    """Create a database of each collation, install in it, run everything, and drop it."""
    session = bench.session()
    kinds: list[tuple[str, str, tuple[str, ...]]] = [
        ("the default", "", ()),
        *((str(row[0]), str(row[0]), ()) for row in session.rows("collations")),
    ]
    if session.has("oldest_level"):
        kinds.append(("level 130", "", ("oldest_level",)))
    for what, options, changes in kinds:
        try:
            with bench.database(options, *changes) as other:
                run_everything(other, Notes())
                deadlocks(other, Notes())
        except NotPossible as exc:
            notes.skip(f"{what}: {exc}")
        except Failed as exc:
            raise Failed(f"{what}: {exc}") from exc
        except Exception as exc:
            raise Failed(f"{what}: {server_words(exc, bench.engine)}") from exc
        else:
            notes.note(what)
    notes.note("", databases=len(notes.words))


@check(2, "every routine is compiled and runs")
def run_everything(bench: Bench, notes: Notes) -> None:
    """Call everything that the library and sessions offer once, and install again."""
    coordinator = bench.coordinator(grace=10)
    _locks(bench, coordinator)
    _operators(bench, coordinator)
    _tasks(bench, coordinator)
    notes.note("locks, conversions, hand-over, rates, priorities, periods, queues, batches and operators' calls ran")
    if bench.has_routines:
        session = bench.session()
        if session.has("compile_all"):
            refused = [f"{name}: {words}" for name, words in session.rows("compile_all")]
            notes.require(not refused, f"routines that do not compile: {'; '.join(refused)}")
        for name in ("create_guarded", "guard", "unguard", "drop_guarded", "bare_rows", "bare_rows_left"):
            session.rows(name)
    for _ in range(2):
        bench.reinstall()
    notes.note("installing again, permissions included, twice")


def _locks(bench: Bench, coordinator: Coordinator) -> None:
    name = bench.name
    with coordinator.mutex(name()) as grant:
        grant.check()
    with coordinator.all_of(coordinator.limit(name(), 2, weight=2), coordinator.stage(name(), 1)):
        pass
    with coordinator.read(name()) as grant:
        grant.upgrade(timeout=PATIENCE)
        grant.downgrade()
    with coordinator.write(name(), note="certify"):
        pass
    with coordinator.mutex(name()) as grant:
        token = grant.hand_over(ttl=PATIENCE)
        other = bench.coordinator(grace=10)
        with other.adopt(token):
            pass
    ranked = name()
    coordinator.admin.set_priorities(ranked)
    with coordinator.mutex(ranked, priority=5):
        pass
    with coordinator.rate(name(), 10, "1m"):
        pass
    with contextlib.suppress(NotHeld), coordinator.once(name(), "1h") as run:
        if run is not None:
            run.finish()
    with coordinator.leader(name(), handle_sigterm=False):
        pass


def _operators(bench: Bench, coordinator: Coordinator) -> None:
    name = bench.name()
    coordinator.admin.set_limit(name, 2)
    coordinator.admin.set_stale_after(name, 60)
    coordinator.admin.set_rate(name, 10, "1m")
    coordinator.admin.reset_rate(name)
    coordinator.admin.pause(name)
    coordinator.admin.resume(name)
    lock = coordinator.limit(name)
    lock.acquire(timeout=PATIENCE)
    coordinator.admin.revoke(lock.grant.position, force=True)
    with contextlib.suppress(Exception):  # it is lost, as the next heartbeat finds
        lock.release()
    coordinator.admin.reap()
    coordinator.admin.overview()
    coordinator.admin.entries()
    coordinator.admin.resources()
    coordinator.admin.history()
    coordinator.admin.operations()
    coordinator.admin.rates()


def _tasks(bench: Bench, coordinator: Coordinator) -> None:
    name = bench.name("queue")
    queue = coordinator.queue(name)
    first = queue.put({"a": 1})
    queue.put({"a": 2}, locks=[coordinator.mutex(bench.name())])
    queue.set_limit(5)
    for _ in range(2):
        task = queue.try_claim()
        assert task is not None
        with task:
            pass
    queue.schedule("0 2 * * *", {"a": 3}, name=name)
    coordinator.admin.schedules(name)
    coordinator.admin.remove_schedule(name)
    coordinator.admin.queues()
    coordinator.admin.queue_limits()
    coordinator.admin.tasks()
    coordinator.admin.attempts(first)
    coordinator.admin.cancel_task(queue.put({"a": 4}))
    batch = coordinator.batch(bench.name("batch"), ["a", "b"], window="1h")
    for part in ("a", "b"):
        with batch.part(part):
            pass
    entry = batch.entry()
    assert entry is not None


@check(25, "installing while locks are held")
def install_over_holders(bench: Bench, notes: Notes) -> None:
    """Install again while members hold locks, and an open transaction has asserted one of the locks."""
    number = max(2, min(50, bench.wishes.max_sessions // 2))
    coordinators = [bench.coordinator(grace=10) for _ in range(2)]
    locks = [coordinators[turn % 2].mutex(bench.name()) for turn in range(number)]
    for lock in locks:
        notes.require(lock.acquire(timeout=PATIENCE), "a lock that nobody else wants was not granted")
    grants = [lock.grant for lock in locks]
    began = time.monotonic()
    bench.reinstall()
    took = time.monotonic() - began
    if bench.has_routines:
        _install_over_pin(bench, notes, INSTALL_SECONDS + 3 * took)
    for coordinator in coordinators:
        coordinator.client.member.heartbeat()
    lost = sum(grant.lost for grant in grants)
    notes.require(not lost, f"{lost} of {number} holders lost their locks by an installation")
    for lock in locks:
        lock.release()
    words = f"{number} holders kept their locks for {took:.1f} s of installing"
    notes.note(words, holders=number, install_seconds=round(took, 2))
    _long_names(bench, notes)
    _old_tokens(bench, notes)


def _install_over_pin(bench: Bench, notes: Notes, limit: float) -> None:
    session = bench.session()
    resource = bench.name()
    position = session.acquire(resource).position
    installing: Future[None] | None = None
    try:
        with session.transaction():
            session.rows("assert_holding", resource, position)
            installing = later(bench.reinstall)
            installing.result(limit)
            notes.note("it succeeded beside an open transaction that had asserted its lock")
    except TimeoutError:
        assert installing is not None
        with contextlib.suppress(Exception):  # nothing blocks it now; the removal must not begin before its end
            installing.result(PATIENCE)
        raise Failed(f"blocked by an open transaction, it neither ended nor failed in {limit:.0f} s") from None
    except Unavailable as exc:
        notes.note(f"blocked by an open transaction, it failed in time ({str(exc)[:120]})")
    session.release(resource)


def _long_names(bench: Bench, notes: Notes) -> None:
    """Use names of the maximum length in each key of an index."""
    coordinator = bench.coordinator(grace=10)
    long = "ä" * 255
    queue = coordinator.queue(long)
    queue.put({"a": 1}, key=long, unique=long)
    queue.set_limit(1, key=long)
    queue.set_weight(long, 2)
    task = queue.try_claim()
    assert task is not None
    with task:
        pass
    with coordinator.mutex(long, note="ä" * 1000):
        pass
    notes.note("names of 255 characters fit every index")


def _old_tokens(bench: Bench, notes: Notes) -> None:
    """Adopt with a token that is 30 days old, and with one that was used 30 days ago. No count of milliseconds may
    overflow.
    """
    giver, taker, session = bench.coordinator(grace=10), bench.coordinator(grace=10), bench.session()
    with giver.mutex(bench.name()) as grant:
        token = grant.hand_over(ttl=PATIENCE)
    session.rows("age_handovers")
    with taker.adopt(token):
        session.rows("age_handovers")
        try:
            giver.adopt(token).release()
        except NotHeld as exc:
            notes.note(f"a token of 30 days is adopted once, and then refused ({str(exc)[:120]})")
        else:
            raise Failed("a token that was used 30 days ago was adopted again")
