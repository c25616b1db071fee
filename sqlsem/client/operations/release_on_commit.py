"""Releases a lock with the commit of the caller's transaction, and refuses cursors on another database.

The transaction pins the grant's rows, as `Grant.assert_held` does, and writes a random commit marker. Once this process
can read the marker, the transaction has committed, and the process releases the lock in the usual way. After a
rollback, also to a savepoint, there is no marker, and the lock stays held. So the lock is never released before the
commit. If this process dies in between, its locks are removed like those of any dead owner.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from sqlsem.client.effects import Call, run_generator
from sqlsem.client.held.registry import BaseGrant, ReleaseToken
from sqlsem.client.operations.backoff import backoff_delays
from sqlsem.client.operations.cursors import cursor_of, refuse_autocommit, refused
from sqlsem.engines.failures import Replaced
from sqlsem.engines.protocol import Capability
from sqlsem.util import runtime
from sqlsem.util.threads import ShouldContinue, SupervisedThread, log
from sqlsem.values.errors import ConfigurationError, SqlsemError

if TYPE_CHECKING:
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.held.registry import GrantState
    from sqlsem.engines.base import Session
    from sqlsem.util.permits import Permit

__all__ = [
    "ReleaseOnCommit",
    "is_other_database",
    "pinning",
    "releasing_on_commit",
    "require_same_database",
    "require_same_database_steps",
]

#: Seconds between two checks for the commit: at first, and at most.
FIRST_SECONDS, LONGEST_SECONDS = 0.005, 0.25
#: If more transactions than this are to release one grant, only the latest markers are checked.
MAX_MARKERS = 16


def require_same_database(client: DatabaseClient, read_identity: Callable[[], str], what: str) -> None:
    """Raise `ConfigurationError` unless the caller's cursor is on our database. ``read_identity`` returns the identity
    of the cursor's database. Blocks.
    """
    # Two attempts: the server may have been restarted between the two reads. Then the cursor's session has ended, and
    # the second call raises.
    if is_other_database(client, read_identity()) and is_other_database(client, read_identity()):
        raise _refusal(client, what)


def require_same_database_steps(client: DatabaseClient, cursor: Any, what: str) -> Generator[Any, Any, None]:
    """Check as `require_same_database` does, in steps: yields as `Engine.identity_steps` does."""
    for _ in range(2):
        if not is_other_database(client, (yield from client.engine.identity_steps(cursor))):
            return
    raise _refusal(client, what)


def _refusal(client: DatabaseClient, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} was given a cursor on another database than {client.engine.label}, where the lock or queue is: their "
        f"transactions have nothing to do with each other. Give it a cursor of that database, or connect sqlsem to "
        f"the cursor's",
        code="transaction",
    )


def is_other_database(client: DatabaseClient, theirs: str) -> bool:
    """Return True if ``theirs``, the identity of a cursor's database, is not that of the client's. Blocks."""
    engine = client.engine
    for is_second in (False, True):
        if engine.known_identity is None or is_second:  # another server may have taken over since the first read
            engine.known_identity = client.with_connection(
                lambda session: session.database_identity(), Capability.COMMIT_RELEASE
            )
        if engine.same_database(engine.known_identity, theirs):
            return False
    return True


def pinning(client: DatabaseClient, state: GrantState, cursor: Any, what: str) -> Generator[Any, Any, None]:
    """Pin the rows of a grant to the transaction of the caller's cursor, in steps (`Engine.pin_steps`)."""
    for ticket in state.tickets:
        try:
            exists = yield from client.engine.pin_steps(cursor, ticket)
        except Replaced as exc:
            client.member.mark_all_lost(str(exc))
            state.require_held()
            raise
        except Exception as exc:
            refusal = refused(exc, what)
            if refusal is None:
                raise
            raise refusal from exc
        if not exists:
            yield from require_same_database_steps(client, cursor, what)
            client.mark_lost_and_log([ticket.position], "its row is no longer in the table")
            state.require_held()


