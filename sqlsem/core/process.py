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
from sqlsem.core import ending, nesting
from sqlsem.core.bell import Bell
from sqlsem.core.callers import Caller, this_thread
from sqlsem.core.claims import Claim, Claims
from sqlsem.core.deadlock_watch import DeadlockWatch
from sqlsem.core.holdings import BaseGrant, Holdings
from sqlsem.core.lines import Lines
from sqlsem.core.loops import Loops
from sqlsem.core.membership import Membership
from sqlsem.core.minder import Minder
from sqlsem.core.news import News
from sqlsem.core.signals import Signals, drain, everywhere
from sqlsem.core.steps import NO_ROOM, Call, Operation, Sleep, WaitFor
from sqlsem.core.threads import Pool, call_out, hush, spawn, spawn_in_handler, voice, when_all
from sqlsem.core.turns import Turns
from sqlsem.core.waiting import WaitingRoom
from sqlsem.core.wanted import WantedWatch
from sqlsem.engines.base import AdaptiveTimeout, Engine, EngineConnection, Session, bounded
from sqlsem.engines.protocol import LockSession
from sqlsem.model import End, Entry, Ticket, monotonic

__all__ = ["Process", "processes"]

log = voice
T = TypeVar("T")

#: Seconds that the server may be behind in what it has told us is done, when another one takes over from it.
UNDONE_SECONDS = 60.0
#: Why a lock is lost that was held when `Process.close` was called.
CLOSED = "its coordinator was closed"
#: At the end, for what happened before to be told.
TELL_SECONDS = 1.0
#: So many callbacks of losses may run at a time.
MOST_CALLBACKS = 32


