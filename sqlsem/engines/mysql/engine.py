"""The engine of MariaDB and MySQL and its sessions, as `sqlsem.engines` loads them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

from sqlsem.engines import borrowed
from sqlsem.engines.base import Session
from sqlsem.engines.mysql.connection import Answer, rows_of
from sqlsem.engines.mysql.database import MysqlDatabase
from sqlsem.engines.mysql.members import MysqlMembers
from sqlsem.engines.mysql.tables import MysqlTables
from sqlsem.engines.statements.all import AllStatements


class MysqlSession(MysqlTables, MysqlMembers, AllStatements):
    """One connection with all capabilities."""


class BorrowedMysqlSession(MysqlSession):
    """A session that runs its statements by the caller's cursor."""

    def __init__(self, engine: MysqlDatabase, cursor: Any) -> None:
        self.engine, self.options, self.queries = engine, engine.options, engine.queries()
        self._cursor = cursor
        self.login_name = str(self.row("facts")[0])

    def execute_text(self, text: str, parameters: Any = ()) -> Answer:
        borrowed.execute(self._cursor, text, parameters)
        return Answer(rows_of(self._cursor), [self._cursor.rowcount], self._cursor.lastrowid)

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the transaction is the caller's

    def run_many(self, name: str, parameters: Sequence[Any]) -> None:
        for one in parameters:
            self.run(name, one)


class MysqlEngine(MysqlDatabase):
    """A MariaDB or MySQL database, and sessions on it."""

    session_class: ClassVar[type[MysqlSession]] = MysqlSession

    def open_session(self, purpose: str) -> MysqlSession:
        return MysqlSession(self, self.open_connection())

    def session_on(self, cursor: Any) -> Session:
        return BorrowedMysqlSession(self, cursor)
