"""The main connection of this process: it holds the beacon, and executes all calls that need a member.

A broken connection is replaced, and the call is retried with bounded, jittered delays.

Invariants
    ``_lock`` guards the connection. A thread that holds it waits only for one bounded statement, or for one attempt to
    connect.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from sqlsem.client.connection.retries import Retries
from sqlsem.engines.failures import AdaptiveTimeout, Busy, Disconnected, Replaced, Unanswered, time_limited
from sqlsem.util import runtime, shutdown
from sqlsem.util.process import host_name, program_name
from sqlsem.util.stacks import program_location
from sqlsem.util.threads import log
from sqlsem.values.errors import ConfigurationError, SqlsemError, Unavailable
from sqlsem.values.locks import Ticket

if TYPE_CHECKING:
    from sqlsem.client.connection.membership import Membership
    from sqlsem.engines.base import Engine, Session

__all__ = ["MainConnection"]

T = TypeVar("T")

#: A statement gets at least this many seconds, however short the grace: a slow server is not dead.
OVERDUE_SECONDS = 1.0
#: Where another server can take over, a call may take this part of the time for which our locks are certain. So a
#: heartbeat, which begins after a third of the lease, can be repeated on that server in time.
SWITCH_SHARE = 1 / 3
#: A call that counts as a heartbeat leaves a record alone that is younger than this part of the grace or lease.
FRESH = 1 / 8


class MainConnection:
    """The main connection, which reconnects as needed. It calls the membership back with its lock held.

    ``life``: the seconds after which the database takes a member without heartbeat for dead. ``trust``: seconds after
    the last heartbeat for which our locks are certain; 0: no watchdog checks that.
    """

    def __init__(self, engine: Engine, member: Membership, retry: float, life: float, trust: float) -> None:
        self.closing = runtime.event()
        #: The calls that are tried until one attempt succeeds, for displays.
        self.trying: set[Retries] = set()
        self.session: Session | None = None
        self.member_id: int | None = None  # the number of our member; None before the first connection
        self._engine = engine
        self._member = member
        self._retry = retry
        self._watched = trust > 0
        self._fresh = life * FRESH
        self._lock = runtime.lock()
        self.clock = runtime.current().monotonic
        self._last_refusal = (-math.inf, "")  # when the last attempt to connect failed, and its error
        self.call_began: float | None = None  # when the current call began; guarded by the connection's lock
        self._can_switch = engine.has_other_servers
        #: How long a call may take at first.
        self.answer_seconds = max(trust * SWITCH_SHARE if self._can_switch else trust, OVERDUE_SECONDS)
        # How long a call may take, by the server: the others are not slow if one is.
        self._overdue: defaultdict[str, AdaptiveTimeout] = defaultdict(
            functools.partial(AdaptiveTimeout, self.answer_seconds)
        )
        self._unanswered: Session | None = None  # the connection that the watchdog interrupted
        #: Why no call is possible any more: another database replaced ours, where our positions mean other rows.
        self.replaced_because: str | None = None

    def require_open(self) -> None:
        """Raise `ConfigurationError` after `deregister`, and as soon as ``closing`` is set."""
        if self.closing.is_set():
            raise ConfigurationError("This coordinator is closed; make a new one with sqlsem.connect(…)", code="closed")

    def call(
        self,
        what: str,
        call: Callable[[Session, int], T],
        retry_timeout: float | None = None,
        *,
        counts_as_heartbeat: bool = False,
    ) -> T:
        """Execute ``call(session, member_id)`` on the main connection, reconnecting as needed.

        Retries for ``retry_timeout`` seconds at most (None: ``retry``), then raises the last error and the number of
        attempts.
        ``counts_as_heartbeat``: a successful call counts as a heartbeat.
        """
        if self.closing.is_set():
            self.require_open()
        if self.session is not None:
            # The usual case. (With `with`, no interrupt can come between the lock and its block.)
            try:
                with self._lock:
                    if self.session is not None:
                        return self._attempt(call, counts_as_heartbeat)
            except (Disconnected, Busy) as exc:
                log.info("%s failed, retrying: %s", what, exc)
        with self.retries(what, retry_timeout) as retries:
            while True:
                try:
                    return self.try_once(call, counts_as_heartbeat=counts_as_heartbeat)
                except (Disconnected, Busy) as exc:
                    pause = retries.pause_or_raise(exc)
                self.closing.wait(pause)

    def retries(self, what: str, retry_timeout: float | None = None) -> Retries:
        """Return the attempts of a call. A slow server gets one more, unless the caller has a short timeout."""
        seconds = self._retry if retry_timeout is None else retry_timeout
        return Retries(
            what, seconds, is_patient=seconds >= self._retry, is_closing=self.closing.is_set, running=self.trying
        )

    def try_once(
        self, call: Callable[[Session, int], T], started_at: float | None = None, *, counts_as_heartbeat: bool = False
    ) -> T:
        """Execute ``call(session, member_id)`` once on the main connection, connecting if needed. See `call`.

        ``started_at``: when the caller started to wait. If another caller's attempt to connect failed since then, fail
        at once; otherwise N callers would wait for N connect timeouts in a row.
        """
        with self._lock:
            if self.session is None:
                refused_at, refusal = self._last_refusal
                if started_at is not None and refused_at > started_at:
                    raise Disconnected(refusal)
                try:
                    self._connect()
                except Disconnected as exc:
                    self._last_refusal = (self.clock(), str(exc))
                    raise
            return self._attempt(call, counts_as_heartbeat)

    def _attempt(self, call: Callable[[Session, int], T], counts_as_heartbeat: bool) -> T:
        """Execute one call, and discard the connection if it breaks. Called with ``_lock`` held."""
        session = self.session
        assert session is not None
        if self.member_id is None:  # the member was removed, and an interrupt kept the connection from being discarded
            self._discard_connection()
            raise self.member_removed()
        # While we have rows, the answer to another call proves nothing: an operator may have revoked a row.
        had_any = self._member.has_any()
        is_proof = counts_as_heartbeat and not had_any
        began = self.call_began = self.clock()
        try:
            try:
                result = call(session, self.member_id)
            except SqlsemError:
                session.require_in_place()  # if the database was replaced, this error says more
                raise
            session.require_in_place()
        except BaseException as exc:
            # An exception in a signal handler may leave a connection in the middle of a statement. And a member that
            # was removed has to register again, on a new connection.
            session.recover()
            if isinstance(exc, Replaced):
                # Mark losses before the beacon ends: programs that use the new database wait for that end. Our
                # positions mean other rows there, so a process that has rows must not go on.
                self.member_id = None
                if self._member.mark_all_lost(str(exc), for_good=True) or had_any:
                    self.replaced_because = str(exc)
            if not session.usable or self.member_id is None:
                was_late, self._unanswered = self._unanswered is session, None
                self._discard_connection()
                if was_late and isinstance(exc, Disconnected):
                    raise Unanswered.of(exc, self._overdue[session.server]) from exc
            raise
        finally:
            self.call_began = None
        if is_proof:
            self._member.record_heartbeat(began - self._fresh)
        return result

    def _discard_connection(self) -> None:
        """Close the connection. Called with ``_lock`` held."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
        if self._engine.beacon_may_fail and not self._watched:
            self._member.mark_all_lost("the connection that held it was lost, and grace is 0")

    def _connect(self) -> None:
        """Connect as the same member or, if it was removed, as a new one. Called with ``_lock`` held."""
        self.require_open()
        if self.replaced_because is not None:
            raise Unavailable(
                f"{self.replaced_because}. Start this program again, it had locks or tasks in the old one",
                code="sqlite-file",
            )
        shutdown.watch_child()
        session = self._engine.connect("main")
        try:
            # The watchdog does not watch this connection yet, and the server may stop answering here too.
            with time_limited(session, self._engine.setup):
                session.check_schema()
                began = self.clock()
                member_id = self.member_id
                if member_id is not None and not session.reattach_member(member_id):
                    log.warning("%s removed this process while it was out of reach", self._engine.label)
                    self._member.mark_all_lost(
                        "the database was out of reach for longer than the grace, and this process was removed from it"
                    )
                    member_id = None
                if member_id is None:
                    member_id = session.register_member(host_name(), os.getpid(), program_name())
        except BaseException:
            session.close()
            raise
        came_back = self.member_id == member_id
        try:
            self.member_id, self.session = member_id, session
            self._member.connected(began, came_back)
        except BaseException:  # an interrupt, for example: connect again next time
            self.session = None
            session.close()
            raise

    def member_removed(self) -> Disconnected:
        """Discard the number of our removed member, so that a retry registers again. Return the error to raise."""
        self.member_id = None
        return Disconnected(f"{self._engine.label} has removed this process")

    def interrupt_overdue(self) -> None:
        """Interrupt the current call if its answer is overdue."""
        session, since = self.session, self.call_began
        if session is None or since is None or not self._watched:
            return
        overdue = self._overdue[session.server].seconds
        if self.clock() - since > overdue:
            place = session.server or self._engine.label
            log.warning("%s has not answered for %.1f s; dropping the connection", place, overdue)
            self._unanswered = session
            session.interrupt()

    def seconds_until_overdue(self) -> float:
        """Return the seconds after which the watchdog must look at the current call, or at one that begins now. (Where
        no other server can take over, its usual interval will do.)
        """
        session, since = self.session, self.call_began
        if not self._can_switch:
            return math.inf
        if session is None or since is None or session is self._unanswered:
            return self.answer_seconds
        return since + self._overdue[session.server].seconds - self.clock()

    def stuck_location(self) -> str | None:
        """Return the line of the program at which the thread with the connection's lock stands; None if at none."""
        for frame in sys._current_frames().values():
            step: FrameType | None = frame
            while step is not None:
                if step.f_code in LOCKED_CODE and step.f_locals.get("self") is self:
                    return program_location(frame)
                step = step.f_back
        return None

    def deregister(
        self,
        waiting: Iterable[Ticket],
        endings: Callable[[], Iterable[Callable[[Session, int], object]]],
        seconds: float,
    ) -> bool:
        """Make the calls of ``endings()``, which end the member's claims. Deregister the member, and remove its rows:
        those of ``waiting`` as cancelled. Return False if a call on the connection does not end.
        """
        self.closing.set()
        self.interrupt_overdue()
        for attempt in range(2):
            with runtime.had_within(self._lock, seconds / 2) as acquired:
                session = self.session
                if acquired:
                    if session is not None:
                        if self.member_id is not None:
                            self._deregister(session, self.member_id, waiting, endings(), seconds / 2)
                        session.close()
                        self.session = None
                    return True
            if session is not None and attempt == 0:
                session.interrupt()
        log.error("A call on %s does not end; its connection stays open", self._engine.label)
        return False

    def _deregister(
        self,
        session: Session,
        member_id: int,
        waiting: Iterable[Ticket],
        endings: Iterable[Callable[[Session, int], object]],
        seconds: float,
    ) -> None:
        retries = Retries("Deregistering", seconds, is_patient=False, is_closing=lambda: False, running=set())
        try:
            with time_limited(session, seconds):
                for ticket in waiting:
                    with contextlib.suppress(Busy):  # the row is removed with the member
                        session.release(ticket, "cancelled")
                for end in endings:
                    if retries.remaining < seconds / 2:
                        break  # (Other processes recover the claims of a member that is gone.)
                    with contextlib.suppress(Busy):
                        end(session, member_id)
                while True:
                    try:
                        session.deregister_member(member_id)
                        break
                    except Busy as exc:
                        pause = retries.pause_or_raise(exc)
                    runtime.event().wait(pause)
        except SqlsemError as exc:
            log.warning("Cannot deregister from %s; other processes will remove the rows: %s", self._engine.label, exc)


#: The code of the functions that run only with the lock held.
LOCKED_CODE = frozenset({MainConnection._attempt.__code__, MainConnection._connect.__code__})
