"""A call that is interrupted before or after any of its effects, and again in its rollback, changes nothing in the end.

An interrupt is a `KeyboardInterrupt` in a thread, or the cancellation of a task; both APIs roll back by the same code.
`Interrupts` raises one at a chosen effect of a call, and a second one at a chosen effect after it.
"""

import contextlib
import itertools
import threading

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.aio.driver import Driver
from sqlsem.client.client import DatabaseClient

pytestmark = [pytest.mark.locks, pytest.mark.faces("sync", "aio"), pytest.mark.timing(0.05)]


class Interrupt(BaseException):
    """In place of a KeyboardInterrupt, or of the cancellation of a task."""


class Interrupts:
    """Counts the effects of a client in one thread or event loop, and raises interrupts at some of them.

    ``moments``: (number, is_after) pairs: the number of the effect since the previous interrupt, and True if the effect
    takes place before the interrupt.
    """

    def __init__(self, client, moments):
        self._client, self._moments = client, list(moments)
        self._thread = threading.get_ident()
        self._count = 0

    def patch(self, monkeypatch, face):
        """Put this in the place of the method that executes effects."""
        kind = DatabaseClient if face == "sync" else Driver
        execute = kind.execute_effect

        def blocking(client, effect):
            if client is not self._client or threading.get_ident() != self._thread:
                return execute(client, effect)
            self._before()
            result = execute(client, effect)
            self._after()
            return result

        async def awaited(driver, effect):
            if driver.client is not self._client:
                return await execute(driver, effect)
            self._before()
            result = await execute(driver, effect)
            self._after()
            return result

        monkeypatch.setattr(kind, "execute_effect", blocking if face == "sync" else awaited)

    def _before(self):
        self._count += 1
        if (self._count, False) == self._next():
            self._raise()

    def _after(self):
        if (self._count, True) == self._next():
            self._raise()

    def _next(self):
        return self._moments[0] if self._moments else None

    def _raise(self):
        del self._moments[0]
        self._count = 0
        raise Interrupt

    def raised_all(self):
        return not self._moments


class Case:
    """A call to interrupt."""

    def __init__(self, connect, name):
        self.ours, self.theirs, self.name = connect(), connect(), name
        self.stack = contextlib.ExitStack()

    def begin(self):
        """Prepare the call."""

    def call(self):
        """Make the call to interrupt."""

    def end(self):
        """Release the locks of `begin`."""

    def no_row_remains(self):
        return self.theirs.admin.entries(str(self.name)) == []

    @contextlib.contextmanager
    def released_soon(self, grant):
        """Have another thread release a grant a moment after the call has begun."""
        timer = threading.Timer(0.02, grant.release)
        timer.start()
        try:
            yield
        finally:
            timer.join()


class Acquire(Case):
    def lock(self):
        return self.ours.mutex(self.name)

    def call(self):
        with self.lock():
            pass


class AcquireContended(Acquire):
    def begin(self):
        lock = self.theirs.mutex(self.name)
        lock.acquire()
        self.grant = lock.grant

    def call(self):
        with self.released_soon(self.grant):
            super().call()


class AcquireExplicitly(AcquireContended):
    def call(self):
        lock = self.lock()
        with self.released_soon(self.grant):
            if lock.acquire(timeout=PATIENCE):
                lock.release()


class AcquireAll(AcquireContended):
    def lock(self):
        return sqlsem.all_of(self.ours.limit(self.name("b"), 2, weight=2), self.ours.mutex(self.name))


class AcquireAllWithRate(AcquireContended):
    def lock(self):
        return sqlsem.all_of(self.ours.rate(self.name("rate"), 1000, per=1), self.ours.mutex(self.name))


class AcquireAllWithRateExplicitly(AcquireAllWithRate, AcquireExplicitly):
    """The locks of the one, and the call of the other."""


class AcquireAllWithSlowRate(Acquire):
    def begin(self):
        self.theirs.rate(self.name("rate"), 1, per=0.1).take()

    def lock(self):
        return sqlsem.all_of(self.ours.mutex(self.name), self.ours.rate(self.name("rate"), 1, per=0.1))


class AcquireAllWithSlowRateExplicitly(AcquireAllWithSlowRate):
    def call(self):
        lock = self.lock()
        if lock.acquire(timeout=PATIENCE):
            lock.release()


class Reenter(Acquire):
    def begin(self):
        self.outer = self.ours.mutex(self.name, reentrant=True)
        self.outer.acquire()

    def lock(self):
        return self.outer

    def end(self):
        self.outer.release()


