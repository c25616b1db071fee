"""Each primitive within this process: which holders share it, and in which order waiters are granted."""

import gc
import random
import threading
import time
import weakref

import pytest
from support import Attempt, Recorder, check_history, overlap, until

import sqlsem

pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.locks, pytest.mark.quiet]


#: The locks that Python has, too.
as_in_python = pytest.mark.parametrize(
    "python_lock",
    [
        pytest.param(lambda coordinator, name, **options: coordinator.mutex(name, **options), id="Lock"),
        pytest.param(
            lambda coordinator, name, **options: coordinator.mutex(name, reentrant=True, **options), id="RLock"
        ),
        pytest.param(lambda coordinator, name, **options: coordinator.limit(name, 1, **options), id="Semaphore"),
    ],
)


def test_mutex(connect, name, attempt):
    first, other = connect(), connect()
    with first.mutex(name):
        second = attempt(other.mutex(name))
        third = attempt(first.mutex(name))
        assert second.waits()
        assert third.waits()
    second.granted()
    assert third.waits()
    second.leave()
    third.leave()


def test_mutexes_of_different_names_do_not_meet(connect, name):
    coordinator = connect()
    with coordinator.mutex(name), coordinator.mutex(name("b"), timeout=0), coordinator.mutex(name("c"), timeout=0):
        pass


def test_limit(connect, name, attempt):
    first, other = connect(), connect()
    inside = [attempt(coordinator.limit(name, 3)) for coordinator in (first, other, first)]
    for each in inside:
        each.granted()
    fourth = attempt(other.limit(name, 3))
    fifth = attempt(first.limit(name, 3))
    assert fourth.waits()
    inside[1].leave()  # any of them, not only the first
    fourth.granted()
    assert fifth.waits()
    inside[0].leave()
    fifth.granted()


def test_a_heavy_request_holds_back_lighter_ones(connect, name, attempt):
    coordinator = connect()
    light = attempt(coordinator.limit(name, 4, weight=2))
    light.granted()
    heavy = attempt(coordinator.limit(name, 4, weight=3))
    late = attempt(coordinator.limit(name, 4, weight=1))
    assert heavy.waits()
    assert late.waits(), "a lighter request overtook the heavy one at the head"
    light.leave()
    heavy.granted()
    late.granted()  # 3 + 1


def test_weights_fill_the_limit(connect, name, attempt):
    coordinator = connect()
    attempt(coordinator.limit(name, 5, weight=2)).granted()
    attempt(coordinator.limit(name, 5, weight=3)).granted()
    assert attempt(coordinator.limit(name, 5)).waits()


def test_the_lowest_limit_counts(connect, name, attempt):
    coordinator = connect()
    wide = attempt(coordinator.limit(name, 5))
    wide.granted()
    narrow = attempt(coordinator.limit(name, 1))
    assert narrow.waits()
    behind = attempt(coordinator.limit(name, 5))
    assert behind.waits(), "entered beside one ahead that wants to be alone"
    wide.leave()
    narrow.granted()
    assert behind.waits()
    narrow.leave()
    behind.granted()


def test_readers_share_and_a_waiting_writer_stops_later_readers(connect, name, attempt):
    first, other = connect(), connect()
    readers = [attempt(coordinator.read(name)) for coordinator in (first, other, first, other)]
    for reader in readers:
        reader.granted()
    writer = attempt(other.write(name))
    late = attempt(first.read(name))
    for reader in readers[:-1]:
        reader.leave()
    assert writer.waits()
    assert late.waits(0.01)
    readers[-1].leave()
    writer.granted()
    assert late.waits()
    second_late = attempt(other.read(name))
    writer.leave()
    late.granted()
    second_late.granted()


def test_read_and_mutex_exclude_each_other(connect, name, attempt):
    coordinator = connect()
    with coordinator.mutex(name):
        reader = attempt(coordinator.read(name))
        assert reader.waits()
    reader.granted()
    assert not coordinator.limit(name, 10).acquire(blocking=False)


def test_stages(connect, name, attempt):
    client, other = connect(), connect()
    first = [attempt(coordinator.stage(name, 100)) for coordinator in (client, other)]
    for each in first:
        each.granted()
    second = [attempt(client.stage(name, 200)) for _ in range(2)]
    last = attempt(other.stage(name, 300))
    first[0].leave()
    assert all(each.waits(0.1) for each in second)
    first[1].leave()
    for each in second:
        each.granted()  # both at once
    assert last.waits()
    for each in second:
        each.leave()
    last.granted()


