"""A thread that claims the next group of tasks while another thread runs the current one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlsem.util.threads import ShouldContinue, SupervisedThread

#: How long `start` waits for the thread to get Python's lock. Only speed depends on it.
START_SECONDS = 0.01


class Prefetcher:
    """A thread that calls ``claim`` until that returns False; started with the first request.

    It holds Python's lock from the reply with one group until it has sent the request for the next. So the server is
    busy all the time, and short tasks run meanwhile.
    """

    def __init__(self, name: str, claim: Callable[[], bool]) -> None:
        self._claim = claim
        self._changed = threading.Condition()
        self._thread = SupervisedThread(name, self._work)
        self._requested = False  # True from a request until the thread begins with it
        self._closed = False
        self._failure: BaseException | None = None
        self.in_flight = False  # from the request until `claim` has returned False

    def start(self) -> None:
        """Start to claim, unless a claim is in flight. Return when the thread is about to send the claim: from then on
        the caller may keep Python's lock for a long time.
        """
        with self._changed:
            if self._closed or self.in_flight:
                return
            self._thread.begin()
            self._requested = self.in_flight = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._requested, START_SECONDS)

    def notify(self) -> None:
        """Wake the threads in `wait`. Called by ``claim`` when it has claimed something."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, enough: Callable[[], bool]) -> bool:
        """Wait until ``enough()`` is true or nothing is in flight. Return False if nothing was in flight at the call.

        If ``enough()`` is false in the end, raise the exception that ended ``claim``.
        """
        with self._changed:
            waited = self.in_flight
            self._changed.wait_for(lambda: not self.in_flight or enough())
            if self._failure is None or enough():
                return waited or enough()
            failure, self._failure = self._failure, None
        raise failure

    def close(self, seconds: float) -> None:
        """End the thread, and wait up to ``seconds`` for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _work(self, _: ShouldContinue) -> None:
        self._finish(None)  # if the thread ended during a request, the waiters make a new one
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requested or self._closed)
                if not self._requested:
                    return
                self._requested = False
                self._changed.notify_all()
            failure = None
            try:
                while self._claim():
                    pass
            except BaseException as exc:
                failure = exc  # `wait` raises it in the claiming thread
            self._finish(failure)

    def _finish(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure = failure
            self.in_flight = self._requested
            self._changed.notify_all()
