"""Sessions of plain SQL, on every server with routines: the common behaviour of both dialects.

``clients`` (PostgreSQL) and ``tsql`` test the differences.

session  ``session()`` gives a `Session` refused  ``with refused("55000", 50004, "words"): …``: the body must fail, on
PostgreSQL with that SQLSTATE, in T-SQL          with that number, and with a message in which that pattern is found
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import Database, until


class Session:
    """A connection in autocommit mode."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.connection = database.raw()
        self.told: list[str] = []  # the messages of the routines
        self.dead = False
        self.tsql = database.engine == "mssql"
        if self.tsql:
            self.pid = int(self.connection.execute("SELECT @@SPID").fetchone()[0])
        else:
            self.pid = self.connection.info.backend_pid
            self.connection.add_notice_handler(lambda notice: self.told.append(notice.message_primary))

    def call(self, routine: str, *parameters: Any) -> Any:
        """Return the first row of a routine's answer, or in T-SQL its return code; a single value as itself."""
        name, marks = f"{self.database.schema}.{routine}", ", ".join("?" * len(parameters))
        if self.tsql:
            text = f"DECLARE @code int; EXEC @code = {name} {marks}; SELECT @code"
        else:
            text = f"SELECT * FROM {name}({marks})"
        row = self.rows(text, *parameters)[0]
        return row[0] if len(row) == 1 else row

    def acquire(self, resource: Any, routine: str = "acquire", **named: Any) -> tuple[Any, ...]:
        """Return (code, position, fence) of acquire or try."""
        name = f"{self.database.schema}.{routine}"
        if self.tsql:
            marks = "".join(f", @{parameter} = ?" for parameter in named)
            text = (
                f"DECLARE @c int, @p bigint, @f bigint; EXEC @c = {name} ?{marks}, @position = @p OUTPUT, "
                "@fence = @f OUTPUT; SELECT @c, @p, @f"
            )
        else:
            marks = "".join(
                f", {'concurrency_limit' if parameter == 'limit' else parameter} => ?" for parameter in named
            )
            text = f"CALL {name}(?{marks})"
        return self.rows(text, resource, *named.values())[0]

    def rows(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return all rows of all results."""
        cursor = self.connection.cursor()
        cursor.execute(self.database.sql(text), parameters)
        rows: list[tuple[Any, ...]] = []
        while True:
            if self.tsql:
                self.told += [message for _, message in cursor.messages if "sqlsem: " in message]
            if cursor.description is not None:
                rows += [tuple(row) for row in cursor.fetchall()]
            if not cursor.nextset():
                return rows

    def die(self) -> None:
        """Close, and return when the server has noticed."""
        self.dead = True
        self.connection.close()
        table = "sys.dm_exec_sessions WHERE session_id" if self.tsql else "pg_stat_activity WHERE pid"
        until(lambda: not self.database.rows(f"SELECT 1 FROM {table} = ?", self.pid))


_idle: list[Session] = []  # of T-SQL, where the first calls of a session are slow: procedures are compiled by then


@pytest.fixture
def session(database: Database) -> Iterator[Callable[[], Session]]:
    lent: list[Session] = []

    def session() -> Session:
        lent.append(_idle.pop() if database.engine == "mssql" and _idle else Session(database))
        lent[-1].told.clear()
        return lent[-1]

    yield session
    for borrowed in lent:
        if not borrowed.tsql:
            borrowed.connection.close()
        elif not borrowed.dead:
            borrowed.connection.execute("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
            _idle.append(borrowed)


@pytest.fixture(scope="session", autouse=True)
def _close_idle() -> Iterator[None]:
    yield
    while _idle:
        _idle.pop().connection.close()


@pytest.fixture
def refused(database: Database) -> Callable[[str, int, str], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def refused(sqlstate: str, number: int, words: str) -> Iterator[None]:
        if database.engine == "postgresql":
            import psycopg as driver
        else:
            import pyodbc as driver
        with pytest.raises(driver.Error) as caught:
            yield
        if database.engine == "postgresql":
            assert caught.value.sqlstate == sqlstate, caught.value
        else:
            assert re.findall(r"\((\d+)\)", str(caught.value.args[1]))[-1] == str(number), caught.value
        assert re.search(words, str(caught.value)), caught.value

    return refused
