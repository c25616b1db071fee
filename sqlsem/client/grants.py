"""The grants of threads, and the calls on grants that both APIs share.

The shared calls are generators, so that the driver of each API can carry out their steps: a thread blocks, a task
awaits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from sqlsem.client.callers import this_thread
from sqlsem.client.effects import Effects, run_generator, run_operation
from sqlsem.client.held.registry import BaseGrant, GrantState, ReleaseToken, release_later
from sqlsem.client.operations.convert import Upgrade, downgrade
from sqlsem.client.operations.cursors import cursor_of, refuse_autocommit
from sqlsem.client.operations.guard_session import connection_of, noting_grant, removing_note
from sqlsem.client.operations.handover import TTL_SECONDS, handing_over
from sqlsem.client.operations.rate_grants import adjusting, rate_of
from sqlsem.client.operations.release_on_commit import pinning, releasing_on_commit
from sqlsem.util import runtime
from sqlsem.util.threads import log
from sqlsem.values.errors import Unavailable

if TYPE_CHECKING:
    from sqlsem.client.client import DatabaseClient
    from sqlsem.values.locks import Duration

__all__ = ["Grant", "asserting", "checking"]


def checking(client: DatabaseClient, state: GrantState) -> Effects[None]:
    """Carry out `Grant.check`: ask the database if the lock is still held. Raises `LockLost` or `NotHeld` if not."""
    state.require_held()
    try:
        yield from client.member.heartbeat_effects()
    except Unavailable:
        state.require_held()
        raise
    state.require_held()


def asserting(client: DatabaseClient, state: GrantState, given: Any) -> Generator[Any, Any, None]:
    """Carry out `Grant.assert_held`. Yields the results of the cursor's methods, which the driver may have to await."""
    state.require_held()
    cursor = cursor_of(given)
    refuse_autocommit(cursor)
    yield from pinning(client, state, cursor, "assert_held")


