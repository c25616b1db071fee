"""How long tests wait, and for what."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

#: How long a condition may take to come true before a test gives up. Machines are slow and noisy. (proof/run_mutants.py
#: gives up sooner: it has seen how long the tests take.)
PATIENCE = float(os.environ.get("SQLSEM_TEST_PATIENCE", "60"))
#: A grace (and a time to try again) of whoever must lose nothing in a test, however slow the machine is.
AMPLE = {"grace": 90.0, "retry": 90.0}
#: The grace of coordinators of tests that say nothing of it, in place of the usual one, which a machine that stands
#: still for some seconds can use up; not so long that what is told by the next ping takes long.
STEADY = 15.0


def slack(seconds: float) -> float:
    """What takes at most so long on a quiet machine, on this one as busy as it is.

    A load average comes late: between two looks at it a machine may be as busy as ever. So what tells two behaviours
    apart by the time they take must lie far apart: make the slower one slower (a pause of minutes), not this closer.
    """
    busy = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
    return seconds * max(3.0, 2 * busy)


def until(condition: Callable[[], Any], what: str = "the condition", timeout: float = PATIENCE) -> Any:
    """Wait until ``condition()`` is true and return its value; fail after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout:g} s"
        time.sleep(0.01)


class Standstills:
    """When this process, and so perhaps the whole machine, stood still; as a context, which looks all the time.

    Of two processes that wake at the same time, the one that should have been told first may be the second one to run.
    """

    #: Between two looks, and what is more than a busy machine takes for one.
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
        """Whether it did, at any time from then to then."""
        return any(began < until and since < ended for began, ended in self._found)

    def __enter__(self) -> Standstills:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def promptly(attempt: Callable[[], float], seconds: float, what: str, times: int = 5) -> None:
    """Assert that something takes less than so long: ``attempt()`` does it once, and tells how long that took.

    A machine that stands still makes one attempt slow; what is slow by itself is slow each time.
    """
    took: list[float] = []
    while not took or took[-1] >= seconds:
        assert len(took) < times, f"{what}: it took {', '.join(f'{one:.1f}' for one in took)} s"
        took.append(attempt())


def remains(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Assert that something is so, all the time, for that long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"not any more: {what}"
        time.sleep(0.02)
