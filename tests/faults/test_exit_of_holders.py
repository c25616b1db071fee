"""Ordinary ends of an interpreter log no error, whatever the program holds or runs at that time.

(For locks `test_exit` has more ends.)
"""

import asyncio
import atexit
import contextlib
import inspect
import logging
import os
import signal
import sys
import threading

import pytest
from support import until

import sqlsem
from sqlsem.tasks import Call, Json, Worker

#: A grace so long that nothing can be given back because it is over.
GRACE = 120.0

# -- what a program holds ---------------------------------------------------------------------------------------------


def mutex(coordinator, name):
    return coordinator.mutex(name)


def limit(coordinator, name):
    return coordinator.limit(name, 2)


def group(coordinator, name):
    return coordinator.all_of(coordinator.mutex(name), coordinator.read(f"{name}-2"))


def rate(coordinator, name):
    return coordinator.rate(name, 5, "1s")


def once(coordinator, name):
    return coordinator.once(name, "1h")


def leader(coordinator, name):
    return coordinator.leader(name)


def task(coordinator, name):
    queue = coordinator.queue(name)
    queue.put(Json("work"))
    return queue.try_claim()


def task_with_locks(coordinator, name):
    queue = coordinator.queue(name)
    queue.put(Json("work"), locks=[coordinator.mutex(name)])
    return queue.try_claim()


def part(coordinator, name):
    return coordinator.batch(name, ["a", "b"], window="1h").part("a")


HOLDERS = {make.__name__: make for make in (mutex, limit, group, rate, once, leader, task, task_with_locks, part)}

# -- ways in which it ends --------------------------------------------------------------------------------------------

kept = []  # referred to until the end


def enters_and_returns(make):
    held = make()
    held.__enter__()
    kept.append(held)


def makes_and_returns(make):
    kept.append(make())


def exits_in_a_block(make):
    with make():
        sys.exit(3)


def raises_in_a_block(make):
    with make():
        raise RuntimeError("of the program")


def is_interrupted_in_a_block(make):
    with make():
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()


def is_terminated_in_a_block(make):
    """End by a handler of SIGTERM as programs have it."""

    def handle(number, frame):
        sys.exit(3)

    signal.signal(signal.SIGTERM, handle)
    with make():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()


def leaves_a_generator_in_a_block(make):
    def hold():
        with make():
            yield

    kept.append(hold())
    next(kept[-1])


def leaves_a_daemon_in_a_block(make):
    _daemon(make, threading.Event().wait)


def leaves_what_a_daemon_entered(make):
    thread = threading.Thread(target=enters_and_returns, args=(make,), daemon=True)
    thread.start()
    thread.join()


def leaves_a_thread_in_a_block(make):
    """The interpreter waits for it."""
    _daemon(make, threading.main_thread().join, daemon=False)


def leaves_a_block_in_a_callback_of_the_end(make):
    held = make()
    held.__enter__()
    atexit.register(held.__exit__, None, None, None)


def closes(make, coordinator):
    enters_and_returns(make)
    coordinator.close()


def exits_in_the_coordinators_block(make, coordinator):
    with coordinator, make():
        sys.exit(3)


def leaves_the_coordinators_block(make, coordinator):
    with coordinator:
        enters_and_returns(make)


def ends_an_event_loop_after_a_daemon_entered(make):
    async def main():
        await asyncio.to_thread(leaves_a_daemon_in_a_block, make)

    asyncio.run(main())


def _daemon(make, stay, daemon=True):
    entered = threading.Event()

    def hold():
        with make():
            entered.set()
            stay()

    threading.Thread(target=hold, daemon=daemon).start()
    entered.wait()


WAYS = {
    way.__name__: way
    for way in (
        enters_and_returns,
        makes_and_returns,
        exits_in_a_block,
        raises_in_a_block,
        is_interrupted_in_a_block,
        is_terminated_in_a_block,
        leaves_a_generator_in_a_block,
        leaves_a_daemon_in_a_block,
        leaves_what_a_daemon_entered,
        leaves_a_thread_in_a_block,
        leaves_a_block_in_a_callback_of_the_end,
        closes,
        exits_in_the_coordinators_block,
        leaves_the_coordinators_block,
        ends_an_event_loop_after_a_daemon_entered,
    )
}
INTERRUPTED = -signal.SIGINT if sys.platform != "win32" else None
#: The exit status, and the line that ends the program's own traceback.
STATUS = {
    exits_in_a_block: (3, None),
    raises_in_a_block: (1, "RuntimeError: of the program"),
    is_interrupted_in_a_block: (INTERRUPTED, "KeyboardInterrupt"),
    is_terminated_in_a_block: (3, None),
    exits_in_the_coordinators_block: (3, None),
}


