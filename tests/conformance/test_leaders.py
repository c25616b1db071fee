"""Leaders: a term is the visible grant of a mutex; its callbacks, its end, and the next term."""

import asyncio
import os
import signal
import socket
import threading

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.values.errors import ConfigurationError, Deadlock, LockLost, NotHeld, Timeout

pytestmark = [pytest.mark.locks, pytest.mark.faces("sync", "aio")]
INFO = "http://etl1:8080"
#: For tests that revoke a term.
revoking = pytest.mark.engines("sqlite", "postgresql", "mssql")


@pytest.fixture
def pair(connect):
    """Two coordinators, which the database takes for two processes."""
    return connect(), connect()


def test_leader_is_visible_to_all(pair, name):
    first, other = pair
    watcher = other.leader(name)
    assert watcher.current() is None
    with first.leader(name, INFO) as term:
        current = watcher.current()
        assert (current.name, current.info, current.fence) == (name, INFO, term.fence)
        assert (current.host, current.pid) == (socket.gethostname(), os.getpid())
        (entry,) = other.admin.entries(name)
        assert (entry.note, entry.state, entry.access, entry.limit) == (INFO, "holds", "write", 1)
        assert (entry.position, entry.granted_at, entry.program) == (term.fence, current.since, current.program)
        assert not term.lost
        assert not term.ending.is_set()
        term.check()
    assert watcher.current() is None
    assert term.ending.is_set()


def test_only_the_mutex_holder_leads(pair, name):
    first, other = pair
    watcher = other.leader(name)
    with first.limit(name, 3), first.limit(name, 3):
        assert watcher.current() is None
    with first.mutex(name, note="by hand"):
        assert watcher.current().info == "by hand"
        with pytest.raises(Timeout), other.leader(name, timeout=0):
            pytest.fail("two lead")


def test_callbacks_stand_around_the_term(pair, name):
    first, other = pair
    steps = []

    def started(term):
        steps.append(("started", term.fence, len(other.admin.entries(name))))

    def stopped(term):
        steps.append(("stopped", term.fence, len(other.admin.entries(name)), term.ending.is_set()))

    with first.leader(name, on_started=started, on_stopped=stopped) as term:
        steps.append("block")
    fence = term.fence
    assert steps == [("started", fence, 1), "block", ("stopped", fence, 1, True)]
    assert other.admin.entries(name) == []


def test_leaders_follow_each_other(pair, name, threads):
    steps = []

    def lead(coordinator, number):
        def say(step):
            return lambda term: steps.append((number, step))

        with coordinator.leader(name, on_started=say("started"), on_stopped=say("stopped")) as term:
            assert pair[0].leader(name).current().fence == term.fence

    for number in range(6):
        threads.start(lead, pair[number % 2], number)
    threads.join()
    assert [step for _, step in steps] == ["started", "stopped"] * 6
    assert all(begun == ended for (begun, _), (ended, _) in zip(steps[::2], steps[1::2], strict=True))


def test_step_down_elects_the_next_during_the_block(pair, name):
    first, other = pair
    stopped = []
    with first.leader(name, on_stopped=stopped.append) as term:
        term.step_down()
        assert term.ending.is_set()
        with other.leader(name, timeout=PATIENCE) as next_one:
            assert next_one.fence > term.fence
        with pytest.raises(NotHeld):
            term.check()
        term.step_down()
    assert len(stopped) == 1


def test_stepping_down_from_another_thread(pair, name, threads):
    first, other = pair
    with first.leader(name) as term:
        threads.start(term.step_down)
        assert term.ending.wait(PATIENCE)
        with other.leader(name, timeout=PATIENCE):
            pass
    threads.join()


def test_leaders_are_listed_with_their_candidates(pair, name, threads):
    first, other = pair
    assert other.admin.leaders(name) == []
    with first.leader(name, INFO) as term, first.mutex(f"{name}-plain"), first.limit(f"{name}-limit", 3):
        threads.start(lambda: other.leader(name).__enter__().step_down())
        until(lambda: other.admin.leaders(name)[0].waiting == 1)
        listed = [leader for leader in other.admin.leaders() if leader.name.startswith(name)]
        assert [(leader.name, leader.info, leader.waiting) for leader in listed] == [
            (name, INFO, 1),
            (f"{name}-plain", None, 0),
        ]
        assert (listed[0].fence, listed[0].pid) == (term.fence, os.getpid())