class Process:
    """This process in one database; it lasts as long as its coordinator is open. `Membership` reports to it.

    Attributes:
        engine: The database.
        retry: Seconds for which a call tries to reach it.
        signals: Who is told what happens.
        callbacks: The threads in which ``on_lost`` is called.
        telling: The thread that tells of losses.
        member: This process as a member, with the main session.
        state_lock: Guards what we believe to have; the membership's.
        holdings: Its grants.
        claims: Its tasks, parts and callbacks.
        recent_ends: Ends of tasks, and when each was recorded: a server that takes over may not know them.
        looks: What was seen of queues a moment ago, and when (see `sqlsem.core.late`).
        lines: Who of it waits.
        turns: Who of it waits by priority.
        waiting_room: The sessions to wait in.
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
        self.signals = Signals(engine.where, everywhere)
        self._finalizer: weakref.finalize[Any, Process] | None = None
        self._reset()
        _processes.add(self)

    def _reset(self) -> None:
        """The state of one that has done nothing yet; in a forked child, too."""
        self._look_limit = AdaptiveTimeout(max(1.0, self.retry))  # what a look at the tables may take
        self.member = Membership(self.engine, self, self.retry)
        self.state_lock = self.member.state_lock
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.secret = os.urandom(4).hex()
        self._uid = f"{self.secret}{os.getpid():x}."  # what each begins with
        self._uids = itertools.count(1)
        self.callbacks = Pool("sqlsem-lost", MOST_CALLBACKS, patient=True)
        self.telling = Pool("sqlsem-told", 1, patient=True)
        self.holdings = Holdings(self.member, self.signals)
        self.claims = Claims(self.member)
        self.recent_ends: deque[tuple[float, End]] = deque(maxlen=256)
        self.above = nesting.Above()
        self.looks: dict[str, tuple[float, list[Entry]]] = {}
        self.lines = Lines(self.state_lock)
        self.turns = Turns(self.state_lock)
        self.waiting_room = WaitingRoom(self.member)
        self.watch = DeadlockWatch(self.member, self.holdings, self.waiting_room, self.above)
        self.minder = Minder(self.member, self.claims)
        self.wanted = WantedWatch(self.member, self.waiting_room)
        self.bell = Bell(self.member.closing)
        self.news = News(self.engine, self.bell, self.member.closing)
        self.loops = Loops(self.member)
        if self._finalizer is not None:
            self._finalizer.detach()  # of the parent's
        parts = self.member, self.waiting_room, self.news, self.minder, [self.callbacks, self.telling], self.loops.pools
        self._finalizer = weakref.finalize(self, _dropped, *parts)
        self._finalizer.atexit = False

    def requesting_id(self, caller: Caller) -> str:
        """Who asks, for those who look at the table."""
        return f"{self.name}:{caller.number}:{self.secret}"

    def new_uid(self) -> str:
        """An id for one request alone."""
        return f"{self._uid}{next(self._uids)}"

    # -- operations ---------------------------------------------------------------------------------------------

    def perform(self, operation: Operation) -> Any:
        """Carry out an operation, blocking."""
        member = self.member
        if member.closing.is_set():
            ending.stay_asleep()
        if isinstance(operation, Call):
            return member.main.call(operation.what, operation.call, operation.budget, sign=operation.sign)
        if isinstance(operation, WaitFor):
            with self.waiting_room.session(operation.timeout) as session:
                if session is None:
                    return NO_ROOM
                wait = session.upgrade if operation.upgrade else session.wait
                return wait(operation.ticket, operation.timeout, operation.waiter.event)
        if isinstance(operation, Sleep):
            woken = operation.waiter.event.wait(operation.timeout)
            operation.waiter.event.clear()
            return woken
        return member.verify()

    def look(self, call: Callable[[Session], T], role: type[Any] = LockSession) -> T:
        """Do something that needs no membership but a ``role`` of the engine's, on a connection of its own."""
        self.require_open()
        self.engine.require(role, "This")
        member = self.member
        for attempt in tenacity.Retrying(
            sleep=tenacity.sleep_using_event(member.closing), **member.main.policy("A look", None)
        ):
            with attempt:
                session = self.engine.connect("look")
                with bounded(session, self._look_limit):
                    try:
                        session.check_schema()
                        found = call(session)
                        session.require_in_place()
                        return found
                    finally:
                        session.close()
        raise AssertionError("unreachable")

    def execute(self, text: str, started: Callable[[Session], None]) -> str | None:
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
        return bool(self.holdings or self.claims)

    def lose_and_tell(self, positions: Collection[int], why: str) -> None:
        """As `lose`, where a program's thread has found it out: what is logged is logged when this returns."""
        self.lose(positions, why)
        done = runtime.event()
        _have_done(self.telling, done.set)
        done.wait(TELL_SECONDS)

    def lose(self, positions: Collection[int] | None, why: str) -> list[Future[None]]:
        """Declare what stands on these rows (None: everything) lost: flag, event, callback, in this order. Those who
        wait with one of them are woken. Callbacks, and the log, are left to other threads: who calls may hold the main
        session, or be the only one to learn of the next loss. Returns the callbacks.
        """
        lost = self.holdings.lose(positions, why)
        claims = self.claims.lose(why) if positions is None else []
        callbacks = [
            _have_done(self.callbacks, call_out, f"on_lost of {grant.resource!r}", grant.holding.on_lost, grant)
            for grant in lost
            if grant.holding.on_lost is not None
        ]
        if lost or claims:
            _have_done(self.telling, self._tell_lost, lost, claims, why)
        self.lines.wake(positions)
        self.turns.wake(positions)
        for grant in lost:  # those that waited for what was ours wait for others now
            for ticket in grant.holding.tickets:
                self.nudge(ticket.resource)
        return callbacks

    def _tell_lost(self, grants: list[BaseGrant], claims: list[Claim], why: str) -> None:
        for claim in claims:
            log.error("Lost %r: %s", claim, why)
        for grant in grants:
            self.holdings.tell_lost(grant.holding)

    def forgot(self, positions: Collection[int]) -> None:
        """Who waits with one of these rows shall see that it is gone."""
        self.lines.wake(positions)
        self.turns.wake(positions)

    def undone(self) -> Iterator[Callable[[Session, int], object]]:
        """Ends of tasks: a server that forgets one has the task running, by a member that lives, for ever."""
        ends = [end for at, end in list(self.recent_ends) if monotonic() - at < UNDONE_SECONDS]
        if ends and self.engine.beacon_may_fail:
            uid = f"{self._uid}again"
            yield lambda session, me: session.next_tasks(me, ends, "", "", uid, True, 0)

    def returned(self, ticket: Ticket, session: Session, member_id: int) -> None:
        """A number was given back: the next one of ours may have it. (Told by the thread that did it: a task would only
        hear of it a moment later.)
        """
        self.turns.nudge(ticket.resource)
        self.lines.hand_over(ticket.resource, session, member_id)

    def nudge(self, resource: str) -> None:
        """Something left this resource: looking may pay for those of ours who wait there."""
        self.turns.nudge(resource)
        self.lines.nudge(resource)

    def interrupt_overdue(self) -> None:
        """End waits whose answer is overdue."""
        self.waiting_room.interrupt_overdue()

    def tidy(self) -> None:
        """Give up what belonged to event loops that are closed; and nobody shall wait who was not told to go."""
        self.loops.tidy()
        self.lines.tend()

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self.member.closing.is_set()

    def require_open(self) -> None:
        """Raise `ConfigurationError` after `close`."""
        if self.closed:
            ending.stay_asleep()
            self.member.main.require_open()

    def close(self, by: int | None = None) -> None:
        """Release everything, close the connections, end the threads. ``by``: the number of the task that awaits it."""
        if self.closed:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        self.member.closing.set()
        self.lines.wake(None)
        self.turns.wake(None)
        self.waiting_room.dismiss()
        self.news.close()
        self.minder.close()
        callbacks = self.lose(self._held_by_others(by), CLOSED)  # before anybody else can be granted
        if callbacks:
            returned = runtime.event()
            when_all(callbacks, returned.set)
            returned.wait(TELL_SECONDS)
        if self.member.close(self._waited_for()):
            self.holdings.close(CLOSED)
        self.watch.close()
        self.wanted.close()
        self.lose(None, CLOSED)
        self.telling.close(TELL_SECONDS)
        self.callbacks.close(TELL_SECONDS)
        self.waiting_room.close()
        self.loops.close()
        _processes.discard(self)

    def _held_by_others(self, by: int | None) -> list[int]:
        """The positions held by threads and tasks that run on after `close`, and so lose them: not the caller of
        `close`, and nobody at the end of the interpreter.
        """
        if ending.has_begun():
            return []
        callers = {this_thread().number, self.loops.running(), by}
        holdings = [grant.holding for grant in self.holdings.grants()]
        lost = [holding for holding in holdings if holding.caller.number not in callers and holding.caller.is_running]
        return [ticket.position for one in lost for ticket in one.tickets]

    def _waited_for(self) -> list[Ticket]:
        """The rows of those who wait."""
        held = {ticket.position for grant in self.holdings.grants() for ticket in grant.holding.tickets}
        positions = {waiter.position for waiter in (*self.lines.waiters(), *self.turns.waiters())} - held
        with self.state_lock:
            return [self.member.tickets[position] for position in positions if position in self.member.tickets]

    def after_fork(self) -> list[EngineConnection]:
        """In a forked child: begin anew. Returns the parent's connections, which are never used or closed here, as that
        would end the parent's sessions.
        """
        main = self.member.main.session
        sessions: list[EngineConnection] = [
            *([] if main is None else [main]),
            *self.news.sessions(),
            *self.watch.sessions(),
            *self.wanted.sessions(),
            *self.waiting_room.sessions(),
            *self.loops.sessions(),
        ]
        for session in sessions:
            session.abandon()
        if not self.closed:
            self._reset()
        return sessions

    def __repr__(self) -> str:
        return f"<Coordinator {self.engine.where}{', closed' if self.closed else ''}>"


