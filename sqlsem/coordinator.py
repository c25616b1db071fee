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
import secrets
import socket
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import tenacity

from sqlsem import engines, protocol
from sqlsem.engines.base import Busy, Creator, Disconnected, Engine, Options, Session, bounded
from sqlsem.errors import ConfigurationError, Deadlock, LockLost, NotHeld, SqlsemError, Unavailable
from sqlsem.membership import Membership
from sqlsem.model import (
    Attempt,
    Entry,
    Past,
    Request,
    Resource,
    TaskEntry,
    Ticket,
    check_count,
    check_name,
    check_seconds,
    monotonic,
)

if TYPE_CHECKING:
    from sqlsem.rounds import Part, _Continuing
    from sqlsem.tasks import Task

__all__ = ["Coordinator", "Grant", "connect"]

log = logging.getLogger("sqlsem")
T = TypeVar("T")
LostCallback = Callable[["Grant"], object]

#: Connections that may wait in the database at the same time; more waiters than these look from time to time.
MOST_WAITING_SESSIONS = 8
#: Connections kept for the next wait. With the main session that makes three.
MOST_IDLE_SESSIONS = 2


class Grant:
    """What one has while inside: made by acquiring, ended by releasing. Safe to use from several threads.

    Attributes:
        resource: The resource's name (of the first one, for ``all_of``).
        position: The number in the queue (``queue_position`` in the table).
        positions: Each resource's position.
        fence: A number that grows with every grant of a mutex; store it with what you write, and refuse smaller ones.
        waited: Seconds between asking and being let in.
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
        self._lost_event: threading.Event | None = None

    @property
    def lost(self) -> bool:
        """Whether the lock is lost. Answered from memory, except right after this process was paused for long:
        then the database is asked, for a second at most.
        """
        if self._why_lost is None and not self._released:
            self._coordinator._member.doubt()
        return self._why_lost is not None

    @property
    def lost_event(self) -> threading.Event:
        """An event that is set when the lock is lost, for those who wait."""
        if self._lost_event is None:
            with self._coordinator._state_lock:
                self._lost_event = self._lost_event or threading.Event()
            if self._why_lost is not None:
                self._lost_event.set()
        return self._lost_event

    def _lose(self, why: str) -> None:
        self._why_lost = why
        if self._lost_event is not None:  # read after the flag was set, as lost_event does it the other way round
            self._lost_event.set()

    def check(self) -> None:
        """Ask the database, now, whether the lock is still held; raises `LockLost` or `NotHeld` when not.

        >>> with sqlsem.mutex("nightly") as grant:  # doctest: +SKIP
        ...     for part in parts:
        ...         grant.check()
        ...         load(part)
        """
        self._require()
        self._coordinator._member.ping()
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
                self._coordinator.lose([ticket.position], "its row is no longer in the table")
                self._require()

    def release(self) -> None:
        """Give the lock back, from any thread. Raises `NotHeld` when done before, `LockLost` when it was lost."""
        self._coordinator._give_back(self)

    def _abandon(self) -> None:
        if self._depth > 1:
            self._depth -= 1
        else:
            self._coordinator._abandon(self)

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
        self.engine: Engine = engines.of_url(url)(url, options, creator)
        self.retry = float(retry)
        self._closed = False
        self._fresh()
        _coordinators.add(self)

    def _fresh(self) -> None:
        """The state of a coordinator that has done nothing yet in this process."""
        self._member = Membership(self.engine, self, self.retry)
        self._state_lock = self._member.state_lock
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._secret = secrets.token_hex(4)
        self._uids = itertools.count(1)
        self._grants: set[Grant] = set()
        # (A task that nobody knows any more gives itself back.)
        self._claims = _Claims()
        self._bell = threading.Condition()
        self.rung = 0
        self._held: dict[tuple[int, str], list[Grant]] = {}
        self._queues: dict[str, list[_Waiter]] = {}
        self._idle: list[Session] = []
        self._waiting: dict[Session, float] = {}  # until when the answer is due
        self._places = MOST_WAITING_SESSIONS

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

    def queue(self, name: str, **options: Any) -> Any:
        """See `sqlsem.queue`."""
        from sqlsem import tasks

        return tasks.queue(name, coordinator=self, **options)

    def round(self, name: str, parts: Iterable[str], **options: Any) -> Any:
        """See `sqlsem.round`."""
        from sqlsem import rounds

        return rounds.round(name, parts, coordinator=self, **options)

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
        owner = _thread_number()
        shared = self._already(requests, owner, reentrant)
        if shared is not None:
            shared._depth += 1
            if keep is not None:
                keep.append(shared)
            return shared
        requesting_id = f"{self._name}:{owner}:{self._secret}"
        uid = f"{self._secret}{os.getpid():x}.{next(self._uids)}"
        work = _Work(self, requesting_id, threading.current_thread().name, uid, timeout)
        began = monotonic()
        grant = None
        try:
            tickets = protocol.drive(protocol.acquire(requests, uid, timeout), work.perform)
            if tickets is None:
                return None
            grant = Grant(self, requests, tickets, owner, monotonic() - began, on_lost)
            with self._state_lock:
                self._grants.add(grant)
                for ticket in tickets:
                    self._held.setdefault((owner, ticket.resource), []).append(grant)
            self._require_rows(grant)
            if keep is not None:
                keep.append(grant)
            return grant
        except BaseException:
            # An interrupt may strike between any two instructions; giving back twice is harmless.
            if keep is not None and grant is not None and grant in keep:
                keep.remove(grant)
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
        """While we waited, the main session may have been lost, and our rows with it."""
        self._member.doubt()
        missing = [ticket.position for ticket in grant._tickets if not self._member.knows(ticket)]
        if missing:
            self.lose(missing, "its row was removed before it could be used")
            grant._require()

    def _give_back(self, grant: Grant, outcome: str = "released") -> None:
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
                    self._return(ticket, outcome, grant)
        except BaseException:
            self._abandon(grant)
            raise
        if grant._why_lost is not None:
            grant._require()

    def _abandon(self, grant: Grant) -> None:
        """Giving back was interrupted: rows that nobody knows are removed by the next ping."""
        self._forget(grant)
        self._member.forget(grant._tickets)
        self._member.urge()

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
        """Give one number back. What cannot be given back in time is lost."""
        why = None
        try:
            if not self._member.give_back(ticket, outcome, self._member.seconds_left()):
                why = "its row was removed before it was released"
        except Unavailable as exc:
            self._member.forget([ticket])  # the next good ping removes it
            why = f"it could not be given back in time ({exc})"
        if why is not None:
            grant._lose(why)
        self._nudge(ticket.resource)

    def _nudge(self, resource: str) -> None:
        """Tell our own first waiter on a resource that something left."""
        queue = self._queues.get(resource)
        if queue:
            with contextlib.suppress(IndexError):  # it may have left this instant
                queue[0].event.set()

    def _require_open(self) -> None:
        if self._closed:
            self._member.require_open()

    # -- what the membership tells us ---------------------------------------------------------------------------

    def holds_any(self) -> bool:
        """Whether anything is held that could be lost."""
        return bool(self._grants or self._claims)

    def unblock(self) -> None:
        """End waits whose answer is overdue: the line may be dead without a word."""
        now = monotonic()
        with self._state_lock:
            overdue = [session for session, due in self._waiting.items() if due < now]
        for session in overdue:
            log.warning("%s does not answer a wait; dropping the connection", self.engine.where)
            session.interrupt()

    def returned(self, ticket: Ticket) -> None:
        """A number was given back that could not be given back before."""
        self._nudge(ticket.resource)

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
            with self._state_lock:
                self._waiting[session] = monotonic() + timeout + max(3.0, self._member.trust)
            self._require_open()
            yield session
            sound = True
        finally:
            with self._state_lock:
                self._places += 1
                if session is not None:
                    self._waiting.pop(session, None)
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
        name = check_name("The resource name", resource)
        if limit is not None:
            check_count("The limit", limit)
        self._look(lambda session: session.set_resource(name, "cap", limit))

    def set_stale_after(self, resource: str, seconds: float | None) -> None:
        """Remove rows of bare participants (that have no beacon and no lease) at this age; None: never."""
        name = check_name("The resource name", resource)
        if seconds is not None:
            check_seconds("stale_after", seconds, zero=False)
        value = None if seconds is None else max(1, int(seconds * 1000))
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
        code = self._look(lambda session: session.set_task(task_id, what))
        if code != 0:
            why = {1: "it runs", -1: "there is no such task"}.get(code, f"it is not {states}")
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
        for attempt in tenacity.Retrying(
            stop=tenacity.stop_after_delay(self.retry),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            retry=tenacity.retry_if_exception_type((Disconnected, Busy)),
            before_sleep=tenacity.before_sleep_log(log, logging.WARNING),
            reraise=True,
        ):
            with attempt:
                session = self.engine.connect("look")
                with bounded(session, max(1.0, self.retry)):
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
            for queue in self._queues.values():
                for waiter in queue:
                    waiter.event.set()
        for session in waiting:
            session.interrupt()
        self._member.close()
        self.lose(None, "its coordinator was closed")
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
_thread_numbers = itertools.count(1)


def _thread_number() -> int:
    """A number for the calling thread that no other ever gets; the system's are used again."""
    number: int | None = getattr(_threads, "number", None)
    if number is None:
        number = _threads.number = next(_thread_numbers)
    return number


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
        self.sent = False  # may have rows in the database
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
        member = self.coordinator._member

        def register(session: Session, member_id: int) -> list[Ticket] | None:
            self.sent = True
            tickets = session.register(
                member_id, self.requesting_id, self.owner, self.uid, step.requests, step.only_if_free
            )
            self.tickets = tickets or []
            member.add(self.tickets)
            return tickets

        try:
            member.registering(self.uid)
            return member.call("acquire", register, self.budget)
        finally:
            member.settled(self.uid)

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
            if not coordinator._member.knows(ticket):
                return None  # lost while we waited
        if first:
            try:
                with coordinator._waiting_session(step.timeout) as session:
                    if session is not None:
                        return self.answer(session.wait(ticket, step.timeout, waiter.event))
            except (Disconnected, Busy) as exc:
                coordinator._require_open()
                log.warning("Waiting for %r was interrupted, looking again: %s", ticket.resource, exc)
                waiter.event.wait(min(step.timeout, self.pause))
                self.pause = min(self.pause * 2, 0.5)
                if self.pause >= 0.5:
                    # Not for ever: the main session's own retries decide when it is an outage.
                    return self.look(ticket, waiter)
                return False
            # Too many of ours wait already: look from time to time.
            waiter.event.wait(min(step.timeout, self.pause))
            waiter.event.clear()
            self.pause = min(self.pause * 1.5, 1.0)
        elif waiter.event.wait(step.timeout):
            waiter.event.clear()
            return False
        # Behind others of ours there is nothing to gain by looking, but for labels and weights that mix.
        return self.look(ticket, waiter)

    def look(self, ticket: Ticket, waiter: _Waiter) -> bool | None:
        return self.answer(
            self.coordinator._member.call(
                "wait", lambda session, _: session.wait(ticket, 0.0, waiter.event), self.budget
            )
        )

    def answer(self, granted: bool | None) -> bool | None:
        if granted is None:
            self.coordinator._require_open()  # closing took the row away
        return granted

    def cancel(self, outcome: str) -> None:
        """Remove what this acquisition left; where that cannot be done now, the next good ping does it."""
        coordinator, member = self.coordinator, self.coordinator._member
        with coordinator._state_lock:
            ours = [grant for grant in coordinator._grants if grant._tickets == tuple(self.tickets)]
        for grant in ours:
            coordinator._forget(grant)
        try:
            if self.sent:
                member.call("cancel", lambda session, me: session.cancel(me, self.uid, outcome), min(1.0, self.budget))
                self.sent = False
        except SqlsemError as exc:
            if not coordinator._closed:
                log.warning("Could not withdraw a request at once: %s", exc)
        finally:
            member.forget(self.tickets)
        for ticket in self.tickets:
            coordinator._nudge(ticket.resource)

    def done(self) -> None:
        """Leave the local queues, and let the next of ours come forward."""
        self.coordinator._member.settled(self.uid)
        if not self.waiters:  # never waited
            return
        with self.coordinator._state_lock:
            for queue in [*self.coordinator._queues.values()]:
                queue[:] = [waiter for waiter in queue if waiter not in self.waiters.values()]
            for resource in [name for name, queue in self.coordinator._queues.items() if not queue]:
                del self.coordinator._queues[resource]
            nexts = [queue[0] for queue in self.coordinator._queues.values()]
        for waiter in nexts:
            waiter.event.set()


_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()
#: Connections of the process we were forked from: never used, never closed, as that would end the parent's sessions.
_inherited: list[object] = []


def _after_fork_in_child() -> None:
    for coordinator in list(_coordinators):
        main = coordinator._member.inherited()
        sessions = [*([main] if main is not None else []), *coordinator._idle, *coordinator._waiting]
        for session in sessions:
            session.abandon()
        _inherited.extend(sessions)
        if not coordinator._closed:
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