@revoking
@pytest.mark.timing(0.1)
def test_operator_makes_the_leader_step_down(pair, name):
    first, other = pair
    with pytest.raises(NotHeld, match="There is no leader"):
        other.admin.step_down(name)
    with pytest.raises(LockLost), first.leader(name) as term:
        assert not other.admin.step_down(name)
        assert term.ending.wait(PATIENCE)
        until(lambda: term.lost)
        with other.leader(name, timeout=PATIENCE) as next_one:
            assert next_one.fence > term.fence


@revoking
def test_a_term_that_is_lost_is_stopped_once_and_at_once(pair, name):
    first, other = pair
    stopped = threading.Event()
    times = []

    def stop(term):
        times.append(term.lost)
        stopped.set()

    with pytest.raises(LockLost), first.leader(name, on_stopped=stop) as term:
        other.admin.revoke(term.fence, force=True)
        with pytest.raises(LockLost):
            term.check()
        assert stopped.wait(PATIENCE)  # the stop comes inside the block
        assert term.ending.is_set()
        assert term.lost
        with other.leader(name, timeout=PATIENCE):
            pass
    assert times == [True]


@revoking
def test_exit_waits_for_work_stopped_by_a_loss(pair, name):
    first, other = pair
    began, may_end, order = threading.Event(), threading.Event(), []

    def stop(term):
        began.set()
        order.append("stopping")

    async def stop_awaiting(term):
        began.set()
        await asyncio.to_thread(may_end.wait, PATIENCE)
        order.append("stopped")

    def stop_blocking(term):
        began.set()
        may_end.wait(PATIENCE)
        order.append("stopped")

    awaiting = hasattr(first.leader(name), "inner")
    with pytest.raises(LockLost):
        with first.leader(name, on_stopped=stop_awaiting if awaiting else stop_blocking) as term:
            other.admin.revoke(term.fence, force=True)
            with pytest.raises(LockLost):
                term.check()
            assert began.wait(PATIENCE)
            threading.Timer(0.2, may_end.set).start()
        order.append("left")
    assert order == ["stopped"]


@revoking
def test_run_takes_part_again_after_a_loss(pair, name):
    first, other = pair
    fences, stopped = [], []

    def work(term):
        fences.append(term.fence)
        if len(fences) == 1:
            other.admin.revoke(term.fence, force=True)
            term.check()
        if len(fences) == 2:
            other.admin.revoke(term.fence, force=True)
            with pytest.raises(LockLost):
                term.check()
            assert term.ending.wait(PATIENCE)
            return "too late"  # the result of a lost term is ignored
        return "done"

    assert first.leader(name, on_stopped=lambda term: stopped.append(term.fence)).run(work) == "done"
    assert len(fences) == 3
    assert fences == sorted(set(fences))
    assert stopped == fences


@pytest.mark.timing(0.1)
@revoking
def test_run_takes_part_again_when_its_place_is_lost(pair, name, threads):
    first, other = pair
    fences = []
    with other.leader(name):
        threads.start(lambda: fences.append(first.leader(name).run(lambda term: term.fence)))
        until(lambda: len(other.admin.entries(name)) == 2, "it waits")
        (_, waiting) = other.admin.entries(name)
        other.admin.revoke(waiting.position, force=True)
        until(
            lambda: {entry.position for entry in other.admin.entries(name)[1:]} - {waiting.position}, "it waits again"
        )
    threads.join()
    assert fences[0] > waiting.position


def test_error_of_the_function_propagates(connect, name):
    coordinator = connect()
    stopped = []
    leader = coordinator.leader(name, on_stopped=stopped.append)

    def fail(error):
        def work(term):
            raise error

        return work

    for error in (ZeroDivisionError("1/0"), LockLost("of another lock"), NotHeld("of another one")):
        with pytest.raises(type(error), match=str(error)):
            leader.run(fail(error))
    assert len(stopped) == 3
    assert leader.current() is None


def test_run_ends_when_it_steps_down(connect, name):
    def work(term):
        term.step_down()
        return "gone"

    assert connect().leader(name).run(work) == "gone"


