"""Thousands of tasks, outages, forks: conditions of a whole process."""

import asyncio
import gc
import json
import os
import threading
import time

import pytest
from support import AMPLE, slack, until

import sqlsem
from sqlsem.values.errors import Unavailable

THOUSAND = 1000
#: Seconds for which the library may block the loop.
LAG = 0.020


def rounds_of(loop):
    """Note how long each callback batch takes: the processor time between two polls of the loop's sockets."""
    selector = loop._selector
    select = selector.select
    rounds = []
    last = None

    def timed(timeout=None):
        nonlocal last
        if last is not None:
            rounds.append(time.thread_time() - last)
        ready = select(timeout)
        last = time.thread_time()
        return ready

    selector.select = timed
    return rounds


async def eventually(condition):
    deadline = time.monotonic() + 480
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def crowd(channel, url, options, name, same):
    """A thousand tasks wait; in a process of its own, to count its threads."""
    coordinator = sqlsem.connect(url, **options, **AMPLE)
    names = [name if same else f"{name}-{number}" for number in range(THOUSAND)]
    sessions = set()
    connect = coordinator.engine.connect

    def counted(purpose):
        session = connect(purpose)
        close = session.close

        def closed():
            sessions.discard(session)
            close()

        session.close = closed
        sessions.add(session)
        return session

    coordinator.engine.connect = counted

    async def work(lock):
        async with lock:
            pass

    async def main():
        loop = asyncio.get_running_loop()
        rounds = rounds_of(loop)
        gc.disable()  # the collector's time would count for any task, not only for the one that made the garbage
        worst = {}

        def took(phase):
            worst[phase] = max(rounds, default=0.0)
            rounds.clear()

        locks = [coordinator.mutex(lock_name) for lock_name in names]
        holders = [coordinator.aio.mutex(fromkey) for fromkey in dict.fromkeys(names)]
        for holder in holders:
            await holder.acquire()
        rounds.clear()
        # A few start at a time, as the tasks of a server do; a later part measures a thousand at once.
        tasks = []
        for lock in locks:
            tasks.append(asyncio.create_task(work(lock)))
            if len(tasks) % 20 == 0:
                await asyncio.sleep(0)
        await eventually(lambda: len(coordinator.client.waiter_queues.waiters()) == THOUSAND)
        took("ask")
        channel.tell("waiting", threads=[thread.name for thread in threading.enumerate()], sessions=len(sessions))
        await asyncio.to_thread(channel.ask)
        rounds.clear()
        await asyncio.sleep(5)  # longer than a wait in the database
        took("wait")
        for number, task in enumerate(tasks[::2]):
            task.cancel()
            if number % 20 == 0:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks[::2], return_exceptions=True)
        took("cancel")
        for holder in holders:
            await holder.release()
        await asyncio.gather(*tasks[1::2])
        took("hand on")

        # A thousand tasks start in the same round of the loop, compared with as many that only wait for a future.
        gate = loop.create_future()

        async def idle():
            await asyncio.shield(gate)

        plain = [asyncio.create_task(idle()) for _ in range(THOUSAND)]
        rounds.clear()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        control = max(rounds)
        gate.set_result(None)
        await asyncio.gather(*plain)
        async with coordinator.mutex(name):
            tasks = [asyncio.create_task(work(lock)) for lock in locks]
            rounds.clear()
            if same:
                await eventually(lambda: len(coordinator.client.waiter_queues.waiters()) == THOUSAND)
        await asyncio.gather(*tasks)
        took("at once")
        worst["at once"] -= control
        channel.tell("done", worst=worst)
        await asyncio.to_thread(channel.ask)

    asyncio.run(main())
    coordinator.close()


@pytest.mark.engines("sqlite", "postgresql")
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("same", [True, False], ids=["one resource", "a thousand"])
def test_a_thousand_tasks_wait(spawn, database, name, same, engine_name, request):
    if engine_name == "postgresql":  # a database of its own, to count the connections
        make, server = request.getfixturevalue("make_database"), request.getfixturevalue("postgres_server")
        database = make(server)
        until(lambda: database.connections() == 0)
    best = {}
    for _ in range(4):
        child = spawn(crowd, url=database.url, options=database.options, name=name, same=same)
        report = child.expect("waiting", 200)
        assert len(report["threads"]) <= 9, report[
            "threads"
        ]  # the library's threads: two for its upkeep, one for calls, three for waits
        if engine_name == "postgresql":
            until(lambda: database.connections() <= 4, "what was dropped is gone")
        else:
            assert report["sessions"] <= 4
        child.send(do="go on")
        worst = child.expect("done", 200)["worst"]
        if engine_name == "postgresql":
            until(lambda: database.connections() <= 4, "what was dropped is gone")
        child.send(do="end")
        child.rest()
        # Other programs can only make it worse.
        best = {phase: min(best.get(phase, lag), lag) for phase, lag in worst.items()}
        if max(best.values()) < LAG:
            break
    assert max(best.values()) < LAG, best
    assert database.queue(name) == []


# -- outages


@pytest.mark.engines("postgresql")
def test_a_restart_while_tasks_wait(own_postgres_server, restarted, name):
    coordinator = restarted.coordinator(grace=30, retry=30)
    order = []

    async def work(number):
        async with coordinator.mutex(name):
            order.append(number)

    async def main():
        async with coordinator.mutex(name):
            tasks = []
            for number in range(5):
                tasks.append(asyncio.create_task(work(number)))
                await eventually(lambda number=number: len(restarted.queue(name)) == number + 2)
            await asyncio.to_thread(own_postgres_server.restart)
            assert not any(task.done() for task in tasks)
        await asyncio.gather(*tasks)

    with coordinator:
        asyncio.run(main())
    assert order == list(range(5))
    assert restarted.queue(name) == []


