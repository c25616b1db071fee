"""This process as a member: its rows, and the two threads that look after it and its main session.

The main session (`sqlsem.core.main_connection`) holds the beacon, registers, releases and pings. What the database
goes by is the last *sign of life* that it has written down (`LockSession` says which calls give one), so nothing else
proves that we live. Two threads, started with the first connection, look after it:

pulse
    pings every third of the grace, compares our rows with what we believe, gives back what could not be given back
watch
    looks only at the clock, so that no network can hold it up, and declares all locks lost when the last proof of life
    is too old: before anybody else can be let in

Neither runs any code of a program's (`sqlsem.core.threads`), and each begins the other one again, should that end.
Where the pulse cannot go on all the same, everything is declared lost: nobody would hear of a loss any more.

Invariants
    ``state_lock`` guards what we believe (``tickets`` here; grants and queues beside it). It is never held
    during I/O, and nobody who holds it waits for the main session.
    Its threads keep the coordinator alive as long as it has rows, and no longer (`_Weakly`): one that is dropped is
    closed.
    ``_proved`` only moves forward: no sign of life that the database has of us is older than this. When the call that
    gave the last one *began*, less an eighth of our life where the call may have found a sign that young and left it.
    So nobody can be let in before ``_proved`` plus the grace, or the lease.
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
from typing import Protocol, TypeVar

from sqlsem import runtime
from sqlsem.core.effects import Call, Effects
from sqlsem.core.main_connection import MainConnection
from sqlsem.core.permits import Permit, PermitPool
from sqlsem.core.retention import RetentionCleaner
from sqlsem.core.threads import ShouldContinue, SupervisedThread, tend, voice, when_all
from sqlsem.engines.base import Busy, Disconnected, Engine, Session
from sqlsem.errors import SqlsemError
from sqlsem.model import Ticket, monotonic

__all__ = ["Membership", "MembershipOwner"]

log = voice
T = TypeVar("T")

#: Seconds that threads get to end when a coordinator is closed.
CLOSE_JOIN_SECONDS = 10.0
#: Woken later than this many seconds, a thread was paused together with the whole process.
PAUSED_SECONDS = 0.25
#: Between two looks at a thread that is late and may be stuck; and how much later than it said a thread may be that is
#: not, at the least.
SUSPECT_SECONDS, LATE_SECONDS = 0.1, 0.5
#: After so many requests it is looked whether both threads have ended.
LOOK_EVERY = 32
#: Seconds for which the database is asked after a pause, before the worst is believed.
VERIFY_SECONDS = 1.0


class MembershipOwner(Protocol):
    """Who is told about our rows: the coordinator."""

    def mark_lost(self, positions: Collection[int] | None, why: str) -> list[Future[None]]:
        """These rows (None: all) are lost to us; declare so. Returns the callbacks that are under way."""

    def wake_waiters(self, positions: Collection[int]) -> None:
        """These rows, which were lost to us, are ours no more."""

    def holds_any(self) -> bool:
        """Whether anything is held that could be lost."""

    def interrupt_overdue(self) -> None:
        """End waits whose answer is overdue."""

    def calls_to_repeat(self) -> Iterable[Callable[[Session, int], object]]:
        """What was done of late and cannot be told from our rows: calls to do it again, if the server forgot."""

    def handle_release(self, ticket: Ticket, session: Session, member_id: int) -> None:
        """A number was given back, on this session, by the thread that calls."""

    def clean_up(self) -> None:
        """Give up what belonged to somebody who is no more."""


class _Weakly:
    """The owner, who is kept alive by its threads while it has rows, and no longer. After that nobody is told."""

    def __init__(self, owner: MembershipOwner) -> None:
        self._reference = weakref.ref(owner)
        self._pin: MembershipOwner | None = None

    def pin(self) -> None:
        """It has rows."""
        self._pin = self._pin or self._reference()

    def unpin(self) -> None:
        """It has none, and was told what has become of them."""
        self._pin = None

    def mark_lost(self, positions: Collection[int] | None, why: str) -> list[Future[None]]:
        owner = self._reference()
        return [] if owner is None else owner.mark_lost(positions, why)

    def wake_waiters(self, positions: Collection[int]) -> None:
        if (owner := self._reference()) is not None:
            owner.wake_waiters(positions)

    def holds_any(self) -> bool:
        owner = self._reference()
        return owner is not None and owner.holds_any()

    def interrupt_overdue(self) -> None:
        if (owner := self._reference()) is not None:
            owner.interrupt_overdue()

    def calls_to_repeat(self) -> Iterable[Callable[[Session, int], object]]:
        owner = self._reference()
        return () if owner is None else owner.calls_to_repeat()

    def handle_release(self, ticket: Ticket, session: Session, member_id: int) -> None:
        if (owner := self._reference()) is not None:
            owner.handle_release(ticket, session, member_id)

    def clean_up(self) -> None:
        if (owner := self._reference()) is not None:
            owner.clean_up()


class Membership:
    """The member that this process is in one database."""

    def __init__(self, engine: Engine, owner: MembershipOwner, retry: float) -> None:
        self.engine = engine
        self.retry = retry
        self._owner = _Weakly(owner)
        options = engine.options
        life = self._life = options.grace if options.lease is None else options.lease
        # How old the last proof of life may grow. 0: not watched, as nothing can be lost while we live (SQLite), or
        # as nothing could be known in time (grace=0).
        watched = options.lease is not None or engine.beacon_may_fail
        # Also while we live an operator may take a row away: after so long without a ping we may not know of it.
        self._certain = life - min(1.0, life / 5)
        self.trust = self._certain if watched else 0.0
        self._ping_every = max(0.2, life / 3) if life else 0.5
        self._ping_budget = min(retry, self._ping_every)
        # A ping costs the server little, but not nothing: with nothing held or wanted, keep the connection warm this
        # often. (Not so with a lease, which nobody renews meanwhile.)
        self._leased = options.lease is not None
        self._rest = self._ping_every if self._leased else engine.idle_heartbeat_seconds

        self.state_lock = threading.Lock()
        self.tickets: dict[int, Ticket] = {}  # our rows, as far as we know
        self._limbo: dict[str, float] = {}  # registrations whose outcome we do not know yet, and since when
        self._late: list[Ticket] = []  # still to be given back
        #: Still to be done, when the database can be reached. Appended to without a lock, as by finalizers.
        self.leftovers: deque[Callable[[Session, int], object]] = deque()
        #: The session that calls are made on.
        self.main = MainConnection(engine, self, retry, life, self.trust)
        self.closing = self.main.closing
        self._proved = monotonic()
        self._activity = 0
        self._retention = RetentionCleaner(engine, self.main, self._ping_every / 3)
        self._runtime = runtime.current()
        self.pulse = SupervisedThread("sqlsem-pulse", self._pulse, self.closing, vital=True, behind=self.main.stuck_in)
        self.watch = SupervisedThread("sqlsem-watch", self._watch, self.closing, vital=True)
        self._patience = max(LATE_SECONDS, self._ping_every * 0.75)  # how late one of them may be
        self._parting: set[int] = set()  # taken away, and given back when their owners have been told
        self._beat = runtime.event()  # wakes the pulse
        self._resting = False  # the pulse sleeps long: wake it when there is something to look after
        self._urgent = False  # ping at once
        self._disowned = False  # rows that we gave up may still stand: ping until one has removed them
        self._proofs = self._runtime.condition(self.state_lock)  # tells those who doubt
        self._doubting = PermitPool()

    @property
    def member_id(self) -> int | None:
        """Our number in the database, once we have one."""
        return self.main.member_id

    # -- the main session ------------------------------------------------------------------------------------

    def call(
        self, what: str, call: Callable[[Session, int], T], budget: float | None = None, *, sign: bool = False
    ) -> T:
        """See `MainConnection.call`."""
        return self.main.call(what, call, budget, sign=sign)

    def entered(self, began: float, came_back: bool) -> None:
        """There is a main session, made since then: as the member we were, or as a new one."""
        if not self.has_any():
            self.prove(began)
        if came_back:
            # A server that took over, or was restored, may not know all that we believe.
            self.leftovers.extend(self._owner.calls_to_repeat())
            self.urge()
        self.pulse.begin()
        self.watch.begin()

    # -- our rows -----------------------------------------------------------------------------------------------

    def registering(self, uid: str) -> None:
        """Until `settled`, rows that we do not know are no strangers: the answer may be on its way. To be called where
        the main session is held: as long as anybody is in limbo, no ping removes what interrupted calls have left.
        """
        self._limbo[uid] = monotonic()

    def settled(self, uid: str) -> None:
        """That registration is over. May be repeated."""
        self._limbo.pop(uid, None)

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Rows of ours that were just made; none where something else is held now. The pulse must not rest."""
        with self.state_lock:
            for ticket in tickets:
                self.tickets[ticket.position] = ticket
                self._owner.pin()
        self._activity += 1
        if not self._activity % LOOK_EVERY and not self.pulse.runs:
            self.urge()
        if self._resting:  # read after the rows were added, as the pulse looks for rows after it set this
            self._beat.set()

    def forget(self, tickets: Iterable[Ticket]) -> None:
        """Rows that are no more, or that the next ping shall remove. The owner is let go of when the database has no
        rows of ours, and nothing is left to do.
        """

        def owes() -> bool:
            return bool(self.tickets or self._disowned or self.leftovers or self._late)

        with self.state_lock:
            for ticket in tickets:
                self.tickets.pop(ticket.position, None)
            if not owes():
                self._owner.unpin()
                if owes():  # since just now, by a call that takes no lock
                    self._owner.pin()

    def knows(self, ticket: Ticket) -> bool:
        """Whether, as far as we know, the row is there."""
        return ticket.position in self.tickets

    def give_back(self, ticket: Ticket, outcome: str, budget: float | None = None) -> Effects[bool]:
        """Release one row; False when it was gone already. What its owner's own open transaction still holds on to
        (assert_held) is given back later, by the pulse.
        """

        attempts: list[int] = []  # as which member

        def release(session: Session, member_id: int) -> bool:
            attempts.append(member_id)
            there = session.release(ticket, outcome)
            self.forget([ticket])
            self._owner.handle_release(ticket, session, member_id)
            # Gone at a second attempt means that only the answer to the first was lost, as long as nobody gave us up.
            return there or (len(attempts) > 1 and attempts[0] == member_id)

        try:
            there: bool = yield Call("release", release, budget)
            return there
        except Busy as exc:
            log.warning("%r stays locked until the transaction that asserted it ends (%s)", ticket.resource, exc)
            with self.state_lock:
                self._late.append(ticket)
            self._beat.set()
            return True

    def later(self, call: Callable[[Session, int], object]) -> None:
        """Have the pulse do something as soon as it can. For what may be done twice, and for another member of ours."""
        self.leftovers.append(call)
        self._owner.pin()
        self.urge()

    def urge(self) -> None:
        """Have the pulse ping at once."""
        self._urgent = True
        self._beat.set()
        if not self.pulse.runs:
            tend()  # as both threads may have ended at once

    def disown(self) -> None:
        """Rows of ours that could not be given back may still stand: ping, until a ping has removed them."""
        self._disowned = True
        self._owner.pin()
        self.urge()

    def seconds_left(self) -> float | None:
        """For how long what we hold is ours even if nothing more is heard; None when that cannot end."""
        return max(0.0, self._proved + self.trust - monotonic()) if self.trust else None

    # -- proof of life ------------------------------------------------------------------------------------------

    def has_any(self) -> bool:
        """Whether any row is ours, or anything is held. Then only a ping proves anything, as it compares our rows: an
        operator may have taken one away, also one that was granted and is not in the books yet.
        """
        return bool(self.tickets) or self._owner.holds_any()

    def prove(self, since: float) -> None:
        """The database has a sign of life of ours that is not older than this."""
        self._proved = max(self._proved, since)
        if self._doubting:
            with self._proofs:
                self._proofs.notify_all()

    def _pulse(self, goes_on: ShouldContinue) -> None:
        if self.has_any():
            self.urge()  # the thread before may have ended when a ping was due: after another pause all would be lost
        seen = 0
        while goes_on():
            # Rest only after a whole round without activity, so that a busy process is not woken at every lock.
            self._resting = seen == self._activity
            held = self.tickets or self._limbo or self._late or self.leftovers or self._owner.holds_any()
            if self._resting and (held or self._disowned):
                self._resting = False
            seen = self._activity
            rested = self._resting
            pause = self._rest if rested else self._ping_every
            self.pulse.due = monotonic() + pause + self._patience
            woken = self._beat.wait(pause)
            self.pulse.due = monotonic() + self._patience
            self._resting = False
            self._beat.clear()
            was_used = not self._leased and monotonic() - self._proved < pause  # so it is warm without a ping
            if rested and not self._urgent and (woken or was_used):
                continue
            self._urgent = False
            self.watch.mend()
            if self.main.displaced is not None:
                continue  # all is lost, and nothing of it can be given back
            try:
                self._owner.clean_up()
                self.ping()
                self.pulse.replaced = 0
                self._give_back_late()
                self._retention.after_ping(self._activity)
            except SqlsemError as exc:
                if not self.closing.is_set():
                    log.warning("The ping of %s failed: %s", self.engine.label, exc)
                self.closing.wait(min(0.25, self._ping_every))
                if self.leftovers:
                    self.urge()
            except Exception:
                log.exception("The ping of %s failed unexpectedly", self.engine.label)
                self.closing.wait(min(0.25, self._ping_every))

    def ping(self) -> None:
        """Prove life, and compare what we believe with what is there."""
        self.call("ping", self._compare, self._ping_budget)

    def pinging(self) -> Effects[None]:
        """`ping`, as a verb."""
        yield Call("ping", self._compare, self._ping_budget)

    def _compare(self, session: Session, member_id: int) -> None:
        # Holding the main session: nothing of ours is registered or released meanwhile.
        began = monotonic()
        pulse = session.heartbeat(member_id)
        if not pulse.known:
            failure = self.main.given_up()
            self.lose_all("this process was out of reach for longer than its grace, and was given up")
            raise failure
        with self.state_lock:
            gone = [position for position in self.tickets if position not in pulse.positions]
            # (Forgotten at once: whatever fails below, who is about to have one must not find it here.)
            taken = [self.tickets.pop(position) for position in pulse.revoked if position in self.tickets]
            for position in gone:
                del self.tickets[position]
            # (What an interrupt left in limbo does not stay there for ever.)
            limbo = any(monotonic() - since < 2 * self.retry + 10 for since in list(self._limbo.values()))
            positions = [ticket.position for ticket in taken]
            strangers = set() if limbo else pulse.positions.difference(self.tickets, positions, self._parting)
        if gone:
            self._owner.mark_lost(gone, "its row was removed")
        callbacks: list[Future[None]] = []
        if taken:
            callbacks = self._owner.mark_lost(positions, "an operator took it away")
            self._owner.wake_waiters(positions)
            self._disowned = True
        self.prove(began)  # not before: who is in doubt takes it for the answer, and looks what has become of its lock

        def part(session: Session, _: int) -> None:
            for ticket in taken:
                session.release(ticket, "revoked")
            self._parting.difference_update(positions)

        if callbacks:
            # When they have returned, as they may have to end what the lock was for. (A callback that does not return
            # keeps nobody out: the time of these rows is up by the database's clock.)
            self._parting.update(positions)
            when_all(callbacks, functools.partial(self.later, part))
        else:
            part(session, member_id)
        if strangers:
            # Left by a call that was interrupted, or by a crash of the server that undid a release.
            for entry in session.entries(None):
                if entry.member_id == member_id and entry.position in strangers:
                    log.info("Removing a forgotten row of ours: %r at %d", entry.resource, entry.position)
                    ended = "cancelled" if entry.granted_at is None else "released"
                    outcome = "revoked" if entry.position in pulse.revoked else ended
                    session.release(Ticket(entry.resource, entry.position, entry.requesting_id, False), outcome)
        self._disowned = limbo and self._disowned
        self.forget(())

    def _give_back_late(self) -> None:
        while self.leftovers:
            try:
                self.call("what was left to do", self.leftovers[0], 0.0)
            except (Disconnected, Busy):
                raise  # later still
            except Exception as exc:  # never in the way of what comes after it
                log.warning("What was left to do cannot be done: %s", exc, exc_info=not isinstance(exc, SqlsemError))
            if self.leftovers:  # (nothing is left to do in a database that was replaced)
                self.leftovers.popleft()
        for ticket in list(self._late):

            def release(session: Session, member_id: int, ticket: Ticket = ticket) -> None:
                session.release(ticket, "released")
                with self.state_lock:
                    self._late.remove(ticket)
                self.forget([ticket])
                self._owner.handle_release(ticket, session, member_id)

            with contextlib.suppress(Busy):
                self.call("release", release, 0.0)
        self.forget(())

    def _watch(self, goes_on: ShouldContinue) -> None:
        while goes_on():
            pause = max(0.01, min(self._until_doubt(), self._ping_every))
            if self.pulse.is_suspect:
                pause = min(pause, SUSPECT_SECONDS)
            self.watch.due = monotonic() + pause + self._patience
            if self.closing.wait(pause):
                return
            self.watch.due = monotonic() + VERIFY_SECONDS + self._patience
            stuck = self.pulse.mend()
            tend()
            if stuck or (not self.pulse.runs and self.unheard()):
                self.verify(believe=True)
            self.main.interrupt_overdue()
            self._owner.interrupt_overdue()
            late = -self._until_doubt()
            if late < 0 or not self.trust or not self._owner.holds_any():
                continue
            # Woken on time, nothing has been heard for too long. Woken late, we were paused, and may be well.
            if late > PAUSED_SECONDS:
                self.verify()
            elif self._until_doubt() <= 0:
                self._give_up()

    def _until_doubt(self) -> float:
        """Seconds until the last proof is too old; with nothing held, until something new could be."""
        if not self.trust:
            return math.inf
        left = self._proved + self.trust - monotonic()
        return left if left > 0 or self._owner.holds_any() else self.trust

    def unheard(self) -> bool:
        """Whether the last proof of life is too old, as it is after this process was paused for long: others may be
        inside, and be it that an operator took a row of ours away.
        """
        return monotonic() - self._proved > self._certain > 0 and self._owner.holds_any()

    def verify(self, *, believe: bool = False) -> None:
        """Was nothing heard for too long? Then ask, for a second; and if no answer comes, believe the worst. (Not where
        only an operator takes a row away: the answer may be late for other reasons.)

        Where nobody else can be inside yet, as only this thread is late, the worst is believed before anybody can.
        ``believe``: also where only an operator takes a row away, and whenever the last ping was; as there are none.
        """
        if not (believe and self._owner.holds_any()) and not self.unheard():
            return
        asked = monotonic()
        left = self._proved + self._life - asked
        seconds = min(VERIFY_SECONDS, left / 2) if left > 0 and self.trust else VERIFY_SECONDS
        self.urge()
        doubting = Permit()
        try:
            self._doubting.acquire(doubting)
            with self._proofs:
                self._proofs.wait_for(lambda: self._proved >= asked or self.closing.is_set(), seconds)
        finally:
            self._doubting.release(doubting)
        if self._proved < asked and not self.closing.is_set() and (self.trust or believe):
            self._give_up("the thread that asks for it does not go on" if believe else "")

    def _give_up(self, why: str = "") -> None:
        self.lose_all(why or f"nothing was heard of {self.engine.label} for {self.trust:.1f} s")
        self.main.interrupt_overdue()

    def lose_all(self, why: str, *, for_good: bool = False) -> bool:
        """Nothing is ours any more; ``for_good``: nor is anything to be done later. Whether there was."""
        left = bool(self.leftovers or self._late)
        if for_good:
            self.leftovers.clear()
        with self.state_lock:
            if for_good:
                self._late.clear()
            self.tickets.clear()
        self._disowned = not for_good
        self._owner.mark_lost(None, why)
        self.forget(())
        return left

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self, waiting: Iterable[Ticket] = ()) -> bool:
        """End the threads, leave, with all rows: those of ``waiting`` as cancelled. False when a call does not end."""
        self.closing.set()
        self._beat.set()
        with self._proofs:
            self._proofs.notify_all()
        deadline = monotonic() + CLOSE_JOIN_SECONDS
        if not self.main.leave(waiting, CLOSE_JOIN_SECONDS):
            return False
        for kept in (self.pulse, self.watch):
            kept.join(max(0.0, deadline - monotonic()))
        return True
