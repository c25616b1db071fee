"""Forks: a child has none of its parent's locks, and harms none of them."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
from support import PATIENCE, remains, until

import sqlsem

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
#: A grace so long that its end explains nothing in these tests.
GRACE = 60.0
#: The grace of a parent that dies, and of its child: long enough for a machine that stands still.
CHILDS = 5.0


def what_a_child_finds(coordinator, lock, grant, name):
    """Return the results of the forked child's calls, ready for JSON."""
    outcomes = {}
    for action, call in (("check", grant.check), ("give back", grant.release), ("release", lock.release)):
        try:
            call()
            outcomes[action] = "no error"
        except sqlsem.SqlsemError as exc:
            outcomes[action] = type(exc).__name__
    outcomes["try"] = coordinator.mutex(name).acquire(blocking=False)
    with coordinator.mutex(f"{name}-own") as own:
        outcomes["lost"] = own.lost
        outcomes["pid"] = (
            next(entry.pid for entry in coordinator.admin.entries() if entry.position == own.position) == os.getpid()
        )
    return outcomes


def forks(channel, url, options, name, how):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    lock = coordinator.mutex(name)
    lock.acquire()
    grant = lock.grant
    if how == "multiprocessing":
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=lambda: answers.put(what_a_child_finds(coordinator, lock, grant, name)))
        child.start()
        outcomes = answers.get(timeout=60)
        child.join(60)
        code = child.exitcode
    else:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                os.write(write, json.dumps(what_a_child_finds(coordinator, lock, grant, name)).encode())
                code = 0
            finally:
                if how == "sys.exit":
                    sys.exit(code)
                os._exit(code)
        os.close(write)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        outcomes = json.loads(os.read(read, 65536) or b"{}")
    try:
        grant.check()
        still = not grant.lost
    except sqlsem.SqlsemError as exc:
        still = str(exc)
    channel.tell("forked", found=outcomes, code=code, still=still, position=grant.position)
    channel.ask()
    lock.release()
    channel.tell("released")
    channel.ask()


@pytest.mark.parametrize("how", ["os._exit", "sys.exit", "multiprocessing"])
def test_a_child_has_no_part_in_its_parents_locks(spawn, agents, database, name, waiting, how):
    parent = spawn(forks, name=str(name), how=how)
    report = parent.expect("forked")
    assert report["found"] == {
        "check": "NotHeld", "give back": "NotHeld", "release": "NotHeld", "try": False, "lost": False, "pid": True,
    }  # fmt: skip
    assert report["code"] == 0
    assert report["still"] is True
    assert [row[0] for row in database.queue(name)] == [report["position"]]
    (waiter,) = agents(1, grace=0)
    entry = waiter.ask("mutex", name)
    waiting(name, 2)
    remains(lambda: not entry.ready, 1, "the parent holds its lock after the child's exit")
    parent.call("released", do="release")
    entry.get()
    waiter.release()


def fork_and_wait(channel, url, options, name, use):
    """Hold a lock, and fork a child that outlives it; with ``use``, the child holds a lock of its own."""
    coordinator = sqlsem.connect(url, **options, grace=CHILDS)
    coordinator.mutex(name).acquire()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        if use:
            coordinator.mutex(f"{name}-own").acquire()
        os.write(write, b"x")
        os.close(0)
        while True:
            time.sleep(1)
    os.read(read, 1)
    channel.tell("forked", child=pid)
    channel.ask()


@pytest.mark.parametrize("use", [False, True], ids=["idle", "holding"])
def test_a_living_child_does_not_keep_its_dead_parents_locks(spawn, agents, database, name, waiting, use):
    parent = spawn(fork_and_wait, name=str(name), use=use)
    child = parent.expect("forked")["child"]
    try:
        (waiter,) = agents(1, grace=1)
        entry = waiter.ask("mutex", name)
        waiting(name, 3 if use else 2)
        killed = parent.kill()
        assert entry.get(30)["got"] < killed + 30
        os.kill(child, 0)
        waiter.release()
        if use:
            own = waiter.ask("mutex", name("own"))
            remains(lambda: not own.ready, 1.5 * CHILDS, "the child's own lock is held")
            os.kill(child, signal.SIGKILL)
            own.get()
            waiter.release()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    until(lambda: database.queue(name) == [], "no row is left")


def fork_among_threads(channel, url, options, name):
    """Fork at any moment of the calls of other threads."""
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    ending = threading.Event()

    def work(number):
        while not ending.is_set():
            with coordinator.limit(f"{name}-{number % 2}", 1):
                pass

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    codes = []
    for number in range(12):
        time.sleep(0.003 * number)
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                faulthandler.dump_traceback_later(PATIENCE, exit=True)  # a child that hangs
                with coordinator.mutex(f"{name}-child"):
                    code = 0
                coordinator.close()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:
            break
    ending.set()
    for thread in threads:
        thread.join(60)
    channel.tell("forked", codes=codes, alive=sum(thread.is_alive() for thread in threads))


def test_forks_among_busy_threads(spawn, database, name):
    child = spawn(fork_among_threads, name=str(name))
    report = child.expect("forked", 4 * PATIENCE)
    assert report["codes"] == [0] * 12, child.errors()
    assert report["alive"] == 0
    child.rest()
    assert database.queue(name) == [], child.errors()


def fork_before_use(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with coordinator.limit(name, 2):
            os.write(write, b"x")
            channel.ask()
        sys.exit(0)
    os.read(read, 1)
    with coordinator.limit(name, 2):
        channel.tell("inside", members=len({entry.member_id for entry in coordinator.admin.entries(name)}))
        os.waitpid(pid, 0)


def test_a_coordinator_made_before_the_fork_serves_both(spawn, database, name):
    parent = spawn(fork_before_use, name=str(name))
    assert parent.expect("inside")["members"] == 2
    parent.send(do="end")
    parent.rest()
    assert database.queue(name) == []
