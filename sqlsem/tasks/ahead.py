"""Claiming the next group while one is run, by a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlsem.core.threads import GoesOn, Kept

__all__ = ["Ahead"]

#: For the thread to get Python's lock; nothing depends on it.
START_SECONDS = 0.01


class Ahead:
    """A thread that claims again and again, for as long as ``claim`` says; made when it is first wanted.

    It holds Python's lock from the arrival of one group until the request for the next is on its way. So the server has
    something to do all the time, and short tasks are run meanwhile.
    """

    def __init__(self, name: str, claim: Callable[[], bool]) -> None:
        self._claim = claim
        self._changed = threading.Condition()
        self._thread = Kept(name, self._work)
        self._asked = False  # and not begun
        self._over = False
        self._failure: BaseException | None = None
        self.flies = False  # from when it is asked until it rests

    def start(self) -> None:
        """Claim, unless it does. Returns when the request is about to be sent: what the caller does next may keep
        Python's lock for longer than that takes.
        """
        with self._changed:
            if self._over or self.flies:
                return
            self._thread.begin()
            self._asked = self.flies = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._asked, START_SECONDS)

    def tell(self) -> None:
        """By ``claim``: there is something for those who `wait`."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, enough: Callable[[], bool]) -> bool:
        """Wait until it rests, or that is enough; False when it rested before. When that is not enough, raises what has
        ended it.
        """
        with self._changed:
            waited = self.flies
            self._changed.wait_for(lambda: not self.flies or enough())
            if self._failure is None or enough():
                return waited or enough()
            failure, self._failure = self._failure, None
        raise failure

    def close(self, seconds: float) -> None:
        """End the thread, for so long at most."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _work(self, _: GoesOn) -> None:
        self._rest(None)  # should a thread have ended at it, those who wait ask again
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._over)
                if not self._asked:
                    return
                self._asked = False
                self._changed.notify_all()
            failure = None
            try:
                while self._claim():
                    pass
            except BaseException as exc:
                failure = exc  # for who leads, as if it had claimed itself
            self._rest(failure)

    def _rest(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure = failure
            self.flies = self._asked
            self._changed.notify_all()