def _dropped(
    member: Membership,
    room: WaitingRoom,
    news: News,
    minder: Minder,
    pools: list[Pool],
    more_pools: Mapping[str, Pool],
) -> None:
    """A coordinator was dropped without being closed. It holds nothing then; its threads and connections end.

    Called by the garbage collector: in any thread, with any lock held. So another thread does it.
    """
    if member.main.session is None and not member.pulse.needed:
        return
    warnings.warn(
        f"unclosed coordinator of {member.engine.where}; use it in a with block, or close() it",
        ResourceWarning,
        stacklevel=2,
    )

    def close() -> None:
        member.closing.set()
        room.dismiss()
        news.close()
        minder.close()
        member.close()
        room.close()
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


_processes: weakref.WeakSet[Process] = weakref.WeakSet()
_inherited: list[EngineConnection] = []  # kept, as they would be closed by being forgotten


def processes() -> list[Process]:
    """All that are open: one for each coordinator."""
    return [process for process in list(_processes) if not process.closed]


def _after_fork_in_child() -> None:
    for process in list(_processes):
        _inherited.extend(process.after_fork())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@ending.at_end
def _at_exit() -> None:
    drain(TELL_SECONDS)
    ending.begin()
    for process in list(_processes):
        process.close()
    hush(TELL_SECONDS)
