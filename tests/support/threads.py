"""Threads whose errors reach the test, and threads that acquire, hold and release on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import sqlsem
from support.patience import PATIENCE


def started_since(before: Collection[threading.Thread], prefix: str = "") -> list[str]:
    """Return the names of new threads, not in ``before``. (Threads of other tests may end at any time. The
    thread that delivers events belongs to the whole process, and is left out.)
    """
    names = [thread.name for thread in threading.enumerate() if thread not in before and thread.name != "sqlsem-events"]
    return sorted(name for name in names if name.startswith(prefix))


class Threads:
    """Threads whose errors reach the test."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> threading.Thread:
        def run() -> None:
            try:
                function(*args, **kwargs)
            except BaseException as exc:
                self.errors.append(exc)

        thread = threading.Thread(target=run, daemon=True, name=f"{function.__name__}-{len(self._threads)}")
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self, timeout: float = 2 * PATIENCE) -> None:
        """Wait for all; raise the first error."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.errors:
            raise self.errors[0]
        late = [thread.name for thread in self._threads if thread.is_alive()]
        assert not late, f"still running after {timeout:g} s: {late}"
        self._threads.clear()


class Attempt:
    """A thread that acquires a lock, holds it until `leave` is called, and releases it."""

    def __init__(
        self, lock: sqlsem.Lock, timeout: float | None = PATIENCE, *, entering: Callable[[], Any] = lambda: None
    ) -> None:
        self._lock = lock
        self._entering = entering  # called in its thread as soon as the lock is granted
        self._timeout = timeout
        self._done = threading.Event()
        self._leave = threading.Event()
        self.grant: sqlsem.Grant | None = None
        self.error: BaseException | None = None
        self.entered = self.left = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="attempt")
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._lock.acquire(timeout=self._timeout):
                self._entering()
                self.entered = time.monotonic()
                self.grant = self._lock.grant
        except BaseException as exc:
            self.error = exc
        self._done.set()
        if self.grant is not None:
            self._leave.wait()
            self.left = time.monotonic()
            try:
                self._lock.release()
            except BaseException as exc:
                self.error = exc

    @property
    def settled(self) -> bool:
        """True if it no longer waits: it was granted, or failed."""
        return self._done.is_set()

    @property
    def inside(self) -> bool:
        return self._done.is_set() and self.grant is not None and not self._leave.is_set()

    def granted(self, timeout: float = PATIENCE) -> sqlsem.Grant:
        """Wait until granted; raise its error."""
        assert self._done.wait(timeout), f"{self._lock} was not granted within {timeout:g} s"
        if self.error is not None:
            raise self.error
        assert self.grant is not None, f"{self._lock}: timeout"
        return self.grant

    def failed(self, timeout: float = PATIENCE) -> BaseException:
        """Wait until it failed; return the error."""
        assert self._done.wait(timeout), f"{self._lock} has not failed within {timeout:g} s"
        assert self.error is not None, f"{self._lock} did not fail: {self.grant}"
        return self.error

    def waits(self, seconds: float = 0.15) -> bool:
        """Return True if it still waits after so long."""
        return not self._done.wait(seconds)

    def leave(self) -> None:
        """Release, once it is granted; raise its error."""
        self.granted()
        self._leave.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), f"{self._lock} could not be released within {PATIENCE:g} s"
        if self.error is not None:
            raise self.error
