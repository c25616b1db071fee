"""Fixtures of the tests that are only about MariaDB and MySQL."""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest
import support
from pymysql.constants import CLIENT


@pytest.fixture(autouse=True)
def _on_mariadb(engine_name: str) -> None:
    """Run where MariaDB's tests run."""


def open_plainly(url: str, **options: Any) -> Any:
    """Open a connection as a program without sqlsem does: with the driver's and the server's defaults."""
    parts = urllib.parse.urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=parts.username,
        password=urllib.parse.unquote(parts.password or ""),
        database=parts.path.lstrip("/"),
        charset="utf8mb4",
        **options,
    )


@pytest.fixture
def plain(database: support.Database) -> Iterator[Callable[..., Any]]:
    """``plain(cursorclass=…)`` opens a connection with the driver's defaults; closed at the end."""
    with contextlib.ExitStack() as stack:

        def plain(**options: Any) -> Any:
            return stack.enter_context(contextlib.closing(Closable(open_plainly(database.url, **options)))).connection

        yield plain


class Closable:
    """Closes a connection that the test may have closed."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def close(self) -> None:
        if self.connection.open:
            self.connection.close()


SEVERAL = CLIENT.MULTI_STATEMENTS
