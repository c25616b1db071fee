"""An interrupt at any point where a signal can arrive leaves no lock taken, and no user counted."""

import contextlib
import itertools
import sys
import threading

import pytest
from support.striking import after_calls, interrupted

import sqlsem
from sqlsem.client.connection import main as main_connection
from sqlsem.engines.sqlite import fork
from sqlsem.util import runtime

pytestmark = pytest.mark.skipif(sys.implementation.name != "cpython", reason="where signals strike is CPython's matter")


def struck(number, do, *files):
    """True if a KeyboardInterrupt hit the moment of that number in these files.

    A signal may arrive as a function begins, and after each call that it makes.
    """
    lines_seen = 0

    def trace(frame, event, _):
        nonlocal lines_seen
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        # (Python 3.10 tells of a resumed generator outside of its blocks. A signal arrives inside.)
        begins = event == "call" and (sys.version_info >= (3, 11) or frame.f_lasti == -1)
        if begins or (event == "opcode" and frame.f_lasti in after_calls(frame.f_code)):
            lines_seen += 1
            if lines_seen == number:
                raise KeyboardInterrupt
        return trace

    return interrupted(trace, do)


def test_interrupted_had_within_releases_the_lock():
    lock, inside = threading.Lock(), []

    def have():
        with runtime.had_within(lock, 60) as granted:
            inside.append((granted, lock.locked()))

    for number in itertools.count(1):
        more = struck(number, have, runtime.__file__, contextlib.__file__)
        assert not lock.locked(), number
        if not more:
            break
    assert number > 3
    assert set(inside) == {(True, True)}
    with lock, runtime.had_within(lock, 0.01) as granted:
        assert not granted
        assert lock.locked()


def test_interrupted_exit_frees_the_main_session(tmp_path):
    for number in itertools.count(1):
        with sqlsem.connect(tmp_path / f"{number}.db") as coordinator:
            with coordinator.mutex("a"):
                pass
            main = coordinator.client.member.main
            more = struck(number, lambda main=main: main.deregister([], list, 1.0), main_connection.__file__)
            assert not main._lock.locked(), number
        if not more:
            break
    assert number > 5


@pytest.mark.parametrize("hook", range(4))
def test_interrupted_fork_blocks_no_thread(hook):
    """The other hooks run, whatever one of them raises: the fork takes place."""
    hooks = [fork._before, fork._before, fork._after_in_parent, fork._after_in_parent]

    def others_are_free():
        free = []

        def look():
            free.append(fork.forks_blocked.acquire(timeout=60))
            fork.forks_blocked.release()

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return free == [True] and not fork._forks

    class Session:
        open = True

        def disconnect(self):
            self.open = False

    for number in itertools.count(1):
        more, session = False, Session()
        fork.sessions.add(session)
        for at, function in enumerate(hooks):
            if at == hook:
                more = struck(number, function, fork.__file__)
            else:
                function()
            if at == 1:
                assert list(fork._held) == [threading.get_ident()], number
                assert not session.open, number
        assert others_are_free(), number
        if not more:
            break
    assert number > 2
