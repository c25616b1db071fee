"""This process in one database: everything that its faces work on.

How it proves that it lives is `membership`; what it holds, `holdings`; who of it waits, and in which sessions,
`waiting`; how a lock is had, `acquire`.

Invariants
    The membership's ``state_lock`` guards what we believe: rows, holdings, local queues, suspects. It is never held
    during I/O.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import tenacity

from sqlsem.core import ending, nesting
from sqlsem.core.bell import Bell
from sqlsem.core.callers import Caller
from sqlsem.core.claims import Claims
from sqlsem.core.deadlock_watch import DeadlockWatch
from sqlsem.core.holdings import Holdings
from sqlsem.core.lines import Lines
from sqlsem.core.loops import Loops
from sqlsem.core.membership import Membership
from sqlsem.core.minder import Minder
from sqlsem.core.news import News
from sqlsem.core.signals import Signals, drain, everywhere
from sqlsem.core.steps import NO_ROOM, Call, Operation, Sleep, WaitFor
from sqlsem.core.turns import Turns
from sqlsem.core.waiting import WaitingRoom
from sqlsem.core.wanted import WantedWatch
from sqlsem.engines.base import Allowance, Engine, Session, Wire, bounded
from sqlsem.engines.roles import LockSession
from sqlsem.model import End, Ticket, monotonic

__all__ = ["Process", "processes"]

log = logging.getLogger("sqlsem")
T = TypeVar("T")

#: Seconds that the server may be behind in what it has told us is done, when another one takes over from it.
UNDONE_SECONDS = 60.0
#: At the end of the interpreter, for what happened before to be told.
TELL_SECONDS = 1.0


class Process:
    """This process in one database; it lasts as long as its coordinator is open. `Membership` reports to it.

    Attributes:
        engine: The database.
        retry: Seconds for which a call tries to reach it.
        signals: Who is told what happens.
        member: This process as a member, with the main session.
        state_lock: Guards what we believe to have; the membership's.
        holdings: Its grants.
        claims: Its tasks, parts and callbacks.
        recent_ends: Ends of tasks, and when each was recorded: a server that takes over may not know them.
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
        self._reset()
        _processes.add(self)

    def _reset(self) -> None:
        """The state of one that has done nothing yet; in a forked child, too."""
        self._look_limit = Allowance(max(1.0, self.retry))  # what a look at the tables may take
        self.member = Membership(self.engine, self, self.retry)
        self.state_lock = self.member.state_lock
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.secret = os.urandom(4).hex()
        self._uid = f"{self.secret}{os.getpid():x}."  # what each begins with
        self._uids = itertools.count(1)
        self.holdings = Holdings(self.member, self.signals)
        self.claims = Claims(self.member)
        self.recent_ends: deque[tuple[float, End]] = deque(maxlen=256)
        self.above = nesting.Above()
        self.lines = Lines(self.state_lock)
        self.turns = Turns(self.state_lock)
        self.waiting_room = WaitingRoom(self.member)
        self.watch = DeadlockWatch(self.member, self.holdings, self.waiting_room, self.above)
        self.minder = Minder(self.member, self.claims)
        self.wanted = WantedWatch(self.member, self.waiting_room)
        self.bell = Bell(self.member.closing)
        self.news = News(self.engine, self.bell, self.member.closing)
        self.loops = Loops(self.member)

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
                        return call(session)
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

    def lose(self, positions: Collection[int] | None, why: str) -> None:
        """Declare what stands on these rows (None: everything) lost: flag, event, callback, in this order. Those who
        wait with one of them are woken.
        """
        lost = self.holdings.lose(positions, why)
        if positions is None:
            self.claims.lose(why)
        for grant in lost:
            self.holdings.tell_lost(grant.holding)
            if grant.holding.on_lost is not None:
                try:
                    grant.holding.on_lost(grant)
                except Exception:
                    log.exception("on_lost of %r failed", grant.resource)
        self.lines.wake(positions)
        self.turns.wake(positions)
        for grant in lost:  # those that waited for what was ours wait for others now
            for ticket in grant.holding.tickets:
                self.nudge(ticket.resource)

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

    def close(self) -> None:
        """Give everything back, close the connections, end the threads."""
        if self.closed:
            return
        self.member.closing.set()
        self.lines.wake(None)
        self.turns.wake(None)
        self.waiting_room.dismiss()
        self.news.close()
        self.minder.close()
        self.member.close(self._waited_for())
        self.watch.close()
        self.wanted.close()
        self.lose(None, "its coordinator was closed")
        self.waiting_room.close()
        self.loops.close()
        _processes.discard(self)

    def _waited_for(self) -> list[Ticket]:
        """The rows of those who wait."""
        held = {ticket.position for grant in self.holdings.grants() for ticket in grant.holding.tickets}
        positions = {waiter.position for waiter in (*self.lines.waiters(), *self.turns.waiters())} - held
        with self.state_lock:
            return [self.member.tickets[one] for one in positions if one in self.member.tickets]

    def after_fork(self) -> list[Wire]:
        """In a forked child: begin anew. Returns the parent's connections, which are never used or closed here, as that
        would end the parent's sessions.
        """
        main = self.member.main.session
        sessions: list[Wire] = [
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


_processes: weakref.WeakSet[Process] = weakref.WeakSet()
_inherited: list[Wire] = []  # kept, as they would be closed by being forgotten


def processes() -> list[Process]:
    """All that are open: one for each coordinator."""
    return [one for one in list(_processes) if not one.closed]


def _after_fork_in_child() -> None:
    for process in list(_processes):
        _inherited.extend(process.after_fork())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    drain(TELL_SECONDS)
    ending.begin()
    for process in list(_processes):
        process.close()
