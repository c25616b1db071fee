"""The numbers of SQL Server's errors: one table in Python and in .NET, and each number through both clients.

A fake server raises each number once, when a lock is requested. After a transient error the request must be
granted all the same; for any other error, the caller must get the exception of its kind.
"""

from __future__ import annotations

import re

import pytest
from support import PATIENCE
from tdsserver import failure, member, result

import sqlsem
from clients.mixed import dotnet
from sqlsem import ConfigurationError, SchemaError
from sqlsem.engines.mssql import errors

#: The sets of both tables, by their names in C# and Python.
TABLES = {
    "Busy": errors.BUSY_NUMBERS,
    "Lost": errors.LOST_NUMBERS,
    "Missing": errors.MISSING_NUMBERS,
    "Denied": errors.DENIED_NUMBERS,
    "Role": errors.ROLE_NUMBERS,
    "ReadOnly": errors.READ_ONLY_NUMBERS,
    "Vague": errors.VAGUE,
}
#: Kind of number → exceptions of the client and of .NET; None where the caller gets the lock.
MEANINGS = {
    "Busy": (None, None),
    "Lost": (None, None),
    "ReadOnly": (None, None),
    "Missing": (SchemaError, "SqlSemSchemaException"),
    "Denied": (ConfigurationError, "SqlSemConfigurationException"),
    "Role": (ConfigurationError, "SqlSemConfigurationException"),
}
OURS_CHANGED = "sqlsem: this connection changed sessions under its member"
NUMBERS = [(kind, number) for kind in MEANINGS for number in sorted(TABLES[kind])]
#: Numbers of sqlsem itself; test_odbc.py raises those of Python's `SqlServerConnection.meaning`.
OURS = {
    50001: "SqlSemConfigurationException",
    50002: None,
    50005: None,  # just removed: it reconnects as a new member
    50006: "SqlSemConfigurationException",
    -2: None,  # SqlClient's own timeout: the stopped statement is sent again
    50008: "SqlSemConfigurationException",
    50009: "SqlSemConfigurationException",
    50000: "SqlSemUnavailableException",  # without a text of sqlsem: a trigger of the user
}


def numbers_of_dotnet() -> dict[str, frozenset[int]]:
    """Return the sets in SqlSem.cs."""
    (table,) = re.findall(r"(?s)class SqlSemNumbers\n\{(.*?)\n\}", dotnet.CLIENT.read_text(encoding="utf-8"))
    found = re.findall(r"(?s)HashSet<int> (\w+) =.*?\{(.*?)\}", table)
    return {name: frozenset(map(int, re.findall(r"\d+", numbers))) for name, numbers in found}


def test_tables_of_python_and_dotnet_are_the_same():
    assert numbers_of_dotnet() == TABLES


def test_every_number_has_a_single_meaning():
    numbers = [number for table in TABLES.values() for number in table]
    assert len(numbers) == len(set(numbers))


def raises_once(number, routine="register", severity=16):
    """Return the answers of a database with a routine that fails at its first call."""
    whole, left = member(), [number]

    def answer(said):
        if "@@ERROR" in said.text:
            return result(("",), (number,))
        if f".{routine} " in said.text and left:
            return failure(left.pop(), "what the server says", severity)
        return whole(said)

    return answer, left


@pytest.mark.parametrize(("kind", "number"), NUMBERS)
def test_python_acquires_or_raises(tds, url_of, kind, number):
    answer, left = raises_once(number)
    expected, _ = MEANINGS[kind]
    with sqlsem.connect(url_of(tds(answer)), retry=PATIENCE) as coordinator:
        if expected is None:
            with coordinator.mutex("a"):
                assert not left
        else:
            with pytest.raises(expected, match=str(number)), coordinator.mutex("a"):
                raise AssertionError("granted")


# -- .NET -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def agent(converse):
    """Run the client's commands on a server with these answers, and return its events after the first."""

    def agent(answer, *commands):
        return converse(answer, *commands, seconds=300)[1][1:]

    return agent


class Raising:
    """A database whose register fails once by the number that the statement ``SELECT 'next', N`` has named."""

    def __init__(self, severity=16):
        self.next, self.severity, self.whole = None, severity, member()

    def __call__(self, said):
        if found := re.match(r"SELECT 'next', (-?\d+)", said.text):
            self.next = int(found[1])
            return result(("",), (0,))
        if ".register " in said.text and self.next is not None:
            number, self.next = self.next, None
            return failure(number, "what the server says", self.severity)
        return self.whole(said)


