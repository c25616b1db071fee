"""Leader election, as both APIs share it. The leader holds the mutex of that name, and its note says who it is.

If SIGTERM arrives while blocks of the main thread lead or wait to lead, each of them is notified (``term.ending``).
Then the program's own handler runs; if there is none, the blocks end with `SystemExit`. This relies on a signal handler
in Python, which the first block installs and the last block removes.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from types import FrameType
from typing import Any

from sqlsem.client.client import DatabaseClient
from sqlsem.client.defaults import client_of
from sqlsem.client.held.registry import BaseGrant, LostCallback
from sqlsem.client.operations import terms
from sqlsem.client.operations.backoff import backoff_delays
from sqlsem.client.operations.terms import Terms
from sqlsem.util.record import AsDict, record
from sqlsem.util.threads import log
from sqlsem.values.errors import LockLost, SqlsemError, Unavailable
from sqlsem.values.locks import WRITE, Duration, Entry, check_call, check_name
from sqlsem.values.names import RESERVED

__all__ = [
    "TERMINATED",
    "ElectionRetries",
    "LeaderElection",
    "LeaderEntry",
    "SigtermScope",
    "leaders_in",
    "retry_pauses",
    "watch_sigterm",
]

#: The exit code of a process that SIGTERM has ended, as shells report it.
TERMINATED = 128 + signal.SIGTERM
#: The longest pause between two attempts to take part in an election.
LONGEST_PAUSE_SECONDS = 10.0


@record
class LeaderEntry(AsDict):
    """The leader, as every client can read it.

    Attributes:
        name: The leader's name (`sqlsem.leader`).
        info: Its ``info``, which is the note of its row.
        host: Its host; None if unknown (for example for a bare row).
        pid: Its process id on that host.
        program: The program's name.
        since: The beginning of its term, by the database's clock.
        fence: The term's fence; a later term has a larger one. It is also the position of the leader's row.
        waiting: The number of candidates that wait to lead.
    """

    name: str
    info: str | None
    host: str | None
    pid: int | None
    program: str | None
    since: datetime | None
    fence: int
    waiting: int = 0


class LeaderElection:
    """An election: the name, the information for other clients, and the options. Both APIs use it."""

    def __init__(
        self,
        name: str,
        info: str | None,
        timeout: Duration | None,
        on_started: Callable[[Any], object] | None,
        on_stopped: Callable[[Any], object] | None,
        handle_sigterm: bool,
        cancel_on_lost: bool,
        client: DatabaseClient | None,
    ) -> None:
        self.name = check_name("The leader's name", name)
        self.on_started = on_started
        self.on_stopped = on_stopped
        self.handle_sigterm = handle_sigterm
        self._cancel_on_lost = cancel_on_lost
        self._info = info
        self._timeout = timeout
        self._given = client
        self.terms(None)  # raises for invalid options
        for option, callback in (("on_started", on_started), ("on_stopped", on_stopped)):
            if callback is not None:
                check_call(option, callback)

    def terms(self, on_lost: LostCallback | None) -> Terms:
        """Return the options of the mutex; each grant of it is one term of the leader."""
        return terms.lock(
            "mutex",
            self.name,
            {"note": self._info, "timeout": self._timeout, "on_lost": on_lost, "cancel_on_lost": self._cancel_on_lost},
            self._given,
        )

    def current(self) -> LeaderEntry | None:
        """Return the leader, or None. Blocks."""
        client = self._given or client_of(None)
        leaders = leaders_in(client.with_connection(lambda session: session.entries(self.name)))
        return leaders[0] if leaders else None


def leaders_in(entries: Iterable[Entry]) -> list[LeaderEntry]:
    """Return the holders of mutexes among these rows, by name; without the resources that sqlsem reserves."""
    rows = list(entries)
    waiting = Counter(row.resource for row in rows if row.state == "waits")
    leaders = []
    for row in sorted(rows, key=lambda row: row.resource):
        is_granted = row.state in ("holds", "revoked") and row.granted_at is not None
        is_mutex = row.access == WRITE and row.limit == 1 and not row.in_transit
        if is_granted and is_mutex and not row.resource.startswith(tuple(RESERVED)):
            place = (row.host, row.pid, row.program, row.granted_at, row.position)
            leaders.append(LeaderEntry(row.resource, row.note, *place, waiting[row.resource]))
    return leaders


def retry_pauses() -> Iterator[float]:
    """Yield the pauses between attempts of a candidate to lead, in seconds."""
    return backoff_delays(first=0.1, longest=LONGEST_PAUSE_SECONDS)


class ElectionRetries:
    """The attempts of one candidate to lead, one after the other, with pauses between them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pauses = retry_pauses()

    def pause_after(self, error: SqlsemError, grant: BaseGrant | None) -> float | None:
        """Return the seconds until the next attempt, after an error in a term with this grant; or without a term, if
        the candidate did not get to lead. The candidate takes part again if its term or its row in the queue was lost,
        or the database is out of reach. None: an error of the leading function ends the run, unless the term was lost.
        """
        lost = grant is not None and grant.state.why_lost is not None
        if not isinstance(error, LockLost | Unavailable) or not (lost or grant is None):
            return None
        log.warning("Takes part again in the election of %r: %s", self._name, error)
        if lost:
            self._pauses = retry_pauses()
        return next(self._pauses)


