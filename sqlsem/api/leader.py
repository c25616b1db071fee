"""Leaders, for threads: one of many candidates leads for a term, which is the grant of a mutex. At the end of a term
its leader stops first; then the next one can lead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sqlsem.api.locks import Lock
from sqlsem.client.callers import this_thread
from sqlsem.client.defaults import Coordinated, client_of
from sqlsem.client.grants import Grant
from sqlsem.client.leader import (
    ElectionRetries,
    LeaderElection,
    LeaderEntry,
    SigtermScope,
    watch_sigterm,
)
from sqlsem.util import runtime
from sqlsem.util.threads import call_and_log, spawn_in_handler
from sqlsem.values.errors import SqlsemError
from sqlsem.values.locks import Duration, check_call

T = TypeVar("T")
#: A callback, which gets the term.
Callback = Callable[["Term"], object]


class Term:
    """The time for which this thread is the leader. Safe to use from several threads.

    Attributes:
        name: The name of the mutex.
        ending: A `threading.Event` that is set when the term is over or must end: it was lost, `step_down` was called,
            the block ends, or SIGTERM has come.
    """

    def __init__(self, name: str, on_stopped: Callback | None) -> None:
        self.name = name
        self.ending = runtime.event()
        self._on_stopped = on_stopped
        self._grant: Grant | None = None
        self._lock = threading.Lock()
        self._began = False
        self._released = False
        self._stopper: int | None = None  # the number of the thread that ends the term
        self._on_stopped_called = False
        self._stopped = runtime.event()

    @property
    def grant(self) -> Grant:
        """The grant of the term's mutex."""
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
        """Ask the database now if this term still leads; raises `LockLost` or `NotHeld` if not."""
        self.grant.check()

    def assert_held(self, cursor: Any) -> None:
        """Assert the term in a transaction, as `Grant.assert_held`: that never commits while another leader leads."""
        self.grant.assert_held(cursor)

    def step_down(self) -> None:
        """End the term, from any thread: ``on_stopped`` is called, then the next candidate may lead. The block may go
        on, but leads no more. Does nothing if the term is over.

        Raises `LockLost` if the term was lost, but this process learns that only from the release.
        """
        self._stop()
        if self.grant.state.why_lost is None and self._may_release():
            self.grant.release()

    def _may_release(self) -> bool:
        """Return True to the first caller only."""
        with self._lock:
            first, self._released = not self._released, True
        return first

    def _begin(self, grant: Grant) -> None:
        self._grant = grant
        grant.state.loss_callbacks.append(self.ending.set)
        with self._lock:
            self._began = grant.state.why_lost is None
        grant.state.require_held()

    def _notify_ending(self) -> None:
        """Set `ending` from a signal handler: in another thread, as this one may hold the event's own lock just now."""
        spawn_in_handler(self.ending.set, "sqlsem-leader")

    def _was_lost(self, _: Grant) -> None:
        """End the lost term, in a thread for callbacks."""
        call_and_log(f"on_stopped of the leader {self.name!r}", self._stop)

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
        elif not self._on_stopped_called:
            self._on_stopped_called = True
            try:
                if self._on_stopped is not None:
                    self._on_stopped(self)
            finally:
                self._stopped.set()

    def __repr__(self) -> str:
        state = "leads" if self._began and self._stopper is None else "over"
        return f"<Term {self.name!r}{'' if self._grant is None else f' at {self._grant.position}'}, {state}>"