def end_by(channel, url, options, name, kind, way):
    logging.basicConfig(level=logging.WARNING, format="LOUD %(levelname)s %(message)s")
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    arguments = {"make": lambda: HOLDERS[kind](coordinator, name), "coordinator": coordinator}
    ending = WAYS[way]
    ending(*(arguments[parameter] for parameter in inspect.signature(ending).parameters))


def loud(child):
    """Return what a child wrote to standard error, but for the failure of a part whose block an error ended."""
    failed = "LOUD ERROR Batch "
    return [
        line for line in child.errors().splitlines() if not (line.startswith(failed) and "has a failed part" in line)
    ]


@pytest.mark.sampled(12)
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", HOLDERS)
def test_end_with_a_holder_logs_nothing(spawn, connect, database, name, kind, way):
    child = spawn(end_by, name=str(name), kind=kind, way=way)
    status, traceback = STATUS.get(WAYS[way], (0, None))
    assert child.process.wait(60) == status
    lines = loud(child)
    if traceback is None:
        assert lines == []
    else:  # of the program, and nothing besides
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1] == traceback
        assert [line for line in lines if line.startswith(("LOUD", "Traceback"))] == lines[:1]
    until(lambda: database.queue(name) == [], "the rows are gone")
    admin = connect().admin
    outcomes = {hold.outcome for hold in admin.history(name)}
    assert outcomes <= {"released"}, "nothing was lost"
    assert outcomes or kind not in ("mutex", "limit", "group") or way == makes_and_returns.__name__
    counts = [counts for counts in admin.queues() if counts.queue == name]
    assert [each.running for each in counts] in ([], [0])


# -- workers ----------------------------------------------------------------------------------------------------------


def run_forever():
    threading.Event().wait()


def _begin(worker):
    """Run the worker in a daemon thread, and wait until it runs a task."""
    threading.Thread(target=worker.run, daemon=True).start()
    while not worker.running:
        threading.Event().wait(0.01)


def returns_beside_a_worker(worker):
    _begin(worker)


def exits_beside_a_worker(worker):
    _begin(worker)
    sys.exit(3)


def stops_a_worker(worker):
    _begin(worker)
    worker.stop()


def aborts_a_worker(worker):
    _begin(worker)
    worker.abort()


def _kill_soon(worker, number):
    def kill():
        while not worker.running:
            threading.Event().wait(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=kill, daemon=True).start()


def interrupts_a_worker(worker):
    _kill_soon(worker, signal.SIGINT)
    with contextlib.suppress(KeyboardInterrupt):
        worker.run()


def terminates_a_worker(worker):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
    _kill_soon(worker, signal.SIGTERM)
    worker.run()


def ends_an_event_loop_beside_a_worker(worker):
    async def main():
        await asyncio.to_thread(_begin, worker)

    asyncio.run(main())


WORKERS = {
    way.__name__: way
    for way in (
        returns_beside_a_worker,
        exits_beside_a_worker,
        stops_a_worker,
        aborts_a_worker,
        interrupts_a_worker,
        terminates_a_worker,
        ends_an_event_loop_beside_a_worker,
    )
}


def end_beside_a_worker(channel, url, options, name, way, locks):
    logging.basicConfig(level=logging.ERROR, format="LOUD %(levelname)s %(message)s")
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    queue = coordinator.queue(name)
    for _ in range(3):
        queue.put(Call(f"{__name__}:run_forever"), locks=[coordinator.read(name)] if locks else [])
    WORKERS[way](Worker(queue, threads=2))


@pytest.mark.leaves_rows  # pending tasks wait in the queues of their locks
@pytest.mark.sampled(4)
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("locks", [False, True], ids=["plain", "locks"])
@pytest.mark.parametrize("way", WORKERS)
def test_end_with_a_running_worker_logs_no_error(spawn, connect, database, name, way, locks):
    """Its tasks are pending again."""
    child = spawn(end_beside_a_worker, name=str(name), way=way, locks=locks)
    assert child.process.wait(60) == (3 if WORKERS[way] in (exits_beside_a_worker, terminates_a_worker) else 0)
    assert child.errors() == ""
    if not locks:
        assert database.queue(name) == []
    (counts,) = (counts for counts in connect().admin.queues() if counts.queue == name)
    assert (counts.pending, counts.running, counts.lost) == (3, 0, 0)


def close_beside_a_worker(channel, url, options, name):
    logging.basicConfig(level=logging.WARNING, format="LOUD %(levelname)s %(message)s")
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    queue = coordinator.queue(name)
    queue.put(Call(f"{__name__}:run_forever"))
    worker = Worker(queue)
    _begin(worker)
    coordinator.close()
    (task_run,) = worker.running
    channel.tell("closed", lost=task_run.lost)


def test_close_under_a_running_task_is_loud(spawn, name):
    """The function runs on while the task is pending again: other than the end, a close must say so."""
    child = spawn(close_beside_a_worker, name=str(name))
    assert child.expect("closed")["lost"]
    assert child.process.wait(60) == 0
    assert "LOUD ERROR Lost <Task" in child.errors()
