"""T-SQL sessions like those of an Agent job or a package: plain connections that call the routines by name.

session      ``session()`` gives a `Session` whose procedures are compiled already; lent to this test alone
new_session  ``new_session()`` opens one, to be killed or closed
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
from support import PATIENCE, Database, until


class Answer(NamedTuple):
    code: int | None
    position: int | None = None
    fence: int | None = None


class Session:
    """A connection in autocommit mode, as clients use it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.schema = database.schema
        self.connection = database.raw()
        self._threads: list[threading.Thread] = []
        (row,) = self.rows("SELECT @@SPID")
        self.spid = int(row[0])

    def rows(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return all rows of all results of a batch; ``{s}`` is the schema."""
        cursor = self.connection.cursor()
        cursor.execute(text.replace("{s}", self.schema), parameters)
        rows: list[tuple[Any, ...]] = []
        while True:
            if cursor.description is not None:
                rows += [tuple(row) for row in cursor.fetchall()]
            if not cursor.nextset():
                return rows

    def call(self, routine: str, *parameters: Any, **named: Any) -> int | None:
        """Run a routine, and return its code."""
        ((code,),) = self.rows(
            f"DECLARE @c int; EXEC @c = {{s}}.{routine} {_marks(parameters, named)}; SELECT @c",
            *parameters,
            *named.values(),
        )
        return code

    def acquire(self, *parameters: Any, routine: str = "acquire", **named: Any) -> Answer:
        (row,) = self.rows(
            f"DECLARE @c int, @p bigint, @f bigint; EXEC @c = {{s}}.{routine} {_marks(parameters, named)}, "
            f"@position = @p OUTPUT, @fence = @f OUTPUT; SELECT @c, @p, @f",
            *parameters,
            *named.values(),
        )
        return Answer(*row)

    def release(self, *parameters: Any, **named: Any) -> int | None:
        return self.call("release", *parameters, **named)

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

    def close(self) -> None:
        self.connection.close()

    def die(self) -> None:
        """Close, and return when the server has noticed: its locks are free then."""
        self.close()
        until(lambda: not self.database.rows("SELECT 1 FROM sys.dm_exec_sessions WHERE session_id = ?", self.spid))


def _marks(parameters: tuple[Any, ...], named: dict[str, Any]) -> str:
    return ", ".join(["?"] * len(parameters) + [f"@{name} = ?" for name in named])


def number_of(error: BaseException) -> int:
    """Return the server's number of an error that a driver raised."""
    import re

    return int(re.findall(r"\((\d+)\)", str(error.args[1]))[-1])


@pytest.fixture
def refused() -> Callable[[int, Callable[..., Any]], Any]:
    """``with refused(50000, "a word"): …``: the body must fail with that number, and a message with these words."""

    @contextlib.contextmanager
    def refused(number: int, words: str) -> Iterator[None]:
        import pyodbc

        with pytest.raises(pyodbc.Error) as caught:
            yield
        assert number_of(caught.value) == number, caught.value
        assert words in str(caught.value)

    return refused


_idle: list[Session] = []


@pytest.fixture
def session(database: Database, name: str) -> Iterator[Callable[[], Session]]:
    lent: list[Session] = []

    def session() -> Session:
        if _idle:
            lent.append(_idle.pop())
        else:
            lent.append(Session(database))
            # Procedures are compiled when a session first calls them.
            lent[-1].acquire(f"warm {lent[-1].spid}")
            lent[-1].release(f"warm {lent[-1].spid}")
        return lent[-1]

    yield session
    for borrowed in lent:
        borrowed.settle()
        borrowed.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
        for position, resource, requester in database.queue(name):
            borrowed.release(resource, position, requester)
        _idle.append(borrowed)
    assert database.queue(name) == [], "the test left rows in the queue"


@pytest.fixture
def new_session(database: Database) -> Iterator[Callable[[], Session]]:
    sessions: list[Session] = []

    def new_session() -> Session:
        sessions.append(Session(database))
        return sessions[-1]

    yield new_session
    for opened in sessions:
        with contextlib.suppress(Exception):  # killed by the test
            opened.close()


@pytest.fixture
def held_member(database: Database) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """``with held_member(number): …``: other writers of that member's row wait."""

    @contextlib.contextmanager
    def held_member(member: int) -> Iterator[None]:
        connection = database.raw()
        try:
            connection.execute("BEGIN TRANSACTION")
            held = connection.execute(
                f"UPDATE {database.beside('member')} SET host = host WHERE member_id = ?", member
            ).rowcount
            assert held == 1
            yield
            connection.execute("ROLLBACK TRANSACTION")
        finally:
            connection.close()

    return held_member


@pytest.fixture(scope="session", autouse=True)
def _close_idle() -> Iterator[None]:
    yield
    while _idle:
        _idle.pop().close()
