"""Sets and removes the note of `Grant.session`, which names the grant in the session of the caller's connection.

The triggers of guarded tables read the note at each statement, and pin the grant's row to the transaction, as
`Grant.assert_held` does. The first write is early enough for that: a lost row never comes back, so a row that exists at
the write was never lost before.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from sqlsem.core.client import DatabaseClient
from sqlsem.core.cursors import IDLE
from sqlsem.core.grant_registry import GrantState
from sqlsem.errors import ConfigurationError

__all__ = ["beginning", "connection_of", "ending_session"]

_INSTEAD = "call grant.assert_held(cursor) in each transaction instead"


def connection_of(given: Any) -> Any:
    """Return the driver's connection of a connection, also one of SQLAlchemy or Django, without a transaction."""
    if hasattr(given, "exec_driver_sql"):
        if given.in_transaction():
            raise _in_transaction()
        if getattr(given.dialect, "is_async", False):
            raise ConfigurationError(
                f"grant.session cannot use SQLAlchemy with an asyncio driver; {_INSTEAD}, or give it the driver's own "
                f"connection"
            )
        return given.connection.driver_connection
    if hasattr(given, "get_bind") or hasattr(given, "raw_connection"):
        raise ConfigurationError(
            f"A {type(given).__name__} of SQLAlchemy has another connection in each transaction, which grant.session "
            f"cannot know; give it a Connection (engine.connect()), or {_INSTEAD}"
        )
    if hasattr(given, "in_atomic_block") and hasattr(given, "ensure_connection"):  # Django's
        if given.in_atomic_block:
            raise _in_transaction()
        given.ensure_connection()
        return given.connection
    if not hasattr(given, "cursor") or not hasattr(given, "commit"):
        raise ConfigurationError(
            f"grant.session needs a connection (of psycopg, pyodbc, SQLAlchemy or Django), not {type(given).__name__}"
        )
    return given


def beginning(client: DatabaseClient, state: GrantState, connection: Any) -> Generator[Any, Any, str]:
    """Note the grant in the connection's session, and return the note. Yields the results of the driver's methods."""
    state.require_held()
    engine = client.engine
    if _open(connection):
        raise _in_transaction()
    cursor = connection.cursor()
    number, known = yield from engine.session_notes(cursor)
    if not engine.owns_session(connection, number):
        raise ConfigurationError(
            f"grant.session was given a connection whose session may not be its own: a pooler stands between, or the "
            f"driver does not tell; what is noted there would serve others as well. Connect past the pooler, or "
            f"{_INSTEAD}"
        )
    entries = []
    for ticket in state.tickets:
        entry = yield from engine.session_entry(cursor, ticket)
        if not entry:
            client.mark_lost_and_log([ticket.position], "its row is no longer in the table")
            state.require_held()
        entries.append(entry)
    yield from engine.note_session(cursor, " ".join([*known.split(), *entries]))
    yield from _settled(connection)
    return " ".join(entries)


def ending_session(client: DatabaseClient, connection: Any, noted: str) -> Generator[Any, Any, None]:
    """Remove the note. If the connection is in a transaction that rolls back later, the note stays; once the lock is
    released, it permits nothing.
    """
    if getattr(connection, "closed", False) or _failed(connection):
        return
    before = _open(connection)
    cursor = connection.cursor()
    _, known = yield from client.engine.session_notes(cursor)
    left = known.split()
    for entry in noted.split():
        if entry in left:
            left.remove(entry)
    yield from client.engine.note_session(cursor, " ".join(left))
    if not before:
        yield from _settled(connection)


def _settled(connection: Any) -> Generator[Any, Any, None]:
    """Commit the transaction that these statements have begun, on PostgreSQL: a rollback would undo the note there, and
    the driver shows that there was no transaction before. On SQL Server the note outlasts a rollback, and an open
    transaction may be the caller's.
    """
    if _status(connection) is not None and not getattr(connection, "autocommit", False):
        yield connection.commit()


def _status(connection: Any) -> int | None:
    """Return psycopg's transaction status of a connection; None for drivers without one."""
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    return None if status is None else int(status)


def _open(connection: Any) -> bool:
    return _status(connection) not in (None, IDLE)


def _failed(connection: Any) -> bool:
    return _status(connection) not in (None, IDLE, 1, 2)  # neither idle nor (active or) in a transaction that goes on


def _in_transaction() -> ConfigurationError:
    return ConfigurationError(
        "grant.session was given a connection in the middle of a transaction, which would take the note with it; begin "
        "it before the first statement, after a commit, or call grant.assert_held(cursor) in this transaction"
    )
