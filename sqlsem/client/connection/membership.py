"""The membership of this process in one database: its rows, and the two threads that keep and watch them.

The main connection (`sqlsem.client.connection.main`) holds the beacon, registers, releases and sends heartbeats. For
the database, only a recorded *heartbeat* proves that this process is alive (`LockSession` says which calls
count as one). Two threads start with the first connection:

heartbeat
    sends a heartbeat every third of the grace, compares the rows in the database with the local copy, and runs
    deferred calls
watchdog
    reads only the clock, so no network can delay it; marks all locks lost when the last heartbeat is too old, before
    another process can be granted them

Neither runs code of the program (`sqlsem.util.threads`), and each restarts the other one if that ends. If the heartbeat
thread cannot continue all the same, everything is marked lost, because no further loss would be noticed.

Invariants
    ``state_lock`` guards the local copy of the state (``tickets`` here; grants and queues elsewhere). No thread holds
    it during I/O, or waits for the main connection with it.
    The threads keep the coordinator alive only while it has rows (`_WeakOwner`): a dropped coordinator is closed.
    ``_last_heartbeat`` only moves forward, and the heartbeat recorded in the database is never older. It is the time
    when the last heartbeat call *began*; less an eighth of the grace or lease if the call may have left a recorded
    heartbeat of that age alone. So no other process is granted our locks before it plus the grace, or the lease.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from sqlsem.client.connection.main import MainConnection
from sqlsem.client.connection.retention import RetentionCleaner
from sqlsem.client.effects import Call, Effects
from sqlsem.engines.failures import Busy, Disconnected
from sqlsem.util import runtime, shutdown
from sqlsem.util.permits import Permit
from sqlsem.util.threads import ShouldContinue, SupervisedThread, log, restart_ended, when_all
from sqlsem.values.errors import SqlsemError
from sqlsem.values.locks import Ticket

if TYPE_CHECKING:
    from sqlsem.engines.base import Engine, Session

__all__ = ["Membership", "MembershipOwner"]

T = TypeVar("T")

#: Seconds to wait for the threads when a coordinator is closed.
CLOSE_JOIN_SECONDS = 10.0
#: If a thread wakes this many seconds late, the whole process was probably paused.
PAUSED_SECONDS = 0.25
#: The pause between two checks of a thread that may be stuck, and the least delay that counts as late.
SUSPECT_SECONDS, LATE_SECONDS = 0.1, 0.5
#: After this many requests of the process, check that the threads run.
CHECK_EVERY = 32
#: Seconds to wait for the database's answer after a pause, before everything is marked lost.
VERIFY_SECONDS = 1.0


class MembershipOwner:
    """Callbacks of the membership to its owner, the client of a coordinator. Those of a dropped owner do nothing."""

    def mark_lost(self, positions: Collection[int] | None, why: str) -> list[Future[None]]:
        """Mark the grants of these rows (None: all grants and claims) lost. Return the started callbacks."""
        return []

    def wake_waiters(self, positions: Collection[int]) -> None:
        """Wake the waiters of these rows, which were removed."""

    def interrupt_overdue(self) -> None:
        """Interrupt waits whose answer is overdue."""

    def calls_to_repeat(self) -> Iterable[Callable[[Session, int], object]]:
        """Return the calls to repeat after a failover: recent changes that our rows do not show."""
        return ()

    def clean_up(self) -> None:
        """Discard state of closed event loops, and wake waiters that missed their notification."""


class _WeakOwner:
    """A reference to the owner: weak, but strong while the owner has rows."""

    def __init__(self, owner: MembershipOwner) -> None:
        self.reference = weakref.ref(owner)
        self.pinned: MembershipOwner | None = None  # the owner, while it has rows

    def pin(self) -> None:
        """Keep the owner alive: it has rows."""
        self.pinned = self.pinned or self.reference()

    def __call__(self) -> MembershipOwner:
        owner = self.reference()
        return MembershipOwner() if owner is None else owner


class Membership:
    """The member of this process in one database."""

    def __init__(self, engine: Engine, owner: MembershipOwner, retry: float) -> None:
        self.engine, self.timing = engine, engine.options.timing
        self.retry = retry
        self._runtime = runtime.current()
        self.clock = self._runtime.monotonic
        self._owner = _WeakOwner(owner)
        options, timing = engine.options, self.timing
        life = self._life = options.grace if options.lease is None else options.lease
        # The age of the last heartbeat at which the watchdog acts; 0: never. SQLite needs no watchdog, because nothing
        # can be lost while we live. With grace=0 a loss could not be noticed in time.
        watched = options.lease is not None or engine.beacon_may_fail
        # An operator may revoke a row while we live. After this time without a heartbeat we may not know of it.
        self._certain_seconds = life - min(1.0, life / 5)
        self.trust = self._certain_seconds if watched else 0.0
        self._heartbeat_interval = max(timing.shortest_heartbeat, life * timing.heartbeat_share) if life else 0.5
        usual_interval = max(self._heartbeat_interval, life / 3)  # a shorter one makes no server and no thread faster
        self._heartbeat_timeout = min(retry, usual_interval)
        # The interval while nothing is held or requested. (A lease needs the usual one.)
        self._leased = options.lease is not None
        self._idle_interval = self._heartbeat_interval if self._leased else engine.idle_heartbeat

        self.state_lock = threading.Lock()
        self.tickets: dict[int, Ticket] = {}  # our rows, as far as we know
        #: The collections of what this process holds and could lose: its grants, its claims.
        self.held: list[Collection[object]] = []
        self._pending_registrations: dict[str, float] = {}  # registrations whose outcome is unknown, and their start
        self._deferred_releases: dict[Ticket, Callable[[Session, int], object]] = {}  # of rows that are locked
        #: Calls to run when the database is in reach. (Finalizers append to it without a lock.)
        self.deferred_calls: deque[Callable[[Session, int], object]] = deque()
        # The work for which the owner is kept alive, beside a requested cleanup.
        self._work: tuple[Collection[object], ...] = (self.tickets, self.deferred_calls, self._deferred_releases)
        #: The connection on which calls are made.
        self.main = MainConnection(engine, self, retry, life, self.trust)
        self.closing = self.main.closing
        self._last_heartbeat = self.clock()
        self._activity = 0
        self._retention = RetentionCleaner(engine, self.main, self._heartbeat_interval / 3)
        self.heartbeat_thread = SupervisedThread(
            "sqlsem-heartbeat", self._run_heartbeat, self.closing, vital=True, blocked_at=self.main.stuck_location
        )
        self.watchdog = SupervisedThread("sqlsem-watchdog", self._run_watchdog, self.closing, vital=True)
        self._tolerance = max(LATE_SECONDS, usual_interval * 0.75)  # how late a thread may be
        self._releasing: set[int] = set()  # revoked rows that wait for the callbacks of their loss before their release
        self._wakeup = runtime.event()  # wakes the heartbeat thread
        self._resting = False  # True: the heartbeat thread sleeps long, so wake it when there are rows
        self._heartbeat_now = False  # True: send a heartbeat at once
        self._cleanup_requested = False  # True: rows that we discarded may still exist; a heartbeat has to delete them
        self._heartbeat_recorded = self._runtime.condition(self.state_lock)  # notified when a heartbeat is recorded
        self._verifying: weakref.WeakSet[Permit] = weakref.WeakSet()  # of each thread that waits for a heartbeat

    @property
    def member_id(self) -> int | None:
        """The number of our member in the database; None before the first connection."""
        return self.main.member_id

    # -- the main connection ------------------------------------------------------------------------------------

    def call(
        self,
        what: str,
        call: Callable[[Session, int], T],
        retry_timeout: float | None = None,
        *,
        counts_as_heartbeat: bool = False,
    ) -> T:
        """See `MainConnection.call`. For threads of the program: it blocks a daemon at the end of the interpreter."""
        try:
            return self.main.call(what, call, retry_timeout, counts_as_heartbeat=counts_as_heartbeat)
        except BaseException:
            shutdown.block_daemon_thread()
            raise

    def connected(self, began: float, came_back: bool) -> None:
        """Handle a new main connection, begun at ``began``. ``came_back``: True if the member is the same as before."""
        if not self.has_any():
            self.record_heartbeat(began)
        if came_back:
            # A server that took over, or was restored, may lack our recent changes.
            self.deferred_calls.extend(self._owner().calls_to_repeat())
            self.wake_heartbeat()
        self.heartbeat_thread.begin()
        self.watchdog.begin()

    # -- our rows -----------------------------------------------------------------------------------------------

    def begin_registration(self, uid: str) -> None:
        """Mark a registration as pending. Until `end_registration`, heartbeats do not delete unknown rows of our
        member, because they may belong to the registration. Call with the main connection's lock held.
        """
        began = self.main.call_began
        self._pending_registrations[uid] = self.clock() if began is None else began

    def end_registration(self, uid: str) -> None:
        """Mark a registration as ended. Idempotent."""
        self._pending_registrations.pop(uid, None)

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Add new rows of this member (none for a claim), and wake the heartbeat thread from a long sleep."""
        with self.state_lock:
            for ticket in tickets:
                self.tickets[ticket.position] = ticket
                self._owner.pinned = self._owner.reference()
        self._activity += 1
        if not self._activity % CHECK_EVERY and not self.heartbeat_thread.runs:
            self.wake_heartbeat()
        # (Read after the rows are added: the heartbeat thread sets the flag, and then reads the rows.)
        if self._resting:
            self._wakeup.set()

    def discard(self, tickets: Iterable[Ticket]) -> None:
        """Discard the tickets of rows that were removed, or that the next heartbeat is to delete. Stop keeping the
        owner alive if we have no rows, and nothing is deferred.
        """
        with self.state_lock:
            for ticket in tickets:
                self.tickets.pop(ticket.position, None)
            if not (any(self._work) or self._cleanup_requested):
                self._owner.pinned = None
                if any(self._work) or self._cleanup_requested:  # a call that takes no lock has added something just now
                    self._owner.pin()

    def has_ticket(self, ticket: Ticket) -> bool:
        """Return True unless this process knows that the row was removed."""
        return ticket.position in self.tickets

    def defer_release(self, ticket: Ticket, release: Callable[[Session, int], object]) -> None:
        """Have the heartbeat thread make the call that releases a row, as soon as no transaction locks the row."""
        with self.state_lock:
            self._deferred_releases[ticket] = release
        self._wakeup.set()

    def defer(self, call: Callable[[Session, int], object]) -> None:
        """Have the heartbeat thread make an idempotent call soon. By then this process may have another member."""
        self.deferred_calls.append(call)
        self._owner.pin()
        self.wake_heartbeat()

    def wake_heartbeat(self) -> None:
        """Have the heartbeat thread send a heartbeat at once."""
        self._heartbeat_now = True
        self._wakeup.set()
        if not self.heartbeat_thread.runs:
            restart_ended()  # both threads may have ended together

    def request_cleanup(self) -> None:
        """Have the next heartbeat delete the rows of our member that we do not know: some could not be released."""
        self._cleanup_requested = True
        self._owner.pin()
        self.wake_heartbeat()

    def seconds_until_loss(self) -> float | None:
        """Return the seconds until our grants become uncertain without a further heartbeat; None if never."""
        return max(0.0, self._last_heartbeat + self.trust - self.clock()) if self.trust else None

    # -- heartbeats ------------------------------------------------------------------------------------------

    def has_any(self) -> bool:
        """Return True if this process has rows, grants or claims.

        Then only a heartbeat proves that it still has them: an operator may have revoked a row, even one that was
        granted just now and whose grant is not in the registry yet.
        """
        return bool(self.tickets) or any(self.held)

    def record_heartbeat(self, since: float) -> None:
        """Record that the database has one of our heartbeats, not older than ``since``."""
        self._last_heartbeat = max(self._last_heartbeat, since)
        if self._verifying:
            with self._heartbeat_recorded:
                self._heartbeat_recorded.notify_all()

    def _run_heartbeat(self, should_continue: ShouldContinue) -> None:
        if self.has_any():
            self.wake_heartbeat()  # the previous thread may have ended when a heartbeat was due
        last_activity = 0
        while should_continue():
            # Rest only after a whole interval without activity, so that a busy process is not woken at every lock.
            self._resting = last_activity == self._activity
            if any(self._work) or any(self.held) or self._pending_registrations or self._cleanup_requested:
                self._resting = False
            last_activity = self._activity
            was_resting = self._resting
            pause = self._idle_interval if was_resting else self._heartbeat_interval
            self.heartbeat_thread.due = self.clock() + pause + self._tolerance
            woken = self._wakeup.wait(pause)
            self.heartbeat_thread.due = self.clock() + self._tolerance
            self._resting = False
            self._wakeup.clear()
            # A call during the pause has kept the connection open.
            was_used = not self._leased and self.clock() - self._last_heartbeat < pause
            if was_resting and not self._heartbeat_now and (woken or was_used):
                continue
            self._heartbeat_now = False
            self.watchdog.repair()
            if self.main.replaced_because is not None:
                continue  # all locks are lost, and no row is left to release
            try:
                self._owner().clean_up()
                self.heartbeat()
                self.heartbeat_thread.replaced = 0
                self._run_deferred()
                self._retention.after_heartbeat(self._activity)
            except SqlsemError as exc:
                if not self.closing.is_set():
                    log.warning("The heartbeat to %s failed: %s", self.engine.label, exc)
                self.closing.wait(min(0.25, self._heartbeat_interval))
                if self.deferred_calls:
                    self.wake_heartbeat()
            except Exception:
                log.exception("The heartbeat to %s failed unexpectedly", self.engine.label)
                self.closing.wait(min(0.25, self._heartbeat_interval))

    def heartbeat(self) -> None:
        """Send a heartbeat, and compare the rows in the database with our tickets."""
        self.main.call("heartbeat", self._compare, self._heartbeat_timeout)

    def heartbeat_effects(self) -> Effects[None]:
        """Send a heartbeat as `heartbeat` does, as a generator of effects."""
        yield Call("heartbeat", self._compare, self._heartbeat_timeout)

    def _compare(self, session: Session, member_id: int) -> None:
        # The main connection is locked: none of our rows is registered or released meanwhile.
        began = self.clock()
        answer = session.heartbeat(member_id)
        if not answer.known:
            failure = self.main.member_removed()
            self.mark_all_lost("this process was out of reach for longer than its grace, and was removed")
            raise failure
        with self.state_lock:
            gone = [position for position in self.tickets if position not in answer.positions]
            # (Removed here, whatever fails below: an acquisition that ends now must not find a revoked ticket.)
            revoked = [self.tickets.pop(position) for position in answer.revoked if position in self.tickets]
            for position in gone:
                del self.tickets[position]
            # (An interrupt may have left a registration pending for ever, so its age is limited.)
            pending = any(
                self.clock() - since < 2 * self.retry + 10 for since in list(self._pending_registrations.values())
            )
            positions = [ticket.position for ticket in revoked]
            orphans = set() if pending else answer.positions.difference(self.tickets, positions, self._releasing)
        if gone:
            self._owner().mark_lost(gone, "its row was removed")
        callbacks: list[Future[None]] = []
        if revoked:
            callbacks = self._owner().mark_lost(positions, "an operator revoked it")
            self._owner().wake_waiters(positions)
            self._cleanup_requested = True
        # Only after the losses are marked: `verify` waits for this, and then reads if its lock is lost.
        self.record_heartbeat(began)

        def release_revoked(session: Session, _: int) -> None:
            for ticket in revoked:
                session.release(ticket, "revoked")
            self._releasing.difference_update(positions)

        if callbacks:
            # Release after the callbacks have returned, because they may have to stop the protected work. (A callback
            # that hangs blocks no other process: these rows expire by the database's clock.)
            self._releasing.update(positions)
            when_all(callbacks, functools.partial(self.defer, release_revoked))
        else:
            release_revoked(session, member_id)
        if orphans:
            # An interrupted call left these rows; or the server crashed, and lost a release.
            for entry in session.entries(None):
                if entry.member_id == member_id and entry.position in orphans:
                    log.info("Deleting an orphaned row of ours: %r at %d", entry.resource, entry.position)
                    usual = "cancelled" if entry.granted_at is None else "released"
                    outcome = "revoked" if entry.position in answer.revoked else usual
                    session.release(Ticket(entry.resource, entry.position, entry.requesting_id, False), outcome)
        self._cleanup_requested = pending and self._cleanup_requested
        self.discard(())

    def _run_deferred(self) -> None:
        while self.deferred_calls:
            try:
                self.main.call("deferred call", self.deferred_calls[0], 0.0)
            except (Disconnected, Busy):
                raise  # try again at the next heartbeat
            except Exception as exc:  # must not block the calls after it
                log.warning("A deferred call failed and is dropped: %s", exc, exc_info=not isinstance(exc, SqlsemError))
            if self.deferred_calls:  # (empty if the database was replaced meanwhile)
                self.deferred_calls.popleft()
        for ticket, release in list(self._deferred_releases.items()):
            with contextlib.suppress(Busy):
                self.main.call("release", release, 0.0)
                with self.state_lock:
                    self._deferred_releases.pop(ticket, None)
        self.discard(())

    def _run_watchdog(self, should_continue: ShouldContinue) -> None:
        while should_continue():
            pause = _watchdog_pause(self)
            self.watchdog.due = self.clock() + pause + self._tolerance
            if self.closing.wait(pause):
                return
            self.watchdog.due = self.clock() + VERIFY_SECONDS + self._tolerance
            is_stuck = self.heartbeat_thread.repair()
            restart_ended()
            if is_stuck or (not self.heartbeat_thread.runs and self.is_uncertain()):
                self.verify(heartbeat_stopped=True)
            self.main.interrupt_overdue()
            self._owner().interrupt_overdue()
            late = -self._seconds_until_uncertain()
            if late < 0 or not self.trust or not any(self.held):
                continue
            # If this thread woke late, the process was paused, and may hold its locks yet. Else a heartbeat is overdue.
            if late > PAUSED_SECONDS:
                self.verify()
            elif self._seconds_until_uncertain() <= 0:
                self._mark_lost_and_interrupt()

    def _seconds_until_uncertain(self) -> float:
        """Return the seconds until the last heartbeat is too old; with nothing held, the time that a new lock has."""
        if not self.trust:
            return math.inf
        remaining = self._last_heartbeat + self.trust - self.clock()
        return remaining if remaining > 0 or any(self.held) else self.trust

    def is_uncertain(self) -> bool:
        """Return True if we hold grants and the last heartbeat is too old, for example after SIGSTOP. Another process
        may hold our locks by now, or an operator may have revoked a row: verify first.
        """
        return self.clock() - self._last_heartbeat > self._certain_seconds > 0 and any(self.held)

    def verify(self, *, heartbeat_stopped: bool = False) -> None:
        """If our grants are uncertain, wait up to a second for a heartbeat; without one, mark everything lost.

        On an engine without watchdog (``trust`` is 0) nothing is marked lost: only an operator could have revoked a
        row, and the answer may be late for other reasons. If only this thread is late, so that no other process can be
        granted our locks yet, the wait ends before one can. ``heartbeat_stopped``: the heartbeat thread does not run,
        so mark everything lost in each of these cases.
        """
        if not (heartbeat_stopped and any(self.held)) and not self.is_uncertain():
            return
        requested_at = self.clock()
        remaining = self._last_heartbeat + self._life - requested_at
        seconds = min(VERIFY_SECONDS, remaining / 2) if remaining > 0 and self.trust else VERIFY_SECONDS
        self.wake_heartbeat()
        verifying = Permit()
        try:
            self._verifying.add(verifying)
            with self._heartbeat_recorded:
                self._heartbeat_recorded.wait_for(
                    lambda: self._last_heartbeat >= requested_at or self.closing.is_set(), seconds
                )
        finally:
            self._verifying.discard(verifying)
        if self._last_heartbeat < requested_at and not self.closing.is_set() and (self.trust or heartbeat_stopped):
            self._mark_lost_and_interrupt("its heartbeat thread does not run" if heartbeat_stopped else "")

    def _mark_lost_and_interrupt(self, why: str = "") -> None:
        self.mark_all_lost(why or f"{self.engine.label} has not answered a heartbeat for {self.trust:.1f} s")
        self.main.interrupt_overdue()

    def mark_all_lost(self, why: str, *, for_good: bool = False) -> bool:
        """Mark all grants and claims lost. ``for_good``: drop deferred calls too. Return True if there were any."""
        had_deferred = bool(self.deferred_calls or self._deferred_releases)
        if for_good:
            self.deferred_calls.clear()
        with self.state_lock:
            if for_good:
                self._deferred_releases.clear()
            self.tickets.clear()
        self._cleanup_requested = not for_good
        self._owner().mark_lost(None, why)
        self.discard(())
        return had_deferred

    # -- closing ------------------------------------------------------------------------------------------------

    def close(
        self, waiting: Iterable[Ticket] = (), endings: Callable[[], Iterable[Callable[[Session, int], object]]] = tuple
    ) -> bool:
        """End the threads, make the deferred calls and those that ``endings`` returns, cancel the rows of ``waiting``,
        and deregister the member. Return False if a call hangs.
        """
        self.closing.set()
        self._wakeup.set()
        with self._heartbeat_recorded:
            self._heartbeat_recorded.notify_all()
        deadline = self.clock() + CLOSE_JOIN_SECONDS
        if not self.main.deregister(waiting, lambda: (*self.deferred_calls, *endings()), CLOSE_JOIN_SECONDS):
            return False
        for thread in (self.heartbeat_thread, self.watchdog):
            thread.join(max(0.0, deadline - self.clock()))
        return True


def _watchdog_pause(member: Membership) -> float:
    """Return the seconds until something of a member may be late."""
    until_uncertain, until_overdue = member._seconds_until_uncertain(), member.main.seconds_until_overdue()
    pause = min(member._heartbeat_interval, until_uncertain, until_overdue)
    if member.heartbeat_thread.is_suspect:
        pause = min(pause, SUSPECT_SECONDS)
    until_due = member.heartbeat_thread.due - member.clock()
    if until_due > 0:  # else it was seen to be late, and its database is slow
        pause = min(pause, until_due)
    return max(0.01, pause)