class TimeOut(Acquire):
    def begin(self):
        self.holder = self.theirs.mutex(self.name)
        self.holder.acquire()

    def call(self):
        with contextlib.suppress(sqlsem.Timeout), self.ours.mutex(self.name, timeout=0.03):
            pass

    def end(self):
        self.holder.release()


class Upgrade(Case):
    def begin(self):
        self.reader, other = self.ours.read(self.name), self.theirs.read(self.name)
        other.acquire()
        self.reader.acquire()
        self.other = other.grant

    def call(self):
        with self.released_soon(self.other):
            self.reader.grant.upgrade()
        self.reader.grant.downgrade()

    def end(self):
        self.reader.release()


class UpgradeTimesOut(Upgrade):
    def call(self):
        with contextlib.suppress(sqlsem.Timeout):
            self.reader.grant.upgrade(timeout=0.03)

    def end(self):
        super().end()
        self.other.release()


class Downgrade(Case):
    def begin(self):
        self.writer = self.ours.write(self.name)
        self.writer.acquire()

    def call(self):
        self.writer.grant.downgrade()

    def end(self):
        self.writer.release()


class Handing(Case):
    def no_row_remains(self):
        self.theirs.admin.reap()  # a row that was handed over, and not adopted
        return super().no_row_remains()


class HandOver(Handing):
    def begin(self):
        self.lock = self.ours.mutex(self.name)
        self.lock.acquire()

    def call(self):
        token = self.lock.grant.hand_over(ttl=1)
        self.ours.adopt(token).release()

    def end(self):
        self.lock.release()


class Adopt(Handing):
    def begin(self):
        lock = self.theirs.mutex(self.name)
        lock.acquire()
        self.token = lock.grant.hand_over(ttl=1)

    def call(self):
        self.ours.adopt(self.token).release()


class Rate(Case):
    def call(self):
        self.ours.rate(self.name("rate"), 1, per=0.1).take()


class ByPriority(AcquireContended):
    def begin(self):
        self.ours.admin.set_priorities(self.name, ageing=60)
        lock = self.theirs.mutex(self.name, priority=0)
        lock.acquire()
        self.grant = lock.grant

    def lock(self):
        return self.ours.mutex(self.name, priority=1)

    def end(self):
        self.ours.admin.set_priorities(self.name, None)


class OncePerPeriod(Case):
    def begin(self):
        self.once = self.ours.once(self.name, per=3600)
        self.once.forget()

    def call(self):
        with self.once:
            pass


CASES = [
    *(Acquire, AcquireContended, AcquireExplicitly, AcquireAll, AcquireAllWithRate, AcquireAllWithRateExplicitly),
    *(AcquireAllWithSlowRate, AcquireAllWithSlowRateExplicitly, Reenter, TimeOut, Upgrade, UpgradeTimesOut, Downgrade),
    *(HandOver, Adopt, Rate, ByPriority, OncePerPeriod),
]


def rows(coordinator, client):
    """Return the rows of one client in the database: resource, position and access."""
    return {
        (entry.resource, entry.position, entry.access)
        for entry in coordinator.admin.entries()
        if entry.member_id is not None and entry.member_id == client.member.member_id
    }


def believed(client):
    """Return what a client believes to hold."""
    return {
        (ticket.resource, ticket.position, request.access)
        for grant in client.registry.grants()
        for request, ticket in zip(grant.state.requests, grant.state.tickets, strict=True)
    }


def interrupted(case, moments, monkeypatch, face):
    """Interrupt the call. Return True if all interrupts took place."""
    client = case.ours.client
    interrupts = Interrupts(client, moments)
    case.begin()
    before = {row[:2] for row in believed(client)}
    with monkeypatch.context() as patch:
        interrupts.patch(patch, face)
        with contextlib.suppress(Interrupt):
            case.call()
    held = believed(client)
    assert {row[:2] for row in held} <= before, "the call has ended, and holds nothing new"
    if not isinstance(case, HandOver):
        assert {row[:2] for row in held} == before, "each earlier grant is still held"
    until(lambda: rows(case.theirs, client) == believed(client), f"the database agrees after {moments}")
    with contextlib.suppress(sqlsem.NotHeld, sqlsem.LockLost):
        case.end()
    until(lambda: case.no_row_remains(), f"no row remains after {moments}")
    return interrupts.raised_all()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", CASES)
def test_call_interrupted_twice_leaves_no_row(connect, name, kind, monkeypatch, face):
    case = kind(connect, name)
    for first, is_after in itertools.product(range(1, 30), (False, True)):
        if not interrupted(case, [(first, is_after)], monkeypatch, face):
            break
        for second, then in itertools.product(range(1, 4), (False, True)):
            if not interrupted(case, [(first, is_after), (second, then)], monkeypatch, face):
                break
