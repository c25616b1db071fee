"""A fork closes the connections to SQLite for an instant, and another process may delete the log meanwhile.

So the files of a connection are compared, and a connection is opened, only while no fork can begin. A transaction of
the caller's compares at any time, and again without forks where it finds a difference.
"""

import contextlib
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from faults.test_replaced_files import STATES, acquired, place
from support import AMPLE, until

import sqlsem
from sqlsem.engines.failures import Replaced
from sqlsem.engines.sqlite import connection as connections
from sqlsem.engines.sqlite import files, fork

pytestmark = [pytest.mark.engines("sqlite"), pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

#: The functions that read the files, or choose them.
GUARDED = [
    (files.OpenFiles, "__init__"),
    (files.OpenFiles, "require_in_place"),
    (files.OpenFiles, "compare"),
    (files.OpenFiles, "require_same"),
    (files.OpenFiles, "without_log"),
    (connections.SqliteConnection, "_set_up"),
    (files, "protect_log"),
    (files, "_locked_file"),
    (files, "unprotect_log"),
    (files, "close_unused"),
]


@pytest.fixture
def coordinator(tmp_path):
    with sqlsem.connect(f"sqlite:///{place(tmp_path, None)}", retry=AMPLE["retry"]) as coordinator:
        yield coordinator


@pytest.fixture
def calls(monkeypatch):
    """Record the guarded calls: the name, and True if the calling thread blocks forks."""
    calls = []

    def watch(owner, name):
        original = getattr(owner, name)

        def call(*args, **options):
            calls.append((name, fork.forks_blocked._is_owned()))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in GUARDED:
        watch(owner, name)
    return calls


@pytest.mark.parametrize("state", STATES, ids=lambda value: value.__name__)
def test_files_are_compared_with_forks_blocked(coordinator, calls, state):
    use, _ = state(coordinator)
    with contextlib.suppress(sqlsem.SqlsemError):
        use()
    coordinator.client.member.heartbeat()
    assert {name for name, _ in calls} >= {"_set_up", "protect_log", "compare"}
    free = {name for name, is_blocked in calls if not is_blocked}
    # (A transaction of the caller's compares without, and once more with forks blocked if that finds a difference.)
    assert free <= ({"require_in_place", "compare"} if state.__name__.startswith("asserting") else set())


def test_difference_during_a_fork_is_compared_again(coordinator, monkeypatch):
    grant = acquired(coordinator.mutex("held"))
    real, compared = files.OpenFiles.require_in_place, []

    def require_in_place(open_files):
        compared.append(fork.forks_blocked._is_owned())
        if not compared[-1]:
            raise Replaced("the log is gone, as a fork has closed the connections")
        real(open_files)

    with contextlib.closing(sqlite3.connect(coordinator.engine.path, isolation_level=None)) as program:
        cursor = program.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(files.OpenFiles, "require_in_place", require_in_place)
        grant.assert_held(cursor)
        monkeypatch.undo()
        cursor.execute("COMMIT")
    assert compared == [False, True]
    grant.check()


def test_files_of_waiters_are_compared_with_forks_blocked(coordinator, calls):
    lock = coordinator.mutex("waited for")
    with lock:
        calls.clear()
        waiter = threading.Thread(target=acquired, args=(coordinator.mutex("waited for"),))
        waiter.start()
        until(lambda: ("require_in_place", True) in calls, "a waiter compares the files")
    waiter.join()
    assert not [name for name, is_blocked in calls if not is_blocked]


def test_log_deleted_during_fork_is_no_replacement(coordinator, monkeypatch):
    """The worst moment: a fork begins after the connection was found open, and before its files are compared."""
    grant = acquired(coordinator.mutex("held"))
    path = Path(coordinator.engine.path)
    compare, forks = files.OpenFiles.compare, []

    def log_is_deleted():
        fork._before()  # this thread's fork: all connections are closed
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        fork._after_in_parent()

    def interrupted(open_files):
        if not forks:
            forks.append(threading.Thread(target=log_is_deleted))
            forks[0].start()
            forks[0].join(0.5)  # as far as it gets
        compare(open_files)

    monkeypatch.setattr(files.OpenFiles, "compare", interrupted)
    coordinator.client.member.heartbeat()
    forks[0].join()
    grant.check()
    grant.release()