# -- SIGTERM ----------------------------------------------------------------------------------------------------------


class SigtermScope:
    """A block of the main thread that leads or waits to lead, for which SIGTERM is handled.

    ``notify`` is called first; then, if the program has no handler, ``cancel``. Without ``cancel`` the block ends with
    `SystemExit`; a block that is being left raises it in `end`.
    """

    def __init__(self, notify: Callable[[], object], cancel: Callable[[], object] | None = None) -> None:
        self.notify = notify
        self.cancel = cancel
        self.leaving = False  # True while the block is being left, which a signal must not interrupt
        self._handler: _Handler | None = None

    def begin(self, handler: _Handler) -> None:
        """Handle SIGTERM for this block from now on."""
        self._handler = handler
        handler.scopes.append(self)

    def end(self) -> None:
        """Stop handling SIGTERM. Raises `SystemExit` if it arrived while the block was being left."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.remove(self)
            if handler.pending and self.cancel is None:
                handler.pending = False
                raise SystemExit(TERMINATED)


class _Handler:
    """The signal handler, from the first block to the last."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.scopes: list[SigtermScope] = []
        self.pending = False  # SIGTERM arrived while a block was being left
        self._has_ended_blocks = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for scope in tuple(self.scopes):
            scope.notify()
        if callable(self.previous):
            self.previous(number, frame)
        elif not self.scopes:  # the program's handler, installed later, still calls this one
            signal.signal(number, self.previous)
            signal.raise_signal(number)
        elif not self._has_ended_blocks:
            self._has_ended_blocks = True  # a second signal must not interrupt the shutdown that the first one began
            self._end_all()

    def _end_all(self) -> None:
        for scope in self.scopes:
            if scope.cancel is not None:
                scope.cancel()
        threads = [scope for scope in self.scopes if scope.cancel is None]
        if any(scope.leaving for scope in threads):
            self.pending = True
        elif threads:
            raise SystemExit(TERMINATED)

    def remove(self, scope: SigtermScope) -> None:
        global _handler
        self.scopes.remove(scope)
        if not self.scopes:
            current: object = signal.getsignal(signal.SIGTERM)
            if current is self:  # else the program has installed another handler since
                signal.signal(signal.SIGTERM, self.previous)
            _handler = None


_handler: _Handler | None = None


def watch_sigterm(scope: SigtermScope) -> bool:
    """Handle SIGTERM for this block until `SigtermScope.end`, and return True. Do nothing and return False outside of
    the main thread, if SIGTERM is ignored, or if its handler is not a Python one.
    """
    global _handler
    if threading.current_thread() is not threading.main_thread():
        return False
    if _handler is None:
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or previous is signal.SIG_IGN:
            return False
        _handler = _Handler(previous)
        signal.signal(signal.SIGTERM, _handler)
    scope.begin(_handler)
    return True
