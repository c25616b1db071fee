"""Leaders: what threads and tasks share. A leader is who holds the mutex of that name; its note tells who that is.

SIGTERM, while anybody of the main thread leads or waits to: all are told (``term.ending``). Then a handler of the
program's own decides, as it would without us. Where there is none, the blocks are left, by `SystemExit`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Any

from sqlsem.core import terms
from sqlsem.core.client import DatabaseClient
from sqlsem.core.defaults import Coordinated, client_of
from sqlsem.core.grant_registry import LostCallback
from sqlsem.core.terms import Terms
from sqlsem.errors import LockLost, SqlsemError, Unavailable
from sqlsem.model import WRITE, Duration, Entry, check_name

__all__ = [
    "LONGEST_PAUSE_SECONDS",
    "TERMINATED",
    "LeaderElection",
    "LeaderEntry",
    "SigtermScope",
    "may_go_on",
    "watch_sigterm",
]

#: The exit code of a process that SIGTERM has ended, as a shell tells it.
TERMINATED = 128 + signal.SIGTERM
#: Between two attempts to take part again.
LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LeaderEntry:
    """Who leads, as everybody can see it.

    Attributes:
        name: Of what.
        info: What it says of itself: ``info=`` of `sqlsem.leader`, the note of its row.
        host: Where it runs; None where that is not known (a bare row, say).
        pid: Its process there.
        program: The program's name.
        since: When its term began, by the database's clock.
        fence: The term's fence: a later one's is larger.
    """

    name: str
    info: str | None
    host: str | None
    pid: int | None
    program: str | None
    since: datetime | None
    fence: int


class LeaderElection:
    """What a leader of any face is made of: the name, what others see, and the options."""

    def __init__(
        self,
        name: str,
        info: str | None,
        timeout: Duration | None,
        client: DatabaseClient | None,
        coordinator: Coordinated | None = None,
    ) -> None:
        self.name = check_name("The leader's name", name)
        self._info = info
        self._timeout = timeout
        self._given = client if coordinator is None else client_of(coordinator)
        self.terms(None)  # what cannot be is told at once

    def terms(self, on_lost: LostCallback | None, cancel_on_lost: bool = False) -> Terms:
        """Of the mutex whose grant is one term."""
        return terms.mutex(
            self.name,
            {"note": self._info, "timeout": self._timeout, "on_lost": on_lost, "cancel_on_lost": cancel_on_lost},
            self._given,
        )

    def current(self) -> LeaderEntry | None:
        """Who leads; None when nobody does. Blocks."""
        client = self._given or client_of(None)
        return _leader_of(self.name, client.with_connection(lambda session: session.entries(self.name)))


def _leader_of(name: str, entries: list[Entry]) -> LeaderEntry | None:
    for entry in entries:
        inside = entry.state in ("holds", "revoked") and entry.granted_at is not None
        if inside and entry.access == WRITE and entry.limit == 1 and not entry.in_transit:
            return LeaderEntry(name, entry.note, entry.host, entry.pid, entry.program, entry.granted_at, entry.position)
    return None


def may_go_on(error: SqlsemError, *, had_term: bool, lost: bool) -> bool:
    """Whether one who met this takes part again: a term or a place in the queue was lost, or the database is away. What
    the function of a term that is not lost raises is its own.
    """
    return isinstance(error, LockLost | Unavailable) and (lost or not had_term)


# -- SIGTERM ----------------------------------------------------------------------------------------------------------


class SigtermScope:
    """Of one who leads, or waits to, in the main thread. ``tell`` is called first; then, where the program has no
    handler, ``cancel``; without one `SystemExit` is raised, unless it is leaving: then by `end`.
    """

    def __init__(self, tell: Callable[[], object], cancel: Callable[[], object] | None = None) -> None:
        self.tell = tell
        self.cancel = cancel
        self._leaving = False
        self._handler: _Handler | None = None

    def begin(self, handler: _Handler) -> None:
        """It is watched over from now on."""
        self._handler = handler
        handler.stays.append(self)

    @property
    def leaving(self) -> bool:
        """Whether it is on its way out, which nothing shall interrupt."""
        return self._leaving

    def leave(self) -> None:
        """It is on its way out."""
        self._leaving = True

    def end(self) -> None:
        """It is out. Raises `SystemExit` when SIGTERM came on the way."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.remove(self)
            if handler.pending and self.cancel is None:
                handler.pending = False
                raise SystemExit(TERMINATED)


class _Handler:
    """Our handler, from the first who stays to the last."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.stays: list[SigtermScope] = []
        self.pending = False
        self._struck = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for stay in tuple(self.stays):
            stay.tell()
        if callable(self.previous):
            self.previous(number, frame)
        elif not self.stays:  # somebody else's handler came after ours, and calls it still
            signal.signal(number, self.previous)
            signal.raise_signal(number)
        elif not self._struck:
            self._struck = True  # a second one shall not interrupt what the first one has begun
            self._end_all()

    def _end_all(self) -> None:
        for stay in self.stays:
            if stay.cancel is not None:
                stay.cancel()
        threads = [stay for stay in self.stays if stay.cancel is None]
        if any(stay.leaving for stay in threads):
            self.pending = True
        elif threads:
            raise SystemExit(TERMINATED)

    def remove(self, stay: SigtermScope) -> None:
        global _handler
        self.stays.remove(stay)
        if not self.stays:
            current: object = signal.getsignal(signal.SIGTERM)
            if current is self:  # else the program's own has taken its place
                signal.signal(signal.SIGTERM, self.previous)
            _handler = None


_handler: _Handler | None = None


def watch_sigterm(stay: SigtermScope) -> None:
    """Until `SigtermScope.end`. Does nothing outside of the main thread, where SIGTERM is ignored, and where its handler is not
    of Python.
    """
    global _handler
    if threading.current_thread() is not threading.main_thread():
        return
    if _handler is None:
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or previous is signal.SIG_IGN:
            return
        _handler = _Handler(previous)
        signal.signal(signal.SIGTERM, _handler)
    stay.begin(_handler)
