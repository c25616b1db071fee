"""Wait for conditions, with timeouts for slow machines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import sqlsem
from support import late_threads

#: Seconds that a condition may take before a test gives up. Machines are slow and noisy. (proof/run_mutants.py gives up
#: sooner: it knows how long the tests take.)
PATIENCE = float(os.environ.get("SQLSEM_TEST_PATIENCE", "60"))
#: A grace (and a retry time) for members that must not lose anything in a test, however slow the machine is.
AMPLE = {"grace": 90.0, "retry": 90.0}
#: The grace of coordinators of tests that do not set one. A machine that stops for some seconds would use up the
#: default grace. It is no longer than this, because some tests wait for the next heartbeat.
STEADY = max(15.0, PATIENCE / 4)


def slack(seconds: float) -> float:
    """Return the time limit, in seconds, for work that takes at most ``seconds`` on an idle machine.

    The busier this machine is, the longer the limit.
    A load average lags: between two reads of it a machine may become very busy. So a test that tells two behaviours
    apart by their times must keep them far apart: make the slower one slower (a pause of minutes), not the limit
    tighter.
    """
    busy = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
    return seconds * max(3.0, 2 * busy)


def until(condition: Callable[[], Any], description: str = "the condition", timeout: float = PATIENCE) -> Any:
    """Wait until ``condition()`` is true and return its value; fail after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{description} did not come true within {timeout:g} s"
        time.sleep(0.01)


def drained(queue: sqlsem.Queue, timeout: float) -> bool:
    """Return True once no task of a queue is left that could run; False after ``timeout`` seconds."""
    try:
        queue.wait(timeout)
    except sqlsem.Timeout:
        return False
    except sqlsem.TaskFailed:
        pass
    return True


class Standstills:
    """A context that records when this process, and perhaps the whole machine, stood still.

    After a standstill, two processes wake at the same time, and may run in either order.
    """

    #: Seconds between two checks, and the delay that counts as a stop.
    EVERY, LONG = 0.01, 0.1

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="standstills")

    def _look(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self.EVERY):
            now = time.monotonic()
            if now - last > self.LONG:
                self._found.append((last, now))
            last = now

    def between(self, since: float, until: float) -> bool:
        """Return True if the process stood still at any time in this interval."""
        return any(began < until and since < ended for began, ended in self._found)

    def __enter__(self) -> Standstills:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def promptly(attempt: Callable[[], float], seconds: float, description: str, times: int = 5) -> None:
    """Assert that an attempt takes less than ``seconds``. ``attempt()`` runs once, and returns its duration.

    A standstill of the machine makes one attempt slow; slow code makes all slow. So one fast attempt is enough.
    """
    if late_threads.is_late():
        pytest.skip("nothing is prompt with late threads (--late)")
    took: list[float] = []
    while not took or took[-1] >= seconds:
        assert len(took) < times, f"{description}: it took {', '.join(f'{seconds:.1f}' for seconds in took)} s"
        took.append(attempt())


def remains(condition: Callable[[], bool], seconds: float, description: str) -> None:
    """Assert that a condition stays true for ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"not any more: {description}"
        time.sleep(0.02)
