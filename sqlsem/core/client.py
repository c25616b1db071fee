"""This process in one database: everything that its faces work on.

How it proves that it lives is `membership`; what it holds, `holdings`; who of it waits, and in which sessions,
`waiting`; how a lock is had, `acquire`.

Invariants
    The membership's ``state_lock`` guards what we believe: rows, holdings, local queues, suspects. It is never held
    during I/O.
"""

from __future__ import annotations

import itertools
import os
import socket
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import tenacity

from sqlsem import runtime
from sqlsem.core import nesting, shutdown
from sqlsem.core.callers import Caller, this_thread
from sqlsem.core.cancellation import CancellationMonitor
from sqlsem.core.change_counter import ChangeCounter
from sqlsem.core.claims import Claim, Claims
from sqlsem.core.contention import ContentionMonitor
from sqlsem.core.deadlock_monitor import DeadlockMonitor
from sqlsem.core.effects import NO_CONNECTION, Call, Effect, Sleep, WaitFor
from sqlsem.core.event_bus import EventBus, drain, global_bus
from sqlsem.core.event_loops import EventLoops
from sqlsem.core.grant_registry import BaseGrant, GrantRegistry
from sqlsem.core.membership import Membership
from sqlsem.core.notifications import NotificationListener
from sqlsem.core.priority_waiters import PriorityWaiters
from sqlsem.core.threads import Pool, call_out, hush, spawn, spawn_in_handler, voice, when_all
from sqlsem.core.wait_pool import WaitConnectionPool
from sqlsem.core.waiter_queues import WaiterQueues
from sqlsem.engines.base import AdaptiveTimeout, Engine, EngineConnection, Session, time_limited
from sqlsem.engines.protocol import LockSession
from sqlsem.model import End, Entry, Ticket, monotonic

__all__ = ["DatabaseClient", "processes"]

log = voice
T = TypeVar("T")

#: Seconds that the server may be behind in what it has told us is done, when another one takes over from it.
UNDONE_SECONDS = 60.0
#: Why a lock is lost that was held when `DatabaseClient.close` was called.
CLOSED = "its coordinator was closed"
#: At the end, for what happened before to be told.
TELL_SECONDS = 1.0
#: So many callbacks of losses may run at a time.
MOST_CALLBACKS = 32