def test_callbacks_that_fail(pair, name):
    first, other = pair
    stopped = []

    def fail(term):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with first.leader(name, on_started=fail, on_stopped=stopped.append):
            pytest.fail("it never started")
    assert len(stopped) == 1
    with pytest.raises(ZeroDivisionError), first.leader(name, on_stopped=fail):
        pass
    with other.leader(name, timeout=0):
        pass


def test_thread_leads_a_name_once(connect, name):
    coordinator = connect()
    with coordinator.leader(name), pytest.raises(Deadlock), coordinator.leader(name):
        pytest.fail("twice")


def test_leader_times_out_while_waiting(pair, name):
    first, other = pair
    stopped = []
    with first.leader(name):
        with pytest.raises(Timeout, match="sqlsem ls"):
            with other.leader(name, timeout="10ms", on_started=stopped.append, on_stopped=stopped.append):
                pytest.fail("two lead")
    assert stopped == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": ""}, "leader's name"),
        ({"name": lambda: "a"}, "leader's name"),
        ({"name": "a", "info": "x" * 1001}, "1001 characters"),
        ({"name": "a", "info": 7}, "must be a string"),
        ({"name": "a", "timeout": "soon"}, "timeout"),
    ],
)
def test_invalid_options_are_refused_at_construction(connect, options, words):
    with pytest.raises(ConfigurationError, match=words):
        connect().leader(**options)


@revoking
def test_writes_of_a_leader_are_fenced(database, pair, name):
    first, other = pair
    connection = database.raw(autocommit=False)
    cursor = connection.cursor()

    def begin():
        if database.engine == "sqlite":
            cursor.execute("BEGIN IMMEDIATE")

    with pytest.raises(LockLost), first.leader(name) as term:
        begin()
        term.assert_held(cursor)
        connection.rollback()
        other.admin.revoke(term.fence, force=True)
        begin()
        with pytest.raises(LockLost):
            term.assert_held(cursor)
        connection.rollback()
    connection.close()


def test_another_thread_leaves_sigterm_alone(connect, name, threads):
    handlers = []

    def lead():
        with connect().leader(name):
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    threads.start(lead)
    threads.join()
    assert handlers == [before]


# -- one API only ------------------------------------------------------------------------------------------------------


def test_the_default_database(name, monkeypatch, tmp_path):
    monkeypatch.setenv("SQLSEM_URL", f"sqlite:///{tmp_path / 'locks.db'}")

    async def lead():
        async with sqlsem.aio.leader(name, INFO) as term:
            assert (await sqlsem.aio.leader(name).current()).fence == term.fence

    try:
        with sqlsem.leader(name, INFO) as term:
            assert sqlsem.leader(name).current().fence == term.fence
        asyncio.run(lead())
    finally:
        sqlsem.default().close()


def coordinator_of(referrer):
    return referrer if isinstance(referrer, sqlsem.Coordinator) else referrer._coordinator


@pytest.mark.timing(0.1)
@revoking
def test_a_task_is_cancelled_when_its_term_is_lost(connect, name):
    coordinator = coordinator_of(connect())
    steps = []

    async def stopped(term):
        await asyncio.sleep(0)
        steps.append("stopped")

    async def work(term):
        if steps:
            return "done"
        await asyncio.to_thread(coordinator.admin.revoke, term.fence, force=True)
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            steps.append("cancelled")
            raise

    async def lead():
        return await asyncio.wait_for(coordinator.aio.leader(name, on_stopped=stopped).run(work), PATIENCE)

    assert asyncio.run(lead()) == "done"
    assert sorted(steps[:2]) == ["cancelled", "stopped"]


def test_a_cancellation_waits_until_it_is_stopped(connect, name):
    coordinator = coordinator_of(connect())
    row_counts = []

    async def stopped(term):
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            row_counts.append(len(await asyncio.to_thread(coordinator.admin.entries, name)))

    async def lead():
        async with coordinator.aio.leader(name, on_stopped=stopped):
            started.set()

    async def main():
        task = asyncio.create_task(lead())
        await started.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    started = asyncio.Event()
    asyncio.run(main())
    assert row_counts == [1]  # the callback ran before the row was released