def test_a_late_entry_joins_its_stage_unless_another_waits(connect, name, attempt):
    coordinator = connect()
    running = attempt(coordinator.stage(name, 100))
    running.granted()
    attempt(coordinator.stage(name, 100)).granted()
    waiting = attempt(coordinator.stage(name, 200))
    late = attempt(coordinator.stage(name, 100))
    assert waiting.waits()
    assert late.waits(0.01)


@pytest.mark.parametrize("order", [-5, 0, 10**12])
def test_any_whole_number_is_an_order(connect, name, order):
    with connect().stage(name, order, timeout=0):
        pass


# -- all_of


def test_all_of_takes_all(connect, name, attempt):
    coordinator = connect()
    both = sqlsem.all_of(coordinator.mutex(name("a")), coordinator.limit(name("b"), 2))
    with both as grant:
        assert set(grant.positions) == {name("a"), name("b")}
        assert attempt(coordinator.mutex(name("a"))).waits()
        attempt(coordinator.limit(name("b"), 2)).granted()


def test_all_of_waits_for_each(connect, name, attempt):
    coordinator = connect()
    a = attempt(coordinator.mutex(name("a")))
    b = attempt(coordinator.mutex(name("b")))
    a.granted()
    b.granted()
    both = attempt(sqlsem.all_of(coordinator.mutex(name("b")), coordinator.mutex(name("a"))), rows=2)
    assert both.waits()
    a.leave()
    assert both.waits()
    b.leave()
    both.granted()


def test_all_of_without_waiting_leaves_no_row(connect, database, name, attempt):
    coordinator = connect()
    attempt(coordinator.mutex(name("b"))).granted()
    both = sqlsem.all_of(coordinator.mutex(name("a")), coordinator.mutex(name("b")))
    assert not both.acquire(blocking=False)
    assert [row[1] for row in database.queue(name)] == [name("b")]
    assert not both.acquire(timeout=0.2)
    assert [row[1] for row in database.queue(name)] == [name("b")]


def test_all_of_in_opposite_orders_never_deadlocks(connect, name, threads):
    coordinators = [connect(), connect()]
    recorder = Recorder()
    names = [name(letter) for letter in "abcd"]

    def work(number):
        chance = random.Random(number)
        coordinator = coordinators[number % 2]
        for _ in range(5):
            chosen = chance.sample(names, chance.choice([2, 3]))
            with recorder.stay(sqlsem.all_of(*[coordinator.mutex(resource) for resource in chosen])):
                time.sleep(0.001)

    for number in range(8):
        threads.start(work, number)
    threads.join()
    assert check_history(recorder.stays) >= 80


def test_all_of_is_refused(connect, name):
    coordinator, other = connect(), connect()
    with pytest.raises(sqlsem.ConfigurationError, match="twice"):
        sqlsem.all_of(coordinator.mutex(name), coordinator.read(name))
    with pytest.raises(sqlsem.ConfigurationError, match="one database"):
        sqlsem.all_of(coordinator.mutex(name("a")), other.mutex(name("b")))
    with pytest.raises(sqlsem.ConfigurationError, match="at least one"):
        sqlsem.all_of()


# -- tries and timeouts


@as_in_python
def test_trying_leaves_no_row(connect, database, name, python_lock):
    first, other = connect(), connect()
    lock = python_lock(other, name)
    with python_lock(first, name):
        assert lock.acquire(blocking=False) is False
        assert lock.acquire(timeout=0) is False
        assert len(database.queue(name)) == 1
    assert lock.acquire(blocking=False) is True
    lock.release()
    assert database.queue(name) == []


def test_trying_does_not_overtake_a_waiter(connect, name, attempt):
    coordinator = connect()
    attempt(coordinator.limit(name, 2)).granted()
    heavy = attempt(coordinator.limit(name, 2, weight=2))
    assert heavy.waits(0.05)
    assert not coordinator.limit(name, 2).acquire(blocking=False)