class DatabaseClient:
    """This process in one database; it lasts as long as its coordinator is open. `Membership` reports to it.

    Attributes:
        engine: The database.
        retry: Seconds for which a call tries to reach it.
        bus: Who is told what happens.
        callbacks: The threads in which ``on_lost`` is called.
        telling: The thread that tells of losses.
        member: This process as a member, with the main session.
        state_lock: Guards what we believe to have; the membership's.
        holdings: Its grants.
        claims: Its tasks, parts and callbacks.
        recent_ends: Ends of tasks, and when each was recorded: a server that takes over may not know them.
        looks: What was seen of queues a moment ago, and when (see `sqlsem.core.timeout_details`).
        lines: Who of it waits.
        turns: Who of it waits by priority.
        wait_pool: The sessions to wait in.
        watch: Looks for deadlocks.
        minder: Learns what is asked of its tasks.
        wanted: Looks for those who wait behind what is held here.
        bell: Tells of changes to the work queue.
        news: Hears of those that others make.
        loops: What its event loops have.
        above: What those hold under whom this process runs.
        secret: Tells this process from others of the same number.
    """

    def __init__(self, engine: Engine, retry: float) -> None:
        self.engine = engine
        self.retry = retry
        self.event_bus = EventBus(engine.label, global_bus)
        self._finalizer: weakref.finalize[Any, DatabaseClient] | None = None
        self._reset()
        _processes.add(self)

    def _reset(self) -> None:
        """The state of one that has done nothing yet; in a forked child, too."""
        self._look_limit = AdaptiveTimeout(max(1.0, self.retry))  # what a look at the tables may take
        self.member = Membership(self.engine, self, self.retry)
        self.state_lock = self.member.state_lock
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.nonce = os.urandom(4).hex()
        self._uid = f"{self.nonce}{os.getpid():x}."  # what each begins with
        self._uids = itertools.count(1)
        self.callback_pool = Pool("sqlsem-lost", MOST_CALLBACKS, patient=True)
        self.loss_log_pool = Pool("sqlsem-told", 1, patient=True)
        self.registry = GrantRegistry(self.member, self.event_bus)
        self.claims = Claims(self.member)
        self.recent_ends: deque[tuple[float, End]] = deque(maxlen=256)
        self.parent_locks = nesting.ParentLocks()
        self.queue_cache: dict[str, tuple[float, list[Entry]]] = {}
        self.waiter_queues = WaiterQueues(self.state_lock)
        self.priority_waiters = PriorityWaiters(self.state_lock)
        self.wait_pool = WaitConnectionPool(self.member)
        self.deadlock_monitor = DeadlockMonitor(self.member, self.registry, self.wait_pool, self.parent_locks)
        self.cancellation_monitor = CancellationMonitor(self.member, self.claims)
        self.contention_monitor = ContentionMonitor(self.member, self.wait_pool)
        self.queue_changes = ChangeCounter(self.member.closing)
        self.notifications = NotificationListener(self.engine, self.queue_changes, self.member.closing)
        self.event_loops = EventLoops(self.member)
        if self._finalizer is not None:
            self._finalizer.detach()  # of the parent's
        parts = (
            self.member,
            self.wait_pool,
            self.notifications,
            self.cancellation_monitor,
            [self.callback_pool, self.loss_log_pool],
            self.event_loops.pools,
        )
        self._finalizer = weakref.finalize(self, _dropped, *parts)
        self._finalizer.atexit = False

    def requesting_id(self, caller: Caller) -> str:
        """Who asks, for those who look at the table."""
        return f"{self.name}:{caller.number}:{self.nonce}"

    def new_uid(self) -> str:
        """An id for one request alone."""
        return f"{self._uid}{next(self._uids)}"

    # -- effects ------------------------------------------------------------------------------------------------

    def execute_effect(self, effect: Effect) -> Any:
        """Carry out an effect, blocking."""
        member = self.member
        if member.closing.is_set():
            shutdown.stay_asleep()
        if isinstance(effect, Call):
            return member.main.call(
                effect.what, effect.call, effect.retry_timeout, counts_as_heartbeat=effect.counts_as_heartbeat
            )
        if isinstance(effect, WaitFor):
            with self.wait_pool.connection(effect.timeout) as session:
                if session is None:
                    return NO_CONNECTION
                wait = session.upgrade if effect.upgrade else session.wait
                return wait(effect.ticket, effect.timeout, effect.waiter.event)
        if isinstance(effect, Sleep):
            woken = effect.waiter.event.wait(effect.timeout)
            effect.waiter.event.clear()
            return woken
        return member.verify()

    def with_connection(self, call: Callable[[Session], T], role: type[Any] = LockSession) -> T:
        """Do something that needs no membership but a ``role`` of the engine's, on a connection of its own."""
        self.require_open()
        self.engine.require(role, "This")
        member = self.member
        for attempt in tenacity.Retrying(
            sleep=tenacity.sleep_using_event(member.closing), **member.main.retry_policy("A look", None)
        ):
            with attempt:
                session = self.engine.connect("look")
                with time_limited(session, self._look_limit):
                    try:
                        session.check_schema()
                        found = call(session)
                        session.require_in_place()
                        return found
                    finally:
                        session.close()
        raise AssertionError("unreachable")

    def run_sql(self, text: str, started: Callable[[Session], None]) -> str | None:
        """Run the SQL of a task on a connection of its own."""
        self.require_open()
        session = self.engine.connect("work")
        try:
            started(session)
            return session.execute(text)
        finally:
            session.close()

    # -- what the membership tells us ---------------------------------------------------------------------------

    def holds_any(self) -> bool:
        """Whether anything is held that could be lost."""
        return bool(self.registry or self.claims)

    def mark_lost_and_log(self, positions: Collection[int], why: str) -> None:
        """As `lose`, where a program's thread has found it out: what is logged is logged when this returns."""
        self.mark_lost(positions, why)
        done = runtime.event()
        _have_done(self.loss_log_pool, done.set)
        done.wait(TELL_SECONDS)

    def mark_lost(self, positions: Collection[int] | None, why: str) -> list[Future[None]]:
        """Declare what stands on these rows (None: everything) lost: flag, event, callback, in this order. Those who
        wait with one of them are woken. Callbacks, and the log, are left to other threads: who calls may hold the main
        session, or be the only one to learn of the next loss. Returns the callbacks.
        """
        lost = self.registry.mark_lost(positions, why)
        claims = self.claims.lose(why) if positions is None else []
        callbacks = [
            _have_done(self.callback_pool, call_out, f"on_lost of {grant.resource!r}", grant.state.on_lost, grant)
            for grant in lost
            if grant.state.on_lost is not None
        ]
        if lost or claims:
            _have_done(self.loss_log_pool, self._tell_lost, lost, claims, why)
        self.waiter_queues.wake(positions)
        self.priority_waiters.wake(positions)
        for grant in lost:  # those that waited for what was ours wait for others now
            for ticket in grant.state.tickets:
                self.notify_waiters(ticket.resource)
        return callbacks

    def _tell_lost(self, grants: list[BaseGrant], claims: list[Claim], why: str) -> None:
        for claim in claims:
            log.error("Lost %r: %s", claim, why)
        for grant in grants:
            self.registry.publish_lost(grant.state)

    def wake_waiters(self, positions: Collection[int]) -> None:
        """Who waits with one of these rows shall see that it is gone."""
        self.waiter_queues.wake(positions)
        self.priority_waiters.wake(positions)

    def calls_to_repeat(self) -> Iterator[Callable[[Session, int], object]]:
        """Ends of tasks: a server that forgets one has the task running, by a member that lives, for ever."""
        ends = [end for at, end in list(self.recent_ends) if monotonic() - at < UNDONE_SECONDS]
        if ends and self.engine.beacon_may_fail:
            uid = f"{self._uid}again"
            yield lambda session, me: session.next_tasks(me, ends, "", "", uid, True, 0)

    def handle_release(self, ticket: Ticket, session: Session, member_id: int) -> None:
        """A number was given back: the next one of ours may have it. (Told by the thread that did it: a task would only
        hear of it a moment later.)
        """
        self.priority_waiters.notify(ticket.resource)
        self.waiter_queues.grant_next_local(ticket.resource, session, member_id)

    def notify_waiters(self, resource: str) -> None:
        """Something left this resource: looking may pay for those of ours who wait there."""
        self.priority_waiters.notify(resource)
        self.waiter_queues.notify(resource)

    def interrupt_overdue(self) -> None:
        """End waits whose answer is overdue."""
        self.wait_pool.interrupt_overdue()

    def clean_up(self) -> None:
        """Give up what belonged to event loops that are closed; and nobody shall wait who was not told to go."""
        self.event_loops.tidy()
        self.waiter_queues.wake_missed()

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self.member.closing.is_set()

    def require_open(self) -> None:
        """Raise `ConfigurationError` after `close`."""
        if self.closed:
            shutdown.stay_asleep()
            self.member.main.require_open()

    def close(self, by: int | None = None) -> None:
        """Release everything, close the connections, end the threads. ``by``: the number of the task that awaits it."""
        if self.closed:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        self.member.closing.set()
        self.waiter_queues.wake(None)
        self.priority_waiters.wake(None)
        self.wait_pool.interrupt_all()
        self.notifications.close()
        self.cancellation_monitor.close()
        callbacks = self.mark_lost(self._held_by_others(by), CLOSED)  # before anybody else can be granted
        if callbacks:
            returned = runtime.event()
            when_all(callbacks, returned.set)
            returned.wait(TELL_SECONDS)
        if self.member.close(self._waited_for()):
            self.registry.close(CLOSED)
        self.deadlock_monitor.close()
        self.contention_monitor.close()
        self.mark_lost(None, CLOSED)
        self.loss_log_pool.close(TELL_SECONDS)
        self.callback_pool.close(TELL_SECONDS)
        self.wait_pool.close_idle()
        self.event_loops.close()
        _processes.discard(self)

    def _held_by_others(self, by: int | None) -> list[int]:
        """The positions held by threads and tasks that run on after `close`, and so lose them: not the caller of
        `close`, and nobody at the end of the interpreter.
        """
        if shutdown.has_begun():
            return []
        callers = {this_thread().number, self.event_loops.running(), by}
        registry = [grant.state for grant in self.registry.grants()]
        lost = [state for state in registry if state.caller.number not in callers and state.caller.is_running]
        return [ticket.position for one in lost for ticket in one.tickets]

    def _waited_for(self) -> list[Ticket]:
        """The rows of those who wait."""
        held = {ticket.position for grant in self.registry.grants() for ticket in grant.state.tickets}
        positions = {
            waiter.position for waiter in (*self.waiter_queues.waiters(), *self.priority_waiters.waiters())
        } - held
        with self.state_lock:
            return [self.member.tickets[position] for position in positions if position in self.member.tickets]

    def after_fork(self) -> list[EngineConnection]:
        """In a forked child: begin anew. Returns the parent's connections, which are never used or closed here, as that
        would end the parent's sessions.
        """
        main = self.member.main.session
        sessions: list[EngineConnection] = [
            *([] if main is None else [main]),
            *self.notifications.sessions(),
            *self.deadlock_monitor.sessions(),
            *self.contention_monitor.sessions(),
            *self.wait_pool.sessions(),
            *self.event_loops.sessions(),
        ]
        for session in sessions:
            session.discard()
        if not self.closed:
            self._reset()
        return sessions

    def __repr__(self) -> str:
        return f"<Coordinator {self.engine.label}{', closed' if self.closed else ''}>"


