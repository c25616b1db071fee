"""Sessions of plain SQL, on every server with routines."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest

from support import procedures
from support.databases import Database
from support.patience import PATIENCE, until

#: The parameters that have another name in T-SQL.
POSTGRESQL_NAMES = {"limit": "concurrency_limit"}


class Answer(NamedTuple):
    """The answer of acquire, try or once_begin."""

    code: int | None
    position: int | None = None
    fence: int | None = None


class SqlSession:
    """A connection in autocommit mode, which calls the routines by name: psql, an Agent job, a package.

    Attributes:
        pid: The server's number of the session.
        told: The messages of the routines.
    """

    def __init__(self, database: Database, connection: Any = None) -> None:
        self.database = database
        self.connection = database.raw() if connection is None else connection
        self.told: list[str] = []
        self.dead = False
        self.tsql = database.engine == "mssql"
        self._threads: list[threading.Thread] = []
        if self.tsql:
            self.pid = int(self.connection.execute("SELECT @@SPID").fetchone()[0])
        else:
            self.pid = self.connection.info.backend_pid
            self.connection.add_notice_handler(lambda notice: self.told.append(notice.message_primary))

    def rows(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return all rows of all results of a text; ``{s}`` is the schema."""
        cursor = self.connection.cursor()
        cursor.execute(self.database.sql(text.replace("{s}", self.database.schema)), parameters)
        rows: list[tuple[Any, ...]] = []
        while True:
            if self.tsql:
                self.told += [message for _, message in cursor.messages or () if "sqlsem: " in message]
            if cursor.description is not None:
                rows += [tuple(row) for row in cursor.fetchall()]
            if not cursor.nextset():
                return rows

    def _marks(self, parameters: tuple[Any, ...], named: dict[str, Any]) -> str:
        marks = ["?"] * len(parameters)
        for name in named:
            marks.append(f"@{name} = ?" if self.tsql else f'"{POSTGRESQL_NAMES.get(name, name)}" => ?')
        return ", ".join(marks)

    def call(self, routine: str, *parameters: Any, **named: Any) -> Any:
        """Return the first row of a routine's answer; in T-SQL its return code if there is no row. A single value is
        returned as itself.
        """
        if self.tsql:
            text = f"DECLARE @c int; EXEC @c = {{s}}.{routine} {self._marks(parameters, named)}; SELECT @c"
            row = self.rows(text, *parameters, *named.values())[0]
        else:
            row = self.listed(routine, *parameters, **named)[0]
        return row[0] if len(row) == 1 else row

    def listed(self, routine: str, *parameters: Any, **named: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a routine's answer."""
        marks = self._marks(parameters, named)
        text = f"EXEC {{s}}.{routine} {marks}" if self.tsql else f"SELECT * FROM {{s}}.{routine}({marks})"
        return self.rows(text, *parameters, *named.values())

    def run(self, routine: str, *parameters: Any) -> None:
        """Run a routine that answers nothing."""
        marks = self._marks(parameters, {})
        self.rows(f"EXEC {{s}}.{routine} {marks}" if self.tsql else f"CALL {{s}}.{routine}({marks})", *parameters)

    def outputs(self, routine: str, types: dict[str, str], *parameters: Any, **named: Any) -> tuple[Any, ...]:
        """Return the output parameters of a procedure, by their types in T-SQL; ``code``: its return code there."""
        marks = self._marks(parameters, named)
        if not self.tsql:
            return self.rows(f"CALL {{s}}.{routine}({marks})", *parameters, *named.values())[-1]
        declared = ", ".join(f"@{name} {type_}" for name, type_ in types.items())
        code = "@code = " if "code" in types else ""
        outputs = "".join(f", @{name} = @{name} OUTPUT" for name in types if name != "code")
        answer = ", ".join(f"@{name}" for name in types)
        text = f"DECLARE {declared}; EXEC {code}{{s}}.{routine} {marks}{outputs}; SELECT {answer}"
        return self.rows(text, *parameters, *named.values())[-1]

    def acquire(self, *parameters: Any, routine: str = "acquire", **named: Any) -> Answer:
        types = {"code": "int", "position": "bigint", "fence": "bigint"}
        return Answer(*self.outputs(routine, types, *parameters, **named))

    def release(self, *parameters: Any, **named: Any) -> int | None:
        code: int | None = self.call("release", *parameters, **named)
        return code

    @contextlib.contextmanager
    def rolled_back(self) -> Iterator[None]:
        """Run the body in a transaction, and roll that back, unless its end has come already."""
        self.rows("BEGIN TRANSACTION")
        yield
        self.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION" if self.tsql else "ROLLBACK")

    def later(self, function: Callable[..., Any], *parameters: Any, **named: Any) -> Future[Any]:
        """Call one of the methods above in a thread of its own, for calls that wait."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*parameters, **named))
            except BaseException as exc:
                future.set_exception(exc)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return future

    def waiting(self, resource: str, *parameters: Any, **named: Any) -> Future[Any]:
        """Start an acquire that waits, and return when its row is in the queue."""
        before = len(self.database.queue(resource))
        future = self.later(self.acquire, resource, *parameters, **named)
        until(lambda: future.done() or len(self.database.queue(resource)) > before, "the row in the queue")
        return future

    def settle(self) -> None:
        """Wait for the calls in threads."""
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a call in this session has not ended"
        self._threads.clear()

    def kill(self, victim: SqlSession) -> None:
        victim.dead = True
        self.rows(f"KILL {victim.pid}" if self.tsql else f"SELECT pg_terminate_backend({victim.pid})")

    def close(self) -> None:
        self.dead = True
        if not self.tsql and any(thread.is_alive() for thread in self._threads):
            self.connection.cancel()
            self.settle()
        self.connection.close()

    def die(self) -> None:
        """Close, and return when the server has noticed: its locks are free then."""
        self.close()
        table = "sys.dm_exec_sessions WHERE session_id" if self.tsql else "pg_stat_activity WHERE pid"
        until(lambda: not self.database.rows(f"SELECT 1 FROM {table} = ?", self.pid))


#: Sessions of T-SQL: procedures are compiled when a session first calls them, which takes time.
_idle: list[SqlSession] = []


@contextlib.contextmanager
def lend_sessions(database: Database, name: str) -> Iterator[Callable[[], SqlSession]]:
    """Yield a function that lends sessions; at the end they leave no row of the resources that begin with ``name``."""
    lent: list[SqlSession] = []

    def session() -> SqlSession:
        if database.engine == "mssql" and _idle:
            lent.append(_idle.pop())
        else:
            lent.append(SqlSession(database))
            if lent[-1].tsql:
                lent[-1].acquire(f"warm {lent[-1].pid}")
                lent[-1].release(f"warm {lent[-1].pid}")
        lent[-1].told.clear()
        return lent[-1]

    yield session
    for borrowed in lent:
        if borrowed.dead:
            continue
        if not borrowed.tsql:
            borrowed.close()
            continue
        borrowed.settle()
        borrowed.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
        for position, resource, requester in database.queue(name):
            borrowed.release(resource, position, requester)
        _idle.append(borrowed)


def close_idle() -> None:
    while _idle:
        _idle.pop().close()


@contextlib.contextmanager
def refused(database: Database, sqlstate: str, number: int, words: str) -> Iterator[None]:
    """Assert that the body fails with that SQLSTATE on PostgreSQL, and with that number in T-SQL.

    The pattern ``words`` must be found in the message. On PostgreSQL, the number must be one of those that T-SQL raises
    with a message that begins as this one.
    """
    if database.engine == "postgresql":
        import psycopg as driver
    else:
        import pyodbc as driver
    with pytest.raises(driver.Error) as caught:
        yield
    if database.engine == "postgresql":
        assert caught.value.sqlstate == sqlstate, caught.value
        numbers = procedures.numbers_of(caught.value.diag.message_primary or "")
        assert number in (numbers or {number}), f"T-SQL raises {numbers}: {caught.value}"
    else:
        assert number_of(caught.value) == number, caught.value
    assert re.search(words, str(caught.value)), caught.value


def number_of(error: BaseException) -> int:
    """Return SQL Server's number of an error that the driver raised."""
    return int(re.findall(r"\((\d+)\)", str(error.args[1]))[-1])
