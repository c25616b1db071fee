"""Interpreters that end with locks held. (`test_exit_of_holders` has more ends, with all kinds of grants.)"""

import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter

import pytest
from support import until

import sqlsem
from sqlsem.util import runtime
from sqlsem.util.threads import Pool, spawn

#: A grace so long that no earlier grant can be due to its end.
GRACE = 120.0


def rows_are_gone(database, name):
    """The rows go at once, before any client checks for dead members."""
    until(lambda: database.queue(name) == [], "the rows are gone")


def raises(lock):
    lock.acquire()
    _ = 1 / 0


def exits(lock):
    lock.acquire()
    sys.exit(3)


def interrupted(lock):
    lock.acquire()
    raise KeyboardInterrupt


def closes_after_the_holder(lock, coordinator):
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    coordinator.close()


def daemon_waits(lock):
    lock.acquire()
    _daemon(lock.acquire)


def _daemon(target):
    threading.Thread(target=target, daemon=True).start()


def _daemon_in_a_block(lock, stay):
    entered = threading.Event()

    def hold():
        with lock:
            entered.set()
            stay()

    _daemon(hold)
    entered.wait()


def task_acquired(lock):
    async def main():
        await lock._aio.acquire()

    asyncio.run(main())


def task_holds(lock):
    async def main():
        entered = asyncio.Event()

        async def hold():
            async with lock:
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(hold())
        await entered.wait()
        return task

    asyncio.run(main())


def task_exits(lock):
    async def main():
        await lock._aio.acquire()
        sys.exit(3)

    asyncio.run(main())


def task_closes(lock, coordinator):
    async def main():
        await lock._aio.acquire()
        coordinator.close()

    asyncio.run(main())


def task_awaits_the_close(lock, coordinator):
    async def main():
        await lock._aio.acquire()
        await coordinator.aio.close()

    asyncio.run(main())


def early_released(lock):
    with lock as grant:
        grant.release()


ENDINGS = [
    raises,
    exits,
    interrupted,
    closes_after_the_holder,
    daemon_waits,
    task_acquired,
    task_holds,
    task_exits,
    task_closes,
    task_awaits_the_close,
    early_released,
]
#: (After an interrupt Python ends the process by SIGINT, as a shell expects that ran it.)
CODES = {raises: 1, exits: 3, interrupted: -signal.SIGINT, task_exits: 3}


def end_by(channel, url, options, name, how, kind, default):
    """Log warnings and errors to standard error, also during the exit."""
    logging.basicConfig(level=logging.WARNING, format="LOUD %(levelname)s %(message)s")
    if default:
        sqlsem.configure(url, **options, grace=GRACE)
    coordinator = sqlsem.default() if default else sqlsem.connect(url, **options, grace=GRACE)
    make = {
        "mutex": coordinator.mutex,
        "limit": lambda resource: coordinator.limit(resource, 2),
        "read": coordinator.read,
    }
    lock = make[kind](name)
    (ending,) = (way for way in ENDINGS if way.__name__ == how)
    arguments = {"lock": lock, "coordinator": coordinator}
    ending(*(arguments[parameter] for parameter in inspect.signature(ending).parameters))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("how", [way.__name__ for way in ENDINGS])
@pytest.mark.parametrize("kind", ["mutex", "limit", "read"])
def test_ordinary_end_is_quiet(spawn, connect, database, name, how, kind):
    """Nothing was lost: the history says released or cancelled, and no record is at WARNING or above."""
    (ending,) = (way for way in ENDINGS if way.__name__ == how)
    child = spawn(end_by, name=str(name), how=how, kind=kind, default=kind == "limit")
    assert child.process.wait(60) == CODES.get(ending, 0)
    rows_are_gone(database, name)
    assert "LOUD" not in child.errors()
    outcomes = {hold.outcome for hold in connect().admin.history(name)}
    assert "released" in outcomes
    assert outcomes <= {"released", "cancelled"}


def test_close_under_a_running_holder_is_loud(spawn, database, name):
    """The thread goes on without the lock, so it learns of the loss before the next grant."""
    child = spawn(close_under_a_holder, name=str(name))
    assert child.expect("told")["lost"] == [True, True]
    assert child.process.wait(60) == 0
    assert "LOUD ERROR Lost the lock on" in child.errors()


def close_under_a_holder(channel, url, options, name):
    logging.basicConfig(level=logging.WARNING, format="LOUD %(levelname)s %(message)s")
    other = sqlsem.connect(url, **options)
    answers = []

    def lost(grant):
        answers.append(grant.lost)
        answers.append(not other.mutex(name).acquire(blocking=False))

    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    _daemon_in_a_block(coordinator.mutex(name, on_lost=lost), lambda: threading.Event().wait())
    coordinator.close()
    channel.tell("told", lost=answers)


