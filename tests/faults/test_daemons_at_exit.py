"""Daemon threads that run on while the interpreter ends write nothing, wherever its end meets them."""

import atexit
import logging
import os
import sys
import tempfile
import threading
import time
import traceback

import pytest
from support.striking import PACKAGE

import sqlsem
from sqlsem.tasks import Json
from sqlsem.util import shutdown

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.engines("sqlite", "postgresql"),
]
#: How long a thread stays at its line if the end waits for it, and how long the thread may then take to come to rest.
STAY_SECONDS, REST_SECONDS = 0.3, 20.0
#: How many children run at a time, and the distance of their lines.
AT_A_TIME, STRIDE = 4, 10


def lock(coordinator, resource):
    with coordinator.mutex(resource, on_lost=print):
        pass


def busy(resource):
    """Return the name of the lock that the test holds."""
    return f"{resource.rpartition('-')[0]}-busy"


def wait(coordinator, resource):
    coordinator.mutex(busy(resource)).acquire(timeout=0.05)


def upgrade(coordinator, resource):
    with coordinator.read(resource) as grant:
        grant.upgrade()
        grant.check()
        grant.hand_over(ttl=60)


def rate(coordinator, resource):
    with coordinator.rate(resource, 1000, "1s"):
        pass


def once(coordinator, resource):
    with coordinator.once(resource, "1h"):
        pass


def lead(coordinator, resource):
    with coordinator.leader(resource):
        pass


def task(coordinator, resource):
    queue = coordinator.queue(resource)
    queue.put(Json("work"))
    for claimed in queue.claim(wait=0):
        with claimed:
            pass
    queue.counts()


def part(coordinator, resource):
    with coordinator.batch(resource, ["a"], window="1h").part("a"):
        pass


def read(coordinator, resource):
    coordinator.admin.entries(resource)


WORK = {work.__name__: work for work in (lock, wait, upgrade, rate, once, lead, task, part, read)}


class Stepper:
    """A daemon thread that does some work, and stays for a while at the ``number``-th new line of the package that it
    runs through.
    """

    def __init__(self, number, work):
        self._remaining, self._work = number, work
        self._seen = set()
        self.where = None
        self.paused, self.resumed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        while self.thread.is_alive() and not self.paused.wait(0.001):
            pass

    def _run(self):
        sys.settrace(self._trace)
        self._work()

    def _trace(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and (code, frame.f_lineno) not in self._seen:
            self._seen.add((code, frame.f_lineno))
            self._remaining -= 1
            if self._remaining == 0:
                sys.settrace(None)
                self.where = f"{code.co_qualname}:{frame.f_lineno}" if hasattr(code, "co_qualname") else code.co_name
                self.paused.set()
                self.resumed.wait()
                return None
        return self._trace

    def rests(self):
        """Return True if the thread has ended, or is blocked until Python stops it."""
        frame = sys._current_frames().get(self.thread.ident)
        while frame is not None and frame.f_code is not shutdown.block_daemon_thread.__code__:
            frame = frame.f_back
        return frame is not None or not self.thread.is_alive()


def end_at(number, url, options, name, what):
    """End this process while a daemon thread is at its ``number``-th line. Return that line; None if there is none."""
    coordinator = sqlsem.connect(url, **options, grace=120)
    with coordinator.mutex(f"{name}-warm"):
        pass
    stepper = Stepper(number, lambda: WORK[what](coordinator, name))
    if stepper.where is not None:
        # (As Python does. The calls of `atexit` run in a thread, as some of them wait for the thread that stays.)
        end = threading.Thread(target=atexit._run_exitfuncs)
        end.start()
        end.join(STAY_SECONDS)
        stepper.resumed.set()
        end.join()
        until = time.monotonic() + REST_SECONDS
        while not stepper.rests():
            assert time.monotonic() < until, "the thread goes on"
            time.sleep(0.0005)
    return stepper.where


def fork_to_end_at(number, *arguments):
    """Fork a child that ends at this line. Return its process id, and the files with that line and what it wrote."""
    line, errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed by the caller
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(errors.fileno(), 2)
            line.write(str(end_at(number, *arguments)))
            line.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid, line, errors


def end_at_many_lines(channel, url, options, name, what):
    """Let forked children end at each line in turn, and report what they wrote."""
    logging.basicConfig(level=logging.ERROR)
    number, is_last = 1, False
    while not is_last:
        numbers = range(number, number + AT_A_TIME * STRIDE, STRIDE)
        for pid, *files in [fork_to_end_at(each, url, options, f"{name}-{each}", what) for each in numbers]:
            _, status = os.waitpid(pid, 0)
            line, errors = (file.seek(0) or file.read() for file in files)
            for file in files:
                file.close()
            is_last |= line == "None"
            if line != "None":
                channel.tell("ended", number=number, line=line, status=status, text=errors.decode())
            number += STRIDE
    channel.tell("done", number=number)


# (A grant that was handed over stays in transit until its time is up.)
KINDS = [pytest.param(what, marks=pytest.mark.leaves_rows) if what == "upgrade" else what for what in WORK]


@pytest.mark.parametrize("what", KINDS)
def test_daemon_at_any_line_of_its_work_ends_quietly(spawn, connect, database, name, what):
    connect().mutex(f"{name}-busy").acquire()
    child = spawn(end_at_many_lines, name=str(name), what=what)
    wrote = {}
    while (report := child.next())["event"] == "ended":
        if report["status"] or report["text"]:
            wrote[report["line"]] = (report["status"], report["text"].splitlines())
    assert report["number"] > 50
    assert wrote == {}