class Grant(BaseGrant):
    """A lock that is held. `sqlsem.Lock.acquire`, a ``with`` block or `sqlsem.adopt` makes it; `release` or the end of
    the block ends it. Safe to use from several threads.

    Attributes:
        resource: The resource's name (with ``all_of``: that of the first resource).
        position: The number of its row in the queue (``queue_position`` in the table).
        positions: Each resource's position.
        fence: A number that grows with every grant of a mutex; store it with what you write, and refuse smaller ones.
        waited: Seconds from the request to the grant.
    """

    client: DatabaseClient
    _event: threading.Event | None = None
    _contended: threading.Event | None = None

    @property
    def lost(self) -> bool:
        """True if the lock is lost.

        This reads memory only, except right after a long pause of this process: then it asks the database, and waits
        for the answer for a second at most.
        """
        if self.state.why_lost is None and not self.state.released:
            self.client.member.verify()
        return self.state.why_lost is not None

    @property
    def lost_event(self) -> threading.Event:
        """An event that is set when the lock is lost, for threads that wait."""
        if self._event is None:
            with self.client.state_lock:
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

        For a waiter of this process the event is set at once; for one of another process within about a second. The
        first use of this attribute starts the polling: one statement a second for the whole process. The event stays
        set even if the waiter gives up; clear it to be notified again.

        >>> with sqlsem.mutex("reports") as grant:  # doctest: +SKIP
        ...     while rows and not grant.contended.is_set():
        ...         rebuild(rows.pop())
        """
        event = self._contended
        if event is None:
            event = self.__dict__.setdefault("_contended", runtime.event())  # one event, also for concurrent callers
            self.client.contention_monitor.add(self.state, event.is_set, event.set)
        return event

    def check(self) -> None:
        """Ask the database now if the lock is still held. Raises `LockLost` or `NotHeld` if not.

        >>> with sqlsem.mutex("nightly") as grant:  # doctest: +SKIP
        ...     for part in parts:
        ...         grant.check()
        ...         load(part)
        """
        run_generator(checking(self.client, self.state), self.client.execute_effect)

    def assert_held(self, cursor: Any) -> None:
        """Check inside the caller's own transaction that the lock is held, and keep it held until the transaction ends.

        ``cursor`` is a DB-API cursor on the *same database* (psycopg, pyodbc, sqlite3 …) with an open transaction, or a
        ``Connection`` or ``Session`` of SQLAlchemy. After this call the transaction can never commit while another
        client holds the lock. Commit before the end of the block.

        Raises `LockLost`, and `ConfigurationError` for a cursor in autocommit mode, where the check protects nothing.
        """
        run_generator(asserting(self.client, self.state, cursor), lambda answer: answer)

    def release_on_commit(self, cursor: Any) -> None:
        """Release the lock when the transaction of ``cursor`` commits; keep it if the transaction rolls back (also to a
        savepoint before this call). Until the commit the transaction keeps the lock, as with `assert_held`. The release
        follows the commit within milliseconds, and never precedes it. After the commit, `release` and the end of the
        block wait for that release; before it they work as usual, and wait for the transaction. If the lock is acquired
        once more after this call (``reentrant``), the release waits for the end of that block.

        ``cursor`` is a DB-API cursor on the *same database* (psycopg, pyodbc, sqlite3, Django) with an open
        transaction, or a ``Connection`` or ``Session`` of SQLAlchemy. Its login must be that of the lock.

        Raises `LockLost`, and `ConfigurationError` for a cursor in autocommit mode, a cursor on another database, and a
        lock that is held several times (``reentrant``).

        >>> with sqlsem.mutex("ledger") as grant, connection.transaction():  # doctest: +SKIP
        ...     cursor.execute("UPDATE ledger SET …")
        ...     grant.release_on_commit(cursor)
        """
        run_generator(releasing_on_commit(self.client, self, cursor), lambda answer: answer)

    @contextlib.contextmanager
    def session(self, connection: Any) -> Iterator[None]:
        """Assert the grant in every transaction on this connection until the block ends, for guarded tables (``sqlsem
        guard``). From its first write into a guarded table each transaction keeps the lock until the transaction ends.
        This needs no further calls of the database, and no change of other code.

        ``connection`` is a connection to the *same database*, outside of a transaction: of psycopg or pyodbc, or a
        ``Connection`` of SQLAlchemy or Django. The database refuses writes without the lock, or after its loss, with an
        error of the driver.

        Raises `LockLost`, and `ConfigurationError` for a connection in a transaction or through a pooler, and for an
        engine without guarded tables.

        >>> with sqlsem.mutex("ledger") as grant, grant.session(connection):  # doctest: +SKIP
        ...     book(connection)
        """
        client, driver_connection = self.client, connection_of(connection)
        note = run_generator(noting_grant(client, self.state, driver_connection), lambda answer: answer)
        try:
            yield
        except BaseException:
            # The error of the block takes precedence. The note permits nothing when the lock is released.
            try:
                run_generator(removing_note(client, driver_connection, note), lambda answer: answer)
            except Exception as exc:
                log.info("Could not remove the note of %r from a connection's session: %s", self, exc)
            raise
        run_generator(removing_note(client, driver_connection, note), lambda answer: answer)

    def upgrade(self, timeout: Duration | None = None) -> None:
        """Upgrade a read lock to a write lock, without releasing it: wait until all other readers have released theirs.
        No new request is granted meanwhile.

        Args:
            timeout: How long to wait at most (``60``, ``"1m"``); None: for ever; 0: only if there is no other reader.

        Raises:
            Timeout: Not granted in time; the grant is still a read lock.
            Deadlock: Another reader is upgrading, and each would wait for the other. Release this one, then acquire the
                lock for writing.
            LockLost: The lock was lost during the wait.
            ConfigurationError: This is not a read lock, or it is of several resources.

        >>> with sqlsem.read("prices") as grant:  # doctest: +SKIP
        ...     if outdated():
        ...         grant.upgrade(timeout=60)
        ...         reload()
        """
        run_operation(Upgrade(self.client, self.state, timeout, runtime.event()), self.client.execute_effect)

    def downgrade(self) -> None:
        """Downgrade a write lock to a read lock, without releasing it. Readers that wait right behind it are granted,
        writers are not.

        Raises `LockLost`, and `ConfigurationError` if this is not a write lock, is of several resources, or is held
        several times.
        """
        run_generator(downgrade(self.client, self.state), self.client.execute_effect)

    def hand_over(self, *, ttl: Duration = TTL_SECONDS, to: str | None = None) -> str:
        """Hand the lock over: return a token with which another client adopts it (`sqlsem.adopt`, ``EXEC
        sqlsem.adopt``), in another process, on another host, in another language. The lock keeps its position and its
        fence, and no other request is granted in between.

        After this call this client no longer holds the lock, and its block ends without an error. A lock of several
        resources is handed over as a whole. A token is valid for one adoption.

        Args:
            ttl: How long the lock waits to be adopted, from 1 second. If no client adopts it, it is then free, as if
                its holder had died.
            to: The database login that may adopt the lock; by default the login of this program, which may always adopt
                it.

        Raises:
            LockLost: The lock was lost before. Or the outcome of the call is unknown (it was interrupted, or the
                database was out of reach): this client then counts the lock as lost, and it is free after ``ttl`` at
                the latest.
            NotHeld: The lock was released or handed over before.
            ConfigurationError: The lock is held several times (``reentrant``) or is being upgraded, or there is no such
                login.
            Unavailable: The database is out of reach.

        >>> with sqlsem.mutex("nightly") as grant:  # doctest: +SKIP
        ...     start_job(token=grant.hand_over(ttl="5m"))
        """
        return run_generator(handing_over(self.client, self, ttl, to), self.client.execute_effect)

    def __enter__(self) -> Grant:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        token = None
        try:
            token = ReleaseToken()
            if not self.state.ended_early:
                run_generator(self.client.release(self, token), self.client.execute_effect)
        except BaseException as failure:
            release_later(self, token or ReleaseToken())
            if exc is None or not isinstance(failure, Exception):  # else the error of the block takes precedence
                raise

    def adjust(self, actual: int, *, rate: str | None = None) -> None:
        """Correct the cost of a rate that was taken with the lock (`sqlsem.all_of`); see `RateGrant.adjust`. ``rate``:
        the rate's name, if several were taken. Raises `ConfigurationError` if no rate of that name was taken.
        """
        run_generator(adjusting(rate_of(self.rates, rate, self), actual), self.client.execute_effect)

    def release(self) -> None:
        """Release the lock, from any thread. The end of its block then does nothing.

        Raises `NotHeld` if it was released before, `LockLost` if it was lost.
        """
        token = self.state.release_token_for(this_thread())
        run_generator(self.client.release(self, token), self.client.execute_effect)
