"""A database, and this process's membership in it.

One connection, the *main* session, holds the member's beacon, registers, releases and pings; everything on it proves
that we live. Others are opened to wait in, and closed when idle. Two threads look after the locks: the *pulse* pings,
the *watch* only looks at the clock, and declares the locks lost when the last good proof of life is too old (so that
we know before anybody else can be let in). Neither starts before there is something to look after.

Invariants
    ``_main_lock`` guards the main session; who holds it never waits for anything but one bounded statement or one
    attempt to connect.
    ``_state_lock`` guards what we believe: ``_tickets`` (our rows, as far as we know), ``_grants`` (what we hold),
    ``_queues`` (who of ours waits). It is never held during I/O, and never taken while waiting for ``_main_lock``.
    ``_good_since`` only moves forward: the time at which the last successful statement on the main session *began*.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import secrets
import socket
import sys
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tenacity

from sqlsem import engines, protocol
from sqlsem.engines.base import Busy, Creator, Disconnected, Engine, Options, Session
from sqlsem.errors import ConfigurationError, Deadlock, LockLost, NotHeld, SqlsemError, Unavailable
from sqlsem.model import Entry, Past, Request, Resource, Ticket, check_seconds, monotonic

__all__ = ["Coordinator", "Grant", "connect"]

log = logging.getLogger("sqlsem")
T = TypeVar("T")
LostCallback = Callable[["Grant"], object]

#: Connections that may wait in the database at the same time; more waiters than these look from time to time.
MOST_WAITING_SESSIONS = 8
#: Connections kept for the next wait. With the main session that makes three.
MOST_IDLE_SESSIONS = 2
#: Seconds that threads get to end when a coordinator is closed.
JOIN_TIMEOUT = 10.0
#: A ping costs the server little, but not nothing: with nothing held or wanted, keep the connection warm this often.
IDLE_PING = 60.0
#: Every so many pings, prune the history.
PRUNE_EVERY = 200


class Grant:
    """What one has while inside: made by acquiring, ended by releasing. Safe to use from several threads.

    Attributes:
        resource: The resource's name (of the first one, for ``all_of``).
        position: The number in the queue (``queue_position`` in the table).
        positions: Each resource's position.
        fence: A number that grows with every grant of a mutex; store it with what you write, and refuse smaller ones.
        waited: Seconds between asking and being let in.
        lost_event: A `threading.Event` that is set when the lock is lost.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        requests: Sequence[Request],
        tickets: Sequence[Ticket],
        owner: int,
        waited: float,
        on_lost: LostCallback | None,
    ) -> None:
        self._coordinator = coordinator
        self._requests = tuple(requests)
        self._tickets = tuple(tickets)
        self._owner = owner
        self._on_lost = on_lost
        self._pid = os.getpid()
        self._depth = 1
        self._released = False
        self._why_lost: str | None = None
        self.resource = tickets[0].resource
        self.position = tickets[0].position
        self.positions = {ticket.resource: ticket.position for ticket in tickets}
        self.fence = self.position
        self.waited = waited
        self.lost_event = threading.Event()

    @property
    def lost(self) -> bool:
        """Whether the lock is lost. Answered from memory, except right after this process was paused for long:
        then the database is asked, for a second at most.
        """
        if self._why_lost is None and not self._released:
            self._coordinator._doubt()
        return self._why_lost is not None

    def check(self) -> None:
        """Ask the database, now, whether the lock is still held; raises `LockLost` or `NotHeld` when not.

        >>> with sqlsem.mutex("nightly") as grant:  # doctest: +SKIP
        ...     for part in parts:
        ...         grant.check()
        ...         load(part)
        """
        self._require()
        self._coordinator._ping()
        self._require()

    def assert_held(self, cursor: Any) -> None:
        """Check inside the caller's own transaction that the lock is held, and keep it held until that ends.

        ``cursor`` is a DB-API cursor on the *same database* (psycopg, pyodbc, sqlite3 …) with a transaction open; what
        is written in that transaction can then never be committed beside another holder. Commit before leaving the
        block. Raises `LockLost`.
        """
        self._require()
        for ticket in self._tickets:
            if not self._coordinator.engine.pin(cursor, ticket):
                self._coordinator._lose([self], "its row is no longer in the table")
                self._require()

    def release(self) -> None:
        """Give the lock back, from any thread. Raises `NotHeld` when done before, `LockLost` when it was lost."""
        self._coordinator._give_back(self)

    def _require(self) -> None:
        if self._pid != os.getpid():
            raise NotHeld(
                f"The lock on {self.resource!r} was acquired by process {self._pid}, before it forked; "
                f"acquire one in this process",
                resource=self.resource,
            )
        if self._why_lost is not None:
            raise LockLost(
                f"The lock on {self.resource!r} at position {self.position} is lost: {self._why_lost}; what was done "
                f"since may have run beside another holder",
                resource=self.resource,
            )
        if self._released:
            raise NotHeld(f"The lock on {self.resource!r} has been released", resource=self.resource)

    def __repr__(self) -> str:
        state = "released" if self._released else "lost" if self._why_lost else "held"
        return f"<Grant {self.resource!r} at {self.position}, {state}>"


