"""Looks for deadlocks, for as long as anybody of ours waits who may be in one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from sqlsem.core import nesting
from sqlsem.core.holdings import Holdings
from sqlsem.core.membership import Membership
from sqlsem.core.waiting import WaitingRoom
from sqlsem.deadlocks import Found
from sqlsem.engines.base import Session
from sqlsem.engines.roles import DeadlockSearch
from sqlsem.errors import SqlsemError
from sqlsem.model import Ticket, monotonic

__all__ = ["DeadlockWatch", "Suspect"]

log = logging.getLogger("sqlsem")

#: Seconds between two looks.
LOOK_EVERY_SECONDS = 0.75
#: Seconds for which the answer may be awaited.
ANSWER_SECONDS = 15.0
#: Seconds that a deadlock's victim gets to give up, before it is looked for further ones.
SETTLE_SECONDS = 0.5


class Suspect(Protocol):
    """Somebody of ours who waits while others may wait for it."""

    def tell(self, found: Found) -> None:
        """Its request has to be given up."""


class DeadlockWatch:
    """Those who may be in a deadlock, and a thread that looks as long as there are any. On a session of its own, as the
    main one has to be free for the pings.
    """

    def __init__(self, member: Membership, holdings: Holdings, waiting_room: WaitingRoom, above: nesting.Above) -> None:
        self._member = member
        self._holdings = holdings
        self._waiting_room = waiting_room
        self._above = above
        self._state_lock = member.state_lock
        self._suspects: dict[int, Suspect] = {}  # by the positions that it waits at
        self.thread: threading.Thread | None = None
        self._session: Session | None = None

    def add(self, suspect: Suspect, tickets: Sequence[Ticket], number: int) -> bool:
        """The thread or task of that number begins to wait. False when that can be no part of a deadlock, as it has
        nothing else.
        """
        if len(tickets) < 2 and not self._holdings.requests_of(number) and not self._above.held:
            return False
        with self._state_lock:
            self._suspects.update((ticket.position, suspect) for ticket in tickets)
            if self.thread is None and not self._member.closing.is_set():
                self.thread = threading.Thread(target=self.run, name="sqlsem-lookout", daemon=True)
                try:
                    self.thread.start()
                except RuntimeError as exc:  # no more threads, or this process is ending
                    self.thread = None
                    log.warning("Nobody looks for deadlocks of this process: %s", exc)
        return True

    def remove(self, tickets: Sequence[Ticket]) -> None:
        """It waits no more. May be repeated."""
        with self._state_lock:
            for ticket in tickets:
                self._suspects.pop(ticket.position, None)

    def run(self) -> None:
        """Thread: look, until nobody is left for whom."""
        while True:
            self._member.closing.wait(LOOK_EVERY_SECONDS)
            with self._state_lock:
                if self._member.closing.is_set() or not self._suspects:
                    # In one go: the next who waits makes a new one.
                    session, self._session, self.thread = self._session, None, None
                    break
            try:
                if self._session is None:
                    self._session = self._waiting_room.idle_session()
                if self._session is None:
                    self._session = self._member.engine.connect("wait")
                with self._waiting_room.awaiting(self._session, ANSWER_SECONDS):
                    self._find(self._session)
            except Exception as exc:
                if not self._member.closing.is_set():
                    known = isinstance(exc, SqlsemError)
                    log.warning("Could not look for deadlocks, trying again: %s", exc, exc_info=not known)
                session, self._session = self._session, None
                if session is not None:
                    session.close()
        if session is not None:
            self._waiting_room.keep(session)

    def _find(self, session: Session) -> None:
        """Ask for deadlocks whose youngest request is ours, and tell who made it."""
        member = self._member
        deadline = monotonic() + SETTLE_SECONDS
        told: set[int] = set()
        while self._suspects and member.member_id is not None and monotonic() < deadline:
            found = session.find_deadlock(member.member_id) if member.engine.has(DeadlockSearch) else None
            if found is None and self._above.held:
                found = nesting.find_deadlock(session, member.member_id)
            if found is None:
                return
            with self._state_lock:
                suspect = self._suspects.get(found.victim)
            if suspect is None:  # it is just beginning or ending
                return
            # There may be another one, which is found when this one has been withdrawn.
            if found.victim not in told:
                told.add(found.victim)
                suspect.tell(found)
            if member.closing.wait(0.02):
                return

    def close(self) -> None:
        """Wait for the thread, which ends by itself."""
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(SETTLE_SECONDS)

    def sessions(self) -> list[Session]:
        """What it has open: for a forked child."""
        return [] if self._session is None else [self._session]
