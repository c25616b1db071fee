"""The asyncio API: blocks, decorators, explicit calls, cancellation, loss, loops and threads.

`test_primitives`, `test_grants` and `test_scenarios` test the meaning of the primitives with both APIs.
"""

import asyncio
import contextlib
import functools
import gc
import inspect
import itertools
import logging
import sys
import threading
import time

import pytest
from support import PATIENCE, Attempt, slack, until

import sqlsem
from sqlsem.aio import driver

pytestmark = pytest.mark.locks
GRACE = 0.6
try:
    import uvloop
except ImportError:
    uvloop = None


@pytest.fixture(params=["asyncio", pytest.param("uvloop", marks=pytest.mark.skipif(uvloop is None, reason="uvloop"))])
def run(request):
    """Run a coroutine in a new loop, for a minute at most, and close the loop; also a test that is one."""

    def run(coroutine):
        async def bounded():
            return await asyncio.wait_for(coroutine, PATIENCE)

        if request.param == "asyncio":
            return asyncio.run(bounded())
        if sys.version_info >= (3, 11):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(bounded())
        uvloop.install()
        try:
            return asyncio.run(bounded())
        finally:
            asyncio.set_event_loop_policy(None)

    return run


async def eventually(condition, description="the condition"):
    """Wait as `until` does, without blocking the event loop."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{description} did not come true"
        await asyncio.sleep(0.01)


def rows(database, name, number):
    return eventually(lambda: len(database.queue(name)) == number, f"{number} rows in the queue")


# -- using them


async def test_async_blocks_hold_and_release(run, connect, database, name):
    coordinator = connect()
    async with coordinator.limit(name, 3) as grant:
        assert grant.resource == name
        assert [row[0] for row in database.queue(name)] == [grant.position]
        await grant.check()
    assert database.queue(name) == []
    async with coordinator.aio.mutex(name, timeout=60):
        pass
    async with sqlsem.all_of(coordinator.read(name("a")), coordinator.mutex(name("b"))) as grant:
        assert set(grant.positions) == {name("a"), name("b")}
    async with sqlsem.aio.all_of(coordinator.aio.stage(name("a"), 1), coordinator.write(name("b"))) as grant:
        assert set(grant.positions) == {name("a"), name("b")}


async def test_acquire_times_out(run, connect, database, name):
    coordinator = connect()
    async with coordinator.mutex(name):
        with pytest.raises(sqlsem.Timeout) as caught:
            await asyncio.create_task(enter(coordinator.mutex(name, timeout=0.1)))
        assert caught.value.resource == name
        lock = coordinator.aio.mutex(name)
        for options in ({"timeout": 0.1}, {"timeout": 0}, {"blocking": False}):
            assert await asyncio.create_task(lock.acquire(**options)) is False
        assert len(database.queue(name)) == 1
    assert await lock.acquire(blocking=False) is True
    assert lock.grant.position
    await lock.release()
    with pytest.raises(sqlsem.NotHeld, match="this task"):
        await lock.release()


async def enter(lock):
    async with lock:
        pass


async def test_asyncio_timeout_and_wait_for(run, connect, database, name):
    coordinator = connect()

    async def waited():
        await asyncio.wait_for(coordinator.aio.mutex(name).acquire(), 0.05)

    async with coordinator.mutex(name):
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):  # (before 3.12, `wait_for` runs the acquire in another task)
                await asyncio.create_task(waited())
            if sys.version_info >= (3, 11):

                async def limited():
                    async with asyncio.timeout(0.05):
                        await coordinator.aio.mutex(name).acquire()

                with pytest.raises(TimeoutError):
                    await asyncio.create_task(limited())
            await rows(database, name, 1)
    async with coordinator.mutex(name, timeout=60):
        pass


def test_decorated_coroutines(run, connect, database, name):
    coordinator = connect()

    def held():
        return [row[1] for row in database.queue(name)]

    @coordinator.mutex(lambda table, **_: f"{name}:{table}")
    async def load(table, *, rows=1):
        """Load a table."""
        return held(), rows

    @coordinator.aio.limit(name, 2)
    async def fail():
        assert held() == [name]
        raise ZeroDivisionError

    class Loader:
        @coordinator.mutex(lambda self, rows: f"{name}:{type(self).__name__}:{rows}")
        async def plain(self, rows):
            return held()

        @classmethod
        @coordinator.mutex(lambda cls, rows: f"{name}:{cls.__name__}:{rows}")
        async def of_class(cls, rows):
            return held()

        @staticmethod
        @coordinator.mutex(lambda rows: f"{name}:{rows}")
        async def static(rows):
            return held()

        async def __call__(self):
            return held()

    async def main():
        assert await load("a") == ([f"{name}:a"], 1)
        assert await load(table="b", rows=2) == ([f"{name}:b"], 2)
        with pytest.raises(ZeroDivisionError):
            await fail()
        loader = Loader()
        assert await loader.plain(1) == [f"{name}:Loader:1"]
        assert await Loader.of_class(2) == await loader.of_class(2) == [f"{name}:Loader:2"]
        assert await Loader.static(3) == [f"{name}:3"]
        assert await coordinator.mutex(name)(loader)() == [name]
        assert await coordinator.mutex(name)(functools.partial(load.__wrapped__, "c"))() == ([name], 1)
        assert held() == []

    assert inspect.iscoroutinefunction(load)
    assert load.__doc__ == "Load a table."
    run(main())
    run(main())  # in another loop


def test_decorating_an_unsuitable_function_is_refused(connect, name):
    coordinator = connect()

    async def stream():
        yield 1

    class Streams:
        async def __call__(self):
            yield 1

    for bad in (stream, functools.partial(stream), Streams()):
        with pytest.raises(sqlsem.ConfigurationError, match=r"asynchronous generator.*async with"):
            coordinator.mutex(name)(bad)
    for bad in (lambda: 1, stream, 5):
        with pytest.raises(sqlsem.ConfigurationError):
            coordinator.aio.mutex(name)(bad)

    async def work():
        raise AssertionError("must not run")

    with pytest.raises(sqlsem.ConfigurationError, match="returned a coroutine"):
        coordinator.mutex(name)(lambda: work())()


def test_call_that_blocks_the_loop_is_refused(run, connect, database, name):
    lock = connect().mutex(name)

    @lock
    def work():
        raise AssertionError("must not run")

    async def main():
        for use in (lock.acquire, lambda: lock.acquire(blocking=False), lock.__enter__, work):
            with pytest.raises(sqlsem.ConfigurationError, match="async with"):
                use()
        await asyncio.to_thread(lock.acquire)  # another thread may acquire it

    run(main())
    assert len(database.queue(name)) == 1
    connect().admin.revoke(database.queue(name)[0][0], force=True)


def test_cancel_on_lost_is_for_tasks(connect, name):
    with pytest.raises(sqlsem.ConfigurationError, match="cancel_on_lost"):
        connect().mutex(name, cancel_on_lost=True).acquire()


def test_outside_of_a_task(connect, name):
    step = connect().mutex(name).__aenter__()
    with pytest.raises(RuntimeError):  # no running event loop
        step.send(None)


async def test_waiter_is_cancelled_beside_another_with_a_lease(run, connect, database, name):
    """A waiter can be cancelled beside another one, also with a driver that cannot prepare statements."""
    first, other = connect(lease=30), connect(lease=30)
    async with first.mutex(name):
        waiting = asyncio.create_task(enter(other.mutex(name)))
        await rows(database, name, 2)
        cancelled = asyncio.create_task(enter(other.mutex(name)))
        await rows(database, name, 3)
        cancelled.cancel()
    await waiting


@pytest.mark.engines("postgresql")
def test_cancelled_wait_returns_its_connection(run, connect, database, name, monkeypatch):
    first, other = connect(), connect()
    opened = []
    connect_async = other.engine.connect_async

    async def counted(purpose):
        opened.append(purpose)
        return await connect_async(purpose)

    monkeypatch.setattr(other.engine, "connect_async", counted)

    async def main():
        async with first.mutex(name):
            for _ in range(10):
                task = asyncio.create_task(other.aio.mutex(name).acquire())
                await eventually(lambda: other.client.wait_pool._due)
                await asyncio.sleep(0.02)
                task.cancel()
                await asyncio.wait({task})
        async with other.mutex(name):
            pass

    run(main())
    assert len(opened) == 1


# -- order, and both APIs side by side


def test_tasks_and_threads_are_granted_in_order(run, connect, database, name):
    coordinator = connect()
    order = []

    async def task(number):
        async with coordinator.mutex(name):
            order.append(number)
            await asyncio.sleep(0)

    def thread(number):
        with coordinator.mutex(name):
            order.append(number)

    async def main():
        async with coordinator.mutex(name):
            waiting = []
            for number in range(8):
                work = task(number) if number % 2 else asyncio.to_thread(thread, number)
                waiting.append(asyncio.create_task(work))
                await rows(database, name, number + 2)
        await asyncio.gather(*waiting)

    run(main())
    assert order == list(range(8))


def test_several_loops_in_several_threads(connect, name, threads):
    coordinator = connect()
    lock = coordinator.mutex(name)  # one object for all
    inside, maximum, done = 0, 0, []

    async def work():
        nonlocal inside, maximum
        for _ in range(3):
            async with lock:
                inside += 1
                maximum = max(maximum, inside)
                await asyncio.sleep(0.001)
                inside -= 1
                done.append(1)

    async def main():
        await asyncio.gather(*(work() for _ in range(4)))

    for _ in range(3):
        threads.start(asyncio.run, main())
    threads.join()
    assert (maximum, len(done)) == (1, 36)
    until(lambda: not coordinator.client.event_loops.drivers, "the loops are forgotten")


# -- cancellation


async def cancel_after(task, number):
    """Cancel the task after ``number`` rounds of the loop, or from 20 on after a time that grows with ``number``.

    Return False if the task ended before.
    """
    began = time.monotonic()
    length = 0.0001 * 1.06 ** (number - 20)
    step = 0
    while step < number if number < 20 else time.monotonic() - began < length:
        if task.done():
            return False
        await asyncio.sleep(0)
        step += 1
    return task.cancel()


@pytest.mark.parametrize("free", [True, False], ids=["free", "held"])
def test_cancelled_at_every_step_of_an_acquire(run, connect, database, name, free):
    """A cancelled acquire holds nothing and leaves no row; an acquire that has ended is not cancelled."""
    coordinator = connect()
    outcomes = set()

    async def main():
        holder = coordinator.aio.mutex(name)
        for number in itertools.count():
            if not free:
                await holder.acquire()
            lock = coordinator.aio.mutex(name, timeout=PATIENCE)
            results = []

            async def work(lock=lock, results=results):
                results.append(await lock.acquire())
                await lock.release()

            task = asyncio.create_task(work())
            pace = asyncio.create_task(cancel_after(task, number))
            if not free:
                await asyncio.sleep(0.0002 * (number % 40))
                await holder.release()
            await asyncio.wait({task})
            await pace
            outcomes.add((task.cancelled(), bool(results)))
            assert task.cancelled() or (results == [True] and task.exception() is None)
            if not pace.result():  # the task ended before its cancellation
                break
        # A cancelled release may be deferred to the next heartbeat, which comes at once.
        await rows(database, name, 0)
        assert not coordinator.client.registry.grants()
        assert not coordinator.client.waiter_queues.waiters()

    run(main())
    assert (True, False) in outcomes
    assert (False, True) in outcomes


async def test_cancelled_in_a_block_and_on_the_way_out(run, connect, database, name):
    coordinator = connect()

    async def block():
        async with coordinator.mutex(name):
            await asyncio.sleep(0)

    for number in itertools.count():
        task = asyncio.create_task(block())
        if not await cancel_after(task, number):
            break
        await asyncio.wait({task})
        assert task.cancelled() or task.exception() is None
    await rows(database, name, 0)
    assert not coordinator.client.registry.grants()


async def test_cancelled_twice(run, connect, database, name):
    coordinator = connect()
    async with coordinator.mutex(name):
        for number in range(20):
            task = asyncio.create_task(coordinator.aio.mutex(name).acquire())
            await rows(database, name, 2)
            task.cancel()
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            await rows(database, name, 1)


async def test_cancelled_task_unblocks_the_next_waiter(run, connect, database, name):
    coordinator = connect()
    async with coordinator.read(name):
        writer = asyncio.create_task(coordinator.aio.write(name).acquire())
        await rows(database, name, 2)
        reader = asyncio.create_task(enter(coordinator.read(name)))
        await rows(database, name, 3)
        writer.cancel()
        await reader


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_release_during_cancellation_loses_no_grant(run, connect, database, name, cancel_first):
    """The next waiter gets the lock, and no grant is lost between release and cancellation."""
    coordinator = connect()
    for _ in range(5):
        lock = coordinator.aio.mutex(name)
        await lock.acquire()
        waiting = []
        for number in (2, 3):
            waiting.append(asyncio.create_task(enter(coordinator.mutex(name))))
            await rows(database, name, number)
        if cancel_first:
            waiting[0].cancel()
        releasing = asyncio.create_task(lock.grant.release())
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait({releasing, *waiting})
        assert (releasing.exception(), waiting[1].exception()) == (None, None)
        assert not coordinator.client.registry.grants()


async def test_a_call_that_is_under_way_when_the_task_is_cancelled(run, connect, database, name, monkeypatch):
    """The registration takes longer than a cancelled task waits for it; its row must not stay."""
    monkeypatch.setattr(driver, "CANCEL_WAIT_SECONDS", 0.05)
    coordinator = connect(grace=10)  # long enough for a slow engine to keep its member
    begun, go_on = threading.Event(), threading.Event()
    first = True
    async with coordinator.mutex(name("other")):
        session = coordinator.client.member.main.session
        register = session.register

        def slow(*arguments):
            nonlocal first
            if not first:
                return register(*arguments)
            first = False
            tickets = register(*arguments)
            begun.set()
            assert go_on.wait(PATIENCE)
            return tickets

        monkeypatch.setattr(session, "register", slow, raising=False)
        task = asyncio.create_task(coordinator.aio.mutex(name("slow")).acquire())
        line = asyncio.create_task(coordinator.aio.mutex(name("line")).acquire())
        await eventually(begun.is_set)
        # After repeated cancellation the tasks do not even wait for the removal of their rows.
        while not (task.done() and line.done()):
            task.cancel()
            line.cancel()
            await asyncio.sleep(0.02)
        go_on.set()
        assert task.cancelled()
        assert line.cancelled()
        await rows(database, name, 1)


# -- lost grants


def remove(database, position):
    database.rows("DELETE FROM {table} WHERE queue_position = ?", position)


async def test_end_of_a_block_reports_a_loss(run, connect, database, name):
    coordinator = connect(grace=GRACE)
    with pytest.raises(sqlsem.LockLost):
        async with coordinator.mutex(name) as grant:
            remove(database, grant.position)
    lost_grants = []
    with pytest.raises(ZeroDivisionError):
        async with coordinator.mutex(name, on_lost=lost_grants.append) as grant:
            remove(database, grant.position)
            await asyncio.wait_for(grant.lost_event.wait(), PATIENCE)
            _ = 1 / 0
    await eventually(lambda: lost_grants == [grant])  # the callback runs just after the event is set
    assert grant.lost


async def test_cancel_on_lost(run, connect, database, name):
    coordinator = connect(grace=GRACE)
    with pytest.raises(sqlsem.LockLost) as caught:
        async with coordinator.mutex(name, cancel_on_lost=True) as grant:
            remove(database, grant.position)
            await asyncio.sleep(PATIENCE)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    if sys.version_info >= (3, 11):
        assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0.01)  # no cancellation is pending

    lock = coordinator.aio.mutex(name, cancel_on_lost=True)
    await lock.acquire()
    with pytest.raises(sqlsem.LockLost):
        try:
            remove(database, lock.grant.position)
            await asyncio.sleep(PATIENCE)
        finally:
            await lock.release()
    if sys.version_info >= (3, 11):
        assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0.01)

    # A loss that is reported after the release cancels nothing.
    async with coordinator.mutex(name, cancel_on_lost=True) as grant:
        pass
    coordinator.client.mark_lost([grant.position], "too late")
    await asyncio.sleep(0.01)


def test_cancel_on_lost_of_a_periodic_run(run, connect, database, name):
    coordinator = connect(grace=GRACE)

    async def main():
        for once in (coordinator.once, coordinator.aio.once):
            with pytest.raises(sqlsem.LockLost):
                async with once(name, per="1h", cancel_on_lost=True) as periodic_run:
                    remove(database, periodic_run.grant.position)
                    await asyncio.sleep(PATIENCE)

    run(main())
    with pytest.raises(sqlsem.ConfigurationError, match="cancel_on_lost"):
        connect().once(name, per="1h", cancel_on_lost=True).begin()


async def test_cancel_on_lost_in_a_reentrant_block(run, connect, database, name):
    coordinator = connect(grace=GRACE)
    lock = coordinator.mutex(name, cancel_on_lost=True, reentrant=True)
    with pytest.raises(sqlsem.LockLost):
        async with lock as grant:
            async with lock:
                remove(database, grant.position)
                await asyncio.sleep(PATIENCE)


class CancelledAt:
    """An awaitable that cancels its task when the work suspends for the ``number``-th time."""

    def __init__(self, work, number):
        self.work, self.number, self.rests = work, number, 0

    def __await__(self):
        work = self.work.__await__()
        answer, error = None, None
        while True:
            try:
                rests_on = work.throw(error) if error is not None else work.send(answer)
            except StopIteration as done:
                return done.value
            self.rests += 1
            if self.rests == self.number:
                asyncio.current_task().cancel()
            answer, error = None, None
            try:
                answer = yield rests_on
            except BaseException as exc:
                error = exc


async def test_reentrant_block_survives_cancel_at_any_await(run, connect, database, name):
    coordinator = connect(grace=GRACE)

    async def cancelled(number):
        resource = name(str(number))
        lock = coordinator.mutex(resource, reentrant=True)

        async def work():
            async with lock as grant:
                try:
                    async with lock, coordinator.mutex(resource, reentrant=True):
                        await asyncio.sleep(0)
                finally:
                    assert not grant.state.released  # at any point of the cancellation

        outer = CancelledAt(work(), number)

        async def task():
            await outer

        (outcome,) = await asyncio.gather(asyncio.create_task(task()), return_exceptions=True)
        assert outcome is None or isinstance(outcome, asyncio.CancelledError), (number, outcome)
        await rows(database, resource, 0)
        return outer.rests >= number

    number = 1
    while await cancelled(number):
        number += 1
    assert number > 3


async def test_an_error_inside_comes_before_a_loss_that_cancels(run, connect, database, name):
    coordinator = connect(grace=GRACE)
    with pytest.raises(ZeroDivisionError):
        async with coordinator.mutex(name, cancel_on_lost=True) as grant:
            remove(database, grant.position)
            try:
                await asyncio.sleep(PATIENCE)
            except asyncio.CancelledError:
                _ = 1 / 0
    await asyncio.sleep(0.01)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before 3.11 nobody can tell two cancellations apart")
@pytest.mark.parametrize("ours_first", [True, False])
def test_lock_lost_while_its_task_is_cancelled(run, connect, name, ours_first):
    coordinator = connect()

    async def main():
        inside = asyncio.Event()

        async def work():
            async with coordinator.mutex(name, cancel_on_lost=True):
                inside.set()
                await asyncio.sleep(PATIENCE)

        async def limited():
            async with asyncio.timeout(PATIENCE) as limit:
                async with coordinator.mutex(name("b"), cancel_on_lost=True) as grant:
                    coordinator.client.mark_lost([grant.position], "for a test")
                    limit.reschedule(asyncio.get_running_loop().time())
                    await asyncio.sleep(PATIENCE)

        task = asyncio.create_task(work())
        await inside.wait()
        (grant,) = coordinator.client.registry.grants()
        acts = [lambda: coordinator.client.mark_lost([grant.position], "for a test"), task.cancel]
        for act in acts if ours_first else reversed(acts):
            act()
        await asyncio.wait({task})
        assert task.cancelled(), "the cancellation of another task was taken for the waiter's own"
        with pytest.raises(TimeoutError) as caught:
            await asyncio.create_task(limited())
        assert not isinstance(caught.value, sqlsem.SqlsemError)

    run(main())
    for row in coordinator.admin.entries():
        if row.resource.startswith(name):  # the row is still there: the loss was simulated
            coordinator.admin.revoke(row.position, force=True)


async def test_revoke_cancels_the_holding_task(run, connect, name):
    coordinator, operator = connect(grace=GRACE), connect()
    with pytest.raises(sqlsem.LockLost, match="operator"):
        async with coordinator.mutex(name, cancel_on_lost=True) as grant:
            await asyncio.to_thread(operator.admin.revoke, grant.position)
            await asyncio.sleep(PATIENCE)


# -- assert_held in the caller's transaction


def test_assert_held(run, connect, database, name):
    async def main():
        async with connect().mutex(name) as grant:
            with contextlib.closing(database.raw(autocommit=False)) as connection:
                cursor = connection.cursor()
                await grant.assert_held(cursor)
                connection.commit()
            if database.engine == "postgresql":
                import psycopg

                async with await psycopg.AsyncConnection.connect(database.url) as connection:
                    cursor = connection.cursor()
                    await grant.assert_held(cursor)
                    await connection.commit()
                    remove(database, grant.position)
                    with pytest.raises(sqlsem.LockLost):
                        await grant.assert_held(cursor)
            else:
                remove(database, grant.position)

    with pytest.raises(sqlsem.LockLost):
        run(main())


# -- loops that end, and things in the wrong place


def test_ended_loop_releases_its_grants(run, connect, database, name, caplog):
    coordinator = connect()
    lock = coordinator.aio.mutex(name)
    grants = []

    async def main():
        await lock.acquire()
        grants.append(lock.grant)

    with caplog.at_level(logging.INFO, "sqlsem"):
        run(main())
    assert "still held when its event loop ended" in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    until(lambda: database.queue(name) == [], "the lock is released")

    async def later():
        for use in (grants[0].check, grants[0].release):
            with pytest.raises(sqlsem.ConfigurationError, match="closed"):
                await use()
        with pytest.raises(sqlsem.NotHeld):
            await lock.release()
        async with sqlsem.Lock(lock.terms):
            pass

    run(later())


def test_ended_loop_releases_reentrant_grants(run, connect, database, name):
    coordinator = connect()
    lock = coordinator.aio.mutex(name, reentrant=True)

    async def main():
        await lock.acquire()
        await lock.acquire()

    run(main())
    until(lambda: database.queue(name) == [])


def test_closed_loop_cancels_waits_and_releases_grants(connect, database, name, caplog):
    """Closing a loop whose tasks wait cancels their requests and releases its grants."""
    coordinator = connect(grace=GRACE)
    loop = asyncio.new_event_loop()
    held, free = coordinator.aio.mutex(name("held")), coordinator.aio.mutex(name("wanted"))
    with coordinator.mutex(name("wanted")):

        async def main():
            await held.acquire()
            waiting = [asyncio.ensure_future(free.acquire()) for _ in range(2)]
            await rows(database, name("wanted"), 3)
            return waiting

        waiting = loop.run_until_complete(main())
        behind = Attempt(coordinator.mutex(name("wanted")))
        until(lambda: len(database.queue(name("wanted"))) == 4)
        with caplog.at_level(logging.INFO, "sqlsem"):
            loop.close()
            until(lambda: database.queue(name("held")) == [], "the held locks are released")
            until(lambda: len(database.queue(name("wanted"))) == 2, "what was wanted is withdrawn")
            until(lambda: "still held when its event loop ended" in caplog.text, "the log names the grant")
    behind.leave()
    for task in waiting:
        task._log_destroy_pending = False
    del waiting, task
    gc.collect()
    assert not coordinator.client.registry.grants()
    assert not coordinator.client.waiter_queues.waiters()


async def test_another_loop_and_another_task(run, connect, name):
    coordinator = connect()
    lock = coordinator.aio.mutex(name)

    async def other_task(grant):
        with pytest.raises(sqlsem.NotHeld, match="not held by this task"):
            await lock.release()
        await grant.check()

    async def other_loop(grant):
        with pytest.raises(sqlsem.NotHeld, match="not held by this task"):
            await lock.release()
        for use in (grant.check, grant.release, lambda: grant.assert_held(None)):
            with pytest.raises(sqlsem.ConfigurationError, match="another event loop"):
                await use()
        assert await lock.acquire(timeout=0.05) is False

    await lock.acquire()
    await asyncio.create_task(other_task(lock.grant))
    await asyncio.to_thread(asyncio.run, other_loop(lock.grant))
    await lock.grant.check()
    await lock.release()
    # Another task of the same loop may release through the grant.
    await lock.acquire()
    await asyncio.create_task(lock.grant.release())
    with pytest.raises(sqlsem.NotHeld):
        await lock.release()


def test_a_thread_that_holds_does_not_hold_for_a_task(run, connect, database, name):
    lock = connect().mutex(name)

    async def main():
        await asyncio.to_thread(lock.acquire)
        with pytest.raises(sqlsem.NotHeld):
            await lock.__aexit__(None, None, None)
        with pytest.raises(sqlsem.NotHeld):
            lock.release()
        assert not await lock._aio.acquire(timeout=0.05)

    run(main())
    connect().admin.revoke(database.queue(name)[0][0], force=True)


async def test_the_coordinator_is_closed_while_tasks_wait(run, connect, database, name):
    coordinator, holder = connect(), connect()
    async with holder.mutex(name):
        waiting = [asyncio.create_task(coordinator.aio.mutex(name).acquire()) for _ in range(20)]
        await rows(database, name, 21)
        began = time.monotonic()
        await coordinator.aio.close()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, sqlsem.ConfigurationError), outcome
            assert "closed" in str(outcome)
        assert time.monotonic() - began < slack(10)
        await rows(database, name, 1)
    with pytest.raises(sqlsem.ConfigurationError, match="closed"):
        await coordinator.aio.mutex(name).acquire()


def test_close_reports_the_loss_to_a_holding_task(run, connect, name, caplog):
    coordinator = connect()

    async def main():
        with pytest.raises(sqlsem.LockLost, match="closed"):
            async with coordinator.mutex(name, cancel_on_lost=True):
                await coordinator.aio.close()
                await asyncio.sleep(PATIENCE)

    run(main())
    assert "event loop ended" not in caplog.text


async def test_acquire_again_in_the_same_task(run, connect, database, name):
    coordinator = connect()
    lock = coordinator.mutex(name)
    async with lock:
        with pytest.raises(sqlsem.Deadlock, match="This task already holds"):
            async with lock:
                pass
    again = coordinator.mutex(name, reentrant=True)
    async with again as outer, again as inner:
        assert outer is inner
        assert len(database.queue(name)) == 1
        # Another task of the same loop is another caller: it must wait.
        assert await asyncio.create_task(coordinator.aio.mutex(name, reentrant=True).acquire(blocking=False)) is False


async def test_a_computed_name_needs_a_call(run, connect):
    lock = connect().aio.mutex(lambda table: table)
    with pytest.raises(sqlsem.ConfigurationError, match="computed"):
        await lock.acquire()
    with pytest.raises(sqlsem.ConfigurationError, match="computed"):
        async with lock:
            pass
