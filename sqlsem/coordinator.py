"""A database: what is held there, who of ours waits there, what people see and operators do there.

How this process proves to the database that it lives is `sqlsem.membership`; how a lock is had is `sqlsem.protocol`.

Invariants
    The membership's ``state_lock`` guards ``_grants`` and ``_held`` (what we hold) and ``_queues`` (who of ours waits).
    Of our own waiters on one resource only the first waits in the database: nobody behind it can be granted before it,
    and so connections are not spent on waiting in line behind ourselves.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import tenacity

from sqlsem import engines, nesting, protocol
from sqlsem.acquisition import Acquisition, Me, Waiter
from sqlsem.deadlocks import Found
from sqlsem.engines.base import Allowance, Creator, Engine, Options, Session, Wire, bounded
from sqlsem.errors import ConfigurationError, Deadlock, NotHeld, SqlsemError, Unavailable
from sqlsem.grants import BaseGrant, Grant
from sqlsem.membership import Membership
from sqlsem.model import (
    READ,
    WRITE,
    Attempt,
    Duration,
    End,
    Entry,
    Past,
    Request,
    Resource,
    TaskEntry,
    Ticket,
    check_count,
    check_duration,
    check_name,
    monotonic,
)
from sqlsem.options import (
    ConnectOptions,
    GroupOptions,
    LockOptions,
    LostCallback,
    QueueOptions,
    RoundOptions,
    check_options,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sqlsem.aio import Face
    from sqlsem.locks import Lock, Name
    from sqlsem.rounds import Part, Round, _Continuing
    from sqlsem.tasks import Queue, Task

__all__ = ["Coordinator", "Grant", "LostCallback", "connect"]

log = logging.getLogger("sqlsem")
T = TypeVar("T")

_LOCK_OPTIONS = LockOptions.__optional_keys__
#: Connections that may wait in the database at the same time; more waiters than these look from time to time.
MOST_WAITING_SESSIONS = 8
#: Seconds that the server may be behind in what it has told us is done, when another one takes over from it.
UNDONE = 60.0
#: Connections kept for the next wait. With the main session that makes three.
MOST_IDLE_SESSIONS = 2
#: What an engine answers for a task that cannot be changed because it runs.
RUNS = 1
#: Seconds between looks for deadlocks, while anybody of ours may be in one.
LOOK_EVERY = 0.75
#: Seconds for which the answer may be awaited.
OVERDUE = 15.0
#: Seconds that a deadlock's victim gets to give up, before it is looked for further ones.
SETTLE = 0.5


class Suspect(Protocol):
    """Somebody of ours who waits while others may wait for it."""

    def tell(self, found: Found) -> None:
        """Its request has to be given up."""


class Coordinator:
    """Locks in one database. Made by `sqlsem.connect`; a context manager; closes by itself at the end of the process.

    >>> with sqlsem.connect("postgresql://etl@db/dwh", grace=30) as coordinator:  # doctest: +SKIP
    ...     with coordinator.mutex("nightly"):
    ...         load()
    """

    def __init__(
        self,
        url: engines.Database,
        *,
        grace: Duration = 5.0,
        lease: Duration | None = None,
        retry: Duration = 10.0,
        schema: str = "sqlsem",
        table: str = "ProcessControl",
        creator: Creator | None = None,
    ) -> None:
        grace = check_duration("grace", grace)
        retry = check_duration("retry", retry)
        if lease is not None:
            given, lease = lease, check_duration("lease", lease)
            if lease < 1:
                raise ConfigurationError(f"A lease must be at least 1 second, not {given!r}")
        # A gate that is stuck must not keep the pings out.
        patience = min(1.0, max(0.1, (grace or 4.0) / 4))
        # Nor must an address that never answers keep us from trying again within the grace.
        life = grace if lease is None else lease
        options = Options(
            grace=grace,
            lease=lease,
            schema=schema,
            table=table,
            patience=patience,
            connect_timeout=max(1.0, min(10.0, retry, life / 2 if life else 10.0)),
        )
        place, own = engines.locate(url)
        creator = creator or own
        self.engine: Engine = engines.of_url(place)(place, options, creator and engines.unpooled(creator))
        self.retry = retry
        self._closed = False
        self._fresh()
        _coordinators.add(self)

    def __reduce__(self) -> str:
        raise ConfigurationError(
            f"{self!r} cannot be pickled, as its URL may hold a password; connect in the process that uses it"
        )

    def _fresh(self) -> None:
        """The state of a coordinator that has done nothing yet in this process."""
        self._look_limit = Allowance(max(1.0, self.retry))  # what a look at the tables may take
        self._member = Membership(self.engine, self, self.retry)
        self._state_lock = self._member.state_lock
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._secret = os.urandom(4).hex()
        self._uids = itertools.count(1)
        self._grants: set[BaseGrant] = set()
        # (A task that nobody knows any more gives itself back.)
        self._claims = _Claims()
        self._ended: deque[tuple[float, End]] = deque(maxlen=256)  # what was ended last, and when
        self._bell = threading.Condition()
        self.rung = 0
        self._held: dict[tuple[int, str], list[BaseGrant]] = {}
        self._queues: dict[str, list[Waiter]] = {}
        self._above: tuple[nesting.Held, ...] | None = None  # what those hold under whom this process runs
        self._suspects: dict[int, Suspect] = {}  # by the positions that it waits at
        self._lookout: threading.Thread | None = None
        self._looking: Session | None = None  # the lookout's own
        self._idle: list[Session] = []
        self._waiting: dict[Wire, float] = {}  # until when the answer is due
        self._places = MOST_WAITING_SESSIONS
        # Of sqlsem.aio: what each event loop has, and the threads that they share.
        self._drivers: dict[Any, Any] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._async_places = threading.Semaphore(self.engine.async_sessions)

    # -- faces --------------------------------------------------------------------------------------------------
    # (in sqlsem.locks; imported there to keep this module about the database)

    def mutex(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.mutex`."""
        from sqlsem import locks

        check_options("mutex()", options, _LOCK_OPTIONS)
        return locks.mutex(name, coordinator=self, **options)

    def limit(self, name: Name, limit: int, *, weight: int = 1, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.limit`."""
        from sqlsem import locks

        check_options("limit()", options, _LOCK_OPTIONS)
        return locks.limit(name, limit, weight=weight, coordinator=self, **options)

    def read(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.read`."""
        from sqlsem import locks

        check_options("read()", options, _LOCK_OPTIONS)
        return locks.read(name, coordinator=self, **options)

    def write(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.write`."""
        from sqlsem import locks

        check_options("write()", options, _LOCK_OPTIONS)
        return locks.write(name, coordinator=self, **options)

    def stage(self, name: Name, order: int, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.stage`."""
        from sqlsem import locks

        check_options("stage()", options, _LOCK_OPTIONS)
        return locks.stage(name, order, coordinator=self, **options)

    def all_of(self, *several: Lock, **options: Unpack[GroupOptions]) -> Lock:
        """See `sqlsem.all_of`. The locks must be this coordinator's."""
        from sqlsem import locks

        lock = locks.all_of(*several, **options)
        if lock._coordinator is not self:
            raise ConfigurationError(f"{lock!r} is not of {self!r}; make its locks by this coordinator's methods")
        return lock

    def queue(self, name: str, **options: Unpack[QueueOptions]) -> Queue:
        """See `sqlsem.queue`."""
        from sqlsem import tasks

        check_options("queue()", options, QueueOptions.__optional_keys__)
        return tasks.queue(name, coordinator=self, **options)

    def round(self, name: str, parts: Iterable[str], *, window: Duration, **options: Unpack[RoundOptions]) -> Round:
        """See `sqlsem.round`."""
        from sqlsem import rounds

        check_options("round()", options, RoundOptions.__optional_keys__)
        return rounds.round(name, parts, window=window, coordinator=self, **options)

    # -- acquiring and releasing --------------------------------------------------------------------------------

    def acquire(
        self,
        requests: Sequence[Request],
        timeout: float | None,
        *,
        reentrant: bool = False,
        on_lost: LostCallback | None = None,
        keep: list[Grant] | None = None,
    ) -> Grant | None:
        """Have all of ``requests``, or None when that takes longer than ``timeout`` seconds (None: for ever).

        What `sqlsem.mutex` and its siblings are built on; see there. The grant is appended to ``keep``, if given,
        before anything can interrupt.
        """
        self._require_open()
        me = _this_thread()
        shared: Grant | None = self._share(requests, me, reentrant, keep)
        if shared is not None or self._in_its_own_way(requests, me, reentrant, timeout):
            return shared

        def grant(requests: Sequence[Request], tickets: Sequence[Ticket], waited: float) -> Grant:
            return Grant(self, requests, tickets, me, waited, on_lost)

        acquisition = Acquisition(self, requests, timeout, me, grant, keep)
        try:
            result: Grant | None = protocol.drive(acquisition.run(), self._perform)
            return result
        except BaseException:
            # An interrupt may strike between any two instructions; giving back twice is harmless.
            protocol.drive(acquisition.withdraw(), self._perform)
            raise
        finally:
            acquisition.done()

    def _perform(self, operation: protocol.Operation) -> Any:
        """Carry out an operation, blocking."""
        if self._closed:
            _stay_asleep_at_the_end()
        if isinstance(operation, protocol.Call):
            return self._member.perform(operation)
        if isinstance(operation, protocol.WaitFor):
            with self._waiting_session(operation.timeout) as session:
                if session is None:
                    return protocol.NO_ROOM
                wait = session.upgrade if operation.upgrade else session.wait
                return wait(operation.ticket, operation.timeout, operation.waiter.event)
        if isinstance(operation, protocol.Sleep):
            woken = operation.waiter.event.wait(operation.timeout)
            operation.waiter.event.clear()
            return woken
        return self._member.doubt()

    def _new_ids(self, me: Me) -> tuple[str, str]:
        """A requesting id, and one for this acquisition alone."""
        return f"{self._name}:{me.number}:{self._secret}", f"{self._secret}{os.getpid():x}.{next(self._uids)}"

    def _share(self, requests: Sequence[Request], me: Me, reentrant: bool, keep: list[Any] | None) -> Any:
        """The grant that we hold already, once more, if that may be and is enough."""
        if reentrant and len(requests) == 1:
            (request,) = requests
            for grant, held in self._held_of(me, request.resource):
                if held.access in ("write", request.access) and held.weight >= request.weight:
                    grant._depth += 1
                    if keep is not None:
                        keep.append(grant)
                    return grant
        return None

    def _in_its_own_way(self, requests: Sequence[Request], me: Me, reentrant: bool, timeout: float | None) -> bool:
        """Whether what we hold keeps out, by itself and for certain, what we ask for. Raises `Deadlock` rather than
        have us wait for ourselves. (Of a limit we may have one more, while there is room; the rest is found by the
        search for deadlocks.)
        """
        for request in requests:
            for grant, held in self._held_of(me, request.resource):
                if not held.excludes(request):
                    continue
                if timeout == 0:
                    return True
                what = "release it first, take what is needed in one go (weight=…, all_of), or pass reentrant=True"
                if held.access == READ and request.access == WRITE:
                    what = "make it the writer (grant.upgrade()), or release it first"
                elif reentrant:
                    what += " (which cannot turn what is held into more)"
                raise Deadlock(
                    f"This {me.kind} already holds {held.describe()} (position {grant.positions[request.resource]}) "
                    f"and would wait for itself; {what}",
                    resource=request.resource,
                )
        return False

    def _held_of(self, me: Me, resource: str) -> list[tuple[BaseGrant, Request]]:
        """What a thread or task of ours holds of a resource, the latest first."""
        return [
            (grant, next(one for one in grant._requests if one.resource == resource))
            for grant in reversed(self._held.get((me.number, resource), ()))
            if grant._why_lost is None
        ]

    def _locked(self, requests: Sequence[Request]) -> protocol.Operations[bool]:
        """Whether somebody else would now ask for these in vain."""
        self._require_open()

        def look(session: Session, _: int) -> tuple[list[list[Entry]], dict[str, Resource]]:
            entries = [session.entries(request.resource) for request in requests]
            return entries, {one.resource: one for one in session.resources()}

        entries, settings = yield protocol.Call("look", look)
        for request, ahead in zip(requests, entries, strict=True):
            setting = settings.get(request.resource)
            if setting is not None and setting.paused:
                return True
            # (Whose owner is known to be dead is removed by the next who tries.)
            there = [entry for entry in ahead if entry.state != "dead"]
            if not request.fits(there, None if setting is None else setting.cap):
                return True
        return False

    def _remember(self, grant: BaseGrant) -> None:
        with self._state_lock:
            self._grants.add(grant)
            for ticket in grant._tickets:
                self._held.setdefault((grant._owner, ticket.resource), []).append(grant)

    def _grants_of(self, me: Me, tickets: Sequence[Ticket]) -> list[BaseGrant]:
        with self._state_lock:
            held = self._held.get((me.number, tickets[0].resource), ()) if tickets else ()
            return [grant for grant in held if grant._tickets == tuple(tickets)]

    def _give_back(self, grant: BaseGrant, outcome: str = "released") -> protocol.Operations[None]:
        """End a grant. Raises `LockLost` when it was lost, before or just now."""
        if grant._pid != os.getpid() or (grant._released and grant._why_lost is None):
            grant._require()
        if grant._depth > 1:
            grant._depth -= 1
            return
        try:
            self._forget(grant)
            if grant._why_lost is None:
                for ticket in grant._tickets:
                    yield from self._return(ticket, outcome, grant)
                    log.debug("Released %r at %d", ticket.resource, ticket.position)
        except BaseException:
            self._abandon(grant)
            raise
        if grant._why_lost is not None:
            _stay_asleep_at_the_end()
            grant._require()

    def _abandon(self, grant: BaseGrant) -> None:
        """Giving back was interrupted: rows that nobody knows are removed by the next ping."""
        self._forget(grant)
        self._member.forget(grant._tickets)
        self._member.disown()

    def _forget(self, grant: BaseGrant) -> None:
        with self._state_lock:
            grant._released = True
            self._grants.discard(grant)
            for ticket in grant._tickets:
                held = self._held.get((grant._owner, ticket.resource), [])
                if grant in held:
                    held.remove(grant)
                if not held:
                    self._held.pop((grant._owner, ticket.resource), None)

    def _return(self, ticket: Ticket, outcome: str, grant: BaseGrant) -> protocol.Operations[None]:
        """Give one number back. What cannot be given back in time is lost."""
        why = None
        try:
            there = yield from self._member.give_back(ticket, outcome, self._member.seconds_left())
            if not there:
                why = "its row was removed before it was released"
        except Unavailable as exc:
            self._member.forget([ticket])  # the next good ping removes it
            why = f"it could not be given back in time ({exc})"
        if why is not None:
            grant._lose(why)

    def _nudge(self, resource: str) -> None:
        """Tell our own first waiter on a resource that something left."""
        queue = self._queues.get(resource)
        if queue:
            with contextlib.suppress(IndexError):  # it may have left this instant
                queue[0].event.set()

    def _require_open(self) -> None:
        if self._closed:
            _stay_asleep_at_the_end()
            self._member.require_open()

    # -- what the membership tells us ---------------------------------------------------------------------------

    def holds_any(self) -> bool:
        """Whether anything is held that could be lost."""
        return bool(self._grants or self._claims)

    def undone(self) -> Iterator[Callable[[Session, int], object]]:
        """Ends of tasks: whoever forgets one has the task running, by a member that lives, for ever."""
        ends = [end for at, end in list(self._ended) if monotonic() - at < UNDONE]
        if ends and self.engine.beacon_may_fail:
            uid = f"{self._secret}{os.getpid():x}.again"
            yield lambda session, me: session.next_tasks(me, ends, "", "", uid, True, 0)

    def unblock(self) -> None:
        """End waits whose answer is overdue: the line may be dead without a word."""
        now = monotonic()
        with self._state_lock:
            overdue = [session for session, due in self._waiting.items() if due < now]
        for session in overdue:
            log.warning("%s does not answer a wait; dropping the connection", self.engine.where)
            session.interrupt()

    def returned(self, ticket: Ticket) -> None:
        """A number was given back. (Told by the thread that did it: a task would only hear of it a moment later.)"""
        self._nudge(ticket.resource)

    def tidy(self) -> None:
        """Give back what was held, and withdraw what was asked, in event loops that are closed."""
        for loop in [loop for loop in list(self._drivers) if loop.is_closed()]:
            driver = self._drivers.pop(loop, None)
            if driver is not None:
                driver.end()

    def lose(self, positions: Iterable[int] | None, why: str) -> None:
        """Declare what stands on these rows (None: everything) lost: flag, event, callback, in this order."""
        with self._state_lock:
            wanted = None if positions is None else set(positions)
            lost = [
                grant
                for grant in self._grants
                if wanted is None or any(ticket.position in wanted for ticket in grant._tickets)
            ]
            for grant in lost:
                grant._lose(why)
                self._grants.discard(grant)
            claims = self._claims.take() if positions is None else []
        for claim in claims:
            claim._lose(why)
            log.error("Lost %r: %s", claim, why)
        for grant in lost:
            log.error("Lost the lock on %r at %d: %s", grant.resource, grant.position, why)
            if grant._on_lost is not None:
                try:
                    grant._on_lost(grant)
                except Exception:
                    log.exception("on_lost of %r failed", grant.resource)

    # -- deadlocks ----------------------------------------------------------------------------------------------

    def _requests_held(self, number: int) -> list[Request]:
        """What a thread or task of ours holds."""
        with self._state_lock:
            return [request for grant in self._grants if grant._owner == number for request in grant._requests]

    def _suspect(self, suspect: Suspect, tickets: Sequence[Ticket], number: int) -> bool:
        """A thread or task begins to wait. False when that can be no part of a deadlock, as it has nothing else."""
        if len(tickets) < 2 and not self._requests_held(number) and not self._above:
            return False
        with self._state_lock:
            self._suspects.update((ticket.position, suspect) for ticket in tickets)
            if self._lookout is None and not self._closed:
                self._lookout = threading.Thread(target=self._look_out, name="sqlsem-lookout", daemon=True)
                try:
                    self._lookout.start()
                except RuntimeError as exc:  # no more threads, or this process is ending
                    self._lookout = None
                    log.warning("Nobody looks for deadlocks of this process: %s", exc)
        return True

    def _acquit(self, tickets: Sequence[Ticket]) -> None:
        """It waits no more. May be repeated."""
        with self._state_lock:
            for ticket in tickets:
                self._suspects.pop(ticket.position, None)

    def _look_out(self) -> None:
        """Look for deadlocks for as long as anybody of ours waits who may be in one. On a session of its own, as the
        main one has to be free for the pings.
        """
        while True:
            self._member.closing.wait(LOOK_EVERY)
            with self._state_lock:
                if self._closed or not self._suspects:
                    # In one go: whoever waits next makes a new one.
                    session, self._looking, self._lookout = self._looking, None, None
                    break
                if self._looking is None and self._idle:
                    self._looking = self._idle.pop()
            try:
                if self._looking is None:
                    self._looking = self.engine.connect("wait")
                with self._waits(self._looking, OVERDUE):
                    self._find_deadlocks(self._looking)
            except Exception as exc:
                if not self._closed:
                    known = isinstance(exc, SqlsemError)
                    log.warning("Could not look for deadlocks, trying again: %s", exc, exc_info=not known)
                session, self._looking = self._looking, None
                if session is not None:
                    session.close()
        if session is not None:
            self._keep_idle(session)

    def _find_deadlocks(self, session: Session) -> None:
        """Ask for deadlocks whose youngest request is ours, and tell who made it."""
        deadline = monotonic() + SETTLE
        told: set[int] = set()
        while self._suspects and self._member.member_id is not None and monotonic() < deadline:
            found = session.find_deadlock(self._member.member_id)
            if found is None and self._above:
                found = nesting.find_deadlock(session, self._member.member_id)
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
            if self._member.closing.wait(0.02):
                return

    # -- waiting sessions ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _waiting_session(self, timeout: float) -> Iterator[Session | None]:
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
            with self._waits(session, timeout):
                yield session
            sound = True
        finally:
            with self._state_lock:
                self._places += 1
            if session is not None:
                if sound:
                    self._keep_idle(session)
                else:
                    session.close()

    def _keep_idle(self, session: Session) -> None:
        """Keep a session that is in order for the next wait, or close it."""
        with self._state_lock:
            keep = not self._closed and len(self._idle) < MOST_IDLE_SESSIONS
            if keep:
                self._idle.append(session)
        if not keep:
            session.close()

    @contextlib.contextmanager
    def _waits(self, session: Wire, timeout: float) -> Iterator[None]:
        """While a session waits it is interrupted when its answer is overdue, and when this coordinator is closed."""
        with self._state_lock:
            self._waiting[session] = monotonic() + timeout + max(3.0, self._member.trust)
        try:
            self._member.require_open()
            yield
        finally:
            with self._state_lock:
                self._waiting.pop(session, None)

    # -- for sqlsem.aio -----------------------------------------------------------------------------------------

    @property
    def aio(self) -> Face:
        """The same locks for tasks of asyncio: ``await coordinator.aio.mutex("x").acquire()``; see `sqlsem.aio`."""
        from sqlsem.aio import Face

        return Face(self)

    def _submit(self, pool: str, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread do what asyncio cannot await: one for the 'calls' on the main session, a few for 'waits'."""
        threads = self._pools.get(pool)
        if threads is None:
            with self._state_lock:
                self._member.require_open()
                if pool not in self._pools:
                    most = 1 if pool == "calls" else self.engine.async_sessions
                    self._pools[pool] = ThreadPoolExecutor(most, thread_name_prefix=f"sqlsem-aio-{pool}")
                threads = self._pools[pool]
        try:
            return threads.submit(call, *arguments)
        except RuntimeError:
            self._require_open()  # closed this instant
            raise

    # -- what people see and operators do -----------------------------------------------------------------------

    def entries(self, resource: str | None = None) -> list[Entry]:
        """The queue as it is now: who holds and who waits, one or all resources."""
        return self._look(lambda session: session.entries(resource))

    def history(
        self,
        resource: str | None = None,
        *,
        most: int = 100,
        since: Duration | None = None,
        until: Duration | None = None,
        outcome: str | None = None,
    ) -> list[Past]:
        """Finished requests, newest first.

        Args:
            resource: Of this one only.
            most: So many at the most.
            since: That ended no longer ago than this (``"24h"``), by the database's clock.
            until: That ended no shorter ago than this.
            outcome: That ended so: ``"released"``, ``"timeout"``, ``"cancelled"``, ``"reaped"``, ``"revoked"`` or
                ``"lost"``.
        """
        wanted: dict[str, Any] = {}
        if since is not None:
            wanted["since"] = check_duration("since", since)
        if until is not None:
            wanted["until"] = check_duration("until", until)
        if outcome is not None:
            wanted["outcome"] = outcome
        return self._look(lambda session: session.history(resource, most, **wanted))

    def resources(self) -> list[Resource]:
        """All resources that have rows or settings."""
        return self._look(lambda session: session.resources())

    def set_limit(self, resource: str, limit: int | None) -> None:
        """Cap a resource, whatever limit its users declare; None lifts the cap. Those inside stay inside."""
        name = check_name("The resource name", resource)
        if limit is not None:
            check_count("The limit", limit)
        self._look(lambda session: session.set_resource(name, "cap", limit))

    def set_stale_after(self, resource: str, seconds: Duration | None) -> None:
        """Remove rows of bare participants (that have no beacon and no lease) at this age; None: never."""
        name = check_name("The resource name", resource)
        value = None
        if seconds is not None:
            value = max(1, int(check_duration("stale_after", seconds, zero=False) * 1000))
        self._look(lambda session: session.set_resource(name, "stale_after", value))

    def pause(self, resource: str) -> None:
        """Let nobody else in until `resume`. Those inside stay inside; requests keep their place."""
        name = check_name("The resource name", resource)
        self._look(lambda session: session.set_resource(name, "paused", 1))

    def resume(self, resource: str) -> None:
        """Undo `pause`."""
        name = check_name("The resource name", resource)
        self._look(lambda session: session.set_resource(name, "paused", 0))

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

    def tasks(self, queue: str | None = None, status: str | None = None, *, most: int = 100) -> list[TaskEntry]:
        """Tasks of one or all queues: open ones in the order in which they will run, then the ended, newest first."""
        return self._look(lambda session: session.list_tasks(queue, status, most))

    def attempts(self, task_id: int) -> list[Attempt]:
        """Every attempt at a task: who, when, how long, how it ended."""
        return self._look(lambda session: session.task_attempts(task_id))

    def retry_task(self, task_id: int) -> None:
        """Make a failed or cancelled task pending again. Raises `NotHeld` when it is neither."""
        self._set_task(task_id, "retry", "failed or cancelled")

    def cancel_task(self, task_id: int) -> None:
        """Take a pending or failed task out of its queue. Raises `NotHeld` when it is neither (running ones run on)."""
        self._set_task(task_id, "cancel", "pending or failed")

    def _set_task(self, task_id: int, what: str, states: str) -> None:

        def change(session: Session) -> int:
            code = session.set_task(task_id, what)
            if code == RUNS:
                # Its worker may be dead, without anybody having looked.
                with contextlib.suppress(ConfigurationError):  # not everybody may look
                    if session.recover_tasks(None, None):
                        code = session.set_task(task_id, what)
                        # It is pending again by that.
                        return 0 if what == "retry" and code < RUNS else code
            return code

        code = self._look(change)
        if code != 0:
            why = {RUNS: "it runs", -1: "there is no such task"}.get(code, f"it is not {states}")
            raise NotHeld(f"Cannot {what} task {task_id}: {why}; see: sqlsem tasks")
        self.ring()

    def ring(self) -> None:
        """Tell those in this process who wait for tasks that something has changed."""
        with self._bell:
            self.rung += 1
            self._bell.notify_all()

    def await_ring(self, rung: int, timeout: float) -> None:
        """Wait for a ring after the one of that number."""
        with self._bell:
            self._bell.wait_for(lambda: self.rung != rung or self._closed, timeout)

    def _execute(self, text: str, started: Callable[[Session], None]) -> str | None:
        """Run the SQL of a task on a connection of its own."""
        self._require_open()
        session = self.engine.connect("work")
        try:
            started(session)
            return session.execute(text)
        finally:
            session.close()

    def _look(self, call: Callable[[Session], T]) -> T:
        """Do something that needs no membership, on a connection of its own."""
        self._require_open()
        member = self._member
        for attempt in tenacity.Retrying(
            sleep=tenacity.sleep_using_event(member.closing), **member.policy("A look", None)
        ):
            with attempt:
                session = self.engine.connect("look")
                with bounded(session, self._look_limit):
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
        self._member.closing.set()
        with self._state_lock:
            waiting = list(self._waiting)
            held = {ticket.position for grant in self._grants for ticket in grant._tickets}
            positions = {waiter.position for queue in self._queues.values() for waiter in queue} - held
            tickets = [self._member.tickets[one] for one in positions if one in self._member.tickets]
            for queue in self._queues.values():
                for waiter in queue:
                    waiter.event.set()
        for session in waiting:
            session.interrupt()
        self._member.close(tickets)
        lookout = self._lookout
        if lookout is not None and lookout is not threading.current_thread():
            lookout.join(SETTLE)
        self.lose(None, "its coordinator was closed")
        with self._state_lock:
            idle, self._idle = self._idle, []
            pools, self._pools = self._pools, {}
        for session in idle:
            session.close()
        for pool in pools.values():
            pool.shutdown(wait=False)
        for driver in list(self._drivers.values()):
            driver.soon(driver.end)
        _coordinators.discard(self)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Coordinator {self.engine.where}{', closed' if self._closed else ''}>"


class _Claims:
    """Tasks, parts and the like that this process has. Weakly: what nobody knows any more must give itself back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Task | Part | _Continuing] = weakref.WeakSet()

    def add(self, claim: Task | Part | _Continuing) -> None:
        with self._lock:
            self._known.add(claim)

    def discard(self, claim: Task | Part | _Continuing) -> None:
        with self._lock:
            self._known.discard(claim)

    def take(self) -> list[Task | Part | _Continuing]:
        """All that can be lost, and are forgotten; parts and continuations learn at their end what became of them."""
        with self._lock:
            claims = [claim for claim in self._known if claim.can_be_lost]
            for claim in claims:
                self._known.discard(claim)
        return claims

    def __bool__(self) -> bool:
        return len(self._known) > 0


_threads = threading.local()
_numbers = itertools.count(1)


def number_for() -> int:
    """A number for a thread or a task that no other ever gets; the system's are used again."""
    return next(_numbers)


def _this_thread() -> Me:
    number: int | None = getattr(_threads, "number", None)
    if number is None:
        number = _threads.number = number_for()
    return Me("thread", number, threading.current_thread().name)


_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()
#: Connections of the process we were forked from: never used, never closed, as that would end the parent's sessions.
_inherited: list[object] = []


def _after_fork_in_child() -> None:
    for coordinator in list(_coordinators):
        main = coordinator._member.inherited()
        single = [one for one in (main, coordinator._looking) if one is not None]
        sessions: list[Wire] = [*single, *coordinator._idle, *coordinator._waiting]
        for driver in coordinator._drivers.values():
            sessions += driver.idle
        for session in sessions:
            session.abandon()
        _inherited.extend(sessions)
        if not coordinator._closed:
            coordinator._fresh()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


_ending = False  # the interpreter


def _stay_asleep_at_the_end() -> None:
    """At its end Python stops daemon threads wherever they are. No thread shall come back just then to tell of it:
    where one is stopped while it writes to standard error, Python aborts the whole process.
    """
    if _ending and threading.current_thread().daemon:
        threading.Event().wait()


@atexit.register
def _at_exit() -> None:
    global _ending
    _ending = True
    for coordinator in list(_coordinators):
        coordinator.close()


def connect(url: engines.Database, **options: Unpack[ConnectOptions]) -> Coordinator:
    """A coordinator for one database; see `Coordinator`. Connects when first used.

    Args:
        url: A URL: ``sqlite:///file.db`` (``?mode=ro`` only looks, ``?mode=rw`` creates nothing), ``postgresql://…``,
            ``mssql://…`` (SQLAlchemy's too, as ``postgresql+psycopg://…``), or an ODBC string; a `pathlib.Path` of an
            SQLite file; an engine of SQLAlchemy.
        options: All of them may be left out; durations are seconds, ``"30s"`` or a `timedelta`:

            grace: For how long a member that cannot be found is still believed to live (default 5). With 0 the session
                is the lock: it goes with the connection, and others may be let in before the loser knows.
            lease: A lease of that length, renewed by pings, where no session can be kept (PgBouncer in transaction
                mode).
            retry: For how long a call tries to reach a database that is away, before `Unavailable` (default 10).
            schema: The schema of the tables (default ``sqlsem``); for SQLite, the prefix of their names.
            table: The name of the queue's table (default ``ProcessControl``).
            creator: A callable that returns a new DB-API connection; the URL then only names the engine.

    Raises `ConfigurationError` for what is no database, and for options that cannot be.
    """
    check_options("connect()", options, ConnectOptions.__optional_keys__)
    return Coordinator(url, **options)
