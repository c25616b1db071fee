"""The errors of the SQL routines have the same classes, codes and resources on PostgreSQL and SQL Server.

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
from support.procedures import messages

import sqlsem.sql
from sqlsem.engines.answers import name_resource
from sqlsem.engines.mssql.engine import SqlServerSession
from sqlsem.engines.mssql.errors import OUR_WORDS
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


def error_of_number(number: int, text: str) -> Any:
    engine = SimpleNamespace(label="here", clean=str, first_change_of_sessions=lambda: False)
    session: Any = SimpleNamespace(engine=engine, options=SimpleNamespace(schema="sqlsem"), lost=False)
    return SqlServerSession.meaning(session, "42000", number, text)


def error_of_state(state: str, text: str) -> Any:
    session: Any = SimpleNamespace(
        engine=SimpleNamespace(label="here"),
        options=SimpleNamespace(schema="sqlsem"),
        given_up=False,
        _connection=SimpleNamespace(closed=False, fileno=lambda: 5),
    )
    return PsycopgConnection.translate(session, psycopg.errors.lookup(state)(text))


def test_documented_errors_contain_every_raised_code() -> None:
    table = rows()
    numbers = {str(number) for _, listed, _ in table for number in listed}
    states = {state for _, _, listed in table for state in listed}
    assert raised("mssql", r"(?:THROW|raise_error) (5\d{4})") == numbers
    assert raised("postgresql", r"ERRCODE = '(\w{5})'") == states


def test_words_of_a_message_stand_for_its_number() -> None:
    """Some drivers report no numbers; then the beginning of a message decides."""
    assert len(messages()) > 250
    for message in messages():
        known = {number for number, words in OUR_WORDS if re.match(words, message.text)}
        assert known <= message.numbers, message


@pytest.mark.parametrize(("words", "numbers", "states"), rows(), ids=lambda value: str(value)[:30])
def test_both_servers_raise_the_same_class_and_code(words: str, numbers: list[int], states: list[str]) -> None:
    text = next((TEXTS[number] for number in numbers if number in TEXTS), TEXT)
    kinds = {kind(error_of_number(number, text)) for number in numbers}
    kinds |= {kind(error_of_state(state, text)) for state in states}
    assert len(kinds) == 1, (words, kinds)


#: Refusals of calls that pass the checks of the client: the code, the number of SQL Server, and the words of SQL Server
#: and of PostgreSQL (None: the same), with % for the name. (PostgreSQL's SQLSTATE is 22023.
#: tests/conformance/test_refusals.py makes these calls.)
REFUSALS = [
    ("configuration", 50008, "no limit is set for %, and the request names none", None),
    (
        "configuration",
        50008,
        "no limit is set for %, and the task names none",
        "no limit is set for %, and the request",
    ),
    ("configuration", 50008, " requests (on % first) name no limit and count on this one", None),
    ("priority", 50009, "no priority is named for %, which is granted by priority", None),
    ("priority", 50009, "no priorities are set for %, and the request names one", None),
    ("rate", 50008, "no limit is set for %; name a limit", "no limit is set for %"),
    ("rate", 50000, "% is asked for ", None),
    ("rate", 50000, "programs have declared 40 windows for % within these windows", None),
    ("rate", 50000, "this rate has limits for 10 windows", "% has limits for 10 windows"),
]


def says(engine: str, words: str) -> bool:
    """Return True if a script has a message with these words."""
    value = r"(?:%|''', @\w+, N''')" if engine == "mssql" else "%"
    pattern = value.join(re.escape(part) for part in words.split("%"))
    return any(re.search(pattern, file.read_text(encoding="utf-8")) for file in (SCRIPTS / engine).glob("*.sql"))


@pytest.mark.parametrize(("code", "number", "words", "other_words"), REFUSALS)
def test_both_servers_refuse_with_the_same_code_and_resource(
    code: str, number: int, words: str, other_words: str | None
) -> None:
    assert says("mssql", words)
    assert says("postgresql", other_words or words)
    name = "rate:it's" if code == "rate" else "it's"
    texts = words.replace("%", f"'{name}'"), (other_words or words).replace("%", "'" + name.replace("'", "''") + "'")
    errors = error_of_number(number, f"sqlsem: {texts[0]}"), error_of_state("22023", f"sqlsem: {texts[1]}")
    # (Of several names only the text tells which was refused.)
    names = [name] if "%" not in words else ["'", "s", name]
    for error in errors:
        assert kind(error) == (sqlsem.ConfigurationError, code), error
        name_resource(error, names)
        assert error.resource == name, error
