"""The way of a request: how many functions an uncontended lock and its release call, over how many modules.

Each lock takes this way, so a step on it costs every program. Lower a limit here when the way is shorter; raise one
only for a step that every lock needs.
"""

import functools
import sys
from pathlib import Path

import pytest

import sqlsem

PACKAGE = str(Path(sqlsem.__file__).parent)

#: The greatest numbers of calls and of modules: of acquire and release, and of the beginning and the end of a block.
LIMITS = {"calls": ((45, 16), (32, 12)), "block": ((45, 17), (34, 12))}


@pytest.fixture
def coordinator(tmp_path):
    with sqlsem.connect(tmp_path / "locks.db") as coordinator:
        yield coordinator


def path_of(call):
    """Return the functions of the package that a call runs, each as its module and its name, in their order.

    A generator counts each time that it goes on.
    """
    path = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            path.append((code.co_filename.removeprefix(PACKAGE), code.co_name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return path


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="the path is that of CPython")
@pytest.mark.parametrize("use", LIMITS)
@pytest.mark.parametrize("kind", ["mutex", "limit"])
def test_uncontended_lock_takes_a_short_path(coordinator, kind, use):
    lock = coordinator.limit("a", 3) if kind == "limit" else coordinator.mutex("a")
    begin, end = lock.acquire, lock.release
    if use == "block":
        begin, end = lock.__enter__, functools.partial(lock.__exit__, None, None, None)
    for _ in range(5):  # the first locks open connections, and compare the files more closely
        with lock:
            pass
    begun, ended = [], []
    for _ in range(5):  # (the heartbeat may have done more than usual in one of them)
        begun.append(path_of(begin))
        ended.append(path_of(end))
    for paths, (calls, modules) in zip((begun, ended), LIMITS[use], strict=True):
        shortest = min(paths, key=len)
        assert len(shortest) <= calls, shortest
        assert len({module for module, _ in shortest}) <= modules, shortest
