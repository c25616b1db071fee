"""A caller whose lock was revoked asks again, before it has released that lock.

The row that an operator revoked is gone: the caller can be granted the resource again. The other rows of the same grant
(`all_of`) stay until the caller releases it, so that no other process works beside this caller unawares. A request that
such a row blocks can never be granted, so it must be an error at once.
"""

import contextlib
import threading

import pytest
from support import PATIENCE, until

import sqlsem

pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.locks, pytest.mark.timing(0.1)]


class Case:
    """Locks that a caller acquires in order (``hold``), and requests that it makes afterwards, with their outcomes.

    ``hold`` and the requests are functions of a coordinator and a name, to which ``hold`` may add resources of its own.
    The operator revokes the row of ``name("a")`` if there is one, else the row of ``name``.
    """

    def __init__(self, hold, *requests, prepare=lambda coordinator, name: None, upgrade=False):
        self.hold, self.requests, self.prepare, self.upgrade = hold, requests, prepare, upgrade


def group(*locks):
    return lambda c, name: [sqlsem.all_of(*(lock(c, name) for lock in locks))]


def alone(*locks):
    return lambda c, name: [lock(c, name) for lock in locks]


def mutex(c, name, **options):
    return c.mutex(name, **options)


def first(c, name):
    return c.mutex(name("a"))


def other(c, name):
    return c.mutex(name("c"))


def of(kind, *arguments, **options):
    return lambda c, name: getattr(c, kind)(name, *arguments, **options)


def both(c, name):
    return sqlsem.all_of(other(c, name), mutex(c, name))


GRANTED, LOST, DEADLOCK = "granted", sqlsem.LockLost, sqlsem.Deadlock
reentrant = of("mutex", reentrant=True)
CASES = {
    "mutex": Case(alone(mutex), (mutex, GRANTED), (reentrant, GRANTED), (of("read"), GRANTED)),
    "reentrant": Case(alone(reentrant, reentrant), (reentrant, GRANTED), (mutex, GRANTED)),
    "limit": Case(alone(of("limit", 3, weight=2)), (of("limit", 3, weight=2), GRANTED), (mutex, GRANTED)),
    "read": Case(alone(of("read")), (of("read"), GRANTED), (of("write"), GRANTED)),
    "write": Case(alone(of("write")), (of("read"), GRANTED), (of("write"), GRANTED)),
    "stage": Case(alone(of("stage", 1)), (of("stage", 1), GRANTED), (of("stage", 2), GRANTED)),
    "upgraded": Case(alone(of("read")), (of("read"), GRANTED), (of("write"), GRANTED), upgrade=True),
    "rate": Case(group(mutex, of("rate", 9, "1h")), (mutex, GRANTED), (of("rate", 9, "1h"), GRANTED)),
    "all_of": Case(
        group(first, mutex),
        *((first, GRANTED), (other, GRANTED), (mutex, LOST), (reentrant, LOST), (both, LOST)),
        *((of("limit", 2), LOST), (of("read"), LOST), (of("stage", 1), LOST)),
    ),
    "all_of read": Case(group(first, of("read")), (of("read"), GRANTED), (of("write"), LOST)),
    "all_of limit": Case(
        group(first, of("limit", 3, weight=2)), (of("limit", 3), GRANTED), (of("limit", 3, weight=2), LOST)
    ),
    # (Each of the two leaves room for the request, and both together do not.)
    "all_of and a limit": Case(
        lambda c, name: [*group(first, of("limit", 3))(c, name), c.limit(name, 3)], (of("limit", 3, weight=2), DEADLOCK)
    ),
    "all_of with a rate": Case(group(first, mutex, of("rate", 9, "1h")), (mutex, LOST)),
    "all_of, priority": Case(
        group(first, mutex),
        (lambda c, name: c.mutex(name("p"), priority=1), sqlsem.ConfigurationError),
        prepare=lambda c, name: c.admin.set_priorities(name("p")),
    ),
    "priority": Case(
        alone(of("mutex", priority=1)),
        (of("mutex", priority=1), GRANTED),
        prepare=lambda c, name: c.admin.set_priorities(name),
    ),
}
PAIRS = [(label, number) for label, case in CASES.items() for number in range(len(case.requests))]


def acquired(lock, timeout):
    """Acquire a lock; True if it was granted. (A rate is taken.)"""
    if hasattr(lock, "take"):
        return lock.take() is not None
    return lock.acquire(timeout=timeout)


def try_again(lock, expected, name):
    """Ask for a lock, and compare the outcome; a lock that is granted is released."""
    if expected is GRANTED:
        assert acquired(lock, PATIENCE)
        if not hasattr(lock, "take"):
            lock.release()
        return
    if expected in (LOST, DEADLOCK):
        assert acquired(lock, 0) is False
    with pytest.raises(expected) as refused:
        assert acquired(lock, PATIENCE), "it waits in vain"
    if expected in (LOST, DEADLOCK):
        assert refused.value.resource == name
        assert "is lost" in str(refused.value)
        assert "release it" in str(refused.value)


