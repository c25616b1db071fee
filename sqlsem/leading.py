"""Leaders, for threads: one of many is the leader for a term, which is the grant of a mutex."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sqlsem import runtime
from sqlsem.core.backoff import backoff_delays
from sqlsem.core.callers import this_thread
from sqlsem.core.defaults import Coordinated
from sqlsem.core.grants import Grant
from sqlsem.core.leading import (
    LONGEST_PAUSE_SECONDS,
    LeaderElection,
    LeaderEntry,
    SigtermScope,
    may_go_on,
    watch_sigterm,
)
from sqlsem.core.threads import call_out, spawn_in_handler
from sqlsem.errors import SqlsemError
from sqlsem.locks import Lock
from sqlsem.model import Duration, check_call

__all__ = ["Callback", "Leader", "Term", "leader"]

log = logging.getLogger("sqlsem")
T = TypeVar("T")
#: A callback: given the term.
Callback = Callable[["Term"], object]


class Term:
    """The time for which this thread is the leader. Safe to use from several threads.

    Attributes:
        name: Of what.
        ending: A `threading.Event` that is set when the term is over or shall be: it was lost, `step_down` was called,
            the block is being left, or SIGTERM has come.
    """

    def __init__(self, name: str, on_stopped: Callback | None) -> None:
        self.name = name
        self.ending = runtime.event()
        self._on_stopped = on_stopped
        self._grant: Grant | None = None
        self._lock = threading.Lock()
        self._began = False
        self._given_back = False
        self._stopper: int | None = None  # the thread that ends it, by its number
        self._told = False  # on_stopped
        self._stopped = runtime.event()

    @property
    def grant(self) -> Grant:
        """The grant of the mutex that the term is."""
        assert self._grant is not None
        return self._grant

    @property
    def fence(self) -> int:
        """A number that grows with every term; store it with what you write, and refuse smaller ones."""
        return self.grant.fence

    @property
    def lost(self) -> bool:
        """True if the term was lost; see `Grant.lost`."""
        return self.grant.lost

    def check(self) -> None:
        """Ask the database, now, whether this is still the leader; raises `LockLost` or `NotHeld` when not."""
        self.grant.check()

    def assert_held(self, cursor: Any) -> None:
        """As `Grant.assert_held`: what is written in that transaction is never committed beside another leader."""
        self.grant.assert_held(cursor)

    def step_down(self) -> None:
        """End the term, from any thread: ``on_stopped`` is called, then the next one may lead. The block may go on, as
        nobody special. Does nothing when the term is over.

        Raises `LockLost` when it turns out only now that it was lost.
        """
        self._stop()
        if self.grant.state.why_lost is None and self._may_give_back():
            self.grant.release()

    def _may_give_back(self) -> bool:
        """True for the first caller."""
        with self._lock:
            first, self._given_back = not self._given_back, True
        return first

    def _begin(self, grant: Grant) -> None:
        self._grant = grant
        grant.state.loss_callbacks.append(self.ending.set)
        with self._lock:
            self._began = grant.state.why_lost is None
        grant.state.require_held()

    def _tell_ending(self) -> None:
        """In a handler of signals: this very thread may be inside `ending`, which it would wait for."""
        spawn_in_handler(self.ending.set, "sqlsem-leader")

    def _was_lost(self, _: Grant) -> None:
        """In a thread for callbacks."""
        call_out(f"on_stopped of the leader {self.name!r}", self._stop)

    def _stop(self) -> None:
        """End the term. No leader runs here when this returns."""
        self.ending.set()
        me = this_thread().number
        with self._lock:
            if self._began and self._stopper is None:
                self._stopper = me
        if self._stopper != me:
            if self._stopper is not None:
                self._stopped.wait()
        elif not self._told:
            self._told = True
            try:
                if self._on_stopped is not None:
                    self._on_stopped(self)
            finally:
                self._stopped.set()

    def __repr__(self) -> str:
        state = "leads" if self._began and self._stopper is None else "over"
        return f"<Term {self.name!r}{'' if self._grant is None else f' at {self._grant.position}'}, {state}>"


class Leader:
    """One who takes part: a context manager whose block is a term. Made by `leader`. It may be used again and again,
    and by several threads; each takes part for itself.
    """

    def __init__(
        self, election: LeaderElection, on_started: Callback | None, on_stopped: Callback | None, handle_sigterm: bool
    ) -> None:
        self._election = election
        for what, told in (("on_started", on_started), ("on_stopped", on_stopped)):
            if told is not None:
                check_call(what, told)
        self._on_started = on_started
        self._on_stopped = on_stopped
        self._handle_sigterm = handle_sigterm
        self._mine = threading.local()

    def current(self) -> LeaderEntry | None:
        """Who leads, for those who only look: None when nobody does. Asks the database, and takes no part.

        Raises `Unavailable` when that is out of reach.

        >>> sqlsem.leader("scheduler").current().info  # doctest: +SKIP
        'http://etl1:8080'
        """
        return self._election.current()

    def run(self, function: Callable[[Term], T]) -> T:
        """Lead, and call ``function`` with the term; what it returns ends it all. When the term was lost it takes part
        again, for as long as the process lives, also while the database is away.

        ``function`` has to come back when the term is lost: it looks at ``term.ending``, or calls ``term.check()``.
        What it raises goes up, but for the `LockLost` and `Unavailable` of a term that is lost.

        Raises `Unavailable` when the database is out of reach at the beginning, and what ``with`` raises.

        >>> def schedule(term):  # doctest: +SKIP
        ...     while not term.ending.wait(1):
        ...         tick(term.fence)
        >>> sqlsem.leader("scheduler").run(schedule)  # doctest: +SKIP
        """
        check_call("The function of a leader", function)
        self.current()
        waits = backoff_delays(first=0.1, longest=LONGEST_PAUSE_SECONDS)
        while True:
            term = None
            try:
                with self as term:
                    return function(term)
            except SqlsemError as exc:
                lost = term is not None and term.grant.state.why_lost is not None
                if not may_go_on(exc, had_term=term is not None, lost=lost):
                    raise
                log.warning("Takes part again in the election of %r: %s", self._election.name, exc)
            if lost:
                waits = backoff_delays(first=0.1, longest=LONGEST_PAUSE_SECONDS)
            runtime.event().wait(next(waits))

    def __enter__(self) -> Term:
        term = Term(self._election.name, self._on_stopped)
        stay = SigtermScope(term._tell_ending)
        lock = Lock(self._election.terms(term._was_lost))
        try:
            if self._handle_sigterm:
                watch_sigterm(stay)
            grant = lock.__enter__()
            try:
                term._begin(grant)
                if self._on_started is not None:
                    self._on_started(term)
            except BaseException as exc:
                stay.leave()
                _leave(term, lock, exc)
                raise
        except BaseException:
            stay.end()
            raise
        runtime.namespace(self._mine).setdefault("stack", []).append((term, lock, stay))
        return term

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        term, lock, stay = runtime.namespace(self._mine)["stack"].pop()
        stay.leave()
        try:
            _leave(term, lock, exc)
        finally:
            stay.end()

    def __repr__(self) -> str:
        return f"<Leader {self._election.name!r}>"


def _leave(term: Term, lock: Lock, exc: BaseException | None) -> None:
    """First nobody leads here, then others may."""
    try:
        term._stop()
    finally:
        if term._may_give_back():
            lock.__exit__(None if exc is None else type(exc), exc, None)


def leader(
    name: str,
    info: str | None = None,
    *,
    on_started: Callback | None = None,
    on_stopped: Callback | None = None,
    timeout: Duration | None = None,
    handle_sigterm: bool = True,
    coordinator: Coordinated | None = None,
) -> Leader:
    """One leader everywhere; the others wait to be the next, in the order of asking. A leader is who holds the mutex
    ``name``; so `sqlsem.mutex`, T-SQL and ``sqlsem run --mutex`` take part, too.

    Args:
        name: Of what: 1 to 255 characters.
        info: What everybody may know of this one, as the address where it is reached: seen by `Leader.current`, and as
            the note in ``sqlsem ls``. At most 1,000 characters.
        on_started: Called with the `Term` by the thread that leads, before its block begins. What it raises ends the
            term.
        on_stopped: Called once with each term that began, when it ends: before the next one can lead. When the term was
            lost it is called at once, by a thread of its own, and has a fifth of the grace, 1 second at most; leaving
            the block waits for it, so it must not wait for that.
        timeout: How long ``with`` waits to be the leader before `Timeout`; None (the default) for ever.
        handle_sigterm: In the main thread, step down on SIGTERM: ``term.ending`` is set; then a handler that the
            program has is called, and decides. Where it has none, the block is left by ``SystemExit(143)``, as it is
            while it waits. False: leave SIGTERM alone.
        coordinator: Which database; left out, the default one.

    Raises:
        Timeout: Not the leader in time.
        LockLost: On leaving the block, when the term was lost inside it.
        Deadlock: This thread leads already.
        ConfigurationError: A name or an info that cannot be.
        Unavailable: The database is out of reach.

    The names are those of Kubernetes' ``leaderelection`` (OnStartedLeading, OnStoppedLeading).

    >>> with sqlsem.leader("scheduler", info="http://etl1:8080") as term:  # doctest: +SKIP
    ...     while not term.ending.wait(1):
    ...         tick(term.fence)
    """
    return Leader(LeaderElection(name, info, timeout, None, coordinator), on_started, on_stopped, handle_sigterm)
