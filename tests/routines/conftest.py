"""The common behaviour of both dialects of SQL; ``clients`` (PostgreSQL) and ``tsql`` test the differences.

session  ``session()`` gives a `SqlSession`
refused  ``with refused("55000", 50004, "words"): …``: the body must fail, on PostgreSQL with that SQLSTATE, in T-SQL
         with that number, and with a message in which that pattern is found
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
from support import Database
from support.sql_sessions import SqlSession, close_idle, lend_sessions
from support.sql_sessions import refused as refused_in


@pytest.fixture
def session(database: Database, name: str) -> Iterator[Callable[[], SqlSession]]:
    with lend_sessions(database, name) as session:
        yield session


@pytest.fixture(scope="session", autouse=True)
def _close_idle() -> Iterator[None]:
    yield
    close_idle()


@pytest.fixture
def refused(database: Database) -> Callable[[str, int, str], contextlib.AbstractContextManager[None]]:
    return functools.partial(refused_in, database)
