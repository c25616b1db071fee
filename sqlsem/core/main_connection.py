"""The main session: it holds the beacon of this process, and all calls that need a member go through it.

Invariants
    ``_lock`` guards the session; who holds it waits for nothing but one bounded statement or one attempt to connect.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol, TypeVar

import tenacity

from sqlsem import runtime
from sqlsem.core import shutdown
from sqlsem.core.threads import foreign_place, voice
from sqlsem.engines.base import (
    AdaptiveTimeout,
    Busy,
    Disconnected,
    Engine,
    Refused,
    Replaced,
    Session,
    Unanswered,
    program_name,
    time_limited,
)
from sqlsem.errors import ConfigurationError, SqlsemError, Unavailable
from sqlsem.model import Ticket, monotonic

__all__ = ["ConnectionOwner", "MainConnection", "unavailable"]

log = voice
T = TypeVar("T")

#: A statement is not given up sooner than after this many seconds, however short the grace: a slow server is not dead.
OVERDUE_SECONDS = 1.0
#: A grant or a claim leaves a sign of life alone that is younger than this part of the grace, or of the lease.
FRESH = 1 / 8
#: After what a call is tried again. (Made once: each of these refers to itself, which only the garbage collector ends.)
TRIED_AGAIN = tenacity.retry_if_exception_type((Disconnected, Busy))


class ConnectionOwner(Protocol):
    """Whose session it is. It is told by those who hold the session."""

    def entered(self, began: float, came_back: bool) -> None:
        """There is a session, made since then: as the member we were, or as a new one."""

    def has_any(self) -> bool:
        """Whether any row is ours, or anything is held."""

    def prove(self, since: float) -> None:
        """The database has a sign of life of ours that is not older than this."""

    def lose_all(self, why: str, *, for_good: bool = False) -> bool:
        """Nothing is ours any more; ``for_good``: nor is anything to be done later. Whether there was."""


class MainConnection:
    """The connection, made again as often as it breaks.

    ``trust``: seconds for which we believe to live without a sign; 0: that is not watched.
    """

    def __init__(self, engine: Engine, member: ConnectionOwner, retry: float, life: float, trust: float) -> None:
        self.closing = runtime.event()
        self.session: Session | None = None
        self.member_id: int | None = None  # our number in the database, once we have one
        self._engine = engine
        self._member = member
        self._retry = retry
        self._watched = trust > 0
        self._fresh = life * FRESH
        self._lock = runtime.lock()
        self._refused = (-math.inf, "")  # when an attempt to connect last failed, and why
        self._calling: float | None = None  # when the call that is under way began
        self._overdue = AdaptiveTimeout(max(trust, OVERDUE_SECONDS))  # what it may take
        self._unanswered: Session | None = None  # was cut off by the watch
        #: Why the database is not the one that our numbers come from: nothing can be done any more.
        self.displaced: str | None = None

    def require_open(self) -> None:
        """Raise `ConfigurationError` after `leave`, and as soon as ``closing`` is set."""
        if self.closing.is_set():
            raise ConfigurationError("This coordinator is closed; make a new one with sqlsem.connect(…)")

    def call(
        self, what: str, call: Callable[[Session, int], T], budget: float | None = None, *, sign: bool = False
    ) -> T:
        """Do ``call(session, member_id)`` on the main session, connecting (again) as needed.

        Tries for ``budget`` seconds at the most (``retry``, if left out): bounded, jittered, logged. Then the last
        error is raised, saying what was tried. ``sign``: when it succeeds, it has given a sign of life.
        """
        if self.closing.is_set():
            self.require_open()
        if self.session is not None:
            # The usual case, without ceremony. ('with' and not acquire(): no interrupt comes between it and its block.)
            try:
                with self._lock:
                    if self.session is not None:
                        return self._attempt(call, sign)
            except (Disconnected, Busy) as exc:
                log.info("%s has to be tried again: %s", what, exc)
        retrying = tenacity.Retrying(sleep=tenacity.sleep_using_event(self.closing), **self.policy(what, budget))
        try:
            result: T = retrying(self.once, call, sign=sign)
            return result
        except Disconnected as exc:
            raise unavailable(what, exc, retrying.statistics) from exc

    def policy(self, what: str, budget: float | None) -> dict[str, Any]:
        """When a call is tried again, for tenacity: bounded, jittered, logged. The face adds how it sleeps."""

        def tell(state: tenacity.RetryCallState) -> None:
            if state.outcome is not None:
                log.warning("%s failed, trying again: %s", what, state.outcome.exception())

        longest = self._retry if budget is None else budget
        began = monotonic()

        def over(state: tenacity.RetryCallState) -> bool:
            failure = state.outcome.exception() if state.outcome is not None else None
            # A slow server is given more time for each attempt; callers without time to spare do not wait for that.
            patient = isinstance(failure, Unanswered) and failure.retry_once_more and longest >= self._retry
            return not patient and monotonic() - began >= longest

        return {
            "stop": lambda state: self.closing.is_set() or over(state),
            "wait": tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            "retry": TRIED_AGAIN,
            "before_sleep": tell,
            "reraise": True,
        }

    def once(self, call: Callable[[Session, int], T], asked: float | None = None, *, sign: bool = False) -> T:
        """One attempt at ``call(session, member_id)`` on the main session, connecting where needed. See `call`.

        ``asked``: since when somebody who is one of many waits for this attempt. A server that has refused another one
        meanwhile is not asked again: the many would wait for each other's time to connect.
        """
        with self._lock:
            if self.session is None:
                refused_at, refusal = self._refused
                if asked is not None and refused_at > asked:
                    raise Disconnected(refusal)
                try:
                    self._enter()
                except Disconnected as exc:
                    self._refused = (monotonic(), str(exc))
                    raise
            return self._attempt(call, sign)

    def _attempt(self, call: Callable[[Session, int], T], sign: bool) -> T:
        """Holding ``_lock``: one call; a session that breaks is dropped."""
        assert self.session is not None
        if self.member_id is None:  # given up, and a second interrupt kept us from dropping the session
            self._drop()
            raise self.given_up()
        # Of rows that are there an operator may have taken one away. (Asked first, as the call may bring some.)
        had = self._member.has_any()
        proves = sign and not had
        began = self._calling = monotonic()
        try:
            try:
                result = call(self.session, self.member_id)
            except SqlsemError:
                self.session.require_in_place()  # which says more than what it leads to
                raise
            self.session.require_in_place()
        except BaseException as exc:
            # An exception out of a signal handler may leave a connection in the middle of something; and a
            # member that was given up must enter again.
            self.session.recover()
            if isinstance(exc, Replaced):
                # Told before the beacon goes out, for which programs wait that come to the new database. Its numbers
                # mean other rows than the same ones of the old database: a process that has some must not go on there.
                self.member_id = None
                if self._member.lose_all(str(exc), for_good=True) or had:
                    self.displaced = str(exc)
            if not self.session.usable or self.member_id is None:
                session, self._unanswered = self._unanswered, None
                late = session is not None and session is self.session
                self._drop()
                if late and isinstance(exc, Disconnected):
                    raise Unanswered.of(exc, self._overdue) from exc
            raise
        finally:
            self._calling = None
        if proves:
            self._member.prove(began - self._fresh)
        return result

    def _drop(self) -> None:
        """Holding ``_lock``: the main session is of no use any more."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
        if self._engine.beacon_may_fail and not self._watched:
            self._member.lose_all("the connection that held it was lost, and grace is 0")

    def _enter(self) -> None:
        """Holding ``_lock``: a new main session, as the member we were or, failing that, as a new one."""
        self.require_open()
        if self.displaced is not None:
            raise Unavailable(f"{self.displaced}. Start this program again, it had locks or tasks in the old one")
        session = self._engine.connect("main")
        try:
            # Not under the eyes of the watch yet, and the server may fall silent here too.
            with time_limited(session, self._engine.setup):
                session.check_schema()
                began = monotonic()
                member_id = self.member_id
                if member_id is not None and not session.reattach_member(member_id):
                    log.warning("%s gave this process up while it was out of reach", self._engine.label)
                    self._member.lose_all(
                        "the database was out of reach for longer than the grace, and this process was given up"
                    )
                    member_id = None
                if member_id is None:
                    member_id = session.register_member(socket.gethostname(), os.getpid(), program_name())
        except BaseException:
            session.close()
            raise
        shutdown.watch_child()
        came_back = self.member_id == member_id
        try:
            self.member_id, self.session = member_id, session
            self._member.entered(began, came_back)
        except BaseException:  # an interrupt, for one: who is in only half comes in again
            self.session = None
            session.close()
            raise

    def given_up(self) -> Disconnected:
        """The database knows this member no more: what the call that found it out raises, to come back as a new one."""
        self.member_id = None
        return Disconnected(f"{self._engine.label} has given this process up")

    def interrupt_overdue(self) -> None:
        """A thread may sit in a call that will never be answered: end that call."""
        session, since = self.session, self._calling
        overdue = self._overdue.seconds
        if session is not None and since is not None and self._watched and monotonic() - since > overdue:
            log.warning("%s has not answered for %.1f s; dropping the connection", self._engine.label, overdue)
            self._unanswered = session
            session.interrupt()

    def stuck_in(self) -> str | None:
        """Where in a program's code the thread stands that holds the session; None where there is none."""
        for frame in sys._current_frames().values():
            step: FrameType | None = frame
            while step is not None:
                if step.f_code in HOLDING and step.f_locals.get("self") is self:
                    return foreign_place(frame)
                step = step.f_back
        return None

    def leave(self, waiting: Iterable[Ticket], seconds: float) -> bool:
        """Leave the database, with all rows: those of ``waiting`` as cancelled. False when a call does not end."""
        self.closing.set()
        self.interrupt_overdue()
        for attempt in range(2):
            with runtime.had_within(self._lock, seconds / 2) as had:
                session = self.session
                if had:
                    if session is not None:
                        if self.member_id is not None:
                            self._resign(session, self.member_id, waiting, seconds / 2)
                        session.close()
                        self.session = None
                    return True
            if session is not None and attempt == 0:
                session.interrupt()
        log.error("A call on %s does not end; its connection is left behind", self._engine.label)
        return False

    def _resign(self, session: Session, member_id: int, waiting: Iterable[Ticket], seconds: float) -> None:
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(seconds),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            retry=tenacity.retry_if_exception_type(Busy),
            reraise=True,
        )
        try:
            with time_limited(session, seconds):
                for ticket in waiting:
                    with contextlib.suppress(Busy):  # it goes with the others
                        session.release(ticket, "cancelled")
                retrying(session.deregister_member, member_id)
        except SqlsemError as exc:
            log.warning("Could not leave %s in order, others will notice: %s", self._engine.label, exc)


#: What runs only while the session is held.
HOLDING = frozenset({MainConnection._attempt.__code__, MainConnection._enter.__code__})


def unavailable(what: str, exc: Disconnected, statistics: dict[str, Any]) -> Unavailable:
    """What is raised when the attempts of `MainConnection.policy` are used up."""
    attempts = statistics.get("attempt_number", 1)
    question = "" if isinstance(exc, Refused) else "; is the server up, and the address right?"
    return Unavailable(
        f"{exc} ({what}: {attempts} attempt{'s' if attempts != 1 else ''} in "
        f"{time.monotonic() - statistics['start_time']:.1f} s{question})"
    )