def end_while_holding(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    coordinator.mutex(f"{name}-a").acquire()
    coordinator.limit(f"{name}-b", 2).acquire()
    channel.tell("held")
    channel.ask()


def test_an_end_while_other_threads_wait(spawn, database, name, connect):
    """Waiting daemon threads do not delay the exit, leave no rows, and log no error."""
    lock = connect().mutex(str(name))
    lock.acquire()
    child = spawn(end_while_waiting, name=str(name))
    until(lambda: len(database.queue(name)) == 4, "three wait")
    child.send(do="end")
    assert child.process.wait(60) == 0
    until(lambda: len(database.queue(name)) == 1, "the waiters are gone")
    # (Python aborts a process whose daemon threads write to standard error at its very end.)
    assert child.errors() == ""
    lock.release()


def end_while_waiting(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    for _ in range(3):
        threading.Thread(target=coordinator.mutex(name).acquire, daemon=True).start()
    channel.ask()


def test_a_thread_that_is_not_a_daemon_finishes_its_work(spawn, database, name):
    """The interpreter waits for the thread, and its locks stay held until then."""
    child = spawn(end_before_a_thread, name=str(name))
    child.expect("main ends")
    child.expect("end")
    assert child.expect("left")["lost"] is False
    assert child.process.wait(60) == 0
    rows_are_gone(database, name)


def end_before_a_thread(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    ended = threading.Event()

    def work():
        with coordinator.mutex(name) as grant:
            entered.set()
            ended.wait()
            threading.main_thread().join()
            grant.check()
            lost = grant.lost
        channel.tell("left", lost=lost)

    entered = threading.Event()
    threading.Thread(target=work).start()
    entered.wait()
    channel.tell("main ends")
    ended.set()


def test_an_abrupt_end_is_recovered_from_like_a_kill(agents, spawn, database, name, waiting):
    child = spawn(end_abruptly, name=str(name))
    child.expect("held")
    (waiter,) = agents(1, grace=1)
    entry = waiter.ask("mutex", name)
    waiting(name, 2)
    child.send(do="end")
    assert child.process.wait(60) == 7
    entry.get()
    waiter.release()
    assert database.queue(name) == []


def end_abruptly(channel, url, options, name):
    sqlsem.connect(url, **options, grace=1).mutex(name).acquire()
    channel.tell("held")
    channel.ask()
    os._exit(7)


@pytest.mark.engines("postgresql")
def test_an_end_while_the_database_is_away(own_postgres_server, restarted, spawn, name):
    """No lock can be released; the process ends all the same, and soon."""
    child = spawn(end_while_holding, url=restarted.url, name=str(name))
    child.expect("held")
    own_postgres_server.stop("fast")
    child.send(do="end")
    assert child.process.wait(60) == 0


@pytest.mark.engines("postgresql")
def test_an_end_while_the_database_never_answers(proxy, proxied, spawn, name):
    child = spawn(end_while_holding, url=proxied.url, name=str(name))
    child.expect("held")
    proxy.hole()
    child.send(do="end")
    assert child.process.wait(60) == 0
    proxy.server_notices()


def test_dropped_coordinator_releases_its_locks_at_exit(spawn, database, name):
    child = spawn(drop_everything, name=str(name))
    child.expect("dropped")
    assert child.process.wait(60) == 0
    rows_are_gone(database, name)


def drop_everything(channel, url, options, name):
    import gc

    logging.basicConfig(level=logging.INFO)
    sqlsem.connect(url, **options, grace=GRACE).mutex(name).acquire()
    gc.collect()
    channel.tell("dropped")


def end_by_a_handler_as_it_closes(channel, url, options, name):
    """End, and get a signal while the first coordinator is closed: its handler raises an exception."""

    def handle(number, frame):
        raise SystemExit(5)

    signal.signal(signal.SIGTERM, handle)
    struck = []
    for number in range(2):
        coordinator = sqlsem.connect(url, **options, grace=GRACE)
        coordinator.mutex(f"{name}-{number}").acquire()
        close = coordinator.client.member.close

        def strike(*given, close=close):
            if not struck:
                struck.append(os.kill(os.getpid(), signal.SIGTERM))
            return close(*given)

        coordinator.client.member.close = strike
    channel.tell("holds")


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_signal_as_the_end_closes_leaves_no_row(spawn, database, name):
    """The program's own handler raises an exception there. All coordinators are closed nevertheless."""
    child = spawn(end_by_a_handler_as_it_closes, name=str(name))
    child.expect("holds")
    child.process.wait(60)
    assert [database.queue(f"{name}-{number}") for number in range(2)] == [[], []]


# -- threads that do not run yet --------------------------------------------------------------------------------------


def acquire(coordinator, name):
    """Acquire a lock. The first one of a coordinator starts its threads."""
    coordinator.mutex(name).acquire()


def call_later(coordinator, name):
    runtime.current().timer(60, time.monotonic).start()


def call_in_a_pool(coordinator, name):
    Pool("test", 1).submit(time.monotonic)


def call(coordinator, name):
    spawn(time.monotonic, "test")


STARTERS = {starter.__name__: starter for starter in (acquire, call_later, call_in_a_pool, call)}


def end_as_a_daemon_starts_a_thread(channel, url, options, name, starter):
    """End while a daemon thread starts another one, which runs only after a while, as on a busy machine."""
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    function = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start, starts, patched = getattr(threading, function), threading.Event(), threading.Event()

    def start_slowly(run, *arguments, **more):
        def run_late(*given):
            time.sleep(0.5)
            channel.tell("runs")
            run(*given)

        channel.tell("starts")
        starts.set()
        return start(run_late, *arguments, **more)

    def begin():
        patched.wait()
        STARTERS[starter](coordinator, name)

    _daemon(begin)
    setattr(threading, function, start_slowly)
    patched.set()
    starts.wait()


@pytest.mark.engines("sqlite")
@pytest.mark.parametrize("starter", STARTERS)
def test_end_waits_for_threads_that_daemons_start(spawn, name, starter):
    """Python does not wait for them. If it ends before such a thread runs, the thread crashes the process."""
    child = spawn(end_as_a_daemon_starts_a_thread, name=str(name), starter=starter)
    events = Counter(event["event"] for event in iter(child.next, None))
    assert events["starts"] >= 1
    assert events["runs"] == events["starts"]
    assert child.process.wait(60) == 0
    assert child.errors() == ""