def _dropped(
    member: Membership,
    room: WaitConnectionPool,
    news: NotificationListener,
    minder: CancellationMonitor,
    pools: list[Pool],
    more_pools: Mapping[str, Pool],
) -> None:
    """A coordinator was dropped without being closed. It holds nothing then; its threads and connections end.

    Called by the garbage collector: in any thread, with any lock held. So another thread does it.
    """
    if member.main.session is None and not member.heartbeat_thread.needed:
        return
    warnings.warn(
        f"unclosed coordinator of {member.engine.label}; use it in a with block, or close() it",
        ResourceWarning,
        stacklevel=2,
    )

    def close() -> None:
        member.closing.set()
        room.interrupt_all()
        news.close()
        minder.close()
        member.close()
        room.close_idle()
        for pool in (*pools, *more_pools.values()):
            pool.close()

    spawn_in_handler(lambda: spawn(close, "sqlsem-close"), "sqlsem-close")


def _have_done(pool: Pool, call: Callable[..., object], *arguments: Any) -> Future[Any]:
    """Have a pool do something; here, where it has just been closed."""
    try:
        return pool.submit(call, *arguments)
    except RuntimeError:
        done: Future[Any] = Future()
        done.set_result(call(*arguments))
        return done


_processes: weakref.WeakSet[DatabaseClient] = weakref.WeakSet()
_inherited: list[EngineConnection] = []  # kept, as they would be closed by being forgotten


def processes() -> list[DatabaseClient]:
    """All that are open: one for each coordinator."""
    return [client for client in list(_processes) if not client.closed]


def _after_fork_in_child() -> None:
    for client in list(_processes):
        _inherited.extend(client.after_fork())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@shutdown.at_end
def _at_exit() -> None:
    drain(TELL_SECONDS)
    shutdown.begin()
    for client in list(_processes):
        client.close()
    hush(TELL_SECONDS)
