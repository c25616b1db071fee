"""An interrupt while a thread starts leaves the process usable: the next caller gets its thread."""

import asyncio
import gc
import itertools
import threading
import time

from support import started_since, striking

import sqlsem
from sqlsem.aio.driver import Driver
from sqlsem.client.connection.membership import Membership
from sqlsem.client.monitors.monitor import Monitor
from sqlsem.util.threads import SupervisedThread

#: The functions that start the library's threads.
BEGINS = (SupervisedThread.begin, SupervisedThread._start)


def interrupted(number, functions, do):
    """True if a KeyboardInterrupt hit the line of that number that these functions run through."""
    lines_seen, codes = 0, {function.__code__ for function in functions}

    def trace(frame, event, _):
        nonlocal lines_seen
        if frame.f_code not in codes:
            return None
        if event == "line":
            lines_seen += 1
            if lines_seen == number:
                raise KeyboardInterrupt
        return trace

    return striking.interrupted(trace, do)


def test_interrupted_entry_is_polled_for(tmp_path):
    expected = ("sqlsem-heartbeat", "sqlsem-watchdog")

    before = threading.enumerate()

    def running():
        return [name for name in started_since(before) if name in expected]

    for number in itertools.count(1):
        with sqlsem.connect(tmp_path / "locks.db", lease=10) as coordinator:
            struck = interrupted(number, (*BEGINS, Membership.connected), coordinator.mutex("a").acquire)
            with coordinator.mutex("b"):
                assert running() == sorted(expected), f"struck at line {number}"
        if not struck:
            break
    assert number > 8


def test_deadlock_search_runs_after_an_interrupt(tmp_path):
    class Searching(Monitor):
        name, purpose = "sqlsem-test", "nothing"

        def __init__(self, client):
            super().__init__(client.member, client.wait_pool)
            self.looked = threading.Event()

        def interval(self):
            return 0.001

        def is_needed(self):
            return not self.looked.is_set()

        def check(self, session):
            self.looked.set()

    def begin(monitor):
        with monitor.state_lock:
            monitor.begin()

    with sqlsem.connect(tmp_path / "locks.db") as coordinator:
        coordinator.mutex("a").acquire()
        for number in itertools.count(1):
            monitor = Searching(coordinator.client)
            struck = interrupted(number, (*BEGINS, Monitor.begin), lambda monitor=monitor: begin(monitor))
            begin(monitor)
            assert monitor.looked.wait(60), f"struck at line {number}"
            monitor.close()
            if not struck:
                break
    assert number > 4


def test_tasks_keep_their_places_to_wait_in(tmp_path):
    with sqlsem.connect(tmp_path / "locks.db") as other, sqlsem.connect(tmp_path / "locks.db") as coordinator:
        other.mutex("a").acquire()

        async def wait(seconds):
            return await coordinator.aio.mutex("a").acquire(timeout=seconds)

        asyncio.run(wait(0.1))  # loads modules, which takes longer than the other calls
        for number in itertools.count(1):
            # (On a busy machine the time may be up before the wait begins: the longer call shows whether it was.)
            calls = [lambda seconds=seconds: asyncio.run(wait(seconds)) for seconds in (0.1, 2.0)]
            if not any(interrupted(number, (Driver._wait_in_thread,), call) for call in calls):
                break
        assert number > 5
        gc.collect()
        places = coordinator.client.event_loops.permits
        deadline = time.monotonic() + 60
        while len(places) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(places) == 0
