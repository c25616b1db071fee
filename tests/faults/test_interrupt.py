"""Interrupts at any moment leave no row behind in a process that lives on."""

import contextlib
import random
import signal
import sys
import threading
import time
import traceback

import pytest
from support import until
from support.striking import PACKAGE, after_calls, interrupted, leaves_with

import sqlsem
from sqlsem.client.connection.wait_pool import MAX_BLOCKED_CONNECTIONS
from sqlsem.tasks import Json

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


class Stop(Exception):
    """An exception of a program's own signal handler."""


def enters_exit(frame):
    # A signal at the entry of __exit__ itself strikes before any handler. No code in Python can close that gap (and
    # `with` over contextlib has it, too).
    code = frame.f_code
    return code.co_name == "__exit__" and frame.f_lasti < 12 and code.co_filename.endswith("locks.py")


def work_until_interrupted(channel, url, options, name, kind):
    """Acquire and release, with a KeyboardInterrupt or a Stop now and then."""
    error, number = (KeyboardInterrupt, signal.SIGINT) if kind == "KeyboardInterrupt" else (Stop, signal.SIGUSR1)

    def handler(_, frame):
        if enters_exit(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.001)  # strikes a moment later
            return
        raise error

    signal.signal(number, handler)
    signal.signal(signal.SIGALRM, handler)
    coordinator = sqlsem.connect(url, **options, grace=1, retry=20)
    coordinator.mutex(f"{name}-first").acquire()
    entered = 0
    while True:
        try:
            channel.tell("go", entered=entered)  # from here on it may strike
            while True:
                with coordinator.mutex(name) as grant:
                    entered += 1
                    time.sleep(random.uniform(0, 0.002))
                    assert not grant.lost
        except error:
            channel.tell("interrupted")
        except BaseException as exc:
            # An interrupt inside of threading: Condition.wait then releases a lock that it does not hold, and
            # Thread.start removes itself twice from a list. These are faults of Python.
            file = traceback.extract_tb(exc.__traceback__)[-1].filename
            if isinstance(exc.__context__, error) and file == threading.__file__:
                channel.tell("interrupted")
                continue
            signal.signal(number, signal.SIG_IGN)
            channel.tell("failed", error=f"{type(exc).__name__}: {exc}")
            raise
        # Other calls than the interrupted one work at once.
        signal.signal(number, signal.SIG_IGN)
        try:
            with coordinator.limit(f"{name}-other", 5):
                pass
        except BaseException as exc:
            channel.tell("failed", error=f"afterwards: {type(exc).__name__}: {exc}")
            raise
        signal.signal(number, handler)


def interrupt(child, kind):
    """Send the signal until it struck: Python drops what is raised inside a finalizer."""
    for _ in range(5):
        child.process.send_signal(signal.SIGINT if kind == "KeyboardInterrupt" else signal.SIGUSR1)
        try:
            child.expect("interrupted", 15)
            return
        except AssertionError as exc:
            if "told nothing" not in str(exc):
                raise
    raise AssertionError("the interrupt never struck")


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "Stop"])
def test_interrupts_at_random_moments(spawn, agents, database, name, kind):
    child = spawn(work_until_interrupted, name=str(name), kind=kind)
    for _ in range(60):
        child.expect("go")
        time.sleep(random.uniform(0, 0.015))
        interrupt(child, kind)
    # The process lives on, and has only its present requests.
    entered = child.expect("go")["entered"]
    assert entered > 0
    (other,) = agents(1, grace=60)
    for _ in range(3):
        other.hold("mutex", name)
        other.release()
    other.hold("mutex", name)
    interrupt(child, kind)
    child.expect("go")
    until(lambda: len([row for row in database.queue(name) if row[1] == name]) == 2, "one row for each thread")
    other.release()


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "Stop"])
def test_interrupts_while_waiting(spawn, agents, database, name, waiting, kind):
    (holder,) = agents(1, grace=60)
    holder.hold("mutex", name)
    child = spawn(work_until_interrupted, name=str(name), kind=kind)

    def rows():
        return [row for row in database.queue(name) if row[1] == name]

    last = 0
    for number in range(15):
        child.expect("go")
        until(lambda last=last: len(rows()) == 2 and rows()[-1][0] > last, "the child waits, at a new place")
        last = rows()[-1][0]
        time.sleep(random.uniform(0, 0.02) if number % 3 else 0.15)
        interrupt(child, kind)
    child.expect("go")
    until(lambda: len(rows()) == 2, "only its last request is left")
    holder.release()
    holder.hold("mutex", name)
    holder.release()


