"""The grants of threads, and the calls on grants that both APIs share, as generators."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator
from typing import Any

from sqlsem import runtime
from sqlsem.core.callers import this_thread
from sqlsem.core.client import DatabaseClient
from sqlsem.core.convert import Upgrade, downgrade
from sqlsem.core.cursors import cursor_of, refuse_autocommit, refused
from sqlsem.core.effects import Effects, run_generator, run_operation
from sqlsem.core.grant_registry import BaseGrant, GrantState, ReleaseToken, release_later
from sqlsem.core.handover import TTL_SECONDS, handing_over
from sqlsem.core.leaving import leaving, placed
from sqlsem.core.permits import Permit
from sqlsem.core.rate_grants import adjusting, rate_of
from sqlsem.core.standing import beginning, connection_of, ending_session
from sqlsem.core.threads import voice
from sqlsem.engines.base import Replaced
from sqlsem.errors import Unavailable
from sqlsem.model import Duration

__all__ = ["Grant", "asserting", "checking", "release_grant"]

log = voice


def checking(client: DatabaseClient, state: GrantState) -> Effects[None]:
    """Ask the database whether it is still held; raises `LockLost` or `NotHeld` when not."""
    state.require_held()
    try:
        yield from client.member.heartbeat_effects()
    except Unavailable:
        state.require_held()
        raise
    state.require_held()


def asserting(client: DatabaseClient, state: GrantState, given: Any) -> Generator[Any, Any, None]:
    """`Grant.assert_held`, yielding what the cursor's methods return, so that it can be awaited where it has to be."""
    state.require_held()
    cursor = cursor_of(given)
    refuse_autocommit(cursor)
    for ticket in state.tickets:
        try:
            there = yield from client.engine.pin_steps(cursor, ticket)
        except Replaced as exc:
            client.member.mark_all_lost(str(exc))
            state.require_held()
            raise
        except Exception as exc:
            refusal = refused(exc)
            if refusal is None:
                raise
            raise refusal from exc
        if not there:
            yield from placed(client, cursor, "assert_held")
            client.mark_lost_and_log([ticket.position], "its row is no longer in the table")
            state.require_held()


