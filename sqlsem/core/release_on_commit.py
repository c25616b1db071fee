"""Releases a lock with the commit of the caller's transaction, and refuses cursors on another database.

The transaction pins the grant's rows, as `Grant.assert_held` does, and writes a random commit marker. Once this process
can read the marker, the transaction has committed, and the process releases the lock in the usual way. After a
rollback, also to a savepoint, there is no marker, and the lock stays held. So the lock is never released before the
commit. If this process dies in between, its locks are removed as those of any dead owner.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from sqlsem import runtime
from sqlsem.core.backoff import backoff_delays
from sqlsem.core.client import DatabaseClient
from sqlsem.core.cursors import cursor_of, refuse_autocommit, refused
from sqlsem.core.effects import Call, run_generator
from sqlsem.core.grant_registry import BaseGrant, ReleaseToken
from sqlsem.core.permits import Permit
from sqlsem.core.threads import ShouldContinue, SupervisedThread, safe_logger
from sqlsem.engines.base import Session
from sqlsem.engines.commit_release import CommitReleaseSession
from sqlsem.errors import ConfigurationError, SqlsemError

__all__ = ["ReleaseOnCommit", "elsewhere", "here", "leaving", "placed"]

log = safe_logger

#: Seconds between two checks for the commit: at first, and at most.
FIRST_SECONDS, LONGEST_SECONDS = 0.005, 0.25
#: If a grant was to be released by more transactions than this, only the latest markers are checked.
MAX_WORDS = 16


def here(client: DatabaseClient, where: Callable[[], str], what: str) -> None:
    """Raise `ConfigurationError` if ``where()``, the database identity of the caller's cursor, is not our database's.
    Blocks.
    """
    # Two attempts: if the server was restarted meanwhile, the cursor's session has ended, and the second one raises.
    if elsewhere(client, where()) and elsewhere(client, where()):
        raise _refusal(client, what)


def placed(client: DatabaseClient, cursor: Any, what: str) -> Generator[Any, Any, None]:
    """Check as `here` does, for a cursor whose methods may be awaitable. Yields as `Engine.identity_steps` does."""
    for _ in range(2):
        if not elsewhere(client, (yield from client.engine.identity_steps(cursor))):
            return
    raise _refusal(client, what)


def _refusal(client: DatabaseClient, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} was given a cursor on another database than {client.engine.label}, where the lock or queue is: their "
        f"transactions have nothing to do with each other. Give it a cursor of that database, or connect sqlsem to "
        f"the cursor's"
    )


def elsewhere(client: DatabaseClient, theirs: str) -> bool:
    """True if a cursor is on another database than the client. Blocks."""
    engine = client.engine
    for again in (False, True):
        if engine.known_identity is None or again:  # another server may have taken over
            engine.known_identity = client.with_connection(
                lambda session: session.database_identity(), CommitReleaseSession
            )
        if engine.same_database(engine.known_identity, theirs):
            return False
    return True


class ReleaseOnCommit:
    """Releases a grant when the caller's transaction commits; until then a thread polls for the commit."""

    def __init__(self, client: DatabaseClient, grant: BaseGrant, word: str) -> None:
        self._client = client
        self._grant = grant
        self._words = deque([word], MAX_WORDS)
        self._lock = runtime.lock()  # of the decision which caller releases; never held during I/O
        self._settled = False
        self._left = False
        self._thread = SupervisedThread("sqlsem-leaving", self._watch, client.member.closing)
        self._parted = runtime.event()  # set once the registry has dropped the grant

    def begin(self) -> None:
        """Start the thread."""
        self._thread.begin()

    def add_marker(self, word: str) -> None:
        """Release on this marker, too: a savepoint may undo the earlier one, or only that one may be committed."""
        self._words.append(word)

    def reenter(self, token: Permit) -> bool:
        """Reenter the grant with this token, unless it is released. It is then not released before the token is."""
        with self._lock:
            left = self._left
            there = not left and self._grant.state.reenter(token)
        if left:
            self._parted.wait()  # as below
        return there

    def stop(self) -> bool:
        """Stop watching the transaction. Return True if it has released the grant."""
        with self._lock:
            self._settled = True
            left = self._left
        if left:
            self._parted.wait()  # (set before the call of the database)
        return left

    def _watch(self, should_continue: ShouldContinue) -> None:
        client, closing = self._client, self._client.member.closing
        for pause in backoff_delays(first=FIRST_SECONDS, longest=LONGEST_SECONDS):
            if closing.wait(pause) or not should_continue():
                return
            state = self._grant.state
            if self._settled or state.released or state.why_lost is not None:
                break
            try:
                if state.depth == 1 and self._is_committed() and self._leave():
                    break
            except SqlsemError as exc:
                log.info("Whether %r has left with its transaction is not known yet: %s", self._grant, exc)
                if self._left:
                    break  # the grant is lost, or the next heartbeat releases it
        try:
            client.execute_effect(Call("delete_commit_marker", self._forget, 1.0))
        except SqlsemError as exc:
            log.info("A word that a transaction left is removed later: %s", exc)

    def _leave(self) -> bool:
        """Release the grant, unless another caller does. Return False if it must stay for now."""
        with self._lock:
            if self._settled or self._grant.state.depth > 1:
                return self._settled
            self._left = True
        try:
            effects = self._client.registry.release_now(self._grant, ReleaseToken(), self._parted.set)
            run_generator(effects, self._client.execute_effect)
        finally:
            self._parted.set()
        return True

    def _is_committed(self) -> bool:
        words = self._words.copy()
        return bool(
            self._client.execute_effect(
                Call("is_committed", lambda session, _: any(session.is_committed(word) for word in words))
            )
        )

    def _forget(self, session: Session, _: int) -> None:
        for word in self._words.copy():
            session.delete_commit_marker(word)


def leaving(client: DatabaseClient, grant: BaseGrant, given: Any) -> Generator[Any, Any, None]:
    """Run `Grant.release_on_commit`. Yields the results of the cursor's methods, for a driver to await."""
    state, engine = grant.state, client.engine
    engine.require(CommitReleaseSession, "release_on_commit()")
    state.require_held()
    if state.depth > 1:
        raise ConfigurationError(
            f"{state!r} is held {state.depth} times (reentrant=True); release it from the outermost block",
            resource=state.resource,
        )
    cursor = cursor_of(given, "release_on_commit")
    refuse_autocommit(cursor, "release_on_commit")
    yield from placed(client, cursor, "release_on_commit")
    for ticket in state.tickets:
        try:
            there = yield from engine.pin_steps(cursor, ticket)
        except Exception as exc:
            refusal = refused(exc, "release_on_commit")
            if refusal is None:
                raise
            raise refusal from exc
        if not there:
            client.mark_lost_and_log([ticket.position], "its row is no longer in the table")
            state.require_held()
    word = secrets.token_hex(16)
    yield from engine.release_on_commit(cursor, word)
    if state.commit_release is not None:
        state.commit_release.add_marker(word)
        return
    state.commit_release = ReleaseOnCommit(client, grant, word)
    state.commit_release.begin()