class ReleaseOnCommit:
    """Releases a grant when the caller's transaction commits; until then a thread polls for the commit."""

    def __init__(self, client: DatabaseClient, grant: BaseGrant, marker: str) -> None:
        self._client = client
        self._grant = grant
        self._markers = deque([marker], MAX_MARKERS)
        self._lock = runtime.lock()  # guards the decision which caller releases; never held during I/O
        self._stopped = False
        self._released = False
        self._thread = SupervisedThread("sqlsem-commit", self._watch, client.member.closing)
        self._discarded = runtime.event()  # set once the registry has dropped the grant
        self._ended = runtime.event()  # set once the release has ended

    def begin(self) -> None:
        """Start the thread."""
        self._thread.begin()

    def add_marker(self, marker: str) -> None:
        """Release also on this marker. (A rollback to a savepoint may undo this marker or an earlier one.)"""
        self._markers.append(marker)

    def reenter(self, token: Permit) -> bool:
        """Add an acquisition with this token, unless the grant is released. The release then waits for its end."""
        with self._lock:
            released = self._released
            reentered = not released and self._grant.state.reenter(token)
        if released:
            self._discarded.wait()  # (Soon: the thread sets it before it calls the database.)
        return reentered

    @property
    def is_under_way(self) -> bool:
        """True while the grant is being released because of the commit."""
        return self._released and not self._ended.is_set()

    def stop(self) -> threading.Event | None:
        """Stop watching the transaction. If its commit releases the grant, return an event for the end of that."""
        with self._lock:
            self._stopped = True
            return self._ended if self._released else None

    def _watch(self, should_continue: ShouldContinue) -> None:
        client, closing = self._client, self._client.member.closing
        for pause in backoff_delays(first=FIRST_SECONDS, longest=LONGEST_SECONDS):
            if closing.wait(pause) or not should_continue():
                return
            state = self._grant.state
            if self._stopped or state.released or state.why_lost is not None:
                break
            try:
                if state.depth == 1 and self._is_committed() and self._release():
                    break
            except SqlsemError as exc:
                log.info("Cannot read yet if the transaction that releases %r has committed: %s", self._grant, exc)
                if self._released:
                    break  # the grant is lost, or the next heartbeat releases it
        try:
            client.execute_effect(Call("delete_commit_marker", self._delete_markers, 1.0))
        except SqlsemError as exc:
            log.info("Could not delete a commit marker at once; it is deleted later: %s", exc)

    def _release(self) -> bool:
        """Release the grant, unless another caller does. Return False if it must stay held for now."""
        with self._lock:
            if self._stopped or self._grant.state.depth > 1:
                return self._stopped
            self._released = True
        try:
            effects = self._client.release(self._grant, ReleaseToken(), self._discarded.set)
            run_generator(effects, self._client.execute_effect)
        finally:
            self._discarded.set()
            self._ended.set()
        return True

    def _is_committed(self) -> bool:
        markers = self._markers.copy()
        return bool(
            self._client.execute_effect(
                Call("is_committed", lambda session, _: any(session.is_committed(marker) for marker in markers))
            )
        )

    def _delete_markers(self, session: Session, _: int) -> None:
        for marker in self._markers.copy():
            session.delete_commit_marker(marker)


def releasing_on_commit(client: DatabaseClient, grant: BaseGrant, given: Any) -> Generator[Any, Any, None]:
    """Carry out `Grant.release_on_commit`. Yields the results of the cursor's methods, to be awaited perhaps."""
    state, engine = grant.state, client.engine
    engine.require(Capability.COMMIT_RELEASE, "release_on_commit()")
    state.require_held()
    if state.depth > 1:
        raise ConfigurationError(
            f"{state!r} is held {state.depth} times (reentrant=True); release it from the outermost block",
            resource=state.resource,
        )
    cursor = cursor_of(given, "release_on_commit")
    refuse_autocommit(cursor, "release_on_commit")
    yield from require_same_database_steps(client, cursor, "release_on_commit")
    yield from pinning(client, state, cursor, "release_on_commit")
    marker = os.urandom(16).hex()
    yield from engine.release_on_commit(cursor, marker)
    if state.commit_release is not None:
        state.commit_release.add_marker(marker)
        return
    state.commit_release = ReleaseOnCommit(client, grant, marker)
    state.commit_release.begin()
