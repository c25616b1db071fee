"""A plugin for pytest: tests of all workers and hosts share a limit, a mutex, readers and a writer.

pytest finds it when sqlsem is installed. The locks are in the default database of programs: ``$SQLSEM_URL``, a
``sqlsem.toml``, ``[tool.sqlsem]`` of ``pyproject.toml``, else an SQLite file that all workers of this user share.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

import sqlsem
from sqlsem import config
from sqlsem.client.callers import this_thread
from sqlsem.client.effects import run_generator
from sqlsem.values.locks import check_duration

MARKER = (
    'sqlsem(resource, *, limit=1, weight=1, access="write", timeout=None): hold a lock from before its fixtures '
    'until after them, together with all tests on other workers and hosts; access "read" is beside other readers. '
    "Several markers: all of them at once."
)

_held = pytest.StashKey[sqlsem.Lock]()
_coordinator = pytest.StashKey[sqlsem.Coordinator]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Release everything."""
    existing = config.stash.get(_coordinator, None)
    if existing is not None:
        existing.close()


def coordinator(pytestconfig: pytest.Config) -> sqlsem.Coordinator:
    """Return the coordinator of this process. It is not the default one, so tests may change that."""
    existing = pytestconfig.stash.get(_coordinator, None)
    if existing is None:
        settings = config.resolve()
        existing = pytestconfig.stash[_coordinator] = sqlsem.connect(settings.url, **settings.options)
    return existing


def lock_of_marker(
    locks: sqlsem.Coordinator, note: str, resource: str, *, limit: int = 1, weight: int = 1, access: str = "write"
) -> sqlsem.Lock:
    """Return the lock of a marker with these arguments."""
    if access == "read":
        return locks.read(resource, note=note)
    if access != "write":
        raise sqlsem.ConfigurationError(f"access is 'read' or 'write', not {access!r}")
    return locks.limit(resource, limit, weight=weight, note=note)


@pytest.hookimpl(trylast=True, wrapper=True)  # inside pytest's own wrappers, which handle a setup that fails
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Acquire the locks of the test's markers; if that fails, the test has an error."""
    marks = list(item.iter_markers("sqlsem"))
    if marks:
        locks = coordinator(item.config)
        test_locks, timeouts = [], []
        for mark in marks:
            options = dict(mark.kwargs)
            timeout = options.pop("timeout", None)
            if timeout is not None:
                timeouts.append(timeout)
            try:
                test_locks.append(lock_of_marker(locks, item.nodeid[-200:], *mark.args, **options))
            except (TypeError, sqlsem.ConfigurationError) as exc:
                raise pytest.UsageError(f"{item.nodeid}: pytest.mark.sqlsem: {exc}") from exc
        lock = test_locks[0] if len(test_locks) == 1 else locks.all_of(*test_locks)
        if not lock.acquire(timeout=min(timeouts, default=None)):
            seconds = check_duration("timeout", min(timeouts))
            late = lock.terms.timeout_error(lock.terms.requests, this_thread(), seconds)
            raise run_generator(late, lock.terms.client.execute_effect)
        item.stash[_held] = lock
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Release the locks after the fixtures have ended; a lost lock is an error of the test."""
    try:
        return (yield)
    finally:
        lock = item.stash.get(_held, None)
        if lock is not None:
            del item.stash[_held]
            lock.release()


@pytest.fixture(name="sqlsem", scope="session")
def sqlsem_fixture(pytestconfig: pytest.Config) -> sqlsem.Coordinator:
    """Locks that all workers and hosts share: ``with sqlsem.mutex("licence"): …``."""
    return coordinator(pytestconfig)