@as_in_python
def test_a_timeout_leaves_no_row(connect, database, name, python_lock):
    first, other = connect(), connect()
    with python_lock(first, name):
        began = time.monotonic()
        assert python_lock(other, name).acquire(timeout=0.3) is False
        assert time.monotonic() - began >= 0.3
        assert len(database.queue(name)) == 1
        with pytest.raises(sqlsem.Timeout) as caught, python_lock(other, name, timeout=0.1):
            pass
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.resource == name
    assert name in str(caught.value)
    assert database.queue(name) == []


def test_timeout_unblocks_the_next_waiter(connect, name, attempt):
    coordinator = connect()
    reader = attempt(coordinator.read(name))
    reader.granted()
    writer = attempt(coordinator.write(name), timeout=0.5)
    late = attempt(coordinator.read(name))
    late.granted()  # once the writer has given up
    assert writer.grant is None
    assert writer.error is None


def test_the_timeout_of_the_lock_counts_unless_another_is_given(connect, name):
    first, other = connect(), connect()
    with first.mutex(name):
        assert other.mutex(name, timeout=0.05).acquire() is False
        assert other.mutex(name, timeout=3600).acquire(timeout=0.05) is False


# -- methods of threading's locks


@as_in_python
def test_acquire_and_release_as_in_threading(connect, name, python_lock):
    lock = python_lock(connect(), name)
    assert lock.acquire() is True
    lock.release()
    assert lock.acquire(True, 5) is True
    lock.release()
    assert lock.acquire(False) is True
    lock.release()
    assert lock.acquire(timeout=None) is True
    lock.release()
    assert lock.acquire(timeout=-1) is True
    lock.release()
    with pytest.raises(sqlsem.ConfigurationError):
        lock.acquire(False, 5)
    for bad in (-2, float("nan"), "x", True):
        with pytest.raises(sqlsem.ConfigurationError) as caught:
            lock.acquire(timeout=bad)
        assert isinstance(caught.value, ValueError), "what Python's locks raise"


def test_a_lock_can_be_referred_to_weakly(connect, name):
    lock = connect().mutex(name)
    reference = weakref.ref(lock)
    del lock
    gc.collect()
    assert reference() is None


def test_the_grant_of_an_acquired_lock(connect, name):
    lock = connect().mutex(name)
    with pytest.raises(sqlsem.NotHeld):
        _ = lock.grant
    lock.acquire()
    assert lock.grant.resource == name
    lock.release()
    with pytest.raises(sqlsem.NotHeld):
        _ = lock.grant


@as_in_python
def test_lock_object_shared_by_many_threads(connect, name, threads, python_lock):
    lock = python_lock(connect(), name)
    recorder = Recorder()

    def work():
        for _ in range(5):
            with recorder.stay(lock):
                pass

    for _ in range(8):
        threads.start(work)
    threads.join()
    assert check_history(recorder.stays) == 40
    assert overlap(recorder.stays) == 1


def test_limit_object_shared_by_many_threads(connect, name, threads):
    lock = connect().limit(name, 3)
    together = threading.Barrier(3)
    recorder = Recorder()

    def work():
        with recorder.stay(lock):
            together.wait(60)

    for _ in range(6):
        threads.start(work)
    threads.join()
    check_history(recorder.stays)


@as_in_python
def test_release_of_an_unheld_lock_is_refused(connect, name, python_lock):
    lock = python_lock(connect(), name)
    with pytest.raises(sqlsem.NotHeld, match=r"not held by this (thread|task)"):
        lock.release()
    with pytest.raises(RuntimeError), lock:
        lock.release()
        lock.release()


@pytest.mark.parametrize("reentrant", [False, True])
def test_another_thread_releases_only_through_the_grant(connect, name, threads, reentrant):
    """Any thread may release a Lock of Python's, and none an RLock. For a Semaphore see test_semaphores.py."""
    lock = connect().mutex(name, reentrant=reentrant)
    lock.acquire()
    grant = lock.grant

    def elsewhere():
        with pytest.raises(sqlsem.NotHeld):
            lock.release()
        grant.release()
        with pytest.raises(sqlsem.NotHeld):
            grant.release()

    threads.start(elsewhere)
    threads.join()
    with pytest.raises(sqlsem.NotHeld):
        lock.release()


