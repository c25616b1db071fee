"""The cursors and connections of programs, which `assert_held` and other calls accept.

This module recognises them by their attributes, so that no driver has to be imported.
"""

from __future__ import annotations

from typing import Any

from sqlsem.values.errors import ConfigurationError

__all__ = ["IDLE", "cursor_of", "refuse_autocommit", "refused"]

#: psycopg's status of a connection without a transaction (`psycopg.pq.TransactionStatus.IDLE`).
IDLE = 0
#: The bit of the status of a MySQL session that tells that a transaction is open.
IN_TRANSACTION = 1
_ADVICE = (
    "it guards what is written until that transaction ends; begin one (psycopg: with connection.transaction(), Django: "
    "transaction.atomic(), SQLAlchemy: with engine.begin(); else BEGIN, or autocommit off)"
)


def cursor_of(given: Any, what: str = "assert_held") -> Any:
    """Return the DB-API cursor of ``given``. For a ``Session`` or ``Connection`` of SQLAlchemy, begin its transaction
    if none is open, and return a cursor in it. ``what``: the call, for messages.
    """
    if hasattr(given, "execute") and hasattr(given, "get_bind") and callable(getattr(given, "connection", None)):
        given = given.connection()  # a Session; its transaction begins here
    if not hasattr(given, "exec_driver_sql"):
        if not callable(getattr(given, "execute", None)):
            raise ConfigurationError(f"{what} takes a cursor of the same database, not {type(given).__name__}")
        return given
    if not given.in_transaction():
        given.begin()
    proxied = given.connection
    # (An asyncio driver of SQLAlchemy needs a greenlet for its calls, and this code runs in none.)
    if getattr(given.dialect, "is_async", False):
        raise ConfigurationError(
            f"{what} cannot use {type(given).__name__} of SQLAlchemy with an asyncio driver; give it a cursor of "
            f"the driver's own connection",
            code="transaction",
        )
    return proxied.cursor()


def refuse_autocommit(cursor: Any, what: str = "assert_held") -> None:
    """Raise `ConfigurationError` if each statement would be a transaction of its own, as far as the driver shows it."""
    connection = getattr(cursor, "connection", None)
    if connection is None:
        connection = getattr(cursor, "_conn", None)  # aiosqlite
    if connection is None:
        return
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    if status is not None:  # psycopg
        in_autocommit = bool(getattr(connection, "autocommit", False)) and status == IDLE
    elif hasattr(connection, "in_transaction"):  # sqlite3
        begins_none = connection.isolation_level is None and getattr(connection, "autocommit", None) is not False
        in_autocommit = (
            begins_none or getattr(connection, "autocommit", None) is True
        ) and not connection.in_transaction
    elif hasattr(connection, "get_autocommit"):  # PyMySQL
        in_autocommit = connection.get_autocommit() and not connection.server_status & IN_TRANSACTION
    else:
        return  # the routines of SQL Server check this themselves
    if in_autocommit:
        raise ConfigurationError(
            f"{what} was given a cursor in autocommit mode, outside of a transaction, where it protects nothing: "
            f"{_ADVICE}",
            code="transaction",
        )


def refused(exc: Exception, what: str) -> ConfigurationError | None:
    """Return the error to raise if ``exc`` is the database's refusal of a call outside of a transaction; else None."""
    if "sqlsem: asserting needs an open transaction" in str(exc):
        return ConfigurationError(f"{what} was given a cursor outside of a transaction: {_ADVICE}", code="transaction")
    return None