def lock(coordinator, resource):
    with coordinator.mutex(resource):
        pass


def group(coordinator, resource):
    with coordinator.all_of(coordinator.mutex(resource), coordinator.limit(resource.replace("-", "-too-"), 2)):
        pass


def upgrade(coordinator, resource):
    with coordinator.read(resource) as grant:
        grant.upgrade()


def put(coordinator, resource):
    coordinator.queue(resource).put(Json("work"))


def wait(coordinator, resource):
    assert not coordinator.mutex(f"{resource.rpartition('-')[0]}-busy-keep").acquire(timeout=0.03)


def reenter(coordinator, resource):
    lock = coordinator.mutex(resource, reentrant=True)
    with lock as grant:
        try:
            with lock, coordinator.mutex(resource, reentrant=True):
                pass
        finally:
            grant.check()  # for any interrupt inside


def reenter_calls(coordinator, resource):
    lock = coordinator.mutex(resource, reentrant=True)

    @lock
    def work(again):
        if again:
            try:
                work(False)
            finally:
                lock.grant.check()

    work(True)


DONE = {
    "lock": lock,
    "group": group,
    "upgrade": upgrade,
    "put": put,
    "wait": wait,
    "reenter": reenter,
    "reenter_calls": reenter_calls,
}


def strike_every_line(channel, url, options, name, what):
    """A KeyboardInterrupt at each line of the package that something runs through, and after each call that contextlib
    makes for it, one at a time.
    """
    coordinator = sqlsem.connect(url, **options, grace=60)
    keep = coordinator.mutex(f"{name}-keep")
    keep.acquire()
    with coordinator.mutex(f"{name}-warm"):
        pass
    other = sqlsem.connect(url, **options, grace=60)
    busy = other.mutex(f"{name}-busy-keep")
    busy.acquire()

    def strikes(number):
        lines_seen = 0

        def trace(frame, event, _):
            nonlocal lines_seen
            code = frame.f_code
            if code.co_filename == contextlib.__file__:
                # A signal also strikes just after `next(self.gen)`, and so separates a generator from its end.
                frame.f_trace_opcodes = True
                strikes = event == "opcode" and frame.f_lasti in after_calls(code)
            elif code.co_filename.startswith(PACKAGE):
                strikes = event == "line" and not leaves_with(frame) and not enters_exit(frame)
            else:
                return None
            if strikes:
                lines_seen += 1
                if lines_seen == number:
                    channel.tell("strikes", number=number, where=f"{code.co_name}:{frame.f_lineno}")
                    raise KeyboardInterrupt
            return trace

        return interrupted(trace, lambda: DONE[what](coordinator, f"{name}-{number}"))

    number = 1
    while strikes(number):
        # The next lock is granted and kept, however soon it is requested.
        with coordinator.mutex(f"{name}-next"):
            pass
        number += 1
    channel.tell("done")
    channel.ask()
    keep.grant.check()
    busy.grant.check()
    with coordinator.mutex(f"{name}-after"):
        pass
    # All connections of the pool for waits are there.
    with contextlib.ExitStack() as waiting:
        for _ in range(MAX_BLOCKED_CONNECTIONS):
            assert waiting.enter_context(coordinator.client.wait_pool.connection(1.0)) is not None
    channel.tell("well")
    channel.ask()


@pytest.mark.timing(heartbeat_share=1 / 120)  # nothing is lost on a busy machine, and heartbeats clean up soon
@pytest.mark.engines("sqlite", "postgresql")
@pytest.mark.parametrize("what", DONE)
def test_an_interrupt_at_every_line(spawn, database, name, what):
    child = spawn(strike_every_line, name=str(name), what=what)
    struck = {}
    while (report := child.next()) and report["event"] == "strikes":
        struck[report["number"]] = report["where"]
    assert report, (struck, child.errors())
    assert report["event"] == "done", (report, child.errors())
    assert len(struck) > 50

    def left():
        numbers = [row[1].rpartition("-")[2] for row in database.queue(name)]
        return {number: struck[int(number)] for number in numbers if number != "keep"}

    deadline = time.monotonic() + 20
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == {}, f"rows that interrupts at these lines left behind (of {len(struck)})"
    child.call("well", do="go on")