class Grant(BaseGrant):
    """A lock that is held. Acquiring or `sqlsem.adopt` makes it; a release or the end of its ``with`` block ends it.
    Safe to use from several threads.

    Attributes:
        resource: The resource's name (of the first one, for ``all_of``).
        position: The number in the queue (``queue_position`` in the table).
        positions: Each resource's position.
        fence: A number that grows with every grant of a mutex; store it with what you write, and refuse smaller ones.
        waited: Seconds between asking and being let in.
    """

    _event: threading.Event | None = None
    _contended: threading.Event | None = None

    def __init__(self, client: DatabaseClient, state: GrantState, waited: float) -> None:
        super().__init__(state, waited)
        self._client = client

    @property
    def lost(self) -> bool:
        """True if the lock is lost. Answered from memory, except right after a long pause of this process: then the
        database is asked, for a second at most.
        """
        if self.state.why_lost is None and not self.state.released:
            self._client.member.verify()
        return self.state.why_lost is not None

    @property
    def lost_event(self) -> threading.Event:
        """An event that is set when the lock is lost, for those who wait."""
        if self._event is None:
            with self._client.state_lock:
                if self._event is None:
                    event = runtime.event()
                    self.state.loss_callbacks.append(event.set)
                    self._event = event
            if self.state.why_lost is not None:
                self._event.set()
        return self._event

    @property
    def contended(self) -> threading.Event:
        """An event that is set when a request waits behind this grant, so that the holder can release early.

        A waiter of this process sets the event at once; one of another process within about a second. The first use of
        this attribute starts the polling: one statement a second for the whole process. The event stays set, also
        when the waiter gives up; clear it to be notified again.

        >>> with sqlsem.mutex("reports") as grant:  # doctest: +SKIP
        ...     while rows and not grant.contended.is_set():
        ...         rebuild(rows.pop())
        """
        event = self._contended
        if event is None:
            event = self.__dict__.setdefault("_contended", runtime.event())  # one event, also for concurrent callers
            self._client.contention_monitor.add(self.state, event.is_set, event.set)
        return event

    def check(self) -> None:
        """Ask the database, now, whether the lock is still held; raises `LockLost` or `NotHeld` when not.

        >>> with sqlsem.mutex("nightly") as grant:  # doctest: +SKIP
        ...     for part in parts:
        ...         grant.check()
        ...         load(part)
        """
        run_generator(checking(self._client, self.state), self._client.execute_effect)

    def assert_held(self, cursor: Any) -> None:
        """Check inside the caller's own transaction that the lock is held, and keep it held until that ends.

        ``cursor`` is a DB-API cursor on the *same database* (psycopg, pyodbc, sqlite3 …) with a transaction open, or a
        ``Connection`` or ``Session`` of SQLAlchemy; what is written in that transaction can then never be committed
        beside another holder. Commit before leaving the block.

        Raises `LockLost`, and `ConfigurationError` for a cursor in autocommit mode, where it would protect nothing.
        """
        run_generator(asserting(self._client, self.state, cursor), lambda answer: answer)

    def release_on_commit(self, cursor: Any) -> None:
        """Release the lock when the transaction of ``cursor`` commits; keep it when that rolls back (also to a
        savepoint before this call). Until then the transaction keeps the lock, as with `assert_held`. The release
        follows the commit within milliseconds and never precedes it. After it, `release` and the end of the block do
        nothing; before the commit they work as usual, and wait for the transaction. If the lock is acquired once more
        after this call (``reentrant``), the release waits for the end of that block.

        ``cursor`` is a DB-API cursor on the *same database* (psycopg, pyodbc, sqlite3, Django) with a transaction open,
        or a ``Connection`` or ``Session`` of SQLAlchemy; of the same login as the lock.

        Raises `LockLost`, and `ConfigurationError` for a cursor in autocommit mode, one on another database, and a lock
        that is held several times (``reentrant``).

        >>> with sqlsem.mutex("ledger") as grant, connection.transaction():  # doctest: +SKIP
        ...     cursor.execute("UPDATE ledger SET …")
        ...     grant.release_on_commit(cursor)
        """
        run_generator(leaving(self._client, self, cursor), lambda answer: answer)

    @contextlib.contextmanager
    def session(self, connection: Any) -> Iterator[None]:
        """While the block lasts, every transaction on this connection counts as one that has asserted the grant, in
        tables that are guarded (``sqlsem guard``): from its first write into one of them it keeps the lock until its
        end. Nothing is asked of the database meanwhile, and no other code has to be changed.

        ``connection`` is one on the *same database*, outside of a transaction: of psycopg, pyodbc, or a ``Connection``
        of SQLAlchemy or Django. What is written without the lock, or after it was lost, is refused by the database, as
        an error of the driver's.

        Raises `LockLost`, and `ConfigurationError` for a connection in a transaction or through a pooler, and for an
        engine without guarded tables.

        >>> with sqlsem.mutex("ledger") as grant, grant.session(connection):  # doctest: +SKIP
        ...     book(connection)
        """
        client, line = self._client, connection_of(connection)
        noted = run_generator(beginning(client, self.state, line), lambda answer: answer)
        try:
            yield
        except BaseException:
            # The error of the body takes precedence. The lock ends soon, and the note with it.
            try:
                run_generator(ending_session(client, line, noted), lambda answer: answer)
            except Exception as exc:
                log.info("The note of %r in a connection's session could not be taken back: %s", self, exc)
            raise
        run_generator(ending_session(client, line, noted), lambda answer: answer)

    def upgrade(self, timeout: Duration | None = None) -> None:
        """Become the writer, without letting go: wait until all other readers have left, while nobody new is let in.

        Args:
            timeout: How long to wait at most (``60``, ``"1m"``); None: for ever; 0: only if nobody else is inside.

        Raises:
            Timeout: Not had in time; it is a reader as before.
            Deadlock: Another reader is upgrading, and each would wait for the other. Release one, then ask to write.
            LockLost: It was lost while it waited.
            ConfigurationError: This is no reader (or one of several resources).

        >>> with sqlsem.read("prices") as grant:  # doctest: +SKIP
        ...     if outdated():
        ...         grant.upgrade(timeout=60)
        ...         reload()
        """
        run_operation(Upgrade(self._client, self.state, timeout, runtime.event()), self._client.execute_effect)

    def downgrade(self) -> None:
        """Become a reader, without letting go: readers that wait right behind are let in, writers are not.

        Raises `ConfigurationError` when this is no writer (or one of several resources, or held several times), and
        `LockLost`.
        """
        run_generator(downgrade(self._client, self.state), self._client.execute_effect)

    def hand_over(self, *, ttl: Duration = TTL_SECONDS, to: str | None = None) -> str:
        """Give the lock to whoever shows the token that is returned, to `sqlsem.adopt` or ``EXEC sqlsem.adopt``: in
        another process, on another host, in another language. It keeps its position and its fence, and nobody gets in
        between.

        From this call on it is held no more here; its block ends without an error. A lock of several resources goes as
        a whole. A token is good for one adoption.

        Args:
            ttl: How long it waits to be adopted, from 1 second on. When nobody did, the lock is free, as if its holder
                had died.
            to: The login of the database that may adopt it; left out, the one that this program uses. (The giver's
                login may always take it back.)

        Raises:
            LockLost: It was lost before; or what came of the call is not known (the call was interrupted, or the
                database was out of reach): then it is lost here, and free at the latest when the time is up.
            NotHeld: It was released, or handed over before.
            ConfigurationError: It is held several times (``reentrant``), is being upgraded, or there is no such login.
            Unavailable: The database is out of reach.

        >>> with sqlsem.mutex("nightly") as grant:  # doctest: +SKIP
        ...     start_job(token=grant.hand_over(ttl="5m"))
        """
        return run_generator(handing_over(self._client, self, ttl, to), self._client.execute_effect)

    def __enter__(self) -> Grant:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        leaves = None
        try:
            leaves = ReleaseToken()
            if not self.state.ended_early:
                release_grant(self, leaves)
        except BaseException as struck:
            release_later(self, leaves or ReleaseToken())
            if exc is None or not isinstance(struck, Exception):  # as of a lock's block
                raise

    def adjust(self, actual: int, *, rate: str | None = None) -> None:
        """Say what was used of a rate that was taken with the lock (`sqlsem.all_of`); see `RateGrant.adjust`.
        ``rate``: its name, where there are several. Raises `ConfigurationError` where there is none of that name.
        """
        run_generator(adjusting(rate_of(self.rates, rate, self), actual), self._client.execute_effect)

    def release(self) -> None:
        """Release the lock, from any thread. The end of its block has then nothing to do.

        Raises `NotHeld` when it was released before, `LockLost` when it was lost.
        """
        release_grant(self, self.state.release_token_for(this_thread()))


def release_grant(grant: Grant, by: Permit) -> None:
    """End this hold of a grant, or one by this exit; errors as of `Grant.release`."""
    run_generator(grant._client.registry.release(grant, by), grant._client.execute_effect)
