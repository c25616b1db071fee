"""Fixtures of the tests that are only about MariaDB and MySQL."""

from __future__ import annotations

import functools
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest
import support


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
def plain_on() -> Iterator[Callable[..., Any]]:
    """``plain_on(url, cursorclass=…)`` opens a connection with the driver's defaults; closed at the end."""
    connections: list[Any] = []

    def plain_on(url: str, **options: Any) -> Any:
        connections.append(open_plainly(url, **options))
        return connections[-1]

    yield plain_on
    for connection in connections:
        if connection.open:
            connection.close()


@pytest.fixture
def plain(database: support.Database, plain_on: Callable[..., Any]) -> Callable[..., Any]:
    """``plain(cursorclass=…)`` opens one on the test's database."""
    return functools.partial(plain_on, database.url)
