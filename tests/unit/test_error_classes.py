"""The errors of the SQL routines have the same classes and codes on PostgreSQL and SQL Server.

docs/reference/errors.md lists which SQLSTATE of PostgreSQL is which number of SQL Server. Every number that a script
raises stands there, and the Python clients of both servers raise the same class with the same ``code`` for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

import sqlsem.sql
from sqlsem.engines.mssql.engine import SqlServerSession
from sqlsem.engines.postgresql.connection import PsycopgConnection

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md"
SCRIPTS = Path(sqlsem.sql.__file__).parent
#: Scripts that no user's database has.
OTHERS = {"simulated", "certify"}
TEXT = "sqlsem: what is wrong"
#: The beginnings of messages that share their SQLSTATE with others, by the number of SQL Server.
TEXTS = {50003: "sqlsem: this connection changed sessions", 50009: "sqlsem: no priority is named for 'etl'"}


def rows() -> list[tuple[str, list[int], list[str]]]:
    """Return each row of the table of errors: its words, its numbers and its SQLSTATEs."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Calls in SQL\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[1:]  # without its head
    return [
        (words, [int(number) for number in re.findall(r"\b500\d\d\b", numbers)], re.findall(r"\b[0-9A-Z]{5}\b", states))
        for numbers, states, words in found
    ]


def raised(engine: str, pattern: str) -> set[str]:
    texts = [file.read_text(encoding="utf-8") for file in (SCRIPTS / engine).glob("*.sql") if file.stem not in OTHERS]
    return {code for text in texts for code in re.findall(pattern, text)}


def kind(error: Any) -> tuple[type[Exception], str]:
    return type(error), error.code


def kind_of_number(number: int, text: str) -> tuple[type[Exception], str]:
    engine = SimpleNamespace(label="here", clean=str, first_change_of_sessions=lambda: False)
    session: Any = SimpleNamespace(engine=engine, options=SimpleNamespace(schema="sqlsem"), lost=False)
    return kind(SqlServerSession.meaning(session, "42000", number, text))


def kind_of_state(state: str, text: str) -> tuple[type[Exception], str]:
    session: Any = SimpleNamespace(
        engine=SimpleNamespace(label="here"),
        options=SimpleNamespace(schema="sqlsem"),
        given_up=False,
        _connection=SimpleNamespace(closed=False, fileno=lambda: 5),
    )
    return kind(PsycopgConnection.translate(session, psycopg.errors.lookup(state)(text)))


def test_documented_errors_contain_every_raised_code() -> None:
    table = rows()
    numbers = {str(number) for _, listed, _ in table for number in listed}
    states = {state for _, _, listed in table for state in listed}
    assert raised("mssql", r"(?:THROW|raise_error) (5\d{4})") == numbers
    assert raised("postgresql", r"ERRCODE = '(\w{5})'") == states


@pytest.mark.parametrize(("words", "numbers", "states"), rows(), ids=lambda value: str(value)[:30])
def test_both_servers_raise_the_same_class_and_code(words: str, numbers: list[int], states: list[str]) -> None:
    text = next((TEXTS[number] for number in numbers if number in TEXTS), TEXT)
    kinds = {kind_of_number(number, text) for number in numbers} | {kind_of_state(state, text) for state in states}
    assert len(kinds) == 1, (words, kinds)
