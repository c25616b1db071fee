"""T-SQL sessions like those of an Agent job or a package: plain connections that call the routines by name.

session      ``session()`` gives a `SqlSession` whose procedures are compiled already; lent to this test alone
new_session  ``new_session()`` opens one, to be killed or closed
refused      ``with refused(50000, "a word"): …``: the body must fail with that number, and a message with these words
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest
from support import Database
from support.sql_sessions import SqlSession, close_idle, lend_sessions
from support.sql_sessions import refused as refused_in


@pytest.fixture
def session(database: Database, name: str) -> Iterator[Callable[[], SqlSession]]:
    with lend_sessions(database, name) as session:
        yield session
    assert database.queue(name) == [], "the test left rows in the queue"


@pytest.fixture
def refused(database: Database) -> Callable[[int, str], contextlib.AbstractContextManager[None]]:
    return lambda number, words: refused_in(database, "", number, re.escape(words))


@pytest.fixture
def new_session(database: Database) -> Iterator[Callable[[], SqlSession]]:
    sessions: list[SqlSession] = []

    def new_session() -> SqlSession:
        sessions.append(SqlSession(database))
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
    close_idle()
