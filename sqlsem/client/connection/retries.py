"""The attempts of one call: until when it is retried, and the pauses in between, which grow and are jittered."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from sqlsem.engines.failures import Busy, Conflict, Disconnected, Refused, Unanswered
from sqlsem.util.threads import log
from sqlsem.values.errors import Unavailable
from sqlsem.values.locks import monotonic

__all__ = ["Retries"]

#: The longest first pause, and the longest pause. Each pause is a random part of its bound, which doubles.
FIRST_SECONDS, LONGEST_SECONDS = 0.05, 1.0
#: The longest pause after a conflict: the other transaction has ended, but the next attempt may meet one more.
LONGEST_AFTER_CONFLICT = 0.1


class Retries:
    """The attempts of one call, which fail with `Disconnected` or `Busy`.

    Args:
        what: The call, for messages.
        seconds: How long the call is retried.
        is_patient: True if a slow server gets one attempt more, with a longer timeout, after these seconds.
        is_closing: Returns True when no further attempt makes sense.
        running: The calls that are being tried now; this one is among them in its ``with`` block.
    """

    def __init__(
        self, what: str, seconds: float, *, is_patient: bool, is_closing: Callable[[], bool], running: set[Retries]
    ) -> None:
        self._what = what
        self._seconds = seconds
        self._is_patient = is_patient
        self._is_closing = is_closing
        self._is_last = False  # this attempt is the one more
        self._began = monotonic()
        self._attempts = 1
        self._running = running

    def __enter__(self) -> Retries:
        self._running.add(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.discard(self)

    @property
    def elapsed(self) -> float:
        """The seconds since the first attempt began."""
        return monotonic() - self._began

    @property
    def remaining(self) -> float:
        """The seconds until the last attempt begins at the latest, for displays."""
        return max(0.0, self._seconds - self.elapsed)

    def pause_after(self, failure: Disconnected | Busy) -> float | None:
        """Return the seconds to wait before the next attempt, and log that; None: there is no further attempt."""
        is_slow = self._is_patient and isinstance(failure, Unanswered) and failure.retry_once_more
        is_over = self.elapsed >= self._seconds
        if self._is_closing() or (is_over and (not is_slow or self._is_last)):
            return None
        self._is_last = is_over
        level = logging.DEBUG if isinstance(failure, Conflict) else logging.WARNING
        log.log(level, "%s failed, retrying: %s", self._what, failure)
        most = LONGEST_AFTER_CONFLICT if isinstance(failure, Conflict) else LONGEST_SECONDS
        longest = min(most, FIRST_SECONDS * 2.0 ** min(self._attempts - 1, 30))
        self._attempts += 1
        return random.uniform(0, longest)

    def pause_or_raise(self, failure: Disconnected | Busy) -> float:
        """Return what `pause_after` does; after the last attempt raise its error, with the number of attempts."""
        pause = self.pause_after(failure)
        if pause is not None:
            return pause
        if isinstance(failure, Disconnected):
            raise self._given_up(failure) from failure
        raise failure

    def _given_up(self, failure: Disconnected) -> Unavailable:
        question = "" if isinstance(failure, Refused) else "; is the server up, and the address right?"
        return Unavailable(
            f"{failure} ({self._what}: {self._attempts} attempt{'s' if self._attempts != 1 else ''} in "
            f"{self.elapsed:.1f} s{question})"
        )