class Leader:
    """A candidate for leadership: a context manager with a term as its block. Made by `leader`. It may be used
    again and again, and by several threads; each thread is a candidate of its own.
    """

    def __init__(self, election: LeaderElection) -> None:
        self._election = election
        #: The terms of each thread's blocks, with what ends them.
        self._terms: runtime.PerThread[list[tuple[Term, Lock, SigtermScope]]] = runtime.PerThread(list)

    def current(self) -> LeaderEntry | None:
        """Return the current leader; None if there is none. Asks the database, and takes no part in the election.

        Raises `Unavailable` if the database is out of reach.

        >>> sqlsem.leader("scheduler").current().info  # doctest: +SKIP
        'http://etl1:8080'
        """
        return self._election.current()

    def run(self, function: Callable[[Term], T]) -> T:
        """Wait to lead, call ``function`` with the term, and return its result. If the term is lost, take part in the
        election again, as long as the process lives, also while the database is out of reach.

        ``function`` must return when the term is lost: it polls ``term.ending``, or calls ``term.check()``. Its
        exceptions are raised, except `LockLost` and `Unavailable` of a lost term.

        Raises `Unavailable` if the database is out of reach at the beginning, and all that ``with`` raises.

        >>> def schedule(term):  # doctest: +SKIP
        ...     while not term.ending.wait(1):
        ...         tick(term.fence)
        >>> sqlsem.leader("scheduler").run(schedule)  # doctest: +SKIP
        """
        check_call("The function of a leader", function)
        self.current()
        retries = ElectionRetries(self._election.name)
        while True:
            term = None
            try:
                with self as term:
                    return function(term)
            except SqlsemError as exc:
                pause = retries.pause_after(exc, None if term is None else term.grant)
                if pause is None:
                    raise
            runtime.event().wait(pause)

    def __enter__(self) -> Term:
        terms, term = self._terms.get(), Term(self._election.name, self._election.on_stopped)
        scope = SigtermScope(term._notify_ending)
        lock = Lock(self._election.terms(term._was_lost))
        try:
            if self._election.handle_sigterm:
                watch_sigterm(scope)
            grant = lock.__enter__()
            try:
                term._begin(grant)
                if self._election.on_started is not None:
                    self._election.on_started(term)
            except BaseException as exc:
                scope.leaving = True
                _leave(term, lock, exc)
                raise
        except BaseException:
            scope.end()
            raise
        terms.append((term, lock, scope))
        return term

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        term, lock, scope = self._terms.get().pop()
        scope.leaving = True
        try:
            _leave(term, lock, exc)
        finally:
            scope.end()

    def __repr__(self) -> str:
        return f"<Leader {self._election.name!r}>"


def _leave(term: Term, lock: Lock, exc: BaseException | None) -> None:
    """End the term, and then release its mutex, so that the next leader starts only when this one has stopped."""
    try:
        term._stop()
    finally:
        if term._may_release():
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
    """Make a candidate for the one leader of all processes; the others wait to be next, in the order of asking. The
    leader is the holder of the mutex ``name``; so `sqlsem.mutex`, T-SQL and ``sqlsem run --mutex`` take part, too.

    Args:
        name: The name of the mutex, 1 to 255 characters.
        info: Public information about this candidate, such as the address of its server. `Leader.current` returns it,
            and ``sqlsem ls`` shows it as the note. At most 1,000 characters.
        on_started: Called with the `Term` by the thread that leads, before its block begins. An exception ends the
            term.
        on_stopped: Called once with each term that began, when it ends: before the next leader can lead. If the term
            was lost, a thread of its own calls it at once; it then has a fifth of the grace, at most 1 second. The end
            of the block waits for the callback, so the callback must not wait for the block.
        timeout: How long ``with`` waits to lead before `Timeout`; None (the default) for ever.
        handle_sigterm: In the main thread, step down on SIGTERM: ``term.ending`` is set, and then the program's own
            handler is called, and decides. Without such a handler, ``SystemExit(143)`` ends the block, or the wait for
            it. False: do not handle SIGTERM.
        coordinator: The coordinator of the database; left out, the default one.

    Raises:
        Timeout: This thread did not lead in time.
        LockLost: At the end of the block, if the term was lost inside it.
        Deadlock: This thread leads already.
        ConfigurationError: An invalid name or info.
        Unavailable: The database is out of reach.

    The names are those of Kubernetes' ``leaderelection`` (OnStartedLeading, OnStoppedLeading).

    >>> with sqlsem.leader("scheduler", info="http://etl1:8080") as term:  # doctest: +SKIP
    ...     while not term.ending.wait(1):
    ...         tick(term.fence)
    """
    client = None if coordinator is None else client_of(coordinator)
    return Leader(LeaderElection(name, info, timeout, on_started, on_stopped, handle_sigterm, False, client))
