"""The client of one database: the state and connections of this process that both APIs work on.

The membership (`membership`) proves that this process is alive. The grant registry has its grants; the waiter queues
and the wait pool serve its waiters. `acquire` and the other operations use them all.

Invariants
    The membership's ``state_lock`` guards the local copy of the state: rows, grants, queues, deadlock candidates. No
    thread holds it during I/O.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem.client.callers import Caller, this_thread
from sqlsem.client.connection.membership import Membership, MembershipOwner
from sqlsem.client.connection.wait_pool import WaitConnectionPool
from sqlsem.client.effects import NO_CONNECTION, Call, Effect, Effects, Sleep, WaitFor, WaitForEvent
from sqlsem.client.event_bus import EventBus, drain, global_bus
from sqlsem.client.event_loops import EventLoops
from sqlsem.client.held.claims import Claim, Claims
from sqlsem.client.held.registry import BaseGrant, GrantRegistry, GrantState
from sqlsem.client.monitors import parent_locks
from sqlsem.client.monitors.cancellation import CancellationMonitor
from sqlsem.client.monitors.contention import ContentionMonitor
from sqlsem.client.monitors.deadlocks import DeadlockMonitor
from sqlsem.client.monitors.notifications import ChangeCounter, NotificationListener
from sqlsem.client.waiters.priority_queues import PriorityWaiters
from sqlsem.client.waiters.queues import WaiterQueues
from sqlsem.engines.failures import AdaptiveTimeout, Busy, Conflict, Disconnected, time_limited
from sqlsem.util import runtime, shutdown
from sqlsem.util.process import host_name
from sqlsem.util.threads import (
    Pool,
    call_and_log,
    call_uninterrupted,
    log,
    spawn,
    spawn_in_handler,
    when_all,
)
from sqlsem.values.errors import Unavailable
from sqlsem.values.locks import Entry, Ticket, monotonic

if TYPE_CHECKING:
    from sqlsem.engines.base import Engine, EngineConnection, Session
    from sqlsem.engines.protocol import Capability
    from sqlsem.util.permits import Permit
    from sqlsem.values.tasks import End

__all__ = ["DatabaseClient", "open_clients"]

T = TypeVar("T")

#: A failover may lose commits that the server confirmed within this many seconds before.
FAILOVER_LOSS_SECONDS = 60.0
#: Why a lock is lost that was held when `DatabaseClient.close` was called.
CLOSED = "its coordinator was closed"
#: Seconds to wait, at the end, for callbacks to return and for events and log records to be written.
FLUSH_SECONDS = 1.0
#: The greatest number of ``on_lost`` callbacks that run at a time.
MAX_CALLBACKS = 32


class DatabaseClient(MembershipOwner):
    """The client of one database, for as long as its coordinator is open. It owns the `Membership`, which calls it
    back. Its other parts are described by their classes.
    """

    def __init__(self, engine: Engine, retry: float) -> None:
        self.engine = engine
        self.timing = engine.options.timing
        self.retry = retry  # seconds for which a call is retried
        self.event_bus = EventBus(engine.label, global_bus)
        self._finalizer: weakref.finalize[Any, DatabaseClient] | None = None
        self._reset()
        _clients.add(self)

    def _reset(self) -> None:
        """Set the initial state; also in a forked child."""
        self._call_timeout = AdaptiveTimeout(max(1.0, self.retry))  # for a call on a new connection
        self.member = Membership(self.engine, self, self.retry)
        self.state_lock = self.member.state_lock
        self.clock = self.member.clock  # of a simulation, if the client was made in one
        self.name = f"{host_name()}:{os.getpid()}"
        self.nonce = os.urandom(4).hex()  # distinguishes this process from an earlier one with the same pid
        self._uid_prefix = f"{self.nonce}{os.getpid():x}."
        self._uids = itertools.count(1)
        self.callback_pool = Pool("sqlsem-lost", MAX_CALLBACKS, patient=True)  # calls ``on_lost``
        self.loss_log_pool = Pool("sqlsem-losses", 1, patient=True)  # logs losses
        self.registry = GrantRegistry(self.member, self.event_bus)
        self.claims = Claims(self.member)
        #: Recent ends of tasks, with their times. After a failover the new server may lack them.
        self.recent_ends: deque[tuple[float, End]] = deque(maxlen=256)
        self.parent_locks = parent_locks.ParentLocks()
        #: The rows of queues read a moment ago, each with the time (`operations.timeout_details`).
        self.queue_cache: dict[str, tuple[float, list[Entry]]] = {}
        self.rate_batches: Any = None  # the batches of requests for rates (`acquire_rate`), once there are any
        self.waiter_queues = WaiterQueues(self.state_lock, self.timing.longest_poll)
        self.priority_waiters = PriorityWaiters(self.state_lock)
        self.wait_pool = WaitConnectionPool(self.member)
        self.deadlock_monitor = DeadlockMonitor(self.member, self.registry, self.wait_pool, self.parent_locks)
        self.cancellation_monitor = CancellationMonitor(self.member, self.claims)
        self.contention_monitor = ContentionMonitor(self.member, self.wait_pool)
        self.queue_changes = ChangeCounter(self.member.closing)
        self.notifications = NotificationListener(self.engine, self.queue_changes, self.member.closing)
        self.event_loops = EventLoops(self.member)
        if self._finalizer is not None:
            self._finalizer.detach()  # the parent's finalizer
        parts = (
            self.member,
            self.wait_pool,
            self.notifications,
            self.cancellation_monitor,
            [self.callback_pool, self.loss_log_pool],
            self.event_loops.pools,
        )
        self._finalizer = weakref.finalize(self, _close_dropped, *parts)
        self._finalizer.atexit = False

    def requesting_id(self, caller: Caller) -> str:
        """Return the id of a caller, as its rows have it in ``requesting_id``."""
        return f"{self.name}:{caller.number}:{self.nonce}"

    def new_uid(self) -> str:
        """Return a new unique id for one request."""
        return f"{self._uid_prefix}{next(self._uids)}"

    # -- effects ------------------------------------------------------------------------------------------------

    def execute_effect(self, effect: Effect) -> Any:
        """Carry out an effect, blocking."""
        member = self.member
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
        if isinstance(effect, WaitForEvent):
            return effect.event.wait()
        return member.verify()

    def with_connection(self, call: Callable[[Session], T], capability: Capability | None = None) -> T:
        """Make a call that needs no membership, on a new connection. ``capability``: the one that the call needs."""
        self.require_open()
        if capability is not None:
            self.engine.require(capability, "This")
        member = self.member
        with member.main.retries("A read") as retries:
            while True:
                try:
                    return self._read_once(call)
                except (Disconnected, Busy) as exc:
                    pause = retries.pause_after(exc)
                    if pause is None:
                        shutdown.block_daemon_thread()
                        raise
                member.closing.wait(pause)

    def _read_once(self, call: Callable[[Session], T]) -> T:
        session = self.engine.connect("look")
        with time_limited(session, self._call_timeout):
            try:
                session.check_schema()
                result = call(session)
                session.require_in_place()
                return result
            finally:
                session.close()

    def run_sql(self, text: str, started: Callable[[Session], None]) -> str | None:
        """Run the SQL of a task on a new connection; first call ``started`` with the session, for interrupts."""
        self.require_open()
        session = self.engine.connect("work")
        try:
            started(session)
            return session.execute(text)
        finally:
            session.close()

    # -- callbacks of the membership ----------------------------------------------------------------------------

    def mark_lost_and_log(self, positions: Collection[int], why: str) -> None:
        """Mark grants lost, from a thread of the program, and wait until the losses are logged."""
        self.mark_lost(positions, why)
        done = runtime.event()
        _run_in_pool(self.loss_log_pool, done.set)
        done.wait(FLUSH_SECONDS)

    def mark_lost(self, positions: Collection[int] | None, why: str) -> list[Future[None]]:
        """Mark the grants of these rows lost (None: all grants and claims). First set the flag of each, then its event,
        then start its callback. Return the callbacks.

        Waiters with these rows are woken. Other threads call the callbacks and write the log, because the caller may
        hold the main connection, or be the only thread that notices the next loss.
        """
        lost = self.registry.mark_lost(positions, why)
        claims = self.claims.lose(why) if positions is None else []
        callbacks = [
            _run_in_pool(self.callback_pool, call_and_log, f"on_lost of {grant.resource!r}", grant.state.on_lost, grant)
            for grant in lost
            if grant.state.on_lost is not None
        ]
        if lost or claims:
            _run_in_pool(self.loss_log_pool, self._publish_losses, lost, claims, why)
        self.wake_waiters(positions)
        for grant in lost:  # local waiters behind these rows must now ask the database
            for ticket in grant.state.tickets:
                self.notify_waiters(ticket.resource)
        return callbacks

    def _publish_losses(self, grants: list[BaseGrant], claims: list[Claim], why: str) -> None:
        for claim in claims:
            log.error("Lost %r: %s", claim, why)
        for grant in grants:
            self.registry.publish_lost(grant.state)

    def wake_waiters(self, positions: Collection[int] | None) -> None:
        """Wake the waiters of these rows (None: all waiters), so that they notice the removal."""
        self.waiter_queues.wake(positions)
        self.priority_waiters.wake(positions)

    def calls_to_repeat(self) -> Iterator[Callable[[Session, int], object]]:
        """Yield a call that records recent ends of tasks again, after a failover.

        A task whose end was lost would stay in the state ``running`` for ever, because its member is alive.
        """
        ends = [end for at, end in list(self.recent_ends) if monotonic() - at < FAILOVER_LOSS_SECONDS]
        if ends and self.engine.beacon_may_fail:
            uid = f"{self._uid_prefix}again"
            yield lambda session, me: session.next_tasks(me, ends, "", "", uid, True, 0)

    def notify_waiters(self, resource: str) -> None:
        """Wake the waiters of this process for a resource that a row has left, so that they poll."""
        self.priority_waiters.notify(resource)
        self.waiter_queues.notify(resource)

    def interrupt_overdue(self) -> None:
        """Interrupt waits whose answer is overdue."""
        self.wait_pool.interrupt_overdue()

    def clean_up(self) -> None:
        """Discard state of closed event loops, and wake waiters that missed their notification."""
        self.event_loops.discard_closed_loops()
        self.waiter_queues.wake_missed()

    # -- releases -----------------------------------------------------------------------------------------------

    def release(self, grant: BaseGrant, by: Permit, committed: Callable[[], None] | None = None) -> Effects[None]:
        """End the acquisition identified by ``by``. With the last one, release the lock: remove the grant from the
        registry, then its rows from the database, and grant the next waiters of this process (`_delete_row`).

        Raises `LockLost` if the lock was lost before or during this call. If a commit releases the grant
        (`Grant.release_on_commit`), wait until that is done. ``committed``: given by such a release itself; called when
        the grant has left the registry.
        """
        state, member = grant.state, self.member
        # (If it is held several times, only the innermost acquisition ends, and the commit still releases the lock.)
        if committed is None and state.commit_release is not None and state.depth <= 1 and state.pid == os.getpid():
            ended = state.commit_release.stop()
            if ended is not None:
                yield WaitForEvent(ended)
                return
        if state.pid != os.getpid() or (state.released and state.why_lost is None):
            state.require_held()
        try:
            if not state.end_acquisition(by):
                return
            self.registry.discard(grant)
            if committed is not None:
                committed()
            if state.why_lost is None:
                for ticket in state.tickets:
                    yield from self._release_row(ticket, state)
                if state.why_lost is not None:
                    self.registry.publish_lost(state)
                elif self.event_bus.subscribers["released"] or log.isEnabledFor(logging.DEBUG):
                    self.registry.publish_released(state)
            elif len(state.tickets) > 1:  # one row of several was lost: the next heartbeat releases the others
                member.discard(state.tickets)
                member.request_cleanup()
        except BaseException:
            if state.end_acquisition(by):
                self.registry.release_later(grant)
            raise
        if state.why_lost is not None:
            state.require_held()

    def _release_row(self, ticket: Ticket, state: GrantState) -> Effects[None]:
        """Release one row. If that does not succeed in time, the lock counts as lost. If an open transaction that
        asserted the row (`assert_held`) still locks it, the heartbeat thread releases it later. (A generator of its
        own: an interrupt at a `try` inside the `try` of `release` would pass the handler of that one.)
        """
        member = self.member
        delete_row = functools.partial(self._delete_row, ticket, [])
        try:
            existed = yield Call("release", delete_row, member.seconds_until_loss())
            if not existed:
                state.mark_lost("its row was removed before it was released")
        except Busy as exc:
            until = "the next heartbeat" if isinstance(exc, Conflict) else "the transaction that asserted it ends"
            log.warning("%r stays locked until %s (%s)", ticket.resource, until, exc)
            member.defer_release(ticket, delete_row)
        except Unavailable as exc:
            member.discard([ticket])  # the next heartbeat removes the row
            state.mark_lost(f"it could not be released in time ({exc})")

    def _delete_row(self, ticket: Ticket, members: list[int], session: Session, member_id: int) -> bool:
        """Delete a row of this process in the database, and its ticket; then grant the next waiter of this process.
        Return False if the row was removed before.

        A call on the main connection. ``members``: our member at each attempt; the first attempt gets an empty list.
        """
        members.append(member_id)
        existed = session.release(ticket, "released")
        self.member.discard([ticket])
        self.handle_release(ticket, session, member_id)
        # If the same member finds the row removed at a second attempt, the first one did it, and its answer was lost.
        return existed or (len(members) > 1 and members[0] == member_id)

    def handle_release(self, ticket: Ticket, session: Session, member_id: int) -> None:
        """Grant the next waiter of this process after a release.

        This runs in the thread that releases: an asyncio task would notice the release later.
        """
        if ticket.resource in self.priority_waiters.queues:
            self.priority_waiters.notify(ticket.resource)
        if ticket.resource in self.waiter_queues.queues:
            self.waiter_queues.grant_next_local(ticket.resource, session, member_id)

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after `close` was called."""
        return self.member.closing.is_set()

    def require_open(self) -> None:
        """Raise `ConfigurationError` after `close`."""
        if self.closed:
            shutdown.block_daemon_thread()
            self.member.main.require_open()

    def close(self, by: int | None = None) -> None:
        """Release everything, close the connections, end the threads. ``by``: the number of the awaiting task."""
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
        callbacks = self.mark_lost(self._held_by_others(by), CLOSED)  # before another process is granted the locks
        if callbacks:
            returned = runtime.event()
            when_all(callbacks, returned.set)
            returned.wait(FLUSH_SECONDS)
        endings = self.claims.endings()
        self._close_claims()
        # (Another thread may be making a claim until the member has gone.)
        if self.member.close(self._waiting_tickets(), lambda: [*endings, *self.claims.endings()]):
            self.registry.close(CLOSED)
        self._close_claims()
        self.deadlock_monitor.close()
        self.contention_monitor.close()
        self.mark_lost(None, CLOSED)
        self.loss_log_pool.close(FLUSH_SECONDS)
        self.callback_pool.close(FLUSH_SECONDS)
        self.wait_pool.close_idle()
        self.event_loops.close()
        _clients.discard(self)

    def _close_claims(self) -> None:
        if claims := self.claims.close(CLOSED):
            _run_in_pool(self.loss_log_pool, self._publish_losses, [], claims, CLOSED)

    def _held_by_others(self, by: int | None) -> list[int]:
        """Return the positions that threads and tasks other than the caller of `close` hold. They run on after `close`,
        so they must learn that they lose these locks. At the end of the interpreter no thread runs on: return none.
        """
        if shutdown.has_begun():
            return []
        callers = {this_thread().number, self.event_loops.running(), by}
        states = [grant.state for grant in self.registry.grants()]
        lost = [state for state in states if state.caller.number not in callers and state.caller.is_running]
        return [ticket.position for state in lost for ticket in state.tickets]

    def _waiting_tickets(self) -> list[Ticket]:
        """Return the tickets of waiters, whose rows are cancelled at the end."""
        held = {ticket.position for grant in self.registry.grants() for ticket in grant.state.tickets}
        positions = {
            waiter.position for waiter in (*self.waiter_queues.waiters(), *self.priority_waiters.waiters())
        } - held
        with self.state_lock:
            return [self.member.tickets[position] for position in positions if position in self.member.tickets]

    def after_fork(self) -> list[EngineConnection]:
        """Reset the state in a forked child. Return the parent's connections, which the caller keeps.

        The child must never use or close them: that would end the parent's sessions.
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


def _close_dropped(
    member: Membership,
    wait_pool: WaitConnectionPool,
    notifications: NotificationListener,
    cancellation_monitor: CancellationMonitor,
    pools: list[Pool],
    loop_pools: Mapping[str, Pool],
) -> None:
    """End the threads and connections of a coordinator that was dropped without `close`. It has no grants then.

    The garbage collector may call this in any thread, with any lock held, so a new thread does the work.
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
        wait_pool.interrupt_all()
        notifications.close()
        cancellation_monitor.close()
        member.close()
        wait_pool.close_idle()
        for pool in (*pools, *loop_pools.values()):
            pool.close()

    spawn_in_handler(lambda: spawn(close, "sqlsem-close"), "sqlsem-close")


def _run_in_pool(pool: Pool, call: Callable[..., object], *arguments: Any) -> Future[Any]:
    """Run a call in a pool, or in this thread if the pool has just been closed."""
    try:
        return pool.submit(call, *arguments)
    except RuntimeError:
        done: Future[Any] = Future()
        done.set_result(call(*arguments))
        return done


_clients: weakref.WeakSet[DatabaseClient] = weakref.WeakSet()
_inherited: list[EngineConnection] = []  # referred to for ever: dropping a connection would close it


def open_clients() -> list[DatabaseClient]:
    """Return all open clients, one for each coordinator."""
    return [client for client in list(_clients) if not client.closed]


def _after_fork_in_child() -> None:
    for client in list(_clients):
        _inherited.extend(client.after_fork())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _close_all(clients: list[DatabaseClient]) -> None:
    for client in clients:
        client.close()


@shutdown.at_end
def _at_exit() -> None:
    drain(FLUSH_SECONDS)
    shutdown.begin()
    try:
        if clients := list(_clients):
            call_uninterrupted(functools.partial(_close_all, clients), "sqlsem-end")
        log.flush(FLUSH_SECONDS)
    finally:
        shutdown.await_started()
