"""Sessions of PostgreSQL that call the routines, and wait in the background."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import psycopg

from support.databases import Database
from support.patience import PATIENCE
from support.sql_sessions import Answer, SqlSession


class Caller(SqlSession):
    """A session with at most one call that waits."""

    future: concurrent.futures.Future[Answer]

    def __init__(self, database: Database, **options: Any) -> None:
        super().__init__(database, psycopg.connect(database.url, **{"autocommit": True, **options}))

    def row(self, text: str, *parameters: Any) -> tuple[Any, ...]:
        return self.rows(text, *parameters)[0]

    def value(self, text: str, *parameters: Any) -> Any:
        return self.row(f"SELECT {text}", *parameters)[0]

    def try_(self, resource: str, **named: Any) -> Answer:
        return self.acquire(resource, routine="try", **named)

    def renew(self, *parameters: Any) -> Any:
        return self.call("renew", *parameters)

    def start(self, resource: str, **named: Any) -> Caller:
        """Start acquire in a thread."""
        self.future = self.later(self.acquire, resource, **named)
        return self

    def waits(self, seconds: float = 0.2) -> bool:
        return not concurrent.futures.wait([self.future], seconds).done

    def granted(self, timeout: float = PATIENCE) -> int:
        code, position, fence = self.future.result(timeout)
        assert code in (0, 1), code
        assert position is not None
        assert fence == position
        return position

    def failed(self, timeout: float = PATIENCE) -> BaseException:
        error = self.future.exception(timeout)
        assert error is not None, self.future.result()
        return error