def acquired(agent, numbers, **words):
    """Return the class of the exception (None: the lock was granted) for each number."""
    commands = [{"do": "acquire", "name": "first"}]
    for number in numbers:
        commands += [
            {"do": "execute", "text": f"SELECT 'next', {number}"},
            {"do": "acquire", "name": f"n{number}", "timeout": "60", **words},
            {"do": "release"},
        ]
    found = [event for event in agent(Raising(), *commands) if event["event"] not in ("executed", "released")][1:]
    assert len(found) == len(numbers), found
    return {
        number: event["error"] if event["event"] == "failed" else None
        for number, event in zip(numbers, found, strict=True)
    }


def test_dotnet_acquires_or_raises(agent):
    expected = {number: MEANINGS[kind][1] for kind, number in NUMBERS}
    assert acquired(agent, list(expected)) == expected


def test_dotnet_understands_our_own_numbers(agent):
    assert acquired(agent, list(OURS)) == OURS


@pytest.mark.parametrize("routine", ["release", "heartbeat"])
def test_dotnet_repeats_a_busy_call(agent, routine):
    whole, left = member(), []
    step = "release" if routine == "release" else "check"

    def answer(said):
        return failure(left.pop(), "what the server says") if f".{routine} " in said.text and left else whole(said)

    def fill(said):
        if found := re.match(r"SELECT 'next', (-?\d+)", said.text):
            left.append(int(found[1]))
            return result(("",), (0,))
        return answer(said)

    numbers = sorted(errors.BUSY_NUMBERS)
    steps = []
    for number in numbers:
        steps += [{"do": "acquire", "name": "books"}, {"do": "execute", "text": f"SELECT 'next', {number}"}]
        steps += [{"do": step}, {"do": "release"}]
    found = [event["event"] for event in agent(fill, *steps) if event["event"] not in ("executed", "granted")]
    assert found == ["released" if routine == "release" else "held", "released"] * len(numbers)
    assert not left


@pytest.mark.parametrize(("number", "event"), [(-2, "released"), (40501, "released"), (1205, "failed")])
def test_dotnet_takes_a_release_that_was_not_answered_for_done(agent, number, event):
    """At the second attempt the row is gone: the first one removed it, unless it was a deadlock's victim."""
    answers = [failure(number, "what the server says"), result(("code",), (-1,))]
    found = agent(member(release=lambda _: answers.pop(0)), {"do": "acquire", "name": "books"}, {"do": "release"})
    assert found[1]["event"] == event
    assert not answers


def test_dotnet_enrols_again_where_its_session_changed_once(agent):
    whole, left = member(), [50003]

    def answer(said):
        return failure(left.pop(), OURS_CHANGED) if ".heartbeat " in said.text and left else whole(said)

    found = agent(answer, {"do": "acquire", "name": "books"}, {"do": "release"})
    assert [event["event"] for event in found] == ["granted", "released"]
    left += [50003] * 4
    found = agent(answer, {"do": "acquire", "name": "books"})
    assert found[0]["error"] == "SqlSemConfigurationException"


def test_dotnet_names_the_role_of_the_locks(agent):
    found = agent(
        Raising(), {"do": "execute", "text": "SELECT 'next', 1202"}, {"do": "acquire", "name": "books", "timeout": "5"}
    )
    assert "ALTER ROLE sqlsem_locks ADD MEMBER" in found[1]["message"]
    assert "sqlsem init" not in found[1]["message"]


def test_dotnet_tells_a_session_that_ended(agent):
    """An error that ends the session: the caller decides about the next step."""
    found = agent(
        Raising(severity=20), {"do": "execute", "text": "SELECT 'next', 596"}, {"do": "acquire", "name": "books"}
    )
    failed = [event for event in found if event["event"] == "failed"]
    assert [event["error"] for event in failed] == ["SqlSemUnavailableException"]
    assert "connect and ask again" in failed[0]["message"]


def test_dotnet_declares_all_texts_by_the_same_size(agent):
    seen = []

    def answer(said, whole=member()):  # noqa: B008
        seen.append(said)
        return whole(said)

    agent(
        answer,
        *(
            step
            for length in (1, 9, 200)
            for step in ({"do": "acquire", "name": "x" * length, "note": "y" * length}, {"do": "release"})
        ),
    )
    texts = {message.types for message in seen if ".register " in message.text}
    assert len(texts) == 1, texts
    assert set(re.findall(r"nvarchar\((\w+)\)", texts.pop())) == {"4000"}
