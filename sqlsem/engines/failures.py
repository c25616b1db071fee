"""The ways in which a session fails, so that its caller may try again; and a timeout that grows with slow servers."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlsem.util import runtime
from sqlsem.values.errors import Unavailable
from sqlsem.values.locks import monotonic

if TYPE_CHECKING:
    from sqlsem.engines.protocol import EngineConnection


class Disconnected(Unavailable):
    """The session is lost or could not be opened; a new one may succeed."""


class Refused(Disconnected):
    """The server answered and refused the connection for now: its address is right."""


class Replaced(Disconnected):
    """The session's database file was replaced: other programs find another file at its path. No row of this one
    counts.
    """

    code = "sqlite-file"


class Unanswered(Disconnected):
    """A statement exceeded its timeout. The server may be slow rather than unreachable. ``retry_once_more``: True if
    the next attempt has a longer timeout, so that a retry is useful even after the caller's retry timeout.
    """

    retry_once_more = False

    @classmethod
    def of(cls, exc: Disconnected, timeout: AdaptiveTimeout) -> Unanswered:
        """Return the error to raise instead of ``exc``, after a statement was interrupted at its timeout."""
        error = cls(f"{exc} (no answer came within {timeout.seconds:.1f} s)")
        error.retry_once_more = timeout.grow()
        return error


class Busy(Unavailable):
    """Another session held a lock in the database for longer than one call waits. A retry may succeed."""

    code = "busy"


class Conflict(Busy):
    """A transaction on another node of the cluster was faster, which is usual there. A retry may succeed at once."""


class AdaptiveTimeout:
    """A timeout of ``base`` seconds that doubles each time it is exceeded, up to a cap.

    Without growth, a slow first call (plan compilation) would time out on every retry.
    """

    #: The maximum number of doublings.
    MAX_DOUBLINGS = 3
    #: If the timeout was not exceeded for this many seconds, it is ``base`` again.
    RESET_SECONDS = 300.0

    def __init__(self, base: float) -> None:
        self.base = base
        self._doublings, self._exceeded_at = 0, -math.inf

    @property
    def seconds(self) -> float:
        """The current timeout."""
        if monotonic() - self._exceeded_at > self.RESET_SECONDS:
            self._doublings = 0
        return self.base * float(2**self._doublings)

    def grow(self) -> bool:
        """Record that the timeout was exceeded; return True if the next one is longer."""
        grows = self._doublings < self.MAX_DOUBLINGS
        self._doublings, self._exceeded_at = min(self._doublings + 1, self.MAX_DOUBLINGS), monotonic()
        return grows


@contextlib.contextmanager
def time_limited(session: EngineConnection, limit: AdaptiveTimeout | float | None) -> Iterator[None]:
    """Interrupt the session if the block takes longer than ``limit`` seconds: the server may never answer."""
    if limit is None:
        yield
        return
    expired = threading.Event()

    def end() -> None:
        expired.set()
        session.interrupt()

    timer = runtime.current().timer(limit.seconds if isinstance(limit, AdaptiveTimeout) else limit, end)
    timer.start()
    try:
        yield
    except Disconnected as exc:
        if expired.is_set() and isinstance(limit, AdaptiveTimeout):
            raise Unanswered.of(exc, limit) from exc
        raise
    finally:
        timer.cancel()