KINDS = {
    "mutex": lambda c, name: c.mutex(name),
    "limit": lambda c, name: c.limit(name, 2),
    "read": lambda c, name: c.read(name),
    "write": lambda c, name: c.write(name),
    "stage": lambda c, name: c.stage(name, 1),
    "reentrant": lambda c, name: c.mutex(name, reentrant=True),
    "all_of": lambda c, name: sqlsem.all_of(c.mutex(name), c.read(name("b"))),
}
RELEASES = {"grant": lambda lock, grant: grant.release(), "lock": lambda lock, grant: lock.release()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", RELEASES)
def test_block_released_early_ends_quietly(connect, database, name, kind, way):
    lock = KINDS[kind](connect(), name)
    for _ in range(2):
        with lock as grant:
            RELEASES[way](lock, grant)
            assert database.queue(name) == []
            with pytest.raises(sqlsem.NotHeld):
                grant.check()
    with pytest.raises(sqlsem.NotHeld):
        lock.release()
    with pytest.raises(ZeroDivisionError), lock as grant:
        RELEASES[way](lock, grant)
        _ = 1 / 0


@pytest.mark.parametrize("way", RELEASES)
def test_inner_block_released_early_keeps_the_outer_hold(connect, database, name, way):
    """A release of a reentrant lock ends the innermost hold only."""
    coordinator = connect()
    for lock in (coordinator.mutex(name, reentrant=True), coordinator.limit(name, 3)):
        with lock as outer:
            with lock as inner:
                RELEASES[way](lock, inner)
            outer.check()
            assert len(database.queue(name)) == 1
        assert database.queue(name) == []


@pytest.mark.parametrize("way", RELEASES)
def test_block_released_early_and_acquired_again(connect, database, name, way):
    """A block may release and acquire again inside: its end releases the new grant."""
    lock = connect().mutex(name)
    with lock as grant:
        RELEASES[way](lock, grant)
        assert lock.acquire(timeout=60)
        assert len(database.queue(name)) == 1
    assert database.queue(name) == []


def test_block_released_by_another_thread_ends_quietly(connect, database, name, threads):
    with connect().mutex(name) as grant:
        threads.start(grant.release)
        threads.join()
        assert database.queue(name) == []


def test_block_released_early_in_an_acquired_lock_keeps_it(connect, database, name):
    lock = connect().mutex(name, reentrant=True)
    lock.acquire()
    with lock as grant:
        grant.release()
    assert len(database.queue(name)) == 1
    lock.release()
    assert database.queue(name) == []


@pytest.mark.quiet(False)
def test_block_lost_and_released_early_still_tells(connect, database, name):
    """The release inside the block raises LockLost, and so does the end of the block if code swallowed the first."""
    lock = connect().mutex(name)
    with pytest.raises(sqlsem.LockLost), lock as grant:
        database.rows("DELETE FROM {table} WHERE queue_position = ?", grant.position)
        with pytest.raises(sqlsem.LockLost):
            grant.release()
    with pytest.raises(sqlsem.NotHeld):
        lock.release()


# -- again in the same thread


@pytest.mark.parametrize("kind", ["mutex", "write", "limit"])
def test_acquire_again_in_the_same_thread_is_a_deadlock(connect, name, kind):
    """An exclusive lock excludes its own thread too: the error is immediate, and needs no search."""
    coordinator = connect()
    lock = coordinator.limit(name, 2, weight=2) if kind == "limit" else getattr(coordinator, kind)(name)
    with lock:
        with pytest.raises(sqlsem.Deadlock, match="already holds"):
            lock.acquire(timeout=30)
        with pytest.raises(sqlsem.Deadlock), sqlsem.all_of(coordinator.mutex(name("b")), lock):
            pass
        assert lock.acquire(blocking=False) is False
        assert lock.acquire(timeout=0) is False
        with pytest.raises(sqlsem.Timeout), coordinator.write(name, timeout=0):
            pass
    with lock:
        pass


def test_deadlock_names_the_own_excluding_lock(connect, name):
    coordinator = connect()
    with coordinator.read(name):
        with pytest.raises(sqlsem.Deadlock, match="upgrade"):
            coordinator.write(name).acquire()
        with pytest.raises(sqlsem.Deadlock, match="read on"):
            coordinator.stage(name, 1).acquire()
        assert coordinator.write(name).acquire(blocking=False) is False
    with coordinator.write(name), pytest.raises(sqlsem.Deadlock, match="write on"):
        coordinator.read(name).acquire()
    with coordinator.limit(name, 4, weight=3), pytest.raises(sqlsem.Deadlock, match="limit 4 on"):
        coordinator.limit(name, 4, weight=2).acquire()
    with coordinator.limit(name, 4), pytest.raises(sqlsem.Deadlock, match="limit 4 on"):
        coordinator.mutex(name).acquire()


def test_reentrant(connect, database, name):
    coordinator = connect()
    lock = coordinator.mutex(name, reentrant=True)
    with lock as outer:
        with lock as inner:
            assert inner.position == outer.position
            assert len(database.queue(name)) == 1
        assert len(database.queue(name)) == 1
        outer.check()
        with coordinator.read(name, reentrant=True), coordinator.limit(name, 3, reentrant=True):
            assert len(database.queue(name)) == 1
    assert database.queue(name) == []


def test_reentrant_cannot_turn_a_reader_into_a_writer(connect, name):
    coordinator = connect()
    with coordinator.read(name, reentrant=True):
        with pytest.raises(sqlsem.Deadlock):
            coordinator.write(name, reentrant=True).acquire()
        with coordinator.read(name, reentrant=True):
            pass
    with coordinator.limit(name, 3, reentrant=True), pytest.raises(sqlsem.Deadlock):
        coordinator.limit(name, 3, weight=3, reentrant=True).acquire()


@pytest.mark.parametrize("kind", ["mutex", "read", "write", "limit"])
def test_reentrant_needs_a_lock_as_strong(connect, database, name, kind):
    """A slot of a limit does not become a lock that excludes the holders of the other slots."""
    ours, theirs = connect(), connect()
    options = {"limit": 2} if kind == "limit" else {}
    with ours.limit(name, 3, reentrant=True), theirs.limit(name, 3):
        lock = getattr(ours, kind)(name, reentrant=True, **options)
        assert not lock.acquire(blocking=False)
        with ours.limit(name, 4, reentrant=True):
            assert len(database.queue(name)) == 2


def test_reentrant_needs_a_grant_of_its_own_thread(connect, database, name):
    """Any thread may release what `acquire` of a limit has acquired, so no other lock relies on it."""
    coordinator = connect()
    semaphore, lock = coordinator.limit(name, 3), coordinator.limit(name, 3, reentrant=True)
    assert semaphore.acquire()
    assert lock.acquire()
    assert len(database.queue(name)) == 2
    lock.release()
    semaphore.release()
    assert database.queue(name) == []


def test_another_thread_is_not_let_in_by_reentrant(connect, name, attempt):
    lock = connect().mutex(name, reentrant=True)
    with lock:
        other = attempt(lock)
        assert other.waits()
    other.granted()


# -- exceptions inside a block


@as_in_python
def test_an_error_inside_comes_out_and_the_lock_goes_back(connect, database, name, python_lock):
    with pytest.raises(ZeroDivisionError), python_lock(connect(), name):
        _ = 1 / 0
    assert database.queue(name) == []


def test_many_locks_in_a_single_process(connect, name):
    coordinator = connect()
    grants = [coordinator.mutex(name(number)) for number in range(100)]
    for lock in grants:
        assert lock.acquire(timeout=60)
    assert len(coordinator.admin.entries()) >= 100
    for lock in grants:
        lock.release()


@pytest.mark.faces("sync")
@pytest.mark.engines("postgresql")
def test_500_locks_cost_three_connections(engine_name, make_database, postgres_server, name):
    database = make_database(postgres_server)  # a separate database, to count its connections

    with database.coordinator() as coordinator:
        locks = [coordinator.mutex(name(number)) for number in range(500)]
        for lock in locks:
            assert lock.acquire(timeout=60)
        until(lambda: database.connections() <= 3)  # the installer's connection may still be ending
        waiters = [Attempt(coordinator.mutex(name("w"))) for _ in range(20)]
        until(lambda: len(database.queue(name("w"))) == 20)
        assert database.connections() <= 3
        until(lambda: all_left(waiters), "all waiters through")
        assert database.connections() <= 3
        for lock in locks:
            lock.release()
    assert database.queue(name) == []


def all_left(waiters):
    for waiter in waiters:
        if waiter.inside:
            waiter.leave()
    return all(waiter.left for waiter in waiters)
