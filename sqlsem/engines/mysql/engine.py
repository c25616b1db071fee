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


class _NewerTask(Exception):
    """Another task has the key of a task that was put."""


class BorrowedMysqlSession(MysqlSession):
    """A session that runs its statements by the caller's cursor."""

    def __init__(self, engine: MysqlDatabase, cursor: Any) -> None:
        self.engine, self.options, self.queries = engine, engine.options, engine.queries()
        self._cursor = cursor
        self.login_name = str(self.row("facts")[0])

    def execute_text(self, text: str, parameters: Any = ()) -> Answer:
        """Run one statement. (The caller's connection may not take several.)"""
        borrowed.execute(self._cursor, text if parameters else text % (), parameters)
        return Answer(rows_of(self._cursor), [self._cursor.rowcount], self._cursor.lastrowid)

    def run(self, name: str, parameters: Any = ()) -> Answer:
        answer = super().run(name, parameters)
        if name == "put_task" and answer.rowcount > 1:  # it updated a row instead
            raise _NewerTask
        return answer

    def _put_with_key(self, values: dict[str, Any], before: dict[str, Any], replace: bool) -> int:
        try:
            return super()._put_with_key(values, before, replace)
        except _NewerTask:
            # The task with this key is newer than the snapshot of the caller's transaction, which sees it from here on.
            self.run("disown_task", {"uid": values["uid"]})
            return super()._put_with_key(values, before, replace)

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the transaction is the caller's

    def run_many(self, name: str, parameters: Sequence[Any]) -> None:
        for values in parameters:
            self.run(name, values)


class MysqlEngine(MysqlDatabase):
    """A MariaDB or MySQL database, and sessions on it."""

    session_class: ClassVar[type[MysqlSession]] = MysqlSession

    def open_session(self, purpose: str) -> MysqlSession:
        return MysqlSession(self, self.open_connection())

    def session_on(self, cursor: Any) -> Session:
        return BorrowedMysqlSession(self, cursor)
