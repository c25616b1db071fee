"""The SQLite engine and its sessions, as `sqlsem.engines` loads them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

from sqlsem.engines import borrowed
from sqlsem.engines.base import Session
from sqlsem.engines.sqlite.database import SqliteDatabase
from sqlsem.engines.sqlite.members import SqliteMembers
from sqlsem.engines.sqlite.schema import SqliteSchema
from sqlsem.engines.sqlite.shortcuts import SqliteShortcuts
from sqlsem.engines.sqlite.task_sql import SqliteTaskSql
from sqlsem.engines.statements.all import AllStatements


class SqliteSession(SqliteShortcuts, SqliteTaskSql, SqliteSchema, SqliteMembers, AllStatements):
    """One connection with all capabilities."""


class BorrowedSqliteSession(SqliteSession):
    """A session that runs its statements by the caller's cursor."""

    def __init__(self, engine: SqliteDatabase, cursor: Any) -> None:
        self.queries = engine.queries()
        self._cursor = cursor

    def run_text(self, statement: str, parameters: Any = ()) -> Any:
        borrowed.execute(self._cursor, statement, parameters)
        return self._cursor

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the transaction is the caller's

    def run_many(self, name: str, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            self.run(name, parameter)

    def rows_of_text(self, statement: str, parameters: Any = ()) -> list[Any]:
        borrowed.execute(self._cursor, statement, parameters)
        names = borrowed.columns(self._cursor)
        return [dict(zip(names, borrowed.values(row), strict=True)) for row in self._cursor.fetchall()]


class SqliteEngine(SqliteDatabase):
    """An SQLite file, and sessions on it."""

    session_class: ClassVar[type[SqliteSession]] = SqliteSession

    def open_session(self, purpose: str) -> SqliteSession:
        session = SqliteSession(self)
        session.is_second = purpose in ("wait", "work")
        return session

    def session_on(self, cursor: Any) -> Session:
        return BorrowedSqliteSession(self, cursor)
