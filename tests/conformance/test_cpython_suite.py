"""CPython's own tests of Lock, RLock, Semaphore and BoundedSemaphore, run on `mutex` and `limit`.

`DIFFERENCES` names each difference and its reason; the docstring of `Lock` has the important ones.
"""

import itertools
import unittest

import pytest

lock_tests = pytest.importorskip("test.lock_tests", reason="this Python comes without its own tests (test.lock_tests)")

ANOTHER_THREAD = "a mutex is released by its owner, or through its grant"
TWICE = "a mutex that one holds is refused at once, instead of hanging"
DIFFERENCES = {
    "LockTests": {
        "test_different_thread": ANOTHER_THREAD,
        "test_reacquire": TWICE,
        "test_state_after_timeout": ANOTHER_THREAD,
        "test_timeout": "a time that is too long is a ValueError, not an OverflowError",
        "test_at_fork_reinit": "a lock that was forked is the parent's",
        "test_repr": "it names the resource; whether it is free, only the database knows",
        "test_locked_repr": "it names the resource; whether it is free, only the database knows",
    },
    "RLockTests": {
        "test_timeout": "a time that is too long is a ValueError, not an OverflowError",
        "test_at_fork_reinit": "a lock that was forked is the parent's",
        "test_repr": "it names the resource; whether it is free, only the database knows",
        "test_locked_repr": "it names the resource; whether it is free, only the database knows",
        "test__is_owned": "lock.grant raises NotHeld",
        "test_recursion_count": "an inner matter of threading's",
        "test_release_save_unacquired": "an inner matter of threading's",
    },
    "SemaphoreTests": {
        "test_release_unacquired": "releasing never counts up",
        "test_repr": "it names the resource; whether it is free, only the database knows",
    },
    "BoundedSemaphoreTests": {
        "test_release_unacquired": "NotHeld is a RuntimeError, not a ValueError",
        "test_repr": "it names the resource; whether it is free, only the database knows",
    },
}
CASES = [
    (suite, test)
    for suite, differing in DIFFERENCES.items()
    for test in unittest.defaultTestLoader.getTestCaseNames(getattr(lock_tests, suite))
    if test not in differing
]
names = itertools.count()


@pytest.mark.parametrize(("suite", "test"), CASES)
def test_as_cpython(connect, name, suite, test):
    coordinator = connect()
    with coordinator.mutex(name):  # starts the coordinator's threads before the test counts threads
        pass
    kind = {
        "LockTests": lambda: coordinator.mutex(name(next(names))),
        "RLockTests": lambda: coordinator.mutex(name(next(names)), reentrant=True),
    }.get(suite, lambda value=1: coordinator.limit(name(next(names)), value))
    case = type(suite, (getattr(lock_tests, suite),), {"locktype": staticmethod(kind), "semtype": staticmethod(kind)})
    result = unittest.TestResult()
    case(test).run(result)
    for _, trace in [*result.errors, *result.failures]:
        pytest.fail(trace)
    coordinator.close()  # some tests end while they hold a lock
