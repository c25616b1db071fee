"""A long wait is granted as promptly as a short wait.

Where no notification is certain, waiters poll after a share of the time since the last change. The end of a row ahead
is a change, whenever it is seen.
"""

import itertools
import statistics
import threading
import time

import pytest
from support import PATIENCE, promptly

import sqlsem

pytestmark = [pytest.mark.locks, pytest.mark.faces("sync", "aio")]
#: Seconds of waiting, long enough for pauses that the test can measure.
LONG = 2.5
#: Waiters of each kind, and the seconds between two grants, in most cases, on a busy machine.
WAITERS, PROMPT = 20, 0.06

KINDS = {
    "mutex": (lambda coordinator, name, number: coordinator.mutex(name), 1),
    "limit": (lambda coordinator, name, number: coordinator.limit(name, 3), 3),
    "weights": (lambda coordinator, name, number: coordinator.limit(name, 6, weight=1 + number % 3), 6),
    "readers and writers": (
        lambda coordinator, name, number: (coordinator.write, coordinator.read)[number % 2](name),
        1,
    ),
    "several": (
        lambda coordinator, name, number: sqlsem.all_of(coordinator.mutex(f"{name}-a"), coordinator.mutex(f"{name}-b")),
        1,
    ),
}


def passing(connect, name, make, places):
    """Let many clients wait long, then enter and leave at once; return the seconds between grants (80th percentile)."""
    holder, others = connect(), [connect(), connect()]
    held = [make(holder, name, 0) for _ in range(places)]
    times = []

    def pass_through(lock):
        with lock:
            times.append(time.monotonic())

    for lock in held:
        assert lock.acquire(blocking=False)
    locks = [make(others[number % 2], name, number) for number in range(WAITERS)]
    threads = [threading.Thread(target=pass_through, args=(lock,), daemon=True) for lock in locks]
    for thread in threads:
        thread.start()
    time.sleep(LONG)  # the long wait under test
    began = time.monotonic()
    for lock in held:
        lock.release()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(times) == WAITERS
    pauses = [after - before for before, after in itertools.pairwise([began, *sorted(times)])]
    for coordinator in (holder, *others):
        coordinator.close()
    return statistics.quantiles(pauses, n=5)[-1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_long_wait_ends_as_promptly_as_a_short_wait(kind, connect, name):
    make, places = KINDS[kind]
    promptly(lambda: passing(connect, name, make, places), PROMPT, "most of those who have waited for long")
