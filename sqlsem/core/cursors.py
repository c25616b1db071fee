"""Other people's cursors and connections, as `assert_held` is given them.

They are known by what they can do, so that nothing has to be imported.
"""

from __future__ import annotations

from typing import Any

from sqlsem.errors import ConfigurationError

__all__ = ["IDLE", "cursor_of", "refuse_autocommit", "refused"]

#: psycopg's name for a connection without a transaction (`psycopg.pq.TransactionStatus.IDLE`).
IDLE = 0
_ADVICE = (
    "it guards what is written until that transaction ends; begin one (psycopg: with connection.transaction(), Django: "
    "transaction.atomic(), SQLAlchemy: with engine.begin(); else BEGIN, or autocommit off)"
)


def cursor_of(given: Any, what: str = "assert_held") -> Any:
    """The DB-API cursor of what may be a ``Session`` or ``Connection`` of SQLAlchemy, with its transaction begun."""
    if hasattr(given, "execute") and hasattr(given, "get_bind") and callable(getattr(given, "connection", None)):
        given = given.connection()  # a Session; its transaction begins here
    if not hasattr(given, "exec_driver_sql"):
        if not callable(getattr(given, "execute", None)):
            raise ConfigurationError(f"{what} takes a cursor of the same database, not {type(given).__name__}")
        return given
    if not given.in_transaction():
        given.begin()
    proxied = given.connection
    # (That of asyncio runs its calls in a greenlet, which nobody has made here.)
    if getattr(given.dialect, "is_async", False):
        raise ConfigurationError(
            f"{what} cannot use {type(given).__name__} of SQLAlchemy with an asyncio driver; give it a cursor of "
            f"the driver's own connection"
        )
    return proxied.cursor()


def refuse_autocommit(cursor: Any, what: str = "assert_held") -> None:
    """Raise `ConfigurationError` where each statement is a transaction of its own, as far as the driver can tell."""
    connection = getattr(cursor, "connection", None)
    if connection is None:
        connection = getattr(cursor, "_conn", None)  # aiosqlite
    if connection is None:
        return
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    if status is not None:  # psycopg
        alone = bool(getattr(connection, "autocommit", False)) and status == IDLE
    elif hasattr(connection, "in_transaction"):  # sqlite3
        by_itself = connection.isolation_level is None and getattr(connection, "autocommit", None) is not False
        alone = (by_itself or getattr(connection, "autocommit", None) is True) and not connection.in_transaction
    else:
        return  # SQL Server asks for itself
    if alone:
        raise ConfigurationError(
            f"{what} was given a cursor in autocommit mode, outside of a transaction, where it protects nothing: "
            f"{_ADVICE}"
        )


def refused(exc: Exception, what: str = "assert_held") -> ConfigurationError | None:
    """What the database's own refusal means, if this is it."""
    if "sqlsem: asserting needs an open transaction" in str(exc):
        return ConfigurationError(f"{what} was given a cursor outside of a transaction: {_ADVICE}")
    return None