@pytest.mark.engines("postgresql")
def test_an_outage_ends_waits_and_tells_holders(own_postgres_server, restarted, name):
    coordinator, holder = restarted.coordinator(grace=2, retry=2), restarted.coordinator(grace=60)

    async def main():
        async def hold():
            async with coordinator.mutex(name("held"), cancel_on_lost=True):
                await asyncio.sleep(100)

        holding = asyncio.create_task(hold())
        async with holder.mutex(name):
            waiting = [asyncio.create_task(coordinator.aio.mutex(name).acquire()) for _ in range(10)]
            await eventually(lambda: len(restarted.queue(name)) == 12)
            began = time.monotonic()
            await asyncio.to_thread(own_postgres_server.stop, "immediate")
            outcomes = await asyncio.gather(holding, *waiting, return_exceptions=True)
            assert time.monotonic() - began < slack(25)
            assert isinstance(outcomes[0], sqlsem.LockLost)
            for outcome in outcomes[1:]:
                assert isinstance(outcome, (Unavailable, sqlsem.LockLost)), outcome
            await asyncio.to_thread(own_postgres_server.start)
        async with coordinator.mutex(name, timeout=60):
            pass

    with coordinator, holder:
        asyncio.run(main())
    until(lambda: restarted.queue(name) == [])


@pytest.mark.engines("postgresql")
@pytest.mark.parametrize("connected", [True, False])
def test_a_thousand_tasks_fail_together_in_an_outage(own_postgres_server, restarted, name, connected):
    retry = 2
    coordinator = restarted.coordinator(retry=retry, grace=30)

    async def main():
        if connected:
            async with coordinator.mutex(name):
                pass
        await asyncio.to_thread(own_postgres_server.stop, "immediate")
        began = time.monotonic()
        outcomes = await asyncio.gather(
            *(coordinator.aio.mutex(name(number)).acquire() for number in range(THOUSAND)), return_exceptions=True
        )
        assert time.monotonic() - began < retry + slack(15)
        assert {type(outcome) for outcome in outcomes} == {Unavailable}

    with coordinator:
        asyncio.run(main())


@pytest.mark.engines("postgresql")
def test_the_server_comes_back_before_the_patience_ends(own_postgres_server, restarted, name):
    """Each attempt requests again, and does not rely on the refusal of another attempt."""
    own_postgres_server.stop("immediate")
    coordinator = restarted.coordinator(retry=60)

    async def main():
        tasks = [asyncio.create_task(coordinator.aio.mutex(name(number)).acquire()) for number in range(20)]
        await asyncio.sleep(1)
        await asyncio.to_thread(own_postgres_server.start)
        began = time.monotonic()
        assert all(await asyncio.gather(*tasks))
        assert time.monotonic() - began < slack(20)

    with coordinator:
        asyncio.run(main())


# -- forks


def forks_in_a_loop(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=60)

    async def main():
        lock = coordinator.aio.mutex(name)
        await lock.acquire()
        waiting = [asyncio.create_task(coordinator.aio.mutex(name).acquire()) for _ in range(3)]
        await eventually(lambda: len(coordinator.admin.entries(name)) == 4)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                asyncio._set_running_loop(None)

                async def child():
                    tried = await coordinator.aio.mutex(name).acquire(blocking=False)
                    async with coordinator.mutex(f"{name}-own") as grant:
                        return tried, grant.lost, len(await asyncio.to_thread(coordinator.admin.entries, name))

                os.write(write, json.dumps(asyncio.run(child())).encode())
                coordinator.close()
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        channel.tell("child", code=os.waitstatus_to_exitcode(status), found=json.loads(os.read(read, 65536) or b"[]"))
        # The parent's locks are unchanged.
        await lock.grant.check()
        await lock.release()
        assert await waiting[0]
        for task in waiting[1:]:
            task.cancel()
        await asyncio.gather(*waiting[1:], return_exceptions=True)

    asyncio.run(main())
    coordinator.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_while_a_loop_runs(spawn, database, name):
    child = spawn(forks_in_a_loop, url=database.url, options=database.options, name=name)
    report = child.expect("child", 120)
    assert report["code"] == 0, child.errors()
    assert report["found"] == [False, False, 4]
    child.rest()
    assert database.queue(name) == []


# -- killed


def holds_and_waits(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=0.5)

    async def main():
        async with coordinator.mutex(name):
            waiting = [asyncio.create_task(coordinator.aio.mutex(name).acquire()) for _ in range(3)]
            await eventually(lambda: len(coordinator.admin.entries(name)) == 4)
            channel.tell("waiting")
            await asyncio.gather(*waiting)

    asyncio.run(main())


def interrupted(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=60)

    async def main():
        async with coordinator.mutex(name):
            channel.tell("inside")
            await asyncio.sleep(100)

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        channel.tell("interrupted", rows=len(coordinator.admin.entries(name)))


def test_a_killed_process_of_tasks(spawn, database, name):
    child = spawn(holds_and_waits, url=database.url, options=database.options, name=name)
    child.expect("waiting")
    child.kill()
    with database.coordinator() as coordinator, coordinator.mutex(name, timeout=60):
        pass
    until(lambda: database.queue(name) == [])


def test_ctrl_c_gives_back(spawn, database, name):
    import signal

    child = spawn(interrupted, url=database.url, options=database.options, name=name)
    child.expect("inside")
    os.kill(child.pid, signal.SIGINT)
    assert child.expect("interrupted")["rows"] == 0
    child.rest()