class Coordinator:
    """Locks in one database. Made by `sqlsem.connect`; a context manager; closes by itself at the end of the process.

    >>> with sqlsem.connect("postgresql://etl@db/dwh", grace=30) as coordinator:  # doctest: +SKIP
    ...     with coordinator.mutex("nightly"):
    ...         load()
    """

    def __init__(
        self,
        url: str,
        *,
        grace: float = 5.0,
        lease: float | None = None,
        retry: float = 10.0,
        schema: str = "sqlsem",
        table: str = "ProcessControl",
        creator: Creator | None = None,
    ) -> None:
        check_seconds("grace", grace)
        check_seconds("retry", retry)
        if lease is not None and check_seconds("lease", lease) < 1:
            raise ConfigurationError(f"A lease must be at least 1 second, not {lease!r}")
        # A gate that is stuck must not keep the pings out.
        patience = min(1.0, max(0.1, (grace or 4.0) / 4))
        options = Options(grace=grace, lease=lease, schema=schema, table=table, patience=patience)
        self.engine: Engine = engines.of_url(url)(url, options, creator)
        self.retry = float(retry)
        life = grace if lease is None else lease
        # How old the last proof of life may be; 0: not watched. Whoever looks later than that is on their own.
        self._trust = life - min(1.0, life / 5) if lease is not None or self.engine.beacon_may_fail else 0.0
        self._ping_every = max(0.2, life / 3) if life else 0.5
        self._closed = False
        self._fresh()
        _coordinators.add(self)

    def _fresh(self) -> None:
        """The state of a coordinator that has done nothing yet in this process."""
        self._main_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._changed = threading.Condition(self._state_lock)  # tells the watch
        self._beat = threading.Event()  # tells the pulse
        self._closing = threading.Event()
        self._doubting = 0  # threads that wait for the next proof of life
        self._main: Session | None = None
        self._member_id: int | None = None
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._secret = secrets.token_hex(4)
        self._good_since = monotonic()
        self._failures = 0
        self._uids = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._limbo = 0  # registrations whose outcome we do not know yet
        self._grants: set[Grant] = set()
        self._held: dict[tuple[int, str], list[Grant]] = {}
        self._queues: dict[str, list[_Waiter]] = {}
        self._unreturned: list[Ticket] = []
        self._idle: list[Session] = []
        self._places = MOST_WAITING_SESSIONS
        self._waiting: set[Session] = set()
        self._threads: list[threading.Thread] = []

    # -- faces --------------------------------------------------------------------------------------------------
    # (in sqlsem.locks; imported there to keep this module about the database)

    def mutex(self, name: Any, **options: Any) -> Any:
        """See `sqlsem.mutex`."""
        from sqlsem import locks

        return locks.mutex(name, coordinator=self, **options)

    def limit(self, name: Any, limit: int, **options: Any) -> Any:
        """See `sqlsem.limit`."""
        from sqlsem import locks

        return locks.limit(name, limit, coordinator=self, **options)

    def read(self, name: Any, **options: Any) -> Any:
        """See `sqlsem.read`."""
        from sqlsem import locks

        return locks.read(name, coordinator=self, **options)

    def write(self, name: Any, **options: Any) -> Any:
        """See `sqlsem.write`."""
        from sqlsem import locks

        return locks.write(name, coordinator=self, **options)

    def stage(self, name: Any, order: int, **options: Any) -> Any:
        """See `sqlsem.stage`."""
        from sqlsem import locks

        return locks.stage(name, order, coordinator=self, **options)

    # -- acquiring and releasing --------------------------------------------------------------------------------

    def acquire(
        self,
        requests: Sequence[Request],
        timeout: float | None,
        *,
        reentrant: bool = False,
        on_lost: LostCallback | None = None,
    ) -> Grant | None:
        """Have all of ``requests``, or None when that takes longer than ``timeout`` seconds (None: for ever).

        What `sqlsem.mutex` and its siblings are built on; see there.
        """
        self._require_open()
        owner = _thread_number()
        shared = self._already(requests, owner, reentrant)
        if shared is not None:
            shared._depth += 1
            return shared
        requesting_id = f"{self._name}:{owner}:{self._secret}"
        uid = f"{self._secret}{os.getpid():x}.{next(self._uids)}"
        work = _Work(self, requesting_id, threading.current_thread().name, uid, timeout)
        began = monotonic()
        try:
            tickets = protocol.drive(protocol.acquire(requests, uid, timeout), work.perform)
            if tickets is None:
                return None
            grant = Grant(self, requests, tickets, owner, monotonic() - began, on_lost)
            with self._changed:
                self._grants.add(grant)
                for ticket in tickets:
                    self._held.setdefault((owner, ticket.resource), []).append(grant)
                self._changed.notify_all()
            self._require_rows(grant)
            return grant
        except BaseException:
            # An interrupt may strike between any two instructions; giving back twice is harmless.
            work.cancel("cancelled")
            raise
        finally:
            work.done()

    def _already(self, requests: Sequence[Request], owner: int, reentrant: bool) -> Grant | None:
        """The grant to share when this thread holds it already; `Deadlock` when waiting would be for ourselves."""
        for request in requests:
            for grant in self._held.get((owner, request.resource), ()):
                if grant._why_lost is not None:
                    continue
                held = next(one for one in grant._requests if one.resource == request.resource)
                covers = held.access in ("write", request.access) and held.weight >= request.weight
                if reentrant and covers and len(requests) == 1:
                    return grant
                raise Deadlock(
                    f"This thread already holds {held.describe()} (position {grant.positions[request.resource]}) and "
                    f"would wait for itself; release it first, take what is needed in one go (weight=…, all_of), or "
                    f"pass reentrant=True{'' if covers else ' (which cannot turn what is held into more)'}",
                    resource=request.resource,
                )
        return None

    def _require_rows(self, grant: Grant) -> None:
        """Between a grant and now the main session may have been lost, and our rows with it."""
        if self._trust and monotonic() - self._good_since > self._trust:
            self._ping()
        with self._state_lock:
            missing = [ticket for ticket in grant._tickets if ticket.position not in self._tickets]
        if missing:
            self._lose([grant], "its row was removed before it could be used")
            grant._require()

    def _give_back(self, grant: Grant, outcome: str = "released") -> None:
        """End a grant. Raises `LockLost` when it was lost, before or just now."""
        if grant._pid != os.getpid() or (grant._released and grant._why_lost is None):
            grant._require()
        if grant._depth > 1:
            grant._depth -= 1
            return
        self._forget(grant)
        if grant._why_lost is None:
            for ticket in grant._tickets:
                self._return(ticket, outcome, grant)
        if grant._why_lost is not None:
            grant._require()

    def _forget(self, grant: Grant) -> None:
        with self._state_lock:
            grant._released = True
            self._grants.discard(grant)
            for ticket in grant._tickets:
                held = self._held.get((grant._owner, ticket.resource), [])
                if grant in held:
                    held.remove(grant)
                if not held:
                    self._held.pop((grant._owner, ticket.resource), None)

    def _return(self, ticket: Ticket, outcome: str, grant: Grant) -> None:
        """Give one number back. What cannot be given back in time is lost; what is pinned is given back later."""
        budget = max(0.0, self._good_since + self._trust - monotonic()) if self._trust else self.retry

        def give_back(session: Session) -> bool:
            done = session.release(ticket, outcome)
            with self._state_lock:
                self._tickets.pop(ticket.position, None)
            return done

        try:
            there = self._on_main("release", give_back, budget)
        except Busy as exc:
            # Its owner's own transaction still holds on to it (assert_held): it ends with that.
            log.warning("%r stays locked until the transaction that asserted it ends (%s)", ticket.resource, exc)
            with self._state_lock:
                self._unreturned.append(ticket)
            self._beat.set()
            return
        except Unavailable as exc:
            with self._state_lock:
                self._tickets.pop(ticket.position, None)
            grant._why_lost = f"it could not be given back in time ({exc})"
            grant.lost_event.set()
            return
        if not there:
            grant._why_lost = "its row was removed before it was released"
            grant.lost_event.set()
        self._nudge(ticket.resource)

    def _nudge(self, resource: str) -> None:
        """Tell our own first waiter on a resource that something left."""
        queue = self._queues.get(resource)
        if queue:
            with contextlib.suppress(IndexError):  # it may have left this instant
                queue[0].event.set()

    # -- the main session ---------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigurationError("This coordinator is closed; make a new one with sqlsem.connect(…)")

    def _on_main(self, what: str, call: Callable[[Session], T], budget: float | None = None) -> T:
        """Do ``call`` with the main session, connecting (again) as needed, for ``budget`` seconds at the most.

        Bounded, jittered, logged; in the end the last error is raised, saying what was tried.
        """
        if self._main is not None and self._main_lock.acquire(timeout=0.5):
            # The usual case, without ceremony.
            try:
                if self._main is not None:
                    began = monotonic()
                    result = self._attempt(call)
                    self._proof(began)
                    return result
            except (Disconnected, Busy):
                pass
            finally:
                self._main_lock.release()
        budget = self.retry if budget is None else budget
        began = monotonic()
        failures = self._failures

        def once() -> T:
            if not self._main_lock.acquire(timeout=max(0.1, budget)):
                raise Disconnected(f"{self.engine.where} did not answer within {budget:g} s")
            try:
                if self._main is None and self._failures > failures:
                    # Others tried while we stood in line: no use to try as long again after them.
                    raise Unavailable(f"{self.engine.where} is out of reach, as other threads have just found")
                begun = monotonic()
                if self._main is None:
                    self._enter()
                result = self._attempt(call)
                self._proof(begun)
                return result
            finally:
                self._main_lock.release()

        def tell(state: tenacity.RetryCallState) -> None:
            assert state.outcome is not None
            log.warning("%s failed, trying again: %s", what, state.outcome.exception())

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(budget) | tenacity.stop_when_event_set(self._closing),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            retry=tenacity.retry_if_exception_type((Disconnected, Busy)),
            before_sleep=tell,
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )
        try:
            return retrying(once)
        except Busy:
            raise
        except Disconnected as exc:
            self._failures += 1
            attempts = retrying.statistics.get("attempt_number", 1)
            raise Unavailable(
                f"{exc} ({what}: {attempts} attempt{'s' if attempts != 1 else ''} in {monotonic() - began:.1f} s; "
                f"is the server up, and the address right?)"
            ) from exc

    def _attempt(self, call: Callable[[Session], T]) -> T:
        """Holding ``_main_lock``: one call; a session that breaks is dropped."""
        assert self._main is not None
        try:
            return call(self._main)
        except Disconnected:
            self._drop_main()
            raise

    def _proof(self, began: float) -> None:
        """A statement on the main session that began then has succeeded: so its beacon was held then."""
        self._good_since = max(self._good_since, began)
        if self._doubting:
            with self._changed:
                self._changed.notify_all()

    def _drop_main(self) -> None:
        session, self._main = self._main, None
        if session is not None:
            session.close()
        if self.engine.beacon_may_fail and not self._trust:
            # grace=0: the session was the lock.
            self._lose(None, "the connection that held it was lost, and grace is 0")

    def _enter(self) -> None:
        """Holding ``_main_lock``: a new main session, as the member we were or, failing that, as a new one."""
        self._require_open()
        session = self.engine.connect("main")
        try:
            session.check_schema()
            member_id = self._member_id
            if member_id is not None and not session.resume(member_id):
                log.warning("%s gave this process up while it was out of reach", self.engine.where)
                self._lose_all("the database was out of reach for longer than the grace, and others removed it")
                member_id = None
            if member_id is None:
                program = os.path.basename(sys.argv[0] or sys.executable)[:255]
                member_id = session.enrol(socket.gethostname(), os.getpid(), program or "python")
        except BaseException:
            session.close()
            raise
        self._member_id, self._main = member_id, session
        self._start_threads()

    # -- proof of life ------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        if not self._threads:
            jobs = [("pulse", self._pulse), *([("watch", self._watch)] if self._trust else [])]
            for name, job in jobs:
                thread = threading.Thread(target=job, name=f"sqlsem-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pulse(self) -> None:
        """Thread: ping, give back what could not be given back before, prune the history now and then."""
        beats = 0
        while not self._closed:
            busy = bool(self._tickets or self._limbo or self._unreturned)
            self._beat.wait(self._ping_every if busy else IDLE_PING)
            self._beat.clear()
            if self._closed:
                return
            try:
                self._ping()
                self._return_late()
                beats += 1
                if beats % PRUNE_EVERY == 0:
                    self._on_main("prune", lambda session: session.prune(1000), 0.0)
            except SqlsemError as exc:
                log.warning("The ping of %s failed: %s", self.engine.where, exc)
                self._beat.wait(min(0.25, self._ping_every))
            except Exception:
                log.exception("The ping of %s failed unexpectedly", self.engine.where)
                self._beat.wait(min(0.25, self._ping_every))

    def _ping(self) -> None:
        """Prove life, and compare what we believe with what is there."""

        def ping(session: Session) -> None:
            member_id = self._member_id
            if member_id is None:
                return
            pulse = session.ping(member_id)
            # Holding the main session: nothing of ours can be registered or released meanwhile.
            if not pulse.known:
                self._member_id = None
                self._lose_all("this process was given up: it was out of reach for longer than its grace")
                raise _GivenUp(f"{self.engine.where} has given this process up")  # and so come back as a new member
            with self._state_lock:
                gone = [position for position in self._tickets if position not in pulse.positions]
                lost = [grant for grant in self._grants if any(t.position in gone for t in grant._tickets)]
                taken = [
                    grant
                    for grant in self._grants
                    if grant not in lost and any(ticket.position in pulse.revoked for ticket in grant._tickets)
                ]
                for position in gone:
                    del self._tickets[position]
                strangers = set() if self._limbo else pulse.positions - set(self._tickets)
            self._lose(lost, "its row was removed")
            self._lose(taken, "an operator took it away")
            for ticket in [ticket for grant in taken for ticket in grant._tickets]:
                session.release(ticket, "revoked")
                with self._state_lock:
                    self._tickets.pop(ticket.position, None)
            if strangers:
                self._disown(session, member_id, strangers)

        self._on_main("ping", ping, min(self.retry, self._ping_every))

    def _disown(self, session: Session, member_id: int, positions: set[int]) -> None:
        """Rows of ours that nobody here knows: left by an interrupted call, or by a crash that undid a release."""
        for entry in session.entries(None):
            if entry.member_id == member_id and entry.position in positions:
                log.info("Removing a forgotten row of ours: %r at %d", entry.resource, entry.position)
                session.release(Ticket(entry.resource, entry.position, entry.requesting_id, False), "cancelled")

    def _return_late(self) -> None:
        for ticket in list(self._unreturned):

            def give_back(session: Session, ticket: Ticket = ticket) -> None:
                session.release(ticket, "released")
                with self._state_lock:
                    self._tickets.pop(ticket.position, None)
                    self._unreturned.remove(ticket)

            with contextlib.suppress(Busy):
                self._on_main("release", give_back, 0.0)
                self._nudge(ticket.resource)

    def _watch(self) -> None:
        """Thread: looks only at the clock, and so is never held up by the network."""
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._grants:
                    self._changed.wait()
                    continue
                late = monotonic() - (self._good_since + self._trust)
                if late < 0:
                    self._changed.wait(-late)
                    continue
            # Woken on time, nothing has been heard for too long. Woken late, we were paused, and may be well.
            if late > 0.25:
                self._doubt()
            if monotonic() - self._good_since > self._trust:
                self._lose_all(f"nothing was heard of {self.engine.where} for {self._trust:.1f} s")
                self._unblock()

    def _doubt(self) -> None:
        """Too long without proof of life? Then ask, for a second; and if that fails, believe the worst."""
        if self._trust and self._grants and monotonic() - self._good_since > self._trust:
            asked = monotonic()
            self._beat.set()
            with self._changed:
                self._doubting += 1
                self._changed.wait_for(lambda: self._good_since >= asked or self._closed, 1.0)
                self._doubting -= 1
            if self._good_since < asked:
                self._lose_all(f"nothing was heard of {self.engine.where} for {self._trust:.1f} s")

    def _unblock(self) -> None:
        """A thread may sit in a call on the main session that will never be answered."""
        session = self._main
        if session is not None and not self._main_lock.acquire(timeout=0.0):
            session.interrupt()
        elif session is not None:
            self._main_lock.release()

    def _lose_all(self, why: str) -> None:
        with self._state_lock:
            self._tickets.clear()
        self._lose(None, why)

    def _lose(self, grants: Sequence[Grant] | None, why: str) -> None:
        """Declare grants (None: all) lost: flag, event, callback; in this order."""
        with self._state_lock:
            lost = [g for g in (self._grants if grants is None else grants) if g._why_lost is None and not g._released]
            for grant in lost:
                grant._why_lost = why
                self._grants.discard(grant)
        for grant in lost:
            grant.lost_event.set()
        for grant in lost:
            log.error("Lost the lock on %r at %d: %s", grant.resource, grant.position, why)
            if grant._on_lost is not None:
                try:
                    grant._on_lost(grant)
                except Exception:
                    log.exception("on_lost of %r failed", grant.resource)

    # -- waiting sessions ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _waiting_session(self) -> Iterator[Session | None]:
        """A session to wait in, or None when too many of ours wait already."""
        with self._state_lock:
            session = self._idle.pop() if self._idle else None
            room = self._places > 0
            self._places -= room
        if not room:
            yield None
            return
        sound = False
        try:
            if session is None:
                session = self.engine.connect("wait")
            with self._state_lock:
                self._waiting.add(session)
            self._require_open()
            yield session
            sound = True
        finally:
            with self._state_lock:
                self._places += 1
                if session is not None:
                    self._waiting.discard(session)
                keep = sound and not self._closed and len(self._idle) < MOST_IDLE_SESSIONS
                if session is not None and keep:
                    self._idle.append(session)
            if session is not None and not keep:
                session.close()

    # -- what people see and operators do -----------------------------------------------------------------------

    def entries(self, resource: str | None = None) -> list[Entry]:
        """The queue as it is now: who holds and who waits, one or all resources."""
        return self._look(lambda session: session.entries(resource))

    def history(self, resource: str | None = None, *, most: int = 100) -> list[Past]:
        """Finished requests, newest first."""
        return self._look(lambda session: session.history(resource, most))

    def resources(self) -> list[Resource]:
        """All resources that have rows or settings."""
        return self._look(lambda session: session.resources())

    def set_limit(self, resource: str, limit: int | None) -> None:
        """Cap a resource, whatever limit its users declare; None lifts the cap. Those inside stay inside."""
        self._look(lambda session: session.set_resource(Request(resource, limit=limit).resource, "cap", limit))

    def set_stale_after(self, resource: str, seconds: float | None) -> None:
        """Remove rows of bare participants (that have no beacon and no lease) at this age; None: never."""
        name = Request(resource).resource
        if seconds is not None:
            check_seconds("stale_after", seconds, zero=False)
        value = None if seconds is None else max(1, int(seconds * 1000))
        self._look(lambda session: session.set_resource(name, "stale_after", value))

    def pause(self, resource: str) -> None:
        """Let nobody else in until `resume`. Those inside stay inside; requests keep their place."""
        self._look(lambda session: session.set_resource(Request(resource).resource, "paused", 1))

    def resume(self, resource: str) -> None:
        """Undo `pause`."""
        self._look(lambda session: session.set_resource(Request(resource).resource, "paused", 0))

    def revoke(self, position: int, *, force: bool = False) -> bool:
        """Take a row away from its owner. True when it is gone, False when a living holder has been told and gets its
        grace to notice (``force=True`` does not wait for that). Raises `NotHeld` when there is no such row.
        """
        code = self._look(lambda session: session.revoke(position, force))
        if code < 0:
            raise NotHeld(f"There is no row at position {position}; see: sqlsem ls")
        return code == 0

    def reap(self) -> int:
        """Test every owner now and remove what the dead left behind; the number of rows removed."""
        return self._look(lambda session: session.reap())

    def _look(self, call: Callable[[Session], T]) -> T:
        """Do something that needs no membership, on a connection of its own."""
        self._require_open()
        for attempt in tenacity.Retrying(
            stop=tenacity.stop_after_delay(self.retry),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            retry=tenacity.retry_if_exception_type((Disconnected, Busy)),
            before_sleep=tenacity.before_sleep_log(log, logging.WARNING),
            reraise=True,
        ):
            with attempt:
                session = self.engine.connect("look")
                try:
                    session.check_schema()
                    return call(session)
                finally:
                    session.close()
        raise AssertionError("unreachable")

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def close(self) -> None:
        """Give everything back, close the connections, end the threads. Locks still held are released."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._beat.set()
        with self._changed:
            self._changed.notify_all()
            waiting = list(self._waiting)
            for queue in self._queues.values():
                for waiter in queue:
                    waiter.event.set()
        for session in waiting:
            session.interrupt()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT)
        if self._main_lock.acquire(timeout=JOIN_TIMEOUT):
            try:
                if self._main is not None:
                    if self._member_id is not None:
                        with contextlib.suppress(SqlsemError):  # out of reach: others will find the beacon gone
                            self._main.resign(self._member_id)
                    self._main.close()
                    self._main = None
            finally:
                self._main_lock.release()
        self._lose(None, "its coordinator was closed")
        with self._state_lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()
        _coordinators.discard(self)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Coordinator {self.engine.where}{', closed' if self._closed else ''}>"


_threads = threading.local()
_thread_numbers = itertools.count(1)


def _thread_number() -> int:
    """A number for the calling thread that no other ever gets; the system's are used again."""
    number: int | None = getattr(_threads, "number", None)
    if number is None:
        number = _threads.number = next(_thread_numbers)
    return number


class _GivenUp(Disconnected):
    """The database knows this member no more."""


class _Waiter:
    """One of our own requests that waits. Only the first of ours on a resource waits in the database."""

    __slots__ = ("event", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self.event = threading.Event()

    def __lt__(self, other: _Waiter) -> bool:
        return self.position < other.position


class _Work:
    """Carries out the steps of one acquisition."""

    def __init__(
        self, coordinator: Coordinator, requesting_id: str, owner: str, uid: str, timeout: float | None
    ) -> None:
        self.coordinator = coordinator
        self.requesting_id = requesting_id
        self.owner = owner[:255]
        self.uid = uid
        self.budget = coordinator.retry if timeout is None else min(coordinator.retry, max(timeout, 1.0))
        self.tickets: list[Ticket] = []
        self.waiters: dict[int, _Waiter] = {}
        self.pause = 0.005

    def perform(self, step: protocol.Step) -> Any:
        if isinstance(step, protocol.Now):
            return monotonic()
        if isinstance(step, protocol.Register):
            return self.register(step)
        if isinstance(step, protocol.Wait):
            return self.wait(step)
        return self.cancel(step.outcome)

    def register(self, step: protocol.Register) -> list[Ticket] | None:
        coordinator = self.coordinator

        def register(session: Session) -> list[Ticket] | None:
            assert coordinator._member_id is not None
            tickets = session.register(
                coordinator._member_id, self.requesting_id, self.owner, self.uid, step.requests, step.only_if_free
            )
            self.tickets = tickets or []
            with coordinator._state_lock:
                for ticket in self.tickets:
                    coordinator._tickets[ticket.position] = ticket
                first = tickets is not None and len(coordinator._tickets) == len(tickets)
            if first:
                coordinator._beat.set()  # the pulse was resting
            return tickets

        with coordinator._state_lock:
            coordinator._limbo += 1
        try:
            return coordinator._on_main("acquire", register, self.budget)
        finally:
            with coordinator._state_lock:
                coordinator._limbo -= 1

    def wait(self, step: protocol.Wait) -> bool | None:
        coordinator, ticket = self.coordinator, step.ticket
        coordinator._require_open()
        waiter = self.waiters.get(ticket.position)
        with coordinator._state_lock:
            queue = coordinator._queues.setdefault(ticket.resource, [])
            if waiter is None:
                waiter = self.waiters[ticket.position] = _Waiter(ticket.position)
                insort(queue, waiter)
            first = queue[0] is waiter
            if ticket.position not in coordinator._tickets:
                return None  # lost while we waited
        if first:
            try:
                with coordinator._waiting_session() as session:
                    if session is not None:
                        return session.wait(ticket, step.timeout, waiter.event)
            except (Disconnected, Busy) as exc:
                coordinator._require_open()
                log.warning("Waiting for %r was interrupted, looking again: %s", ticket.resource, exc)
                waiter.event.wait(min(step.timeout, self.pause))
                self.pause = min(self.pause * 2, 0.5)
                if self.pause >= 0.5:
                    # Not for ever: the main session's own retries decide when it is an outage.
                    return coordinator._on_main("wait", lambda main: main.wait(ticket, 0.0, waiter.event), self.budget)
                return False
            # Too many of ours wait already: look from time to time.
            waiter.event.wait(min(step.timeout, self.pause))
            waiter.event.clear()
            self.pause = min(self.pause * 1.5, 1.0)
        elif waiter.event.wait(step.timeout):
            waiter.event.clear()
            return False
        # Behind others of ours there is nothing to gain by looking, but for labels and weights that mix.
        return coordinator._on_main("wait", lambda main: main.wait(ticket, 0.0, waiter.event), self.budget)

    def cancel(self, outcome: str) -> None:
        """Remove what this acquisition left; where that cannot be done now, the next good ping does it."""
        coordinator = self.coordinator

        def cancel(session: Session) -> None:
            if coordinator._member_id is not None:
                session.cancel(coordinator._member_id, self.uid, outcome)

        with coordinator._state_lock:
            ours = [grant for grant in coordinator._grants if grant._tickets == tuple(self.tickets)]
        for grant in ours:
            coordinator._forget(grant)
        try:
            if not coordinator._closed and coordinator._member_id is not None:
                coordinator._on_main("cancel", cancel, min(1.0, self.budget))
        except SqlsemError as exc:
            log.warning("Could not withdraw a request at once: %s", exc)
        finally:
            with coordinator._state_lock:
                for ticket in self.tickets:
                    coordinator._tickets.pop(ticket.position, None)
        for ticket in self.tickets:
            coordinator._nudge(ticket.resource)

    def done(self) -> None:
        """Leave the local queues, and let the next of ours come forward."""
        with self.coordinator._state_lock:
            for queue in [*self.coordinator._queues.values()]:
                queue[:] = [waiter for waiter in queue if waiter not in self.waiters.values()]
            for resource in [name for name, queue in self.coordinator._queues.items() if not queue]:
                del self.coordinator._queues[resource]
            nexts = [queue[0] for queue in self.coordinator._queues.values()] if self.waiters else []
        for waiter in nexts:
            waiter.event.set()


_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()
#: Connections of the process we were forked from: never used, never closed, as that would end the parent's sessions.
_inherited: list[object] = []


def _after_fork_in_child() -> None:
    for coordinator in list(_coordinators):
        _inherited.append((coordinator._main, coordinator._idle, coordinator._waiting))
        coordinator._fresh()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    for coordinator in list(_coordinators):
        coordinator.close()


def connect(url: str, **options: Any) -> Coordinator:
    """A coordinator for one database; see `Coordinator`. Connects when first used.

    Args:
        url: ``sqlite:///file.db``, ``postgresql://…``, ``mssql://…`` or an ODBC string.
        grace: Seconds for which a member that cannot be found is still believed to live (default 5). With 0 the session
            is the lock: it goes with the connection, and others may be let in before the loser knows.
        lease: Seconds of a lease, renewed by pings, where no session can be kept (PgBouncer in transaction mode).
        retry: Seconds for which a call tries to reach a database that is away, before `Unavailable` (default 10).
        schema: The schema of the tables (default ``sqlsem``); for SQLite, the prefix of their names.
        table: The name of the queue's table (default ``ProcessControl``).
        creator: A callable that returns a new DB-API connection; ``url`` then only names the engine.
    """
    return Coordinator(url, **options)
