"""Sets and removes the note of `Grant.session`, which names the grant in the session of the caller's connection.

The triggers of guarded tables read the note at each statement, and pin the grant's row to the transaction, as
`Grant.assert_held` does. To pin it at the first write is early enough: a lost row never comes back, so a row that
exists at the write was never lost before.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from sqlsem.client.operations.cursors import IDLE
from sqlsem.values.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.held.registry import GrantState

__all__ = ["connection_of", "noting_grant", "removing_note"]

_INSTEAD = "call grant.assert_held(cursor) in each transaction instead"


def connection_of(given: Any) -> Any:
    """Return the driver's connection behind ``given``, a connection of a driver, of SQLAlchemy or of Django. Raises
    `ConfigurationError` if it is in a transaction.
    """
    if hasattr(given, "exec_driver_sql"):
        if given.in_transaction():
            raise _in_transaction()
        if getattr(given.dialect, "is_async", False):
            raise ConfigurationError(
                f"grant.session cannot use SQLAlchemy with an asyncio driver; {_INSTEAD}, or give it the driver's own "
                f"connection",
                code="transaction",
            )
        return given.connection.driver_connection
    if hasattr(given, "get_bind") or hasattr(given, "raw_connection"):
        raise ConfigurationError(
            f"A {type(given).__name__} of SQLAlchemy may use another connection in each transaction, which "
            f"grant.session cannot follow; give it a Connection (engine.connect()), or {_INSTEAD}",
            code="transaction",
        )
    if hasattr(given, "in_atomic_block") and hasattr(given, "ensure_connection"):  # Django's
        if given.in_atomic_block:
            raise _in_transaction()
        given.ensure_connection()
        return given.connection
    if not hasattr(given, "cursor") or not hasattr(given, "commit"):
        raise ConfigurationError(
            f"grant.session needs a connection (of psycopg, pyodbc, SQLAlchemy or Django), not {type(given).__name__}",
            code="transaction",
        )
    return given


def noting_grant(client: DatabaseClient, state: GrantState, connection: Any) -> Generator[Any, Any, str]:
    """Store the note of the grant in the connection's session, and return it. Yields the results of the driver's
    methods, which the API's driver may have to await.
    """
    state.require_held()
    engine = client.engine
    if _is_in_transaction(connection):
        raise _in_transaction()
    cursor = connection.cursor()
    number, stored = yield from engine.session_notes(cursor)
    if not engine.owns_session(connection, number):
        raise ConfigurationError(
            f"grant.session was given a connection that may share its session with others: a pooler is in between, or "
            f"the driver does not show the session. The note would permit their writes, too. Connect past the pooler, "
            f"or {_INSTEAD}",
            code="transaction",
        )
    entries = []
    for ticket in state.tickets:
        entry = yield from engine.session_entry(cursor, ticket)
        if not entry:
            client.mark_lost_and_log([ticket.position], "its row is no longer in the table")
            state.require_held()
        entries.append(entry)
    yield from engine.note_session(cursor, " ".join([*stored.split(), *entries]))
    yield from _commit_note(connection)
    return " ".join(entries)


def removing_note(client: DatabaseClient, connection: Any, note: str) -> Generator[Any, Any, None]:
    """Remove the note. If the connection is in a transaction that rolls back later, the note stays; once the lock is
    released, it permits nothing.
    """
    if getattr(connection, "closed", False) or _is_failed(connection):
        return
    was_in_transaction = _is_in_transaction(connection)
    cursor = connection.cursor()
    _, stored = yield from client.engine.session_notes(cursor)
    entries = stored.split()
    for entry in note.split():
        if entry in entries:
            entries.remove(entry)
    yield from client.engine.note_session(cursor, " ".join(entries))
    if not was_in_transaction:
        yield from _commit_note(connection)


def _commit_note(connection: Any) -> Generator[Any, Any, None]:
    """Commit the transaction that these statements have begun, on PostgreSQL. There a rollback would undo the note, and
    the driver shows that no transaction was open before. On SQL Server do nothing: the note outlasts a rollback, and an
    open transaction may be the caller's.
    """
    if _status(connection) is not None and not getattr(connection, "autocommit", False):
        yield connection.commit()


def _status(connection: Any) -> int | None:
    """Return psycopg's transaction status of a connection; None for drivers without one."""
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    return None if status is None else int(status)


def _is_in_transaction(connection: Any) -> bool:
    return _status(connection) not in (None, IDLE)


def _is_failed(connection: Any) -> bool:
    return _status(connection) not in (None, IDLE, 1, 2)  # 1: active; 2: in a transaction without an error


def _in_transaction() -> ConfigurationError:
    return ConfigurationError(
        "grant.session was given a connection in the middle of a transaction, whose rollback would undo the note; call "
        "it before the first statement or after a commit, or call grant.assert_held(cursor) in this transaction",
        code="transaction",
    )
