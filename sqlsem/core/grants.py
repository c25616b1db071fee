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
from sqlsem.core.guard_session import beginning, connection_of, ending_session
from sqlsem.core.handover import TTL_SECONDS, handing_over
from sqlsem.core.permits import Permit
from sqlsem.core.rate_grants import adjusting, rate_of
from sqlsem.core.release_on_commit import leaving, placed
from sqlsem.core.threads import safe_logger
from sqlsem.engines.base import Replaced
from sqlsem.errors import Unavailable
from sqlsem.model import Duration

__all__ = ["Grant", "asserting", "checking", "release_grant"]

log = safe_logger


def checking(client: DatabaseClient, state: GrantState) -> Effects[None]:
    """Ask the database if the lock is still held; raises `LockLost` or `NotHeld` if not."""
    state.require_held()
    try:
        yield from client.member.heartbeat_effects()
    except Unavailable:
        state.require_held()
        raise
    state.require_held()


def asserting(client: DatabaseClient, state: GrantState, given: Any) -> Generator[Any, Any, None]:
    """Run `Grant.assert_held`. Yields the results of the cursor's methods, for a driver to await."""
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
        waited: Seconds from the request to the grant.
    """

    _event: threading.Event | None = None
    _contended: threading.Event | None = None

    def __init__(self, client: DatabaseClient, state: GrantState, waited: float) -> None:
        super().__init__(state, waited)
        self._client = client

    @property
    def lost(self) -> bool:
        """True if the lock is lost.

        Answered from memory, except right after a long pause of this process: then the
        database is asked, for a second at most.
        """
        if self.state.why_lost is None and not self.state.released:
            self._client.member.verify()
        return self.state.why_lost is not None

    @property
    def lost_event(self) -> threading.Event:
        """An event that is set when the lock is lost, for threads that wait."""
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
        """Ask the database now if the lock is still held; raises `LockLost` or `NotHeld` if not.

        >>> with sqlsem.mutex("nightly") as grant:  # doctest: +SKIP
        ...     for part in parts:
        ...         grant.check()
        ...         load(part)
        """
        run_generator(checking(self._client, self.state), self._client.execute_effect)

    def assert_held(self, cursor: Any) -> None:
        """Check inside the caller's own transaction that the lock is held, and keep it held until the transaction ends.

        ``cursor`` is a DB-API cursor on the *same database* (psycopg, pyodbc, sqlite3 …) with a transaction open, or a
        ``Connection`` or ``Session`` of SQLAlchemy. The transaction can then never commit while another client holds
        the lock. Commit before the end of the block.

        Raises `LockLost`, and `ConfigurationError` for a cursor in autocommit mode, where the check protects nothing.
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
        """Assert the grant in every transaction on this connection until the block ends, for guarded tables (``sqlsem
        guard``). From its first write into a guarded table each transaction keeps the lock until the transaction ends.
        That needs no further calls of the database, and no change of other code.

        ``connection`` is one on the *same database*, outside of a transaction: of psycopg, pyodbc, or a ``Connection``
        of SQLAlchemy or Django. The database refuses writes without the lock, or after its loss, with an error of the
        driver.

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
        """Upgrade a read lock to a write lock, without releasing it: wait until all other readers have released theirs.
        No new request is granted meanwhile.

        Args:
            timeout: How long to wait at most (``60``, ``"1m"``); None: for ever; 0: only if there is no other reader.

        Raises:
            Timeout: Not granted in time; the grant is still a read lock.
            Deadlock: Another reader is upgrading, and each would wait for the other. Release one, then ask to write.
            LockLost: The lock was lost during the wait.
            ConfigurationError: This is no read lock (or a lock of several resources).

        >>> with sqlsem.read("prices") as grant:  # doctest: +SKIP
        ...     if outdated():
        ...         grant.upgrade(timeout=60)
        ...         reload()
        """
        run_operation(Upgrade(self._client, self.state, timeout, runtime.event()), self._client.execute_effect)

    def downgrade(self) -> None:
        """Downgrade a write lock to a read lock, without releasing it. Readers that wait right behind it are granted,
        writers are not.

        Raises `ConfigurationError` if this is no write lock (or a lock of several resources, or held several times),
        and `LockLost`.
        """
        run_generator(downgrade(self._client, self.state), self._client.execute_effect)

    def hand_over(self, *, ttl: Duration = TTL_SECONDS, to: str | None = None) -> str:
        """Hand the lock over: return a token with which another client adopts it (`sqlsem.adopt`, ``EXEC
        sqlsem.adopt``), in another process, on another host, in another language. The lock keeps its position and its
        fence, and no other request is granted in between.

        From this call on this client does not hold the lock, and its block ends without an error. A lock of several
        resources is handed over as a whole. A token is valid for one adoption.

        Args:
            ttl: How long the lock waits to be adopted, from 1 second. If no client adopts it, it is then free, as if
                its holder had died.
            to: The login of the database that may adopt it; left out, the login of this program. (The giver's login may
                always adopt it, too.)

        Raises:
            LockLost: The lock was lost before; or the outcome of the call is unknown (it was interrupted, or the
                database was out of reach). The lock is then lost here, and free at the latest after ``ttl``.
            NotHeld: The lock was released or handed over before.
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
            if exc is None or not isinstance(struck, Exception):  # as at the end of a lock's block
                raise

    def adjust(self, actual: int, *, rate: str | None = None) -> None:
        """Correct the cost of a rate that was taken with the lock (`sqlsem.all_of`); see `RateGrant.adjust`. ``rate``:
        its name, if there are several. Raises `ConfigurationError` if there is none of that name.
        """
        run_generator(adjusting(rate_of(self.rates, rate, self), actual), self._client.execute_effect)

    def release(self) -> None:
        """Release the lock, from any thread. The end of its block then does nothing.

        Raises `NotHeld` if it was released before, `LockLost` if it was lost.
        """
        release_grant(self, self.state.release_token_for(this_thread()))


def release_grant(grant: Grant, by: Permit) -> None:
    """Release the acquisition of this token, or one acquisition for a release token; raises as `Grant.release`."""
    run_generator(grant._client.registry.release(grant, by), grant._client.execute_effect)
