"""An interrupt while a thread starts leaves the process usable: the next caller gets its thread."""

import asyncio
import gc
import itertools
import os
import threading
import time

from support import started_since, striking

import sqlsem
from sqlsem.core.monitor import Monitor

#: The functions that start the library's threads.
BEGINS = {("begin", "threads.py"), ("_start", "threads.py")}


def interrupted(number, places, do):
    """True if a KeyboardInterrupt hit the line of that number that these functions, (name, file), run through."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if (frame.f_code.co_name, os.path.basename(frame.f_code.co_filename)) not in places:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
        return trace

    return striking.interrupted(trace, do)


def test_interrupted_entry_is_polled_for(tmp_path):
    ours = ("sqlsem-heartbeat", "sqlsem-watchdog")

    before = threading.enumerate()

    def running():
        return [name for name in started_since(before) if name in ours]

    for number in itertools.count(1):
        with sqlsem.connect(tmp_path / "locks.db", lease=10) as coordinator:
            struck = interrupted(number, BEGINS | {("connected", "membership.py")}, coordinator.mutex("a").acquire)
            with coordinator.mutex("b"):
                assert running() == sorted(ours), f"struck at line {number}"
        if not struck:
            break
    assert number > 8


def test_deadlock_search_runs_after_an_interrupt(tmp_path):
    class Searching(Monitor):
        name, every, what = "sqlsem-test", 0.001, "nothing"

        def __init__(self, client):
            super().__init__(client.member, client.wait_pool)
            self.looked = threading.Event()

        def is_needed(self):
            return not self.looked.is_set()

        def check(self, session):
            self.looked.set()

    def begin(lookout):
        with lookout.state_lock:
            lookout.begin()

    with sqlsem.connect(tmp_path / "locks.db") as coordinator:
        coordinator.mutex("a").acquire()
        for number in itertools.count(1):
            lookout = Searching(coordinator.client)
            struck = interrupted(number, BEGINS | {("begin", "lookout.py")}, lambda lookout=lookout: begin(lookout))
            begin(lookout)
            assert lookout.looked.wait(60), f"struck at line {number}"
            lookout.close()
            if not struck:
                break
    assert number > 4


def test_tasks_keep_their_places_to_wait_in(tmp_path):
    with sqlsem.connect(tmp_path / "locks.db") as other, sqlsem.connect(tmp_path / "locks.db") as coordinator:
        other.mutex("a").acquire()

        async def wait():
            return await coordinator.aio.mutex("a").acquire(timeout=0.1)

        asyncio.run(wait())  # loads modules, which takes longer than the other calls
        for number in itertools.count(1):
            if not interrupted(number, {("_wait_in_thread", "driver.py")}, lambda: asyncio.run(wait())):
                break
        assert number > 5
        gc.collect()
        places = coordinator.client.event_loops.permits
        deadline = time.monotonic() + 60
        while len(places) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(places) == 0