@pytest.mark.parametrize("force", [True, False], ids=["forced", "notified"])
@pytest.mark.parametrize(("label", "number"), PAIRS, ids=[f"{label} {number}" for label, number in PAIRS])
def test_caller_asks_again_after_its_lock_was_revoked(connect, name, label, number, force):
    coordinator, operator = connect(), connect()
    case = CASES[label]
    request, expected = case.requests[number]
    case.prepare(coordinator, name)
    locks = case.hold(coordinator, name)
    for lock in locks:
        assert lock.acquire()
    grant = locks[0].grant
    if case.upgrade:
        grant.upgrade()
    revoked = name("a") if name("a") in grant.positions else name
    operator.admin.revoke(grant.positions[revoked], force=force)
    until(lambda: grant.lost, "the loss")
    until(lambda: not operator.admin.entries(revoked), "the removal of the row")
    try_again(request(coordinator, name), expected, name)
    errors = []
    for lock in reversed(locks):
        try:
            lock.release()
        except sqlsem.LockLost as exc:
            errors.append(exc)
    assert len(errors) == 1
    if expected in (LOST, DEADLOCK):
        try_again(request(coordinator, name), GRANTED, name)
    operator.admin.set_priorities(name, None)
    operator.admin.set_priorities(name("p"), None)


@pytest.mark.parametrize("kind", ["adopted", "task"])
@pytest.mark.faces("sync")
def test_lost_rows_without_a_lock_object_refuse_their_caller(connect, name, kind):
    coordinator, operator = connect(), connect()
    if kind == "adopted":
        lock = sqlsem.all_of(first(coordinator, name), mutex(coordinator, name))
        assert lock.acquire()
        grant = coordinator.adopt(lock.grant.hand_over())
    else:
        queue = coordinator.queue(name)
        queue.put({}, locks=[first(coordinator, name), mutex(coordinator, name)], on_failure="continue")
        task = until(queue.try_claim, "the claim")
        grant = task.grant
    operator.admin.revoke(grant.positions[name("a")], force=True)
    until(lambda: grant.lost, "the loss")
    try_again(mutex(coordinator, name), LOST, name)
    try_again(first(coordinator, name), GRANTED, name)
    with pytest.raises(sqlsem.LockLost):
        grant.release() if kind == "adopted" else task.fail("lost")
    try_again(mutex(coordinator, name), GRANTED, name)


@pytest.mark.parametrize(("label", "number"), PAIRS, ids=[f"{label} {number}" for label, number in PAIRS])
def test_caller_asks_again_after_all_of_its_rows_are_lost(connect, name, label, number):
    """A process that was out of reach removes all of its rows, those of grants that are not released included."""
    coordinator = connect()
    case = CASES[label]
    case.prepare(coordinator, name)
    locks = case.hold(coordinator, name)
    for lock in locks:
        assert lock.acquire()
    coordinator.client.member.mark_all_lost("out of reach, for a test")
    try_again(case.requests[number][0](coordinator, name), GRANTED, name)
    lost = [grant for lock in locks if (grant := lock.grant).lost]
    assert len(lost) == len(locks)
    for lock in reversed(locks):
        with contextlib.suppress(sqlsem.LockLost):
            lock.release()
    coordinator.admin.set_priorities(name, None)
    coordinator.admin.set_priorities(name("p"), None)


@pytest.mark.parametrize("is_victim", [True, False], ids=["victim", "other"])
def test_deadlock_through_a_row_of_a_lost_grant_is_found(connect, name, threads, is_victim):
    """Two callers wait for each other, one of them for a row that a lost grant of the other still has."""
    ours, theirs, operator = connect(), connect(), connect()
    lost = sqlsem.all_of(first(ours, name), mutex(ours, name))
    assert lost.acquire()
    grant = lost.grant
    operator.admin.revoke(grant.positions[name("a")], force=True)
    until(lambda: grant.lost, "the loss")
    errors = []

    def ask(wanted, resource, turn):
        """Ask for a lock, once ``resource`` has ``turn`` requests; record the deadlock."""
        until(lambda: len(operator.admin.entries(resource)) >= turn, "the other request")
        try:
            assert wanted.acquire(timeout=PATIENCE)
            wanted.release()
        except sqlsem.Deadlock as exc:
            errors.append(exc)

    def other_caller():
        with other(theirs, name):
            held.set()
            ask(mutex(theirs, name), name("c"), 1 if is_victim else 2)

    held = threading.Event()
    threads.start(other_caller)
    assert held.wait(PATIENCE)
    ask(other(ours, name), name, 2 if is_victim else 1)
    with pytest.raises(sqlsem.LockLost):
        lost.release()
    threads.join()
    (error,) = errors
    assert error.resource == (name("c") if is_victim else name)
    assert ("is lost" in str(error)) is is_victim
